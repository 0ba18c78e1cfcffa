"""The GPUs of this machine, handed out one by one: a step sees the one it was given as ``cuda:0``."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from enginesmith.pipeline.engines import cuda
from enginesmith.pipeline.engines.base import Device

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpus:
    """Those that are of the kind of the first one, so that it makes no difference which of them a step is given."""

    def __init__(self, alike: int) -> None:
        self._free = set(range(alike))
        self._returned = threading.Condition()
        self.count = alike

    @property
    def several(self) -> bool:
        """Whether there is a choice."""
        return self.count > 1

    @classmethod
    def detect(cls) -> "Gpus":
        """As the driver shows them."""
        devices = cuda.driver().devices
        alike = 0
        for device in devices:
            if device != devices[0]:
                break
            alike += 1
        return cls(alike)

    @contextmanager
    def reserve(self, device: Device) -> Iterator[dict[str, str]]:
        """Hold a GPU; yields the environment in which it is the first one.

        A device with an index was chosen by the user, and is that one.
        """
        with self._returned:
            wanted = {device.index} if device.index else set(range(self.count))
            self._returned.wait_for(lambda: self._free & wanted)
            index = min(self._free & wanted)
            self._free.remove(index)
        try:
            yield {} if device.index else {_VISIBLE: self._name(index)}
        finally:
            with self._returned:
                self._free.add(index)
                self._returned.notify_all()

    @staticmethod
    def _name(index: int) -> str:
        """What CUDA calls a device in the environment, where some may be hidden already."""
        shown = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
        return shown[index] if index < len(shown) else str(index)


def show_only(variables: Mapping[str, str]) -> None:
    """In a worker before CUDA starts: take over the environment that came with a GPU."""
    os.environ.update(variables)
