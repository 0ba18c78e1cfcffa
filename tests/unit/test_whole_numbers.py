"""Whole numbers that do not fit in the 32 bits that OpenVINO has for them: fed, and made in the graph."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import infer
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.openvino.engine import OpenVINO
from enginesmith.pipeline.engines.openvino.profiler import Audit
from enginesmith.pipeline.engines.openvino.session import compile_options
from enginesmith.pipeline.engines.openvino.whole_numbers import find_whole_numbers
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.system.device import Device

NUMBERS = {"factor": np.int64(1234567891), "rest": np.int64(512), "table": np.zeros((512, 4), np.float32)}


def graph(*nodes: tuple[str, str, str], dtype: int = onnx.TensorProto.INT64) -> onnx.ModelProto:
    """Make a graph of ``(operator, inputs, output)``; the input is ``x``, the output of the last node the graph's."""
    made = [
        helper.make_node(
            operator, inputs.split(), [output], name=f"make_{output}", **({"to": 1} if operator == "Cast" else {})
        )
        for operator, inputs, output in nodes
    ]
    last = 1 if nodes[-1][0] in ("Gather", "Cast") else dtype
    ends = [
        helper.make_tensor_value_info("x", dtype, ["batch", 4]),
        helper.make_tensor_value_info(nodes[-1][2], last, ["n"] * 2),
    ]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in NUMBERS.items()]
    model = helper.make_graph(made, "g", ends[:1], ends[1:], stored)
    return helper.make_model(model, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("nodes", "products"),
    [
        ([("Mul", "x factor", "y")], ["make_y"]),
        ([("Mul", "x factor", "a"), ("Add", "a rest", "y")], ["make_a"]),
        ([("Mul", "x factor", "a"), ("Mod", "a rest", "b"), ("Gather", "table b", "y")], ["make_a"]),  # a hash
        ([("Mul", "x rest", "a"), ("Add", "a rest", "b"), ("Gather", "table b", "y")], []),  # a place in a table
        ([("Add", "x rest", "y")], []),
        ([("Cast", "x", "f"), ("Mul", "f f", "y")], []),
        ([("Shape", "x", "s"), ("Mul", "s s", "y")], []),
    ],
)
def test_products_of_whole_numbers_are_found_unless_they_are_indices(
    nodes: list[tuple[str, str, str]], products: list[str]
) -> None:
    assert list(find_whole_numbers(graph(*nodes)).products) == products


@pytest.mark.parametrize(("dtype", "clipped"), [("UINT8", ("make_y",)), ("INT8", ("make_y",)), ("INT16", ())])
def test_sums_of_8_bits_are_found(dtype: str, clipped: tuple[str, ...]) -> None:
    made = graph(("Add", "x x", "y"), dtype=getattr(onnx.TensorProto, dtype))
    assert find_whole_numbers(made).clipped == clipped
    cautions = Audit(layers={}, products={}, whole_numbers=find_whole_numbers(made)).cautions
    assert bool(cautions) is bool(clipped)


@pytest.mark.parametrize("dtype", [onnx.TensorProto.INT64, onnx.TensorProto.INT32])
@pytest.mark.parametrize(
    ("nodes", "quotients"),
    [
        ([("Neg", "x", "a"), ("Mod", "a x", "y")], ["make_y"]),
        ([("Div", "x x", "a"), ("Add", "a x", "y")], ["make_a"]),
        ([("Mul", "x x", "y")], []),
    ],
)
def test_quotients_of_whole_numbers_are_found(
    dtype: int, nodes: list[tuple[str, str, str]], quotients: list[str]
) -> None:
    assert list(find_whole_numbers(graph(*nodes, dtype=dtype)).quotients) == quotients


def test_products_of_int32_are_those_of_the_model() -> None:
    model = graph(("Mul", "x x", "y"), dtype=onnx.TensorProto.INT32)
    assert not find_whole_numbers(model).products


@pytest.mark.parametrize("number", [2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**40])
def test_whole_numbers_that_do_not_fit_are_refused(tmp_path: Path, number: int) -> None:
    """OpenVINO would take others instead, without a word."""
    onnx.save(graph(("Add", "x rest", "a"), ("Mul", "a factor", "y")), path := tmp_path / "model.onnx")
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    engine = OpenVINO()
    effect = engine.build(BuildRequest(model, tmp_path, Device()))
    built = Artifact(kind="engine", path=tmp_path / effect.file, sha256="", bytes=0, signature=model.signature)
    (caution,) = engine.facts(built).cautions
    assert caution.endswith("in 32 bits: products of int64 beyond ±2147483647 would be wrong (make_y)")
    feeds = {"x": np.array([[0, 1, -3, number]])}
    assert model.signature is not None
    specs = {side: [spec.model_dump() for spec in getattr(model.signature, side)] for side in ("inputs", "outputs")}
    bundled = infer._openvino(built.path, {"options": compile_options(1, "f32"), **specs})
    with engine.load(built, Device()) as session:
        if abs(number + 0.5) < 2**31:
            np.testing.assert_array_equal(bundled(feeds)["y"], session.run(feeds)["y"])
            alike = {"x": feeds["x"].view(np.longlong)}  # which NumPy tells apart from int64
            (answer,) = session.answer([alike["x"]])
            for given in (bundled(alike)["y"], session.run(alike)["y"], answer):
                np.testing.assert_array_equal(given, session.run(feeds)["y"])
            return
        with pytest.raises(ValueError, match="x has whole numbers that do not fit in the 32 bits"):
            bundled(feeds)
        for call in (session.bind, session.run):
            with pytest.raises(
                ModelError, match=f"input 'x' has {number}, and OpenVINO computes whole numbers in 32 bits"
            ):
                call(feeds)
