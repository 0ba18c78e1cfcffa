"""Search for what stays in floating point: one task is one trial, and knows those before it."""

import json
import logging
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, SerializeAsAny

from enginesmith.calibration.options import PartOptions
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.base import BuildRequest, Engine, Session
from enginesmith.pipeline.errors import DROPPED, MissingCapability, ModelError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.fidelity import Fidelity, compare_calls, describe_failure, thresholds_for
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, model_file
from enginesmith.pipeline.measure.quality import Quality as Judged
from enginesmith.pipeline.passes.base import PrecisionPass, Progress
from enginesmith.pipeline.passes.quantize.causes import to_decibels
from enginesmith.pipeline.passes.quantize.layers import find_kept
from enginesmith.pipeline.passes.quantize.precisions import FORM_WORDS, KINDS, WEAK_DB
from enginesmith.pipeline.passes.quantize.search import (
    NO_ADVICE,
    Advice,
    Candidate,
    GroupFact,
    Groups,
    Judgement,
    Trial,
    best,
    count_quantized,
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
from enginesmith.pipeline.tasks.graph_forms import MODEL, REFERENCE, find_form, measure_impacts, read_forms
from enginesmith.pipeline.tasks.load import read_ranges
from enginesmith.pipeline.tasks.measure import VERIFIED, measure_beside, this_machine
from enginesmith.pipeline.tasks.quality import BASELINE, Quality
from enginesmith.pipeline.units import format_metric

FLOAT, BEFORE = "float", "before"
ASSIGNMENT = "assignment"
DROP_HIGH = "drop_high"
"""Key in an assignment: the most that the metric loses with it on the samples for choosing; null if that is unknown."""
_TRIAL = "trial"
_LITTLE, _NEARER = 0.2, 0.75
"""Share of the work that stays in floating point while the rest is trained, at most; and the share of the loss that is
left with it: what hardly helps is trained as well."""
_log = logging.getLogger(__name__)
_SPEED_SECONDS = 2.0
RIVAL = "rival"
"""Role of another variant's engine: ``rival V`` for the variant V, and ``rival V verified`` for its check."""
_OUTPACED = 1.2
"""Times by which such a variant is faster than everything quantized, and than the float graph, where no search
follows: what is between these two may gain a tenth by the best choice of types, and another one by tuned options."""
_FAR = 1e9
"""Distance at which outputs are too far from eager's for a metric, so that it was not computed."""


class Goal(BaseModel, frozen=True, extra="forbid"):
    """Judge a graph in few bits: by the metric where a drop was allowed, else by nearness to eager."""

    threshold: str
    """Row of the fidelity thresholds."""
    min_sqnr_db: float | None
    max_drop: float | None
    quality: SerializeAsAny[Quality] | None
    """Computes the metric; None where there is no labeled data."""
    simulation: SerializeAsAny[Engine]
    """Runs the graph where the engine proper cannot run."""

    def judge(
        self, engine: Engine, artifact: Artifact, device: Device, inputs: Inputs, progress: Progress
    ) -> tuple[Judgement, tuple[Path, ...]]:
        """Compare a graph or engine with the reference, and the metric on it with the baseline's."""
        with engine.load(artifact, device) as session:
            worst = self._compare(session, inputs[REFERENCE])
            drop, high, reason, missing = None, None, "", 0
            reads: tuple[Path, ...] = ()
            if worst.passed and self.quality and BASELINE in inputs:  # the metric takes long
                quality, _, reads = self.quality.judge(session, inputs[BASELINE], progress, inputs[REFERENCE])
                if not isinstance(quality, str):
                    drop, high, reason = quality.drop, quality.seen_high, self._judge_drop(quality)
                    missing = quality.count_missing(self.max_drop or 0.0) if reason else 0
        sqnr = worst.sqnr_db
        reasons = [] if worst.passed else [self._describe_failure(worst)]
        reasons += [reason] if reason else []
        error = drop if drop is not None and self.max_drop is not None else _FAR - (-1e3 if sqnr is None else sqnr)
        why = "; ".join(reasons)
        figures = {"drop": drop, "drop_high": high, "sqnr_db": sqnr, "missing_samples": missing}
        return Judgement(passed=not why, error=error, reason=why, **figures), reads

    def _describe_failure(self, compared: Fidelity) -> str:
        """Describe what is too far from the reference, shortly where nothing but the SQNR of an output is too low."""
        failed = [output for output in compared.outputs if not output.passed]
        plain = all(output.finite and not (output.part or output.fault or output.paired) for output in failed)
        lowest = min((output.sqnr_db for output in failed if output.sqnr_db is not None), default=None)
        if len(compared.outputs) == 1 and failed[0].fault and not failed[0].part:
            return failed[0].fault
        if not plain or lowest is None or lowest != compared.sqnr_db:
            return describe_failure(compared)
        least = thresholds_for(self.threshold, self.min_sqnr_db).min_sqnr_db
        return f"SQNR {lowest:.1f} dB is too little, below {least:g} dB"

    def _judge_drop(self, quality: Judged) -> str:
        """Give the reason where more is lost than allowed, else nothing.

        On a part of the data that is for choosing, as the samples tell: others decide in the end.
        """
        if self.max_drop is None or self.quality is None:
            return ""
        on_part = isinstance(self.quality.data_options, PartOptions)
        if on_part:
            return quality.explain_excess(self.max_drop)
        drop = format_metric(quality.drop)
        return f"the drop of {drop} is more than {self.max_drop:g}" if quality.drop > self.max_drop else ""

    def _compare(self, session: Session, reference: Artifact) -> Fidelity:
        """Compute the worst fidelity over the points of the shape range."""
        thresholds, known = thresholds_for(self.threshold, self.min_sqnr_db), samples.read(reference.folder)
        points = [
            compare_calls(
                list(zip(expected, map(session.run, feeds), strict=True)),
                thresholds,
                known.limit_sets(session.signature),
                known.spans,
                unstable,
            )
            for _, feeds, expected, unstable in samples.read_calls(reference.folder)
        ]
        return min(points, key=lambda point: (point.passed, point.sqnr_db if point.sqnr_db is not None else -1e3))


_SEARCH_SECONDS = 600.0
"""Time of trials after which no other is begun; the time that one trial may take, where that is less."""


class Search(Task):
    """Make one more trial, unless the search is over or its time is up; the record has all trials so far."""

    title: ClassVar[str] = "search"
    produces: ClassVar[Kind] = "record"
    exclusive: ClassVar[bool] = True
    other_tools: ClassVar[tuple[str, ...]] = evaluator.TOOLS

    time_share: float = Field(0.5, exclude=True)  # of all trials together
    step: SerializeAsAny[PrecisionPass]
    """The precision, with everything quantized, or lowered."""
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
    max_size_bytes: int | None = None
    runs_here: bool = False
    """The engine itself runs the trials, and speed may decide, too: what is found then holds for this machine alone."""
    casts: bool = False
    """The engine casts the float graph by itself, where nothing is to stay in float32."""
    rivals: dict[str, SerializeAsAny[Engine]] = Field(default_factory=dict)
    """Engines of variants that lose nothing. Where one is much faster, nothing is left in floating point here."""

    @property
    def environment_key(self) -> dict[str, Any]:
        return this_machine() if self.runs_here else {}

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        forms = read_forms(inputs, self.step)
        trials = read_models(inputs.get(BEFORE), Trial)
        fixed_groups = find_kept(self.keep, forms["given"])
        choose = partial(propose, trials, forms, self.methods, fixed_groups, self.signs, self.corrections, self.advice)
        candidate, impacts, measured = choose(), dict[str, float](), True
        late = self._is_late(trials)  # more time continues it
        ended = late or sum(trial.seconds + trial.impact_seconds for trial in trials) >= _SEARCH_SECONDS
        ended |= any(trial.outpaced for trial in trials)
        reads: tuple[Path, ...] = ()
        if candidate and not ended:
            start = time.monotonic()
            if candidate.phase == "sensitive" and not any(trial.phase == "sensitive" for trial in trials):
                impacts, measured = self._measure_impacts(
                    candidate, forms[candidate.form], fixed_groups, inputs, progress
                )
                candidate = choose(impacts) or candidate
            seconds = {"impact_seconds": round(time.monotonic() - start, 3)}
            progress(candidate.why)
            trial, reads = self._try(candidate, forms[candidate.form], inputs, progress, first=not trials)
            trials.append(trial.model_copy(update={"impacts": impacts, **seconds}))
            parts = [f"drop {format_metric(trial.drop)}"] if trial.drop is not None else []
            parts += [f"SQNR {trial.sqnr_db:.1f} dB"] if trial.sqnr_db is not None else []
            parts += [f"{trial.speedup:.2f}× the float graph's speed"] if trial.speedup else []
            verdict = ("reaches the goal" if trial.fits else "above --max-size") if trial.passed else trial.reason
            verdict += f"; {trial.outpaced}" if trial.outpaced else ""
            summary = f"{trial.why}: {', '.join(parts)}; {verdict}"
        else:
            winner = best(trials, forms["given"])
            outpaced = any(trial.outpaced for trial in trials)
            summary = "the time for the search is up" if candidate and not outpaced else "the search is over"
            summary += f": {winner.why}" if winner else ": nothing reaches the goal"
        incomplete = (bool(candidate) and late) or not measured
        return write_records(out, trials, summary, reads=reads, incomplete=incomplete)

    def _is_late(self, trials: Sequence[Trial]) -> bool:
        """Tell whether one more trial takes longer than what is left of their share of the time.

        What was found is quantized, built and verified after them, which takes about as long as a trial. A single one
        may have taken much longer, as only what reaches the goal is measured, and a busy machine delays that.
        """
        return bool(trials) and 2 * median(trial.seconds for trial in trials) > self.left_seconds

    def _try(
        self, candidate: Candidate, groups: Sequence[GroupFact], inputs: Inputs, progress: Progress, *, first: bool
    ) -> tuple[Trial, tuple[Path, ...]]:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="enginesmith-search-") as scratch:
            graph, out = self._quantize(candidate, groups, inputs, Path(scratch), progress), Path(scratch, "engine")
            out.mkdir()
            gain, fits, outpaced = None, True, ""
            try:
                if not self.runs_here:
                    raise MissingCapability(f"{self.engine.name} cannot run on this machine")
                effect = self.engine.build(BuildRequest(graph, out, self.device, read_ranges(inputs), progress))
                built = scratch_artifact("engine", out / effect.file, graph.signature)
                size = sum(file.stat().st_size for file in out.iterdir())
                fits = self.max_size_bytes is None or size <= self.max_size_bytes
                judged, reads = self.goal.judge(self.engine, built, self.device, inputs, progress)
                if judged.passed and FLOAT in inputs:
                    sides = {"float": (self.engine, inputs[FLOAT]), "quantized": (self.engine, built)}
                    _, row = measure_beside(sides, self.device, inputs[REFERENCE], _SPEED_SECONDS, progress)
                    gain = None if row.speedup_disturbed else row.speedup
                elif first and not judged.passed and candidate.phase == "everything":
                    outpaced = self._find_faster(built, inputs, progress)
            except (ModelError, MissingCapability) as error:
                if not (self.runs_here and KINDS[self.step.precision].lowered):
                    _log.info("judged by simulation: %s", error)  # the engine's own steps say so of the variant
                    judged, reads = self.goal.judge(self.goal.simulation, graph, Device(), inputs, progress)
                elif candidate.phase == "everything":
                    raise  # without kernels for the precision, no other choice can be built
                else:
                    none = dict.fromkeys(("drop", "drop_high", "sqnr_db"))
                    judged, reads = Judgement(passed=False, error=_FAR, reason=error.message, **none), ()
        trial = Trial(
            **{**vars(candidate), "kept": tuple(sorted(candidate.kept))},
            speedup=gain.median if gain else None,
            speedup_range=(gain.low, gain.high) if gain else None,
            fits=fits,
            outpaced=outpaced,
            seconds=round(time.monotonic() - start, 3),
            **judged.model_dump(),
        )
        return trial, reads

    def _find_faster(self, built: Artifact, inputs: Inputs, progress: Progress) -> str:
        """Say which rival is so much faster than everything quantized that no search is worth its time; else nothing.

        What is quantized then has failed, so that some of it would have to stay in floating point.
        """
        for name, engine in self.rivals.items():
            if not {f"{RIVAL} {name}", f"{RIVAL} {name} {VERIFIED}"} <= inputs.keys():
                continue
            sides = {"quantized": (self.engine, built)}
            sides |= {"float": (self.engine, inputs[FLOAT])} if FLOAT in inputs else {}
            sides[name] = engine, inputs[f"{RIVAL} {name}"]
            rows = measure_beside(sides, self.device, inputs[REFERENCE], _SPEED_SECONDS, progress)
            gains = [row.speedup for row in rows[1:] if row.speedup and not row.speedup_disturbed]
            if len(gains) < len(rows) - 1 or gains[-1].too_noisy:
                continue
            if gains[-1].low > _OUTPACED * max([1.0, *(gain.high for gain in gains[:-1])]):
                return f"{name} is {gains[-1].times()} faster than that, and loses nothing"
        return ""

    def _measure_impacts(
        self,
        candidate: Candidate,
        groups: Sequence[GroupFact],
        fixed: frozenset[str],
        inputs: Inputs,
        progress: Progress,
    ) -> tuple[dict[str, float], bool]:
        """Measure the impact of each group that can be quantized, in the setting that came nearest to the goal.

        Returns also whether time was enough.
        """
        everything, names = replace(candidate, kept=fixed), [group.name for group in groups if group.name not in fixed]
        with tempfile.TemporaryDirectory(prefix="enginesmith-search-") as scratch:
            file = Path(scratch, RECORDS)
            file.write_text(json.dumps(assignment(groups, everything, self.step, {})), encoding="utf-8")
            records = {ASSIGNMENT: scratch_artifact("record", file, None)}
            impacts, measured = measure_impacts(
                self.step, candidate.form, inputs, records, names, self.left_seconds, progress
            )
        return {name: impact.energy for name, impact in impacts.items()}, measured

    def _quantize(
        self, candidate: Candidate, groups: Sequence[GroupFact], inputs: Inputs, scratch: Path, progress: Progress
    ) -> Artifact:
        if self.casts and self.runs_here and not candidate.kept:
            return inputs[MODEL]
        out, file = scratch / "graph", scratch / RECORDS
        out.mkdir()
        file.write_text(json.dumps(assignment(groups, candidate, self.step, {})), encoding="utf-8")
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
    tools: ClassVar[tuple[str, ...]] = ()

    step: SerializeAsAny[PrecisionPass]
    keep: tuple[str, ...]
    to_train: Literal["", "asked", "needed"] = ""
    """Where the graph is trained next: all that can be is quantized, as in the trial that came nearest to the goal.
    ``needed``: it is not, where such a trial reached the goal; the trial may have had a little in floating point."""
    casts: bool = False
    """The engine casts the float graph by itself, where nothing is to stay in float32: then it chooses each type."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        forms, records = read_forms(inputs, self.step), [inputs[role] for role in inputs if role.split()[0] == _TRIAL]
        trials = max((read_models(record, Trial) for record in records), key=len)  # the last has all
        if outpaced := next((trial for trial in trials if trial.outpaced), None):
            return write_records(out, [], rejected=f"{DROPPED}{outpaced.why}: {outpaced.reason}; {outpaced.outpaced}")
        if self.to_train:
            chosen, rejected = self._choose_to_train(forms, trials)
        else:
            winner = best(trials, forms["given"])
            chosen = winner or min(trials, key=lambda trial: trial.error)
            rejected = "" if winner else f"none of {len(trials)} trials reaches the goal: {chosen.reason}"
        groups = forms[chosen.form]
        if self.casts and not chosen.kept:
            groups = [group.model_copy(update={"reason": ""}) for group in groups]
        end = "the time was over" if len(trials) < len(records) else "the search ended before"
        reasons = {name: _explain_kept(name, chosen, trials, end) for name in chosen.kept}
        reasons |= dict.fromkeys(find_kept(self.keep, groups), "asked for")
        impacts = next((trial.impacts for trial in trials if trial.impacts), {})
        rows = _with_causes(assignment(groups, chosen, self.step, reasons), forms, chosen, impacts)
        low = self.step.precision.partition("+")[0]
        quantized = count_quantized(chosen, groups)
        summary = f"{quantized} of {len(groups)} groups {'quantized' if chosen.method else f'in {low}'}"
        if self.to_train:
            summary += f", to be trained; as tried: {chosen.why}"
        else:
            for row in rows:
                row[DROP_HIGH] = chosen.drop_high
                if row["group"] in impacts:
                    row["answer_change"] = math.sqrt(impacts[row["group"]])
            rescaled = f", {FORM_WORDS[chosen.form]}" if chosen.form in FORM_WORDS else ""
            calibrated = chosen.method and KINDS[self.step.precision].calibrated
            summary += f"{rescaled}, ranges by {chosen.method}" if calibrated else rescaled
            if not quantized and (chosen.method or chosen.kept):
                slower = any(trial.passed and len(trial.kept) < len(chosen.kept) for trial in trials)
                nothing = f"the goal is reached only with nothing in {low}"
                rejected = rejected or (
                    f"with groups in {low}, what reaches the goal is no faster" if slower else nothing
                )
        return write_records(out, rows, summary, rejected=rejected)

    def _choose_to_train(self, forms: Groups, trials: Sequence[Trial]) -> tuple[Trial, str]:
        """Choose the trial that came nearest to the goal with next to all quantized; say why none is needed, if so."""
        everything = [trial for trial in trials if trial.phase == "everything"]
        if not everything:
            raise ModelError("no trial had everything quantized", "allow more time with --time")
        chosen = min(everything, key=lambda trial: (not trial.passed, trial.error))
        if self.to_train == "needed" and chosen.passed:
            return chosen, f"not needed: {chosen.why} reaches the goal"
        if self.to_train == "needed":
            enough = min((self._float_share(trial, forms) for trial in trials if trial.passed), default=1.0)
            little = [trial for trial in trials if self._float_share(trial, forms) <= min(_LITTLE, enough)]
            nearer = [trial for trial in little if not trial.passed and trial.error < _NEARER * chosen.error]
            chosen = min(nearer, key=lambda trial: trial.error, default=chosen)
        return chosen, ""

    def _float_share(self, trial: Trial, forms: Groups) -> float:
        """Compute the share of the work that a trial left in floating point, of what may be quantized.

        1 where the work of a group that it left there is not known.
        """
        fixed_groups = find_kept(self.keep, forms[trial.form])
        chosen = (group for group in forms[trial.form] if not group.reason and group.name not in fixed_groups)
        work = {group.name: group.macs for group in chosen}
        float_work = [work[name] for name in trial.kept if name in work]
        return sum(float_work) / max(1, sum(work.values())) if all(float_work) else 1.0


def trial_role(index: int) -> str:
    """Name the role of the record of a search's trial, and those before it; the first one's index is 1."""
    return f"{_TRIAL} {index}"


def _explain_kept(name: str, chosen: Trial, trials: Sequence[Trial], end: str) -> str:
    """Explain why a group stays in floating point; ``end`` tells why the search ended where more was to be tried."""
    first = next((trial for trial in trials if name in trial.kept and trial.phase in ("sensitive", "speed")), None)
    if first is not None and first.phase == "speed":
        return first.why
    if any(trial.passed and name not in trial.kept and len(trial.kept) < len(chosen.kept) for trial in trials):
        return "among the most sensitive groups; the goal is reached with it quantized, too, but slower"
    if _is_needed(name, chosen, trials):
        failed = (trial for trial in trials if trial.missing_samples and name not in trial.kept)
        missing = min((trial.missing_samples for trial in failed), default=0)
        unless = f", unless about {missing} more samples for choosing show that the same drop is allowed without"
        return f"among the most sensitive groups; the goal needs it{unless if missing else ''}"
    otherwise = "quantized with the others in floating point" if chosen.method else "lowered with the others in float32"
    return f"among the most sensitive groups; not tried {otherwise}, as {end}"


def _is_needed(name: str, chosen: Trial, trials: Sequence[Trial]) -> bool:
    """Tell whether trials showed that the goal needs a group in floating point.

    One failed with it there, and less sensitive ones quantized; or with it quantized, and it alone of those chosen.
    """
    failed = [set(trial.kept) for trial in trials if not trial.passed and trial.phase != "speed"]
    return any(name in kept or {*chosen.kept} - kept == {name} for kept in failed)


def _with_causes(
    rows: list[dict[str, Any]], forms: Groups, chosen: Trial, impacts: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Add what each group lost in the graph as it was given; and why, if it loses much, or changes the answers much.

    Of a group that was lifted by rescaling and is in few bits, that is the reason in the graph as it was given; of
    others, what is left in the graph that was chosen.
    """
    given, final = ({group.name: group for group in forms[form]} for form in ("given", chosen.form))
    changing = {name for name, energy in impacts.items() if to_decibels(energy) < WEAK_DB}
    changes = dict[str, dict[str, Any]]()
    for name in given.keys() & final.keys():
        was_weak, is_weak = (facts[name].is_weak for facts in (given, final))
        remains = is_weak or name in chosen.kept or not was_weak
        lost = was_weak or is_weak or name in changing
        cause = (final if remains else given)[name].cause if lost else ""
        changes[name] = {"cause": cause, "given_sqnr_db": given[name].sqnr_db}
    return [row | changes.get(row["group"], {}) for row in rows]


def assignment(
    groups: Sequence[GroupFact], chosen: Candidate | Trial, step: PrecisionPass, reasons: Mapping[str, str]
) -> list[dict[str, Any]]:
    """List each group's precision, as the precision pass reads it and reports show it."""
    low = step.precision.partition("+")[0]
    rests = {"fp64": "fp64"}  # which is not rounded to another precision
    return [
        {
            "group": group.name,
            "module": group.module,
            "operator": group.kind,
            "precision": rests.get(group.given, step.remainder) if group.name in chosen.kept or group.reason else low,
            "why": group.reason or reasons.get(group.name, ""),
            "anyway": bool(group.reason),
            "form": chosen.form,
            "signed": chosen.signed,
            "method": chosen.method,
            "corrected": chosen.corrected,
            "sqnr_db": group.sqnr_db,
            "macs": group.macs,
        }
        for group in groups
    ]


def read_form(assignment: Artifact) -> str:
    """Read which form of the float graph an assignment is for."""
    return next((str(entry["form"]) for entry in read_records(assignment)), "given")


class LowerForm(Transform):
    """Bring that form of the graph into another precision which the assignment names."""

    casts: bool = False
    """The engine casts the float graph by itself, where nothing is to stay in float32: then that is handed on."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        chosen = inputs[ASSIGNMENT]
        form = read_form(chosen)
        model, records = find_form(form, inputs)
        kept = (entry for entry in read_records(chosen) if entry["precision"] == "fp32" and not entry["anyway"])
        if self.casts and not any(kept):
            return edit.pass_on(model.path, out, "nothing stays in float32, so the engine casts it by itself")
        effect = run_pass(self.step, model, out, progress, {**records, ASSIGNMENT: chosen})
        if form == "given":
            return effect
        return effect.model_copy(
            update={"notes": (f"channels rescaled: {inputs[form].history[-1].effect}", *effect.notes)}
        )
