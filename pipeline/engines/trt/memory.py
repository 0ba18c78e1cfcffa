"""Device memory of sessions, all of it from torch's caching allocator, so that one instrument counts everything."""

from typing import Any

_FLAGS_BELOW = 1 << 12
"""Allocation flags are small numbers, handles of streams are addresses."""


class ActivationMemory:
    """One buffer that execution contexts work in, one at a time; it grows to the largest need and stays."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._buffer: Any = None
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

    def hold(self, size: int) -> None:
        """Make sure that there are ``size`` bytes; what was in the buffer is lost."""
        if size <= self.bytes:
            return
        import torch

        self._buffer = None  # its memory is free for the larger one
        self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        self.generation += 1

    def free(self) -> None:
        """Give the buffer back."""
        self._buffer = None
        self.generation += 1


_shared: dict[str, ActivationMemory] = {}


def activation_memory(device: str, *, shared: bool) -> ActivationMemory:
    """A buffer of a session's own, or the one that all sessions of this process share; those must not run at once."""
    return _shared.setdefault(device, ActivationMemory(device)) if shared else ActivationMemory(device)


def allocator(trt: Any, device: int) -> Any:
    """A GPU allocator for TensorRT that takes its memory from torch's caching allocator."""
    import torch

    class TorchAllocator(trt.IGpuAsyncAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IGpuAsyncAllocator.__init__(self)

        def allocate(self, size: int, alignment: int, flags: int) -> int:
            return self.allocate_async(size, alignment, 0, 0)

        def deallocate(self, memory: int) -> bool:
            return self.deallocate_async(memory, 0)

        def reallocate(self, address: int, alignment: int, new_size: int) -> int:
            return 0  # not done in place: the caller allocates and copies

        def allocate_async(self, size: int, alignment: int, one: int, other: int) -> int:
            """Stream and flags come in either order (the docstring says one, the binding does the other)."""
            if not size:
                return 0
            try:
                return int(torch.cuda.caching_allocator_alloc(size, device, _stream(one, other)))
            except torch.OutOfMemoryError:
                return 0

        def deallocate_async(self, memory: int, stream: int) -> bool:
            if memory:
                torch.cuda.caching_allocator_delete(memory)  # type: ignore[no-untyped-call]
            return True

    return TorchAllocator()


def _stream(one: int, other: int) -> int:
    """The handle among a stream and flags: a pointer, or 0 for the default stream."""
    larger = max(one, other)
    return larger if larger >= _FLAGS_BELOW else 0


def output_allocator(trt: Any, device: str) -> Any:
    """Takes an output whose shape only the run decides: the engine asks for memory, then tells the shape."""
    import torch

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.buffer: Any = None
            self.shape: tuple[int, ...] = ()

        def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
            return self.reallocate_output_async(tensor_name, memory, size, alignment, 0)

        def reallocate_output_async(self, tensor_name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            if self.buffer is None or self.buffer.numel() < size:
                self.buffer = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
            return int(self.buffer.data_ptr())

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            self.shape = tuple(shape)

    return OutputAllocator()
