"""The search for what stays in floating point: one task is one trial, and knows those before it."""

import json
import logging
import math
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializeAsAny

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines import simulation
from enginesmith.pipeline.engines.base import BuildRequest, Engine, Session
from enginesmith.pipeline.engines.base import Candidate as TimedCandidate
from enginesmith.pipeline.errors import DataError, MissingCapability, ModelError, UsageError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import coverage, edit, evaluator, model_file
from enginesmith.pipeline.measure.fidelity import Fidelity, compare_calls, thresholds_for
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import measure_latency
from enginesmith.pipeline.passes.base import PrecisionPass, Progress
from enginesmith.pipeline.passes.quantize import layers, precision, search
from enginesmith.pipeline.passes.quantize.layers import require_opset
from enginesmith.pipeline.passes.quantize.search import Candidate, GroupFact, Judgement, Trial, best, propose
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, read_records, write_records
from enginesmith.pipeline.tasks.calibrate import Feeder
from enginesmith.pipeline.tasks.load import SHAPES, read_ranges
from enginesmith.pipeline.tasks.measure import BASELINE, Quality, logs_in_own_log, measured_feeds

if TYPE_CHECKING:
    import onnx_ir as ir


# How much error each group brings in when it is quantised, found out for all of them in one pass over the data.


class Sensitivity(Task):
    """The groups of a float graph, with the work in each and the error that each brings in."""

    title: ClassVar[str] = "sensitivity"
    produces: ClassVar[Kind] = "record"

    step: SerializeAsAny[PrecisionPass]
    """The precision, with everything quantised."""
    feeder: Feeder
    """Where the feeds come from."""

    @property
    def tools(self) -> tuple[str, ...]:
        return (*evaluator.TOOLS, *self.step.tools)

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model = inputs["model"]
        floating = edit.load(model.path)
        found = layers.find(floating)
        kinds = {node.name: _kind(node) for node in floating.graph}
        work = coverage.count_macs(model.path, _sizes(inputs["reference"]))
        ratios, left, reads = self._ratios(inputs, found, progress)
        if not ratios:
            raise ModelError(
                f"nothing in this model has a form in {self.step.precision}: it has no product with a constant weight",
                "use fp16, or another precision",
            )
        records = [
            GroupFact(
                name=group.name,
                module=group.module,
                kind=kinds[group.name],
                macs=work.get(group.name, 0),
                sqnr_db=ratios.get(group.name),
                reason="" if group.name in ratios else left.get(group.name) or group.reason or "nothing is quantised",
            )
            for group in found
        ]
        write_records(out, records)
        known = sorted((one.sqnr_db, one.name) for one in records if one.sqnr_db is not None)
        worst = f"; most sensitive {known[0][1]} with {known[0][0]:.1f} dB" if known else ""
        return Effect(file=RECORDS, summary=f"{len(records)} groups, {len(known)} measured{worst}", reads=reads)

    def _ratios(
        self, inputs: Inputs, found: tuple[layers.QuantizableOp, ...], progress: Progress
    ) -> tuple[dict[str, float], dict[str, str], tuple[Path, ...]]:
        """Compute signal-to-noise ratios in dB by group, and why others have none."""
        model = inputs["model"]
        with tempfile.TemporaryDirectory(prefix="enginesmith-sensitivity-") as folder:
            quantised, both = Path(folder, "quantised"), Path(folder, "joint")
            for place in (quantised, both):
                place.mkdir()
            alone = self.step.rounding_inputs()
            records = {name: artifact for name, artifact in inputs.items() if name == "ranges"}
            effect = run_pass(alone, model, quantised, progress, records)
            left = {entry["group"]: entry["why"] for entry in precision.read(quantised)}
            floating, narrow = edit.load(model.path), edit.load(quantised / effect.file)
            require_opset(floating, narrow.opset_imports[""], self.step.precision)
            measured = search.add_layerwise_error(floating, narrow, found)
            if not measured:
                return {}, left, ()
            edit.save(floating, both)
            file = both / edit.FILE
            artifact = Artifact(kind="onnx", path=file, sha256="", bytes=0, signature=model_file.signature(file))
            energies: Counter[str] = Counter()
            engine = simulation()
            feeds, reads = self.feeder.open(model, inputs["reference"])
            with engine.load(artifact, Device()) as session:
                for index, batch in enumerate(feeds):
                    progress(f"float and quantised side by side, batch {index + 1}")
                    energies.update({name: float(value) for name, value in session.run(batch).items()})
        names = [group.name for group in measured]
        return {name: _decibels(energies, group) for name, group in zip(names, measured, strict=True)}, left, reads


def _kind(node: "ir.Node") -> str:
    """The operator; convolutions of single channels are a kind of their own, as they move more than they compute."""
    if node.op_type == "Conv" and node.attributes.get_int("group", 1) > 1:
        return "grouped Conv"
    return node.op_type


def _decibels(energies: Counter[str], group: layers.QuantizableOp) -> float:
    signal, noise = (energies[search.output_name(group, what)] for what in (search.SIGNAL, search.NOISE))
    return round(10 * math.log10(max(signal, 1e-30) / max(noise, 1e-30)), 3)


def _sizes(reference: Artifact) -> dict[str, int]:
    """Return the usual sizes of dynamic dimensions."""
    return {name: range_.opt for name, range_ in samples.read(reference.folder).ranges.items()}


# What a quantised graph has to reach: the metric on labelled data where a drop was allowed, else nearness to eager.

REFERENCE = "reference"


class Goal(BaseModel):
    """The budgets of accuracy, and what they are judged on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threshold: str
    """Row of the fidelity thresholds."""
    min_sqnr_db: float | None
    max_drop: float | None
    quality: SerializeAsAny[Quality] | None
    """How the metric is found; None where there is no labelled data."""
    simulation: SerializeAsAny[Engine]
    """What runs the graph where the engine proper cannot run."""

    def judge(
        self, engine: Engine, made: Artifact, device: Device, inputs: Inputs, progress: Progress
    ) -> tuple[Judgement, tuple[Path, ...]]:
        """Hold a graph or engine against the reference, and the metric on it against the baseline's."""
        with engine.load(made, device) as session:
            worst = self._fidelity(session, inputs[REFERENCE])
            drop: float | None = None
            reads: tuple[Path, ...] = ()
            if self.quality and BASELINE in inputs:
                quality, _, reads = self.quality.judge(session, inputs[BASELINE], progress)
                drop = quality.drop if quality else None
        if drop is None and self.max_drop is not None:
            raise DataError(
                "the budget max_drop needs labelled data, and this has no labels", "add an array named labels"
            )
        sqnr = worst.sqnr_db
        reasons = (
            [] if worst.passed else [f"SQNR {sqnr:.1f} dB is too little" if sqnr is not None else "outputs differ"]
        )
        if self.max_drop is not None and drop is not None and drop > self.max_drop:
            reasons.append(f"the drop of {drop:.4f} is more than {self.max_drop:g}")
        error = drop if drop is not None and self.max_drop is not None else -(sqnr if sqnr is not None else -1e3)
        found = Judgement(passed=not reasons, error=error, drop=drop, sqnr_db=sqnr, reason="; ".join(reasons))
        return found, reads

    def _fidelity(self, session: Session, reference: Artifact) -> Fidelity:
        """Return the worst over the points of the shape range."""
        thresholds = thresholds_for(self.threshold)
        if self.min_sqnr_db is not None:
            thresholds = thresholds.model_copy(update={"min_sqnr_db": self.min_sqnr_db, "max_error_of_range": 0.0})
        found = [
            compare_calls(list(zip(expected, map(session.run, feeds), strict=True)), thresholds)
            for _, feeds, expected in samples.read_calls(reference.folder)
        ]
        return min(found, key=lambda one: (one.passed, one.sqnr_db if one.sqnr_db is not None else -1e3))


MODEL, RANGES, SENSITIVITY, FLOAT, BEFORE = "model", "ranges", "sensitivity", "float", "before"
_log = logging.getLogger(__name__)
_SPEED = LatencySettings(precision=0.02, time_limit_seconds=4.0, launches=1)


class Search(Task):
    """One more trial, unless the search is over or its time is up; the record holds all trials so far."""

    title: ClassVar[str] = "search"
    produces: ClassVar[Kind] = "record"
    exclusive: ClassVar[bool] = True

    step: SerializeAsAny[PrecisionPass]
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
        """Return the engine of a graph.

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

    step: SerializeAsAny[PrecisionPass]
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
    """Explain why a group stays in floating point."""
    first = next((trial for trial in trials if name in trial.kept and trial.phase in ("sensitive", "speed")), None)
    if first is None or first.phase == "sensitive":
        return "among the most sensitive groups; the goal needs it"
    return first.why


def assignment(
    groups: Sequence[GroupFact],
    kept: Sequence[str] | frozenset[str],
    method: str,
    step: PrecisionPass,
    reasons: Mapping[str, str],
) -> list[dict[str, Any]]:
    """List each group's precision, as the precision pass reads it and reports show it."""
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
    """Find groups whose name or module fits one of the patterns.

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
    signature = like.signature or model_file.signature(like.path)
    return Artifact(kind=kind, path=path, sha256="", bytes=0, signature=signature)


def _told(trial: Trial) -> str:
    parts = [f"drop {trial.drop:.4f}" if trial.drop is not None else ""]
    parts += [f"SQNR {trial.sqnr_db:.1f} dB" if trial.sqnr_db is not None else ""]
    parts += [f"{trial.speedup:.2f}× the float graph's speed" if trial.speedup else ""]
    verdict = "reaches the goal" if trial.passed else trial.reason
    return f"{trial.why}: {', '.join(part for part in parts if part)}; {verdict}"
