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
    for name in ("__init__.py", "cli.py"):
        shutil.copyfile(ROOT / name, package / name)
    return package


def _python(copy: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "ENGINESMITH_STORE": str(copy.parent / "store")}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _append(path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("# a word more\n")


DIGESTS = """
import sys
from enginesmith.pipeline.execution.executor import own_code
print(own_code())
for path in sys.argv[1:]:
    with open(path, "a") as file:
        file.write("# a word more\\n")
    own_code.cache_clear()
    print(own_code())
"""


def test_only_code_that_makes_artifacts_is_part_of_keys(copy: Path) -> None:
    renders = ("report/markdown.py", "results/verdicts.py", "commands/optimize.py", "planning/planner.py")
    makes = ("passes/simplify.py", "engines/base.py", "../calibration/histogram.py")
    files = [str(copy / "pipeline" / name) for name in (*renders, *makes)]
    before, *after = _python(copy, "-c", DIGESTS, *files).split()
    assert after[: len(renders)] == [before] * len(renders)
    assert len({before, *after}) == 1 + len(makes)


@pytest.mark.thorough
def test_a_changed_word_in_a_report_leaves_every_engine_valid(copy: Path) -> None:
    model = f"{ROOT / 'tests' / 'data' / 'nets.py'}:mlp"
    out = copy.parent / "run"
    options = ("--engine", "onnxruntime", "--batch", "1", "--measure-time", "0.1s", "--no-memory", "--prosecute", "0s")
    command = ("-m", "enginesmith.cli", "optimize", model, *options, "--json", "--out", str(out))
    _python(copy, *command)
    with (copy / "pipeline" / "report" / "markdown.py").open("a") as file:
        file.write("# a word more\n")
    shutil.rmtree(out)
    steps = json.loads(_python(copy, *command))["steps"]
    assert steps
    assert [step["id"] for step in steps if not step["cached"]] == []
