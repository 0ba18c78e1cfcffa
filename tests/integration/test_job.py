"""The main job on small models: what it leaves, what it reuses, what a failure takes down, and how it goes on."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnxruntime as ort
import psutil
import pytest

from enginesmith import Recipe, Run, Settings, load_run, optimize, resume
from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.execution.events import Event
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.results.run import json_schema

NETS = Path(__file__).parent.parent / "data" / "nets.py"
QUICK = {"seconds": 0.3, "precision": 0.5}
UNMEASURED = {"latency": False, "memory": False}
TRACED = {"exporter": "torchscript"}
"""The quicker exporter, where the other one is not what a test is about."""


def recipe(factory: str = "mlp", **changes: Any) -> Recipe:
    common = {"engines": ["onnxruntime"], "batch": [1, 3], "measure": QUICK, "threads": 1, "export": TRACED}
    return make({"model": f"{NETS}:{factory}", **common, **changes})


class Seen:
    """A listener that remembers which steps ran and which were reused."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.reused: list[str] = []
        self.lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self.lock:
            if event.kind == "started":
                self.ran.append(event.step.id)
            elif event.outcome and event.outcome.cached:
                self.reused.append(event.step.id)


def settings(tmp_path: Path, **changes: Any) -> Settings:
    return Settings(store=tmp_path / "store", **changes)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A finished run of the small model, with its store beside it."""
    folder = tmp_path_factory.mktemp("done")
    return folder, optimize(recipe(), folder / "run", settings(folder))


def test_the_run_directory_holds_all_that_is_promised(done: tuple[Path, Run]) -> None:
    folder, run = done
    names = {path.name for path in (folder / "run").iterdir()}
    assert {"run.json", "report.md", "environment.json", "variants", "logs"} <= names
    record = run.variants[0]
    assert record.status == "measured"
    session = ort.InferenceSession(folder / "run" / record.artifact.path)
    assert session.run(None, {"x": np.zeros((3, 4), np.float32)})[0].shape == (3, 3)
    manifest = json.loads((folder / "run/variants/onnxruntime-fp32/manifest.json").read_text())
    assert manifest["sha256"] == record.artifact.sha256


def test_run_json_is_valid_and_reads_back(done: tuple[Path, Run]) -> None:
    folder, run = done
    document = json.loads((folder / "run/run.json").read_text())
    jsonschema.validate(document, json_schema())
    assert document["schema"] == "enginesmith.run/1"
    assert load_run(folder / "run") == run


def test_numbers_are_there_or_have_a_reason(done: tuple[Path, Run]) -> None:
    run = done[1]
    record = run.variants[0]
    assert {row.batch for row in record.latency} == {1, 3}
    for row in record.latency:
        if row.speedup is not None:  # on a busy machine there are too few rounds
            assert row.speedup.low <= row.speedup.median <= row.speedup.high
        assert all(name in row.reasons for name, value in row if value is None and name not in ("failure", "oom"))
    assert record.memory.peak_bytes is not None
    assert record.quality is None
    assert record.reasons["quality"] == "not asked for"
    assert {entry.stage for entry in record.fidelity} == {"export", "simplify", "engine"}
    assert {entry.point for entry in record.fidelity} == {"min", "opt", "max", "between"}


def test_a_second_run_reuses_everything(done: tuple[Path, Run]) -> None:
    folder, run = done
    seen = Seen()
    again = optimize(recipe(), folder / "second", settings(folder, listener=seen))
    assert seen.ran == []
    assert again.variants == run.variants


@pytest.mark.thorough
def test_variants_share_their_prefix(done: tuple[Path, Run]) -> None:
    folder, _ = done
    seen = Seen()
    changed = recipe(graph_optimization=["all", "disabled"], batch=[1], measure={**QUICK, "memory": False})
    run = optimize(changed, folder / "two", settings(folder, listener=seen, jobs=2))
    assert {"load", "export", "simplify", "build-onnxruntime-fp32"} <= set(seen.reused)
    assert [record.status for record in run.variants] == ["measured", "measured"]
    assert {record.id for record in run.variants} == {"onnxruntime-fp32", "onnxruntime-fp32-disabled"}


@pytest.mark.thorough
def test_no_cache_does_every_step_again(done: tuple[Path, Run]) -> None:
    folder, run = done
    seen = Seen()
    again = optimize(recipe(measure=UNMEASURED), folder / "anew", settings(folder, reuse=False, listener=seen))
    assert seen.reused == []
    assert again.variants[0].artifact.sha256 == run.variants[0].artifact.sha256


def test_a_damaged_entry_is_made_again(done: tuple[Path, Run]) -> None:
    folder, run = done
    history = run.variants[0].history
    graphs = list((folder / "store/objects").glob("*/*/model.onnx"))
    assert len(history) == 4
    for graph in graphs:
        graph.write_bytes(graph.read_bytes()[:-7])
    seen = Seen()
    again = optimize(recipe(), folder / "mended", settings(folder, listener=seen))
    assert {"export", "simplify", "build-onnxruntime-fp32"} <= set(seen.ran)
    assert "load" in seen.reused
    assert again.variants[0].artifact.sha256 == run.variants[0].artifact.sha256


def test_a_wrong_graph_never_wins(tmp_path: Path) -> None:
    wrong = recipe("wrong_online", measure={**QUICK, "memory": False}, export={})
    with pytest.raises(EnginesmithError, match="no usable variant is left") as caught:
        optimize(wrong, tmp_path / "run", settings(tmp_path))
    assert "after export at min" in str(caught.value)
    run = load_run(tmp_path / "run")
    assert run.variants[0].status == "failed"
    assert run.variants[0].latency == ()
    assert run.winner in (None, "eager")
    assert "after export" in (tmp_path / "run/report.md").read_text()


OWN_METRICS = """
def misspelt(outputs, labels):
    return outputs["scores"]
def rare(outputs, labels):
    raise ValueError("no class")
"""


@pytest.mark.parametrize(
    ("changes", "engines", "reason"),
    [
        ({"metric": "own.py:misspelt"}, "onnxruntime", "reference: the metric own.py:misspelt raised Key"),
        ({"metric": "own.py:rare"}, "onnxruntime", "quality-eager: the metric own.py:rare raised ValueError: no class"),
        ({"metric": "own.py:rare"}, "eager", "quality-eager: the metric own.py:rare raised ValueError"),
        ({"model": "wrong_online"}, "onnxruntime", "export: the trace does not answer"),
    ],
)
def test_nothing_is_measured_once_no_variant_can_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], engines: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("data.npz", x=np.random.default_rng(0).random((6, 4), np.float32), labels=np.arange(6) % 3)
    Path("own.py").write_text(OWN_METRICS, encoding="utf-8")
    given = {"measure": QUICK, "engines": [engines], "eval_data": "data.npz", **changes}
    seen = Seen()
    with pytest.raises(EnginesmithError) as raised:
        optimize(recipe(given.pop("model", "mlp"), **given), tmp_path / "run", settings(tmp_path, listener=seen))
    assert raised.value.exit_code == (2 if "metric" in changes else 1)
    assert not {"latency", "memory-eager"} & set(seen.ran)
    latency = next(step for step in load_run(tmp_path / "run").steps if step.id == "latency")
    assert latency.status == "skipped"
    assert latency.effect.startswith(f"no variant can win any more: {reason}")


def test_a_crash_while_loading_is_told_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(EnginesmithError, match="SIGSEGV") as caught:
        optimize(recipe("segfault"), tmp_path / "run", settings(tmp_path))
    assert str(tmp_path / "run/logs/load.log") in caught.value.remedy
    assert load_run(tmp_path / "run").variants[0].status == "failed"


def test_budgets_come_before_the_objective(done: tuple[Path, Run]) -> None:
    folder, _ = done
    run = optimize(recipe(budgets={"max_memory_bytes": 1}), folder / "tight", settings(folder))
    assert run.winner is None
    assert [verdict.passed for verdict in run.verdicts] == [False]


@pytest.mark.thorough
def test_the_time_limit_leaves_a_run_to_resume(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    slow = recipe(f"slow_while(marker={str(marker)!r})", measure=UNMEASURED)
    with pytest.raises(EnginesmithError, match="time"):
        optimize(slow, tmp_path / "run", settings(tmp_path, time_limit_seconds=1.0))
    marker.unlink()
    run = resume(tmp_path / "run", settings(tmp_path))
    assert run.complete
    assert run.variants[0].artifact is not None


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, 130, marks=pytest.mark.thorough),
    ],
)
def test_a_run_that_is_stopped_can_be_resumed(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    model = f"{NETS}:slow_while(marker={str(marker)!r})"
    environment = {**os.environ, "ENGINESMITH_STORE": str(tmp_path / "store"), "ENGINESMITH_PRELOAD_ONLY": "torch"}
    once = {"engines": ["onnxruntime"], "batch": [1], "measure": UNMEASURED, "export": TRACED}
    (tmp_path / "recipe.yaml").write_text(json.dumps(once))
    started = [sys.executable, "-m", "enginesmith.cli", "optimize", model, "--out", "run", "--recipe", "recipe.yaml"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # jobs in the background are born deaf to it
    with subprocess.Popen(
        started, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    ) as process:
        _until(Path(f"{marker}.begun").exists)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(sent)
        _, said = process.communicate(timeout=120)
    assert process.returncode == code
    assert "Traceback" not in said
    assert ("interrupted; `enginesmith resume run` continues from here" in said) == (code == 130)
    assert load_run(tmp_path / "run").complete is False
    _until(lambda: not any(child.is_running() for child in children))
    marker.unlink()
    here = Path.cwd()
    assert resume(tmp_path / "run", settings(tmp_path)).complete
    assert Path.cwd() == here, "the run was begun elsewhere, and who goes on with it stays here"
    assert list((tmp_path / "store/tmp").iterdir()) == [] or sent == signal.SIGKILL


@pytest.mark.thorough
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_finished_result_stays_when_a_redone_measurement_is_stopped(tmp_path: Path, sent: signal.Signals) -> None:
    slow = recipe(batch=[1], measure={"seconds": 5.0, "precision": 0.001, "memory": False})
    run = optimize(slow, tmp_path / "run", settings(tmp_path))
    assert run.winner is not None
    before = (tmp_path / "run/run.json").read_bytes()
    words = [sys.executable, "-m", "enginesmith.cli", "resume", "run", "--no-cache", "--store", str(tmp_path / "store")]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        assert process.stderr is not None
        assert any(line.startswith("latency: started") for line in process.stderr)
        process.send_signal(sent)
        process.stderr.read()
    assert process.returncode in (130, -9)
    assert (tmp_path / "run/run.json").read_bytes() == before
    assert "No winner" not in (tmp_path / "run/report.md").read_text()
    assert resume(tmp_path / "run", settings(tmp_path)) == run, "nothing is left to do"


def _until(condition: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)
