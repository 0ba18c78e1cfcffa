"""The pass as steps use it: records in, a graph and an assignment out, and what it says of both."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from enginesmith.calibration.ranges import METHODS, ChannelStatistics, Provenance, Ranges, TensorRange
from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.errors import DataError, InvalidGraph, ModelError, UsageError
from enginesmith.pipeline.frameworks.onnx import coverage, model_file
from enginesmith.pipeline.passes.float16.convert import lower
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.quantize.search import Candidate, GroupFact
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.tasks.mixed_precision import assignment
from graphs import parse_graph

PRECISIONS = ("fp16", "bf16", "int8", "int8+fp16", "int8-dynamic", "fp8", "int4-weights")
NET = """net (float[n, 4, 8, 8] x) => (float[n, 5] y) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w, b)
    r = Relu(c)
    p = GlobalAveragePool(r)
    f = Flatten(p)
    a = Add(f, f)
    h = LayerNormalization(a, s)
    m = MatMul(h, v)
    d = Add(m, u)
    g = Gelu(d)
    y = MatMul(g, t)
}"""
WEIGHTS = {"w": (64, 4, 3, 3), "b": (64,), "s": (64,), "v": (64, 32), "u": (32,), "t": (32, 5)}
VALUES = ("x", "c", "r", "p", "f", "a", "h", "m", "d", "g", "y")


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return written(tmp_path, NET)


def written(folder: Path, text: str, digest: str = "this", opset: int = 22) -> Artifact:
    rng, path = np.random.default_rng(0), folder / "float.onnx"
    weights = {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in WEIGHTS.items()}
    ir.save(parse_graph(text, opset, **weights), path)
    return Artifact(kind="onnx", path=path, sha256=digest, bytes=0, signature=model_file.signature(path))


def ranges(folder: Path, digest: str = "this", *, channels: bool = True, **given: float) -> Artifact:
    amax = {method: 1.0 + index for index, method in enumerate(METHODS)}
    one = TensorRange(minimum=-4, maximum=4, count=1, amax=amax)
    tensors = dict.fromkeys(VALUES, one)
    for name, maximum in given.items():
        tensors[name] = one.model_copy(
            update={"minimum": 0.0, "maximum": maximum, "amax": dict.fromkeys(METHODS, maximum)}
        )
    means = {
        name: ChannelStatistics(
            axis=1, **dict.fromkeys(("amax", "middle", "mean", "mean_absolute", "mean_square"), (1.0,) * count)
        )
        for name, count in (("x", 4), ("h", 64), ("g", 32))
    }
    nowhere = Provenance(data="random", digest="", rows=(), seed=0, batch=1)
    document = Ranges(model_sha256=digest, provenance=nowhere, tensors=tensors, channels=means if channels else {})
    return record(folder / "ranges.json", document.model_dump_json())


def record(path: Path, text: str) -> Artifact:
    path.write_text(text, encoding="utf-8")
    return Artifact(kind="record", path=path, sha256="", bytes=0)


def apply(
    step: Precision, artifact: Artifact, out: Path, **records: Artifact
) -> tuple[Effect, onnx.ModelProto, dict[str, dict[str, str]]]:
    out.mkdir()
    effect = run_pass(step, artifact, out, lambda text: None, records)
    entries = json.loads((out / "assignment.json").read_bytes())
    return effect, onnx.load(out / effect.file), {entry["group"]: entry for entry in entries}


def scale_of(model: onnx.ModelProto, value: str) -> float:
    (node,) = [node for node in model.graph.node if node.op_type == "QuantizeLinear" and node.input[0] == value]
    (scale,) = [tensor for tensor in model.graph.initializer if tensor.name == node.input[1]]
    return float(onnx.numpy_helper.to_array(scale))


@pytest.mark.parametrize("placement", ["inputs", "inputs+outputs"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_is_sound(artifact: Artifact, tmp_path: Path, precision: Any, placement: Any) -> None:
    step = Precision(precision=precision, placement=placement)
    effect, model, groups = apply(step, artifact, tmp_path / "out", ranges=ranges(tmp_path))
    assert [value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)] == [1, 1]
    low = {"fp16": 3, "bf16": 3, "int8": 3, "int8+fp16": 3, "fp8": 3, "int8-dynamic": 2, "int4-weights": 2}[precision]
    name = precision.partition("+")[0]
    assert sum(entry["precision"] == name for entry in groups.values()) == low
    assert list(groups) == ["Conv_0", "MatMul_6", "MatMul_9"]
    assert groups["Conv_0"]["operator"] == "Conv"
    assert (f"{low} of 3 products in {name}" in effect.summary) == (precision not in ("fp16", "bf16"))
    halves = {one.data_type for one in model.graph.initializer} & {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    lowered = precision in ("fp16", "bf16", "int8+fp16") or (
        placement == "inputs" and precision in ("fp8", "int4-weights")
    )
    assert bool(halves) == lowered


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_input_gives_the_same_bytes(artifact: Artifact, tmp_path: Path, precision: Any) -> None:
    given = ranges(tmp_path)
    for folder in ("first", "second"):
        apply(Precision(precision=precision), artifact, tmp_path / folder, ranges=given)
    for file in ("model.onnx", "assignment.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_the_effect_counts(artifact: Artifact, tmp_path: Path) -> None:
    effect, _, _ = apply(Precision(precision="int8"), artifact, tmp_path / "out", ranges=ranges(tmp_path))
    share = (64 * 4 * 9 + 64 * 32 + 32 * 5) / sum(np.prod(shape) for shape in WEIGHTS.values())
    assert (effect.summary, effect.notes) == (f"3 Q/DQ pairs, 3 of 3 products in int8, {share:.1%} of weights", ())


@pytest.mark.parametrize("precision", ["int8-dynamic", "bf16"])
def test_a_group_in_float64_is_called_so(tmp_path: Path, precision: Any) -> None:
    text = """(float[N,8] x, double[N,8] z) => (float[N,4] y, double[N,4] d, double[N,N] p) {
        y = MatMul(x, w) d = MatMul(z, v) t = Transpose(z) p = MatMul(z, t)
    }"""
    weight = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    model = parse_graph(text, 22, w=weight, v=weight.astype(np.float64))
    ir.save(model, tmp_path / "float.onnx")
    made = Artifact(kind="onnx", path=tmp_path / "float.onnx", sha256="", bytes=0)
    made = made.model_copy(update={"signature": model_file.signature(made.path)})
    _, _, groups = apply(Precision(precision=precision), made, tmp_path / "out", ranges=ranges(tmp_path, ""))
    low = precision.partition("-")[0] if precision == "bf16" else precision
    assert [entry["precision"] for entry in groups.values()] == [low, "fp64", "fp64"]
    facts = [
        GroupFact(name=f"g{index}", module="", kind="MatMul", macs=1, sqnr_db=None, reason="x" * index, given=given)
        for index, given in enumerate(("fp32", "fp32", "fp64"))
    ]
    chosen = Candidate("everything", "given", False, "mse", frozenset(), "", False)
    rows = assignment(facts, chosen, Precision(precision="int8+fp16"), {})
    assert [row["precision"] for row in rows] == ["int8", "fp16", "fp64"]


def test_an_assignment_says_what_stays_and_whose_ranges(artifact: Artifact, tmp_path: Path) -> None:
    entries = [
        {"group": "Conv_0", "precision": "int8", "method": "entropy"},
        {"group": "MatMul_6", "precision": "fp32", "why": "too sensitive", "method": "entropy"},
    ]
    chosen = record(tmp_path / "assignment.json", json.dumps(entries))
    step = Precision(precision="int8+fp16", method="minmax")
    effect, model, groups = apply(step, artifact, tmp_path / "out", ranges=ranges(tmp_path), assignment=chosen)
    assert {name: (one["precision"], one["why"]) for name, one in groups.items()} == {
        "Conv_0": ("int8", ""),
        "MatMul_6": ("fp32", "too sensitive"),
        "MatMul_9": ("int8", ""),
    }
    assert effect.notes == ("not quantized: MatMul_6: too sensitive",)
    np.testing.assert_allclose(scale_of(model, "g"), (1 + METHODS.index("entropy")) / 127, rtol=1e-3)
    (kept,) = [tensor for tensor in model.graph.initializer if tensor.name == "v"]
    assert kept.data_type == onnx.TensorProto.FLOAT


def test_what_stays_may_be_lowered_with_the_rest(artifact: Artifact, tmp_path: Path) -> None:
    chosen = record(tmp_path / "assignment.json", json.dumps([{"group": "MatMul_6", "precision": "fp16"}]))
    step = Precision(precision="int8+fp16")
    _, _, groups = apply(step, artifact, tmp_path / "out", ranges=ranges(tmp_path), assignment=chosen)
    assert groups["MatMul_6"]["precision"] == "fp16"


def count_types(model: onnx.ModelProto) -> dict[str, list[str]]:
    """List the operators that read a weight, by its type."""
    types = {tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}
    found: dict[str, list[str]] = {}
    for node in model.graph.node:
        if node.op_type in ("Conv", "MatMul"):
            found.setdefault(types[node.input[1]], []).append(node.op_type)
    return found


@pytest.mark.parametrize(("precision", "low"), [("fp16", "FLOAT16"), ("bf16", "BFLOAT16")])
@pytest.mark.parametrize(("pattern", "kept"), [("MatMul_9", ["MatMul"]), ("head.*", ["MatMul"]), ("Gelu_8", [])])
def test_named_nodes_and_modules_stay_in_float32(
    tmp_path: Path, precision: Any, low: str, pattern: str, kept: list[str]
) -> None:
    artifact = written(tmp_path, NET)
    model = ir.load(artifact.path)
    model.graph[9].metadata_props[model_file.MODULE_KEY] = "head.0"
    ir.save(model, artifact.path)
    _, done, groups = apply(Precision(precision=precision, keep=(pattern,)), artifact, tmp_path / "out")
    assert count_types(done).get("FLOAT", []) == kept
    assert len(count_types(done)[low]) == 3 - len(kept)
    assert groups["MatMul_9"]["precision"] == ("fp32" if kept else precision)
    assert groups["MatMul_9"]["why"] == ("was asked for" if kept else "")
    wide = {node.name: reason for node, reason in coverage.list_float32(done)}
    assert [name for name, reason in wide.items() if reason == "was asked for"] == ["MatMul_9" if kept else "Gelu_8"]
    assert "GlobalAveragePool_2" in wide
    assert "Conv_0" not in wide


def test_what_has_no_product_stays_between_nodes_that_are_kept(artifact: Artifact, tmp_path: Path) -> None:
    _, done, _ = apply(Precision(precision="bf16", keep=("MatMul_[69]",)), artifact, tmp_path / "out")
    assert {"MatMul_6", "Add_7", "Gelu_8", "MatMul_9"} <= {node.name for node, _ in coverage.list_float32(done)}


def test_what_stays_in_float32_beside_int8_and_fp16_is_marked(artifact: Artifact, tmp_path: Path) -> None:
    """An engine that casts floats itself would compute it in float16."""
    step, kept = Precision(precision="int8+fp16", keep=("Gelu_8",)), {"Gelu_8": "was asked for"}
    _, done, _ = apply(step, artifact, tmp_path / "out", ranges=ranges(tmp_path))
    wide = {node.name: reason for node, reason in coverage.list_float32(done)}
    assert kept.items() <= wide.items()
    assert not {"Conv_0", "MatMul_6"} & wide.keys()


def test_names_that_fit_nothing_are_refused_and_similar_ones_named(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no node that computes in float32 is called 'MatMull_6'") as caught:
        apply(Precision(precision="bf16", keep=("MatMul_9", "MatMull_6")), artifact, tmp_path / "out")
    assert "MatMul_6" in caught.value.remedy


def test_a_graph_with_everything_kept_is_in_no_low_precision(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no node of this graph can be in bf16"):
        apply(Precision(precision="bf16", keep=("*",)), artifact, tmp_path / "out")


def test_everything_may_be_kept(artifact: Artifact, tmp_path: Path) -> None:
    names = ("Conv_0", "MatMul_6", "MatMul_9")
    chosen = record(tmp_path / "a.json", json.dumps([{"group": name, "precision": "fp32"} for name in names]))
    effect, model, _ = apply(
        Precision(precision="int8"), artifact, tmp_path / "out", ranges=ranges(tmp_path), assignment=chosen
    )
    assert "0 of 3 products in int8" in effect.summary
    assert not any("Quantize" in node.op_type for node in model.graph.node)


@pytest.mark.parametrize(
    "text", ["{}", "[1]", '[{"group": "Conv_0"}]', "[", '[{"group": "a", "precision": "int8", "method": "guess"}]']
)
def test_what_is_no_assignment_is_refused(artifact: Artifact, tmp_path: Path, text: str) -> None:
    if text == "{}":
        text = '{"group": 1}'
    chosen = record(tmp_path / "a.json", text)
    with pytest.raises(UsageError, match="assignment"):
        apply(Precision(precision="int8"), artifact, tmp_path / "out", ranges=ranges(tmp_path), assignment=chosen)


def test_ranges_have_to_be_there_and_of_this_graph(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="int8 needs the ranges of activations"):
        apply(Precision(precision="int8"), artifact, tmp_path / "a")
    with pytest.raises(UsageError, match="bias correction needs the ranges"):
        apply(Precision(precision="int4-weights", bias_correction=True), artifact, tmp_path / "b")
    with pytest.raises(DataError, match="another model"):
        apply(Precision(precision="int8"), artifact, tmp_path / "c", ranges=ranges(tmp_path, "other"))


def test_data_on_which_nothing_varies_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    dead = ranges(tmp_path, **dict.fromkeys(VALUES, 0.0))
    with pytest.raises(ModelError, match="never varies"):
        apply(Precision(precision="int8"), artifact, tmp_path / "out", ranges=dead)


def test_a_graph_without_products_is_refused(tmp_path: Path) -> None:
    bare = written(tmp_path, "net (float[4] x) => (float[4] y) { y = Relu(x) }")
    with pytest.raises(InvalidGraph, match="no product"):
        apply(Precision(precision="int8"), bare, tmp_path / "out", ranges=ranges(tmp_path))


@pytest.mark.parametrize(
    ("text", "opset", "precision", "reason", "remedy"),
    [
        ("(float[4] x) => (float[4] y) { y = Relu(x) }", 22, "fp16", "no product beside it", "use fp32"),
        ("(float[4] x) => (float[4] y) { y = Sin(x) }", 22, "fp16", "angles or coordinates", "use fp32"),
        ("(double[4, 4] x) => (double[4, 4] y) { y = MatMul(x, x) }", 22, "fp16", "float64", "the model in float32"),
        ("(int64[4] x) => (int64[4] y) { y = Add(x, x) }", 22, "fp16", "none computes in floating", "use fp32"),
        ("(float[n, 4, 8, 8] x) => (float[n, 64, 6, 6] y) { y = Conv(x, w) }", 21, "bf16", "of opset 21", "--opset 22"),
    ],
)
def test_the_remedy_follows_from_the_reason(
    tmp_path: Path, text: str, opset: int, precision: Any, reason: str, remedy: str
) -> None:
    model = written(tmp_path, text, opset=opset)
    with pytest.raises(ModelError, match=reason) as error:
        apply(Precision(precision=precision), model, tmp_path / "out")
    assert remedy in error.value.remedy


def test_operators_of_other_domains_are_to_be_given_in_onnx_own(tmp_path: Path) -> None:
    model = parse_graph("net (float[4, 4] x) => (float[4, 4] y) { y = com.microsoft.FusedMatMul(x, x) }")
    model.opset_imports["com.microsoft"] = 1
    lowered = lower(model, "fp16")
    assert lowered.remedy == "give the graph in ONNX's own operators, as it was before FusedMatMul was put into it"


def test_many_reasons_are_told_in_few_words(tmp_path: Path) -> None:
    body = " ".join(f"t{i} = MatMul(x, x)" for i in range(5))
    text = f"net (float[4, 4] x, float[n, 4, 8, 8] z) => (float[n, 64, 6, 6] y) {{ {body} y = Conv(z, w, b) }}"
    model = written(tmp_path, text)
    effect, _, _ = apply(Precision(precision="int8"), model, tmp_path / "out", ranges=ranges(tmp_path, z=3.0))
    assert effect.notes == ("not quantized: MatMul_0, MatMul_1, MatMul_2 and 2 more: a product of two activations",)


def test_biases_make_up_for_rounding(artifact: Artifact, tmp_path: Path) -> None:
    step = Precision(precision="int8", bias_correction=True)
    found = {}
    for word, channels in (("plain", False), ("corrected", True)):
        given = ranges(tmp_path, channels=channels)
        _, model, _ = apply(step, artifact, tmp_path / word, ranges=given)
        weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        (conv,) = [node for node in model.graph.node if node.op_type == "Conv"]
        found[word] = weights, weights[conv.input[2]]
    (plain, before), (_, after) = found["plain"], found["corrected"]
    exact = onnx.numpy_helper.to_array(onnx.load(artifact.path).graph.initializer[0])
    rounded = plain["w_quantized"] * plain["w_scale"].reshape(-1, 1, 1, 1)
    np.testing.assert_allclose(after - before, (exact - rounded).sum(axis=(1, 2, 3)), atol=1e-5)


def test_an_assignment_may_correct_biases(artifact: Artifact, tmp_path: Path) -> None:
    biases = []
    for corrected in (False, True):
        entries = [{"group": "Conv_0", "precision": "int8", "corrected": corrected}]
        chosen = record(tmp_path / f"{corrected}.json", json.dumps(entries))
        given = ranges(tmp_path, channels=True)
        out = tmp_path / str(corrected)
        _, model, _ = apply(Precision(precision="int8"), artifact, out, ranges=given, assignment=chosen)
        weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        (conv,) = [node for node in model.graph.node if node.op_type == "Conv"]
        biases.append(weights[conv.input[2]])
    assert np.abs(biases[1] - biases[0]).max() > 1e-6


def test_of_a_graph_too_old_for_bfloat16_only_the_rest_is_lowered(tmp_path: Path) -> None:
    artifact = written(tmp_path, NET, opset=21)
    _, model, groups = apply(Precision(precision="bf16"), artifact, tmp_path / "as-it-is")
    assert model.opset_import[0].version == 21
    assert [entry["precision"] for entry in groups.values()] == ["fp32", "bf16", "bf16"]
