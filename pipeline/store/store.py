"""Keep artifacts by key: the key is a digest of what was done to what, and leads to the files that came out.

A store is a folder of this machine, or a URL that many machines share. Used entries of a shared one are cached in a
folder here, which works as a store by itself does: cached entries are not requested again.

    ROOT/objects/…, begun/…, tmp/…           as in :mod:`.local`
    ROOT/reads/NAME/CANDIDATE.json           the user's files that steps read, by name
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
from enginesmith.pipeline.store.address import default_address, parse_address
from enginesmith.pipeline.store.inputs import (
    InputDependencies,
    ReadRecord,
    export_candidate,
    publish_candidate,
    remove_unused_candidates,
)
from enginesmith.pipeline.store.local import LocalStore
from enginesmith.pipeline.store.manifest import MANIFEST, Entry, Manifest, describe_file, entry_of, prune_entries
from enginesmith.pipeline.store.remote import SharedStore
from enginesmith.pipeline.store.retry import notify
from enginesmith.pipeline.tensors import Signature

# Maintenance of a shared store.
#
# An entry counts as used when it was published, and again when a machine downloads it, noted once a day; machines that
# have it in their cache leave no trace.

_LEFTOVER_SECONDS = 86400.0
"""Files that no manifest names may be an upload under way for so long; older ones are leftovers."""


@dataclass
class _Folder:
    """Files below one key."""

    manifest: Mapping[str, Any] | None = None
    """The file system's description of it."""
    uploads: dict[str, dict[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Files by upload."""


def list_shared(store: SharedStore) -> list[Entry]:
    """List published entries, most recently used first."""
    infos = {key: folder.manifest for key, folder in _folders(store).items() if folder.manifest is not None}
    manifests = _manifests(store, list(infos))
    entries = [entry_of(key, manifests[key], store.modified(info)) for key, info in infos.items()]
    return sorted(entries, key=lambda entry: -entry.used)


def verify_shared(store: SharedStore, workspace: Path) -> list[str]:
    """Download and hash every entry; remove the damaged ones and return their keys."""
    damaged = []
    for key, folder in sorted(_folders(store).items()):
        if folder.manifest is not None:
            if store.fetch(key, workspace, touch=False) is None:
                store.remove(key)
                damaged.append(key)
            shutil.rmtree(workspace)
            workspace.mkdir()
    return damaged


def prune_shared(store: SharedStore, max_bytes: int | None, max_age_seconds: float | None) -> list[Entry]:
    """Remove entries as :func:`.manifest.prune_entries` does, leftovers of uploads, and candidates not looked up."""

    def remove(entry: Entry) -> bool:
        store.remove(entry.key)
        return True

    removed = prune_entries(list_shared(store), remove, max_bytes, max_age_seconds)
    _remove_leftovers(store)
    if max_age_seconds is not None:
        remove_unused_candidates(store, max_age_seconds)
    return removed


def _folders(store: SharedStore) -> dict[str, _Folder]:
    store.marker.validate_exists()
    folders: dict[str, _Folder] = {}
    for path, info in store.files("objects").items():
        parts = path.split("/", 3)
        if len(parts) < 3:
            continue
        folder = folders.setdefault(parts[1], _Folder())
        if parts[2:] == [MANIFEST]:
            folder.manifest = info
        else:
            folder.uploads.setdefault(parts[2], {})[f"{store.root}/objects/{path}"] = info
    return folders


def _manifests(store: SharedStore, keys: list[str]) -> dict[str, Manifest | None]:
    """Read manifests, without the files that are in them: there may be thousands."""

    def bare(key: str) -> Manifest | None:
        manifest = store.manifest(key)
        return manifest and manifest.model_copy(update={"contents": {}})

    return dict(zip(keys, store.each(bare, keys), strict=True))


def _remove_leftovers(store: SharedStore) -> None:
    """Remove files that no manifest names, once they are so old that their upload cannot be under way."""
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
        tell: Callable[[str], None] = notify,
    ) -> None:
        """Open a folder or URL, by default the one of :func:`default_root`; it is made if needed, and if ``make``.

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
        """Opens the same store on another machine."""
        self._shared = SharedStore(address.url, tell) if address.url else None
        if self._shared is not None and make and not address.folder.exists():
            self._shared.marker.ensure_exists()
        self._local = LocalStore(address.folder, make=make)
        self._reuse = reuse
        self._published: set[str] = set()
        self._unshared = self._list_unshared()

    @property
    def reuse(self) -> bool:
        """Whether entries that others published are found."""
        return self._reuse

    @property
    def root(self) -> Path:
        """The folder on this machine."""
        return self._local.root

    def get(self, key: str) -> Artifact | None:
        """Look up the artifact of a key; None if there is none. A damaged entry is removed.

        Raises:
            StoreError: the shared store refuses access, or cannot be reached.
        """
        if not (self._reuse or key in self._published):
            return None
        manifest = self._local.find(key)
        if self._shared is not None and key not in self._published:
            if manifest is None or manifest.incomplete:  # another machine may have a final one
                manifest = self._download(self._shared, key) or manifest
            elif key in self._unshared:
                manifest = self._share(self._shared, key, manifest)
        return manifest.artifact(self._local.folder(key), key) if manifest is not None else None

    def fetch(self, key: str, sha256: str = "") -> Artifact:
        """Fetch the artifact of a key that has to exist, whoever published it; with ``sha256``, the one of that digest.

        Raises:
            MissingEntry: it is nowhere.
            StoreError: the shared store cannot be reached.
        """
        manifest = self._local.find(key)
        if self._shared is not None and (manifest is None or sha256 not in ("", manifest.sha256)):
            manifest = self._download(self._shared, key, replace=manifest is not None) or manifest
        if manifest is None or sha256 not in ("", manifest.sha256):
            raise MissingEntry(
                f"the store {self.address} has no entry {key[:16]}" + (" of that content" if manifest else ""),
                "it was removed meanwhile; do it again",
            )
        return manifest.artifact(self._local.folder(key), key)

    def share(self, artifact: Artifact) -> Artifact:
        """Upload an artifact that others lack, and return it as they have it.

        An entry in this machine's cache may have been removed from the shared store, or be on its way there.

        Raises:
            StoreError: the shared store refuses access, or cannot be reached.
        """
        if self._shared is None or (manifest := self._local.find(artifact.key)) is None:
            return artifact
        manifest = self._share(self._shared, artifact.key, manifest)
        return manifest.artifact(self._local.folder(artifact.key), artifact.key).model_copy(
            update={"history": artifact.history}
        )

    def workspace(self) -> AbstractContextManager[Path]:
        """Make an empty folder on the store's own file system, and remove it afterwards unless it was published.

        Raises:
            StoreError: it cannot be made.
        """
        return self._local.workspace()

    def partial_work(self, name: str) -> AbstractContextManager[Path]:
        """Open the folder of a step's partial work on this machine, as :meth:`LocalStore.partial_work` does.

        If nothing may be reused, earlier content is removed first.
        """
        return self._local.partial_work(name, resume=self._reuse)

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
        with storage_errors(f"the store {self.root}"):
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
                self._note_unshared(key, read)
        manifest = self._local.install(key, folder, manifest, replace=not self._reuse)
        if self._shared is not None:
            manifest = self._share(self._shared, key, manifest)
        self._published.add(key)
        return manifest.artifact(self._local.folder(key), key)

    def dependencies(self, name: str) -> InputDependencies:
        """Return the user's files that the step of that name may depend on."""
        return InputDependencies(self.root / "reads", name, self._shared if self._reuse else None)

    def entries(self) -> list[Entry]:
        """List published entries, most recently used first; of a folder, partial work, too."""
        return self._local.entries() if self._shared is None else list_shared(self._shared)

    def verify(self) -> list[str]:
        """Hash every file of every entry; remove the damaged entries and return their keys."""
        if self._shared is None:
            return self._local.verify()
        with self.workspace() as folder:
            return verify_shared(self._shared, folder)

    def prune(self, *, max_bytes: int | None = None, max_age_seconds: float | None = None) -> list[Entry]:
        """Remove entries not used for so long, then the least recently used until the rest fits; return them."""
        if self._shared is None:
            return self._local.prune(max_bytes, max_age_seconds)
        return prune_shared(self._shared, max_bytes, max_age_seconds)

    def stop(self) -> None:
        """Wait no longer for a shared store that cannot be reached: present and later calls fail."""
        if self._shared is not None:
            self._shared.retries.stopped.set()

    def _download(self, shared: SharedStore, key: str, *, replace: bool = False) -> Manifest | None:
        """Download an entry of the shared store into the local one."""
        with self.workspace() as folder:
            manifest = shared.fetch(key, folder)
            return self._local.install(key, folder, manifest, replace=replace) if manifest is not None else None

    def _share(self, shared: SharedStore, key: str, manifest: Manifest) -> Manifest:
        """Upload an entry and the candidate that leads to it, if the shared store lacks them; return the entry."""
        stored = shared.find_complete(key)
        if stored is not None and stored.sha256 != manifest.sha256 and self._reuse:
            manifest = self._download(shared, key, replace=True) or manifest
            stored = shared.find_complete(key)
        marker = self.root / "unshared" / key
        with contextlib.suppress(FileNotFoundError):
            path = marker.read_text()
            if path and (content := export_candidate(self.root / "reads", path)) is not None:
                publish_candidate(shared, path.partition("/")[0], content)
        if stored is None or stored.sha256 != manifest.sha256:
            shared.publish(key, self._local.folder(key), manifest)
        self._unshared.discard(key)
        marker.unlink(missing_ok=True)
        return manifest

    def _note_unshared(self, key: str, read: ReadRecord | None) -> None:
        write_whole(self.root / "unshared" / key, read.path.encode() if read is not None else b"")
        self._unshared.add(key)

    def _list_unshared(self) -> set[str]:
        """List keys still to be uploaded: their process was interrupted, or could not reach the shared store."""
        with contextlib.suppress(FileNotFoundError):
            return {path.name for path in (self.root / "unshared").iterdir() if not path.name.startswith(".")}
        return set()


def default_root() -> Path:
    """Return the folder on this machine of the store that is used if none is named."""
    return default_address().folder
