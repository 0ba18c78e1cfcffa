"""Draw the charts of a run: plotly.js figures as plain data, of the numbers in run.json and the latency samples."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from enginesmith.pipeline.report.charts.accuracy import fidelity, sensitivity, training
from enginesmith.pipeline.report.charts.latency import concurrency, ecdf, latency_by_batch, throughput_by_batch
from enginesmith.pipeline.report.charts.memory import memory, pareto
from enginesmith.pipeline.report.charts.plotly import DARK, LIGHT, Cast, Chart
from enginesmith.pipeline.report.charts.profile import limits, profile
from enginesmith.pipeline.results.run import Run

__all__ = ["DARK", "LIGHT", "Chart", "charts"]


def charts(run: Run, samples: Mapping[str, NDArray[Any]] | None = None) -> tuple[Chart, ...]:
    """Draw all charts of a run, in the order of its questions; ``samples`` are those of samples.npz.

    Their ids: pareto, ecdf-BATCH (or ecdf, where there is none), memory, latency-by-batch, throughput-by-batch,
    concurrency, fidelity, sensitivity, limits, profile, training.
    """
    cast = Cast(run)
    after = (latency_by_batch, throughput_by_batch, concurrency, fidelity, sensitivity, limits, profile, training)
    return (pareto(cast), *ecdf(cast, samples), memory(cast), *(draw(cast) for draw in after))
