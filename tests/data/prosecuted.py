"""Signatures and inputs of engines that are prosecuted, and the search for an input on which one is wrong."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from enginesmith.pipeline.measure.prosecution.inputs import InputSpace, generate
from enginesmith.pipeline.measure.prosecution.search import Disagreement, InputSearch, Subject
from enginesmith.pipeline.tensors import Array, Feeds, ShapeRange, Signature, TensorSpec

Function = Callable[[Feeds], dict[str, Array]]
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


def double(feeds: Feeds) -> dict[str, Array]:
    return {"y": 2 * feeds["x"]}


def search(
    engine: Function, precision: str = "fp32", model: Function | None = None, **more: Any
) -> Disagreement | None:
    search = InputSearch(Subject(SPACE, precision, engine, model or double, **more), seed=0)
    for attempt in itertools.islice(generate(SPACE, 0), 150):
        search.attempts += 1
        if found := search.examine(attempt):
            return search.shrink(found)
    return None


def no_movement() -> dict[str, float]:
    return {}
