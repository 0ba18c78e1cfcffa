"""Shared stores on two file systems, opened as several machines would; tests say which of the fixtures they use.

``machine, url = shared_stores.machine, shared_stores.url`` in a file of tests gives its tests both fixtures.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from enginesmith.pipeline.artifact import Artifact, Effect, HistoryEntry
from enginesmith.pipeline.store.store import Store

HISTORY = (HistoryEntry(step="export", parameters={}, tools={}, seconds=1.0, host_peak_bytes=None, effect="made"),)
KEY, OTHER = "ab" * 32, "cd" * 32
Machine = Callable[..., Store]


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the address of the shared store; ``remote(url)`` opens it directly."""
    if request.param == "file":
        yield f"file://{tmp_path}/shared/store"
        return
    memory = fsspec.filesystem("memory")
    yield "memory://team/store"
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> Machine:
    """Opens the shared store as another machine would, with a cache of its own.

    Most of what is put here has its files beside the manifest, as large entries have.
    """
    monkeypatch.setattr("enginesmith.pipeline.store.remote._SMALL_BYTES", 5)

    def open_store(name: str = "one", **options: Any) -> Store:
        monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / name))
        return Store(url, **options)

    return open_store


def remote(url: str) -> Any:
    """Return the file system and the root of a store."""
    return fsspec.url_to_fs(url)


def list_files(url: str, pattern: str = "objects") -> list[str]:
    """List the files of a store below one of its folders, as paths from its root."""
    system, root = remote(url)
    return sorted(path[len(root) + 1 :] for path in system.find(f"{root}/{pattern}"))


def put(store: Store, key: str = KEY, content: bytes = b"graph", **options: Any) -> Artifact:
    """Publish an entry of two files, one of them in a folder."""
    read = store.dependencies("x").record(Effect(file="", summary=""))
    with store.workspace() as folder:
        (folder / "model.onnx").write_bytes(content)
        (folder / "sub").mkdir()
        (folder / "sub" / "weights[0]").write_bytes(b"w")
        return store.publish(
            key, folder, kind="onnx", file="model.onnx", signature=None, history=HISTORY, read=read, **options
        )
