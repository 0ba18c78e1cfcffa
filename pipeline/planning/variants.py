"""Resolve a recipe's model and devices, and list the variants that it asks for."""

import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from enginesmith.pipeline.engines import BASELINES, REFERENCES, baseline, engine_class
from enginesmith.pipeline.engines.base import Configuration, Engine
from enginesmith.pipeline.engines.options import ModuleOptions
from enginesmith.pipeline.frameworks.onnx import coverage, model_file
from enginesmith.pipeline.frameworks.source import Source, resolve
from enginesmith.pipeline.passes.quantize.precisions import KINDS, Name, Quantizer
from enginesmith.pipeline.planning.plan import LOAD, StepRef, Variant, VariantName
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.units import name_some

_SHOWN = 3


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe with what its MODEL means: resolved once for a run, and carried to all that ask."""

    recipe: Recipe
    source: Source

    @functools.cached_property
    def given_precision(self) -> str:
        """The precision that the model comes in; an ONNX file is read for it."""
        source = self.source
        return coverage.find_precision(Path(source.target)) if source.form == "onnx" else "fp32"

    def find_threshold(self, engine: Engine) -> str:
        """Name the row of fidelity thresholds for a graph in the model's own precision, as an engine runs it."""
        halves = ("fp16", "bf16")
        own = engine.arithmetic
        return self.given_precision if own == "fp32" and self.given_precision in halves else own

    @functools.cached_property
    def given_opset(self) -> int:
        """The opset of the float graph: that of an ONNX file, or what is exported with."""
        source = self.source
        return model_file.summary(Path(source.target)).opset if source.form == "onnx" else self.recipe.export.opset

    def updated(self, **fields: object) -> "ResolvedRecipe":
        """Replace fields of the recipe; not the model."""
        return replace(self, recipe=self.recipe.model_copy(update=fields))


def resolve_recipe(recipe: Recipe) -> ResolvedRecipe:
    """Resolve a recipe's model.

    Raises:
        SourceError: it is of no known form, or names a file or zoo model that does not exist.
    """
    return ResolvedRecipe(recipe, resolve(recipe.model))


def list_variants(
    resolved: ResolvedRecipe,
    engines: Sequence[str],
    *,
    here: bool = True,
    graphs: Sequence[bool] = (False,),
    cast: bool = True,
) -> Iterator[Variant]:
    """List variants with their names, engines and devices, in the order of the recipe.

    Where they have to run ``here``, they say what this machine lacks for that. ``graphs``: whether engines that can
    replay CUDA graphs do so, each choice a variant. Engines that can ``cast`` a float32 graph by themselves do so,
    unless inputs and outputs are to be cast, too, or nodes are to be kept; a search may find some that are.
    """
    recipe = resolved.recipe
    taken = {str(VariantName(BASELINES["torch"], "fp32"))}  # the model as it is
    for name in engines:
        engine = engine_class(name)
        takes_module = engine.consumes == "torch"
        precisions = list(recipe.precisions)
        if takes_module:  # in each precision that a module can be cast to
            precisions = [name for name in recipe.precisions if name in engine.precisions] or ["fp32"]
        if recipe.variants == "found":
            precisions = [name for name in precisions if name in engine.candidate_precisions(recipe.where)]
        for precision in precisions:
            label = resolved.given_precision if precision == "fp32" and not takes_module else precision
            makers = _list_quantizers(recipe, engine) if precision == "int8" else ("own",)
            ways = itertools.product(engine.configurations(recipe, label), makers, graphs)
            for config, maker, replayed in ways:
                if precision == "fp32" and config.engine.arithmetic == "int8":
                    continue  # of a file that is in few bits already, its weights alone: it is to run as it is
                variant = _make_variant(config, label, maker, device_for(recipe, config.engine), replayed=replayed)
                if variant.id in taken:  # a file may be in a precision already that is asked for besides
                    continue
                taken.add(variant.id)
                if takes_module:
                    yield replace(variant, refused=_explain_whole_cast(recipe, engine, precision))
                    continue
                runnable = config.engine.runnable(variant.device) if here and engine.kinds == ("cuda",) else None
                unavailable = "" if runnable is None or runnable.ok else runnable.reason
                casts = cast and precision in engine.casts and not recipe.quantization.keep
                whole = casts and not _may_keep(resolved, precision)
                lowering = None if precision == "fp32" or whole else precision
                yield replace(variant, unavailable=unavailable, lowering=lowering, casts=casts)


def _may_keep(resolved: ResolvedRecipe, precision: Name) -> bool:
    """Tell whether a search may keep nodes in float32 of a graph that its engine casts: where it can be lowered."""
    recipe, kind = resolved.recipe, KINDS[precision]
    return recipe.searches_lowered and kind.lowered and resolved.given_opset >= kind.opset


def _explain_whole_cast(recipe: Recipe, engine: type[Engine], precision: str) -> str:
    """Explain why an engine cannot have a module in a precision, as it casts all of it; empty if it can."""
    kept = recipe.quantization.keep
    if precision == "fp32" or not kept:
        return ""
    return f"{engine.name} casts the whole module to {precision}, and {name_some(kept, _SHOWN)} is to stay in float32"


def _list_quantizers(recipe: Recipe, engine: type[Engine]) -> tuple[Quantizer, ...]:
    """List the makers of int8 graphs for an engine; of those that train, a search takes one: it costs the most."""
    is_search = recipe.variants == "found"
    able = engine.candidate_quantizers(recipe.where) if is_search else engine.quantizers
    makers = tuple(maker for maker in recipe.quantization.quantizers if maker in able) or ("own",)
    last = [name for name in recipe.engines if engine_class(name).consumes == "onnx"][-1]
    return tuple(maker for maker in makers if maker != "qat" or not is_search or engine.name == last)


def list_references(resolved: ResolvedRecipe, requested: Collection[str]) -> Iterator[Variant]:
    """List the variants in PyTorch alone that a winner is compared with, without those that were ``requested`` anyway.

    They are eager in half precision, compiled in float32 and half precision and, on CUDA, the last with CUDA graphs.
    """
    recipe, where = resolved.recipe, resolved.recipe.where
    references = recipe.measure.references
    if not resolved.source.is_torch or not (where.kind == "cuda" if references is None else references):
        return
    own = type(baseline("torch"))
    half = next((name for name in recipe.precisions if name in own.precisions[1:]), own.usual_half(where))
    options = ModuleOptions(compile_mode=recipe.eager.compile_mode)
    whole = recipe.quantization.model_copy(update={"keep": ()})  # as PyTorch would cast it
    plain = resolved.updated(eager=options, precisions=("fp32", half), quantization=whole)
    listed = [*list_variants(plain, REFERENCES)]
    if any(recipe.graph_modes("both")):
        listed += list_variants(plain.updated(precisions=(half,)), REFERENCES[1:], graphs=(True,))
    known = {*requested}
    for variant in listed:
        if variant.id not in known:
            known.add(variant.id)
            yield replace(variant, reference=True)


def _make_variant(
    config: Configuration, precision: str, quantizer: Quantizer, device: Device, *, replayed: bool
) -> Variant:
    """Make a configuration's variant as it runs on a device; one that replays CUDA graphs shares the other's build."""
    engine, graphs = config.engine.as_shipped(device), replayed and device.kind == "cuda"
    graphs = graphs and engine.replays_graphs()
    made_by = "" if quantizer == "own" else quantizer
    name = VariantName(engine.name, config.precision, made_by, config.workspace, config.target or "", config.mode)
    artifact = LOAD if engine.runs_module() else StepRef("build", name)
    return Variant(
        replace(name, graphs=graphs),
        engine.model_copy(update={"cuda_graphs": True}) if graphs else engine,
        precision,
        artifact,
        device,
        workspace=config.workspace or None,
        target=config.target,
    )


def device_for(recipe: Recipe, engine: Engine) -> Device:
    """Choose where an engine runs: the recipe's device, or cuda for engines that run only there."""
    where = recipe.where
    return where if where.kind in engine.kinds else Device(kind=engine.kinds[0], threads=recipe.threads)
