"""The fleet file: which pairs of models and targets it asks for, with which recipes, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.recipe.fleet import Entry, Fleet, Place, make, merge_layers, read

FILE = Path(__file__).parents[1] / "data/fleet/fleet.yaml"
SMALL: dict[str, Any] = {"models": {"digits": {}, "lenet": {}}, "targets": {"cpu": {}, "gpu": {"accelerator": "H100"}}}


@pytest.fixture(scope="module", autouse=True)
def _data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The data that the fleet's recipes name, in the current folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("fleet"))
        np.savez("data.npz", x=np.zeros((2, 4), np.float32))
        yield


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return read(FILE)


@pytest.fixture(scope="module")
def entries(fleet: Fleet) -> dict[str, Entry]:
    return {one.name: one for one in fleet.entries()}


def test_every_model_for_every_target_but_what_is_skipped(entries: dict[str, Entry]) -> None:
    assert list(entries) == [
        *("digits@cpu", "digits@h100", "digits@edge", "detector@cpu", "detector@h100"),
        *("nets.py-mlp@cpu", "nets.py-mlp@h100"),
    ]
    assert {one.recipe.model for one in entries.values()} == {"digits", "nets/detector.py:build", "nets.py:mlp"}


def test_recipes_are_laid_over_each_other_in_order(entries: dict[str, Entry]) -> None:
    """Fleet, target, model, pair: mappings by key, lists as a whole, and null for the default again."""
    cpu, h100, edge = (entries[f"digits@{target}"].recipe for target in ("cpu", "h100", "edge"))
    assert (cpu.measure.seconds, cpu.measure.precision) == (5.0, 0.02)
    assert (h100.measure.seconds, h100.measure.precision) == (2.0, 0.02)
    assert (edge.measure.seconds, edge.measure.precision) == (20.0, 0.02)
    assert (cpu.batch, edge.batch, entries["detector@cpu"].recipe.batch) == ((1, 8), (2,), (1, 4))
    assert (edge.budgets.max_drop, edge.budgets.max_latency_ms) == (0.01, 5.0)
    assert entries["detector@cpu"].recipe.budgets.max_drop is None
    assert {one.recipe.precisions for one in entries.values()} == {("fp32", "int8")}
    assert h100.engines == ("tensorrt",)
    names = ("nets.py-mlp@cpu", "nets.py-mlp@h100", "digits@h100", "digits@edge")
    assert [entries[name].recipe.seed for name in names] == [1, 2, 3, 4]


def test_options_come_last(fleet: Fleet) -> None:
    given = {"batch": [16], "measure": {"seconds": 1.0}}
    (edge,) = fleet.entries(["digits@edge"], given)
    assert (edge.recipe.batch, edge.recipe.measure.seconds, edge.recipe.measure.precision) == ((16,), 1.0, 0.02)


def test_targets_say_where_steps_run(entries: dict[str, Entry]) -> None:
    assert (entries["digits@cpu"].place, entries["digits@h100"].place) == (Place("cpu"), Place("cuda", "H100"))
    assert entries["digits@edge"].place == Place("cuda", "L4", (("edge", 1.0),))
    assert [entries[f"digits@{name}"].recipe.device for name in ("cpu", "h100", "edge")] == [None, "cuda", "cuda"]


@pytest.mark.parametrize(
    ("patterns", "count"),
    [(["digits"], 3), (["*@cpu"], 3), (["cpu"], 3), (["digits@edge"], 1), (["det*", "digits@cpu"], 3), (["nets*"], 2)],
)
def test_patterns_choose_entries(fleet: Fleet, patterns: list[str], count: int) -> None:
    assert len(fleet.entries(patterns)) == count


def test_a_list_of_models_is_a_fleet_of_this_machine() -> None:
    entries = make({"models": ["digits", "lenet"]}).entries()
    assert [one.name for one in entries] == ["digits@here", "lenet@here"]
    assert entries[0].place == Place("cpu")


def test_a_model_that_is_not_there_is_the_matter_of_its_entry() -> None:
    entries = make({"models": {"digits": {}, "gone": {"model": "gone.py:build", "recipe": {"prune": [0.3]}}}}).entries()
    assert [one.recipe.model for one in entries] == ["digits", "gone.py:build"]
    assert entries[1].recipe.prune == ("0.3",)


def test_the_example_in_the_message_is_a_fleet_of_models_that_exist(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.touch()
    with pytest.raises(UsageError) as refused:
        read(file)
    file.write_text(refused.value.remedy.split("`")[1], encoding="utf-8")
    entries = read(file).entries()
    assert len(entries) > 1
    assert all(resolve(entry.recipe.model).form == "zoo" for entry in entries)


def changed(**changes: Any) -> dict[str, Any]:
    return merge_layers(SMALL, changes)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "the fleet file has no models"),
        ({"models": {}}, "the fleet file has no models"),
        ({"modles": {"digits": {}}}, "has no field 'modles'; did you mean models"),
        ({**SMALL, 1: {}}, "has no field '1'"),
        ({"models": ["digits", "lenet", "digits"]}, "models has 'digits' twice"),
        ({"models": ["digits"], "targets": ["cpu", "cpu"]}, "targets has 'cpu' twice"),
        (changed(models={"digits": {"targets": ["cpu", "cpu"]}}), "models.digits.targets has 'cpu' twice"),
        (changed(models={"../x": {"model": "digits"}}), "models: '../x' can be no name"),
        (changed(models={"hf:a/b@main": {}}), "models: 'hf:a/b@main' can be no name"),
        (changed(models={"a" * 101: {"model": "digits"}}), "can be no name"),
        (changed(targets={"c p u": {}}), "targets: 'c p u' can be no name"),
        (changed(target={}), "has no field 'target'; did you mean targets"),
        (changed(models={"digits": {"recipie": {}}}), "no field 'recipie' in models.digits; did you mean recipe"),
        (changed(targets={"cpu": {"devise": "cpu"}}), "no field 'devise' in targets.cpu; did you mean device"),
        (changed(models={1: {}}), "models: the name 1 is no text"),
        (changed(recipe={"precisons": ["fp32"]}), "^recipe: the recipe has no field 'precisons'; did you mean precis"),
        (changed(targets={"gpu": {"recipe": {"measure": {"secs": 1}}}}), "^targets.gpu.recipe: .*no field 'secs' in m"),
        (changed(models={"digits": {"recipe": {"batch": "x"}}}), "^models.digits.recipe: batch"),
        (changed(overrides={"digits@cpu": {"batch": [0]}}), "^overrides.digits@cpu: batch: a batch size"),
        (changed(recipe={"model": "digits"}), "recipe names a model"),
        (changed(overrides={"digit@cpu": {}}), "overrides names 'digit@cpu'.*did you mean digits@cpu"),
        (changed(skip=["digits@cpus"]), "skip names 'digits@cpus'.*did you mean digits@cpu"),
        (changed(skip=["*@tpu"]), "skip names"),
        (changed(models={"digits": {"targets": ["cpus"]}}), "models.digits.targets names 'cpus'.*did you mean cpu"),
        (changed(targets={"gpu": {"device": "cpu"}}), "targets.gpu has the accelerator H100, and its device is cpu"),
        (changed(targets={"cpu": {"device": "tpu"}}), "targets.cpu: device: there is no device 'tpu'"),
        (changed(targets={"cpu": {"device": "cpu", "recipe": {"device": "cpu"}}}), "names its device twice"),
        (changed(targets={"cpu": {"resources": {"edge": 0}}}), "resources: of edge more than 0 is needed"),
        (changed(models={"Digits": {"model": "digits"}}), "digits@cpu and Digits@cpu would both have the folder"),
        (changed(models={"a/b": {}, "a:b": {}}), "a/b@cpu and a:b@cpu would both have the folder a-b@cpu"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(values)


@pytest.mark.parametrize(
    ("values", "only", "options", "words"),
    [
        (SMALL, ["digitz"], {}, "--only names 'digitz'.*did you mean digits"),
        (changed(skip=["*"]), [], {}, "nothing is left"),
        (SMALL, ["gpu"], {"device": "cpu"}, "^digits@gpu: the target has the accelerator H100"),
        (
            changed(overrides={"lenet@cpu": {"budgets": {"max_drop": 0.1}}}),
            [],
            {},
            "^lenet@cpu: budgets.max_drop needs",
        ),
    ],
)
def test_what_breaks_for_an_entry_names_it(values: Any, only: list[str], options: dict[str, Any], words: str) -> None:
    fleet = make(values)
    with pytest.raises(UsageError, match=words):
        fleet.entries(only, options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: [", "the fleet file .* is not YAML: .* in line"),
        ("- digits", "the fleet file .* is no mapping"),
        ("models:\n  digits: {}\n  digits: {}\n", "'digits' stands there twice in line 3"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "fleet.yaml").write_text(text)
    with pytest.raises(UsageError, match=words):
        read(tmp_path / "fleet.yaml")
