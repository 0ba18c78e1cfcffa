"""ONNX Runtime's device memory through a ledger, by the external allocator of its CUDA provider.

The provider's options ``gpu_external_alloc`` and ``gpu_external_free`` are addresses of C functions: ``void *(size_t)``
and ``void (void *)``. With them it has no arena: each tensor, each planned block and scratch memory is a call of its
own. It works on the default stream then, as it refuses ``user_compute_stream`` beside them (the constructor in
``cuda_execution_provider.cc``). Each call takes the interpreter's lock, so this is for counting and never for timing.

``gpu_external_empty_cache`` is left out: the provider calls it while it holds a lock that freeing takes too, and a
collection of garbage inside of it may free.
"""

import ctypes
import functools
import logging

from enginesmith.pipeline.engines.cuda_ledger import CudaAllocationTracker, TorchMemory, active

_logger = logging.getLogger(__name__)
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Callbacks:
    """The two functions for one device. They live as long as the process.

    ONNX Runtime's Python module keeps the allocator of the first session for inputs of all later ones, so these may be
    called when nothing is counted any more.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._uncounted = CudaAllocationTracker(TorchMemory(device))
        self._owners: dict[int, CudaAllocationTracker] = {}
        """Address → the ledger that it was last taken through."""
        self.allocate = _Allocate(self._take)
        self.free = _Free(self._give)

    def _take(self, size: int) -> int:
        ledger = active(self._device) or self._uncounted
        try:
            address = ledger.allocate(size)
        except RuntimeError:  # of CUDA's, and cannot go through C; ONNX Runtime raises its own where it gets nothing
            _logger.exception("torch gave ONNX Runtime no memory")
            return 0
        if address:
            self._owners[address] = ledger
        return address

    def _give(self, address: int | None) -> None:
        if address:
            owner = self._owners.get(address) or active(self._device) or self._uncounted
            owner.free(address)


@functools.cache
def _callbacks(device: int) -> _Callbacks:
    return _Callbacks(device)


def counted_options(device: int) -> dict[str, str]:
    """Options of the CUDA provider for a session that is counted; empty where nothing is."""
    if active(device) is None:
        return {}
    functions = _callbacks(device)
    addresses = {"gpu_external_alloc": functions.allocate, "gpu_external_free": functions.free}
    return {name: str(ctypes.cast(function, ctypes.c_void_p).value) for name, function in addresses.items()}
