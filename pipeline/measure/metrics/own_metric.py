"""Describe a metric: what judges an output by labels, and what it accepts."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from enginesmith.calibration.dataset import Labels
from enginesmith.pipeline.errors import MissingCapability, install_command
from enginesmith.pipeline.measure.statistics import NORMAL, Samples
from enginesmith.pipeline.tensors import Array, Feeds

LABELS_DOUBT = "labels may not belong to the samples (their order, or how classes are numbered)"
"""What is likely where a reference has no right answer, or fewer than chance would have."""

_ROUNDING = 0.01
"""Distance from 0 and 1 up to which numbers are probabilities, which engines round in a low precision."""


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
    join: Callable[[Feeds, Labels, Sequence[str]], tuple[Feeds, Labels]] | None = None
    """Joins outputs, and arrays of labels, that are judged together: those of these names, or of the only forms that
    fit. The joined one comes first, as ``FIRST,SECOND``; where there are none, all stay as they are."""
    explain_join: Callable[[str], str] | None = None
    """Says of a joined output what was assumed, as the metric named no outputs; empty where that is clear."""
    suits: Callable[[Array, Array], bool] | None = None
    """Tells whether to suggest it for an output and labels; None where that is whenever it accepts them."""
    settle: Callable[[str, Array, Array], str] | None = None
    """(its name, the reference's output, the labels of all samples) → its name with what that leaves open; None where
    that is nothing."""
    worst: float | None = None
    """Value that is reached without a right answer, or the first of such values; None where there is none."""
    doubt: str = LABELS_DOUBT
    """Says what is likely where a reference reaches no more than that."""
    rows_vary: bool = False
    """True where samples may have different numbers of rows: rows of zeros, which do not count, fill up the fewer."""
    chooses_tokens: bool = False
    """True where the best of a sample's tokens are the answer: what only fills up a text is none of them."""

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
        drop, half = self.sign * (theirs - ours), NORMAL * float(np.std(drops, ddof=1))
        return drop - half, drop + half


def put_first(outputs: Feeds, names: Sequence[str], joined: Array) -> Feeds:
    """Replace the outputs of these names by what they were joined to, which comes first: ``FIRST,SECOND``."""
    return {",".join(names): joined} | {key: array for key, array in outputs.items() if key not in names}


def import_library(name: str) -> Any:
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


def flatten_samples(array: Array) -> NDArray[np.float64]:
    """Make one row of numbers of each sample, [samples, numbers]."""
    return array.astype(np.float64).reshape(len(array), -1)


def append_labels(output: Array, labels: Array) -> Array:
    """Put an output's numbers and the label of each sample side by side, [samples, numbers + 1]."""
    return np.concatenate([flatten_samples(output), flatten_samples(labels)], axis=1)


def are_whole(labels: Array) -> bool:
    """Tell whether there are labels, and all of them whole numbers."""
    return labels.dtype.kind in "biuf" and labels.size > 0 and bool((labels == np.round(labels)).all())


def are_binary(labels: Array) -> bool:
    """Tell whether there are labels, and all of them 0 or 1."""
    return labels.dtype.kind in "biuf" and labels.size > 0 and bool(((labels == 0) | (labels == 1)).all())


def are_probabilities(numbers: Array) -> bool:
    """Tell whether there are numbers, and all of them from 0 to 1, but for rounding."""
    return bool(numbers.size and numbers.min() >= -_ROUNDING and numbers.max() <= 1 + _ROUNDING)


def are_alike(output: Array, labels: Array) -> bool:
    """Tell whether samples have the same shape on both sides, axes of length 1 aside, and labels are numbers."""
    mine, theirs = ([size for size in array.shape[1:] if size != 1] for array in (output, labels))
    return mine == theirs and labels.dtype.kind in "biuf"
