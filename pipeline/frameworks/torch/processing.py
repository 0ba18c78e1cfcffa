"""Compute in PyTorch what ``--prepend`` and ``--append`` add to a model: the reference for what is added to graphs."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import MissingCapability, ModelError
from enginesmith.pipeline.frameworks.onnx import evaluator
from enginesmith.pipeline.frameworks.processing import Appended, Prepared, Processing, replace_outputs
from enginesmith.pipeline.tensors import Array, Feeds

_log = logging.getLogger(__name__)

_TOLERANCES = {"float16": 3e-2}
"""Distances up to which graphs are equal, of an output's range, where it is not :data:`evaluator.TOLERANCE`: numbers
that are computed in float16 are rounded otherwise here and there, by 5e-4, and a model may make more of that."""
_BLOCK = 1024
"""Boxes that are compared with each other at once."""


class Extension(nn.Module):
    """Prepare a model's inputs, and complete its outputs."""

    factors: Tensor
    offsets: Tensor

    def __init__(self, processing: Processing) -> None:
        super().__init__()
        self.processing = processing
        self.training = False
        prepared = processing.prepared
        dtype = getattr(torch, prepared.core.dtype) if prepared else torch.float32
        for name in ("factors", "offsets"):  # buffers, so that they move and are cast with the model
            numbers = torch.tensor(getattr(prepared, name) if prepared else (1.0,), dtype=dtype)
            shape = prepared.channels_shape if prepared else ()
            self.register_buffer(name, numbers.reshape(shape), persistent=False)

    def prepare(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Make the model's inputs."""
        prepared = self.processing.prepared
        if prepared is None:
            return tuple(tensors)
        value = tensors[prepared.position].to(self.factors.dtype)
        if prepared.channels_last:
            value = value.permute(0, 3, 1, 2)
        if prepared.size:
            value = value.permute(0, 3, 1, 2) if prepared.own_last else value
            value = nn.functional.interpolate(value, prepared.size, mode="bilinear", align_corners=False)
            value = value.permute(0, 2, 3, 1) if prepared.own_last else value
        if prepared.scales:
            value = value * self.factors + self.offsets
        return (*tensors[: prepared.position], value, *tensors[prepared.position + 1 :])

    def complete(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Make the outputs that are returned."""
        values = list(outputs)
        for step in self.processing.appended:
            values = replace_outputs(values, step.reads, _compute(step, [values[index] for index in step.reads]))
        return tuple(values)


def make_raw_example(prepared: Prepared, example: Tensor) -> Tensor:
    """Make a raw input from an example of the model's own: the computation backwards, at the sizes of the raw input."""
    shape = prepared.channels_shape
    factors, offsets = (torch.tensor(each).reshape(shape) for each in (prepared.factors, prepared.offsets))
    value = (example.float() - offsets) / factors
    if prepared.size:
        given = (prepared.raw.shape[axis] for axis in prepared.raw_sides)
        sides = [dim if isinstance(dim, int) else 2 * side for dim, side in zip(given, prepared.size, strict=True)]
        value = value.permute(0, 3, 1, 2) if prepared.own_last else value
        value = nn.functional.interpolate(value, sides, mode="nearest")
        value = value.permute(0, 2, 3, 1) if prepared.own_last else value
    if prepared.channels_last:
        value = value.permute(0, 2, 3, 1)
    if prepared.raw.dtype == "uint8":
        value = value.round().clamp(0, 255)
    return value.to(getattr(torch, prepared.raw.dtype)).contiguous()


def check_graph(processing: Processing, core: Path, extended: Path, feeds: Feeds) -> None:
    """Compare an extended graph with the graph that it was made from, what is around it computed in PyTorch.

    Of classes that are selected, the scores are compared, as rounding decides between those of equal scores.

    Raises:
        ModelError: the answers differ, or the graphs cannot be run.
    """
    extension = Extension(processing)
    try:
        given = [torch.from_numpy(feeds[spec.name]) for spec in processing.signature.inputs]
        prepared = extension.prepare(given)
        names = [spec.name for spec in processing.core.inputs]
        inside = {name: value.numpy() for name, value in zip(names, prepared, strict=True)}
        answers = [torch.from_numpy(value) for value in evaluator.run_graph(core, inside)]
        expected = [value.numpy() for value in extension.complete(answers)]
        found = evaluator.run_graph(extended, feeds)
        replace_places(processing, answers, expected, found)
        distance = evaluator.largest_difference(expected, found)
    except MissingCapability:
        _log.warning("%s is not installed: what was added to the graph was not compared", evaluator.LIBRARY)
        return
    dtypes = {spec.dtype for spec in (*processing.core.inputs, *processing.core.outputs)}
    if distance > max(_TOLERANCES.get(dtype, evaluator.TOLERANCE) for dtype in dtypes):
        raise ModelError(
            f"the graph with --prepend and --append differs from PyTorch's computation by {distance:.1e} of its range",
            "report this with the model; without these options, compute it outside of the graph",
        )


def replace_places(
    processing: Processing, answers: Sequence[Tensor], expected: list[Array], found: list[Array]
) -> None:
    """Replace the places that a selection gives by the scores that are there; ``answers`` are the model's own."""
    *before, last = processing.appended or (None,)
    if last is None or last.word not in ("argmax", "topk"):
        return
    scores = Extension(processing.model_copy(update={"appended": tuple(before)})).complete(answers)[last.reads[0]]
    at = last.reads[0] + len(last.made) - 1
    for outputs in (expected, found):
        places = torch.from_numpy(outputs[at])
        places = places.unsqueeze(last.axis) if last.word == "argmax" else places
        outputs[at] = scores.gather(last.axis, places).numpy()


def _compute(step: Appended, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    value = values[0]
    if step.word == "softmax":
        return (value.softmax(step.axis),)
    if step.word == "sigmoid":
        return (value.sigmoid(),)
    if step.word == "argmax":
        return (value.argmax(step.axis),)
    if step.word == "topk":
        best, places = value.topk(step.count, step.axis)
        return best, places
    boxes, scores = values if len(values) > 1 else (value[:, :4].transpose(1, 2), value[:, 4:])
    return (_suppress(step, boxes.float(), scores.float()),)


def _suppress(step: Appended, boxes: Tensor, scores: Tensor) -> Tensor:
    """Select the best boxes that do not overlap, class by class: [N, boxes, 4], [N, classes, boxes] → [N, rows, 6].

    Rows are corners, score and class, the best first, and zeros behind the last box. It computes what
    NonMaxSuppression of ONNX does, https://onnx.ai/onnx/operators/onnx__NonMaxSuppression.html.
    """
    if step.activation:
        scores = scores.softmax(1) if step.activation == "softmax" else scores.sigmoid()
    corners = boxes
    if step.suppression.boxes == "center":
        half = boxes[..., 2:] / 2
        corners = torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], -1)
    kept_scores = torch.zeros_like(scores)
    for image in range(len(scores)):
        classes, places = (scores[image] > step.suppression.score).nonzero(as_tuple=True)
        order = scores[image, classes, places].argsort(descending=True, stable=True)
        classes, places = classes[order], places[order]
        chosen = _find_best(_sort_corners(step, corners[image, places]), classes, step.suppression.iou)
        classes, places = classes[chosen], places[chosen]  # those beyond a class's `max` are not among the best `max`
        kept_scores[image, classes, places] = scores[image, classes, places]
    flat = kept_scores.flatten(1)
    best, index = flat.sort(dim=1, descending=True, stable=True)
    rows = min(step.suppression.max, flat.shape[1])
    best, index = best[:, :rows], index[:, :rows]
    count = scores.shape[2]
    best_corners = corners.gather(1, (index % count).unsqueeze(-1).expand(-1, -1, 4))
    numbers = index.div(count, rounding_mode="floor").to(best.dtype)
    table = torch.cat([best_corners, best.unsqueeze(-1), numbers.unsqueeze(-1)], -1)
    return table * (best > 0).unsqueeze(-1)


def _sort_corners(step: Appended, corners: Tensor) -> Tensor:
    """Put the smaller corner first; any two opposite corners describe a box."""
    if step.suppression.boxes == "center":
        return corners
    first, second = corners[:, :2], corners[:, 2:]
    return torch.cat([torch.minimum(first, second), torch.maximum(first, second)], 1)


def _find_best(corners: Tensor, classes: Tensor, iou: float) -> Tensor:
    """Return the positions of the boxes that no better one of their class overlaps; the boxes are sorted by score."""
    positions = torch.empty(0, dtype=torch.int64, device=corners.device)
    for start in range(0, len(corners), _BLOCK):
        block = torch.arange(start, min(start + _BLOCK, len(corners)), device=corners.device)
        free = block[~_overlap(corners, classes, positions, block, iou).any(0)]
        among = _overlap(corners, classes, free, free, iou).triu(1)
        stays = torch.ones(len(free), dtype=torch.bool, device=corners.device)
        while True:  # what is dropped drops nothing else: from the best on, one more box is settled each time
            after = ~(among & stays[:, None]).any(0)
            if torch.equal(after, stays):
                break
            stays = after
        positions = torch.cat([positions, free[stays]])
    return positions


def _overlap(corners: Tensor, classes: Tensor, first: Tensor, second: Tensor, iou: float) -> Tensor:
    """Tell which pairs of boxes are of one class and overlap by more than ``iou``, [first, second]."""
    ours, theirs = corners[first][:, None], corners[second][None]
    low, high = torch.maximum(ours[..., :2], theirs[..., :2]), torch.minimum(ours[..., 2:], theirs[..., 2:])
    both = (high - low).clamp(min=0).prod(-1)
    areas = [(side[..., 2:] - side[..., :2]).prod(-1) for side in (ours, theirs)]
    union = areas[0] + areas[1] - both
    sound = (areas[0] > 0) & (areas[1] > 0) & (union > 0) & (both > 0)
    return sound & (both / union > iou) & (classes[first][:, None] == classes[second][None])
