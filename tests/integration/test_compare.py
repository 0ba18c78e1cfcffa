"""The command on a run directory that optimize wrote: text, JSON, Markdown, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def changed(run: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a run directory in which something is another."""
    shutil.copytree(run, to)
    values = json.loads((to / "run.json").read_text())
    change(values)
    (to / "run.json").write_text(json.dumps(values))
    return to


def sped_up(times: float) -> Callable[[dict[str, Any]], None]:
    """A speed-up that can be judged by, whatever else this machine did while it was measured."""

    def change(values: dict[str, Any]) -> None:
        for record in (values["baseline"], *values["variants"]):
            record["latency"][0] |= {"launches": 5, "disturbed_share": 0.0}
        values["variants"][0]["latency"][0]["speedup"] = {"median": times, "low": 0.99 * times, "high": 1.01 * times}

    return change


def test_runs_side_by_side(digits_run: Path, tmp_path: Path, cli: Any) -> None:
    made = digits_run
    before = changed(made, tmp_path / "before", sped_up(4.0))
    after = changed(made, tmp_path / "after", sped_up(2.0))
    found = cli("compare", before, after, "-o", tmp_path / "compare.md")
    assert found.code == 0, found.text
    assert "differs for certain: onnxruntime-fp32 is slower at batch 1: +100 % [+97, +103]" in found.stdout
    assert "nothing: model, recipe, versions, machine and data are the same" in found.stdout
    assert "slower, by speed-up over eager" in (tmp_path / "compare.md").read_text()

    both = json.loads(cli("compare", before, after, made, "--json").stdout)
    assert both["schema"] == "enginesmith.comparison/1"
    assert [pair["after"]["path"] for pair in both["pairs"]] == [str(after), str(made)]
    row = both["pairs"][0]["variants"][1]["latency"][0]
    assert row["change"]["significant"] is True
    assert row["before_p50_ms"] == json.loads((made / "run.json").read_text())["variants"][0]["latency"][0]["p50_ms"]

    elsewhere = changed(made, tmp_path / "other", lambda values: values["environment"].update(processor="Another CPU"))
    refused = cli("compare", made, elsewhere)
    assert refused.code == 2
    assert "--any-device" in refused.stderr
    allowed = cli("compare", made, elsewhere, "--any-device")
    assert allowed.code == 0
    assert "caution: measured on different devices" in allowed.stdout

    newer = changed(made, tmp_path / "newer", lambda values: values["recipe"].update(color="red"))
    assert "leaves out: recipe.color" in cli("inspect", newer).stdout
    assert cli("resume", newer, "--quiet").code == 0, "nothing is left to do, whatever that field asked for"
    going_on = cli("resume", newer, "--no-cache", "--quiet")
    assert going_on.code == 2
    assert "recipe.color" in going_on.stderr
    assert (cli("compare", made, made).code, cli("compare", made, tmp_path / "nowhere").code) == (2, 2)
