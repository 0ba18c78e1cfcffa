"""Give nodes another float type: constants converted, Cast nodes where the types meet, attributes that name a type."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np

from enginesmith.pipeline.errors import InvalidGraph, UsageError
from enginesmith.pipeline.frameworks.onnx.edit import Names
from enginesmith.pipeline.passes.float16.rules import DEQUANTISE, MASKS, QUANTISE, Slots, dequantisers, is_float
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir


# Mixed precision: the products of a graph, and what lies between them, in float16 or bfloat16; the rest in float32.
#
# The result is strongly typed: every value has one type, and where types meet stands a Cast, as few of them as can be.
# Rules are in ``rules`` and ``range``. The softmax inside an Attention operator has no type of its own here:
# TensorRT refuses the attribute ``softmax_precision``, and its fused kernels add up in float32 anyway, as those of
# ONNX Runtime do.

Half = Literal["fp16", "bf16"]
_NOTHING: Mapping[str, float] = MappingProxyType({})
_CHEAP = "its neighbours are in float32"


@dataclass(frozen=True)
class Lowered:
    """What was done to a graph, by names of nodes in its order."""

    dtype: Half
    nodes: tuple[str, ...]
    """Those that compute in the low type now."""
    kept: Mapping[str, str]
    """Those that stayed in float32, and why."""
    casts: tuple[str, ...]
    """Cast nodes that were put in."""
    clips: tuple[str, ...]
    """Clip nodes that were put in before the cast of an attention mask, whose lowest number would become infinite."""


def lower(
    model: "ir.Model",
    dtype: Half,
    *,
    keep_io: bool = True,
    keep: Collection[str] = (),
    largest: Mapping[str, float] = _NOTHING,
) -> Lowered:
    """Lower a float32 graph, or one with Q/DQ pairs, in place; constants are converted when it is saved.

    ``keep_io`` leaves inputs and outputs in float32, ``keep`` names nodes that are to stay. ``largest`` is the largest
    magnitude of values on real data, by name: in float16, nodes around one beyond 65504 / 2 stay.

    Raises:
        UsageError: ``keep`` names a node that is not there.
        InvalidGraph: the graph is in a low type already.
    """
    import onnx_ir as ir

    from enginesmith.pipeline.passes.float16.placement import choose
    from enginesmith.pipeline.passes.float16.rules import judge

    target = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}[dtype]
    _prepare(model)
    _hold(model, keep)
    opset = max(model.opset_imports.get(domain, 1) for domain in ("", "ai.onnx"))
    judged = judge(model.graph, opset, target.name.lower(), keep, largest)
    low = judged.low | choose(model.graph, judged, keep_io=keep_io)
    order = [node for node in model.graph if node in low]
    kept = {node.name or "": reason for node, reason in judged.kept.items()}
    kept |= {node.name or "": _CHEAP for node in judged.free if node not in low}
    fit(model.graph, low, target)
    retyper = Retyper(model.graph, {node: judged.slots[node] for node in order}, target)
    retyper.run(keep_io=keep_io)
    names = tuple(node.name or "" for node in order if node.graph is not None)
    return Lowered(dtype, names, kept, tuple(retyper.casts), tuple(retyper.clips))


def _prepare(model: "ir.Model") -> None:
    """Inline functions, make constants initialisers, name every node, type every value."""
    import onnx_ir as ir
    from onnx_ir.passes import common

    model.ir_version = max(model.ir_version, 4)  # from then on weights need not be listed as inputs
    ir.passes.Sequential(
        common.InlinePass(),
        common.RemoveInitializersFromInputsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.NameFixPass(),
    )(model)
    if any(value.type is None for node in model.graph.all_nodes() for value in node.outputs):
        declared = [(value.name, value.shape) for value in model.graph.outputs]
        common.ShapeInferencePass(strict_mode=False)(model)
        for value, (name, shape) in zip(model.graph.outputs, declared, strict=True):
            value.name, value.shape = name, shape


def _hold(model: "ir.Model", keep: Collection[str]) -> None:
    """Refuse what makes no sense."""
    import onnx_ir as ir

    from enginesmith.pipeline.passes.float16.rules import is_float, is_product

    unknown = sorted(set(keep) - {node.name for node in model.graph})
    if unknown:
        raise UsageError(f"the graph has no node {unknown[0]!r} that could be kept in float32", "name a node of it")
    products = [node for node in model.graph if is_product(node)]
    halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    done = [node for node in products if any(value is not None and value.dtype in halves for value in node.inputs)]
    if done and not any(is_float(value) for node in products for value in node.inputs):
        value = next(value for value in done[0].inputs if value is not None and value.dtype in halves)
        assert value.dtype is not None
        raise InvalidGraph(
            f"the graph is in {value.dtype.name.lower()} already: all its products are, as {done[0].name!r} is",
            "give the float32 graph",
        )


# Constants in float16 and bfloat16: each is converted when it is written, so that no second copy is in memory.


def largest(dtype: "ir.DataType") -> float:
    """Return the largest number that is not infinite."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype.numpy()).max)  # type: ignore[no-untyped-call]


def smallest(dtype: "ir.DataType") -> float:
    """Return the smallest number with all its bits."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype.numpy()).smallest_normal)  # type: ignore[no-untyped-call]


def converted(source: "ir.TensorProtocol", dtype: "ir.DataType", name: str, *, mask: bool = False) -> "ir.LazyTensor":
    """A constant of float32 in another float type; what is beyond its range is brought to its end, infinities are kept.

    A mask goes to half of the range, infinities too: scores are added to it, and the sum must not become NaN.
    """
    import onnx_ir as ir

    def make() -> "ir.TensorProtocol":
        return ir.tensor(narrowed(source.numpy(), dtype, mask=mask), name=name)

    return ir.LazyTensor(make, dtype, ir.Shape(source.shape.numpy()), name=name)


def narrowed(array: Array, dtype: "ir.DataType", *, mask: bool = False) -> Array:
    """Return the numbers in another float type, rounded to nearest."""
    limit = largest(dtype) / 2 if mask else largest(dtype)
    if array.size and not (array.min() >= -limit and array.max() <= limit):
        cut = np.clip(array, -limit, limit)
        array = cut if mask else np.where(np.isfinite(array), cut, array)
    return array.astype(dtype.numpy())


_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
_SHORT = {"FLOAT": "fp32", "FLOAT16": "fp16", "BFLOAT16": "bf16"}


class Retyper:
    """Changes the nodes of one graph; keeps the names of casts that were put in."""

    def __init__(self, graph: "ir.Graph", slots: "dict[ir.Node, Slots]", dtype: "ir.DataType") -> None:
        """Take the nodes to change, and what of each changes, as ``slots``."""
        self._graph = graph
        self._slots = slots
        self._dtype = dtype
        self._names = Names(graph)
        self._first = next(iter(graph), None)
        self.casts: list[str] = []
        self.clips: list[str] = []

    def run(self, *, keep_io: bool) -> None:
        """Convert everything."""
        for value in list(self._graph.initializers.values()):
            if is_float(value):
                self._change_constant(value)
        nodes = list(self._graph)
        for value in list(self._graph.inputs):
            if is_float(value):
                self._change_value(value, low=not keep_io, outside_low=not keep_io)
        for node in nodes:
            found = self._slots.get(node, Slots())
            for index, value in enumerate(node.outputs):
                if is_float(value):
                    self._change_value(value, low=index in found.outputs, outside_low=not keep_io)
        for node in nodes:
            if node in self._slots:
                self._change_attributes(node)
        self._drop_idle_casts(nodes)

    def _wants_low(self, node: "ir.Node", index: int) -> bool:
        return node in self._slots and index in self._slots[node].inputs

    def _change_constant(self, value: "ir.Value") -> None:
        """Convert a constant; one that float32 nodes read too is kept beside."""
        import onnx_ir as ir

        uses = value.uses()
        low = [(node, index) for node, index in uses if self._wants_low(node, index)]
        if not low:
            return
        assert value.const_value is not None
        mask = any(index in MASKS.get(node.op_type, ()) for node, index in low)
        if len(low) == len(uses) and not value.is_graph_output():
            value.const_value = converted(value.const_value, self._dtype, value.name or "", mask=mask)
            value.dtype = self._dtype
            return
        name = self._names.new(f"{value.name}_{_SHORT[self._dtype.name]}")
        new = ir.Value(name=name, shape=value.shape, type=ir.TensorType(self._dtype))
        new.const_value = converted(value.const_value, self._dtype, name, mask=mask)
        self._graph.register_initializer(new)
        for node, index in low:
            node.replace_input_with(index, new)

    def _change_value(self, value: "ir.Value", *, low: bool, outside_low: bool) -> None:
        """Set a value's type, and cast it once for all that want the other."""
        import onnx_ir as ir

        others = [(node, index) for node, index in value.uses() if self._wants_low(node, index) != low]
        leaves = value.is_graph_output() and not value.is_graph_input() and outside_low != low
        if low:
            value.dtype = self._dtype
        if not others and not leaves:
            return
        mask = not low and any(index in MASKS.get(node.op_type, ()) for node, index in others)
        new = self._cast(value, ir.DataType.FLOAT if low else self._dtype, mask=mask)
        for node, index in others:
            node.replace_input_with(index, new)
        if leaves:
            self._hand_over(value, new)

    def _hand_over(self, value: "ir.Value", new: "ir.Value") -> None:
        """Make the cast value the graph's output, under its name."""
        name, value.name, new.name = value.name, new.name, None
        new.name = name
        for index, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[index] = new

    def _cast(self, value: "ir.Value", dtype: "ir.DataType", *, mask: bool) -> "ir.Value":
        """Insert a Cast right after the value's maker; before it a Clip, if a mask is cast."""
        maker = value.producer()
        name = self._names.new(f"{value.name}_{_SHORT[dtype.name]}")
        made = [self._clip(value, name)] if mask else []
        made.append(_node("Cast", [made[0].outputs[0] if made else value], {"to": dtype.value}, name, dtype, value))
        if maker is not None:
            self._graph.insert_after(maker, made)
        elif self._first is not None:
            self._graph.insert_before(self._first, made)
        self.casts.append(name)
        return made[-1].outputs[0]

    def _clip(self, value: "ir.Value", name: str) -> "ir.Node":
        """Clip a mask to the range of the type that it is cast to."""
        import numpy as np
        import onnx_ir as ir

        limit = largest(self._dtype) / 2
        bounds = []
        for word, number in (("low", -limit), ("high", limit)):
            bound = ir.Value(
                name=self._names.new(f"{name}_{word}"), shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT)
            )
            bound.const_value = ir.tensor(np.array(number, np.float32), name=bound.name)
            self._graph.register_initializer(bound)
            bounds.append(bound)
        clip = _node("Clip", [value, *bounds], {}, self._names.new(f"{name}_clipped"), ir.DataType.FLOAT, value)
        self.clips.append(clip.name or "")
        return clip

    def _change_attributes(self, node: "ir.Node") -> None:
        """Change the types that attributes name, of what the node makes."""
        import onnx_ir as ir

        if not self._slots[node].outputs:
            return
        for name in _TYPE_ATTRIBUTES:
            if name in node.attributes and node.attributes[name].value == ir.DataType.FLOAT:
                node.attributes[name] = ir.AttrInt64(name, self._dtype)
        if node.op_type == "ConstantOfShape":
            import numpy as np

            given = node.attributes.get("value")
            fill = given.as_tensor().numpy() if given is not None else np.zeros(1, np.float32)
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(narrowed(fill, self._dtype)))

    def _drop_idle_casts(self, nodes: "Iterable[ir.Node]") -> None:
        """Remove casts of the given graph from a type to itself, now that both its sides are the same."""
        for node in nodes:
            source = node.inputs[0] if node.op_type == "Cast" else None
            if source is None or source.dtype is None or source.dtype != node.outputs[0].dtype:
                continue
            if not node.outputs[0].is_graph_output():
                node.outputs[0].replace_all_uses_with(source)
                self._graph.remove(node, safe=True)


def _node(
    operator: str,
    inputs: "list[ir.Value]",
    attributes: dict[str, int],
    name: str,
    dtype: "ir.DataType",
    like: "ir.Value",
) -> "ir.Node":
    """Return a node with one output of its name, of the shape and the module of another value."""
    import onnx_ir as ir

    made = ir.node(operator, inputs, attributes, name=name)
    output = made.outputs[0]
    output.name, output.shape, output.type = name, like.shape, ir.TensorType(dtype)
    maker = like.producer()
    if maker is not None:
        made.metadata_props.update(maker.metadata_props)
    return made


# Scales of Q/DQ pairs made fit for a narrow float type, before they change to it.
#
# A pair quantises and dequantises with the same number, also where only one of the two changes its type. No scale is
# smaller than the smallest number with all its bits (6.1e-5 in float16): TensorRT refuses 0. Integers behind a
# scale that
# had to be raised are divided by as much.

_SCALE, _ZERO_POINT = 1, 2


def fit(graph: "ir.Graph", low: "dict[ir.Node, None]", dtype: "ir.DataType") -> None:
    """Round the scales of all pairs with a node in ``low`` to numbers of ``dtype``; they stay float32 here."""
    scales: dict[ir.Value, None] = {}
    for node in graph:
        pair = [node, *dequantisers(node)] if node.op_type == QUANTISE else [node]
        if node.op_type in (QUANTISE, DEQUANTISE) and any(one in low for one in pair):
            scales |= {value: None for one in pair if (value := _constant(one, _SCALE)) is not None}
    for scale in scales:
        assert scale.const_value is not None
        before = scale.const_value.numpy()
        after = np.maximum(narrowed(before, dtype).astype(np.float32), np.float32(smallest(dtype)))
        if not np.array_equal(before, after):
            _set(scale, after)
            _requantise(graph, scale, before, after)


def _requantise(graph: "ir.Graph", scale: "ir.Value", before: Array, after: Array) -> None:
    """Bring integers that lie in the file to a scale that was raised; mere rounding of the scale is let be."""
    raised = after > before * (1 + 2.0**-8)
    if not raised.any():
        return
    for node, index in scale.uses():
        levels = _constant(node, 0)
        if node.op_type != DEQUANTISE or index != _SCALE or levels is None:
            continue
        assert levels.const_value is not None
        array = levels.const_value.numpy()
        factor = _spread(np.where(raised, before / after, 1).astype(np.float32), node, array)
        zero = _constant(node, _ZERO_POINT)
        offset = 0.0 if zero is None or zero.const_value is None else _spread(zero.const_value.numpy(), node, array)
        moved = (array.astype(np.float32) - offset) * factor
        whole = np.issubdtype(array.dtype, np.integer) or "int" in array.dtype.name
        new = ((np.rint(moved) if whole else moved) + offset).astype(array.dtype)
        _set(levels if len(levels.uses()) == 1 else _copy(graph, node, levels), new)


def _spread(array: Array, node: "ir.Node", levels: Array) -> Array:
    """Spread numbers to each element: of the whole tensor, of a slice along the axis, or of a block there."""
    array = array.astype(np.float32)
    if array.ndim == 0 or array.size == 1:
        return array.reshape(())
    axis = node.attributes.get_int("axis", 1)
    block = node.attributes.get_int("block_size", 0)
    if block:
        return np.repeat(array, block, axis).take(range(levels.shape[axis]), axis)
    return np.expand_dims(array, [one for one in range(levels.ndim) if one != axis % levels.ndim])


def _constant(node: "ir.Node", index: int) -> "ir.Value | None":
    value = node.inputs[index] if len(node.inputs) > index else None
    return value if value is not None and value.is_initializer() and value.const_value is not None else None


def _set(value: "ir.Value", array: Array) -> None:
    import onnx_ir as ir

    value.const_value = ir.tensor(np.asarray(array), dtype=value.dtype, name=value.name)


def _copy(graph: "ir.Graph", node: "ir.Node", value: "ir.Value") -> "ir.Value":
    """Copy integers for a node, where others read the same ones with another scale."""
    import onnx_ir as ir

    own = ir.Value(name=f"{value.name}_{node.name}", shape=value.shape, type=value.type, const_value=value.const_value)
    graph.register_initializer(own)
    node.replace_input_with(0, own)
    return own
