"""Assemble ``run.json`` from the outcomes of steps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginesmith.pipeline.execution.events import Outcome, Outcomes
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, Plan
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.results import explain, variant_record
from enginesmith.pipeline.results.run import ModelRecord, Run, StepRecord, StoredArtifact, VariantRecord, deciding_batch
from enginesmith.pipeline.results.variant_record import artifact_of
from enginesmith.pipeline.results.verdicts import judge_compression, judge_precision, select_winner
from enginesmith.pipeline.tasks.base import read_records
from enginesmith.pipeline.tasks.measure import ENVIRONMENT


@dataclass(frozen=True)
class Header:
    """Hold what is known of a run besides its outcomes."""

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
    """Assemble the run as far as it has come.

    ``artifacts`` are the engines' files in the run directory by variant, ``kept`` by variant what else is kept there
    for it: fields of its record.
    """
    latency = _latency(plan, outcomes)
    baseline, *records = (
        variant_record.make_record(variant, plan, outcomes, latency.get(variant.id, ()), artifacts.get(variant.id))
        for variant in (plan.baseline, *plan.variants)
    )
    variants = [
        judge_precision(record, variant.device, asked=variant.lowering is not None)
        for record, variant in zip(records, plan.variants, strict=True)
    ]
    batch = deciding_batch(recipe, (row for rows in latency.values() for row in rows))
    environment = _environment(header, plan, outcomes)
    variants = _remarked(variants, plan, batch, environment)
    variants = [record.model_copy(update=dict((kept or {}).get(record.id, {}))) for record in variants]
    by_id = {record.id: record for record in (baseline, *variants)}
    variants = [judge_compression(record, by_id, recipe.budgets, batch) for record in variants]
    chosen = select_winner([baseline, *variants], recipe.budgets, recipe.objective, batch, recipe.min_sqnr_db)
    return Run(
        name=header.name,
        created=header.created,
        seconds=header.seconds,
        complete=all(step.id in outcomes and outcomes[step.id].status != "unavailable" for step in plan.steps),
        recipe=recipe,
        environment=environment,
        limits=variant_record.read_device_limits(plan, outcomes),
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
    records: Sequence[VariantRecord], plan: Plan, batch: int, environment: Mapping[str, Any]
) -> list[VariantRecord]:
    """Add a remark to each record whose precision was to make it faster."""
    devices = {variant.id: variant.device for variant in plan.variants}
    return [
        record.model_copy(
            update={
                "remarks": explain.explain_gain(
                    record, records, explain.Circumstances(batch, devices[record.id], environment)
                )
            }
        )
        for record in records
    ]


def _step(name: str, outcome: Outcome | None) -> StepRecord:
    if outcome is None:
        return StepRecord(id=name, status="pending", cached=False, seconds=None, effect="not reached")
    if outcome.status == "unavailable":
        return StepRecord(id=name, status="pending", cached=False, seconds=None, effect=outcome.reason)
    if outcome.artifact is None:
        return StepRecord(id=name, status=outcome.status, cached=False, seconds=None, effect=outcome.reason)
    last = outcome.artifact.history[-1]
    effect = outcome.artifact.rejected or last.effect
    return StepRecord(id=name, status=outcome.status, cached=outcome.cached, seconds=last.seconds, effect=effect)


def _model(recipe: Recipe, outcomes: Outcomes) -> ModelRecord:
    model, reference = artifact_of(outcomes, LOAD), artifact_of(outcomes, REFERENCE)
    known = samples.read(reference.folder) if reference else None
    return ModelRecord(
        source=recipe.model,
        sha256=model.sha256 if model else None,
        signature=model.signature if model else None,
        data=known.data if known else None,
        shapes={name: str(range_) for name, range_ in known.ranges.items()} if known else {},
    )


def _latency(plan: Plan, outcomes: Outcomes) -> dict[str, tuple[LatencyRow, ...]]:
    found = artifact_of(outcomes, plan.latency)
    if found is None:
        return {}
    rows: dict[str, list[LatencyRow]] = {}
    for entry in read_records(found):
        rows.setdefault(entry["variant"], []).append(LatencyRow.model_validate(entry["row"]))
    return {name: tuple(values) for name, values in rows.items()}


def _environment(header: Header, plan: Plan, outcomes: Outcomes) -> dict[str, Any]:
    """Describe the machine when latency was measured, which may have been in an earlier run, with all warnings."""
    found = artifact_of(outcomes, plan.latency)
    measured = json.loads((found.folder / ENVIRONMENT).read_bytes()) if found else {}
    environment = {**header.environment, **measured}
    return {**environment, "warnings": [*header.cautions, *environment.get("warnings", ())]}
