"""Budgets: a table with one row for each, and the verdicts on a variant.

To add a budget, declare its field in ``options.Budgets`` and add its row to :data:`BUDGETS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from enginesmith.pipeline.results.run import Run, VariantRecord, Verdict
from enginesmith.pipeline.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Budget:
    """One limit that can be set: the number it is about, and how that is written."""

    field: str
    """Of ``options.Budgets`` or of the recipe; ``min_…`` is a lower bound, everything else an upper one."""
    title: str
    read: Callable[[VariantRecord, int], float | None]
    """Record and deciding batch size → the number, None where it is unknown."""
    explain: Callable[[VariantRecord, int], str | None]
    """Likewise → why the number is unknown."""
    format: Callable[[float], str]

    @property
    def is_lower_bound(self) -> bool:
        """Tell whether numbers have to be at least the limit."""
        return self.field.startswith("min_")

    def allows(self, value: float | None, limit: float) -> bool:
        """Tell whether a number is within the limit; an unknown one is not."""
        if value is None:
            return False
        return value >= limit if self.is_lower_bound else value <= limit


def _read_p50(record: VariantRecord, batch: int) -> float | None:
    row = record.row(batch)
    return row.p50_ms if row else None


def _read_p99(record: VariantRecord, batch: int) -> float | None:
    row = record.row(batch)
    return row.p99_ms if row else None


def read_throughput(record: VariantRecord, batch: int) -> float | None:
    """Read the best throughput of all batch sizes, in samples/s."""
    return max((row.throughput_per_s for row in record.latency if row.throughput_per_s is not None), default=None)


def _read_lowest_sqnr(record: VariantRecord, batch: int) -> float | None:
    """Read the lowest SQNR of all stages and shapes, in dB; outputs that are no floats have none."""
    return min((entry.sqnr_db for entry in record.judged_fidelity if entry.sqnr_db is not None), default=None)


def _explain_latency(record: VariantRecord, batch: int) -> str:
    failed = next((row.failure for row in record.latency if row.batch == batch and row.failure), None)
    return failed or record.reasons.get("latency") or record.reason or f"it was not measured at batch {batch}"


def _explain_p99(record: VariantRecord, batch: int) -> str:
    row = record.row(batch)
    return row.reasons.get("p99_ms", "") if row else _explain_latency(record, batch)


def _explain_memory(record: VariantRecord, batch: int) -> str | None:
    return (record.memory and record.memory.reasons.get("peak_bytes")) or record.reasons.get("memory")


def _explain_fidelity(record: VariantRecord, batch: int) -> str:
    return "no outputs are floats" if record.judged_fidelity else "its outputs were not judged"


def _format_ms(value: float) -> str:
    return f"{value:.4g} ms"


BUDGETS: tuple[Budget, ...] = (
    Budget(
        "max_drop",
        "loss of quality",
        lambda record, batch: record.quality.drop if record.quality else None,
        lambda record, batch: record.reasons.get("quality", "not asked for"),
        lambda value: f"{value:.4f}",
    ),
    Budget("max_memory_bytes", "peak memory", lambda record, batch: record.peak_bytes, _explain_memory, format_bytes),
    Budget("max_latency_ms", "p50 latency", _read_p50, _explain_latency, _format_ms),
    Budget("max_p99_ms", "p99 latency", _read_p99, _explain_p99, _format_ms),
    Budget(
        "min_throughput_per_s",
        "throughput",
        read_throughput,
        _explain_latency,
        lambda value: f"{value:{'.4g' if value < 10_000 else ',.0f'}} samples/s",
    ),
    Budget(
        "max_size_bytes",
        "size",
        lambda record, batch: record.artifact.bytes if record.artifact else None,
        lambda record, batch: "it has no engine file",
        format_bytes,
    ),
    Budget(
        "max_build_seconds",
        "build time",
        lambda record, batch: record.build.seconds if record.build else None,
        lambda record, batch: "no engine is built for it",
        format_seconds,
    ),
    Budget("min_sqnr_db", "fidelity", _read_lowest_sqnr, _explain_fidelity, lambda value: f"SQNR {value:.1f} dB"),
)
_BY_FIELD = {budget.field: budget for budget in BUDGETS}


def why_unknown(record: VariantRecord, field: str, batch: int) -> str:
    """Explain why a budget's number is unknown, in the record's own words where it has some."""
    return _BY_FIELD[field].explain(record, batch) or "it was not measured"


def format_title(field: str) -> str:
    """Name what a budget is about: ``p50 latency``."""
    return _BY_FIELD[field].title if field in _BY_FIELD else field


def format_value(field: str, value: float | None) -> str:
    """Write a number in the budget's unit."""
    if value is None:
        return "unknown"
    return _BY_FIELD[field].format(value) if field in _BY_FIELD else f"{value:g}"


def format_limit(verdict: Verdict) -> str:
    """Write a limit: ``at most 5 ms``."""
    bound = "at least" if verdict.budget.startswith("min_") else "at most"
    return f"{bound} {format_value(verdict.budget, verdict.limit)}"


def format_verdict(verdict: Verdict) -> str:
    """Write a verdict: ``p50 latency is 5.2 ms, and has to be at most 5 ms``; similar numbers are given in full."""
    actual, limit = format_value(verdict.budget, verdict.actual), format_limit(verdict)
    looks_equal = actual == format_value(verdict.budget, verdict.limit)
    if verdict.actual is not None and looks_equal and verdict.actual != verdict.limit:
        actual, limit = f"{actual} ({verdict.actual!r})", f"{limit} ({verdict.limit!r})"
    why = f" ({verdict.reason})" if verdict.reason else ""
    return f"{format_title(verdict.budget)} is {actual}{why}, and has to be {limit}"


def list_unjudged(run: Run) -> list[str]:
    """List budgets that were set and not judged."""
    asked = {**run.recipe.budgets.model_dump(), "min_sqnr_db": run.recipe.min_sqnr_db}
    judged = {verdict.budget for verdict in run.verdicts}
    if run.winner == run.baseline.id:
        judged.add("min_sqnr_db")  # it is what fidelity is measured against
    return [name for name, limit in asked.items() if limit is not None and name not in judged]
