"""Samples of a model, its answers to them, and metrics on them."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from enginesmith.calibration.dataset import Dataset
from enginesmith.calibration.options import PARTS, DataOptions, PartOptions
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.errors import DataError, ModelError, SignatureError, SourceError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.samples import Case, Samples, check_feeds
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import module, saved
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks import examples, verify
from enginesmith.pipeline.tasks.base import RECORDS, write_records
from enginesmith.pipeline.tasks.quality import Quality, try_metric
from enginesmith.pipeline.tasks.verify import Sample
from enginesmith.pipeline.tensors import Array, Feeds, ShapeRange, Signature, TensorSpec
from graphs import save_operator


def signature(*inputs: str) -> Signature:
    return Signature(inputs=tuple(TensorSpec.parse(text) for text in inputs), outputs=())


IMAGE = signature("x:float32:batch,3")


def test_a_metric_gets_the_sample_first_wherever_the_batch_is(tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3, "batch"]) for name in "xy"]
    made = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", ends[:1], ends[1:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    rows = np.random.default_rng(0).random((20, 3), np.float32)
    np.savez(tmp_path / "data.npz", x=rows, labels=-rows)
    data = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions(), "samples": None, "metric": "mse"}
    quality = Quality(engine=OnnxRuntime(), device=Device(), batch=8, largest_batch=8, seed=0, **data)
    with quality.engine.load(model, Device()) as session:
        judged, outputs, _ = quality.judge(session, None, lambda _: None)
    np.testing.assert_array_equal(outputs["y"], -rows)
    assert not isinstance(judged, str)
    assert judged.value == 0


@pytest.mark.parametrize(
    ("metric", "labels", "words"),
    [
        ("top1", [0, 1, 2, 0], ""),
        ("top1", [0, 1, 3, 0], "top1 needs .* from 0 to 3"),
        ("top1", None, "no labels, and the metric top1 needs them"),
        ("auroc", [0, 0, 1, 2], ""),
        ("own.py:all_classes", [0, 1, 2, 0], "on 2 samples, .* raised ValueError: no class 2 .*; all samples decide"),
    ],
)
def test_the_metric_is_tried_on_two_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, labels: list[int] | None, words: str
) -> None:
    """All labels are looked at; that two samples are too few for a metric is no failure."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "def all_classes(outputs, labels):\n    if 2 not in labels: raise ValueError('no class 2')\n", encoding="utf-8"
    )
    np.savez("data.npz", x=np.eye(4, 3, dtype=np.float32), **({} if labels is None else {"labels": labels}))
    (reference := tmp_path / "reference").mkdir()
    kinds = {"engine": OnnxRuntime(), "data": "data.npz", "data_options": DataOptions(), "metric": metric}
    sample = Sample(ranges={}, batches=(1,), seed=0, **kinds)
    model = save_operator(tmp_path / "float.onnx", "Identity")
    if words and metric == "top1":
        with pytest.raises(DataError, match=words):
            sample.run({"model": model}, reference, lambda _: None)
        return
    effect = sample.run({"model": model}, reference, lambda _: None)
    assert re.fullmatch(words, "".join(effect.notes))
    assert (Path("own.py").absolute() in effect.reads) is metric.startswith("own")


def test_sizes_that_depend_on_values_are_no_sign_that_samples_influence_each_other(tmp_path: Path) -> None:
    """Each sample has as many rows as the sum over the batch tells."""
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", size])
        for name, size in (("x", 3), ("y", "n"))
    ]
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Abs", ["total"], ["size"]),
        helper.make_node("Cast", ["size"], ["n"], to=onnx.TensorProto.INT64),
        helper.make_node("Min", ["n", "most"], ["few"]),
        helper.make_node("Range", ["none", "few", "one"], ["places"]),
        helper.make_node("Cast", ["places"], ["floats"], to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["x", "axes"], ["sums"], keepdims=1),
        helper.make_node("Mul", ["sums", "floats"], ["y"]),
    ]
    numbers = {"most": np.int64(9), "none": np.int64(0), "one": np.int64(1), "axes": np.int64([1])}
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in numbers.items()]
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    path = tmp_path / "places.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    (reference := tmp_path / "reference").mkdir()
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1, 8), data=None, data_options=DataOptions(), seed=0)
    assert not [note for note in sample.run({"model": model}, reference, lambda _: None).notes if "depends" in note]
    assert not samples.read(reference).interacting


@pytest.mark.parametrize("there", [True, False])
def test_samples_in_which_something_is_found_are_compared_first(tmp_path: Path, there: bool) -> None:
    """The places above 0: in the last two rows of twelve, or in none, where all answers would agree."""
    ends = [helper.make_tensor_value_info(*end) for end in (("x", 1, [1, 3]), ("y", 7, ["n", 2]))]
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("NonZero", ["a"], ["b"])]
    nodes.append(helper.make_node("Transpose", ["b"], ["y"]))
    path = tmp_path / "model.onnx"
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    rows = np.full((12, 3), -1, np.float32)
    rows[10:] = [[0, 1, -1], [1, 2, 3]] if there else -2
    np.savez(tmp_path / "data.npz", x=rows)
    data = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions()}
    (reference := tmp_path / "reference").mkdir()
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1,), seed=0, **data)
    notes = sample.run({"model": model}, reference, lambda _: None).notes
    (answered,) = samples.read_calls(reference)
    assert [len(outputs["y"]) for outputs in answered.outputs] == [*([1, 3] if there else [0, 0]), *[0] * 6]
    assert any("are empty: the comparison tells nothing" in note for note in notes) == (not there)


@pytest.mark.parametrize(
    ("kind", "inputs", "made_up", "advice"),
    [
        ("torch", ["x:int64:batch"], True, ["drawn at random", "otherwise than 'batch'"]),
        ("torch", ["x:int64:batch,length"], False, ["give only that of texts with --shape length=5:5:5"]),
        ("torch", ["x:int64:batch,known"], False, []),
        ("torch", ["x:int64:n", "y:int64:m"], True, []),
        ("onnx", ["x:int64:batch"], True, ["drawn at random"]),
        ("onnx", ["x:int64:batch", "sr:int64:"], True, ["drawn at random", "and 'sr', which seems to be a setting"]),
        ("onnx", ["x:int64:n,height,width"], True, ["drawn at random", "--shape height=MIN:OPT:MAX --shape width="]),
        ("onnx", ["x:int64:n,known,width"], False, ["takes with --shape width=MIN:OPT:MAX"]),
    ],
)
def test_a_model_that_refuses_made_up_samples_or_assumed_sizes_is_told_what_to_give(
    kind: Any, inputs: list[str], made_up: bool, advice: list[str]
) -> None:
    class Refusing:
        signature = signature(*inputs)

        def run(self, feeds: Feeds) -> None:
            raise ModelError("offsets[0] has to be 0", "run it alone")

    model = Artifact(kind=kind, path=Path(), sha256="", bytes=0, signature=Refusing.signature)
    data = (
        None
        if made_up
        else Dataset("texts", {"x": np.zeros((3, *[5] * (len(Refusing.signature.inputs[0].shape) - 1)), int)})
    )
    known = {"known": ShapeRange.parse("9")}
    told = examples.advise(model, known, examples.list_assumed(model, known), data)
    with pytest.raises(ModelError, match="has to be 0, at batch 8") as error:
        examples.Baseline(Refusing(), {}, told).run(Case(sizes={"batch": 8}, batch=8), {})  # type: ignore[arg-type]
    setting = "and 'sr', which seems to be a setting"
    words = ["drawn at random", setting, "otherwise than 'batch'", *(word for word in advice if "--shape" in word)]
    assert [word for word in words if word in error.value.remedy] == advice
    assert ("--shape" in error.value.remedy) == ("--shape" in "".join(advice))


@pytest.mark.parametrize(
    ("condition", "drawing", "note"),
    [
        ("x.min() >= 0 and x.max() <= 1", "within", "random samples .*AssertionError: no .*its own rows, repeated;"),
        ("lengths.max() == 4", "within", "within the example's least and greatest"),
        ("x.sum(1).sub(1).abs().max() < 1e-5", "repeat", "they are the example's rows, repeated; --eval DATA gives"),
        ("x.shape[0] in (2, 3)", "", ""),
    ],
)
def test_samples_are_drawn_closer_to_the_example_where_the_module_refuses_others(
    tmp_path: Path, condition: str, drawing: str, note: str
) -> None:
    (tmp_path / f"{tmp_path.name}.py").write_text(
        f"import torch\nclass Net(torch.nn.Module):\n  def forward(self, x, lengths):\n    assert {condition}, 'no'\n"
        "    return x + lengths[:, None]\ndef build():\n  x = torch.eye(2, 4)\n"
        "  return Net(), {'x': x, 'lengths': torch.tensor([3, 4])}\n",
        encoding="utf-8",
    )
    source = resolve(f"{tmp_path}/{tmp_path.name}.py:build")
    options = module.LoadOptions(inputs=tuple(map(TensorSpec.parse, ("x:float32:batch,4", "lengths:int64:batch"))))
    loaded = module.load(source, options)
    saved.save(loaded, source, options, tmp_path)
    model = Artifact(kind="torch", path=tmp_path / saved.RECORD, sha256="", bytes=0, signature=loaded.signature)
    sample = Sample(engine=Eager(), ranges={}, batches=(1, 8), data=None, data_options=DataOptions(), seed=0)
    (reference := tmp_path / "reference").mkdir()
    if not drawing:
        with pytest.raises(ModelError, match=r"AssertionError: no .*at batch 1") as error:
            sample.run({"model": model}, reference, lambda _: None)
        assert "drawn at random from the example's" in error.value.remedy
        return
    notes = "\n".join(sample.run({"model": model}, reference, lambda _: None).notes)
    assert samples.read(reference).drawing == drawing
    assert re.search(note, notes)


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("index 8 is out of bounds for dimension 0 with size 5", "--shape nodes=10:12:MAX"),
        ("index 8 is out of bounds for dimension 0 with size 6", ""),
        ("no such shape", ""),
    ],
)
def test_the_least_size_that_has_the_examples_indices_is_named(message: str, advice: str) -> None:
    class Refusing:
        signature = signature("x:float32:nodes,8", "edge_index:int64:2,edges", "kind:int64:nodes")

        def run(self, feeds: Feeds) -> None:
            raise ModelError(message, "run it alone")

    edges = np.array([[0, 3, 9, 1], [1, 8, 2, 0]])
    example = {"x": np.zeros((12, 8), np.float32), "edge_index": edges, "kind": np.full(12, 11)}
    with pytest.raises(ModelError, match="at nodes 5, edges 2") as error:
        examples.Baseline(Refusing(), example, "").run(Case(sizes={"nodes": 5, "edges": 2}, batch=1), {})  # type: ignore[arg-type]
    assert error.value.remedy.endswith(advice or "run it alone")


@pytest.mark.parametrize("data", [None, "data.npz"])
def test_samples_from_data_are_not_said_to_be_random(
    tmp_path: Path, data: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", x=np.ones((8, 3), np.float32))
    (reference := tmp_path / "reference").mkdir()
    model = save_operator(tmp_path / "model.onnx", "Reshape", np.array([7, -1]))  # 24 numbers are no seven rows
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(8,), data=data, data_options=DataOptions(), seed=0)
    with pytest.raises(ModelError, match="at batch 8") as error:
        sample.run({"model": model}, reference, lambda _: None)
    assert ("drawn at random" in error.value.remedy) == (data is None)


def test_an_onnx_file_is_tried_at_the_sizes_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of --shape come first; without data, 8 is assumed."""
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", x=np.ones((8, 40, 50), np.float32))
    ends = [helper.make_tensor_value_info(name, 1, ["batch", "height", "width"]) for name in "xy"]
    made = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", ends[:1], ends[1:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    for data, height, width in (("data.npz", "40:40:40", "8:9:10"), (None, "4:8:8", "8:9:10")):
        sample = Sample(
            engine=OnnxRuntime(),
            ranges={"width": ShapeRange.parse("8:9:10")},
            batches=(1, 8),
            data=data,
            data_options=DataOptions(),
            seed=0,
        )
        notes = sample.run({"model": model}, tmp_path, lambda _: None).notes
        ranges, assumed = samples.read(tmp_path).ranges, samples.read(tmp_path).assumed
        assert (assumed, [note for note in notes if "assumed" in note]) == (
            ((), [])
            if data
            else (
                ("height",),
                [
                    "sizes that nothing tells are assumed: height = 8 (verified from 4); --shape height=MIN:OPT:MAX "
                    "gives those of real inputs"
                ],
            )
        )
        assert {name: str(range_) for name, range_ in ranges.items()} == {
            "batch": "1:1:8",
            "height": height,
            "width": width,
        }


@pytest.mark.parametrize(("most", "height"), [(512, "64:128:128"), (64, "32:64:64"), (40, "16:32:32"), (0, "4:8:8")])
def test_pictures_of_unknown_size_are_of_the_largest_that_the_file_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, height: str
) -> None:
    class Limited(OnnxRuntime):
        def load(self, artifact: Artifact, device: Device) -> Any:
            session, limit = super().load(artifact, device), most or 8
            run = session.run

            def run_limited(feeds: Feeds) -> dict[str, Array]:
                if feeds["x"].shape[2] > limit:
                    raise ModelError("too high")
                return run(feeds)

            monkeypatch.setattr(session, "run", run_limited)
            return session

    ends = [helper.make_tensor_value_info(name, 1, ["batch", 3, "height", "width"]) for name in "xy"]
    made = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", ends[:1], ends[1:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    ranges = {"width": ShapeRange.parse("9")}
    sample = Sample(engine=Limited(), ranges=ranges, batches=(1,), data=None, data_options=DataOptions(), seed=0)
    sample.run({"model": model}, tmp_path, lambda _: None)
    known = samples.read(tmp_path)
    assert (str(known.ranges["height"]), str(known.ranges["width"])) == (height, "9:9:9")


@pytest.mark.parametrize(("least", "length"), [(1, "4:8:8"), (40, "256:512:512"), (9999, "")])
def test_an_assumed_length_is_the_least_that_the_file_takes(tmp_path: Path, least: int, length: str) -> None:
    """Frames of sound are padded by some numbers, and each needs as many."""
    ends = [helper.make_tensor_value_info(name, 1, ["batch", dim]) for name, dim in (("x", "length"), ("y", "padded"))]
    pads = numpy_helper.from_array(np.array([0, 0, 0, least - 1]), "pads")
    made = helper.make_graph(
        [helper.make_node("Pad", ["x", "pads"], ["y"], mode="reflect")], "g", ends[:1], ends[1:], [pads]
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1,), data=None, data_options=DataOptions(), seed=0)
    if not length:
        with pytest.raises(ModelError, match="at batch 1, length 8"):
            sample.run({"model": model}, tmp_path, lambda _: None)
        return
    sample.run({"model": model}, tmp_path, lambda _: None)
    assert str(samples.read(tmp_path).ranges["length"]) == length


def test_a_file_that_refuses_assumed_sizes_may_have_its_batch_elsewhere() -> None:
    inputs = signature("x:float32:n,length", "state:float32:2,m,4", "rate:int64:")
    model = Artifact(kind="onnx", path=Path(), sha256="", bytes=0, signature=inputs)
    options = "--input x:float32:batch,length --input state:float32:2,batch,4 --input rate:int64:"
    assert f"if one of the dimensions is the batch, name it with {options};" in examples.advise(model, {}, ("n",), None)
    data = Dataset("d", {"x": np.ones((5, 9)), "state": np.ones((5, 2, 4))}, shared={"rate": np.array(3)})
    with pytest.raises(DataError, match=r"\[1, 2, 4\] in batches of 1") as error:
        samples.feeds_for(Case(sizes={"n": 1, "m": 2, "length": 9}, batch=1), inputs, {}, data, 0)
    assert error.value.remedy.endswith(f"unless one is called 'batch': name it with {options}")


@pytest.mark.parametrize("assumed", [(), ("height",)])
@pytest.mark.parametrize("operator", ["Abs", "Transpose"])
def test_what_fails_at_assumed_sizes_is_told_to_give_them(
    tmp_path: Path, assumed: tuple[str, ...], operator: str
) -> None:
    ends = [helper.make_tensor_value_info(name, 1, ["batch", "height"]) for name in "xy"]
    (graph := tmp_path / "graph").mkdir()
    for name, kind in (("given", "Neg"), ("wrong", operator)):
        made = helper.make_graph([helper.make_node(kind, ["x"], ["y"])], "g", ends[:1], ends[1:])
        path = graph / f"{name}.onnx"
        onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    models = {
        name: Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
        for name in ("given", "wrong")
        for path in [graph / f"{name}.onnx"]
    }
    (reference := tmp_path / "reference").mkdir()
    ranges = {} if assumed else {"height": ShapeRange.parse("4:8:8")}
    sample = Sample(engine=OnnxRuntime(), ranges=ranges, batches=(1,), data=None, data_options=DataOptions(), seed=0)
    sample.run({"model": models["given"]}, reference, lambda _: None)
    assert samples.read(reference).assumed == assumed
    task = verify.Verify(engine=OnnxRuntime(), device=Device(), stage="simplify", precision="fp32", min_sqnr_db=None)
    answered = Artifact(kind="reference", path=reference / samples.RECORD, sha256="", bytes=0)
    message = task.run({"model": models["wrong"], "reference": answered}, tmp_path, lambda _: None).rejected
    assert ("is float32[8, 1]" in message) == (operator == "Transpose")
    advice = "; sizes that nothing tells are assumed: give those that it takes with --shape height=MIN:OPT:MAX"
    assert message.endswith(advice) == bool(assumed)


def test_a_dimension_that_stands_twice_has_one_size(tmp_path: Path) -> None:
    """Also where one sample is run alone, to see whether it depends on its batch."""
    ends = [helper.make_tensor_value_info(*end) for end in (("x", 1, ["n", "n", 3]), ("y", 1, ["n", 3]))]
    made = helper.make_graph(
        [helper.make_node("ReduceMean", ["x"], ["y"], axes=[1], keepdims=0)], "g", *([end] for end in ends)
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1, 8), data=None, data_options=DataOptions(), seed=0)
    sample.run({"model": model}, tmp_path, lambda _: None)
    assert samples.read(tmp_path).interacting
    with pytest.raises(SignatureError, match="with n = 1") as error:
        check_feeds(model_file.signature(path), {"x": np.ones((1, 8, 3), np.float32)})
    assert "n stands twice in 'x'" in error.value.remedy


@pytest.mark.parametrize(("dtypes", "side"), [((16, 1), "input 'x'"), ((1, 16), "output 'y'")])
def test_bfloat16_at_the_ends_of_a_graph_is_refused_by_name(tmp_path: Path, dtypes: tuple[int, int], side: str) -> None:
    ends = [helper.make_tensor_value_info(name, dtype, ["n", 3]) for name, dtype in zip("xy", dtypes, strict=True)]
    made = helper.make_graph([helper.make_node("Cast", ["x"], ["y"], to=dtypes[1])], "g", ends[:1], ends[1:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1,), data=None, data_options=DataOptions(), seed=0)
    with pytest.raises(SignatureError, match=f"the {side} is bfloat16") as error:
        sample.run({"model": model}, tmp_path, lambda _: None)
    assert "in float32, with a Cast" in error.value.remedy


def test_samples_of_an_output_for_each_pair_of_them_interact(tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info(*end) for end in (("x", 1, ["batch", 3]), ("y", 1, ["batch", "batch"]))]
    nodes = [helper.make_node("Transpose", ["x"], ["t"]), helper.make_node("MatMul", ["x", "t"], ["y"])]
    path = tmp_path / "pairs.onnx"
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    (reference := tmp_path / "reference").mkdir()
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(2, 8), data=None, data_options=DataOptions(), seed=0)
    (note,) = sample.run({"model": model}, reference, lambda _: None).notes
    assert note.startswith("the model's output 'y' has the batch in two dimensions")
    assert "judged in batches of 2" in note
    assert samples.read(reference).interacting


@pytest.mark.parametrize(("interacting", "apart", "batch"), [(False, True, 0), (True, True, 1), (False, False, 3)])
def test_samples_that_change_each_others_answers_are_judged_in_a_batch_that_is_measured(
    tmp_path: Path, interacting: bool, apart: bool, batch: int
) -> None:
    """In the first one, as the baseline's; in the largest one if only the precision makes them do so."""
    sizes: list[int] = []

    class Counted:
        signature = IMAGE.model_copy(update={"outputs": (TensorSpec.parse("y:float32:batch,3"),)})

        def run(self, feeds: Feeds) -> dict[str, Array]:
            sizes.append(len(feeds["x"]))
            return {"y": feeds["x"]}

    np.savez(tmp_path / "data.npz", x=np.eye(10, 3, dtype=np.float32), labels=np.zeros(10, np.int64))
    (place := tmp_path / "reference").mkdir()
    cases = tuple(Case(sizes={"batch": size}, batch=size) for size in (1, 3))
    samples.write(place, Samples(data="d", ranges={}, cases=cases, interacting=interacting))
    reference = Artifact(kind="reference", path=place / samples.RECORD, sha256="", bytes=0)
    fields = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions(), "samples": None, "metric": "top1"}
    quality = Quality(engine=OnnxRuntime(), device=Device(), batch=3, largest_batch=64, seed=0, **fields)
    judged, answers, _ = quality.judge(Counted(), None, lambda _: None, reference)  # type: ignore[arg-type]
    assert not isinstance(judged, str)
    assert sizes[0] == (1 if interacting else 10)
    (done := tmp_path / "done").mkdir()
    write_records(done, [judged])
    np.savez(done / "outputs.npz", **answers)
    baseline = Artifact(kind="record", path=done / RECORDS, sha256="", bytes=0)
    sizes.clear()
    judged, _, _ = quality.model_copy(update={"rows_apart": apart}).judge(Counted(), baseline, lambda _: None)  # type: ignore[arg-type]
    assert not isinstance(judged, str)
    assert (judged.batch or 0, sizes[0]) == (batch, batch or 10)
    assert judged.basis == "10 samples" + (f" in batches of {batch}" if batch else "")


@pytest.mark.parametrize(
    ("metric", "names", "noted"),
    [
        ("answer_f1", ("y", "z"), True),
        ("answer_match", ("y", "z"), True),
        ("answer_f1:z,y", ("y", "z"), False),
        ("answer_f1", ("end_logits", "start_logits"), False),
    ],
)
def test_outputs_that_are_taken_as_ends_of_an_answer_by_their_order_are_noted(
    metric: str, names: tuple[str, str], noted: bool
) -> None:
    x = TensorSpec.parse("x:float32:batch,9")
    ends = tuple(TensorSpec.parse(f"{name}:float32:batch,9") for name in names)

    def run(feeds: Feeds) -> dict[str, Array]:
        return {name: sign * feeds["x"] for name, sign in zip(names, (1, -1), strict=True)}

    model: Any = SimpleNamespace(signature=Signature(inputs=(x,), outputs=ends), run=run)
    data = Dataset("data", {"x": np.zeros((4, 9), np.float32)}, np.zeros((4, 2), np.int64))
    sentence, _ = try_metric(metric, model, data)
    first = "'y' is taken as the scores of an answer's first token, and 'z' as those of its last"
    assert sentence == (
        f"{first}, as their names do not tell (--metric NAME:z,y for the other way round)" if noted else ""
    )


@pytest.mark.parametrize(
    ("bad", "words"), [(1, r"^\d[\d.]* % of the numbers in eager's output 'y' are NaN"), (20, "for all sam")]
)
def test_a_model_may_answer_nan_for_some_samples_with_a_note(tmp_path: Path, bad: int, words: str) -> None:
    np.savez(
        tmp_path / "data.npz", x=np.repeat(np.float32([[-1], [1]]), [bad, 20 - bad], axis=0) * np.ones((1, 3), "f")
    )
    (reference := tmp_path / "reference").mkdir()
    data = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions()}
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1,), seed=0, **data)
    model = {"model": save_operator(tmp_path / "float.onnx", "Log")}
    if bad == 20:
        with pytest.raises(SourceError, match=words):
            sample.run(model, reference, lambda _: None)
    else:
        assert any(re.search(words, note) for note in sample.run(model, reference, lambda _: None).notes)


@pytest.mark.parametrize(
    ("operator", "axis", "interacting"), [("CumSum", 0, True), ("CumSum", 1, False), ("Neg", None, False)]
)
def test_a_model_whose_samples_influence_each_other_is_noted(
    tmp_path: Path, operator: str, axis: int | None, interacting: bool
) -> None:
    """The first sample of a running sum has its own answer; the last one has not."""
    model = save_operator(tmp_path / "sum.onnx", operator, *([] if axis is None else [np.int64(axis)]))
    for batches in ((1, 8), (1,), (8,)):
        (reference := tmp_path / "-".join(map(str, batches))).mkdir()
        sample = Sample(engine=OnnxRuntime(), ranges={}, batches=batches, data=None, data_options=DataOptions(), seed=0)
        notes = sample.run({"model": model}, reference, lambda _: None).notes
        words = f"eager's 'y' for the last of {max(*batches, 2)} samples is another one where it is alone"
        assert any(words in note for note in notes) == interacting
        assert samples.read(reference).interacting == interacting


@pytest.mark.parametrize(("words", "advised"), [("seq, N", True), ("batch, N", False), ("seq, 4", False)])
def test_a_dimension_that_is_taken_for_the_batch_is_named_where_it_may_be_another(
    tmp_path: Path, words: str, *, advised: bool
) -> None:
    text = f"net (float[{words}] x) => (float[{words}] y) <int64 axis = {{0}}> {{ y = CumSum(x, axis) }}"
    path = tmp_path / "sum.onnx"
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(onnx.parser.parse_graph(text), opset_imports=opsets, ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    (reference := tmp_path / "reference").mkdir()
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1, 8), data=None, data_options=DataOptions(), seed=0)
    (note,) = [note for note in sample.run({"model": model}, reference, lambda _: None).notes if "rest of its" in note]
    advice = "taken to be 'seq': if it is another dimension, call that 'batch' with --input"
    assert note.endswith(advice) == advised


@pytest.mark.parametrize("batches", [(2, 4), (1, 8)])
def test_a_model_that_drops_a_batch_of_1_is_judged_and_noted(tmp_path: Path, batches: tuple[int, ...]) -> None:
    """An output without a dimension is no answer of another sample."""
    ends = [helper.make_tensor_value_info(*end) for end in (("x", 1, ["batch", 1]), ("y", 1, ["batch"]))]
    made = helper.make_graph([helper.make_node("Squeeze", ["x"], ["y"])], "g", ends[:1], ends[1:])
    path = tmp_path / "squeeze.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    (reference := tmp_path / "reference").mkdir()
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=batches, data=None, data_options=DataOptions(), seed=0)
    (note,) = sample.run({"model": model}, reference, lambda _: None).notes
    assert note.startswith("the model drops a batch of 1 from its output 'y', as squeeze() does: it answers [] to one")
    assert not samples.read(reference).interacting


def test_a_batch_size_at_which_nothing_is_a_number_is_refused(tmp_path: Path) -> None:
    """An example is dividing by a deviation over the batch, which is zero for one sample."""
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 3]) for name in "xy"]
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0]),
        helper.make_node("Sub", ["x", "mean"], ["apart"]),
        helper.make_node("ReduceL2", ["apart"], ["size"], axes=[0]),
        helper.make_node("Div", ["apart", "size"], ["y"]),
    ]
    path = tmp_path / "scaled.onnx"
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    (reference := tmp_path / "reference").mkdir()
    for batches in ((1, 8), (2, 8)):
        sample = Sample(engine=OnnxRuntime(), ranges={}, batches=batches, data=None, data_options=DataOptions(), seed=0)
        if batches[0] == 1:
            with pytest.raises(SourceError, match="outputs are NaN or infinity at batch 1, for all") as error:
                sample.run({"model": model}, reference, lambda _: None)
            assert "--batch 2,8" in error.value.remedy
        else:
            sample.run({"model": model}, reference, lambda _: None)


def test_samples_of_a_part_are_counted_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", x=np.random.default_rng(0).random((30, 3), np.float32))
    code = "def {}():\n    return ({{'x': random.default_rng({}).random((30, 3), 'float32')}},)\n"
    functions = code.format("same", 0) + code.format("other", "")
    Path("parts_rows.py").write_text(f"from numpy import random\n{functions}", encoding="utf-8")
    model, counts = {"model": save_operator(tmp_path / "float.onnx", "Identity")}, dict.fromkeys(PARTS, 10)
    for data, options, parts in (
        ("data.npz", DataOptions(), {}),
        ("data.npz", PartOptions(part="choice"), counts),
        ("parts_rows.py:same", PartOptions(part="choice"), counts),
    ):
        sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1,), data=data, data_options=options, seed=0)
        sample.run(model, tmp_path, lambda _: None)
        assert samples.read(tmp_path).parts == parts
        assert ("parts" in (tmp_path / samples.RECORD).read_text()) is bool(parts)
    unstable = sample.model_copy(update={"data": "parts_rows.py:other"})
    with pytest.raises(DataError, match="yields other samples each time"):
        unstable.run(model, tmp_path, lambda _: None)
