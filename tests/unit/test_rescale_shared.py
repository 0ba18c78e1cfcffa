"""Products that share a weight, as in siamese networks and those that repeat a layer, get the same factors."""

from pathlib import Path

import numpy as np
import pytest

from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.passes.rescale.equalize import equalize_cross_layer
from enginesmith.pipeline.passes.rescale.smooth_quant import Smooth, smooth
from graphs import difference, measure_ranges, node, normal, save_graph

WIDTH = 6
UNEVEN = np.float32(10) ** -np.arange(WIDTH, dtype=np.float32)
WEIGHTS = {"w1": normal(WIDTH, 3, 1, 1) * UNEVEN[:, None, None, None], "b1": normal(WIDTH) * UNEVEN}
WEIGHTS |= {"w2": normal(3, WIDTH, 1, 1), "b2": normal(3)}


@pytest.mark.parametrize(
    ("second", "more", "outputs", "equalized"),
    [
        ("negated", (), "y", True),
        ("c0", (), "y", True),
        ("negated", (node("ConvTranspose", "c0 w2", "d"),), "y d", False),
        ("negated", (node("Neg", "a1", "d"),), "y d", False),
    ],
    ids=["two branches", "one after the other", "along the other axis", "one of them cannot be scaled"],
)
def test_products_of_one_weight_are_equalized_together(
    tmp_path: Path, second: str, more: tuple[object, ...], outputs: str, equalized: bool
) -> None:
    nodes = [node("Neg", "x", "negated")]
    for index, read in enumerate(("x", second)):
        nodes += [node("Conv", f"{read} w1 b1", f"a{index}"), node("Relu", f"a{index}", f"r{index}")]
        nodes += [node("Conv", f"r{index} w2 b2", f"c{index}")]
    before = save_graph(tmp_path, [*nodes, node("Sub", "c0 c1", "y"), *more], WEIGHTS, outputs, x=("n", 3, 4, 4))
    model = edit.load(before)
    done = equalize_cross_layer(model, None)
    (tmp_path / "after").mkdir()
    edit.save(model, tmp_path / "after")
    assert (done.ties, done.products) == ((1, 4) if equalized else (0, 0))
    assert difference(before, tmp_path / "after" / edit.FILE, normal(4, 3, 4, 4, seed=1)) < 1e-6
    assert done.ratio_after < done.ratio_before / 10 or not equalized


@pytest.mark.parametrize("computed", [False, True])
def test_products_of_one_weight_are_smoothed_together(tmp_path: Path, computed: bool) -> None:
    """All that they read is of the same normalization; where one reads something else, all stay as they are."""
    width = 16
    scale = np.where(np.arange(width) % 5 == 0, np.float32(40), np.float32(1))
    weights = {"scale": scale, "shift": normal(width), "w": normal(width, 8)}
    nodes = [node("Neg", "x", "n")]
    for index, read in enumerate("xn"):
        nodes.append(node("LayerNormalization", f"{read} scale shift", f"v{index}"))
        nodes.append(node("MatMul", f"{'sine' if computed and index else f'v{index}'} w", f"m{index}"))
    nodes[3:3] = [node("Sin", "n", "sine")] if computed else []
    before = save_graph(tmp_path, [*nodes, node("Sub", "m0 m1", "y")], weights, opset=23, x=("n", 5, width))
    x = normal(8, 5, width, seed=1)
    model = edit.load(before)
    done = smooth(
        model, measure_ranges(before, x, "v0", "v1", "sine" if computed else "v1", axis=-1), Smooth(alpha=0.5)
    )
    (tmp_path / "after").mkdir()
    edit.save(model, tmp_path / "after")
    assert (done.values, done.products, done.inserted) == ((0, 0, 0) if computed else (2, 2, 0))
    assert difference(before, tmp_path / "after" / edit.FILE, x) < 1e-5
    assert len(model.graph) == len(nodes) + 1
