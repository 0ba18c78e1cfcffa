"""Which feeds a model is run on, and at which sizes."""

from pathlib import Path

import numpy as np
import pytest

from enginesmith.calibration.dataset import Dataset
from enginesmith.pipeline.errors import SignatureError, UsageError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.samples import Case, Samples, check_feeds, plan_cases, plan_ranges
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
    with pytest.raises(UsageError, match=r"'batch'.*are none\n"):
        plan_ranges(FIXED, {"batch": ShapeRange(min=1, opt=1, max=1)}, (1,), {})
    with pytest.raises(UsageError, match="--batch 8 is outside of --shape batch=1:2:4"):
        plan_ranges(IMAGE, {"batch": ShapeRange(min=1, opt=2, max=4)}, (1, 8), {})


def test_cases_are_the_points_and_the_batches_each_once() -> None:
    ranges = {"batch": ShapeRange(min=1, opt=4, max=8), "length": ShapeRange(min=2, opt=5, max=5)}
    found = {
        tuple(case.sizes.values()): (case.batch, case.points, case.measured)
        for case in plan_cases(TEXT, ranges, (4, 8))
    }
    assert found == {
        (1, 2): (1, ("min",), False),
        (4, 5): (4, ("opt",), True),
        (8, 5): (8, ("max",), True),
    }


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


def test_without_data_feeds_look_like_the_example() -> None:
    example = {"x": np.full((2, 3), 7, np.float32)}
    assert samples.feeds_for(Case(sizes={}, batch=2), FIXED, example, None, 0)["x"].tolist() == example["x"].tolist()
    made = samples.feeds_for(Case(sizes={"batch": 6}, batch=6), IMAGE, example, None, 0)["x"]
    assert made.shape == (6, 3)
    assert made.dtype == np.float32
    other = samples.feeds_for(
        Case(sizes={"batch": 6}, batch=6), IMAGE, {"x": np.ones((2, 3), np.float32) * [1, 2, 3]}, None, 1
    )
    assert other["x"].std() > 0


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
