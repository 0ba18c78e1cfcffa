"""Zeros put into graphs, and whether a 2:4 pattern is still there in what was made of them."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.calibration.options import DataOptions
from enginesmith.pipeline.artifact import Artifact, Effect, Kind, file_digest
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.tensorrt.engine import _for_graph
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.errors import InvalidGraph, UsageError
from enginesmith.pipeline.frameworks.onnx import edit, model_file
from enginesmith.pipeline.passes.base import Pass, Progress, Records
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.passes.sparsify import check, sparsify
from enginesmith.pipeline.passes.sparsify.options import SparsifyOptions, Sparsity
from enginesmith.pipeline.passes.sparsify.sparsify import Sparsify
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.calibrate import Calibrate, Feeder
from enginesmith.pipeline.tasks.verify import Sample
from enginesmith.pipeline.workflows import inspect
from graphs import Weights, build_graph, node, normal, save_graph


def artifact(path: Path) -> Artifact:
    sha = file_digest(path)
    return Artifact(kind="onnx", path=path, sha256=sha, bytes=0, signature=model_file.signature(path))


def sparsified(path: Path, folder: Path, **fields: Any) -> tuple[Path, Effect]:
    folder.mkdir(parents=True, exist_ok=True)
    effect = run_pass(Sparsify(**fields), artifact(path), folder, lambda _: None)
    return folder / effect.file, effect


def arrays(path: Path) -> Weights:
    return {one.name: numpy_helper.to_array(one, str(path.parent)) for one in onnx.load(path).graph.initializer}


def eligible(weight: Any) -> bool:
    """TensorRT's test, as its developer guide has it, for a weight of K × C × places in the kernel."""
    rows, length = weight.reshape(*weight.shape[:2], -1), weight.shape[1]
    assert length % 4 == 0
    return all(
        np.count_nonzero(rows[k, c : c + 4, place]) <= 2
        for k in range(rows.shape[0])
        for c in range(0, length, 4)
        for place in range(rows.shape[2])
    )


def mixed(folder: Path, **changes: Any) -> Path:
    """One product of each kind, with weights that reach them in different layouts."""
    nodes = [
        node("Conv", "x conv", "a", pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", "a", "b"),
        node("Flatten", "b", "c"),
        node("Gemm", "c gemm", "d"),
        node("Gemm", "d gemm_t bias", "e", transB=1),
        node("MatMul", "e matmul", "f"),
        node("Transpose", "turned", "t", perm=[1, 0]),
        node("Cast", "t", "u", to=TensorProto.FLOAT),
        node("MatMul", "f u", "g"),
        node("Transpose", "g", "h", perm=[1, 0]),
        node("Gemm", "h last", "y", transA=1),
    ]
    weights = {
        "conv": normal(8, 4, 3, 3),
        "gemm": normal(8, 12),
        "gemm_t": normal(16, 12),
        "bias": normal(16),
        "matmul": normal(16, 20),
        "turned": normal(8, 20).astype(np.float16),
        "last": normal(8, 6),
    } | changes
    return save_graph(folder, nodes, weights, x=("n", 4, 6, 6))


def test_every_weight_is_sparse_along_what_is_summed_over(tmp_path: Path) -> None:
    path, effect = sparsified(mixed(tmp_path), tmp_path / "out")
    found, given = arrays(path), arrays(tmp_path / "given.onnx")
    assert eligible(found["conv"])
    for name in ("gemm", "matmul", "last"):
        assert eligible(found[name].T), name
    for name in ("gemm_t", "turned"):
        assert eligible(found[name]), name
    assert effect.summary.startswith("2:4 in 6 of 6 weights, 50.0% of the weights' elements are zero; SQNR")
    weights = [name for name in found if name != "bias"]
    for name in weights:
        same = found[name] == given[name]
        assert (same | (found[name] == 0)).all()
        assert int((found[name] == 0).sum()) == found[name].size // 2
    signal, noise = (
        sum(float((np.float64(one[name]) ** 2).sum()) for name in weights)
        for one in (given, {name: given[name] - found[name] for name in weights})
    )
    assert f"SQNR of the weights {10 * np.log10(signal / noise):.1f} dB" in effect.summary
    assert np.array_equal(found["bias"], given["bias"])
    assert sparsify.of(onnx.load(path)) == "2:4"


def test_the_same_bytes_each_time_with_and_without_external_data(tmp_path: Path) -> None:
    given = mixed(tmp_path)
    first, second, beside = (
        sparsified(given, tmp_path / name, external_data_bytes=size)[0]
        for name, size in (("a", 1 << 20), ("b", 1 << 20), ("c", 0))
    )
    assert first.read_bytes() == second.read_bytes()
    assert model_file.external_files(beside)
    assert all(np.array_equal(value, arrays(first)[name]) for name, value in arrays(beside).items())
    again, _ = sparsified(beside, tmp_path / "d")  # reads what lies beside the graph
    assert all(np.array_equal(value, arrays(first)[name]) for name, value in arrays(again).items())


def refusals(folder: Path) -> Path:
    """What 2:4 is not put into, and one weight that it is."""
    nodes = [
        node("Conv", "x three", "a"),
        node("Conv", "a depthwise", "b", group=8),
        node("ConvTranspose", "b up", "c"),
        node("Conv", "c good", "d"),
        node("GlobalAveragePool", "d", "e"),
        node("Flatten", "e", "f"),
        node("MatMul", "f both", "g"),
        node("Gemm", "g both", "h", transB=1),
        node("MatMul", "h vector", "i"),
        node("Gather", "table ids", "j"),
        node("MatMul", "j table", "k"),
        node("DequantizeLinear", "int8 scale", "l"),
        node("MatMul", "f l", "m"),
        node("Unsqueeze", "i ids", "s"),
        node("Add", "s m", "n"),
        node("Add", "n k", "o"),
        node("MatMul", "f fed", "p"),
        node("Add", "o p", "y"),
    ]
    weights = {
        "three": normal(8, 3, 1, 1),
        "depthwise": normal(8, 1, 3, 3),
        "up": normal(8, 8, 2, 2),
        "good": normal(8, 8, 1, 1),
        "both": normal(8, 8),
        "vector": normal(8),
        "table": normal(8, 8),
        "int8": np.ones((8, 8), np.int8),
        "scale": np.array(0.1, np.float32),
        "ids": np.array([1]),
    }
    return save_graph(folder, nodes, weights, x=(2, 3, 8, 8), fed=(TensorProto.FLOAT, (8, 8)))


def test_what_cannot_be_sparse_is_left_with_the_reason(tmp_path: Path) -> None:
    found = {one.name: one for one in sparsify.find(edit.load(refusals(tmp_path)))}
    why = {name: one.structured for name, one in found.items()}
    assert why == {
        "three": "its 3 input channels of a group are no multiple of 4",
        "depthwise": "its 1 input channels of a group are no multiple of 4",
        "up": "there are no sparse kernels for ConvTranspose",
        "good": "",
        "both": "two products sum over different axes of it",
        "vector": "it is a vector",
        "table": "it is also read by Gather",
        "int8": "it is quantized already: sparse weights are made of a float graph",
    }
    assert [name for name in ("three", "depthwise", "up") if found[name].reason] == []  # other patterns can be had
    path, effect = sparsified(tmp_path / "given.onnx", tmp_path / "out")
    given, after = arrays(tmp_path / "given.onnx"), arrays(path)
    assert [name for name in given if not np.array_equal(given[name], after[name])] == ["good"]
    assert effect.summary.startswith("2:4 in 1 of 8 weights")
    assert "left dense: vector: it is a vector" in effect.notes
    assert effect.notes[-1] == "left dense: 2 more, each for a reason of its own"


def test_a_weight_of_two_products_is_masked_once(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "a"), node("Relu", "a", "b"), node("MatMul", "b w", "y")]
    path, effect = sparsified(save_graph(tmp_path, nodes, {"w": normal(8, 8)}, x=(2, 8)), tmp_path / "out")
    assert eligible(arrays(path)["w"].T)
    assert effect.summary.startswith("2:4 in 1 of 1 weights")


def test_a_weight_that_is_listed_as_an_input_is_no_input_any_more(tmp_path: Path) -> None:
    path = save_graph(
        tmp_path, [node("MatMul", "x w", "y")], {"w": normal(8, 8)}, x=(2, 8), w=(TensorProto.FLOAT, (8, 8))
    )
    made, _ = sparsified(path, tmp_path / "out")
    assert [one.name for one in onnx.load(made).graph.input] == ["x"]


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_unstructured_takes_the_smallest_of_all_or_of_each(scope: str, tmp_path: Path) -> None:
    given = mixed(tmp_path, conv=10 * normal(8, 4, 3, 3))
    path, effect = sparsified(given, tmp_path / "out", pattern="unstructured", ratio=0.75, scope=scope)
    found = {name: value for name, value in arrays(path).items() if name != "bias"}
    shares = {name: float((value == 0).mean()) for name, value in found.items()}
    total = sum(value.size for value in found.values())
    assert sum(int((value == 0).sum()) for value in found.values()) == pytest.approx(0.75 * total, abs=len(found))
    if scope == "layer":
        assert all(share == pytest.approx(0.75, abs=1 / found[name].size) for name, share in shares.items())
    else:
        assert shares["conv"] < 0.2 < 0.75 < shares["gemm"]
    assert sparsify.of(onnx.load(path)) == "unstructured=0.75"
    assert effect.summary.startswith("unstructured=0.75 in 6 of 6 weights, 75.0%")


def test_a_second_pattern_leaves_a_2_4_graph_2_4(tmp_path: Path) -> None:
    first, _ = sparsified(mixed(tmp_path), tmp_path / "a")
    second, effect = sparsified(first, tmp_path / "b", pattern="unstructured", ratio=0.8)
    assert sparsify.of(onnx.load(second)) == "2:4"
    assert effect.summary.endswith("2:4 held in 6 of 6 weights")


@pytest.mark.parametrize("name", ["conv", "Conv_a", "Con*"])
def test_protected_weights_stay_dense(name: str, tmp_path: Path) -> None:
    path, effect = sparsified(mixed(tmp_path), tmp_path / "out", protect=(name,))
    found = arrays(path)
    assert (found["conv"] != 0).all()
    assert eligible(found["matmul"].T)
    assert effect.notes == ("left dense: conv: it is protected",)


def test_a_module_is_protected_with_all_below_it(tmp_path: Path) -> None:
    model = onnx.load(mixed(tmp_path))
    for one, module in zip(model.graph.node, ("body.0", "", "", "head.a", "head.b", *[""] * 6), strict=True):
        entry = one.metadata_props.add()
        entry.key, entry.value = model_file.MODULE_KEY, module
    onnx.save(model, tmp_path / "given.onnx")
    path, _ = sparsified(tmp_path / "given.onnx", tmp_path / "out", protect=("head",))
    assert {name for name, one in arrays(path).items() if (one != 0).all()} == {"gemm", "gemm_t", "bias"}


def test_a_protected_name_that_there_is_none_of(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="matmul") as caught:
        sparsified(mixed(tmp_path), tmp_path / "out", protect=("matmull",))
    assert "'matmull' is to be protected" in caught.value.message


@pytest.mark.parametrize(
    ("nodes", "weights", "words"),
    [
        ([node("Relu", "x", "y")], {}, "no weight that can be sparse"),
        ([node("MatMul", "x w", "y")], {"w": normal(6, 8)}, "its 6 inputs are no multiple of 4"),
    ],
)
def test_a_graph_without_such_weights(nodes: Any, weights: Weights, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidGraph, match=words):
        sparsified(save_graph(tmp_path, nodes, weights, x=(2, 6)), tmp_path / "out")


def test_transposed_weights_need_no_shapes(tmp_path: Path) -> None:
    nodes = [
        node("Transpose", "two", "a"),
        node("MatMul", "x a", "b"),
        node("Transpose", "three", "c"),
        node("MatMul", "b c", "d"),
        node("Transpose", "vector", "e"),
        node("MatMul", "d e", "y"),
    ]
    weights = {"two": normal(12, 8), "three": normal(4, 12, 3), "vector": normal(4)}
    given = save_graph(tmp_path, nodes, weights, x=("n", 8))
    model = onnx.load(given)
    model.graph.ClearField("value_info")
    onnx.save(model, given)
    path, effect = sparsified(given, tmp_path / "out")
    assert effect.summary.startswith("2:4 in 2 of 3 weights")
    assert eligible(arrays(path)["two"])
    assert eligible(arrays(path)["three"])
    assert [(one.name, one.two_of_four) for one in check.sparse_weights(path)] == [
        ("two", True),
        ("three", True),
        ("vector", False),
    ]


def test_facts_of_a_file(tmp_path: Path) -> None:
    path, _ = sparsified(mixed(tmp_path), tmp_path / "out", protect=("gemm",))
    facts = {one.name: one for one in check.sparse_weights(path)}
    assert {name: one.two_of_four for name, one in facts.items()} == {name: name != "gemm" for name in facts}
    assert (facts["conv"].zeros, facts["conv"].elements) == (144, 288)


@pytest.mark.parametrize(("shape", "axis"), [((6, 8), 1), ((8, 6), 0), ((5, 12, 3, 3), 1), ((2, 8, 3), -2)])
def test_two_of_four_keeps_the_two_largest_along_the_axis(shape: tuple[int, ...], axis: int) -> None:
    weight = normal(*shape)
    kept = sparsify.two_of_four(weight, axis)
    fours = np.moveaxis(weight, axis, -1).reshape(-1, 4)
    for four, stays in zip(fours, np.moveaxis(kept, axis, -1).reshape(-1, 4), strict=True):
        assert set(np.flatnonzero(stays)) == set(np.argsort(-np.abs(four))[:2])
    assert sparsify.holds(kept, axis)
    assert not sparsify.holds(weight != 0, axis)


def test_of_equal_magnitudes_the_first_stay() -> None:
    assert sparsify.two_of_four(np.array([[1, -1, 1, 1], [0, 0, 0, 0]], np.float32), 1).tolist() == [[1, 1, 0, 0]] * 2


def test_a_length_that_is_no_multiple_of_four_is_no_pattern() -> None:
    assert not sparsify.holds(np.zeros((2, 6), bool), 1)
    assert sparsify.holds(np.zeros((2, 8), bool), 1)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.77])
def test_a_threshold_makes_exactly_the_share_zero(ratio: float) -> None:
    arrays = [normal(40, 30), np.round(normal(20, 10, 3, seed=1), 1)]  # the second one with many that are equal
    bound = sparsify.threshold([lambda one=one: one for one in arrays], ratio)  # type: ignore[misc]
    gone = []
    for one in arrays:
        kept, bound = bound.mask(one)
        gone.append(~kept & (one != 0))
    everything = np.sort(np.abs(np.concatenate([one.reshape(-1) for one in arrays])))
    count = int(ratio * len(everything))
    zeros = sum(int((one | (given == 0)).sum()) for one, given in zip(gone, arrays, strict=True))
    assert zeros == max(count, int((everything == 0).sum()))
    largest = max(
        (float(np.abs(given[one]).max(initial=0)) for one, given in zip(gone, arrays, strict=True)), default=0
    )
    assert largest <= (everything[count] if count else 0)


@pytest.mark.parametrize(
    ("text", "pattern", "ratio", "slug"),
    [
        ("2:4", "2:4", 0.5, "sparse24"),
        ("unstructured=0.7", "unstructured", 0.7, "sparse70"),
        (" Unstructured=0.125", "unstructured", 0.125, "sparse12_5"),
    ],
)
def test_what_can_be_asked_for(text: str, pattern: str, ratio: float, slug: str) -> None:
    found = Sparsity.parse(text, SparsifyOptions(protect=("head",)))
    assert (found.pattern, found.ratio, found.slug, found.protect) == (pattern, ratio, slug, ("head",))
    assert str(Sparsity.parse(text)) == text.strip().lower()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1:4", "cannot read the sparsity '1:4'"),
        ("2:4=0.5", "cannot read"),
        ("unstructured", "cannot read"),
        ("unstructured=1", "not at least 0 and less than 1"),
        ("unstructured=-0.1", "not at least 0"),
        ("unstructured=nan", "not at least 0"),
        ("unstructured=half", "'half' is no number"),
    ],
)
def test_what_cannot_be_asked_for(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=r"2:4, or unstructured=0\.5") as caught:
        Sparsity.parse(text)
    assert words in caught.value.message


WIDE = 128


def dense(path: Path) -> Path:
    """Convolutions that ONNX Runtime lays out in blocks, a grouped one, Gemm both ways round, and a MatMul."""
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


def built(given: Artifact, folder: Path) -> tuple[Path, Effect]:
    folder.mkdir()
    effect = OnnxRuntime().build(BuildRequest(given, folder, Device(), {}, lambda _: None))
    return folder / effect.file, effect


RUNS_HERE = tuple(name for name in KINDS if name not in ("fp32", "bf16", "fp8"))  # with kernels of the CPU's
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
    if precision in RUNS_HERE:
        graph_file, effect = built(made, tmp_path / "built")
        assert check.follow(sparse.path, graph_file).held == WEIGHTS
        assert len(check.follow(made.path, graph_file).held) == len(WEIGHTS)
        assert any("2:4 held in 6 of 6 weights" in note for note in effect.notes)


def test_the_graph_that_onnx_runtime_saves_is_read_in_its_own_layout(sparse: Artifact, tmp_path: Path) -> None:
    path, effect = built(sparse, tmp_path / "built")
    domains = {one.domain for one in onnx.load(path).graph.node}
    if "com.microsoft.nchwc" not in domains:
        pytest.skip("ONNX Runtime lays out no convolutions in blocks on this processor")
    assert check.follow(sparse.path, path).held == WEIGHTS
    assert any("2:4 held in 6 of 6 weights" in note for note in effect.notes)
    other, _ = built(artifact(dense(tmp_path / "dense.onnx")), tmp_path / "dense")
    found = check.follow(sparse.path, other)
    assert found.held == ()
    assert set(found.missing) >= {"first", "second"}  # in blocks, nothing tells them from others


def test_a_dense_graph_has_lost_all_of_it(sparse: Artifact, tmp_path: Path) -> None:
    found = check.follow(sparse.path, dense(tmp_path / "dense.onnx"))
    assert found.lost == WEIGHTS
    assert str(found) == "2:4 held in 0 of 6 weights; lost in first, second, grouped and 3 more"
    assert not any(one.two_of_four for one in check.sparse_weights(tmp_path / "dense.onnx"))
    assert "SPARSE" not in "".join(built(artifact(tmp_path / "dense.onnx"), tmp_path / "built")[1].notes)


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


def quantised(path: Path, operator: str, weight: Any, inputs: str, **attributes: Any) -> Path:
    """One product whose integer weight has zero points that are not 0."""
    constants = {"w": weight, "s": np.float32(1), "z": np.uint8(3), **attributes.pop("constants", {})}
    domain = attributes.pop("domain", "")
    one = helper.make_node(operator, inputs.split(), ["y"], name="p", domain=domain, **attributes)
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, None)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    initialisers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(helper.make_graph([one], "g", [x], [y], initialisers), opset_imports=opsets), path)
    return path


def test_a_level_that_equals_its_zero_point_is_a_zero(tmp_path: Path) -> None:
    kept = sparsify.two_of_four(normal(16, 8), 0)
    points = np.arange(120, 128, dtype=np.uint8)
    levels = np.where(kept, 200, points[None, :]).astype(np.uint8)
    for name, weight, form, others in (
        ("QLinearMatMul", levels, "x s z w s p s z", {}),
        ("MatMulInteger", levels, "x w z p", {}),
        ("QGemm", levels.T.copy(), "x s z w s p", {"domain": "com.microsoft", "transB": 1}),
        ("QLinearConv", levels.T.copy()[:, :, None, None], "x s z w s p s z", {}),
    ):
        path = quantised(tmp_path / "q.onnx", name, weight, form, constants={"p": points}, **others)
        (facts,) = check.sparse_weights(path)
        assert facts.two_of_four, name
        assert facts.zeros == facts.elements // 2
        path = quantised(tmp_path / "q.onnx", name, weight, form, constants={"p": points + 1}, **others)
        assert not check.sparse_weights(path)[0].two_of_four, name


def test_packed_nibbles_are_unpacked(tmp_path: Path) -> None:
    kept = sparsify.two_of_four(normal(6, 32), 1)
    levels = np.where(kept, 3, 8).astype(np.uint8)
    packed = (levels[:, ::2] | levels[:, 1::2] << 4).reshape(6, 2, 8)
    form = {"domain": "com.microsoft", "K": 32, "N": 6, "bits": 4, "block_size": 16}
    path = quantised(tmp_path / "n.onnx", "MatMulNBits", packed, "x w s", **form)
    assert check.sparse_weights(path)[0].two_of_four
    path = quantised(tmp_path / "n.onnx", "MatMulNBits", packed[:, ::-1].copy() | 1, "x w s", **form)
    assert not check.sparse_weights(path)[0].two_of_four


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
