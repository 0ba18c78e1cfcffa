"""From samples and answers to a cell's rows: who is fastest within the allowed loss, and by how much."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rounds import Prepared, Timing

from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.statistics import Interval, is_disturbed, median_interval, paired_ratio

Row = dict[str, Any]
OURS = "enginesmith"
_SEED = 0
_HOPELESS = 2.0
"""Times the fastest one's time, at the near end of the interval, for which a rival is not started again."""
_FAR = 4.0
"""Likewise in all other cells of the model, for which it is not prepared: batch size and threads do not mend that."""
_ALWAYS = (OURS, "eager")
"""They are prepared all the same."""


@dataclass(frozen=True)
class Entrant:
    """Collect what was found of one rival in one cell."""

    timing: Timing
    prepared: Prepared
    quality: Quality | None


def summarize(entrants: Mapping[str, Entrant], max_drop: float) -> Row:
    """Make the cell's rows, fastest first, and name the winner: the fastest whose drop is allowed.

    Their order is that of ratios paired by round with one of them: medians alone contain the machine's drift.
    """
    timed = {name: each for name, each in entrants.items() if each.timing.launches and not each.timing.failure}
    medians = {name: median_interval(each.timing.launches, _SEED) for name, each in timed.items()}
    allowed = [name for name in timed if _is_allowed(timed[name].quality, max_drop)]
    reference = min(timed, key=lambda name: medians[name].median, default="")
    order = sorted(timed, key=lambda name: _ratio(timed[name].timing, timed[reference].timing).median)
    winner = next((name for name in order if name in allowed), None)
    rows = []
    for name in order:
        each = timed[name]
        ratio = None
        if winner is not None and name != winner:
            ratio = _ratio(each.timing, timed[winner].timing).model_dump()
        quality = (
            each.quality.model_dump(include={"value", "baseline", "drop", "drop_low", "drop_high"})
            if each.quality
            else None
        )
        rows.append(
            {
                "rival": name,
                "allowed": name in allowed,
                "median_ms": medians[name].scaled(1e3).model_dump(),
                "times_the_winner": ratio,
                "launches": len(each.timing.launches),
                "disturbed": is_disturbed(each.timing.launches),
                "quality": quality,
                "job_seconds": each.prepared.seconds,
                "job_peak_bytes": each.prepared.peak_bytes,
                **each.timing.memory,
            }
        )
    failures = {
        name: each.timing.failure or each.prepared.failure for name, each in entrants.items() if name not in timed
    }
    cell: Row = {"winner": winner, "rows": rows, "failures": failures}
    cell["ours"] = judge_ours(cell)
    return cell


def list_hopeless(entrants: Mapping[str, Entrant], max_drop: float) -> list[str]:
    """List the rivals that are so much slower than the fastest allowed one that another launch could change nothing."""
    allowed = {name: each.timing for name, each in entrants.items() if _is_allowed(each.quality, max_drop)}
    medians = {name: median_interval(timing.launches, _SEED).median for name, timing in allowed.items()}
    if not medians:
        return []
    fastest = allowed[min(medians, key=lambda name: medians[name])]
    return [
        name
        for name, each in entrants.items()
        if name != OURS and each.timing.launches and _ratio(each.timing, fastest).low > _HOPELESS
    ]


def find_far_behind(cells: Sequence[Row]) -> dict[str, str]:
    """Find rivals that were far too slow in all of some cells, which are a model's on one machine, with the reason."""
    found: dict[str, list[Row]] = {}
    for cell in cells:
        for row in cell["rows"]:
            found.setdefault(row["rival"], []).append(row["times_the_winner"] or {"low": 1.0, "median": 1.0})
    return {
        name: f"it took {min(ratio['median'] for ratio in ratios):.1f} times as long as the winner in another cell"
        for name, ratios in found.items()
        if name not in _ALWAYS and all(ratio["low"] > _FAR for ratio in ratios)
    }


def _ratio(above: Timing, below: Timing) -> Interval:
    """Divide the times of two rivals, paired by the rounds that both took part in."""
    count = min(len(above.launches), len(below.launches))
    return paired_ratio(above.launches[:count], below.launches[:count], _SEED)


def _is_allowed(quality: Quality | None, max_drop: float) -> bool:
    return quality is not None and quality.drop <= max_drop


def judge_ours(cell: Row) -> Row:
    """Tell whether our row is first or within the interval of the first, and what it cost beside the rivals' median."""
    rows = {row["rival"]: row for row in cell["rows"]}
    if OURS not in rows:
        return {"won": False, "reason": cell["failures"].get(OURS, "it did not take part")}
    ours, rivals = rows[OURS], [row for name, row in rows.items() if name != OURS]
    seconds = sorted(row["job_seconds"] for row in rivals)
    found: Row = {"allowed": ours["allowed"], "job_seconds": ours["job_seconds"]}
    found["median_rival_job_seconds"] = seconds[len(seconds) // 2] if seconds else None
    if not ours["allowed"]:
        return found | {"won": False, "reason": "it loses more than is allowed"}
    ratio = ours["times_the_winner"]
    if ratio is None or ratio["low"] <= 1:
        return found | {"won": True, "reason": "first" if ratio is None else "within the interval of the first"}
    return found | {"won": False, "reason": f"{cell['winner']} is {ratio['median']:.2f} × as fast"}


def count_by_machine(cells: Sequence[Row]) -> dict[str, Row]:
    """Add up the cells of each machine: won, within the budget, and cheaper than the median rival."""
    machines = dict.fromkeys(cell["machine"] for cell in cells)
    return {name: _count([cell for cell in cells if cell["machine"] == name]) for name in machines}


def _count(cells: Sequence[Row]) -> Row:
    ours = [cell["ours"] for cell in cells]
    compared = [each for each in ours if each.get("median_rival_job_seconds") is not None]
    return {
        "cells": len(ours),
        "won": sum(each["won"] for each in ours),
        "within_budget": sum(bool(each.get("allowed")) for each in ours),
        "not_slower_to_make": sum(each["job_seconds"] <= each["median_rival_job_seconds"] for each in compared),
    }
