"""Count the device memory that engines take: who asked for how much, under which tag, and what came back.

TensorRT asks through its GPU allocator, ONNX Runtime by its external one (``onnxruntime/session.py``), and our own
buffers are torch's tensors, which are counted here. All of it comes from torch's caching allocator in the end. A ledger
counts the bytes that were asked for; torch rounds each block up to 512 bytes, and leaves up to 1 MiB of a block above
1 MiB unsplit, so that its figure for what is allocated is somewhat higher.

An engine asks :func:`active` when it is opened: measuring memory makes a ledger active, a latency run does not.
"""

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

WEIGHTS, ACTIVATIONS, WORKSPACE, TRANSFERS, OUTPUTS = "weights", "activations", "workspace", "transfers", "outputs"
"""Tags: what a loaded engine keeps; what calls are planned to work in; what they ask for besides; inputs; outputs."""
UNTAGGED = "untagged"


class TorchMemory:
    """Take memory from torch's caching allocator on one device."""

    def __init__(self, device: int) -> None:
        self._device = device

    def take(self, size: int, stream: int) -> int:
        """Take ``size`` bytes for work on that stream and return their address; 0 where torch finds none."""
        import torch

        try:
            return int(torch.cuda.caching_allocator_alloc(size, self._device, stream))
        except torch.OutOfMemoryError:
            return 0

    def give(self, address: int) -> None:
        """Return memory to torch, which keeps it for the next who asks on the same stream."""
        import torch

        torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Block:
    """Describe memory that is in use."""

    size: int
    tag: str
    number: int
    """In the order that blocks were taken in, from 1."""


@dataclass
class Account:
    """Show the ledger at one time, in bytes asked for."""

    current: int = 0
    peak: int = 0
    by_tag: dict[str, int] = field(default_factory=dict)
    peak_by_tag: dict[str, int] = field(default_factory=dict)
    """Parts of ``peak``, at the time of the peak."""
    taken: int = 0
    unknown_frees: int = 0
    """Addresses that were given back and had never been taken here."""
    double_frees: int = 0


class CudaAllocationTracker:
    """Take memory, give it back, and keep the account; may be asked from any thread."""

    def __init__(self, memory: TorchMemory) -> None:
        self._memory = memory
        self._lock = threading.RLock()  # a collection of garbage inside may give back more
        self._live: dict[int, Block] = {}
        self._gone: set[int] = set()
        self._tags: Counter[str] = Counter()
        self._account = Account()
        self._tag = UNTAGGED

    def allocate(self, size: int, stream: int = 0, tag: str | None = None) -> int:
        """Take ``size`` bytes for work on ``stream``, return their address; 0 for none, or where there are too few."""
        if not size:
            return 0
        address = self._memory.take(size, stream)
        if address:
            self._enter(address, size, tag)
        return address

    def free(self, address: int) -> bool:
        """Give back what :meth:`allocate` gave; False, and nothing done, for an address that is not in use here."""
        known = self._leave(address)
        if known:
            self._memory.give(address)
        return known

    def follow(self, tensor: Any, tag: str) -> None:
        """Count a tensor whose memory is torch's own, until it is gone."""
        address, size = int(tensor.data_ptr()), int(tensor.numel() * tensor.element_size())
        if size:
            self._enter(address, size, tag)
            weakref.finalize(tensor, self._leave, address).atexit = False

    @contextlib.contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Give this tag to all that is taken meanwhile without a tag of its own."""
        before, self._tag = self._tag, tag
        try:
            yield
        finally:
            self._tag = before

    def reset_peak(self) -> None:
        """Start the peak anew from the current use."""
        with self._lock:
            self._account.peak, self._account.peak_by_tag = self._account.current, dict(+self._tags)

    def account(self) -> Account:
        """Copy the account as it is now."""
        with self._lock:
            return replace(self._account, by_tag=dict(+self._tags))

    def leaks(self, since: int = 0) -> dict[int, Block]:
        """List blocks taken after the first ``since`` ones and not given back, by address."""
        with self._lock:
            return {address: block for address, block in self._live.items() if block.number > since}

    def _enter(self, address: int, size: int, tag: str | None) -> None:
        with self._lock:
            self._forget(address)  # given to someone else by now, so it was given back unseen
            self._gone.discard(address)
            self._account.taken += 1
            self._account.current += size
            block = self._live[address] = Block(size, tag or self._tag, self._account.taken)
            self._tags[block.tag] += size
            if self._account.current > self._account.peak:
                self.reset_peak()

    def _leave(self, address: int) -> bool:
        with self._lock:
            known = self._forget(address)
            if known:
                self._gone.add(address)
            elif address in self._gone:
                self._account.double_frees += 1
            else:
                self._account.unknown_frees += 1
            return known

    def _forget(self, address: int) -> bool:
        block = self._live.pop(address, None)
        if block is not None:
            self._tags[block.tag] -= block.size
            self._account.current -= block.size
        return block is not None


def release_workspaces(device: int) -> int:
    """Return to torch's allocator what it holds for cuBLAS, a block for each stream that multiplied; return its bytes.

    Nothing may run meanwhile. A CUDA graph that was captured with a block still uses its address: never replay it
    afterwards.
    """
    import torch

    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # a torch without CUDA has none
    torch.cuda.synchronize(device)
    before = _read_allocated(device)
    if clear is not None:
        clear()
    return before - _read_allocated(device)


def _read_allocated(device: int) -> int:
    import torch

    return int(torch.cuda.memory_stats(device).get("allocated_bytes.all.current", 0))


_limits: dict[int, int] = {}


def set_limit(device: int, limit_bytes: int) -> None:
    """Limit engines of this process that do not take their memory from torch's allocator and are loaded from now on."""
    _limits[device] = limit_bytes


def limit_bytes(device: int) -> int | None:
    """Return what engines with an allocator of their own may take of a device; None without a limit."""
    return _limits.get(device)


_active: dict[int, CudaAllocationTracker | None] = {}


def active(device: int) -> CudaAllocationTracker | None:
    """Return the ledger that counts a device now; None where nothing is counted, and engines are as in production."""
    return _active.get(device)


def follow(tensor: Any, tag: str) -> None:
    """Count a tensor, if its device is counted now."""
    if ledger := active(tensor.device.index or 0):
        ledger.follow(tensor, tag)


@contextlib.contextmanager
def counting(device: int, memory: TorchMemory | None = None) -> Iterator[CudaAllocationTracker]:
    """Count what engines that are opened and run meanwhile take on a device; ``memory`` is torch's if not given."""
    before = _active.get(device)
    ledger = _active[device] = CudaAllocationTracker(memory or TorchMemory(device))
    try:
        yield ledger
    finally:
        _active[device] = before
