"""Feeds that do not fit a model, and what is said where nothing but its fixed batch size is in the way."""

import numpy as np
import pytest

from enginesmith.pipeline.errors import SignatureError
from enginesmith.pipeline.frameworks.samples import check_feeds
from enginesmith.pipeline.tensors import Signature, TensorSpec


def takes(*inputs: str) -> Signature:
    return Signature(inputs=tuple(map(TensorSpec.parse, inputs)), outputs=())


def test_what_fits_passes() -> None:
    check_feeds(takes("x:float32:2,4", "scale:float32:"), {"x": np.ones((2, 4), np.float32), "scale": np.float32(1)})


@pytest.mark.parametrize("inputs", [("x:float32:2,4",), ("x:float32:2,4", "ids:float32:2")])
def test_a_fixed_batch_is_named(inputs: tuple[str, ...]) -> None:
    feeds = {"x": np.ones((1, 4), np.float32), "ids": np.ones(1, np.float32)}
    with pytest.raises(SignatureError, match="its batch size is fixed at 2, and 1 was asked for") as caught:
        check_feeds(takes(*inputs), {name: feeds[name] for name in ("x", "ids")[: len(inputs)]})
    assert "--batch 2" in caught.value.remedy


@pytest.mark.parametrize(
    ("spec", "shape", "dtype"),
    [
        ("x:float32:batch,5", (1, 4), "float32"),
        ("x:float32:2,5", (1, 4), "float32"),
        ("x:float32:2,4", (1, 4), "int64"),
    ],
)
def test_anything_else_is_said_as_it_is(spec: str, shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(SignatureError, match=f"expected {spec}"):
        check_feeds(takes(spec), {"x": np.ones(shape, dtype)})
