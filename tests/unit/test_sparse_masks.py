"""Patterns of zeros in arrays, and what can be asked for."""

from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.passes.sparsify import sparsify
from enginesmith.pipeline.passes.sparsify.options import SparsifyOptions, Sparsity
from enginesmith.pipeline.passes.sparsify.sparsify import Sparsify


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize(("shape", "axis"), [((6, 8), 1), ((8, 6), 0), ((5, 12, 3, 3), 1), ((2, 8, 3), -2)])
def test_two_of_four_keeps_the_two_largest_along_the_axis(shape: tuple[int, ...], axis: int) -> None:
    weight = normal(*shape)
    kept = sparsify.two_of_four(weight, axis)
    fours = np.moveaxis(weight, axis, -1).reshape(-1, 4)
    for four, stays in zip(fours, np.moveaxis(kept, axis, -1).reshape(-1, 4), strict=True):
        assert set(np.flatnonzero(stays)) == set(np.argsort(-np.abs(four))[:2])
    assert sparsify.holds(kept, axis)
    assert not sparsify.holds(weight != 0, axis)


def test_of_equal_magnitudes_the_first_stay() -> None:
    assert sparsify.two_of_four(np.array([[1, -1, 1, 1], [0, 0, 0, 0]], np.float32), 1).tolist() == [[1, 1, 0, 0]] * 2


def test_a_length_that_is_no_multiple_of_four_is_no_pattern() -> None:
    assert not sparsify.holds(np.zeros((2, 6), bool), 1)
    assert sparsify.holds(np.zeros((2, 8), bool), 1)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.77])
def test_a_threshold_makes_exactly_the_share_zero(ratio: float) -> None:
    arrays = [normal(40, 30), np.round(normal(20, 10, 3, seed=1), 1)]  # the second one with many that are equal
    bound = sparsify.threshold([lambda one=one: one for one in arrays], ratio)  # type: ignore[misc]
    gone = []
    for one in arrays:
        kept, bound = bound.mask(one)
        gone.append(~kept & (one != 0))
    everything = np.sort(np.abs(np.concatenate([one.reshape(-1) for one in arrays])))
    count = int(ratio * len(everything))
    zeros = sum(int((one | (given == 0)).sum()) for one, given in zip(gone, arrays, strict=True))
    assert zeros == max(count, int((everything == 0).sum()))
    largest = max(
        (float(np.abs(given[one]).max(initial=0)) for one, given in zip(gone, arrays, strict=True)), default=0
    )
    assert largest <= (everything[count] if count else 0)


@pytest.mark.parametrize(
    ("text", "pattern", "ratio", "slug"),
    [
        ("2:4", "2:4", 0.5, "sparse24"),
        ("unstructured=0.7", "unstructured", 0.7, "sparse70"),
        (" Unstructured=0.125", "unstructured", 0.125, "sparse12_5"),
    ],
)
def test_what_can_be_asked_for(text: str, pattern: str, ratio: float, slug: str) -> None:
    found = Sparsify.parse(text, SparsifyOptions(protect=("head",)), 5)
    assert (found.pattern, found.ratio, found.slug, found.protect) == (pattern, ratio, slug, ("head",))
    assert found.external_data_bytes == 5
    assert str(Sparsity.parse(text)) == text.strip().lower()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1:4", "cannot read the sparsity '1:4'"),
        ("2:4=0.5", "cannot read"),
        ("unstructured", "cannot read"),
        ("unstructured=1", "not at least 0 and less than 1"),
        ("unstructured=-0.1", "not at least 0"),
        ("unstructured=nan", "not at least 0"),
        ("unstructured=half", "'half' is no number"),
    ],
)
def test_what_cannot_be_asked_for(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=r"2:4, or unstructured=0\.5") as caught:
        Sparsity.parse(text)
    assert words in caught.value.message
