"""Begin a run on its device: require the one that was named, and describe what was found and chosen."""

from collections.abc import Iterable
from pathlib import Path

from enginesmith.pipeline.engines import BASELINES, ENGINES, engine_class, needs_cuda
from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.execution.events import Event, Listener, ShownStep
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.run import Run
from enginesmith.pipeline.system import cpu, machine, nvidia
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.units import count_words

_VECTORS = {
    "amx_int8": "AMX",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx2": "AVX2",
    "i8mm": "Neon with int8 products",
    "asimddp": "Neon with dot products",
    "asimd": "Neon",
}
"""The kernel's name of a vector extension → its usual name; the best extension first."""


def begin_on(device: Device, recipe: Recipe, listener: Listener, step: ShownStep) -> None:
    """Require the device of a run, and announce it, its engines, and why no GPU is used.

    Without a named device, engines that run on CUDA alone require the GPU that the driver shows, unless they are built
    for named targets. Where there is no GPU, they are built for other machines.

    Raises:
        MissingCapability: it is a GPU that cannot be used here.
    """
    eager, cuda = engine_class(BASELINES["torch"]), Device(kind="cuda")
    eager.installed(device).require(f"{device} cannot be used")
    if recipe.device is None and all(map(needs_cuda, recipe.engines)) and not recipe.targets:
        devices, answer = nvidia.driver().devices, eager.installed(cuda)
        if devices and not answer.ok:
            message = (
                f"{cuda} ({devices[0].name}) cannot be used, and {' and '.join(recipe.engines)} cannot run without it"
            )
            remedy = f"{answer.remedy}; to build for another GPU without running it, name its target: --target sm89"
            raise MissingCapability(f"{message}: {answer.reason}", remedy)
    listed = recipe.variants == "listed" and "engines" in recipe.model_fields_set
    engines = recipe.engines if listed else tuple(ENGINES)
    listener(Event("device", step, describe(device, engines)))
    if device.kind == "cpu" and recipe.device is None and (reason := explain_unused_gpu(recipe)):
        listener(Event("note", step, reason))


def require_device_of(run: Run, folder: Path) -> None:
    """Require a GPU for a run that was measured on one, which on the processor would be another run.

    Raises:
        MissingCapability: no GPU can be used here.
    """
    device = run.device
    if device and device.kind == "cuda" and run.recipe.where.kind == "cpu" and runs.has_results(run):
        answer = engine_class(BASELINES["torch"]).available(device)
        reason = answer.reason or "none of its engines can use a GPU here"
        remedy = "resume it where its GPU is; `enginesmith optimize` with another --out measures on this machine"
        raise MissingCapability(f"{folder} was measured on {device}, which cannot be used here: {reason}", remedy)


def describe(device: Device, engines: Iterable[str]) -> str:
    """Describe a device and which of these engines can use it in one line, with the reason for those that cannot."""
    here, missing = [], []
    for name in engines:
        engine = engine_class(name)
        if name == BASELINES["torch"] or device.kind not in engine.kinds:
            continue
        if (answer := engine.installed(device)).ok:
            here.append(name)
        else:
            missing.append(f"{name} ({answer.reason})")
    listed = "; not here: ".join(filter(None, (", ".join(here) or "eager alone", ", ".join(missing))))
    return f"{_describe_hardware(device)}: {listed}"


def _describe_hardware(device: Device) -> str:
    """Name the GPU, its driver and CUDA's version; or the cores of the processor and their best vector extension."""
    if device.kind == "cpu":
        units = cpu.vector_units()
        vectors = next((name for flag, name in _VECTORS.items() if flag in units), "no vector extension is known")
        return f"cpu: {count_words(device.thread_count, 'core')}, {vectors}"
    shown, states = nvidia.driver(), machine.gpu_states()
    version = shown.version or 0
    driver = states[device.index].driver if device.index < len(states) else None
    facts = [shown.devices[device.index].name, f"driver {driver}" if driver else "", f"CUDA {nvidia.dotted(version)}"]
    return f"{device} {', '.join(filter(None, facts))}"


def explain_unused_gpu(recipe: Recipe) -> str:
    """Explain why a GPU that the driver shows is not used, and what to do; empty where there is none."""
    devices = nvidia.driver().devices
    if not devices:
        return ""
    answer = engine_class(BASELINES["torch"]).installed(Device(kind="cuda"))
    if answer.ok:
        reasons = (f"{name}: {engine_class(name).installed(Device(kind='cuda')).reason}" for name in recipe.engines)
        return f"cuda:0 ({devices[0].name}) is not used, as no engine of this run can use it: {'; '.join(reasons)}"
    return f"cuda:0 ({devices[0].name}) is not used: {answer.reason}; {answer.remedy}. The run continues with cpu"
