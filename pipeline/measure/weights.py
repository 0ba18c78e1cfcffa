"""What a session of ONNX Runtime keeps of a graph's weights, and what loading them takes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import exp, prod
from typing import TYPE_CHECKING

from enginesmith.pipeline import onnx_file
from enginesmith.pipeline.measure.kernels import packed_bytes
from enginesmith.pipeline.measure.liveness import value_bytes
from enginesmith.pipeline.precision.audit.values import Value

if TYPE_CHECKING:
    import onnx

Values = Callable[[str], Value]
_PAGE, _EXTERNAL_ABOVE_BYTES = 4096, 1024
"""Mapped files come in by pages; ``build`` leaves smaller weights in the graph's file."""
_MAPPED_AT_ONCE = 2 << 20
"""Reading one place of a mapped file brings in all of the folio that it lies in: 0.5 to 2 MiB on ext4 and Linux 6.18,
as smaps shows; no less than 64 KiB on kernels without large folios (fault_around_bytes)."""


@dataclass(frozen=True)
class Stored:
    """How an initialiser lies in the file, or in one beside it, which is mapped by whole pages."""

    bytes: int
    pages: int = 0
    """Bytes of the pages that it lies on; 0 if it is in the graph's own file."""


@dataclass(frozen=True)
class Weight:
    """An initialiser: its bytes as stored, and what a session keeps for it."""

    stored: int
    kept: int
    read_while_loading: int = 0
    """Bytes that are there beside what is kept while the session packs it."""
    kept_from_loading: int = 0
    """Of what is kept, the bytes that loading brings in; the rest comes in when it is first read."""
    read_whole: bool = True
    """Whether a run reads all of it; of tables only rows are read."""


def weights_of(model: "onnx.ModelProto", stored: Mapping[str, Stored], values: Values) -> list[Weight]:
    """Initialisers in the order in which they are first read, which is that of packing them."""
    readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in onnx_file.nodes(model):
        for position, name in enumerate(node.input):
            if name in stored:
                readers.setdefault(name, []).append((node, position))
    unread = [name for name in stored if name not in readers]
    return [_weight(stored[name], values(name), readers.get(name, []), values) for name in (*readers, *unread)]


def _weight(stored: Stored, value: Value, readers: "list[tuple[onnx.NodeProto, int]]", values: Values) -> Weight:
    size = stored.bytes
    if not readers:
        return Weight(size, 0, read_whole=False)
    packed = [packed_bytes(node, position, value) for node, position in readers]
    copies = sum(found for found in packed if found is not None)
    if None not in packed:
        return Weight(size, copies, stored.pages or 2 * size, copies)
    looked_up = all(node.op_type == "Gather" and not position for node, position in readers)
    if not stored.pages:
        return Weight(size, size + copies, size, size + copies, not looked_up)
    if looked_up:
        kept = _touched(size, value, [values(node.input[1]) for node, _ in readers])
        return Weight(size, kept, read_whole=False)
    return Weight(size, stored.pages + copies, 0, copies)


def _touched(size: int, table: Value, indices: Iterable[Value]) -> int:
    """Bytes of a mapped table that lookups bring in if they are spread evenly over it: what is expected to be hit."""
    shapes = [found.shape for found in indices]
    if not table.shape or not size or None in shapes:
        return size
    lookups = sum(prod(shape) for shape in shapes if shape is not None)
    reach = max(_MAPPED_AT_ONCE, size // table.shape[0])
    return round(size * (1 - exp(-lookups * reach / size)))


def loading_bytes(weights: Iterable[Weight], inline_bytes: int) -> int:
    """The most while weights are packed one after another.

    Those in the graph's own file are there twice from the start, parsed and as tensors; what the optimiser makes anew
    of them is not known.
    """
    most = level = 0
    for one in weights:
        level += one.kept_from_loading
        most = max(most, level + one.read_while_loading)
    return max(most, 2 * inline_bytes)


def initialisers(graph: "onnx.GraphProto", mapped: bool) -> Iterator[tuple[str, Stored]]:
    """Each initialiser of a graph and of those inside of it; ONNX Runtime makes one of every Constant node too."""
    for tensor in graph.initializer:
        yield tensor.name, _stored(tensor, mapped)
    for node in graph.node:
        if node.op_type == "Constant":
            tensors = [attribute.t for attribute in node.attribute if attribute.HasField("t")]
            yield node.output[0], Stored(sum(_stored(tensor, mapped).bytes for tensor in tensors))
        for inner in bodies(node):
            yield from initialisers(inner, mapped)


def _stored(tensor: "onnx.TensorProto", mapped: bool) -> Stored:
    from onnx.external_data_helper import ExternalDataInfo

    size = value_bytes(Value(onnx_file.dtype_name(tensor.data_type), tuple(tensor.dims))) or 0
    if tensor.data_location == tensor.EXTERNAL:
        offset = ExternalDataInfo(tensor).offset or 0
        return Stored(size, (-(-(offset + size) // _PAGE) - offset // _PAGE) * _PAGE)
    return Stored(size, -(-size // _PAGE) * _PAGE if mapped and size > _EXTERNAL_ABOVE_BYTES else 0)


def bodies(node: "onnx.NodeProto") -> "list[onnx.GraphProto]":
    """The graphs inside of a node: branches, or the body of a loop."""
    return [
        inner
        for attribute in node.attribute
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs)
    ]
