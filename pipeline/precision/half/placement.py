"""Where the nodes go that may be in either type: where that takes the fewest casts.

A value is cast once if any of its readers wants the other type than it has. Each such cost is a charge in a network of
which a minimum cut is found: float32 is the source's side. Of divisions that cost the same, the one with most nodes in
the low type is taken; but a run of nodes that no product touches (shape arithmetic, say) stays.

A Q/DQ pair changes types for free. It is charged like a cast all the same, or everything between two pairs would stay,
and pay with twice the memory; afterwards the two halves of a pair go where they save a cast.
"""

from typing import TYPE_CHECKING

from enginesmith.pipeline.precision.half.cut import NEVER, SINK, SOURCE, Cut
from enginesmith.pipeline.precision.half.rules import Judged
from enginesmith.pipeline.precision.half.types import DEQUANTISE, QUANTISE, dequantisers, is_float

if TYPE_CHECKING:
    import onnx_ir as ir


def choose(graph: "ir.Graph", judged: Judged, *, keep_io: bool) -> "dict[ir.Node, None]":
    """The free nodes that go low."""
    network = Cut()
    vertices = {node: network.vertex() for node in judged.free}
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
    kept, linked = network.source_side(), network.beside_sink()
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
    """Vertices of all that read a value, each once; bodies of loops and branches read in float32."""
    found = [outside] if value.is_graph_output() else []
    for node, index in value.uses():
        changes = node in judged.slots and index in judged.slots[node].inputs
        found.append(vertices[node] if changes else SOURCE)
    return list(dict.fromkeys(found))


def _connect(network: Cut, maker: int, readers: list[int]) -> None:
    """Charge one cast down if any reader is low and the maker is not, and one up the other way round."""
    others = [reader for reader in readers if reader != maker]
    if len(others) == 1:
        network.charge(maker, others[0])
        network.charge(others[0], maker)
    elif others:
        any_low, any_kept = network.vertex(), network.vertex()
        network.charge(maker, any_low)
        network.charge(any_kept, maker)
        for reader in others:
            network.charge(any_low, reader, NEVER)
            network.charge(reader, any_kept, NEVER)
