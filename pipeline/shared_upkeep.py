"""Looking after a shared store: what is in it, whether it is whole, and what can go.

An entry counts as used when it was published, and again when a machine downloads it, noted once a day; machines that
have it in their cache leave no trace.
"""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginesmith.pipeline import shared_reads, stored_entry
from enginesmith.pipeline.shared_store import SharedStore
from enginesmith.pipeline.stored_entry import MANIFEST, Entry, Manifest, entry_of

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

    removed = stored_entry.prune(entries(store), remove, max_bytes, max_age_seconds)
    _remove_leftovers(store)
    if max_age_seconds is not None:
        shared_reads.remove_unused(store, max_age_seconds)
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
        named = manifest.upload if (manifest := manifests.get(key)) else ""
        for upload, files in folder.uploads.items():
            if upload != named and max(map(store.modified, files.values())) < oldest:
                store.delete(files)
