"""report.md and junit.xml: what they say of a run, and no text of it does more than be read."""

from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

import fleets
from enginesmith.pipeline.commands.context import announce
from enginesmith.pipeline.measure.rows import LatencyRow, MemoryRow, OutOfMemory, StageFidelity
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report import gate, junit, markdown
from enginesmith.pipeline.report.sentences import describe_out_of_memory
from enginesmith.pipeline.results.run import VariantRecord, Verdict
from runs import small, variant

EVIL = "<script>alert(1)</script> [x](javascript:y) ![i](http://h) @someone #12 `code` a|b\n# head"


def twice_measured(name: str, **changes: object) -> VariantRecord:
    ratio = Interval(median=2, low=1.9, high=2.1)
    rows = tuple(LatencyRow(batch=batch, p50_ms=1.0, speedup=ratio) for batch in (1, 8))
    memory = MemoryRow(device="cpu", batch=8, peak_bytes=1 << 20)
    return variant(name, **{"latency": rows, "memory": memory, **changes})


usual_run = partial(small, twice_measured("eager"))


def checks(sqnr_db: float) -> tuple[StageFidelity, ...]:
    unknown = dict.fromkeys(("cosine", "max_abs_error", "argmax_agreement"))
    return tuple(
        StageFidelity.model_validate(
            {**unknown, "stage": "engine", "point": point, "batch": 1, "sqnr_db": sqnr_db, "passed": True}
        )
        for point in ("min", "opt", "max")
    )


def test_a_usual_run_is_short_and_says_what_matters() -> None:
    held = Verdict(budget="max_latency_ms", limit=5, actual=1, passed=True)
    broken = Verdict(budget="min_throughput_per_s", limit=5e3, actual=1e3, passed=False)
    others = [twice_measured(f"v{index}", fidelity=checks(40.0 + index)) for index in range(6)]
    failed = twice_measured("f", status="failed", reason="build: no kernel", latency=())
    text = markdown.render(
        usual_run(
            twice_measured("a", fidelity=checks(33.3)),
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
        "how to run it again: report.html",
    ):
        assert part in text


def test_of_many_variants_those_that_matter_are_shown() -> None:
    many = [twice_measured(f"v{index}", reason=f"reason {index} " * 100, status="failed") for index in range(200)]
    text = markdown.render(usual_run(*many, twice_measured("front"), twice_measured("a"), pareto=("front",)))
    assert len(text) < markdown.MOST_CHARACTERS
    assert "| ★ a |" in text
    assert "| front |" in text
    assert "more variants, in report.html" in text
    assert len(text.splitlines()) < 80


def test_the_hard_limit_holds_whatever_there_is() -> None:
    text = markdown.render(
        usual_run(twice_measured("a" * 100_000), name="n" * 100_000, winner_reason="w" * 100_000, winner=None)
    )
    assert len(text) <= markdown.MOST_CHARACTERS + 1


def test_text_is_text() -> None:
    failed = twice_measured(EVIL, status="failed", reason=EVIL)
    text = markdown.render(
        usual_run(failed, name=EVIL, winner=None, winner_reason=EVIL, environment={"warnings": (EVIL,)})
    )
    for part in ("<script", "](", " @someone", " #12", "\n# head"):
        assert part not in text
    assert text.count("\n# ") + text.startswith("# ") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("**q** a* 2*3", r"\*\*q\*\* a\* 2\*3"),
        ("_em_ __init__ snake_case (_x)", r"\_em\_ \_\_init\_\_ snake_case (\_x)"),
        ("https://evil.example www.evil.example", "https:\u200b//evil.example www\u200b.evil.example"),
        ("**not judged**", "**not judged**"),
    ],
)
def test_no_text_is_emphasis_or_a_link(text: str, said: str) -> None:
    assert markdown.plain(text) == said


def test_a_budget_that_nothing_was_held_against_is_said() -> None:
    recipe = make({"model": "digits", "budgets": {"max_size_bytes": 10}})
    text = markdown.render(usual_run(recipe=recipe, winner=None, winner_reason="nothing was measured"))
    assert "size was not judged: nothing was measured" in text


@pytest.mark.parametrize("text", ["\ud800", "\x00"])
def test_it_can_be_written(text: str) -> None:
    markdown.render(usual_run(twice_measured("a"), name=text)).encode()


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


HOSTILE = "]]></failure><script>&\x00\x1b\ud800\ufffe\"'\n中"


def check(**changes: object) -> StageFidelity:
    values = {"stage": "engine", "point": "min", "batch": 1, "sqnr_db": 50.0, "passed": True}
    unknown = dict.fromkeys(("cosine", "max_abs_error", "argmax_agreement"))
    return StageFidelity.model_validate({**unknown, **values, **changes})


def record(name: str, **changes: object) -> VariantRecord:
    return variant(name, **{"latency": (LatencyRow(batch=1, p50_ms=1.0),), **changes})


run = partial(small, record("eager"))


def cases(text: str) -> dict[str, str]:
    """Return what became of each test case."""
    found = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        outcome = next(iter(case), None)
        key = f"{case.get('classname')}: {case.get('name')}"
        found[key] = "passed" if outcome is None else f"{outcome.tag}: {outcome.get('message')}"
    return found


def test_every_budget_and_every_check_is_a_case() -> None:
    fast = Verdict(budget="max_latency_ms", limit=5, actual=1, passed=True)
    large = Verdict(budget="max_memory_bytes", limit=1024, actual=None, passed=False, reason="nobody looked")
    made = record("a", fidelity=(check(), check(point="max", batch=8, passed=False, reason="SQNR of 3 dB")))
    text = junit.render(run(made, verdicts=(fast, large)))
    assert cases(text) == {
        "budgets: p50 latency: at most 5 ms": "passed",
        "budgets: peak memory: at most 1 KiB": (
            "failure: peak memory is unknown (nobody looked), and has to be at most 1 KiB"
        ),
        "variant a: measured": "passed",
        "variant a: engine at min (batch 1)": "passed",
        "variant a: engine at max (batch 8)": "failure: SQNR of 3 dB",
    }
    root = ElementTree.fromstring(text)
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("5", "2", "0")


def test_why_stands_in_the_text_too_which_is_what_gitlab_shows() -> None:
    failed = record("a", fidelity=(check(passed=False, reason="SQNR of 3 dB"), check(reason="changed on purpose")))
    root = ElementTree.fromstring(junit.render(run(failed)))
    outcomes = [(one.tag, one.get("message"), one.text) for case in root.iter("testcase") for one in case]
    assert outcomes == [
        ("failure", "SQNR of 3 dB", "SQNR of 3 dB"),
        ("skipped", "not judged: changed on purpose", "not judged: changed on purpose"),
    ]


def test_what_was_not_judged_is_skipped() -> None:
    changed = check(reason="changed on purpose")
    built = record("b", status="built", reason="no such device", latency=())
    recipe = make({"model": "digits", "budgets": {"max_size_bytes": 10}})
    waiting = run(record("a", fidelity=(changed,)), built, recipe=recipe, winner=None, winner_reason="not measured")
    assert cases(junit.render(waiting)) == {
        "budgets: size": "skipped: not judged: not measured",
        "variant a: measured": "passed",
        "variant a: engine at min (batch 1)": "skipped: not judged: changed on purpose",
        "variant b: measured": "skipped: no such device",
    }


def test_a_variant_that_failed_is_a_failure() -> None:
    failed = record("a", status="failed", reason="build: out of memory")
    assert cases(junit.render(run(failed)))["variant a: measured"] == "failure: build: out of memory"


def test_a_fleet_has_the_cases_of_all_its_runs(tmp_path: Path) -> None:
    asked = fleets.fleet()
    one, two, three, four = asked.entries()
    failed = fleets.variant(fleets.INT8, 0.5, 4.0, fidelity=(check(passed=False, reason="SQNR of 3 dB"),))
    found = {one.name: fleets.breached(one), two.name: fleets.run(two, variants=(failed,))}
    entries = [fleets.entry(entry, tmp_path, found[entry.name]) for entry in (one, two)]
    entries += [fleets.entry(three, tmp_path, fleets.ERRORS[2])]
    entries += [fleets.entry(four, tmp_path, fleets.ERRORS[0])]
    text = junit.render_fleet(fleets.record(asked, *entries), found)
    assert cases(text) == {
        "entries: digits@cpu": "passed",
        "entries: digits@edge": "passed",
        "entries: lenet@cpu": "failure: aten::odd cannot be exported",
        "entries: lenet@edge": "skipped: not available: no node has the accelerator L4",
        "digits@cpu budgets: p50 latency: at most 0.1 ms": (
            "failure: p50 latency is 0.5 ms, and has to be at most 0.1 ms"
        ),
        "digits@cpu variant onnxruntime-fp32: measured": "passed",
        "digits@cpu variant onnxruntime-int8: measured": "passed",
        "digits@edge variant onnxruntime-int8: measured": "passed",
        "digits@edge variant onnxruntime-int8: engine at min (batch 1)": "failure: SQNR of 3 dB",
    }
    root = ElementTree.fromstring(text)
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("9", "3", "1")


@pytest.mark.parametrize("text", [HOSTILE, "<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///'>]>&e;"])
def test_any_text_is_xml(text: str) -> None:
    made = record(text, status="failed", reason=text, fidelity=(check(stage=text, passed=False, reason=text),))
    shown = junit.render(run(made, name=text, winner=None))
    shown.encode()
    assert len(cases(shown)) == 2
    assert "<script>" not in shown


@pytest.mark.parametrize(("late", "failures"), [(False, 1), (True, 0)])
def test_a_variant_whose_deciding_batch_has_no_number_is_no_success(late: bool, failures: int) -> None:
    """Others of its batches were measured; what the time cut short is no failure."""
    lost = LatencyRow(batch=1, p50_ms=None, failure="its process was killed", late=late)
    run = usual_run(twice_measured("a", latency=(lost, LatencyRow(batch=8, p50_ms=1.0))))
    suites = ElementTree.fromstring(junit.render(run))
    failed = [case for case in suites.iter("testcase") if case.find("failure") is not None]
    assert [(case.get("classname"), case.get("name")) for case in failed] == [("variant a", "measured")] * failures


@pytest.mark.parametrize(
    ("fitting", "words"), [(4, "the largest batch that fits is 4"), (16, "batch 16 fits, so that")]
)
def test_what_ran_out_of_memory_says_what_fits(fitting: int, words: str) -> None:
    full = LatencyRow(batch=8, p50_ms=None, failure="out of memory", oom=OutOfMemory(message="killed"))
    run = usual_run(twice_measured("a", latency=(LatencyRow(batch=fitting, p50_ms=1.0), full)))
    assert any(words in sentence for sentence in describe_out_of_memory(run))


def test_threads_are_those_of_the_machine_that_was_measured() -> None:
    text = markdown.render(usual_run(twice_measured("a"), environment={"usable_cores": 48}))
    assert "48 threads" in text
