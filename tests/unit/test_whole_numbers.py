"""Whole numbers that do not fit in the 32 bits that OpenVINO has for them: fed, and made in the graph."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import infer
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.openvino.engine import OpenVINO
from enginesmith.pipeline.engines.openvino.session import compile_options
from enginesmith.pipeline.engines.openvino.whole_numbers import find_whole_numbers
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array

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


@pytest.mark.parametrize(
    ("call", "compute", "dtypes"),
    [
        ("Div (x, k)", lambda x, k: np.trunc(x / k), ("uint8", "int8")),
        ("Div (k, x)", lambda x, k: np.trunc(k / x), ("uint8", "int8")),
        ("Mod (x, k)", lambda x, k: x % k, ("uint8", "int8")),
        ("Add (x, k)", lambda x, k: x + k, ("uint8", "int8")),
        ("Sub (x, k)", lambda x, k: x - k, ("uint8", "int8")),
        ("Mul (x, k)", lambda x, k: x * k, ("uint8", "int8")),
        ("Neg (x)", lambda x, k: -x, ("int8",)),
        ("Abs (x)", lambda x, k: abs(x), ("int8",)),
        ('BitShift <direction = "RIGHT"> (x, k)', lambda x, k: x >> k, ("uint8",)),
        ('BitShift <direction = "LEFT"> (x, k)', lambda x, k: x << k, ("uint8",)),
        ("BitwiseXor (x, k)", lambda x, k: x ^ k, ("uint8", "int8")),
        ("BitwiseNot (x)", lambda x, k: ~x, ("uint8", "int8")),
    ],
)
def test_numbers_of_8_bits_are_computed_as_in_onnx(
    tmp_path: Path, call: str, compute: Callable[[Array, int], Array], dtypes: Sequence[str]
) -> None:
    """OpenVINO would round quotients and shifted numbers to the nearest one, and clip what does not fit."""
    for dtype, k in itertools.product(dtypes, (1, 3, 7)):
        text = f"net ({dtype}[n, 15] x) => ({dtype}[n, 15] y) <{dtype} k = {{{k}}}> {{ y = {call} }}"
        made = helper.make_model(
            onnx.parser.parse_graph(text), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
        )
        onnx.save(made, path := tmp_path / "model.onnx")
        model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
        effect = OpenVINO().build(BuildRequest(model, tmp_path, Device()))
        built = Artifact(kind="engine", path=tmp_path / effect.file, sha256="", bytes=0, signature=model.signature)
        given = np.setdiff1d(np.arange(np.iinfo(dtype).min, np.iinfo(dtype).max + 1), [0])
        with OpenVINO().load(built, Device()) as session:
            answer = session.run({"x": given.reshape(-1, 15).astype(dtype)})["y"]
        np.testing.assert_array_equal(answer.reshape(-1), compute(given, k).astype(np.int64).astype(dtype), call)
        assert not OpenVINO().facts(built).cautions


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
