"""Write a run's reports beside its run.json, or anywhere else."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, Self

from enginesmith.pipeline.errors import StoreError, storage_errors
from enginesmith.pipeline.report import gate as gates
from enginesmith.pipeline.report import junit, markdown
from enginesmith.pipeline.results import documents, gate_report
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.gate_report import FleetGate, Gate
from enginesmith.pipeline.results.run import Run
from enginesmith.pipeline.system.worker import end_with_parent, hide_main_module

Format = Literal["html", "md", "junit", "json"]
NAMES: Mapping[Format, str] = {"html": "report.html", "md": "report.md", "junit": "junit.xml", "json": "run.json"}
REPORTS: tuple[Format, ...] = ("html", "md", "junit")
"""Formats that a run directory has besides run.json."""
_FOLDERS_A_PROCESS = 8
"""Fewer are written by this process before another one has started."""


def write(
    run: Run,
    folder: Path,
    formats: Sequence[Format] = REPORTS,
    gate: Gate | FleetGate | None = None,
) -> list[Path]:
    """Write a run in these formats, each whole or not at all; gives back the files.

    ``gate`` is what was judged of the run; when left out, that in the folder, if there is one.

    Raises:
        StoreError: the folder cannot be written.
    """
    with storage_errors(f"the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        return [_write_one(run, folder, form, gate) for form in dict.fromkeys(formats)]


def write_outdated(folder: Path) -> None:
    """Write the reports of a run directory that are missing or older than run.json.

    Raises:
        StoreError: the folder cannot be written.
    """
    if outdated := list_outdated(folder, NAMES["json"]):
        try:
            write(runs.read(folder), folder, outdated)
        except StoreError as error:
            message = f"the results are in {folder / NAMES['json']}, and the reports could not be written"
            raise StoreError(
                f"{message}: {error.message}", f"{error.remedy}; then `enginesmith report {folder}` writes them"
            ) from error


def list_outdated(folder: Path, document: str, names: Mapping[Format, str] = NAMES) -> list[Format]:
    """List the reports that are missing or older than their document, as after a full disk or a killed process."""

    def is_current(report: Path) -> bool:
        return report.is_file() and report.stat().st_mtime_ns >= (folder / document).stat().st_mtime_ns

    return [form for form in REPORTS if not is_current(folder / names[form])]


class Writer:
    """Writes the reports of several run directories from what their run.json says, each as soon as it is given.

    Where there are many, other processes do it meanwhile; leaving the context waits for them. ``tell`` is told of
    reports that cannot be written: what they are about is in run.json, and is worth more. What another process was to
    write when it ended is written by this one.
    """

    def __init__(self, runs: int, tell: Callable[[str], object]) -> None:
        processes = min(len(os.sched_getaffinity(0)), runs // _FOLDERS_A_PROCESS)
        several = processes > 1
        self._pool = ProcessPoolExecutor(processes, get_context("spawn"), _leave_signals) if several else None
        self._futures: list[tuple[Path, Future[None]]] = []
        self._tell = tell

    def write(self, folder: Path) -> None:
        """Write the reports of one run directory."""
        if self._pool is not None:
            with contextlib.suppress(BrokenProcessPool), hide_main_module():
                self._futures.append((folder, self._pool.submit(_from_record, folder)))
                return
        with self._noted():
            _from_record(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        for folder, future in self._futures:
            with self._noted():
                try:
                    future.result()
                except BrokenProcessPool:
                    _from_record(folder)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            self._tell(f"the reports were not written, which `enginesmith report` does: {error.message}")


def _leave_signals() -> None:
    """Leave Ctrl-C and SIGTERM, which reach the whole group, to the parent: what was given is written all the same."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def _from_record(folder: Path) -> None:
    write(runs.read(folder), folder)


def _write_one(run: Run, folder: Path, form: Format, gate: Gate | FleetGate | None) -> Path:
    path, gate = folder / NAMES[form], gate or gate_report.load(folder)
    if form == "html":
        from enginesmith.pipeline.report.html.page import render

        documents.write_text(path, render(run, gate))
    elif form == "json":
        runs.write(run, folder)
    else:
        section = gates.render(gate) if gate else ""
        documents.write_text(path, markdown.render(run, section) if form == "md" else junit.render(run, gate))
    return path
