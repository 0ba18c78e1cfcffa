"""Random histories of a store with faults: no lost artifact, no wrong reuse, nothing damaged that is returned.

The real store runs on real folders. Behind them is an object store that shows writes late, loses connections, and keeps
what it said it refused. A fault comes at a file-system call, wherever that is: the machine is killed (nothing cleans up
behind it), the disk is full, another process does something else meanwhile.
"""

import contextlib
import errno
import itertools
import os
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from enginesmith.pipeline.artifact import HistoryEntry, json_digest
from enginesmith.pipeline.errors import EnginesmithError, storage_errors
from enginesmith.pipeline.store import inputs, remote
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import software

DAY = 86400.0
HISTORY = (HistoryEntry(step="export", parameters={}, tools={}, seconds=1.0, host_peak_bytes=None, effect="made"),)
STEPS = ("load", "export", "build")
MACHINES = ("one", "two")
_NOBODY = 1 << 30
"""No process has this number."""


class Killed(BaseException):
    """The machine is killed: what is on the disks stays, and nothing else is done."""


@dataclass
class Trouble:
    """A fault at a file-system or network call, by its number; the calls of a killed machine all fail."""

    kind: str = ""
    at: int = -1
    root: str = "/nowhere"
    meanwhile: Callable[[], None] = lambda: None
    calls: int = 0
    dead: bool = False
    met: bool = False

    def is_due(self, *kinds: str) -> bool:
        """Return whether the fault comes now, or a disk that is full stays full."""
        due = self.kind in kinds and (self.calls == self.at or (self.kind == "full" and self.calls > self.at))
        self.met |= due
        return due

    def call(self) -> None:
        """Count a call that changes something, and meet the fault there."""
        if self.dead:
            raise Killed
        self.calls += 1
        if self.is_due("kill", "power"):
            self.dead = True
            raise Killed
        if self.is_due("meanwhile"):
            self.kind = "done"
            self.meanwhile()


_trouble = Trouble()
_CHANGES = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.utime": 1, "os.truncate": 1}


def _observe(event: str, arguments: tuple[Any, ...]) -> None:
    trouble = _trouble
    if trouble.at < 0 or not (event in _CHANGES or (event == "open" and _writes(arguments))):
        return
    # removal of a tree names files relative to a descriptor
    path = arguments[0] if isinstance(arguments[0], (str, os.PathLike)) else ""
    if os.fspath(path).startswith("/") and not os.fspath(path).startswith(trouble.root):
        return
    trouble.call()
    if event in ("open", "os.mkdir", "os.rename") and trouble.is_due("full"):
        raise OSError(errno.ENOSPC, "No space left on device")


def _writes(arguments: tuple[Any, ...]) -> bool:
    return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))


_observed: list[bool] = []


def observe_files() -> None:
    """Have each change of a file seen, once for the process; without a fault that costs next to nothing."""
    if not _observed:
        sys.addaudithook(_observe)
        _observed.append(True)


class LyingFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Objects in memory; what was written is seen later, and listed later than that."""

    protocol = "lying"
    objects: ClassVar[dict[str, list[tuple[int, float, bytes | None]]]] = {}
    """By path, the versions: the operation that wrote it, the time, and the bytes, or None for a deletion."""
    now, lag = 0, 0

    def _see(self, path: str, lag: int) -> tuple[float, bytes] | None:
        late = zlib.crc32(path.encode()) % (lag + 1)  # a manifest may be seen before its files
        seen = [one for one in self.objects.get(path, []) if one[0] + late <= type(self).now]
        return (seen[-1][1], seen[-1][2]) if seen and seen[-1][2] is not None else None

    def _meet(self) -> None:
        _trouble.call()
        if _trouble.is_due("lost"):
            raise ConnectionResetError(errno.ECONNRESET, "connection lost")
        if _trouble.is_due("refused"):
            raise PermissionError(errno.EACCES, "refused")

    def _put(self, path: str, content: bytes | None) -> None:
        self._meet()
        half = _trouble.is_due("half", "half-kill")
        whole = content if content is None or not half else content[: len(content) // 2]
        self.objects.setdefault(path, []).append((type(self).now, time.time(), whole))
        if half and _trouble.kind == "half-kill":
            _trouble.dead = True
            raise Killed
        if half or _trouble.is_due("stored"):
            raise ConnectionResetError(errno.ECONNRESET, "connection lost")

    def cat_file(self, path: str, **rest: Any) -> bytes:
        self._meet()
        if (seen := self._see(path, self.lag)) is None:
            raise FileNotFoundError(path)
        return seen[1]

    def get_file(self, path: str, target: str, **rest: Any) -> None:
        Path(target).write_bytes(self.cat_file(path))

    def pipe_file(self, path: str, value: bytes, **rest: Any) -> None:
        self._put(path, value)

    def put_file(self, source: str, path: str, **rest: Any) -> None:
        self._put(path, Path(source).read_bytes())

    def rm_file(self, path: str) -> None:
        self._put(path, None)

    def find(self, place: str, **rest: Any) -> dict[str, Any]:
        self._meet()
        seen = {path: self._see(path, 2 * self.lag) for path in self.objects if path.startswith(f"{place}/")}
        return {path: {"size": len(one[1]), "mtime": one[0]} for path, one in seen.items() if one}


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
    """What one process does, and the fault that it meets."""

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
    read = store.dependencies(step).record([world.project(machine) / f"{step}.bin"], {"tool": world.versions[machine]})
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
    global _trouble
    _trouble = Trouble()
    known, began = list_files(world, operation.machine), time.time_ns() - int(world.offset * 1e9)
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

        _trouble = Trouble(operation.fault, operation.at, str(world.folder), meanwhile)
        try:
            perform(world, store, operation)
        except Killed:
            _trouble = Trouble(operation.fault, met=True)
            tidy_after_kill(world, operation, known)
        finally:
            world.counts[f"fault {operation.fault}"] += bool(_trouble.met and operation.fault)
            _trouble = Trouble()
    if operation.fault == "power" and operation.name.startswith(("publish", "anew", "look")):
        world.expected[operation.machine] &= before[operation.machine]
    for machine in MACHINES:
        shift_times(world, machine, began)


def list_files(world: World, machine: str) -> set[int]:
    return {path.stat().st_ino for path in world.cache(machine).rglob("*") if path.is_file()}


def tidy_after_kill(world: World, operation: Operation, known: set[int]) -> None:
    """Make what a killed process left that of no process; without power, tear the files that are new."""
    for root in world.roots(operation.machine):
        for folder in (root / "tmp").glob(f"*{os.getpid()}@*"):
            folder.rename(folder.with_name(folder.name.replace(f"{os.getpid()}@", f"{_NOBODY}@")))
    if operation.fault == "power":
        for path in world.cache(operation.machine).rglob("*"):
            if path.is_file() and path.stat().st_ino not in known | world.synced:
                os.truncate(path, path.stat().st_size * (operation.at % 3) // 3)


def shift_times(world: World, machine: str, began: int) -> None:
    """Give what an operation wrote the times of that machine's clock."""
    for path in world.cache(machine).rglob("*"):
        status = path.stat()
        if world.offset and began <= status.st_mtime_ns <= began + int(3600e9):
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + int(world.offset * 1e9)))


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
        left = [str(path) for path in store.root.rglob("*") if path.is_file()]
        assert not left, f"leftovers: {left}"
    LyingFileSystem.now += 100
    seen = LyingFileSystem(skip_instance_cache=True).find("team/store/objects")
    assert not seen or not world.shared, f"leftovers: {list(seen)}"


def live_through(history: list[Operation], shared: bool, counts: Counter[str] | None = None) -> None:
    """Live through a history from an empty store."""
    observe_files()
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
        patch.setattr(software, "versions", lambda names: {"tool": world.versions[Path.cwd().name[8:]]})
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
