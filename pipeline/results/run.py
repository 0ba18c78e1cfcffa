"""Define and read the document ``run.json``.

A number that could not be had is null, and a reason stands beside it.
"""

import difflib
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from enginesmith.pipeline.artifact import HistoryEntry
from enginesmith.pipeline.engines.base import EngineFacts
from enginesmith.pipeline.errors import DROPPED, EnginesmithError, Late, UsageError
from enginesmith.pipeline.frameworks.records import Coverage, PruningFacts
from enginesmith.pipeline.measure.prosecution.finding import Prosecution
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import (
    DeviceLimits,
    LatencyRow,
    LimitRow,
    MemoryRow,
    Profile,
    RaceRow,
    StageFidelity,
    Tuning,
)
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.passes.finetune.options import Recovery
from enginesmith.pipeline.passes.quantize.precisions import Form
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.results import documents
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Signature
from enginesmith.pipeline.units import AddedOption, name_some

if TYPE_CHECKING:
    from enginesmith.pipeline.engines.base import Engine


# The environment within a run: facts for people, some of which are read again and have to be of their type.


class _FieldTypes(BaseModel):
    """Types of the fields that are read again."""

    out: str | None = None
    processor: str | None = None
    usable_cores: int | None = None
    python: str | None = None
    packages: dict[str, str] = {}
    thread_variables: dict[str, str] = {}
    other_variables: dict[str, str] = {}
    gpus: tuple[dict[str, Any], ...] | None = None
    busy: bool = False
    warnings: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    """Those of the warnings that say nothing of the machine."""


def _check_types(value: dict[str, Any]) -> dict[str, Any]:
    documents.parse(_FieldTypes, value)
    return value


RunEnvironment = Annotated[dict[str, Any], AfterValidator(_check_types)]

SCHEMA: Literal["enginesmith.run/1"] = "enginesmith.run/1"

_MOST_WORKAROUNDS = 4
"""Workarounds after which no more are looked for: each has the engines that it concerns built and checked again."""

VariantStatus = Literal["measured", "built", "skipped", "failed"]
NoWinner = Literal["unjudged", "over budget", "not measured yet", "nothing measured", "failed", "no figure"]
"""Why a run has no winner: no time was left to judge a better one than eager; all are over a budget; another machine
has to measure what is built; nothing was measured; all engines failed; what decides was measured of none."""


class StoredArtifact(BaseModel, frozen=True):
    """Name an engine's main file in the run directory, with the digest and size of all its files."""

    path: str
    sha256: str
    bytes: int = Field(ge=0)


class BuildRecord(EngineFacts):
    """Record what building the engine took and gave."""

    seconds: float
    host_peak_bytes: int | None
    engine_bytes: int
    reasons: dict[str, str] = Field({})


class Assignment(BaseModel, frozen=True):
    """Record the precision of one operator, and why."""

    group: str
    module: str = ""
    operator: str
    precision: str
    why: str = ""
    sqnr_db: float | None = None
    """SQNR of its own result in the low precision, its inputs being exact; or of the part of the answers in another
    unit, or of small samples, that it alone loses most, if that is lower. None where that was not found out."""
    macs: int | None = None
    form: Form = "given"
    """Form of the float graph that was quantized: as it is, or with channels rescaled, also by multiplications."""
    given_sqnr_db: float | None = None
    """The SQNR in the graph as it was given."""
    answer_change: float | None = None
    """Root of the energy of what changes in the answers where it alone is quantized, of theirs: of all, of a part in
    another unit, or in the mean over samples, whichever is most. Where all answers are near a constant, it is of what
    they vary by. None where that was not measured, as where everything can be."""
    cause: str = ""
    """Says what makes it lose much, where it does: its numbers, its samples, or what reads its result. It is that in
    the graph that was quantized, and in the given one for groups that rescaling lifted."""


class SearchStep(BaseModel, frozen=True):
    """Record an assignment that was tried on the way to the one that is used."""

    step: int
    method: str = ""
    """Method that chose the ranges."""
    quantized: int | None
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
    """The reason why it did not pass."""


class VariantRecord(BaseModel, frozen=True):
    """Record one way to run the model, the baseline's included, and everything that is known of it."""

    id: str
    engine: str
    precision: str
    quantizer: str = ""
    """``nncf`` where that made the int8 graph, and not enginesmith; its version and settings are in ``history``."""
    prune: str | None = None
    """The part of the model that was to go: ``macs=-50%``."""
    sparsity: str | None = None
    dense: str | None = None
    """The variant that it differs from in nothing but being pruned or sparse."""
    workspace_limit_bytes: int | None = None
    target: str | None = None
    cuda_graphs: bool = False
    """True where each set of shapes is captured once as a CUDA graph, and replayed."""
    rounds_to_tf32: str = ""
    """Products of float32 that may be rounded to TF32 on a GPU that has it: ``convolutions``, ``all``, or none."""
    reference: bool = False
    """True where nobody asked for it: it is measured for comparison, beside eager alone, and never wins."""
    status: VariantStatus
    reason: str = ""
    failure: str | None = None
    """Class of the failure: unsupported, does not fit the limit, internal, crash, out of memory, timeout …"""
    failed_step: str | None = None
    """Id of the step that failed, where that is why."""
    late: Late | None = None
    """The time that was over, where that is why it was not measured in full."""
    late_fields: dict[str, Late] = {}
    """Field that is null, or a search that is cut short, because a time was over → which."""
    rejected: str = ""
    """The reason why it cannot win although it was measured: pruned, and no faster than dense, or of unknown loss."""
    artifact: StoredArtifact | None = None
    graph: StoredArtifact | None = None
    """The graph that the engine was built from, where other machines load that instead of what was built here."""
    test_vector: StoredArtifact | None = None
    """One sample and the engine's answer to it: an .npz file with ``input:<name>`` and ``output:<name>``."""
    history: tuple[HistoryEntry, ...] = ()
    fidelity: tuple[StageFidelity, ...] = ()
    quality: Quality | None = None
    latency: tuple[LatencyRow, ...] = ()
    memory: MemoryRow | None = None
    limits: tuple[LimitRow, ...] = ()
    """Distance to the best that the device could do, by batch size."""
    profile: tuple[Profile, ...] = ()
    """Time by module."""
    build: BuildRecord | None = None
    tuning: Tuning | None = None
    """Options that were tried in the time of ``tune_seconds``, and those that the engine runs with for it."""
    race: tuple[RaceRow, ...] = ()
    """Laps of the brief measurement that decides which variants are measured in full."""
    untried: bool = False
    """True where the time of the search was over before it was made."""
    pruning: tuple[PruningFacts, ...] = ()
    """Parts that pruning took away, one entry for each time that it was done."""
    recovery: tuple[Recovery, ...] = ()
    """Training that brought the pruned model back, likewise."""
    coverage: Coverage | None = None
    """Precisions in the graph that the engine is built from."""
    engine_coverage: Coverage | None = None
    """Precisions that the engine really computes in."""
    shortfall: str = ""
    """The part of its precision's name that it does not hold, where it can be used all the same."""
    assignment: tuple[Assignment, ...] = ()
    search: tuple[SearchStep, ...] = ()
    synthetic_calibration: bool = False
    """True where ranges were taken from made-up data: then its accuracy says nothing of real data."""
    prosecution: Prosecution | None = None
    """Inputs beside the samples that were tried on it, and one on which it is wrong; None if it was not asked for."""
    remarks: tuple[str, ...] = ()
    """Sentences on the gain of the low precision, with the evidence."""
    reasons: dict[str, str] = {}
    """Field that is null or empty → why."""

    @property
    def built_with(self) -> dict[str, Any]:
        """Fields of the step that made the engine, ``engine`` and ``device`` among them; empty where none did."""
        entries = (entry.parameters.get("fields") for entry in reversed(self.history))
        return next(
            (fields for fields in entries if isinstance(fields, dict) and isinstance(fields.get("engine"), dict)),
            {},
        )

    def options_of(self, engine: "type[Engine]") -> dict[str, Any]:
        """Look up the options that the engine was built and run with; what is built is the same for CUDA graphs."""
        graphs = {"cuda_graphs": self.cuda_graphs} if engine.replays_graphs() else {}
        return {**self.built_with.get("engine", {}), **(self.tuning.fields if self.tuning else {}), **graphs}

    @property
    def dropped(self) -> str:
        """Return the reason why it was not measured in full, or not made; empty if it was."""
        own = self.reason.removeprefix(DROPPED) if self.reason.startswith(DROPPED) else ""
        return next((row.dropped for row in self.race if row.dropped), own)

    def row(self, batch: int) -> LatencyRow | None:
        """Look up the latency at a batch size; None if it was not measured."""
        return next((row for row in self.latency if row.batch == batch and row.p50_ms is not None), None)

    def failure_at(self, batch: int) -> str:
        """Return the reason why the latency at a batch size could not be measured; empty if it was, or not tried."""
        failures = (row.failure for row in self.latency if row.batch == batch and not row.late)
        return next((failure for failure in failures if failure), "")

    @property
    def judged_fidelity(self) -> tuple[StageFidelity, ...]:
        """Return the comparisons with the reference that judge, without those of stages that change the model."""
        return tuple(entry for entry in self.fidelity if not (entry.passed and entry.reason))

    @property
    def lowest_sqnr_db(self) -> dict[str, float]:
        """Look up the lowest SQNR of all shapes by stage that judges, in order."""
        known = [(entry.stage, entry.sqnr_db) for entry in self.judged_fidelity if entry.sqnr_db is not None]
        return {stage: min(sqnr for name, sqnr in known if name == stage) for stage, _ in known}

    @property
    def falls_db(self) -> list[tuple[float, str, float, float]]:
        """List the falls of the lowest SQNR from stage to stage: how far, at which, from and to what."""
        pairs = itertools.pairwise(self.lowest_sqnr_db.items())
        return [(before - after, stage, before, after) for (_, before), (stage, after) in pairs if after < before]

    @property
    def peak_bytes(self) -> int | None:
        """Peak device memory, if it was measured."""
        return self.memory.peak_bytes if self.memory else None


class Verdict(BaseModel, frozen=True):
    """Judge the winner by one budget, as :mod:`~enginesmith.pipeline.results.verdicts` does."""

    budget: str
    limit: float
    actual: float | None
    passed: bool
    reason: str = ""
    """The reason why ``actual`` is not known."""
    late: bool = False
    """True where that is because a time was over."""


class BestReference(BaseModel, frozen=True):
    """Name the fastest setting of PyTorch that was measured, and compare the winner with it."""

    variant: str
    batch: int
    speedup: Interval | None = None
    """Speedup of the winner over it; None where one of them has no interval, or the winner is it."""
    too_noisy: bool = False
    """True where the speed-up is no result: its interval is too wide, or its calls were disturbed."""


class ModelRecord(BaseModel, frozen=True):
    """Record the model that a run is of."""

    source: str
    sha256: str | None = None
    """Digest of the model as it was loaded: its weights, signature and the code that it is built by."""
    content: str = ""
    """Digest of the same wherever its files lie, where it is a module."""
    signature: Signature | None
    data: str | None
    """Data that fidelity and latency were measured on: a data set's name, or ``synthetic``."""
    parts: dict[str, int] = {}
    """Samples for calibration, choice and judgement, where one data set was split; no sample is in two parts."""
    shapes: dict[str, str] = {}
    interacting_samples: bool = False
    """True if eager's answer to a sample depends on the others of its batch."""
    notes: tuple[str, ...] = ()
    """Notes of the steps that prune, run, load and export the model: targets that were missed, samples, sizes."""


class StepRecord(BaseModel, frozen=True):
    """Record a step of the plan and how it ended."""

    id: str
    status: Literal["done", "failed", "skipped", "pending"]
    cached: bool
    seconds: float | None
    """Its duration when it was done, which may have been in an earlier run."""
    effect: str
    kind: str = ""
    """Word for its work: ``build``."""
    variant: str = ""
    """Id of the variant that it does that to; empty where it does it to something else."""
    reached: bool = True
    """False where an interruption left it; a step for another machine has its own reason."""
    late: Late | None = None
    """The time that was over, where that is why it was not done."""


class Workaround(BaseModel, frozen=True):
    """Record an option that was added to the recipe because an engine is wrong without it."""

    option: AddedOption
    variant: str
    """The variant that was wrong."""
    fault: str
    """The input and what was wrong on it."""

    @property
    def sentence(self) -> str:
        """The option and the reason for it in one sentence."""
        return f"{self.option.words} was added: without it, {self.variant} is {self.fault}"


class Run(BaseModel, frozen=True, populate_by_name=True):
    """Describe the whole document."""

    schema_name: Literal["enginesmith.run/1"] = Field(SCHEMA, alias="schema")
    name: str
    created: str
    seconds: float
    complete: bool
    """True where every step has ended, be it by a failure; a run that was interrupted can be resumed."""
    recipe: Recipe
    """With the options of the workarounds."""
    workarounds: tuple[Workaround, ...] = ()
    device: Device | None = None
    """The device that was named or chosen."""
    environment: RunEnvironment
    limits: DeviceLimits | None = None
    """The best that the device can do; None if that was not measured."""
    model: ModelRecord
    steps: tuple[StepRecord, ...]
    baseline: VariantRecord
    variants: tuple[VariantRecord, ...]
    winner: str | None
    winner_reason: str = ""
    no_winner: NoWinner | None = None
    """Why there is no winner."""
    best_reference: BestReference | None = None
    """None where no variant was measured for comparison, or the winner has no latency."""
    pareto: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def requested(self) -> tuple[VariantRecord, ...]:
        """Return the variants that were asked for."""
        return tuple(record for record in self.variants if not record.reference)

    @property
    def asked_for(self) -> tuple[VariantRecord, ...]:
        """Return the variants that were asked for, and the baseline beside them if its engine was named, too."""
        named = self.requested and self.baseline.id in self.recipe.engines
        return (*self.requested, self.baseline) if named else self.requested

    @property
    def records(self) -> tuple[VariantRecord, ...]:
        """Return the baseline and all variants."""
        return (self.baseline, *self.variants)

    @property
    def requested_recipe(self) -> Recipe:
        """Return the recipe as people gave it."""
        return remove_workarounds(self.recipe, self.workarounds)

    @property
    def where(self) -> Device:
        """Return the device that the run was on, with its threads; this machine's GPU decides nothing about it."""
        return self.device or self.recipe.named_device or Device(threads=self.recipe.threads)

    @property
    def thread_count(self) -> int:
        """Return the number of threads of a session on the machine of the run."""
        return self.where.threads or self.environment.get("usable_cores") or self.where.thread_count

    @property
    def deciding_batch(self) -> int:
        """Return the batch size whose latency counts, as :func:`deciding_batch` chooses it."""
        rows = (row for record in self.records for row in record.latency)
        return deciding_batch(self.recipe, rows)


@dataclass(frozen=True)
class RunResult:
    """Report how a requested run ended, or how far it came."""

    run: Run | None = None
    """The record in its run directory; None where it was not begun."""
    error: EnginesmithError | None = None
    """The reason why nothing usable came out, if so."""
    steps: int = 0
    reused: int = 0
    """Number of steps whose results were there already, or were made for another one of the runs."""
    ended: bool = True
    """True where all was done that can be done here; not so where it was interrupted."""


def deciding_batch(recipe: Recipe, rows: Iterable[LatencyRow]) -> int:
    """Choose the batch size whose latency counts: the recipe's first, or the only one of a model of fixed batch."""
    measured = [row.batch for row in rows]
    return recipe.batch[0] if recipe.batch[0] in measured or not measured else measured[0]


def remove_workarounds(recipe: Recipe, workarounds: Iterable[Workaround]) -> Recipe:
    """Restore the recipe that workarounds were added to."""
    for workaround in workarounds:
        recipe = recipe.without_option(workaround.option)
    return recipe


def find_workarounds(run: Run) -> list[Workaround]:
    """List the options that mend engines which are wrong on an input, and that the recipe lacks."""
    workarounds: dict[AddedOption, Workaround] = {}
    for record in run.requested:
        finding = record.prosecution.finding if record.prosecution else None
        option = finding.option if finding else None
        if finding and option and run.recipe.with_option(option) != run.recipe:
            workarounds.setdefault(option, Workaround(option=option, variant=record.id, fault=finding.fault))
    return list(workarounds.values())[: _MOST_WORKAROUNDS - len(run.workarounds)]


def find_late_failures(run: Run) -> dict[str, str]:
    """List the variants that stayed in the race and failed afterwards, each with the stage that is its fault.

    The stage is empty where it is not known. A failure of the step that measures all of them is the fault of none.
    """
    late = {}
    for record in run.requested:
        own = record.status == "failed" and record.failed_step != "latency"
        if own and record.race and not any(row.dropped or row.failure for row in record.race):
            finding = record.prosecution.finding if record.prosecution else None
            late[record.id] = finding.guilty if finding else ""
    return late


def needs_another_race(run: Run) -> bool:
    """Tell whether variants dropped out of a race, perhaps for one that has failed since it was measured there."""
    failed = find_late_failures(run)
    raced = any(row.speedup for record in run.requested if record.id in failed for row in record.race)
    return raced and run.complete and any(row.dropped for record in run.requested for row in record.race)


def find_record(run: Run, name: str) -> VariantRecord:
    """Look up the baseline or a variant by name.

    Raises:
        UsageError: there is none.
    """
    known = {record.id: record for record in run.records}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    remedy = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
    raise UsageError(f"the run has no variant {name!r}", remedy)


def has_results(run: Run) -> bool:
    """Tell whether anything was built or measured, eager included."""
    return any(record.status in ("measured", "built") for record in run.records)


def list_losses(before: Run, after: Run) -> list[str]:
    """List the results of usable variants that a run has and a later state of it lacks, with the variant's reason.

    An engine that was built and fails only now, when it is measured, is still there: no result is lost. Nor is the
    latency at a batch size that was found because a larger one did not fit, where a larger one is measured now.
    """
    now = {record.id: record for record in after.records}
    losses = []
    for record in (record for record in before.records if record.status in ("measured", "built")):
        later = now.get(record.id)
        largest = max(_measured_batches(later) if later else (), default=0)
        searched = _measured_batches(record) - {*before.recipe.batch}
        replaced = {f"latency at batch {batch}" for batch in searched if batch < largest}
        if lacking := sorted(_results(record) - replaced - (_results(later) if later else set())):
            losses.append(
                f"{record.id} has no {', '.join(lacking)}{(later and later.reason and f' ({later.reason})') or ''}"
            )
    return losses


def _measured_batches(record: VariantRecord) -> set[int]:
    return {row.batch for row in record.latency if row.p50_ms is not None}


def _results(record: VariantRecord) -> set[str]:
    present = {name for name in ("artifact", "quality", "build", "profile", "limits") if getattr(record, name)}
    present |= {f"latency at batch {batch}" for batch in _measured_batches(record)}
    present |= {f"fidelity after {entry.stage}" for entry in record.fidelity}
    return present | ({"peak memory"} if record.peak_bytes is not None else set())


def write(run: Run, folder: Path) -> None:
    """Write ``run.json``, whole or not at all."""
    documents.write_text(folder / "run.json", run.model_dump_json(indent=1, by_alias=True) + "\n")


def read(folder: str | os.PathLike[str], *, to_go_on: bool = False) -> Run:
    """Read ``run.json`` of a run directory.

    Fields that this version does not know are left out, and the run's warnings name them. ``to_go_on`` is for doing
    what the recipe asks for: then it has to be known as a whole.

    Raises:
        UsageError: there is none, or it is damaged, or of another schema; the message names the field.
    """
    folder = Path(folder)
    path = folder / "run.json" if folder.is_dir() else folder
    if path.is_file() and path.suffix != ".json":
        raise UsageError(f"{path} is no run", "give a folder that optimize wrote, or its run.json")
    most = documents.MOST_NAMED

    def explain(error: OSError) -> UsageError:
        if (folder / "fleet.json").is_file():
            few = ", ".join(str(run) for run in sorted((folder / "runs").glob("*"))[:most]) or f"{folder}/runs/…"
            return UsageError(f"{folder} is a fleet, and this takes single runs", f"give one of its own: {few}")
        return UsageError(f"there is no run in {folder}: {error.strerror}", "give a folder that optimize wrote")

    again = "move it away with `optimize … --replace`: what is in the store is used again"
    run, unknown = documents.read(Run, path, SCHEMA, "optimize", explain, again)
    if to_go_on:
        unknown_settings = [name for name in unknown if name.startswith("recipe.")]
        again = f"enginesmith optimize {run.recipe.model} … --out {path.parent} --replace"
        documents.require_known(path, unknown_settings, again)
    if not unknown:
        return run
    warning = f"run.json has fields that this version does not know and leaves out: {name_some(unknown, most)}"
    added = {name: [warning, *run.environment.get(name, ())] for name in ("warnings", "cautions")}
    return run.model_copy(update={"environment": run.environment | added})


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``run.json``."""
    return Run.model_json_schema(by_alias=True, mode="serialization")
