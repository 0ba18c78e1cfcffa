"""Give nodes another float type: constants converted, Cast nodes where the types meet, attributes that name a type."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from enginesmith.pipeline.precision.half.range import MASKS
from enginesmith.pipeline.precision.half.types import Slots, is_float
from enginesmith.pipeline.precision.half.weights import converted, largest, narrowed
from enginesmith.pipeline.precision.names import Names

if TYPE_CHECKING:
    import onnx_ir as ir

_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
_SHORT = {"FLOAT": "fp32", "FLOAT16": "fp16", "BFLOAT16": "bf16"}


class Retyper:
    """Changes the nodes of one graph; keeps the names of casts that were put in."""

    def __init__(self, graph: "ir.Graph", slots: "dict[ir.Node, Slots]", dtype: "ir.DataType") -> None:
        """``slots`` are the nodes to change, and what of each changes."""
        self._graph = graph
        self._slots = slots
        self._dtype = dtype
        self._names = Names(graph)
        self._first = next(iter(graph), None)
        self.casts: list[str] = []
        self.clips: list[str] = []

    def run(self, *, keep_io: bool) -> None:
        """Change everything."""
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
        """Let the cast value be the graph's output, under its name."""
        name, value.name, new.name = value.name, new.name, None
        new.name = name
        for index, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[index] = new

    def _cast(self, value: "ir.Value", dtype: "ir.DataType", *, mask: bool) -> "ir.Value":
        """A Cast right after the value's maker; before it a Clip, if what is cast is a mask."""
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
        """Brings a mask to the range of the type that it is cast to."""
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
        """Types that attributes name, of what the node makes."""
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
    """A node with one output of its name, of the shape and the module of another value."""
    import onnx_ir as ir

    made = ir.node(operator, inputs, attributes, name=name)
    output = made.outputs[0]
    output.name, output.shape, output.type = name, like.shape, ir.TensorType(dtype)
    maker = like.producer()
    if maker is not None:
        made.metadata_props.update(maker.metadata_props)
    return made
