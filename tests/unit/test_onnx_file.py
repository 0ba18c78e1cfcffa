"""ONNX files of every kind of badness, and what is read from good ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.errors import InvalidGraph, SignatureError
from enginesmith.pipeline.frameworks.onnx import evaluator, model_file, shapes, validation
from enginesmith.pipeline.frameworks.samples import batch_symbol, fixed_batch
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.tasks.load import LoadOnnx
from enginesmith.pipeline.workflows.inspect import inspect

NEWEST = onnx.defs.onnx_opset_version()
Edit = Callable[[onnx.ModelProto], Any]


def linear(weight: Any = None) -> onnx.ModelProto:
    """y = x · w with a dynamic batch."""
    array = np.ones((4, 2), np.float32) if weight is None else weight
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(array, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def saved(folder: Path, model: onnx.ModelProto, external: bool = False) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=external, location="model.onnx.data", size_threshold=0)
    return path


def test_a_sound_file_passes_with_external_data_too(tmp_path: Path) -> None:
    validation.check(saved(tmp_path, linear()))
    path = saved(tmp_path, linear(), external=True)
    validation.check(path)
    assert model_file.external_files(path) == ["model.onnx.data"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"just some text\n", "is not an ONNX file"),
        (b"\x89PNG\r\n\x1a\n" + bytes(64), "is not an ONNX file"),
        (linear().SerializeToString()[:-20], "truncated or damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(InvalidGraph, match=message):
        validation.check(path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda model: model.graph.ClearField("output"), "has no outputs"),
        (lambda model: setattr(model.opset_import[0], "version", 99), rf"needs opset 99, .* up to {NEWEST}"),
        (lambda model: setattr(model, "ir_version", 99), rf"IR version 99, .* up to {onnx.IR_VERSION}"),
        (lambda model: setattr(model.graph.node[0], "op_type", "MatMulMatMul"), "breaks the ONNX specification"),
        (lambda model: model.graph.initializer[0].dims.__setitem__(slice(None), [8, 1]), "contradict each other"),
    ],
)
def test_broken_graphs_are_refused(tmp_path: Path, edit: Edit, message: str) -> None:
    model = linear()
    edit(model)
    with pytest.raises(InvalidGraph, match=message):
        validation.check(saved(tmp_path, model))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("external", [False, True])
def test_nan_is_refused_and_infinity_is_not(tmp_path: Path, dtype: Any, external: bool) -> None:
    weight = np.zeros((4, 2), dtype)
    weight[3, 1] = -np.inf
    model = linear(weight)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    validation.check(saved(tmp_path, model, external))
    weight[3, 1] = np.nan
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    (tmp_path / "model.onnx.data").unlink(missing_ok=True)
    with pytest.raises(InvalidGraph, match=r"weight 'w' .* NaN"):
        validation.check(saved(tmp_path, model, external))


def test_one_nan_is_a_fill_and_no_weight(tmp_path: Path) -> None:
    """A fill is what Where chooses from; a node's constant of more numbers is a weight, named by the node's output."""
    model, shape = linear(), numpy_helper.from_array(np.array([4, 2]), "n")
    one, many = (numpy_helper.from_array(np.full(size, np.nan, np.float32)) for size in (1, (4, 2)))
    model.graph.initializer[0].CopyFrom(shape)
    model.graph.node.insert(0, helper.make_node("ConstantOfShape", ["n"], ["w"], value=one))
    validation.check(saved(tmp_path, model))
    model.graph.node[0].CopyFrom(helper.make_node("Constant", [], ["w"], value=many))
    with pytest.raises(InvalidGraph, match=r"weight 'w' .* NaN"):
        validation.check(saved(tmp_path, model))
    model.graph.node[0].CopyFrom(helper.make_node("Expand", ["fill", "n"], ["w"]))
    model.graph.initializer.append(one)
    model.graph.initializer[-1].name = "fill"
    validation.check(saved(tmp_path, model))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda file: file.unlink(), "there is no such file"),
        (lambda file: file.write_bytes(bytes(7)), "too short: 32 bytes"),
        (lambda file: file.symlink_to(file.rename(file.with_name("elsewhere"))), "symbolic link"),
    ],
)
def test_harmed_external_data_is_refused(tmp_path: Path, harm: Callable[[Path], object], message: str) -> None:
    path = saved(tmp_path, linear(), external=True)
    harm(tmp_path / "model.onnx.data")
    with pytest.raises(InvalidGraph, match=message):
        validation.check(path)


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "a/../../secret"])
def test_external_data_outside_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = saved(folder, linear(), external=True)
    (tmp_path / "secret").write_bytes(bytes(32))
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = location
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InvalidGraph, match="outside of the model's folder"):
        validation.check(path)


def test_the_long_name_of_the_standard_domain_is_read_as_the_empty_one(tmp_path: Path) -> None:
    model = linear()
    model.opset_import[0].domain = "ai.onnx"
    path = saved(tmp_path, model)
    validation.check(path)
    assert [(one.domain, one.version) for one in model_file.read(path).opset_import] == [("", 20)]
    assert model_file.summary(path).opset == 20


def test_signature_reads_no_weights(tmp_path: Path) -> None:
    path = saved(tmp_path, linear(), external=True)
    (tmp_path / "model.onnx.data").unlink()
    signature = model_file.signature(path)
    assert [str(spec) for spec in (*signature.inputs, *signature.outputs)] == ["x:float32:batch,4", "y:float32:batch,2"]


def test_initializers_are_no_inputs_and_open_dimensions_get_names(tmp_path: Path) -> None:
    model = linear()
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 2]))
    model.graph.output[0].type.tensor_type.shape.dim[0].Clear()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "my.batch"
    signature = model_file.signature(saved(tmp_path, model))
    assert [spec.name for spec in signature.inputs] == ["x"]
    assert (signature.inputs[0].shape, signature.outputs[0].shape) == (("my_batch", 4), ("output_0_dim_0", 2))


def test_a_size_of_0_is_a_fixed_size(tmp_path: Path) -> None:
    model = linear()
    model.graph.input.append(helper.make_tensor_value_info("past", TensorProto.FLOAT, ["batch", 0, -1]))
    assert model_file.signature(saved(tmp_path, model)).inputs[1].shape == ("batch", 0, "input_1_dim_2")


def test_computed_dimensions_get_names_of_their_own(tmp_path: Path) -> None:
    model = linear()
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "2*batch"
    assert model_file.signature(saved(tmp_path, model)).outputs[0].shape == ("output_0_dim_0", 2)


@pytest.mark.parametrize("text", ["batch-size", "seq+1"])
def test_dimensions_of_one_text_are_one(tmp_path: Path, text: str) -> None:
    model = linear()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = text
    signature = model_file.signature(saved(tmp_path, model))
    assert signature.inputs[0].shape[0] == signature.outputs[0].shape[0] == "input_0_dim_0"


@pytest.mark.parametrize("text", ["", "?", "None", "-1", "unk", "unk__12"])
def test_first_dimensions_without_a_name_are_the_batch(tmp_path: Path, text: str) -> None:
    model = linear()
    second = model.graph.input.add()
    second.CopyFrom(helper.make_tensor_value_info("b", TensorProto.FLOAT, ["unk__7", "n", text]))
    model.graph.input.append(helper.make_tensor_value_info("scalar", TensorProto.FLOAT, []))
    for dim in (*model.graph.input[0].type.tensor_type.shape.dim, model.graph.output[0].type.tensor_type.shape.dim[0]):
        dim.dim_param = "unk" if text == "unk__12" else text
    path = saved(tmp_path, model)
    signature = model_file.signature(path)
    last = "unk__12" if text == "unk__12" else "input_1_dim_2"
    assert [spec.shape for spec in signature.inputs] == [("batch", "input_0_dim_1"), ("batch", "n", last), ()]
    assert signature.outputs[0].shape == ("batch", 2)
    values = shapes.view(path, {"batch": 3, "input_0_dim_1": 4}).values
    assert (values["x"].shape, values["y"].shape) == ((3, 4), (3, 2))


@pytest.mark.parametrize("other", [["n", 3], [5, 3], [5, "batch"], ["", "batch"]])
def test_a_first_dimension_without_a_name_may_differ_from_one_with_a_name(tmp_path: Path, other: list[Any]) -> None:
    model = linear()
    model.graph.input.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, other))
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].Clear()
    signature = model_file.signature(saved(tmp_path, model))
    given = [spec.shape[0] for spec in (*signature.inputs, *signature.outputs)]
    assert given == ["input_0_dim_0", other[0] or "input_1_dim_0", "output_0_dim_0"]


_MEAN = "y = ReduceMean <keepdims = 0> (x, first)"
_FRAMES = "s = Transpose <perm = [1, 0]> (x)  t = Unsqueeze (s, first)"


@pytest.mark.parametrize(
    ("nodes", "outputs", "symbol"),
    [
        (_MEAN, "float[4] y", None),
        (_MEAN, "float[n] y", None),
        (f"{_FRAMES} y = GlobalMaxPool (t)", "float[1,4,1] y", None),
        (_MEAN, "float[time] y", "time"),
        ("y = Relu (x)", "float[n,4] y", "time"),
        ("y = Relu (x)", "float[unk__12,4] y", "time"),
        ("y = Relu (x)", "float[1,4] y", "time"),
        ("s = ReduceSum <keepdims = 0> (x, second)  y = Squeeze (s)", "float y", "time"),
        ("y = Slice (x, first, long)", "float[n,4] y", "time"),
        (f"{_FRAMES} y = MaxPool <kernel_shape = [8], strides = [8], pads = [7, 0]> (t)", "float[1,4,n] y", "time"),
        (f"{_MEAN} z = Relu (x)", "float[4] y, float[n,4] z", "time"),
        (
            "s = NonZero (x)  y = ReduceMax <keepdims = 0> (s, second)  z = Identity (s)",
            "int64[2] y, int64[2,n] z",
            "time",
        ),
        ("y = mine.Net (x)", "float[4] y", "time"),
    ],
    ids=[
        *("mean", "mean of unknown size", "greatest of all", "declared to follow", "renamed", "numbered", "traced"),
        *("traced squeeze", "cut", "strided", "one of two", "chosen by values", "unknown operator"),
    ],
)
def test_the_first_dimension_is_no_batch_if_no_output_is_inferred_to_follow_it(
    tmp_path: Path, nodes: str, outputs: str, symbol: str | None
) -> None:
    """What a file declares of outputs may be the sizes of an example."""
    weights = "int64[1] first = {0}, int64[1] second = {1}, int64[1] long = {512}"
    head = '<ir_version: 10, opset_import: ["": 18, "mine": 1]>'
    text = f"{head} g (float[time,4] x) => ({outputs}) <{weights}> {{{nodes}}}"
    path = saved(tmp_path, onnx.parser.parse_model(text))
    signature = model_file.signature(path)
    assert (batch_symbol(signature), fixed_batch(signature)) == (symbol, 1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (helper.make_tensor_type_proto(TensorProto.STRING, [1]), "dtype string"),
        (helper.make_tensor_type_proto(TensorProto.COMPLEX64, [1]), "dtype complex64"),
        (helper.make_tensor_type_proto(TensorProto.FLOAT, None), "has no shape"),
        (helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [1])), "is a sequence"),
    ],
)
def test_what_cannot_be_fed_is_refused(tmp_path: Path, kind: onnx.TypeProto, message: str) -> None:
    model = linear()
    model.graph.input[0].type.CopyFrom(kind)
    with pytest.raises(SignatureError, match=message) as error:
        model_file.signature(saved(tmp_path, model))
    assert "bfloat16" not in error.value.remedy  # of which no feeds can be made


@pytest.mark.parametrize(
    "kind",
    [
        helper.make_tensor_type_proto(TensorProto.STRING, [1]),
        helper.make_sequence_type_proto(
            helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
        ),
    ],
)
def test_outputs_of_classifiers_that_are_no_numbers_are_refused_with_the_way_out(
    tmp_path: Path, kind: onnx.TypeProto
) -> None:
    model = linear()
    model.graph.output[0].type.CopyFrom(kind)
    with pytest.raises(SignatureError, match="the output 'y'") as error:
        model_file.signature(saved(tmp_path, model))
    assert "compared: convert the model without this output; skl2onnx does with zipmap=False" in error.value.remedy


def test_summary_counts_subgraphs(tmp_path: Path) -> None:
    model = linear()
    branch = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(3, np.float16)))],
        "branch",
        [],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT16, [3])],
    )
    model.graph.node.append(helper.make_node("If", ["flag"], ["c_out"], then_branch=branch, else_branch=branch))
    summary = model_file.summary(saved(tmp_path, model))
    assert (summary.opset, summary.ir_version, summary.nodes) == (20, 10, 4)
    assert summary.operators == {"Constant": 2, "If": 1, "MatMul": 1}
    assert summary.weight_dtypes == {"float32": 32, "float16": 12}
    assert (summary.weight_bytes, summary.parameters) == (44, 14)


CACHE = [["batch", "length"], ["batch", "past.len + length"], ["batch", "past.len"]]


def cached(dims: list[list[Any]], output: list[Any]) -> onnx.ModelProto:
    """Multiply a mask with what came before and what is new, joined by an operator that nobody knows."""
    inputs = [helper.make_tensor_value_info(*each) for each in zip(("ids", "mask", "past"), [1] * 3, dims, strict=True)]
    nodes = [
        helper.make_node("Join", ["past", "ids"], ["all"], domain="other"),
        helper.make_node("Mul", ["all", "mask"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", 1, output)])
    graph.value_info.append(helper.make_tensor_value_info("all", 1, ["batch", "length + past.len"]))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_names_that_are_sums_of_inputs_dimensions_are_sums(tmp_path: Path) -> None:
    path = saved(tmp_path, cached(CACHE, ["batch", "past.len + length"]))
    signature = model_file.signature(path)
    dims = [spec.shape[1] for spec in (*signature.inputs, *signature.outputs)]
    assert dims == ["length", "past_len+length", "past_len", "past_len+length"]
    values = shapes.view(path, {"batch": 2, "past_len": 5, "length": 3}).values
    assert [values[name].shape for name in ("mask", "all", "y")] == [(2, 8)] * 3


@pytest.mark.parametrize("text", ["past + 1", "2*length + 1", "past.len + other", "1 + 1", "length +"])
def test_other_expressions_are_names_of_their_own(tmp_path: Path, text: str) -> None:
    dims = [CACHE[0], ["batch", text], CACHE[2]]
    signature = model_file.signature(saved(tmp_path, cached(dims, ["batch", text])))
    assert [spec.shape[1] for spec in (*signature.inputs, *signature.outputs)][1::2] == ["input_1_dim_1"] * 2


def test_an_output_may_be_longer_than_an_input_by_a_number(tmp_path: Path) -> None:
    dims: list[list[Any]] = [["batch", 1], ["batch", "past.len + 1"], CACHE[2]]
    signature = model_file.signature(saved(tmp_path, cached(dims, ["batch", "past.len+1"])))
    assert (signature.outputs[0].shape, signature.batched) == (("batch", "past_len+1"), True)


ODD_ENDS = """<ir_version: 8, opset_import: ["" : 17]>
g (string[N] names, float[N,4] x, float[2,?] z) => (seq(float[N,1]) parts, string[N] upper, float y) <int64 one = {1}> {
    parts = SplitToSequence <axis = 1> (x, one)
    upper = StringNormalizer <case_change_action = "UPPER"> (names)
    y = ReduceSum <keepdims = 0> (z)
}"""


def test_inspect_shows_inputs_and_outputs_that_optimize_does_not_take(tmp_path: Path) -> None:
    model, path = onnx.parser.parse_model(ODD_ENDS), tmp_path / "net.onnx"
    table = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    scores = helper.make_value_info("scores", helper.make_sequence_type_proto(table))
    zipped = helper.make_node("ZipMap", ["x"], ["scores"], domain="ai.onnx.ml", classlabels_int64s=[0])
    model.graph.node.append(zipped)
    model.graph.output.append(scores)
    model.opset_import.add(domain="ai.onnx.ml", version=1)
    onnx.save(model, path)
    shown = inspect(path)
    assert shown["inputs"] == ["names:string:N", "x:float32:N,4", "z:float32:2,?"]
    odd = ["parts:sequence(float32:N,1)", "upper:string:N", "y:float32:", "scores:sequence(map(int64, float32:…))"]
    assert shown["outputs"] == odd
    assert shown["operators"].keys() == {"SplitToSequence", "StringNormalizer", "ReduceSum", "ZipMap"}
    reason = "the input 'names' has the dtype string; optimize does not take the model as it is"
    assert shown["precision"] == {"not known": reason}
    assert "cannot be taken apart: Map types are not supported" in shown["sparsity"]["not known"]
    with pytest.raises(SignatureError, match=r"(?s)the input 'names' has the dtype string.*behind the vectorizer"):
        LoadOnnx(source=resolve(str(path))).run({}, tmp_path, lambda _: None)


SCALER = """<ir_version: 8, opset_import: ["ai.onnx.ml" : 3]>
g (float[batch, 4] x) => (float[batch, 4] y) { y = ai.onnx.ml.Scaler <offset = [1.0], scale = [2.0]> (x) }"""


def test_a_file_of_another_domain_alone_is_loaded_with_the_opset_of_that(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(SCALER), path := tmp_path / "net.onnx")
    (out := tmp_path / "out").mkdir()
    effect = LoadOnnx(source=resolve(str(path))).run({}, out, lambda _: None)
    assert effect.summary == "1 nodes, opset 3 of ai.onnx.ml, 0 parameters"


def save_classifier(path: Path, *, shaped: bool, read_answered: bool = False) -> Path:
    """Save a classifier whose probabilities are mapped to classes; ``shaped``: the file tells what is mapped."""
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]>
    g (float[N, 4] x) => (int64[N] label, float[N, 4] scores) {
        z = ai.onnx.ml.Scaler <offset = [0.5], scale = [2.0]> (x)
        p = ai.onnx.ml.Normalizer <norm = "L1"> (z)
        label = ArgMax <axis = 1, keepdims = 0> (p)
        scores = ai.onnx.ml.ZipMap <classlabels_int64s = [3, 1, 7, 5]> (p)
    }"""
    model = onnx.parser.parse_model(text)
    table = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    model.graph.output[1].type.CopyFrom(helper.make_sequence_type_proto(table))
    if shaped:
        model.graph.value_info.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, ["N", 4]))
    if read_answered:
        model.graph.output.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, ["N", 4]))
    onnx.save(model, path)
    return path


def test_inspect_names_a_missing_shape_also_beside_texts(tmp_path: Path) -> None:
    ends = "(string[N] t, float[N] x, int64[k] shape) => (string[N] u, float y)"
    text = f'<ir_version: 8, opset_import: ["": 17]> net {ends} {{ u = Identity(t) y = Reshape(x, shape) }}'
    model = onnx.parser.parse_model(text)
    model.graph.output[1].type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(InvalidGraph, match="'shape' of 'type' is required"):  # the file cannot be run to find it
        inspect(tmp_path / "net.onnx")


@pytest.mark.parametrize("shaped", [True, False])
def test_probabilities_that_are_mapped_to_classes_are_answered_as_a_tensor(tmp_path: Path, *, shaped: bool) -> None:
    """CatBoost and skl2onnx write such files, and do not always tell the shape of what they map."""
    path = save_classifier(tmp_path / "net.onnx", shaped=shaped)
    (out := tmp_path / "out").mkdir()
    effect = LoadOnnx(source=resolve(str(path))).run({}, out, lambda _: None)
    assert effect.signature is not None
    assert [str(spec) for spec in effect.signature.outputs] == ["label:int64:N", "scores:float32:N,4"]
    assert effect.notes[0].endswith(
        "(ZipMap), and is the tensor of these numbers instead, a column for each class: 3, 1, 7 and 1 more"
    )
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 4), np.float32)}
    (label, maps), (label_after, scores) = (evaluator.run_graph(each, feeds) for each in (path, out / effect.file))
    assert (label == label_after).all()
    assert [[row[number] for number in (3, 1, 7, 5)] for row in maps] == scores.tolist()
    assert inspect(path)["outputs"][1] == "scores:float32:N,4"


@pytest.mark.parametrize("shaped", [True, False])
def test_a_map_beside_the_tensor_that_it_reads_is_a_copy_of_it(tmp_path: Path, *, shaped: bool) -> None:
    path = save_classifier(tmp_path / "net.onnx", shaped=shaped, read_answered=True)
    (out := tmp_path / "out").mkdir()
    effect = LoadOnnx(source=resolve(str(path))).run({}, out, lambda _: None)
    assert effect.signature is not None
    outputs = [str(spec) for spec in effect.signature.outputs]
    assert outputs == ["label:int64:N", "scores:float32:N,4", "p:float32:N,4"]
    assert [note for note in effect.notes if "'scores' maps classes to numbers (ZipMap)" in note] == [*effect.notes]
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 4), np.float32)}
    _, scores, read = evaluator.run_graph(out / effect.file, feeds)
    assert (scores == read).all()
    assert (read == evaluator.run_graph(path, feeds)[2]).all()


@pytest.mark.parametrize("typed", [True, False])
def test_types_and_shapes_that_outputs_lack_are_found(tmp_path: Path, *, typed: bool) -> None:
    """As onnxscript leaves them out of a function without an annotation, and shape inference knows no loop's rank."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N, 4] x, int64 n) => (float[N, 4] y, int64[N] k) <bool go = {1}> {
        y = Loop <body = b (int64 i, bool c, float[A, B] before) => (bool d, float[A, B] after)
                         { d = Identity(c) after = Neg(before) }> (n, go, x)
        k = ArgMax <axis = 1, keepdims = 0> (y)
    }"""
    model = onnx.parser.parse_model(text)
    for value in model.graph.output:
        value.ClearField("type") if not typed else value.type.tensor_type.ClearField("shape")
    onnx.save(model, path := tmp_path / "net.onnx")
    (out := tmp_path / "out").mkdir()
    effect = LoadOnnx(source=resolve(str(path))).run({}, out, lambda _: None)
    assert effect.signature is not None
    assert [str(spec) for spec in effect.signature.outputs] == ["y:float32:N,4", "k:int64:N"]
    assert any("no type of the output 'y': it is inferred to be float32" in note for note in effect.notes) is not typed


def test_an_output_whose_shape_nothing_tells_is_refused(tmp_path: Path) -> None:
    """No feeds run a model that divides its rows into 3."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N, 4] x, int64[K] shape) => (float[N] y) <int64[1] three = {3}> {
        a = Reshape(x, three) b = Concat <axis = 0> (shape, three) y = Reshape(a, b)
    }"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, path := tmp_path / "net.onnx")
    with pytest.raises(InvalidGraph, match="the output 'y' has no shape in the file, and the model cannot be run"):
        LoadOnnx(source=resolve(str(path))).run({}, tmp_path, lambda _: None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("a = Relu(x) y = MatMul(a, w)", "types or shapes in .*net.onnx contradict each other"),
        ("y = Reluu(x)", "net.onnx breaks the ONNX specification: No Op registered for Reluu"),
        ("y = Relu(nothing)", "net.onnx breaks the ONNX specification: .*'nothing'"),
    ],
)
def test_what_is_broken_is_told_before_a_missing_shape(tmp_path: Path, body: str, message: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[N, 4] x) => (float[N, 2] y) <float[3, 2] w = {{1, 2, 3, 4, 5, 6}}> {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, path := tmp_path / "net.onnx")
    for read in (inspect, lambda path: LoadOnnx(source=resolve(str(path))).run({}, tmp_path, lambda _: None)):
        with pytest.raises(InvalidGraph, match=message) as error:
            read(path)
        assert error.value.remedy == "export it again"


def test_files_of_weights_are_looked_for_before_a_file_is_completed(tmp_path: Path) -> None:
    model = linear()
    model.graph.output[0].ClearField("type")
    tensor = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, "../w.bin")
    tensor.ClearField("raw_data")
    path = saved(tmp_path, model)
    with pytest.raises(InvalidGraph, match="outside of the model's folder"):
        LoadOnnx(source=resolve(str(path))).run({}, tmp_path, lambda _: None)
