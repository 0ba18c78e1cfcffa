"""Read and write a store that several machines share, on any fsspec file system: S3, Google Cloud, Azure, a folder …

    ROOT/enginesmith-store.json                     marks the folder as a store
    ROOT/objects/ab/KEY/artifact.json               the entry: its manifest, which holds its files or names their upload
    ROOT/objects/ab/KEY/UPLOAD/<files>              files of an entry that is not small, each upload in its own folder
    ROOT/reads/NAME.json                            the user's files that steps read, by name

A manifest is written after all of its files, so an entry is there when its manifest is, and holds. Of two writers the
last manifest wins, and both are whole. Files that no manifest names are leftovers of an interrupted upload: nobody sees
them, and ``cache prune`` removes them a day later.

A request to a service far away takes its time, so few come one after the other: nothing is asked for before it is read,
and a small entry's files are in its manifest.
"""

import contextlib
import contextvars
import datetime
import inspect
import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, get_args

from enginesmith.pipeline.errors import StoreError, UsageError, storage_errors
from enginesmith.pipeline.store.address import open_filesystem
from enginesmith.pipeline.store.manifest import (
    DAY_SECONDS,
    MANIFEST,
    SMALL_FILE,
    Entry,
    Manifest,
    PastFolder,
    StoredFile,
    decode_checked,
    describe_file,
    encode,
    entry_of,
    prune_entries,
)
from enginesmith.pipeline.store.retry import Retries

_MARKER, _SCHEMA = "enginesmith-store.json", "enginesmith.store/1"
_AT_ONCE = 8
"""Files that are transferred at the same time, if the file system can do that."""
_SMALL_BYTES = 256 << 10
"""Files that are no larger than that together are part of the manifest."""
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "memory"}
"""Protocols where a path is only a name; asked to make a folder, some of them would make a bucket."""

_LEFTOVER_SECONDS = 86400.0
"""Files that no manifest names may be an upload under way for so long; older ones are leftovers."""

Info = Mapping[str, Any]
"""The file system's description of a file."""
A = TypeVar("A")
B = TypeVar("B")


class SharedStore:
    """Entries at a URL; safe for any number of processes and threads."""

    def __init__(self, url: str, tell: Callable[[str], None]) -> None:
        """Open the file system of the URL; most services are not connected to yet.

        Raises:
            UsageError: no file system has that protocol.
            MissingCapability: the package for it is not installed.
            StoreError: a service that is connected to now, as sftp, refuses access, or cannot be reached.
        """
        self.url = url
        self.retries = Retries(f"the store {url}", tell)
        self.system, self.root = self.retries(open_filesystem, url)
        read = getattr(self.system, "_cat_file", None)  # s3fs would ask for the size first, and read parts of a file
        at_once = read and "max_concurrency" in inspect.signature(read).parameters
        self._at_once = {"max_concurrency": 1} if at_once else {}
        self._has_folders = url.partition("://")[0] not in _WITHOUT_FOLDERS
        self._damaged: set[str] = set()
        """Keys whose entry was found damaged, and could perhaps not be removed."""
        self._is_marked = False
        self._failed_at, self._failure = 0.0, StoreError("")
        """Time and error of the last failure to read or write the marker."""
        self._lock = threading.Lock()

    def ensure_marked(self) -> None:
        """Check before anything else that this is a store, or mark an empty folder as one; once seen, never again.

        Raises:
            UsageError: the bucket is not there, or the folder cannot be.
            StoreError: it is a store of another version; the service refuses access, or cannot be reached.
        """
        began = time.monotonic()
        if self._is_marked:
            return
        with self._lock:
            if self._is_marked:
                return
            if self._failed_at > began:  # while this thread waited for the other one
                raise self._failure
            try:
                if not self._read_marker():
                    self._write(_MARKER, json.dumps({"schema": _SCHEMA}).encode() + b"\n")
            except FileNotFoundError as error:
                problem, remedy = (
                    ("no folder can be made there", "name one that can be written to")
                    if self._has_folders
                    else ("there is no such bucket", "check the address, or make the bucket")
                )
                raise UsageError(f"{self.retries.place}: {problem} ({error})", remedy) from error
            except StoreError as error:
                self._failed_at, self._failure = time.monotonic(), error
                raise
            self._is_marked = True

    def _read_marker(self) -> bool:
        """Read the file that marks a folder as a store; False if there is none."""
        try:
            content = self._read(_MARKER)
        except FileNotFoundError:
            return False
        with contextlib.suppress(ValueError, LookupError, TypeError):
            schema = json.loads(content)["schema"]
            if schema != _SCHEMA:
                raise StoreError(
                    f"{self.retries.place} is of another version of enginesmith: {schema!r} instead of {_SCHEMA!r}",
                    "use another folder of the bucket, or the same version everywhere",
                )
        return True

    def fetch(self, key: str, folder: Path, *, touch: bool = True) -> Manifest | None:
        """Download an entry's files into an empty folder; None if there is no intact entry.

        The manifest that is returned has the state of the files on this machine. A damaged entry is removed; one that
        lacks files is not, as they may be seen later than the manifest.
        With ``touch`` the entry counts as used, which is noted once a day.

        Raises:
            StoreError: the service refuses access, or could not be reached for too long; the folder cannot be written.
        """
        manifest = self.manifest(key)
        while manifest is not None:
            files = self._download(key, manifest, folder)
            if files is not None and len(files) == len(manifest.files):
                if touch and manifest.used < time.time() - DAY_SECONDS:
                    with contextlib.suppress(StoreError):  # who may only read leaves no trace
                        used = manifest.model_copy(update={"used": time.time()})
                        self.write(self._place(key, MANIFEST), encode(used))
                return manifest.model_copy(update={"files": files, "upload": "", "contents": {}, "used": 0.0})
            _empty(folder)
            current = self.manifest(key)
            if current is not None and current.upload == manifest.upload:  # else it was replaced, or removed, meanwhile
                self.retries.tell(f"{self.retries.place}: the entry {key[:16]} is damaged; it is made again")
                if files is not None:
                    self.remove(key)
                self._damaged.add(key)
                return None
            manifest = current
        return None

    def manifest(self, key: str) -> Manifest | None:
        """Read an entry's manifest, without a look at its files; None if there is no intact one."""
        if (content := self.read(self._place(key, MANIFEST))) is None:
            return None
        manifest = decode_checked(content)
        if manifest is not None and manifest.is_safe:
            return manifest
        if key not in self._damaged:
            self.retries.tell(f"{self.retries.place}: the entry {key[:16]} is damaged; it is ignored")
        self._damaged.add(key)
        return None

    def find_complete(self, key: str) -> Manifest | None:
        """Read the manifest of an entry that need not be published again: it is final, and has all of its files."""
        manifest = self.manifest(key)
        if manifest is None or manifest.incomplete or key in self._damaged:
            return None
        if manifest.is_complete:
            return manifest
        sizes = {name: info["size"] for name, info in self.files(self._place(key, manifest.upload)).items()}
        return manifest if sizes == {name: file.bytes for name, file in manifest.files.items()} else None

    def publish(self, key: str, folder: Path, manifest: Manifest) -> None:
        """Upload an entry's files, then its manifest; or both at once.

        Raises:
            StoreError: the service refuses access, or could not be reached for too long.
        """
        self.ensure_marked()
        upload, contents = uuid.uuid4().hex, {}
        if manifest.bytes <= _SMALL_BYTES:
            with storage_errors(f"the folder {folder}"):
                contents = {name: (folder / name).read_bytes() for name in manifest.files}
        else:
            self.each(lambda name: self._put(folder / name, self._path(key, upload, name)), manifest.files)
        files = {name: StoredFile(sha256=file.sha256, bytes=file.bytes) for name, file in manifest.files.items()}
        update = {"files": files, "upload": upload, "contents": contents, "used": time.time()}
        self.write(self._place(key, MANIFEST), encode(manifest.model_copy(update=update)))
        self._damaged.discard(key)

    def read(self, place: str) -> bytes | None:
        """Read a small file by its path below the root; None if there is none."""
        self.ensure_marked()
        try:
            return self._read(place)
        except FileNotFoundError:
            return None

    def write(self, place: str, content: bytes) -> None:
        """Write a small file in one request; in a mounted folder it is renamed when whole, as others may read it.

        Raises:
            StoreError: as for :meth:`publish`; or its folder was removed at the same moment.
        """
        self.ensure_marked()
        try:
            self._write(place, content)
        except FileNotFoundError as error:
            raise _explain_removal(place, error) from error

    def remove(self, key: str) -> None:
        """Remove an entry, its manifest first; if that is refused, this object ignores it from now on."""
        self._damaged.add(key)
        with contextlib.suppress(StoreError):
            manifest = self.manifest(key)
            self.delete([self._path(key, MANIFEST)])
            if manifest is not None and not manifest.is_complete:
                self.delete(self._path(key, manifest.upload, name) for name in manifest.files)

    def entries(self) -> list[Entry]:
        """List published entries, most recently used first.

        An entry counts as used when it was published, and again when a machine downloads it, noted once a day;
        machines that have it in their cache leave no trace.
        """
        infos, _ = self._list_files()
        manifests = self._bare_manifests(infos)
        entries = [entry_of(key, manifests[key], self.modified(info)) for key, info in infos.items()]
        return sorted(entries, key=lambda entry: -entry.used)

    def verify(self, workspace: Path) -> list[str]:
        """Download and hash every entry; remove the damaged ones and return their keys."""
        damaged = []
        for key in sorted(self._list_files()[0]):
            if self.fetch(key, workspace, touch=False) is None:
                self.remove(key)
                damaged.append(key)
            _empty(workspace)
        return damaged

    def prune(self, max_bytes: int | None, max_age_seconds: float | None) -> list[Entry]:
        """Remove entries as :func:`.manifest.prune_entries` does, leftovers of uploads, and unused candidates.

        Returns all of them, leftovers and candidates as small files.
        """

        def remove(entry: Entry) -> bool:
            self.remove(entry.key)
            return True

        removed = prune_entries(self.entries(), remove, max_bytes, max_age_seconds)
        oldest = time.time() - _LEFTOVER_SECONDS
        infos, uploads = self._list_files()
        manifests = self._bare_manifests({key for key, _ in uploads if key in infos})
        for (key, upload), files in uploads.items():
            named = manifest.upload if (manifest := manifests.get(key)) else ""
            if upload != named and max(map(self.modified, files.values())) < oldest:
                removed += self._remove_small("objects", files)
        if max_age_seconds is not None:
            oldest = time.time() - max_age_seconds
            for folder in ("reads", *get_args(PastFolder)):
                known = {f"{self.root}/{folder}/{path}": info for path, info in self.files(folder).items()}
                old = {path: info for path, info in known.items() if self.modified(info) < oldest}
                removed += self._remove_small(folder, old)
        return removed

    def _remove_small(self, folder: str, files: Mapping[str, Info]) -> list[Entry]:
        self.delete(files)
        return [Entry(path, folder, SMALL_FILE, info["size"], self.modified(info)) for path, info in files.items()]

    def _list_files(self) -> tuple[dict[str, Info], dict[tuple[str, str], dict[str, Info]]]:
        """List manifests by key, and other files by key and upload.

        Raises:
            UsageError: there is no store.
        """
        if not self._read_marker():
            raise UsageError(f"{self.retries.place}: there is no store", "check the address")
        manifests: dict[str, Info] = {}
        uploads: dict[tuple[str, str], dict[str, Info]] = {}
        for path, info in self.files("objects").items():
            _, *parts = path.split("/", 3)
            if parts[1:] == [MANIFEST]:
                manifests[parts[0]] = info
            elif len(parts) > 1:
                uploads.setdefault((parts[0], parts[1]), {})[f"{self.root}/objects/{path}"] = info
        return manifests, uploads

    def _bare_manifests(self, keys: Collection[str]) -> dict[str, Manifest | None]:
        """Read manifests, without the files that are in them: there may be thousands."""

        def read(key: str) -> Manifest | None:
            manifest = self.manifest(key)
            return manifest and manifest.model_copy(update={"contents": {}})

        return dict(zip(keys, self.each(read, keys), strict=True))

    def files(self, folder: str) -> dict[str, Info]:
        """List all files below a folder by their relative paths."""
        place = f"{self.root}/{folder}"
        try:
            infos = self.retries(self.system.find, place, detail=True)
        except FileNotFoundError:
            return {}
        return {path[len(place) + 1 :]: info for path, info in infos.items() if path.startswith(f"{place}/")}

    def modified(self, info: Info) -> float:
        """Return when a file was written, in seconds since the epoch; now, if the file system does not say."""
        names = ("LastModified", "mtime", "updated", "last_modified", "modified", "created")
        written = next((info[name] for name in names if info.get(name)), None)
        if isinstance(written, datetime.datetime):
            return written.timestamp()
        return float(written) if isinstance(written, (int, float)) else time.time()

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files by their absolute paths, if they still exist; and folders that are empty then."""
        paths = list(paths)
        self.each(self._delete, paths)
        if self._has_folders:
            for folder in sorted({str(PurePosixPath(path).parent) for path in paths}, key=len, reverse=True):
                with contextlib.suppress(OSError):  # there is something left
                    self.system.rmdir(folder)

    def each(self, work: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """Call ``work`` with each item, several at a time if the file system supports that."""
        items = list(items)
        if len(items) < 2 or not self.system.async_impl:
            return [work(item) for item in items]
        contexts = [contextvars.copy_context() for _ in items]  # their messages go where this thread's go
        with ThreadPoolExecutor(min(_AT_ONCE, len(items))) as pool:
            return list(pool.map(lambda context, item: context.run(work, item), contexts, items))

    def _download(self, key: str, manifest: Manifest, folder: Path) -> dict[str, StoredFile] | None:
        """Download an entry's files; None if one is missing, and without those that have other bytes a second time."""

        def download(name: str) -> StoredFile | None:
            target = folder / name
            with storage_errors(f"the folder {folder}"):
                target.parent.mkdir(parents=True, exist_ok=True)
                if manifest.is_complete:
                    target.write_bytes(manifest.contents[name])
            for _ in range(2):
                if not manifest.is_complete:
                    self.retries(self.system.get_file, self._path(key, manifest.upload, name), str(target))
                file = describe_file(target)
                if (file.sha256, file.bytes) == (manifest.files[name].sha256, manifest.files[name].bytes):
                    return file
            return None

        try:
            results = map(download, manifest.files) if manifest.is_complete else self.each(download, manifest.files)
            files = dict(zip(manifest.files, results, strict=True))
        except FileNotFoundError:
            return None
        return {name: file for name, file in files.items() if file is not None}

    def _put(self, file: Path, path: str) -> None:
        self._make_folder(path)
        try:
            self.retries(self.system.put_file, str(file), path)
        except FileNotFoundError as error:
            raise _explain_removal(path, error) from error

    def _read(self, place: str) -> bytes:
        content: bytes = self.retries(self.system.cat_file, f"{self.root}/{place}", **self._at_once)
        return content

    def _write(self, place: str, content: bytes) -> None:
        path = f"{self.root}/{place}"
        self._make_folder(path)
        if not self.url.startswith("file://"):
            self.retries(self.system.pipe_file, path, content)
            return
        partial = f"{path}.{uuid.uuid4().hex}"
        self.retries(self.system.pipe_file, partial, content)
        self.retries(self.system.mv, partial, path)

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.retries(self.system.rm_file, path)

    def _make_folder(self, path: str) -> None:
        if self._has_folders:
            self.retries(self.system.makedirs, path.rpartition("/")[0], exist_ok=True)

    def _path(self, key: str, *parts: str) -> str:
        return f"{self.root}/{self._place(key, *parts)}"

    @staticmethod
    def _place(key: str, *parts: str) -> str:
        return "/".join(("objects", key[:2], key, *parts))


def _empty(folder: Path) -> None:
    with storage_errors(f"the folder {folder}"):
        shutil.rmtree(folder)
        folder.mkdir()


def _explain_removal(path: str, error: FileNotFoundError) -> StoreError:
    return StoreError(f"{path} cannot be uploaded: {error}", "is it removed at the same time?")
