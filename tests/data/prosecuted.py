"""Signatures and inputs of engines that are prosecuted."""

import numpy as np

from enginesmith.pipeline.measure.prosecution.inputs import InputSpace
from enginesmith.pipeline.tensors import ShapeRange, Signature, TensorSpec

RNG = np.random.default_rng(0)


def spec(name: str, dtype: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


SIGNATURE = Signature(inputs=(spec("x", "float32", "batch", 6),), outputs=(spec("y", "float32", "batch", 6),))
SPACE = InputSpace(
    SIGNATURE,
    {"batch": ShapeRange.parse("1:4:9")},
    [{"x": RNG.standard_normal((4, 6)).astype(np.float32)} for _ in range(2)],
)
TOKENS = InputSpace(
    Signature(
        inputs=(spec("ids", "int64", "batch", "length"), spec("mask", "int64", "batch", "length")),
        outputs=(spec("y", "float32", "batch", 2),),
    ),
    {"batch": ShapeRange.parse("1:2:4"), "length": ShapeRange.parse("2:8:33")},
    [{"ids": RNG.integers(3, 50, (2, 8)), "mask": np.array([[1] * 8, [1] * 5 + [0] * 3])}],
)
