"""Random histories of a store with faults: no lost artifact, no wrong reuse, nothing damaged that is returned.

The real store runs on real folders. Behind them is an object store that shows writes late, loses connections, and keeps
what it said it refused. A fault comes at a file-system call, wherever that is: the machine is killed (nothing cleans up
behind it), the disk is full, another process does something else meanwhile.
"""

import contextlib
import itertools
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import faults
from enginesmith.pipeline.artifact import Effect, HistoryEntry, json_digest
from enginesmith.pipeline.errors import EnginesmithError, storage_errors
from enginesmith.pipeline.store import inputs, remote
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import software
from lying_storage import LyingFileSystem

DAY = 86400.0
HISTORY = (HistoryEntry(step="export", parameters={}, tools={}, seconds=1.0, host_peak_bytes=None, effect="made"),)
STEPS = ("load", "export", "build")
MACHINES = ("one", "two")


@dataclass
class World:
    """Machines with their folders and projects, the store behind them, and what has to be found."""

    folder: Path
    shared: bool
    offset: float = 0.0
    versions: dict[str, str] = field(default_factory=lambda: dict.fromkeys(MACHINES, "1"))
    published: dict[str, set[bytes]] = field(default_factory=dict)
    """By key, contents that it was published with, or may have been as its machine was killed."""
    expected: dict[str, set[str]] = field(default_factory=lambda: {name: set() for name in (*MACHINES, "remote")})
    """By place, the keys that have to be found."""
    synced: set[int] = field(default_factory=set)
    """Files that are on the disk."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    counts: Counter[str] = field(default_factory=Counter)

    def cache(self, machine: str) -> Path:
        return self.folder / machine

    def project(self, machine: str) -> Path:
        return self.folder / f"project-{machine}"

    def open(self, machine: str, *, reuse: bool = True) -> Store:
        """Open the store as a new process of that machine."""
        os.environ["ENGINESMITH_CACHE"] = str(self.cache(machine))
        place = "lying://team/store" if self.shared else self.cache(machine) / "store"
        store = Store(place, reuse=reuse, tell=lambda text: None)
        if store._shared is not None:
            store._shared.retries.first_seconds = 0.0
        return store

    def roots(self, machine: str) -> list[Path]:
        return [path.parent for path in self.cache(machine).glob("*/objects")]

    def content(self, machine: str, step: str) -> bytes:
        """Begin of what a step makes: all that it depends on."""
        text = (self.project(machine) / f"{step}.bin").read_text()
        return f"{step} of {text} with {self.versions[machine]};".encode()


@dataclass(frozen=True)
class Operation:
    """Name what one process does, and the fault that it meets."""

    name: str
    machine: str = "one"
    step: str = "load"
    amount: int = 1
    fault: str = ""
    at: int = 0


def key_of(step: str, read: inputs.ReadRecord) -> str:
    return json_digest([step, read.identity])


def publish(world: World, store: Store, machine: str, step: str, size: int) -> None:
    """Do a step and publish it; no two results are equal, and the first one stays."""
    content = world.content(machine, step) + b"%d;" % next(world.numbers) + b"x" * (400 * size)
    reads, packages = (world.project(machine) / f"{step}.bin",), {"tool": world.versions[machine]}
    read = store.dependencies(step).record(Effect(file="", summary="", reads=reads, packages=packages))
    key = key_of(step, read)
    world.published.setdefault(key, set()).add(content)
    with store.workspace() as folder:
        with storage_errors("what the step makes"):
            (folder / "made").write_bytes(content)
            (folder / "sub").mkdir()
            (folder / "sub" / "more").write_bytes(content[::-1])
        made = store.publish(key, folder, kind="onnx", file="made", signature=None, history=HISTORY, read=read)
    check_content(world, key, made)
    world.expected[machine].add(key)
    if world.shared:
        world.expected["remote"].add(key)


def check_content(world: World, key: str, found: Any) -> None:
    """Check that both files are those of one publication of this key."""
    content = found.path.read_bytes()
    assert content in world.published[key], "bytes that nobody published under this key"
    assert (found.folder / "sub" / "more").read_bytes() == content[::-1]


def look_up(world: World, store: Store, machine: str, step: str) -> bool:
    """Look a step up as the executor does; what is found was made of what is there now."""
    for read in store.dependencies(step).candidates():
        if found := store.get(key_of(step, read)):
            check_content(world, key_of(step, read), found)
            assert found.path.read_bytes().startswith(world.content(machine, step)), "made of other inputs"
            return True
    return False


def prune(world: World, store: Store, machine: str, size: int | None, age: float | None) -> None:
    before = {entry.key: entry.used for entry in store.entries()}
    place = "remote" if world.shared else machine
    candidates = set(world.expected[place])
    world.expected[place] = set()  # whatever a fault leaves
    removed = {entry.key for entry in store.prune(max_bytes=size, max_age_seconds=age)}
    if size is None and age is not None:
        assert all(before[key] < time.time() - age + 60 for key in removed if key in before), "too young to go"
    world.expected[place] = candidates - removed


def damage(world: World, machine: str, number: int) -> None:
    """Truncate or delete one file of an entry by hand."""
    files = [path for root in world.roots(machine) for path in sorted((root / "objects").rglob("*")) if path.is_file()]
    if files:
        path = files[number % len(files)]
        key = next(part for part in path.parts if len(part) == 64)
        path.unlink() if number % 2 else os.truncate(path, path.stat().st_size // 2)
        world.expected[machine].discard(key)


def perform(world: World, store: Store, operation: Operation) -> None:
    """Do an operation in a process that has opened the store."""
    machine, step, amount = operation.machine, operation.step, operation.amount
    if operation.name in ("publish", "anew"):
        publish(world, store, machine, step, amount)
    elif operation.name == "look up":
        look_up(world, store, machine, step)
    elif operation.name == "verify":
        damaged = set(store.verify())
        assert not damaged & world.expected["remote" if world.shared else machine], "whole entries are removed"
    elif operation.name == "prune size":
        prune(world, store, machine, 600 * amount, None)
    elif operation.name == "prune age":
        prune(world, store, machine, None, amount * DAY)


def carry_out(world: World, operation: Operation) -> None:
    """Carry out an operation with its fault; a new process of that machine does it."""
    LyingFileSystem.now += 1
    world.counts[operation.name] += 1
    project = world.project(operation.machine)
    if operation.name == "change":
        (project / f"{operation.step}.bin").write_text(f"content {operation.amount}")
    elif operation.name == "upgrade":
        world.versions[operation.machine] = str(operation.amount)
    elif operation.name == "clock":
        world.offset += (operation.amount - 2) * DAY
    elif operation.name == "damage":
        damage(world, operation.machine, operation.at + operation.amount)
    elif operation.name == "lag":
        LyingFileSystem.lag = operation.amount - 1
    else:
        with contextlib.chdir(project):
            meet_fault(world, operation)


def meet_fault(world: World, operation: Operation) -> None:
    faults.current = faults.Trouble()
    known, began = faults.list_files(world.cache(operation.machine)), time.time_ns() - int(world.offset * 1e9)
    other = MACHINES[operation.machine == "one" and world.shared]
    others = ("publish", "look up", "verify", "prune age")[: 3 + (not world.offset)]
    beside = Operation(others[operation.at % len(others)], other, operation.step)
    before = {place: set(keys) for place, keys in world.expected.items()}
    with contextlib.suppress(EnginesmithError):
        store = world.open(operation.machine, reuse=operation.name != "anew")
        neighbor = world.open(other)

        def meanwhile() -> None:
            with contextlib.chdir(world.project(other)), contextlib.suppress(EnginesmithError):
                perform(world, neighbor, beside)

        faults.current = faults.Trouble(operation.fault, operation.at, str(world.folder), meanwhile)
        try:
            perform(world, store, operation)
        except faults.Killed:
            faults.current = faults.Trouble(operation.fault, met=True)
            tidy_after_kill(world, operation, known)
        finally:
            world.counts[f"fault {operation.fault}"] += bool(faults.current.met and operation.fault)
            faults.current = faults.Trouble()
    if operation.fault == "power" and operation.name.startswith(("publish", "anew", "look")):
        world.expected[operation.machine] &= before[operation.machine]
    for machine in MACHINES:
        faults.shift_times(world.cache(machine), began, world.offset)


def tidy_after_kill(world: World, operation: Operation, known: set[int]) -> None:
    """Make what a killed process left that of no process; without power, tear the files that are new."""
    faults.end_process(world.roots(operation.machine))
    if operation.fault == "power":
        faults.tear(world.cache(operation.machine), known | world.synced, operation.at % 3)


def check_end(world: World) -> None:
    """Check that all is found that has to be, that the store works, and that nothing stays but what is known."""
    for machine in MACHINES:
        LyingFileSystem.now += 100
        with contextlib.chdir(world.project(machine)):
            wanted = world.expected[machine] | world.expected["remote"]
            for key in wanted:
                found = world.open(machine).get(key)
                assert found is not None, f"an entry is lost on {machine}"
                check_content(world, key, found)
            for step in STEPS:
                publish(world, world.open(machine), machine, step, 1)
                assert look_up(world, world.open(machine), machine, step), "what was made is not found"
    LyingFileSystem.now += 100
    world.offset += 100 * DAY
    for machine in MACHINES:
        store = world.open(machine)
        store.prune(max_age_seconds=DAY)
        LyingFileSystem.now += 100
        Store(store.root, tell=lambda text: None).prune(max_age_seconds=DAY)
        Store(store.root, tell=lambda text: None).prune(max_age_seconds=DAY)
        left = [str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file()]
        assert not left, f"leftovers: {left}"
    LyingFileSystem.now += 100
    seen = LyingFileSystem(skip_instance_cache=True).find("team/store/objects")
    assert not seen or not world.shared, f"leftovers: {list(seen)}"


def live_through(history: list[Operation], shared: bool, counts: Counter[str] | None = None) -> None:
    """Live through a history from an empty store."""
    faults.observe_files()
    fsspec.register_implementation("lying", LyingFileSystem, clobber=True)
    LyingFileSystem.objects.clear()
    LyingFileSystem.now = LyingFileSystem.lag = 0
    clock = time.time
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        world = World(Path(place), shared, counts=Counter() if counts is None else counts)
        patch.setenv("ENGINESMITH_CACHE", place)
        patch.setattr(remote, "_SMALL_BYTES", 1200)
        patch.setattr(remote, "_WITHOUT_FOLDERS", {*remote._WITHOUT_FOLDERS, "lying"})
        patch.setattr(os, "fsync", lambda number: world.synced.add(os.fstat(number).st_ino))
        patch.setattr(time, "time", lambda: clock() + world.offset)
        patch.setattr(software, "identities", lambda names: {"tool": world.versions[Path.cwd().name[8:]]})
        for machine in MACHINES:
            world.project(machine).mkdir()
            for step in STEPS:
                (world.project(machine) / f"{step}.bin").write_text("content 1")
        for operation in history:
            carry_out(world, operation)
        check_end(world)


_LOCAL = ("", "", "kill", "power", "full", "meanwhile")
_REMOTE = (*_LOCAL, "lost", "refused", "half", "half-kill", "stored")
_NAMES = ("publish", "publish", "anew", "look up", "look up", "verify", "prune size", "prune age")
OPERATIONS = st.one_of(
    st.builds(
        Operation,
        st.sampled_from(_NAMES),
        st.sampled_from(MACHINES),
        st.sampled_from(STEPS),
        st.integers(1, 3),
        st.sampled_from(_REMOTE),
        st.integers(0, 30),
    ),
    st.builds(
        Operation,
        st.sampled_from(("change", "upgrade", "clock", "damage", "lag")),
        st.sampled_from(MACHINES),
        st.sampled_from(STEPS),
        st.integers(1, 4),
        st.just(""),
        st.integers(0, 30),
    ),
)
HISTORIES = st.lists(OPERATIONS, min_size=2, max_size=12)


@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(HISTORIES, st.booleans())
@example([Operation("publish"), Operation("anew", fault="kill", at=14)], False)
@example([Operation("publish"), Operation("anew", fault="power", at=15)], False)
@example([Operation("publish"), Operation("prune size", fault="kill", at=2)], False)
@example([Operation("publish", fault="kill", at=3), Operation("look up")], True)
def test_no_history_loses_an_artifact_or_returns_another_one(history: list[Operation], shared: bool) -> None:
    live_through(history, shared)
