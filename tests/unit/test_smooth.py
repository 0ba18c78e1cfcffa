"""Factors moved between activations and weights: where they go, what they are good for, when they are left out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from enginesmith.calibration.ranges import Ranges
from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.errors import DataError, UsageError
from enginesmith.pipeline.frameworks.onnx import edit, validation
from enginesmith.pipeline.passes.rescale import smooth_quant
from enginesmith.pipeline.passes.rescale.smooth_quant import Smooth, Smoothed, smooth
from enginesmith.pipeline.passes.run import run_pass
from graphs import Weights, artifact, difference, evaluate, measure_ranges, node, normal, operators, save_graph, sqnr_db

Case = tuple[list[onnx.NodeProto], Weights, str]
"""Nodes from ``x`` (n,5,16) to ``y``, their weights, and the value that is to be scaled."""
WIDTH, HEADS = 16, 2
OUTLIERS = (3, 11)


X = normal(8, 5, WIDTH, seed=1)


def saved(folder: Path, nodes: list[onnx.NodeProto], weights: Weights, outputs: str = "y", shape: Any = None) -> Path:
    return save_graph(folder, nodes, weights, outputs, opset=23, x=shape or ("n", 5, WIDTH))


def measured(path: Path, *names: str, axis: int = -1, x: Any = X) -> Ranges:
    return measure_ranges(path, x, *names, axis=axis)


def uneven(size: float = 30.0) -> Any:
    """Ones, and a few large numbers."""
    found = np.ones(WIDTH, np.float32)
    found[list(OUTLIERS)] = size
    return found


def written(path: Path, ranges: Ranges, **settings: Any) -> tuple[Path, Smoothed]:
    model = edit.load(path)
    done = smooth(model, ranges, Smooth(**{"alpha": 0.5, **settings}))
    out = path.parent / "out"
    out.mkdir(exist_ok=True)
    edit.save(model, out)
    validation.check(out / edit.FILE)
    return out / edit.FILE, done


def weight(path: Path, name: str) -> Any:
    return next(numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer if t.name == name)


def int8_product(path: Path, value: str, name: str) -> float:
    """SQNR of a product with one scale for the activation and one for each output of the weight."""
    x, w = evaluate(path, X, value)[value], weight(path, name)
    steps = np.abs(x).max() / 127, np.abs(w).max(0) / 127
    return sqnr_db(x @ w, (np.rint(x / steps[0]) * steps[0]) @ (np.rint(w / steps[1]) * steps[1]))


def int4_product(path: Path, value: str, name: str, block: int = 32) -> float:
    """SQNR of a product with the weight in blocks of inputs that share a scale."""
    x, w = evaluate(path, X, value)[value], weight(path, name)
    blocks = w.reshape(-1, block, w.shape[1])
    steps = np.abs(blocks).max(1, keepdims=True) / 7
    return sqnr_db(x @ w, x @ (np.rint(blocks / steps) * steps).reshape(w.shape))


def normalized(outliers: float = 30.0) -> Case:
    weights = {"scale": uneven(outliers), "shift": normal(WIDTH), "w1": normal(WIDTH, 8)}
    weights["w2"] = normal(WIDTH, 4, seed=2)
    nodes = [node("LayerNormalization", "x scale shift", "v")]
    nodes += [node("MatMul", "v w1", "a"), node("MatMul", "v w2", "b"), node("Concat", "a b", "y", axis=-1)]
    return nodes, weights, "v"


def test_outlier_channels_no_longer_cost_the_others_their_bits(tmp_path: Path) -> None:
    before = saved(tmp_path, *normalized()[:2])
    after, done = written(before, measured(before, "v"))
    assert (done.products, done.all_products, done.values) == (2, 2, 1)
    assert done.ratio_before > 15
    assert done.ratio_after < 7
    assert difference(before, after, X) < 1e-6
    assert operators(after) == operators(before)
    for name in ("w1", "w2"):
        assert int8_product(after, "v", name) > int8_product(before, "v", name) + 5


@pytest.mark.parametrize("word", ["BatchNormalization", "InstanceNormalization"])
def test_a_normalization_of_channels_evens_out_what_it_writes(tmp_path: Path, word: str) -> None:
    weights = {"g": uneven(), "s": normal(WIDTH) * uneven()}
    weights |= {"m": normal(WIDTH, seed=3), "d": np.ones(WIDTH, np.float32)} if word == "BatchNormalization" else {}
    nodes = [node(word, f"x {' '.join(weights)}", "a"), node("Relu", "a", "v"), node("Conv", "v w", "y")]
    before = saved(tmp_path, nodes, {**weights, "w": normal(8, WIDTH, 1, 1)}, shape=("n", WIDTH, 4, 4))
    x = normal(8, WIDTH, 4, 4)
    after, done = written(before, measured(before, "v", axis=1, x=x))
    assert (done.products, done.values, done.inserted) == (1, 1, 0)
    assert difference(before, after, x) < 1e-6
    ratios = [
        values.max() / np.median(values)
        for values in (np.abs(evaluate(path, x, "v")["v"]).max((0, 2, 3)) for path in (before, after))
    ]
    assert ratios[1] < ratios[0] / 3


def test_the_factors_are_those_of_the_paper(tmp_path: Path) -> None:
    nodes, weights, _ = normalized()
    before = saved(tmp_path, nodes, weights)
    after, _ = written(before, measured(before, "v"), alpha=0.6)
    amax = np.abs(evaluate(before, X, "v")["v"]).max((0, 1))
    largest = np.maximum(np.abs(weights["w1"]).max(1), np.abs(weights["w2"]).max(1))
    expected = amax**0.6 / largest**0.4
    np.testing.assert_allclose(weight(after, "w1") / weights["w1"], np.tile(expected[:, None], (1, 8)), rtol=1e-5)
    np.testing.assert_allclose(weights["scale"] / weight(after, "scale"), expected, rtol=1e-5)


def home(word: str) -> Case:
    """Something that can take the factors of ``v``, in front of a product that reads it."""
    weights = {"w": normal(WIDTH, 4), "w0": normal(WIDTH, WIDTH, seed=2) * uneven(), "b0": normal(WIDTH, seed=3)}
    last = node("MatMul", "v w", "y")
    match word:
        case "RMSNormalization":
            return [node("RMSNormalization", "x b0", "v"), last], {**weights, "b0": uneven()}, "v"
        case "product with bias":
            return [node("MatMul", "x w0", "a"), node("Add", "a b0", "b"), node("Relu", "b", "v"), last], weights, "v"
        case "constant":
            weights |= {"half": np.float32(0.5), "b0": uneven()}
            nodes = [node("Mul", "x b0", "a"), node("Erf", "a", "b"), node("Mul", "a half", "c")]
            return [*nodes, node("Mul", "b c", "v"), last], weights, "v"
        case "gate":
            nodes = [node("MatMul", "x w0", "a"), node("Sigmoid", "x", "g"), node("Mul", "g a", "v"), last]
            return nodes, weights, "v"
        case "bias in front":
            return [node("MatMul", "x w0", "a"), node("Add", "b0 a", "v"), last], weights, "v"
    raise AssertionError(word)


def attention(word: str) -> Case:
    """Heads of an attention over values ``x``·w0 (+ b0), which can take the factors of what comes out."""
    queries = normal(8, HEADS, 5, WIDTH // HEADS, seed=4) * 0.1
    weights: Weights = {"w": normal(WIDTH, 4), "w0": normal(WIDTH, WIDTH, seed=2) * uneven(), "b0": normal(WIDTH)}
    weights |= {"heads": [0, 0, HEADS, WIDTH // HEADS], "merged": [0, 0, WIDTH], "q": queries, "sizes": [WIDTH] * 3}
    weights |= {"i0": [0], "i1": [1], "i2": [2], "i3": [3], "five": [0, 0, 3, HEADS, WIDTH // HEADS]}
    fused = np.concatenate([normal(WIDTH, 2 * WIDTH, seed=5) * 0.1, weights["w0"]], axis=1)
    first, end = node("MatMul", "x w0", "a"), node("MatMul", "v w", "y")
    weighted = [node("MatMul", "q t", "k_"), node("MatMul", "p t", "o")]
    merge = [node("Transpose", "o", "m", perm=[0, 2, 1, 3]), node("Reshape", "m merged", "v"), end]
    weights["p"] = np.abs(normal(8, HEADS, 5, 5, seed=6))
    match word:
        case "heads":
            nodes = [first, node("Add", "a b0", "b"), node("Reshape", "b heads", "r")]
            return [*nodes, node("Transpose", "r", "t", perm=[0, 2, 1, 3]), weighted[1], *merge], weights, "v"
        case "fused projection":
            weights["w0"] = fused
            split = node("Split", "a sizes", "q_ k_ b", axis=-1)
            nodes = [first, split, node("Reshape", "b heads", "r"), node("Transpose", "r", "t", perm=[0, 2, 1, 3])]
            nodes += [weighted[1], *merge[:-1], node("MatMul", "v w", "z"), node("Concat", "z q_ k_", "y", axis=-1)]
            return nodes, weights, "v"
        case "slices":
            weights["w0"] = fused
            nodes = [first, node("Reshape", "a five", "r"), node("Transpose", "r", "s", perm=[2, 0, 3, 1, 4])]
            nodes += [
                node("Slice", "s i0 i1 i0", "q_"),
                node("Slice", "s i1 i2 i0", "k_"),
                node("Slice", "s i2 i3 i0", "v_"),
            ]
            nodes += [node("Squeeze", "v_ i0", "t"), weighted[1], *merge[:-1], node("MatMul", "v w", "z")]
            nodes += [node("ReduceMean", "q_", "mq", keepdims=0), node("ReduceMean", "k_", "mk", keepdims=0)]
            return [*nodes, node("Add", "z mq", "zq"), node("Add", "zq mk", "y")], weights, "v"
        case "operator":
            heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS}
            return [first, node("Attention", "x x a", "v", **heads), end], weights, "v"
    raise AssertionError(word)


HOMES = ("RMSNormalization", "product with bias", "constant", "gate", "bias in front")
ATTENTION = ("heads", "fused projection", "slices", "operator")


@pytest.mark.parametrize("word", [*HOMES, *ATTENTION])
def test_factors_fold_into_what_comes_before(tmp_path: Path, word: str) -> None:
    nodes, weights, value = home(word) if word in HOMES else attention(word)
    used = {name for one in nodes for name in one.input}
    before = saved(tmp_path, nodes, {name: number for name, number in weights.items() if name in used})
    after, done = written(before, measured(before, value))
    assert (done.values, done.inserted) == (1, 0)
    assert operators(after) == operators(before)
    assert difference(before, after, X) < 2e-6
    amax = [np.abs(evaluate(path, X, value)[value]).max((0, 1)) for path in (before, after)]
    ratios = [one.max() / np.median(one) for one in amax]
    assert ratios[1] < ratios[0] / 2


def homeless(word: str) -> Case:
    """Values whose factors have no free place."""
    nodes, weights, value = normalized()
    match word:
        case "a residual reads it":
            return [*nodes[:2], node("Neg", "v", "o"), node("Concat", "a o", "y", axis=-1)], weights, value
        case "an input":
            weights["w1"] *= uneven()[:, None]
            return [node("MatMul", "x w1", "y")], weights, "x"
        case "a computed scale":
            nodes = [node("Neg", "scale", "s"), node("LayerNormalization", "x s shift", "v")]
            return [*nodes, node("MatMul", "v w1", "y")], weights, value
        case "a curve in between":
            weights |= {"w0": normal(WIDTH, WIDTH) * uneven()}
            return [node("MatMul", "x w0", "a"), node("Gelu", "a", "v"), node("MatMul", "v w1", "y")], weights, value
        case "a weight with two readers":
            weights |= {"w0": normal(WIDTH, WIDTH) * uneven()}
            nodes = [node("MatMul", "x w0", "v"), node("MatMul", "v w1", "b"), node("MatMul", "x w0", "o")]
            return [*nodes, node("Concat", "b o", "y", axis=-1)], weights, value
        case "overlapping slices":
            weights |= {"w0": normal(WIDTH, WIDTH + 8), "i0": [0], "i16": [16], "i24": [24], "i2": [2], "i8": [8]}
            nodes = [node("MatMul", "x w0", "a"), node("Slice", "a i0 i16 i2", "v"), node("Slice", "a i8 i24 i2", "o")]
            return [*nodes, node("MatMul", "v w1", "b"), node("Concat", "b o", "y", axis=-1)], weights, value
    heads = {"q_num_heads": 2 * HEADS, "kv_num_heads": HEADS}  # every head of the values goes to two of the result
    weights |= {"w0": normal(WIDTH, WIDTH // 2), "w9": normal(WIDTH, 4)}
    nodes = [node("MatMul", "x w0", "a"), node("Attention", "x a a", "v", **heads), node("MatMul", "v w9", "y")]
    return nodes, weights, value


HOMELESS = ("a residual reads it", "an input", "a curve in between", "a weight with two readers")


@pytest.mark.parametrize("word", [*HOMELESS, "a computed scale", "overlapping slices", "shared heads"])
def test_without_a_free_place_only_a_multiplication_helps(tmp_path: Path, word: str) -> None:
    nodes, weights, value = homeless(word)
    used = {name for one in nodes for name in one.input}
    before = saved(tmp_path, nodes, {name: number for name, number in weights.items() if name in used})
    ranges = measured(before, value)
    after, done = written(before, ranges)
    assert (done.values, done.homeless) == (0, 1)
    assert difference(before, after, X) == 0
    after, done = written(before, ranges, insert=True, alpha=None)
    assert (done.values, done.inserted) == (1, 1)
    assert sorted(operators(after)) == sorted([*operators(before), "Mul"])
    assert difference(before, after, X) < 1e-6
    given, found = ({name for one in onnx.load(path).graph.node for name in one.output} for path in (before, after))
    assert found - given == {f"{value}_smooth"}


def test_features_in_units_of_any_size_become_alike(tmp_path: Path) -> None:
    """Weights made up for the units in training."""
    units = np.geomspace(1e-6, 1e6, WIDTH, dtype=np.float32)
    before = saved(tmp_path, [node("MatMul", "x w", "y")], {"w": normal(WIDTH, 8) / units[:, None]})
    ranges = measured(before, "x", x=X * units)
    after, done = written(before, ranges, insert=True, alpha=None)
    assert done.ratio_before > 1e4
    assert done.ratio_after < 2
    assert difference(before, after, X * units) < 1e-6
    assert done.error_after < 1e-3


def test_a_multiplication_has_to_be_worth_it(tmp_path: Path) -> None:
    """A gain of a few percent is written where that is free, and not where it costs anything."""
    nodes, weights, value = normalized(1.2)
    folding = saved(tmp_path / "free", nodes, weights)
    done = written(folding, measured(folding, value), insert=True)[1]
    assert 0.9 < done.error_after / done.error_before < 0.99
    costing = saved(tmp_path / "costs", [*nodes, node("Neg", "v", "z")], weights, "y z")
    done = written(costing, measured(costing, value), insert=True)[1]
    assert (done.values, done.even) == (0, 1)


def squeezed(wall: str = "") -> tuple[list[onnx.NodeProto], Weights]:
    """Squeeze-and-excitation behind a curve and a multiplication that makes channels uneven."""
    nodes = [node("Mul", "x s", "u"), node("Exp", "x", "e"), node("Mul", "u e", "t"), node("Erf", "t", "c")]
    nodes += [node("Mul", "t c", "v"), node("ReduceMean", "v one", "m", keepdims=1), node("MatMul", "m w1", "f")]
    nodes += [node("Sigmoid", "f", "g"), node("Mul", "v g", "p"), node("MatMul", "p w2", "y")]
    if wall:
        nodes[-1:] = [node(wall, "p", "q"), node("MatMul", "q w2", "y")]
    weights = {"one": np.array([1]), "s": uneven(), "w1": normal(WIDTH, WIDTH), "w2": normal(WIDTH, 4, seed=3)}
    return nodes, weights


def test_one_multiplication_behind_a_curve_scales_all_that_is_tied(tmp_path: Path) -> None:
    """Both products that the values reach are scaled, through the mean and through the factors."""
    nodes, weights = squeezed()
    before = saved(tmp_path, nodes, weights)
    after, done = written(before, measured(before, "p", "m"), insert=True)
    assert (done.inserted, done.values) == (1, 1)
    assert difference(before, after, X) < 1e-6
    (added,) = [each for each in onnx.load(after).graph.node if each.output[0].endswith("_smooth")]
    assert added.input[0] == "v"
    for name in ("w1", "w2"):
        ratio = weight(after, name) / weights[name]
        assert ratio[list(OUTLIERS)].min() > 2 * np.median(ratio)


def test_what_is_joined_gets_a_multiplication_each(tmp_path: Path) -> None:
    """Before the Concat, so that its parts agree; what else reads one of them is scaled along."""
    nodes = [node("Sigmoid", "x", "a"), node("Mul", "x s", "t"), node("Exp", "t", "b"), node("MatMul", "b w1", "c")]
    nodes += [node("Concat", "a b", "v", axis=-1), node("MatMul", "v w2", "d"), node("Add", "c d", "y")]
    weights = {"s": uneven(2.0), "w1": normal(WIDTH, 4), "w2": normal(2 * WIDTH, 4, seed=3)}
    before = saved(tmp_path, nodes, weights)
    after, done = written(before, measured(before, "v"), insert=True)
    assert done.inserted == 2
    assert difference(before, after, X) < 1e-6
    read = {each.input[0] for each in onnx.load(after).graph.node if each.output[0].endswith("_smooth")}
    assert read == {"a", "b"}
    nodes[-1:] = [node("Relu", "v", "r"), node("MatMul", "r w3", "e"), node("Sum", "c d e", "y")]
    followed = saved(tmp_path / "followed", nodes, {**weights, "w3": normal(2 * WIDTH, 4, seed=5)})
    after, done = written(followed, measured(followed, "v", "r"), insert=True)
    assert done.inserted == 2
    assert difference(followed, after, X) < 1e-6, "one product reads all that is joined behind a Relu"


def gated() -> tuple[list[onnx.NodeProto], Weights]:
    """A gate makes two channels of a product large: for the next product they would have to be small before it."""
    nodes = [node("MatMul", "x w1", "v"), node("ReduceMean", "v one", "m", keepdims=1), node("MatMul", "m w2", "f")]
    nodes += [node("Add", "f b", "l"), node("Sigmoid", "l", "g"), node("Mul", "v g", "p"), node("MatMul", "p w3", "y")]
    weights = {"one": np.array([1]), "w1": normal(WIDTH, WIDTH), "w2": 0.01 * normal(WIDTH, WIDTH)}
    weights |= {"b": np.where(uneven() > 1, 4, -4).astype(np.float32), "w3": normal(WIDTH, 4, seed=3)}
    return nodes, weights


def test_values_on_the_way_do_not_lose_more_than_is_gained(tmp_path: Path) -> None:
    before = saved(tmp_path, *gated())
    ratios = []
    for names in ((), ("p",), ("p", "v")):
        amax = np.abs(evaluate(written(before, measured(before, *names), insert=True)[0], X, "v")["v"]).max((0, 1))
        ratios.append(amax.max() / amax.min())
    assert ratios[1] > 4 * ratios[0], "what is known of p alone makes v uneven"
    assert ratios[2] < 1.5 * ratios[0]


def test_a_mean_evens_out_the_noise_of_what_it_is_of(tmp_path: Path) -> None:
    """Channels that are as large as others, and have a small mean, can be made larger for the mean's product."""
    nodes = [node("MatMul", "x w1", "v"), node("ReduceMean", "v one", "m"), node("MatMul", "m w2", "y")]
    weights = {"one": np.array([1]), "w1": np.eye(WIDTH, dtype=np.float32), "w2": normal(WIDTH, 4)}
    before = saved(tmp_path, nodes, weights, shape=("n", 64, WIDTH))
    x = np.clip(normal(16, 64, WIDTH), -3, 3)
    x[..., list(OUTLIERS)] = 3
    done = written(before, measured(before, "v", "m", x=x), alpha=None)[1]
    assert done.values == 1
    assert done.error_after < 0.7 * done.error_before


def test_products_that_are_scaled_along_count(tmp_path: Path) -> None:
    """Scale channels that are large for one of two products and small for the other."""
    nodes = [node("MatMul", "x w1", "v"), node("Relu", "v", "a"), node("Split", "a halves", "h t", axis=1)]
    nodes += [node("MatMul", "h w2", "b"), node("MatMul", "t w3", "c"), node("ReduceSum", "b one", "d", keepdims=0)]
    nodes += [node("ReduceSum", "c one", "e", keepdims=0), node("Add", "d e", "y")]
    weights = {"w1": normal(WIDTH, WIDTH), "w2": normal(WIDTH, 4), "w3": normal(WIDTH, 4, seed=2)}
    weights |= {"halves": np.array([2, 3]), "one": np.array([1])}
    x = X.copy()
    shift = np.linalg.lstsq(weights["w1"].T, uneven(60.0) - 1, rcond=None)[0]
    x[:, :2] += shift
    x[:, 2:] += shift[::-1]
    before = saved(tmp_path, nodes, weights)
    alone = written(before, measured(before, "h", x=x), insert=True, alpha=None)[1]
    both = written(before, measured(before, "h", "t", x=x), insert=True, alpha=None)[1]
    assert alone.error_after < 0.5 * alone.error_before
    assert both.error_after <= both.error_before
    assert both.error_after > 3 * alone.error_after


@pytest.mark.parametrize("wall", ["another reader", "Clip", "Tanh"])
def test_what_is_tied_to_something_else_is_scaled_before_its_reader(tmp_path: Path, wall: str) -> None:
    """A Clip would cut elsewhere, another reader would get other values."""
    nodes, weights = squeezed(wall if wall != "another reader" else "")
    nodes += [node("Neg", "v", "z")] if wall == "another reader" else []
    before = saved(tmp_path, nodes, weights, "y z" if wall == "another reader" else "y")
    value = "p" if wall == "another reader" else "q"
    after, done = written(before, measured(before, value), insert=True, alpha=None)
    assert done.inserted == (0 if wall == "Tanh" else 1)
    assert difference(before, after, X) < 1e-6
    read = {each.input[0] for each in onnx.load(after).graph.node if each.output[0].endswith("_smooth")}
    assert read == (set() if wall == "Tanh" else {value})


def test_only_what_named_products_read_is_scaled(tmp_path: Path) -> None:
    nodes, weights, value = homeless("an input")
    for number, each in enumerate(nodes):
        each.name = f"n{number}"
    last = next(each.name for each in nodes if each.op_type == "MatMul" and value in each.input)
    used = {name for one in nodes for name in one.input}
    before = saved(tmp_path, nodes, {name: number for name, number in weights.items() if name in used})
    for names, count in (([], 0), ([last], 1)):
        file = tmp_path / "products.json"
        file.write_text(json.dumps(names))
        records = recorded(tmp_path, measured(before, value)) | {"products": artifact(file, "record")}
        effect = applied(before, tmp_path / f"{count}", records, insert=True)
        assert ("1 multiplications were added" in effect.notes) == bool(count)


def test_a_weight_that_something_else_reads_is_left_alone(tmp_path: Path) -> None:
    nodes, weights, value = normalized()
    before = saved(tmp_path, [*nodes, node("Neg", "w1", "z")], weights, "y z")
    after, done = written(before, measured(before, value), insert=True)
    assert (done.values, done.shared) == (0, 1)
    assert difference(before, after, X) == 0


def test_a_weight_that_is_read_along_both_axes_is_left_alone(tmp_path: Path) -> None:
    nodes = [node("Gemm", "x w", "y"), node("Gemm", "x w", "z", transB=1)]
    before = save_graph(tmp_path, nodes, {"w": normal(WIDTH, WIDTH, seed=2)}, "y z", opset=23, x=("n", WIDTH))
    x = normal(8, WIDTH, seed=1) * uneven()
    after, done = written(before, measured(before, "x", x=x), insert=True)
    assert (done.values, done.shared) == (0, 1)
    assert difference(before, after, x) == 0


def test_constants_with_other_readers_are_copied(tmp_path: Path) -> None:
    nodes, weights, value = normalized()
    before = saved(tmp_path, [*nodes, node("LayerNormalization", "x scale shift", "z")], weights, "y z")
    after, done = written(before, measured(before, value))
    assert done.values == 1
    assert (weight(after, "scale") == weights["scale"]).all()
    assert difference(before, after, X) < 1e-6


def test_factors_that_do_harm_are_left_out(tmp_path: Path) -> None:
    """Even activations and weights with outliers: α = 0 would move the outliers into the activations."""
    nodes, weights, value = normalized(1.0)
    weights["shift"] = np.zeros(WIDTH, np.float32)
    weights["w1"] *= uneven()[:, None]
    weights["w2"] *= uneven()[:, None]
    before = saved(tmp_path, nodes, weights)
    ranges = measured(before, value)
    assert written(before, ranges, alpha=0.0)[1].even == 1
    before = saved(tmp_path, *normalized()[:2])
    assert written(before, measured(before, value), alpha=0.0)[1].even == 1


def test_convolutions_are_smoothed_too(tmp_path: Path) -> None:
    shape, x = ("n", 8, 6, 6), normal(4, 8, 6, 6)
    weights = {"w1": normal(WIDTH, 8, 1, 1) * uneven()[:, None, None, None], "w2": normal(4, WIDTH // 2, 3, 3)}
    nodes = [node("Conv", "x w1", "a"), node("Relu", "a", "v"), node("Conv", "v w2", "y", group=2)]
    before = saved(tmp_path, nodes, weights, shape=shape)
    after, done = written(before, measured(before, "v", axis=1, x=x))
    assert (done.values, done.products) == (1, 1)
    assert done.ratio_after < done.ratio_before / 2
    assert difference(before, after, x) < 1e-6
    after, done = written(before, measured(before, "v", axis=1, x=x), mode="awq")
    assert done.all_products == 0


def test_fewer_exponents_are_tried_on_few_data(tmp_path: Path) -> None:
    assert max(smooth_quant.smooth_exponents(few=True)) == 0.5
    assert max(smooth_quant.smooth_exponents(few=False)) == 0.7
    before = saved(tmp_path, *normalized()[:2])
    ranges = measured(before, "v")  # 40 rows
    many = ranges.tensors["v"].model_copy(update={"count": 1 << 20})
    after = [written(before, ranges, alpha=None)[0].read_bytes()]
    after.append(written(before, ranges.model_copy(update={"tensors": {"v": many}}), alpha=None)[0].read_bytes())
    assert after[0] != after[1]


# --- AWQ


def salient(uneven_by: float = 30.0, width: int = 4 * WIDTH) -> Case:
    """Few channels that matter much more than the others of their block."""
    scale = np.ones(width, np.float32)
    scale[::16] = uneven_by
    weights = {"w0": normal(WIDTH, width), "scale": scale, "w": normal(width, 8, seed=2)}
    return [node("MatMul", "x w0", "a"), node("Mul", "a scale", "v"), node("MatMul", "v w", "y")], weights, "v"


def test_awq_keeps_what_meets_salient_activations(tmp_path: Path) -> None:
    nodes, weights, value = salient()
    before = saved(tmp_path, nodes, weights)
    after, done = written(before, measured(before, value), mode="awq", alpha=None)
    assert (done.values, done.all_products) == (1, 2)
    assert done.error_after < 0.7 * done.error_before
    assert difference(before, after, X) < 1e-6
    assert int4_product(after, value, "w") > int4_product(before, value, "w") + 1.5


def test_awq_leaves_even_activations_alone(tmp_path: Path) -> None:
    nodes, weights, value = salient(1.0)
    weights["w0"] = np.tile(normal(WIDTH, 1), (1, 4 * WIDTH))  # every channel the same
    before = saved(tmp_path, nodes, weights)
    after, done = written(before, measured(before, value), mode="awq", alpha=None)
    assert (done.values, done.even) == (0, 1)
    assert difference(before, after, X) == 0


# --- the pass


def recorded(folder: Path, ranges: Ranges) -> dict[str, Artifact]:
    path = folder / "ranges.json"
    path.write_text(ranges.model_dump_json())
    return {"ranges": artifact(path, "record")}


def applied(path: Path, out: Path, records: Mapping[str, Artifact], **options: Any) -> Effect:
    out.mkdir(parents=True)
    return run_pass(Smooth(**options), artifact(path), out, lambda text: None, records)


@pytest.mark.parametrize("mode", ["smooth", "awq"])
def test_the_pass_says_what_it_did_and_gives_the_same_bytes_twice(tmp_path: Path, mode: str) -> None:
    nodes, weights, value = salient()
    before = saved(tmp_path, nodes, weights)
    onnx.save(onnx.load(before), before, save_as_external_data=True, location="weights.bin", size_threshold=0)
    records = recorded(tmp_path, measured(before, value))
    effect = applied(before, tmp_path / "a", records, mode=mode, external_data_bytes=0)
    applied(before, tmp_path / "b", records, mode=mode, external_data_bytes=0)
    assert effect.summary.startswith("scaled 1 of 2 products; ")
    assert "error of their rounding, estimated, -" in effect.summary
    assert ("channel ratio" in effect.summary) == (mode == "smooth")
    assert effect.notes == ("1 values were left alone: no statistics of their channels",)
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]
    assert "model.onnx.data" in files[0]
    assert difference(before, tmp_path / "a" / effect.file, X) < 1e-6


def test_the_pass_wants_ranges_of_this_graph(tmp_path: Path) -> None:
    before = saved(tmp_path, *normalized()[:2])
    with pytest.raises(UsageError, match="got none"):
        applied(before, tmp_path / "a", {})
    other = measured(before, "v").model_copy(update={"model_sha256": "other"})
    with pytest.raises(DataError, match="another model"):
        applied(before, tmp_path / "b", recorded(tmp_path, other))


def test_what_cannot_be_scaled_is_passed_on_with_the_reason(tmp_path: Path) -> None:
    nodes, weights, value = homeless("a curve in between")
    before = saved(tmp_path, nodes, {name: number for name, number in weights.items() if name in ("w0", "w1")})
    effect = applied(before, tmp_path / "a", recorded(tmp_path, measured(before, value)))
    assert "unchanged" in effect.summary
    assert effect.notes[0] == "no value could be scaled"
    assert "1 values were left alone: no place for the factors that would cost nothing" in effect.notes
    effect = applied(before, tmp_path / "b", recorded(tmp_path, measured(before, value)), insert=True)
    assert "1 multiplications were added" in effect.notes


def test_two_products_share_one_multiplication(tmp_path: Path) -> None:
    nodes, weights, value = normalized()
    before = saved(tmp_path, [*nodes, node("Neg", "v", "z")], weights, "y z")
    after, done = written(before, measured(before, value), insert=True)
    assert (done.products, done.inserted) == (2, 1)
    assert operators(after).count("Mul") == 1
    assert difference(before, after, X) < 1e-6


def test_a_weight_that_one_value_meets_twice_is_scaled_once(tmp_path: Path) -> None:
    nodes, weights, value = normalized()
    again = [node("MatMul", "v w1", "c"), node("Add", "a c", "z")]
    before = saved(tmp_path, [*nodes, *again], weights, "y z")
    after, done = written(before, measured(before, value))
    assert (done.values, done.products) == (1, 3)
    assert difference(before, after, X) < 1e-6


def test_awq_does_not_round_for_dead_channels(tmp_path: Path) -> None:
    """A block of weights shares one scale."""
    nodes, weights, value = salient()
    weights["scale"][5], weights["w"][5] = 0, 50
    before = saved(tmp_path, nodes, weights)
    after, done = written(before, measured(before, value), mode="awq", alpha=None)
    columns = np.abs(weight(after, "w")).max(1)
    assert done.values == 1
    assert columns[5] == pytest.approx(np.median(columns), rel=0.05)
    assert int4_product(after, "v", "w") > int4_product(before, "v", "w") + 10
    assert difference(before, after, X) < 1e-6


def test_awq_needs_inputs_that_divide_into_blocks(tmp_path: Path) -> None:
    nodes, weights, value = salient(width=48)
    before = saved(tmp_path, nodes, weights)
    assert written(before, measured(before, value), mode="awq", alpha=None)[1].even == 1


@pytest.mark.parametrize("outliers", [30.0, 1.0])
def test_dead_channels_do_not_set_the_scale_of_weights(tmp_path: Path, outliers: float) -> None:
    """Also where the others are even already."""
    nodes, weights, value = normalized(outliers)
    weights["scale"][0] = weights["shift"][0] = 0
    weights["w1"][0] *= 300
    before = saved(tmp_path, nodes, weights)
    after, done = written(before, measured(before, value))
    assert done.values == 1
    columns = np.abs(weight(after, "w1")).max(1)
    assert columns[0] == pytest.approx(np.median(columns[1:]), rel=0.1)
    assert int8_product(after, "v", "w1") > int8_product(before, "v", "w1") + 15
    assert difference(before, after, X) < 1e-6


def test_channels_that_no_weight_reads_stay_as_they_are(tmp_path: Path) -> None:
    nodes, weights, value = normalized()
    weights["w1"][1] = weights["w2"][1] = 0
    before = saved(tmp_path, nodes, weights)
    after, done = written(before, measured(before, value))
    assert done.values == 1
    assert weight(after, "scale")[1] == weights["scale"][1]
    assert difference(before, after, X) < 1e-6
