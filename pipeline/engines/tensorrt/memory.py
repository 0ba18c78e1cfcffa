"""Give TensorRT its device memory from torch's caching allocator, so that one instrument counts everything.

The allocator reuses freed memory in the order of the stream it was taken for, which need not be waited for. So each
buffer is taken for the stream that works on it.
"""

from dataclasses import dataclass
from typing import Any

from enginesmith.pipeline.engines import cuda_allocator
from enginesmith.pipeline.engines.cuda_allocator import (
    ACTIVATIONS,
    OUTPUTS,
    WORKSPACE,
    CudaAllocationTracker,
    TorchMemory,
    active,
)

_FLAGS_BELOW = 1 << 12
"""Allocation flags are small numbers, handles of streams are addresses."""


class ActivationMemory:
    """Hold the buffer that execution contexts work in, and the stream that puts them one after another.

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
        """Bytes that are held."""
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

        self._free()  # first, so that the larger one may take its place
        with torch.cuda.stream(self.stream):
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        cuda_allocator.follow(self._buffer, ACTIVATIONS, device_index(self._device))

    def leave(self) -> None:
        """Count one session less that works here; the last one frees the buffer."""
        self.users -= 1
        if not self.users:
            self._free()
            if _shared.get(self._device) is self:
                del _shared[self._device]

    def _free(self) -> None:
        self._buffer = None
        self.generation += 1


_shared: dict[str, ActivationMemory] = {}


def activation_memory(device: str, *, shared: bool) -> ActivationMemory:
    """Get a buffer for one session, or the one that sharing sessions of this process have; to be left in the end."""
    memory = _shared.get(device) if shared else None
    if memory is None:
        memory = ActivationMemory(device)
        if shared:
            _shared[device] = memory
    memory.users += 1
    return memory


def device_index(device: str) -> int:
    """Parse the index of a device: 1 for ``cuda:1``."""
    import torch

    return torch.device(device).index or 0


def ledger_of(device: int) -> CudaAllocationTracker:
    """Get the ledger that counts the device now, else a new one: memory is given back to the ledger it came from."""
    return active(device) or CudaAllocationTracker(TorchMemory(device))


def allocator(trt: Any, ledger: CudaAllocationTracker, tag: str = WORKSPACE, *, waits: bool = False) -> Any:
    """Make a GPU allocator for TensorRT that takes its memory through a ledger, under its attribute ``tag``.

    With ``waits`` it waits for the device before it gives memory back, as ``cudaFree`` does: for the builder, which
    works on streams of its own.
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
            return ledger.allocate(size, _stream(first, second), self.tag)

        def deallocate_async(self, memory: int, stream: int) -> bool:
            """Give memory back, and tell if it was this allocator's; no memory is nothing to give back."""
            if memory and waits:
                torch.cuda.synchronize()
            return not memory or ledger.free(memory)

    return LedgerAllocator()


def _stream(first: int, second: int) -> int:
    """Choose the handle among a stream and flags: a pointer, or 0 for the default stream."""
    larger = max(first, second)
    return larger if larger >= _FLAGS_BELOW else 0


@dataclass(eq=False)
class Room:
    """Hold the memory of an output whose shape only the run decides, and that shape."""

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
                cuda_allocator.follow(room.buffer, OUTPUTS, device_index(device))
            return int(room.buffer.data_ptr())

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self.room.shape = tuple(shape)

    return OutputAllocator()
