"""What steps read of the user's, outside of the store: written down, and looked at before a step is done again.

What a step will read is known only when it has run. So every step has a name, made of all that is known before, and
under it candidates: lists of what it read at one time, by paths that mean the same on other machines, for the same
project. A candidate says nothing of contents: these are taken from the files here and now, and lead to a key. So a list
of somebody else, or of long ago, can at worst lead to no entry.
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import stat
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from enginesmith.pipeline.artifact import json_digest, portable, write_whole
from enginesmith.pipeline.errors import StoreError, storage_errors
from enginesmith.pipeline.store.manifest import DAY_SECONDS, StoredFile, stored_file
from enginesmith.pipeline.store.remote import SharedStore

# What steps read of the user's files, as machines tell each other: a small file for each name, with all lists in it.
#
# So one request finds them, or that there are none. Of two machines that add lists to one file at the same
# moment one may
# lose its own; whoever needs that does the step once more, and adds it again.

MOST_CANDIDATES = 16
"""Of one name; the oldest are forgotten."""


class _File(BaseModel):
    """What lies under a name."""

    model_config = ConfigDict(frozen=True)

    used: float = 0.0
    """Seconds since the epoch; noted once a day."""
    candidates: tuple[Any, ...] = ()
    """The newest first."""


def candidates(store: SharedStore, name: str) -> tuple[Any, ...]:
    """What was published under a name, the newest first; it counts as used.

    Raises:
        StoreError: the service refuses it, or was away for too long.
    """
    found = _read(store, name)
    if found.candidates and found.used < time.time() - DAY_SECONDS:
        with contextlib.suppress(StoreError):  # who may only read leaves no trace
            _write(store, name, found.candidates)
    return found.candidates


def publish(store: SharedStore, name: str, content: bytes) -> None:
    """Put what a step read before what others read.

    Raises:
        StoreError: the service refuses it, or was away for too long.
    """
    newest, found = json.loads(content), _read(store, name).candidates
    if newest not in found[:1]:
        _write(store, name, (newest, *(one for one in found if one != newest))[:MOST_CANDIDATES])


def remove_unused(store: SharedStore, max_age_seconds: float) -> None:
    """Remove what was not looked up for so long."""
    oldest = time.time() - max_age_seconds
    old = [path for path, info in store.files("reads").items() if store.modified(info) < oldest]
    store.delete(f"{store.root}/reads/{path}" for path in old)


def _read(store: SharedStore, name: str) -> _File:
    with contextlib.suppress(ValidationError):
        if (content := store.read(_place(name))) is not None:
            return _File.model_validate_json(content)
    return _File()


def _write(store: SharedStore, name: str, all_: tuple[Any, ...]) -> None:
    store.write(_place(name), _File(used=time.time(), candidates=all_).model_dump_json().encode())


def _place(name: str) -> str:
    return f"reads/{name}.json"


# Paths as they can be told to another machine: from the project, the user's home and the like, not from the root.
#
#     {project}/nets/digits.py      the current folder, from which models and data are named
#     {enginesmith}/models/…        what comes with enginesmith
#     {prefix}/share/…              the Python environment
#     {home}/.cache/…               the user's home
#
# Any other path stays absolute: it means the same file where another machine has one there.

_OWN = "{enginesmith}"
OWN_FOLDERS = ("calibration", "models", "pipeline")
"""Of enginesmith's root, those that hold its code; a user's files may lie beside them, in a checkout."""


def to_portable_path(path: str) -> str:
    """An absolute path by the nearest of the anchors above it; anything else stays as it is."""
    if not path.startswith("/"):
        return path
    above = [(len(root), label) for root, label in _anchors(str(Path.cwd())) if _is_below(path, root)]
    if not above:
        return path
    length, label = max(above)
    return label + path[length:]


def from_portable_path(name: str) -> str:
    """The path on this machine that :func:`to_portable_path` gave the name for on another one."""
    if not name.startswith("{"):
        return name
    label, closing, rest = name.partition("}")
    return _places(str(Path.cwd()))[label + closing] + rest


def anchor_of(name: str) -> str:
    """``{project}`` of ``{project}/net.py``; empty for an absolute path."""
    return name[: name.index("}") + 1] if name.startswith("{") else ""


@functools.cache
def _places(project: str) -> dict[str, str]:
    """Anchor → folder."""
    home = str(Path.home())
    own = str(Path(__file__).parent.parent.parent)
    return {"{home}": home, "{prefix}": sys.prefix, _OWN: own, "{project}": project}


@functools.cache
def _anchors(project: str) -> tuple[tuple[str, str], ...]:
    """Folder and how it is told; of enginesmith only what is its own, as its checkout may be the project."""
    places = _places(project)
    named = [(folder, label) for label, folder in places.items() if label != _OWN]
    named += [(f"{places[_OWN]}/{folder}", f"{_OWN}/{folder}") for folder in OWN_FOLDERS]
    return tuple((folder, label) for folder, label in named if folder not in ("", "/"))


def _is_below(path: str, root: str) -> bool:
    return path.startswith(root) and (len(path) == len(root) or path[len(root)] == "/")


class _Candidate(BaseModel):
    """What a step depended on outside of the store, by portable paths."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[str, ...] = ()
    folders: dict[str, tuple[str, ...]] = {}
    """Files that were in the folders of those: one that appears or goes may be looked for."""
    subfolders: dict[str, tuple[str, ...]] = {}
    """Folders in those that were read as a whole."""
    packages: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return json_digest(self.model_dump())


class _Noted(BaseModel):
    """A candidate as it is written down; the state of its files on this machine is for this machine only."""

    candidate: _Candidate
    states: dict[str, StoredFile] = {}


@dataclass(frozen=True)
class ReadRecord:
    """What a step depends on outside of the store, as it is here and now."""

    path: str
    """Of the candidate, from the folder of reads."""
    files: Mapping[str, StoredFile]
    """By portable path."""
    packages: Mapping[str, str]

    @property
    def identity(self) -> dict[str, object]:
        """What belongs in a key: contents, without where on this machine they were."""
        groups: dict[str, dict[Path, str]] = {}
        for name, file in self.files.items():
            groups.setdefault(anchor_of(name), {})[Path(name)] = file.sha256
        files = {anchor: portable(digests) for anchor, digests in groups.items()}
        return {"files": files, "packages": dict(self.packages)}


class InputDependencies:
    """The user's files that a step depends on: found out while it runs, and looked at before it runs again."""

    def __init__(self, root: Path, name: str, shared: SharedStore | None = None) -> None:
        """``root`` is the folder of reads of this machine; ``shared`` is asked where that does not lead to an entry."""
        self._folder, self._name, self._shared = root / name, name, shared

    def candidates(self) -> Iterator[ReadRecord]:
        """What the step may depend on, as it is now, the likeliest first; nothing that is not here as a whole."""
        seen: set[str] = set()
        for path in self._newest_first():
            seen.add(path.name)
            noted = _noted(path)
            if noted is not None and noted.candidate.digest == path.stem and (found := self._now(noted)):
                _mark_used(path)
                yield found
        if self._shared is not None:
            yield from self._shared_candidates(self._shared, seen)

    def record(self, paths: Collection[Path], packages: Mapping[str, str]) -> ReadRecord:
        """Write down what was read: files, and folders of which every file was.

        Raises:
            StoreError: the store cannot be written, or a file is gone again.
        """
        with storage_errors(f"the store {self._folder.parent}"):
            whole = {path for path in paths if path.is_dir()}
            files = {to_portable_path(str(path)): stored_file(path) for path in paths if path not in whole}
            candidate = _Candidate(
                files=tuple(sorted(files)),
                folders={
                    to_portable_path(str(folder)): _listing(folder)
                    for folder in sorted({path.parent for path in paths if path not in whole} | whole)
                },
                subfolders={to_portable_path(str(folder)): _subfolders(folder) for folder in sorted(whole)},
                packages=tuple(sorted(packages)),
            )
            noted = _Noted(candidate=candidate, states=files)
            path = self._folder / f"{candidate.digest}.json"
            write_whole(path, noted.model_dump_json().encode())
            for old in self._newest_first()[MOST_CANDIDATES:]:
                old.unlink(missing_ok=True)
        return ReadRecord(f"{self._name}/{path.name}", files, dict(packages))

    def _shared_candidates(self, shared: SharedStore, seen: Collection[str]) -> Iterator[ReadRecord]:
        for content in candidates(shared, self._name):
            with contextlib.suppress(ValidationError):
                noted = _Noted(candidate=_Candidate.model_validate(content))
                if f"{noted.candidate.digest}.json" not in seen and (found := self._now(noted, new=True)):
                    yield found

    def _now(self, noted: _Noted, *, new: bool = False) -> ReadRecord | None:
        """A candidate with the files of this machine; None where something is not there, or something more is.

        What was learnt is written down: a ``new`` candidate, and the state of files that had to be hashed.
        """
        wanted = noted.candidate
        try:
            if any(_listing(Path(from_portable_path(name))) != names for name, names in wanted.folders.items()):
                return None
            if any(_subfolders(Path(from_portable_path(name))) != names for name, names in wanted.subfolders.items()):
                return None
            packages = {name: _version(name) for name in wanted.packages}
            files = {name: _regular(Path(from_portable_path(name)), noted.states.get(name)) for name in wanted.files}
        except (OSError, LookupError, ValueError, importlib.metadata.PackageNotFoundError):
            return None
        path = f"{wanted.digest}.json"
        if new or files != noted.states:
            with contextlib.suppress(OSError):  # a store that may only be read learns nothing
                write_whole(self._folder / path, _Noted(candidate=wanted, states=files).model_dump_json().encode())
        return ReadRecord(f"{self._name}/{path}", files, packages)

    def _newest_first(self) -> list[Path]:
        try:
            with os.scandir(self._folder) as entries:
                found = [entry for entry in entries if entry.name.endswith(".json") and entry.name[0] != "."]
        except FileNotFoundError:
            return []
        if len(found) > 1:
            found.sort(key=_age)
        return [Path(entry.path) for entry in found]


def shareable(root: Path, path: str) -> bytes | None:
    """A candidate without the state of files on this machine; None where it is gone."""
    noted = _noted(root / path)
    return noted.candidate.model_dump_json().encode() if noted is not None else None


def _noted(path: Path) -> _Noted | None:
    try:
        return _Noted.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _age(entry: os.DirEntry[str]) -> int:
    try:
        return -entry.stat().st_mtime_ns
    except FileNotFoundError:  # another process forgot it meanwhile
        return 0


def _mark_used(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(path)


def _regular(path: Path, before: StoredFile | None) -> StoredFile:
    """A file that a list of somebody else names may be anything, even one without end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise FileNotFoundError(path)
    return stored_file(path, before)


@functools.cache
def _version(name: str) -> str:
    return importlib.metadata.version(name)


def _listing(folder: Path) -> tuple[str, ...]:
    """Names of the files in a folder, but hidden ones and what `export` writes there."""
    names = (entry.name for entry in os.scandir(folder) if entry.is_file())
    return tuple(sorted(name for name in names if name[0] != "." and not name.endswith((".onnx", ".onnx.data"))))


def _subfolders(folder: Path) -> tuple[str, ...]:
    """Names of the folders in a folder, but hidden ones."""
    return tuple(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."))
