"""Other precisions through the command line, on the trained digits net: made, held against eager, measured."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from enginesmith import Settings, load_run, optimize
from enginesmith.calibration.dataset import embedded
from enginesmith.pipeline.system.software import version
from graphs import parse_graph, sqnr_db

COMMON = ("fp16", "int8")
PRECISIONS = (*COMMON, "bf16", "int8+fp16", "int8-dynamic", "fp8", "int4-weights")
Cli = Callable[..., Any]


def data(folder: Path, **changes: np.ndarray) -> Path:
    """Calibration data for digits, changed by name."""
    arrays = dict(embedded("digits", "calibration").arrays)
    path = folder / "data.npz"
    np.savez(path, **{**arrays, **changes})
    return path


@pytest.mark.parametrize(
    "precision", [pytest.param(name, marks=[pytest.mark.thorough] * (name not in COMMON)) for name in PRECISIONS]
)
def test_every_precision_becomes_a_sound_graph(cli: Cli, tmp_path: Path, precision: str) -> None:
    out = tmp_path / "digits.onnx"
    done = cli(
        "precision", "digits", "-o", out, "--precision", precision, "--batch", "1,3", "--search-steps", "1", "--json"
    )
    assert done.code == 0, done.text
    onnx.checker.check_model(out, full_check=True)
    found = json.loads(done.stdout)
    assert all(entry["passed"] for entry in found["fidelity"])
    graph = onnx.load(out).graph
    kinds = {tensor.data_type for tensor in graph.initializer}
    wanted = {
        "fp16": onnx.TensorProto.FLOAT16,
        "bf16": onnx.TensorProto.BFLOAT16,
        "int8": onnx.TensorProto.INT8,
        "int8+fp16": onnx.TensorProto.INT8,
        "int8-dynamic": onnx.TensorProto.INT8,
        "fp8": onnx.TensorProto.FLOAT8E4M3FN,
        "int4-weights": onnx.TensorProto.INT4,
    }
    assert wanted[precision] in kinds
    assert {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)} == {onnx.TensorProto.FLOAT}


@pytest.mark.thorough
def test_fp8_for_onnx_runtime_answers_as_it_is_written(cli: Cli, tmp_path: Path) -> None:
    """The search judges by sessions of ONNX Runtime, which drop a Relu before fp8 by default."""
    given, out, rng = tmp_path / "float.onnx", tmp_path / "fp8.onnx", np.random.default_rng(0)
    text = "a = Gemm(x, w, b) r = Relu(a) c = Gemm(r, v, d) s = Relu(c) y = Gemm(s, u)"
    shapes = {"w": (16, 32), "b": (32,), "v": (32, 32), "d": (32,), "u": (32, 4)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    onnx.save(onnx_ir.to_proto(parse_graph(f"(float[n, 16] x) => (float[n, 4] y) {{ {text} }}", 21, **weights)), given)
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((64, 16)).astype(np.float32))
    done = cli(
        *("precision", given, "-o", out, "--precision", "fp8", "--engine", "onnxruntime", "--search-steps", "1"),
        *("--calibration", tmp_path / "data.npz", "--batch", "1,3", "--no-cache", "--json"),
    )
    assert done.code == 0, done.text
    summary = json.loads(done.stdout)["summary"]
    assert "3 of 3 products in fp8" in summary
    assert "ReluQuantRewrite" in summary, "people are told what this graph needs elsewhere"
    feeds = {"x": rng.standard_normal((8, 16)).astype(np.float32)}
    (wanted,), (answer,) = (ReferenceEvaluator(onnx.load(path)).run(None, dict(feeds)) for path in (given, out))
    assert sqnr_db(wanted, answer) > 20


@pytest.mark.thorough
@pytest.mark.skipif(version("nncf") is None, reason="nncf is not installed; pip install nncf")
def test_nncf_makes_the_same_graph_twice(cli: Cli, tmp_path: Path) -> None:
    """Groups stay in floating point by name; the sentence tells its version and settings."""
    files = [tmp_path / "first.onnx", tmp_path / "second.onnx"]
    for out in files:
        done = cli(
            *("precision", "digits", "-o", out, "--precision", "int8", "--quantizer", "nncf", "--keep", "fc"),
            *("--batch", "1,3", "--samples", "16", "--weight-bits", "7", "--no-cache", "--json"),
        )
        assert done.code == 0, done.text
    found = json.loads(done.stdout)
    assert all(entry["passed"] for entry in found["fidelity"])
    assert f"15 of 16 products in int8; NNCF {version('nncf')}: preset mixed, 7-bit weights" in found["summary"]
    assert found["history"][-1]["tools"]["nncf"] == version("nncf")
    assert files[0].read_bytes() == files[1].read_bytes()
    weights = {each.name: numpy_helper.to_array(each) for each in onnx.load(out).graph.initializer}
    largest = max(np.abs(array.astype(int)).max() for array in weights.values() if array.dtype == np.int8)
    assert 60 <= largest <= 64


@pytest.mark.thorough
@pytest.mark.skipif(version("nncf") is None, reason="nncf is not installed; pip install nncf")
def test_nncf_takes_graphs_whose_weights_lie_beside_them(cli: Cli, tmp_path: Path) -> None:
    done = cli(
        *("precision", "digits", "-o", tmp_path / "int8.onnx", "--precision", "int8", "--quantizer", "nncf"),
        *("--engine", "onnxruntime", "--samples", "8", "--external-data", "1KiB", "--no-cache", "--json"),
    )
    assert done.code == 0, done.text


UNEVEN = """
import torch
from enginesmith.models.digits import digits
from enginesmith.models.resnet import BasicBlock


def build():
    module, example = digits()
    generator = torch.Generator().manual_seed(0)
    for block in (each for each in module.modules() if isinstance(each, BasicBlock)):
        factors = 10 ** (3 * torch.rand(block.conv1.out_channels, generator=generator) - 1.5)
        block.bn1.weight.data *= factors
        block.bn1.bias.data *= factors
        block.conv2.weight.data /= factors[:, None, None]
    return module, example
"""
"""Digits with channels within blocks that are up to 1 000 times larger than others; the answers are the same."""


@pytest.mark.thorough
def test_uneven_channels_are_rescaled_and_stay_in_int8(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(UNEVEN)
    done = cli(
        *(
            "optimize",
            f"{tmp_path / 'net.py'}:build",
            "--data",
            "digits",
            "--max-drop",
            "0.02",
            "--engine",
            "onnxruntime",
        ),
        *("--precision", "int8", "--batch", "1", "--measure-time", "1s", "--no-memory", "--out", tmp_path / "run"),
        "--no-cache",
    )
    assert done.code == 0, done.text
    (record,) = json.loads((tmp_path / "run" / "run.json").read_text())["variants"]
    assert record["coverage"]["macs"] == {"int8": 1.0}
    first = record["search"][0]
    assert (first["passed"], first["why"]) == (True, "everything quantized, channels rescaled, ranges by mse")
    (note,) = next(entry["notes"] for entry in record["history"] if entry["step"] == "precision-int8-onnxruntime")
    assert re.match(
        r"channels rescaled: \d+ of 16 groups had less than 25 dB, .*; equalized \d+ sets of channels", note
    )


@pytest.fixture(scope="module")
def int8(digits_run: Path) -> dict[str, Any]:
    """The record of the variant in int8."""
    variants = json.loads((digits_run / "run.json").read_text())["variants"]
    record: dict[str, Any] = next(one for one in variants if one["id"] == "onnxruntime-int8")
    return record


def test_int8_holds_the_budget_of_accuracy(int8: dict[str, Any]) -> None:
    assert int8["status"] == "measured"
    assert int8["quality"]["drop"] <= 0.01
    assert int8["coverage"]["macs"]["int8"] > 0.5
    assert int8["engine_coverage"]["macs"]["int8"] > 0.5
    assert not int8["synthetic_calibration"]


def test_the_search_and_the_assignment_are_told(digits_run: Path, int8: dict[str, Any]) -> None:
    assert int8["search"]
    assert all(trial["why"] for trial in int8["search"])
    assert {entry["precision"] for entry in int8["assignment"]} <= {"int8", "fp32"}
    assert int8["assignment"][0]["group"] in (digits_run / "report.html").read_text()
    assert int8["remarks"]


@pytest.mark.thorough
def test_a_second_run_takes_everything_from_the_store(digits_run: Path, store: Path, tmp_path: Path) -> None:
    first = load_run(digits_run)
    again = optimize(first.recipe, tmp_path / "again", Settings(store=store))
    rows = [row for record in (first.baseline, *first.variants) for row in record.latency]
    tried_again = {"latency"} if any(row.failure for row in rows) else set()  # what failed is no answer to keep
    assert {step.id for step in again.steps if not step.cached} <= tried_again


@pytest.mark.usefixtures("digits_run")
def test_a_model_has_its_own_files_alone_whatever_the_fork_server_imported(store: Path) -> None:
    loaded = [json.loads(path.read_bytes()) for path in store.glob("objects/*/*/model.json")]
    files = [name for record in loaded if record["model"] == "digits" for name, _ in record["code"]]
    assert set(files) == {"{enginesmith}/models/weights/digits.safetensors"}


def test_a_group_can_be_kept_by_hand(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "digits.onnx"
    done = cli("precision", "digits", "-o", out, "--precision", "int8", "--keep", "head*", "--search-steps", "2")
    nothing = cli("precision", "digits", "-o", out, "--precision", "int8", "--keep", "nosuchthing")
    assert done.code in (0, 2)
    assert nothing.code == 2
    assert "nosuchthing" in nothing.stderr


def test_an_old_file_is_quantized_as_a_whole_and_answers_as_before(cli: Cli, tmp_path: Path) -> None:
    """Opset 10 without names of nodes: the conversion adds nodes, and resizing has other coordinates since."""
    rng, path, out = np.random.default_rng(0), tmp_path / "old.onnx", tmp_path / "new.onnx"
    text = """<ir_version: 5, opset_import: ["": 10]> g (float[batch, 4, 12, 12] x) => (float[batch, 8, 24, 24] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, v)
        b = Relu(a)
        c = Resize <mode = "linear"> (b, s)
        y = Conv <pads = [1, 1, 1, 1]> (c, w)
    }"""
    model = onnx.parser.parse_model(text)
    weights = {"v": rng.standard_normal((16, 4, 3, 3)) / 6, "w": rng.standard_normal((8, 16, 3, 3)) / 12}
    for name, value in {**weights, "s": np.array([1, 1, 2, 2])}.items():
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, 1, value.shape))
    onnx.save(model, path)
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((32, 4, 12, 12)).astype(np.float32))
    done = cli(
        *("precision", path, "-o", out, "--precision", "int8", "--calibration", tmp_path / "data.npz"),
        *("--search-steps", "1", "--min-sqnr", "20", "--json"),
    )
    assert done.code == 0, done.text
    found = json.loads(done.stdout)
    assert all(entry["passed"] for entry in found["fidelity"])
    assert "2 of 2 products in int8" in found["summary"]


def test_calibration_data_is_needed_or_made_up_on_purpose(cli: Cli, tmp_path: Path) -> None:
    net = Path(__file__).parent.parent / "data" / "nets.py"
    out = tmp_path / "mlp.onnx"
    refused = cli("precision", f"{net}:mlp", "-o", out, "--precision", "int8")
    assert refused.code == 2
    assert "--calibration" in refused.stderr
    made_up = cli(
        "precision", f"{net}:mlp", "-o", out, "--precision", "int8", "--synthetic-calibration", "--search-steps", "1"
    )
    assert made_up.code == 0, made_up.text
    assert "random" in made_up.text


@pytest.mark.thorough
def test_what_worked_for_a_similar_model_is_tried_first(cli: Cli, tmp_path: Path) -> None:
    net, store = Path(__file__).parent.parent / "data" / "nets.py", tmp_path / "store"
    made = ("--precision", "int8", "--synthetic-calibration", "--store", store)
    assert cli("precision", f"{net}:mlp", "-o", tmp_path / "one.onnx", *made).code == 0
    past = store / "searches" / "int8.json"
    past.write_text(past.read_text().replace('"mse"', '"percentile"'))
    other = cli("precision", f"{net}:mlp(width=32)", "-o", tmp_path / "two.onnx", *made)
    assert other.code == 0, other.text
    words = "everything quantized, ranges by percentile; tried first, as it worked for Gemm with little lost"
    assert words in " ".join(other.text.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": np.zeros((8, 1, 8, 8), np.float32)}, "zero"),
        ({"image": np.full((8, 1, 8, 8), np.nan, np.float32)}, "NaN"),
        ({"image": np.ones((8, 1, 8, 8), np.float32)}, "same"),
        ({"image": np.ones((8, 1, 9, 9), np.float32)}, "shape"),
        ({"other": np.ones((8, 1), np.float32)}, "other"),
        ({"image": np.ones((0, 1, 8, 8), np.float32)}, "empty"),
    ],
)
def test_bad_calibration_data(cli: Cli, tmp_path: Path, changes: dict[str, np.ndarray], message: str) -> None:
    out = tmp_path / "digits.onnx"
    done = cli("precision", "digits", "-o", out, "--precision", "int8", "--calibration", data(tmp_path, **changes))
    assert done.code == 2
    assert message in done.stderr
    assert not out.exists()
