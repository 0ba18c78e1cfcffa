"""Where the time goes: by module, the baseline beside variants."""

from collections.abc import Sequence

from enginesmith.pipeline.measure.profile_table import JoinedRow, joined, repeated
from enginesmith.pipeline.measure.rows import Profile
from enginesmith.pipeline.report.charts.base import Chart, Figure, missing
from enginesmith.pipeline.report.charts.parts import axis, listed, why_none
from enginesmith.pipeline.report.charts.styles import Cast, called
from enginesmith.pipeline.report.charts.text import label, said
from enginesmith.pipeline.report.tables import marked, ms
from enginesmith.pipeline.run import Run

_ID = "profile"
_MOST_MODULES = 20


def profile(run: Run) -> Chart:
    """Time of each module in each variant: the largest ones, and the rest together."""
    cast = Cast(run)
    profiles = ((record.id, one) for record in cast.records for one in reversed(record.profile))
    found = {name: one for name, one in profiles if one.total_ms is not None and one.rows}
    sizes = ", ".join(map(str, sorted({one.batch for one in found.values()})))
    title = f"Time of an inference (ms) by module, at batch {sizes}" if found else "Time of an inference (ms) by module"
    if not found:
        why = f"Nothing was profiled: {why_none(run, 'profile', 'not asked for')}."
        return missing(_ID, title, ("module",), why)
    shown = [found[record.id] for record in cast.named(found)]
    modules = _modules(shown)
    return Chart(
        id=_ID,
        title=title,
        figure=_figure(cast, modules),
        summary=_summary(run, cast, shown, modules, found),
        columns=("module", *(f"{one.variant} ms" for one in shown)),
        rows=tuple((row.module, *(ms(value) for value in row.ms.values())) for row in modules),
    )


def _modules(profiles: Sequence[Profile]) -> list[JoinedRow]:
    """The modules that cost most somewhere, and in one more row all that are left."""
    rows = joined(profiles)
    if len(rows) > _MOST_MODULES:
        rows = repeated(rows)
    ordered = sorted(rows, key=lambda row: (-row.most_ms, row.module))
    kept, left = ordered[:_MOST_MODULES], ordered[_MOST_MODULES:]
    if not left:
        return kept
    sums: dict[str, float | None] = {one.variant: sum(row.ms[one.variant] or 0.0 for row in left) for one in profiles}
    return [*kept, JoinedRow(module=f"({len(left)} more)", modules=(), ms=sums, ratio=dict.fromkeys(sums))]


def _figure(cast: Cast, modules: Sequence[JoinedRow]) -> Figure:
    shown = [record for record in cast.records if record.id in modules[0].ms]
    traces: list[Figure] = []
    for record in shown:
        style = cast.style(record)
        mine = [(place, row, row.ms[record.id]) for place, row in enumerate(modules) if row.ms[record.id] is not None]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": style.name,
                "x": [value for _, _, value in mine],
                "y": [place for place, _, _ in mine],
                "hovertext": [
                    said(marked(record), f"{row.module}: {ms(value)} ms", row.why.get(record.id, ""))
                    for _, row, value in mine
                ],
                "hoverinfo": "text",
                "marker": {**style.marker, "size": style.size + 1, "opacity": 0.9},
            }
        )
    names = [label(row.module) for row in modules]
    x = axis("time in one inference (ms)", log=False)
    return {"data": traces, "layout": listed(x, names, len(shown))}


def _summary(
    run: Run, cast: Cast, shown: Sequence[Profile], modules: Sequence[JoinedRow], having: dict[str, Profile]
) -> str:
    told = next((one for one in shown if one.variant == run.winner), shown[0])
    name = next(called(record) for record in cast.records if record.id == told.variant)
    total = told.total_ms or 0.0
    largest = max((row for row in modules if row.modules), key=lambda row: row.ms[told.variant] or 0.0, default=None)
    text = f"{name}'s operators take {ms(total)} ms in all"
    if largest is not None and total and (most := largest.ms[told.variant]) is not None:
        text += f", the largest part in {largest.module} ({ms(most)} ms, {100 * most / total:.0f} %)"
    return f"{text}{cast.unnamed(having, 'not shown')}."
