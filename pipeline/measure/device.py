"""What a measurement was made on: facts of the machine, and what about it spoils numbers. Takes some milliseconds."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.artifact import json_digest
from enginesmith.pipeline.engines.processor import vector_units

PACKAGES = (
    *("enginesmith", "numpy", "torch", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu"),
    *("tensorrt", "tensorrt-rtx", "nvidia-modelopt", "transformers", "timm", "safetensors"),
)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_CPU_FOLDER = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")
_QUERY = ("name", "driver_version", "memory.total", "compute_cap", "temperature.gpu", "power.draw", "clocks.sm")
_SMI_SECONDS = 10.0
_UNLIMITED_BYTES = 1 << 60
_MIB = 1 << 20


class Gpu(BaseModel):
    """One GPU as nvidia-smi describes it."""

    model_config = ConfigDict(frozen=True)

    name: str
    driver: str
    memory_bytes: int | None
    compute_capability: str
    temperature_celsius: float | None
    power_watts: float | None
    sm_clock_mhz: float | None


class Environment(BaseModel):
    """The machine at one moment. What is None has its reason under its name in ``reasons``."""

    model_config = ConfigDict(frozen=True)

    processor: str
    architecture: str
    vector_units: tuple[str, ...] = ()
    """Vector extensions of the processor, as the kernel names them."""
    cores: int
    usable_cores: int
    """Cores that this process may run on (its affinity)."""
    quota_cores: float | None = None
    """Cores' worth of time that the container may use."""
    governor: str | None = None
    frequency_mhz: float | None = None
    load_average: float
    """Of the last minute: threads that ran or wanted to."""
    memory_bytes: int
    available_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    transparent_huge_pages: str | None = None
    system: str
    kernel: str
    python: str
    packages: dict[str, str]
    thread_variables: dict[str, str]
    gpus: tuple[Gpu, ...] | None = None
    warnings: tuple[str, ...] = ()
    reasons: dict[str, str] = {}


def environment() -> Environment:
    """Look at the machine now."""
    gpus, no_gpus = _gpus()
    memory = _fields(Path("/proc/meminfo"))
    reasons = {"gpus": no_gpus, "quota_cores": "no limit is set", "memory_limit_bytes": "no limit is set"}
    found = Environment(
        processor=_fields(Path("/proc/cpuinfo")).get("model name") or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        vector_units=vector_units(),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        quota_cores=_quota_cores(),
        governor=_line(_CPU_FOLDER / "cpu0/cpufreq/scaling_governor"),
        frequency_mhz=_frequency_mhz(),
        load_average=os.getloadavg()[0],
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available_memory_bytes=_kibibytes(memory.get("MemAvailable")),
        memory_limit_bytes=_memory_limit_bytes(),
        transparent_huge_pages=_line(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        system=_system(),
        kernel=platform.release(),
        python=platform.python_version(),
        packages=_versions(PACKAGES),
        thread_variables={name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
        gpus=gpus,
    )
    empty = [name for name, value in found if value is None]
    why = {name: reasons.get(name, "the kernel does not show it here") for name in empty}
    return found.model_copy(update={"warnings": tuple(warnings_of(found)), "reasons": why})


def fingerprint(machine: Environment) -> str:
    """A digest of what decides how fast things run: measurements of machines that share it may be reused."""
    lasting = ("processor", "architecture", "usable_cores", "quota_cores", "governor", "memory_bytes", "kernel")
    facts = {name: getattr(machine, name) for name in (*lasting, "python", "packages", "thread_variables")}
    gpus = [(gpu.name, gpu.driver, gpu.memory_bytes) for gpu in machine.gpus or ()]
    return json_digest({**facts, "gpus": gpus})


def warnings_of(machine: Environment) -> list[str]:
    """What about this machine spoils measurements."""
    found = []
    if machine.load_average > machine.usable_cores / 2:
        found.append(
            f"the machine is busy: load {machine.load_average:.1f} on {machine.usable_cores} cores; "
            "times are longer than they need be, and those of multi-threaded eager most of all"
        )
    if machine.quota_cores is not None and machine.quota_cores < machine.usable_cores:
        found.append(
            f"the container may use {machine.quota_cores:g} cores' worth of time and sees {machine.usable_cores}: "
            "it is throttled when all are busy; use --threads to stay below"
        )
    if machine.governor not in (None, "performance"):
        found.append(
            f"the frequency governor is {machine.governor!r}: clocks follow the load; 'performance' is steadier"
        )
    return found


def _fields(path: Path) -> dict[str, str]:
    """``name : value`` lines; the first of each name."""
    found: dict[str, str] = {}
    for line in (_text(path) or "").splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _line(path: Path) -> str | None:
    text = _text(path)
    return text.strip() if text else None


def _kibibytes(text: str | None) -> int | None:
    return int(text.split()[0]) * 1024 if text else None


def _frequency_mhz() -> float | None:
    """The kernel's figure for the first core; where it shows none, what /proc/cpuinfo says."""
    kilohertz = _line(_CPU_FOLDER / "cpu0/cpufreq/scaling_cur_freq")
    if kilohertz:
        return int(kilohertz) / 1e3
    megahertz = _fields(Path("/proc/cpuinfo")).get("cpu MHz")
    return float(megahertz) if megahertz else None


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _own_group(controller: str) -> str:
    """The path of this process's control group; ``controller`` is empty for version 2."""
    for line in (_text(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == controller or controller in controllers.split(","):
            return path
    return "/"


def _in_groups(controller: str, file: str) -> list[str]:
    """A control file's content in this process's group and those above it (cgroups(7)); both versions are mounted."""
    root = _CGROUP / controller if controller else _CGROUP
    group = Path(_own_group(controller).lstrip("/"))
    folders = [root / group, *(root / parent for parent in group.parents)]
    return [line for folder in folders if (line := _line(folder / file))]


def _quota_cores() -> float | None:
    """The least of all limits: ``cpu.max`` holds ``quota period``; version 1 has a file for each, −1 for none."""
    limits = [int(quota) / int(period) for quota, period in map(str.split, _in_groups("", "cpu.max")) if quota != "max"]
    quotas, periods = (_in_groups("cpu", f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    limits += [int(quota) / int(period) for quota, period in zip(quotas, periods, strict=False) if int(quota) > 0]
    return min(limits, default=None)


def _memory_limit_bytes() -> int | None:
    limits = [*_in_groups("", "memory.max"), *_in_groups("memory", "memory.limit_in_bytes")]
    return min((int(limit) for limit in limits if limit != "max" and int(limit) < _UNLIMITED_BYTES), default=None)


def _gpus() -> tuple[tuple[Gpu, ...] | None, str]:
    """GPUs by nvidia-smi, or None and why."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "there is no nvidia-smi: no NVIDIA driver is installed, or the container does not have it"
    query = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"nvidia-smi failed: {error}"
    return tuple(_gpu(line) for line in text.splitlines() if line.strip()), ""


def _gpu(line: str) -> Gpu:
    name, driver, memory, capability, temperature, power, clock = (value.strip() for value in line.split(","))
    mebibytes = _number(memory)
    return Gpu(
        name=name,
        driver=driver,
        memory_bytes=None if mebibytes is None else int(mebibytes) * _MIB,
        compute_capability=capability,
        temperature_celsius=_number(temperature),
        power_watts=_number(power),
        sm_clock_mhz=_number(clock),
    )


def _number(text: str) -> float | None:
    """A figure of nvidia-smi, which writes ``[N/A]`` for what it cannot tell."""
    try:
        return float(text)
    except ValueError:
        return None
