"""The workflows of docs/ci.md: the comment under a stand-in of GitHub's runner, linters, and GitLab's example."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from github_runner import ACTION, BASH, BOT, EXAMPLES, MARK, PAGE, ROOT, Commenter, open_commenter

GITLAB = [text for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S) if "jobs:" not in text]


@pytest.fixture
def commenter(tmp_path: Path) -> Commenter:
    return open_commenter(tmp_path)


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
