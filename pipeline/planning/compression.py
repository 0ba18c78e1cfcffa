"""Plan the steps that lead through pruned and sparse models: each is made, and then treated like the given one.

load ── [prune-P-dense ─ prune-P-trial-1 ─ … ─ N ─] prune-P ── recover-P

recover-P ─────────────────────┬─ reference-P ─┐
                               └─ export-P … ──┴─ build-V-P ── verify-V-P
graph ── sparsify-S ── [recover-sparsify-S] ── reference-S, build-V-S ── verify-V-S
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from enginesmith.pipeline.engines import baseline, simulation
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.engines.options import DEFAULT_ENGINES
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.passes import graph_passes, passes_for
from enginesmith.pipeline.passes.base import Pass
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.passes.sparsify.options import Sparsity
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, SHAPES, Step, StepRef, Variant
from enginesmith.pipeline.planning.precision import feeder, train_task
from enginesmith.pipeline.planning.variants import ResolvedRecipe, list_variants
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.build import Transform
from enginesmith.pipeline.tasks.finetune import TEACHER, Recover, TrainGraph
from enginesmith.pipeline.tasks.prune import BEFORE, DENSE, DenseEngine, Prune, PruneToLatency, ToEngine, TryLatency
from enginesmith.pipeline.tasks.verify import Answers, Verify

_TRIALS = 6
"""Models with other shares of MACs that are tried on the way to a latency."""
_TRIAL_SECONDS = 6.0


@dataclass(frozen=True)
class PlanTransform:
    """Make the steps and variants of a changed model from those of the given one."""

    change: str
    """Marks its steps and variants: ``prune30``."""
    stands_for: Mapping[StepRef, StepRef]
    """Steps that it has others in the place of: the model, and what that answers."""
    shared: Collection[StepRef] = ()
    """Steps that are the same ones in both."""

    def ref(self, step: StepRef) -> StepRef:
        """Refer to the step that does here what the given one does."""
        return self.stands_for.get(step) or (step if step in self.shared else step.with_change(self.change))

    def steps(self, steps: Sequence[Step]) -> list[Step]:
        """Make the steps that are made once more."""
        return [
            replace(
                step,
                id=self.ref(step.id),
                inputs={role: self.ref(name) for role, name in step.inputs.items()},
                optional_inputs={role: self.ref(name) for role, name in step.optional_inputs.items()},
            )
            for step in steps
            if step.id not in self.stands_for and step.id not in self.shared
        ]

    def variant(self, variant: Variant) -> Variant:
        """Make the variant that differs from the given one in nothing but the model."""
        own: dict[str, Any] = {
            name: self.ref(step)
            for name in ("artifact", "calibration", "assignment", "quality", "memory", "work", "profile")
            if (step := getattr(variant, name))
        }
        own |= {
            name: tuple(map(self.ref, getattr(variant, name))) for name in ("verified", "search", "audits", "recovered")
        }
        name = replace(variant.name, changes=(*variant.name.changes, self.change))
        return replace(variant, name=name, dense=variant.dense or variant.id, **own)


@dataclass(frozen=True)
class DensePlan:
    """The part of a plan that the given model has, before it is pruned or made sparse."""

    graph: StepRef
    to_graph: tuple[Step, ...]
    to_engines: tuple[Step, ...]
    variants: tuple[Variant, ...]
    shared: frozenset[StepRef]
    """Steps that stay the same whatever the model is changed to."""


@dataclass(frozen=True)
class CompressedModel:
    """A pruned or sparse model: how it is made, and what is made of it as of the given one."""

    own: tuple[Step, ...]
    again: tuple[Step, ...]
    transform: PlanTransform
    check: StepRef
    """The step that tells how far it is from the given one."""
    prune: str | None = None
    sparsity: str | None = None

    def steps(self) -> list[Step]:
        """List the steps that make it, and those made of it."""
        return [*self.own, *self.transform.steps(self.again)]

    def variant(self, variant: Variant) -> Variant:
        """Make the variant that differs from the given one in nothing but the model."""
        result = self.transform.variant(variant)
        return replace(
            result,
            verified=(self.check, *result.verified),
            prune=self.prune or result.prune,
            pruned=result.pruned + tuple(step.id for step in self.own if isinstance(step.task, Prune)),
            recovered=result.recovered + tuple(step.id for step in self.own if isinstance(step.task, Recover)),
            sparsity=self.sparsity or result.sparsity,
        )


def compress(resolved: ResolvedRecipe, dense_plan: DensePlan) -> tuple[list[Variant], list[Step]]:
    """Plan the variants and steps of every compressed model: pruned, sparse, and both.

    Raises:
        UsageError: as in :func:`pruning_steps`.
    """
    recipe = resolved.recipe
    graphs = [variant for variant in dense_plan.variants if variant.engine.consumes == "onnx"]
    passes = passes_for("sparsity", recipe)
    sparse = [
        _plan_sparse(recipe, pattern, step, dense_plan) for pattern, step in zip(recipe.sparsities, passes, strict=True)
    ]
    variants = [transform.variant(variant) for transform in sparse for variant in graphs]
    steps = [step for transform in sparse for step in transform.steps()]
    for target in recipe.prune_targets:
        pruned = _plan_pruned(resolved, target, dense_plan)
        steps += pruned.steps()
        variants += [pruned.variant(variant) for variant in dense_plan.variants]
        for transform in sparse:
            steps += pruned.transform.steps(transform.steps())
            variants += [pruned.variant(transform.variant(variant)) for variant in graphs]
    return variants, steps


def _plan_pruned(resolved: ResolvedRecipe, target: PruneTarget, dense_plan: DensePlan) -> CompressedModel:
    steps = list(pruning_steps(resolved, target))
    pruned_step = steps[-1].id
    steps += _reference_steps(pruned_step, target.slug, baseline("torch"))
    transform = PlanTransform(
        target.slug, {LOAD: pruned_step, REFERENCE: REFERENCE.with_change(target.slug)}, dense_plan.shared
    )
    again = (*dense_plan.to_graph, *dense_plan.to_engines)
    return CompressedModel(tuple(steps), again, transform, steps[-1].id, prune=str(target))


def pruning_steps(resolved: ResolvedRecipe, target: PruneTarget) -> Iterator[Step]:
    """Prune, and train back: in turns, where pruning is done in several steps.

    Raises:
        UsageError: the model is a graph; a latency is aimed at, and there is not one engine that it can be measured on.
    """
    recipe = resolved.recipe
    if not resolved.source.is_torch:
        raise UsageError(
            f"{recipe.model} is a graph, and channels are pruned in a module",
            "give the model as file.py:factory; --sparsity 2:4 works on graphs",
        )
    turns = recipe.pruning.steps if recipe.recover and target.kind != "latency" else 1
    options = recipe.pruning.model_copy(update={"steps": 1}) if turns > 1 else recipe.pruning
    recover = train_task(recipe, Recover, turns)
    last = LOAD
    for turn, part in enumerate(target.stages(turns) if turns > 1 else [target], start=1):
        name = StepRef(target.slug, f"{turn}of{turns}") if turns > 1 else StepRef(target.slug)
        yield from _pruning_turn(resolved, name, part, options, last)
        last = name
        if recipe.recover:
            last = StepRef("recover", name)
            yield Step(last, recover, {"model": name, TEACHER: LOAD})


def _pruning_turn(
    resolved: ResolvedRecipe, name: StepRef, target: PruneTarget, options: PruneOptions, last: StepRef
) -> Iterator[Step]:
    """Prune once; a latency is searched for before, as a chain of trials each of which knows those before it."""
    recipe = resolved.recipe
    fields = {"target": target, "options": options, "feeder": feeder(recipe), "seed": recipe.seed}
    needs: dict[str, StepRef] = {"model": last, REFERENCE: REFERENCE}
    if target.kind != "latency":
        yield Step(name, Prune.model_validate(fields), needs)
        return
    measured = _measured_on(resolved, target)
    engine = measured.engine
    shapes: dict[str, StepRef] = {SHAPES: SHAPES} if engine.needs_shapes else {}
    way = ToEngine(engine=engine, device=measured.device, passes=tuple(graph_passes(recipe, "torch")))
    dense = Step(StepRef(name.kind, *name.subject, DENSE), DenseEngine(way=way), {"model": last, **shapes})
    yield dense
    wanted = PruneToLatency.model_validate(fields)
    trial = TryLatency(prune=wanted, way=way, seconds=min(_TRIAL_SECONDS, recipe.measure.seconds))
    before: dict[str, StepRef] = {}
    for index in range(1, _TRIALS + 1):
        last = StepRef(name.kind, *name.subject, "trial", index)
        yield Step(last, trial, {**needs, **shapes, DENSE: dense.id, **before})
        before = {BEFORE: last}
    yield Step(name, wanted, {**needs, **before})


def _measured_on(resolved: ResolvedRecipe, target: PruneTarget) -> Variant:
    """Choose the engine that a latency is measured on, on float graphs.

    Raises:
        UsageError: not one of the engines that are asked for takes graphs and runs here, or several do.
    """
    able = [
        variant
        for variant in list_variants(resolved.updated(precisions=("fp32",)), resolved.recipe.engines)
        if not variant.unavailable and variant.engine.consumes == "onnx" and variant.engine.available(variant.device).ok
    ]
    names = dict.fromkeys(variant.engine.name for variant in able)
    if len(names) != 1:
        problem = f"{len(names)} such are asked for: {', '.join(names)}" if names else "none such is asked for"
        raise UsageError(
            f"--prune {target} is measured on one engine that takes graphs and runs here, and {problem}",
            f"give --engine {DEFAULT_ENGINES[0]}, or --prune macs=-50%",
        )
    return able[0]


def _plan_sparse(recipe: Recipe, pattern: Sparsity, sparsify_pass: Pass, dense_plan: DensePlan) -> CompressedModel:
    name = StepRef(sparsify_pass.step_name, changes=(pattern.slug,))
    steps = [Step(name, Transform(step=sparsify_pass), {"model": dense_plan.graph})]
    if recipe.trains:
        steps.append(train_sparse_step(recipe, name, dense_plan.graph))
        name = steps[-1].id
    steps += [*_reference_steps(name, pattern.slug, simulation())]
    shared = (dense_plan.shared | {LOAD} | {step.id for step in dense_plan.to_graph}) - {dense_plan.graph}
    stands_for = {dense_plan.graph: name, REFERENCE: REFERENCE.with_change(pattern.slug)}
    transform = PlanTransform(pattern.slug, stands_for, shared)
    modules = {} if dense_plan.graph == LOAD else {"model": LOAD}
    again = tuple(step for step in dense_plan.to_engines if not modules or step.inputs.get("model") != LOAD)
    return CompressedModel(tuple(steps), again, transform, steps[-1].id, sparsity=str(pattern))


def train_sparse_step(recipe: Recipe, sparse: StepRef, dense: StepRef) -> Step:
    """Plan to train the weights of a sparse graph that are left, by what the dense one answers."""
    needs = {"model": sparse, TEACHER: dense, REFERENCE: REFERENCE}
    return Step(StepRef("recover", sparse), train_task(recipe, TrainGraph, stays_float=True), needs)


def _reference_steps(model: StepRef, change: str, engine: Engine) -> Iterator[Step]:
    """Have the changed model answer, which its engines are compared with, and compare that with the given model."""
    yield Step(REFERENCE.with_change(change), Answers(engine=engine), {"model": model, REFERENCE: REFERENCE})
    task = Verify(stage=str(model), engine=engine, device=Device(), precision="fp32", min_sqnr_db=None, judged=False)
    yield Step(StepRef("verify", model), task, {"model": model, REFERENCE: REFERENCE})
