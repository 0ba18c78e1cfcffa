"""The steps of single stages: parts of the main job's plan, on files of the user's."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from enginesmith.pipeline.engines import BASELINES, baseline, engine_class, read_file, simulation, with_files
from enginesmith.pipeline.engines.base import PORTABLE, Engine
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.frameworks.source import Source, resolve
from enginesmith.pipeline.passes.quantize.precisions import AS_GIVEN
from enginesmith.pipeline.passes.sparsify.sparsify import Sparsify
from enginesmith.pipeline.planning.compression import smaller
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, Plan, Step, Variant
from enginesmith.pipeline.planning.planner import (
    baseline_of,
    build_step,
    first_steps,
    graph_steps,
    latency_step,
    limits_steps,
    load_task,
    measurements,
    quality_step,
    shapes_step,
    verify_step,
)
from enginesmith.pipeline.planning.precision import Lowered, lowered
from enginesmith.pipeline.planning.variants import device_for, variants_of
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.build import Build, Refit, Transform, Trial
from enginesmith.pipeline.tasks.load import SHAPES
from enginesmith.pipeline.tasks.measure import Memory
from enginesmith.pipeline.tasks.prune import Prune
from enginesmith.pipeline.tasks.verify import Verify

BUILD, MEMORY, SPARSIFY, TRIAL = "build", "memory", "sparsify", "trial"


def export_steps(recipe: Recipe) -> tuple[Step, ...]:
    """The steps of ``export`` alone, with its check."""
    graph = graph_steps(recipe.model_copy(update={"simplify": False}), resolve(recipe.model))[2]
    return (*first_steps(recipe), *graph)


def simplify_steps(recipe: Recipe) -> tuple[Step, ...]:
    """The steps of ``simplify`` on an ONNX file, with its check."""
    graph = graph_steps(recipe.model_copy(update={"simplify": True}), resolve(recipe.model))[2]
    return (*first_steps(recipe), *graph)


def precision_steps(recipe: Recipe) -> tuple[tuple[Step, ...], Lowered]:
    """The steps of ``precision``: from a model, or a file as it is, to a graph of another precision.

    Raises:
        UsageError: the recipe stands for more than one graph, or for none.
    """
    anywhere = recipe.model_copy(update={"targets": (PORTABLE,)})  # a graph is the same for all of them
    found = [variant for variant in variants_of(anywhere, recipe.engines) if variant.lowering]
    if len(found) != 1:
        raise UsageError(
            f"{len(found)} graphs are asked for, and one file is written", "give one --precision and one --engine"
        )
    source = resolve(recipe.model)
    untouched = recipe if source.is_torch else recipe.model_copy(update={"simplify": False})
    graph, checks, steps = graph_steps(untouched, source)
    first = list(first_steps(recipe))
    original = Variant("baseline", baseline_of(source), "fp32", LOAD)
    quality = quality_step(recipe, found[0], original.id)
    if recipe.budgets.max_drop is not None and (own := quality_step(recipe, original, original.id)):
        first.append(own)
    if found[0].engine.needs_shapes:
        first.append(shapes_step(recipe))
    made = lowered(recipe, found[0], device_for(recipe, found[0].engine), graph, quality)
    return (*first, *steps, *made.steps), replace(made, checks=(*checks, *made.checks))


def sparsify_steps(recipe: Recipe, asked: Sparsify) -> tuple[Step, ...]:
    """The steps of ``sparsify``: from a model, or a file as it is, to a graph with sparse weights."""
    source = resolve(recipe.model)
    untouched = recipe if source.is_torch else recipe.model_copy(update={"simplify": False})
    graph, _, steps = graph_steps(untouched, source)
    made = Step(SPARSIFY, Transform(step=asked), {"model": graph})
    task = Verify(
        stage=SPARSIFY,
        engine=simulation(),
        device=Device(),
        precision="fp32",
        min_sqnr_db=recipe.min_sqnr_db,
        judged=recipe.min_sqnr_db is not None,
    )
    check = Step(f"verify-{SPARSIFY}", task, {"model": SPARSIFY, REFERENCE: REFERENCE})
    return (*first_steps(recipe), *steps, made, check)


def prune_steps(recipe: Recipe) -> tuple[tuple[Step, ...], str, str]:
    """The steps of ``prune``, from a model to a smaller one of the same kind; the last one, and the one that pruned.

    Raises:
        UsageError: there is not one target, or no engine that its latency can be measured on.
    """
    if len(recipe.prune_targets) != 1:
        raise UsageError(f"{len(recipe.prune_targets)} targets are given, and one model is written", "give one --prune")
    made = tuple(smaller(recipe, recipe.prune_targets[0]))
    cut = [step.id for step in made if isinstance(step.task, Prune)]
    shapes = [shapes_step(recipe)] if any(SHAPES in step.inputs for step in made) else []
    return (*first_steps(recipe), *shapes, *made), made[-1].id, cut[-1]


def verify_steps(recipe: Recipe, file: str) -> tuple[Step, ...]:
    """The steps that hold an ONNX file against the recipe's model."""
    source = resolve(file)
    if source.is_torch:
        raise UsageError(f"{file} is neither an ONNX file nor an engine", "verify FILE.onnx --against MODEL")
    engine = _own_engine(source)
    check = verify_step(recipe, "file", Path(file).name, "file", engine, device_for(recipe, engine))
    return (*first_steps(recipe), Step("file", load_task(recipe.model_copy(update={"inputs": ()}), source)), check)


def build_steps(recipe: Recipe) -> tuple[Step, ...]:
    """The steps of ``build``: one engine from an ONNX file, as it is.

    Raises:
        UsageError: the recipe stands for more than one engine, or for none that has an engine file of its own.
    """
    found = _file_variants(recipe)
    if len(found) != 1 or recipe.workspace == ("sweep",):
        raise UsageError(
            f"this asks for {len(found)} engines, and build makes one",
            "name one target and one workspace limit; optimize makes all of them",
        )
    variant = replace(found[0], artifact=BUILD)
    return (*_onnx_steps(recipe), build_step(variant, device_for(recipe, variant.engine), LOAD))


def refit_steps(recipe: Recipe, engine: str) -> tuple[Step, ...]:
    """The steps that put an ONNX file's weights into a built engine."""
    source = resolve(engine)
    _hold_onnx(recipe)
    if source.form != "engine":
        raise UsageError(f"{engine} is no engine", "give the engine file that is to be refitted")
    own = _own_engine(source)
    load = Step(LOAD, load_task(recipe, resolve(recipe.model)), required=True)
    old = Step("engine", load_task(recipe, source), required=True)
    refit = Refit(engine=own, device=device_for(recipe, own))
    return load, old, Step(BUILD, refit, {"model": LOAD, "engine": "engine"})


def trial_steps(recipe: Recipe, batch: int | None = None) -> tuple[tuple[Step, ...], dict[str, str]]:
    """The steps that try a build for each target, and by target the id of its trial.

    With ``batch``, that is the largest one.
    """
    chosen = recipe
    if batch is not None:
        others = {name: text for name, text in recipe.shapes.items() if name != "batch"}
        chosen = recipe.model_copy(update={"batch": (batch, 1), "shapes": others})
    steps, trials = list(_onnx_steps(chosen)), {}
    for variant in _file_variants(chosen):
        task = Trial(engine=variant.engine, device=device_for(chosen, variant.engine))
        steps.append(Step(f"{TRIAL}-{variant.id}", task, {"model": LOAD, SHAPES: SHAPES}))
        trials[variant.target or ""] = steps[-1].id
    return tuple(steps), trials


def memory_steps(recipe: Recipe, batch: int, limit_bytes: int) -> tuple[Step, ...]:
    """List the steps that build the recipe's one engine from an ONNX file and measure its memory at a batch.

    Other dynamic dimensions are as large as they may be; ``limit_bytes`` ends a probe that takes more.
    """
    _hold_onnx(recipe)
    shapes = {name: f"{span.max}:{span.max}:{span.max}" for name, span in recipe.ranges.items() if name != "batch"}
    load, reference = first_steps(recipe.model_copy(update={"batch": (1,), "shapes": shapes}))
    engine, device = engine_class(recipe.engines[0])(), recipe.where
    memory = Memory(engine=engine, device=device, batch=batch, limit_bytes=limit_bytes)
    return (
        *(load, reference, Step(BUILD, Build(engine=engine, device=device), {"model": LOAD})),
        Step(MEMORY, memory, {"model": BUILD, REFERENCE: REFERENCE}),
    )


def _file_variants(recipe: Recipe) -> list[Variant]:
    _hold_onnx(recipe)
    other = [name for name in recipe.engines if not engine_class(name).file_suffix]
    if other:
        able = " and ".join(engine.name for engine in with_files())
        raise UsageError(f"{other[0]} has no engine file of its own", f"build makes {able} engines")
    return list(variants_of(recipe, recipe.engines))


def _hold_onnx(recipe: Recipe) -> None:
    if resolve(recipe.model).form != "onnx":
        raise UsageError(f"{recipe.model} is not an ONNX file", "export it first: `enginesmith export MODEL -o m.onnx`")


def _onnx_steps(recipe: Recipe) -> tuple[Step, Step]:
    load = Step(LOAD, load_task(recipe, resolve(recipe.model)), required=True)
    return load, replace(shapes_step(recipe), required=True)


def with_baseline(recipe: Recipe, models: Sequence[str]) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe of the model that the others are held against, and the others.

    It is the first PyTorch model, whose eager run is what everything is compared with; without one, the first graph.

    Raises:
        UsageError: there are built engines only.
    """
    sources = [resolve(text) for text in models]
    able = [index for index, source in enumerate(sources) if source.form != "engine"]
    if not able:
        raise UsageError(
            f"{models[0]} is a built engine, and an engine is held against the model that it was built from",
            f"give that model too: enginesmith benchmark MODEL {models[0]}",
        )
    first = next((index for index in able if sources[index].is_torch), able[0])
    return recipe.model_copy(update={"model": models[first]}), tuple(models[:first]) + tuple(models[first + 1 :])


def benchmark_plan(recipe: Recipe, others: Sequence[str], again: str) -> Plan:
    """Measure models side by side as they are, the recipe's first; ``again`` is new each time.

    The recipe's module is measured by each of its engines that run one, too, once it answers like eager.
    """
    device = _common_device(recipe, others)
    steps = list(first_steps(recipe))
    variants = [Variant(_label(recipe.model), _own_engine(resolve(recipe.model)), AS_GIVEN, LOAD)]
    for index, text in enumerate(others, 1):
        source = resolve(text)
        name = f"{LOAD}-{index}"
        steps.append(Step(name, load_task(recipe.model_copy(update={"inputs": ()}), source)))
        engine = _own_engine(source)
        lacking = "" if (found := engine.available(device)).ok else f"it does not run on {device}: {found.reason}"
        variants.append(Variant(_distinct(_label(text), variants), engine, AS_GIVEN, name, unavailable=lacking))
    for variant in _of_module(recipe):
        check = verify_step(recipe, variant.id, "engine", LOAD, variant.engine, device)
        steps.append(check)
        variants.append(replace(variant, id=_distinct(variant.id, variants), verified=(check.id,)))
    graphs = [one.artifact for one in variants if one.engine.shows_graph]
    for index, variant in enumerate(variants):
        graph = variant.artifact if variant.artifact in graphs else next(iter(graphs), None)
        variants[index], more = measurements(recipe, variant, device, graph, again)
        steps += more
    limits = limits_steps(recipe, device)
    latency = latency_step(recipe, variants, device, again)
    limited = limits[0].id if limits else None
    return Plan((*steps, *limits, latency), variants[0], tuple(variants[1:]), latency.id, limited)


def _of_module(recipe: Recipe) -> Iterator[Variant]:
    """The recipe's module by the engines and in the precisions that are asked for, but as it is.

    Raises:
        UsageError: there is no module, or it cannot be cast to that.
    """
    engines = [name for name in recipe.engines if engine_class(name).consumes == "torch"]
    castable = type(baseline("torch")).precisions
    graphs_only = [name for name in recipe.precisions if name not in castable]
    if graphs_only or (recipe.precisions != ("fp32",) and not engines):
        raise UsageError(
            f"a benchmark takes files as they are, and modules in {', '.join(castable)}: "
            f"--precision {', '.join(graphs_only or recipe.precisions)} has no effect",
            f"add --engine {BASELINES['torch']}, or make a file first: enginesmith precision MODEL -o FILE.onnx",
        )
    if engines and not resolve(recipe.model).is_torch:
        remedy = f"give the module too: enginesmith benchmark MODEL {recipe.model} --engine {engines[0]}"
        raise UsageError(f"{engines[0]} runs a PyTorch module, and {recipe.model} is an ONNX file", remedy)
    return variants_of(recipe, engines)


def _common_device(recipe: Recipe, others: Sequence[str]) -> Device:
    """Where all of them are measured: as asked for, else where a built engine among them runs, if that is here."""
    if recipe.device:
        return recipe.where
    engines = [_own_engine(source) for text in others if (source := resolve(text)).form == "engine"]
    places = [Device(kind=engine.kinds[0], threads=recipe.threads) for engine in engines]
    here = (place for engine, place in zip(engines, places, strict=True) if engine.available(place).ok)
    return next(here, recipe.where)


def _own_engine(source: Source) -> Engine:
    if source.form == "engine":
        return read_file(Path(source.target)).engine
    return engine_class(BASELINES["torch" if source.is_torch else "onnx"])()


def _label(text: str) -> str:
    source = resolve(text)
    return Path(text).name if source.form in ("onnx", "pt2", "engine") else source.name


def _distinct(label: str, variants: Sequence[Variant]) -> str:
    taken = {variant.id for variant in variants}
    return label if label not in taken else f"{label}-{len(taken) + 1}"
