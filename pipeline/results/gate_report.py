"""Define the documents that ``gate --json`` prints."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from enginesmith.pipeline.errors import GateBreach
from enginesmith.pipeline.measure.statistics import Interval

SCHEMA: Literal["enginesmith.gate/1"] = "enginesmith.gate/1"
FLEET_SCHEMA: Literal["enginesmith.fleet-gate/1"] = "enginesmith.fleet-gate/1"


class GateCheck(BaseModel):
    """Report one check of a gate. Numbers are in the unit of ``name``; ``change`` is a ratio, 1.1 being 10 % more."""

    name: str
    against: Literal["budget", "baseline", "run"]
    passed: bool
    text: str
    limit: float | None = None
    before: float | None = None
    actual: float | None = None
    change: Interval | None = None
    basis: str = ""
    """The way in which latency was compared."""

    model_config = ConfigDict(frozen=True)


class Gate(BaseModel):
    """Report all checks of a run."""

    schema_name: Literal["enginesmith.gate/1"] = Field(SCHEMA, alias="schema")
    run: str
    variant: str | None
    baseline: str | None = None
    baseline_variant: str | None = None
    tolerance: float
    passed: bool
    verdicts: tuple[GateCheck, ...]
    cautions: tuple[str, ...] = ()
    updated: bool = False
    """True where the run has become the baseline."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    @property
    def breaches(self) -> tuple[GateCheck, ...]:
        """Return the checks that failed."""
        return tuple(verdict for verdict in self.verdicts if not verdict.passed)

    @property
    def exit_code(self) -> int:
        """Return the command line's exit code."""
        return 0 if self.passed else GateBreach.exit_code


class FleetGate(BaseModel):
    """Report the gates of all entries of a fleet."""

    schema_name: Literal["enginesmith.fleet-gate/1"] = Field(FLEET_SCHEMA, alias="schema")
    fleet: str
    baseline: str | None = None
    passed: bool
    entries: dict[str, Gate]
    updated: bool = False
    """True where the fleet has become the baseline."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    @property
    def exit_code(self) -> int:
        """Return the command line's exit code."""
        return 0 if self.passed else GateBreach.exit_code
