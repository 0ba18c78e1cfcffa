"""Choose the options of a built engine's sessions by measuring them: those that are faster than the recipe's are kept.

Options are tried one after another, each beside the best ones so far. Of many trials some look faster by chance, so all
that were kept are compared with the recipe's options once more, over several launches: that comparison decides.
"""

import time
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny

from enginesmith.pipeline.artifact import Effect, Kind, copy_folder
from enginesmith.pipeline.engines.base import TUNING, Candidate, Engine
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.fidelity import compare_calls, find_thresholds
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import measure_latency
from enginesmith.pipeline.measure.memory.peak import measure_memory
from enginesmith.pipeline.measure.rows import LatencyRow, Tuning, TuningTrial
from enginesmith.pipeline.measure.statistics import TOO_NOISY, Interval, divide
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.store.manifest import MANIFEST
from enginesmith.pipeline.tasks.base import Inputs
from enginesmith.pipeline.tasks.measure import HANG_SECONDS, Measurement, logs_in_own_log, measured_feeds
from enginesmith.pipeline.units import format_bytes

ENGINE = "engine"
"""Role of the built engine that is tuned."""
_LEAST_SECONDS = 1.0


class Tune(Measurement):
    """Measure the options of a built engine within a time, and keep those that are measurably faster."""

    title: ClassVar[str] = "tune"
    produces: ClassVar[Kind] = "engine"
    time_share: float = Field(0.5, exclude=True)

    engine: SerializeAsAny[Engine]
    seconds: float
    batch: int | None = None
    """None is the first one that is measured."""
    callers: tuple[int, ...] = ()
    """Numbers of callers whose best throughput decides; where there are none, the time of a call does."""
    precision: str = "fp32"
    """The row of the fidelity thresholds for the outputs."""
    min_sqnr_db: float | None = None
    max_memory_bytes: int | None = None
    """Largest peak memory that options may lead to."""

    @property
    def expected_seconds(self) -> float:
        return self.seconds

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        deadline, built = time.monotonic() + min(self.seconds, self.measuring_seconds), inputs[ENGINE]
        best, tuning = self._search(inputs, deadline, progress)
        if tuning.untried and self.measuring_seconds < self.seconds:
            tuning = tuning.model_copy(update={"cut": True})
        if tuning.kept:
            tuning = self._confirm(best, tuning, inputs, deadline - time.monotonic(), progress)
        copy_folder(built.folder, out, skip=[MANIFEST])
        (out / TUNING).write_text(tuning.model_dump_json(indent=1), encoding="utf-8")
        summary = f"{', '.join(tuning.kept) or 'nothing'} was measurably faster, of {len(tuning.trials)} values"
        notes = [f"the recipe's options are used instead of {tuning.dropped}"] if tuning.dropped else []
        notes += [f"no time was left to try {', '.join(tuning.untried)}"] if tuning.untried else []
        file, signature = built.path.name, built.signature
        return Effect(file=file, summary=summary, notes=tuple(notes), signature=signature, incomplete=tuning.cut)

    def _search(self, inputs: Inputs, deadline: float, progress: Progress) -> tuple[Engine, Tuning]:
        """Try one option after another beside the best ones so far."""
        best, settings, trials, untried = self.engine, list[str](), list[TuningTrial](), list[str]()
        batches = self._list_batches(inputs)
        graph, tried = inputs["model"].path, set[str]()
        while True:
            offered = best.tunable_options(graph, self.device)  # one option can make others useless
            left = [name for name in offered if name not in tried]
            if not left:
                fields = {key: value for key, value in best if value != getattr(self.engine, key)}
                return best, Tuning(fields=fields, kept=tuple(settings), trials=tuple(trials), untried=tuple(untried))
            name, values = left[0], offered[left[0]]
            tried.add(name)
            share = (deadline - time.monotonic()) / (len(left) + len(batches))  # the last ones are for the confirmation
            if share < _LEAST_SECONDS:
                untried.append(name)
                continue
            progress(f"trying {name}={' and '.join(values)}")
            sides = {"": best, **{value: best.with_option(name, value) for value in values}}
            new_trials = self._measure(name, sides, inputs, progress, share, batches[0], launches=1)
            trials += new_trials
            if value := _choose_faster(new_trials):
                best, settings = sides[value], [*settings, f"{name}={value}"]

    def _confirm(self, best: Engine, tuning: Tuning, inputs: Inputs, seconds: float, progress: Progress) -> Tuning:
        """Compare all that was kept with the recipe's options, and drop it where it is not faster or cannot be used.

        Nor is it kept where it loses more at another batch size that is measured than it gains at the one that decides:
        a single thread for batch 1, say.
        """
        settings, sides = ", ".join(tuning.kept), {"": self.engine, "kept": best}
        progress(f"comparing {settings} with the recipe's options once more")
        decides, *others = self._list_batches(inputs)
        seconds = max(_LEAST_SECONDS, seconds / (1 + len(others)))
        (trial,) = self._measure("", sides, inputs, progress, seconds, batch=decides)
        slower = "" if _choose_faster([trial]) else trial.failure or "together they are not measurably faster"
        elsewhere = dict[int, Interval]()
        for batch in others if not slower else ():
            (there,) = self._measure("", sides, inputs, progress, seconds, batch=batch)
            if trial.speedup and there.speedup:
                elsewhere[batch] = there.speedup
                if there.speedup.high < 1 and there.speedup.median * trial.speedup.median < 1:
                    slower = slower or f"at batch {batch} they are {there.speedup.times()} as fast"
        changes: dict[str, Any] = {"confirmation": trial.speedup, "other_batches": elsewhere}
        if reason := slower or self._find_fault(best, inputs, progress):
            changes |= {"fields": {}, "kept": (), "dropped": f"{settings}: {reason}"}
        return tuning.model_copy(update=changes)

    def _list_batches(self, inputs: Inputs) -> list[int]:
        """List the batch size that decides, and for the time of a call the others that are measured, too."""
        measured = list(measured_feeds(inputs["reference"]))
        largest = self.batch if self.batch in measured else max(measured)
        decides = measured[0] if self.batch is None else largest
        return [decides] if self.callers else [decides, *(batch for batch in measured if batch != decides)]

    def _measure(
        self,
        option: str,
        sides: Mapping[str, Engine],
        inputs: Inputs,
        progress: Progress,
        seconds: float,
        batch: int,
        **more: Any,
    ) -> list[TuningTrial]:
        """Measure engines beside each other; return the gain of each over the one without a name."""
        measured, limit = measured_feeds(inputs["reference"]), seconds / (2 if self.callers else 1)  # after latency
        start = min(HANG_SECONDS, self.measuring_seconds / 4)
        settings = LatencySettings(
            time_limit_seconds=limit, start_limit_seconds=start, concurrency=self.callers, noisy_extension=1, **more
        )
        candidates = [Candidate(name, engine, inputs[ENGINE], self.device) for name, engine in sides.items()]
        with logs_in_own_log() as logs:
            rows_by_name = measure_latency(candidates, {batch: measured[batch]}, settings, logs, progress).rows
        rows = {name: rows_by_name[name][0] for name in sides}
        base = rows.pop("")
        disturbed = {name for name, row in rows.items() if row.speedup_disturbed and not self.callers}
        gains = {name: _divide_throughputs(row, base) if self.callers else row.speedup for name, row in rows.items()}
        why = {name: row.failure or (TOO_NOISY if name in disturbed else "") for name, row in rows.items()}
        return [
            TuningTrial(option=option, value=value, speedup=None if value in disturbed else gains[value], failure=text)
            for value, text in why.items()
        ]

    def _find_fault(self, engine: Engine, inputs: Inputs, progress: Progress) -> str:
        """Explain why a faster engine cannot be used: its outputs are wrong, or it needs too much memory."""
        reference, built = inputs["reference"], inputs[ENGINE]
        progress("comparing the outputs with these options")
        known = samples.read(reference.folder)
        with engine.load(built, self.device) as session:
            for _, feeds, expected, unstable in samples.read_calls(reference.folder):
                dtypes = (str(value.dtype) for value in expected[0].values())
                thresholds = find_thresholds(dtypes, self.precision, self.min_sqnr_db)
                answers = [session.run(call) for call in feeds]
                pairs = list(zip(expected, answers, strict=True))
                signature = known.limit_sets(session.signature)
                compared = compare_calls(
                    pairs, thresholds, signature, known.spans, unstable, known.rounding, known.quantized_db
                )
                if not compared.passed:
                    return "the outputs differ too much from the reference"
        if self.max_memory_bytes is None:
            return ""
        batch, arrays = max(measured_feeds(reference).items(), key=lambda item: item[0])
        with logs_in_own_log() as logs:
            candidate = Candidate(engine.name, engine, built, self.device)
            peak = measure_memory(candidate, batch, arrays, logs, progress).peak_bytes or 0
        return f"peak memory is {format_bytes(peak)}, above --max-memory" if peak > self.max_memory_bytes else ""


def _divide_throughputs(row: LatencyRow, base: LatencyRow) -> Interval | None:
    """Divide the best throughput of a row by that of another one, each over its numbers of callers."""
    levels = ([level.samples_per_s for level in each.concurrency] for each in (row, base))
    best = [max(rates, key=attrgetter("median"), default=None) for rates in levels]
    return divide(best[0], best[1]) if best[0] and best[1] else None


def _choose_faster(trials: list[TuningTrial]) -> str:
    """Choose the value with the best gain of those whose interval is above 1 and says something; empty if none is."""
    gains = {trial.value: trial.speedup for trial in trials if trial.speedup and not trial.speedup.too_noisy}
    return max((value for value in gains if gains[value].low > 1), key=lambda value: gains[value].median, default="")
