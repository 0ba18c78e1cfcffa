"""Judge classes: of a sample, or of each of its places."""

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginesmith.pipeline.measure.metrics.own_metric import (
    OwnMetric,
    append_labels,
    are_binary,
    are_probabilities,
    are_whole,
    import_library,
)
from enginesmith.pipeline.measure.statistics import Samples
from enginesmith.pipeline.tensors import Array

_IGNORED = (255, -100)
"""Class numbers that many data sets give to pixels and tokens that do not count; negative ones do not count, either."""
_WHOLE = "biu"
"""Kinds of dtypes whose numbers are classes themselves; of bool, 0 and 1."""
_MOST_PLACED = 1 << 16
"""Classes that scores are kept for, of which only the greatest are known."""
_FEW = 0.1
"""Share of labels up to which it is they that are wrong, and not what they are taken for."""
_MOST_CLASSES = 4096
"""First number that is no class itself: greater ones are taken for other numbers than classes."""


def _find_among_greatest(logits: Array, labels: Array, count: int) -> Samples:
    """Give 1 where the label's logit is among so many greatest, or where the answer is the label itself."""
    if logits.dtype.kind in _WHOLE:
        return np.asarray(logits.reshape(-1) == labels.reshape(-1), np.float64)
    best = np.argsort(-logits.astype(np.float64), axis=1, kind="stable")[:, :count]
    known = np.take_along_axis(logits, best, axis=1) != -math.inf  # others are not among the greatest of torch.topk
    return np.asarray(((best == labels.reshape(-1, 1)) & known).any(axis=1), np.float64)


def are_greatest(values: Array, indices: Array, labels: Array, *, single: bool) -> bool:
    """Tell whether two outputs are the greatest scores of each sample, and their classes, as torch.topk returns them.

    Labels are one class for each sample. Of a ``single`` score, too, which any two outputs of one number look like.
    """
    if values.ndim != len("NK") or values.shape != indices.shape or values.dtype.kind != "f" or not values.size:
        return False
    if indices.dtype.kind not in "iu" or not _are_single(labels):
        return False
    sorts = bool((values[:, 1:] <= values[:, :-1]).all()) and (single or values.shape[1] > 1)
    distinct = bool((np.diff(np.sort(indices, axis=1), axis=1) != 0).all())
    return sorts and distinct and int(indices.min()) >= 0 and _count_classes(indices, labels) <= _MOST_PLACED


def place_scores(values: Array, indices: Array, labels: Array) -> Array:
    """Place the greatest scores at their classes, [samples, classes]; those of the other classes are -inf."""
    scores = np.full((len(values), _count_classes(indices, labels)), -math.inf, values.dtype)
    np.put_along_axis(scores, indices.astype(np.int64), values, axis=1)
    return scores


def _count_classes(indices: Array, labels: Array) -> int:
    return 1 + max(int(indices.max()), int(labels.max()))


def _share_of_commonest(labels: Array) -> float:
    return float(np.unique(labels, return_counts=True)[1].max() / labels.size)


def _are_logits(output: Array, labels: Array) -> bool:
    """Tell whether there are scores of classes, and one class for each sample."""
    if output.dtype.kind in _WHOLE or output.ndim != len("NC") or not _are_single(labels):
        return False
    return bool(labels.min() >= 0 and labels.max() < output.shape[1])


def find_outside(output: Array, labels: Array) -> int | None:
    """Find the first sample whose label is no class of the scores, where nearly all labels are."""
    if output.dtype.kind in _WHOLE or output.ndim != len("NC") or not _are_single(labels):
        return None
    outside = (labels.reshape(-1) < 0) | (labels.reshape(-1) >= output.shape[1])
    return int(outside.argmax()) if 0 < outside.mean() <= _FEW else None


def _are_classes(output: Array, labels: Array) -> bool:
    """Tell whether there are scores of classes or the class itself, and one class for each sample."""
    itself = output.dtype.kind in _WHOLE and output.ndim in (1, 2) and output.size == len(output)
    return _are_logits(output, labels) or (itself and _are_single(labels))


def are_one_hot(labels: Array) -> bool:
    """Tell whether labels are a row for each sample with a 1 for its class, and 0 for the others."""
    rows = labels.ndim == len("NC") and labels.shape[1] > 1 and are_binary(labels)
    return rows and bool(((labels == 1).sum(axis=1) == 1).all())


def are_multi_hot(output: Array, labels: Array) -> bool:
    """Tell whether there are scores of classes, and 0 or 1 for each of them, as of samples with several classes."""
    rows = output.ndim == len("NC") and output.dtype.kind == "f" and output.shape[1] > 1
    return rows and labels.shape[1:] == output.shape[1:] and are_binary(labels)


def begin_with_one(output: Array, labels: Array) -> bool:
    """Tell whether labels are classes that are counted from 1, up to as many as there are scores of."""
    scored = output.ndim >= len("NC") and output.dtype.kind == "f" and output.shape[1] > 1 and are_whole(labels)
    counted = labels[_is_counted(labels)] if scored and labels.shape != output.shape else labels[:0]
    return counted.size > 0 and int(counted.min()) == 1 and int(counted.max()) == output.shape[1]


def _are_single(labels: Array) -> bool:
    return labels.size == len(labels) and are_whole(labels)


def _count_by_class(output: Array, labels: Array) -> Array:
    """Count right answers, and answers and labels together, of each class that occurs: [samples, 2, classes].

    They are counted over all places whose label counts. The classes are the output's second axis; where that has length
    1, an answer above 0 is class 1, or above 0.5 where all are probabilities. Whole numbers are the classes themselves.
    Scores at a whole fraction of the size of the labels are enlarged to it.
    """
    threshold, counts = _find_threshold(output), list[tuple[Array, Array, Array]]()
    for scores, wanted in zip(output, labels, strict=True):
        answers = _choose_classes(scores, wanted.size, threshold)
        truth = wanted.reshape(answers.shape).astype(np.int64)
        counted = _is_counted(truth)
        answers, truth = answers[counted], truth[counted]
        classes = 1 + max(answers.max(initial=0), truth.max(initial=0))
        sides = np.bincount(answers, minlength=classes) + np.bincount(truth, minlength=classes)
        those = np.flatnonzero(sides)
        right = np.bincount(truth[answers == truth], minlength=classes)
        counts.append((those, right[those], sides[those]))
    known = np.unique(np.concatenate([those for those, _, _ in counts]))
    most = max(int(sides.max(initial=0)) for _, _, sides in counts)
    table = np.zeros((len(counts), 2, len(known)), np.min_scalar_type(most))
    for row, (those, right, sides) in zip(table, counts, strict=True):
        row[:, np.searchsorted(known, those)] = right, sides
    return table


def _choose_classes(scores: Array, places: int, threshold: float) -> NDArray[np.int64]:
    """Choose the class of each of so many places of one sample."""
    if scores.dtype.kind in _WHOLE:
        return np.asarray(scores.reshape(-1), np.int64)
    if places != math.prod(scores.shape[1:]):
        scores = _enlarge(scores, math.isqrt(places // math.prod(scores.shape[1:])))
    chosen = scores[0] > threshold if len(scores) == 1 else scores.argmax(axis=0)
    return np.asarray(chosen.reshape(-1), np.int64)


def _enlarge(scores: Array, factor: int) -> Array:
    """Enlarge scores, [classes, height, width], as those who publish such networks do before they take the greatest.

    The interpolation is bilinear, with pixels as areas (align_corners=False), as in transformers: in what such networks
    are trained and judged by.
    """
    torch = import_library("torch")
    single = torch.from_numpy(np.ascontiguousarray(scores, np.float32))[None]
    sizes = [factor * size for size in scores.shape[1:]]
    enlarged = torch.nn.functional.interpolate(single, sizes, mode="bilinear", align_corners=False)
    return np.asarray(enlarged[0].numpy())


def _find_factor(output: Array, labels: Array) -> int | None:
    """Find the whole number by which height and width of labels are greater than those of scores; None without one."""
    if output.ndim != len("NCHW") or output.dtype.kind != "f" or 0 in output.shape:
        return None
    (height, width), places = output.shape[2:], _drop_one(labels.shape)[1:]
    factor = places[0] // height if len(places) == len("HW") else 0
    return factor if factor > 1 and places == (factor * height, factor * width) else None


def describe_other_size(output: Array, labels: Array) -> str:
    """Say that maps of classes have another size than those of the labels; empty where they fit, or are no maps."""
    whole = output.dtype.kind in _WHOLE
    mine = _drop_one(output.shape)[1:] if whole else output.shape[2:]
    theirs = _drop_one(labels.shape)[1:]
    if len(mine) != len("HW") or len(theirs) != len("HW") or mine == theirs or _find_factor(output, labels):
        return ""
    own, wanted = (f"{height} × {width}" for height, width in (mine, theirs))
    forms = "classes themselves at" if whole else "scores at a whole fraction of"
    return f"{forms} the size of the labels, which are of {wanted}, and the output is of {own}"


def _find_threshold(output: Array) -> float:
    """Find the number above which what a single one stands for is there: 0, and of probabilities one half."""
    return 0.5 if are_probabilities(output) else 0.0


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
    both, sides = counts.sum(axis=0, dtype=np.int64)
    return both[sides > 0], sides[sides > 0]


def _are_class_maps(output: Array, labels: Array) -> bool:
    """Tell whether there is a class for each place: [samples, classes, ...] and [samples, ...] or [samples, 1, ...].

    Whole numbers are the class itself for each place, or for each sample: [samples, ...] or [samples, 1, ...]. Scores
    of pictures may have a whole fraction of the labels' height and width.
    """
    if output.ndim == 0 or labels.ndim == 0 or not are_whole(labels):
        return False
    counted = labels[_is_counted(labels)]
    if output.dtype.kind in _WHOLE:
        same = _drop_one(output.shape)[1:] == _drop_one(labels.shape)[1:]
        few = counted.size > 0 and max(int(counted.max()), int(output.max())) < _MOST_CLASSES
        return same and few and int(output.min()) >= 0
    places = output.shape[2:]
    if output.ndim < len("NC"):
        return False
    if labels.shape[1:] not in (places, (1, *places)) and _find_factor(output, labels) is None:
        return False
    return counted.size > 0 and int(counted.max()) < max(2, output.shape[1])


def are_last(output: Array, labels: Array) -> bool:
    """Tell whether there are scores of classes for each step, the classes last, and one class for each step."""
    if output.ndim != len("NTC") or output.dtype.kind in _WHOLE or output.shape[2] < 2 or not are_whole(labels):
        return False
    counted = labels[_is_counted(labels)]
    return labels.shape[1:] == output.shape[1:2] and counted.size > 0 and int(counted.max()) < output.shape[2]


def _is_counted(labels: Array) -> NDArray[np.bool_]:
    return (labels >= 0) & ~np.isin(labels, _IGNORED)


def _drop_one(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without a second axis of length 1."""
    return (*shape[:1], *shape[2:]) if shape[1:2] == (1,) else shape


def _compute_auroc(joined: Array) -> float:
    """Compute the area below the ROC curve; of several classes the mean of each against the rest."""
    functional, torch = import_library("torchmetrics.functional.classification"), import_library("torch")
    scores, truth = torch.from_numpy(joined[:, :-1]), torch.from_numpy(joined[:, -1].astype(np.int64))
    if len(truth.unique()) < max(2, scores.shape[1]):
        return math.nan
    if scores.shape[1] > 2:
        ranks = torch.stack([_rank(column) for column in _find_odds(scores.double()).T], dim=1)
        return float(functional.multiclass_auroc(ranks, truth, scores.shape[1]))
    margin = scores[:, 0] if scores.shape[1] == 1 else scores[:, 1] - scores[:, 0]
    return float(functional.binary_auroc(_rank(margin), truth))


def _find_odds(scores: Any) -> Any:
    """Return what orders samples as the probability of each class does, also where that rounds to 1."""
    known = scores[scores.isfinite()]
    if float(known.min()) >= 0 and float(known.max()) <= 1:  # probabilities already
        return scores
    others = [scores.index_fill(1, scores.new_tensor([kind]).long(), -math.inf) for kind in range(scores.shape[1])]
    return scores - import_library("torch").stack([rest.logsumexp(1) for rest in others], dim=1)


def _rank(scores: Any) -> Any:
    """Replace scores by their ranks between 0 and 1, as no two of those become equal by rounding."""
    ranks = scores.unique(return_inverse=True)[1].double()
    return ranks / max(1.0, float(ranks.max()))


def _are_scores(output: Array, labels: Array) -> bool:
    """Tell whether there is a number or a number for each class, and one class for each sample."""
    if output.dtype.kind != "f" or not _are_single(labels):
        return False
    classes = max(2, output.size // max(1, len(output)))
    return output.ndim <= 2 and bool(labels.min() >= 0 and labels.max() < classes)


_LABELS = "and for each sample one class as a whole number, counted from 0"
_MAPS = (
    "an output of shape [samples, classes, ...], one class for one that is there or not, or the class itself for each "
    "place or sample; and for each of these a class as a whole number, counted from 0; negative ones, 255 and -100 do "
    "not count; scores may be at a whole fraction of the labels' height and width, to which they are enlarged"
)
METRICS: dict[str, OwnMetric] = {
    "top1": OwnMetric(
        partial(_find_among_greatest, count=1),
        _are_classes,
        f"an output of shape [samples, classes], or the class itself as a whole number, {_LABELS}",
        counts=True,
        guess=_share_of_commonest,
        worst=0.0,
    ),
    "top5": OwnMetric(
        partial(_find_among_greatest, count=5),
        _are_logits,
        f"scores of shape [samples, classes], {_LABELS}",
        counts=True,
        worst=0.0,
    ),
    "f1": OwnMetric(_count_by_class, _are_class_maps, _MAPS, _average_f1, worst=0.0),
    "miou": OwnMetric(_count_by_class, _are_class_maps, _MAPS, _average_iou, worst=0.0),
    "auroc": OwnMetric(
        append_labels,
        _are_scores,
        "an output with a score, or one for each class, and for each sample its class",
        _compute_auroc,
        worst=0.0,
    ),
}
"""Name → metric."""
OF_MAPS = ("f1", "miou")
"""Metrics that take a class for each place."""
