"""A recipe becomes a tree of steps; variants that share a prefix share its steps.

load ─┬─ reference ─────────────────┬────────────────┬────────────┐
      └─ export ─┬─ simplify ─┬─ build-V ── verify-V ┴─ memory-V   └─ latency
                 └─ verify    └─ verify              └─ quality-V     (all variants together)
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from enginesmith.pipeline.engines import BASELINES, baseline, engine_class
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.engines.workspace import MAX, SWEPT, WorkspaceEngine
from enginesmith.pipeline.errors import MissingCapability, UsageError
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.passes import graph_passes
from enginesmith.pipeline.passes.quantize.precisions import KINDS, RANGES_PER_BATCH
from enginesmith.pipeline.planning.compression import DensePlan, compress
from enginesmith.pipeline.planning.plan import (
    LATENCY,
    LIMITS,
    LOAD,
    REFERENCE,
    REFERENCES_LATENCY,
    SHAPES,
    Plan,
    Step,
    StepRef,
    Variant,
    VariantName,
    audit_steps,
    tune_step,
    verify_step,
)
from enginesmith.pipeline.planning.precision import feeder, lower_precision
from enginesmith.pipeline.planning.prosecution import choose_seconds, prosecute_step
from enginesmith.pipeline.planning.race import mark_search, measuring_seconds, plan_race
from enginesmith.pipeline.planning.variants import ResolvedRecipe, list_references, list_variants
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import Task
from enginesmith.pipeline.tasks.build import SMALLEST, UNLIMITED, Build, BuildWithin, Refuse, Transform
from enginesmith.pipeline.tasks.load import Load, LoadEngine, LoadOnnx, Shapes
from enginesmith.pipeline.tasks.measure import GRAPH, VERIFIED, CountWork, DeviceRates, Latency, Memory, ProfileVariant
from enginesmith.pipeline.tasks.nncf import require_nncf
from enginesmith.pipeline.tasks.quality import BASELINE, Quality
from enginesmith.pipeline.tasks.tune import Tune
from enginesmith.pipeline.tasks.verify import Sample
from enginesmith.pipeline.tensors import BATCH

_MAY_LACK_EXAMPLE = ("file", "module", "pt2", "hf")
"""Forms of sources without an example of each input that ``--input`` may name."""
_BATCH_OF_JUDGING = 32
"""Samples that are judged together, where nothing says how large a batch may be."""


def plan(resolved: ResolvedRecipe, *, here: bool = True, kept: Collection[str] = ()) -> Plan:
    """Expand a recipe; ``here`` says whether its engines have to run on this machine.

    ``kept`` are variants that a race does not drop, as they were measured in full earlier.

    Raises:
        UsageError: the recipe asks for what does not go together.
        MissingCapability: none of its engines can be built here.
    """
    recipe, source = resolved.recipe, resolved.source
    engines = [name for name in recipe.engines if name != BASELINES["torch"]]  # as it is, the baseline is always there
    _check_source(resolved)
    steps = list(first_steps(resolved))
    first = {step.id for step in steps}
    graph = LOAD
    verified: tuple[StepRef, ...] = ()
    to_graph: list[Step] = []
    if any(engine_class(name).consumes == "onnx" for name in engines):
        graph, verified, to_graph = graph_steps(resolved)
        steps += to_graph
    if any(engine_class(name).needs_shapes for name in engines):
        steps.append(shapes_step(recipe))
    graphs = recipe.graph_modes("both" if recipe.where.kind == "cuda" else "off")
    candidates = list(list_variants(resolved, recipe.engines, here=here, graphs=graphs))
    if recipe.variants == "found":  # what promises most for the least time comes first
        candidates.sort(
            key=lambda each: (each.engine.consumes == "torch", each.lowering is not None, each.name.quantizer)
        )
    original = baseline_variant(resolved)
    if own := quality_step(recipe, original, original.name, for_search=True):
        steps.append(own)  # what searches compare their trials with
        first.add(own.id)
    planned = [_engine_steps(resolved, variant, graph, verified, original.name) for variant in candidates]
    dense, to_engines = [variant for variant, _ in planned], [step for _, more in planned for step in more]
    shared = frozenset((SHAPES, *([own.id] if own else ())))
    again = planned
    if recipe.variants == "found":  # compiling takes long, and gains little; a pruned model is trained once
        again = [
            (variant, more)
            for variant, more in planned
            if variant.engine.consumes == "onnx" and variant.name.quantizer != "qat"
        ]
    steps_again, dense_again = (step for _, more in again for step in more), (variant for variant, _ in again)
    dense_plan = DensePlan(graph, tuple(to_graph), tuple(steps_again), tuple(dense_again), shared)
    others, more = compress(resolved, dense_plan)
    variants, steps = [original, *dense, *others], [*steps, *to_engines, *more]
    if here:
        _check_buildable(engines, recipe.where)
        if any(variant.name.quantizer == "nncf" for variant in candidates):
            require_nncf()
    lacking = [variant.unavailable for variant in variants[1:]]
    if lacking and all(lacking):
        variants[0] = replace(original, unavailable=f"there is nothing to compare it with: {lacking[0]}")
    stands_for_it = graph if graph != LOAD or not source.is_torch else None
    built = (step for step in steps if isinstance(step.task, (Build, Tune)) and step.task.engine.consumes == "onnx")
    built_from = {step.id: step.inputs["model"] for step in built}
    if recipe.races:
        steps = mark_search(steps, variants, first)
        variants, steps = plan_race(
            recipe,
            variants,
            steps,
            built_from,
            lambda variant: quality_step(recipe, variant, original.name, for_search=True),
            kept,
        )
        built_from |= {step.id: step.inputs["model"] for step in steps if isinstance(step.task, Tune)}
    for variant in list_references(resolved, [variant.id for variant in candidates]):
        checked, more = _engine_steps(resolved, variant, graph, verified, original.name)
        variants.append(checked)
        steps += more
    beside = sum(not variant.reference for variant in variants[1:]) > 1
    for index, variant in enumerate(variants):
        seconds = choose_seconds(recipe, variant.device)
        if seconds and variant.verified and not variant.reference:
            required = recipe.prosecute_seconds is not None
            step = prosecute_step(resolved, steps, variant, seconds, required=required, beside=beside)
            steps.append(step)
            variant = replace(variant, verified=(*variant.verified, step.id), prosecuted=step.id)
        its_graph = built_from.get(variant.artifact, stands_for_it)
        variants[index], more = measurements(recipe, variant, its_graph, baseline=original.name)
        steps += more
    return complete_plan(recipe, steps, variants)


def complete_plan(recipe: Recipe, steps: Sequence[Step], variants: Sequence[Variant], again: str = "") -> Plan:
    """Add what is measured of the device and of all variants together; ``again`` is new for measurements made anew."""
    distinct: dict[str, Step] = {}
    for step in steps:
        distinct.setdefault(step.id, step)  # variants share what leads to them
    if recipe.measure.limits:
        distinct[LIMITS] = Step(LIMITS, DeviceRates(device=variants[0].device))
    if recipe.measure.latency or again:
        requested = [variant for variant in variants if not variant.reference]
        distinct[LATENCY] = _latency_step(LATENCY, recipe, requested, again)
        if references := [variant for variant in variants if variant.reference]:  # compiling takes their time alone
            ref = REFERENCES_LATENCY
            distinct[ref] = _latency_step(ref, recipe, [variants[0], *references], again)
    measured = (name if name in distinct else None for name in (LATENCY, REFERENCES_LATENCY, LIMITS))
    return Plan(tuple(distinct.values()), variants[0], tuple(variants[1:]), *measured)


def plan_loading(resolved: ResolvedRecipe) -> Plan:
    """Plan to load the model, and no more."""
    return Plan(first_steps(resolved)[:1], baseline_variant(resolved), (), None)


def _check_source(resolved: ResolvedRecipe) -> None:
    """Refuse a model that cannot become what is asked for.

    Raises:
        UsageError: it is a built engine, or a graph where a module is needed.
    """
    source, engines = resolved.source, resolved.recipe.engines
    if source.form == "engine":
        raise UsageError(
            f"{source.text} is a built engine, and there is nothing to optimize in it",
            "give the model it was built from; `benchmark` and `verify` take engines",
        )
    needs_module = [name for name in engines if engine_class(name).consumes == "torch"]
    if needs_module and not source.is_torch:
        raise UsageError(
            f"the engine {needs_module[0]!r} is made from a PyTorch module, and {source.text} is an ONNX file",
            "omit that engine, or give the model as file.py:factory",
        )


def _check_buildable(engines: Sequence[str], device: Device) -> None:
    """Refuse engines none of which can be built here for a device.

    Raises:
        MissingCapability: so it is; says why of the first one.
    """
    kinds = [engine_class(name) for name in engines]
    checks = [kind.buildable(device) for kind in kinds if kind.file_suffix or kind.kinds == ("cuda",)]
    if len(checks) == len(kinds) and checks and not any(check.ok for check in checks):
        raise MissingCapability(f"{engines[0]} cannot be built here: {checks[0].reason}", checks[0].remedy)


def load_task(recipe: Recipe, source: Source, *, exact: bool = True) -> Task:
    """Choose the task that makes the first artifact from MODEL; files that are judged themselves are not ``exact``."""
    if source.form == "engine":
        return LoadEngine(source=source)
    if not source.is_torch:
        sizes = _list_usual_sizes(recipe)
        return LoadOnnx(source=source, inputs=recipe.specs, processing=recipe.processing, sizes=sizes, exact=exact)
    return Load(
        source=source,
        inputs=recipe.specs,
        seed=recipe.seed,
        allow_pickle=recipe.allow_pickle,
        processing=recipe.processing,
        widen=recipe.where.kind == "cpu",
        **_choose_example(recipe, source),
    )


def _choose_example(recipe: Recipe, source: Source) -> dict[str, Any]:
    """Choose the data that an example is taken from, for sources that bring none, else the sizes that it is drawn with.

    Data serve where they are what the model takes.
    """
    data = recipe.choice_data or recipe.calibration_data
    brings_none = source.form == "hf" or bool(recipe.inputs)
    if data is not None and brings_none and source.form != "saved" and not recipe.prepend:
        return {"data": data, "data_options": recipe.reading_options}
    return {"sizes": _list_usual_sizes(recipe)} if source.form in _MAY_LACK_EXAMPLE else {}


def _list_usual_sizes(recipe: Recipe) -> dict[str, int]:
    """List the usual sizes of dimensions that ``--input`` leaves open.

    Others are no part of the task, so that a model whose inputs are known stays loaded whatever ``--shape`` says.
    """
    symbols = {symbol for spec in recipe.specs for symbol in spec.symbols if symbol != BATCH}
    return {symbol: range_.opt for symbol, range_ in recipe.ranges.items() if symbol in symbols}


def baseline_of(source: Source) -> Engine:
    """Choose the engine that runs a model as it is given, for all others to be held against."""
    return baseline("torch" if source.is_torch else "onnx")


def baseline_variant(resolved: ResolvedRecipe) -> Variant:
    """Describe the given model as it is: the variant that all others are compared with."""
    source, device = resolved.source, resolved.recipe.where
    name = VariantName(BASELINES["torch"] if source.is_torch else "source")
    engine = baseline_of(source).as_shipped(device)
    return Variant(name, engine, resolved.given_precision, LOAD, device=device)


def graph_steps(resolved: ResolvedRecipe) -> tuple[StepRef, tuple[StepRef, ...], list[Step]]:
    """Plan the way from the loaded model to the graph of engines; each stage is verified as it is, unoptimized."""
    recipe = resolved.recipe
    runtime = baseline("onnx")
    steps, checks, parent = [], [], LOAD
    for graph_pass in graph_passes(recipe, "torch" if resolved.source.is_torch else "onnx"):
        name = StepRef("pass", graph_pass.step_name) if graph_pass.stage == "request" else StepRef(graph_pass.step_name)
        steps.append(Step(name, Transform(step=graph_pass), {"model": parent}))
        checks.append(verify_step(recipe, name, name, runtime, Device(), resolved.find_threshold(runtime)))
        parent = name
    return parent, tuple(check.id for check in checks), [*steps, *checks]


def _engine_steps(
    resolved: ResolvedRecipe, variant: Variant, graph: StepRef, checks: tuple[StepRef, ...], baseline: VariantName
) -> tuple[Variant, list[Step]]:
    """Plan the precision, the engine, and the check that stands for all checks before it too."""
    recipe, engine, device = resolved.recipe, variant.engine, variant.device
    if engine.runs_module():
        check = verify_step(recipe, variant.name, LOAD, engine, device, stage="engine")
        return _refuse(replace(variant, verified=(check.id,)), [check])
    steps: list[Step] = []
    threshold, own, built = resolved.find_threshold(engine), dict[str, Any](), variant.as_built
    takes_module = engine.consumes == "torch"
    if takes_module:
        graph, checks = LOAD, ()
    if variant.lowering:
        lowered = lower_precision(resolved, built, graph, quality_step(recipe, built, baseline, for_search=True))
        graph, checks, threshold = lowered.graph, (*checks, *lowered.checks), KINDS[variant.lowering].threshold
        steps += lowered.steps
        own = {
            "calibration": lowered.calibration,
            "assignment": lowered.assignment,
            "search": lowered.search,
            "recovered": lowered.recovered,
        }
    build = build_step(recipe, built, graph)
    steps.append(build)
    if recipe.tune_seconds and built.engine.tunable_options(None, device):
        tune = tune_step(recipe, built, graph, build.id, recipe.tune_seconds, threshold)
        own["artifact"] = tune.id
        steps.append(tune)
        built = replace(built, artifact=tune.id)
    cast = variant.casts or (variant.lowering is None and variant.precision in engine.casts)  # the graph tells nothing
    audits = [] if takes_module or cast else audit_steps(built, graph)
    check = verify_step(recipe, variant.name, built.artifact, engine, device, threshold, stage="engine")
    needs: dict[str, StepRef] = {**check.inputs, **{str(name): name for name in checks}}
    check = replace(check, inputs=needs, unavailable=variant.unavailable)
    own |= {"audits": tuple(step.id for step in audits), "verified": (*checks, check.id)}
    return _refuse(replace(variant, **own), [*steps, *audits, check])


def _refuse(variant: Variant, steps: list[Step]) -> tuple[Variant, list[Step]]:
    """Let all steps of a variant that cannot be had wait for one that says why, and fails."""
    if not variant.refused:
        return variant, steps
    first = Step(StepRef("refuse", variant.name), Refuse(reason=variant.refused))
    waiting = [replace(step, inputs={**step.inputs, "possible": first.id}) for step in steps]
    return replace(variant, verified=(first.id, *variant.verified)), [first, *waiting]


def shapes_step(recipe: Recipe) -> Step:
    """Plan to work out the shape ranges that engines are built for."""
    return Step(
        SHAPES,
        Shapes(ranges=recipe.ranges, batches=recipe.batch, batches_given=recipe.batches_given),
        {"model": LOAD},
    )


def build_step(recipe: Recipe, variant: Variant, graph: StepRef) -> Step:
    """Plan to build a variant's engine from a step's graph."""
    engine = variant.engine
    needs = {"model": graph}
    if engine.needs_shapes:
        needs[SHAPES] = SHAPES
    lacking = "" if engine.built_elsewhere else variant.unavailable
    if not isinstance(engine, WorkspaceEngine) or variant.workspace not in SWEPT:
        ranges = recipe.ranges if engine.consumes == "torch" else {}
        build = Build(engine=engine, device=variant.device, ranges=ranges)
        return Step(variant.artifact, build, needs, unavailable=lacking)
    point = SWEPT.index(variant.workspace)
    needs[UNLIMITED] = StepRef("build", replace(variant.name, workspace=MAX))
    if point:
        needs[SMALLEST] = StepRef("build", replace(variant.name, workspace=SWEPT[0]))
    task = BuildWithin(engine=engine, device=variant.device, point=point, points=len(SWEPT))
    return Step(variant.artifact, task, needs, unavailable=lacking)


def measurements(
    recipe: Recipe, variant: Variant, graph: StepRef | None, again: str = "", baseline: VariantName | None = None
) -> tuple[Variant, list[Step]]:
    """Plan what is measured of a variant alone; its quality only where there is a ``baseline`` to hold it against.

    ``graph`` is the step of the ONNX graph that its engine was built from, or that stands for its module; ``again`` is
    new for measurements made anew.
    """
    options, engine, device = recipe.measure, variant.engine, variant.device
    needs: dict[str, StepRef] = {"model": variant.artifact, REFERENCE: REFERENCE}
    if variant.compared:
        needs[VERIFIED] = variant.compared
    steps: dict[str, Step] = {}
    """By the variant's field that refers to it."""

    def add(kind: str, task: Task, model: StepRef = variant.artifact, wants: StepRef | None = None) -> None:
        step = StepRef(kind, variant.name)
        graphs = {GRAPH: wants} if wants else {}
        steps[kind] = Step(step, task, {**needs, "model": model}, graphs, unavailable=variant.unavailable)

    if baseline and (quality := quality_step(recipe, variant, baseline)):
        steps["quality"] = replace(quality, inputs={**needs, **quality.inputs})
    if options.memory:
        add("memory", Memory(engine=engine, device=device, limit_bytes=options.memory_limit_bytes, again=again))
    if options.limits and (counted := variant.artifact if engine.shows_graph else graph):
        add("work", CountWork(engine=engine, device=device), counted)
    if options.profile:
        profile = ProfileVariant(variant=variant.id, engine=engine, device=device, again=again)
        add("profile", profile, wants=graph if engine.consumes == "onnx" else None)
    refs: dict[str, Any] = {name: step.id for name, step in steps.items()}
    return replace(variant, **refs), list(steps.values())


def quality_step(recipe: Recipe, variant: Variant, baseline: VariantName, *, for_search: bool = False) -> Step | None:
    """Plan to work out the metric of a variant, where there is data for it; ``for_search``: on what searches judge by.

    Of data that was split, these are other samples than those that the reported drop is measured on.
    """
    if not recipe.evaluation_data:
        return None
    data, options = recipe.evaluation_data, recipe.options_for("judgement")
    kind = "quality"
    if for_search and recipe.data and recipe.budgets.max_drop is not None:
        data, options, kind = recipe.data, recipe.options_for("choice"), "choice"
    most = max(recipe.batch) if variant.engine.needs_shapes else max(*recipe.batch, _BATCH_OF_JUDGING)
    task = Quality(
        engine=variant.engine.exact() if variant.name == baseline else variant.engine,
        device=variant.device,
        data=data,
        data_options=options,
        samples=recipe.eval_samples,
        metric=recipe.required_metric,
        batch=max(recipe.batch),
        largest_batch=most,
        ranges=recipe.ranges,
        rows_apart=variant.lowering not in RANGES_PER_BATCH,
        seed=recipe.seed,
    )
    step = StepRef(kind, variant.name)
    if variant.name == baseline:  # after the reference, which tries the metric; what it answers is what searches aim at
        return Step(step, task, {"model": variant.artifact, REFERENCE: REFERENCE})
    needs = {"model": variant.artifact, BASELINE: StepRef(kind, baseline), REFERENCE: REFERENCE}
    return Step(step, task, needs, unavailable=variant.unavailable)


def _latency_step(ref: StepRef, recipe: Recipe, variants: Sequence[Variant], again: str) -> Step:
    device = variants[0].device
    variants = [
        variants[0],
        *(variant for variant in variants[1:] if device.kind in variant.engine.kinds and not variant.unavailable),
    ]
    options = recipe.measure
    settings = LatencySettings(
        precision=options.precision,
        time_limit_seconds=measuring_seconds(recipe),
        concurrency=tuple(sorted(set(options.concurrency))),
        memory_limit_bytes=options.memory_limit_bytes,
        seed=recipe.seed,
    )
    task = Latency(
        engines={variant.id: variant.engine for variant in variants},
        device=device,
        settings=settings,
        batches=len(recipe.batch),
        dense={variant.id: variant.dense for variant in variants if variant.dense},
        most=recipe.largest_batch if options.sweep else None,
        again=again,
    )
    needs = {variants[0].id: variants[0].artifact, "reference": REFERENCE}
    wants = {variant.id: variant.artifact for variant in variants[1:]}
    wants |= {f"{variant.id} {VERIFIED}": variant.compared or variant.artifact for variant in variants[1:]}
    return Step(ref, task, needs, wants, unavailable=variants[0].unavailable)


def first_steps(resolved: ResolvedRecipe) -> tuple[Step, Step]:
    """Plan to load the model, and to have it answer: the reference."""
    recipe, source = resolved.recipe, resolved.source
    sample = Sample(
        engine=baseline_of(source),
        ranges=recipe.ranges,
        batches=recipe.batch,
        batches_given=recipe.batches_given,
        data=recipe.choice_data,
        data_options=recipe.options_for("choice"),
        held_out=None if recipe.choice_data or not recipe.calibration_data else feeder(recipe),
        metric=recipe.required_metric,
        seed=recipe.seed,
    )
    load = Step(LOAD, load_task(recipe, source))
    return load, Step(REFERENCE, sample, {"model": LOAD})
