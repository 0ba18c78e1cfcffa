"""Keep the part of a store on this machine: published entries, and folders for work in flight.

    ROOT/objects/ab/abcdef…/artifact.json + files      published artifacts, named by key
    ROOT/begun/…                                       partial work of a long step; gone once it is done
    ROOT/tmp/PID@HOST-…                                work in flight; nobody reads it

An entry appears whole or not at all: it is written under ``tmp`` and renamed. Files are checked against
their digests when they are read; a damaged entry is removed and made again.
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
from pathlib import Path

from enginesmith.pipeline.artifact import files_below
from enginesmith.pipeline.errors import storage_errors
from enginesmith.pipeline.store.manifest import (
    MANIFEST,
    UNFINISHED,
    Entry,
    Manifest,
    decode_checked,
    encode,
    entry_of,
    is_unchanged,
    prune_entries,
)


class LocalStore:
    """A folder of entries by key; several processes may use one at the same time."""

    def __init__(self, root: Path, *, make: bool = True) -> None:
        """Open the folder, and make it if needed; unless ``make``, it is made with the first entry.

        Raises:
            StoreError: it cannot be made or written.
        """
        self.root = root
        if make:
            with storage_errors(f"the store {root}"):
                for name in ("objects", "reads", "begun", "tmp"):
                    (root / name).mkdir(parents=True, exist_ok=True)
        self.remove_abandoned()

    def folder(self, key: str) -> Path:
        """Return the folder of an entry, whether it exists or not."""
        return self.root / f"objects/{key[:2]}/{key}"

    def find(self, key: str) -> Manifest | None:
        """Read the manifest of an entry and check its files; None if there is none. A damaged entry is removed."""
        folder = self.folder(key)
        if not os.access(folder / MANIFEST, os.F_OK):
            return None
        manifest = _read_intact(folder) or _read_intact(folder)  # it may have been replaced while it was looked at
        if manifest is None:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        with contextlib.suppress(OSError):  # a store that may only be read has no last use
            os.utime(folder)
        return manifest

    def install(self, key: str, folder: Path, manifest: Manifest, *, replace: bool) -> Manifest:
        """Move a workspace's content under its key, in one step; return the manifest that is there then.

        An entry of another process stays, if it is whole and final, unless it is to be replaced.

        Raises:
            StoreError: the disk is full or cannot be written.
        """
        target = self.folder(key)
        with storage_errors(f"the store {self.root}"):
            (folder / MANIFEST).write_bytes(encode(manifest))
            target.parent.mkdir(parents=True, exist_ok=True)
            self._move(folder, target, replace)
        return _read(target) or manifest

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """Make an empty folder on the store's own file system, and remove it afterwards unless it was published.

        Raises:
            StoreError: it cannot be made.
        """
        folder = self.root / "tmp" / _workspace_name()
        with storage_errors(f"the store {self.root}"):
            folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def partial_work(self, name: str, *, resume: bool) -> Iterator[Path]:
        """Open the folder of a step's partial work, as the last interrupted process left it; removed on success.

        A second process that does the same step at the same time has an empty workspace instead. Earlier content is
        removed first, unless ``resume``; content that is left on failure is there for the next process.

        Raises:
            StoreError: it cannot be made.
        """
        folder = self.root / "begun" / name
        with contextlib.ExitStack() as stack:
            if (lock := _try_claim(folder)) is not None:
                stack.callback(os.close, lock)
                stack.callback(_remove_if_empty, folder)
                if not resume:
                    _remove_content(folder)
                yield folder
                shutil.rmtree(folder, ignore_errors=True)
            else:
                yield stack.enter_context(self.workspace())

    def entries(self) -> list[Entry]:
        """List published entries and partial work, most recently used first."""
        entries = []
        for path in self.root.glob(f"objects/*/*/{MANIFEST}"):
            folder = path.parent
            with contextlib.suppress(FileNotFoundError):  # another process removed it meanwhile
                entries.append(entry_of(folder.name, _read(folder), folder.stat().st_mtime))
        for folder in self.root.glob("begun/*"):
            with contextlib.suppress(FileNotFoundError):  # its step has ended meanwhile
                total = sum((folder / name).stat().st_size for name in files_below(folder))
                entries.append(Entry(folder.name, "unfinished", UNFINISHED, total, folder.stat().st_mtime))
        return sorted(entries, key=lambda entry: -entry.used)

    def verify(self) -> list[str]:
        """Hash every file of every entry; remove the damaged entries and return their keys."""
        damaged = []
        for path in sorted(self.root.glob(f"objects/*/*/{MANIFEST}")):
            if _read_intact(path.parent, every_byte=True) is None:
                damaged.append(path.parent.name)
                shutil.rmtree(path.parent, ignore_errors=True)
        return damaged

    def prune(self, max_bytes: int | None, max_age_seconds: float | None) -> list[Entry]:
        """Remove entries as :func:`.manifest.prune_entries` does, and the workspaces of killed processes."""
        removed = prune_entries(self.entries(), self._try_remove, max_bytes, max_age_seconds)
        self.remove_abandoned()
        if max_age_seconds is not None:
            self._forget_reads(time.time() - max_age_seconds)
        return removed

    def remove_abandoned(self) -> None:
        """Remove the workspaces of processes of this machine that are gone."""
        for folder in self.root.glob("tmp/*"):
            owner, _, host = folder.name.rpartition("-")[0].partition("@")
            if host == platform.node() and not Path("/proc", owner).exists():
                shutil.rmtree(folder, ignore_errors=True)

    def _forget_reads(self, oldest: float) -> None:
        """Remove the candidates of names that were not looked up since then."""
        for path in self.root.glob("reads/*/*.json"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()
                    path.parent.rmdir()

    def _try_remove(self, entry: Entry) -> bool:
        """Remove an entry and return whether it could be: partial work that a process is at stays."""
        if entry.kind != UNFINISHED:
            shutil.rmtree(self.folder(entry.key), ignore_errors=True)
            return True
        folder = self.root / "begun" / entry.key
        if (lock := _try_claim(folder)) is None:
            return False
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        return True

    def _move(self, folder: Path, target: Path, replace: bool) -> None:
        while True:
            try:
                folder.rename(target)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if not replace and (present := _read_intact(target)) is not None and not present.incomplete:
                return
            displaced = self.root / "tmp" / _workspace_name()
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                target.rename(displaced)
            shutil.rmtree(displaced, ignore_errors=True)


def _read(folder: Path) -> Manifest | None:
    try:
        return decode_checked((folder / MANIFEST).read_bytes())
    except OSError:
        return None


def _read_intact(folder: Path, *, every_byte: bool = False) -> Manifest | None:
    manifest = _read(folder)
    if manifest is None or files_below(folder, skip=[MANIFEST]) != sorted(manifest.files):
        return None
    try:
        whole = all(is_unchanged(folder / name, file, every_byte) for name, file in manifest.files.items())
    except OSError:  # another process removed it meanwhile
        return None
    return manifest if whole else None


def _try_claim(folder: Path) -> int | None:
    """Lock a folder, which is made if needed, for this process; returns a descriptor, or None if another one has it."""
    with storage_errors(f"the folder {folder}"):
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        claimed = os.fstat(descriptor).st_nlink > 0  # else another process removed it between the two
    except BlockingIOError:
        claimed = False
    if not claimed:
        os.close(descriptor)
        return None
    return descriptor


def _remove_content(folder: Path) -> None:
    with storage_errors(f"the folder {folder}"):
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _workspace_name() -> str:
    """Make up a name that identifies process and machine."""
    return f"{os.getpid()}@{platform.node()}-{uuid.uuid4().hex}"
