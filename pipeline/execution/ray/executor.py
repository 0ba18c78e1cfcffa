"""Run steps on the nodes of a Ray cluster: Ray says where there is room, and each node does them as one machine would.

A step's result is a key of the shared store and a log. A step whose worker or node was lost is repeated elsewhere; one
that fails of its own is not.
"""

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import (
    BuilderFailed,
    MissingCapability,
    MissingEntry,
    StepCrashed,
    StepError,
    StepTimeout,
    StoreError,
    UsageError,
    storage_errors,
)
from enginesmith.pipeline.execution.executor import Executor, Result, StepCache, StepRequest
from enginesmith.pipeline.execution.ray import connection, remote
from enginesmith.pipeline.execution.ray.connection import ray
from enginesmith.pipeline.execution.ray.placement import Node, NodePool, Reservation, live_nodes, own_fingerprint
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import worker

_ATTEMPTS = 3
_GRACE_SECONDS = 30.0
"""Time for which a step waits for a node of its target to come back, when the last one was lost."""
_LOOKUP_NODES = 8
"""Nodes that are asked for a measurement, where more of one kind differ in what times depend on."""
_POLL_SECONDS = 1.0
"""Time after which waiting threads check whether they still have something to wait for."""
_RETRIES = 2
"""Number of times that Ray repeats a step whose worker or node was lost."""
_NODE_ID = re.compile(r"node ID: ([0-9a-f]{40,})")


class NodeLost(Exception):
    """Every node that a step was reserved on is gone, through no fault of the step; the message names the node."""

    node_id: str = ""
    """Node that is gone; empty where the pool knows it already."""


class RayExecutor(Executor):
    """Runs steps as Ray tasks; ``jobs`` is how many general ones a node of the usual size does at a time."""

    is_local = False
    slots = 64

    def __init__(self, store: Store, jobs: int, address: str | None = None, project: Path | None = None) -> None:
        """Join the cluster; ``project`` is the folder that travels to the nodes, by default the current one.

        Raises:
            MissingCapability: there is no cluster, or it has no node with a CPU.
            UsageError: the folder is too large, or the store is in this process's memory.
        """
        self._store, self._pool = store, NodePool(jobs, own_fingerprint())
        self._full: set[str] = set()
        """Ids of nodes whose disk has no space left."""
        folder = (project or Path.cwd()).resolve()
        with contextlib.ExitStack() as stack:
            modules = stack.enter_context(connection.stage_folders(folder, skip=store.root))
            connection.connect(address or connection.AUTO, modules)
            stack.callback(connection.disconnect)
            self._token, self._project = stack.enter_context(_token_in_store(store.address)), folder
            self._ray = ray()
            self._pool.update(live_nodes(self._ray.nodes()))
            if not self._pool.nodes:
                raise MissingCapability("the Ray cluster has no node with a CPU that can be used", "see `ray status`")
            self._execute_remotely = self._ray.remote(max_retries=_RETRIES, max_calls=0)(remote.execute)
            self._look_up_remotely = self._ray.remote(max_retries=0, num_cpus=0)(remote.lookup)
            self._requests: list[StepRequest] = []
            self._stopped = threading.Event()
            """Set when nobody waits any more: threads in :meth:`execute` withdraw their steps."""
            watcher = threading.Thread(target=self._watch, name="ray-nodes", daemon=True)
            watcher.start()
            stack.callback(watcher.join)
            stack.callback(self._stopped.set)
            self._stack = stack.pop_all()

    def why_unavailable(self, place: Place) -> str:
        """Explain which resources no node of the cluster has; nobody waits for nodes that were never there."""
        return "" if self._pool.candidates(place) else self._pool.explain_lack(place)

    def can_start(self, step: Step, running: Collection[Step]) -> bool:
        """Return whether to submit one more step; Ray decides where and when each one runs."""
        return self._pool.has_room(step, running)

    def execute(self, request: StepRequest) -> Result:
        """Have a node do a step; repeat it where Ray lost it, or the disk there was full."""
        log = b""
        self._requests.append(request)
        try:
            answer = self._request_answer(request)
            log = answer.log
        finally:
            self._requests.remove(request)
            with storage_errors(f"the logs in {request.log.parent}"):
                request.log.parent.mkdir(parents=True, exist_ok=True)
                request.log.write_bytes(log)
        if answer.error is not None:
            if isinstance(answer.error, (StepError, BuilderFailed, StoreError, MissingCapability)):
                answer.error.remedy += f"; it was on {answer.node}"
            raise answer.error
        assert answer.artifact is not None
        return Result(self._fetch(answer.artifact), cached=answer.cached)

    def stop(self) -> None:
        self._store.stop()
        self._stopped.set()

    def close(self) -> None:
        self._stack.close()

    def lookup(self, request: StepRequest) -> Artifact | None:
        """Look up a step in the store; nodes are asked for steps whose key depends on the machine."""
        step, cache = request.step, StepCache(request.step, request.inputs, self._store)
        if step.place is None and not step.task.machine_specific:
            return cache.lookup()
        if not self._store.reuse:
            return None
        own = self._pool.driver.machine
        queried_machines: set[str] = set()
        for node in sorted(self._pool.candidates(step.place), key=lambda node: self._pool.machine_of(node.id) != own):
            machine = self._pool.machine_of(node.id)
            if machine in queried_machines or len(queried_machines) == _LOOKUP_NODES:
                continue
            if machine == own:
                artifact = cache.lookup()
                if artifact and not self._pool.accept(node.id, self._pool.fingerprints[node.id], "", step.place):
                    return artifact
            else:
                answer = self._look_up_on(node, request)
                if answer is None:
                    continue
                if answer.artifact is not None:
                    return self._fetch(answer.artifact)
                machine = answer.fingerprint.machine
            queried_machines.add(machine)
        return None

    def _fetch(self, artifact: Artifact) -> Artifact:
        """Fetch an artifact that a node named from the store.

        Where two nodes measured one thing at the same moment, the entry in the store is good for both.
        """
        try:
            return self._store.fetch(artifact.key, artifact.sha256).model_copy(update={"history": artifact.history})
        except MissingEntry:
            stored = self._store.fetch(artifact.key)
            return stored.model_copy(update={"history": (*artifact.history[:-1], stored.history[-1])})

    def _request_answer(self, request: StepRequest) -> remote.Answer:
        """Send a request to nodes until one has an answer that counts."""
        deadline = None if request.timeout_seconds is None else time.monotonic() + request.timeout_seconds
        losses: list[str] = []
        shared, note = False, request.on_note
        while True:
            self._wait_for_node(request)
            avoided = self._full if self._has_space(request.step) else ()
            with self._pool.reserve(request.step, avoided) as reservation:
                if reservation is None:  # the last node was lost just now
                    continue
                try:
                    answer = self._execute_on(reservation, request, deadline)
                except NodeLost as loss:
                    losses.append(str(loss))
                    self._pool.drop(loss.node_id)
                    if len(losses) == _ATTEMPTS:
                        raise StepCrashed(
                            f"it was lost {_ATTEMPTS} times: {'; '.join(losses)}",
                            "see `ray status`, and whether the nodes have the memory for it",
                        ) from loss
                    note(f"{loss}; it is run again")
                    continue
            if why := self._pool.accept(answer.node_id, answer.fingerprint, answer.refusal, request.step.place):
                note(f"{why}; it is run on another node")
                continue
            if answer.full and answer.node_id not in self._full:
                self._full.add(answer.node_id)
                if self._has_space(request.step):
                    note(f"the disk of {answer.node} is full; it is run on another node")
                    continue
            if isinstance(answer.error, MissingEntry) and not shared:  # a node lacks what this machine has in its cache
                shared = True
                inputs = {role: self._store.share(artifact) for role, artifact in request.inputs.items()}
                request = replace(request, inputs=inputs)
                continue
            return answer

    def _has_space(self, step: Step) -> bool:
        return any(node.id not in self._full for node in self._pool.candidates(step.place))

    def _wait_for_node(self, request: StepRequest) -> None:
        """Wait until a node is available, for a while if the last one was lost.

        Raises:
            MissingCapability: there is none.
        """
        place = request.step.place
        if self._pool.candidates(place):
            return
        waits = self._pool.was_available(place)
        grace = f"{_GRACE_SECONDS:.0f} s"
        if waits:
            request.on_note(f"all nodes that it could run on are gone; waiting {grace} for one to come back")
            until = time.monotonic() + _GRACE_SECONDS
            while time.monotonic() < until:
                if self._stopped.wait(_POLL_SECONDS):
                    raise StepError("it was ended")
                if self._pool.candidates(place):
                    return
        why = self._pool.explain_lack(place)
        if waits:
            why = why or "those that are left are of another kind than what was built for"
            why = f"all nodes that it could run on were lost, and none came back within {grace}: {why}"
        remedy = "`enginesmith resume` continues once there is one"
        if self._pool.refused:
            both = "install the same versions everywhere, and name a store that all machines reach with --store"
            remedy = f"{both}; {remedy}"
        raise MissingCapability(why, remedy)

    def _look_up_on(self, node: Node, request: StepRequest) -> remote.Answer | None:
        """Ask a node to look up a step with its key; None if it gives no answer, or one that cannot be used."""
        options = Reservation(frozenset([node.id]), {"CPU": 0}).options
        reference = self._look_up_remotely.options(**options).remote(self._make_request(request, None))
        with contextlib.suppress(self._ray.exceptions.RayError):  # the error shows again when the step is done
            while not self._stopped.is_set() and node.id in self._pool.nodes:
                if self._ray.wait([reference], timeout=_POLL_SECONDS)[0]:
                    answer: remote.Answer = self._ray.get(reference)
                    place = request.step.place if answer.artifact is not None else None
                    why = self._pool.accept(answer.node_id, answer.fingerprint, answer.refusal, place)
                    if answer.refusal and why:
                        request.on_note(why)
                    return None if why else answer
        return None

    def _execute_on(self, reservation: Reservation, request: StepRequest, deadline: float | None) -> remote.Answer:
        """Have a node do a step.

        Raises:
            NodeLost: the nodes that were reserved are gone.
            StepError: it ran out of time, was ended, or was lost as often as Ray tries.
        """
        left = None if deadline is None else max(0.1, deadline - time.monotonic())
        sent = self._make_request(request, left, reservation.cores)
        reference = self._execute_remotely.options(**reservation.options).remote(sent)
        request.on_start()
        answer = self._wait(reference, reservation, deadline)
        for note in answer.notes:
            request.on_note(note)
        return answer

    def _make_request(self, request: StepRequest, seconds: float | None, cores: int | None = None) -> remote.Request:
        token, token_file = self._token
        return remote.Request(
            request.step,
            request.inputs,
            store=self._store.address,
            reuse=self._store.reuse,
            token=token,
            token_file=token_file,
            requirement=self._pool.requirement(request.step.place),
            project=str(self._project),
            files=connection.find_named_files(request.step.task, self._project),
            log=str(request.log),
            preloaded=worker.preloaded(),
            cores=cores,
            timeout_seconds=seconds,
        )

    def _wait(self, reference: Any, reservation: Reservation, deadline: float | None) -> remote.Answer:
        while True:
            if self._stopped.is_set():
                self._cancel(reference)
                raise StepError("it was ended")
            try:
                if self._ray.wait([reference], timeout=_POLL_SECONDS)[0]:
                    answer: remote.Answer = self._ray.get(reference)
                    return answer
            except self._ray.exceptions.TaskCancelledError as error:
                raise StepError("it was ended") from error
            except self._ray.exceptions.RayTaskError as error:
                raise StepCrashed(f"its node failed: {error.cause!r}", "the log of the Ray worker has more") from error
            except self._ray.exceptions.RayError as error:
                raise _explain_loss(error, reservation, self._pool.nodes) from error
            if deadline is not None and time.monotonic() > deadline:
                self._cancel(reference)
                raise StepTimeout("the time was over before it was done", "give more: --time; then resume")
            if reservation.nodes.isdisjoint(self._pool.nodes):
                self._cancel(reference)
                raise NodeLost("the node that it ran on, or waited for, was lost")

    def _cancel(self, reference: Any) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError, ConnectionError):
            self._ray.cancel(reference, force=True)

    def _watch(self) -> None:
        """Keep the pool in step with the cluster, and report who left and joined to the first request."""
        while not self._stopped.wait(_POLL_SECONDS):
            with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):  # steps that wait will report it
                for line in self._pool.update(live_nodes(self._ray.nodes())):
                    for request in self._requests[:1]:
                        request.on_note(line)


def _explain_loss(error: Exception, reservation: Reservation, nodes: Mapping[str, Node]) -> NodeLost | StepCrashed:
    """Turn an error that is left when Ray has retried into a lost node, or a step that cannot be done."""
    kinds = ray().exceptions
    gone = (kinds.NodeDiedError, kinds.ObjectLostError, kinds.LocalRayletDiedError, kinds.TaskUnschedulableError)
    if isinstance(error, gone):
        match, reserved = _NODE_ID.search(str(error)), reservation.nodes
        node_id = match[1] if match else next(iter(reserved)) if len(reserved) == 1 else ""
        loss = NodeLost(f"{nodes[node_id].name if node_id in nodes else 'its node'} was lost")
        loss.node_id = node_id
        return loss
    text = " ".join(str(error).split())
    return StepCrashed(
        f"Ray could not do it ({type(error).__name__}: {text[:200]})",
        "see `ray status`, Ray's logs, and whether the nodes have the memory for it",
    )


@contextlib.contextmanager
def _token_in_store(address: str) -> Iterator[tuple[str, str]]:
    """Write a token to a file in the store's folder, by which nodes recognize it; yields both, empty for other stores.

    Raises:
        UsageError: the store is in this process's memory.
    """
    if address.startswith("memory://"):
        raise UsageError(
            f"the store {address} is in the memory of this process, where no node sees it",
            "name one that all machines reach with --store: s3://bucket/folder, or a folder that they share",
        )
    folder = address.removeprefix("file://")
    if "://" in folder:
        yield "", ""
        return
    token = secrets.token_hex(16)
    path = Path(folder, f".nodes-look-here-{token[:8]}")
    with storage_errors(f"the store {address}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(token, encoding="utf-8")
    try:
        yield token, str(path)
    finally:
        path.unlink(missing_ok=True)
