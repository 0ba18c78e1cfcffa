"""Artifacts, which passes hand to each other: files with a digest and a history, never live objects."""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from enginesmith.pipeline.errors import EnginesmithError, MissingEntry
from enginesmith.pipeline.tensors import Signature

MANIFEST_NAMES = ("artifact.json", "manifest.json")
"""Files that lie beside an artifact's own: the store's record of it, and the run directory's."""

Kind = Literal["torch", "onnx", "engine", "reference", "record"]


class HistoryEntry(BaseModel, frozen=True):
    """One thing that was done to an artifact: with what, at what cost, to what effect."""

    step: str
    parameters: dict[str, Any]
    tools: dict[str, str]
    seconds: float
    host_peak_bytes: int | None
    effect: str
    notes: tuple[str, ...] = ()


class Artifact(BaseModel, frozen=True):
    """A file, perhaps with others beside it, as it stands in the store.

    ``path`` is the main file (``model.onnx``), ``sha256`` covers every file of the artifact and ``bytes`` is their sum.
    """

    kind: Kind
    path: Path
    sha256: str
    bytes: int
    signature: Signature | None = None
    history: tuple[HistoryEntry, ...] = ()
    rejected: str = ""
    """Reason why it is not good enough, where it is not."""
    incomplete: bool = False
    """It is to be made again the next time."""
    key: str = Field("", exclude=True)
    """Key in the store that it was taken from, under which another machine finds it there, too."""

    @property
    def folder(self) -> Path:
        """Folder of the artifact's files."""
        return self.path.parent

    @property
    def model_signature(self) -> Signature:
        """Inputs and outputs of a model that was loaded or made here, which has them."""
        assert self.signature is not None
        return self.signature


class Effect(BaseModel, frozen=True):
    """Outcome of a step: the main file it wrote, the signature it leaves, and one factual sentence."""

    file: str
    summary: str
    notes: tuple[str, ...] = ()
    signature: Signature | None = None
    rejected: str = ""
    """Reason why the result is not good enough to go on with; it is kept all the same."""
    reads: tuple[Path, ...] = ()
    """Files outside of the store that the result depends on, found out while making it; and folders as a whole."""
    packages: dict[str, str] = {}
    """Installed packages that the result depends on, likewise, with their versions and digests."""
    variables: tuple[str, ...] = ()
    """Environment variables that the user's code asked for."""
    existence: dict[Path, bool] = {}
    """By path that the user's code asked for and did not read, whether it was there."""
    links: dict[Path, str | None] = {}
    """By path that the user's code asked for without following it, where it led; None where nothing was."""
    absent_modules: dict[Path, tuple[str, ...]] = {}
    """By folder, modules that Python looked for there, and found elsewhere or not at all."""
    unknown: tuple[str, ...] = ()
    """Whatever the result may depend on and nobody saw, in words: it is not taken from the store again."""
    incomplete: bool = False
    """Something failed that may not fail another time: the result is shown, and not taken from the store again."""


def write_whole(file: Path, data: bytes) -> None:
    """Write a file whole or not at all, whatever other processes write there meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex[:12]}")  # tempfile's files are for their owner only
    try:
        partial.write_bytes(data)
        sync(partial)
        partial.replace(file)
    except BaseException:  # a full disk, or Ctrl-C
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Write a file, or all below a folder, through to the disk: else, without power, a rename may outlast the bytes."""
    for file in [path] if path.is_file() else [path / name for name in files_below(path)]:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def copy_folder(source: Path, target: Path, skip: Iterable[str] = ()) -> None:
    """Copy all files below a folder into another one, which is made if needed.

    Raises:
        OSError: the first one, with its number, such as that of a full disk: ``shutil.copytree`` gathers them as text.
    """
    source.stat()  # nothing is below a folder that is not there
    target.mkdir(parents=True, exist_ok=True)
    for name in files_below(source, skip):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target / name)


@contextlib.contextmanager
def explain_removal(artifacts: Iterable[Artifact], then: str = "") -> Iterator[None]:
    """Explain an error by artifacts that were removed from the store meanwhile, if any; ``then`` ends the remedy.

    Raises:
        MissingEntry: there is one.
    """
    try:
        yield
    except EnginesmithError as error:
        removed = [artifact for artifact in artifacts if not artifact.path.exists()]
        if not removed:
            raise
        steps = ", ".join(sorted({artifact.history[-1].step for artifact in removed if artifact.history}))
        raise MissingEntry(
            f"the result of {steps or 'a step'} was removed from the store while it was in use",
            f"leave the files of the store alone while a run uses them{then}",
        ) from error


def grant_usual_rights(folder: Path) -> None:
    """Give files the rights that their folder has from the umask, at least: some libraries write for the owner only."""
    usual = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path in (folder / name for name in files_below(folder)):
        rights = stat.S_IMODE(path.stat().st_mode)
        if rights | usual != rights and not path.is_symlink():
            path.chmod(rights | usual)


@contextlib.contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """Yield the path of a folder to make, which then takes the place of ``target``, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        whole, old = Path(scratch, target.name), Path(scratch, "old")
        yield whole
        if target.exists():
            target.rename(old)
        try:
            whole.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise


def file_digest(path: Path) -> str:
    """Compute the sha256 of a file's bytes."""
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def has_content(path: Path, sha256: str) -> bool:
    """Tell whether a file is there, with these bytes."""
    return path.is_file() and file_digest(path) == sha256


def folder_digest(digests: Mapping[str, str]) -> str:
    """Compute one digest for files by relative name → their own digest."""
    return json_digest(sorted(digests.items()))


def has_files(folder: Path, sha256: str) -> bool:
    """Tell whether a folder has the files of an artifact as they were made, besides records of it."""
    names = files_below(folder, skip=MANIFEST_NAMES)
    return bool(names) and folder_digest({name: file_digest(folder / name) for name in names}) == sha256


def json_digest(value: Any) -> str:
    """Compute the sha256 of a value's canonical JSON: the same content gives the same digest."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def relative_digests(digests: Mapping[Path, str]) -> list[tuple[str, str]]:
    """Name files from the folder that they share, with their digests: the same for the same project elsewhere."""
    root = Path(os.path.commonpath([path.parent for path in digests])) if digests else Path()
    return sorted((str(path.relative_to(root)), digest) for path, digest in digests.items())


def files_below(folder: Path, skip: Iterable[str] = ()) -> list[str]:
    """List the relative names of all files below a folder, sorted."""
    root = os.path.join(folder, "")  # noqa: PTH118 - an entry of the store is looked at in well under a millisecond
    paths = (os.path.join(parent, name) for parent, _, names in os.walk(root) for name in names)  # noqa: PTH118
    return sorted({path.removeprefix(root) for path in paths if os.path.isfile(path)} - set(skip))  # noqa: PTH113
