"""Make rows that look like an example one by one: however many there are, memory holds one."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from zlib import crc32

import numpy as np

from enginesmith.calibration.dataset import Dataset, Drawing, find_axes, find_longest, synthetic
from enginesmith.calibration.lazy_arrays import LazyRows
from enginesmith.pipeline.tensors import Array, Feeds, TensorSpec, split_inputs


class SyntheticRows(LazyRows):
    """Rows of one input as :func:`synthetic` draws them, each with a seed of its own."""

    def __init__(
        self,
        spec: TensorSpec,
        example: Array,
        sizes: Mapping[str, int],
        count: int,
        seed: int,
        drawing: Drawing = "like",
        start: int = 0,
        tables: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._spec, self._example, self._sizes, self._seed = spec, example, dict(sizes), seed
        self._drawing, self._start, self._tables = drawing, start, dict(tables)
        first = self._row(0)
        super().__init__((count, *first.shape[1:]), first.dtype)

    def __getitem__(self, key: Any) -> Array:
        rows = np.arange(len(self))[key]
        if not np.ndim(rows):
            return np.asarray(self._row(int(rows))[0])
        return np.concatenate([np.empty((0, *self.shape[1:]), self.dtype), *map(self._row, rows.tolist())])

    def _row(self, row: int) -> Array:
        name = self._spec.name
        state = np.random.SeedSequence([self._seed, row, crc32(name.encode())]).generate_state(1)
        own, seed = self._start + row, int(state[0])
        example = {name: self._example}
        drawn = synthetic([self._spec], example, self._sizes, 1, seed, self._drawing, own, self._tables)
        return np.asarray(drawn.arrays[name])

    def origin(self, rows: Array | slice) -> Iterator[bytes]:
        yield f"{self._spec}\0{sorted(self._sizes.items())}\0{self._seed}\0{self._example.shape}\0".encode()
        yield b"" if self._drawing == "like" else f"{self._drawing} {self._start}\0".encode()
        if rows_of_table := self._tables.get(self._spec.name):
            yield f"of {rows_of_table}\0".encode()
        yield self._example.tobytes()
        yield np.arange(len(self))[rows].tobytes()


def lazy_synthetic(
    inputs: Sequence[TensorSpec],
    example: Feeds,
    sizes: Mapping[str, int],
    count: int,
    seed: int,
    drawing: Drawing = "like",
    tables: Mapping[str, int] = MappingProxyType({}),
) -> Dataset:
    """Make as many rows as are asked for; arguments and errors as for :func:`synthetic`."""
    rowed, shared = split_inputs(inputs)
    start = find_longest(inputs, example)
    arrays = {
        spec.name: SyntheticRows(spec, example[spec.name], sizes, count, seed, drawing, start, tables) for spec in rowed
    }
    whole = {spec.name: example[spec.name] for spec in shared}
    return Dataset("synthetic", arrays, synthetic=True, axes=find_axes(inputs), shared=whole)
