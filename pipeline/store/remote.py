"""A store that several machines use, on any file system that fsspec knows: S3, Google Cloud, Azure, a mounted folder …

    ROOT/enginesmith-store.json                     says what this is
    ROOT/objects/ab/KEY/artifact.json               the entry: its manifest, which holds its files or names their upload
    ROOT/objects/ab/KEY/UPLOAD/<files>              files of an entry that is not small, each upload in its own folder
    ROOT/reads/NAME.json                            what steps read of the user's files, by name

A manifest is written after all of its files, so an entry is there when its manifest is, and holds. Of two writers the
last manifest wins, and both are whole. Files that no manifest names are what an interrupted upload left: nobody sees
them, and ``cache prune`` removes them a day later.

A request to a service far away takes its time, so few come one after the other: nothing is asked for before it is read,
and a small entry's files are in its manifest.
"""

import contextlib
import contextvars
import datetime
import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from enginesmith.pipeline.errors import StoreError, UsageError, storage_errors
from enginesmith.pipeline.store import address
from enginesmith.pipeline.store.manifest import (
    DAY_SECONDS,
    MANIFEST,
    Manifest,
    StoredFile,
    decode_checked,
    encode,
    stored_file,
)
from enginesmith.pipeline.store.retry import Retries

# What says of a place that it is a store: a file at its root, which a new store begins with.

_FILE, _SCHEMA = "enginesmith-store.json", "enginesmith.store/1"


class StoreMarker:
    """The file of one store; seen once, it is not asked for again."""

    def __init__(
        self, place: str, has_folders: bool, read: Callable[[str], bytes], write: Callable[[str, bytes], None]
    ) -> None:
        """``place`` is for messages; ``read`` and ``write`` take a path below the root."""
        self._place, self._has_folders, self._read, self._write = place, has_folders, read, write
        self._known = False
        self._failed: tuple[float, StoreError] | None = None
        """When the service could not be asked, and why."""
        self._lock = threading.Lock()

    def ensure_exists(self) -> None:
        """Before anything else: that this is a store, which a new one is made to be.

        Raises:
            UsageError: the bucket is not there, or the folder cannot be.
            StoreError: it is a store of another version; the service refuses it, or was away for too long.
        """
        if self._known:
            return
        began = time.monotonic()
        with self._lock:
            if self._known:
                return
            if self._failed is not None and self._failed[0] > began:  # while this thread waited for the other one
                raise self._failed[1]
            try:
                self._read_or_create()
            except StoreError as error:
                self._failed = time.monotonic(), error
                raise
            self._known = True

    def validate_exists(self) -> None:
        """Insist that there is a store already, which looking after it is not to make.

        Raises:
            UsageError: there is none.
        """
        try:
            self._validate_schema(self._read(_FILE))
        except FileNotFoundError as error:
            raise UsageError(f"{self._place}: there is no store", "check the address") from error

    def _read_or_create(self) -> None:
        try:
            try:
                self._validate_schema(self._read(_FILE))
            except FileNotFoundError:
                self._write(_FILE, json.dumps({"schema": _SCHEMA}).encode() + b"\n")
        except FileNotFoundError as error:
            if self._has_folders:
                raise UsageError(
                    f"{self._place}: no folder can be made there ({error})", "name one that can be written to"
                ) from error
            raise UsageError(
                f"{self._place}: there is no such bucket ({error})", "check the address, or make the bucket"
            ) from error

    def _validate_schema(self, content: bytes) -> None:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            found = json.loads(content)["schema"]
            if found != _SCHEMA:
                raise StoreError(
                    f"{self._place} is of another version of enginesmith: {found!r} instead of {_SCHEMA!r}",
                    "use another folder of the bucket, or the same version everywhere",
                )


_AT_ONCE = 8
"""Files that are carried at the same time, where the file system can do that."""
_SMALL_BYTES = 256 << 10
"""Files that are no more than that together come with the manifest."""
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "memory"}
"""Protocols where a path is only a name; asked to make a folder, some of them would make a bucket."""

A = TypeVar("A")
B = TypeVar("B")


class SharedStore:
    """Entries at a URL; safe for any number of processes and threads."""

    def __init__(self, url: str, tell: Callable[[str], None]) -> None:
        """Find out how the URL is read; of most services nothing is asked yet.

        Raises:
            UsageError: no file system has that protocol.
            MissingCapability: the package for it is not installed.
            StoreError: a service that has to be connected to, as sftp, refuses it, or was away for too long.
        """
        self.url = url
        self.retries = Retries(f"the store {url}", tell)
        self.system, self.root = self.retries(address.opened, url)
        self._at_once = address.in_one_request(self.system)
        self._has_folders = url.partition("://")[0] not in _WITHOUT_FOLDERS
        self._damaged: set[str] = set()
        """Keys whose entry was found damaged, and could perhaps not be removed."""
        self.marker = StoreMarker(self.retries.place, self._has_folders, self._read, self._write)

    def fetch(self, key: str, folder: Path, *, touch: bool = True) -> Manifest | None:
        """Bring an entry's files into an empty folder; None where there is no entry that holds.

        The manifest that comes back is this machine's: with the state of the files here. A damaged entry is removed.
        With ``touch`` the entry counts as used.

        Raises:
            StoreError: the service refuses it, or was away for too long; the folder cannot be written.
        """
        manifest = self.manifest(key)
        while manifest is not None:
            files = self._brought(key, manifest, folder)
            if files is not None:
                if touch:
                    self._touch(key, manifest)
                return manifest.model_copy(update={"files": files, "upload": "", "contents": {}, "used": 0.0})
            shutil.rmtree(folder)
            folder.mkdir()
            now = self.manifest(key)
            if now is not None and now.upload == manifest.upload:  # else it was replaced, or removed, meanwhile
                self.retries.tell(f"{self.retries.place}: the entry {key[:16]} is damaged; it is made again")
                self.remove(key)
                return None
            manifest = now
        return None

    def manifest(self, key: str) -> Manifest | None:
        """An entry's manifest, its files unseen; None where there is none that holds."""
        content = self.read(self._place(key, MANIFEST))
        if content is None:
            return None
        found = decode_checked(content)
        if found is not None and found.is_safe:
            return found
        if key not in self._damaged:
            self.retries.tell(f"{self.retries.place}: the entry {key[:16]} is damaged, and counts as none")
        self._damaged.add(key)
        return None

    def whole(self, key: str) -> Manifest | None:
        """The manifest of an entry that need not be published again: all of its files are there, and it is final."""
        found = self.manifest(key)
        if found is None or found.incomplete or key in self._damaged:
            return None
        if found.is_complete:
            return found
        sizes = {name: info["size"] for name, info in self.files(self._place(key, found.upload)).items()}
        return found if sizes == {name: file.bytes for name, file in found.files.items()} else None

    def publish(self, key: str, folder: Path, manifest: Manifest) -> None:
        """Upload an entry's files, then what makes it an entry; or both at once.

        Raises:
            StoreError: the service refuses it, or was away for too long.
        """
        self.marker.ensure_exists()
        upload, contents = uuid.uuid4().hex, {}
        if manifest.bytes <= _SMALL_BYTES:
            with storage_errors(f"the folder {folder}"):
                contents = {name: (folder / name).read_bytes() for name in manifest.files}
        else:
            self.each(lambda name: self._put(folder / name, self._path(key, upload, name)), manifest.files)
        files = {name: StoredFile(sha256=file.sha256, bytes=file.bytes) for name, file in manifest.files.items()}
        told = {"files": files, "upload": upload, "contents": contents, "used": time.time()}
        self.write(self._place(key, MANIFEST), encode(manifest.model_copy(update=told)))
        self._damaged.discard(key)

    def read(self, place: str) -> bytes | None:
        """A small file by its path below the root; None where there is none."""
        self.marker.ensure_exists()
        try:
            return self._read(place)
        except FileNotFoundError:
            return None

    def write(self, place: str, content: bytes) -> None:
        """Write a small file at once; a mounted folder gets it under another name first: others may read it then.

        Raises:
            StoreError: the service refuses it, or was away for too long; its place was removed at the same moment.
        """
        self.marker.ensure_exists()
        try:
            self._write(place, content)
        except FileNotFoundError as error:
            raise _removed_meanwhile(place, error) from error

    def remove(self, key: str) -> None:
        """Take an entry away, its manifest first; where that is refused, it counts as none for this object."""
        self._damaged.add(key)
        with contextlib.suppress(StoreError):
            found = self.manifest(key)
            self.delete([self._path(key, MANIFEST)])
            if found is not None and not found.is_complete:
                self.delete(self._path(key, found.upload, name) for name in found.files)

    def files(self, folder: str) -> dict[str, Mapping[str, Any]]:
        """All files below a folder by their names from there, with what the file system says about each."""
        place = f"{self.root}/{folder}"
        try:
            found = self.retries(self.system.find, place, detail=True)
        except FileNotFoundError:
            return {}
        return {path[len(place) + 1 :]: info for path, info in found.items() if path.startswith(f"{place}/")}

    def modified(self, info: Mapping[str, Any]) -> float:
        """When a file was written, in seconds since the epoch; now, where the file system does not say."""
        names = ("LastModified", "mtime", "updated", "last_modified", "modified", "created")
        found = next((info[name] for name in names if info.get(name)), None)
        if isinstance(found, datetime.datetime):
            return found.timestamp()
        return float(found) if isinstance(found, (int, float)) else time.time()

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files by their whole paths, those that are still there; and folders that have nothing left."""
        paths = list(paths)
        self.each(self._delete, paths)
        if self._has_folders:
            for folder in sorted({str(PurePosixPath(path).parent) for path in paths}, key=len, reverse=True):
                with contextlib.suppress(OSError):  # there is something left
                    self.system.rmdir(folder)

    def each(self, work: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """Do it for each, several at a time where the file system is made for that."""
        items = list(items)
        if len(items) < 2 or not self.system.async_impl:
            return [work(item) for item in items]
        contexts = [contextvars.copy_context() for _ in items]  # what is told there is for whom this thread tells it to
        with ThreadPoolExecutor(min(_AT_ONCE, len(items))) as pool:
            return list(pool.map(lambda context, item: context.run(work, item), contexts, items))

    def _brought(self, key: str, manifest: Manifest, folder: Path) -> dict[str, StoredFile] | None:
        """Bring them here; None where a file is not there, or has other bytes the second time, too."""

        def bring(name: str) -> StoredFile | None:
            target = folder / name
            with storage_errors(f"the folder {folder}"):
                target.parent.mkdir(parents=True, exist_ok=True)
                if manifest.is_complete:
                    target.write_bytes(manifest.contents[name])
            for _ in range(2):
                if not manifest.is_complete:
                    self.retries(self.system.get_file, self._path(key, manifest.upload, name), str(target))
                found = stored_file(target)
                if (found.sha256, found.bytes) == (manifest.files[name].sha256, manifest.files[name].bytes):
                    return found
            return None

        try:
            brought = map(bring, manifest.files) if manifest.is_complete else self.each(bring, manifest.files)
            found = dict(zip(manifest.files, brought, strict=True))
        except FileNotFoundError:
            return None
        whole = {name: file for name, file in found.items() if file is not None}
        return whole if len(whole) == len(found) else None

    def _touch(self, key: str, manifest: Manifest) -> None:
        """Have an entry that is used count as used, once a day; that need not succeed."""
        if manifest.used < time.time() - DAY_SECONDS:
            with contextlib.suppress(StoreError):
                self.write(self._place(key, MANIFEST), encode(manifest.model_copy(update={"used": time.time()})))

    def _put(self, file: Path, path: str) -> None:
        self._make_folder(path)
        try:
            self.retries(self.system.put_file, str(file), path)
        except FileNotFoundError as error:
            raise _removed_meanwhile(path, error) from error

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


def _removed_meanwhile(path: str, error: FileNotFoundError) -> StoreError:
    return StoreError(f"{path} cannot be uploaded: {error}", "is it removed at the same time?")
