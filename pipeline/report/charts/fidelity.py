"""How near outputs are to the reference's after each stage: where accuracy was lost."""

import itertools
import re
from collections.abc import Mapping, Sequence

from enginesmith.pipeline.measure.fidelity import THRESHOLDS
from enginesmith.pipeline.measure.rows import StageFidelity
from enginesmith.pipeline.report.charts.base import Chart, Figure
from enginesmith.pipeline.report.charts.parts import axis, layout, limit, others, places, points, why_none
from enginesmith.pipeline.report.charts.styles import Cast, Style, called
from enginesmith.pipeline.report.charts.text import escaped, said, shortened
from enginesmith.pipeline.report.tables import marked
from enginesmith.pipeline.run import Run, VariantRecord

_ID = "fidelity"
_TITLE = "Signal to quantisation noise against the reference (SQNR, dB) after each stage, at the worst shape"
COLUMNS = ("variant", "stage", "worst at", "SQNR dB", "passed", "reason")
_TICK = 12
"""Characters in a line of a stage's name below the plot."""
_Stages = Mapping[str, StageFidelity]
"""By stage, in order."""
_Worst = Mapping[str, _Stages]


def fidelity(run: Run) -> Chart:
    """SQNR along the stages of each variant, with the threshold."""
    cast = Cast(run)
    found = {record.id: worst for record in cast.records if (worst := _worst(record.fidelity))}
    known = {name: each for name, each in found.items() if any(one.sqnr_db is not None for one in each.values())}
    rows = tuple(_cells(record, one) for record in cast.records for one in found.get(record.id, {}).values())
    if not known:
        why = "No output has an SQNR" if found else "No stage was held against the reference"
        told = why_none(run, "fidelity", "outputs are whole numbers" if found else "nothing has run yet")
        return Chart(_ID, _TITLE, None, "", COLUMNS, rows, f"{why}: {told}.")
    return Chart(_ID, _TITLE, _figure(run, cast, known), _summary(run, cast, known), COLUMNS, rows)


def _worst(found: Sequence[StageFidelity]) -> dict[str, StageFidelity]:
    """By stage, in order, the point with the lowest SQNR; one that failed comes before all that passed."""
    worst: dict[str, StageFidelity] = {}
    for one in found:
        kept = worst.get(one.stage)
        if kept is None or _badness(one) < _badness(kept):
            worst[one.stage] = one
    return worst


def _badness(one: StageFidelity) -> tuple[bool, float]:
    return (one.passed, float("inf") if one.sqnr_db is None else one.sqnr_db)


def _stages(found: _Worst) -> list[str]:
    """All stages, so that each variant's own are in its order; the engine is last."""
    ordered: list[str] = []
    for each in found.values():
        place = 0
        for stage in each:
            if stage in ordered:
                place = ordered.index(stage) + 1
            else:
                ordered.insert(place, stage)
                place += 1
    return sorted(ordered, key=lambda stage: stage == "engine")


def _figure(run: Run, cast: Cast, found: _Worst) -> Figure:
    stages, shown, rest = _stages(found), cast.named(found), cast.rest(found)
    traces: list[Figure] = []
    if rest:
        traces.append(others([_line(_judged(found[record.id]), stages) for record in rest]))
    for record in shown:
        traces += _traces(cast.style(record), record, found[record.id], stages)
    ticks = {float(place): "<br>".join(map(escaped, _broken(stage))) for place, stage in enumerate(stages)}
    x_axis = places("stage", ticks, range=[-0.4, len(stages) - 0.6], tickangle=0)
    y_axis = axis("SQNR (dB)", log=False)
    shapes = [limit("y", value, text, ()) for value, text in _thresholds(run, shown)]
    return {"data": traces, "layout": layout(x_axis, y_axis, len(shown) + bool(rest), shapes=shapes)}


def _thresholds(run: Run, shown: Sequence[VariantRecord]) -> list[tuple[float, str]]:
    """The recipe's threshold, else those of the precisions: what engines are held to."""
    if run.recipe.min_sqnr_db is not None:
        return [(run.recipe.min_sqnr_db, f"threshold {run.recipe.min_sqnr_db:g} dB")]
    by_value: dict[float, dict[str, None]] = {}
    for record in shown:
        for precision in record.precision.split("+"):
            if precision in THRESHOLDS:
                by_value.setdefault(THRESHOLDS[precision].min_sqnr_db, {})[precision] = None
    return [(value, f"threshold of {', '.join(names)}: {value:g} dB") for value, names in by_value.items()]


def _traces(style: Style, record: VariantRecord, each: _Stages, stages: Sequence[str]) -> list[Figure]:
    """The stages that are judged as a line, and those that change the model on purpose as markers beside it."""
    judged, changed = _judged(each), {stage: one for stage, one in each.items() if stage not in _judged(each)}
    passed = [style.symbol if one.passed else "x-open" for one in judged.values()]
    sizes = [style.size if one.passed else 14 for one in judged.values()]
    outline = {"line": {"color": style.colour, "width": 1.5}, "opacity": 1}
    markers = (
        {**style.marker, "symbol": passed, "size": sizes, **outline},
        {**style.marker, "symbol": f"{style.symbol}-open"},
    )
    more: tuple[Figure, ...] = ({}, {"mode": "markers", "showlegend": not judged})
    return [
        points(style, *_line(part, stages), _hover(record, part), marker=marker, **how)
        for part, marker, how in zip((judged, changed), markers, more, strict=True)
        if part
    ]


def _broken(stage: str) -> list[str]:
    """A stage's name in lines, broken where it has hyphens."""
    lines = [""]
    for part in re.findall(r"[^-]+-?", shortened(stage)):
        if lines[-1] and len(lines[-1]) + len(part) > _TICK:
            lines.append("")
        lines[-1] += part
    return lines


def _hover(record: VariantRecord, each: _Stages) -> list[str]:
    return [said(marked(record), _words(one)) for one in each.values()]


def _line(each: _Stages, stages: Sequence[str]) -> tuple[list[float], list[float | None]]:
    return [float(stages.index(stage)) for stage in each], [one.sqnr_db for one in each.values()]


def _judged(each: _Stages) -> dict[str, StageFidelity]:
    """Without the stages that change the model on purpose: those after them are held against what they made."""
    return {stage: one for stage, one in each.items() if not (one.passed and one.reason)}


def _words(one: StageFidelity) -> str:
    sqnr = "no SQNR" if one.sqnr_db is None else f"SQNR {one.sqnr_db:.1f} dB"
    verdict = "passed" if one.passed else "failed"
    return f"{one.stage}: {sqnr} at {one.point} (batch {one.batch}), {verdict}" + (f": {one.reason}" * bool(one.reason))


def _cells(record: VariantRecord, one: StageFidelity) -> tuple[str, ...]:
    sqnr = "–" if one.sqnr_db is None else f"{one.sqnr_db:.1f}"
    return (marked(record), one.stage, one.point, sqnr, "yes" if one.passed else "no", one.reason or "–")


def _summary(run: Run, cast: Cast, found: _Worst) -> str:
    """The largest fall from one stage to the next, of the winner or else of whoever fell most."""
    records = [record for record in cast.records if record.id in found]
    winner = [record for record in records if record.id == run.winner]
    falls = [fall for record in winner or records if (fall := _fall(record, _judged(found[record.id])))]
    failed = [record for record in records if not all(one.passed for one in found[record.id].values())]
    ends = f"{len(failed)} of {len(records)} variants failed a stage" if failed else "every stage passed"
    if not falls:
        known = [one.sqnr_db for each in found.values() for one in _judged(each).values() if one.sqnr_db is not None]
        least = f": SQNR is {min(known):.1f} dB or more" if known else ""
        return f"No stage loses accuracy against the one before it{least}; {ends}{cast.unnamed(found)}."
    by, record, before, after = max(falls, key=lambda fall: fall[0])
    assert before.sqnr_db is not None
    text = f"{called(record)} loses most at {after.stage}, from {before.sqnr_db:.1f} dB to {before.sqnr_db - by:.1f} dB"
    return f"{text}; {ends}{cast.unnamed(found)}."


_Fall = tuple[float, VariantRecord, StageFidelity, StageFidelity]


def _fall(record: VariantRecord, each: _Stages) -> _Fall | None:
    known = [one for one in each.values() if one.sqnr_db is not None]
    falls = [
        (one.sqnr_db - two.sqnr_db, record, one, two)
        for one, two in itertools.pairwise(known)
        if one.sqnr_db is not None and two.sqnr_db is not None and two.sqnr_db < one.sqnr_db
    ]
    return max(falls, key=lambda fall: fall[0], default=None)
