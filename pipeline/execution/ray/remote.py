"""What runs on a node of a Ray cluster: a step as on any machine, in the same isolated worker, fed from the store."""

import contextlib
import errno
import fcntl
import functools
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import EnginesmithError, SourceError, StepCrashed, StoreError
from enginesmith.pipeline.execution.executor import StepCache, StepRequest
from enginesmith.pipeline.execution.local import Gpus, LocalExecutor, show_only
from enginesmith.pipeline.execution.ray.connection import ray
from enginesmith.pipeline.execution.ray.fingerprint import NodeFingerprint, own_fingerprint
from enginesmith.pipeline.execution.ray.placement import Node, Reservation
from enginesmith.pipeline.execution.ray.runtime_env import project_here
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.store import retry
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import worker

# Cores of this machine, claimed by one process at a time: thread pools that share cores would spin against each other.
#
# Claims are locks on files, one a core, so that processes which know nothing of each other keep apart; the
# kernel drops
# them with the process.


@contextlib.contextmanager
def claimed(count: int | None, folder: Path | None = None) -> Iterator[frozenset[int] | None]:
    """So many cores of those that this process may use; None, which is all of them, where there are not more.

    Where fewer are free than wanted, those; where none is, all: nobody waits for a core.
    """
    usable = sorted(os.sched_getaffinity(0))
    if count is None or count >= len(usable):
        yield None
        return
    place = folder or Path(tempfile.gettempdir(), f"enginesmith-cores-{os.getuid()}")
    place.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as locks:
        mine: set[int] = set()
        for core in usable:
            if len(mine) < count and _locked(place / str(core), locks):
                mine.add(core)
        yield frozenset(mine) or None


def _locked(path: Path, locks: contextlib.ExitStack) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    locks.callback(os.close, descriptor)
    return True


_LOG_BYTES = 4 << 20
_CHANGED_BY_RAY = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that Ray sets for each task; a step's process sees them as whoever started the node did."""


_FULL = ("no space left", os.strerror(errno.EDQUOT).lower())
"""In messages about the store, where a disk is full."""


@dataclass(frozen=True)
class Request:
    """A step, as it is sent to a node."""

    step: Step
    inputs: Mapping[str, Artifact]
    store: str
    reuse: bool
    project: str
    """The user's folder on the machine that asks."""
    files: tuple[str, ...]
    """Files that the step's task names: absolute, or from that folder."""
    log: str
    """Name of the log file."""
    preloaded: tuple[tuple[str, ...], tuple[str, ...]]
    """What fork servers import besides, and instead of what they usually do."""
    cores: int | None = None
    timeout_seconds: float | None = None


@dataclass(frozen=True)
class Answer:
    """What came of a request."""

    node: str
    artifact: Artifact | None = None
    """Its files are taken from the store, by its key."""
    cached: bool = False
    error: EnginesmithError | None = None
    full: bool = False
    """Whether the error is a disk of the node that has no space left."""
    notes: tuple[str, ...] = ()
    """Events on the node that people should know, such as a store that was away."""
    log: bytes = b""
    """The end of what the step's process wrote."""


@dataclass(frozen=True)
class Visit:
    """What a node has to show before it is given steps."""

    store: str
    token: str
    token_file: str
    """A file in the folder of the store that holds the token; empty where the store is no folder."""


def visit(what: Visit) -> tuple[NodeFingerprint, str]:
    """The facts of this node, and why it cannot use the store; empty where it can."""
    _as_started()
    return own_fingerprint(), _trouble_with_store(what)


def look_up(request: Request) -> Answer | None:
    """What the store has of a step, as this machine would make it."""
    _as_started()
    store = _store(request.store, request.reuse)
    found = StepCache(_at_home(request), request.inputs, store).lookup()
    return None if found is None else Answer(platform.node(), store.share(found), cached=True)


def carry_out(request: Request, gpus: tuple[str, ...]) -> Answer:
    """Do a step, or take it from the store; errors are part of the answer."""
    _as_started()
    besides, instead = request.preloaded
    worker.also_preload(besides)
    worker.preload_only(instead)
    executor = _executor(request.store, request.reuse)
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="enginesmith-log-") as folder, retry.notifications_to(notes.append):
        log = Path(folder, Path(request.log).name)
        try:
            step = _at_home(request)
            inputs = {role: _fetched(executor.store, one) for role, one in request.inputs.items()}
            here = StepRequest(step, inputs, log, _ignore, _ignore, request.timeout_seconds, notes.append)
            executor.cores, executor.gpus = request.cores, gpus
            result = executor.run(here)
            artifact = executor.store.share(result.artifact) if result.cached else result.artifact
        except EnginesmithError as error:
            error.remedy = error.remedy.replace(str(log), request.log)
            full = isinstance(error, StoreError) and any(words in error.message for words in _FULL)
            return Answer(platform.node(), error=error, full=full, notes=tuple(notes), log=_end_of(log))
        return Answer(platform.node(), artifact, result.cached, notes=tuple(notes), log=_end_of(log))


class _NodeExecutor(LocalExecutor):
    """One step at a time, on cores and GPUs that Ray gave it."""

    cores: int | None = None
    gpus: tuple[str, ...] = ()

    def __init__(self, store: Store) -> None:
        super().__init__(store, jobs=1, gpus=Gpus(0))
        self.store = store

    @contextmanager
    def _cores(self) -> Iterator[frozenset[int] | None]:
        with claimed(self.cores) as cores:
            yield cores

    @contextmanager
    def _gpu(self, step: Step) -> Iterator[Callable[[], None] | None]:
        yield functools.partial(show_only, {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}) if self.gpus else None


@functools.cache
def _store(address: str, reuse: bool) -> Store:
    return Store(address, reuse=reuse)


def _fetched(store: Store, artifact: Artifact) -> Artifact:
    """An input as it lies in this node's store, with the history that it has for the one who asked."""
    return store.fetch(artifact.key, artifact.sha256).model_copy(update={"history": artifact.history})


@functools.cache
def _executor(address: str, reuse: bool) -> _NodeExecutor:
    return _NodeExecutor(_store(address, reuse))


def _as_started() -> None:
    """Work in the user's folder, with the environment that the node was started with."""
    project = project_here()
    if project is not None:
        os.chdir(project)
    raylet = os.environ.get("RAY_RAYLET_PID", str(os.getppid()))
    given = dict(line.partition("=")[::2] for line in Path("/proc", raylet, "environ").read_text().split("\0"))
    for name in _CHANGED_BY_RAY:
        if name in given:
            os.environ[name] = given[name]
        else:
            os.environ.pop(name, None)


def _at_home(request: Request) -> Step:
    """The step with the path of the user's model as it is here.

    Raises:
        SourceError: a file that the step reads is not on this node.
    """
    for file in request.files:
        if not Path(file).exists():
            raise SourceError(
                f"{file} is not on the node {platform.node()}",
                "name it from the current folder, which travels to the nodes without hidden files and earlier runs; "
                "or put it where all nodes find it under this path",
            )
    step, source = request.step, getattr(request.step.task, "source", None)
    if source is None or not Path(source.target).is_relative_to(request.project):
        return step
    target = Path.cwd() / Path(source.target).relative_to(request.project)
    source = source.model_copy(update={"target": str(target)})
    return replace(step, task=step.task.model_copy(update={"source": source}))


def _trouble_with_store(what: Visit) -> str:
    if what.token_file:
        try:
            if Path(what.token_file).read_text() != what.token:
                return f"{what.token_file} is another file there"
        except OSError as error:
            return f"its folder is not there, or not the same one ({os.strerror(error.errno or 0).lower()})"
    try:
        _store(what.store, True).get("0" * 64)
    except EnginesmithError as error:
        return error.message
    return ""


def _ignore(*_: object) -> None:
    """Drop progress: the log and the notes come back with the result."""


def _end_of(log: Path) -> bytes:
    if not log.is_file():
        return b""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return stream.read()


# Steps as Ray tasks, and what an error of Ray's means for a step.

_NODE_ID = re.compile(r"node ID: ([0-9a-f]{40,})")


class NodeLost(Exception):
    """Every node that a step was reserved on is gone, and nobody's step is to blame; says what was lost."""

    def __init__(self, what: str, node_id: str = "") -> None:
        super().__init__(what)
        self.node_id = node_id
        """Of the node that is gone; empty where the pool knows it already."""


@dataclass(frozen=True)
class RemoteStep:
    """A step that was sent to a node, or waits for one."""

    reservation: Reservation
    reference: Any
    """Ray's, to the answer."""


def explain_loss(error: Exception, step: RemoteStep, nodes: Mapping[str, Node]) -> NodeLost | StepCrashed:
    """Say what an error means that is left when Ray has retried: a node that is gone, or a step that cannot be done."""
    kinds = ray().exceptions
    gone = (kinds.NodeDiedError, kinds.ObjectLostError, kinds.LocalRayletDiedError, kinds.TaskUnschedulableError)
    if isinstance(error, gone):
        match, reserved = _NODE_ID.search(str(error)), step.reservation.nodes
        node_id = match[1] if match else next(iter(reserved)) if len(reserved) == 1 else ""
        return NodeLost(f"{nodes[node_id].name if node_id in nodes else 'its node'} was lost", node_id)
    words = " ".join(str(error).split())
    return StepCrashed(
        f"Ray could not do it ({type(error).__name__}: {words[:200]})",
        "see `ray status`, Ray's logs, and whether the nodes have the memory for it",
    )


def do(request: Request) -> tuple[str, Answer]:
    """On a node: do a step; gives back the node's id, too."""
    context = ray().get_runtime_context()
    return context.get_node_id(), carry_out(request, tuple(map(str, context.get_accelerator_ids().get("GPU", ()))))


def errands_look_up(request: Request) -> Answer | None:
    """On a node: look up what the store has of a step that depends on the machine."""
    return look_up(request)


def errands_visit(what: Visit) -> tuple[NodeFingerprint, str]:
    """On a node: tell what it is."""
    return visit(what)
