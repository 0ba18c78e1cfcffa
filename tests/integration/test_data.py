"""Data of the user's through a whole run: images, texts and functions; what changed is read again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from enginesmith import Settings, optimize
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.results.run import Run

Cli = Callable[..., Any]

NET = """
import numpy as np
import torch
from torch import nn

def build():
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(*layers), {"x": torch.rand(2, 3, 8, 8)}

def feeds():
    for index in range(4):
        yield {"x": np.full((3, 8, 8), index, np.float32), "labels": index % 2}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET, encoding="utf-8")
    for name, shade in (("dark", 40), ("light", 200)):
        Path("photos", name).mkdir(parents=True)
        for index in range(3):
            image("photos", name, f"{index}.png", shade=shade + index)


def image(*parts: str, shade: int) -> None:
    Image.new("RGB", (12, 9), (shade, shade // 2, shade)).save(Path(*parts))


def run(store: Path, data: str, out: str, field: str = "eval_data") -> tuple[Run, dict[str, bool]]:
    """The run, and for each step whether it was reused."""
    reused: dict[str, bool] = {}

    def note(event: object) -> None:
        if event.kind == "finished" and event.outcome is not None:  # type: ignore[attr-defined]
            reused[event.step.id] = event.outcome.cached  # type: ignore[attr-defined]

    recipe = {
        "model": "net.py:build",
        "inputs": ["x:float32:batch,3,8,8"],
        field: data,
        "engines": ["onnxruntime"],
        "measure": {"latency": False, "memory": False},
        "prosecute_seconds": 0,
        "export": {"exporter": "torchscript"},  # the quicker one
    }
    return optimize(make(recipe), Path(out), Settings(store=store, listener=note)), reused


def samples(found: Run) -> list[int]:
    return [one.quality.samples for one in (found.baseline, *found.variants) if one.quality is not None]


@pytest.mark.thorough
def test_images_and_what_changes_about_them(tmp_path: Path) -> None:
    store = tmp_path / "store"
    found, _ = run(store, "photos", "runs/a")
    assert samples(found) == [6, 6]
    assert all(run(store, "photos", "runs/b")[1].values())
    image("photos", "dark", "3.png", shade=1)
    assert samples(run(store, "photos", "runs/c")[0]) == [7, 7]
    Path("photos/middle").mkdir()
    image("photos", "middle", "0.png", shade=128)
    assert samples(run(store, "photos", "runs/d")[0]) == [8, 8]
    Path("preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5]}), encoding="utf-8")
    _, reused = run(store, "photos", "runs/e")
    assert not reused["reference"]
    assert all(run(store, "photos", "runs/f")[1].values())


@pytest.mark.parametrize(("data", "count"), [("net.py:feeds", 4), ("net:feeds", 4), ("photos", 6)])
def test_functions_of_the_models_file_and_folders_of_images(tmp_path: Path, data: str, count: int) -> None:
    assert samples(run(tmp_path / "store", data, "runs/a")[0]) == [count, count]


@pytest.mark.thorough
def test_functions_and_what_changes_about_them(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for count in (4, 6):
        Path("data.py").write_text(NET.replace("range(4)", f"range({count})"), encoding="utf-8")
        assert samples(run(store, "data.py:feeds", f"runs/{count}")[0]) == [count, count]
        assert all(run(store, "data.py:feeds", f"runs/{count}, again")[1].values())


def test_arrays_in_a_mapped_file(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((5, 3, 8, 8), np.float32)
    np.savez("rows.npz", x=rows, labels=np.arange(5) % 2)
    assert samples(run(tmp_path / "store", "rows.npz", "runs/a")[0]) == [5, 5]


def write_samples(count: int = 60, **changes: object) -> str:
    """Write an .npz file of samples, and name it."""
    random = np.random.default_rng(0)
    arrays = {"x": random.random((count, 3, 8, 8), np.float32), "labels": np.arange(count) % 3, **changes}
    np.savez("samples.npz", **{name: array for name, array in arrays.items() if array is not None})  # type: ignore[arg-type]
    return "samples.npz"


@pytest.mark.thorough
def test_one_data_set_is_split_for_calibration_search_and_drop(store: Path) -> None:
    """Nothing of the part for judgement is read before the drop that is reported; the run tells how many each had."""
    recipe = {
        "model": "net.py:build",
        "inputs": ["x:float32:batch,3,8,8"],
        "data": write_samples(),
        "precisions": ["int8"],
        "quantization": {"search_steps": 1},
        "budgets": {"max_drop": 1.0},
        "measure": {"latency": False, "memory": False, "limits": False},
        "prosecute_seconds": 0,
        "export": {"exporter": "torchscript"},
    }
    found = optimize(make(recipe), Path("split"), Settings(store=store))
    assert found.model.parts == {"calibration": 20, "choice": 20, "judgement": 20}
    effects = {step.id: step.effect for step in found.steps}
    assert effects["calibrate"].startswith("20 samples of samples.npz,")
    assert "feeds from samples.npz (choice: 20 of 60)" in effects["reference"]
    assert samples(found) == [20, 20]
    (int8,) = found.variants
    assert int8.search[0].drop is not None
    told = "samples of samples.npz: 20 for calibration, 20 for choice, 20 for judgement"
    assert told in Path("split/report.html").read_text(encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "counts"),
    [("photos", [10, 10, 10]), ("net.py:many", [8, 8, 8]), ("samples.safetensors", [20, 20, 20])],
)
def test_data_of_any_form_is_split(form: str, counts: list[int], store: Path) -> None:
    for name, shade in (("dark", 40), ("light", 200)):
        for index in range(3, 15):
            image("photos", name, f"{index}.png", shade=shade + index)
    Path("net.py").write_text(
        NET + "\ndef many():\n    return (feed for _ in range(6) for feed in feeds())\n", encoding="utf-8"
    )
    with np.load(write_samples()) as arrays:
        save_file(dict(arrays), "samples.safetensors")
    found, _ = run(store, form, "out", "data")
    assert list(found.model.parts.values()) == counts
    assert samples(found) == [counts[2]] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 23}, "samples.npz has 23 samples, and 24 are needed: 8 each for calibration, choice, judgement"),
        ({"labels": None}, "the data has no labels, and the metric top1 needs them"),
        ({"x": np.ones((60, 3, 8, 9), np.float32)}, "'x' has the shape"),
        ({"x": np.ones((60, 3, 8, 8), np.int16)}, "'x' is int16, expected float32"),
        ({"x": None, "y": np.ones((60, 3, 8, 8), np.float32)}, "holds 'y', and the model takes 'x'"),
    ],
)
def test_data_that_cannot_be_split(changes: dict[str, Any], message: str, cli: Cli) -> None:
    options = ("--input", "x:float32:batch,3,8,8", "--max-drop", "0.01", "--exporter", "torchscript")
    done = cli("optimize", "net.py:build", "--data", write_samples(**changes), *options)
    assert done.code == 2
    assert message in done.stderr
