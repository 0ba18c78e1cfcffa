"""Describe the machine of a measurement, and what about it spoils numbers. Takes some milliseconds."""

import math
import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel

from enginesmith.pipeline.artifact import json_digest
from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.system import cpu, nvidia, software
from enginesmith.pipeline.system.cpu import text, vector_units
from enginesmith.pipeline.system.nvidia import GpuState
from enginesmith.pipeline.units import format_bytes

PACKAGES = (
    *("enginesmith", "numpy", "torch", "onnx", "onnxscript"),
    *("nvidia-modelopt", "transformers", "timm", "safetensors"),
)
_THREAD_VARIABLES = re.compile(r"(OMP|GOMP|MKL)_\w+|KMP_(AFFINITY|BLOCKTIME|HW_SUBSET|LIBRARY)")
"""Not all of KMP_…: libraries set some of those as they are imported."""
_OTHER_VARIABLES = re.compile(
    r"ATEN_CPU_CAPABILITY|(ONEDNN|DNNL)_\w+|LD_PRELOAD|(MALLOC|TCMALLOC)_\w+|GLIBC_TUNABLES"
    r"|PYTORCH_(CUDA_)?ALLOC_CONF|PYTORCH_NO_CUDA_MEMORY_CACHING"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|CUDA_LAUNCH_BLOCKING|CUDA_DEVICE_MAX_CONNECTIONS"
)
_NOT_SHOWN = "the kernel does not show it here"
_NO_LIMIT = "no limit is set"
_STOLEN_SHARE = 0.01
_LEFT_SHARE = 0.1
_FALLEN = 0.9
"""Clocks below this share of what they were have fallen."""
_BUSY_PERCENT = 5
_HELD_BACK_SECONDS = 0.1


class Environment(BaseModel, frozen=True):
    """The machine at one moment. What is None has its reason under its name in ``reasons``."""

    processor: str
    architecture: str
    vector_units: tuple[str, ...] = ()
    """Vector extensions of the processor, as the kernel names them."""
    cores: int
    usable_cores: int
    affinity: tuple[int, ...] = ()
    """Their numbers."""
    threads_per_core: int | None = None
    """Hardware threads, each of which counts as a core above."""
    numa_nodes: int | None = None
    virtual: bool | None = None
    quota_cores: float | None = None
    """Cores' worth of time that the container may use."""
    governor: str | None = None
    turbo: bool | None = None
    """Clocks may go above the nominal one."""
    frequency_mhz: float | None = None
    frequency_min_mhz: float | None = None
    frequency_max_mhz: float | None = None
    load_average: float
    """Threads that ran or wanted to in the last minute."""
    cpu_seconds: float | None = None
    """This and the next ones are counted since the start of the machine or container, over all cores; what happened
    during a measurement is the difference."""
    stolen_seconds: float | None = None
    """Time that the host of this virtual machine gave to others."""
    quota_periods: int | None = None
    throttled_periods: int | None = None
    """Periods in which the container had used up its quota and had to wait."""
    throttled_seconds: float | None = None
    thermal_throttles: int | None = None
    """Times that heat slowed the processor down."""
    memory_bytes: int
    available_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory_limit_left_bytes: int | None = None
    transparent_huge_pages: str | None = None
    system: str
    kernel: str
    python: str
    packages: dict[str, str]
    thread_variables: dict[str, str]
    """Environment variables that decide how threads work."""
    other_variables: dict[str, str] = {}
    """Those that decide which instructions are used, and how memory is allocated."""
    gpus: tuple[GpuState, ...] | None = None
    """In CUDA's order."""
    busy: bool = False
    """True where other programs use the cores, of which there is a warning then."""
    warnings: tuple[str, ...] = ()
    reasons: dict[str, str] = {}


def environment(packages: Iterable[str] = PACKAGES) -> Environment:
    """Look at the machine now."""
    gpus, no_gpus = _gpus()
    total_seconds, stolen_seconds = cpu.time() or (None, None)
    periods, throttled_periods, throttled_seconds = cpu.throttling() or (None, None, None)
    limit_bytes, left_bytes = cpu.memory_limit() or (None, None)
    least, most = cpu.frequency_limits_mhz()
    affinity = tuple(sorted(os.sched_getaffinity(0)))
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        system = platform.platform()
    machine = Environment(
        processor=cpu.model(),
        architecture=platform.machine(),
        vector_units=vector_units(),
        cores=os.cpu_count() or 1,
        usable_cores=len(affinity),
        affinity=affinity,
        threads_per_core=cpu.threads_per_core(),
        numa_nodes=cpu.numa_nodes(),
        virtual=cpu.is_virtual(),
        quota_cores=cpu.quota_cores(),
        governor=cpu.governor(),
        turbo=cpu.turbo(),
        frequency_mhz=cpu.frequency_mhz(),
        frequency_min_mhz=least,
        frequency_max_mhz=most,
        load_average=os.getloadavg()[0],
        cpu_seconds=total_seconds,
        stolen_seconds=stolen_seconds,
        quota_periods=periods,
        throttled_periods=throttled_periods,
        throttled_seconds=throttled_seconds,
        thermal_throttles=cpu.thermal_throttles(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available_memory_bytes=cpu.available_bytes(),
        memory_limit_bytes=limit_bytes,
        memory_limit_left_bytes=left_bytes,
        transparent_huge_pages=text(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        system=system,
        kernel=platform.release(),
        python=platform.python_version(),
        packages=software.versions(packages),
        thread_variables=_read_variables(_THREAD_VARIABLES),
        other_variables=_read_variables(_OTHER_VARIABLES),
        gpus=gpus,
    )
    others = cpu.count_others() if machine.load_average > machine.usable_cores / 2 else 0.0
    busy, warnings = _find_load(machine, others) is not None, tuple(warnings_of(machine, others))
    reasons = _explain_unknown(machine, no_gpus)
    return machine.model_copy(update={"busy": busy, "warnings": warnings, "reasons": reasons})


def _find_load(machine: Environment, others: float) -> float | None:
    """Find the load of other programs, of which ``others`` threads run; None where it disturbs nothing."""
    load = min(others, machine.load_average)
    return load if load > machine.usable_cores / 2 else None


def _read_variables(names: re.Pattern[str]) -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if names.fullmatch(name)}


def _explain_unknown(machine: Environment, no_gpus: str) -> dict[str, str]:
    """Explain, by field, why a value is not known."""
    unset = ["quota_cores", "memory_limit_bytes"]
    unset += ["quota_periods", "throttled_periods", "throttled_seconds"] if machine.quota_cores is None else []
    unset += ["memory_limit_left_bytes"] if machine.memory_limit_bytes is None else []
    reasons = {**dict.fromkeys(unset, _NO_LIMIT), "gpus": no_gpus}
    return {name: reasons.get(name, _NOT_SHOWN) for name, value in machine if value is None}


def fingerprint(machine: Environment) -> str:
    """Digest what decides how fast things run: measurements of machines that share it may be reused."""
    lasting = (
        *("processor", "architecture", "vector_units", "affinity", "threads_per_core", "quota_cores", "governor"),
        *("turbo", "memory_bytes", "transparent_huge_pages", "kernel", "python", "packages"),
        *("thread_variables", "other_variables"),
    )
    facts = {name: getattr(machine, name) for name in lasting}
    gpus = [
        (gpu.name, gpu.driver, gpu.memory_bytes, gpu.power_limit_watts, gpu.ecc, gpu.mig) for gpu in machine.gpus or ()
    ]
    return json_digest({**facts, "gpus": gpus})


def warnings_of(machine: Environment, others: float = math.inf) -> list[str]:
    """List conditions of this machine that spoil measurements; ``others`` counts other programs' running threads."""
    warnings = []
    if (load := _find_load(machine, others)) is not None:
        warnings.append(
            f"the machine is busy: other programs have a load of {load:.1f} on {machine.usable_cores} cores; "
            "times are longer than on an idle machine, most of all those of eager, which uses several threads"
        )
    if machine.quota_cores is not None and machine.quota_cores < machine.usable_cores:
        warnings.append(
            f"the container may use {machine.quota_cores:g} cores' worth of time and sees {machine.usable_cores}: "
            "it is throttled when all are busy; use --threads to stay below"
        )
    if (governor := machine.governor) not in (None, "performance"):
        warnings.append(f"the frequency governor is {governor!r}: clocks follow the load; 'performance' is steadier")
    warnings += _describe_stolen(machine)
    left = _share(machine.memory_limit_left_bytes, machine.memory_limit_bytes)
    if machine.memory_limit_left_bytes is not None and left < _LEFT_SHARE:
        warnings.append(f"of the container's memory limit only {format_bytes(machine.memory_limit_left_bytes)} is left")
    for index, gpu in enumerate(machine.gpus or ()):
        warnings += [f"cuda:{index} {what}" for what in _describe_limits(gpu)]
        if (gpu.utilization_percent or 0) > _BUSY_PERCENT:
            warnings.append(f"cuda:{index} is busy: kernels ran in {gpu.utilization_percent} % of the last moments")
        if gpu.mig:
            warnings.append(
                f"cuda:{index} is a slice of a device (MIG): what runs in the others shares power and clocks"
            )
    return warnings


def interference(before: Environment, after: Environment, during: Iterable[Sequence[GpuState]] = ()) -> tuple[str, ...]:
    """Describe what happened between two readings of the machine that spoils measurements made meanwhile.

    ``during`` are looks at the GPUs (:func:`gpu_states`) while they worked: clocks and their limits are those of the
    moment, and after a measurement they are those of rest.
    """
    events = []
    if throttled := _grown(before.throttled_periods, after.throttled_periods):
        periods = _grown(before.quota_periods, after.quota_periods)
        lost = _grown(before.throttled_seconds, after.throttled_seconds)
        events.append(
            f"the container had used up its quota in {throttled:.0f} of {periods:.0f} periods "
            f"and was throttled for {lost:.1f} s meanwhile"
        )
    events += _describe_stolen_since(before, after)
    if hot := _grown(before.thermal_throttles, after.thermal_throttles):
        events.append(f"heat slowed the processor down {hot:.0f} times meanwhile")
    if before.frequency_mhz and after.frequency_mhz and after.frequency_mhz < _FALLEN * before.frequency_mhz:
        events.append(f"the processor's clock fell from {before.frequency_mhz:.0f} to {after.frequency_mhz:.0f} MHz")
    if before.gpus and not after.gpus:
        events.append(f"the GPU no longer reports its state: {after.reasons.get('gpus', 'no reason is known')}")
    looks = list(during)
    for index, (first, last) in enumerate(zip(before.gpus or (), after.gpus or (), strict=False)):
        states = [look[index] for look in looks if index < len(look)]
        events += [f"cuda:{index} {what}" for what in _interference_on_gpu(first, last, states)]
    return tuple(events)


def _describe_stolen(machine: Environment) -> list[str]:
    share = _share(machine.stolen_seconds, machine.cpu_seconds)
    message = f"the host of this virtual machine has given {share:.0%} of its cores' time to others so far"
    return [message] if share > _STOLEN_SHARE else []


def _describe_stolen_since(before: Environment, after: Environment) -> list[str]:
    stolen = _grown(before.stolen_seconds, after.stolen_seconds)
    share = _share(stolen, _grown(before.cpu_seconds, after.cpu_seconds))
    message = f"the host of this virtual machine gave {share:.0%} of its cores' time to others meanwhile"
    return [message] if share > _STOLEN_SHARE else []


def add_interference(before: Environment, after: Environment, during: Iterable[Sequence[GpuState]] = ()) -> Environment:
    """Add to the machine before a measurement what disturbed that, as :func:`interference` finds it.

    The time that the host took meanwhile replaces what it had taken before.
    """
    replaced = _describe_stolen(before) if _describe_stolen_since(before, after) else []
    earlier = [text for text in before.warnings if text not in replaced]
    events = interference(before, after, during)
    return before.model_copy(update={"warnings": tuple(dict.fromkeys((*earlier, *events)))})


def gpu_states() -> tuple[GpuState, ...]:
    """Read the state of the GPUs, in CUDA's order; none where there are none, or nothing can be seen of them."""
    return _gpus()[0] or ()


def _interference_on_gpu(before: GpuState, after: GpuState, during: Sequence[GpuState]) -> list[str]:
    events = []
    if before.driver and not after.driver:
        events.append(f"no longer reports its state: {after.reasons.get('driver', 'no reason is known')}")
    for what, field in (("its power limit", "held_back_by_power_seconds"), ("heat", "held_back_by_heat_seconds")):
        seconds = _grown(getattr(before, field), getattr(after, field))
        if seconds > _HELD_BACK_SECONDS:
            events.append(f"was slowed down by {what} for {seconds:.1f} s meanwhile")
    looks = (before, *during, after)
    events += dict.fromkeys(text for look in looks for text in _describe_limits(look))
    working = [look for look in during if nvidia.IDLE not in (look.clock_limits or ())]
    clocks = [look.sm_clock_mhz for look in working if look.sm_clock_mhz]
    if clocks and min(clocks) < _FALLEN * max(clocks):
        events.append(f"had clocks between {min(clocks)} and {max(clocks)} MHz while it worked")
    return events


def _describe_limits(gpu: GpuState) -> Iterator[str]:
    """Describe limits that nobody asked for, and processes that are not of this program's group.

    In a container nothing is said of processes: the driver gives the host's numbers of them, those of ours, too
    (NVIDIA/nvidia-docker#1483).
    """
    limits = [limit for limit in gpu.clock_limits or () if limit not in (nvidia.IDLE, nvidia.CHOSEN)]
    if limits:
        yield f"has its clocks limited by: {', '.join(limits)}"
    listed = gpu.processes if nvidia.in_host_namespace() else ()
    if others := [str(process.pid) for process in listed or () if not _is_ours(process.pid)]:
        yield f"is used by others too (process {', '.join(others)})"


def _is_ours(pid: int) -> bool:
    try:
        return os.getpgid(pid) == os.getpgid(0)
    except OSError:  # it has ended, and disturbs nobody
        return True


def _grown(before: float | None, after: float | None) -> float:
    return max(0.0, after - before) if before is not None and after is not None else 0.0


def _share(part: float | None, whole: float | None) -> float:
    return part / whole if part is not None and whole else 0.0


def _gpus() -> tuple[tuple[GpuState, ...] | None, str]:
    """List all GPUs that CUDA shows, or None and why. Where NVML says nothing of one, CUDA's facts are left."""
    states = []
    for index, device in enumerate(nvidia.driver().devices):
        try:
            states.append(nvidia.nvml().state(index))
        except MissingCapability as missing:
            names = set(GpuState.model_fields) - {"name", "compute_capability", "reasons"}
            capability = "{}.{}".format(*device.compute_capability)
            reasons = dict.fromkeys(sorted(names), missing.message)
            states.append(GpuState(name=device.name, compute_capability=capability, reasons=reasons))
    return (tuple(states), "") if states else (None, nvidia.driver().reason)
