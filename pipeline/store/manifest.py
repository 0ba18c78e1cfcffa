"""What a store says about an entry: its manifest, under a seal that a torn or edited one breaks."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pydantic import Base64Bytes, BaseModel, ConfigDict, ValidationError

from enginesmith.pipeline.artifact import Artifact, HistoryEntry, Kind, file_digest, folder_digest
from enginesmith.pipeline.tensors import Signature

# A file by its content, and how to see without reading it that it is as it was.

_ALWAYS_HASH_BYTES = 32 << 20
"""Files below this are read again, whatever their inode says."""


class StoredFile(BaseModel):
    """A file's digest, and the state of its inode when that was taken."""

    model_config = ConfigDict(frozen=True)

    sha256: str
    bytes: int
    inode: tuple[int, int, int] | None = None
    """Inode number, modification and change time in ns: while none has changed, the bytes have not either.

    None where it is told of a file of another machine.
    """


def as_it_was(path: Path, stored: StoredFile, every_byte: bool) -> bool:
    """Whether a file has the content that was stored; a large one by its inode, unless ``every_byte`` is asked."""
    stat = path.stat()
    if _inode(stat) == stored.inode and stored.bytes > _ALWAYS_HASH_BYTES and not every_byte:
        return True
    return stat.st_size == stored.bytes and file_digest(path) == stored.sha256


def stored_file(path: Path, before: StoredFile | None = None) -> StoredFile:
    """The file as it is now; hashed only if it is not in the state that it was in before."""
    stat = path.stat()
    if before is not None and before.inode == _inode(stat):
        return before
    return StoredFile(sha256=file_digest(path), bytes=stat.st_size, inode=_inode(stat))


def _inode(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


MANIFEST = "artifact.json"
DAY_SECONDS = 86400.0
"""How often a shared store notes a use."""
UNFINISHED = "unfinished"
"""The kind of an entry that a step has begun, and not ended."""


class Manifest(BaseModel):
    """What ``artifact.json`` holds."""

    model_config = ConfigDict(frozen=True)

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
        """Whether all names stay within the folder that the files are put in: others can write what stands in there."""
        return self.upload.isalnum() and all(map(_is_within, [self.file, *self.files]))

    @property
    def sha256(self) -> str:
        """Of all files, by name and content."""
        return folder_digest({name: file.sha256 for name, file in self.files.items()})

    @property
    def is_complete(self) -> bool:
        """Whether it holds all files itself."""
        return self.contents.keys() == self.files.keys()

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files.values())

    def artifact(self, folder: Path, key: str) -> Artifact:
        """The artifact whose files lie in a folder."""
        return Artifact(
            kind=self.kind,
            path=folder / self.file,
            sha256=self.sha256,
            bytes=self.bytes,
            signature=self.signature,
            history=self.history,
            rejected=self.rejected,
            incomplete=self.incomplete,
            key=key,
        )


@dataclass(frozen=True)
class Entry:
    """A line of ``cache list``."""

    key: str
    step: str
    kind: str
    bytes: int
    used: float
    """Seconds since the epoch."""


def _is_within(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and name not in ("", ".", MANIFEST) and "\0" not in name


def entry_of(key: str, manifest: Manifest | None, used: float) -> Entry:
    """The line for a manifest, or for one that cannot be read."""
    if manifest is None:
        return Entry(key, "unreadable", "?", 0, used)
    return Entry(key, manifest.step, manifest.kind, manifest.bytes, used)


_SEAL = re.compile(rb'\{"digest": "([0-9a-f]{64})",\n"manifest": (.*)\}', re.DOTALL)


def encode(manifest: Manifest) -> bytes:
    """A manifest with the digest of its text, as it lies in a store."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1).encode()
    return b'{"digest": "%b",\n"manifest": %b}' % (hashlib.sha256(text).hexdigest().encode(), text)


def decode_checked(data: bytes) -> Manifest | None:
    """The manifest, or None where it is not as it was written."""
    found = _SEAL.fullmatch(data)
    if found is None or hashlib.sha256(found[2]).hexdigest().encode() != found[1]:
        return None
    try:
        return Manifest.model_validate_json(found[2])
    except ValidationError:
        return None


def prune(
    entries: Iterable[Entry], remove: Callable[[Entry], bool], max_bytes: int | None, max_age_seconds: float | None
) -> list[Entry]:
    """Remove those not used for so long, then the least recently used until the rest fits; give them back.

    ``entries`` come the latest used first; ``remove`` says whether it could be done.
    """
    removed, kept = [], 0
    oldest = time.time() - max_age_seconds if max_age_seconds is not None else 0.0
    for entry in entries:
        kept += entry.bytes
        unwanted = entry.used < oldest or (max_bytes is not None and kept > max_bytes)
        if unwanted and remove(entry):
            kept -= entry.bytes
            removed.append(entry)
    return removed
