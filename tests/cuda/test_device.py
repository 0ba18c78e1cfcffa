"""The device is found by itself, and one that cannot be used is refused at once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import NETS
from .control import Control

Card = Callable[..., Control]


def optimize(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "enginesmith.cli", "optimize", f"{NETS}:mlp", "--measure-time", "0.3s"]
    environment = {**os.environ, "ENGINESMITH_STORE": str(out.parent / "store")}
    return subprocess.run(
        [*words, "--out", str(out), *options], capture_output=True, text=True, check=False, env=environment
    )


def test_a_driver_that_is_too_old_ends_a_run_at_once(card: Card, tmp_path: Path) -> None:
    card(driver=12090)
    done = optimize(tmp_path / "run", "--device", "cuda")
    assert done.returncode == 4
    assert "for CUDA 12.9, and the installed torch needs CUDA 13" in done.stderr
    assert "driver 580.65.06 or newer" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("driver", "kind"), [(13000, "cuda"), (12090, "cpu")])
def test_without_a_device_the_gpu_is_used_where_it_can_be(card: Card, tmp_path: Path, driver: int, kind: str) -> None:
    card(driver=driver)
    done = optimize(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    first, second = done.stderr.splitlines()[:2]
    assert first.startswith("cuda:0 " if kind == "cuda" else "cpu: ")
    assert "onnxruntime" in first
    assert ("is not used: the NVIDIA driver is too old" in second) == (kind == "cpu")
    assert json.loads((tmp_path / "run/run.json").read_text())["device"]["kind"] == kind
