"""The steps of single stages: parts of the main job's plan, on files of the user's."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from enginesmith.pipeline.engines import BASELINES, baseline, engine_class, read_file, simulation, with_files
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.engines.workspace import PORTABLE
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.frameworks.fidelity import THRESHOLDS
from enginesmith.pipeline.frameworks.onnx import coverage
from enginesmith.pipeline.frameworks.source import Source, resolve
from enginesmith.pipeline.passes import passes_for
from enginesmith.pipeline.passes.quantize.precisions import AS_GIVEN, KINDS, RANGES_PER_BATCH
from enginesmith.pipeline.planning.compression import pruning_steps, train_sparse_step
from enginesmith.pipeline.planning.plan import (
    LOAD,
    REFERENCE,
    SHAPES,
    Plan,
    Step,
    StepRef,
    Variant,
    VariantName,
    verify_step,
)
from enginesmith.pipeline.planning.planner import (
    baseline_of,
    build_step,
    complete_plan,
    first_steps,
    graph_steps,
    load_task,
    measurements,
    quality_step,
    shapes_step,
)
from enginesmith.pipeline.planning.precision import Lowered, lower_precision
from enginesmith.pipeline.planning.prosecution import PROSECUTE, prosecute_task
from enginesmith.pipeline.planning.variants import ResolvedRecipe, device_for, list_variants
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.build import Build, BuildProbe, Refit, Transform
from enginesmith.pipeline.tasks.measure import Memory
from enginesmith.pipeline.tasks.prosecute import GIVEN, TRUTH, GraphStage
from enginesmith.pipeline.tasks.prune import Prune

EXPORT, SIMPLIFY, SPARSIFY = StepRef("export"), StepRef("simplify"), StepRef("sparsify")
BUILD, MEMORY = StepRef("build"), StepRef("memory")
VERIFY_FILE, _GIVEN_FILE = StepRef("verify", "file"), StepRef("file")


def export_steps(resolved: ResolvedRecipe, *, simplify: bool = False) -> tuple[Step, ...]:
    """Plan ``export`` of a module alone, or ``simplify`` of an ONNX file, with the check."""
    return (*first_steps(resolved), *graph_steps(resolved.updated(simplify=simplify))[2])


def precision_steps(resolved: ResolvedRecipe) -> tuple[tuple[Step, ...], Lowered]:
    """Plan ``precision``: from a model, or a file as it is, to a graph of another precision.

    Raises:
        UsageError: the recipe stands for more than one graph, or for none.
    """
    recipe = resolved.recipe
    anywhere = resolved.updated(targets=(PORTABLE,))  # a graph is the same for all of them
    variants = [each for each in list_variants(anywhere, recipe.engines, cast=False) if each.lowering]
    graphs = {(each.lowering, each.name.quantizer, each.engine.name) for each in variants}
    if len(graphs) != 1:
        raise UsageError(
            f"{len(graphs)} graphs are asked for, and one file is written", "give one --precision and one --engine"
        )
    variant = variants[0]  # others differ in how an engine runs the graph
    graph, checks, steps = _graph_steps(resolved)
    first = list(first_steps(resolved))
    original = Variant(VariantName("baseline"), baseline_of(resolved.source), "fp32", LOAD, device=recipe.where)
    quality = quality_step(recipe, variant, original.name, for_search=True)
    if recipe.budgets.max_drop is not None and (own := quality_step(recipe, original, original.name, for_search=True)):
        first.append(own)
    if variant.engine.needs_shapes:
        first.append(shapes_step(recipe))
    lowering = lower_precision(resolved, variant, graph, quality)
    return (*first, *steps, *lowering.steps), replace(lowering, checks=(*checks, *lowering.checks))


def _graph_steps(resolved: ResolvedRecipe) -> tuple[StepRef, tuple[StepRef, ...], list[Step]]:
    """Plan the way to the graph; one of the user's is left as it is, and only an exported one simplified."""
    return graph_steps(resolved if resolved.source.is_torch else resolved.updated(simplify=False))


def sparsify_steps(resolved: ResolvedRecipe) -> tuple[tuple[Step, ...], StepRef]:
    """Plan ``sparsify``: from a model, or a file as it is, to a graph with sparse weights; name its step."""
    recipe = resolved.recipe
    graph, _, steps = _graph_steps(resolved)
    (sparsify_pass,) = passes_for("sparsity", recipe)
    new_steps = [Step(SPARSIFY, Transform(step=sparsify_pass), {"model": graph})]
    if recipe.recover:
        new_steps.append(train_sparse_step(recipe, SPARSIFY, graph))
    last, judged = new_steps[-1].id, recipe.min_sqnr_db is not None
    check = verify_step(recipe, last, last, simulation(), Device(), "fp32", judged=judged)
    return (*first_steps(resolved), *steps, *new_steps, check), last


def prune_steps(resolved: ResolvedRecipe) -> tuple[tuple[Step, ...], StepRef, tuple[StepRef, ...]]:
    """Plan ``prune``, from a model to a smaller one of the same kind; name the last step, and those that pruned.

    Raises:
        UsageError: the model is a graph; there is not one target, or no engine that its latency can be measured on.
    """
    recipe = resolved.recipe
    if len(recipe.prune_targets) != 1:
        raise UsageError(f"{len(recipe.prune_targets)} targets are given, and one model is written", "give one --prune")
    new_steps = tuple(pruning_steps(resolved, recipe.prune_targets[0]))
    cut = tuple(step.id for step in new_steps if isinstance(step.task, Prune))
    shapes = [shapes_step(recipe)] if any(SHAPES in step.inputs for step in new_steps) else []
    return (*first_steps(resolved), *shapes, *new_steps), new_steps[-1].id, cut


def verify_steps(resolved: ResolvedRecipe, file: str) -> tuple[Step, ...]:
    """Plan to compare an ONNX file with the recipe's model."""
    recipe, source = resolved.recipe, resolve(file)
    if source.is_torch:
        raise UsageError(f"{file} is neither an ONNX file nor an engine", "verify FILE.onnx --against MODEL")
    engine = own_engine(source)
    check = verify_step(recipe, "file", StepRef("file"), engine, device_for(recipe, engine), stage=Path(file).name)
    load = Step(StepRef("file"), load_task(recipe.for_file(), source, exact=False))
    return (*first_steps(resolved), load, check)


def prosecute_file_steps(
    resolved: ResolvedRecipe, file: str, precision: str | None, seconds: float
) -> tuple[Step, ...]:
    """Plan to compare an ONNX file or an engine's file with the recipe's model.

    ``precision`` is that of the file, as ``--precision`` names it; read from the file if it is None.

    Raises:
        UsageError: the file is neither.
    """
    recipe, source = resolved.recipe, resolve(file)
    if source.is_torch:
        raise UsageError(f"{file} is neither an ONNX file nor an engine", "give such a file, or a run and its variant")
    engine = own_engine(source)
    name = precision or _read_precision(source, engine)
    thresholds: dict[str, str] = {word: kind.threshold for word, kind in KINDS.items()}
    kind = thresholds.get(name, name)
    needs = {"model": _GIVEN_FILE, GIVEN: LOAD, REFERENCE: REFERENCE}
    stages: tuple[GraphStage, ...] = ()
    others: list[Step] = []
    optional: dict[str, StepRef] = {}
    if source.form == "onnx":
        stages = (GraphStage(role="graph", name="graph", precision=kind),)
        needs["graph"] = _GIVEN_FILE
        truth, _, steps = graph_steps(resolved) if resolved.source.is_torch else (LOAD, (), [])
        others = [step for step in steps if isinstance(step.task, Transform)]
        optional[TRUTH] = truth
    task = prosecute_task(resolved.source, recipe.seed, engine, kind, stages, seconds)
    task = task.model_copy(update={"device": device_for(recipe, engine), "rows_apart": name not in RANGES_PER_BATCH})
    load = Step(_GIVEN_FILE, load_task(recipe.for_file(), source, exact=False))
    return (*first_steps(resolved), load, *others, Step(PROSECUTE, task, needs, optional))


_SIMILAR = {"int16": ("int8",), "fp4": ("int4",)}
"""Precisions that no variant is made in, and the one by whose bounds files in them are judged."""


def _read_precision(source: Source, engine: Engine) -> str:
    """Read the precision of a file, as ``--precision`` names it where that has a name for it."""
    precision = coverage.find_precision(Path(source.target)) if source.form == "onnx" else engine.arithmetic
    lowest = precision.partition("+")[0]  # fp8+fp16 is called fp8
    names = (precision, lowest, *_SIMILAR.get(lowest, ()))
    return next((name for name in names if name in KINDS or name in THRESHOLDS), "fp32")


def build_steps(resolved: ResolvedRecipe) -> tuple[Step, ...]:
    """Plan ``build``: one engine from an ONNX file, as it is.

    Raises:
        UsageError: the recipe stands for more than one engine, or for none that has an engine file of its own.
    """
    first, variants = _onnx_steps(resolved), _file_variants(resolved)
    if len(variants) != 1 or resolved.recipe.workspace == ("sweep",):
        raise UsageError(
            f"this asks for {len(variants)} engines, and build makes one",
            "name one target and one workspace limit; optimize makes all of them",
        )
    made = replace(variants[0], artifact=BUILD, unavailable="")  # the build says what lacks
    return (*first, build_step(resolved.recipe, made, LOAD))


def refit_steps(resolved: ResolvedRecipe, engine: str) -> tuple[Step, ...]:
    """Plan to put an ONNX file's weights into a built engine."""
    recipe, source, (load, _) = resolved.recipe, resolve(engine), _onnx_steps(resolved)
    if source.form != "engine":
        raise UsageError(f"{engine} is no engine", "give the engine file that is to be refitted")
    own = own_engine(source)
    old = Step(StepRef("engine"), load_task(recipe, source))
    refit = Refit(engine=own, device=device_for(recipe, own))
    return load, old, Step(BUILD, refit, {"model": LOAD, "engine": old.id})


def trial_steps(resolved: ResolvedRecipe, batch: int | None = None) -> tuple[tuple[Step, ...], dict[str, StepRef]]:
    """Plan to try a build for each target; list by target the step of its trial.

    With ``batch``, that is the largest one.
    """
    if batch is not None:
        others = {name: text for name, text in resolved.recipe.shapes.items() if name != "batch"}
        resolved = resolved.updated(batch=(batch, 1), shapes=others)
    steps, trials = list(_onnx_steps(resolved)), {}
    for variant in _file_variants(resolved):
        task = BuildProbe(engine=variant.engine, device=variant.device)
        steps.append(Step(StepRef("trial", variant.name), task, {"model": LOAD, SHAPES: SHAPES}))
        trials[variant.target or ""] = steps[-1].id
    return tuple(steps), trials


def memory_steps(resolved: ResolvedRecipe, batch: int, limit_bytes: int) -> tuple[Step, ...]:
    """List the steps that build the recipe's one engine from an ONNX file and measure its memory at a batch.

    Other dynamic dimensions are as large as they may be; ``limit_bytes`` ends a probe that takes more.
    """
    _check_onnx(resolved)
    recipe = resolved.recipe
    shapes = {name: f"{span.max}:{span.max}:{span.max}" for name, span in recipe.ranges.items() if name != "batch"}
    load, reference = first_steps(resolved.updated(batch=(1,), shapes=shapes))
    engine, device = engine_class(recipe.engines[0])(), recipe.where
    memory = Memory(engine=engine, device=device, batch=batch, limit_bytes=limit_bytes)
    return (
        *(load, reference, Step(BUILD, Build(engine=engine, device=device), {"model": LOAD})),
        Step(MEMORY, memory, {"model": BUILD, REFERENCE: REFERENCE}),
    )


def _file_variants(resolved: ResolvedRecipe) -> list[Variant]:
    engines = resolved.recipe.engines
    other = [name for name in engines if not engine_class(name).file_suffix]
    if other:
        able = " and ".join(engine.name for engine in with_files())
        raise UsageError(f"{other[0]} has no engine file of its own", f"build makes {able} engines")
    return list(list_variants(resolved, engines))


def _check_onnx(resolved: ResolvedRecipe) -> None:
    if resolved.source.form != "onnx":
        model, remedy = resolved.source.text, "export it first: `enginesmith export MODEL -o m.onnx`"
        raise UsageError(f"{model} is not an ONNX file", remedy)


def _onnx_steps(resolved: ResolvedRecipe) -> tuple[Step, Step]:
    _check_onnx(resolved)
    return Step(LOAD, load_task(resolved.recipe, resolved.source)), shapes_step(resolved.recipe)


def choose_baseline(recipe: Recipe, models: Sequence[str]) -> tuple[ResolvedRecipe, tuple[Source, ...]]:
    """Resolve models, and choose the one that the others are compared with: the recipe's, in what comes back.

    It is the first PyTorch model, whose eager run is what everything is compared with; without one, the first graph.

    Raises:
        UsageError: there are built engines only.
    """
    sources = [resolve(text) for text in models]
    able = [index for index, source in enumerate(sources) if source.form != "engine"]
    if not able:
        raise UsageError(
            f"{models[0]} is a built engine, and an engine is compared with the model that it was built from",
            f"give that model too: enginesmith benchmark MODEL {models[0]}",
        )
    first = next((index for index in able if sources[index].is_torch), able[0])
    chosen = ResolvedRecipe(recipe.model_copy(update={"model": models[first]}), sources[first])
    return chosen, (*sources[:first], *sources[first + 1 :])


def benchmark_plan(resolved: ResolvedRecipe, others: Sequence[Source], again: str) -> Plan:
    """Plan to measure models side by side as they are, the recipe's first; ``again`` is new each time.

    The recipe's module is measured by each of its engines that run one, too, once it answers like eager.
    """
    recipe, device = resolved.recipe, _common_device(resolved.recipe, others)
    steps = list(first_steps(resolved))
    engine = own_engine(resolved.source).as_shipped(device)
    variants = [Variant(VariantName(_label(resolved.source)), engine, AS_GIVEN, LOAD, device=device)]
    for index, source in enumerate(others, 1):
        name = StepRef(LOAD.kind, index)
        steps.append(Step(name, load_task(recipe.for_file(), source, exact=False)))
        engine = own_engine(source).as_shipped(device)
        lacking = "" if (usable := engine.available(device)).ok else f"it does not run on {device}: {usable.reason}"
        label = _distinct(VariantName(_label(source)), variants)
        variants.append(Variant(label, engine, AS_GIVEN, name, device=device, unavailable=lacking))
    for variant in _variants_of_module(resolved):
        check = verify_step(recipe, variant.name, LOAD, variant.engine, device, stage="engine")
        steps.append(check)
        label = _distinct(variant.name, variants)
        variants.append(replace(variant, name=label, device=device, verified=(check.id,)))
    for index, variant in enumerate(variants):  # a graph beside a module may be another model's
        variants[index], more = measurements(recipe, variant, None, again)
        steps += more
    return complete_plan(recipe, steps, variants, again)


def _variants_of_module(resolved: ResolvedRecipe) -> Iterator[Variant]:
    """List the recipe's module by the engines and in the precisions that are asked for, but as it is.

    Raises:
        UsageError: there is no module, or it cannot be cast to that.
    """
    recipe = resolved.recipe
    engines = [name for name in recipe.engines if engine_class(name).runs_module()]
    castable = type(baseline("torch")).precisions
    graphs_only = [name for name in recipe.precisions if name not in castable]
    if graphs_only or (recipe.precisions != ("fp32",) and not engines):
        raise UsageError(
            f"a benchmark takes files as they are, and modules in {', '.join(castable)}: "
            f"--precision {', '.join(graphs_only or recipe.precisions)} has no effect",
            f"add --engine {BASELINES['torch']}, or make a file first: enginesmith precision MODEL -o FILE.onnx",
        )
    if engines and not resolved.source.is_torch:
        remedy = f"give the module too: enginesmith benchmark MODEL {recipe.model} --engine {engines[0]}"
        raise UsageError(f"{engines[0]} runs a PyTorch module, and {recipe.model} is an ONNX file", remedy)
    return list_variants(resolved, engines, graphs=recipe.graph_modes())


def _common_device(recipe: Recipe, others: Sequence[Source]) -> Device:
    """Choose where models are measured: as asked for, else where a built engine among them runs, if that is here."""
    if recipe.device:
        return recipe.where
    engines = [own_engine(source) for source in others if source.form == "engine"]
    places = [Device(kind=engine.kinds[0], threads=recipe.threads) for engine in engines]
    here = (place for engine, place in zip(engines, places, strict=True) if engine.available(place).ok)
    return next(here, recipe.where)


def own_engine(source: Source) -> Engine:
    """Choose the engine that a file of the user's is run by: its own, else the one of such models."""
    if source.form == "engine":
        return read_file(Path(source.target)).engine
    return engine_class(BASELINES["torch" if source.is_torch else "onnx"])()


def _label(source: Source) -> str:
    return Path(source.text).name if source.form in ("onnx", "pt2", "engine") else source.name


def _distinct(name: VariantName, variants: Sequence[Variant]) -> VariantName:
    taken = {variant.id for variant in variants}
    return name if str(name) not in taken else replace(name, number=len(taken) + 1)
