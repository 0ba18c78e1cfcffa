"""A fleet from its file to its folder: what is asked of the job, what is taken over, what an interruption leaves."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import fleets
from enginesmith import cli
from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.recipe import parsed
from enginesmith.pipeline.recipe.fleet import Entry, Place
from enginesmith.pipeline.results import earlier_fleet
from enginesmith.pipeline.results import fleet as records
from enginesmith.pipeline.results.differences import ModelIdentity
from enginesmith.pipeline.results.run import ModelRecord, Run, RunResult
from enginesmith.pipeline.workflows import fleet as workflow
from enginesmith.pipeline.workflows import optimize
from enginesmith.pipeline.workflows.request import RunRequest

FLEET = "models: {digits: {}, lenet: {}}\ntargets: {cpu: {}, edge: {resources: {edge: 1}}}\n"
OPTIMIZE_ALL = optimize.optimize_all
Kind = Callable[[Any], Run | EnginesmithError]


class Jobs:
    """Stands in for the job: leaves runs that nobody measured, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.made = fleets
        self.asked: list[list[str]] = []
        self.models: dict[str, str] = {}
        """By MODEL, digests that are not those of the made runs."""
        self.kinds: dict[str, Kind] = {}
        """By entry, what becomes of it; a run without anything special."""
        self.interrupted_after = -1
        self.places: list[Path] = []
        """Where it was called."""

    def optimize_all(self, asked: Sequence[RunRequest], settings: Any = None) -> dict[str, RunResult]:
        self.asked.append([one.name for one in asked])
        self.places.append(Path.cwd())
        assert records.is_fleet(asked[0].out.parent.parent), "what is killed now could not be resumed"
        found = {}
        for number, one in enumerate(asked):
            if number == self.interrupted_after:
                raise KeyboardInterrupt
            model, target = one.name.split("@")
            entry = Entry(one.name, model, target, one.recipe, one.place or Place())
            made = self.kinds.get(one.name, self.made.run)(entry)
            if isinstance(made, Run):
                (one.out / "logs").mkdir(parents=True, exist_ok=True)
                (one.out / "run.json").write_text(made.model_dump_json(by_alias=True))
                found[one.name] = RunResult(made, None, 10, 4)
            else:
                found[one.name] = RunResult(None, made)
        return found

    def identify_models(self, asked: Sequence[RunRequest], settings: Any = None) -> dict[str, ModelIdentity]:
        digests = {one.name: self.models.get(one.recipe.model, f"of {one.recipe.model}") for one in asked}
        return {name: ModelIdentity(sha256, "content") for name, sha256 in digests.items() if sha256}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Jobs:
    found = Jobs()
    monkeypatch.setattr(optimize, "optimize_all", found.optimize_all)
    monkeypatch.setattr(optimize, "identify_models", found.identify_models)
    monkeypatch.chdir(tmp_path)
    Path("fleet.yaml").write_text(FLEET, encoding="utf-8")
    return found


def fleet(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, ["optimize", "fleet.yaml", "--quiet", *arguments])
    return done.exit_code, done.output


def test_each_entry_has_a_run_and_the_fleet_its_reports(jobs: Jobs) -> None:
    code, text = fleet("--out", "runs/a")
    assert code == 0
    assert "4 of 4 entries have a winner." in text
    assert {path.name for path in Path("runs/a").iterdir()} >= {"fleet.json", "fleet.html", "fleet.md", "runs"}
    assert jobs.asked == [["digits@cpu", "digits@edge", "lenet@cpu", "lenet@edge"]]
    found = records.read(Path("runs/a"))
    first = found.entries[0]
    assert (first.steps, first.reused, first.run) == (10, 4, "runs/digits@cpu")
    assert (found.file, found.folder, found.complete) == ("fleet.yaml", str(Path.cwd()), True)
    assert "torch" in found.packages


def test_a_failed_entry_stops_nothing_and_is_told(jobs: Jobs) -> None:
    jobs.kinds = {"digits@cpu": lambda entry: jobs.made.ERRORS[2], "lenet@cpu": jobs.made.breached}
    code, text = fleet("--out", "runs/a", "--json")
    document = json.loads(text)
    assert code == 1
    assert [one["status"] for one in document["entries"]] == ["failed", "done", "breached", "done"]


@pytest.mark.parametrize(("index", "code"), [(0, 4), (1, 2), (2, 1)])
def test_where_all_fail_alike_the_exit_code_is_theirs(jobs: Jobs, index: int, code: int) -> None:
    names = ("digits@cpu", "digits@edge", "lenet@cpu", "lenet@edge")
    jobs.kinds = dict.fromkeys(names, lambda entry: jobs.made.ERRORS[index])
    assert fleet("--out", "runs/a")[0] == code
    assert Path("runs/a/fleet.html").is_file()


def test_options_and_patterns_of_the_command_line(jobs: Jobs) -> None:
    options = ("--only", "digits", "--only", "lenet@edge", "--batch", "4", "--max-latency", "5ms")
    assert fleet("--out", "runs/a", *options)[0] == 0
    found = records.read(Path("runs/a"))
    assert jobs.asked == [["digits@cpu", "digits@edge", "lenet@edge"]]
    assert found.only == ("digits", "lenet@edge")
    run = json.loads(Path("runs/a/runs/digits@cpu/run.json").read_text(encoding="utf-8"))
    assert (run["recipe"]["batch"], run["recipe"]["budgets"]["max_latency_ms"]) == ([4], 5.0)
    assert found.options == {"batch": "4", "budgets": {"max_latency_ms": "5ms"}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimize", "fleet.yaml", "--recipe", "r.yaml"], "has its own recipe"),
        (["optimize", "gone.yml"], "the fleet file gone.yml cannot be read"),
        (["optimize", "fleet.yaml", "--only", "digitz"], "did you mean digits"),
        (["optimize", "fleet.yaml", "--changed-since", "nowhere"], "there is no fleet in nowhere"),
        (["optimize", "digits", "--only", "digits"], "--only is for fleet files"),
        (["optimize", "digits", "--changed-since", "runs/a"], "--changed-since is for fleet files"),
    ],
)
def test_wrong_usage(jobs: Jobs, arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == 2
    assert words in done.output
    assert not Path("runs").exists()


def test_the_folder_is_named_after_the_file(jobs: Jobs) -> None:
    assert fleet()[0] == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("fleet-fleet-2")


def test_the_second_fleet_is_held_against_the_first(jobs: Jobs) -> None:
    fleet("--out", "runs/a")
    jobs.kinds = {"digits@cpu": lambda entry: jobs.made.run(entry, ms=0.6)}
    code, text = fleet("--out", "runs/b")
    assert code == 0
    assert "compared with ../a" in text
    found = records.read(Path("runs/b"))
    assert found.last is not None
    assert [one.since_last.note if one.since_last else None for one in found.entries] == ["", "", "", ""]
    assert "slower: 1" in text


def test_what_has_not_changed_is_taken_over(jobs: Jobs) -> None:
    fleet("--out", "runs/a")
    jobs.models = {"lenet": "another"}
    jobs.kinds = {"lenet@cpu": lambda entry: jobs.made.run(entry, ms=0.6)}
    code, text = fleet("--out", "runs/b", "--changed-since", "runs/a")
    assert code == 0
    assert jobs.asked[1:] == [["lenet@cpu", "lenet@edge"]]
    assert "done, reused" in text
    found = records.read(Path("runs/b"))
    assert [one.taken_from for one in found.entries] == ["../a/runs/digits@cpu", "../a/runs/digits@edge", None, None]
    assert [one.done_because for one in found.entries] == ["", "", "its model changed", "its model changed"]
    assert [one.winner is not None for one in found.entries] == [True] * 4
    fleet("--out", "runs/c", "--changed-since", "runs/a")
    last = records.read(Path("runs/c")).last
    assert last.path == "../a", "it is held against what it is taken from, and not the newest"
    assert Path("runs/b/runs/digits@cpu/run.json").is_file()


def test_a_run_of_an_earlier_fleet_is_never_written_to(jobs: Jobs) -> None:
    fleet("--out", "runs/a")
    fleet("--out", "runs/b", "--changed-since", "runs/a")
    before = Path("runs/a/runs/lenet@cpu/run.json").read_bytes()
    begun = records.read(Path("runs/b"))
    records.write(begun.model_copy(update={"packages": {"torch": "1.0"}}), Path("runs/b"))
    jobs.models = {"lenet": "another"}
    jobs.kinds = {"lenet@cpu": lambda entry: jobs.made.run(entry, ms=0.6)}
    assert CliRunner().invoke(cli.main, ["resume", "runs/b", "--quiet"]).exit_code == 0
    assert Path("runs/a/runs/lenet@cpu/run.json").read_bytes() == before
    assert not Path("runs/b/runs/lenet@cpu").is_symlink()
    assert Path("runs/b/runs/digits@cpu").is_symlink()
    assert [one.taken_from for one in records.read(Path("runs/b")).entries][1:] == ["../a/runs/digits@edge", None, None]


def test_an_interrupted_fleet_goes_on_where_it_was_begun(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.interrupted_after = 1
    code, text = fleet("--out", "runs/a", "--batch", "4")
    assert code == 130
    assert "`enginesmith resume runs/a` continues from here" in text
    found = records.read(Path("runs/a"))
    assert [one.status for one in found.entries] == ["done", "pending", "pending", "pending"]
    assert "not complete: 3 of 4" in Path("runs/a/fleet.html").read_text(encoding="utf-8")
    jobs.interrupted_after = -1
    folder = Path("runs/a").absolute()
    (folder.parent.parent / "elsewhere").mkdir()
    monkeypatch.chdir(folder.parent.parent / "elsewhere")
    records.write(found.model_copy(update={"seconds": 100.0}), folder)
    done = CliRunner().invoke(cli.main, ["resume", str(folder), "--quiet", "--json"])
    assert done.exit_code == 0
    after = records.read(folder)
    assert after.complete
    assert (after.created, after.folder) == (found.created, found.folder)
    assert jobs.places == [Path(found.folder)] * 2
    assert 100 < after.seconds < 200
    assert json.loads(done.output)["options"] == {"batch": "4"}
    assert Path.cwd().name == "elsewhere"


def test_a_finished_fleet_has_nothing_left_to_do_and_says_so(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet("--out", "runs/a")
    monkeypatch.setattr(workflow, "has_all_results", lambda run, folder: folder.name != "lenet@edge")
    assert CliRunner().invoke(cli.main, ["resume", "runs/a", "--quiet"]).exit_code == 0
    assert len(jobs.asked) == 2, "one entry is not finished"
    monkeypatch.setattr(workflow, "has_all_results", lambda run, folder: True)
    before = {path: path.read_bytes() for path in Path("runs/a").rglob("*") if path.is_file()}
    done = CliRunner().invoke(cli.main, ["resume", "runs/a", "--quiet"])
    assert (done.exit_code, len(jobs.asked)) == (0, 2)
    assert f"nothing is left to do: {Path('runs/a').absolute()} is finished" in done.stderr
    assert "whether its model or data have changed since then was not looked at" in done.stderr
    assert "4 of 4 entries have a winner" in done.stdout
    assert {path: path.read_bytes() for path in before} == before
    lost = [Path("runs/a", name) for name in ("fleet.md", "runs/lenet@edge/report.html")]
    for path in lost:
        path.unlink(missing_ok=True)
    assert CliRunner().invoke(cli.main, ["resume", "runs/a", "--quiet"]).exit_code == 0
    assert [path.is_file() for path in lost] == [True, True], "a full disk may have left them out"
    CliRunner().invoke(cli.main, ["resume", "runs/a", "--quiet", "--no-cache"])
    assert len(jobs.asked) == 3


NAMES = ["digits@cpu", "digits@edge", "lenet@cpu", "lenet@edge"]


def test_entries_that_are_finished_are_left_as_they_are(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.kinds = {"lenet@edge": lambda entry: jobs.made.ERRORS[0], "lenet@cpu": jobs.made.breached}
    fleet("--out", "runs/a")
    before = {path: path.read_bytes() for path in Path("runs/a/runs").rglob("*") if path.is_file()}
    monkeypatch.setattr(workflow, "has_all_results", lambda run, folder: folder.name != "digits@edge")
    jobs.kinds = {}
    done = CliRunner().invoke(cli.main, ["resume", "runs/a", "--quiet"])
    assert done.exit_code == 3, "what was over its budget stays so"
    assert jobs.asked[1:] == [["digits@edge", "lenet@edge"]], "one is not finished, one lacked something"
    assert "left as they are, since they are finished: digits@cpu, lenet@cpu; --no-cache runs all again" in done.stderr
    left = [path for path in before if path.parts[3] in ("digits@cpu", "lenet@cpu")]
    assert left
    assert all(path.read_bytes() == before[path] for path in left)
    found = records.read(Path("runs/a"))
    assert [one.status for one in found.entries] == ["done", "done", "breached", "done"]
    assert [(one.steps, one.reused) for one in found.entries[:2]] == [(1, 1), (10, 4)]
    CliRunner().invoke(cli.main, ["resume", "runs/a", "--quiet", "--no-cache"])
    assert jobs.asked[2:] == [NAMES]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model", "lenet@cpu is run again: its model changed"),
        ("data", "lenet@cpu is run again: data.npz changed"),
        ("recipe", "lenet@cpu is run again: its recipe changed: batch"),
    ],
)
def test_entries_whose_model_data_or_recipe_has_changed_are_run_again(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, change: str, words: str
) -> None:
    monkeypatch.setattr(workflow, "has_all_results", lambda run, folder: True)
    np.savez("data.npz", x=np.zeros(4), labels=np.arange(4))
    text = "models: {digits: {}, lenet: {recipe: {eval_data: data.npz}}}\ntargets: {cpu: {}}\n"
    Path("fleet.yaml").write_text(text, encoding="utf-8")
    jobs.kinds = {"digits@cpu": lambda entry: jobs.made.ERRORS[0]}
    fleet("--out", "runs/a")
    jobs.models = {"lenet": "another"} if change == "model" else {}
    if change == "data":
        np.savez("data.npz", x=np.ones(4), labels=np.arange(4))
    if change == "recipe":
        record = records.read(Path("runs/a"))
        records.write(record.model_copy(update={"options": {"batch": "4"}}), Path("runs/a"))
    done = CliRunner().invoke(cli.main, ["resume", "runs/a", "--quiet"])
    assert jobs.asked[1] == ["digits@cpu", "lenet@cpu"]
    assert words in done.stderr


def test_a_finished_entry_is_left_where_its_model_cannot_be_loaded(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow, "has_all_results", lambda run, folder: True)
    jobs.kinds = {"digits@cpu": lambda entry: jobs.made.ERRORS[0]}
    fleet("--out", "runs/a")
    jobs.models = {"lenet": ""}
    CliRunner().invoke(cli.main, ["resume", "runs/a", "--quiet"])
    assert jobs.asked[1] == ["digits@cpu"]


def test_an_entry_whose_run_is_gone_is_run_again(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow, "has_all_results", lambda run, folder: True)
    fleet("--out", "runs/a")
    Path("runs/a/runs/digits@cpu/run.json").unlink()
    CliRunner().invoke(cli.main, ["resume", "runs/a", "--quiet"])
    assert jobs.asked[1] == ["digits@cpu"]


def test_a_resumed_fleet_leaves_what_it_ran_itself_since_the_earlier_one(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet("--out", "runs/a")
    model = ModelRecord(source="lenet", sha256="another", signature=None, data="digits")
    jobs.models = {"lenet": "another"}
    jobs.kinds = {
        "lenet@cpu": lambda entry: jobs.made.run(entry, model=model),
        "lenet@edge": lambda entry: jobs.made.ERRORS[0],
    }
    fleet("--out", "runs/b", "--changed-since", "runs/a")
    monkeypatch.setattr(workflow, "has_all_results", lambda run, folder: True)
    jobs.kinds = {"lenet@edge": lambda entry: jobs.made.run(entry, model=model)}
    done = CliRunner().invoke(cli.main, ["resume", "runs/b", "--quiet"])
    assert jobs.asked[1:] == [["lenet@cpu", "lenet@edge"], ["lenet@edge"]]
    assert "left as they are, since they are finished: lenet@cpu;" in done.stderr
    found = records.read(Path("runs/b"))
    assert [bool(one.taken_from) for one in found.entries] == [True, True, False, False]
    jobs.models["digits"] = "another"
    CliRunner().invoke(cli.main, ["resume", "runs/b", "--quiet"])
    assert jobs.asked[3:] == [["digits@cpu", "digits@edge"]], "links stand for what has not changed"


def test_a_folder_holds_a_fleet_or_a_run(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet("--out", "runs/a")
    monkeypatch.setattr(optimize, "optimize_all", OPTIMIZE_ALL)
    done = CliRunner().invoke(cli.main, ["optimize", "digits", "--out", "runs/a"])
    assert (done.exit_code, "holds a fleet" in done.output) == (2, True)
    Path("runs/b").mkdir()
    Path("runs/b/run.json").write_text("{}", encoding="utf-8")
    code, text = fleet("--out", "runs/b")
    assert (code, "the run of a single model" in text) == (2, True)


def test_the_same_again_goes_on_and_another_fleet_is_refused(jobs: Jobs) -> None:
    fleet("--out", "runs/a")
    assert fleet("--out", "runs/a")[0] == 0
    for arguments in (["--only", "digits"], ["--batch", "2"]):
        code, text = fleet("--out", "runs/a", *arguments)
        assert (code, "runs/a holds another fleet" in text) == (2, True)
    Path("fleet.yaml").write_text(FLEET.replace("lenet", "mobilenet_v2"), encoding="utf-8")
    assert "holds another fleet: it was made with another content of the file" in fleet("--out", "runs/a")[1]


def test_what_could_not_be_begun_at_all_is_raised_and_recorded(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(asked: Sequence[RunRequest], settings: Any = None) -> dict[str, RunResult]:
        raise jobs.made.ERRORS[0]

    monkeypatch.setattr(optimize, "optimize_all", nowhere)
    assert fleet("--out", "runs/a")[0] == 4
    assert not records.read(Path("runs/a")).complete


def test_reports_are_written_anew(jobs: Jobs) -> None:
    fleet("--out", "runs/a")
    before = Path("runs/a/junit.xml").read_bytes()
    Path("runs/a/fleet.md").unlink()
    done = CliRunner().invoke(cli.main, ["report", "runs/a"])
    assert done.output.split() == ["runs/a/fleet.html", "runs/a/fleet.md", "runs/a/junit.xml"]
    done = CliRunner().invoke(cli.main, ["report", "runs/a", "-f", "md", "-o", "public", "--json"])
    assert json.loads(done.output) == {"files": ["public/fleet.md"]}
    Path("runs/a/junit.xml").unlink()
    done = CliRunner().invoke(cli.main, ["report", "runs/a/fleet.json", "-f", "junit"])
    assert (done.exit_code, Path("runs/a/junit.xml").read_bytes()) == (0, before)


def test_named_files_are_part_of_what_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.npz").write_bytes(b"one")
    Path("images").mkdir()
    Path("images/a.png").write_bytes(b"a")
    Path("metric.py").write_text("def mine(): pass\n", encoding="utf-8")
    recipes = [
        parsed({"model": "digits", "calibration": "data.npz", "eval_data": "images", "metric": "metric.py:mine"}),
        parsed({"model": "digits", "calibration": "digits/test", "data": "data.npz", "eval_data": "package:function"}),
    ]
    first = earlier_fleet.digest_files(recipes)
    assert [sorted(one) for one in first] == [["data.npz", "images", "metric.py:mine"], ["data.npz"]]
    for name in ("data.npz", "images/b.png", "metric.py"):
        Path(name).write_bytes(b"two")
        assert earlier_fleet.digest_files(recipes) != first
        first = earlier_fleet.digest_files(recipes)
