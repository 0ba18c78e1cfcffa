"""Patterns of zeros in arrays, what can be asked for, and orders of channels that keep more."""

import itertools
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.passes.sparsify import Sparsify
from enginesmith.pipeline.sparsity import masks
from enginesmith.pipeline.sparsity.options import SparsifyOptions, Sparsity
from enginesmith.pipeline.sparsity.permutation import search


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize(("shape", "axis"), [((6, 8), 1), ((8, 6), 0), ((5, 12, 3, 3), 1), ((2, 8, 3), -2)])
def test_two_of_four_keeps_the_two_largest_along_the_axis(shape: tuple[int, ...], axis: int) -> None:
    weight = normal(*shape)
    kept = masks.two_of_four(weight, axis)
    fours = np.moveaxis(weight, axis, -1).reshape(-1, 4)
    for four, stays in zip(fours, np.moveaxis(kept, axis, -1).reshape(-1, 4), strict=True):
        assert set(np.flatnonzero(stays)) == set(np.argsort(-np.abs(four))[:2])
    assert masks.holds(kept, axis)
    assert not masks.holds(weight != 0, axis)


def test_of_equal_magnitudes_the_first_stay() -> None:
    assert masks.two_of_four(np.array([[1, -1, 1, 1], [0, 0, 0, 0]], np.float32), 1).tolist() == [[1, 1, 0, 0]] * 2


def test_a_length_that_is_no_multiple_of_four_is_no_pattern() -> None:
    assert not masks.holds(np.zeros((2, 6), bool), 1)
    assert masks.holds(np.zeros((2, 8), bool), 1)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.77])
def test_a_threshold_makes_exactly_the_share_zero(ratio: float) -> None:
    arrays = [normal(40, 30), np.round(normal(20, 10, 3, seed=1), 1)]  # the second one with many that are equal
    bound = masks.threshold([lambda one=one: one for one in arrays], ratio)  # type: ignore[misc]
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


def kept(magnitudes: Any, order: Any) -> float:
    return float(np.sort(magnitudes[:, order].reshape(-1, 4), axis=1)[:, 2:].sum())


def test_the_search_spreads_large_channels_over_groups() -> None:
    magnitudes = np.abs(normal(50, 16))
    magnitudes[:, :8] *= 100  # the best order has two of these in each group of four
    found = search(magnitudes)
    assert sorted(found.order) == list(range(16))
    assert [int((found.order[start : start + 4] < 8).sum()) for start in range(0, 16, 4)] == [2, 2, 2, 2]
    assert found.after == pytest.approx(kept(magnitudes, found.order), rel=1e-5)
    assert found.before == pytest.approx(kept(magnitudes, np.arange(16)), rel=1e-5)
    assert found.after > 1.3 * found.before


def test_the_search_is_near_the_best_of_all_orders() -> None:
    magnitudes = np.abs(normal(20, 8)) * np.array([9, 8, 7, 6, 1, 1, 2, 3], np.float32)
    splits = (rest for rest in itertools.combinations(range(1, 8), 3))
    best = max(kept(magnitudes, [0, *one, *sorted(set(range(1, 8)) - set(one))]) for one in splits)
    assert search(magnitudes).after >= 0.99 * best


def test_the_search_gives_the_same_order_each_time_and_none_that_is_worse() -> None:
    magnitudes = np.abs(normal(30, 520))  # more channels than are tried at once
    first, second = search(magnitudes), search(magnitudes)
    assert np.array_equal(first.order, second.order)
    assert first.after > first.before
    flat = search(np.ones((10, 16), np.float32))
    assert (flat.after, flat.order.tolist()) == (flat.before, list(range(16)))


def test_an_order_that_only_suits_the_rows_that_were_looked_at_is_not_taken() -> None:
    magnitudes = np.ones((4096, 8), np.float32)  # of which every second row is looked at
    magnitudes[::2, :4] = 2  # and asks for an order
    magnitudes[1::2] = 9 * masks.two_of_four(normal(2048, 8), 1)  # while the others are 2:4 as they are
    found = search(magnitudes)
    assert (found.order.tolist(), found.after) == (list(range(8)), found.before)
    assert search(magnitudes[::2]).after > search(magnitudes[::2]).before
