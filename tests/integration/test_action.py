"""The steps of action.yml that are shell, run as they stand; those of other actions are GitHub's to run."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
EXPRESSION = re.compile(r"\$\{\{ (.+?) \}\}")
NETS = ROOT / "tests" / "data" / "nets.py"


class Runner:
    """Enough of a runner: inputs, outputs of steps, and what steps leave for later ones."""

    def __init__(self, home: Path, store: Path, inputs: Mapping[str, str]) -> None:
        self.home = home
        defaults = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
        self.known = {f"inputs.{name}": value for name, value in {**defaults, **inputs}.items()}
        self.output, self.summary = home / "output", home / "summary.md"
        self.output.touch()
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "ENGINESMITH_STORE": str(store),
            "RUNNER_TEMP": str(home),
            "GITHUB_OUTPUT": str(self.output),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_ACTIONS": "true",
        }

    def step(self, name: str) -> subprocess.CompletedProcess[str]:
        """Run a step as GitHub's shell ``bash`` does."""
        step: dict[str, Any] = next(one for one in ACTION["runs"]["steps"] if one["name"] == name)
        assert step["shell"] == "bash"
        script = self.home / "step.sh"
        script.write_text(step["run"])
        values = {key: EXPRESSION.sub(self._value, str(value)) for key, value in step.get("env", {}).items()}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.home,
            env={**self.environment, **values},
            capture_output=True,
            text=True,
            check=False,
        )

    def _value(self, found: re.Match[str]) -> str:
        name = found[1]
        if name.startswith("steps.gate.outputs."):
            wanted = name.rpartition(".")[2]
            lines = dict(line.split("=", 1) for line in self.output.read_text().splitlines())
            return lines[wanted]
        return self.known[name]


def test_no_step_puts_an_input_into_its_script() -> None:
    """What a pull request may decide goes through the environment, where the shell does not read it as code."""
    assert not [one["name"] for one in ACTION["runs"]["steps"] if "${{" in one.get("run", "")]


def test_optimize_gate_and_verdict(tmp_path: Path, store: Path) -> None:
    """A broken budget fails no step before the last: the report is uploaded and commented all the same."""
    options = "--batch 1 --measure-time 0.3s --no-memory --exporter torchscript --max-size '1 B'"
    runner = Runner(tmp_path, store, {"model": f"{NETS}:mlp", "options": options, "gate": "--max-latency '1 us'"})
    done = runner.step("Optimize")
    assert done.returncode == 0, done.stderr
    assert "1 B" in (tmp_path / "enginesmith-run" / "report.md").read_text()
    assert runner.summary.stat().st_size
    gate = runner.step("Gate")
    assert gate.returncode == 0, gate.stderr
    assert runner.step("Verdict").returncode == 3
    runner.output.write_text("exit-code=0\n")
    assert runner.step("Verdict").returncode == 0


@pytest.mark.parametrize(("document", "report"), [("run.json", "report.md"), ("fleet.json", "fleet.md")])
def test_what_is_called_for_runs_and_for_fleets(tmp_path: Path, store: Path, document: str, report: str) -> None:
    """The programs only say what they were called with."""
    runner = Runner(tmp_path, store, {"token": "t"})
    (tmp_path / "bin").mkdir()
    for name in ("enginesmith", "gh"):
        (tmp_path / "bin" / name).write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    runner.environment["PATH"] = f"{tmp_path / 'bin'}:{runner.environment['PATH']}"
    runner.known |= {"github.event.pull_request.number": "1", "github.repository": "a/b"}
    (tmp_path / "enginesmith-run").mkdir()
    for name in (document, report):
        (tmp_path / "enginesmith-run" / name).touch()
    assert runner.step("Optimize").stdout == "resume enginesmith-run\n"
    assert runner.step("Gate").stdout == "gate enginesmith-run\n"
    assert runner.step("Comment").stdout.endswith(f"--body-file enginesmith-run/{report}\n")


def test_a_wrong_option_ends_the_job(tmp_path: Path, store: Path) -> None:
    runner = Runner(tmp_path, store, {"model": f"{NETS}:mlp", "options": "--no-such-option; touch broken"})
    assert runner.step("Optimize").returncode == 2
    assert not (tmp_path / "broken").exists()
