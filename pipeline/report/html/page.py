"""A run as one HTML file."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from enginesmith.pipeline.report import charts
from enginesmith.pipeline.report.html import accuracy, first, glance, history, measured
from enginesmith.pipeline.report.html.blocks import Facts, Section
from enginesmith.pipeline.report.html.layout import lay_out
from enginesmith.pipeline.report.html.placing import Placed
from enginesmith.pipeline.run import Run


def render(run: Run, samples: Mapping[str, NDArray[Any]] | None = None) -> str:
    """The page; ``samples`` are the latencies of samples.npz, whose distribution is drawn."""
    placed = Placed(charts.charts(run, samples))
    return lay_out(
        "page.html.j2",
        _sections(run, placed),
        _figures(placed),
        run=run,
        verdict=first.verdict(run),
        unfinished=first.unfinished(run),
        budgets=first.budget_facts(run),
    )


def _sections(run: Run, placed: Placed) -> Sequence[Section]:
    return (
        Section(
            "variants-and-front",
            "Variants",
            "Which variant is it to be?",
            (first.variants(run), *first.notes(run), *placed.under("pareto")),
        ),
        Section("glance", "At a glance", "What a reviewer asks first", (Facts(glance.facts(run)),)),
        history.out(run),
        *measured.sections(run, placed),
        *accuracy.sections(run, placed),
        *measured.hardware(run, placed),
        *history.sections(run),
    )


def _figures(placed: Placed) -> dict[str, Any]:
    drawn = {one.id: one.figure for one in placed.charts if one.figure is not None}
    return {"figures": drawn, "light": charts.LIGHT, "dark": charts.DARK}
