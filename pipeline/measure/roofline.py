"""How far an inference is from what its device could do: the least time its work takes, and what that is bound by.

The floor is the largest of three times, as arithmetic, memory and the start of operators may go on side by side
(Williams, Waterman and Patterson, "Roofline", 2009). Each is a lower bound: what is not known is left out.
"""

from collections.abc import Iterator, Mapping

from enginesmith.pipeline.measure.rows import Bound, DeviceLimits, LimitRow, Work
from enginesmith.pipeline.units import format_si

_WORTH_A_WORD = 1e-3
_WORDS: Mapping[Bound, str] = {"arithmetic": "arithmetic", "memory": "memory", "launch": "the start of operators"}


def floor(work: Work, limits: DeviceLimits, measured_ms: float | None) -> LimitRow:
    """Hold a measured time of one inference, in ms, against the work and the device."""
    reasons = dict(work.reasons)
    arithmetic_ms, arithmetic = _arithmetic(work, limits, reasons)
    memory_ms, memory = _memory(work, limits, reasons)
    launch_ms, launch = _launch(work, limits, reasons)
    times: dict[Bound, float | None] = {"arithmetic": arithmetic_ms, "memory": memory_ms, "launch": launch_ms}
    parts = {name: value for name, value in times.items() if value is not None}
    bound = max(parts, key=lambda name: parts[name], default=None)
    floor_ms = None if bound is None else parts[bound]
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
        arithmetic_ms=arithmetic_ms,
        memory_ms=memory_ms,
        launch_ms=launch_ms,
        floor_ms=floor_ms,
        measured_over_floor=ratio,
        bound_by=bound or "nothing known",
        summary=_summary(ratio, parts, {"arithmetic": arithmetic, "memory": memory, "launch": launch}, limits),
        reasons=reasons,
    )


def _arithmetic(work: Work, limits: DeviceLimits, reasons: dict[str, str]) -> tuple[float | None, str]:
    """Milliseconds of all products one after the other, and how many of what kind those are."""
    found: list[tuple[float, str]] = []
    for precision, count in work.flops.items():
        fastest = limits.product(precision)
        if fastest is None:
            why = limits.reasons.get(precision, "no product in it was measured")
            reasons["arithmetic_ms"] = f"{format_si(count, 'FLOP')} in {precision} are left out: {why}"
            continue
        name, rate = fastest
        kind = precision if name == precision else f"{precision}, computed in {name}"
        words = f"{format_si(count, 'FLOP')} in {kind} at {format_si(rate.per_second, 'FLOP/s')}"
        found.append((1e3 * count / rate.per_second, words))
    if not found:
        reasons.setdefault("arithmetic_ms", "no product of known size is in the graph")
        return None, ""
    return sum(taken for taken, _ in found), " and ".join(words for _, words in sorted(found, reverse=True))


def _memory(work: Work, limits: DeviceLimits, reasons: dict[str, str]) -> tuple[float | None, str]:
    """Milliseconds for what memory has to deliver, and for all of it to pass through the caches: the longer one.

    What fits into the caches may be there from the inference before. Of a result that does not, the rest is written to
    memory and read again.
    """
    bandwidth, cached = limits.memory_bandwidth, limits.cache_bandwidth
    kept = limits.cache_bytes
    if kept is None or (bandwidth is None and cached is None):
        no_cache = limits.reasons.get("cache_bytes") if kept is None else None
        reasons.setdefault("memory_ms", no_cache or limits.reasons.get("copy_bandwidth", "no bandwidth was measured"))
        return None, ""
    moved = max(0, work.least_bytes - kept) + sum(2 * max(0, size - kept) for size in work.large_intermediates)
    found = [(0.0, "")]
    if bandwidth:
        words = f"{format_si(moved, 'B')} that no cache holds at {format_si(bandwidth.per_second, 'B/s')}"
        found.append((1e3 * moved / bandwidth.per_second, words))
    if cached:
        through = max(cached.per_second, bandwidth.per_second if bandwidth else 0.0)
        words = f"{format_si(work.least_bytes, 'B')} through the caches at {format_si(through, 'B/s')}"
        found.append((1e3 * work.least_bytes / through, words))
    return max(found)


def _launch(work: Work, limits: DeviceLimits, reasons: dict[str, str]) -> tuple[float | None, str]:
    """Milliseconds of the start of each operator; of one that does nothing, the whole call takes longer than that."""
    if work.launches is None or limits.operators is None:
        missing = limits.reasons.get("operators", "it was not measured how fast operators are started")
        reasons["launch_ms"] = work.reasons.get("launches", missing) if work.launches is None else missing
        return None, ""
    call = 1 / limits.calls.per_second if limits.calls else 0.0
    each = 1 / limits.operators.per_second
    if call > work.launches * each:
        return 1e3 * call, f"a call of {work.launches} operators"
    return 1e3 * work.launches * each, f"{work.launches} operators at {1e6 * each:.3g} µs each"


def _summary(ratio: float | None, parts: Mapping[Bound, float], how: Mapping[Bound, str], limits: DeviceLimits) -> str:
    """One sentence on the parts, the largest first."""
    if not parts:
        return "nothing is known of the least time that this takes"
    bound, *others = sorted(parts, key=lambda name: -parts[name])
    others = [name for name in others if parts[name] > _WORTH_A_WORD * parts[bound]]
    least = _told_ms(parts[bound])
    words = f"bound by {_WORDS[bound]}: {how[bound]} take {least}"
    if others:
        words += ", " + " and ".join(f"{_WORDS[name]} {_told_ms(parts[name])}" for name in others)
    if ratio is None:
        return f"its floor is {least}; {words}"
    if ratio >= 1:
        return f"{ratio:.3g} × its floor of {least}; {words}"
    wrong = f"the floor is wrong, at least {100 * (1 / ratio - 1):.3g} % too high"
    return f"{ratio:.3g} × its floor of {least}, so {wrong}: {' '.join(_doubts(bound, limits))}; {words}"


def _doubts(bound: Bound, limits: DeviceLimits) -> Iterator[str]:
    yield "the device is faster than it was when its limits were measured"
    if bound == "arithmetic":
        yield "or the engine multiplies less than the graph says (Winograd's convolutions, products with zeros)"
    if bound == "memory":
        yield "or more stays in caches than the kernel says there are"
    yield from (f"({one})" for one in limits.warnings)


def _told_ms(value: float) -> str:
    return f"{value:.3g} ms" if value >= 1e-3 else f"{1e3 * value:.3g} µs"
