"""Tables of what was measured beside latency: throughput, memory by part, limits of the machine, time by module."""

import itertools
from collections.abc import Iterator

from enginesmith.pipeline.frameworks.torch.pruning_facts import Facts
from enginesmith.pipeline.measure import profile as profile_table
from enginesmith.pipeline.measure.rows import LatencyRow, StageFidelity, Throughput
from enginesmith.pipeline.measure.statistics import NOISE_REMEDY, TOO_NOISY
from enginesmith.pipeline.passes.finetune.options import Recovery
from enginesmith.pipeline.report.tables import marked, points, rate, speedup
from enginesmith.pipeline.results.comparison import MOSTLY_DISTURBED
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.system.machine import BUSY
from enginesmith.pipeline.units import format_bytes, format_seconds, ms

LONG_TAIL = 20.0
"""p99 over p50 from which the report explains the tail."""
LATENCY = (
    *("variant", "batch", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "p99.9 ms", "mean ms", "speed-up [95 %]", "samples"),
    *("rounds", "launches", "disturbed", "load ms", "first call ms", "stopped because"),
)
LATENCY_ON_DEVICE = ("variant", "batch", "host p50 ms", "device p50 ms", "to the device ms", "from the device ms")
ENGINES = ("variant", "target", "built in", "workspace limit", "weights", "activations", "scratch", "kernels")
LENSES = ("variant", "seen through", "bytes", "source", "note")
BY_MODULE = ("module", "variant", "ms", "baseline ms", "over the baseline", "why")
OPERATORS = ("variant", "module", "operators", "ms", "of its total", "in")
THROUGHPUT = ("variant", "batch", "callers", "samples/s [95 %]", "p50 ms", "p99 ms", "")
MEMORY = ("variant", "batch", "peak", "weights", "activations", "host", "what")
LIMITS = ("variant", "batch", "measured ms", "floor ms", "measured/floor", "bound by", "in words")


def _records(run: Run) -> tuple[VariantRecord, ...]:
    return (run.baseline, *run.variants)


def latency(run: Run) -> list[tuple[str, ...]]:
    """A row for each variant and batch size that was measured; columns as in :data:`LATENCY`."""
    return [_latency(record, row) for record in _records(run) for row in record.latency]


def _latency(record: VariantRecord, row: LatencyRow) -> tuple[str, ...]:
    times = (row.p50_ms, row.p90_ms, row.p95_ms, row.p99_ms, row.p99_9_ms, row.mean_ms)
    counts = (row.n, row.rounds, row.launches)
    return (
        marked(record),
        str(row.batch),
        *map(ms, times),
        speedup(record, row.batch),
        *("–" if count is None else str(count) for count in counts),
        "–" if row.disturbed_share is None else f"{row.disturbed_share:.1%}",
        ms(row.load_ms),
        ms(row.first_call_ms),
        row.failure or row.stopped_because or "–",
    )


def on_device(run: Run) -> list[tuple[str, ...]]:
    """The host's clock beside the device's, where there are two; columns as in :data:`LATENCY_ON_DEVICE`."""
    return [
        (marked(record), str(row.batch), *map(ms, (row.p50_ms, row.device_p50_ms, row.h2d_ms, row.d2h_ms)))
        for record in _records(run)
        for row in record.latency
        if row.device_p50_ms is not None
    ]


def percentiles_missing(run: Run) -> list[str]:
    """Why tails are dashes, each reason once."""
    reasons = (row.reasons.get("p99_ms") for record in _records(run) for row in record.latency if row.p99_ms is None)
    return list(dict.fromkeys(reason for reason in reasons if reason))


def engines(run: Run) -> list[tuple[str, ...]]:
    """What engines say of themselves; columns as in :data:`ENGINES`."""
    return [_engine(record) for record in run.variants if record.build]


def _engine(record: VariantRecord) -> tuple[str, ...]:
    build = record.build
    assert build is not None
    kernels = ", ".join(f"{count} {name}" for name, count in (build.layers or {}).items())
    sizes = (build.workspace_limit_bytes, build.weights_bytes, build.activation_bytes, build.scratch_bytes)
    return (
        marked(record),
        record.target or "–",
        format_seconds(build.seconds),
        *(format_bytes(size) for size in sizes),
        kernels or "–",
    )


def unsaid(run: Run) -> Iterator[str]:
    """What engines do not tell, all fields of one reason together."""
    together: dict[str, list[str]] = {}
    for record in run.variants:
        for name, reason in (record.build.reasons if record.build else {}).items():
            fields = together.setdefault(reason, [])
            fields += [name] if name not in fields else []
    for reason, names in together.items():
        yield f"No {', '.join(name.removesuffix('_bytes').replace('_', ' ') for name in names)}: {reason}"


def lenses(run: Run) -> list[tuple[str, ...]]:
    """Every way that memory was looked at; columns as in :data:`LENSES`."""
    return [
        (marked(record), name.replace("_", " "), format_bytes(lens.bytes), lens.source, lens.note)
        for record in _records(run)
        if record.memory
        for name, lens in record.memory.lenses.items()
    ]


def throughput(run: Run) -> list[tuple[str, ...]]:
    """A row for each number of callers; columns as in :data:`THROUGHPUT`."""
    return [
        (marked(record), str(row.batch), str(level.callers))
        + (f"{rate(found.median)} [{rate(found.low)}, {rate(found.high)}]",)
        + (ms(level.p50_ms), ms(level.p99_ms), "; ".join(_said(level, row)))
        for record in _records(run)
        for row in record.latency
        for level in row.concurrency
        for found in (level.samples_per_s,)
    ]


def _said(level: Throughput, row: LatencyRow) -> Iterator[str]:
    if level.callers == row.knee:
        yield "the knee"
    if level.callers > 1 and row.sibling_note:
        yield row.sibling_note


def memory(run: Run) -> list[tuple[str, ...]]:
    """A row for each variant, by part; columns as in :data:`MEMORY`."""
    return [
        (marked(record), str(row.batch), format_bytes(row.peak_bytes), format_bytes(row.weights_bytes))
        + (format_bytes(row.activation_bytes), format_bytes(row.host_peak_bytes), row.failure or "measured")
        for record in _records(run)
        if (row := record.memory)
    ]


def limits(run: Run) -> list[tuple[str, ...]]:
    """How far each variant is from what the device can do; columns as in :data:`LIMITS`."""
    return [
        (marked(record), str(row.batch), ms(row.measured_ms), ms(row.floor_ms))
        + ("–" if row.measured_over_floor is None else f"{row.measured_over_floor:.3g}×", row.bound_by, row.summary)
        for record in _records(run)
        for row in record.limits
    ]


def profile(run: Run) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of the time by module, the baseline's beside those of all variants."""
    found = [one for record in _records(run) for one in record.profile]
    return profile_table.columns(found) if found else (), profile_table.cells(found)


def by_module(run: Run) -> Iterator[tuple[str, ...]]:
    """Each variant's modules beside the baseline's, what lost time first; columns as in :data:`BY_MODULE`."""
    theirs = {one.batch: one for one in run.baseline.profile if one.total_ms is not None}
    for record in _winner_first(run):
        for found in record.profile:
            if found.total_ms is None or found.batch not in theirs:
                continue
            for row in profile_table.joined([theirs[found.batch], found]):
                ratio = row.ratio.get(found.variant)
                times = (ms(row.ms.get(found.variant)), ms(row.ms.get(run.baseline.id)))
                over = "–" if ratio is None else f"{ratio:.2f}×"
                yield row.module, marked(record), *times, over, row.why.get(found.variant, "")


def operators(run: Run) -> Iterator[tuple[str, ...]]:
    """Which operators do a module's work, by variant, the slowest first; columns as in :data:`OPERATORS`."""
    for record in (run.baseline, *_winner_first(run)):
        for found in record.profile:
            for row in found.rows:
                names = ", ".join(f"{count}× {name}" for name, count in row.operators.items())
                yield marked(record), row.module, names, ms(row.ms), f"{row.share:.1%}", row.precision or "–"


def profile_rows(run: Run) -> int:
    """How many rows all profiles have together."""
    return sum(len(one.rows) for record in _records(run) for one in record.profile)


def _winner_first(run: Run) -> list[VariantRecord]:
    return sorted(run.variants, key=lambda one: (one.id != run.winner, one.id not in run.pareto))


def profiled(run: Run) -> Iterator[str]:
    """For each profile whose figures they are, what profiling cost and what it does not tell; or why there is none."""
    for record in _records(run):
        for found in record.profile:
            row = record.row(found.batch)
            if found.total_ms is None:
                parts: tuple[str, ...] = (found.reasons["total_ms"],)
            else:
                parts = (f"by {found.source}", found.overhead(row.p50_ms if row else None), *found.notes)
            yield f"profile of {marked(record)} at batch {found.batch}: {'; '.join(filter(None, parts))}"


def out_of_memory(run: Run) -> Iterator[str]:
    """For each variant that ran out of memory, what it asked for, and the largest batch that fits."""
    for record in _records(run):
        full = next((row for row in record.latency if row.oom), None)
        if full is None or full.oom is None:
            continue
        fits = max((row.batch for row in record.latency if not row.failure), default=None)
        asked = f"asked for {format_bytes(full.oom.asked_bytes)}" if full.oom.asked_bytes else "out of memory"
        free = f", {format_bytes(full.oom.free_bytes)} free" if full.oom.free_bytes is not None else ""
        back = {True: "; its memory is back", False: "; its memory was not seen to be back", None: ""}
        largest = f"the largest batch that fits is {fits}" if fits else "no batch fits"
        yield f"{marked(record)}: {largest}; batch {full.batch} {asked}{free}{back[full.oom.given_back]}"


def disturbed(run: Run) -> Iterator[str]:
    """Say once what noise others made: speed-ups that tell nothing, or medians that are of disturbed calls."""
    rows = [(record, row) for record in _records(run) for row in record.latency]
    noisy = [f"{marked(record)} at batch {row.batch}" for record, row in rows if row.speedup and row.speedup.too_noisy]
    shares = [row.disturbed_share for _, row in rows if (row.disturbed_share or 0.0) > MOSTLY_DISTURBED]
    if noisy:
        yield f"the speed-up is {TOO_NOISY} of {', '.join(noisy)}; {NOISE_REMEDY}"
    elif shares and not any(str(one).startswith(BUSY) for one in run.environment.get("warnings", ())):
        waited = f"in up to {max(filter(None, shares)):.0%} of their calls threads waited for a core that others had"
        yield f"{len(shares)} of {len(rows)} measurements were disturbed: {waited}; {NOISE_REMEDY}"


def explain_tails(run: Run) -> tuple[str, ...]:
    """Explain percentiles that are far above the median: one note for all rows, none where there are no such tails."""
    tails = [
        (row.p99_ms / row.p50_ms, f"{marked(record)} at batch {row.batch} is {ms(row.p99_ms)} ms", ms(row.p50_ms))
        for record in _records(run)
        for row in record.latency
        if row.p50_ms and row.p99_ms and row.p99_ms > LONG_TAIL * row.p50_ms
    ]
    if not tails:
        return ()
    _, longest, median = max(tails)
    others = f" (and {len(tails) - 1} more)" if len(tails) > 1 else ""
    return (
        f"p99 of {longest} beside a p50 of {median} ms{others}: on a busy machine that is usually time in which the "
        "scheduler gave its cores to other work, and says little of the engine. Measure on a machine that is otherwise "
        "idle, or with fewer --threads than it has cores",
    )


def notes(run: Run) -> tuple[str, ...]:
    """All that is to be said of these tables."""
    return (*profiled(run), *out_of_memory(run), *disturbed(run), *explain_tails(run))


# Tables of how right the variants are: accuracy on labelled data, and outputs held against the baseline's by stage.

QUALITY = ("variant", "metric", "value", "baseline", "drop [95 %]", "samples")
FIDELITY = ("variant", "stage", "at", "SQNR dB", "cosine", "max abs error", "argmax agreement", "passed")
LOST = ("variant", "largest fall at", "SQNR dB", "lowest SQNR dB", "metric")
_NOTHING_DB = 3.0
"""A fall by less is no loss that anyone looks for: the noise's power does not even double."""


def quality(run: Run) -> list[tuple[str, ...]]:
    """A row for each variant that was judged on labelled data; columns as in :data:`QUALITY`."""
    return [
        (marked(record), found.metric, f"{found.value:.4f}", f"{found.baseline:.4f}")
        + (f"{found.drop:+.4f}{_interval(found.drop_low, found.drop_high)}", str(found.samples))
        for record in (run.baseline, *run.variants)
        if (found := record.quality)
    ]


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:+.4f}, {high:+.4f}]"


def fidelity(run: Run) -> list[tuple[str, ...]]:
    """A row for each comparison with the reference; columns as in :data:`FIDELITY`."""
    return [_compared(record, entry) for record in run.variants for entry in record.fidelity]


def _compared(record: VariantRecord, entry: StageFidelity) -> tuple[str, ...]:
    return (
        marked(record),
        entry.stage,
        f"{entry.point} (batch {entry.batch})",
        decimal(entry.sqnr_db, 1),
        decimal(entry.cosine, 6),
        decimal(entry.max_abs_error, 3, "g"),
        decimal(entry.argmax_agreement, 4),
        passed(entry),
    )


def passed(entry: StageFidelity) -> str:
    """Whether a comparison was close enough, and why not."""
    if not entry.passed:
        return f"no: {entry.reason}" if entry.reason else "no"
    return f"not judged: {entry.reason}" if entry.reason else "yes"


def decimal(value: float | None, digits: int, kind: str = "f") -> str:
    """A number with so many digits; a dash where it is unknown."""
    return "–" if value is None else f"{value:.{digits}{kind}}"


def lost(run: Run) -> list[tuple[str, ...]]:
    """A row for each variant: the stage at which its outputs fell furthest; columns as in :data:`LOST`."""
    return [
        (marked(record), *_fall(found), points(record.quality) if record.quality else "–")
        for record in run.variants
        if (found := _lowest(record))
    ]


def _lowest(record: VariantRecord) -> dict[str, float]:
    """By stage, the lowest SQNR of all points, where it was judged: what is changed on purpose is no loss."""
    found: dict[str, float] = {}
    for entry in record.fidelity:
        if entry.sqnr_db is not None and not (entry.passed and entry.reason):
            found[entry.stage] = min(entry.sqnr_db, found.get(entry.stage, entry.sqnr_db))
    return found


def _fall(lowest: dict[str, float]) -> tuple[str, str, str]:
    """The stage with the largest fall from the one before it, the SQNR there, and the lowest of all."""
    worst = f"{min(lowest.values()):.1f}"
    pairs = itertools.pairwise(lowest.items())
    falls = [(before - after, stage, before, after) for (_, before), (stage, after) in pairs]
    fall, stage, before, after = max(falls, default=(0.0, "", 0.0, 0.0))
    if fall < _NOTHING_DB:
        return "none to speak of", "–", worst
    return stage, f"{before:.1f} → {after:.1f}", worst


# Tables of models that were made smaller: what was pruned, and how training them back went.

MODELS = ("pruned to", "ranked by", "channels", "MACs left", "parameters left", "trained back", "on held-back samples")
GROUPS = ("group", "unit", "before", "after")
CURVE = ("step", "loss", "metric", "learning rate")


def pruned(run: Run) -> Iterator[VariantRecord]:
    """One variant for each pruned model."""
    seen: set[str] = set()
    for record in run.variants:
        if record.prune and record.pruning and record.prune not in seen:
            seen.add(record.prune)
            yield record


def models(run: Run) -> list[tuple[str, ...]]:
    """A row for each time that a model was pruned; columns as in :data:`MODELS`."""
    return [row for record in pruned(run) for row in _turns(record)]


def _turns(record: VariantRecord) -> Iterator[tuple[str, ...]]:
    several = len(record.pruning) > 1
    for index, facts in enumerate(record.pruning):
        back = record.recovery[index] if index < len(record.recovery) else None
        yield (
            f"{record.prune}, step {index + 1}" if several else record.prune or "",
            f"{facts.importance}, {facts.scope}",
            f"{facts.channels_before} → {facts.channels_after}",
            _left(facts.macs_before, facts.macs_after),
            _left(facts.parameters_before, facts.parameters_after),
            f"{back.method}, {back.steps} steps: {back.reason}" if back else "no",
            f"{back.metric} {back.before:.4f} → {back.after:.4f} (dense {back.teacher:.4f})" if back else "–",
        )


def _left(before: int, after: int) -> str:
    return f"{after / before:.1%}" if before else "–"


def groups(facts: Facts) -> list[tuple[str, ...]]:
    """What each group of layers lost; columns as in :data:`GROUPS`."""
    return [(one.root, one.unit, str(one.before), str(one.after)) for one in facts.groups]


def curve(recovery: Recovery) -> list[tuple[str, ...]]:
    """How training went; columns as in :data:`CURVE`."""
    return [
        (str(point.step), "–" if point.loss is None else f"{point.loss:.4g}", f"{point.metric:.4f}")
        + (f"{point.learning_rate:.2g}",)
        for point in recovery.curve
    ]
