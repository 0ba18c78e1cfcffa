"""Check whether a flavour of TensorRT, the driver and the GPUs here fit each other."""

from collections.abc import Iterator

from enginesmith.pipeline.engines.compatibility import Check, check, check_driver, check_packages
from enginesmith.pipeline.engines.tensorrt.versions import capabilities
from enginesmith.pipeline.system.nvml import GpuState
from enginesmith.pipeline.system.software import Stack, numbers

_OLDEST_DRIVER = {12: "535", 13: "580.65.06"}
"""The prerequisites in TensorRT's installation guide."""
_OLDEST_GPU = (7, 5)


def check_software(stack: Stack, name: str) -> Iterator[Check]:
    """Check the driver, the packages and the GPUs for one flavour, by the name of its distribution."""
    variants = stack.variants.get(name, {})
    if not variants:
        return
    newest = max(variants)
    fix = f"pip uninstall -y {' '.join(variants[newest])} && pip install {name}-cu12" if newest > 12 else ""
    yield from check_driver(stack, name, str(newest), _OLDEST_DRIVER, fix)
    parts = [part for some in variants.values() for part in some]
    if len(variants) > 1:
        known = stack.driver_cuda[0] if stack.driver_cuda else newest
        wanted = max((major for major in variants if major <= known), default=min(variants))
        found, needed = " and ".join(f"cu{major}" for major in variants), "one of them: they overwrite each other"
        fix = f"pip uninstall -y {name} {' '.join(parts)} && pip install {name}-cu{wanted}"
        yield check(f"packages of {name}", found, needed, False, fix)
    else:
        pinned = [one for part in (name, *parts) for one in stack.requirements.get(part, ())]
        fix = f"pip install --force-reinstall {name}-cu{newest}"
        yield check_packages(stack, f"parts of {name}", pinned, fix)
    for index, gpu in enumerate(stack.gpus):
        yield _target(name, stack.versions.get(name), index, gpu)


def _target(name: str, version: str | None, index: int, gpu: GpuState) -> Check:
    capability = numbers(gpu.compute_capability)
    if name == "tensorrt":
        fits, needed = capability >= _OLDEST_GPU, "7.5 or newer"
        fix = "pip install onnxruntime-gpu: TensorRT has no kernels for this GPU"
    else:
        targets = capabilities("tensorrt_rtx", version).targets
        fits, needed = "sm" + "".join(map(str, capability)) in targets, ", ".join(targets)
        fix = "pip install tensorrt: the other flavour has kernels for this GPU"
    found = f"{gpu.name}: compute capability {gpu.compute_capability}"
    return check(f"{name} on cuda:{index}", found, needed, fits, fix)
