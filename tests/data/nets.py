"""Small models that behave in ways that matter: well, slowly, or badly."""

import ctypes
import functools
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Mlp(nn.Module):
    """Two layers with dynamic batch."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def mlp(width: int = 16) -> tuple[nn.Module, torch.Tensor]:
    return Mlp(width), torch.randn(2, 4)


def slow(seconds: float = 60.0) -> tuple[nn.Module, torch.Tensor]:
    time.sleep(seconds)
    return mlp()


def slow_while(marker: str) -> tuple[nn.Module, torch.Tensor]:
    """Takes a minute as long as the file ``marker`` is there."""
    if Path(marker).exists():
        Path(marker + ".begun").touch()
        time.sleep(60)
    return mlp()


def segfault() -> tuple[nn.Module, torch.Tensor]:
    ctypes.string_at(0)
    return mlp()


def uncaught() -> tuple[nn.Module, torch.Tensor]:
    os.write(2, b"making it\n  what():  std::bad_alloc\n")
    os.abort()


def killed() -> tuple[nn.Module, torch.Tensor]:
    os.kill(os.getpid(), 9)
    return mlp()


class WrongOnline(nn.Module):
    """Answers something else when it is traced: what a silently wrong export looks like."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0 if torch.compiler.is_exporting() or torch.jit.is_tracing() else x * 3.0


def wrong_online() -> tuple[nn.Module, torch.Tensor]:
    return WrongOnline(), torch.randn(2, 4)


def wide(width: int = 512) -> tuple[nn.Module, torch.Tensor]:
    """Takes as long as its matrices are large."""
    return nn.Sequential(nn.Linear(256, 16 * width), nn.ReLU(), nn.Linear(16 * width, 256)), torch.randn(2, 256)


class Products(nn.Module):
    """A convolution, a matrix product of three axes, and a Gemm; all of them can be 2:4."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)
        self.tokens = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.conv(x).relu().flatten(2).transpose(1, 2)
        return self.head(self.tokens(rows).relu().mean(1))


def products() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Products(), torch.randn(2, 8, 6, 6)


def serve_with_a_file(connection: Any, file: Path) -> None:
    """Answer requests; the file is there until the process ends by itself."""
    from enginesmith.pipeline.system import worker

    file.touch()
    try:
        worker.serve(connection, lambda name, progress: name)
    finally:
        file.unlink()


def family(log: str, progress: object, *, nested: bool = True) -> list[tuple[object, ...]]:
    """Tell of this worker and one of its own: its server, a variable that it sees, its cores, its sessions' threads."""
    from enginesmith.pipeline.system import worker
    from enginesmith.pipeline.system.device import Device

    os.environ.update({"SET_BY_WORKER": "1"} if nested else {})
    threads = [(device.thread_count, device.full_thread_count) for device in (Device(), Device(threads=8))]
    own = (os.getppid(), os.environ.get("SET_BY_WORKER"), os.sched_getaffinity(0), threads)
    return [own, *(worker.run(functools.partial(family, nested=False), log, log=Path(log)) if nested else ())]
