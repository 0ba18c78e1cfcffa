"""Shares by precision, on graphs small enough to count by hand, and on what ONNX Runtime makes of them."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import coverage, shapes
from enginesmith.pipeline.frameworks.records import Coverage, describe_fallback
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import read_records
from enginesmith.pipeline.tasks.build import Audit
from enginesmith.pipeline.tensors import ShapeRange, Signature, TensorSpec
from enginesmith.pipeline.workflows.inspect import inspect
from graphs import parse_graph

FLOAT, HALF, INT8, FP8 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT8, TensorProto.FLOAT8E4M3FN
MICROSOFT = "com.microsoft"
SIZES = {"batch": 1}
Nodes = list[onnx.NodeProto]


class Graph:
    """A chain of layers of 8 × 8 matrices, written one after the other."""

    def __init__(self, kind: int = FLOAT) -> None:
        self.nodes: Nodes = []
        self.weights: dict[str, onnx.TensorProto] = {}
        self.kind, self.value = kind, "x"
        self.weight("s", np.ones((), np.float32), kind)
        self.weight("z", np.zeros((), np.int8), INT8)

    def weight(self, name: str, value: Any, kind: int) -> str:
        array = np.asarray(value)
        self.weights[name] = helper.make_tensor(name, kind, array.shape, array.ravel().tolist())
        return name

    def add(self, operator: str, *more: str, domain: str = "", **attributes: Any) -> "Graph":
        """An operator on the last value."""
        output = f"v{len(self.nodes)}"
        given = [self.value, *more]
        self.nodes.append(helper.make_node(operator, given, [output], name=output, domain=domain, **attributes))
        self.value = output
        return self

    def product(self, kind: int = FLOAT) -> "Graph":
        """A product with a weight of a type: dequantized where that is no float."""
        count = len(self.nodes)
        stored = self.weight(f"w{count}", np.ones((8, 8), np.float32), kind)
        if kind in (FLOAT, HALF):
            return self.add("MatMul", stored)
        zero = self.weight(f"z{count}", np.zeros((), np.float32), kind)
        unpacked = f"{stored}_float"
        self.nodes.append(helper.make_node("DequantizeLinear", [stored, "s", zero], [unpacked], name=unpacked))
        return self.add("MatMul", unpacked)

    def pair(self, kind: int = INT8) -> "Graph":
        """Quantized and dequantized."""
        zero = self.weight(f"z{kind}", np.zeros((), np.float32), kind)
        return self.add("QuantizeLinear", "s", zero).add("DequantizeLinear", "s", zero)

    def save(self, folder: Path) -> Path:
        x = helper.make_tensor_value_info("x", self.kind, ["batch", 8])
        y = helper.make_tensor_value_info(self.value, self.kind, ["batch", 8])
        body = helper.make_graph(self.nodes, "g", [x], [y], list(self.weights.values()))
        imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        onnx.save(helper.make_model(body, opset_imports=imports, ir_version=10), folder / "model.onnx")
        return folder / "model.onnx"

    def covered(self, folder: Path, *, executed: bool = False) -> Coverage:
        return coverage.compute_coverage(self.save(folder), SIZES, executed=executed)


def test_plain_floats(tmp_path: Path) -> None:
    found = Graph().product().add("Relu").product().covered(tmp_path)
    assert found.total_macs == 2 * 64
    assert found.macs == found.weights == {"fp32": 1.0}
    assert found.operators == {"fp32": {"MatMul": 1.0}}
    assert (found.islands, found.casts, found.qdq_pairs, found.conversions) == (0, 0, 0, 0)


def test_products_behind_a_computed_shape_are_counted(tmp_path: Path) -> None:
    """The shape is computed as PaddlePaddle's exporter writes it: of the value's own, by a Slice."""
    numbers = {"zero": [0], "two": [2], "rest": [-1]}
    held = [helper.make_tensor(name, TensorProto.INT64, (1,), value) for name, value in numbers.items()]
    held.append(helper.make_tensor("w", FLOAT, (12, 5), [1.0] * 60))
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "zero", "two", "zero"], ["first"]),
        helper.make_node("Concat", ["first", "rest"], ["flat"], axis=0),
        helper.make_node("Reshape", ["x", "flat"], ["rows"]),
        helper.make_node("MatMul", ["rows", "w"], ["y"], name="product"),
    ]
    ends = [
        helper.make_tensor_value_info(name, FLOAT, ["batch", *shape])
        for name, shape in (("x", (3, 4, 3)), ("y", (3, 5)))
    ]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=7), tmp_path / "m.onnx")
    assert coverage.count_macs(tmp_path / "m.onnx", {"batch": 2}) == {"product": 2 * 3 * 12 * 5}


@pytest.mark.parametrize(("kind", "name"), [(INT8, "int8"), (FP8, "fp8")])
def test_a_product_is_quantized_if_both_its_operands_are(tmp_path: Path, kind: int, name: str) -> None:
    found = Graph().pair(kind).product(kind).pair(kind).product().product(kind).covered(tmp_path)
    assert found.macs == {"fp32": pytest.approx(2 / 3), name: pytest.approx(1 / 3)}
    assert found.weights == {name: pytest.approx(2 / 3), "fp32": pytest.approx(1 / 3)}
    assert (found.products, found.qdq_pairs) == ({"fp32": 2, name: 1}, 2)


def test_pairs_that_are_executed_are_no_kernels(tmp_path: Path) -> None:
    graph = Graph().pair().product(INT8).pair()
    assert graph.covered(tmp_path).macs == {"int8": 1.0}
    found = graph.covered(tmp_path, executed=True)
    assert found.macs == found.weights == {"fp32": 1.0}, "weights that are unpacked for a float product are floats"
    assert (found.unfused, found.conversions, found.islands) == (1, 4, 0)


def test_weights_alone_leave_the_type_of_the_other_operand(tmp_path: Path) -> None:
    found = Graph(HALF).product(TensorProto.INT4).product(INT8).covered(tmp_path)
    assert (found.macs, found.weights) == ({"fp16": 1.0}, {"int4": 0.5, "int8": 0.5})


def test_scales_of_blocks_are_no_weights(tmp_path: Path) -> None:
    graph = Graph()
    graph.weight("w", np.ones((8, 8), np.float32), TensorProto.INT4)
    graph.weight("blocks", np.ones((2, 8), np.float32), FLOAT)
    unpack = helper.make_node("DequantizeLinear", ["w", "blocks"], ["u"], name="u", block_size=4, axis=0)
    graph.nodes.append(unpack)
    assert graph.add("MatMul", "u").covered(tmp_path).weights == {"int4": 1.0}


def test_packed_weights_count_by_their_bits(tmp_path: Path) -> None:
    def packed(**more: int) -> Coverage:
        graph = Graph()
        graph.weight("w", np.zeros((8, 1, 4)), TensorProto.UINT8)
        graph.weight("scales", np.ones((8, 1)), FLOAT)
        attributes = {"K": 8, "N": 8, "bits": 4, "block_size": 16, **more}
        return graph.add("MatMulNBits", "w", "scales", domain=MICROSOFT, **attributes).covered(tmp_path)

    assert (packed().macs, packed(accuracy_level=4).macs) == ({"fp32": 1.0}, {"int8": 1.0})
    assert packed().weights == {"int4": 1.0}


def test_types_are_seen_through_casts(tmp_path: Path) -> None:
    found = Graph().add("Cast", to=HALF).product(HALF).add("Cast", to=FLOAT).product().covered(tmp_path)
    assert found.macs == {"fp16": 0.5, "fp32": 0.5}
    assert (found.casts, found.islands) == (2, 1)


def test_casts_split_islands(tmp_path: Path) -> None:
    graph = Graph(HALF).product(HALF).add("Relu").product(HALF)
    assert graph.covered(tmp_path).islands == 1
    graph.add("Cast", to=FLOAT).add("Softmax").add("Cast", to=HALF).product(HALF)
    assert graph.covered(tmp_path).islands == 2


def test_a_float_operator_between_products_splits_islands(tmp_path: Path) -> None:
    """Its result is not quantized at once, so it runs in floating point."""
    graph = Graph().pair().product(INT8).pair().add("Sigmoid").add("Exp").pair().product(INT8)
    assert graph.covered(tmp_path).islands == 2


def test_floats_between_integer_kernels_connect_nothing(tmp_path: Path) -> None:
    graph = Graph()
    for name in ("one", "two"):
        graph.weight(name, np.ones((8, 8)), INT8)
        graph.add("DynamicQuantizeMatMul", name, "s", domain=MICROSOFT)
    assert graph.covered(tmp_path, executed=True).islands == 2


def test_products_of_unknown_size_are_told_and_in_no_share(tmp_path: Path) -> None:
    graph = Graph().product()
    graph.nodes.append(helper.make_node("Mystery", ["x"], ["m"], name="m", domain="elsewhere"))
    graph.nodes.append(helper.make_node("MatMul", ["m", "w0"], ["n"], name="n"))
    found = graph.covered(tmp_path)
    assert (found.total_macs, found.unknown_products) == (64, 1)
    assert (found.macs, found.products) == ({"fp32": 1.0}, {"fp32": 1, "unknown": 1})


def write_windows(folder: Path) -> Path:
    """Write three convolutions over 5 steps of a time that leads, and a product of one number for each step."""
    nodes = "s = Transpose <perm = [1, 2, 0]> (x)  a = Conv (s, w)  b = Conv (a, w)  c = Conv (b, w)  m = MatMul (x, o)"
    ends = "(float[time,1,1] x) => (float[1,1,n] c, float[time,1,1] m)"
    weights = "<float[1,1,5] w = {1, 1, 1, 1, 1}, float[1,1] o = {1}>"
    text = f'<ir_version: 10, opset_import: ["": 20]> g {ends} {weights} {{{nodes}}}'
    onnx.save(onnx.parser.parse_model(text), folder / "windows.onnx")
    return folder / "windows.onnx"


def test_convolutions_over_fewer_steps_than_their_window_are_of_unknown_size(tmp_path: Path) -> None:
    """Of 8 steps, the first gives 4, the second none, the third less than none."""
    path = write_windows(tmp_path)
    assert [*coverage.count_products(shapes.view(path, {"time": 8})).values()] == [20, None, None, 8]
    assert [*coverage.count_products(shapes.view(path, {"time": 1})).values()] == [None, None, None, 1]


def test_inspect_counts_at_a_usual_size_what_has_none_at_batch_1(tmp_path: Path) -> None:
    found = inspect(write_windows(tmp_path))["precision"]
    assert (found["sizes"], found["products of unknown size"]) == ("time 128", 0)
    assert found["multiply-adds"] == f"{5 * (124 + 120 + 116) + 128:,}"


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
        ([np.ones(8, np.int16), np.ones(1, np.uint16)], ["DequantizeLinear"], "int16"),
        ([np.ones(8, np.int8), np.ones(8, np.float32)], ["DynamicQuantizeLinear"], "int8-dynamic"),
    ],
)
def test_precision_is_that_of_most_weights_and_of_quantization(
    tmp_path: Path, weights: list[Any], operators: list[str], expected: str
) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    nodes = [helper.make_node(name, ["x", "s"], [f"y{index}"]) for index, name in enumerate(operators)]
    stored = [onnx.numpy_helper.from_array(array, f"w{index}") for index, array in enumerate(weights)]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [value], [value], stored)), tmp_path / "m.onnx")
    assert coverage.find_precision(tmp_path / "m.onnx") == expected


NARROW_BEHIND_CAST = """net (float[n, 8] x) => (float[n, 8] y) {
    wide = Cast<to = 1>(w)
    turned = Transpose<perm = [1, 0]>(wide)
    y = MatMul(x, turned)
}"""
CAST_BY_AUTOCAST = """net (float16[n, 8] x) => (float16[n, 8] y) { narrow = Cast<to = 10>(w) y = MatMul(x, narrow) }"""
TABLE_AND_PRODUCT = """net (int64[n, 1] x) => (bfloat16[n, 8] y) {
    rows = Gather(table, x)
    narrow = Cast<to = 16>(rows)
    y = MatMul(narrow, w)
}"""
IN_BODY = """net (float[n, 8] x, bool c) => (float[n, 8] y) {
    wide = Cast<to = 1>(w)
    y = If(c) <
        then_branch = a () => (float[n, 8] t) { t = MatMul(x, wide) },
        else_branch = b () => (float[n, 8] e) { e = Neg(x) }
    >
}"""


@pytest.mark.parametrize(
    ("text", "stored", "expected"),
    [
        (NARROW_BEHIND_CAST, {"w": np.float16}, "fp32"),
        (NARROW_BEHIND_CAST, {"w": ml_dtypes.bfloat16}, "fp32"),
        (IN_BODY, {"w": np.float16}, "fp32"),
        (CAST_BY_AUTOCAST, {"w": np.float32}, "fp16"),
        (TABLE_AND_PRODUCT, {"table": np.float32, "w": ml_dtypes.bfloat16}, "bf16"),
    ],
)
def test_precision_is_that_in_which_constants_are_computed_with(
    tmp_path: Path, text: str, stored: dict[str, Any], expected: str
) -> None:
    weights = {name: np.ones((8, 8)).astype(dtype) for name, dtype in stored.items()}
    ir.save(parse_graph(text, 22, **weights), tmp_path / "m.onnx")
    assert coverage.find_precision(tmp_path / "m.onnx") == expected


def test_precision_of_a_file_with_functions_is_that_of_their_products(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 22, "own" : 1]>
    net (float[n, 8] x) => (float[n, 8] y) { y = own.Linear(x, w) }
    <domain: "own", opset_import: ["" : 22]>
    Linear (a, b) => (c) { wide = Cast<to = 1>(b) c = MatMul(a, wide) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((8, 8), np.float16), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    assert coverage.find_precision(tmp_path / "m.onnx") == "fp32"


def test_a_function_that_calls_itself_is_left_to_the_check_of_the_file(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 22, "own" : 1]>
    net (float[n] x) => (float[n] y) { y = own.Again(x) }
    <domain: "own", opset_import: ["own" : 1]>
    Again (a) => (c) { c = own.Again(a) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    assert coverage.find_precision(tmp_path / "m.onnx") == "fp32"


def test_uint4_names_a_file_as_int4_does(tmp_path: Path) -> None:
    assert coverage.find_precision(Graph().product(TensorProto.UINT4).save(tmp_path)) == "int4-weights"


def test_a_graph_without_products_has_no_shares(tmp_path: Path) -> None:
    found = Graph().add("Relu").covered(tmp_path)
    assert (found.total_macs, found.macs, found.weights, found.islands) == (0, {}, {}, 0)


def dynamic(folder: Path) -> Path:
    graph = Graph()
    graph.weight("w", np.ones((8, 8), np.float32), INT8)
    graph.nodes += [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"], name="quantize"),
        helper.make_node("MatMulInteger", ["q", "w", "qz", "z"], ["i"], name="product"),
        helper.make_node("Cast", ["i"], ["f"], name="cast", to=FLOAT),
        helper.make_node("Mul", ["f", "qs"], ["o"], name="scale"),
    ]
    graph.value = "o"
    return graph.save(folder)


def artifact(path: Path) -> Artifact:
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 8))
    return Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=Signature(inputs=(spec,), outputs=()))


def run_in_onnx_runtime(path: Path, level: str = "all") -> Coverage:
    engine, scratch = OnnxRuntime.model_validate({"graph_optimization": level}), path.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    return coverage.compute_coverage(engine.executed(artifact(path), Device(threads=1), scratch), SIZES, executed=True)


def test_onnx_runtime_fuses_pairs_that_are_placed_well(tmp_path: Path) -> None:
    found = run_in_onnx_runtime(Graph().pair().product(INT8).pair().product(INT8).pair().save(tmp_path))
    assert found.macs == {"int8": 1.0}
    assert (found.unfused, found.islands) == (0, 1)
    assert found.conversions == 2, "at the input and at the output"


def test_onnx_runtime_leaves_the_others(tmp_path: Path) -> None:
    path = Graph().pair().product(INT8).pair().save(tmp_path)
    found = run_in_onnx_runtime(path, "disabled")
    assert (found.macs, found.unfused) == ({"fp32": 1.0}, 1)


def test_onnx_runtime_computes_fp16_in_fp32(tmp_path: Path) -> None:
    path = Graph(HALF).product(HALF).product(HALF).save(tmp_path)
    assert coverage.compute_coverage(path, SIZES).macs == {"fp16": 1.0}
    for level in ("all", "disabled"):
        found = run_in_onnx_runtime(path, level)
        assert (found.macs, found.casts) == ({"fp32": 1.0}, 2)


def test_dynamic_quantization_is_int8_before_and_after(tmp_path: Path) -> None:
    path = dynamic(tmp_path)
    for found in (coverage.compute_coverage(path, SIZES), run_in_onnx_runtime(path)):
        assert found.macs == found.weights == {"int8": 1.0}


def test_the_task_looks_at_one_sample_of_the_usual_size(tmp_path: Path) -> None:
    path = Graph().product().save(tmp_path)
    ranges = {"batch": ShapeRange(min=1, opt=4, max=8)}
    samples.write(tmp_path, samples.Samples(data="synthetic", ranges=ranges, cases=()))
    reference = Artifact(kind="reference", path=tmp_path / samples.RECORD, sha256="", bytes=0)
    for engine in (None, OnnxRuntime()):
        out = tmp_path / type(engine).__name__
        out.mkdir()
        inputs = {"model": artifact(path), "reference": reference}
        effect = Audit(engine=engine, device=Device(threads=1)).run(inputs, out, lambda text: None)
        record = Artifact(kind="record", path=out / effect.file, sha256="", bytes=0)
        assert Coverage.model_validate(read_records(record)[0]).total_macs == 64
        assert effect.summary == "multiply-adds fp32 100 %; weights fp32 100 %"


def test_inspect_shows_what_a_file_asks_for(tmp_path: Path) -> None:
    found = inspect(Graph().pair().product(INT8).pair().product().save(tmp_path))["precision"]
    assert (found["sizes"], found["multiply-adds"]) == ("batch 1", "128")
    assert found["share of multiply-adds"] == found["share of weights"] == "fp32 50 %, int8 50 %"
    assert (found["Q/DQ pairs"], found["separate low-precision parts"]) == (2, 1)


@pytest.mark.parametrize(
    ("assigned", "copies", "said"),
    [
        ({}, 0, ""),
        ({"CUDA": {"Gemm": 4}}, 2, ""),
        (
            {"CUDA": {"Mul": 4}, "CPU": {"Det": 1, "NonZero": 2}},
            0,
            "3 of 7 nodes run on CPU, not on CUDA (2 NonZero, 1 Det)",
        ),
        (
            {"GPU": {}, "CPU": {"If": 1}},
            2,
            "1 of 1 nodes run on CPU, not on GPU (1 If); 2 copies between host and device",
        ),
    ],
)
def test_nodes_that_run_elsewhere_are_named(assigned: dict[str, dict[str, int]], copies: int, said: str) -> None:
    assert describe_fallback(assigned, copies) == said
