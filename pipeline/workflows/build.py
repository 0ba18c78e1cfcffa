"""Engines alone, for the command line: build one, or try for which targets one can be built."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from enginesmith.pipeline.artifact import MANIFEST_NAMES, Artifact, HistoryEntry, files_below
from enginesmith.pipeline.engines import DEFAULT_BUILD, engine_class, read_file
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.errors import ModelError, StepError, UsageError, WrongEngine, storage_errors
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.planning import single_stages
from enginesmith.pipeline.planning.plan import LOAD
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.system import worker
from enginesmith.pipeline.tasks.base import read_models
from enginesmith.pipeline.tasks.build import TrialResult
from enginesmith.pipeline.tasks.load import SHAPES
from enginesmith.pipeline.workflows.stages import run_steps, try_steps

_NOT_WRITTEN = "nothing was written; export the model again, or build it for another target"
MODULES = ("enginesmith.pipeline.tasks.load", "enginesmith.pipeline.tasks.build")
"""All that workers of these commands need besides the engine: importing PyTorch takes longer than most builds."""


class EngineBuilt(BaseModel, frozen=True):
    """The files that ``build`` wrote."""

    summary: str
    files: tuple[str, ...]
    history: tuple[HistoryEntry, ...]
    manifest: dict[str, Any]
    """The engine's record of itself."""


class TargetChecked(BaseModel, frozen=True):
    """A trial of a build for one target; if it fails, the class of the failure, its reason and its remedy."""

    target: str
    builds: bool
    failure: str = ""
    reason: str = ""
    remedy: str = ""
    notes: tuple[str, ...] = ()


def build(recipe: Recipe, output: Path, settings: Settings, refit: str | None = None) -> EngineBuilt:
    """Build one engine from an ONNX file, or put its weights into the engine ``refit``.

    The manifest and the builder's log are written beside it.

    Raises:
        EnginesmithError: it cannot be built; nothing is written then.
    """
    engine = file_engine(recipe)
    if output.suffix != engine.file_suffix:
        wanted = output.with_suffix(engine.file_suffix)
        raise UsageError(f"the output {str(output)!r} is no {engine.file_suffix} file", f"call it {wanted}")
    worker.preload_only((*engine.modules, *MODULES))
    resolved = resolve_recipe(recipe)
    steps = single_stages.refit_steps(resolved, refit) if refit else single_stages.build_steps(resolved)
    engine_artifact = run_steps(steps, settings, recipe)[single_stages.BUILD].artifact
    assert engine_artifact is not None
    if engine_artifact.rejected:
        raise WrongEngine(engine_artifact.rejected, _NOT_WRITTEN)
    with storage_errors(f"the output {output}"):
        files = _save_as(engine_artifact, output)
    last = engine_artifact.history[-1]
    summary = f"wrote {files[0]}: {last.effect}" + "".join(f"\n  note: {note}" for note in last.notes)
    record = read_file(output).record
    return EngineBuilt(summary=summary, files=tuple(files), history=engine_artifact.history, manifest=record)


def _save_as(artifact: Artifact, output: Path) -> list[str]:
    """Copy an engine with what lies beside it; the engine last, as the other files are useless without it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    files = files_below(artifact.folder, skip=MANIFEST_NAMES)
    names = {
        name.removeprefix(artifact.path.name): name for name in reversed(files) if name.startswith(artifact.path.name)
    }
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
        for suffix, name in names.items():
            shutil.copyfile(artifact.folder / name, Path(scratch, output.name + suffix))
        for suffix in names:
            Path(scratch, output.name + suffix).replace(output.with_name(output.name + suffix))
    return [str(output.with_name(output.name + suffix)) for suffix in reversed(names)]


def check(recipe: Recipe, settings: Settings) -> tuple[TargetChecked, ...]:
    """Try a build for each target of the recipe, all that the flavour has where none is named.

    The answer is that of a real build, because it is one; the engine is thrown away.
    """
    engine = file_engine(recipe)
    worker.preload_only((*engine.modules, *MODULES))
    if not recipe.targets:
        recipe = recipe.model_copy(update={"targets": engine.check_targets()})
    steps, trials = single_stages.trial_steps(resolve_recipe(recipe))
    outcomes = try_steps(steps, settings, recipe)
    for name in (LOAD, SHAPES):
        if (error := outcomes[name].error) is not None:
            raise error
    checked = []
    for name, step in trials.items():
        target, artifact, error = name or "the device here", outcomes[step].artifact, outcomes[step].error
        if artifact is not None:
            result = read_models(artifact, TrialResult)[0]
            fields = result.model_dump(include={"builds", "failure", "reason", "notes"})
            checked.append(TargetChecked(target=target, remedy=result.remedy_of_trial, **fields))
        elif isinstance(error, StepError):
            fields = {"failure": error.failure, "reason": error.message, "remedy": error.remedy}
            checked.append(TargetChecked(target=target, builds=False, **fields))
        else:
            raise error or ModelError(outcomes[step].reason)
    return tuple(checked)


def file_engine(recipe: Recipe) -> type[Engine]:
    """Look up the one engine that a recipe names, which has a file of its own.

    Raises:
        UsageError: it names others, or several.
    """
    engine = engine_class(recipe.engines[0])
    if len(recipe.engines) != 1 or not engine.file_suffix:
        raise UsageError(f"the engines are {', '.join(recipe.engines)}", f"name one: --engine {DEFAULT_BUILD}")
    return engine
