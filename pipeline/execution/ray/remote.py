"""Run a step on a node of a Ray cluster, in the same isolated worker as anywhere, with inputs from the store.

The node compares itself with the request's requirement before it does anything; every answer brings its fingerprint.
"""

import contextlib
import errno
import fcntl
import functools
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import EnginesmithError, SourceError, StoreError
from enginesmith.pipeline.execution.executor import StepCache, StepRequest
from enginesmith.pipeline.execution.local import Gpus, LocalExecutor, show_only
from enginesmith.pipeline.execution.ray.connection import find_project, ray
from enginesmith.pipeline.execution.ray.placement import NodeFingerprint, NodeRequirement, own_fingerprint
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.store import retry
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import worker

_LOG_BYTES = 4 << 20
_CHANGED_BY_RAY = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")
"""Variables that Ray sets for each task; a step's process sees them as whoever started the node did."""
_FULL = ("no space left", os.strerror(errno.EDQUOT).lower())
"""Words in messages about the store when a disk is full."""


@contextlib.contextmanager
def claim_cores(count: int | None, folder: Path | None = None) -> Iterator[frozenset[int] | None]:
    """Claim cores of this machine, as thread pools that share cores would spin against each other.

    Claims are locks on files, one a core, so that processes which know nothing of each other keep apart; the kernel
    drops them with the process. Nobody waits for a core: if fewer are free, those are yielded; if none is, or all are
    wanted, None, which stands for all of them.
    """
    usable = sorted(os.sched_getaffinity(0))
    if count is None or count >= len(usable):
        yield None
        return
    folder = folder or Path(tempfile.gettempdir(), f"enginesmith-cores-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as locks:
        mine: set[int] = set()
        for core in usable:
            if len(mine) < count:
                lock = locks.enter_context((folder / str(core)).open("a"))
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    mine.add(core)
        yield frozenset(mine) or None


@dataclass(frozen=True)
class Request:
    """A step as it is sent to a node."""

    step: Step
    inputs: Mapping[str, Artifact]
    store: str
    reuse: bool
    token: str
    token_file: str
    """File in the store's folder that holds the token; empty if the store is no folder."""
    requirement: NodeRequirement
    project: str
    """The user's folder on the machine that runs the command."""
    files: tuple[str, ...]
    """Files that the step's task names: absolute, or relative to that folder."""
    log: str
    preloaded: tuple[tuple[str, ...], tuple[str, ...]]
    """Modules that fork servers import in addition, and instead of the usual ones."""
    cores: int | None = None
    timeout_seconds: float | None = None


@dataclass(frozen=True)
class Answer:
    """A node's reply to a request."""

    node: str
    node_id: str
    fingerprint: NodeFingerprint
    refusal: str = ""
    """Reason why the node cannot be used; empty if it can."""
    artifact: Artifact | None = None
    """Its files are taken from the store, by its key."""
    cached: bool = False
    error: EnginesmithError | None = None
    full: bool = False
    """True if the error is a disk of the node that has no space left."""
    notes: tuple[str, ...] = ()
    """Events on the node that people should know, such as a store that could not be reached."""
    log: bytes = b""
    """The end of what the step's process wrote."""


def lookup(request: Request) -> Answer:
    """Look up a step in the store with the key that it has on this node."""
    answer, fits = _introduce(request)
    if not fits:
        return answer
    store = _store(request.store, request.reuse)
    artifact = StepCache(_localize(request), request.inputs, store).lookup()
    return answer if artifact is None else replace(answer, artifact=store.share(artifact), cached=True)


def execute(request: Request) -> Answer:
    """Do a step, or take it from the store; errors are part of the answer."""
    answer, fits = _introduce(request)
    if not fits:
        return answer
    besides, instead = request.preloaded
    worker.also_preload(besides)
    worker.preload_only(instead)
    executor, store = _executor(request.store, request.reuse), _store(request.store, request.reuse)
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="enginesmith-log-") as folder, retry.notifications_to(notes.append):
        log = Path(folder, Path(request.log).name)
        try:
            step = _localize(request)
            inputs = {
                role: store.fetch(artifact.key, artifact.sha256).model_copy(update={"history": artifact.history})
                for role, artifact in request.inputs.items()
            }
            # progress is dropped: the log and the notes come back with the result
            here = StepRequest(
                step, inputs, log, lambda: None, lambda text: None, request.timeout_seconds, notes.append
            )
            executor.cores = request.cores
            executor.gpus = tuple(map(str, ray().get_runtime_context().get_accelerator_ids().get("GPU", ())))
            result = executor.run(here)
            artifact = store.share(result.artifact) if result.cached else result.artifact
            answer = replace(answer, artifact=artifact, cached=result.cached)
        except EnginesmithError as error:
            error.remedy = error.remedy.replace(str(log), request.log)
            full = isinstance(error, StoreError) and any(words in error.message for words in _FULL)
            answer = replace(answer, error=error, full=full)
        end = log.read_bytes()[-_LOG_BYTES:] if log.is_file() else b""
        return replace(answer, notes=tuple(notes), log=end)


def _introduce(request: Request) -> tuple[Answer, bool]:
    """Compare this node with a request; returns an answer that identifies it, and whether it may do the step."""
    _restore_environment()
    fingerprint = _fingerprint()
    refusal = "; ".join(request.requirement.mismatches(fingerprint)) or _check_store_folder(request)
    answer = Answer(platform.node(), ray().get_runtime_context().get_node_id(), fingerprint, refusal)
    return answer, not refusal and request.requirement.kind in ("", fingerprint.kind)


_fingerprint = functools.cache(own_fingerprint)


def _check_store_folder(request: Request) -> str:
    """Explain why the folder of the store is not the driver's; empty if it is, or if the store is no folder."""
    try:
        if not request.token_file or Path(request.token_file).read_text(encoding="utf-8") == request.token:
            return ""
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        return f"the folder of the store {request.store} is not there, or not the same one ({reason})"
    return f"the folder of the store {request.store} is another one there"


class _NodeExecutor(LocalExecutor):
    """Runs one step at a time, on cores and GPUs that Ray gave it."""

    cores: int | None = None
    gpus: tuple[str, ...] = ()

    @contextlib.contextmanager
    def _reserve_cores(self, step: Step) -> Iterator[frozenset[int] | None]:
        with claim_cores(self.cores) as cores:
            yield cores

    @contextlib.contextmanager
    def _reserve_gpu(self, step: Step) -> Iterator[tuple[int, Callable[[], None] | None]]:
        index = int(self.gpus[0]) if self.gpus and self.gpus[0].isdecimal() else step.task.runs_on.index
        shown = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        yield index, functools.partial(show_only, shown) if self.gpus else None


@functools.cache
def _store(address: str, reuse: bool) -> Store:
    return Store(address, reuse=reuse)


@functools.cache
def _executor(address: str, reuse: bool) -> _NodeExecutor:
    return _NodeExecutor(_store(address, reuse), jobs=1, gpus=Gpus(0))


def _restore_environment() -> None:
    """Enter the user's folder, and undo Ray's changes to the environment that the node was started with."""
    project = find_project()
    if project is not None:
        os.chdir(project)
    raylet = os.environ.get("RAY_RAYLET_PID", str(os.getppid()))
    given = dict(
        line.partition("=")[::2] for line in Path("/proc", raylet, "environ").read_text(encoding="utf-8").split("\0")
    )
    for name in _CHANGED_BY_RAY:
        os.environ.pop(name, None)
        os.environ.update({name: given[name]} if name in given else {})


def _localize(request: Request) -> Step:
    """Rewrite the path of the user's model in a step to the one on this node.

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
