"""Reading run.json: of older and newer versions, and what is damaged; messages name the field."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.run import ModelRecord, Run, VariantRecord

Values = dict[str, Any]


def values() -> Values:
    """A run as run.json has it."""
    baseline = VariantRecord(
        id="eager", engine="eager", precision="fp32", status="measured", latency=(LatencyRow(batch=1, p50_ms=2.0),)
    )
    run = Run(
        name="demo",
        created="2026-01-01T00:00:00+00:00",
        seconds=1.0,
        complete=True,
        recipe=make({"model": "digits"}),
        environment={"warnings": ["the machine is busy"]},
        model=ModelRecord(source="digits", signature=None, data=None),
        steps=(),
        baseline=baseline,
        variants=(baseline.model_copy(update={"id": "other"}),),
        winner=None,
        pareto=(),
        verdicts=(),
    )
    found: Values = json.loads(run.model_dump_json(by_alias=True))
    return found


def read(folder: Path, change: Callable[[Values], object] = lambda found: None, **how: bool) -> Run:
    """What is read of a run in which something was changed."""
    found = values()
    change(found)
    (folder / "run.json").write_text(json.dumps(found))
    return runs.read(folder, **how)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert json.loads(read(tmp_path).model_dump_json(by_alias=True)) == values()
    assert runs.read(tmp_path / "run.json").name == "demo"


def test_fields_of_a_later_version_are_left_out_and_named(tmp_path: Path) -> None:
    def add(found: Values) -> None:
        found["mood"] = "good"
        found["recipe"]["colour"] = "red"
        found["recipe"]["budgets"]["max_price"] = 3
        for record in (found["baseline"], *found["variants"]):
            record["latency"][0]["p42_ms"] = 1.0

    run = read(tmp_path, add)
    assert run.recipe == make({"model": "digits"})
    caution, before = run.environment["warnings"]
    assert before == "the machine is busy"
    assert set(caution.partition(": ")[2].split(", ")) == {
        *("mood", "recipe.colour", "recipe.budgets.max_price"),
        *("baseline.latency[].p42_ms", "variants[].latency[].p42_ms"),
    }


def test_a_recipe_that_is_not_known_as_a_whole_is_not_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not know: recipe\.colour"):
        read(tmp_path, lambda found: found["recipe"].update(colour="red"), to_go_on=True)
    assert read(tmp_path, lambda found: found.update(mood="good"), to_go_on=True).name == "demo"


def test_fields_that_were_not_there_yet_have_their_defaults(tmp_path: Path) -> None:
    def remove(found: Values) -> None:
        del found["model"]["sha256"], found["baseline"]["coverage"], found["recipe"]["sparsifying"]

    assert read(tmp_path, remove).model.sha256 is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.update(schema="enginesmith.run/0"), "older schema enginesmith.run/0"),
        (lambda found: found.update(schema="enginesmith.run/2"), "newer schema enginesmith.run/2"),
        (lambda found: found.update(schema="enginesmith.comparison/1"), "its schema is"),
        (lambda found: found.update(schema=["enginesmith.run/1"]), "its schema is"),
        (lambda found: found.pop("schema"), "names no schema"),
        (lambda found: found.pop("recipe"), "recipe is missing"),
        (lambda found: found["baseline"].pop("engine"), r"baseline\.engine is missing"),
        (
            lambda found: found["variants"][0]["latency"][0].update(p50_ms="fast"),
            r"variants\[0\]\.latency\[0\]\.p50_ms",
        ),
        (lambda found: found.update(variants={}), "variants: Input should be a valid tuple"),
        (lambda found: found["environment"].update(warnings="busy"), 'environment: warnings: .*it is "busy"'),
        (lambda found: found["environment"].update(gpus=[3]), r"environment: gpus\[0\]"),
        (lambda found: found.update(seconds=float("nan")), "NaN is no number"),
    ],
)
def test_what_is_wrong_is_said_by_field(tmp_path: Path, change: Callable[[Values], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(tmp_path, change)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "ends in the middle"),
        (json.dumps({"schema": "enginesmith.run/1"}).encode()[:-5], "ends in the middle"),
        (b'{"schema": "enginesmith.run/1", "name": }', "Expecting value at line 1"),
        (b'{"name": "\xff\xfe"}', "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b"[]", "names no schema"),
        (b"null", "names no schema"),
    ],
)
def test_what_is_no_document_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        runs.read(tmp_path)


def test_what_is_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    text = json.dumps(values())
    for length in range(1, len(text), 97):
        (tmp_path / "run.json").write_text(text[:length])
        with pytest.raises(UsageError, match="damaged"):
            runs.read(tmp_path)


def test_a_folder_without_a_run_and_what_is_no_file(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="there is no run in"):
            runs.read(place)
    with pytest.raises(UsageError, match="it is no file"):
        runs.read(Path("/dev/null"))


def test_what_is_too_large_for_a_document_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "run.json").open("wb") as sparse:
        sparse.truncate(2 << 30)
    with pytest.raises(UsageError, match="2 GiB"):
        runs.read(tmp_path)
