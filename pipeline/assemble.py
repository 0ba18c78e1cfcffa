"""From the outcomes of steps to the document of the run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from enginesmith.pipeline import explain, samples
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.decision import decide
from enginesmith.pipeline.errors import WrongEngine
from enginesmith.pipeline.measure.latency import LatencyRow
from enginesmith.pipeline.measure.limits import DeviceLimits
from enginesmith.pipeline.measure.memory import MemoryRow
from enginesmith.pipeline.measure.profile import Profile
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.roofline import LimitRow, floor
from enginesmith.pipeline.precision.audit.coverage import Coverage
from enginesmith.pipeline.precision.kinds import KINDS
from enginesmith.pipeline.pruning.record import GroupSensitivity
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.recovery.record import read as read_recovery
from enginesmith.pipeline.run import (
    Assignment,
    BuildRecord,
    ModelRecord,
    Run,
    SearchStep,
    StepRecord,
    StoredArtifact,
    VariantRecord,
    deciding_batch,
)
from enginesmith.pipeline.runner import Outcome
from enginesmith.pipeline.select import select
from enginesmith.pipeline.steps import LOAD, REFERENCE, Plan, Step, Variant
from enginesmith.pipeline.tasks.base import read_records
from enginesmith.pipeline.tasks.compare import StageFidelity
from enginesmith.pipeline.tasks.limits import read_limits, read_work
from enginesmith.pipeline.tasks.measure import ENVIRONMENT
from enginesmith.pipeline.tasks.prune import read_facts
from enginesmith.pipeline.variants import device_for

Outcomes = Mapping[str, Outcome]


@dataclass(frozen=True)
class Header:
    """What is known of a run besides its outcomes."""

    name: str
    created: str
    seconds: float
    environment: dict[str, Any]
    cautions: tuple[str, ...] = ()
    """What the run's readers are to be warned of besides the machine."""


def assemble(
    header: Header,
    recipe: Recipe,
    plan: Plan,
    outcomes: Outcomes,
    artifacts: Mapping[str, Path],
    kept: Mapping[str, Mapping[str, StoredArtifact]] | None = None,
) -> Run:
    """The run as far as it has come.

    ``artifacts`` are the engines' files in the run directory by variant, ``kept`` by variant what else is kept there
    for it: fields of its record.
    """
    latency = _latency(plan, outcomes)
    baseline = _record(plan.baseline, plan, outcomes, latency, artifacts)
    variants = [
        explain.hold(
            _record(variant, plan, outcomes, latency, artifacts),
            device_for(recipe, variant.engine),
            asked=variant.lowering is not None,
        )
        for variant in plan.variants
    ]
    batch = deciding_batch(recipe, (row for rows in latency.values() for row in rows))
    environment = _environment(header, plan, outcomes)
    variants = _remarked(variants, plan, recipe, batch, environment)
    variants = [record.model_copy(update=dict((kept or {}).get(record.id, {}))) for record in variants]
    by_id = {record.id: record for record in (baseline, *variants)}
    variants = [decide(record, by_id, recipe.budgets, batch) for record in variants]
    chosen = select([baseline, *variants], recipe.budgets, recipe.objective, batch, recipe.min_sqnr_db)
    return Run(
        name=header.name,
        created=header.created,
        seconds=header.seconds,
        complete=all(step.id in outcomes and outcomes[step.id].status != "lacking" for step in plan.steps),
        recipe=recipe,
        environment=environment,
        limits=_limits(plan, outcomes),
        prune_sensitivity=tuple(
            GroupSensitivity.model_validate(entry) for entry in _entries(outcomes, plan.sensitivity)
        ),
        model=_model(recipe, outcomes),
        steps=tuple(_step(step.id, outcomes.get(step.id)) for step in plan.steps),
        baseline=baseline,
        variants=tuple(variants),
        winner=chosen.winner,
        winner_reason=chosen.reason,
        pareto=chosen.pareto,
        verdicts=chosen.verdicts,
    )


def _remarked(
    records: Sequence[VariantRecord], plan: Plan, recipe: Recipe, batch: int, environment: Mapping[str, Any]
) -> list[VariantRecord]:
    """The records with a remark on each whose precision was to make it faster."""
    devices = {variant.id: device_for(recipe, variant.engine) for variant in plan.variants}
    return [
        record.model_copy(
            update={
                "remarks": explain.remarks(
                    record, records, explain.Circumstances(batch, devices[record.id], environment)
                )
            }
        )
        for record in records
    ]


def _step(name: str, outcome: Outcome | None) -> StepRecord:
    if outcome is None:
        return StepRecord(id=name, status="pending", cached=False, seconds=None, effect="not reached")
    if outcome.status == "lacking":
        return StepRecord(id=name, status="pending", cached=False, seconds=None, effect=outcome.reason)
    if outcome.artifact is None:
        return StepRecord(id=name, status=outcome.status, cached=False, seconds=None, effect=outcome.reason)
    last = outcome.artifact.history[-1]
    effect = outcome.artifact.breach or last.effect
    return StepRecord(id=name, status=outcome.status, cached=outcome.cached, seconds=last.seconds, effect=effect)


def _model(recipe: Recipe, outcomes: Outcomes) -> ModelRecord:
    model, reference = _artifact(outcomes, LOAD), _artifact(outcomes, REFERENCE)
    known = samples.read(reference.folder) if reference else None
    return ModelRecord(
        source=recipe.model,
        sha256=model.sha256 if model else None,
        signature=model.signature if model else None,
        data=known.data if known else None,
        shapes={name: str(range_) for name, range_ in known.ranges.items()} if known else {},
    )


def _record(
    variant: Variant,
    plan: Plan,
    outcomes: Outcomes,
    latency: Mapping[str, tuple[LatencyRow, ...]],
    artifacts: Mapping[str, Path],
) -> VariantRecord:
    made = _artifact(outcomes, variant.artifact)
    rows = latency.get(variant.id, ())
    failure, kind = _failure(variant, plan, outcomes, rows)
    unfinished = _unfinished(variant, plan, outcomes)
    measured = any(row.p50_ms is not None for row in rows)
    there = made and not unfinished and not (variant.lacking and made.kind != "engine")
    status = "failed" if failure else "measured" if measured else "built" if there else "skipped"
    build = _build(variant, made)
    memory, quality = (next(iter(_entries(outcomes, step)), None) for step in (variant.memory, variant.quality))
    reasons = {} if quality else {"quality": _why_missing(variant.quality, outcomes)}
    reasons |= {} if memory else {"memory": _why_missing(variant.memory, outcomes)}
    reasons |= {} if rows else {"latency": _why_missing(plan.latency, outcomes)}
    profile = _entries(outcomes, variant.profile)
    limits = _held_against_limits(variant, plan, outcomes, rows)
    reasons |= {} if profile else {"profile": _why_missing(variant.profile, outcomes)}
    reasons |= {} if limits else {"limits": _why_missing(variant.work and plan.limits, outcomes)}
    audits, missing = _audits(variant, outcomes)
    assignment = tuple(Assignment.model_validate(entry) for entry in _entries(outcomes, variant.assignment))
    return VariantRecord(
        id=variant.id,
        engine=variant.engine.name,
        precision=variant.precision,
        prune=variant.prune,
        sparsity=variant.sparsity,
        dense=variant.dense,
        workspace_limit_bytes=build.workspace_limit_bytes if build and variant.workspace else None,
        target=variant.target,
        status=status,
        reason=failure or unfinished or variant.lacking or _partial_failure(rows),
        failure=kind or None,
        artifact=_stored(made, artifacts.get(variant.id)),
        history=made.history if made else (),
        fidelity=tuple(
            StageFidelity.model_validate(entry) for check in variant.verified for entry in _entries(outcomes, check)
        ),
        latency=rows,
        quality=Quality.model_validate(quality) if quality else None,
        memory=MemoryRow.model_validate(memory) if memory else None,
        limits=limits,
        profile=tuple(Profile.model_validate(entry) for entry in profile),
        build=build,
        pruning=tuple(read_facts(one) for one in _artifacts(outcomes, variant.pruned)),
        recovery=tuple(read_recovery(one.folder) for one in _artifacts(outcomes, variant.recovered)),
        **audits,
        assignment=assignment,
        search=_search(variant, outcomes, len(assignment) or None),
        synthetic_calibration=_synthetic(variant, outcomes),
        reasons=reasons | missing,
    )


def _limits(plan: Plan, outcomes: Outcomes) -> DeviceLimits | None:
    found = _artifact(outcomes, plan.limits)
    return read_limits(found) if found else None


def _held_against_limits(
    variant: Variant, plan: Plan, outcomes: Outcomes, rows: tuple[LatencyRow, ...]
) -> tuple[LimitRow, ...]:
    limits, counted = _limits(plan, outcomes), _artifact(outcomes, variant.work)
    if limits is None or counted is None:
        return ()
    measured = {row.batch: row.median_ms.median if row.median_ms else row.p50_ms for row in rows}
    return tuple(floor(work, limits, measured.get(batch)) for batch, work in read_work(counted).items())


def _audits(variant: Variant, outcomes: Outcomes) -> tuple[dict[str, Coverage], dict[str, str]]:
    """What the graph asks for and what the engine runs, and for what is not known the reason."""
    found: dict[str, Coverage] = {}
    reasons: dict[str, str] = {}
    for index, name in enumerate(("coverage", "engine_coverage")):
        step = variant.audits[index] if index < len(variant.audits) else None
        entry = next(iter(_entries(outcomes, step)), None)
        if entry:
            found[name] = Coverage.model_validate(entry)
        elif step:
            reasons[name] = _why_missing(step, outcomes)
        elif variant.engine.consumes == "torch":
            reasons[name] = f"{variant.engine.name} runs the module itself"
        elif variant.audits:
            reasons[name] = f"{variant.engine.name} does not show its graph; build.layers counts its kernels"
        else:
            reasons[name] = "not asked for"
    return found, reasons


def _search(variant: Variant, outcomes: Outcomes, groups: int | None) -> tuple[SearchStep, ...]:
    """The trials, which the record of the last step that was done holds all of."""
    done = [step for step in variant.search if _artifact(outcomes, step)]
    return tuple(
        SearchStep.model_validate(
            {
                **entry,
                "step": index,
                "kept": len(entry["kept"]),
                "quantised": None if groups is None else groups - len(entry["kept"]),
            }
        )
        for index, entry in enumerate(_entries(outcomes, done[-1] if done else None), 1)
    )


def _synthetic(variant: Variant, outcomes: Outcomes) -> bool:
    """Whether ranges that are part of the graph come from made-up data."""
    found = _artifact(outcomes, variant.calibration)
    if found is None or variant.lowering is None or not KINDS[variant.lowering].calibrated:
        return False
    return _made_up(found.path)


@cache
def _made_up(ranges: Path) -> bool:
    """What stands in the store stays as it is, and the document may be large."""
    return bool(json.loads(ranges.read_bytes())["provenance"]["synthetic"])


def _stored(made: Artifact | None, path: Path | None) -> StoredArtifact | None:
    return StoredArtifact(path=str(path), sha256=made.sha256, bytes=made.bytes) if made and path else None


def _build(variant: Variant, made: Artifact | None) -> BuildRecord | None:
    if made is None or made.kind != "engine":
        return None
    last = made.history[-1]
    facts = variant.engine.facts(made).model_dump()
    missing = [name for name, value in facts.items() if value is None]
    return BuildRecord(
        seconds=last.seconds,
        host_peak_bytes=last.host_peak_bytes,
        engine_bytes=made.bytes,
        **facts,
        reasons=dict.fromkeys(missing, f"{variant.engine.name} does not report it"),
    )


def _latency(plan: Plan, outcomes: Outcomes) -> dict[str, tuple[LatencyRow, ...]]:
    found = _artifact(outcomes, plan.latency)
    if found is None:
        return {}
    rows: dict[str, list[LatencyRow]] = {}
    for entry in read_records(found):
        rows.setdefault(entry["variant"], []).append(LatencyRow.model_validate(entry["row"]))
    return {name: tuple(values) for name, values in rows.items()}


def _environment(header: Header, plan: Plan, outcomes: Outcomes) -> dict[str, Any]:
    """The machine when latency was measured, which may have been in an earlier run; all warnings."""
    found = _artifact(outcomes, plan.latency)
    measured = json.loads((found.folder / ENVIRONMENT).read_bytes()) if found else {}
    environment = {**header.environment, **measured}
    return {**environment, "warnings": [*header.cautions, *environment.get("warnings", ())]}


def _chain(step_id: str, by_id: Mapping[str, Step]) -> list[str]:
    """The step and all it stands on, the first ones first."""
    before = [name for parent in by_id[step_id].needs.values() for name in _chain(parent, by_id)]
    return [*dict.fromkeys(before), step_id]


def _own_steps(variant: Variant, plan: Plan) -> list[str]:
    by_id = {step.id: step for step in plan.steps}
    ends = [variant.artifact, *variant.verified, *(name for name in (variant.quality, variant.memory) if name)]
    return list(dict.fromkeys(name for end in ends for name in _chain(end, by_id)))


def _failure(variant: Variant, plan: Plan, outcomes: Outcomes, rows: tuple[LatencyRow, ...]) -> tuple[str, str]:
    """Why the variant cannot be used, if it cannot, and the class of the failure.

    It is the first step of its own that failed, or was not good enough.
    """
    for name in _own_steps(variant, plan):
        outcome = outcomes.get(name)
        if outcome and outcome.status == "failed":
            return f"{name}: {outcome.reason}", outcome.error.failure if outcome.error else ""
        if outcome and outcome.artifact and outcome.artifact.breach:
            return outcome.artifact.breach, WrongEngine.failure
    return (_partial_failure(rows), "") if rows and all(row.failure for row in rows) else ("", "")


def _partial_failure(rows: tuple[LatencyRow, ...]) -> str:
    failed = [row for row in rows if row.failure]
    return f"latency at batch {failed[0].batch}: {failed[0].failure}" if failed else ""


def _unfinished(variant: Variant, plan: Plan, outcomes: Outcomes) -> str:
    missing = [name for name in _own_steps(variant, plan) if name not in outcomes]
    return f"not reached: {missing[0]}" if missing else ""


def _why_missing(step: str | None, outcomes: Outcomes) -> str:
    if step is None:
        return "not asked for"
    outcome = outcomes.get(step)
    if outcome is None:
        return f"not reached: {step}"
    return outcome.reason or (outcome.artifact.history[-1].effect if outcome.artifact else outcome.status)


def _artifact(outcomes: Outcomes, step: str | None) -> Artifact | None:
    outcome = outcomes.get(step) if step else None
    return outcome.artifact if outcome else None


def _artifacts(outcomes: Outcomes, steps: Sequence[str]) -> list[Artifact]:
    return [found for step in steps if (found := _artifact(outcomes, step))]


def _entries(outcomes: Outcomes, step: str | None) -> list[dict[str, Any]]:
    found = _artifact(outcomes, step)
    return read_records(found) if found else []


def as_json(run: Run) -> str:
    """The run as ``run.json`` has it."""
    return json.dumps(json.loads(run.model_dump_json(by_alias=True)), indent=1)
