"""The state of GPUs by NVML, from the command line: processes of others, clocks, memory, compute modes and slices."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import NETS
from .control import Control
from .test_optimize import fresh, record
from .test_runtime import python

Card = Callable[..., Control]
MIB = 1 << 20
USING = "import torch; torch.zeros(400 << 18, device='cuda'); print('ready', flush=True); input()"
STATE = """
import pynvml
from enginesmith.pipeline.system import machine, nvidia
nvidia._HOST_NAMESPACE = {namespace}
if {own}:
    kept = torch.zeros(100 << 18, device="cuda")
seen = machine.environment(())
print(json.dumps([seen.gpus[0].model_dump(), seen.warnings, nvidia.nvml().process_bytes(0, os.getpid()), os.getpid()]))
"""


def look(own: bool = True, host: bool = True) -> Any:
    """Read state and warnings in a process of its own, which uses the device; ``host``: not in a container."""
    here = str(Path("/proc/self/ns/pid").readlink())
    return python(STATE.format(own=own, namespace=repr(here if host else "another")))


@pytest.mark.parametrize("apart", [False, True])
def test_a_process_of_another_session_is_somebody_elses(apart: bool, card: Card) -> None:
    card(context_mib=100)
    command = [sys.executable, "-c", USING]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, start_new_session=apart) as other:
        assert other.stdout
        assert other.stdout.readline() == "ready\n"
        state, warnings, own, pid = look()
        others = f"cuda:0 is used by others too (process {other.pid})"
        assert (others in warnings) == apart
        assert others not in look(host=False)[1]
        other.kill()
    assert state["processes"] == [{"pid": other.pid, "used_bytes": 500 * MIB}, {"pid": pid, "used_bytes": 200 * MIB}]
    assert (state["used_bytes"], state["memory_bytes"]) == (700 * MIB, 24 << 30)
    assert own == [200 * MIB, ""]
    assert state["sm_clock_mhz"] == 2520
    assert look(own=False)[0]["clock_limits"] == ["idle"]


@pytest.mark.parametrize("told", ["zero", "hidden"])
def test_memory_of_single_processes_may_be_untold(told: str, card: Card) -> None:
    card(process_bytes=told)
    state, _, own, pid = look()
    assert state["processes"] == [{"pid": pid, "used_bytes": None}]
    assert own == [None, "the driver does not tell the memory of single processes here"]


def test_numbers_of_the_host_are_nobodys_in_a_container(card: Card) -> None:
    card(pid_offset=1 - os.getpid() - (1 << 23))  # no process has such a number
    _, warnings, own, _ = look(host=False)
    assert not [text for text in warnings if "used by others" in text]
    assert own[0] is None
    assert "numbers processes as the host does" in own[1]


def test_a_slice_has_its_own_memory(card: Card) -> None:
    card(mig=1, memory_mib=10240)
    state, warnings, own, _ = look()
    assert (state["mig"], state["memory_bytes"], own[0]) == (True, 10 << 30, 400 * MIB)
    assert state["utilization_percent"] is None
    assert any("is a slice of a device (MIG)" in text for text in warnings)


def test_an_exclusive_compute_mode_is_refused_at_once(card: Card, tmp_path: Path) -> None:
    card(compute_mode=3)
    words = ("optimize", f"{NETS}:mlp", "--measure-time", "0.2s", "--out", tmp_path / "run")
    done = fresh(*words, "--device", "cuda")
    assert done.returncode == 4
    assert "in the compute mode 'exclusive process'" in done.stderr
    assert "nvidia-smi -i 0000:01:00.0 -c DEFAULT" in done.stderr
    assert not (tmp_path / "run").exists()
    usable = json.loads(fresh("engines", "--device", "cuda", "--json").stdout)
    assert {row["usable"] for row in usable} == {"no"}


def test_clocks_that_fall_while_it_measures_are_told(card: Card, store: Path, tmp_path: Path) -> None:
    """A measurement looks at the clock after each block of calls; up to ten looks come before it."""
    control = card()
    control.write(slow_at=15)
    words = ("--device", "cuda", "--engine", "onnxruntime", "--no-references", "--measure-time", "0.25s")
    done = fresh("optimize", f"{NETS}:mlp", *words, "--store", store, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    warnings = record(tmp_path / "run")["environment"]["warnings"]
    assert "cuda:0 has its clocks limited by: power limit" in warnings
    assert "cuda:0 had clocks between 1500 and 2520 MHz while it worked" in warnings


@pytest.mark.parametrize(("visible", "buses"), [("1", [2]), ("1,0", [2, 1]), ("", []), ("0,-1,1", [1])])
def test_cuda_hides_and_renumbers_devices(
    visible: str, buses: list[int], card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = card(devices=2, context_mib=100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    told = """
from enginesmith.pipeline.system import machine
for index in range(torch.cuda.device_count()):
    torch.empty((index + 1) * 100 << 18, device=f"cuda:{index}")
print(json.dumps([[gpu.pci_bus_id, gpu.used_bytes] for gpu in machine.gpu_states()]))
"""
    used = [(200 + 100 * index) * MIB for index in range(len(buses))]
    assert python(told) == [[f"0000:{bus:02X}:00.0", size] for bus, size in zip(buses, used, strict=True)]
    assert control.used_bytes() == {}
