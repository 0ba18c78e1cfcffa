"""Facts of the machine."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from enginesmith.pipeline.measure import device
from enginesmith.pipeline.measure.device import Environment, environment, fingerprint, warnings_of


@pytest.fixture(scope="module")
def here() -> Environment:
    return environment()


def test_says_what_it_knows_and_why_not(here: Environment) -> None:
    assert here.processor
    assert here.vector_units
    assert 0 < here.usable_cores <= here.cores
    assert here.memory_bytes > 1 << 28
    assert here.packages["numpy"]
    missing = {name for name, value in here if value is None}
    assert missing == set(here.reasons)
    assert all(here.reasons.values())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"load_average": 5.0, "usable_cores": 8}, "busy"),
        ({"quota_cores": 1.5, "usable_cores": 4}, "throttled"),
        ({"governor": "powersave"}, "governor"),
    ],
)
def test_warns_of_what_spoils_numbers(here: Environment, change: dict[str, Any], word: str) -> None:
    quiet = {"load_average": 0.1, "usable_cores": 8, "quota_cores": None, "governor": "performance"}
    assert not warnings_of(here.model_copy(update=quiet))
    assert word in warnings_of(here.model_copy(update={**quiet, **change}))[0]


def test_fingerprint_holds_what_lasts(here: Environment) -> None:
    assert fingerprint(here) == fingerprint(here.model_copy(update={"load_average": 9.0, "frequency_mhz": 1.0}))
    assert fingerprint(here) != fingerprint(here.model_copy(update={"packages": {}}))
    assert fingerprint(here) != fingerprint(here.model_copy(update={"usable_cores": 99}))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_limits_of_both_cgroup_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    monkeypatch.setattr(device, "_own_group", lambda controller: "/box/inner")
    assert device._quota_cores() is None
    assert device._memory_limit_bytes() is None
    write(tmp_path / "box/inner/cpu.max", "max 100000\n")
    write(tmp_path / "box/cpu.max", "150000 100000\n")
    write(tmp_path / "memory.max", "max\n")
    write(tmp_path / "box/memory.max", "1073741824\n")
    assert device._quota_cores() == 1.5
    assert device._memory_limit_bytes() == 1 << 30
    write(tmp_path / "cpu/cpu.cfs_quota_us", "-1")
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000")
    write(tmp_path / "cpu/box/cpu.cfs_quota_us", "50000")
    write(tmp_path / "cpu/box/cpu.cfs_period_us", "100000")
    write(tmp_path / "memory/memory.limit_in_bytes", str((1 << 63) - 4096))
    assert device._quota_cores() == 0.5
    assert device._memory_limit_bytes() == 1 << 30


def test_reads_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NVIDIA A100-SXM4-40GB, 580.65, 40960, 8.0, 31, [N/A], 1410\n"
    monkeypatch.setattr(device.shutil, "which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr(
        device.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout=text, stderr="")
    )
    gpus, reason = device._gpus()
    assert gpus
    assert not reason
    assert (gpus[0].name, gpus[0].driver, gpus[0].memory_bytes) == ("NVIDIA A100-SXM4-40GB", "580.65", 40960 << 20)
    assert gpus[0].power_watts is None


def test_nvidia_smi_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(device.shutil, "which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr(device.subprocess, "run", fail)
    assert device._gpus()[0] is None
    assert "failed" in device._gpus()[1]
