"""Charts of a run: plotly.js figures as plain data, made from the numbers in run.json and the latency samples."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from enginesmith.pipeline.report.charts import sensitivity
from enginesmith.pipeline.report.charts.base import DARK, LIGHT, Chart
from enginesmith.pipeline.report.charts.concurrency import concurrency
from enginesmith.pipeline.report.charts.distribution import ecdf
from enginesmith.pipeline.report.charts.fidelity import fidelity
from enginesmith.pipeline.report.charts.limits import limits
from enginesmith.pipeline.report.charts.memory import memory
from enginesmith.pipeline.report.charts.pareto import pareto
from enginesmith.pipeline.report.charts.profile import profile
from enginesmith.pipeline.report.charts.recovery import recovery
from enginesmith.pipeline.report.charts.sweep import latency_by_batch, throughput_by_batch
from enginesmith.pipeline.run import Run

__all__ = ["DARK", "LIGHT", "Chart", "charts"]


def charts(run: Run, samples: Mapping[str, NDArray[Any]] | None = None) -> tuple[Chart, ...]:
    """All charts of a run, in the order of its questions; ``samples`` are those of samples.npz.

    Their ids: pareto, ecdf-BATCH (or ecdf, where there is none), memory, latency-by-batch, throughput-by-batch,
    concurrency, fidelity, sensitivity, limits, profile, recovery.
    """
    return (
        pareto(run),
        *ecdf(run, samples),
        memory(run),
        latency_by_batch(run),
        throughput_by_batch(run),
        concurrency(run),
        fidelity(run),
        sensitivity.quantised(run),
        limits(run),
        profile(run),
        recovery(run),
    )
