"""Open, feed and free sessions of ONNX Runtime. Feeds are bound once; a call moves nothing."""

import ctypes
import functools
import gc
import logging
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from enginesmith.pipeline.engines.base import Session
from enginesmith.pipeline.engines.cuda_allocator import CudaAllocationTracker, TorchMemory, active
from enginesmith.pipeline.errors import (
    EnginesmithError,
    InvalidGraph,
    MissingCapability,
    ModelError,
    UsageError,
    install_command,
)
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.oom import out_of_memory, says_out_of_memory
from enginesmith.pipeline.tensors import Array, Feeds, Signature

if TYPE_CHECKING:
    import onnxruntime


_logger = logging.getLogger(__name__)
Level = Literal["disabled", "basic", "extended", "all"]
LEVELS: dict[Level, str] = {
    "disabled": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
_ERROR_SEVERITY = 3
_EXTERNAL_ABOVE_BYTES = 1024
_WRONG_IN_HALF = "WeightBiasQuantization"
"""An optimisation that multiplies two scales in their own type, and gets next to nothing in float16."""


@functools.cache
def _callbacks(device: int) -> dict[str, Any]:
    """Make functions that route ONNX Runtime's device memory through a ledger, for as long as the process lives.

    The CUDA provider's options ``gpu_external_alloc`` and ``gpu_external_free`` are addresses of C functions:
    ``void *(size_t)`` and ``void (void *)``. With them it has no arena: each tensor, each planned block and scratch
    memory is a call of its own. It works on the default stream then, as it refuses ``user_compute_stream`` beside them
    (the constructor in ``cuda_execution_provider.cc``). Each call takes the interpreter's lock, so this is for counting
    and never for timing. ``gpu_external_empty_cache`` is left out: the provider calls it while it holds a lock that
    freeing takes too, and a collection of garbage inside of it may free.

    ONNX Runtime's Python module keeps the allocator of the first session for inputs of all later ones, so these may be
    called when nothing is counted any more.
    """
    uncounted, owners = CudaAllocationTracker(TorchMemory(device)), dict[int, CudaAllocationTracker]()

    def take(size: int) -> int:
        ledger = active(device) or uncounted
        try:
            address = ledger.allocate(size)
        except RuntimeError:  # of CUDA's, and cannot go through C; ONNX Runtime raises its own where it gets nothing
            _logger.exception("torch gave ONNX Runtime no memory")
            return 0
        if address:
            owners[address] = ledger
        return address

    def give(address: int | None) -> None:
        if address:
            owner = owners.get(address) or active(device) or uncounted
            owner.free(address)

    allocate, free = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t), ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    return {"gpu_external_alloc": allocate(take), "gpu_external_free": free(give)}


def counted_options(device: int) -> dict[str, str]:
    """List options of the CUDA provider for a session that is counted; empty where nothing is."""
    functions = _callbacks(device) if active(device) else {}
    return {name: str(ctypes.cast(function, ctypes.c_void_p).value) for name, function in functions.items()}


def session_options(
    device: Device, level: Level, memory_arena: bool, save_to: Path | None = None, trace: Path | None = None
) -> Any:
    """Make session options; with ``save_to`` the optimised graph is written there, its weights in a file beside it.

    With ``trace`` what runs is profiled, into files whose names start so.
    """
    import onnxruntime as ort

    chosen = ort.SessionOptions()
    chosen.log_severity_level = _ERROR_SEVERITY
    chosen.intra_op_num_threads = device.thread_count
    chosen.inter_op_num_threads = 1
    chosen.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    chosen.graph_optimization_level = getattr(ort.GraphOptimizationLevel, LEVELS[level])
    chosen.enable_cpu_mem_arena = chosen.enable_mem_pattern = memory_arena
    if trace:
        chosen.enable_profiling, chosen.profile_file_prefix = True, str(trace)
    if save_to:
        entry = "session.optimized_model_external_initializers_"
        chosen.optimized_model_filepath = str(save_to)
        chosen.add_session_config_entry(entry + "file_name", save_to.name + ".data")
        chosen.add_session_config_entry(entry + "min_size_in_bytes", str(_EXTERNAL_ABOVE_BYTES))
    return chosen


def open_session(
    path: Path,
    chosen: Any,
    device: Device,
    stream: int | None = None,
    content: bytes | None = None,
    *,
    tf32: bool = False,
) -> "onnxruntime.InferenceSession":
    """Open a session that runs on the device that was asked for, or none.

    ``content`` is the graph, if it is another one than the file's; its weights lie where the file's do. ``tf32`` lets
    CUDA round products of float32 to TF32, which ONNX Runtime does unless it is told otherwise.

    Raises:
        MissingCapability: ONNX Runtime would run it on another device.
        InvalidGraph: the file cannot be loaded.
    """
    import onnxruntime as ort

    if device.kind == "cuda":
        ort.preload_dlls()
    if content is not None:
        chosen.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    left_out = disabled_optimizers(path) if content is None else []
    providers = _providers(device, stream, tf32)
    try:
        session = ort.InferenceSession(content or str(path), chosen, providers=providers, disabled_optimizers=left_out)
    except _errors() as error:
        raise _load_error(error, path.name) from error
    wanted = providers[0][0]
    if session.get_providers()[0] != wanted:
        remedy = f"install the CUDA build alone: pip uninstall onnxruntime; {install_command('onnxruntime-gpu')}"
        told = f"ONNX Runtime did not start its {wanted} and would silently run on the CPU"
        raise MissingCapability(told, remedy)
    return session


def disabled_optimizers(path: Path) -> list[str]:
    """List optimisations that get a graph wrong, by ONNX Runtime's names for them.

    That is one, where values are quantised with scales of float16 or bfloat16; a graph without Q/DQ is not taken apart.
    """
    from enginesmith.pipeline.frameworks.onnx import model_file

    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(b"QuantizeLinear") < 0:
                return []
        model = model_file.read(path)
    except (OSError, ValueError, InvalidGraph):  # ValueError: an empty file
        return []
    kinds = {tensor.name: model_file.dtype_name(tensor.data_type) for tensor in model_file.tensors(model)}
    nodes = (node for node in model_file.nodes(model) if node.op_type in ("QuantizeLinear", "DequantizeLinear"))
    half = any(kinds.get(node.input[1]) in ("float16", "bfloat16") for node in nodes if len(node.input) > 1)
    return [_WRONG_IN_HALF] if half else []


def _providers(device: Device, stream: int | None, tf32: bool) -> list[tuple[str, dict[str, str]]]:
    cpu: tuple[str, dict[str, str]] = ("CPUExecutionProvider", {})
    if device.kind == "cpu":
        return [cpu]
    counted = counted_options(device.index)
    shared = {"user_compute_stream": str(stream)} if stream and not counted else {}
    chosen = {"device_id": str(device.index), "use_tf32": str(int(tf32)), **shared, **counted}
    return [("CUDAExecutionProvider", chosen), cpu]


def _errors() -> tuple[type[Exception], ...]:
    """List the exceptions that ONNX Runtime raises, which share no base class of their own."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = (value for value in vars(state).values() if isinstance(value, type) and issubclass(value, Exception))
    return (*own, RuntimeError, ValueError)


def _load_error(error: Exception, file: str) -> EnginesmithError:
    text = _text(error)
    if says_out_of_memory(text):
        return out_of_memory(text, f"memory ran out while ONNX Runtime loaded {file}: {text}", "use a larger machine")
    verdict, remedy = f"cannot load {file}", "export the model again"
    if "float8" in text or "bfloat16" in text or "BFloat16" in text:
        verdict = f"has no CPU kernels for what is in {file}"
        remedy = "fp8 and bf16 are for GPUs: build the graph for TensorRT, or take int8 or fp16 here"
    elif type(error).__name__ == "NotImplemented" or "is not a registered function" in text or "opset" in text:
        verdict = f"does not support what is in {file}"
        remedy = "export with another opset (--opset), or without that operator, or update onnxruntime"
    return InvalidGraph(f"ONNX Runtime {verdict}: {text}", remedy)


def _text(error: Exception) -> str:
    """Take the first line, without ``[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : ``."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", line)


class Bound(NamedTuple):
    """Keep an I/O binding with what it points into: ONNX Runtime itself keeps neither arrays nor values alive."""

    binding: Any
    held: Any


class OnnxRuntimeSession(Session):
    """Run an open session; what it reads and writes stays bound between calls."""

    def __init__(
        self,
        session: "onnxruntime.InferenceSession",
        signature: Signature,
        device: Device,
        stream: Any,
        again: "Callable[[], OnnxRuntimeSession]",
    ):
        """``again`` opens another session like this one."""
        self.signature, self._device, self._stream, self._again = signature, device, stream, again
        self._session: Any = session
        self._errors = _errors()
        self._last: Any = None

    @property
    def cuda_stream(self) -> int | None:
        return self._stream.cuda_stream if self._stream else None

    @property
    def sibling_note(self) -> str:
        """Weights on CUDA: a stream belongs to a session there, so that a sibling loads them again."""
        return "it has the weights on the device once more" if self._stream else ""

    def _opened(self) -> Any:
        if self._session is None:
            raise UsageError("the session is closed")
        return self._session

    def sibling(self) -> "OnnxRuntimeSession":
        """Bind the same session once more on the CPU, where several threads may run it; open another one on CUDA."""
        session = self._opened()
        if self._stream:
            return self._again()
        return OnnxRuntimeSession(session, self.signature, self._device, None, self._again)

    def bind(self, feeds: Feeds) -> "Bound":
        """Bind inputs as tensors on the device; outputs are left to be allocated there."""
        from onnxruntime import OrtValue

        binding = self._opened().io_binding()
        kind, index = self._device.kind, self._device.index
        arrays = {spec.name: np.require(feeds[spec.name], requirements="C") for spec in self.signature.inputs}
        values = {name: OrtValue.ortvalue_from_numpy(array, kind, index) for name, array in arrays.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for spec in self.signature.outputs:
            binding.bind_output(spec.name, kind, index)
        return Bound(binding, (arrays, values))

    def enqueue(self, bound: "Bound") -> None:
        """Run what is bound, without run options: onnxruntime's wrapper takes 27 µs a call to look at them.

        Raises:
            ModelError: the engine raised; StepOutOfMemory where memory was what it lacked.
        """
        if self._session is None:
            raise UsageError("the session is closed")
        try:
            self._session.run_with_iobinding(bound.binding)
        except self._errors as error:
            text = _text(error)
            if says_out_of_memory(text):
                raise out_of_memory(text, f"ONNX Runtime ran out of memory: {text}") from error
            remedy = "check that the model takes this shape and these values"
            raise ModelError(f"ONNX Runtime failed on this input: {text}", remedy) from error
        self._last = bound.binding

    def synchronize(self) -> None:
        if self._stream:
            self._stream.synchronize()

    def fetch(self) -> dict[str, Array]:
        names = (spec.name for spec in self.signature.outputs)
        return dict(zip(names, self._last.copy_outputs_to_cpu(), strict=True))

    def end_trace(self) -> Path:
        """Stop profiling and return the file that the events are in."""
        return Path(self._session.end_profiling())

    def close(self) -> None:
        """Free the session, its arena and its threads."""
        self._session = self._last = None
        gc.collect()
