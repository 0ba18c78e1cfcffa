"""Constants in float16 and bfloat16: each is converted when it is written, so that no second copy is in memory."""

from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir


def largest(dtype: "ir.DataType") -> float:
    """The largest number that is not infinite."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype.numpy()).max)  # type: ignore[no-untyped-call]


def smallest(dtype: "ir.DataType") -> float:
    """The smallest number with all its bits."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype.numpy()).smallest_normal)  # type: ignore[no-untyped-call]


def converted(source: "ir.TensorProtocol", dtype: "ir.DataType", name: str, *, mask: bool = False) -> "ir.LazyTensor":
    """A constant of float32 in another float type; what is beyond its range is brought to its end, infinities are kept.

    A mask goes to half of the range, infinities too: scores are added to it, and the sum must not become NaN.
    """
    import onnx_ir as ir

    def make() -> "ir.TensorProtocol":
        return ir.tensor(narrowed(source.numpy(), dtype, mask=mask), name=name)

    return ir.LazyTensor(make, dtype, ir.Shape(source.shape.numpy()), name=name)


def narrowed(array: Array, dtype: "ir.DataType", *, mask: bool = False) -> Array:
    """The numbers in another float type, rounded to nearest."""
    limit = largest(dtype) / 2 if mask else largest(dtype)
    if array.size and not (array.min() >= -limit and array.max() <= limit):
        cut = np.clip(array, -limit, limit)
        array = cut if mask else np.where(np.isfinite(array), cut, array)
    return array.astype(dtype.numpy())
