"""A run as one HTML file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from enginesmith.pipeline.report import charts
from enginesmith.pipeline.report.html import first, glance
from enginesmith.pipeline.report.html.accuracy import (
    render_compression,
    render_fidelity,
    render_precision,
    render_sensitivity,
)
from enginesmith.pipeline.report.html.blocks import Block, Facts, Section
from enginesmith.pipeline.report.html.history import (
    render_environment,
    render_provenance,
    render_rejected,
    render_reproduction,
)
from enginesmith.pipeline.report.html.layout import lay_out
from enginesmith.pipeline.report.html.measured import (
    render_batch_sweep,
    render_latency,
    render_limits,
    render_memory,
    render_profile,
)
from enginesmith.pipeline.report.html.method import render_method
from enginesmith.pipeline.report.html.placing import Placed
from enginesmith.pipeline.run import Run


@dataclass(frozen=True)
class SectionRow:
    """A section of the page: its id, its heading, the question that people come with, and what fills it."""

    name: str
    title: str
    question: str
    render: Callable[[Run, Placed], Sequence[Block]]


def _render_variants(run: Run, placed: Placed) -> Sequence[Block]:
    return (first.variants(run), *first.notes(run), *placed.under("pareto"))


def _render_summary(run: Run, placed: Placed) -> Sequence[Block]:
    return (Facts(glance.facts(run)),)


SECTIONS: tuple[SectionRow, ...] = (
    SectionRow("variants-and-front", "Variants", "Which variant is it to be?", _render_variants),
    SectionRow("glance", "At a glance", "What a reviewer asks first", _render_summary),
    SectionRow("out", "Failed, rejected or left", "Why can this variant not be used?", render_rejected),
    SectionRow("latency", "Latency", "How are single calls distributed, and what is the tail?", render_latency),
    SectionRow("memory", "Memory", "Where does peak memory go?", render_memory),
    SectionRow("sweep", "Batch sizes and callers", "What does a larger batch give?", render_batch_sweep),
    SectionRow("fidelity", "Fidelity along the stages", "Where was accuracy lost?", render_fidelity),
    SectionRow("sensitivity", "Sensitivity", "Which layers suffer most in low precision?", render_sensitivity),
    SectionRow("precision", "Precision", "What was quantised, what was not, and why?", render_precision),
    SectionRow("smaller", "Pruning and recovery", "What was taken away, did it come back?", render_compression),
    SectionRow(
        "limits", "Distance to the hardware's limit", "How far is it from what the machine can do?", render_limits
    ),
    SectionRow("profile", "Where the time goes", "Which modules and operators take the time?", render_profile),
    SectionRow("provenance", "Provenance", "What was done, by what, with which result?", render_provenance),
    SectionRow("environment", "Environment", "On what machine, and was it quiet?", render_environment),
    SectionRow(
        "method", "How things were measured", "Which clock, how many rounds, what counts as memory?", render_method
    ),
    SectionRow("reproduce", "Do it again", "What do I install, and what do I run?", render_reproduction),
)
"""Sections in the order of the page; a new one is a function and a row."""


def render(run: Run, samples: Mapping[str, NDArray[Any]] | None = None) -> str:
    """The page; ``samples`` are the latencies of samples.npz, whose distribution is drawn."""
    placed = Placed(charts.charts(run, samples))
    return lay_out(
        "page.html.j2",
        [Section(row.name, row.title, row.question, tuple(row.render(run, placed))) for row in SECTIONS],
        _figures(placed),
        run=run,
        verdict=first.verdict(run),
        unfinished=first.unfinished(run),
        budgets=first.budget_facts(run),
    )


def _figures(placed: Placed) -> dict[str, Any]:
    drawn = {one.id: one.figure for one in placed.charts if one.figure is not None}
    return {"figures": drawn, "light": charts.LIGHT, "dark": charts.DARK}
