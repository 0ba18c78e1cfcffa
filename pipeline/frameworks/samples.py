"""Choose the feeds that a model is run on, and their sizes: for eager and for everything made from it.

An artifact of kind ``reference`` holds them: ``samples.json`` and, for each set of sizes, ``feeds-N.npz`` and
``outputs-N.npz`` with what the baseline answered; ``feeds-N-K.npz`` and ``outputs-N-K.npz`` of further calls. Beside
them, ``unstable-N.npz`` tells where rounding decides what the answers are. Where the feeds are made up, they are like
what ``example-0.npz`` holds.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel

from enginesmith.calibration.dataset import Dataset, Drawing, synthetic
from enginesmith.pipeline.errors import DataError, ModelError, SignatureError, UsageError
from enginesmith.pipeline.frameworks.fidelity import MOST_ROUNDING
from enginesmith.pipeline.tensors import (
    BATCH,
    Array,
    Feeds,
    Point,
    ShapeRange,
    Signature,
    TensorSpec,
    find_fill,
    is_sum,
    read_sizes,
    split_inputs,
    write_options,
)

RECORD = "samples.json"
BETWEEN = "between"
"""Point of a batch size that is neither an end of its range nor measured: engines may compute it by other code."""
UNSTABLE = "unstable"
POINTS: tuple[Point, ...] = ("min", "opt", "max")
_WRITTEN = ("feeds", "outputs", UNSTABLE)
_USUALLY_UNSET = (
    *("drawing", "parts", "spans", "interacting", "unsteady", "rounding", "rounding_db", "quantizes", "unverified"),
    *("assumed", "tables"),
)
"""Fields that are not written where they have their default."""
_EXAMPLE = "example"
SYNTHETIC = "synthetic"
"""Origin of feeds that were made up."""
JUDGED_SAMPLES = 8
"""Samples of given data that fidelity is judged on in each case, at least; on all where there are fewer."""


FeedMaker = Callable[..., dict[str, Array]]
"""Call :func:`feeds_for` with a case and, by name, the number of a call."""


class Case(BaseModel, frozen=True):
    """One set of sizes and what it is for: a point of the shape range, a measured batch, or both."""

    sizes: dict[str, int]
    batch: int
    points: tuple[Point | Literal["measured", "between"], ...] = ()
    """Points of the shape range that these sizes are; ``measured`` or :data:`BETWEEN` where they are none of those."""
    measured: bool = False
    calls: int = 1
    """Calls whose outputs are judged, each with feeds of its own; the first one's feeds are those that are measured."""


class Samples(BaseModel, frozen=True):
    """Content of ``samples.json``."""

    data: str
    """Origin of the feeds: the name of a data set, or ``SYNTHETIC``."""
    ranges: dict[str, ShapeRange]
    cases: tuple[Case, ...]
    drawing: Drawing = "like"
    """Way to make rows of the example that the model takes, where there is no data."""
    tables: dict[str, int] = {}
    """Rows of the tables that inputs are indices of, as the model that the rows were made for tells."""
    parts: dict[str, int] = {}
    """Samples of each part, where one data set was split into parts."""
    spans: dict[str, float] = {}
    """Range (max − min) of each floating-point output, over all answers."""
    interacting: bool = False
    """True if the baseline's answer to a sample depends on the others of its batch."""
    unsteady: tuple[str, ...] = ()
    """Outputs of the baseline that move far where its operations are rounded otherwise."""
    rounding: dict[str, float] = {}
    """How far rounding in float32 may move each floating-point output of the baseline."""
    rounding_db: dict[str, float] = {}
    """SQNR that errors which rounding in float32 may explain leave each floating-point output of the baseline."""
    quantizes: bool = False
    """True if the baseline is a graph that quantizes what it computes: its steps are rounded otherwise elsewhere."""
    unverified: dict[str, float] = {}
    """Outputs of the baseline of which rounding decides too many numbers to verify an engine by, and their share."""
    choosing: tuple[str, ...] | None = None
    """Outputs whose rows the baseline chooses by values; None where it may be any."""
    assumed: tuple[str, ...] = ()
    """Dynamic dimensions whose sizes nothing tells: neither options nor data nor an example."""
    class_names: tuple[str, ...] = ()
    """Names of the model's classes by number, where it has some: labels that are words are numbered by them."""
    yielded: dict[str, str] = {}
    """Digest of all samples that a function of the user's yielded, by its name."""

    @property
    def quantized_db(self) -> dict[str, float]:
        """Return the SQNR of each output that steps of the baseline's own quantization explain, where it quantizes."""
        return self.rounding_db if self.quantizes else {}

    def limit_sets(self, signature: Signature, names: Mapping[str, str] = MappingProxyType({})) -> Signature:
        """Leave only outputs to be compared as sets of rows that the baseline chooses: a file alone allows none.

        ``names`` are those in the signature that are others than the baseline's.
        """
        if self.choosing is None:
            return signature
        allowed = {names.get(name, name) for name in self.choosing}
        kept = {name: kind for name, kind in signature.unordered.items() if name in allowed}
        return signature.model_copy(update={"unordered": kept})


def batch_symbol(signature: Signature) -> str | None:
    """Return the dynamic dimension that is the batch: ``batch``, else a word, not a sum, that leads every input.

    It is none if no output follows it: rows that are averaged to one answer are no samples.
    """
    if not signature.batched:
        return None
    if BATCH in signature.symbols:
        return BATCH
    first = _first_dimension(signature)
    return first if isinstance(first, str) and first in signature.symbols else None


def suggest_batch(signature: Signature) -> str:
    """Write the options that call a dimension the batch in each input, where it may be another one than the first.

    Empty where it has a name, or where a first dimension is fixed and not exactly one other is open.
    """
    specs = list[TensorSpec]()
    for spec in signature.inputs:
        dims = [*spec.shape]
        open_axes = [axis for axis, dim in enumerate(dims) if isinstance(dim, str) and not is_sum(dim)]
        if open_axes[:1] == [0] or len(open_axes) == 1:
            dims[open_axes[0]] = BATCH
        specs.append(spec.model_copy(update={"shape": tuple(dims)}))
    moved = any(spec.batch_axis for spec in specs) and BATCH not in signature.symbols
    return write_options(specs) if moved else ""


def fixed_batch(signature: Signature) -> int:
    """Return the batch of a model that has no dynamic one: its inputs' common first dimension, else 1."""
    first = _first_dimension(signature)
    return first if isinstance(first, int) else 1


def _first_dimension(signature: Signature) -> int | str | None:
    leading = {spec.shape[0] if spec.shape else None for spec in split_inputs(signature.inputs)[0]}
    return leading.pop() if len(leading) == 1 else None


def check_feeds(signature: Signature, feeds: Feeds) -> None:
    """Check feeds like :meth:`Signature.check`; a wrong fixed batch size is explained in plainer words.

    Raises:
        SignatureError: the feeds do not fit.
    """
    try:
        signature.check(feeds)
    except SignatureError as error:
        given, own = {value.shape[0] for value in feeds.values() if value.ndim}, fixed_batch(signature)
        if batch_symbol(signature) is not None or len(given) != 1 or own in given:
            raise
        signature.check({name: value.take([0] * own, axis=0) if value.ndim else value for name, value in feeds.items()})
        raise SignatureError(
            f"its batch size is fixed at {own}, and {given.pop()} was asked for",
            f"measure it at --batch {own}, or export it with a dynamic batch",
        ) from error


def read_row_ranges(signature: Signature, data: Dataset) -> dict[str, ShapeRange]:
    """Read the size that rows of data have along each dynamic dimension but the batch, as the only one of its range."""
    sizes = read_sizes(signature.inputs, data.batch(0, 1))
    batch = batch_symbol(signature)
    return {name: ShapeRange(min=size, opt=size, max=size) for name, size in sizes.items() if name != batch}


def fit_batches(
    signature: Signature, ranges: Mapping[str, ShapeRange], batches: tuple[int, ...], *, given: bool
) -> tuple[int, ...]:
    """Choose the batch sizes to measure: those ``given``; else those within the range of the batch, if it has one."""
    range_ = ranges.get(batch_symbol(signature) or "")
    return batches if given or range_ is None else range_.select(batches)


def plan_ranges(
    signature: Signature,
    given: Mapping[str, ShapeRange],
    batches: tuple[int, ...],
    example: Mapping[str, int],
    *,
    named_by_file: bool = False,
) -> dict[str, ShapeRange]:
    """Choose the range of every dynamic dimension: as given, else from the batches and the example's sizes.

    ``named_by_file``: the dimensions are those of a file, and no option makes others.

    Raises:
        UsageError: a range for a dimension that is not dynamic, or one that leaves out a measured batch.
    """
    unknown = [name for name in given if name not in signature.symbols]
    if unknown:
        raise UsageError(
            f"--shape gives a range for {unknown[0]!r}, and the dynamic dimensions are "
            f"{', '.join(signature.symbols) or 'none'}",
            "name one of them; sizes that the file fixes cannot be changed"
            if named_by_file
            else "name a dynamic dimension, or make one with --input name:dtype:batch,…",
        )
    ranges = {}
    for symbol in signature.symbols:
        size = example.get(symbol, 1)
        default = ShapeRange(min=max(1, size // 2), opt=size, max=size)
        if symbol == batch_symbol(signature):
            default = ShapeRange(min=min(batches), opt=batches[0], max=max(batches))
        ranges[symbol] = range_ = given.get(symbol, default)
        outside = [batch for batch in batches if not range_.min <= batch <= range_.max]
        if symbol == batch_symbol(signature) and range_.min < 1:
            raise UsageError(f"--shape {symbol}={range_} has batches without samples", "give a min of 1 or more")
        if symbol == batch_symbol(signature) and outside:
            message = f"--batch {outside[0]} is outside of --shape {symbol}={range_}"
            raise UsageError(message, "widen the range or drop the batch size")
    return ranges


def plan_cases(signature: Signature, ranges: Mapping[str, ShapeRange], batches: tuple[int, ...]) -> tuple[Case, ...]:
    """List the distinct sets of sizes: min, opt and max of the ranges, and each batch with the rest at opt.

    Those of the batches come first, in their order: the first one decides. The last one is of the smallest batch size
    in the range that is none of these, where there is one.
    """
    symbol = batch_symbol(signature)
    cases: dict[tuple[int, ...], Case] = {}

    def add(sizes: dict[str, int], point: Point | None) -> None:
        key = tuple(sizes.values())
        batch = sizes[symbol] if symbol else fixed_batch(signature)
        known = cases.get(key, Case(sizes=sizes, batch=batch))
        points = (*known.points, point) if point else known.points or ("measured",)
        cases[key] = known.model_copy(update={"points": points, "measured": known.measured or point is None})

    for point in POINTS:
        add({name: range_.at(point) for name, range_ in ranges.items()}, point)
    for batch in batches if symbol else (fixed_batch(signature),):
        add({name: batch if name == symbol else range_.opt for name, range_ in ranges.items()}, None)
    order = {batch: place for place, batch in enumerate(batches)}
    places = {key: order.get(case.batch, 0) if case.measured else len(order) for key, case in cases.items()}
    planned = tuple(cases[key] for key in sorted(cases, key=lambda key: places[key]))
    used = {case.batch for case in planned}
    inner = range(ranges[symbol].min, ranges[symbol].max) if symbol else range(0)
    between = next((size for size in inner if size not in used), None)
    if symbol is None or between is None:
        return planned
    sizes = {name: between if name == symbol else range_.opt for name, range_ in ranges.items()}
    return (*planned, Case(sizes=sizes, batch=between, points=(BETWEEN,)))


def plan_calls(case: Case, data: Dataset | None) -> Case:
    """Plan as many calls as make up :data:`JUDGED_SAMPLES` of the data; one call without data."""
    if data is None:
        return case
    return case.model_copy(update={"calls": math.ceil(min(JUDGED_SAMPLES, len(data)) / case.batch)})


class Answered(NamedTuple):
    """One case with its feeds and the reference's answers, call by call."""

    case: Case
    feeds: Sequence[Feeds]
    outputs: Sequence[Feeds]
    unstable: Sequence[Feeds]
    """Numbers of the outputs that rounding decides, as ``find_unstable`` returns them."""


def read_calls(folder: Path) -> Iterator[Answered]:
    """Read each case."""
    for index, case in enumerate(read(folder).cases):
        arrays = ([read_arrays(folder, what, index, call) for call in range(case.calls)] for what in _WRITTEN)
        yield Answered(case, *arrays)


def feeds_for(
    case: Case,
    signature: Signature,
    example: Feeds,
    data: Dataset | None,
    seed: int,
    call: int = 0,
    drawing: Drawing = "like",
) -> dict[str, Array]:
    """Make feeds of exactly these sizes: of the data the rows of this call, else values like the example's."""
    if data is not None:
        given = data.batch(call * case.batch, case.batch)
        for spec in signature.inputs:
            shape = given[spec.name].shape
            if any(isinstance(dim, int) and size != dim for dim, size in zip(spec.shape, shape, strict=False)):
                where, remedy = "samples lie along the first dimension", suggest_batch(signature)
                raise DataError(
                    f"{spec.name!r} of the data has the shape {list(shape)} in batches of {case.batch}, not {spec}",
                    f"{where} of data, and of the model unless one is called {BATCH!r}: name it with {remedy}"
                    if remedy
                    else f"{where}: leave the data out, or give a model with its batch there",
                )
        return resize(given, signature, case.sizes)
    if batch_symbol(signature) is None:
        return resize(example, signature, case.sizes)
    own = np.random.SeedSequence([seed, *case.sizes.values()]).generate_state(1)  # else all cases begin alike
    tables = signature.tables
    drawn = synthetic(signature.inputs, example, case.sizes, case.batch, int(own[0]), drawing, tables=tables)
    return resize(drawn.batch(0, case.batch), signature, case.sizes)


def write_example(out: Path, example: Feeds) -> None:
    """Write the example that the feeds were made like."""
    write_arrays(out, _EXAMPLE, 0, example)


def read_example(folder: Path) -> dict[str, Array]:
    """Read the example that the feeds of a reference without data were made like."""
    return read_arrays(folder, _EXAMPLE, 0)


def take_last(arrays: Feeds, specs: Sequence[TensorSpec], symbol: str) -> dict[str, Array]:
    """Take the last sample of each array along all dimensions that are the batch, ``symbol``; the others stay whole."""
    last = {spec.name: tuple(slice(-1 if dim == symbol else None, None) for dim in spec.shape) for spec in specs}
    return {  # loops without a step leave outputs of fewer dimensions than are declared
        name: np.require(value[last[name]] if value.ndim == len(last[name]) else value, requirements="C")
        for name, value in arrays.items()
    }


def resize(feeds: Feeds, signature: Signature, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Cut or repeat feeds to other sizes of the dynamic dimensions."""
    resized: dict[str, Array] = {}
    for spec in signature.inputs:
        value = feeds[spec.name]
        for axis, size in enumerate(spec.resolve(sizes)):
            if value.shape[axis] != size:
                value = value.take(np.arange(size) % value.shape[axis], axis=axis)
        resized[spec.name] = np.require(value, requirements="C")
    return resized


def advise_sizes(assumed: Iterable[str]) -> str:
    """Say which options give the sizes of dimensions that are assumed; empty for none."""
    shapes = " ".join(f"--shape {name}=MIN:OPT:MAX" for name in assumed)
    return f"; sizes that nothing tells are assumed: give those that it takes with {shapes}" if shapes else ""


def write(out: Path, samples: Samples) -> None:
    """Write ``samples.json``; the arrays are written case by case with :func:`write_arrays`."""
    unset = {name for name in _USUALLY_UNSET if getattr(samples, name) == Samples.model_fields[name].default}
    (out / RECORD).write_text(samples.model_dump_json(indent=1, exclude=unset), encoding="utf-8")


def write_vector(reference: Path, file: Path) -> None:
    """Write the feeds and the answers of one call of a reference, and the ranges of all its answers.

    It is one at the smallest shape, if its answers are finite and not all 0; else the first with the fewest numbers
    that are not finite, and of these one that has any but 0.
    """
    known = read(reference)
    cases = sorted(enumerate(known.cases), key=lambda pair: "min" not in pair[1].points)
    calls = [(index, call) for index, case in cases for call in range(case.calls)]
    odd = dict[tuple[int, int], tuple[float, bool]]()
    for each in calls:
        outputs = read_arrays(reference, "outputs", *each)
        odd[each] = _measure_odd_share(outputs), not any(value.any() for value in outputs.values())
        if odd[each] == (0, False):
            break
    chosen = min(odd, key=odd.__getitem__)
    feeds, outputs, unstable = (read_arrays(reference, what, *chosen) for what in _WRITTEN)
    most = {name: MOST_ROUNDING * span for name, span in known.spans.items() if not known.quantizes}
    rounding = {name: min(moved, most.get(name, moved)) for name, moved in known.rounding.items()}
    save_vector(file, Vector(feeds, outputs, known.spans, unstable, rounding, known.quantized_db))


def _measure_odd_share(outputs: Feeds) -> float:
    """Measure the largest share of an output's numbers that are NaN or infinite."""
    floats = [value for value in outputs.values() if value.dtype.kind == "f" and value.size]
    return max((1 - float(np.isfinite(value).mean()) for value in floats), default=0.0)


def find_ends(outputs: Feeds) -> dict[str, tuple[float, float]]:
    """Find the least and greatest finite number of each floating-point output, without the fill of masked places."""
    ends = {}
    for name, value in outputs.items():
        if value.dtype.kind == "f":
            numbers = np.abs(value) < find_fill([value])  # NaN and infinity are none
            if numbers.any():
                ends[name] = (
                    float(value.min(initial=np.inf, where=numbers)),
                    float(value.max(initial=-np.inf, where=numbers)),
                )
    return ends


def find_spans(answers: Iterable[Feeds]) -> dict[str, float]:
    """Find the range (max − min) of each floating-point output over several calls."""
    return join_ends(map(find_ends, answers))


def join_ends(ends: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Find the range of each output over several calls, from its ends in each."""
    known: dict[str, list[float]] = {}
    for call in ends:
        for name, pair in call.items():
            known.setdefault(name, []).extend(pair)
    return {name: max(values) - min(values) for name, values in known.items()}


class Vector(NamedTuple):
    """A test vector, by name of input and output."""

    feeds: Feeds
    outputs: Feeds
    ranges: Mapping[str, float]
    """Ranges of outputs over all that they were verified on; one answer may be a single number."""
    unstable: Feeds
    """Numbers of the outputs that rounding decides, as ``find_unstable`` returns them."""
    rounding: Mapping[str, float] = MappingProxyType({})
    """How far rounding moves outputs: in float32, by up to 1 % of their range; that of steps, without a limit."""
    quantized_db: Mapping[str, float] = MappingProxyType({})
    """The least SQNR of outputs that steps move: see :attr:`Samples.quantized_db`."""


_KINDS = ("input", "output", "range", UNSTABLE, "rounding", "quantized_db")
"""First parts of the arrays' names in a test vector's file, in the order of its fields."""


def save_vector(file: Path, vector: Vector) -> None:
    """Save a test vector: arrays called ``input:<name>``, and so on, as :class:`Vector` has them."""
    arrays = {
        f"{kind}:{name}": np.asarray(value)
        for kind, values in zip(_KINDS, vector, strict=True)
        for name, value in values.items()
    }
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)
    partial.replace(file)


def read_vector(file: Path) -> Vector:
    """Read a test vector as :func:`save_vector` left it.

    Raises:
        UsageError: an earlier version wrote it, which did not record what rounding makes of numbers.
        ModelError: it is not there any more.
    """
    if not file.is_file():
        raise ModelError(f"the test vector {file} is not there any more", "optimize the model again")
    arrays: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
    with np.load(file, allow_pickle=False) as stored:
        for key in stored.files:
            kind, _, name = key.partition(":")
            arrays[kind][name] = stored[key]
    if old := [name for name, records in arrays[UNSTABLE].items() if records.dtype.names is None]:
        raise UsageError(
            f"{file} is of an earlier version: it does not say which numbers rounding makes in the output {old[0]!r}",
            "optimize the model again, and package that",
        )
    for kind in ("range", "rounding", "quantized_db"):
        arrays[kind] = {name: float(value) for name, value in arrays[kind].items()}
    return Vector(*arrays.values())


def _file(what: str, index: int, call: int) -> str:
    return f"{what}-{index}-{call}.npz" if call else f"{what}-{index}.npz"


def write_arrays(out: Path, what: str, index: int, arrays: Feeds, call: int = 0) -> None:
    """Write ``feeds``, ``outputs`` or what is ``unstable`` of one call of a case."""
    np.savez(out / _file(what, index, call), **arrays)  # type: ignore[arg-type]


def read(folder: Path) -> Samples:
    """Read ``samples.json``."""
    return Samples.model_validate_json((folder / RECORD).read_bytes())


def read_arrays(folder: Path, what: str, index: int, call: int = 0) -> dict[str, Array]:
    """Read ``feeds``, ``outputs`` or what is ``unstable`` of one call of a case."""
    if what == UNSTABLE and not (folder / _file(what, index, call)).exists():
        return {}
    with np.load(folder / _file(what, index, call), allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}
