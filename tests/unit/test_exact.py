"""Parts of graphs that runtimes compute with few right digits, and that are written in other operators."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.frameworks.onnx import edit, evaluator, model_file, validation
from enginesmith.pipeline.frameworks.onnx.exact import write_exactly
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.planning.single_stages import verify_steps
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.tasks.load import LoadOnnx
from enginesmith.pipeline.tensors import Array
from graphs import parse_graph, run_model

X = np.float32([-200, -110, -80, -50, -20, -17.3, -17, -10, -1, 0, 1, 10, 20, 200])
WIDE = X.astype(np.float64)
LOG = -np.logaddexp(0, -WIDE)


def write_sigmoid(body: str, dtype: str = "float", **constants: Any) -> Any:
    text = f"net ({dtype}[n] x) => ({dtype}[n] y) {{ s = Sigmoid(x) {body} }}"
    return parse_graph(text, **constants)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("y = Log(s)", LOG),
        ("y = Reciprocal(s)", np.exp(-LOG)),
        ("y = Div(c, s)", 3 * np.exp(-LOG)),
        ("y = Sqrt(s)", np.exp(LOG / 2)),
        ("y = Pow(s, half)", np.exp(LOG / 2)),
        ("y = Pow(s, minus)", np.exp(-LOG)),
        ("t = Add(s, tiny) y = Log(t)", np.log(np.exp(LOG) + 1e-30)),
        ("t = Mul(s, c) r = Identity(t) y = Log(r)", np.log(3) + LOG),
        ("t = Max(s, tiny) y = Log(t)", np.log(np.maximum(np.exp(LOG), 1e-30))),
    ],
)
def test_what_reads_small_numbers_of_a_sigmoid_has_all_digits(body: str, wanted: Array) -> None:
    """ONNX Runtime's Sigmoid is 0 below -17.2, so that logarithms and quotients of it are infinite."""
    values = {"c": 3.0, "half": 0.5, "minus": -1.0, "tiny": 1e-30}
    model = write_sigmoid(body, **{name: np.float32(each) for name, each in values.items() if name in body})
    assert len(write_exactly(model)) == 1
    chosen = slice(1, None) if body == "y = Log(s)" else WIDE >= -80  # before, sigmoids are less than float32 has
    np.testing.assert_allclose(run_model(model, {"x": X})["y"][chosen], wanted[chosen], rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("body", "dtype"),
    [
        ("y = Mul(x, s)", "float"),
        ("t = Add(s, c) y = Log(t)", "float"),
        ("y = Div(s, c)", "float"),
        ("y = Pow(s, c)", "float"),
        ("t = Mul(x, s) y = Log(t)", "float"),
        ("y = Log(s)", "float16"),
    ],
)
def test_other_sigmoids_stay_one_operator(body: str, dtype: str) -> None:
    model = write_sigmoid(body, dtype, **({"c": np.float32(2)} if "c)" in body else {}))
    before = [node.op_type for node in model.graph]
    assert write_exactly(model) == ()
    assert [node.op_type for node in model.graph] == before


def test_a_sigmoid_stays_where_something_else_reads_it_too() -> None:
    model = parse_graph(
        """net (float[n] x, bool b) => (float[n] s, float[n] y, float[n] z) {
            s = Sigmoid(x) y = Log(s)
            z = If (b) <then_branch = a () => (float[n] p) { q = Sigmoid(x) p = Log(q) },
                else_branch = d () => (float[n] r) { r = Neg(x) }>
        }"""
    )
    (note,) = write_exactly(model)
    assert note == "log(sigmoid(x)) was written as -softplus(-x), which runtimes compute more accurately (2 times)"
    found = run_model(model, {"x": X, "b": np.array(True)})
    np.testing.assert_allclose(found["y"][1:-1], LOG[1:-1], rtol=1e-6)
    np.testing.assert_array_equal(found["z"], found["y"])
    np.testing.assert_allclose(found["s"], np.exp(LOG), atol=1e-6)


RNG = np.random.default_rng(0)
FACTORS = {opset: RNG.uniform(0.5, 2, (2, size)).astype(np.float32) for opset, size in ((18, 2), (21, 8))}
PICTURES = RNG.standard_normal((2, 8, 4, 4))


@pytest.mark.parametrize("mean", [0, 100, 1e4])
@pytest.mark.parametrize(("opset", "rank"), [(18, 4), (21, 3), (21, 4)])
def test_group_normalization_has_all_digits(mean: float, opset: int, rank: int) -> None:
    """The function that ONNX Runtime computes is off by thousands, or NaN."""
    scale, bias = FACTORS[opset]
    pixels = ",".join(["h", "w"][: rank - 2])
    text = f"""net (float[n,8,{pixels}] x, float[m] b) => (float[n,8,{pixels}] y) {{
        y = GroupNormalization <num_groups = 2, epsilon = 1e-4> (x, s, b)
    }}"""
    model = parse_graph(text, opset, s=scale)
    x = (mean + 0.01 * PICTURES).astype(np.float32).reshape((2, 8, 4, 4) if rank == 4 else (2, 8, 16))
    assert write_exactly(model) == (
        "GroupNormalization was written with InstanceNormalization, which runtimes compute more accurately (1 times)",
    )
    groups = x.astype(np.float64).reshape(2, 2, -1)
    normal = (groups - groups.mean(2, keepdims=True)) / np.sqrt(groups.var(2, keepdims=True) + 1e-4)
    factors = [np.repeat(each, 8 // each.size).reshape(8, *[1] * (rank - 2)) for each in (scale, bias)]
    wanted = normal.reshape(x.shape) * factors[0] + factors[1]
    np.testing.assert_allclose(run_model(model, {"x": x, "b": bias})["y"], wanted, atol=3e-6)


def test_files_are_rewritten_on_loading_unless_they_are_judged_themselves(tmp_path: Path) -> None:
    model = write_sigmoid("t = Add(x, w) y = Log(s)", w=np.ones(2000, np.float32))
    edit.save(model, tmp_path, external_data_bytes=1000)
    source = resolve(str(tmp_path / edit.FILE))
    feeds = {"x": np.full(2000, -50, np.float32)}
    for exact, wanted in ((True, -50), (False, -np.inf)):
        out = tmp_path / str(exact)
        out.mkdir()
        effect = LoadOnnx(source=source, exact=exact).run({}, out, lambda _: None)
        assert any("softplus" in note for note in effect.notes) is exact
        validation.check(out / edit.FILE)
        (found,) = evaluator.run_graph(out / edit.FILE, feeds)
        np.testing.assert_array_equal(found, np.full(2000, wanted, np.float32))
    assert model_file.read(tmp_path / edit.FILE).graph.node[0].op_type == "Sigmoid"


def test_a_file_that_is_verified_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / edit.FILE
    edit.save(write_sigmoid("y = Log(s)"), tmp_path)
    steps = verify_steps(resolve_recipe(make({"model": str(path)})), str(path))
    loads = [step.task.exact for step in steps if isinstance(step.task, LoadOnnx)]
    assert loads == [True, False]
