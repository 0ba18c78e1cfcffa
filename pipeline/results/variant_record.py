"""Make the record of one variant from its steps' artifacts: its numbers, and reasons for those that are missing."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import WrongEngine
from enginesmith.pipeline.execution.events import Outcomes
from enginesmith.pipeline.frameworks.records import Coverage
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.roofline import floor
from enginesmith.pipeline.measure.rows import DeviceLimits, LatencyRow, LimitRow, MemoryRow, Profile, StageFidelity
from enginesmith.pipeline.passes.finetune.options import read as read_recovery
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.planning.plan import Plan, StepRef, Variant
from enginesmith.pipeline.results.run import Assignment, BuildRecord, SearchStep, StoredArtifact, VariantRecord
from enginesmith.pipeline.tasks.base import read_records
from enginesmith.pipeline.tasks.measure import read_limits, read_work
from enginesmith.pipeline.tasks.prune import read_facts

# Look up a step's artifact, records or failure reason.


def artifact_of(outcomes: Outcomes, step: str | None) -> Artifact | None:
    """Return a step's artifact if it is done; ``step`` is None if it was not asked for."""
    outcome = outcomes.get(step) if step else None
    return outcome.artifact if outcome else None


def artifacts_of(outcomes: Outcomes, steps: Sequence[str]) -> list[Artifact]:
    """Return the artifacts of those steps that are done."""
    return [found for step in steps if (found := artifact_of(outcomes, step))]


def records_of(outcomes: Outcomes, step: str | None) -> list[dict[str, Any]]:
    """Read a step's records; none where it left nothing."""
    found = artifact_of(outcomes, step)
    return read_records(found) if found else []


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
    own = artifact_of(outcomes, variant.artifact)
    failure, kind = _failure(variant, plan, outcomes, rows)
    unfinished = _unfinished(variant, plan, outcomes)
    measured = any(row.p50_ms is not None for row in rows)
    there = own and not unfinished and not (variant.unavailable and own.kind != "engine")
    status = "failed" if failure else "measured" if measured else "built" if there else "skipped"
    build = _build(variant, own)
    memory, quality = (next(iter(records_of(outcomes, step)), None) for step in (variant.memory, variant.quality))
    reasons = {} if quality else {"quality": why_missing(variant.quality, outcomes)}
    reasons |= {} if memory else {"memory": why_missing(variant.memory, outcomes)}
    reasons |= {} if rows else {"latency": why_missing(plan.latency, outcomes)}
    profile = records_of(outcomes, variant.profile)
    limits = _held_against_limits(variant, plan, outcomes, rows)
    reasons |= {} if profile else {"profile": why_missing(variant.profile, outcomes)}
    reasons |= {} if limits else {"limits": why_missing(variant.work and plan.limits, outcomes)}
    audits, missing = _audits(variant, outcomes)
    assignment = tuple(Assignment.model_validate(entry) for entry in records_of(outcomes, variant.assignment))
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
        reason=failure or unfinished or variant.unavailable or _partial_failure(rows),
        failure=kind or None,
        artifact=_stored(own, file),
        history=own.history if own else (),
        fidelity=tuple(
            StageFidelity.model_validate(entry) for check in variant.verified for entry in records_of(outcomes, check)
        ),
        latency=rows,
        quality=Quality.model_validate(quality) if quality else None,
        memory=MemoryRow.model_validate(memory) if memory else None,
        limits=limits,
        profile=tuple(Profile.model_validate(entry) for entry in profile),
        build=build,
        pruning=tuple(read_facts(one) for one in artifacts_of(outcomes, variant.pruned)),
        recovery=tuple(read_recovery(one.folder) for one in artifacts_of(outcomes, variant.recovered)),
        **audits,
        assignment=assignment,
        search=_search(variant, outcomes, len(assignment) or None),
        synthetic_calibration=_synthetic(variant, outcomes),
        reasons=reasons | missing,
    )


def read_device_limits(plan: Plan, outcomes: Outcomes) -> DeviceLimits | None:
    """Read what the device can do at best; None if that was not measured."""
    found = artifact_of(outcomes, plan.limits)
    return read_limits(found) if found else None


def _held_against_limits(
    variant: Variant, plan: Plan, outcomes: Outcomes, rows: tuple[LatencyRow, ...]
) -> tuple[LimitRow, ...]:
    limits, counted = read_device_limits(plan, outcomes), artifact_of(outcomes, variant.work)
    if limits is None or counted is None:
        return ()
    measured = {row.batch: row.median_ms.median if row.median_ms else row.p50_ms for row in rows}
    return tuple(floor(work, limits, measured.get(batch)) for batch, work in read_work(counted).items())


def _audits(variant: Variant, outcomes: Outcomes) -> tuple[dict[str, Coverage], dict[str, str]]:
    """Read what the graph asks for and what the engine runs, and the reason for what is not known."""
    found: dict[str, Coverage] = {}
    reasons: dict[str, str] = {}
    for index, name in enumerate(("coverage", "engine_coverage")):
        step = variant.audits[index] if index < len(variant.audits) else None
        entry = next(iter(records_of(outcomes, step)), None)
        if entry:
            found[name] = Coverage.model_validate(entry)
        elif step:
            reasons[name] = why_missing(step, outcomes)
        elif variant.engine.consumes == "torch":
            reasons[name] = f"{variant.engine.name} runs the module itself"
        elif variant.audits:
            reasons[name] = f"{variant.engine.name} does not show its graph; build.layers counts its kernels"
        else:
            reasons[name] = "not asked for"
    return found, reasons


def _search(variant: Variant, outcomes: Outcomes, groups: int | None) -> tuple[SearchStep, ...]:
    """Read all trials from the last step of the search that was done."""
    done = [step for step in variant.search if artifact_of(outcomes, step)]
    return tuple(
        SearchStep.model_validate(
            {
                **entry,
                "step": index,
                "kept": len(entry["kept"]),
                "quantised": None if groups is None else groups - len(entry["kept"]),
            }
        )
        for index, entry in enumerate(records_of(outcomes, done[-1] if done else None), 1)
    )


def _synthetic(variant: Variant, outcomes: Outcomes) -> bool:
    """Tell whether ranges that are part of the graph come from synthetic data."""
    found = artifact_of(outcomes, variant.calibration)
    if found is None or variant.lowering is None or not KINDS[variant.lowering].calibrated:
        return False
    return _made_up(found.path)


@cache
def _made_up(ranges: Path) -> bool:
    """Tell whether ranges are synthetic; remembered, as the document may be large and never changes."""
    return bool(json.loads(ranges.read_bytes())["provenance"]["synthetic"])


def _stored(own: Artifact | None, path: Path | None) -> StoredArtifact | None:
    return StoredArtifact(path=str(path), sha256=own.sha256, bytes=own.bytes) if own and path else None


def _build(variant: Variant, own: Artifact | None) -> BuildRecord | None:
    if own is None or own.kind != "engine":
        return None
    last = own.history[-1]
    facts = variant.engine.facts(own).model_dump()
    missing = [name for name, value in facts.items() if value is None]
    return BuildRecord(
        seconds=last.seconds,
        host_peak_bytes=last.host_peak_bytes,
        engine_bytes=own.bytes,
        **facts,
        reasons=dict.fromkeys(missing, f"{variant.engine.name} does not report it"),
    )


def _own_steps(variant: Variant, plan: Plan) -> list[StepRef]:
    ends = [variant.artifact, *variant.verified, *(name for name in (variant.quality, variant.memory) if name)]
    return plan.leading_to(ends)


def _failure(variant: Variant, plan: Plan, outcomes: Outcomes, rows: tuple[LatencyRow, ...]) -> tuple[str, str]:
    """Explain why a variant cannot be used, with the class of the failure; empty if it can.

    It is the first step of its own that failed, or was not good enough.
    """
    for name in _own_steps(variant, plan):
        outcome = outcomes.get(name)
        if outcome and outcome.status == "failed":
            return f"{name}: {outcome.reason}", outcome.error.failure if outcome.error else ""
        if outcome and outcome.artifact and outcome.artifact.rejected:
            return outcome.artifact.rejected, WrongEngine.failure
    return (_partial_failure(rows), "") if rows and all(row.failure for row in rows) else ("", "")


def _partial_failure(rows: tuple[LatencyRow, ...]) -> str:
    failed = [row for row in rows if row.failure]
    return f"latency at batch {failed[0].batch}: {failed[0].failure}" if failed else ""


def _unfinished(variant: Variant, plan: Plan, outcomes: Outcomes) -> str:
    missing = [name for name in _own_steps(variant, plan) if name not in outcomes]
    return f"not reached: {missing[0]}" if missing else ""
