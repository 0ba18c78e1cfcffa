"""The files that a fleet is read in."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from enginesmith.pipeline.fleet import record as records
from enginesmith.pipeline.fleet.record import FleetRecord
from enginesmith.pipeline.report import fleet_markdown, junit
from enginesmith.pipeline.run import Run

Format = Literal["html", "md", "junit", "json"]
NAMES: Mapping[Format, str] = {"html": "fleet.html", "md": "fleet.md", "junit": "junit.xml", "json": records.FILE}
REPORTS: tuple[Format, ...] = ("html", "md", "junit")
"""What a fleet's folder has besides fleet.json."""


def write(
    record: FleetRecord, folder: Path, found: Mapping[str, Run], formats: Sequence[Format] = ("json", *REPORTS)
) -> list[Path]:
    """Write a fleet in these formats, each whole or not at all; gives back the files.

    ``found`` are the runs of entries by name, as far as there are some.

    Raises:
        StoreError: the folder cannot be written.
    """
    renderers: Mapping[Format, Callable[[FleetRecord], str]] = {
        "html": _page,
        "md": fleet_markdown.render,
        "junit": lambda record: junit.render_fleet(record, found),
    }
    written = []
    for form in dict.fromkeys(formats):
        path = folder / NAMES[form]
        if form == "json":
            records.write(record, folder)
        else:
            records.write_text(path, renderers[form](record))
        written.append(path)
    return written


def _page(record: FleetRecord) -> str:
    from enginesmith.pipeline.report.fleet_page import render

    return render(record)
