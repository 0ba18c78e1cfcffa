"""Judge numbers, rankings of them, and pictures."""

import numpy as np

from enginesmith.pipeline.measure.metrics.own_metric import (
    OwnMetric,
    append_labels,
    are_alike,
    are_binary,
    are_whole,
    flatten_samples,
    import_library,
)
from enginesmith.pipeline.measure.statistics import Samples
from enginesmith.pipeline.tensors import Array

_BYTE = 255.0
_SSIM_EDGE = 11
"""Pixels of the window of SSIM (Wang et al., 2004)."""


_MOST_OF_ONE = 2.0
"""Largest value of pictures from 0 to 1, where resizing goes beyond the ends a little."""


def _compute_mse(output: Array, labels: Array) -> Samples:
    return np.asarray(((flatten_samples(output) - flatten_samples(labels)) ** 2).mean(axis=1))


def _compute_psnr(output: Array, labels: Array) -> Samples:
    """Compute the peak signal-to-noise ratio of each picture in dB, what is outside of the pixels' range cut off."""
    peak = _peak(labels)
    error = ((flatten_samples(output).clip(0, peak) - flatten_samples(labels)) ** 2).mean(axis=1)
    return np.asarray(10 * np.log10(peak**2 / np.maximum(error, 1e-10 * peak**2)))


def _are_quantities(output: Array, labels: Array) -> bool:
    """Tell whether labels are of the output's shape, and not whether something is there or not."""
    return are_alike(output, labels) and not are_binary(labels)


def _peak(labels: Array) -> float:
    """Return the largest value that a pixel can have: 1, which resized pictures may exceed a little, or 255."""
    return 1.0 if labels.dtype.kind == "f" and labels.max() <= _MOST_OF_ONE else _BYTE


def _compute_ssim(output: Array, labels: Array) -> Samples:
    """Compute the structural similarity of each picture (Wang et al., IEEE Trans. Image Processing 13, 2004)."""
    functional, torch = import_library("torchmetrics.functional.image"), import_library("torch")
    peak = _peak(labels)
    sides = [torch.from_numpy(array.astype(np.float64)) for array in (output.clip(0, peak), labels)]
    sides[1] = sides[1].reshape(sides[0].shape)
    return np.asarray(functional.structural_similarity_index_measure(*sides, data_range=peak, reduction="none"))


def _are_pictures(output: Array, labels: Array) -> bool:
    large = output.ndim == len("NCHW") and min(output.shape[2:]) >= _SSIM_EDGE
    return large and are_alike(output, labels) and bool(labels.min() >= 0 and labels.max() <= _BYTE)


def _correlate_ranks(joined: Array) -> float:
    """Compute Spearman's correlation of answers and labels, over all samples."""
    functional, torch = import_library("torchmetrics.functional.regression"), import_library("torch")
    return float(functional.spearman_corrcoef(*torch.from_numpy(joined).unbind(1)))


def _are_numbers(output: Array, labels: Array) -> bool:
    """Tell whether there is one number for each sample on both sides; of outputs there may be fewer samples."""
    single = output.size == len(output) and labels.size == len(labels)
    return output.dtype.kind == "f" and single and labels.dtype.kind in "biuf"


def _compute_ndcg(output: Array, labels: Array) -> Samples:
    """Compute the normalized discounted cumulative gain of each query (Järvelin and Kekäläinen, 2002)."""
    functional, torch = import_library("torchmetrics.functional.retrieval"), import_library("torch")
    pairs = zip(output.astype(np.float64), labels.reshape(output.shape).astype(np.int64), strict=True)
    score = functional.retrieval_normalized_dcg
    return np.asarray([float(score(torch.from_numpy(scores), torch.from_numpy(gains))) for scores, gains in pairs])


def _are_relevances(output: Array, labels: Array) -> bool:
    scores = output.ndim == 2 and output.dtype.kind == "f"
    return scores and are_alike(output, labels) and are_whole(labels) and bool(labels.min() >= 0)


_PICTURES = "pictures of shape [samples, channels, height, width] from 0 to 1 or 255, 11 pixels or more along each edge"
METRICS: dict[str, OwnMetric] = {
    "mse": OwnMetric(
        _compute_mse, are_alike, "an output and labels of the same shape", sign=-1.0, suits=_are_quantities
    ),
    "psnr": OwnMetric(_compute_psnr, _are_pictures, _PICTURES),
    "ssim": OwnMetric(_compute_ssim, _are_pictures, _PICTURES),
    "spearman": OwnMetric(
        append_labels, _are_numbers, "one number for each sample, and one as its label", _correlate_ranks, worst=-1.0
    ),
    "ndcg": OwnMetric(
        _compute_ndcg,
        _are_relevances,
        "scores of shape [queries, documents], and relevances as whole numbers from 0",
        worst=0.0,
    ),
}
"""Name → metric."""
