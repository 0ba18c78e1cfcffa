"""The script of bundles with TensorRT engines, on a driver and a TensorRT of which only the calls are real."""

import ctypes
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.engines.tensorrt.engine import TensorRT
from enginesmith.pipeline.tensors import Array

SHAPES = [((1, 4), (1, 4), (1, 4)), ((1, 4), (8, 4), (64, 4))]
"""Of x in each profile: smallest, usual and largest."""
MANIFEST: dict[str, Any] = {
    "package": "tensorrt",
    "version": "11.4",
    "compute_capabilities": ["sm86"],
    "options": {},
    "inputs": [{"name": "x", "dtype": "float32"}],
    "outputs": [{"name": "y", "dtype": "float32"}],
}


class Driver:
    """The driver's functions, whose memory is the host's."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}

    def allocate(self, address: Any, size: ctypes.c_size_t) -> int:
        buffer = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(buffer)
        self.memory[address._obj.value] = buffer
        return 0

    def free(self, address: ctypes.c_uint64) -> int:
        return 0 if not address.value or self.memory.pop(address.value, None) else 1

    def copy_in(self, address: ctypes.c_uint64, array: Any, size: ctypes.c_size_t) -> int:
        ctypes.memmove(address.value or 0, array.data, size.value)
        return 0

    def copy_out(self, array: Any, address: ctypes.c_uint64, size: ctypes.c_size_t) -> int:
        ctypes.memmove(array.data, address.value or 0, size.value)
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        copies = {"cuMemcpyHtoD_v2": self.copy_in, "cuMemcpyDtoH_v2": self.copy_out}
        return {"cuMemAlloc_v2": self.allocate, "cuMemFree_v2": self.free, **copies}.get(name, lambda *given: 0)


class Context:
    """Doubles x into y, and refuses shapes that the chosen profile does not take."""

    active_optimization_profile = 0  # of a new context, says NvInferRuntime.h

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.active_optimization_profile, self.shape = index, ()
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = SHAPES[self.active_optimization_profile]
        self.shape = shape
        return all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        x, y = (view(self.addresses[name], np.dtype(np.float32), self.shape) for name in "xy")
        y[...] = 2 * x
        return True


def view(address: int, dtype: Any, shape: tuple[int, ...]) -> Array:
    size = int(np.prod(shape))
    buffer = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return np.frombuffer(buffer, dtype).reshape(shape)


class Engine:
    num_io_tensors = 2
    num_optimization_profiles = len(SHAPES)
    create_execution_context = staticmethod(Context)

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return np.float32

    def get_tensor_profile_shape(self, name: str, index: int) -> Any:
        return SHAPES[index]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver, trt = Driver(), ModuleType("tensorrt")
    runtime = type("Runtime", (), {"__init__": lambda self, log: None, "deserialize_cuda_engine": lambda *_: Engine()})
    logger = type("Logger", (), {"ERROR": 1, "__init__": lambda self, severity: None})
    vars(trt).update(__version__="11.4", Logger=logger, Runtime=runtime, nptype=lambda kind: kind)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    return driver


def start(folder: Path, **changes: Any) -> Callable[[dict[str, Array]], dict[str, Array]]:
    (folder / "model.engine").write_bytes(b"engine")
    script = runpy.run_path(str(TensorRT.infer_script()))
    run: Callable[[dict[str, Array]], dict[str, Array]] = script["_tensorrt"](
        folder / "model.engine", {**MANIFEST, **changes}
    )
    return run


def test_the_first_profile_that_takes_all_shapes_is_chosen_for_each_call(driver: Driver, tmp_path: Path) -> None:
    run = start(tmp_path)
    for batch in (1, 8, 64, 1):
        x = np.arange(4.0 * batch, dtype=np.float32).reshape(batch, 4)
        np.testing.assert_array_equal(run({"x": x})["y"], 2 * x)
    with pytest.raises(ValueError, match=r"not built for \[\[65, 4\]\]"):
        run({"x": np.zeros((65, 4), np.float32)})
