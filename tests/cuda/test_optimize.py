"""Whole commands on the runtime without a device: what runs, what is refused, and what a report says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginesmith.pipeline.system import worker

from .control import Control

Card = Callable[..., Control]
Log = Callable[[], list[tuple[int, str]]]
NET = f"{Path(__file__).with_name('nets.py')}:mlp"
PARAMETERS_BYTES = 19_210 * 4
MIB = 1 << 20


def record(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "run.json").read_text()))


def fresh(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, which sees the card of this test."""
    command = [sys.executable, "-m", "enginesmith.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(optimized: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eager and ONNX Runtime, plain and with CUDA graphs, alone and with two callers."""
    words = ("--device", "cuda", "--engine", "onnxruntime", "--no-references", "--concurrency", "2", "--batch", "4")
    return optimized(tmp_path_factory.mktemp("run") / "run", NET, *words)


def test_every_variant_answers_and_is_measured(run: Path) -> None:
    made = record(run)
    variants = {variant["id"]: variant for variant in made["variants"]}
    assert {"onnxruntime-fp32", "onnxruntime-fp32-graphs"} <= set(variants)
    for variant in [made["baseline"], *variants.values()]:
        assert variant["status"] == "measured", variant["reason"]
        assert all(entry["passed"] for entry in variant["fidelity"])
        assert all(row["p50_ms"] and row["device_p50_ms"] for row in variant["latency"])
        assert variant["memory"]["device"] == "cuda:0"
    assert PARAMETERS_BYTES <= variants["onnxruntime-fp32"]["memory"]["peak_bytes"] < MIB


def test_a_bundle_runs_on_the_device_or_says_that_the_driver_is_too_old(
    run: Path, cli: Any, card: Card, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    answer = cli("package", run, "-f", "bundle", "-o", bundle)
    assert answer.code == 0, answer.text
    done = subprocess.run([sys.executable, bundle / "infer.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    card(driver=12080)
    done = subprocess.run([sys.executable, bundle / "infer.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "the NVIDIA driver is too old for this onnxruntime: install a newer driver" in done.stderr


@pytest.mark.parametrize(("capability", "rtx"), [("8.6", True), ("9.0", False), ("12.0", True)])
def test_doctor_tells_what_each_device_can_use(capability: str, rtx: bool, card: Card) -> None:
    card(capability=capability)
    done = fresh("doctor")
    assert f"compute capability: {capability}" in done.stdout
    usable = done.stdout.partition("engines on cuda:")[2]
    assert "eager: ok" in usable
    assert "onnxruntime: ok" in usable
    assert ("tensorrt-rtx on cuda:0: yes" in done.stdout) == rtx


def test_the_second_device_is_used_alone(card: Card, store: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    card(devices=2, log=log)
    words = ("--device", "cuda:1", "--engine", "onnxruntime", "--no-references", "--measure-time", "0.2s")
    done = fresh("optimize", NET, *words, "--batch", "4", "--store", store, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert {v["memory"]["device"] for v in record(tmp_path / "run")["variants"]} == {"cuda:1"}
    assert "context on device 1" in log.read_text()
    assert "context on device 0" not in log.read_text()


def test_a_capture_that_fails_in_the_middle_ends_that_variant_alone(card: Card, tmp_path: Path) -> None:
    """The first capture is verify's, the second that of a deployment's memory, and the third that of latency."""
    control = card()
    control.write(invalid_capture_at=3)
    words = ("--device", "cuda", "--engine", "onnxruntime", "--no-references", "--measure-time", "0.2s", "--batch", "4")
    done = fresh("optimize", NET, *words, "--store", tmp_path / "store", "--out", tmp_path / "run")
    assert (done.returncode, control.read("faults")) == (0, 1), done.stderr
    plain, graphs = record(tmp_path / "run")["variants"]
    assert (plain["id"], plain["status"]) == ("onnxruntime-fp32", "measured")
    assert (graphs["id"], graphs["status"]) == ("onnxruntime-fp32-graphs", "failed")
    assert "ONNX Runtime captured no CUDA graph: CUDA failure 901: operation" in graphs["reason"]


def look(progress: Any) -> dict[str, int]:
    """Use the device in a worker."""
    import torch

    torch.zeros(1, device="cuda")
    return {"worker": os.getpid(), "server": os.getppid()}


def test_the_fork_server_never_uses_cuda(runtime_log: Log, tmp_path: Path) -> None:
    seen = worker.run(look, log=tmp_path / "log")
    users = {pid for pid, _ in runtime_log()}
    assert seen["worker"] in users
    assert seen["server"] not in users
