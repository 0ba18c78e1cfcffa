"""Which changes of enginesmith's own code make stored artifacts invalid."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_FOLDERS = ("calibration", "models", "pipeline")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code that can be changed, importable as ``enginesmith`` from its parent folder."""
    package = tmp_path_factory.mktemp("copy") / "enginesmith"
    for folder in _FOLDERS:
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "cli.py", package / "cli.py")
    return package


def _python(copy: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "ENGINESMITH_STORE": str(copy.parent / "store")}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _append(path: Path) -> None:
    with path.open("a") as file:
        file.write("# a word more\n")


def test_only_code_that_makes_artifacts_is_part_of_keys(copy: Path) -> None:
    code = "from enginesmith.pipeline.execution.executor import own_code; print(own_code())"
    before = _python(copy, "-c", code)
    for renders in ("report/markdown.py", "results/verdicts.py", "commands/optimize.py", "planning/planner.py"):
        _append(copy / "pipeline" / renders)
    assert _python(copy, "-c", code) == before
    for makes in ("pipeline/passes/simplify.py", "pipeline/engines/base.py", "calibration/histogram.py"):
        _append(copy / makes)
        after = _python(copy, "-c", code)
        assert after != before, makes
        before = after


def test_a_changed_word_in_a_report_leaves_every_engine_valid(copy: Path) -> None:
    out = copy.parent / "run"
    command = ("-m", "enginesmith.cli", "optimize", "digits", "--engine", "onnxruntime", "--precision", "int8")
    asked = (*command, "--measure-time", "0.3s", "--no-memory", "--out", str(out), "--json")
    _python(copy, *asked)
    _append(copy / "pipeline" / "report" / "markdown.py")
    shutil.rmtree(out)
    steps = json.loads(_python(copy, *asked))["steps"]
    assert steps
    assert [step["id"] for step in steps if not step["cached"]] == []
