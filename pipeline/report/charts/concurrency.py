"""What several callers at the same time gain in throughput, and pay in latency."""

from collections.abc import Mapping, Sequence

from enginesmith.pipeline.measure.rows import LatencyRow, Throughput
from enginesmith.pipeline.report.charts.base import Chart, Figure, missing
from enginesmith.pipeline.report.charts.parts import axis, bars, layout, measured, others, points
from enginesmith.pipeline.report.charts.styles import Cast, Style, called
from enginesmith.pipeline.report.charts.text import counted, said
from enginesmith.pipeline.report.measurements import THROUGHPUT
from enginesmith.pipeline.report.measurements import throughput as cells
from enginesmith.pipeline.report.tables import marked, ms, rate
from enginesmith.pipeline.run import Run, VariantRecord

_ID = "concurrency"
_MOST_NUMBERED = 4
"""Lines that numbers of callers stand at; of more, only the winner's."""
_NOT_ASKED = "Throughput of several callers was not measured: --concurrency 1,2,4 asks for it."


def concurrency(run: Run) -> Chart:
    """Throughput against the tail of latency, a point for each number of callers."""
    cast, at = Cast(run), run.deciding_batch
    rows = {name: row for name, row in measured(cast.records, at).items() if row.concurrency}
    if not rows:
        return missing(_ID, f"Throughput (samples/s) against latency (ms) at batch {at}", THROUGHPUT, _NOT_ASKED)
    rank = "p99" if any(level.p99_ms is not None for row in rows.values() for level in row.concurrency) else "p50"
    return Chart(
        id=_ID,
        title=f"Throughput (samples/s) against {rank} latency (ms) at batch {at}; numbers are callers at the same time",
        figure=_figure(cast, rows, rank),
        summary=_summary(cast, rows, rank),
        columns=THROUGHPUT,
        rows=tuple(row for row in cells(run) if row[1] == str(at)),
    )


def _latency(level: Throughput, rank: str) -> float | None:
    return level.p99_ms if rank == "p99" else level.p50_ms


def _known(row: LatencyRow, rank: str) -> list[tuple[float, Throughput]]:
    return [(value, level) for level in row.concurrency if (value := _latency(level, rank)) is not None]


def _figure(cast: Cast, rows: Mapping[str, LatencyRow], rank: str) -> Figure:
    found = {name: known for name, row in rows.items() if (known := _known(row, rank))}
    shown, rest = cast.named(found), cast.rest(found)
    traces: list[Figure] = []
    if rest:
        traces.append(others([_line(found[record.id]) for record in rest], "lines+markers"))
    for record in shown:
        numbered = len(shown) <= _MOST_NUMBERED or cast.style(record).winner
        traces.append(_trace(cast.style(record), record, found[record.id], rows[record.id].knee, numbered=numbered))
    x = axis(f"{rank} latency of a call (ms)", [value for known in found.values() for value, _ in known])
    rates = [level.samples_per_s.median for known in found.values() for _, level in known]
    return {"data": traces, "layout": layout(x, axis("throughput (samples/s)", rates), len(shown) + bool(rest))}


def _line(known: Sequence[tuple[float, Throughput]]) -> tuple[list[float], list[float | None]]:
    return [value for value, _ in known], [level.samples_per_s.median for _, level in known]


def _trace(
    style: Style, record: VariantRecord, known: Sequence[tuple[float, Throughput]], knee: int | None, *, numbered: bool
) -> Figure:
    x, y = _line(known)
    hover = [said(marked(record), _words(level, knee)) for _, level in known]
    trace = points(style, x, y, hover, error_y=bars([level.samples_per_s for _, level in known], style.colour))
    if numbered:
        trace |= {"mode": "lines+markers+text", "textposition": "top center"}
        trace["text"] = [str(level.callers) for _, level in known]
    return trace


def _words(level: Throughput, knee: int | None) -> str:
    found = level.samples_per_s
    text = (
        f"{counted(level.callers, 'caller')}: {rate(found.median)} [{rate(found.low)}, {rate(found.high)}] samples/s, "
    )
    text += f"p50 {ms(level.p50_ms)} ms, p99 {ms(level.p99_ms)} ms"
    return text + (", the knee: more callers gain less than 5 %" if level.callers == knee else "")


def _summary(cast: Cast, rows: Mapping[str, LatencyRow], rank: str) -> str:
    pairs = [(one, level) for one in cast.records if one.id in rows for level in rows[one.id].concurrency]
    best, level = max(pairs, key=lambda pair: pair[1].samples_per_s.median)
    most = f"{rate(level.samples_per_s.median)} samples/s with {counted(level.callers, 'caller')}"
    text = f"{called(best)} answers most, {most}"
    value = _latency(level, rank)
    text += f", at {rank} {ms(value)} ms" if value is not None else ""
    knee = rows[best.id].knee
    text += f"; from {knee} on, more callers gain less than 5 %" if knee is not None and knee != level.callers else ""
    unknown = sum(_latency(level, rank) is None for _, level in pairs)
    few = f"; {unknown} of {len(pairs)} points are left out, as they have too few calls for a {rank}" if unknown else ""
    return f"{text}{few}{cast.unnamed(rows)}."
