"""The nodes of a Ray cluster as Ray tells them, and which of them are what a place asks for."""

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from enginesmith.pipeline.steps import Place

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
