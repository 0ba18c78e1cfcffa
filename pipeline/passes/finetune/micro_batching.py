"""Working through a batch in parts that fit into memory, and keeping fewer activations where even one does not."""

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from enginesmith.pipeline.errors import StepOutOfMemory
from enginesmith.pipeline.system import oom
from enginesmith.pipeline.units import format_bytes

_PLANNED_SHARE = 0.9
"""Of a limit is planned for: a step takes a little more at one time than at another."""
LEAST_FOR_NORMS = 16
"""Samples below which batch norms learn from noise (Wu and He, "Group Normalization", ECCV 2018, figure 1)."""


class Meter(Protocol):
    """Runs something and says how many bytes recovery took at the fullest, beyond loaded libraries."""

    def __call__(self, action: Callable[[], None]) -> int: ...

    def check(self) -> None:
        """Raise StepOutOfMemory where more was taken than is allowed, since this was last asked."""


Attempt = Callable[[int, bool], None]
"""Does one whole step with parts of so many samples, activations computed again or not."""


def sizes(batch: int, fixed: int | None) -> tuple[int, ...]:
    """List sizes of parts from the smallest: powers of two and the batch, or the only one that the model takes."""
    if fixed is not None:
        return (fixed,)
    return (*(1 << power for power in range(batch.bit_length()) if 1 << power < batch), batch)


def largest_part(sizes: Sequence[int], attempt: Attempt, meter: Meter, limit_bytes: int | None) -> tuple[int, bool]:
    """Return the largest part of a batch that fits, and whether activations have to be computed again for it.

    Raises:
        StepOutOfMemory: the smallest one does not fit, even so.
    """
    needs = 0
    for again in (False, True):
        tried = _falling(sizes, attempt, again) if limit_bytes is None else None
        if limit_bytes is not None:
            tried, needs = _rising(sizes, attempt, meter, limit_bytes, again)
        if tried is not None:
            return tried, again
    raise does_not_fit(needs, limit_bytes)


def does_not_fit(needs_bytes: int, limit_bytes: int | None) -> StepOutOfMemory:
    """Return the error for a recovery that cannot be made any smaller."""
    limit = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
    told = f": it takes {format_bytes(needs_bytes)}" if needs_bytes else ""
    return StepOutOfMemory(
        f"recovery does not fit its memory{limit} even one sample at a time{told}",
        "allow more memory, or use smaller inputs",
        asked_bytes=needs_bytes or None,
        free_bytes=limit_bytes,
    )


def _falling(sizes: Sequence[int], attempt: Attempt, again: bool) -> int | None:
    """Try sizes from the largest down: without a limit the device says what does not fit."""
    return next((size for size in reversed(sizes) if fits(functools.partial(attempt, size, again))), None)


def _rising(
    sizes: Sequence[int], attempt: Attempt, meter: Meter, limit_bytes: int, again: bool
) -> tuple[int | None, int]:
    """Try sizes from the smallest up, as long as the next is expected to fit; with what the smallest took."""
    best: int | None = None
    taken: dict[int, int] = {}
    for size in sizes:
        smallest = again and size == sizes[0]
        allowed = limit_bytes if smallest else _PLANNED_SHARE * limit_bytes
        if _expected(taken, size) > allowed:
            break
        fitted: list[bool] = []
        bytes_ = meter(functools.partial(_note, fitted, attempt, size, again))
        if not fitted[0] or bytes_ > allowed:
            return best, taken.get(sizes[0], bytes_)
        best = size
        taken[size] = bytes_
    return best, taken.get(sizes[0], 0)


def _note(fitted: list[bool], attempt: Attempt, size: int, again: bool) -> None:
    fitted.append(fits(functools.partial(attempt, size, again)))


def _expected(taken: dict[int, int], size: int) -> float:
    """Extrapolate by a line through the last two sizes; the first step ever also takes what is taken once."""
    if len(taken) < 2:
        return 0.0
    (first, less), (second, more) = list(taken.items())[-2:]
    return more + (more - less) / (second - first) * (size - second)


def fits(action: Callable[[], None]) -> bool:
    """Try an action, and tell whether there was memory for it. Other errors go on."""
    try:
        action()
    except Exception as error:
        if not ran_out(error):
            raise
    else:
        return True
    gc.collect()  # what the failed one held in cycles
    return False


def ran_out(error: BaseException) -> bool:
    """Tell whether memory ran out; what torch keeps for later is handed back then."""
    if oom.find_cause(error) is None:
        return False
    torch.cuda.empty_cache()  # does nothing where CUDA is not in use
    return True


def compute_again(model: nn.Module) -> int:
    """Make blocks recompute activations for the gradients, and count them (Chen et al., 2016).

    Blocks are the parts of sequences, else the model's own parts.
    """
    sequences = [one for one in model.modules() if isinstance(one, nn.Sequential | nn.ModuleList)]
    inner = {id(part) for one in sequences for part in one.modules() if part is not one}
    outermost = [one for one in sequences if id(one) not in inner]
    blocks = [part for one in outermost for part in one.children()] or list(model.children())
    for block in blocks:
        if any(True for _ in block.parameters()):
            vars(block)["forward"] = _Recomputing(block.forward, vars(block).get("forward"))
    return len(blocks)


@dataclass(frozen=True)
class _Recomputing:
    forward: Callable[..., Any]
    own: Callable[..., Any] | None
    """What stood in the module's own place for ``forward``, as wrappers leave it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def keep_all(model: nn.Module) -> None:
    """Return the opposite of :func:`compute_again`."""
    for one in model.modules():
        if not isinstance(again := vars(one).get("forward"), _Recomputing):
            continue
        if again.own is None:
            del vars(one)["forward"]
        else:
            vars(one)["forward"] = again.own
