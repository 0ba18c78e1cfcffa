"""Open engines: weights in torch's memory, contexts without memory of their own, compiled kernels kept.

TensorRT gets its device memory from torch's caching allocator, so that one instrument counts everything. The allocator
reuses freed memory in the order of the stream it was taken for, which need not be waited for; so each buffer is taken
for the stream that works on it.
"""

import functools
import logging
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginesmith.pipeline.artifact import Artifact, Effect, file_digest, write_whole
from enginesmith.pipeline.engines import cuda_allocator
from enginesmith.pipeline.engines.cuda_allocator import (
    ACTIVATIONS,
    OUTPUTS,
    WEIGHTS,
    WORKSPACE,
    CudaAllocationTracker,
    TorchMemory,
)
from enginesmith.pipeline.engines.tensorrt import manifest
from enginesmith.pipeline.engines.tensorrt.build_log import BuildLog, RuntimeLog, listening, logger
from enginesmith.pipeline.engines.tensorrt.manifest import EngineManifest
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions, SessionOptions
from enginesmith.pipeline.engines.tensorrt.parser import DTYPES, load_plugins
from enginesmith.pipeline.engines.tensorrt.versions import Capabilities, module
from enginesmith.pipeline.errors import BuilderFailed, MissingCapability, ModelError, SignatureError, UsageError
from enginesmith.pipeline.store.address import default_address
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.nvidia import cuda_device, driver

_log = logging.getLogger(__name__)
_KERNELS = "kernels"
"""Folder below the store's root for kernels that were compiled at a first run."""
_FLAGS_BELOW = 1 << 12
"""Allocation flags are small numbers, handles of streams are addresses."""
_SAME = "give a graph of the same architecture, exported and simplified the same way"


class ActivationMemory:
    """Keep the buffer that execution contexts work in, and the stream that puts them one after another.

    It grows to the largest need. Sessions that share it share the stream, so that none runs into another's activations.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._device = device
        self._buffer: Any = None
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.users = 0
        self.generation = 0
        """Goes up whenever the buffer moves: contexts have to be told, and captured graphs are void."""

    @property
    def bytes(self) -> int:
        """Size of the buffer; 0 while there is none."""
        return 0 if self._buffer is None else int(self._buffer.numel())

    @property
    def address(self) -> int:
        """Device address of the buffer; 0 while there is none."""
        return 0 if self._buffer is None else int(self._buffer.data_ptr())

    def reserve(self, size: int) -> None:
        """Make sure that there are ``size`` bytes; what was in the buffer is lost."""
        if size <= self.bytes:
            return
        import torch

        self._buffer, self.generation = None, self.generation + 1  # freed first: the larger one may take its place
        with torch.cuda.stream(self.stream):
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        cuda_allocator.follow(self._buffer, ACTIVATIONS)

    def leave(self) -> None:
        """Count one session less that works here; the last one frees the buffer."""
        self.users -= 1
        if not self.users:
            self._buffer, self.generation = None, self.generation + 1
            if _shared.get(self._device) is self:
                del _shared[self._device]


_shared: dict[str, ActivationMemory] = {}


def activation_memory(device: str, *, shared: bool) -> ActivationMemory:
    """Get a buffer for one session, or the one that sharing sessions of this process have; to be left in the end."""
    memory = (_shared.get(device) if shared else None) or ActivationMemory(device)
    if shared:
        _shared[device] = memory
    memory.users += 1
    return memory


def ledger_of(device: int) -> CudaAllocationTracker:
    """Get the ledger that counts the device now, else a new one: memory is given back to the ledger it came from."""
    return cuda_allocator.active(device) or CudaAllocationTracker(TorchMemory(device))


def allocator(trt: Any, ledger: CudaAllocationTracker, tag: str = WORKSPACE, *, waits_for: int | None = None) -> Any:
    """Make a GPU allocator for TensorRT that takes its memory through a ledger, under its attribute ``tag``.

    With ``waits_for`` it waits for that device before it gives memory back, to the device itself, as ``cudaFree`` does:
    for the builder, which works on streams of its own, and leaves out kernels for which it sees too little free memory.
    """
    import torch

    class LedgerAllocator(trt.IGpuAsyncAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IGpuAsyncAllocator.__init__(self)
            self.tag = tag

        def allocate(self, size: int, alignment: int, flags: int) -> int:
            return self.allocate_async(size, alignment, 0, 0)

        def deallocate(self, memory: int) -> bool:
            return self.deallocate_async(memory, 0)

        def reallocate(self, address: int, alignment: int, new_size: int) -> int:
            return 0  # not done in place: the caller allocates and copies

        def allocate_async(self, size: int, alignment: int, first: int, second: int) -> int:
            """Allocate; stream and flags come in either order (the docstring says one, the binding does the other)."""
            larger = max(first, second)  # the handle of a stream, or 0 for the default stream
            return ledger.allocate(size, larger if larger >= _FLAGS_BELOW else 0, self.tag)

        def deallocate_async(self, memory: int, stream: int) -> bool:
            """Give memory back, and tell if it was this allocator's; no memory is nothing to give back."""
            waits = memory and waits_for is not None
            if waits:
                torch.cuda.synchronize(waits_for)  # a thread of TensorRT's may have another device as its current one
            freed = not memory or ledger.free(memory)
            if waits:
                torch.cuda.empty_cache()
            return freed

    return LedgerAllocator()


@dataclass(eq=False)
class Room:
    """Keep the memory of an output whose shape only the run decides, and that shape."""

    buffer: Any = None
    shape: tuple[int, ...] = ()


def output_allocator(trt: Any, device: str, stream: Any) -> Any:
    """Make an allocator for an output whose shape only the run decides: it asks for memory, then tells the shape.

    A context keeps every allocator that it is given until its end, so each context has one for each output, which is
    pointed at the :class:`Room` of what is bound. Memory is asked for at the first run, and when it is too small.
    """
    import torch

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.room = Room()

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            return self.reallocate_output_async(tensor_name, memory, size, alignment, 0)

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, queue: int) -> int:
            room = self.room
            if room.buffer is None or room.buffer.numel() < size:
                room.buffer = None
                try:
                    with torch.cuda.stream(stream):
                        room.buffer = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
                except torch.OutOfMemoryError:
                    return 0
                cuda_allocator.follow(room.buffer, OUTPUTS)
            return int(room.buffer.data_ptr())

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self.room.shape = tuple(shape)

    return OutputAllocator()


@functools.cache
def _logger(trt: Any) -> tuple[RuntimeLog, Any]:
    """Make the one log for all runtimes of a process, which share a logger."""
    log = RuntimeLog()
    return log, logger(trt, log)


@dataclass(eq=False)
class Opened:
    """Keep an engine with all that has to live as long as it does. Each session that uses it leaves it in the end."""

    engine: Any
    runtime: Any
    allocator: Any
    config: Any
    """The argument of new contexts: a runtime configuration, or only the strategy where that is all there is to say."""
    log: RuntimeLog
    captures_itself: bool
    """True if TensorRT makes and replays CUDA graphs on its own."""
    streams: bool = False
    """True if weights come from the host while it runs."""
    temporary: Any = None
    """The allocator that contexts ask for memory whose size only the run tells; None leaves it to the runtime's."""
    cache: Any = None
    cache_file: Path | None = None
    cached_bytes: int = 0
    """Size of the kernels that were taken over from an earlier run, so that none is compiled for shapes it had."""
    users: int = 0

    def leave(self) -> None:
        """Count one user less; the last one keeps compiled kernels and frees all, in the order that TensorRT needs."""
        self.users -= 1
        if self.users:
            return
        if self.cache is not None and self.cache_file is not None:
            data = bytes(self.cache.serialize() or b"")
            try:
                if len(data) > self.cached_bytes:
                    write_whole(self.cache_file, data)
            except OSError as error:  # they are compiled again then
                _log.warning("compiled kernels were not kept: %s", error)
        self.config = self.cache = None
        self.engine = None
        self.runtime = self.allocator = self.temporary = None


def open_engine(
    trt: Any,
    path: Path,
    manifest: EngineManifest,
    known: Capabilities,
    device: Device,
    allowed: BuildOptions,
    options: SessionOptions,
) -> Opened:
    """Deserialize an engine whose manifest was checked.

    ``allowed`` says which plugin libraries and whether host code may be run: the user says so, never the file.

    Raises:
        MissingCapability: the engine needs host code or plugins that were not allowed.
        ModelError: TensorRT does not take the file, or it takes inputs that no feeds can be.
        StepOutOfMemory: the weights do not fit.
        UsageError: a streaming budget for an engine that streams nothing, or that does not go with CUDA graphs.
    """
    import torch

    torch.cuda.set_device(device.index)
    torch.cuda.synchronize()  # TensorRT writes the weights on a stream that torch knows nothing of
    log, sink = _logger(trt)
    before = log.seen
    runtime = trt.Runtime(sink)
    _validate_allowed(manifest, allowed)
    runtime.engine_host_code_allowed = allowed.host_code
    load_plugins(trt, allowed.plugins, sink, known)
    ledger = ledger_of(device.index)
    taken = allocator(trt, ledger, WEIGHTS)
    runtime.gpu_allocator = taken
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise log.failure(f"TensorRT cannot load {path.name}", "build it again on this machine", before)
    _validate_inputs(trt, engine, manifest)
    streams = _stream_weights(engine, options)
    taken.tag = WORKSPACE  # the weights are in
    managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    config = engine.create_runtime_config() if known.runtime_cache else managed
    opened = Opened(engine, runtime, taken, config, log, captures_itself=known.captures_graphs, streams=streams)
    opened.temporary = allocator(trt, ledger, WORKSPACE)
    if known.runtime_cache:
        _configure(trt, config, options)
        if options.kernel_cache:
            _attach_kernels(opened, manifest, device)
    return opened


def _configure(trt: Any, config: Any, options: SessionOptions) -> None:
    """Configure contexts to compile at once: kernels compiled in the background would change the speed meanwhile."""
    config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
    graphs = trt.CudaGraphStrategy
    config.cuda_graph_strategy = graphs.WHOLE_GRAPH_CAPTURE if options.cuda_graphs else graphs.DISABLED


def _validate_allowed(manifest: EngineManifest, allowed: BuildOptions) -> None:
    if manifest.options.host_code and not allowed.host_code:
        raise MissingCapability("the engine brings its own host code along", "if you trust it, allow it: --host-code")
    libraries = {Path(plugin).name for plugin in allowed.plugins}
    if missing := ", ".join(name for name in manifest.options.plugins if Path(name).name not in libraries):
        message = f"the engine was built with the plugins {missing}"
        raise MissingCapability(message, "name the library: --plugins FILE.so")


def _validate_inputs(trt: Any, engine: Any, manifest: EngineManifest) -> None:
    """Refuse inputs that TensorRT has in another dtype than the manifest: it would read other bytes than copied.

    Raises:
        ModelError: the two differ, or the values of an input decide shapes, which takes another kind of profile.
    """
    for spec in manifest.signature.inputs:
        name = engine.get_tensor_dtype(spec.name).name
        if DTYPES.get(name) != spec.dtype:
            raise ModelError(f"the engine's input {spec.name!r} is {name}, not {spec.dtype}", "build the engine again")
        if engine.get_tensor_location(spec.name) == trt.TensorLocation.HOST:
            message = f"the values of the input {spec.name!r} decide shapes, which is not supported"
            raise ModelError(message, "make it a constant of the model, or take the size from another input's shape")


def _stream_weights(engine: Any, options: SessionOptions) -> bool:
    """Set the budget, before there are contexts, and tell if any weights are streamed then."""
    budget = options.weight_streaming_budget
    if budget is None:
        return False
    whole = engine.streamable_weights_size
    if not whole:
        message = "the engine streams no weights, and a weight streaming budget was given"
        raise UsageError(message, "build it with --weight-streaming")
    if budget < whole and options.cuda_graphs:
        message = "weights that are streamed while the engine runs cannot be part of a CUDA graph"
        raise UsageError(message, f"do not use CUDA graphs, or give a budget of {whole} bytes, which is all of them")
    engine.weight_streaming_budget_v2 = min(budget, whole)  # it logs a failure, and keeps what it had
    if engine.weight_streaming_budget_v2 != min(budget, whole):
        raise UsageError(f"TensorRT does not take the weight streaming budget {budget}", "give a larger one")
    return bool(budget < whole)


def _attach_kernels(opened: Opened, manifest: EngineManifest, device: Device) -> None:
    """Take over the kernels of an earlier run of this engine on this device and driver; TensorRT checks them too."""
    here = cuda_device(device.index)
    model = here.name.replace(" ", "_").replace("/", "_") if here else "unknown"
    name = f"{manifest.sha256[:24]}-{model}-{driver().version}.cache"
    opened.cache_file = default_address().folder / _KERNELS / name
    opened.cache = opened.config.create_runtime_cache()
    try:
        stored = opened.cache_file.read_bytes()
    except OSError:
        stored = b""
    if stored and opened.cache.deserialize(stored):
        opened.cached_bytes = len(stored)
    if not opened.config.set_runtime_cache(opened.cache):
        opened.cache, opened.cached_bytes = None, 0


def open_context(opened: Opened, shapes: Mapping[str, tuple[int, ...]], stream: int) -> tuple[Any, int, int]:
    """Make an execution context; give bytes of its activations at these shapes, and at the profile's largest shape.

    Raises:
        SignatureError: no optimization profile takes the shapes.
        ModelError: TensorRT does not; StepOutOfMemory where memory was what it lacked.
    """
    engine, log = opened.engine, opened.log
    before, remedy = log.seen, "build the engine again, on this machine"
    profile = profile_for(engine, shapes)
    native = engine.create_execution_context(opened.config)
    if native is None:
        raise log.failure("TensorRT made no execution context", remedy, before)
    if opened.temporary is not None:
        native.temporary_allocator = opened.temporary
    taken = native.set_optimization_profile_async(profile, stream)
    if not taken or not all(native.set_input_shape(name, shape) for name, shape in shapes.items()):
        raise log.failure(f"TensorRT does not take the shapes {dict(shapes)}", remedy, before)
    try:
        missing = native.infer_shapes()
    except RuntimeError as error:
        raise log.failure(f"TensorRT finds no output shapes for {dict(shapes)}", remedy, before) from error
    if missing:
        raise ModelError(f"TensorRT cannot tell shapes without {', '.join(missing)}", remedy)
    most = int(engine.get_device_memory_size_for_profile_v2(profile))
    if opened.streams:  # the figure for shapes is not said to have the scratch memory that streaming takes
        return native, most, most
    return native, int(native.update_device_memory_size_for_shapes()) or most, most  # 0 is its word for an error


def profile_for(engine: Any, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Find the first profile that takes all shapes.

    Raises:
        SignatureError: none does.
    """
    misfit = next(iter(shapes), "")
    limits: Any = ((), (), ())
    for index in range(engine.num_optimization_profiles):
        for name, shape in shapes.items():
            low, _, high = ranges = engine.get_tensor_profile_shape(name, index)
            if len(low) != len(shape) or not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
                misfit, limits = name, ranges
                break
        else:
            return index
    message = f"no optimization profile takes {misfit!r} of shape {list(shapes.get(misfit, ()))}"
    reach = f"the last one reaches from {list(limits[0])} to {list(limits[2])}"
    raise SignatureError(f"{message}; {reach}", "build the engine with a wider --shape")


def refit(engine: Artifact, graph: Artifact, file: Path, device: Device) -> Effect:
    """Write ``engine`` with the weights of ``graph`` to ``file``, and its manifest beside it.

    The architecture stays; a stripped engine gets its first weights this way.

    Raises:
        MissingCapability: this machine cannot run the engine, and so not open it.
        UsageError: the engine was not built for it.
        SignatureError: the graph has other inputs or outputs than the engine.
        BuilderFailed: weights of the engine are missing in the graph, or TensorRT refuses them.
    """
    import torch

    before = manifest.read(engine.path)
    if not (before.options.refit or before.options.strip_plan):
        raise UsageError("the engine was not built to be refitted", "build it with --refit or --strip-plan")
    if graph.signature != before.signature:
        message = "the graph has other inputs or outputs than the engine was built for"
        raise SignatureError(message, "build a new engine from it")
    manifest.validate_machine(before, device.index)
    trt, log = module(before.engine), BuildLog()
    torch.cuda.set_device(device.index)
    with listening(trt, log) as sink:
        runtime = trt.Runtime(sink)
        built = runtime.deserialize_cuda_engine(engine.path.read_bytes())
        if built is None:
            raise BuilderFailed("TensorRT cannot open the engine that is to be refitted", "build it again here")
        _set_weights(trt, built, sink, graph.path, log)
        serialization = built.create_serialization_config()
        serialization.clear_flag(trt.SerializationFlag.EXCLUDE_WEIGHTS)  # left set, a stripped engine answers zeros
        file.write_bytes(built.serialize_with_config(serialization))
    changed = {
        "sha256": file_digest(file),
        "bytes": file.stat().st_size,
        "model_sha256": graph.sha256,
        "options": before.options.model_copy(update={"strip_plan": False, "refit": False}),
        "notes": (*before.notes, f"refitted; the engine was built from {before.model_sha256[:16]}"),
    }
    record = before.model_copy(update=changed)
    manifest.path_beside(file).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    file.with_name(file.name + ".log").write_text(log.text, encoding="utf-8")
    return Effect(file=file.name, summary="refitted with the weights of the graph", signature=graph.signature)


def _set_weights(trt: Any, engine: Any, sink: Any, graph: Path, log: BuildLog) -> None:
    refitter = trt.Refitter(engine, sink)
    parser = trt.OnnxParserRefitter(refitter, sink)
    if not parser.refit_from_file(str(graph)):
        reason = parser.get_error(0).desc() if parser.num_errors else "nothing"
        raise BuilderFailed(f"TensorRT does not take the graph's weights, and said: {reason}", _SAME)
    if missing := refitter.get_missing_weights():
        shown = ", ".join(str(name) for name in list(missing)[:4])
        raise BuilderFailed(f"the graph lacks weights of the engine, {len(missing)} in all: {shown}", _SAME)
    if not refitter.refit_cuda_engine():
        raise BuilderFailed(f"refitting failed: {log.errors[0] if log.errors else 'no reason was given'}", _SAME)
