"""BERT, base size: a bidirectional encoder of text.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", NAACL 2019; GELU with the exact error function
as in the reference code. State-dict keys are those of Hugging Face's BertModel; its checkpoints for pre-training load
too, less their heads.
"""

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from enginesmith.models.checkpoint import load_weights
from enginesmith.models.inputs import tokens

VOCABULARY = 30522
POSITIONS = 512
SEGMENTS = 2
WIDTH = 768
HEADS = 12
DEPTH = 12
EPSILON = 1e-12
# Added to the score of a padded position: its weight underflows to exactly 0, and the number fits in float16.
MASKED = -1e4


class Embeddings(nn.Module):
    """The sum of word, position and segment vectors, normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        self.token_type_embeddings = nn.Embedding(SEGMENTS, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        position = torch.arange(input_ids.shape[1], device=input_ids.device)
        total = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        y: Tensor = self.LayerNorm(total + self.position_embeddings(position))
        return y


class SelfAttention(nn.Module):
    """Multi-head attention without its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        query, key, value = (_heads(part(x)) for part in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)


class Residual(nn.Module):
    """A projection added to the input of its block, then normalized."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        z: Tensor = self.LayerNorm(self.dense(y) + x)
        return z


class Attention(nn.Module):
    """Self-attention and its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.self = SelfAttention()
        self.output = Residual(WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = self.output(self.self(x, bias), x)
        return y


class Intermediate(nn.Module):
    """The wide half of the feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class Layer(nn.Module):
    """Attention, then the feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.intermediate = Intermediate()
        self.output = Residual(4 * WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.attention(x, bias)
        y: Tensor = self.output(self.intermediate(x), x)
        return y


class Encoder(nn.Module):
    """The layers in order, all under one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, bias)
        return x


class Pooler(nn.Module):
    """The first token, projected."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x[:, 0]))


class Bert(nn.Module):
    """Embeddings, encoder and pooler."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = Encoder()
        self.pooler = Pooler()
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(part.weight, std=0.02)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict[str, Tensor]:
        x = self.embeddings(input_ids, token_type_ids)
        bias = (1 - attention_mask[:, None, None, :].to(x.dtype)) * MASKED
        # ONNX Runtime's Attention kernel (opset 23) wants one row for each query; it does not broadcast a single one.
        x = self.encoder(x, bias.expand(-1, -1, input_ids.shape[1], -1))
        return {"last_hidden_state": x, "pooler_output": self.pooler(x)}


def bert_base(*, weights: str | None = None) -> tuple[nn.Module, dict[str, Tensor]]:
    """BERT-base in eval mode and two example sequences of 128 tokens, the second one padded from 96 on.

    Raises:
        SourceError: ``weights`` cannot be loaded.
    """
    module = Bert()
    if weights is not None:
        load_weights(module, weights, rename=_key)
    ids = tokens(VOCABULARY, 128)
    mask = torch.ones_like(ids)
    mask[1, 96:] = 0
    segments = torch.zeros_like(ids)
    segments[:, 64:] = 1
    return module.eval(), {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def _heads(x: Tensor) -> Tensor:
    """Count the heads that the width holds: pruning removes whole ones."""
    return x.reshape(x.shape[0], x.shape[1], -1, WIDTH // HEADS).transpose(1, 2)


def _key(key: str) -> str | None:
    key = key.removeprefix("bert.")
    if key.startswith("cls.") or key == "embeddings.position_ids":
        return None
    return re.sub(r"(LayerNorm)\.(gamma|beta)$", lambda m: f"LayerNorm.{'weight' if m[2] == 'gamma' else 'bias'}", key)
