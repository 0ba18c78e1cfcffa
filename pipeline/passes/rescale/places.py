"""Where the channels of a value lie among its numbers, and where those of a node's output lie in its input."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.tensors import Array


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
        """Extend our factors to all channels: the others are left alone."""
        everything = np.ones(self.total)
        everything[self.first : self.first + len(factors)] = factors
        return everything

    def broadcast(self, factors: Array) -> Array:
        """Reshape our factors to be multiplied with the value; for channels on one axis."""
        behind = len(self.value.shape or ()) - 1 - self.axes[0]
        return self.spread(factors).reshape(-1, *(1,) * behind)


def locate(value: "ir.Value", axis: int, channels: int) -> Place | None:
    """Place the channels on one axis of a value; None if they are not known to be there."""
    dims = sizes(value)
    if not -len(dims) <= axis < len(dims) or dims[axis] != channels:
        return None
    return Place(value, (axis % len(dims),), channels)


def sizes(value: "ir.Value | None") -> tuple[int | None, ...]:
    """Return the static dimensions of a value, None for others; empty if nothing is known."""
    shape = value.shape if value is not None else None
    return tuple(dim if isinstance(dim, int) else None for dim in shape) if shape is not None else ()


def same(place: Place, source: "ir.Value | None", axes: Iterable[int] | None = None) -> Place | None:
    """Find these channels on another value with axes of the same sizes; None if it has others there."""
    chosen = place.axes if axes is None else tuple(axes)
    ours, theirs = sizes(place.value), sizes(source)
    if source is None or max(chosen) >= len(theirs) or (axes is None and len(ours) != len(theirs)):
        return None
    fits = all(ours[a] == theirs[b] is not None for a, b in zip(place.axes, chosen, strict=True))
    return replace(place, value=source, axes=chosen) if fits else None


def follow_transpose(node: "ir.Node", place: Place) -> Place | None:
    """Follow channels through a Transpose."""
    rank = len(sizes(place.value))
    return same(place, node.inputs[0], (edit.find_transposed_axis(node, axis) % rank for axis in place.axes))


def follow_reshape(node: "ir.Node", place: Place) -> Place | None:
    """Follow channels through a Reshape or Flatten that keeps them together at the end."""
    source = node.inputs[0]
    axes = _trailing_axes(sizes(source), place.total)
    if source is None or axes is None or _trailing_axes(sizes(place.value), place.total) != place.axes:
        return None
    return replace(place, value=source, axes=axes)


def _trailing_axes(dims: tuple[int | None, ...], total: int) -> tuple[int, ...] | None:
    """Return the last axes that together have this size, those of size 1 left out; None if there are none."""
    axes: list[int] = []
    size = 1
    for axis in reversed(range(len(dims))):
        dim = dims[axis]
        if size == total or dim is None:
            break
        size *= dim
        if dim != 1:
            axes.insert(0, axis)
    return tuple(axes) if size == total > 1 else None


def follow_squeeze(node: "ir.Node", place: Place) -> Place | None:
    """Follow channels through a Squeeze, or a reduction that drops its axes."""
    source = node.inputs[0]
    gone = _axes(node, len(sizes(source)))
    if gone is None:
        return None
    kept = [axis for axis in range(len(sizes(source))) if axis not in gone]
    return same(place, source, (kept[axis] for axis in place.axes)) if max(place.axes) < len(kept) else None


def follow_unsqueeze(node: "ir.Node", place: Place) -> Place | None:
    """Follow channels through an Unsqueeze."""
    rank = len(sizes(place.value))
    added = _axes(node, rank)
    if added is None or added & set(place.axes):
        return None
    kept = [axis for axis in range(rank) if axis not in added]
    return same(place, node.inputs[0], (kept.index(axis) for axis in place.axes))


def follow_mean(node: "ir.Node", place: Place) -> Place | None:
    """Follow channels through a ReduceMean over other axes than theirs."""
    if not node.attributes.get_int("keepdims", 1):
        return follow_squeeze(node, place)
    reduced = _axes(node, len(sizes(place.value)))
    return None if reduced is None or reduced & set(place.axes) else same(place, node.inputs[0])


def _axes(node: "ir.Node", rank: int) -> set[int] | None:
    """Return the axes that a node names, as an input or, in old opsets, as an attribute."""
    if "axes" in node.attributes:
        return {axis % rank for axis in node.attributes["axes"].as_ints()}
    given = edit.read(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if given is None or not rank else {int(axis) % rank for axis in given.reshape(-1)}


def follow_split(node: "ir.Node", place: Place) -> Place | None:
    """Follow channels through a Split, to the part that the value is."""
    if not all(sizes(value) for value in node.outputs):
        return None
    axis = node.attributes.get_int("axis", 0) % len(sizes(node.outputs[0]))
    before = [sizes(value)[axis] for value in node.outputs[: node.outputs.index(place.value)]]
    widths = [width for width in before if width is not None]
    return _select(place, node.inputs[0], axis, sum(widths)) if len(widths) == len(before) else None


def follow_slice(node: "ir.Node", place: Place) -> Place | None:
    """Follow channels through a Slice, if all other readers of its input take other slices of the same axis."""
    ours, source = _interval(node), node.inputs[0]
    if ours is None or source is None or source.is_graph_output():
        return None
    axis, start, end = ours
    for reader, index in source.uses():
        theirs = _interval(reader) if index == 0 and reader.op_type == "Slice" else None
        if reader is not node and (theirs is None or theirs[0] != axis or (theirs[1] < end and start < theirs[2])):
            return None
    return _select(place, source, axis, start)


def _interval(node: "ir.Node") -> tuple[int, int, int] | None:
    """Read axis, start and end of a Slice along one axis, step by step."""
    dims = sizes(node.inputs[0])
    numbers = [edit.read(value) for value in node.inputs[1:]]
    if len(numbers) < 3 or any(number is None or number.size != 1 for number in numbers) or not dims:
        return None
    start, end, axis, *step = (int(number.reshape(-1)[0]) for number in numbers if number is not None)
    size = dims[axis]
    if size is None or step not in ([], [1]):
        return None
    start, end = (min(max(edge + size if edge < 0 else edge, 0), size) for edge in (start, end))
    return axis % len(dims), start, end


def _select(place: Place, source: "ir.Value | None", axis: int, start: int) -> Place | None:
    """Find the channels among more of them: the value is a part of ``source``, from ``start`` on, on one axis."""
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
    step = math.prod(dim for other in others if (dim := dims[other]) is not None)
    return Place(source, (axis, *others), size * step, place.first + start * step)
