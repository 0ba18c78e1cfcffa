"""Which values of a float graph calibration looks at, and how closely."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginesmith.pipeline.precision.groups import CONVOLUTIONS, PRODUCTS

if TYPE_CHECKING:
    import onnx_ir as ir

_AROUND = frozenset(
    ("Add", "Sub", "Mul", "Div", "Concat", "Split", "Slice", "Gather", "Pad", "Resize", "Expand", "Tile", "Where")
    + ("Relu", "LeakyRelu", "PRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Gelu", "Tanh", "Softmax", "Mish")
    + ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "ReduceMean")
    + ("LayerNormalization", "RMSNormalization", "BatchNormalization", "InstanceNormalization", "GroupNormalization")
)
"""Operators whose inputs and outputs engines read and write in few bits where they stand next to a product."""
_SAME_NUMBERS = frozenset(("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"))


@dataclass(frozen=True)
class Watched:
    """Names of values of the main graph; values within the bodies of If, Loop and Scan are not among them."""

    values: tuple[str, ...]
    """Every float value, in the order in which they are computed: what has to be run with."""
    histograms: frozenset[str]
    """Those that int8 may have to represent."""
    channels: Mapping[str, int]
    """Channel axis of what is multiplied by a constant weight; −1 is the last one."""
    products: frozenset[str]
    """What is read or made by a product: these have to be finite."""
    same: Mapping[str, str]
    """Value → another one with the same numbers in another shape, which stands for it in the sets above, but for
    ``channels``.
    """

    @property
    def taps(self) -> tuple[str, ...]:
        """The values that are worth reading out."""
        return tuple(name for name in self.values if name not in self.same or name in self.channels)


def watched(model: "ir.Model") -> Watched:
    """The values of a graph that calibration looks at; types that it does not say are inferred, in place."""
    _infer_types(model)
    graph = model.graph
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    computed = (value for node in graph for value in node.outputs)
    floats = {value.name: value for value in (*inputs, *computed) if value.name and _may_be_float(value)}
    same: dict[str, str] = {}
    histograms: set[str] = set()
    products: set[str] = set()
    channels: dict[str, int] = {}
    for node in graph:
        if node.domain not in ("", "ai.onnx"):
            continue
        near = [value.name for value in (*node.inputs, *node.outputs) if value is not None and value.name in floats]
        names = [same.get(name, name) for name in near if name]
        if node.op_type in _SAME_NUMBERS and len(names) == 2:
            same[names[1]] = names[0]
        if node.op_type in _AROUND or node.op_type in PRODUCTS:
            histograms.update(names)
        if node.op_type in PRODUCTS:
            products.update(names)
            axis, read = _channel_axis(node), node.inputs[0]
            if axis is not None and read is not None and read.name in floats:
                channels.setdefault(str(read.name), axis)
    return Watched(tuple(map(str, floats)), frozenset(histograms), channels, frozenset(products), same)


def _channel_axis(node: "ir.Node") -> int | None:
    """The axis of a product's first input that meets its constant weight; None where that is no plain axis."""
    if len(node.inputs) < 2 or node.inputs[1] is None or not _is_constant(node.inputs[1]):
        return None
    if node.op_type in CONVOLUTIONS:
        return 1
    return -1 if not node.attributes.get_int("transA", 0) else None


def _is_constant(value: "ir.Value") -> bool:
    producer = value.producer()
    return value.is_initializer() if producer is None else producer.op_type == "Constant"


def _may_be_float(value: "ir.Value") -> bool:
    """Whether it is a float as numpy knows them, as far as the graph says."""
    import onnx_ir as ir

    if _is_constant(value) or (value.type is not None and not isinstance(value.type, ir.TensorType)):
        return False
    return value.dtype in (None, ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)


def _infer_types(model: "ir.Model") -> None:
    from onnx_ir.passes import common

    if any(value.type is None for node in model.graph for value in node.outputs):
        common.ShapeInferencePass()(model)
