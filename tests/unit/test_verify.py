"""Graphs, engines and changed models are compared with the reference's answers."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from enginesmith.calibration.dataset import Dataset
from enginesmith.calibration.options import DataOptions
from enginesmith.pipeline.artifact import Artifact, HistoryEntry
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.onnxruntime.session import OnnxRuntimeSession
from enginesmith.pipeline.errors import FidelityError, ModelError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.fidelity import compare, describe_failure, thresholds_for
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.rounding import FINE, spread_bits
from enginesmith.pipeline.frameworks.samples import Case, Samples
from enginesmith.pipeline.measure.rows import StageFidelity
from enginesmith.pipeline.passes.export.sizes import SizeLimit, describe_limits
from enginesmith.pipeline.report.tables import describe_pass
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import read_models, read_records, scratch_artifact
from enginesmith.pipeline.tasks.examples import put_telling_first
from enginesmith.pipeline.tasks.mixed_precision import Goal
from enginesmith.pipeline.tasks.tune import ENGINE, Tune
from enginesmith.pipeline.tasks.verify import Answers, Sample, Verify
from enginesmith.pipeline.tensors import Feeds, Signature, TensorSpec
from graphs import normal, parse_graph, save_operator


def test_a_graph_that_is_bad_on_some_samples_is_rejected_at_batch_1(tmp_path: Path) -> None:
    rows = np.ones((20, 3), np.float32)
    rows[5] = 10.0  # what saturates at 4 is right on the first sample, and on all but this one
    np.savez(tmp_path / "data.npz", x=rows)
    (reference := tmp_path / "reference").mkdir()
    engine = OnnxRuntime(graph_optimization="disabled")
    data = str(tmp_path / "data.npz")
    sample = Sample(engine=engine, ranges={}, batches=(1,), data=data, data_options=DataOptions(), seed=0)
    effect = sample.run({"model": save_operator(tmp_path / "float.onnx", "Identity")}, reference, lambda _: None)
    assert effect.summary.startswith("1 set of feeds from ")
    judged = Artifact(kind="reference", path=reference / effect.file, sha256="", bytes=0)
    measured = samples.read_arrays(reference, "feeds", 0)["x"]
    assert measured.tolist() == rows[:1].tolist()  # what is measured is one sample as before
    for name, most, passed in (("good", 10.0, True), ("bad", 4.0, False)):
        (out := tmp_path / name).mkdir()
        verify = Verify(stage="engine", engine=engine, device=Device(), precision="int8", min_sqnr_db=None)
        made = save_operator(tmp_path / f"{name}.onnx", "Clip", -most, most)
        effect = verify.run({"model": made, "reference": judged}, out, lambda _: None)
        assert (effect.rejected == "") is passed
        assert effect.summary == f"SQNR at least {'200.0' if passed else '4.7'} dB"
        entries = read_records(Artifact(kind="record", path=out / effect.file, sha256="", bytes=0))
        assert [entry["passed"] for entry in entries] == [passed] * 3


def test_a_graph_with_another_shape_at_some_sizes_is_rejected_as_one_with_other_numbers(tmp_path: Path) -> None:
    """Graphs of the first piece of a batch are such; a model that is pruned on purpose has to have the shape."""
    cases = tuple(Case(points=(point,), sizes={"batch": size}, batch=size) for point, size in (("min", 2), ("max", 3)))
    samples.write(tmp_path, Samples(data="x", ranges={}, cases=cases))
    for index, case in enumerate(cases):
        samples.write_arrays(tmp_path, "feeds", index, {"x": np.ones((2, 3), np.float32)})
        samples.write_arrays(tmp_path, "outputs", index, {"y": np.ones((case.batch, 3), np.float32)})
    judged = Artifact(kind="reference", path=tmp_path / samples.RECORD, sha256="", bytes=0)
    inputs = {"model": save_operator(tmp_path / "graph.onnx", "Identity"), "reference": judged}
    verify = Verify(stage="export", engine=OnnxRuntime(), device=Device(), precision="fp32", min_sqnr_db=None)
    rejected = verify.run(inputs, tmp_path, lambda _: None).rejected
    assert rejected.startswith("after export at max (batch 3): output 'y' is float32[2, 3], and the reference's is ")
    assert "perhaps the module decides by a size" in rejected
    with pytest.raises(FidelityError, match="output 'y' is"):
        verify.model_copy(update={"judged": False}).run(inputs, tmp_path, lambda _: None)


def test_an_export_that_is_right_at_other_sizes_names_its_sizes_and_the_cause(tmp_path: Path) -> None:
    """The reference is doubled from two rows on, as by an ``if`` in the module; the graph answers its input."""
    cases = tuple(Case(points=(point,), sizes={"batch": size}, batch=size) for point, size in (("min", 1), ("max", 2)))
    samples.write(tmp_path, Samples(data="x", ranges={}, cases=cases))
    for index, case in enumerate(cases):
        rows = np.ones((case.batch, 3), np.float32)
        samples.write_arrays(tmp_path, "feeds", index, {"x": rows})
        samples.write_arrays(tmp_path, "outputs", index, {"y": rows * case.batch})
    judged = Artifact(kind="reference", path=tmp_path / samples.RECORD, sha256="", bytes=0)
    made = save_operator(tmp_path / "graph.onnx", "Identity")
    for stage, told in (("export", True), ("engine", False)):
        (out := tmp_path / stage).mkdir()
        verify = Verify(stage=stage, engine=OnnxRuntime(), device=Device(), precision="fp32", min_sqnr_db=None)
        rejected = verify.run({"model": made, "reference": judged}, out, lambda _: None).rejected
        assert rejected.startswith(f"after {stage} at max (batch 2): output 'y' has an SQNR of 6.0 dB")
        assert ("perhaps the module decides by a size" in rejected) is told


def test_an_engine_that_fails_on_a_size_names_it(tmp_path: Path) -> None:
    """Not the feeds are at fault, which the reference has answered."""
    rows = np.ones((2, 3), np.float32)
    samples.write(tmp_path, Samples(data="x", ranges={}, cases=(Case(points=("opt",), sizes={"batch": 2}, batch=2),)))
    samples.write_arrays(tmp_path, "feeds", 0, {"x": rows})
    samples.write_arrays(tmp_path, "outputs", 0, {"y": rows})
    judged = Artifact(kind="reference", path=tmp_path / samples.RECORD, sha256="", bytes=0)
    made = save_operator(tmp_path / "graph.onnx", "Reshape", np.array([1, 3]))
    verify = Verify(stage="export", engine=OnnxRuntime(), device=Device(), precision="fp32", min_sqnr_db=None)
    with pytest.raises(ModelError, match=r"after export at opt \(batch 2\), where the given model runs: ") as caught:
        verify.run({"model": made, "reference": judged}, tmp_path, lambda _: None)
    assert "--shape" in (caught.value.remedy or "")


def test_an_export_that_fails_or_is_wrong_at_a_size_repeats_the_condition_that_it_found(tmp_path: Path) -> None:
    """Only its own verification does: later graphs were right at these sizes before."""
    limit = SizeLimit("time % 8 == 0", "time", {"batch": 1, "time": 7}, "fails")
    note = f"the graph is {describe_limits([limit])}; or fix the size: --input x:float32:batch,8"
    entry = HistoryEntry(
        step="export", parameters={}, tools={}, seconds=1.0, host_peak_bytes=None, effect="made", notes=("other", note)
    )
    cases = tuple(Case(points=(point,), sizes={"batch": size}, batch=size) for point, size in (("min", 1), ("max", 2)))
    samples.write(tmp_path, Samples(data="x", ranges={}, cases=cases))
    for index, case in enumerate(cases):
        rows = np.ones((case.batch, 3), np.float32)
        samples.write_arrays(tmp_path, "feeds", index, {"x": rows})
        samples.write_arrays(tmp_path, "outputs", index, {"y": rows * case.batch})
    judged = Artifact(kind="reference", path=tmp_path / samples.RECORD, sha256="", bytes=0)
    wrong, fails = (
        save_operator(tmp_path / f"{name}.onnx", name, *constants).model_copy(update={"history": (entry,)})
        for name, constants in (("Identity", ()), ("Reshape", (np.array([1, 3]),)))
    )
    for stage in ("export", "simplify"):
        (out := tmp_path / stage).mkdir()
        verify = Verify(stage=stage, engine=OnnxRuntime(), device=Device(), precision="fp32", min_sqnr_db=None)
        rejected = verify.run({"model": wrong, "reference": judged}, out, lambda _: None).rejected
        assert rejected.endswith(f"; at other sizes it is right: {note}") is (stage == "export")
        with pytest.raises(ModelError) as caught:
            verify.run({"model": fails, "reference": judged}, out, lambda _: None)
        assert caught.value.remedy.endswith(f"or fix them in --input: {note}") is (stage == "export")
        assert ("time % 8" in caught.value.remedy) is (stage == "export")


@pytest.mark.parametrize("own", [0.0, 0.01])
def test_an_engine_may_be_as_far_from_eager_as_rounding_moves_eager(tmp_path: Path, own: float) -> None:
    case = Case(points=("min",), sizes={"batch": 2}, batch=2)
    samples.write(tmp_path, Samples(data="x", ranges={}, cases=(case,), rounding={"y": own}))
    rows = np.float32([[0, 5, 10], [1, 2, 3]])
    samples.write_arrays(tmp_path, "feeds", 0, {"x": rows})
    samples.write_arrays(tmp_path, "outputs", 0, {"y": rows + 0.005})
    judged = Artifact(kind="reference", path=tmp_path / samples.RECORD, sha256="", bytes=0)
    inputs = {"model": save_operator(tmp_path / "graph.onnx", "Identity"), "reference": judged}
    verify = Verify(stage="export", engine=OnnxRuntime(), device=Device(), precision="fp32", min_sqnr_db=None)
    (out := tmp_path / "out").mkdir()
    assert bool(verify.run(inputs, out, lambda _: None).rejected) is (own == 0)
    samples.write_vector(tmp_path, tmp_path / "vector.npz")
    assert samples.read_vector(tmp_path / "vector.npz").rounding == {"y": own}


def test_a_test_vector_has_the_range_of_all_answers(tmp_path: Path) -> None:
    rows = np.float32([[0.5, 0.5, 0.5], [1.0, 0.0, -1e9], [-2.0, 0.0, 0.5]])
    np.savez(tmp_path / "data.npz", x=rows)
    (reference := tmp_path / "reference").mkdir()
    data = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions()}
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1,), seed=0, **data)
    sample.run({"model": save_operator(tmp_path / "same.onnx", "Identity")}, reference, lambda _: None)
    samples.write_vector(reference, tmp_path / "vector.npz")
    vector = samples.read_vector(tmp_path / "vector.npz")
    np.testing.assert_array_equal(vector.outputs["y"], rows[:1])
    assert vector.ranges == {"y": 3.0}
    assert samples.find_ends({"y": np.float32([3.0, np.nan, -np.inf, 1.0]), "n": np.arange(3)}) == {"y": (1.0, 3.0)}


def test_the_reference_has_fewer_samples_where_the_time_is_short(tmp_path: Path) -> None:
    """Each case has one call; what is left out is noted, and the reference is made again the next time."""
    np.savez(tmp_path / "data.npz", x=np.arange(18, dtype=np.float32).reshape(6, 3))
    given = {"model": save_operator(tmp_path / "same.onnx", "Identity")}
    data = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions()}
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1, 4), seed=0, **data)
    for seconds, calls, notes in (
        (0.0, [1, 1, 1], ("the time is short: outputs are compared on 1 sample at batch 1 instead of 6; give more",)),
        (1e9, [6, 2, 3], ()),
    ):
        (out := tmp_path / str(seconds)).mkdir()
        effect = sample.model_copy(update={"left_seconds": seconds}).run(given, out, lambda _: None)
        assert [case.calls for case in samples.read(out).cases] == calls
        assert len(effect.notes) == len(notes)
        assert all(note.startswith(start) for note, start in zip(effect.notes, notes, strict=True))
        assert effect.incomplete is bool(notes)
        assert [len(each.outputs) for each in samples.read_calls(out)] == calls


def test_a_batch_size_between_the_others_that_the_model_refuses_is_left_out(tmp_path: Path) -> None:
    """A model of clips of 4 frames takes 4 and 8, and not 5."""
    text = "net (float[batch, 3] x) => (float[batch, 3] y) { c = Reshape(x, clips) y = Reshape(c, frames) }"
    shapes = {"clips": np.array([-1, 4, 3]), "frames": np.array([-1, 3])}
    path = tmp_path / "clips.onnx"
    ir.save(parse_graph(text, **shapes), path)
    given = {"model": Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))}
    options = {"data": None, "data_options": DataOptions()}
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(4, 8), seed=0, **options)
    effect = sample.run(given, tmp_path, lambda _: None)
    assert [case.batch for case in samples.read(tmp_path).cases] == [4, 8]
    assert not effect.incomplete


def test_a_test_vector_has_finite_answers_where_there_are_some(tmp_path: Path) -> None:
    small = Case(points=("min",), sizes={"batch": 1}, batch=1, calls=2)
    large = Case(points=("max",), sizes={"batch": 2}, batch=2)
    samples.write(tmp_path, Samples(data="x", ranges={}, cases=(large, small)))
    finite, half, lost = np.ones((1, 2), np.float32), np.float32([[1, np.nan]]), np.full((1, 2), np.nan, np.float32)
    for answers, place in (
        ((half, half, half), 1),
        ((finite, half, finite), 2),
        ((finite, finite, finite), 1),
        ((finite, half, half), 0),
        ((half, lost, lost), 0),
    ):
        for number, (answer, (index, call)) in enumerate(zip(answers, ((0, 0), (1, 0), (1, 1)), strict=True)):
            samples.write_arrays(tmp_path, "feeds", index, {"x": np.int64([number])}, call)
            samples.write_arrays(tmp_path, "outputs", index, {"y": answer}, call)
        samples.write_vector(tmp_path, tmp_path / "vector.npz")
        assert samples.read_vector(tmp_path / "vector.npz").feeds["x"] == [place]


def test_a_test_vector_has_answers_that_are_not_all_0_where_there_are_some(tmp_path: Path) -> None:
    small = Case(points=("min",), sizes={"batch": 1}, batch=1)
    large = Case(points=("max",), sizes={"batch": 2}, batch=2)
    samples.write(tmp_path, Samples(data="x", ranges={}, cases=(small, large)))
    none, some, lost = np.zeros((1, 2), np.float32), np.float32([[0, 1]]), np.float32([[1, np.nan]])
    for answers, place in (((none, some), 1), ((some, none), 0), ((none, none), 0), ((none, lost), 0)):
        for index, answer in enumerate(answers):
            samples.write_arrays(tmp_path, "feeds", index, {"x": np.int64([index])})
            samples.write_arrays(tmp_path, "outputs", index, {"y": answer})
        samples.write_vector(tmp_path, tmp_path / "vector.npz")
        assert samples.read_vector(tmp_path / "vector.npz").feeds["x"] == [place]


def test_what_rounding_decides_is_found_noted_and_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last number of each row is a class: where the first is 0, a step more makes it another one."""

    def perturb(session: object, feeds: Feeds, step: float, seed: int) -> Feeds:
        jumps = 5 * ((feeds["x"][:, 0] == 0) & (step > 0)).astype(np.float32)
        return {"y": feeds["x"] + np.stack([0 * jumps, 0 * jumps, jumps], axis=1)}

    monkeypatch.setattr(OnnxRuntimeSession, "perturb", perturb)
    np.savez(tmp_path / "data.npz", x=np.float32([[0, 0.3, 7], [1, 0.4, 7], [0, 0.2, 8]]))
    for name in ("given", "changed", "verify"):
        (tmp_path / name).mkdir()
    data = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions()}
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(3,), seed=0, **data)
    given = {"model": save_operator(tmp_path / "same.onnx", "Identity")}
    (note,) = sample.run(given, tmp_path / "given", lambda _: None).notes
    assert note.startswith("rounding decides 22 % of the numbers in the output 'y'")
    assert note.endswith("this output is not verified")
    given["reference"] = Artifact(kind="reference", path=tmp_path / "given" / samples.RECORD, sha256="", bytes=0)
    Answers(engine=OnnxRuntime()).run(given, tmp_path / "changed", lambda _: None)
    samples.write_vector(tmp_path / "given", tmp_path / "vector.npz")
    vector = samples.read_vector(tmp_path / "vector.npz")
    assert spread_bits(vector.unstable["y"], vector.outputs["y"].shape)[:, 2].tolist() == [FINE, 0, FINE]
    check = Verify(stage="export", engine=OnnxRuntime(), device=Device(), precision="fp32", min_sqnr_db=None)
    goal = Goal(threshold="fp32", min_sqnr_db=None, max_drop=None, quality=None, simulation=OnnxRuntime())
    tune = Tune.model_construct(device=Device(), precision="fp32", min_sqnr_db=None, max_memory_bytes=None)
    for folder in ("given", "changed"):
        reference = Artifact(kind="reference", path=tmp_path / folder / samples.RECORD, sha256="", bytes=0)
        assert samples.read(tmp_path / folder).unverified == {"y": pytest.approx(2 / 9)}
        for classes, right in (([5, 0, 5], True), ([5, 1, 5], False), ([3, 0, 5], False)):
            change = np.float32([[0, 0, each] for each in classes])
            inputs = {"model": save_operator(tmp_path / "other.onnx", "Add", change), "reference": reference}
            effect = check.run(inputs, tmp_path / "verify", lambda _: None)
            assert bool(effect.rejected) is not right
            entries = read_records(Artifact(kind="record", path=tmp_path / "verify" / effect.file, sha256="", bytes=0))
            assert all(entry["unverified"] == {"y": pytest.approx(2 / 9)} for entry in entries)
            with OnnxRuntime().load(inputs["model"], Device()) as session:
                assert goal._compare(session, reference).passed is right
            inputs[ENGINE] = inputs["model"]
            assert (tune._find_fault(OnnxRuntime(), inputs, lambda _: None) == "") is right


def test_an_output_that_rounding_decides_as_a_whole_is_compared_and_the_cause_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = lambda session, feeds, step, seed: {"y": feeds["x"] * np.float32(1 + 2e4 * step)}  # noqa: E731
    monkeypatch.setattr(OnnxRuntimeSession, "perturb", moved)
    reference = tmp_path / "reference" / samples.RECORD
    for folder in (reference.parent, tmp_path / "verify"):
        folder.mkdir()
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(2,), data=None, data_options=DataOptions(), seed=0)
    sample.run({"model": save_operator(tmp_path / "same.onnx", "Identity")}, reference.parent, lambda _: None)
    assert samples.read(reference.parent).unsteady == ("y",)
    check = Verify(stage="export", engine=OnnxRuntime(), device=Device(), precision="fp32", min_sqnr_db=None)
    inputs = {"reference": Artifact(kind="reference", path=reference, sha256="", bytes=0)}
    for factor, passes in ((1.0, True), (1.02, False), (1.004, True)):
        inputs["model"] = save_operator(tmp_path / f"{factor}.onnx", "Mul", factor)
        effect = check.run(inputs, tmp_path / "verify", lambda _: None)
        entry = read_models(scratch_artifact("record", tmp_path / "verify" / effect.file, None), StageFidelity)[0]
        assert entry.passed is passes
        assert bool(entry.rounding_note) is bool(effect.notes) is (factor == 1.004)
        if entry.rounding_note:  # 2e4 times half a step of 2^-19 is more than the factor's 0.004
            note = (
                "rounding in float32 may change the output 'y' to an SQNR of 34.4 dB: that explains the 48.0 dB after"
            )
            assert effect.notes[0].startswith(note)
        if not passes:
            assert "look for large numbers that cancel" in effect.rejected
            assert "and for a division by nearly 0" in effect.rejected
    inputs["model"] = save_operator(tmp_path / "wrong.onnx", "Mul", 2.0)
    assert "look for" not in check.run(inputs, tmp_path / "verify", lambda _: None).rejected, "far from rounding"
    inputs["model"] = save_operator(tmp_path / "near.onnx", "Mul", 1.004)
    exact = check.model_copy(update={"min_sqnr_db": 60.0}).run(inputs, tmp_path / "verify", lambda _: None)
    assert exact.rejected, "an SQNR that was asked for"
    inputs["model"] = save_operator(tmp_path / "other.onnx", "Mul", 1.02)
    made = inputs["model"].signature
    assert made is not None
    changes = {"outputs": (TensorSpec.parse("y:float32:boxes,3"),), "unordered": {"y": "rows"}}
    inputs["model"] = inputs["model"].model_copy(update={"signature": made.model_copy(update=changes)})
    assert "SQNR" in check.run(inputs, tmp_path / "verify", lambda _: None).rejected
    known = samples.read(reference.parent)
    assert known.choosing == ()
    samples.write(reference.parent, known.model_copy(update={"choosing": ("y",)}))
    rejected = check.run(inputs, tmp_path / "verify", lambda _: None).rejected
    assert "of the rows in output 'y' have a partner" in rejected
    assert "division" not in rejected, "sets of rows allow for rounding themselves"


@pytest.mark.parametrize(
    ("pair", "zero", "scale", "passes"),
    [(True, 128, 0.1, True), (False, 128, 0.1, True), (True, 129, 0.1, False), (True, 128, 0.12, False)],
)
def test_engines_may_round_a_quantized_file_elsewhere_and_not_by_another_scale(
    tmp_path: Path, pair: bool, zero: int, scale: float, passes: bool
) -> None:
    """Without the pair between two products, as engines do that fuse it, many answers are a step off."""

    def save(name: str, pair: bool = True, zero: int = 128, scale: float = 0.1) -> Artifact:
        inner = "p = QuantizeLinear(a, u, z)\n b = DequantizeLinear(p, u, z)" if pair else "b = Identity(a)"
        text = f"""net (float[n, 16] x) => (float[n, 16] y) {{
            a = MatMul(x, w)
            {inner}
            c = MatMul(b, w)
            q = QuantizeLinear(c, s, o)
            y = DequantizeLinear(q, u, z)
        }}"""
        weights = {"w": normal(16, 16) / 4, "u": np.float32(0.1), "z": np.uint8(128)}
        model = parse_graph(text, 21, **weights, s=np.float32(scale), o=np.uint8(zero))
        ir.save(model, tmp_path / name)
        path = tmp_path / name
        return Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))

    reference = tmp_path / "reference" / samples.RECORD
    for folder in (reference.parent, tmp_path / "verify"):
        folder.mkdir()
    engine = OnnxRuntime(graph_optimization="disabled")
    sample = Sample(engine=engine, ranges={}, batches=(4,), data=None, data_options=DataOptions(), seed=0)
    sample.run({"model": save("given.onnx")}, reference.parent, lambda _: None)
    check = Verify(stage="engine", engine=engine, device=Device(), precision="fp32", min_sqnr_db=None)
    inputs = {"reference": Artifact(kind="reference", path=reference, sha256="", bytes=0)}
    inputs["model"] = save("other.onnx", pair, zero, scale)
    effect = check.run(inputs, tmp_path / "verify", lambda _: None)
    assert (effect.rejected == "") is passes
    words = effect.rejected or "".join(effect.notes)
    assert ("QuantizeLinear" in words) is not (pair and passes)
    assert "cancel" not in words
    assert ("zero point" in words) is not passes
    samples.write_vector(reference.parent, tmp_path / "vector.npz")
    assert samples.read_vector(tmp_path / "vector.npz").rounding["y"] > 0.1, "a step"


@pytest.mark.parametrize("choosing", [(), ("answer",), None])
def test_a_file_alone_does_not_have_its_rows_compared_as_a_set(
    choosing: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """It lists rows by their values, all of them, and in reverse order; the model does not choose any."""
    (reference := tmp_path / "reference").mkdir()
    case = Case(points=("min",), sizes={"batch": 1}, batch=1)
    samples.write(reference, Samples(data="x", ranges={}, cases=(case,), choosing=choosing))
    rows = np.float32([[1, 2], [3, 4], [5, 6]])
    samples.write_arrays(reference, "feeds", 0, {"x": rows[np.newaxis]})
    samples.write_arrays(reference, "outputs", 0, {"answer": rows})
    text = """net (float[1, 3, 2] x) => (float[3, 2] y) {
        whole = Squeeze(x, zero)
        large = Greater(whole, limit)
        some = Slice(large, zero, one, one)
        row = Squeeze(some, one)
        places = NonZero(row)
        listed = Squeeze(places, zero)
        order = Slice(listed, last, first, last, last)
        y = Gather(whole, order)
    }"""
    numbers = {"zero": [0], "one": [1], "last": [-1], "first": [-9]}
    weights = {name: np.array(value) for name, value in numbers.items()} | {"limit": np.float32(0)}
    ir.save(parse_graph(text, 21, **weights), path := tmp_path / "net.onnx")
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    assert model.signature is not None
    assert model.signature.unordered == {"y": "rows"}
    inputs = {"reference": Artifact(kind="reference", path=reference / samples.RECORD, sha256="", bytes=0)}
    check = Verify(stage="file", engine=OnnxRuntime(), device=Device(), precision="fp32", min_sqnr_db=None)
    effect = check.run({**inputs, "model": model}, tmp_path, lambda _: None)
    assert bool(effect.rejected) == (choosing == ())
    made = Artifact(kind="record", path=tmp_path / effect.file, sha256="", bytes=0)
    (entry,) = (StageFidelity.model_validate(each) for each in read_records(made))
    assert entry.sets == (() if effect.rejected else ("y",))
    assert describe_pass(entry).startswith("no: " if effect.rejected else "yes, 'y' as sets of rows")


def test_the_ranges_of_a_changed_model_are_of_its_own_answers(tmp_path: Path) -> None:
    for name in ("given", "changed"):
        (tmp_path / name).mkdir()
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1, 8), data=None, data_options=DataOptions(), seed=0)
    sample.run({"model": save_operator(tmp_path / "same.onnx", "Identity")}, tmp_path / "given", lambda _: None)
    before = samples.read(tmp_path / "given")
    inputs = {"model": save_operator(tmp_path / "tenth.onnx", "Mul", 0.1)}
    inputs["reference"] = Artifact(kind="reference", path=tmp_path / "given" / samples.RECORD, sha256="", bytes=0)
    Answers(engine=OnnxRuntime()).run(inputs, tmp_path / "changed", lambda _: None)
    after = samples.read(tmp_path / "changed")
    assert after.spans == {"y": pytest.approx(0.1 * before.spans["y"])}
    assert after.cases == before.cases


def test_a_file_with_other_names_is_compared_by_position(tmp_path: Path) -> None:
    (reference := tmp_path / "reference").mkdir()
    case = Case(points=("min",), sizes={"batch": 1}, batch=1)
    samples.write(reference, Samples(data="x", ranges={}, cases=(case,), spans={"answer": 2.0}))
    row = np.float32([[0.5, 1.0, -1.0]])
    samples.write_arrays(reference, "feeds", 0, {"given": row})
    samples.write_arrays(reference, "outputs", 0, {"answer": row})
    inputs = {"reference": Artifact(kind="reference", path=reference / samples.RECORD, sha256="", bytes=0)}
    verify = Verify(stage="file", engine=OnnxRuntime(), device=Device(), precision="fp32", min_sqnr_db=None)
    for operator, passed in (("Identity", True), ("Neg", False)):
        inputs["model"] = save_operator(tmp_path / f"{operator}.onnx", operator)
        (out := tmp_path / operator).mkdir()
        effect = verify.run(inputs, out, lambda _: None)
        assert (effect.rejected == "") == passed
        assert effect.notes == (
            "'given' is compared with 'x', by position",
            "'answer' is compared with 'y', by position",
        )


@pytest.mark.parametrize(
    ("data", "error", "told"), [("synthetic", 3e-8, True), ("synthetic", 3e-6, False), ("mine.npz", 3e-8, False)]
)
def test_a_tiny_error_on_samples_that_are_made_up_is_told(tmp_path: Path, data: str, error: float, told: bool) -> None:
    """Answers near 0 have an SQNR of their own, which tells little of those to real samples."""
    for what, name in (("feeds", "x"), ("outputs", "y")):
        samples.write_arrays(tmp_path, what, 0, {name: np.float32([[1e-5, 2e-5, 0]])})
    samples.write(tmp_path, Samples(data=data, ranges={}, cases=(Case(points=("min",), sizes={"batch": 1}, batch=1),)))
    given = {"model": save_operator(tmp_path / "add.onnx", "Add", error)}
    given["reference"] = Artifact(kind="reference", path=tmp_path / samples.RECORD, sha256="", bytes=0)
    verify = Verify(stage="engine", engine=OnnxRuntime(), device=Device(), precision="fp32", min_sqnr_db=None)
    (out := tmp_path / "out").mkdir()
    rejected = verify.run(given, out, lambda _: None).rejected
    assert "has an SQNR of " in rejected
    assert rejected.endswith("the samples are made up: --data or --eval judges on real ones") is told


@pytest.mark.parametrize(("error", "share"), [(1.0, "100 %"), (2.6, "260 %"), (12.3, "1200 %")])
def test_a_large_error_is_told_without_an_exponent(error: float, share: str) -> None:
    reference = np.linspace(0, 1, 64)
    found = compare({"y": reference}, {"y": np.append(reference[:-1], 1 + error)}, thresholds_for("fp32"))
    assert f"max abs error {error:g} ({share} of the range of the answers)" in describe_failure(found)


def test_a_single_number_is_judged_by_the_range_of_all_answers(tmp_path: Path) -> None:
    """If 0.001 is the only answer, an engine's 0.002 is all wrong; if answers go from -1 to 1, it is right in int8."""
    (reference := tmp_path / "reference").mkdir()
    case = Case(points=("min",), sizes={"batch": 1}, batch=1)
    row = np.float32([[0.001, 0.001, 0.001]])
    for what, name in (("feeds", "x"), ("outputs", "y")):
        samples.write_arrays(reference, what, 0, {name: row})
    given = {"model": save_operator(tmp_path / "add.onnx", "Add", 0.001)}
    given["reference"] = Artifact(kind="reference", path=reference / samples.RECORD, sha256="", bytes=0)
    verify = Verify(stage="engine", engine=OnnxRuntime(), device=Device(), precision="int8", min_sqnr_db=None)
    for spans, passed in (({}, False), ({"y": 2.0}, True)):
        samples.write(reference, Samples(data="x", ranges={}, cases=(case,), spans=spans))
        (out := tmp_path / f"out{passed}").mkdir()
        assert (verify.run(given, out, lambda _: None).rejected == "") == passed


class _Alarm:
    """Answer whether the number of a sample is 7 or more, as a bool of each, and count the calls."""

    def __init__(self) -> None:
        x, y, z = (TensorSpec.parse(text) for text in ("x:float32:batch,1", "y:bool:batch", "z:float32:batch,1"))
        self.signature, self.calls = Signature(inputs=(x,), outputs=(y, z)), 0

    def run(self, feeds: Feeds) -> Feeds:
        self.calls += 1
        return {"y": feeds["x"][:, 0] >= 7, "z": feeds["x"]}


def test_samples_of_a_rare_answer_are_among_those_that_are_compared() -> None:
    """An engine that never answers True agrees in the first eight samples."""
    rows, session = np.zeros((300, 1), np.float32), _Alarm()
    rows[[100, 200, 290], 0] = 7
    data = put_telling_first(session, Dataset("x", {"x": rows}), 8)  # type: ignore[arg-type]
    given = np.asarray(data.arrays["x"])[:, 0].tolist()
    assert (len(given), session.calls) == (300, 32)
    assert given[:8] == [0, 7, 0, 7, 0, 0, 0, 0], "of the first 256, of each kind in turn"
    assert sorted(given) == [*[0.0] * 297, *[7.0] * 3]
    same = Dataset("x", {"x": 0 * rows})
    assert put_telling_first(session, same, 8) is same  # type: ignore[arg-type]
