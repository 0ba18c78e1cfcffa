"""A recipe becomes a tree of steps; variants that share a prefix share its steps.

load ─┬─ reference ─────────────────┬────────────────┬────────────┐
      └─ export ─┬─ simplify ─┬─ build-V ── verify-V ┴─ memory-V   └─ latency
                 └─ verify    └─ verify              └─ quality-V     (all variants together)
"""

from collections.abc import Sequence
from dataclasses import replace

from enginesmith.pipeline.engines import BASELINES, baseline, engine_class
from enginesmith.pipeline.engines.base import MAX, SWEPT, Engine, WorkspaceEngine
from enginesmith.pipeline.errors import MissingCapability, UsageError
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.passes import graph_passes
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.planning.compression import DensePlan, compress
from enginesmith.pipeline.planning.plan import (
    LATENCY,
    LIMITS,
    LOAD,
    REFERENCE,
    SHAPES,
    Plan,
    Step,
    StepRef,
    Variant,
    VariantName,
    add_audits,
)
from enginesmith.pipeline.planning.precision import feeder, lower_precision
from enginesmith.pipeline.planning.variants import ResolvedRecipe, list_variants
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import Task
from enginesmith.pipeline.tasks.build import SMALLEST, UNLIMITED, Build, BuildWithin, Transform
from enginesmith.pipeline.tasks.load import Load, LoadEngine, LoadOnnx, Shapes
from enginesmith.pipeline.tasks.measure import (
    BASELINE,
    GRAPH,
    VERIFIED,
    CountWork,
    DeviceRates,
    Latency,
    Memory,
    ProfileVariant,
    Quality,
)
from enginesmith.pipeline.tasks.verify import Sample, Verify

_BATCH_OF_JUDGING = 32
"""Samples that are judged together, where nothing says how large a batch may be."""
_SHARE_TO_START = 0.25
"""Of a time limit, for sessions to be started in."""


def plan(resolved: ResolvedRecipe, *, here: bool = True) -> Plan:
    """Expand a recipe; ``here`` says whether its engines have to run on this machine.

    Raises:
        UsageError: the recipe asks for what does not go together.
    """
    recipe, source = resolved.recipe, resolved.source
    engines = [name for name in recipe.engines if name != BASELINES["torch"]]  # as it is, the baseline is always there
    _check_source(resolved)
    steps = list(first_steps(resolved))
    graph = LOAD
    verified: tuple[StepRef, ...] = ()
    to_graph: list[Step] = []
    if any(engine_class(name).consumes == "onnx" for name in engines):
        graph, verified, to_graph = graph_steps(resolved)
        steps += to_graph
    if any(engine_class(name).needs_shapes for name in engines):
        steps.append(shapes_step(recipe))
    asked = list(list_variants(resolved, recipe.engines, here=here))
    original = baseline_variant(resolved)
    if own := quality_step(recipe, original, original.name):
        steps.append(own)  # what searches hold their trials against
    dense, to_engines = _plan_engines(recipe, asked, graph, verified, original.name)
    shared = frozenset((SHAPES, *([own.id] if own else ())))
    dense_plan = DensePlan(graph, tuple(to_graph), tuple(to_engines), tuple(dense), shared)
    others, more = compress(resolved, dense_plan)
    variants, steps = [original, *dense, *others], [*steps, *to_engines, *more]
    if here:
        _check_buildable(engines)
    lacking = [variant.unavailable for variant in variants[1:]]
    if lacking and all(lacking):
        variants[0] = replace(original, unavailable=f"there is nothing to compare it with: {lacking[0]}")
    stands_for_it = graph if graph != LOAD or not source.is_torch else None
    built_from = {step.id: step.inputs["model"] for step in steps if isinstance(step.task, (Build, BuildWithin))}
    for index, variant in enumerate(variants):
        its_graph = built_from.get(variant.artifact, stands_for_it)
        variants[index], more = _own_measurements(recipe, variant, original.name, its_graph)
        steps += more
    limits = limits_steps(recipe, recipe.where)
    latency = latency_step(recipe, variants) if recipe.measure.latency else None
    steps += [*limits, *([latency] if latency else [])]
    distinct: dict[str, Step] = {}
    for step in steps:
        distinct.setdefault(step.id, step)  # variants share what leads to them
    return Plan(
        tuple(distinct.values()),
        variants[0],
        tuple(variants[1:]),
        latency.id if latency else None,
        limits[0].id if limits else None,
    )


def plan_loading(resolved: ResolvedRecipe) -> Plan:
    """Plan to load the model, and no more."""
    load, _ = first_steps(resolved)
    return Plan((load,), baseline_variant(resolved), (), None)


def _plan_engines(
    recipe: Recipe, asked: Sequence[Variant], graph: StepRef, checks: tuple[StepRef, ...], baseline: VariantName
) -> tuple[list[Variant], list[Step]]:
    """Plan the steps of variants' engines, from one float graph."""
    variants, steps = [], []
    for variant in asked:
        finished, more = _engine_steps(recipe, variant, graph, checks, baseline)
        variants.append(finished)
        steps += more
    return variants, steps


def _check_source(resolved: ResolvedRecipe) -> None:
    """Refuse a model that cannot become what is asked for.

    Raises:
        UsageError: it is a built engine, or a graph where a module is needed.
    """
    source, engines = resolved.source, resolved.recipe.engines
    if source.form == "engine":
        raise UsageError(
            f"{source.text} is a built engine, and there is nothing to optimise in it",
            "give the model it was built from; `benchmark` and `verify` take engines",
        )
    needs_module = [name for name in engines if engine_class(name).consumes == "torch"]
    if needs_module and not source.is_torch:
        raise UsageError(
            f"the engine {needs_module[0]!r} runs a PyTorch module, and {source.text} is an ONNX file",
            "leave that engine away, or give the model as file.py:factory",
        )


def _check_buildable(engines: list[str]) -> None:
    """Refuse at once where none of the engines can be built here."""
    kinds = [engine_class(name) for name in engines]
    found = [kind.buildable() for kind in kinds if kind.file_suffix]
    if len(found) == len(kinds) and found and not any(one.ok for one in found):
        raise MissingCapability(f"{engines[0]} cannot be built here: {found[0].reason}", found[0].remedy)


def load_task(recipe: Recipe, source: Source) -> Task:
    """Choose the task that makes the first artifact from MODEL."""
    if source.form == "engine":
        return LoadEngine(source=source)
    if not source.is_torch:
        return LoadOnnx(source=source, inputs=recipe.specs)
    return Load(source=source, inputs=recipe.specs, seed=recipe.seed, allow_pickle=recipe.allow_pickle)


def baseline_of(source: Source) -> Engine:
    """Choose the engine that runs a model as it is given, for all others to be held against."""
    return baseline("torch" if source.is_torch else "onnx")


def baseline_variant(resolved: ResolvedRecipe) -> Variant:
    """Describe the given model as it is: the variant that all others are compared with."""
    source = resolved.source
    name = VariantName(BASELINES["torch"] if source.is_torch else "source")
    return Variant(name, baseline_of(source), resolved.given_precision, LOAD, device=resolved.recipe.where)


def _sample(recipe: Recipe, source: Source) -> Task:
    return Sample(
        engine=baseline_of(source),
        ranges=recipe.ranges,
        batches=recipe.batch,
        data=recipe.data,
        data_options=recipe.data_options,
        held_out=None if recipe.data or not recipe.calibration_data else feeder(recipe),
        seed=recipe.seed,
    )


def graph_steps(resolved: ResolvedRecipe) -> tuple[StepRef, tuple[StepRef, ...], list[Step]]:
    """Plan the way from the loaded model to the graph of engines; each stage is verified as it is, unoptimised."""
    recipe = resolved.recipe
    runtime = baseline("onnx")
    steps, checks, parent = [], [], LOAD
    for made in graph_passes(recipe, "torch" if resolved.source.is_torch else "onnx"):
        name = StepRef("pass", made.step_name) if made.stage == "request" else StepRef(made.step_name)
        steps.append(Step(name, Transform(step=made), {"model": parent}))
        checks.append(verify_step(recipe, name, str(name), name, runtime, Device()))
        parent = name
    return parent, tuple(check.id for check in checks), [*steps, *checks]


def verify_step(
    recipe: Recipe,
    subject: StepRef | VariantName | str,
    stage: str,
    artifact: StepRef,
    engine: Engine,
    device: Device,
    threshold: str = "",
) -> Step:
    """Plan to compare a step's artifact, as an engine runs it, with the reference, by a row of fidelity thresholds."""
    task = Verify(
        stage=stage,
        engine=engine,
        device=device,
        precision=threshold or engine.arithmetic,
        min_sqnr_db=recipe.min_sqnr_db,
    )
    return Step(StepRef("verify", subject), task, {"model": artifact, "reference": REFERENCE})


def _engine_steps(
    recipe: Recipe, variant: Variant, graph: StepRef, checks: tuple[StepRef, ...], baseline: VariantName
) -> tuple[Variant, list[Step]]:
    """The precision, the engine, and the check that stands for all checks before it too."""
    engine, device = variant.engine, variant.device
    if engine.consumes == "torch":
        check = verify_step(recipe, variant.name, "engine", LOAD, engine, device)
        return replace(variant, verified=(check.id,)), [check]
    steps: list[Step] = []
    threshold = engine.arithmetic
    if variant.lowering:
        made = lower_precision(recipe, variant, graph, quality_step(recipe, variant, baseline))
        graph, checks, threshold = made.graph, (*checks, *made.checks), KINDS[variant.lowering].threshold
        steps += made.steps
        variant = replace(variant, calibration=made.calibration, assignment=made.assignment, search=made.search)
    build = build_step(variant, graph)
    variant, audits = add_audits(variant, graph)
    check = verify_step(recipe, variant.name, "engine", build.id, engine, device, threshold)
    needs: dict[str, StepRef] = {**check.inputs, **{str(name): name for name in checks}}
    check = replace(check, inputs=needs, unavailable=variant.unavailable)
    return replace(variant, verified=(*checks, check.id)), [*steps, build, *audits, check]


def shapes_step(recipe: Recipe) -> Step:
    """Plan to work out the shape ranges that engines are built for."""
    return Step(SHAPES, Shapes(ranges=recipe.ranges, batches=recipe.batch), {"model": LOAD})


def build_step(variant: Variant, graph: StepRef) -> Step:
    """Plan to build a variant's engine from a step's graph."""
    engine = variant.engine
    needs = {"model": graph}
    if engine.needs_shapes:
        needs[SHAPES] = SHAPES
    if not isinstance(engine, WorkspaceEngine) or variant.workspace not in SWEPT:
        return Step(variant.artifact, Build(engine=engine, device=variant.device), needs)
    point = SWEPT.index(variant.workspace)
    needs[UNLIMITED] = StepRef("build", replace(variant.name, workspace=MAX))
    if point:
        needs[SMALLEST] = StepRef("build", replace(variant.name, workspace=SWEPT[0]))
    task = BuildWithin(engine=engine, device=variant.device, point=point, points=len(SWEPT))
    return Step(variant.artifact, task, needs)


def _own_measurements(
    recipe: Recipe, variant: Variant, baseline: VariantName, graph: StepRef | None
) -> tuple[Variant, list[Step]]:
    """Plan what is measured of one variant alone."""
    variant, steps = measurements(recipe, variant, graph)
    if quality := quality_step(recipe, variant, baseline):
        steps.insert(0, replace(quality, inputs={**_measured_needs(variant), **quality.inputs}))
        variant = replace(variant, quality=quality.id)
    return variant, steps


def measurements(
    recipe: Recipe, variant: Variant, graph: StepRef | None, again: str = ""
) -> tuple[Variant, list[Step]]:
    """Plan what is measured of a variant alone but its quality; ``again`` is new for measurements made anew.

    ``graph`` is the step of the ONNX graph that its engine was built from, or that stands for its module.
    """
    steps, device = [], variant.device
    if recipe.measure.memory:
        memory = Memory(
            engine=variant.engine, device=device, limit_bytes=recipe.measure.memory_limit_bytes, again=again
        )
        steps.append(
            Step(StepRef("memory", variant.name), memory, _measured_needs(variant), unavailable=variant.unavailable)
        )
        variant = replace(variant, memory=steps[-1].id)
    counted = variant.artifact if variant.engine.shows_graph else graph
    if recipe.measure.limits and counted:
        work = CountWork(engine=variant.engine, device=device)
        needs = {**_measured_needs(variant), "model": counted}
        steps.append(Step(StepRef("work", variant.name), work, needs, unavailable=variant.unavailable))
        variant = replace(variant, work=steps[-1].id)
    if recipe.measure.profile:
        profile = ProfileVariant(variant=variant.id, engine=variant.engine, device=device, again=again)
        wants = {GRAPH: graph} if graph and variant.engine.consumes == "onnx" else {}
        step = Step(
            StepRef("profile", variant.name), profile, _measured_needs(variant), wants, unavailable=variant.unavailable
        )
        steps.append(step)
        variant = replace(variant, profile=step.id)
    return variant, steps


def limits_steps(recipe: Recipe, device: Device) -> list[Step]:
    """Plan to measure what the device can do at best, where that was asked for."""
    return [Step(LIMITS, DeviceRates(device=device))] if recipe.measure.limits else []


def _measured_needs(variant: Variant) -> dict[str, StepRef]:
    needs = {"model": variant.artifact, "reference": REFERENCE}
    return {**needs, VERIFIED: variant.verified[-1]} if variant.verified else needs


def quality_step(recipe: Recipe, variant: Variant, baseline: VariantName) -> Step | None:
    """Plan to work out the metric of a variant, where there is data for it."""
    if not recipe.data:
        return None
    task = Quality(
        engine=variant.engine,
        device=variant.device,
        data=recipe.data,
        data_options=recipe.data_options,
        samples=recipe.eval_samples,
        metric=recipe.metric,
        batch=max(recipe.batch),
        largest_batch=_largest_batch(recipe, variant.engine),
        seed=recipe.seed,
    )
    step = StepRef("quality", variant.name)
    if variant.name == baseline:  # nothing is lacking for it: what it answers is also what searches aim at
        return Step(step, task, {"model": variant.artifact})
    needs = {"model": variant.artifact, BASELINE: StepRef("quality", baseline)}
    return Step(step, task, needs, unavailable=variant.unavailable)


def _largest_batch(recipe: Recipe, engine: Engine) -> int:
    """Return the largest batch that an engine is sure to take: of its range, or any where none limits it."""
    if asked := recipe.ranges.get("batch"):
        return asked.max
    return max(recipe.batch) if engine.needs_shapes else max(*recipe.batch, _BATCH_OF_JUDGING)


def latency_step(recipe: Recipe, variants: list[Variant], again: str = "") -> Step:
    """Measure all variants together that can run on the baseline's device; ``again`` is new for one made anew."""
    device = variants[0].device
    variants = [variants[0], *(one for one in variants[1:] if device.kind in one.engine.kinds and not one.unavailable)]
    asked = recipe.measure
    settings = LatencySettings(
        precision=asked.precision,
        time_limit_seconds=asked.seconds,
        concurrency=tuple(sorted(set(asked.concurrency))),
        memory_limit_bytes=asked.memory_limit_bytes,
        seed=recipe.seed,
    )
    task = Latency(
        engines={variant.id: variant.engine for variant in variants},
        device=device,
        settings=settings,
        batches=len(recipe.batch),
        dense={variant.id: variant.dense for variant in variants if variant.dense},
        most=recipe.largest_batch if asked.sweep else None,
        again=again,
    )
    needs = {variants[0].id: variants[0].artifact, "reference": REFERENCE}
    wants = {variant.id: variant.artifact for variant in variants[1:]}
    wants |= {f"{variant.id} {VERIFIED}": (variant.artifact, *variant.verified)[-1] for variant in variants[1:]}
    return Step(LATENCY, task, needs, wants, unavailable=variants[0].unavailable)


def first_steps(resolved: ResolvedRecipe) -> tuple[Step, Step]:
    """Plan to load the model, and to have it answer: the reference."""
    recipe, source = resolved.recipe, resolved.source
    load = Step(LOAD, load_task(recipe, source), required=True)
    return load, Step(REFERENCE, _sample(recipe, source), {"model": LOAD}, required=True)


def in_time(steps: Sequence[Step], limit_seconds: float | None, batch_sizes: int) -> list[Step]:
    """Limit the starts of sessions to a quarter of the time, all batch sizes together: one may hang."""
    if limit_seconds is None:
        return list(steps)
    return [_limit_start(step, _SHARE_TO_START * limit_seconds / batch_sizes) for step in steps]


def _limit_start(step: Step, seconds: float) -> Step:
    """Limit the time that sessions take to start; it is no part of what is measured, so keys stay."""
    if isinstance(step.task, Memory):
        limit = min(step.task.time_limit_seconds, seconds)
        return replace(step, task=step.task.model_copy(update={"time_limit_seconds": limit}))
    if not isinstance(step.task, Latency):
        return step
    settings = step.task.settings
    changed = settings.model_copy(update={"start_limit_seconds": min(settings.start_limit_seconds, seconds)})
    return replace(step, task=step.task.model_copy(update={"settings": changed}))
