"""Check whether driver, CUDA and each engine's software fit each other and the GPUs, and say what to do if not."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from pydantic import BaseModel

from enginesmith.pipeline.system.nvidia import OLDEST_DRIVER
from enginesmith.pipeline.system.software import Requirement, Stack, numbers

NO_GPU = "there is no NVIDIA GPU here"
_COMMON_BRANCH = 580
"""The driver's branch that all of these run on, and GPUs from Maxwell on."""
_DRIVER_FIX = "on the host (Ubuntu): sudo apt-get install nvidia-driver-{branch} && sudo reboot"


class Check(BaseModel, frozen=True):
    """Record whether one thing fits, and how to make it fit."""

    name: str
    found: str
    needed: str
    ok: bool | None
    """None where it cannot be known, or matters to nothing here; ``note`` says which."""
    fix: str = ""
    """The command that makes it fit, where it does not."""
    note: str = ""


def check(name: str, found: str, needed: str, ok: bool | None, fix: str = "", note: str = "") -> Check:
    """Make a check, with a fix only where something does not fit."""
    return Check(name=name, found=found, needed=needed, ok=ok, fix=fix if ok is False else "", note=note)


def check_driver(
    stack: Stack, package: str, built_for: str | None, stricter: Mapping[int, str] = MappingProxyType({}), fix: str = ""
) -> Iterator[Check]:
    """Check the driver for a package that is built for CUDA.

    ``stricter`` has the oldest driver by CUDA's major version where the package needs a newer one than CUDA does;
    ``fix`` is what helps besides a newer driver.
    """
    if not built_for or not numbers(built_for):
        return
    wanted = numbers(built_for)
    least = stricter.get(wanted[0]) or OLDEST_DRIVER.get(wanted[0])
    name, needed = f"driver for {package}", f"{least} or newer, for CUDA {wanted[0]}" if least else f"CUDA {wanted[0]}"
    newer_driver = _DRIVER_FIX.format(branch=max(_COMMON_BRANCH, numbers(least)[0] if least else 0))
    if stack.driver_cuda is None:
        ok, note = (False, "") if stack.gpu_without_driver else (None, NO_GPU)
        yield check(name, stack.driver_reason, needed, ok, newer_driver, note)
        return
    known = "{}.{}".format(*stack.driver_cuda)
    driver = f"{stack.driver}, for CUDA {known}" if stack.driver else f"one for CUDA {known}"
    too_old = stack.driver and stricter and least and numbers(stack.driver) < numbers(least)
    fits = stack.driver_cuda[0] >= wanted[0] and not too_old
    newer = fits and stack.driver_cuda < wanted[:2]
    note = f"it does not know CUDA {built_for}: what is compiled when it runs (PTX) may be refused" if newer else ""
    yield check(name, driver, needed, fits, "; or: ".join(filter(None, (newer_driver, fix))), note)


def check_machine(stack: Stack) -> Iterator[Check]:
    """Check the compute mode of each GPU, whether NVML shows its state, and the C library."""
    for index, gpu in enumerate(stack.gpus):
        if gpu.compute_mode is not None:
            needed = "default: every session has a process of its own, and several are open at once"
            fix = f"sudo nvidia-smi -i {gpu.pci_bus_id} -c DEFAULT"
            yield check(f"compute mode of cuda:{index}", gpu.compute_mode, needed, gpu.compute_mode == "default", fix)
        if gpu.driver is None:
            needed = "NVML, for clocks, temperature, power and who else is on the device"
            fix = "start the container with --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            yield check(f"state of cuda:{index}", "not shown", needed, False, fix, gpu.reasons.get("driver", ""))
    if stack.glibc is not None and stack.glibc_needed:  # for the package that needs the newest one
        package, least = max(stack.glibc_needed.items(), key=lambda item: numbers(item[1]))
        fits = numbers(stack.glibc) >= numbers(least)
        fix = f"pip install --force-reinstall {package} takes a version that fits, if there is one; else a newer system"
        yield check("C library", f"glibc {stack.glibc}", f"{least}, by {package}", fits, fix)


def check_packages(stack: Stack, name: str, requirements: list[Requirement], fix: str = "") -> Check:
    """Check whether all are installed in a version that was asked for."""
    from packaging.specifiers import SpecifierSet

    here = stack.packages

    def is_met(need: Requirement) -> bool:
        return need.name in here and SpecifierSet(need.versions).contains(here[need.name], prereleases=True)

    wrong = [need for need in requirements if not is_met(need)]
    wrong.sort(key=lambda need: need.name in here)
    present = [f"{need.name} {here[need.name]}" if need.name in here else f"no {need.name}" for need in wrong]
    wanted = [f"{need.name}{need.versions}" for need in wrong]
    fix = fix or f"pip install {' '.join(map(repr, wanted))}"
    needed = ", ".join(wanted) or "as the package's metadata says"
    return check(name, ", ".join(present) or f"all {len(requirements)}", needed, not wanted, fix)
