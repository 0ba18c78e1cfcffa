"""Tell by the labels of what a node makes those of what it reads, for each operator that passes factors on."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.rescale.axes import (
    FIXED,
    MOST,
    UNREAD,
    Labels,
    dims,
    find_axis,
    reshape_back,
    transpose_back,
)
from enginesmith.pipeline.passes.rescale.products import Product
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    from enginesmith.pipeline.passes.rescale.labels import Labeling

_Moved = Mapping[int, Labels] | None
"""Labels of inputs, by their index; None where an operator does not pass factors on."""


@dataclass(frozen=True)
class _Rule:
    move: Callable[["Labeling", "ir.Node", Labels], _Moved]
    """Tells labels of inputs by those of the first output."""
    carriers: tuple[int, ...] | None = (0,)
    """Inputs that have the channels of the output; None for all that are no constants."""


def find_rule(node: "ir.Node") -> _Rule | None:
    others = () if node.op_type == "Split" else node.outputs[1:]
    read = any(value.uses() or value.is_graph_output() for value in others)
    return None if node.domain or read else _RULES.get(node.op_type)


def find_scalable(graph: "ir.Graph", products: "Mapping[ir.Node, Product]") -> "set[ir.Value]":
    """Find values that come from a product or a constant through nothing but what passes factors on."""
    values: set[ir.Value] = set()
    for node in graph:
        rule = find_rule(node)
        if node in products:
            scalable = products[node].shares_weight(products)
        elif node.op_type in ("Mul", *_SCALED):
            scalable = not node.domain and (
                _find_factor(node) is not None
                or (node.op_type == "Mul" and any(_is_only_for(value, values) for value in node.inputs))
            )
        elif rule is None or node.op_type in _CHANNEL_NORMALIZATIONS:
            scalable = False
        elif node.op_type == "Div":
            scalable = _is_only_for(node.inputs[0], values)
        elif node.op_type == "Sub":
            scalable = all(edit.is_factor(value) or _is_only_for(value, values) for value in node.inputs)
        else:
            carriers = range(len(node.inputs)) if rule.carriers is None else rule.carriers
            inputs = [node.inputs[index] for index in carriers if index < len(node.inputs)]
            scalable = all(value in values or edit.is_factor(value) for value in inputs)
        if scalable:
            values.update(node.outputs)
    return values


def _is_only_for(value: "ir.Value | None", scalable: "Iterable[ir.Value]") -> bool:
    return value is not None and value in scalable and edit.find_only_reader(value)[0] is not None


def _find_factor(node: "ir.Node") -> int | None:
    """Find the input of a multiplication or normalization that is a constant factor."""
    places = (0, 1) if node.op_type == "Mul" else (1,)
    return next((index for index in places if edit.is_factor(node.inputs[index])), None)


def _keep(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    return {0: labels}


def _move_through_prelu(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    return {0: labels} if edit.read(node.inputs[1]) is not None else None


def _move_through_clip(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    labeling.found.clips.append((node, labels))
    return {0: labels}


def _move_through_pool(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    return {0: labeling.tie(labels, range(2, labels.ndim))}


def _move_through_resize(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    """Scale through sums of places with fixed factors; all that is added up along an axis gets one label."""
    mode = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    if mode not in _RESIZED_IN_PLACE or policy != "stretch":
        return None
    axes = _attribute(node, "axes", range(labels.ndim))
    scales = edit.read(node.inputs[min(2, len(node.inputs) - 1)])
    if scales is not None and scales.size == len(axes):
        moved = [axis % labels.ndim for axis, scale in zip(axes, scales.reshape(-1), strict=True) if scale != 1]
    else:
        known = zip(dims(node.inputs[0]), dims(node.outputs[0]), strict=True)
        moved = [axis for axis, (before, behind) in enumerate(known) if before is None or before != behind]
    return {0: labeling.tie(labels, moved)}


def _move_through_pad(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    """Scale through padding with zeros or with what is there; all along an axis that is padded get one label."""
    given = [edit.read(value) for value in node.inputs[1:]]
    if not given:  # in old opsets
        amounts, filled = _attribute(node, "pads", ()), "value" in node.attributes
    elif given[0] is None:
        return None
    else:
        amounts = [int(amount) for amount in given[0].reshape(-1)]
        filled = edit.find_input(node, 2) is not None and (given[1] is None or bool(given[1].any()))
    if edit.find_input(node, 3) is not None:
        if given[2] is None:
            return None
        axes = [int(axis) % labels.ndim for axis in given[2].reshape(-1)]
    else:
        axes = list(range(labels.ndim))
    if filled or len(amounts) != 2 * len(axes):
        return None
    pairs = zip(axes, amounts[: len(axes)], amounts[len(axes) :], strict=True)
    return {0: labeling.tie(labels, [axis for axis, before, behind in pairs if before or behind])}


def _attribute(node: "ir.Node", name: str, missing: Sequence[int]) -> Sequence[int]:
    return node.attributes[name].as_ints() if name in node.attributes else missing


def _move_through_add(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    for index, value in enumerate(node.inputs):
        if edit.is_factor(value):
            if len(dims(node.inputs[1 - index])) != labels.ndim:
                return None
            labeling.found.constants.append((node, index, labels))
            return {1 - index: labels}
    return {index: labeling.tie_broadcast(labels, value) for index, value in enumerate(node.inputs)}


def _move_through_all(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    """Scale all numbers that are added up, averaged or chosen from, but for zeros."""
    moved = {}
    for index in range(1 if node.op_type == "Where" else 0, len(node.inputs)):
        value = node.inputs[index]
        constant = edit.read(value)
        if constant is None:
            moved[index] = labeling.tie_broadcast(labels, value)
        elif constant.any():
            return None
    return moved


def _move_through_mul(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    """Scale one of the operands: a constant, or the larger one, or the one that can be scaled for free."""
    factor = _find_factor(node)
    if factor is not None:
        other = node.inputs[1 - factor]
        asked = (labels > FIXED).any()  # else nothing behind has factors to pass on
        if asked and _is_only_for(other, labeling.scalable) and len(dims(other)) == labels.ndim:
            constant = edit.read(node.inputs[factor])
            return {1 - factor: labels if constant is None else labeling.pass_factor(labels, constant)}
        labeling.found.constants.append((node, factor, labels))
        return _end_at_factor(labeling, node, factor, labels.ndim)
    first, other = node.inputs
    sizes = dims(node.outputs[0])
    wide = [index for index, value in enumerate(node.inputs) if dims(value) == sizes]
    if first is other or not wide:
        return None
    if len(wide) == 2:
        wide = [index for index in wide if _is_only_for(node.inputs[index], labeling.scalable)]
    return {wide[0]: labels} if wide else None


def _end_at_factor(labeling: "Labeling", node: "ir.Node", factor: int, rank: int) -> _Moved:
    """Let a constant factor of each channel take back what is done to what it multiplies."""
    numbers = edit.read(node.inputs[factor])
    axis = find_axis(numbers) if numbers is not None else None
    if numbers is None or axis is None or len(dims(node.inputs[1 - factor])) != rank:
        return {}
    before = labeling.end(node.inputs[1 - factor], axis + rank - numbers.ndim, numbers.size)
    labeling.found.returned.append((node, factor, before))
    return {1 - factor: before}


def _move_through_div(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    """Scale the numerator where it is as large as the output, and where nothing else reads it.

    A normalization reads its numerator for the divisor, too: such channels are scaled behind it.
    """
    numerator, divisor = node.inputs
    if not _is_only_for(numerator, labeling.scalable) or dims(numerator) != dims(node.outputs[0]):
        return None
    constant = edit.read(divisor)
    inverse = None if constant is None or not constant.all() else 1 / constant.astype(np.float64)
    return {0: labels if inverse is None else labeling.pass_factor(labels, inverse)}


def _move_through_matmul(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    """Scale the columns of V in A·V, for every head on its own."""
    value = node.inputs[1]
    if value is None or not 2 <= len(dims(value)) <= labels.ndim:
        return None
    return {1: labeling.tie_broadcast(labeling.tie(labels, (labels.ndim - 2,)), value)}


def _move_through_attention(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    """Scale the values of the operator of opset 23; heads that several queries share have other sizes."""
    if len(dims(node.inputs[0])) != len(dims(node.inputs[2])) or any(node.inputs[4:]):
        return None
    return {2: labeling.tie(labels, (labels.ndim - 2,))}


def _move_through_normalization(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    """End at the scale, and the shift, of a normalization over the last axis."""
    last = labels.ndim - 1
    given = [index for index in range(1, len(node.inputs)) if node.inputs[index] is not None]
    along = node.attributes.get_int("axis", -1) in (-1, last)
    if not along or not all(edit.is_factor(node.inputs[index]) for index in given):
        return None
    labels = labeling.tie(labels, range(last))
    for index in given:
        labeling.found.constants.append((node, index, labels))
    return {}


def _move_through_channel_normalization(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    """End at the scale and the shift of BatchNormalization or InstanceNormalization: one of each per channel.

    What BatchNormalization reads can be scaled apart from that: its deviation is constant, so its mean is scaled along,
    and its scale takes the factor back. InstanceNormalization adds a number to the variance that each sample has, which
    is much beside that of a sample of little contrast: what it reads stays.
    """
    own_statistics = node.op_type == "InstanceNormalization"
    given = [edit.read(node.inputs[index]) for index in range(1, 3 if own_statistics else 5)]
    scale = given[0]
    known = all(numbers is not None and numbers.dtype == np.float32 for numbers in given)
    training = node.attributes.get_int("training_mode", 0) != 0
    if labels.ndim < 2 or scale is None or not known or training:
        return None
    behind = labeling.tie(labels, (axis for axis in range(labels.ndim) if axis != 1)).reshape(-1)
    labeling.found.constants.extend((node, index, behind) for index in (1, 2))
    if own_statistics:
        return {}
    before = labeling.end(node.inputs[0], 1, scale.size)
    labeling.found.constants.append((node, 3, before.reshape(-1)))
    labeling.found.returned.append((node, 1, before.reshape(-1)))
    return {0: before}


def _move_through_reduction(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    """Keep channels through a mean, a sum, an extreme or a norm over other axes than theirs."""
    rank = len(dims(node.inputs[0]))
    reduced = sorted({axis % rank for axis in edit.find_axes(node) or ()}) if rank else []
    if not reduced:
        return None
    return {0: labels if node.attributes.get_int("keepdims", 1) else np.expand_dims(labels, tuple(reduced))}


def _move_through_reshape(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    moved = reshape_back(labels, node)
    return None if moved is None else {0: moved}


def _move_through_depth_to_space(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    """Give the places of each block, which were channels, one label."""
    labels, places = labeling.tie(labels, (2, 3)), node.attributes.get_int("blocksize") ** 2
    if labels.shape[1] == 1:
        return {0: labels}
    in_turn = node.attributes.get_string("mode", "DCR") == "CRD"
    return {0: labels.repeat(places, 1) if in_turn else np.tile(labels, (1, places, 1, 1))}


def _move_through_space_to_depth(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    labels, places = labeling.tie(labels, (2, 3)), node.attributes.get_int("blocksize") ** 2
    return {0: labels if labels.shape[1] == 1 else _tie_copies(labeling, labels, 1, places)}


def _move_through_tile(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    repeats = edit.read(node.inputs[1])
    if repeats is None:
        return None
    for axis, count in enumerate(repeats.reshape(-1).tolist()):
        labels = labels if count == 1 or labels.shape[axis] == 1 else _tie_copies(labeling, labels, axis, count)
    return {0: labels}


def _tie_copies(labeling: "Labeling", labels: Labels, axis: int, count: int) -> Labels:
    """Make labels equal that come back ``count`` times along an axis, and leave the first of each."""
    apart = labels.reshape(*labels.shape[:axis], count, -1, *labels.shape[axis + 1 :])
    return labeling.tie(apart, (axis,)).squeeze(axis)


def _move_through_expand(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    return {0: labeling.tie_broadcast(labels, node.inputs[0])}


def _move_through_running_sum(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    axis = edit.read(node.inputs[1])
    return None if axis is None else {0: labeling.tie(labels, (int(axis.reshape(-1)[0]),))}


def _move_through_transpose(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    return {0: transpose_back(labels, node)}


def _move_through_concat(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    axis = node.attributes.get_int("axis", 0) % labels.ndim
    if labels.shape[axis] == 1:
        return dict.fromkeys(range(len(node.inputs)), labels)
    sizes = [dims(value)[axis : axis + 1] for value in node.inputs]
    widths = [size for each in sizes for size in each if isinstance(size, int)]
    if len(widths) < len(sizes) or sum(widths) != labels.shape[axis]:
        return None
    return dict(enumerate(np.split(labels, np.cumsum(widths)[:-1], axis)))


def _move_through_split(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    axis = node.attributes.get_int("axis", 0) % len(dims(node.outputs[0]))
    parts = []
    for value in node.outputs:
        labels, size = labeling.get(value), dims(value)[axis]
        if not isinstance(size, int):
            return None
        parts.append(np.broadcast_to(labels, (*labels.shape[:axis], size, *labels.shape[axis + 1 :])))
    others = np.broadcast_shapes(*((*part.shape[:axis], 1, *part.shape[axis + 1 :]) for part in parts))
    whole = [np.broadcast_to(part, (*others[:axis], part.shape[axis], *others[axis + 1 :])) for part in parts]
    return {0: np.concatenate(whole, axis)}


def _move_through_slice(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    """Put labels where a Slice takes channels from; all others have labels of their own."""
    sizes = dims(node.inputs[0])
    given = [edit.read(value) for value in node.inputs[1:]]
    if len(given) < 2 or not sizes or any(numbers is None for numbers in given):
        return None
    starts, ends, *rest = ([int(number) for number in numbers.reshape(-1)] for numbers in given if numbers is not None)
    axes = [axis % len(sizes) for axis in (rest[0] if rest else range(len(starts)))]
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    taken = {}
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size = sizes[axis]
        if not isinstance(size, int) or step < 1:
            return None
        taken[axis] = np.arange(size)[start:end:step]
    return _pick(labeling, node, labels, taken)


def _move_through_gather(labeling: "Labeling", node: "ir.Node", labels: Labels) -> _Moved:
    indices, sizes = edit.read(node.inputs[1]), dims(node.inputs[0])
    axis = node.attributes.get_int("axis", 0) % max(len(sizes), 1)
    if indices is None or indices.ndim > 1 or not sizes or not isinstance(sizes[axis], int):
        return None
    return _pick(labeling, node, labels if indices.ndim else np.expand_dims(labels, axis), {axis: indices})


def _pick(labeling: "Labeling", node: "ir.Node", labels: Labels, taken: Mapping[int, Array]) -> _Moved:
    """Put the labels of an output where it takes channels from along some axes, with indices for each."""
    for axis, indices in taken.items():
        size = dims(node.inputs[0])[axis]
        shape = list(labels.shape)
        shape[axis] = size if isinstance(size, int) else 1
        if math.prod(shape) > MOST:
            return None
        whole = np.full(shape, UNREAD)
        np.maximum.at(whole.swapaxes(0, axis), indices.reshape(-1), labels.swapaxes(0, axis))
        labeling.equate(whole.take(indices.reshape(-1), axis), labels)  # what is taken twice has both
        labels = whole
    return {0: labels}


_RESIZED_IN_PLACE = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
"""Ways of Resize by which an axis of scale 1 stays as it is."""
_LAST_AXIS_NORMALIZATIONS = ("LayerNormalization", "RMSNormalization")
_CHANNEL_NORMALIZATIONS = ("BatchNormalization", "InstanceNormalization")
_SCALED = ("BatchNormalization", *_LAST_AXIS_NORMALIZATIONS)
"""Normalizations whose scale is their own; that of an InstanceNormalization may be behind it, with more channels."""
_POOLS = ("MaxPool", "AveragePool", "LpPool", "GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool", "GridSample")
_OF_ALL = ("Max", "Min", "Sum", "Mean")
_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2")
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("Relu", "LeakyRelu", "Identity", "Abs", "Neg"), _Rule(_keep)),
    **dict.fromkeys(_POOLS, _Rule(_move_through_pool)),
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), _Rule(_move_through_reshape)),
    **dict.fromkeys(_LAST_AXIS_NORMALIZATIONS, _Rule(_move_through_normalization)),
    **dict.fromkeys(_CHANNEL_NORMALIZATIONS, _Rule(_move_through_channel_normalization)),
    **dict.fromkeys(_REDUCTIONS, _Rule(_move_through_reduction)),
    **dict.fromkeys(("Add", "Sub"), _Rule(_move_through_add, None)),
    **dict.fromkeys(_OF_ALL, _Rule(_move_through_all, None)),
    "Attention": _Rule(_move_through_attention, (2,)),
    "Clip": _Rule(_move_through_clip),
    "Concat": _Rule(_move_through_concat, None),
    "CumSum": _Rule(_move_through_running_sum),
    "DepthToSpace": _Rule(_move_through_depth_to_space),
    "Div": _Rule(_move_through_div),
    "Expand": _Rule(_move_through_expand),
    "Gather": _Rule(_move_through_gather),
    "MatMul": _Rule(_move_through_matmul, (1,)),
    "Mul": _Rule(_move_through_mul),
    "PRelu": _Rule(_move_through_prelu),
    "Pad": _Rule(_move_through_pad),
    "Resize": _Rule(_move_through_resize),
    "Slice": _Rule(_move_through_slice),
    "SpaceToDepth": _Rule(_move_through_space_to_depth),
    "Split": _Rule(_move_through_split),
    "Tile": _Rule(_move_through_tile),
    "Transpose": _Rule(_move_through_transpose),
    "Where": _Rule(_move_through_all, (1, 2)),
}
