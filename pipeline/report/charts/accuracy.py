"""Draw fidelity by stage, the sensitivity of groups, and how training pruned models back went."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from enginesmith.pipeline.measure.fidelity import THRESHOLDS
from enginesmith.pipeline.measure.rows import StageFidelity
from enginesmith.pipeline.passes.finetune.options import Point, Recovery
from enginesmith.pipeline.report.charts.plotly import (
    MOST_NAMED,
    Cast,
    Chart,
    Figure,
    Style,
    axis,
    draw_markers,
    draw_others,
    escape,
    hover_text,
    label,
    layout,
    limit,
    list_layout,
    make_empty_chart,
    places,
    points,
    short_name,
    shorten_name,
    why_none,
)
from enginesmith.pipeline.report.sections import pruned, thin_curve
from enginesmith.pipeline.report.tables import marked
from enginesmith.pipeline.results.explain import narrowest_type
from enginesmith.pipeline.results.run import Assignment, Run, VariantRecord

_ID = "fidelity"
_TITLE = "Signal to quantisation noise against the reference (SQNR, dB) after each stage, at the worst shape"
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
    if not known:
        why = "No output has an SQNR" if found else "No stage was held against the reference"
        told = why_none(run, "fidelity", "outputs are whole numbers" if found else "nothing has run yet")
        return make_empty_chart(_ID, _TITLE, f"{why}: {told}.")
    return Chart(_ID, _TITLE, _figure(run, cast, known), _summary(run, cast, known))


def _worst(found: Sequence[StageFidelity]) -> dict[str, StageFidelity]:
    """Find by stage, in order, the shape with the lowest SQNR, one that failed before all that passed."""
    worst: dict[str, StageFidelity] = {}
    for one in found:
        kept = worst.get(one.stage)
        if kept is None or _badness(one) < _badness(kept):
            worst[one.stage] = one
    return worst


def _badness(one: StageFidelity) -> tuple[bool, float]:
    return (one.passed, float("inf") if one.sqnr_db is None else one.sqnr_db)


def _stages(found: _Worst) -> list[str]:
    """Order all stages so that each variant's own are in its order, the engine last."""
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
        traces.append(draw_others([_line(_judged(found[record.id]), stages) for record in rest]))
    for record in shown:
        traces += _traces(cast.style(record), record, found[record.id], stages)
    ticks = {float(place): "<br>".join(map(escape, _broken(stage))) for place, stage in enumerate(stages)}
    x_axis = places("stage", ticks, range=[-0.4, len(stages) - 0.6], tickangle=0)
    y_axis = axis("SQNR (dB)", log=False)
    shapes = [limit("y", value, text, ()) for value, text in _thresholds(run, shown)]
    return {"data": traces, "layout": layout(x_axis, y_axis, len(shown) + bool(rest), shapes=shapes)}


def _thresholds(run: Run, shown: Sequence[VariantRecord]) -> list[tuple[float, str]]:
    """List the thresholds that engines have to reach: the recipe's, else those of the precisions."""
    if run.recipe.min_sqnr_db is not None:
        return [(run.recipe.min_sqnr_db, f"threshold {run.recipe.min_sqnr_db:g} dB")]
    by_value: dict[float, dict[str, None]] = {}
    for record in shown:
        for precision in record.precision.split("+"):
            if precision in THRESHOLDS:
                by_value.setdefault(THRESHOLDS[precision].min_sqnr_db, {})[precision] = None
    return [(value, f"threshold of {', '.join(names)}: {value:g} dB") for value, names in by_value.items()]


def _traces(style: Style, record: VariantRecord, each: _Stages, stages: Sequence[str]) -> list[Figure]:
    """Draw judged stages as a line, and those that change the model on purpose as markers beside it."""
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
    """Break a stage's name into lines at its hyphens."""
    lines = [""]
    for part in re.findall(r"[^-]+-?", shorten_name(stage)):
        if lines[-1] and len(lines[-1]) + len(part) > _TICK:
            lines.append("")
        lines[-1] += part
    return lines


def _hover(record: VariantRecord, each: _Stages) -> list[str]:
    return [hover_text(marked(record), _words(one)) for one in each.values()]


def _line(each: _Stages, stages: Sequence[str]) -> tuple[list[float], list[float | None]]:
    return [float(stages.index(stage)) for stage in each], [one.sqnr_db for one in each.values()]


def _judged(each: _Stages) -> dict[str, StageFidelity]:
    """Leave out the stages that change the model on purpose, whose result later stages are compared with."""
    return {stage: one for stage, one in each.items() if not (one.passed and one.reason)}


def _words(one: StageFidelity) -> str:
    sqnr = "no SQNR" if one.sqnr_db is None else f"SQNR {one.sqnr_db:.1f} dB"
    verdict = "passed" if one.passed else "failed"
    return f"{one.stage}: {sqnr} at {one.point} (batch {one.batch}), {verdict}" + (f": {one.reason}" * bool(one.reason))


def _summary(run: Run, cast: Cast, found: _Worst) -> str:
    """Describe the largest fall from one stage to the next, the winner's or else the largest of all."""
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
    change = f"from {before.sqnr_db:.1f} dB to {before.sqnr_db - by:.1f} dB"
    return f"{short_name(record)} loses most at {after.stage}, {change}; {ends}{cast.unnamed(found)}."


_Fall = tuple[float, VariantRecord, StageFidelity, StageFidelity]


def _fall(record: VariantRecord, each: _Stages) -> _Fall | None:
    known = [one for one in each.values() if one.sqnr_db is not None]
    falls = [
        (one.sqnr_db - two.sqnr_db, record, one, two)
        for one, two in itertools.pairwise(known)
        if one.sqnr_db is not None and two.sqnr_db is not None and two.sqnr_db < one.sqnr_db
    ]
    return max(falls, key=lambda fall: fall[0], default=None)


# Chart what each group costs when it alone is quantised.

_MOST_GROUPS = 20


def quantised(run: Run) -> Chart:
    """SQNR of each group's own result in the low precision; an open marker is a group that stayed in float."""
    title = "SQNR (dB) of each group's own result in low precision, its inputs exact; open markers stayed in float"
    cast = Cast(run)
    found = {
        record.id: {one.group: one for one in record.assignment if one.sqnr_db is not None} for record in cast.records
    }
    found = {name: groups for name, groups in found.items() if groups}
    if not found:
        return make_empty_chart("sensitivity", title, _why(run))
    worst: dict[str, float] = {}
    for groups in found.values():
        for group, one in groups.items():
            worst[group] = min(worst.get(group, float("inf")), one.sqnr_db if one.sqnr_db is not None else float("inf"))
    ordered = sorted(worst, key=lambda group: (worst[group], group))
    return Chart(
        id="sensitivity",
        title=title,
        figure=_sensitivity_figure(cast, found, ordered[:_MOST_GROUPS]),
        summary=_sensitivity_summary(cast, found, ordered),
    )


def _why(run: Run) -> str:
    if any(record.assignment for record in run.variants):
        return "The groups were not tried one by one: no accuracy or fidelity goal asked for a search."
    return "Nothing was quantised group by group in this run."


def _sensitivity_figure(cast: Cast, found: Mapping[str, Mapping[str, Assignment]], groups: Sequence[str]) -> Figure:
    places = {group: place for place, group in enumerate(groups)}
    shown = cast.named(found)
    traces: list[Figure] = []
    for record in shown:
        mine = [one for group, one in found[record.id].items() if group in places]
        low = [one for one in mine if narrowest_type(one.precision) == narrowest_type(record.precision)]
        kept = [one for one in mine if one not in low]
        style = cast.style(record)
        traces += [
            _markers(style, record, part, places, symbol, showlegend=part is low or not low)
            for part, symbol in ((low, style.symbol), (kept, f"{style.symbol}-open"))
            if part
        ]
    names = [label(group) for group in groups]
    return {"data": traces, "layout": list_layout(axis("SQNR (dB)", log=False), names, len(shown))}


def _markers(
    style: Style,
    record: VariantRecord,
    found: Sequence[Assignment],
    places: Mapping[str, int],
    symbol: str,
    **more: Any,
) -> Figure:
    marker = {**style.marker, "symbol": symbol, "line": {"width": 1.5, "color": style.colour}}
    hover = [hover_text(marked(record), _sensitivity_words(one)) for one in found]
    x, y = [one.sqnr_db for one in found], [places[one.group] for one in found]
    return draw_markers(style.name, x, y, hover, marker=marker, legendgroup=style.name, **more)


def _sensitivity_words(one: Assignment) -> str:
    why = f": {one.why}" if one.why else ""
    return f"{one.group} ({one.operator}): SQNR {one.sqnr_db:.1f} dB, computed in {one.precision}{why}"


def _sensitivity_summary(cast: Cast, found: Mapping[str, Mapping[str, Assignment]], ordered: Sequence[str]) -> str:
    record, one = min(
        ((record, one) for record in cast.records for one in found.get(record.id, {}).values()),
        key=lambda pair: pair[1].sqnr_db or 0.0,
    )
    text = f"{one.group} ({one.operator}) loses most in low precision, to {one.sqnr_db:.1f} dB in {short_name(record)}"
    shown = f"; the {_MOST_GROUPS} worst of {len(ordered)} groups are shown" if len(ordered) > _MOST_GROUPS else ""
    return f"{text}{shown}{cast.unnamed(found, 'in the table only')}."


# How training pruned models back went.

_RECOVERY_ID = "recovery"
_Turn = tuple[VariantRecord, int, Recovery]


def recovery(run: Run) -> Chart:
    """Draw metric on held-back samples and loss by step, a line for each time that a model was trained back."""
    turns = [(record, turn, one) for record in pruned(run) for turn, one in enumerate(record.recovery, 1) if one.curve]
    metric = " and ".join(dict.fromkeys(one.metric for _, _, one in turns)) or "metric"
    title = f"Training pruned models back: {metric} on held-back samples, and training loss, by step"
    if not turns:
        why = "No model was pruned in this run." if not any(one.prune for one in run.variants) else ""
        return make_empty_chart(
            _RECOVERY_ID, title, why or "Pruned models were not trained back: --recover distil does it."
        )
    return Chart(
        id=_RECOVERY_ID,
        title=title,
        figure=_recovery_figure(Cast(run), turns[:MOST_NAMED], metric),
        summary=_recovery_summary(turns),
    )


def _name(record: VariantRecord, turn: int) -> str:
    return f"{record.prune}, turn {turn}" if len(record.recovery) > 1 else record.prune or record.id


def _recovery_figure(cast: Cast, turns: Sequence[_Turn], metric: str) -> Figure:
    traces: list[Figure] = []
    for record, turn, found in turns:
        style, name, curve = cast.style(record), _name(record, turn), thin_curve(found.curve)
        steps = [point.step for point in curve]
        hover = [hover_text(name, _recovery_words(found, point)) for point in curve]
        common = {"name": label(name), "legendgroup": name, "marker": {**style.marker, "size": 5}}
        traces.append(points(style, steps, [point.metric for point in curve], hover, **common))
        losses = [point.loss for point in curve]
        traces.append(points(style, steps, losses, hover, **common, yaxis="y2", showlegend=False))
    metrics = [point.metric for _, _, found in turns for point in found.curve]
    teachers: Mapping[float, None] = dict.fromkeys(found.teacher for _, _, found in turns)
    shapes = [limit("y", value, f"dense {value:.4f}", metrics) for value in teachers]
    upper = axis(f"{metric}, held back", log=False, zero=False) | {"domain": [0.55, 1]}
    losses = [point.loss for _, _, found in turns for point in found.curve]
    lower = axis("training loss", losses, zero=False) | {"domain": [0, 0.45]}
    x = axis("training step", log=False) | {"anchor": "y2"}
    found_layout = layout(x, upper, len(turns), shapes=shapes, yaxis2=lower)
    return {"data": traces, "layout": {**found_layout, "height": found_layout["height"] + 120}}


def _recovery_words(found: Recovery, point: Point) -> str:
    loss = "" if point.loss is None else f", loss {point.loss:.4g}"
    kept = ", kept" if point.step == found.best_step else ""
    return f"step {point.step}: {found.metric} {point.metric:.4f}{loss}, learning rate {point.learning_rate:.2g}{kept}"


def _recovery_summary(turns: Sequence[_Turn]) -> str:
    record, turn, found = turns[-1]
    text = (
        f"{_name(record, turn)} went from {found.metric} {found.before:.4f} to {found.after:.4f} in {found.steps} steps"
    )
    text += f" ({found.reason}); the dense model has {found.teacher:.4f} on the same {found.held_back} samples"
    more = len(turns) - MOST_NAMED
    return f"{text}; {more} more are not shown." if more > 0 else f"{text}."
