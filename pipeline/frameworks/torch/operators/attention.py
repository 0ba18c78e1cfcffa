"""Compute attention and rotary embeddings."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.frameworks.torch.operators.attributes import Compute, Make, read_float, read_int, refuse


def _attention(node: "ir.Node", opset: int) -> Compute:
    query_heads, key_heads = read_int(node, "q_num_heads", 0), read_int(node, "kv_num_heads", 0)
    causal, softcap = bool(read_int(node, "is_causal", 0)), read_float(node, "softcap", 0.0)
    scale = read_float(node, "scale", 0.0) if "scale" in node.attributes else None
    if any(value is not None for value in node.inputs[4:]) or any(value.name for value in node.outputs[1:]):
        raise refuse(node, "it has a cache of earlier keys, lengths of rows, or gives more than its answer")

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        merged = query.ndim == 3
        if merged:
            query = _split_heads(query, query_heads)
            key, value = (_split_heads(each, key_heads) for each in (key, value))
        added = _add_masks(query.new_zeros(query.shape[-2], key.shape[-2]), mask, causal=causal)
        if softcap:
            answer = _attend_capped(query, key, value, added, scale, softcap)
        else:
            groups = query.shape[1] != key.shape[1]
            answer = F.scaled_dot_product_attention(query, key, value, added, scale=scale, enable_gqa=groups)
        return answer.transpose(1, 2).flatten(2) if merged else answer

    return compute


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def _add_masks(scores: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor | None:
    """Make what is added to scores, all zero here: minus infinity where a key is not looked at; None for nothing."""
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    if mask is None:
        return scores if causal else None
    if 1 < mask.shape[-1] < scores.shape[-1]:
        mask = F.pad(
            mask, (0, scores.shape[-1] - mask.shape[-1]), value=False if mask.dtype == torch.bool else -math.inf
        )
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _attend_capped(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, scale: float | None, softcap: float
) -> Tensor:
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (scale or 1 / math.sqrt(query.shape[-1]))
    scores = softcap * torch.tanh(scores / softcap)
    if added is None:
        return scores.softmax(-1) @ value
    scores = scores + added
    empty = (scores == -math.inf).all(-1, keepdim=True)  # no key is left: 0, as without a cap
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ value


def _rotary_embedding(
    x: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor | None = None,
    *,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    interleaved: int = 0,
) -> Tensor:
    merged, width = x.ndim == 3, rotary_embedding_dim
    x = _split_heads(x, num_heads) if merged else x
    turned, rest = x[..., : width or x.shape[-1]], x[..., width or x.shape[-1] :]
    if positions is not None:
        cosines, sines = cosines[positions], sines[positions]
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = cosines * first - sines * second, sines * first + cosines * second
    result = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    result = torch.cat((result, rest), -1)
    return result.transpose(1, 2).flatten(2) if merged else result


PLAIN: dict[str, Compute] = {"RotaryEmbedding": _rotary_embedding}
MADE: dict[str, Make] = {"Attention": _attention}
