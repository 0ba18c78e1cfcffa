"""Task metrics: by hand, against the libraries that people trust, and what they refuse."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from enginesmith.pipeline.errors import DataError, MissingCapability
from enginesmith.pipeline.measure.metrics import own_metric
from enginesmith.pipeline.measure.metrics.table import METRICS, find_own
from enginesmith.pipeline.measure.quality import Quality, evaluate, explain_few_samples, settle_metric

Arrays = NDArray[Any]
CASES = range(20)


def compute(name: str, output: Arrays, labels: Arrays) -> float:
    own = find_own(settle_metric(name, {"y": output}, labels))
    assert own
    assert own.accepts(output, labels)
    return float(np.mean(own.compute(output, labels)))


def make_maps(seed: int) -> tuple[Arrays, Arrays]:
    """Scores of five classes, of which the last is never asked for; a row of places does not count."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, (3, 6, 6))
    labels[:, 0] = 255
    return generator.standard_normal((3, 5, 6, 6)).astype(np.float32), labels


@pytest.mark.parametrize("seed", CASES)
def test_overlap_and_f1_are_those_of_torchmetrics(seed: int) -> None:
    import torch
    from torchmetrics.functional.classification import multiclass_f1_score, multiclass_jaccard_index

    output, labels = make_maps(seed)
    pair = torch.from_numpy(output).argmax(1), torch.from_numpy(labels)
    for name, theirs in (("miou", multiclass_jaccard_index), ("f1", multiclass_f1_score)):
        expected = float(theirs(*pair, num_classes=5, ignore_index=255, average="macro"))
        assert compute(name, output, labels) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["miou", "f1"])
@pytest.mark.parametrize("classes", [1, 5])
def test_scores_of_smaller_pictures_are_enlarged_as_in_transformers(name: str, classes: int) -> None:
    """By post_process_semantic_segmentation: bilinearly, and the greatest is taken then."""
    import torch

    generator = np.random.default_rng(0)
    scores = generator.standard_normal((3, classes, 4, 6)).astype(np.float32)
    for factor in (2, 3, 4):
        sizes = 4 * factor, 6 * factor
        labels = generator.integers(0, max(2, classes), (3, *sizes))
        labels[:, 0] = 255
        full = torch.nn.functional.interpolate(torch.from_numpy(scores), sizes, mode="bilinear", align_corners=False)
        expected = compute(name, full.numpy(), labels)
        for wanted in (labels, labels[:, None]):
            assert compute(name, scores, wanted) == expected
        nearest = compute(name, scores.repeat(factor, 2).repeat(factor, 3), labels)
        assert nearest != expected


@pytest.mark.parametrize("name", ["miou", "f1"])
@pytest.mark.parametrize(
    ("output", "sizes", "words"),
    [
        (np.zeros((3, 5, 4, 6), np.float32), (9, 12), "scores at a whole fraction of"),
        (np.zeros((3, 5, 4, 6), np.float32), (8, 18), "scores at a whole fraction of"),
        (np.zeros((3, 5, 4, 6), np.float32), (2, 3), "scores at a whole fraction of"),
        (np.zeros((3, 4, 6), np.int64), (8, 12), "classes themselves at"),
    ],
)
def test_maps_of_other_sizes_are_refused_with_both(
    name: str, output: Arrays, sizes: tuple[int, int], words: str
) -> None:
    labels = f"the size of the labels, which are of {sizes[0]} × {sizes[1]}, and the output is of 4 × 6"
    with pytest.raises(DataError, match=rf"^{name} needs {words} {labels} \('y'\)") as error:
        evaluate(name, {"y": output}, {"y": output}, np.ones((3, *sizes), np.int64))
    assert "masks of the output's size or, for scores, of twice" in error.value.remedy


@pytest.mark.parametrize("name", ["miou", "f1"])
def test_many_classes_take_no_more_than_their_numbers(name: str) -> None:
    """Not every pair of classes is counted for each sample: that would be 23 GB here."""
    generator = np.random.default_rng(0)
    labels, changed = generator.integers(256, 1200, 2000), np.arange(2000) % 10 == 0
    answers = np.where(changed, generator.integers(0, 1200, 2000), labels)
    own = find_own(name)
    assert own
    assert own.judge(answers, labels).nbytes < 10e6
    judged = evaluate(name, {"y": answers}, {"y": labels}, labels)
    assert judged.baseline == 1
    right = np.bincount(labels[answers == labels], minlength=1200)
    both = np.bincount(labels, minlength=1200) + np.bincount(answers, minlength=1200)
    per_class = 2 * right / both.clip(1) if name == "f1" else right / (both - right).clip(1)
    assert judged.value == pytest.approx(per_class[both > 0].mean())
    assert judged.drop_low is not None
    assert judged.drop_high is not None
    assert 0.05 < judged.drop_low < judged.drop < judged.drop_high < 0.3


@pytest.mark.parametrize("name", ["miou", "f1"])
def test_classes_themselves_are_judged_as_their_scores(name: str) -> None:
    """The network ends with argmax; pixels with the label 255 do not count."""
    output, labels = make_maps(0)
    labels.reshape(-1)[:5] = 255
    answers = output.argmax(1)
    for given in (answers, answers[:, None], answers.astype(np.uint8)):
        assert compute(name, given, labels) == compute(name, output, labels)
    with pytest.raises(DataError, match=f"^{name} needs "):
        evaluate(name, {"y": answers[:, 1:]}, {"y": answers[:, 1:]}, labels)
    with pytest.raises(DataError, match=f"^{name} needs "):  # every pair of classes is counted
        evaluate(name, {"y": answers + 70_000}, {"y": answers + 70_000}, labels)


@pytest.mark.parametrize("name", ["miou", "f1"])
def test_what_is_there_is_above_one_half_of_probabilities_and_above_0_of_others(name: str) -> None:
    generator = np.random.default_rng(0)
    logits, labels = generator.standard_normal((3, 1, 6, 6)), generator.integers(0, 2, (3, 6, 6))
    expected = compute(name, (logits[:, 0] > 0).astype(np.int64), labels)
    shares = 1 / (1 + np.exp(-logits))
    for given in (logits, shares, shares.astype(np.float16), np.where(shares > 0.9, 1.004, shares), logits * 0.1):
        assert compute(name, given, labels) == expected


@pytest.mark.parametrize("name", ["miou", "f1"])
def test_masks_as_bool_are_classes(name: str) -> None:
    generator = np.random.default_rng(0)
    answers, labels = generator.random((3, 6, 6)) > 0.5, generator.random((3, 6, 6)) > 0.5
    expected = compute(name, answers.astype(np.int64), labels.astype(np.int64))
    for given in (answers, answers[:, None]):
        assert compute(name, given, labels) == compute(name, given, labels[:, None]) == expected


@pytest.mark.parametrize("seed", CASES)
def test_classes_of_samples_are_judged_as_by_scikit_learn(seed: int) -> None:
    """The classifier returns the class itself; the labels of some samples do not count."""
    sklearn = pytest.importorskip("sklearn.metrics")
    generator, kinds = np.random.default_rng(seed), 2 + seed % 3
    answers, labels = generator.integers(0, kinds, (2, 40))
    expected = {
        "f1": sklearn.f1_score(labels, answers, average="macro"),
        "miou": sklearn.jaccard_score(labels, answers, average="macro"),
    }
    more, ignored = np.append(answers, [0, 1]), np.append(labels, [-100, 255])
    types = [np.int64, np.int32, np.uint8, *([np.bool_] if kinds == 2 else [])]
    for name, value in expected.items():
        for given in (answers.astype(dtype) for dtype in types):
            for wanted in (labels, labels[:, None], labels.astype(given.dtype), labels.astype(np.float32)):
                assert compute(name, given, wanted) == pytest.approx(value, abs=1e-9)
                assert compute(name, given[:, None], wanted) == pytest.approx(value, abs=1e-9)
        assert compute(name, more, ignored) == pytest.approx(value, abs=1e-9)
        scores = np.eye(kinds)[answers]
        assert evaluate(name, {"y": answers}, {"y": scores}, labels).drop == 0


@pytest.mark.parametrize("seed", CASES)
def test_ranks_are_those_of_scikit_learn_and_scipy(seed: int) -> None:
    sklearn, scipy = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(seed)
    scores, truth = generator.standard_normal(40).round(1), np.arange(40) % 2
    assert compute("auroc", scores, truth) == pytest.approx(sklearn.roc_auc_score(truth, scores), abs=1e-6)
    classes = generator.permutation(np.arange(60) % 4)
    for scale in (1, 900):  # in float32, most probabilities of the second are 0 or 1
        logits = scale * generator.standard_normal((60, 4))
        others = np.stack([np.logaddexp.reduce(np.delete(logits, kind, 1), axis=1) for kind in range(4)], axis=1)
        expected = np.mean([sklearn.roc_auc_score(classes == kind, (logits - others)[:, kind]) for kind in range(4)])
        assert compute("auroc", logits, classes) == pytest.approx(expected, abs=1e-6)
        shares = 1 / (1 + np.exp(others - logits)) if scale == 1 else logits
        assert compute("auroc", shares, classes) == pytest.approx(expected, abs=1e-6)
    numbers = scores + generator.standard_normal(40).round(1)
    expected = scipy.spearmanr(scores, numbers).statistic
    assert compute("spearman", scores.astype(np.float64), numbers) == pytest.approx(expected, abs=1e-6)
    queries, gains = generator.random((5, 8)), generator.integers(0, 4, (5, 8)) + np.eye(5, 8, dtype=int)
    assert compute("ndcg", queries, gains) == pytest.approx(sklearn.ndcg_score(gains, queries), abs=1e-6)


@pytest.mark.parametrize("seed", CASES)
def test_pictures_are_judged_as_by_torchmetrics(seed: int) -> None:
    import torch
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

    generator = np.random.default_rng(seed)
    output, labels = generator.random((2, 3, 16, 16)), generator.random((2, 3, 16, 16))
    for scale in (1.0, 255.0):
        pair = torch.from_numpy(output * scale), torch.from_numpy(labels * scale)
        psnr = peak_signal_noise_ratio(*pair, data_range=scale, reduction="elementwise_mean", dim=(1, 2, 3))
        assert compute("psnr", output * scale, labels * scale) == pytest.approx(float(psnr), abs=1e-6)
        ssim = structural_similarity_index_measure(*pair, data_range=scale)
        assert compute("ssim", output * scale, labels * scale) == pytest.approx(float(ssim), abs=1e-6)


def test_by_hand() -> None:
    """Two pixels of class 0 and two of class 1, one of them taken for 0: overlaps of 2/3 and 1/2, F1 of 4/5 and 2/3."""
    output = np.zeros((1, 2, 4))
    output[0, [0, 0, 0, 1], range(4)] = 1
    labels = np.array([[0, 0, 1, 1]])
    assert compute("miou", output, labels) == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert compute("f1", output, labels) == pytest.approx((4 / 5 + 2 / 3) / 2)
    # One output of logits: above 0 it is class 1.
    assert compute("miou", output[:, 1:] - 0.5, labels) == pytest.approx((2 / 3 + 1 / 2) / 2)
    # Of three pairs of a right and a wrong sample, two are in order.
    assert compute("auroc", np.array([0.9, 0.2, 0.1, 0.5]), np.array([1, 0, 0, 0])) == 1.0
    assert compute("auroc", np.array([0.3, 0.2, 0.1, 0.5]), np.array([1, 0, 0, 0])) == pytest.approx(2 / 3)
    # An error of 0.1 everywhere: 20 dB.
    assert compute("psnr", np.full((1, 1, 11, 11), 0.6), np.full((1, 1, 11, 11), 0.5)) == pytest.approx(20.0)
    beyond = np.full((1, 1, 11, 11), 0.5)
    beyond[0, 0, 0, 0] = 1.1  # of an edge, by bicubic resizing
    assert 19 < compute("psnr", beyond.clip(0, 1) + 0.1, beyond) < 21
    assert compute("psnr", np.ones((1, 1, 11, 11)), np.zeros((1, 1, 11, 11), np.uint8)) == pytest.approx(
        48.13, abs=0.01
    )
    assert compute("spearman", np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0])) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("name", ["spearman", "auroc"])
def test_two_samples_of_a_score_are_accepted_beside_the_labels_of_all(name: str) -> None:
    """Before a run, metrics are tried on two samples."""
    assert METRICS[name].accepts(np.zeros((2, 1)), np.arange(7) % 2)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_answers_that_are_classes_are_right_or_wrong(shape: tuple[int, ...]) -> None:
    """A model that ends with an argmax."""
    assert compute("top1", np.array([3, 1, 0, 2]).reshape(shape), np.array([3, 1, 1, 2])) == 0.75
    assert not METRICS["top1"].accepts(np.arange(8).reshape(4, 2), np.arange(4))


def test_letters_are_counted_over_all_texts() -> None:
    """One of five letters is wrong and one is missing; CTC's repeated letters and blanks are no letters."""
    labels = np.array([[1, 2, 3], [4, 5, -1]])
    assert compute("cer", np.array([[1, 2, 4], [4, -1, -1]]), labels) == pytest.approx(2 / 5)
    steps = np.array([[1, 1, 0, 2, 3, 3], [4, 0, 5, 5, 0, 0]])
    assert compute("cer", np.eye(6)[steps], labels) == 0.0
    with pytest.raises(DataError, match="the text of sample 1 is empty"):
        METRICS["cer"].compute(np.array([[1], [1]]), np.array([[1], [-1]]))


def test_words_are_counted_over_all_texts() -> None:
    """With 9 between words, of five words one is wrong, one is missing, and one is too much."""
    labels = np.array([[1, 2, 9, 3, 9, 4], [9, 5, 9, 9, 1, 2]])
    texts = np.array([[1, 2, 9, 3, 3, -1, -1], [5, 9, 1, 2, 9, 6, 9]])
    assert compute("wer=9", texts, labels) == pytest.approx(3 / 5)
    assert compute("wer=9", labels, labels) == 0.0
    own = find_own("wer=9")
    assert own
    with pytest.raises(DataError, match="the text of sample 1 has no word"):
        own.compute(labels, np.array([[1], [9]]))


@pytest.mark.parametrize("seed", CASES)
def test_errors_in_texts_are_those_of_torchmetrics(seed: int) -> None:
    from torchmetrics.functional.text import char_error_rate, word_error_rate

    generator = np.random.default_rng(seed)
    output, labels = generator.integers(1, 5, (2, 6, 12))
    labels[:, 0] = 1
    given, wanted = (["".join(" abc"[number - 1] for number in row) for row in array] for array in (output, labels))
    assert compute("cer", output, labels) == pytest.approx(float(char_error_rate(given, wanted)), abs=1e-6)
    split = [[" ".join(text.split()) for text in texts] for texts in (given, wanted)]
    assert compute("wer=1", output, labels) == pytest.approx(float(word_error_rate(*split)), abs=1e-6)


@pytest.mark.parametrize("name", ["wer", "wer=", "wer=a"])
def test_word_errors_need_the_letter_between_words(name: str) -> None:
    with pytest.raises(DataError, match="does not name the letter between words") as error:
        evaluate(name, {"y": np.array([[1, 2]])}, {"y": np.array([[1, 2]])}, np.array([[1, 2]]))
    assert "wer=27" in error.value.remedy


def test_texts_match_only_as_a_whole() -> None:
    labels = np.array([[1, 2, 3], [4, 5, -1], [1, 1, -1]])
    texts = np.array([[1, 2, 3], [4, 4, -1], [1, 1, 0]])
    assert compute("exact_match", texts, labels) == pytest.approx(2 / 3)
    steps = np.array([[1, 2, 2, 3], [4, 0, 5, 5], [1, 1, 0, 0]])  # a repeated letter needs a blank between
    assert compute("exact_match", np.eye(6)[steps], labels) == pytest.approx(2 / 3)


@pytest.mark.parametrize("seed", CASES)
def test_entities_are_those_of_seqeval(seed: int) -> None:
    from seqeval.metrics import f1_score

    generator = np.random.default_rng(seed)
    names = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG"]
    labels = generator.integers(0, 5, (6, 12))
    output = np.eye(5)[labels] + generator.random((6, 12, 5)) * 1.6
    labels[:, 9:] = -100
    sides = ([[names[tag] for tag in row[:9]] for row in side] for side in (labels, output.argmax(-1)))
    assert compute("entity_f1", output, labels) == pytest.approx(f1_score(*sides), abs=1e-6)


def test_entities_by_hand() -> None:
    """Two persons of two tokens, and an organization: all right; one end is wrong; a type is wrong, and one missed."""
    labels = np.array([[1, 2, 0, 3, -100], [0, 1, 2, 0, -100]])
    assert METRICS["entity_f1"].accepts(np.zeros((1, 5, 5)), labels), "it is asked with fewer samples than there are"
    cases = {
        1.0: [[1, 2, 0, 3, 1], [0, 1, 2, 0, 4]],
        2 / 3: [[1, 2, 2, 3, 0], [0, 1, 2, 0, 0]],
        2 / 5: [[1, 2, 0, 1, 0], [0, 0, 0, 0, 0]],
    }
    for expected, tags in cases.items():
        assert compute("entity_f1", np.eye(5)[np.array(tags)], labels) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tags", "labels"), [(4, [[1, 0]]), (1, [[0, 0]]), (5, [[5, 0]]), (5, [[1, 0, 0]]), (5, [[-100, -100]])]
)
def test_tags_of_another_form_are_refused(tags: int, labels: list[list[int]]) -> None:
    output = {"y": np.zeros((1, 2, tags))}
    with pytest.raises(DataError, match="B and I of each type by turns"):
        evaluate("entity_f1", output, output, np.array(labels))


@pytest.mark.parametrize("seed", CASES)
def test_answers_are_those_of_transformers_and_squad(seed: int) -> None:
    """The best valid pair of a first and a last token is the answer; torchmetrics counts its words."""
    from torchmetrics.text import SQuAD

    generator = np.random.default_rng(seed)
    output = generator.standard_normal((5, 50, 2))
    first = generator.integers(0, 40, (5, 2))
    labels = np.stack([first, first + generator.integers(0, 10, (5, 2))], axis=-1)
    labels[0, 1] = -1
    theirs = SQuAD()
    for number, (scores, answers) in enumerate(zip(output, labels, strict=True)):
        spans = [(start, end) for start in range(50) for end in range(start, min(50, start + 30))]
        start, end = max(spans, key=lambda span: scores[span[0], 0] + scores[span[1], 1])
        words = [f"word{place}" for place in range(50)]
        truth = [" ".join(words[low : high + 1]) for low, high in answers if low >= 0]
        wanted = {"answers": {"answer_start": [0] * len(truth), "text": truth}, "id": str(number)}
        theirs.update([{"prediction_text": " ".join(words[start : end + 1]), "id": str(number)}], [wanted])
    expected = theirs.compute()
    assert compute("answer_f1", output, labels) == pytest.approx(float(expected["f1"]) / 100, abs=1e-6)
    assert compute("answer_match", output, labels) == pytest.approx(float(expected["exact_match"]) / 100, abs=1e-6)


def test_answers_by_hand() -> None:
    """Tokens 2 to 4 of 2 to 3: F1 of 4/5. The end never comes before the start, nor 30 tokens behind it."""
    start, end = np.zeros((2, 2, 40))
    start[0, 2], end[0, 4], end[0, 1] = 5, 3, 7
    start[1, 0], end[1, 0], end[1, 30] = 5, 1, 2
    outputs = {"hidden": np.zeros((2, 40, 8)), "start": start, "end": end}
    labels = np.array([[2, 3], [0, 0]])
    judged = evaluate("answer_f1", outputs, outputs, labels)
    assert judged.value == pytest.approx((4 / 5 + 1) / 2)
    assert (judged.output, judged.other_outputs) == ("start,end", ("hidden",))
    apart = {"start_positions": labels[:, 0], "end_positions": labels[:, 1]}
    assert evaluate("answer_match", outputs, outputs, apart).value == 0.5
    joined = {"y": np.stack([start, end], axis=-1)}
    assert evaluate("answer_f1:y", joined, joined, labels[:, None]).value == judged.value
    wrong = dict(reversed(outputs.items()))
    assert evaluate("answer_f1:start,end", wrong, wrong, labels).value == judged.value
    for names in (("start", "end"), ("startLogits", "endLogits"), ("FIRST_SCORES", "LAST_SCORES")):  # which tell it
        named = {names[1]: end, names[0]: start}
        assert evaluate("answer_f1", named, named, labels).value == judged.value
        turned = {"end_positions": labels[:, 1], "start_positions": labels[:, 0]}
        assert evaluate("answer_f1", named, named, turned).value == judged.value
    for names in (("a", "b"), ("append", "restarted"), ("start_end", "b"), ("start_0", "start_1")):
        by_order = {names[1]: end, names[0]: start}
        assert evaluate("answer_f1", by_order, by_order, labels).value < judged.value


@pytest.mark.parametrize("name", ["miou", "f1", "auroc", "spearman", "cer", "wer=2"])
def test_a_number_for_all_samples_has_an_interval(name: str) -> None:
    """The drop of noise that spoils little is within an interval, that of the same answers is 0."""
    generator = np.random.default_rng(0)
    letters = generator.integers(1, 4, (60, 9))
    labels, exact = {
        "auroc": (np.arange(60) % 2, np.arange(60) % 2 + 0.0),
        "spearman": (np.arange(60) / 60, np.arange(60) / 60),
        "cer": (letters, letters),
        "wer=2": (letters, letters),
    }.get(name, (letters, np.eye(5)[letters].transpose(0, 2, 1)))
    worse = exact.copy()
    worse[:20] = worse[:20][:, ::-1] if worse.ndim > 1 else 1 - worse[:20]
    same, judged = (evaluate(name, {"y": output}, {"y": exact}, labels) for output in (exact, worse))
    assert (same.drop, same.drop_low, same.drop_high) == (0, 0, 0)
    assert judged.whole
    assert judged.drop_low is not None
    assert judged.drop_high is not None
    assert 0 < judged.drop_low < judged.drop < judged.drop_high
    assert judged.explain_excess(judged.drop) == "", "the interval of such a number is no reason to refuse it"
    assert "is more than" in judged.explain_excess(judged.drop / 2)


def test_top1_is_told_beside_the_most_frequent_label() -> None:
    labels, logits = np.array([2, 2, 2, 0]), np.eye(3, dtype=np.float32)[[0, 0, 1, 0]]
    judged = evaluate("top1", {"y": logits}, {"y": logits}, labels)
    assert (judged.value, judged.guess) == (0.25, 0.75)
    assert evaluate("auroc", {"y": logits[:, :1]}, {"y": logits[:, :1]}, labels > 0).guess is None


def test_a_metric_that_computes_in_place_changes_nothing(tmp_path: Path) -> None:
    code = "def m(y, labels):\n    out = y['y']\n    out -= labels\n    labels += 1\n    return -abs(out)[:, 0]\n"
    (tmp_path / "own.py").write_text(code)
    labels, answers = np.zeros((4, 1), np.float32), np.ones((4, 1), np.float32)
    ours, theirs, metric = {"y": 3 * answers}, {"y": answers.copy()}, f"{tmp_path / 'own.py'}:m"
    assert [evaluate(metric, ours, theirs, labels).drop for _ in range(2)] == [2, 2]
    assert (ours["y"] == 3).all()
    assert (theirs["y"] == 1).all()
    assert not labels.any()


@pytest.mark.parametrize("metric", ["mse", "spearman"])
@pytest.mark.parametrize(("error", "lost"), [(1e-7, False), (1e-2, True)])
def test_rounding_of_float32_is_no_drop(metric: str, error: float, lost: bool) -> None:
    generator = np.random.default_rng(0)
    labels = generator.standard_normal(300)
    baseline = labels + 0.1 * generator.standard_normal(300)
    outputs = baseline * (1 + error * generator.standard_normal(300))
    judged = evaluate(metric, {"y": outputs}, {"y": baseline}, labels)
    ends = (judged.drop, judged.drop_low, judged.drop_high)
    assert (ends != (0, 0, 0)) == lost
    if metric == "mse":
        assert (judged.seen_high != 0, bool(judged.explain_excess(0))) == (lost, lost)


def test_a_wrong_answer_of_many_is_no_rounding() -> None:
    labels = np.zeros(200_000, np.int64)
    baseline = np.tile(np.float32([1, 0]), (len(labels), 1))
    outputs = baseline.copy()
    outputs[0] = [0, 1]
    judged = evaluate("top1", {"y": outputs}, {"y": baseline}, labels)
    assert judged.drop == pytest.approx(5e-6)
    assert judged.explain_excess(0)


def test_more_samples_are_asked_for_where_the_interval_is_wide() -> None:
    told = Quality(metric="map", value=0.5, baseline=0.51, drop=0.01, drop_low=-0.02, drop_high=0.04, samples=100)
    assert told.explain_width(0.01) == (
        "100 samples tell the drop to ±0.0300: to see one of 0.01, about 800 more are needed"
    )
    assert told.explain_width(0.03) == ""


def test_no_wrong_answer_among_few_says_little() -> None:
    outputs, labels = np.eye(2)[np.arange(100) % 2], np.arange(100) % 2
    same = evaluate("top1", {"y": outputs}, {"y": outputs.copy()}, labels)
    assert (same.worse, same.better, same.seen_high) == (0, 0, 0)
    assert same.explain_width(0.01) == (
        "100 samples tell the drop to ±0.0272: to see one of 0.01, about 176 more are needed"
    )
    assert same.explain_width(0.03) == same.explain_width(0.0) == ""


@pytest.mark.parametrize(
    ("name", "output", "labels"),
    [
        ("miou", np.zeros((2, 3, 4, 4)), np.zeros((2, 4, 5))),
        ("miou", np.zeros((2, 3, 4, 4)), np.full((2, 4, 4), 3)),
        ("f1", np.zeros(2, np.float32), np.array([0, 1])),
        ("f1", np.zeros((2, 3), np.int64), np.array([0, 1])),
        ("top5", np.zeros(2, np.int64), np.array([0, 5])),
        ("auroc", np.zeros((2, 3)), np.array([0, 5])),
        ("psnr", np.zeros((2, 3, 16, 16)), np.full((2, 3, 16, 16), -1.0)),
        ("ndcg", np.zeros((2, 3)), np.full((2, 3), 0.5)),
        ("ndcg", np.zeros((2, 3)), np.array([[1, 0, 2], [1, 0, -1]])),
        ("map", np.zeros((2, 9, 6)), np.zeros((2, 9, 4))),
        ("map", np.where(np.arange(9) < 4, 300, np.full((2, 50, 9), 0.5)), np.zeros((2, 9, 5))),
        ("answer_f1", np.zeros((2, 9, 2)), np.array([[3, 2], [0, 0]])),
        ("answer_f1", np.zeros((2, 9, 2)), np.array([[0, 9], [0, 0]])),
        ("answer_f1", np.zeros((2, 9)), np.array([[0, 1], [0, 0]])),
        ("answer_match", np.zeros((2, 9, 2)), np.array([[0, 1], [-1, -1]])),
    ],
)
def test_what_does_not_fit_is_refused(name: str, output: Arrays, labels: Arrays) -> None:
    with pytest.raises(DataError, match=f"^{name} needs "):
        evaluate(name, {"y": output}, {"y": output}, labels)


@pytest.mark.parametrize("name", ["top1", "top5", "auroc"])
@pytest.mark.parametrize(
    ("labels", "one_hot"), [(np.eye(3), True), (np.eye(3, dtype=bool), True), (np.ones((3, 3)), False)]
)
def test_of_one_hot_labels_the_class_is_asked_for(name: str, labels: Arrays, one_hot: bool) -> None:
    outputs = {"y": np.zeros((3, 3))}
    with pytest.raises(DataError, match=f"^{name} needs ") as error:
        evaluate(name, outputs, outputs, labels)
    assert ("labels.argmax(axis=1)" in error.value.remedy) == one_hot


@pytest.mark.parametrize("name", ["top1", "f1", "auroc"])
@pytest.mark.parametrize(
    ("shape", "labels", "hinted"),
    [
        ((20, 2), 1 + np.arange(20) % 2, True),
        ((20, 5), 1 + np.arange(20) % 5, True),
        ((20, 5), 1 + np.arange(20) % 6, False),
        ((20, 5), np.arange(20) % 6, False),
        ((20, 2), np.arange(20) % 2 * 5, False),
    ],
)
def test_of_classes_that_are_counted_from_1_one_is_to_be_subtracted(
    name: str, shape: tuple[int, int], labels: Arrays, hinted: bool
) -> None:
    outputs = {"y": np.random.default_rng(0).standard_normal(shape)}
    with pytest.raises(DataError, match=f"^{name} needs ") as error:
        evaluate(name, outputs, outputs, labels)
    hint = f"subtract 1 from the labels: classes are counted from 0, to {shape[1] - 1} here"
    assert (error.value.remedy == hint) == hinted


@pytest.mark.parametrize("name", ["top1", "f1", "auroc", "cer"])
def test_samples_of_several_classes_are_left_to_a_function(name: str) -> None:
    """A mean square of errors, or the gain of a ranking, is no measure of them."""
    outputs = {"y": np.random.default_rng(0).standard_normal((20, 5))}
    labels = (np.random.default_rng(1).random((20, 5)) < 0.4).astype(np.int64)
    with pytest.raises(DataError, match=f"^{name} needs ") as error:
        evaluate(name, outputs, outputs, labels)
    assert error.value.remedy.startswith("samples have several classes, and no metric of enginesmith's")
    assert "--metric file.py:function" in error.value.remedy
    assert not re.search("mse|ndcg", error.value.remedy)
    assert evaluate("f1", {"y": outputs["y"] > 0}, {"y": outputs["y"] > 0}, labels).value > 0


def test_a_mean_square_is_not_suggested_for_what_is_there_or_not() -> None:
    outputs = {"y": np.random.default_rng(0).standard_normal((4, 3, 8, 8))}
    for labels, suggested in ((outputs["y"] > 0, False), (np.round(outputs["y"]), True)):
        with pytest.raises(DataError, match=r"^miou needs ") as error:
            evaluate("miou", outputs, outputs, labels)
        assert ("mse" in error.value.remedy) == suggested


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Callable[..., Any]:
        raise ImportError(name)

    monkeypatch.setattr(own_metric.importlib, "import_module", fail)
    with pytest.raises(MissingCapability, match="needs jiwer, which is not installed") as error:
        evaluate("cer", {"y": np.array([[1, 2]])}, {"y": np.array([[1, 2]])}, np.array([[1, 2]]))
    assert "pip install" in error.value.remedy
    assert "jiwer" in error.value.remedy


def test_only_a_function_of_the_users_is_asked_to_return_other_numbers() -> None:
    outputs, labels = {"y": np.random.default_rng(0).random((4, 3), np.float32)}, np.array([0, 1, 0, 1])
    with pytest.raises(DataError, match="auroc returned NaN") as error:
        evaluate("auroc", outputs, outputs, labels)
    assert error.value.remedy.startswith("give such labels, or a function of your own with --metric")


@pytest.mark.parametrize(("metric", "counted"), [("top1", True), ("mse", False)])
def test_right_and_wrong_samples_are_told_from_graded_scores(metric: str, counted: bool) -> None:
    outputs = {"y": np.array([[0.1, 0.9], [0.8, 0.2]])}
    labels = np.array([1, 1]) if counted else outputs["y"] + 0.5
    assert evaluate(metric, outputs, outputs, labels).counted == counted


@pytest.mark.parametrize(
    ("metric", "max_drop", "count", "words"),
    [
        ("top1", 0.01, 96, "there are 96 for choice and 200 for judgement, and it needs at least 100 for each"),
        ("top1:category", 0.01, 99, "at least 100"),
        ("top1", 0.01, 100, ""),
        ("top5", 0.3, 3, "at least 4"),
        ("mse", 0.01, 8, ""),
        ("top1", 0.0, 8, ""),
        (None, None, 8, ""),
    ],
)
def test_a_budget_of_less_than_one_sample_is_told(metric: str, max_drop: float, count: int, words: str) -> None:
    told = explain_few_samples({"calibration": 8, "choice": count, "judgement": 200}, metric, max_drop)
    assert (words in told, bool(told)) == (True, bool(words))
