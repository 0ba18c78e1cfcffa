"""Attention of torch.nn in a form that can lose heads.

``nn.MultiheadAttention`` counts on a head's width being the model's divided by the number of heads, so no head can go.
In its place comes a module with the same weights and the same answers, with a projection each for queries, keys and
values. Which ones were replaced is recorded by path, and done again to what the factory builds.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn import functional as F

from enginesmith.pipeline.frameworks.records import PrunedGroup

Whole = nn.MultiheadAttention
_NESTED = "use_nested_tensor"


class Attention(nn.Module):
    """Attention with the outputs of ``nn.MultiheadAttention``, for any number of heads."""

    def __init__(self, whole: Whole) -> None:
        super().__init__()
        packed = whole.in_proj_weight
        weights = (whole.q_proj_weight, whole.k_proj_weight, whole.v_proj_weight) if packed is None else packed.chunk(3)
        biases = (None, None, None) if whole.in_proj_bias is None else whole.in_proj_bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = (_linear(*pair) for pair in zip(weights, biases, strict=True))
        self.out_proj = _linear(whole.out_proj.weight, whole.out_proj.bias)
        self.embed_dim, self.num_heads = whole.embed_dim, whole.num_heads
        self.batch_first, self.dropout = whole.batch_first, whole.dropout
        self.in_proj_bias = None
        self._qkv_same_embed_dim = False  # with these two the layers of torch.nn do not take their fused operator
        self.train(whole.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute as torch.nn does; ``is_causal`` is a hint there, and the mask that comes with it says it all."""
        batched = query.dim() == 3
        given: tuple[Tensor, ...] = (query, key, value)
        if not batched:
            given = tuple(tensor.unsqueeze(0) for tensor in given)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            given = tuple(tensor.transpose(0, 1) for tensor in given)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            layer(tensor).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, tensor in zip(layers, given, strict=True)
        )
        mask, dropout = self._mask(attn_mask, key_padding_mask, q), self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _mask(self, attention: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Combine the masks that are added to the scores, of shape (batch or 1, heads or 1, queries, keys).

        A row for each query, even where all are alike: ONNX Runtime's Attention (opset 23) does not broadcast one.
        """
        masks = []
        if attention is not None:
            flat = attention.dim() == 2
            masks.append(attention if flat else attention.view(-1, self.num_heads, *attention.shape[1:]))
        if padding is not None:
            masks.append(padding[:, None, None, :].expand(-1, -1, q.shape[2], -1))
        added = [
            torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -math.inf) if mask.dtype == torch.bool else mask
            for mask in masks
        ]
        return sum(added[1:], added[0]) if added else None


def find_frozen(model: nn.Module, names: Collection[str]) -> set[str]:
    """Find the parameters that are frozen, by names from before any attention was replaced."""
    frozen_names = set(names)
    for path, module in model.named_modules():
        if isinstance(module, Attention):
            prefix = f"{path}." if path else ""
            for part in ("q_proj", "k_proj", "v_proj"):
                if frozen_names & {f"{prefix}in_proj_weight", f"{prefix}{part}_weight"}:
                    frozen_names.add(f"{prefix}{part}.weight")
                if f"{prefix}in_proj_bias" in frozen_names:
                    frozen_names.add(f"{prefix}{part}.bias")
    return frozen_names


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
    return layer


def replaceable(model: nn.Module) -> tuple[str, ...]:
    """List the paths of attention modules that can be replaced."""
    return tuple(
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if path and type(module) is Whole and module.bias_k is None and not module.add_zero_attn
    )


@dataclass(frozen=True)
class Replaced:
    """Replaced modules by path: attention, and encoders that may take a way that looks for packed weights."""

    attention: dict[str, Whole] = field(default_factory=dict)
    encoders: tuple[str, ...] = ()

    def put_back(self, model: nn.Module, used: Collection[nn.Module]) -> "Replaced":
        """Put back attention that has no part among the modules ``used``; return what is still replaced."""
        modules = dict(model.named_modules(remove_duplicate=False))
        parts = {path: set(modules[path].modules()) for path in self.attention}
        attention = {path: old for path, old in self.attention.items() if not parts[path].isdisjoint(used)}
        for path, old in self.attention.items():
            if path not in attention:
                put_module(model, path, old)
        still = [path for path in self.encoders if _has_below(path, attention)]
        for path in self.encoders:
            setattr(modules[path], _NESTED, path not in still)
        return Replaced(attention, tuple(still))


def replace(model: nn.Module, paths: Iterable[str]) -> Replaced:
    """Put the form that can lose heads in the place of attention modules.

    Raises:
        LookupError: there is no such module at one of the paths.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    originals: dict[str, Whole] = {}
    substitutes: dict[Whole, Attention] = {}
    for path in paths:
        module = modules.get(path)
        if not isinstance(module, Whole):
            raise KeyError(path)
        originals[path] = module
        if module not in substitutes:
            substitutes[module] = Attention(module)
        put_module(model, path, substitutes[module])
    encoders = []
    for path, module in modules.items():
        nested = isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor
        if nested and _has_below(path, originals):
            setattr(module, _NESTED, False)
            encoders.append(path)
    return Replaced(originals, tuple(encoders))


def _has_below(path: str, others: Iterable[str]) -> bool:
    return any(other.startswith(f"{path}." if path else "") for other in others)


def put_module(model: nn.Module, path: str, value: nn.Module | Tensor) -> None:
    """Set a module, parameter or buffer at a path."""
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, value)


Plain = bool | int | tuple[int, ...]
"""Attributes of modules that sizes are kept in: ``out_channels``, ``normalized_shape``, ``num_heads`` …"""
Shapes = dict[str, tuple[int, ...]]
Attributes = dict[str, dict[str, Plain]]


class Surgery(BaseModel, frozen=True, extra="forbid"):
    """Sizes of a pruned module that differ from what its factory builds, and how that came about.

    They are enough to do the same to what the factory builds, weights aside: as there is no code among them, nothing is
    unpickled and nothing but the factory is called to get a pruned module back.
    """

    attributes: Attributes = {}
    """Path of a module → its plain attributes that changed. The root's path is empty."""
    shapes: Shapes = {}
    """Name of a parameter or buffer → its shape."""
    attention: tuple[str, ...] = ()
    """Paths of attention modules of torch.nn that were replaced by the form that can lose heads, before all else."""
    history: tuple[PrunedGroup, ...] = ()

    def then(self, later: "Surgery") -> "Surgery":
        """Combine this one with another on top of it."""
        attributes = {path: dict(values) for path, values in self.attributes.items()}
        for path, values in later.attributes.items():
            attributes[path] = {**attributes.get(path, {}), **values}
        return Surgery(
            attributes=attributes,
            shapes={**self.shapes, **later.shapes},
            attention=(*self.attention, *later.attention),
            history=(*self.history, *later.history),
        )


def plain_attributes(module: nn.Module) -> Attributes:
    """Collect whole numbers, and tuples of them, that are attributes of a module or of any below it, by path."""
    plain: Attributes = {path: {} for path, _ in module.named_modules()}
    for path, inner in module.named_modules():
        for name, value in sorted(vars(inner).items()):
            if isinstance(value, int):
                plain[path][name] = value
            elif isinstance(value, tuple) and all(isinstance(item, int) for item in value):
                plain[path][name] = tuple(value)
    return plain


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Collect parameters and buffers by name, those too that a state dict omits, and each name of a shared one."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: value.detach() for name, value in named}


class Before:
    """The sizes of a module before something is done to it."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = plain_attributes(module)
        self._shapes = {name: value.shape for name, value in named_tensors(module).items()}

    def difference(
        self, module: nn.Module, history: tuple[PrunedGroup, ...] = (), attention: tuple[str, ...] = ()
    ) -> Surgery:
        """Collect what was done to the module since then, where ``attention`` had been replaced before."""
        attributes: Attributes = {}
        for path, values in plain_attributes(module).items():
            for name, value in values.items():
                if self._attributes.get(path, {}).get(name) != value:
                    attributes.setdefault(path, {})[name] = value
        tensors = named_tensors(module).items()
        shapes = {name: tuple(value.shape) for name, value in tensors if self._shapes.get(name) != value.shape}
        return Surgery(attributes=attributes, shapes=shapes, attention=attention, history=history)


def apply_surgery(surgery: Surgery, module: nn.Module) -> None:
    """Give a module of the factory's the sizes of the pruned one; tensors of new shapes are left unfilled.

    Raises:
        LookupError: the module lacks a part that the surgery names.
    """
    replace(module, surgery.attention)
    modules = dict(module.named_modules(remove_duplicate=False))
    for path, values in surgery.attributes.items():
        for name, value in values.items():
            setattr(modules[path], name, value)
    own = named_tensors(module)
    parts = {name: modules[name.rpartition(".")[0]] for name in surgery.shapes}
    held = {name: getattr(part, name.rpartition(".")[2]) for name, part in parts.items()}
    resized: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    for name, shape in surgery.shapes.items():
        old, value = own[name], held[name]
        place = (old.data_ptr() or id(parts[name]), tuple(old.shape))  # tied entries stay tied
        new = resized.setdefault(place, torch.empty(shape, dtype=old.dtype, device=old.device))
        if isinstance(value, nn.Parameter):  # one that several layers have is one afterwards, too
            new = parameters.setdefault(value, nn.Parameter(new, requires_grad=False))
        setattr(parts[name], name.rpartition(".")[2], new)
