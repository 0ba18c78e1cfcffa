"""Engines that go wrong: two once they have been called often, which is in a race, and one in all answers."""

import os
import time
from typing import Any, ClassVar

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime

_CALLS = 40
"""More than checks of answers make."""


class Hangs(OnnxRuntime):
    """Sleep for ever in a call."""

    name: ClassVar[str] = "hangs"

    def load(self, artifact: Artifact, device: Device) -> Any:
        """Open a session that counts its calls."""
        session = super().load(artifact, device)
        enqueue, calls = session.enqueue, 0

        def count(bound: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > _CALLS:
                self.fail()
            enqueue(bound)

        session.enqueue = count  # type: ignore[method-assign]
        return session

    def fail(self) -> None:
        """Do not come back."""
        time.sleep(9999)


class Aborts(Hangs):
    """End the process in a call."""

    name: ClassVar[str] = "aborts"

    def fail(self) -> None:
        """Take the process down."""
        os.abort()


class Wrong(OnnxRuntime):
    """Answer other numbers."""

    name: ClassVar[str] = "wrong"

    def load(self, artifact: Artifact, device: Device) -> Any:
        """Open a session whose answers are off by one."""
        session = super().load(artifact, device)
        run = session.run
        session.run = lambda feeds: {name: value + 1 for name, value in run(feeds).items()}  # type: ignore[method-assign]
        return session
