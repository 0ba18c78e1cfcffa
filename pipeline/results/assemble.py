"""Assemble ``run.json`` from the outcomes of steps: numbers, and reasons for those that are missing."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from enginesmith.calibration.ranges import FILE as RANGES_FILE
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import TUNING
from enginesmith.pipeline.errors import (
    DROPPED,
    LATE,
    NO_TIME,
    NO_TIME_TO_MEASURE,
    StepCrashed,
    UnsupportedGraph,
    WrongEngine,
)
from enginesmith.pipeline.execution.events import Outcome, Outcomes
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx.model_file import ASKED
from enginesmith.pipeline.frameworks.records import Coverage
from enginesmith.pipeline.frameworks.source import content_digest
from enginesmith.pipeline.measure.prosecution.finding import Prosecution
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.roofline import floor
from enginesmith.pipeline.measure.rows import (
    DeviceLimits,
    LatencyRow,
    LimitRow,
    MemoryRow,
    Profile,
    RaceRow,
    StageFidelity,
    Tuning,
)
from enginesmith.pipeline.passes.finetune.options import read as read_recovery
from enginesmith.pipeline.passes.quantize import precision
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, Plan, StepRef, Variant
from enginesmith.pipeline.planning.single_stages import EXPORT
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.results.explain import explain_gain, narrowest_type
from enginesmith.pipeline.results.run import (
    Assignment,
    BuildRecord,
    ModelRecord,
    Run,
    SearchStep,
    StepRecord,
    StoredArtifact,
    VariantRecord,
    Workaround,
    deciding_batch,
)
from enginesmith.pipeline.results.verdicts import find_best_reference, judge_compression, judge_precision, select_winner
from enginesmith.pipeline.tasks.base import read_models, read_records
from enginesmith.pipeline.tasks.measure import ENVIRONMENT, read_limits, read_work
from enginesmith.pipeline.tasks.prosecute import Prosecute
from enginesmith.pipeline.tasks.prune import read_facts
from enginesmith.pipeline.tasks.race import RACE, STAY
from enginesmith.pipeline.tasks.tune import ENGINE
from enginesmith.pipeline.tensors import Signature, TensorSpec
from enginesmith.pipeline.units import group_values

_NOTING = (REFERENCE, LOAD, EXPORT)
"""Steps whose notes are about the given model and its samples."""

# Look up a step's artifact, records or failure reason.


def artifact_of(outcomes: Outcomes, step: str | None) -> Artifact | None:
    """Return a step's artifact if it is done; ``step`` is None if it was not asked for."""
    outcome = outcomes.get(step) if step else None
    return outcome.artifact if outcome else None


def find_engine(variant: Variant, plan: Plan, outcomes: Outcomes) -> Artifact | None:
    """Find what is loaded of a variant, if something is: the engine whose options are tuned, or that has none to tune.

    Where its answers were found wrong before it was tuned, or lose too much, it is the engine as it was built.
    """
    own = artifact_of(outcomes, variant.artifact)
    built = artifact_of(outcomes, plan.input_of(variant.artifact, ENGINE))
    if own or not built:
        return own
    inaccurate = any(row.dropped and row.lap == 0 for row in _read_race(variant, outcomes))
    return built if inaccurate or explain_end(variant, plan, outcomes).failure else None


def _read_race(variant: Variant, outcomes: Outcomes) -> tuple[RaceRow, ...]:
    return tuple(row for row in read_models(artifact_of(outcomes, RACE), RaceRow) if row.variant == variant.id)


def records_of(outcomes: Outcomes, step: str | None) -> list[dict[str, Any]]:
    """Read a step's records; none where it left nothing."""
    artifact = artifact_of(outcomes, step)
    return read_records(artifact) if artifact else []


def why_missing(step: str | None, outcomes: Outcomes) -> str:
    """Explain for people why a step left nothing."""
    if step is None:
        return "not asked for"
    outcome = outcomes.get(step)
    if outcome is None:
        return f"not reached: {step}"
    return outcome.reason or (outcome.artifact.history[-1].effect if outcome.artifact else outcome.status)


def make_record(
    variant: Variant, plan: Plan, outcomes: Outcomes, rows: tuple[LatencyRow, ...], file: Path | None
) -> VariantRecord:
    """Make a variant's record as far as it is known, of its latencies and the engine's file in the run directory."""
    own = find_engine(variant, plan, outcomes)
    failure, kind, unfinished, failed_step = explain_end(variant, plan, outcomes, rows)
    measured = any(row.p50_ms is not None for row in rows)
    there = own and not unfinished and not (variant.unavailable and own.kind != "engine")
    status = "failed" if failure else "measured" if measured else "built" if there else "skipped"
    tuned = variant.artifact.kind == "tune" and artifact_of(outcomes, variant.artifact) is not None
    build, measurements = _build(variant, own, tuned=tuned), _measurements(variant, plan, outcomes, rows)
    audits, reasons = _audits(variant, outcomes)
    assignment = _read_assignment(variant, plan, outcomes)
    race = _read_race(variant, outcomes)
    if dropped := next((row.dropped for row in race if row.dropped), ""):  # steps shared with others tell of the first
        unfinished = unfinished and f"{DROPPED}{dropped}"
    late = LATE.get(unfinished)
    searched = artifact_of(outcomes, variant.assignment)
    if unfinished == NO_TIME and (build or race):
        unfinished, late = NO_TIME_TO_MEASURE, "no time to measure"
    elif unfinished == NO_TIME and searched and searched.rejected:
        unfinished = f"the time was over before its search was; so far, {searched.rejected}"
    reason = failure or unfinished or variant.unavailable or _partial_failure(rows)
    missing = _explain_missing(variant, plan, outcomes, measurements, reason)
    reasons = missing | reasons | _explain_cut(variant, outcomes)
    pruned, recovered = (
        [artifact for step in steps if (artifact := artifact_of(outcomes, step))]
        for steps in (variant.pruned, variant.recovered)
    )
    return VariantRecord(
        id=variant.id,
        engine=variant.engine.name,
        precision=variant.precision,
        quantizer=variant.name.quantizer,
        prune=variant.prune,
        sparsity=variant.sparsity,
        dense=variant.dense,
        workspace_limit_bytes=build.workspace_limit_bytes if build and variant.workspace else None,
        target=variant.target,
        cuda_graphs=variant.name.graphs,
        rounds_to_tf32=variant.engine.rounds_to_tf32,
        reference=variant.reference,
        status=status,
        reason=reason,
        failure=kind or None,
        failed_step=failed_step or None,
        late=late,
        artifact=StoredArtifact(path=str(file), sha256=own.sha256, bytes=own.bytes) if own and file else None,
        history=own.history if own else (),
        fidelity=tuple(
            fidelity
            for check in variant.verified
            if check != variant.prosecuted
            for fidelity in read_models(artifact_of(outcomes, check), StageFidelity)
        ),
        **measurements,
        build=build,
        tuning=_read_tuning(own) if own else None,
        race=race,
        untried=late is not None,
        pruning=tuple(map(read_facts, pruned)),
        recovery=tuple(read_recovery(artifact.folder) for artifact in recovered),
        **audits,
        assignment=assignment,
        search=_search(variant, outcomes, assignment),
        prosecution=next(iter(read_models(artifact_of(outcomes, variant.prosecuted), Prosecution)), None),
        synthetic_calibration=_has_synthetic_ranges(variant, outcomes),
        reasons=reasons,
        late_fields={name: LATE[why] for name, why in reasons.items() if why in LATE},
    )


def _measurements(variant: Variant, plan: Plan, outcomes: Outcomes, rows: tuple[LatencyRow, ...]) -> dict[str, Any]:
    """Read what was measured of a variant, by the record's fields."""
    return {
        "latency": rows,
        "quality": next(iter(read_models(artifact_of(outcomes, variant.quality), Quality)), None),
        "memory": next(iter(read_models(artifact_of(outcomes, variant.memory), MemoryRow)), None),
        "limits": _compare_with_limits(variant, plan, outcomes, rows),
        "profile": tuple(read_models(artifact_of(outcomes, variant.profile), Profile)),
    }


def _explain_missing(
    variant: Variant, plan: Plan, outcomes: Outcomes, measurements: Mapping[str, Any], ended: str
) -> dict[str, str]:
    """Explain by the step that was to make them why measurements are missing.

    Of a step that measured others, ``ended`` tells why this variant was not among them.
    """
    made_by = {
        "quality": variant.quality,
        "memory": variant.memory,
        "latency": _latency_step(variant, plan),
        "profile": variant.profile,
        "limits": variant.work and plan.limits,
    }
    return {
        name: (ended if artifact_of(outcomes, step) else "") or why_missing(step, outcomes)
        for name, step in made_by.items()
        if not measurements[name]
    }


def read_device_limits(plan: Plan, outcomes: Outcomes) -> DeviceLimits | None:
    """Read what the device can do at best; None if that was not measured."""
    artifact = artifact_of(outcomes, plan.limits)
    return read_limits(artifact) if artifact else None


def _compare_with_limits(
    variant: Variant, plan: Plan, outcomes: Outcomes, rows: tuple[LatencyRow, ...]
) -> tuple[LimitRow, ...]:
    limits, counted = read_device_limits(plan, outcomes), artifact_of(outcomes, variant.work)
    if limits is None or counted is None:
        return ()
    measured = {row.batch: row.p50_ms for row in rows}
    return tuple(floor(work, limits, measured.get(batch)) for batch, work in read_work(counted).items())


def _audits(variant: Variant, outcomes: Outcomes) -> tuple[dict[str, Coverage], dict[str, str]]:
    """Read what the graph asks for and what the engine runs, and the reason for what is not known."""
    audits: dict[str, Coverage] = {}
    reasons: dict[str, str] = {}
    for index, name in enumerate(("coverage", "engine_coverage")):
        step = variant.audits[index] if index < len(variant.audits) else None
        if coverages := read_models(artifact_of(outcomes, step), Coverage):
            audits[name] = coverages[0]
        elif step:
            reasons[name] = why_missing(step, outcomes)
        elif variant.engine.runs_module():
            reasons[name] = f"{variant.engine.name} runs the module itself"
        elif variant.engine.consumes == "torch":
            reasons[name] = f"{variant.engine.name} is made from the module, without an ONNX graph"
        elif variant.audits:
            reasons[name] = f"{variant.engine.name} does not show its graph; build.layers counts its kernels"
        else:
            reasons[name] = "not asked for"
    return audits, reasons


def _search(variant: Variant, outcomes: Outcomes, assignment: Sequence[Assignment]) -> tuple[SearchStep, ...]:
    """Read all trials from the last step of the search that was done.

    Groups that stayed in float in all of them could not be quantized: products of two activations, say.
    """
    done = [step for step in variant.search if artifact_of(outcomes, step)]
    steps = []
    entries = records_of(outcomes, done[-1] if done else None)
    kept_groups, low = {name for entry in entries for name in entry["kept"]}, narrowest_type(variant.precision)
    able = sum(group.group in kept_groups or narrowest_type(group.precision) == low for group in assignment)
    for index, entry in enumerate(entries, 1):
        kept_count = len(entry["kept"])
        quantized = able - kept_count if assignment else None
        steps.append(SearchStep.model_validate({**entry, "step": index, "kept": kept_count, "quantized": quantized}))
    return tuple(steps)


def _explain_cut(variant: Variant, outcomes: Outcomes) -> dict[str, str]:
    """Explain why a search has fewer trials than it would have made, if so."""
    cut = _find_cut(variant, outcomes)
    return {"search": cut.failure or cut.unfinished} if cut else {}


def _has_synthetic_ranges(variant: Variant, outcomes: Outcomes) -> bool:
    """Tell whether ranges of synthetic data are part of a variant's graph."""
    calibrated = variant.lowering is not None and KINDS[variant.lowering].calibrated
    ranges = artifact_of(outcomes, variant.calibration) if calibrated else None
    beside = ranges is not None and ranges.kind == "onnx"  # of a graph whose maker found its ranges itself
    return ranges is not None and _are_synthetic(ranges.folder / RANGES_FILE if beside else ranges.path)


@cache
def _are_synthetic(ranges: Path) -> bool:
    """Tell whether ranges come from synthetic data; remembered, as the document may be large and never changes."""
    return bool(json.loads(ranges.read_bytes())["provenance"]["synthetic"])


def _read_assignment(variant: Variant, plan: Plan, outcomes: Outcomes) -> tuple[Assignment, ...]:
    """Read the precision of each group: as a search chose it, or as a lowered graph has it if nodes were named."""
    if variant.assignment or variant.lowering is None or not KINDS[variant.lowering].lowered:
        return tuple(read_models(artifact_of(outcomes, variant.assignment), Assignment))
    built = (step.inputs.get("model") for step in plan.steps if step.id == variant.artifact)
    graph = artifact_of(outcomes, next(built, None))
    if graph is None or not (graph.folder / precision.FILE).is_file():
        return ()
    groups = tuple(Assignment.model_validate(entry) for entry in precision.read(graph.folder))
    return groups if any(group.why == ASKED for group in groups) else ()


def _read_tuning(own: Artifact) -> Tuning | None:
    file = own.folder / TUNING
    return Tuning.model_validate_json(file.read_bytes()) if file.is_file() else None


def _build(variant: Variant, own: Artifact | None, *, tuned: bool) -> BuildRecord | None:
    if own is None or own.kind != "engine":
        return None
    last = own.history[-2 if tuned else -1]
    facts = variant.engine.facts(own).model_dump()
    missing = [name for name, value in facts.items() if value is None]
    return BuildRecord(
        seconds=last.seconds,
        host_peak_bytes=last.host_peak_bytes,
        engine_bytes=own.bytes,
        **facts,
        reasons=dict.fromkeys(missing, f"{variant.engine.name} does not report it"),
    )


class End(NamedTuple):
    """Tell why a variant cannot be used, and what was not reached; all empty if it can."""

    failure: str = ""
    kind: str = ""
    """The class of the failure."""
    unfinished: str = ""
    step: str = ""
    """The step that failed."""


def explain_end(variant: Variant, plan: Plan, outcomes: Outcomes, rows: tuple[LatencyRow, ...] = ()) -> End:
    """Explain why a variant cannot be used, by the first step of its own that failed, or was not good enough.

    Without one, it is the step that was to measure it beside others.
    """
    ends = [variant.artifact, *variant.verified, *(name for name in (variant.quality, variant.memory) if name)]
    own = plan.leading_to(ends)
    missing = next((f"not reached: {name}" for name in own if name not in outcomes), "")
    for name in own:
        outcome = outcomes.get(name)
        if outcome and outcome.status == "failed":
            if name == variant.prosecuted and _is_passed_over(name, plan, outcome):
                continue
            return _end_by_failure(name, outcome, missing)
        if outcome and outcome.status == "skipped":
            if rows and outcome.reason in LATE:  # what is left is not needed to use it
                break
            checks = (outcomes.get(check) for check in variant.verified if check.kind != STAY)
            wrong = next(
                (each.artifact.rejected for each in checks if each and each.artifact and each.artifact.rejected), ""
            )
            return End(wrong, WrongEngine.failure, missing) if wrong else End(unfinished=outcome.reason)
        if outcome and outcome.artifact and outcome.artifact.rejected:
            rejected = outcome.artifact.rejected
            if name == variant.assignment and (cut := _find_cut(variant, outcomes)):
                return cut
            if name.kind in (STAY, "sensitivity") or name in variant.recovered or rejected.startswith(DROPPED):
                return End(unfinished=rejected)
            return End(rejected, WrongEngine.failure, missing)
    latency = None if variant.unavailable else _latency_step(variant, plan)
    if latency and (measuring := outcomes.get(latency)) and measuring.status == "failed":
        return _end_by_failure(latency, measuring, missing)
    if rows and all(row.late for row in rows):
        return End(unfinished=NO_TIME)
    return End(_partial_failure(rows) if rows and all(row.failure for row in rows) else "", "", missing)


def _latency_step(variant: Variant, plan: Plan) -> StepRef | None:
    return plan.references_latency if variant.reference else plan.latency


def _end_by_failure(name: StepRef, outcome: Outcome, unfinished: str = "") -> End:
    kind = outcome.error.failure if outcome.error else ""
    return End(f"{name}: {outcome.reason}", kind, unfinished, name)


def _is_passed_over(prosecuted: StepRef, plan: Plan, outcome: Outcome) -> bool:
    """Tell whether a prosecution that nobody asked for had no result; a crash is the engine's fault."""
    (task,) = (step.task for step in plan.steps if step.id == prosecuted)
    required = isinstance(task, Prosecute) and task.required
    return not required and not isinstance(outcome.error, StepCrashed)


def _find_cut(variant: Variant, outcomes: Outcomes) -> End | None:
    """Find what ended a search before it was over, as :func:`explain_end` gives it; None where nothing did."""
    for name in variant.search:
        outcome = outcomes.get(name)
        if outcome and outcome.status == "failed":
            return _end_by_failure(name, outcome)
        if outcome and outcome.reason in LATE:
            return End(unfinished=outcome.reason)
        if outcome and outcome.artifact and outcome.artifact.incomplete:
            return End(unfinished=NO_TIME)
    return None


def _partial_failure(rows: tuple[LatencyRow, ...]) -> str:
    first = next((row for row in rows if row.failure), None)
    return f"latency at batch {first.batch}: {NO_TIME_TO_MEASURE if first.late else first.failure}" if first else ""


# The whole document.


@dataclass(frozen=True)
class Header:
    """Facts of a run besides its outcomes."""

    name: str
    created: str
    seconds: float
    environment: dict[str, Any]
    cautions: tuple[str, ...] = ()
    """Warnings for the run's readers besides those of the machine."""
    workarounds: tuple[Workaround, ...] = ()


def assemble(header: Header, recipe: Recipe, plan: Plan, outcomes: Outcomes, artifacts: Mapping[str, Path]) -> Run:
    """Assemble the run as far as it has come; ``artifacts`` are the engines' files in the run directory by variant."""
    latency = _latencies(plan, outcomes)
    baseline, *records = (
        make_record(variant, plan, outcomes, tuple(latency.get(variant.id, ())), artifacts.get(variant.id))
        for variant in (plan.baseline, *plan.variants)
    )
    judged = [
        judge_precision(record, variant.device, asked=variant.precision != plan.baseline.precision)
        for record, variant in zip(records, plan.variants, strict=True)
    ]
    judged = settle_untried(judged)
    batch = deciding_batch(recipe, (row for rows in latency.values() for row in rows))
    # the machine when latency was measured, which may have been in an earlier run
    measured = artifact_of(outcomes, plan.latency)
    environment = header.environment | (json.loads((measured.folder / ENVIRONMENT).read_bytes()) if measured else {})
    environment["warnings"] = [*header.cautions, *environment.get("warnings", ())]
    environment["cautions"] = [*header.cautions]
    variants = []
    for record, variant in zip(judged, plan.variants, strict=True):
        cautions = record.build.cautions if record.build else ()
        gain = explain_gain(record, judged, batch, variant.device, environment)
        variants.append(record.model_copy(update={"remarks": (*cautions, *gain)}))
    by_id = {record.id: record for record in (baseline, *variants)}
    variants = [judge_compression(record, by_id, recipe.budgets, batch) for record in variants]
    rules = recipe.budgets, recipe.objective, batch, recipe.min_sqnr_db
    chosen = select_winner([baseline, *variants], *rules, baseline_named=baseline.id in recipe.engines)
    return Run(
        name=header.name,
        created=header.created,
        seconds=header.seconds,
        complete=all(step.id in outcomes and outcomes[step.id].status != "unavailable" for step in plan.steps),
        recipe=recipe,
        workarounds=header.workarounds,
        device=plan.baseline.device,
        environment=environment,
        limits=read_device_limits(plan, outcomes),
        model=_model(recipe, plan, outcomes),
        steps=tuple(_step(step.id, outcomes.get(step.id)) for step in plan.steps),
        baseline=baseline,
        variants=tuple(variants),
        winner=chosen.winner,
        winner_reason=chosen.reason,
        no_winner=chosen.no_winner,
        best_reference=find_best_reference([baseline, *variants], chosen.winner, batch),
        pareto=chosen.pareto,
        verdicts=chosen.verdicts,
    )


def settle_untried(records: Sequence[VariantRecord]) -> list[VariantRecord]:
    """Say of variants for which no time was left that more would not help, where their engine does not take the model.

    An operator that the engine lacks is in each form of the graph, as the one in float is what the others are made of.
    """
    refusing = {
        (record.engine, record.target): record.id
        for record in records
        if record.failure == UnsupportedGraph.failure and record.precision == "fp32"
    }
    settled = []
    for record in records:
        refused = refusing.get((record.engine, record.target))
        if refused and record.untried and record.late != LATE[NO_TIME_TO_MEASURE]:
            reason = f"its engine does not take the graph: see {refused}"
            record = record.model_copy(update={"untried": False, "late": None, "reason": reason})
        settled.append(record)
    return settled


def _latencies(plan: Plan, outcomes: Outcomes) -> dict[str, list[LatencyRow]]:
    """Read latencies by variant; eager's are those that were measured beside the variants that were asked for."""
    beside = (row for row in records_of(outcomes, plan.references_latency) if row["variant"] != plan.baseline.id)
    entries = (*records_of(outcomes, plan.latency), *beside)
    return group_values((entry["variant"], LatencyRow.model_validate(entry["row"])) for entry in entries)


def _step(name: StepRef, outcome: Outcome | None) -> StepRecord:
    last = outcome.artifact.history[-1] if outcome and outcome.artifact else None
    effect = "not reached"
    if outcome:
        effect = (outcome.artifact.rejected if outcome.artifact else outcome.reason) or (last.effect if last else "")
    return StepRecord(
        id=name,
        kind=name.kind,
        variant=name.variant,
        status="pending" if outcome is None or outcome.status == "unavailable" else outcome.status,
        cached=last is not None and outcome is not None and outcome.cached,
        seconds=last.seconds if last else None,
        effect=effect,
        reached=outcome is not None,
        late=LATE.get(effect),
    )


def _add_from_graph(signature: Signature, outcomes: Outcomes, known: samples.Samples | None) -> Signature:
    """Add what only the graph shows: outputs whose rows depend on values, how many they may be, and indices."""
    signatures = [
        known.limit_sets(outcome.artifact.signature) if known else outcome.artifact.signature
        for outcome in outcomes.values()
        if outcome.artifact and outcome.artifact.signature
    ]
    unordered = next((each.unordered for each in signatures if each.unordered), {})
    tables = next((each.tables for each in signatures if each.tables), {})
    outputs, inputs = ({spec.name for spec in side} for side in (signature.outputs, signature.inputs))
    return signature.model_copy(
        update={
            "outputs": tuple(_open_row_counts(spec, signatures) for spec in signature.outputs),
            "unordered": {name: kind for name, kind in unordered.items() if name in outputs},
            "tables": {name: rows for name, rows in tables.items() if name in inputs},
        }
    )


def _open_row_counts(spec: TensorSpec, signatures: Iterable[Signature]) -> TensorSpec:
    """Open the sizes of an output that a graph leaves open, if its rows are chosen by values.

    The example that a module was run with may reach the most rows that it returns. Of other outputs, an open size says
    no more than that the exporter's shape inference does not know it.
    """
    for each in signatures:
        other = next((output for output in each.outputs if output.name == spec.name), spec)
        if spec.name in each.unordered and len(other.shape) == len(spec.shape):
            pairs = zip(spec.shape, other.shape, strict=True)
            shape = tuple(opened if isinstance(own, int) and isinstance(opened, str) else own for own, opened in pairs)
            spec = spec.model_copy(update={"shape": shape})
    return spec


def _model(recipe: Recipe, plan: Plan, outcomes: Outcomes) -> ModelRecord:
    model, reference = artifact_of(outcomes, LOAD), artifact_of(outcomes, REFERENCE)
    known = samples.read(reference.folder) if reference else None
    return ModelRecord(
        source=recipe.model,
        sha256=model.sha256 if model else None,
        content=content_digest(model.folder) if model else "",
        signature=_add_from_graph(model.signature, outcomes, known) if model and model.signature else None,
        data=known.data if known else None,
        parts=known.parts if known else {},
        interacting_samples=bool(known and known.interacting),
        shapes={name: str(range_) for name, range_ in known.ranges.items()} if known else {},
        notes=_list_model_notes(plan, outcomes),
    )


def _list_model_notes(plan: Plan, outcomes: Outcomes) -> tuple[str, ...]:
    """List what the steps that make and run the models noted, each note once and the most important first."""
    pruned = [(step, f"pruned to {variant.prune}: ") for variant in plan.variants for step in variant.pruned]
    made = ((artifact_of(outcomes, step), words) for step, words in (*pruned, *((each, "") for each in _NOTING)))
    entries = ((artifact.history[-1], words) for artifact, words in made if artifact and artifact.history)
    return tuple(dict.fromkeys(f"{words}{note}" for entry, words in entries for note in entry.notes))
