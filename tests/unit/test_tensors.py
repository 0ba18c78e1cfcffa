"""Names, dtypes and shapes: what is read from text, and what is held against what."""

import numpy as np
import pytest

from enginesmith.pipeline.errors import ShapeError, SignatureError, UsageError
from enginesmith.pipeline.tensors import (
    ShapeRange,
    Signature,
    TensorSpec,
    list_unbound,
    read_sizes,
    rows_first,
    total_bytes,
)
from enginesmith.pipeline.units import (
    format_bytes,
    format_metric,
    format_seconds,
    format_share,
    group_values,
    parse_bytes,
    parse_seconds,
)

TEXT = (TensorSpec.parse("ids:int64:batch,length"), TensorSpec.parse("mask:int64:batch,length"))
SIGNATURE = Signature(inputs=TEXT, outputs=(TensorSpec.parse("logits:float32:batch,2"),))


@pytest.mark.parametrize("text", ["x:float32:batch,3,224,224", "scale:float16:", "module.name:int8:4"])
def test_a_spec_is_written_as_it_is_read(text: str) -> None:
    assert str(TensorSpec.parse(text)) == text


def test_a_spec_knows_numbers_from_words() -> None:
    spec = TensorSpec.parse("x:float32: batch ,3,h,h")
    assert (spec.shape, spec.symbols) == (("batch", 3, "h", "h"), ("batch", "h", "h"))
    assert spec.resolve({"batch": 2, "h": 7, "w": 1}) == (2, 3, 7, 7)
    with pytest.raises(SignatureError, match=r"'h'.*no size.*\n.*--shape h="):
        spec.resolve({"batch": 2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "name:dtype:batch"),
        ("x:float32", "name:dtype:batch"),
        (":float32:3", "name:dtype:batch"),
        ("a b:float32:3", "name:dtype:batch"),
        ("x:bfloat16:3", "dtype 'bfloat16'.*\n.*give it in float32, and cast it to bfloat16 inside"),
        ("x:float12:3", "dtype 'float12'.*\n.*use one of [^:]*$"),
        ("x:float32:0", "dimension '0'"),
        ("x:float32:3.5", "dimension '3.5'"),
        ("x:float32:2batch", "dimension '2batch'"),
        ("x:float32:past+", r"dimension 'past\+'.*\n.*a sum of these, such as past\+length"),
        ("x:float32:past+0", r"dimension 'past\+0'"),
        ("x:float32:past-1", "dimension 'past-1'"),
    ],
)
def test_a_spec_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TensorSpec.parse(text)


def test_a_range_is_three_numbers_or_one() -> None:
    found = ShapeRange.parse("1:8:64")
    assert [found.at(point) for point in ("min", "opt", "max")] == [1, 8, 64]  # type: ignore[arg-type]
    assert str(found) == "1:8:64"
    assert str(ShapeRange.parse("4")) == "4:4:4"


@pytest.mark.parametrize("text", ["", "1:8", "1:a:3", "-1:2:3", "8:4:9", "1:9:8", "2:1:3", "1:2:3:4"])
def test_a_range_that_makes_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="shape range"):
        ShapeRange.parse(text)


def test_a_range_may_begin_with_0_and_is_not_all_of_that() -> None:
    assert ShapeRange.parse("0:5:40").min == 0
    with pytest.raises(UsageError, match="usual size in the shape range '0:0:40' is 0") as error:
        ShapeRange.parse("0:0:40")
    assert error.value.remedy.startswith("give 1 or more")


def test_symbols_of_a_signature_come_once_and_in_order() -> None:
    assert SIGNATURE.symbols == ("batch", "length")


def feeds(**changes: np.ndarray) -> dict[str, np.ndarray]:
    return {"ids": np.zeros((2, 5), np.int64), "mask": np.zeros((2, 5), np.int64), **changes}


def test_feeds_that_fit() -> None:
    SIGNATURE.check(feeds())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ids": np.zeros((2, 5), np.int64)}, "inputs are ids, mask, and ids was given"),
        ({}, "nothing was given"),
        (feeds(more=np.zeros(2)), "ids, mask, more"),
        (feeds(ids=np.zeros((2, 5), np.int32)), r"'ids' is int32\[2, 5\], expected ids:int64:batch,length"),
        (feeds(ids=np.zeros(2, np.int64)), r"'ids' is int64\[2\]"),
        (feeds(mask=np.zeros((2, 6), np.int64)), r"'mask' is int64\[2, 6\], expected .* with length = 5"),
    ],
)
def test_feeds_that_do_not_fit(given: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(SignatureError, match=message):
        SIGNATURE.check(given)


def test_a_fixed_size_is_held() -> None:
    signature = Signature(inputs=(TensorSpec.parse("x:float32:batch,4"),), outputs=())
    with pytest.raises(SignatureError, match=r"float32\[1, 3\], expected x:float32:batch,4$|give it as"):
        signature.check({"x": np.zeros((1, 3), np.float32)})


def test_bytes_of_all_tensors() -> None:
    specs = (*TEXT, TensorSpec.parse("flag:bool:batch"))
    assert total_bytes(specs, {"batch": 2, "length": 5}) == 2 * 10 * 8 + 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("256MiB", 256 << 20), ("2GB", 2 * 10**9), (" 1.5 KiB ", 1536), ("3kb", 3000), ("7 B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5ms", 0.005), ("250us", 0.00025), ("10s", 10), ("2.5", 2.5), ("30m", 1800), ("2min", 120), ("1h", 3600)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1,5GiB", "1e9", "5 6"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the size"):
        parse_bytes(text)
    with pytest.raises(UsageError, match="cannot read the duration"):
        parse_seconds(text)


def test_unknown_units_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown unit 'XiB'"):
        parse_bytes("3XiB")
    with pytest.raises(UsageError, match="unknown unit 'MS'"):  # milliseconds or megaseconds?
        parse_seconds("3MS")


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (300 << 20, "300 MiB"), (5 << 40, "5120 GiB")],
)
def test_sizes_for_people(size: float | None, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "+0.1000"),
        (-0.0028, "−0.0028"),
        (0.00002, "+0.000020"),
        (-0.00042, "−0.00042"),
        (1e-6, "+0.0000010"),
        (4.218e-16, "+4.2e-16"),
        (-9.82e-18, "−9.8e-18"),
        (-0.0, "+0.0000"),
    ],
)
def test_drops_for_people(value: float, text: str) -> None:
    assert format_metric(value, "+") == text
    assert format_metric(value) == text.removeprefix("+")
    assert format_metric(-1e-17, "+", least=1e-16) == "+0.0000"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0031, "0.31 %"),
        (0.5, "50 %"),
        (1, "100 %"),
        (2.6, "260 %"),
        (41.23, "4100 %"),
        (0.0, "0 %"),
        (np.inf, "inf %"),
    ],
)
def test_format_share(share: float, text: str) -> None:
    assert format_share(share) == text


def test_percentages_of_three_digits_have_no_exponent() -> None:
    assert format_share(12.345, 3) == "1230 %"


@pytest.mark.parametrize(("seconds", "text"), [(0.31, "0.3 s"), (12.4, "12 s"), (185, "3 m 05 s")])
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_samples_come_first_wherever_the_batch_is() -> None:
    specs = [TensorSpec.parse(text) for text in ("y:float32:3,batch,2", "z:float32:batch,4", "w:float32:5")]
    assert [spec.as_row.shape for spec in specs] == [("batch", 3, 2), ("batch", 4), (5,)]
    values = {
        spec.name: np.arange(np.prod(size)).reshape(size) for spec in specs if (size := spec.resolve({"batch": 7}))
    }
    moved = rows_first(values, specs)
    assert moved["y"].tolist() == np.swapaxes(values["y"], 0, 1).tolist()
    assert moved["z"] is values["z"]
    assert TensorSpec.parse("s:float32:").as_row.shape == ()


def read_specs(*texts: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec.parse(text) for text in texts)


DECODER = Signature(
    inputs=read_specs("mask:int64:batch,past+length", *(f"{x}:float32:batch,{x}" for x in ("past", "length"))),
    outputs=(),
)


def test_sums_are_written_in_one_way() -> None:
    spec = TensorSpec.parse("x:float32: 2 + past +length+1,2+3")
    assert (str(spec), spec.symbols) == ("x:float32:past+length+3,5", ("past", "length"))
    assert spec.resolve({"past": 5, "length": 1}) == (9, 5)
    with pytest.raises(SignatureError, match=r"'length'.*no size"):
        spec.resolve({"past": 5})


@pytest.mark.parametrize(
    ("mask", "past", "length", "words"),
    [
        (8, 5, 3, ""),
        (3, 0, 3, ""),
        (7, 5, 3, r"'mask' is int64\[2, 7\], expected mask:int64:batch,past\+length with past\+length = 5\+3 = 8\n"),
    ],
)
def test_sums_are_checked_with_the_sizes_of_their_words(mask: int, past: int, length: int, words: str) -> None:
    shapes = {"mask": (2, mask), "past": (2, past), "length": (2, length)}
    feeds = {name: np.zeros(shape, np.int64 if name == "mask" else np.float32) for name, shape in shapes.items()}
    if words:
        with pytest.raises(ShapeError, match=words):
            DECODER.check(feeds)
    else:
        DECODER.check(feeds)
        assert read_sizes(DECODER.inputs, feeds) == {"batch": 2, "past": past, "length": length}


def test_a_word_with_two_sizes_is_named_rather_than_a_sum_of_it() -> None:
    more = Signature(inputs=(*DECODER.inputs, TensorSpec.parse("values:float32:past")), outputs=())
    feeds = {"mask": np.zeros((2, 8), np.int64), "past": np.zeros((2, 4), np.float32)}
    with pytest.raises(ShapeError, match=r"'values' is .* with past = 4, as before"):
        more.check({**feeds, "length": np.zeros((2, 3), np.float32), "values": np.zeros(5, np.float32)})


@pytest.mark.parametrize(
    ("mask", "both", "words"),
    [
        (8, 9, ""),
        (8, 8, r"'both' is .* with past\+length\+1 = 5\+3\+1 = 9\n"),
        (2, 3, r"'mask' is .* with past\+length of 3 or more, as length = 3\n"),
    ],
)
def test_a_word_that_stands_in_sums_alone_gets_its_size_of_one(mask: int, both: int, words: str) -> None:
    texts = ("mask:float32:past+length", "both:float32:past+length+1", "ids:float32:length")
    signature = Signature(inputs=read_specs(*texts), outputs=())
    feeds = {"mask": np.zeros(mask, np.float32), "both": np.zeros(both, np.float32), "ids": np.zeros(3, np.float32)}
    if words:
        with pytest.raises(ShapeError, match=words):
            signature.check(feeds)
    else:
        signature.check(feeds)
        assert read_sizes(signature.inputs, feeds) == {"length": 3, "past": 5}


def test_a_word_alone_tells_its_size_wherever_it_stands() -> None:
    signature = Signature(inputs=read_specs("mask:float32:past+1", "past:float32:past"), outputs=())
    with pytest.raises(ShapeError, match=r"'mask' is .* with past\+1 = 5\+1 = 6\n"):
        signature.check({"mask": np.zeros(7, np.float32), "past": np.zeros(5, np.float32)})


def test_words_that_no_feed_tells_the_size_of() -> None:
    assert list_unbound(read_specs("x:float32:batch,a+b", "y:float32:c+d", "z:float32:c")) == ["a", "b"]


def test_values_of_one_key_are_together_in_their_order() -> None:
    groups = group_values([("b", 1), ("a", 2), ("b", 0)])
    assert list(groups.items()) == [("b", [1, 0]), ("a", [2])]
