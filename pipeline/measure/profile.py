"""Divide a session's time among the modules of the model that its operators do the work of.

Profilers slow down what they look at, so a profile says how time is divided, and the latency measurement how much there
is. A session is profiled alone in a fresh process.
"""

import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.engines.profiling import BETWEEN, NODE, OperatorTime, Profiled, ProfileRequest
from enginesmith.pipeline.errors import EnginesmithError, MissingCapability
from enginesmith.pipeline.frameworks.records import explain_missing
from enginesmith.pipeline.measure.rows import ROOT, Profile, ProfileRow
from enginesmith.pipeline.system.worker import Progress, run
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.units import group_values, name_some

_LIMIT_SECONDS = 900.0
_GAP = 0.1
"""Share of a call that may lie outside of operators before a profile says so."""


def measure_profile(
    candidate: Candidate,
    batch: int,
    feeds: Feeds,
    graph: Path | None,
    calls: int,
    log_folder: Path,
    progress: Progress,
) -> Profile:
    """Profile a candidate in a fresh process; one that fails, or cannot be profiled, gets a profile that says why.

    ``graph`` is the ONNX file that its engine was built from.
    """
    progress(f"profile of {candidate.id} at batch {batch}")
    log = log_folder / f"profile-{candidate.id}.log"
    empty = Profile(variant=candidate.id, batch=batch, device=str(candidate.device), calls=calls)
    try:
        profiled: Profiled = run(_profile, candidate, feeds, graph, calls, log=log, timeout_seconds=_LIMIT_SECONDS)
    except EnginesmithError as error:
        failure = None if isinstance(error, MissingCapability) else str(error)
        return explain_missing(empty.model_copy(update={"failure": failure}), str(error))
    return fill_profile(empty, profiled)


def _profile(candidate: Candidate, feeds: Feeds, graph: Path | None, calls: int, progress: Progress) -> Profiled:
    with tempfile.TemporaryDirectory(prefix="enginesmith-profile-") as scratch:
        request = ProfileRequest(candidate.artifact, candidate.device, feeds, calls, Path(scratch), graph)
        return candidate.engine.profile(request)


def fill_profile(profile: Profile, profiled: Profiled) -> Profile:
    """Add up the operators' time by module."""
    total = sum(operator.seconds for operator in profiled.operators)
    together = _group_modules(operator.origin.modules for operator in profiled.operators)
    members: dict[tuple[str, ...], list[OperatorTime]] = {}
    for operator in profiled.operators:
        key = together[operator.origin.modules[0]] if operator.origin.modules else (f"{NODE}{operator.name}", "")
        members.setdefault(key, []).append(operator)
    known = {*together, *(path for operator in profiled.operators for path in operator.origin.also)}
    rows = [_add_operators(key, operators, total, known) for key, operators in members.items()]
    notes, whole = list(profiled.notes), profiled.call_seconds
    if whole and whole - total > _GAP * whole:
        both = f"{total * 1e3:.3g} ms of {whole * 1e3:.3g} ms a call"
        notes.append(f"operators add up to {both}; the rest lies between them, or disturbed some")
    unknown = sum(row.ms for row in rows if not row.modules) / 1e3
    return profile.model_copy(
        update={
            "source": profiled.source,
            "rows": tuple(sorted(rows, key=lambda row: -row.ms)),
            "total_ms": total * 1e3,
            "call_ms": None if whole is None else whole * 1e3,
            "unattributed_share": unknown / total if total else 0.0,
            "notes": tuple(notes),
            "reasons": {} if whole is not None else {"call_ms": f"{profiled.source} tells the time of operators alone"},
        }
    )


def _add_operators(
    key: tuple[str, ...], operators: Sequence[OperatorTime], total: float, known: set[str]
) -> ProfileRow:
    modules = key if operators[0].origin.modules else ()
    ordered = sorted(operators, key=lambda operator: -operator.seconds)
    seconds = sum(operator.seconds for operator in operators)
    runs, conversions = Counter[str](), dict[str, float]()
    also: dict[str, dict[str, None]] = {}
    for operator in ordered:
        runs[operator.operator] += operator.calls
        if operator.origin.converts:
            conversions[operator.operator] = conversions.get(operator.operator, 0.0) + operator.seconds * 1e3
        for path, fused in operator.origin.also.items():
            if path not in modules:
                also.setdefault(path, {}).update(dict.fromkeys(fused))
    return ProfileRow(
        module=name_modules(modules, known) if modules else f"(unknown: {operators[0].name})",
        modules=modules,
        operators=dict(runs),
        calls=runs.total(),
        ms=seconds * 1e3,
        share=seconds / total if total else 0.0,
        precision=next((operator.precision for operator in ordered if operator.origin.multiplies), ""),
        conversions=conversions,
        also={path: tuple(names) for path, names in also.items()},
    )


def _group_modules(together: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Group modules that share a row because an operator does the work of several: path → all of its row."""
    groups: dict[str, tuple[str, ...]] = {}
    for modules in together:
        merged = tuple(dict.fromkeys(path for module in modules for path in groups.get(module, (module,))))
        groups.update(dict.fromkeys(merged, merged))
    return groups


def name_modules(modules: Sequence[str], known: set[str]) -> str:
    """Name a row: by its module, the one that holds all of its modules and no other, or ``a + b``."""
    names = [path.removeprefix(NODE) or ROOT for path in modules]
    if len(names) == 1:
        return names[0]
    levels = zip(*(path.split(".") for path in modules), strict=False)
    shared = ".".join(level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels))
    if not shared:
        return " + ".join(names)
    if {path for path in known if path == shared or path.startswith(f"{shared}.")} == set(modules):
        return shared
    return f"{shared}." + " + ".join(path.removeprefix(f"{shared}.") for path in modules)


# Profiles side by side: a row for each module, its time in each variant, and the reasons of differences.

_CONVERTING = 0.1
"""Share of a row's time that conversions take before they are mentioned."""
_LOST = 0.005
"""Share of the baseline's total that a row has to lose to be put before those that cost most."""
_SLOWER = 1.1
_SHOWN = 2
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\b)")
"""A layer's number in a path."""
_NARROW = ("int8", "fp8", "int4", "fp4")


class JoinedRow(BaseModel, frozen=True):
    """One module, or several that some variant runs as one, in all variants."""

    module: str
    modules: tuple[str, ...]
    ms: dict[str, float | None]
    """By variant, the baseline first; None where it has no operator of it, or no profile."""
    why: dict[str, str] = {}
    """By variant, where there is evidence."""

    @property
    def ratio(self) -> dict[str, float | None]:
        """By variant, its time over the baseline's; None where either is None."""
        base = next(iter(self.ms.values()))
        return {variant: None if ms is None or not base else ms / base for variant, ms in self.ms.items()}

    @property
    def lost_ms(self) -> float:
        """The most that a variant takes more than the baseline; negative if each takes less, 0 for unknown modules."""
        if not self.modules:
            return 0.0
        baseline, *others = (ms or 0.0 for ms in self.ms.values())
        return max((ms - baseline for ms in others), default=0.0)

    @property
    def most_ms(self) -> float:
        """The time in the variant that takes most."""
        return max(ms or 0.0 for ms in self.ms.values())


class _Indexed:
    """Find a profile's rows by what they are about: there may be thousands."""

    def __init__(self, profile: Profile, together: Mapping[str, tuple[str, ...]]) -> None:
        self.profile = profile
        self.rows: dict[tuple[str, ...], list[ProfileRow]] = {}
        """By modules that belong together."""
        self.holders: dict[str, list[int]] = {}
        """By path, places of the rows that do some of its work besides their own."""
        self.narrow = any(row.precision in _NARROW for row in profile.rows)
        for place, row in enumerate(profile.rows):
            key = together[row.modules[0]] if row.modules else (row.module,)
            self.rows.setdefault(key, []).append(row)
            for path in row.also:
                self.holders.setdefault(path, []).append(place)


def join_profiles(profiles: Sequence[Profile]) -> tuple[JoinedRow, ...]:
    """Join profiles of one batch size, the baseline's first, by module: what lost time, then what costs most.

    For each variant they add up to its own total. Modules share a row where some variant has one operator for them.
    """
    profiles = [profile for profile in profiles if profile.total_ms is not None]
    if not profiles:
        return ()
    together = _group_modules(row.modules for profile in profiles for row in profile.rows if row.modules)
    indexed = [_Indexed(profile, together) for profile in profiles]
    keys = dict.fromkeys(key for table in indexed for key in table.rows)
    labels = {group: name_modules(group, set(together)) for group in set(together.values())}
    names = {path: labels[group] for path, group in together.items()}
    return _sort_rows([_join(key, indexed, names) for key in keys])


def merge_layers(rows: Sequence[JoinedRow]) -> tuple[JoinedRow, ...]:
    """Merge rows of paths that differ in a layer's number alone: ``encoder.layer.*.output (12×)``; totals stay.

    Reasons stay that hold for every row: in a single one it may be the machine's noise.
    """
    alike = group_values((_NUMBER.sub("*", row.module) if row.modules else row.module, row) for row in rows)
    merged: list[JoinedRow] = []
    for name, group in alike.items():
        if len(group) == 1:
            merged += group
            continue
        why = {}
        for variant in group[0].ms:
            first, *others = (_NUMBER.sub("*", row.why.get(variant, "")).split("; ") for row in group)
            why[variant] = "; ".join(phrase for phrase in first if all(phrase in other for other in others))
        known = {variant: [ms for row in group if (ms := row.ms[variant]) is not None] for variant in group[0].ms}
        row = JoinedRow(
            module=f"{name} ({len(group)}×)",
            modules=tuple(path for row in group for path in row.modules),
            ms={variant: sum(times) if times else None for variant, times in known.items()},
            why={variant: text for variant, text in why.items() if text},
        )
        merged.append(row)
    return _sort_rows(merged)


def _sort_rows(rows: Sequence[JoinedRow]) -> tuple[JoinedRow, ...]:
    enough = _LOST * sum(next(iter(row.ms.values())) or 0.0 for row in rows)
    return tuple(sorted(rows, key=lambda row: (-row.lost_ms if row.lost_ms > enough else 0.0, -row.most_ms)))


def _join(key: tuple[str, ...], profiles: Sequence[_Indexed], names: Mapping[str, str]) -> JoinedRow:
    parts = [(profile, profile.rows.get(key, [])) for profile in profiles]
    times = [sum(row.ms for row in rows) if rows else None for _, rows in parts]
    base = parts[0][1]
    idle = bool(base) and all(set(row.operators) == {BETWEEN} for row in base)
    why = {}
    for part, rows in parts[1:]:
        absent = "" if idle else _explain_absence(part, key, names)
        why[part.profile.variant] = _explain(part, rows, times[0]) if rows else absent
    unknown = next((row for _, rows in parts for row in rows if not row.modules), None)
    return JoinedRow(
        module=names[key[0]] if unknown is None else unknown.module,
        modules=key if unknown is None else (),
        ms={profile.variant: time for profile, time in zip((table.profile for table in profiles), times, strict=True)},
        why={variant: text for variant, text in why.items() if text},
    )


def _explain(whole: _Indexed, rows: Sequence[ProfileRow], base_ms: float | None) -> str:
    """Say what is known of why a variant takes its time for some modules."""
    total, phrases = sum(row.ms for row in rows), []
    if base_ms and total > _SLOWER * base_ms:
        slowest = max(rows, key=lambda row: row.ms)
        phrases.append(f"mostly {next(iter(slowest.operators))}")
    taken: dict[str, float] = {}
    for row in rows:
        for operator, ms in row.conversions.items():
            taken[operator] = taken.get(operator, 0.0) + ms
    if total and sum(taken.values()) >= _CONVERTING * total:
        ordered = sorted(taken, key=lambda operator: -taken[operator])
        phrases.append(f"{100 * sum(taken.values()) / total:.0f} % in {', '.join(ordered[:_SHOWN])}")
    # products in floating point, in a variant that has others in fewer bits
    wide = next((row.precision for row in rows if row.precision and row.precision not in _NARROW), "")
    if whole.narrow and wide:
        between = any("DequantizeLinear" in row.operators for row in rows)
        phrases.append(f"computed in {wide}" + (" on what was dequantized: not fused" if between else ""))
    also = {path or "the model": operators for row in rows for path, operators in row.also.items()}
    if also:
        shown = [f"{', '.join(operators)} of {path}" for path, operators in also.items()]
        phrases.append(f"with {name_some(shown, _SHOWN, ' and ')}")
    return "; ".join(phrases)


def _explain_absence(whole: _Indexed, key: tuple[str, ...], names: Mapping[str, str]) -> str:
    """Say why a variant has no operator for some modules: where they are fused into others, else nothing is known."""
    holders: dict[str, list[str]] = {}
    for place, index in sorted(
        (place, index) for index, path in enumerate(key) for place in whole.holders.get(path, ())
    ):
        row = whole.profile.rows[place]
        holders.setdefault(names[row.modules[0]], []).extend(row.also[key[index]])
    if not holders:
        return "" if whole.profile.unattributed_share else "no operator of it is left"
    operators = dict.fromkeys(name for fused in holders.values() for name in fused)
    return f"{', '.join(operators)} done within {name_some(list(holders), _SHOWN)}"


def list_columns(profiles: Sequence[Profile]) -> tuple[str, ...]:
    """List the heads of the table of :func:`format_cells`."""
    names = [profile.variant for profile in profiles if profile.total_ms is not None]
    return ("module", *(f"{name} ms" for name in names), *(f"{name} / {names[0]}" for name in names[1:]), "why")


def format_cells(profiles: Sequence[Profile], most: int = 30) -> list[tuple[str, ...]]:
    """Format the table for people: at most so many modules, what is left of them in one row, and the totals.

    Where there are more, layers that differ in their number alone are shown together.
    """
    rows = join_profiles(profiles)
    if not rows:
        return []
    if len(rows) > most:
        rows = merge_layers(rows)
    left, sums = rows[most:], {"total": rows}
    if left:
        sums = {f"({len(left)} more)": left, **sums}
    added = [
        JoinedRow(
            module=name,
            modules=(),
            ms={variant: sum(row.ms[variant] or 0.0 for row in group) for variant in group[0].ms},
        )
        for name, group in sums.items()
    ]
    return [_format_row(row) for row in (*rows[:most], *added)]


def _format_row(row: JoinedRow) -> tuple[str, ...]:
    by_text = group_values((text, variant) for variant, text in row.why.items())
    why = "; ".join(f"{', '.join(variants)}: {text}" for text, variants in by_text.items())
    times = ("–" if ms is None else f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}" for ms in row.ms.values())
    ratios = ("–" if ratio is None else f"{ratio:.2f}×" for ratio in list(row.ratio.values())[1:])
    return (row.module, *times, *ratios, next(iter(by_text), "") if len(row.ms) == 2 else why)
