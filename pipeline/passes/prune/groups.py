"""Turn torch_pruning's dependency graph into groups of units, in terms of names and indices."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from enginesmith.pipeline.frameworks.torch.file_tracking import swap
from enginesmith.pipeline.passes.prune.surgery import Attribute, Group, Parts, Side, Slice, is_depthwise
from enginesmith.pipeline.units import group_values

if TYPE_CHECKING:
    from torch_pruning import DependencyGraph


_NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
_MOST_STEPS = 20_000
"""Steps from layer to layer after which following a group's channels is taken to have no end."""
_COUNTS = {"BatchNorm": "num_features", "InstanceNorm": "num_features", "GroupNorm": "num_channels"}


class Unprunable(Exception):
    """A group has to stay whole; the message says why."""


@dataclass(frozen=True)
class Item:
    """One layer or parameter of a group: its channels that go with each channel of the root."""

    module: Any
    name: str
    reads: bool
    indices: tuple[int, ...]
    roots: tuple[int, ...]
    axis: int


def find_groups(graph: "DependencyGraph", parts: Parts) -> tuple[list[Group], dict[str, str]]:
    """Return the groups that can lose units, and the others by the name of their root, with the reason.

    Only the kinds of layers decide here; trying to remove units is left to others.
    """
    groups: list[Group] = []
    whole: dict[str, str] = {}
    grouped_layers: set[Any] = set()
    for layer in list(graph.module2node):
        if layer in grouped_layers or layer in graph.IGNORED_LAYERS_IN_TRACING:
            continue
        if not isinstance(layer, (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding)):
            continue
        root, traced = graph._module2name[layer], None
        try:
            traced = _trace_group(graph, layer)
            grouped_layers |= {dep.target.module for dep, _ in traced if graph.is_out_channel_pruning_fn(dep.handler)}
            groups.append(_make_group(graph, parts, _reroot(graph, traced), root))
        except Unprunable as reason:
            whole[root] = f"{reason}{through(traced)}"
    return groups, whole


def _trace_group(graph: "DependencyGraph", layer: nn.Module) -> Any:
    """Follow the channels that a layer makes.

    Raises:
        Unprunable: torch_pruning fails or would never end, as it does behind operations whose sizes it reads in another
            way than PyTorch.
    """
    pruner = graph.get_pruner_of_module(layer)
    try:
        with _end_following(graph):
            return graph.get_pruning_group(layer, pruner.prune_out_channels, range(pruner.get_out_channels(layer)))
    except Unprunable:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:100]
        raise Unprunable(f"torch_pruning cannot follow its channels ({type(error).__name__}: {text})") from error


def _end_following(graph: "DependencyGraph") -> AbstractContextManager[None]:
    """End torch_pruning's search within the block where it arrives at channels that no layer has.

    Where sums and joined outputs lead back to a value, it may otherwise find ever higher channels, and never end.
    """
    from torch_pruning.dependency import graph as following

    largest = max((size for value in graph.model.parameters() for size in value.shape), default=0)
    plain: Any = following.Group

    class Ending(plain):  # type: ignore[misc]
        def add_dep(self, dep: Any, idxs: Any) -> None:
            if len(self) > _MOST_STEPS or any(index.idx >= largest for index in idxs):
                raise Unprunable("torch_pruning cannot follow its channels: it arrives at more than any layer has")
            super().add_dep(dep, idxs)

    return swap(following, Group=Ending)


def through(traced: Any) -> str:
    """Name functions with a backward pass of their own that a group runs through, as the end of a sentence.

    They are taken to keep channels apart; where that is wrong, it is there.
    """
    functions: dict[str, None] = {}
    for dep, _ in traced or ():
        function = getattr(type(dep.target.grad_fn), "_forward_cls", None)
        if function is not None:
            code = function.forward.__code__
            functions[f"{function.__name__} ({Path(code.co_filename).name}:{code.co_firstlineno})"] = None
    return f"; its channels run through the autograd function {', '.join(functions)}" if functions else ""


def _reroot(graph: "DependencyGraph", traced: Any) -> Any:
    """Return the group from the side of a layer that reads it, where one layer's channels are split into parts."""
    from torch_pruning import ops

    kinds = {dep.target.type for dep, _ in traced}
    if not kinds & {ops.OPTYPE.SPLIT, ops.OPTYPE.UNBIND}:
        return traced
    covered = len(traced[0].idxs)
    for dep, indices in list(traced):
        if isinstance(dep.target.module, (nn.Linear, nn.modules.conv._ConvNd)) and graph.is_in_channel_pruning_fn(
            dep.handler
        ):
            other = graph.get_pruning_group(dep.target.module, dep.handler, sorted(set(indices)))
            first = traced[0].dep
            again: Any = next((i for d, i in other if (d.target, d.handler) == (first.target, first.handler)), [])
            if len(set(again)) == covered:
                return other
    return traced


def _make_group(graph: "DependencyGraph", parts: Parts, traced: Any, root: str) -> Group:
    from torch_pruning import ops

    items = list(_items(graph, traced))
    ends = any(dep.target.type == ops.OPTYPE.OUTPUT for dep, _ in traced)
    if not any(item.reads for item in items):
        if ends or not all(dep.target.outputs for dep, _ in traced):  # nothing follows a layer that is an output itself
            raise Unprunable("its channels are an output of the model")
        raise Unprunable("what reads its channels cannot be followed")
    if ends:
        raise Unprunable("its channels are an output")
    if computed := next((item.name for item in items if _is_computed(item, parts)), ""):
        raise Unprunable(f"the weight of {computed} is computed from other parameters, as by weight_norm")
    units = _units(items, len(traced[0].idxs))
    by_item = [list(_slices(item, parts, units)) for item in items]
    _validate_shared(graph, parts, items, by_item)
    slices = [part for new_slices in by_item for part in new_slices]
    attributes: list[Attribute] = []
    modules: list[str] = []
    for item, new_slices in zip(items, by_item, strict=True):
        if new_slices and isinstance(item.module, nn.Module):
            modules.append(item.name)
        elif new_slices and isinstance(norm := parts.modules.get(owner := item.name.rpartition(".")[0]), nn.RMSNorm):
            if len(norm.normalized_shape) != 1:
                raise Unprunable(f"{owner} normalizes over more than the channels")
            modules.append(owner)  # torch_pruning knows its weight only
        elif not new_slices and isinstance(item.module, _NORMS):  # it has no weights, and its size is a number only
            sizes = {len(unit) for unit in units}
            if len(sizes) != 1 or item.indices != item.roots:
                raise Unprunable(f"{item.name} has no weights, and its channels are not those of one layer")
            kind = type(item.module).__name__
            name = next((value for key, value in _COUNTS.items() if kind.startswith(key)), "normalized_shape")
            attributes.append(Attribute(item.name, name, sizes.pop()))
    makers = [item.name for item in items if not item.reads and item.name in modules]
    group = Group(
        root=min(makers, key=list(parts.modules).index, default=root),
        unit="channel",
        channels=units,
        slices=tuple(dict.fromkeys(slices)),
        modules=tuple(dict.fromkeys(modules)),
        attributes=tuple(attributes),
        traced=traced,
    )
    if group.order_removal(range(group.units))[1] == group.units:
        raise Unprunable("each of its channels is the only one that some layer has")
    return group


def _validate_shared(
    graph: "DependencyGraph", parts: Parts, items: Sequence[Item], by_item: Sequence[Sequence[Slice]]
) -> None:
    """Check that layers that share a tensor all take the channels that it would lose.

    Raises:
        Unprunable: another layer takes other channels along the same axis.
    """
    cuts: dict[tuple[str, int], dict[nn.Module, set[Any]]] = {}
    for item, slices in zip(items, by_item, strict=True):
        if isinstance(item.module, nn.Module):  # a parameter that no layer has is one for all that read it
            for part in slices:
                cuts.setdefault((part.tensor, part.axis), {}).setdefault(item.module, set()).add(part.indices)
    names = graph._module2name
    for (tensor, _), by_layer in cuts.items():
        layer, indices = next(iter(by_layer.items()))
        for other in parts.list_holders(tensor):
            if other in graph.module2node and by_layer.get(other) != indices:
                raise Unprunable(
                    f"{names[layer]} and {names[other]} share {tensor}, and {names[other]} uses it for other channels"
                )


def _is_computed(item: Item, parts: Parts) -> bool:
    """Tell whether a layer has a weight that is none of the model's parameters."""
    weight = getattr(item.module, "weight", None) if isinstance(item.module, nn.Module) else None
    return weight is not None and f"{item.name}.weight" not in parts.canonical


def _items(graph: "DependencyGraph", traced: Any) -> Iterator[Item]:
    for entry in traced:
        dep, indices = entry
        module, roots = dep.target.module, entry.root_idxs
        if not isinstance(module, (nn.Module, nn.Parameter)) or type(module).__module__.startswith("torch_pruning"):
            continue
        if any(root is None for root in roots):
            raise Unprunable("its channels are repeated for several heads, which is not followed")
        is_parameter = isinstance(module, nn.Parameter)
        name = graph._param_to_name[module] if is_parameter else graph._module2name[module]
        two_sides = isinstance(module, (nn.Linear, nn.RNNBase, nn.MultiheadAttention))
        if isinstance(module, nn.modules.conv._ConvNd):
            two_sides = not is_depthwise(module)
        reads = two_sides and graph.is_in_channel_pruning_fn(dep.handler)
        yield Item(module, name, reads, tuple(indices), tuple(roots), dep.target.pruning_dim if is_parameter else 0)


def _units(items: Sequence[Item], width: int) -> tuple[tuple[int, ...], ...]:
    """Join channels of the root that can only go together."""
    blocks = 1
    for item in items:
        own = 1
        if isinstance(item.module, nn.modules.conv._ConvNd) and not is_depthwise(item.module):
            own = item.module.groups
        elif isinstance(item.module, nn.GroupNorm):
            own = item.module.num_groups
        if own == 1:
            continue
        if item.indices != item.roots or len(item.roots) != width:
            raise Unprunable(f"{item.name} takes its channels in {own} blocks, beside others or in another order")
        if max(own, blocks) % min(own, blocks):
            raise Unprunable(f"its layers take the channels in {blocks} and in {own} blocks, which do not fit")
        blocks = max(own, blocks)
    size = width // blocks
    if size < 2:
        raise Unprunable("its layers take each channel as a block of its own" if blocks > 1 else "it has one channel")
    joined = _join(items, width)
    if blocks == 1:
        return joined
    if len(joined) != width:
        raise Unprunable("its channels hang together across blocks")
    return tuple(tuple(unit + block * size for block in range(blocks)) for unit in range(size))


def _join(items: Sequence[Item], width: int) -> tuple[tuple[int, ...], ...]:
    """Join channels that some layer has at the same place."""
    import networkx

    linked = networkx.Graph()
    linked.add_nodes_from(range(width))
    for item in items:
        at: dict[int, int] = {}
        linked.add_edges_from(
            (at.setdefault(index, root), root) for index, root in zip(item.indices, item.roots, strict=True)
        )
    return tuple(sorted(tuple(sorted(unit)) for unit in networkx.connected_components(linked)))


def _slices(item: Item, parts: Parts, units: Sequence[Sequence[int]]) -> Iterator[Slice]:
    at = group_values(zip(item.roots, item.indices, strict=True))
    for leaf, axis, side, period in _tensors(item):
        name = parts.canonical[f"{item.name}.{leaf}" if leaf else item.name]
        size = parts.get(name).shape[axis]
        rows = tuple(tuple(sorted({index % period for root in unit for index in at.get(root, ())})) for unit in units)
        if any(index >= size for row in rows for index in row):
            raise Unprunable(f"{item.name} has other channels than the layers before it")
        yield Slice(name, axis, side, rows)


def _tensors(item: Item) -> Iterator[tuple[str, int, Side, int]]:
    """List tensors of a layer that hold the channels: name, axis, side, and the number after which they repeat."""
    module, every = item.module, 1 << 62
    if isinstance(module, nn.Parameter):
        yield "", item.axis % module.dim(), "scales", every
    elif isinstance(module, nn.modules.conv._ConvNd):
        full = module.transposed and not is_depthwise(module)
        side: Side = "reads" if item.reads else "scales" if is_depthwise(module) else "makes"
        if item.reads:
            period = every if module.transposed else module.in_channels // module.groups
            yield "weight", 0 if module.transposed else 1, side, period
        else:
            yield "weight", 1 if full else 0, side, module.out_channels // module.groups if full else every
        if not item.reads and module.bias is not None:
            yield "bias", 0, side, every
    elif isinstance(module, nn.Linear):
        yield "weight", 1 if item.reads else 0, "reads" if item.reads else "makes", every
        if not item.reads and module.bias is not None:
            yield "bias", 0, "makes", every
    elif isinstance(module, nn.Embedding):
        yield "weight", 1, "makes", every
    elif isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
        raise Unprunable(f"{item.name} normalizes over more than the channels")
    elif isinstance(module, (*_NORMS, nn.PReLU)):
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            value = getattr(module, leaf, None)
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                yield leaf, 0, "scales", every
    elif isinstance(module, nn.LSTM) and item.reads:
        yield from ((f"weight_ih_l0{end}", 1, "reads", every) for end in ("", "_reverse")[: 1 + module.bidirectional])
    elif any(True for _ in module.parameters(recurse=False)):
        raise Unprunable(f"{item.name} is a {type(module).__name__}, whose width cannot be changed channel by channel")


def split_into_heads(group: Group, parts: Parts) -> tuple[Group, ...]:
    """List the ways in which a group may be made of heads, the most likely first; nothing where it is no attention.

    More than one is possible where the shapes of the products fit several numbers of heads, and as nobody knows which
    numbers a forward reads: which is right is found out by trying.
    """
    ways = []
    for size in _head_sizes(group):
        heads = group.width // size
        if heads < 2 or group.units != group.width:
            continue
        units = tuple(tuple(range(head * size, (head + 1) * size)) for head in range(heads))
        slices = []
        for part in group.slices:
            indices = (tuple(index for channel in unit for index in part.indices[channel]) for unit in units)
            slices.append(replace(part, indices=tuple(indices)))
        head_group = replace(group, unit="head", channels=units, slices=tuple(slices))
        ways += [
            replace(head_group, attributes=attributes) for attributes in _attributes(head_group, parts, heads, size)
        ]
    return tuple(ways)


def is_attention(group: Group) -> bool:
    """Tell whether two values that are made of inputs are multiplied on the way."""
    return any(True for _ in _products(group))


def _products(group: Group) -> Iterator[tuple[str, object]]:
    for dep, _ in group.traced:
        name = str(getattr(dep.target.module, "_grad_fn", ""))
        if "ScaledDotProduct" in name or "BmmBackward" in name:
            yield name, dep.target.grad_fn


def _head_sizes(group: Group) -> list[int]:
    """List possible numbers of channels of one head, as far as the products tell."""
    sizes: list[int] = []
    for name, product in _products(group):
        if "ScaledDotProduct" in name:
            sizes.append(int(product._saved_query.shape[-1]))  # type: ignore[attr-defined]
            continue
        matrices = (getattr(product, leaf, None) for leaf in ("_saved_mat2", "_saved_self"))
        sizes += [int(size) for matrix in matrices if matrix is not None for size in matrix.shape[1:]]
    return [size for size in dict.fromkeys(sizes) if size < group.width and group.width % size == 0]


def _attributes(group: Group, parts: Parts, heads: int, size: int) -> list[tuple[Attribute, ...]]:
    """List choices of numbers to change: those of heads; also those of the width beside them; or none."""
    counts, widths = [], []
    above = zip(*(path.split(".")[:-1] for path in group.modules), strict=False)
    outer = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, above)]  # around all
    for path, module in parts.modules.items():
        if path.split(".")[: len(outer)] != outer or type(module).__module__.startswith("torch.nn"):
            continue
        numbers = {name: value for name, value in vars(module).items() if type(value) is int}
        of_heads = {name: value for name, value in numbers.items() if "head" in name}
        counted = (
            name for name, value in of_heads.items() if value == heads and "dim" not in name and "size" not in name
        )
        wide = [name for name, value in numbers.items() if value == group.width]
        own = [Attribute(path, name, 1) for name in counted]
        own += [Attribute(path, name, size) for name in wide if name in of_heads]
        counts += own
        widths += [Attribute(path, name, size) for name in wide if own and name not in of_heads]
    choices = [tuple(counts), (*counts, *widths), ()]
    return list(dict.fromkeys(choices))
