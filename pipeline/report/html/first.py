"""The first screen: the verdict, the budgets, the table of variants, the Pareto front; and answers in a line each."""

from collections.abc import Iterator

from enginesmith.pipeline import budgets
from enginesmith.pipeline.report import tables
from enginesmith.pipeline.report.html.blocks import Fact, Table, Tone, Words
from enginesmith.pipeline.run import Run, VariantRecord, Verdict


def verdict(run: Run) -> Words:
    """The run in one sentence."""
    broken = any(not one.passed for one in run.verdicts)
    tone: Tone = "bad" if run.winner is None and run.complete else "caution" if run.winner is None or broken else "good"
    return Words(tables.verdict(run), tone)


def budget_facts(run: Run) -> tuple[Fact, ...]:
    """Each budget with its number and its limit, those that nothing was held against too."""
    judged = tuple(_budget(one) for one in run.verdicts)
    open_ = tuple(Fact(budgets.format_title(name), "not judged", "", "caution") for name in budgets.list_unjudged(run))
    return judged + open_


def _budget(one: Verdict) -> Fact:
    word = "met" if one.passed else "broken"
    why = f" ({one.reason})" if one.reason else ""
    text = f"{word}: {budgets.format_value(one.budget, one.actual)}{why}, {budgets.format_limit(one)}"
    return Fact(budgets.format_title(one.budget), text, "", "good" if one.passed else "bad")


def unfinished(run: Run) -> tuple[Words, ...]:
    """What is missing of a run that was interrupted, or has steps for another machine."""
    if run.complete:
        return ()
    done = sum(step.status != "pending" for step in run.steps)
    left = [step.id for step in run.steps if step.status == "pending"]
    text = f"This run is not complete: {done} of {len(run.steps)} steps have ended; next: {', '.join(left[:3]) or '–'}."
    return (Words(f"{text} Go on with: enginesmith resume {run.name}", "caution"),)


def variants(run: Run) -> Table:
    """All variants, each batch size a row, with the numbers that sorting goes by."""
    return Table(
        name="variants",
        caption=f"All variants; latency at batch {run.deciding_batch} decides. ★ marks the winner.",
        columns=tables.COLUMNS,
        rows=tuple(tables.rows(run)),
        values=tuple(_values(run)),
        sortable=True,
        grouped=True,
        foldable=True,
        marked=frozenset(f"★ {tables.marked(one)}" for one in (run.baseline, *run.variants) if one.id == run.winner),
    )


def _values(run: Run) -> Iterator[tuple[float | None, ...]]:
    for record in (run.baseline, *run.variants):
        fixed = _fixed(record)
        if not record.latency:
            yield (None, None, None, None, None, *fixed)
        for index, row in enumerate(tables.deciding_first(run, record)):
            speedup = row.speedup.median if row.speedup else None
            yield (
                *(None, float(row.batch), speedup, row.p50_ms, row.p99_ms),
                *(fixed if index == 0 else (None, None, None, None)),
            )


def _fixed(record: VariantRecord) -> tuple[float | None, ...]:
    size = record.artifact.bytes if record.artifact else None
    return (record.peak_bytes, size, record.quality.drop if record.quality else None, None)


def notes(run: Run) -> tuple[Words, ...]:
    """What the table does not say of itself."""
    return tuple(Words(f"{note}.") for note in tables.made_up(run))
