"""Draw fidelity by stage."""

import re
from collections.abc import Mapping, Sequence

from enginesmith.pipeline.frameworks.fidelity import THRESHOLDS
from enginesmith.pipeline.measure.rows import StageFidelity
from enginesmith.pipeline.report.charts.plotly import (
    Cast,
    Chart,
    Figure,
    axis,
    draw_line,
    draw_others,
    escape,
    hover_text,
    layout,
    limit,
    places,
    short_name,
    shorten_name,
    why_none,
)
from enginesmith.pipeline.report.tables import mark_name
from enginesmith.pipeline.results.run import VariantRecord

_TICK = 12
"""Characters in a line of a stage's name below the plot."""
_Stages = Mapping[str, StageFidelity]
"""Stage → its comparison, in order."""
_Worst = Mapping[str, _Stages]


def fidelity(cast: Cast) -> Chart:
    """Draw SQNR along the stages of each variant, with the threshold."""
    title = "Signal to quantization noise against the reference (SQNR, dB) after each stage, at the worst shape"
    by_id = {record.id: worst for record in cast.records if (worst := _find_worst(record.fidelity))}
    known = {name: each for name, each in by_id.items() if any(stage.sqnr_db is not None for stage in each.values())}
    if known:
        return Chart("fidelity", title, _draw_fidelity(cast, known), _summarize_fidelity(cast, known))
    why = "No output has an SQNR" if by_id else "No stage was compared with the reference"
    reason = why_none(cast.run, "fidelity", "outputs are whole numbers" if by_id else "nothing has run yet")
    return Chart("fidelity", title, empty=f"{why}: {reason}.")


def _find_worst(entries: Sequence[StageFidelity]) -> dict[str, StageFidelity]:
    """Find by stage, in order, the shape with the lowest SQNR, one that failed before all that passed."""
    stages = dict.fromkeys(entry.stage for entry in entries)
    return {
        stage: min(
            (entry for entry in entries if entry.stage == stage),
            key=lambda entry: (entry.passed, float("inf") if entry.sqnr_db is None else entry.sqnr_db),
        )
        for stage in stages
    }


def _order_stages(by_id: _Worst) -> list[str]:
    """Order all stages so that each variant's own are in its order, the engine last."""
    ordered: list[str] = []
    for each in by_id.values():
        place = 0
        for stage in each:
            if stage not in ordered:
                ordered.insert(place, stage)
            place = ordered.index(stage) + 1
    return sorted(ordered, key=lambda stage: stage == "engine")


def _draw_fidelity(cast: Cast, by_id: _Worst) -> Figure:
    stages, shown, rest = _order_stages(by_id), cast.named(by_id), cast.rest(by_id)
    traces = draw_others([_make_line(_find_worst(record.judged_fidelity), stages) for record in rest])
    for record in shown:
        traces += _draw_stages(cast, record, by_id[record.id], stages)
    ticks = {float(place): "<br>".join(map(escape, _break_name(stage))) for place, stage in enumerate(stages)}
    x_axis = places("stage", ticks, range=[-0.4, len(stages) - 0.6], tickangle=0)
    y_axis = axis("SQNR (dB)", log=False)
    shapes = [limit("y", value, text, ()) for value, text in _list_thresholds(cast, shown)]
    return {"data": traces, "layout": layout(x_axis, y_axis, len(shown) + bool(rest), shapes=shapes)}


def _list_thresholds(cast: Cast, shown: Sequence[VariantRecord]) -> list[tuple[float, str]]:
    """List the thresholds that engines have to reach: the recipe's, else those of the precisions."""
    threshold = cast.run.recipe.min_sqnr_db
    if threshold is not None:
        return [(threshold, f"threshold {threshold:g} dB")]
    by_value: dict[float, dict[str, None]] = {}
    for precision in (precision for record in shown for precision in record.precision.split("+")):
        if precision in THRESHOLDS:
            by_value.setdefault(THRESHOLDS[precision].min_sqnr_db, {})[precision] = None
    return [(value, f"threshold of {', '.join(names)}: {value:g} dB") for value, names in by_value.items()]


def _draw_stages(cast: Cast, record: VariantRecord, each: _Stages, stages: Sequence[str]) -> list[Figure]:
    """Draw judged stages as a line, and those that change the model on purpose as markers beside it."""
    style, judged = cast.style(record), _find_worst(record.judged_fidelity)
    changed = {stage: fidelity for stage, fidelity in each.items() if stage not in judged}
    symbols = [style.symbol if fidelity.passed else "x-open" for fidelity in judged.values()]
    sizes = [style.size if fidelity.passed else 14 for fidelity in judged.values()]
    outline = {"line": {"color": style.color, "width": 1.5}, "opacity": 1}
    line = {"marker": {**style.marker, "symbol": symbols, "size": sizes, **outline}}
    beside = {"marker": {**style.marker, "symbol": f"{style.symbol}-open"}, "mode": "markers", "showlegend": not judged}
    traces = []
    for part, how in ((judged, line), (changed, beside)):
        hover = [hover_text(mark_name(record), _describe_stage(fidelity)) for fidelity in part.values()]
        traces += [draw_line(style, *_make_line(part, stages), hover, **how)] if part else []
    return traces


def _break_name(stage: str) -> list[str]:
    """Break a stage's name into lines at its hyphens."""
    lines = [""]
    for part in re.findall(r"[^-]+-?", shorten_name(stage)):
        if lines[-1] and len(lines[-1]) + len(part) > _TICK:
            lines.append("")
        lines[-1] += part
    return lines


def _make_line(each: _Stages, stages: Sequence[str]) -> tuple[list[float], list[float | None]]:
    return [float(stages.index(stage)) for stage in each], [fidelity.sqnr_db for fidelity in each.values()]


def _describe_stage(fidelity: StageFidelity) -> str:
    sqnr = "no SQNR" if fidelity.sqnr_db is None else f"SQNR {fidelity.sqnr_db:.1f} dB"
    verdict = "passed" if fidelity.passed else "failed"
    return f"{fidelity.stage}: {sqnr} at {fidelity.point} (batch {fidelity.batch}), {verdict}" + (
        f": {fidelity.reason}" * bool(fidelity.reason)
    )


def _summarize_fidelity(cast: Cast, by_id: _Worst) -> str:
    """Describe the largest fall from one stage to the next, the winner's or else the largest of all."""
    records = cast.select(by_id)
    winner = [record for record in records if record.id == cast.run.winner]
    falls = [(fall, record) for record in winner or records for fall in record.falls_db]
    failed = [record for record in records if not all(fidelity.passed for fidelity in by_id[record.id].values())]
    ends = f"{len(failed)} of {len(records)} variants failed a stage" if failed else "every stage passed"
    if not falls:
        least = min((sqnr for record in winner or records for sqnr in record.lowest_sqnr_db.values()), default=None)
        bound = "" if least is None else f": SQNR is {least:.1f} dB or more"
        stage = f"No stage of {short_name(winner[0])}" if winner else "No stage"
        return f"{stage} loses accuracy against the one before it{bound}; {ends}{cast.unnamed(by_id)}."
    (_, stage, before, after), record = max(falls, key=lambda pair: pair[0][0])
    change = f"from {before:.1f} dB to {after:.1f} dB"
    return f"{short_name(record)} loses most at {stage}, {change}; {ends}{cast.unnamed(by_id)}."
