"""Ask the CUDA driver directly which devices are there, without importing a framework or starting a context."""

import ctypes
import functools

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.system.device import Availability

_NAME_BYTES = 256
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h
_REMEDY = "install NVIDIA's driver, or start the container with --gpus all"
OTHER_TORCH = (
    "replace it: pip uninstall -y torch && pip install torch; where PIP_EXTRA_INDEX_URL points at "
    "PyTorch's CPU index, unset it first"
)
"""For a torch without CUDA. It satisfies every requirement, so that installing alone leaves it as it is; and pip takes
``2.13.0+cpu`` for newer than ``2.13.0``, wherever it finds both."""


class CudaDevice(BaseModel):
    """One device as the driver names it."""

    model_config = ConfigDict(frozen=True)

    name: str
    compute_capability: tuple[int, int]

    @property
    def target(self) -> str:
        """``sm86`` for compute capability 8.6."""
        return "sm{}{}".format(*self.compute_capability)


class Driver(BaseModel):
    """What the driver says: its version (13020 is CUDA 13.2) and its devices, or why there are none."""

    model_config = ConfigDict(frozen=True)

    version: int | None = None
    devices: tuple[CudaDevice, ...] = ()
    reason: str = ""


@functools.cache
def driver() -> Driver:
    """Ask the driver once in each process."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(reason="there is no CUDA driver (libcuda.so.1)")
    if code := library.cuInit(0):
        return Driver(reason=f"the CUDA driver does not start (cuInit gives {code})")
    version, count = ctypes.c_int(), ctypes.c_int()
    if code := library.cuDriverGetVersion(ctypes.byref(version)) or library.cuDeviceGetCount(ctypes.byref(count)):
        return Driver(reason=f"the CUDA driver does not say which devices there are (error {code})")
    devices = tuple(_device(library, index) for index in range(count.value))
    return Driver(version=version.value, devices=devices, reason="" if devices else "the CUDA driver shows no device")


def _device(library: ctypes.CDLL, index: int) -> CudaDevice:
    handle, number, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    library.cuDeviceGet(ctypes.byref(handle), index)
    library.cuDeviceGetName(name, _NAME_BYTES, handle)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        library.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle)
        capability.append(number.value)
    return CudaDevice(name=name.value.decode(errors="replace"), compute_capability=(capability[0], capability[1]))


def cuda_device(index: int) -> CudaDevice | None:
    """Return the device, if it is there."""
    devices = driver().devices
    return devices[index] if index < len(devices) else None


def available(index: int) -> Availability:
    """Tell whether the driver shows that device."""
    if cuda_device(index):
        return Availability(ok=True)
    found = driver()
    if not found.devices:
        return Availability(ok=False, reason=f"no CUDA device here: {found.reason}", remedy=_REMEDY)
    remedy = f"use one of cuda:0 … cuda:{len(found.devices) - 1}"
    return Availability(ok=False, reason=f"there is no cuda:{index}", remedy=remedy)
