"""The part of a plan that measures all variants briefly, so that only the fastest are measured in full.

build-V ── verify-V ─┬─ [choice-V] ── race ── stay-V ─┬─ [tune-V ── verify-V-tuned] ─┬─ memory-V, quality-V
                     └────────────────┘               └──────────────────────────────┴─ latency

What takes long to make waits for a first race of all others: race-first ── stay-V-first ── build-V ── …
So does a pruned model. Nothing is made of it if it loses too much: prune-P ── recover-P ── choice-P ── stay-V-P-first
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from enginesmith.pipeline.measure.rows import RaceRow
from enginesmith.pipeline.planning.plan import REFERENCE, Plan, Step, StepRef, Variant, leading_to, tune_step
from enginesmith.pipeline.planning.prosecution import keep_seconds
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.tasks.measure import VERIFIED
from enginesmith.pipeline.tasks.mixed_precision import ASSIGNMENT, RIVAL, Search
from enginesmith.pipeline.tasks.race import CHOICE, EARLIER, PRUNED_CHOICE, RACE, STAY, Race, Stay
from enginesmith.pipeline.tasks.verify import Verify

_MOST = 3
"""Variants that are measured in full."""
_SECONDS_EACH = 1.5
"""Time of a race for each variant, all laps together."""
_STARTING_SECONDS = 5.0
"""Time in which the sessions of the latencies start, at each batch size, on a busy machine."""
_TUNE_SECONDS = 10.0
"""Longest time for the options of one variant."""
_MOST_TRAINING = 0.5
"""Share of the time that was given which training in int8 may take."""
_RACING, _TUNING, _MEASURING, _JUDGING = 0.1, 0.1, 0.1, 0.15
"""Largest shares of the time that was given: of the race, of the options, of the latencies, of memory and accuracy."""
_LAST_SEARCH = 0.9
"""Share of the time that is left which the last search for a precision may take: its best trial has to be built."""


def mark_search(steps: Sequence[Step], variants: Sequence[Variant], first: Collection[StepRef]) -> list[Step]:
    """Mark the steps that end with the time in which variants are found.

    The ``first`` ones, and those that lead to one variant, a lossless one if there is any, do not: without them there
    is no result.
    """
    from_graph = [each for each in variants[1:] if each.engine.consumes == "onnx" and not each.unavailable]
    lasting = min(from_graph, key=lambda each: not _is_lossless(each), default=None)
    ends = (lasting.artifact, *lasting.verified) if lasting else ()
    needed = {*first, *leading_to(steps, ends)}
    return [replace(step, search=step.id not in needed) for step in steps]


def list_without_graph(plan: Plan, why_lost: Callable[[Variant], str]) -> list[StepRef]:
    """List the steps to one variant that takes no ONNX graph, once all that take one are lost, or if there are none.

    They do not end with the time in which variants are found either: without them there is no result.
    """
    requested = [variant for variant in plan.variants if not variant.reference]
    if not all(why_lost(variant) for variant in requested if variant.engine.consumes == "onnx"):
        return []
    others = [variant for variant in requested if variant.engine.consumes == "torch" and not why_lost(variant)]
    if not others:
        return []
    chosen = min(others, key=lambda variant: not _is_lossless(variant))
    return plan.leading_to([chosen.artifact, *chosen.verified])


def plan_race(
    recipe: Recipe,
    variants: Sequence[Variant],
    steps: Sequence[Step],
    graphs: Mapping[StepRef, StepRef],
    judge: Callable[[Variant], Step | None],
    kept: Collection[str],
) -> tuple[list[Variant], list[Step]]:
    """Plan the race of variants that run here, the first being eager, and what follows it for those that stay.

    Returns the variants and all steps. ``steps`` lead to the variants, and ``graphs`` has the graph that each engine is
    built from. ``judge`` makes the step that finds a variant's metric on the samples for choosing, where there are
    some. Variants that are ``kept`` are not dropped.
    """
    by_id = {step.id: step for step in steps}
    original, device = variants[0], variants[0].device
    racing = [variant for variant in variants[1:] if device.kind in variant.engine.kinds and not variant.unavailable]
    if not racing:  # nothing but eager was asked for, or nothing else runs here
        return [*variants], [*steps]
    choices = {variant.id: step for variant in racing if (step := _choice_step(recipe, variant, judge))}
    known = device.kind == "cpu"  # what compiling gains was measured there
    slow = [
        variant
        for variant in racing
        if recipe.variants == "found" and (variant.dense or (known and variant.engine.consumes == "torch"))
    ]
    quick = [variant for variant in racing if variant not in slow]
    race = _race_step(recipe, StepRef(RACE), racing, choices, kept)
    all_steps = [*steps, *(step for name, step in choices.items() if name in {variant.id for variant in quick})]
    if slow and quick:
        first = _race_step(recipe, StepRef(RACE, "first"), quick, choices, kept, slow, _cast(recipe, original, slow))
        gate = next((step for variant in slow if (step := _pruned_choice(original, variant, judge))), None)
        all_steps = _defer(all_steps, [original, *quick], slow, first, gate, recipe.budgets.max_drop)
        wants = {**race.optional_inputs, PRUNED_CHOICE: gate.id} if gate else race.optional_inputs
        race = replace(race, inputs={**race.inputs, EARLIER: first.id}, optional_inputs=wants)
    all_steps += [*(choices[variant.id] for variant in slow if variant.id in choices), race]
    if recipe.variants == "found" and recipe.speed_decides and recipe.objective != "throughput":
        all_steps = _add_rivals(all_steps, quick)
    if not slow and not any(variant.name.quantizer == "qat" for variant in racing):
        all_steps = _extend_last_search(all_steps)
    staying = {}
    for variant in racing:
        staying[variant.id], more = _after_race(recipe, variant, graphs, by_id)
        all_steps += more
    return [staying.get(variant.id, variant) for variant in variants], all_steps


def race_again(planned: Plan, dropped: Sequence[RaceRow], failed: Mapping[str, str]) -> Plan:
    """Plan races that go on from earlier ones of the run.

    Variants that ``dropped`` out on this machine, whose rows tell why, stay out. Nobody is dropped for those that
    ``failed`` after they had stayed: instead, all others are that share the stage which is named as their fault.
    """
    for stage in sorted({*failed.values()}):
        sharing = [v for v in planned.variants if not v.reference and stage in planned.leading_to([v.artifact])]
        blamed = next(name for name, fault in failed.items() if fault == stage)
        why = f"{stage} is wrong, as {blamed} showed"
        dropped = [*dropped, *(RaceRow(variant=v.id, lap=0, dropped=why) for v in sharing if v.id not in failed)]
    known = {"earlier": tuple(dropped), "failed": tuple(failed)}
    races = {step.id: step.task.model_copy(update=known) for step in planned.steps if isinstance(step.task, Race)}
    return replace(planned, steps=tuple(replace(step, task=races.get(step.id, step.task)) for step in planned.steps))


def _choice_step(recipe: Recipe, variant: Variant, judge: Callable[[Variant], Step | None]) -> Step | None:
    """Plan to find a variant's metric on the samples for choosing, unless a search ended with what passes on them."""
    known = recipe.budgets.max_drop is None or variant.search or _is_lossless(variant)
    if known or (judged := judge(variant)) is None:
        return None
    needs = {**judged.inputs, VERIFIED: variant.verified[-1]}
    return replace(judged, id=StepRef(CHOICE, variant.name), search=True, inputs=needs)


def _pruned_choice(original: Variant, variant: Variant, judge: Callable[[Variant], Step | None]) -> Step | None:
    """Plan to find the metric of a variant's pruned module, of which nothing is made if it loses too much."""
    module_steps = (*variant.pruned, *variant.recovered)
    if not module_steps:
        return None
    name = replace(original.name, changes=variant.name.changes)
    judged = judge(replace(original, name=name, artifact=module_steps[-1]))
    return judged and replace(judged, id=StepRef(CHOICE, name), search=True)


def _race_step(
    recipe: Recipe,
    ref: StepRef,
    racing: Sequence[Variant],
    choices: Mapping[str, Step],
    kept: Collection[str],
    unmade: Sequence[Variant] = (),
    originals: Sequence[Variant] = (),
) -> Step:
    limit = recipe.time_seconds
    task = Race(
        engines={variant.id: variant.engine for variant in (*racing, *originals)},
        device=racing[0].device,
        lossless=tuple(variant.id for variant in racing if _is_lossless(variant)),
        seconds=min(_SECONDS_EACH * len(racing), limit * _RACING if limit else float("inf")),
        most=_MOST if recipe.speed_decides else len(racing),
        by_speed=recipe.speed_decides,
        kept=tuple(variant.id for variant in (*racing, *unmade) if variant.id in kept),
        unmade={variant.id: _same_precision(variant, (*originals, *racing)) for variant in unmade if not variant.dense},
        dense={variant.id: variant.dense for variant in (*racing, *unmade) if variant.dense},
        originals=tuple(variant.id for variant in originals),
        max_drop=recipe.budgets.max_drop,
        largest=recipe.objective == "throughput",
    )
    wants: dict[str, StepRef] = {}
    for variant in racing:
        wants |= {variant.id: variant.artifact, f"{variant.id} {VERIFIED}": variant.verified[-1]}
        if variant.search and variant.assignment and recipe.budgets.max_drop is not None:
            wants[f"{variant.id} {ASSIGNMENT}"] = variant.assignment
    wants |= {f"{name} {CHOICE}": step.id for name, step in choices.items() if name in wants}
    return Step(ref, task, {REFERENCE: REFERENCE, **{variant.id: variant.artifact for variant in originals}}, wants)


def _cast(recipe: Recipe, original: Variant, slow: Sequence[Variant]) -> list[Variant]:
    """List the original, and the module cast to each other precision of the compiled variants, to judge those by."""
    originals = [original]
    precisions = {variant.engine.arithmetic for variant in slow if variant.engine.consumes == "torch"}
    for precision in sorted(precisions - {original.engine.arithmetic}):
        (config,) = type(original.engine).configurations(recipe, precision)
        originals.append(replace(original, name=replace(original.name, precision=precision), engine=config.engine))
    return originals


def _same_precision(variant: Variant, others: Sequence[Variant]) -> tuple[str, ...]:
    """List the other variants that compute in a compiled variant's precision, whichever way they came to it."""
    precision = variant.engine.arithmetic
    return tuple(other.id for other in others if precision == (other.lowering or other.engine.arithmetic))


def _defer(
    steps: Sequence[Step],
    quick: Sequence[Variant],
    slow: Sequence[Variant],
    first: Step,
    gate: Step | None,
    max_drop: float | None,
) -> list[Step]:
    """Let what is made for slow variants alone wait for a first race, which may drop them.

    The ``gate`` finds what the pruned module loses: what is made of that waits for the gate, too.
    """
    needed = leading_to(steps, [ref for variant in quick for ref in (variant.artifact, *variant.verified)])
    leading = {variant.id: leading_to(steps, (variant.artifact, *variant.verified)) for variant in slow}
    before = leading_to(steps, [gate.inputs["model"]]) if gate else set[str]()
    early, late, stays = list[Step](), list[Step](), dict[tuple[bool, tuple[str, ...]], StepRef]()
    for step in steps:
        owners = tuple(variant for variant in slow if step.id in leading[variant.id]) if step.id not in needed else ()
        if not owners:
            is_late = {done.id for done in late}.intersection(step.sources)  # audits follow what they look at
            (late if is_late else early).append(step)
            continue
        gated = gate if owners[0].dense and step.id not in before else None
        key = (gated is not None, tuple(variant.id for variant in owners))
        if key not in stays:
            subject = owners[0].name if len(owners) == 1 and step.id not in before else step.id
            stays[key] = StepRef(STAY, subject, "first")
            needs = {RACE: first.id}
            if gated:
                needs[CHOICE] = gated.id
                late += [gated] if gated not in late else []
            late.append(Step(stays[key], Stay(variants=key[1], max_drop=max_drop if gated else None), needs))
        late.append(replace(step, inputs={**step.inputs, STAY: stays[key]}))
    return [*early, first, *late]


def _extend_last_search(steps: Sequence[Step]) -> list[Step]:
    """Give the last search for a precision nearly all of the time that is left: nothing that takes long follows it."""
    trials = [step.id for step in steps if isinstance(step.task, Search)]
    last = {trial for trial in trials if trial.subject[:-1] == trials[-1].subject[:-1]}  # without their numbers
    more = {"time_share": _LAST_SEARCH}
    return [replace(step, task=step.task.model_copy(update=more)) if step.id in last else step for step in steps]


def _add_rivals(steps: Sequence[Step], racing: Sequence[Variant]) -> list[Step]:
    """Let searches on one engine end early where a lossless variant of another one is much faster."""
    lossless = [variant for variant in racing if _is_lossless(variant)]
    result = []
    for step in steps:
        if isinstance(step.task, Search) and step.task.runs_here:
            rivals = {each.id: each for each in lossless if each.engine.name != step.task.engine.name}
            wants = {
                role: ref
                for name, rival in rivals.items()
                for role, ref in (
                    (f"{RIVAL} {name}", rival.artifact),
                    (f"{RIVAL} {name} {VERIFIED}", rival.verified[-1]),
                )
            }
            task = step.task.model_copy(update={"rivals": {name: rival.engine for name, rival in rivals.items()}})
            step = replace(step, task=task, optional_inputs={**step.optional_inputs, **wants})
        result.append(step)
    return result


def _is_lossless(variant: Variant) -> bool:
    return variant.lowering is None and variant.dense is None and variant.engine.arithmetic == "fp32"


def _after_race(
    recipe: Recipe, variant: Variant, graphs: Mapping[StepRef, StepRef], by_id: Mapping[StepRef, Step]
) -> tuple[Variant, list[Step]]:
    """Plan what follows for one variant, if it is not dropped: its options are tuned, and it is verified with them."""
    check = by_id[variant.verified[-1]]
    reference = check.inputs[REFERENCE]
    stay = StepRef(STAY, variant.name)
    steps = [Step(stay, Stay(variants=(variant.id,)), {RACE: StepRef(RACE), VERIFIED: check.id, REFERENCE: reference})]
    graph = graphs.get(variant.artifact)
    on_cpu = variant.device.kind == "cpu"  # a variant on CUDA may share its engine with one that replays CUDA graphs
    if not on_cpu or graph is None or recipe.tune_seconds or not variant.engine.tunable_options(None, variant.device):
        return replace(variant, verified=(*variant.verified, stay)), steps
    limit = recipe.time_seconds or float("inf")
    seconds = min(_TUNE_SECONDS, limit * _TUNING / _MOST)
    assert isinstance(check.task, Verify)
    tune = tune_step(recipe, variant, graph, variant.artifact, seconds, check.task.precision)
    steps.append(replace(tune, inputs={**tune.inputs, REFERENCE: reference, STAY: stay}))
    again = StepRef("verify", variant.name, "tuned")
    steps.append(replace(check, id=again, inputs={**check.inputs, "model": tune.id}, search=False))
    return replace(variant, artifact=tune.id, verified=(*variant.verified[:-1], again)), steps


def searching_seconds(recipe: Recipe) -> float:
    """Return the time until the race begins, in which variants are made; 0 for a recipe without a limit.

    What prosecutions keep is left out. Training in int8 has its own time, at most half of the rest. Of what is left
    then, what measuring may take is kept.
    """
    seconds = (recipe.time_seconds or 0.0) - keep_seconds(recipe)
    trains = recipe.variants == "found" and "qat" in recipe.quantization.quantizers
    training = min(recipe.recovery.seconds, _MOST_TRAINING * seconds) if trains else 0.0
    rest = seconds - training
    options = min(_TUNING * rest, _MOST * _TUNE_SECONDS)
    latencies = min(_MEASURING * rest, (recipe.measure.seconds + _STARTING_SECONDS) * len(recipe.batch))
    return training + rest - (_RACING + _JUDGING) * rest - options - latencies


def measuring_seconds(recipe: Recipe) -> float:
    """Choose the time of one batch size, of which a limited time leaves a share."""
    seconds, limit = recipe.measure.seconds, recipe.time_seconds
    return seconds if limit is None else min(seconds, limit * _MEASURING / len(recipe.batch))
