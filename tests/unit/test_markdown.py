"""report.md fits into a comment, whatever the run is, and no text of it does more than be read."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from enginesmith.pipeline.commands.context import announce
from enginesmith.pipeline.measure.rows import LatencyRow, MemoryRow, StageFidelity
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report import gate, markdown
from enginesmith.pipeline.results.run import Run, VariantRecord, Verdict

MakeRun = Callable[..., Run]
EVIL = "<script>alert(1)</script> [x](javascript:y) ![i](http://h) @someone #12 `code` a|b\n# head"


def record(name: str, **changes: object) -> VariantRecord:
    ratio = Interval(median=2, low=1.9, high=2.1)
    values = {"id": name, "engine": "onnxruntime", "precision": "fp32", "status": "measured"}
    rows = tuple(LatencyRow(batch=batch, p50_ms=1.0, speedup=ratio) for batch in (1, 8))
    memory = MemoryRow(device="cpu", batch=8, peak_bytes=1 << 20)
    return VariantRecord.model_validate({**values, "latency": rows, "memory": memory, **changes})


@pytest.fixture
def run(made_runs: ModuleType) -> MakeRun:
    """A run around :func:`record`'s baseline."""
    return partial(made_runs.small, record("eager"))


def checks(sqnr_db: float) -> tuple[StageFidelity, ...]:
    unknown = dict.fromkeys(("cosine", "max_abs_error", "argmax_agreement"))
    return tuple(
        StageFidelity.model_validate(
            {**unknown, "stage": "engine", "point": point, "batch": 1, "sqnr_db": sqnr_db, "passed": True}
        )
        for point in ("min", "opt", "max")
    )


def test_a_usual_run_is_short_and_says_what_matters(run: MakeRun) -> None:
    held = Verdict(budget="max_latency_ms", limit=5, actual=1, passed=True)
    broken = Verdict(budget="min_throughput_per_s", limit=5e3, actual=1e3, passed=False)
    others = [record(f"v{index}", fidelity=checks(40.0 + index)) for index in range(6)]
    failed = record("f", status="failed", reason="build: no kernel", latency=())
    text = markdown.render(
        run(
            record("a", fidelity=checks(33.3)),
            *others,
            failed,
            verdicts=(held, broken),
            environment={"warnings": ("busy",)},
        )
    )
    assert len(text.splitlines()) <= 60
    for part in (
        "a is 2.00× [1.90, 2.10] faster than eager",
        "| p50 latency | at most 5 ms | 1 ms | yes |",
        "| throughput | at least 5000 samples/s | 1000 samples/s | no |",
        "- busy.",
        "**f**: build: no kernel",
        "21 of 21 checks passed; the lowest SQNR is 33.3 dB (a after engine)",
        "In report.html: latency distributions",
    ):
        assert part in text


def test_of_many_variants_those_that_matter_are_shown(run: MakeRun) -> None:
    many = [record(f"v{index}", reason=f"reason {index} " * 100, status="failed") for index in range(200)]
    text = markdown.render(run(*many, record("front"), record("a"), pareto=("front",)))
    assert len(text) < markdown.MOST_CHARACTERS
    assert "| ★ a |" in text
    assert "| front |" in text
    assert "more variants, in report.html" in text
    assert len(text.splitlines()) < 80


def test_the_hard_limit_holds_whatever_there_is(run: MakeRun) -> None:
    text = markdown.render(run(record("a" * 100_000), name="n" * 100_000, winner_reason="w" * 100_000, winner=None))
    assert len(text) <= markdown.MOST_CHARACTERS + 1


def test_text_is_text(run: MakeRun) -> None:
    failed = record(EVIL, status="failed", reason=EVIL)
    text = markdown.render(run(failed, name=EVIL, winner=None, winner_reason=EVIL, environment={"warnings": (EVIL,)}))
    for part in ("<script", "](", " @someone", " #12", "\n# head"):
        assert part not in text
    assert text.count("\n# ") + text.startswith("# ") == 1


def test_a_budget_that_nothing_was_held_against_is_said(run: MakeRun) -> None:
    recipe = make({"model": "digits", "budgets": {"max_size_bytes": 10}})
    text = markdown.render(run(recipe=recipe, winner=None, winner_reason="nothing was measured"))
    assert "size was not judged: nothing was measured" in text


@pytest.mark.parametrize("text", ["\ud800", "\x00"])
def test_it_can_be_written(run: MakeRun, text: str) -> None:
    markdown.render(run(record("a"), name=text)).encode()


def test_annotations_are_one_line_each() -> None:
    found = gate.annotate("gate: a, b", ["too slow\n::error::made up\r100 %"], ["busy"])
    assert found == [
        "::error title=gate%3A a%2C b::too slow%0A::error::made up%0D100 %25",
        "::warning title=gate%3A a%2C b::busy",
    ]


def test_long_texts_are_cut() -> None:
    (line,) = gate.annotate("t", ["x" * 10_000], [])
    assert len(line) < 4_100


def test_the_summary_is_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "summary"
    file.write_text("before\n")
    environment = {"GITHUB_STEP_SUMMARY": str(file)}
    gate.append_summary(environment, "# one\n")
    gate.append_summary(environment, "# two \ud800")
    assert file.read_text() == "before\n# one\n\n# two ?\n\n"
    gate.append_summary({}, "nowhere")
    gate.append_summary({"GITHUB_STEP_SUMMARY": ""}, "nowhere")


def test_only_their_runner_is_told() -> None:
    assert gate.is_here({"GITHUB_ACTIONS": "true"})
    assert not gate.is_here({})
    assert not gate.is_here({"GITHUB_ACTIONS": "false"})


def test_a_summary_that_cannot_be_written_changes_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "missing" / "summary"))
    announce("gate", [], [], "# one\n")
    assert f"{tmp_path}/missing/summary" in capsys.readouterr().err
