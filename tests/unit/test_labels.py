"""Labels of channels: random graphs compute the same whatever factors their labels get."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.passes.rescale import axes, labels, products
from graphs import Weights, node, normal, run_model, save_graph

SIDE = 4
OPERATORS = ("Conv", "depthwise", "Relu", "MaxPool", "bias", "half", "scale", "Add", "Mul", "excite", "Concat", "Split")
OPERATORS += ("Sub", "Div", "sevenths", "normalize")
REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2")
OPERATORS += (
    "Pad",
    "shift",
    "Resize",
    "shuffle",
    "Slice",
    "Gather",
    "Sigmoid",
    "MatMul",
    "reduce",
    "LayerNormalization",
    "Clip",
    "experts",
    "BatchNormalization",
    "InstanceNormalization",
    "DepthToSpace",
    "SpaceToDepth",
    "Max",
    "Sum",
    "Where",
    "Tile",
    "Expand",
    "CumSum",
    "LpPool",
    "Neg",
)


class RandomGraph:
    """Nodes over values of n × channels × SIDE × SIDE, made at random."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: Weights = {"axis": np.array([1]), "places": np.array([2, 3]), "half": np.float32(0.5)}
        self.channels = {"x": 4}

    def pick(self, channels: int | None = None) -> str:
        """Choose a value; later ones more often."""
        names = [name for name, count in self.channels.items() if channels in (None, count)]
        return names[-1 - min(int(self.rng.exponential(1.5)), len(names) - 1)]

    def constant(self, value: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = value
        return name

    def normal(self, *shape: int) -> str:
        return self.constant(normal(*shape, seed=len(self.weights)))

    def add(self, operator: str, inputs: str, channels: int = 0, outputs: int = 1, **attributes: Any) -> str:
        """Append a node; its outputs can be picked where their channels are given."""
        names = [f"v{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(node(operator, inputs, " ".join(names), **attributes))
        self.channels.update(dict.fromkeys(names, channels) if channels else {})
        return names[0]

    def convolve(self, value: str, outputs: int, groups: int = 1) -> str:
        inputs = self.channels[value]
        weight, bias = self.normal(outputs, inputs // groups, 1, 1), self.normal(outputs)
        return self.add("Conv", f"{value} {weight} {bias}", outputs, group=groups)

    def ask_experts(self, value: str, count: int) -> None:
        """Append two stacks of matrices: all of the first read the same value, those of the second one part each."""
        experts, width = 3, int(self.rng.integers(1, 4))
        rows = self.add("Reshape", f"{value} {self.constant(np.array([0, 1, count, SIDE * SIDE]))}")
        rows = self.add("Transpose", rows, perm=[0, 1, 3, 2])
        hidden = self.add("MatMul", f"{rows} {self.normal(1, experts, count, width)}")
        hidden = self.add("Relu", self.add("Add", f"{hidden} {self.normal(experts, 1, width)}"))
        made = self.add("Add", f"{self.add('MatMul', f'{hidden} {self.normal(experts, width, 2)}')} {self.normal(2)}")
        made = self.add("Transpose", made, perm=[0, 1, 3, 2])
        self.add("Reshape", f"{made} {self.constant(np.array([0, 2 * experts, SIDE, SIDE]))}", 2 * experts)

    def grow(self, word: str) -> None:
        """Append what the word names, behind a value that was chosen at random."""
        value = self.pick()
        count = self.channels[value]
        match word:
            case "Conv":
                self.convolve(value, int(self.rng.choice([4, 6, 8])), 2 if count % 2 == 0 else 1)
            case "depthwise":
                self.convolve(value, count, count)
            case "Relu" | "Sigmoid" | "Neg":
                self.add(word, value, count)
            case "Clip":
                self.add(word, f"{value} {self.constant(np.float32(0))}", count)
            case "MaxPool" | "LpPool":
                self.add(word, value, count, kernel_shape=[3, 3], pads=[1] * 4)
            case "Pad":
                taken = self.add(word, f"{value} {self.constant(np.array([0, 0, 1, 0, 0, 0, 1, 0]))}")
                edges = [self.constant(np.array([0, 0])), self.constant(np.array([SIDE, SIDE]))]
                self.add("Slice", f"{taken} {edges[0]} {edges[1]} places", count)
            case "shift":
                amounts = self.constant(np.array([0, 1, 0, 0, 0, -1, 0, 0]))
                self.add("Pad", f"{value} {amounts}", count, mode="constant")
            case "Resize":
                larger = self.constant(np.array([1, 1, 2, 2], np.float32))
                large = self.add(
                    word,
                    f"{value} {self.constant(np.zeros(0, np.float32))} {larger}",
                    mode=str(self.rng.choice(["nearest", "linear"])),
                )
                self.add("AveragePool", large, count, kernel_shape=[2, 2], strides=[2, 2])
            case "bias":
                self.add("Add", f"{value} {self.normal(count, 1, 1)}", count)
            case "scale":
                self.add("Mul", f"{self.normal(1, count, 1, 1)} {value}", count)
            case "half":
                self.add("Mul", f"{value} half", count)
            case "sevenths":
                self.add("Div", f"{value} {self.constant(np.float32(7))}", count)
            case "Div":
                divisor = self.add("Add", f"{self.add('Sigmoid', self.pick(count))} half")
                self.add(word, f"{value} {divisor}", count)
            case "normalize":
                apart = self.add("Sub", f"{value} {self.add('ReduceMean', f'{value} axis')}")
                size = self.add("Add", f"{self.add('ReduceL2', f'{apart} axis')} half")
                self.add("Mul", f"{self.add('Div', f'{apart} {size}')} {self.normal(1, count, 1, 1)}", count)
            case "Add" | "Mul" | "Sub":
                self.add(word, f"{value} {self.pick(count)}", count)
            case "excite":
                gate = self.add("GlobalAveragePool", value)
                weight = self.normal(count, count, 1, 1)
                gate = self.add("Sigmoid", self.add("Conv", f"{gate} {weight}"))
                self.add("Mul", f"{gate} {value}", count)
            case "Concat":
                other = self.pick()
                self.add(word, f"{value} {other}", count + self.channels[other], axis=1)
            case "Split" if count % 2 == 0:
                self.add(word, f"{value} {self.constant(np.array([count // 2] * 2))}", count // 2, outputs=2, axis=1)
            case "shuffle" if count % 2 == 0:
                apart = self.add("Reshape", f"{value} {self.constant(np.array([0, 2, count // 2, SIDE, SIDE]))}")
                turned = self.add("Transpose", apart, perm=[0, 2, 1, 3, 4])
                self.add("Reshape", f"{turned} {self.constant(np.array([0, count, SIDE, SIDE]))}", count)
            case "Slice":
                start, step = int(self.rng.integers(max(count - 1, 1))), int(self.rng.integers(1, 3))
                edges = [self.constant(np.array([edge])) for edge in (start, count, step)]
                self.add(word, f"{value} {edges[0]} {edges[1]} axis {edges[2]}", len(range(start, count, step)))
            case "Gather":
                indices = self.rng.integers(count, size=5)
                self.add(word, f"{value} {self.constant(indices)}", len(indices), axis=1)
            case "MatMul" | "LayerNormalization":
                last = self.add("Transpose", value, perm=[0, 2, 3, 1])
                weight = self.normal(count, 6) if word == "MatMul" else f"{self.normal(count)} {self.normal(count)}"
                width = 6 if word == "MatMul" else count
                self.add("Transpose", self.add(word, f"{last} {weight}"), width, perm=[0, 3, 1, 2])
            case "DepthToSpace" if count % 4 == 0:
                large = self.add(word, value, blocksize=2, mode=str(self.rng.choice(["DCR", "CRD"])))
                self.add("AveragePool", large, count // 4, kernel_shape=[2, 2], strides=[2, 2])
            case "SpaceToDepth":
                self.add("DepthToSpace", self.add(word, value, blocksize=2), count, blocksize=2, mode="CRD")
            case "Max" | "Sum":
                operator = str(self.rng.choice(["Max", "Min"] if word == "Max" else ["Sum", "Mean"]))
                others = f"{self.pick(count)} {self.constant(np.zeros((count, 1, 1), np.float32))}"
                self.add(operator, f"{value} {others}", count)
            case "Where":
                self.add(word, f"{self.constant(normal(SIDE, SIDE) > 0)} {value} {self.pick(count)}", count)
            case "Tile":
                self.add(word, f"{value} {self.constant(np.array([1, 2, 1, 1]))}", 2 * count)
            case "Expand":
                pooled = self.add("GlobalAveragePool", value)
                self.add(word, f"{pooled} {self.constant(np.array([1, 1, SIDE, SIDE]))}", count)
            case "CumSum":
                self.add(word, f"{value} {self.constant(np.int64(2))}", count)
            case "BatchNormalization" | "InstanceNormalization":
                given = [self.normal(count) for _ in range(3 if word == "BatchNormalization" else 2)]
                given += [self.constant(np.full(count, 2, np.float32))] if word == "BatchNormalization" else []
                self.add(word, f"{value} {' '.join(given)}", count)
            case "experts":
                self.ask_experts(value, count)
            case "reduce":
                reduced = self.add(str(self.rng.choice(REDUCTIONS)), f"{value} places", keepdims=0)
                apart = self.add("Unsqueeze", f"{reduced} places")
                self.add("Add", f"{apart} {value}", count)

    def save(self, folder: Path) -> Path:
        """Save the graph, with a few more products that read it; one of its values is read by something else, too."""
        for _ in range(40):
            self.grow(str(self.rng.choice(OPERATORS)))
        ends = [self.convolve(self.pick(), 3) for _ in range(3)]
        ends.append(self.add("Neg", self.pick()))
        return save_graph(folder, self.nodes, self.weights, " ".join(ends), x=("n", 4, SIDE, SIDE))


def label_graph(folder: Path, seed: int) -> tuple[Path, ir.Model, labels.ChannelLabels, Any]:
    """Save a random graph in which something can be scaled, and choose factors of its labels."""
    while True:
        path = RandomGraph(seed).save(folder)
        model = edit.load(path)
        found = labels.label(model, products.find(model))
        factors = np.exp2(np.random.default_rng(seed).integers(-3, 4, found.count))
        factors[found.fixed] = 1
        for _, sources in found.sources:
            factors[sources] = 1
        if any((factors[read] != 1).any() for _, read in found.readers):
            return path, model, found, factors
        seed += 1000


@pytest.mark.parametrize("seed", range(20))
def test_factors_leave_the_answers_as_they_are(tmp_path: Path, seed: int) -> None:
    path, model, found, factors = label_graph(tmp_path, seed)
    x = {"x": normal(2, 4, SIDE, SIDE)}
    before = run_model(ir.load(path), x)
    found.divide(factors)
    after = run_model(model, x)
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("between", "free"),
    [
        (node("Pad", "a pads", "b"), True),
        (node("Pad", "a pads", "b", mode="reflect"), True),
        (node("Pad", "a pads zero", "b"), True),
        (node("Pad", "a pads one", "b"), False),
        (node("Pad", "a more", "b"), False),
        (node("Pad", "a shift", "b"), False),
        (node("Pad", "a one_each zero by_axis", "b"), True),
        (node("Pad", "a one_each zero channel", "b"), False),
        (node("Resize", "a none nearly", "b"), False),
        (node("Resize", "a none scales", "b", mode="linear"), True),
        (node("Resize", "a all scales", "b", coordinate_transformation_mode="tf_crop_and_resize"), False),
        (node("Transpose", "a", "b", perm=[0, 1, 3, 2]), True),
        (node("Sigmoid", "a", "b"), False),
    ],
)
def test_factors_pass_what_fills_places_with_their_own(tmp_path: Path, between: onnx.NodeProto, free: bool) -> None:
    weights: Weights = {"w": normal(4, 4, 1, 1), "v": normal(3, 4, 1, 1), "u": normal(3, 5, 1, 1)}
    weights |= {"pads": np.array([0, 0, 1, 1] * 2), "more": np.array([0, 1, 0, 0] + [0] * 4), "zero": np.float32(0)}
    weights |= {"one": np.float32(1), "none": np.zeros(0, np.float32), "scales": np.float32([1, 1, 2, 2])}
    weights |= {"shift": np.array([0, 1, 0, 0, 0, -1, 0, 0]), "one_each": np.array([1, -1])}
    weights |= {"by_axis": np.array([-1]), "channel": np.array([1]), "nearly": np.float32([1, 1.1, 1, 1])}
    weights |= {"all": np.float32([0, 0, 0, 0, 1, 1, 1, 1])}
    second = node("Conv", "b u" if "more" in between.input else "b v", "y")
    path = save_graph(tmp_path, [node("Conv", "x w", "a"), between, second], weights, x=("n", 4, SIDE, SIDE))
    model = edit.load(path)
    found = labels.label(model, products.find(model))
    read = next(each for product, each in found.readers if product.node.outputs[0].name == "y")
    made = {int(label) for _, each in found.writers for label in each if not found.fixed[label]}
    assert (made.issuperset(read.tolist()) and len(set(read.tolist())) == len(read)) == free


@pytest.mark.parametrize(
    ("between", "free"),
    [
        *(([node(word, "a rows", "b", keepdims=kept)], True) for word in REDUCTIONS for kept in (0, 1)),
        ([node("ReduceProd", "a rows", "b")], False),
        ([node("Sigmoid", "a", "s"), node("ReduceSum", "s last", "t"), node("Div", "a t", "b")], False),
        ([node("Sigmoid", "x", "s"), node("ReduceSum", "s last", "t"), node("Div", "a t", "b")], True),
        ([node("Sigmoid", "x", "s"), node("ReduceMax", "s rows", "t"), node("Div", "t a", "b")], False),
        ([node("Div", "a g", "b")], True),
        ([node("Sub", "a g", "b")], True),
        ([node("Sub", "g a", "b")], True),
        ([node("ReduceMax", "a rows", "t"), node("Sub", "t a", "b")], True),
        ([node("Sub", "a x", "b")], False),
    ],
)
def test_factors_pass_reductions_differences_and_divisions(
    tmp_path: Path, between: list[onnx.NodeProto], free: bool
) -> None:
    weights: Weights = {
        "w": normal(4, 4),
        "v": normal(4, 3),
        "g": normal(4),
        "rows": np.array([1]),
        "last": np.array([-1]),
    }
    nodes = [node("MatMul", "x w", "a"), *between, node("MatMul", "b v", "y")]
    path, x = save_graph(tmp_path, nodes, weights, x=("n", 5, 4)), {"x": normal(3, 5, 4)}
    model, before = edit.load(path), run_model(ir.load(path), x)["y"]
    found = labels.label(model, products.find(model))
    read = next(each for product, each in found.readers if product.node.outputs[0].name == "y")
    ended = {int(label) for _, each in found.sources for label in each.reshape(-1)}
    assert (not found.fixed[read].any() and ended.isdisjoint(read.tolist()) and len(set(read.tolist())) == 4) == free
    if free:
        factors = np.ones(found.count)
        factors[read] = 2.0 ** np.arange(4)
        found.divide(factors)
        np.testing.assert_allclose(run_model(model, x)["y"], before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "between",
    [
        [node("ReduceL2", "a last", "n"), node("Div", "a n", "b")],
        [node("ReduceMax", "a last", "n"), node("Sigmoid", "x", "s"), node("Div", "n s", "b")],
        [node("Sigmoid", "x", "s"), node("ReduceMax", "s rows", "n", keepdims=0), node("Div", "n a", "b")],
    ],
    ids=["another reader", "one number for all channels", "fewer axes"],
)
def test_a_multiplication_behind_a_division_can_scale_what_its_numerator_cannot(
    tmp_path: Path, between: list[onnx.NodeProto]
) -> None:
    weights: Weights = {"w": normal(4, 4), "v": normal(4, 3), "rows": np.array([1]), "last": np.array([-1])}
    nodes = [node("MatMul", "x w", "a"), *between, node("MatMul", "b v", "y")]
    model = edit.load(save_graph(tmp_path, nodes, weights, x=("n", 5, 4)))
    found = labels.label(model, products.find(model))
    read = next(each for product, each in found.readers if product.node.outputs[0].name == "y")
    assert not found.fixed[read].any()
    assert [each.tolist() for value, each in found.sources if value.name == "b"] == [[[read.tolist()]]]


@pytest.mark.parametrize(
    "between",
    [
        [node("ReduceL2", "a last", "n"), node("Div", "a n", "b")],
        [node("Sub", "a g", "s"), node("ReduceL2", "s last", "n"), node("Div", "s n", "b")],
        [node("Neg", "a", "z"), node("Sub", "a g", "b")],
    ],
    ids=["norm", "difference and norm", "a stream"],
)
def test_the_scale_of_a_normalization_takes_the_factors(tmp_path: Path, between: list[onnx.NodeProto]) -> None:
    """Channels before it are read by something else, too."""
    weights: Weights = {"w": normal(4, 4), "v": normal(4, 3), "g": normal(4), "last": np.array([-1])}
    nodes = [node("MatMul", "x w", "a"), *between, node("Mul", "b g", "c"), node("MatMul", "c v", "y")]
    outputs = "y z" if between[0].op_type == "Neg" else "y"
    model = edit.load(save_graph(tmp_path, nodes, weights, outputs, x=("n", 5, 4)))
    found = labels.label(model, products.find(model))
    read = next(each for product, each in found.readers if product.node.outputs[0].name == "y")
    assert not found.fixed[read].any()
    assert [each.tolist() for taker, _, each in found.constants if taker.op_type == "Mul"] == [[[read.tolist()]]]


@pytest.mark.parametrize(
    ("between", "free"),
    [
        *((node(word, "a c", "b"), True) for word in ("Max", "Min", "Sum", "Mean")),
        *((node(word, "a zero", "b"), True) for word in ("Max", "Min")),
        *((node(word, "a one", "b"), False) for word in ("Max", "Min", "Sum", "Mean")),
        (node("Where", "where a c", "b"), True),
        (node("Where", "where zero a", "b"), True),
        (node("Where", "where a one", "b"), False),
        (node("CumSum", "a rows", "b"), True),
        (node("CumSum", "a channels", "b"), False),
        (node("GridSample", "a grid", "b"), True),
        (node("LpPool", "a", "b", kernel_shape=[2, 2]), True),
        (node("GlobalLpPool", "a", "b"), True),
        (node("Abs", "a", "b"), True),
        (node("Neg", "a", "b"), True),
        (node("Tile", "a thrice", "b"), True),
        (node("Expand", "a larger", "b"), True),
    ],
)
def test_factors_pass_what_is_homogeneous(tmp_path: Path, between: onnx.NodeProto, free: bool) -> None:
    weights: Weights = {"w": normal(4, 4, 1, 1), "u": normal(4, 4, 1, 1, seed=1), "v": normal(3, 4, 1, 1)}
    weights |= {"zero": np.float32(0), "one": np.float32(1), "where": normal(5, 5) > 0, "rows": np.int64(-2)}
    weights |= {"grid": normal(2, 3, 3, 2), "channels": np.int64(1), "thrice": np.array([1, 1, 3, 1])}
    weights["larger"] = np.array([1, 1, 5, 5])
    nodes = [node("Conv", "x w", "a"), node("Conv", "x u", "c"), between, node("Conv", "b v", "y")]
    path, x = save_graph(tmp_path, nodes, weights, x=(2, 4, 5, 5)), {"x": normal(2, 4, 5, 5)}
    model, before = edit.load(path), run_model(ir.load(path), x)["y"]
    found = labels.label(model, products.find(model))
    read = next(each for product, each in found.readers if product.node.outputs[0].name == "y")
    made = {int(label) for _, each in found.writers for label in each if not found.fixed[label]}
    assert (made.issuperset(read.tolist()) and len(set(read.tolist())) == 4) == free
    factors = np.ones(found.count)
    factors[read] = np.where(found.fixed[read] | (not free), 1, 2.0 ** np.arange(4))
    found.divide(factors)
    np.testing.assert_allclose(run_model(model, x)["y"], before, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("operator", "mode", "first", "inner", "group"),
    [
        ("DepthToSpace", {"mode": "CRD"}, 12, 3, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]),
        ("DepthToSpace", {}, 12, 3, [0, 1, 2] * 4),
        ("SpaceToDepth", {}, 3, 12, [0, 1, 2]),
    ],
    ids=["pixel shuffle", "depth first", "back"],
)
def test_channels_of_a_block_share_their_factor(
    tmp_path: Path, operator: str, mode: Any, first: int, inner: int, group: list[int]
) -> None:
    weights: Weights = {"w": normal(first, 4, 1, 1), "b": normal(first), "v": normal(5, inner, 1, 1)}
    nodes = [node("Conv", "x w b", "a"), node(operator, "a", "s", blocksize=2, **mode), node("Relu", "s", "r")]
    path = save_graph(tmp_path, [*nodes, node("Conv", "r v", "y")], weights, x=("n", 4, 4, 4))
    model, x = edit.load(path), {"x": normal(2, 4, 4, 4)}
    before = run_model(ir.load(path), x)["y"]
    found = labels.label(model, products.find(model))
    made = next(each for product, each in found.writers if product.outputs == first)
    read = next(each for product, each in found.readers if product.inputs == inner)
    assert not found.fixed[made].any()
    assert np.unique(made, return_inverse=True)[1].tolist() == group
    assert set(read) == set(made)
    assert len(set(read)) == 3
    factors = np.ones(found.count)
    factors[np.unique(made)] = [0.5, 4, 1]
    found.divide(factors)
    np.testing.assert_allclose(run_model(model, x)["y"], before, rtol=1e-4, atol=1e-5)


def normalize(word: str) -> tuple[onnx.NodeProto, Weights]:
    """Normalize ``a`` of 4 channels as ``b``, each channel with constants of its own."""
    count = 4 if word == "BatchNormalization" else 2
    weights = {f"g{index}": np.abs(normal(4, seed=index)) + 0.5 for index in range(count)}
    return node(word, f"a {' '.join(weights)}", "b"), weights


@pytest.mark.parametrize("word", ["BatchNormalization", "InstanceNormalization"])
def test_scale_and_shift_of_channels_take_factors_from_behind(tmp_path: Path, word: str) -> None:
    between, weights = normalize(word)
    nodes = [node("Sigmoid", "x", "a"), between, node("Relu", "b", "c"), node("Conv", "c v", "y")]
    path, x = save_graph(tmp_path, nodes, {**weights, "v": normal(3, 4, 1, 1)}, x=("n", 4, 6, 6)), normal(2, 4, 6, 6)
    model, before = edit.load(path), run_model(ir.load(path), {"x": x})["y"]
    found = labels.label(model, products.find(model))
    read = found.readers[0][1]
    assert not found.fixed[read].any()
    assert [(index, each.tolist()) for _, index, each in found.constants[:2]] == [
        (1, read.tolist()),
        (2, read.tolist()),
    ]
    factors = np.ones(found.count)
    factors[read] = 2.0 ** np.arange(4)
    found.divide(factors)
    np.testing.assert_allclose(run_model(model, {"x": x})["y"], before, rtol=1e-4, atol=1e-5)


def read_back(word: str) -> tuple[list[onnx.NodeProto], Weights]:
    """Read ``a`` of 4 channels where whatever is done to their sizes is taken back."""
    factor: Weights = {"u": normal(4, 1, 1, seed=6)}
    match word:
        case "Mul":
            nodes = [node("Relu", "a", "b"), node("Mul", "b u", "d"), node("Mul", "u b", "e"), node("Add", "d e", "y")]
            return nodes, factor
    between, given = normalize(word)
    return [between, node("Sigmoid", "b", "y")], given


@pytest.mark.parametrize("word", ["BatchNormalization", "Mul"])
def test_channels_may_have_any_size_where_a_reader_takes_it_back(tmp_path: Path, word: str) -> None:
    nodes, given = read_back(word)
    nodes = [node("Conv", "x w s", "c"), node("Conv", "x v s", "d0"), node("Add", "c d0", "a"), *nodes]
    weights: Weights = {"w": normal(4, 3, 1, 1), "v": normal(4, 3, 1, 1, seed=4), "s": normal(4, seed=5)}
    path, x = save_graph(tmp_path, nodes, weights | given, x=("n", 3, 6, 6)), {"x": normal(2, 3, 6, 6)}
    model, before = edit.load(path), run_model(ir.load(path), x)["y"]
    found = labels.label(model, products.find(model))
    first, second = (each.tolist() for _, each in found.writers)
    assert first == second
    assert not found.fixed[first].any()
    assert len(set(first)) == 4
    assert {value.name: each.shape for value, each in found.values.items()}["a"] == (1, 4, 1, 1)
    factors = np.ones(found.count)
    factors[first] = 0.5 ** np.arange(1, 5)
    found.divide(factors)
    np.testing.assert_allclose(run_model(model, x)["y"], before, rtol=1e-3, atol=1e-4)
    rows = products.find(model)[0].weights()[:, :, 0] / weights["w"][:, :, 0, 0]
    np.testing.assert_allclose(rows, np.tile(1 / factors[first][:, None], (1, 3)), rtol=1e-6)


@pytest.mark.parametrize("word", ["a mean that is computed", "training", "another reader"])
def test_a_normalization_that_does_not_take_back_sizes_keeps_them(tmp_path: Path, word: str) -> None:
    between, given = normalize("BatchNormalization")
    if word == "a mean that is computed":
        between.input[3] = "mean"
    if word == "training":
        between.output.extend(["m", "d"])
        between.attribute.append(onnx.helper.make_attribute("training_mode", 1))
    nodes = [node("Conv", "x w", "a"), node("Sigmoid", "g3", "mean"), between]
    nodes.append(node("Sigmoid", "a" if word == "another reader" else "b", "y"))
    path = save_graph(tmp_path, nodes, {**given, "w": normal(4, 3, 1, 1)}, "y b", x=("n", 3, 6, 6))
    model = edit.load(path)
    found = labels.label(model, products.find(model))
    assert found.fixed[found.writers[0][1]].all()


EXPERTS, INNER = 3, 4


@pytest.mark.parametrize(
    ("given", "first", "second", "bias", "own"),
    [
        (("n", 5), (EXPERTS, 5, INNER), (EXPERTS, INNER, 2), (EXPERTS, 1, INNER), EXPERTS * INNER),
        (("n", 1, 7, 5), (EXPERTS, 5, INNER), (EXPERTS, INNER, 2), (INNER,), EXPERTS * INNER),
        ((EXPERTS, "n", 5), (EXPERTS, 5, INNER), (EXPERTS, INNER, 2), (EXPERTS, 1, INNER), EXPERTS * INNER),
        (("n", EXPERTS, 7, 5), (EXPERTS, 5, INNER), (INNER, 2), (EXPERTS, 1, INNER), INNER),
        (("n", EXPERTS, 7, 5), (1, 5, INNER), (INNER, 2), (INNER,), INNER),
        ((2, EXPERTS, 7, 5), (2, EXPERTS, 5, INNER), (2, EXPERTS, INNER, 2), (1, INNER), 2 * EXPERTS * INNER),
        (("n", "m", 7, 5), (EXPERTS, 5, INNER), (EXPERTS, INNER, 2), (EXPERTS, 1, INNER), EXPERTS * INNER),
    ],
    ids=["rows", "batch", "own rows", "one for all behind", "a stack of one", "two axes", "unknown"],
)
def test_each_channel_of_each_expert_has_a_factor(
    tmp_path: Path, given: Any, first: Any, second: Any, bias: Any, own: int
) -> None:
    nodes = [
        node("MatMul", "x w", "a"),
        node("Add", "a b", "c"),
        node("Relu", "c", "r"),
        node("MatMul", "r v", "y"),
    ]
    weights: Weights = {"w": normal(*first), "b": normal(*bias, seed=1), "v": normal(*second, seed=2)}
    path = save_graph(tmp_path, nodes, weights, x=given)
    model = edit.load(path)
    found = labels.label(model, products.find(model))
    free = {int(label) for _, each in found.writers for label in each if not found.fixed[label]}
    shared = {int(label) for _, each in found.readers for label in each} & free
    assert len(shared) == (0 if "m" in given else own)
    factors = np.ones(found.count)
    factors[list(shared)] = 2.0 ** np.arange(len(shared))
    x = {"x": normal(*(EXPERTS if size in ("n", "m") else size for size in given))}
    before = run_model(ir.load(path), x)["y"]
    found.divide(factors)
    np.testing.assert_allclose(run_model(model, x)["y"], before, rtol=1e-4, atol=1e-4)


def test_experts_of_which_only_some_meet_the_same_rows_stay(tmp_path: Path) -> None:
    path = save_graph(tmp_path, [node("MatMul", "x w", "y")], {"w": normal(2, EXPERTS, 5, 4)}, x=(2, 1, 7, 5))
    assert [product.groups for product in products.find(edit.load(path))] == []


def test_two_shapes_are_divided_into_groups_of_the_same_size() -> None:
    def group(ours: list[Any], theirs: list[Any]) -> list[tuple[list[int], list[int]]]:
        return [(list(one), list(other)) for one, other in axes.group_axes(ours, theirs)]

    assert group(["n", 6, "h"], ["n", 2, 3, "h"]) == [([0], [0]), ([1], [1, 2]), ([2], [3])]
    assert group(["n", 5, 12], ["m", 12]) == [([0, 1], [0]), ([2], [1])]
    assert group(["n", 24], ["n", 6, 2, 2]) == [([0], [0]), ([1], [1, 2, 3])]
    assert group([None, 6], [None, 6]) == [([0], [0]), ([1], [1])]
    assert group([4, 6], [6, 4]) == [([0, 1], [0, 1])]
    assert group([4], [2, 2, "n"]) == [([0], [0, 1, 2])]
