"""Put quantized values into a graph: initializers and nodes with names of their own."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.frameworks.onnx.edit import Names, add_constant, insert_behind
from enginesmith.pipeline.passes.quantize.quantizers import Grid, Narrow
from enginesmith.pipeline.tensors import Array

Attributes = Mapping[str, int | float | str | Sequence[int]]
NO_ATTRIBUTES: Attributes = MappingProxyType({})
_IR_VERSIONS: Mapping[str, int] = {"float8_e4m3fn": 9, "int4": 10}
"""Element type → the first IR version that has it."""


@dataclass(frozen=True)
class Stored:
    """A constant in few bits, as it lies in a graph."""

    name: str
    """Name of the float constant that it replaces."""
    levels: "ir.Value"
    scale: "ir.Value"
    zero_point: "ir.Value | None"
    axis: int | None
    block: int


class Writer:
    """Adds to the main graph of one model; :meth:`finish` removes what nothing reads any more."""

    def __init__(self, graph: "ir.Graph") -> None:
        self.graph = graph
        self._names = Names(graph)
        self._shared: dict[bytes, ir.Value] = {}
        self._stored: dict[tuple[object, ...], Stored] = {}
        self._dtypes: set[str] = set()

    def add_constant(self, name: str, numbers: Array) -> "ir.Value":
        """Return a new constant, under this name or one like it."""
        self._dtypes.add(str(numbers.dtype))
        return add_constant(self.graph, self._names.new(name), np.asarray(numbers))

    def share_constant(self, name: str, numbers: Array) -> "ir.Value":
        """Return a constant that several nodes read, under the name that it was first asked for by."""
        key = _digest(numbers)
        if key not in self._shared:
            self._shared[key] = self.add_constant(name, numbers)
        return self._shared[key]

    def node(
        self,
        operator: str,
        inputs: "Sequence[ir.Value | None]",
        outputs: Sequence[str],
        *,
        attributes: "Attributes" = NO_ATTRIBUTES,
        domain: str = "",
        before: "ir.Node | None" = None,
        like: "ir.Node | None" = None,
        name: str = "",
    ) -> "ir.Node":
        """Return a new node, its outputs named: inserted ``before`` another one, or not in the graph yet.

        It belongs to the module of that one, or of ``like``. Without a ``name`` it is called after its first output and
        its operator.
        """
        node = ir.node(operator, inputs, dict(attributes), domain=domain, num_outputs=len(outputs))
        if domain:
            self.graph.opset_imports.setdefault(domain, 1)
        for value, wanted in zip(node.outputs, outputs, strict=True):
            value.name = self._names.new(wanted)
        node.name = name or self._names.new(f"{node.outputs[0].name}_{operator}")
        beside = before or like
        node.metadata_props.update(beside.metadata_props if beside is not None else {})
        if before is not None:
            self.graph.insert_before(before, node)
        return node

    def store(self, name: str, narrow: Narrow) -> Stored:
        """Store the parts of a constant in few bits, once for all that are equal.

        Each of its readers gets a DequantizeLinear of its own, as ONNX Runtime makes kernels of such alone.
        """
        key = (_digest(narrow.levels), _digest(narrow.scale), narrow.axis, narrow.block)
        if key not in self._stored:
            levels = self.add_constant(f"{name}_quantized", narrow.levels)
            scale, zero = self.add_constant(f"{name}_scale", narrow.scale), None
            if narrow.levels.dtype == np.int8:
                # Not shared with others: where two axes share one, OpenVINO 2026.4 leaves all products in floats,
                # without a word.
                zero = self.add_constant(f"{name}_zero_points", np.zeros(narrow.scale.shape, np.int8))
            self._stored[key] = Stored(name, levels, scale, zero, narrow.axis, narrow.block)
        return self._stored[key]

    def insert_dequantize(self, stored: Stored, before: "ir.Node") -> "ir.Value":
        """Return a constant in few bits, as floats for one node."""
        inputs = [stored.levels, stored.scale, *([stored.zero_point] if stored.zero_point is not None else [])]
        attributes = {} if stored.axis is None else {"axis": stored.axis}
        if stored.block:
            attributes["block_size"] = stored.block
        name = f"{stored.name}_dequantized"
        node = self.node("DequantizeLinear", inputs, [name], attributes=attributes, before=before)
        _describe(node.outputs[0], stored.scale, stored.levels)
        return node.outputs[0]

    def insert_pair(self, value: "ir.Value", grid: Grid, readers: "Iterable[tuple[ir.Node, int]] | None") -> None:
        """Round a value for some of its readers, or for all of them and the graph's outputs."""
        import ml_dtypes

        uses = [(use.node, use.idx) for use in value.uses()] if readers is None else list(readers)
        scale = self.add_constant(f"{value.name}_scale", np.array(grid.scale, np.float32))
        dtype = ml_dtypes.float8_e4m3fn if grid.dtype == "fp8" else grid.dtype
        zero = self.share_constant(f"zero_point_{grid.dtype}_{grid.zero_point}", np.array(grid.zero_point, dtype))
        producer = value.producer()
        quantize = self.node("QuantizeLinear", [value, scale, zero], [f"{value.name}_quantized"], like=producer)
        inputs = [quantize.outputs[0], scale, zero]
        restore = self.node("DequantizeLinear", inputs, [f"{value.name}_dequantized"], like=producer)
        rounded = restore.outputs[0]
        _describe(quantize.outputs[0], zero, value)
        _describe(rounded, scale, value)
        insert_behind(self.graph, value, [quantize, restore])
        self.hand_over(value, rounded, uses, outputs=readers is None)

    def hand_over(
        self, value: "ir.Value", heir: "ir.Value", readers: "Iterable[tuple[ir.Node, int]]", *, outputs: bool
    ) -> None:
        """Let readers of a value read another one, which takes its name and place among the graph's ``outputs``."""
        for node, index in readers:
            node.replace_input_with(index, heir)
        if not outputs or not value.is_graph_output():
            return
        for index in [index for index, output in enumerate(self.graph.outputs) if output is value]:
            self.graph.outputs[index] = heir
        name = value.name
        value.name = self._names.new(f"{name}_float")
        heir.name = name

    def replace(self, node: "ir.Node", outputs: "Sequence[ir.Value]") -> None:
        """Put other values in the place of what a node writes, under its names, and take it out of the graph."""
        names = [value.name for value in node.outputs]
        for old, new in zip(node.outputs, outputs, strict=True):
            _describe(new, old, old)
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)
        for new, name in zip(outputs, names, strict=True):
            new.name = name

    def finish(self, model: "ir.Model") -> None:
        """Remove what nothing reads any more, and state the version of the format that the new types need."""
        from onnx_ir.passes import common

        common.RemoveUnusedNodesPass()(model)
        model.ir_version = max(model.ir_version, *(_IR_VERSIONS.get(name, 0) for name in self._dtypes), 0)


def _digest(numbers: Array) -> bytes:
    """Return what only equal arrays have in common."""
    kind = f"{numbers.dtype} {numbers.shape} ".encode()
    return hashlib.sha256(kind + numbers.tobytes()).digest()


def _describe(value: "ir.Value", dtype_of: "ir.Value", shape_of: "ir.Value") -> None:
    """Give a value the element type of one and the shape of another; descriptions are changed in place by others."""
    if dtype_of.dtype is not None:
        value.type = ir.TensorType(dtype_of.dtype)
    value.shape = None if shape_of.shape is None else shape_of.shape.copy()
