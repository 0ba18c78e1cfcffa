"""Latency distributions: which share of the calls took at most how long."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginesmith.pipeline.report.charts.base import Chart, Figure, missing
from enginesmith.pipeline.report.charts.parts import axis, layout, limit, why_none
from enginesmith.pipeline.report.charts.styles import Cast, Style, called
from enginesmith.pipeline.report.charts.text import said
from enginesmith.pipeline.report.tables import marked, ms
from enginesmith.pipeline.run import Run, VariantRecord

Samples = Mapping[str, NDArray[Any]]
"""As ``LatencyResult.samples`` says."""
COLUMNS = ("variant", "calls", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "slowest ms")
_MOST_POINTS = 200
_MOST_CHARTS = 4
_TAIL = (0.995, 0.999, 1.0)


def ecdf(run: Run, samples: Samples | None) -> tuple[Chart, ...]:
    """A chart for each of the first batch sizes, that of the budgets first."""
    sizes = {row.batch for record in (run.baseline, *run.variants) for row in record.latency if row.p50_ms is not None}
    ordered = sorted(sizes, key=lambda size: (size != run.deciding_batch, size))
    charts = [_chart(run, samples or {}, size, sizes) for size in ordered[:_MOST_CHARTS]]
    if charts:
        return tuple(charts)
    why = f"No latency was measured: {why_none(run, 'latency', 'nothing has run yet')}."
    return (missing("ecdf", "Distribution of latency (ms)", COLUMNS, why),)


def _chart(run: Run, samples: Samples, size: int, sizes: set[int]) -> Chart:
    cast, name = Cast(run), f"ecdf-{size}"
    title = f"Distribution of latency (ms) at batch {size}: share of calls (%) that took at most so long"
    seconds = {one.id: samples[key] for one in cast.records if (key := f"{one.id}/{size}/seconds") in samples}
    found = {record: np.sort(values) * 1e3 for record, values in seconds.items() if values.size}
    if not found:
        return missing(name, title, COLUMNS, "The run has no latency samples: samples.npz is not in its folder.")
    return Chart(
        id=name,
        title=title,
        figure=_figure(run, cast, found, size),
        summary=_summary(run, cast, found, sizes),
        columns=COLUMNS,
        rows=tuple(_cells(record, size, found.get(record.id)) for record in cast.records if record.row(size)),
    )


def _cells(record: VariantRecord, size: int, values: NDArray[Any] | None) -> tuple[str, ...]:
    row = record.row(size)
    assert row is not None
    ranks = (row.p50_ms, row.p90_ms, row.p99_ms, row.p99_9_ms)
    slowest = None if values is None else float(values[-1])
    return (marked(record), "–" if row.n is None else str(row.n), *(ms(value) for value in ranks), ms(slowest))


def _figure(run: Run, cast: Cast, found: Mapping[str, NDArray[Any]], size: int) -> Figure:
    shown = cast.named(found)
    lines = [(record, *_quantiles(found[record.id])) for record in shown]
    traces = [_line(cast.style(record), record, x, share) for record, x, share in lines]
    drawn = [value for _, values, _ in lines for value in values]
    x = axis(f"latency of a call at batch {size} (ms)", drawn, zero=False)
    y = axis("share of calls (%)", log=False, zero=False) | {"range": [0, 101]}
    return {"data": traces, "layout": layout(x, y, len(shown), shapes=_budgets(run, size, drawn))}


def _budgets(run: Run, size: int, drawn: Sequence[float]) -> list[Figure]:
    """At the batch size that they are about, with the share of calls that has to be left of them."""
    budgets = {"50 %": run.recipe.budgets.max_latency_ms, "99 %": run.recipe.budgets.max_p99_ms}
    known = [(share, value) for share, value in budgets.items() if value is not None and size == run.deciding_batch]
    return [
        limit("x", value, f"budget: {share} within {ms(value)} ms", drawn, line)
        for line, (share, value) in enumerate(known)
    ]


def _quantiles(values: NDArray[Any]) -> tuple[list[float], list[float]]:
    """Latencies that were seen, and the share of calls that took no longer, in per cent; the tail is not left out."""
    count = values.size
    if count <= _MOST_POINTS:
        places = np.arange(1, count + 1)
    else:
        even = np.linspace(0, 0.99, _MOST_POINTS - len(_TAIL))
        places = np.unique(np.clip(np.ceil(np.array([*even, *_TAIL]) * count).astype(int), 1, count))
    return values[places - 1].tolist(), (100 * places / count).tolist()


def _line(style: Style, record: VariantRecord, x: list[float], share: list[float]) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": style.name,
        "x": x,
        "y": share,
        "line": {**style.line, "shape": "hv"},
        "zorder": style.zorder,
        "hovertext": [f"{part:.4g} % within {ms(value)} ms" for value, part in zip(x, share, strict=True)],
        "hovertemplate": f"{said(marked(record))}<br>%{{hovertext}}<extra></extra>",
    }


def _summary(run: Run, cast: Cast, found: Mapping[str, NDArray[Any]], sizes: set[int]) -> str:
    records = [record for record in cast.records if record.id in found]
    best = min(records, key=lambda record: float(np.median(found[record.id])))
    values = found[best.id]
    text = f"Half of {called(best)}'s {values.size} calls took at most {ms(float(np.median(values)))} ms, the slowest "
    text += f"{ms(float(values[-1]))} ms"
    if run.baseline.id in found and best.id != run.baseline.id:
        base = found[run.baseline.id]
        faster = float(np.mean(values < base[0]))
        text += (
            f"; {100 * faster:.3g} % of them were faster than the fastest of {called(run.baseline)} ({ms(base[0])} ms)"
        )
    more = len(sizes) - _MOST_CHARTS
    text += f"; {more} more batch sizes are in the table of latencies" if more > 0 else ""
    return f"{text}{cast.unnamed(found, 'in the table only')}."
