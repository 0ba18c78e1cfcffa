"""Draw the charts of a run: plotly.js figures as plain data, of the numbers in run.json."""

from enginesmith.pipeline.report.charts.fidelity import fidelity
from enginesmith.pipeline.report.charts.latency import latency_by_batch, throughput_by_batch
from enginesmith.pipeline.report.charts.memory import memory, pareto
from enginesmith.pipeline.report.charts.plotly import DARK, LIGHT, Cast, Chart
from enginesmith.pipeline.results.run import Run

__all__ = ["DARK", "LIGHT", "Chart", "charts"]


def charts(run: Run) -> tuple[Chart, ...]:
    """Draw all charts of a run, in the order of its questions.

    Their ids: pareto, memory, latency-by-batch, throughput-by-batch, fidelity.
    """
    cast = Cast(run)
    return tuple(draw(cast) for draw in (pareto, memory, latency_by_batch, throughput_by_batch, fidelity))
