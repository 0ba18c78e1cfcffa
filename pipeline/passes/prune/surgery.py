"""Take units out of a module's tensors, in place, and put everything back if need be.

Units are those of groups of channels that can only go together, as slices of named tensors.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Side = Literal["makes", "scales", "reads"]


@dataclass(frozen=True)
class Slice:
    """The units of a group in one tensor: ``indices[unit]`` along ``axis``."""

    tensor: str
    axis: int
    side: Side
    """Effect of the tensor's layer: it makes the channels, changes each of them alone, or reads them."""
    indices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Attribute:
    """A whole number that a module keeps beside its weights, and that shrinks with the group."""

    module: str
    name: str
    each: int
    """The part of it that one unit accounts for."""


@dataclass(frozen=True)
class Group:
    """Layers whose channels hang together. A unit is the least that can go: a channel, one of each block, a head."""

    root: str
    """The first layer that makes the channels."""
    unit: Literal["channel", "head"]
    channels: tuple[tuple[int, ...], ...]
    """For each unit, its channels as the layer counts them that importance is found for."""
    slices: tuple[Slice, ...]
    modules: tuple[str, ...]
    attributes: tuple[Attribute, ...] = ()
    traced: Any = field(default=None, compare=False, repr=False)

    @property
    def units(self) -> int:
        return len(self.channels)

    @property
    def width(self) -> int:
        """Channels in all."""
        return self.count_channels(range(self.units))

    def count_channels(self, units: Iterable[int]) -> int:
        """Count the channels of units."""
        return sum(len(self.channels[unit]) for unit in units)

    def list_members(self, units: Iterable[int]) -> tuple[int, ...]:
        """List the heads of units, or else their channels: what people count the group in."""
        if self.unit == "head":
            return tuple(sorted(units))
        return tuple(sorted(channel for unit in units for channel in self.channels[unit]))

    @property
    def paths(self) -> tuple[str, ...]:
        """Modules that are cut or whose attributes shrink."""
        return (*self.modules, *(attribute.module for attribute in self.attributes))

    def order_removal(self, order: Sequence[int]) -> tuple[list[int], int]:
        """Reorder units so that those behind which a layer would be empty come last; return how many those are.

        A layer may have some of the units only: one of those whose outputs are joined, of which another one has the
        rest.
        """
        held = {part.indices: [unit for unit in order if part.indices[unit]] for part in self.slices}
        last = {units[-1] for units in held.values() if units}
        return [unit for unit in order if unit not in last] + [unit for unit in order if unit in last], len(last)


@dataclass(frozen=True)
class Removal:
    """A group, and the units of it that go."""

    group: Group
    units: tuple[int, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """Layers that lose something, and parameters that do and belong to none of them.

        A layer that has some of the group's units only may keep all of those.
        """
        modules = self.group.modules
        owners = {part: part.tensor.rpartition(".")[0] for part in self.group.slices}
        lost = {owners[part] if owners[part] in modules else part.tensor for part in owners if self.along(part)}
        whole = {owner for owner in owners.values() if owner not in lost}
        return tuple(dict.fromkeys((*(path for path in modules if path not in whole), *sorted(lost - {*modules}))))

    def along(self, part: Slice) -> list[int]:
        """List the indices that go along a slice's axis."""
        return sorted({index for unit in self.units for index in part.indices[unit]})


class Parts:
    """A module's parameters and buffers, found by any of their names; shared ones are one."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self._holders: dict[str, list[tuple[nn.Module, str]]] = {}
        first: dict[int, str] = {}
        self.canonical: dict[str, str] = {}
        for path, module in self.modules.items():
            for table in (module._parameters, module._buffers):
                for leaf, value in table.items():
                    if value is None:
                        continue
                    name = f"{path}.{leaf}" if path else leaf
                    self.canonical[name] = first.setdefault(id(value), name)
                    self._holders.setdefault(self.canonical[name], []).append((module, leaf))

    def get(self, name: str) -> Tensor:
        """Return a tensor by its canonical name."""
        module, leaf = self._holders[name][0]
        tensor: Tensor = getattr(module, leaf)
        return tensor

    def list_holders(self, name: str) -> list[nn.Module]:
        """List the modules that hold a tensor, by its canonical name."""
        return [module for module, _ in self._holders[name]]

    def put(self, name: str, value: Tensor) -> None:
        """Replace a tensor wherever it is held."""
        for module, leaf in self._holders[name]:
            setattr(module, leaf, value)


@contextlib.contextmanager
def cut_for_now(model: nn.Module, removals: Sequence[Removal]) -> Iterator[None]:
    """Cut the units within the block."""
    parts = Parts(model)
    tensors = {part.tensor: parts.get(part.tensor) for removal in removals for part in removal.group.slices}
    paths = {path for removal in removals for path in removal.group.paths}
    sizes = {
        path: {name: value for name, value in vars(parts.modules[path]).items() if isinstance(value, (int, tuple))}
        for path in paths
    }
    try:
        cut(model, removals)
        yield
    finally:
        for name, value in tensors.items():
            parts.put(name, value)
        for path, values in sizes.items():
            parts.modules[path].__dict__.update(values)


def cut(model: nn.Module, removals: Sequence[Removal]) -> None:
    """Take units out for good; ``model`` is smaller afterwards, and nothing else changes."""
    parts = Parts(model)
    gone: dict[tuple[str, int], set[int]] = {}
    for removal in removals:
        for part in removal.group.slices:
            axis = part.axis % parts.get(part.tensor).dim()
            gone.setdefault((part.tensor, axis), set()).update(removal.along(part))
    for (name, axis), indices in sorted(gone.items()):
        old = parts.get(name)
        positions = torch.tensor([index for index in range(old.shape[axis]) if index not in indices], dtype=torch.long)
        new = old.detach().index_select(axis, positions.to(old.device))
        parts.put(name, nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new)
    for removal in removals:
        for path in removal.group.modules:
            _resize(parts.modules[path])
        for attribute in removal.group.attributes:
            module, less = parts.modules[attribute.module], attribute.each * len(removal.units)
            value = getattr(module, attribute.name)
            setattr(module, attribute.name, value - less if isinstance(value, int) else (*value[:-1], value[-1] - less))


def _resize(module: nn.Module) -> None:
    """Bring the sizes that a module of torch.nn keeps in line with its tensors."""
    if isinstance(module, nn.modules.conv._ConvNd):
        first, second = module.weight.shape[:2]
        if is_depthwise(module):
            module.groups = module.in_channels = module.out_channels = first
        elif module.transposed:
            module.in_channels, module.out_channels = first, second * module.groups
        else:
            module.out_channels, module.in_channels = first, second * module.groups
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)):
        sizes = [value for value in (module.weight, module.running_mean) if value is not None]
        module.num_features = int(sizes[0].shape[0]) if sizes else module.num_features
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.GroupNorm):
        module.num_channels = module.weight.shape[0]
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]
    elif isinstance(module, nn.PReLU):
        module.num_parameters = module.weight.shape[0]
    elif isinstance(module, nn.RNNBase):
        module.input_size = int(module.get_parameter("weight_ih_l0").shape[1])


def is_depthwise(layer: "nn.modules.conv._ConvNd") -> bool:
    """Tell whether a convolution changes each channel alone."""
    return layer.groups == layer.out_channels == layer.in_channels and layer.groups > 1


@contextlib.contextmanager
def mask_units(model: nn.Module, removals: Sequence[Removal]) -> Iterator[None]:
    """Mask the units within the block: no layer reads them, as its weights for them are 0."""
    parts = Parts(model)
    slices = [(part, removal) for removal in removals for part in removal.group.slices if part.side == "reads"]
    originals = {part.tensor: parts.get(part.tensor) for part, _ in slices}
    try:
        with torch.no_grad():
            for name, value in originals.items():
                parts.put(name, nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad))
            for part, removal in slices:
                parts.get(part.tensor).index_fill_(part.axis, torch.tensor(removal.along(part), dtype=torch.long), 0.0)
        yield
    finally:
        for name, value in originals.items():
            parts.put(name, value)
