"""Several processes that share each batch: gradients are added up, and all take the same step (data parallelism).

They agree on how a step went before any of them goes on, so that one that ran out of memory does not leave the others
waiting. Gradients are added once a step, however many parts the batch was worked through in.
"""

import datetime
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, distributed

from enginesmith.pipeline.errors import StepError

_WAIT = datetime.timedelta(minutes=30)
"""How long one waits for the others, which may be evaluating."""


@dataclass(frozen=True)
class DataParallel:
    """This process's place among all; alone, nothing is exchanged."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Tell whether this process plans, evaluates and writes."""
        return self.rank == 0

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over all processes; in one message for each dtype."""
        if self.size == 1:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for same in by_type.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            with _others_there():
                distributed.all_reduce(flat)
            for tensor, summed in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def total(self, *values: float) -> tuple[float, ...]:
        """Add up numbers over all processes, in float64."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        with _others_there():
            distributed.all_reduce(tensor)
        return tuple(tensor.tolist())

    def meet(self) -> None:
        """Wait until all are here."""
        self.total(0.0)


@contextmanager
def join_processes(rank: int, size: int, device: torch.device, meeting_place: Path) -> Iterator[DataParallel]:
    """Return a team of ``size`` processes on this machine that find each other by a file; alone where size is 1."""
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


@contextmanager
def _others_there() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StepError(
            f"another process of this recovery ended: {str(error).splitlines()[0]}",
            "run it again: it goes on from its last checkpoint",
        ) from error
