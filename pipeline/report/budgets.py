"""Budgets in words: what each is about, with its unit, and whether it is held."""

from collections.abc import Callable

from enginesmith.pipeline.run import Run, Verdict
from enginesmith.pipeline.units import format_bytes, format_seconds

COLUMNS = ("budget", "limit", "actual", "held")
_WORDS: dict[str, tuple[str, Callable[[float], str]]] = {
    "max_drop": ("loss of quality", lambda value: f"{value:.4f}"),
    "max_memory_bytes": ("peak memory", format_bytes),
    "max_latency_ms": ("p50 latency", lambda value: f"{value:.4g} ms"),
    "max_p99_ms": ("p99 latency", lambda value: f"{value:.4g} ms"),
    "min_throughput_per_s": ("throughput", lambda value: f"{value:{'.4g' if value < 10_000 else ',.0f'}} samples/s"),
    "max_size_bytes": ("size", format_bytes),
    "max_build_seconds": ("build time", format_seconds),
    "min_sqnr_db": ("fidelity", lambda value: f"SQNR {value:.1f} dB"),
}
"""Budget → what it is about, and how its numbers are written."""


def title(budget: str) -> str:
    """What a budget is about: ``p50 latency``."""
    return _WORDS[budget][0] if budget in _WORDS else budget


def shown(budget: str, value: float | None) -> str:
    """A number in the budget's unit."""
    if value is None:
        return "unknown"
    return _WORDS[budget][1](value) if budget in _WORDS else f"{value:g}"


def allowed(one: Verdict) -> str:
    """``at most 5 ms``."""
    return f"{'at least' if one.budget.startswith('min_') else 'at most'} {shown(one.budget, one.limit)}"


def sentence(one: Verdict) -> str:
    """``p50 latency is 5.2 ms, and has to be at most 5 ms``; numbers that look alike are given in full."""
    actual, limit = shown(one.budget, one.actual), allowed(one)
    if one.actual is not None and actual == shown(one.budget, one.limit) and one.actual != one.limit:
        actual, limit = f"{actual} ({one.actual!r})", f"{limit} ({one.limit!r})"
    why = f" ({one.reason})" if one.reason else ""
    return f"{title(one.budget)} is {actual}{why}, and has to be {limit}"


def rows(run: Run) -> list[tuple[str, ...]]:
    """The budgets that the run was judged by; columns as in :data:`COLUMNS`."""
    return [
        (title(one.budget), allowed(one), shown(one.budget, one.actual), "yes" if one.passed else "no")
        for one in run.verdicts
    ]


def not_judged(run: Run) -> list[str]:
    """Budgets that were set, and that nothing was held against."""
    asked = {**run.recipe.budgets.model_dump(), "min_sqnr_db": run.recipe.min_sqnr_db}
    known = {one.budget for one in run.verdicts}
    if run.winner == run.baseline.id:
        known.add("min_sqnr_db")  # it is what fidelity is measured against
    return [name for name, limit in asked.items() if limit is not None and name not in known]
