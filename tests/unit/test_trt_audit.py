"""The audit, on layers that TensorRT-RTX 1.7.1 wrote for real models (cut to some lines)."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from enginesmith.pipeline.engines.tensorrt.layers import Audit, audit, read_layers
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
    return audit(dump(name), model, signature, "build log")


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
    assert layer.name == "node_Conv_806_myl0_1"
    assert layer.kind == "correlation"
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
    assert (result.otherwise, result.unseen, result.float_outputs, result.standalone_quantise) == ((), 0, 0, 0)


def test_quantising_that_was_not_fused_is_counted() -> None:
    result = found("int8", graph("int8", "int8", ("Conv", "node_Conv_806"), ("Gemm", "node_linear")))
    assert result.products == result.requested == {"int8": 2}
    assert result.layers == {"fp32": 3, "int8": 2}
    assert result.float_outputs == 2
    assert result.standalone_quantise == 2
    assert any("products that write floats: 2; kernels that only quantise: 2" in note for note in result.notes)


def test_a_product_in_another_precision_is_named() -> None:
    result = found("fp8", graph("fp8", "fp8", ("Conv", "node_conv2d"), ("MatMul", "node_MatMul_12")))
    assert result.requested == {"fp8": 2}
    assert result.products == {"fp16": 1, "fp8": 1}
    assert result.otherwise == ("node_conv2d fp8 → fp16",)
    assert any("node_conv2d fp8 → fp16" in note for note in result.notes)


def test_a_kernel_that_only_names_a_product_is_not_taken_for_it() -> None:
    layers = [layer for layer in read_layers(dump("int8")) if "node_linear" in layer.nodes]
    assert {layer.precision for layer in layers} == {"int8", "fp32"}
    assert found("int8", graph("int8", "int8", ("Gemm", "node_linear"))).products == {"int8": 1}


def test_narrow_weights_alone_are_told_from_quantised_products() -> None:
    result = found("int4", graph("fp16", "int4", ("MatMul", "node_MatMul_12")))
    assert result.products == result.requested == {"fp16 with int4 weights": 1}


def test_attention_in_one_kernel_counts_for_its_products() -> None:
    result = found("int4", graph("fp16", "fp16", ("MatMul", "node_MatMul_613"), ("MatMul", "node_MatMul_615")))
    assert result.products == {"fp16": 2}
    assert result.unseen == 0


def test_products_merged_into_one_are_all_found() -> None:
    names = [("MatMul", f"node_MatMul_{number}") for number in (42, 50, 58)]
    result = found("int8-merged", graph("int8", "int8", *names))
    assert result.products == {"int8": 3}
    assert result.unseen == 0


def test_a_product_that_no_layer_names_is_unseen() -> None:
    result = found("fp16", graph("fp16", "fp16", ("Conv", "node_Conv_806"), ("Conv", "node_Conv_8")))
    assert result.unseen == 1
    assert result.products == {"fp16": 1}


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
            "'image' is Half in the engine, and float32 in the graph",
        ),
        (
            Signature(inputs=(IMAGE,), outputs=(LOGITS.model_copy(update={"shape": ("batch", 10)}),)),
            "'logits' is \\[2,1000\\] in the engine",
        ),
        (
            Signature(inputs=(IMAGE,), outputs=(LOGITS.model_copy(update={"shape": (2, 1000, 1)}),)),
            "'logits' is \\[2,1000\\] in the engine",
        ),
    ],
)
def test_inputs_and_outputs_that_differ_are_problems(signature: Signature, words: str) -> None:
    (problem,) = found("fp16", graph("fp16", "fp16"), signature).problems
    assert words.replace("\\", "") in problem


@pytest.mark.parametrize("text", ["", "Layers:\nsomething else\n", "Layers:\n"])
def test_a_dump_that_cannot_be_read_is_a_problem_and_no_praise(text: str) -> None:
    result = audit(text, graph("fp16", "fp16", ("Conv", "node_Conv_806")), SIGNATURE, "build log")
    assert result.problems == ("the builder's layers could not be read",)
    assert result.products == {}
    assert result.unseen == 1
    assert result.notes
    assert not any("fp16" in note for note in result.notes)
