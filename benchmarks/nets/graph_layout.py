"""Operators that random graphs grow by that move numbers: joined, cut, looked up, padded, and in other shapes."""

import math

import numpy as np
from graph_builder import FLOAT, INT64, VOCABULARY, RandomGraph


def add_resize(graph: RandomGraph) -> None:
    """Add a resize that doubles a small picture."""
    value = graph.pick(3)
    if value is None or max(value.shape[1:]) > 12:
        return
    mode = graph.choose(("nearest", "linear"))
    where = "asymmetric" if mode == "nearest" else graph.choose(("half_pixel", "align_corners", "asymmetric"))
    attributes = {"mode": mode, "coordinate_transformation_mode": where}
    attributes |= {"nearest_mode": "floor"} if mode == "nearest" else {}
    scales = graph.constant([1, 1, 2, 2], np.float32)
    made = graph.node("Resize", [value.name, "", scales], **attributes)
    graph.add(made, (value.shape[0], 2 * value.shape[1], 2 * value.shape[2]))


def add_concat(graph: RandomGraph) -> None:
    """Add a value joined with others along an axis."""
    value = graph.pick()
    if value is None:
        return
    axis = int(graph.rng.integers(len(value.shape)))
    rest = value.shape[:axis] + value.shape[axis + 1 :]
    fitting = [one for one in graph.values if one.kind == FLOAT and len(one.shape) == len(value.shape)]
    fitting = [one for one in fitting if one.shape[:axis] + one.shape[axis + 1 :] == rest]
    others = [graph.choose(fitting) for _ in range(int(graph.rng.integers(1, 3)))]
    total = value.shape[axis] + sum(one.shape[axis] for one in others)
    if total <= 48:
        names = [value.name, *(one.name for one in others)]
        place = axis + 1 if graph.chance(0.7) else axis - len(value.shape)
        made = graph.node("Concat", names, axis=place)
        graph.add(made, (*value.shape[:axis], total, *value.shape[axis + 1 :]))


def add_split(graph: RandomGraph) -> None:
    """Add two parts of a value, of which one may be left unread."""
    value = graph.pick()
    axes = [axis for axis, size in enumerate(value.shape) if size >= 2] if value is not None else []
    if value is None or not axes:
        return
    axis = graph.choose(axes)
    first = int(graph.rng.integers(1, value.shape[axis]))
    parts = [first, value.shape[axis] - first]
    graph.node("Split", [value.name, graph.integers(*parts)], 2, axis=axis + 1)
    names = graph.last_outputs()
    for name, size in list(zip(names, parts, strict=True))[: 1 if graph.chance(0.3) else 2]:
        graph.add(name, (*value.shape[:axis], size, *value.shape[axis + 1 :]))


def add_slice(graph: RandomGraph) -> None:
    """Add a slice of a value, forwards or backwards."""
    value = graph.pick()
    axes = [axis for axis, size in enumerate(value.shape) if size >= 2] if value is not None else []
    if value is None or not axes:
        return
    axis = graph.choose(axes)
    size = value.shape[axis]
    start, end, step = graph.choose(((1, 1 << 40, 1), (0, -1, 1), (0, size, 2), (-1, -(1 << 40), -1)))
    count = len(range(size)[start : None if abs(end) > size else end : step])
    made = graph.node("Slice", [value.name, *(graph.integers(n) for n in (start, end, axis + 1, step))])
    graph.add(made, (*value.shape[:axis], count, *value.shape[axis + 1 :]))


def add_gather(graph: RandomGraph) -> None:
    """Add one or two places of a value along an axis."""
    value = graph.pick()
    if value is None:
        return
    axis = int(graph.rng.integers(len(value.shape)))
    places = [int(place) for place in graph.rng.integers(-value.shape[axis], value.shape[axis], 2)]
    if graph.chance(0.5) or len(value.shape) == 1:
        made = graph.node("Gather", [value.name, graph.integers(*places)], axis=axis + 1)
        graph.add(made, (*value.shape[:axis], 2, *value.shape[axis + 1 :]))
    else:
        made = graph.node("Gather", [value.name, graph.constant(places[0], np.int64)], axis=axis + 1)
        graph.add(made, value.shape[:axis] + value.shape[axis + 1 :])


def add_embed(graph: RandomGraph) -> None:
    """Add rows of a table that the tokens look up."""
    value = graph.pick(1, INT64)
    if value is not None and value.name == "tokens":  # others may be larger than a table
        width = int(graph.rng.integers(2, 9))
        table = graph.weight(VOCABULARY + 2, width, scale=0.7)
        graph.add(graph.node("Gather", [table, value.name]), (*value.shape, width))


def add_pad(graph: RandomGraph) -> None:
    """Add a padding of a value along an axis."""
    value = graph.pick()
    if value is None or min(value.shape) < 3 or max(value.shape) > 16:
        return
    axis, mode = int(graph.rng.integers(len(value.shape))), graph.choose(("constant", "reflect", "edge"))
    rank = len(value.shape) + 1
    pads = [0] * (2 * rank)
    pads[axis + 1], pads[rank + axis + 1] = 1, graph.choose((0, 2))
    filled = [graph.constant(0.5, np.float32)] if mode == "constant" and graph.chance(0.5) else []
    made = graph.node("Pad", [value.name, graph.integers(*pads), *filled], mode=mode)
    grown = value.shape[axis] + pads[axis + 1] + pads[rank + axis + 1]
    graph.add(made, (*value.shape[:axis], grown, *value.shape[axis + 1 :]))


def add_reshape(graph: RandomGraph) -> None:
    """Add a value in another shape, or in its own after a detour."""
    value = graph.pick()
    if value is None:
        return
    total = math.prod(value.shape)
    kind = graph.choose(("flat", "flatten", "split", "computed", "squeeze"))
    if kind == "flat":
        graph.add(graph.node("Reshape", [value.name, graph.integers(0, -1)]), (total,))
    elif kind == "flatten":
        graph.add(graph.node("Flatten", [value.name], axis=1), (total,))
    elif kind == "squeeze":
        axis = graph.integers(int(graph.rng.integers(1, len(value.shape) + 2)))
        wide = graph.node("Unsqueeze", [value.name, axis])
        made = graph.node("Relu", [wide]) if graph.chance(0.5) else wide
        graph.add(graph.node("Squeeze", [made, axis]), value.shape)
    elif kind == "split" and total % 2 == 0:
        target = graph.choose(((0, 2, total // 2), (-1, 2, total // 2)))
        graph.add(graph.node("Reshape", [value.name, graph.integers(*target)]), (2, total // 2))
    elif kind == "computed":
        shape = graph.node("Shape", [value.name])
        batch = graph.node("Gather", [shape, graph.integers(0)])
        target = graph.node("Concat", [batch, graph.integers(total)], axis=0)
        graph.add(graph.node("Reshape", [value.name, target]), (total,))


def add_transpose(graph: RandomGraph) -> None:
    """Add a value whose axes behind the batch are in another order."""
    value = graph.pick()
    if value is not None:
        order = [int(axis) for axis in graph.rng.permutation(len(value.shape))]
        made = graph.node("Transpose", [value.name], perm=[0, *(axis + 1 for axis in order)])
        graph.add(made, [value.shape[axis] for axis in order])


def add_expand(graph: RandomGraph) -> None:
    """Add a value that is repeated along an axis of size 1."""
    value = graph.pick()
    if value is None or 1 not in value.shape:
        return
    axis = value.shape.index(1)
    target = [1, *value.shape]
    target[axis + 1] = 3
    made = graph.node("Expand", [value.name, graph.integers(*target)])
    graph.add(made, target[1:])
