"""Find whole numbers that OpenVINO may get wrong: it has 32 bits for them, and divides them as float32.

Inputs are checked when they are fed. In the graph it is products that make large numbers of small ones: of a hash, or
of seconds to nanoseconds. Quotients and remainders are exact up to 2^24 (OpenVINO 2026.4.1).
"""

import functools
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from enginesmith.pipeline.frameworks.onnx import model_file, traversal

if TYPE_CHECKING:
    import onnx

_GROWING = ("Mul", "Pow", "BitShift", "ReduceProd")
_DIVIDING = ("Div", "Mod")
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


class WholeNumbers(NamedTuple):
    """Names of nodes of the main graph that compute with the values of integer inputs."""

    products: tuple[str, ...] = ()
    """Those of int64, and not indices alone."""
    quotients: tuple[str, ...] = ()
    """And remainders."""


def find_whole_numbers(model: "onnx.ModelProto") -> WholeNumbers:
    """Find nodes whose whole numbers may be too large; what branches and loops compute within is not seen."""
    import onnx

    kinds, graph = onnx.TensorProto, onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)}
    long = {name for name, kind in types.items() if kind in (kinds.INT64, kinds.UINT64)}
    whole = long | {name for name, kind in types.items() if kind in (kinds.INT32, kinds.UINT32)}
    given = whole.intersection(value.name for value in graph.input) - {tensor.name for tensor in graph.initializer}
    readers = defaultdict[str, list[tuple["onnx.NodeProto", int]]](list)
    products, quotients = list["onnx.NodeProto"](), list["onnx.NodeProto"]()
    for node in graph.node:
        for at, name in enumerate(node.input):
            readers[name].append((node, at))
        results = whole.intersection(node.output)
        if results and node.op_type not in model_file.COUNTING and given.intersection(traversal.list_reads(node)):
            given.update(results)
            products += [node] if node.op_type in _GROWING and results & long else []
            quotients += [node] if node.op_type in _DIVIDING else []
    ends = {value.name for value in graph.output}

    @functools.cache
    def is_index(name: str) -> bool:
        return name not in ends and all(
            at in _INDICES.get(node.op_type, ()) or carries(node) for node, at in readers[name]
        )

    def carries(node: "onnx.NodeProto") -> bool:
        return node.op_type in _CARRYING and all(map(is_index, node.output))

    products = [node for node in products if not all(map(is_index, node.output))]
    return WholeNumbers(*(tuple(node.name or node.output[0] for node in nodes) for nodes in (products, quotients)))
