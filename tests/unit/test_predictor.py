"""Predicted memory on graphs whose live values are known by hand, and against one that is measured."""

from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

from enginesmith.pipeline.errors import SignatureError
from enginesmith.pipeline.measure import predictor
from enginesmith.pipeline.measure.kernels import packed_bytes, workspace
from enginesmith.pipeline.measure.liveness import Step, execution_order, levels
from enginesmith.pipeline.measure.predictor import Prediction, predict
from enginesmith.pipeline.precision.audit.values import Value

UNIT = 1 << 20
"""Bytes of a value with 1024 rows of 256 floats."""
SIZES = {"batch": 1024}
KIB = 1 << 10


def predicted(
    path: Path, text: str, sizes: dict[str, int] | None = None, **weights: np.ndarray[Any, Any]
) -> Prediction:
    """The prediction for a graph in ONNX's text form, with initialisers."""
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 20, "com.microsoft": 1]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, path)
    return predict(path, SIZES if sizes is None else sizes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


IN, OUT = "g (float[batch, 256] x)", "(float[batch, 256] y)"


@pytest.mark.parametrize(
    ("nodes", "units"),
    [
        ("y = Neg(x)", 1),  # the caller's input takes nothing
        ("a = Neg(x) y = Neg(a)", 2),
        ("a = Neg(x) b = Neg(a) y = Neg(b)", 3),
        ("a = Neg(x) b = Neg(a) c = Neg(b) d = Neg(c) y = Neg(d)", 3),  # c lies where a was, d where b was
        ("a = Neg(x) b = Relu(a) c = Sigmoid(b) y = Neg(c)", 2),  # in place
        ("a = Neg(x) b = Relu(a) y = Add(a, b)", 3),  # not in place, as a is read again
        ("a = Relu(x) y = Neg(a)", 2),  # nor over the caller's input
        ("a = Neg(x) b = Neg(a) c = Neg(b) y = Add(a, c)", 4),  # a residual lives on
        ("a = Neg(x) b = Neg(x) c = Neg(x) d = Neg(x) e = Sum(a, b, c) y = Add(e, d)", 5),  # d runs after e
    ],
)
def test_most_that_lives_at_one_time(file: Path, nodes: str, units: int) -> None:
    found = predicted(file, f"{IN} => {OUT} {{ {nodes} }}")
    assert found.activation_bytes - found.workspace_bytes == units * UNIT
    assert not found.is_lower_bound


def test_a_result_lives_from_the_start(file: Path) -> None:
    """The second call writes where the first one did."""
    found = predicted(
        file, f"{IN} => (float[batch, 256] y, float[batch, 256] z) {{ a = Neg(x) y = Neg(a) z = Neg(x) }}"
    )
    assert found.activation_bytes == 3 * UNIT


def test_memory_that_is_taken_over_is_not_given_back_in_between(file: Path) -> None:
    nodes = "a = Neg(x) b = Concat<axis=1>(a, a) c = Concat<axis=1>(b, b) d = Slice(c, from, to, axes) y = Neg(d)"
    numbers = {name: np.array([value]) for name, value in (("from", 0), ("to", 256), ("axes", 1))}
    found = predicted(file, f"{IN} => {OUT} {{ {nodes} }}", **numbers)
    assert found.activation_bytes == (1 + 2 + 4 + 1) * UNIT  # a, b, c and y: d will lie where a was
    assert found.peak_at == "Concat c"


@pytest.mark.parametrize("operator", ["Reshape(a, shape)", "Squeeze(a, axes)", "Identity(a)", "Flatten(a)"])
def test_an_alias_takes_nothing_and_keeps_its_source_alive(file: Path, operator: str) -> None:
    nodes = f"c = Neg(x) d = Neg(c) f = Flatten(d) a = Neg(x) b = {operator} e = Flatten(b) y = Add(e, f)"
    shapes = {"shape": np.array([-1, 256]), "axes": np.array([1])}
    graph = f"g (float[batch, 1, 256] x) => {OUT} {{ {nodes} }}"
    assert predicted(file, graph, **shapes).activation_bytes == 4 * UNIT  # a, c, d and y; b, e and f are aliases


def test_results_are_never_aliases(file: Path) -> None:
    assert predicted(file, f"{IN} => {OUT} {{ a = Neg(x) y = Identity(a) }}").activation_bytes == 2 * UNIT


def test_other_sizes_of_elements_share_nothing(file: Path) -> None:
    same = predicted(file, f"{IN} => (int32[batch, 256] y) {{ a = Neg(x) b = Cast<to=6>(a) y = Neg(b) }}")
    half = predicted(file, f"{IN} => (float16[batch, 256] y) {{ a = Neg(x) b = Cast<to=10>(a) y = Neg(b) }}")
    assert same.activation_bytes == 2 * UNIT
    assert half.activation_bytes == 2 * UNIT  # a, and b and y of half the size


def test_the_branch_that_stands_last_runs_first() -> None:
    steps = [
        Step("Neg", ("x",), ("a",)),
        Step("Neg", ("a",), ("left",)),
        Step("Neg", ("a",), ("right",)),
        Step("Add", ("left", "right"), ("y",)),
        Step("Neg", ("a",), ("z",)),
    ]
    assert [step.outputs[0] for step in execution_order(steps)] == ["a", "z", "right", "left", "y"]


def test_levels_count_both_ends() -> None:
    assert levels([(0, 1, 5), (1, 2, 7)], 4) == [5, 12, 7, 0]


def test_packed_weights_take_the_place_of_their_source(file: Path) -> None:
    weight = np.zeros((256, 100), np.float32)
    found = predicted(file, f"{IN} => (float[batch, 100] y) {{ y = MatMul(x, w) }}", w=weight)
    assert found.weights_bytes == 256 * 100 * 4
    assert found.kept_bytes == 256 * 112 * 4  # columns by sixteens
    assert found.load_bytes - found.session_bytes == 256 * 112 * 4 + 2 * 256 * 100 * 4  # parsed, as a tensor, packed
    assert found.peak_bytes == found.session_bytes + found.kept_bytes + found.activation_bytes


def test_a_weight_that_is_read_as_it_is_too_is_kept_beside_its_copy(file: Path) -> None:
    weight = np.zeros((256, 256), np.float32)
    found = predicted(file, f"{IN} => {OUT} {{ a = MatMul(x, w) b = Neg(w) y = MatMul(a, b) }}", w=weight)
    assert found.weights_bytes == weight.nbytes
    assert found.kept_bytes == 2 * weight.nbytes


def test_mapped_weights_count_by_pages(file: Path) -> None:
    """What an engine has; a weight of 1 KiB and less stays in the graph's file."""
    text = f"{IN} => {OUT} {{ a = Add(x, big) y = Add(a, small) }}"
    weights = {"big": np.zeros((1024, 257), np.float32)[:, :256], "small": np.zeros(256, np.float32)}
    inline = predicted(file, text, **weights)
    mapped = predict(file, SIZES, mapped=True)
    assert inline.kept_bytes == mapped.kept_bytes == UNIT + KIB
    assert inline.load_bytes - inline.session_bytes == 2 * (UNIT + KIB)
    assert mapped.load_bytes - mapped.session_bytes == 2 * KIB  # the rest comes in with the first call
    three = predicted(file, f"{IN} => {OUT} {{ y = Add(x, w) }}", w=np.zeros((3, 1, 256), np.float32)[0:1, 0])
    assert three.kept_bytes == KIB


def test_external_data_counts_by_the_pages_that_it_lies_on(file: Path) -> None:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {IN} => {OUT} {{ y = Add(x, w) }}')
    tensor = numpy_helper.from_array(np.zeros((2, 1024), np.float32), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "data"), ("offset", "4000"), ("length", "8192")):
        tensor.external_data.add(key=key, value=value)
    model.graph.initializer.append(tensor)
    onnx.save(model, file)
    found = predict(file, SIZES)
    assert (found.weights_bytes, found.kept_bytes) == (8192, 3 * 4096)


def test_of_a_mapped_table_lookups_bring_in_what_they_are_expected_to_hit(file: Path) -> None:
    table = np.zeros((16 * KIB, 256), np.float32)
    text = "g (int64[batch, 4] x) => (float[batch, 4, 256] y) { y = Gather(table, x) }"
    predicted(file, text, {"batch": 1}, table=table)
    few, all_ = (predict(file, {"batch": batch}, mapped=True) for batch in (1, 4096))
    assert few.kept_bytes == round(16 * UNIT * (1 - exp(-4 * 2 / 16)))
    assert all_.kept_bytes == 16 * UNIT
    assert predict(file, {"batch": 1}).kept_bytes == 16 * UNIT  # in the graph's own file, all of it is there
    assert few.traffic_bytes == 4 * 8 + 2 * 4 * KIB  # the indices, and rows that are read and written


def test_traffic_reads_weights_once_and_values_by_each_reader(file: Path) -> None:
    weight = np.zeros((256, 256), np.float32)
    nodes = "a = MatMul(x, w) b = MatMul(a, w) c = Reshape(b, shape) y = Add(a, c)"
    found = predicted(file, f"{IN} => {OUT} {{ {nodes} }}", w=weight, shape=np.array([-1, 256]))
    assert found.traffic_bytes == 2 * UNIT + 2 * UNIT + 3 * UNIT + weight.nbytes + 16


def test_inputs_and_outputs_are_told_apart(file: Path) -> None:
    found = predicted(file, f"{IN} => (float[batch, 512] y) {{ y = Concat<axis=1>(x, x) }}")
    assert (found.input_bytes, found.io_bytes) == (UNIT, 3 * UNIT)


def test_a_value_without_a_shape_makes_it_a_lower_bound(file: Path) -> None:
    graph = f"{IN} => (float[two, many] y) {{ a = Neg(x) b = NonZero(a) c = Neg(a) y = Cast<to=1>(b) }}"
    found = predicted(file, graph)
    assert found.is_lower_bound
    assert "b" in found.unknown[0]
    assert "count as nothing" in found.unknown[0]
    assert found.activation_bytes == 2 * UNIT


def test_every_dynamic_dimension_of_an_input_needs_a_size(file: Path) -> None:
    with pytest.raises(SignatureError, match="'batch', and no size is given"):
        predicted(file, f"{IN} => {OUT} {{ y = Neg(x) }}", {})


BRANCHES = """
g (float[batch, 256] x, bool flag) => (float[batch, 256] y) {
  a = Neg(x)
  y = If(flag) <
    then_branch = one () => (float[batch, 256] t) { t = Neg(a) },
    else_branch = two () => (float[batch, 256] e) { b = Neg(a) c = Neg(x) e = Add(b, c) }
  >
}
"""


def test_of_two_branches_the_larger_one_counts_and_the_cheaper_one_moves_least(file: Path) -> None:
    found = predicted(file, BRANCHES)
    assert found.activation_bytes == (2 + 3) * UNIT  # a and y, and b, c and e
    assert found.traffic_bytes == (2 + 2) * UNIT  # a is made of x, and t of a


LOOP = """
g (float[batch, 256] x, int64 count, bool go) => (float[batch, 256] y) {
  y = Loop(count, go, x) <
    body = round (int64 at, bool on, float[batch, 256] before) => (bool next, float[batch, 256] after) {
      next = Identity(on) b = Neg(before) after = Neg(b)
    }
  >
}
"""


def test_a_loop_counts_one_round_and_what_it_carries(file: Path) -> None:
    found = predicted(file, LOOP)
    assert found.activation_bytes == (1 + 1 + 2) * UNIT + 8 + 1 + 1  # y, before, b and after; counters and flags


def test_constants_are_weights(file: Path) -> None:
    found = predicted(file, f"{IN} => {OUT} {{ c = Constant<value_float=2.0>() y = Mul(x, c) }}")
    assert found.activation_bytes == UNIT


Shape = tuple[int, ...]
IMAGE, ROWS, HEADS, STEPS = (4, 32, 64, 64), (4, 128, 768), (4, 12, 128, 64), (100, 4, 80)


def case(taken: int, operator: str, *shapes: Shape, domain: str = "", **more: Any) -> Any:
    """A node on inputs of these shapes, the last one being that of its result, and what it takes."""
    given = [str(index) for index in range(len(shapes) - 1)]
    node = helper.make_node(operator, given, ["y"], domain=domain, **more)
    return pytest.param(node, shapes, taken, id=f"{operator}-{taken}")


OWN = "com.microsoft"
TRACED = [
    case(131072, "Conv", IMAGE, (64, 32, 3, 3), (4, 64, 64, 64), pads=[1] * 4),
    case(903168, "Conv", (4, 512, 7, 7), (512, 512, 3, 3), (4, 512, 7, 7), pads=[1] * 4),
    case(602112, "Conv", (4, 3, 224, 224), (768, 3, 16, 16), (4, 768, 14, 14), strides=[16, 16]),
    case(0, "Conv", IMAGE, (64, 32, 1, 1), (4, 64, 64, 64)),
    case(1048576, "ConvTranspose", IMAGE, (32, 16, 2, 2), (4, 16, 128, 128), strides=[2, 2]),
    case(2097152, "ConvTranspose", IMAGE, (32, 8, 4, 4), (4, 16, 128, 128), group=2),
    case(3145728, "Softmax", ROWS, ROWS, axis=1),
    case(0, "Softmax", ROWS, ROWS, axis=-1),
    case(1572864, "Sum", ROWS, ROWS, ROWS, ROWS),
    case(0, "Sum", ROWS, ROWS, ROWS),
    case(201326592, "Attention", *[(4, 12, 1024, 64)] * 4),
    case(3145728, "Attention", ROWS, ROWS, ROWS, ROWS, q_num_heads=12, kv_num_heads=12),
    case(9437184, "Attention", ROWS, (768, 2304), ROWS, domain=OWN, num_heads=12),
    case(6291456, "Einsum", HEADS, HEADS, (4, 12, 128, 128), equation="bhqd,bhkd->bhqk"),
    case(1638400, "LSTM", STEPS, (1, 1024, 80), (1, 1024, 256), (100, 1, 4, 256)),
    case(3814400, "LSTM", STEPS, (2, 1024, 80), (2, 1024, 256), (100, 2, 4, 256), direction="bidirectional"),
    case(1766400, "GRU", STEPS, (1, 768, 80), (1, 768, 256), (100, 1, 4, 256), direction="reverse"),
    case(409600, "RNN", STEPS, (2, 256, 80), (2, 256, 256), (100, 2, 4, 256), direction="bidirectional"),
    case(1572864, "BiasGelu", ROWS, (768,), ROWS, domain=OWN),
    case(0, "FastGelu", ROWS, ROWS, domain=OWN),
    case(0, "MatMul", ROWS, (768, 1000), (4, 128, 1000)),
]
"""What ONNX Runtime 1.31.1 allocates besides the result, on two threads."""


@pytest.mark.parametrize(("node", "shapes", "taken"), TRACED)
def test_work_space_is_what_was_traced(node: onnx.NodeProto, shapes: tuple[Shape, ...], taken: int) -> None:
    *given, result = (Value("float32", shape) for shape in shapes)
    values = dict(zip(node.input, given, strict=True)) | {"y": result}
    assert workspace(node, lambda name: values.get(name, Value()), threads=2) == taken
    assert workspace(node, lambda name: Value(), threads=2) == 0


@pytest.mark.parametrize(
    ("operator", "position", "shape", "packed"),
    [
        ("MatMul", 1, (2048, 1000), 2048 * 1008 * 4),
        ("MatMul", 0, (2048, 1000), None),
        ("MatMul", 1, (2, 64, 64), None),
        ("ConvTranspose", 1, (512, 256, 2, 2), 512 * 256 * 4 * 4),
        ("LSTM", 1, (2, 1024, 80), 2 * 1024 * 80 * 4),
        ("LSTM", 3, (2, 2048), None),
        ("Conv", 1, (64, 32, 3, 3), None),
    ],
)
def test_which_weights_are_packed(operator: str, position: int, shape: tuple[int, ...], packed: int | None) -> None:
    node = helper.make_node(operator, ["a", "b", "c", "d"], ["y"])
    assert packed_bytes(node, position, Value("float32", shape)) == packed
    assert packed_bytes(node, position, Value("float16", shape)) is None


def test_a_turned_matrix_is_packed_by_its_rows() -> None:
    node = helper.make_node("Gemm", ["a", "b"], ["y"], transB=1)
    assert packed_bytes(node, 1, Value("float32", (1000, 2048))) == 2048 * 1008 * 4


def test_sessions_grow_with_nodes_attributes_and_weights(file: Path) -> None:
    one = predicted(file, f"{IN} => {OUT} {{ y = Neg(x) }}")
    more = predicted(file, f"{IN} => {OUT} {{ a = Elu<alpha=2.0>(x) y = Add(a, w) }}", w=np.zeros(256, np.float32))
    added = predictor._NODE_BYTES + predictor._ATTRIBUTE_BYTES + predictor._WEIGHT_BYTES
    assert more.session_bytes - one.session_bytes == added


@pytest.mark.slow
def test_the_measured_peak_is_within_ten_percent(tmp_path: Path) -> None:
    from enginesmith.pipeline.artifact import Artifact
    from enginesmith.pipeline.engines.base import BuildRequest, Device
    from enginesmith.pipeline.engines.onnxruntime import OnnxRuntime
    from enginesmith.pipeline.measure.memory import measure_memory
    from enginesmith.pipeline.measure.race import Candidate
    from enginesmith.pipeline.onnx_file import signature

    file, rng = tmp_path / "model.onnx", np.random.default_rng(0)
    nodes = """
        a = Conv<pads=[1,1,1,1]>(x, w) b = Relu(a) c = Conv<pads=[1,1,1,1]>(b, v) d = Add(c, b) e = Relu(d)
        f = GlobalAveragePool(e) h = Flatten(f) y = MatMul(h, m)
    """
    shapes = {"w": (32, 3, 3, 3), "v": (32, 32, 3, 3), "m": (32, 1000)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    text = f"g (float[batch, 3, 96, 96] x) => (float[batch, 1000] y) {{ {nodes} }}"
    predicted(file, text, {"batch": 1}, **weights)
    engine = OnnxRuntime(memory_arena=False)
    given = Artifact(kind="onnx", path=file, sha256="", bytes=0, signature=signature(file))
    out = tmp_path / "engine"
    out.mkdir()
    made = given.model_copy(
        update={"kind": "engine", "path": out / engine.build(BuildRequest(given, out, Device())).file}
    )
    feeds = {"x": rng.standard_normal((8, 3, 96, 96), np.float32)}
    row = measure_memory(Candidate("net", engine, made, Device()), 8, feeds, tmp_path, lambda text: None)
    found = predict(made.path, {"batch": 8}, Device().thread_count)
    assert row.peak_bytes == pytest.approx(found.peak_bytes, rel=0.1)
    assert row.activation_bytes == pytest.approx(found.activation_bytes, rel=0.1)
