"""Check that zeros are still in place: the pattern of weights in a graph, and in one made of it.

Understood are the operators of ONNX behind casts, transpositions and Q/DQ pairs. A level that equals its zero point is
a zero.

A weight is found again by its name, by the value that its product makes, or by the product's name; where all of these
have changed, by its zeros: a weight that is zero wherever the given one was, alone or as rows of a larger one, has to
be it, as chance would need one try in 2^n for n zeros. Elements that round to zero on the way are no loss.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.sparsify import sparsify
from enginesmith.pipeline.tensors import Array
from enginesmith.pipeline.units import name_some

_TRANSPARENT = ("Cast", "Identity")


@dataclass(frozen=True)
class _Form:
    """Inputs of an operator that are its weight and its zero point; a convolution's weight has outputs first."""

    weight: int = 1
    zero: int | None = None
    convolution: bool = False


_FORMS: Mapping[str, _Form] = {
    **dict.fromkeys(("Gemm", "MatMul"), _Form()),
    "Conv": _Form(convolution=True),
    "ConvInteger": _Form(zero=3, convolution=True),
    "MatMulInteger": _Form(zero=3),
    "QLinearConv": _Form(weight=3, zero=5, convolution=True),
    "QLinearMatMul": _Form(weight=3, zero=5),
}


@dataclass(frozen=True)
class StoredWeight:
    """The weight of one product."""

    name: str
    """Name of the initializer."""
    node: str
    output: str
    """The value that the product makes."""
    nonzero: Callable[[], Array]
    """True where it is not zero, as sums × terms of a sum."""


def find(model: "ir.Model") -> Iterator[StoredWeight]:
    """Find the constant weights of all products of a graph and its subgraphs; a shared one once for each product."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if (weight := _weight(node)) is not None:
            yield weight


def _weight(node: "ir.Node") -> StoredWeight | None:
    form = None if node.domain else _FORMS.get(node.op_type)
    value = edit.find_input(node, form.weight) if form else None
    if form is None or value is None:
        return None
    outputs_first = form.convolution or node.attributes.get_int("transB", 0) == 1
    zero = edit.read(edit.find_input(node, form.zero)) if form.zero else None
    walked = _walk(value, 1 if outputs_first else -2, zero, 0 if outputs_first else -1)
    if walked is None:
        return None
    names = str(walked.value.name), str(node.name or ""), str(node.outputs[0].name)
    return StoredWeight(*names, walked.nonzero)


@dataclass(frozen=True)
class _Walked:
    """The constant behind a weight, its summed axis there, and the numbers that stand for zero in it."""

    value: "ir.Value"
    axis: int
    """Counted modulo the rank: -2 is the last but one, or the only one of a vector."""
    zero: Array | None
    zero_axis: int
    """The axis that several zero points lie along."""
    block: int

    def nonzero(self) -> Array:
        numbers = edit.read(self.value)
        assert numbers is not None
        if numbers.dtype.kind not in "fiu":  # of ml_dtypes
            numbers = numbers.astype(np.float32)
        nonzero = np.not_equal(numbers, self._zeros(numbers.shape))
        terms_last = np.moveaxis(nonzero, self.axis % nonzero.ndim, -1)
        return np.ascontiguousarray(terms_last).reshape(-1, terms_last.shape[-1])

    def _zeros(self, shape: tuple[int, ...]) -> Array | int:
        """Shape zero points to be compared with the numbers."""
        zero = None if self.zero is None else self.zero.astype(np.float32)
        return 0 if zero is None or not zero.any() else edit.spread(zero, shape, self.zero_axis, self.block)


def _walk(value: "ir.Value", axis: int, zero: Array | None, zero_axis: int) -> _Walked | None:
    """Walk back to the constant, through operators that keep zeros zero; None where there is none."""
    block = 0
    while edit.read(value) is None:
        node = value.producer()
        if node is None or not node.inputs or node.inputs[0] is None:
            return None
        if node.op_type == "Transpose":
            axis = edit.find_transposed_axis(node, axis)
        elif node.op_type in ("DequantizeLinear", "QuantizeLinear"):
            point = edit.find_input(node, 2)
            zero = edit.read(point)
            if point is not None and zero is None:
                return None
            if node.op_type == "QuantizeLinear" and zero is not None and zero.astype(np.float32).any():
                return None
            zero_axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
        elif node.op_type not in _TRANSPARENT:
            return None
        value = node.inputs[0]
    return _Walked(value, axis, zero, zero_axis, block)


_NAMES = 3
_ENOUGH_ZEROS = 64
"""Fewest zeros of a weight that is to be known by them."""


@dataclass(frozen=True)
class WeightFacts:
    """The zeros of one product's weight."""

    name: str
    elements: int
    zeros: int
    two_of_four: bool
    """True where no four neighbors along the axis that is summed over have more than two that are not zero."""


@dataclass(frozen=True)
class Followed:
    """Names of weights that were 2:4, by their state in the graph that was made."""

    held: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Weights that cannot be found again, of which nothing is said."""

    def __str__(self) -> str:
        text = f"2:4 held in {len(self.held)} of {len(self.held) + len(self.lost) + len(self.missing)} weights"
        for what, names in (("lost in ", self.lost), ("not found again: ", self.missing)):
            if names:
                text = f"{text}; {what}{name_some(names, _NAMES)}"
        return text


def sparse_weights(path: Path) -> tuple[WeightFacts, ...]:
    """Count the zeros of the weights of all products in a file, in node order; one in memory at a time.

    Raises:
        InvalidGraph: the file cannot be read.
    """
    facts = []
    for weight in _distinct(path):
        nonzero = weight.nonzero()
        zeros, pattern = int(nonzero.size - np.count_nonzero(nonzero)), sparsify.holds(nonzero)
        facts.append(WeightFacts(weight.name, int(nonzero.size), zeros, pattern))
    return tuple(facts)


def _distinct(path: Path) -> Iterable[StoredWeight]:
    """List weights by their first product."""
    weights: dict[str, StoredWeight] = {}
    for weight in find(edit.load(path)):
        weights.setdefault(weight.name, weight)
    return weights.values()


def follow(before: Path, after: Path) -> Followed:
    """Follow the 2:4 weights of a graph into the graph that was made of it.

    Raises:
        InvalidGraph: one of the files cannot be read.
    """
    later = tuple(find(edit.load(after)))
    names: dict[str, list[str]] = {"held": [], "lost": [], "missing": []}
    for weight in _distinct(before):
        nonzero = weight.nonzero()
        if nonzero.size and sparsify.holds(nonzero):
            names[_find_state(weight, nonzero, later)].append(weight.name)
    return Followed(*map(tuple, names.values()))


def _find_state(weight: StoredWeight, nonzero: Array, later: Sequence[StoredWeight]) -> str:
    """Return ``held``, ``lost`` or ``missing``."""
    for other in later:
        named = other.name in (weight.name, f"{weight.name}_quantized") or other.output == weight.output
        if named or (weight.node and other.node == weight.node):
            rows = other.nonzero()
            if rows.shape[1] == nonzero.shape[1]:
                return "held" if sparsify.holds(rows) else "lost"
    if nonzero.size - np.count_nonzero(nonzero) < _ENOUGH_ZEROS:
        return "missing"
    return "held" if any(_contains(other.nonzero(), nonzero) for other in later) else "missing"


def _contains(reading: Array, nonzero: Array) -> bool:
    """Tell whether some rows of a weight are zero wherever another one is; beyond its terms there is padding alone."""
    rows, terms = nonzero.shape
    if len(reading) < rows or reading.shape[1] < terms or reading[:, terms:].any():
        return False
    cut = reading[:, :terms]
    return any(not (cut[start : start + rows] & ~nonzero).any() for start in range(0, len(cut) - rows + 1, rows))
