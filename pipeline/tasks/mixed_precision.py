"""Search for what stays in floating point: one task is one trial, and knows those before it."""

import difflib
import json
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field, SerializeAsAny

from enginesmith.calibration import ranges
from enginesmith.calibration.options import PartOptions
from enginesmith.calibration.ranges import FILE as RANGES_FILE
from enginesmith.pipeline.artifact import Artifact, Effect, Kind, file_digest
from enginesmith.pipeline.engines import simulation
from enginesmith.pipeline.engines.base import BuildRequest, Engine, Session
from enginesmith.pipeline.errors import MissingCapability, ModelError, UsageError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import coverage, edit, evaluator, model_file
from enginesmith.pipeline.measure.fidelity import Fidelity, compare_calls, thresholds_for
from enginesmith.pipeline.measure.quality import Quality as Judged
from enginesmith.pipeline.passes.base import Pass, PrecisionPass, Progress
from enginesmith.pipeline.passes.quantize import diagnose, layers, precision, search
from enginesmith.pipeline.passes.quantize.layers import require_opset
from enginesmith.pipeline.passes.quantize.precisions import FORM_WORDS, WEAK_DB, Cause, Form
from enginesmith.pipeline.passes.quantize.search import (
    NO_ADVICE,
    Advice,
    Candidate,
    GroupFact,
    Groups,
    Judgement,
    Trial,
    best,
    propose,
)
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import (
    RECORDS,
    Inputs,
    Task,
    read_models,
    read_records,
    scratch_artifact,
    write_records,
)
from enginesmith.pipeline.tasks.build import Transform
from enginesmith.pipeline.tasks.calibrate import Calibrate, Feeder
from enginesmith.pipeline.tasks.load import read_ranges
from enginesmith.pipeline.tasks.measure import BASELINE, Quality, measure_beside, this_machine
from enginesmith.pipeline.tasks.verify import Verify, describe_failure
from enginesmith.pipeline.tensors import Array


class Sensitivity(Task):
    """List the groups of a float graph, with the work in each and the error that each brings in when quantised.

    It is measured for all of them in one pass over the data.
    """

    title: ClassVar[str] = "sensitivity"
    produces: ClassVar[Kind] = "record"

    step: SerializeAsAny[PrecisionPass]
    """The precision, with inputs of all products quantised, and nothing else."""
    feeder: Feeder
    least_share: float = 0.0
    """Share of the multiply-adds that needs a form in the precision; with less it is not worth a trial."""

    @property
    def tools(self) -> tuple[str, ...]:
        return (*evaluator.TOOLS, *self.step.tools)

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model = inputs["model"]
        floating = edit.load(model.path)
        groups = layers.find_groups(floating)
        grouped = {
            node.name for node in floating.graph if node.op_type == "Conv" and node.attributes.get_int("group", 1) > 1
        }  # a kind of their own, as they move more than they compute
        kinds = {node.name: "grouped Conv" if node.name in grouped else node.op_type for node in floating.graph}
        sizes = samples.read(inputs["reference"].folder).ranges
        work = coverage.count_macs(model.path, {name: range_.opt for name, range_ in sizes.items()})
        ratios, shifts, left, reads = self._measure_errors(inputs, groups, progress)
        weak = {name: shifts.get(name, 0.0) for name, ratio in ratios.items() if ratio < WEAK_DB}
        causes = self._explain_weak(inputs, weak)
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
                reason="" if group.name in ratios else left.get(group.name) or group.reason or "nothing is quantized",
                cause=causes[group.name][1] if group.name in causes else "",
                pattern=causes[group.name][0] if group.name in causes else "unknown",
            )
            for group in groups
        ]
        write_records(out, records)
        known = sorted((record.sqnr_db, record.name) for record in records if record.sqnr_db is not None)
        worst = f"; most sensitive {known[0][1]} with {known[0][0]:.1f} dB" if known else ""
        share = sum(work.get(name, 0) for name in ratios) / max(1, sum(work.values()))
        rejected = ""
        if share < self.least_share and all(group.name in work for group in groups):
            rejected = f"only {share:.1%} of the multiply-adds have a form in {self.step.precision}"
        summary = f"{len(records)} groups, {len(known)} measured{worst}"
        return Effect(file=RECORDS, summary=summary, reads=reads, rejected=rejected)

    def _explain_weak(self, inputs: Inputs, shifts: Mapping[str, float]) -> dict[str, tuple[Cause, str]]:
        """Explain by group why these lose much; nothing where no ranges are known, as for weights alone."""
        if not shifts or "ranges" not in inputs:
            return {}
        model = edit.load(inputs["model"].path)
        layers.find_groups(model)  # which names the nodes
        known = ranges.load(inputs["ranges"].folder / RANGES_FILE, model_sha256=inputs["model"].sha256)
        nodes = ((str(node.name), node) for node in model.graph)
        return {name: diagnose.explain_loss(node, known, shifts[name]) for name, node in nodes if name in shifts}

    def _measure_errors(
        self, inputs: Inputs, groups: tuple[layers.QuantizableOp, ...], progress: Progress
    ) -> tuple[dict[str, float], dict[str, float], dict[str, str], tuple[Path, ...]]:
        """Measure signal-to-noise ratios in dB by group, and the shares of the noise that are its means by channel.

        Returns also why other groups have none, and the files read.
        """
        model = inputs["model"]
        with tempfile.TemporaryDirectory(prefix="enginesmith-sensitivity-") as folder:
            quantised, both = Path(folder, "quantised"), Path(folder, "joint")
            for place in (quantised, both):
                place.mkdir()
            records = {name: artifact for name, artifact in inputs.items() if name == "ranges"}
            effect = run_pass(self.step, model, quantised, progress, records)
            left = {entry["group"]: entry["why"] for entry in precision.read(quantised)}
            floating, narrow = edit.load(model.path), edit.load(quantised / effect.file)
            require_opset(floating, narrow.opset_imports[""], self.step.precision)
            measured = search.add_layerwise_error(floating, narrow, groups)
            if not measured:
                return {}, {}, left, ()
            edit.save(floating, both)
            file = both / edit.FILE
            artifact = scratch_artifact("onnx", file, model_file.signature(file))
            totals: dict[str, Array] = {}
            feeds, reads = self.feeder.open(model, inputs["reference"])
            with simulation().load(artifact, Device()) as session:
                for index, batch in enumerate(feeds):
                    progress(f"float and quantized side by side, batch {index + 1}")
                    for name, value in session.run(batch).items():
                        totals[name] = totals.get(name, np.float64(0)) + value.astype(np.float64)
        ratios, shifts = {}, {}
        for group in measured:
            signal, noise = (float(totals[search.output_name(group, what)]) for what in (search.SIGNAL, search.NOISE))
            ratios[group.name] = round(10 * math.log10(max(signal, 1e-30) / max(noise, 1e-30)), 3)
            sums = totals.get(search.output_name(group, search.SUM))
            if sums is not None and noise > 0:
                count = float(totals[search.output_name(group, search.COUNT)])
                shifts[group.name] = search.find_shift(sums, count, noise)
        return ratios, shifts, left, reads


MODEL, REFERENCE, RANGES = "model", "reference", "ranges"
SENSITIVITY, FLOAT, BEFORE = "sensitivity", "float", "before"
RESCALED: Form = "rescaled"
MULTIPLIED: Form = "multiplied"
_CHANGED = (RESCALED, MULTIPLIED)
"""Inputs that are forms of the float graph beside the one given."""
ASSIGNMENT = "assignment"
DROP_HIGH = "drop_high"
"""Key in an assignment: the most that the metric loses with it on the samples for choosing; null if that is unknown."""
_TRIAL = "trial"
_log = logging.getLogger(__name__)
_SPEED_SECONDS = 2.0
_FAR = 1e9
"""Distance at which outputs are too far from eager's for a metric, so that it was not computed."""
_FIDELITY = "fp16"
"""Row of the fidelity thresholds: the graph is rounded to 8 bits next, and a Clip may cut data that were not seen."""


class Rescale(Task):
    """Make a graph of the same function that loses less, with its ranges and the errors of its groups beside it.

    It begins with the graph that was rescaled before, where there is one.
    """

    title: ClassVar[str] = "rescale"
    produces: ClassVar[Kind] = "onnx"

    steps: tuple[SerializeAsAny[Pass], ...]
    """Passes that scale channels, each by the ranges of the graph that it gets."""
    only_weak: bool = False
    """True where the passes may only change what is read by groups that lose much."""
    calibration: Calibrate
    sensitivity: Sensitivity

    @property
    def tools(self) -> tuple[str, ...]:
        every = (*(tool for step in self.steps for tool in step.tools), *self.calibration.tools)
        return tuple(dict.fromkeys((*every, *self.sensitivity.tools)))

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        form: Form = RESCALED if RESCALED in inputs else "given"
        (given, records), reference = find_form(form, inputs), inputs[REFERENCE]
        groups = _read_form(form, inputs)
        weak = [(group.sqnr_db, group.name) for group in groups if group.sqnr_db is not None]
        weak = sorted(pair for pair in weak if pair[0] < WEAK_DB)
        if not weak:
            return _pass_on(given, out, f"not needed: every group has an SQNR of {WEAK_DB:g} dB or more")
        model, told, reads = given, list[str](), set[Path]()
        with tempfile.TemporaryDirectory(prefix="enginesmith-rescale-") as scratch:
            if self.only_weak:
                file = Path(scratch, "products.json")
                file.write_text(json.dumps([name for _, name in weak]))
                records["products"] = scratch_artifact("record", file, None)
            for index, step in enumerate(self.steps):
                folder = Path(scratch, str(index))
                folder.mkdir()
                effect = run_pass(step, model, folder, progress, records)
                made = _with_digest(scratch_artifact("onnx", folder / effect.file, given.signature))
                if made.sha256 == file_digest(model.path):
                    continue  # passed on as it was
                told.append(effect.summary)
                model = made
                reads.update(self.calibration.run({MODEL: model, REFERENCE: reference}, folder, progress).reads)
                records[RANGES] = scratch_artifact("record", folder / RANGES_FILE, None)
            if model is given:
                return _pass_on(given, out, "no channels can be scaled against each other")
            rescaled = {MODEL: model, RANGES: records[RANGES], REFERENCE: reference}
            reads.update(self.sensitivity.run(rescaled, model.folder, progress).reads)
            check = Verify(stage="rescale", engine=simulation(), device=Device(), precision=_FIDELITY, min_sqnr_db=None)
            rejected = check.run(rescaled, Path(scratch), progress).rejected
            shutil.copytree(model.folder, out, dirs_exist_ok=True)
        errors = [group.sqnr_db for group in _read_facts(out / RECORDS) if group.sqnr_db is not None]
        summary = (
            f"{len(weak)} of {len(groups)} groups had less than {WEAK_DB:g} dB, {weak[0][1]} {weak[0][0]:.1f} dB; "
            f"{'; '.join(told)}; now at least {min(errors):.1f} dB"
        )
        return Effect(
            file=edit.FILE, summary=summary, signature=model.signature, rejected=rejected, reads=tuple(sorted(reads))
        )


def _pass_on(model: Artifact, out: Path, reason: str) -> Effect:
    return edit.pass_on(model.path, out, reason).model_copy(update={"rejected": reason})


class Goal(BaseModel, frozen=True, extra="forbid"):
    """Judge a quantised graph: by the metric where a drop was allowed, else by nearness to eager."""

    threshold: str
    """Row of the fidelity thresholds."""
    min_sqnr_db: float | None
    max_drop: float | None
    quality: SerializeAsAny[Quality] | None
    """Computes the metric; None where there is no labelled data."""
    simulation: SerializeAsAny[Engine]
    """Runs the graph where the engine proper cannot run."""

    def judge(
        self, engine: Engine, made: Artifact, device: Device, inputs: Inputs, progress: Progress
    ) -> tuple[Judgement, tuple[Path, ...]]:
        """Compare a graph or engine with the reference, and the metric on it with the baseline's."""
        with engine.load(made, device) as session:
            worst = self._compare(session, inputs[REFERENCE])
            drop, high, reason = None, None, ""
            reads: tuple[Path, ...] = ()
            if worst.passed and self.quality and BASELINE in inputs:  # the metric takes long
                quality, _, reads = self.quality.judge(session, inputs[BASELINE], progress)
                if not isinstance(quality, str):
                    drop, high, reason = quality.drop, quality.drop_high, self._judge_drop(quality)
        sqnr = worst.sqnr_db
        few = f"SQNR {sqnr:.1f} dB is too little" if sqnr is not None else "outputs differ"
        if any((output.paired or 1) < 1 for output in worst.outputs) and not worst.passed:
            few = describe_failure(worst)
        reasons = [] if worst.passed else [few]
        reasons += [reason] if reason else []
        error = drop if drop is not None and self.max_drop is not None else _FAR - (-1e3 if sqnr is None else sqnr)
        why = "; ".join(reasons)
        judged = Judgement(passed=not why, error=error, drop=drop, drop_high=high, sqnr_db=sqnr, reason=why)
        return judged, reads

    def _judge_drop(self, quality: Judged) -> str:
        """Give the reason where more is lost than allowed, else nothing.

        On a part of the data that is for choosing, as the samples tell: others decide in the end.
        """
        if self.max_drop is None or self.quality is None:
            return ""
        on_part = isinstance(self.quality.data_options, PartOptions)
        if on_part:
            return quality.explain_excess(self.max_drop)
        return f"the drop of {quality.drop:.4f} is more than {self.max_drop:g}" if quality.drop > self.max_drop else ""

    def _compare(self, session: Session, reference: Artifact) -> Fidelity:
        """Compute the worst fidelity over the points of the shape range."""
        thresholds = thresholds_for(self.threshold, self.min_sqnr_db)
        points = [
            compare_calls(list(zip(expected, map(session.run, feeds), strict=True)), thresholds, session.signature)
            for _, feeds, expected in samples.read_calls(reference.folder)
        ]
        return min(points, key=lambda point: (point.passed, point.sqnr_db if point.sqnr_db is not None else -1e3))


_SEARCH_SECONDS = 600.0
"""Time of trials after which no other is begun; the time that one trial may take, where that is less."""


class Search(Task):
    """Make one more trial, unless the search is over or its time is up; the record has all trials so far."""

    title: ClassVar[str] = "search"
    produces: ClassVar[Kind] = "record"
    exclusive: ClassVar[bool] = True

    time_share: float = Field(0.5, exclude=True)  # of all trials together
    step: SerializeAsAny[PrecisionPass]
    """The precision, with everything quantised."""
    engine: SerializeAsAny[Engine]
    device: Device
    goal: Goal
    methods: tuple[str, ...]
    signs: tuple[bool, ...] = (False,)
    """Forms of activations with both signs, True for int8 around 0, the faster first."""
    corrections: tuple[bool, ...] = (False,)
    """Values to try, in order: True where biases make up for the error of rounded weights."""
    keep: tuple[str, ...]
    """Patterns of groups that stay in floating point anyway."""
    advice: Advice = NO_ADVICE
    """The order of the trials that earlier searches suggest."""
    timed: bool = False
    """True where speed decides, too: what is found then holds for this machine alone."""

    @property
    def environment_key(self) -> dict[str, Any]:
        return this_machine() if self.timed else {}

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.step.tools, *self.engine.tools)))

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        forms = read_forms(inputs, self.step)
        trials = read_models(inputs.get(BEFORE), Trial)
        kept = find_kept(self.keep, forms["given"])
        candidate = propose(trials, forms, self.methods, kept, self.signs, self.corrections, self.advice)
        late = self._is_late(trials)  # more time continues it
        ended = late or sum(trial.seconds for trial in trials) >= _SEARCH_SECONDS
        reads: tuple[Path, ...] = ()
        if candidate and not ended:
            progress(candidate.why)
            trial, reads = self._try(candidate, forms[candidate.form], inputs, progress)
            trials.append(trial)
            parts = [f"drop {trial.drop:.4f}"] if trial.drop is not None else []
            parts += [f"SQNR {trial.sqnr_db:.1f} dB"] if trial.sqnr_db is not None else []
            parts += [f"{trial.speedup:.2f}× the float graph's speed"] if trial.speedup else []
            verdict = "reaches the goal" if trial.passed else trial.reason
            summary = f"{trial.why}: {', '.join(parts)}; {verdict}"
        else:
            winner = best(trials, forms["given"])
            summary = "the time for the search is up" if candidate else "the search is over"
            summary += f": {winner.why}" if winner else ": nothing reaches the goal"
        write_records(out, trials)
        return Effect(file=RECORDS, summary=summary, reads=reads, incomplete=bool(candidate) and late)

    def _is_late(self, trials: Sequence[Trial]) -> bool:
        """Tell whether one more trial takes longer than their share of the time that was left before the first.

        What was found is quantised, built and verified after them, which takes about as long as a trial.
        """
        if not trials:
            return False
        spent, longest = sum(trial.seconds for trial in trials), max(trial.seconds for trial in trials)
        return spent + 2 * longest > self.left_seconds + self.time_share * spent

    def _try(
        self, candidate: Candidate, groups: Sequence[GroupFact], inputs: Inputs, progress: Progress
    ) -> tuple[Trial, tuple[Path, ...]]:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="enginesmith-search-") as scratch:
            graph, out = self._quantize(candidate, groups, inputs, Path(scratch), progress), Path(scratch, "engine")
            out.mkdir()
            speedup: float | None = None
            try:
                if FLOAT not in inputs:
                    raise MissingCapability(f"{self.engine.name} cannot run on this machine")
                effect = self.engine.build(BuildRequest(graph, out, self.device, read_ranges(inputs), progress))
                built = scratch_artifact("engine", out / effect.file, graph.signature)
                judged, reads = self.goal.judge(self.engine, built, self.device, inputs, progress)
                if judged.passed:
                    sides = {"float": (self.engine, inputs[FLOAT]), "quantised": (self.engine, built)}
                    _, row = measure_beside(sides, self.device, inputs[REFERENCE], _SPEED_SECONDS, progress)
                    speedup = row.speedup.median if row.speedup else None
            except (ModelError, MissingCapability) as error:
                _log.info("judged by simulation: %s", error)  # the engine's own steps say so of the variant
                judged, reads = self.goal.judge(self.goal.simulation, graph, Device(), inputs, progress)
        trial = Trial(
            phase=candidate.phase,
            form=candidate.form,
            signed=candidate.signed,
            method=candidate.method,
            corrected=candidate.corrected,
            kept=tuple(sorted(candidate.kept)),
            why=candidate.why,
            speedup=speedup,
            seconds=round(time.monotonic() - start, 3),
            **judged.model_dump(),
        )
        return trial, reads

    def _quantize(
        self, candidate: Candidate, groups: Sequence[GroupFact], inputs: Inputs, scratch: Path, progress: Progress
    ) -> Artifact:
        out, file = scratch / "graph", scratch / RECORDS
        out.mkdir()
        file.write_text(json.dumps(assignment(groups, candidate, self.step, {})))
        model, records = find_form(candidate.form, inputs)
        records[ASSIGNMENT] = scratch_artifact("record", file, None)
        effect = run_pass(self.step, model, out, progress, records)
        signature = inputs[MODEL].signature or model_file.signature(inputs[MODEL].path)
        return scratch_artifact("onnx", out / effect.file, signature)


class Assign(Task):
    """Assign each group its precision, as a search found best, and say why.

    The search may have ended early: then it is the best of the trials that there are.
    """

    title: ClassVar[str] = "assign"
    produces: ClassVar[Kind] = "record"
    in_process: ClassVar[bool] = True

    step: SerializeAsAny[PrecisionPass]
    keep: tuple[str, ...]
    to_train: Literal["", "asked", "needed"] = ""
    """Where the graph is trained next: all that can be is quantised, as in the trial that came nearest to the goal.
    ``needed``: it is not, where such a trial reached the goal."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        forms, trials = read_forms(inputs, self.step), _read_trials(inputs)
        if self.to_train:
            return self._assign_everything(forms, trials, out)
        winner = best(trials, forms["given"])
        chosen = winner or min(trials, key=lambda trial: trial.error)
        groups = forms[chosen.form]
        reasons = {name: _explain_kept(name, trials) for name in chosen.kept}
        reasons |= dict.fromkeys(find_kept(self.keep, groups), "asked for")
        rows = _with_causes(assignment(groups, chosen, self.step, reasons), forms["given"])
        write_records(out, [{**row, DROP_HIGH: chosen.drop_high} for row in rows])
        left = sum(1 for group in groups if group.reason or group.name in chosen.kept)
        rescaled = f", {FORM_WORDS[chosen.form]}" if chosen.form in FORM_WORDS else ""
        summary = f"{len(groups) - left} of {len(groups)} groups quantized{rescaled}, ranges by {chosen.method}"
        rejected = "" if winner else f"none of {len(trials)} trials reaches the goal: {chosen.reason}"
        if left == len(groups):
            rejected = rejected or f"the goal is reached only with nothing in {self.step.precision.partition('+')[0]}"
        return Effect(file=RECORDS, summary=summary, rejected=rejected)

    def _assign_everything(self, forms: Groups, trials: Sequence[Trial], out: Path) -> Effect:
        everything = [trial for trial in trials if trial.phase == "everything"]
        if not everything:
            raise ModelError("no trial had everything quantized", "allow more time with --time")
        chosen = min(everything, key=lambda trial: (not trial.passed, trial.error))
        groups = forms[chosen.form]
        reasons = dict.fromkeys(find_kept(self.keep, groups), "asked for")
        write_records(out, _with_causes(assignment(groups, chosen, self.step, reasons), forms["given"]))
        rejected = f"not needed: {chosen.why} reaches the goal" if chosen.passed and self.to_train == "needed" else ""
        left = sum(1 for group in groups if group.reason or group.name in chosen.kept)
        return Effect(
            file=RECORDS,
            summary=f"{len(groups) - left} of {len(groups)} groups quantized, to be trained; as tried: {chosen.why}",
            rejected=rejected,
        )


def trial_role(index: int) -> str:
    """Name the role of the record of a search's trial, and those before it; the first one's index is 1."""
    return f"{_TRIAL} {index}"


def _read_trials(inputs: Inputs) -> list[Trial]:
    """Read the trials of a search from the last of its records that there is."""
    records = (artifact for role, artifact in inputs.items() if role.split()[0] == _TRIAL)
    return max((read_models(record, Trial) for record in records), key=len)


def _explain_kept(name: str, trials: Sequence[Trial]) -> str:
    """Explain why a group stays in floating point."""
    first = next((trial for trial in trials if name in trial.kept and trial.phase in ("sensitive", "speed")), None)
    if first is None or first.phase == "sensitive":
        return "among the most sensitive groups; the goal needs it"
    return first.why


def _with_causes(rows: list[dict[str, Any]], given: Sequence[GroupFact]) -> list[dict[str, Any]]:
    """Add what each group lost in the graph as it was given, and why."""
    facts = {group.name: group for group in given}
    return [
        {**row, "cause": facts[row["group"]].cause, "given_sqnr_db": facts[row["group"]].sqnr_db}
        if row["group"] in facts
        else row
        for row in rows
    ]


def assignment(
    groups: Sequence[GroupFact], chosen: Candidate | Trial, step: PrecisionPass, reasons: Mapping[str, str]
) -> list[dict[str, Any]]:
    """List each group's precision, as the precision pass reads it and reports show it."""
    low, rest = step.precision.partition("+")[0], step.remainder
    return [
        {
            "group": group.name,
            "module": group.module,
            "operator": group.kind,
            "precision": rest if group.name in chosen.kept or group.reason else low,
            "why": group.reason or reasons.get(group.name, ""),
            "form": chosen.form,
            "signed": chosen.signed,
            "method": chosen.method,
            "corrected": chosen.corrected,
            "sqnr_db": group.sqnr_db,
            "macs": group.macs,
        }
        for group in groups
    ]


def read_forms(inputs: Inputs, step: PrecisionPass) -> dict[Form, list[GroupFact]]:
    """Read the groups of each form of the graph that there is, in the order in which they are tried.

    Engines share what was measured; groups that a pass has no kernels for are left out of what can be chosen.
    """
    forms: dict[Form, list[GroupFact]] = {form: _read_form(form, inputs) for form in _CHANGED if form in inputs}
    forms["given"] = _read_form("given", inputs)
    for form, groups in forms.items():
        reasons = [group.reason or step.explain_operator(group.kind.split()[-1]) for group in groups]
        forms[form] = [
            group.model_copy(update={"reason": why, "sqnr_db": None}) if why else group
            for group, why in zip(groups, reasons, strict=True)
        ]
    return forms


def _read_form(form: Form, inputs: Inputs) -> list[GroupFact]:
    """Read the groups of a form of the graph."""
    return _read_facts(inputs[SENSITIVITY if form == "given" else form].folder / RECORDS)


def _read_facts(path: Path) -> list[GroupFact]:
    return read_models(scratch_artifact("record", path, None), GroupFact)


def find_form(form: str, inputs: Inputs) -> tuple[Artifact, dict[str, Artifact]]:
    """Find a form of the float graph, and the record of its ranges."""
    if form == "given":
        return inputs[MODEL], {role: artifact for role, artifact in inputs.items() if role == RANGES}
    return _with_digest(inputs[form]), {RANGES: scratch_artifact("record", inputs[form].folder / RANGES_FILE, None)}


def read_form(assignment: Artifact) -> str:
    """Read which form of the float graph an assignment is for."""
    return next((str(entry["form"]) for entry in read_records(assignment)), "given")


def _with_digest(model: Artifact) -> Artifact:
    """Identify a graph by its own file, as ranges do that lie beside it."""
    return model.model_copy(update={"sha256": file_digest(model.path)})


class LowerForm(Transform):
    """Bring that form of the graph into another precision which the assignment names."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        chosen = inputs[ASSIGNMENT]
        form = read_form(chosen)
        model, records = find_form(form, inputs)
        effect = run_pass(self.step, model, out, progress, {**records, ASSIGNMENT: chosen})
        if form == "given":
            return effect
        return effect.model_copy(
            update={"notes": (f"channels rescaled: {inputs[form].history[-1].effect}", *effect.notes)}
        )


def find_kept(patterns: Sequence[str], groups: Sequence[GroupFact | layers.QuantizableOp]) -> frozenset[str]:
    """Find groups whose name or module fits one of the patterns.

    Raises:
        UsageError: a pattern fits none.
    """
    kept: set[str] = set()
    for pattern in patterns:
        names = ((group, name) for group in groups for name in (group.name, group.module) if name)
        matching = {group.name for group, name in names if fnmatchcase(name, pattern)}
        if not matching:
            known = [name for group in groups for name in (group.module, group.name) if name]
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
            raise UsageError(
                f"no group that can be quantized is called {pattern!r}",
                f"did you mean {', '.join(near)}?" if near else "`enginesmith inspect` lists them",
            )
        kept |= matching
    return frozenset(kept)
