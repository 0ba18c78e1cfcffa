"""Who is drawn how: the same colour, marker and dash for the same variant in every chart of a run."""

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from enginesmith.pipeline.report.charts.text import label, shortened
from enginesmith.pipeline.report.tables import marked
from enginesmith.pipeline.run import Run, VariantRecord

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Those of Okabe and Ito ("Color Universal Design", 2008) with a contrast of 3 on white and on black alike."""
NEUTRAL = "#6E7681"
"""The baseline's, and of what belongs to no variant."""
REST = "#9AA0A6"
SYMBOLS = (
    *("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon"),
    *("hexagon", "star-triangle-up", "cross", "hourglass", "bowtie", "star-diamond"),
)
DASHES = ("solid", "dash", "dashdot")
MOST_NAMED = 12
_IN_SENTENCES = 60


@dataclass(frozen=True)
class Style:
    """How one variant looks: never told from others by colour alone."""

    name: str
    """For legends and ticks; the winner's has a star."""
    colour: str
    symbol: str
    dash: str
    winner: bool

    @property
    def zorder(self) -> int:
        """The winner lies above the others."""
        return int(self.winner)

    @property
    def width(self) -> float:
        """Of lines, in pixels."""
        return 3.5 if self.winner else 2

    @property
    def size(self) -> float:
        """Of markers, in pixels."""
        return 11 if self.winner else 8

    @property
    def marker(self) -> dict[str, Any]:
        """As plotly.js takes it."""
        return {"color": self.colour, "symbol": self.symbol, "size": self.size}

    @property
    def line(self) -> dict[str, Any]:
        """As plotly.js takes it."""
        return {"color": self.colour, "dash": self.dash, "width": self.width}


def called(record: VariantRecord) -> str:
    """A record's name in sentences."""
    return shortened(marked(record), _IN_SENTENCES)


class Cast:
    """The records of a run in the order of who is named first: winner, baseline, front, then as they stand."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @cached_property
    def records(self) -> tuple[VariantRecord, ...]:
        """The baseline, and the variants."""
        return (self._run.baseline, *self._run.variants)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        run = self._run
        measured = (record.id for record in self.records if record.status == "measured")
        ordered = (run.winner or run.baseline.id, run.baseline.id, *run.pareto, *measured)
        names = dict.fromkeys((*ordered, *(record.id for record in self.records)))
        return {name: rank for rank, name in enumerate(names)}

    @cached_property
    def _styles(self) -> dict[str, Style]:
        others = sorted((record for record in self._run.variants), key=lambda one: self._ranks[one.id])
        found = {record.id: self._style(record, index) for index, record in enumerate(others)}
        plain = Style(self._name(self._run.baseline), NEUTRAL, "x", "dot", self._run.winner == self._run.baseline.id)
        return {**found, self._run.baseline.id: plain}

    def _style(self, record: VariantRecord, index: int) -> Style:
        return Style(
            name=self._name(record),
            colour=COLOURS[index % len(COLOURS)],
            symbol=SYMBOLS[index % len(SYMBOLS)],
            dash=DASHES[index // len(COLOURS) % len(DASHES)],
            winner=record.id == self._run.winner,
        )

    def _name(self, record: VariantRecord) -> str:
        star = "★ " if record.id == self._run.winner else ""
        return star + label(marked(record))

    def style(self, record: VariantRecord) -> Style:
        """How a record looks."""
        return self._styles[record.id]

    def named(self, having: Container[str]) -> tuple[VariantRecord, ...]:
        """Of those that have something to show, the most important ones, in the run's order."""
        found = sorted((one for one in self.records if one.id in having), key=lambda one: self._ranks[one.id])
        kept = {record.id for record in found[:MOST_NAMED]}
        return tuple(record for record in self.records if record.id in kept)

    def rest(self, having: Container[str]) -> tuple[VariantRecord, ...]:
        """Those that have something to show, and are not named."""
        kept = {record.id for record in self.named(having)}
        return tuple(record for record in self.records if record.id in having and record.id not in kept)

    def unnamed(self, having: Container[str], what: str = "grey") -> str:
        """What becomes of the rest, as the end of a sentence; empty where there is none."""
        count = len(self.rest(having))
        return f"; {count} more {'is' if count == 1 else 'are'} {what}" if count else ""
