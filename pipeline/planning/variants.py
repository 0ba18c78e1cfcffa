"""Resolve a recipe's model and devices, and list the variants that it asks for."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Configuration, Engine
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.source import Source, resolve
from enginesmith.pipeline.planning.plan import LOAD, StepRef, Variant, VariantName
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.system.device import Device


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe with what its MODEL means: resolved once for a run, and carried to all that ask."""

    recipe: Recipe
    source: Source

    @functools.cached_property
    def given_precision(self) -> str:
        """The precision that the model comes in; an ONNX file is read for it."""
        source = self.source
        return model_file.precision(Path(source.target)) if source.form == "onnx" else "fp32"

    def updated(self, **fields: object) -> "ResolvedRecipe":
        """Replace fields of the recipe; not the model."""
        return replace(self, recipe=self.recipe.model_copy(update=fields))


def resolve_recipe(recipe: Recipe) -> ResolvedRecipe:
    """Resolve a recipe's model.

    Raises:
        SourceError: it is of no known form, or names a file or zoo model that does not exist.
    """
    return ResolvedRecipe(recipe, resolve(recipe.model))


def list_variants(resolved: ResolvedRecipe, engines: Sequence[str], *, here: bool = True) -> Iterator[Variant]:
    """List variants with their names, engines and devices, in the order of the recipe.

    Where they have to run ``here``, they say what this machine lacks for that.
    """
    recipe = resolved.recipe
    taken: set[str] = set()
    for name in engines:
        engine = engine_class(name)
        if engine.consumes == "torch":  # in each precision that a module can be cast to
            for precision in [name for name in recipe.precisions if name in engine.precisions] or ["fp32"]:
                for config in engine.configurations(recipe, precision):
                    yield Variant(
                        _name(config), config.engine, precision, LOAD, device=device_for(recipe, config.engine)
                    )
            continue
        for asked in recipe.precisions:
            label = resolved.given_precision if asked == "fp32" else asked
            for config in engine.configurations(recipe, label):
                variant, device = _name(config), device_for(recipe, config.engine)
                if str(variant) in taken:  # a file may be in a precision already that is asked for besides
                    continue
                taken.add(str(variant))
                runnable = config.engine.runnable(device) if here and engine.built_elsewhere else None
                yield Variant(
                    *(variant, config.engine, label, StepRef("build", variant), device),
                    workspace=config.workspace or None,
                    target=config.target,
                    unavailable="" if runnable is None or runnable.ok else runnable.reason,
                    lowering=None if asked == "fp32" else asked,
                )


def _name(config: Configuration) -> VariantName:
    return VariantName(config.engine.name, config.precision, config.workspace, config.target or "", config.mode)


def device_for(recipe: Recipe, engine: Engine) -> Device:
    """Choose where an engine runs: the recipe's device, or cuda for engines that run only there."""
    where = recipe.where
    return where if where.kind in engine.kinds else Device(kind=engine.kinds[0], threads=recipe.threads)
