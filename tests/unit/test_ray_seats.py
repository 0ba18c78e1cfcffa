"""Which nodes of a cluster a step may run on, and what is asked of Ray for it."""

from pathlib import Path
from typing import ClassVar, Literal

import pytest

from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.execution.ray.placement import Node, NodePool, lacking, nodes_of
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.tasks.base import Inputs, Task


class General(Task):
    title: ClassVar[str] = "general"
    produces: ClassVar[Kind] = "record"

    takes: Literal["", "one", "all"] = ""

    @property
    def gpus(self) -> Literal["", "one", "all"]:
        return self.takes

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        raise AssertionError("it is put somewhere, and not run")


class Alone(General):
    exclusive: ClassVar[bool] = True


CUDA = Place("cuda")


def node(name: str, cpus: float = 8, **resources: float) -> Node:
    return Node(name, "host", {"CPU": cpus, "memory": 1e9, "node:10.0.0.1": 1.0, **resources})


def seats(*nodes: Node, jobs: int = 2, **kinds: str) -> NodePool:
    return NodePool(jobs, {one.id: one for one in nodes}, {one.id: kinds.get(one.id, "same") for one in nodes})


def step(task: Task, place: Place | None = None) -> Step:
    return Step("step", task, place=place)


def test_a_general_step_takes_a_share_of_a_usual_node_and_may_go_anywhere() -> None:
    with seats(node("a"), node("b"), node("c", cpus=64)).reserve(step(General())) as seat:
        assert seat is not None
        assert seat.nodes == {"a", "b", "c"}
        assert seat.resources == {"CPU": 4.0, "GPU": 0}
        assert seat.cores == 4
        assert seat.options == {
            "num_cpus": 4.0,
            "num_gpus": 0,
            "resources": None,
            "label_selector": {"ray.io/node-id": "in(a,b,c)"},
        }


def test_more_jobs_than_cpus_share_one() -> None:
    with seats(node("a", cpus=1), jobs=4).reserve(step(General())) as seat:
        assert seat is not None
        assert (seat.resources["CPU"], seat.cores) == (0.25, 1)


def test_a_step_with_a_place_goes_where_that_is() -> None:
    there = seats(node("a"), node("b", GPU=1, **{"accelerator_type:L4": 1.0}), node("c", edge=1))
    with there.reserve(step(General(takes="one"), Place("cuda", "L4"))) as seat:
        assert seat is not None
        assert seat.nodes == {"b"}
        assert seat.options["num_gpus"] == 1
        assert seat.options["resources"] == {"accelerator_type:L4": 0.001}
    with there.reserve(step(General(), Place(resources=(("edge", 0.5),)))) as seat:
        assert seat is not None
        assert seat.nodes == {"c"}
        assert seat.options["resources"] == {"edge": 0.5}
    with there.reserve(step(General(), Place("cuda", "H100"))) as seat:
        assert seat is None


def test_a_measurement_takes_a_node_that_others_then_leave_to_it() -> None:
    there = seats(node("a"), node("b"))
    with there.reserve(step(Alone())) as first:
        assert first is not None
        assert first.resources["CPU"] == 8
        assert first.cores is None
        (taken,) = first.nodes
        with there.reserve(step(Alone())) as second, there.reserve(step(General())) as general:
            assert second is not None
            assert general is not None
            assert second.nodes == {"a", "b"} - {taken}
            assert general.nodes == {"a", "b"}, "where all are taken, it waits at any"
        with there.reserve(step(General())) as general:
            assert general is not None
            assert general.nodes == {"a", "b"} - {taken}
    with there.reserve(step(General())) as general:
        assert general is not None
        assert general.nodes == {"a", "b"}


def test_each_gpu_of_a_node_can_be_measured_on() -> None:
    there = seats(node("a", cpus=16, GPU=4))
    with there.reserve(step(Alone(takes="one"), CUDA)) as seat:
        assert seat is not None
        assert seat.resources == {"CPU": 4, "GPU": 1}
        with there.reserve(step(General(), CUDA)) as beside:
            assert beside is not None
    with there.reserve(step(General(takes="all"), CUDA)) as seat:
        assert seat is not None
        assert seat.resources == {"CPU": 16, "GPU": 4}
    with there.reserve(step(Alone(), CUDA)) as seat:
        assert seat is not None
        assert seat.resources == {"CPU": 16, "GPU": 0}


def test_a_place_is_one_kind_of_machine() -> None:
    """What was built on one kind is not measured on another."""
    there = seats(node("a"), node("b"), node("c"), a="old", b="new", c="new")
    assert {one.id for one in there.candidates(Place())} == {"b", "c"}
    assert there.had(Place())
    assert not there.had(CUDA)
    del there.nodes["b"], there.nodes["c"]
    assert there.candidates(Place()) == []
    assert [one.id for one in there.candidates(None)] == ["a"]


def test_a_node_that_is_avoided_or_has_no_cpu_gets_nothing() -> None:
    there = seats(node("a"), node("b"), node("head", cpus=0))
    with there.reserve(step(General()), avoided={"b"}) as seat:
        assert seat is not None
        assert seat.nodes == {"a"}
    with there.reserve(step(General()), avoided={"a", "b"}) as seat:
        assert seat is None


def test_there_is_room_for_somewhat_more_than_runs_at_a_time() -> None:
    there = seats(node("a"), node("b"))
    general, alone = step(General()), step(Alone(), Place())
    assert there.room(general, [])
    assert there.room(general, [general] * 7)
    assert not there.room(general, [general] * 8)
    assert there.room(alone, [general] * 8)
    assert there.room(alone, [alone] * 3)
    assert not there.room(alone, [alone] * 4)
    with there.reserve(alone), there.reserve(alone):
        assert not there.room(general, [alone, alone]), "all nodes are kept for measurements"


def test_what_is_lacking_is_told_with_what_there_is() -> None:
    nodes = [node("a"), node("b"), node("c", GPU=1, **{"accelerator_type:H100": 1.0})]
    assert lacking(Place(), nodes) == ""
    assert lacking(Place("cuda", "H100"), nodes) == ""
    assert lacking(Place("cuda", "H10"), nodes) == (
        "no node of the Ray cluster has a GPU of type H10 (did you mean GPU type H100?); "
        "there are: 2 × [CPU 8]; 1 × [CPU 8, GPU 1, GPU type H100]"
    )
    assert lacking(Place(resources=(("edge", 2.0),)), []).endswith("has edge 2; there are: it has no node")


@pytest.mark.parametrize("host", ["NodeManagerHostname", "NodeManagerAddress"])
def test_nodes_are_those_that_are_alive(host: str) -> None:
    listed = {"NodeID": "0123456789", "Alive": True, host: "north", "Resources": {"CPU": 2.0}}
    dead = {**listed, "NodeID": "dead", "Alive": False}
    found = nodes_of([listed, dead])
    assert found.keys() == {"0123456789"}
    assert found["0123456789"].name == "north (01234567)"
