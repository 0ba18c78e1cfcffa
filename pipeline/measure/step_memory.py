"""What work inside of this process takes at the fullest, beyond what it held when the meter was made."""

from collections.abc import Callable

from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.errors import StepOutOfMemory
from enginesmith.pipeline.measure import resident
from enginesmith.pipeline.measure.holding import set_memory_limit
from enginesmith.pipeline.units import format_bytes


class StepMeter:
    """Runs something and says how many bytes were taken: resident ones on the CPU, torch's reserved ones on CUDA."""

    def __init__(self, device: Device, limit_bytes: int | None) -> None:
        """Make it once libraries are loaded, and before anything large is; a limit on CUDA is held from here on."""
        self._device, self._limit = device, limit_bytes
        self._before = self._libraries = 0
        if limit_bytes is None:
            return
        if device.kind == "cuda":
            self._before = self._reserved()
            set_memory_limit(limit_bytes, device)
        else:
            resident.return_freed_memory()
            resident.lower_mark()
            now = resident.resident()
            self._before, self._libraries = now.counted, now.libraries

    def __call__(self, action: Callable[[], None]) -> int:
        if self._device.kind == "cuda":
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device.index)
            action()
            return int(torch.cuda.max_memory_reserved(self._device.index)) - self._before
        with resident.phase() as found:
            action()
        resident.lower_mark()  # what was tried is no part of what follows
        return found.peak - self._before

    def check(self) -> None:
        """Look whether the limit was kept since this was last said; on CUDA torch refuses what goes beyond it.

        The kernel's own mark tells cheaply that all is well; only beyond that are libraries, whose pages come in as
        code is first used, told from what was written.

        Raises:
            StepOutOfMemory: more was resident at some time.
        """
        if self._limit is None or self._device.kind == "cuda":
            return
        if resident.high_water() - self._libraries - self._before <= self._limit:
            return
        found = resident.so_far()
        self._libraries = found.end.libraries
        taken = found.peak - self._before
        if taken > self._limit:
            resident.lower_mark()
            raise StepOutOfMemory(
                f"{format_bytes(taken)} were taken, of {format_bytes(self._limit)} that were allowed",
                "allow more memory, or use smaller inputs",
                asked_bytes=taken,
                free_bytes=self._limit,
            )

    def _reserved(self) -> int:
        import torch

        return int(torch.cuda.memory_reserved(self._device.index))
