"""Keep artifacts by key: the key is a digest of what was done to what, and leads to the files that came out.

A store is a folder of this machine, or a URL that many machines share. Used entries of a shared one are cached in a
folder here, which works as a store by itself does: cached entries are not requested again.

    ROOT/objects/ab/abcdef…/artifact.json + files      published artifacts, named by key
    ROOT/begun/…                                       partial work of a long step; gone once it is done
    ROOT/tmp/PID@HOST-…                                work in flight; nobody reads it. Each run has one as long as it
                                                       lasts: what was used since the oldest was made is not pruned
    ROOT/tmp/earlier-KEY-…                             an entry that is being replaced; put back if that was interrupted
    ROOT/reads/NAME/CANDIDATE.json                     the user's files that steps read, by name
    ROOT/races/MACHINE.json                            how long variants took in earlier searches
    ROOT/searches/PRECISION.json                       what brought similar models within their goals
    ROOT/unshared/KEY                                  entries that are not, or not as a whole, in the shared store yet

An entry appears whole or not at all: it is written under ``tmp`` and renamed. Files are checked against
their digests when they are read; a damaged entry is removed and made again.
"""

import contextlib
import errno
import fcntl
import math
import os
import platform
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

from enginesmith.pipeline.artifact import (
    Artifact,
    HistoryEntry,
    Kind,
    files_below,
    grant_usual_rights,
    sync,
    write_whole,
)
from enginesmith.pipeline.errors import MissingEntry, StoreError, storage_errors
from enginesmith.pipeline.store.address import default_address, parse_address
from enginesmith.pipeline.store.inputs import InputDependencies, ReadRecord, export_candidate, publish_candidate
from enginesmith.pipeline.store.manifest import (
    DAY_SECONDS,
    MANIFEST,
    SMALL_FILE,
    UNFINISHED,
    Entry,
    Manifest,
    PastFolder,
    decode_checked,
    describe_file,
    encode,
    entry_of,
    is_unchanged,
    prune_entries,
)
from enginesmith.pipeline.store.past_records import PastRecords, R
from enginesmith.pipeline.store.remote import SharedStore
from enginesmith.pipeline.store.retry import notify
from enginesmith.pipeline.tensors import Signature

_EARLIER = "earlier-"
"""Begin of the name of an entry that is being replaced."""
_SMALL_FILES = ("reads", *get_args(PastFolder), "timing", "kernels")
"""Folders of files that are made again when they are needed; TensorRT's timings and kernels are in the last two."""


class Store:
    """Artifacts by key; several processes, and of a shared store several machines, may use one at the same time."""

    def __init__(
        self,
        place: Path | str | None = None,
        *,
        reuse: bool = True,
        make: bool = True,
        tell: Callable[[str], None] = notify,
    ) -> None:
        """Open a folder or URL, by default the one of :func:`default_address`; it is made if needed, and if ``make``.

        With ``reuse`` false only entries that this object published are found. ``tell`` takes messages for people: a
        shared store that cannot be reached, say. A shared store is connected to now if this machine has no cache of it,
        so that a wrong address leaves nothing behind; otherwise not before it is needed.

        Raises:
            UsageError: the URL cannot be a store, or none can be made there.
            MissingCapability: the package for its protocol is not installed.
            StoreError: the folder cannot be made or written; the shared store refuses access, or cannot be reached.
        """
        address = default_address() if place is None else parse_address(place)
        self.address = address.text
        self._shared = SharedStore(address.url, tell) if address.url else None
        if self._shared is not None and make and not address.folder.exists():
            self._shared.ensure_marked()
        self.root, self.reuse, self._tell = address.folder, reuse, tell
        self._published: set[str] = set()
        self._unshared: set[str] = set()
        """Keys still to be uploaded: their process was interrupted, or could not reach the shared store."""
        if make:
            with self._storage_errors():
                for name in ("objects", "reads", "begun", "tmp"):
                    (self.root / name).mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()
        with contextlib.suppress(FileNotFoundError):
            names = {path.name for path in (self.root / "unshared").iterdir()}
            self._unshared = {name for name in names if not name.startswith(".")}

    def get(self, key: str) -> Artifact | None:
        """Look up the artifact of a key; None if there is none. A damaged entry is removed.

        Raises:
            StoreError: the shared store refuses access, or cannot be reached.
        """
        if not (self.reuse or key in self._published):
            return None
        manifest = self._find(key)
        if self._shared is not None and key not in self._published:
            if manifest is None or manifest.incomplete:  # another machine may have a final one
                manifest = self._download(self._shared, key) or manifest
            elif key in self._unshared:
                manifest = self._share(self._shared, key, manifest)
        return manifest.artifact(self._folder(key), key) if manifest is not None else None

    def fetch(self, key: str, sha256: str = "") -> Artifact:
        """Fetch the artifact of a key that has to exist, whoever published it; with ``sha256``, the one of that digest.

        Raises:
            MissingEntry: it is nowhere.
            StoreError: the shared store cannot be reached.
        """
        manifest = self._find(key)
        if self._shared is not None and (manifest is None or sha256 not in ("", manifest.sha256)):
            manifest = self._download(self._shared, key, replace=manifest is not None) or manifest
        if manifest is None or sha256 not in ("", manifest.sha256):
            raise MissingEntry(
                f"the store {self.address} has no entry {key[:16]}" + (" of that content" if manifest else ""),
                "it was removed meanwhile; do it again",
            )
        return manifest.artifact(self._folder(key), key)

    def share(self, artifact: Artifact) -> Artifact:
        """Upload an artifact that others lack, and return it as they have it.

        An entry in this machine's cache may have been removed from the shared store, or be on its way there.

        Raises:
            StoreError: the shared store refuses access, or cannot be reached.
        """
        if self._shared is None or (manifest := self._find(artifact.key)) is None:
            return artifact
        shared = self._share(self._shared, artifact.key, manifest)
        shared = shared.model_copy(update={"history": artifact.history})
        return shared.artifact(self._folder(artifact.key), artifact.key)

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """Make an empty folder on the store's own file system, and remove it afterwards unless it was published.

        Raises:
            StoreError: it cannot be made.
        """
        folder = self.root / "tmp" / _workspace_name()
        lock = self._try_claim(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)

    @contextlib.contextmanager
    def partial_work(self, name: str) -> Iterator[Path]:
        """Open the folder of a step's partial work, as the last interrupted process left it; removed on success.

        A second process that does the same step at the same time has an empty workspace instead. If nothing may be
        reused, earlier content is removed first; content that is left on failure is there for the next process.

        Raises:
            StoreError: it cannot be made.
        """
        folder = self.root / "begun" / name
        if (lock := self._try_claim(folder)) is None:
            with self.workspace() as empty:
                yield empty
            return
        try:
            if not self.reuse:
                with storage_errors(f"the folder {folder}", store=self.root):
                    for entry in folder.iterdir():
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            yield folder
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            with contextlib.suppress(OSError):  # it has content, or is gone
                folder.rmdir()
            os.close(lock)

    def publish(
        self,
        key: str,
        folder: Path,
        *,
        kind: Kind,
        file: str,
        signature: Signature | None,
        history: tuple[HistoryEntry, ...],
        rejected: str = "",
        incomplete: bool = False,
        read: ReadRecord | None = None,
    ) -> Artifact:
        """Move a workspace's content under its key, in one step, and return the artifact.

        An entry that another process or machine published meanwhile stays, if it is whole and final, and is returned
        instead; unless nothing may be reused. ``read`` leads other machines to the entry.

        Raises:
            StoreError: the disk is full or cannot be written; the shared store refuses access, or cannot be reached.
        """
        with self._storage_errors():
            grant_usual_rights(folder)
            manifest = Manifest(
                kind=kind,
                file=file,
                files={name: describe_file(folder / name) for name in files_below(folder)},
                signature=signature,
                history=history,
                rejected=rejected,
                incomplete=incomplete,
                step=history[-1].step if history else "",
            )
            if self._shared is not None:
                write_whole(self.root / "unshared" / key, read.path.encode() if read is not None else b"")
                self._unshared.add(key)
        manifest = self._install(key, folder, manifest, replace=not self.reuse)
        if self._shared is not None:
            manifest = self._share(self._shared, key, manifest)
        self._published.add(key)
        return manifest.artifact(self._folder(key), key)

    def dependencies(self, name: str) -> InputDependencies:
        """Return the user's files that the step of that name may depend on."""
        return InputDependencies(self.root / "reads", name, self._shared if self.reuse else None)

    def past(self, folder: PastFolder, name: str, kind: type[R]) -> PastRecords[R]:
        """Return the records of one file of what earlier runs found out."""
        return PastRecords(self.root, folder, name, kind, self._shared)

    def entries(self) -> list[Entry]:
        """List published entries, most recently used first; of a folder, partial work, too."""
        if self._shared is not None:
            return self._shared.entries()
        entries = []
        for path in self.root.glob(f"objects/*/*/{MANIFEST}"):
            folder = path.parent
            with contextlib.suppress(FileNotFoundError):  # another process removed it meanwhile
                entry = entry_of(folder.name, _read(folder), folder.stat().st_mtime)
                entries.append(replace(entry, bytes=_measure(folder)))
        for folder in self.root.glob("begun/*"):
            with contextlib.suppress(FileNotFoundError):  # its step has ended meanwhile
                entries.append(Entry(folder.name, "unfinished", UNFINISHED, _measure(folder), folder.stat().st_mtime))
        return sorted(entries, key=lambda entry: -entry.used)

    def find(self, made: HistoryEntry) -> Artifact | None:
        """Find in the folder what an entry of a history describes, whatever its key would be now."""
        for path in self.root.glob(f"objects/*/*/{MANIFEST}"):
            manifest = _read(path.parent)
            if manifest is not None and manifest.history[-1:] == (made,):
                return self.get(path.parent.name)
        return None

    def size(self) -> int:
        """Measure all files in the folder of the store, or the entries of a shared store, in bytes."""
        return _measure(self.root) if self._shared is None else sum(entry.bytes for entry in self.entries())

    def verify(self) -> list[str]:
        """Hash every file of every entry; remove the damaged entries and return their keys.

        Raises:
            StoreError: they cannot be removed.
        """
        if self._shared is not None:
            with self.workspace() as folder:
                return self._shared.verify(folder)
        damaged = []
        for path in sorted(self.root.glob(f"objects/*/*/{MANIFEST}")):
            if _read_intact(path.parent, every_byte=True) is None:
                damaged.append(path.parent.name)
                self._discard(path.parent)
        if left := [key for key in damaged if self._folder(key).exists()]:
            raise StoreError(
                f"{len(left)} of {len(damaged)} damaged entries of the store {self.root} cannot be removed: {left[0]}",
                "make the store writable for this user, and verify it again",
            )
        return damaged

    def prune(self, *, max_bytes: int | None = None, max_age_seconds: float | None = None) -> list[Entry]:
        """Remove entries and small files not used for so long, then the least recently used until the rest fits.

        Returns them. The lists that are older than every entry are those of entries that are gone, and go first. The
        workspaces of killed processes are removed as well. What was used since a process at work began stays: it may
        still need it.
        """
        if self._shared is not None:
            return self._shared.prune(max_bytes, max_age_seconds)
        entries = sorted((*self.entries(), *self._small_files()), key=lambda entry: -entry.used)
        began = self._oldest_work()

        def remove(entry: Entry) -> bool:
            return entry.used < began and self._try_remove(entry)

        removed = prune_entries(entries, remove, max_bytes, max_age_seconds)
        self._remove_abandoned()
        self._remove_partial()
        return removed

    def _oldest_work(self) -> float:
        """Return the time when the oldest workspace of a live process was made; infinity without one."""
        times = [math.inf]
        for folder in self.root.glob("tmp/*@*"):
            with contextlib.suppress(FileNotFoundError, StoreError):  # its process has ended; another user's
                began = folder.stat().st_mtime
                if (lock := self._try_claim(folder)) is None:
                    times.append(began)
                else:
                    os.close(lock)
        return min(times)

    def _remove_partial(self) -> None:
        """Remove what killed processes left: small files, hidden until they are whole, and notes of no entry.

        Entries without a manifest go, too: one appears with all its files, so it was damaged since.
        """
        for folder in self.root.glob("objects/*/*"):
            if not (folder / MANIFEST).exists():
                self._discard(folder)
        hidden = (path for folder in (*_SMALL_FILES, "unshared") for path in (self.root / folder).rglob(".*"))
        unshared = (path for path in self.root.glob("unshared/[!.]*") if not self._folder(path.name).exists())
        for path in (*hidden, *unshared):
            with contextlib.suppress(OSError):  # it has its name now
                if path.lstat().st_mtime < time.time() - DAY_SECONDS and path.is_file():
                    path.unlink()

    def _small_files(self) -> Iterator[Entry]:
        """Yield the files beside the entries that are made again when they are needed, but those being written."""
        for folder in _SMALL_FILES:
            for path in (self.root / folder).rglob("[!.]*"):
                with contextlib.suppress(FileNotFoundError):  # another process removed it meanwhile
                    if stat.S_ISREG((status := path.lstat()).st_mode):
                        yield Entry(
                            str(path.relative_to(self.root)), folder, SMALL_FILE, status.st_size, status.st_mtime
                        )

    def stop(self) -> None:
        """Wait no longer for a shared store that cannot be reached: present and later calls fail."""
        if self._shared is not None:
            self._shared.retries.stopped.set()

    def _download(self, shared: SharedStore, key: str, *, replace: bool = False) -> Manifest | None:
        with self.workspace() as folder:
            manifest = shared.fetch(key, folder)
            return self._install(key, folder, manifest, replace=replace) if manifest is not None else None

    def _share(self, shared: SharedStore, key: str, manifest: Manifest) -> Manifest:
        """Upload an entry and the candidate that leads to it, if the shared store lacks them; return the entry."""
        stored = shared.find_complete(key)
        if stored is not None and stored.sha256 != manifest.sha256 and self.reuse:
            manifest = self._download(shared, key, replace=True) or manifest
            stored = shared.find_complete(key)
        marker = self.root / "unshared" / key
        with contextlib.suppress(FileNotFoundError):
            path = marker.read_text(encoding="utf-8")
            if path and (content := export_candidate(self.root / "reads", path)) is not None:
                publish_candidate(shared, path.partition("/")[0], content)
        if stored is None or stored.sha256 != manifest.sha256:
            shared.publish(key, self._folder(key), manifest)
        self._unshared.discard(key)
        marker.unlink(missing_ok=True)
        return manifest

    def _folder(self, key: str) -> Path:
        return self.root / f"objects/{key[:2]}/{key}"

    def _find(self, key: str) -> Manifest | None:
        """Read the manifest of an entry and check its files; None if there is none. A damaged entry is removed."""
        folder = self._folder(key)
        if not os.access(folder / MANIFEST, os.F_OK):
            return None
        manifest = _read_intact(folder) or _read_intact(folder)  # it may have been replaced while it was looked at
        if manifest is None:
            if os.access(folder / MANIFEST, os.F_OK):  # else another process removed it meanwhile
                self._tell(f"the store {self.root}: the entry {key[:16]} is damaged; it is ignored")
            self._discard(folder)
            return None
        with contextlib.suppress(OSError):  # a store that may only be read has no last use
            os.utime(folder)
        return manifest

    def _install(self, key: str, folder: Path, manifest: Manifest, *, replace: bool) -> Manifest:
        """Move a workspace's content under its key, in one step; return the manifest that is there then.

        An entry of another process stays, if it is whole and final, unless it is to be replaced.

        Raises:
            StoreError: the disk is full or cannot be written.
        """
        target, displaced = self._folder(key), list[Path]()
        with self._storage_errors():
            (folder / MANIFEST).write_bytes(encode(manifest))
            target.parent.mkdir(parents=True, exist_ok=True)
            while not _try_rename(folder, target):
                if not replace and (present := _read_intact(target)) is not None and not present.incomplete:
                    break
                if not displaced:
                    sync(folder)
                displaced.append(self.root / "tmp" / f"{_EARLIER}{key}-{uuid.uuid4().hex}")
                with contextlib.suppress(FileNotFoundError):  # another process was quicker
                    target.rename(displaced[-1])
            for earlier in displaced:  # not before the new one is there
                shutil.rmtree(earlier, ignore_errors=True)
        return _read(target) or manifest

    def _try_remove(self, entry: Entry) -> bool:
        """Remove an entry and return whether it could be: partial work that a process is at stays."""
        if entry.kind == SMALL_FILE:
            path = self.root / entry.key
            with contextlib.suppress(OSError):  # it is gone, or its folder has other files
                path.unlink()
                path.parent.rmdir()
            return not path.exists()
        if entry.kind != UNFINISHED:
            self._discard(self._folder(entry.key))
            return not self._folder(entry.key).exists()
        folder = self.root / "begun" / entry.key
        if (lock := self._try_claim(folder)) is None:
            return False
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        return True

    def _discard(self, folder: Path) -> None:
        """Remove an entry in one step: a process that is killed at it leaves no half of one."""
        doomed = self.root / "tmp" / _workspace_name()
        with contextlib.suppress(OSError):  # another process removed it, or the store may only be read
            folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _remove_abandoned(self) -> None:
        """Remove the workspaces of processes of this machine that are gone; put back what they did not replace.

        A process in another container is not seen here, and may have the same host name: its lock tells that it lives.
        """
        for folder in self.root.glob(f"tmp/{_EARLIER}*"):
            key = folder.name.removeprefix(_EARLIER).rpartition("-")[0]
            if _read_intact(folder) is not None:
                with contextlib.suppress(OSError):  # another one is there, or another process was quicker
                    folder.rename(self._folder(key))
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self.root.glob("tmp/*"):
            owner, _, host = folder.name.rpartition("-")[0].partition("@")
            if host == platform.node() and not Path("/proc", owner).exists():
                with contextlib.suppress(StoreError):  # another user's
                    if (lock := self._try_claim(folder)) is not None:
                        shutil.rmtree(folder, ignore_errors=True)
                        os.close(lock)

    def _try_claim(self, folder: Path) -> int | None:
        """Lock a folder, which is made if needed, for this process; return a descriptor.

        It is None if another process has the folder.
        """
        with self._storage_errors():
            folder.mkdir(parents=True, exist_ok=True)
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

    def _storage_errors(self) -> contextlib.AbstractContextManager[None]:
        """Turn what the file system refuses into a message that names the store, and how to choose another."""
        if self._shared is not None:
            return storage_errors(
                f"the cache {self.root} of the store {self.address}", "set ENGINESMITH_CACHE to", self.root
            )
        return storage_errors(f"the store {self.root}", "give --store, or set ENGINESMITH_STORE to", self.root)


def _measure(folder: Path) -> int:
    """Measure all files below a folder, in bytes."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another process removed it meanwhile
                total += Path(parent, name).lstat().st_size
    return total


def _try_rename(folder: Path, target: Path) -> bool:
    """Rename a folder and return whether it could be; False if there is another one with files."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


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


def _workspace_name() -> str:
    return f"{os.getpid()}@{platform.node()}-{uuid.uuid4().hex}"
