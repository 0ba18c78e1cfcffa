"""Make tables with formatted cells, which the terminal, Markdown and HTML render."""

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from enginesmith.pipeline.measure.quality import Quality, explain_few_samples
from enginesmith.pipeline.measure.rows import LatencyRow, StageFidelity, Throughput
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.units import format_bytes, format_metric, ms

Tone = Literal["", "good", "bad", "caution"]
LONG = 40
"""Rows from which the page draws a table only when it is opened."""
_FIRST = 20
"""Rows of a long table that stand in the page itself."""
_LONG_WORD = 24
_LONGEST_REASON = 120
_NUMBER = re.compile(r"[~<>+−±-]*\d[\d,]*(\.\d+)?(e[+-]?\d+)?( ?[^\d\s]{1,5}( \d+ s)?)?( \[[^\]]*\])?")
"""A number, its unit, and its interval."""
_INTERVAL = re.compile(rf"(.{{1,{_LONG_WORD}}}) (\[[^\]]*\d[^\]]*\])")
_ROUNDING = 1e-5
"""Share of a metric below which a drop is shown as none: sums are rounded by as much."""
_MARK = "*"


class Number(str):
    """Format a number for people, and keep its value to sort by."""

    value: float | None

    def __new__(cls, text: str, value: float | None) -> Self:
        cell = super().__new__(cls, text)
        cell.value = value
        return cell


@dataclass(frozen=True)
class Table:
    """Describe a table: heads, rows of text, and how a page may show them."""

    name: str
    """Unique in its document; letters, digits and hyphens."""
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    sortable: bool = False
    searched: bool = False
    """True where rows can be looked for by their text."""
    grouped: bool = False
    """True where a first cell that is empty belongs to the row above."""
    foldable: bool = False
    """True where all rows of a group but the first can be hidden."""
    marked: frozenset[str] = frozenset()
    """First cells of rows that stand out."""
    total: int = 0
    """Rows that there are, where some are left out."""
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Row and column of a cell → path of the file beside the document that it leads to; not quoted."""
    tones: Mapping[tuple[int, int], Tone] = field(default_factory=dict)
    """Row and column of a cell → how good its content is."""
    kind: ClassVar[str] = "table"
    """The block of a page that it is."""

    @property
    def long(self) -> bool:
        """Tell whether only the first rows stand in the page, the others being data."""
        return len(self.rows) > LONG and not self.grouped and not self.links

    @property
    def first(self) -> tuple[tuple[str, ...], ...]:
        """Return the rows that stand in the page."""
        return self.rows[:_FIRST] if self.long else self.rows

    @property
    def count(self) -> int:
        """Count the rows that the run has."""
        return max(self.total, len(self.rows))

    @staticmethod
    def breaks(cell: str) -> bool:
        """Tell whether a cell has a word so long that it may be broken anywhere."""
        return any(len(word) > _LONG_WORD for word in re.split(r"[\s-]", cell))

    @staticmethod
    def split_interval(cell: str) -> tuple[str, str] | None:
        """Split a cell before its interval, between which and the number alone a line may break; None without one."""
        interval = _INTERVAL.fullmatch(cell)
        return (interval[1], interval[2]) if interval else None

    @property
    def groups(self) -> list[list[int]]:
        """List the indices of rows that belong together."""
        groups: list[list[int]] = []
        for index, row in enumerate(self.first):
            if self.grouped and groups and not row[0]:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Tell by column whether all its cells are numbers."""
        return tuple(_are_numbers(row[index] for row in self.first) for index in range(len(self.columns)))

    def value(self, row: int, column: int) -> float | None:
        """Return the number behind a cell; None where it is text."""
        return getattr(self.rows[row][column], "value", None)

    def without_empty_columns(self) -> "Table":
        """Leave out columns that have nothing but dashes."""
        indices = [
            index for index in range(len(self.columns)) if not index or any(row[index].strip("– ") for row in self.rows)
        ]
        columns = tuple(self.columns[index] for index in indices)
        return replace(self, columns=columns, rows=tuple(tuple(row[index] for index in indices) for row in self.rows))


def make_table(name: str, caption: str, rows: Iterable[Mapping[str, str]], **how: Any) -> Table:
    """Make a table of rows that map heads to cells, the same heads in each; ``how`` are other fields."""
    lines = list(rows)
    columns = tuple(lines[0]) if lines else ()
    return Table(name, caption, columns, tuple(tuple(line.values()) for line in lines), **how)


def _are_numbers(cells: Iterable[str]) -> bool:
    known = [cell for cell in cells if cell.strip("– ")]
    return bool(known) and all(map(_NUMBER.fullmatch, known))


# Cells.


def time_cell(value: float | None) -> Number:
    """Format milliseconds, without the unit; a dash where they are unknown."""
    return Number(ms(value), value)


def size_cell(value: float | None) -> Number:
    """Format bytes with a unit; a dash where they are unknown."""
    return Number(format_bytes(value), value)


def number_cell(value: float | None, form: str = "") -> Number:
    """Format a number by a format specification; a dash where it is unknown."""
    return Number("–" if value is None else f"{value:{form}}", value)


def drop_cell(value: float | None) -> Number:
    """Format the loss of a metric; a dash where it is unknown."""
    return Number("–" if value is None else format_metric(value, "+"), value)


def rate(value: float | None) -> str:
    """Format samples in a second with four significant digits."""
    if value is None:
        return "–"
    return f"{value:.4g}" if value < 10_000 else f"{value:.0f}"


def speedup(record: VariantRecord, batch: int) -> str:
    """Format a speed-up: ``3.10× [3.02, 3.18]``; a dash where it is unknown."""
    row = record.row(batch)
    if row is None or row.speedup is None:
        return "–"
    return Number(row.format_speedup(), row.speedup.median)


def format_drop(quality: Quality | None) -> Number:
    """Format the loss of the metric with its interval: ``+0.0040 [−0.0010, +0.0090]``; a dash where there is none."""
    if quality is None:
        return Number("–", None)
    low, high = quality.drop_low, quality.drop_high
    least = _ROUNDING * max(abs(quality.value), abs(quality.baseline))
    ends = () if low is None or high is None or low == high else (low, high)
    drop, *interval = (format_metric(value, "+", least) for value in (quality.drop, *ends))
    return Number(f"{drop} [{', '.join(interval)}]" if interval else drop, quality.drop)


_LONG = 10
"""Value of a metric from which digits behind the point say little."""


def format_value(value: float) -> str:
    """Write a metric's value."""
    return format_metric(value) if abs(value) < _LONG else f"{value:.5g}"


def describe_drop(quality: Quality) -> str:
    """Describe the metric and its loss: ``top1 0.9832 (drop +0.0040 [−0.0010, +0.0090]) on 357 samples``."""
    return f"{quality.title} {format_value(quality.value)} (drop {format_drop(quality)}) on {quality.basis}"


def mark_name(record: VariantRecord) -> str:
    """Name a variant, with a star if its numbers come from synthetic calibration data."""
    return f"{record.id}{_MARK}" if record.synthetic_calibration else record.id


def mark(run: Run, text: str) -> str:
    """Add the stars to every variant that a text names."""
    for record in run.variants:
        if record.synthetic_calibration:
            text = re.sub(rf"(?<![\w+-]){re.escape(record.id)}(?![\w+*-])", mark_name(record), text)
    return text


def shorten_reason(reason: str, longest: int = _LONGEST_REASON) -> str:
    """Shorten a reason that is told in full elsewhere to so many characters."""
    return textwrap.shorten(reason, longest, placeholder=" …")


def describe_data(run: Run) -> str:
    """Describe how data was split, or that the search saw the samples of the drop, and whether they are enough."""
    parts = [few] if (few := _explain_samples(run)) else []
    if run.model.parts:
        counts = ", ".join(f"{count} for {part}" for part, count in run.model.parts.items())
        parts.insert(0, f"samples of {run.recipe.data}: {counts}; no sample is in two of these parts")
    elif any(trial.drop is not None for record in run.variants for trial in record.search):
        parts.insert(0, "the search was judged on the same samples: the drop is optimistic; --data keeps them apart")
    return "; ".join(parts)


def _explain_samples(run: Run) -> str:
    """Tell that there are too few samples for the budget for accuracy, and how many more are needed."""
    max_drop = run.recipe.budgets.max_drop
    if few := explain_few_samples(run.model.parts, run.recipe.required_metric, max_drop):
        return few
    lossy = (record for record in run.variants if record.precision != "fp32" or record.prune or record.sparsity)
    won = next((record.quality for record in lossy if record.id == run.winner), None)
    return won.explain_width(max_drop) if won and max_drop else ""


def describe_pass(entry: StageFidelity) -> str:
    """Say whether a comparison was close enough, and if not why."""
    if not entry.passed:
        return f"no: {entry.reason}" if entry.reason else "no"
    sets = f", {', '.join(map(repr, entry.sets))} as sets of rows" if entry.sets else ""
    if entry.reason and not entry.rounding_note:
        return f"not judged: {entry.reason}"
    noted = f": {entry.rounding_note}" if entry.rounding_note else ""
    return f"yes{sets}{entry.describe_unverified()}{noted}"


def format_median_interval(row: LatencyRow) -> str:
    """Format the interval of the median of undisturbed calls; say so where p50, which is of all calls, lies outside.

    A dash where there were too few rounds.
    """
    interval = row.median_ms
    if interval is None or row.p50_ms is None:
        return "–"
    beside = not interval.too_noisy and not interval.low <= row.p50_ms <= interval.high
    return f"{interval.between(ms)}{' without disturbed calls' if beside else ''}"


def best_level(row: LatencyRow) -> Throughput | None:
    """Find the number of concurrent callers that the throughput is of; None if they were not measured."""
    return max(row.concurrency, key=lambda level: level.samples_per_s.median, default=None)
