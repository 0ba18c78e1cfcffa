"""Read the builder's log: its messages, its memory figures and the layers of the engine."""

import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

_BYTES = {
    "activation_bytes": re.compile(r"Total Activation Memory: (\d+) bytes"),
    "weights_bytes": re.compile(r"Total Weights Memory: (\d+) bytes"),
    "scratch_bytes": re.compile(r"Max Scratch Memory: (\d+) bytes"),
}
_DEVICE_PEAK = re.compile(r"Peak memory usage of TRT CPU/GPU memory allocators: CPU \d+ MiB, GPU (\d+) MiB")
_VOLATILE = re.compile(r"\d+(?:\.\d+)? ?(?:ms|seconds)\b")
"""Times, which would make two logs of one build differ."""
_OF_THE_MACHINE = ("MemUsage", "[MS]")
_BANNER = re.compile(
    r"-{8,}|(?:Input filename|ONNX IR version|Opset version|Producer \w+|Domain|Model version|Doc string):"
)
"""What the parser says of each file: paths, and nothing that is not known."""
_LAYERS = "Layers:\n"
_MIB = 1 << 20
_WITHOUT_DRIVER = "catchCudaError"
"""In messages that follow another one where there is no driver, and say nothing of the model."""


class Figures(BaseModel):
    """Hold the builder's own figures, in bytes; what it did not say is None."""

    model_config = ConfigDict(frozen=True)

    weights_bytes: int | None = None
    activation_bytes: int | None = None
    """Memory of one execution context: activations and scratch; of several profiles the largest."""
    scratch_bytes: int | None = None
    build_device_peak_bytes: int | None = None


class BuildLog:
    """Take the builder's messages. Everything up to INFO goes to standard error, which is the step's log."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.layers = ""
        """The dump of layers and of inputs and outputs, as the builder wrote it; empty if it did not."""
        self._bytes: dict[str, int] = {}
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        """All messages up to INFO, without times and what else differs from one build to the next."""
        return "".join(f"{_VOLATILE.sub('…', line)}\n" for line in self._lines)

    @property
    def figures(self) -> Figures:
        """The figures that have been seen so far."""
        return Figures.model_validate(self._bytes)

    def take(self, severity: str, text: str) -> None:
        """Take a message of severity INTERNAL_ERROR, ERROR, WARNING, INFO or VERBOSE."""
        if severity == "VERBOSE":
            if text.startswith(_LAYERS):
                self.layers = text
            return
        if _BANNER.match(text):
            return
        sys.stderr.write(f"[{severity}] {text}\n")
        if not any(words in text for words in _OF_THE_MACHINE):
            self._lines.append(f"[{severity}] {text}")
        if severity in ("ERROR", "INTERNAL_ERROR") and _WITHOUT_DRIVER not in text:
            self.errors.append(text)
        elif severity == "WARNING":
            self.warnings.append(text)
        else:
            self._read(text)

    def _read(self, text: str) -> None:
        for name, pattern in _BYTES.items():
            if match := pattern.search(text):
                self._at_least(name, int(match[1]))
        if match := _DEVICE_PEAK.search(text):
            self._at_least("build_device_peak_bytes", int(match[1]) * _MIB)

    def _at_least(self, name: str, value: int) -> None:
        self._bytes[name] = max(value, self._bytes.get(name, 0))


class _Relay:
    """Pass messages of a process's logger on to the log that listens now."""

    def __init__(self, trt: Any) -> None:
        relay = self

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, msg: str) -> None:
                if relay.listener is not None:
                    relay.listener.take(severity.name, msg)

        self.listener: BuildLog | None = None
        self.native = Logger()


@functools.cache
def _relay(trt: Any) -> _Relay:
    """Make the one relay of the process, which is never freed.

    TensorRT goes on using the first logger that it was given for as long as any object of its lives.
    """
    return _Relay(trt)


def logger(trt: Any, log: BuildLog) -> Any:
    """Return a TensorRT logger that hands everything to ``log`` from now on."""
    relay = _relay(trt)
    relay.listener = log
    return relay.native


@contextlib.contextmanager
def listening(trt: Any, log: BuildLog) -> Iterator[Any]:
    """Hand everything to ``log`` meanwhile, then to the log that listened before."""
    relay = _relay(trt)
    before, relay.listener = relay.listener, log
    try:
        yield relay.native
    finally:
        relay.listener = before
