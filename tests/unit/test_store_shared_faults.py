"""A shared store that is damaged, away or refused: an entry is there whole or not at all, and nothing is lost."""

import errno
import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shared_stores
from enginesmith.pipeline.errors import MissingCapability, StoreError, UsageError
from enginesmith.pipeline.store import remote as shared_store
from enginesmith.pipeline.store import retry
from enginesmith.pipeline.store.manifest import MANIFEST, decode_checked, encode
from enginesmith.pipeline.store.remote import SharedStore
from enginesmith.pipeline.store.retry import Retries
from enginesmith.pipeline.store.store import Store
from shared_stores import KEY, Machine, list_files, put, remote

machine, url = shared_stores.machine, shared_stores.url  # fixtures


def test_a_killed_upload_leaves_nothing_visible(machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine("one")
    write = SharedStore._write

    def killed(self: SharedStore, path: str, content: bytes) -> None:
        if path.endswith(MANIFEST):
            raise KeyboardInterrupt
        write(self, path, content)

    with monkeypatch.context() as patch:
        patch.setattr(SharedStore, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            put(one)
    system, root = remote(url)
    assert len(list_files(url)) == 2
    assert machine("two").get(KEY) is None
    assert machine("two").entries() == []
    system.pipe_file(f"{root}/objects/ab/{KEY}/{MANIFEST}.partial", b"{")
    assert machine("two").get(KEY) is None
    found = machine("one").get(KEY)  # begun again, the first machine uploads what it has
    assert found is not None
    assert machine("two").get(KEY) is not None
    assert next(machine("three").dependencies("x").candidates(), None) is not None
    assert not list((machine("one").root / "unshared").iterdir())


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "manifest", "seal"])
def test_a_damaged_entry_is_noticed_removed_and_made_again(harm: str, machine: Machine, url: str) -> None:
    put(machine("one"))
    system, root = remote(url)
    manifest = f"{root}/objects/ab/{KEY}/{MANIFEST}"
    (file,) = (f"{root}/{path}" for path in list_files(url) if path.endswith("model.onnx"))
    text = system.cat_file(manifest)
    if harm == "remove":
        system.rm_file(file)
    elif harm == "manifest":
        system.pipe_file(manifest, text[:-20])
    elif harm == "seal":
        system.pipe_file(manifest, text.replace(b'"made"', b'"made up"'))
    else:
        system.pipe_file(file, b"grapH" if harm == "flip" else b"gra")
    said: list[str] = []
    two = machine("two", tell=said.append)
    assert two.get(KEY) is None
    assert list((two.root / "tmp").iterdir()) == []
    if harm in ("flip", "truncate", "remove"):
        assert "damaged; it is made again" in said[0]
        assert system.exists(manifest) == (harm == "remove"), "what is missing may be seen later"
    else:
        assert two.get(KEY) is None
        assert [line.endswith("is damaged; it is ignored") for line in said] == [True]  # once
    put(two)
    found = machine("three").get(KEY)
    assert found.path.read_bytes() == b"graph"


def test_damage_is_replaced_if_not_removed(machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(machine("one"))
    system, root = remote(url)
    (file,) = (f"{root}/{path}" for path in list_files(url) if path.endswith("model.onnx"))
    system.pipe_file(file, b"grapH")
    two = machine("two", tell=lambda text: None)
    monkeypatch.setattr(SharedStore, "delete", _refused)
    assert two.get(KEY) is None
    put(two)
    assert machine("three").get(KEY) is not None


def _refused(*arguments: object) -> None:
    raise StoreError("refused")


def test_what_lost_a_file_is_uploaded_again(machine: Machine, url: str) -> None:
    put(machine("one"))
    system, root = remote(url)
    (file,) = (f"{root}/{path}" for path in list_files(url) if path.endswith("model.onnx"))
    system.rm_file(file)
    put(machine("two"))
    assert machine("three", tell=pytest.fail).get(KEY) is not None


@pytest.mark.parametrize("name", ["../escaped", "{outside}/escaped", "a/../../escaped", MANIFEST])
def test_names_that_leave_the_folder_are_no_entry(name: str, machine: Machine, url: str, tmp_path: Path) -> None:
    name = name.format(outside=tmp_path / "outside")
    put(machine("one"))
    system, root = remote(url)
    path = f"{root}/objects/ab/{KEY}/{MANIFEST}"
    manifest = decode_checked(system.cat_file(path))
    files = {**manifest.files, name: manifest.files["model.onnx"]}
    there = f"{root}/objects/ab/{KEY}/{manifest.upload}/{name}"
    system.makedirs(there.rpartition("/")[0], exist_ok=True)
    system.pipe_file(there, b"graph")
    system.pipe_file(path, encode(manifest.model_copy(update={"files": files})))
    assert machine("two").get(KEY) is None
    assert not list((tmp_path / "two").rglob("escaped"))
    assert not (tmp_path / "outside").exists()


def test_a_store_of_another_version_is_refused(machine: Machine, url: str) -> None:
    put(machine("one"))
    system, root = remote(url)
    assert json.loads(system.cat_file(f"{root}/enginesmith-store.json")) == {"schema": "enginesmith.store/1"}
    system.pipe_file(f"{root}/enginesmith-store.json", b'{"schema": "enginesmith.store/9"}')
    with pytest.raises(StoreError, match="another version"):
        machine("two").get(KEY)


def test_a_full_disk_and_no_rights_fail_at_once(machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(machine("one"))
    two = machine("two", tell=pytest.fail)
    for number, words in ((errno.ENOSPC, "no space left"), (errno.EACCES, "(refuses access|denied)")):
        error = OSError(number, os.strerror(number))
        monkeypatch.setattr(type(two._shared.system), "get_file", _raising(error))
        with pytest.raises(StoreError, match=words):
            two.get(KEY)
    assert two.entries()  # it is no damage


def _raising(error: Exception) -> Callable[..., None]:
    def work(*arguments: object, **options: object) -> None:
        raise error

    return work


def test_an_outage_is_survived_and_told(machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(machine("one"))
    said: list[str] = []
    two = machine("two")
    two._shared.retries.first_seconds = 0.001
    system = type(two._shared.system)
    monkeypatch.setattr(system, "async_impl", True)  # files are brought in threads of their own
    get_file, failures = system.get_file, [ConnectionResetError("reset by peer"), TimeoutError("timed out")]

    def flaky(self: Any, *arguments: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()
        get_file(self, *arguments, **options)

    monkeypatch.setattr(system, "get_file", flaky)
    with retry.notifications_to(said.append):
        assert two.get(KEY) is not None
    assert re.search(r"cannot be reached \((timed out|reset by peer)\); trying again in", said[0])
    assert "is reachable again" in said[-1]


def test_what_could_not_be_uploaded_is_not_lost(machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine("one", tell=lambda text: None)
    one._shared.retries.total_seconds = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(type(one._shared.system), "put_file", _raising(ConnectionError("down")))
        with pytest.raises(StoreError, match="cannot be reached: down"):
            put(one)
    found = one.get(KEY)
    assert found.path.read_bytes() == b"graph"
    assert machine("two").get(KEY) is not None


def test_who_waits_for_a_store_fails_with_the_first(
    machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = machine("two", tell=lambda text: None)
    assert two._shared is not None
    asked, begun, others = [], threading.Barrier(3), []

    def away(self: SharedStore, place: str) -> bytes:
        asked.append(place)
        time.sleep(0.2)  # the others wait meanwhile
        raise StoreError("away", "wait")

    shared = two._shared
    monkeypatch.setattr(shared, "_read", functools.partial(away, shared))
    monkeypatch.setattr(shared, "_is_marked", False)

    def ask() -> None:
        begun.wait()
        with pytest.raises(StoreError, match="away"):
            shared.ensure_marked()
        others.append(1)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(asked), len(others)) == (1, 3)
    with pytest.raises(StoreError, match="away"):
        shared.ensure_marked()  # one who comes later asks anew
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("place", "kind", "words"),
    [
        ("nix://team/x", UsageError, "Protocol not known"),
        ("s4://team/x", UsageError, "did you mean s3://"),
        ("fil://team/x", UsageError, "did you mean file://"),
        ("foo://team/x", UsageError, r"Protocol not known: foo\n  → file://, s3:// and gs:// are among"),
        ("gs://team/x", MissingCapability, "pip install gcsfs"),
        ("file://", UsageError, "no valid address"),
        ("file:///proc/x", UsageError, "no folder can be made there"),
        ("ftp://127.0.0.1:1/x", StoreError, "cannot be reached"),
    ],
)
def test_what_cannot_be_a_store_is_said_at_once_and_leaves_nothing(
    place: str, kind: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shared_store, "Retries", functools.partial(Retries, total_seconds=0.0))
    with pytest.raises(kind, match=words):
        Store(place)
    assert list(tmp_path.iterdir()) == []
