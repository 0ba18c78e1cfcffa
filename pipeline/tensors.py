"""Names, dtypes and shapes: the signature that a model keeps through every pass."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import BaseModel, JsonValue

from enginesmith.pipeline.errors import ShapeError, SignatureError, UsageError

Feeds = Mapping[str, np.ndarray[Any, np.dtype[Any]]]
Array = np.ndarray[Any, np.dtype[Any]]
Point = Literal["min", "opt", "max"]
Constant = bool | int | float | str | None
"""An argument of a module that is no array, and is the same in each call."""

DTYPES = (
    *("float16", "float32", "float64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
DESCRIBED = (*DTYPES, "bfloat16")
"""Dtypes of a graph's inputs and outputs; numpy has no bfloat16, so such a graph is built and not fed."""
BATCH = "batch"
"""Name of a dynamic dimension that is the batch wherever it stands; of others, the one that comes first is."""
_NAME = re.compile(r"[^:\s]+")
_DIM = re.compile(r"[A-Za-z_]\w*")
_LENGTHS = re.compile(r"length|lens|(^|_)((kv|seq)?len|n(um)?_frames)(_|$)")
"""Parts of the names of inputs that say how long something is, in lower case with ``_`` between words."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


def is_same(value: Any, constant: Constant) -> bool:
    """Tell whether an argument of a call is a constant: equal, and of the same type."""
    return type(value) is type(constant) and bool(value == constant)


class TensorSpec(BaseModel, frozen=True):
    """One input or output: a dimension is a number, a word for one that may vary (``batch``), or a sum of such.

    Of a sum, ``past+length`` or ``past+1``, the words come first, and all numbers are one behind them.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @classmethod
    def parse(cls, text: str) -> "TensorSpec":
        """Read ``name:dtype:batch,3,224,224``; an empty shape is a scalar.

        Raises:
            UsageError: the text is not of that form.
        """
        parts = text.rsplit(":", 2)
        if len(parts) != 3 or not _NAME.fullmatch(parts[0]):
            raise UsageError(f"cannot read the input {text!r}", "write it as name:dtype:batch,3,224,224")
        name, dtype, dims = parts
        if dtype not in DTYPES:
            cast = "" if dtype != "bfloat16" else ": give it in float32, and cast it to bfloat16 inside the model"
            remedy = f"use one of {', '.join(DTYPES)}{cast}"
            raise UsageError(f"input {name!r} has the dtype {dtype!r}, which inputs and outputs cannot be", remedy)
        return cls(name=name, dtype=dtype, shape=tuple(_dim(text, d) for d in dims.split(",") if dims))

    @property
    def symbols(self) -> tuple[str, ...]:
        """Words in the dimensions, in order; those of sums, too."""
        return tuple(word for dim in self.shape for word in list_words(dim))

    @property
    def batch_axis(self) -> int:
        """The dimension that is the batch: the one of that name, else the first."""
        return self.shape.index(BATCH) if BATCH in self.shape else 0

    @property
    def as_row(self) -> "TensorSpec":
        """Move the batch to the first dimension, as samples are kept."""
        rest = list(self.shape)
        first = [rest.pop(self.batch_axis)] if rest else []
        return self.model_copy(update={"shape": (*first, *rest)})

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Replace every word of the shape by its size, and add up its sums.

        Raises:
            SignatureError: a word has no size.
        """
        missing = [dim for dim in self.symbols if dim not in sizes]
        if missing:
            raise SignatureError(
                f"{self.name!r} has the dynamic dimension {missing[0]!r}, and no size is given for it",
                f"give one with --shape {missing[0]}=1:8:64",
            )
        return tuple(compute_size(dim, sizes) for dim in self.shape)

    def __str__(self) -> str:
        return f"{self.name}:{self.dtype}:{','.join(map(str, self.shape))}"

    @property
    def is_number(self) -> bool:
        """Tell whether each sample has one whole number of it."""
        return self.dtype in ("int32", "int64") and all(dim == 1 for dim in self.shape[1:])

    @property
    def is_length(self) -> bool:
        """Tell whether this number says, by its name, how long the sample is."""
        return self.is_number and bool(_LENGTHS.search("_".join(_WORD.findall(self.name)).lower()))


InputChoice = Callable[[Sequence[TensorSpec]], Sequence[TensorSpec]]
"""Choose inputs of a model by the arrays that there are for them, samples first."""


def write_options(specs: Iterable[TensorSpec]) -> str:
    """Write inputs as options of the command line."""
    return " ".join(f"--input {spec}" for spec in specs)


def _dim(text: str, dim: str) -> int | str:
    parts = [part.strip() for part in dim.split("+")]
    if any(not _DIM.fullmatch(part) and not (part.isdecimal() and int(part)) for part in parts):
        remedy = "a dimension is a positive number, a word, or a sum of these, such as past+length"
        raise UsageError(f"cannot read the dimension {dim.strip()!r} in {text!r}", remedy)
    return join_sum(parts)


def join_sum(parts: Iterable[str]) -> int | str:
    """Write words and numbers as one dimension: a sum of them, unless there is one alone."""
    words, numbers = list[str](), 0
    for part in parts:
        if part.isdecimal():
            numbers += int(part)
        else:
            words.append(part)
    return "+".join([*words, *([str(numbers)] if numbers else [])]) if words else numbers


def is_sum(dim: int | str) -> bool:
    """Tell whether a dimension is a sum of words and numbers."""
    return isinstance(dim, str) and "+" in dim


def list_words(dim: int | str) -> tuple[str, ...]:
    """List the words of a dimension: none of a number, both of ``past+length``."""
    return tuple(part for part in dim.split("+") if not part.isdecimal()) if isinstance(dim, str) else ()


def compute_size(dim: int | str, sizes: Mapping[str, int]) -> int:
    """Compute the size of a dimension, each of whose words has one."""
    if isinstance(dim, int):
        return dim
    return sum(int(part) if part.isdecimal() else sizes[part] for part in dim.split("+"))


def bind_words(dims: Iterable[tuple[int | str, int]]) -> dict[str, int]:
    """Find the size of each word, from dimensions and their sizes: by those that it stands in alone, else by a sum.

    A sum gives the size of a word where it has no other of unknown size; below 0, the sum is too small for the others.
    """
    pairs = sorted(((dim, size) for dim, size in dims if isinstance(dim, str)), key=lambda pair: is_sum(pair[0]))
    sizes: dict[str, int] = {}
    before = -1
    while before < len(sizes):
        before = len(sizes)
        for dim, size in pairs:
            unknown = [word for word in list_words(dim) if word not in sizes]
            if len(unknown) == 1:
                sizes[unknown[0]] = size - compute_size(dim, {**sizes, unknown[0]: 0})
    return sizes


def list_unbound(specs: Iterable[TensorSpec]) -> list[str]:
    """List the words whose size no feed tells: of ``past+length``, both, where neither stands elsewhere."""
    dims = [dim for spec in specs for dim in spec.shape]
    bound = bind_words((dim, 0) for dim in dims)
    return [word for dim in dims for word in list_words(dim) if word not in bound]


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def read_sizes(specs: Iterable[TensorSpec], arrays: Mapping[str, _Shaped]) -> dict[str, int]:
    """Read the size of each word of these inputs from arrays, which have the inputs' ranks."""
    return bind_words(pair for spec in specs for pair in zip(spec.shape, arrays[spec.name].shape, strict=True))


def to_word(text: str) -> str:
    """Make a word of the name that a dimension has in a file: ``DynamicDimension_1`` of ``DynamicDimension.1``."""
    word = "".join(c if c.isalnum() or c == "_" else "_" for c in text)
    return f"_{word}" if word[:1].isdigit() else word


class ShapeRange(BaseModel, frozen=True):
    """The sizes a dynamic dimension may take: smallest, the one to be fastest at, largest."""

    min: int
    opt: int
    max: int

    @classmethod
    def parse(cls, text: str) -> "ShapeRange":
        """Read ``1:8:64``; one number stands for all three.

        Raises:
            UsageError: not of that form, or not min ≤ opt ≤ max with 1 ≤ opt.
        """
        numbers = text.split(":")
        if not all(n.isdecimal() for n in numbers) or len(numbers) not in (1, 3):
            raise UsageError(f"cannot read the shape range {text!r}", "write it as min:opt:max, as in 1:8:64")
        low, opt, high = (int(n) for n in (numbers * 3 if len(numbers) == 1 else numbers))
        if opt < 1:
            raise UsageError(
                f"the usual size in the shape range {text!r} is 0", "give 1 or more: min alone may be 0, as in 0:8:64"
            )
        if not low <= opt <= high:
            raise UsageError(f"the shape range {text!r} is out of order", "it must hold min <= opt <= max")
        return cls(min=low, opt=opt, max=high)

    def at(self, point: Point) -> int:
        """Return the size at ``min``, ``opt`` or ``max``."""
        return {"min": self.min, "opt": self.opt, "max": self.max}[point]

    def select(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Select the sizes that are within the range; its usual one where none is."""
        return tuple(size for size in sizes if self.min <= size <= self.max) or (self.opt,)

    def __str__(self) -> str:
        return f"{self.min}:{self.opt}:{self.max}"


class Signature(BaseModel, frozen=True):
    """Inputs and outputs of a model, by name and in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    returns: JsonValue = None
    """Form in which a module returns its outputs: their names, in lists for tuples and objects for mappings and data
    classes, with null for None; ``{"namedtuple": its name, "fields": {...}}``; null alone where it is not known."""
    unordered: dict[str, Literal["rows", "positions"]] = {}
    """Outputs whose rows are chosen by values: rounding may change their order and number. ``positions`` are a
    NonMaxSuppression's own answer; which of two boxes that are nearly equal was chosen, says nothing."""
    tables: dict[str, int] = {}
    """Rows of the smallest table that an input is an index of, as tokens are."""
    lengths: tuple[str, ...] = ()
    """Inputs that a file uses as the lengths of samples, whatever they are called."""
    unsigned: tuple[str, ...] = ()
    """Inputs of which the module refuses negative numbers, as an embedding does; other indices count from the end."""
    constants: dict[str, Constant] = {}
    """Arguments that the module is always called with beside its inputs, by name: what is no array in the example."""
    batched: bool = True
    """False if no output follows the dynamic dimension that would be the batch: it is a size like others."""

    @property
    def symbols(self) -> tuple[str, ...]:
        """Dynamic dimensions of the inputs, each once, in order of appearance."""
        return tuple(dict.fromkeys(dim for spec in self.inputs for dim in spec.symbols))

    def list_lengths(self) -> list[TensorSpec]:
        """List the inputs that say how long the sample is: one whole number for each, by its name or by its use."""
        numbers = (spec for spec in self.inputs if spec.is_number and spec.name not in self.tables)
        return [spec for spec in numbers if spec.is_length or spec.name in self.lengths]

    def check(self, feeds: Feeds) -> None:
        """Compare feeds with the inputs; errors as in :func:`check_feeds`."""
        check_feeds(self.inputs, {name: (str(value.dtype), value.shape) for name, value in feeds.items()})


def check_feeds(specs: Sequence[TensorSpec], given: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Compare dtype and shape by name with inputs: names, dtypes, ranks, fixed and shared sizes.

    Raises:
        SignatureError: says what was given and what was expected; ShapeError where only sizes differ.
    """
    expected = [spec.name for spec in specs]
    if set(given) != set(expected):
        raise SignatureError(
            f"the model's inputs are {', '.join(expected)}, and {', '.join(given) or 'nothing'} was given",
            "name the arrays after the model's inputs",
        )
    for spec in specs:
        dtype, shape = given[spec.name]
        if dtype != spec.dtype:
            raise SignatureError(*_describe_misfit(spec, dtype, shape))
        if len(shape) != len(spec.shape):
            raise ShapeError(*_describe_misfit(spec, dtype, shape))
    sizes = bind_words(pair for spec in specs for pair in zip(spec.shape, given[spec.name][1], strict=True))
    misfits = ((spec, find_misfit(spec.shape, given[spec.name][1], sizes)) for spec in specs)
    wrong = sorted(((spec, *misfit) for spec, misfit in misfits if misfit), key=lambda each: is_sum(each[1]))
    for spec, dim, relation in wrong[:1]:  # a sum does not fit either where one of its words has two sizes
        message, remedy = _describe_misfit(spec, *given[spec.name])
        if isinstance(dim, str) and spec.shape.count(dim) > 1:
            remedy += f"; {dim} stands twice in {spec.name!r}: if its sizes may differ, rename one in the model"
        raise ShapeError(message + (f" with {relation}" if relation else ""), remedy)


def _describe_misfit(spec: TensorSpec, dtype: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """Say what was given for an input and what was expected, and what to give."""
    return f"input {spec.name!r} is {dtype}{list(shape)}, expected {spec}", f"give it as {spec}"


def find_misfit(
    dims: Sequence[int | str], shape: Sequence[int], sizes: Mapping[str, int]
) -> tuple[int | str, str] | None:
    """Find the first dimension that has not the size that it should have where words have these sizes.

    Returns it, and what its size should be in words: nothing of a number, ``past+length = 5+3 = 8`` of a sum.
    """
    for dim, size in zip(dims, shape, strict=True):
        if any(word not in sizes for word in list_words(dim)):
            continue
        wanted = compute_size(dim, sizes)
        negative = [word for word in list_words(dim) if sizes[word] < 0]
        if negative:  # its other words, or its number, are more than it has
            least = compute_size(dim, {**sizes, **dict.fromkeys(negative, 0)})
            others = ", ".join(f"{word} = {sizes[word]}" for word in list_words(dim) if word not in negative)
            return dim, f"{dim} of {least} or more{f', as {others}' if others else ''}"
        if size != wanted and is_sum(dim):
            parts = "+".join(part if part.isdecimal() else str(sizes[part]) for part in str(dim).split("+"))
            return dim, f"{dim} = {parts} = {wanted}"
        if size != wanted:
            return dim, f"{dim} = {wanted}, as before" if isinstance(dim, str) else ""
    return None


def check_indices(name: str, indices: Array, rows: int, lowest: int) -> None:
    """Check that whole numbers are indices of a table with so many rows, and at least ``lowest``: 0, or minus the rows.

    Raises:
        SignatureError: one is not.
    """
    least, most = int(indices.min(initial=0)), int(indices.max(initial=0))
    if least < lowest or most >= rows:
        number = most if most >= rows else least
        raise SignatureError(f"input {name!r} has {number}, and its table has {rows} rows", f"give 0 to {rows - 1}")


def split_inputs(specs: Sequence[TensorSpec]) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Split inputs into those that have the batch, and those that are one array for all samples.

    The latter are single numbers, such as a sample rate, and those without a batch where others name theirs.
    """
    named = any(BATCH in spec.shape for spec in specs)
    shared = [spec for spec in specs if not spec.shape or (named and BATCH not in spec.shape)]
    return ([spec for spec in specs if spec not in shared], shared) if len(shared) < len(specs) else ([*specs], [])


def rows_first(arrays: Feeds, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Move the batch of each array to the front."""
    axes = {spec.name: spec.batch_axis for spec in specs}
    return {name: np.moveaxis(value, axes[name], 0) if axes.get(name) else value for name, value in arrays.items()}


_PIECE = 1 << 20
INFINITE = 1e8
"""Size from which on a number that several places have stands for infinity: float32 drops the scores added to it."""
_LEAST_FILL, _FILL_WIDTH, _LEAST_NUMBER, _LARGEST_SHARE = 1000.0, 0.05, 0.01, 0.01


def format_sizes(sizes: Mapping[str, int]) -> str:
    """Write sizes for people: ``batch 7, length 13``."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items()) or "its fixed shape"


def find_fill(arrays: Sequence[Array]) -> float:
    """Find the magnitude from which numbers fill masked places, such as -1e9 or a dtype's least; inf if none do.

    They are of one magnitude within 5 %, as a logit may have been added, 1000 or more, and 100 times as large as all
    others. Beside them, the others count for nothing in a sum of squares or a range.
    """
    floats = [array for array in arrays if array.dtype.kind == "f" and array.size]
    largest = max((_find_largest(array) for array in floats), default=0.0)
    if largest < _LEAST_FILL:
        return np.inf
    least = (1 - _FILL_WIDTH) * largest
    rest = max(_find_largest(array, least) for array in floats)
    return least if _LEAST_NUMBER <= rest <= _LARGEST_SHARE * largest else np.inf


def find_infinite(array: Array) -> Array:
    """Mark the places of floats that have the largest size alike, of :data:`INFINITE` or more; infinity is no size."""
    sizes = np.abs(array)
    alike = np.asarray(sizes == _find_largest(array))
    return alike & bool(alike.sum() > 1 and sizes[alike].max() >= INFINITE)


def _find_largest(array: Array, below: float = np.inf) -> float:
    """Find the greatest magnitude below a limit, piece by piece, as outputs may fill the memory."""
    flat, largest = array.reshape(-1), 0.0
    for start in range(0, flat.size, _PIECE):
        sizes = np.abs(flat[start : start + _PIECE])
        largest = max(largest, float(sizes.max(initial=0.0, where=sizes < below)))  # NaN and infinity are not below any
    return largest


def total_bytes(specs: Iterable[TensorSpec], sizes: Mapping[str, int]) -> int:
    """Compute the bytes of all tensors together at these sizes."""
    dtypes = [("float16" if spec.dtype == "bfloat16" else spec.dtype, spec.resolve(sizes)) for spec in specs]
    return sum(math.prod(shape) * int(np.dtype(dtype).itemsize) for dtype, shape in dtypes)
