"""Metrics for ``--metric FOLDER/metrics.py:NAME``: one number for each sample, more is better."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
_TEXT = 0.3
"""Probability above which PaddleOCR counts a pixel as text (its DBPostProcess, thresh)."""


def overlap(outputs: dict[str, Array], labels: Array) -> Array:
    """Intersection over union of the mask (logits above 0) and the true one, both [samples, 1, height, width]."""
    mask = _first(outputs) > 0
    truth = labels.astype(bool)
    both, either = (np.count_nonzero(found.reshape(len(truth), -1), axis=1) for found in (mask & truth, mask | truth))
    return np.asarray(both / np.maximum(either, 1))


def cosine(outputs: dict[str, Array], labels: Array) -> Array:
    """Cosine between each embedding and the one that it should be; a sample's numbers are taken as one vector."""
    found, wanted = (array.reshape(len(labels), -1).astype(np.float64) for array in (_first(outputs), labels))
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    return np.asarray((found * wanted).sum(axis=1) / lengths)


def ranking(outputs: dict[str, Array], labels: Array) -> Array:
    """Spearman's correlation, for each embedding, of its similarities to all others with what they should be."""
    ranks = [
        (vectors @ vectors.T).argsort(axis=1).argsort(axis=1) - (len(labels) - 1) / 2
        for vectors in (_first(outputs).astype(np.float64), labels.astype(np.float64))
    ]
    lengths = np.linalg.norm(ranks[0], axis=1) * np.linalg.norm(ranks[1], axis=1)
    return np.asarray((ranks[0] * ranks[1]).sum(axis=1) / lengths)


def _first(outputs: dict[str, Array]) -> Array:
    return next(iter(outputs.values()))


def text_overlap(outputs: dict[str, Array], labels: Array) -> Array:
    """Intersection over union of the text found (probability above 0.3) and the original's, both [samples, 1, h, w]."""
    found, wanted = _first(outputs) > _TEXT, labels > _TEXT
    both, either = (np.count_nonzero(mask.reshape(len(found), -1), axis=1) for mask in (found & wanted, found | wanted))
    return np.asarray((both + 1) / (either + 1))


def same_text(outputs: dict[str, Array], labels: Array) -> Array:
    """Share of the positions whose most likely letter is the original's; outputs [samples, positions, letters]."""
    return np.asarray((_first(outputs).argmax(-1) == labels).mean(axis=1))


def psnr(outputs: dict[str, Array], labels: Array) -> Array:
    """Peak signal-to-noise ratio in dB of each picture, pixels from 0 to 1."""
    error = (_first(outputs).clip(0, 1) - labels).reshape(len(labels), -1).astype(np.float64)
    return np.asarray(-10 * np.log10((error**2).mean(axis=1) + 1e-12))


def closeness(outputs: dict[str, Array], labels: Array) -> Array:
    """1 less the relative error of each number, not below 0."""
    found = _first(outputs).reshape(-1).astype(np.float64)
    return np.asarray(np.maximum(0, 1 - np.abs(found / labels - 1)))


def mean_precision(outputs: dict[str, Array], labels: Array) -> float:
    """Mean average precision of boxes at overlaps of 0.5 to 0.95 (COCO's), after suppression of double boxes.

    Outputs [pages, 4 + classes, cells], boxes by center and extent; labels [pages, digits, 5]: class or -1, corners.
    """
    found = _first(outputs).astype(np.float64)
    half = found[:, 2:4] / 2
    corners = np.concatenate([found[:, :2] - half, found[:, :2] + half], 1).transpose(0, 2, 1)
    scores = []
    for number in range(found.shape[1] - 4):
        kept = [_suppress(*page) for page in zip(corners, found[:, 4 + number], strict=True)]
        truth = [page[page[:, 0] == number, 1:] for page in labels]
        scores += [_average_precision(kept, truth, overlap) for overlap in np.arange(0.5, 1, 0.05)]
    return float(np.mean(scores))


def _suppress(boxes: Array, scores: Array) -> tuple[Array, Array]:
    """Keep boxes of a score above 0.01 that overlap no better one by more than 0.6, best first."""
    order = [index for index in np.argsort(-scores, kind="stable") if scores[index] > 0.01]
    kept: list[int] = []
    overlaps = _overlaps(boxes, boxes)
    for index in order:
        if all(overlaps[index, other] <= 0.6 for other in kept):
            kept.append(int(index))
    return boxes[kept], scores[kept]


def _overlaps(some: Array, others: Array) -> Array:
    """Intersection over union of each box with each, [some, others]."""
    low, high = np.maximum(some[:, None, :2], others[None, :, :2]), np.minimum(some[:, None, 2:], others[None, :, 2:])
    both = np.prod(np.maximum(high - low, 0), axis=-1)
    areas = [np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0), axis=-1) for boxes in (some, others)]
    return np.asarray(both / np.maximum(areas[0][:, None] + areas[1][None] - both, 1e-9))


def _average_precision(kept: list[tuple[Array, Array]], truth: list[Array], least: float) -> float:
    """Area below precision over recall, at 101 recalls as COCO has it, of one class and one least overlap."""
    hits: list[tuple[float, bool]] = []
    for (boxes, scores), wanted in zip(kept, truth, strict=True):
        overlaps, taken = _overlaps(boxes, wanted), set[int]()
        for index, score in enumerate(scores):
            free = [number for number in range(len(wanted)) if number not in taken and overlaps[index, number] >= least]
            hits.append((float(score), bool(free)))
            if free:
                taken.add(max(free, key=lambda number: overlaps[index, number]))
    right = np.array([hit for _, hit in sorted(hits, key=lambda pair: -pair[0])], bool)
    count = sum(map(len, truth))
    recall, precision = np.cumsum(right) / max(count, 1), np.cumsum(right) / (np.arange(len(right)) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    places = np.searchsorted(recall, np.linspace(0, 1, 101))
    return float(np.mean([best[place] if place < len(best) else 0.0 for place in places]))


def close(outputs: dict[str, Array], labels: Array) -> Array:
    """1 less the largest distance from the original's probability, [samples, 1]."""
    return np.asarray(1 - np.abs(_first(outputs) - labels).max(axis=1), np.float64)
