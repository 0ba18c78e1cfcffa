"""Dimensions of ONNX files: what --input may write into them, and which sizes are assumed where nothing tells any."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import baseline
from enginesmith.pipeline.errors import InvalidGraph, ModelError, SignatureError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import dimensions, model_file, validation
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.examples import Baseline, choose_sizes, draw_feeds
from enginesmith.pipeline.tasks.load import LoadOnnx
from enginesmith.pipeline.tensors import Feeds, Signature, TensorSpec, read_sizes

STATEFUL = {"x": ["", ""], "state": [2, "", 4], "rate": []}


def save_graph(path: Path, inputs: Mapping[str, list[Any]], outputs: Mapping[str, list[Any]]) -> Path:
    """Save a graph that adds to each output's input a weight that lies beside the file; ``rate`` is left out.

    An output is called after its input, with a y before. What it adds is not seen by shape inference.
    """
    weight = numpy_helper.from_array(np.zeros(1, np.float32), "w")
    weight.raw_data = b"\0" * 4
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    nodes = [helper.make_node("Add", [name[1:], "w"], [name]) for name in outputs]
    graph = helper.make_graph(nodes, "g", values, ends, [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return path


def draw(path: Path) -> Any:
    def draw_ones(sizes: Mapping[str, int]) -> Feeds:
        return {spec.name: np.ones(spec.resolve(sizes), np.float32) for spec in model_file.signature(path).inputs}

    return draw_ones


def write(path: Path, *texts: str) -> Signature:
    target = path.parent / "out" / "model.onnx"
    target.parent.mkdir(exist_ok=True)
    dimensions.write_inputs(path, [TensorSpec.parse(text) for text in texts], target)
    sizes = choose_sizes(model_file.signature(target))
    assert dimensions.name_outputs(target, sizes, draw(target)) == ()
    validation.check(target)
    return model_file.signature(target)


def test_input_names_and_fixes_open_dimensions_of_a_file_and_outputs_follow(tmp_path: Path) -> None:
    """In the file's order, whatever that of the options is."""
    path = save_graph(tmp_path / "m.onnx", STATEFUL, {"yx": ["", ""], "ystate": ["", "", ""]})
    signature = write(path, "state:float32:2,batch,4", "x:float32:batch,8", "rate:float32:")
    assert [str(spec) for spec in signature.inputs] == [
        "x:float32:batch,8",
        "state:float32:2,batch,4",
        "rate:float32:",
    ]
    assert signature.outputs[0].shape == ("batch", "output_0_dim_1")
    assert signature.outputs[1].shape == ("output_1_dim_0", "batch", "output_1_dim_2")


def test_a_name_that_is_replaced_is_replaced_wherever_the_file_has_it(tmp_path: Path) -> None:
    given = {"x": ["N.1", "past"], "mask": ["N.1", "past + 1"]}
    path = save_graph(tmp_path / "m.onnx", given, {"yx": ["N.1", "past"], "ymask": ["N.1", "past + 1"]})
    signature = write(path, "x:float32:batch,length", "mask:float32:batch,length+1")
    assert [spec.shape for spec in signature.outputs] == [("batch", "length"), ("batch", "length+1")]
    signature = write(path, "x:float32:3,length", "mask:float32:3,length+1")
    assert [spec.shape for spec in signature.outputs] == [(3, "length"), (3, "length+1")]


def test_an_output_without_a_name_is_not_fixed_by_what_is_guessed_of_it(tmp_path: Path) -> None:
    path = save_graph(tmp_path / "m.onnx", {"x": ["", 3]}, {"yx": ["", 3]})
    assert model_file.signature(path).outputs[0].shape == ("batch", 3)
    assert write(path, "x:float32:5,3").outputs[0].shape == ("output_0_dim_0", 3)
    assert write(path, "x:float32:n,3").outputs[0].shape == ("n", 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["x:float32:batch,8", "state:float32:2,batch,4"], "and the file has"),  # not all
        (["x:float32:batch,8", "state:float32:2,batch,4", "rate:int64:"], "and the file has"),
        (["x:float32:batch,8,1", "state:float32:2,batch,4", "rate:float32:"], "and the file has"),
        (["x:float32:batch,8", "state:float32:batch,2,4", "rate:float32:"], "fixes a size of 'state' at 2"),
    ],
)
def test_input_may_not_change_what_a_file_fixes(tmp_path: Path, given: list[str], words: str) -> None:
    path = save_graph(tmp_path / "m.onnx", STATEFUL, {"yx": ["", ""]})
    with pytest.raises(SignatureError, match=words) as error:
        write(path, *given)
    options = "--input x:float32:input_0_dim_0,input_0_dim_1 --input state:float32:2,input_1_dim_1,4 --input rate"
    assert options in error.value.remedy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["x:float32:a,past", "mask:float32:b,past+1"], "N is one size in the file, and gets "),
        (["x:float32:a,b", "mask:float32:a,past+1"], r"past\+1 of 'mask' is then b\+1"),
        (["x:float32:a,4", "mask:float32:a,7"], r"past\+1 of 'mask' is then 5"),
    ],
)
def test_input_may_not_contradict_names_of_a_file(tmp_path: Path, given: list[str], words: str) -> None:
    inputs = {"x": ["N", "past"], "mask": ["N", "past + 1"]}
    path = save_graph(tmp_path / "m.onnx", inputs, {"yx": ["N", "past"]})
    with pytest.raises(SignatureError, match=words):
        write(path, *given)


def test_a_model_that_refuses_drawn_feeds_keeps_the_names_of_its_outputs_with_a_note(tmp_path: Path) -> None:
    path = save_graph(tmp_path / "m.onnx", {"x": ["n", 3], "z": [2, 3]}, {"yx": ["", ""]})
    model = onnx.load(path)
    model.graph.node[0].input[1] = "z"  # which 8 rows cannot be added to
    onnx.save(model, path)
    (note,) = dimensions.name_outputs(path, {"n": 8}, draw(path))
    assert "is read as the batch: the model refuses samples drawn at n 8, or half of one; --shape" in note
    assert model_file.signature(path).outputs[0].shape == ("output_0_dim_0", "output_0_dim_1")


@pytest.mark.parametrize(
    ("inputs", "sizes"),
    [
        (["x:float32:batch,3,height,width"], [8, 128, 128]),
        (["x:uint8:batch,height,width,1"], [8, 128, 128]),
        (["x:float32:n,3,48,width"], [8, 128]),
        (["x:float32:batch,4,height,width"], [8, 8, 8]),
        (["x:float32:batch,3,length"], [8, 8]),
        (["x:float32:batch,3,height,width", "state:float32:2,batch,8"], [8, 128, 128]),
        (["ids:int64:batch,length", "mask:float32:batch,1,length,total"], [8, 8, 8]),  # of attention
        (["ids:int64:batch,1", "mask:int64:batch,past+1", "keys:float32:batch,3,past,8"], [8, 8]),
    ],
)
def test_heights_and_widths_of_pictures_are_assumed_larger_than_other_sizes(
    inputs: list[str], sizes: list[int]
) -> None:
    signature = Signature(inputs=tuple(map(TensorSpec.parse, inputs)), outputs=())
    assert [*choose_sizes(signature).values()] == sizes


def save_declared(
    path: Path,
    nodes: list[onnx.NodeProto],
    outputs: Mapping[str, tuple[int, list[Any]]],
    shape: tuple[Any, ...] = ("batch", 4),
    dtype: int = TensorProto.FLOAT,
    **constants: Any,
) -> Path:
    """Save a graph of an input x with declared shapes of its outputs, whether they are right or not."""
    ends = [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in outputs.items()]
    weights = [numpy_helper.from_array(np.array([1]), "one"), numpy_helper.from_array(np.float32([1, 2]), "scales")]
    weights += [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    given = [helper.make_tensor_value_info("x", dtype, shape)]
    graph = helper.make_graph(nodes, "g", given, ends, weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def make_classifier() -> onnx.NodeProto:
    """Make a tree of one leaf, whose answers have the shapes [batch] and [batch, 2]."""
    ones = {f"nodes_{name}": [0] for name in ("falsenodeids", "truenodeids", "featureids", "nodeids", "treeids")}
    leaf = {"class_ids": [0, 1], "class_nodeids": [0, 0], "class_treeids": [0, 0], "class_weights": [0.7, 0.3]}
    rest = {"nodes_modes": ["LEAF"], "nodes_values": [0.0], "classlabels_int64s": [0, 1]}
    return helper.make_node(
        "TreeEnsembleClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml", **ones, **leaf, **rest
    )


def load_outputs(path: Path, **fields: Any) -> tuple[list[str], tuple[str, ...]]:
    out = path.parent / "out"
    out.mkdir()
    effect = LoadOnnx(source=resolve(str(path)), **fields).run({}, out, lambda _: None)
    assert effect.signature == model_file.signature(out / "model.onnx")
    validation.check(out / "model.onnx")
    return [str(spec) for spec in effect.signature.outputs], tuple(effect.notes)


def test_a_declared_output_that_the_file_does_not_answer_is_corrected(tmp_path: Path) -> None:
    declared = {"label": (TensorProto.INT64, [1]), "scores": (TensorProto.FLOAT, ["batch", 2])}
    outputs, notes = load_outputs(save_declared(tmp_path / "tree.onnx", [make_classifier()], declared))
    assert outputs == ["label:int64:batch", "scores:float32:batch,2"]
    assert notes == (
        "the file declares the output label:int64:1, and answers label:int64:batch, which is taken instead",
    )


def test_a_corrected_output_is_answered_at_another_batch_in_the_same_binding(tmp_path: Path) -> None:
    declared = {"label": (TensorProto.INT64, [1]), "scores": (TensorProto.FLOAT, ["batch", 2])}
    path = save_declared(tmp_path / "tree.onnx", [make_classifier()], declared)
    load_outputs(path)
    file = tmp_path / "out" / "model.onnx"
    model = Artifact(kind="onnx", path=file, sha256="", bytes=0, signature=model_file.signature(file))
    engine = baseline("onnx")
    with engine.load(model, Device()) as session:
        bound = session.bind({"x": np.zeros((8, 4), np.float32)})
        for _ in range(2):
            session.enqueue(bound)
            assert session.fetch()["label"].shape == (8,)


@pytest.mark.parametrize("fields", [{}, {"inputs": (TensorSpec.parse("x:float32:rows,4"),)}])
def test_a_rank_that_contradicts_the_nodes_is_corrected(tmp_path: Path, fields: dict[str, Any]) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Unsqueeze", ["h", "one"], ["y"])]
    path = save_declared(tmp_path / "rank.onnx", nodes, {"y": (TensorProto.FLOAT, ["batch", 4])})
    with pytest.raises(InvalidGraph, match="contradict each other"):
        validation.check(path)
    batch = "rows" if fields else "batch"
    outputs, notes = load_outputs(path, **fields)
    assert outputs == [f"y:float32:{batch},1,4"]
    assert [f"answers y:float32:{batch},1,4" in note for note in notes] == [True]


def test_a_file_whose_declared_outputs_are_proven_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dimensions.evaluator, "open_graph", lambda path: pytest.fail("it was run"))
    nodes = [helper.make_node("Unsqueeze", ["x", "one"], ["y"])]
    declared = {"y": (TensorProto.FLOAT, ["rows", 1, 4])}
    assert load_outputs(save_declared(tmp_path / "m.onnx", nodes, declared)) == (["y:float32:rows,1,4"], ())


def test_a_contradiction_that_no_run_settles_is_an_error(tmp_path: Path) -> None:
    nodes = [helper.make_node("Unsqueeze", ["x", "one"], ["y"])]
    path = save_declared(tmp_path / "m.onnx", nodes, {"y": (TensorProto.FLOAT, ["batch", 4])})
    with pytest.raises(InvalidGraph, match=r"'y' is declared with another shape .* cannot be run"):
        dimensions.correct_outputs(path, {"batch": 2}, lambda sizes, seed: {"x": np.ones((2, 5), np.float32)})


def test_sizes_that_are_not_told_by_runs_are_left_open(tmp_path: Path) -> None:
    """The rows of NonZero depend on the numbers; of what the inputs' sizes do not change, the size stays."""
    nodes = [helper.make_node("NonZero", ["x"], ["y"]), helper.make_node("Resize", ["x", "", "scales"], ["z"])]
    declared = {"y": (TensorProto.INT64, [2, 5]), "z": (TensorProto.FLOAT, [1, 8])}
    outputs, notes = load_outputs(save_declared(tmp_path / "m.onnx", nodes, declared))
    assert outputs == ["y:int64:2,output_0_dim_1", "z:float32:batch,8"]
    assert len(notes) == 2


def make_counted(threshold: float) -> tuple[list[onnx.NodeProto], dict[str, Any]]:
    """Make nodes that tell which rows of x have a number above a threshold, and how many; with their constants."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["largest"], axes=[1], keepdims=0),
        helper.make_node("Greater", ["largest", "threshold"], ["above"]),
        helper.make_node("Cast", ["above"], ["ones"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["ones"], ["count"], keepdims=0),
    ]
    return nodes, {"threshold": np.float32(threshold), "none": np.int64(0), "step": np.int64(1)}


@pytest.mark.parametrize("shape", [(8, 4), ("batch", 4)])
@pytest.mark.parametrize("threshold", [-100, 1, 100])
@pytest.mark.parametrize("operator", ["Compress", "Range"])
def test_a_size_that_depends_on_values_stays_where_all_answers_have_it_and_else_is_left_open(
    tmp_path: Path, operator: str, threshold: float, shape: tuple[Any, ...]
) -> None:
    """All rows, some, or none are above the threshold. A detector may fill up what it found to a fixed size."""
    nodes, constants = make_counted(threshold)
    stays = threshold == -100 and shape == (8, 4)
    chooses = helper.make_node("Compress", ["x", "above"], ["y"], axis=0)
    counts = helper.make_node("Range", ["none", "count", "step"], ["y"])
    declared = (TensorProto.FLOAT, [8, 4]) if operator == "Compress" else (TensorProto.INT64, [8])
    nodes.append(chooses if operator == "Compress" else counts)
    path = save_declared(tmp_path / "m.onnx", nodes, {"y": declared}, shape, **constants)
    outputs, notes = load_outputs(path)
    size = "8" if stays else "output_0_dim_0"
    assert outputs == [f"y:float32:{size},4" if operator == "Compress" else f"y:int64:{size}"]
    assert ["may differ from call to call, and is left open" in note for note in notes] == [True] * (not stays)


def test_of_values_that_are_chosen_in_a_rank_that_only_a_run_tells_all_sizes_are_left_open(tmp_path: Path) -> None:
    nodes, constants = make_counted(-100)
    nodes += [
        helper.make_node("Compress", ["x", "above"], ["chosen"], axis=0),
        helper.make_node("Normalizer", ["chosen"], ["y"], domain="ai.onnx.ml"),
    ]
    path = save_declared(tmp_path / "m.onnx", nodes, {"y": (TensorProto.FLOAT, [8])}, **constants)
    outputs, _ = load_outputs(path)
    assert outputs == ["y:float32:output_0_dim_0,output_0_dim_1"]


@pytest.mark.parametrize("shape", [(8, 4), ("batch", 4)])
@pytest.mark.parametrize(("threshold", "declared"), [(1, 7), (1, "drawn"), (100, 7)])
def test_a_size_that_drawn_numbers_change_or_make_0_is_left_open(
    tmp_path: Path, threshold: float, declared: int | str, shape: tuple[Any, ...]
) -> None:
    """A loop that is left when values say so is not known by its operator."""
    nodes, constants = make_counted(threshold)
    value = helper.make_tensor_value_info
    ends = [value("again", TensorProto.BOOL, []), value("number", TensorProto.INT64, [])]
    body_nodes = [
        helper.make_node("Less", ["at", "count"], ["again"]),
        helper.make_node("Identity", ["at"], ["number"]),
    ]
    begins = [value("at", TensorProto.INT64, []), value("before", TensorProto.BOOL, [])]
    body = helper.make_graph(body_nodes, "body", begins, ends)
    nodes += [
        helper.make_node("Loop", ["most", "true"], ["numbers"], body=body),
        helper.make_node("Slice", ["numbers", "one", "most"], ["y"]),
    ]
    constants |= {"most": np.int64([99]), "true": np.bool_(1)}
    fed = draw_feeds(Signature(inputs=(TensorSpec.parse("x:float32:8,4"),), outputs=()), {})["x"]
    size = int((fed.max(1) > threshold).sum()) if declared == "drawn" else declared
    path = save_declared(tmp_path / "m.onnx", nodes, {"y": (TensorProto.INT64, [size])}, shape, **constants)
    outputs, notes = load_outputs(path)
    assert outputs == ["y:int64:output_0_dim_0"]
    assert ["is left open" in note for note in notes] == [True]


def test_a_size_that_all_runs_agree_on_replaces_a_declared_one(tmp_path: Path) -> None:
    """Inference does not know how a loop ends that is always gone through three times."""
    value = helper.make_tensor_value_info
    ends = [value("again", TensorProto.BOOL, []), value("number", TensorProto.INT64, [])]
    copies = [helper.make_node("Identity", names[:1], names[1:]) for names in (["before", "again"], ["at", "number"])]
    begins = [value("at", TensorProto.INT64, []), value("before", TensorProto.BOOL, [])]
    body = helper.make_graph(copies, "body", begins, ends)
    nodes = [helper.make_node("Loop", ["three", "true"], ["y"], body=body)]
    constants = {"three": np.int64(3), "true": np.bool_(1)}
    path = save_declared(tmp_path / "m.onnx", nodes, {"y": (TensorProto.INT64, [7])}, **constants)
    outputs, notes = load_outputs(path)
    assert outputs == ["y:int64:3"]
    assert ["is taken instead" in note for note in notes] == [True]


@pytest.mark.parametrize("shape", [(8, 4), ("batch", 4), ("batch", "width")])
def test_a_file_whose_outputs_are_as_declared_is_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[Any, ...]
) -> None:
    runs, open_graph = list[Feeds](), dimensions.evaluator.open_graph

    def open_counted(path: Path) -> Any:
        run = open_graph(path)
        return lambda feeds: runs.append(feeds) or run(feeds)

    monkeypatch.setattr(dimensions.evaluator, "open_graph", open_counted)
    nodes = [helper.make_node("Normalizer", ["x"], ["y"], domain="ai.onnx.ml")]
    path = save_declared(tmp_path / "m.onnx", nodes, {"y": (TensorProto.FLOAT, [*shape])}, shape)
    load_outputs(path)
    assert len(runs) == 2


def test_dtypes_that_numpy_lacks_are_not_fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dimensions.evaluator, "open_graph", lambda path: pytest.fail("it was run"))
    kind = TensorProto.BFLOAT16
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    path = save_declared(tmp_path / "m.onnx", nodes, {"y": (kind, [2, 4])}, dtype=kind)
    assert load_outputs(path) == (["y:bfloat16:2,4"], ())


RECURRENT = """<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => (float[{output}] y)
<float[1, 12, 4] w = {{{zeros}, {zeros}, {zeros}, {zeros}}}, float[1, 12, 3] r = {{{zeros}, {zeros}, {zeros}}}>
{{ {body} }}"""
ZEROS = ", ".join(["0"] * 12)
LAST = "at = Constant <value_ints = [0]> () all, last = LSTM <hidden_size = 3> (x, w, r) y = Squeeze(last, at)"


@pytest.mark.parametrize(
    ("inputs", "output", "body", "found"),
    [
        ("float[T, N, 4] x", "T, 1, N, 3", "y = LSTM <hidden_size = 3> (x, w, r)", "x:float32:T,batch,4"),
        (
            *("float[T, N, 4] x, float[1, N, 3] h", "T, 1, N, 3"),
            *("a = Relu(x) y = LSTM <hidden_size = 3> (a, w, r, , , h)", "x:float32:T,batch,4 h:float32:1,batch,3"),
        ),
        ("float[N, T, 4] x", "N, T, 1, 3", "y = LSTM <hidden_size = 3, layout = 1> (x, w, r)", ""),
        (
            *("float[N, T, 4] x", "T, 1, N, 3"),
            *("a = Transpose <perm = [1, 0, 2]> (x) y = LSTM <hidden_size = 3> (a, w, r)", ""),
        ),
        ("float[T, my_batch, 4] x", "T, my_batch, 4", "y = Relu(x)", "x:float32:T,batch,4"),
        ("float[batch_size, N, 4] x", "batch_size, 1, N, 3", "y = LSTM <hidden_size = 3> (x, w, r)", ""),
        ("float[T, N, 4] x", "T, N, 4", "y = Relu(x)", ""),
        ("float[T, 5, 4] x", "T, 1, 5, 3", "y = LSTM <hidden_size = 3> (x, w, r)", ""),
        ("float[T, N, 4] x", "N, 3", LAST, "x:float32:T,batch,4"),
        ("float[?, ?, 4] x", "?, 3", LAST, "x:float32:input_0_dim_0,batch,4"),
        ("float[?, ?, 4] x", "?, ?, 3", f"a = Transpose <perm = [1, 0, 2]> (x) {LAST.replace('(x', '(a')}", ""),
        (
            *("float[?, ?, 4] x, int32[?] n, float[1, ?, 3] h", "?, 3", LAST.replace("r)", "r, , n, h)")),
            "x:float32:input_0_dim_0,batch,4 n:int32:batch h:float32:1,batch,3",
        ),
        (
            *("float[N, T, 4] x, float[1, M, 3] h", "N, 3"),
            f"a = Transpose <perm = [1, 0, 2]> (x) {LAST.replace('(x, w, r)', '(a, w, r, , , h)')}",
            "x:float32:batch,T,4 h:float32:1,batch,3",
        ),
        ("float[?, 5, 4] x", "5, 3", LAST, ""),
    ],
)
def test_the_batch_is_where_recurrent_layers_have_it(
    tmp_path: Path, inputs: str, output: str, body: str, found: str
) -> None:
    """Steps of a sequence that are taken for samples depend on each other."""
    text = RECURRENT.format(inputs=inputs, output=output, body=body, zeros=ZEROS)
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    specs, notes = dimensions.find_batch(tmp_path / "m.onnx")
    assert " ".join(map(str, specs)) == found
    assert len(notes) == bool(found)
    assert dimensions.find_batch(tmp_path / "m.onnx", ["N", "my_batch", "input_0_dim_1"]) == ((), ()), (
        "named by --shape"
    )


@pytest.mark.parametrize(
    ("inputs", "output", "expected"),
    [
        ("float[time, batch_size, 4] x", "batch_size, 4", "x:float32:time,batch,4"),  # it is no batch that is summed
        ("float[T, myBatch, 4] x", "T, myBatch, 4", "x:float32:T,batch,4"),
        ("float[T, batch_0, 4] x, float[4] z", "T, batch_0, 4", ""),
        ("float[T, batch_0, 4] x, float[T, 4] z", "T, batch_0, 4", "x:float32:T,batch,4 z:float32:T,4"),
        (
            *("float[T, past_batch, bs] x, float[T, bs] z", "T, past_batch, bs"),
            "x:float32:T,past_batch,batch z:float32:T,batch",
        ),
        ("float[T, my_batch, batch_size] x", "T, my_batch, batch_size", "x:float32:T,my_batch,batch"),
        ("float[T, batch_size, 4] x", "T, 4", ""),
        ("float[N, my_batch, 4] x", "N, my_batch, 4", ""),
        ("float[?, batch_size, 4] x", "?, batch_size, 4", "x:float32:input_0_dim_0,batch,4"),
        ("float[T, batch_times_heads, 4] x", "T, batch_times_heads, 4", ""),
        ("float[T, minibatches_seen, 4] x", "T, minibatches_seen, 4", ""),
        ("float[T, num_batches, 4] x", "T, num_batches, 4", ""),
        ("float[T, frames_per_batch, 4] x", "T, frames_per_batch, 4", ""),
    ],
)
def test_the_batch_is_what_is_named_so_where_inputs_agree(
    tmp_path: Path, inputs: str, output: str, expected: str
) -> None:
    summed = [axis for axis, dim in enumerate(inputs[6:].split("]")[0].split(", ")) if dim not in output.split(", ")]
    reduced = f"at = Constant <value_ints = {summed}> () y = ReduceSum <keepdims = 0> (x, at)"
    text = RECURRENT.format(inputs=inputs, output=output, body=reduced if summed else "y = Relu(x)", zeros=ZEROS)
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    specs, notes = dimensions.find_batch(tmp_path / "m.onnx")
    assert " ".join(map(str, specs)) == expected
    assert [", by its name, and is called 'batch'" in note for note in notes] == [True] * bool(expected)


@pytest.mark.parametrize(
    ("inputs", "output", "expected"),
    [
        ("float[n, t, 4] x, float[4, n, 12] z", "n, t, 4", "x:float32:batch,t,4 z:float32:4,batch,12"),
        ("float[4, n, 12] z, float[n, t, 4] x", "n, t, 4", "z:float32:4,batch,12 x:float32:batch,t,4"),
        ("float[n, t, 4] x, float[4, n, 12] z, float[2] u", "n, t, 4", ""),
        ("float[n, t, 4] x, float[4, n, 12] z", "t, n, 4", ""),
        ("float[4, n, 4] x, float[2, n, 12] z", "4, n, 4", ""),
        ("float[n, t, 4] x, float[t, n, 12] z", "n, t, 4", "x:float32:batch,t,4 z:float32:t,batch,12"),
    ],
)
def test_the_batch_is_what_all_inputs_have_and_some_and_outputs_begin_with(
    tmp_path: Path, inputs: str, output: str, expected: str
) -> None:
    body = "y = Transpose <perm = [1, 0, 2]> (x)" if output == "t, n, 4" else "y = Relu(x)"
    text = RECURRENT.format(inputs=inputs, output=output, body=body, zeros=ZEROS)
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    specs, notes = dimensions.find_batch(tmp_path / "m.onnx")
    assert " ".join(map(str, specs)) == expected
    assert ["as all inputs have it" in note for note in notes] == [True] * bool(expected)


def test_an_input_whose_batch_nothing_tells_leaves_first_dimensions_as_it(tmp_path: Path) -> None:
    inputs, body = "float[?, ?, 4] x, float[?, 3] z", LAST.replace("y = Squeeze(last, at)", "s = Squeeze(last, at)")
    text = RECURRENT.format(inputs=inputs, output="?, 3", body=f"{body} y = Add(s, z)", zeros=ZEROS)
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    specs, (note,) = dimensions.find_batch(tmp_path / "m.onnx")
    assert specs == ()
    assert "second dimension of 'x', as LSTM has it there, and nothing tells which dimension of 'z' it is" in note
    assert "if they are not it, call it 'batch' in --input x:float32:batch,input_0_dim_1,4 --input z:" in note


def test_outputs_without_names_follow_the_batch_that_was_found(tmp_path: Path) -> None:
    """Their first dimension was read as that of the inputs, which is time."""
    text = RECURRENT.format(inputs="float[?, ?, 4] x", output="?, 3", body=LAST, zeros=ZEROS)
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    for given in ((), (TensorSpec.parse("x:float32:T,batch,4"),)):
        (out := tmp_path / f"out{len(given)}").mkdir()
        effect = LoadOnnx(source=resolve(str(tmp_path / "m.onnx")), inputs=given).run({}, out, lambda _: None)
        assert effect.signature is not None
        assert [str(spec) for spec in effect.signature.outputs] == ["y:float32:batch,3"]


def test_a_file_is_loaded_with_the_batch_of_its_recurrent_layers(tmp_path: Path) -> None:
    body = "y = LSTM <hidden_size = 3> (x, w, r)"
    text = RECURRENT.format(inputs="float[T, N, 4] x", output="T, 1, N, 3", body=body, zeros=ZEROS)
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    for given, batch in (((), "batch"), ((TensorSpec.parse("x:float32:T,N,4"),), "T")):
        (out := tmp_path / batch).mkdir()
        effect = LoadOnnx(source=resolve(str(tmp_path / "m.onnx")), inputs=given).run({}, out, lambda _: None)
        assert effect.signature is not None
        assert samples.batch_symbol(effect.signature) == batch
        assert [
            note for note in effect.notes if "the batch is taken to be 'N', the second dimension of 'x'" in note
        ] == ([*effect.notes] if batch == "batch" else [])


@pytest.mark.parametrize(
    ("inputs", "takes", "remedy"),
    [
        (
            *("x:float32:batch_size,3,frames state:float32:4,1,8", {"batch_size": 1}),
            "with batch_size 1, as state:float32:4,1,8 is for one sample: give --batch 1 --shape batch_size=1:1:1",
        ),
        ("x:float32:batch,3 y:float32:batch", {"batch": 1}, "it takes the same with batch 1: give --batch 1"),
        ("x:float32:batch_size,frames state:float32:4,1,8", {"frames": 1}, "run it alone"),
        ("x:float32:batch_size,frames state:float32:4,1,8", {"batch_size": 2}, "run it alone"),
    ],
)
def test_a_model_that_takes_single_samples_alone_is_tried_with_one(
    inputs: str, takes: Mapping[str, int], remedy: str
) -> None:
    """A state of fixed size, say, is that of one sample, whatever the other inputs declare."""

    class Recurrent:
        signature = Signature(inputs=tuple(map(TensorSpec.parse, inputs.split())), outputs=())

        def run(self, feeds: Feeds) -> Feeds:
            if takes.items() - read_sizes(self.signature.inputs, feeds).items():
                raise ModelError("state must have another shape", "run it alone")
            return {}

    sizes = dict.fromkeys(Recurrent.signature.symbols, 8)
    feeds = draw_feeds(Recurrent.signature, sizes)
    with pytest.raises(ModelError, match="another shape, at batch") as error:
        Baseline(Recurrent(), feeds, "").run(samples.Case(sizes=sizes, batch=8), feeds)  # type: ignore[arg-type]
    assert remedy in error.value.remedy


@pytest.mark.parametrize(
    ("sizes", "least", "advice"),
    [
        ({"batch": 2, "length": 1}, 4, "it takes the same with length 4: give only .* --shape length=4:12:MAX$"),
        ({"batch": 2, "length": 5}, 11, "--shape length=12:12:MAX$"),
        ({"batch": 2, "length": 1}, 13, "^run it alone"),
        ({"batch": 2, "length": 12}, 13, "^run it alone"),
    ],
)
def test_a_length_is_named_that_the_model_takes_with_the_same_values(
    sizes: dict[str, int], least: int, advice: str
) -> None:
    """An index that is out of range in the module need not come from an input."""

    class Short:
        signature = Signature(
            inputs=tuple(map(TensorSpec.parse, ("ids:int64:batch,length", "mask:int64:batch,length"))), outputs=()
        )

        def run(self, feeds: Feeds) -> Feeds:
            if feeds["ids"].shape[1] < least:
                raise ModelError("index 4 is out of bounds for dimension 0 with size 4", "run it alone")
            return {}

    example = {"ids": np.zeros((2, 12), np.int64), "mask": np.ones((2, 12), np.int64)}
    feeds = samples.resize(example, Short.signature, sizes)
    with pytest.raises(ModelError, match="out of bounds") as error:
        Baseline(Short(), example, "").run(samples.Case(sizes=sizes, batch=2), feeds)  # type: ignore[arg-type]
    assert re.search(advice, error.value.remedy)
