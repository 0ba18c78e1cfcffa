"""Bring a graph to float16 or bfloat16: convert constants and attributes, and put Cast nodes where the types meet.

The products of the graph, and what lies between them, go to the low type, the rest stays in float32. The result is
strongly typed: every value has one type, and where types meet stands a Cast, as few of them as can be. The softmax
inside an Attention operator has no type of its own here: TensorRT refuses the attribute ``softmax_precision``, and its
fused kernels add up in float32 anyway, as those of ONNX Runtime do.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from enginesmith.pipeline.errors import InvalidGraph, UsageError
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.frameworks.onnx.edit import Names, add_constant
from enginesmith.pipeline.frameworks.onnx.model_file import FLOAT32_KEY
from enginesmith.pipeline.passes.float16.bounds import MASKS
from enginesmith.pipeline.passes.float16.rules import (
    DEQUANTIZE,
    QUANTIZE,
    Judged,
    choose,
    find_dequantizers,
    find_opset,
    find_remedy,
    is_float,
    is_product,
    judge,
)
from enginesmith.pipeline.tensors import Array

Half = Literal["fp16", "bf16"]
_NOTHING: Mapping[str, float] = MappingProxyType({})
_CHEAP = "its neighbors are in float32"
_ALONE = "no product beside it can be lowered"
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
_SHORT = {"FLOAT": "fp32", "FLOAT16": "fp16", "BFLOAT16": "bf16"}


@dataclass(frozen=True)
class Lowered:
    """The changes to a graph, by names of nodes in its order."""

    dtype: Half
    nodes: tuple[str, ...]
    """Nodes that compute in the low type now."""
    kept: Mapping[str, str]
    """Nodes that stayed in float32, and why."""
    casts: tuple[str, ...]
    """Cast nodes that were put in."""
    remedy: str
    """Advice where no node is in the low type; empty where some are."""


def lower(
    model: "ir.Model", dtype: Half, *, keep: Collection[str] = (), largest: Mapping[str, float] = _NOTHING
) -> Lowered:
    """Lower a float32 graph, or one with Q/DQ pairs, in place; constants are converted when it is saved.

    Its inputs and outputs stay in float32. ``keep`` names nodes that are to stay. ``largest`` is the largest magnitude
    of values on real data, by name: in float16, nodes around one that may get beyond 65504 stay (``bounds``).

    Raises:
        UsageError: ``keep`` names a node that is not there.
        InvalidGraph: the graph is in a low type already.
    """
    target, opset = find_type(dtype), model.opset_imports.get("", 1)
    _prepare(model)
    _check(model, keep)
    judged = judge(model.graph, opset, target.name.lower(), keep, largest)
    low = judged.low | choose(model.graph, judged)
    remedy = "" if low else _find_remedy(model.graph, opset, target.name.lower())
    order = [node for node in model.graph if node in low]
    reasons = {node.name or "": reason for node, reason in judged.kept.items()}
    reasons |= {node.name or "": _CHEAP if low else _ALONE for node in judged.free if node not in low}
    _fit_scales(model.graph, low, target)
    retyper = _Retyper(model.graph, Judged({node: judged.slots[node] for node in order}), target)
    retyper.run()
    names = tuple(node.name or "" for node in order if node.graph is not None)
    return Lowered(dtype, names, reasons, tuple(retyper.casts), remedy)


def mark_kept(model: "ir.Model", lowered: Lowered) -> None:
    """Mark the nodes that stayed in float32, for engines that else choose types by themselves."""
    for node in model.graph:
        if reason := lowered.kept.get(node.name or ""):
            node.metadata_props[FLOAT32_KEY] = reason


def is_lowerable(model: "ir.Model") -> bool:
    """Tell whether a product of a graph can be in float16; the graph is prepared for that, and not lowered."""
    _prepare(model)
    return bool(judge(model.graph, model.opset_imports.get("", 1), "float16", (), _NOTHING).low)


def _find_remedy(graph: "ir.Graph", opset: int, dtype: str) -> str:
    if remedy := find_remedy(graph):
        return remedy
    if (later := find_opset(graph, opset, dtype)) is not None:
        return f"export it again with --opset {later} or later"
    return "use fp32"


def find_type(dtype: Half) -> "ir.DataType":
    """Find ONNX's type of a half precision."""
    return {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}[dtype]


def _prepare(model: "ir.Model") -> None:
    """Make constants initializers that cannot be fed, name every node and type every value."""
    from onnx_ir.passes import common

    edit.fix_weights(model)
    edit.lift_constants(model)
    common.NameFixPass()(model)
    if any(value.type is None for node in model.graph.all_nodes() for value in node.outputs):
        declared = [(value.name, value.shape) for value in model.graph.outputs]
        edit.infer_shapes(model)
        for value, (name, shape) in zip(model.graph.outputs, declared, strict=True):
            value.name, value.shape = name, shape


def _check(model: "ir.Model", keep: Collection[str]) -> None:
    """Refuse a graph that is in a low type already, and names in ``keep`` that no node has."""
    if unknown := sorted(set(keep) - {node.name for node in model.graph}):
        raise UsageError(f"the graph has no node {unknown[0]!r} that could be kept in float32", "name a node of it")
    halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    read = [(node, value) for node in model.graph if is_product(node) for value in node.inputs if value is not None]
    done = [(node.name, value.dtype) for node, value in read if value.dtype in halves]
    if done and not any(is_float(value) for _, value in read):
        name, dtype = done[0]
        raise InvalidGraph(
            f"the graph is in {dtype.name.lower()} already: all its products are, as {name!r} is",
            "give the float32 graph",
        )


# Constants: each is converted when it is written, so that no second copy is in memory.


def _convert(source: "ir.TensorProtocol", dtype: "ir.DataType", name: str, *, mask: bool = False) -> "ir.LazyTensor":
    """Return a constant of float32 in another float type, see :func:`narrow`."""

    def make() -> "ir.TensorProtocol":
        return ir.tensor(narrow(source.numpy(), dtype, mask=mask), name=name)

    return ir.LazyTensor(make, dtype, ir.Shape(source.shape.numpy()), name=name)


def narrow(array: Array, dtype: "ir.DataType", *, mask: bool = False) -> Array:
    """Round to nearest in another float type; what is beyond its range is brought to its end, infinities are kept.

    A mask goes to half of the range, infinities too: scores are added to it, and the sum must not become NaN.
    """
    limit = _find_largest(dtype) / 2 if mask else _find_largest(dtype)
    if array.size and not (array.min() >= -limit and array.max() <= limit):
        cut = np.clip(array, -limit, limit)
        array = cut if mask else np.where(np.isfinite(array), cut, array)
    return array.astype(dtype.numpy())


def _find_largest(dtype: "ir.DataType") -> float:
    """Return the largest number that is not infinite."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype.numpy()).max)  # type: ignore[no-untyped-call]


class _Retyper:
    """Changes the nodes of one graph; keeps the names of casts that were put in."""

    def __init__(self, graph: "ir.Graph", low: Judged, dtype: "ir.DataType") -> None:
        """Take the nodes to change, and what of each changes, as the slots of ``low``."""
        self._graph, self._low, self._dtype = graph, low, dtype
        self._names = Names(graph)
        self.casts: list[str] = []

    def run(self) -> None:
        """Convert everything."""
        for value in list(self._graph.initializers.values()):
            if is_float(value):
                self._change_constant(value)
        nodes = list(self._graph)
        for value in list(self._graph.inputs):
            if is_float(value):
                self._change_value(value, low=False)
        for node in nodes:
            for index, value in enumerate(node.outputs):
                if is_float(value):
                    self._change_value(value, low=self._low.makes_low(node, index))
        for node in self._low.slots:
            if self._low.slots[node].outputs:
                change_attributes(node, _TYPE_ATTRIBUTES, ir.DataType.FLOAT, self._dtype)
        self._drop_idle_casts(nodes)

    def _change_constant(self, value: "ir.Value") -> None:
        """Convert a constant; one that float32 nodes read too is kept beside."""
        uses = value.uses()
        low = [(node, index) for node, index in uses if self._low.takes_low(node, index)]
        if not low:
            return
        assert value.const_value is not None
        mask = any(index in MASKS.get(node.op_type, ()) for node, index in low)
        if len(low) == len(uses) and not value.is_graph_output():
            value.const_value = _convert(value.const_value, self._dtype, value.name or "", mask=mask)
            value.dtype = self._dtype
            return
        name = self._names.new(f"{value.name}_{_SHORT[self._dtype.name]}")
        new = ir.Value(name=name, shape=value.shape, type=ir.TensorType(self._dtype))
        new.const_value = _convert(value.const_value, self._dtype, name, mask=mask)
        self._graph.register_initializer(new)
        for node, index in low:
            node.replace_input_with(index, new)

    def _change_value(self, value: "ir.Value", *, low: bool) -> None:
        """Set a value's type, and cast it once for all that want the other."""
        others = [(node, index) for node, index in value.uses() if self._low.takes_low(node, index) != low]
        leaves = low and value.is_graph_output()
        if low:
            value.dtype = self._dtype
        if not others and not leaves:
            return
        mask = not low and any(index in MASKS.get(node.op_type, ()) for node, index in others)
        new = self._cast(value, ir.DataType.FLOAT if low else self._dtype, mask=mask)
        for node, index in others:
            node.replace_input_with(index, new)
        if leaves:
            hand_over(self._graph, value, new)

    def _cast(self, value: "ir.Value", dtype: "ir.DataType", *, mask: bool) -> "ir.Value":
        """Insert a Cast right after the value's maker; before it a Clip, if a mask is cast."""
        name = self._names.new(f"{value.name}_{_SHORT[dtype.name]}")
        nodes = [self._clip(value, name)] if mask else []
        nodes.append(
            new_node("Cast", [nodes[0].outputs[0] if nodes else value], {"to": dtype.value}, name, dtype, value)
        )
        edit.insert_behind(self._graph, value, nodes)
        self.casts.append(name)
        return nodes[-1].outputs[0]

    def _clip(self, value: "ir.Value", name: str) -> "ir.Node":
        """Clip a mask to the range of the type that it is cast to, where its lowest number would become infinite."""
        limit = _find_largest(self._dtype) / 2
        bounds = []
        for word, number in (("low", -limit), ("high", limit)):
            content = np.array(number, np.float32)
            bounds.append(add_constant(self._graph, self._names.new(f"{name}_{word}"), content))
        return new_node("Clip", [value, *bounds], {}, self._names.new(f"{name}_clipped"), ir.DataType.FLOAT, value)

    def _drop_idle_casts(self, nodes: "Iterable[ir.Node]") -> None:
        """Remove casts of the given graph from a type to itself, now that both its sides are the same."""
        for node in nodes:
            source = node.inputs[0] if node.op_type == "Cast" else None
            if source is None or source.dtype is None or source.dtype != node.outputs[0].dtype:
                continue
            if not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(source)
                self._graph.remove(node, safe=True)


def change_attributes(node: "ir.Node", names: "Iterable[str]", old: "ir.DataType", new: "ir.DataType") -> None:
    """Change a type that attributes of these names have to another one, and that of what ConstantOfShape fills with."""
    for name in names:
        if name in node.attributes and node.attributes[name].value == old:
            node.attributes[name] = ir.AttrInt64(name, new)
    if node.op_type == "ConstantOfShape":
        given = node.attributes.get("value")
        fill = given.as_tensor().numpy() if given is not None else np.zeros(1, np.float32)
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(narrow(fill, new)))


def hand_over(graph: "ir.Graph", value: "ir.Value", new: "ir.Value") -> None:
    """Make another value the graph's output, under its name, where the value is one."""
    places = [place for place, output in enumerate(graph.outputs) if output is value]
    if places:
        name, value.name, new.name = value.name, new.name, None
        new.name = name
        for place in places:
            graph.outputs[place] = new


def new_node(
    operator: str,
    inputs: "list[ir.Value]",
    attributes: dict[str, int],
    name: str,
    dtype: "ir.DataType",
    like: "ir.Value",
) -> "ir.Node":
    """Return a node with one output of its name, of the shape and the module of another value."""
    node = ir.node(operator, inputs, attributes, name=name)
    output = node.outputs[0]
    output.name, output.shape, output.type = name, like.shape, ir.TensorType(dtype)
    maker = like.producer()
    if maker is not None:
        node.metadata_props.update(maker.metadata_props)
    return node


# Scales of Q/DQ pairs made fit for a narrow float type, before they change to it.
#
# A pair quantizes and dequantizes with the same number, also where only one of the two changes its type. No scale is
# smaller than the smallest number with all its bits (6.1e-5 in float16): TensorRT refuses 0. Integers behind a
# scale that had to be raised are divided by as much.

_SCALE, _ZERO_POINT = 1, 2


def _fit_scales(graph: "ir.Graph", low: "dict[ir.Node, None]", dtype: "ir.DataType") -> None:
    """Round the scales of all pairs with a node in ``low`` to numbers of ``dtype``; they stay float32 here."""
    import ml_dtypes

    smallest = np.float32(ml_dtypes.finfo(dtype.numpy()).smallest_normal)  # type: ignore[no-untyped-call]
    scales: dict[ir.Value, None] = {}
    for node in graph:
        pair = [node, *find_dequantizers(node)] if node.op_type == QUANTIZE else [node]
        if node.op_type in (QUANTIZE, DEQUANTIZE) and any(side in low for side in pair):
            scales |= {value: None for side in pair if (value := _get_constant(side, _SCALE)) is not None}
    for scale in scales:
        assert scale.const_value is not None
        before = scale.const_value.numpy()
        after = np.maximum(narrow(before, dtype).astype(np.float32), smallest)
        if not np.array_equal(before, after):
            _set_content(scale, after)
            raised = after > before * (1 + 2.0**-8)  # mere rounding of the scale is let be
            if raised.any():
                _requantize(graph, scale, np.where(raised, before / after, 1).astype(np.float32))


def _requantize(graph: "ir.Graph", scale: "ir.Value", factors: Array) -> None:
    """Multiply integers that lie in the file by these factors, which their scale was divided by."""
    readers: dict[tuple[ir.Value, ir.Value | None], list[ir.Node]] = {}
    for node, index in scale.uses():
        levels = _get_constant(node, 0)
        if node.op_type == DEQUANTIZE and index == _SCALE and levels is not None:
            readers.setdefault((levels, _get_constant(node, _ZERO_POINT)), []).append(node)
    for (levels, zero), nodes in readers.items():
        assert levels.const_value is not None
        node, array = nodes[0], levels.const_value.numpy()
        offset = 0.0 if zero is None or zero.const_value is None else _spread(zero.const_value.numpy(), node, array)
        moved = (array.astype(np.float32) - offset) * _spread(factors, node, array)
        whole = np.issubdtype(array.dtype, np.integer) or "int" in array.dtype.name
        if len(levels.uses()) > len(nodes):  # others read the same integers with another scale
            name = f"{levels.name}_{node.name}"
            levels = ir.Value(name=name, shape=levels.shape, type=levels.type, const_value=levels.const_value)
            graph.register_initializer(levels)
            for reader in nodes:
                reader.replace_input_with(0, levels)
        _set_content(levels, ((np.rint(moved) if whole else moved) + offset).astype(array.dtype))


def _spread(array: Array, node: "ir.Node", levels: Array) -> Array:
    """Spread the scales or zero points of a node to its levels."""
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    return edit.spread(array.astype(np.float32), levels.shape, axis, block)


def _get_constant(node: "ir.Node", index: int) -> "ir.Value | None":
    value = edit.find_input(node, index)
    return value if value is not None and value.is_initializer() and value.const_value is not None else None


def _set_content(value: "ir.Value", array: Array) -> None:
    value.const_value = ir.tensor(np.asarray(array), dtype=value.dtype, name=value.name)
