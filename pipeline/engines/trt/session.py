"""Running an engine: one execution context for each set of input shapes, all in one buffer for activations.

``enqueue`` only puts work on the session's stream: no copy, no allocation of known sizes, no waiting.
"""

import gc
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from enginesmith.pipeline.engines.base import Device, Session
from enginesmith.pipeline.engines.trt.memory import ActivationMemory, activation_memory, output_allocator
from enginesmith.pipeline.engines.trt.opening import Opened
from enginesmith.pipeline.engines.trt.options import RunOptions
from enginesmith.pipeline.errors import ModelError, SignatureError, StepOutOfMemory, UsageError
from enginesmith.pipeline.tensors import Array, Feeds, Signature

_WARM_CALLS = 1
"""Calls before a graph is captured: the first one loads and compiles kernels, which a capture cannot hold."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass
class Context:
    """An execution context at one set of shapes, and what it is set up with now."""

    native: Any
    outputs: dict[str, tuple[int, ...]]
    """Output → shape; a size of −1 where only the run decides."""
    memory_bytes: int
    generation: int = -1
    bound: "Bound | None" = None


@dataclass
class Bound:
    """Inputs and outputs on the device, and the graph that was captured for them."""

    context: Context
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    """Tensors, and allocators for outputs of unknown shape."""
    calls: int = 0
    graph: Any = None
    generation: int = -1
    """Of the activation memory that the graph was captured with."""
    held: list[Any] = field(default_factory=list)


class TensorRTSession(Session):
    """An open engine. A :meth:`sibling` shares its weights and runs beside it on a stream of its own."""

    def __init__(self, trt: Any, opened: Opened, signature: Signature, device: Device, options: RunOptions) -> None:
        import torch

        self.signature = signature
        self._trt, self._options, self._where = trt, options, device
        self._open: Opened | None = opened
        self._device = str(device)
        self._memory = activation_memory(self._device, shared=options.share_activation_memory)
        self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._contexts: dict[Shapes, Context] = {}
        self._last: Bound | None = None

    @property
    def cuda_stream(self) -> int:
        """Handle of the session's stream."""
        return int(self._stream.cuda_stream)

    @property
    def activation_memory(self) -> ActivationMemory:
        """The buffer that contexts work in."""
        return self._memory

    def sibling(self) -> "TensorRTSession":
        """Another session on the same weights, with contexts, activations and a stream of its own."""
        options = self._options.model_copy(update={"share_activation_memory": False})
        return TensorRTSession(self._trt, self._opened, self.signature, self._where, options)

    @property
    def _opened(self) -> Opened:
        if self._open is None:
            raise UsageError("the session is closed")
        return self._open

    def bind(self, feeds: Feeds) -> Bound:
        """Copy feeds to the device, and make room for the outputs, as far as their shapes are known.

        Raises:
            SignatureError: no optimisation profile takes these shapes.
        """
        import torch

        with torch.cuda.stream(self._stream):
            inputs = {
                spec.name: to_torch(feeds[spec.name]).to(self._device).contiguous() for spec in self.signature.inputs
            }
            context = self._context({name: tuple(tensor.shape) for name, tensor in inputs.items()})
            outputs = {name: self._room(name, shape) for name, shape in context.outputs.items()}
        self._stream.synchronize()
        return Bound(context, inputs, outputs)

    def _room(self, name: str, shape: tuple[int, ...]) -> Any:
        import torch

        if min(shape, default=0) < 0:
            return output_allocator(self._trt, self._device)
        dtype = torch_dtype(self._opened.engine.get_tensor_dtype(name).name)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _context(self, shapes: Mapping[str, tuple[int, ...]]) -> Context:
        """The context for these shapes; made once, as a captured graph belongs to one context."""
        engine, key = self._opened.engine, tuple(shapes.values())
        if key not in self._contexts:
            profile = _profile_for(engine, shapes)
            native = engine.create_execution_context(self._opened.config)
            if native is None:
                raise StepOutOfMemory("TensorRT made no execution context", "use a smaller batch")
            taken = native.set_optimization_profile_async(profile, self.cuda_stream)
            if not taken or not all(native.set_input_shape(name, shape) for name, shape in shapes.items()):
                raise ModelError(f"TensorRT does not take the shapes {dict(shapes)}", "the step's log says why")
            if missing := native.infer_shapes():
                raise ModelError(f"TensorRT cannot tell shapes without {', '.join(missing)}", "build the engine again")
            outputs = {spec.name: tuple(native.get_tensor_shape(spec.name)) for spec in self.signature.outputs}
            self._contexts[key] = Context(native, outputs, native.update_device_memory_size_for_shapes())
        return self._contexts[key]

    def enqueue(self, bound: Bound) -> None:
        """Put one inference on the stream.

        Raises:
            ModelError: TensorRT did not take it.
        """
        self._opened  # noqa: B018 - raises on a closed session
        self._ready(bound)
        self._last = bound
        if bound.graph is not None and bound.generation == self._memory.generation:
            import torch

            with torch.cuda.stream(self._stream):
                bound.graph.replay()
            return
        if self._captures(bound):
            self._capture(bound)
            return
        if not bound.context.native.execute_async_v3(self.cuda_stream):
            raise ModelError("TensorRT did not run this input", "the step's log says what it found")
        bound.calls += 1

    def _ready(self, bound: Bound) -> None:
        """Point the context at the activations and at what is bound, where it is not already."""
        context, native = bound.context, bound.context.native
        if context.generation != self._memory.generation or self._memory.bytes < context.memory_bytes:
            self._memory.hold(context.memory_bytes)
            native.set_device_memory(self._memory.address, self._memory.bytes)
            context.generation = self._memory.generation
        if context.bound is bound:
            return
        for name, tensor in bound.inputs.items():
            native.set_tensor_address(name, tensor.data_ptr())
        for name, output in bound.outputs.items():
            if hasattr(output, "data_ptr"):
                native.set_tensor_address(name, output.data_ptr())
            else:
                native.set_output_allocator(name, output)
        context.bound = bound

    def _captures(self, bound: Bound) -> bool:
        known = all(hasattr(output, "data_ptr") for output in bound.outputs.values())
        own = self._options.cuda_graphs and not self._opened.captures_itself
        return own and known and bound.calls >= _WARM_CALLS

    def _capture(self, bound: Bound) -> None:
        import torch

        bound.graph = torch.cuda.CUDAGraph()
        bound.generation = self._memory.generation
        with torch.cuda.stream(self._stream):
            bound.graph.capture_begin(capture_error_mode="thread_local")
            try:
                taken = bound.context.native.execute_async_v3(self.cuda_stream)
            finally:
                bound.graph.capture_end()
            if not taken:
                raise ModelError("TensorRT could not be captured as a CUDA graph", "run it without --cuda-graphs")
            bound.graph.replay()

    def synchronize(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    def fetch(self) -> dict[str, Array]:
        """Copies of the last outputs on the host."""
        if self._last is None:
            raise UsageError("nothing was run yet")
        found = {}
        for name, output in self._last.outputs.items():
            if not hasattr(output, "data_ptr"):
                dtype = torch_dtype(self._opened.engine.get_tensor_dtype(name).name)
                count = math.prod(output.shape)
                output = output.buffer[: count * dtype.itemsize].view(dtype).view(output.shape)
            found[name] = to_numpy(output)
        return found

    def close(self) -> None:
        """Free contexts, buffers and, unless a sibling still has it, the engine; keep the compiled kernels."""
        if self._open is not None:
            self._open.keep_kernels()
        self._last = None
        self._contexts.clear()  # contexts go before their engine
        self._open = None
        if not self._options.share_activation_memory:
            self._memory.free()
        gc.collect()


def _profile_for(engine: Any, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The first profile that takes all shapes.

    Raises:
        SignatureError: none does.
    """
    for index in range(engine.num_optimization_profiles):
        ranges = {name: engine.get_tensor_profile_shape(name, index) for name in shapes}
        if all(_within(shape, ranges[name]) for name, shape in shapes.items()):
            return index
    name, shape = next(iter(shapes.items()))
    low, _, high = engine.get_tensor_profile_shape(name, engine.num_optimization_profiles - 1)
    raise SignatureError(
        f"no optimisation profile takes {name!r} of shape {list(shape)}; the last one reaches from {list(low)} to "
        f"{list(high)}",
        "build the engine with a wider --shape",
    )


def _within(shape: tuple[int, ...], limits: Any) -> bool:
    low, _, high = limits
    return len(low) == len(shape) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))


def torch_dtype(name: str) -> Any:
    """torch's dtype for a TensorRT ``DataType`` by name."""
    import torch

    table = {
        "FLOAT": torch.float32,
        "HALF": torch.float16,
        "BF16": torch.bfloat16,
        "INT8": torch.int8,
        "INT32": torch.int32,
        "INT64": torch.int64,
        "BOOL": torch.bool,
        "UINT8": torch.uint8,
        "FP8": torch.float8_e4m3fn,
    }
    return table[name]


def to_torch(array: Array) -> Any:
    """A host tensor of an array; bfloat16, which numpy has by ml_dtypes only, by its bits."""
    import torch

    array = np.require(array, requirements=("C", "W"))
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Any) -> Array:
    """A copy on the host."""
    import torch

    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        bits: Array = tensor.cpu().view(torch.uint16).numpy()
        return np.array(bits.view(ml_dtypes.bfloat16))
    return np.array(tensor.cpu().numpy())
