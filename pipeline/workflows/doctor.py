"""What this machine is and can do, whether its software fits together, and the command for what does not."""

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.engines import engine_class, environment
from enginesmith.pipeline.engines.tensorrt.versions import capabilities
from enginesmith.pipeline.errors import install_command
from enginesmith.pipeline.recipe.options import ExportOptions
from enginesmith.pipeline.store.address import default_address
from enginesmith.pipeline.system import stack
from enginesmith.pipeline.system.machine import Environment
from enginesmith.pipeline.system.nvml import GpuState
from enginesmith.pipeline.system.software import Numbers, Requirement, meets, numbers
from enginesmith.pipeline.system.stack import TENSORRTS, Formats, Stack
from enginesmith.pipeline.units import format_bytes
from enginesmith.pipeline.workflows import inspect

# Whether driver, CUDA, cuDNN, torch, ONNX Runtime and TensorRT fit each other and the GPUs, and what to do if not.

_OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""For all releases of a major version, by minor version compatibility: the release notes of the CUDA Toolkit, table of
minimum driver versions (Linux)."""
_OLDEST_DRIVER_OF_TENSORRT = {12: "535", 13: "580.65.06"}
"""The prerequisites in TensorRT's installation guide."""
_OLDEST_GPU_OF_TENSORRT = (7, 5)
_TENSORRT_OF_ONNXRUNTIME = 10
"""libnvinfer's major version that the TensorRT provider of onnxruntime-gpu is linked against (up to 1.31)."""
_CUDNN_OF_ONNXRUNTIME = 9
_COMMON_BRANCH = 580
"""The driver's branch that all of these run on, and GPUs from Maxwell on."""
_DRIVER_FIX = "on the host (Ubuntu): sudo apt-get install nvidia-driver-{branch} && sudo reboot"
_NO_GPU = "there is no NVIDIA GPU here"


class Check(BaseModel):
    """One thing that has to fit."""

    model_config = ConfigDict(frozen=True)

    name: str
    found: str
    needed: str
    ok: bool | None
    """None where it cannot be known, or matters to nothing here; ``note`` says which."""
    fix: str = ""
    """The command that makes it fit, where it does not."""
    note: str = ""


def checks(stack: Stack, opset: int, ir: int) -> list[Check]:
    """All of them that what is installed gives reason for; models are exported with that opset and IR version."""
    return [
        *_drivers(stack),
        *_devices(stack),
        *_torch(stack),
        *_onnxruntime(stack),
        *_formats(stack, Formats(ir=ir, opset=opset)),
        *_tensorrt(stack),
        *_glibc(stack),
    ]


def _check(name: str, found: str, needed: str, ok: bool | None, fix: str = "", note: str = "") -> Check:
    """With a fix only where something does not fit."""
    return Check(name=name, found=found, needed=needed, ok=ok, fix=fix if ok is False else "", note=note)


def _drivers(stack: Stack) -> Iterator[Check]:
    """One for each package that is built for CUDA."""
    consumers = [("torch", stack.torch_cuda), ("onnxruntime-gpu", stack.onnxruntime_cuda)]
    consumers += [(name, str(max(found))) for name, found in stack.variants.items()]
    for name, built_for in consumers:
        if built_for and numbers(built_for):
            yield _driver(stack, name, built_for)


def _driver(stack: Stack, package: str, built_for: str) -> Check:
    wanted = numbers(built_for)
    stricter = _OLDEST_DRIVER_OF_TENSORRT if package in TENSORRTS else {}
    least = stricter.get(wanted[0]) or _OLDEST_DRIVER.get(wanted[0])
    name, needed = f"driver for {package}", f"{least} or newer, for CUDA {wanted[0]}" if least else f"CUDA {wanted[0]}"
    fix = _DRIVER_FIX.format(branch=max(_COMMON_BRANCH, numbers(least)[0] if least else 0))
    if stack.driver_cuda is None:
        note = "" if stack.gpu_without_driver else _NO_GPU
        return _check(name, stack.driver_reason, needed, False if stack.gpu_without_driver else None, fix, note)
    told = "{}.{}".format(*stack.driver_cuda)
    found = f"{stack.driver}, for CUDA {told}" if stack.driver else f"one for CUDA {told}"
    if package in TENSORRTS and wanted[0] > 12:
        fix += f"; or: pip uninstall -y {' '.join(stack.variants[package][wanted[0]])} && pip install {package}-cu12"
    too_old = stack.driver and stricter and least and numbers(stack.driver) < numbers(least)
    fits = stack.driver_cuda[0] >= wanted[0] and not too_old
    newer = fits and stack.driver_cuda < wanted[:2]
    note = f"it does not know CUDA {built_for}: what is compiled when it runs (PTX) may be refused" if newer else ""
    return _check(name, found, needed, fits, fix, note)


def _devices(stack: Stack) -> Iterator[Check]:
    for index, gpu in enumerate(stack.gpus):
        if gpu.compute_mode is not None:
            needed = "default: every session has a process of its own, and several are open at once"
            fix = f"sudo nvidia-smi -i {gpu.pci_bus_id} -c DEFAULT"
            yield _check(f"compute mode of cuda:{index}", gpu.compute_mode, needed, gpu.compute_mode == "default", fix)
        if gpu.driver is None:
            needed = "NVML, for clocks, temperature, power and who else is on the device"
            why = gpu.reasons.get("driver", "")
            fix = "start the container with --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            yield _check(f"state of cuda:{index}", "not shown", needed, False, fix, why)


def _torch(stack: Stack) -> Iterator[Check]:
    found = stack.versions.get("torch")
    if found and stack.torch_cuda is None:
        wanted = bool(stack.gpus) or stack.gpu_without_driver
        text, needed = f"{found}, built without CUDA", "a build with CUDA, to run on a GPU"
        fix = "pip uninstall -y torch && pip install torch"
        yield _check("torch", text, needed, False if wanted else None, fix, "" if wanted else _NO_GPU)
    if stack.torch_cuda and (pinned := stack.requirements.get("torch")):
        yield _packages(stack, "CUDA libraries of torch", [one for one in pinned if not one.extra])
    for index, gpu in enumerate(stack.gpus if stack.torch_targets else ()):
        fits = _has_kernels(numbers(gpu.compute_capability), stack.torch_targets)
        needed = f"{gpu.name}: compute capability {gpu.compute_capability}"
        fix = "pip install --upgrade torch; for an old GPU: a torch that is built for an older CUDA"
        yield _check(f"torch's kernels for cuda:{index}", ", ".join(stack.torch_targets), needed, fits, fix)


def _has_kernels(capability: Numbers, targets: tuple[str, ...]) -> bool:
    """Kernels run from theirs on within a major version, PTX on anything newer (CUDA's programming guide)."""
    for target in targets:
        kind, _, digits = target.partition("_")
        if not digits.isdecimal():  # sm_90a and the like run on exactly that one
            continue
        theirs = (int(digits[:-1]), int(digits[-1]))
        if theirs <= capability and (kind == "compute" or theirs[0] == capability[0]):
            return True
    return any(re.fullmatch(rf"sm_{capability[0]}{capability[1]}[af]", target) for target in targets)


def _onnxruntime(stack: Stack) -> Iterator[Check]:
    names = [name for name in ("onnxruntime", "onnxruntime-gpu") if name in stack.versions]
    if len(names) > 1:
        fix = f"pip uninstall -y {' '.join(names)} && pip install {names[1] if stack.gpus else names[0]}"
        needed = "one of them: they overwrite each other"
        yield _check("packages of ONNX Runtime", " and ".join(names), needed, False, fix)
    if "onnxruntime-gpu" not in names:
        return
    yield from _libraries_of_onnxruntime(stack)
    tensorrt = stack.versions.get("tensorrt")
    if tensorrt and numbers(tensorrt)[0] != _TENSORRT_OF_ONNXRUNTIME:
        needed, theirs = f"libnvinfer {_TENSORRT_OF_ONNXRUNTIME}", f"'tensorrt=={_TENSORRT_OF_ONNXRUNTIME}.*'"
        note = f"not used here, where TensorRT builds engines itself; other programs: pip install {theirs}"
        yield _check("TensorRT provider of onnxruntime-gpu", f"tensorrt {tensorrt}", needed, None, note=note)


def _libraries_of_onnxruntime(stack: Stack) -> Iterator[Check]:
    """Its metadata names them under two extras; torch brings the same ones where its CUDA is of the same version."""
    fix = f"pip install 'onnxruntime-gpu[cuda,cudnn]=={stack.versions['onnxruntime-gpu']}'"
    asked = [one for one in stack.requirements.get("onnxruntime-gpu", ()) if one.extra in ("cuda", "cudnn")]
    if stack.onnxruntime_cuda is None:
        why = "the package does not say which CUDA it is built for"
        yield _check("CUDA libraries of onnxruntime-gpu", "unknown", "unknown", None, note=why)
        return
    major = numbers(stack.onnxruntime_cuda)[0]
    if stack.torch_cuda:
        found = f"{stack.torch_cuda} and {stack.onnxruntime_cuda}"
        same = numbers(stack.torch_cuda)[0] == major
        needed, other = "the same major version, to share libraries", f"a torch that is built for CUDA {major}"
        yield _check("CUDA of torch and onnxruntime-gpu", found, needed, same, f"{fix}; or {other}")
    if asked and f"libcudart.so.{major}" not in stack.loadable:
        yield _packages(stack, "CUDA libraries of onnxruntime-gpu", asked, fix)
    fits = stack.cudnn is not None and numbers(stack.cudnn)[0] == _CUDNN_OF_ONNXRUNTIME
    package = f"pip install 'nvidia-cudnn-cu{major}=={_CUDNN_OF_ONNXRUNTIME}.*'"
    yield _check("cuDNN", stack.cudnn or "not found", f"{_CUDNN_OF_ONNXRUNTIME}.x", fits, package)


def _formats(stack: Stack, exported: Formats) -> Iterator[Check]:
    if stack.taken is None or stack.written is None:
        return
    found = f"ONNX Runtime takes IR {stack.taken.ir} and opset {stack.taken.opset}"
    needed = f"IR {exported.ir} and opset {exported.opset}, for exported models"
    fits = stack.taken.ir >= exported.ir and stack.taken.opset >= exported.opset
    package = "onnxruntime-gpu" if "onnxruntime-gpu" in stack.versions else "onnxruntime"
    ahead = stack.written.opset > stack.taken.opset or stack.written.ir > stack.taken.ir
    newest = f"the installed onnx writes up to IR {stack.written.ir} and opset {stack.written.opset}"
    note = f"{newest}: such files open in tools and not in ONNX Runtime" if ahead else ""
    yield _check("ONNX format", found, needed, fits, f"pip install --upgrade {package}", note)


def _tensorrt(stack: Stack) -> Iterator[Check]:
    for name, variants in stack.variants.items():
        parts = [part for some in variants.values() for part in some]
        if len(variants) > 1:
            newest = stack.driver_cuda[0] if stack.driver_cuda else max(variants)
            wanted = max((major for major in variants if major <= newest), default=min(variants))
            found, needed = " and ".join(f"cu{major}" for major in variants), "one of them: they overwrite each other"
            fix = f"pip uninstall -y {name} {' '.join(parts)} && pip install {name}-cu{wanted}"
            yield _check(f"packages of {name}", found, needed, False, fix)
        else:
            pinned = [one for part in (name, *parts) for one in stack.requirements.get(part, ())]
            fix = f"pip install --force-reinstall {name}-cu{max(variants)}"
            yield _packages(stack, f"parts of {name}", pinned, fix)
        for index, gpu in enumerate(stack.gpus):
            yield _target(name, stack.versions.get(name), index, gpu)


def _target(name: str, version: str | None, index: int, gpu: GpuState) -> Check:
    capability = numbers(gpu.compute_capability)
    if name == "tensorrt":
        fits, needed = capability >= _OLDEST_GPU_OF_TENSORRT, "7.5 or newer"
        fix = "pip install onnxruntime-gpu: TensorRT has no kernels for this GPU"
    else:
        targets = capabilities("tensorrt_rtx", version).targets
        fits, needed = "sm" + "".join(map(str, capability)) in targets, ", ".join(targets)
        fix = "pip install tensorrt: the other flavour has kernels for this GPU"
    found = f"{gpu.name}: compute capability {gpu.compute_capability}"
    return _check(f"{name} on cuda:{index}", found, needed, fits, fix)


def _glibc(stack: Stack) -> Iterator[Check]:
    if stack.glibc is None or not stack.glibc_needed:
        return
    package, least = max(stack.glibc_needed.items(), key=lambda item: numbers(item[1]))
    fits = numbers(stack.glibc) >= numbers(least)
    fix = f"pip install --force-reinstall {package} takes a version that fits, if there is one; else a newer system"
    yield _check("C library", f"glibc {stack.glibc}", f"{least}, by {package}", fits, fix)


def _packages(stack: Stack, name: str, asked: list[Requirement], fix: str = "") -> Check:
    """Whether all are installed in a version that was asked for."""
    missing = [one for one in asked if one.name not in stack.packages]
    wrong = [one for one in asked if one.name in stack.packages and not meets(stack.packages[one.name], one.versions)]
    found = [f"no {one.name}" for one in missing] + [f"{one.name} {stack.packages[one.name]}" for one in wrong]
    wanted = [f"{one.name}{one.versions}" for one in (*missing, *wrong)]
    fix = fix or f"pip install {' '.join(repr(one) for one in wanted)}"
    there, needed = ", ".join(found) or f"all {len(asked)}", ", ".join(wanted) or "as the package's metadata says"
    return _check(name, there, needed, not wanted, fix)


Facts = dict[str, Any]

_EXTRAS = (
    ("transformers", "transformers", "models as hf:…"),
    ("timm", "timm", "models as timm:…"),
    ("PIL", "pillow", "folders of images as data"),
    ("tokenizers", "transformers", ".jsonl files of texts as data"),
)
_UNKNOWN = "unknown"


class Diagnosis(BaseModel):
    """All that is found out."""

    model_config = ConfigDict(frozen=True)

    environment: Environment
    compatibility: tuple[Check, ...]
    engines: dict[str, dict[str, str]]
    """By kind of device: engine → ``ok``, or why not."""
    fixes: tuple[str, ...]
    """What to do about what is missing or does not fit."""
    store: str


def examine() -> Diagnosis:
    """Look at everything. Takes some seconds, most of them for importing torch."""
    opset = ExportOptions().opset
    compared = checks(stack.look(), opset, _ir_version(opset))
    engines, missing = {}, []
    for where in ("cpu", "cuda"):
        rows = inspect.engines(where)
        engines[where] = {row["engine"]: _usable(row) for row in rows}
        missing += [
            f"{row['engine']} on {where}: {row['remedy']}"
            for row in rows
            if row["remedy"] and where in engine_class(row["engine"]).kinds
        ]
    missing += [
        f"{what}: {install_command(distribution)}"
        for package, distribution, what in _EXTRAS
        if importlib.util.find_spec(package) is None
    ]
    return Diagnosis(
        environment=environment(),
        compatibility=tuple(compared),
        engines=engines,
        fixes=(*(f"{check.name}: {check.fix}" for check in compared if check.ok is False), *missing),
        store=default_address().text,
    )


def _ir_version(opset: int) -> int:
    """The specification's for that opset; exporters may write an older one."""
    from onnx import helper

    return int(helper.find_min_ir_version_for([helper.make_opsetid("", opset)]))


def _usable(row: Facts) -> str:
    if row["usable"] != "no":
        return "ok" if row["usable"] == "yes" else row["reason"]
    elsewhere = engine_class(row["engine"]).built_elsewhere and row["builds here"] == "yes"
    return f"no: {row['reason']}" + ("; it can be built here for other machines" if elsewhere else "")


def readable(found: Diagnosis) -> Facts:
    """The same for people: what is here, what spoils numbers, what fits and runs, and last what is to be done."""
    machine = found.environment
    gpus = {f"cuda:{index}": _gpu(gpu) for index, gpu in enumerate(machine.gpus or ())}
    return {
        "processor": _processor(machine),
        "memory": _memory(machine),
        **(gpus or {"GPUs": f"none: {machine.reasons.get('gpus', '')}"}),
        "software": {"system": machine.system, "kernel": machine.kernel, "python": machine.python, **machine.packages},
        "store": found.store,
        "what spoils measurements": list(machine.warnings),
        "what fits together": {check.name: _verdict(check) for check in found.compatibility},
        **{f"engines on {where}": rows for where, rows in found.engines.items()},
        "what to do about what is missing or does not fit": list(found.fixes),
    }


def _verdict(check: Check) -> str:
    word = {True: "yes: ", False: "NO: ", None: "– "}[check.ok]
    return f"{word}{check.found}; needed: {check.needed}" + (f" ({check.note})" if check.note else "")


def _processor(machine: Environment) -> Facts:
    unlimited = f"none ({machine.reasons.get('quota_cores', '')})"
    clocks = [
        f"{mhz:.0f} MHz {word}"
        for word, mhz in (
            ("now", machine.frequency_mhz),
            ("at least", machine.frequency_min_mhz),
            ("at most", machine.frequency_max_mhz),
        )
        if mhz is not None
    ]
    lost = [
        words.format(value)
        for words, value in (
            ("{:.0f} periods of the quota throttled", machine.throttled_periods),
            ("slowed down by heat {:.0f} times", machine.thermal_throttles),
            ("{:.0f} s given to other machines", machine.stolen_seconds),
        )
        if value is not None
    ]
    yes = {True: "yes", False: "no", None: f"{_UNKNOWN} ({machine.reasons.get('turbo', '')})"}
    return {
        "model": f"{machine.processor} ({machine.architecture}{', virtual machine' if machine.virtual else ''})",
        "cores": f"{machine.cores}, usable here: {machine.usable_cores}, "
        f"threads per core: {machine.threads_per_core or _UNKNOWN}, memory nodes: {machine.numa_nodes or _UNKNOWN}",
        "container's limit": unlimited if machine.quota_cores is None else f"{machine.quota_cores:g} cores",
        "load": f"{machine.load_average:.2f}",
        "governor": machine.governor or f"{_UNKNOWN} ({machine.reasons.get('governor', '')})",
        "turbo": yes[machine.turbo],
        "clock": ", ".join(clocks) or _UNKNOWN,
        "lost since the start": ", ".join(lost) or "nothing that is counted here",
        "vector units": ", ".join(machine.vector_units),
        "thread variables": ", ".join(f"{name}={value}" for name, value in machine.thread_variables.items()) or "none",
    }


def _memory(machine: Environment) -> Facts:
    limit, left = machine.memory_limit_bytes, machine.memory_limit_left_bytes
    return {
        "size": f"{format_bytes(machine.memory_bytes)}, available: {format_bytes(machine.available_memory_bytes)}",
        "container's limit": f"{format_bytes(limit)}, left: {format_bytes(left)}"
        if limit is not None
        else f"none ({machine.reasons.get('memory_limit_bytes', '')})",
        "transparent huge pages": machine.transparent_huge_pages or _UNKNOWN,
    }


def _gpu(gpu: GpuState) -> Facts:
    """Every field, with its unit; what is not known, with the reason."""
    facts: Facts = {}
    for name, value in gpu.model_dump(exclude={"reasons"}).items():
        label = name.removesuffix("_bytes").replace("_", " ")
        if value is None:
            facts[label] = f"{_UNKNOWN} ({gpu.reasons.get(name, '')})"
        elif name.endswith("_bytes"):
            facts[label] = format_bytes(value)
        elif name == "processes":
            facts[label] = ", ".join(f"{one['pid']} ({format_bytes(one['used_bytes'])})" for one in value) or "none"
        elif isinstance(value, tuple | list):
            facts[label] = ", ".join(value) or "nothing"
        else:
            facts[label] = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
    return facts
