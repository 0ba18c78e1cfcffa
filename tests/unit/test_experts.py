"""Mixtures of experts of transformers in a graph: products of groups of rows, each with a matrix of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from enginesmith.pipeline.frameworks.onnx import edit, evaluator
from enginesmith.pipeline.passes.rescale.smooth_quant import Smooth, smooth
from exporting import exported, loaded
from graphs import difference, measure_ranges, node, normal, save_graph

_EXPERTS = 3
_WIDTH = 16


class Experts(torch.nn.Module):
    """Two products of groups of rows; with 1024 columns, the weights are larger than what the exporter folds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = (torch.nn.Parameter(torch.randn(_EXPERTS, *size)) for size in ((1024, 4), (4, 1024)))

    def forward(self, x: Any, ends: Any) -> Any:
        multiply = torch.ops.transformers.grouped_mm_fallback
        hidden = multiply(x, self.up.transpose(-2, -1), ends)
        return multiply(hidden, self.down.transpose(-2, -1), ends)


def test_each_expert_is_a_product_of_its_rows_with_a_weight(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.moe")
    feeds = {"x": torch.randn(6, 4), "ends": torch.tensor([2, 5, 6], dtype=torch.int32)}
    model = loaded(Experts(), feeds, {"x": ("rows", 4), "ends": (_EXPERTS,)}, ["y:float32:rows,4"])
    exported(tmp_path, model, exporter="dynamo")
    for ends in ([2, 5, 6], [0, 9, 9], [1, 1, 1]):  # experts that no row chose, too
        x = torch.randn(ends[-1], 4)
        groups = torch.tensor(ends, dtype=torch.int32)
        (answer,) = evaluator.run_graph(tmp_path / edit.FILE, {"x": x.numpy(), "ends": groups.numpy()})
        np.testing.assert_allclose(answer, Experts()(x, groups).numpy(force=True), 1e-4, 1e-4)
    graph = onnx.load(tmp_path / edit.FILE).graph
    weights = {weight.name: tuple(weight.dims) for weight in graph.initializer}
    products = [weights[node.input[1]] for node in graph.node if node.op_type == "MatMul"]
    assert products == [(4, 1024)] * _EXPERTS + [(1024, 4)] * _EXPERTS


@pytest.mark.parametrize(("experts", "insert", "found"), [(1, False, (2, 1)), (3, False, (1, 0)), (3, True, (1, 1))])
def test_what_all_experts_read_is_scaled_for_all(tmp_path: Path, experts: int, insert: bool, found: Any) -> None:
    """Rows that each expert has of its own stay as they are."""
    nodes = [node("LayerNormalization", "x scale shift", "v"), node("MatMul", "v w", "a"), node("MatMul", "v u", "b")]
    weights = {
        "scale": np.where(np.arange(_WIDTH) % 8 == 3, 30.0, 1.0).astype(np.float32),
        "shift": normal(_WIDTH),
        "w": normal(3, _WIDTH, 8),
        "u": normal(_WIDTH, 8, seed=2),
    }
    before = save_graph(tmp_path, nodes, weights, "a b", opset=23, x=("n", experts, 5, _WIDTH))
    x, model = normal(6 // experts, experts, 5, _WIDTH, seed=1), edit.load(before)
    done = smooth(model, measure_ranges(before, x, "v", axis=-1), Smooth(alpha=0.5, insert=insert))
    assert (done.all_products, done.values) == found
    (tmp_path / "out").mkdir()
    edit.save(model, tmp_path / "out")
    assert difference(before, tmp_path / "out" / edit.FILE, x) < 1e-6
