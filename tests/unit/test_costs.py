"""Multiply-adds: counted by hand for small graphs, and against the zoo's own numbers for whole networks."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.utils.flop_counter import FlopCounterMode

from enginesmith.models import MODELS, bert, lstm, mobilenet, resnet, unet, vit
from enginesmith.pipeline.frameworks.onnx import coverage
from enginesmith.pipeline.frameworks.onnx.shapes import Value, view
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch.module import LoadOptions, load
from enginesmith.pipeline.passes.export.export import Export, export_module
from enginesmith.pipeline.passes.simplify import Simplify, simplify_file

FLOAT, UINT8, INT8 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT8
MICROSOFT, BLOCKED = "com.microsoft", "com.microsoft.nchwc"
BATCH = {"batch": 2}
RESNET = resnet.ResNet
SHALLOW = ((resnet, "ResNet", lambda block, depths, classes: RESNET(block, (1,) * len(depths), classes)),)
SMALLER: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "resnet18": SHALLOW,
    "resnet50": SHALLOW,
    "unet": ((unet, "WIDTHS", (8, 16, 32, 64, 128)),),
    "lstm": ((lstm, "HIDDEN", 32),),
    "bert_base": ((bert, "DEPTH", 1), (bert, "VOCABULARY", 1000)),
    "vit_b16": ((vit, "DEPTH", 1),),
    "mobilenet_v2": ((mobilenet, "STAGES", tuple((*stage[:2], 1, stage[3]) for stage in mobilenet.STAGES)),),
}
"""What is smaller of a network of the zoo; its whole size is counted where its table is held against it."""


def saved(
    folder: Path, nodes: list[onnx.NodeProto], inputs: dict[str, list[Any]], weights: dict[str, Any], kind: int = FLOAT
) -> Path:
    """A graph of nodes whose results need no description: its output is its own input."""
    given = [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    imports = [helper.make_opsetid("", 23), *(helper.make_opsetid(domain, 1) for domain in (MICROSOFT, BLOCKED))]
    path = folder / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", given, given[:1], stored), opset_imports=imports), path)
    return path


def node(operator: str, inputs: str, name: str = "n", output: str = "y", **more: Any) -> onnx.NodeProto:
    return helper.make_node(operator, [one.strip("-") for one in inputs.split()], [output], name=name, **more)


def zeros(*shape: int, dtype: str = "float32") -> Any:
    return np.zeros(shape, dtype)


ONE = np.float32(1)
ZERO = np.uint8(0)
IMAGE, LAST = {"x": ["batch", 4, 8, 8]}, {"x": ["batch", 8, 8, 4]}
ROWS, STEPS = {"x": ["batch", 5, 16]}, {"x": [9, "batch", 5]}
SCALES = {"s": ONE, "z": ZERO}
FILTERS = {"w": zeros(6, 4, 3, 3)}
MATRIX, TURNED = {"w": zeros(16, 7)}, {"w": zeros(7, 16)}
BYTES, SIGNED, LEVELS = (
    {"w": zeros(*shape, dtype=kind)} for *shape, kind in ((16, 7, "uint8"), (16, 7, "int8"), (7, 16, "uint8"))
)
PIXELS = {"w": zeros(6, 4, 3, 3, dtype="uint8")}
GATES = {"w": zeros(1, 12, 5), "r": zeros(1, 12, 3)}
NARROW_GATES = {"w": zeros(1, 5, 12, dtype="int8"), "r": zeros(1, 3, 12, dtype="int8")}
QUERIES = {"q": ["batch", 8, 5, 4], "k": ["batch", 2, 7, 4], "v": ["batch", 2, 7, 6]}
PAST = {"p": ["batch", 2, 3, 4], "o": ["batch", 2, 3, 6]}
FLAT = {"q": ["batch", 5, 32], "k": ["batch", 7, 8], "v": ["batch", 7, 12]}
CONVOLVED, MULTIPLIED, RECURRED, ATTENDED = 2 * 6 * 36 * 36, 2 * 5 * 16 * 7, 9 * 2 * 12 * 8, 2 * 8 * 5 * 7 * (4 + 6)
"""Multiply-accumulates of what most of the cases are."""


def foreign(operator: str, inputs: str, **more: Any) -> onnx.NodeProto:
    return node(operator, inputs, domain=MICROSOFT, **more)


def value(dtype: str, *shape: int) -> Value:
    return Value(dtype, shape)


STANDARD: list[tuple[str, onnx.NodeProto, dict[str, list[Any]], dict[str, Any], int]] = [
    ("conv", node("Conv", "x w", pads=[1] * 4, strides=[2, 2]), IMAGE, FILTERS, 2 * 6 * 4 * 4 * 4 * 9),
    ("depthwise", node("Conv", "x w", group=4), IMAGE, {"w": zeros(4, 1, 3, 3)}, 2 * 4 * 6 * 6 * 9),
    ("transposed", node("ConvTranspose", "x w", strides=[2, 2]), IMAGE, {"w": zeros(4, 6, 2, 2)}, 2 * 64 * 4 * 6 * 4),
    ("matmul", node("MatMul", "x w"), ROWS, MATRIX, MULTIPLIED),
    ("vector", node("MatMul", "x w"), {"x": [16]}, MATRIX, 16 * 7),
    ("gemm", node("Gemm", "x w", transA=1, transB=1), {"x": [16, 3]}, TURNED, 3 * 16 * 7),
    ("einsum", node("Einsum", "x w", equation="bij,jk->bk"), ROWS, MATRIX, MULTIPLIED),
    ("ellipsis", node("Einsum", "x w", equation="...j,jk->...k"), ROWS, MATRIX, MULTIPLIED),
    ("repeated", node("Einsum", "x w", equation="...ij,...jk->...ik"), ROWS, {"w": zeros(1, 16, 7)}, MULTIPLIED),
    (
        "deformed",
        node("DeformConv", "x w o", kernel_shape=[3, 3]),
        *({"x": ["batch", 4, 6, 6], "o": ["batch", 18, 4, 4]}, {"w": zeros(6, 4, 3, 3)}, 2 * 6 * 4 * 4 * 36),
    ),
    ("lstm", node("LSTM", "x w r", hidden_size=3), STEPS, GATES, RECURRED),
    ("attention", node("Attention", "q k v"), QUERIES, {}, ATTENDED),
    ("attention with a past", node("Attention", "q k v - p o"), QUERIES | PAST, {}, 2 * 8 * 5 * (7 + 3) * (4 + 6)),
    ("flat attention", node("Attention", "q k v", q_num_heads=8, kv_num_heads=2), FLAT, {}, ATTENDED),
]

KEYS = ROWS | {"k": ["batch", 7, 16], "v": ["batch", 7, 16]}
PACKED = {"w": zeros(7, 1, 8, dtype="uint8"), "s": zeros(7)}
PROJECTIONS = {"w": zeros(16, 24), "b": zeros(24)}
MAPS, PRODUCT = value("float32", 2, 6, 6, 6), value("float32", 2, 5, 7)
FOREIGN: list[tuple[str, onnx.NodeProto, dict[str, list[Any]], dict[str, Any], int, Value]] = [
    ("fused conv", foreign("FusedConv", "x w", activation="Relu"), IMAGE, FILTERS, CONVOLVED, MAPS),
    ("channels last", foreign("NhwcFusedConv", "x w"), LAST, FILTERS, CONVOLVED, MAPS),
    (
        "blocks of channels",
        node("Conv", "x w", domain=BLOCKED, kernel_shape=[3, 3]),
        *(IMAGE, {"w": zeros(16, 4, 3, 3)}, 2 * 16 * 36 * 36, value("float32", 2, 16, 6, 6)),
    ),
    ("turned", foreign("FusedMatMul", "x w", transB=1), ROWS, TURNED, MULTIPLIED, PRODUCT),
    ("packed", foreign("MatMulNBits", "x w s", K=16, N=7, bits=4, block_size=16), ROWS, PACKED, MULTIPLIED, PRODUCT),
    ("dynamic", foreign("DynamicQuantizeMatMul", "x w s"), ROWS, SIGNED | {"s": ONE}, MULTIPLIED, PRODUCT),
    (
        "dynamic lstm",
        foreign("DynamicQuantizeLSTM", "x w r", hidden_size=3),
        *(STEPS, NARROW_GATES, RECURRED, value("float32", 9, 1, 2, 3)),
    ),
    (
        "attention with projections",
        foreign("Attention", "x w b", num_heads=2),
        *(ROWS, PROJECTIONS, 2 * (5 * 16 * 24 + 2 * 5 * 5 * 8), value("float32", 2, 5, 8)),
    ),
    ("heads", foreign("MultiHeadAttention", "x k v", num_heads=2), KEYS, {}, 20 * 7 * 16, value("float32", 2, 5, 16)),
]

VECTORS = {"x": ["batch", 16]}
WHOLE, INTEGER = value("uint8", 2, 6, 6, 6), value("int32", 2, 5, 7)
INTEGERS: list[tuple[str, onnx.NodeProto, dict[str, list[Any]], dict[str, Any], int, Value]] = [
    ("quantized conv", node("QLinearConv", "x s z w s z s z"), IMAGE, PIXELS | SCALES, CONVOLVED, WHOLE),
    ("last", foreign("QLinearConv", "x s z w s z s z", channels_last=1), LAST, PIXELS | SCALES, CONVOLVED, WHOLE),
    (
        "quantized product",
        node("QLinearMatMul", "x s z w s z s z"),
        ROWS,
        BYTES | SCALES,
        MULTIPLIED,
        value("uint8", 2, 5, 7),
    ),
    ("integers", node("MatMulInteger", "x w"), ROWS, SIGNED, MULTIPLIED, INTEGER),
    ("to floats", foreign("MatMulIntegerToFloat", "x w s s"), ROWS, SIGNED | SCALES, MULTIPLIED, PRODUCT),
    ("convolution of integers", node("ConvInteger", "x w"), IMAGE, PIXELS, CONVOLVED, value("int32", 2, 6, 6, 6)),
    (
        "gemm to floats",
        foreign("QGemm", "x s z w s z", transB=1),
        VECTORS,
        LEVELS | SCALES,
        32 * 7,
        value("float32", 2, 7),
    ),
    ("gemm", foreign("QGemm", "x s z w s z - s z", transB=1), VECTORS, LEVELS | SCALES, 32 * 7, value("uint8", 2, 7)),
]


@pytest.mark.parametrize("case", STANDARD, ids=lambda case: case[0])
def test_products_are_counted(tmp_path: Path, case: Any) -> None:
    _, product, inputs, weights, expected = case
    assert coverage.count_macs(saved(tmp_path, [product], inputs, weights), BATCH) == {"n": expected}


@pytest.mark.parametrize("case", FOREIGN, ids=lambda case: case[0])
def test_products_of_onnx_runtime_are_counted(tmp_path: Path, case: Any) -> None:
    _, product, inputs, weights, expected, result = case
    path = saved(tmp_path, [product], inputs, weights)
    assert coverage.count_macs(path, BATCH) == {"n": expected}
    assert view(path, BATCH).value("y") == result


@pytest.mark.parametrize("case", INTEGERS, ids=lambda case: case[0])
def test_products_of_integers_are_counted(tmp_path: Path, case: Any) -> None:
    _, product, inputs, weights, expected, result = case
    path = saved(tmp_path, [product], inputs, weights, UINT8)
    assert coverage.count_macs(path, BATCH) == {"n": expected}
    assert view(path, BATCH).value("y") == result


AROUND: list[tuple[str, list[onnx.NodeProto], tuple[int, ...]]] = [
    (
        "reordered",
        [
            node("ReorderInput", "x", domain=BLOCKED, output="a"),
            node("MaxPool", "a", domain=BLOCKED, kernel_shape=[2, 2], strides=[2, 2], output="b"),
            node("ReorderOutput", "b", domain=BLOCKED, channels=3),
        ],
        (2, 3, 4, 4),
    ),
    ("added", [node("QLinearAdd", "x s z x s z s z", domain=MICROSOFT)], (2, 4, 8, 8)),
    ("joined", [node("QLinearConcat", "s z x s z x s z", domain=MICROSOFT, axis=1)], (2, 8, 8, 8)),
    ("pooled", [node("QLinearGlobalAveragePool", "x s z s z", domain=MICROSOFT, channels_last=0)], (2, 4, 1, 1)),
    ("pooled, channels last", [node("NhwcMaxPool", "x", domain=MICROSOFT, kernel_shape=[2, 2])], (2, 3, 7, 8)),
    ("normalized", [node("SkipLayerNormalization", "x x s", domain=MICROSOFT)], (2, 4, 8, 8)),
]


@pytest.mark.parametrize("case", AROUND, ids=lambda case: case[0])
def test_shapes_pass_through_onnx_runtimes_operators(tmp_path: Path, case: Any) -> None:
    _, nodes, shape = case
    assert view(saved(tmp_path, nodes, IMAGE, SCALES), BATCH).value("y").shape == shape


def test_shapes_that_are_computed_in_the_graph_are_found(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", name="", output="shape", end=1),
        node("Concat", "shape rest", name="", output="target", axis=0),
        node("Reshape", "x target", name="", output="flat"),
        node("MatMul", "flat w", name=""),
    ]
    weights = {"rest": np.array([-1]), "w": zeros(80, 3)}
    assert coverage.count_macs(saved(tmp_path, nodes, ROWS, weights), BATCH) == {"MatMul_3": 2 * 80 * 3}


def test_what_cannot_be_known_is_left_out(tmp_path: Path) -> None:
    nodes = [node("Mystery", "x", domain="elsewhere", output="a"), node("MatMul", "a w", "first", "b")]
    path = saved(tmp_path, [*nodes, node("MatMul", "x w", "second")], ROWS, MATRIX)
    assert coverage.count_macs(path, BATCH) == {"second": 2 * 5 * 16 * 7}
    assert coverage.count_products(view(path, BATCH))["first"] is None
    assert coverage.count_macs(path, {}) == {}


def test_sizes_that_were_written_down_before_are_found_anew(tmp_path: Path) -> None:
    path = saved(
        tmp_path, [node("MatMul", "x w", "a", "a"), node("MatMul", "a u", "b")], ROWS, {**MATRIX, "u": zeros(7, 3)}
    )
    model = onnx.load(path)
    model.graph.value_info.append(helper.make_tensor_value_info("a", FLOAT, ["made up", "s1 + 2", 7]))
    onnx.save(model, path)
    assert coverage.count_macs(path, BATCH) == {"a": 2 * 5 * 16 * 7, "b": 2 * 5 * 7 * 3}


def test_names_are_given_where_they_are_missing_or_taken(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", name, output) for name, output in (("", "a"), ("n", "b"), ("n", "c"))]
    assert list(coverage.count_macs(saved(tmp_path, nodes, ROWS, MATRIX), BATCH)) == ["MatMul_0", "n", "n_2"]


def test_subgraphs_count_under_their_own_names(tmp_path: Path) -> None:
    def branch(name: str, weight: str) -> onnx.GraphProto:
        made = helper.make_tensor_value_info(name, FLOAT, None)
        return helper.make_graph([node("MatMul", f"x {weight}", f"in {name}", name)], name, [], [made])

    choice = node("If", "c", "choice", then_branch=branch("then", "w"), else_branch=branch("else", "v"))
    weights = {"c": np.array(True), "w": zeros(16, 7), "v": zeros(16, 3)}
    found = coverage.count_macs(saved(tmp_path, [choice], ROWS, weights), BATCH)
    assert found == {"in then": 2 * 5 * 16 * 7, "in else": 2 * 5 * 16 * 3}


def test_branches_that_disagree_about_a_name_leave_it_unknown(tmp_path: Path) -> None:
    def branch(width: int) -> onnx.GraphProto:
        output = f"out{width}"
        nodes = [node("MatMul", f"x w{width}", f"a{width}", "same"), node("MatMul", f"same u{width}", output, output)]
        return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info(output, FLOAT, None)])

    choice = node("If", "c", "choice", then_branch=branch(7), else_branch=branch(3))
    weights = {"c": np.array(True), "w7": zeros(16, 7), "w3": zeros(16, 3), "u7": zeros(7, 2), "u3": zeros(3, 2)}
    assert coverage.count_macs(saved(tmp_path, [choice], ROWS, weights), BATCH) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_the_zoo_counts_what_torch_counts(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, constant, fewer in SMALLER.get(name, ()):  # layers that repeat add time and nothing else
        monkeypatch.setattr(module, constant, fewer)
    model = load(resolve(name), LoadOptions())
    effect = export_module(model, tmp_path, Export(), lambda text: None)
    out = tmp_path / "out"
    out.mkdir()
    effect = simplify_file(tmp_path / effect.file, out, Simplify().external_data_bytes, lambda text: None)
    found = coverage.count_products(view(out / effect.file, {"batch": 1, "sequence": 128}))
    module = model.module.to("meta")  # kernels of the CPU are not all counted
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*(value[:1].to("meta") for value in model.example.values()))
    assert None not in found.values()
    assert 2 * sum(value or 0 for value in found.values()) == counter.get_total_flops()
    assert name in SMALLER or counter.get_total_flops() == MODELS[name].flops
