"""The command line by itself: light, helpful, and true to INTERFACE's exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import click
import pytest
from click.testing import CliRunner

from enginesmith import cli
from enginesmith.pipeline.commands import context
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.recipe.cli_options import fields_for, walk_fields
from enginesmith.pipeline.units import COMMA_LIST, flag_of
from enginesmith.pipeline.workflows import optimize, stages

HEAVY = ("torch", "onnx", "onnxruntime", "tensorrt", "numpy", "pydantic", "rich")


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    found = []
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += commands(command, (*prefix, name))
        else:
            found.append(((*prefix, name), command))
    return found


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    code = f"import sys, enginesmith.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimize", "digits", "--time-limit", "1m"], "--time-limit is called --time now"),
        (["build", "net.onnx", "--time-limit", "1m"], "--time-limit is called --time now"),
        (["precision", "net.onnx", "--search-limit=1m"], "--search-limit is called --time now"),
    ],
)
def test_an_option_that_there_was_names_the_one_that_replaces_it(words: list[str], said: str) -> None:
    answer = CliRunner().invoke(cli.main, words)
    assert (answer.exit_code, said in answer.output) == (2, True), answer.output


def test_libraries_report_nothing_to_their_makers() -> None:
    names = ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY")
    code = f"import os, enginesmith; print([os.environ[name] for name in {names!r}])"
    rest = {name: value for name, value in os.environ.items() if name not in names}
    answer = subprocess.run([sys.executable, "-c", code], env=rest, capture_output=True, text=True, check=True)
    assert answer.stdout == "['1', '1']\n"


def test_planning_loads_neither_torch_nor_onnx() -> None:
    code = (
        "import sys, enginesmith\nenginesmith.load\nfrom enginesmith.pipeline import recipe\n"
        "from enginesmith.pipeline.planning import planner, variants\n"
        "from enginesmith.pipeline.workflows import optimize\n"
        "planner.plan(variants.resolve_recipe(recipe.make({'model': 'digits'})))\n"
        "print([name for name in ('torch', 'onnx', 'onnxruntime', 'tensorrt') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def run_into(stdout: int, stderr: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "enginesmith.cli", *words]
    return subprocess.run(command, stdout=stdout, stderr=stderr, text=True, check=False)


@pytest.mark.parametrize(("words", "code"), [(("models",), 0), (("--help",), 0), (("inspect", "no.onnx", "--json"), 2)])
def test_output_that_nobody_reads_changes_no_exit_code(words: tuple[str, ...], code: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run_into(writing, writing, *words).returncode == code
        done = run_into(writing, subprocess.PIPE, *words)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    finally:
        os.close(writing)


def test_a_full_disk_is_an_error_where_results_go_and_none_where_progress_goes(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = run_into(full, subprocess.PIPE, "models")
        assert done.returncode == 1
        assert done.stderr.splitlines()[0] == "error: standard output: no space left on device"
        assert len(done.stderr.splitlines()) == 2
        done = run_into(subprocess.PIPE, full, "init", "digits", "-o", str(tmp_path / "recipe.yaml"))
        assert done.returncode == 0
        assert (tmp_path / "recipe.yaml").is_file()
    finally:
        os.close(full)


@pytest.mark.parametrize(("path", "command"), commands(cli.main), ids=lambda value: str(value))
def test_every_command_has_help_with_an_example(path: tuple[str, ...], command: click.Command) -> None:
    result = CliRunner().invoke(cli.main, [*path, "--help"])
    assert result.exit_code == 0
    assert "Example:" in result.output
    assert f"enginesmith {' '.join(path)}" in result.output


@pytest.mark.parametrize(("path", "command"), commands(cli.main), ids=lambda value: str(value))
def test_every_command_that_answers_has_json(path: tuple[str, ...], command: click.Command) -> None:
    assert path == ("init",) or "--json" in [option for param in command.params for option in param.opts]


def test_the_zoo_is_listed_as_json() -> None:
    result = CliRunner().invoke(cli.main, ["models", "--json"])
    rows = {row["model"]: row for row in json.loads(result.stdout)}
    assert rows["resnet50"]["parameters"] == "25,557,032"
    assert rows["bert_base"]["inputs"].startswith("input_ids:int64:batch,sequence")


def test_options_change_the_recipe_file(tmp_path: object) -> None:
    values = {"export__opset": 21, "batch": "2,4", "shapes": ("sequence=8:16:32",), "inputs": ()}
    values |= {"budgets__max_memory_bytes": "2GiB", "data_options__crop": "224,256", "recover": None}
    recipe = context.recipe_of("digits", None, values)
    assert (recipe.export.opset, recipe.batch, recipe.shapes) == (21, (2, 4), {"sequence": "8:16:32"})
    assert (recipe.budgets.max_memory_bytes, recipe.data_options.crop) == (2 << 30, (224, 256))


@pytest.mark.parametrize("arguments", [["optimize"], ["optimize", "digits", "--nonsense"], ["export", "digits"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("remedy", "added"),
    [
        ("take the other one with --exporter", ""),
        ("run it without CUDA graphs: --cuda-graphs off", " (--cuda-graphs is an option of optimize)"),
        ("if you trust it, allow it: --host-code", " (--host-code is an option of optimize, build, fit)"),
        ("build it with --weight-streaming", ""),
        ("free some space (`enginesmith cache prune --local --max-size 5GiB`)", ""),
        ("pip install --upgrade torch", ""),
    ],
)
def test_a_remedy_says_whose_an_option_is_that_the_command_lacks(
    remedy: str, added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise ModelError("it failed", remedy)

    monkeypatch.setattr(stages, "export", fail)
    answer = CliRunner().invoke(cli.main, ["export", "digits", "-o", "digits.onnx", "--quiet", "--json"])
    assert answer.stderr == f"error: it failed\n  → {remedy}{added}\n"
    assert json.loads(answer.stdout)["remedy"] == remedy + added


def test_what_goes_on_is_the_same_command_with_the_same_machines() -> None:
    far = Settings(store="s3://a/b c", executor="ray", ray_address="ray://HEAD:10001")
    said = "enginesmith resume run --store 's3://a/b c' --executor ray --ray-address ray://HEAD:10001"
    assert far.resume_command(Path("run")) == said
    assert Settings().resume_command(Path("a b")) == "enginesmith resume 'a b'"


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("command", ["optimize digits --out", "resume"])
def test_an_interrupt_is_told(command: str, begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> NoReturn:
        if begun:
            (tmp_path / "run.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(optimize, command.partition(" ")[0], interrupted)
    result = CliRunner().invoke(cli.main, [*command.split(), str(tmp_path)])
    hint = f"; `enginesmith resume {tmp_path}` continues from here" if begun else ""
    assert (result.exit_code, result.stderr.strip()) == (130, f"interrupted{hint}")


@pytest.mark.parametrize("out", [".", "..", "folder"])
def test_the_current_folder_is_not_moved_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in" if out == ".." else tmp_path)
    (tmp_path / "run.json").write_text("{}")
    named = str(tmp_path) if out == "folder" else out
    refused = CliRunner().invoke(cli.main, ["optimize", "digits", "--out", named, "--replace", "--quiet"])
    assert refused.exit_code == 2
    assert f"--out {named} is the current folder or one above it, which cannot be moved away" in refused.output
    assert (tmp_path / "run.json").read_text() == "{}"


def test_what_options_are_called_in_a_recipe_is_known() -> None:
    """Errors name options; those who have a fleet file are told the field, which is there."""
    whole = make({"model": "digits"}).model_dump()
    unknown = []
    for option in (one.opts[-1] for one in cli.main.commands["optimize"].params if isinstance(one, click.Option)):
        fields = fields_for(f"give {option}")
        for field in fields:
            inner = whole
            for part in field.rstrip("}").removesuffix(": …").split(": {"):
                inner = inner[part]
        unknown += [] if fields else [option]
    assert set(unknown) == {
        *(
            "--recipe",
            "--out",
            "--replace",
            "--only",
            "--changed-since",
            "--jobs",
            "--no-cache",
            "--store",
        ),
        *("--executor", "--ray-address", "--quiet", "--json", "--help-all"),
    }


def test_help_lists_every_command_once() -> None:
    listed = [str(command.name) for commands in cli._SECTIONS.values() for command in commands]
    assert sorted(listed) == sorted(cli.main.commands)


def test_help_lists_everyday_options_under_headings_and_help_all_lists_every_one() -> None:
    command = cli.main.commands["optimize"]
    brief, whole = (CliRunner().invoke(cli.main, ["optimize", flag]).output for flag in ("--help", "--help-all"))
    headings = [line for line in brief.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[:4] == ["Model and inputs:", "Variants:", "Data and accuracy:", "Budgets:"]
    options = [param.opts[0] for param in command.params if isinstance(param, click.Option)]
    assert [name for name in options if f"  {name}" not in whole] == []
    assert len(brief.splitlines()) < 80
    assert "--precision-target" in whole
    assert "--precision-target" not in brief


@pytest.mark.parametrize(
    ("given", "labels"), [([], None), (["--labels", "a"], "a"), (["--labels", "a,b", "--labels", "c"], "a,b,c")]
)
def test_labels_that_are_given_twice_are_all_used(given: list[str], labels: str | None) -> None:
    context = cli.main.commands["optimize"].make_context("optimize", ["net.onnx", *given])
    assert context.params["data_options__labels"] == labels


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        (flag_of(part, path.rpartition(".")[2]), path)
        for path, part, field in walk_fields()
        if COMMA_LIST in field.metadata
    ],
)
def test_lists_with_commas_that_are_given_twice_are_joined(flag: str, field: str) -> None:
    context = cli.main.commands["optimize"].make_context("optimize", ["net.onnx", flag, "8", f"{flag}=1,4"])
    assert context.params[field.replace(".", "__")] == "8,1,4"


def test_output_that_the_encoding_lacks_is_escaped() -> None:
    command = [sys.executable, "-m", "enginesmith.cli", "models"]
    ended = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)
    assert (ended.returncode, b"\\u" in ended.stdout or b"\\x" in ended.stdout) == (0, True), ended.stderr
