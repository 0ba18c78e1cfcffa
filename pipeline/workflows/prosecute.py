"""Prosecute an engine: a file against its model, or a variant of a run."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel

from enginesmith.pipeline.artifact import Artifact, copy_folder, has_files, replace_folder
from enginesmith.pipeline.errors import ModelError, UsageError, storage_errors
from enginesmith.pipeline.execution.events import Event, Outcome, Outcomes
from enginesmith.pipeline.execution.executor import StepCache
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.measure.prosecution.finding import Prosecution
from enginesmith.pipeline.measure.prosecution.issue import FINDING
from enginesmith.pipeline.planning.plan import LOAD, Step, StepRef
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.prosecution import PROSECUTE, list_makers, prosecute_variant_steps
from enginesmith.pipeline.planning.single_stages import prosecute_file_steps
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.run import StoredArtifact, VariantRecord
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.tasks.base import read_models
from enginesmith.pipeline.tasks.prosecute import EVIDENCE
from enginesmith.pipeline.workflows.run_directory import work_where_begun
from enginesmith.pipeline.workflows.stages import reload_model, try_steps


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
        UsageError: there is no run, no such variant, or its model is not where it was, or has changed since then: the
            engine would be accused of that.
    """
    run_record = runs.read(run)
    chosen = variant or run_record.winner
    named, out, folder = out, out.absolute(), run.absolute()
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
        model = reload_model(run_record, run, settings, "bring it back as it was, or run optimize again")
        record = next((record for record in run_record.variants if record.id == chosen), None)
        engine = dict[StepRef, str]()
        given = dict[str, Outcome]({LOAD: Outcome(LOAD, "done", model, cached=True)})
        if record is not None and record.artifact is not None:
            engine[able[chosen].artifact] = record.artifact.sha256
            if not _is_stored(steps, able[chosen].artifact, record.artifact, store := settings.open_store()):
                recalled = _recall(folder, record, list_makers(planned, able[chosen]), store)
                given.update(recalled.items())
                steps = prosecute_variant_steps(resolved, planned, able[chosen], seconds, late, recalled)
        result = _run(chosen, steps, run_record.recipe, out, settings, engine, given)
    return result.model_copy(update={"evidence": str(named) if result.evidence else None})


def _is_stored(steps: Sequence[Step], ref: StepRef, engine: StoredArtifact, store: Store) -> bool:
    """Tell whether steps lead to a run's engine, and the store has all that they lead through."""
    known: dict[StepRef, Artifact] = {}
    for step in steps:
        sources = {role: known.get(source) for role, source in (*step.inputs.items(), *step.optional_inputs.items())}
        inputs = {role: artifact for role, artifact in sources.items() if artifact is not None}
        if step.inputs.keys() <= inputs.keys() and (artifact := StepCache(step, inputs, store).lookup()):
            known[step.id] = artifact
    return ref in known and known[ref].sha256 == engine.sha256


def _recall(folder: Path, record: VariantRecord, makers: Sequence[StepRef], store: Store) -> dict[StepRef, Outcome]:
    """Recall the engine of a run and the graphs that it was made from, out of the run's folder and the store.

    Empty where the engine is in neither.
    """
    if len(makers) != len(record.history):
        return {}
    recalled: dict[StepRef, Outcome] = {}
    in_folder = {makers[-1]: record.artifact, makers[-2]: record.graph} if len(makers) > 1 else {}
    for ref, entry in [*zip(makers, record.history, strict=True)][:0:-1]:  # not the model, which is loaded as it is
        stored = in_folder.get(ref)
        artifact = _read_artifact(folder / stored.path, stored.sha256) if stored else None
        artifact = artifact or store.find(entry)
        if artifact is not None and (stored is None or artifact.sha256 == stored.sha256):
            recalled[ref] = Outcome(ref, "done", artifact, cached=True)
        elif ref == makers[-1]:
            return {}
    return recalled


def _read_artifact(path: Path, sha256: str) -> Artifact | None:
    """Read an artifact in the folder of a run; None if it is not there any more as it was made."""
    manifest = path.parent / "manifest.json"
    if not has_files(path.parent, sha256) or not manifest.is_file():
        return None
    record = {**json.loads(manifest.read_text(encoding="utf-8")), "path": path}
    return Artifact.model_validate({name: record[name] for name in Artifact.model_fields if name in record})


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
    given: Outcomes = MappingProxyType({}),
) -> ProsecutionResult:
    """Carry out the steps but those that are given; ``engine`` has the digest of the run's engine by its step."""
    _check_output(out)
    outcomes = try_steps(steps, settings, recipe, given)
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
