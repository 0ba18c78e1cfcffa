"""Plan the lane's variants of a model: eager in all its forms, compiled, CUDA graphs, ONNX Runtime and TensorRT."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT
from enginesmith.pipeline.engines.torch.eager import Compiled, Eager
from enginesmith.pipeline.execution.events import Outcome
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, Step, Variant, VariantName, verify_step
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.variants import device_for, resolve_recipe
from enginesmith.pipeline.recipe import Recipe, make
from enginesmith.pipeline.tasks.verify import Verify

OF_MODULES: Mapping[str, Engine] = {
    "eager-tf32": Eager(tf32=True),
    "eager-fp16": Eager(dtype="float16"),
    "eager-bf16": Eager(dtype="bfloat16"),
    "eager-graphs": Eager(cuda_graphs=True),
    "eager-fp16-graphs": Eager(dtype="float16", cuda_graphs=True),
    "compiled": Compiled(),
    "compiled-fp16": Compiled(dtype="float16"),
    "compiled-fp16-graphs": Compiled(dtype="float16", cuda_graphs=True),
}
"""Beside the baseline ``eager``, which is float32 as torch ships it."""
FLAVOURS = ("tensorrt", "tensorrt_rtx")


@dataclass(frozen=True)
class Field:
    """All variants of a model, the baseline first, and the steps that make and check them."""

    recipe: Recipe
    steps: tuple[Step, ...]
    variants: tuple[Variant, ...]
    refused: Mapping[str, str]
    """Engine → why it cannot be had."""


def field(values: Mapping[str, Any], only: Sequence[str] = ()) -> Field:
    """Plan the variants of a recipe's model; ``only`` keeps the variants whose ids start so, and the baseline."""
    where = make(dict(values)).where
    refused = {name: found.reason for name in FLAVOURS if not (found := engine_class(name).available(where)).ok}
    engines = ["onnxruntime", *(name for name in FLAVOURS if name not in refused)]
    nothing = {"latency": False, "memory": False, "limits": False, "references": False}
    own = {"engines": engines, "measure": nothing, "precisions": ["fp32", "fp16"]}
    recipe = make({**values, **own, "cuda_graphs": "off", "prosecute_seconds": 0})
    made = plan(resolve_recipe(recipe))
    checks = {step.id: step for step in made.steps if isinstance(step.task, Verify)}
    variants, steps = [made.baseline], list(made.steps)
    for variant in made.variants:
        for found, more in _forms(recipe, variant, checks):
            variants.append(found)
            steps += more
    for name, engine in OF_MODULES.items():
        found, more = _checked(
            recipe, Variant(VariantName(name), engine, engine.arithmetic, LOAD, device_for(recipe, engine)), checks
        )
        variants.append(found)
        steps += more
    kept = [one for one in variants if one is made.baseline or not only or one.id.startswith(tuple(only))]
    return Field(recipe, _needed(steps, kept), tuple(kept), refused)


def _forms(recipe: Recipe, variant: Variant, checks: Mapping[str, Step]) -> list[tuple[Variant, list[Step]]]:
    """A variant, and what else its engine file can be run as."""
    found: list[tuple[Variant, list[Step]]] = [(variant, [])]
    engine = variant.engine
    if isinstance(engine, TensorRT):
        graphs = engine.model_copy(update={"cuda_graphs": True})
        found.append(_checked(recipe, replace(variant, name=replace(variant.name, graphs=True), engine=graphs), checks))
    if isinstance(engine, OnnxRuntime) and variant.precision == "fp32":
        tf32 = engine.model_copy(update={"tf32": True})
        found.append(
            _checked(
                recipe, replace(variant, name=VariantName(engine.name, "tf32"), precision="tf32", engine=tf32), checks
            )
        )
    return found


def _checked(recipe: Recipe, variant: Variant, checks: Mapping[str, Step]) -> tuple[Variant, list[Step]]:
    """The variant with a check of its own, by the thresholds of the one that it was made from."""
    before = checks[variant.verified[-1]].task if variant.verified else None
    tf32 = variant.precision == "tf32"
    row = before.precision if isinstance(before, Verify) and not tf32 else variant.engine.arithmetic
    check = verify_step(recipe, variant.name, variant.artifact, variant.engine, variant.device, row, stage="engine")
    return replace(variant, verified=(*variant.verified[:-1], check.id)), [check]


def _needed(steps: Sequence[Step], variants: Sequence[Variant]) -> tuple[Step, ...]:
    """The steps that variants stand on, in their order."""
    by_id = {step.id: step for step in steps}
    needed: set[str] = set()
    waiting = [REFERENCE, *(name for one in variants for name in (one.artifact, *one.verified))]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += by_id[name].inputs.values()
    return tuple(step for name, step in by_id.items() if name in needed)


def why_not(variant: Variant, outcomes: Mapping[str, Outcome]) -> str:
    """Why a variant cannot be measured; empty where its engine is made and answers as eager does."""
    for name in (variant.artifact, *variant.verified):
        outcome = outcomes.get(name)
        if outcome is None:
            return f"{name} was not reached"
        if not outcome.good:
            rejected = outcome.artifact.rejected if outcome.artifact else ""
            return str(outcome.error) if outcome.error else rejected or outcome.reason
    return ""
