"""What steps left, and why where they left nothing."""

from collections.abc import Sequence
from typing import Any

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.runner import Outcomes
from enginesmith.pipeline.tasks.base import read_records


def made(outcomes: Outcomes, step: str | None) -> Artifact | None:
    """What a step left, if it is done; None stands for a step that was not asked for."""
    outcome = outcomes.get(step) if step else None
    return outcome.artifact if outcome else None


def all_made(outcomes: Outcomes, steps: Sequence[str]) -> list[Artifact]:
    """The same of several steps, of those that are done."""
    return [found for step in steps if (found := made(outcomes, step))]


def entries(outcomes: Outcomes, step: str | None) -> list[dict[str, Any]]:
    """The records that a step left; none where it left nothing."""
    found = made(outcomes, step)
    return read_records(found) if found else []


def why_missing(step: str | None, outcomes: Outcomes) -> str:
    """Why a step left nothing, in words for people."""
    if step is None:
        return "not asked for"
    outcome = outcomes.get(step)
    if outcome is None:
        return f"not reached: {step}"
    return outcome.reason or (outcome.artifact.history[-1].effect if outcome.artifact else outcome.status)
