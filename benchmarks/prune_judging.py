"""Judge a pruned module by the original, independently of the product's own check.

The judge makes masked copies: the original, in which every weight that reads what was removed is zero. What was removed
is found by the numbers that are left in each tensor, as those of random modules all differ, and the record of what was
removed has to say the same. Normalizations over channels see the channels that nothing reads any longer; those in the
copy take mean and variance from the channels that are left, and normalize all by them. Those without weights do not
show which are left: modules with one that was cut are not compared. Both sides are computed in float64.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from random_parts import DirectConv, DirectLinear
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from enginesmith.pipeline.frameworks.records import PrunedGroup
from enginesmith.pipeline.frameworks.torch.module import by_operators

_TOLERANCE = 1e-6
"""Tolerated share of the largest number that comes out, in float64."""
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_ALONE = (*_NORMS, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class NotComparable(Exception):
    """Say that the removed parts cannot be told from those that are left."""


class Fault(Exception):
    """A pruned module is not what was promised; the message says how."""


@dataclass(frozen=True)
class Left:
    """The indices along each axis of a tensor that are left."""

    indices: tuple[Tensor, ...]
    before: tuple[int, ...]

    def removed(self, axis: int) -> Tensor:
        """List the indices along an axis that are gone."""
        gone = torch.ones(self.before[axis], dtype=torch.bool)
        gone[self.indices[axis]] = False
        return gone.nonzero().flatten()


def find_left(before: Tensor, after: Tensor, name: str) -> Left:
    """Find which rows and columns of a tensor are left, by its numbers."""
    order = before.flatten().argsort()
    ordered = before.flatten()[order]
    if bool((ordered[1:] == ordered[:-1]).float().mean() > 0.01) and before.shape != after.shape:
        raise NotComparable(f"numbers of {name} are not all different")
    places = order[torch.searchsorted(ordered, after.flatten().contiguous()).clamp(max=len(order) - 1)]
    indices = []
    for axis, size in enumerate(before.shape):
        if size == after.shape[axis]:
            indices.append(torch.arange(size))
            continue
        stride = before[(0,) * (axis + 1)].numel() if axis + 1 < before.dim() else 1
        coordinates = (places // stride % size).reshape(after.shape).movedim(axis, 0).reshape(after.shape[axis], -1)
        indices.append(coordinates.mode(1).values)
    rest = before
    for axis, index in enumerate(indices):
        rest = rest.index_select(axis, index)
    if not torch.equal(rest, after):
        raise Fault(f"what is left of {name} is no part of what it was")
    return Left(tuple(indices), tuple(before.shape))


def list_tensors(module: nn.Module, other: nn.Module) -> dict[str, Tensor]:
    """List parameters and buffers by name; attention has them as views, where ``other`` has it in parts."""
    tensors: dict[str, Tensor] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(inner, nn.MultiheadAttention) and not isinstance(other.get_submodule(path), type(inner)):
            tensors |= {prefix + leaf: value for leaf, value in _split_attention(inner)}
        else:
            own = (*inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False))
            tensors |= {prefix + leaf: value.detach() for leaf, value in own}
    return tensors


def _split_attention(layer: nn.MultiheadAttention) -> Iterator[tuple[str, Tensor]]:
    packed = layer.in_proj_weight
    weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight) if packed is None else packed.chunk(3)
    for name, weight in zip("qkv", weights, strict=True):
        yield f"{name}_proj.weight", weight.detach()
    if layer.in_proj_bias is not None:
        for name, bias in zip("qkv", layer.in_proj_bias.chunk(3), strict=True):
            yield f"{name}_proj.bias", bias.detach()


def _find_reading_axis(module: nn.Module, leaf: str) -> int | None:
    """Find the axis of a tensor along which its layer reads channels; None where it only makes or changes them."""
    if isinstance(module, nn.modules.conv._ConvNd) and leaf == "weight":
        if module.groups == module.in_channels == module.out_channels and module.groups > 1:
            return None
        return 0 if module.transposed else 1
    if isinstance(module, nn.MultiheadAttention) and leaf.endswith("proj.weight"):
        return 1
    if isinstance(module, nn.RNNBase) and leaf.startswith("weight_ih_l0"):
        return 1
    reads = (isinstance(module, nn.Linear) and leaf == "weight") or (
        isinstance(module, (DirectConv, DirectLinear)) and leaf == "kernel"
    )
    return 1 if reads else None


def find_all_left(original: nn.Module, pruned: nn.Module) -> dict[str, Left]:
    """Find what is left of every tensor that lost something, by name."""
    before, after = list_tensors(original, pruned), list_tensors(pruned, pruned)
    if set(before) != set(after):
        raise Fault(f"the tensors {sorted(set(before) ^ set(after))[:3]} are on one side only")
    left = {}
    for name, value in after.items():
        if value.dtype != before[name].dtype or value.dim() != before[name].dim():
            raise Fault(f"{name} became {value.dtype}{list(value.shape)}")
        if before[name].shape != value.shape:
            left[name] = find_left(before[name], value, name)
        elif not torch.equal(before[name], value):
            raise Fault(f"{name} has other numbers, and its shape is as before")
    return left


def make_masked(original: nn.Module, pruned: nn.Module, left: Mapping[str, Left]) -> nn.Module:
    """Copy the original in float64, and set to zero what reads removed channels."""
    masked = copy.deepcopy(original).double()
    tensors, modules = list_tensors(masked, pruned), dict(masked.named_modules(remove_duplicate=False))
    others = dict(pruned.named_modules(remove_duplicate=False))
    with torch.no_grad():
        for name, one in left.items():
            owner, leaf = _find_owner(modules, name)
            axis = _find_reading_axis(owner, leaf)
            if axis is not None:
                tensors[name].index_fill_(axis, one.removed(axis), 0.0)
    for path, module in modules.items():
        other = others.get(path)
        if not isinstance(module, _NORMS) or _count_channels(module) == _count_channels(other):
            continue
        if module.weight is None:
            raise NotComparable(f"{path} has no weights that show which channels are left")
        kept = left[f"{path}.weight"].indices[0]
        vars(module)["forward"] = partial(_normalize_by, module, kept)
    return masked


def _find_owner(modules: Mapping[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    if path in modules and not path.endswith("_proj"):
        return modules[path], leaf
    above, _, part = path.rpartition(".")
    if isinstance(modules.get(above), nn.MultiheadAttention):
        return modules[above], f"{part}.{leaf}"
    return modules[path], leaf


def _count_channels(module: Any) -> Any:
    return module.num_channels if isinstance(module, nn.GroupNorm) else tuple(module.normalized_shape)


def _normalize_by(module: Any, kept: Tensor, x: Tensor) -> Tensor:
    """Normalize all channels by the mean and the variance of those that are kept."""
    if isinstance(module, nn.GroupNorm):
        each = module.num_channels // module.num_groups
        y = torch.empty_like(x)
        for group in range(module.num_groups):
            own = slice(group * each, (group + 1) * each)
            chosen = x[:, kept[(kept >= own.start) & (kept < own.stop)]].flatten(1)
            shape = (-1, *(1,) * (x.dim() - 1))
            mean, variance = chosen.mean(1).reshape(shape), chosen.var(1, unbiased=False).reshape(shape)
            y[:, own] = (x[:, own] - mean) / (variance + module.eps).sqrt()
        shape = (-1, *(1,) * (x.dim() - 2))
        return y * module.weight.reshape(shape) + module.bias.reshape(shape)
    chosen = x[..., kept]
    if isinstance(module, nn.RMSNorm):
        eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
        return x * torch.rsqrt(chosen.square().mean(-1, keepdim=True) + eps) * module.weight
    centered = x - chosen.mean(-1, keepdim=True)
    y = centered / (chosen.var(-1, unbiased=False, keepdim=True) + module.eps).sqrt() * module.weight
    return y if module.bias is None else y + module.bias


def answer(module: nn.Module, feeds: Sequence[Tensor], *, double: bool = False) -> dict[str, Tensor]:
    """Run a module, and name its outputs."""
    given = [value.double() if double and value.is_floating_point() else value for value in feeds]
    with torch.no_grad(), by_operators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = module(*given)
    if isinstance(made, Tensor):
        return {"output": made}
    return dict(made) if isinstance(made, dict) else {f"output_{index}": value for index, value in enumerate(made)}


def compare_forms(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], where: str) -> None:
    """Compare names, shapes and dtypes of outputs."""
    forms = [{name: (value.dtype, tuple(value.shape)) for name, value in side.items()} for side in (expected, actual)]
    if forms[0] != forms[1]:
        raise Fault(f"{where}: the outputs became {forms[1]}, expected {forms[0]}")


def compare_numbers(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], where: str, tolerance: float) -> None:
    """Compare outputs with the largest number of each as the scale."""
    for name, value in expected.items():
        finite = value.isfinite()
        scale = float(value[finite].abs().max()) if finite.any() else 0.0
        distance = float((value - actual[name])[finite].abs().max()) if finite.any() else 0.0
        if not distance <= tolerance * scale + 1e-12:  # NaN, too
            raise Fault(f"{where}: {name} differs by {distance:.3g} where the largest is {scale:.3g}")


def compare_with_masked(masked: nn.Module, pruned: nn.Module, feeds: Sequence[Tensor], where: str) -> None:
    """See that a pruned module answers as the original without what reads removed channels."""
    actual = answer(copy.deepcopy(pruned).double(), feeds, double=True)
    compare_numbers(answer(masked, feeds, double=True), actual, where, _TOLERANCE)


def check_record(groups: Sequence[PrunedGroup], original: nn.Module, left: Mapping[str, Left]) -> None:
    """See that the record tells of exactly what was removed."""
    tensors = dict(original.named_parameters(remove_duplicate=False))
    told = {member for group in groups for member in group.members}
    twins = {id(value): set[str]() for value in tensors.values()}
    for name, value in tensors.items():
        twins[id(value)].update((name, name.rpartition(".")[0]))
    for name in left:
        others = twins[id(tensors[name])] if name in tensors else {name, name.rpartition(".")[0]}
        if not others & told:
            raise Fault(f"{name} lost something, and no group of the record has it as a member")
    for group in groups:
        if group.after != len(group.kept) or group.before < group.after or group.kept != tuple(sorted(set(group.kept))):
            raise Fault(f"the record of {group.root} keeps {group.kept}, {group.after} of {group.before}")
        for member in group.members:
            if group.after < group.before and not any(
                name == member or name.rpartition(".")[0] == member for name in left
            ):
                raise Fault(f"{member} is recorded as cut, and lost nothing")
        _check_rows(group, left)


def _check_rows(group: PrunedGroup, left: Mapping[str, Left]) -> None:
    """Compare the units of a group with the rows that its first layer lost, if each row is a unit or a part of one.

    Layers that have only some of the units, as where outputs are joined, are left out.
    """
    one = left.get(f"{group.root}.weight")
    rows = None if one is None else next((axis for axis in (0, 1) if one.before[axis] % group.before == 0), None)
    if one is None or rows is None or not len(one.removed(rows)):
        return
    lost, units = one.removed(rows).tolist(), sorted(set(range(group.before)) - set(group.kept))
    fitting = []
    for copies in (1, 2, 3):  # queries, keys and values may be rows of one layer
        size = one.before[rows] // copies // group.before
        starts = [copy * size * group.before for copy in range(copies)]
        fitting.append([start + unit * size + place for start in starts for unit in units for place in range(size)])
        fitting.append(
            sorted(start + unit + place * group.before for start in starts for unit in units for place in range(size))
        )
    if group.unit == "head" and lost not in fitting:
        raise Fault(f"{group.root} lost the rows {lost}, and the record tells of the heads {units}")
    if group.unit == "channel" and one.before[rows] == group.before and lost != units:
        raise Fault(f"{group.root} lost the rows {lost}, and the record tells of {units}")


class _Products(TorchDispatchMode):
    """Counts the multiply-adds of convolutions and matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "bmm"):
            self.count += made.numel() * args[0].shape[-1]
        elif name in ("addmm", "baddbmm"):
            self.count += made.numel() * args[1].shape[-1]
        elif name == "convolution":
            x, weight, turned = args[0], args[1], args[6]
            self.count += (x if turned else made).numel() * weight[0].numel()
        return made


def count_products(module: nn.Module, feeds: Sequence[Tensor]) -> int:
    """Count multiply-adds of convolutions and matrix products in one run; recurrent layers count as 0."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with torch.no_grad(), by_operators(), sdpa_kernel(SDPBackend.MATH), _Products() as products:
        module(*feeds)
    return products.count


def count_parameters(module: nn.Module) -> int:
    """Count the numbers in parameters, shared ones once."""
    return sum({id(value): value.numel() for value in module.parameters()}.values())
