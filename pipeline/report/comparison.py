"""Runs side by side, as people read them: what differs for certain first, then every number, then what else changed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from enginesmith.pipeline.measure.statistics import TOO_NOISY
from enginesmith.pipeline.report.markdown import plain, table
from enginesmith.pipeline.results.comparison import (
    BatchComparison,
    Change,
    Comparison,
    MetricDelta,
    Pair,
    VariantComparison,
)
from enginesmith.pipeline.results.differences import Changed
from enginesmith.pipeline.units import format_bytes, format_seconds, ms

NUMBERS = ("", "reference", "other", "change [95 %]", "")
CHANGED = ("", "field", "reference", "other")
_NAMES = {
    "peak_bytes": "peak memory",
    "size_bytes": "size",
    "drop": "drop",
    "sqnr_db": "lowest SQNR, dB",
    "build_seconds": "build",
}
_COMPARED = {"peak_bytes": ("less", "more"), "size_bytes": ("a smaller", "a larger"), "drop": ("a smaller", "a larger")}
_UNCERTAIN, _UNJUDGED = "no certain change", "not judged"
_LONGEST, _DIGEST = 80, 12
_LARGE = 3.0
"""Ratios from which per cent are hard to read."""


@dataclass(frozen=True)
class Part:
    """A heading, sentences, and a table, each of which may be empty."""

    title: str = ""
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def parts(comparison: Comparison) -> tuple[Part, ...]:
    """All that there is to show, in order."""
    return tuple(part for pair in comparison.pairs for part in _pair(pair))


def markdown(comparison: Comparison) -> str:
    """The same as a document of Markdown."""
    blocks = []
    for part in parts(comparison):
        blocks += [f"## {plain(part.title)}"] if part.title else []
        blocks += ["\n".join(f"- {plain(line)}" for line in part.lines)] if part.lines else []
        blocks += [table(part.columns, part.rows)] if part.rows else []
    return "\n\n".join(blocks) + "\n"


def _pair(pair: Pair) -> Iterator[Part]:
    yield Part(f"{pair.after.path} beside {pair.before.path}", (*_summary(pair), *_cautions(pair)))
    for variant in pair.variants:
        rows = tuple(row for row in _rows(variant) if set(row[1:3]) != {"–"})
        said = () if rows else (_nothing(variant),)
        yield Part(variant.id, said, NUMBERS if rows else (), rows)
    yield Part(lines=tuple(_notes(pair)))
    yield _changed(pair)


def _summary(pair: Pair) -> Iterator[str]:
    yield f"reference: {pair.before.path}, begun {pair.before.created}"
    yield f"other: {pair.after.path}, begun {pair.after.created}"
    first, second = (side.winner or "none" for side in (pair.before, pair.after))
    yield f"winner of both: {first}" if first == second else f"winner: {first} of the reference, {second} of the other"
    found = list(certain(pair.variants))
    yield f"differs for certain: {'; '.join(found)}" if found else "no measured difference is certain"
    for path, names in ((pair.before.path, pair.only_before), (pair.after.path, pair.only_after)):
        if names:
            yield f"only in {path}: {', '.join(names)}"


def certain(variants: Iterable[VariantComparison]) -> Iterator[str]:
    """Every difference that its interval or spread tells from chance, a sentence each."""
    for variant in variants:
        for row in variant.latency:
            if row.change.significant:
                yield f"{variant.id} is {_word(row.change)} at batch {row.batch}: {percent(row.change)}"
        for number in variant.numbers:
            if number.significant:
                yield f"{variant.id} has {_judgement(number)} {_NAMES[number.name]}: {_apart(number)}"


def _cautions(pair: Pair) -> Iterator[str]:
    yield from (f"caution: {text}" for text in pair.cautions)


def _nothing(variant: VariantComparison) -> str:
    first, second = variant.before_status, variant.after_status
    return f"no numbers: {first} in both" if first == second else f"no numbers: {first}, then {second}"


def _rows(variant: VariantComparison) -> Iterator[tuple[str, ...]]:
    if variant.before_status != variant.after_status:
        yield ("status", variant.before_status, variant.after_status, "", "")
    for row in variant.latency:
        yield latency_row(row)
        if row.before_speedup and row.after_speedup and row.before_speedup.high != row.before_speedup.low:
            yield (f"speed-up at batch {row.batch}", row.before_speedup.times(), row.after_speedup.times(), "", "")
        yield (f"p99 at batch {row.batch}, ms", ms(row.before_p99_ms), ms(row.after_p99_ms), "", "")
    yield from map(number_row, variant.numbers)


def number_row(number: MetricDelta) -> tuple[str, ...]:
    """One number in both runs; columns as in :data:`NUMBERS`."""
    sides = (_shown(number, number.before), _shown(number, number.after))
    return (_NAMES[number.name], *sides, _apart(number), _judgement(number))


def latency_row(row: BatchComparison) -> tuple[str, ...]:
    """The median latency at one batch size in both runs, likewise."""
    change = row.change
    word = judged(change)
    said = f"{word}, by {change.basis}" if change.basis else "" if change.median is None else word
    name = f"p50 at batch {row.batch}, ms"
    return (name, ms(row.before_p50_ms), ms(row.after_p50_ms), percent(change), said)


def judged(change: Change) -> str:
    """``slower`` or ``faster`` where that is certain, and else that it is not, or that nothing can be said."""
    if change.significant is None:
        return _UNJUDGED
    return _word(change) if change.significant else _UNCERTAIN


def _word(change: Change) -> str:
    return "slower" if (change.median or 1.0) > 1.0 else "faster"


def percent(change: Change) -> str:
    """By how much the time changed: ``+8.0 % [+3.1, +12]``, large ones as ``×3.2``; a dash where it is not known."""
    if change.median is None:
        return "–"
    if change.too_noisy:
        return TOO_NOISY
    if change.median >= _LARGE:
        ends = [f"{end:.3g}" for end in (change.low, change.high) if end is not None]
        return f"×{change.median:.3g}" + (f" [{', '.join(ends)}]" if ends else "")
    said = f"{_share(change.median)} %"
    shares = [_share(end) for end in (change.low, change.high) if end is not None]
    return f"{said} [{', '.join(shares)}]" if shares else said


def _share(ratio: float) -> str:
    percent = 100 * (ratio - 1)
    return f"{percent:+.1f}".replace("-", "−") if abs(percent) < 10 else f"{percent:+.0f}".replace("-", "−")


def _shown(number: MetricDelta, value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "–"
    sign = ("+" if value > 0 else "−" if value < 0 else "±") if signed else "" if value >= 0 else "−"
    size = abs(value)
    if number.name in ("peak_bytes", "size_bytes"):
        return sign + format_bytes(size)
    if number.name == "build_seconds":
        return sign + format_seconds(size)
    return f"{sign}{size:.1f}" if number.name == "sqnr_db" else f"{sign}{size:.4f}"


def _apart(number: MetricDelta) -> str:
    if number.before is None or number.after is None:
        return "–"
    said = _shown(number, number.after - number.before, signed=True)
    if number.low == number.high:
        return said
    ends = [_shown(number, end, signed=True) for end in (number.low, number.high) if end is not None]
    return f"{said} [{', '.join(ends)}]" if ends else said


def _judgement(number: MetricDelta) -> str:
    if number.significant is None or number.before is None or number.after is None:
        return ""
    return _COMPARED[number.name][number.after > number.before] if number.significant else _UNCERTAIN


def _notes(pair: Pair) -> Iterator[str]:
    """What is to be said of numbers: those of one note together."""
    together: dict[str, list[str]] = {}
    for variant in pair.variants:
        for row in variant.latency:
            if row.change.note:
                together.setdefault(row.change.note, []).append(f"{variant.id} at batch {row.batch}")
        for number in variant.numbers:
            if number.note and (number.before, number.after) != (None, None):
                together.setdefault(number.note, []).append(f"{_NAMES[number.name]} of {variant.id}")
    for note, about in together.items():
        more = f" and {len(about) - 4} more" if len(about) > 4 else ""
        yield f"note: {', '.join(about[:4])}{more}: {note}"


def _changed(pair: Pair) -> Part:
    rows = tuple(
        (name if index == 0 else "", one.name, _value(one, one.before), _value(one, one.after))
        for name, fields in pair.changed.sections
        for index, one in enumerate(fields)
    )
    same = [name for name, fields in pair.changed.sections if not fields]
    if not rows:
        return Part("What else changed", ("nothing: model, recipe, versions, machine and data are the same",))
    said = (f"the same: {', '.join(same)}",) if same else ()
    return Part("What else changed", said, CHANGED, rows)


def _value(one: Changed, value: Any) -> str:
    if value is None or value == []:
        return "–"
    if one.name == "sha256":
        return str(value)[:_DIGEST]
    if one.name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
