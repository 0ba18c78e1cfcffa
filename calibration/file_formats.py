"""Read data of any form, and check it with the inputs of a model: names, dtypes, ranks, sizes, and useful numbers.

Everything looks at a few rows at a time, and no longer than it has to: sets may be larger than memory.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from enginesmith.calibration import lazy_arrays
from enginesmith.calibration.coco import check_coco, read_coco
from enginesmith.calibration.feeds import read_feeds
from enginesmith.calibration.images import listing, read_images
from enginesmith.calibration.lazy_arrays import LazyRows, Rows, cast, pieces
from enginesmith.calibration.masks import has_masks, pair_masks, read_masks
from enginesmith.calibration.sources import RawData, Request, Split, describe_moved, find_moved, open_arrays
from enginesmith.calibration.text import check_texts, read_texts
from enginesmith.calibration.user_code import check_reference, is_reference
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import (
    BATCH,
    DTYPES,
    Array,
    TensorSpec,
    bind_words,
    compute_size,
    find_misfit,
    is_sum,
    list_words,
    write_options,
)

_FIRST_LOOK_BYTES = 1 << 20
"""Most data differ within that; images are not decoded for more."""
LABELS = "labels"
"""The array of labels, where no other was named."""
LIKELY_LABELS = ("label", "y", "target", "targets", "class", "classes", LABELS)
"""Names of arrays that are taken for labels."""
_TOKEN_ARRAYS = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
"""Names of arrays that tokenizers make: inputs, also where the model was not given them."""
_REAL = "give samples like those that the model will see"


def check_arrays(
    source: str,
    arrays: Mapping[str, Rows],
    inputs: Sequence[TensorSpec],
    labels: Sequence[str] = (),
    *,
    free_inputs: bool = False,
) -> dict[str, Rows]:
    """Check arrays, and return them in the order of ``inputs``, cast where that is safe.

    ``labels`` are the names of the labels that are there. ``free_inputs``: the model may be given others.

    Raises:
        DataError: names ``source`` and says what was given, what was expected, and what to do.
    """
    others = f"; or describe other inputs, all of them: these are {write_options(inputs)}" if free_inputs else ""
    _check_names(source, arrays, [spec.name for spec in inputs], labels, others)
    feeds: dict[str, Rows] = {}
    _check_shapes(source, arrays, inputs)
    for spec in inputs:
        feeds[spec.name] = _cast_safely(source, spec, arrays[spec.name])
    _check_rows(source, feeds, inputs)
    return feeds


def check_names(source: str, names: Iterable[str], inputs: Sequence[TensorSpec], labels: Sequence[str]) -> None:
    """Check that arrays of a file are those of the inputs, and perhaps the labels; without inputs, nothing is.

    Raises:
        DataError: others are there, or some are missing.
    """
    wanted = [spec.name for spec in inputs]
    if wanted:
        given, found = {*names}, {*(labels or [LABELS])} - {*wanted}
        right = [name for name in labels or [LABELS] if name in given & found]
        _check_names(source, given - found, wanted, right, _suggest_inputs(given, inputs))


def _suggest_inputs(given: Iterable[str], inputs: Sequence[TensorSpec]) -> str:
    """Suggest ``--input`` for all inputs, with what tokenizers make besides and the data has; empty without that."""
    more = sorted({*given} & _TOKEN_ARRAYS - {spec.name for spec in inputs})
    like = next((spec for spec in inputs if spec.name in _TOKEN_ARRAYS), None)
    if not more or not like:
        return ""
    options = write_options([*inputs, *(like.model_copy(update={"name": name}) for name in more)])
    return f"; or, if the model takes {', '.join(more)}, too: {options}"


def check_shared(source: str, spec: TensorSpec, array: Rows) -> Array:
    """Check an array that is the same for all samples, and cast it where that is safe; DataError if it does not fit."""
    fits = array.ndim == len(spec.shape)
    fits &= all(isinstance(dim, str) or dim == size for dim, size in zip(spec.shape, array.shape, strict=False))
    if not fits:
        raise DataError(
            f"{source}: {spec.name!r} has the shape {list(array.shape)}, expected {list(spec.shape)}",
            f"give {spec}, which has no batch, once for all samples, or its batch with --input if each has its own",
        )
    whole = np.asarray(_cast_safely(source, spec, array)[()])
    if whole.dtype.kind == "f" and not np.isfinite(whole).all():
        raise DataError(f"{source}: {spec.name!r} holds NaN or infinity", "give finite numbers")
    return whole


def _check_names(source: str, names: Iterable[str], wanted: Sequence[str], labels: Sequence[str], others: str) -> None:
    """Compare names; ``others`` ends the remedy, where the model may take other inputs."""
    if set(names) != set(wanted):
        raise DataError(
            f"{source} holds {_join(names)}, and the model takes {_join(wanted)}",
            _likely_labels(names, wanted, labels)
            + "name the arrays after the model's inputs (or those after the arrays, where --input names them), and "
            f"leave out what is neither an input nor the labels{others}",
        )


def _likely_labels(given: Iterable[str], wanted: Sequence[str], labels: Sequence[str]) -> str:
    """Suggest arrays that may hold labels, where all inputs are there; ``labels`` were found already.

    What is beside those of the usual name is more likely an input that the model was not given.
    """
    others = sorted({*given} - {*wanted} - _TOKEN_ARRAYS) if {*wanted} <= {*given} else []
    likely = [name for name in LIKELY_LABELS if name in others] or (others if len(others) == 1 else [])
    if [*labels] == [LABELS]:
        return ""
    if labels and others:
        return f"did you mean --labels {','.join([*labels, *others])}? Else "
    if others and not likely:
        return f"if some hold labels, name them, as --labels {','.join(others)}. Else "
    return f"did you mean --labels {likely[0]}? Else " if likely else ""


def _check_shapes(source: str, arrays: Mapping[str, Rows], inputs: Sequence[TensorSpec]) -> None:
    """Check shapes: the first axis is the sample, and a word stands for the same size wherever it occurs."""
    ranked = [spec for spec in inputs if 0 < len(spec.shape) == arrays[spec.name].ndim]
    sizes = bind_words(
        pair for spec in ranked for pair in zip(spec.shape[1:], arrays[spec.name].shape[1:], strict=True)
    )
    for spec in inputs:
        array = arrays[spec.name]
        misfit = None if spec not in ranked else find_misfit(spec.shape[1:], array.shape[1:], sizes)
        if spec in ranked and misfit is None:
            continue
        bound = ([word in sizes for word in list_words(dim)] for dim in spec.shape[1:])
        expected = [compute_size(dim, sizes) if all(b) else dim for dim, b in zip(spec.shape[1:], bound, strict=True)]
        relation = f": {misfit[1]}" if misfit and is_sum(misfit[0]) else ""
        moved = find_moved({name: each.shape for name, each in arrays.items()}, inputs)
        raise DataError(
            f"{source}: {spec.name!r} has the shape {list(array.shape)}, expected "
            f"[{', '.join(map(str, ['samples', *expected]))}]{relation}",
            f"give rows that fit {spec}, one sample along the first axis{_suggest_size(arrays, inputs)}"
            f"{_suggest_batch(spec, array)}{f'; {describe_moved(moved)}' if moved else ''}",
        )


def _suggest_size(arrays: Mapping[str, Rows], inputs: Sequence[TensorSpec]) -> str:
    """Suggest ``--input`` for rows of another size, such as a length; empty where more than one size differs."""
    shapes = {spec.name: arrays[spec.name].shape for spec in inputs}
    other = {
        (dim, size)
        for spec in inputs
        for dim, size in zip(spec.shape[1:], shapes[spec.name][1:], strict=False)
        if isinstance(dim, int) and dim != size
    }
    if len(other) != 1 or any(len(shapes[spec.name]) != len(spec.shape) for spec in inputs):
        return ""
    words = []
    for new in ("length", next(iter(other))[1]):
        for spec in inputs:
            pairs = zip(spec.shape, shapes[spec.name], strict=True)
            shape = tuple(new if pair in other else pair[0] for pair in pairs)
            words.append(f"--input {spec.model_copy(update={'shape': shape})}")
    free, exact = " ".join(words[: len(inputs)]), " ".join(words[len(inputs) :])
    return (
        f"; or, if the model is a PyTorch module that takes such rows: {free} for any size, or {exact} and an example "
        "input of that size"
    )


def _suggest_batch(spec: TensorSpec, array: Rows) -> str:
    """Suggest a module that takes a batch, where each row is a whole input; else empty."""
    fits = array.ndim == len(spec.shape) + 1 and all(
        isinstance(dim, str) or dim == size for dim, size in zip(spec.shape, array.shape[1:], strict=True)
    )
    if not fits:
        return ""
    return (
        "; or, if each row is a whole input of a module that takes no batch: give a module around it that calls "
        "torch.vmap(module)(x), with an example input that has a batch"
    )


def _cast_safely(source: str, spec: TensorSpec, array: Rows) -> Rows:
    """Cast floats to floats and integers to integers where nothing is lost, and float64 to float32, as PyTorch does.

    Integers are not cast to floats: pixels up to 255 may be for a model that takes them up to 1.
    """
    given, native = str(array.dtype), str(array.dtype.newbyteorder("="))
    if given == spec.dtype:
        return array
    if not _keeps_all(array.dtype, spec.dtype) and (native, spec.dtype) != ("float64", "float32"):
        raise DataError(f"{source}: {spec.name!r} is {given}, expected {spec.dtype}", f"save it as {spec.dtype}")
    return cast(array, spec.dtype)  # what overflows becomes infinite, and that is refused below


def _keeps_all(given: np.dtype[Any], wanted: str) -> bool:
    """Tell whether floats are exact in another float dtype, or integers in another integer one."""
    if wanted not in DTYPES:
        return False
    alike = any({given.kind, np.dtype(wanted).kind} <= set(kinds) for kinds in ("f", "iu"))
    return alike and np.can_cast(given, wanted)


def check_labels(source: str, name: str, labels: Rows, rows: int) -> Array:
    """Check that there is one label for each row.

    Raises:
        DataError: there are more or fewer, or they are no numbers and no words.
    """
    if labels.ndim == 0 or len(labels) != rows:
        raise DataError(
            f"{source}: {name!r} has the shape {list(labels.shape)}, and the inputs have {rows} rows",
            "give one label for each row",
        )
    return np.asanyarray(labels)


def check_zeros(source: str, feeds: Mapping[str, Rows]) -> tuple[str, ...]:
    """Note inputs in floats that are zero in every row: a recurrent state may be, an image may not.

    Raises:
        DataError: all inputs are zero in every row.
    """
    zero = [name for name, array in feeds.items() if array.dtype.kind == "f" and _is_zero(array)]
    others = (array for array in feeds.values() if array.dtype.kind != "f")
    if len(zero) == sum(array.dtype.kind == "f" for array in feeds.values()) and all(map(_is_zero, others)):
        raise DataError(f"{source} holds nothing but zeros in {_join(feeds)}", _REAL)
    return tuple(f"{name!r} is zero in all rows of {source}" for name in zero)


def find_missing(source: str, feeds: Mapping[str, Rows]) -> dict[str, Array]:
    """Find the rows in which inputs have NaN, by input, where there are some: a missing value, to some models.

    Raises:
        DataError: an input holds infinity.
    """
    nan_rows = {}
    for name, array in feeds.items():
        if array.dtype.kind in "biu" or (isinstance(array, LazyRows) and array.finite):
            continue
        missing = [np.empty(0, np.int64)]
        for start, part in pieces(array):
            if np.isfinite(part).all():
                continue
            flat = part.reshape(len(part), -1)
            if (infinite := np.isinf(flat).any(1)).any():
                raise DataError(
                    f"{source}: {name!r} holds infinity, first in row {start + int(np.argmax(infinite))}",
                    "remove those rows, or scale the values into the range of the dtype",
                )
            missing.append(start + np.flatnonzero(np.isnan(flat).any(1)))
        if (rows := np.concatenate(missing)).size:
            nan_rows[name] = rows
    return nan_rows


def check_variety(source: str, feeds: Mapping[str, Rows]) -> tuple[str, ...]:
    """Note inputs in floats that are the same in every row, of a set that ranges are to be taken from.

    Raises:
        DataError: no input varies, so the rows are one sample many times.
    """
    if len(next(iter(feeds.values()))) == 1:
        return (f"{source} has one row: ranges from one sample are not reliable",)
    same = [name for name, array in feeds.items() if _is_same(array)]
    if len(same) == len(feeds):
        raise DataError(f"{source}: calibration samples of {_join(feeds)} are all the same", _REAL)
    return tuple(
        f"calibration samples of {name!r} are all the same in {source}"
        for name in same
        if feeds[name].dtype.kind == "f"
    )


def _is_zero(array: Rows) -> bool:
    return not any(part.any() for _, part in pieces(array, _FIRST_LOOK_BYTES))


def _is_same(array: Rows) -> bool:
    first = np.asarray(array[:1])
    return all((part == first).all() for _, part in pieces(array, _FIRST_LOOK_BYTES))


def _check_rows(source: str, feeds: Mapping[str, Rows], inputs: Sequence[TensorSpec]) -> None:
    counts = {name: len(array) for name, array in feeds.items()}
    if len(set(counts.values())) > 1:
        given = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise DataError(
            f"{source}: the arrays differ in their number of rows: {given}",
            "give each the same rows" + _tell_tables_apart(feeds, inputs),
        )
    if not all(array.size for array in feeds.values()):
        raise DataError(f"{source} is empty", "give at least one sample")


def _tell_tables_apart(feeds: Mapping[str, Rows], inputs: Sequence[TensorSpec]) -> str:
    """Suggest ``--input`` for arrays that have just the first size of their input, as a table, beside samples."""
    tables = [spec.name for spec in inputs if spec.shape and len(feeds[spec.name]) == spec.shape[0]]
    if not tables or len({len(feeds[spec.name]) for spec in inputs if spec.name not in tables}) != 1:
        return ""
    shapes = {spec.name: spec.shape if spec.name in tables else (BATCH, *spec.shape[1:]) for spec in inputs}
    words = (f"--input {spec.model_copy(update={'shape': shapes[spec.name]})}" for spec in inputs)
    return f"; or, if {_join(tables)} is the same for all samples: {' '.join(words)}"


def _join(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"


# The forms that data comes in: each is one function and one line in FORMS.

_EMBEDDED: Mapping[str, tuple[str, float]] = {"digits": ("image", 16.0)}  # the input's name, and the largest pixel
_DATA = Path(__file__).parent / "data"


class Form(NamedTuple):
    """A way to write down data: its title, the references that are of it, and how it is read and checked."""

    title: str
    accepts: Callable[[str], bool]
    read: Callable[[str, Request], RawData]
    check: Callable[[str, Request], object]
    """Raises where the data cannot be read, as far as headers and first entries show; no code of the user's runs."""


def check_readable(reference: str, request: Request) -> None:
    """Check the data as far as is cheap: the file is there, of a known form, and its header can be read.

    Where the request has inputs, arrays of these names have to be in it.

    Raises:
        DataError: no form fits, or the data cannot be read.
    """
    _form(reference).check(reference, request)


def read(reference: str, request: Request) -> RawData:
    """Read data of any supported form.

    Raises:
        DataError: no form fits, or the data cannot be read.
        MissingCapability: the form needs a package that is not installed.
    """
    return _form(reference).read(reference, request)


def _form(reference: str) -> Form:
    for form in FORMS:
        if form.accepts(reference):
            return form
    known = ", ".join(form.title for form in FORMS)
    raise DataError(f"cannot tell what data {reference!r} is", f"give one of: {known}")


def read_embedded(name: str, split: Split) -> dict[str, Array]:
    """Read one split of an embedded set: its input as float32 from 0 to 1, and int64 ``labels``.

    Raises:
        DataError: there is no such set or split.
    """
    if name not in _EMBEDDED or split not in get_args(Split):
        known = ", ".join(f"{each}/{part}" for each in _EMBEDDED for part in get_args(Split))
        raise DataError(f"there is no embedded data set {name}/{split}", f"give one of: {known}")
    key, largest = _EMBEDDED[name]
    with np.load(_DATA / f"{name}.npz", allow_pickle=False) as archive:
        images, labels = archive[f"{split}_images"], archive[f"{split}_labels"]
    return {key: images[:, np.newaxis].astype(np.float32) / np.float32(largest), "labels": labels.astype(np.int64)}


def is_embedded(reference: str) -> bool:
    """Check whether the reference names a set that comes with enginesmith."""
    return reference.partition("/")[0] in _EMBEDDED


def has_splits(reference: str) -> bool:
    """Check whether the reference names an embedded set, and none of its splits."""
    return reference in _EMBEDDED


def _open_embedded(reference: str, request: Request) -> RawData:
    name, _, part = reference.partition("/")
    chosen: Split = part or request.split  # type: ignore[assignment]  # read_embedded refuses any other word
    arrays = read_embedded(name, chosen)
    labels = arrays.pop("labels")
    return RawData(f"{name}/{chosen}", arrays, labels)


def _read_npz(reference: str, request: Request) -> RawData:
    with open_arrays(reference) as path:
        return RawData(path.name, lazy_arrays.npz(path))


def _check_npz(reference: str, request: Request) -> None:
    with open_arrays(reference) as path:
        headers = lazy_arrays.npz_headers(path)
    check_names(path.name, headers, request.inputs, request.options.label_keys)


def _check_npy(reference: str, _: Request) -> None:
    with open_arrays(reference) as path:
        lazy_arrays.npy(path)


def _check_safetensors(reference: str, request: Request) -> None:
    raw = _read_safetensors(reference, request)
    check_names(raw.name, raw.arrays, request.inputs, request.options.label_keys)


def _read_npy(reference: str, request: Request) -> RawData:
    if len(request.inputs) != 1:
        names = ", ".join(spec.name for spec in request.inputs)
        raise DataError(
            f"{reference} is one array, and the model takes {len(request.inputs)} inputs: {names}",
            "give an .npz or .safetensors file with one array for each input",
        )
    with open_arrays(reference) as path:
        return RawData(path.name, {request.inputs[0].name: lazy_arrays.npy(path)})


def _read_safetensors(reference: str, request: Request) -> RawData:
    with open_arrays(reference) as path:
        return RawData(path.name, lazy_arrays.safetensors(path))


def _ends_with(suffix: str) -> Callable[[str], bool]:
    return lambda reference: reference.lower().endswith(suffix)


FORMS: tuple[Form, ...] = (
    Form("an .npz file (one array for each input)", _ends_with(".npz"), _read_npz, _check_npz),
    Form("an .npy file (for models with one input)", _ends_with(".npy"), _read_npy, _check_npy),
    Form(
        "a .safetensors file (one tensor for each input)",
        _ends_with(".safetensors"),
        _read_safetensors,
        _check_safetensors,
    ),
    Form("a .jsonl file of texts, with a tokenizer", _ends_with(".jsonl"), read_texts, check_texts),
    Form("a .json file of images and boxes (COCO)", _ends_with(".json"), read_coco, check_coco),
    Form("an embedded set (digits/test)", is_embedded, _open_embedded, _open_embedded),
    Form("a folder of images and masks", has_masks, read_masks, lambda reference, _: pair_masks(Path(reference))),
    Form(
        "a folder of images, sub-folders being classes",
        lambda reference: Path(reference).is_dir(),
        read_images,
        lambda reference, _: listing(Path(reference)),
    ),
    Form(
        "module:function or file.py:function that yields feeds",
        is_reference,
        read_feeds,
        lambda reference, _: check_reference(reference, "data"),
    ),
)
