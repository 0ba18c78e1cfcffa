"""The script of bundles with TensorRT engines, on a driver and a TensorRT of which only the calls are real."""

import ctypes
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
    "plugins": (),
    "inputs": [{"name": "x", "dtype": "float32"}],
    "outputs": [
        {"name": name, "dtype": dtype} for name, dtype in (("y", "float32"), ("found", "int64"), ("n", "int32"))
    ],
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

    def describe(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = {75: 8, 76: 6}[attribute]
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        known = {
            "cuMemAlloc_v2": self.allocate,
            "cuMemFree_v2": self.free,
            "cuMemcpyHtoD_v2": self.copy_in,
            "cuMemcpyDtoH_v2": self.copy_out,
            "cuDeviceGetAttribute": self.describe,
        }
        return known.get(name, lambda *given: 0)


class Context:
    """Doubles x into y, finds where it is positive, counts that on the host; refuses what a profile does not take."""

    active_optimization_profile = 0  # of a new context, says NvInferRuntime.h

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.addresses: dict[str, int] = {}
        self.allocators: dict[str, Any] = {}

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocators[name] = allocator
        return True

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.active_optimization_profile, self.shape = index, ()
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = SHAPES[self.active_optimization_profile]
        self.shape = shape
        return all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return {"found": (-1,), "n": ()}.get(name, self.shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        x, y = (view(self.addresses[name], np.dtype(np.float32), self.shape) for name in "xy")
        y[...] = 2 * x
        found = np.flatnonzero(x > 0)
        address = self.allocators["found"].reallocate_output_async("found", 0, max(found.nbytes, 1), 256, stream)
        view(address, found.dtype, found.shape)[...] = found
        self.allocators["found"].notify_shape("found", list(found.shape))
        view(self.addresses["n"], np.dtype(np.int32), ())[...] = found.size
        return True


def view(address: int, dtype: Any, shape: tuple[int, ...]) -> Array:
    size = int(np.prod(shape))
    buffer = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return np.frombuffer(buffer, dtype).reshape(shape)


class Engine:
    num_optimization_profiles = len(SHAPES)
    create_execution_context = staticmethod(Context)

    def get_tensor_location(self, name: str) -> str:
        return "host" if name == "n" else "device"

    def get_tensor_profile_shape(self, name: str, index: int) -> Any:
        return SHAPES[index]


class Runtime:
    engine: Any = Engine()
    engine_host_code_allowed = False

    def __init__(self, logger: object) -> None:
        self.seen = logger

    def deserialize_cuda_engine(self, plan: bytes) -> Any:
        return self.engine if self.engine_host_code_allowed or plan != b"host code" else None


class Base:
    def __init__(self, *given: object) -> None:
        pass


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = ModuleType("tensorrt")
    made.loaded = list[str]()
    made.__version__, made.Runtime, made.IOutputAllocator = "11.4", Runtime, Base
    made.Logger = type("Logger", (Base,), {"ERROR": 1})
    made.TensorLocation = SimpleNamespace(HOST="host")
    made.init_libnvinfer_plugins = lambda logger, namespace: made.loaded.append("standard")
    registry = SimpleNamespace(load_library=lambda path: made.loaded.append(Path(path).name) or path)
    made.get_plugin_registry = lambda: registry
    monkeypatch.setitem(sys.modules, "tensorrt", made)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    return made


def start(folder: Path, content: bytes = b"engine", **changes: Any) -> Callable[[dict[str, Array]], dict[str, Array]]:
    (folder / "model.engine").write_bytes(content)
    script = runpy.run_path(str(TensorRT.infer_script()))
    run: Callable[[dict[str, Array]], dict[str, Array]] = script["_tensorrt"](
        folder / "model.engine", {**MANIFEST, **changes}
    )
    return run


def test_the_first_profile_that_takes_all_shapes_is_chosen_for_each_call(trt: Any, tmp_path: Path) -> None:
    run = start(tmp_path)
    for batch in (1, 8, 64, 1):
        x = np.arange(4.0 * batch, dtype=np.float32).reshape(batch, 4)
        np.testing.assert_array_equal(run({"x": x})["y"], 2 * x)
    with pytest.raises(ValueError, match=r"not built for \[\[65, 4\]\]"):
        run({"x": np.zeros((65, 4), np.float32)})


def test_outputs_whose_size_only_a_run_decides_and_those_on_the_host(trt: Any, tmp_path: Path) -> None:
    run = start(tmp_path)
    for positive in (3, 30, 0):
        x = np.zeros((8, 4), np.float32)
        x.reshape(-1)[:positive] = 1
        answers = run({"x": x})
        assert list(answers) == ["y", "found", "n"]
        np.testing.assert_array_equal(answers["found"], np.arange(positive))
        assert (answers["found"].dtype, int(answers["n"])) == (np.int64, positive)


def test_plugins_and_host_code_are_loaded_where_the_engine_needs_them(trt: Any, tmp_path: Path) -> None:
    start(tmp_path, options={"plugins": ["nms.so"]}, plugins=(tmp_path / "nms.so",))
    assert trt.loaded == ["standard", "nms.so"]
    with pytest.raises(ImportError, match=r"needs the plugin libraries nms\.so: give them with --plugins"):
        start(tmp_path, options={"plugins": ["nms.so"]})
    start(tmp_path, b"host code", options={"host_code": True})


def test_an_engine_for_another_machine_is_told_from_one_that_should_load(trt: Any, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"TensorRT 11\.4 on sm86 refuses it: it is built by 11\.4 for sm90"):
        start(tmp_path, b"host code", compute_capabilities=["sm90"])
    with pytest.raises(ImportError, match=r"built by 11\.3"):
        start(tmp_path, b"host code", version="11.3")
    with pytest.raises(RuntimeError, match="refuses it"):
        start(tmp_path, b"host code")
