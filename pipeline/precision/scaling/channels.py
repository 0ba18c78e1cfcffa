"""Where the channels of a value lie, followed backwards through operators that only move them about."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.precision import constants
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Place:
    """Channels of a value: counted along these axes, the first the slowest, ours begin at ``first``.

    The channels of the context of an attention with 12 heads are those of axes 1 and 3 of B,H,S,E.
    """

    value: "ir.Value"
    axes: tuple[int, ...]
    total: int
    first: int = 0

    def spread(self, factors: Array) -> Array:
        """Factors of ours as factors of all channels: the others are left alone."""
        everything = np.ones(self.total)
        everything[self.first : self.first + len(factors)] = factors
        return everything

    def broadcast(self, factors: Array) -> Array:
        """Factors of ours, to be multiplied with the value; for channels on one axis."""
        behind = len(self.value.shape or ()) - 1 - self.axes[0]
        return self.spread(factors).reshape(-1, *(1,) * behind)


def place(value: "ir.Value", axis: int, channels: int) -> Place | None:
    """The channels on one axis of a value; None if they are not known to be there."""
    dims = sizes(value)
    if not -len(dims) <= axis < len(dims) or dims[axis] != channels:
        return None
    return Place(value, (axis % len(dims),), channels)


def sizes(value: "ir.Value | None") -> tuple[int | None, ...]:
    """The static dimensions of a value, None for others; empty if nothing is known."""
    shape = value.shape if value is not None else None
    return tuple(dim if isinstance(dim, int) else None for dim in shape) if shape is not None else ()


def same(place: Place, source: "ir.Value | None", axes: Iterable[int] | None = None) -> Place | None:
    """The same channels of another value on axes of the same sizes; None if it has others there."""
    chosen = place.axes if axes is None else tuple(axes)
    ours, theirs = sizes(place.value), sizes(source)
    if source is None or max(chosen) >= len(theirs) or (axes is None and len(ours) != len(theirs)):
        return None
    fits = all(ours[a] == theirs[b] is not None for a, b in zip(place.axes, chosen, strict=True))
    return replace(place, value=source, axes=chosen) if fits else None


def transposed(node: "ir.Node", place: Place) -> Place | None:
    """Through a Transpose."""
    rank = len(sizes(place.value))
    order = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else list(range(rank))[::-1]
    return same(place, node.inputs[0], (order[axis] for axis in place.axes))


def reshaped(node: "ir.Node", place: Place) -> Place | None:
    """Through a Reshape or Flatten that keeps the channels together at the end."""
    source = node.inputs[0]
    axes = _trailing(sizes(source), place.total)
    if source is None or axes is None or _trailing(sizes(place.value), place.total) != place.axes:
        return None
    return replace(place, value=source, axes=axes)


def _trailing(dims: tuple[int | None, ...], total: int) -> tuple[int, ...] | None:
    """The last axes that together have this size, those of size 1 left out; None if there are none."""
    found: list[int] = []
    size = 1
    for axis in reversed(range(len(dims))):
        dim = dims[axis]
        if size == total or dim is None:
            break
        size *= dim
        if dim != 1:
            found.insert(0, axis)
    return tuple(found) if size == total > 1 else None


def squeezed(node: "ir.Node", place: Place) -> Place | None:
    """Through a Squeeze, or a reduction that drops its axes."""
    source = node.inputs[0]
    gone = _axes(node, len(sizes(source)))
    if gone is None:
        return None
    kept = [axis for axis in range(len(sizes(source))) if axis not in gone]
    return same(place, source, (kept[axis] for axis in place.axes)) if max(place.axes) < len(kept) else None


def unsqueezed(node: "ir.Node", place: Place) -> Place | None:
    """Through an Unsqueeze."""
    rank = len(sizes(place.value))
    added = _axes(node, rank)
    if added is None or added & set(place.axes):
        return None
    kept = [axis for axis in range(rank) if axis not in added]
    return same(place, node.inputs[0], (kept.index(axis) for axis in place.axes))


def averaged(node: "ir.Node", place: Place) -> Place | None:
    """Through a ReduceMean over other axes than the channels'."""
    if not node.attributes.get_int("keepdims", 1):
        return squeezed(node, place)
    reduced = _axes(node, len(sizes(place.value)))
    return None if reduced is None or reduced & set(place.axes) else same(place, node.inputs[0])


def _axes(node: "ir.Node", rank: int) -> set[int] | None:
    """The axes that a node names, as an input or, in old opsets, as an attribute."""
    if "axes" in node.attributes:
        return {axis % rank for axis in node.attributes["axes"].as_ints()}
    given = constants.read(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if given is None or not rank else {int(axis) % rank for axis in given.reshape(-1)}


def split(node: "ir.Node", place: Place) -> Place | None:
    """Through a Split, to the part that the value is."""
    dims = [sizes(value) for value in node.outputs]
    if any(not one for one in dims):
        return None
    axis = node.attributes.get_int("axis", 0) % len(dims[0])
    widths = [one[axis] for one in dims]
    position = node.outputs.index(place.value)
    before = [width for width in widths[:position] if width is not None]
    return _selected(place, node.inputs[0], axis, sum(before)) if len(before) == position else None


def sliced(node: "ir.Node", place: Place) -> Place | None:
    """Through a Slice, if all other readers of what it is cut from take other slices of the same axis."""
    ours, source = _interval(node), node.inputs[0]
    if ours is None or source is None or source.is_graph_output():
        return None
    axis, start, end = ours
    for reader, index in source.uses():
        theirs = _interval(reader) if index == 0 and reader.op_type == "Slice" else None
        if reader is not node and (theirs is None or theirs[0] != axis or (theirs[1] < end and start < theirs[2])):
            return None
    return _selected(place, source, axis, start)


def _interval(node: "ir.Node") -> tuple[int, int, int] | None:
    """Axis, start and end of a Slice along one axis, step by step."""
    dims = sizes(node.inputs[0])
    numbers = [constants.read(value) for value in node.inputs[1:]]
    if len(numbers) < 3 or any(one is None or one.size != 1 for one in numbers) or not dims:
        return None
    start, end, axis, *step = (int(one.reshape(-1)[0]) for one in numbers if one is not None)
    size = dims[axis]
    if size is None or step not in ([], [1]):
        return None
    start, end = (min(max(edge + size if edge < 0 else edge, 0), size) for edge in (start, end))
    return axis % len(dims), start, end


def _selected(place: Place, source: "ir.Value | None", axis: int, start: int) -> Place | None:
    """The same channels among more of them: a value is what ``source`` has from ``start`` on, on one axis."""
    dims, ours = sizes(source), sizes(place.value)
    size = dims[axis] if dims else None
    if source is None or size is None or len(dims) != len(ours):
        return None
    others = [axis_ for axis_ in place.axes if axis_ != axis]
    if any(dims[other] != ours[other] for other in others):
        return None
    inside = axis in place.axes
    if place.axes[0] != axis if inside else ours[axis] != 1:
        return None
    step = math.prod(_known(dims, others))
    return Place(source, (axis, *others), size * step, place.first + start * step)


def _known(dims: tuple[int | None, ...], axes: Iterable[int]) -> Iterator[int]:
    return (dim for axis in axes if (dim := dims[axis]) is not None)
