"""How training pruned models back went."""

from collections.abc import Mapping, Sequence

from enginesmith.pipeline.recovery.record import Point, Recovery
from enginesmith.pipeline.report.charts.base import Chart, Figure, missing
from enginesmith.pipeline.report.charts.parts import axis, layout, limit, points
from enginesmith.pipeline.report.charts.styles import MOST_NAMED, Cast
from enginesmith.pipeline.report.charts.text import label, said
from enginesmith.pipeline.report.smaller import pruned
from enginesmith.pipeline.run import Run, VariantRecord

_ID = "recovery"
COLUMNS = ("pruned to", "turn", "step", "loss", "metric", "learning rate")
_MOST_POINTS = 500
_Turn = tuple[VariantRecord, int, Recovery]


def recovery(run: Run) -> Chart:
    """The metric on held-back samples, and the loss, by step; one line for each time that a model was trained back."""
    turns = [(record, turn, one) for record in pruned(run) for turn, one in enumerate(record.recovery, 1) if one.curve]
    metric = " and ".join(dict.fromkeys(one.metric for _, _, one in turns)) or "metric"
    title = f"Training pruned models back: {metric} on held-back samples, and training loss, by step"
    if not turns:
        why = "No model was pruned in this run." if not any(one.prune for one in run.variants) else ""
        return missing(_ID, title, COLUMNS, why or "Pruned models were not trained back: --recover distil does it.")
    return Chart(
        id=_ID,
        title=title,
        figure=_figure(Cast(run), turns[:MOST_NAMED], metric),
        summary=_summary(turns),
        columns=COLUMNS,
        rows=tuple(_cells(*turn, point) for turn in turns[:MOST_NAMED] for point in _thinned(turn[2].curve)),
    )


def _thinned(curve: Sequence[Point]) -> Sequence[Point]:
    """As many points as can be told apart, the first and the last with them."""
    if len(curve) <= _MOST_POINTS:
        return curve
    return [curve[round(index * (len(curve) - 1) / (_MOST_POINTS - 1))] for index in range(_MOST_POINTS)]


def _name(record: VariantRecord, turn: int) -> str:
    return f"{record.prune}, turn {turn}" if len(record.recovery) > 1 else record.prune or record.id


def _figure(cast: Cast, turns: Sequence[_Turn], metric: str) -> Figure:
    traces: list[Figure] = []
    for record, turn, found in turns:
        style, name, curve = cast.style(record), _name(record, turn), _thinned(found.curve)
        steps = [point.step for point in curve]
        hover = [said(name, _words(found, point)) for point in curve]
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


def _words(found: Recovery, point: Point) -> str:
    loss = "" if point.loss is None else f", loss {point.loss:.4g}"
    kept = ", kept" if point.step == found.best_step else ""
    return f"step {point.step}: {found.metric} {point.metric:.4f}{loss}, learning rate {point.learning_rate:.2g}{kept}"


def _cells(record: VariantRecord, turn: int, found: Recovery, point: Point) -> tuple[str, ...]:
    loss = "–" if point.loss is None else f"{point.loss:.4g}"
    values = (str(point.step), loss, f"{point.metric:.4f}", f"{point.learning_rate:.2g}")
    return (_name(record, turn), str(turn), *values)


def _summary(turns: Sequence[_Turn]) -> str:
    record, turn, found = turns[-1]
    text = (
        f"{_name(record, turn)} went from {found.metric} {found.before:.4f} to {found.after:.4f} in {found.steps} steps"
    )
    text += f" ({found.reason}); the dense model has {found.teacher:.4f} on the same {found.held_back} samples"
    more = len(turns) - MOST_NAMED
    return f"{text}; {more} more are not shown." if more > 0 else f"{text}."
