"""Follow axes of values, and what broadcasts along them, through nodes that rearrange them."""

import math
from collections.abc import Sequence

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.tensors import Array

MOST = 1 << 22
"""Elements of what is spread out along several axes."""
Labels = Array
"""Whole numbers with the rank of a value, that broadcast to its shape."""
FIXED, UNREAD = 0, -1
"""Labels of channels that cannot be scaled, and of those that nothing reads."""


def strip(array: Array) -> Array:
    """Drop leading axes of size 1, but for the last axis."""
    first = next((axis for axis, size in enumerate(array.shape[:-1]) if size > 1), array.ndim - 1)
    return array.reshape(array.shape[first:])


def find_axis(array: Array) -> int | None:
    """Find the axis of channels; None where it differs along none, or along more than one."""
    axes = [axis for axis, size in enumerate(array.shape) if size > 1]
    return axes[0] if len(axes) == 1 else None


def dims(value: "ir.Value | None") -> tuple[int | str | None, ...]:
    """Return the dimensions of a value, as names where they are dynamic, None where they are not known.

    Empty for a value without a shape.
    """
    shape = value.shape if value is not None else None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in shape) if shape is not None else ()


def reshape_back(array: Array, node: "ir.Node") -> Array | None:
    """Give what broadcasts to a reshaped value the axes of the value before; None where channels do not stay apart.

    The axes on both sides are divided into groups of the same size; those without channels need not be known.
    """
    ours, theirs = dims(node.outputs[0]), dims(node.inputs[0])
    if not theirs:
        return None
    shape = [1] * len(theirs)
    real_axes = [[axis for axis, size in enumerate(sizes) if size != 1] for sizes in (ours, theirs)]
    groups = group_axes([ours[axis] for axis in real_axes[0]], [theirs[axis] for axis in real_axes[1]])
    array = array.reshape([array.shape[axis] for axis in real_axes[0]])
    inner: list[int] = []
    for mine, other in groups:
        part = [array.shape[axis] for axis in mine]
        if all(size == 1 for size in part):
            inner += [1] * len(other)
            continue
        sizes = [size for axis in mine if isinstance(size := ours[real_axes[0][axis]], int)]
        targets = [size for axis in other if isinstance(size := theirs[real_axes[1][axis]], int)]
        known = len(sizes) == len(mine) and len(targets) == len(other)
        if not known or math.prod(sizes) != math.prod(targets):
            return None
        whole = list(array.shape)
        whole[mine[0] : mine[-1] + 1] = sizes
        if math.prod(whole) > MOST:
            return None
        array = np.broadcast_to(array, whole)
        inner += targets
    array = array.reshape(inner)
    for axis, size in zip(real_axes[1], array.shape, strict=True):
        shape[axis] = size
    return array.reshape(shape)


def group_axes(ours: Sequence[int | str | None], theirs: Sequence[int | str | None]) -> list[tuple[range, range]]:
    """Divide two shapes into groups of axes with the same size, from the last axis on; the first may be of any size."""
    groups: list[tuple[range, range]] = []
    ends = [len(ours), len(theirs)]
    starts = list(ends)
    while all(starts):
        starts = [start - 1 for start in starts]
        our_size, their_size = ours[starts[0]], theirs[starts[1]]
        while isinstance(our_size, int) and isinstance(their_size, int) and our_size != their_size:
            side = 0 if our_size < their_size else 1
            starts[side] -= 1
            size = (ours, theirs)[side][starts[side]] if starts[side] >= 0 else None
            grown = size * (our_size, their_size)[side] if isinstance(size, int) else None
            our_size, their_size = (grown, their_size) if side == 0 else (our_size, grown)
        if our_size is None or our_size != their_size:
            break
        groups.insert(0, (range(starts[0], ends[0]), range(starts[1], ends[1])))
        ends = list(starts)
    return [(range(ends[0]), range(ends[1])), *groups] if any(ends) else groups


def transpose_back(array: Array, node: "ir.Node") -> Array:
    """Give what broadcasts to a transposed value the order of axes before."""
    order = [edit.find_transposed_axis(node, axis) % array.ndim for axis in range(array.ndim)]
    return array.transpose(np.argsort(order))
