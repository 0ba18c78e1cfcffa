"""Static quantisation: QuantizeLinear/DequantizeLinear pairs around the products of a float graph."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.calibration.ranges import Method, Ranges
from enginesmith.pipeline.errors import InvalidGraph, UsageError
from enginesmith.pipeline.passes.quantize import bias_correction, layers, placement, quantizers
from enginesmith.pipeline.passes.quantize.layers import QuantizableOp
from enginesmith.pipeline.passes.quantize.placement import RULES, SIMULATED, Plan, Rules
from enginesmith.pipeline.passes.quantize.precisions import Placement
from enginesmith.pipeline.passes.quantize.quantizers import Grid, Narrow, Number, Rest, Scales
from enginesmith.pipeline.passes.quantize.writer import Stored, Writer
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir


# What has to hold of a graph before anything in it is quantised.

ON_REQUEST = "the assignment keeps it in floating point"
"""Why a group is not quantised that could be."""
_MARKS = ("Quantize", "QLinear", "Integer", "NBits", "MatMulBnb4", "QGemm", "QAttention")
_STANDARD = ("", "ai.onnx")
_INITIALISERS_ARE_NO_INPUTS = 4  # IR version from which weights need not be listed as inputs
_SHOWN = 3


def prepare(model: "ir.Model", precision: str, keep: Collection[str] = ()) -> tuple[QuantizableOp, ...]:
    """Make a float32 graph flat, with weights that cannot be fed and names for all nodes; its groups.

    Raises:
        InvalidGraph: it is quantised already, not in float32, or has no product.
        UsageError: ``keep`` names groups that there are none of.
    """
    import onnx_ir as ir
    from onnx_ir.passes import common

    _preparation_hold(model, precision)
    model.ir_version = max(model.ir_version, _INITIALISERS_ARE_NO_INPUTS)
    ir.passes.Sequential(common.InlinePass(), common.RemoveInitializersFromInputsPass())(model)
    found = layers.find(model)
    if unknown := sorted(set(keep) - {group.name for group in found}):
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise UsageError(
            f"{', '.join(map(repr, unknown[:_SHOWN]))}{more} are to stay in floating point, and the graph has no "
            "such products",
            "take the names from the table of groups of this graph",
        )
    return found


def require_opset(model: "ir.Model", least: int, precision: str) -> None:
    """Convert a graph to the opset that a precision needs, if it is older.

    Raises:
        InvalidGraph: it cannot be converted.
    """
    from onnxscript import version_converter

    given = _opset(model)
    if given >= least:
        return
    try:
        version_converter.convert_version(model, target_version=least, fallback=True)
    except (ValueError, RuntimeError) as error:
        raise _too_old(given, least, precision) from error
    if _opset(model) < least:
        raise _too_old(given, least, precision)


def _opset(model: "ir.Model") -> int:
    return max((model.graph.opset_imports.get(domain, 0) for domain in _STANDARD), default=0)


def _too_old(given: int, least: int, precision: str) -> InvalidGraph:
    return InvalidGraph(
        f"the graph has opset {given}, {precision} needs opset {least}, and it cannot be converted",
        f"export it with --opset {least} or later",
    )


def _preparation_hold(model: "ir.Model", precision: str) -> None:
    import onnx_ir as ir

    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if any(mark in node.op_type for mark in _MARKS):
            raise InvalidGraph(
                f"the graph is quantised already: it has a {node.op_type} ({node.name or node.outputs[0].name!r}), and "
                f"{precision} is made of a float32 graph",
                "give the graph as it was before",
            )
    low = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    for value in values:
        if value.const_value is not None and value.const_value.dtype in low and value.const_value.size > 1:
            raise InvalidGraph(
                f"the weight {value.name!r} is {value.const_value.dtype.name.lower()}, and {precision} is made of a "
                "float32 graph",
                "export the model in float32: precisions that mix types lower the rest themselves",
            )


def require_products(
    found: Collection[QuantizableOp],
    precision: str,
    usable: Collection[QuantizableOp],
    operators: Collection[str] = layers.PRODUCTS,
) -> None:
    """Refuse a graph that has nothing to quantise.

    Raises:
        InvalidGraph: says which operators would be, or why those that are there cannot be.
    """
    if usable:
        return
    reasons = sorted({f"{group.operator}: {group.reason}" for group in found if group.reason})
    what = f"has no product that can be in {precision}" + (f" ({'; '.join(reasons[:_SHOWN])})" if reasons else "")
    raise InvalidGraph(
        f"the graph {what}; {', '.join(operators)} with a constant float32 weight can", "use fp16 or fp32"
    )


Correct = Callable[["ir.Node", Array, Array], Array | None]
"""A product before it is changed, its float weight and the one it gets (float32, as the node reads them) → what to add
to its bias, a number for each output channel; None to leave it.
"""
_WEIGHT, _BIAS = 1, 2
_OPSET: Mapping[Number, int] = {"int8": 13, "fp8": 19}
"""The first opset whose QuantizeLinear makes the number, with a scale per channel."""
_OPSET_OF_HALF_SCALES = 19


@dataclass(frozen=True)
class Settings:
    """How a graph is quantised."""

    number: Number = "int8"
    placement: Placement = "inputs"
    method: Method = "minmax"
    """Whose ranges; fp8 has the range to spare, and takes the largest number seen."""
    weight_bits: int = 8
    """7 keeps int8 weights within ±63: processors without VNNI add two products in 16 bits, and saturate."""
    per_channel: bool = True
    rest: Rest = "fp32"
    """What the scales will be stored in."""
    keep: frozenset[str] = frozenset()
    """Names of groups that stay in floating point."""
    inputs_only: bool = False
    """Whether only inputs of products are rounded, each product's apart from the others', for measuring them."""

    @property
    def rules(self) -> Rules:
        """Return the rules by which pairs are placed."""
        if self.number == "fp8" and self.placement == "inputs+outputs":
            return SIMULATED
        rules = RULES[self.placement]
        return Rules(rules.products, rules.symmetric, outputs=False, residual=False) if self.inputs_only else rules


@dataclass(frozen=True)
class Quantised:
    """What was done to a graph."""

    pairs: int
    """QuantizeLinear nodes, each with its DequantizeLinear."""
    groups: tuple[QuantizableOp, ...]
    """All of them, in the order of the graph."""
    left: Mapping[str, str] = field(default_factory=dict)
    """Name of a group that stays in floating point → why."""

    @property
    def done(self) -> tuple[QuantizableOp, ...]:
        """Return the groups in few bits."""
        return tuple(group for group in self.groups if group.name not in self.left)


def quantise(model: "ir.Model", ranges: Ranges, settings: Settings, correct: Correct | None = None) -> Quantised:
    """Quantise a float32 graph in place; ``correct`` is called for each weight, one after the other.

    Raises:
        InvalidGraph: it is quantised already, or has none of the operators that can be.
        UsageError: the ranges are of another graph, or ``keep`` names groups that there are none of.
    """
    half = settings.rest == "fp16"
    require_opset(model, max(_OPSET[settings.number], _OPSET_OF_HALF_SCALES if half else 0), settings.number)
    found = prepare(model, settings.number, settings.keep)
    require_products(found, settings.number, [group for group in found if not group.reason])
    scales = Scales(ranges, settings.number, settings.method, settings.rest, symmetric=settings.rules.symmetric)
    _hold(found, ranges)
    nodes = {str(node.name): node for node in model.graph}
    left = {group.name: why for group in found if (why := _reason(group, nodes[group.name], scales, settings))}
    chosen = [group for group in found if group.name not in left]
    plan = placement.place(model, (nodes[group.name] for group in chosen), settings.rules, scales.problem)
    grids = _grids(plan, scales)
    writer = Writer(model.graph)
    narrowed = _Weights(writer, settings, correct)
    for group in chosen:
        node = nodes[group.name]
        narrowed.quantise(group, node, grids[_input(node, 0)])
    for value, grid in grids.items():
        writer.pair(value, grid, None if value in plan.native else plan.readers[value])
    writer.finish(model)
    return Quantised(len(grids), found, left)


def _hold(found: "Iterable[QuantizableOp]", ranges: Ranges) -> None:
    """Refuse ranges that are of another graph."""
    names = {name for group in found if not group.reason for name in group.activations}
    if names and not names & set(ranges.tensors):
        shown = ", ".join(sorted(names)[:3])
        raise UsageError(
            f"the ranges are of another model: they have {len(ranges.tensors)} values, and none that its products "
            f"read ({shown})",
            "calibrate this graph",
        )


def _reason(group: QuantizableOp, node: "ir.Node", scales: Scales, settings: Settings) -> str:
    """Explain why a group stays in floating point; empty if it does not."""
    rules = settings.rules
    if group.reason:
        return group.reason
    if group.name in settings.keep:
        return ON_REQUEST
    if node.op_type not in rules.products:
        return f"there is no int8 kernel for {node.op_type}"
    if node.op_type in rules.integer_bias and (why := _bias_problem(node)):
        return why
    if why := scales.problem(_input(node, 0)):
        return f"its input {why}"
    if rules.outputs and node.op_type in layers.CONVOLUTIONS and (why := scales.problem(placement.written(node))):
        return f"its output {why}"
    weight = layers.tensor(node.inputs[_WEIGHT])
    assert weight is not None, group
    numbers = weight.numpy()
    largest = float(np.abs([numbers.max(), numbers.min()]).max()) if numbers.size else 0.0
    if not largest:
        return "its weight is all zero"
    return "" if np.isfinite(largest) else "its weight is not finite"


def _bias_problem(node: "ir.Node") -> str:
    bias = node.inputs[_BIAS] if len(node.inputs) > _BIAS else None
    if bias is None:
        return ""
    found = layers.tensor(bias)
    if found is None:
        return "its bias is computed"
    columns = node.inputs[_WEIGHT].shape  # type: ignore[union-attr]
    wide = columns is not None and found.size == columns[0 if node.attributes.get_int("transB", 0) else 1]
    if not wide or node.attributes.get_float("beta", 1.0) != 1 or node.attributes.get_float("alpha", 1.0) != 1:
        return "its bias is not added as it is, one number for each column"
    return ""


def _input(node: "ir.Node", index: int) -> "ir.Value":
    value = node.inputs[index]
    assert value is not None, node
    return value


def _grids(plan: Plan, scales: Scales) -> "dict[ir.Value, Grid]":
    """Return a grid for each value that is rounded; those that have to share one get the widest."""
    parent: dict[ir.Value, ir.Value] = {}

    def root(value: "ir.Value") -> "ir.Value":
        while value in parent:
            value = parent[value]
        return value

    for one, other in plan.same:
        if root(one) is not root(other):
            parent[root(other)] = root(one)
    values = dict.fromkeys((*plan.readers, *plan.native))
    members: dict[ir.Value, list[ir.Value]] = {}
    for value in values:
        members.setdefault(root(value), []).append(value)
    shared = {top: scales.grid(inside) for top, inside in members.items()}
    return {value: shared[root(value)] for value in values}


class _Weights:
    """Puts weights in few bits behind a DequantizeLinear, one at a time."""

    def __init__(self, writer: Writer, settings: Settings, correct: Correct | None) -> None:
        self._writer, self._settings, self._correct = writer, settings, correct
        self._done: dict[tuple[object, ...], tuple[Stored, Array]] = {}

    def quantise(self, group: QuantizableOp, node: "ir.Node", grid: Grid) -> None:
        """Quantise a group's weight, and its bias where the engine wants that."""
        value = _input(node, _WEIGHT)
        weight = layers.tensor(value)
        assert weight is not None, group
        numbers = weight.numpy()
        axis = quantizers.channel_axis(node, numbers.shape) if self._settings.per_channel else None
        least = self._least_scale(node, axis, grid)
        key = (value, axis, least.tobytes())
        if key not in self._done or self._correct is not None:
            narrow = self._narrow(numbers, axis, least)
            if self._correct is not None:
                bias_correction.add(node, self._correct(node, numbers, narrow.wide()))
            if key not in self._done:
                self._done[key] = self._writer.store(str(value.name), narrow), narrow.scale
        stored, scale = self._done[key]
        if node.op_type in self._settings.rules.integer_bias:
            self._integer_bias(node, grid.scale * scale.astype(np.float64))
        node.replace_input_with(_WEIGHT, self._writer.dequantised(stored, node))

    def _narrow(self, weight: Array, axis: int | None, least: Array) -> Narrow:
        settings = self._settings
        return quantizers.symmetric(weight, axis, settings.number, settings.rest, settings.weight_bits, least)

    def _least_scale(self, node: "ir.Node", axis: int | None, grid: Grid) -> Array:
        """Compute the smallest scale of a weight: ONNX Runtime adds up biases as int32, also those that are floats."""
        bias = bias_correction.read(node) if self._settings.rules.outputs else None
        if bias is None:
            return np.zeros(())
        least = quantizers.least_scale(bias.reshape(-1), grid.scale)
        return least if axis is not None else np.asarray(least.max())

    def _integer_bias(self, node: "ir.Node", scale: Array) -> None:
        bias = bias_correction.read(node)
        if bias is None:
            return
        levels = quantizers.integer_bias(bias.reshape(-1), scale)
        narrow = Narrow(levels, scale.astype(np.float32), 0 if scale.ndim else None)
        stored = self._writer.store(str(_input(node, _BIAS).name), narrow)
        node.replace_input_with(_BIAS, self._writer.dequantised(stored, node))
