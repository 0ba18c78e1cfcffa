"""Choose the nodes of a Ray cluster that a step may run on, and the resources to request from Ray.

Ray schedules. What is added: nodes with other versions are left out; a target stays on one kind of machine; and a step
that has to be alone takes all of a node. Ray would never hand out a whole node as long as small steps keep filling it,
so those go to other nodes while one waits.
"""

import difflib
import math
import platform
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from enginesmith.pipeline.artifact import json_digest
from enginesmith.pipeline.engines import environment, packages
from enginesmith.pipeline.execution.executor import own_code
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.system import cpu, machine, nvidia, software


@dataclass(frozen=True)
class NodeFingerprint:
    """Properties of a machine that decide which steps it may do, and for which machines their results hold."""

    python: str
    code: str
    """Digest of enginesmith's own."""
    packages: Mapping[str, str]
    """Versions of installed packages that are part of keys."""
    kind: str = ""
    """Digest of the processor and the GPUs: what was built on one machine runs on others of its kind."""
    machine: str = ""
    """Digest of all that measurements depend on: those of one machine hold for others that share it."""


def own_fingerprint() -> NodeFingerprint:
    """Take the fingerprint of this machine."""
    major, minor, _ = platform.python_version_tuple()
    gpus = [gpu.model_dump() for gpu in nvidia.driver().devices]
    kind = json_digest([platform.machine(), cpu.model(), cpu.vector_units(), gpus])
    return NodeFingerprint(
        f"{major}.{minor}",
        own_code(),
        software.versions(name for name in packages() if name != "enginesmith"),
        kind,
        machine.fingerprint(environment()),
    )


@dataclass(frozen=True)
class NodeRequirement:
    """Properties that a node must have to do a step."""

    driver: NodeFingerprint
    """Fingerprint of the machine that runs the command."""
    on_nodes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Version of each package that only nodes have, as TensorRT on those with a GPU, and the name of one of them."""
    kind: str = ""
    """Kind of machine; empty for any."""

    def mismatches(self, node: NodeFingerprint) -> list[str]:
        """List the differences that would change keys, a line each.

        A package that the driver lacks may be on nodes, as TensorRT is on those with a GPU: it is in no key that is
        made by the driver. But nodes have to agree on it.
        """
        driver, lines = self.driver, []
        if node.python != driver.python:
            lines.append(f"Python {node.python}, and here {driver.python}")
        if node.code != driver.code:
            lines.append(f"another version of enginesmith's own code ({node.code[:12]}, here {driver.code[:12]})")
        for package, version in sorted(driver.packages.items()):
            has = node.packages.get(package)
            if has != version:
                lines.append(f"{f'{package} {has}' if has else f'no {package}'}, and here {version}")
        for package, (version, other) in sorted(self.on_nodes.items()):
            has = node.packages.get(package, version)
            if has != version:
                lines.append(f"{package} {has}, and {version} on {other}")
        return lines


ACCELERATOR = "accelerator_type:"
_OWN = ("CPU", "GPU", "memory", "object_store_memory")


@dataclass(frozen=True)
class Node:
    """A live machine of the cluster."""

    id: str
    host: str
    resources: Mapping[str, float]
    """Declared resources, in use or not."""

    @property
    def name(self) -> str:
        """Host and short id: several nodes may be on one host."""
        return f"{self.host} ({self.id[:8]})"

    @property
    def cpus(self) -> float:
        """Declared CPUs; the head of a cluster may have none."""
        return self.resources.get("CPU", 0.0)

    @property
    def gpus(self) -> int:
        return int(self.resources.get("GPU", 0))

    def fits(self, place: Place | None) -> bool:
        """Return whether it has what a place requires, busy or not; without a place, any node with a CPU does."""
        wanted = {} if place is None else required_resources(place)
        return self.cpus > 0 and all(self.resources.get(name, 0.0) >= amount for name, amount in wanted.items())

    @property
    def description(self) -> str:
        """Its resources in words."""
        counts = [f"{name} {self.resources[name]:g}" for name in ("CPU", "GPU") if self.resources.get(name)]
        return ", ".join([*counts, *(_in_words(name, self.resources[name]) for name in self.named)])

    @property
    def named(self) -> list[str]:
        """Names of resources besides those that every node has."""
        return sorted(name for name in self.resources if name not in _OWN and not name.startswith("node:"))


def live_nodes(listing: Iterable[Mapping[str, Any]]) -> dict[str, Node]:
    """Convert the listing of ``ray.nodes()`` to the nodes that are alive, by id."""
    return {
        row["NodeID"]: Node(
            row["NodeID"],
            str(row.get("NodeManagerHostname") or row.get("NodeManagerAddress") or "?"),
            dict(row["Resources"]),
        )
        for row in listing
        if row["Alive"]
    }


def required_resources(place: Place) -> dict[str, float]:
    """Name the Ray resources that nodes of a place have and others lack, with the amounts."""
    wanted = dict(place.resources)
    if place.accelerator:
        wanted[f"{ACCELERATOR}{place.accelerator}"] = 0.001  # of one, as Ray itself asks for a type
    if place.device == "cuda":
        wanted["GPU"] = 1.0
    return wanted


def explain_lack(place: Place, nodes: Collection[Node]) -> str:
    """Explain why no node has what a place requires, with what they have; empty if one does."""
    if any(node.fits(place) for node in nodes):
        return ""
    gpu = f"a GPU of type {place.accelerator}" if place.accelerator else "a GPU" if place.device == "cuda" else ""
    wanted = ", ".join(filter(None, [gpu, *(_in_words(*resource) for resource in place.resources)])) or "a CPU"
    kinds = Counter(node.description for node in nodes)
    have = "; ".join(f"{count} × [{offers}]" for offers, count in sorted(kinds.items())) or "it has no node"
    known, names = {name for node in nodes for name in node.named}, required_resources(place)
    near = [match for name in names for match in difflib.get_close_matches(name, known - {name}, n=1)]
    suggestion = f" (did you mean {_in_words(near[0], 1)}?)" if near else ""
    return f"no node of the Ray cluster has {wanted}{suggestion}; there are: {have}"


def _in_words(resource: str, amount: float) -> str:
    if resource.startswith(ACCELERATOR):
        return f"GPU type {resource.removeprefix(ACCELERATOR)}"
    return resource if amount == 1 else f"{resource} {amount:g}"


_NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Reservation:
    """Nodes and resources that are requested from Ray for a step."""

    nodes: frozenset[str]
    """Ids of the nodes that it may run on."""
    resources: Mapping[str, float]
    """Amounts by Ray's names, ``CPU`` and ``GPU`` among them."""
    alone: float = 0.0
    """Fraction of the one node that it has to itself: all of it, or the part that goes with one of its GPUs."""

    @property
    def cores(self) -> int | None:
        """Number of cores that it may use; None for all."""
        return None if self.alone == 1 else max(1, int(self.resources["CPU"]))

    @property
    def options(self) -> dict[str, Any]:
        """Options of the Ray task."""
        named = {name: amount for name, amount in self.resources.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self.resources["CPU"],
            "num_gpus": self.resources.get("GPU", 0),
            "resources": named or None,
            "label_selector": {_NODE_LABEL: f"in({','.join(sorted(self.nodes))})"},
        }


@dataclass
class NodePool:
    """The nodes that may be used, what is known of them, and who waits for one to be alone on it.

    Nodes are learnt from their answers: each one compares itself with :meth:`requirement` and sends its fingerprint.
    """

    jobs: int
    """General steps that one node does at a time."""
    driver: NodeFingerprint
    """Fingerprint of the machine that runs the command."""
    nodes: dict[str, Node] = field(default_factory=dict)
    """By id, those that are alive and may be used."""
    fingerprints: dict[str, NodeFingerprint] = field(default_factory=dict)
    """By id, of nodes that have answered."""
    refused: dict[str, str] = field(default_factory=dict)
    """By id, the name of a node that is left out and the reason."""
    _lost: set[str] = field(default_factory=set)
    """Nodes that Ray lost, and may list for some seconds still."""
    _chosen: dict[Place, str] = field(default_factory=dict)
    """The kind of machine that stands for a place in this run: that of the first answer."""
    _taken: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By node, the part of it that is taken by steps that are alone there, or wait for that."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def update(self, alive: Mapping[str, Node]) -> list[str]:
        """Take over which nodes are alive; returns a line for each that joined or left."""
        with self._lock:
            before, out = self.nodes, self._lost | self.refused.keys()
            self.nodes = {name: node for name, node in alive.items() if node.cpus and name not in out}
            joined = [f"{node.name} has joined the cluster" for name, node in self.nodes.items() if name not in before]
            left = [f"{node.name} has left the cluster" for name, node in before.items() if name not in self.nodes]
            return joined + left

    def drop(self, node_id: str) -> None:
        """Remove a node that was lost, whether Ray lists it still or not."""
        with self._lock:
            self._lost.add(node_id)
            self.nodes = {name: node for name, node in self.nodes.items() if name != node_id}

    def requirement(self, place: Place | None = None) -> NodeRequirement:
        """Say what a node must have for steps of a place, as far as the answers so far have decided it."""
        with self._lock:
            on_nodes: dict[str, tuple[str, str]] = {}
            for node_id, fingerprint in self.fingerprints.items():
                name = self.nodes[node_id].name if node_id in self.nodes else node_id[:8]
                for package in fingerprint.packages.keys() - self.driver.packages.keys():
                    on_nodes.setdefault(package, (fingerprint.packages[package], name))
            return NodeRequirement(self.driver, on_nodes, "" if place is None else self._chosen.get(place, ""))

    def accept(self, node_id: str, fingerprint: NodeFingerprint, refusal: str, place: Place | None) -> str:
        """Learn from a node's answer, and explain why the answer cannot be used; empty if it can.

        The first answer that is accepted for a place chooses the kind of machine for it.
        """
        with self._lock:
            name = self.nodes[node_id].name if node_id in self.nodes else node_id[:8]
            refusal = refusal or "; ".join(self.requirement().mismatches(fingerprint))
            if refusal:
                self.refused[node_id] = f"{name}: {refusal}"
                self.nodes = {other: node for other, node in self.nodes.items() if other != node_id}
                return f"{name} is left out: {refusal}"
            self.fingerprints[node_id] = fingerprint
            if place is not None and self._chosen.setdefault(place, fingerprint.kind) != fingerprint.kind:
                return f"{name} is another kind of machine than the one that this target is built for"
            return ""

    def candidates(self, place: Place | None) -> list[Node]:
        """List the nodes for steps of a place: of one kind of machine, as far as known; without a place, all nodes."""
        with self._lock:
            nodes = [node for node in self.nodes.values() if node.fits(place)]
            # nodes that have not answered yet compare their kind themselves
            kinds = {node_id: fingerprint.kind for node_id, fingerprint in self.fingerprints.items()}
            chosen = "" if place is None else self._chosen.get(place, "")
            return [node for node in nodes if not chosen or kinds.get(node.id, chosen) == chosen]

    def machine_of(self, node_id: str) -> str:
        """Return the digest of what measurements on a node depend on; empty if it has not answered yet."""
        return self.fingerprints[node_id].machine if node_id in self.fingerprints else ""

    def was_available(self, place: Place | None) -> bool:
        """Return whether a node has done steps of that place."""
        return place in self._chosen if place is not None else bool(self.fingerprints)

    def explain_lack(self, place: Place | None) -> str:
        """Explain why no node can do steps of a place, and which nodes are left out; empty if a node fits."""
        why, refused = explain_lack(place or Place(), self.nodes.values()), "; ".join([*self.refused.values()])
        return f"{why}; left out are {refused}" if why and refused else why

    @contextmanager
    def reserve(self, step: Step, avoided: Collection[str] = ()) -> Iterator[Reservation | None]:
        """Choose nodes for a step; None if none is left. A node that it is to be alone on is kept for it."""
        with self._lock:
            candidates = [node for node in self.candidates(step.place) if node.id not in avoided]
            reservation = self._choose(step, candidates) if candidates else None
            self._take(reservation)
        try:
            yield reservation
        finally:
            with self._lock:
                self._take(reservation, -1)

    def has_room(self, step: Step, running: Collection[Step]) -> bool:
        """Return whether to submit one more: somewhat more than can run at a time, so that no node waits for work."""
        candidates = self.candidates(step.place)
        if not running or not candidates:
            return True
        if is_alone(step):
            waiting = sum(1 for other in running if is_alone(other) and other.place == step.place)
            return waiting < 2 * sum(_capacity(step, node) for node in candidates)
        with self._lock:
            available = [node for node in candidates if self._is_available(node)]
        share = self._share(candidates)
        general = sum(1 for other in running if not is_alone(other))
        return bool(available) and general < sum(int(node.cpus / share) + 2 for node in available)

    def _choose(self, step: Step, candidates: list[Node]) -> Reservation:
        named = {name: amount for name, amount in required_resources(step.place or Place()).items() if name != "GPU"}
        if is_alone(step):
            node = min(candidates, key=lambda node: (self._taken[node.id], node.id))
            gpus = {"": 0, "one": 1, "all": node.gpus}[step.task.gpus]
            capacity = _capacity(step, node)
            cpus = node.cpus if capacity == 1 else max(1.0, math.floor(node.cpus / capacity))
            return Reservation(frozenset([node.id]), {"CPU": cpus, "GPU": gpus, **named}, alone=1 / capacity)
        available = [node for node in candidates if self._is_available(node)] or candidates
        gpus = 1 if step.task.gpus else 0
        share = self._share(available)
        return Reservation(frozenset(node.id for node in available), {"CPU": share, "GPU": gpus, **named})

    def _take(self, reservation: Reservation | None, sign: int = 1) -> None:
        if reservation is not None and reservation.alone:
            for node in reservation.nodes:
                self._taken[node] += sign * reservation.alone

    def _is_available(self, node: Node) -> bool:
        """Return whether a part of it is not reserved for steps that are alone."""
        return self._taken[node.id] < 0.99

    def _share(self, nodes: Collection[Node]) -> float:
        """Compute the CPUs of a general step: the usual node does as many at a time as one machine would."""
        share = statistics.median_low([node.cpus for node in nodes]) / self.jobs
        return float(math.floor(share)) if share >= 1 else math.floor(share * 1000) / 1000 or 0.001


def is_alone(step: Step) -> bool:
    """Return whether nothing else may run beside a step: a measurement, or one that takes all GPUs."""
    return step.task.exclusive or step.task.gpus == "all"


def _capacity(step: Step, node: Node) -> int:
    """Count how many such steps can be alone on a node at a time: with a GPU each, where each takes one."""
    return max(1, node.gpus) if step.task.gpus == "one" else 1
