"""Render runs side by side: what differs for certain, every number, and what else changed."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from enginesmith.pipeline.measure.statistics import TOO_NOISY
from enginesmith.pipeline.report.markdown import plain, render_table
from enginesmith.pipeline.report.tables import Table
from enginesmith.pipeline.results.comparison import (
    BatchComparison,
    Change,
    Comparison,
    MetricDelta,
    Pair,
    VariantComparison,
)
from enginesmith.pipeline.results.differences import Changed
from enginesmith.pipeline.units import format_bytes, format_metric, format_seconds, ms, name_some, shorten

_NUMBERS = ("", "reference", "other", "change [95 %]", "")
_CHANGED = ("", "field", "reference", "other")
_NAMES = {
    "peak_bytes": "peak memory",
    "size_bytes": "size",
    "metric": "metric",
    "drop": "drop",
    "sqnr_db": "lowest SQNR, dB",
    "build_seconds": "build",
}
_COMPARED = {
    "peak_bytes": ("less", "more"),
    "size_bytes": ("a smaller", "a larger"),
    "metric": ("a lower", "a higher"),
    "drop": ("a smaller", "a larger"),
}
_UNCERTAIN, _UNJUDGED = "no certain change", "not judged"
_LONGEST, _DIGEST, _MOST_NAMED = 80, 12, 4
_FIGURE = re.compile(r"\d+(\.\d+)?")
_TRIFLE = 0.01
"""Share by which the size of an engine has to differ to be named among the differences."""
_LARGE = 3.0
"""Ratios from which per cent are hard to read."""


@dataclass(frozen=True)
class Part:
    """A heading, sentences, and a table, each of which may be missing."""

    title: str = ""
    lines: tuple[str, ...] = ()
    table: Table | None = None


def list_parts(comparison: Comparison) -> tuple[Part, ...]:
    """List all that there is to show, in order."""
    shown_kinds: set[str] = set()
    return tuple(part for pair in comparison.pairs for part in _list_pair(pair, shown_kinds))


def render(comparison: Comparison) -> str:
    """Render a comparison as Markdown."""
    blocks = []
    for part in list_parts(comparison):
        blocks += [f"## {plain(part.title)}"] if part.title else []
        blocks += ["\n".join(f"- {plain(line)}" for line in part.lines)] if part.lines else []
        blocks += [render_table(part.table)] if part.table else []
    return "\n\n".join(blocks) + "\n"


def _list_pair(pair: Pair, shown_kinds: set[str]) -> Iterator[Part]:
    """List the parts of a pair, without cautions of a kind that was told of an earlier run."""
    cautions = []
    for text in pair.cautions:
        kind = _FIGURE.sub("#", text.removeprefix(f"{pair.before.path}: ").removeprefix(f"{pair.after.path}: "))
        cautions += [] if kind in shown_kinds else [f"caution: {text}"]
        shown_kinds.add(kind)
    yield Part(f"{pair.after.path} beside {pair.before.path}", (*_list_summary(pair), *cautions))
    for variant in pair.variants:
        rows = tuple(row for row in _list_rows(variant) if set(row[1:3]) != {"–"})
        statuses = " in both" if variant.before_status == variant.after_status else f", then {variant.after_status}"
        lines = () if rows else (f"no numbers: {variant.before_status}{statuses}",)
        yield Part(variant.id, lines, Table(variant.id, "", _NUMBERS, rows) if rows else None)
    yield Part(lines=tuple(_list_notes(pair)))
    yield _list_changes(pair)


def _list_summary(pair: Pair) -> Iterator[str]:
    yield f"reference: {pair.before.path}, started {pair.before.created}"
    yield f"other: {pair.after.path}, started {pair.after.created}"
    first, second = (side.winner or "none" for side in (pair.before, pair.after))
    yield f"winner of both: {first}" if first == second else f"winner: {first} of the reference, {second} of the other"
    differences = list(list_certain(pair.variants))
    yield f"differs for certain: {'; '.join(differences)}" if differences else "no measured difference is certain"
    for path, names in ((pair.before.path, pair.only_before), (pair.after.path, pair.only_after)):
        if names:
            yield f"only in {path}: {', '.join(names)}"


def list_certain(variants: Iterable[VariantComparison]) -> Iterator[str]:
    """Describe every difference that its interval or spread tells from chance, a sentence each."""
    for variant in variants:
        for row in variant.latency:
            if row.change.significant:
                yield f"{variant.id} is {_word(row.change)} at batch {row.batch}: {format_percent(row.change)}"
        for number in variant.numbers:
            trifle = _TRIFLE * (number.before or 0.0) if number.name == "size_bytes" else 0.0
            if number.significant and abs((number.after or 0.0) - (number.before or 0.0)) >= trifle:
                yield f"{variant.id} has {_judge_number(number)} {_NAMES[number.name]}: {_format_difference(number)}"


def _list_rows(variant: VariantComparison) -> Iterator[tuple[str, ...]]:
    if variant.before_status != variant.after_status:
        yield ("status", variant.before_status, variant.after_status, "", "")
    for row in variant.latency:
        yield format_latency(row)
        if row.before_speedup and row.after_speedup and row.before_speedup.high != row.before_speedup.low:
            before = TOO_NOISY if row.before_speedup_too_noisy else row.before_speedup.times()
            after = TOO_NOISY if row.after_speedup_too_noisy else row.after_speedup.times()
            yield (f"speed-up at batch {row.batch}", before, after, "", "")
        yield (f"p99 at batch {row.batch}, ms", ms(row.before_p99_ms), ms(row.after_p99_ms), "", "")
    yield from map(format_number, variant.numbers)


def format_number(number: MetricDelta) -> tuple[str, ...]:
    """Format one number in both runs: its name, both values, the change, and how sure that is."""
    sides = (_format_value(number, number.before), _format_value(number, number.after))
    return (_NAMES[number.name], *sides, _format_difference(number), _judge_number(number))


def format_latency(row: BatchComparison) -> tuple[str, ...]:
    """Format the median latency at one batch size in both runs, likewise."""
    change = row.change
    word = judge(change)
    judgement = f"{word}, by {change.basis}" if change.basis else "" if change.median is None else word
    name = f"p50 at batch {row.batch}, ms"
    return (name, ms(row.before_p50_ms), ms(row.after_p50_ms), format_percent(change), judgement)


def judge(change: Change) -> str:
    """Judge a change: ``slower`` or ``faster`` where that is certain, else why it is neither."""
    if change.significant is None:
        return _UNJUDGED
    return _word(change) if change.significant else _UNCERTAIN


def _word(change: Change) -> str:
    return "slower" if (change.median or 1.0) > 1.0 else "faster"


def format_percent(change: Change) -> str:
    """Format how much the time changed: ``+8.0 % [+3.1, +12]``, large ones as ``×3.2``; a dash if it is unknown."""
    if change.median is None:
        return "–"
    if change.too_noisy:
        return TOO_NOISY
    if change.median >= _LARGE:
        ends = [f"{end:.3g}" for end in (change.low, change.high) if end is not None]
        return f"×{change.median:.3g}" + (f" [{', '.join(ends)}]" if ends else "")
    percent = f"{_format_share(change.median)} %"
    shares = [_format_share(end) for end in (change.low, change.high) if end is not None]
    return f"{percent} [{', '.join(shares)}]" if shares else percent


def _format_share(ratio: float) -> str:
    percent = 100 * (ratio - 1)
    return f"{percent:+.1f}".replace("-", "−") if abs(percent) < 10 else f"{percent:+.0f}".replace("-", "−")


def _format_value(number: MetricDelta, value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "–"
    sign = ("+" if value > 0 else "−" if value < 0 else "±") if signed else "" if value >= 0 else "−"
    size = abs(value)
    if number.name in ("peak_bytes", "size_bytes"):
        return sign + format_bytes(size)
    if number.name == "build_seconds":
        return sign + format_seconds(size)
    return f"{sign}{size:.1f}" if number.name == "sqnr_db" else f"{sign}{format_metric(size)}"


def _format_difference(number: MetricDelta) -> str:
    if number.before is None or number.after is None or not number.comparable:
        return "–"
    ends = [] if number.low == number.high else [end for end in (number.low, number.high) if end is not None]
    difference, *shown = (_format_value(number, value, signed=True) for value in (number.after - number.before, *ends))
    return f"{difference} [{', '.join(shown)}]" if shown else difference


def _judge_number(number: MetricDelta) -> str:
    if number.significant is None or number.before is None or number.after is None:
        return ""
    return _COMPARED[number.name][number.after > number.before] if number.significant else _UNCERTAIN


def _list_notes(pair: Pair) -> Iterator[str]:
    """List the notes on numbers, all numbers of one note together."""
    together: dict[str, list[str]] = {}
    for variant in pair.variants:
        for row in variant.latency:
            if note := row.change.note:
                unjudged = row.change.median is not None and row.change.significant is None
                together.setdefault(f"not judged: {note}" if unjudged else note, []).append(
                    f"{variant.id} at batch {row.batch}"
                )
        for number in variant.numbers:
            if number.note and (number.before, number.after) != (None, None):
                together.setdefault(number.note, []).append(f"{_NAMES[number.name]} of {variant.id}")
    for note, about in together.items():
        yield f"note: {name_some(about, _MOST_NAMED)}: {note}"


def _list_changes(pair: Pair) -> Part:
    rows = tuple(
        (name if index == 0 else "", field.name, _format_field(field, field.before), _format_field(field, field.after))
        for name, fields in pair.changed.sections
        for index, field in enumerate(fields)
    )
    same = [name for name, fields in pair.changed.sections if not fields]
    if not rows:
        return Part("What else changed", ("nothing: model, recipe, versions, machine and data are the same",))
    lines = (f"the same: {', '.join(same)}",) if same else ()
    return Part("What else changed", lines, Table("changed", "", _CHANGED, rows))


def _format_field(field: Changed, value: Any) -> str:
    if value is None or value == []:
        return "–"
    if field.name.endswith("sha256"):
        return str(value)[:_DIGEST]
    if field.name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return shorten(", ".join(map(str, value)) if isinstance(value, list) else str(value), _LONGEST)
