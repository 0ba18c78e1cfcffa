"""A distribution of somebody else's brings an engine, a pass and a metric, which are used by their names."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.passes.base import Pass

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tests" / "data" / "plugin_example"
OWN = ("--engine", "onnx_reference", "--pass", "clear-docs", "--metric", "within_one")
WORDS = ("optimize", "net.onnx", *OWN, "--no-simplify", "--eval", "data.npz", "--batch", "1", "--no-memory")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example installed into it."""
    folder = tmp_path_factory.mktemp("site")
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("example") / "source")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", str(folder), str(source)], check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a small graph and labeled data in it."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], doc_string="rectify")], "net", [x], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "net.onnx"
    )
    np.savez(tmp_path / "data.npz", x=np.eye(4, dtype=np.float32), labels=np.array([0, 1, 2, 0]))
    return tmp_path


def enginesmith(site: Path, home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "ENGINESMITH_STORE": str(home / "store")}
    command = [sys.executable, "-m", "enginesmith.cli", *words]
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=500)


@pytest.mark.thorough
def test_what_it_brings_is_used_by_name(site: Path, home: Path) -> None:
    done = enginesmith(site, home, *WORDS, "--measure-time", "0.3s", "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    (variant,) = json.loads((home / "run" / "run.json").read_text())["variants"]
    assert (variant["id"], variant["status"]) == ("onnx_reference-fp32", "measured")
    assert variant["latency"][0]["p50_ms"] > 0
    (entry,) = (entry for entry in variant["history"] if entry["step"] == "pass-clear-docs")
    assert entry["effect"] == "1 descriptions are gone"
    assert entry["parameters"]["fields"]["step"]["pass"] == "clear-docs"
    assert {"engine", "pass-clear-docs"} <= {one["stage"] for one in variant["fidelity"] if one["passed"]}
    assert (variant["quality"]["metric"], variant["quality"]["value"]) == ("within_one", 0.75)
    reported = enginesmith(home / "nothing", home, "report", "run")
    assert reported.returncode == 0, "a run is read where the plug-in is not installed: " + reported.stderr


def test_it_is_listed_and_not_imported(site: Path, home: Path) -> None:
    broken = shutil.copytree(site, home / "broken")
    (broken / "enginesmith_example.py").write_text("import not_there_at_all\n")
    listed = enginesmith(broken, home, "engines", "--json")
    assert listed.returncode == 0, listed.stderr
    (row,) = (row for row in json.loads(listed.stdout) if row["engine"] == "onnx_reference")
    assert "from a plug-in: enginesmith-example 0.1" in row["reason"]
    done = enginesmith(broken, home, *WORDS)
    assert done.returncode == 4, done.stderr
    assert "'onnx_reference' of enginesmith-example 0.1 cannot be loaded" in done.stderr
    assert "No module named 'not_there_at_all'" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--pass", "sharpen"), 2, "there is no pass 'sharpen'"),
        (("--pass", "sharpen"), 2, "clear-docs (of enginesmith-example)"),
        (("--metric", "top7"), 2, "map, wer=SPACE, within_one (of enginesmith-example)"),
        (("--pass", "clear-docs"), 4, "'clear-docs' of enginesmith-example 0.1 cannot be loaded"),
    ],
)
def test_the_unusable_is_explained(site: Path, home: Path, words: tuple[str, ...], code: int, message: str) -> None:
    broken = shutil.copytree(site, home / "broken")
    for name in ("pass", "metric"):
        (broken / f"enginesmith_example_{name}.py").write_text("import not_there_at_all\n")
    done = enginesmith(broken, home, "optimize", "net.onnx", "--eval", "digits", *words)
    assert done.returncode == code, done.stderr
    assert message in " ".join(done.stderr.split())


@pytest.mark.thorough
def test_engines_that_go_wrong_in_a_race_leave_the_others_measured(home: Path) -> None:
    """One hangs, one crashes, one answers wrong numbers: each has its reason, the time is kept, the exit code is 0."""
    folder = home / "faulty"
    about = folder / "faulty_engines-1.0.dist-info"
    about.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "data" / "faulty_engines.py", folder)
    names = {"hangs": "Hangs", "aborts": "Aborts", "wrong": "Wrong"}
    entries = "".join(f"{name} = faulty_engines:{kind}\n" for name, kind in names.items())
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty_engines\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[enginesmith.engines]\n{entries}")
    (about / "top_level.txt").write_text("faulty_engines\n")
    engines = [word for name in ("onnxruntime", "openvino", *names) for word in ("--engine", name)]
    limits = ("--time", "120s", "--batch", "1", "--measure-time", "1s", "--no-memory", "--prosecute", "0s")
    done = enginesmith(folder, home, "optimize", "net.onnx", *engines, *limits, "--out", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads((home / "out" / "run.json").read_text())
    assert run["complete"]
    records = {record["engine"]: record for record in run["variants"]}
    assert {name: records[name]["status"] for name in names} == dict.fromkeys(names, "failed")
    assert "it failed in the race: it ran past its time limit" in records["hangs"]["reason"]
    assert "it failed in the race: its process crashed (SIGABRT)" in records["aborts"]["reason"]
    assert "Extension modules" not in records["aborts"]["reason"]
    assert "SQNR" in records["wrong"]["reason"]
    others = [records[name]["status"] for name in ("onnxruntime", "openvino")]
    assert "measured" in others
    assert "failed" not in others
    assert run["winner"] in ("source", "onnxruntime-fp32", "openvino-fp32")  # as fast as each other


def test_the_document_shows_the_example() -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    files = sorted(EXAMPLE.glob("*.*"))
    assert len(files) == 4
    for file in files:
        assert file.read_text() in text


def test_the_document_names_what_the_contract_has() -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    named = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    names = {name for part in named for name in re.findall(r"`(\w+)", part)}
    assert len(names) > 30
    missing = {name for name in names if not hasattr(Engine, name) and not hasattr(Pass, name)}
    missing -= {*Engine.__annotations__, *Pass.__annotations__}
    assert not missing
