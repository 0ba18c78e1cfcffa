"""Test what must never seem right: another model than the user's, stale results, files that failed their check."""

import contextlib
import runpy
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import numpy as np
import onnxruntime as ort
import psutil
import pytest
import torch

from enginesmith import Settings, load, load_run, optimize, resume
from enginesmith.pipeline.errors import FidelityError, MissingCapability, ShapeError, SourceError, UsageError
from enginesmith.pipeline.execution.events import Event
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.results.package.package import package
from enginesmith.pipeline.workflows.stages import export

HEAD = """
import torch
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        {init}

    def forward(self, x):
        return {forward}

def build():
    net = Net()
    {build}
    return net, torch.ones(2, 4)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(forward: str = "self.layer(x)", init: str = "pass", build: str = "pass", name: str = "net.py") -> str:
    Path(name).write_text(HEAD.format(init=init, forward=forward, build=build), encoding="utf-8")
    return f"{name}:build"


def answer(
    model: str, x: np.ndarray[tuple[int, int], np.dtype[np.float32]], settings: Settings, exporter: str = "torchscript"
) -> object:
    """Return what an exported model answers, by the quicker exporter if no other one is named; the file is removed."""
    export(make({"model": model, "batch": [1, 3], "export": {"exporter": exporter}}), Path("out/m.onnx"), settings)
    return ort.InferenceSession("out/m.onnx").run(None, {"x": x})[0]


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("init", "forward"),
    [
        ("self.noise = torch.randn(4)", "self.layer(x) + self.noise"),
        ("self.inverse = torch.linalg.inv(self.layer.weight.detach())", "self.layer(x) @ self.inverse"),
        ("assert self.layer.weight.min() > -0.51 and self.layer.weight.std() > 0.1", "self.layer(x)"),
    ],
    ids=["random attribute", "inverse of a weight", "expected to be drawn"],
)
def test_what_is_made_while_building_is_kept(init: str, forward: str, tmp_path: Path) -> None:
    model = write(forward, init)
    found = answer(model, X, Settings(store=tmp_path / "store"))
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        net, _ = runpy.run_path("net.py")["build"]()
        np.testing.assert_allclose(found, net(torch.from_numpy(X)), rtol=1e-4, atol=1e-4)  # type: ignore[call-overload]


def test_a_factory_that_builds_something_else_each_time_is_refused(tmp_path: Path) -> None:
    model = write("self.layer(x) + self.noise", "import random; self.noise = random.random()")
    with pytest.raises(SourceError, match="another model each time"):
        answer(model, X, Settings(store=tmp_path / "store"))


@pytest.mark.parametrize(
    ("init", "forward"),
    [
        ("pass", "torch.nn.functional.dropout(self.layer(x), training=True)"),
        ("self.calls = torch.zeros(1)", "self.layer(x) + self.calls.add_(1)"),
    ],
    ids=["random", "remembers"],
)
def test_a_model_that_does_not_repeat_itself_is_refused(init: str, forward: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="differently each time"):
        answer(write(forward, init), X, Settings(store=tmp_path / "store"))


def test_code_that_changes_meanwhile_stops_the_run(tmp_path: Path) -> None:
    model = write()

    def edit(event: Event) -> None:
        if event.step.id == "load" and event.kind == "finished":
            write("self.layer(x) * 100")

    with pytest.raises(SourceError, match="is not as it was"):
        answer(model, X, Settings(store=tmp_path / "store", listener=edit))
    write()
    plain = answer(model, X, Settings(store=tmp_path / "store"))
    assert np.abs(np.asarray(plain)).max() < 10


def test_changes_of_what_a_factory_reads_are_noticed(tmp_path: Path) -> None:
    settings = Settings(store=tmp_path / "store")
    zero = "[value.data.zero_() for value in net.parameters()]"
    load = "file = Path('w.pt'); file.exists() and net.load_state_dict(torch.load(file))"
    model = write(build=f"{zero}; {load}")
    assert np.abs(np.asarray(answer(model, X, settings))).max() == 0
    state = {"layer.weight": torch.eye(4), "layer.bias": torch.zeros(4)}
    torch.save(state, "w.pt")
    np.testing.assert_allclose(answer(model, X, settings), X, atol=1e-6)  # type: ignore[call-overload]
    torch.save({name: value * 2 for name, value in state.items()}, "w.pt")
    np.testing.assert_allclose(answer(model, X, settings), 2 * X, atol=1e-6)  # type: ignore[call-overload]


def test_a_graph_that_answers_otherwise_is_not_written(tmp_path: Path) -> None:
    nets = Path(__file__).parents[1] / "data" / "nets.py"
    with pytest.raises(FidelityError, match="differs from the original at min"):
        answer(f"{nets}:wrong_online", X, Settings(store=tmp_path / "store"), exporter="auto")
    assert not Path("out").exists()


def test_outputs_of_one_name_are_refused(tmp_path: Path) -> None:
    model = write("{'a': {'b': x}, 'a_b': self.layer(x)}")
    with pytest.raises(SourceError, match="both called 'a_b'"):
        answer(model, X, Settings(store=tmp_path / "store"))


def test_answers_of_nothing_but_nan_prove_nothing(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"all numbers .* are NaN or infinity"):
        answer(write("self.layer(x) * float('nan')"), X, Settings(store=tmp_path / "store"), exporter="auto")


def built(model: str) -> dict[str, object]:
    """A recipe of which nothing is measured."""
    measure = {"latency": False, "memory": False}
    once = {"engines": ["onnxruntime"], "batch": [1], "threads": 1, "export": {"exporter": "torchscript"}}
    return {"model": model, "measure": measure, **once}


@pytest.mark.thorough
def test_resume_takes_the_model_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(store=tmp_path / "store")
    for name, factor in (("one", 1), ("two", 50)):
        Path(name).mkdir()
        write(f"x * {factor}", name=f"{name}/net.py")
    monkeypatch.chdir(tmp_path / "one")
    first = optimize(make(built("net.py:build")), Path("run"), settings)
    monkeypatch.chdir(tmp_path / "two")
    again = resume(Path("../one/run"), settings)
    assert (again.variants[0].artifact, again.created) == (first.variants[0].artifact, first.created)


@pytest.mark.thorough
@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_a_damaged_engine_of_a_run_is_put_right(harm: str, tmp_path: Path) -> None:
    settings = Settings(store=tmp_path / "store")
    run = optimize(make(built(write())), Path("run"), settings)
    engine = Path("run") / run.variants[0].artifact.path
    whole = engine.read_bytes()
    if harm == "flip":
        engine.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        engine.unlink()
    resume(Path("run"), settings)
    assert engine.read_bytes() == whole


@pytest.mark.thorough
def test_a_session_that_was_killed_is_measured_again(tmp_path: Path) -> None:
    measure = {"seconds": 5.0, "precision": 0.0001, "memory": False}
    killed: list[int] = []

    def kill(event: Event) -> None:
        """Once sessions are measured: the listener is called when that begins, and when there is something to tell."""
        if event.step.id == "latency" and event.kind == "started":
            Thread(target=_kill_a_session, args=(killed,), daemon=True).start()

    run = optimize(
        make({**built(write()), "measure": measure}), Path("run"), Settings(tmp_path / "store", listener=kill)
    )
    assert len(killed) == 1
    assert "killed" in run.baseline.reason
    assert next(step for step in run.steps if step.id == "latency").effect.endswith("failed")
    again = resume(Path("run"), Settings(tmp_path / "store"))
    assert again.baseline.reason == ""
    assert again.baseline.latency[0].p50_ms
    assert load_run(Path("run")) == again


def _kill_a_session(killed: list[int]) -> None:
    """The process that writes to the baseline's log, when it is there for a moment already."""
    deadline = time.monotonic() + 60
    while not killed and time.monotonic() < deadline:
        time.sleep(0.05)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                log = Path(f"/proc/{child.pid}/fd/1").readlink()
                if log.name.startswith("latency-eager") and time.time() - child.create_time() > 0.7:
                    child.send_signal(signal.SIGKILL)
                    killed.append(child.pid)
                    break


UNMEASURED = {"batch": [1, 3], "measure": {"seconds": 0.2, "memory": False}, "prosecute_seconds": 0}


@pytest.mark.thorough
def test_a_module_is_loaded_from_any_folder_and_not_once_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINESMITH_STORE", str(tmp_path / "store"))
    monkeypatch.delitem(sys.modules, "net", raising=False)  # that of another test in this process
    optimize(make({"model": write(), "engines": ["eager"], **UNMEASURED}), tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    for folder, run in (tmp_path, "run"), (tmp_path / "elsewhere", "../run"):
        monkeypatch.chdir(folder)
        with load(run, "eager") as model:
            assert model(X).shape == X.shape
        assert Path.cwd() == folder
    monkeypatch.chdir(tmp_path)
    write("self.layer(x) * 2", "self.more = nn.Linear(2, 2)")
    with pytest.raises(
        UsageError, match=r"another model than that of \S*run: it has changed .* earlier version"
    ) as told:
        load("run", "eager")
    assert "engine file" in told.value.remedy


@pytest.mark.thorough
def test_an_engine_of_machine_code_is_loaded_from_a_trusted_run_and_a_trusted_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINESMITH_STORE", str(tmp_path / "store"))
    optimize(make({"model": write(), "engines": ["aotinductor"], **UNMEASURED}), tmp_path / "run")
    done = package(tmp_path / "run", "bundle", tmp_path / "bundle", "aotinductor-fp32")
    assert done.check.startswith("not run: the engine has machine code")
    trusted = package(tmp_path / "run", "bundle", tmp_path / "tried", "aotinductor-fp32", trust=True)
    assert trusted.check == "its answers match the test vector"
    with load("run", "aotinductor-fp32", trust=True) as model:
        wanted = model(X)
    for folder, variant in (("run", "aotinductor-fp32"), ("bundle", None)):
        with pytest.raises(MissingCapability, match="machine code") as refused:
            load(folder, variant)
        assert "trust=True" in refused.value.remedy
    with load("bundle", trust=True) as model, ThreadPoolExecutor(4) as threads:
        assert model.check().passed
        assert all(np.array_equal(each, wanted) for each in threads.map(model, [X] * 40))
        with pytest.raises(ShapeError, match="batch is 0"):
            model(X[:0])
