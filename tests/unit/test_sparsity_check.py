"""Test whether a 2:4 pattern is still there in what was made of a sparse graph, and who is told."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.calibration.options import DataOptions
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.tensorrt.engine import _for_graph
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.errors import InvalidGraph
from enginesmith.pipeline.frameworks.onnx import edit, model_file
from enginesmith.pipeline.passes.base import Pass, Progress, Records
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.passes.sparsify import check, sparsify
from enginesmith.pipeline.passes.sparsify.sparsify import Sparsify
from enginesmith.pipeline.tasks.calibrate import Calibrate, Feeder
from enginesmith.pipeline.tasks.verify import Sample
from enginesmith.pipeline.workflows import inspect
from graphs import build_graph, node, normal
from sparse_graphs import artifact

WIDE = 128


def dense(path: Path) -> Path:
    """Convolutions, a grouped one, Gemm both ways round, and a MatMul."""
    nodes = [
        node("Conv", "x first", "a", pads=[1, 1, 1, 1]),
        node("Relu", "a", "b"),
        node("Conv", "b second bias", "c", pads=[1, 1, 1, 1]),
        node("Relu", "c", "d"),
        node("Conv", "d grouped", "e", group=2),
        node("GlobalAveragePool", "e", "f"),
        node("Flatten", "f", "g"),
        node("Gemm", "g across", "h"),
        node("Gemm", "h along along_bias", "i", transB=1),
        node("Relu", "i", "j"),
        node("MatMul", "j matrix", "y"),
    ]
    weights = {
        "first": normal(64, 4, 3, 3),
        "second": normal(WIDE, 64, 3, 3),
        "bias": normal(WIDE),
        "grouped": normal(WIDE, WIDE // 2, 1, 1),
        "across": normal(WIDE, WIDE),
        "along": normal(WIDE, WIDE, seed=1),
        "along_bias": normal(WIDE, seed=1),
        "matrix": normal(WIDE, 12),
    }
    model = build_graph(nodes, {name: value / 8 for name, value in weights.items()}, opset=21, x=("n", 4, 8, 8))
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


WEIGHTS = ("first", "second", "grouped", "across", "along", "matrix")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("sparse")
    effect = run_pass(Sparsify(), artifact(dense(folder / "dense.onnx")), folder, lambda _: None)
    return artifact(folder / effect.file)


@pytest.fixture(scope="module")
def ranges(sparse: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder, found = tmp_path_factory.mktemp("reference"), tmp_path_factory.mktemp("ranges")
    engine = OnnxRuntime(graph_optimization="disabled")
    sample = Sample(engine=engine, ranges={}, batches=(2,), data=None, data_options=DataOptions(), seed=0)
    effect = sample.run({"model": sparse}, folder, lambda _: None)
    reference = Artifact(kind="reference", path=folder / effect.file, sha256="", bytes=0)
    calibrate = Calibrate(feeder=Feeder(data=None, samples=4, seed=0, options=DataOptions()))
    effect = calibrate.run({"model": sparse, "reference": reference}, found, lambda _: None)
    return Artifact(kind="record", path=found / effect.file, sha256="", bytes=0)


PLACEMENTS = ("inputs", "inputs+outputs")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", [name for name in KINDS if name != "fp32"])
def test_precisions_keep_it(precision: Any, placement: Any, sparse: Artifact, ranges: Artifact, tmp_path: Path) -> None:
    step = Precision(precision=precision, placement=placement)
    effect = run_pass(step, sparse, tmp_path, lambda _: None, {"ranges": ranges})
    assert effect.summary.endswith("; 2:4 held in 6 of 6 weights")
    made = artifact(tmp_path / effect.file)
    found = check.follow(sparse.path, made.path)
    assert (found.held, found.lost, found.missing) == (WEIGHTS, (), ())
    zeros = [sum(one.zeros for one in check.sparse_weights(path)) for path in (sparse.path, made.path)]
    assert zeros[1] >= zeros[0]


def test_a_dense_graph_has_lost_all_of_it(sparse: Artifact, tmp_path: Path) -> None:
    found = check.follow(sparse.path, dense(tmp_path / "dense.onnx"))
    assert found.lost == WEIGHTS
    assert str(found) == "2:4 held in 0 of 6 weights; lost in first, second, grouped and 3 more"
    assert not any(one.two_of_four for one in check.sparse_weights(tmp_path / "dense.onnx"))


def test_one_number_is_enough_to_lose_it(sparse: Artifact, tmp_path: Path) -> None:
    model = onnx.load(sparse.path)
    for tensor in model.graph.initializer:
        if tensor.name == "second":
            weight = numpy_helper.to_array(tensor).copy()
            weight[5, np.flatnonzero(weight[5, :4, 1, 2] == 0)[0], 1, 2] = 1e-20
            tensor.CopyFrom(numpy_helper.from_array(weight, "second"))
    onnx.save(model, tmp_path / "changed.onnx")
    found = check.follow(sparse.path, tmp_path / "changed.onnx")
    assert found.lost == ("second",)
    assert len(found.held) == 5


def renamed(model: onnx.ModelProto) -> None:
    """Other names for everything but inputs and outputs."""
    names: dict[str, str] = {}
    for index, one in enumerate(model.graph.node):
        one.name = f"n{index}"
        for values in (one.input, one.output):
            values[:] = [v if v in ("x", "y") else names.setdefault(v, f"v{len(names)}") for v in values]
    for tensor in model.graph.initializer:
        tensor.name = names[tensor.name]
    del model.graph.value_info[:]


def test_without_names_weights_are_known_by_their_zeros(sparse: Artifact, tmp_path: Path) -> None:
    model = onnx.load(sparse.path)
    renamed(model)
    across = next(one for one in model.graph.node if one.op_type == "Gemm")
    tensor = next(one for one in model.graph.initializer if one.name == across.input[1])
    turned = np.ascontiguousarray(numpy_helper.to_array(tensor).T)
    tensor.CopyFrom(numpy_helper.from_array(turned, tensor.name))
    across.attribute.append(helper.make_attribute("transB", 1))
    onnx.save(model, tmp_path / "renamed.onnx")
    assert check.follow(sparse.path, tmp_path / "renamed.onnx").held == WEIGHTS
    plain = onnx.load(dense(tmp_path / "dense.onnx"))
    renamed(plain)
    onnx.save(plain, tmp_path / "other.onnx")
    found = check.follow(sparse.path, tmp_path / "other.onnx")
    assert (found.held, set(found.missing) | set(found.lost)) == ((), set(WEIGHTS))


def test_weights_that_were_put_together_are_found_in_the_whole(tmp_path: Path) -> None:
    def products(path: Path, names: str, weights: dict[str, Any]) -> Path:
        nodes = [node("MatMul", f"x {name}", f"out_{name}") for name in names.split()]
        outputs = " ".join(f"out_{name}" for name in names.split())
        onnx.save(build_graph(nodes, weights, outputs, x=(2, 32)), path)
        return path

    weights = {name: normal(32, 16, seed=seed) for seed, name in enumerate("qkv")}
    weights = {name: np.where(sparsify.two_of_four(one, 0), one, 0) for name, one in weights.items()}
    apart = products(tmp_path / "apart.onnx", "q k v", weights)
    whole = products(tmp_path / "whole.onnx", "all", {"all": np.concatenate(list(weights.values()), axis=1)})
    assert check.follow(apart, whole).held == ("q", "k", "v")
    other = products(tmp_path / "other.onnx", "all", {"all": normal(32, 48)})
    assert check.follow(apart, other).missing == ("q", "k", "v")


def quantized(path: Path, operator: str, weight: Any, inputs: str, **attributes: Any) -> Path:
    """One product whose integer weight has zero points that are not 0."""
    constants = {"w": weight, "s": np.float32(1), "z": np.uint8(3), **attributes.pop("constants", {})}
    domain = attributes.pop("domain", "")
    one = helper.make_node(operator, inputs.split(), ["y"], name="p", domain=domain, **attributes)
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, None)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(helper.make_graph([one], "g", [x], [y], initializers), opset_imports=opsets), path)
    return path


def test_a_level_that_equals_its_zero_point_is_a_zero(tmp_path: Path) -> None:
    kept = sparsify.two_of_four(normal(16, 8), 0)
    points = np.arange(120, 128, dtype=np.uint8)
    levels = np.where(kept, 200, points[None, :]).astype(np.uint8)
    for name, weight, form, others in (
        ("QLinearMatMul", levels, "x s z w s p s z", {}),
        ("MatMulInteger", levels, "x w z p", {}),
        ("QLinearConv", levels.T.copy()[:, :, None, None], "x s z w s p s z", {}),
    ):
        path = quantized(tmp_path / "q.onnx", name, weight, form, constants={"p": points}, **others)
        (facts,) = check.sparse_weights(path)
        assert facts.two_of_four, name
        assert facts.zeros == facts.elements // 2
        path = quantized(tmp_path / "q.onnx", name, weight, form, constants={"p": points + 1}, **others)
        assert not check.sparse_weights(path)[0].two_of_four, name


class _Careless(Pass):
    """A pass that adds a little to every weight, or only takes the mark off."""

    name: ClassVar[str] = "careless"
    consumes: ClassVar[Kind] = "onnx"
    produces: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ()

    added: float

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        model = onnx.load(artifact.path)
        if not self.added:
            del model.metadata_props[:]
        for tensor in model.graph.initializer:
            weight = numpy_helper.to_array(tensor) + np.float32(self.added)
            tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))
        onnx.save(model, out / edit.FILE)
        return Effect(file=edit.FILE, summary="done")


@pytest.mark.parametrize(
    ("added", "words"), [(1e-3, "out of their 2:4 pattern.*lost in first"), (0.0, "lost the mark")]
)
def test_a_pass_that_loses_the_pattern_fails(added: float, words: str, sparse: Artifact, tmp_path: Path) -> None:
    with pytest.raises(InvalidGraph, match=words):
        run_pass(_Careless(added=added), sparse, tmp_path, lambda _: None)
    plain = artifact(dense(tmp_path / "dense.onnx"))
    assert run_pass(_Careless(added=added), plain, tmp_path, lambda _: None).summary == "done"


def test_sparse_kernels_are_asked_for_where_the_graph_is_2_4(sparse: Artifact, tmp_path: Path) -> None:
    model = model_file.skeleton(sparse.path)
    options, notes = _for_graph(BuildOptions(), model, sparse.path)
    assert options.sparse_weights
    assert notes == ("SPARSE_WEIGHTS is set: 6 of 6 weights of the graph are 2:4",)
    plain = dense(tmp_path / "dense.onnx")
    assert _for_graph(BuildOptions(), model_file.skeleton(plain), plain) == (BuildOptions(), ())
    options, notes = _for_graph(BuildOptions(), model, plain)  # marked, and not so
    assert not options.sparse_weights
    assert "none of its weights is" in notes[0]


def test_inspect_shows_zeros_and_the_pattern(sparse: Artifact, tmp_path: Path) -> None:
    found = inspect.inspect(sparse.path)["sparsity"]
    elements = sum(one.elements for one in check.sparse_weights(sparse.path))
    assert found == {"marked as": "2:4", "zeros": f"50.0% of {elements:,} weights of products", "2:4": "6 of 6 weights"}
    plain = inspect.inspect(dense(tmp_path / "dense.onnx"))["sparsity"]
    assert plain == {
        "marked as": "dense",
        "zeros": f"0.0% of {elements:,} weights of products",
        "2:4": "0 of 6 weights",
    }
