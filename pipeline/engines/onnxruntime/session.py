"""Open, feed and free sessions of ONNX Runtime. Feeds are bound once; a call moves nothing."""

import ctypes
import functools
import gc
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from enginesmith.pipeline.engines.base import UNKNOWN_OPERATOR, Session, refuse_closed
from enginesmith.pipeline.engines.cuda_allocator import (
    CudaAllocationTracker,
    TorchMemory,
    active,
    limit_bytes,
    set_limit,
)
from enginesmith.pipeline.engines.onnxruntime.optimizers import disabled_optimizers
from enginesmith.pipeline.engines.onnxruntime.providers import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    attach_plugin,
    load_libraries,
)
from enginesmith.pipeline.errors import (
    EnginesmithError,
    InvalidGraph,
    MissingCapability,
    ModelError,
    StepOutOfMemory,
    StoreError,
    install_command,
)
from enginesmith.pipeline.frameworks.onnx import model_file, rounding, traversal
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.oom import out_of_memory, says_out_of_memory
from enginesmith.pipeline.tensors import Array, Feeds, Signature
from enginesmith.pipeline.units import format_bytes

if TYPE_CHECKING:
    import onnxruntime


_logger = logging.getLogger(__name__)
Level = Literal["disabled", "basic", "extended", "all"]
THREADS, SPINNING = "intra_op_num_threads", "session.intra_op.allow_spinning"
"""Options of a session on the CPU that are tuned, by ONNX Runtime's names."""
ACCURACY = "session.qdq_matmulnbits_accuracy_level"
"""Entry of a session's options: how products are computed whose weights alone are quantized, where they are fused."""
FLOATS, INT8 = "1", "4"
"""Its values for activations that stay float32, and for those that are rounded to int8, by blocks; ONNX Runtime's
default is the second (``qdq_actions.cc``)."""
LEVELS: dict[Level, str] = {
    "disabled": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
_ERROR_SEVERITY = 3
_EXTERNAL_ABOVE_BYTES = 1 << 16
"""Sizes and axes have to be in the graph itself: ONNX Runtime does not read others when it works out shapes."""
_WARM_CALLS = 2
"""Calls before a graph is captured: the first ones allocate, and pick kernels by timing them."""
_NO_CAPTURE = -1
_BEHIND_SIGNATURES = re.compile(r"[A-Z]+ failure \d+: .*?(?= ;|$)|Failed to allocate memory for .*")
"""Message of CUDA's libraries or of the arena, after paths and signatures of functions that it went through."""
_ONLY_OLDER = (
    *("RandomNormal(22)", "RandomNormalLike(22)", "RandomUniform(22)", "RandomUniformLike(22)", "Multinomial(22)"),
    *("GlobalLpPool(22)", "MaxRoiPool(22)", "RoiAlign(22)"),
)
"""Forms of operators that ONNX Runtime 1.31 has no kernel for in any type; it has some for the forms before."""
_WITHOUT_GRAPHS = "run it without CUDA graphs: --cuda-graphs off"


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
    device: Device,
    level: Level,
    memory_arena: bool,
    save_to: Path | None = None,
    trace: Path | None = None,
    accuracy: str = FLOATS,
) -> Any:
    """Make session options; with ``save_to`` the optimized graph is written there, its weights in a file beside it.

    With ``trace`` what runs is profiled, into files whose names start so. ``accuracy`` is that of :data:`ACCURACY`.
    """
    import onnxruntime as ort

    chosen = ort.SessionOptions()
    chosen.log_severity_level = _ERROR_SEVERITY
    chosen.add_session_config_entry(ACCURACY, accuracy)
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
    providers: Sequence[tuple[str, dict[str, str]]] = ((CPU_PROVIDER, {}),),
    content: bytes | None = None,
    without: Sequence[str] = (),
) -> "onnxruntime.InferenceSession":
    """Open a session that runs on the device that was asked for, or none.

    ``content`` is the graph, if it is another one than the file's; its weights lie where the file's do. Optimizations
    are left out by ``without``.

    Raises:
        MissingCapability: ONNX Runtime would run it on another device.
        InvalidGraph: the file cannot be loaded.
        ModelError: a CUDA graph cannot be captured of it.
    """
    import onnxruntime as ort

    ort.set_default_logger_severity(_ERROR_SEVERITY)  # it warns of each session on CUDA that it has no plug-in for it
    if device.kind == "cuda":
        ort.preload_dlls()
    if content is not None:
        chosen.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    optimizes = content is None and chosen.graph_optimization_level != ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    left_out = [*(disabled_optimizers(path, device, without) if optimizes else []), *without]
    providers = within_limit(providers, device)
    load_libraries(providers[0][0])
    given: dict[str, Any] = {"disabled_optimizers": left_out, "enable_fallback": 0}  # to the CPU
    if not attach_plugin(chosen, *providers[0], device):
        given["providers"] = providers
    try:
        session = ort.InferenceSession(content or str(path), chosen, **given)
    except _errors() as error:
        raise _load_error(error, path) from error
    wanted = providers[0][0]
    if session.get_providers()[0] != wanted:
        remedy = f"install the CUDA build alone: pip uninstall onnxruntime; {install_command('onnxruntime-gpu')}"
        message = f"ONNX Runtime did not start its {wanted} and would silently run on the CPU"
        raise MissingCapability(message, remedy)
    return session


def within_limit(providers: Sequence[tuple[str, dict[str, str]]], device: Device) -> list[tuple[str, dict[str, str]]]:
    """Limit the CUDA provider's arena where engines are limited; one that is counted takes torch's limited memory."""
    limit = None if device.kind == "cpu" or active(device.index) else limit_bytes(device.index)
    if limit is None:
        return list(providers)
    arena = {"gpu_mem_limit": str(limit), "arena_extend_strategy": "kSameAsRequested"}
    return [(name, options | arena if name == CUDA_PROVIDER else options) for name, options in providers]


def _errors() -> tuple[type[Exception], ...]:
    """List the exceptions that ONNX Runtime raises, which share no base class of their own."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = (value for value in vars(state).values() if isinstance(value, type) and issubclass(value, Exception))
    return (*own, RuntimeError, ValueError)


def _load_error(error: Exception, path: Path) -> EnginesmithError:
    text, file = _text(error), path.name
    if says_out_of_memory(text):
        return out_of_memory(text, f"memory ran out while ONNX Runtime loaded {file}: {text}", "use a larger machine")
    verdict, remedy = f"cannot load {file}", "export the model again"
    if "graph capture feature" in text:
        message = "ONNX Runtime captures no CUDA graph of this model: some of its nodes do not run on CUDA"
        return ModelError(message, _WITHOUT_GRAPHS)
    if "provider option" in text:
        return MissingCapability(
            f"ONNX Runtime does not take an option: {text.rpartition(': ')[2]}", "omit --ort-option"
        )
    if "serialization failed" in text:  # of the optimized graph, which it saves
        message = f"ONNX Runtime cannot write the optimized graph of {file}: {text}"
        return StoreError(message, "most likely the disk is full: free some space, then `enginesmith resume` goes on")
    lacking = "Could not find an implementation" in text
    if "float8" in text or "bfloat16" in text or "BFloat16" in text:
        verdict = f"has no CPU kernels for what is in {file}"
        remedy = "fp8 and bf16 are for GPUs: build the graph for TensorRT, or take int8 or fp16 here"
    elif lacking and "bfloat16" in model_file.summary(path).weight_dtypes:
        verdict = f"has no kernels on the CPU for bfloat16, in which {file} computes{_find_module(path, text)}"
        remedy = (
            "take fp32 or int8 here, if the model itself is in float32; if not, export it in float32: module.float(), "
            "without autocast, and without casts to bfloat16 in the module's code, as in a library's"
        )
    elif lacking and "float64" in model_file.summary(path).weight_dtypes:
        verdict = f"has no kernels on the CPU for all of the float64 in which {file} computes{_find_module(path, text)}"
        remedy = "make the model in float32: module.float(), with inputs in float32"
    elif lacking:
        verdict = f"has no kernel for what is in {file}"
        remedy = f"{_advise_older_opset(text)}take another precision or engine; or update onnxruntime"
    elif type(error).__name__ == "NotImplemented" or "is not a registered function" in text or "opset" in text:
        verdict = f"does not support what is in {file}"
        remedy = UNKNOWN_OPERATOR.format("onnxruntime")
    return InvalidGraph(f"ONNX Runtime {verdict}: {text}", remedy)


def _advise_older_opset(text: str) -> str:
    """Advise the last opset of an operator's older form, where ONNX Runtime has kernels for that alone."""
    match = re.search(r"an implementation for ((\w+)\((\d+)\))", text)
    if match is None or match[1] not in _ONLY_OLDER:
        return ""
    return f"export the model with opset {int(match[3]) - 1}, which has an older form of {match[2]}; or "


def _find_module(path: Path, text: str) -> str:
    """Name the operator and the module of the node that ONNX Runtime names, where the graph tells."""
    name = re.search(r"with name '([^']+)'", text)
    node = next((node for node in traversal.nodes(model_file.read(path)) if name and node.name == name[1]), None)
    entries = node.metadata_props if node else ()
    module = next((entry.value for entry in entries if entry.key == model_file.MODULE_KEY), "")
    return f" ({node.op_type} in the module {module!r})" if node and module else ""


_CHECK_INPUT = "check that the model takes this shape and these values"


def _run_error(error: Exception, what: str, remedy: str) -> EnginesmithError:
    text = _text(error)
    if says_out_of_memory(text):
        return out_of_memory(text, f"ONNX Runtime ran out of memory: {text}")
    return ModelError(f"ONNX Runtime {what}: {text}", remedy)


def _text(error: Exception) -> str:
    """Take the first line, without ``[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : `` and functions of its source."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if match := _BEHIND_SIGNATURES.search(line):
        return match[0]
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
        graph: Path | None = None,
    ):
        """``again`` opens another session like this one; ``graph`` is the file of what it runs unchanged on a CPU."""
        self.signature, self._device, self._stream, self._again = signature, device, stream, again
        self._session: Any = session
        self._input_bytes = 0
        """Inputs that the limit on this session's memory has left room for."""
        self._errors = _errors()
        self.concurrent, self._run_arrays = stream is None, refuse_closed
        if stream is None:
            self._run_arrays = session._sess.run
        self._numbered = [*enumerate(spec.name for spec in signature.inputs)]
        self._output_names = [spec.name for spec in signature.outputs]
        self._options = None if stream is None else _run_options()
        self._last: Any = None
        self._graph = graph
        self._changed: Any = None

    @property
    def cuda_stream(self) -> int | None:
        return self._stream.cuda_stream if self._stream else None

    @property
    def sibling_note(self) -> str:
        """Weights on CUDA: a stream belongs to a session there, so that a sibling loads them again."""
        return "it has the weights on the device once more" if self._stream else ""

    def _opened(self) -> Any:
        if self._session is None:
            refuse_closed()
        return self._session

    def sibling(self) -> "OnnxRuntimeSession":
        """Bind the same session once more on the CPU, where several threads may run it; open another one on CUDA."""
        session = self._opened()
        if self._stream:
            return self._again()
        return OnnxRuntimeSession(session, self.signature, self._device, None, self._again)

    def bind(self, feeds: Feeds) -> "Bound":
        """Bind inputs as tensors on the device; outputs are left to be allocated there.

        Raises:
            StepOutOfMemory: the limit of memory is too small for the inputs.
        """
        from onnxruntime import OrtValue

        kind, index = self._device.kind, self._device.index
        arrays = {spec.name: np.require(feeds[spec.name], requirements="C") for spec in self.signature.inputs}
        self._leave_room(sum(array.nbytes for array in arrays.values()))
        binding = self._opened().io_binding()
        values = {name: OrtValue.ortvalue_from_numpy(array, kind, index) for name, array in arrays.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for spec in self.signature.outputs:
            binding.bind_output(spec.name, kind, index)
        return Bound(binding, (arrays, values))

    def _leave_room(self, input_bytes: int) -> None:
        """Open the session again with a smaller arena, where inputs have to fit below a limit beside it.

        Inputs have an arena of their own, which ONNX Runtime does not limit.
        """
        index = self._device.index
        limit = None if self._device.kind == "cpu" or active(index) else limit_bytes(index)
        if limit is None or input_bytes <= self._input_bytes:
            return
        if input_bytes >= limit:
            message = f"the inputs take {format_bytes(input_bytes)}, of {format_bytes(limit)} that are allowed"
            raise StepOutOfMemory(message, "use a smaller batch", asked_bytes=input_bytes, free_bytes=limit)
        self._opened()
        self._session = self._last = None
        gc.collect()
        set_limit(index, limit - input_bytes)
        try:
            other = self._again()
        finally:
            set_limit(index, limit)
        self._session, self._stream, self._input_bytes = other._session, other._stream, input_bytes

    def enqueue(self, bound: "Bound") -> None:
        """Run what is bound; on CUDA this returns before the kernels have finished.

        Raises:
            ModelError: the engine raised; StepOutOfMemory where memory was what it lacked.
        """
        if self._session is None:
            refuse_closed()
        try:
            self._run(bound.binding, self._options)
        except self._errors as error:
            raise _run_error(error, "failed on this input", _CHECK_INPUT) from error
        self._last = bound.binding

    def _run(self, binding: Any, options: Any) -> None:
        """Run what is bound; with options past onnxruntime's wrapper, which looks at them for 27 to 80 µs a call."""
        if options is None:
            self._session.run_with_iobinding(binding)
        else:
            self._session._sess.run_with_iobinding(binding._iobinding, options)

    def synchronize(self) -> None:
        if self._stream:
            self._stream.synchronize()

    def fetch(self) -> dict[str, Array]:
        names = (spec.name for spec in self.signature.outputs)
        return dict(zip(names, self._last.copy_outputs_to_cpu(), strict=True))

    def answer(self, values: Sequence[Array]) -> Sequence[Array]:
        """Run one whole inference; on the CPU without a binding, which would cost some 10 µs a call.

        It is run past onnxruntime's wrapper, which looks at names and types again for 3 µs.
        """
        if self._stream:
            return super().answer(values)
        try:
            feeds = {name: values[index] for index, name in self._numbered}  # dict(zip()) takes twice as long
            outputs: Sequence[Array] = self._run_arrays(self._output_names, feeds, None)
            return outputs
        except self._errors as error:
            raise _run_error(error, "failed on this input", _CHECK_INPUT) from error

    def perturb(self, feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        failures: tuple[type[Exception], ...] = (EnginesmithError, *_errors())
        if self._graph is None:
            return {}
        try:
            self._changed = self._changed or _open_changed(self._graph)
            numbers = {rounding.STEP: np.array(step, np.float32), rounding.SEED: np.array(seed, np.float32)}
            given = {spec.name: feeds[spec.name] for spec in self.signature.inputs}
            outputs = self._changed.run(self._output_names, {**given, **numbers})
        except failures:
            self._graph = None
            return {}
        return dict(zip(self._output_names, outputs, strict=True))

    def end_trace(self) -> Path:
        """Stop profiling and return the file that the events are in."""
        return Path(self._session.end_profiling())

    def close(self) -> None:
        """Free the session, its arena and its threads."""
        self._session = self._last = self._changed = None
        self._run_arrays = refuse_closed
        gc.collect()


def _open_changed(graph: Path) -> Any:
    """Open a session of a graph whose operators' results can be changed.

    Raises:
        EnginesmithError: there is none for this graph.
    """
    chosen = session_options(Device(), "disabled", memory_arena=False)
    chosen.enable_mem_reuse = False  # planned in a time that grows with the square of the nodes; 14 s for 11 000
    return open_session(graph, chosen, Device(), content=rounding.change_results(graph))


@dataclass
class Captured:
    """Keep an I/O binding whose addresses a CUDA graph holds, and the options that name the graph."""

    binding: Any
    held: Any
    options: Any
    calls: int = 0


class GraphedOnnxRuntimeSession(OnnxRuntimeSession):
    """Have the CUDA provider capture each set of feeds that is bound as a graph, and replay it from then on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._numbers = itertools.count(1)
        self._plain = _run_options(_NO_CAPTURE)

    def bind(self, feeds: Feeds) -> Captured:  # type: ignore[override]
        """Bind inputs as tensors on the device, whose addresses the graph will hold."""
        return Captured(*super().bind(feeds), _run_options(next(self._numbers)))

    def enqueue(self, bound: Captured) -> None:  # type: ignore[override]
        """Replay the graph, which the third call captures, its outputs where the second call put them.

        Raises:
            ModelError: the engine raised, or CUDA captured no graph; StepOutOfMemory where memory was lacking.
        """
        if self._session is None:
            refuse_closed()
        captured = bound.calls >= _WARM_CALLS
        if bound.calls == _WARM_CALLS:
            outputs = bound.binding.get_outputs()
            for spec, value in zip(self.signature.outputs, outputs, strict=True):
                bound.binding.bind_ortvalue_output(spec.name, value)
            bound.held = (bound.held, outputs)
        try:
            self._run(bound.binding, bound.options if captured else self._plain)
        except self._errors as error:
            failure = "captured no CUDA graph" if captured else "failed on this input"
            raise _run_error(error, failure, _WITHOUT_GRAPHS if captured else _CHECK_INPUT) from error
        bound.calls += 1
        self._last = bound.binding


def _run_options(graph: int | None = None) -> Any:
    """Make the options of a run that does not wait for the device, and captures or replays the graph of that number.

    The session's own ``synchronize`` waits, so that an event after the run is recorded as soon as all is enqueued. The
    replay of a graph waits nonetheless.
    """
    from onnxruntime import RunOptions

    options = RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    if graph is not None:
        options.add_run_config_entry("gpu_graph_id", str(graph))
    return options
