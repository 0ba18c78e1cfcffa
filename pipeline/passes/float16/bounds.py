"""Find nodes that samples let go to float16, and that larger inputs would break there.

Bounds through many layers explode and say nothing. These are local: what was seen of a value, times 4, as inputs may be
that much larger than the samples'; of a value that is a power of another, times 4 to that power. Its degree follows it
through sums and moves and is halved by a root. What bounds cannot show is found by its form: a guard against a division
by zero that is itself zero in float16, and a variance computed as a difference of two large numbers.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir

WIDER = 4.0
"""Inputs may be this many times as large as the samples'."""
LARGEST = float(np.finfo(np.float16).max)
MASKS = {"Attention": (3,)}
"""Inputs that are added to scores: numbers beyond the range mean "not this one", and so do the lowest within it."""
LIMITS = {"Clip": (1, 2), "Pad": (2,)}
SPARED = {**MASKS, **LIMITS}
"""Inputs that say the same when they are brought to the end of the range."""
_MOVES = frozenset({"Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_LINEAR = frozenset({"GlobalAveragePool", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceSum", "Neg", "Abs"})
_BOUNDED = frozenset({"Clip", "Cos", "HardSigmoid", "Sigmoid", "Sin", "Softmax", "Softsign", "Tanh"})
"""Operators whose results stay in a range, however large the input is."""
_NOT_NEGATIVE = frozenset({"Abs", "Relu", "ReduceL1", "ReduceL2", "ReduceSumSquare", "Sqrt"})
_MEANS = frozenset({"GlobalAveragePool", "ReduceMean"})
_VARIANCE = "a variance as a difference of two means, of which few bits are left"


def find_islands(graph: "ir.Graph", dtype: str, largest: Mapping[str, float]) -> "dict[ir.Node, str]":
    """Return the nodes to keep in float32, and why; ``largest`` as in :func:`convert.lower`, ``dtype`` ONNX's name."""
    islands: dict[ir.Node, str] = {}
    bounds = _compute_bounds(graph, largest) if dtype == "float16" else {}
    for node in graph:
        for part in _match_variance(node):
            islands.setdefault(part, _VARIANCE)
        reason = _explain_bound(node, bounds)
        if not reason and dtype == "float16":
            reason = _explain_guard(node)
        if reason:
            islands.setdefault(node, reason)
    return islands


# Values that may exceed the range.


def _compute_bounds(graph: "ir.Graph", largest: Mapping[str, float]) -> "dict[ir.Value, float]":
    """Compute how large each value may get, of those that were seen; only those that float16 does not hold."""
    degrees: dict[ir.Value, float] = {}
    bounds: dict[ir.Value, float] = {}
    for value in graph.inputs:
        _note(bounds, value, largest.get(value.name or "", 0.0) * WIDER)
    for node in graph:
        degree = _find_degree(node, degrees)
        for value in node.outputs:
            degrees[value] = degree
            magnitude = largest.get(value.name or "", 0.0)
            if node.op_type == "Exp":
                _note(bounds, value, math.exp(min(WIDER * math.log(magnitude), 700.0)) if magnitude > 1 else magnitude)
            else:
                _note(bounds, value, magnitude if node.op_type in _BOUNDED else magnitude * WIDER**degree)
    return bounds


def _note(bounds: "dict[ir.Value, float]", value: "ir.Value", bound: float) -> None:
    if bound > LARGEST and value.dtype == ir.DataType.FLOAT:
        bounds[value] = bound


def _find_degree(node: "ir.Node", degrees: "Mapping[ir.Value, float]") -> float:
    """Find the power of the factor by which a result grows with the input: 2 of a square."""
    first = node.inputs[0] if node.inputs else None
    before = degrees.get(first, 1.0) if first is not None else 1.0
    power = _find_power(node)
    if power != 1:
        return min(max(before * power, 0.0), 16.0)
    if node.op_type == "Sqrt":
        return before / 2
    if node.op_type in _MOVES or node.op_type in _LINEAR:
        return before
    if node.op_type in ("Add", "Sub", "Sum", "Max", "Mul", "Div"):
        return max((degrees.get(value, 1.0) for value in node.inputs if value is not None), default=1.0)
    return 1.0


def _find_power(node: "ir.Node") -> float:
    """Return the exponent of a power of a single value, however it is written; 1 of anything else."""
    if node.op_type == "ReduceSumSquare" or (node.op_type == "Mul" and node.inputs[0] is node.inputs[1]):
        return 2.0
    exponent = _read_number(node.inputs[1]) if node.op_type == "Pow" else None
    return 1.0 if exponent is None else exponent


def _explain_bound(node: "ir.Node", bounds: "Mapping[ir.Value, float]") -> str:
    """Explain which value that the node reads or makes may be too large; empty if none is."""
    spared = SPARED.get(node.op_type, ())
    values = [value for index, value in enumerate(node.inputs) if index not in spared]
    for value in (*values, *node.outputs):
        if value is not None and value in bounds:
            reach = f"{value.name!r} may reach {bounds[value]:.3g} on inputs {WIDER:.0f} times as large as the samples'"
            return f"{reach}, and float16 ends at {LARGEST:.0f}"
    return ""


# Divisions by a number that a small constant keeps from being zero.


def _explain_guard(node: "ir.Node") -> str:
    """Explain that a constant which guards this node from a division by zero is zero; empty if none is."""
    if node.op_type not in ("Div", "Reciprocal", "Add", "Max", "Clip", "Sqrt"):
        return ""
    value = node.inputs[1] if node.op_type == "Div" else node.outputs[0]
    if node.op_type == "Reciprocal":
        value = node.inputs[0]
    power = 1.0
    maker = value.producer() if value is not None else None
    while maker is not None and (maker.op_type in _MOVES or maker.op_type == "Sqrt") and maker.inputs[0] is not None:
        power /= 2 if maker.op_type == "Sqrt" else 1
        maker = maker.inputs[0].producer()
    guard = _find_guard(maker) if maker is not None else 0.0
    if guard > 0 and float(np.float16(guard**power)) == 0:
        return (
            f"its constant {guard:.3g} is 0 in float16"
            if maker is node
            else f"divides by what may be {guard**power:.3g}, which is 0 in float16"
        )
    return ""


def _find_guard(node: "ir.Node") -> float:
    """Return the constant that keeps the result from zero; 0 if there is none, or the rest is not known to reach 0."""
    if node.op_type not in ("Add", "Max", "Clip"):
        return 0.0
    pairs = [(node.inputs[0], node.inputs[1])] if len(node.inputs) > 1 else []
    pairs += [(second, first) for first, second in pairs if node.op_type != "Clip"]
    for value, constant in pairs:
        number = _read_number(constant)
        if number is not None and value is not None and (node.op_type != "Add" or _may_be_zero(value)):
            return number
    return 0.0


def _may_be_zero(value: "ir.Value") -> bool:
    """Tell whether zero is the lower end of what the value can be: a square, a magnitude, or a mean or root of such."""
    node = value.producer()
    while node is not None and (node.op_type in _MOVES or node.op_type in ("ReduceMean", "ReduceSum", "ReduceMax")):
        if node.inputs[0] is None:
            return False
        node = node.inputs[0].producer()
    if node is None:
        return False
    return node.op_type in _NOT_NEGATIVE or _find_power(node) % 2 == 0 or bool(list(_match_variance(node)))


# Cancellation.


def _match_variance(node: "ir.Node") -> "Iterator[ir.Node]":
    """Yield the nodes of E[x^2] - E[x]^2, if the node is the difference."""
    makers = [value.producer() if value is not None else None for value in node.inputs]
    if node.op_type != "Sub" or None in makers:
        return
    mean_of_squares, square_of_mean = makers
    assert mean_of_squares is not None
    assert square_of_mean is not None
    square = _get_maker(mean_of_squares)
    mean = _get_maker(square_of_mean)
    if mean is None or square is None or mean_of_squares.op_type not in _MEANS or mean.op_type not in _MEANS:
        return
    if _find_power(square) == _find_power(square_of_mean) == 2 and square.inputs[0] is mean.inputs[0]:
        yield from (square, mean, mean_of_squares, square_of_mean, node)


def _get_maker(node: "ir.Node") -> "ir.Node | None":
    """Return the node that makes the first input."""
    return node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None


def _read_number(value: "ir.Value | None") -> float | None:
    """Return the number that a constant of one element holds."""
    content = edit.read_constant(value)
    return None if content is None or content.size != 1 else float(content.numpy().reshape(()))
