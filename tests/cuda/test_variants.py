"""Test what is measured by default on CUDA: variants with CUDA graphs, and PyTorch alone beside them."""

import os
from pathlib import Path

import numpy as np
import pytest

from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.measure.latency.timer import _EVENT_BLOCKS, SessionTimer
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report import sentences
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.workflows.optimize import optimize

from .test_onnxruntime import zeros

pytestmark = pytest.mark.skipif(
    "ENGINESMITH_STAND_IN" not in os.environ, reason="needs the CUDA runtime without a device: make test-cuda"
)
NETS = Path(__file__).parent / "nets.py"
CUDA = Device(kind="cuda", threads=1)


def test_what_cannot_be_captured_or_compiled_fails_alone(tmp_path: Path) -> None:
    """Triton needs a real driver, so that compiling fails here: that is a note, and no failure of the run."""
    measure = {"seconds": 1.0, "memory": False}
    values = {"model": f"{NETS}:waiting", "device": "cuda", "engines": ["eager", "onnxruntime"], "batch": [4]}
    settings = Settings(store=str(tmp_path / "store"))
    run = optimize(make({**values, "measure": measure}), tmp_path / "run", settings)
    ends = {record.id: record.status for record in run.variants}
    beside = {record.id for record in run.variants if record.reference}
    assert ends == {
        "eager-fp32-graphs": "failed",
        **dict.fromkeys(("onnxruntime-fp32", "onnxruntime-fp32-graphs", "eager-bf16"), "measured"),
        **dict.fromkeys(("compiled-fp32", "compiled-bf16", "compiled-bf16-graphs"), "failed"),
    }
    assert beside == {name for name in ends if "bf16" in name or name.startswith("compiled")}
    assert "captured no graph" in next(record.reason for record in run.variants if record.id == "eager-fp32-graphs")
    assert run.winner
    assert run.best_reference
    assert run.winner.startswith("onnxruntime-fp32")
    assert run.best_reference.variant in ("eager", "eager-bf16")
    notes = [note for note in sentences.list_measurement_notes(run) if note.startswith("not measured for comparison")]
    assert len(notes) == 1
    assert all(name in notes[0] for name in ends if name.startswith("compiled"))
    assert run.baseline.latency[0].device_p50_ms is not None


def test_plain_eager_is_a_result_where_its_graph_fails(tmp_path: Path) -> None:
    measure = {"seconds": 0.3, "memory": False, "references": False}
    values = {"model": f"{NETS}:waiting", "device": "cuda", "engines": ["eager"], "batch": [4], "measure": measure}
    run = optimize(make(values), tmp_path / "run", Settings(store=str(tmp_path / "store")))
    assert ([record.status for record in run.variants], run.winner) == (["failed"], "eager")


def test_events_time_calls_that_are_no_samples(tmp_path: Path) -> None:
    """ONNX Runtime returns before the device has finished, as the other engines do."""
    from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime

    timer = SessionTimer(OnnxRuntime(), zeros(tmp_path, "Relu"), CUDA)
    timer.load()
    timer.make_ready({"x": np.zeros((2, 64), np.float32)}, 0.1)
    timed = [timer.block(1e-3).device_seconds is not None for _ in range(_EVENT_BLOCKS + 1)]
    assert timed == [True, *[False] * (_EVENT_BLOCKS - 1), True]
    options = timer._session._options  # type: ignore[attr-defined]
    assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
