"""A run to report on: eager and a variant that is faster."""

from typing import Any

import pytest

from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import LatencyRow, MemoryRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.report import terminal
from enginesmith.pipeline.results.run import Run, VariantRecord
from runs import small, variant


def record(name: str, ms: float, speedup: float) -> VariantRecord:
    half = 0.1 if speedup != 1 else 0
    interval = Interval(median=speedup, low=speedup - half, high=speedup + half)
    row = LatencyRow(batch=1, n=100, p50_ms=ms, speedup=interval, stopped_because="the time limit of 5 s")
    memory = MemoryRow(device="cpu", batch=1, peak_bytes=3 << 20)
    quality = Quality(metric="top1", value=0.99, baseline=0.995, drop=0.005, samples=200)
    return variant(name, latency=(row,), memory=memory, quality=quality)


def run(**changes: Any) -> Run:
    values = {
        "environment": {"processor": "Some CPU", "busy": True, "warnings": ["the machine is busy"]},
        "variants": (record("onnxruntime-fp32", 0.5, 4.0),),
        "winner": "onnxruntime-fp32",
    }
    return small(record("eager", 2.0, 1.0), **{**values, **changes})


def printed(shown: Run, capsys: pytest.CaptureFixture[str]) -> str:
    terminal.show_run(shown, None, as_json=False)
    return capsys.readouterr().out
