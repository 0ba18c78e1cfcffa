"""The GitHub action, run under a stand-in of GitHub's runner."""

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from github_runner import ACTION, COMMENT, PAGE, ROOT, Make, Runner, open_commenter, pretend

NETS = ROOT / "tests" / "data" / "nets.py"
BRIEFLY = "--engine onnxruntime --batch 1 --measure-time 0.3s --no-memory --exporter torchscript"
REPORTS = {"report.md", "report.html", "fleet.md", "fleet.html", "junit.xml"}


@pytest.fixture
def make(tmp_path: Path, store: Path) -> Make:
    return Make(tmp_path, store)


def test_no_script_has_an_expression_in_it_and_the_action_has_no_token() -> None:
    """Text that a pull request controls goes through the environment, where the shell does not read it as code."""
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
        ("run", "~"),
        ("baseline", "a\nrun=b"),
        ("requirements", "missing.txt"),
        ("store", "--x"),
        ("model", "--help"),
        ("model", ""),
    ],
)
def test_an_input_that_is_not_valid_is_refused_before_anything_runs(make: Make, name: str, value: str) -> None:
    made = make(**{"model": "net.py:build", name: value})
    assert made.job() == {"Settings": 2}
    named = "the input model is empty" if value == "" else f"the input {name.replace('_', '-')} is not valid: "
    assert re.match(f"::error title=enginesmith::.*{named}", made.commands[0])
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


def test_paths_in_the_home_folder_are_whole_in_every_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    home = make.home / "home of me"
    (home / "base").mkdir(parents=True)
    (home / "needs.txt").touch()
    (home / "run").mkdir()
    (home / "run" / "run.json").touch()
    monkeypatch.setenv("HOME", str(home))
    made = pretend(make(run="~/run", baseline="~/base", requirements="~/needs.txt"), 'printf "%s|" "$@"')
    assert set(made.job().values()) == {0}
    assert f"resume|{home}/run|" in made.log
    assert f"gate|{home}/run|--baseline|{home}/base|" in made.log
    assert f"-r\n{home}/needs.txt\n" in (made.temp / "pip").read_text()
    assert made.used[-2][1]["path"] == f"{home}/run"


ENDED = 'mkdir -p "$4" && touch "$4/fleet.json"'


@pytest.mark.parametrize(
    ("optimize", "code", "stage", "codes"),
    [
        *((ENDED, code, "all", {"Optimize": 0, "Gate": 0, "Verdict": 3}) for code in (1, 2, 4)),
        *((ENDED, code, "build", {"Optimize": 0}) for code in (1, 4)),
        (ENDED, 130, "all", {"Optimize": 130}),
        (":", 1, "all", {"Optimize": 1}),
        ("mkdir -p $4 && touch $4/run.json", 1, "all", {"Optimize": 1}),
        ('mkdir -p $4 && touch -d "1 hour ago" $4/fleet.json', 4, "all", {"Optimize": 4}),
    ],
)
def test_gate_judges_a_fleet_whose_entries_failed_unless_it_was_not_begun(
    make: Make, optimize: str, code: int, stage: str, codes: dict[str, int]
) -> None:
    program = f'case "$1" in optimize) {optimize}; exit {code} ;; gate) exit 3 ;; esac'
    made = pretend(make(model="fleet.yaml", stage=stage), program)
    assert made.job() == {"Settings": 0, "Install": 0, **codes}
    assert made.facts.get("steps.gate.outputs.exit-code") == ("3" if "Gate" in codes else None)
    assert any(line.startswith("::warning title=enginesmith::") for line in made.commands) == (codes["Optimize"] == 0)


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
    made = pretend(make(name="net", options="--jobs 2 --time '5 min'", gate="--tolerance '5 %'"), 'printf "%s|" "$@"')
    assert set(made.job().values()) == {0}
    assert "resume|enginesmith-run-net|--jobs|2|--time|5 min|" in made.log
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_another_model_in_the_same_folder_is_refused_and_a_run_that_meets_its_budgets_passes(
    done: Runner, tmp_path: Path
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
    commenter = open_commenter(tmp_path)
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
