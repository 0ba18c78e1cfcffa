"""A run as one HTML file that needs no network: everything in it is text of the run, escaped, and two known scripts."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from numpy.typing import NDArray

from enginesmith.pipeline.report import charts
from enginesmith.pipeline.report.html import accuracy, first, glance, history, measured, scripts
from enginesmith.pipeline.report.html.blocks import Facts, Section
from enginesmith.pipeline.report.html.data import long_tables, script_data, within_limits
from enginesmith.pipeline.report.html.placing import Placed
from enginesmith.pipeline.run import Run


def render(run: Run, samples: Mapping[str, NDArray[Any]] | None = None) -> str:
    """The page; ``samples`` are the latencies of samples.npz, whose distribution is drawn."""
    placed = Placed(charts.charts(run, samples))
    sections = within_limits(_sections(run, placed))
    return _template().render(
        run=run,
        verdict=first.verdict(run),
        unfinished=first.unfinished(run),
        budgets=first.budget_facts(run),
        sections=sections,
        charts=script_data(_figures(placed)),
        tables=script_data(long_tables(sections)),
        policy=Markup(scripts.policy()),
        style=Markup(scripts.style()),
        library=Markup(scripts.library()),
        script=Markup(scripts.own()),
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


@functools.cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(scripts.TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")
