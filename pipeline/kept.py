"""Save and load the files that let another machine resume a run: engines, the reference, and records.

The other machine may have other versions of everything, so keys of the store say nothing there. What is kept holds as
long as the model is the same, byte for byte, and the step would do the same.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from enginesmith.pipeline.artifact import RECORDS, Artifact, Kind, holds, write_whole
from enginesmith.pipeline.runner import Outcome
from enginesmith.pipeline.steps import LOAD, Plan, Step

_FOLDER, _INDEX = "kept", "index.json"
_KINDS: tuple[Kind, ...] = ("engine", "reference", "record")
"""Graphs are not among them: nothing that is left to do needs them once the engines are built."""


class _StepHandoff(BaseModel):
    """Describe one step and its artifact."""

    model_config = ConfigDict(frozen=True)

    identity: dict[str, Any]
    folder: str
    artifact: Artifact


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True)

    load_sha256: str
    """Of the model that everything was made from."""
    steps: dict[str, _StepHandoff]


def save_handoff(run: Path, plan: Plan, outcomes: Mapping[str, Outcome], engines: Mapping[str, str]) -> None:
    """Save the artifacts of done steps; ``engines`` are folders in the run directory by the step that made them."""
    load = outcomes[LOAD].artifact
    if load is None:
        return
    steps = {}
    for step in plan.steps:
        made = outcomes[step.id].artifact if step.id in outcomes else None
        if made is None or made.kind not in _KINDS or made.incomplete or step.task.environment_key:
            continue
        folder = engines.get(step.id) or f"{_FOLDER}/{step.id}"
        if not (run / folder).is_dir():
            shutil.copytree(made.folder, run / folder, ignore=shutil.ignore_patterns(*RECORDS))
        relative = made.model_copy(update={"path": Path(made.path.name)})
        steps[step.id] = _StepHandoff(identity=step.task.identity, folder=folder, artifact=relative)
    index = _Index(load_sha256=load.sha256, steps=steps)
    write_whole(run / _FOLDER / _INDEX, (index.model_dump_json(indent=1) + "\n").encode())


def has_handoff(run: Path) -> bool:
    """Tell whether the run directory has files to resume from."""
    return (run / _FOLDER / _INDEX).is_file()


def load_handoff(run: Path, plan: Plan, load: Artifact) -> dict[str, Outcome]:
    """Load the outcomes that are valid here, and those of steps that nothing needs any more."""
    try:
        index = _Index.model_validate_json((run / _FOLDER / _INDEX).read_bytes())
    except (OSError, ValidationError):
        return {}
    if index.load_sha256 != load.sha256:
        return {}
    found = {LOAD: Outcome(LOAD, "done", load, cached=True)}
    for step in plan.steps:
        kept = index.steps.get(step.id)
        if kept and kept.identity == step.task.identity and (artifact := _find_intact(run, kept)):
            found[step.id] = Outcome(step.id, "done", artifact, cached=True)
    needed = _find_required(plan.steps, found)
    while unproven := _find_stale_records(plan.steps, found, needed):
        found = {name: outcome for name, outcome in found.items() if name not in unproven}
        needed = _find_required(plan.steps, found)
    return found | {
        step.id: Outcome(step.id, "done", cached=True, reason="what was made of it is kept")
        for step in plan.steps
        if step.id not in found and step.id not in needed
    }


def _find_intact(run: Path, kept: _StepHandoff) -> Artifact | None:
    """Return the artifact where it lies, if its files are unchanged."""
    folder = run / kept.folder
    if not holds(folder, kept.artifact.sha256):
        return None
    return kept.artifact.model_copy(update={"path": folder / kept.artifact.path})


def _find_stale_records(steps: Sequence[Step], found: Mapping[str, Outcome], needed: set[str]) -> set[str]:
    """Find records of inputs that are made anew here: they tell of another graph or engine."""
    return {
        step.id
        for step in steps
        if step.id in found and step.task.produces == "record" and not needed.isdisjoint(step.sources)
    }


def _find_required(steps: Sequence[Step], found: Mapping[str, Outcome]) -> set[str]:
    """Find missing steps that a step which makes more than a graph depends on."""
    by_id = {step.id: step for step in steps}
    needed: set[str] = set()
    waiting = [step.id for step in steps if step.id not in found and step.task.produces in _KINDS]
    while waiting:
        name = waiting.pop()
        if name in needed or name in found:
            continue
        needed.add(name)
        waiting += by_id[name].sources
    return needed
