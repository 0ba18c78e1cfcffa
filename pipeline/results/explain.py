"""Explain in words how much of a variant is in the precision of its name, and whether that precision pays.

The name is compared with what the engine really computes in, where it tells, and with its graph where it does not.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginesmith.pipeline.engines import title
from enginesmith.pipeline.frameworks.records import HALF, format_percent, format_shares
from enginesmith.pipeline.measure.statistics import TOO_NOISY, divide
from enginesmith.pipeline.passes.quantize.precisions import AS_GIVEN, FORM_WORDS, KINDS, WEAK_DB
from enginesmith.pipeline.results.run import Assignment, Run, VariantRecord, find_record
from enginesmith.pipeline.system.device import Device

_FLOATS = ("fp32", *HALF)
_WEIGHTS_ONLY = {"int4-weights": "int4"}
_ENOUGH = 0.5
"""A precision that less than this share is in does not describe a variant."""
_SHOWN = 4
_INT8_UNITS = ("vnni", "amx_int8", "i8mm", "asimddp")
"""Parts of the names of vector extensions that sum up products of 8-bit integers."""
_FIRST_CAPABILITY = {"fp16": 7.0, "int8": 7.5, "bf16": 8.0, "fp8": 8.9}
"""Compute capabilities that brought matrix units for a type (CUDA C++ Programming Guide, "Compute Capabilities")."""


def narrowest_type(precision: str) -> str | None:
    """Return the narrowest type that a precision's name promises; None for plain float32."""
    if precision == AS_GIVEN:
        return None
    first = precision.partition("+")[0].removesuffix("-dynamic").removesuffix("-weights")
    return first if first != "fp32" else None


def find_shortfall(record: VariantRecord, where: Device) -> tuple[float, str] | None:
    """Return the share that is in the claimed precision and a sentence on it; None if it is at least a half."""
    low, evidence = narrowest_type(record.precision), record.engine_coverage or record.coverage
    if low is None:
        return None
    layers = record.build.layers if record.build else None
    by_weights = record.precision in _WEIGHTS_ONLY
    if layers and not by_weights and not layers.get(low):
        kernels = ", ".join(f"{count} {name}" for name, count in layers.items())
        return 0.0, f"none of its kernels reads {low} ({kernels}){_because(record, low, where)}"
    if evidence is None or not (shares := evidence.weights if by_weights else evidence.work):
        return None
    share = shares.get(low, 0.0)
    if share >= _ENOUGH:
        return None
    amount = "none" if not share else "less than 1 %" if share < 0.01 else f"only {format_percent(share)}"
    counted = "products, some of unknown size," if evidence.unknown_products else "multiply-adds"
    verb = f"of the weights is stored in {low}" if by_weights else f"of the {counted} is computed in {low}"
    rest = {name: other for name, other in shares.items() if name != low}
    left = format_shares(rest)
    if not by_weights and not evidence.unknown_products:  # such as fp32: Attention 30 %, LSTM 9 %
        most = {precision: dict(list(evidence.operators[precision].items())[:_SHOWN]) for precision in rest}
        left = "; ".join(f"{precision}: {format_shares(shares)}" for precision, shares in most.items())
    return share, f"{amount} {verb}; the rest is {left}{_because(record, low, where)}"


def _because(record: VariantRecord, low: str, where: Device) -> str:
    """Explain the groups that were left out on purpose, and where the engine does otherwise than the graph asks."""
    reasons = list(_explain_engine(record, low, where))
    wide_groups = [group for group in record.assignment if narrowest_type(group.precision) != low]
    if wide_groups:
        common = Counter(group.why or "no reason is recorded" for group in wide_groups).most_common(_SHOWN)
        why = ", ".join(f"{reason} ({count})" for reason, count in common)
        reasons.insert(
            0, f"{len(wide_groups)} of {len(record.assignment)} groups stay in {wide_groups[0].precision}: {why}"
        )
    return "".join(f"; {reason}" for reason in reasons)


def _explain_engine(record: VariantRecord, low: str, where: Device) -> Iterator[str]:
    """Explain where ONNX Runtime does otherwise than the graph asks."""
    ran, graph_coverage = record.engine_coverage, record.coverage
    if ran is None:
        return
    if ran.unfused:
        yield (
            f"of {sum(ran.products.values())} products, {ran.unfused} not fused with the Q/DQ around: "
            f"{title(record.engine)} dequantizes, computes in floating point and quantizes again"
        )
    half = next((name for name in (low, *record.precision.split("+")) if name in (*HALF, "fp8")), None)
    if half and where.kind == "cpu" and ran.share("fp32") > (graph_coverage.share("fp32") if graph_coverage else 0.0):
        kernels = "few" if ran.share(half) else "no"
        yield f"{title(record.engine)} has {kernels} {half} kernels on the CPU: it computes in fp32 between casts"


def explain_gain(
    record: VariantRecord, siblings: Sequence[VariantRecord], batch: int, where: Device, environment: Mapping[str, Any]
) -> tuple[str, ...]:
    """Say whether a low precision is faster than the best float variant of the same engine, with the evidence."""
    low, mine = narrowest_type(record.precision), record.row(batch)
    if low is None or mine is None or record.status != "measured":
        return ()
    best = _best_float(record, siblings, batch)
    if best is None or (theirs := best.row(batch)) is None:
        return ()
    evidence = list(_evidence(record, low, where, environment))
    ratio = divide(mine.speedup, theirs.speedup) if mine.speedup and theirs.speedup else None
    against = f"{best.id} at batch {batch}"
    if ratio is None:
        return (f"too few rounds to tell whether {low} pays against {against}",)
    if ratio.too_noisy or mine.speedup_disturbed or theirs.speedup_disturbed:
        return (f"the gain of {low} over {against} is {TOO_NOISY}",)
    speed_text = f"{ratio.times()} the speed of {against}"
    if ratio.low > 1:
        return (f"{low} pays: {speed_text}" + (f", with {evidence[0]}" if evidence else ""),)
    verdict = f"{low} is not measurably faster" if ratio.high > 1 else f"{low} does not pay"
    return ("; ".join([f"{verdict}: {speed_text}", *evidence]),)


def _best_float(record: VariantRecord, siblings: Sequence[VariantRecord], batch: int) -> VariantRecord | None:
    """Find the fastest variant of the same engine and the same weights, pruned or not, in wider floats."""
    wider = ("fp32",) if record.precision in HALF else _FLOATS

    def circumstances(variant: VariantRecord) -> tuple[object, ...]:
        return (variant.engine, variant.target, variant.cuda_graphs, variant.prune, variant.sparsity)

    others = [
        (row.p50_ms, sibling.id, sibling)
        for sibling in siblings
        if circumstances(sibling) == circumstances(record)
        and sibling.precision in wider
        and sibling.status == "measured"
        and not sibling.shortfall
        and (row := sibling.row(batch))
    ]
    return min(others)[2] if others else None


def _evidence(record: VariantRecord, low: str, where: Device, environment: Mapping[str, Any]) -> Iterator[str]:
    """List the evidence for or against the low precision: coverage, operators that change types and layouts, units."""
    coverage, graph_coverage = record.engine_coverage or record.coverage, record.coverage
    if coverage is not None:
        shares = coverage.weights if record.precision in _WEIGHTS_ONLY else coverage.macs
        what = "weights" if record.precision in _WEIGHTS_ONLY else "multiply-adds"
        yield f"{format_percent(shares.get(low, 0.0))} of the {what} in {low}"
        if coverage.unknown_products:
            yield f"{coverage.unknown_products} products of unknown size, which are in no share"
    if record.engine_coverage and coverage and coverage.islands:
        turned = coverage.reorders - (graph_coverage.reorders if graph_coverage else coverage.reorders)
        extra = [
            _count(coverage.conversions, "quantizing or dequantizing operator"),
            _count(coverage.casts, "cast between floating-point types", "casts between floating-point types"),
            _count(max(turned, 0), "change of layout", "changes of layout"),
        ]
        if any(extra):
            parts = (
                "one part of the graph" if coverage.islands == 1 else f"{coverage.islands} separate parts of the graph"
            )
            yield f"{low} runs in {parts}, with {', '.join(filter(None, extra))}"
    yield from _explain_engine(record, low, where)
    if support := describe_hardware(low, where, environment):
        yield support


def _count(count: int, singular: str, more: str = "") -> str:
    """Format a count: ``3 casts``; nothing for none."""
    return f"{count} {singular if count == 1 else more or singular + 's'}" if count else ""


def describe_hardware(low: str, where: Device, environment: Mapping[str, Any]) -> str:
    """Describe the hardware's units for a type, by the record of the machine; empty where that says nothing."""
    if where.kind == "cuda":
        return _gpu_support(low, where, environment.get("gpus") or ())
    units = [str(unit) for unit in environment.get("vector_units", ())]
    if low != "int8" or not units:
        return ""
    if able := [unit for unit in units if any(part in unit for part in _INT8_UNITS)]:
        return f"the processor has instructions for int8 dot products ({', '.join(able)})"
    return "the processor has no instructions for int8 dot products (VNNI, AMX)"


def _gpu_support(low: str, where: Device, gpus: Sequence[Mapping[str, Any]]) -> str:
    first = _FIRST_CAPABILITY.get(low)
    if first is None or where.index >= len(gpus):
        return ""
    name, capability = gpus[where.index]["name"], str(gpus[where.index]["compute_capability"])
    if not re.fullmatch(r"\d+\.\d+", capability):
        return ""
    known = f"{name} has compute capability {capability}"
    if float(capability) >= first:
        return f"{known}, and with it matrix units for {low}"
    return f"{known}, and matrix units for {low} begin with {first}"


# Single groups: what they lost, why, and what was done about it.

_ONE_BIT_DB = 6.0
"""Gain in SQNR from which on rescaling has helped a group that still loses much: that of one more bit."""
_ALL_THE_SAME = " the goal is reached all the same"


@dataclass(frozen=True)
class GroupLoss:
    """Say of a group that loses much in low precision what was done, and what that costs."""

    group: Assignment
    remedy: str
    cost: str


def choose_explained(run: Run, name: str | None) -> VariantRecord:
    """Choose the variant of that name; else, of those that were quantized, the winner, or one that was measured.

    Raises:
        UsageError: there is none of that name.
    """
    if name:
        return find_record(run, name)
    quantized = [record for record in run.variants if record.assignment]
    quantized.sort(key=lambda record: (record.id != run.winner, record.status != "measured"))
    return next(iter((*quantized, *run.variants)), run.records[0])


def list_losses(record: VariantRecord) -> list[GroupLoss]:
    """List the groups that lose much or stayed in float: first those that change the answers most, where it is known.

    Then come those whose own outputs lose most.
    """
    total = sum(group.macs or 0 for group in record.assignment)
    low = narrowest_type(record.precision)
    groups = [group for group in record.assignment if _is_weak(group) or narrowest_type(group.precision) != low]
    groups.sort(key=_rank)
    return [_explain_group(group, record, low, total) for group in groups]


def _rank(group: Assignment) -> tuple[float, float, int]:
    own = math.inf if group.given_sqnr_db is None else group.given_sqnr_db
    return -(group.answer_change or 0.0), own, -(group.macs or 0)


def _is_weak(group: Assignment) -> bool:
    return any(sqnr is not None and sqnr < WEAK_DB for sqnr in (group.given_sqnr_db, group.sqnr_db))


def _explain_group(group: Assignment, record: VariantRecord, low: str | None, total: int) -> GroupLoss:
    share = format_percent(group.macs / total) if group.macs is not None and total else "an unknown share"
    if narrowest_type(group.precision) != low:
        remedy = f"stays in {group.precision}: {group.why}"
        if group.answer_change is not None:
            alone = f"in {low} alone" if record.precision in HALF else "quantized alone"
            remedy += f"; {alone}, it changes the answers by {format_percent(group.answer_change)}"
        return GroupLoss(group, remedy, f"{share} of the multiply-adds")
    helped, still = _tell_gain(group)
    remedy = FORM_WORDS.get(group.form, "") if helped else ""
    cost = (
        "a multiplication where no operator takes the factors" if remedy and group.form == "multiplied" else "nothing"
    )
    if any(recovery.subject == "int8" for recovery in record.recovery):
        return GroupLoss(group, f"{remedy}, then trained" if remedy else "trained", cost)
    reached = "" if record.search and not any(step.passed for step in record.search) else _ALL_THE_SAME
    if not remedy:
        untried = [name for name, kind in KINDS.items() if not kind.calibrated]  # no other forms of the graph are made
        none = f"none is tried in {record.precision}" if record.precision in untried else "none found"
        remedy = f"{none}{reached and ':'}{reached}{still and f', with {still}'}"
    elif still:
        remedy = f"{remedy}: still {still}{reached and ','}{reached}"
    return GroupLoss(group, remedy, cost)


def _tell_gain(group: Assignment) -> tuple[bool, str]:
    """Tell whether the form of the graph lifted a group, and what SQNR it has where that is still little."""
    before, after = group.given_sqnr_db, group.sqnr_db
    if after is None or after >= WEAK_DB:
        return True, ""
    return before is not None and after >= before + _ONE_BIT_DB, f"{round(after, 1) + 0.0:.1f} dB"
