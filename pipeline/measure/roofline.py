"""Compute the least time that an inference takes on its device (the roofline), and what bounds it.

The floor is the largest of three times, as arithmetic, memory and the start of operators may go on side by side
(Williams, Waterman and Patterson, "Roofline", 2009). Each is a lower bound: what is not known is left out.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline.frameworks.onnx import coverage, model_file
from enginesmith.pipeline.frameworks.onnx.shapes import View, value_bytes, view
from enginesmith.pipeline.measure.rows import Bound, DeviceLimits, LimitRow, Work
from enginesmith.pipeline.units import format_share, format_si, group_values

if TYPE_CHECKING:
    import onnx


_WORTH_A_WORD = 1e-3
_WORDS: Mapping[Bound, str] = {"arithmetic": "arithmetic", "memory": "memory", "launch": "the start of operators"}


def floor(work: Work, limits: DeviceLimits, measured_ms: float | None) -> LimitRow:
    """Compare a measured time of one inference, in ms, with the least that its work takes on the device."""
    reasons = dict(work.reasons)
    times: dict[Bound, tuple[float, str] | None] = {
        "arithmetic": _time_arithmetic(work, limits, reasons),
        "memory": _time_memory(work, limits, reasons),
        "launch": _time_launches(work, limits, reasons),
    }
    parts = {name: part for name, part in times.items() if part is not None}
    bound = max(parts, key=lambda name: parts[name][0], default=None)
    floor_ms = None if bound is None else parts[bound][0]
    if floor_ms is None:
        reasons["floor_ms"] = "neither its arithmetic nor its memory nor its operators are known"
    if measured_ms is None:
        reasons["measured_ms"] = "it was not measured"
    ratio = measured_ms / floor_ms if measured_ms is not None and floor_ms else None
    if ratio is None:
        reasons["measured_over_floor"] = reasons.get("floor_ms") or reasons.get("measured_ms", "the floor is 0")
    return LimitRow(
        batch=work.batch,
        work=work,
        measured_ms=measured_ms,
        **{f"{name}_ms": part and part[0] for name, part in times.items()},
        floor_ms=floor_ms,
        measured_over_floor=ratio,
        bound_by=bound or "nothing known",
        summary=_summarize(ratio, parts, limits),
        reasons=reasons,
    )


def _time_arithmetic(work: Work, limits: DeviceLimits, reasons: dict[str, str]) -> tuple[float, str] | None:
    """Add up the milliseconds of all products one after the other; returns a description, too."""
    products: list[tuple[float, str]] = []
    for precision, count in work.flops.items():
        fastest = limits.product(precision)
        if fastest is None:
            why = limits.reasons.get(precision, "no product in it was measured")
            reasons["arithmetic_ms"] = f"{format_si(count, 'FLOP')} in {precision} are left out: {why}"
            continue
        name, rate = fastest
        kind = precision if name == precision else f"{precision}, computed in {name}"
        words = f"{format_si(count, 'FLOP')} in {kind} at {format_si(rate.per_second, 'FLOP/s')}"
        products.append((1e3 * count / rate.per_second, words))
    if not products:
        reasons.setdefault("arithmetic_ms", "no product of known size is in the graph")
        return None
    return sum(taken for taken, _ in products), " and ".join(words for _, words in sorted(products, reverse=True))


def _time_memory(work: Work, limits: DeviceLimits, reasons: dict[str, str]) -> tuple[float, str] | None:
    """Compute milliseconds for what memory delivers, and for all of it to pass through the caches: the longer one.

    What fits into the caches may be there from the inference before. Of a result that does not, the rest is written to
    memory and read again.
    """
    bandwidth, cached, cache_bytes = limits.memory_bandwidth, limits.cache_bandwidth, limits.cache_bytes
    if cache_bytes is None or (bandwidth is None and cached is None):
        no_cache = limits.reasons.get("cache_bytes") if cache_bytes is None else None
        reasons.setdefault("memory_ms", no_cache or limits.reasons.get("copy_bandwidth", "no bandwidth was measured"))
        return None
    ways = [(0.0, "")]
    if bandwidth:
        moved = max(0, work.least_bytes - cache_bytes) + sum(
            2 * max(0, size - cache_bytes) for size in work.large_intermediates
        )
        words = f"{format_si(moved, 'B')} that no cache holds at {format_si(bandwidth.per_second, 'B/s')}"
        ways.append((1e3 * moved / bandwidth.per_second, words))
    if cached:
        through = max(cached.per_second, bandwidth.per_second if bandwidth else 0.0)
        words = f"{format_si(work.least_bytes, 'B')} through the caches at {format_si(through, 'B/s')}"
        ways.append((1e3 * work.least_bytes / through, words))
    return max(ways)


def _time_launches(work: Work, limits: DeviceLimits, reasons: dict[str, str]) -> tuple[float, str] | None:
    """Add up the milliseconds of the start of each operator; of a call with one operator, of the whole call."""
    if work.launches is None or limits.operators is None:
        missing = limits.reasons.get("operators", "it was not measured how fast operators are started")
        reasons["launch_ms"] = work.reasons.get("launches", missing) if work.launches is None else missing
        return None
    call = 1 / limits.calls.per_second if limits.calls else 0.0
    each = 1 / limits.operators.per_second
    if call > work.launches * each:
        return 1e3 * call, f"a call of {work.launches} operators"
    return 1e3 * work.launches * each, f"{work.launches} operators at {1e6 * each:.3g} µs each"


def _summarize(ratio: float | None, parts: Mapping[Bound, tuple[float, str]], limits: DeviceLimits) -> str:
    """Describe the parts in one sentence, the largest first."""
    if not parts:
        return "nothing is known of the least time that this takes"
    times = {name: f"{ms:.3g} ms" if ms >= 1e-3 else f"{1e3 * ms:.3g} µs" for name, (ms, _) in parts.items()}
    bound, *others = sorted(parts, key=lambda name: -parts[name][0])
    others = [name for name in others if parts[name][0] > _WORTH_A_WORD * parts[bound][0]]
    words = f"bound by {_WORDS[bound]}: {parts[bound][1]} take {times[bound]}"
    if others:
        words += ", " + " and ".join(f"{_WORDS[name]} {times[name]}" for name in others)
    if ratio is None:
        return f"its floor is {times[bound]}; {words}"
    if ratio >= 1:
        return f"{ratio:.3g} × its floor of {times[bound]}; {words}"
    doubts = ["the device is faster than it was when its limits were measured"]
    if bound == "arithmetic":
        less = "(Winograd's convolutions, products with zeros)"
        doubts.append(f"or the engine multiplies less than the graph says {less}")
    if bound == "memory":
        doubts.append("or more stays in caches than the kernel says there are")
    doubts += [f"({warning})" for warning in limits.warnings]
    wrong = f"the floor is wrong, at least {format_share(1 / ratio - 1, 3)} too high"
    return f"{ratio:.3g} × its floor of {times[bound]}, so {wrong}: {' '.join(doubts)}; {words}"


# Work of one inference of a graph: operations, least bytes and operators, at concrete sizes.

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
    graph = view(path, sizes)
    covered = coverage.compute_coverage(path, sizes, executed=executed)
    flops = {name: round(2 * share * covered.total_macs) for name, share in covered.macs.items()}
    if "fp32" in flops and arithmetic != "fp32":
        flops[arithmetic] = flops.pop("fp32") + flops.get(arithmetic, 0)
    reasons = {}
    if any(node.op_type == "If" for node in graph.nodes.values()):
        reasons["flops"] = "both branches of If are counted, and one of them runs"
    if covered.unknown_products:
        reasons["flops"] = f"{covered.unknown_products} products of unknown size are left out"
    least, unknown = _count_least_bytes(path, graph, _HALF.get(arithmetic, "float32"))
    if unknown:
        reasons["least_bytes"] = f"{', '.join(unknown[:3])} and others of unknown size are left out"
    launches = None  # operators of loops and branches may never run, and do not count
    if executed:
        launches = sum(node.op_type not in _VIEWS for node in model_file.skeleton(path).graph.node)
    else:
        reasons["launches"] = "the engine runs other operators than the graph that was counted has"
    return Work(
        batch=batch,
        flops=flops,
        least_bytes=least,
        large_intermediates=_list_large_results(path, graph) if executed else (),
        launches=launches,
        reasons=reasons,
    )


def _count_least_bytes(path: Path, graph: View, float32_as: str) -> tuple[int, list[str]]:
    """Add up bytes of weights and inputs as far as they are read, and of outputs; name those of unknown size."""
    signature = model_file.signature(path)
    readers = group_values((name, node) for node in graph.nodes.values() for name in dict.fromkeys(node.input))
    total, unknown = 0, []
    for name in sorted({spec.name for spec in signature.inputs} | graph.constants):
        value = graph.value(name)
        cast = name in graph.constants and value.dtype == "float32"
        size = value_bytes(replace(value, dtype=float32_as) if cast else value)
        if size is None:
            unknown.append(name)
        else:
            total += max((_count_read_bytes(node, name, size, graph) for node in readers.get(name, ())), default=0)
    outputs = {spec.name: value_bytes(graph.value(spec.name)) for spec in signature.outputs}
    unknown += [name for name, size in outputs.items() if size is None]
    return total + sum(filter(None, outputs.values())), unknown


def _count_read_bytes(node: "onnx.NodeProto", name: str, size: int, graph: View) -> int:
    if node.op_type in _LOOKING:
        return 0
    if node.op_type in _PICKING and name not in list(node.input)[1:]:
        picked = value_bytes(graph.value(node.output[0]))
        return size if picked is None else min(size, picked)
    return size


def _list_large_results(path: Path, graph: View) -> tuple[int, ...]:
    outputs = {spec.name for spec in model_file.signature(path).outputs}
    results = {name for node in graph.nodes.values() if node.op_type not in _VIEWS for name in node.output}
    large: dict[str, int] = {}
    for node in graph.nodes.values():
        for name in results.intersection(node.input) - outputs:
            size = value_bytes(graph.value(name)) or 0
            if size > _LARGE_BYTES and _count_read_bytes(node, name, size, graph) == size:
                large[name] = size
    return tuple(sorted(large.values(), reverse=True))
