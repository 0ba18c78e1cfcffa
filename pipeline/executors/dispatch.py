"""Steps on their way: sent to where Ray finds room, listened to while they run, and taken back."""

import contextlib
import itertools
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from enginesmith.pipeline import workers
from enginesmith.pipeline.errors import StepCrashed, StepError, StepTimeout
from enginesmith.pipeline.executors import errands, node
from enginesmith.pipeline.executors.base import StepRequest
from enginesmith.pipeline.executors.connection import ray
from enginesmith.pipeline.executors.errands import NodeLost, RemoteStep
from enginesmith.pipeline.executors.seats import NodePool, Reservation
from enginesmith.pipeline.executors.shipping import files_named
from enginesmith.pipeline.executors.visits import NodeRegistry
from enginesmith.pipeline.store import Store

LOOK_SECONDS = 1.0
"""How often what waits looks whether it still has something to wait for."""
_NEWS_SECONDS = 0.3


class Dispatch:
    """What is asked of nodes; a context, in which their news are passed on."""

    def __init__(self, store: Store, project: Path, pool: NodePool, registry: NodeRegistry) -> None:
        self._store, self._project, self._pool, self._registry = store, project, pool, registry
        self._ray = ray()
        self._do = self._ray.remote(max_retries=0, max_calls=0)(errands.do)
        self._look_up = self._ray.remote(max_retries=0, num_cpus=0)(errands.look_up)
        self._news = self._ray.remote(num_cpus=0, max_restarts=-1)(node.News).remote()
        self._numbers = itertools.count()
        self._active: dict[int, RemoteStep] = {}
        self._orders: dict[int, StepRequest] = {}
        """By number, those that are under way: on a node, or waiting for one."""
        self._lock = threading.Lock()
        self.stopped = threading.Event()
        """Set when nobody waits any more."""
        self._watcher = threading.Thread(target=self._watch, name="ray-news", daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopped.set()
        self._watcher.join()

    def stop(self) -> None:
        """Have those who wait in :meth:`ask` take back what they sent."""
        self.stopped.set()

    @contextlib.contextmanager
    def under_way(self, request: StepRequest) -> Iterator[None]:
        """Have an order told what happens to the cluster."""
        number = next(self._numbers)
        with self._lock:
            self._orders[number] = request
        try:
            yield
        finally:
            with self._lock:
                del self._orders[number]

    def known(self, request: StepRequest, nodes: Collection[str]) -> node.Answer | None:
        """What the first of these nodes has to say that finds the step in the store, as each would have made it."""
        remote = self._request(request, None)
        options = [Reservation(frozenset([one]), {"CPU": 0}).options for one in nodes]
        asked = [self._look_up.options(**one).remote(remote) for one in options]
        while asked and not self.stopped.is_set():
            ready, asked = self._ray.wait(asked, timeout=LOOK_SECONDS)
            with contextlib.suppress(self._ray.exceptions.RayError):  # what it cannot say will be seen when it is done
                for one in ready:
                    answer: node.Answer | None = self._ray.get(one)
                    if answer is not None:
                        return answer
        return None

    def ask(self, request: StepRequest, seat: Reservation, deadline: float | None) -> tuple[str, node.Answer]:
        """Have a step done; gives back the id of the node that did it, too.

        Raises:
            NodeLost: Ray has no answer, and another attempt may have one.
            StepError: it ran out of time, or was ended.
        """
        number = next(self._numbers)
        left = None if deadline is None else max(0.1, deadline - time.monotonic())
        remote = self._request(request, left, number, seat.cores)
        errand = RemoteStep(request, seat, self._do.options(**seat.options).remote(remote, self._news))
        with self._lock:
            self._active[number] = errand
        try:
            where, answer = self._awaited(errand, deadline)
        finally:
            with self._lock:
                del self._active[number]
        if not answer.cached:
            errand.begin()
        return where, answer

    def _request(
        self, request: StepRequest, seconds: float | None, number: int = -1, cores: int | None = None
    ) -> node.Request:
        return node.Request(
            number,
            request.step,
            request.inputs,
            store=self._store.address,
            reuse=self._store.reuse,
            project=str(self._project),
            files=files_named(request.step.task, self._project),
            log=str(request.log),
            preloaded=workers.preloaded(),
            cores=cores,
            timeout_seconds=seconds,
        )

    def _awaited(self, errand: RemoteStep, deadline: float | None) -> tuple[str, node.Answer]:
        while True:
            if self.stopped.is_set():
                self._cancel(errand)
                raise StepError("it was ended")
            try:
                if self._ray.wait([errand.reference], timeout=LOOK_SECONDS)[0]:
                    found: tuple[str, node.Answer] = self._ray.get(errand.reference)
                    return found
            except self._ray.exceptions.TaskCancelledError as error:
                raise StepError("it was ended") from error
            except self._ray.exceptions.RayTaskError as error:
                raise StepCrashed(f"its node failed: {error.cause!r}", "the log of the Ray worker has more") from error
            except self._ray.exceptions.RayError as error:
                raise errands.lost(error, errand, self._pool.nodes) from error
            if deadline is not None and time.monotonic() > deadline:
                self._cancel(errand)
                raise StepTimeout("the time limit was over before it was done", "allow more: --time-limit; then resume")
            if errand.seat.nodes.isdisjoint(self._pool.nodes):
                self._cancel(errand)
                raise NodeLost(f"{errand.node or 'the node that it waited for'} was lost")

    def _cancel(self, errand: RemoteStep) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError, ConnectionError):
            self._ray.cancel(errand.reference, force=True)

    def _watch(self) -> None:
        """Pass on what nodes tell, and see who leaves and joins."""
        asked, looked = None, 0.0
        while not self.stopped.wait(_NEWS_SECONDS):
            with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):  # a step that waits will say it
                asked = asked or self._news.take.remote()
                if self._ray.wait([asked], timeout=LOOK_SECONDS)[0]:
                    taken, asked = asked, None
                    for number, where, kind, text in self._ray.get(taken):
                        self._tell(number, where, kind, text)
                if time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    for line in self._registry.again():
                        self._announce(line)

    def _tell(self, number: int, where: str, kind: str, text: str) -> None:
        with self._lock:
            errand = self._active.get(number)
        if errand is None:
            return
        if where in self._pool.nodes:
            errand.node = self._pool.nodes[where].name
        if kind == "started":
            errand.begin()
        else:
            (errand.request.on_note if kind == "note" else errand.request.on_progress)(text)

    def _announce(self, line: str) -> None:
        """Tell people what happened to the cluster, at a step that is under way."""
        with self._lock:
            request = next(iter(self._orders.values()), None)
        if request is not None:
            request.on_note(line)
