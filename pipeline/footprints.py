"""What the engines of models take at a batch size: told by TensorRT's builder, or predicted for ONNX Runtime."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from enginesmith.pipeline import stage_plans, workers
from enginesmith.pipeline.build_stages import MODULES, tensorrt_engine
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import EngineFacts
from enginesmith.pipeline.engines.onnxruntime import OnnxRuntime
from enginesmith.pipeline.engines.trt import sweep
from enginesmith.pipeline.errors import LimitTooSmall, ModelError, UsageError
from enginesmith.pipeline.measure.predictor import Prediction, predict
from enginesmith.pipeline.plan import load_task
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.samples import batch_symbol
from enginesmith.pipeline.settings import Settings
from enginesmith.pipeline.single import finished
from enginesmith.pipeline.source import resolve
from enginesmith.pipeline.steps import LOAD, Step
from enginesmith.pipeline.tasks.base import read_records
from enginesmith.pipeline.tasks.transform import Build
from enginesmith.pipeline.tasks.trial import TrialResult
from enginesmith.pipeline.tensors import Signature, total_bytes

_PREDICTED_WITH = (
    *("onnx", "onnx.checker", "onnx.shape_inference", "onnxruntime", "enginesmith.pipeline.engines.onnxruntime"),
    *("enginesmith.pipeline.tasks.load", "enginesmith.pipeline.tasks.transform"),
)
ARENA_FACTOR = 2.61
"""The most that intermediates took with the memory arena, over what lives at one time: the blocks of the first call
stay, and from the second call on one planned block lies beside them (unet in benchmarks/results/predictor.md)."""


class Footprints(ABC):
    """What engines need for a largest batch, all of them together."""

    source: ClassVar[str]
    """Whose figures these are, and what is not counted."""

    @property
    @abstractmethod
    def tried(self) -> int:
        """How many batch sizes were looked at."""

    @abstractmethod
    def parts(self, batch: int) -> dict[str, int]:
        """Bytes by what they are for: ``weights_bytes``, ``activation_bytes`` and ``io_bytes``."""

    @abstractmethod
    def workspace(self, batch: int) -> tuple[int | None, str]:
        """The smallest limit that all engines build with, and what that means for speed."""

    @abstractmethod
    def lacking(self, batch: int) -> str:
        """What is missing in the figures, and what to do about it; empty if nothing is."""

    def needed(self, batch: int) -> int:
        """Bytes of all engines together."""
        return sum(self.parts(batch).values())


def of(recipe: Recipe, models: Sequence[str], settings: Settings) -> Footprints:
    """Footprints of the recipe's engine.

    Raises:
        UsageError: it names several, or one of which nothing is known without running it.
    """
    if len(recipe.engines) != 1 or engine_class(recipe.engines[0]).consumes != "onnx":
        raise UsageError(
            f"fit knows what one of TensorRT and ONNX Runtime takes, and was given {', '.join(recipe.engines)}",
            "name one: --engine tensorrt_rtx or onnxruntime; others tell when run: enginesmith benchmark --batch sweep",
        )
    if recipe.engines[0] != OnnxRuntime.name:
        return BuiltSizes(recipe, models, settings)
    if recipe.where.kind != "cpu":
        raise UsageError(
            "what ONNX Runtime takes is predicted for the CPU, and another device was named",
            "use --device cpu, or measure it there: enginesmith benchmark MODEL --batch sweep",
        )
    return PredictedSizes(recipe, models, settings)


class BuiltSizes(Footprints):
    """What TensorRT engines need, by building them; each batch is tried once."""

    source = (
        "the builder's figures for weights and activations, and the sizes of inputs and outputs; the CUDA context and "
        "the libraries come on top"
    )

    def __init__(self, recipe: Recipe, models: Sequence[str], settings: Settings) -> None:
        workers.preload_only(MODULES)
        self._settings, self._engine = settings, tensorrt_engine(recipe)
        self._share = recipe.tensorrt_run.share_activation_memory
        self._recipes = [recipe.model_copy(update={"model": model}) for model in models]
        self._found: dict[int, list[tuple[EngineFacts, Signature]]] = {}

    @property
    def tried(self) -> int:
        return len(self._found)

    def lacking(self, batch: int) -> str:
        return ""

    def parts(self, batch: int) -> dict[str, int]:
        found = self._facts(batch)
        activations = [facts.activation_bytes or 0 for facts, _ in found]
        return {
            "weights_bytes": sum(facts.weights_bytes or 0 for facts, _ in found),
            "activation_bytes": max(activations) if self._share else sum(activations),
            "io_bytes": sum(_io_bytes(signature, batch) for _, signature in found),
        }

    def workspace(self, batch: int) -> tuple[int | None, str]:
        if not self._engine.known().workspace_is_a_gate:
            return None, "needs measured engines: optimize with --workspace sweep, then `enginesmith fit RUN`"
        found = zip(self._recipes, self._facts(batch), strict=True)
        limits = [self._smallest(recipe, batch, facts) for recipe, (facts, _) in found]
        return max(limits), f"{self._engine.name} builds the same engine under any limit: it keeps all of the speed"

    def _smallest(self, recipe: Recipe, batch: int, facts: EngineFacts) -> int:
        def attempt(limit: int) -> None:
            limited = recipe.model_copy(update={"workspace": (str(limit),)})
            found = self._trial(limited, batch)[0]
            if not found.builds:
                kind = LimitTooSmall if found.failure == LimitTooSmall.failure else ModelError
                raise kind(found.reason, found.remedy)

        return sweep.smallest(attempt, facts, self._engine.known())

    def _facts(self, batch: int) -> list[tuple[EngineFacts, Signature]]:
        if batch not in self._found:
            found = []
            for recipe in self._recipes:
                result, signature = self._trial(recipe, batch)
                if result.facts is None:
                    raise ModelError(f"no engine for batch {batch}: {result.reason}", result.remedy)
                found.append((result.facts, signature))
            self._found[batch] = found
        return self._found[batch]

    def _trial(self, recipe: Recipe, batch: int) -> tuple[TrialResult, Signature]:
        steps, trials = stage_plans.trial_steps(recipe, batch)
        if len(trials) != 1:
            raise UsageError(f"{len(trials)} targets are named", "fit answers for one: --target sm86")
        outcomes = finished(steps, self._settings, recipe)
        artifact, model = outcomes[next(iter(trials.values()))].artifact, outcomes[LOAD].artifact
        assert artifact is not None
        assert model is not None
        assert model.signature is not None
        _batch_word(recipe.model, model.signature)
        return TrialResult.model_validate(read_records(artifact)[0]), model.signature


class PredictedSizes(Footprints):
    """What ONNX Runtime's engines need on the CPU, predicted from the graphs that they run; those are built once."""

    source = (
        "predicted from the graph that the engine runs, after ONNX Runtime's own plan of its memory; intermediates "
        f"count {ARENA_FACTOR} times, the most that its memory arena took of the zoo's; the libraries come on top"
    )

    def __init__(self, recipe: Recipe, models: Sequence[str], settings: Settings) -> None:
        workers.preload_only(_PREDICTED_WITH)
        self._threads = recipe.where.thread_count
        self._sizes = {name: span.max for name, span in recipe.ranges.items()}
        self._engines = [self._built(recipe.model_copy(update={"model": model}), settings) for model in models]
        self._found: dict[int, list[Prediction]] = {}

    @property
    def tried(self) -> int:
        return len(self._found)

    def parts(self, batch: int) -> dict[str, int]:
        parts = [parts_of(found) for found in self._predictions(batch)]
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    def workspace(self, batch: int) -> tuple[int | None, str]:
        return None, "ONNX Runtime has no limit for its work space"

    def lacking(self, batch: int) -> str:
        found = [sentence for one in self._predictions(batch) for sentence in one.unknown]
        return f"{'; '.join(found)}: simplify the graph first, or less than this fits" if found else ""

    def _predictions(self, batch: int) -> list[Prediction]:
        if batch not in self._found:
            self._found[batch] = [
                predict(path, {**self._sizes, word: batch}, self._threads) for path, word in self._engines
            ]
        return self._found[batch]

    def _built(self, recipe: Recipe, settings: Settings) -> tuple[Path, str]:
        """The graph that is run, and its word for the batch."""
        source = resolve(recipe.model)
        if source.form != "onnx":
            remedy = "export it first: `enginesmith export MODEL -o m.onnx`"
            raise UsageError(f"{recipe.model} is not an ONNX file", remedy)
        build = Build(engine=OnnxRuntime(), device=recipe.where)
        steps = (Step(LOAD, load_task(recipe, source), vital=True), Step(stage_plans.BUILD, build, {"model": LOAD}))
        engine = finished(steps, settings, recipe)[stage_plans.BUILD].artifact
        assert engine is not None
        assert engine.signature is not None
        return engine.path, _batch_word(recipe.model, engine.signature)


def parts_of(found: Prediction) -> dict[str, int]:
    """A prediction by what it is for, with the memory arena.

    Where loading takes more than running, what it takes beyond counts as weights.
    """
    outputs = found.io_bytes - found.input_bytes  # they live all the time, outside of the arena's reuse
    activations = math.ceil((found.activation_bytes - outputs) * ARENA_FACTOR)
    weights = max(found.session_bytes + found.kept_bytes, found.load_bytes - activations - outputs)
    return {"weights_bytes": weights, "activation_bytes": activations, "io_bytes": found.io_bytes}


def _io_bytes(signature: Signature, batch: int) -> int:
    """Inputs and outputs at a batch; dimensions of unknown size count as 1."""
    symbol = batch_symbol(signature)
    specs = (*signature.inputs, *signature.outputs)
    sizes = {dim: batch if dim == symbol else 1 for spec in specs for dim in spec.symbols}
    return total_bytes(specs, sizes)


def _batch_word(model: str, signature: Signature) -> str:
    """The word for the dynamic batch.

    Raises:
        UsageError: there is none.
    """
    found = batch_symbol(signature)
    if found is None:
        raise UsageError(f"{model} has no dynamic batch", "export it with one: --input name:dtype:batch,…")
    return found
