"""Feeds that a model is run on, their sizes, and how many of them are judged."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from enginesmith.calibration.dataset import Dataset
from enginesmith.pipeline.errors import DataError, SignatureError, UsageError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.samples import BETWEEN, Case, Samples, check_feeds, plan_cases, plan_ranges
from enginesmith.pipeline.measure.prosecution.inputs import InputSpace, generate
from enginesmith.pipeline.tasks import verify
from enginesmith.pipeline.tensors import ShapeRange, Signature, TensorSpec


def signature(*inputs: str) -> Signature:
    return Signature(inputs=tuple(TensorSpec.parse(text) for text in inputs), outputs=())


IMAGE = signature("x:float32:batch,3")
TEXT = signature("ids:int64:batch,length", "mask:int64:batch,length")
FIXED = signature("x:float32:2,3")


@pytest.mark.parametrize(
    ("given", "symbol", "fixed"),
    [
        (IMAGE, "batch", 1),
        (signature("x:float32:length,batch"), "batch", 1),
        (signature("a:int8:n,2", "b:int8:n"), "n", 1),
        (signature("a:int8:n,2", "b:int8:m"), None, 1),
        (signature("a:int8:4,n", "b:int8:4"), None, 4),
        (signature("a:int8:4", "b:int8:5"), None, 1),
        (signature("a:int8:"), None, 1),
        (signature("a:int8:n,2", "rate:int64:"), "n", 1),
        (signature("a:int8:n+1,n", "b:int8:n+1"), None, 1),
        (signature("a:int8:2,3", "rate:int64:"), None, 2),
    ],
)
def test_the_batch_dimension(given: Signature, symbol: str | None, fixed: int) -> None:
    assert samples.batch_symbol(given) == symbol
    if symbol is None:
        assert samples.fixed_batch(given) == fixed


def test_ranges_come_from_the_batches_and_the_example() -> None:
    found = plan_ranges(TEXT, {}, (4, 2, 16), {"batch": 3, "length": 9})
    assert {name: str(value) for name, value in found.items()} == {"batch": "2:4:16", "length": "4:9:9"}


def test_a_given_range_stands() -> None:
    given = {"length": ShapeRange(min=2, opt=3, max=4), "batch": ShapeRange(min=1, opt=2, max=32)}
    assert plan_ranges(TEXT, given, (8,), {}) == {"batch": given["batch"], "length": given["length"]}


def test_ranges_that_do_not_go_with_the_model() -> None:
    with pytest.raises(UsageError, match=r"'width'.*are batch\n"):
        plan_ranges(IMAGE, {"width": ShapeRange(min=1, opt=1, max=1)}, (1,), {})
    for of_file in (False, True):  # which --input does not change
        with pytest.raises(UsageError, match=r"'batch'.*are none\n") as error:
            plan_ranges(FIXED, {"batch": ShapeRange(min=1, opt=1, max=1)}, (1,), {}, named_by_file=of_file)
        assert ("--input" in error.value.remedy) != of_file
    with pytest.raises(UsageError, match="--batch 8 is outside of --shape batch=1:2:4"):
        plan_ranges(IMAGE, {"batch": ShapeRange(min=1, opt=2, max=4)}, (1, 8), {})
    with pytest.raises(UsageError, match="--shape batch=0:1:4 has batches without samples"):
        plan_ranges(IMAGE, {"batch": ShapeRange(min=0, opt=1, max=4)}, (1,), {})


@pytest.mark.parametrize(
    ("range_", "given", "batches"),
    [("1:1:1", False, (1,)), ("2:4:6", False, (4,)), ("1:4:8", False, (1, 8)), ("1:1:1", True, (1, 8))],
)
def test_default_batches_outside_of_their_range_are_left_out(
    range_: str, given: bool, batches: tuple[int, ...]
) -> None:
    model, ranges = signature("x:float32:n,3,length"), {"n": ShapeRange.parse(range_), "length": ShapeRange.parse("9")}
    assert samples.fit_batches(model, ranges, (1, 8), given=given) == batches
    assert samples.fit_batches(model, {"length": ranges["length"]}, (1, 8), given=given) == (1, 8)


def test_cases_are_the_points_and_the_batches_each_once() -> None:
    ranges = {"batch": ShapeRange(min=1, opt=4, max=8), "length": ShapeRange(min=2, opt=5, max=5)}
    found = {
        tuple(case.sizes.values()): (case.batch, case.points, case.measured)
        for case in plan_cases(TEXT, ranges, (4, 8))
    }
    between = {(2, 5): (2, (BETWEEN,), False)}
    ends = {(1, 2): (1, ("min",), False), (4, 5): (4, ("opt",), True), (8, 5): (8, ("max",), True)}
    assert found == ends | between
    third = [case for case in plan_cases(TEXT, ranges, (1, 3, 8)) if case.sizes == {"batch": 3, "length": 5}]
    assert third == [Case(sizes={"batch": 3, "length": 5}, batch=3, points=("measured",), measured=True)]


@pytest.mark.parametrize(("batches", "between"), [((1,), []), ((1, 2), []), ((1, 8), [2]), ((4, 5, 8), [6])])
def test_a_batch_size_between_the_measured_ones_is_compared_too(batches: tuple[int, ...], between: list[int]) -> None:
    ranges = {
        "batch": ShapeRange(min=min(batches), opt=batches[0], max=max(batches)),
        "length": ShapeRange(min=5, opt=5, max=5),
    }
    cases = plan_cases(TEXT, ranges, batches)
    assert [case.batch for case in cases if case.points == (BETWEEN,)] == between
    assert [case.points == (BETWEEN,) for case in cases][: len(batches)] == [False] * len(batches)


def test_the_batch_that_was_named_first_comes_first() -> None:
    ranges = {"batch": ShapeRange(min=1, opt=4, max=16), "length": ShapeRange(min=2, opt=5, max=5)}
    cases = plan_cases(TEXT, ranges, (8, 1, 4))
    assert [(case.batch, case.measured) for case in cases] == [
        (8, True), (1, True), (4, True), (1, False), (16, False), (2, False)
    ]  # fmt: skip


def test_a_fixed_model_has_one_case() -> None:
    assert plan_cases(FIXED, {}, (1, 8)) == (Case(sizes={}, batch=2, points=("min", "opt", "max"), measured=True),)


def test_feeds_are_rows_of_the_data_cut_to_the_sizes() -> None:
    rows = np.arange(12).reshape(3, 4)
    data = Dataset("d", {"ids": rows, "mask": rows * 0})
    case = Case(sizes={"batch": 5, "length": 2}, batch=5)
    found = samples.feeds_for(case, TEXT, {}, data, 0)
    assert found["ids"].tolist() == [[0, 1], [4, 5], [8, 9], [0, 1], [4, 5]]
    longer = samples.feeds_for(Case(sizes={"batch": 1, "length": 6}, batch=1), TEXT, {}, data, 0)
    assert longer["ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
    assert longer["ids"].flags.c_contiguous


def test_data_are_not_fed_where_the_batch_is_another_dimension() -> None:
    """An example is the state of a recurrent layer, [layers, batch, ...]: its layers would be cut or repeated."""
    state = TensorSpec(name="state", dtype="float32", shape=(2, "n", 3))
    given = Signature(inputs=(TensorSpec.parse("x:float32:batch,3"), state), outputs=())
    data = Dataset("d", {"x": np.ones((5, 3), np.float32), "state": np.ones((5, 2, 3), np.float32)})
    case = Case(sizes={"batch": 1, "n": 1}, batch=1)
    with pytest.raises(DataError, match=r"'state' of the data has the shape \[1, 2, 3\].*, not state:float32:2,n,3"):
        samples.feeds_for(case, given, {}, data, 0)


def test_arrays_of_another_rank_than_declared_stay_whole() -> None:
    spec = TensorSpec.parse("y:float32:batch,3")
    arrays = {"y": np.ones((4, 3), np.float32)}
    assert samples.take_last(arrays, [spec], "batch")["y"].shape == (1, 3)
    assert samples.take_last({"y": np.ones(0, np.float32)}, [spec], "batch")["y"].shape == (0,)


def test_without_data_feeds_look_like_the_example() -> None:
    example = {"x": np.full((2, 3), 7, np.float32)}
    assert samples.feeds_for(Case(sizes={}, batch=2), FIXED, example, None, 0)["x"].tolist() == example["x"].tolist()
    made = samples.feeds_for(Case(sizes={"batch": 6}, batch=6), IMAGE, example, None, 0)["x"]
    assert (made.shape, made.dtype) == ((6, 3), np.float32)
    other = samples.feeds_for(
        Case(sizes={"batch": 6}, batch=6), IMAGE, {"x": np.ones((2, 3), np.float32) * [1, 2, 3]}, None, 1
    )
    assert other["x"].std() > 0


def test_sets_of_feeds_are_drawn_apart_and_each_in_the_same_way_again() -> None:
    """With one seed for all, a decoding step would be verified on the same token at every batch size."""
    decoder, example = signature("x:float32:batch,n", "ids:int64:batch,1"), {"ids": np.array([[48], [72]])}
    example["x"] = np.eye(2, 6, dtype=np.float32)

    def draw(batch: int, length: int = 6) -> dict[str, np.ndarray]:
        case = Case(sizes={"batch": batch, "n": length}, batch=batch)
        return samples.feeds_for(case, decoder, example, None, 0)

    drawn = [draw(batch) for batch in (1, 2, 4, 8)]
    assert {*np.concatenate([feeds["ids"] for feeds in drawn]).flat} == {48, 72}
    assert len({feeds["x"][0].tobytes() for feeds in [*drawn, draw(1, 7)]}) == 5
    assert all((feeds["x"] == draw(len(feeds["x"]))["x"]).all() for feeds in drawn)
    of_table = decoder.model_copy(update={"tables": {"ids": 20}})
    many = samples.feeds_for(Case(sizes={"batch": 300, "n": 6}, batch=300), of_table, example, None, 0)["ids"]
    assert many.dtype == np.int64
    assert (many.min(), many.max()) == (0, 19)


def test_inputs_of_size_0_are_fed_empty() -> None:
    """Such as an empty past; inputs beside the samples keep it as it is."""
    past = TensorSpec(name="past", dtype="float32", shape=("batch", 0, 4))
    given = Signature(inputs=(TensorSpec.parse("x:float32:batch,3"), past), outputs=())
    example = {"x": np.eye(8, 3, dtype=np.float32), "past": np.ones((8, 0, 4), np.float32)}
    feeds = samples.feeds_for(Case(sizes={"batch": 2}, batch=2), given, example, None, 0)
    check_feeds(given, feeds)
    space = InputSpace(given, {"batch": ShapeRange.parse("1:2:3")}, [feeds])
    assert (space.masks, space.kept) == ((), ("past",))
    assert {attempt.feeds["past"].size for attempt in itertools.islice(generate(space, 0), 200)} == {0}


@pytest.mark.parametrize(
    ("given", "answer", "refused"),
    [((0, 3), ("n", 3), True), (("batch", 3), ("batch", 0), True), (("batch", 0), ("batch", 3), False)],
)
def test_sizes_of_0_that_leave_nothing_to_compute_are_refused(
    given: tuple[int | str, ...], answer: tuple[int | str, ...], refused: bool
) -> None:
    ends = [(TensorSpec(name=name, dtype="float32", shape=shape),) for name, shape in (("x", given), ("y", answer))]
    made = Signature(inputs=ends[0], outputs=ends[1])
    if refused:
        with pytest.raises(SignatureError, match="nothing to compute with the sizes of 0 in"):
            verify._check_ends(made)
    else:
        verify._check_ends(made)


def test_inputs_without_a_batch_are_fed_whole() -> None:
    given = signature("x:float32:batch,3", "rate:int64:", "table:float32:n,2")
    example = {"x": np.ones((2, 3), np.float32), "rate": np.int64(16), "table": np.ones((5, 2), np.float32)}
    case = Case(sizes={"batch": 4, "n": 6}, batch=4)
    own = Dataset(
        "own", {"x": np.ones((9, 3), np.float32)}, shared={"rate": example["rate"], "table": example["table"]}
    )
    for data in (None, own):
        feeds = samples.feeds_for(case, given, example, data, 0)
        check_feeds(given, feeds)
        assert feeds["table"].shape == (6, 2)
        assert feeds["rate"] == 16


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    written = Samples(data="d", ranges={"batch": ShapeRange.parse("1:2:3")}, cases=(Case(sizes={"batch": 2}, batch=2),))
    samples.write(tmp_path, written)
    samples.write_arrays(tmp_path, "feeds", 0, {"x": np.arange(4.0)})
    assert samples.read(tmp_path) == written
    assert samples.read_arrays(tmp_path, "feeds", 0)["x"].tolist() == [0, 1, 2, 3]


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


@pytest.mark.parametrize(("rows", "batch", "calls"), [(20, 1, 8), (5, 1, 5), (20, 3, 3), (2, 8, 1), (None, 1, 1)])
def test_eight_samples_of_given_data_are_judged(rows: int | None, batch: int, calls: int) -> None:
    data = None if rows is None else Dataset("d", {"x": np.zeros((rows, 3), np.float32)})
    case = Case(sizes={"batch": batch}, batch=batch, points=("min",), measured=True)
    assert samples.plan_calls(case, data).calls == calls


def test_feeds_of_other_sizes_have_sums_of_them() -> None:
    decoder = signature("ids:int64:batch,length", "mask:int64:batch,past+length", "past:float32:batch,past")
    example = {
        "ids": np.zeros((2, 3), np.int64),
        "mask": np.ones((2, 8), np.int64),
        "past": np.ones((2, 5), np.float32),
    }
    for past, length in ((0, 1), (7, 2)):
        case = Case(sizes={"batch": 3, "length": length, "past": past}, batch=3)
        feeds = samples.feeds_for(case, decoder, example, None, 0)
        assert [value.shape for value in feeds.values()] == [(3, length), (3, past + length), (3, past)]
