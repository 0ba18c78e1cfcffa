"""What work inside of this process takes at the fullest, beyond what it held when the meter was made."""

from collections.abc import Callable

from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.measure import resident
from enginesmith.pipeline.measure.holding import hold


class StepMeter:
    """Runs something and says how many bytes were taken: resident ones on the CPU, torch's reserved ones on CUDA."""

    def __init__(self, device: Device, limit_bytes: int | None) -> None:
        """Make it once libraries are loaded, and before anything large is; a limit on CUDA is held from here on."""
        self._device = device
        if limit_bytes is None:
            self._before = 0
        elif device.kind == "cuda":
            self._before = self._reserved()
            hold(limit_bytes, device)
        else:
            resident.return_freed_memory()
            self._before = resident.trimmed().counted

    def __call__(self, action: Callable[[], None]) -> int:
        if self._device.kind == "cuda":
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device.index)
            action()
            return int(torch.cuda.max_memory_reserved(self._device.index)) - self._before
        with resident.phase() as found:
            action()
        return found.peak - self._before

    def _reserved(self) -> int:
        import torch

        return int(torch.cuda.memory_reserved(self._device.index))
