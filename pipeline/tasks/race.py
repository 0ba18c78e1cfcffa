"""Race variants: measure all briefly, and keep the fastest ones to be measured in full."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import Field, SerializeAsAny

from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.engines.base import Candidate, Engine
from enginesmith.pipeline.errors import DROPPED, NO_TIME, ModelError
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import LatencyBenchmark
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import LatencyRow, RaceRow
from enginesmith.pipeline.measure.statistics import Interval, divide
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.tasks.base import Inputs, Task, read_models, read_records, write_records
from enginesmith.pipeline.tasks.measure import HANG_SECONDS, VERIFIED, Measurement, logs_in_own_log, measured_feeds
from enginesmith.pipeline.tasks.mixed_precision import ASSIGNMENT, DROP_HIGH
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.units import count_words, group_values

RACE = "race"
STAY = "stay"
CHOICE = "choice"
"""Role of the record of a variant's metric on the samples for choosing: ``V choice`` for the variant V."""
PRUNED_CHOICE = "pruned choice"
"""Likewise for the pruned module, of which variants are made if it does not lose too much."""
EARLIER = "earlier"
"""Role of the record of a first race, whose results count."""
_LAPS = 3
"""Laps of a race, all of the same time: it is divided among ever fewer variants."""
_BLOCK_MS = 25.0
_WARMUP_SECONDS = 1.0
_PRECISION = 0.05
"""A lap ends when every median is known so well: differences that drop somebody are larger."""
_COMPILED_GAIN = 1.1
"""Speed-up that compiling in PyTorch for a CPU may bring over the fastest other variant in the same precision.

None was measured: at most 0.78 × its speed in 15 races (benchmarks/results/search_time.md).
"""
_COMPILED_OVER_EAGER = 4.0
"""Likewise over eager in the same precision: 3.7 is the most that was measured, in a network of 60 µs."""
_HARDLY = 0.25
"""Share of the allowed drop up to which a variant hardly loses anything on the samples for choosing."""
_GAIN = 1.1
"""Gain that the options of a slower variant may still bring, so that a smaller distance drops nobody."""


class Race(Measurement):
    """Measure variants side by side in laps, and drop those that are clearly slower or lose too much accuracy."""

    title: ClassVar[str] = "race"
    time_share: float = Field(0.5, exclude=True)

    engines: dict[str, SerializeAsAny[Engine]]
    """By variant, whose artifact comes in under the same name. Speed-ups are against the first that runs."""
    lossless: tuple[str, ...]
    """Variants that compute in the model's own precision: the fastest of them stays, whatever the others lose.

    So does the fastest one that hardly loses anything, if it is faster.
    """
    seconds: float
    """Time of all laps together."""
    most: int
    """Variants that are measured in full."""
    by_speed: bool = True
    """False where a slower variant may win, by its memory or its other latencies: none that is made is dropped for its
    speed. Those that take long to make still are not made where they cannot be nearly as fast."""
    kept: tuple[str, ...] = ()
    """Variants that are not dropped: they were measured in full before others could be tried."""
    failed: tuple[str, ...] = ()
    """Variants that stayed in an earlier race of the run, and failed afterwards: nobody is dropped for them."""
    earlier: tuple[RaceRow, ...] = Field((), exclude=True)
    """Rows that dropped variants in an earlier race of the run on this machine: their engines are not measured again.

    One without a digest is of what is wrong whatever the engine is.

    No part of the key, which has the machine and the engines.
    """
    unmade: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Variants that take long to make, each with others of its precision, which show if it is worth the time."""
    dense: dict[str, str] = Field(default_factory=dict)
    """By pruned variant, the one that differs from it only in being dense. If that is out of the race, the pruned one
    is not made; if the pruned one stays, so does that one, so that their speeds are compared."""
    originals: tuple[str, ...] = ()
    """The model as it is, and cast to their precisions: measured in the first lap to judge those that are not made."""
    max_drop: float | None
    largest: bool
    """Measure at the largest batch size, and not at the first one."""

    @property
    def expected_seconds(self) -> float:
        return self.seconds

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        rows = read_models(inputs.get(EARLIER), RaceRow)
        verified = [name for name in self.engines if f"{name} {VERIFIED}" in inputs]
        new = set(verified) - {row.variant for row in rows}
        out_before = [
            row.model_copy(update={"speedup": None})  # against the first variant of another race
            for row in self.earlier
            if row.variant in new and row.engine_sha256 in ("", inputs[row.variant].sha256)
        ]
        rows += out_before
        fresh = [name for name in verified if name not in {row.variant for row in rows}]
        rows += [row for name in fresh if (row := self._judge_drop(name, inputs, f"{name} {CHOICE}"))]
        unmade = self.dense.keys() - {*verified, *(row.variant for row in rows)}
        rows += [
            row for name in self.engines if name in unmade and (row := self._judge_drop(name, inputs, PRUNED_CHOICE))
        ]
        rows += [RaceRow(variant=name, lap=0, kept=True) for name in fresh if name in (*self.kept, *self.failed)]
        ended = {*self.failed, *(row.variant for row in rows if row.dropped or row.failure)}
        running = [name for name in verified if name not in ended]
        if self._needs_laps(running, fresh, rows):
            running = [*self._order(running), *self.originals]
            candidates = [Candidate(name, self.engines[name], inputs[name], self.device) for name in running]
            feeds = measured_feeds(inputs["reference"])
            batch = max(feeds) if self.largest else next(iter(feeds))
            with logs_in_own_log() as logs, LatencyBenchmark(candidates, self._settings, logs, progress) as benchmark:
                benchmark.end_in(min(HANG_SECONDS, self.measuring_seconds), self.grace_seconds)
                before = max((row.lap for row in rows), default=0)
                safe = [name for name in running if self._hardly_loses(name, inputs)]
                laps = self._run_laps(benchmark, running, safe, batch, feeds[batch], progress)
                digests = {name: {"engine_sha256": inputs[name].sha256} for name in running}
                rows += [row.model_copy(update={"lap": before + row.lap, **digests[row.variant]}) for row in laps]
        reasons = {name: explain_unmade(rows, others, self.originals) for name, others in self.unmade.items()}
        left = set(verified) - {*self.failed, *(row.variant for row in rows if row.dropped or row.failure)}
        for name, dense in self.dense.items():
            if name not in self.engines and dense not in left:
                reasons[name] = f"it was not made: {dense} is out of the race"
        rows += [
            RaceRow(variant=name, lap=0, dropped=why) for name, why in reasons.items() if why and name not in self.kept
        ]
        summary = f"{len(left)} of {len(verified)} variants are measured in full" if verified else "no variant races"
        if out_before:
            summary += f"; {len(out_before)} had dropped out of an earlier race"
        incomplete = any(row.failure for row in rows if row.variant not in self.originals)
        return write_records(out, rows, summary, incomplete=incomplete)

    @property
    def _settings(self) -> LatencySettings:
        return LatencySettings(
            precision=_PRECISION,
            time_limit_seconds=self.seconds / _LAPS,
            block_ms=_BLOCK_MS,
            launches=1,
            warmup_limit_seconds=_WARMUP_SECONDS,
        )

    def _needs_laps(self, running: Sequence[str], fresh: Sequence[str], rows: Sequence[RaceRow]) -> bool:
        """Tell whether there is something to decide: who stays, or whether others would be fast enough.

        A first race has decided where nothing ``fresh`` has come since: it had the time that there was.
        """
        if self.unmade:
            return bool(running)
        known = {row.variant for row in rows if row.speedup}
        return bool(fresh) and len(running) > self.most and not set(running) <= known

    def _run_laps(
        self,
        benchmark: LatencyBenchmark,
        running: Sequence[str],
        safe: Sequence[str],
        batch: int,
        feeds: Feeds,
        progress: Progress,
    ) -> Iterator[RaceRow]:
        """Run laps until few enough are left, and yield what each variant did in each.

        What an earlier lap found counts where no time was left for this one. Once it is over, variants whose speed-up
        is not known stay as far as there is room: a lossless one, then those whose few calls were fastest.
        """
        known: dict[str, LatencyRow] = {}
        brief: dict[str, float] = {}
        for lap in range(1, _LAPS + 1):
            if lap > 1 and (len(running) <= self.most or benchmark.late):
                return
            progress(f"lap {lap}: {count_words(len(running), 'variant')}")
            benchmark.measure(batch, feeds, running)
            measured = {name: next(row for row in benchmark.rows(name) if row.batch == batch) for name in running}
            known |= {name: row for name, row in measured.items() if row.speedup}
            brief |= {name: row.p50_ms for name, row in measured.items() if row.p50_ms is not None}
            failed = {name: row.failure for name, row in measured.items() if row.failure not in (None, NO_TIME)}
            running = [name for name in running if name not in self.originals and name not in failed]
            rows = {name: known[name] for name in running if name in known}
            last = lap == _LAPS or benchmark.late
            reasons = drop_slow(rows, (self.lossless, safe), self.most, self.dense, last=last) if self.by_speed else {}
            reasons = {name: reason for name, reason in reasons.items() if name not in self.kept}
            unknown = [name for name in running if name not in rows and name not in self.kept]
            unknown.sort(key=lambda name: brief.get(name, math.inf))
            if rows.keys().isdisjoint(self.lossless) and (safest := [n for n in unknown if n in self.lossless][:1]):
                unknown = [*safest, *(name for name in unknown if name not in safest)]
            room = max(0, self.most - len(rows.keys() - reasons.keys())) if benchmark.late else len(unknown)
            failed |= dict.fromkeys(unknown[room:], NO_TIME)
            for name, row in measured.items():
                ended = {"dropped": reasons.get(name, ""), "failure": failed.get(name, "")}
                yield RaceRow(variant=name, lap=lap, speedup=row.speedup, disturbed=row.speedup_disturbed, **ended)
            running = [name for name in running if name not in reasons and name not in failed]

    def _order(self, running: Sequence[str]) -> list[str]:
        """Put what was not measured in full earlier first: if time is short again, it is not for the same variants.

        The very first is one that was, as the others are compared with it.
        """
        known = [name for name in running if name in self.kept]
        return [*known[:1], *(name for name in running if name not in known), *known[1:]]

    def _hardly_loses(self, name: str, inputs: Inputs) -> bool:
        """Tell whether a variant loses nothing, or surely a small part of what is allowed."""
        qualities, assignment = read_models(inputs.get(f"{name} {CHOICE}"), Quality), inputs.get(f"{name} {ASSIGNMENT}")
        high = next((quality.seen_high for quality in qualities), None)
        if not qualities and assignment:
            high = next((row.get(DROP_HIGH) for row in read_records(assignment)), None)
        return name in self.lossless or (high is not None and high <= _HARDLY * (self.max_drop or 0.0))

    def _judge_drop(self, name: str, inputs: Inputs, role: str) -> RaceRow | None:
        """Judge the loss of the metric on the samples for choosing; None where it is allowed or unknown."""
        qualities = read_models(inputs.get(role), Quality)
        reason = explain_drop(qualities, self.max_drop)
        return RaceRow(variant=name, lap=0, dropped=reason) if reason and name not in self.kept else None


def explain_drop(qualities: Sequence[Quality], max_drop: float | None) -> str:
    """Explain that the metric loses too much on the samples for choosing; empty where that is allowed or unknown."""
    excess = qualities[0].explain_excess(max_drop) if qualities and max_drop is not None else ""
    return excess and f"its accuracy on the samples for choosing: {excess}"


def drop_slow(
    rows: Mapping[str, LatencyRow],
    safe: Sequence[Sequence[str]],
    most: int,
    dense: Mapping[str, str],
    *,
    last: bool = False,
) -> dict[str, str]:
    """Choose the variants that drop out after a lap, with the reason.

    Those drop out that are slower than the best one by more than tuning may gain, at the near end of the interval,
    unless calls of one of both waited for a core: where threads wait for each other, that alone can make a call 300
    times as long. After the ``last`` lap the slowest ones above the number ``most`` drop out, too. The fastest one of
    each ``safe`` list stays, and so do the ``dense`` ones of pruned ones that stay.
    """
    speeds = {name: row.speedup for name, row in rows.items() if row.speedup}
    order = sorted(speeds, key=lambda name: -speeds[name].median)
    staying = {next((name for name in order if name in names), "") for names in safe}
    reasons = {}
    for place, name in enumerate(order, 1):
        ratio = divide(speeds[order[0]], speeds[name])
        if name in staying:
            continue
        disturbed = rows[order[0]].speedup_disturbed or rows[name].speedup_disturbed
        if ratio.low > _GAIN and not disturbed:
            reasons[name] = f"{order[0]} is {_write_times(ratio)} faster"
        elif last and place > most:
            waited = " (by calls that other programs disturbed)" if disturbed else ""
            reasons[name] = f"it is number {place} in speed{waited}, and {most} are measured in full"
    beside = {dense.get(name) for name in rows if name not in reasons}
    return {name: reason for name, reason in reasons.items() if name not in beside}


def _write_times(ratio: Interval) -> str:
    return f"at least {ratio.low:.2f}×" if ratio.too_noisy else ratio.times()


def explain_unmade(rows: Sequence[RaceRow], others: Sequence[str], originals: Sequence[str]) -> str:
    """Explain why a compiled variant would be too slow; empty where it may be fast enough, or nobody knows.

    It is judged by the ``others`` of its precision: by the fastest of them, and by the original among them. Nobody
    knows where other programs took the cores: the original, whose threads wait for each other, waits most then.
    """
    last = {row.variant: row for row in rows if row.speedup and not row.failure}
    speeds = {name: row.speedup for name, row in last.items() if row.speedup}
    best = max(speeds, key=lambda name: speeds[name].median, default="")
    beside = [name for name in speeds if name in others and name not in originals]
    fastest = max(beside, key=lambda name: speeds[name].median, default="")
    for name, gain in (*((name, _COMPILED_OVER_EAGER) for name in originals), (fastest, _COMPILED_GAIN)):
        if name not in speeds or name not in others:
            continue
        ratio = divide(speeds[best], speeds[name])
        if ratio.low > gain and not last[name].disturbed and not last[best].disturbed:
            seldom = f"compiling in PyTorch is seldom more than {gain:g}× faster than {name}"
            return f"it was not made: {best} is {_write_times(ratio)} faster than {name}, and {seldom}"
    return ""


class Stay(Task):
    """Let the steps of variants continue after the race, or end them with the reason, if none of the variants stays.

    What it leaves is always the same, so that steps after it keep their keys when a race is run again.
    """

    title: ClassVar[str] = "race result"
    produces: ClassVar[Kind] = "record"
    in_process: ClassVar[bool] = True

    variants: tuple[str, ...]
    max_drop: float | None = None
    """Drop on the samples for choosing that the model which they are made of may have, where that is known."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        by_variant = group_values((row.variant, row) for row in read_models(inputs[RACE], RaceRow))
        ends = [_find_end(by_variant.get(name, ())) for name in self.variants]
        qualities = read_models(inputs.get(CHOICE), Quality)
        rejected = "" if "" in ends else ends[0]
        if not rejected and (lost := explain_drop(qualities, self.max_drop)):
            rejected = f"{DROPPED}{lost}"
        return write_records(out, [], "it stays in the race", rejected=rejected)


def _find_end(rows: Sequence[RaceRow]) -> str:
    """Say why a variant is out of the race; empty if it is not.

    Raises:
        ModelError: it failed.
    """
    failed = next((row.failure for row in rows if row.failure), "")
    if failed not in ("", NO_TIME):
        raise ModelError(f"it failed in the race: {failed}")
    return next((f"{DROPPED}{row.dropped}" for row in rows if row.dropped), failed)
