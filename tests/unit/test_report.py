"""Tables and report.md: numbers as run.json has them, and nothing in a name can break out of a cell."""

import io

import pytest
from rich.console import Console

from enginesmith.pipeline import run as runs
from enginesmith.pipeline.measure.latency import LatencyRow
from enginesmith.pipeline.measure.memory import MemoryRow
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report import markdown, tables
from enginesmith.pipeline.report.live import _Board, _markup
from enginesmith.pipeline.run import ModelRecord, Run, VariantRecord


def record(name: str, ms: float, speedup: float) -> VariantRecord:
    interval = Interval(
        median=speedup, low=speedup - 0.1 if speedup != 1 else 1, high=speedup + 0.1 if speedup != 1 else 1
    )
    return VariantRecord(
        id=name,
        engine="onnxruntime",
        precision="fp32",
        status="measured",
        latency=(LatencyRow(batch=1, n=100, p50_ms=ms, speedup=interval, stopped_because="the time limit of 5 s"),),
        memory=MemoryRow(device="cpu", batch=1, peak_bytes=3 << 20),
        quality=Quality(metric="top1", value=0.99, baseline=0.995, drop=0.005, samples=200),
    )


def run(**changes: object) -> Run:
    values = {
        "name": "demo",
        "created": "2026-01-01T00:00:00+00:00",
        "seconds": 1.0,
        "complete": True,
        "recipe": make({"model": "digits"}),
        "environment": {"processor": "Some CPU", "warnings": ["the machine is busy"]},
        "model": ModelRecord(source="digits", signature=None, data="digits/test"),
        "steps": (),
        "baseline": record("eager", 2.0, 1.0),
        "variants": (record("onnxruntime-fp32", 0.5, 4.0),),
        "winner": "onnxruntime-fp32",
        "pareto": (),
        "verdicts": (),
    }
    return Run(**{**values, **changes})  # type: ignore[arg-type]


def test_the_table_has_the_numbers() -> None:
    rows = tables.rows(run())
    assert rows[0] == ("eager", "1", "baseline", "2", "–", "3 MiB", "–", "+0.0050", "measured")
    assert rows[1][0] == "★ onnxruntime-fp32"
    assert rows[1][2] == "4.00× [3.90, 4.10]"
    assert all(len(row) == len(tables.COLUMNS) for row in rows)


def test_the_verdict_is_one_sentence() -> None:
    said = tables.verdict(run())
    assert said == (
        "onnxruntime-fp32 is 4.00× [3.90, 4.10] faster than eager at batch 1, uses 100 % of its peak memory, "
        "top1 drop +0.0050 on 200 samples."
    )
    assert tables.verdict(run(winner=None, winner_reason="nothing was measured")) == "No winner: nothing was measured."


def test_the_report_warns_and_says_why_measuring_stopped() -> None:
    text = markdown.render(run())
    assert "Warning: the machine is busy." in text
    assert "Stopped: the time limit of 5 s." in text
    assert "| ★ onnxruntime-fp32 | 1 | 4.00× [3.90, 4.10] |" in text


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a | b", "two\nlines"])
def test_names_cannot_break_out(name: str) -> None:
    failed = record("x", 1.0, 2.0).model_copy(update={"id": name, "status": "failed", "reason": name})
    text = markdown.render(run(variants=(failed,), winner=None))
    assert "<script>" not in text
    table = [line for line in text.splitlines() if line.startswith("|") and "MiB" in line]
    assert len(table) == 2
    assert all(line.replace("\\|", "").count("|") == len(tables.COLUMNS) + 1 for line in table)


def test_a_damaged_or_foreign_document_is_refused(tmp_path: object) -> None:
    from pathlib import Path

    from enginesmith.pipeline.errors import UsageError

    folder = Path(str(tmp_path))
    for content, words in (("{", "damaged"), ('{"schema": "enginesmith.run/9"}', "schema"), ("[]", "schema")):
        (folder / "run.json").write_text(content)
        with pytest.raises(UsageError, match=words):
            runs.read(folder)
    with pytest.raises(UsageError, match="no run"):
        runs.read(folder / "nowhere")


def test_the_tree_shows_text_as_it_is() -> None:
    from enginesmith.pipeline.plan import plan
    from enginesmith.pipeline.runner import Event

    step = plan(make({"model": "digits"})).steps[0]
    line = _Board().take(Event("progress", step, "[red]not markup"))
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(_markup(line))
    assert "[red]not markup" in console.export_text()
