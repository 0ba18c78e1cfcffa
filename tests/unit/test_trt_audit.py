"""The audit, on layers that TensorRT-RTX 1.7.1 wrote for real models, and graphs that TensorRT would get wrong.

``enterprise-layers.txt`` is written by hand in the form of TensorRT 10, by the vendor's documents. No engine has these
layers.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.engines.tensorrt import parser
from enginesmith.pipeline.engines.tensorrt.layers import Audit, audit, read_layers
from enginesmith.pipeline.engines.tensorrt.parser import NetworkTensor
from enginesmith.pipeline.engines.tensorrt.versions import capabilities
from enginesmith.pipeline.errors import UnsupportedGraph
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.tensors import Signature, TensorSpec

DATA = Path(__file__).parent.parent / "data" / "trt"
KINDS = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "fp8": TensorProto.FLOAT8E4M3FN,
    "int4": TensorProto.INT4,
}
IMAGE = TensorSpec(name="image", dtype="float16", shape=("batch", 3, 224, 224))
LOGITS = TensorSpec(name="logits", dtype="float16", shape=("batch", 1000))
SIGNATURE = Signature(inputs=(IMAGE,), outputs=(LOGITS,))
TENSORS = (
    NetworkTensor("image", True, "float16", (-1, 3, 224, 224)),
    NetworkTensor("logits", False, "float16", (2, 1000)),
)


def dump(name: str) -> str:
    return (DATA / f"{name}-layers.txt").read_text()


def graph(left: str, right: str, *products: tuple[str, str]) -> onnx.ModelProto:
    """Products by operator and name, of operands in these precisions: of Q/DQ where the type is no float."""
    wide = left if left.startswith(("fp16", "bf16", "fp32")) else "fp16"
    nodes, weights = [], [helper.make_tensor("scale", KINDS[wide], [], [1.0])]
    for operator, name in products:
        names = []
        for side, kind in (("x", left), ("w", right)):
            stored = f"{name}_{side}"
            weights.append(tensor(stored, KINDS[kind]))
            if kind in ("int8", "fp8", "int4"):
                nodes.append(helper.make_node("DequantizeLinear", [stored, "scale"], [stored + "_dq"], name=stored))
                stored += "_dq"
            names.append(stored)
        nodes.append(helper.make_node(operator, names, [name + "_out"], name=name))
    made = helper.make_graph(nodes, "g", [], [], weights)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def tensor(name: str, kind: int) -> onnx.TensorProto:
    size = {TensorProto.INT4: 2, TensorProto.INT8: 4, TensorProto.FLOAT8E4M3FN: 4, TensorProto.FLOAT: 16}.get(kind, 8)
    return TensorProto(name=name, data_type=kind, dims=[2, 2], raw_data=bytes(size))


def found(name: str, model: onnx.ModelProto, signature: Signature = SIGNATURE) -> Audit:
    return audit(dump(name), model, signature, "build log", TENSORS)


@pytest.mark.parametrize(
    ("name", "precisions"),
    [
        ("fp16", ["fp16"] * 4),
        ("bf16", ["bf16"] * 2),
        ("int8", ["fp32", "int8", "fp32", "int8", "fp32"]),
        ("fp8", ["fp16", "fp16", "fp8", "fp16", "fp8"]),
        ("int4", ["fp16"] * 4),
    ],
)
def test_every_layer_is_read_with_its_narrowest_input(name: str, precisions: list[str]) -> None:
    assert [layer.precision for layer in read_layers(dump(name))] == precisions


def test_a_layer_is_read_whole() -> None:
    layer = read_layers(dump("int8"))[1]
    assert (layer.name, layer.kind) == ("node_Conv_806_myl0_1", "correlation")
    assert not layer.light
    assert (layer.reads, layer.holds, layer.writes) == (("Int8",), ("Int8", "Float"), ("Float",))
    assert layer.nodes[:2] == ("node_Conv_806", "image_DequantizeLinear")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_products_that_run_as_asked_for(precision: str) -> None:
    products = [("Gemm", "node_linear")]
    if precision == "fp16":
        products.append(("Conv", "node_Conv_806"))
    result = found(precision, graph(precision, precision, *products))
    assert result.products == result.requested == {precision: len(products)}
    assert (result.otherwise, result.unseen, result.float_outputs, result.standalone_quantize) == ((), 0, 0, 0)


def test_quantizing_that_was_not_fused_is_counted() -> None:
    result = found("int8", graph("int8", "int8", ("Conv", "node_Conv_806"), ("Gemm", "node_linear")))
    assert result.products == result.requested == {"int8": 2}
    assert (result.layers, result.float_outputs, result.standalone_quantize) == ({"fp32": 3, "int8": 2}, 2, 2)
    assert any("products that write floats: 2; kernels that only quantize: 2" in note for note in result.notes)


def test_a_product_in_another_precision_is_named() -> None:
    result = found("fp8", graph("fp8", "fp8", ("Conv", "node_conv2d"), ("MatMul", "node_MatMul_12")))
    assert (result.requested, result.products) == ({"fp8": 2}, {"fp16": 1, "fp8": 1})
    assert result.otherwise == ("node_conv2d fp8 → fp16",)
    assert any("node_conv2d fp8 → fp16" in note for note in result.notes)


def test_a_kernel_that_only_names_a_product_is_not_taken_for_it() -> None:
    layers = [layer for layer in read_layers(dump("int8")) if "node_linear" in layer.nodes]
    assert {layer.precision for layer in layers} == {"int8", "fp32"}
    assert found("int8", graph("int8", "int8", ("Gemm", "node_linear"))).products == {"int8": 1}


def test_narrow_weights_alone_are_told_from_quantized_products() -> None:
    result = found("int4", graph("fp16", "int4", ("MatMul", "node_MatMul_12")))
    assert result.products == result.requested == {"fp16 with int4 weights": 1}


def test_attention_in_one_kernel_counts_for_its_products() -> None:
    result = found("int4", graph("fp16", "fp16", ("MatMul", "node_MatMul_613"), ("MatMul", "node_MatMul_615")))
    assert (result.products, result.unseen) == ({"fp16": 2}, 0)


def test_products_merged_into_one_are_all_found() -> None:
    names = [("MatMul", f"node_MatMul_{number}") for number in (42, 50, 58)]
    result = found("int8-merged", graph("int8", "int8", *names))
    assert (result.products, result.unseen) == ({"int8": 3}, 0)


def test_a_product_that_no_layer_names_is_unseen() -> None:
    result = found("fp16", graph("fp16", "fp16", ("Conv", "node_Conv_806"), ("Conv", "node_Conv_8")))
    assert (result.unseen, result.products) == (1, {"fp16": 1})


def test_the_graphs_wish_is_read_through_reshapes_of_weights() -> None:
    model = graph("int8", "int8", ("MatMul", "node_linear"))
    model.graph.node.insert(2, helper.make_node("Transpose", ["node_linear_w_dq"], ["turned"]))
    model.graph.node[-1].input[1] = "turned"
    assert found("int8", model).requested == {"int8": 1}


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (Signature(inputs=(IMAGE.model_copy(update={"name": "x"}),), outputs=(LOGITS,)), "no input 'x'"),
        (Signature(inputs=(IMAGE,), outputs=(IMAGE,)), "no output 'image'"),
        (
            Signature(inputs=(IMAGE.model_copy(update={"dtype": "float32"}),), outputs=(LOGITS,)),
            "'image' is float16 in the engine, and float32 in the graph",
        ),
        (
            Signature(inputs=(IMAGE,), outputs=(LOGITS.model_copy(update={"shape": ("batch", 10)}),)),
            "'logits' is [2, 1000] in the engine",
        ),
        (
            Signature(inputs=(IMAGE,), outputs=(LOGITS.model_copy(update={"shape": (2, 1000, 1)}),)),
            "'logits' is [2, 1000] in the engine",
        ),
    ],
)
def test_inputs_and_outputs_that_differ_are_problems(signature: Signature, words: str) -> None:
    (problem,) = found("fp16", graph("fp16", "fp16"), signature).problems
    assert words in problem


def test_a_rank_that_is_not_known_is_no_contradiction() -> None:
    tensors = (TENSORS[0], NetworkTensor("logits", False, "float16", None))
    assert audit(dump("fp16"), graph("fp16", "fp16"), SIGNATURE, "build log", tensors).problems == ()


@pytest.mark.parametrize("text", ["", "Layers:\nsomething else\n", "Layers:\n"])
def test_a_dump_that_cannot_be_read_is_said_and_no_praise(text: str) -> None:
    result = audit(text, graph("fp16", "fp16", ("Conv", "node_Conv_806")), SIGNATURE, "build log", TENSORS)
    assert (result.problems, result.products, result.unseen) == ((), {}, 1)
    assert "no layer can be read in the builder's log, so the precisions are not known" in result.notes
    assert not any("fp16" in note for note in result.notes)


WORDS = {"FP16": "Half", "FP32": "Float"}
FIELD = re.compile(r"Format/Datatype: (?P<whole>[^}]*?\b(?P<type>FP16|FP32|Int8|Int4|Half|Float|N/A)\b[^}]*?) }")
CONSTANT = re.compile(r"(?:, )?(\{ Name: __mye\d+_dconst[^}]*\})(?:, )?")


def as_eleven(line: str) -> str:
    """Rewrite a line of TensorRT 10 as TensorRT 11 has it: layout and type apart, constants apart."""
    line = FIELD.sub(lambda it: f"Datatype: {WORDS.get(it['type'], it['type'])}, Format: {it['whole']} }}", line)
    constants = "".join(CONSTANT.findall(line))
    return CONSTANT.sub("", line).replace(", Outputs:", f", Constants: [ {constants}], Outputs:")


@pytest.fixture(params=[10, 11])
def enterprise(request: pytest.FixtureRequest) -> str:
    """The layers of the enterprise flavour in the form of TensorRT 10 and in that of 11."""
    text = dump("enterprise")
    if request.param == 10:
        return text
    ends = "I/O Tensors:\n Name: image, IOMode: Input, DataType: Half, Dimensions: [-1,3,64,64], Location: Device\n"
    return "\n".join(map(as_eleven, text.partition("Bindings:")[0].split("\n"))) + ends


def test_layers_of_the_enterprise_flavour_are_read_in_both_forms(enterprise: str) -> None:
    layers = {node: layer for layer in read_layers(enterprise) for node in layer.nodes}
    light = ["Reformat", "CaskPooling", "PointWiseV2", "Scale", "Reformat", "Shuffle", "kgen"]
    assert [layer.kind for layer in read_layers(enterprise) if layer.light] == light
    assert layers["/stem/relu"].precision == layers["/stem/pool"].precision == "fp16"
    assert (layers["/head/gemm"].reads, layers["/head/gemm"].holds) == (("Half",), ("Int4",))
    assert [node for node, layer in layers.items() if layer.quantizes] == ["/narrow/quant"]


def test_products_that_run_in_fp32_are_found_in_both_forms(enterprise: str) -> None:
    names = ("/stem/conv", "/wide/conv", "/head/last", "/side/matmul", "/region/first")
    result = audit(enterprise, graph("fp16", "fp16", *(("Conv", it) for it in names)), SIGNATURE, "build log", TENSORS)
    assert result.products == {"fp32": 2, "bf16": 1, "fp16": 1}
    assert result.otherwise == ("/wide/conv fp16 → fp32", "/head/last fp16 → fp32", "/side/matmul fp16 → bf16")
    assert (result.unseen, result.problems) == (1, ())  # of a region of several kernels nothing is known
    assert (result.standalone_quantize, result.float_outputs, result.reformats) == (1, 1, 1)


@pytest.mark.parametrize(
    ("left", "right", "name", "runs"),
    [("int8", "int8", "/narrow/conv", "int8"), ("fp16", "int4", "/head/gemm", "fp16 with int4 weights")],
)
def test_narrow_products_are_found_in_both_forms(enterprise: str, left: str, right: str, name: str, runs: str) -> None:
    result = audit(enterprise, graph(left, right, ("MatMul", name)), SIGNATURE, "build log", TENSORS)
    assert result.products == result.requested == {runs: 1}


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
    ids=["zero point", "default", "empty name", "asked for", "weights", "dequantized"],
)
def test_uint8_quantization(given: onnx.ModelProto) -> None:
    found = refusal(given)
    assert "'quant' quantizes to uint8" in found.message
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
    assert both.remedy.startswith(f"omit {below}")


def test_a_type_that_quantization_makes_counts_too() -> None:
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
