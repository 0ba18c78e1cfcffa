"""Samples of a model, its answers to them, and metrics on them."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from enginesmith.calibration.dataset import Dataset, open_dataset, split_rows
from enginesmith.calibration.options import PARTS, DataOptions, PartName, PartOptions
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.errors import DataError, ModelError, SignatureError, SourceError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.samples import Case, Samples, check_feeds
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks import measure, verify
from enginesmith.pipeline.tasks.base import RECORDS, write_records
from enginesmith.pipeline.tasks.load import make_example
from enginesmith.pipeline.tasks.measure import Quality, try_metric
from enginesmith.pipeline.tasks.verify import Sample
from enginesmith.pipeline.tensors import Array, Feeds, ShapeRange, Signature, TensorSpec
from graphs import parse_graph, save_operator


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
    told = verify._advise(model, {"known": ShapeRange.parse("9")}, data)
    with pytest.raises(ModelError, match="has to be 0, at batch 8") as error:
        verify._run_case(Refusing(), Case(sizes={"batch": 8}, batch=8), {}, told)  # type: ignore[arg-type]
    words = ["drawn at random", "otherwise than 'batch'", *(word for word in advice if "--shape" in word)]
    assert [word for word in words if word in error.value.remedy] == advice
    assert ("--shape" in error.value.remedy) == ("--shape" in "".join(advice))


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
        sample.run({"model": model}, tmp_path, lambda _: None)
        ranges = samples.read(tmp_path).ranges
        assert {name: str(range_) for name, range_ in ranges.items()} == {
            "batch": "1:1:8",
            "height": height,
            "width": width,
        }


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


@pytest.mark.parametrize(
    ("nodes", "most"),
    [
        ([("Gather", "table ids", "y")], 7),
        ([("Cast", "ids", "a"), ("Unsqueeze", "a axes", "b"), ("Gather", "table b", "y")], 7),
        ([("DequantizeLinear", "small scale", "a"), ("Gather", "a ids", "y"), ("Gather", "table ids", "z")], 5),
        ([("Add", "ids axes", "a"), ("Gather", "table a", "y")], 1),  # a place behind an offset
        ([("Gather", "ids axes", "y")], 1),
    ],
)
def test_made_up_indices_are_of_all_rows_of_their_table(
    tmp_path: Path, nodes: list[tuple[str, str, str]], most: int
) -> None:
    """Else all answers of a sentence encoder would be those of two tokens."""
    ends = [helper.make_tensor_value_info(*end) for end in (("ids", 7, ["batch", 64]), ("y", 1, ["batch", "n", 3]))]
    tables = {"table": np.zeros((8, 3), np.float32), "small": np.zeros((6, 3), np.int8), "scale": np.float32(1)}
    stored = {**tables, "axes": np.array([1])}
    made = [
        helper.make_node(operator, read.split(), [output], **({"to": 6} if operator == "Cast" else {}))
        for operator, read, output in nodes
    ]
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    path = tmp_path / "model.onnx"
    graph = helper.make_graph(made, "g", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    given = model_file.signature(path)
    assert given.tables == ({"ids": most + 1} if most > 1 else {})
    feeds, _ = make_example(Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=given))
    assert (feeds["ids"].min(), feeds["ids"].max()) == (0, most)


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


@pytest.mark.parametrize("part", ["choice", "judgement"])
def test_a_bad_label_is_named_by_its_row_in_the_data(tmp_path: Path, part: PartName) -> None:
    """Rows of a part are shuffled."""
    rows, place = np.random.default_rng(0).random((40, 3), np.float32), tmp_path / "data.npz"
    options = PartOptions(part=part, shared_by=("choice", "judgement"))
    row = split_rows(Dataset("d", {"x": rows}), options.shared_by, None)[part][4]
    np.savez(place, x=rows, labels=np.where(np.arange(40)[:, None] == row, np.inf, rows))
    fields = {"data": str(place), "data_options": options, "samples": None, "metric": "mse"}
    quality = Quality(engine=OnnxRuntime(), device=Device(), batch=8, largest_batch=8, seed=0, **fields)
    with quality.engine.load(save_operator(tmp_path / "model.onnx", "Identity"), Device()) as session:
        data = open_dataset(str(place), session.signature.inputs, split="test", options=options)
        for judge in (lambda: quality.judge(session, None, lambda _: None), lambda: try_metric("mse", session, data)):
            with pytest.raises(DataError, match=f"have NaN or infinity, first for row {row} of data.npz\n"):
                judge()


@pytest.mark.parametrize(("most", "sizes"), [(3, {3}), (16, {16})])
def test_as_many_samples_are_judged_together_as_the_range_of_the_batch_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, sizes: set[int]
) -> None:
    rows = np.random.default_rng(0).random((40, 3), np.float32)
    np.savez(tmp_path / "data.npz", x=rows, labels=rows)
    model = save_operator(tmp_path / "model.onnx", "Identity")
    assert model.signature is not None
    ranges = {samples.batch_symbol(model.signature) or "": ShapeRange(min=1, opt=1, max=most)}
    fields = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions(), "samples": None, "metric": "mse"}
    quality = Quality(engine=OnnxRuntime(), device=Device(), batch=8, largest_batch=8, ranges=ranges, seed=0, **fields)
    given, answer_rows = set[int](), measure._answer_rows
    monkeypatch.setattr(
        measure, "_answer_rows", lambda *args, **named: given.add(args[2]) or answer_rows(*args, **named)
    )
    with quality.engine.load(model, Device()) as session:
        quality.judge(session, None, lambda _: None)
    assert given == sizes


def test_a_label_of_another_part_is_found_before_long_work(tmp_path: Path) -> None:
    """The metric is tried with the samples for choosing; this one is for the last judgement."""
    place, options = tmp_path / "data.npz", PartOptions(part="choice", shared_by=("choice", "judgement"))
    rows = np.eye(3, dtype=np.float32)[np.arange(40) % 3]
    with OnnxRuntime().load(save_operator(tmp_path / "model.onnx", "Identity"), Device()) as session:
        for row in range(40):
            np.savez(place, x=rows, labels=np.where(np.arange(40) == row, 3, np.arange(40) % 3))
            data = open_dataset(str(place), session.signature.inputs, split="test", options=options)
            if row in data.parts["judgement"]:
                break
        told = f"a label is 3, and the output 'y' has 3 classes, first for row {row} of data.npz\n.*from 0"
        with pytest.raises(DataError, match=told):
            try_metric("top1", session, data)


@pytest.mark.parametrize("filled", [False, True])
def test_missing_values_are_for_models_that_answer_them(tmp_path: Path, filled: bool) -> None:
    rows, place = np.random.default_rng(0).random((40, 3), np.float32), tmp_path / "data.npz"
    np.savez(place, x=np.where(np.arange(40)[:, None] == 31, np.nan, rows))
    value = "Where(missing, zero, x)" if filled else "Neg(x)"
    body = f"{{missing = IsNaN(x) zero = Constant<value_float: float = 0.0>() y = {value}}}"
    graph = parse_graph(f"net (float[batch, 3] x) => (float[batch, 3] y) {body}")
    ir.save(graph, path := tmp_path / "model.onnx")
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    fields = {"data": str(place), "data_options": DataOptions(), "batches": (1,)}
    sample = Sample(engine=OnnxRuntime(), ranges={}, seed=0, **fields)
    if filled:
        assert "'x' has NaN in 1 of 40 rows" in sample.run({"model": model}, tmp_path, lambda _: None).notes[0]
        return
    with pytest.raises(DataError, match="'x' holds NaN, first in row 31, and so does all of 'y'"):
        sample.run({"model": model}, tmp_path, lambda _: None)


def test_only_outputs_with_a_row_for_each_sample_are_judged(tmp_path: Path) -> None:
    """A loss beside the logits is a single number; of rows that values choose, each batch has as many as it likes."""
    specs = ("y:float32:batch,3", "loss:float32:", "chosen:float32:n,4", "wide:float32:batch,n")
    x = TensorSpec.parse("x:float32:batch,3")
    outputs = tuple(
        TensorSpec(name=name, dtype="float32", shape=tuple(int(d) if d.isdigit() else d for d in dims.split(",") if d))
        for name, _, dims in (spec.split(":") for spec in specs)
    )

    class Model:
        signature = Signature(inputs=(x,), outputs=outputs)

        def run(self, feeds: Feeds) -> dict[str, Array]:
            rows = feeds["x"]
            positive = int((rows[0] > 0).sum())
            wide = np.zeros((len(rows), positive), np.float32)
            return {"y": rows, "loss": rows.sum(), "chosen": np.zeros((positive, 4), np.float32), "wide": wide}

    rows = np.float32([[1, -1, -1], [1, 0, 0], [1, 1, -1], [0, 1, 0]])
    np.savez(tmp_path / "data.npz", x=rows, labels=np.array([0, 0, 0, 1]))
    data = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions(), "samples": None}
    quality = Quality(engine=OnnxRuntime(), device=Device(), batch=2, largest_batch=2, seed=0, metric="top1:y", **data)
    judged, answers, _ = quality.judge(Model(), None, lambda _: None)  # type: ignore[arg-type]
    assert list(answers) == ["y"]
    assert not isinstance(judged, str)
    assert judged.value == 1
    dataset = open_dataset(data["data"], (x,), split="test", options=DataOptions())
    sentence, _ = try_metric("top1", Model(), dataset)  # type: ignore[arg-type]
    assert sentence == "top1 of 'y' is judged, 'wide' not (--metric NAME:OUTPUT)"
    Model.signature = Signature(inputs=(x,), outputs=outputs[3:])
    Model.run = lambda _, feeds: {"wide": np.zeros((len(feeds["x"]), int(feeds["x"][0].sum()) + 2), np.float32)}  # type: ignore[assignment,method-assign,misc]
    unnamed = quality.model_copy(update={"metric": None})
    reason, _, _ = unnamed.judge(Model(), None, lambda _: None)  # type: ignore[arg-type]
    assert str(reason).startswith("no metric was named, and 'wide' has rows of other sizes in other batches")
    Model.signature = Signature(inputs=(x,), outputs=outputs[1:2])
    Model.run = lambda _, feeds: {"loss": feeds["x"].sum()}  # type: ignore[assignment,method-assign,misc]
    with pytest.raises(
        DataError, match=r"for 2 samples, no output of the model has a row for each, .*: 'loss' is \[\]"
    ):
        try_metric("top1", Model(), dataset)  # type: ignore[arg-type]
    reason, _, _ = unnamed.judge(Model(), None, lambda _: None)  # type: ignore[arg-type]
    assert str(reason).startswith("no metric was named, and for 2 samples, no output of the model has a row")


@pytest.mark.parametrize(("size", "taken"), [(1, True), (2, False), ("batch", False)])
def test_all_that_a_model_of_batch_1_answers_is_of_that_sample(size: int | str, taken: bool) -> None:
    """Readers of text answer [time, 1, letters], say."""
    rows = size if isinstance(size, int) else 1
    x, y = TensorSpec.parse(f"x:float32:{size},3"), TensorSpec.parse(f"y:float32:5,{rows}")
    signature = Signature(inputs=(x,), outputs=(y,))
    answer = np.arange(5 * rows).reshape(5, rows)
    model: Any = SimpleNamespace(signature=signature, run=lambda feeds: {"y": answer})
    if taken:
        answers = measure._answer_rows(model, {"x": np.zeros((1, 3))}, 1, rows_vary=False)
        assert answers["y"].tolist() == [[0, 1, 2, 3, 4]]
    else:
        with pytest.raises(DataError, match="no output of the model has a row for each"):
            measure._answer_rows(model, {"x": np.zeros((rows, 3))}, rows, rows_vary=False)


def test_boxes_of_one_image_without_a_batch_are_no_row_of_a_sample() -> None:
    """A detector of batch 1 with NMS inside answers [boxes, 4] and [boxes]."""
    x = TensorSpec.parse("x:float32:1,3")
    outputs = (TensorSpec.parse("boxes:float32:count,4"), TensorSpec.parse("scores:float32:count"))
    answers = {"boxes": np.zeros((7, 4)), "scores": np.zeros(7)}
    model: Any = SimpleNamespace(signature=Signature(inputs=(x,), outputs=outputs), run=lambda feeds: answers)
    with pytest.raises(DataError, match=r"^for 1 sample, .* which a metric needs: 'boxes' is") as error:
        measure._answer_rows(model, {"x": np.zeros((1, 3))}, 1, rows_vary=False)
    assert "[batch, boxes, 6]" in error.value.remedy
    assert "omit --metric and --max-drop" in error.value.remedy


@pytest.mark.parametrize("batched", [False, True])
def test_different_numbers_of_boxes_are_judged(tmp_path: Path, batched: bool) -> None:
    """Of a detector of one image: two boxes, one, where the answers look like those of a sample, and none."""
    x = TensorSpec.parse("x:float32:1,3")
    lead = "1," if batched else ""
    outputs = tuple(
        TensorSpec.parse(text)
        for text in (f"boxes:float32:{lead}n,4", f"scores:float32:{lead}m", f"labels:int64:{lead}k", "loss:float32:1")
    )

    def run(feeds: Feeds) -> dict[str, Array]:
        found = np.float32([[0, 0, 10, 10], [20, 20, 30, 30]])[: int(feeds["x"][0, 0])]
        answers = {
            "boxes": found,
            "scores": np.full(len(found), 0.9, np.float32),
            "labels": np.arange(len(found), dtype=np.int64),
        }
        return {**({k: v[None] for k, v in answers.items()} if batched else answers), "loss": np.zeros(1, np.float32)}

    labels = np.full((3, 2, 5), -1.0, np.float32)
    labels[:2, 0] = 0, 0, 0, 10, 10
    labels[0, 1] = 1, 20, 20, 30, 35
    np.savez(tmp_path / "data.npz", x=np.float32([[2] * 3, [1] * 3, [0] * 3]), labels=labels)
    data = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions(), "samples": None}
    quality = Quality(engine=OnnxRuntime(), device=Device(), batch=1, largest_batch=1, seed=0, metric="map", **data)
    model: Any = SimpleNamespace(signature=Signature(inputs=(x,), outputs=outputs), run=run)
    judged, answers, _ = quality.judge(model, None, lambda _: None)
    assert not isinstance(judged, str)
    assert judged.output == "boxes,scores,labels"
    assert judged.value == pytest.approx(
        (1 + 0.4) / 2
    )  # the second class overlaps by 2/3: enough at 4 of 10 thresholds
    assert answers["boxes"].shape == (3, 2, 4)
    dataset = open_dataset(data["data"], (x,), split="test", options=DataOptions())
    sentence, _ = try_metric("map", model, dataset)
    assert sentence == "map of 'boxes,scores,labels' is judged, 'loss' not (--metric NAME:OUTPUT)"


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
