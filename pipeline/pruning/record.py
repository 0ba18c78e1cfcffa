"""What pruning did to a module, as data: enough to do the same to what the factory builds, weights aside.

A :class:`Surgery` is relative to the factory's module. It holds sizes and not code, so that nothing is unpickled and
nothing but the factory is called to get a pruned module back.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.pruning.facts import Kept

if TYPE_CHECKING:
    from torch import Tensor, nn

Plain = bool | int | tuple[int, ...]
"""Attributes of modules that sizes are kept in: ``out_channels``, ``normalized_shape``, ``num_heads`` …"""
Shapes = dict[str, tuple[int, ...]]
Attributes = dict[str, dict[str, Plain]]


class Surgery(BaseModel):
    """The sizes of a module that differ from what its factory builds, and how that came about."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attributes: Attributes = {}
    """Path of a module → its plain attributes that changed. The root's path is empty."""
    shapes: Shapes = {}
    """Name of a parameter or buffer → its shape."""
    attention: tuple[str, ...] = ()
    """Paths of attention modules of torch.nn that were replaced by the form that can lose heads, before all else."""
    history: tuple[Kept, ...] = ()

    def then(self, later: "Surgery") -> "Surgery":
        """This one, and another on top of it."""
        attributes = {path: dict(values) for path, values in self.attributes.items()}
        for path, values in later.attributes.items():
            attributes[path] = {**attributes.get(path, {}), **values}
        return Surgery(
            attributes=attributes,
            shapes={**self.shapes, **later.shapes},
            attention=(*self.attention, *later.attention),
            history=(*self.history, *later.history),
        )


def plain_attributes(module: "nn.Module") -> Attributes:
    """Whole numbers, and tuples of them, that are attributes of a module or of any below it, by path."""
    return {path: _plain(vars(inner)) for path, inner in module.named_modules()}


def _plain(values: Mapping[str, object]) -> dict[str, Plain]:
    found: dict[str, Plain] = {}
    for name, value in sorted(values.items()):
        if isinstance(value, int):
            found[name] = value
        elif isinstance(value, tuple) and all(isinstance(item, int) for item in value):
            found[name] = tuple(value)
    return found


def named_tensors(module: "nn.Module") -> "dict[str, Tensor]":
    """Every parameter and buffer by name, those too that a state dict leaves out, and each name of a shared one."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: value.detach() for name, value in named}


def shapes_of(module: "nn.Module") -> Shapes:
    """The shape of every parameter and buffer."""
    return {name: tuple(value.shape) for name, value in named_tensors(module).items()}


class Before:
    """The sizes of a module before something is done to it."""

    def __init__(self, module: "nn.Module") -> None:
        self._attributes = plain_attributes(module)
        self._shapes = shapes_of(module)

    def difference(
        self, module: "nn.Module", history: tuple[Kept, ...] = (), attention: tuple[str, ...] = ()
    ) -> Surgery:
        """What was done to the module since then, where ``attention`` had been replaced before."""
        attributes = {}
        for path, values in plain_attributes(module).items():
            known = self._attributes.get(path, {})
            if changed := {name: value for name, value in values.items() if known.get(name) != value}:
                attributes[path] = changed
        shapes = {name: shape for name, shape in shapes_of(module).items() if self._shapes.get(name) != shape}
        return Surgery(attributes=attributes, shapes=shapes, attention=attention, history=history)


def apply(surgery: Surgery, module: "nn.Module") -> None:
    """Give a module of the factory's the sizes of the pruned one; tensors of new shapes are left unfilled.

    Raises:
        LookupError: the module lacks a part that the surgery names.
    """
    import torch
    from torch import nn

    from enginesmith.pipeline.pruning import multihead

    multihead.replace(module, surgery.attention)
    for path, values in surgery.attributes.items():
        inner = _below(module, path)
        for name, value in values.items():
            setattr(inner, name, value)
    own = named_tensors(module)
    parts = {name: _below(module, name.rpartition(".")[0]) for name in surgery.shapes}
    made: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    for name, shape in surgery.shapes.items():
        old = own[name]
        place = (old.data_ptr() or id(parts[name]), tuple(old.shape))  # tied entries stay tied
        new = made.setdefault(place, torch.empty(shape, dtype=old.dtype, device=old.device))
        leaf = name.rpartition(".")[2]
        is_parameter = isinstance(getattr(parts[name], leaf), nn.Parameter)
        setattr(parts[name], leaf, nn.Parameter(new, requires_grad=False) if is_parameter else new)


def _below(module: "nn.Module", path: str) -> "nn.Module":
    """A part by its path.

    Raises:
        KeyError: there is none.
    """
    found: nn.Module | None = dict(module.named_modules(remove_duplicate=False)).get(path)
    if found is None:
        raise KeyError(path)
    return found
