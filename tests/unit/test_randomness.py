"""ONNX files that answer at random are refused when they are loaded, and their random nodes are named."""

import re
from pathlib import Path

import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.frameworks.onnx.randomness import find_random_nodes
from enginesmith.pipeline.frameworks.processing import ProcessingRequest
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.tasks.load import LoadOnnx
from enginesmith.pipeline.tensors import TensorSpec

HEAD = '<ir_version: 8, opset_import: ["" : 17, "local" : 1]>'
EVALUATE, TAKE_OUT = "export the model in evaluation mode", "take out what is random"

RANDOM = {
    "RandomNormalLike 'n'": "(float[N,3] x) => (float[N,3] y) {n = RandomNormalLike <seed = 1.0> (x) y = Add (x, n)}",
    "RandomUniformLike 'n'": "(float[N,3] x) => (float[N,3] y) {n = RandomUniformLike (x) y = Add (x, n)}",
    "RandomNormal 'n'": "(float[N,3] x) => (float[N,3] y) {n = RandomNormal <shape = [3]> () y = Add (x, n)}",
    "RandomUniform 'n'": "(float[N,3] x) => (float[N,3] y) {n = RandomUniform <shape = [3]> () y = Add (x, n)}",
    "Multinomial 'y'": "(float[N,5] x) => (int32[N,1] y) {y = Multinomial <seed: float = 3> (x)}",
    "Bernoulli 'n'": "(float[N,1] x) => (float[N,1] y) {p = Sigmoid (x) n = Bernoulli (p) y = Mul (x, n)}",
    "Dropout 'd'": "(float[N,9] x) => (float[N,9] y) <float r = {0.5}, bool t = {1}> {d = Dropout(x,r,t) y = Abs(d)}",
    "Bernoulli 'b'": """(float[N,9] x) => (float[N,9] y) <bool c = {1}> {
        y = If (c) <then_branch = g1 () => (float[N,9] o) {p = Sigmoid (x) b = Bernoulli (p) o = Mul (x, b)},
                    else_branch = g2 () => (float[N,9] z) {z = Neg (x)}>
    }""",
}
STEADY = {
    "not read": "(float[N,3] x) => (float[N,3] y) {n = RandomNormalLike (x) z = Add (x, n) y = Neg (x)}",
    "of its shape alone": "(float[N,3] x) => (int64[2] y) {n = RandomNormalLike (x) y = Shape (n)}",
    "nothing dropped": "(float[N,3] x) => (float[N,3] y) <float r = {0}, bool t = {1}> {y = Dropout (x, r, t)}",
    "not in training": "(float[N,3] x) => (float[N,3] y) <float r = {0.5}, bool t = {0}> {y = Dropout (x, r, t)}",
    "NaN": "(float[N,3] x) => (float[N,3] y) {n = RandomNormalLike (x) z = Sub (n, n) y = Div (z, z)}",
}
FUNCTION = """
<domain: "local", opset_import: ["" : 17]> noisy (x) => (y) {n = RandomNormalLike (x) y = Add (x, n)}
<domain: "local", opset_import: ["local" : 1]> twice (x) => (y) {m = local.noisy (x) y = local.noisy (m)}
"""


def write(text: str, folder: Path) -> Path:
    onnx.save(onnx.parser.parse_model(f"{HEAD} g {text}"), folder / "net.onnx")
    return folder / "net.onnx"


def load(path: Path, folder: Path, task: LoadOnnx | None = None) -> None:
    out = folder / "out"
    out.mkdir()
    (task or LoadOnnx(source=resolve(str(path)))).run({}, out, lambda _: None)


@pytest.mark.parametrize("name", RANDOM)
def test_a_file_that_answers_at_random_is_refused(name: str, tmp_path: Path) -> None:
    path = write(RANDOM[name], tmp_path)
    message = f"{path} answers differently each time it is run on the same input, by 1 random node: {name}"
    with pytest.raises(SourceError, match=re.escape(message)) as caught:
        load(path, tmp_path)
    assert caught.value.remedy.startswith(EVALUATE if name.startswith("Dropout") else TAKE_OUT)


@pytest.mark.parametrize("name", STEADY)
def test_a_file_that_answers_alike_is_loaded(name: str, tmp_path: Path) -> None:
    load(write(STEADY[name], tmp_path), tmp_path)


@pytest.mark.parametrize("name", ["not read", "not in training"])
def test_what_is_not_random_is_not_even_run(name: str, tmp_path: Path) -> None:
    assert not find_random_nodes(onnx.load(write(STEADY[name], tmp_path)))


def test_what_lies_beside_the_file_is_not_looked_into(tmp_path: Path) -> None:
    model = onnx.load(write(STEADY["not in training"], tmp_path))
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    onnx.save_model(model, tmp_path / "beside.onnx", save_as_external_data=True, size_threshold=0, location="w.bin")
    load(tmp_path / "beside.onnx", tmp_path)


def test_random_nodes_of_functions_are_found_where_these_are_called(tmp_path: Path) -> None:
    path = write(f"(float[N,3] x) => (float[N,3] y) {{y = local.twice (x)}} {FUNCTION}", tmp_path)
    with pytest.raises(SourceError, match="by 2 random nodes: RandomNormalLike "):
        load(path, tmp_path)


def test_both_remedies_are_given_and_nodes_have_their_names(tmp_path: Path) -> None:
    text = """(float[N,9] x) => (float[N,9] y) <float r = {0.5}, bool t = {1}> {
        d = Dropout (x, r, t) n = RandomNormalLike (x) y = Add (d, n) z = RandomUniformLike (y)}"""
    model = onnx.parser.parse_model(f"{HEAD} g {text}")
    model.graph.node[0].name = "/drop"
    assert [node.op_type for node in find_random_nodes(model)] == ["RandomNormalLike", "Dropout"]
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(SourceError, match="2 random nodes: RandomNormalLike 'n', Dropout '/drop'\n") as caught:
        load(tmp_path / "net.onnx", tmp_path)
    assert EVALUATE in caught.value.remedy
    assert TAKE_OUT in caught.value.remedy


def test_it_is_run_at_the_sizes_that_are_asked_for(tmp_path: Path) -> None:
    text = """(float[N,L] x) => (float[M,5] y) <int64[2] s = {-1, 5}> {
        n = RandomNormalLike (x) z = Add (x, n) y = Reshape (z, s)}"""  # 5 fits in none of the guessed lengths
    path, spec = write(text, tmp_path), TensorSpec(name="x", dtype="float32", shape=("batch", "length"))
    task = LoadOnnx(source=resolve(str(path)), inputs=(spec,), sizes={"length": 15})
    with pytest.raises(SourceError, match="answers differently"):
        load(path, tmp_path, task)


def test_what_is_computed_around_a_random_file_is_not_blamed(tmp_path: Path) -> None:
    path = write("(float[N,3] x) => (float[N,3] y) {n = RandomNormalLike (x) y = Add (x, n)}", tmp_path)
    task = LoadOnnx(source=resolve(str(path)), processing=ProcessingRequest(append=("softmax",)))
    with pytest.raises(SourceError, match="answers differently"):
        load(path, tmp_path, task)
