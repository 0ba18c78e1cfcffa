"""Eager and ONNX Runtime on CUDA: the same answers as on the CPU, and never silently on the CPU."""

from pathlib import Path

import pytest

from enginesmith.pipeline import Settings, optimize
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.recipe import make

CUDA = Device(kind="cuda")


@pytest.mark.parametrize("model", ["digits", "resnet18"])
def test_the_main_job_runs_on_cuda(model: str, tmp_path: Path) -> None:
    found = engine_class("onnxruntime").available(CUDA)
    if not found.ok:
        pytest.skip(f"ONNX Runtime cannot use CUDA here: {found.reason}")
    recipe = make({"model": model, "device": "cuda", "measure": {"seconds": 3.0}, "min_sqnr_db": 40.0})
    run = optimize(recipe, tmp_path / "run", Settings(store=tmp_path / "store"))
    assert [record.status for record in run.variants] == ["measured"]
    row = run.variants[0].row(1)
    assert row is not None
    assert row.device_p50_ms is not None
    assert row.h2d_ms is not None
