"""Divide a session's time among the modules of the model that its operators do the work of.

Profilers slow down what they look at, so a profile says how time is divided, and the latency measurement how much there
is. A session is profiled alone in a fresh process.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.engines.base import BETWEEN, NODE, Candidate, OperatorTime, Profiled, ProfileRequest
from enginesmith.pipeline.errors import EnginesmithError, MissingCapability
from enginesmith.pipeline.measure.rows import ROOT, Profile, ProfileRow
from enginesmith.pipeline.system.worker import run
from enginesmith.pipeline.tensors import Feeds

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


class JoinedRow(BaseModel):
    """One module, or several that some variant runs as one, in all variants."""

    model_config = ConfigDict(frozen=True)

    module: str
    modules: tuple[str, ...]
    ms: dict[str, float | None]
    """By variant; None where it has no operator of it, or no profile."""
    ratio: dict[str, float | None]
    """By variant: its time over the baseline's; None where either is None."""
    why: dict[str, str] = {}
    """By variant, where there is evidence."""

    @property
    def lost_ms(self) -> float:
        """The most that a variant takes more than the baseline; negative if each takes less, 0 for unknown modules."""
        if not self.modules:
            return 0.0
        baseline, *others = (found or 0.0 for found in self.ms.values())
        return max((found - baseline for found in others), default=0.0)

    @property
    def most_ms(self) -> float:
        """What it takes where it takes most."""
        return max(found or 0.0 for found in self.ms.values())


@dataclass(frozen=True)
class _Indexed:
    """A profile whose rows are found by what they are about: there may be thousands."""

    profile: Profile
    rows: dict[tuple[str, ...], list[ProfileRow]]
    """By modules that belong together."""
    holders: dict[str, list[int]]
    """By path, places of the rows that do some of its work besides their own."""
    narrow: bool
    """Whether some of its products are in few bits."""

    @classmethod
    def of(cls, profile: Profile, together: dict[str, tuple[str, ...]]) -> "_Indexed":
        rows: dict[tuple[str, ...], list[ProfileRow]] = {}
        holders: dict[str, list[int]] = {}
        for place, row in enumerate(profile.rows):
            rows.setdefault(_key(row, together), []).append(row)
            for path in row.also:
                holders.setdefault(path, []).append(place)
        return cls(profile, rows, holders, any(row.precision in _NARROW for row in profile.rows))


@dataclass(frozen=True)
class _Part:
    """A row of a table as one variant has it: some rows of its profile, whose modules belong together."""

    whole: _Indexed
    rows: tuple[ProfileRow, ...]

    @property
    def profile(self) -> Profile:
        return self.whole.profile

    @property
    def ms(self) -> float | None:
        return sum(row.ms for row in self.rows) if self.rows else None


def joined(profiles: Sequence[Profile]) -> tuple[JoinedRow, ...]:
    """Rows for profiles of one batch size, the baseline's first: what lost time, then what costs most.

    For each variant they add up to its own total. Modules share a row where some variant has one operator for them.
    """
    profiles = [one for one in profiles if one.total_ms is not None]
    if not profiles:
        return ()
    together = groups(row.modules for one in profiles for row in one.rows if row.modules)
    found = [_Indexed.of(one, together) for one in profiles]
    keys = dict.fromkeys(key for one in found for key in one.rows)
    paths = set(together)
    labels = {group: label(group, paths) for group in set(together.values())}
    names = {path: labels[group] for path, group in together.items()}
    return _sort_rows([_joined(key, found, names) for key in keys])


def repeated(rows: Sequence[JoinedRow]) -> tuple[JoinedRow, ...]:
    """Rows of paths that differ in a layer's number alone as one: ``encoder.layer.*.output (12×)``; totals stay."""
    alike: dict[str, list[JoinedRow]] = {}
    for row in rows:
        alike.setdefault(_NUMBER.sub("*", row.module) if row.modules else row.module, []).append(row)
    return _sort_rows([_added(name, found) if len(found) > 1 else found[0] for name, found in alike.items()])


def _added(name: str, rows: Sequence[JoinedRow]) -> JoinedRow:
    ms = {variant: _sum(row.ms[variant] for row in rows) for variant in rows[0].ms}
    return JoinedRow(
        module=f"{name} ({len(rows)}×)",
        modules=tuple(path for row in rows for path in row.modules),
        ms=ms,
        ratio=_ratios(ms),
        why={variant: text for variant in ms if (text := _keep_common_phrases(rows, variant))},
    )


def _keep_common_phrases(rows: Sequence[JoinedRow], variant: str) -> str:
    """Keep the phrases that hold for every row: in a single one it may be the machine's noise."""
    first, *others = (_NUMBER.sub("*", row.why.get(variant, "")).split("; ") for row in rows)
    return "; ".join(phrase for phrase in first if all(phrase in one for one in others))


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratios(ms: dict[str, float | None]) -> dict[str, float | None]:
    base = next(iter(ms.values()))
    return {variant: found / base if found is not None and base else None for variant, found in ms.items()}


def _sort_rows(rows: Sequence[JoinedRow]) -> tuple[JoinedRow, ...]:
    """Sort rows: those that lost time first, then those that cost most."""
    enough = _LOST * sum(next(iter(row.ms.values())) or 0.0 for row in rows)
    return tuple(sorted(rows, key=lambda row: (-row.lost_ms if row.lost_ms > enough else 0.0, -row.most_ms)))


def _key(row: ProfileRow, together: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    return together[row.modules[0]] if row.modules else (row.module,)


def _joined(key: tuple[str, ...], profiles: Sequence[_Indexed], names: dict[str, str]) -> JoinedRow:
    parts = [_Part(one, tuple(one.rows.get(key, ()))) for one in profiles]
    unknown = next((row for part in parts for row in part.rows if not row.modules), None)
    base = parts[0].ms
    idle = bool(parts[0].rows) and all(set(row.operators) == {BETWEEN} for row in parts[0].rows)
    why = {part.profile.variant: _why(part, base, key, names) if part.rows or not idle else "" for part in parts[1:]}
    ms = {part.profile.variant: part.ms for part in parts}
    return JoinedRow(
        module=names[key[0]] if unknown is None else unknown.module,
        modules=key if unknown is None else (),
        ms=ms,
        ratio=_ratios(ms),
        why={variant: text for variant, text in why.items() if text},
    )


def _why(part: _Part, base: float | None, key: tuple[str, ...], names: dict[str, str]) -> str:
    if not part.rows:
        return _without(part.whole, key, names)
    assert part.ms is not None
    slowest = max(part.rows, key=lambda row: row.ms)
    found = []
    if base and part.ms > _SLOWER * base:
        found.append(f"mostly {next(iter(slowest.operators))}")
    found += [_converting(part.rows, part.ms), _wide(part), _list_fused(part.rows)]
    return "; ".join(filter(None, found))


def _without(whole: _Indexed, key: tuple[str, ...], names: dict[str, str]) -> str:
    """Say why a variant has no operator for some modules: where they are fused into others, else nothing is known."""
    holders: dict[str, list[str]] = {}
    for place, index in sorted(
        (place, index) for index, path in enumerate(key) for place in whole.holders.get(path, ())
    ):
        row = whole.profile.rows[place]
        holders.setdefault(names[row.modules[0]], []).extend(row.also[key[index]])
    if not holders:
        return "" if whole.profile.unattributed_share else "no operator of it is left"
    operators = dict.fromkeys(name for found in holders.values() for name in found)
    more = f" and {len(holders) - _SHOWN} more" if len(holders) > _SHOWN else ""
    return f"{', '.join(operators)} done within {', '.join(list(holders)[:_SHOWN])}{more}"


def _converting(rows: Sequence[ProfileRow], total: float) -> str:
    taken: dict[str, float] = {}
    for row in rows:
        for operator, ms in row.conversions.items():
            taken[operator] = taken.get(operator, 0.0) + ms
    share = sum(taken.values()) / total if total else 0.0
    if share < _CONVERTING:
        return ""
    ordered = sorted(taken, key=lambda operator: -taken[operator])
    return f"{100 * share:.0f} % in {', '.join(ordered[:_SHOWN])}"


def _wide(part: _Part) -> str:
    """Products in floating point, in a variant that has others in fewer bits."""
    if not part.whole.narrow:
        return ""
    wide = next((row.precision for row in part.rows if row.precision and row.precision not in _NARROW), "")
    if not wide:
        return ""
    between = any("DequantizeLinear" in row.operators for row in part.rows)
    return f"computed in {wide}" + (" on what was dequantised: not fused" if between else "")


def _list_fused(rows: Sequence[ProfileRow]) -> str:
    also = {path or "the model": found for row in rows for path, found in row.also.items()}
    shown = [f"{', '.join(operators)} of {path}" for path, operators in also.items()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"with {' and '.join(shown[:_SHOWN])}{more}" if shown else ""


def columns(profiles: Sequence[Profile]) -> tuple[str, ...]:
    """Heads of the table of :func:`cells`."""
    found = [one.variant for one in profiles if one.total_ms is not None]
    ratios = (f"{name} / {found[0]}" for name in found[1:])
    return ("module", *(f"{name} ms" for name in found), *ratios, "why")


def cells(profiles: Sequence[Profile], most: int = 30) -> list[tuple[str, ...]]:
    """Format the table for people: at most so many modules, what is left of them in one row, and the totals.

    Where there are more, layers that differ in their number alone are shown together.
    """
    rows = joined(profiles)
    if not rows:
        return []
    if len(rows) > most:
        rows = repeated(rows)
    kept, left = rows[:most], rows[most:]
    lines = [_cells(row.module, row.ms, row.ratio, _reasons(row)) for row in kept]
    if left:
        lines.append(_summed(f"({len(left)} more)", left))
    return [*lines, _summed("total", rows)]


def _summed(name: str, rows: Sequence[JoinedRow]) -> tuple[str, ...]:
    ms: dict[str, float | None] = {variant: sum(row.ms[variant] or 0.0 for row in rows) for variant in rows[0].ms}
    return _cells(name, ms, _ratios(ms), "")


def _cells(name: str, ms: dict[str, float | None], ratio: dict[str, float | None], why: str) -> tuple[str, ...]:
    times = ("–" if found is None else f"{found:.3g}" if found < 1000 else f"{found:.0f}" for found in ms.values())
    ratios = ("–" if found is None else f"{found:.2f}×" for found in list(ratio.values())[1:])
    return (name, *times, *ratios, why)


def _reasons(row: JoinedRow) -> str:
    """Join reasons: of one variant as it stands; of several under their names, those of one reason together."""
    by_text: dict[str, list[str]] = {}
    for variant, text in row.why.items():
        by_text.setdefault(text, []).append(variant)
    if len(row.ms) == 2:
        return next(iter(by_text), "")
    return "; ".join(f"{', '.join(variants)}: {text}" for text, variants in by_text.items())


def groups(together: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Group modules that share a row because an operator does the work of several: path → all of its row."""
    found: dict[str, tuple[str, ...]] = {}
    for modules in together:
        merged = tuple(dict.fromkeys(path for one in modules for path in found.get(one, (one,))))
        found.update(dict.fromkeys(merged, merged))
    return found


def label(modules: Sequence[str], known: set[str]) -> str:
    """Name a row: by its module, the one that holds all of its modules and no other, or ``a + b``."""
    names = [path.removeprefix(NODE) or ROOT for path in modules]
    if len(names) == 1:
        return names[0]
    shared = _common(modules)
    below = {path for path in known if path == shared or path.startswith(f"{shared}.")}
    if shared and below == set(modules):
        return shared
    if shared:
        names = [path.removeprefix(f"{shared}.") for path in modules]
    return (f"{shared}." if shared else "") + " + ".join(names)


def _common(modules: Sequence[str]) -> str:
    """Find the closest module that all of these are in; empty where that is the model."""
    parts = [path.split(".") for path in modules]
    shared = 0
    while all(len(one) > shared and one[: shared + 1] == parts[0][: shared + 1] for one in parts):
        shared += 1
    return ".".join(parts[0][:shared])


Progress = Callable[[str], None]

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
    time_limit_seconds: float = 900.0,
) -> Profile:
    """Profile a candidate in a fresh process; one that fails, or cannot be profiled, gets a profile that says why.

    ``graph`` is the ONNX file that its engine was built from.
    """
    progress(f"profile of {candidate.id} at batch {batch}")
    log = log_folder / f"profile-{candidate.id}.log"
    empty = Profile(variant=candidate.id, batch=batch, device=str(candidate.device), calls=calls)
    try:
        found: Profiled = run(_profile, candidate, feeds, graph, calls, log=log, timeout_seconds=time_limit_seconds)
    except MissingCapability as error:
        return _unknown(empty, str(error))
    except EnginesmithError as error:
        return _unknown(empty.model_copy(update={"failure": str(error)}), str(error))
    return of(empty, found)


def _profile(candidate: Candidate, feeds: Feeds, graph: Path | None, calls: int, progress: Progress) -> Profiled:
    with tempfile.TemporaryDirectory(prefix="enginesmith-profile-") as scratch:
        request = ProfileRequest(candidate.artifact, candidate.device, feeds, calls, Path(scratch), graph)
        return candidate.engine.profile(request)


def _unknown(profile: Profile, reason: str) -> Profile:
    names = [name for name, value in profile if value is None and name != "failure"]
    return profile.model_copy(update={"reasons": dict.fromkeys(names, reason)})


def of(profile: Profile, found: Profiled) -> Profile:
    """Fill the profile with the operators that were found."""
    total = sum(one.seconds for one in found.operators)
    together = groups(one.origin.modules for one in found.operators)
    members: dict[tuple[str, ...], list[OperatorTime]] = {}
    for one in found.operators:
        key = together[one.origin.modules[0]] if one.origin.modules else (f"{NODE}{one.name}", "")
        members.setdefault(key, []).append(one)
    known = {*together, *(path for one in found.operators for path in one.origin.also)}
    rows = [_row(key, operators, total, known) for key, operators in members.items()]
    notes, whole = list(found.notes), found.call_seconds
    if whole and whole - total > _GAP * whole:
        both = f"{total * 1e3:.3g} ms of {whole * 1e3:.3g} ms a call"
        notes.append(f"operators add up to {both}; the rest lies between them, or disturbed some")
    unknown = sum(row.ms for row in rows if not row.modules) / 1e3
    return profile.model_copy(
        update={
            "source": found.source,
            "rows": tuple(sorted(rows, key=lambda row: -row.ms)),
            "total_ms": total * 1e3,
            "call_ms": None if whole is None else whole * 1e3,
            "unattributed_share": unknown / total if total else 0.0,
            "notes": tuple(notes),
            "reasons": {} if whole is not None else {"call_ms": f"{found.source} tells the time of operators alone"},
        }
    )


def _row(key: tuple[str, ...], operators: Sequence[OperatorTime], total: float, known: set[str]) -> ProfileRow:
    modules = tuple(key) if operators[0].origin.modules else ()
    ordered = sorted(operators, key=lambda one: -one.seconds)
    seconds = sum(one.seconds for one in operators)
    runs, conversions = Counter[str](), dict[str, float]()
    also: dict[str, dict[str, None]] = {}
    for one in ordered:
        runs[one.operator] += one.calls
        if one.origin.converts:
            conversions[one.operator] = conversions.get(one.operator, 0.0) + one.seconds * 1e3
        for path, fused in one.origin.also.items():
            if path not in modules:
                also.setdefault(path, {}).update(dict.fromkeys(fused))
    return ProfileRow(
        module=label(modules, known) if modules else f"(unknown: {operators[0].name})",
        modules=modules,
        operators=dict(runs),
        calls=runs.total(),
        ms=seconds * 1e3,
        share=seconds / total if total else 0.0,
        precision=next((one.precision for one in ordered if one.origin.multiplies), ""),
        conversions=conversions,
        also={path: tuple(found) for path, found in also.items()},
    )
