"""Send steps to the nodes of a cluster, wait for their results, and take them back."""

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from enginesmith.pipeline.errors import StepCrashed, StepError, StepTimeout
from enginesmith.pipeline.execution.executor import StepRequest
from enginesmith.pipeline.execution.ray import remote as errands
from enginesmith.pipeline.execution.ray import remote as node
from enginesmith.pipeline.execution.ray.connection import ray
from enginesmith.pipeline.execution.ray.nodes import NodeRegistry
from enginesmith.pipeline.execution.ray.placement import NodePool, Reservation
from enginesmith.pipeline.execution.ray.remote import NodeLost, RemoteStep
from enginesmith.pipeline.execution.ray.runtime_env import files_named
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import worker

LOOK_SECONDS = 1.0
"""How often what waits looks whether it still has something to wait for."""
_RETRIES = 2
"""How often Ray does a step again whose worker or node was lost."""


class Dispatch:
    """Sends steps to nodes; a context, in which people are told who joins and leaves the cluster."""

    def __init__(self, store: Store, project: Path, pool: NodePool, registry: NodeRegistry) -> None:
        self._store, self._project, self._pool, self._registry = store, project, pool, registry
        self._ray = ray()
        self._do = self._ray.remote(max_retries=_RETRIES, max_calls=0)(errands.do)
        self._look_up = self._ray.remote(max_retries=0, num_cpus=0)(errands.errands_look_up)
        self._requests: list[StepRequest] = []
        """Those that are under way: on a node, or waiting for one."""
        self.stopped = threading.Event()
        """Set when nobody waits any more."""
        self._watcher = threading.Thread(target=self._watch, name="ray-nodes", daemon=True)

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
        """Tell a request what happens to the cluster while the block runs."""
        self._requests.append(request)
        try:
            yield
        finally:
            self._requests.remove(request)

    def lookup(self, request: StepRequest, nodes: Collection[str]) -> node.Answer | None:
        """Ask nodes what the store has of a step as each of them would make it; the first answer is taken."""
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

    def execute(
        self, request: StepRequest, reservation: Reservation, deadline: float | None
    ) -> tuple[str, node.Answer]:
        """Have a node do a step; gives back the node's id, too.

        Raises:
            NodeLost: the nodes that were reserved are gone.
            StepError: it ran out of time, was ended, or was lost as often as Ray tries.
        """
        left = None if deadline is None else max(0.1, deadline - time.monotonic())
        remote = self._request(request, left, reservation.cores)
        step = RemoteStep(reservation, self._do.options(**reservation.options).remote(remote))
        request.on_start()
        where, answer = self._wait(step, deadline)
        for note in answer.notes:
            request.on_note(note)
        return where, answer

    def _request(self, request: StepRequest, seconds: float | None, cores: int | None = None) -> node.Request:
        return node.Request(
            request.step,
            request.inputs,
            store=self._store.address,
            reuse=self._store.reuse,
            project=str(self._project),
            files=files_named(request.step.task, self._project),
            log=str(request.log),
            preloaded=worker.preloaded(),
            cores=cores,
            timeout_seconds=seconds,
        )

    def _wait(self, step: RemoteStep, deadline: float | None) -> tuple[str, node.Answer]:
        while True:
            if self.stopped.is_set():
                self._cancel(step)
                raise StepError("it was ended")
            try:
                if self._ray.wait([step.reference], timeout=LOOK_SECONDS)[0]:
                    answer: tuple[str, node.Answer] = self._ray.get(step.reference)
                    return answer
            except self._ray.exceptions.TaskCancelledError as error:
                raise StepError("it was ended") from error
            except self._ray.exceptions.RayTaskError as error:
                raise StepCrashed(f"its node failed: {error.cause!r}", "the log of the Ray worker has more") from error
            except self._ray.exceptions.RayError as error:
                raise errands.explain_loss(error, step, self._pool.nodes) from error
            if deadline is not None and time.monotonic() > deadline:
                self._cancel(step)
                raise StepTimeout("the time limit was over before it was done", "allow more: --time-limit; then resume")
            if step.reservation.nodes.isdisjoint(self._pool.nodes):
                self._cancel(step)
                raise NodeLost("the node that it ran on, or waited for, was lost")

    def _cancel(self, step: RemoteStep) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError, ConnectionError):
            self._ray.cancel(step.reference, force=True)

    def _watch(self) -> None:
        """Keep the pool in step with the cluster, and tell a step that is under way who left and joined."""
        while not self.stopped.wait(LOOK_SECONDS):
            with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):  # a step that waits will say it
                for line in self._registry.again():
                    for request in self._requests[:1]:
                        request.on_note(line)
