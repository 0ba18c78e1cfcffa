"""From the range of a value to the grid that it is rounded to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from enginesmith.calibration.ranges import Method, Ranges, TensorRange

if TYPE_CHECKING:
    import onnx_ir as ir

Number = Literal["int8", "fp8"]
Rest = Literal["fp32", "fp16"]
"""What the scales are stored in: the type of what is not quantised."""
LARGEST: Mapping[Number, float] = {"int8": 127.0, "fp8": 448.0}
"""Largest magnitude of a symmetric int8, and of E4M3 (Micikevicius et al.: FP8 Formats for Deep Learning, 2022)."""
_UNSIGNED_STEPS = 255.0
_SAME_NUMBERS = frozenset(("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"))
_TINY: Mapping[Rest, float] = {
    "fp32": float(np.finfo(np.float32).tiny),
    "fp16": float(np.finfo(np.float16).tiny),
}


@dataclass(frozen=True)
class Grid:
    """What a value is rounded to: ``scale`` times whole numbers, or times numbers of E4M3."""

    scale: float
    zero_point: int
    dtype: Literal["int8", "uint8", "fp8"]


class Scales:
    """Grids of the values of one graph, from one method of calibration."""

    def __init__(self, ranges: Ranges, number: Number, method: Method, rest: Rest, *, symmetric: bool) -> None:
        self._ranges = ranges.tensors
        self._number: Number = number
        self._method: Method = "minmax" if number == "fp8" else method
        self._rest: Rest = rest
        self._symmetric = symmetric

    def problem(self, value: "ir.Value") -> str:
        """Why a value has no grid, as the end of a sentence that starts with what it is; empty where it has one."""
        found = self._range(value)
        if found is None or found.amax is None:
            return f"{value.name!r} has no range"
        if not found.finite:
            return f"{value.name!r} is not finite on the calibration data"
        if found.minimum == found.maximum or not found.amax[self._method] > 0:
            return f"{value.name!r} never varies on the calibration data"
        return ""

    def grid(self, values: "Iterable[ir.Value]") -> Grid:
        """The grid that these values share, none of which has a problem."""
        limits = [self._limits(value) for value in values]
        low, high = min(low for low, _ in limits), max(high for _, high in limits)
        if self._symmetric:
            scale = representable(max(-low, high) / LARGEST[self._number], self._rest)
            return Grid(scale, 0, self._number)
        scale = representable((high - low) / _UNSIGNED_STEPS, self._rest)
        return Grid(scale, int(np.clip(np.rint(-low / scale), 0, _UNSIGNED_STEPS)), "uint8")

    def _limits(self, value: "ir.Value") -> tuple[float, float]:
        """The least and the greatest number that is represented exactly enough; 0 lies between them."""
        found = self._range(value)
        assert found is not None, value
        assert found.amax is not None, value
        amax = found.amax[self._method]
        if self._symmetric:
            return -amax, amax
        return min(max(found.minimum, -amax), 0.0), max(min(found.maximum, amax), 0.0)

    def _range(self, value: "ir.Value | None") -> TensorRange | None:
        """A value's range, or that of what it is another shape of."""
        while value is not None:
            found = self._ranges.get(str(value.name))
            producer = value.producer()
            if found is not None or producer is None or producer.op_type not in _SAME_NUMBERS:
                return found
            value = producer.inputs[0]
        return None


def representable(scale: float, rest: Rest) -> float:
    """The scale as the graph holds it: in its floating-point type, never subnormal.

    A scale that cannot be told from 0 would make infinities of what is divided by it, and TensorRT refuses 0.
    """
    scale = max(scale, _TINY[rest])
    return float(np.float16(scale)) if rest == "fp16" else float(np.float32(scale))
