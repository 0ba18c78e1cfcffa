"""Run engines: one execution context for each set of input shapes, all in one buffer for activations.

``bind`` makes everything ready, memory included. ``enqueue`` then only puts work on the session's stream: no copy, no
allocation of known sizes, no waiting.

Profiles are the times per layer that the execution context reports (``IProfiler``). The names that it reports are those
of the inspector's dump, whose metadata says which ONNX nodes are in a layer. While a profiler is attached,
``execute_async_v3`` waits for the layers and reports them before it returns (``enqueue_emits_profile``, on by default).
"""

import contextlib
import gc
import math
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from enginesmith.pipeline.engines import cuda_allocator
from enginesmith.pipeline.engines.base import Session, refuse_closed
from enginesmith.pipeline.engines.onnxruntime.profiler import Provenance
from enginesmith.pipeline.engines.profiling import OperatorTime, Origin, Profiled, ProfileRequest, Tally
from enginesmith.pipeline.engines.tensorrt.layers import Layer, read_layers
from enginesmith.pipeline.engines.tensorrt.loader import Opened, Room, activation_memory, open_context, output_allocator
from enginesmith.pipeline.engines.tensorrt.options import SessionOptions
from enginesmith.pipeline.engines.tensorrt.parser import DTYPES
from enginesmith.pipeline.errors import MissingCapability, ModelError, StepOutOfMemory, UsageError
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.oom import out_of_memory
from enginesmith.pipeline.tensors import Array, Feeds, Signature

_WARM_CALLS = 1
"""Calls before a graph is captured: the first one loads and compiles kernels, which a capture cannot hold."""
_MOST_CONTEXTS = 32
"""Contexts that are kept for shapes to come back; each takes memory of the host, and some of the device."""
_WITHOUT_GRAPHS = "run it without CUDA graphs: --cuda-graphs off"
_WORDS = re.compile(r"\s\+\s|[\s+,{}\[\]]|_myl\d+_\d+$")
"""Between the names of nodes in the name of a layer."""
_REFORMAT = "Reformatting CopyNode"

Shapes = tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Context:
    """Keep an execution context at one set of shapes, and what it is set up with now."""

    native: Any
    outputs: dict[str, tuple[int, ...]]
    """Output → shape; a size of −1 where only the run decides."""
    allocators: dict[str, Any]
    """Output of such a shape → where TensorRT asks for its memory."""
    memory_bytes: int
    most_bytes: int
    generation: int = -1
    """Generation of the activation memory that it works in."""
    bound: "Bound | None" = None


@dataclass(eq=False)
class Bound:
    """Keep inputs and outputs on the device, and the graph that was captured for them."""

    context: Context
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    """Tensors, and a :class:`Room` for each output of unknown shape."""
    calls: int = 0
    """Since the activation memory last moved."""
    graph: Any = None
    generation: int = -1
    """Generation of the activation memory that ``calls`` and ``graph`` hold for."""


class TensorRTSession(Session):
    """Run an open engine. A :meth:`sibling` shares its weights and runs beside it on a stream of its own."""

    def __init__(self, trt: Any, opened: Opened, signature: Signature, device: Device, options: SessionOptions) -> None:
        self.signature = signature
        self._trt, self._options, self._where, self._device = trt, options, device, str(device)
        self._nothing: Any = torch.empty(1, dtype=torch.uint8, device=self._device)
        """Stands in for tensors without elements, whose address has to be one nonetheless."""
        self.activation_memory = activation_memory(self._device, shared=options.share_activation_memory)
        self._stream, self._set_stream = self.activation_memory.stream, torch.cuda.set_stream
        self._handle = int(self._stream.cuda_stream)
        self._by_graph = options.cuda_graphs and not opened.captures_itself
        self._contexts: dict[Shapes, Context] = {}
        self._all: weakref.WeakSet[Context] = weakref.WeakSet()
        self._last: Bound | None = None
        self._open: Opened | None = opened
        opened.users += 1

    @property
    def cuda_stream(self) -> int:
        return self._handle

    @property
    def first_call_note(self) -> str:
        if self._opened.cache is None:
            return ""
        return "took over kernels of an earlier run" if self._opened.cached_bytes else "compiled its kernels"

    @property
    def engine(self) -> Any:
        """The engine itself; UsageError on a closed session."""
        return self._opened.engine

    def sibling(self) -> "TensorRTSession":
        options = self._options.model_copy(update={"share_activation_memory": False})
        return TensorRTSession(self._trt, self._opened, self.signature, self._where, options)

    @property
    def _opened(self) -> Opened:
        if self._open is None:
            refuse_closed()
        return self._open

    def bind(self, feeds: Feeds) -> Bound:
        """Copy feeds to the device, and make room for activations, and for outputs whose shapes are known.

        Raises:
            SignatureError: no optimization profile takes these shapes.
            ModelError: TensorRT does not, or outputs of unknown shape were to be part of a CUDA graph.
            StepOutOfMemory: there is not enough memory on the device.
        """
        self._opened  # noqa: B018 - raises on a closed session
        with torch.cuda.stream(self._stream), _out_of_memory():
            inputs = {spec.name: to_torch(feeds[spec.name]).to(self._device) for spec in self.signature.inputs}
            context = self._context(tuple(tuple(tensor.shape) for tensor in inputs.values()))
            outputs = {name: self._room(name, shape) for name, shape in context.outputs.items()}
            for tensor in inputs.values():
                cuda_allocator.follow(tensor, cuda_allocator.TRANSFERS)
        self._stream.synchronize()
        return Bound(context, inputs, outputs)

    def _room(self, name: str, shape: tuple[int, ...]) -> Any:
        if -1 in shape:
            return Room()
        engine = self._opened.engine
        on_host = engine.get_tensor_location(name) == self._trt.TensorLocation.HOST
        dtype = torch_dtype(engine.get_tensor_dtype(name).name)
        tensor = torch.empty(shape, dtype=dtype, device="cpu" if on_host else self._device)
        if not on_host:
            cuda_allocator.follow(tensor, cuda_allocator.OUTPUTS)
        return tensor

    def _context(self, shapes: Shapes) -> Context:
        """Get the context for these shapes, made once, as a captured graph belongs to one context."""
        context = self._contexts.pop(shapes, None)
        if context is None:
            if len(self._contexts) >= _MOST_CONTEXTS:  # the one not bound for longest goes; its Bound still can be run
                self._stream.synchronize()
                self._contexts.pop(next(iter(self._contexts))).bound = None
            names = (spec.name for spec in self.signature.inputs)
            native, size, most = open_context(self._opened, dict(zip(names, shapes, strict=True)), self._handle)
            outputs = {spec.name: tuple(native.get_tensor_shape(spec.name)) for spec in self.signature.outputs}
            unknown = [name for name, shape in outputs.items() if -1 in shape]
            if unknown and self._by_graph:
                message = (
                    f"only the run decides on the shape of the output {unknown[0]!r}, which a CUDA graph cannot hold"
                )
                raise ModelError(message, _WITHOUT_GRAPHS)
            allocators = {name: output_allocator(self._trt, self._device, self._stream) for name in unknown}
            for name, allocator in allocators.items():
                native.set_output_allocator(name, allocator)
            context = Context(native, outputs, allocators, size, most)
            self._all.add(context)
        self._contexts[shapes] = context  # as the latest one
        self._place(context)
        return context

    def _place(self, context: Context) -> None:
        """Have the context work in the activation memory as it is now.

        Where TensorRT does not take as little as it said these shapes need, it is given what its profile needs.
        """
        memory, log = self.activation_memory, self._opened.log
        if context.generation == memory.generation and memory.bytes >= context.memory_bytes:
            return
        for size in (context.memory_bytes, context.most_bytes):
            before = log.seen
            memory.reserve(size)
            context.native.set_device_memory(memory.address, memory.bytes)
            context.memory_bytes = size
            if log.seen == before:
                break
        context.generation = memory.generation

    def enqueue(self, bound: Bound) -> None:
        """Put one inference on the stream.

        The session's stream and device stay the calling thread's current ones: to put those before back would cost
        each call some microseconds, and these would be counted as the engine's.

        Raises:
            ModelError: TensorRT did not take it; StepOutOfMemory where memory was what it lacked.
        """
        self._opened  # noqa: B018 - raises on a closed session
        self._set_stream(self._stream)
        generation = self.activation_memory.generation
        if bound.graph is not None and bound.generation == generation:
            self._last = bound
            bound.graph.replay()
            return
        self._ready(bound)
        if self._by_graph and bound.calls >= _WARM_CALLS:
            self._capture(bound)
        else:
            self._execute(bound)
            bound.calls += 1
        self._last = bound

    def _execute(self, bound: Bound) -> None:
        """Call the context; once more with its profile's activation memory, where less was not enough."""
        context, log = bound.context, self._opened.log
        while True:
            before = log.seen
            if context.native.execute_async_v3(self._handle):
                return
            error = log.failure("TensorRT did not run this input", "build the engine again", before)
            if isinstance(error, StepOutOfMemory) or context.memory_bytes >= context.most_bytes:
                raise error
            context.memory_bytes, context.generation = context.most_bytes, -1
            self._ready(bound)

    def _ready(self, bound: Bound) -> None:
        """Point the context at the activations and at what is bound, where it is not already."""
        context, native = bound.context, bound.context.native
        if context.generation != self.activation_memory.generation:  # another session or shape moved the activations
            with _out_of_memory():
                self._place(context)
        if bound.generation != self.activation_memory.generation:
            bound.graph, bound.calls, bound.generation = None, 0, self.activation_memory.generation
        if context.bound is bound:
            return
        context.bound = None
        for name, tensor in (bound.inputs | bound.outputs).items():
            if isinstance(tensor, Room):
                context.allocators[name].room = tensor
            elif not native.set_tensor_address(name, tensor.data_ptr() or self._nothing.data_ptr()):
                raise ModelError(f"TensorRT does not take the memory of {name!r}", "build the engine again")
        context.bound = bound

    def _capture(self, bound: Bound) -> None:
        """Capture one call as a graph, and run that; a capture that fails leaves the stream as it was."""
        graph, taken, log = torch.cuda.CUDAGraph(), False, self._opened.log
        before = log.seen
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                taken = bound.context.native.execute_async_v3(self._handle)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            raise ModelError(f"CUDA captured no graph of this engine: {error}", _WITHOUT_GRAPHS) from error
        if not taken:
            raise log.failure("TensorRT could not be captured as a CUDA graph", _WITHOUT_GRAPHS, before)
        bound.graph = graph
        graph.replay()

    def synchronize(self) -> None:
        self._stream.synchronize()

    def answer(self, values: Sequence[Array]) -> Sequence[Array]:
        with torch.cuda.stream(self._stream):  # which puts the thread's own back
            return super().answer(values)

    def fetch(self) -> dict[str, Array]:
        engine = self._opened.engine
        if self._last is None:
            raise UsageError("nothing was run yet")
        self._stream.synchronize()
        outputs = {}
        with torch.cuda.stream(self._stream):
            for name, output in self._last.outputs.items():
                if isinstance(output, Room):  # the part of its buffer that holds the output
                    count, dtype = math.prod(output.shape), torch_dtype(engine.get_tensor_dtype(name).name)
                    buffer = output.buffer if count else torch.empty(0, dtype=torch.uint8)
                    output = buffer[: count * dtype.itemsize].view(dtype).view(output.shape)
                outputs[name] = to_numpy(output)
        return outputs

    def close(self) -> None:
        """Free contexts, buffers and, unless a sibling still has it, the engine; keep the compiled kernels."""
        if self._open is None:
            return
        opened, self._open = self._open, None
        self._stream.synchronize()
        with torch.cuda.device(self._where.index):
            for context in self._all:  # they go before their engine, even where someone still has a Bound
                context.native = context.bound = None
                context.allocators.clear()
            self._contexts.clear()
            self._last = self._nothing = None
            self.activation_memory.leave()
            opened.leave()
            gc.collect()


@contextlib.contextmanager
def _out_of_memory() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(str(error)) from error


def torch_dtype(name: str) -> Any:
    """Look up torch's dtype for a TensorRT ``DataType`` by name.

    Raises:
        ModelError: one that no host array can have.
    """
    if name not in DTYPES:
        raise ModelError(f"an output is {name}, which no array can hold", "cast it inside the graph, to float32")
    return getattr(torch, DTYPES[name])


def to_torch(array: Array) -> Any:
    """Make a host tensor of an array; bfloat16, which numpy has by ml_dtypes only, by its bits."""
    array = np.require(array, requirements=("C", "W"))
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Any) -> Array:
    """Copy a tensor to a host array."""
    host = tensor.cpu() if tensor.is_cuda else tensor.clone()
    if host.dtype == torch.bfloat16:
        import ml_dtypes

        return np.asarray(host.view(torch.uint16)).view(ml_dtypes.bfloat16)
    return np.asarray(host)


def profile(trt: Any, session: TensorRTSession, request: ProfileRequest, notes: tuple[str, ...]) -> Profiled:
    """Profile an open session that captures no CUDA graph.

    Raises:
        MissingCapability: TensorRT reported no layer.
    """

    class Reporter(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.tally = Tally()

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.tally.add(layer_name, ms / 1e3)

    bound: Any = session.warm_up(request.feeds)
    native, reporter = bound.context.native, Reporter()
    inspector = session.engine.create_engine_inspector()
    inspector.execution_context = native
    dump = str(inspector.get_engine_information(trt.LayerInformationFormat.ONELINE))
    layers = {layer.name: layer for layer in read_layers(dump)}
    native.profiler = reporter
    for _ in range(request.calls):
        reporter.tally.begin()
        session.enqueue(bound)
        session.synchronize()
    times = reporter.tally.medians()
    if not times:
        remedy = "build the engine again: it may be without profiling information"
        raise MissingCapability("TensorRT reported no time of any layer", remedy)
    known = Provenance(request.graph) if request.graph else None
    return Profiled(
        operators=tuple(_operator(name, layers, known, *figures) for name, figures in times.items()),
        source="TensorRT's IProfiler",
        call_seconds=None,
        notes=("layers are timed one after another, and launching them is not in it", *notes),
    )


def _operator(
    name: str, layers: Mapping[str, Layer], known: Provenance | None, seconds: float, calls: int
) -> OperatorTime:
    layer = layers.get(name)
    moves = layer.moves if layer else name.startswith(_REFORMAT)
    light = bool(layer and layer.light and not moves)
    nodes = (layer and layer.nodes) or _WORDS.split(name)  # of the metadata, else those in the layer's own name
    origin = known.named(nodes, light=light) if known else Origin()
    if moves:
        origin = Origin(modules=origin.modules, converts=True)
    precision = (layer.precision or "") if layer and not origin.converts else ""
    kind = layer.kind if layer else name
    return OperatorTime(name=name, operator=kind, origin=origin, precision=precision, seconds=seconds, calls=calls)
