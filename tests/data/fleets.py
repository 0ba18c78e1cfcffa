"""Fleets that nobody measured: entries with runs of every kind, in a folder as the job leaves it."""

from pathlib import Path
from typing import Any

from enginesmith.pipeline.errors import EnginesmithError, ExportError, MissingCapability, SourceError
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import LatencyRow, MemoryRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.recipe.fleet import Entry, Fleet, make
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.fleet import RUNS, EntryRecord, FleetRecord, entry_record
from enginesmith.pipeline.results.run import (
    ModelRecord,
    Run,
    RunResult,
    StepRecord,
    StoredArtifact,
    VariantRecord,
    Verdict,
)

FP32, INT8 = "onnxruntime-fp32", "onnxruntime-int8"
MACHINE = {"processor": "Some CPU", "usable_cores": 2, "python": "3.11.7", "packages": {"torch": "2.11"}}


def fleet(**changes: Any) -> Fleet:
    """Two models for two targets."""
    targets = {"cpu": {}, "edge": {"resources": {"edge": 1}}}
    return make({"models": {"digits": {}, "lenet": {}}, "targets": targets, **changes})


def about(value: float, share: float = 0.02) -> Interval:
    """An interval of so much to both sides."""
    return Interval(median=value, low=value * (1 - share), high=value * (1 + share))


def row(ms: float, times: float, batch: int = 1) -> LatencyRow:
    """A latency as it was measured over enough launches to be judged."""
    return LatencyRow(
        batch=batch, n=100, launches=5, p50_ms=ms, p99_ms=2 * ms, median_ms=about(ms), speedup=about(times)
    )


def variant(name: str, ms: float, times: float, **changes: Any) -> VariantRecord:
    """A variant that was measured at two batch sizes."""
    found = VariantRecord(
        id=name,
        engine="onnxruntime",
        precision=name.rpartition("-")[2],
        status="measured",
        latency=(row(ms, times), row(6 * ms, times, batch=8)),
        artifact=StoredArtifact(path=f"variants/{name}/model.onnx", sha256="aa", bytes=200_000),
        memory=MemoryRow(device="cpu", batch=8, peak_bytes=100 << 20),
        quality=Quality(metric="top1", value=0.9, baseline=0.91, drop=0.01, samples=100),
    )
    return found.model_copy(update=changes)


def run(entry: Entry, ms: float = 0.5, **changes: Any) -> Run:
    """A run of an entry whose int8 variant takes ``ms``; eager takes 2 ms."""
    eager = VariantRecord(
        id="eager", engine="eager", precision="fp32", status="measured", latency=(row(2.0, 1.0), row(12.0, 1.0, 8))
    )
    values: dict[str, Any] = {
        "name": entry.name,
        "created": "2026-01-01T00:00:00+00:00",
        "seconds": 4.0,
        "complete": True,
        "recipe": entry.recipe,
        "environment": MACHINE,
        "model": ModelRecord(
            source=entry.recipe.model,
            sha256=f"of {entry.recipe.model}",
            content=f"content of {entry.recipe.model}",
            signature=None,
            data="digits",
        ),
        "steps": (StepRecord(id="load", status="done", cached=True, seconds=0.1, effect=""),),
        "baseline": eager,
        "variants": (variant(FP32, 0.8, 2.5), variant(INT8, ms, 2.0 / ms)),
        "winner": INT8,
        "pareto": (INT8,),
        "verdicts": (),
    }
    return Run.model_validate({**values, **changes})


def breached(entry: Entry) -> Run:
    """One whose best variant breaks its budget."""
    verdict = Verdict(budget="max_latency_ms", limit=0.1, actual=0.5, passed=False)
    return run(entry, winner=None, winner_reason="no variant meets every budget", verdicts=(verdict,))


def partly(entry: Entry) -> Run:
    """One of whose variants one failed."""
    failed = variant(FP32, 1.0, 1.0).model_copy(
        update={
            "status": "failed",
            "reason": "export: cannot | be <b>exported</b>",
            "failed_step": "export",
            "latency": (),
            "failure": "crash",
        }
    )
    steps = (StepRecord(id="export", status="failed", cached=False, seconds=None, effect="cannot"),)
    return run(entry, variants=(failed, variant(INT8, 0.5, 4.0)), steps=steps)


ERRORS: tuple[EnginesmithError, ...] = (
    MissingCapability("no node has the accelerator L4", "start one"),
    SourceError("there is no model 'gone'", "check the name"),
    ExportError("aten::odd cannot be exported", "write it another way"),
)


def placed(found: Run, folder: Path, name: str) -> Run:
    """The run in its directory in a fleet's folder, with a log of each step."""
    home = folder / RUNS / name
    (home / "logs").mkdir(parents=True)
    for step in found.steps:
        (home / "logs" / f"{step.id}.log").write_text("what it said\n")
    runs.write(found, home)
    return found


def entry(asked: Entry, folder: Path, found: Run | EnginesmithError | None) -> EntryRecord:
    """The record of what came of an entry."""
    if isinstance(found, EnginesmithError):
        return entry_record(asked, RunResult(error=found), folder)
    return entry_record(
        asked, RunResult(placed(found, folder, asked.name) if found else None, ended=found is not None), folder
    )


def record(asked: Fleet, *entries: EntryRecord, **changes: Any) -> FleetRecord:
    """The record of a fleet that has ended so."""
    values = {
        "name": "nightly",
        "file": "fleet.yaml",
        "folder": "/somewhere",
        "created": "2026-01-02T00:00:00+00:00",
        "seconds": 75.0,
        "fleet": asked,
        "packages": {"torch": "2.11"},
        "entries": entries,
    }
    return FleetRecord.model_validate({**values, **changes})
