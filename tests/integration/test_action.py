"""The GitHub action and the workflows of docs/ci.md, run under a stand-in of GitHub's runner, and checked by linters.

Steps that are shell are run as they are written; those of other actions are GitHub's to run, and are recorded.
"""

import importlib.util
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
from xml.etree import ElementTree

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "ci.md").read_text()
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
EXAMPLES = [text for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S) if "jobs:" in text]
GITLAB = [text for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S) if "jobs:" not in text]
COMMENT = next(yaml.safe_load(text) for text in EXAMPLES if "workflow_run:" in text)
NETS = ROOT / "tests" / "data" / "nets.py"
BRIEFLY = "--batch 1 --measure-time 0.3s --no-memory --exporter torchscript"
REPORTS = {"report.md", "report.html", "fleet.md", "fleet.html", "junit.xml"}
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


@pytest.fixture
def make(tmp_path: Path, store: Path) -> Make:
    return Make(tmp_path, store)


def pretend(made: Runner, program: str = 'echo "$@"') -> Runner:
    """Install another program in the place of enginesmith."""
    made.job("Settings", "Install")
    Path(made.expand(ACTION["outputs"]["program"]["value"])).write_text(f"#!/bin/sh\n{program}\n")
    return made


def test_no_script_has_an_expression_in_it_and_the_action_has_no_token() -> None:
    """What a pull request may decide goes through the environment, where the shell does not read it as code."""
    scripts = [*ACTION["runs"]["steps"], *COMMENT["jobs"]["comment"]["steps"]]
    assert not [step["name"] for step in scripts if "${{" in step.get("run", "")]
    assert not re.search(r"github\.token|secrets\.|GH_TOKEN", (ROOT / "action.yml").read_text())


@pytest.mark.parametrize("text", [(ROOT / "action.yml").read_text(), PAGE], ids=["action.yml", "ci.md"])
def test_actions_of_others_are_pinned_by_hash_with_their_version_beside_it(text: str) -> None:
    others = [line for line in re.findall(r"uses: (.+)", text) if not line.startswith("OWNER/")]
    assert [line for line in others if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "--a 'b") for name in ("options", "gate", "pip_options")),
        ("gate", '--max-latency 5ms "--max-size 1MiB'),
        ("stage", "biuld"),
        ("name", "a/b"),
        ("name", "$(touch pwned)"),
        ("flavour", "tpu"),
        ("extras", "hf]; touch pwned"),
        ("save_store", "sometimes"),
        ("run", "a\nrun=b"),
        ("store", "--x"),
        ("model", "--help"),
        ("model", ""),
    ],
)
def test_an_input_that_is_not_valid_is_refused_before_anything_runs(make: Make, name: str, value: str) -> None:
    made = make(**{"model": "net.py:build", name: value})
    assert made.job() == {"Settings": 2}
    assert made.commands[0].startswith("::error title=enginesmith::")
    assert not (made.home / "pwned").exists()


MAIN = {"github.event_name": "push", "github.ref": "refs/heads/main"}


@pytest.mark.parametrize(
    ("inputs", "facts", "own", "cached", "saved"),
    [
        ({}, {}, False, True, False),
        ({}, MAIN, False, True, True),
        ({}, MAIN | {"github.ref": "refs/heads/other"}, False, True, False),
        ({}, MAIN | {"github.event_name": "pull_request_target"}, False, True, False),
        ({"save_store": "always"}, {}, False, True, True),
        ({"save_store": "never"}, MAIN, False, True, False),
        ({"save_store": "always"}, MAIN, True, False, False),
        ({"save_store": "always", "store": "s3://b/c"}, MAIN, True, False, False),
    ],
)
def test_the_store_is_saved_after_failures_too_on_the_main_branch_and_is_the_users_if_he_names_one(
    make: Make, tmp_path: Path, inputs: dict[str, str], facts: dict[str, str], own: bool, cached: bool, saved: bool
) -> None:
    made = make(facts, tmp_path / "own" if own else None, model="net.py:build", **inputs)
    pretend(made, 'mkdir -p "$ENGINESMITH_STORE"; echo "$1 $ENGINESMITH_STORE"; echo "$@"; [ "$1" != optimize ]')
    assert made.job()["Optimize"] == 1
    used = [name for name, _ in made.used]
    assert ("actions/cache/restore" in used, "actions/cache/save" in used) == (cached, saved)
    place = inputs.get("store") or (tmp_path / "own" if own else made.temp / "enginesmith-store")
    assert f"optimize {place}\n" in made.log
    assert ("--max-size 4GiB" in made.log) == saved
    assert "ENGINESMITH_STORE" not in made.environment or own, "later steps of the user are not changed"


def test_what_is_installed_is_what_was_asked_for_once_a_job(make: Make) -> None:
    (make.home / "needs.txt").write_text("x\n")
    inputs = {"extras": "hf,timm", "requirements": "needs.txt", "pip_options": "--extra-index-url 'https://a b'"}
    made = make(MAIN, model="net.py:build", pip_cache="true", constraints="false", **inputs)
    path = made.environment["PATH"]
    made.job("Settings", "Restore packages", "Install", "Save packages")
    made.job("Install")
    asked = (made.temp / "pip").read_text().splitlines()
    assert asked.count("install") == 1, "a second model of the job finds it installed"
    assert asked[-5:] == ["--extra-index-url", "https://a b", "-r", "needs.txt", f"{ROOT}[cpu,hf,timm]"]
    assert not [word for word in asked if "constraints" in word]
    keys = {name: given["key"] for name, given in made.used}
    made.job("Python")
    assert made.used[-1][1]["update-environment"] == "False", "the Python of the user's steps stays theirs"
    assert keys["actions/cache/restore"] == keys["actions/cache/save"]
    assert made.environment["PATH"] == path, "programs of the environment are called by their paths"
    constrained = make(model="net.py:build")
    constrained.job("Settings", "Install")
    assert f"-c\n{ROOT}/constraints.txt\n" in (constrained.temp / "pip").read_text()


@pytest.mark.parametrize("document", ["run.json", "fleet.json"])
def test_a_folder_with_a_run_is_resumed_with_the_options(make: Make, document: str) -> None:
    folder = make.home / "enginesmith-run-net"
    folder.mkdir()
    (folder / document).touch()
    made = pretend(
        make(name="net", options="--jobs 2 --time-limit '5 min'", gate="--tolerance '5 %'"), 'printf "%s|" "$@"'
    )
    assert set(made.job().values()) == {0}
    assert "resume|enginesmith-run-net|--jobs|2|--time-limit|5 min|" in made.log
    assert "gate|enginesmith-run-net|--tolerance|5 %|" in made.log


@pytest.mark.parametrize(
    ("inputs", "there", "asked", "warned"),
    [
        ({}, False, "", True),
        ({}, True, " --baseline base", False),
        ({"gate": "--strict"}, False, " --strict --baseline base", False),
        ({"update_baseline": "true"}, False, " --baseline base --update-baseline", False),
        ({"baseline": ""}, False, "", False),
    ],
)
def test_a_missing_baseline_is_a_warning_unless_the_gate_is_strict(
    make: Make, inputs: dict[str, str], there: bool, asked: str, warned: bool
) -> None:
    (make.home / "base").mkdir() if there else None
    made = pretend(make(**{"model": "m", "baseline": "base", **inputs}))
    made.job()
    assert f"gate enginesmith-run-model{asked}\n" in made.log
    assert any(line.startswith("::warning title=gate::there is no baseline") for line in made.commands) == warned


def test_several_models_of_one_workflow_share_no_name(make: Make) -> None:
    names = set()
    for name in ("a", "b"):
        for stage in ("build", "all"):
            made = pretend(make(MAIN, None, name=name, model="m", stage=stage), 'mkdir -p "${ENGINESMITH_STORE:-.}"')
            made.job()
            used = [(step, given.get("name") or given["key"]) for step, given in made.used[1:]]
            names |= {f"{stage} {step} {given}" for step, given in used if "/restore" not in step}
            assert made.facts["steps.settings.outputs.run"] == f"enginesmith-run-{name}"
            uploads = {given for step, given in used if step == "actions/upload-artifact"}
            both = {f"enginesmith-run-{name}", f"enginesmith-report-{name}"}
            assert uploads == ({f"enginesmith-build-{name}"} if stage == "build" else both)
    assert len(names) == 10


def test_confidential_data_stays_out_of_the_artifacts(make: Make) -> None:
    made = pretend(make(model="m", upload="report", retention_days="3"))
    made.job()
    uploads = [given for name, given in made.used if name == "actions/upload-artifact"]
    assert [(one["name"], one["retention-days"]) for one in uploads] == [("enginesmith-report-model", "3")]
    assert {Path(line).name for line in uploads[0]["path"].split()} == REPORTS


# Real runs.


@pytest.fixture(scope="module")
def done(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A job that ended with a missed budget, which several tests look at."""
    home = tmp_path_factory.mktemp("done")
    hostile = home / "`touch pwned` <b>@me|.py"
    shutil.copy(NETS, hostile)
    inputs = {"model": f"{hostile.name}:mlp", "options": f"{BRIEFLY} --max-size '1 B'", "gate": "--max-latency '1 min'"}
    made = Runner(home, inputs, {"ENGINESMITH_STORE": str(store)})
    made.job()
    return made


def test_a_missed_budget_fails_the_job_after_the_uploads(done: Runner) -> None:
    assert done.codes == {"Settings": 0, "Install": 0, "Optimize": 0, "Gate": 0, "Verdict": 3}, done.log
    assert done.facts["steps.gate.outputs.exit-code"] == "3"
    assert [given["name"] for name, given in done.used[-2:]] == ["enginesmith-run-model", "enginesmith-report-model"]
    assert [line for line in done.commands if line.startswith("::error title=gate::")]
    assert "enginesmith-run-model" in done.summary.read_text()
    folder = done.home / "enginesmith-run-model"
    assert {path.name for path in folder.iterdir()} >= REPORTS - {"fleet.md", "fleet.html"}
    assert not [path for path in folder.rglob("*") if re.search('[":<>|*?]', str(path.relative_to(folder)))], (
        "not uploaded"
    )


def test_another_model_in_the_same_folder_is_refused_and_a_run_that_meets_its_budgets_passes(
    done: Runner, tmp_path: Path, commenter: "Commenter"
) -> None:
    shutil.copytree(done.home, tmp_path / "home", ignore=shutil.ignore_patterns("temp"))
    made = Runner(tmp_path / "home", {"model": f"{NETS}:wide"}, done.environment)
    assert made.job() == {"Settings": 0, "Install": 0, "Optimize": 2}
    assert "another recipe" in made.log
    base, again = (tmp_path / "home" / name for name in ("base", "again"))
    again.mkdir()
    shutil.copytree(done.home / "enginesmith-run-model", base)
    document = json.loads((base / "run.json").read_text())
    document["model"]["source"] = f"{done.inputs['model']}::error::\n::error::forged"
    (base / "run.json").write_text(json.dumps(document))
    gate = "--max-size 1GiB --variant onnxruntime-fp32 --no-measure"
    resumed = Runner(again, {"run": "../enginesmith-run-model", "gate": gate, "baseline": "../base"}, done.environment)
    assert set(resumed.job().values()) == {0}, resumed.log
    assert not [line for line in resumed.commands if not line.startswith("::warning title=gate::")]
    report = (tmp_path / "home" / "enginesmith-run-model" / "report.md").read_text()
    assert "\\`touch pwned\\` &lt;b>@\u200bme\\|.py:mlp" in report, "the name of the model, escaped"
    assert report.index("## Gate: passed") < report.index("## Result")
    suite = ElementTree.parse(tmp_path / "home" / "enginesmith-run-model" / "junit.xml").find("testsuite[@name='gate']")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("3", "0")
    commenter.add(report_md=report)
    commenter.run()
    ((_, _, text),) = commenter.written
    assert "&lt;b>" in text
    assert not re.search("<(?!!-- enginesmith report -->)", text)


HOSTILE = """
import glob, os
from nets import mlp

def build():
    for path in glob.glob(os.environ["RUNNER_TEMP"] + "/_runner_file_commands/*"):
        open(path, "a").write("exit-code=0\\nLD_PRELOAD=hostile.so\\n")
    for name in ("ENV", "PATH", "OUTPUT", "STATE"):
        assert "GITHUB_" + name not in os.environ
    process, words = os.getpid(), ""
    while "--noprofile" not in words:
        words = open(f"/proc/{process}/cmdline").read()
        with open(f"/proc/{process}/fd/1", "w") as stream:
            for command in ("set-env name=X::y", "add-mask::a", "error::forged", "stop-commands::mine", "mine::"):
                stream.write("\\n::" + command + "\\n")
        process = int(open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1])
    for path in glob.glob(os.environ["RUNNER_TEMP"] + "/enginesmith-*/bin/enginesmith"):
        open(path, "w").write("#!/bin/sh\\nexit 0\\n")
    return mlp()
"""


@pytest.mark.thorough
def test_a_hostile_model_gets_neither_commands_nor_variables_through_and_cannot_replace_the_gate(make: Make) -> None:
    shutil.copy(NETS, make.home / "nets.py")
    (make.home / "hostile.py").write_text(HOSTILE)
    made = make(MAIN, model="hostile.py:build", options=f"{BRIEFLY} --no-cache")
    before = dict(made.environment)
    codes = made.job()
    assert (codes["Optimize"], codes["Gate"]) == (0, 1), made.log
    assert "Verdict" not in codes
    assert "\n::error::forged\n" in made.log, "it reached the runner"
    assert [line.partition("::")[2][:16] for line in made.commands] == ["error title=gate"]
    assert made.environment == before
    assert "steps.gate.outputs.exit-code" not in made.facts


def test_a_deleted_environment_fails_the_gate_and_nothing_after_it(make: Make) -> None:
    made = pretend(
        make(MAIN, None, model="m"), 'mkdir -p "$ENGINESMITH_STORE"; [ "$1" != optimize ] || rm -r "$(dirname "$0")"'
    )
    codes = made.job()
    assert (codes["Optimize"], codes["Gate"], codes["Trim the store"]) == (0, 1, 0)
    assert len([name for name, _ in made.used if name == "actions/upload-artifact"]) == 2


# The comment of docs/ci.md.

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


@pytest.fixture
def commenter(tmp_path: Path) -> Commenter:
    if not shutil.which("jq") or not shutil.which("unzip"):
        pytest.skip("GitHub's runners have jq and unzip, and this machine lacks one of them")
    return Commenter(tmp_path)


def test_the_report_becomes_a_comment_on_the_pull_request_of_the_tested_commit(commenter: Commenter) -> None:
    commenter.add(report_md="# net\n\n| a | b |\n| --- | --- |\n")
    commenter.add("enginesmith-report-fleet", fleet_md="# [nightly](runs/x)\n")
    commenter.add("enginesmith-run-model", report_md="not this one")
    assert "warning" not in commenter.run()
    ((method, path, text),) = commenter.written
    assert (method, path) == ("POST", "repos/o/r/issues/7/comments")
    assert text.startswith(f"{MARK}\nCommit abc: failure ([log](https://x/5)).")
    assert "\n# nightly\n" in text
    assert "\n# net\n\n| a | b |\n" in text
    assert "not this one" not in text


def test_a_later_report_replaces_ours_and_nobody_elses_comment(commenter: Commenter) -> None:
    others = [{"id": 1, "user": {"login": "stranger"}, "body": MARK}, {"id": 2, "user": BOT, "body": f"see {MARK}"}]
    commenter.answers["repos/o/r/issues/7/comments"] = [
        *others,
        *({"id": number, "user": BOT, "body": f"{MARK}\nold"} for number in (3, 4)),
    ]
    commenter.answers["repos/o/r/issues/comments/3"] = {}
    commenter.add(report_md="new")
    commenter.run()
    assert [call[:2] for call in commenter.written] == [("PATCH", "repos/o/r/issues/comments/3")]


def test_a_report_is_data_whatever_is_in_it(commenter: Commenter) -> None:
    evil = f"{MARK}<img src=x>\n/merge\n@team &#64;team #1 ![i](http://h) [x](javascript:y) [z][1] \\x1b[31m\n[1]: http://h\n"
    commenter.add(report_md=evil.replace("\\x1b", "\x1b") + "é" * 300_000, junit_xml="x")
    for number in range(20):
        commenter.add(f"enginesmith-report-{number}", report_md="x" * 100_000)
    commenter.add("enginesmith-report-$(touch pwned)", report_md="named by a stranger")
    commenter.add("enginesmith-report-0-huge", size=1 << 40, report_md="too large to fetch")
    commenter.run()
    ((_, _, text),) = commenter.written
    assert len(text) < 65_536
    body = text.partition("\n")[2]
    assert not re.search(r"<|@\w|&#|#\d|\]\(j|\]\(http://h|\]\[1|\]:|\x1b|^/|stranger|too large", body, re.M), body[
        :600
    ]
    assert commenter.answers.keys() > {"repos/o/r/actions/artifacts/1/zip"}


@pytest.mark.parametrize("missing", ["repos/o/r/pulls", "repos/o/r/issues/7/comments", "gh", "report", "commit"])
def test_what_goes_wrong_with_a_comment_is_a_warning(commenter: Commenter, missing: str, tmp_path: Path) -> None:
    commenter.add(report_md="x") if missing != "report" else None
    commenter.answers.pop(missing, None)
    commenter.variables["SHA"] = "newer" if missing == "commit" else "abc"
    if missing == "gh":
        (commenter.home / "bin" / "gh").unlink()
    assert "::warning title=comment::" in commenter.run()
    assert missing == "gh" or commenter.written == []


# Linters.


def workflows(folder: Path, action: str) -> list[Path]:
    """Write the page's workflows into a repository that has the action."""
    (folder / ".github" / "workflows").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "action.yml").write_text((ROOT / "action.yml").read_text())
    (folder / ".github" / "actionlint.yaml").write_text("self-hosted-runner: {labels: [gpu]}\n")
    paths = [folder / ".github" / "workflows" / f"{number}.yml" for number in range(len(EXAMPLES))]
    for path, text in zip(paths, EXAMPLES, strict=True):
        path.write_text(text.replace("OWNER/enginesmith@REF", action))
    return paths


def test_linters_of_workflows_have_nothing_to_say(tmp_path: Path) -> None:
    programs = [Path(sys.executable).with_name(name) for name in ("actionlint", "zizmor")]
    if missing := [program.name for program in programs if not program.exists()]:
        pytest.skip(f"{' and '.join(missing)} of the extra dev is not installed")
    actionlint = [str(programs[0]), "-shellcheck=", "-pyflakes=", *map(str, workflows(tmp_path / "a", "./"))]
    pinned = [str(ROOT / "action.yml"), *map(str, workflows(tmp_path / "b", f"OWNER/enginesmith@{'0' * 40}"))]
    zizmor = [str(programs[1]), "--offline", "--no-progress", "--persona=regular", *pinned]
    for command, home in ((actionlint, tmp_path / "a"), (zizmor, tmp_path / "b")):
        answer = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_example_limits_permissions_time_and_runs_at_once() -> None:
    assert len(EXAMPLES) == 5
    for example in map(yaml.safe_load, EXAMPLES):
        assert example["concurrency"]
        assert example["permissions"] in ({}, {"contents": "read"})
        for job in example["jobs"].values():
            assert job["timeout-minutes"] <= 60
            checkouts = [step for step in job["steps"] if "actions/checkout@" in step.get("uses", "")]
            assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_documents_of_other_systems_are_valid() -> None:
    """GitLab's schema and that of actions are in the package check-jsonschema."""
    package = importlib.util.find_spec("check_jsonschema")
    if package is None or package.origin is None:
        pytest.skip("check-jsonschema of the extra dev is not installed")
    schemas = Path(package.origin).parent / "builtin_schemas" / "vendor"
    for name, document in (("github-actions", ACTION), *(("gitlab-ci", yaml.safe_load(text)) for text in GITLAB)):
        jsonschema.validate(document, json.loads((schemas / f"{name}.json").read_text()))


@pytest.mark.parametrize(
    ("branch", "status", "code", "last"),
    [
        ("main", 201, 0, "curl -fsS -H JOB-TOKEN: t --upload-file baseline.tar.gz https://x/baseline"),
        ("", 200, 0, "gate run --max-latency 5ms --baseline baseline --tolerance 5%"),
        ("", 404, 0, "gate run --max-latency 5ms"),
        ("", 500, 1, "the baseline was not fetched: HTTP 500"),
    ],
)
def test_the_gitlab_example_judges_after_a_missed_budget_by_the_baseline_that_there_is(
    tmp_path: Path, branch: str, status: int, code: int, last: str
) -> None:
    measure = yaml.safe_load(GITLAB[0])["measure"]
    programs = {
        "enginesmith": 'echo "$@"; mkdir -p baseline; [ "$1" != resume ] || exit 3',
        "curl": f'case "$*" in *-o*) tar -czf baseline.tar.gz -T /dev/null; echo {status};; *) echo curl "$@"; esac',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "CI_DEFAULT_BRANCH": "main",
        "CI_COMMIT_BRANCH": branch,
        "CI_JOB_TOKEN": "t",
        "BASELINE": "https://x/baseline",
    }
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    script = "\n".join(measure["script"])
    answer = subprocess.run([*BASH, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stdout.splitlines()[-1]) == (code, last), answer.stderr
