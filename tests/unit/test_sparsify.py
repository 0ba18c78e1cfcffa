"""Zeros put into graphs: which weights get them, in which pattern, and what can be asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from enginesmith.pipeline.errors import InvalidGraph, UsageError
from enginesmith.pipeline.frameworks.onnx import edit, model_file
from enginesmith.pipeline.passes.sparsify import check, sparsify
from enginesmith.pipeline.passes.sparsify.options import SparsifyOptions, Sparsity
from graphs import Weights, node, normal, save_graph
from sparse_graphs import arrays, eligible, sparsified


def mixed(folder: Path, **changes: Any) -> Path:
    """One product of each kind, with weights that reach them in different layouts."""
    nodes = [
        node("Conv", "x conv", "a", pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", "a", "b"),
        node("Flatten", "b", "c"),
        node("Gemm", "c gemm", "d"),
        node("Gemm", "d gemm_t bias", "e", transB=1),
        node("MatMul", "e matmul", "f"),
        node("Transpose", "turned", "t", perm=[1, 0]),
        node("Cast", "t", "u", to=TensorProto.FLOAT),
        node("MatMul", "f u", "g"),
        node("Transpose", "g", "h", perm=[1, 0]),
        node("Gemm", "h last", "y", transA=1),
    ]
    weights = {
        "conv": normal(8, 4, 3, 3),
        "gemm": normal(8, 12),
        "gemm_t": normal(16, 12),
        "bias": normal(16),
        "matmul": normal(16, 20),
        "turned": normal(8, 20).astype(np.float16),
        "last": normal(8, 6),
    } | changes
    return save_graph(folder, nodes, weights, x=("n", 4, 6, 6))


def test_every_weight_is_sparse_along_what_is_summed_over(tmp_path: Path) -> None:
    path, effect = sparsified(mixed(tmp_path), tmp_path / "out")
    found, given = arrays(path), arrays(tmp_path / "given.onnx")
    assert eligible(found["conv"])
    for name in ("gemm", "matmul", "last"):
        assert eligible(found[name].T), name
    for name in ("gemm_t", "turned"):
        assert eligible(found[name]), name
    assert effect.summary.startswith("2:4 in 6 of 6 weights, 50.0% of the weights' elements are zero; SQNR")
    weights = [name for name in found if name != "bias"]
    for name in weights:
        same = found[name] == given[name]
        assert (same | (found[name] == 0)).all()
        assert int((found[name] == 0).sum()) == found[name].size // 2
    signal, noise = (
        sum(float((np.float64(one[name]) ** 2).sum()) for name in weights)
        for one in (given, {name: given[name] - found[name] for name in weights})
    )
    assert f"SQNR of the weights {10 * np.log10(signal / noise):.1f} dB" in effect.summary
    assert np.array_equal(found["bias"], given["bias"])
    assert sparsify.of(onnx.load(path)) == "2:4"


def test_the_same_bytes_each_time_with_and_without_external_data(tmp_path: Path) -> None:
    given = mixed(tmp_path)
    first, second, beside = (
        sparsified(given, tmp_path / name, external_data_bytes=size)[0]
        for name, size in (("a", 1 << 20), ("b", 1 << 20), ("c", 0))
    )
    assert first.read_bytes() == second.read_bytes()
    assert model_file.external_files(beside)
    assert all(np.array_equal(value, arrays(first)[name]) for name, value in arrays(beside).items())
    again, _ = sparsified(beside, tmp_path / "d")  # reads what lies beside the graph
    assert all(np.array_equal(value, arrays(first)[name]) for name, value in arrays(again).items())


def refusals(folder: Path) -> Path:
    """Make what 2:4 is not put into, and one weight that it is."""
    nodes = [
        node("Conv", "x three", "a"),
        node("Conv", "a depthwise", "b", group=8),
        node("ConvTranspose", "b up", "c"),
        node("Conv", "c good", "d"),
        node("GlobalAveragePool", "d", "e"),
        node("Flatten", "e", "f"),
        node("MatMul", "f both", "g"),
        node("Gemm", "g both", "h", transB=1),
        node("MatMul", "h vector", "i"),
        node("Gather", "table ids", "j"),
        node("MatMul", "j table", "k"),
        node("DequantizeLinear", "int8 scale", "l"),
        node("MatMul", "f l", "m"),
        node("Unsqueeze", "i ids", "s"),
        node("Add", "s m", "n"),
        node("Add", "n k", "o"),
        node("MatMul", "f fed", "p"),
        node("Add", "o p", "y"),
    ]
    weights = {
        "three": normal(8, 3, 1, 1),
        "depthwise": normal(8, 1, 3, 3),
        "up": normal(8, 8, 2, 2),
        "good": normal(8, 8, 1, 1),
        "both": normal(8, 8),
        "vector": normal(8),
        "table": normal(8, 8),
        "int8": np.ones((8, 8), np.int8),
        "scale": np.array(0.1, np.float32),
        "ids": np.array([1]),
    }
    return save_graph(folder, nodes, weights, x=(2, 3, 8, 8), fed=(TensorProto.FLOAT, (8, 8)))


def test_what_cannot_be_sparse_is_left_with_the_reason(tmp_path: Path) -> None:
    found = {one.name: one for one in sparsify.find(edit.load(refusals(tmp_path)))}
    why = {name: one.structured for name, one in found.items()}
    assert why == {
        "three": "its 3 input channels of a group are no multiple of 4",
        "depthwise": "its 1 input channels of a group are no multiple of 4",
        "up": "there are no sparse kernels for ConvTranspose",
        "good": "",
        "both": "two products sum over different axes of it",
        "vector": "it is a vector",
        "table": "it is also read by Gather",
        "int8": "it is quantized already: sparse weights are made of a float graph",
    }
    assert [name for name in ("three", "depthwise", "up") if found[name].reason] == []  # other patterns can be had
    path, effect = sparsified(tmp_path / "given.onnx", tmp_path / "out")
    given, after = arrays(tmp_path / "given.onnx"), arrays(path)
    assert [name for name in given if not np.array_equal(given[name], after[name])] == ["good"]
    assert effect.summary.startswith("2:4 in 1 of 8 weights")
    assert "left dense: vector: it is a vector" in effect.notes
    assert effect.notes[-1] == "left dense: 2 more, each for a reason of its own"


def test_a_weight_of_two_products_is_masked_once(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "a"), node("Relu", "a", "b"), node("MatMul", "b w", "y")]
    path, effect = sparsified(save_graph(tmp_path, nodes, {"w": normal(8, 8)}, x=(2, 8)), tmp_path / "out")
    assert eligible(arrays(path)["w"].T)
    assert effect.summary.startswith("2:4 in 1 of 1 weights")


def test_a_weight_that_is_listed_as_an_input_is_no_input_any_more(tmp_path: Path) -> None:
    path = save_graph(
        tmp_path, [node("MatMul", "x w", "y")], {"w": normal(8, 8)}, x=(2, 8), w=(TensorProto.FLOAT, (8, 8))
    )
    made, _ = sparsified(path, tmp_path / "out")
    assert [one.name for one in onnx.load(made).graph.input] == ["x"]


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_unstructured_takes_the_smallest_of_all_or_of_each(scope: str, tmp_path: Path) -> None:
    given = mixed(tmp_path, conv=10 * normal(8, 4, 3, 3))
    path, effect = sparsified(given, tmp_path / "out", pattern="unstructured", ratio=0.75, scope=scope)
    found = {name: value for name, value in arrays(path).items() if name != "bias"}
    shares = {name: float((value == 0).mean()) for name, value in found.items()}
    total = sum(value.size for value in found.values())
    assert sum(int((value == 0).sum()) for value in found.values()) == pytest.approx(0.75 * total, abs=len(found))
    if scope == "layer":
        assert all(share == pytest.approx(0.75, abs=1 / found[name].size) for name, share in shares.items())
    else:
        assert shares["conv"] < 0.2 < 0.75 < shares["gemm"]
    assert sparsify.of(onnx.load(path)) == "unstructured=0.75"
    assert effect.summary.startswith("unstructured=0.75 in 6 of 6 weights, 75.0%")


def test_a_second_pattern_leaves_a_2_4_graph_2_4(tmp_path: Path) -> None:
    first, _ = sparsified(mixed(tmp_path), tmp_path / "a")
    second, effect = sparsified(first, tmp_path / "b", pattern="unstructured", ratio=0.8)
    assert sparsify.of(onnx.load(second)) == "2:4"
    assert effect.summary.endswith("2:4 held in 6 of 6 weights")


@pytest.mark.parametrize("name", ["conv", "Conv_a", "Con*"])
def test_protected_weights_stay_dense(name: str, tmp_path: Path) -> None:
    path, effect = sparsified(mixed(tmp_path), tmp_path / "out", protect=(name,))
    found = arrays(path)
    assert (found["conv"] != 0).all()
    assert eligible(found["matmul"].T)
    assert effect.notes == ("left dense: conv: it is protected",)


def test_a_module_is_protected_with_all_below_it(tmp_path: Path) -> None:
    model = onnx.load(mixed(tmp_path))
    for one, module in zip(model.graph.node, ("body.0", "", "", "head.a", "head.b", *[""] * 6), strict=True):
        entry = one.metadata_props.add()
        entry.key, entry.value = model_file.MODULE_KEY, module
    onnx.save(model, tmp_path / "given.onnx")
    path, _ = sparsified(tmp_path / "given.onnx", tmp_path / "out", protect=("head",))
    assert {name for name, one in arrays(path).items() if (one != 0).all()} == {"gemm", "gemm_t", "bias"}


def test_a_protected_name_that_there_is_none_of(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="matmul") as caught:
        sparsified(mixed(tmp_path), tmp_path / "out", protect=("matmull",))
    assert "'matmull' is to be protected" in caught.value.message


@pytest.mark.parametrize(
    ("nodes", "weights", "words"),
    [
        ([node("Relu", "x", "y")], {}, "no weight that can be sparse"),
        ([node("MatMul", "x w", "y")], {"w": normal(6, 8)}, "its 6 inputs are no multiple of 4"),
    ],
)
def test_a_graph_without_such_weights(nodes: Any, weights: Weights, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidGraph, match=words):
        sparsified(save_graph(tmp_path, nodes, weights, x=(2, 6)), tmp_path / "out")


def test_transposed_weights_need_no_shapes(tmp_path: Path) -> None:
    nodes = [
        node("Transpose", "two", "a"),
        node("MatMul", "x a", "b"),
        node("Transpose", "three", "c"),
        node("MatMul", "b c", "d"),
        node("Transpose", "vector", "e"),
        node("MatMul", "d e", "y"),
    ]
    weights = {"two": normal(12, 8), "three": normal(4, 12, 3), "vector": normal(4)}
    given = save_graph(tmp_path, nodes, weights, x=("n", 8))
    model = onnx.load(given)
    model.graph.ClearField("value_info")
    onnx.save(model, given)
    path, effect = sparsified(given, tmp_path / "out")
    assert effect.summary.startswith("2:4 in 2 of 3 weights")
    assert eligible(arrays(path)["two"])
    assert eligible(arrays(path)["three"])
    assert [(one.name, one.two_of_four) for one in check.sparse_weights(path)] == [
        ("two", True),
        ("three", True),
        ("vector", False),
    ]


def test_facts_of_a_file(tmp_path: Path) -> None:
    path, _ = sparsified(mixed(tmp_path), tmp_path / "out", protect=("gemm",))
    facts = {one.name: one for one in check.sparse_weights(path)}
    assert {name: one.two_of_four for name, one in facts.items()} == {name: name != "gemm" for name in facts}
    assert (facts["conv"].zeros, facts["conv"].elements) == (144, 288)


@pytest.mark.parametrize(("shape", "axis"), [((6, 8), 1), ((8, 6), 0), ((5, 12, 3, 3), 1), ((2, 8, 3), -2)])
def test_two_of_four_keeps_the_two_largest_along_the_axis(shape: tuple[int, ...], axis: int) -> None:
    weight = normal(*shape)
    kept = sparsify.two_of_four(weight, axis)
    fours = np.moveaxis(weight, axis, -1).reshape(-1, 4)
    for four, stays in zip(fours, np.moveaxis(kept, axis, -1).reshape(-1, 4), strict=True):
        assert set(np.flatnonzero(stays)) == set(np.argsort(-np.abs(four))[:2])
    assert sparsify.holds(np.moveaxis(kept, axis, -1))
    assert not sparsify.holds(np.moveaxis(weight != 0, axis, -1))


def test_of_equal_magnitudes_the_first_stay() -> None:
    assert sparsify.two_of_four(np.array([[1, -1, 1, 1], [0, 0, 0, 0]], np.float32), 1).tolist() == [[1, 1, 0, 0]] * 2


def test_a_length_that_is_no_multiple_of_four_is_no_pattern() -> None:
    assert not sparsify.holds(np.zeros((2, 6), bool))
    assert sparsify.holds(np.zeros((2, 8), bool))


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.77])
def test_a_threshold_makes_exactly_the_share_zero(ratio: float) -> None:
    arrays = [normal(40, 30), np.round(normal(20, 10, 3, seed=1), 1)]  # the second one with many that are equal
    bound = sparsify.threshold([lambda one=one: one for one in arrays], ratio)  # type: ignore[misc]
    gone = []
    for one in arrays:
        kept, bound = bound.mask(one)
        gone.append(~kept & (one != 0))
    everything = np.sort(np.abs(np.concatenate([one.reshape(-1) for one in arrays])))
    count = int(ratio * len(everything))
    zeros = sum(int((one | (given == 0)).sum()) for one, given in zip(gone, arrays, strict=True))
    assert zeros == max(count, int((everything == 0).sum()))
    largest = max(
        (float(np.abs(given[one]).max(initial=0)) for one, given in zip(gone, arrays, strict=True)), default=0
    )
    assert largest <= (everything[count] if count else 0)


@pytest.mark.parametrize(
    ("text", "pattern", "ratio", "slug"),
    [
        ("2:4", "2:4", 0.5, "sparse24"),
        ("unstructured=0.7", "unstructured", 0.7, "sparse70"),
        (" Unstructured=0.125", "unstructured", 0.125, "sparse12_5"),
    ],
)
def test_what_can_be_asked_for(text: str, pattern: str, ratio: float, slug: str) -> None:
    found = Sparsity.parse(text, SparsifyOptions(protect=("head",)))
    assert (found.pattern, found.ratio, found.slug, found.protect) == (pattern, ratio, slug, ("head",))
    assert str(Sparsity.parse(text)) == text.strip().lower()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1:4", "cannot read the sparsity '1:4'"),
        ("2:4=0.5", "cannot read"),
        ("unstructured", "cannot read"),
        ("unstructured=1", "not at least 0 and less than 1"),
        ("unstructured=-0.1", "not at least 0"),
        ("unstructured=nan", "not at least 0"),
        ("unstructured=half", "'half' is no number"),
    ],
)
def test_what_cannot_be_asked_for(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=r"2:4, or unstructured=0\.5") as caught:
        Sparsity.parse(text)
    assert words in caught.value.message
