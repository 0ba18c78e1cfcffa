"""Latency and memory of a model in every form that runs on the device, side by side, into the lane's record.

    python benchmarks/gpu/bench.py resnet50 --out gpu_lane.json [--batch 1 8 64] [--seconds 15] [--minutes 9]
    python benchmarks/gpu/bench.py digits --out build/dry.json --device cpu --batch 1 2 --seconds 1     a dry run

Every variant is made and held against eager first; then all are measured together at one batch size after the other,
and then the memory of each alone, at the largest. What cannot be had is in the record in words: a variant that is
refused, fails, or differs, and a measurement that the time is over for. ``--only`` names variants by how their ids
start, for lanes in which not all have the time.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import Record
from variants import Field, field, why_not

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.execution.events import Event, Outcome
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import measure_latency
from enginesmith.pipeline.measure.memory.peak import measure_memory
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.planning.plan import REFERENCE, Variant
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.tasks.base import read_records
from enginesmith.pipeline.tasks.measure import measured_feeds
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.workflows.stages import try_steps

_START_LIMIT_SECONDS = 240.0
"""For loading, compiling and warming up one variant at one batch size."""
_WARM_UP_SECONDS = 3.0
_MAKING = 0.6
"""Share of the time after which nothing more is made: what is made is then measured."""


@dataclass
class Clock:
    """Track how much of a part's time is left."""

    minutes: float
    started: float

    def left(self, share: float = 1.0) -> float:
        """Seconds until so much of the time is over."""
        return self.started + share * self.minutes * 60 - time.monotonic()

    def why_over(self) -> str:
        """Why something is left out; empty where there is time for it."""
        return "" if self.left() > 0 else f"the {self.minutes:g} minutes of this part were over"


def bench(record: Record, model: str, given: argparse.Namespace) -> None:
    """One model: make, check, measure; the record is written after each."""
    clock = Clock(given.minutes, time.monotonic())
    part = record.start("models", model)
    if given.device != "cpu" and not nvidia.driver().devices:
        part |= {"skipped": f"no CUDA device: {nvidia.driver().reason}", "complete": True}
        print(f"  skipped: {part['skipped']}", flush=True)
        record.write()
        return
    values = {"device": given.device, "batch": given.batch, "threads": given.threads}
    chosen = field({"model": model, **values}, given.only)
    part |= {"device": given.device, "batch": given.batch, "refused": dict(chosen.refused)}
    places: dict[str, dict[str, Any]] = {one.id: _described(one) for one in chosen.variants}
    part["variants"] = places
    record.write()
    outcomes = _made(chosen, given.jobs, clock)
    for variant in chosen.variants:
        reason = why_not(variant, outcomes)
        places[variant.id] |= {"fidelity": _fidelity(variant, outcomes)} | ({"refused": reason} if reason else {})
        print(f"  {variant.id}: {_line(reason) or 'made, and answers as eager does'}", flush=True)
    record.write()
    reference = outcomes[REFERENCE].artifact
    if reference is None or "refused" in places[chosen.variants[0].id]:
        part["failure"] = f"there is no baseline: {outcomes[REFERENCE].reason or why_not(chosen.variants[0], outcomes)}"
        record.write()
        return
    running = [one for one in chosen.variants if "refused" not in places[one.id]]
    candidates = [_candidate(chosen, one, outcomes) for one in running]
    with tempfile.TemporaryDirectory() as logs:
        _measure(record, places, candidates, measured_feeds(reference), given, clock, Path(logs))
    part |= {"complete": True, "seconds": round(time.monotonic() - clock.started, 1)}
    record.write()


def _described(variant: Variant) -> dict[str, Any]:
    options = variant.engine.model_dump(mode="json", exclude_defaults=True)
    return {"engine": variant.engine.name, "precision": variant.precision, "options": options}


def _made(chosen: Field, jobs: int, clock: Clock) -> Mapping[str, Outcome]:
    def listener(event: Event) -> None:
        if event.kind == "finished" and event.outcome and not event.outcome.good:
            print(f"  {event.step.id}: {_line(event.outcome.reason)}", flush=True)

    settings = Settings(jobs=jobs, time_limit_seconds=clock.left(_MAKING), listener=listener)
    return try_steps(chosen.steps, settings, chosen.recipe)


def _fidelity(variant: Variant, outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """List the figures of its own check, at each point of the shape range."""
    last = outcomes.get(variant.verified[-1]) if variant.verified else None
    return read_records(last.artifact) if last and last.artifact else []


def _candidate(chosen: Field, variant: Variant, outcomes: Mapping[str, Outcome]) -> Candidate:
    artifact = outcomes[variant.artifact].artifact
    assert isinstance(artifact, Artifact)
    return Candidate(variant.id, variant.engine, artifact, variant.device)


def _measure(
    record: Record,
    places: Mapping[str, dict[str, Any]],
    candidates: Sequence[Candidate],
    feeds: Mapping[int, Feeds],
    given: argparse.Namespace,
    clock: Clock,
    logs: Path,
) -> None:
    """Latency at each batch size, then memory at the largest."""

    def progress(text: str) -> None:
        print(f"    {text}", flush=True)

    settings = LatencySettings(
        time_limit_seconds=given.seconds,
        warmup_limit_seconds=min(_WARM_UP_SECONDS, given.seconds),
        start_limit_seconds=_START_LIMIT_SECONDS,
        concurrency=tuple(given.callers),
    )
    for batch, arrays in sorted(feeds.items()):
        if why := clock.why_over():
            found: dict[str, Any] = {one.id: {"batch": batch, "failure": why} for one in candidates}
        else:
            rows = measure_latency(candidates, {batch: arrays}, settings, logs, progress).rows
            found = {name: _shown(name, row) for name, (row, *_) in rows.items()}
        for name, row in found.items():
            places[name].setdefault("latency", {})[str(batch)] = row
        record.write()
    batch = max(feeds)
    for one in candidates:
        why = clock.why_over()
        memory = (
            {"batch": batch, "failure": why}
            if why
            else measure_memory(one, batch, feeds[batch], logs, progress).model_dump(mode="json")
        )
        places[one.id]["memory"] = memory
        record.write()


def _shown(name: str, row: LatencyRow) -> dict[str, Any]:
    ratio = f" = {row.speedup.median:.2f} x eager" if row.speedup else ""
    print(f"  batch {row.batch}, {name}: {_line(row.failure or f'{row.p50_ms:.3f} ms{ratio}')}", flush=True)
    return row.model_dump(mode="json")


def _line(text: str) -> str:
    return text.partition("\n")[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure models one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=15.0, help="of rounds, at each batch size")
    parser.add_argument("--callers", type=int, nargs="+", default=[], help="numbers of callers at the same time")
    parser.add_argument("--threads", type=int, default=0, help="of a session on the CPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which nothing more of a model is begun")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--jobs", type=int, default=2, help="variants made at the same time")
    given = parser.parse_args(arguments)
    record = Record(given.out)
    for model in given.models:
        print(f"{model} on {given.device}", flush=True)
        bench(record, model, given)


if __name__ == "__main__":
    main()
