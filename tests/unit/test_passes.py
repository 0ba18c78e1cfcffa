"""Simplify and decompose on graphs small enough to see through."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes import common

from enginesmith.pipeline.frameworks.onnx import edit, evaluator, model_file, validation
from enginesmith.pipeline.passes import simplify
from enginesmith.pipeline.passes.export import attention
from enginesmith.pipeline.passes.simplify import simplify_file
from graphs import quiet

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
LIMIT = 1 << 27
RNG = np.random.default_rng(0)


def tensor(name: str, shape: list[Any], kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def saved(
    folder: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: dict[str, Any] | None = None,
    opset: int = 23,
    ir_version: int = 10,
) -> Path:
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()]
    body = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    domains = {node.domain for node in nodes if node.domain}
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in sorted(domains))]
    path = folder / "given.onnx"
    onnx.save(helper.make_model(body, opset_imports=imports, ir_version=ir_version), path)
    return path


def simplified(path: Path) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    out = path.parent / "out"
    out.mkdir()
    effect = simplify_file(path, out, LIMIT, quiet)
    validation.check(out / effect.file)
    assert model_file.signature(path) == model_file.signature(out / effect.file)
    return onnx.load(out / effect.file), effect.notes


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


# --- simplify


def reshape_chain() -> list[onnx.NodeProto]:
    """A Reshape to what the input's own dimensions say, with its target computed."""
    return [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "zero", "one"], ["batch"]),
        helper.make_node("Slice", ["shape", "one", "two"], ["length"]),
        helper.make_node("Concat", ["batch", "length", "heads", "width"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["split"]),
        helper.make_node("Relu", ["split"], ["y"]),
    ]


NUMBERS = {"zero": [0], "one": [1], "two": [2], "heads": [3], "width": [4]}


def test_shape_arithmetic_disappears_and_dimensions_stay_dynamic(tmp_path: Path) -> None:
    y = tensor("y", ["batch", "length", 3, 4])
    path = saved(tmp_path, reshape_chain(), [tensor("x", ["batch", "length", 12])], [y], NUMBERS)
    model, notes = simplified(path)
    assert operators(model) == ["Reshape", "Relu"]
    assert not notes
    feeds = {"x": np.ones((5, 7, 12), np.float32)}
    assert evaluator.run_graph(tmp_path / "out" / edit.FILE, feeds)[0].shape == (5, 7, 3, 4)


def test_an_input_that_is_an_output_as_it_is_keeps_its_name(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["same"]), helper.make_node("Relu", ["same"], ["y"])]
    outputs = [tensor("y", ["batch", 3]), tensor("x", ["batch", 3])]
    model, notes = simplified(saved(tmp_path, nodes, [tensor("x", ["batch", 3])], outputs))
    assert operators(model) == ["Relu"]
    assert not notes


def reshapes_before_flatten() -> list[onnx.NodeProto]:
    """Nodes whose new shapes get the same name from the rewriter, that of the value in between."""
    return [
        *(helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Reshape", ["r", "first"], ["m"])),
        *(helper.make_node("Reshape", ["m", "second"], ["o"]), helper.make_node("Exp", ["o"], ["y"])),
        *(helper.make_node("Flatten", ["o"], ["f"], axis=1), helper.make_node("Neg", ["f"], ["z"])),
    ]


RESHAPED = {"first": np.array([0, 24, 5]), "second": np.array([-1, 2, 60])}


def test_shapes_of_reshapes_and_of_a_flatten_behind_them_are_kept_apart(tmp_path: Path) -> None:
    outputs = [tensor("y", ["batch", 2, 60]), tensor("z", [None, 120])]
    inputs = [tensor("x", ["batch", 4, 6, 5])]
    path = saved(tmp_path, reshapes_before_flatten(), inputs, outputs, RESHAPED, opset=17, ir_version=8)
    model, notes = simplified(path)
    assert notes == ()
    assert sorted(operators(model)) == ["Exp", "Neg", "Relu", "Reshape", "Reshape"]


def test_shapes_in_branches_are_kept_apart(tmp_path: Path) -> None:
    """Both branches have values of the same names."""
    results = [tensor("y", [None, 2, 60]), tensor("z", [None, 120])]
    bodies = [helper.make_graph(reshapes_before_flatten(), name, [], results) for name in ("then", "else")]
    choose = helper.make_node("If", ["flag"], ["a", "b"], then_branch=bodies[0], else_branch=bodies[1])
    inputs = [tensor("x", ["batch", 4, 6, 5]), tensor("flag", [], BOOL)]
    outputs = [tensor("a", [None, 2, 60]), tensor("b", [None, 120])]
    path = saved(tmp_path, [choose], inputs, outputs, RESHAPED, opset=17, ir_version=8)
    _, notes = simplified(path)
    assert notes == ()
    twice = {"Exp": 2, "Neg": 2, "Relu": 2, "Reshape": 4}
    made = tmp_path / "out" / edit.FILE
    assert model_file.summary(made).operators == {"If": 1, **twice}
    for flag in (False, True):  # the comparison takes one branch
        feeds = {"x": RNG.standard_normal((3, 4, 6, 5), np.float32), "flag": np.array(flag)}
        given, found = (evaluator.run_graph(file, feeds) for file in (path, made))
        assert evaluator.largest_difference(given, found) == 0


def test_a_valid_file_is_not_to_be_exported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants that were lost in rewriting are not in its exporter's hands."""
    monkeypatch.setattr(simplify, "_keep_constants", lambda model: None)
    outputs = [tensor("y", ["batch", 2, 60]), tensor("z", [None, 120])]
    inputs = [tensor("x", ["batch", 4, 6, 5])]
    path = saved(tmp_path, reshapes_before_flatten(), inputs, outputs, RESHAPED, opset=17, ir_version=8)
    model, (note,) = simplified(path)
    assert operators(model) == [node.op_type for node in reshapes_before_flatten()]
    assert note.startswith("passed on unchanged: the simplified graph breaks the ONNX specification")
    assert validation.EXPORT_AGAIN not in note


def test_a_graph_that_names_the_standard_domain_in_full_is_simplified(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    path = saved(tmp_path, nodes, [tensor("x", [3])], [tensor("y", [3])])
    model = onnx.load(path)
    model.opset_import[0].domain = "ai.onnx"
    onnx.save(model, path)
    changed, notes = simplified(path)
    assert operators(changed) == ["Relu"]
    assert not notes


@pytest.mark.parametrize(
    ("operator", "number", "left"),
    [
        *[("Add", 1e-9, 1), ("Add", 1e-12, 1), ("Sub", 1e-8, 1), ("Mul", 1 - 2e-6, 1), ("Div", 1 + 5e-6, 1)],
        *[("Add", 0.0, 0), ("Sub", 0.0, 0), ("Mul", 1.0, 0), ("Div", 1.0, 0)],
    ],
)
def test_a_number_near_0_or_1_is_none_of_them(tmp_path: Path, operator: str, number: float, left: int) -> None:
    """Denominators and probabilities are guarded by such numbers."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy"]
    nodes = [helper.make_node("Abs", ["x"], ["a"]), helper.make_node(operator, ["a", "number"], ["y"])]
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(np.float32(number), "number")])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    model = edit.load(tmp_path / "m.onnx")
    simplify.rewrite(model)
    assert sum(node.op_type == operator for node in model.graph) == left


@pytest.mark.parametrize(("state", "left"), [(0.0, 1), (0.5, 4)])
def test_initial_states_are_dropped_only_if_they_are_zero(tmp_path: Path, state: float, left: int) -> None:
    weights = {"w": np.ones((1, 8, 3), np.float32), "r": np.ones((1, 8, 2), np.float32), **NUMBERS}
    weights["state"] = np.array([state], np.float32)
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], start=1, end=2),
        helper.make_node("Concat", ["one", "shape", "two"], ["target"], axis=0),
        helper.make_node("Expand", ["state", "target"], ["initial"]),
        helper.make_node("LSTM", ["x", "w", "r", "", "", "initial", "initial"], ["y"], hidden_size=2),
    ]
    path = saved(tmp_path, nodes, [tensor("x", ["s", "b", 3])], [tensor("y", ["s", 1, "b", 2])], weights)
    assert len(simplified(path)[0].graph.node) == left


def test_attention_absorbs_the_heads_and_keeps_its_module(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "split"], ["four"])]
    nodes += [helper.make_node("Transpose", ["four"], [name], perm=[0, 2, 1, 3]) for name in "qkv"]
    nodes += [
        helper.make_node("Attention", ["q", "k", "v"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["b", "merge"], ["y"]),
    ]
    weights = {"split": [0, 0, 2, 4], "merge": [0, 0, 8]}
    nodes[4].metadata_props.add(key=model_file.MODULE_KEY, value="encoder.attention")
    shape = ["batch", "length", 8]
    model, _ = simplified(saved(tmp_path, nodes, [tensor("x", shape)], [tensor("y", shape)], weights))
    assert operators(model) == ["Attention"]
    assert {a.name: a.i for a in model.graph.node[0].attribute} == {"q_num_heads": 2, "kv_num_heads": 2}
    assert [(p.key, p.value) for p in model.graph.node[0].metadata_props] == [
        (model_file.MODULE_KEY, "encoder.attention")
    ]


POOLED = ["Relu", "GlobalAveragePool"]
LEFT = ["Relu", "ReduceMean"]


@pytest.mark.parametrize(
    ("axes", "keeps", "around", "expected"),
    [
        ([2, 3], 1, "", POOLED),
        ([-1, -2], 1, "read", [*POOLED, "Add"]),
        ([2, 3], 0, "", [*POOLED, "Flatten"]),
        ([1, 2], 1, "", LEFT),
        ([3], 1, "", LEFT),
        ([2, 3], 1, "fed", LEFT),
        ([1, 2], 1, "rank 3", LEFT),
        ([2, 3], 1, "Sub", [*LEFT, "Sub"]),
        ([2, 3], 1, "Mul", ["Mul", "ReduceMean"]),
        ([2, 3], 1, "float64", LEFT),
    ],
)
def test_means_of_pictures_are_pooled(
    axes: list[int], keeps: int, around: str, expected: list[str], tmp_path: Path
) -> None:
    first = helper.make_node("Mul", ["x", "x"], ["r"]) if around == "Mul" else helper.make_node("Relu", ["x"], ["r"])
    nodes = [first, helper.make_node("ReduceMean", ["r", "axes"], ["m"], keepdims=keeps)]
    if around in ("Sub", "read"):
        nodes.append(helper.make_node("Add" if around == "read" else "Sub", ["r", "m"], ["y"]))
    kind = TensorProto.DOUBLE if around == "float64" else FLOAT
    shape: list[Any] = ["b", "c", 6] if around == "rank 3" else ["b", "c", 5, 6]
    inputs = [tensor("x", shape, kind), *([tensor("axes", [2], INT64)] if around == "fed" else [])]
    rank = len(shape) if keeps else len(shape) - len(axes)
    outputs = [tensor(nodes[-1].output[0], [f"y{axis}" for axis in range(rank)], kind)]
    path = saved(tmp_path, nodes, inputs, outputs, {} if around == "fed" else {"axes": axes})
    model, _ = simplified(path)
    assert operators(model) == expected


def test_weights_are_folded_where_nothing_is_kept_twice(tmp_path: Path) -> None:
    large = np.arange(100 * 100, dtype=np.float32).reshape(100, 100)
    nodes = [
        helper.make_node("Transpose", ["w"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "turned"], ["y"]),
    ]
    path = saved(tmp_path, nodes, [tensor("x", ["b", 100])], [tensor("y", ["b", 100])], {"w": large})
    assert operators(simplified(path)[0]) == ["MatMul"]


def test_a_weight_that_is_put_together_of_small_parts_is_folded(tmp_path: Path) -> None:
    parts = {f"part{i}": np.full((50, 100), i, np.float32) for i in range(2)}  # small each, not small together
    nodes = [helper.make_node("Concat", list(parts), ["w"], axis=0), helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = saved(tmp_path, nodes, [tensor("x", ["b", 100])], [tensor("y", ["b", 100])], parts)
    assert operators(simplified(path)[0]) == ["MatMul"]


@pytest.mark.parametrize("limit", [0, LIMIT])
def test_layer_scale_goes_into_the_weights_before_it(tmp_path: Path, limit: int) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["s"]),
        helper.make_node("Mul", ["s", "g"], ["m"]),
        helper.make_node("Add", ["x", "m"], ["y"]),
    ]
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(shape, np.float32) for name, shape in (("w", (40, 40)), ("b", 40))}
    weights["g"] = np.linspace(-1, 1, 40, dtype=np.float32)
    path = saved(tmp_path, nodes, [tensor("x", ["b", 40])], [tensor("y", ["b", 40])], weights)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "out").mkdir()
    effect = simplify_file(path, tmp_path / "out", limit, quiet)
    model = onnx.load(tmp_path / "out" / edit.FILE)
    assert operators(model) == ["MatMul", "Add", "Add"]
    assert effect.summary == "4 → 3 nodes; factors folded into weights: 1"
    np.testing.assert_allclose(
        next(numpy_helper.to_array(one) for one in model.graph.initializer if one.name == "w"),
        weights["w"] * weights["g"],
        rtol=1e-6,
    )


def test_shared_weights_are_not_folded(tmp_path: Path) -> None:
    large = np.zeros((100, 100), np.float32)
    nodes = [
        helper.make_node("Gather", ["w", "x"], ["rows"]),
        helper.make_node("Transpose", ["w"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "turned"], ["y"]),
    ]
    path = saved(tmp_path, nodes, [tensor("x", ["b"], INT64)], [tensor("y", ["b", 100])], {"w": large})
    assert operators(simplified(path)[0]) == ["Gather", "Transpose", "MatMul"]


def test_quantization_of_weights_stays(tmp_path: Path) -> None:
    weights = {"w": np.ones((4, 4), np.int8), "scale": np.float32(0.5), "none": np.int8(0)}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale", "none"], ["real"]),
        helper.make_node("Identity", ["real"], ["same"]),
        helper.make_node("MatMul", ["x", "same"], ["y"]),
    ]
    path = saved(tmp_path, nodes, [tensor("x", ["b", 4])], [tensor("y", ["b", 4])], weights)
    assert operators(simplified(path)[0]) == ["DequantizeLinear", "MatMul"]


def test_an_old_file_with_weights_as_inputs(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Unsqueeze", ["same"], ["wide"], axes=[2]),
        helper.make_node("Add", ["wide", "w"], ["y"]),
    ]
    inputs = [tensor("x", ["b", 4]), tensor("w", [1])]
    weights = {"w": np.ones(1, np.float32)}
    path = saved(tmp_path, nodes, inputs, [tensor("y", ["b", 4, 1])], weights, opset=9, ir_version=3)
    assert operators(simplified(path)[0]) == ["Unsqueeze", "Add"]


def test_subgraphs_survive(tmp_path: Path) -> None:
    def branch(operator: str) -> onnx.GraphProto:
        nodes = [helper.make_node("Identity", ["x"], ["copy"]), helper.make_node(operator, ["copy"], ["result"])]
        return helper.make_graph(nodes, operator, [], [tensor("result", ["b", 4])])

    choose = helper.make_node("If", ["flag"], ["y"], then_branch=branch("Relu"), else_branch=branch("Neg"))
    inputs = [tensor("x", ["b", 4]), tensor("flag", [], BOOL)]
    path = saved(tmp_path, [choose], inputs, [tensor("y", ["b", 4])])
    simplified(path)
    assert model_file.summary(tmp_path / "out" / edit.FILE).operators == {"If": 1, "Neg": 1, "Relu": 1}


@pytest.mark.parametrize("frames", [12, "time"])
def test_a_mask_that_is_made_of_lengths_is_compared_with_lengths(tmp_path: Path, frames: Any) -> None:
    """It is as long as the greatest length, and has to fit the frames, as of PyTorch audio's Conformer."""
    nodes = [
        *(helper.make_node("ReduceMax", ["lengths"], ["most"], keepdims=0), helper.make_node("Identity", ["x"], ["c"])),
        helper.make_node("Range", ["nil", "most", "one"], ["places"]),
        helper.make_node("Unsqueeze", ["lengths", "last"], ["ends"]),
        helper.make_node("Less", ["places", "ends"], ["inside"]),
        helper.make_node("Unsqueeze", ["inside", "row"], ["mask"]),
        helper.make_node("Cast", ["mask"], ["factors"], to=FLOAT),
        helper.make_node("MatMul", ["factors", "c"], ["y"]),
    ]
    numbers = {"nil": np.int64(0), "one": np.int64(1), "last": np.array([-1]), "row": np.array([1])}
    inputs = [tensor("x", ["batch", frames, 16]), tensor("lengths", ["batch"], INT64)]
    model, notes = simplified(saved(tmp_path, nodes, inputs, [tensor("y", ["batch", 1, 16])], numbers))
    assert notes == ()
    assert "Identity" not in operators(model)


def test_a_branch_may_answer_with_a_value_of_the_graph_around_it(tmp_path: Path) -> None:
    """Exporters write ``squeeze(1)`` of an unknown size so; other Identity nodes are removed."""
    squeeze = [helper.make_node("Squeeze", ["a", "one"], ["s"]), helper.make_node("Identity", ["s"], ["t"])]
    branches = {
        "then_branch": helper.make_graph(squeeze, "then", [], [tensor("t", ["batch", 4])]),
        "else_branch": helper.make_graph([helper.make_node("Identity", ["a"], ["e"])], "else", [], [tensor("e", None)]),
    }
    nodes = [
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Relu", ["same"], ["a"]),
        helper.make_node("Shape", ["a"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["size"]),
        helper.make_node("Equal", ["size", "one"], ["alone"]),
        helper.make_node("If", ["alone"], ["result"], **branches),
        helper.make_node("Reshape", ["result", "target"], ["y"]),
    ]
    numbers = {"one": [1], "target": [-1, 4]}
    path = saved(tmp_path, nodes, [tensor("x", ["batch", "k", 4])], [tensor("y", ["rows", 4])], numbers)
    model, notes = simplified(path)
    assert notes == ()
    assert "Identity" not in operators(model)
    bodies = [attribute.g for node in model.graph.node if node.op_type == "If" for attribute in node.attribute]
    assert sorted(node.op_type for body in bodies for node in body.node) == ["Identity", "Squeeze"]
    for size in (1, 3):
        values = {"x": np.random.default_rng(0).standard_normal((2, size, 4)).astype(np.float32)}
        np.testing.assert_array_equal(
            evaluator.run_graph(tmp_path / "out/model.onnx", values)[0], evaluator.run_graph(path, values)[0]
        )


def test_a_wrong_result_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: Any) -> simplify.Rewritten:
        model.graph.node(0).op_type = "Neg"
        common.IdentityEliminationPass()(model)
        return simplify.Rewritten(0, 0)

    monkeypatch.setattr(simplify, "rewrite", spoil)
    nodes = [helper.make_node("Relu", ["x"], ["r"]), helper.make_node("Identity", ["r"], ["y"])]
    path = saved(tmp_path, nodes, [tensor("x", ["b", 4])], [tensor("y", ["b", 4])])
    model, notes = simplified(path)
    assert operators(model) == ["Relu", "Identity"]
    assert "outputs differ" in notes[0]


def test_what_cannot_be_run_is_left_alone(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["i"]), helper.make_node("Mystery", ["i"], ["y"], domain="org.else")]
    path = saved(tmp_path, nodes, [tensor("x", ["b", 4])], [tensor("y", ["b", 4])])
    model, notes = simplified(path)
    assert operators(model) == ["Identity", "Mystery"]
    assert "could not be run" in notes[0]


@pytest.mark.parametrize(
    ("operator", "limit", "files"),
    [("Relu", 0, ["weights.bin"]), ("Identity", 0, ["model.onnx.data"]), ("Identity", LIMIT, [])],
)
def test_external_weights_come_along(tmp_path: Path, operator: str, limit: int, files: list[str]) -> None:
    nodes = [helper.make_node(operator, ["x"], ["r"]), helper.make_node("MatMul", ["r", "w"], ["y"])]
    weights = {"w": np.ones((100, 100), np.float32)}
    path = saved(tmp_path, nodes, [tensor("x", ["b", 100])], [tensor("y", ["b", 100])], weights)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin")
    (tmp_path / "out").mkdir()
    effect = simplify_file(path, tmp_path / "out", limit, quiet)
    validation.check(tmp_path / "out" / effect.file)
    assert model_file.external_files(tmp_path / "out" / effect.file) == files
    assert model_file.summary(tmp_path / "out" / effect.file).nodes == (2 if operator == "Relu" else 1)


# --- decompose


def softmax(scores: Any) -> Any:
    exponents = np.exp(scores - scores.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("rank", [4, 3])
def test_attention_written_out_is_the_formula(tmp_path: Path, mask: str, key_heads: int, rank: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, 5, 8), np.float32) for heads in (4, key_heads, key_heads))
    allowed = np.tril(np.ones((5, 5), bool)) if mask == "causal" else rng.random((2, 1, 5, 5)) > 0.3
    allowed[..., 0] = True
    bias = np.where(allowed, 0, -np.inf) if mask in ("bool", "causal") else rng.standard_normal((2, 1, 5, 5))
    scores = q @ np.repeat(k, 4 // key_heads, 1).swapaxes(2, 3) / math.sqrt(8)
    expected = softmax(scores + (0 if mask == "none" else bias)) @ np.repeat(v, 4 // key_heads, 1)
    feeds = {"q": q, "k": k, "v": v}
    attributes = {"is_causal": 1} if mask == "causal" else {}
    if rank == 3:
        feeds = {name: value.swapaxes(1, 2).reshape(2, 5, -1) for name, value in feeds.items()}
        expected = expected.swapaxes(1, 2).reshape(2, 5, -1)
        attributes |= {"q_num_heads": 4, "kv_num_heads": key_heads}
    inputs = [tensor(name, ["b", *(d if d != 5 else "s" for d in value.shape[1:])]) for name, value in feeds.items()]
    names = ["q", "k", "v"]
    if mask in ("bool", "float"):
        feeds["mask"] = allowed if mask == "bool" else bias.astype(np.float32)
        inputs.append(tensor("mask", ["b", 1, "s", "s"], BOOL if mask == "bool" else FLOAT))
        names.append("mask")
    node = helper.make_node("Attention", names, ["y"], **attributes)
    path = saved(tmp_path, [node], inputs, [tensor("y", [None] * rank)])
    model = edit.load(path)
    assert attention.decompose_attention(model) == 1
    edit.save(model, tmp_path, LIMIT)
    validation.check(tmp_path / edit.FILE)
    assert "Attention" not in model_file.summary(tmp_path / edit.FILE).operators
    assert model_file.summary(tmp_path / edit.FILE).nodes < 32
    found = evaluator.run_graph(tmp_path / edit.FILE, feeds)
    assert evaluator.largest_difference([expected.astype(np.float32)], found) < 1e-5


_MEAN, _EMPTY = "the mean of the values", "0"


@pytest.mark.parametrize(
    ("mask", "fill", "expected", "nodes"),
    [
        ("b = Cast <to = 1> (m)\n c = Sub(one, b)\n s = Mul(c, fill)", np.finfo(np.float32).min, _MEAN, 2),
        ("b = Cast <to = 9> (m)\n s = Where(b, zero, fill)", np.finfo(np.float32).min, _MEAN, 2),
        ("b = Cast <to = 9> (m)\n s = Where(b, zero, fill)", -np.inf, _EMPTY, 2),
        ("b = Cast <to = 9> (m)\n s = Where(b, zero, fill)", -1e9, _MEAN, 0),
        ("s = Cast <to = 9> (m)", 0.0, _EMPTY, 0),
    ],
)
@pytest.mark.parametrize("heads", [1, 2])
def test_a_row_of_the_lowest_number_has_the_mean_of_the_values(
    mask: str, fill: float, expected: str, nodes: int, heads: int, tmp_path: Path
) -> None:
    """As in PyTorch; ONNX Runtime takes it for an empty one. It is mended before the mask is spread, and once."""
    text = f"""
        <ir_version: 10, opset_import: ["" : 23]>
        net (float[b, 2, 3, 4] x, int64[b, 1, 1, 3] m) => (float[b, 2, 3, 4] y) {{
            {mask}
            e = Expand(s, shape)
            a = Attention(x, x, x, e)
            y = Attention(a, x, x, e)
        }}"""
    model = onnx.parser.parse_model(text)
    weights = {"one": np.float32(1), "zero": np.float32(0), "fill": np.float32(fill)}
    weights["shape"] = np.array([1, heads, 3, 1])
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(w), name) for name, w in weights.items())
    onnx.save(onnx.shape_inference.infer_shapes(model), path := tmp_path / "given.onnx")
    net = edit.load(path)
    attention.raise_masks(net)
    edit.save(net, tmp_path, LIMIT)
    operators = [node.op_type for node in net.graph if node.op_type != "Constant"]
    assert len(operators) == len(model.graph.node) + nodes
    assert operators[-3:] == ["Expand", "Attention", "Attention"]
    x, m = np.random.default_rng(0).standard_normal((2, 2, 3, 4)).astype(np.float32), np.ones((2, 1, 1, 3), np.int64)
    m[1] = 0
    (found,) = evaluator.run_graph(tmp_path / edit.FILE, {"x": x, "m": m})
    (before,) = evaluator.run_graph(path, {"x": x, "m": m})
    assert np.array_equal(found[0], before[0])
    mean = np.broadcast_to(x[1].mean(1, keepdims=True), x[1].shape)
    np.testing.assert_allclose(found[1], mean if expected == _MEAN else 0 * mean, atol=1e-6)


def test_what_else_reads_a_spread_mask_reads_it_as_it_was(tmp_path: Path) -> None:
    """A mask that is fed may have any number."""
    text = """
        <ir_version: 10, opset_import: ["" : 23]>
        net (float[b, 2, 3, 4] x, float[b, 1, 1, 3] m) => (float[b, 2, 3, 4] y, float[b, 1, 3, 3] z) {
            e = Expand(m, shape)
            z = Identity(e)
            y = Attention(x, x, x, e)
        }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 1, 3, 1]), "shape"))
    onnx.save(onnx.shape_inference.infer_shapes(model), path := tmp_path / "given.onnx")
    net = edit.load(path)
    attention.raise_masks(net)
    edit.save(net, tmp_path, LIMIT)
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 4)).astype(np.float32)
    m = np.full((1, 1, 1, 3), np.finfo(np.float32).min)
    y, z = evaluator.run_graph(tmp_path / edit.FILE, {"x": x, "m": m})
    np.testing.assert_allclose(y, np.broadcast_to(x.mean(2, keepdims=True), x.shape), atol=1e-6)
    assert (z == m).all()


@pytest.mark.parametrize("fill", [-1e9, -np.inf])
def test_masked_places_hide_no_difference(fill: float) -> None:
    """In class maps, one pixel in 10 000 may differ."""
    masked = np.where(np.arange(8) > 5, fill, np.arange(8)).astype(np.float32)
    other = masked + np.float32(0.5) * (np.arange(8) < 2)
    assert evaluator.largest_difference([masked], [other]) == pytest.approx(0.1)
    assert evaluator.largest_difference([masked], [masked + np.float32(0)]) == 0
    assert evaluator.largest_difference([masked], [np.arange(8, dtype=np.float32)]) >= 1
    places = np.arange(20_000)
    assert evaluator.largest_difference([places], [np.where(places < 3, -1, places)]) == np.inf
    assert evaluator.largest_difference([places], [np.where(places < 2, -1, places)]) == 0


def test_rare_features_fall_back_to_the_body_of_the_specification(tmp_path: Path) -> None:
    shape = ["b", 2, "s", 4]
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], softcap=2.0)
    path = saved(tmp_path, [node], [tensor(name, shape) for name in "qkv"], [tensor("y", shape)])
    model = edit.load(path)
    assert attention.decompose_attention(model) == 1
    edit.save(model, tmp_path, LIMIT)
    assert "Attention" not in model_file.summary(tmp_path / edit.FILE).operators
    evaluator.compare_graphs(path, tmp_path / edit.FILE)
