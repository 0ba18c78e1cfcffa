"""Render a run as one HTML file."""

import base64
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from numpy.typing import NDArray

from enginesmith.pipeline.report import charts, sections, sentences
from enginesmith.pipeline.report.html import summary
from enginesmith.pipeline.report.html.blocks import (
    Block,
    Fact,
    Facts,
    Section,
    Words,
    filled,
    folded,
    long_tables,
    script_data,
    within_limits,
)
from enginesmith.pipeline.report.html.sections import (
    Placed,
    render_batch_sweep,
    render_compression,
    render_environment,
    render_fidelity,
    render_latency,
    render_limits,
    render_memory,
    render_method,
    render_precision,
    render_profile,
    render_provenance,
    render_rejected,
    render_reproduction,
    render_sensitivity,
)
from enginesmith.pipeline.report.tables import Tone
from enginesmith.pipeline.results import budgets
from enginesmith.pipeline.results.run import Run, Verdict

# The first screen: the verdict, the budgets, the table of variants, the Pareto front; and answers in a line each.


def render_verdict(run: Run) -> Words:
    """Sum up the run in one sentence, coloured by how it ended."""
    broken = any(not one.passed for one in run.verdicts)
    tone: Tone = "bad" if run.winner is None and run.complete else "caution" if run.winner is None or broken else "good"
    return Words(sentences.summarize(run), tone)


def list_budgets(run: Run) -> tuple[Fact, ...]:
    """List each budget with its number and its limit, and those that were not judged."""
    judged = tuple(_budget(one) for one in run.verdicts)
    open_ = tuple(Fact(budgets.format_title(name), "not judged", "", "caution") for name in budgets.list_unjudged(run))
    return judged + open_


def _budget(one: Verdict) -> Fact:
    word = "met" if one.passed else "broken"
    why = f" ({one.reason})" if one.reason else ""
    text = f"{word}: {budgets.format_value(one.budget, one.actual)}{why}, {budgets.format_limit(one)}"
    return Fact(budgets.format_title(one.budget), text, "", "good" if one.passed else "bad")


def render_progress(run: Run) -> tuple[Words, ...]:
    """Say what is missing of a run that was interrupted, or has steps for another machine."""
    if run.complete:
        return ()
    left = [step.id for step in run.steps if step.status == "pending"]
    text = sentences.describe_progress(run).capitalize()
    return (Words(f"{text}; next: {', '.join(left[:3]) or '–'}. Go on with: enginesmith resume {run.name}", "caution"),)


# Load the page's scripts and style: plotly.js and the page's own.

TEMPLATES = Path(__file__).parent / "templates"


@functools.cache
def load_library() -> str:
    """Load plotly.js in its "basic" build, which draws scatter, bar and pie traces.

    The file is ``plotly-basic.min.js`` of the npm package ``plotly.js-basic-dist-min`` as it stands: a report is about
    1.3 MB with it, and would be 5 MB with every trace type.
    """
    return (TEMPLATES / "plotly-basic.min.js").read_text(encoding="utf-8")


@functools.cache
def load_script() -> str:
    """Load the script that makes tables sortable and draws charts and long tables."""
    return (TEMPLATES / "page.js").read_text(encoding="utf-8")


@functools.cache
def load_style() -> str:
    """Load the page's style."""
    return (TEMPLATES / "style.css").read_text(encoding="utf-8")


@functools.cache
def write_policy(texts: tuple[str, ...]) -> str:
    """Write a content security policy that allows these scripts and the page's style, and nothing from anywhere."""
    scripts = " ".join(f"'sha256-{_digest(text)}'" for text in texts)
    return f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# Sections and a template as one HTML file that needs no network: all of it is escaped, besides two known scripts.


def lay_out(template: str, parts: Sequence[Section], figures: Mapping[str, Any] | None = None, **values: Any) -> str:
    """Render a page; without ``figures`` for charts it has no library that draws."""
    shown = within_limits(parts)
    libraries = (load_library(),) if figures is not None else ()
    return _template(template).render(
        sections=shown,
        charts=script_data(figures or {}),
        tables=script_data(long_tables(shown)),
        policy=Markup(write_policy((*libraries, load_script()))),
        style=Markup(load_style()),
        library=_known(load_library()) if libraries else "",
        script=_known(load_script()),
        **values,
    )


@functools.cache
def _known(script: str) -> Markup:
    """Mark a script of ours as safe, so that it stands in the page as it is."""
    return Markup(script)


@functools.cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


@dataclass(frozen=True)
class SectionRow:
    """A section of the page: its id, its heading, the question that people come with, and what fills it."""

    name: str
    title: str
    question: str
    render: Callable[[Run, Placed], Sequence[Block]]


def _render_variants(run: Run, placed: Placed) -> Sequence[Block]:
    notes = (Words(f"{note}.") for note in sentences.list_footnotes(run))
    front = sections.tabulate_front(run)
    return (
        sections.tabulate_variants(run),
        *notes,
        *placed.under("pareto"),
        *folded(front.caption, *filled(front)),
    )


def _render_summary(run: Run, placed: Placed) -> Sequence[Block]:
    return (Facts(summary.answer_questions(run)),)


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
    """Render the page of a run; ``samples`` are the latencies of samples.npz, whose distribution is drawn."""
    placed = Placed(charts.charts(run, samples))
    return lay_out(
        "page.html.j2",
        [Section(row.name, row.title, row.question, tuple(row.render(run, placed))) for row in SECTIONS],
        _figures(placed),
        run=run,
        verdict=render_verdict(run),
        unfinished=render_progress(run),
        budgets=list_budgets(run),
    )


def _figures(placed: Placed) -> dict[str, Any]:
    drawn = {one.id: one.figure for one in placed.charts if one.figure is not None}
    return {"figures": drawn, "light": charts.LIGHT, "dark": charts.DARK}
