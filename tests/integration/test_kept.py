"""A run directory on another machine: its engines and answers are used there, as long as the model is the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from enginesmith.pipeline.execution.events import Event
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.workflows import optimize

pytest.importorskip("tensorrt_rtx")

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
        torch.nn.init.constant_(self.layer.weight, {weight})

    def forward(self, x):
        return self.layer(x).relu()

def build():
    torch.manual_seed(0)
    return Net(), torch.ones(2, 8)
"""
BUILD = "build-tensorrt_rtx-fp32-sm86"


class Elsewhere:
    """Another machine: a store of its own, and which steps were done there."""

    def __init__(self, folder: Path) -> None:
        self.steps: dict[str, str] = {}
        self.settings = Settings(store=folder, listener=self._saw)

    def _saw(self, event: Event) -> None:
        if event.kind == "started":
            self.steps[event.step.id] = "started"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a device, of a net in a file beside it."""
    home = tmp_path_factory.mktemp("kept")
    (home / "net.py").write_text(NET.format(weight=0.5))
    recipe = make(
        {
            "model": f"{home}/net.py:build",
            "engines": ["tensorrt_rtx"],
            "targets": ["sm86"],
            "inputs": ["x:float32:batch,8"],
        }
    )
    run = optimize.optimize(recipe, home / "run", Settings(store=home / "store"))
    assert [record.status for record in run.variants] == ["built"]
    assert run.winner is None
    assert not run.complete
    return home


def resumed(home: Path, tmp_path: Path) -> tuple[Any, dict[str, str]]:
    there = Elsewhere(tmp_path / "store")
    shutil.copytree(home / "run", tmp_path / "run")
    return optimize.resume(tmp_path / "run", there.settings), there.steps


def test_nothing_is_built_again(first: Path, tmp_path: Path) -> None:
    run, steps = resumed(first, tmp_path)
    assert set(steps) == {"load"}
    assert run.variants[0].status == "built"
    before = json.loads((first / "run/run.json").read_text())["variants"][0]
    assert run.variants[0].artifact.sha256 == before["artifact"]["sha256"]
    assert [entry.stage for entry in run.variants[0].fidelity] == [entry["stage"] for entry in before["fidelity"]]


@pytest.mark.thorough
def test_another_model_is_built_anew(first: Path, tmp_path: Path) -> None:
    text = (first / "net.py").read_text()
    try:
        (first / "net.py").write_text(NET.format(weight=0.25))
        run, steps = resumed(first, tmp_path)
    finally:
        (first / "net.py").write_text(text)
    assert {"export", "reference", BUILD} <= set(steps)
    assert any("not the one that this run was started with" in text for text in run.environment["warnings"])


@pytest.mark.thorough
def test_a_damaged_engine_is_built_again_with_what_it_needs(first: Path, tmp_path: Path) -> None:
    there = Elsewhere(tmp_path / "store")
    shutil.copytree(first / "run", tmp_path / "run")
    (engine,) = (tmp_path / "run/variants").glob("*/model.engine")
    engine.write_bytes(engine.read_bytes()[:-1])
    run = optimize.resume(tmp_path / "run", there.settings)
    assert {"export", "simplify", BUILD} <= set(there.steps)
    assert "reference" not in there.steps
    assert run.variants[0].status == "built"
    assert engine.stat().st_size > 0


@pytest.mark.thorough
def test_what_is_made_anew_is_held_against_eager_anew(tmp_path: Path) -> None:
    """A check of a graph or engine made here proves nothing about the one that is made there."""
    (tmp_path / "net.py").write_text(NET.format(weight=0.5))
    recipe = make(
        {
            "model": f"{tmp_path}/net.py:build",
            "engines": ["tensorrt_rtx", "onnxruntime"],
            "targets": ["sm86"],
            "inputs": ["x:float32:batch,8"],
            "measure": {"latency": False, "memory": False},
            "prosecute_seconds": 0,
        }
    )
    optimize.optimize(recipe, tmp_path / "run", Settings(store=tmp_path / "store"))
    there = Elsewhere(tmp_path / "other")
    optimize.resume(tmp_path / "run", there.settings)
    assert BUILD not in there.steps
    made = {"export", "simplify", "build-onnxruntime-fp32"}
    assert made <= set(there.steps)
    assert {f"verify-{step.removeprefix('build-')}" for step in made} <= set(there.steps)
