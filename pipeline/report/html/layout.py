"""Sections and a template as one HTML file that needs no network: all of it is escaped, besides two known scripts."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from enginesmith.pipeline.report.html import scripts
from enginesmith.pipeline.report.html.blocks import Section
from enginesmith.pipeline.report.html.data import long_tables, script_data, within_limits


def lay_out(template: str, sections: Sequence[Section], figures: Mapping[str, Any] | None = None, **values: Any) -> str:
    """The page; ``figures`` are what its charts are drawn of, and without them it has no library that draws."""
    shown = within_limits(sections)
    libraries = (scripts.library(),) if figures is not None else ()
    return _template(template).render(
        sections=shown,
        charts=script_data(figures or {}),
        tables=script_data(long_tables(shown)),
        policy=Markup(scripts.policy((*libraries, scripts.own()))),
        style=Markup(scripts.style()),
        library=_known(scripts.library()) if libraries else "",
        script=_known(scripts.own()),
        **values,
    )


@functools.cache
def _known(script: str) -> Markup:
    """A script that is ours, and stands in the page as it is."""
    return Markup(script)


@functools.cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(scripts.TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
