"""Divide samples: over steps, over processes that share each batch, and into parts that fit into memory.

Processes add up their gradients and all take the same step (data parallelism). They agree on how a step went before any
of them goes on, so that one that ran out of memory does not leave the others waiting. Gradients are added once a step,
however many parts the batch was worked through in.
"""

import datetime
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from enginesmith.calibration.dataset import Dataset
from enginesmith.pipeline.errors import DataError, StepError, StepOutOfMemory
from enginesmith.pipeline.system import oom
from enginesmith.pipeline.tensors import Array
from enginesmith.pipeline.units import format_bytes, group_values

T = TypeVar("T")

_MOST_HELD_BACK = 2048
_WAIT = datetime.timedelta(minutes=30)
"""Longest wait for other processes, which may be evaluating."""
_PLANNED_SHARE = 0.9
"""Share of a memory limit that is planned for: a step takes a little more at one time than at another."""
LEAST_FOR_NORMS = 16
"""Samples below which batch norms learn from noise (Wu and He, "Group Normalization", ECCV 2018, figure 1)."""


@dataclass(frozen=True)
class Batch:
    """Inputs in the order of the signature, and labels where there are some."""

    inputs: dict[str, Tensor]
    labels: Tensor | dict[str, Tensor] | None
    """Several arrays by name where several were named."""
    labeled: str | None = None
    """The output that labels of one array are of; None for the first."""


@dataclass(frozen=True)
class Order:
    """Rows for each step: every epoch goes over all of them in an order of its own; a remainder is left out."""

    rows: tuple[int, ...]
    batch: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the rows; at least one."""
        return max(1, len(self.rows) // self.batch)

    def at(self, step: int) -> Array:
        """Return rows of a step, int64 of shape (batch,); fewer only if there are fewer."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        return np.asarray(self.rows, np.int64)[order[index * self.batch : (index + 1) * self.batch]]


@functools.lru_cache(maxsize=2)
@dataclass(frozen=True)
class SplitData:
    """A data set in two: rows to learn from, and rows that only the metric sees."""

    data: Dataset
    learnt: tuple[int, ...]
    held_back: tuple[int, ...]
    device: torch.device
    labeled: str | None = None
    """The output that labels of one array are of; None for the first."""

    def batch(self, rows: Array) -> Batch:
        """Copy those rows to the device, in torch's own memory: its alignment decides the last bits of sums.

        CUDA copies from pinned memory while the processor goes on.
        """

        def tensor(values: Array) -> Tensor:
            given = torch.from_numpy(values)
            on_cuda = self.device.type == "cuda"
            return given.pin_memory().to(self.device, non_blocking=True) if on_cuda else given.clone()

        def label(values: Array) -> Tensor:
            given = tensor(values)
            return given.float() if given.is_floating_point() else given.long()

        inputs, given = {name: tensor(value) for name, value in self.data.feed(rows).items()}, self.data.number_labels
        if isinstance(given, Mapping):
            return Batch(inputs, {name: label(values[rows]) for name, values in given.items()})
        return Batch(inputs, None if given is None else label(given[rows]), self.labeled)

    def order(self, batch: int, seed: int) -> Order:
        """Return the order in which steps take rows."""
        return Order(self.learnt, min(batch, len(self.learnt)), seed)


def split_data(data: Dataset, held_back: float, seed: int, device: torch.device) -> SplitData:
    """Divide the set in two, each class in proportion to its share; samples of the part for choice are not learnt from.

    Raises:
        DataError: there are fewer than two samples.
    """
    if len(data) < 2:
        raise DataError(
            f"{data.name} has {len(data)} sample, and recovery needs some to learn from and others for the metric",
            "give more samples: hundreds at least",
        )
    choice = np.flatnonzero(np.isin(data.rows, data.parts.get("choice", ()))).tolist()
    if choice:
        learnt = sorted(set(range(len(data))) - set(choice))
        return SplitData(data, tuple(learnt), tuple(choice[:_MOST_HELD_BACK]), device)
    count = min(max(1, round(held_back * len(data))), _MOST_HELD_BACK, len(data) - 1)
    whole = Dataset(data.name, {"row": np.arange(len(data))}, data.labels)  # numbered anew: it may be drawn itself
    chosen = whole.sample(count, seed).rows
    return SplitData(data, tuple(sorted(set(range(len(data))) - set(chosen))), chosen, device)


def parts(rows: Array, size: int) -> list[Array]:
    """Cut a batch into parts of at most ``size`` rows."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@dataclass(frozen=True)
class DataParallel:
    """This process's place among all; alone, nothing is exchanged."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """True in the process that plans, evaluates and writes."""
        return self.rank == 0

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over all processes; in one message for each dtype."""
        if self.size == 1:
            return
        for same in group_values((tensor.dtype, tensor) for tensor in tensors).values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            _all_reduce(flat)
            for tensor, summed in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def total(self, *values: float) -> tuple[float, ...]:
        """Add up numbers over all processes, in float64; this waits for all of them."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        _all_reduce(tensor)
        return tuple(tensor.tolist())


def _all_reduce(tensor: Tensor) -> None:
    try:
        distributed.all_reduce(tensor)
    except RuntimeError as error:
        raise StepError(
            f"another process of this recovery ended: {str(error).splitlines()[0]}",
            "run it again: it goes on from its last checkpoint",
        ) from error


@contextmanager
def join_processes(rank: int, size: int, device: torch.device, meeting_place: Path) -> Iterator[DataParallel]:
    """Join ``size`` processes on this machine that find each other by a file; alone where size is 1."""
    if size == 1:
        yield DataParallel(device)
        return
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{meeting_place}",
        rank=rank,
        world_size=size,
        timeout=_WAIT,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield DataParallel(device, rank, size)
    finally:
        distributed.destroy_process_group()


class Meter(Protocol):
    """Runs an action and measures the bytes that recovery took at the fullest, beyond loaded libraries."""

    def __call__(self, action: Callable[[], None]) -> int: ...

    def check(self) -> None:
        """Raise StepOutOfMemory where more was taken than is allowed, since this was last asked."""


Attempt = Callable[[int, bool], None]
"""Does one whole step with parts of so many samples, activations computed again or not."""


def part_sizes(batch: int, fixed: int | None) -> tuple[int, ...]:
    """List sizes of parts from the smallest: powers of two and the batch, or the only one that the model takes."""
    if fixed is not None:
        return (fixed,)
    return (*(1 << power for power in range(batch.bit_length()) if 1 << power < batch), batch)


def largest_part(sizes: Sequence[int], attempt: Attempt, meter: Meter, limit_bytes: int | None) -> tuple[int, bool]:
    """Find the largest part of a batch that fits, and whether activations have to be computed again for it.

    Raises:
        StepOutOfMemory: the smallest one does not fit, even so.
    """
    needs = 0
    for again in (False, True):
        if limit_bytes is None:  # the device says what does not fit
            falling = (size for size in reversed(sizes) if within_memory(functools.partial(attempt, size, again)))
            best = next(falling, None)
        else:
            best, needs = _largest_below(sizes, attempt, meter, limit_bytes, again)
        if best is not None:
            return best, again
    raise does_not_fit(needs, limit_bytes)


def _largest_below(
    sizes: Sequence[int], attempt: Attempt, meter: Meter, limit_bytes: int, again: bool
) -> tuple[int | None, int]:
    """Try sizes from the smallest up, as long as the next is expected to fit; return bytes of the smallest too."""
    taken: dict[int, int] = {}

    def expect(size: int) -> float:
        """Extrapolate by a line through the last two sizes; the first step ever also takes what is taken once."""
        if len(taken) < 2:
            return 0.0
        (first, less), (second, more) = list(taken.items())[-2:]
        return more + (more - less) / (second - first) * (size - second)

    def measure(size: int) -> tuple[int, bool]:
        fitted: list[bool] = []
        needs = meter(lambda: fitted.append(bool(within_memory(functools.partial(attempt, size, again)))))
        return needs, fitted[0]

    for size in sizes:
        allowed = limit_bytes if again and size == sizes[0] else _PLANNED_SHARE * limit_bytes
        if expect(size) > allowed:
            break
        needs, fitted = measure(size)
        if not fitted or needs > allowed:
            return max(taken, default=None), taken.get(sizes[0], needs)
        taken[size] = needs
    return max(taken, default=None), taken.get(sizes[0], 0)


def does_not_fit(needs_bytes: int, limit_bytes: int | None) -> StepOutOfMemory:
    """Return the error for a recovery that cannot be made any smaller."""
    limit = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
    needs = f": it takes {format_bytes(needs_bytes)}" if needs_bytes else ""
    return StepOutOfMemory(
        f"recovery does not fit its memory{limit} even one sample at a time{needs}",
        "allow more memory, or use smaller inputs",
        asked_bytes=needs_bytes or None,
        free_bytes=limit_bytes,
    )


def within_memory(action: Callable[[], T]) -> list[T]:
    """Run an action, and return its result in a list: an empty one where memory ran out. Other errors go on."""
    try:
        return [action()]
    except Exception as error:
        if not ran_out(error):
            raise
    gc.collect()  # what the failed one held in cycles
    return []


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
    sequences = [module for module in model.modules() if isinstance(module, nn.Sequential | nn.ModuleList)]
    inner = {id(part) for sequence in sequences for part in sequence.modules() if part is not sequence}
    outermost = [sequence for sequence in sequences if id(sequence) not in inner]
    blocks = [part for sequence in outermost for part in sequence.children()] or list(model.children())
    for block in blocks:
        if any(True for _ in block.parameters()):
            vars(block)["forward"] = _Recomputing(block.forward, vars(block).get("forward"))
    return len(blocks)


@dataclass(frozen=True)
class _Recomputing:
    forward: Callable[..., Any]
    own: Callable[..., Any] | None
    """A ``forward`` that the module itself held, as wrappers leave it, in place of its class's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def keep_activations(model: nn.Module) -> None:
    """Undo :func:`compute_again`."""
    for module in model.modules():
        if not isinstance(again := vars(module).get("forward"), _Recomputing):
            continue
        if again.own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = again.own
