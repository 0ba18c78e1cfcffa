"""What is asked of nodes as Ray tasks, and what it means when Ray has no answer."""

import contextlib
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from enginesmith.pipeline.executors import node
from enginesmith.pipeline.executors.agreement import NodeFingerprint
from enginesmith.pipeline.executors.base import StepRequest
from enginesmith.pipeline.executors.cluster import Node
from enginesmith.pipeline.executors.connection import ray
from enginesmith.pipeline.executors.seats import Reservation

_NODE_ID = re.compile(r"node ID: ([0-9a-f]{40,})")


class NodeLost(Exception):
    """What was asked has no answer, and nobody's step is to blame; says what was lost."""

    def __init__(self, what: str, node_id: str = "") -> None:
        super().__init__(what)
        self.node_id = node_id
        """Of the node that is gone; empty where it may be there still."""


@dataclass
class RemoteStep:
    """A step that was sent to a node, or waits for one."""

    request: StepRequest
    seat: Reservation
    reference: Any
    """Ray's, to the answer."""
    node: str = ""
    """The node that it runs on, once that is known."""
    _begun: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Say that the step has to be done; once, whoever finds out first."""
        with self._lock:
            begun, self._begun = self._begun, True
        if not begun:
            self.request.on_start()


def lost(error: Exception, errand: RemoteStep, nodes: Mapping[str, Node]) -> NodeLost:
    """What an error of Ray's means for a step, in words."""
    kinds = ray().exceptions
    seats = [nodes[one].name for one in errand.seat.nodes if one in nodes]
    where = errand.node or (seats[0] if len(seats) == 1 else "a node")
    if isinstance(error, kinds.OutOfMemoryError):
        return NodeLost(f"Ray ended its process on {where}, because memory ran out there")
    if isinstance(error, kinds.WorkerCrashedError):
        return NodeLost(f"the Ray worker that did it on {where} was killed")
    gone = (kinds.NodeDiedError, kinds.ObjectLostError, kinds.LocalRayletDiedError, kinds.TaskUnschedulableError)
    if isinstance(error, gone):
        found = _NODE_ID.search(str(error))
        node_id = found[1] if found else next(iter(errand.seat.nodes)) if len(errand.seat.nodes) == 1 else ""
        return NodeLost(f"{nodes[node_id].name if node_id in nodes else where} was lost", node_id)
    words = " ".join(str(error).split())
    return NodeLost(f"{where} gave no answer ({type(error).__name__}: {words[:200]})")


def do(request: node.Request, news: Any) -> tuple[str, node.Answer]:
    """On a node: do a step; gives back the node's id, too."""
    context = ray().get_runtime_context()
    here = context.get_node_id()
    gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))

    def report(kind: str, text: str = "") -> None:
        with contextlib.suppress(ray().exceptions.RayError):  # news that nobody takes are no reason to fail
            news.put.remote(request.number, here, kind, text)

    return here, node.carry_out(request, gpus, report)


def look_up(request: node.Request) -> node.Answer | None:
    """On a node: what the store has of a step that depends on the machine."""
    return node.look_up(request)


def visit(what: node.Visit) -> tuple[NodeFingerprint, str]:
    """On a node: see what it is."""
    return node.visit(what)
