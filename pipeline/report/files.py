"""The files that a run is read in: written beside its run.json, or anywhere else."""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginesmith.pipeline import run as runs
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.report import junit, markdown
from enginesmith.pipeline.run import Run
from enginesmith.pipeline.storage import storage_errors
from enginesmith.pipeline.tasks.measure import SAMPLES

Format = Literal["html", "md", "junit", "json"]
Samples = Mapping[str, NDArray[Any]]
NAMES: Mapping[Format, str] = {"html": "report.html", "md": "report.md", "junit": "junit.xml", "json": "run.json"}
REPORTS: tuple[Format, ...] = ("html", "md", "junit")
"""What a run directory has besides run.json."""


def write(run: Run, folder: Path, formats: Sequence[Format] = REPORTS, samples: Samples | None = None) -> list[Path]:
    """Write a run in these formats, each whole or not at all; gives back the files.

    ``samples`` are the latencies whose distribution is drawn; those in the folder, if there are some, when left out.

    Raises:
        StoreError: the folder cannot be written.
        UsageError: the samples are damaged.
        MissingCapability: what draws the charts is not installed.
    """
    with storage_errors(f"the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        return [_written(run, folder, one, samples) for one in dict.fromkeys(formats)]


def _written(run: Run, folder: Path, form: Format, samples: Samples | None) -> Path:
    path = folder / NAMES[form]
    if form == "json":
        runs.write(run, folder)
        return path
    renderers: Mapping[Format, Callable[[Run], str]] = {
        "html": lambda run: _page(run, read_samples(folder) if samples is None else samples),
        "md": markdown.render,
        "junit": junit.render,
    }
    partial = folder / f".{path.name}.partial"
    partial.write_text(renderers[form](run), encoding="utf-8")
    partial.replace(path)
    return path


def _page(run: Run, samples: Samples | None) -> str:
    from enginesmith.pipeline.report.html.page import render

    return render(run, samples)


def read_samples(folder: Path) -> dict[str, NDArray[Any]] | None:
    """The latencies of a run directory, in the form that latency is measured in; None where there are none.

    Raises:
        UsageError: the file is damaged.
    """
    path = folder / SAMPLES
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        why = "it is no archive of numbers" if isinstance(error, ValueError) else error
        raise UsageError(f"{path} is damaged: {why}", "remove it: the report does without the distributions") from error
