"""The search for what stays in floating point: one task is one trial, and knows those before it."""

import json
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from pydantic import SerializeAsAny

from enginesmith.pipeline import onnx_file
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.base import BuildRequest, Device, Engine
from enginesmith.pipeline.errors import MissingCapability, ModelError, UsageError
from enginesmith.pipeline.measure.candidate import Candidate as TimedCandidate
from enginesmith.pipeline.measure.latency import measure_latency
from enginesmith.pipeline.measure.race import LatencySettings
from enginesmith.pipeline.passes.base import Progress, run_pass
from enginesmith.pipeline.passes.precision import Precision
from enginesmith.pipeline.precision.search import Candidate, GroupFact, Trial, best, propose
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, read_records, write_records
from enginesmith.pipeline.tasks.goal import Goal
from enginesmith.pipeline.tasks.measure import logs_in_own_log, measured_feeds
from enginesmith.pipeline.tasks.shapes import SHAPES, read_ranges

MODEL, RANGES, SENSITIVITY, FLOAT, BEFORE = "model", "ranges", "sensitivity", "float", "before"
_log = logging.getLogger(__name__)
_SPEED = LatencySettings(precision=0.02, time_limit_seconds=4.0, launches=1)


class Search(Task):
    """One more trial, unless the search is over or its time is up; the record holds all trials so far."""

    title: ClassVar[str] = "search"
    produces: ClassVar[Kind] = "record"
    exclusive: ClassVar[bool] = True

    step: Precision
    """The precision, with everything quantised."""
    engine: SerializeAsAny[Engine]
    device: Device
    goal: Goal
    methods: tuple[str, ...]
    keep: tuple[str, ...]
    """Patterns of groups that stay in floating point anyway."""
    limit_seconds: float

    @property
    def identity(self) -> dict[str, Any]:
        found = super().identity
        found["fields"].pop("limit_seconds")  # more time continues a search, and begins no new one
        return found

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.step.tools, *self.engine.tools)))

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        groups = [GroupFact.model_validate(entry) for entry in read_records(inputs[SENSITIVITY])]
        trials = [Trial.model_validate(entry) for entry in read_records(inputs[BEFORE])] if BEFORE in inputs else []
        fixed = kept_by(self.keep, groups)
        candidate = propose(trials, groups, self.methods, fixed)
        late = bool(trials) and sum(trial.seconds for trial in trials) >= self.limit_seconds
        reads: tuple[Path, ...] = ()
        if candidate and not late:
            progress(candidate.why)
            trial, reads = self._try(candidate, groups, inputs, progress)
            trials.append(trial)
            summary = _told(trial)
        else:
            found = best(trials, groups)
            summary = "the time for the search is up" if candidate else "the search is over"
            summary += f": {found.why}" if found else ": nothing reaches the goal"
        write_records(out, trials)
        return Effect(file=RECORDS, summary=summary, reads=reads, incomplete=bool(candidate) and late)

    def _try(
        self, candidate: Candidate, groups: Sequence[GroupFact], inputs: Inputs, progress: Progress
    ) -> tuple[Trial, tuple[Path, ...]]:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="enginesmith-search-") as scratch:
            graph = self._graph(candidate, groups, inputs, Path(scratch), progress)
            speedup: float | None = None
            try:
                made = self._built(graph, inputs, Path(scratch), progress)
                judged, reads = self.goal.judge(self.engine, made, self.device, inputs, progress)
                speedup = self._speedup(made, inputs, progress) if judged.passed else None
            except (ModelError, MissingCapability) as error:
                _log.info("judged by simulation: %s", error)  # the engine's own steps say so of the variant
                judged, reads = self.goal.judge(self.goal.simulation, graph, Device(), inputs, progress)
        trial = Trial(
            phase=candidate.phase,
            method=candidate.method,
            kept=tuple(sorted(candidate.kept)),
            why=candidate.why,
            speedup=speedup,
            seconds=round(time.monotonic() - start, 3),
            **judged.model_dump(),
        )
        return trial, reads

    def _graph(
        self, candidate: Candidate, groups: Sequence[GroupFact], inputs: Inputs, scratch: Path, progress: Progress
    ) -> Artifact:
        out, file = scratch / "graph", scratch / RECORDS
        out.mkdir()
        file.write_text(json.dumps(assignment(groups, candidate.kept, candidate.method, self.step, {})))
        chosen = Artifact(kind="record", path=file, sha256="", bytes=0)
        records = {name: artifact for name, artifact in inputs.items() if name == RANGES}
        effect = run_pass(self.step, inputs[MODEL], out, progress, {**records, "assignment": chosen})
        return _artifact("onnx", out / effect.file, inputs[MODEL])

    def _built(self, graph: Artifact, inputs: Inputs, scratch: Path, progress: Progress) -> Artifact:
        """The engine of a graph.

        Raises:
            MissingCapability: it cannot run here.
            ModelError: it does not take the graph.
        """
        if FLOAT not in inputs:
            raise MissingCapability(f"{self.engine.name} cannot run on this machine")
        out = scratch / "engine"
        out.mkdir()
        ranges = read_ranges(inputs[SHAPES]) if SHAPES in inputs else {}
        effect = self.engine.build(BuildRequest(graph, out, self.device, ranges, progress))
        return _artifact("engine", out / effect.file, inputs[MODEL])

    def _speedup(self, made: Artifact, inputs: Inputs, progress: Progress) -> float | None:
        feeds = measured_feeds(inputs["reference"])
        first = next(iter(feeds))
        timed = [
            TimedCandidate(name, self.engine, artifact, self.device)
            for name, artifact in (("float", inputs[FLOAT]), ("quantised", made))
        ]
        with logs_in_own_log() as logs:
            result = measure_latency(timed, {first: feeds[first]}, _SPEED, logs, progress)
        row = result.rows["quantised"][0]
        return row.speedup.median if row.speedup else None


class Assign(Task):
    """The outcome of a search: for each group its precision, and why."""

    title: ClassVar[str] = "assign"
    produces: ClassVar[Kind] = "record"
    in_process: ClassVar[bool] = True

    step: Precision
    keep: tuple[str, ...]

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        groups = [GroupFact.model_validate(entry) for entry in read_records(inputs[SENSITIVITY])]
        trials = [Trial.model_validate(entry) for entry in read_records(inputs[BEFORE])]
        found = best(trials, groups)
        chosen = found or min(trials, key=lambda trial: trial.error)
        reasons = {name: _why(name, trials) for name in chosen.kept}
        reasons |= dict.fromkeys(kept_by(self.keep, groups), "asked for")
        plain = assignment(groups, chosen.kept, chosen.method, self.step, reasons)
        write_records(out, plain)
        left = sum(1 for group in groups if group.reason or group.name in chosen.kept)
        summary = f"{len(groups) - left} of {len(groups)} groups quantised, ranges by {chosen.method}"
        rejected = "" if found else f"no assignment of {len(trials)} tried reaches the goal: {chosen.reason}"
        if left == len(groups):
            rejected = rejected or f"the goal is reached only with nothing in {self.step.precision.partition('+')[0]}"
        return Effect(file=RECORDS, summary=summary, rejected=rejected)


def _why(name: str, trials: Sequence[Trial]) -> str:
    """Why a group stays in floating point."""
    first = next((trial for trial in trials if name in trial.kept and trial.phase in ("sensitive", "speed")), None)
    if first is None or first.phase == "sensitive":
        return "among the most sensitive groups; the goal needs it"
    return first.why


def assignment(
    groups: Sequence[GroupFact],
    kept: Sequence[str] | frozenset[str],
    method: str,
    step: Precision,
    reasons: Mapping[str, str],
) -> list[dict[str, Any]]:
    """What each group gets, as the precision pass reads it and reports show it."""
    low, rest = step.precision.partition("+")[0], step.remainder
    return [
        {
            "group": group.name,
            "module": group.module,
            "operator": group.kind,
            "precision": rest if group.name in kept or group.reason else low,
            "why": group.reason or reasons.get(group.name, ""),
            "method": method,
            "sqnr_db": group.sqnr_db,
            "macs": group.macs,
        }
        for group in groups
    ]


def kept_by(patterns: Sequence[str], groups: Sequence[GroupFact]) -> frozenset[str]:
    """Groups whose name or module fits one of the patterns.

    Raises:
        UsageError: a pattern fits none.
    """
    kept: set[str] = set()
    for pattern in patterns:
        found = {
            g.name for g in groups if fnmatchcase(g.name, pattern) or (g.module and fnmatchcase(g.module, pattern))
        }
        if not found:
            import difflib

            known = [name for group in groups for name in (group.module, group.name) if name]
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
            raise UsageError(
                f"no group that can be quantised is called {pattern!r}",
                f"did you mean {', '.join(near)}?" if near else "`enginesmith inspect` lists them",
            )
        kept |= found
    return frozenset(kept)


def _artifact(kind: Kind, path: Path, like: Artifact) -> Artifact:
    signature = like.signature or onnx_file.signature(like.path)
    return Artifact(kind=kind, path=path, sha256="", bytes=0, signature=signature)


def _told(trial: Trial) -> str:
    parts = [f"drop {trial.drop:.4f}" if trial.drop is not None else ""]
    parts += [f"SQNR {trial.sqnr_db:.1f} dB" if trial.sqnr_db is not None else ""]
    parts += [f"{trial.speedup:.2f}× the float graph's speed" if trial.speedup else ""]
    verdict = "reaches the goal" if trial.passed else trial.reason
    return f"{trial.why}: {', '.join(part for part in parts if part)}; {verdict}"
