"""Prosecute an engine: a file against its model, or a variant of a run."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel

from enginesmith.pipeline.artifact import copy_folder, replace_folder
from enginesmith.pipeline.errors import ModelError, UsageError, storage_errors
from enginesmith.pipeline.execution.events import Event
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.measure.prosecution.evidence import FINDING
from enginesmith.pipeline.measure.prosecution.finding import Prosecution
from enginesmith.pipeline.planning.plan import Step, StepRef
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.prosecution import PROSECUTE, prosecute_variant_steps
from enginesmith.pipeline.planning.single_stages import prosecute_file_steps
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.tasks.base import read_models
from enginesmith.pipeline.tasks.prosecute import EVIDENCE
from enginesmith.pipeline.workflows.run_directory import work_where_begun
from enginesmith.pipeline.workflows.stages import try_steps


class ProsecutionResult(BaseModel, frozen=True):
    """Report a prosecution."""

    subject: str
    prosecution: Prosecution
    evidence: str | None = None
    """Folder of the evidence if there is some, as the caller named it."""


def prosecute_file(
    recipe: Recipe, file: Path, precision: str | None, seconds: float, out: Path, settings: Settings
) -> ProsecutionResult:
    """Look for inputs on which a file is wrong, beside the recipe's model.

    Raises:
        EnginesmithError: the model or the file cannot be loaded.
    """
    steps = prosecute_file_steps(resolve_recipe(recipe), str(file), precision, seconds)
    return _run(str(file), steps, recipe, out, settings)


def prosecute_variant(
    run: Path, variant: str | None, seconds: float, out: Path, settings: Settings
) -> ProsecutionResult:
    """Look for inputs on which a variant of a run is wrong; by default the winner.

    Raises:
        UsageError: there is no run, no such variant, or its model is not where it was.
    """
    run_record = runs.read(run)
    chosen = variant or run_record.winner
    named, out = out, out.absolute()
    with work_where_begun(run_record):
        resolved = resolve_recipe(run_record.recipe)
        planned = plan(resolved, kept=[each.id for each in run_record.variants])
        able = {each.id: each for each in planned.variants}
        if chosen is None or chosen not in able:
            reason = f"{run} has no variant {chosen!r}" if chosen else f"{run} has no winner"
            if chosen == planned.baseline.id:
                which = "" if variant else "the winner "
                reason = f"{which}{chosen} is the model as it is given, which engines are compared with"
            raise UsageError(reason, f"name one of {', '.join(able)}")
        late = [step.id for step in run_record.steps if step.late == "no time"]
        steps = prosecute_variant_steps(resolved, planned, able[chosen], seconds, late)
        stored = next((record.artifact for record in run_record.variants if record.id == chosen), None)
        engine = {able[chosen].artifact: stored.sha256} if stored else {}
        result = _run(chosen, steps, run_record.recipe, out, settings, engine)
    return result.model_copy(update={"evidence": str(named) if result.evidence else None})


def _check_output(out: Path) -> None:
    """Check that nothing but an earlier finding would be replaced, and that a folder can be made there.

    Raises:
        UsageError: there is something else, or no folder can be made.
    """
    empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not empty and not (out / FINDING).is_file():
        raise UsageError(f"{out} is there already, and is no earlier finding", "choose another --output")
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        reason = "cannot be written" if above.is_dir() else "is no folder"
        raise UsageError(f"{above} {reason}, and {out} is to be made there", "choose another --output")


def _run(
    subject: str,
    steps: Sequence[Step],
    recipe: Recipe,
    out: Path,
    settings: Settings,
    engine: Mapping[StepRef, str] = MappingProxyType({}),
) -> ProsecutionResult:
    """Carry out the steps; ``engine`` has the digest of the run's engine by the step that made it."""
    _check_output(out)
    outcomes = try_steps(steps, settings, recipe)
    for name, digest in engine.items():
        if (artifact := outcomes[name].artifact) and artifact.sha256 != digest:
            message = f"{subject} was made again, and differs from the engine of the run, which the store does not have"
            settings.listener(Event("note", steps[0], message))
    end = outcomes[PROSECUTE]
    if (artifact := end.artifact) is None:
        errors = (outcome.error for outcome in outcomes.values() if outcome.reason == end.reason)
        unusable = ModelError(f"{subject} cannot be prosecuted: {end.reason}", "name another variant or file")
        raise next(filter(None, errors), unusable)
    (prosecution,) = read_models(artifact, Prosecution)
    if prosecution.finding is None:
        if (out / FINDING).is_file():  # of an earlier engine
            with storage_errors(f"the output {out}"):
                shutil.rmtree(out)
        return ProsecutionResult(subject=subject, prosecution=prosecution)
    with storage_errors(f"the output {out}"), replace_folder(out) as whole:
        copy_folder(artifact.folder / EVIDENCE, whole)
    return ProsecutionResult(subject=subject, prosecution=prosecution, evidence=str(out))
