"""What plans are made of: steps, the variants that they lead to, and both together."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.passes.quantize.precisions import Name
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import Task
from enginesmith.pipeline.tasks.load import Load
from enginesmith.pipeline.tasks.verify import Audit

LOAD, REFERENCE, LATENCY, LIMITS = "load", "reference", "latency", "limits"


@dataclass(frozen=True)
class Step:
    """One task and the steps whose artifacts it takes, by the role they have in it."""

    id: str
    task: Task
    inputs: dict[str, str] = field(default_factory=dict)
    """Role → id of a step; without all of them the step cannot run."""
    optional_inputs: dict[str, str] = field(default_factory=dict)
    """Role → id of a step that may fail: one failed variant does not keep the others from being compared."""
    required: bool = False
    """Whether the whole run stops once this has failed."""
    unavailable: str = ""
    """What this machine lacks to do it; another one may have it, so the step is left for that."""
    place: Place | None = None
    """Where it has to run, as builds for a device and measurements have to; None means anywhere."""
    label: str = ""
    """What it is called in histories, where its id says also which run of several it belongs to."""

    @property
    def name(self) -> str:
        """Return the step's name for people."""
        return self.label or self.id

    @property
    def sources(self) -> tuple[str, ...]:
        """List the ids of the steps that it takes artifacts from."""
        return (*self.inputs.values(), *self.optional_inputs.values())


@dataclass(frozen=True)
class Variant:
    """One way to run the model: which engine, and the steps that lead to it and say how good it is."""

    id: str
    engine: Engine
    precision: str
    artifact: str
    """The step whose artifact the engine loads."""
    device: Device
    """Where the engine runs."""
    verified: tuple[str, ...] = ()
    """Steps that hold its stages against the reference."""
    memory: str | None = None
    quality: str | None = None
    workspace: str | None = None
    """The limit as it is part of the id; None where none was asked for."""
    target: str | None = None
    dense: str | None = None
    """The variant that it differs from in nothing but being pruned or sparse."""
    prune: str | None = None
    pruned: tuple[str, ...] = ()
    """The steps that pruned its model."""
    recovered: tuple[str, ...] = ()
    """The steps that trained it back."""
    sparsity: str | None = None
    unavailable: str = ""
    """Why it can be built here, and not run."""
    lowering: Name | None = None
    """The precision that the graph is turned into for it; None where it is taken as it is."""
    calibration: str | None = None
    """The step that found the ranges which are part of its graph."""
    assignment: str | None = None
    """The step that says which groups are in which precision."""
    search: tuple[str, ...] = ()
    """The steps that led to it."""
    work: str | None = None
    """The step that counted what one inference has to do."""
    profile: str | None = None
    audits: tuple[str, ...] = ()
    """Steps that look at what the graph asks for and, where the engine shows it, what is really executed."""


@dataclass(frozen=True)
class Plan:
    """Steps in an order in which each comes after what it needs, and what they are for."""

    steps: tuple[Step, ...]
    baseline: Variant
    variants: tuple[Variant, ...]
    latency: str | None
    limits: str | None = None
    """The step that found out what the device can do at best."""

    @functools.cached_property
    def _by_id(self) -> dict[str, Step]:
        return {step.id: step for step in self.steps}

    def leading_to(self, ends: Iterable[str]) -> list[str]:
        """Steps and all that they cannot do without, the first ones first."""
        found: set[str] = set()
        waiting = list(ends)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self._by_id[name].inputs.values()
        return [step.id for step in self.steps if step.id in found]

    def graph_of(self, variant: Variant) -> str | None:
        """The step whose graph a variant's engine is built from; None where it runs the module."""
        return self._need(variant.artifact, "model")

    def reference_of(self, variant: Variant) -> str | None:
        """The step that answered what a variant's engine is held against; None where it is not held."""
        return self._need(variant.verified[-1], REFERENCE) if variant.verified else None

    def _need(self, step: str, role: str) -> str | None:
        return self._by_id[step].inputs.get(role) if step in self._by_id else None


def libraries_of(steps: Iterable[Step]) -> tuple[str, ...]:
    """List the heavy modules that loading the models of a plan imports: worth importing once for all workers."""
    models = (step.task.source for step in steps if isinstance(step.task, Load))
    return tuple(name for source in models for name in source.libraries)


def add_audits(variant: Variant, graph: str) -> tuple[Variant, list[Step]]:
    """Plan a variant's audits: of the graph that a step made, and of the engine where that shows what it runs."""
    needs = {REFERENCE: REFERENCE}
    steps = [Step(f"audit-{graph}", Audit(), {"model": graph, **needs})]
    if variant.engine.shows_graph:
        task = Audit(engine=variant.engine, device=variant.device)
        steps.append(
            Step(f"audit-{variant.id}", task, {"model": variant.artifact, **needs}, unavailable=variant.unavailable)
        )
    return replace(variant, audits=tuple(step.id for step in steps)), steps
