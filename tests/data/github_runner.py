"""A stand-in of GitHub's runner and of its program ``gh``, for the action and for the workflows of docs/ci.md.

Steps that are shell are run as they are written; those of other actions are GitHub's to run, and are recorded.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "ci.md").read_text()
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
EXAMPLES = [text for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S) if "jobs:" in text]
COMMENT = next(yaml.safe_load(text) for text in EXAMPLES if "workflow_run:" in text)
FILES = ("GITHUB_ENV", "GITHUB_PATH", "GITHUB_OUTPUT", "GITHUB_STATE")
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
TERM = re.compile(r"'[^']*'|[A-Za-z_][\w.-]*(?:\(\))?|&&|\|\||!=|!")
PYTHON = f"""#!/bin/sh
case "$*" in
  "-m venv"*)
    mkdir -p "$4/bin"
    cp "$0" "$4/bin/python"
    printf '#!/bin/sh\\nexec {sys.executable} -m enginesmith.cli "$@"\\n' > "$4/bin/enginesmith"
    chmod +x "$4/bin/enginesmith" ;;
  "-m pip"*) printf '%s\\n' "$@" >> "$RUNNER_TEMP/pip" ;;
  *) exec {sys.executable} "$@" ;;
esac
"""
"""Python for the step Install: its environments have the tests' own packages, and pip notes what it is asked for."""


@dataclass
class Runner:
    """A runner with one job, whose only step is the action."""

    home: Path
    inputs: Mapping[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    used: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Steps of other actions, with what they were given."""
    commands: list[str] = field(default_factory=list)
    """Workflow commands that the runner would obey."""
    codes: dict[str, int] = field(default_factory=dict)
    log: str = ""

    def __post_init__(self) -> None:
        self.temp = Path(tempfile.mkdtemp(dir=self.home))
        python = self.temp / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)
        self.summary = self.temp / "summary.md"
        defaults = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
        self.facts = {
            **{f"inputs.{name}": value for name, value in {**defaults, **self.inputs}.items()},
            "github.action_path": str(ROOT),
            "github.event_name": "pull_request",
            "github.ref": "refs/pull/1/merge",
            "github.event.repository.default_branch": "main",
            "runner.temp": str(self.temp),
            "steps.python.outputs.python-path": str(python),
            **self.facts,
        }
        outer = {name: value for name, value in os.environ.items() if name != "ENGINESMITH_STORE"}
        self.environment = {**outer, "RUNNER_TEMP": str(self.temp), "GITHUB_ACTIONS": "true", **self.environment}

    def job(self, *names: str) -> dict[str, int]:
        """Run all steps, or those of these names, as far as their conditions hold; returns exit codes by name."""
        for step in ACTION["runs"]["steps"]:
            condition = step.get("if", "")
            failed = any(self.codes.values()) and "always()" not in condition
            if (names and step["name"] not in names) or failed or not self.evaluate(condition or "true"):
                continue
            if "uses" in step:
                given = {name: self.expand(str(value)) for name, value in step.get("with", {}).items()}
                self.used.append((step["uses"].partition("@")[0], given))
                self.facts[f"steps.{step.get('id')}.outputs.cache-primary-key"] = given.get("key", "")
            else:
                self._run(step)
        return self.codes

    def _run(self, step: dict[str, Any]) -> None:
        """Run a step as GitHub's shell ``bash`` does, and do what it has left in the runner's files and log."""
        values = {key: self.expand(str(value)) for key, value in step.get("env", {}).items()}
        files = {name: self.temp / "_runner_file_commands" / name.lower() for name in FILES}
        shutil.rmtree(self.temp / "_runner_file_commands", ignore_errors=True)
        (self.temp / "_runner_file_commands").mkdir()
        for path in files.values():
            path.touch()
        own = {**{name: str(path) for name, path in files.items()}, "GITHUB_STEP_SUMMARY": str(self.summary)}
        done = subprocess.run(
            [*BASH, step["run"]],
            cwd=self.home,
            env={**self.environment, **own, **values},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.log += done.stdout
        self.codes[step["name"]] = done.returncode
        self._obey(done.stdout)
        for line in files["GITHUB_ENV"].read_text().splitlines():
            self.environment |= [line.split("=", 1)]
        for line in files["GITHUB_PATH"].read_text().splitlines():
            self.environment["PATH"] = f"{line}:{self.environment['PATH']}"
        for line in files["GITHUB_OUTPUT"].read_text().splitlines():
            name, value = line.split("=", 1)
            self.facts[f"steps.{step['id']}.outputs.{name}"] = value

    def _obey(self, log: str) -> None:
        stopped = ""
        for line in log.splitlines():
            if not stopped and line.startswith("::stop-commands::"):
                stopped = line.removeprefix("::stop-commands::")
            elif stopped and line == f"::{stopped}::":
                stopped = ""
            elif not stopped and line.startswith("::"):
                self.commands.append(line)

    def expand(self, text: str) -> str:
        """Replace expressions by their values."""
        return re.sub(r"\$\{\{ (.+?) \}\}", lambda match: str(self.evaluate(match[1])), text)

    def evaluate(self, expression: str) -> Any:
        """Evaluate an expression of GitHub."""
        words = {"&&": " and ", "||": " or ", "!": " not ", "!=": "!=", "always()": "True", "true": "True"}

        def translate(match: re.Match[str]) -> str:
            word = match[0]
            return words.get(word) or (word if word.startswith("'") else repr(self.facts.get(word, "")))

        return eval(TERM.sub(translate, expression).strip())


@dataclass
class Make:
    """Makes runners with these inputs, which share a folder to work in."""

    home: Path
    store: Path

    def __call__(self, facts: Mapping[str, str] = {}, own: Path | str | None = "", **inputs: str) -> Runner:
        environment = {"ENGINESMITH_STORE": str(own or self.store)} if own is not None else {}
        given = {name.replace("_", "-"): value for name, value in inputs.items()}
        return Runner(self.home, given, environment, dict(facts))


def pretend(made: Runner, program: str = 'echo "$@"') -> Runner:
    """Install another program in the place of enginesmith."""
    made.job("Settings", "Install")
    Path(made.expand(ACTION["outputs"]["program"]["value"])).write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
    return made


GH = f"""#!{sys.executable}
import json, os, subprocess, sys
from pathlib import Path
path, call, words = "", {{"method": "", "fields": {{}}}}, iter(sys.argv[2:])
for word in words:
    if word in ("--method", "--jq"):
        call[word[2:]] = next(words)
    elif word in ("-f", "-F"):
        name, _, value = next(words).partition("=")
        call["fields"][name] = Path(value[1:]).read_text() if word == "-F" and value[0] == "@" else value
    elif word != "--paginate":
        path = word
here = Path(os.environ["GH"])
with (here / "calls").open("a") as calls:
    print(json.dumps([call["method"] or ("POST" if call["fields"] else "GET"), path, call["fields"]]), file=calls)
answers = json.loads((here / "answers").read_text())
if path not in answers:
    sys.exit("HTTP 403")
if isinstance(answers[path], str):
    sys.stdout.buffer.write(Path(answers[path]).read_bytes())
elif "jq" in call:
    sys.exit(subprocess.run(["jq", "-r", call["jq"]], input=json.dumps(answers[path]), text=True).returncode)
"""
"""GitHub's program ``gh``, with answers from a file; other paths are forbidden."""
MARK = "<!-- enginesmith report -->"
BOT = {"login": "github-actions[bot]"}


class Commenter:
    """Runs the step of the workflow that comments."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "bin").mkdir()
        (home / "bin" / "gh").write_text(GH)
        (home / "bin" / "gh").chmod(0o755)
        (home / "temp").mkdir()
        self.answers: dict[str, Any] = {
            "repos/o/r/pulls": [{"number": 7, "head": {"sha": "abc"}}, {"number": 8, "head": {"sha": "old"}}],
            "repos/o/r/issues/7/comments": [],
            "repos/o/r/actions/runs/5/artifacts?per_page=100": {"artifacts": []},
        }
        self.variables = {"BRANCH": "$(touch pwned)", "OWNER": "stranger", "SHA": "abc", "CONCLUSION": "failure"}
        self.variables |= {"GH_REPO": "o/r", "RUN_ID": "5", "RUN_URL": "https://x/5", "GH": str(home)}

    def add(self, name: str = "enginesmith-report-model", size: int = 100, **files: str) -> None:
        """Add an artifact of files, whose names have an underscore for the dot."""
        artifacts = self.answers["repos/o/r/actions/runs/5/artifacts?per_page=100"]["artifacts"]
        number = len(artifacts) + 1
        artifacts.append({"id": number, "name": name, "size_in_bytes": size})
        with zipfile.ZipFile(self.home / f"{number}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for file, text in files.items():
                archive.writestr(file.replace("_", "."), text)
            archive.writestr("../../escaped", "x")
        self.answers[f"repos/o/r/actions/artifacts/{number}/zip"] = str(self.home / f"{number}.zip")

    def run(self, path: str = os.environ["PATH"]) -> str:
        """Run the step, which never fails; returns what it printed."""
        (self.home / "answers").write_text(json.dumps(self.answers))
        (step,) = COMMENT["jobs"]["comment"]["steps"]
        assert set(step["env"]) - {"GH_TOKEN"} == set(self.variables) - {"GH"}
        environment = {"PATH": f"{self.home / 'bin'}:{path}", "RUNNER_TEMP": str(self.home / "temp"), **self.variables}
        answer = subprocess.run(
            [*BASH, step["run"]], cwd=self.home, env=environment, capture_output=True, text=True, check=False
        )
        assert answer.returncode == 0, answer.stderr
        assert not list(self.home.rglob("pwned")) + list(self.home.rglob("escaped"))
        return answer.stdout

    @property
    def written(self) -> list[tuple[str, str, str]]:
        """Method, path and text of what was written."""
        calls = [json.loads(line) for line in (self.home / "calls").read_text().splitlines()]
        return [(method, path, fields["body"]) for method, path, fields in calls if method != "GET"]


def open_commenter(home: Path) -> Commenter:
    """Make a commenter, where its programs are installed."""
    if not shutil.which("jq") or not shutil.which("unzip"):
        pytest.skip("GitHub's runners have jq and unzip, and this machine lacks one of them")
    return Commenter(home)
