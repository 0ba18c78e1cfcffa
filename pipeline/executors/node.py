"""What runs on a node of a Ray cluster: a step as on any machine, in the same isolated worker, fed from the store."""

import errno
import functools
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from enginesmith.pipeline import telling, workers
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import EnginesmithError, SourceError, StoreError
from enginesmith.pipeline.executors.agreement import NodeFingerprint, own_fingerprint
from enginesmith.pipeline.executors.base import StepCache, StepRequest
from enginesmith.pipeline.executors.cores import claimed
from enginesmith.pipeline.executors.gpus import Gpus, show_only
from enginesmith.pipeline.executors.local import LocalExecutor
from enginesmith.pipeline.executors.shipping import project_here
from enginesmith.pipeline.steps import Step
from enginesmith.pipeline.store import Store

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
    workers.also_preload(besides)
    workers.preload_only(instead)
    executor = _executor(request.store, request.reuse)
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="enginesmith-log-") as folder, telling.notifications_to(notes.append):
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
