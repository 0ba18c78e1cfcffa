"""Recipes: defaults, YAML in and out, and what is said about mistakes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.recipe import Recipe, commented, make, parsed, read


def test_what_init_writes_is_the_recipe_with_all_its_defaults(tmp_path: Path) -> None:
    recipe = make({"model": "digits", "batch": [2, 4], "budgets": {"max_drop": 0.01}})
    (tmp_path / "r.yaml").write_text(commented(recipe))
    values = read(tmp_path / "r.yaml")
    assert make(values) == recipe
    assert set(values) == set(Recipe.model_fields)


def test_every_field_is_explained() -> None:
    lines = commented(make({"model": "digits"})).splitlines()
    keys = [line for line in lines if not line.lstrip().startswith("#")]
    assert len(keys) * 2 == len(lines)
    assert all(len(line.lstrip("# ")) > 10 for line in lines if line.lstrip().startswith("#"))


def test_sizes_and_durations_may_be_text() -> None:
    recipe = make(
        {
            "model": "digits",
            "budgets": {"max_memory_bytes": "2GiB", "max_latency_ms": "5ms"},
            "measure": {"seconds": "1m"},
            "export": {"external_data_bytes": "1KiB"},
        }
    )
    assert (recipe.budgets.max_memory_bytes, recipe.budgets.max_latency_ms) == (2 << 30, pytest.approx(5.0))
    assert (recipe.measure.seconds, recipe.export.external_data_bytes) == (60, 1024)
    assert make({"model": "digits", "budgets": {"max_p99_ms": 5}}).budgets.max_p99_ms == 5
    with pytest.raises(UsageError, match="'5' has no unit"):  # seconds or milliseconds?
        make({"model": "digits", "budgets": {"max_latency_ms": "5"}})


def test_repeated_choices_count_once() -> None:
    recipe = make({"model": "digits", "engines": ["onnxruntime", "onnxruntime"], "batch": [8, 1, 8]})
    assert (recipe.engines, recipe.batch) == (("onnxruntime",), (8, 1))
    twice = {"engines": ["tensorrt_rtx"], "targets": ["sm86", "sm86"], "workspace": ["1MiB"] * 2}
    recipe = make({"model": "digits", **twice})
    assert (recipe.targets, recipe.workspace) == (("sm86",), ("1MiB",))


def test_texts_are_read() -> None:
    recipe = make(
        {"model": "m", "inputs": ["x:float32:batch,3"], "shapes": {"batch": "1:2:3"}, "device": "cuda:1", "threads": 2}
    )
    assert (recipe.specs[0].shape, recipe.ranges["batch"].max) == (("batch", 3), 3)
    assert (recipe.where.kind, recipe.where.index, recipe.where.threads) == ("cuda", 1, 2)


def test_the_zoo_brings_its_own_data() -> None:
    assert (make({"model": "digits"}).data, make({"model": "digits(weights=None)"}).data) == ("digits", "digits")
    assert parsed({"model": "digits", "eval_data": "mine.npz"}).data == "mine.npz"
    assert make({"model": "resnet18"}).data is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"presicion": 1}, "no field 'presicion'"),
        ({"bach": [1]}, "did you mean batch.*\n.*the fields are model, inputs"),
        ({"budgets": {"max_ram": 1}}, "no field 'max_ram' in budgets.*\n.*max_memory_bytes"),
        ({"batch": "many"}, "batch.0: .*valid integer.*'many'"),
        ({"batch": [0]}, "at least 1"),
        ({"batch": []}, "batch"),
        ({"export": 17}, "export: .*mapping.*17"),
        ({"export": {"opset": 9}}, "export.opset: .*18"),
        ({"engines": ["tensorflow"]}, "'tensorflow'.*\n.*onnxruntime"),
        ({"device": "tpu"}, "'tpu'.*\n.*cuda"),
        ({"device": "cuda:one"}, "'cuda:one'"),
        ({"inputs": ["x"]}, "name:dtype"),
        ({"inputs": ["x:int8:2", "x:int8:3"]}, "'x' is given twice"),
        ({"shapes": {"batch": "3:2:1"}}, "out of order"),
        ({"budgets": {"max_memory_bytes": "lots"}}, "cannot read the size 'lots'"),
        ({"metric": "top3"}, "no metric 'top3'.*\n.*top5"),
        ({"eager": {"tf32": True}}, "eager.tf32 has no effect on onnxruntime.*\n.*--engine eager"),
        ({"onnxruntime": {"tf32": True}, "engines": ["compiled"]}, "onnxruntime.tf32 has no effect on compiled"),
        ({"eager": {"amp": True}}, "no field 'amp' in eager.*\n.*cuda_graphs"),
        ({"metric": "top5", "model": "resnet18"}, "top5 needs labeled data.*\n.*--eval"),
        ({"budgets": {"max_drop": 0.1}, "model": "resnet18"}, "max_drop needs labeled data"),
        ({"model": 3}, "model: .*string"),
    ],
)
def test_mistakes(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make({"model": "digits", **values})


def test_a_model_is_needed() -> None:
    with pytest.raises(UsageError, match="model: Field required"):
        make({})


def test_a_metric_of_the_users_own_is_looked_for_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_metric.py").write_text("def score(outputs, labels): ...\nraise RuntimeError\n")
    assert make({"model": "digits", "metric": "own_metric:score"}).metric == "own_metric:score"
    with pytest.raises(UsageError, match="has no function 'top9'"):
        make({"model": "digits", "metric": "own_metric:top9"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1\nb: }", "is not YAML: .* in line 2"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"- a", "no mapping"),
        (b"", "no mapping"),
        (b"a: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        read(tmp_path / "r.yaml")
    assert "\n" not in caught.value.message


def test_what_goes_into_run_json_comes_back() -> None:
    recipe = make({"model": "digits", "shapes": {"batch": "1:2:3"}, "engines": ["eager"]})
    assert Recipe.model_validate(yaml.safe_load(recipe.model_dump_json())) == recipe


@pytest.mark.parametrize(
    ("shape", "expected"), [("1:8:64", (1, 8)), ("1:2:4", (1,)), ("16:32:64", (32,)), ("4:8:8", (8,))]
)
def test_batches_that_nobody_named_are_within_the_range_given(shape: str, expected: tuple[int, ...]) -> None:
    assert make({"model": "digits", "shapes": {"batch": shape}}).batch == expected
    assert make({"model": "digits", "shapes": {"batch": shape}, "batch": [3]}).batch == (3,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workspace": ["99999999TiB"]}, "more than any device"),
        ({"workspace": ["0"]}, "holds nothing"),
        ({"tensorrt_run": {"weight_streaming_budget": "1MiB"}}, "streams weights"),
        ({"engines": ["onnxruntime"], "targets": ["sm86"]}, "--target has no effect on onnxruntime"),
        ({"engines": ["onnxruntime"], "tensorrt": {"tf32": False}}, "--tf32 has no effect"),
    ],
)
def test_tensorrt_options_that_make_no_sense(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make({"model": "digits", "engines": ["tensorrt_rtx"], **values})


@pytest.mark.parametrize("field", ["calibration", "eval_data"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.npz", None, "no data file .*gone.npz"),
        ("data.npz", b"x,y", "cannot read .*data.npz"),
        ("data.npy", b"x,y", "cannot read .*data.npy"),
        ("data.safetensors", b"x,y", "cannot read .*data.safetensors"),
        ("data.jsonl", b"x,y", "line 1 is no JSON"),
        ("data.csv", b"x,y", "cannot tell what data"),
        ("code.py:gone", b"x = 1", "no function 'gone'"),
        ("images", None, "cannot tell what data"),
    ],
)
def test_data_that_cannot_be_read_are_refused_before_any_step(
    field: str, name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if content:
        (tmp_path / name.partition(":")[0]).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        make({"model": "digits", field: str(tmp_path / name)})


def test_arrays_of_a_file_are_held_against_inputs_that_the_recipe_names(tmp_path: Path) -> None:
    values = {"model": "digits", "inputs": ["image:float32:batch,1,8,8"], "eval_data": str(tmp_path / "data.npz")}
    np.savez(tmp_path / "data.npz", image=np.zeros((2, 1, 8, 8), np.float32), y=np.arange(2))
    with pytest.raises(UsageError, match=r"holds 'image', 'y', and the model takes 'image'\n.*did you mean --labels y"):
        make(values)
    make({**values, "data_options": {"labels": "y"}})


def test_a_tokenizer_that_is_not_there_is_refused_before_any_step() -> None:
    with pytest.raises(UsageError, match=r"--tokenizer names gone\.json"):
        make({"model": "digits", "data_options": {"tokenizer": "gone.json"}})
