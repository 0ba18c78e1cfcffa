"""The part of a plan that measures all variants briefly, so that only the fastest are measured in full.

build-V ── verify-V ─┬─ [choice-V] ── race ── stay-V ─┬─ [tune-V ── verify-V-tuned] ─┬─ memory-V, quality-V
                     └────────────────┘               └──────────────────────────────┴─ latency

Engines that take long to make wait for a first race of all others: race-first ── stay-V-first ── build-V ── …
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from enginesmith.pipeline.planning.plan import REFERENCE, Step, StepRef, Variant, tune_step
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.tasks.measure import VERIFIED
from enginesmith.pipeline.tasks.race import CHOICE, EARLIER, RACE, STAY, Race, Stay
from enginesmith.pipeline.tasks.verify import Verify

_MOST = 3
"""Variants that are measured in full."""
_SECONDS_EACH = 1.5
"""Time of a race for each variant, all laps together."""
_TUNE_SECONDS = 10.0
"""Longest time for the options of one variant."""
_SEARCHING, _RACING, _TUNING, _MEASURING = 0.55, 0.1, 0.1, 0.1
"""Shares of the time that was given: until the race begins, of the race, of the options, of the latencies."""


def plan_race(
    recipe: Recipe,
    variants: Sequence[Variant],
    steps: Sequence[Step],
    graphs: Mapping[StepRef, StepRef],
    judge: Callable[[Variant], Step | None],
    kept: Collection[str] = (),
) -> tuple[list[Variant], list[Step]]:
    """Plan the race of variants that run here, the first being eager, and what follows it for those that stay.

    Returns the variants and all steps. ``steps`` lead to the variants, and ``graphs`` has the graph that each engine is
    built from. ``judge`` makes the step that finds a variant's metric on the samples for choosing, where there are
    some. Variants that are ``kept`` are not dropped.
    """
    by_id = {step.id: step for step in steps}
    original, device = variants[0], variants[0].device
    racing = [variant for variant in variants[1:] if device.kind in variant.engine.kinds and not variant.unavailable]
    choices = {variant.id: step for variant in racing if (step := _choice_step(recipe, variant, judge))}
    known = recipe.variants == "found" and device.kind == "cpu"  # what compiling gains was measured there
    slow = [variant for variant in racing if known and variant.engine.consumes == "torch"]
    quick = [variant for variant in racing if variant not in slow]
    race = _race_step(recipe, StepRef(RACE), racing, choices, kept)
    made = [*steps, *(step for name, step in choices.items() if name in {variant.id for variant in quick})]
    if slow and quick:
        first = _race_step(recipe, StepRef(RACE, "first"), quick, choices, kept, slow, original)
        made = _defer(made, slow, first)
        race = replace(race, inputs={**race.inputs, EARLIER: first.id})
    made += [*(choices[variant.id] for variant in slow if variant.id in choices), race]
    staying = {}
    for variant in racing:
        staying[variant.id], more = _after_race(recipe, variant, graphs, by_id)
        made += more
    return [staying.get(variant.id, variant) for variant in variants], made


def _choice_step(recipe: Recipe, variant: Variant, judge: Callable[[Variant], Step | None]) -> Step | None:
    """Plan to find a variant's metric on the samples for choosing, unless a search ended with what passes on them."""
    known = recipe.budgets.max_drop is None or variant.search or _is_lossless(variant)
    if known or (judged := judge(variant)) is None:
        return None
    needs = {**judged.inputs, VERIFIED: variant.verified[-1]}
    return replace(judged, id=StepRef(CHOICE, variant.name), search=True, inputs=needs)


def _race_step(
    recipe: Recipe,
    ref: StepRef,
    racing: Sequence[Variant],
    choices: Mapping[str, Step],
    kept: Collection[str],
    unmade: Sequence[Variant] = (),
    original: Variant | None = None,
) -> Step:
    limit, first = recipe.time_seconds, [original] if original else []
    task = Race(
        engines={variant.id: variant.engine for variant in (*racing, *first)},
        device=racing[0].device,
        lossless=tuple(variant.id for variant in racing if _is_lossless(variant)),
        seconds=min(_SECONDS_EACH * len(racing), limit * _RACING if limit else float("inf")),
        most=_MOST,
        kept=tuple(variant.id for variant in (*racing, *unmade) if variant.id in kept),
        unmade={variant.id: _same_precision(variant, (*first, *racing)) for variant in unmade},
        original=original.id if original else "",
        max_drop=recipe.budgets.max_drop,
        largest=recipe.objective == "throughput",
    )
    wants: dict[str, StepRef] = {}
    for variant in racing:
        wants |= {variant.id: variant.artifact, f"{variant.id} {VERIFIED}": variant.verified[-1]}
    wants |= {f"{name} {CHOICE}": step.id for name, step in choices.items() if name in wants}
    return Step(ref, task, {REFERENCE: REFERENCE, **{variant.id: variant.artifact for variant in first}}, wants)


def _same_precision(variant: Variant, others: Sequence[Variant]) -> tuple[str, ...]:
    """List the other variants that compute in a compiled variant's precision, whichever way they came to it."""
    precision = variant.engine.arithmetic
    return tuple(other.id for other in others if precision == (other.lowering or other.engine.arithmetic))


def _defer(steps: Sequence[Step], slow: Sequence[Variant], first: Step) -> list[Step]:
    """Let what is made for slow variants wait for a first race, which may drop them."""
    owners = {ref: variant for variant in slow for ref in (variant.artifact, *variant.verified)}
    late = [step for step in steps if step.id in owners and step.id.kind in ("build", "verify")]
    stays = {variant.id: StepRef(STAY, variant.name, "first") for variant in slow}
    return [
        *(step for step in steps if step not in late),
        first,
        *(Step(ref, Stay(variant=name), {RACE: first.id}) for name, ref in stays.items()),
        *(replace(step, inputs={**step.inputs, STAY: stays[owners[step.id].id]}) for step in late),
    ]


def _is_lossless(variant: Variant) -> bool:
    return variant.lowering is None and variant.dense is None and variant.engine.arithmetic == "fp32"


def _after_race(
    recipe: Recipe, variant: Variant, graphs: Mapping[StepRef, StepRef], by_id: Mapping[StepRef, Step]
) -> tuple[Variant, list[Step]]:
    """Plan what follows for one variant, if it is not dropped: its options are tuned, and it is verified with them."""
    check = by_id[variant.verified[-1]]
    reference = check.inputs[REFERENCE]
    stay = StepRef(STAY, variant.name)
    steps = [Step(stay, Stay(variant=variant.id), {RACE: StepRef(RACE), VERIFIED: check.id, REFERENCE: reference})]
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


def searching_seconds(seconds: float) -> float:
    """Return the time until the race begins, in which variants are made, of that of the whole run."""
    return seconds * _SEARCHING


def measuring_seconds(recipe: Recipe) -> float:
    """Choose the time of one batch size, of which a limited time leaves a share."""
    asked, limit = recipe.measure.seconds, recipe.time_seconds
    return asked if limit is None else min(asked, limit * _MEASURING / len(recipe.batch))
