"""What float16 can hold: numbers up to 65504, and none that is smaller than 6.1e-5 with all its bits."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.precision.half.types import Slots, is_float

if TYPE_CHECKING:
    import onnx_ir as ir

LARGEST = float(np.finfo(np.float16).max)
MARGIN = 2.0
"""What was seen may be exceeded by other data: float16 has to hold this many times as much."""
MASKS = {"Attention": (3,)}
"""Inputs that are added to scores: numbers beyond the range mean "not this one", and so do the lowest within it."""
_SMALLEST = float(np.finfo(np.float16).tiny)
_BOUNDS = {"Clip": (1, 2), "Pad": (2,)}
"""Inputs that say the same when they are brought to the end of the range."""
_SCALES = {"QuantizeLinear": (1,), "DequantizeLinear": (1,)}
_SUMS = ("Add", "Sub", "Sum")
_BIASES = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2, "GRU": 3, "LSTM": 3, "RNN": 3}
_MOVE = frozenset(
    {
        *("Concat", "DequantizeLinear", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Pad"),
        *("QuantizeLinear", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where"),
    }
)


class Range:
    """Goes through a graph in its order, and knows which values are too large: seen to be, or made by constants."""

    def __init__(self, inputs: "Iterable[ir.Value]", largest: Mapping[str, float]) -> None:
        self._largest = largest
        self._beyond: dict[ir.Value, float] = {}
        self._reaches: dict[ir.TensorProtocol, float] = {}
        for value in inputs:
            self._note(value)

    def complaint(self, node: "ir.Node", found: Slots) -> str:
        """Why the node cannot be in float16; empty if it can."""
        spared = (*MASKS.get(node.op_type, ()), *_BOUNDS.get(node.op_type, ()))
        for index, value in enumerate(node.inputs):
            if value in self._beyond and index not in spared:
                return _too_large(value.name, self._beyond[value])
        for index, name, tensor in _constants(node, found):
            reach = self._reach(tensor)
            if reach > LARGEST and index not in spared:
                return _too_large(name, reach)
            if 0 < reach < _SMALLEST and not _may_vanish(node, index, tensor):
                return f"the constant {name!r} is at most {reach:.3g}, and all but vanishes in float16"
        for value in node.outputs:
            reach = self._largest.get(value.name or "", 0.0)
            if reach > LARGEST / MARGIN and is_float(value):
                return _too_large(value.name, reach)
        return ""

    def follow(self, node: "ir.Node", found: Slots) -> None:
        """Note which outputs are too large: by what was seen, else because a constant or what is moved is."""
        moved = [self._beyond[value] for value in node.inputs if value in self._beyond and node.op_type in _MOVE]
        reaches = (
            [] if node.op_type in (*_BOUNDS, "Div") else [self._reach(one) for _, _, one in _constants(node, found)]
        )
        guess = max((*moved, *(reach for reach in reaches if reach > LARGEST)), default=0.0)
        for value in node.outputs:
            self._note(value, guess)

    def _note(self, value: "ir.Value", guess: float = 0.0) -> None:
        reach = self._largest.get(value.name or "", guess) if is_float(value) else guess
        if reach > LARGEST / MARGIN:
            self._beyond[value] = reach

    def _reach(self, tensor: "ir.TensorProtocol") -> float:
        if tensor not in self._reaches:
            self._reaches[tensor] = _finite_reach(tensor)
        return self._reaches[tensor]


def _too_large(name: str | None, reach: float) -> str:
    return f"{name!r} reaches {reach:.3g}, and float16 ends at {LARGEST:.0f}"


def _constants(node: "ir.Node", found: Slots) -> "Iterator[tuple[int, str, ir.TensorProtocol]]":
    """Those that would change their type: position, name, content."""
    import onnx_ir as ir

    for index in sorted(found.inputs):
        value = node.inputs[index]
        if value is not None and value.const_value is not None:
            yield index, value.name or "", value.const_value
    fill = node.attributes.get("value")
    if node.op_type == "ConstantOfShape" and fill is not None and fill.as_tensor().dtype == ir.DataType.FLOAT:
        yield -1, f"{node.name}'s fill", fill.as_tensor()


def _may_vanish(node: "ir.Node", index: int, tensor: "ir.TensorProtocol") -> bool:
    """Whether nothing is lost with it: scales are raised, and small biases are noise; a lone ε guards a division."""
    if index in _SCALES.get(node.op_type, ()):
        return True
    added = node.op_type in _SUMS or index >= _BIASES.get(node.op_type, len(node.inputs))
    return added and tensor.size > 1


def _finite_reach(tensor: "ir.TensorProtocol") -> float:
    """Largest finite magnitude of a constant; 0 if it is empty."""
    array = tensor.numpy()
    if not array.size:
        return 0.0
    least, most = float(array.min()), float(array.max())
    if not np.isfinite((least, most)).all():
        return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
    return max(-least, most)
