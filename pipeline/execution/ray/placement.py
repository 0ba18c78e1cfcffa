"""Where on a cluster a step is put: what is asked of Ray for it, and which nodes it may run on.

Ray schedules. What is added: a step that has to be alone takes all of a node, which Ray would never hand out as long as
small steps keep filling it; so those go to other nodes while one waits.
"""

import difflib
import math
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.recipe.fleet import Place

# The nodes of a Ray cluster as Ray tells them, and which of them are what a place asks for.

ACCELERATOR = "accelerator_type:"
"""What Ray begins the name of a resource with that stands for a type of GPU."""
_OWN = ("CPU", "GPU", "memory", "object_store_memory")


@dataclass(frozen=True)
class Node:
    """One machine of the cluster that is alive."""

    id: str
    host: str
    resources: Mapping[str, float]
    """All that it declared, in use or not."""

    @property
    def name(self) -> str:
        """What people call it: several nodes may be on one host."""
        return f"{self.host} ({self.id[:8]})"

    @property
    def cpus(self) -> float:
        """As declared; the head of a cluster may have none."""
        return self.resources.get("CPU", 0.0)

    @property
    def gpus(self) -> int:
        """As declared."""
        return int(self.resources.get("GPU", 0))

    def fits(self, place: Place | None) -> bool:
        """Whether it is what a place asks for, busy or not; any node with a CPU is where none is asked for."""
        wanted = {} if place is None else asked_for(place)
        return self.cpus > 0 and all(self.resources.get(name, 0.0) >= amount for name, amount in wanted.items())

    @property
    def offers(self) -> str:
        """What it has that somebody may ask for, in words."""
        counts = [f"{name} {self.resources[name]:g}" for name in ("CPU", "GPU") if self.resources.get(name)]
        return ", ".join([*counts, *(_in_words(name, self.resources[name]) for name in self.named)])

    @property
    def named(self) -> list[str]:
        """Resources besides those that every node has."""
        return sorted(name for name in self.resources if name not in _OWN and not name.startswith("node:"))


def nodes_of(listing: Iterable[Mapping[str, Any]]) -> dict[str, Node]:
    """Those that are alive, by id, of what ``ray.nodes()`` lists."""
    alive = (one for one in listing if one["Alive"])
    return {one["NodeID"]: Node(one["NodeID"], _host(one), dict(one["Resources"])) for one in alive}


def asked_for(place: Place) -> dict[str, float]:
    """Ray's names of the resources that tell the nodes of a place from others."""
    wanted = dict(place.resources)
    if place.accelerator:
        wanted[f"{ACCELERATOR}{place.accelerator}"] = 0.001  # of one, as Ray itself asks for a type
    if place.device == "cuda":
        wanted["GPU"] = 1.0
    return wanted


def lacking(place: Place, nodes: Collection[Node]) -> str:
    """Why none of the nodes is what a place asks for, with what they have; empty where one is."""
    if any(node.fits(place) for node in nodes):
        return ""
    gpu = f"a GPU of type {place.accelerator}" if place.accelerator else "a GPU" if place.device == "cuda" else ""
    words = ", ".join(filter(None, [gpu, *(_in_words(*one) for one in place.resources)])) or "a CPU"
    kinds = Counter(node.offers for node in nodes)
    have = "; ".join(f"{count} × [{offers}]" for offers, count in sorted(kinds.items())) or "it has no node"
    return f"no node of the Ray cluster has {words}{_near(asked_for(place), nodes)}; there are: {have}"


def _near(wanted: Collection[str], nodes: Collection[Node]) -> str:
    known = {name for node in nodes for name in node.named}
    near = [match for name in wanted for match in difflib.get_close_matches(name, known - {name}, n=1)]
    return f" (did you mean {_in_words(near[0], 1)}?)" if near else ""


def _in_words(resource: str, amount: float) -> str:
    if resource.startswith(ACCELERATOR):
        return f"GPU type {resource.removeprefix(ACCELERATOR)}"
    return resource if amount == 1 else f"{resource} {amount:g}"


def _host(listed: Mapping[str, Any]) -> str:
    return str(listed.get("NodeManagerHostname") or listed.get("NodeManagerAddress") or "?")


_NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Reservation:
    """What is asked of Ray for a step."""

    nodes: frozenset[str]
    """Ids of those that it may run on."""
    resources: Mapping[str, float]
    """By Ray's names, ``CPU`` and ``GPU`` among them."""
    alone: float = 0.0
    """The part of the one node that it has to itself: all of it, or what goes with one of its GPUs."""

    @property
    def cores(self) -> int | None:
        """How many cores it is to keep to; None for all."""
        return None if self.alone else max(1, int(self.resources["CPU"]))

    @property
    def options(self) -> dict[str, Any]:
        """The same as the options of a Ray task."""
        named = {name: amount for name, amount in self.resources.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self.resources["CPU"],
            "num_gpus": self.resources.get("GPU", 0),
            "resources": named or None,
            "label_selector": {_NODE_LABEL: f"in({','.join(sorted(self.nodes))})"},
        }


@dataclass
class NodePool:
    """The nodes that may be used, and who waits for one to be alone on it."""

    jobs: int
    """General steps that one node does at a time."""
    nodes: dict[str, Node] = field(default_factory=dict)
    """By id, those that are alive and may be used."""
    kinds: dict[str, str] = field(default_factory=dict)
    """By id, what kind of machine it is: what was built on one holds for all of that kind."""
    _chosen: dict[Place, str] = field(default_factory=dict)
    """The kind of machine that stands for a place in this run."""
    _taken: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By node, the part of it that is taken by steps that are alone there, or wait for that."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def candidates(self, place: Place | None) -> list[Node]:
        """Nodes for steps of a place, all of one kind of machine; any node where there is no place."""
        with self._lock:
            return self._candidates(place)

    def had(self, place: Place) -> bool:
        """Whether there ever was a node for steps of that place."""
        return place in self._chosen

    @contextmanager
    def reserve(self, step: Step, avoided: Collection[str] = ()) -> Iterator[Reservation | None]:
        """Where to put a step now; None where no node is left. A node that it is to be alone on is kept for it."""
        with self._lock:
            candidates = [node for node in self._candidates(step.place) if node.id not in avoided]
            found = self._seat(step, candidates) if candidates else None
            self._take(found)
        try:
            yield found
        finally:
            with self._lock:
                self._take(found, -1)

    def room(self, step: Step, running: Collection[Step]) -> bool:
        """Whether to hand out one more: somewhat more than can run at a time, so that no node waits for work."""
        candidates = self.candidates(step.place)
        if not running or not candidates:
            return True
        if is_alone(step):
            waiting = sum(1 for other in running if is_alone(other) and other.place == step.place)
            return waiting < 2 * sum(_rooms(step, node) for node in candidates)
        with self._lock:
            open_ = [node for node in candidates if self._is_open(node)]
        share = self._share(candidates)
        general = sum(1 for other in running if not is_alone(other))
        return bool(open_) and general < sum(int(node.cpus / share) + 2 for node in open_)

    def _candidates(self, place: Place | None) -> list[Node]:
        fitting = [node for node in self.nodes.values() if node.fits(place)]
        if place is None or not fitting:
            return fitting
        if place not in self._chosen:
            counted = Counter(self.kinds.get(node.id, "") for node in fitting)
            self._chosen[place] = min(counted, key=lambda kind: (-counted[kind], kind))
        return [node for node in fitting if self.kinds.get(node.id, "") == self._chosen[place]]

    def _seat(self, step: Step, candidates: list[Node]) -> Reservation:
        named = {name: amount for name, amount in asked_for(step.place or Place()).items() if name != "GPU"}
        if is_alone(step):
            node = min(candidates, key=lambda one: (self._taken[one.id], one.id))
            gpus = {"": 0, "one": 1, "all": node.gpus}[step.task.gpus]
            rooms = _rooms(step, node)
            cpus = node.cpus if rooms == 1 else max(1.0, math.floor(node.cpus / rooms))
            return Reservation(frozenset([node.id]), {"CPU": cpus, "GPU": gpus, **named}, alone=1 / rooms)
        open_ = [node for node in candidates if self._is_open(node)] or candidates
        gpus = 1 if step.task.gpus else 0
        share = self._share(open_)
        return Reservation(frozenset(node.id for node in open_), {"CPU": share, "GPU": gpus, **named})

    def _take(self, seat: Reservation | None, sign: int = 1) -> None:
        if seat is not None and seat.alone:
            for node in seat.nodes:
                self._taken[node] += sign * seat.alone

    def _is_open(self, node: Node) -> bool:
        """Whether there is a part of it that nobody wants for himself."""
        return self._taken[node.id] < 0.99

    def _share(self, nodes: Collection[Node]) -> float:
        """CPUs of a general step: so that the usual node does as many at a time as one machine would."""
        share = statistics.median_low([node.cpus for node in nodes]) / self.jobs
        return float(math.floor(share)) if share >= 1 else math.floor(share * 1000) / 1000 or 0.001


def is_alone(step: Step) -> bool:
    """Whether nothing else may run beside it: a measurement, or what takes all GPUs."""
    return step.task.exclusive or step.task.gpus == "all"


def _rooms(step: Step, node: Node) -> int:
    """How many such steps can be alone on a node at a time: with a GPU each, where each takes one."""
    return max(1, node.gpus) if step.task.gpus == "one" else 1
