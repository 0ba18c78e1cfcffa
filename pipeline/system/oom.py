"""Recognize the messages of allocators when memory runs out, and read how much was asked for.

Seen with torch 2.13, ONNX Runtime 1.31 and numpy 2 under an address-space limit, and read in the sources of torch's
``CUDACachingAllocator`` and of TensorRT's logs:

- torch: ``DefaultCPUAllocator: can't allocate memory: you tried to allocate N bytes``, and on CUDA ``Tried to allocate
  20.00 GiB. … of which 3.50 GiB is free. … 4.00 GiB allowed; …``
- ONNX Runtime: ``Failed to allocate memory for requested buffer of size N`` from its arena, which under a limit says
  ``Available memory of N is smaller than requested bytes of N``, else ``bad allocation`` or ``std::bad_alloc``, which
  tell no size
- TensorRT: ``Requested amount of GPU memory (N bytes) could not be allocated``, ``Requested size was N bytes``
- OpenVINO: ``Failed to allocate N bytes of memory``
- numpy: ``Unable to allocate 763. MiB for an array``; files: ``unable to mmap N bytes``, ``Cannot allocate memory``
"""

import errno
import re
from pathlib import Path

from enginesmith.pipeline.errors import StepOutOfMemory
from enginesmith.pipeline.system.cpu import numbers
from enginesmith.pipeline.units import format_bytes, parse_bytes

_WORDS = (
    *("out of memory", "outofmemory", "can't allocate memory", "cannot allocate memory", "unable to allocate"),
    *("failed to allocate", "not be allocated", "insufficient memory", "bad allocation", "bad_alloc"),
    *("cudaexternalallocator", "is smaller than requested bytes"),
)
_SIZE = r"([\d.]+) ?([kmgt]?i?b|bytes)\b"
_ASKED = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?:tried to allocate|unable to allocate|failed to allocate|unable to mmap|requested size was) {_SIZE}",
        r"requested buffer of size (\d+)()",
        r"smaller than requested bytes of (\d+)()",
        rf"\({_SIZE}\) could not be allocated",
    )
)
_FREE = re.compile(rf"of which {_SIZE} is free|Available memory of (\d+)() is smaller", re.IGNORECASE)
_ALLOWED = re.compile(
    rf"{_SIZE} allowed; Of the allocated memory {_SIZE} is allocated by PyTorch, .*?{_SIZE} is reserved", re.IGNORECASE
)
_SEGMENTS = (2 << 20, 20 << 20)
"""Bytes that torch takes from the driver at once (kSmallBuffer and kLargeBuffer of c10/cuda/CUDACachingAllocator.h)."""
_WHOLE_SEGMENTS = "; it takes 2 MiB at once for small blocks, 20 MiB for blocks from 1 MiB"
_REMEDY = "use a smaller batch"


def count_kernel_kills() -> int | None:
    """Count the processes that the kernel has killed for lack of memory since the machine started; None if untold."""
    return numbers(Path("/proc/vmstat")).get("oom_kill")


def says_out_of_memory(text: str) -> bool:
    """Tell whether a message is about memory that ran out."""
    lower = text.lower()
    return any(words in lower for words in _WORDS)


def out_of_memory(text: str, message: str = "", remedy: str = _REMEDY) -> StepOutOfMemory:
    """Make the error for what an allocator said, with the size refused, and what was free if that is told.

    ``message`` is what people read, else the first line, with a word of memory. Free is what is left on the device, or
    of torch's own limit.
    """
    size = next((_bytes(*match.groups()) for pattern in _ASKED if (match := pattern.search(text))), None)
    free = _bytes(*(part for part in match.groups() if part is not None)) if (match := _FREE.search(text)) else None
    first_line = next(iter(text.strip().splitlines()), "")
    if "memory" not in first_line.lower():
        message = message or f"memory ran out: {first_line}"
    share = _ALLOWED.search(text) if free is not None else None
    if free is not None and share:
        allowed, allocated, reserved = (_bytes(*share.group(first, first + 1)) for first in (1, 3, 5))
        free, remedy = min(free, max(0, allowed - allocated - reserved)), f"{remedy}, or a larger --memory-limit"
        left = f"{format_bytes(free)} of the {format_bytes(allowed)} that it may take is left"
        segments = _WHOLE_SEGMENTS if size in _SEGMENTS else ""
        message = message or f"CUDA out of memory: PyTorch asked for {format_bytes(size or 0)}, and {left}{segments}"
    limited = share is not None
    return StepOutOfMemory(message or first_line, remedy, asked_bytes=size, free_bytes=free, limited_torch=limited)


def find_cause(error: BaseException) -> StepOutOfMemory | None:
    """Find memory that ran out among an exception and those that it was raised from; None if there is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, StepOutOfMemory):
            return cause
        if isinstance(cause, MemoryError) or getattr(cause, "errno", None) == errno.ENOMEM:
            return out_of_memory(str(cause), f"memory ran out: {cause}", f"{_REMEDY} or a larger machine")
        if isinstance(cause, RuntimeError) and says_out_of_memory(str(cause)):
            return out_of_memory(str(cause))
        cause = cause.__cause__
    return None


def _bytes(number: str, unit: str) -> int:
    return parse_bytes(number.rstrip(".") + ("" if unit.lower() == "bytes" else unit))
