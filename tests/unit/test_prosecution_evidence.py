"""The proof of a finding: a script that shows it, and a report for an issue tracker."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.openvino.engine import OpenVINO
from enginesmith.pipeline.measure.prosecution import reduction
from enginesmith.pipeline.measure.prosecution.evidence import Evidence
from enginesmith.pipeline.measure.prosecution.finding import Finding
from enginesmith.pipeline.measure.prosecution.issue import write_evidence, write_issue
from enginesmith.pipeline.measure.prosecution.locate import find_ties
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.units import AddedOption

SCRIPT = """
import onnxruntime
session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
found = {"y": session.run(["y"], inputs)[0]}
"""
FEEDS = {"x": np.arange(12, dtype=np.float32).reshape(3, 4) / 7}


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    nodes = [helper.make_node("Mul", ["x", "two"], ["b"]), helper.make_node("MatMul", ["b", "weight"], ["y"])]
    weights = {"two": np.float32(2), "weight": np.eye(4, dtype=np.float32).repeat(2, axis=1)[:, :4] + 1}
    weights["weight"] = np.concatenate([weights["weight"]] * 4)[:4]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def make_finding(**fields: Any) -> Finding:
    known: dict[str, Any] = {"walk": "sizes", "note": "batch 3", "reason": "wrong", "witness": "model", "attempts": 3}
    return Finding(**{**known, "guilty": "engine", "software": "ONNX Runtime 1.31.1", **fields})


def make_issue(model: onnx.ModelProto, expected: Feeds, found: Feeds | None, **fields: Any) -> str:
    return write_issue(make_finding(**fields), Evidence(model, FEEDS, expected, found, SCRIPT))


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(folder / "repro.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_script_shows_the_fault_alone(model: onnx.ModelProto, tmp_path: Path) -> None:
    right = reduction.compute(model, FEEDS)
    wrong = {"y": right["y"] + np.float32(1)}
    for name, expected, tolerance, code in (
        ("right", right, 1e-4, 0),
        ("wrong", wrong, 1e-4, 1),
        ("coarse", wrong, 1.0, 0),
    ):
        folder = tmp_path / name
        write_evidence(folder, make_finding(), Evidence(model, FEEDS, expected, right, SCRIPT, tolerance))
        done = run_script(folder)
        assert done.returncode == code, done.stderr
        with np.load(folder / "inputs.npz") as inputs, np.load(folder / "found.npz") as answers:
            assert list(json.loads(str(inputs["names"])).values()) == list(FEEDS)
            assert np.array_equal(answers["0"], right["y"])
        assert "y[0, 0]: " in done.stdout
    write_evidence(tmp_path / "bare", make_finding(), Evidence(None, FEEDS, right, None, SCRIPT))
    assert {file.name for file in (tmp_path / "bare").iterdir()} == {
        *("finding.json", "inputs.npz", "expected.npz", "issue.md")
    }


def test_the_lines_of_onnxruntime_answer_as_its_session_did(model: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(model, tmp_path / "model.onnx")
    ends: dict[str, Any] = {"INPUTS": ["x"], "OUTPUTS": ["y"], "MODEL": str(tmp_path / "model.onnx"), "inputs": FEEDS}
    exec(OnnxRuntime().reproduce(Device()), ends)
    np.testing.assert_allclose(ends["found"]["y"], reduction.compute(model, FEEDS)["y"], rtol=1e-5)


PASSED_ON = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N,4] x, float[N,2] INPUT_NAMES) => (float[N,4] d, float[N,2] OUTPUTS, float[N,4] y) {
    d = Dropout (x) OUTPUTS = Dropout (INPUT_NAMES) y = Neg (x)
}"""


@pytest.mark.parametrize("engine", [OnnxRuntime(), OpenVINO()], ids=lambda engine: engine.name)
def test_the_script_of_an_engine_runs_where_inputs_are_passed_on(engine: Engine, tmp_path: Path) -> None:
    if not (available := engine.available(Device())).ok:
        pytest.skip(available.reason)
    model = onnx.parser.parse_model(PASSED_ON)
    feeds = {"INPUT_NAMES": np.ones((3, 2), np.float32), **FEEDS}  # in another order than in the graph
    right = reduction.compute(model, feeds)
    wrong = {**right, "y": right["y"] + np.float32(1)}
    for name, expected, code in (("right", right, 0), ("wrong", wrong, 1)):
        evidence = Evidence(model, feeds, expected, right, engine.reproduce(Device()))
        write_evidence(tmp_path / name, make_finding(), evidence)
        done = run_script(tmp_path / name)
        assert done.returncode == code, done.stdout + done.stderr
        assert "y[" in done.stdout


@pytest.mark.parametrize(
    ("lines", "answered", "code", "text"),
    [
        ("found = 1 / 0", True, 2, "this script cannot run the model: division by zero"),
        ("found = 1 / 0", False, 1, "it does not answer: division by zero"),
        ("import nothing_of_that_name", True, 2, "this script cannot run the model: No module named"),
        ("import nothing_of_that_name", False, 2, "this script cannot run the model: No module named"),
    ],
)
def test_a_script_that_cannot_run_shows_no_fault(
    lines: str, answered: bool, code: int, text: str, model: onnx.ModelProto, tmp_path: Path
) -> None:
    right = reduction.compute(model, FEEDS)
    write_evidence(tmp_path, make_finding(), Evidence(model, FEEDS, right, right if answered else None, lines))
    done = run_script(tmp_path)
    assert done.returncode == code
    assert done.stdout.startswith(text)


@pytest.mark.parametrize("here", [True, False])
def test_on_cuda_they_have_the_options_of_the_session(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A binding that keeps what it is given; without a GPU, ONNX Runtime's would run it on the CPU without a word."""
    given: list[Any] = []
    names = ["CUDAExecutionProvider"] * here + ["CPUExecutionProvider"]
    session = SimpleNamespace(get_providers=lambda: names, run=lambda names, feeds: [])
    binding = SimpleNamespace(
        SessionOptions=lambda: SimpleNamespace(add_session_config_entry=lambda *entry: given.append(entry)),
        GraphOptimizationLevel=SimpleNamespace(ORT_ENABLE_ALL="all"),
        preload_dlls=lambda: given.append("libraries"),
        InferenceSession=lambda model, options, **more: given.append(more) or session,
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", binding)
    engine = OnnxRuntime(provider_options=("prefer_nhwc=1",), cuda_graphs=True, without=("ConvBNFusion",))
    lines, known = (
        engine.reproduce(Device(kind="cuda", index=1)),
        {"MODEL": "model.onnx", "INPUTS": [], "OUTPUTS": [], "inputs": {}},
    )
    if here:
        exec(lines, known)
    else:
        with pytest.raises(ImportError, match="another device"):
            exec(lines, known)
    cuda = {"device_id": "1", "use_tf32": "0", "prefer_nhwc": "1"}
    wanted = [("CUDAExecutionProvider", cuda), ("CPUExecutionProvider", {})]
    entry = ("session.qdq_matmulnbits_accuracy_level", "1")
    assert given == ["libraries", entry, {"providers": wanted, "disabled_optimizers": ["ConvBNFusion"]}]


def test_a_report_says_what_was_expected_and_found_and_by_what(model: onnx.ModelProto) -> None:
    expected = reduction.compute(model, FEEDS)
    found = {"y": expected["y"].copy()}
    found["y"][1, 2], found["y"][2, 0] = 7.25, np.float32(0.1)
    text = make_issue(
        model,
        expected,
        found,
        nodes=("Mul scale", "MatMul node_2"),
        whole=37,
        option=AddedOption(field="onnxruntime.disabled_optimizers", value="MatMulFusion", words="--ort-disable M"),
        workaround="--ort-disable M",
        reference="the same graph, computed by ONNX Runtime 1.31.1 without optimization",
        right_on={"samples": ("sample 0",), "sizes": ("batch 1", "batch 8")},
        elsewhere={"standard normal numbers": True, "zeros": False},
        versions={"onnxruntime": "1.31.1", "numpy": "2.4.6", "processor": "AMD EPYC"},
    )
    title = text.splitlines()[0]
    assert title.startswith("# ONNX Runtime 1.31.1: wrong result of Mul, MatMul with MatMulFusion, off by up to ")
    for words in (
        "The expected values are from the same graph, computed by ONNX Runtime 1.31.1 without optimization.",
        "The result is right if the optimization `MatMulFusion` is disabled.",
        "a part of a model of 37 nodes",
        "2 of 12 numbers differ",
        "in the rows 1, 2 of 3",
        f"| [2, 0] | {expected['y'][2, 0]:.9g} | 0.100000001 |",
        "- `x`: float32[3, 4] = [[0, 0.142857149,",
        "They are what the whole model computes there for this input: sizes (batch 3).",
        "were answered right: samples, sizes (batch 1; batch 8).",
        "the result is wrong, too: standard normal numbers.",
        "the result is right: zeros.",
        "session = onnxruntime.InferenceSession(MODEL",
        "b = Mul (x, two)",
        "- processor: AMD EPYC",
    ):
        assert words in text, words
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    assert len(rows) == 2, "elements that do not differ are not shown"


def test_a_report_tells_nan_other_shapes_and_no_answer(model: onnx.ModelProto) -> None:
    expected = {"y": np.ones((2, 3), np.float32)}
    odd = expected["y"].copy()
    odd[1] = [np.nan, np.nan, np.inf]
    text = make_issue(model, expected, {"y": odd})
    assert text.splitlines()[0].endswith("wrong result, nan instead of 1")
    assert "3 of 6 numbers differ, found are 2 NaN and 1 infinite, in the rows 1 of 2" in text
    other = make_issue(model, expected, {"y": odd[:1]})
    assert other.splitlines()[0].endswith(", of shape [1, 3] instead of [2, 3]")
    assert "`y` is float32[1, 3], expected float32[2, 3]" in other
    wanted = expected["y"].copy()
    wanted[0, 0], odd = np.nan, expected["y"].copy()
    odd[0, 1] += 1
    told = make_issue(model, {"y": wanted}, {"y": odd})
    assert "instead of nan" not in told.splitlines()[0]  # such numbers are not judged
    none = make_issue(model, expected, None, reason="it does not answer: no room")
    assert "There is no answer: it does not answer: no room." in none
    whole = make_issue(model, {"y": np.array([1, 2, 3])}, {"y": np.array([1, 2, 4])})
    assert "| [2] | 3 | 4 |" in whole


CHOOSING = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N,4] x) => (float[N,2] v, int32[N,2] i, int64[N] best, float[N,4] y) <int64[1] k = {2}> {
    v, places = TopK (x, k) i = Cast <to = 6> (places) best = ArgMax <axis = 1, keepdims = 0> (x) y = Neg (x)
}"""


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"i": [[2, 0], [1, 3]]}, "TopK chose others"),
        ({"i": [[2, 0], [1, 0]]}, "TopK chose others"),
        ({"best": [2, 1]}, "ArgMax chose others"),
        ({"i": [[2, 0], [1, 3]], "best": [2, 1]}, "TopK and ArgMax chose others"),
        ({"i": [[0, 1], [1, 3]]}, ""),  # a smaller number
        ({"i": [[0, 0], [1, 3]]}, ""),  # one number twice
        ({"i": [[0, 4], [1, 3]]}, ""),
        ({"best": [0, 3]}, ""),
        ({"i": [[2, 0], [1, 3]], "y": np.ones((2, 4))}, ""),
        ({}, ""),
    ],
)
def test_a_choice_among_equal_numbers_is_called_that(changed: dict[str, Any], named: str) -> None:
    model = onnx.parser.parse_model(CHOOSING)
    feeds = {"x": np.array([[5, 1, 5, 1], [2, 9, 2, 2]], np.float32)}
    right = reduction.compute(model, feeds)
    found = {**right, **{name: np.array(value, right[name].dtype) for name, value in changed.items()}}
    ties = find_ties(Evidence(model, feeds, right, found))
    assert ties == (f"{named} among exactly equal numbers, of which ONNX takes the first" if named else "")
    finding = make_finding(ties=ties)
    assert finding.sentence == f"wrong on sizes (batch 3): wrong{f': {ties}' if ties else ''}; guilty: engine"
    issue = write_issue(finding, Evidence(model, feeds, right, found))
    assert issue.startswith(f"# ONNX Runtime 1.31.1: wrong result, {ties}\n") is bool(ties)
    assert find_ties(Evidence(model, feeds, right, None)) == ""


def test_the_side_that_takes_the_first_of_equal_numbers_is_not_accused() -> None:
    model = onnx.parser.parse_model(CHOOSING)
    feeds = {"x": np.array([[5, 1, 5, 1], [2, 9, 2, 2]], np.float32)}
    first = reduction.compute(model, feeds)
    name = next(name for name, value in first.items() if value.dtype == np.int64)
    later = {**first, name: np.where(first[name] == 0, 2, first[name])}
    assert find_ties(Evidence(model, feeds, first, later))
    assert find_ties(Evidence(model, feeds, later, first)) == ""
    assert find_ties(Evidence(model, feeds, first, {**first, name: np.int64(0)})) == ""
