"""Steps on the nodes of a Ray cluster: Ray says where there is room, and each node does them as one machine would.

A step comes back as a key of the shared store and a log. What Ray loses, as a worker or a node, is done again
elsewhere; a step that fails of its own is not.
"""

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import (
    BuilderFailed,
    MissingCapability,
    MissingEntry,
    StepCrashed,
    StepError,
    StoreError,
    storage_errors,
)
from enginesmith.pipeline.execution.executor import Executor, Result, StepCache, StepRequest
from enginesmith.pipeline.execution.ray import connection, placement, remote
from enginesmith.pipeline.execution.ray.dispatch import LOOK_SECONDS, Dispatch
from enginesmith.pipeline.execution.ray.nodes import NodeRegistry
from enginesmith.pipeline.execution.ray.placement import NodePool
from enginesmith.pipeline.execution.ray.remote import NodeLost
from enginesmith.pipeline.execution.ray.runtime_env import staged
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.store.store import Store

_ATTEMPTS = 3
_GRACE_SECONDS = 30.0
"""How long a step waits for a node of its target to come back, when the last one was lost."""
_ASKED_AT_ONCE = 8
"""Nodes that are asked whether a measurement is known, where more of one kind differ in what times depend on."""


class RayExecutor(Executor):
    """Runs steps as Ray tasks; ``jobs`` is how many general ones a node of the usual size does at a time."""

    is_local = False
    slots = 64

    def __init__(self, store: Store, jobs: int, address: str | None = None, project: Path | None = None) -> None:
        """Join the cluster, and see that its nodes are fit; ``project`` is what travels, else the current folder.

        Raises:
            MissingCapability: there is no cluster, its nodes differ in what keys are made of, or lack the store.
            UsageError: the folder is too large.
        """
        self._store, self._pool = store, NodePool(jobs)
        self._full: set[str] = set()
        """Ids of nodes whose disk has no space left."""
        folder = (project or Path.cwd()).resolve()
        with contextlib.ExitStack() as stack:
            modules = stack.enter_context(staged(folder, skip=store.root))
            connection.connect(address or connection.AUTO, modules)
            stack.callback(connection.disconnect)
            self._registry = stack.enter_context(NodeRegistry(self._pool, store))
            self._registry.all()
            self._dispatch = stack.enter_context(Dispatch(store, folder, self._pool, self._registry))
            self._held = stack.pop_all()

    def why_unavailable(self, place: Place) -> str:
        """What no node of the cluster has now; nobody waits for nodes that were never there."""
        return "" if self._pool.candidates(place) else placement.lacking(place, self._pool.nodes.values())

    def can_start(self, step: Step, running: Collection[Step]) -> bool:
        """Whether there is work for the nodes to be had: where each runs what, and when, is Ray's matter."""
        return self._pool.room(step, running)

    def execute(self, request: StepRequest) -> Result:
        """Have a node do it; again where Ray lost it, or the disk there was full."""
        with request.with_notes() as noted:
            return self._carried_out(request, noted.on_note)

    def _carried_out(self, request: StepRequest, note: Callable[[str], None]) -> Result:
        """What nodes note is in the log that comes back, and not for ``note``, which writes to the log here."""
        log = b""
        with self._dispatch.under_way(request):
            try:
                answer = self._answer(request, note)
                log = answer.log
            finally:
                _write_log(request, log)
        if answer.error is not None:
            if isinstance(answer.error, (StepError, BuilderFailed, StoreError, MissingCapability)):
                answer.error.remedy += f"; it was on {answer.node}"
            raise answer.error
        assert answer.artifact is not None
        return Result(self._taken(answer.artifact), cached=answer.cached)

    def stop(self) -> None:
        """Have Ray kill what runs, and take back what waits."""
        self._store.stop()
        self._dispatch.stop()

    def close(self) -> None:
        """Leave the cluster, which goes on."""
        self._held.close()

    def lookup(self, request: StepRequest) -> Artifact | None:
        """What the store has of it; what depends on the machine is looked for as nodes of the place would make it."""
        step, mine = request.step, StepCache(request.step, request.inputs, self._store)
        if step.place is None and not step.task.machine_specific:
            return mine.lookup()
        if not self._store.reuse:
            return None
        nodes = {self._registry.machine_of(one.id): one.id for one in self._pool.candidates(step.place)}
        if nodes.pop(self._registry.own.machine, None) and (found := mine.lookup()) is not None:
            return found
        answer = self._dispatch.lookup(request, [*nodes.values()][:_ASKED_AT_ONCE])
        return self._taken(answer.artifact) if answer is not None and answer.artifact is not None else None

    def _taken(self, made: Artifact) -> Artifact:
        """An artifact that a node told of, from the store here.

        Where two nodes measured one thing at the same moment, what stands in the store is good for both.
        """
        try:
            return self._store.fetch(made.key, made.sha256).model_copy(update={"history": made.history})
        except MissingEntry:
            found = self._store.fetch(made.key)
            return found.model_copy(update={"history": (*made.history[:-1], found.history[-1])})

    def _answer(self, request: StepRequest, note: Callable[[str], None]) -> remote.Answer:
        deadline = None if request.timeout_seconds is None else time.monotonic() + request.timeout_seconds
        losses: list[str] = []
        shared = False
        while True:
            self._wait_for_node(request, note)
            avoided = self._full if self._left(request.step) else ()
            with self._pool.reserve(request.step, avoided) as reservation:
                if reservation is None:  # the last node was lost just now
                    continue
                try:
                    where, answer = self._dispatch.execute(request, reservation, deadline)
                except NodeLost as loss:
                    losses.append(str(loss))
                    self._registry.gone(loss.node_id)
                    if len(losses) == _ATTEMPTS:
                        raise StepCrashed(
                            f"it was lost {_ATTEMPTS} times: {'; '.join(losses)}",
                            "see `ray status`, and whether the nodes have the memory for it",
                        ) from loss
                    note(f"{loss}; it is done once more")
                    continue
            if answer.full and where not in self._full:
                self._full.add(where)
                if self._left(request.step):
                    note(f"the disk of {answer.node} is full; it is done on another node")
                    continue
            if isinstance(answer.error, MissingEntry) and not shared:  # a node lacks what this machine has in its cache
                shared = True
                request = replace(
                    request, inputs={role: self._store.share(one) for role, one in request.inputs.items()}
                )
                continue
            return answer

    def _left(self, step: Step) -> bool:
        """Whether there is a node whose disk is not full."""
        return any(one.id not in self._full for one in self._pool.candidates(step.place))

    def _wait_for_node(self, request: StepRequest, note: Callable[[str], None]) -> None:
        """See that there is a node to be had, or may be again soon."""
        place = request.step.place
        if self._pool.candidates(place):
            return
        told = False
        until = time.monotonic() + (_GRACE_SECONDS if place is None or self._pool.had(place) else 0)
        while time.monotonic() < until:
            if not told:
                note(f"all nodes that it could run on are gone; waiting {_GRACE_SECONDS:.0f} s for one to come back")
            told = True
            if self._dispatch.stopped.wait(LOOK_SECONDS):
                raise StepError("it was ended")
            if self._pool.candidates(place):
                return
        why = placement.lacking(place or Place(), self._pool.nodes.values())
        if told:
            why = f"all nodes that it could run on were lost, and none came back within {_GRACE_SECONDS:.0f} s: " + (
                why or "those that are left are of another kind than what was built for"
            )
        raise MissingCapability(why, "`enginesmith resume` goes on once there is one")


def _write_log(request: StepRequest, log: bytes) -> None:
    with storage_errors(f"the logs in {request.log.parent}"):
        request.log.parent.mkdir(parents=True, exist_ok=True)
        request.log.write_bytes(log)
