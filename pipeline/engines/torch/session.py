"""Run PyTorch modules on a device, called op by op or replayed as a CUDA graph."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from enginesmith.pipeline.engines.base import Session
from enginesmith.pipeline.errors import EnginesmithError, ModelError, UsageError
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.oom import out_of_memory, says_out_of_memory
from enginesmith.pipeline.tensors import Array, Feeds, Signature

if TYPE_CHECKING:
    import torch

    Tensors = tuple[torch.Tensor, ...]
    Forward = Callable[..., Tensors]


_RAISED = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""What modules raise."""
_WARM_CALLS = 2
"""Calls before a graph is captured: the first loads kernels and picks algorithms, which a capture cannot hold."""
_NOT_CAPTURED = "CUDA captured no graph of this module, which raised"
_capturing = threading.Lock()
"""CUDA captures one graph at a time in a process."""


class EagerSession(Session):
    """Call a module on a device. On CUDA all work goes to one stream of its own, whichever thread it is called from."""

    def __init__(
        self,
        forward: "Forward",
        signature: Signature,
        device: Device,
        dtype: "torch.dtype | None",
        enter_thread: Callable[[], None],
    ) -> None:
        """``dtype`` is what float inputs are cast to; ``enter_thread`` makes settings of the thread that calls it."""
        import torch

        self.signature = signature
        self._inference_mode, self._set_stream = torch.inference_mode, torch.cuda.set_stream
        self._forward: Forward = forward
        self._where, self._device, self._dtype, self._enter_thread = device, str(device), dtype, enter_thread
        self._stream = torch.cuda.Stream(self._device) if device.kind == "cuda" else None  # type: ignore[no-untyped-call]
        self._outputs: Tensors = ()

    @property
    def cuda_stream(self) -> int | None:
        """Handle of the session's stream; None on the CPU."""
        return self._stream.cuda_stream if self._stream else None

    @property
    def module(self) -> Any:
        """What a call runs."""
        return self._forward

    def sibling(self) -> Self:
        """Open a session on the same module, with outputs and a stream of its own."""
        if self._forward is _closed:
            _closed()
        self._enter_thread()
        return type(self)(self._forward, self.signature, self._where, self._dtype, self._enter_thread)

    def bind(self, feeds: Feeds) -> Any:
        """Copy feeds to tensors on the device, cast where the module is, in the order of the inputs."""
        return self._inputs(feeds)

    def _streamed(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the session's stream, which transfers go to too."""
        import torch

        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def _inputs(self, feeds: Feeds) -> "Tensors":
        import torch

        tensors = []
        with self._streamed():
            for spec in self.signature.inputs:
                tensor = torch.from_numpy(np.require(feeds[spec.name], requirements=("C", "W")))
                dtype = self._dtype if tensor.is_floating_point() else None
                tensors.append(tensor.to(self._device, dtype))
        return tuple(tensors)

    def enqueue(self, bound: Any) -> None:
        """Run the module; on CUDA this returns before the kernels have finished.

        The session's stream stays the calling thread's current one: to put the one before back would cost each call
        some microseconds, and these would be counted as the module's.

        Raises:
            ModelError: the module raised; StepOutOfMemory where memory was what it lacked.
        """
        self._outputs = ()  # its memory is free for this call
        self._enter_stream()
        try:
            with self._inference_mode():
                self._outputs = self._forward(*bound)
        except _RAISED as error:
            raise _translated(error) from error

    def _enter_stream(self) -> None:
        if self._stream:
            self._set_stream(self._stream)

    def synchronize(self) -> None:
        """Wait for the stream; on the CPU there is nothing to wait for."""
        if self._stream:
            self._stream.synchronize()

    def fetch(self) -> dict[str, Array]:
        """Wait for the last outputs and copy them to the host, in the types of the signature."""
        import torch

        outputs = {}
        with self._streamed():
            for spec, tensor in zip(self.signature.outputs, self._outputs, strict=True):
                outputs[spec.name] = np.array(tensor.to("cpu", getattr(torch, spec.dtype)).numpy())
        return outputs

    def close(self) -> None:
        """Let go of the module, once what was enqueued has finished."""
        self.synchronize()
        self._forward, self._outputs = _closed, ()
        gc.collect()


@dataclass(eq=False)
class Captured:
    """Hold inputs on the device, and the graph that reads them."""

    inputs: "Tensors"
    calls: int = 0
    graph: Any = None
    outputs: "Tensors" = ()
    """Where the graph writes: in memory of its own, which stays as long as it does."""


class GraphedSession(EagerSession):
    """Capture a call as a CUDA graph, once for each ``bind``, and replay it from then on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._bound: weakref.WeakSet[Captured] = weakref.WeakSet()

    def bind(self, feeds: Feeds) -> Captured:
        """Copy feeds to tensors on the device, whose addresses the graph will hold."""
        bound = Captured(self._inputs(feeds))
        self._bound.add(bound)
        return bound

    def enqueue(self, bound: Captured) -> None:
        """Replay the graph, which the third call captures.

        Raises:
            ModelError: the module raised, or does what no graph can hold; StepOutOfMemory where memory was lacking.
        """
        if bound.graph is None:
            if bound.calls < _WARM_CALLS or self._forward is _closed:
                super().enqueue(bound.inputs)
                bound.calls += 1
                return
            self._capture(bound)
        self._enter_stream()
        bound.graph.replay()
        self._outputs = bound.outputs

    def _capture(self, bound: Captured) -> None:
        import torch

        self._outputs = ()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        self._enter_stream()
        try:
            with _capturing, torch.inference_mode():
                torch.cuda.empty_cache()  # a graph has a pool of its own: what the warm calls left would lie beside it
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    bound.outputs = self._forward(*bound.inputs)
                finally:
                    graph.capture_end()
        except _RAISED as error:
            first = error.__context__ if isinstance(error.__context__, _RAISED) else error  # then the end fails too
            raise _translated(first, _NOT_CAPTURED, "run it without CUDA graphs") from error
        bound.graph = graph

    def close(self) -> None:
        """Let go of the module and of all graphs, even where someone still has what was bound."""
        self.synchronize()
        for bound in self._bound:
            bound.graph, bound.outputs = None, ()
        super().close()


def _closed(*bound: Any) -> "Tensors":
    raise UsageError("the session is closed")


def _translated(
    error: BaseException, what: str = "the module raised", remedy: str = "run it alone with these inputs to see where"
) -> EnginesmithError:
    if says_out_of_memory(str(error)):
        return out_of_memory(str(error))
    text = next(iter(str(error).strip().splitlines()), "no message")
    return ModelError(f"{what} {type(error).__name__}: {text}", remedy)
