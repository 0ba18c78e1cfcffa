"""Compute task metrics by name, from one output and its labels; the axis of samples comes first.

What a library that people trust has, it computes: torchmetrics, pycocotools, jiwer and seqeval, which the extra
``metrics`` has.
"""

import contextlib
import importlib
import io
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from enginesmith.pipeline.errors import MissingCapability, SampleError, install_command
from enginesmith.pipeline.measure.statistics import Samples
from enginesmith.pipeline.tensors import Array

IGNORED = (255, -100)
"""Class numbers that many data sets give to pixels and tokens that do not count; negative ones do not count, either."""
_BOX_SIDES = 4
_MOST_CLASSES = 4096
"""Classes of places, of which every pair is counted."""
_MOST_BOXES = 100
"""Boxes of an image that COCO's evaluation looks at."""
_OVERLAP = 0.6
"""Intersection over union from which a box is suppressed by a better one of its class."""
_LEAST_SCORE = 1e-3
_NORMAL = 1.96
"""Standard deviations on each side of 95 % of a normal distribution."""
_BLANK = 0
_BYTE = 255.0
_LONGEST_ANSWER = 30
"""Tokens, as in SQuAD's evaluation of BERT."""
_SSIM_EDGE = 11
"""Pixels of the window of SSIM (Wang et al., 2004)."""


class OwnMetric(NamedTuple):
    """A metric of one output and one array of labels: a number for each sample, or one for all of them."""

    judge: Callable[[Array, Array], Array]
    """(output, labels) → the number of each sample; or, of a metric of all samples, what each adds to it."""
    accepts: Callable[[Array, Array], bool]
    """Tells whether an output and labels are of the shapes and dtypes that it takes."""
    needs: str
    """Describes those for people."""
    combine: Callable[[Array], float] | None = None
    """Computes one number from what all samples add; None where each sample has its own."""
    sign: float = 1.0
    """-1 where less is better."""
    counts: bool = False
    """True where a sample is right or wrong."""
    draws: int = 200
    """Sets of samples that the interval of one number is estimated from."""
    guess: Callable[[Array], float] | None = None
    """Computes from labels what the best answer would reach that is the same for all samples."""
    paired: bool = False
    """True where two outputs, and two arrays of labels, may hold the two numbers of the last axis."""

    def compute(self, output: Array, labels: Array) -> Samples:
        """Compute the numbers of all samples, [samples], or their one number, []."""
        judged = self.judge(output, labels)
        return np.asarray(judged if self.combine is None else self.combine(judged), np.float64)

    def estimate_drop(self, output: Array, reference: Array, labels: Array, seed: int) -> tuple[float, float] | None:
        """Estimate the 95 % interval of the drop from the reference, of a metric that is one number.

        Samples are drawn anew with replacement, the same ones for both (bootstrap), and the drop's deviation is taken.
        None where too many of the drawn sets have no such number: of one class alone there is no AUROC.
        """
        assert self.combine is not None
        if np.array_equal(output, reference):
            return 0.0, 0.0
        sides = [self.judge(array, labels) for array in (output, reference)]
        generator, drops = np.random.default_rng(seed), list[float]()
        for _ in range(self.draws):
            rows = generator.integers(0, len(labels), len(labels))
            ours, theirs = (self.combine(side[rows]) for side in sides)
            drops += [theirs - ours] if np.isfinite([ours, theirs]).all() else []
        if len(drops) < max(2, self.draws // 2):
            return None
        ours, theirs = (self.combine(side) for side in sides)
        drop, half = self.sign * (theirs - ours), _NORMAL * float(np.std(drops, ddof=1))
        return drop - half, drop + half


def _import(name: str) -> Any:
    """Import a library of the extra.

    Raises:
        MissingCapability: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingCapability(
            f"this metric needs {package}, which is not installed", install_command(package)
        ) from error


def _per_sample(array: Array) -> NDArray[np.float64]:
    return array.astype(np.float64).reshape(len(array), -1)


# Classes


def _find_among_greatest(logits: Array, labels: Array, count: int) -> Samples:
    """Give 1 where the label's logit is among so many greatest, or where the answer is the label itself."""
    if logits.dtype.kind in "iu":
        return np.asarray(logits.reshape(-1) == labels.reshape(-1), np.float64)
    best = np.argsort(-logits.astype(np.float64), axis=1, kind="stable")[:, :count]
    return np.asarray((best == labels.reshape(-1, 1)).any(axis=1), np.float64)


def _share_of_commonest(labels: Array) -> float:
    return float(np.unique(labels, return_counts=True)[1].max() / labels.size)


def _are_classes(logits: Array, labels: Array) -> bool:
    if labels.size != len(labels) or not _are_whole(labels):
        return False
    if logits.dtype.kind in "iu":
        return logits.ndim in (1, 2) and logits.size == len(logits)
    if logits.ndim != 2:
        return False
    return bool(labels.min() >= 0 and labels.max() < logits.shape[1])


def _are_whole(labels: Array) -> bool:
    return labels.dtype.kind in "biuf" and labels.size > 0 and bool((labels == np.round(labels)).all())


def _count_confusions(output: Array, labels: Array) -> Array:
    """Count [samples, classes, classes], truth by answer, over all places whose label counts.

    The classes are the output's second axis; where that has length 1, an answer above 0 is class 1. Whole numbers are
    the classes themselves.
    """
    if output.dtype.kind in "iu":
        found = output.reshape(labels.shape).astype(np.int64)
        classes = 1 + max(1, int(found.max()), int(labels[_is_counted(labels)].max()))
    else:
        classes = max(2, output.shape[1])
        found = (output[:, 0] > 0).astype(np.int64) if output.shape[1] == 1 else output.argmax(axis=1)
    truth = labels.reshape(found.shape).astype(np.int64)
    counted = _is_counted(truth) & (truth < classes)
    pairs = zip(truth, found, counted, strict=True)
    counts = [np.bincount(wanted[use] * classes + given[use], minlength=classes**2) for wanted, given, use in pairs]
    return np.asarray(counts).reshape(-1, classes, classes)


def _average_iou(counts: Array) -> float:
    """Average intersection over union, over the classes that occur in answers or labels of the whole set."""
    both, sides = _add_up(counts)
    return float((both / (sides - both)).mean()) if len(both) else math.nan


def _average_f1(counts: Array) -> float:
    """Average the F1 scores of the classes that occur in answers or labels of the whole set."""
    both, sides = _add_up(counts)
    return float((2 * both / sides).mean()) if len(both) else math.nan


def _add_up(counts: Array) -> tuple[Array, Array]:
    """Return right answers, and answers and labels together, of the classes that occur."""
    total = counts.sum(axis=0)
    both, sides = total.diagonal(), total.sum(axis=0) + total.sum(axis=1)
    return both[sides > 0], sides[sides > 0]


def _are_class_maps(output: Array, labels: Array) -> bool:
    """Tell whether there is a class for each place: [samples, classes, ...] and [samples, ...] or [samples, 1, ...]."""
    if output.ndim < 2 or labels.ndim == 0 or not _are_whole(labels):
        return False
    counted = labels[_is_counted(labels)]
    if output.dtype.kind in "iu":  # the class itself for each place
        same = labels.ndim > 1 and _drop_one(output.shape) == _drop_one(labels.shape)
        few = counted.size > 0 and max(int(counted.max()), int(output.max())) < _MOST_CLASSES
        return same and few and int(output.min()) >= 0
    places = output.shape[2:]
    if labels.shape[1:] not in (places, (1, *places)):
        return False
    return counted.size > 0 and int(counted.max()) < max(2, output.shape[1])


def _is_counted(labels: Array) -> NDArray[np.bool_]:
    return (labels >= 0) & ~np.isin(labels, IGNORED)


def _drop_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without a second axis of length 1."""
    return (*shape[:1], *shape[2:]) if shape[1:2] == (1,) else shape


def _join(output: Array, labels: Array) -> Array:
    """Put an output's numbers and the label of each sample side by side, [samples, numbers + 1]."""
    return np.concatenate([_per_sample(output), _per_sample(labels)], axis=1)


def _compute_auroc(joined: Array) -> float:
    """Compute the area below the ROC curve; of several classes the mean of each against the rest."""
    functional, torch = _import("torchmetrics.functional.classification"), _import("torch")
    scores, truth = torch.from_numpy(joined[:, :-1]), torch.from_numpy(joined[:, -1].astype(np.int64))
    if len(truth.unique()) < max(2, scores.shape[1]):
        return math.nan
    if scores.shape[1] > 2:
        ranks = torch.stack([_rank(column) for column in _find_odds(scores.double()).T], dim=1)
        return float(functional.multiclass_auroc(ranks, truth, scores.shape[1]))
    one = scores[:, 0] if scores.shape[1] == 1 else scores[:, 1] - scores[:, 0]
    return float(functional.binary_auroc(_rank(one), truth))


def _find_odds(scores: Any) -> Any:
    """Return what orders samples as the probability of each class does, also where that rounds to 1."""
    if float(scores.min()) >= 0 and float(scores.max()) <= 1:  # probabilities already
        return scores
    others = [scores.index_fill(1, scores.new_tensor([kind]).long(), -math.inf) for kind in range(scores.shape[1])]
    return scores - _import("torch").stack([rest.logsumexp(1) for rest in others], dim=1)


def _rank(scores: Any) -> Any:
    """Replace scores by their ranks between 0 and 1, as no two of those become equal by rounding."""
    ranks = scores.unique(return_inverse=True)[1].double()
    return ranks / max(1.0, float(ranks.max()))


def _are_scores(output: Array, labels: Array) -> bool:
    """Tell whether there is a number or a number for each class, and one class for each sample."""
    if output.dtype.kind != "f" or labels.size != len(labels) or not _are_whole(labels):
        return False
    classes = max(2, output.size // max(1, len(output)))
    return output.ndim <= 2 and bool(labels.min() >= 0 and labels.max() < classes)


# Numbers and pictures


def _compute_mse(output: Array, labels: Array) -> Samples:
    return np.asarray(((_per_sample(output) - _per_sample(labels)) ** 2).mean(axis=1))


def _compute_psnr(output: Array, labels: Array) -> Samples:
    """Compute the peak signal-to-noise ratio of each picture in dB, what is outside of the pixels' range cut off."""
    peak = _peak(labels)
    error = ((_per_sample(output).clip(0, peak) - _per_sample(labels)) ** 2).mean(axis=1)
    return np.asarray(10 * np.log10(peak**2 / np.maximum(error, 1e-10 * peak**2)))


def _peak(labels: Array) -> float:
    """Return the largest value that a pixel can have: 1, or 255."""
    return 1.0 if labels.max() <= 1 else _BYTE


def _compute_ssim(output: Array, labels: Array) -> Samples:
    """Compute the structural similarity of each picture (Wang et al., IEEE Trans. Image Processing 13, 2004)."""
    functional, torch = _import("torchmetrics.functional.image"), _import("torch")
    peak = _peak(labels)
    sides = [torch.from_numpy(array.astype(np.float64)) for array in (output.clip(0, peak), labels)]
    sides[1] = sides[1].reshape(sides[0].shape)
    return np.asarray(functional.structural_similarity_index_measure(*sides, data_range=peak, reduction="none"))


def _are_alike(output: Array, labels: Array) -> bool:
    mine, theirs = ([size for size in array.shape[1:] if size != 1] for array in (output, labels))
    return mine == theirs and labels.dtype.kind in "biuf"


def _are_pictures(output: Array, labels: Array) -> bool:
    large = output.ndim == len("NCHW") and min(output.shape[2:]) >= _SSIM_EDGE
    return large and _are_alike(output, labels) and bool(labels.min() >= 0 and labels.max() <= _BYTE)


def _correlate_ranks(joined: Array) -> float:
    """Compute Spearman's correlation of answers and labels, over all samples."""
    functional, torch = _import("torchmetrics.functional.regression"), _import("torch")
    return float(functional.spearman_corrcoef(*torch.from_numpy(joined).unbind(1)))


def _are_numbers(output: Array, labels: Array) -> bool:
    """Tell whether there is one number for each sample on both sides; of outputs there may be fewer samples."""
    single = output.size == len(output) and labels.size == len(labels)
    return output.dtype.kind == "f" and single and labels.dtype.kind in "biuf"


def _compute_ndcg(output: Array, labels: Array) -> Samples:
    """Compute the normalized discounted cumulative gain of each query (Järvelin and Kekäläinen, 2002)."""
    functional, torch = _import("torchmetrics.functional.retrieval"), _import("torch")
    pairs = zip(output.astype(np.float64), labels.reshape(output.shape).astype(np.int64), strict=True)
    one = functional.retrieval_normalized_dcg
    return np.asarray([float(one(torch.from_numpy(scores), torch.from_numpy(gains))) for scores, gains in pairs])


def _are_relevances(output: Array, labels: Array) -> bool:
    scores = output.ndim == 2 and output.dtype.kind == "f"
    return scores and _are_alike(output, labels) and _are_whole(labels)


# Texts


def _count_errors(output: Array, labels: Array) -> Array:
    """Count letters that have to be changed, and those that there should be, [samples, 2].

    An output with scores of letters is decoded as of CTC: the best at each step, repeated ones once, without blanks.
    """
    jiwer = _import("jiwer")
    counts = []
    for number, (given, wanted) in enumerate(zip(_decode(output), labels, strict=True)):
        if not (text := _spell(wanted)):
            raise SampleError("the text of {} is empty", "leave such samples out", number)
        judged = jiwer.process_characters(text, _spell(given))
        counts.append((judged.substitutions + judged.deletions + judged.insertions, len(text)))
    return np.asarray(counts)


def _count_word_errors(output: Array, labels: Array, space: int) -> Array:
    """Count words that have to be changed, and those that there should be, [samples, 2]; ``space`` is between words."""
    jiwer = _import("jiwer")
    counts = []
    for number, (given, wanted) in enumerate(zip(_decode(output), labels, strict=True)):
        if not (text := " ".join(_spell(wanted, space).split())):
            raise SampleError("the text of {} has no word", "leave such samples out", number)
        judged = jiwer.process_words(text, _spell(given, space))
        counts.append((judged.substitutions + judged.deletions + judged.insertions, text.count(" ") + 1))
    return np.asarray(counts)


def _divide_errors(counts: Array) -> float:
    errors, wanted = counts.sum(axis=0)
    return float(errors / wanted)


def _compare_texts(output: Array, labels: Array) -> Samples:
    """Give 1 where a text has no error."""
    pairs = zip(_decode(output), labels, strict=True)
    return np.asarray([_spell(given) == _spell(wanted) for given, wanted in pairs], np.float64)


def _decode(output: Array) -> Array:
    if output.ndim == 2:
        return output
    best = output.argmax(axis=-1)
    repeated = np.concatenate([np.zeros_like(best[:, :1], bool), best[:, 1:] == best[:, :-1]], axis=1)
    return np.where(repeated | (best == _BLANK), -1, best)


def _spell(numbers: Array, space: int | None = None) -> str:
    """Write numbers as characters; negative ones, and the blank, are none."""
    first = 0x4E00  # characters without spaces or combining marks among them
    return "".join(" " if number == space else chr(first + int(number)) for number in numbers if number > _BLANK)


def _are_letters(output: Array, labels: Array) -> bool:
    whole = output.ndim == 3 or (output.ndim == 2 and output.dtype.kind in "iu")
    return whole and labels.ndim == 2 and _are_whole(labels)


def _count_entities(output: Array, labels: Array) -> Array:
    """Count entities that were found right, that were found, and that there are, [samples, 3].

    An entity is right if its type, its first and its last token are. Tokens whose label is negative are left out.
    """
    entities = _import("seqeval.metrics.sequence_labeling").get_entities
    counts = []
    for given, wanted in zip(output.argmax(axis=-1), labels.astype(np.int64), strict=True):
        used = wanted >= 0
        found, truth = (set(entities([_name_tag(int(tag)) for tag in tags[used]])) for tags in (given, wanted))
        counts.append((len(found & truth), len(found), len(truth)))
    return np.asarray(counts)


def _name_tag(number: int) -> str:
    """Write a tag as seqeval reads it: 0 is outside; of each type, the odd number begins and the even one goes on."""
    return f"{'B' if number % 2 else 'I'}-{(number + 1) // 2}" if number else "O"


def _score_entities(counts: Array) -> float:
    right, found, wanted = counts.sum(axis=0)
    return float(2 * right / (found + wanted)) if found + wanted else math.nan


def _are_tags(output: Array, labels: Array) -> bool:
    """Tell whether there are scores of tags for each token, an odd number of them: outside, and two of each type."""
    if output.ndim != 3 or output.shape[2] % 2 == 0 or output.shape[2] == 1:
        return False
    if labels.ndim != 2 or labels.shape[1] != output.shape[1]:
        return False
    return _are_whole(labels) and int(labels.max()) < output.shape[2] and bool((labels >= 0).any())


def _judge_answers(output: Array, labels: Array, score: str) -> Samples:
    """Compute SQuAD's F1 or exact match of each answer, its tokens' places being the words."""
    squad = _import("torchmetrics.functional.text").squad
    judged = []
    for scores, answers in zip(output.astype(np.float64), labels.reshape(len(labels), -1, 2), strict=True):
        found = {"prediction_text": _write_span(*_find_span(scores)), "id": ""}
        texts = [_write_span(*answer) for answer in answers.astype(int) if answer[0] >= 0]
        wanted = {"answers": {"answer_start": [0] * len(texts), "text": texts}, "id": ""}
        judged.append(float(squad([found], [wanted])[score]) / 100)
    return np.asarray(judged)


def _find_span(scores: Array) -> tuple[int, int]:
    """Find the first and the last token, [tokens, 2], whose scores together are the greatest."""
    together = scores[:, None, 0] + scores[None, :, 1]
    allowed = np.tri(len(scores), k=_LONGEST_ANSWER - 1, dtype=bool) & ~np.tri(len(scores), k=-1, dtype=bool)
    first, last = np.unravel_index(np.where(allowed, together, -np.inf).argmax(), together.shape)
    return int(first), int(last)


def _write_span(first: int, last: int) -> str:
    return " ".join(map(str, range(first, last + 1)))


def _are_spans(output: Array, labels: Array) -> bool:
    """Tell whether there are scores of tokens to be first and last, and of each sample an answer or several."""
    if output.ndim != 3 or output.shape[2] != 2 or output.dtype.kind != "f":
        return False
    if labels.ndim not in (2, 3) or labels.shape[-1] != 2 or not _are_whole(labels):
        return False
    first, last = labels.reshape(len(labels), -1, 2).transpose(2, 0, 1)
    there = first >= 0
    return bool(there.any(axis=1).all() and (first <= last)[there].all() and last.max() < output.shape[1])


# Boxes


def _match_boxes(output: Array, labels: Array) -> Array:
    """Match what was found in each image with what there is: lists of pycocotools' records, one of each class."""
    coco, evaluation = _import("pycocotools.coco"), _import("pycocotools.cocoeval")
    truth = [_box(place, box[0], box[1:]) for place, image in enumerate(labels) for box in image if box[0] >= 0]
    found = [
        _box(place, box[5], box[:4]) | {"score": float(box[4])}
        for place, image in enumerate(_find_boxes(output))
        for box in image
    ]
    classes = sorted({each["category_id"] for each in truth})
    sides = []
    for boxes in (truth, found):
        side = coco.COCO()
        side.dataset = {
            "images": [{"id": place} for place in range(len(labels))],
            "categories": [{"id": number} for number in classes],
            "annotations": [box | {"id": number} for number, box in enumerate(boxes, 1)],
        }
        _silently(side.createIndex)
        sides.append(side)
    judge = evaluation.COCOeval(*sides, "bbox")
    _restrict(judge)
    _silently(judge.evaluate)
    records = np.empty(len(labels), object)
    for place in range(len(labels)):
        records[place] = judge.evalImgs[place :: len(labels)]
    return records


def _compute_map(records: Array) -> float:
    """Compute COCO's mean average precision: overlaps of 0.5 to 0.95, 100 boxes in each image."""
    evaluation = _import("pycocotools.cocoeval")
    judge, classes = evaluation.COCOeval(iouType="bbox"), range(len(records[0]))
    _restrict(judge)
    judge.params.imgIds, judge.params.catIds = list(range(len(records))), list(classes)
    judge.evalImgs, judge._paramsEval = [image[number] for number in classes for image in records], judge.params
    _silently(judge.accumulate)
    precision = judge.eval["precision"]
    return float(precision[precision > -1].mean()) if (precision > -1).any() else math.nan


def _restrict(judge: Any) -> None:
    """Leave out what COCO's evaluation counts beside: small and large boxes, and fewer of them."""
    judge.params.areaRng, judge.params.areaRngLbl = judge.params.areaRng[:1], judge.params.areaRngLbl[:1]
    judge.params.maxDets = [_MOST_BOXES]


def _silently(function: Callable[[], None]) -> None:
    """Call what prints what it does."""
    with contextlib.redirect_stdout(io.StringIO()):
        function()


def _box(image: int, category: float, corners: Array) -> dict[str, Any]:
    left, top, right, bottom = map(float, corners)
    sides = [left, top, right - left, bottom - top]
    return {"image_id": image, "category_id": int(category), "bbox": sides, "area": sides[2] * sides[3], "iscrowd": 0}


def _find_boxes(output: Array) -> list[Array]:
    """List [boxes, 6] of each image: corners, score and class, from either layout."""
    if output.shape[2] == _BOX_SIDES + 2:
        return [image[image[:, _BOX_SIDES] > _LEAST_SCORE] for image in output.astype(np.float64)]
    return [_suppress(image.T) for image in output.astype(np.float64)]


def _suppress(boxes: Array) -> Array:
    """Keep the best of boxes that overlap, of one image and class by class; [boxes, 4 + classes] → [boxes, 6]."""
    half = boxes[:, 2:4] / 2
    corners = np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)
    kept: list[NDArray[np.float64]] = []
    for number, scores in enumerate(boxes[:, _BOX_SIDES:].T):
        order = np.argsort(-scores, kind="stable")
        order = order[scores[order] > _LEAST_SCORE][: 3 * _MOST_BOXES]
        while len(order):
            best, order = order[0], order[1:]
            kept.append(np.array([*corners[best], scores[best], number]))
            order = order[_overlap(corners[best], corners[order]) <= _OVERLAP]
    kept.sort(key=lambda box: -box[_BOX_SIDES])
    return np.array(kept[:_MOST_BOXES]).reshape(-1, _BOX_SIDES + 2)


def _overlap(box: Array, others: Array) -> NDArray[np.float64]:
    """Compute intersection over union of one box with each of the others."""
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    both = np.prod(np.maximum(high - low, 0), axis=1)
    areas = np.prod(box[2:] - box[:2]) + np.prod(others[:, 2:] - others[:, :2], axis=1)
    return np.asarray(both / np.maximum(areas - both, 1e-12))


def _are_boxes(output: Array, labels: Array) -> bool:
    if output.ndim != 3 or labels.ndim != 3 or labels.shape[2] != _BOX_SIDES + 1:
        return False
    if output.shape[2] == _BOX_SIDES + 2:
        return True
    turned = not _are_probabilities(output[:, _BOX_SIDES:]) and _are_probabilities(output[:, :, _BOX_SIDES:])
    return output.shape[1] > _BOX_SIDES and not turned


def _are_probabilities(scores: Array) -> bool:
    return bool(scores.size and scores.min() >= 0 and scores.max() <= 1)


_CLASSES = (
    "an output of shape [samples, classes], or the class itself as a whole number, and for each sample one class as a "
    "whole number, counted from 0"
)
_MAPS = (
    "an output of shape [samples, classes, ...], one class for one that is there or not, or the class itself for each "
    "place; and for each place a class as a whole number, counted from 0; negative ones, 255 and -100 do not count"
)
_PICTURES = "pictures of shape [samples, channels, height, width] from 0 to 1 or 255, 11 pixels or more along each edge"
_TEXTS = (
    "letters as whole numbers above 0, [samples, length], or scores of them, [samples, steps, letters] with 0 for "
    "CTC's blank; labels [samples, length], negative behind the end"
)
_ANSWERS = (
    "scores of tokens to be first and last in the answer: two outputs of shape [samples, tokens], or one of [samples, "
    "tokens, 2]; labels [samples, 2] with the first and the last token, or [samples, answers, 2], negative where there "
    "are fewer answers"
)
METRICS: Mapping[str, OwnMetric] = {
    "top1": OwnMetric(
        partial(_find_among_greatest, count=1), _are_classes, _CLASSES, counts=True, guess=_share_of_commonest
    ),
    "top5": OwnMetric(partial(_find_among_greatest, count=5), _are_classes, _CLASSES, counts=True),
    "mse": OwnMetric(_compute_mse, _are_alike, "an output and labels of the same shape", sign=-1.0),
    "f1": OwnMetric(_count_confusions, _are_class_maps, _MAPS, _average_f1),
    "miou": OwnMetric(_count_confusions, _are_class_maps, _MAPS, _average_iou),
    "auroc": OwnMetric(
        _join,
        _are_scores,
        "an output with a score, or one for each class, and for each sample its class",
        _compute_auroc,
    ),
    "psnr": OwnMetric(_compute_psnr, _are_pictures, _PICTURES),
    "ssim": OwnMetric(_compute_ssim, _are_pictures, _PICTURES),
    "spearman": OwnMetric(_join, _are_numbers, "one number for each sample, and one as its label", _correlate_ranks),
    "ndcg": OwnMetric(
        _compute_ndcg, _are_relevances, "scores of shape [queries, documents], and relevances as whole numbers"
    ),
    "cer": OwnMetric(_count_errors, _are_letters, _TEXTS, _divide_errors, sign=-1.0),
    "exact_match": OwnMetric(_compare_texts, _are_letters, _TEXTS, counts=True),
    "entity_f1": OwnMetric(
        _count_entities,
        _are_tags,
        "scores of tags, [samples, tokens, tags], with 0 for outside, then B and I of each type by turns; labels "
        "[samples, tokens], such tags as whole numbers, negative where a token does not count",
        _score_entities,
    ),
    "answer_f1": OwnMetric(partial(_judge_answers, score="f1"), _are_spans, _ANSWERS, paired=True),
    "answer_match": OwnMetric(
        partial(_judge_answers, score="exact_match"), _are_spans, _ANSWERS, counts=True, paired=True
    ),
    "map": OwnMetric(
        _match_boxes,
        _are_boxes,
        "boxes of shape [images, boxes, 6] (corners, score, class) or [images, 4 + classes, boxes] (centre, extent, "
        "scores); labels [images, boxes, 5] (class, corners), class -1 where there is none",
        _compute_map,
        draws=50,
    ),
}
"""Name → metric."""
WORD_ERRORS = "wer"
"""Metric whose name also has the number of the letter between words: ``wer=27``."""


def find_own(name: str) -> OwnMetric | None:
    """Look up a metric of enginesmith's; None if there is none of that name."""
    word, equals, space = name.partition("=")
    if word == WORD_ERRORS and equals and space.isdecimal() and int(space) > _BLANK:
        return OwnMetric(partial(_count_word_errors, space=int(space)), _are_letters, _TEXTS, _divide_errors, sign=-1.0)
    return METRICS.get(name)
