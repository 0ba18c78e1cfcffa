"""Which variants a recipe asks for: engines by their options, targets and workspace limits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.source import Source, resolve
from enginesmith.pipeline.passes.quantize.precisions import Name
from enginesmith.pipeline.planning.plan import LOAD, Variant
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.system.device import Device


def variants_of(recipe: Recipe, engines: Sequence[str], *, here: bool = True) -> Iterator[Variant]:
    """Variants as far as their ids and engines go, in the order of the recipe.

    Where they have to run ``here``, they say what this machine lacks for that.
    """
    taken: set[str] = set()
    for name in engines:
        engine = engine_class(name)
        if engine.consumes == "torch":
            yield from _of_module(recipe, engine)
            continue
        for lowering, label in _precisions(recipe):
            for variant in _of_graph(recipe, engine, label, here):
                if variant.id not in taken:  # a file may be in a precision already that is asked for besides
                    taken.add(variant.id)
                    yield replace(variant, lowering=lowering)


def _of_module(recipe: Recipe, engine: type[Engine]) -> Iterator[Variant]:
    """The module in each precision that it can be cast to."""
    for name in [name for name in recipe.precisions if name in engine.precisions] or ["fp32"]:
        for one in engine.configurations(recipe, name):
            yield Variant(f"{engine.name}-{one.label}", one.engine, name, LOAD)


def _precisions(recipe: Recipe) -> list[tuple[Name | None, str]]:
    """What the graph is turned into (None: it is taken as it is), and what the variant is called after."""
    given = given_precision(resolve(recipe.model))
    return [(None, given) if name == "fp32" else (name, name) for name in recipe.precisions]


def given_precision(source: Source) -> str:
    """The precision that a model comes in."""
    return model_file.precision(Path(source.target)) if source.form == "onnx" else "fp32"


def _of_graph(recipe: Recipe, engine: type[Engine], precision: str, here: bool) -> Iterator[Variant]:
    for one in engine.configurations(recipe, precision):
        name = f"{engine.name}-{one.label}"
        variant = Variant(
            name, one.engine, precision, f"build-{name}", workspace=one.workspace or None, target=one.target
        )
        found = one.engine.runnable(device_for(recipe, one.engine)) if here and engine.built_elsewhere else None
        yield variant if found is None or found.ok else replace(variant, unavailable=found.reason)


def device_for(recipe: Recipe, engine: Engine) -> Device:
    """Where an engine runs: the recipe's device, or cuda for engines that run only there."""
    where = recipe.where
    return where if where.kind in engine.kinds else Device(kind=engine.kinds[0], threads=recipe.threads)
