"""Steps on a Ray cluster of several nodes on this machine; the types of GPU that they have are only claimed."""

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from enginesmith.pipeline.errors import MissingCapability, SourceError, StepError
from enginesmith.pipeline.execution.executor import Result, StepRequest
from enginesmith.pipeline.execution.ray import connection
from enginesmith.pipeline.execution.ray import executor as ray
from enginesmith.pipeline.execution.ray.executor import RayExecutor
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import worker
from enginesmith.pipeline.tasks.base import Task

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install 'ray[client]'", allow_module_level=True)

MODULES = Path(__file__).parents[1] / "data/cluster"
"""What nodes import has to have a name there; they have this folder in their PYTHONPATH."""


def _module(name: str) -> ModuleType:
    if str(MODULES) not in sys.path:
        sys.path.append(str(MODULES))
    return importlib.import_module(name)


ray_tasks, ray_processes = _module("ray_tasks"), _module("ray_processes")

H100, L4 = Place(resources=(("fake_h100", 1),)), Place(resources=(("fake_l4", 1),))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head and two nodes, each with a cache of its own for shared stores."""
    caches = tmp_path_factory.mktemp("caches")
    with ray_processes.cluster(ENGINESMITH_CACHE=str(caches / "head")) as made:
        made.add('{"fake_h100": 2, "either": 1}', ENGINESMITH_CACHE=str(caches / "h100"))
        made.add('{"fake_l4": 2, "either": 1}', ENGINESMITH_CACHE=str(caches / "l4"), FULL_DISK="1")
        yield made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder of the shared store, and of a project."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def executor(cluster: Any, place: Path) -> Iterator[RayExecutor]:
    project = place / "project"
    project.mkdir()
    (project / "net.py").write_text("")
    (project / ".hidden").write_text("")
    before = list(worker._only)
    worker.preload_only(["json"])  # these tasks need no framework
    try:
        with RayExecutor(Store(f"file://{place}/store"), 2, cluster.address, project) as made:
            yield made
    finally:
        worker.preload_only(before)


class Teller:
    """Orders, and what was told of them."""

    def __init__(self, executor: RayExecutor, logs: Path) -> None:
        self.executor, self.logs = executor, logs
        self.lines: list[str] = []
        self.notes: dict[str, list[str]] = defaultdict(list)
        """By step."""
        self.started: list[str] = []

    def __call__(self, name: str, task: Task, place: Place | None = None, **inputs: Result) -> Result:
        request = StepRequest(
            Step(name, task, place=place),
            {role: found.artifact for role, found in inputs.items()},
            self.logs / f"{name}.log",
            lambda: self.started.append(name),
            self.lines.append,
            on_note=lambda text: self.note(name, text),
        )
        return self.executor.run(request)

    def note(self, name: str, text: str) -> None:
        self.lines.append(text)
        self.notes[name].append(text)

    def log(self, name: str) -> str:
        return (self.logs / f"{name}.log").read_text()


@pytest.fixture
def order(executor: RayExecutor, tmp_path: Path) -> Teller:
    return Teller(executor, tmp_path / "logs")


def written(result: Result) -> str:
    return result.artifact.path.read_text()


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.05)
    return found


@pytest.mark.thorough
def test_a_step_is_done_on_a_node_fed_from_the_store_and_found_again(order: Teller, place: Path) -> None:
    first = order("first", ray_tasks.Write(number=1))
    second = order("second", ray_tasks.Write(number=2, seconds=1.0), H100, model=first)
    assert written(second) == "1\n2\n"
    assert not first.cached
    assert not second.cached
    assert order.started == ["first", "second"]
    assert "number 2" in order.log("second")
    assert [entry.step for entry in second.artifact.history] == ["first", "second"]
    assert order("first", ray_tasks.Write(number=1)).cached
    assert order("second", ray_tasks.Write(number=2, seconds=1.0), H100, model=first).cached
    assert order.started == ["first", "second"]
    fresh = Store(f"file://{place}/store").fetch(second.artifact.key)
    assert fresh.sha256 == second.artifact.sha256


@pytest.mark.thorough
def test_a_command_leaves_what_it_leaves_here(cluster: Any, tmp_path: Path) -> None:
    """Byte for byte, and under the same keys, where modules are looked for in the same places."""
    shutil.copy(MODULES.parent / "nets.py", tmp_path)
    made, graphs, environment = {}, {}, {**os.environ, "PYTHONPATH": str(MODULES)}
    for executor, options in {"ray": ("--ray-address", cluster.address), "local": ()}.items():
        store, graph = tmp_path / f"store-{executor}", tmp_path / f"{executor}.onnx"
        command = [sys.executable, "-m", "enginesmith.cli", "export", "nets.py:mlp", "-o", str(graph), "--quiet"]
        command += ["--store", str(store), "--executor", executor, "--jobs", "1", *options]
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert "verify" not in run.stderr
        opened, graphs[executor] = Store(store), graph.read_bytes()
        made[executor] = {(one.step, one.key): opened.fetch(one.key).sha256 for one in opened.entries()}
    assert {step for step, _ in made["ray"]} >= {"load", "reference", "export"}
    assert made["ray"] == made["local"]
    assert graphs["ray"] == graphs["local"]


@pytest.mark.thorough
def test_a_process_there_sees_what_one_here_would_see(order: Teller) -> None:
    """Ray sets variables that change how many threads libraries start; the user's folder is the current one."""
    node = {"OMP_NUM_THREADS": None, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
    assert written(order("seen", ray_tasks.ShowSurroundings(number=0))) == f"{node} ['net.py']"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_where_nobody_listens_is_told_at_once(address: str) -> None:
    with pytest.raises(MissingCapability, match=f"there is no Ray cluster at {address}"):
        connection._validate_reachable(address)


@pytest.mark.thorough
def test_a_place_that_no_node_has_is_told_at_once(executor: RayExecutor) -> None:
    assert executor.why_unavailable(H100) == ""
    why = executor.why_unavailable(Place(resources=(("fake_h200", 1),)))
    assert why.startswith("no node of the Ray cluster has fake_h200 (did you mean fake_h100?)")
    assert "1 × [CPU 2, either, fake_l4 2]" in why
    assert "no node of the Ray cluster has a GPU of type B200" in executor.why_unavailable(Place("cuda", "B200"))


@pytest.mark.thorough
def test_measurements_have_a_node_to_themselves(order: Teller) -> None:
    """On another node general steps go on meanwhile."""
    with ThreadPoolExecutor(3) as pool:
        alone = [pool.submit(order, f"alone-{i}", ray_tasks.WriteAlone(number=i, seconds=0.5), L4) for i in (1, 2)]
        beside = pool.submit(order, "beside", ray_tasks.WriteQuickly(number=3))
        assert written(beside.result()) == "3\n"
        assert [written(one.result()) for one in alone] == ["1\n", "2\n"]
    # both want all CPUs of the one node, so that Ray cannot have run them together


@pytest.mark.thorough
def test_a_ray_worker_that_is_killed_is_no_failure(order: Teller, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    assert written(order("killed", ray_tasks.KillRayWorker(number=7, marker=marker))) == "7\n"


@pytest.mark.thorough
def test_a_node_with_a_full_disk_is_left_for_another_one(order: Teller, executor: RayExecutor) -> None:
    either = Place(resources=(("either", 1),))
    with ThreadPoolExecutor(2) as pool:  # each on its own node, one of which has no space left
        both = [pool.submit(order, f"room-{i}", ray_tasks.WriteWithRoom(number=i, seconds=3), either) for i in (1, 2)]
        assert [written(one.result()) for one in both] == ["1\n", "2\n"]
    moved = [name for name in ("room-1", "room-2") if "is full; it is run on another node" in str(order.notes[name])]
    assert len(moved) == 1
    assert len(executor._full) == 1


@pytest.mark.thorough
def test_what_was_removed_from_the_store_is_in_caches(order: Teller, executor: RayExecutor, place: Path) -> None:
    """Both directions: files of this machine for a node, and files of a node for this machine."""
    shared = Store(f"file://{place}/store", make=False)
    first = order("kept", ray_tasks.Write(number=40), H100)
    shared.prune(max_bytes=0)
    assert written(order("next", ray_tasks.Write(number=41), L4, model=first)) == "40\n41\n"
    shared.prune(max_bytes=0)
    shutil.rmtree(executor._store.root / "objects")
    again = order("kept", ray_tasks.Write(number=40), H100)
    assert again.cached
    assert written(again) == "40\n"


@pytest.mark.thorough
def test_a_step_that_fails_of_its_own_is_not_done_again(order: Teller) -> None:
    with pytest.raises(StepError, match="sleep length must be non-negative") as caught:
        order("failing", ray_tasks.Write(number=1, seconds=-1))
    assert str(order.logs / "failing.log") in caught.value.remedy
    assert "it was on" in caught.value.remedy
    assert order.log("failing").count("ValueError") == 1


@pytest.mark.thorough
def test_a_file_that_no_node_has_is_named(order: Teller, tmp_path: Path) -> None:
    """A file outside the copied folder is found only if the nodes share the disk; here they do."""
    here, hidden = tmp_path / "here", ".hidden"
    here.touch()
    assert written(order("there", ray_tasks.WriteWhile(number=1, marker=Path("net.pyx"), shown=here))) == "1\n"
    with pytest.raises(SourceError, match=r"\.hidden is not on the node"):
        order("hidden", ray_tasks.WriteNamed(number=1, file=hidden))


DRIVER = """
import json, sys, threading, time
from pathlib import Path
sys.path.append({modules!r})
import ray_tasks
from enginesmith.pipeline.system import worker
from enginesmith.pipeline.errors import StepError
from enginesmith.pipeline.execution.executor import StepRequest
from enginesmith.pipeline.execution.ray.executor import RayExecutor
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.store.store import Store

worker.preload_only(["json"])
here, started = Path({here!r}), threading.Event()

def order(executor, name, task, place=None):
    request = StepRequest(Step(name, task, place=place), {{}}, here / name, started.set, lambda text: None)
    return executor.run(request).artifact.path.read_text()

with RayExecutor(Store({store!r}), 2, {address!r}, Path({project!r})) as executor:
"""


def driver(code: str, **words: object) -> "subprocess.Popen[str]":
    """A process of its own with an executor."""
    text = DRIVER.format(modules=str(MODULES), **{name: str(value) for name, value in words.items()}) + code
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)


@pytest.mark.thorough
def test_a_client_of_the_cluster_that_stops(cluster: Any, tmp_path: Path) -> None:
    """From a machine that is no node; what runs is ended at once, and so is what waits for its turn."""
    marker, shown = tmp_path / "marker", tmp_path / "shown"
    marker.touch()
    shown.mkdir()
    code = f"""
    written = order(executor, "one", ray_tasks.Write(number=1))
    ends = []
    def long(task):
        try:
            order(executor, f"long-{{task.number}}", task, Place(resources={L4.resources}))
        except StepError as error:
            ends.append(error.message)
    begun = ray_tasks.WriteWhile(number=1, marker=Path({str(marker)!r}), shown=Path({str(shown)!r}))
    threads = [threading.Thread(target=long, args=(task,)) for task in (begun, ray_tasks.WriteAlone(number=2))]
    threads[0].start()
    while not (pids := [path.name.partition("-")[2] for path in Path({str(shown)!r}).iterdir()]): time.sleep(0.05)
    threads[1].start()
    executor.stop()
    before = time.monotonic()
    for thread in threads: thread.join()
    while (left := Path("/proc", pids[0]).exists()) and time.monotonic() < before + 10: time.sleep(0.05)
    print(json.dumps([written, ends, left]))
"""
    run = driver(code, here=tmp_path, store=tmp_path / "store", address=cluster.client, project=tmp_path)
    written, ends, left = json.loads(run.communicate(timeout=120)[0])
    assert written == "1\n"
    assert ends == ["it was ended", "it was ended"]
    assert not left, "what ran on the node goes on"


@pytest.mark.thorough
def test_a_run_that_is_killed_goes_on_where_it_was(cluster: Any, order: Teller, place: Path, tmp_path: Path) -> None:
    """The steps that were done are in the store, and those that ran on nodes ended with the run."""
    marker, shown = tmp_path / "marker", tmp_path / "shown"
    marker.touch()
    shown.mkdir()
    code = f"""
    order(executor, "before", ray_tasks.Write(number=20))
    order(executor, "during", ray_tasks.WriteWhile(number=21, marker=Path({str(marker)!r}), shown=Path({str(shown)!r})))
"""
    run = driver(code, here=tmp_path, store=f"file://{place}/store", address=cluster.address, project=place / "project")
    process = int(wait_for(lambda: [*shown.iterdir()], 60)[0].name.partition("-")[2])
    run.kill()
    run.communicate()
    wait_for(lambda: not Path(f"/proc/{process}").exists())
    marker.unlink()
    assert order("before", ray_tasks.Write(number=20)).cached
    assert written(order("during", ray_tasks.WriteWhile(number=21, marker=marker, shown=shown))) == "21\n"


@pytest.mark.thorough
def test_a_node_is_lost_one_joins(cluster: Any, order: Teller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that ran there are done again: beside it, or on a node of its kind that comes within the time of grace."""
    monkeypatch.setattr(ray, "_GRACE_SECONDS", 40.0)
    marker, shown = tmp_path / "marker", tmp_path / "shown"
    marker.touch()
    shown.mkdir()
    lost = cluster.nodes[1]
    task = ray_tasks.WriteWhile(number=5, marker=marker, shown=shown)
    with ThreadPoolExecutor(2) as pool:
        doing = pool.submit(order, "lost", task, H100)
        process = int(wait_for(lambda: [*shown.iterdir()])[0].name.partition("-")[2])
        lost.kill()
        wait_for(lambda: not Path(f"/proc/{process}").exists())
        marker.unlink()
        cluster.add('{"fake_h100": 2, "either": 1}', ENGINESMITH_CACHE=str(tmp_path / "cache"))
        assert written(doing.result()) == "5\n"
    assert " was lost; it is run again" in str(order.notes["lost"])
    assert any("has joined the cluster" in line for line in order.lines), order.lines


@pytest.mark.thorough
def test_a_target_that_is_gone_for_good(executor: RayExecutor, order: Teller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "_GRACE_SECONDS", 1.0)
    gone = Place(resources=(("fake_gone", 1),))
    executor._pool._chosen[gone] = "the kind that was there"
    with pytest.raises(MissingCapability, match="were lost, and none came back within 1 s: no node"):
        order("gone", ray_tasks.Write(number=1), gone)


@pytest.mark.thorough
def test_a_node_with_other_versions_is_refused(cluster: Any, order: Teller, tmp_path: Path) -> None:
    other = tmp_path / "packages/safetensors-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 0.0.1\n")
    node = cluster.add('{"other": 1}', PYTHONPATH=f"{other.parent}:{MODULES}")
    place = Place(resources=(("other", 1),))
    try:
        wait_for(lambda: order.executor.why_unavailable(place) == "")
        with pytest.raises(MissingCapability, match=r"left out are .*safetensors 0\.0\.1, and here") as caught:
            order("other", ray_tasks.Write(number=9), place)
        assert "install the same versions" in caught.value.remedy
        assert written(order("beside", ray_tasks.Write(number=9))) == "9\n"
    finally:
        node.kill()
