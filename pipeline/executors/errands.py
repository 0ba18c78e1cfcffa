"""Steps as Ray tasks, and what an error of Ray's means for a step."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginesmith.pipeline.errors import StepCrashed
from enginesmith.pipeline.executors import node
from enginesmith.pipeline.executors.agreement import NodeFingerprint
from enginesmith.pipeline.executors.cluster import Node
from enginesmith.pipeline.executors.connection import ray
from enginesmith.pipeline.executors.seats import Reservation

_NODE_ID = re.compile(r"node ID: ([0-9a-f]{40,})")


class NodeLost(Exception):
    """Every node that a step was reserved on is gone, and nobody's step is to blame; says what was lost."""

    def __init__(self, what: str, node_id: str = "") -> None:
        super().__init__(what)
        self.node_id = node_id
        """Of the node that is gone; empty where the pool knows it already."""


@dataclass(frozen=True)
class RemoteStep:
    """A step that was sent to a node, or waits for one."""

    reservation: Reservation
    reference: Any
    """Ray's, to the answer."""


def explain_loss(error: Exception, step: RemoteStep, nodes: Mapping[str, Node]) -> NodeLost | StepCrashed:
    """Say what an error means that is left when Ray has retried: a node that is gone, or a step that cannot be done."""
    kinds = ray().exceptions
    gone = (kinds.NodeDiedError, kinds.ObjectLostError, kinds.LocalRayletDiedError, kinds.TaskUnschedulableError)
    if isinstance(error, gone):
        match, reserved = _NODE_ID.search(str(error)), step.reservation.nodes
        node_id = match[1] if match else next(iter(reserved)) if len(reserved) == 1 else ""
        return NodeLost(f"{nodes[node_id].name if node_id in nodes else 'its node'} was lost", node_id)
    words = " ".join(str(error).split())
    return StepCrashed(
        f"Ray could not do it ({type(error).__name__}: {words[:200]})",
        "see `ray status`, Ray's logs, and whether the nodes have the memory for it",
    )


def do(request: node.Request) -> tuple[str, node.Answer]:
    """On a node: do a step; gives back the node's id, too."""
    context = ray().get_runtime_context()
    return context.get_node_id(), node.carry_out(request, tuple(map(str, context.get_accelerator_ids().get("GPU", ()))))


def look_up(request: node.Request) -> node.Answer | None:
    """On a node: look up what the store has of a step that depends on the machine."""
    return node.look_up(request)


def visit(what: node.Visit) -> tuple[NodeFingerprint, str]:
    """On a node: tell what it is."""
    return node.visit(what)
