"""Reports of variants in a low precision."""

from typing import Any

import pytest

from enginesmith.pipeline.frameworks.records import Coverage
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import StageFidelity
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report import markdown, run_tables, sentences, tables, terminal
from enginesmith.pipeline.results.run import Assignment, SearchStep, VariantRecord, Verdict
from reported import printed, record, run, variant

INT8 = "onnxruntime-int8"


def covered(macs: dict[str, float], **counts: int) -> Coverage:
    return Coverage(total_macs=100, macs=macs, operators={}, weights=macs, products={}, **counts)


def groups(count: int, kept: int) -> tuple[Assignment, ...]:
    """So many, the last ones in float and with the least work."""
    return tuple(
        Assignment(
            group=f"conv{index}",
            module=f"layer.{index}",
            operator="Conv",
            precision="int8" if index < count - kept else "fp32",
            why="" if index < count - kept else "sensitive",
            sqnr_db=30.0 - index,
            macs=count - index,
        )
        for index in range(count)
    )


def quantized(**changes: object) -> VariantRecord:
    values = {
        "id": INT8,
        "precision": "int8",
        "coverage": covered({"int8": 0.9, "fp32": 0.1}, qdq_pairs=21, islands=2),
        "engine_coverage": covered({"int8": 0.6, "fp32": 0.4}, qdq_pairs=5, unfused=3, islands=4, conversions=12),
        "remarks": (f"int8 pays: 2.00× the speed of onnxruntime-fp32, as {INT8} shows",),
        "assignment": groups(21, 1),
        "search": (
            SearchStep(
                step=1, method="mse", quantized=21, kept=0, drop=0.02, passed=False, why="all", reason="too much"
            ),
            SearchStep(step=2, method="mse", quantized=20, kept=1, drop=0.0, speedup=1.5, passed=True, why="the worst"),
        ),
    }
    return record(INT8, 0.25, 8.0).model_copy(update={**values, **changes})


def test_the_tables_hold_every_group_and_trial() -> None:
    assert run_tables.summarize_assignment(quantized()) == "onnxruntime-int8: 20 of 21 groups in int8"
    rows = run_tables.tabulate_assignment(quantized()).rows
    assert len(rows) == 21
    assert rows[0] == ("conv20", "layer.20", "Conv", "fp32", "10.0", "< 1 %", "sensitive"), "not int8: comes first"
    assert rows[1][0] == "conv0", "then what works most"
    first, second = run_tables.tabulate_search(quantized(), "", "").rows
    assert first == ("1", "mse", "21", "0", "–", "+0.0200", "–", "no: too much", "all")
    assert second == ("2", "mse", "20", "1", "–", "+0.0000", "1.50×", "yes", "the worst")


def test_the_terminal_shows_the_groups_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(run(variants=(quantized(),), winner=INT8), capsys)
    assert "onnxruntime-int8: 20 of 21 groups in int8" in shown
    rows = [line for line in shown.splitlines() if " conv" in line]
    assert len(rows) == 15
    assert "sensitive" in rows[0]
    assert "and 6 more, in report.html" in shown
    nothing_kept = printed(run(variants=(quantized(assignment=groups(3, 0)),), winner=INT8), capsys)
    assert "onnxruntime-int8: 3 of 3 groups in int8" in nothing_kept
    assert "conv0" not in nothing_kept
    raced = make({"model": "digits", "time_seconds": 60, "engines": ["onnxruntime"]})
    lost = printed(run(variants=(quantized(status="skipped"),), winner=INT8, recipe=raced), capsys)
    assert "conv20" not in lost, "of a search, only what was measured in full"


@pytest.mark.parametrize(("columns", "left"), [(80, "size, peak memory, p99 ms"), (108, "size"), (140, "")])
def test_a_narrow_terminal_breaks_no_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, left: str
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal.show_run(run(), None, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert any("★ onnxruntime-fp32 " in line and "measured" in line and " 0.5 " in line for line in lines)
    assert [line for line in lines if line.startswith("left out")] == (
        [f"left out, as the terminal is narrow: {left}"] if left else []
    )


def test_whether_it_paid_is_said_under_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(variants=(quantized(),), winner=INT8)
    assert "onnxruntime-int8: int8 pays: 2.00× the speed" in printed(shown, capsys)
    assert "- **onnxruntime-int8**: int8 pays: 2.00× the speed" in markdown.render(shown)


def test_made_up_calibration_data_shows_wherever_a_number_does(capsys: pytest.CaptureFixture[str]) -> None:
    check = StageFidelity(
        stage="engine", point="min", batch=1, sqnr_db=20, cosine=1, max_abs_error=1, argmax_agreement=1, passed=True
    )
    verdict = Verdict(budget="max_drop", limit=1, actual=0, passed=True)
    record_ = quantized(synthetic_calibration=True, fidelity=(check,), shortfall=f"{INT8} is little")
    shown = run(variants=(record_,), winner=INT8, verdicts=(verdict,))
    for text in (printed(shown, capsys), markdown.render(shown)):
        plain = text.replace("\\*", "*")
        assert sentences.SYNTHETIC in plain
        named = [line for line in plain.splitlines() if INT8 in line]
        assert len(named) >= 5
        assert all(line.count(INT8) == line.count(f"{INT8}*") for line in named), named
    clean = run(variants=(quantized(),), winner=INT8)
    assert sentences.SYNTHETIC not in printed(clean, capsys) + markdown.render(clean)


@pytest.mark.parametrize("name", [INT8, "onnxruntime-fp32"])
def test_how_little_no_wrong_answer_says_is_told_of_what_may_lose_something(name: str) -> None:
    same = Quality(
        metric="top1", value=0.9, baseline=0.9, drop=0, drop_low=-0.03, drop_high=0.03, samples=100, counted=True
    )  # fmt: skip
    chosen = (quantized() if name == INT8 else record(name, 0.5, 4.0)).model_copy(update={"quality": same})
    recipe = make({"model": "digits", "budgets": {"max_drop": 0.01}}, listed=True)
    told = tables.describe_data(run(variants=(chosen,), winner=name, recipe=recipe))
    assert ("100 samples tell the drop to ±0.0300" in told) == (name == INT8)


def test_a_variant_is_not_shown_as_what_it_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    flagged = quantized(shortfall="only 3 % is int8", engine_coverage=covered({"fp32": 0.97, "int8": 0.03}))
    shown = run(variants=(flagged,), winner=INT8)
    assert run_tables.tabulate_variants(shown).rows[1][-1] == "measured, mostly fp32"
    few = covered({"int8": 1.0}).model_copy(update={"products": {"fp32": 9, "int8": 1}, "unknown_products": 9})
    unknown = run(variants=(flagged.model_copy(update={"engine_coverage": few}),), winner=INT8)
    assert run_tables.tabulate_variants(unknown).rows[1][-1] == "measured, mostly fp32"
    nothing = flagged.model_copy(update={"engine_coverage": covered({"fp32": 1.0})})
    assert run_tables.tabulate_variants(run(variants=(nothing,), winner=INT8)).rows[1][-1] == "measured, all fp32"
    assert "onnxruntime-int8: only 3 % is int8" in printed(shown, capsys)
    assert "- **onnxruntime-int8**: only 3 % is int8" in markdown.render(shown)


@pytest.mark.parametrize(
    ("stage", "graph", "engine", "told"),
    [
        ("precision-int8-openvino", 44.6, 16.2, True),
        ("quantize-int8", 30.0, 16.2, True),
        ("precision-int8-openvino", 28.0, 19.0, False),
        ("precision-int8-openvino", 44.6, 28.0, False),
        ("precision-int8-openvino", None, 16.2, False),
        ("simplify", 136.7, 16.2, False),
    ],
)
def test_an_engine_that_is_far_from_its_own_graph_is_suspect(
    stage: str, graph: float | None, engine: float, told: bool
) -> None:
    """One that computes in a lower precision than its graph has no such graph."""
    figures: dict[str, Any] = {"cosine": 1.0, "max_abs_error": 0.1, "argmax_agreement": None, "passed": True}
    compared = [
        StageFidelity(stage=name, point=point, batch=batch, sqnr_db=sqnr_db and sqnr_db + batch, **figures)
        for name, sqnr_db in ((stage, graph), ("engine", engine))
        for point, batch in (("min", 0), ("max", -2))
    ]
    shown = run(variants=(variant("onnxruntime-int8", fidelity=compared, precision="int8"),))
    said = f"onnxruntime-int8 is suspect: its graph in int8 has an SQNR of {graph} dB, and its engine {engine} dB"
    for lines in (sentences.list_notes(shown), sentences.list_warnings(shown)):
        found = [line for line in lines if "suspect" in line]
        assert len(found) == told
        assert all(line.startswith(said) for line in found)
    failed = variant("onnxruntime-int8", fidelity=compared, precision="int8", status="failed")
    assert not any("suspect" in line for line in sentences.list_notes(run(variants=(failed,))))
