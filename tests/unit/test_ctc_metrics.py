"""Texts of CTC: which class is the blank, by the metric's name or by the labels."""

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from enginesmith.calibration.dataset import Dataset
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.measure.metrics.table import find_own
from enginesmith.pipeline.measure.quality import Quality, check_metric, evaluate, parse_metric, settle_metric
from enginesmith.pipeline.tasks.quality import _complete_metric

Arrays = NDArray[Any]
CLASSES = 11
TEXTS = [[0, 1, 2, 9], [3, 4, 4], [5, 6], [7, 8, 9, 9, 0]]
"""Of all ten letters that there are beside a blank, in the order of their classes."""


def make_labels(blank: int, padding: int = -1) -> Arrays:
    letters = np.setdiff1d(np.arange(CLASSES), [blank])
    labels = np.full((len(TEXTS), 6), padding)
    for row, text in zip(labels, TEXTS, strict=True):
        row[: len(text)] = letters[text]
    return labels


def make_scores(texts: Arrays, blank: int, seed: int = 0) -> Arrays:
    """Scores whose best classes are each text with blanks between its letters, each of them once to three times."""
    generator, steps = np.random.default_rng(seed), np.full((len(texts), 72), blank)
    for row, text in zip(steps, texts, strict=True):
        path = [each for letter in text if letter >= 0 and letter != blank for each in (blank, letter)]
        path = [each for each in path for _ in range(generator.integers(1, 4))]
        row[: len(path)] = path
    return np.eye(CLASSES, dtype=np.float32)[steps] + generator.random((*steps.shape, CLASSES), np.float32) / 2


def read_greedily(scores: Arrays, blank: int) -> list[str]:
    """Decode as CTC's users do in plain Python: letters from A."""
    texts = []
    for row in scores.argmax(axis=-1):
        text, previous = "", None
        for best in row:
            text += chr(65 + best) if best not in (previous, blank) else ""
            previous = best
        texts.append(text)
    return texts


@pytest.mark.parametrize("padding", [-1, -100, "blank"])
@pytest.mark.parametrize("blank", [0, 4, 10])
def test_the_blank_is_the_only_class_that_no_text_has(blank: int, padding: int | str) -> None:
    labels = make_labels(blank, padding if isinstance(padding, int) else blank)
    output = {"y": make_scores(labels, blank)}
    for name in ("cer", "exact_match"):
        judged = evaluate(name, output, output, labels)
        assert judged.metric == f"{name}=blank:{blank}"
        assert judged.value == (name == "exact_match")
    assert evaluate(f"wer={labels[0, 1]}", output, output, labels).metric == f"wer={labels[0, 1]},blank:{blank}"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("blank", [0, 4, 10])
def test_errors_are_those_of_jiwer_on_texts_that_were_decoded_by_hand(blank: int, seed: int) -> None:
    import jiwer

    generator = np.random.default_rng(seed)
    letters = np.setdiff1d(np.arange(CLASSES), [blank])
    labels = generator.choice(letters, (40, 12))
    labels[np.arange(12) >= generator.integers(4, 13, 40)[:, None]] = -1
    answered = np.where(generator.random(labels.shape) < 0.2, generator.choice(letters, labels.shape), labels)
    output = {"y": make_scores(answered, blank, seed)}
    given = read_greedily(output["y"], blank)
    wanted = ["".join(chr(65 + letter) for letter in row if letter >= 0) for row in labels]
    right = np.mean([mine == theirs for mine, theirs in zip(given, wanted, strict=True)])
    assert evaluate("cer", output, output, labels).value == pytest.approx(jiwer.cer(wanted, given))
    assert evaluate("exact_match", output, output, labels).value == pytest.approx(right)
    space = int(letters[2])
    words = [[" ".join(text.replace(chr(65 + space), " ").split()) for text in side] for side in (wanted, given)]
    assert evaluate(f"wer={space}", output, output, labels).value == pytest.approx(jiwer.wer(*words))


def test_the_labels_of_the_whole_set_tell_the_blank_of_its_parts() -> None:
    labels = make_labels(10)
    data = Dataset("texts.npz", {"x": np.zeros((len(labels), 1), np.float32)}, labels)
    output = {"y": make_scores(labels, 10)[:1]}
    assert _complete_metric("cer", (), output, data.take(np.array([0]), "part")) == "cer=blank:10"
    broken = Dataset("texts.npz", data.arrays, np.where(labels == labels[2, 0], 0, labels))
    with pytest.raises(DataError, match="the labels do not tell it"):
        _complete_metric("cer", (), output, broken.take(np.array([0]), "part"))


def test_a_part_of_the_samples_is_judged_by_the_blank_of_all() -> None:
    labels = make_labels(10)
    output = {"y": make_scores(labels, 10)}
    settled = settle_metric("exact_match", output, labels)
    part = {"y": output["y"][:1]}
    assert evaluate(settled, part, part, labels[:1]).value == 1
    with pytest.raises(DataError, match="the labels do not tell it"):
        evaluate("exact_match", part, part, labels[:1])


@pytest.mark.parametrize(
    ("texts", "problem", "remedy"),
    [
        (
            [[1, 2, 3, -1]],
            r"3 of 11 classes, from 1 to 3, and any other may be the blank: 0, 4, 5, 6, 7 and 3 more",
            "blank:0 or .*:10,",
        ),
        ([[0, 1, 2, 2]], r"2 of 11 classes, from 0 to 1, .* blank: 2, 3,", "^name it: --metric cer=blank:10, say"),
        ([[0, 1, 2, 3, 5, 6, 7, 8, 10, -1]], r"9 of 11 classes, from 0 to 10, .*: 4, 9", "=blank:4, say"),
        ([[*range(11), -1]], "the labels have all 11 classes of the output as letters", "negative numbers behind"),
    ],
)
def test_labels_that_do_not_tell_the_blank_are_refused(texts: list[list[int]], problem: str, remedy: str) -> None:
    labels = np.array(texts)
    output = {"y": make_scores(labels, 10)}
    with pytest.raises(DataError, match=f"^cer needs .*{problem}") as error:
        evaluate("cer", output, output, labels)
    assert re.search(remedy, error.value.remedy)


def test_fixed_lengths_have_no_padding() -> None:
    """Zero is at the end of one text, and in another: it is a letter."""
    labels = np.array([[1, 2, 3, 0], [4, 0, 5, 1], [6, 7, 8, 9], [9, 8, 7, 6]])
    output = {"y": make_scores(labels, 10)}
    assert evaluate("exact_match", output, output, labels).metric == "exact_match=blank:10"


@pytest.mark.parametrize(
    ("name", "labels", "problem"),
    [
        ("cer=blank:0", [[1, 0, 2]], "the text of sample 0 has 0 as a letter, which is none with cer=blank:0"),
        ("cer=blank:10", [[1, 2, 3], [1, 10, -1]], "the text of sample 1 has 10 as a letter"),
        ("cer=blank:11", [[1, 2, 3]], "names class 11 as CTC's blank, and the output has the classes 0 to 10"),
        ("wer=3,blank:3", [[1, 2, 2]], "names one class as CTC's blank and as the letter between words"),
    ],
)
def test_a_blank_that_cannot_be_is_refused(name: str, labels: list[list[int]], problem: str) -> None:
    output = {"y": make_scores(np.array(labels), 10)}
    with pytest.raises(DataError, match=problem):
        evaluate(name, output, output, np.array(labels))


def test_best_classes_of_steps_are_decoded_where_a_blank_is_named() -> None:
    labels = make_labels(10)
    output = {"y": make_scores(labels, 10).argmax(axis=-1)}
    assert evaluate("exact_match=blank:10", output, output, labels).value == 1
    assert evaluate("cer=blank:10:y", output, output, labels).value == 0
    with pytest.raises(DataError, match="4 of 4 answers have 10, which no label has, between letters") as error:
        evaluate("exact_match", output, output, labels)
    assert "--metric exact_match=blank:10" in error.value.remedy


def test_texts_in_whole_numbers_have_no_letter_0() -> None:
    labels = np.array([[1, 2, 3, -1], [4, 5, 0, -1]])
    with pytest.raises(
        DataError, match="the text of sample 1 has 0 as a letter, which is none in whole numbers"
    ) as error:
        evaluate("cer", {"y": labels}, {"y": labels}, labels)
    assert "number the letters from 1" in error.value.remedy
    padded = labels[:1].clip(0)
    assert evaluate("cer", {"y": padded}, {"y": padded}, padded).value == 0


@pytest.mark.parametrize(
    ("text", "name", "output"),
    [
        ("cer=blank:10", "cer=blank:10", None),
        ("cer=blank:10:10", "cer=blank:10", "10"),
        ("cer:blank", "cer", "blank"),
        ("wer=27:text:0", "wer=27", "text:0"),
        ("wer=0,blank:27:text", "wer=0,blank:27", "text"),
    ],
)
def test_names_have_options_before_the_output(text: str, name: str, output: str | None) -> None:
    check_metric(text)
    assert parse_metric(text) == (name, output)
    assert find_own(name)


def test_a_title_has_the_blank_and_the_output() -> None:
    judged = Quality(
        metric="cer=blank:10", output="10", other_outputs=("y",), value=1.0, baseline=1.0, drop=0.0, samples=1
    )
    assert judged.title == "cer=blank:10 of '10'"


@pytest.mark.parametrize(
    "text", ["cer=10", "cer=blank", "cer=blank:", "cer=blank:x", "exact_match=27,blank:0", "wer=27,0"]
)
def test_options_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"the options of the metric .* cannot be read") as error:
        check_metric(text)
    assert re.search(rf"--metric {text.partition('=')[0]}=(27,)?blank:0", error.value.remedy)


def test_texts_of_characters_are_to_be_numbered() -> None:
    output = {"y": make_scores(make_labels(10), 10)}
    with pytest.raises(DataError, match="labels texts") as error:
        evaluate("cer", output, output, np.array(["abc", "de", "f", "g"]))
    assert "write each text as the numbers of its letters" in error.value.remedy


@pytest.mark.parametrize(
    ("name", "shape", "labels", "remedy"),
    [
        (
            "f1",
            (2, 16, 27),
            (9, 16),
            "^use --metric entity_f1, which these fit; or add --append argmax, with which f1 and",
        ),
        ("top1", (2, 16, 26), (9, 16), "^add --append argmax, with which f1 and miou judge the class of each step; or"),
        ("f1", (2, 16, 27), (9, 7), "^use --metric cer or exact_match, which these fit; or give"),
        ("f1", (2, 7500, 1), (9, 7500), "^use --metric mse, which these fit; or give"),
        ("cer", (2, 7500, 1), (9, 7500), "^use --metric mse, which these fit; or give"),
    ],
)
def test_ctc_is_not_suggested_for_a_class_of_each_step(
    name: str, shape: tuple[int, ...], labels: tuple[int, ...], remedy: str
) -> None:
    output = {"y": np.zeros(shape, np.float32)}
    with pytest.raises(DataError) as error:
        evaluate(name, output, output, np.full(labels, 2, np.int64))
    assert re.search(remedy, error.value.remedy)


def test_metrics_of_another_output_are_suggested_with_its_name() -> None:
    """The labels are longer than the first output has steps: they are no texts of it."""
    outputs = {"detection": np.zeros((2, 30, 3), np.float32), "mask": np.zeros((2, 7500, 1), np.float32)}
    for name in ("f1", "f1:mask"):
        with pytest.raises(DataError) as error:
            evaluate(name, outputs, outputs, np.full((9, 7500), 2, np.int64))
        assert error.value.remedy.startswith("use --metric mse:mask, which these fit; or give")
