"""Export, simplify and decompose on graphs small enough to see through."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes import common

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import simulation
from enginesmith.pipeline.errors import ExportError
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, model_file
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, NamedForward
from enginesmith.pipeline.passes import simplify
from enginesmith.pipeline.passes.export import attention, export
from enginesmith.pipeline.passes.export.export import Export, export_module
from enginesmith.pipeline.passes.simplify import simplify_file
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Signature, TensorSpec
from graphs import quiet

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
LIMIT = 1 << 27


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
    initialisers = [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()]
    body = helper.make_graph(nodes, "g", inputs, outputs, initialisers)
    domains = {node.domain for node in nodes if node.domain}
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in sorted(domains))]
    path = folder / "given.onnx"
    onnx.save(helper.make_model(body, opset_imports=imports, ir_version=ir_version), path)
    return path


def simplified(path: Path) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    out = path.parent / "out"
    out.mkdir()
    effect = simplify_file(path, out, LIMIT, quiet)
    model_file.check(out / effect.file)
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


def test_a_function_that_is_called_often_does_not_keep_a_graph_as_it_is(tmp_path: Path) -> None:
    calls = [helper.make_node("F", [start], [end], domain="own") for start, end in ("xa", "ab", "bc")]
    path = saved(tmp_path, [*calls, helper.make_node("Identity", ["c"], ["y"])], [tensor("x", [3])], [tensor("y", [3])])
    model = onnx.load(path)
    body = [helper.make_node("Tanh", ["u"], ["v"]), helper.make_node("Add", ["v", "v"], ["w"])]
    model.functions.append(helper.make_function("own", "F", ["u"], ["w"], body, [helper.make_opsetid("", 23)]))
    onnx.save(model, path)
    changed, notes = simplified(path)
    assert operators(changed) == ["Tanh", "Add"] * 3
    assert not notes


def test_a_graph_that_names_the_standard_domain_in_full_is_simplified(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    path = saved(tmp_path, nodes, [tensor("x", [3])], [tensor("y", [3])])
    model = onnx.load(path)
    model.opset_import[0].domain = "ai.onnx"
    onnx.save(model, path)
    changed, notes = simplified(path)
    assert operators(changed) == ["Relu"]
    assert not notes


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


def test_shared_weights_are_not_folded(tmp_path: Path) -> None:
    large = np.zeros((100, 100), np.float32)
    nodes = [
        helper.make_node("Gather", ["w", "x"], ["rows"]),
        helper.make_node("Transpose", ["w"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "turned"], ["y"]),
    ]
    path = saved(tmp_path, nodes, [tensor("x", ["b"], INT64)], [tensor("y", ["b", 100])], {"w": large})
    assert operators(simplified(path)[0]) == ["Gather", "Transpose", "MatMul"]


def test_quantisation_of_weights_stays(tmp_path: Path) -> None:
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


def test_a_wrong_result_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: Any) -> int:
        model.graph.node(0).op_type = "Neg"
        common.IdentityEliminationPass()(model)
        return 0

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
    model_file.check(tmp_path / "out" / effect.file)
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
    model_file.check(tmp_path / edit.FILE)
    assert "Attention" not in model_file.summary(tmp_path / edit.FILE).operators
    assert model_file.summary(tmp_path / edit.FILE).nodes < 32
    found = evaluator.run_graph(tmp_path / edit.FILE, feeds)
    assert evaluator.largest_difference([expected.astype(np.float32)], found) < 1e-5


@pytest.mark.parametrize("fill", [-1e9, -np.inf])
def test_masked_places_hide_no_difference(fill: float) -> None:
    """Of class maps, one place in 10 000 may differ."""
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


# --- export


def loaded(module: Any, example: dict[str, Any], shapes: dict[str, tuple[Any, ...]], outputs: list[str]) -> Any:
    """A loaded model; outputs are written as ``name:dtype:dims``."""
    specs = tuple(
        TensorSpec(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=shapes[name])
        for name, value in example.items()
    )
    found = tuple(TensorSpec.parse(text) for text in outputs)
    wrapper = NamedForward(module.eval(), tuple(example), ())
    return LoadedModel(wrapper, Signature(inputs=specs, outputs=found), example)


def exported(out: Path, model: Any, **options: Any) -> Any:
    out.mkdir(exist_ok=True)
    return export_module(model, out, Export(**options), quiet)


def affine() -> Any:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    return loaded(module, {"input": torch.ones(1, 4)}, {"input": ("batch", 4)}, ["out:float32:batch,3"])


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_export_keeps_names_dimensions_and_module_paths(tmp_path: Path, exporter: str) -> None:
    model = affine()
    effect = exported(tmp_path, model, exporter=exporter)
    model_file.check(tmp_path / effect.file)
    assert effect.signature == model.signature
    data = (tmp_path / effect.file).read_bytes()
    assert str(Path(torch.__file__).parent).encode() not in data
    assert Path(__file__).name.encode() not in data
    nodes = onnx.load(tmp_path / effect.file).graph.node
    assert {p.value for node in nodes for p in node.metadata_props if p.key == model_file.MODULE_KEY} == {"0", "1"}
    for batch in (1, 5):  # the example's batch is 1: it must not be taken for a constant
        value = torch.randn(batch, 4)
        found = evaluator.run_graph(tmp_path / effect.file, {"input": value.numpy()})
        assert evaluator.largest_difference([model.module(value)[0].detach().numpy()], found) < 1e-5


def test_int32_indices_of_an_export_become_int64(tmp_path: Path) -> None:
    """The exporter keeps PyTorch's int32; GatherND and ScatterND of ONNX have int64 only."""

    class Indexed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.tensor([2, 0], dtype=torch.int32))

        def forward(self, x: Any, rows: Any) -> Any:
            changed = x.clone()
            changed[:, self.places] = 2 * x[rows, rows][:, None]
            return changed

    feeds = {"x": torch.randn(3, 3), "rows": torch.tensor([2, 1, 0], dtype=torch.int32)}
    model = loaded(Indexed(), feeds, {"x": (3, 3), "rows": (3,)}, ["y:float32:3,3"])
    exported(tmp_path, model, exporter="dynamo")
    model_file.check(tmp_path / edit.FILE)
    assert {"GatherND", "ScatterND"} <= set(model_file.summary(tmp_path / edit.FILE).operators)
    found = evaluator.run_graph(tmp_path / edit.FILE, {name: value.numpy() for name, value in feeds.items()})
    assert evaluator.largest_difference([model.module(*feeds.values())[0].numpy()], found) < 1e-6


def test_rounding_divisions_are_exact(tmp_path: Path) -> None:
    """As PyTorch computes them: whole numbers beyond float32, and 1.0 // 0.1, which is 9."""

    class Divided(torch.nn.Module):
        def forward(self, key: Any, by: Any, x: Any) -> Any:
            whole = [torch.div(key, by, rounding_mode=mode) for mode in ("floor", "trunc")]
            return (
                *whole,
                torch.div(key, -7, rounding_mode="floor"),
                torch.div(x, 0.1, rounding_mode="floor"),
                x // by,
            )

    steps = torch.arange(-100, 100)
    feeds = {"key": 123_456_789 * steps + 1, "by": steps % 7 - 9, "x": steps / 10}
    names = [f"{name}:{dtype}:200" for name, dtype in zip("abcde", ["int64"] * 3 + ["float32"] * 2, strict=True)]
    model = loaded(Divided(), feeds, dict.fromkeys(feeds, (200,)), names)
    exported(tmp_path, model, exporter="dynamo")
    found = evaluator.run_graph(tmp_path / edit.FILE, {name: value.numpy() for name, value in feeds.items()})
    for value, wanted in zip(found, model.module(*feeds.values()), strict=True):
        np.testing.assert_array_equal(value, wanted.numpy())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("layer", [torch.nn.Conv1d, torch.nn.ConvTranspose1d])
def test_a_normalization_in_bf16_is_folded_into_weights_in_bf16(tmp_path: Path, layer: Any, autocast: bool) -> None:
    class Normalized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(layer(2, 3, 1), torch.nn.BatchNorm1d(3))
            self.layers.to(torch.float32 if autocast else torch.bfloat16)
            with torch.no_grad():
                self.layers[1].running_var.fill_(0.5)  # type: ignore[union-attr, operator]

        def forward(self, x: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return self.layers(x.bfloat16()).float()

    feeds = {"x": torch.randn(2, 2, 5)}
    model = loaded(Normalized().eval(), feeds, {"x": ("batch", 2, 5)}, ["y:float32:batch,3,5"])
    exported(tmp_path, model, exporter="dynamo")
    model_file.check(tmp_path / edit.FILE)
    assert "BatchNormalization" not in model_file.summary(tmp_path / edit.FILE).operators
    artifact = Artifact(kind="onnx", path=tmp_path / edit.FILE, sha256="", bytes=0)
    with simulation().load(artifact, Device()) as session:
        found = session.run({"x": feeds["x"].numpy()})["y"]
    expected = model.module(feeds["x"])[0].detach().numpy()
    assert evaluator.largest_difference([expected], [found]) < 2e-2


def test_a_fixed_dimension_is_named(tmp_path: Path) -> None:
    class Fixed(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            assert x.shape[0] == 2
            return x + 1

    model = loaded(Fixed(), {"x": torch.ones(2, 4)}, {"x": ("batch", 4)}, ["y:float32:2,4"])
    with pytest.raises(ExportError, match=r"only with batch = 2 .*'x'") as error:
        exported(tmp_path, model)
    assert "--input x:float32:2,4" in error.value.remedy


def test_an_operator_without_translation_is_named_with_its_line(tmp_path: Path) -> None:
    class Decomposed(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.linalg.svd(x.T @ x)[1]

    line = Decomposed.forward.__code__.co_firstlineno + 1
    model = loaded(Decomposed(), {"x": torch.randn(2, 4)}, {"x": ("batch", 4)}, ["y:float32:4"])
    with pytest.raises(ExportError, match=rf"_linalg_svd at .*test_passes.py:{line} has no translation"):
        exported(tmp_path, model)
    assert list(tmp_path.iterdir()) == []


def test_complex_numbers_are_named_as_what_has_no_translation(tmp_path: Path) -> None:
    class Filtered(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            spectrum = torch.fft.rfft(x)
            return torch.fft.irfft(torch.zeros_like(spectrum) + spectrum, n=4)

    line = Filtered.forward.__code__.co_firstlineno + 2
    model = loaded(Filtered(), {"x": torch.randn(2, 4)}, {"x": ("batch", 4)}, ["y:float32:batch,4"])
    with pytest.raises(ExportError, match=rf"zeros_like at .*:{line} has no translation to ONNX for complex") as error:
        exported(tmp_path, model)
    assert "torch.view_as_real" in error.value.remedy


def test_code_of_this_package_is_not_taken_for_the_model(tmp_path: Path) -> None:
    """The tracing exporter's errors have no frame of the model's."""

    class Searched(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.searchsorted(torch.ones(3), x)

    model = loaded(Searched(), {"x": torch.randn(2, 4)}, {"x": ("batch", 4)}, ["y:int64:batch,4"])
    with pytest.raises(ExportError, match=r"^the operator aten::searchsorted has no translation"):
        exported(tmp_path, model, exporter="torchscript")


def test_remarks_for_those_who_develop_pytorch_are_left_out(tmp_path: Path) -> None:
    class Ordered(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.sort(x, stable=True, descending=True)[0]

    model = loaded(Ordered(), {"x": torch.randn(2, 4)}, {"x": ("batch", 4)}, ["y:float32:batch,4"])
    with pytest.raises(ExportError, match="Out parameter is not supported") as error:
        exported(tmp_path, model, exporter="torchscript")
    assert "feel free" not in error.value.message


def test_a_branch_on_values_is_not_traced_away(tmp_path: Path) -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1 if x.sum() > 0 else x - 1

    model = loaded(Branch(), {"x": torch.ones(2, 4)}, {"x": ("batch", 4)}, ["y:float32:batch,4"])
    with pytest.raises(ExportError, match="the trace holds only for the values"):
        exported(tmp_path, model)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_unused_inputs_and_repeated_outputs(tmp_path: Path, exporter: str) -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: Any, unused: Any, flag: Any) -> Any:
            return x, x, torch.where(flag, x, -x).sum()

    example = {"x": torch.ones(2, 4), "unused": torch.ones(2, 1), "flag": torch.ones(2, 4, dtype=torch.bool)}
    shapes = {"x": ("batch", 4), "unused": ("batch", 1), "flag": ("batch", 4)}
    outputs = ["a:float32:batch,4", "b:float32:batch,4", "c:float32:"]
    effect = exported(tmp_path, model := loaded(Odd(), example, shapes, outputs), exporter=exporter)
    model_file.check(tmp_path / effect.file)
    assert effect.signature == model.signature


def test_the_other_exporter_takes_over_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ExportError("it broke")

    monkeypatch.setattr(export, "_export_program", fail)
    effect = exported(tmp_path, affine())
    assert "TorchScript" in effect.summary
    assert "it broke" in effect.notes[0]
    with pytest.raises(ExportError, match="it broke"):
        exported(tmp_path, affine(), exporter="dynamo")


@pytest.mark.parametrize("exporter", ["torchscript", pytest.param("dynamo", marks=pytest.mark.thorough)])
def test_an_encoder_with_a_padding_mask_is_exported(tmp_path: Path, exporter: str) -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, 1)

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.encoder(x, src_key_padding_mask=~keep)
            return y * keep[:, :, None]

    x, keep = torch.randn(2, 5, 8), torch.tensor([[True, True, True, False, False], [True] * 5])
    dims = {"x": ("batch", 5, 8), "keep": ("batch", 5)}
    model = loaded(Masked(), {"x": x, "keep": keep}, dims, ["out:float32:batch,5,8"])
    exported(tmp_path, model, exporter=exporter)
    found = evaluator.run_graph(tmp_path / edit.FILE, {"x": x.numpy(), "keep": keep.numpy()})
    assert evaluator.largest_difference([model.module(x, keep)[0].detach().numpy()], found) < 1e-5


class Recurrent(torch.nn.Module):
    def __init__(self, layer: type[torch.nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = layer(4, 3, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)[0]
        return y


@pytest.mark.parametrize(
    "layer",
    [torch.nn.RNN, *(pytest.param(layer, marks=pytest.mark.thorough) for layer in (torch.nn.GRU, torch.nn.LSTM))],
)
def test_recurrent_layers_are_exported_at_any_length(tmp_path: Path, layer: type[torch.nn.RNNBase]) -> None:
    x = torch.randn(2, 3, 4)
    model = loaded(Recurrent(layer), {"x": x}, {"x": ("batch", "length", 4)}, ["y:float32:batch,length,6"])
    effect = exported(tmp_path, model)
    assert "fell back to the TorchScript exporter" in effect.notes[0]
    assert effect.signature == model.signature
    for batch, length in ((1, 1), (1, 9), (5, 2)):
        feeds = torch.randn(batch, length, 4)
        found = evaluator.run_graph(tmp_path / effect.file, {"x": feeds.numpy()})
        assert evaluator.largest_difference([model.module(feeds)[0].detach().numpy()], found) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("attention", ["fused", "decomposed"])
def test_a_padding_mask_has_one_row_for_all_queries(tmp_path: Path, attention: str) -> None:
    """Two layers share it, as in every encoder of texts."""

    class Encoder(torch.nn.Module):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            bias = (1 - keep[:, None, None, :]) * -1e4
            for _ in range(2):
                split = x.unflatten(2, (2, 4)).transpose(1, 2)
                y = torch.nn.functional.scaled_dot_product_attention(split, split, split, attn_mask=bias)
                x = y.transpose(1, 2).flatten(2)
            return x

    torch.manual_seed(0)
    x, keep = torch.randn(2, 5, 8), torch.tensor([[1.0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    dims = {"x": ("batch", "length", 8), "keep": ("batch", "length")}
    model = loaded(Encoder(), {"x": x, "keep": keep}, dims, ["out:float32:batch,length,8"])
    exported(tmp_path, model, attention=attention)
    found = model_file.summary(tmp_path / edit.FILE).operators
    assert found.get("Attention", 0) == (2 if attention == "fused" else 0)
    assert found.get("Expand", 0) == (1 if attention == "fused" else 0)
    session = onnxruntime.InferenceSession(tmp_path / edit.FILE, providers=["CPUExecutionProvider"])
    expected = Encoder()(x[:1, :4], keep[:1, :4]).numpy()
    answer = session.run(None, {"x": x[:1, :4].numpy(), "keep": keep[:1, :4].numpy()})[0]
    np.testing.assert_allclose(answer, expected, atol=1e-5)


@pytest.mark.thorough
def test_attention_is_one_operator_or_none(tmp_path: Path) -> None:
    class Attend(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    shape = ("batch", 2, "length", 8)
    model = loaded(Attend(), {"x": torch.randn(2, 2, 5, 8)}, {"x": shape}, ["y:float32:batch,2,length,8"])
    fused = exported(tmp_path / "fused", model)
    written = exported(tmp_path / "written", model, attention="decomposed")
    assert model_file.summary(tmp_path / "fused" / fused.file).operators == {"Attention": 1}
    assert "Softmax" in model_file.summary(tmp_path / "written" / written.file).operators
    evaluator.compare_graphs(tmp_path / "fused" / fused.file, tmp_path / "written" / written.file)
