"""Read data from a function of the user's that yields feeds: one sample each, or a batch along the first axis."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from typing import IO, Any

import numpy as np

from enginesmith.calibration.sources import RawData, Request, describe_moved, find_moved
from enginesmith.calibration.user_code import blame_user_code, find
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import Array, Feeds, TensorSpec, split_inputs

MOST_BYTES = 16 << 30
_FORM = "yield dicts of input name → array, of one sample or of a batch along the first axis; labels are optional"


def read_feeds(reference: str, request: Request) -> RawData:
    """Call the function and take what it yields, up to ``most_rows`` rows or 16 GiB, into an unnamed file on disk.

    Raises:
        DataError: it is not there, raises, or yields something else.
    """
    notes: tuple[str, ...] = ()
    (rowed, shared), whole = split_inputs(request.inputs), dict[str, Array]()
    with ExitStack() as stack:
        spool = _Spool(reference, stack)
        for number, feed in _iterate_feeds(reference):
            place = f"{reference}, yield {number}"
            _take_shared(place, feed, shared, whole)
            spool.add(number, _as_batch(place, feed, rowed))
            if spool.rows >= request.options.most_rows or spool.bytes >= MOST_BYTES:
                notes = (f"{reference} was stopped after {spool.rows} rows, and may have more",)
                break
        if not spool.rows:
            raise DataError(f"{reference} yielded nothing", _FORM)
        return RawData(reference, spool.arrays() | whole, notes=notes)


def first_feed(reference: str) -> dict[str, Array]:
    """Return the first item that the function yields, for people to see.

    Raises:
        DataError: it is not there, raises, or yields nothing or something else.
    """
    for _, feed in _iterate_feeds(reference):
        return feed
    raise DataError(f"{reference} yielded nothing", _FORM)


class _Spool:
    """Batches one after another, on disk: a set may be larger than memory."""

    def __init__(self, reference: str, stack: ExitStack) -> None:
        self.rows = 0
        self.bytes = 0
        self._reference = reference
        self._stack = stack
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._files: dict[str, IO[bytes]] = {}

    def add(self, number: int, batch: Feeds) -> None:
        kinds = {name: (array.dtype, array.shape[1:]) for name, array in batch.items()}
        if not self._kinds:
            self._kinds = kinds
            for name in kinds:
                self._files[name] = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack's
        if kinds != self._kinds:
            raise DataError(
                f"{self._reference}, yield {number}, is {_describe(kinds)}, and the first {_describe(self._kinds)}",
                "give every sample the same names, dtypes and shape; pad what is shorter",
            )
        for name, array in batch.items():
            self.bytes += self._write(self._files[name], np.ascontiguousarray(array))
        self.rows += len(next(iter(batch.values())))

    def arrays(self) -> dict[str, Array]:
        """Map the arrays; a file lives as long as its mapping."""
        maps: dict[str, Array] = {}
        for name, (dtype, shape) in self._kinds.items():
            self._files[name].flush()
            full = (self.rows, *shape)
            maps[name] = np.memmap(self._files[name], dtype, "r", 0, full) if 0 not in full else np.empty(full, dtype)
        return maps

    def _write(self, file: IO[bytes], array: Array) -> int:
        try:
            return file.write(array.data)
        except OSError as error:
            raise DataError(
                f"cannot keep what {self._reference} yields: {error.strerror} after {self.bytes} bytes",
                "set TMPDIR to a folder with more space, or let it yield less",
            ) from error


def _iterate_feeds(reference: str) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield feeds with their numbers; the function may use one buffer for all of them."""
    source = find(reference, "data")
    with blame_user_code(reference), _call(reference, source) as feeds:
        for number, feed in enumerate(feeds):
            if not isinstance(feed, Mapping):
                raise DataError(f"{reference} yielded {type(feed).__name__}, expected a dict", _FORM)
            arrays = {str(name): np.asarray(value) for name, value in feed.items()}
            for name, array in arrays.items():
                if array.dtype.hasobject:
                    raise DataError(f"{reference}, yield {number}: {name!r} is no array of numbers", _FORM)
            yield number, arrays


def _call(reference: str, source: Any) -> AbstractContextManager[Iterable[Any]]:
    feeds = source() if callable(source) else source
    if isinstance(feeds, Mapping) or not isinstance(feeds, Iterable):
        raise DataError(f"{reference} gives {type(feeds).__name__}, expected dicts one after another", _FORM)
    return closing(feeds) if hasattr(feeds, "close") else nullcontext(feeds)  # type: ignore[type-var]


def _take_shared(place: str, feed: dict[str, Array], shared: Sequence[TensorSpec], whole: dict[str, Array]) -> None:
    """Move inputs without a batch out of a feed; in ``whole`` they are as they came first."""
    for name in [spec.name for spec in shared if spec.name in feed]:
        array = feed.pop(name)
        if name not in whole:
            whole[name] = array.copy()
        elif not np.array_equal(whole[name], array):
            raise DataError(
                f"{place}: {name!r} is another array than before, and the model takes one for all samples",
                "yield the same one each time, or give the input a batch with --input",
            )


def _as_batch(place: str, feed: Feeds, inputs: Sequence[TensorSpec]) -> Feeds:
    """Reshape the feed to have the sample as first axis of every array."""
    axes = {spec.name: feed[spec.name].ndim - len(spec.shape) for spec in inputs if spec.name in feed}
    if not axes:
        raise DataError(f"{place} holds {_join(feed)}, and the model takes {_join(s.name for s in inputs)}", _FORM)
    if set(axes.values()) == {-1}:
        return {name: array[np.newaxis] for name, array in feed.items()}
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
    if set(axes.values()) != {0}:
        raise DataError(f"{place} has the shapes {shapes}, expected those of {', '.join(map(str, inputs))}", _FORM)
    counts = {len(array) if array.ndim else 0 for array in feed.values()}
    if len(counts) > 1 or 0 in counts:
        remedy = "give every array, labels too, the same number of rows"
        if moved := find_moved({name: array.shape for name, array in feed.items()}, inputs):
            alone = ", ".join(f"{name!r} as {shape[1:]}" for name, shape in moved.items())
            remedy = f"{describe_moved(moved)}; or one sample alone, every array without its batch: {alone}"
        raise DataError(f"{place} has the shapes {shapes}", remedy)
    return feed


def _describe(kinds: Mapping[str, tuple[Any, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name}: {dtype}{list(shape)}" for name, (dtype, shape) in kinds.items())


def _join(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"
