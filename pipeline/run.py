"""What a run found out: the document ``run.json``, and how the outcomes of steps become one.

A number that could not be had is null, and a reason stands beside it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from enginesmith.pipeline.artifact import HistoryEntry
from enginesmith.pipeline.measure.latency import LatencyRow
from enginesmith.pipeline.measure.limits import DeviceLimits
from enginesmith.pipeline.measure.memory import MemoryRow
from enginesmith.pipeline.measure.profile import Profile
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.roofline import LimitRow
from enginesmith.pipeline.precision.audit.coverage import Coverage
from enginesmith.pipeline.pruning.record import Facts, GroupSensitivity
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.recovery.record import Recovery
from enginesmith.pipeline.tasks.compare import StageFidelity
from enginesmith.pipeline.tensors import Signature

SCHEMA: Literal["enginesmith.run/1"] = "enginesmith.run/1"

VariantStatus = Literal["measured", "built", "skipped", "failed"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class StoredArtifact(_Part):
    """An engine's main file in the run directory, with the digest and size of all its files."""

    path: str
    sha256: str
    bytes: int


class BuildRecord(_Part):
    """What building the engine took and gave."""

    seconds: float
    host_peak_bytes: int | None
    workspace_limit_bytes: int | None = None
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    """What one inference at the largest shape works in, scratch memory included."""
    scratch_bytes: int | None = None
    build_device_peak_bytes: int | None = None
    engine_bytes: int
    layers: dict[str, int] | None = None
    reasons: dict[str, str] = {}


class Assignment(_Part):
    """What one operator is computed in, and why."""

    group: str
    module: str = ""
    operator: str
    precision: str
    why: str = ""
    sqnr_db: float | None = None
    """Of its own result in the low precision, its inputs being exact; None where that was not found out."""
    macs: int | None = None


class SearchStep(_Part):
    """One assignment that was tried on the way to the one that is used."""

    step: int
    method: str = ""
    """How ranges were chosen."""
    quantised: int | None
    """Groups in the low precision; None as long as their number is not known."""
    kept: int
    """Groups that stayed in floating point."""
    sqnr_db: float | None = None
    drop: float | None = None
    speedup: float | None = None
    """Against the float graph in the same engine; None where that was not measured."""
    passed: bool
    why: str
    reason: str = ""
    """Why it did not pass."""


class VariantRecord(_Part):
    """One way to run the model, and everything that is known of it. The baseline is one too."""

    id: str
    engine: str
    precision: str
    prune: str | None = None
    """What was asked for, as ``macs=0.5``."""
    sparsity: str | None = None
    dense: str | None = None
    """The variant that it differs from in nothing but being pruned or sparse."""
    workspace_limit_bytes: int | None = None
    target: str | None = None
    status: VariantStatus
    reason: str = ""
    failure: str | None = None
    """Class of the failure: unsupported, does not fit the limit, internal, crash, out of memory, timeout …"""
    rejected: str = ""
    """Why it cannot win although it was measured: pruned, and no faster than its dense sibling, or of unknown loss."""
    artifact: StoredArtifact | None = None
    history: tuple[HistoryEntry, ...] = ()
    fidelity: tuple[StageFidelity, ...] = ()
    quality: Quality | None = None
    latency: tuple[LatencyRow, ...] = ()
    memory: MemoryRow | None = None
    limits: tuple[LimitRow, ...] = ()
    """By batch size, how far it is from what the device could do."""
    profile: tuple[Profile, ...] = ()
    """Where its time goes."""
    build: BuildRecord | None = None
    pruning: tuple[Facts, ...] = ()
    """What pruning took away, one entry for each time that it was done."""
    recovery: tuple[Recovery, ...] = ()
    """How the pruned model was trained back, likewise."""
    coverage: Coverage | None = None
    """What the graph asks for that the engine is built from."""
    engine_coverage: Coverage | None = None
    """What the engine really computes in."""
    shortfall: str = ""
    """What its precision's name promises and it does not hold, where it can be used all the same."""
    assignment: tuple[Assignment, ...] = ()
    search: tuple[SearchStep, ...] = ()
    synthetic_calibration: bool = False
    """Whether ranges were taken from made-up data: then its accuracy says nothing of real data."""
    remarks: tuple[str, ...] = ()
    """Whether the low precision paid, with the evidence."""
    reasons: dict[str, str] = {}
    """Field that is null or empty → why."""

    def row(self, batch: int) -> LatencyRow | None:
        """The latency at a batch size, if it was measured."""
        return next((row for row in self.latency if row.batch == batch and row.p50_ms is not None), None)

    @property
    def peak_bytes(self) -> int | None:
        """Peak device memory, if it was measured."""
        return self.memory.peak_bytes if self.memory else None


class Verdict(_Part):
    """A budget and whether the winner holds it."""

    budget: str
    limit: float
    actual: float | None
    passed: bool


class ModelRecord(_Part):
    """What the run is about."""

    source: str
    signature: Signature | None
    data: str | None
    """What fidelity and latency were measured on: a data set's name, or ``synthetic``."""
    shapes: dict[str, str] = {}


class StepRecord(_Part):
    """A step of the plan and how it ended."""

    id: str
    status: Literal["done", "failed", "skipped", "pending"]
    cached: bool
    seconds: float | None
    """What it took when it was done, which may have been in an earlier run."""
    effect: str


class Run(_Part):
    """The whole document."""

    schema_name: Literal["enginesmith.run/1"] = Field(SCHEMA, alias="schema")
    name: str
    created: str
    seconds: float
    complete: bool
    """Whether every step has ended; a run that was interrupted can be resumed."""
    recipe: Recipe
    environment: dict[str, Any]
    limits: DeviceLimits | None = None
    """What the device can do at best, where that was measured."""
    prune_sensitivity: tuple[GroupSensitivity, ...] = ()
    """What each group of layers costs when it is pruned alone."""
    model: ModelRecord
    steps: tuple[StepRecord, ...]
    baseline: VariantRecord
    variants: tuple[VariantRecord, ...]
    winner: str | None
    winner_reason: str = ""
    pareto: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    model_config = ConfigDict(frozen=True, populate_by_name=True)


def write(run: Run, folder: Path) -> None:
    """Write ``run.json``, whole or not at all."""
    partial = folder / ".run.json.partial"
    partial.write_text(run.model_dump_json(indent=1, by_alias=True) + "\n")
    partial.replace(folder / "run.json")


def read(folder: Path) -> Run:
    """Read ``run.json`` of a run directory.

    Raises:
        UsageError: there is none, or it is not a run of this schema.
    """
    from pydantic import ValidationError

    from enginesmith.pipeline.errors import UsageError

    path = folder / "run.json" if folder.is_dir() else folder
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, Mapping) or values.get("schema") != SCHEMA:
            raise UsageError(f"{path} is not a run of the schema {SCHEMA}", "give the folder that optimize wrote")
        return Run.model_validate(values)
    except OSError as error:
        raise UsageError(
            f"there is no run in {folder}: {error.strerror}", "give a folder that optimize wrote"
        ) from error
    except (ValueError, ValidationError) as error:
        raise UsageError(f"{path} is damaged: {str(error).splitlines()[0]}", "run optimize again") from error


def json_schema() -> dict[str, Any]:
    """The JSON Schema of ``run.json``."""
    return Run.model_json_schema(by_alias=True, mode="serialization")
