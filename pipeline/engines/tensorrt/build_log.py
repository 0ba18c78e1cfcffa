"""Read TensorRT's messages: the builder's, with its memory figures and the engine's layers, and those of a runtime."""

import contextlib
import functools
import re
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from enginesmith.pipeline.engines.base import MemoryFigures
from enginesmith.pipeline.errors import EnginesmithError, ModelError
from enginesmith.pipeline.system.oom import out_of_memory, says_out_of_memory

_PEAK = re.compile(r"Peak memory usage of TRT CPU/GPU memory allocators: CPU \d+ MiB, GPU (\d+) MiB")
_BYTES = {
    "activation_bytes": (re.compile(r"Total Activation Memory: (\d+) bytes"), 1),
    "weights_bytes": (re.compile(r"Total Weights Memory: (\d+) bytes"), 1),
    "scratch_bytes": (re.compile(r"Max Scratch Memory: (\d+) bytes"), 1),
    "build_device_peak_bytes": (_PEAK, 1 << 20),
}
"""Figure → pattern, and its unit in bytes."""
_VOLATILE = re.compile(r"\d+(?:\.\d+)? ?(?:ms|seconds)\b")
"""Times, which would make two logs of one build differ."""
_OF_THE_MACHINE = ("MemUsage", "[MS]")
_BANNER = re.compile(
    r"-{8,}|(?:Input filename|ONNX IR version|Opset version|Producer \w+|Domain|Model version|Doc string):"
)
"""Lines of the parser about each file: paths, and nothing that is not known."""
_MESSAGES = 16
_WITHOUT_DRIVER = "catchCudaError"
"""In messages that follow another one where there is no driver, and say nothing of the model."""


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
    def figures(self) -> MemoryFigures:
        """The figures that have been seen so far, of several profiles the largest."""
        return MemoryFigures.model_validate(self._bytes)

    def take(self, severity: str, text: str) -> None:
        """Take a message of severity INTERNAL_ERROR, ERROR, WARNING, INFO or VERBOSE."""
        if severity == "VERBOSE":
            if text.startswith("Layers:\n"):
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
            for name, (pattern, unit) in _BYTES.items():
                if match := pattern.search(text):
                    self._bytes[name] = max(int(match[1]) * unit, self._bytes.get(name, 0))


class RuntimeLog(BuildLog):
    """Keep the latest errors of runtimes and their contexts, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: deque[str] = deque(maxlen=_MESSAGES)
        self.seen = 0

    def take(self, severity: str, text: str) -> None:
        """Take a message; everything up to INFO goes to standard error, which is the step's log."""
        if severity == "VERBOSE":
            return
        sys.stderr.write(f"[{severity}] {text}\n")
        if severity in ("ERROR", "INTERNAL_ERROR"):
            self.latest.append(text)
            self.seen += 1

    def failure(self, what: str, remedy: str, since: int = 0) -> EnginesmithError:
        """Make an error that quotes the first message after ``since`` ones; StepOutOfMemory where memory ran out."""
        fresh = list(self.latest)[-(self.seen - since) :] if self.seen > since else []
        message = f"{what}, and said: {fresh[0]}" if fresh else f"{what}, and did not say why"
        if says_out_of_memory("\n".join(fresh)):
            return out_of_memory("\n".join(fresh), message, "use a smaller batch, or close what else is on the device")
        return ModelError(message, remedy)


@functools.cache
def _relay(trt: Any) -> Any:
    """Make the one logger of the process, which passes messages on to the log that listens now, and is never freed.

    TensorRT goes on using the first logger that it was given for as long as any object of its lives.
    """

    class Relay(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.listener: BuildLog | None = None
            # a large build has a million messages, and the binding takes its time to find the name of a member
            self.names = {int(member): name for name, member in trt.ILogger.Severity.__members__.items()}

        def log(self, severity: Any, msg: str) -> None:
            if self.listener is not None:
                self.listener.take(self.names[int(severity)], msg)

    return Relay()


def logger(trt: Any, log: BuildLog) -> Any:
    """Return a TensorRT logger that hands everything to ``log`` from now on."""
    relay = _relay(trt)
    relay.listener = log
    return relay


@contextlib.contextmanager
def listening(trt: Any, log: BuildLog) -> Iterator[Any]:
    """Hand everything to ``log`` meanwhile, then to the log that listened before."""
    relay = _relay(trt)
    before, relay.listener = relay.listener, log
    try:
        yield relay
    finally:
        relay.listener = before
