"""Nodes of a Ray cluster: how they are reached and agree, what is booked on them, and what travels there."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.errors import MissingCapability, UsageError
from enginesmith.pipeline.execution.executor import StepRequest
from enginesmith.pipeline.execution.local import Gpus
from enginesmith.pipeline.execution.ray import connection, remote
from enginesmith.pipeline.execution.ray.connection import PROJECT, find_named_files, stage_folders
from enginesmith.pipeline.execution.ray.placement import (
    Node,
    NodeFingerprint,
    NodePool,
    NodeRequirement,
    explain_lack,
    live_nodes,
    own_fingerprint,
)
from enginesmith.pipeline.execution.ray.remote import claim_cores
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.tasks.base import Inputs, Task
from enginesmith.pipeline.tasks.load import Load


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
DRIVER = NodeFingerprint("3.11", "c0de" * 16, {"torch": "2.13.0", "onnx": "1.19.1"})


def node(name: str, cpus: float = 8, **resources: float) -> Node:
    return Node(name, "host", {"CPU": cpus, "memory": 1e9, "node:10.0.0.1": 1.0, **resources})


def pool(*nodes: Node, jobs: int = 2) -> NodePool:
    return NodePool(jobs, DRIVER, {node.id: node for node in nodes})


def step(task: Task, place: Place | None = None) -> Step:
    return Step("step", task, place=place)


def test_a_general_step_takes_a_share_of_a_usual_node_and_may_go_anywhere() -> None:
    with pool(node("a"), node("b"), node("c", cpus=64)).reserve(step(General())) as reservation:
        assert (reservation.nodes, reservation.resources) == ({"a", "b", "c"}, {"CPU": 4.0, "GPU": 0})
        assert reservation.cores == 4
        assert reservation.options == {
            "num_cpus": 4.0,
            "num_gpus": 0,
            "resources": None,
            "label_selector": {"ray.io/node-id": "in(a,b,c)"},
        }


def test_more_jobs_than_cpus_share_one() -> None:
    with pool(node("a", cpus=1), jobs=4).reserve(step(General())) as reservation:
        assert (reservation.resources["CPU"], reservation.cores) == (0.25, 1)


def test_a_step_with_a_place_goes_where_that_is() -> None:
    there = pool(node("a"), node("b", GPU=1, **{"accelerator_type:L4": 1.0}), node("c", edge=1))
    with there.reserve(step(General(takes="one"), Place("cuda", "L4"))) as reservation:
        assert (reservation.nodes, reservation.options["num_gpus"]) == ({"b"}, 1)
        assert reservation.options["resources"] == {"accelerator_type:L4": 0.001}
    with there.reserve(step(General(), Place(resources=(("edge", 0.5),)))) as reservation:
        assert (reservation.nodes, reservation.options["resources"]) == ({"c"}, {"edge": 0.5})
    with there.reserve(step(General(), Place("cuda", "H100"))) as reservation:
        assert reservation is None


def test_a_measurement_takes_a_node_that_others_then_leave_to_it() -> None:
    there = pool(node("a"), node("b"))
    with there.reserve(step(Alone())) as first:
        assert first.resources["CPU"] == 8
        assert first.cores is None
        (taken,) = first.nodes
        with there.reserve(step(Alone())) as second, there.reserve(step(General())) as general:
            assert second.nodes == {"a", "b"} - {taken}
            assert general.nodes == {"a", "b"}, "where all are taken, it waits at any"
        with there.reserve(step(General())) as general:
            assert general.nodes == {"a", "b"} - {taken}
    with there.reserve(step(General())) as general:
        assert general.nodes == {"a", "b"}


def test_each_gpu_of_a_node_can_be_measured_on() -> None:
    there = pool(node("a", cpus=16, GPU=4))
    with there.reserve(step(Alone(takes="one"), CUDA)) as reservation:
        assert (reservation.resources, reservation.cores) == ({"CPU": 4, "GPU": 1}, 4)
        with there.reserve(step(General(), CUDA)) as beside:
            assert beside is not None
    with there.reserve(step(General(takes="all"), CUDA)) as reservation:
        assert (reservation.resources, reservation.cores) == ({"CPU": 16, "GPU": 4}, None)
    with there.reserve(step(Alone(), CUDA)) as reservation:
        assert reservation.resources == {"CPU": 16, "GPU": 0}


def test_the_first_answer_chooses_the_kind_of_machine_for_a_place() -> None:
    """An engine that was built on one kind of machine is not measured on another."""
    there = pool(node("a"), node("b"), node("c"), node("unknown"))
    new, old = replace(DRIVER, kind="new"), replace(DRIVER, kind="old")
    assert there.requirement(Place()).kind == ""
    assert there.accept("b", new, "", Place()) == ""
    assert "is another kind of machine" in there.accept("a", old, "", Place())
    assert there.accept("c", new, "", Place()) == ""
    assert {one.id for one in there.candidates(Place())} == {"b", "c", "unknown"}
    assert there.requirement(Place()).kind == "new"
    assert there.was_available(Place())
    assert not there.was_available(CUDA)
    for gone in ("b", "c", "unknown"):
        there.drop(gone)
    assert there.candidates(Place()) == []
    assert [one.id for one in there.candidates(None)] == ["a"]


def test_a_node_that_differs_is_left_out() -> None:
    there = pool(node("a"), node("b"), node("c"))
    gpu = replace(DRIVER, packages={**DRIVER.packages, "tensorrt": "11.0"})
    assert there.accept("a", gpu, "", None) == ""
    other = replace(gpu, packages={**gpu.packages, "tensorrt": "10.13"})
    assert there.accept("b", other, "", None) == "host (b) is left out: tensorrt 10.13, and 11.0 on host (a)"
    assert there.accept("c", gpu, "the folder of the store is another one there", None)
    assert [one.id for one in there.candidates(None)] == ["a"]
    listed = {one.id: one for one in (node("a"), node("b"), node("c"), node("d"))}
    assert there.update(listed) == ["host (d) has joined the cluster"]
    assert "b" not in there.nodes
    why = there.explain_lack(Place(resources=(("edge", 1.0),)))
    assert "left out are host (b): tensorrt 10.13, and 11.0 on host (a); host (c): the folder" in why


def test_each_difference_of_a_node_is_named() -> None:
    requirement = NodeRequirement(DRIVER, {"tensorrt": ("11.0", "north")})
    assert requirement.mismatches(replace(DRIVER, kind="another processor", machine="other")) == []
    differing = replace(DRIVER, python="3.12", code="beef" * 16, packages={"torch": "2.12.0", "tensorrt": "10.13"})
    assert requirement.mismatches(differing) == [
        "Python 3.12, and here 3.11",
        "another version of enginesmith's own code (beefbeefbeef, here c0dec0dec0de)",
        "no onnx, and here 1.19.1",
        "torch 2.12.0, and here 2.13.0",
        "tensorrt 10.13, and 11.0 on north",
    ]


def test_the_fingerprint_of_this_machine() -> None:
    own = own_fingerprint()
    assert own == own_fingerprint()
    assert own.packages["torch"]
    assert "enginesmith" not in own.packages, "the code itself travels, and its digest is compared"
    assert len(own.code) == len(own.kind) == len(own.machine) == 64


def test_a_node_that_is_avoided_or_has_no_cpu_gets_nothing() -> None:
    there = pool(node("a"), node("b"), node("head", cpus=0))
    with there.reserve(step(General()), avoided={"b"}) as reservation:
        assert reservation.nodes == {"a"}
    with there.reserve(step(General()), avoided={"a", "b"}) as reservation:
        assert reservation is None


def test_there_is_room_for_somewhat_more_than_runs_at_a_time() -> None:
    there = pool(node("a"), node("b"))
    general, alone = step(General()), step(Alone(), Place())
    assert there.has_room(general, [])
    assert there.has_room(general, [general] * 7)
    assert not there.has_room(general, [general] * 8)
    assert there.has_room(alone, [general] * 8)
    assert there.has_room(alone, [alone] * 3)
    assert not there.has_room(alone, [alone] * 4)
    with there.reserve(alone), there.reserve(alone):
        assert not there.has_room(general, [alone, alone]), "all nodes are kept for measurements"


def test_what_is_lacking_is_told_with_what_there_is() -> None:
    nodes = [node("a"), node("b"), node("c", GPU=1, **{"accelerator_type:H100": 1.0})]
    assert explain_lack(Place(), nodes) == ""
    assert explain_lack(Place("cuda", "H100"), nodes) == ""
    assert explain_lack(Place("cuda", "H10"), nodes) == (
        "no node of the Ray cluster has a GPU of type H10 (did you mean GPU type H100?); "
        "there are: 2 × [CPU 8]; 1 × [CPU 8, GPU 1, GPU type H100]"
    )
    assert explain_lack(Place(resources=(("edge", 2.0),)), []).endswith("has edge 2; there are: it has no node")


@pytest.mark.parametrize("host", ["NodeManagerHostname", "NodeManagerAddress"])
def test_nodes_are_those_that_are_alive(host: str) -> None:
    listed = {"NodeID": "0123456789", "Alive": True, host: "north", "Resources": {"CPU": 2.0}}
    dead = {**listed, "NodeID": "dead", "Alive": False}
    found = live_nodes([listed, dead])
    assert found.keys() == {"0123456789"}
    assert found["0123456789"].name == "north (01234567)"


@pytest.mark.parametrize(
    "address", ["", "local", "12345", "http://head:8265", "ray://", "ray://head", "head", "ray:head:1", "a b:6379"]
)
def test_what_is_no_address_is_wrong_usage(address: str) -> None:
    with pytest.raises(UsageError, match="is no address of a Ray cluster"):
        connection.connect(address, [])


@pytest.mark.parametrize(
    "address", ["auto", "head:6379", "10.0.0.1:6379", "[::1]:6379", "ray://head.example:10001", "ray://[::1]:10001"]
)
def test_addresses(address: str) -> None:
    assert connection._ADDRESS.fullmatch(address)


@pytest.mark.parametrize(
    ("answer", "is_one"),
    [(b"HTTP/1.0 400 Bad Request\r\n\r\n", False), (b"", False), (b"\0\0\x06\x04\0\0\0\0\0\0\x03", True)],
    ids=["web", "silent", "grpc"],
)
def test_a_port_of_another_service_is_noticed(answer: bytes, is_one: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.recv(100)
                client.sendall(answer)

        serving = pool.submit(serve)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if is_one:
            connection._validate_reachable(address)
        else:
            with pytest.raises(MissingCapability, match="another service"):
                connection._validate_reachable(address)
        serving.result()


def touch(path: Path, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_code_and_project_travel_and_what_is_no_part_of_them_stays(tmp_path: Path) -> None:
    project, store = tmp_path / "project", tmp_path / "project/store"
    wanted = {"net.py", "data/train.npz", "ignored.npz", "queue.py"}
    unwanted = {".git/HEAD", ".env", "venv/pyvenv.cfg", "venv/lib.py", "runs/one/run.json", "runs/one/model.onnx"}
    unwanted |= {"store/objects/x", "__pycache__/net.pyc", ".gitignore"}
    for name in wanted | unwanted:
        touch(project / name)
    (project / "gone").symlink_to("nowhere")
    (project / "loop").symlink_to(".")
    with stage_folders(project, skip=store) as (code, files):
        found = {str(path.relative_to(files)) for path in Path(files).rglob("*") if path.is_file()}
        assert found == wanted
        assert (Path(files).name, Path(code).name) == (PROJECT, "enginesmith")
        assert (Path(files) / "data/train.npz").read_text() == "x"
        assert (Path(code) / "pipeline/execution/ray/remote.py").is_file()
        assert (Path(code) / "models/weights").is_dir()
        assert not [*Path(code).rglob("__pycache__")]
    assert not Path(files).exists()
    assert (project / "net.py").exists()


def test_too_much_is_refused_with_the_largest_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "small.py")
    touch(tmp_path / "weights/large.npz", "x" * 100)
    monkeypatch.setattr(connection, "_LARGEST_BYTES", 50)
    with (
        pytest.raises(UsageError, match="holds 101 B in 2 files: more than Ray takes") as caught,
        stage_folders(tmp_path, tmp_path / "s"),
    ):
        pass
    assert "the largest files are weights/large.npz (100 B), small.py" in caught.value.remedy
    monkeypatch.setattr(connection, "_MOST_FILES", 1)
    with pytest.raises(UsageError, match="holds more than 1 files"), stage_folders(tmp_path, tmp_path / "s"):
        pass


def test_files_that_a_step_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model given from the current folder travels with it; under its full path it has to be there on the nodes."""
    project = tmp_path / "project"
    touch(project / "net.py")
    touch(tmp_path / "other.py")
    monkeypatch.chdir(project)
    assert find_named_files(Load(source=resolve("net.py:build")), project) == ()
    assert find_named_files(Load(source=resolve("digits")), project) == ()
    for given in (f"{project}/net.py", f"{tmp_path}/other.py", "../other.py"):
        named = find_named_files(Load(source=resolve(f"{given}:build")), project)
        assert named == (os.path.normpath(project / given),)


def test_a_measurement_runs_on_its_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node with several GPUs, each measurement has a share of the cores; alone, it has them all."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    monkeypatch.setattr(remote.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(remote.worker, "run", lambda *args, cores, **options: cores)
    executor = remote._NodeExecutor(Store(tmp_path / "store"), jobs=1, gpus=Gpus(0))
    request = StepRequest(step(Alone()), {}, tmp_path / "log", lambda: None, print)
    for executor.cores, cores in ((2, {2, 3}), (None, None)):
        assert executor._run_in_worker(request, tmp_path, None) == cores


def test_two_processes_do_not_claim_the_same_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    with claim_cores(2, tmp_path) as first, claim_cores(1, tmp_path) as second:
        assert (first, second) == ({2, 3}, {5})
        with claim_cores(2, tmp_path) as third, claim_cores(2, tmp_path) as fourth:
            assert third == {7}, "fewer are free than wanted"
            assert fourth is None, "nobody waits for a core"
    with claim_cores(3, tmp_path) as again:
        assert again == {2, 3, 5}
    with claim_cores(4, tmp_path) as all_, claim_cores(None, tmp_path) as any_:
        assert all_ is any_ is None
