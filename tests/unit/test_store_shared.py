"""A shared store, on two file systems: what one machine publishes another has, whole or not at all."""

import errno
import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from enginesmith.pipeline.artifact import Artifact, Effect, HistoryEntry, json_digest
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.errors import MissingCapability, StoreError, UsageError
from enginesmith.pipeline.execution.executor import StepCache
from enginesmith.pipeline.execution.ray.executor import RayExecutor
from enginesmith.pipeline.planning.plan import Step, StepRef
from enginesmith.pipeline.store import remote as shared_store
from enginesmith.pipeline.store import retry
from enginesmith.pipeline.store.inputs import MOST_CANDIDATES
from enginesmith.pipeline.store.manifest import MANIFEST, decode_checked, encode
from enginesmith.pipeline.store.remote import SharedStore
from enginesmith.pipeline.store.retry import Retries
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks import measure, mixed_precision
from enginesmith.pipeline.tasks.base import Done
from enginesmith.pipeline.tasks.tune import Tune

HISTORY = (HistoryEntry(step="export", parameters={}, tools={}, seconds=1.0, host_peak_bytes=None, effect="made"),)
KEY, OTHER = "ab" * 32, "cd" * 32
DAY = 86400.0
Machine = Callable[..., Store]


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where all share; the place that is looked at directly is ``remote(url)``."""
    if request.param == "file":
        yield f"file://{tmp_path}/shared/store"
        return
    memory = fsspec.filesystem("memory")
    yield "memory://team/store"
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> Machine:
    """Opens the shared store as another machine would, with a cache of its own."""

    def open_store(name: str = "one", **options: Any) -> Store:
        monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / name))
        return Store(url, **options)

    return open_store


@pytest.fixture(autouse=True)
def hardly_anything_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of what is put here has its files beside the manifest, as large entries have."""
    monkeypatch.setattr("enginesmith.pipeline.store.remote._SMALL_BYTES", 5)


def remote(url: str) -> Any:
    """The file system and the root."""
    return fsspec.url_to_fs(url)


def below(url: str, pattern: str = "objects") -> list[str]:
    system, root = remote(url)
    return sorted(path[len(root) + 1 :] for path in system.find(f"{root}/{pattern}"))


def put(store: Store, key: str = KEY, content: bytes = b"graph", **options: Any) -> Artifact:
    read = store.dependencies("x").record([], {})
    with store.workspace() as folder:
        (folder / "model.onnx").write_bytes(content)
        (folder / "sub").mkdir()
        (folder / "sub" / "weights[0]").write_bytes(b"w")
        return store.publish(
            key, folder, kind="onnx", file="model.onnx", signature=None, history=HISTORY, read=read, **options
        )


def test_what_one_machine_published_another_has(machine: Machine, url: str) -> None:
    made = put(machine("one"))
    two = machine("two")
    assert two.get(OTHER) is None
    assert next(two.dependencies("x").candidates(), None) is not None
    found = two.get(KEY)
    assert found.path != made.path
    assert found.path.read_bytes() == b"graph"
    assert (found.folder / "sub" / "weights[0]").read_bytes() == b"w"
    assert found.model_copy(update={"path": made.path}) == made
    assert found.key == KEY
    system, root = remote(url)
    system.rm(root, recursive=True)
    assert two.get(KEY) == found  # from its cache
    assert next(two.dependencies("x").candidates(), None) is not None


def test_the_address_opens_the_same_store(machine: Machine, url: str) -> None:
    store = machine()
    assert store.address == url
    assert store.root != machine("two").root
    assert Store(store.root).address == str(store.root)


def test_nothing_of_this_machine_is_told(machine: Machine, url: str, tmp_path: Path) -> None:
    put(machine())
    system, root = remote(url)
    for path in below(url, ""):
        content = system.cat_file(f"{root}/{path}").decode()
        assert str(tmp_path) not in content
        assert os.uname().nodename not in content
    found = decode_checked(system.cat_file(f"{root}/objects/ab/{KEY}/{MANIFEST}"))
    assert found.contents == {}
    assert {file.inode for file in found.files.values()} == {None}


def test_a_small_entry_is_its_manifest(machine: Machine, url: str) -> None:
    made = put(machine("one"), content=b"\xff\0")
    path = f"objects/ab/{KEY}/{MANIFEST}"
    assert below(url) == [path]
    two = machine("two", tell=pytest.fail)
    found = two.get(KEY)
    assert found.path.read_bytes() == b"\xff\0"
    assert (found.folder / "sub" / "weights[0]").read_bytes() == b"w"
    assert found.model_copy(update={"path": made.path}) == made
    there = decode_checked((found.folder / MANIFEST).read_bytes())
    assert there.contents == {}
    system, root = remote(url)
    before = system.cat_file(f"{root}/{path}")
    put(machine("three"), content=b"\xff\0")
    assert system.cat_file(f"{root}/{path}") == before
    assert machine("four").verify() == []
    manifest = decode_checked(before)
    other = manifest.model_copy(update={"contents": {**manifest.contents, "model.onnx": b"other"}})
    system.pipe_file(f"{root}/{path}", encode(other))
    said: list[str] = []
    assert machine("five", tell=said.append).get(KEY) is None
    assert "damaged; it is made again" in said[0]
    assert below(url) == []


def test_a_known_step_takes_two_requests_an_unknown_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    put(machine("one"), content=b"gr")
    two = machine("two")
    assert two.get(OTHER) is None  # it knows the store
    assert two._shared is not None
    asked: list[str] = []

    def counted(work: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(work.__name__)
        return work(*arguments, **options)

    monkeypatch.setattr(two._shared, "retries", counted)
    assert next(two.dependencies("x").candidates(), None) is not None
    assert two.get(KEY) is not None
    assert asked == ["cat_file", "cat_file"]
    assert next(two.dependencies("y").candidates(), None) is None
    assert asked[2:] == ["cat_file"]


def test_lists_of_several_projects_are_kept_the_newest_first(
    machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(name: str, machine_name: str) -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.bin").write_text(name)
        monkeypatch.chdir(folder)
        store = machine(machine_name)
        found = store.dependencies("x").record([folder / f"{name}.bin"], {})
        with store.workspace() as work:
            (work / "a").write_text(name)
            key = json_digest(name)
            store.publish(key, work, kind="onnx", file="a", signature=None, history=HISTORY, read=found)
        return found.path

    names = [f"project{number}" for number in range(MOST_CANDIDATES + 2)]
    for name in names:
        read(name, "one")
    read(names[-2], "two")
    (path,) = below(url, "reads")
    system, root = remote(url)
    listed = json.loads(system.cat_file(f"{root}/{path}"))["candidates"]
    order = [names[-2], names[-1], *names[-3:1:-1]]
    assert [one["files"] for one in listed] == [[f"{{project}}/{name}.bin"] for name in order]
    monkeypatch.chdir(tmp_path / names[5])
    assert [list(one.files) for one in machine("three").dependencies("x").candidates()] == [
        [f"{{project}}/{names[5]}.bin"]
    ]
    system.pipe_file(f"{root}/{path}", b"{")
    assert list(machine("four").dependencies("x").candidates()) == []
    read(names[0], "five")
    assert next(machine("six").dependencies("x").candidates(), None) is not None


def test_what_another_machine_published_stays_and_is_given_back(machine: Machine, url: str) -> None:
    put(machine("one"), content=b"graph")
    before = below(url)
    two = machine("two")
    assert put(two, content=b"other").path.read_bytes() == b"graph"
    assert below(url) == before
    assert put(machine("three", reuse=False), content=b"newest").path.read_bytes() == b"newest"
    found = machine("four").get(KEY)
    assert found.path.read_bytes() == b"newest"


def test_a_provisional_entry_gives_way(machine: Machine, url: str) -> None:
    one = machine("one")
    assert put(one, content=b"at first", incomplete=True).incomplete
    two = machine("two")
    seen = two.get(KEY)
    assert seen.incomplete
    put(two, content=b"final")
    again = one.get(KEY)
    assert again is not None
    assert one.fetch(KEY).path.read_bytes() == b"at first"  # what it published itself
    for store in (two, machine("one"), machine("three")):
        found = store.get(KEY)
        assert found.path.read_bytes() == b"final"


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
    assert len(below(url)) == 2
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
    (file,) = (f"{root}/{path}" for path in below(url) if path.endswith("model.onnx"))
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
    (file,) = (f"{root}/{path}" for path in below(url) if path.endswith("model.onnx"))
    system.pipe_file(file, b"grapH")
    two = machine("two", tell=lambda text: None)
    monkeypatch.setattr(SharedStore, "delete", _refused)
    assert two.get(KEY) is None
    put(two)
    assert machine("three").get(KEY) is not None


def _refused(*arguments: object) -> None:
    raise StoreError("refused")


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


def test_an_entry_replaced_meanwhile_is_taken_as_it_is(
    machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(machine("one"))
    system, root = remote(url)
    old = [f"{root}/{path}" for path in below(url) if not path.endswith(MANIFEST)]
    bring = SharedStore._download

    def replaced_first(self: SharedStore, *arguments: Any) -> Any:
        if old:
            put(machine("three", reuse=False), content=b"newer")
            for path in old:
                system.rm_file(path)
            old.clear()
        return bring(self, *arguments)

    monkeypatch.setattr(SharedStore, "_download", replaced_first)
    found = machine("two", tell=pytest.fail).get(KEY)
    assert found.path.read_bytes() == b"newer"


def test_an_entry_of_a_digest_is_fetched_whoever_has_it(machine: Machine) -> None:
    ours = put(machine("one"), content=b"ours", incomplete=True)
    other = machine("two")
    theirs = put(other, content=b"theirs")
    one = machine("one", reuse=False)
    assert one.get(KEY) is None
    assert one.fetch(KEY) == ours
    assert one.fetch(KEY, theirs.sha256).path.read_bytes() == b"theirs"
    with pytest.raises(StoreError, match="of that content"):
        one.fetch(KEY, "0" * 64)
    with pytest.raises(StoreError, match="has no entry"):
        one.fetch(OTHER)


def test_without_reuse_nothing_of_others_is_found(machine: Machine, url: str) -> None:
    put(machine("one"))
    two = machine("two", reuse=False)
    assert two.get(KEY) is None
    assert next(two.dependencies("x").candidates(), None) is None
    put(two, content=b"own")
    assert two.get(KEY) is not None


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
    (file,) = (f"{root}/{path}" for path in below(url) if OTHER in path and path.endswith("model.onnx"))
    system.pipe_file(file, b"largeR")
    assert machine("two").verify() == [OTHER]
    assert [entry.key for entry in one.entries()] == [KEY]
    assert [entry.key for entry in one.prune(max_bytes=5)] == [KEY]
    assert one.entries() == []
    assert below(url) == []


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
    left = [path for path in below(url) if "/old/" in path or "/new/" in path]
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
    assert below(url, "reads") == []


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


@pytest.mark.parametrize(
    ("place", "kind", "words"),
    [
        ("nix://team/x", UsageError, "Protocol not known"),
        ("s4://team/x", UsageError, "did you mean s3://"),
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


def test_upkeep_makes_no_store(machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="there is no store"):
        Store(f"{url}/typo", make=False).entries()
    folder = Store(tmp_path / "folder", make=False)
    assert (folder.entries(), folder.verify(), folder.prune(max_bytes=0)) == ([], [], [])
    assert not any((tmp_path / name).exists() for name in ("cache", "folder"))
    put(machine("one"))
    assert Store(url, make=False).verify() == []


def test_of_two_nodes_that_made_one_entry_at_once_the_one_that_stands_is_taken(machine: Machine) -> None:
    made = put(machine("one"))
    other = made.model_copy(update={"sha256": "0" * 64, "history": (HISTORY[0], HISTORY[0])})
    here = SimpleNamespace(_store=machine("two"))
    taken = RayExecutor._fetch(here, other)  # type: ignore[arg-type]
    assert taken.sha256 == made.sha256
    assert len(taken.history) == 2


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


def test_what_lost_a_file_is_uploaded_again(machine: Machine, url: str) -> None:
    put(machine("one"))
    system, root = remote(url)
    (file,) = (f"{root}/{path}" for path in below(url) if path.endswith("model.onnx"))
    system.rm_file(file)
    put(machine("two"))
    assert machine("three", tell=pytest.fail).get(KEY) is not None


def test_many_writers_of_one_key_are_harmless(machine: Machine, url: str) -> None:
    stores = [machine(f"m{number}") for number in range(4)]
    found: list[bytes] = []

    def publish(store: Store, number: int) -> None:
        found.append(put(store, content=b"%d" % number).path.read_bytes())

    threads = [threading.Thread(target=publish, args=(store, number)) for number, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    last = machine("last").get(KEY)
    assert last is not None
    assert last.path.read_bytes() in found


def test_what_one_machine_measured_is_not_taken_by_another(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best options of a session are those of one kind of machine: a shared store has them for each."""
    task = Tune(engine=OnnxRuntime(), device=Device(), seconds=1.0)

    def cache(name: str) -> StepCache:
        monkeypatch.setattr(measure, "this_machine", lambda: {"machine": name})
        return StepCache(Step(StepRef("tune", "a"), task), {}, machine(name))

    def work(chosen: str) -> Callable[[Path, Path | None], Done]:
        def write(out: Path, _: Path | None) -> Done:
            (out / "tuning.json").write_text(chosen)
            return Done(effect=Effect(file="tuning.json", summary=chosen), seconds=1, host_peak_bytes=None)

        return write

    for name in ("two cores", "64 cores"):
        assert cache(name).lookup() is None
        cache(name).make(work(f"best on {name}"))
    for name in ("64 cores", "two cores"):
        found = cache(name).lookup()
        assert found is not None
        assert found.path.read_text() == f"best on {name}"


@pytest.mark.parametrize(("timed", "key"), [(True, {"machine": "here"}), (False, {})])
def test_a_search_that_speed_decides_holds_for_one_machine(
    timed: bool, key: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_precision, "this_machine", lambda: {"machine": "here"})
    assert mixed_precision.Search.model_construct(timed=timed).environment_key == key
