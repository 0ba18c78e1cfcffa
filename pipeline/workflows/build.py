"""Engines alone, for the command line: build one, or try for which targets one can be built."""

import shutil
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.artifact import Artifact, HistoryEntry
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.tensorrt import manifest
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT
from enginesmith.pipeline.errors import ModelError, StepError, UsageError, WrongEngine, storage_errors
from enginesmith.pipeline.execution.scheduler import Outcome
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.planning import stages
from enginesmith.pipeline.planning.plan import LOAD
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.system import worker
from enginesmith.pipeline.tasks.base import read_records
from enginesmith.pipeline.tasks.build import TrialResult
from enginesmith.pipeline.tasks.load import SHAPES
from enginesmith.pipeline.workflows.stages import run_steps, try_steps

_NOT_WRITTEN = "nothing was written; export the model again, or build it for another target"
MODULES = (
    *("onnx", "onnx.checker", "onnx.shape_inference", "tensorrt_rtx", "enginesmith.pipeline.engines.tensorrt.engine"),
    *("enginesmith.pipeline.tasks.load", "enginesmith.pipeline.tasks.load", "enginesmith.pipeline.tasks.build"),
)
"""All that workers of these commands need: importing PyTorch takes longer than most builds."""


class EngineBuilt(BaseModel):
    """What ``build`` wrote."""

    model_config = ConfigDict(frozen=True)

    summary: str
    files: tuple[str, ...]
    history: tuple[HistoryEntry, ...]
    manifest: manifest.EngineManifest


class TargetChecked(BaseModel):
    """Whether a graph builds for one target; if not, the class of the failure, why, and what to do."""

    model_config = ConfigDict(frozen=True)

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
    if output.suffix != ".engine":
        raise UsageError(f"the output {str(output)!r} is no .engine file", f"call it {output.with_suffix('.engine')}")
    worker.preload_only(MODULES)
    steps = stages.refit_steps(recipe, refit) if refit else stages.build_steps(recipe)
    made = run_steps(steps, settings, recipe)[stages.BUILD].artifact
    assert made is not None
    if made.rejected:
        raise WrongEngine(made.rejected, _NOT_WRITTEN)
    with storage_errors(f"the output {output}"):
        files = _save_as(made, output)
    last = made.history[-1]
    notes = "".join(f"\n  note: {note}" for note in last.notes)
    return EngineBuilt(
        summary=f"wrote {files[0]}: {last.effect}{notes}",
        files=tuple(files),
        history=made.history,
        manifest=manifest.read(output),
    )


def _save_as(made: Artifact, output: Path) -> list[str]:
    """Copy an engine with what lies beside it; the engine last, as it is what makes the rest of use."""
    output.parent.mkdir(parents=True, exist_ok=True)
    names = {suffix: made.path.name + suffix for suffix in (manifest.SUFFIX, ".log", "")}
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
        for suffix, name in names.items():
            shutil.copyfile(made.folder / name, Path(scratch, output.name + suffix))
        for suffix in names:
            Path(scratch, output.name + suffix).replace(output.with_name(output.name + suffix))
    return [str(output.with_name(output.name + suffix)) for suffix in ("", manifest.SUFFIX, ".log")]


def check(recipe: Recipe, settings: Settings) -> tuple[TargetChecked, ...]:
    """Try a build for each target of the recipe, all that the flavour has where none is named.

    The answer is that of a real build, because it is one; the engine is thrown away.
    """
    worker.preload_only(MODULES)
    if not recipe.targets:
        known = tensorrt_engine(recipe).known().targets
        recipe = recipe.model_copy(update={"targets": known})
    steps, trials = stages.trial_steps(recipe)
    outcomes = try_steps(steps, settings, recipe)
    for name in (LOAD, SHAPES):
        if (error := outcomes[name].error) is not None:
            raise error
    return tuple(_checked(target or "the device here", outcomes[step]) for target, step in trials.items())


def tensorrt_engine(recipe: Recipe) -> type[TensorRT]:
    """The one TensorRT engine that a recipe names.

    Raises:
        UsageError: it names others, or several.
    """
    engine = engine_class(recipe.engines[0])
    if len(recipe.engines) != 1 or not issubclass(engine, TensorRT):
        raise UsageError(f"the engines are {', '.join(recipe.engines)}", "name one: --engine tensorrt_rtx")
    return engine


def _checked(target: str, outcome: Outcome) -> TargetChecked:
    if outcome.artifact is None:
        error = outcome.error
        if not isinstance(error, StepError):
            raise error or ModelError(outcome.reason)
        return TargetChecked(
            target=target, builds=False, failure=error.failure, reason=error.message, remedy=error.remedy
        )
    record = TrialResult.model_validate(read_records(outcome.artifact)[0])
    return TargetChecked(target=target, **record.model_dump(exclude={"facts"}))
