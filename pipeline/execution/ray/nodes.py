"""Getting to know the nodes of a cluster: each is looked at before it is given steps, those that join later too."""

import contextlib
import logging
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from enginesmith.pipeline.errors import MissingCapability, UsageError, storage_errors
from enginesmith.pipeline.execution.ray import remote
from enginesmith.pipeline.execution.ray.connection import ray
from enginesmith.pipeline.execution.ray.fingerprint import NodeFingerprint, mismatches, own_fingerprint
from enginesmith.pipeline.execution.ray.placement import Node, NodePool, Reservation, nodes_of
from enginesmith.pipeline.store.store import Store

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 180.0
"""How long the first look at a node may take: what travels is unpacked there."""


class NodeRegistry:
    """Keeps the seats in step with the cluster; a context, in which the store has a file for nodes to find."""

    def __init__(self, pool: NodePool, store: Store) -> None:
        self._pool, self._store = pool, store
        self._task = ray().remote(max_retries=0, num_cpus=0)(remote.errands_visit)
        self.own = own_fingerprint()
        """Those of this machine, which need not be a node."""
        self._known: dict[str, NodeFingerprint] = {}
        """By id, nodes that may be used."""
        self._names: dict[str, str] = {}
        self._unfit: set[str] = set()
        self._open: dict[str, Any] = {}
        """By id, the answers of nodes that are being looked at."""
        self._gone: set[str] = set()
        """Nodes that Ray lost, and may list for some seconds still."""
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            token, file = secrets.token_hex(16), ""
            if self._store.address.startswith("memory://"):
                raise UsageError(
                    f"the store {self._store.address} is in the memory of this process, where no node sees it",
                    "name one that all machines reach with --store: s3://bucket/folder, or a folder that they share",
                )
            folder = self._store.address.removeprefix("file://")
            if "://" not in folder:
                path = Path(folder, f".nodes-look-here-{token[:8]}")
                with storage_errors(f"the store {self._store.address}"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(token)
                stack.callback(path.unlink, missing_ok=True)
                file = str(path)
            self._what = remote.Visit(self._store.address, token, file)
            self._held = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def all(self) -> None:
        """Look at every node.

        Raises:
            MissingCapability: one of them differs in what keys are made of, or cannot use the store, or there is none.
        """
        nodes = self._send()
        waiting, found, troubles = dict(self._open), {}, {}
        self._open.clear()
        if waiting:
            ray().wait([*waiting.values()], num_returns=len(waiting), timeout=_ANSWER_SECONDS)
        for one, answer in waiting.items():
            try:
                found[one], troubles[one] = ray().get(answer, timeout=1.0)
            except ray().exceptions.RayError as error:
                self._unfit.add(one)
                logger.warning("%s is left out, as it gives no answer (%s)", nodes[one].name, type(error).__name__)
        _refuse_differences(mismatches(self.own, {nodes[one].name: facts for one, facts in found.items()}))
        _refuse_store(self._store.address, {nodes[one].name: why for one, why in troubles.items() if why})
        self._known.update(found)
        self._update(nodes)
        if not self._pool.nodes:
            raise MissingCapability("the Ray cluster has no node with a CPU that can be used", "see `ray status`")

    def again(self) -> list[str]:
        """See who left and who joined; news for people, a line each. New nodes are given steps once they are known."""
        with self._lock:
            before = dict(self._pool.nodes)
            nodes = self._send()
            ready = ray().wait([*self._open.values()], num_returns=len(self._open), timeout=0)[0] if self._open else []
            news = []
            for one in [one for one, answer in self._open.items() if answer in ready]:
                news.append(self._joined(one, nodes))
            self._update(nodes)
            news += [f"{old.name} has left the cluster" for one, old in before.items() if one not in self._pool.nodes]
            return [line for line in news if line]

    def gone(self, node_id: str) -> None:
        """A node was lost, whatever Ray lists."""
        with self._lock:
            self._gone.add(node_id)
            self._update(self._pool.nodes)

    def machine_of(self, node_id: str) -> str:
        """What measurements made there depend on, as a digest."""
        return self._known[node_id].machine

    def _joined(self, one: str, nodes: Mapping[str, Node]) -> str:
        try:
            facts, trouble = ray().get(self._open.pop(one))
        except ray().exceptions.RayError as error:
            facts, trouble = None, f"it gives no answer ({type(error).__name__})"
        if one not in nodes:
            return ""
        name = nodes[one].name
        if not trouble:
            trouble = "; ".join(mismatches(self.own, {**self._named(nodes), name: facts}))
        if trouble:
            self._unfit.add(one)
            return f"{name} has joined the cluster and is left out: {trouble}"
        self._known[one] = facts
        return f"{name} has joined the cluster"

    def _named(self, nodes: Mapping[str, Node]) -> dict[str, NodeFingerprint]:
        return {nodes[one].name: facts for one, facts in self._known.items() if one in nodes}

    def _send(self) -> dict[str, Node]:
        """All nodes that are alive; those not seen before are asked what they are."""
        nodes = {one: found for one, found in nodes_of(ray().nodes()).items() if one not in self._gone}
        for one, found in nodes.items():
            if found.cpus and one not in self._known and one not in self._unfit and one not in self._open:
                options = Reservation(frozenset([one]), {"CPU": 0}).options
                self._open[one] = self._task.options(**options).remote(self._what)
        return nodes

    def _update(self, nodes: Mapping[str, Node]) -> None:
        usable = {one: found for one, found in nodes.items() if one in self._known and one not in self._gone}
        self._pool.kinds.update({one: facts.kind for one, facts in self._known.items()})
        self._pool.nodes = usable


def _refuse_differences(lines: list[str]) -> None:
    if lines:
        raise MissingCapability(
            "nodes of the Ray cluster differ from this machine in what decides what comes out:\n  "
            + "\n  ".join(lines),
            "install the same versions everywhere, or leave those nodes out of the cluster",
        )


def _refuse_store(address: str, troubles: Mapping[str, str]) -> None:
    if troubles:
        lines = "\n  ".join(f"{name}: {why}" for name, why in troubles.items())
        raise MissingCapability(
            f"nodes of the Ray cluster cannot use the store {address}:\n  {lines}",
            "name one that all machines reach with --store: s3://bucket/folder, or a folder on a disk that they share; "
            "credentials are taken from the environment that `ray start` had there",
        )
