"""Describe plans: steps, references to steps, the variants that they lead to, and both together."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.passes.quantize.precisions import Name
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks import load
from enginesmith.pipeline.tasks.base import Task
from enginesmith.pipeline.tasks.build import Audit
from enginesmith.pipeline.tasks.tune import ENGINE, Tune
from enginesmith.pipeline.tasks.verify import Verify


@dataclass(frozen=True)
class VariantName:
    """Name a variant by what tells it from others; it is printed as the variant's id, and never read from that."""

    engine: str
    """Or the name of a model that is measured as it is."""
    precision: str = ""
    quantizer: str = ""
    """``nncf`` where that made its graph, and not enginesmith."""
    workspace: str = ""
    target: str = ""
    """The compute capability or platform that it is built for."""
    mode: str = ""
    """The engine's own word for how it runs or optimizes: ``basic``."""
    graphs: bool = False
    """True where it replays CUDA graphs."""
    changes: tuple[str, ...] = ()
    """Changes of the model, in their order: ``sparse24``, ``prune30``."""
    number: int | None = None
    """Tells models of one name apart."""

    def __str__(self) -> str:
        return self._printed

    @functools.cached_property
    def _printed(self) -> str:
        limit = f"ws{self.workspace}" if self.workspace else ""
        graphs = "graphs" if self.graphs else ""
        parts = (self.engine, self.precision, self.quantizer, limit, self.target, self.mode, graphs)
        words = (*parts, *self.changes, "" if self.number is None else str(self.number))
        return "-".join(filter(None, words))


class StepRef(str):
    """Refer to a step by what it does to what: ``build`` a variant, ``verify`` what ``export`` made.

    It is printed once, from its parts, and is its step's id: a string wherever ids are kept, as in outcomes, logs and
    run.json. Another step is referred to by other parts; no part is read from an id, and no id is edited.
    """

    __slots__ = ("changes", "kind", "run", "subject")
    kind: str
    """The action: ``build``."""
    subject: tuple[object, ...]
    """Its object: a variant's name, another step, a number."""
    changes: tuple[str, ...]
    """Changes of the object's model, in their order: ``sparse24``, ``prune30``."""
    run: str
    """The run that it belongs to, where several have been merged."""

    def __new__(cls, kind: str, *subject: object, changes: tuple[str, ...] = (), run: str = "") -> Self:
        words = "-".join([kind, *map(str, subject), *changes])
        ref = str.__new__(cls, f"{run}/{words}" if run else words)
        ref.kind, ref.subject, ref.changes, ref.run = kind, subject, changes, run
        return ref

    @property
    def variant(self) -> str:
        """The id of the variant that it is done to; empty where it is done to something else."""
        name = next((each for each in self.subject if isinstance(each, VariantName)), None)
        return "-".join((str(name), *self.changes)) if name else ""

    def __getnewargs_ex__(self) -> tuple[tuple[object, ...], dict[str, Any]]:
        return (self.kind, *self.subject), {"changes": self.changes, "run": self.run}

    def with_kind(self, kind: str) -> "StepRef":
        """Refer to what is done to the same: ``verify`` instead of ``build``."""
        return StepRef(kind, *self.subject, changes=self.changes, run=self.run)

    def with_change(self, change: str) -> "StepRef":
        """Refer to the same for a model that was changed once more."""
        return StepRef(self.kind, *self.subject, changes=(*self.changes, change), run=self.run)

    def in_run(self, run: str) -> "StepRef":
        """Refer to the step as one of a run."""
        return StepRef(self.kind, *self.subject, changes=self.changes, run=run)


LOAD, REFERENCE, LATENCY, LIMITS = StepRef("load"), StepRef("reference"), StepRef("latency"), StepRef("limits")
REFERENCES_LATENCY = StepRef("latency", "references")
SHAPES = StepRef(load.SHAPES)


@dataclass(frozen=True)
class Step:
    """One task and the steps whose artifacts it takes, by the role they have in it."""

    id: StepRef
    task: Task
    inputs: dict[str, StepRef] = field(default_factory=dict)
    """By role; without all of them the step cannot run."""
    optional_inputs: dict[str, StepRef] = field(default_factory=dict)
    """By role, steps that may fail: one failed variant does not keep the others from being compared."""
    unavailable: str = ""
    """The reason why this machine cannot do it; another one may, so the step is left for that."""
    place: Place | None = None
    """The machines that a build for a device or a measurement has to run on; None means anywhere."""
    search: bool = False
    """True where it leads to a variant of a search, and is not begun once the time for that is over."""
    as_it_was: bool = False
    """True where a result that was cut short by the time is good enough: it is taken from the store."""
    label: str = ""
    """Its name in histories, where its id says also which run of several it belongs to."""

    @property
    def name(self) -> str:
        """The step's name for people."""
        return self.label or self.id

    @property
    def variant(self) -> str:
        """The id of the variant that it builds or measures alone; empty for other steps, and of merged runs."""
        alone = self.id.kind in ("build", "tune", "memory", "quality") and not self.id.run
        return self.id.variant if alone else ""

    @property
    def sources(self) -> tuple[StepRef, ...]:
        """The steps that it takes artifacts from."""
        return (*self.inputs.values(), *self.optional_inputs.values())


@dataclass(frozen=True)
class Variant:
    """One way to run the model: which engine, and the steps that lead to it and say how good it is."""

    name: VariantName
    engine: Engine
    precision: str
    artifact: StepRef
    device: Device
    verified: tuple[StepRef, ...] = ()
    """Steps that hold its stages against the reference."""
    memory: StepRef | None = None
    quality: StepRef | None = None
    workspace: str | None = None
    """The limit as it is part of the name; None where none was asked for."""
    target: str | None = None
    reference: bool = False
    """True where nobody asked for it: it is measured for comparison, and never wins."""
    dense: str | None = None
    """The variant that it differs from in nothing but being pruned or sparse."""
    prune: str | None = None
    pruned: tuple[StepRef, ...] = ()
    recovered: tuple[StepRef, ...] = ()
    sparsity: str | None = None
    unavailable: str = ""
    """The reason why it can be built here, and not run."""
    refused: str = ""
    """The reason why it cannot be had as it was asked for, on any machine."""
    lowering: Name | None = None
    """The precision that the graph is turned into for it; None where it is taken as it is."""
    casts: bool = False
    """True where its engine casts the float32 graph by itself, unless nodes are to stay in float32."""
    calibration: StepRef | None = None
    """The step that found the ranges which are part of its graph."""
    assignment: StepRef | None = None
    """The step that says which groups are in which precision."""
    search: tuple[StepRef, ...] = ()
    work: StepRef | None = None
    """The step that counted what one inference has to do."""
    profile: StepRef | None = None
    prosecuted: StepRef | None = None
    """The step that looked for inputs on which it is wrong."""
    audits: tuple[StepRef, ...] = ()
    """Steps that look at what the graph asks for and, where the engine shows it, what is really executed."""

    @functools.cached_property
    def id(self) -> str:
        return str(self.name)

    @property
    def compared(self) -> StepRef | None:
        """The last step that compares it with the reference: measurements wait for that, and for no other inputs."""
        return next((check for check in reversed(self.verified) if check != self.prosecuted), None)

    @property
    def steps(self) -> tuple[StepRef, ...]:
        """List the steps that make it, and those that say how good it is."""
        made = (*self.pruned, *self.recovered, self.calibration, *self.search, self.assignment, self.artifact)
        judged = (*self.verified, self.prosecuted, *self.audits, self.memory, self.quality, self.work, self.profile)
        return tuple(ref for ref in (*made, *judged) if ref)

    @property
    def as_built(self) -> "Variant":
        """The variant without CUDA graphs, whose engine this one runs."""
        return replace(self, name=replace(self.name, graphs=False), engine=self.engine.without_graphs())


@dataclass(frozen=True)
class Plan:
    """Steps in an order in which each comes after what it needs, and what they are for."""

    steps: tuple[Step, ...]
    baseline: Variant
    variants: tuple[Variant, ...]
    latency: StepRef | None
    references_latency: StepRef | None = None
    """The step that measured eager once more, beside the variants that nobody asked for."""
    limits: StepRef | None = None
    """The step that found out what the device can do at best."""

    @functools.cached_property
    def _by_id(self) -> dict[str, Step]:
        return {step.id: step for step in self.steps}

    def leading_to(self, ends: Iterable[str]) -> list[StepRef]:
        """List steps and all that they cannot do without, the first ones first."""
        reached = leading_to(self.steps, ends)
        return [step.id for step in self.steps if step.id in reached]

    def list_serving(self, variants: Sequence[Variant]) -> list[StepRef]:
        """List the steps that serve these variants and nothing else, the first ones first.

        What compares all variants, such as a race, can do without them.
        """
        names = {variant.id for variant in variants}
        others = [variant for variant in (self.baseline, *self.variants) if variant.id not in names]
        ends = {ref for variant in others for ref in variant.steps}
        ends.update(ref for ref in (self.latency, self.references_latency, self.limits) if ref)
        own = {ref for variant in variants for ref in variant.steps} - ends
        own |= {step.id for step in self.steps if step.id.variant in names}
        used = leading_to(self.steps, own, lambda step: step.sources)
        needed = leading_to(
            self.steps, ends, lambda step: {*step.inputs.values()} | {*step.optional_inputs.values()} - own
        )
        return [step.id for step in self.steps if step.id in used and step.id not in needed]

    def input_of(self, step: StepRef, role: str) -> StepRef | None:
        """Find the step whose artifact has a role in a step of the plan; None where there is none."""
        return self._by_id[step].inputs.get(role) if step in self._by_id else None


def leading_to(
    steps: Sequence[Step],
    ends: Iterable[str],
    taken: Callable[[Step], Iterable[str]] = lambda step: step.inputs.values(),
) -> set[str]:
    """List the ends and all that they cannot do without, or what ``taken`` lists of each; sources come first."""
    reached = set(ends)
    for step in reversed(steps):
        if step.id in reached:
            reached.update(taken(step))
    return reached


def tries_inputs(step: Step) -> bool:
    """Tell whether a step tries other inputs than the samples on a variant, for which some time is kept."""
    return step.id.kind == "prosecute"


def is_optional(step: Step) -> bool:
    """Tell whether latency does without a step, which then comes last where time is limited."""
    return tries_inputs(step) or step.id.kind in ("memory", "profile")


def only_judges(step: Step) -> bool:
    """Tell whether a variant whose latency is known can be used without what a step tells of it."""
    return is_optional(step) or step.id.kind in ("quality", "choice")


def ends_search(step: Step) -> bool:
    """Tell whether a search has no result without a step: the race, what leads from it to the latencies, the metric."""
    tuned = step.id.kind == "verify" and "tuned" in step.id.subject
    return tuned or step.id.kind in ("race", "stay", "tune", "latency", "quality")


def search_of(step: Step) -> StepRef | None:
    """Refer to the search whose trial a step is; None for another step."""
    ref = step.id
    return StepRef(ref.kind, *ref.subject[:-1], changes=ref.changes, run=ref.run) if ref.kind == "search" else None


def libraries_of(steps: Iterable[Step]) -> tuple[str, ...]:
    """List the heavy modules that loading the models of a plan imports: worth importing once for all workers."""
    models = (step.task.source for step in steps if isinstance(step.task, load.Load))
    return tuple(name for source in models for name in source.libraries)


def verify_step(
    recipe: Recipe,
    subject: StepRef | VariantName | str,
    artifact: StepRef,
    engine: Engine,
    device: Device,
    threshold: str = "",
    *,
    stage: str = "",
    judged: bool = True,
) -> Step:
    """Plan to compare a step's artifact, as an engine runs it, with the reference, by a row of fidelity thresholds."""
    task = Verify(
        stage=stage or str(subject),
        engine=engine,
        device=device,
        precision=threshold or engine.arithmetic,
        min_sqnr_db=recipe.min_sqnr_db,
        judged=judged,
    )
    return Step(StepRef("verify", subject), task, {"model": artifact, REFERENCE: REFERENCE})


def tune_step(recipe: Recipe, variant: Variant, graph: StepRef, built: StepRef, seconds: float, threshold: str) -> Step:
    """Plan to find the fastest options of a variant's built engine, for calls as the objective has them."""
    loaded = recipe.objective == "throughput"
    task = Tune(
        engine=variant.engine,
        device=variant.device,
        seconds=seconds,
        batch=max(recipe.batch) if loaded else None,
        callers=tuple(sorted(set(recipe.measure.concurrency))) if loaded else (),
        precision=threshold,
        min_sqnr_db=recipe.min_sqnr_db,
        max_memory_bytes=recipe.budgets.max_memory_bytes,
    )
    roles = {"model": graph, ENGINE: built, REFERENCE: REFERENCE}
    return Step(StepRef("tune", variant.name), task, roles, unavailable=variant.unavailable)


def audit_steps(variant: Variant, graph: StepRef) -> list[Step]:
    """Plan a variant's audits: of the graph that a step made, and of the engine where that shows what it runs."""
    steps = [Step(StepRef("audit", graph), Audit(), {"model": graph, REFERENCE: REFERENCE})]
    if variant.engine.shows_graph:
        task, needs = Audit(engine=variant.engine, device=variant.device), {"model": variant.artifact}
        needs[REFERENCE] = REFERENCE
        steps.append(Step(StepRef("audit", variant.name), task, needs, unavailable=variant.unavailable))
    return steps
