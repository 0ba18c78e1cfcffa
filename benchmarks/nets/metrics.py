"""Metrics for ``--metric FOLDER/metrics.py:NAME``: one number for each sample, more is better."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


def overlap(outputs: dict[str, Array], labels: Array) -> Array:
    """Intersection over union of the mask (logits above 0) and the true one, both [samples, 1, height, width]."""
    mask = _first(outputs) > 0
    truth = labels.astype(bool)
    both, either = (np.count_nonzero(found.reshape(len(truth), -1), axis=1) for found in (mask & truth, mask | truth))
    return np.asarray(both / np.maximum(either, 1))


def cosine(outputs: dict[str, Array], labels: Array) -> Array:
    """Cosine between each embedding and the one that it should be, both [samples, width]."""
    found, wanted = _first(outputs).astype(np.float64), labels.astype(np.float64)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    return np.asarray((found * wanted).sum(axis=1) / lengths)


def _first(outputs: dict[str, Array]) -> Array:
    return next(iter(outputs.values()))
