"""The content-addressed store: a key says what was done to what, and leads to the files that came out.

    ROOT/objects/ab/abcdef…/artifact.json + files      published artifacts, named by key
    ROOT/reads/…json                                   the user's files that a step read when it last ran
    ROOT/begun/…                                       what a long step has so far; gone once it is done
    ROOT/tmp/PID@HOST-…                                  work in flight; nobody reads it

An entry appears whole or not at all: it is written under ``tmp`` and renamed. What is read is held against its
digests; a damaged entry is thrown away and made again.
"""

import contextlib
import errno
import fcntl
import os
import platform
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from enginesmith.pipeline.artifact import (
    Artifact,
    HistoryEntry,
    Kind,
    files_below,
    folder_digest,
    json_digest,
)
from enginesmith.pipeline.reads import Reads
from enginesmith.pipeline.storage import storage_errors
from enginesmith.pipeline.stored_file import StoredFile, as_it_was, stored_file
from enginesmith.pipeline.tensors import Signature

_MANIFEST = "artifact.json"
UNFINISHED = "unfinished"
"""The kind of an entry that a step has begun, and not ended."""


class Manifest(BaseModel):
    """What ``artifact.json`` holds."""

    kind: Kind
    file: str
    files: dict[str, StoredFile]
    signature: Signature | None
    history: tuple[HistoryEntry, ...]
    breach: str
    provisional: bool = False
    step: str

    @property
    def digest(self) -> str:
        """Of the manifest itself, which says what people read."""
        return json_digest(self.model_dump(mode="json"))


class _SealedManifest(BaseModel):
    """A manifest with its own digest, as it lies in the store."""

    digest: str
    manifest: Manifest


@dataclass(frozen=True)
class Entry:
    """A line of ``cache list``."""

    key: str
    step: str
    kind: str
    bytes: int
    used: float
    """Seconds since the epoch."""


class Store:
    """A folder of artifacts by key; several processes may use one at the same time."""

    def __init__(self, root: Path, *, reuse: bool = True) -> None:
        """Open a store, making its folder if needed; with ``reuse`` false only what this object published is found.

        Raises:
            StoreError: the folder cannot be made or written.
        """
        self.root = root
        self._reuse = reuse
        self._published: set[str] = set()
        with storage_errors(f"the store {root}"):
            for name in ("objects", "reads", "begun", "tmp"):
                (root / name).mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()

    def get(self, key: str) -> Artifact | None:
        """The artifact of a key, or None where there is none; a damaged one is removed and counts as none."""
        folder = self._folder(key)
        if not (self._reuse or key in self._published) or not (folder / _MANIFEST).is_file():
            return None
        manifest = self._intact(folder)
        if manifest is None:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        with contextlib.suppress(OSError):  # a store that may only be read has no last use
            os.utime(folder)
        return _artifact(folder, manifest)

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """An empty folder on the store's own file system; what is not published from it is removed.

        Raises:
            StoreError: it cannot be made.
        """
        folder = self.root / "tmp" / _own_name()
        with storage_errors(f"the store {self.root}"):
            folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def begun(self, name: str) -> Iterator[Path]:
        """What a step has so far, as the last process that was ended left it; removed when this block ends well.

        A second process that does the same step at the same time has an empty workspace instead. Where nothing may be
        reused, what others left is removed first; what this block leaves if it ends badly is there for the next.

        Raises:
            StoreError: it cannot be made.
        """
        folder = self.root / "begun" / name
        with contextlib.ExitStack() as stack:
            if (lock := _claimed(folder)) is not None:
                stack.callback(os.close, lock)
                stack.callback(_remove_if_empty, folder)
                if not self._reuse:
                    _empty(folder)
                yield folder
                shutil.rmtree(folder, ignore_errors=True)
            else:
                yield stack.enter_context(self.workspace())

    def publish(
        self,
        key: str,
        folder: Path,
        *,
        kind: Kind,
        file: str,
        signature: Signature | None,
        history: tuple[HistoryEntry, ...],
        breach: str = "",
        provisional: bool = False,
    ) -> Artifact:
        """Move a workspace's content under its key, in one step, and give back the artifact.

        Raises:
            StoreError: the disk is full or cannot be written.
        """
        target = self._folder(key)
        with storage_errors(f"the store {self.root}"):
            files = {name: stored_file(folder / name) for name in files_below(folder)}
            step = history[-1].step if history else ""
            manifest = Manifest(
                kind=kind,
                file=file,
                files=files,
                signature=signature,
                history=history,
                breach=breach,
                provisional=provisional,
                step=step,
            )
            sealed = _SealedManifest(digest=manifest.digest, manifest=manifest)
            (folder / _MANIFEST).write_text(sealed.model_dump_json(indent=1))
            target.parent.mkdir(exist_ok=True)
            self._move(folder, target)
        self._published.add(key)
        return _artifact(target, _read(target) or manifest)

    def reads(self, name: str) -> "Reads":
        """What a step read of the user's files when it last ran on this machine."""
        return Reads(self.root / "reads" / f"{name}.json")

    def entries(self) -> list[Entry]:
        """Everything published, the latest used first."""
        found = []
        for path in self.root.glob(f"objects/*/*/{_MANIFEST}"):
            folder = path.parent
            manifest = _read(folder)
            total = sum(file.bytes for file in manifest.files.values()) if manifest else 0
            step, kind = (manifest.step, manifest.kind) if manifest else ("unreadable", "?")
            found.append(Entry(folder.name, step, kind, total, folder.stat().st_mtime))
        for folder in self.root.glob("begun/*"):
            with contextlib.suppress(FileNotFoundError):  # its step has ended meanwhile
                total = sum((folder / name).stat().st_size for name in files_below(folder))
                found.append(Entry(folder.name, "unfinished", UNFINISHED, total, folder.stat().st_mtime))
        return sorted(found, key=lambda entry: -entry.used)

    def verify(self) -> list[str]:
        """Hash every file of every entry; remove the damaged ones and give back their keys."""
        damaged = []
        for path in sorted(self.root.glob(f"objects/*/*/{_MANIFEST}")):
            if self._intact(path.parent, every_byte=True) is None:
                damaged.append(path.parent.name)
                shutil.rmtree(path.parent, ignore_errors=True)
        return damaged

    def prune(self, *, max_bytes: int | None = None, max_age_seconds: float | None = None) -> list[Entry]:
        """Remove entries not used for so long, then the least recently used until the rest fits; give them back."""
        removed, kept = [], 0
        oldest = time.time() - max_age_seconds if max_age_seconds is not None else 0.0
        for entry in self.entries():
            kept += entry.bytes
            unwanted = entry.used < oldest or (max_bytes is not None and kept > max_bytes)
            if unwanted and self._removed(entry):
                kept -= entry.bytes
                removed.append(entry)
        self._remove_abandoned()
        return removed

    def _removed(self, entry: Entry) -> bool:
        """Whether it could be removed: what a process is at work on stays."""
        if entry.kind != UNFINISHED:
            shutil.rmtree(self._folder(entry.key), ignore_errors=True)
            return True
        folder = self.root / "begun" / entry.key
        if (lock := _claimed(folder)) is None:
            return False
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        return True

    def _remove_abandoned(self) -> None:
        for folder in (self.root / "tmp").iterdir():
            owner, _, host = folder.name.rpartition("-")[0].partition("@")
            if host == platform.node() and not Path("/proc", owner).exists():
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, key: str) -> Path:
        return self.root / "objects" / key[:2] / key

    def _move(self, folder: Path, target: Path) -> None:
        """Put a folder in its place; what another process put there meanwhile stays, if it is whole."""
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if self._reuse and self._usable(target):
                return
            displaced = self.root / "tmp" / _own_name()
            target.rename(displaced)
            folder.rename(target)
            shutil.rmtree(displaced, ignore_errors=True)

    def _usable(self, folder: Path) -> bool:
        manifest = self._intact(folder)
        return manifest is not None and not manifest.provisional

    def _intact(self, folder: Path, *, every_byte: bool = False) -> Manifest | None:
        manifest = _read(folder)
        if manifest is None or files_below(folder, skip=[_MANIFEST]) != sorted(manifest.files):
            return None
        try:
            whole = all(as_it_was(folder / name, file, every_byte) for name, file in manifest.files.items())
        except OSError:  # another process removed it meanwhile
            return None
        return manifest if whole else None


def _claimed(folder: Path) -> int | None:
    """A descriptor that holds the folder, which is made if needed, for this process; None if another one does."""
    with storage_errors(f"the folder {folder}"):
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.fstat(descriptor).st_nlink > 0  # else another process removed it between the two
    except BlockingIOError:
        held = False
    if not held:
        os.close(descriptor)
        return None
    return descriptor


def _empty(folder: Path) -> None:
    with storage_errors(f"the folder {folder}"):
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _own_name() -> str:
    """A name that says whose it is: process and machine."""
    return f"{os.getpid()}@{platform.node()}-{uuid.uuid4().hex}"


def default_root() -> Path:
    """``$ENGINESMITH_STORE``, else ``enginesmith`` in the user's cache folder."""
    if chosen := os.environ.get("ENGINESMITH_STORE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "enginesmith"


def _read(folder: Path) -> Manifest | None:
    try:
        sealed = _SealedManifest.model_validate_json((folder / _MANIFEST).read_bytes())
    except (ValidationError, OSError):
        return None
    return sealed.manifest if sealed.manifest.digest == sealed.digest else None


def _artifact(folder: Path, manifest: Manifest) -> Artifact:
    return Artifact(
        kind=manifest.kind,
        path=folder / manifest.file,
        sha256=folder_digest({name: file.sha256 for name, file in manifest.files.items()}),
        bytes=sum(file.bytes for file in manifest.files.values()),
        signature=manifest.signature,
        history=manifest.history,
        breach=manifest.breach,
        provisional=manifest.provisional,
    )
