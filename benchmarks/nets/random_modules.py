"""Make random PyTorch modules that are valid by construction: the same seed gives the same module.

A module grows block by block (random_blocks.py): a value is drawn, then a block that takes it; values of one shape are
added, others joined. The last one, and at times others on the way, are the outputs. Weights are scaled by what they
add up, to stay near 1, and all differ, so that what was removed from a tensor is seen by its numbers.
"""

from typing import Any

import torch
from random_blocks import BLOCKS, CHANGES, Draw, Part, Shape
from torch import Tensor, nn

_BATCH = 2
_VOCABULARY = 16
_LARGEST = 1 << 13
"""Numbers of one value of a sample that blocks go on with."""


class RandomModule(nn.Module):
    """Blocks, each with the values that it takes; inputs come first among the values."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs, self.blocks = inputs, nn.ModuleList()
        self.sources: list[list[int]] = []
        self.outputs: list[int] = []
        self.named = False

    def forward(self, *given: Tensor) -> Any:
        values = list(given)
        for block, sources in zip(self.blocks, self.sources, strict=True):
            values.append(block(*(values[index] for index in sources)))
        if len(self.outputs) == 1:
            return values[self.outputs[0]]
        made = [values[index] for index in self.outputs]
        return {f"value_{index}": value for index, value in enumerate(made)} if self.named else tuple(made)


class _Growing:
    """A module that is being made, with the shapes of its values."""

    def __init__(self, seed: int) -> None:
        self.draw = Draw(seed)
        self.shapes: list[Shape] = []
        self.examples: list[Tensor] = []
        self.embeddings: list[nn.Embedding] = []
        count = 2 if self.draw.chance(0.2) else 1
        self.module = RandomModule(count)
        pending = [self._add_input() for _ in range(count)]
        for index, embedding in enumerate(pending):
            if embedding is not None:
                self.add(embedding, (*self.shapes[index], embedding.embedding_dim), index)

    def _add_input(self) -> nn.Embedding | None:
        draw = self.draw
        kind = draw.choice(("image", "image", "image", "rows", "tokens", "tokens", "vector"))
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        if kind == "tokens":
            shape: Shape = (draw.choice((4, 6, 9)),)
            self.shapes.append(shape)
            self.examples.append(torch.randint(_VOCABULARY, (_BATCH, *shape), generator=generator))
            return nn.Embedding(_VOCABULARY, draw.choice((8, 12, 16, 24, 32)))
        size = draw.choice((8, 8, 12, 16))
        shape = {
            "image": (draw.choice((1, 3, 3, 4)), size, size),
            "rows": (draw.choice((4, 6, 9)), draw.width()),
            "vector": (draw.width(),),
        }[kind]
        self.shapes.append(shape)
        self.examples.append(torch.randn(_BATCH, *shape, generator=generator))
        return None

    def add(self, block: nn.Module, shape: Shape, *sources: int) -> int:
        """Add a block that makes a value of this shape; return the value's index."""
        if isinstance(block, nn.Embedding):
            self.embeddings.append(block)
        self.module.blocks.append(block)
        self.module.sources.append(list(sources))
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def grow(self, at: int) -> int:
        """Add a block after a value; return what it makes."""
        draw, shape = self.draw, self.shapes[at]
        block = draw.choice((CHANGES if draw.chance(0.12) else BLOCKS)[len(shape)])
        if draw.chance(0.25) and (merged := self._merge(at)) is not None:
            return merged
        made, after = block(draw, shape)
        if torch.Size(after).numel() > _LARGEST:
            return at
        return self.add(made, after, at)

    def _merge(self, at: int) -> int | None:
        """Add or join a value and another one that fits; None where there is none."""
        shape, first = self.shapes[at], self.module.inputs
        axis = 0 if len(shape) in (1, 3) else 1
        without = [size for index, size in enumerate(shape) if index != axis]
        others = [
            index
            for index in range(first, len(self.shapes))
            if index != at
            and len(self.shapes[index]) == len(shape)
            and [size for place, size in enumerate(self.shapes[index]) if place != axis] == without
        ]
        if not others:
            return None
        other = self.draw.choice(others)
        if self.shapes[other] == shape and self.draw.chance(0.7):
            way = self.draw.choice((torch.add, torch.mul, torch.maximum))
            return self.add(Part(lambda self, x, y: way(x, y)), shape, at, other)
        width = shape[axis] + self.shapes[other][axis]
        if width > 96:
            return None
        joined = tuple(width if index == axis else size for index, size in enumerate(shape))
        return self.add(Part(lambda self, x, y: torch.cat([x, y], axis + 1)), joined, at, other)

    def finish(self) -> RandomModule:
        """Add heads, choose the outputs, and draw the weights."""
        draw = self.draw
        joined = None
        for index in range(len(self.shapes)):
            if index < self.module.inputs and any(index in sources for sources in self.module.sources):
                continue
            if index < self.module.inputs:  # an input that nothing reads yet
                joined = self._to_vector(index)
        last = len(self.shapes) - 1 if joined is None else joined
        if joined is not None:
            before = self._to_vector(self._newest(joined))
            width = self.shapes[before][0] + self.shapes[joined][0]
            last = self.add(Part(lambda self, x, y: torch.cat([x, y], 1)), (width,), before, joined)
        shape = self.shapes[last]
        if draw.chance(0.8):
            last = self._add_head(last, shape)
        between = range(self.module.inputs, last)
        extra = [draw.choice(between)] if between and draw.chance(0.15) else []
        self.module.outputs = [*extra, last]
        self.module.named = draw.chance(0.3)
        return self.module

    def _newest(self, but: int) -> int:
        """Find the last value that is not the one given, nor made of only the other input."""
        return but - 1 if but - 1 >= self.module.inputs else 0

    def _to_vector(self, at: int) -> int:
        shape = self.shapes[at]
        if len(shape) == 1:
            return at
        axes = (2, 3) if len(shape) == 3 else (1,)
        return self.add(Part(lambda self, x: x.mean(axes)), (shape[0] if len(shape) == 3 else shape[1],), at)

    def _add_head(self, at: int, shape: Shape) -> int:
        classes = self.draw.choice((2, 5, 10))
        if len(shape) == 3:
            if self.draw.chance(0.4):
                return self.add(nn.Conv2d(shape[0], classes, 1), (classes, *shape[1:]), at)
            at = self._to_vector(at)
        width = self.shapes[at][-1]
        tied = [one for one in self.embeddings if one.embedding_dim == width]
        if tied and self.draw.chance(0.6):
            head = nn.Linear(width, _VOCABULARY, bias=False)
            head.weight = tied[0].weight
            return self.add(head, (*self.shapes[at][:-1], _VOCABULARY), at)
        return self.add(nn.Linear(width, classes), (*self.shapes[at][:-1], classes), at)


def _draw_weights(module: nn.Module, seed: int) -> None:
    """Fill parameters and buffers with numbers that all differ, of a scale that keeps values near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if not value.is_floating_point():
                continue
            leaf = name.rpartition(".")[2]
            if leaf in ("running_var", "original0", "weight_g", "factors") or (leaf == "weight" and value.dim() == 1):
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
            elif leaf.startswith("_"):  # state of a parametrization, which has to fit its weight
                continue
            else:
                fan = value[0].numel() if value.dim() > 1 else 16
                value.copy_(torch.randn(value.shape, generator=generator) / max(fan, 1) ** 0.5)


def build(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Make the module of a seed, with an example of its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # spectral norms draw state of their own
        growing = _Growing(seed)
        at = len(growing.shapes) - 1
        for _ in range(growing.draw.randrange(2, 9)):
            at = growing.grow(at)
            if growing.draw.chance(0.1):
                at = growing.draw.randrange(growing.module.inputs, len(growing.shapes)) if growing.module.blocks else at
        module = growing.finish()
    _draw_weights(module, seed)
    return module.eval(), tuple(growing.examples)
