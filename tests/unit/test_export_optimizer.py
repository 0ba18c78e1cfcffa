"""Optimize the graph that torch.onnx writes: what onnxscript does to it, and what is left out of that."""

from collections import Counter

import onnx.parser
from onnxscript import rewriter

from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.passes.export import optimizer

HALVES = """<ir_version: 10, opset_import: ["": 18]>
net (float[n, 8] x) => (float[n, 4] y)
<int64[1] none = {0}, int64[1] half = {4}, int64[1] all = {8}, int64[1] last = {1}> {
    right = Slice(x, half, all, last)
    left = Slice(x, none, half, last)
    same = Identity(right)
    y = Mul(left, same)
}"""


def test_no_rule_is_tried_that_goes_through_all_nodes_for_each_node() -> None:
    """They take minutes in large graphs; other rules hold."""
    model, before = ir.from_proto(onnx.parser.parse_model(HALVES)), rewriter._DEFAULT_REWRITE_RULES
    optimizer.optimize_graph(model)
    assert Counter(node.op_type for node in model.graph) == {"Slice": 2, "Mul": 1}
    assert rewriter._DEFAULT_REWRITE_RULES is before
    slow = {rule.name for rule in before if not rule._matcher.pattern.has_single_output_node}
    assert slow == {"SlicesSplit"}, "another one would be left out, too"
