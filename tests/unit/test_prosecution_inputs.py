"""Inputs that are tried on engines: allowed ones, of all families, the same for the same seed."""

import itertools

import numpy as np
import pytest

from enginesmith.pipeline.measure.prosecution.inputs import InputSpace, generate, list_sizes
from enginesmith.pipeline.tensors import ShapeRange, Signature, TensorSpec
from prosecuted import SIGNATURE, SPACE, TOKENS, spec

RNG = np.random.default_rng(0)


def test_the_same_seed_gives_the_same_inputs() -> None:
    first, again, other = (list(itertools.islice(generate(SPACE, seed), 60)) for seed in (1, 1, 2))
    assert [each.note for each in first] == [each.note for each in again]
    assert all(np.array_equal(a.feeds["x"], b.feeds["x"]) for a, b in zip(first, again, strict=True))
    assert any(
        not np.array_equal(a.feeds["x"], b.feeds["x"])
        for a, b in zip(first[10:], other[10:], strict=False)
        if a.feeds["x"].shape == b.feeds["x"].shape
    )


@pytest.mark.parametrize("space", [SPACE, TOKENS])
def test_inputs_are_allowed(space: InputSpace) -> None:
    for attempt in itertools.islice(generate(space, 0), 300):
        space.signature.check(attempt.feeds)
        for name, value in attempt.feeds.items():
            if value.dtype.kind == "i":
                low, high = space.bounds[name]
                assert value.min() >= low
                assert value.max() <= high
        for name, range_ in space.ranges.items():
            size = next(
                attempt.feeds[each.name].shape[each.shape.index(name)]
                for each in space.signature.inputs
                if name in each.shape
            )
            assert range_.min <= size <= range_.max


def test_all_families_come_early_and_sizes_reach_both_ends() -> None:
    tried = list(itertools.islice(generate(TOKENS, 0), 80))
    assert {each.walk for each in tried} == {"samples", "sizes", "values", "padding", "mutations"}
    lengths = {each.feeds["ids"].shape[1] for each in tried if each.walk == "sizes"}
    assert {2, 33, 31, 32, 17} <= lengths
    tails = [each.feeds["mask"] for each in tried if each.walk == "padding"]
    empty = [not mask.any(axis=1).all() for mask in tails]
    assert sum(empty) == 1, "one input has a row of which nothing is there"
    (odd,) = [each for each in tried if each.walk == "padding" and not each.usual]
    assert odd.feeds["mask"].any(axis=1).tolist() == [False, True]
    assert len({tuple(mask.sum(axis=1)) for mask in tails}) > 2


def test_a_cache_may_be_empty() -> None:
    """The range of its length begins with 0, and so does one of the samples."""
    form = Signature(
        inputs=(spec("x", "float32", "batch", 6), spec("cache", "float32", "batch", "past", 2)),
        outputs=(spec("y", "float32", "batch", 6),),
    )
    given = [{**SPACE.samples[0], "cache": RNG.standard_normal((4, past, 2)).astype(np.float32)} for past in (0, 5, 8)]
    ranges = {"batch": ShapeRange.parse("1:4:9"), "past": ShapeRange.parse("0:5:8")}
    tried = [each.feeds["cache"] for each in itertools.islice(generate(InputSpace(form, ranges, given), 0), 200)]
    assert {0, 1, 5, 8} <= {cache.shape[1] for cache in tried}
    assert any(len(cache) == 9 and cache.shape[1] == 0 for cache in tried)


def test_a_search_of_a_few_inputs_has_some_of_each_family() -> None:
    space = InputSpace(TOKENS.signature, TOKENS.ranges, TOKENS.samples * 20)
    first = list(itertools.islice(generate(space, 0), 8))
    assert {each.walk for each in first} == {"samples", "sizes", "values", "padding", "mutations"}
    assert first[0].walk == "samples"
    assert first[1].note == "mask: nothing in the first row"


def test_zeros_in_all_floats_of_the_largest_batch_come_first_after_a_sample() -> None:
    """Zeros are silence, or a black picture; they may be outside of what samples have."""
    inputs = (spec("x", "float32", "batch", 6), spec("scale", "float32", 2), *TOKENS.signature.inputs[:1])
    mask = spec("mask", "float32", "batch", 6)
    feeds = {
        "x": RNG.uniform(1, 2, (2, 6)).astype(np.float32),
        "scale": np.array([3, 4], np.float32),
        "ids": TOKENS.samples[0]["ids"],
        "mask": np.ones((2, 6), np.float32),
    }
    form = Signature(inputs=(*inputs, mask), outputs=SIGNATURE.outputs)
    ranges = {**TOKENS.ranges, "batch": ShapeRange.parse("1:2:4")}
    sample, zeros = itertools.islice(generate(InputSpace(form, ranges, [feeds]), 0), 2)
    assert (sample.walk, zeros.walk, zeros.usual) == ("samples", "values", False)
    assert zeros.note == "batch 4, length 8, x, scale: all zeros"
    assert zeros.feeds["x"].shape == (4, 6)
    assert not zeros.feeds["x"].any()
    assert not zeros.feeds["scale"].any()
    assert zeros.feeds["mask"].all()
    assert zeros.feeds["ids"].min() >= 3
    fixed = InputSpace(Signature(inputs=inputs[1:2], outputs=SIGNATURE.outputs), {}, [{"scale": feeds["scale"]}])
    assert next(itertools.islice(generate(fixed, 0), 1, None)).note == "scale: all zeros"


def test_a_mask_of_what_is_padding_is_emptied_by_ones() -> None:
    padding = [{**feeds, "mask": feeds["mask"] == 0} for feeds in TOKENS.samples]
    signature = TOKENS.signature.model_copy(
        update={"inputs": (TOKENS.signature.inputs[0], spec("mask", "bool", "batch", "length"))}
    )
    tried = itertools.islice(generate(InputSpace(signature, TOKENS.ranges, padding), 0), 80)
    masks = {each.note: each.feeds["mask"] for each in tried if each.walk == "padding"}
    assert masks["mask: nothing in the first row"].all(axis=1).tolist() == [True, False]
    assert not masks["mask: all there"].any()
    assert masks["mask: one place each"].sum(axis=1).tolist() == [7, 7]


def test_an_empty_row_has_another_one_beside_it() -> None:
    ranges = {"batch": ShapeRange.parse("1:1:4"), "length": ShapeRange.parse("2:8:33")}
    tried = itertools.islice(generate(InputSpace(TOKENS.signature, ranges, TOKENS.samples), 0), 80)
    (odd,) = [each for each in tried if each.walk == "padding" and not each.usual]
    assert odd.feeds["mask"].any(axis=1).tolist() == [False, True]


def test_offsets_stay_in_order() -> None:
    bags = Signature(
        inputs=(spec("ids", "int64", "ids"), spec("offsets", "int64", "bags")),
        outputs=(spec("y", "float32", "bags", 2),),
    )
    ranges = {"ids": ShapeRange.parse("7:15:15"), "bags": ShapeRange.parse("1:3:3")}
    space = InputSpace(bags, ranges, [{"ids": RNG.integers(0, 50, 15), "offsets": np.array([0, 5, 10])}])
    tried = list(itertools.islice(generate(space, 0), 80))
    assert {each.walk for each in tried} == {"samples", "sizes", "values", "mutations"}
    assert {tuple(each.feeds["offsets"]) for each in tried} == {(0,), (0, 5), (0, 5, 10)}
    assert len({tuple(each.feeds["ids"]) for each in tried}) > 20


def test_sizes_are_ends_tiles_and_primes() -> None:
    assert list_sizes(ShapeRange.parse("1:8:64"))[:4] == [1, 64, 2, 63]
    assert {7, 15, 16, 17, 31, 33} <= set(list_sizes(ShapeRange.parse("1:8:64")))
    assert list_sizes(ShapeRange.parse("5:5:5")) == [5]


def test_a_single_number_beside_samples_is_changed_within_its_bounds() -> None:
    signature = Signature(inputs=(*SIGNATURE.inputs, TensorSpec.parse("rate:int64:")), outputs=SIGNATURE.outputs)
    own = {spec.name: np.ones(spec.resolve({"batch": 2}), spec.dtype) for spec in SIGNATURE.inputs}
    space = InputSpace(signature, {"batch": ShapeRange.parse("1:2:4")}, [{**own, "rate": np.asarray(16)}])
    rates = [attempt.feeds["rate"] for attempt in itertools.islice(generate(space, 0), 200)]
    assert {(type(rate), rate.item()) for rate in rates} == {(np.ndarray, 16)}
