"""The script of bundles on the values of inputs and answers: which it takes, and what it says of the others."""

import re
import runpy
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.frameworks.fidelity import compare, thresholds_for
from enginesmith.pipeline.frameworks.row_sets import find_tables
from enginesmith.pipeline.tensors import Array, Signature, TensorSpec

_R = np.random.default_rng(0)
_LOGITS = _R.standard_normal((4, 10)).astype(np.float32)
_MASK = np.arange(10) > 6
_TABLE = np.concatenate([640 * _R.random((20, 4)), _R.random((20, 1)), np.arange(20)[:, None] % 4], 1).astype("f")


_GAPS = np.where(np.arange(20)[:, None] < 5, np.nan, _TABLE)
_AWAY = np.where(np.arange(20)[:, None] < 5, np.nan, 1000 + _R.random((20, 6))).astype("f")
"""Numbers whose range is small beside their distance from 0."""
_ENDS = np.where(_TABLE.max() == _TABLE, np.inf, _TABLE)
_EDGE = np.float32([[10, 20, 480, 480, 0.9, 1], [30, 50, 480, 480, 1.0, 1]])


def _wrong(table: Array, column: int, shift: float) -> Array:
    return table + shift * (np.arange(table.shape[1]) == column).astype("f")


@pytest.mark.parametrize(
    ("wanted", "value", "right"),
    [
        (_LOGITS, _LOGITS + 1e-3, True),
        (_LOGITS, _LOGITS[::-1], False),
        *(
            (np.where(_MASK, fill, _LOGITS), np.where(_MASK, fill, other), right)
            for fill in (-np.inf, np.nan, -1e9, np.finfo("f").min)
            for other, right in ((_LOGITS + np.float32(1e-3), True), (_LOGITS[::-1], False))
        ),
        (np.where(_MASK, -1e9, _LOGITS), _LOGITS, False),
        (np.where(_MASK, -np.inf, _LOGITS), _LOGITS, False),
        (np.full(3, np.nan), np.full(3, np.nan), True),
        (_TABLE, _TABLE[::-1], True),
        (_EDGE, _EDGE + np.float32([0.2, 0.1, -0.5, -0.5, 0.001, 0]), True),
        (_TABLE, _wrong(_TABLE, 4, 0.005), True),
        (_TABLE, _wrong(_TABLE, 4, 0.5), False),
        (_TABLE, _wrong(_TABLE, 5, 1), False),
        (_GAPS, _GAPS[::-1], True),
        (_GAPS, _TABLE, False),
        (_AWAY, _AWAY, True),
        (_AWAY, _AWAY + np.float32([0.3, 0, 0, 0, 0, 0]), False),
        (_GAPS, _wrong(_GAPS, 4, 0.5), False),
        (_ENDS, _ENDS[::-1], True),
    ],
)
def test_the_script_judges_as_the_run_does(wanted: Array, value: Array, right: bool) -> None:
    rows = wanted.shape[-1] == 6
    script = runpy.run_path(str(OnnxRuntime.infer_script()))["Model"]
    thresholds = thresholds_for("fp16")
    model = script.__new__(script)
    model.manifest = {"thresholds": thresholds.model_dump()}
    judged = model._alike(wanted, value) if rows else model._near(wanted, value, 0.0)
    image = TensorSpec(name="x", dtype="float32", shape=("batch", 3))
    found = TensorSpec(name="y", dtype="float32", shape=("n", 6))
    signature = Signature(inputs=(image,), outputs=(found,), unordered={"y": "rows"}) if rows else None
    assert bool(judged) == compare({"y": wanted}, {"y": value}, thresholds, signature).passed == right


@pytest.mark.parametrize(
    "shapes",
    [
        {"y": ("batch", 4)},
        {"y": ("batch",), "z": ("batch", 2)},
        {"y": ("n", 6), "z": ("n",)},
        {"y": ("n",)},
        {"y": ("batch", 3, 4)},
        {"y": (3, "batch", 4)},
        {"y": ("batch", 3), "z": ("batch", 3)},
        {"y": ("batch", "n")},
        {"y": ("length", "batch"), "z": ()},
    ],
)
def test_the_script_knows_rows_that_are_chosen_by_values_as_the_run_does(shapes: dict[str, tuple[Any, ...]]) -> None:
    x = TensorSpec(name="x", dtype="float32", shape=("batch", "length"))
    outputs = tuple(TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in shapes.items())
    signature = Signature(inputs=(x,), outputs=outputs, unordered=dict.fromkeys(shapes, "rows"))
    sizes = {"batch": 2, "length": 5, "n": 7}
    answers = {name: np.zeros([sizes.get(dim, dim) for dim in shape]) for name, shape in shapes.items()}
    script = runpy.run_path(str(OnnxRuntime.infer_script()))["Model"]
    model = script.__new__(script)
    model.manifest = {"signature": signature.model_dump(mode="json")}
    assert model._find_tables(answers) == {
        name for table in find_tables(signature, [answers]) for name in table.outputs
    }


@pytest.mark.parametrize(
    ("ids", "unsigned", "taken"),
    [
        *(([0, 3], [], True), ([-4], [], True), ([4], [], False), ([-5, 0], [], False)),
        *(([0, 3], ["ids"], True), ([2, -1], ["ids"], False)),
    ],
)
def test_the_script_refuses_indices_outside_of_a_table(ids: list[int], unsigned: list[str], taken: bool) -> None:
    script = runpy.run_path(str(OnnxRuntime.infer_script()))["Model"]
    model = script.__new__(script)
    inputs = [{"name": "ids", "dtype": "int64", "shape": ["batch"]}]
    model.manifest = {"signature": {"inputs": inputs, "tables": {"ids": 4}, "unsigned": unsigned}, "shapes": {}}
    model._run = lambda feeds: feeds
    if taken:
        assert model({"ids": np.array(ids, np.int64)})["ids"].tolist() == ids
    else:
        with pytest.raises(ValueError, match="its table has 4 rows, 0 to 3"):
            model({"ids": np.array(ids, np.int64)})


def test_the_script_refuses_sizes_of_0_and_those_that_the_engine_fails_at() -> None:
    """Such inputs raise ValueError, as others that do not fit, and no error of the engine's own."""
    script = runpy.run_path(str(OnnxRuntime.infer_script()))["Model"]
    model = script.__new__(script)
    inputs = [{"name": "ids", "dtype": "int64", "shape": ["batch", "length", "extra", 0]}]
    shapes = {"batch": {"min": 1, "max": 8}, "length": {"min": 16, "max": 32}, "extra": {"min": 0, "max": 4}}
    model.manifest, model.exceeded = {"signature": {"inputs": inputs}, "shapes": shapes}, set()

    def run(feeds: dict[str, Array]) -> dict[str, Array]:
        if feeds["ids"].shape[1] == 40:
            raise RuntimeError("Fail: indices element out of data bounds")
        if feeds["ids"].shape[1] == 20:
            raise RuntimeError("the GPU is gone")
        return feeds

    def call(*sizes: int) -> Any:
        return model({"ids": np.zeros((*sizes, 0), np.int64)})

    model._run = run
    assert call(1, 16, 0)["ids"].shape == (1, 16, 0, 0)
    option = ": optimize with --shape length=0:…"
    for sizes, word, advice in (((0, 16, 1), "batch", ""), ((2, 0, 1), "length", option)):
        with pytest.raises(ValueError, match=f"^{word} is 0 in ids, and engines do not compute with nothing{advice}$"):
            call(*sizes)
    told = "^length is 40, and the engine was verified for 16 to 32, and fails there: Fail: indices element out"
    for _ in range(2):
        with pytest.raises(ValueError, match=told):
            call(1, 40, 1)
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        call(1, 20, 1)
    with pytest.warns(UserWarning, match="length is 33, and the engine was verified for 16 to 32: nobody"):
        call(1, 33, 1)


@pytest.mark.parametrize(
    ("dtype", "given", "taken"),
    [
        ("uint8", [0, 255], True),
        ("uint8", [0, 256], False),
        ("int8", [-1], True),
        ("int32", [2**40], False),
        ("float16", [1.5], True),
        ("float32", [1, 2], True),
        ("uint8", [1.5], False),
        ("bool", [1], False),
        ("float32", [True], False),
        ("int64", [True], False),
        ("float32", np.float64([0.1]), True),
        ("float32", np.float64([np.inf, np.nan, 3e38]), True),
        ("float32", np.float64([np.inf, 1e300]), False),
        ("float32", [-1e39], False),
        ("float16", np.float32([7e4]), False),
        ("float16", [70_000], False),
        ("float32", np.float16([0.1]), True),
        ("float32", np.array([0.1], ">f4"), True),
        ("int64", np.int32([-1]), True),
        ("int32", np.int64([2**31 - 1]), True),
        ("int32", np.int64([2**31]), False),
        ("float32", np.uint8([255]), False),
        ("float32", [np.uint8([255])], False),
        ("float32", np.int64([1]), False),
        ("float32", np.array([True]), False),
        ("int64", np.array([True]), False),
        ("int64", np.float32([1]), False),
        ("float32", np.complex64([1]), False),
    ],
)
def test_the_script_converts_numbers_of_the_same_kind(dtype: str, given: Any, taken: bool) -> None:
    """Only lists, as in JSON, may have whole numbers for floats."""
    fit, shape = runpy.run_path(str(OnnxRuntime.infer_script()))["_fit"], [*np.shape(given)]
    if taken:
        found = fit(given, "x", dtype, shape)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.asarray(given, dtype))
    else:
        told = r"x (is \w+|has \S+|goes from \S+ to \S+); the model takes " + dtype
        with pytest.raises(ValueError, match=told):
            fit(given, "x", dtype, shape)


@pytest.mark.parametrize(
    ("given", "shape", "sizes"),
    [
        ([[]], ["batch", "past", 16], (1, 0, 16)),
        ([[[], []], [[], []]], ["batch", 2, "past", 8], (2, 2, 0, 8)),
        ([[], []], ["batch", "past", 4, 16], (2, 0, 4, 16)),
        ([[]], ["batch", "past"], (1, 0)),
        ([[]], ["batch", "past+length"], (1, 0)),
        ([], ["past", 8], (0, 8)),
        (np.zeros((1, 0, 16), bool).tolist(), ["batch", "past", 16], (1, 0, 16)),
        ([[]], ["batch", "past", "channels"], None),
        ([[]], ["batch", "past", 8, "channels"], None),
        ([], ["batch", "past", 16], None),
        ([[]], ["past"], None),
        (np.zeros((1, 0), np.float32), ["batch", "past", 16], None),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_the_script_takes_empty_lists_of_json(
    dtype: str, given: Any, shape: list[Any], sizes: tuple[int, ...] | None
) -> None:
    """A list does not say which sizes are within an empty one, nor of what kind its numbers are; an array does."""
    fit = runpy.run_path(str(OnnxRuntime.infer_script()))["_fit"]
    if sizes is None:
        given = given.astype(dtype) if isinstance(given, np.ndarray) else given
        with pytest.raises(ValueError, match=re.escape(f"x has the shape {[*np.shape(given)]}; the model takes")):
            fit(given, "x", dtype, shape)
    else:
        array = fit(given, "x", dtype, shape)
        assert (array.shape, array.dtype) == (sizes, dtype)


def test_the_script_checks_sums() -> None:
    script = runpy.run_path(str(OnnxRuntime.infer_script()))["Model"]
    model = script.__new__(script)
    dims = {"mask": ["past+length"], "ids": ["length"], "more": ["past+1"], "least": ["past+8"]}
    inputs = [{"name": name, "dtype": "int64", "shape": shape} for name, shape in dims.items()]
    shapes = {"length": {"min": 1, "max": 8}, "past": {"min": 0, "max": 4}}
    model.manifest, model.exceeded = {"signature": {"inputs": inputs}, "shapes": shapes}, set()
    model._run = lambda feeds: feeds

    def call(*sizes: int) -> Any:
        return model({name: np.zeros(size, np.int64) for name, size in zip(dims, sizes, strict=True)})

    assert call(3, 3, 1, 8).keys() == dims.keys()
    with pytest.warns(UserWarning, match="past is 5, and the engine was verified for 0 to 4"):
        call(8, 3, 6, 13)
    for sizes, words in (
        ((8, 3, 5, 13), r"^more has 5 for past\+1, and the other inputs 5\+1 = 6$"),
        ((2, 3, 5, 13), r"^mask has 2 for past\+length, and 3 or more is needed beside other inputs$"),
        ((2, 0, 3, 10), "^length is 0 in mask"),
    ):
        with pytest.raises(ValueError, match=words):
            call(*sizes)
