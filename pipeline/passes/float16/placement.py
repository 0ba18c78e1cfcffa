"""Choose the type of nodes that may be in either one, so that as few casts as possible are needed.

A value is cast once if any of its readers wants the other type than it has. Each such cost is the capacity of an edge
in a network of which a minimum cut is found (networkx): float32 is the source's side. Of divisions that cost the same,
the one with most nodes in the low type is taken; but a run of nodes that no product touches (shape arithmetic, say)
stays.

A Q/DQ pair changes types for free. It costs as much as a cast all the same, or everything between two pairs would stay,
and pay with twice the memory; afterwards the two halves of a pair go where they save a cast.
"""

import math
from typing import TYPE_CHECKING, Any

from enginesmith.pipeline.passes.float16.rules import DEQUANTISE, QUANTISE, Judged, dequantisers, is_float

if TYPE_CHECKING:
    import onnx_ir as ir


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


def choose(graph: "ir.Graph", judged: Judged, *, keep_io: bool) -> "dict[ir.Node, None]":
    """Choose the free nodes that compute in the low type."""
    network = CastNetwork()
    vertices = {node: network.add_vertex() for node in judged.free}
    vertices |= dict.fromkeys(judged.low, SINK)
    outside = SOURCE if keep_io else SINK
    for value in graph.inputs:
        if is_float(value):
            _connect(network, outside, _readers(value, judged, vertices, outside))
    for node in graph:
        found = judged.slots.get(node)
        for index, value in enumerate(node.outputs):
            if is_float(value):
                maker = vertices[node] if found and index in found.outputs else SOURCE
                _connect(network, maker, _readers(value, judged, vertices, outside))
        if node.op_type == QUANTISE:
            _connect(network, vertices.get(node, SOURCE), [vertices.get(one, SOURCE) for one in dequantisers(node)])
    kept, linked = network.source_side(), network.connected_to_sink()
    low = {node: None for node in judged.free if vertices[node] not in kept and vertices[node] in linked}
    _save_casts(low, judged, keep_io=keep_io)
    return low


def _save_casts(low: "dict[ir.Node, None]", judged: Judged, *, keep_io: bool) -> None:
    """Take QuantizeLinear back where it alone makes a cast down necessary, DequantizeLinear where it makes one up."""
    everything = low | judged.low
    for node in [node for node in low if node.op_type in (QUANTISE, DEQUANTISE)]:
        value = node.inputs[0] if node.op_type == QUANTISE else node.outputs[0]
        assert value is not None
        if node.op_type == QUANTISE:
            maker = value.producer()
            made_low = maker in everything and value.index() in judged.slots[maker].outputs
            alone = not made_low and all(one.op_type == QUANTISE for one, _ in value.uses() if one in everything)
        else:
            leaves_low = value.is_graph_output() and not keep_io
            alone = not leaves_low and not any(one in everything for one, _ in value.uses())
        if alone:
            del low[node]


def _readers(value: "ir.Value", judged: Judged, vertices: "dict[ir.Node, int]", outside: int) -> list[int]:
    """Return vertices of all that read a value, each once; bodies of loops and branches read in float32."""
    found = [outside] if value.is_graph_output() else []
    for node, index in value.uses():
        changes = node in judged.slots and index in judged.slots[node].inputs
        found.append(vertices[node] if changes else SOURCE)
    return list(dict.fromkeys(found))


def _connect(network: CastNetwork, maker: int, readers: list[int]) -> None:
    """Add the cost of one cast down if any reader is low and the maker is not, and of one up the other way round."""
    others = [reader for reader in readers if reader != maker]
    if len(others) == 1:
        network.add_edge(maker, others[0])
        network.add_edge(others[0], maker)
    elif others:
        any_low, any_kept = network.add_vertex(), network.add_vertex()
        network.add_edge(maker, any_low)
        network.add_edge(any_kept, maker)
        for reader in others:
            network.add_edge(any_low, reader, math.inf)
            network.add_edge(reader, any_kept, math.inf)
