"""Every error that enginesmith raises on purpose.

    EnginesmithError        exit code 1   a stage failed
    ├── UsageError          exit code 2   SourceError, SignatureError (ShapeError), DataError (SampleError), EmptyLayer
    ├── GateBreach          exit code 3
    ├── MissingCapability   exit code 4
    ├── ModelError                        InvalidGraph, ExportError, FidelityError
    │   └── BuildError                    UnsupportedGraph, LimitTooSmall, WrongEngine, BuilderFailed
    ├── StoreError                        MissingEntry
    └── StepError                         StepCrashed, StepTimeout, StepOutOfMemory, StepKilled (KilledForMemory)

Each tells what was wrong, and what to do about it as ``remedy``. Third-party exceptions become one of these at the
boundary where they enter; the original stays chained as ``__cause__``.
"""

import contextlib
import errno
import importlib.metadata
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal

REMEDY_LINE = "  → "
"""Beginning of the line of a message that says what to do."""


class EnginesmithError(Exception):
    """Root of the tree; ``exit_code`` is what the command line returns for it."""

    exit_code: ClassVar[int] = 1
    failure: ClassVar[str] = ""
    """The class of a failure, for tables of many of them; empty where the type says no more than "failed"."""

    def __init_subclass__(cls, exit_code: int | None = None, failure: str | None = None) -> None:
        cls.exit_code = cls.exit_code if exit_code is None else exit_code
        cls.failure = cls.failure if failure is None else failure

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n{REMEDY_LINE}{self.remedy}" if self.remedy else self.message


class UsageError(EnginesmithError, exit_code=2):
    """Options, recipe or inputs that make no sense together."""


class SourceError(UsageError):
    """MODEL cannot be found, imported or built."""


class SignatureError(UsageError):
    """Names, dtypes or shapes that do not fit the model's inputs."""


class CallError(SignatureError):
    """Arguments that are missing, given twice, or none of the model's inputs."""


class ShapeError(SignatureError):
    """Sizes that the model, or the engine that was built of it, does not take."""


class DataError(UsageError):
    """A data set that is missing, empty or of the wrong form."""


class SampleError(DataError):
    """A sample that cannot be judged; ``{}`` in the words stands for it."""

    def __init__(self, words: str, remedy: str = "", sample: int = 0) -> None:
        super().__init__(words.replace("{}", f"sample {sample}"), remedy)
        self.words, self.sample = words, sample

    def on_row(self, row: int, data: str) -> DataError:
        """Name the row of the user's data instead of the place among the samples that are judged."""
        return DataError(self.words.replace("{}", f"row {row} of {data}"), self.remedy)


class EmptyLayer(UsageError):
    """A pruning target that could only be met by taking all of a layer."""


class GateBreach(EnginesmithError, exit_code=3):
    """A budget or a stored baseline was not met."""


class MissingCapability(EnginesmithError, exit_code=4):
    """A device or package that this machine does not have; the remedy names the command that installs it."""


class ModelError(EnginesmithError):
    """The model itself is broken or uses what is not supported."""


class InvalidGraph(ModelError, failure="invalid"):
    """An ONNX file that is damaged, incomplete or breaks the specification."""


class ExportError(ModelError):
    """PyTorch could not turn the module into a graph; the message names the operator and the user's line."""


class BuildError(ModelError):
    """An engine's builder made no engine of a sound graph; ``trial`` advises to try other builds."""

    def __init__(self, message: str, remedy: str = "", trial: str = "") -> None:
        super().__init__(message, f"{remedy}; {trial}" if trial else remedy)
        self.remedy_of_trial = remedy


class UnsupportedGraph(BuildError, failure="unsupported"):
    """The builder does not take what is in the graph; the message names the nodes and the modules they come from."""


class LimitTooSmall(BuildError, failure="does not fit the limit"):
    """The builder needs more memory than its limit; the message says what was asked for."""


class WrongEngine(BuildError, failure="wrong result"):
    """The builder made an engine whose inputs, outputs or layers are not those of the graph."""


class BuilderFailed(BuildError, failure="internal"):
    """The builder failed for a reason of its own; its log is kept."""


class FidelityError(ModelError):
    """Outputs differ from the reference by more than the thresholds allow."""


class StoreError(EnginesmithError):
    """The store or a run directory cannot be read or written."""


class MissingEntry(StoreError):
    """The store lacks what has to be there."""


class StepError(EnginesmithError):
    """A step's process ended without a result."""


class StepCrashed(StepError, failure="crash"):
    """The process was killed by a signal."""


class StepOutOfMemory(StepError, failure="out of memory"):
    """The process asked for more memory than there was; the bytes are None where nobody told them.

    ``limited_torch``: it was PyTorch that reached the limit of its own.
    """

    def __init__(
        self,
        message: str,
        remedy: str = "",
        *,
        asked_bytes: int | None = None,
        free_bytes: int | None = None,
        limited_torch: bool = False,
    ) -> None:
        super().__init__(message, remedy)
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes
        self.limited_torch = limited_torch


class StepKilled(StepError, failure="crash"):
    """The process was killed from outside (SIGKILL), by a person or a program."""


class KilledForMemory(StepKilled, StepOutOfMemory, failure="out of memory"):
    """The kernel killed the process because memory ran out, or nothing says that it was not the kernel."""


class StepTimeout(StepError, failure="timeout"):
    """The process ran past its time limit."""


DROPPED = "dropped: "
"""Begins the reason of a variant that is not wrong, and not worth more time."""
NO_TIME = "no time was left to try it"
"""Reason of what was not begun, or was ended, because the time of the whole run was over."""
OVER_SHARE = "it was stopped, as it took more than its share of the time (--time gives more)"
"""Reason of what was ended while the whole run had time left."""
NO_TIME_TO_MEASURE = "it was built, and no time was left to measure it"
"""Reason of a variant whose engine there is, where the time of the whole run was over."""
Late = Literal["no time", "over share", "no time to measure"]
"""Words for these reasons in documents that are read again."""
LATE: Mapping[str, Late] = {
    NO_TIME: "no time",
    OVER_SHARE: "over share",
    NO_TIME_TO_MEASURE: "no time to measure",
}
"""Reasons of what another run may go on with."""


def warn_caller(message: str) -> None:
    """Warn where the nearest code is that is neither enginesmith's nor torch's, which may be between the two."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("enginesmith", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def install_command(distribution: str, *flags: str) -> str:
    """Write the pip command that installs a distribution, in the versions that enginesmith asks for.

    It names the distribution and not an extra of enginesmith, which is on no package index.
    """
    try:
        requirements = importlib.metadata.requires("enginesmith") or []
    except importlib.metadata.PackageNotFoundError:  # run from a folder on the path, not installed
        requirements = []
    name = re.compile(rf"{re.escape(distribution)}(?![\w.-])[^;]*")
    wanted = next((match[0].strip() for text in requirements if (match := name.match(text))), distribution)
    return shlex.join(["pip", "install", *flags, wanted])


def broken_package(package: str, reason: str) -> MissingCapability:
    """Describe a package that is installed and cannot be imported, with the command that installs it again."""
    command = install_command(_find_distribution(package) or package, "--force-reinstall")
    words = reason.strip().partition("\n")[0] or "it does not say why"
    return MissingCapability(f"{package} cannot be imported: {words}", f"install it again: {command}")


def explain_import(error: ImportError) -> MissingCapability | None:
    """Name the installed package whose import raised an error; None if no distribution has it, as with user's code.

    Packages also raise it later, in a function that needs another one: then they can be imported.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    names = [frame.f_globals.get("__name__", "") for frame in frames]
    for name in (*reversed(names), error.name or ""):
        package = name.partition(".")[0]
        if package not in ("", "enginesmith", "importlib") and _find_distribution(package):
            return broken_package(package, str(error))
    return None


def _find_distribution(package: str) -> str | None:
    """Find the distribution that a package is installed by: most have its name."""
    try:
        return importlib.metadata.metadata(package)["Name"].replace("_", "-")
    except importlib.metadata.PackageNotFoundError:
        return next(iter(importlib.metadata.packages_distributions().get(package, ())), None)


def require_utf8(text: str, place: str) -> None:
    """Insist that Python decoded a path from UTF-8: others fit into no document, and PyTorch's exporters refuse them.

    Raises:
        SourceError: its bytes are no UTF-8, or the locale has no characters for them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = text.encode(errors="surrogateescape").decode(errors="backslashreplace")
        raise SourceError(
            f"{place}: '{shown}' is not UTF-8, or the locale has no characters for it",
            "rename it; a name that is UTF-8 works with the environment variable LC_ALL=C.UTF-8",
        ) from None


@contextlib.contextmanager
def storage_errors(place: str, choose: str = "choose", store: Path | None = None) -> Iterator[None]:
    """Turn what the file system refuses into one message, as :func:`explain_errno` does.

    Raises:
        StoreError: a full disk, missing rights, a read-only file system.
    """
    try:
        yield
    except OSError as error:
        raise explain_errno(error, place, choose, store) from error


def explain_errno(error: OSError, place: str, choose: str = "choose", store: Path | None = None) -> StoreError:
    """Turn a file system's refusal into a message; ``place`` names what could not be kept there.

    ``choose`` begins the advice to take another folder. ``store`` is the folder of the store that is on that disk,
    where it is known; else only the user knows which one is.
    """
    if error.errno == errno.EEXIST:
        return StoreError(f"{place}: a file is where a folder has to be", "choose another place")
    remedy = "check the path and its rights"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        prune = (
            f"`enginesmith cache prune {f'--store {shlex.quote(str(store))}' if store else '--local'} --max-size 5GiB`"
        )
        how = prune if store else f"if the store is on that disk: {prune}, with --store if you gave one"
        remedy = f"free some space ({how}) or choose another disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = f"{choose} a folder that you may write to"
    elif error.errno == errno.EFBIG:
        remedy = "allow larger files (`ulimit -f unlimited`), or choose another disk"
    return StoreError(f"{place}: {os.strerror(error.errno).lower() if error.errno else error}", remedy)
