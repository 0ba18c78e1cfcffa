"""What plans are made of: steps, the variants that they lead to, and both together."""

from dataclasses import dataclass, field

from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.tasks.base import Task

LOAD, REFERENCE, LATENCY = "load", "reference", "latency"


@dataclass(frozen=True)
class Step:
    """One task and the steps whose artifacts it takes, by the role they have in it."""

    id: str
    task: Task
    needs: dict[str, str] = field(default_factory=dict)
    """Role → id of a step; without all of them the step cannot run."""
    wants: dict[str, str] = field(default_factory=dict)
    """Role → id of a step that may fail: one failed variant does not keep the others from being compared."""
    vital: bool = False
    """Whether nothing is worth doing once this has failed."""
    lacking: str = ""
    """What this machine lacks to do it; another one may have it, so the step is left for that."""


@dataclass(frozen=True)
class Variant:
    """One way to run the model: which engine, and the steps that lead to it and say how good it is."""

    id: str
    engine: Engine
    precision: str
    artifact: str
    """The step whose artifact the engine loads."""
    verified: tuple[str, ...] = ()
    """Steps that hold its stages against the reference."""
    memory: str | None = None
    quality: str | None = None
    workspace: str | None = None
    """The limit as it is part of the id; None where none was asked for."""
    target: str | None = None
    lacking: str = ""
    """Why it can be built here, and not run."""


@dataclass(frozen=True)
class Plan:
    """Steps in an order in which each comes after what it needs, and what they are for."""

    steps: tuple[Step, ...]
    baseline: Variant
    variants: tuple[Variant, ...]
    latency: str | None
