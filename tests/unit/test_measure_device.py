"""Facts of the machine."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.execution.local import Gpus, LocalExecutor
from enginesmith.pipeline.measure.device_rates import _describe
from enginesmith.pipeline.measure.memory.limits import _read_free
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import cpu
from enginesmith.pipeline.system import machine as device
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.machine import Environment, environment, fingerprint, interference, warnings_of
from enginesmith.pipeline.system.nvidia import CudaDevice, Driver, GpuProcess, GpuState
from enginesmith.pipeline.tasks.measure import _within_free

QUIET = {
    "load_average": 0.1,
    "usable_cores": 8,
    "quota_cores": None,
    "governor": "performance",
    "stolen_seconds": 0.0,
    "cpu_seconds": 100.0,
    "memory_limit_bytes": None,
    "memory_limit_left_bytes": None,
    "gpus": None,
}
FOREIGN, ENDED = 1, (1 << 22) + 1
"""Processes: one that is not of this program's group, and a number that the kernel gives to none here."""
GPU = GpuState(name="NVIDIA H100", compute_capability="9.0", clock_limits=("idle",), processes=(), sm_clock_mhz=345)


def busy(**change: Any) -> GpuState:
    return GPU.model_copy(update=change)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.nvidia, "in_host_namespace", lambda: True)


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
        ({"stolen_seconds": 5.0}, "given 5% of its cores' time to others"),
        ({"memory_limit_bytes": 1 << 30, "memory_limit_left_bytes": 64 << 20}, "only 64 MiB is left"),
        ({"gpus": (busy(clock_limits=("idle", "power limit")),)}, "limited by: power limit"),
        ({"gpus": (GPU, busy(utilization_percent=90))}, "cuda:1 is busy"),
        ({"gpus": (busy(processes=(GpuProcess(pid=FOREIGN, used_bytes=None),)),)}, f"(process {FOREIGN})"),
        ({"gpus": (busy(mig=True),)}, "MIG"),
    ],
)
def test_warns_of_what_spoils_numbers(here: Environment, change: dict[str, Any], word: str) -> None:
    assert not warnings_of(here.model_copy(update={**QUIET, "gpus": (GPU,)}))
    assert word in warnings_of(here.model_copy(update={**QUIET, **change}))[0]


def test_time_that_the_host_took_is_told_once(here: Environment) -> None:
    before = here.model_copy(update={**QUIET, "stolen_seconds": 5.0})
    machine = before.model_copy(update={"warnings": ("the machine is busy", *warnings_of(before))})
    after = before.model_copy(update={"stolen_seconds": 15.0, "cpu_seconds": 200.0})
    (event,) = interference(before, after)
    assert device.add_interference(machine, after).warnings == ("the machine is busy", event)
    assert device.add_interference(machine, machine).warnings == machine.warnings


def test_fingerprint_holds_what_lasts(here: Environment) -> None:
    passing = {"load_average": 9.0, "frequency_mhz": 1.0, "cpu_seconds": 1.0, "memory_limit_left_bytes": 5}
    assert fingerprint(here) == fingerprint(here.model_copy(update=passing))
    on_gpu = here.model_copy(update={"gpus": (GPU,)})
    assert fingerprint(on_gpu) == fingerprint(here.model_copy(update={"gpus": (busy(sm_clock_mhz=1980),)}))
    assert fingerprint(on_gpu) != fingerprint(here.model_copy(update={"gpus": (busy(power_limit_watts=300.0),)}))
    changes = {"packages": {}, "vector_units": ("sse",), "affinity": (98, 99), "transparent_huge_pages": "[always]"}
    for name, value in changes.items():
        assert fingerprint(here) != fingerprint(here.model_copy(update={name: value}))


@pytest.mark.parametrize(
    "variable",
    [
        *("OMP_PROC_BIND", "KMP_AFFINITY", "MKL_DYNAMIC", "LD_PRELOAD", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"),
        *("MALLOC_ARENA_MAX", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NVIDIA_TF32_OVERRIDE"),
    ],
)
def test_the_fingerprint_has_variables_that_change_speed_or_memory(
    variable: str, here: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")  # libraries set it as they are imported
    assert fingerprint(environment()) == fingerprint(here)
    monkeypatch.setenv(variable, "1")
    assert fingerprint(environment()) != fingerprint(here)


def test_own_load_does_not_make_the_machine_busy(here: Environment) -> None:
    loaded = here.model_copy(update={**QUIET, "gpus": (GPU,), "load_average": 5.0, "usable_cores": 8})
    assert not warnings_of(loaded, others=3.5)
    assert warnings_of(loaded, others=4.5)[0].startswith("the machine is busy: other programs have a load of 4.5 on 8")


@pytest.mark.parametrize(("load", "busy"), [(0.0, False), (1e3, True)])
def test_a_busy_machine_is_told_in_a_field(load: float, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(device.cpu, "count_others", lambda: load)
    found = environment()
    assert found.busy is busy
    assert any("the machine is busy" in text for text in found.warnings) is busy


def test_others_are_no_processes_of_this_group_nor_their_descendants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, group, parent in ((1, os.getpgid(0), 0), (2, 77, 1), (3, 77, 0)):
        (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True)
        for folder in (tmp_path / str(pid), tmp_path / f"{pid}/task/{pid}"):
            (folder / "stat").write_text(f"{pid} (a) b) R {parent} {group} 0")
    (tmp_path / "loadavg").write_text("9.00 8.00 7.00 5/300 4")
    monkeypatch.setattr(cpu, "_PROCESSES", tmp_path)
    monkeypatch.setattr(cpu, "_READING_SECONDS", 0.0)
    assert cpu.count_others() == 3  # five threads run, two of them are this program's
    glob = Path.glob

    def glob_after_the_end(folder: Path, pattern: str) -> Iterator[Path]:
        if folder == tmp_path / "2/task":
            raise FileNotFoundError(folder)
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", glob_after_the_end)
    assert cpu.count_others() == 4, "one of the two processes has ended meanwhile"


def test_threads_of_this_program_that_wait_for_a_core_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    load = 10.0 * len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    for others in (0.0, load):
        monkeypatch.setattr(cpu, "count_others", lambda others=others: others)
        busy = [text for text in environment(()).warnings if text.startswith("the machine is busy")]
        assert bool(busy) == bool(others)


def test_nothing_spoils_a_quiet_measurement(here: Environment) -> None:
    before = here.model_copy(update={**QUIET, "gpus": (GPU,), "frequency_mhz": 3000.0})
    after = before.model_copy(update={"cpu_seconds": 180.0, "frequency_mhz": 2900.0})
    working = busy(clock_limits=(), sm_clock_mhz=1980)
    assert interference(before, after, [(working,), (working,)]) == ()
    assert interference(before, after, [(GPU,), (working,)]) == ()  # rest is slow, and no work


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        (
            {"quota_periods": 100, "throttled_periods": 5, "throttled_seconds": 1.0},
            {"quota_periods": 150, "throttled_periods": 25, "throttled_seconds": 3.5},
            "in 20 of 50 periods and was throttled for 2.5 s",
        ),
        ({}, {"cpu_seconds": 200.0, "stolen_seconds": 4.0}, "gave 4% of its cores' time"),
        ({"thermal_throttles": 3}, {"thermal_throttles": 10}, "heat slowed the processor down 7 times"),
        ({"frequency_mhz": 3000.0}, {"frequency_mhz": 2000.0}, "fell from 3000 to 2000 MHz"),
        ({"gpus": (busy(held_back_by_heat_seconds=1.0),)}, {"gpus": (busy(held_back_by_heat_seconds=4.0),)}, "for 3.0"),
        ({"gpus": (GPU,)}, {"gpus": (busy(processes=(GpuProcess(pid=FOREIGN, used_bytes=1),)),)}, "used by others"),
    ],
)
def test_what_happened_meanwhile(here: Environment, before: Any, after: Any, word: str) -> None:
    first = here.model_copy(update={**QUIET, **before})
    found = interference(first, first.model_copy(update=after))
    assert len(found) == 1
    assert word in found[0]


def test_what_gpus_did_while_they_worked(here: Environment) -> None:
    rest = here.model_copy(update={**QUIET, "gpus": (GPU, GPU)})
    fast, slow = busy(clock_limits=(), sm_clock_mhz=1980), busy(clock_limits=("power limit",), sm_clock_mhz=1500)
    assert interference(rest, rest, [(GPU, fast), (GPU, slow), (GPU, slow)]) == (
        "cuda:1 has its clocks limited by: power limit",
        "cuda:1 had clocks between 1500 and 1980 MHz while it worked",
    )


def test_our_own_processes_and_those_of_an_unknown_namespace_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device._is_ours(device.os.getpid())
    assert device._is_ours(ENDED)
    used = busy(processes=(GpuProcess(pid=FOREIGN, used_bytes=1),))
    for of_host in (True, False):
        monkeypatch.setattr(device.nvidia, "in_host_namespace", lambda of_host=of_host: of_host)
        assert ("is used by others too (process 1)" in list(device._describe_limits(used))) == of_host


def test_gpus_without_nvml_are_named_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingCapability("there is no NVML")

    known = CudaDevice(name="NVIDIA L4", compute_capability=(8, 9))
    monkeypatch.setattr(device.nvidia, "driver", lambda: Driver(version=13000, devices=(known,)))
    monkeypatch.setattr(device.nvidia, "nvml", missing)
    (gpu,) = environment().gpus or ()
    assert (gpu.name, gpu.compute_capability, gpu.power_watts) == ("NVIDIA L4", "8.9", None)
    assert gpu.reasons["power_watts"] == "there is no NVML"
    assert set(gpu.reasons) == {name for name, value in gpu if value is None}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    monkeypatch.setattr(cpu, "_own_group", lambda controller: "/box/inner")
    return tmp_path


def test_no_limits(groups: Path) -> None:
    assert (cpu.quota_cores(), cpu.memory_limit(), cpu.throttling()) == (None, None, None)


def test_limits_of_both_cgroup_versions(groups: Path) -> None:
    write(groups / "box/inner/cpu.max", "max 100000\n")
    write(groups / "box/cpu.max", "150000 100000\n")
    write(groups / "memory.max", "max\n")
    write(groups / "box/memory.max", "1073741824\n")
    assert cpu.quota_cores() == 1.5
    assert cpu.memory_limit() == (1 << 30, None)
    write(groups / "box/memory.current", "1000000000\n")
    write(groups / "box/memory.stat", "anon 1\ninactive_file 300000000\nactive_file 200000000\n")
    assert cpu.memory_limit() == (1 << 30, (1 << 30) - 500_000_000)
    write(groups / "cpu/cpu.cfs_quota_us", "-1")
    write(groups / "cpu/cpu.cfs_period_us", "100000")
    write(groups / "cpu/box/cpu.cfs_quota_us", "50000")
    write(groups / "cpu/box/cpu.cfs_period_us", "100000")
    write(groups / "memory/memory.limit_in_bytes", str((1 << 63) - 4096))
    assert cpu.quota_cores() == 0.5
    assert cpu.memory_limit() == (1 << 30, (1 << 30) - 500_000_000)


@pytest.mark.parametrize(("limit", "free"), [(None, 5 << 30), (100 << 20, 100 << 20), (9 << 30, 5 << 30)])
def test_a_container_may_take_what_its_limit_leaves(
    limit: int | None, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sweep, beside other steps, where memory ran out, and where products are timed."""
    monkeypatch.setattr(cpu, "available_bytes", lambda: 5 << 30)
    monkeypatch.setattr(cpu, "memory_limit", lambda: limit and cpu.MemoryLimit(12 << 30, limit))
    assert _within_free(None, Device()) == int(0.8 * free)
    assert LocalExecutor(Store(tmp_path), 2, Gpus(0))._has_memory() == (free >= 2 << 30)
    assert (_read_free(Device()), _describe(Device())[2]) == (free, free)


def test_throttling_of_both_cgroup_versions(groups: Path) -> None:
    write(groups / "cpu.stat", "usage_usec 5\n")
    write(groups / "box/cpu.stat", "usage_usec 5\nnr_periods 40\nnr_throttled 4\nthrottled_usec 250000\n")
    assert cpu.throttling() == (40, 4, 0.25)
    write(groups / "cpu/box/cpu.stat", "nr_periods 9\nnr_throttled 8\nthrottled_time 7000000000\n")
    assert cpu.throttling() == (9, 8, 7.0)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of four cores, of which this process may use the last two."""
    monkeypatch.setattr(cpu, "_CPU_FOLDER", tmp_path / "cpu")
    monkeypatch.setattr(cpu, "_NODE_FOLDER", tmp_path / "node")
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda pid: {2, 3})
    return tmp_path


def test_a_machine_that_shows_nothing(machine: Path) -> None:
    told = (cpu.governor(), cpu.turbo(), cpu.threads_per_core(), cpu.numa_nodes())
    assert told == (None, None, None, None)
    told = (cpu.frequency_mhz(), cpu.thermal_throttles(), cpu.time(), cpu.is_virtual())
    assert told == (None, None, None, None)
    assert cpu.frequency_limits_mhz() == (None, None)


def test_the_processors_name(machine: Path) -> None:
    write(machine / "cpuinfo", "processor : 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd40\n")
    assert cpu.model() == "implementer 0x41, part 0xd40"
    write(machine / "cpuinfo", "processor : 0\nmodel name\t: AMD EPYC\n")
    assert cpu.model() == "AMD EPYC"


def test_clocks_of_the_cores_that_may_be_used(machine: Path) -> None:
    for core, governor in enumerate(("schedutil", "schedutil", "performance", "powersave")):
        write(machine / f"cpu/cpu{core}/cpufreq/scaling_governor", f"{governor}\n")
    for name, kilohertz in (("cur", 2400000), ("min", 800000), ("max", 3600000)):
        write(machine / f"cpu/cpu2/cpufreq/scaling_{name}_freq", f"{kilohertz}\n")
    assert cpu.governor() == "performance, powersave"
    assert cpu.frequency_mhz() == 2400.0
    assert cpu.frequency_limits_mhz() == (800.0, 3600.0)


def test_turbo_of_intel_and_of_others(machine: Path) -> None:
    write(machine / "cpu/cpufreq/boost", "0\n")
    assert cpu.turbo() is False
    write(machine / "cpu/intel_pstate/no_turbo", "0\n")
    assert cpu.turbo() is True


def test_topology_and_heat(machine: Path) -> None:
    write(machine / "cpu/cpu2/topology/thread_siblings_list", "0,2-3\n")
    for node in ("node0", "node1"):
        write(machine / "node" / node / "cpulist", "0\n")
    for core in range(4):
        write(machine / f"cpu/cpu{core}/thermal_throttle/core_throttle_count", f"{core}\n")
    assert (cpu.threads_per_core(), cpu.numa_nodes(), cpu.thermal_throttles()) == (3, 2, 6)


def test_time_is_the_kernels(machine: Path) -> None:
    second = device.os.sysconf("SC_CLK_TCK")
    ticks = " ".join(str(second * part) for part in (1, 2, 3, 4, 5, 6, 7, 8, 1, 2))
    write(machine / "stat", f"cpu  {ticks}\ncpu0 {ticks}\n")
    assert cpu.time() == (36.0, 8.0)
    write(machine / "cpuinfo", "processor : 0\nflags : fpu hypervisor\n")
    assert cpu.is_virtual()
