"""The content-addressed store: a key says what was done to what, and leads to the files that came out.

It is a folder of this machine, or a place that many machines share, named by a URL. Of a shared one, what is used is
kept in a folder here, which works as a store by itself does: what is there is not asked for again.

    ROOT/objects/…, begun/…, tmp/…           as in :mod:`local_store`
    ROOT/reads/NAME/CANDIDATE.json           what steps read of the user's files, by name
    ROOT/unshared/KEY                        entries that are not, or not as a whole, in the shared store yet
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginesmith.pipeline.artifact import Artifact, HistoryEntry, Kind, files_below, write_whole
from enginesmith.pipeline.errors import MissingEntry, storage_errors
from enginesmith.pipeline.store import address, inputs, manifest, retry
from enginesmith.pipeline.store.inputs import InputDependencies, ReadRecord, shareable
from enginesmith.pipeline.store.local import LocalStore
from enginesmith.pipeline.store.manifest import MANIFEST, Entry, Manifest, entry_of, stored_file
from enginesmith.pipeline.store.remote import SharedStore
from enginesmith.pipeline.tensors import Signature

# Looking after a shared store: what is in it, whether it is whole, and what can go.
#
# An entry counts as used when it was published, and again when a machine downloads it, noted once a day; machines that
# have it in their cache leave no trace.

_LEFTOVER_SECONDS = 86400.0
"""What no manifest names is somebody's upload for as long; older, it is what an interrupted one left."""


@dataclass
class _Folder:
    """What lies below one key."""

    manifest: Mapping[str, Any] | None = None
    """What the file system says of it."""
    uploads: dict[str, dict[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Files by upload."""


def entries(store: SharedStore) -> list[Entry]:
    """Everything published, the latest used first."""
    found = {key: folder.manifest for key, folder in _folders(store).items() if folder.manifest is not None}
    manifests = _manifests(store, list(found))
    listed = [entry_of(key, manifests[key], store.modified(info)) for key, info in found.items()]
    return sorted(listed, key=lambda entry: -entry.used)


def verify(store: SharedStore, workspace: Path) -> list[str]:
    """Download and hash every entry; remove the damaged ones and give back their keys."""
    damaged = []
    for key, folder in sorted(_folders(store).items()):
        if folder.manifest is not None:
            if store.fetch(key, workspace, touch=False) is None:
                store.remove(key)
                damaged.append(key)
            shutil.rmtree(workspace)
            workspace.mkdir()
    return damaged


def prune(store: SharedStore, max_bytes: int | None, max_age_seconds: float | None) -> list[Entry]:
    """Remove entries as :func:`stored_entry.prune` says, leftovers of uploads, and reads that were not looked up."""

    def remove(entry: Entry) -> bool:
        store.remove(entry.key)
        return True

    removed = manifest.prune(entries(store), remove, max_bytes, max_age_seconds)
    _remove_leftovers(store)
    if max_age_seconds is not None:
        inputs.remove_unused(store, max_age_seconds)
    return removed


def _folders(store: SharedStore) -> dict[str, _Folder]:
    store.marker.validate_exists()
    found: dict[str, _Folder] = {}
    for path, info in store.files("objects").items():
        parts = path.split("/", 3)
        if len(parts) < 3:
            continue
        folder = found.setdefault(parts[1], _Folder())
        if parts[2:] == [MANIFEST]:
            folder.manifest = info
        else:
            folder.uploads.setdefault(parts[2], {})[f"{store.root}/objects/{path}"] = info
    return found


def _manifests(store: SharedStore, keys: list[str]) -> dict[str, Manifest | None]:
    """Without the files that are in them: there may be thousands."""

    def bare(key: str) -> Manifest | None:
        found = store.manifest(key)
        return found and found.model_copy(update={"contents": {}})

    return dict(zip(keys, store.each(bare, keys), strict=True))


def _remove_leftovers(store: SharedStore) -> None:
    """Files that no manifest names, once they are so old that nobody can still be about to name them."""
    oldest = time.time() - _LEFTOVER_SECONDS
    folders = {key: folder for key, folder in _folders(store).items() if folder.uploads}
    manifests = _manifests(store, [key for key, folder in folders.items() if folder.manifest is not None])
    for key, folder in folders.items():
        named = entry.upload if (entry := manifests.get(key)) else ""
        for upload, files in folder.uploads.items():
            if upload != named and max(map(store.modified, files.values())) < oldest:
                store.delete(files)


class Store:
    """Artifacts by key; several processes, and of a shared store several machines, may use one at the same time."""

    def __init__(
        self,
        place: Path | str | None = None,
        *,
        reuse: bool = True,
        make: bool = True,
        tell: Callable[[str], None] = retry.notify,
    ) -> None:
        """Open a folder or URL, by default the one of :func:`default_root`; it is made if need be, and if ``make``.

        With ``reuse`` false only what this object published is found. ``tell`` takes news for people: a shared store
        that cannot be reached, say. A shared store is asked for now where this machine has nothing of it: what is wrong
        with the address then leaves nothing behind. Otherwise not before it is needed.

        Raises:
            UsageError: a URL that cannot be a store, or where none can be made.
            MissingCapability: the package for its protocol is not installed.
            StoreError: the folder cannot be made or written; the shared store refuses it, or was away for too long.
        """
        found = address.default_address() if place is None else address.address(place)
        self.address = found.text
        """What opens the same store on another machine."""
        self._shared = SharedStore(found.url, tell) if found.url else None
        if self._shared is not None and make and not found.folder.exists():
            self._shared.marker.ensure_exists()
        self._local = LocalStore(found.folder, make=make)
        self._reuse = reuse
        self._published: set[str] = set()
        self._unshared = self._left_unshared()

    @property
    def reuse(self) -> bool:
        """Whether what others published is found."""
        return self._reuse

    @property
    def root(self) -> Path:
        """The folder on this machine."""
        return self._local.root

    def get(self, key: str) -> Artifact | None:
        """The artifact of a key, or None where there is none; a damaged one is removed and counts as none.

        Raises:
            StoreError: the shared store refuses it, or was away for too long.
        """
        if not (self._reuse or key in self._published):
            return None
        found = self._local.find(key)
        if self._shared is not None and key not in self._published:
            if found is None or found.incomplete:  # another machine may have a final one
                found = self._downloaded(self._shared, key) or found
            elif key in self._unshared:
                found = self._share(self._shared, key, found)
        return found.artifact(self._local.folder(key), key) if found is not None else None

    def fetch(self, key: str, sha256: str = "") -> Artifact:
        """The artifact of a key that has to be there, whoever published it; with ``sha256``, the one of that digest.

        Raises:
            MissingEntry: it is nowhere.
            StoreError: the shared store cannot be reached.
        """
        found = self._local.find(key)
        if self._shared is not None and (found is None or sha256 not in ("", found.sha256)):
            found = self._downloaded(self._shared, key, replace=found is not None) or found
        if found is None or sha256 not in ("", found.sha256):
            raise MissingEntry(
                f"the store {self.address} has no entry {key[:16]}" + (" of that content" if found else ""),
                "it was removed meanwhile; do it again",
            )
        return found.artifact(self._local.folder(key), key)

    def share(self, artifact: Artifact) -> Artifact:
        """See that others have what was found here, and give it back as they have it.

        An entry in this machine's cache may have been removed from the shared store, or be on its way there.

        Raises:
            StoreError: the shared store refuses it, or was away for too long.
        """
        if self._shared is None or (found := self._local.find(artifact.key)) is None:
            return artifact
        found = self._share(self._shared, artifact.key, found)
        return found.artifact(self._local.folder(artifact.key), artifact.key).model_copy(
            update={"history": artifact.history}
        )

    def workspace(self) -> AbstractContextManager[Path]:
        """An empty folder on the store's own file system; what is not published from it is removed.

        Raises:
            StoreError: it cannot be made.
        """
        return self._local.workspace()

    def begun(self, name: str) -> AbstractContextManager[Path]:
        """What a step has so far on this machine, as :meth:`LocalStore.begun` has it.

        Where nothing may be reused, what others left is removed first.
        """
        return self._local.begun(name, go_on=self._reuse)

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
        """Move a workspace's content under its key, in one step, and give back the artifact.

        What another process or machine published meanwhile stays, if it is whole and final, and is given back instead;
        unless nothing may be reused. ``read`` leads other machines to the entry.

        Raises:
            StoreError: the disk is full or cannot be written; the shared store refuses it, or was away for too long.
        """
        with storage_errors(f"the store {self.root}"):
            manifest = Manifest(
                kind=kind,
                file=file,
                files={name: stored_file(folder / name) for name in files_below(folder)},
                signature=signature,
                history=history,
                rejected=rejected,
                incomplete=incomplete,
                step=history[-1].step if history else "",
            )
            if self._shared is not None:
                self._note_unshared(key, read)
        there = self._local.install(key, folder, manifest, replace=not self._reuse)
        if self._shared is not None:
            there = self._share(self._shared, key, there)
        self._published.add(key)
        return there.artifact(self._local.folder(key), key)

    def dependencies(self, name: str) -> InputDependencies:
        """What the step of that name may depend on of the user's files."""
        return InputDependencies(self.root / "reads", name, self._shared if self._reuse else None)

    def entries(self) -> list[Entry]:
        """Everything published, the latest used first; of a folder, what was begun, too."""
        return self._local.entries() if self._shared is None else entries(self._shared)

    def verify(self) -> list[str]:
        """Hash every file of every entry; remove the damaged ones and give back their keys."""
        if self._shared is None:
            return self._local.verify()
        with self.workspace() as folder:
            return verify(self._shared, folder)

    def prune(self, *, max_bytes: int | None = None, max_age_seconds: float | None = None) -> list[Entry]:
        """Remove entries not used for so long, then the least recently used until the rest fits; give them back."""
        if self._shared is None:
            return self._local.prune(max_bytes, max_age_seconds)
        return prune(self._shared, max_bytes, max_age_seconds)

    def stop(self) -> None:
        """Wait no longer for a shared store that is away: what waits, and what is asked from now on, fails."""
        if self._shared is not None:
            self._shared.retries.stopped.set()

    def _downloaded(self, shared: SharedStore, key: str, *, replace: bool = False) -> Manifest | None:
        """An entry of the shared store, brought here."""
        with self.workspace() as folder:
            found = shared.fetch(key, folder)
            return self._local.install(key, folder, found, replace=replace) if found is not None else None

    def _share(self, shared: SharedStore, key: str, manifest: Manifest) -> Manifest:
        """See that the shared store has an entry, and the reads that lead to it; give back the one that stands."""
        there = shared.whole(key)
        if there is not None and there.sha256 != manifest.sha256 and self._reuse:
            manifest = self._downloaded(shared, key, replace=True) or manifest
            there = shared.whole(key)
        mark = self.root / "unshared" / key
        with contextlib.suppress(FileNotFoundError):
            path = mark.read_text()
            if path and (content := shareable(self.root / "reads", path)) is not None:
                inputs.publish(shared, path.partition("/")[0], content)
        if there is None or there.sha256 != manifest.sha256:
            shared.publish(key, self._local.folder(key), manifest)
        self._unshared.discard(key)
        mark.unlink(missing_ok=True)
        return manifest

    def _note_unshared(self, key: str, read: ReadRecord | None) -> None:
        write_whole(self.root / "unshared" / key, read.path.encode() if read is not None else b"")
        self._unshared.add(key)

    def _left_unshared(self) -> set[str]:
        """What processes that were ended, or could not reach the shared store, left to be uploaded."""
        with contextlib.suppress(FileNotFoundError):
            return {path.name for path in (self.root / "unshared").iterdir() if not path.name.startswith(".")}
        return set()


def default_root() -> Path:
    """The folder on this machine of the store that is used where none is named."""
    return address.default_address().folder
