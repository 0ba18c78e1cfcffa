"""Which variants a recipe asks for: engines by their options, targets and workspace limits."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from enginesmith.pipeline import onnx_file
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Device, Engine
from enginesmith.pipeline.engines.cuda import cuda_device
from enginesmith.pipeline.engines.eager import DTYPES, Eager
from enginesmith.pipeline.engines.tensorrt import TensorRT
from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.precision.kinds import Name
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.source import Source, resolve
from enginesmith.pipeline.steps import LOAD, Variant

MAX = "max"
SWEPT = ("min", "2of5", "3of5", "4of5", "5of5")
"""Points of a workspace sweep as they are part of ids: the smallest that builds, and four above it on a log scale."""


def variants_of(recipe: Recipe, engines: Sequence[str], *, here: bool = True) -> Iterator[Variant]:
    """Variants as far as their ids and engines go, in the order of the recipe.

    Where they have to run ``here``, they say what this machine lacks for that.
    """
    taken: set[str] = set()
    for name in engines:
        engine = engine_class(name)
        if issubclass(engine, Eager):
            yield from _of_module(recipe, engine)
            continue
        for lowering, label in _precisions(recipe):
            for variant in _of_graph(recipe, engine, label, here):
                if variant.id not in taken:  # a file may be in a precision already that is asked for besides
                    taken.add(variant.id)
                    yield replace(variant, lowering=lowering)


def _of_module(recipe: Recipe, engine: type[Eager]) -> Iterator[Variant]:
    """The module in each precision that it can be cast to; plain eager is the baseline, and no variant."""
    for name in [name for name in recipe.precisions if name in DTYPES] or ["fp32"]:
        chosen = engine(dtype=DTYPES[name], tf32=recipe.eager.tf32, cuda_graphs=recipe.eager.cuda_graphs)
        if chosen != Eager():
            suffix = "-graphs" if chosen.cuda_graphs else ""
            yield Variant(f"{engine.name}-{chosen.arithmetic}{suffix}", chosen, name, LOAD)


def _precisions(recipe: Recipe) -> list[tuple[Name | None, str]]:
    """What the graph is turned into (None: it is taken as it is), and what the variant is called after."""
    given = given_precision(resolve(recipe.model))
    return [(None, given) if name == "fp32" else (name, name) for name in recipe.precisions]


def given_precision(source: Source) -> str:
    """The precision that a model comes in."""
    return onnx_file.precision(Path(source.target)) if source.form == "onnx" else "fp32"


def _of_graph(recipe: Recipe, engine: type[Engine], precision: str, here: bool) -> Iterator[Variant]:
    if issubclass(engine, TensorRT):
        yield from _tensorrt_variants(recipe, engine, precision, here)
        return
    for level in recipe.graph_optimization:
        suffix = "" if level == "all" else f"-{level}"
        chosen = engine.model_validate({"graph_optimization": level, "tf32": recipe.onnxruntime.tf32})
        name = f"{engine.name}-{precision}{suffix}"
        yield Variant(name, chosen, precision, f"build-{name}")


def _tensorrt_variants(recipe: Recipe, engine: type[TensorRT], precision: str, here: bool) -> Iterator[Variant]:
    """One for each target and workspace limit; a sweep stands for several limits."""
    ahead = bool(engine.known().targets)
    for target in (recipe.targets if ahead else ()) or (None,):
        where = f"-{target}" if target else ""
        for word, limit in _limits(recipe):
            name = f"{engine.name}-{precision}" + (f"-ws{word}" if word else "") + where
            chosen = engine(workspace_bytes=limit, target=target, options=recipe.tensorrt, run=recipe.tensorrt_run)
            variant = Variant(name, chosen, precision, f"build-{name}", workspace=word or None, target=target)
            with contextlib.suppress(MissingCapability):  # this variant's own failure, once it is built
                chosen.targets(cuda_device(recipe.where.index))
            found = chosen.runnable(device_for(recipe, chosen)) if here and engine.built_elsewhere else None
            yield variant if found is None or found.ok else replace(variant, unavailable=found.reason)


def _limits(recipe: Recipe) -> list[tuple[str, int | None]]:
    """Workspace limits as they are written in ids, and in bytes; those that only a build can tell are None."""
    found: dict[str, int | None] = {}
    for text, limit in zip(recipe.workspace, recipe.workspace_limits, strict=True):
        if limit == "sweep":
            found |= {MAX: None, **dict.fromkeys(SWEPT, None)}
        elif limit is None or limit not in found.values():
            found[text] = limit
    return list(found.items()) or [("", None)]


def device_for(recipe: Recipe, engine: Engine) -> Device:
    """Where an engine runs: the recipe's device, or cuda for engines that run only there."""
    where = recipe.where
    return where if where.kind in engine.kinds else Device(kind=engine.kinds[0], threads=recipe.threads)
