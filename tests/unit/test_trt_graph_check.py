"""Graphs that TensorRT would take and get wrong: refused, and only those."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.engines.tensorrt import parser
from enginesmith.pipeline.engines.tensorrt.versions import capabilities
from enginesmith.pipeline.errors import UnsupportedGraph
from enginesmith.pipeline.frameworks.onnx import model_file

T = TensorProto
RTX = capabilities("tensorrt_rtx", "1.7.1")
Node = onnx.NodeProto


def node(operator: str, inputs: str, outputs: str, name: str = "node", **attributes: object) -> Node:
    return helper.make_node(operator, inputs.split(), outputs.split(), name=name, **attributes)


def model(
    *nodes: Node, kind: int = T.FLOAT, out: int = T.FLOAT, weights: tuple[onnx.TensorProto, ...] = (), opset: int = 21
) -> onnx.ModelProto:
    x, y = helper.make_tensor_value_info("x", kind, [2, 4]), helper.make_tensor_value_info("y", out, [2, 4])
    graph = helper.make_graph(list(nodes), "g", [x], [y], list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def weight(name: str, kind: int, dims: tuple[int, ...] = (4,)) -> onnx.TensorProto:
    return T(name=name, data_type=kind, dims=dims, raw_data=bytes(8 * max(1, int(np.prod(dims)))))


SCALE = numpy_helper.from_array(np.float32(0.1), "s")
RELU = node("Relu", "x", "y")


def refusal(given: onnx.ModelProto, *targets: str) -> UnsupportedGraph:
    with pytest.raises(UnsupportedGraph) as caught:
        parser.validate_graph(given, targets, RTX)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize(
    "given",
    [
        model(RELU),
        model(RELU, kind=T.BOOL, out=T.INT64),
        model(RELU, kind=T.UINT8),
        model(node("Mul", "x w", "y"), weights=(weight("w", T.FLOAT16),)),
        model(node("Cast", "x", "y", to=T.INT32)),
        model(node("QuantizeLinear", "x s z", "q"), weights=(SCALE, weight("z", T.INT8, ()))),
        model(node("QuantizeLinear", "x s", "q", output_dtype=T.INT8), weights=(SCALE,)),
        model(node("DequantizeLinear", "w s", "y"), weights=(SCALE, weight("w", T.INT8))),
        model(node("TopK", "x k", "y i"), weights=(weight("k", T.INT64, (1,)),)),
        model(node("Clip", "x low", "y"), weights=(weight("low", T.DOUBLE, ()),)),
        model(helper.make_node("Wobble", ["x"], [], domain="acme")),
    ],
    ids=["relu", "bool", "image", "fp16", "cast", "int8", "typed", "weights", "topk", "scalar", "foreign"],
)
def test_a_sound_graph_passes(given: onnx.ModelProto) -> None:
    parser.validate_graph(given, ("sm75",), RTX)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (model(RELU, kind=T.DOUBLE), "the input 'x' is float64"),
        (model(RELU, out=T.DOUBLE), "the output 'y' is float64"),
        (model(RELU, kind=T.STRING), "the input 'x' is string"),
        (model(RELU, kind=T.UINT16), "the input 'x' is uint16"),
        (model(RELU, kind=T.INT16), "the input 'x' is int16"),
        (model(RELU, kind=T.COMPLEX64), "the input 'x' is complex64"),
        (model(node("Mul", "x w", "y"), weights=(weight("w", T.DOUBLE),)), "the weight 'w' is float64"),
        (model(node("Mul", "x w", "y"), weights=(weight("w", T.UINT32),)), "the weight 'w' is uint32"),
        (model(node("Cast", "x", "y", to=T.DOUBLE)), "Cast 'node' casts to float64"),
        (model(node("Cast", "x", "y", to=T.FLOAT8E5M2), weights=(weight("w", T.FLOAT8E5M2),)), "is float8e5m2"),
    ],
)
def test_types_that_tensorrt_does_not_compute_in(given: onnx.ModelProto, words: str) -> None:
    found = refusal(given, "sm120")
    assert words in found.message
    assert "cast" in found.remedy


@pytest.mark.parametrize(
    "given",
    [
        model(node("QuantizeLinear", "x s z", "q", "quant"), weights=(SCALE, weight("z", T.UINT8, ()))),
        model(node("QuantizeLinear", "x s", "q", "quant"), weights=(SCALE,)),
        model(helper.make_node("QuantizeLinear", ["x", "s", ""], ["q"], name="quant"), weights=(SCALE,)),
        model(node("QuantizeLinear", "x s", "q", "quant", output_dtype=T.UINT8), weights=(SCALE,)),
        model(node("DequantizeLinear", "w s", "y", "quant"), weights=(SCALE, weight("w", T.UINT8))),
        model(node("DequantizeLinear", "x s z", "y", "quant"), weights=(SCALE, weight("z", T.UINT8, ()))),
    ],
    ids=["zero point", "default", "empty name", "asked for", "weights", "dequantised"],
)
def test_uint8_quantisation(given: onnx.ModelProto) -> None:
    found = refusal(given)
    assert "'quant' quantises to uint8" in found.message
    assert "int8 with zero point 0" in found.remedy


def test_missing_outputs() -> None:
    found = refusal(model(node("TopK", "x k", "y", "top"), weights=(weight("k", T.INT64, (1,)),)))
    assert "TopK 'top' lacks outputs: it has 1 and needs 2" in found.message


def test_nodes_of_subgraphs_are_looked_at() -> None:
    z = helper.make_tensor_value_info("z", T.FLOAT, None)
    inner = helper.make_graph([node("Cast", "x", "z", "hidden", to=T.DOUBLE)], "inner", [], [z])
    outer = node("If", "c", "y", "branch", then_branch=inner, else_branch=inner)
    assert "Cast 'hidden'" in refusal(model(outer, weights=(weight("c", T.BOOL, ()),))).message


def with_type(kind: int) -> onnx.ModelProto:
    return model(node("DequantizeLinear", "w s", "y"), weights=(SCALE, weight("w", kind)))


@pytest.mark.parametrize(
    ("kind", "name", "least", "below"),
    [
        (T.FLOAT8E4M3FN, "float8e4m3fn", "sm89", "sm86"),
        (T.BFLOAT16, "bfloat16", "sm80", "sm75"),
        (T.INT4, "int4", "sm80", "sm75"),
        (T.FLOAT4E2M1, "float4e2m1", "sm120", "sm89"),
    ],
)
@pytest.mark.parametrize("place", ["weight", "cast", "input"])
def test_types_that_a_target_lacks(kind: int, name: str, least: str, below: str, place: str) -> None:
    make: dict[str, Callable[[], onnx.ModelProto]] = {
        "weight": lambda: with_type(kind),
        "cast": lambda: model(node("Cast", "x", "y", to=kind)),
        "input": lambda: model(RELU, kind=kind),
    }
    given = make[place]()
    parser.validate_graph(given, (least,), RTX)
    parser.validate_graph(given, (), RTX)
    assert f"uses {name}, which needs {least} or later, and the target is {below}" in refusal(given, below).message
    both = refusal(given, least, below)
    assert f"the engine is to run on {below} too" in both.message
    assert both.remedy.startswith(f"leave {below} away")


def test_a_type_that_quantisation_makes_counts_too() -> None:
    given = model(node("QuantizeLinear", "x s", "q", output_dtype=T.FLOAT8E4M3FN), weights=(SCALE,))
    assert "float8e4m3fn" in refusal(given, "sm86").message


def test_long_lists_are_cut() -> None:
    given = model(*(node("Cast", "x", f"y{index}", f"cast{index}", to=T.DOUBLE) for index in range(9)))
    message = refusal(given).message
    assert "and 5 more" in message
    assert "cast3" in message
    assert "cast4" not in message


def test_a_node_is_called_by_its_name_or_output_and_its_module() -> None:
    plain = helper.make_node("Relu", ["x"], ["y"])
    assert parser.node_name(plain) == "Relu 'y'"
    plain.metadata_props.add(key=model_file.MODULE_KEY, value="encoder.act")
    assert parser.node_name(plain) == "Relu 'y' (of the module 'encoder.act')"


@pytest.mark.parametrize(("inputs", "refused"), [("x x x", True), ("x x w", True), ("x w x", False), ("x w w", False)])
def test_attention_whose_queries_are_its_keys_kills_the_builder(inputs: str, refused: bool) -> None:
    given = model(node("Attention", inputs, "y", "att"), weights=(weight("w", T.FLOAT),), opset=23)
    if refused:
        assert "Attention 'att'" in refusal(given, "sm86").message
    else:
        parser.validate_graph(given, ("sm86",), RTX)
    parser.validate_graph(given, ("sm86",), capabilities("tensorrt", "11.4.0"))
