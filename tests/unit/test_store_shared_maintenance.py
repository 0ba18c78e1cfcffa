"""A shared store is looked after from any machine: its entries listed, verified, and pruned by size and by age."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

import shared_stores
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.store.manifest import MANIFEST, decode_checked, encode
from enginesmith.pipeline.store.remote import SharedStore
from enginesmith.pipeline.store.store import Store
from shared_stores import KEY, OTHER, Machine, list_files, put, remote

machine, url = shared_stores.machine, shared_stores.url  # fixtures

DAY = 86400.0


def test_the_cache_commands_look_after_the_shared_store(machine: Machine, url: str) -> None:
    one = machine("one")
    put(one, KEY)
    put(one, OTHER, b"larger")
    listed = one.entries()
    assert {(entry.key, entry.step, entry.kind, entry.bytes) for entry in listed} == {
        (KEY, "export", "onnx", 6),
        (OTHER, "export", "onnx", 7),
    }
    assert all(abs(entry.used - time.time()) < 60 for entry in listed)
    system, root = remote(url)
    (file,) = (f"{root}/{path}" for path in list_files(url) if OTHER in path and path.endswith("model.onnx"))
    system.pipe_file(file, b"largeR")
    assert machine("two").verify() == [OTHER]
    assert [entry.key for entry in one.entries()] == [KEY]
    assert [entry.key for entry in one.prune(max_bytes=5)] == [KEY]
    assert one.entries() == []
    assert list_files(url) == []


def _aged(url: str, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
    """Has files whose path contains such a word be so old."""

    def modified(self: SharedStore, info: dict[str, Any]) -> float:
        return time.time() - min([age for word, age in seconds.items() if word in info["name"]], default=0.0)

    monkeypatch.setattr(SharedStore, "modified", modified)


def test_prune_removes_interrupted_uploads_of_yesterday(
    machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine("one")
    put(one)
    system, root = remote(url)
    for key, upload in ((KEY, "old"), (KEY, "new"), (OTHER, "old")):
        system.makedirs(f"{root}/objects/{key[:2]}/{key}/{upload}", exist_ok=True)
        system.pipe_file(f"{root}/objects/{key[:2]}/{key}/{upload}/model.onnx", b"half")
    _aged(url, monkeypatch, {"objects": 5 * DAY, "/new/": DAY - 60})
    assert [(entry.kind, entry.bytes) for entry in one.prune()] == [("file", 4)] * 2
    left = [path for path in list_files(url) if "/old/" in path or "/new/" in path]
    assert left == [f"objects/ab/{KEY}/new/model.onnx"]
    assert machine("two").get(KEY) is not None


def test_prune_by_age_goes_by_the_last_use(machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine("one")
    put(one, KEY)
    put(one, OTHER)
    system, root = remote(url)
    manifest = decode_checked(system.cat_file(f"{root}/objects/ab/{KEY}/{MANIFEST}"))
    assert abs(manifest.used - time.time()) < 60
    old = encode(manifest.model_copy(update={"used": manifest.used - 9 * DAY}))
    system.pipe_file(f"{root}/objects/ab/{KEY}/{MANIFEST}", old)
    read = json.loads(system.cat_file(f"{root}/reads/x.json"))
    system.pipe_file(f"{root}/reads/x.json", json.dumps({**read, "used": read["used"] - 9 * DAY}).encode())
    _aged(url, monkeypatch, {KEY: 9 * DAY, "reads": 9 * DAY})
    written: list[str] = []
    write = SharedStore._write
    monkeypatch.setattr(SharedStore, "_write", lambda self, path, data: written.append(path) or write(self, path, data))
    two = machine("two")
    assert next(two.dependencies("x").candidates(), None) is not None
    assert two.get(KEY) is not None
    assert two.get(OTHER) is not None
    assert [path.rpartition("/")[2] for path in written if KEY in path or OTHER in path] == [MANIFEST]  # the old one
    assert "reads/x.json" in written
    old, candidate = one.prune(max_age_seconds=5 * DAY)
    assert (old.key, candidate.step, candidate.kind, candidate.bytes > 0) == (KEY, "reads", "file", True)
    assert list_files(url, "reads") == []


def test_upkeep_makes_no_store(machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="there is no store"):
        Store(f"{url}/typo", make=False).entries()
    folder = Store(tmp_path / "folder", make=False)
    assert (folder.entries(), folder.verify(), folder.prune(max_bytes=0)) == ([], [], [])
    assert not any((tmp_path / name).exists() for name in ("cache", "folder"))
    put(machine("one"))
    assert Store(url, make=False).verify() == []
