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


def close(outputs: dict[str, Array], labels: Array) -> Array:
    """1 less the largest distance from the original's probability, [samples, 1]."""
    return np.asarray(1 - np.abs(_first(outputs) - labels).max(axis=1), np.float64)
