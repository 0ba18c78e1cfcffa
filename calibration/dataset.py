"""Sets of samples: what a model is calibrated and evaluated on."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from enginesmith.calibration.checks import checked
from enginesmith.calibration.forms import Split, read, read_embedded
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import Array, Feeds, TensorSpec

__all__ = ["Dataset", "Split", "embedded", "open_dataset", "synthetic"]

_HASHED_AT_ONCE_BYTES = 16 << 20
_OWN = "give data of your own"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Named arrays whose first axis is the sample, aligned row by row with each other and with the labels."""

    name: str
    arrays: Feeds
    labels: Array | None = None

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the names, dtypes, shapes and bytes of all arrays; the order of the names does not matter."""
        total = hashlib.sha256()
        parts = [(f"input {name}", self.arrays[name]) for name in sorted(self.arrays)]
        for name, array in [*parts, *([] if self.labels is None else [("labels", self.labels)])]:
            total.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
            for rows in _chunks(array):
                total.update(np.ascontiguousarray(rows).tobytes())
        return total.hexdigest()

    def batch(self, start: int, size: int) -> Feeds:
        """``size`` rows from row ``start`` on; after the last row comes the first again."""
        first = start % len(self)
        if first + size <= len(self):
            return {name: np.ascontiguousarray(array[first : first + size]) for name, array in self.arrays.items()}
        return self._rows(np.arange(first, first + size) % len(self))

    def sample(self, count: int, seed: int) -> "Dataset":
        """``count`` rows drawn without replacement and kept in order, each class in proportion to its share.

        Classes are the values of one-dimensional integer labels; without such labels every row is as likely. All rows
        are kept when there are no more than ``count``.

        Raises:
            DataError: ``count`` is less than one.
        """
        if count < 1:
            raise DataError(f"{count} samples of {self.name} are asked for", "ask for at least one")
        if count >= len(self):
            return self
        rng = np.random.default_rng(seed)
        classes = np.zeros(len(self), np.int64)
        if self.labels is not None and self.labels.ndim == 1 and self.labels.dtype.kind in "iu":
            classes = np.unique(self.labels, return_inverse=True)[1]
        rows = np.sort(_stratified(classes, count, rng))
        labels = None if self.labels is None else self.labels[rows]
        return Dataset(f"{self.name} ({count} of {len(self)}, seed {seed})", self._rows(rows), labels)

    def _rows(self, rows: Array) -> Feeds:
        return {name: np.asarray(array[rows]) for name, array in self.arrays.items()}


def embedded(name: str, split: Split) -> Dataset:
    """A split of a set that comes with enginesmith: ``digits``, images of 1×8×8 from 0 to 1 with int64 labels.

    Raises:
        DataError: there is no such set.
    """
    arrays = dict(read_embedded(name, split))
    labels = arrays.pop("labels")
    return Dataset(f"{name}/{split}", arrays, labels)


def open_dataset(
    reference: str, inputs: Sequence[TensorSpec], *, labels: str = "labels", split: Split = "calibration"
) -> Dataset:
    """The data that ``reference`` names, held against the model's inputs.

    Args:
        reference: an embedded set (``digits``, ``digits/test``) or a file: ``.npz``, ``.npy``, ``.safetensors``.
        inputs: what the model takes; float64 and int32 data are cast where it takes float32 and int64.
        labels: the array that holds the labels, if there is one of that name.
        split: what an embedded set without a split means.

    Raises:
        DataError: not found, not readable, or not what the model takes.
    """
    name, arrays = read(reference, inputs, split)
    feeds = checked(name, {key: value for key, value in arrays.items() if key != labels or _takes(inputs, key)}, inputs)
    given = None if _takes(inputs, labels) else arrays.get(labels)
    rows = len(next(iter(feeds.values())))
    if given is not None and (given.ndim == 0 or len(given) != rows):
        raise DataError(
            f"{name}: {labels!r} has the shape {list(given.shape)}, and the inputs have {rows} rows",
            "give one label for each row",
        )
    return Dataset(name, feeds, given)


def synthetic(inputs: Sequence[TensorSpec], example: Feeds, sizes: Mapping[str, int], count: int, seed: int) -> Dataset:
    """``count`` rows that look like the example: for models that come without data.

    Floats are normal with the example's mean and standard deviation; integers and bools are drawn from its values, as
    often as they occur. The first axis is the batch; ``sizes`` gives the other dynamic dimensions.

    Raises:
        DataError: an input has no batch axis, or its example is empty or not finite.
        SignatureError: a dynamic dimension has no size.
    """
    rng = np.random.default_rng(seed)
    arrays = {spec.name: _like(spec, example[spec.name], sizes, count, rng) for spec in inputs}
    return Dataset(f"synthetic ({count} rows, seed {seed})", arrays)


def _like(spec: TensorSpec, example: Array, sizes: Mapping[str, int], count: int, rng: np.random.Generator) -> Array:
    if not spec.shape or not example.size:
        raise DataError(f"no rows can be made up for the input {spec}: it has no batch axis or an empty example", _OWN)
    shape = (count, *spec.model_copy(update={"shape": spec.shape[1:]}).resolve(sizes))
    if spec.dtype == "bool" or "int" in spec.dtype:
        return rng.choice(example.ravel(), shape)
    values = example.astype(np.float64)
    if not np.isfinite(values).all():
        raise DataError(f"the example of the input {spec} holds NaN or infinity", _OWN)
    rows = rng.standard_normal(shape, np.float32)
    rows *= np.float32(values.std())
    rows += np.float32(values.mean())
    return rows.astype(example.dtype, copy=False)


def _stratified(classes: Array, count: int, rng: np.random.Generator) -> Array:
    """Row numbers; shares are rounded by the largest remainder, so that they add up to ``count``."""
    sizes = np.bincount(classes)
    shares = sizes * count / len(classes)
    quota = np.floor(shares).astype(np.int64)
    short = np.argsort(quota - shares, kind="stable")[: count - quota.sum()]
    quota[short] += 1
    drawn = [rng.choice(np.flatnonzero(classes == label), quota[label], replace=False) for label in range(len(sizes))]
    return np.concatenate(drawn)


def _chunks(array: Array) -> list[Array]:
    """The array in pieces of about 16 MiB, so that a memory-mapped file is never in memory as a whole."""
    if array.ndim == 0:
        return [array]
    step = max(1, _HASHED_AT_ONCE_BYTES // max(1, array[:1].nbytes))
    return [array[start : start + step] for start in range(0, len(array), step)]


def _takes(inputs: Sequence[TensorSpec], name: str) -> bool:
    return any(spec.name == name for spec in inputs)
