"""Every error that enginesmith raises on purpose.

    EnginesmithError                  exit code 1   a stage failed
    ├── UsageError                    exit code 2   what was asked for makes no sense: options, recipe, inputs
    │   ├── SourceError                             the model cannot be found or loaded
    │   ├── SignatureError                          input names, dtypes or shapes do not fit the model
    │   ├── DataError                               calibration or evaluation data cannot be used
    │   └── EmptyLayer                              a layer would have nothing left of what is pruned
    ├── GateBreach                    exit code 3   a budget or a baseline was not met
    ├── MissingCapability             exit code 4   this machine lacks what was asked for
    ├── ModelError                                  the model or graph is broken or unsupported
    │   ├── InvalidGraph                            an ONNX file that is damaged or breaks the specification
    │   ├── ExportError                             PyTorch could not turn the module into a graph
    │   ├── BuildError                              an engine's builder made no engine of the graph
    │   │   ├── UnsupportedGraph                    operators, types or values that it does not take
    │   │   ├── LimitTooSmall                       it needs more memory than it was allowed
    │   │   ├── WrongEngine                         what it made is not what the graph asks for
    │   │   └── BuilderFailed                       it failed for a reason of its own
    │   └── FidelityError                           outputs differ from the reference by more than allowed
    ├── StoreError                                  the store or a run directory cannot be read or written
    │   └── MissingEntry                            the store lacks what has to be there
    └── StepError                                   a step's process ended without a result
        ├── StepCrashed                             killed by a signal (a segmentation fault, say)
        ├── StepOutOfMemory                         an allocation failed
        │   └── StepKilled                          killed from outside, by the kernel most likely
        └── StepTimeout                             ran past its time limit

Each carries what was wrong, and what to do about it as ``remedy``. Third-party exceptions become one of these at the
boundary where they enter; the original stays chained as ``__cause__``.
"""

import contextlib
import errno
import importlib.metadata
import os
import re
import shlex
from collections.abc import Iterator
from typing import ClassVar


class EnginesmithError(Exception):
    """Root of the tree; ``exit_code`` is what the command line returns for it."""

    exit_code: ClassVar[int] = 1
    failure: ClassVar[str] = ""
    """The class of a failure, for tables of many of them; empty where the type says no more than "failed"."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.remedy}" if self.remedy else self.message


class UsageError(EnginesmithError):
    """Options, recipe or inputs that make no sense together."""

    exit_code = 2


class SourceError(UsageError):
    """MODEL cannot be found, imported or built."""


class SignatureError(UsageError):
    """Names, dtypes or shapes that do not fit the model's inputs."""


class DataError(UsageError):
    """A data set that is missing, empty or of the wrong form."""


class EmptyLayer(UsageError):
    """A pruning target that could only be met by taking all of a layer."""


class GateBreach(EnginesmithError):
    """A budget or a stored baseline was not met."""

    exit_code = 3


class MissingCapability(EnginesmithError):
    """A device or package that this machine does not have; the remedy names the command that installs it."""

    exit_code = 4


class ModelError(EnginesmithError):
    """The model itself is broken or uses what is not supported."""


class InvalidGraph(ModelError):
    """An ONNX file that is damaged, incomplete or breaks the specification."""

    failure = "invalid"


class ExportError(ModelError):
    """PyTorch could not turn the module into a graph; the message names the operator and the user's line."""


class BuildError(ModelError):
    """An engine's builder made no engine of a sound graph."""


class UnsupportedGraph(BuildError):
    """The builder does not take what is in the graph; the message names the nodes and the modules they come from."""

    failure = "unsupported"


class LimitTooSmall(BuildError):
    """The builder needs more memory than its limit; the message says what was asked for."""

    failure = "does not fit the limit"


class WrongEngine(BuildError):
    """The builder made an engine whose inputs, outputs or layers are not those of the graph."""

    failure = "wrong result"


class BuilderFailed(BuildError):
    """The builder failed for a reason of its own; its log is kept."""

    failure = "internal"


class FidelityError(ModelError):
    """Outputs differ from the reference by more than the thresholds allow."""


class StoreError(EnginesmithError):
    """The store or a run directory cannot be read or written."""


class MissingEntry(StoreError):
    """The store lacks what has to be there."""


class StepError(EnginesmithError):
    """A step's process ended without a result."""


class StepCrashed(StepError):
    """The process was killed by a signal."""

    failure = "crash"


class StepOutOfMemory(StepError):
    """The process asked for more memory than there was; the bytes are None where nobody told them."""

    failure = "out of memory"

    def __init__(
        self, message: str, remedy: str = "", *, asked_bytes: int | None = None, free_bytes: int | None = None
    ) -> None:
        super().__init__(message, remedy)
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes


class StepKilled(StepOutOfMemory):
    """The process was killed from outside, which the kernel does where memory ran out."""


class StepTimeout(StepError):
    """The process ran past its time limit."""

    failure = "timeout"


def install_command(distribution: str, *flags: str) -> str:
    """Write the pip command that installs a distribution, in the versions that enginesmith asks for.

    It names the distribution and not an extra of enginesmith, which is on no package index.
    """
    try:
        requirements = importlib.metadata.requires("enginesmith") or []
    except importlib.metadata.PackageNotFoundError:  # run from a folder on the path, not installed
        requirements = []
    name = re.compile(rf"{re.escape(distribution)}(?![\w.-])[^;]*")
    matches = (match for text in requirements if (match := name.match(text)))
    wanted = next((match[0].strip() for match in matches), distribution)
    return shlex.join(["pip", "install", *flags, wanted])


# The system's errors about files, in the words of what was being kept.


@contextlib.contextmanager
def storage_errors(place: str) -> Iterator[None]:
    """Turn what the file system refuses into one message.

    Raises:
        StoreError: a full disk, missing rights, a read-only file system.
    """
    try:
        yield
    except OSError as error:
        raise translated(error, place) from error


def translated(error: OSError, place: str) -> StoreError:
    """The message for a file system's refusal."""
    remedies = {
        errno.ENOSPC: "free some space (`enginesmith cache prune --local --max-size 5GiB`) or choose another disk",
        errno.EDQUOT: "free some space (`enginesmith cache prune --local --max-size 5GiB`) or choose another disk",
        errno.EACCES: "choose a folder that you may write to",
        errno.EPERM: "choose a folder that you may write to",
        errno.EROFS: "choose a folder that you may write to",
    }
    if error.errno == errno.EEXIST:
        return StoreError(f"{place}: a file is where a folder has to be", "choose another place")
    what = os.strerror(error.errno).lower() if error.errno else str(error)
    return StoreError(f"{place}: {what}", remedies.get(error.errno or 0, "check the path and its rights"))
