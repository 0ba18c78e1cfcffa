"""Compute ONNX operators with torch, so that gradients go through a graph.

Each row of the tables makes, from a node and the graph's opset, a function of the node's inputs: None stands for one
that is left out. Semantics: https://onnx.ai/onnx/operators/.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from enginesmith.pipeline.errors import ModelError

if TYPE_CHECKING:
    import onnx_ir as ir


Compute = Callable[..., Tensor | tuple[Tensor, ...]]
Make = Callable[["ir.Node", int], Compute]
_DOMAINS = ("", "ai.onnx")
_MICROSOFT = ("Gelu", "FastGelu", "QuickGelu", "BiasGelu")
"""Operators of com.microsoft; others of its own have the names of standard ones, and other inputs."""


def find(node: "ir.Node", opset: int) -> Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]:
    """Return the function that computes a node from its inputs.

    Raises:
        ModelError: the operator has no form in torch, or not as it is used here.
    """
    compute: Compute | None = None
    if node.domain in _DOMAINS or (node.domain == "com.microsoft" and node.op_type in _MICROSOFT):
        if node.op_type in _PLAIN:
            compute = _PLAIN[node.op_type]
        elif node.op_type in _MADE:
            compute = _MADE[node.op_type](node, opset)
    if compute is None:
        raise _refuse(node)
    made = compute

    def run(values: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        found = made(*values)
        return found if isinstance(found, tuple) else (found,)

    return run


def _refuse(node: "ir.Node", why: str = "") -> ModelError:
    return ModelError(
        f"{node.op_type} {node.name!r} has no form in torch here{f': {why}' if why else ''}",
        "omit --recover, or export the model without this operator",
    )


def _ints(node: "ir.Node", name: str, default: Sequence[int]) -> list[int]:
    return list(node.attributes[name].as_ints()) if name in node.attributes else list(default)


def _text(node: "ir.Node", name: str, default: str) -> str:
    return node.attributes.get_string(name, default) or default


def _int(node: "ir.Node", name: str, default: int) -> int:
    return int(node.attributes.get_int(name, default) or 0)


def _float(node: "ir.Node", name: str, default: float) -> float:
    return float(node.attributes.get_float(name, default) or 0.0)


def _sizes(value: Tensor | None) -> list[int]:
    return [] if value is None else [int(each) for each in value.reshape(-1).tolist()]


# One value of each element.


def _divide(first: Tensor, second: Tensor) -> Tensor:
    return first / second if first.is_floating_point() else torch.div(first, second, rounding_mode="trunc")


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    return torch.pow(base, exponent).to(base.dtype)


def _fold(function: Callable[[Tensor, Tensor], Tensor]) -> Compute:
    return lambda *values: functools.reduce(function, values)


def _mean(*values: Tensor) -> Tensor:
    return functools.reduce(torch.add, values) / len(values)


def _where(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return torch.where(condition, first, second)


def _clip(node: "ir.Node", opset: int) -> Compute:
    least = _float(node, "min", -math.inf) if opset < 11 else None
    most = _float(node, "max", math.inf) if opset < 11 else None

    def compute(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
        lower, upper = least if low is None else low.item(), most if high is None else high.item()
        return x if lower is None and upper is None else torch.clamp(x, lower, upper)

    return compute


def _gelu(node: "ir.Node", opset: int) -> Compute:
    return functools.partial(F.gelu, approximate=_text(node, "approximate", "none"))


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def _fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def _quick_gelu(node: "ir.Node", opset: int) -> Compute:
    alpha = _float(node, "alpha", 1.702)
    return lambda x: x * torch.sigmoid(alpha * x)


def _hard_sigmoid(node: "ir.Node", opset: int) -> Compute:
    alpha, beta = _float(node, "alpha", 0.2), _float(node, "beta", 0.5)
    return lambda x: torch.clamp(alpha * x + beta, 0.0, 1.0)


def _selu(node: "ir.Node", opset: int) -> Compute:
    alpha, gamma = _float(node, "alpha", 1.67326319217681884765625), _float(node, "gamma", 1.05070102214813232421875)
    return lambda x: gamma * torch.where(x > 0, x, alpha * torch.expm1(torch.clamp(x, max=0.0)))


def _threshold(node: "ir.Node", opset: int) -> Compute:
    alpha = _float(node, "alpha", 1.0)
    return lambda x: torch.where(x > alpha, x, torch.zeros_like(x))


def _with_alpha(function: Callable[[Tensor, float], Tensor], default: float) -> Make:
    def make(node: "ir.Node", opset: int) -> Compute:
        alpha = _float(node, "alpha", default)
        return lambda x: function(x, alpha)

    return make


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x >= 0, x, x * slope)


def _mod(node: "ir.Node", opset: int) -> Compute:
    return torch.fmod if _int(node, "fmod", 0) else torch.remainder


def _is_infinite(node: "ir.Node", opset: int) -> Compute:
    positive, negative = bool(_int(node, "detect_positive", 1)), bool(_int(node, "detect_negative", 1))
    return lambda x: (torch.isposinf(x) & positive) | (torch.isneginf(x) & negative)


def _dropout(node: "ir.Node", opset: int) -> Compute:
    training = node.inputs[2] if len(node.inputs) > 2 else None
    if training is not None and (training.const_value is None or training.const_value.numpy().any()):
        raise _refuse(node, "training_mode is on, or computed")
    if len(node.outputs) > 1:
        return lambda x, *_: (x, torch.ones_like(x, dtype=torch.bool))
    return lambda x, *_: x


# Types, constants, shapes.


def _torch_type(number: int) -> torch.dtype:
    import onnx_ir as ir

    kind = str(ir.DataType(number).name).lower()
    names = {"float": "float32", "double": "float64"}
    found = getattr(torch, names.get(kind, kind), None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"Cast to {kind} has no form in torch here", "omit --recover")
    return found


def _cast(node: "ir.Node", opset: int) -> Compute:
    wanted = _torch_type(_int(node, "to", 1))
    return lambda x: x.to(wanted)


def _constant(node: "ir.Node", opset: int) -> Compute:
    for name, kind in (("value_float", np.float32), ("value_floats", np.float32), ("value_int", np.int64)):
        if name in node.attributes:
            numbers = np.asarray(node.attributes[name].value, kind)
            return lambda: torch.from_numpy(np.array(numbers))
    if "value_ints" in node.attributes:
        listed = np.asarray(node.attributes["value_ints"].value, np.int64)
        return lambda: torch.from_numpy(np.array(listed))
    if "value" not in node.attributes:
        raise _refuse(node, "it holds neither numbers nor a tensor")
    tensor = np.array(node.attributes["value"].as_tensor().numpy())
    if tensor.dtype.kind not in "biuf":
        raise _refuse(node, f"its numbers are {tensor.dtype}")
    return lambda: torch.from_numpy(tensor)


def _constant_of_shape(node: "ir.Node", opset: int) -> Compute:
    given = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
    filler = torch.from_numpy(np.array(given)).reshape(())
    return lambda shape: filler.expand(_sizes(shape)).clone()


def _shape(node: "ir.Node", opset: int) -> Compute:
    start, end = _int(node, "start", 0), node.attributes.get_int("end") if "end" in node.attributes else None
    return lambda x: torch.tensor(x.shape[start:end], dtype=torch.int64)


def _reshape(node: "ir.Node", opset: int) -> Compute:
    keep = not _int(node, "allowzero", 0)

    def compute(x: Tensor, shape: Tensor) -> Tensor:
        sizes = _sizes(shape)
        return x.reshape([x.shape[axis] if size == 0 and keep else size for axis, size in enumerate(sizes)])

    return compute


def _flatten(node: "ir.Node", opset: int) -> Compute:
    axis = _int(node, "axis", 1)

    def compute(x: Tensor) -> Tensor:
        place = axis + x.ndim if axis < 0 else axis
        return x.reshape(math.prod(x.shape[:place]), math.prod(x.shape[place:]))

    return compute


def _transpose(node: "ir.Node", opset: int) -> Compute:
    order = _ints(node, "perm", ())
    return lambda x: x.permute(order or list(range(x.ndim))[::-1])


def _squeeze(node: "ir.Node", opset: int) -> Compute:
    fixed = _ints(node, "axes", ()) if "axes" in node.attributes else None

    def compute(x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen = fixed if axes is None else _sizes(axes)
        return x.squeeze() if chosen is None else x.squeeze(tuple(chosen)) if chosen else x

    return compute


def _unsqueeze(node: "ir.Node", opset: int) -> Compute:
    fixed = _ints(node, "axes", ())

    def compute(x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen = fixed if axes is None else _sizes(axes)
        rank = x.ndim + len(chosen)
        for axis in sorted(axis % rank for axis in chosen):
            x = x.unsqueeze(axis)
        return x

    return compute


def _concat(node: "ir.Node", opset: int) -> Compute:
    axis = _int(node, "axis", 0)
    return lambda *values: torch.cat(values, axis)


def _split(node: "ir.Node", opset: int) -> Compute:
    axis, fixed = _int(node, "axis", 0), _ints(node, "split", ())
    count = _int(node, "num_outputs", len(node.outputs))

    def compute(x: Tensor, split: Tensor | None = None) -> tuple[Tensor, ...]:
        sizes = fixed if split is None else _sizes(split)
        made: tuple[Tensor, ...] = torch.split(x, sizes or -(-x.shape[axis] // count), axis)
        return made

    return compute


def _slice(node: "ir.Node", opset: int) -> Compute:
    fixed = tuple(_ints(node, name, ()) for name in ("starts", "ends", "axes"))

    def compute(
        x: Tensor,
        starts: Tensor | None = None,
        ends: Tensor | None = None,
        axes: Tensor | None = None,
        steps: Tensor | None = None,
    ) -> Tensor:
        first, last = (
            given if value is None else _sizes(value) for given, value in zip(fixed, (starts, ends), strict=False)
        )
        chosen = (fixed[2] if axes is None else _sizes(axes)) or list(range(len(first)))
        for start, end, axis, step in zip(first, last, chosen, _sizes(steps) or [1] * len(first), strict=True):
            rows = range(x.shape[axis])[start:end:step]
            if step == 1:
                x = x.narrow(axis, rows.start if len(rows) else 0, len(rows))
            else:
                x = x.index_select(axis, torch.tensor(list(rows), dtype=torch.int64, device=x.device))
        return x

    return compute


def _gather(node: "ir.Node", opset: int) -> Compute:
    axis = _int(node, "axis", 0)

    def compute(x: Tensor, indices: Tensor) -> Tensor:
        size, place = x.shape[axis], axis % x.ndim
        chosen = indices.to(x.device, torch.int64)
        chosen = torch.where(chosen < 0, chosen + size, chosen)
        taken = x.index_select(place, chosen.reshape(-1))
        return taken.reshape((*x.shape[:place], *chosen.shape, *x.shape[place + 1 :]))

    return compute


def _positive(indices: Tensor, size: int) -> Tensor:
    indices = indices.long()
    return torch.where(indices < 0, indices + size, indices)


def _gather_elements(node: "ir.Node", opset: int) -> Compute:
    axis = _int(node, "axis", 0)
    return lambda x, indices: x.gather(axis, _positive(indices, x.shape[axis]))


def _gather_nd(node: "ir.Node", opset: int) -> Compute:
    batch = _int(node, "batch_dims", 0)

    def compute(x: Tensor, indices: Tensor) -> Tensor:
        rank = indices.ndim - 1
        entries = [torch.arange(x.shape[axis], device=indices.device) for axis in range(batch)]
        rows = [each.reshape([-1, *[1] * (rank - axis - 1)]) for axis, each in enumerate(entries)]
        depth = range(indices.shape[-1])
        return x[(*rows, *(_positive(indices[..., place], x.shape[batch + place]) for place in depth))]

    return compute


_REDUCED = {"none": "", "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scatter_elements(node: "ir.Node", opset: int) -> Compute:
    axis, reduce = _int(node, "axis", 0), _REDUCED[_text(node, "reduction", "none")]

    def compute(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        places = _positive(indices, x.shape[axis])
        if not reduce:
            return x.scatter(axis, places, updates)
        return x.scatter_reduce(axis, places, updates, reduce)

    return compute


def _scatter_nd(node: "ir.Node", opset: int) -> Compute:
    reduce = _REDUCED[_text(node, "reduction", "none")]

    def compute(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        depth = indices.shape[-1]
        parts = tuple(_positive(indices[..., place], x.shape[place]) for place in range(depth))
        if reduce in ("", "sum"):
            return x.index_put(parts, updates, accumulate=bool(reduce))
        width, row = math.prod(x.shape[depth:]), torch.zeros((), dtype=torch.int64, device=x.device)
        for place, part in enumerate(parts):
            row = row * x.shape[place] + part.to(x.device)
        rows = row.reshape(-1, 1).expand(-1, width)
        return x.reshape(-1, width).scatter_reduce(0, rows, updates.reshape(-1, width), reduce).reshape(x.shape)

    return compute


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    wanted = [1] * max(0, x.ndim - shape.numel()) + _sizes(shape)
    x = x.reshape([1] * (len(wanted) - x.ndim) + list(x.shape))
    return x.expand([old if new == 1 else new for old, new in zip(x.shape, wanted, strict=True)])


def _tile(x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(_sizes(repeats))


def _pad(node: "ir.Node", opset: int) -> Compute:
    mode, fixed, filler = _text(node, "mode", "constant"), _ints(node, "pads", ()), _float(node, "value", 0.0)
    mode = {"edge": "replicate", "wrap": "circular"}.get(mode, mode)

    def compute(
        x: Tensor, pads: Tensor | None = None, value: Tensor | None = None, axes: Tensor | None = None
    ) -> Tensor:
        sizes = fixed if pads is None else _sizes(pads)
        chosen = [axis % x.ndim for axis in _sizes(axes)] or list(range(x.ndim))
        before, after = dict(zip(chosen, sizes, strict=False)), dict(zip(chosen, sizes[len(chosen) :], strict=True))
        if mode == "constant":
            number = filler if value is None else value.item()
            flat = [size for axis in range(x.ndim)[::-1] for size in (before.get(axis, 0), after.get(axis, 0))]
            return F.pad(x, flat, value=number)
        for axis in chosen:
            x = _pad_axis(x, axis, before[axis], after[axis], mode)
        return x

    return compute


def _pad_axis(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    size = x.shape[axis]
    places = torch.arange(-before, size + after, device=x.device)
    if mode == "replicate":
        places = places.clamp(0, size - 1)
    elif mode == "circular":
        places = places % size
    else:
        places = (size - 1) - ((size - 1) - places.abs()).abs()
    return x.index_select(axis, places)


def _range(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


def _one_hot(node: "ir.Node", opset: int) -> Compute:
    axis = _int(node, "axis", -1)

    def compute(indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
        count = int(depth.reshape(()).item())
        hot = (_positive(indices, count).unsqueeze(-1) == torch.arange(count, device=indices.device)).movedim(-1, axis)
        return torch.where(hot, values[1], values[0])

    return compute


def _top_k(node: "ir.Node", opset: int) -> Compute:
    axis, largest, ordered = _int(node, "axis", -1), bool(_int(node, "largest", 1)), bool(_int(node, "sorted", 1))

    def compute(x: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        found = x.topk(int(count.reshape(()).item()), axis, largest, ordered)
        return found.values, found.indices

    return compute


def _arg(function: Callable[..., Tensor]) -> Make:
    def make(node: "ir.Node", opset: int) -> Compute:
        axis, keep = _int(node, "axis", 0), bool(_int(node, "keepdims", 1))
        if _int(node, "select_last_index", 0):
            raise _refuse(node, "select_last_index")
        return lambda x: function(x, axis, keepdim=keep)

    return make


def _cumulate(node: "ir.Node", opset: int) -> Compute:
    exclusive, reverse = bool(_int(node, "exclusive", 0)), bool(_int(node, "reverse", 0))

    def compute(x: Tensor, axis: Tensor) -> Tensor:
        place = int(axis.reshape(()).item())
        given = x.flip(place) if reverse else x
        total = given.cumsum(place, dtype=x.dtype)
        total = total - given if exclusive else total
        return total.flip(place) if reverse else total

    return compute


def _triangle(node: "ir.Node", opset: int) -> Compute:
    function = torch.triu if _int(node, "upper", 1) else torch.tril
    return lambda x, k=None: function(x, 0 if k is None else int(k.item()))


def _eye_like(node: "ir.Node", opset: int) -> Compute:
    kind = _torch_type(_int(node, "dtype", 1)) if "dtype" in node.attributes else None
    diagonal = _int(node, "k", 0)

    def compute(x: Tensor) -> Tensor:
        ones = torch.ones(x.shape, dtype=kind or x.dtype, device=x.device)
        return ones.triu(diagonal).tril(diagonal)

    return compute


# Sums and the like over axes.


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Make:
    def make(node: "ir.Node", opset: int) -> Compute:
        fixed, keep = _ints(node, "axes", ()), bool(_int(node, "keepdims", 1))
        nothing = bool(_int(node, "noop_with_empty_axes", 0))

        def compute(x: Tensor, axes: Tensor | None = None) -> Tensor:
            chosen = fixed if axes is None else _sizes(axes)
            return x if not chosen and nothing else function(x, chosen or list(range(x.ndim)), keep).to(x.dtype)

        return compute

    return make


def _average(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(axes, keepdim=keep)
    count = math.prod(x.shape[axis] for axis in axes)
    return torch.div(x.sum(axes, keepdim=keep), count, rounding_mode="trunc")


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _softmax(function: Callable[[Tensor, int], Tensor]) -> Make:
    def make(node: "ir.Node", opset: int) -> Compute:
        axis = _int(node, "axis", -1 if opset >= 13 else 1)
        if opset >= 13:
            return lambda x: function(x, axis)

        def compute(x: Tensor) -> Tensor:
            rows = math.prod(x.shape[: axis % x.ndim])
            return function(x.reshape(rows, -1), 1).reshape(x.shape)

        return compute

    return make


def _hardmax(x: Tensor, axis: int) -> Tensor:
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1.0)


# Products.


def _gemm(node: "ir.Node", opset: int) -> Compute:
    alpha, beta = _float(node, "alpha", 1.0), _float(node, "beta", 1.0)
    turn_first, turn_second = _int(node, "transA", 0), _int(node, "transB", 0)

    def compute(first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
        made = (first.t() if turn_first else first) @ (second.t() if turn_second else second)
        made = made if alpha == 1 else alpha * made
        return made if bias is None else made + (bias if beta == 1 else beta * bias)

    return compute


def _einsum(node: "ir.Node", opset: int) -> Compute:
    equation = _text(node, "equation", "")
    return lambda *values: torch.einsum(equation, *values)


@functools.cache
def _same_pads(
    sizes: tuple[int, ...], kernel: tuple[int, ...], strides: tuple[int, ...], steps: tuple[int, ...], *, upper: bool
) -> list[int]:
    """Compute paddings that keep ceil(size / stride) entries, as ``F.pad`` takes them: the last axis first."""
    flat: list[int] = []
    for size, width, stride, step in reversed(list(zip(sizes, kernel, strides, steps, strict=True))):
        total = max((-(-size // stride) - 1) * stride + (width - 1) * step + 1 - size, 0)
        less, more = total // 2, total - total // 2
        flat += [less, more] if upper else [more, less]
    return flat


def _window(node: "ir.Node") -> Callable[[int], tuple[list[int], list[int], list[int], str]]:
    """Read strides, dilations, paddings (begin of all axes, then their ends) and the automatic kind, by the rank."""
    strides, steps, pads = (_ints(node, name, ()) for name in ("strides", "dilations", "pads"))
    auto = _text(node, "auto_pad", "NOTSET")
    return lambda rank: (strides or [1] * rank, steps or [1] * rank, pads or [0] * 2 * rank, auto)


def _conv(node: "ir.Node", opset: int) -> Compute:
    groups, window = _int(node, "group", 1), _window(node)

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rank = x.ndim - 2
        strides, steps, pads, auto = window(rank)
        function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
        if auto.startswith("SAME"):
            kernel = tuple(weight.shape[2:])
            flat = _same_pads(tuple(x.shape[2:]), kernel, tuple(strides), tuple(steps), upper=auto == "SAME_UPPER")
            x, pads = F.pad(x, flat), [0] * 2 * rank
        elif pads[:rank] != pads[rank:]:
            x = F.pad(x, [pads[place + side * rank] for place in range(rank)[::-1] for side in (0, 1)])
            pads = [0] * 2 * rank
        if rank == 2 and x.device.type == "cpu":  # the gradients of depthwise ones are twice as fast so
            x, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
        return function(x, weight, bias, strides, pads[:rank], steps, groups)

    return compute


def _conv_transpose(node: "ir.Node", opset: int) -> Compute:
    groups, window, added = _int(node, "group", 1), _window(node), _ints(node, "output_padding", ())
    if "output_shape" in node.attributes or _text(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise _refuse(node, "its shape is given by output_shape or auto_pad")

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rank = x.ndim - 2
        strides, steps, pads, _ = window(rank)
        more = added or [0] * rank
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
        if pads[:rank] == pads[rank:]:
            return function(x, weight, bias, strides, pads[:rank], more, groups, steps)
        whole = function(x, weight, bias, strides, [0] * rank, more, groups, steps)
        for axis in range(rank):
            length = whole.shape[2 + axis] - pads[axis] - pads[rank + axis]
            whole = whole.narrow(2 + axis, pads[axis], length)
        return whole

    return compute


def _pool(node: "ir.Node", opset: int) -> Compute:
    kernel, ceil = _ints(node, "kernel_shape", ()), bool(_int(node, "ceil_mode", 0))
    rank = len(kernel)
    strides, steps, pads, auto = _window(node)(rank)
    largest, padding_counts = node.op_type == "MaxPool", bool(_int(node, "count_include_pad", 0))
    if len([value for value in node.outputs if value.name]) > 1 or not 1 <= rank <= 2:
        raise _refuse(node, "it gives indices, or has three axes")
    if not largest and (any(step != 1 for step in steps) or (ceil and any(pads))):
        raise _refuse(node, "it has dilations, or paddings with ceil_mode")

    def padded(x: Tensor, value: float) -> Tensor:
        if auto.startswith("SAME"):
            sizes = tuple(x.shape[2:])
            flat = _same_pads(sizes, tuple(kernel), tuple(strides), tuple(steps), upper=auto == "SAME_UPPER")
        else:
            flat = [pads[place + side * rank] for place in range(rank)[::-1] for side in (0, 1)]
        return F.pad(x, flat, value=value) if any(flat) else x

    def compute_largest(x: Tensor) -> Tensor:
        function: Any = (F.max_pool1d, F.max_pool2d)[rank - 1]
        made: Tensor = function(padded(x, -math.inf), kernel, strides, 0, steps, ceil)
        for axis in range(rank if ceil else 0):  # no window begins in the padding at the end
            most = -(-(x.shape[2 + axis] + pads[axis]) // strides[axis])
            made = made.narrow(2 + axis, 0, min(made.shape[2 + axis], most))
        return made

    def compute_mean(x: Tensor) -> Tensor:
        function: Any = (F.avg_pool1d, F.avg_pool2d)[rank - 1]
        whole = padded(x, 0.0)
        made: Tensor = function(whole, kernel, strides, 0, ceil)
        if whole is x or padding_counts:
            return made
        counted: Tensor = function(padded(torch.ones_like(x[:1, :1]), 0.0), kernel, strides, 0, ceil)
        return made / counted

    return compute_largest if largest else compute_mean


def _global_pool(function: Callable[..., Tensor]) -> Compute:
    return lambda x: function(x, tuple(range(2, x.ndim)), keepdim=True)


# Normalization.


def _by_channel(value: Tensor, rank: int) -> Tensor:
    return value.reshape(1, -1, *[1] * (rank - 2))


def _batch_norm(node: "ir.Node", opset: int) -> Compute:
    epsilon = _float(node, "epsilon", 1e-5)
    if _int(node, "training_mode", 0):
        raise _refuse(node, "training_mode")

    def compute(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)

    return compute


def _instance_norm(node: "ir.Node", opset: int) -> Compute:
    epsilon = _float(node, "epsilon", 1e-5)
    return lambda x, scale, bias: torch.instance_norm(x, scale, bias, None, None, True, 0.0, epsilon, False)


def _layer_norm(node: "ir.Node", opset: int) -> Compute:
    axis, epsilon = _int(node, "axis", -1), _float(node, "epsilon", 1e-5)
    if any(value.name for value in node.outputs[1:]):
        raise _refuse(node, "it gives means or deviations")

    def compute(x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = x.shape[axis % x.ndim :]
        made = F.layer_norm(x, shape, None, None, epsilon) * scale
        return made if bias is None else made + bias

    return compute


def _group_norm(node: "ir.Node", opset: int) -> Compute:
    groups, epsilon = _int(node, "num_groups", 1), _float(node, "epsilon", 1e-5)

    def compute(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        made = F.group_norm(x, groups, eps=epsilon)
        if scale.numel() != x.shape[1]:  # opset 18 has one for each group
            scale, bias = (each.repeat_interleave(x.shape[1] // groups) for each in (scale, bias))
        return made * _by_channel(scale, x.ndim) + _by_channel(bias, x.ndim)

    return compute


def _rms_norm(node: "ir.Node", opset: int) -> Compute:
    axis, epsilon = _int(node, "axis", -1), _float(node, "epsilon", 1e-5)

    def compute(x: Tensor, scale: Tensor) -> Tensor:
        axes = tuple(range(axis % x.ndim, x.ndim))
        return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon) * scale

    return compute


def _lp_norm(node: "ir.Node", opset: int) -> Compute:
    axis, power = _int(node, "axis", -1), _int(node, "p", 2)

    def compute(x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, power, axis, keepdim=True)
        return x / torch.where(norm == 0, 1.0, norm)

    return compute


def _mean_variance(node: "ir.Node", opset: int) -> Compute:
    axes = tuple(_ints(node, "axes", (0, 2, 3)))

    def compute(x: Tensor) -> Tensor:
        centred = x - x.mean(axes, keepdim=True)
        return centred / centred.square().mean(axes, keepdim=True).clamp(1e-18).sqrt()

    return compute


def _local_response(node: "ir.Node", opset: int) -> Compute:
    size, alpha, beta, bias = (
        _int(node, "size", 1),
        _float(node, "alpha", 1e-4),
        _float(node, "beta", 0.75),
        _float(node, "bias", 1.0),
    )
    return lambda x: F.local_response_norm(x, size, alpha, beta, bias)


# Pixels.


def _depth_to_space(node: "ir.Node", opset: int) -> Compute:
    block, columns_first = _int(node, "blocksize", 1), _text(node, "mode", "DCR") == "CRD"

    def compute(x: Tensor) -> Tensor:
        if columns_first:
            return F.pixel_shuffle(x, block)
        batch, channels, height, width = x.shape
        parts = x.reshape(batch, block, block, channels // block**2, height, width)
        made = parts.permute(0, 3, 4, 1, 5, 2)
        return made.reshape(batch, channels // block**2, height * block, width * block)

    return compute


def _space_to_depth(node: "ir.Node", opset: int) -> Compute:
    block = _int(node, "blocksize", 1)

    def compute(x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        parts = x.reshape(batch, channels, height // block, block, width // block, block)
        made = parts.permute(0, 3, 5, 1, 2, 4)
        return made.reshape(batch, channels * block**2, height // block, width // block)

    return compute


def _resize(node: "ir.Node", opset: int) -> Compute:
    mode = _text(node, "mode", "nearest")
    place = _text(node, "coordinate_transformation_mode", "half_pixel" if node.op_type == "Resize" else "asymmetric")
    rounding = _text(node, "nearest_mode", "round_prefer_floor" if node.op_type == "Resize" else "floor")
    if _int(node, "antialias", 0) or "axes" in node.attributes or mode not in ("nearest", "linear", "cubic"):
        raise _refuse(node, "antialias, axes or an unknown mode")
    if place not in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"):
        raise _refuse(node, f"coordinates {place}")
    if _text(node, "keep_aspect_ratio_policy", "stretch") != "stretch" or _int(node, "exclude_outside", 0):
        raise _refuse(node, "keep_aspect_ratio_policy or exclude_outside")
    if mode == "cubic" and (place == "asymmetric" or _float(node, "cubic_coeff_a", -0.75) != -0.75):
        raise _refuse(node, "cubic with other coordinates or coefficients than torch's")

    def compute(x: Tensor, *given: Tensor | None) -> Tensor:
        scales = given[0] if node.op_type == "Upsample" or len(given) == 1 else given[1]
        sizes = _sizes(given[2]) if len(given) > 2 and given[2] is not None else []
        factors = [] if scales is None or sizes else [float(each) for each in scales.tolist()]
        wanted = sizes or [
            int(np.float32(size) * np.float32(each)) for size, each in zip(x.shape, factors, strict=True)
        ]
        factors = factors or [new / old for new, old in zip(wanted, x.shape, strict=True)]
        if wanted == list(x.shape):  # whatever the scales: as ONNX Runtime does
            return x
        if mode == "cubic":
            if x.ndim != 4 or wanted[:2] != list(x.shape[:2]) or (place == "pytorch_half_pixel" and 1 in wanted[2:]):
                raise _refuse(node, "cubic over other axes than two of pixels, or to a single one")
            made: Tensor = torch.ops.aten.upsample_bicubic2d(x, wanted[2:], place == "align_corners", *factors[2:])
            return made
        for axis in range(x.ndim):
            if wanted[axis] != x.shape[axis] or factors[axis] != 1:
                x = _resize_axis(x, axis, wanted[axis], factors[axis], mode, place, rounding)
        return x

    return compute


def _resize_axis(x: Tensor, axis: int, size: int, factor: float, mode: str, place: str, rounding: str) -> Tensor:
    old, new, scale = x.shape[axis], np.arange(size, dtype=np.float32), np.float32(factor)  # as ONNX Runtime has them
    if place == "asymmetric":
        at = new / scale
    elif place == "align_corners":
        at = new * (old - 1) / max(size - 1, 1)
    else:
        at = (new + np.float32(0.5)) / scale - np.float32(0.5)
        at = at * 0 if place == "pytorch_half_pixel" and size == 1 else at
    if mode == "nearest":
        nearest = {"floor": np.floor(at), "ceil": np.ceil(at), "round_prefer_ceil": np.floor(at + 0.5)}
        chosen = nearest.get(rounding, np.ceil(at - 0.5)).clip(0, old - 1).astype(np.int64)
        return x.index_select(axis, torch.from_numpy(chosen).to(x.device))
    at = at.clip(0, old - 1)
    low = np.floor(at).astype(np.int64)
    high = np.minimum(low + 1, old - 1)
    share = torch.from_numpy((at - low).astype(np.float32)).to(x.device)
    share = share.reshape([-1 if dim == axis else 1 for dim in range(x.ndim)])
    first, second = (x.index_select(axis, torch.from_numpy(each).to(x.device)) for each in (low, high))
    return first + (second - first) * share


def _grid_sample(node: "ir.Node", opset: int) -> Compute:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(
        _text(node, "mode", "linear"), _text(node, "mode", "bilinear")
    )
    padding, align = _text(node, "padding_mode", "zeros"), bool(_int(node, "align_corners", 0))
    return lambda x, grid: F.grid_sample(x, grid, mode, padding, align)


# Recurrent layers.

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


def _recurrent(node: "ir.Node", opset: int) -> Compute:
    kind, direction = node.op_type, _text(node, "direction", "forward")
    ways = 2 if direction == "bidirectional" else 1
    listed = list(node.attributes["activations"].as_strings()) if "activations" in node.attributes else []
    if listed and listed != _USUAL[kind] * ways:
        raise _refuse(node, f"activations {', '.join(listed)}")
    if "clip" in node.attributes or _int(node, "layout", 0) or _int(node, "input_forget", 0):
        raise _refuse(node, "clip, layout or input_forget")
    if any(value is not None for value in (*node.inputs[4:5], *node.inputs[7:])):
        raise _refuse(node, "lengths of sequences, or peepholes")
    before = kind == "GRU" and not _int(node, "linear_before_reset", 0)

    def compute(
        x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None = None, *rest: Tensor | None
    ) -> tuple[Tensor, ...]:
        _, first, cell = (*rest, *[None] * 3)[:3]
        size, batch = state.shape[2], x.shape[1]
        zeros = x.new_zeros(ways, batch, size)
        starts = (zeros if first is None else first, zeros if cell is None else cell)
        made = []
        for way in range(ways):
            back = direction == "reverse" or way == 1
            own = (weight[way], state[way], None if bias is None else bias[way])
            begin = tuple(each[way] for each in starts)
            outputs, *last = _LAYERS[kind](x.flip(0) if back else x, *own, *begin, before)
            made.append((outputs.flip(0) if back else outputs, *last))
        joined = tuple(torch.stack(each) for each in zip(*made, strict=True))
        return (joined[0].movedim(0, 1), *joined[1:])

    return compute


def _reorder(value: Tensor, order: Sequence[int]) -> Tensor:
    """Put gates in torch's order."""
    parts = value.chunk(len(order), 0)
    return torch.cat([parts[place] for place in order], 0)


def _weights(weight: Tensor, state: Tensor, bias: Tensor | None, order: Sequence[int]) -> list[Tensor]:
    halves = weight.new_zeros(2, weight.shape[0]) if bias is None else bias.reshape(2, -1)
    return [_reorder(each, order) for each in (weight, state, halves[0], halves[1])]


def _lstm(
    x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None, hidden: Tensor, cell: Tensor, before: bool
) -> tuple[Tensor, ...]:
    flat = _weights(weight, state, bias, (0, 2, 3, 1))  # i o f c → i f g o
    made, last, kept = torch.lstm(x, (hidden[None], cell[None]), flat, True, 1, 0.0, False, False, False)
    return made, last[0], kept[0]


def _gru(
    x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None, hidden: Tensor, cell: Tensor, before: bool
) -> tuple[Tensor, ...]:
    if not before:
        flat = _weights(weight, state, bias, (1, 0, 2))  # z r h → r z n
        made, last = torch.gru(x, hidden[None], flat, True, 1, 0.0, False, False, False)
        return made, last[0]
    halves = weight.new_zeros(2, weight.shape[0]) if bias is None else bias.reshape(2, -1)
    given, size, outputs = x @ weight.t() + halves.sum(0), hidden.shape[1], []
    for step in given:
        gates = torch.sigmoid(step[:, : 2 * size] + hidden @ state[: 2 * size].t())
        update, reset = gates.chunk(2, 1)
        new = torch.tanh(step[:, 2 * size :] + (reset * hidden) @ state[2 * size :].t())
        hidden = (1 - update) * new + update * hidden
        outputs.append(hidden)
    return torch.stack(outputs), hidden


def _rnn(
    x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None, hidden: Tensor, cell: Tensor, before: bool
) -> tuple[Tensor, ...]:
    flat = _weights(weight, state, bias, (0,))
    made, last = torch.rnn_tanh(x, hidden[None], flat, True, 1, 0.0, False, False, False)
    return made, last[0]


_LAYERS: dict[str, Callable[..., tuple[Tensor, ...]]] = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}


_PLAIN: dict[str, Compute] = {
    **{
        name: getattr(torch, name.lower())
        for name in ("Neg", "Abs", "Sqrt", "Exp", "Log", "Erf", "Floor", "Ceil", "Round")
    },
    **{
        name: getattr(torch, name.lower())
        for name in ("Reciprocal", "Sign", "Sin", "Cos", "Tan", "Sinh", "Cosh", "Tanh")
    },
    **{name: getattr(torch, name.lower()) for name in ("Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh", "Sigmoid")},
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": _divide,
    "Pow": _power,
    "Relu": torch.relu,
    "PRelu": _prelu,
    "HardSwish": F.hardswish,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Mish": F.mish,
    "BiasGelu": _bias_gelu,
    "FastGelu": _fast_gelu,
    "Min": _fold(torch.minimum),
    "Max": _fold(torch.maximum),
    "Sum": _fold(torch.add),
    "Mean": _mean,
    "And": torch.logical_and,
    "Or": torch.logical_or,
    "Xor": torch.logical_xor,
    "Not": torch.logical_not,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "Less": torch.lt,
    "GreaterOrEqual": torch.ge,
    "LessOrEqual": torch.le,
    "Where": _where,
    "IsNaN": torch.isnan,
    "CastLike": lambda x, like: x.to(like.dtype),
    "Identity": lambda x: x,
    "Size": lambda x: torch.tensor(x.numel()),
    "Expand": _expand,
    "Tile": _tile,
    "Range": _range,
    "NonZero": lambda x: torch.nonzero(x).t(),
    "MatMul": torch.matmul,
    "GlobalAveragePool": _global_pool(torch.mean),
    "GlobalMaxPool": _global_pool(torch.amax),
}
"""Operators without attributes that matter."""

_MADE: dict[str, Make] = {
    "Clip": _clip,
    "Gelu": _gelu,
    "QuickGelu": _quick_gelu,
    "LeakyRelu": _with_alpha(F.leaky_relu, 0.01),
    "Elu": _with_alpha(F.elu, 1.0),
    "Celu": _with_alpha(F.celu, 1.0),
    "Selu": _selu,
    "HardSigmoid": _hard_sigmoid,
    "ThresholdedRelu": _threshold,
    "Mod": _mod,
    "IsInf": _is_infinite,
    "Cast": _cast,
    "Dropout": _dropout,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Shape": _shape,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Pad": _pad,
    "OneHot": _one_hot,
    "TopK": _top_k,
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "CumSum": _cumulate,
    "Trilu": _triangle,
    "EyeLike": _eye_like,
    "ReduceSum": _reduce(lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    "ReduceMean": _reduce(_average),
    "ReduceMax": _reduce(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    "ReduceProd": _reduce(_product),
    "ReduceL1": _reduce(lambda x, axes, keep: x.abs().sum(axes, keepdim=keep)),
    "ReduceL2": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep)),  # its gradient at 0 is 0
    "ReduceSumSquare": _reduce(lambda x, axes, keep: x.square().sum(axes, keepdim=keep)),
    "ReduceLogSum": _reduce(lambda x, axes, keep: x.sum(axes, keepdim=keep).log()),
    "ReduceLogSumExp": _reduce(lambda x, axes, keep: x.logsumexp(axes, keepdim=keep)),
    "Softmax": _softmax(torch.softmax),
    "LogSoftmax": _softmax(torch.log_softmax),
    "Hardmax": _softmax(_hardmax),
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "GroupNormalization": _group_norm,
    "RMSNormalization": _rms_norm,
    "LpNormalization": _lp_norm,
    "MeanVarianceNormalization": _mean_variance,
    "LRN": _local_response,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Resize": _resize,
    "Upsample": _resize,
    "GridSample": _grid_sample,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
}
"""Operators whose function is made from their attributes."""
