"""Comparison of outputs whose rows are chosen by their values."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.errors import FidelityError
from enginesmith.pipeline.frameworks.fidelity import Fidelity, compare, compare_calls, describe_failure, thresholds_for
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.onnx.choices import find_counted, find_unordered
from enginesmith.pipeline.frameworks.rounding import FINE, Draw, make_records
from enginesmith.pipeline.tensors import Array, Signature, TensorSpec

RNG = np.random.default_rng(0)
IMAGE = TensorSpec(name="image", dtype="float32", shape=("batch", 3, 8, 8))


def signature(**shapes: tuple[int | str, ...]) -> Signature:
    outputs = tuple(
        TensorSpec(name=name, dtype="int64" if name in ("label", "count") else "float32", shape=shape)
        for name, shape in shapes.items()
    )
    return Signature(inputs=(IMAGE,), outputs=outputs, unordered=dict.fromkeys(shapes, "rows"))


FREE = signature(box=("n", 4), score=("n",), label=("n",))
FIXED = signature(found=("batch", 20, 6), count=("batch",))


def boxes(count: int) -> dict[str, Array]:
    return {
        "box": (100 * RNG.random((count, 4))).astype(np.float32),
        "score": RNG.random(count).astype(np.float32),
        "label": RNG.integers(0, 3, count),
    }


def take(found: dict[str, Array], rows: Any) -> dict[str, Array]:
    return {name: value[rows] for name, value in found.items()}


def judge(reference: dict[str, Array], actual: dict[str, Array], precision: str, form: Signature = FREE) -> Fidelity:
    return compare(reference, actual, thresholds_for(precision), form)


def test_order_does_not_count() -> None:
    found = boxes(50)
    result = judge(found, take(found, RNG.permutation(50)), "fp32")
    assert result.passed
    assert result.max_abs_error == 0
    assert [output.paired for output in result.outputs] == [1.0] * 3


def test_what_rounding_decides_is_left_to_the_comparison_of_sets() -> None:
    """A number of another row in the place of one that is marked would make rows that nobody answered."""
    found = boxes(50)
    marked = {"label": make_records(found["label"], [Draw(FINE, np.arange(50), (found["label"] + 1) % 3)])}
    order = RNG.permutation(50)
    assert compare(found, take(found, order), thresholds_for("fp32"), FREE, unstable=marked).passed
    wrong = {**found, "label": (found["label"] + 1) % 3}
    assert not compare(found, wrong, thresholds_for("fp32"), FREE, unstable=marked).passed


def test_some_rows_may_be_missing_in_int8_and_none_in_fp32() -> None:
    found = boxes(50)
    fewer = take(found, slice(0, 46))
    assert judge(found, fewer, "int8").passed
    assert judge(found, fewer, "int8").outputs[0].paired == pytest.approx(92 / 96)
    assert not judge(found, fewer, "fp32").passed
    assert not judge(found, take(found, slice(0, 30)), "int8").passed
    assert not judge(fewer, take(boxes(50), slice(0, 46)), "int8").passed


def test_columns_of_one_row_stay_together() -> None:
    found = boxes(50)
    assert not judge(found, {**found, "score": found["score"][::-1]}, "int8").passed
    assert not judge(found, {**found, "label": (found["label"] + 1) % 3}, "int8").passed


def test_rows_moved_to_another_sample_are_missing() -> None:
    found = np.zeros((2, 20, 6), np.float32)
    found[0, :6], found[1, :9] = RNG.random((6, 6)), RNG.random((9, 6))
    count = np.array([6, 9])
    reference = {"found": found, "count": count}
    assert judge(reference, {"found": found[:, ::-1], "count": count}, "fp32", FIXED).passed
    assert not judge(reference, {"found": found[::-1], "count": count}, "int8", FIXED).passed
    assert judge(reference, {"found": found, "count": np.array([6, 10])}, "int8", FIXED).passed
    assert not judge(reference, {"found": found, "count": np.array([9, 6])}, "int8", FIXED).passed


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rows_of_samples_are_apart_wherever_the_batch_is(axis: int) -> None:
    """Also where the inputs have their batch elsewhere than the outputs."""
    found, shape = RNG.random((2, 20, 6)).astype(np.float32), [20, 6]
    shape.insert(axis, "batch")  # type: ignore[arg-type]
    output = TensorSpec(name="found", dtype="float32", shape=tuple(shape))
    steps = TensorSpec(name="steps", dtype="float32", shape=(7, "batch", 3))
    form = Signature(inputs=(steps,), outputs=(output,), unordered={"found": "rows"})

    def moved(array: Array) -> dict[str, Array]:
        return {"found": np.moveaxis(array, 0, axis)}

    assert judge(moved(found), moved(np.stack([found[0], found[1, ::-1]])), "fp32", form).passed
    assert not judge(moved(found), moved(found[::-1]), "int8", form).passed


def test_rows_that_fill_up_count_once() -> None:
    """Three boxes of which two are lost, in a table of twenty."""
    found, lost = np.zeros((1, 20, 6), np.float32), np.zeros((1, 20, 6), np.float32)
    found[0, :3] = RNG.random((3, 6)) + 1
    lost[0, :1] = found[0, :1]
    count = np.array([3])
    result = judge({"found": found, "count": count}, {"found": lost, "count": count}, "int8", FIXED)
    assert result.outputs[0].paired == pytest.approx(4 / 6)
    assert not result.passed


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
def test_classes_and_scores_count_beside_pixels(precision: str) -> None:
    corners, scores = 640 * RNG.random((2, 20, 4)), 0.25 + 0.75 * RNG.random((2, 20, 1))

    def table(scores: Array = scores, shift: int = 0) -> dict[str, Array]:
        classes = (np.arange(40).reshape(2, 20, 1) + shift) % 5
        joined = np.concatenate([np.round(corners), scores, classes], axis=2)
        return {"found": joined.astype(np.float32), "count": np.array([20, 20])}

    near = {"fp32": 1e-5, "fp16": 0.005, "bf16": 0.1, "int8": 0.1}[precision]
    assert judge(table(), table(scores + near), precision, FIXED).passed
    assert not judge(table(), table(shift=1), precision, FIXED).passed
    assert not judge(table(), table(np.where(scores > 0.6, scores - 0.6, scores + 0.6)), precision, FIXED).passed


def test_boxes_that_end_at_an_edge_are_no_classes() -> None:
    found = np.float32([[[10, 20, 480, 480, 0.9, 1], [30, 50, 480, 480, 1.0, 1]]])
    near = found + np.float32([0.2, 0.1, -0.5, -0.5, 0.001, 0])
    for table in (found, found[..., :4]):
        given = near[..., : table.shape[2]]
        counts = {"count": np.array([2])}
        form = signature(found=("batch", 2, table.shape[2]), count=("batch",))
        assert judge({"found": table, **counts}, {"found": given, **counts}, "fp16", form).passed


def test_numbers_in_a_fixed_order_are_compared_one_by_one() -> None:
    """Logits behind a choice of tokens."""
    form = signature(logits=("batch", 10))
    logits = RNG.standard_normal((4, 10)).astype(np.float32)
    assert not judge({"logits": logits}, {"logits": logits[:, ::-1]}, "int8", form).passed


@pytest.mark.parametrize("dtype", ["bool", "int64", "uint8"])
@pytest.mark.parametrize("beside", [{}, {"found": ("batch", 20, 6)}, {"box": ("n", 4)}])
@pytest.mark.parametrize("shape", [("batch",), ("batch", 1), ("batch", 2)])
def test_classes_and_truths_behind_a_choice_are_judged_by_agreement(
    dtype: str, beside: dict[str, tuple[int | str, ...]], shape: tuple[int | str, ...]
) -> None:
    """The label of the nearest neighbor, and whether it is the one that was asked for."""
    form = signature(**beside)
    match = TensorSpec(name="match", dtype=dtype, shape=shape)
    names = dict.fromkeys([*beside, "match"], "rows")
    form = form.model_copy(update={"outputs": (*form.outputs, match), "unordered": names})
    sizes: dict[int | str, int] = {"batch": 40, "n": 50}
    fixed = {
        name: RNG.random([sizes.get(size, size) for size in dims]).astype(np.float32) for name, dims in beside.items()
    }
    wanted = RNG.integers(0, 2, [sizes.get(size, size) for size in shape]).astype(dtype)
    given = wanted.copy()
    given[:2] = 1 - given[:2].astype(np.int64)  # an SQNR of about 10 dB, and all of the range
    for precision, passes in (("int8", True), ("fp32", False)):
        result = judge({**fixed, "match": wanted}, {**fixed, "match": given}, precision, form)
        output = next(output for output in result.outputs if output.name == "match")
        assert (output.agreement, output.sqnr_db, output.passed) == (0.95, None, passes)
    given[:8] = 1 - wanted[:8].astype(np.int64)
    result = judge({**fixed, "match": wanted}, {**fixed, "match": given}, "int8", form)
    assert describe_failure(result) == "output 'match' agrees in 80.00 % of its elements"


def test_how_many_rows_of_images_were_found_may_differ_by_one() -> None:
    """All of them are in one table."""
    form = FREE.model_copy(update={"outputs": (*FREE.outputs, *FIXED.outputs[1:])})
    form = form.model_copy(update={"unordered": {**FREE.unordered, "count": "rows"}})
    found = boxes(50)
    fewer = {**take(found, slice(0, 49)), "count": np.array([30, 19])}
    assert judge({**found, "count": np.array([30, 20])}, fewer, "int8", form).passed
    other = {**fewer, "count": np.array([10, 39])}
    assert not judge({**found, "count": np.array([30, 20])}, other, "int8", form).passed


def test_no_rows_at_all_agree() -> None:
    empty = boxes(0)
    assert judge(empty, empty, "fp32").passed
    assert not judge(empty, boxes(2), "int8").passed
    calls = [(boxes(3), boxes(0)), (empty, empty)]
    assert not compare_calls(calls, thresholds_for("int8"), FREE).passed


def test_other_outputs_need_their_shape() -> None:
    found = boxes(5)
    with pytest.raises(FidelityError, match="the reference's is"):
        compare(found, take(found, slice(0, 4)), thresholds_for("int8"))


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        (FIXED, {"found": np.zeros((0, 20, 6), np.float32)}),
        (FIXED, {"found": np.zeros((2, 20, 5), np.float32)}),
        (FIXED, {"found": np.zeros(2, np.float32)}),
        (FREE, {"score": np.zeros(4, np.float32)}),
        (FREE, {"box": np.zeros((5, 1, 4), np.float32)}),
        (FREE, {"box": np.float32(0)}),
    ],
)
def test_tables_need_their_samples_and_columns(form: Signature, changes: dict[str, Array]) -> None:
    found = boxes(5) if form is FREE else {"found": np.zeros((2, 20, 6), np.float32), "count": np.array([3, 4])}
    with pytest.raises(FidelityError, match=r"^output '(found|score|box)' is .*, and the reference's is float32"):
        judge(found, {**found, **changes}, "fp32", form)


def chain(*nodes: onnx.NodeProto, outputs: tuple[str, ...], **weights: Any) -> onnx.GraphProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, 10])
    return helper.make_graph(list(nodes), "g", [image], values)


NODE = helper.make_node


def test_outputs_behind_a_choice_are_found() -> None:
    graph = chain(
        NODE("NonMaxSuppression", ["x", "x"], ["chosen"]),
        NODE("Cast", ["chosen"], ["index"], to=TensorProto.INT32),
        NODE("GatherND", ["x", "chosen"], ["box"]),
        NODE("Relu", ["x"], ["plain"]),
        NODE("ReduceMax", ["box"], ["largest"]),
        outputs=("index", "box", "plain", "largest"),
    )
    assert find_unordered(graph) == {"index": "positions", "box": "rows"}


def test_sorted_values_alone_keep_their_order() -> None:
    top = NODE("TopK", ["x", "k"], ["values", "indices"])
    assert find_unordered(chain(top, outputs=("values",))) == {}
    assert find_unordered(chain(top, outputs=("values", "indices"))) == {"values": "rows", "indices": "rows"}


def test_a_choice_among_constants_or_sizes_is_none() -> None:
    graph = chain(
        NODE("Shape", ["x"], ["shape"]),
        NODE("ConstantOfShape", ["shape"], ["ones"]),
        NODE("NonZero", ["ones"], ["places"]),
        NODE("GatherND", ["x", "places"], ["y"]),
        outputs=("y",),
    )
    assert find_unordered(graph) == {}


def read_graph(text: str, **weights: Any) -> onnx.GraphProto:
    graph = onnx.parser.parse_graph(f"net (float[batch, 4, 10] x, int64[batch, 4, 10] mask) => {text}")
    graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items())
    return graph


CHOICES = """
    big = Greater(x, limit)
    places = NonZero(big)
    index = Transpose <perm = [1, 0]> (places)
    again = Greater(x, limit)
    same = NonZero(again)
    other = Transpose <perm = [1, 0]> (same)
    count = Shape <start = 1> (places)
    few, best = TopK <axis = -1> (x, k)
"""


@pytest.mark.parametrize(
    "write",
    [
        "fill = Expand(limit, count) y = ScatterND(x, index, fill)",
        "y = ScatterND(x, index, rows)",
        "taken = GatherND(x, other) changed = Relu(taken) y = ScatterND(x, index, changed)",
        "y = ScatterElements <axis = -1> (x, best, few)",
        "shape = Shape(best) fill = Expand(limit, shape) y = ScatterElements <axis = -1> (x, best, fill)",
        "z = GatherElements <axis = 2> (mask, best) f = Cast <to = 1> (z) y = ScatterElements <axis = 2> (x, best, f)",
    ],
)
def test_writing_at_chosen_places_moves_no_row(write: str) -> None:
    """Frames whose padding is filled by a mask are in their order: frames in another one are wrong."""
    weights = {"limit": np.float32(0), "k": np.array([2]), "rows": np.arange(5, dtype=np.float32)}
    assert find_unordered(read_graph(f"(float[batch, 4, 10] y) {{ {CHOICES} {write} }}", **weights)) == {}


@pytest.mark.parametrize(
    "write",
    [
        "taken = GatherND(x, index) y = ScatterND(x, start, taken)",
        "y = ScatterElements <axis = -1> (x, best, rows)",
        "taken = GatherElements <axis = -1> (x, best) y = ScatterND(x, index, taken)",
        "w, l = TopK <axis = -1, largest = 0> (x, k) i = Add(best, l) y = ScatterElements <axis = -1> (x, i, few)",
        "z = GatherElements <axis = -1> (x, best) y = ScatterND(z, start, rows)",
        "y = Compress <axis = 2> (x, flags)",
        "y = GatherND(x, index)",
        "y, order = Unique <axis = 0> (x)",
    ],
)
def test_rows_that_are_put_elsewhere_are_found(write: str) -> None:
    weights = {"limit": np.float32(0), "k": np.array([2]), "rows": np.arange(5, dtype=np.float32)}
    flags = "sums = ReduceSum <keepdims = 0> (x, axes) flags = Greater(sums, limit)"
    text = f"(float[batch, 4, 10] y) {{ {CHOICES} {flags} {write} }}"
    graph = read_graph(text, **weights, start=np.array([[0]]), axes=np.array([0, 1]))
    assert find_unordered(graph) == {"y": "rows"}


SORTED = """
    scores = ReduceMax <axes = [1, 2], keepdims = 0> (x)
    _, i = TopK <axis = 0> (scores, k)
    order = Cast <to = 7> (i)
    rows = Gather <axis = 0> (x, order)
    last = Transpose <perm = [1, 0, 2]> (rows)
    changed = Relu(last)
    back = Transpose <perm = [1, 0, 2]> (changed)
    size = Shape(order)
    zeros = ConstantOfShape(size)
    steps = Range(start, size, one)
    ranks = ScatterElements <axis = 0> (zeros, order, steps)
"""


@pytest.mark.parametrize(
    ("write", "back"),
    [
        ("y = Gather <axis = 0> (back, ranks)", True),
        ("r = Identity(ranks) y = Gather <axis = 0> (back, r)", True),
        ("r = ScatterElements <axis = 0> (zeros, order, fixed) y = Gather <axis = 0> (back, r)", True),
        ("p = Unsqueeze(order, one) r = ScatterND(zeros, p, steps) y = Gather <axis = 0> (back, r)", True),
        ("i2 = Unsqueeze(ranks, axes) i3 = Expand(i2, full) y = GatherElements <axis = 0> (back, i3)", True),
        ("y = Gather <axis = 0> (x, ranks)", False),
        ("y = Gather <axis = 0> (back, order)", False),
        ("r = Add(ranks, one) y = Gather <axis = 0> (back, r)", False),
        ("r = ScatterElements <axis = 0> (zeros, order, shifted) y = Gather <axis = 0> (back, r)", False),
        ("s = Range(one, size, one) r = ScatterElements(zeros, order, s) y = Gather <axis = 0> (back, r)", False),
        ("_, o = TopK <largest = 0> (scores, k) t = Gather <axis = 0> (x, o) y = Gather <axis = 0> (t, ranks)", False),
        ("g = Greater(x, z) n = NonZero(g) t = GatherND(back, n) y = Gather <axis = 0> (t, ranks)", False),
        ("y = Gather <axis = 0> (ranks, back)", False),
    ],
)
def test_rows_that_the_inverse_of_their_indices_gathers_are_back_in_their_order(write: str, back: bool) -> None:
    """Texts that are sorted by length for a recurrent layer, and put back; as sets, reversed ones would be equal."""
    weights = {"k": np.array([4]), "start": np.array(0), "one": np.array([1]), "z": np.float32(0)}
    weights |= {
        "fixed": np.arange(4),
        "shifted": np.arange(1, 5),
        "axes": np.array([1, 2]),
        "full": np.array([4, 4, 10]),
    }
    graph = read_graph(f"(float[batch, 4, 10] y) {{ {SORTED} {write} }}", **weights)
    assert find_unordered(graph) == ({} if back else {"y": "rows"})


@pytest.mark.parametrize(
    ("mask", "exact"),
    [
        ("m = Cast <to = 9> (mask)", True),
        ("n = Not(half) f = Cast <to = 1> (mask) g = Greater(f, part) m = And(g, g)", True),
        ("s = Shape(x) z = Expand(part, s) m = Greater(z, part)", True),
        ("f = Cast <to = 1> (mask) g = Mul(f, part) m = Greater(g, part)", False),
        ("f = Cast <to = 1> (mask) g = Add(f, x) m = Greater(g, part)", False),
        ("g = Gather(table, mask) m = Greater(g, part)", False),
    ],
)
@pytest.mark.parametrize("choice", ["p = NonZero(m)", "p = Compress <axis = 0> (places, m)", "p = Unique(m)"])
def test_what_whole_numbers_of_the_inputs_choose_has_one_order(mask: str, exact: bool, choice: str) -> None:
    weights = {"part": np.float32(0.5), "half": np.array(True), "places": np.arange(4)}
    graph = read_graph(f"(int64[n] p) {{ {mask} {choice} }}", **weights, table=np.ones((2, 2), np.float32))
    assert ("p" in find_unordered(graph)) is not exact


def test_a_top_k_of_whole_numbers_may_have_another_order() -> None:
    """Libraries differ in which of equal numbers they put first."""
    graph = read_graph("(int64[n] p) { v, p = TopK <axis = 2> (mask, k) }", k=np.array([3]))
    assert find_unordered(graph) == {"p": "rows"}


def test_choices_in_subgraphs_are_found() -> None:
    body = chain(NODE("NonZero", ["x"], ["inner"]), outputs=("inner",))
    body.ClearField("input")  # branches have none: they read values of the graph around them
    graph = chain(NODE("If", ["condition"], ["y"], then_branch=body, else_branch=body), outputs=("y",))
    assert find_unordered(graph) == {"y": "rows"}


def test_a_file_tells_it_in_its_signature(tmp_path: Path) -> None:
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 10])
    outputs = [
        helper.make_tensor_value_info(name, dtype, ["batch", 3])
        for name, dtype in (("values", TensorProto.FLOAT), ("indices", TensorProto.INT64))
    ]
    count = helper.make_tensor("k", TensorProto.INT64, [1], [3])
    graph = helper.make_graph([NODE("TopK", ["x", "k"], ["values", "indices"])], "g", [image], outputs, [count])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "top.onnx")
    assert set(model_file.signature(tmp_path / "top.onnx").unordered) == {"values", "indices"}


@pytest.mark.parametrize(
    "node",
    [
        "Range(zero, n, one)",
        "Tile(x, n)",
        "TopK(x, n)",
        "OneHot(places, n, ends)",
        'Resize(x, "", "", n)',
        "Split(x, n)",
    ],
)
@pytest.mark.parametrize("computed", [True, False])
def test_sizes_that_are_computed_from_values_are_counted(node: str, computed: bool) -> None:
    """Those that constants or sizes of the inputs give are not."""
    source = "c = ArgMax(x) n = ReduceSum(c)" if computed else "n = Shape(x)"
    text = f"g (float[batch] x, int64[2] places) => (float[a] y) {{ {source} y = {node} }}"
    assert ("y" in find_counted(onnx.parser.parse_graph(text))) is computed
