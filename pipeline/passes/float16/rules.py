"""Decide which nodes of a float32 graph go to float16 or bfloat16, and which stay and why.

What stays is what PyTorch's autocast keeps in float32 too: operators that add up many numbers, and functions that are
so steep that the rounding of what goes in, or the range of what comes out, shows in the result. Nodes that may do
either go where that needs the fewest casts.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.frameworks.onnx.model_file import ASKED
from enginesmith.pipeline.passes.float16.bounds import LARGEST, LIMITS, SPARED, find_islands

if TYPE_CHECKING:
    import onnx


QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_FIXED = {"Resize": (1,)}
"""Inputs that could be lower and are positions, which need every bit."""
_MAKERS = ("Cast", "ConstantOfShape", DEQUANTIZE)
"""Operators whose output has a type of its own, which an attribute or a scale decides."""


@dataclass(frozen=True)
class Slots:
    """Positions of the float32 inputs and outputs of a node that change their type with it."""

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs)


def is_float(value: "ir.Value | None") -> bool:
    """Tell whether it is a tensor of float32."""
    return value is not None and isinstance(value.type, ir.TensorType) and value.dtype == ir.DataType.FLOAT


def find_slots(node: "ir.Node", opset: int, dtype: str) -> Slots:
    """List what can change its type to ``dtype``, ONNX's name; nothing, if the schema is unknown.

    An output whose type follows from no input is left alone, unless it is known how to choose it.
    """
    import onnx

    if node.domain or not onnx.defs.has(node.op_type, opset, ""):
        return Slots()
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    able = {kind.type_param_str for kind in schema.type_constraints if f"tensor({dtype})" in kind.allowed_type_strs}
    taken = {index: _find_type(schema.inputs, index) for index, value in enumerate(node.inputs) if is_float(value)}
    given = {index: _find_type(schema.outputs, index) for index, value in enumerate(node.outputs) if is_float(value)}
    inputs = {index for index, kind in taken.items() if kind in able and index not in _FIXED.get(node.op_type, ())}
    follow = {_find_type(schema.inputs, index) for index in inputs}
    outputs = {index for index, kind in given.items() if kind in able and (kind in follow or node.op_type in _MAKERS)}
    if given and not outputs:
        return Slots()
    return Slots(frozenset(inputs), frozenset(outputs))


def _find_type(parameters: "Sequence[onnx.defs.OpSchema.FormalParameter]", index: int) -> str:
    """Return type of a parameter; the last of a variadic operator stands for all that follow."""
    return parameters[min(index, len(parameters) - 1)].type_str


def find_dequantizers(node: "ir.Node") -> "Iterator[ir.Node]":
    """Find the DequantizeLinear nodes behind a QuantizeLinear, also behind nodes that only move its values."""
    waiting = list(node.outputs)
    for value in waiting:
        for reader, index in value.uses():
            if reader.op_type == DEQUANTIZE:
                yield reader
            elif index == 0:
                waiting += [
                    output for output in reader.outputs if output.dtype == value.dtype and output not in waiting
                ]


# The numbers of float16: up to 65504, and none that is smaller than 6.1e-5 with all its bits.

_MARGIN = 2.0
"""Float16 has to hold this many times as much as was seen, which other data may exceed."""
_SMALLEST = float(np.finfo(np.float16).tiny)
_SCALES = {"QuantizeLinear": (1,), "DequantizeLinear": (1,)}
_SUMS = ("Add", "Sub", "Sum")
_BIASES = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2, "GRU": 3, "LSTM": 3, "RNN": 3}
_MOVE = frozenset(
    {
        *("Concat", "DequantizeLinear", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad"),
        *("QuantizeLinear", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where"),
    }
)


class Range:
    """Goes through a graph in its order, and knows which values are too large: seen to be, or made by constants."""

    def __init__(self, inputs: "Iterable[ir.Value]", largest: Mapping[str, float]) -> None:
        self._largest = largest
        self._beyond: dict[ir.Value, float] = {}
        self._reaches: dict[ir.TensorProtocol, float] = {}
        for value in inputs:
            self._note(value)

    def explain(self, node: "ir.Node", slots: Slots) -> str:
        """Explain why the node cannot be in float16; empty if it can."""
        spared = SPARED.get(node.op_type, ())
        for index, value in enumerate(node.inputs):
            if value in self._beyond and index not in spared:
                return _explain_too_large(value.name, self._beyond[value])
        for index, name, tensor in _list_constants(node, slots):
            reach = self._measure_reach(tensor)
            if reach > LARGEST and index not in spared:
                return _explain_too_large(name, reach)
            # Nothing is lost with scales, which are raised, and small biases are noise; a lone ε guards a division.
            added = node.op_type in _SUMS or index >= _BIASES.get(node.op_type, len(node.inputs))
            may_vanish = index in _SCALES.get(node.op_type, ()) or (added and tensor.size > 1)
            if 0 < reach < _SMALLEST and not may_vanish:
                return f"the constant {name!r} is at most {reach:.3g}, and all but vanishes in float16"
        for value in node.outputs:
            reach = self._largest.get(value.name or "", 0.0)
            if reach > LARGEST / _MARGIN and is_float(value):
                return _explain_too_large(value.name, reach)
        return ""

    def follow(self, node: "ir.Node", slots: Slots) -> None:
        """Note which outputs are too large: by what was seen, else because a constant or what is moved is."""
        reaches = [self._beyond[value] for value in node.inputs if value in self._beyond and node.op_type in _MOVE]
        if node.op_type not in (*LIMITS, "Div"):
            constants = [self._measure_reach(tensor) for _, _, tensor in _list_constants(node, slots)]
            reaches += [reach for reach in constants if reach > LARGEST]
        for value in node.outputs:
            self._note(value, max(reaches, default=0.0))

    def _note(self, value: "ir.Value", guess: float = 0.0) -> None:
        reach = self._largest.get(value.name or "", guess) if is_float(value) else guess
        if reach > LARGEST / _MARGIN:
            self._beyond[value] = reach

    def _measure_reach(self, tensor: "ir.TensorProtocol") -> float:
        """Compute the largest finite magnitude of a constant; 0 if it is empty."""
        if tensor not in self._reaches:
            array = tensor.numpy()
            ends = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
            if not np.isfinite(ends).all():
                ends = (0.0, float(np.abs(array[np.isfinite(array)]).max(initial=0.0)))
            self._reaches[tensor] = max(-ends[0], ends[1])
        return self._reaches[tensor]


def _explain_too_large(name: str | None, reach: float) -> str:
    return f"{name!r} reaches {reach:.3g}, and float16 ends at {LARGEST:.0f}"


def _list_constants(node: "ir.Node", slots: Slots) -> "Iterator[tuple[int, str, ir.TensorProtocol]]":
    """List constants that would change their type: position, name, content."""
    for index in sorted(slots.inputs):
        value = node.inputs[index]
        if value is not None and value.const_value is not None:
            yield index, value.name or "", value.const_value
    fill = node.attributes.get("value")
    if node.op_type == "ConstantOfShape" and fill is not None and fill.as_tensor().dtype == ir.DataType.FLOAT:
        yield -1, f"{node.name}'s fill", fill.as_tensor()


_STAY: Mapping[str, tuple[str, ...]] = {
    "a normalization": (
        *("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization"),
        *("LRN", "MeanVarianceNormalization", "RMSNormalization"),
    ),
    "a softmax": ("LogSoftmax", "NegativeLogLikelihoodLoss", "Softmax", "SoftmaxCrossEntropyLoss"),
    "adds up many numbers": (
        *("CumProd", "CumSum", "Det", "GlobalAveragePool", "GlobalLpPool", "LpPool", "ReduceL1", "ReduceL2"),
        *("ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
    ),
    "a steep function": (
        *("Acosh", "Asinh", "Atanh", "Cosh", "Exp", "Log", "Pow", "Reciprocal", "Sinh", "Softplus", "Sqrt", "Tan"),
    ),
    "works on angles or coordinates": ("AffineGrid", "Cos", "GridSample", "MaxRoiPool", "RoiAlign", "Sin"),
    "draws random numbers": ("Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike"),
    "works on spectra": ("DFT", "STFT"),
}
_REASONS = {operator: reason for reason, operators in _STAY.items() for operator in operators}
_STAY_IN_BFLOAT16 = frozenset({"ConvTranspose", "GRU", "HardSwish", "Mish"})
"""Operators that TensorRT-RTX 1.7 builds in float16 and refuses in bfloat16."""
_PRODUCTS = frozenset({"Attention", "Conv", "ConvTranspose", "Einsum", "Gemm", "GRU", "LSTM", "MatMul", "RNN"})
_TABLE_SIZE = 1 << 16  # elements; a table of so many that Gather looks up is a weight of the model


@dataclass
class Judged:
    """The nodes that read or make floats, in the order of the graph: those that go low, may, or stay and why."""

    slots: "dict[ir.Node, Slots]" = field(default_factory=dict)
    low: "dict[ir.Node, None]" = field(default_factory=dict)
    free: "dict[ir.Node, None]" = field(default_factory=dict)
    kept: "dict[ir.Node, str]" = field(default_factory=dict)

    def takes_low(self, node: "ir.Node", index: int) -> bool:
        """Tell whether an input follows its node into the low type."""
        return node in self.slots and index in self.slots[node].inputs

    def makes_low(self, node: "ir.Node", index: int) -> bool:
        """Tell whether an output follows its node into the low type."""
        return node in self.slots and index in self.slots[node].outputs


def judge(graph: "ir.Graph", opset: int, dtype: str, keep: Collection[str], largest: Mapping[str, float]) -> Judged:
    """Look at every node; ``keep`` and ``largest`` as in :func:`convert.lower`, ``dtype`` is ONNX's name."""
    result = Judged()
    islands = find_islands(graph, dtype, largest)
    ranges = Range(graph.inputs, largest) if dtype == "float16" else None
    for node in graph:
        slots = find_slots(node, opset, dtype)
        if edit.has_body(node) or any(is_float(value) for value in (*node.inputs, *node.outputs)):
            reason = ASKED if node.name in keep else _explain_operator(node, slots, opset, dtype)
            reason = reason or (ranges.explain(node, slots) if ranges else "") or islands.get(node, "")
            if reason:
                result.kept[node] = reason
            else:
                result.slots[node] = slots
                (result.low if is_product(node) else result.free)[node] = None
        elif any(value is not None and value.dtype == ir.DataType.DOUBLE for value in (*node.inputs, *node.outputs)):
            result.kept[node] = "computes in float64, and only float32 is lowered"
        if ranges:
            ranges.follow(node, slots)
    return result


def _explain_operator(node: "ir.Node", slots: Slots, opset: int, dtype: str) -> str:
    """Explain why the operator stays in float32; empty if that is no reason."""
    if edit.has_body(node):
        return "has a body of its own"
    if node.domain:
        return f"its types are not known: it is of the domain {node.domain!r}"
    if node.op_type in _REASONS:
        return _REASONS[node.op_type]
    if dtype == "bfloat16" and node.op_type in _STAY_IN_BFLOAT16:
        return "engines have it in float16 and not in bfloat16"
    types = [value.type for value in (*node.inputs, *node.outputs) if value is not None]
    if None in types:
        return "its types are not known: shape inference does not get there"
    if not all(isinstance(kind, ir.TensorType) for kind in types):
        return "works on sequences"
    return "" if slots else f"{node.op_type} of opset {opset} has no {dtype} form"


def is_product(node: "ir.Node") -> bool:
    """Tell whether it multiplies matrices or looks up a large table: what makes a graph fast or large.

    An outer product (a contraction over one number, as in rotary embeddings) is none.
    """
    if node.domain:
        return False
    if node.op_type == "Gather":
        table = node.inputs[0]
        return table is not None and table.const_value is not None and table.const_value.size >= _TABLE_SIZE
    if node.op_type != "MatMul":
        return node.op_type in _PRODUCTS
    left, right = (() if value is None or value.shape is None else tuple(value.shape) for value in node.inputs[:2])
    return left[-1:] != (1,) and right[-2:-1] != (1,)


def find_remedy(graph: "ir.Graph") -> str:
    """Find a change to the model with which products of a graph could be in few bits; empty if none is known."""
    nodes = list(ir.traversal.RecursiveGraphIterator(graph))
    products = [node for node in nodes if is_product(node)]
    others = (ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    if any(value is not None and value.dtype in others for node in products for value in node.inputs):
        return "export the model in float32"
    if foreign := next((node for node in nodes if node.domain and not node.domain.startswith("ai.onnx")), None):
        return f"give the graph in ONNX's own operators, as it was before {foreign.op_type} was put into it"
    return ""


def find_opset(graph: "ir.Graph", opset: int, dtype: str) -> int | None:
    """Find the first later opset in which a product without a form in a type has one; None if there is none."""
    import onnx

    lacking = [node for node in graph if is_product(node) and not find_slots(node, opset, dtype)]
    later = range(opset + 1, onnx.defs.onnx_opset_version() + 1)
    return next((version for version in later if any(find_slots(node, version, dtype) for node in lacking)), None)


# The nodes that may be in either type, chosen such that as few casts as possible are needed.
#
# A value is cast once if any of its readers wants the other type than it has. Each such cost is the capacity of an edge
# in a network of which a minimum cut is found (networkx): float32 is the source's side. Of divisions that cost the
# same, the one with most nodes in the low type is taken; but a run of nodes that no product touches (shape arithmetic,
# say) stays.
#
# A Q/DQ pair changes types for free. It costs as much as a cast all the same, or everything between two pairs would
# stay, and pay with twice the memory; afterwards the two halves of a pair go where they save a cast.

SOURCE, SINK = 0, 1


class CastNetwork:
    """A flow network with one vertex per node of a graph; cutting an edge costs its capacity in casts."""

    def __init__(self) -> None:
        import networkx

        self._graph: Any = networkx.DiGraph()
        self._graph.add_nodes_from((SOURCE, SINK))

    def add_vertex(self) -> int:
        """Add a vertex and return its number."""
        number = len(self._graph)
        self._graph.add_node(number)
        return number

    def add_edge(self, start: int, end: int, capacity: float = 1) -> None:
        """Add a directed edge with this capacity; parallel edges add up."""
        known = self._graph.get_edge_data(start, end, {"capacity": 0})
        self._graph.add_edge(start, end, capacity=known["capacity"] + capacity)

    def add_value(self, maker: int, readers: list[int]) -> None:
        """Add the costs of a value: one cast down if any reader is low and the maker is not, one up the other way."""
        others = [reader for reader in readers if reader != maker]
        if len(others) == 1:
            self.add_edge(maker, others[0])
            self.add_edge(others[0], maker)
        elif others:
            any_low, any_kept = self.add_vertex(), self.add_vertex()
            self.add_edge(maker, any_low)
            self.add_edge(any_kept, maker)
            for reader in others:
                self.add_edge(any_low, reader, math.inf)
                self.add_edge(reader, any_kept, math.inf)

    def source_side(self) -> frozenset[int]:
        """Find the smallest source side of all minimum cuts, which is unique.

        networkx gives the smallest sink side, so the network is searched backwards.
        """
        import networkx
        from networkx.algorithms.flow import dinitz

        _, (_, side) = networkx.minimum_cut(self._graph.reverse(copy=True), SINK, SOURCE, flow_func=dinitz)
        return frozenset(side)

    def connected_to_sink(self) -> frozenset[int]:
        """Find the vertices that edges of any direction connect to the sink without passing the source."""
        import networkx

        rest = self._graph.to_undirected()
        rest.remove_node(SOURCE)
        return frozenset(networkx.node_connected_component(rest, SINK))


def choose(graph: "ir.Graph", judged: Judged) -> "dict[ir.Node, None]":
    """Choose the free nodes that compute in the low type; the graph's inputs and outputs are in float32."""
    network = CastNetwork()
    vertices = {node: network.add_vertex() for node in judged.free} | dict.fromkeys(judged.low, SINK)

    def readers(value: "ir.Value") -> list[int]:
        """Return vertices of all that read a value, each once; bodies of loops and branches read in float32."""
        uses = [vertices[node] if judged.takes_low(node, index) else SOURCE for node, index in value.uses()]
        return list(dict.fromkeys([SOURCE, *uses] if value.is_graph_output() else uses))

    for value in graph.inputs:
        if is_float(value):
            network.add_value(SOURCE, readers(value))
    for node in graph:
        for index, value in enumerate(node.outputs):
            if is_float(value):
                network.add_value(vertices[node] if judged.makes_low(node, index) else SOURCE, readers(value))
        if node.op_type == QUANTIZE:
            halves = [vertices.get(dequantizer, SOURCE) for dequantizer in find_dequantizers(node)]
            network.add_value(vertices.get(node, SOURCE), halves)
    float_vertices, linked = network.source_side(), network.connected_to_sink()
    low = {node: None for node in judged.free if vertices[node] not in float_vertices and vertices[node] in linked}
    _save_casts(low, judged)
    return low


def _save_casts(low: "dict[ir.Node, None]", judged: Judged) -> None:
    """Take QuantizeLinear back where it alone makes a cast down necessary, DequantizeLinear where it makes one up."""
    everything = low | judged.low
    for node in [node for node in low if node.op_type in (QUANTIZE, DEQUANTIZE)]:
        value = node.inputs[0] if node.op_type == QUANTIZE else node.outputs[0]
        assert value is not None
        if node.op_type == QUANTIZE:
            maker = value.producer()
            made_low = maker in everything and value.index() in judged.slots[maker].outputs
            alone = not made_low and all(user.op_type == QUANTIZE for user, _ in value.uses() if user in everything)
        else:
            alone = not any(user in everything for user, _ in value.uses())
        if alone:
            del low[node]
