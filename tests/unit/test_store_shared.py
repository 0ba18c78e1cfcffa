"""A shared store, on two file systems: what one machine publishes another has, whole or not at all."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shared_stores
from enginesmith.pipeline.artifact import Effect, json_digest
from enginesmith.pipeline.engines import baseline, simulation
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.errors import StoreError
from enginesmith.pipeline.execution.executor import StepCache
from enginesmith.pipeline.execution.ray.executor import RayExecutor
from enginesmith.pipeline.planning.plan import Step, StepRef
from enginesmith.pipeline.store.inputs import MOST_CANDIDATES
from enginesmith.pipeline.store.manifest import MANIFEST, decode_checked, encode
from enginesmith.pipeline.store.remote import SharedStore
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks import measure, mixed_precision, quality
from enginesmith.pipeline.tasks.base import Done
from enginesmith.pipeline.tasks.prosecute import Prosecute
from enginesmith.pipeline.tasks.quality import Quality
from enginesmith.pipeline.tasks.tune import Tune
from enginesmith.pipeline.tasks.verify import Verify
from shared_stores import HISTORY, KEY, OTHER, Machine, list_files, put, remote

machine, url = shared_stores.machine, shared_stores.url  # fixtures


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
    for path in list_files(url, ""):
        content = system.cat_file(f"{root}/{path}").decode()
        assert str(tmp_path) not in content
        assert os.uname().nodename not in content
    found = decode_checked(system.cat_file(f"{root}/objects/ab/{KEY}/{MANIFEST}"))
    assert found.contents == {}
    assert {file.inode for file in found.files.values()} == {None}


def test_a_small_entry_is_its_manifest(machine: Machine, url: str) -> None:
    made = put(machine("one"), content=b"\xff\0")
    path = f"objects/ab/{KEY}/{MANIFEST}"
    assert list_files(url) == [path]
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
    assert list_files(url) == []


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
        found = store.dependencies("x").record(Effect(file="", summary="", reads=(folder / f"{name}.bin",)))
        with store.workspace() as work:
            (work / "a").write_text(name)
            key = json_digest(name)
            store.publish(key, work, kind="onnx", file="a", signature=None, history=HISTORY, read=found)
        return found.path

    names = [f"project{number}" for number in range(MOST_CANDIDATES + 2)]
    for name in names:
        read(name, "one")
    read(names[-2], "two")
    (path,) = list_files(url, "reads")
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
    before = list_files(url)
    two = machine("two")
    assert put(two, content=b"other").path.read_bytes() == b"graph"
    assert list_files(url) == before
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


def test_an_entry_replaced_meanwhile_is_taken_as_it_is(
    machine: Machine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(machine("one"))
    system, root = remote(url)
    old = [f"{root}/{path}" for path in list_files(url) if not path.endswith(MANIFEST)]
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


def test_of_two_nodes_that_made_one_entry_at_once_the_one_that_stands_is_taken(machine: Machine) -> None:
    made = put(machine("one"))
    other = made.model_copy(update={"sha256": "0" * 64, "history": (HISTORY[0], HISTORY[0])})
    here = SimpleNamespace(_store=machine("two"))
    taken = RayExecutor._fetch(here, other)  # type: ignore[arg-type]
    assert taken.sha256 == made.sha256
    assert len(taken.history) == 2


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


@pytest.mark.parametrize(
    ("engine", "elsewhere_too"),
    [
        *((baseline("torch"), True), (baseline("onnx"), True), (simulation(), True)),
        *((Eager(dtype="bfloat16"), False), (OnnxRuntime(), False)),
    ],
)
@pytest.mark.parametrize("kind", [Verify, Quality, Prosecute])
def test_what_an_engine_answered_is_not_taken_by_another_kind_of_processor(
    kind: type[quality.EngineCheck], engine: Engine, elsewhere_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = kind.model_construct(engine=engine, device=Device())
    keys = []
    for units in (("avx2",), ("avx2", "avx512_vnni"), ("avx2",)):
        monkeypatch.setattr(measure.cpu, "vector_units", lambda units=units: units)
        measure.this_hardware.cache_clear()
        keys.append(task.environment_key)
    measure.this_hardware.cache_clear()
    assert keys[0] == keys[2]
    assert (keys[0] == keys[1]) == elsewhere_too
    assert task.machine_specific != elsewhere_too


@pytest.mark.parametrize(("runs_here", "key"), [(True, {"machine": "here"}), (False, {})])
def test_a_search_that_the_engine_itself_decides_holds_for_one_machine(
    runs_here: bool, key: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_precision, "this_machine", lambda: {"machine": "here"})
    assert mixed_precision.Search.model_construct(runs_here=runs_here).environment_key == key
