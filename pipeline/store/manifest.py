"""Describe a store's entries: the manifest of each, encoded with a digest that a torn or edited one breaks."""

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Base64Bytes, BaseModel, ValidationError

from enginesmith.pipeline.artifact import Artifact, HistoryEntry, Kind, file_digest, folder_digest
from enginesmith.pipeline.tensors import Signature

PastFolder = Literal["races", "searches"]
"""Folder of what earlier runs found out."""
_ALWAYS_HASH_BYTES = 32 << 20
"""Smaller files are hashed again, even if their inode is unchanged."""


class StoredFile(BaseModel, frozen=True):
    """A file's digest, and the state of its inode when that was taken."""

    sha256: str
    bytes: int
    inode: tuple[int, int, int] | None = None
    """Inode number, modification and change time in ns: while none has changed, the bytes have not either.

    None for a file of another machine.
    """


def is_unchanged(path: Path, stored: StoredFile, every_byte: bool) -> bool:
    """Return whether a file has the content that was stored; a large one by its inode, unless ``every_byte``."""
    status = path.stat()
    if status.st_size != stored.bytes:  # without power, a file may lose its end and keep its times
        return False
    if _inode(status) == stored.inode and stored.bytes > _ALWAYS_HASH_BYTES and not every_byte:
        return True
    return file_digest(path) == stored.sha256


def describe_file(path: Path, before: StoredFile | None = None) -> StoredFile:
    """Describe a file's present content; it is hashed only if its inode differs from ``before``.

    Raises:
        OSError: there is none, or it is no regular file: what others name may be anything, even one without end.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(path)
    if before is not None and before.inode == _inode(status):
        return before
    return StoredFile(sha256=file_digest(path), bytes=status.st_size, inode=_inode(status))


def _inode(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


MANIFEST = "artifact.json"
DAY_SECONDS = 86400.0
"""Time between two notes of a use in a shared store."""
UNFINISHED = "unfinished"
"""The kind of an entry with partial work of a step."""
SMALL_FILE = "file"
"""The kind of a file beside the entries, which is made again when it is needed."""


class Manifest(BaseModel, frozen=True):
    """Content of ``artifact.json``."""

    kind: Kind
    file: str
    files: dict[str, StoredFile]
    signature: Signature | None
    history: tuple[HistoryEntry, ...]
    rejected: str
    incomplete: bool = False
    step: str
    upload: str = ""
    """In a shared store, the folder beside the manifest that has the files: each upload has its own."""
    contents: dict[str, Base64Bytes] = {}
    """In a shared store, the files themselves where they are small: all of them or none."""
    used: float = 0.0
    """In a shared store, when it was published, or later downloaded, in seconds since the epoch; noted once a day."""

    @property
    def is_safe(self) -> bool:
        """True if all names stay within the folder of the entry: others can write a shared store's manifests."""
        names = [self.file, *self.files]
        paths = [PurePosixPath(name) for name in names]
        outside = any(path.is_absolute() or ".." in path.parts for path in paths)
        invalid = any(name in ("", ".", MANIFEST) or "\0" in name for name in names)
        return self.upload.isalnum() and not outside and not invalid

    @property
    def sha256(self) -> str:
        """Digest of all files, by name and content."""
        return folder_digest({name: file.sha256 for name, file in self.files.items()})

    @property
    def is_complete(self) -> bool:
        """True if it holds all files itself."""
        return self.contents.keys() == self.files.keys()

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files.values())

    def artifact(self, folder: Path, key: str) -> Artifact:
        """Build the artifact whose files are in a folder."""
        same = {name: getattr(self, name) for name in ("kind", "signature", "history", "rejected", "incomplete")}
        return Artifact(path=folder / self.file, sha256=self.sha256, bytes=self.bytes, key=key, **same)


@dataclass(frozen=True)
class Entry:
    """A line of ``cache list``."""

    key: str
    step: str
    kind: str
    bytes: int
    used: float
    """Seconds since the epoch."""


def entry_of(key: str, manifest: Manifest | None, used: float) -> Entry:
    """Build the line for a manifest, or for one that cannot be read."""
    if manifest is None:
        return Entry(key, "unreadable", "?", 0, used)
    return Entry(key, manifest.step, manifest.kind, manifest.bytes, used)


_SEAL = re.compile(rb'\{"digest": "([0-9a-f]{64})",\n"manifest": (.*)\}', re.DOTALL)


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest with the digest of its text, as it is stored."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1).encode()
    return b'{"digest": "%b",\n"manifest": %b}' % (hashlib.sha256(text).hexdigest().encode(), text)


def decode_checked(data: bytes) -> Manifest | None:
    """Decode a manifest; None if its digest does not match."""
    match = _SEAL.fullmatch(data)
    if match is None or hashlib.sha256(match[2]).hexdigest().encode() != match[1]:
        return None
    try:
        return Manifest.model_validate_json(match[2])
    except ValidationError:
        return None


def prune_entries(
    entries: Iterable[Entry], remove: Callable[[Entry], bool], max_bytes: int | None, max_age_seconds: float | None
) -> list[Entry]:
    """Remove entries not used for so long, then the least recently used until the rest fits; return the removed ones.

    ``entries`` are sorted, most recently used first; ``remove`` returns whether it could be done.
    """
    removed, total = [], 0
    oldest = time.time() - max_age_seconds if max_age_seconds is not None else 0.0
    for entry in entries:
        total += entry.bytes
        unwanted = entry.used < oldest or (max_bytes is not None and total > max_bytes)
        if unwanted and remove(entry):
            total -= entry.bytes
            removed.append(entry)
    return removed
