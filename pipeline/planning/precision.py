"""The part of a plan that leads from the float graph to one in another precision.

graph ─ [opset] ─┬─ [calibrate ─ shift] ─ [calibrate ─ equalize] ─ [calibrate ─ smooth] ─┬─ precision-P ── verify
                 └──── calibrate ─ sensitivity ─ search-1 ─ … ─ search-N ─ assign ───────┘

For a variant that is trained: … search-N ─ assign-everything ─ quantize ─ precision-P-qat ── verify
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from enginesmith.calibration.ranges import METHODS
from enginesmith.pipeline.engines import engine_class, simulation
from enginesmith.pipeline.passes import passes_for
from enginesmith.pipeline.passes.base import PrecisionPass, PrecisionRequest
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.planning.plan import REFERENCE, SHAPES, Step, StepRef, Variant, verify_step
from enginesmith.pipeline.planning.variants import ResolvedRecipe
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.build import Build, Transform
from enginesmith.pipeline.tasks.calibrate import Calibrate, Feeder
from enginesmith.pipeline.tasks.finetune import TEACHER, Recover, TrainGraph
from enginesmith.pipeline.tasks.graph_forms import MODEL, MULTIPLIED, RESCALED, Rescale, Sensitivity
from enginesmith.pipeline.tasks.mixed_precision import (
    ASSIGNMENT,
    BEFORE,
    FLOAT,
    Assign,
    Goal,
    LowerForm,
    Search,
    trial_role,
)
from enginesmith.pipeline.tasks.nncf import Preset, QuantizeWithNncf
from enginesmith.pipeline.tasks.quality import BASELINE

_RANKING_SAMPLES = 16
"""Samples that groups are ranked by: an order needs fewer than ranges do, and everything is computed twice."""
_LEAST_SHARE = 0.05
"""Share of the multiply-adds below which a precision that nobody listed gains too little to be tried."""
R = TypeVar("R", bound=Recover)
_FIRST_METHODS = ("mse", *(method for method in METHODS if method != "mse"))


@dataclass(frozen=True)
class Lowered:
    """A graph in another precision: the step that makes it, and the steps beside it."""

    graph: StepRef
    checks: tuple[StepRef, ...]
    steps: tuple[Step, ...]
    calibration: StepRef
    assignment: StepRef | None = None
    search: tuple[StepRef, ...] = ()
    recovered: tuple[StepRef, ...] = ()


def lower_precision(resolved: ResolvedRecipe, variant: Variant, graph: StepRef, quality: Step | None) -> Lowered:
    """Plan the steps from the float graph ``graph`` to the precision of a variant.

    ``quality`` finds the metric on the variant's engine, where there is data for it.
    """
    assert variant.lowering is not None
    recipe = resolved.recipe
    name, kind = variant.lowering, KINDS[variant.lowering]
    trained = variant.name.quantizer == "qat"
    if variant.name.quantizer and not trained:
        return _lower_by_nncf(resolved, variant, graph)
    choice = recipe.quantization.placement
    placement = (variant.engine if choice == "auto" else engine_class(choice)).placement
    request = PrecisionRequest(name, placement, variant.engine.weight_bits(variant.device))
    given = _prepare_graph(resolved, request, graph)
    (step,) = passes_for("precision", recipe, request=request)
    assert isinstance(step, PrecisionPass)
    metric = quality if quality and recipe.budgets.max_drop is not None else None
    searched_for = kind.searched or (kind.lowered and recipe.searches_lowered)
    subject = (name, variant.engine.name) if searched_for else (name,)
    graph_there = StepRef("quantize" if trained else "precision", *subject)
    needs = {"model": given.graph, "ranges": given.calibration}
    steps: list[Step] = list(given.steps)
    searched: tuple[StepRef, ...] = ()
    assign: StepRef | None = None
    rescaled: dict[str, StepRef] = {}
    if searched_for:
        goal = Goal(
            threshold=kind.threshold,
            min_sqnr_db=recipe.min_sqnr_db,
            max_drop=recipe.budgets.max_drop,
            quality=metric.task if metric else None,
            simulation=simulation(),
        )
        more = list(_search(recipe, variant, request, step, goal, given, graph, subject, metric))
        steps += more
        trials = [step for step in more if isinstance(step.task, Search)]
        rescaled = trials[0].optional_inputs
        searched, assign = tuple(step.id for step in trials), more[-1].id
        needs["assignment"] = assign
    casts = variant.casts and searched_for
    lower = LowerForm(step=step, casts=casts) if rescaled or casts else Transform(step=step)
    steps.append(Step(graph_there, lower, needs, rescaled))
    recovered: tuple[StepRef, ...] = ()
    if trained:
        assert assign is not None
        needs = {MODEL: graph_there, TEACHER: given.graph, ASSIGNMENT: assign, REFERENCE: REFERENCE}
        graph_there = StepRef("precision", *subject, variant.name.quantizer)
        steps.append(Step(graph_there, train_task(recipe, TrainGraph), needs, rescaled))
        recovered, searched = (graph_there,), ()  # what it lost was measured before it was trained
    steps.append(verify_step(recipe, graph_there, graph_there, simulation(), Device(), kind.threshold))
    return Lowered(
        graph=graph_there,
        checks=(*given.checks, steps[-1].id),
        steps=tuple(steps),
        calibration=given.calibration,
        assignment=assign,
        search=searched,
        recovered=recovered,
    )


def train_task(recipe: Recipe, kind: type[R], turns: int = 1, **fields: object) -> R:
    """Make the task that trains a changed model back; ``turns`` is how often that is done, in the time for all."""
    return kind(
        options=recipe.recovery.model_copy(update={"seconds": recipe.recovery.seconds / turns}),
        data=recipe.calibration_data,
        data_options=recipe.options_for("calibration"),
        metric=recipe.metric,
        seed=recipe.seed,
        max_drop=recipe.budgets.max_drop if recipe.variants == "found" else None,
        device=recipe.where,
        **fields,
    )


def _lower_by_nncf(resolved: ResolvedRecipe, variant: Variant, graph: StepRef) -> Lowered:
    """Plan NNCF's quantization of the float graph, with the calibration data that enginesmith's own would have."""
    recipe, (graph, checks, steps) = resolved.recipe, _convert_opset(resolved, PrecisionRequest("int8"), graph)
    bits = recipe.quantization.weight_bits or variant.engine.weight_bits(variant.device)
    preset: Preset = "performance" if variant.engine.prefers_signed(variant.device) else "mixed"
    task = QuantizeWithNncf(
        feeder=feeder(recipe),
        weight_bits=bits,
        preset=preset,
        keep=recipe.quantization.keep,
        external_data_bytes=recipe.export.external_data_bytes,
    )
    name = StepRef("precision", variant.precision, variant.name.quantizer, preset, f"w{bits}")
    check = verify_step(recipe, name, name, simulation(), Device(), KINDS["int8"].threshold)
    steps = (*steps, Step(name, task, {"model": graph, REFERENCE: REFERENCE}), check)
    return Lowered(name, (*checks, check.id), steps, calibration=name)


def feeder(recipe: Recipe) -> Feeder:
    """Say where calibration's feeds come from."""
    options = recipe.options_for("calibration")
    return Feeder(data=recipe.calibration_data, samples=recipe.samples, seed=recipe.seed, options=options)


def _convert_opset(
    resolved: ResolvedRecipe, request: PrecisionRequest, graph: StepRef
) -> tuple[StepRef, tuple[StepRef, ...], tuple[Step, ...]]:
    """Plan to convert a float graph that is too old for a precision; return the graph, its checks, and the steps."""
    (step,) = passes_for("opset", resolved.recipe, request=request)
    least = KINDS[request.precision].opset
    if resolved.given_opset >= least:
        return graph, (), ()
    name = StepRef(step.step_name, least)
    check = verify_step(resolved.recipe, name, name, simulation(), Device(), "fp32")
    return name, (check.id,), (Step(name, Transform(step=step), {"model": graph}), check)


def _prepare_graph(resolved: ResolvedRecipe, request: PrecisionRequest, graph: StepRef) -> Lowered:
    """Plan the passes that make a float graph easier to quantize, each followed by ranges of its own."""
    recipe, (converted, checks, conversion_steps) = resolved.recipe, _convert_opset(resolved, request, graph)
    ranges = _calibrate(recipe, converted, StepRef("calibrate", *([converted] if converted != graph else [])))
    prepared = Lowered(converted, checks, (*conversion_steps, ranges), ranges.id)
    for step in passes_for("rescale", recipe, request=request):
        before = prepared.graph
        name = StepRef(step.step_name) if before == graph else StepRef(step.step_name, before)
        transform = Step(name, Transform(step=step), {"model": before, "ranges": prepared.calibration})
        check = verify_step(recipe, name, name, simulation(), Device(), "fp32")
        ranges = _calibrate(recipe, name, StepRef("calibrate", name))
        steps = (*prepared.steps, transform, check, ranges)
        prepared = Lowered(name, (*prepared.checks, check.id), steps, ranges.id)
    return prepared


def _calibrate(recipe: Recipe, graph: StepRef, name: StepRef) -> Step:
    return Step(name, _calibrate_task(recipe), {"model": graph, REFERENCE: REFERENCE})


def _calibrate_task(recipe: Recipe) -> Calibrate:
    return Calibrate(feeder=feeder(recipe), percentile=recipe.quantization.percentile)


def _search(
    recipe: Recipe,
    variant: Variant,
    request: PrecisionRequest,
    step: PrecisionPass,
    goal: Goal,
    given: Lowered,
    graph: StepRef,
    subject: tuple[str, ...],
    quality: Step | None,
) -> Iterator[Step]:
    """Plan the ranking by sensitivity, the search, and the assignment that comes of it.

    A graph that is lowered as a whole has no ranges to choose, and its speed is not compared with that of others: if
    everything passes, one trial is enough.
    """
    options, engine, device = recipe.quantization, variant.engine, variant.device
    precision = KINDS[step.precision]
    needs: dict[str, StepRef] = {"model": given.graph, "ranges": given.calibration, REFERENCE: REFERENCE}
    few = feeder(recipe).model_copy(update={"samples": min(recipe.samples, _RANKING_SAMPLES)})
    least = _LEAST_SHARE if recipe.variants == "found" else 0.0
    measured = step if precision.lowered else step.rounding_inputs()
    ranking = Sensitivity(step=measured, feeder=few, least_share=0.0 if precision.lowered else least)
    bits = options.weight_bits or engine.weight_bits(device)
    alike = ("symmetric" if step.placement == "inputs" else "asymmetric", f"w{bits}")
    ref = StepRef("sensitivity", step.precision, *(() if precision.lowered else alike))  # engines share it
    sensitivity = Step(ref, ranking, dict(needs))
    yield sensitivity
    needs["sensitivity"] = sensitivity.id
    forms: dict[str, StepRef] = {}
    for form, kind, task in _rescale(recipe, request, ranking, outputs=_round_outputs(recipe, step)):
        rescale = Step(sensitivity.id.with_kind(kind), task, dict(needs), dict(forms))
        yield rescale
        forms[form] = rescale.id
    if quality is not None:
        needs[BASELINE] = quality.inputs[BASELINE]
    runs_here = not variant.unavailable and (precision.lowered or step.placement == engine.placement)
    if runs_here and engine.needs_shapes:
        needs[SHAPES] = SHAPES
    if runs_here and not precision.lowered:  # with pairs elsewhere, its speed says nothing
        rest = KINDS[step.precision].rest
        casts = () if rest == "fp32" else (rest,)  # the engine may cast the float graph, and is none in fp32 then
        untouched = StepRef("build", replace(variant.name, precision="fp32"), *casts)
        float_build = Step(untouched, Build(engine=engine, device=device), {"model": graph})
        if engine.needs_shapes:
            float_build = replace(float_build, inputs={**float_build.inputs, SHAPES: SHAPES})
        yield float_build
        needs[FLOAT] = float_build.id
    methods: tuple[str, ...] = ("",) if precision.lowered else (step.method,)
    if precision.calibrated and options.ranges == "auto":
        methods = _FIRST_METHODS
    choosable = step.placement == engine.placement and precision.calibrated
    signs = (True, False) if choosable and engine.prefers_signed(device) else (False,)
    correctable = precision.calibrated and options.ranges == "auto" and not options.bias_correction
    corrections = (False, True) if correctable else (options.bias_correction and not precision.lowered,)
    keep = () if precision.lowered else options.keep  # the pass itself keeps any nodes, not only groups
    trial = partial(
        Search, step=step, engine=engine, device=device, goal=goal, signs=signs, corrections=corrections, keep=keep,
        methods=methods, casts=variant.casts, max_size_bytes=recipe.budgets.max_size_bytes, runs_here=runs_here,
    )  # fmt: skip
    trained = variant.name.quantizer == "qat"
    count = options.search_steps
    if "own" not in options.quantizers:  # for training alone, each form is tried with everything in int8
        count = len(forms) + 1
    trials: dict[str, StepRef] = {}
    for index in range(1, count + 1):
        last = Step(StepRef("search", *subject, index), trial(), dict(needs), forms)
        yield last
        needs[BEFORE] = trials[trial_role(index)] = last.id
    first = trials.pop(trial_role(1))
    if trained:
        subject = (*subject, "everything")
    to_train = ("needed" if recipe.variants == "found" else "asked") if trained else ""
    assign = Assign(step=step, keep=keep, to_train=to_train, casts=variant.casts)
    needs = {trial_role(1): first, "sensitivity": sensitivity.id}
    later = {**forms, **trials}  # a trial that fails, or that no time is left for, ends the search and not the variant
    yield Step(StepRef("assign", *subject), assign, needs, later)


def _round_outputs(recipe: Recipe, step: PrecisionPass) -> bool:
    """Tell whether one of the recipe's engines rounds all outputs of convolutions: they share the rescaled graphs."""
    auto = recipe.quantization.placement == "auto"
    placements = {engine_class(name).placement for name in recipe.engines} if auto else {step.placement}
    return any(step.model_copy(update={"placement": each}).rounds_outputs for each in placements)


def _rescale(
    recipe: Recipe, request: PrecisionRequest, ranking: Sensitivity, *, outputs: bool
) -> Iterator[tuple[str, str, Rescale]]:
    """Plan the forms of the graph with rescaled channels, each with the kind of its step.

    There are none where the recipe itself says how to rescale, or the data are made up.
    """
    given = recipe.quantization
    by_hand = given.shift or given.equalize or given.smooth is not None
    if by_hand or recipe.calibration_data is None or not KINDS[request.precision].calibrated:
        return
    for form, kind, options in (
        (RESCALED, "rescale", {"shift": True, "equalize": True, "smooth": "auto"}),
        (MULTIPLIED, "multiply", {"smooth": "auto", "smooth_insert": True}),
    ):
        new_recipe = recipe.model_copy(update={"quantization": given.model_copy(update=options)})
        if steps := tuple(passes_for("rescale", new_recipe, request=request)):
            task = Rescale(
                steps=steps,
                calibration=_calibrate_task(recipe),
                sensitivity=ranking,
                only_weak=form == MULTIPLIED,
                outputs=outputs,
            )
            yield form, kind, task
