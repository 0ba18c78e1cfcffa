"""Count the work of one inference of a graph: operations, least bytes and operators, at concrete sizes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline import onnx_file
from enginesmith.pipeline.measure.rows import Work
from enginesmith.pipeline.precision.audit import coverage
from enginesmith.pipeline.precision.audit.values import View, value_bytes, view

if TYPE_CHECKING:
    import onnx

_PICKING = ("Gather", "GatherElements", "GatherND", "Slice")
"""Operators that read no more of their first input than they give back."""
_LOOKING = ("Shape", "Size")
"""Operators that read no value at all."""
_VIEWS = (*_LOOKING, "Constant", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
"""Operators that move nothing: their result is their input in another shape."""
_LARGE_BYTES = 8 << 20
_HALF = {"fp16": "float16", "bf16": "bfloat16"}


def count_work(path: Path, sizes: Mapping[str, int], batch: int, *, executed: bool, arithmetic: str = "fp32") -> Work:
    """Count what an ONNX graph does at these sizes of its dynamic dimensions.

    ``executed`` says that it runs as it stands, operator by operator; else it stands in for what an engine makes of
    it, and only what no engine gets around counts. ``arithmetic`` is what its float32 products are computed in; with
    ``fp16`` or ``bf16`` its float32 weights are of that type, too.

    Raises:
        InvalidGraph: the file cannot be read.
        SignatureError: its inputs are no tensors.
    """
    seen = view(path, sizes)
    covered = coverage.of(path, sizes, executed=executed)
    flops = {name: round(2 * share * covered.total_macs) for name, share in covered.macs.items()}
    if "fp32" in flops and arithmetic != "fp32":
        flops[arithmetic] = flops.pop("fp32") + flops.get(arithmetic, 0)
    reasons = {}
    if covered.unknown_products:
        reasons["flops"] = f"{covered.unknown_products} products of unknown size are left out"
    least, unknown = _least_bytes(path, seen, _HALF.get(arithmetic, "float32"))
    if unknown:
        reasons["least_bytes"] = f"{', '.join(unknown[:3])} and others of unknown size are left out"
    traffic = _Traffic(seen)
    traffic_bytes = traffic.of_weights() + traffic.of_graph(_structure(path))
    if traffic.unknown:
        names = list(traffic.unknown)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        reasons["traffic_bytes"] = f"no size could be inferred of {', '.join(names[:3])}{more}, which count as nothing"
    if not executed:
        reasons["launches"] = "the engine runs other operators than the graph that was counted has"
    return Work(
        batch=batch,
        flops=flops,
        least_bytes=least,
        large_intermediates=_large(path, seen) if executed else (),
        traffic_bytes=traffic_bytes,
        launches=_launches(path) if executed else None,
        reasons=reasons,
    )


def _least_bytes(path: Path, seen: View, float32_as: str) -> tuple[int, list[str]]:
    """Weights and inputs as far as they are read, and outputs; and the names of those whose size is not known."""
    signature = onnx_file.signature(path)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in seen.nodes.values():
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(node)
    total, unknown = 0, []
    for name in sorted({spec.name for spec in signature.inputs} | seen.constants):
        value = seen.value(name)
        cast = name in seen.constants and value.dtype == "float32"
        size = value_bytes(replace(value, dtype=float32_as) if cast else value)
        if size is None:
            unknown.append(name)
        else:
            total += max((_read(node, name, size, seen) for node in readers.get(name, ())), default=0)
    outputs = {spec.name: value_bytes(seen.value(spec.name)) for spec in signature.outputs}
    unknown += [name for name, size in outputs.items() if size is None]
    return total + sum(filter(None, outputs.values())), unknown


def _read(node: "onnx.NodeProto", name: str, size: int, seen: View) -> int:
    """Bytes of an input that a node reads."""
    if node.op_type in _LOOKING:
        return 0
    if node.op_type in _PICKING and name not in list(node.input)[1:]:
        picked = value_bytes(seen.value(node.output[0]))
        return size if picked is None else min(size, picked)
    return size


def _large(path: Path, seen: View) -> tuple[int, ...]:
    """Bytes of large results that another operator reads as a whole."""
    outputs = {spec.name for spec in onnx_file.signature(path).outputs}
    made = {name for node in seen.nodes.values() if node.op_type not in _VIEWS for name in node.output}
    found: dict[str, int] = {}
    for node in seen.nodes.values():
        for name in made.intersection(node.input) - outputs:
            size = value_bytes(seen.value(name)) or 0
            if size > _LARGE_BYTES and _read(node, name, size, seen) == size:
                found[name] = size
    return tuple(sorted(found.values(), reverse=True))


def _structure(path: Path) -> "onnx.GraphProto":
    import onnx

    model = onnx_file.skeleton(path)
    return (onnx.inliner.inline_local_functions(model) if model.functions else model).graph


class _Traffic:
    """Add up what operators read and write, each weight once; remembers values of unknown size, which count as 0."""

    def __init__(self, seen: View) -> None:
        self._seen = seen
        self.unknown: dict[str, None] = {}

    def of_weights(self) -> int:
        """Add up the weights that are read as a whole; of tables only rows are."""
        whole = {
            name
            for node in self._seen.nodes.values()
            for place, name in enumerate(node.input)
            if name in self._seen.constants and (node.op_type != "Gather" or place)
        }
        return sum(value_bytes(self._seen.value(name)) or 0 for name in whole)

    def of_graph(self, graph: "onnx.GraphProto") -> int:
        """Add up the values that are written, and those that are read by each reader, without weights."""
        return sum(self._of_node(node) for node in graph.node if node.op_type != "Constant")

    def _of_node(self, node: "onnx.NodeProto") -> int:
        if inner := list(onnx_file.subgraphs(node)):  # of branches the cheaper one, of a loop one round: the least
            return min(map(self.of_graph, inner))
        if node.op_type in _VIEWS:
            return 0
        read = {name for name in node.input if name and name not in self._seen.constants}
        written = [name for name in node.output if name]
        looks_up = node.op_type == "Gather" and node.input[0] in self._seen.constants
        return sum(map(self._bytes, (*read, *written, *(written if looks_up else ()))))

    def _bytes(self, name: str) -> int:
        size = value_bytes(self._seen.value(name))
        if size is None:
            self.unknown[name] = None
        return size or 0


def _launches(path: Path) -> int:
    """Operators of the graph itself that do something; those of loops and branches may never run."""
    return sum(node.op_type not in _VIEWS for node in onnx_file.skeleton(path).graph.node)
