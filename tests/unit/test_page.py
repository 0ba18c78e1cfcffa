"""report.html as text: whole, self-contained, escaped, and readable in both color schemes."""

import errno
import os
import re
import signal
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import pages
import runs
from enginesmith.pipeline.commands.context import show_run
from enginesmith.pipeline.errors import StoreError, UsageError
from enginesmith.pipeline.report import files, run_tables, tables
from enginesmith.pipeline.report.html import blocks, page, sections
from enginesmith.pipeline.report.html.blocks import Folded, Section, tables_in
from enginesmith.pipeline.report.tables import Table
from enginesmith.pipeline.results import run as documents
from enginesmith.pipeline.results.run import Run

EVIL = (
    """<img src=x onerror="document.title='a'"></script><script>document.title='b'</script>"><svg onload=c>'${d}&amp;"""
)
SECTIONS = (
    *("variants-and-front", "glance", "out", "latency", "memory", "sweep", "fidelity", "sensitivity", "precision"),
    *("smaller", "limits", "profile", "provenance", "environment", "method", "reproduce"),
)


@pytest.fixture(scope="module")
def some() -> Run:
    found = runs.run()
    assert isinstance(found, Run)
    return found


@pytest.fixture(scope="module")
def elements(some: Run) -> Any:
    return pages.Elements(page.render(some))


def test_every_part_has_its_section_in_order(elements: Any) -> None:
    assert tuple(one["id"] for one in elements.named("section")) == SECTIONS
    assert {one.get("href") for one in elements.named("a")} >= {f"#{name}" for name in SECTIONS}
    headings = [tag for tag, _ in elements.all if re.fullmatch("h[1-6]", tag)]
    assert headings == ["h1", *["h2"] * len(SECTIONS)]


def test_nothing_comes_from_the_network(some: Run) -> None:
    text = page.render(some)
    elements = pages.Elements(text)
    assert not any("src" in attributes for _, attributes in elements.all)
    assert not elements.named("link")
    policy = next(one["content"] for one in elements.named("meta") if one.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]


def test_the_policy_names_exactly_the_scripts_that_run(some: Run) -> None:
    bodies = re.findall(r"<script>(.*?)</script>", page.render(some), re.S)
    assert bodies == [page.load(page.LIBRARY), page.load(page.SCRIPT)]


def test_ids_are_unique_and_labels_point_to_some(elements: Any) -> None:
    ids = [attributes["id"] for _, attributes in elements.all if "id" in attributes]
    assert len(ids) == len(set(ids))
    pointed = {one["aria-labelledby"] for _, one in elements.all if "aria-labelledby" in one}
    assert pointed <= set(ids)


def test_what_people_need_who_do_not_see_it(elements: Any) -> None:
    tables_, captions = elements.named("table"), elements.named("caption")
    assert len(tables_) == len(captions) > 10
    assert all("scope" in one for one in elements.named("th"))
    charts = [one for _, one in elements.all if "data-chart" in one]
    assert {one["data-chart"] for one in charts} == {"pareto", "memory", "fidelity"}
    assert all(one["role"] == "img" and one["aria-label"] for one in charts)
    assert {"nav", "main", "header", "footer"} <= {tag for tag, _ in elements.all}
    assert all("tabindex" in one for _, one in elements.all if one.get("class") == "scroll")


def test_texts_of_the_run_bring_no_markup(elements: Any) -> None:
    evil = pages.Elements(page.render(runs.run(EVIL)))
    assert {tag for tag, _ in evil.all} == {tag for tag, _ in elements.all}
    assert len(evil.named("script")) == len(elements.named("script"))
    assert not any(name.startswith("on") for _, attributes in evil.all for name in attributes)


def test_numbers_stand_with_their_full_precision(some: Run) -> None:
    first = page.render(some).partition('data-name="variants"')[2].partition("</table>")[0]
    values = [float(str(one["data-value"])) for one in pages.Elements(first).named("td") if "data-value" in one]
    record, row = some.variants[0], some.variants[0].latency[0]
    numbers = [row.batch, row.speedup.median, row.p50_ms, row.p99_ms]
    sizes = [record.memory.deployment_bytes, record.peak_bytes, record.artifact.bytes]
    assert values[-8:] == [*numbers, *sizes, record.quality.drop]


@pytest.mark.parametrize(
    ("cell", "parts"),
    [
        ("18.76× [18.50, 18.95]", ("18.76×", "[18.50, 18.95]")),
        ("+8.0 % [+3.1, +12]", ("+8.0 %", "[+3.1, +12]")),
        ("speed-up [95 %]", ("speed-up", "[95 %]")),
        ("+0.0000", None),
        ("float32 [batch, length]", None),
        ("a long sentence about what was measured [3]", None),
        ("", None),
    ],
)
def test_lines_break_before_intervals(cell: str, parts: tuple[str, str] | None) -> None:
    assert Table.split_interval(cell) == parts


@pytest.mark.parametrize(
    "changes",
    [
        {"winner": None, "winner_reason": "nothing was measured", "pareto": (), "verdicts": (), "variants": ()},
        {"complete": False, "winner": None, "winner_reason": "not decided yet"},
        {"limits": None, "environment": {}, "steps": ()},
    ],
    ids=["no variant", "interrupted", "bare"],
)
def test_what_is_missing_is_explained(changes: dict[str, object]) -> None:
    found = runs.run(**changes)
    text = page.render(found)
    assert tuple(one["id"] for one in pages.Elements(text).named("section")) == SECTIONS
    empty = re.findall(r'<p class="question">[^<]*</p>\s*</section>', text)
    assert not empty
    assert ("This run is not complete" in text) is not found.complete


def test_a_run_of_a_checkout_that_is_not_installed_has_its_page() -> None:
    text = page.render(runs.run(environment={"packages": {"torch": "2.13.0"}, "python": "3.12.3"}))
    assert "In a checkout of enginesmith, with Python 3.12.3:" in text


def test_a_run_names_its_own_folder_from_where_it_was_started() -> None:
    text = page.render(runs.run(environment={"out": "runs/deep/bad 3"}, complete=False))
    assert text.count("enginesmith resume &#39;runs/deep/bad 3&#39;") == 2


def test_nothing_measured_says_so_everywhere() -> None:
    reasons = {"latency": "load", "limits": "no --limits", "profile": "no <b>"}
    bare = {"id": "eager", "engine": "eager", "precision": "fp32", "status": "skipped", "reasons": reasons}
    missing = {"winner": None, "winner_reason": "nothing was measured", "pareto": (), "verdicts": (), "variants": ()}
    text = page.render(runs.run(**missing, complete=False, limits=None, steps=(), baseline=bare))
    assert "No winner yet: nothing was measured." in text
    assert "No latency was measured: load." in text
    assert "Nothing was compared with the device&#39;s limits: no --limits." in text
    assert "Nothing was profiled: no &lt;b&gt;." in text
    assert "Throughput of several callers was not measured" in text
    assert "Nothing was quantized group by group in this run." in text
    assert 'data-chart="' not in text


def test_the_ten_questions_have_an_answer_each(some: Run) -> None:
    found = page.answer_questions(some)
    assert len(found) == 10
    assert all(fact.text.strip() and fact.target in SECTIONS for fact in found)


def test_what_stayed_in_float_is_told_by_reason(some: Run) -> None:
    groups = [
        {"group": f"node_{name}", "module": name, "operator": "Conv", "precision": precision, "why": why}
        for name, precision, why in (("a", "int8", ""), ("b", "fp32", "too sensitive"), ("c", "fp32", "too sensitive"))
    ]
    record = some.variants[0].model_copy(update={"precision": "int8", "synthetic_calibration": False})
    record = record.model_validate({**record.model_dump(), "assignment": groups})
    kept = next(
        fact
        for fact in page.answer_questions(some.model_copy(update={"variants": (record,)}))
        if "floating" in fact.term
    )
    assert kept.text == f"{record.id}: 2 of 3: b, c (too sensitive)."


def test_p99_is_held_against_a_budget_of_p50_when_there_is_no_other(some: Run) -> None:
    budgets = some.recipe.budgets.model_copy(update={"max_latency_ms": 1.0})
    recipe = some.recipe.model_copy(update={"budgets": budgets})
    found = page.answer_questions(some.model_copy(update={"recipe": recipe, "verdicts": ()}))[0]
    assert found.text == f"The budget is on p50, 1 ms; p99 of {some.winner} at batch 3 is 1.5 ms, above it."


def test_the_largest_fall_is_found_and_changes_on_purpose_are_none(some: Run) -> None:
    entry = some.variants[0].fidelity[0]

    def at(stage: str, sqnr: float, reason: str = "") -> object:
        return entry.model_copy(update={"stage": stage, "sqnr_db": sqnr, "passed": True, "reason": reason})

    stages = (at("prune", 15.0, "changed on purpose"), at("export", 130.0), at("precision", 40.0), at("engine", 39.0))
    record = some.variants[0].model_copy(update={"fidelity": stages, "quality": None})
    rows = run_tables.tabulate_losses(some.model_copy(update={"variants": (record,)})).rows
    assert rows == ((tables.mark_name(record), "precision", "130.0 → 40.0", "39.0", "–"),)


def test_long_tables_are_data_within_a_limit() -> None:
    rows = tuple((f"node_{number}", "x" * 300 + str(number)) for number in range(30_000))
    table = Table("t", "caption", ("a", "b"), rows)
    section = Section("s", "S", "?", (Folded("f", (table,)),))
    (cut,) = blocks.within_limits([section])
    (found,) = tables_in(cut.blocks)
    assert 100 < len(found.rows) < len(rows)
    assert found.count == len(rows)
    stored = blocks.long_tables([cut])
    assert [stored["texts"][place] for place in stored["rows"]["t"][7]] == list(rows[7])
    assert len(str(blocks.script_data(stored)).encode()) < blocks.MOST_BYTES * 1.2


def test_reports_that_cannot_be_written_are_told_of_and_leave_nothing(
    some: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is worth more: it ended well, or with an error of its own."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    documents.write(some, tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    told: list[str] = []
    with files.Writer(1, told.append) as reports:
        reports.write(tmp_path)
    (text,) = told
    assert text.startswith("the reports were not written")
    assert text.endswith(f"the folder {tmp_path}: no space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_whose_reports_cannot_be_written_ends_with_1_after_its_results(
    some: Run, tmp_path: Path, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    documents.write(some, tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"the reports could not be written: .*no space left on device") as caught:
            show_run(some, tmp_path, as_json)
    assert caught.value.exit_code == 1
    assert f"then `enginesmith report {tmp_path}` writes them" in caught.value.remedy
    assert (some.variants[0].id in capsys.readouterr().out) is not as_json, "two JSON documents cannot be read as one"
    show_run(some, tmp_path, as_json)
    assert not files.list_outdated(tmp_path, "run.json")


def test_the_files_are_written_anew(some: Run, tmp_path: Path) -> None:
    documents.write(some, tmp_path)
    written = files.write(some, tmp_path)
    assert [path.name for path in written] == ["report.html", "report.md", "junit.xml"]
    assert all(path.stat().st_size for path in written)
    assert not list(tmp_path.glob(".*"))
    assert files.write(some, tmp_path / "other", ("json",))[0].read_text() == (tmp_path / "run.json").read_text()


def _luminance(color: str) -> float:
    """Relative luminance, by WCAG 2.2."""
    channels = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colors, by WCAG 2.2."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_wcag_aa_in_both_schemes_and_in_print() -> None:
    blocks = re.findall(r":root \{(.*?)\}", page.load(page.STYLE), re.S)
    schemes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]
    assert len(schemes) == 3
    texts = [(text, ground) for text in ("text", "muted", "accent") for ground in ("ground", "raised")]
    texts += [("text", "good-ground"), ("muted", "caution-ground")]
    texts += [(name, ground) for name in ("good", "bad", "caution") for ground in ("ground", f"{name}-ground")]
    for scheme in schemes:
        colors = {**schemes[0], **scheme}
        for text, ground in texts:
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground, colors[text], colors[ground])
        assert contrast(colors["focus"], colors["ground"]) >= 3
        assert contrast(colors["muted"], colors["ground"]) >= 3  # borders of controls


@pytest.mark.thorough
def test_other_processes_write_the_reports_of_many(some: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    here, there = tmp_path / "here", tmp_path / "there"
    files.write(some, here, (*files.REPORTS, "json"))
    there.mkdir()
    documents.write(some, there)
    (tmp_path / "damaged").mkdir()
    with files.Writer(16, pytest.fail) as reports, monkeypatch.context() as patch:
        patch.setattr(documents, "read", lambda folder: pytest.fail("this process did it"))
        reports.write(there)
    assert {path.name for path in there.iterdir()} == set(files.NAMES.values())
    assert all((there / name).read_bytes() == (here / name).read_bytes() for name in files.NAMES.values())
    with pytest.raises(UsageError, match="there is no run"), files.Writer(16, pytest.fail) as reports:
        reports.write(tmp_path / "damaged")


class _Broken:
    """A pool whose processes have ended: some work was given before, and none can be given any more."""

    def __init__(self, *_: object) -> None:
        self._given = 0

    def submit(self, *_: object) -> Future[None]:
        self._given += 1
        if self._given > 1:
            raise BrokenProcessPool("A child process terminated abruptly")
        future = Future[None]()
        future.set_exception(BrokenProcessPool("A process in the process pool was terminated abruptly"))
        return future

    def shutdown(self) -> None:
        pass


def test_reports_of_processes_that_were_ended_are_written_by_this_one(
    some: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(files, "ProcessPoolExecutor", _Broken)
    with files.Writer(16, pytest.fail) as reports:
        for folder in (tmp_path / "given", tmp_path / "refused"):
            folder.mkdir()
            documents.write(some, folder)
            reports.write(folder)
    for folder in tmp_path.iterdir():
        assert {path.name for path in folder.iterdir()} == set(files.NAMES.values())


@pytest.mark.thorough
def test_a_signal_to_the_whole_group_ends_no_process_that_writes_reports() -> None:
    """A process that obeyed would have no answer."""
    with ProcessPoolExecutor(1, get_context("spawn"), files._leave_signals) as pool:
        for number in (signal.SIGTERM, signal.SIGINT):
            assert pool.submit(signal.raise_signal, number).result() is None


def test_a_long_reason_is_told_in_full_in_one_place() -> None:
    why = "export: " + "it cannot " * 60
    failed = runs.variant("onnxruntime-fp32", status="failed", reason=why)
    baseline = runs.variant("eager", reasons={"latency": why, "memory": why})
    some = runs.small(baseline, failed, winner=None, winner_reason=why)
    assert all(len(fact.text) < 300 for fact in page.answer_questions(some))
    assert page.render(some).count(why.strip()) == 1


@pytest.mark.parametrize(("status", "words"), [("measured", "every variant was built"), ("built", "not measured: a")])
def test_an_interrupted_run_does_not_say_that_everything_was_measured(status: str, words: str) -> None:
    (block,) = sections.render_rejected(runs.small(runs.variant("eager"), runs.variant("a", status=status)), {})
    assert words in str(block)
