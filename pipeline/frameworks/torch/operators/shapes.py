"""Compute operators on types, constants, shapes and places: what moves numbers, and what chooses among them."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.frameworks.torch.operators.attributes import (
    Compute,
    Make,
    list_sizes,
    read_int,
    read_ints,
    refuse,
)


def _torch_type(number: int) -> torch.dtype:
    kind = str(ir.DataType(number).name).lower()
    names = {"float": "float32", "double": "float64"}
    dtype = getattr(torch, names.get(kind, kind), None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"Cast to {kind} has no form in torch here", "omit --recover")
    return dtype


def _cast(node: "ir.Node", opset: int) -> Compute:
    wanted = _torch_type(read_int(node, "to", 1))
    return lambda x: x.to(wanted)


def _constant(node: "ir.Node", opset: int) -> Compute:
    for name in ("value_float", "value_floats", "value_int", "value_ints"):
        if name in node.attributes:
            numbers = np.asarray(node.attributes[name].value, np.float32 if "float" in name else np.int64)
            return lambda: torch.from_numpy(np.array(numbers))
    if "value" not in node.attributes:
        raise refuse(node, "it holds neither numbers nor a tensor")
    tensor = np.array(node.attributes["value"].as_tensor().numpy())
    if tensor.dtype.kind not in "biuf":
        raise refuse(node, f"its numbers are {tensor.dtype}")
    return lambda: torch.from_numpy(tensor)


def _constant_of_shape(node: "ir.Node", opset: int) -> Compute:
    given = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
    filler = torch.from_numpy(np.array(given)).reshape(())
    return lambda shape: filler.expand(list_sizes(shape)).clone()


def _reshape(x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    sizes = enumerate(list_sizes(shape))
    return x.reshape([x.shape[axis] if size == 0 and not allowzero else size for axis, size in sizes])


def _flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    place = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:place]), math.prod(x.shape[place:]))


def _squeeze(x: Tensor, given: Tensor | None = None, *, axes: tuple[int, ...] | None = None) -> Tensor:
    chosen = axes if given is None else list_sizes(given)
    return x.squeeze() if chosen is None else x.squeeze(tuple(chosen)) if chosen else x


def _unsqueeze(x: Tensor, given: Tensor | None = None, *, axes: tuple[int, ...] = ()) -> Tensor:
    chosen = axes if given is None else list_sizes(given)
    rank = x.ndim + len(chosen)
    for axis in sorted(axis % rank for axis in chosen):
        x = x.unsqueeze(axis)
    return x


def _split(node: "ir.Node", opset: int) -> Compute:
    axis, fixed = read_int(node, "axis", 0), read_ints(node, "split", ())
    count = read_int(node, "num_outputs", len(node.outputs))

    def compute(x: Tensor, split: Tensor | None = None) -> tuple[Tensor, ...]:
        sizes = fixed if split is None else list_sizes(split)
        parts: tuple[Tensor, ...] = torch.split(x, sizes or -(-x.shape[axis] // count), axis)
        return parts

    return compute


def _slice(
    x: Tensor,
    *given: Tensor | None,
    starts: tuple[int, ...] = (),
    ends: tuple[int, ...] = (),
    axes: tuple[int, ...] = (),
) -> Tensor:
    *inputs, steps = (*given, *[None] * 4)[:4]
    first, last, chosen = (
        fixed if value is None else list_sizes(value) for fixed, value in zip((starts, ends, axes), inputs, strict=True)
    )
    places = chosen or range(len(first))
    for start, end, axis, step in zip(first, last, places, list_sizes(steps) or [1] * len(first), strict=True):
        rows = range(x.shape[axis])[start:end:step]
        if step == 1:
            x = x.narrow(axis, rows.start if len(rows) else 0, len(rows))
        else:
            x = x.index_select(axis, torch.tensor(list(rows), dtype=torch.int64, device=x.device))
    return x


def _gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    size, place = x.shape[axis], axis % x.ndim
    chosen = indices.to(x.device, torch.int64)
    chosen = torch.where(chosen < 0, chosen + size, chosen)
    taken = x.index_select(place, chosen.reshape(-1))
    return taken.reshape((*x.shape[:place], *chosen.shape, *x.shape[place + 1 :]))


def _positive(indices: Tensor, size: int) -> Tensor:
    indices = indices.long()
    return torch.where(indices < 0, indices + size, indices)


def _gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    rank = indices.ndim - 1
    entries = [torch.arange(x.shape[axis], device=indices.device) for axis in range(batch_dims)]
    rows = [each.reshape([-1, *[1] * (rank - axis - 1)]) for axis, each in enumerate(entries)]
    depth = range(indices.shape[-1])
    return x[(*rows, *(_positive(indices[..., place], x.shape[batch_dims + place]) for place in depth))]


_REDUCED = {"none": "", "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    places, reduce = _positive(indices, x.shape[axis]), _REDUCED[reduction]
    if not reduce:
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, reduce)


def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    depth, reduce = indices.shape[-1], _REDUCED[reduction]
    parts = tuple(_positive(indices[..., place], x.shape[place]) for place in range(depth))
    if reduce in ("", "sum"):
        return x.index_put(parts, updates, accumulate=bool(reduce))
    width, row = math.prod(x.shape[depth:]), torch.zeros((), dtype=torch.int64, device=x.device)
    for place, part in enumerate(parts):
        row = row * x.shape[place] + part.to(x.device)
    rows = row.reshape(-1, 1).expand(-1, width)
    return x.reshape(-1, width).scatter_reduce(0, rows, updates.reshape(-1, width), reduce).reshape(x.shape)


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    wanted = [1] * max(0, x.ndim - shape.numel()) + list_sizes(shape)
    x = x.reshape([1] * (len(wanted) - x.ndim) + list(x.shape))
    return x.expand([old if new == 1 else new for old, new in zip(x.shape, wanted, strict=True)])


def _pad(
    x: Tensor,
    given: Tensor | None = None,
    filler: Tensor | None = None,
    axes: Tensor | None = None,
    *,
    mode: str = "constant",
    pads: tuple[int, ...] = (),
    value: float = 0.0,
) -> Tensor:
    sizes = pads if given is None else list_sizes(given)
    chosen = [axis % x.ndim for axis in list_sizes(axes)] or list(range(x.ndim))
    before, after = dict(zip(chosen, sizes, strict=False)), dict(zip(chosen, sizes[len(chosen) :], strict=True))
    if mode == "constant":
        number = value if filler is None else filler.item()
        flat = [size for axis in range(x.ndim)[::-1] for size in (before.get(axis, 0), after.get(axis, 0))]
        return F.pad(x, flat, value=number)
    for axis in chosen:
        x = _pad_axis(x, axis, before[axis], after[axis], mode)
    return x


def _pad_axis(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    size = x.shape[axis]
    places = torch.arange(-before, size + after, device=x.device)
    if mode == "edge":
        places = places.clamp(0, size - 1)
    elif mode == "wrap":
        first = max(-before, 0)  # what is cut off is not repeated
        places = first + (places - first) % (size - first - max(-after, 0))
    else:
        places = (size - 1) - ((size - 1) - places.abs()).abs()
    return x.index_select(axis, places)


def _range(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


def _one_hot(indices: Tensor, depth: Tensor, values: Tensor, *, axis: int = -1) -> Tensor:
    count = int(depth.reshape(()).item())
    hot = (_positive(indices, count).unsqueeze(-1) == torch.arange(count, device=indices.device)).movedim(-1, axis)
    return torch.where(hot, values[1], values[0])


def _top_k(
    x: Tensor,
    count: Tensor,
    *,
    axis: int = -1,
    largest: int = 1,
    sorted: int = 1,  # noqa: A002 - ONNX's name
) -> tuple[Tensor, ...]:
    top = x.topk(int(count.reshape(()).item()), axis, bool(largest), bool(sorted))
    return top.values, top.indices


def _arg(function: Callable[..., Tensor]) -> Make:
    def make(node: "ir.Node", opset: int) -> Compute:
        axis, keep = read_int(node, "axis", 0), bool(read_int(node, "keepdims", 1))
        if read_int(node, "select_last_index", 0):
            raise refuse(node, "select_last_index")
        return lambda x: function(x, axis, keepdim=keep)

    return make


def _cumulate(x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    place = int(axis.reshape(()).item())
    given = x.flip(place) if reverse else x
    total = given.cumsum(place, dtype=x.dtype)
    total = total - given if exclusive else total
    return total.flip(place) if reverse else total


def _triangle(x: Tensor, k: Tensor | None = None, *, upper: int = 1) -> Tensor:
    function = torch.triu if upper else torch.tril
    return function(x, 0 if k is None else int(k.item()))


def _eye_like(node: "ir.Node", opset: int) -> Compute:
    kind = _torch_type(read_int(node, "dtype", 1)) if "dtype" in node.attributes else None
    diagonal = read_int(node, "k", 0)

    def compute(x: Tensor) -> Tensor:
        ones = torch.ones(x.shape, dtype=kind or x.dtype, device=x.device)
        return ones.triu(diagonal).tril(diagonal)

    return compute


PLAIN: dict[str, Compute] = {
    "CastLike": lambda x, like: x.to(like.dtype),
    "Identity": lambda x: x,
    "Size": lambda x: torch.tensor(x.numel()),
    "Expand": _expand,
    "Tile": lambda x, repeats: x.repeat(list_sizes(repeats)),
    "Range": _range,
    "NonZero": lambda x: torch.nonzero(x).t(),
    "Shape": lambda x, *, start=0, end=None: torch.tensor(x.shape[start:end], dtype=torch.int64),
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": lambda x, *, perm=(): x.permute(perm or tuple(range(x.ndim))[::-1]),
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": lambda *values, axis=0: torch.cat(values, axis),
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": lambda x, indices, *, axis=0: x.gather(axis, _positive(indices, x.shape[axis])),
    "GatherND": _gather_nd,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Pad": _pad,
    "OneHot": _one_hot,
    "TopK": _top_k,
    "CumSum": _cumulate,
    "Trilu": _triangle,
}
MADE: dict[str, Make] = {
    "Cast": _cast,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Split": _split,
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "EyeLike": _eye_like,
}
