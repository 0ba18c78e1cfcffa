"""Pruning as a script of one's own does it with torch-pruning, by the example of its README.

A source for the command line, too: ``by_hand.py:pruned(model="resnet50", ratio=0.3, everywhere=True)``.
"""

import inspect

import torch
import torch_pruning as tp
from torch import Tensor, nn

from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch.factories import build


def prune(model: nn.Module, example: Tensor, classes: int, ratio: float, everywhere: bool) -> None:
    """The README's lines, "High-level Pruners", with the class count and the ratio as arguments."""
    importance = tp.importance.GroupMagnitudeImportance(p=2)
    ignored = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features == classes:
            ignored.append(module)
    pruner = tp.pruner.BasePruner(
        model,
        example,
        importance=importance,
        pruning_ratio=ratio,
        ignored_layers=ignored,
        round_to=8,
        global_pruning=everywhere,
    )
    pruner.step()
    model.zero_grad()


def pruned(*, model: str, ratio: float, everywhere: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of the zoo, pruned by hand, and its example; ``everywhere`` ranks all layers together."""
    built = build(resolve(model))
    ((name, example),) = built.example.items()
    for parameter in built.module.parameters():
        parameter.requires_grad_(True)
    with torch.inference_mode(False), torch.enable_grad():
        classes = built.module(example).shape[1]
        prune(built.module, example.clone(), classes, ratio, everywhere)
    return built.module.eval(), {name: example}


def code() -> list[str]:
    """The lines that a user writes: the body of :func:`prune`, and the export."""
    lines, _ = inspect.getsourcelines(prune)
    body = [line[4:].rstrip() for line in lines[2:]]
    return [
        *body,
        'torch.onnx.export(model, (example,), "pruned.onnx", dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))',
    ]


def macs(model: nn.Module, example: Tensor) -> int:
    """Multiply-accumulates of one sample, as torch-pruning counts them."""
    count, _ = tp.utils.count_ops_and_params(model, example[:1])
    return int(count)
