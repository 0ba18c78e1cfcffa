"""Look up a step's artifact, records or failure reason."""

from collections.abc import Sequence
from typing import Any

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.runner import Outcomes
from enginesmith.pipeline.tasks.base import read_records


def artifact_of(outcomes: Outcomes, step: str | None) -> Artifact | None:
    """Return a step's artifact if it is done; ``step`` is None if it was not asked for."""
    outcome = outcomes.get(step) if step else None
    return outcome.artifact if outcome else None


def artifacts_of(outcomes: Outcomes, steps: Sequence[str]) -> list[Artifact]:
    """Return the artifacts of those steps that are done."""
    return [found for step in steps if (found := artifact_of(outcomes, step))]


def records_of(outcomes: Outcomes, step: str | None) -> list[dict[str, Any]]:
    """Read a step's records; none where it left nothing."""
    found = artifact_of(outcomes, step)
    return read_records(found) if found else []


def why_missing(step: str | None, outcomes: Outcomes) -> str:
    """Explain for people why a step left nothing."""
    if step is None:
        return "not asked for"
    outcome = outcomes.get(step)
    if outcome is None:
        return f"not reached: {step}"
    return outcome.reason or (outcome.artifact.history[-1].effect if outcome.artifact else outcome.status)
