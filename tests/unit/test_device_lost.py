"""A GPU that disappears while it is measured: its rows say so, the others go on, and the machine's record knows."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.errors import EnginesmithError, MissingCapability
from enginesmith.pipeline.measure.latency import benchmark
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import LatencyResult, measure_latency
from enginesmith.pipeline.measure.latency.timer import SessionTimer
from enginesmith.pipeline.measure.memory import usage
from enginesmith.pipeline.system import machine, nvidia, worker
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.nvidia import CudaDevice, Driver, GpuState

LOST = (
    "CUDA error: unspecified launch failure\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
"""In torch's words, all of them."""
NO_DEVICE = "CUDA error: no CUDA-capable device is detected"


class Session:
    """Answers for so many calls, then raises; ``cuda_stream`` is None, as there is no clock on a made-up device."""

    cuda_stream = None
    first_call_note = sibling_note = ""
    signature = SimpleNamespace(check=lambda feeds: None)

    def __init__(self, calls: float, message: str) -> None:
        self.left, self.message = calls, message

    def bind(self, feeds: Any) -> None:
        """Nothing to put anywhere."""

    def enqueue(self, bound: None) -> None:
        self.left -= 1

    def synchronize(self) -> None:
        if self.left < 0:
            raise RuntimeError(self.message)


class Engine:
    def __init__(self, calls: float = float("inf"), message: str = LOST) -> None:
        self.calls, self.message = calls, message

    def load(self, artifact: Artifact, device: Device) -> Session:
        return Session(self.calls, self.message)


class InThisProcess:
    """A worker's place: the real timer, whose errors take the way that they take through a process."""

    pid = 0

    def __init__(self, body: Any, *what: Any, log: Path) -> None:
        self.timer = SessionTimer(*what)

    def request(self, name: str, *arguments: Any, timeout_seconds: float) -> Any:
        kind, answer = worker._attempt(getattr(self.timer, name), arguments)
        if kind == worker._FAILED:
            assert isinstance(answer, EnginesmithError)
            raise answer
        return answer

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., LatencyResult]:
    monkeypatch.setattr(benchmark, "Worker", InThisProcess)

    def call(**engines: Engine) -> LatencyResult:
        nothing = Artifact(kind="torch", path=tmp_path, sha256="", bytes=0)
        candidates = [Candidate(name, engine, nothing, Device()) for name, engine in engines.items()]  # type: ignore[arg-type]
        settings = LatencySettings(
            block_ms=0.2, time_limit_seconds=0.05, min_rounds=2, launches=1, warmup_limit_seconds=0.01
        )
        return measure_latency(candidates, {1: {}, 2: {}}, settings, tmp_path, lambda text: None)

    return call


@pytest.mark.parametrize("message", [LOST, NO_DEVICE])
@pytest.mark.parametrize("calls", [0, 20])
def test_its_rows_say_so_the_next_goes_on(calls: int, message: str, measure: Callable[..., LatencyResult]) -> None:
    rows = measure(eager=Engine(), lost=Engine(calls, message), engine=Engine()).rows
    assert [row.p50_ms is not None for row in rows["eager"] + rows["engine"]] == [True] * 4
    for row in rows["lost"]:
        assert row.failure
        assert message.splitlines()[0] in row.failure
        assert (row.p50_ms, row.oom) == (None, None)
        assert message.splitlines()[0] in row.reasons["p50_ms"]


def test_without_a_baseline_the_others_have_no_speedup(measure: Callable[..., LatencyResult]) -> None:
    rows = measure(eager=Engine(0), engine=Engine()).rows["engine"]
    assert [row.p50_ms is not None for row in rows] == [True, True]
    assert all(row.speedup is None and row.reasons["speedup"] for row in rows)


class Lost:
    """NVML once the device has fallen off the bus."""

    def state(self, index: int) -> GpuState:
        raise MissingCapability(f"NVML does not show cuda:{index}: the GPU is lost")

    used_bytes = state


def test_nvml_that_fails_midway_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Driver(version=13020, devices=(CudaDevice(name="NVIDIA H100", compute_capability=(9, 0)),))
    monkeypatch.setattr(nvidia, "driver", lambda: shown)
    monkeypatch.setattr(nvidia, "nvml", Lost)
    (state,) = machine.gpu_states()
    assert (state.name, state.sm_clock_mhz) == ("NVIDIA H100", None)
    assert "the GPU is lost" in state.reasons["sm_clock_mhz"]
    assert usage.used_bytes(Device(kind="cuda")) == (None, "NVML does not show cuda:0: the GPU is lost")
