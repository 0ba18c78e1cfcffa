"""Open sets of samples, which a model is calibrated and evaluated on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar, get_args

import numpy as np

from enginesmith.calibration.file_formats import (
    LABELS,
    LIKELY_LABELS,
    check_arrays,
    check_labels,
    check_shared,
    check_variety,
    check_zeros,
    find_missing,
    has_splits,
    read,
    read_embedded,
)
from enginesmith.calibration.lazy_arrays import Rows, digest, pick
from enginesmith.calibration.masks import BINARY_MASKS, are_binary_masks
from enginesmith.calibration.options import AS_FOUND, DataOptions, PartName, PartOptions
from enginesmith.calibration.ranges import Provenance
from enginesmith.calibration.sources import RawData, Request, Split
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import Array, Feeds, InputChoice, TensorSpec, rows_first, split_inputs
from enginesmith.pipeline.units import name_some

__all__ = ["DataOptions", "Dataset", "Split", "embedded", "open_dataset", "synthetic", "validate_for_calibration"]

Labels = Array | Mapping[str, Array]
"""One array, or several by name; the first axis of each is the sample."""
Drawing = Literal["like", "within", "repeat"]
"""Ways to make rows of an example: ``like`` it; floats ``within`` its least and greatest, and whole numbers as rows of
its own; or ``repeat`` its rows."""
DRAWINGS: tuple[Drawing, ...] = get_args(Drawing)
"""In the order in which they are tried: what comes later is closer to the example."""
_T = TypeVar("_T")
_OWN = "give data of your own"
_SPLIT_SEED = 0
"""Whatever the recipe's seed is, a sample stays in its part."""
_LEAST_IN_PART = 8
"""Fidelity is judged on as many; fewer tell nothing of a metric either."""
_MOST_COMPARED = 1 << 16
_MOST_NAMED = 8


def count_rows(labels: Labels) -> int:
    """Count the samples that have labels."""
    return len(next(iter(labels.values()))) if isinstance(labels, Mapping) else len(labels)


def take_labels(labels: Labels, rows: slice | Array) -> Labels:
    """Take the labels of these rows."""
    return {key: array[rows] for key, array in labels.items()} if isinstance(labels, Mapping) else labels[rows]


def find_missing_labels(labels: Labels) -> Array:
    """Find the rows whose labels have NaN or infinity."""
    arrays = labels.values() if isinstance(labels, Mapping) else [labels]
    rows = [np.argwhere(~np.isfinite(array))[:, 0] for array in arrays if array.dtype.kind == "f"]
    return np.unique(np.concatenate([np.empty(0, np.int64), *rows]))


def assign_labels(
    labels: Mapping[str, _T] | _T | None, outputs: Sequence[str], labeled: str | None = None
) -> dict[str, _T]:
    """Find the labels of each output that has some: of several arrays, those of its name.

    One array belongs to the ``labeled`` output, or to the first.
    """
    if isinstance(labels, Mapping):
        return {name: labels[name] for name in outputs if name in labels}
    return {} if labels is None else {labeled or outputs[0]: labels}


def describe_arrays(arrays: Feeds) -> str:
    """Describe arrays for people: ``'score' float32[64], 'category' float32[64, 5]``."""
    return ", ".join(f"{name!r} {array.dtype}{list(array.shape)}" for name, array in arrays.items())


def describe_labels(labels: Labels) -> str:
    """Describe labels likewise: ``int64[64] from 0 to 4``."""
    if isinstance(labels, Mapping):
        return describe_arrays(labels)
    if labels.dtype.kind in "US":
        return f"texts{list(labels.shape)}"
    span = f" from {labels.min()} to {labels.max()}" if labels.size and labels.dtype.kind in "iu" else ""
    return f"{labels.dtype}{list(labels.shape)}{span}"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Named arrays whose first axis is the sample, aligned row by row with each other and with the labels.

    Arrays may be in memory, mapped from files, or made row by row when they are indexed.
    """

    name: str
    arrays: Mapping[str, Rows]
    labels: Labels | None = None
    """Several arrays where several were named."""
    notes: tuple[str, ...] = ()
    """Notes for people: how rows were made of what was given, and what is odd about them."""
    synthetic: bool = False
    missing: Mapping[str, int] = field(default_factory=dict)
    """Inputs that have NaN, and the first row of the whole set in which they do."""
    folders: tuple[Path, ...] = ()
    """Folders that were read as a whole."""
    drawn: Array | None = None
    """Row numbers in ``source``; None for all of them."""
    source: "Dataset | None" = None
    """The set that this one was drawn from."""
    parts: Mapping[PartName, Array] = field(default_factory=dict)
    """Row numbers in ``source`` of each part, where the set is a part of it."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Dimension of the batch in each of the model's inputs, in their order."""
    shared: Mapping[str, Array] = field(default_factory=dict)
    """Inputs without a batch, which are fed whole with all samples."""
    class_names: Mapping[int, str] = field(default_factory=dict)
    """Names by label, where classes were numbered in the order of their names: see :meth:`number_words`."""

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the names, dtypes, shapes and bytes of all arrays; the order of the names does not matter.

        For what is decoded row by row, the bytes of the files and the way they are decoded stand in.
        """
        inputs = {**self.arrays, **{name: np.atleast_1d(value) for name, value in self.shared.items()}}
        named: list[tuple[str, Rows]] = [(f"input {name}", inputs[name]) for name in sorted(inputs)]
        labels = self.labels if isinstance(self.labels, Mapping) else {"": self.labels}
        given = [(f"labels {key}".strip(), labels[key]) for key in sorted(labels)]
        return digest([*named, *((name, array) for name, array in given if array is not None)])

    @property
    def one_label(self) -> Array | None:
        """The labels, where they are one array of numbers."""
        labels = self.labels
        return None if labels is None or isinstance(labels, Mapping) or labels.dtype.kind not in "biuf" else labels

    @property
    def number_labels(self) -> Labels | None:
        """The labels, one array or several by name, as far as they are numbers; None where there are none."""
        if isinstance(self.labels, Mapping):
            return {name: array for name, array in self.labels.items() if array.dtype.kind in "biuf"} or None
        return self.one_label

    @property
    def class_labels(self) -> Array | None:
        """The labels, where they are one whole number for each sample."""
        labels = self.one_label
        return labels if labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu" else None

    @property
    def classes(self) -> Array:
        """The samples' classes, counted from 0; one class for all where the labels are none."""
        labels = self.class_labels
        return np.zeros(len(self), np.int64) if labels is None else np.unique(labels, return_inverse=True)[1]

    @property
    def whole(self) -> "Dataset":
        """The set that the samples were drawn from."""
        return self if self.source is None else self.source

    @property
    def rows(self) -> tuple[int, ...]:
        """Indices of the samples in the whole set."""
        return tuple(range(len(self)) if self.drawn is None else self.drawn.tolist())

    def provenance(self, seed: int, batch: int) -> Provenance:
        """Identify the samples and their data, so that others take the same ones."""
        whole = self.whole
        return Provenance(
            data=whole.name, digest=whole.digest, rows=self.rows, seed=seed, batch=batch, synthetic=self.synthetic
        )

    def batch(self, start: int, size: int) -> dict[str, Array]:
        """Feed ``size`` rows from row ``start`` on; after the last row comes the first again."""
        first = start % len(self)
        rows: slice | Array = slice(first, first + size)
        if first + size > len(self):
            rows = np.arange(first, first + size) % len(self)
        return self.feed(rows)

    def feed(self, rows: slice | Array) -> dict[str, Array]:
        """Make feeds of these rows, each along the batch of its input."""
        feeds = {
            name: np.moveaxis(np.asarray(array[rows]), 0, self.axes.get(name, 0)) for name, array in self.arrays.items()
        }
        feeds |= self.shared
        # Mapped rows are read-only, and they lie at any address; engines want neither.
        return {name: np.require(feeds[name], None, ("C", "A", "W")) for name in self.axes or feeds}

    def sample(self, count: int, seed: int) -> "Dataset":
        """Draw ``count`` rows without replacement, and keep them in order, each class in proportion to its share.

        Classes are the values of one-dimensional integer labels; without such labels every row is as likely. All rows
        are kept when there are no more than ``count``; that there are fewer is noted.

        Raises:
            DataError: ``count`` is less than one.
        """
        if count < 1:
            raise DataError(f"{count} samples of {self.name} are asked for", "ask for at least one")
        if count == len(self):
            return self
        if count > len(self):
            note = f"{count} samples are asked for, and {self.name} has {len(self)}"
            return replace(self, notes=(*self.notes, note), source=self.whole)
        rows = np.sort(_draw_stratified(self.classes, count, np.random.default_rng(seed)))
        return self.take(rows, f"{self.name} ({count} of {len(self)}, seed {seed})")

    def number_words(self, names: Sequence[str]) -> "Dataset":
        """Number labels that are words as the model numbers its classes of these ``names``, and note how it is done.

        Upper and lower case are alike. Where there are no names, or no word is one, the alphabetical order stays.

        Raises:
            DataError: some words are names of the model's classes, and others are not, or of several.
        """
        if not self.class_names:
            return self
        numbers, note = _match_words(self.name, [*self.class_names.values()], names)

        def settle(data: Dataset) -> Dataset:
            data = replace(data, notes=(*data.notes, note))
            if numbers is None:
                return data
            labels: Labels | None = data.labels
            if isinstance(labels, Mapping):
                labels = {key: numbers[array] for key, array in labels.items()}
            elif labels is not None:
                labels = numbers[labels]
            return replace(data, labels=labels, class_names={})

        return replace(settle(self), source=None if self.source is None else settle(self.source))

    def take(self, rows: Array, name: str) -> "Dataset":
        """Return these rows, in this order, as a set of their own."""
        return replace(
            self,
            name=name,
            arrays={name: pick(array, rows) for name, array in self.arrays.items()},
            labels=None if self.labels is None else take_labels(self.labels, rows),
            drawn=rows if self.drawn is None else self.drawn[rows],
            source=self.whole,
        )


def embedded(name: str, split: Split) -> Dataset:
    """Open a split of a set that comes with enginesmith: ``digits``, images of 1×8×8 from 0 to 1 with int64 labels.

    Raises:
        DataError: there is no such set.
    """
    arrays = read_embedded(name, split)
    labels = arrays.pop("labels")
    return Dataset(f"{name}/{split}", arrays, labels)


def open_dataset(
    reference: str,
    inputs: Sequence[TensorSpec],
    *,
    split: Split = "calibration",
    options: DataOptions = AS_FOUND,
    choose: InputChoice | None = None,
) -> Dataset:
    """Open the data that ``reference`` names, and check it with the model's inputs.

    Args:
        reference: an embedded set (``digits``, ``digits/test``), a file (``.npz``, ``.npy``, ``.safetensors``,
            ``.jsonl``), a folder of images, or ``module:function`` or ``file.py:function``, which is called.
        inputs: what the model takes; floats are cast to its floats and integers to its integers where nothing is lost,
            and float64 to float32. The samples come first in the data, also where the batch is another dimension of an
            input. Inputs without a batch are given once for all samples, with the shape that the model takes.
        split: what an embedded set without a split means.
        options: how images and texts are made into arrays, and which array holds the labels.
        choose: chooses other inputs than ``inputs``, where the model can do with others.

    Raises:
        DataError: not found, not readable, or not what the model takes.
        MissingCapability: the form of the data needs a package that is not installed.
    """
    rowed, shared = split_inputs(inputs)
    raw = read(reference, Request([*(spec.as_row for spec in rowed), *shared], split, options))
    if choose:
        inputs = choose(_describe_arrays(raw, options))
        rowed, shared = split_inputs(inputs)
    axes, inputs = find_axes(inputs), [spec.as_row for spec in rowed]
    arrays = dict(raw.arrays)
    own: dict[str, Rows] = {} if raw.labels is None else {LABELS: raw.labels}
    if not own:
        free = arrays.keys() - {spec.name for spec in [*inputs, *shared]}
        own = {key: arrays.pop(key) for key in options.label_keys or [LABELS] if key in free}
        missing = [key for key in options.label_keys if key not in own]
        if missing and split == "test":
            raise _explain_missing_labels(raw, missing[0], raw.label_keys or [key for key in raw.arrays if key in free])
    whole = {spec.name: check_shared(raw.name, spec, arrays.pop(spec.name)) for spec in shared if spec.name in arrays}
    missed = [spec for spec in shared if spec.name not in whole]
    feeds = check_arrays(raw.name, arrays, [*inputs, *missed], [*own], free_inputs=choose is not None)
    rows = len(next(iter(feeds.values())))
    checked = {key: check_labels(raw.name, key, array, rows) for key, array in own.items()}
    binary = [key for key, labels in checked.items() if raw.labels is None and are_binary_masks(labels)]
    checked |= {key: (checked[key] != 0).astype(np.uint8) for key in binary}
    held = checked if len(options.label_keys) > 1 and checked else next(iter(checked.values()), None)
    gaps = find_missing(raw.name, feeds)
    nan_notes = (
        f"{name!r} has NaN in {len(those)} of {rows} rows of {raw.name}: the model is given them as they are"
        for name, those in gaps.items()
    )
    label_notes = (
        f"{key!r} has NaN or infinity in {len(those)} of {rows} rows of {raw.name}, first in row {those[0]}: "
        "calibration takes these samples, as it needs no labels; a metric of enginesmith's does not"
        for key, array in checked.items()
        if (those := find_missing_labels(array)).size
    )
    notes = (*raw.notes, *check_zeros(raw.name, feeds), *nan_notes, *label_notes)
    notes += tuple(f"{key!r}: {BINARY_MASKS}" for key in binary)
    first = {name: int(those[0]) for name, those in gaps.items()}
    data = Dataset(
        raw.name,
        feeds,
        held,
        notes,
        missing=first,
        folders=raw.folders,
        axes=axes,
        shared=whole,
        class_names=raw.class_names,
    )
    return take_part(data, options, splits=has_splits(reference)) if isinstance(options, PartOptions) else data


def _describe_arrays(raw: RawData, options: DataOptions) -> list[TensorSpec]:
    """Describe the arrays that may be inputs: all that neither are labels nor are likely to be."""
    labels = {*options.label_keys, *LIKELY_LABELS}
    found = {name: array for name, array in raw.arrays.items() if name not in labels}
    return [TensorSpec(name=name, dtype=str(each.dtype), shape=tuple(each.shape)) for name, each in found.items()]


def _explain_missing_labels(raw: RawData, key: str, others: Sequence[str]) -> DataError:
    """Explain that labels of a name are not there; ``others`` are keys or arrays that may be labels."""
    message = f"{raw.name} has no labels {key!r}"
    if not others:
        return DataError(f"{message}, and nothing else that may be labels", "add labels of that name, or omit --labels")
    what = "the keys of its lines are" if raw.label_keys else "its arrays, besides the inputs, are"
    several = "" if raw.label_keys else ", several as --labels A,B"
    return DataError(
        f"{message}; {what} {', '.join(map(repr, others))}",
        f"name the one that holds labels with --labels{several}, or omit it",
    )


def take_part(data: Dataset, options: PartOptions, *, splits: bool) -> Dataset:
    """Take the rows of one part; of an embedded set, which comes in ``splits``, calibration has one of its own.

    Raises:
        DataError: there are too few samples to split.
    """
    sharing = [name for name in options.shared_by if not (splits and name == "calibration")]
    if options.part not in sharing:
        return data
    parts = split_rows(data, sharing, options.calibration_samples)
    rows = parts[options.part]
    return replace(data.take(rows, f"{data.name} ({options.part}: {len(rows)} of {len(data)})"), parts=parts)


def split_rows(data: Dataset, sharing: Sequence[PartName], most: int | None) -> dict[PartName, Array]:
    """Split the rows of a set, each class in proportion to its share: the same set is always split in the same way.

    Calibration gets ``most`` rows, at most an equal share. Choice and judgement get half of the others each: the drop
    that was searched for and the drop that is reported then differ least by chance, as the variance of the difference
    is in proportion to 1 / choice + 1 / judgement.

    Raises:
        DataError: there are too few samples.
    """
    count, needed = len(data), _LEAST_IN_PART * len(sharing)
    if count < needed:
        raise DataError(
            f"{data.name} has {count} samples, and {needed} are needed: {_LEAST_IN_PART} each for {', '.join(sharing)}",
            "give more samples, or data for each use: --calibration DATA and --eval DATA",
        )
    rng, classes = np.random.default_rng(_SPLIT_SEED), data.classes
    left, parts = np.arange(count), dict[PartName, Array]()
    for index, name in enumerate(sharing):
        equal = len(left) // (len(sharing) - index)
        size = min(most or equal, equal) if name == "calibration" else equal
        parts[name] = rng.permutation(left[_draw_stratified(classes[left], size, rng)])
        left = np.setdiff1d(left, parts[name])
    return parts


def count_parts(data: Dataset, reference: str, options: PartOptions) -> dict[str, int]:
    """Count the samples of each part of the data that ``data`` is a part of."""
    own = [name for name in options.shared_by if name not in data.parts]  # what an embedded set has a split for
    counts: dict[str, int] = {name: len(embedded(reference, "calibration")) for name in own}
    return counts | {name: len(rows) for name, rows in data.parts.items()}


def check_parts(data: Dataset) -> tuple[str, ...]:
    """Note what makes the parts of a set tell less than they seem to: copies of samples, and classes that are too rare.

    Copies are looked for in up to 65,536 samples of at most 1 GiB.
    """
    whole, notes = data.whole, list[str]()
    arrays = sorted(whole.arrays.items())
    if len(whole) <= _MOST_COMPARED and sum(array.size * array.dtype.itemsize for _, array in arrays) <= 1 << 30:
        rows = ([(name, pick(array, np.array([row]))) for name, array in arrays] for row in range(len(whole)))
        if copies := len(whole) - len(set(map(digest, rows))):
            notes.append(f"{copies} of {len(whole)} samples of {whole.name} are copies of others: parts may share them")
    if (labels := whole.class_labels) is not None:
        sizes = np.unique(labels, return_counts=True)[1]
        if len(sizes) == 1:
            notes.append(f"all samples of {whole.name} have the label {labels[0]}: no metric tells models apart")
        elif rare := int((sizes < len(data.parts)).sum()):
            notes.append(f"{rare} of {len(sizes)} classes of {whole.name} have too few samples to be in every part")
    return tuple(notes)


def validate_for_calibration(data: Dataset) -> Dataset:
    """Validate that a set has values to take ranges from, and note what is odd about it.

    Raises:
        DataError: every sample is the same.
    """
    return replace(data, notes=(*data.notes, *check_variety(data.name, data.arrays)), source=data.whole)


def synthetic(
    inputs: Sequence[TensorSpec],
    example: Feeds,
    sizes: Mapping[str, int],
    count: int,
    seed: int,
    drawing: Drawing = "like",
    first: int | None = None,
    tables: Mapping[str, int] = MappingProxyType({}),
) -> Dataset:
    """Make ``count`` rows that look like the example: for models that come without data.

    Floats are normal with the example's mean and standard deviation; integers and bools are drawn from its values, as
    often as they occur, but for a value that is at the same places in all of its samples, such as the token that ends a
    text: it stays there. An input of one number for each row that is an index of one of the ``tables``, as the token of
    a decoding step is, is drawn from all of that table's rows, since an example tells next to nothing of it. ``sizes``
    gives the dynamic dimensions besides the batch.

    For models that do not take such rows, floats are ``within`` the example's least and greatest instead, and all that
    is no float is the example's own, row after row from the row ``first`` on, by default :func:`find_longest`: those of
    one sample stay together. Or floats are its own likewise (``repeat``).

    Raises:
        DataError: an input has no batch axis, or its example is empty or not finite.
        SignatureError: a dynamic dimension has no size.
    """
    rng = np.random.default_rng(seed)
    rowed, shared = split_inputs(inputs)
    rows = rows_first(example, rowed)
    own = np.arange(count) + (find_longest(inputs, example) if first is None else first)
    arrays = {spec.name: _draw(spec.as_row, rows[spec.name], sizes, own, rng, drawing, tables) for spec in rowed}
    name, whole = f"synthetic ({count} rows, seed {seed})", {spec.name: example[spec.name] for spec in shared}
    return Dataset(name, arrays, synthetic=True, axes=find_axes(inputs), shared=whole)


def find_longest(inputs: Sequence[TensorSpec], example: Feeds) -> int:
    """Find the example's row of the greatest length, where an input has one whole number for each row; else the first.

    The sizes of other inputs may be right for no others alone.
    """
    values = (example[spec.name] for spec in split_inputs(inputs)[0] if "int" in spec.dtype)
    return next((int(value.argmax()) for value in values if value.size == max(value.shape, default=0) > 0), 0)


def find_axes(inputs: Sequence[TensorSpec]) -> dict[str, int]:
    """Find the dimension of the batch in each input."""
    return {spec.name: spec.batch_axis for spec in inputs}


def _draw(
    spec: TensorSpec,
    example: Array,
    sizes: Mapping[str, int],
    own: Array,
    rng: np.random.Generator,
    drawing: Drawing,
    tables: Mapping[str, int],
) -> Array:
    """Draw as many rows as ``own`` has numbers: those of the example's rows that are taken where none are made."""
    empty = 0 in spec.shape
    if not spec.shape or not (empty or example.size):
        raise DataError(
            f"no random rows can be made for the input {spec}: it has no batch axis or an empty example", _OWN
        )
    shape = (len(own), *spec.model_copy(update={"shape": spec.shape[1:]}).resolve(sizes))
    if empty:
        return np.zeros(shape, example.dtype)
    whole = spec.dtype == "bool" or "int" in spec.dtype
    if drawing == "repeat" or (whole and drawing == "within"):
        rows: Array = example[np.ix_(own % len(example), *_repeat_places(example, shape))]
        return rows
    if spec.is_number and spec.name in tables:
        return rng.integers(0, tables[spec.name], shape).astype(example.dtype)
    if whole:
        return _draw_whole(example, shape, rng)
    values = example.astype(np.float64)
    if not np.isfinite(values).all():
        raise DataError(
            f"the example input {spec} has NaN or infinity, and random samples are made from it",
            "return an example with finite numbers from the factory, or give data: --eval DATA",
        )
    if drawing == "within":
        rows = rng.uniform(values.min(), values.max(), shape).astype(example.dtype)
        return rows.clip(example.min(), example.max())
    rows = rng.standard_normal(shape, np.float32)
    rows *= np.float32(values.std())
    rows += np.float32(values.mean())
    return rows.astype(example.dtype, copy=False)


def _draw_whole(example: Array, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Draw from the example's values; those at the same places in all samples, and nowhere else, are put there again.

    The places repeat along longer dimensions, as examples do that are resized.
    """
    alike = (example == example[0]).all(axis=0)
    if len(example) == 1 or alike.all():  # nothing tells what has its place from what is there by chance
        return rng.choice(example.ravel(), shape)
    placed = alike & ~np.isin(example[0], example[:, ~alike])
    rows = rng.choice(example[:, ~placed].ravel(), shape)
    grid = np.ix_(*_repeat_places(example, shape))
    rows[:, placed[grid]] = example[0][grid][placed[grid]]
    return rows


def _repeat_places(example: Array, shape: tuple[int, ...]) -> list[Array]:
    """Number the places of the example along each dimension but the first: again from 0 where the shape is longer."""
    return [np.arange(size) % own for size, own in zip(shape[1:], example.shape[1:], strict=True)]


def _draw_stratified(classes: Array, count: int, rng: np.random.Generator) -> Array:
    """Draw row numbers; shares are rounded by the largest remainder, so that they add up to ``count``."""
    sizes = np.bincount(classes)
    shares = sizes * count / len(classes)
    quota = np.floor(shares).astype(np.int64)
    short = np.argsort(quota - shares, kind="stable")[: count - quota.sum()]
    quota[short] += 1
    drawn = [rng.choice(np.flatnonzero(classes == label), quota[label], replace=False) for label in range(len(sizes))]
    return np.concatenate(drawn)


def _match_words(source: str, words: Sequence[str], names: Sequence[str]) -> tuple[Array | None, str]:
    """Return the number of each word, by the names of a model's classes, and a note; None where no word is a name."""
    classes = [_find_classes(word, names) for word in words]
    own = name_some(names, _MOST_NAMED)
    if not any(classes):
        pairs = [f"{word} = {number}" for number, word in enumerate(words)]
        unlike = f"; the model's classes have other names: {own}" if names else ""
        return None, f"labels are numbered in alphabetical order: {name_some(pairs, _MOST_NAMED)}{unlike}"
    if unclear := [(word, len(numbers)) for word, numbers in zip(words, classes, strict=True) if len(numbers) != 1]:
        word, count = unclear[0]
        raise DataError(
            f"{source} has the labels {name_some(words, _MOST_NAMED)}, and the model's classes are {own}: {word!r} is "
            f"the name of {count or 'none'}",
            "write the names of the model's classes, or their numbers, as labels; or remove those samples",
        )
    numbers = np.asarray([those[0] for those in classes])
    pairs = [f"{word} = {number}" for number, word in sorted(zip(numbers.tolist(), words, strict=True))]
    return numbers, f"labels are numbered as the model's classes are (id2label): {name_some(pairs, _MOST_NAMED)}"


def _find_classes(word: str, names: Sequence[str]) -> list[int]:
    """Find the numbers of the classes of that name, else of those that differ in upper and lower case only."""
    exact = [number for number, name in enumerate(names) if name == word]
    return exact or [number for number, name in enumerate(names) if name.casefold() == word.casefold()]
