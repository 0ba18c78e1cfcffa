"""Rows of run.json that measurements fill in.

Nothing here measures or imports what runs models: results and reports read these types without loading torch.
What is None in a row has its reason under its name in ``reasons``.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field

from enginesmith.pipeline.measure.statistics import MOSTLY_DISTURBED, TOO_NOISY, Interval
from enginesmith.pipeline.units import format_share

SAMPLES = "samples.npz"


class OutOfMemory(BaseModel, frozen=True):
    """Report a batch that did not fit. What is None has its reason under its name in ``reasons``."""

    message: str
    """The allocator's words, or why a process that ended without one is taken for out of memory."""
    asked_bytes: int | None = None
    free_bytes: int | None = None
    """Left when it was asked for: of the limit where there was one."""
    limit_bytes: int | None = None
    """Bytes that loading and running were allowed to add to the loaded libraries."""
    used_before_bytes: int | None = None
    """In use besides, as :func:`used_bytes` counts: before the process started, or less what it alone had."""
    used_after_bytes: int | None = None
    """In use besides once the process had ended."""
    given_back: bool | None = None
    """True where use returned to within 1 % of before."""
    reasons: dict[str, str] = {}


class Throughput(BaseModel, frozen=True):
    """Report one candidate under a number of callers, each calling again as soon as it has its answer."""

    callers: int
    samples_per_s: Interval
    """Samples that were answered in a second, by the clock."""
    p50_ms: float = Field(ge=0)
    p99_ms: float | None = Field(ge=0)
    n: int


class TuningTrial(BaseModel, frozen=True):
    """Record a value of an option that was measured beside the best ones so far."""

    option: str
    value: str
    speedup: Interval | None = None
    """Against the best options before this trial, of the time of a call or, for several callers, of the throughput.

    None where it failed, or too few rounds were measured.
    """
    failure: str = ""


class Tuning(BaseModel, frozen=True):
    """Record the options of an engine that were tried, and what was kept of them."""

    fields: dict[str, Any]
    """Fields of the engine that are not as the recipe has them."""
    kept: tuple[str, ...]
    """Options and values that were measurably faster: ``prefer_nhwc=1``."""
    trials: tuple[TuningTrial, ...]
    untried: tuple[str, ...]
    """Options that no time was left for."""
    cut: bool = False
    """True where that is because the time of the whole run was over, and not the time for tuning."""
    confirmation: Interval | None = None
    """Speed-up of all that seemed faster together against the recipe's options, measured once more at the end."""
    other_batches: dict[int, Interval] = {}
    """Speed-up likewise at the other batch sizes that are measured, where the time of a call decides."""
    dropped: str = ""
    """The reason why the engine runs with the recipe's options although others seemed faster."""


class RaceRow(BaseModel, frozen=True):
    """Record how a variant did in one lap of the race that decides which ones are measured in full."""

    variant: str
    lap: int
    """Counted from 1; 0 before the first lap, for a variant that lost too much accuracy on the samples for choosing."""
    kept: bool = False
    """True for one that is not dropped: it was measured in full in an earlier state of the run, or failed then."""
    speedup: Interval | None = None
    """Against the first variant of the race; None where it was not measured, or in too few rounds."""
    disturbed: bool = False
    """True where other programs took the cores from too many calls for the speed-up to be trusted."""
    dropped: str = ""
    """The reason why it was not measured further."""
    failure: str = ""
    engine_sha256: str = ""
    """Digest of the engine that was measured; empty before the first lap."""


class Stop(BaseModel, frozen=True):
    """Record what ended a measurement of latency, with the figure of that limit."""

    cause: Literal["precise", "time limit", "whole run", "launches", "failed"]
    precision: float | None = None
    """Half the width of every median's interval, as a share of it, that was asked for and reached."""
    seconds: float | None = None
    """The time limit that was reached."""
    extension: float = 1
    """Factor by which that was longer than what was asked for, because the medians were too noisy."""
    launches: int | None = None
    """All launches that there may be."""

    @property
    def sentence(self) -> str:
        """Say it in words."""
        if self.cause == "precise":
            return f"every median's 95 % interval is within ±{self.precision:.0%}"
        if self.cause == "time limit":
            more = f", {self.extension:g} times what was asked for" if self.extension > 1 else ""
            return f"the time limit of {self.seconds:g} s{more}"
        if self.cause == "whole run":
            return "the time of the whole run"
        return f"{self.launches} launches, the most that there are" if self.launches else "every candidate failed"


class LatencyRow(BaseModel, frozen=True):
    """Report one candidate at one batch size. A field that is None has its reason in ``reasons``."""

    batch: int
    n: int | None = None
    rounds: int | None = None
    launches: int | None = None
    """Processes, one after another, that these rounds are of: intervals are over launches from 3 on."""
    p50_ms: float | None = Field(None, ge=0)
    p90_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = Field(None, ge=0)
    p99_9_ms: float | None = None
    mean_ms: float | None = None
    throughput_per_s: float | None = None
    """Samples answered in a second of the clock: the best of ``concurrency`` where it was asked for, else of one caller
    in the blocks that latency comes from."""
    concurrency: tuple[Throughput, ...] = ()
    knee: int | None = None
    """The fewest callers that have 95 % of the best throughput."""
    sibling_note: str = ""
    """Names what several callers share, where that holds them up."""
    median_ms: Interval | None = None
    """The median over rounds of the blocks' medians, which the stopping rule looks at."""
    speedup: Interval | None = None
    """Against the first candidate, paired by round."""
    speedup_disturbed: bool = False
    """True where the speed-up is of calls whose threads waited for a core, because too few others were measured."""
    speedup_over_dense: Interval | None = None
    """For a pruned or sparse variant, against the one that differs from it in nothing else."""
    device_p50_ms: float | None = None
    """By CUDA events on the session's stream."""
    h2d_ms: float | None = None
    d2h_ms: float | None = None
    load_ms: float | None = None
    first_call_ms: float | None = None
    first_call_note: str = ""
    """Names what else the first call did: compiling kernels, or taking over those of an earlier run."""
    warmup_calls: int | None = None
    warmup_ended: str | None = None
    settle_ms: float | None = None
    """Median time that the session's threads took to fall asleep after a block."""
    idle_cpu_share: float | None = None
    """Cores that its process kept busy while others were measured; near 0 if it left them undisturbed."""
    preemptions_per_s: float | None = None
    """Times that the kernel took a core from it while it was timed: near 0 on a machine that is not shared."""
    disturbed_share: float | None = None
    """Share of calls around which its threads waited for a core; medians and the speed-up leave them out."""
    speedup_rounds: int | None = None
    """Rounds behind the speed-up: those with undisturbed calls on both sides."""
    group: int | None = None
    """Where the variants did not fit on the GPU together: the group that it was measured in, with the baseline."""
    stopped_because: str | None = None
    """The sentence about ``stop``."""
    stop: Stop | None = None
    failure: str | None = None
    late: bool = False
    """True where it failed only because the time of the whole run was over."""
    oom: OutOfMemory | None = None
    """Set where it failed because memory ran out."""
    reasons: dict[str, str] = {}

    @property
    def cut(self) -> bool:
        """Tell whether the time of the whole run ended it before its own time was over."""
        return self.stop is not None and self.stop.cause == "whole run"

    @property
    def mostly_disturbed(self) -> bool:
        """Tell whether most calls were disturbed, so that even the median is of such ones."""
        return (self.disturbed_share or 0.0) > MOSTLY_DISTURBED

    @property
    def speedup_too_noisy(self) -> bool:
        """Tell whether the speed-up is no result: its interval is too wide, or its calls were disturbed."""
        return self.speedup is not None and (self.speedup.too_noisy or self.speedup_disturbed)

    def format_speedup(self) -> str:
        """Format the speed-up: ``3.10× [3.02, 3.18]``, that it is too noisy to tell, or a dash where it is unknown."""
        if self.speedup is None:
            return "–"
        return TOO_NOISY if self.speedup_too_noisy else self.speedup.times()


class Lens(BaseModel, frozen=True):
    """Report one way to look at memory: a number, where it comes from, what it means."""

    bytes: int
    source: str
    note: str = ""


class MemoryRow(BaseModel, frozen=True):
    """Report the memory of one candidate at one batch size. A field that is None has its reason in ``reasons``."""

    device: str
    batch: int
    peak_bytes: int | None = Field(None, ge=0)
    """The most that loading and running together needed at any time."""
    weights_bytes: int | None = None
    """Kept by the loaded session: weights in the engine's own layout, graph, buffers."""
    activation_bytes: int | None = None
    """The most that running needed besides the weights: activations, workspace, outputs."""
    host_peak_bytes: int | None = None
    """The most that the whole process had resident, libraries and all."""
    deployment_bytes: int | None = None
    """All that a process which loads it as in production takes of the GPU: context, kernels and workspaces included."""
    device_bytes: int | None = None
    """All memory of the GPU."""
    deployments_per_device: int | None = None
    """Such processes that fit into the GPU's memory together."""
    lenses: dict[str, Lens] = {}
    failure: str | None = None
    oom: OutOfMemory | None = None
    """Set where it did not fit: bytes asked for, bytes free, and that they were given back."""
    reasons: dict[str, str] = {}


_HOLDS: dict[str, tuple[str, ...]] = {
    "tf32": ("fp32",),
    "fp16": ("tf32", "fp32"),
    "bf16": ("tf32", "fp32"),
    "fp8": ("fp16", "bf16", "tf32", "fp32"),
    "int8": ("fp16", "bf16", "tf32", "fp32"),
    "fp4": ("fp8", "fp16", "bf16", "tf32", "fp32"),
    "int4": ("int8", "fp8", "fp16", "bf16", "tf32", "fp32"),
    "int16": ("fp32",),
}
"""Wider types that hold every value of a narrow one: an engine is free to multiply in them, and CPU kernels do."""


class Rate(BaseModel, frozen=True):
    """Report how often something happens in a second, at best."""

    per_second: float
    """Bytes, floating-point (or integer) operations, operators or calls."""
    usual_per_second: float
    """Rate of the median repetition."""
    repetitions: int
    how: str

    @property
    def spread(self) -> float:
        """The best over the median: 1 on a machine that does nothing else."""
        return self.per_second / self.usual_per_second


class DeviceLimits(BaseModel, frozen=True):
    """Report the best of one device. What is None, or no key of ``products``, has its reason under that name."""

    device: str
    copy_bandwidth: Rate | None
    """Bytes of memory read and written together, by copying."""
    read_bandwidth: Rate | None
    """Bytes of memory that are only read, as weights are."""
    cache_bandwidth: Rate | None
    """Bytes read and written within the caches."""
    cache_bytes: int | None
    """All that can stay in caches from one inference to the next."""
    products: dict[str, Rate]
    """Operations of a matrix product, a multiply-add being two, by what it is computed in."""
    operators: Rate | None
    """Operators that have next to nothing to do, one after the other."""
    calls: Rate | None
    """Inferences of one such operator."""
    seconds: float
    warnings: tuple[str, ...] = ()
    reasons: dict[str, str] = {}

    @property
    def memory_bandwidth(self) -> Rate | None:
        """Return the faster one of copying and reading: no mixture of both is faster than that."""
        known = [rate for rate in (self.copy_bandwidth, self.read_bandwidth) if rate]
        return max(known, key=lambda rate: rate.per_second, default=None)

    def product(self, precision: str) -> tuple[str, Rate] | None:
        """Find the fastest way to multiply values of a precision: in it or in a type that holds them; with its name."""
        named = ((name, self.products.get(name)) for name in (precision, *_HOLDS.get(precision, ())))
        known = [(name, rate) for name, rate in named if rate]
        return max(known, key=lambda item: item[1].per_second, default=None)


Bound = Literal["arithmetic", "memory", "launch", "nothing known"]


class Work(BaseModel, frozen=True):
    """Count the work of one inference, at one batch size.

    What is None has its reason under its name; so has what is less than it should be, as part of it is not known.
    """

    batch: int
    flops: dict[str, int]
    """Operations of all products by what they are computed in; a multiply-add is two. Nothing else is counted."""
    least_bytes: int
    """Weights, inputs and outputs, each once, as far as they are used: what no engine gets around."""
    large_intermediates: tuple[int, ...] = ()
    """Bytes of each result that is too large for small caches; only of graphs that are executed as they stand."""
    launches: int | None = None
    """Operators that are started; None where the engine fuses them out of sight."""
    reasons: dict[str, str] = {}


class LimitRow(BaseModel, frozen=True):
    """Compare a variant's measured time with the least that it could be. What is None has its reason under its name."""

    batch: int
    work: Work
    measured_ms: float | None
    arithmetic_ms: float | None
    memory_ms: float | None
    launch_ms: float | None
    floor_ms: float | None
    """The largest of the three."""
    measured_over_floor: float | None
    """Below 1 the floor is wrong, and ``summary`` says so."""
    bound_by: Bound
    summary: str
    reasons: dict[str, str] = {}


ROOT = "(model)"
"""The model itself: what no part of it does."""


class ProfileRow(BaseModel, frozen=True):
    """Report the time of one module, or of several whose work an engine does in one operator."""

    module: str
    """Path of the module, ``a + b`` for several, or ``(unknown: node …)``."""
    modules: tuple[str, ...]
    """Paths of the modules, the empty one being the model itself; none where it is not known."""
    operators: dict[str, int]
    """The engine's operators or kernels with their runs in one inference, the slowest first."""
    calls: int
    ms: float
    """Time in one inference: medians over those that were profiled, added up."""
    share: float
    """Share of all operators' time."""
    precision: str = ""
    """Type that its products are computed in, the slowest of several; empty where there are none or it is not told."""
    conversions: dict[str, float] = {}
    """Milliseconds of operators in it that only change types or layouts."""
    also: dict[str, tuple[str, ...]] = {}
    """Other modules' operators that are fused into these."""


class Profile(BaseModel, frozen=True):
    """Report one variant's time by module, at one batch size. A field that is None has its reason in ``reasons``."""

    variant: str
    batch: int
    device: str
    calls: int
    source: str = ""
    rows: tuple[ProfileRow, ...] = ()
    """The slowest first; they add up to the total."""
    total_ms: float | None = None
    call_ms: float | None = None
    """Median of a whole inference while it was profiled."""
    unattributed_share: float | None = None
    """Share of the total whose module is not known."""
    notes: tuple[str, ...] = ()
    failure: str | None = None
    reasons: dict[str, str] = {}

    def overhead(self, p50_ms: float | None) -> str:
        """Say what profiling cost beside the latency measured without it; empty if either is unknown."""
        if self.call_ms is None or not p50_ms:
            return ""
        return f"{self.call_ms:.3g} ms a call while profiled, {p50_ms:.3g} ms without: {self.call_ms / p50_ms:.2f}×"


class StageFidelity(BaseModel, frozen=True):
    """Report how close a stage's outputs are to the reference at one point: an entry of ``fidelity[]``."""

    stage: str
    point: str
    batch: int
    sqnr_db: float | None
    cosine: float | None
    max_abs_error: float | None
    argmax_agreement: float | None
    paired: float | None = None
    """Smallest share of rows with a partner of all outputs whose rows are chosen by values; they are sets of rows."""
    sets: tuple[str, ...] = ()
    """Outputs that are compared as sets of rows, whatever their order."""
    unverified: dict[str, float] = {}
    """Outputs of which rounding decides so many numbers that nothing verifies them, and the share that it does."""
    rounding_note: str = ""
    """Says that rounding in float32 explains why an output passes whose difference is beyond the threshold."""
    passed: bool
    reason: str = ""

    def describe_unverified(self) -> str:
        """Say which outputs are not verified, to be added to a sentence that says the others are; else nothing."""
        parts = [f"{name!r} (rounding decides {format_share(share)} of it)" for name, share in self.unverified.items()]
        return f", but for what is not verified: {', '.join(parts)}" if parts else ""
