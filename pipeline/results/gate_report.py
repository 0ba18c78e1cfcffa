"""Define the documents that ``gate --json`` prints, and keep the last one in the folder that was judged."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, computed_field

from enginesmith.pipeline.artifact import file_digest
from enginesmith.pipeline.errors import EnginesmithError, GateBreach, storage_errors
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.results import documents

SCHEMA: Literal["enginesmith.gate/1"] = "enginesmith.gate/1"
FLEET_SCHEMA: Literal["enginesmith.fleet-gate/1"] = "enginesmith.fleet-gate/1"
FILE = "gate.json"


CheckState = Literal["passed", "failed", "unjudged"]
"""``unjudged``: the number is missing, or not precise enough to decide."""


class GateCheck(BaseModel, frozen=True):
    """Report one check of a gate. Numbers are in the unit of ``name``; ``change`` is a ratio, 1.1 being 10 % more."""

    name: str
    against: Literal["budget", "baseline", "run"]
    state: CheckState
    required: bool = True
    """True where the gate fails as long as this is unjudged: everything but a difference from the baseline whose
    estimate is within the tolerance. ``--strict`` requires that, too."""
    text: str
    limit: float | None = None
    before: float | None = None
    actual: float | None = None
    change: Interval | None = None
    basis: str = ""
    """The way in which latency was compared."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Tell whether it was judged and passed."""
        return self.state == "passed"

    @property
    def fails(self) -> bool:
        """Tell whether the gate fails because of it."""
        return self.state == "failed" or (self.state == "unjudged" and self.required)


class Gate(BaseModel, frozen=True, populate_by_name=True):
    """Report all checks of a run."""

    schema_name: Literal["enginesmith.gate/1"] = Field(SCHEMA, alias="schema")
    run: str
    variant: str | None
    baseline: str | None = None
    baseline_variant: str | None = None
    tolerance: float
    usable: bool = True
    """False where every requested engine failed."""
    verdicts: tuple[GateCheck, ...]
    cautions: tuple[str, ...] = ()
    updated: bool = False
    """True where the run has become the baseline."""

    @property
    def breaches(self) -> tuple[GateCheck, ...]:
        """Return the checks that fail the gate: failed ones, and those that had to be judged and were not."""
        return tuple(check for check in self.verdicts if check.fails)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def state(self) -> CheckState:
        """Sum up the checks: failed if one failed, unjudged if one was not judged."""
        states = {check.state for check in self.verdicts}
        return "failed" if "failed" in states else "unjudged" if "unjudged" in states else "passed"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Tell whether every check was judged and passed."""
        return self.state == "passed"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        """Return the command line's exit code: 1 without a usable engine, 3 where a check fails the gate."""
        if not self.usable:
            return EnginesmithError.exit_code
        return GateBreach.exit_code if self.breaches else 0


class FleetGate(BaseModel, frozen=True, populate_by_name=True):
    """Report the gates of all entries of a fleet."""

    schema_name: Literal["enginesmith.fleet-gate/1"] = Field(FLEET_SCHEMA, alias="schema")
    fleet: str
    baseline: str | None = None
    entries: dict[str, Gate]
    updated: bool = False
    """True where the fleet has become the baseline."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Tell whether every check of every entry was judged and passed."""
        return all(entry.passed for entry in self.entries.values())

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        """Return the command line's exit code: 3 where an entry fails the gate."""
        return GateBreach.exit_code if any(entry.exit_code for entry in self.entries.values()) else 0


def save(gate: Gate | FleetGate, folder: Path) -> None:
    """Write ``gate.json`` into the folder of the run or the fleet that was judged.

    Raises:
        StoreError: the folder cannot be written.
    """
    document = gate.model_dump(mode="json", by_alias=True) | {"judged_sha256": _digest_documents(folder)}
    with storage_errors(f"the folder {folder}"):
        documents.write_text(folder / FILE, json.dumps(document, indent=1) + "\n")


def load(folder: Path) -> Gate | FleetGate | None:
    """Read ``gate.json``; None where there is none, and where what it judged has changed since."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        values = documents.load(folder / FILE)
        if values["judged_sha256"] == _digest_documents(folder):
            return (FleetGate if values["schema"] == FLEET_SCHEMA else Gate).model_validate(values)
    return None


def _digest_documents(folder: Path) -> str:
    """Digest what is judged: run.json, or fleet.json and the run.json of every entry."""
    paths = [path for name in ("run.json", "fleet.json", "runs/*/run.json") for path in sorted(folder.glob(name))]
    return hashlib.sha256("".join(map(file_digest, paths)).encode()).hexdigest()
