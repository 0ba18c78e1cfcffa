"""ONNX files of every kind of badness, and what is read from good ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.errors import InvalidGraph, SignatureError
from enginesmith.pipeline.frameworks.onnx import model_file

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


def test_a_sound_file_passes(tmp_path: Path) -> None:
    model_file.check(saved(tmp_path, linear()))


def test_a_sound_file_with_external_data_passes(tmp_path: Path) -> None:
    path = saved(tmp_path, linear(), external=True)
    model_file.check(path)
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
        model_file.check(path)


def no_outputs(model: onnx.ModelProto) -> None:
    del model.graph.output[:]


def future_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 99


def future_ir(model: onnx.ModelProto) -> None:
    model.ir_version = 99


def unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "MatMulMatMul"


def wrong_shape(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].dims[:] = [8, 1]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (no_outputs, "has no outputs"),
        (future_opset, rf"needs opset 99, .* up to {onnx.defs.onnx_opset_version()}"),
        (future_ir, rf"IR version 99, .* up to {onnx.IR_VERSION}"),
        (unknown_operator, "breaks the ONNX specification"),
        (wrong_shape, "contradict each other"),
    ],
)
def test_broken_graphs_are_refused(tmp_path: Path, edit: Edit, message: str) -> None:
    model = linear()
    edit(model)
    with pytest.raises(InvalidGraph, match=message):
        model_file.check(saved(tmp_path, model))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("external", [False, True])
def test_nan_is_refused_and_infinity_is_not(tmp_path: Path, dtype: Any, external: bool) -> None:
    weight = np.zeros((4, 2), dtype)
    weight[3, 1] = -np.inf
    model = linear(weight)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model_file.check(saved(tmp_path, model, external))
    weight[3, 1] = np.nan
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    (tmp_path / "model.onnx.data").unlink(missing_ok=True)
    with pytest.raises(InvalidGraph, match=r"weight 'w' .* NaN"):
        model_file.check(saved(tmp_path, model, external))


def test_missing_external_data_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, linear(), external=True)
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(InvalidGraph, match="there is no such file"):
        model_file.check(path)


def test_short_external_data_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, linear(), external=True)
    (tmp_path / "model.onnx.data").write_bytes(bytes(7))
    with pytest.raises(InvalidGraph, match="too short: 32 bytes"):
        model_file.check(path)


def test_symlinked_external_data_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, linear(), external=True)
    (tmp_path / "model.onnx.data").rename(tmp_path / "elsewhere")
    (tmp_path / "model.onnx.data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidGraph, match="symbolic link"):
        model_file.check(path)


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
        model_file.check(path)


def test_signature_reads_no_weights(tmp_path: Path) -> None:
    path = saved(tmp_path, linear(), external=True)
    (tmp_path / "model.onnx.data").unlink()
    signature = model_file.signature(path)
    assert [str(spec) for spec in (*signature.inputs, *signature.outputs)] == ["x:float32:batch,4", "y:float32:batch,2"]


def test_initialisers_are_no_inputs_and_open_dimensions_get_names(tmp_path: Path) -> None:
    model = linear()
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 2]))
    model.graph.output[0].type.tensor_type.shape.dim[0].Clear()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "my.batch"
    signature = model_file.signature(saved(tmp_path, model))
    assert [spec.name for spec in signature.inputs] == ["x"]
    assert signature.inputs[0].shape == ("my_batch", 4)
    assert signature.outputs[0].shape == ("output_0_dim_0", 2)


def test_computed_dimensions_get_names_of_their_own(tmp_path: Path) -> None:
    model = linear()
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "2*batch"
    assert model_file.signature(saved(tmp_path, model)).outputs[0].shape == ("output_0_dim_0", 2)


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
    with pytest.raises(SignatureError, match=message):
        model_file.signature(saved(tmp_path, model))


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


@pytest.mark.parametrize(
    ("weights", "operators", "expected"),
    [
        ([np.ones(8, np.float32)], [], "fp32"),
        ([np.ones(8, np.float16), np.ones(1, np.float32)], [], "fp16"),
        ([], [], "fp32"),
        ([np.ones(64, np.int64), np.ones(8, np.float16)], [], "fp16"),
        ([np.ones(8, np.int8), np.ones(8, np.float32)], ["DequantizeLinear"], "int8"),
        ([np.ones(8, np.int8), np.ones(8, np.float16)], ["DequantizeLinear"], "int8+fp16"),
        ([np.ones(8, np.float32)], ["QuantizeLinear", "DequantizeLinear"], "int8"),
    ],
)
def test_precision_is_that_of_most_weights_and_of_quantisation(
    tmp_path: Path, weights: list[Any], operators: list[str], expected: str
) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    nodes = [helper.make_node(name, ["x", "s"], [f"y{index}"]) for index, name in enumerate(operators)]
    stored = [numpy_helper.from_array(array, f"w{index}") for index, array in enumerate(weights)]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [value], [value], stored)), tmp_path / "m.onnx")
    assert model_file.precision(tmp_path / "m.onnx") == expected
