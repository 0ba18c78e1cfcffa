"""A file by its content, and how to see without reading it that it is as it was."""

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.artifact import file_digest

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
