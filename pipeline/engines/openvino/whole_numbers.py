"""Find where a graph may compute whole numbers that do not fit in the 32 bits in which OpenVINO computes int64.

Inputs are checked when they are fed. In the graph it is products that make large numbers of small ones: of a hash, or
of seconds to nanoseconds.
"""

import functools
from collections import defaultdict
from typing import TYPE_CHECKING

from enginesmith.pipeline.frameworks.onnx import model_file

if TYPE_CHECKING:
    import onnx

_GROWING = ("Mul", "Pow", "BitShift", "ReduceProd")
_COUNTS = ("Shape", "Size", "ArgMax", "ArgMin", "NonZero", "TopK")
"""Their whole numbers are sizes and places, whatever they are of."""
_INDICES = {
    **dict.fromkeys(("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"), (1,)),
    **dict.fromkeys(("Reshape", "Expand", "Tile"), (1,)),
    "OneHot": (0,),
    "Slice": (1, 2, 3, 4),
    "Range": (0, 1, 2),
    "ConstantOfShape": (0,),
}
"""Operator → the inputs that are indices or sizes: a number that is too large is none."""
_CARRYING = (
    *("Add", "Sub", "Mul", "Neg", "Abs", "Sum", "CumSum", "ReduceSum", "Identity", "Cast", "Concat", "Split", "Where"),
    *("Squeeze", "Unsqueeze", "Reshape", "Expand", "Transpose", "Flatten", "Slice", "Gather", "Tile"),
)
"""Operators from whose result it shows that a number of theirs was wrong: others may hide it, as a remainder does."""


def find_long_products(model: "onnx.ModelProto") -> tuple[str, ...]:
    """List the products of int64 that depend on values of inputs, by name, unless they are indices alone.

    Seen is the main graph; what branches and loops compute within is not.
    """
    import onnx

    typed = onnx.shape_inference.infer_shapes(model)
    longs = (onnx.TensorProto.INT64, onnx.TensorProto.UINT64)
    named = (*typed.graph.input, *typed.graph.value_info, *typed.graph.output)
    long = {value.name for value in named if value.type.tensor_type.elem_type in longs}
    constants = {tensor.name for tensor in typed.graph.initializer}
    given = long.intersection(value.name for value in typed.graph.input) - constants
    readers = defaultdict[str, list[tuple["onnx.NodeProto", int]]](list)
    products = list["onnx.NodeProto"]()
    for node in typed.graph.node:
        for at, name in enumerate(node.input):
            readers[name].append((node, at))
        if node.op_type not in _COUNTS and given.intersection(model_file.list_reads(node)):
            given.update(long.intersection(node.output))
            products += [node] if node.op_type in _GROWING and long.intersection(node.output) else []
    ends = {value.name for value in typed.graph.output}

    @functools.cache
    def is_index(name: str) -> bool:
        return name not in ends and all(
            at in _INDICES.get(node.op_type, ()) or carries(node) for node, at in readers[name]
        )

    def carries(node: "onnx.NodeProto") -> bool:
        return node.op_type in _CARRYING and all(map(is_index, node.output))

    return tuple(node.name or node.output[0] for node in products if not all(map(is_index, node.output)))
