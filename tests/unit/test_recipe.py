"""Recipes: defaults, YAML in and out, and what is said about mistakes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import fleets
from enginesmith.calibration.options import PARTS, PartOptions
from enginesmith.pipeline.engines import ENGINES, engine_class
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.errors import MissingCapability, UsageError
from enginesmith.pipeline.execution.events import Event
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.planning.planner import first_steps
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import Recipe, commented, make, parsed, read
from enginesmith.pipeline.recipe.fleet import Entry
from enginesmith.pipeline.recipe.recipe import LISTS
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.device import Availability, Device
from enginesmith.pipeline.system.nvidia import CudaDevice, Driver
from enginesmith.pipeline.workflows.device import begin_on, require_device_of
from enginesmith.pipeline.workflows.load import load
from enginesmith.pipeline.workflows.optimize import optimize


def test_what_init_writes_is_the_recipe_with_all_its_defaults(tmp_path: Path) -> None:
    recipe = make({"model": "digits", "batch": [2, 4], "budgets": {"max_drop": 0.01}}, listed=True)
    (tmp_path / "r.yaml").write_text(commented(recipe))
    values = read(tmp_path / "r.yaml")
    assert make(values, listed=True) == recipe
    assert set(values) == set(Recipe.model_fields) - set(LISTS)


def test_every_field_is_explained() -> None:
    recipe = make({"model": "digits", "sparsity": ["2:4"]}, listed=True)
    lines = commented(recipe).splitlines()
    keys = [line for line in lines if not line.lstrip().startswith("#")]
    named = [line for line in lines if line.startswith(tuple(f"# {name}: " for name in LISTS))]
    assert len(named) == len(LISTS) - 1
    assert (len(keys) + len(named)) * 2 == len(lines)
    assert all(len(line.lstrip("# ")) > 10 for line in lines if line.lstrip().startswith("#") and line not in named)


def test_python_values_are_those_of_a_file_or_are_refused(tmp_path: Path) -> None:
    """Paths may be those of pathlib; arguments of another kind are errors of the kind that callers catch."""
    np.savez(tmp_path / "data.npz", image=np.zeros((4, 1, 8, 8), np.float32))
    recipe = make({"model": Path("digits"), "data": tmp_path / "data.npz"})
    assert (recipe.model, recipe.data) == ("digits", str(tmp_path / "data.npz"))
    mistakes: dict[str, Callable[[], object]] = {
        "the recipe: must be a mapping": lambda: make("digits"),  # type: ignore[arg-type]
        "recipe: a Recipe is needed": lambda: optimize({"model": "digits"}, tmp_path / "out"),  # type: ignore[arg-type]
        "jobs: must be a whole number from 1": lambda: Settings(jobs=0),
        r"data\.npz is no run": lambda: load(tmp_path / "data.npz"),
    }
    for words, mistake in mistakes.items():
        with pytest.raises(UsageError, match=words):
            mistake()


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
    evaluated = [make({"model": text}).evaluation_data for text in ("digits", "digits(weights=None)", "resnet18")]
    assert evaluated == ["digits", "digits", None]
    assert parsed({"model": "digits", "eval_data": "mine.npz"}).evaluation_data == "mine.npz"


@pytest.mark.parametrize(
    ("values", "names", "parts"),
    [
        ({}, ("digits",) * 3, ()),
        ({"calibration": "c", "eval_data": "e"}, ("c", "e", "e"), ()),
        ({"data": "d"}, ("d", "d", "d"), ("calibration", "choice", "judgement")),
        ({"data": "d", "calibration": "c"}, ("c", "d", "d"), ("choice", "judgement")),
        ({"data": "d", "eval_data": "e"}, ("d", "d", "e"), ("calibration", "choice")),
        ({"data": "d", "calibration": "c", "eval_data": "e"}, ("c", "d", "e"), ("choice",)),
    ],
)
def test_data_is_shared_by_the_parts_that_have_none_of_their_own(
    values: dict[str, Any], names: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    recipe = parsed({"model": "digits", "samples": 9, "data_options": {"labels": "y"}, **values})
    assert (recipe.calibration_data, recipe.choice_data, recipe.evaluation_data) == names
    for part in PARTS:
        options = recipe.options_for(part)
        assert options.labels == "y"
        assert isinstance(options, PartOptions) == (part in parts)
        if isinstance(options, PartOptions):
            assert (options.part, options.shared_by, options.calibration_samples) == (part, parts, 9)
    assert recipe.model_copy(update={"data": "d", "recover": True}).options_for("choice").calibration_samples is None


@pytest.mark.parametrize(
    ("prepend", "given", "expected"),
    [
        (["resize"], {}, (None, None, None)),
        (["uint8,scale"], {}, (1.0, (0.0,), (1.0,))),
        (["normalize=imagenet"], {}, (None, (0.0,), (1.0,))),
        (["scale", "normalize"], {"rescale": 0.5, "std": [3.0]}, (0.5, (0.0,), (3.0,))),
    ],
)
def test_images_are_scaled_and_normalized_once(
    prepend: list[str], given: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    recipe = parsed({"model": "resnet18", "prepend": prepend, "data_options": given})
    for options in (recipe.options_for("choice"), recipe.model_copy(update={"data": "d"}).options_for("choice")):
        assert (options.rescale, options.mean, options.std) == expected


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
        ({"eager": {"amp": True}}, "no field 'amp' in eager.*\n.*tf32"),
        ({"cuda_graphs": "maybe"}, "cuda_graphs: .*'off', 'on' or 'both'"),
        ({"metric": "top5", "model": "resnet18"}, "top5 needs labeled data.*\n.*--eval"),
        ({"budgets": {"max_drop": 0.1}, "model": "resnet18"}, "max_drop needs labeled data"),
        ({"model": 3}, "model: .*string"),
    ],
)
def test_mistakes(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make({"model": "digits", **values}, listed=True)


@pytest.mark.parametrize(
    ("values", "field", "option", "said"),
    [
        (
            {"budgets": {"max_p99_ms": "0ms"}},
            "budgets.max_p99_ms",
            "--max-p99",
            ": must be greater than 0 .given: '0ms'",
        ),
        ({"budgets": {"max_memory_bytes": "3B?"}}, "budgets.max_memory_bytes", "--max-memory", ": cannot .*\n.*256MiB"),
        ({"batch": "0"}, "batch", "--batch", ": a batch size is at least 1"),
        ({"shapes": {"batch": "8:4:1"}}, "shapes", "--shape", ": the shape range"),
        ({"min_sqnr_db": float("-inf")}, "min_sqnr_db", "--min-sqnr", ": must be a finite number"),
        ({"workspace": ["3x"]}, "workspace", "--workspace", ": '3x'"),
        ({"prune": "30%", "recover": "3"}, "recovery.method", "--recover", ": there is no method '3'"),
        ({"data_options": {"resize": "0"}}, "data_options", "--resize", ": resize and crop"),
        ({"pruning": {"importance": "l1"}}, "pruning.importance", "--importance", " has no effect without --prune"),
        ({"budgets": {"max_drop": 1}, "model": "resnet18"}, "budgets.max_drop", "--max-drop", " needs labeled data"),
    ],
)
def test_a_bad_value_is_named_as_it_was_given(values: dict[str, Any], field: str, option: str, said: str) -> None:
    """A recipe file has the field, the command line the option."""
    for options, name in ({}, field), ({"seed": 1}, field), (values, option):
        with pytest.raises(UsageError, match=f"^{name}{said}"):
            make({"model": "digits", **values}, options)


@pytest.mark.parametrize(
    ("values", "off", "options", "words"),
    [
        (
            {"objective": "memory"},
            "memory",
            True,
            "^--objective memory needs memory to be measured, which --no-memory switches off",
        ),
        (
            {"objective": "memory"},
            "memory",
            False,
            "^objective memory needs memory to be measured, which measure.memory switches off",
        ),
        ({"budgets": {"max_memory_bytes": "1GiB"}}, "memory", True, "^--max-memory needs memory"),
        ({"budgets": {"max_latency_ms": "5ms"}}, "latency", False, "^budgets.max_latency_ms needs latency"),
        ({"budgets": {"min_throughput_per_s": 5}}, "latency", True, "^--min-throughput needs latency"),
        ({"measure": {"concurrency": [1, 2]}}, "latency", True, "^--concurrency needs latency"),
        ({"batch": "sweep"}, "latency", True, "needs latency"),
        ({"objective": "throughput"}, "latency", True, "^--objective throughput needs latency"),
        ({}, "latency", True, ""),
        ({"objective": "size", "budgets": {"max_size_bytes": "1GiB"}}, "latency", True, ""),
        ({"budgets": {"max_latency_ms": "5ms"}}, "memory", True, ""),
    ],
)
def test_what_is_judged_has_to_be_measured(values: dict[str, Any], off: str, options: bool, words: str) -> None:
    """Only to build is no contradiction: the objective is then the default."""
    given = {**values, "measure": {**values.get("measure", {}), off: False}}
    if not words:
        assert make({"model": "digits", **given}, listed=True)
        return
    with pytest.raises(UsageError, match=words):
        make({"model": "digits", **given}, given if options else None, listed=True)


def test_off_is_no_text_in_yaml() -> None:
    assert make({"model": "digits", "cuda_graphs": False}).cuda_graphs == "off"


def test_a_model_is_needed() -> None:
    with pytest.raises(UsageError, match="model: Field required"):
        make({})


def test_a_metric_of_the_users_own_is_looked_for_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_metric.py").write_text("def score(outputs, labels): ...\nraise RuntimeError\n")
    assert make({"model": "digits", "metric": "own_metric:score"}).metric == "own_metric:score"
    for metric, words in (("own_metric:top9", "has no function 'top9'"), ("top1:", "no output is named .*'top1:'")):
        with pytest.raises(UsageError, match=words):
            make({"model": "digits", "metric": metric})


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


def test_dimensions_have_the_names_of_the_file_or_their_words() -> None:
    for name, word in (("p2o.Dim.1", "p2o_Dim_1"), ("p2o_Dim_1", "p2o_Dim_1"), ("2d", "_2d"), ("日本", "日本")):
        assert list(make({"model": "net.onnx", "shapes": {name: "1:2:3"}}).ranges) == [word]


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


@pytest.mark.parametrize("field", ["data", "calibration", "eval_data"])
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


GPU = Driver(version=13000, devices=(CudaDevice(name="NVIDIA L4", compute_capability=(8, 9)),))


@pytest.mark.parametrize(
    ("driver", "usable", "fields", "kind", "elsewhere", "words"),
    [
        (GPU, ("eager", "onnxruntime"), {}, "cuda", "cpu", ""),
        (GPU, ("eager", "onnxruntime"), {"device": "cpu"}, "cpu", "cpu", ""),
        (GPU, ("eager", "tensorrt_rtx"), {"engines": ["tensorrt_rtx"]}, "cuda", None, ""),
        (GPU, ("eager",), {}, "cpu", None, "cuda:0 (NVIDIA L4) is not used, as no engine of this run can use it: onnx"),
        (GPU, ("onnxruntime",), {}, "cpu", None, "cuda:0 (NVIDIA L4) is not used: too old; get a newer one. The run"),
        (GPU, ("onnxruntime",), {"device": "cuda"}, "cuda", "cuda", "exit 4: cuda:0 cannot be used: too old"),
        (GPU, (), {"engines": ["tensorrt_rtx"]}, "cpu", None, "exit 4: tensorrt_rtx cannot run without it: too old"),
        (GPU, (), {"engines": ["tensorrt_rtx"], "targets": ["sm89"]}, "cpu", None, "is not used: too old"),
        (Driver(reason="there is none"), (), {}, "cpu", None, ""),
    ],
)
def test_the_device_is_the_gpu_where_torch_and_an_engine_can_use_it(
    driver: Driver,
    usable: tuple[str, ...],
    fields: dict[str, Any],
    kind: str,
    elsewhere: str | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def available(cls: type[Engine], device: Device) -> Availability:
        return Availability(ok=device.kind == "cpu" or cls.name in usable, reason="too old", remedy="get a newer one")

    monkeypatch.setattr(nvidia, "driver", lambda: driver)
    for name in ENGINES:
        monkeypatch.setattr(engine_class(name), "installed", classmethod(available))
    recipe, events = make({"model": "digits", **fields}), list[Event]()
    assert recipe.where.kind == kind
    assert recipe.for_other_machines().device == elsewhere
    step = first_steps(resolve_recipe(recipe))[0]
    if words.startswith("exit 4: "):
        with pytest.raises(MissingCapability, match=words.removeprefix("exit 4: ")):
            begin_on(recipe.where, recipe, events.append, step)
        return
    begin_on(recipe.where, recipe, events.append, step)
    first, *notes = (event.text for event in events)
    asked = fields.get("engines", ENGINES)
    on_cuda = [name for name in asked if "cuda" in engine_class(name).kinds]
    missing = [f"{name} (too old)" for name in on_cuda if name not in ("eager", *usable)]
    here = [name for name in asked if name != "eager" and name in usable]
    if kind == "cuda":
        lacking = f"; not here: {', '.join(missing)}" if missing else ""
        assert first == f"cuda:0 NVIDIA L4, CUDA 13.0: {', '.join(here)}{lacking}"
    else:
        assert first.startswith("cpu: ")
    assert [note.partition(words)[1] for note in notes] == ([words] if words else [])


def test_a_run_of_a_gpu_is_not_resumed_without_one(tmp_path: Path) -> None:
    entry = fleets.fleet().entries()[0]
    assert isinstance(entry, Entry)
    on_cpu, on_gpu = (fleets.run(entry, device=Device(kind=kind)) for kind in ("cpu", "cuda"))
    require_device_of(on_cpu, tmp_path)
    with pytest.raises(MissingCapability, match="was measured on cuda:0, which cannot be used here") as raised:
        require_device_of(on_gpu, tmp_path)
    assert "resume it where its GPU is" in str(raised.value.remedy)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inputs": ["x:float32:batch,past+length"]}, r"size of 'past', which stands in 'past\+length' alone"),
        ({"shapes": {"past + 1": "1:5:9"}}, r"'past \+ 1' is a sum.*\n.*its words: --shape past=MIN:OPT:MAX$"),
        ({"shapes": {"a+b": "1:5:9"}}, r"--shape a=MIN:OPT:MAX --shape b=MIN:OPT:MAX$"),
    ],
)
def test_sums_whose_words_have_no_size_and_sizes_of_sums_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make({"model": "digits", **values})
