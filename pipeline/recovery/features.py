"""Which values the two models are compared by: outputs, and the ends of stages inside."""

import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.recovery.material import Batch
from enginesmith.pipeline.recovery.record import Target
from enginesmith.pipeline.torch_model import LoadedModel

_LOGITS = re.compile(r"logits|scores", re.IGNORECASE)
_MOST = 4
"""Values inside that are compared; more cost time and teach little."""
_LEAST_SCALE = 1e-12


class Taps:
    """Within the block, what modules returned when they were last called, by their paths; tensors only."""

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        self.seen: dict[str, Tensor] = {}
        self._model, self._paths = model, paths
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for path in self._paths:
            self._hooks.append(self._model.get_submodule(path).register_forward_hook(self._keeping(path)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keeping(self, path: str) -> Any:
        def keep(module: nn.Module, given: Any, value: Any) -> None:
            if isinstance(value, Tensor):
                self.seen.pop(path, None)  # so that the order is that of the last calls
                self.seen[path] = value

        return keep


@torch.no_grad()
def output_targets(teacher: LoadedModel, batch: Batch) -> tuple[Target, ...]:
    """How each output of floating-point numbers is compared.

    Classes are what labels number, or what is called logits or scores; everything else is numbers.

    Raises:
        ModelError: there is none.
    """
    names = [spec.name for spec in teacher.signature.outputs]
    values = teacher.module(*batch.inputs.values())
    found = [
        Target(name=name, kind=_kind(name, value.float(), batch.labels if not index else None), scale=_scale(value))
        for index, (name, value) in enumerate(zip(names, values, strict=True))
        if value.is_floating_point() and value.numel()
    ]
    if not found:
        raise ModelError(
            f"no output of the model is of floating point: {', '.join(map(str, teacher.signature.outputs))}",
            "have it return what its answer is made of, logits for instance; or recover by a loss of your own",
        )
    return tuple(found)


def _kind(name: str, value: Tensor, labels: Tensor | None) -> Any:
    numbered = (
        labels is not None
        and not labels.is_floating_point()
        and labels.shape == value.shape[:-1]
        and bool((labels < value.shape[-1]).all())
    )
    if value.ndim < 2 or value.shape[-1] < 2 or not (numbered or _LOGITS.search(name)):
        return "values"
    sums = value.sum(-1)
    return "probabilities" if value.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=1e-3) else "classes"


def _scale(value: Tensor) -> float:
    return max(float(value.float().var(correction=0)), _LEAST_SCALE)


@torch.no_grad()
def feature_targets(student: LoadedModel, teacher: LoadedModel, batch: Batch) -> tuple[Target, ...]:
    """Ends of stages: of the values with a shape in common, the last of each shape; of one shape throughout, some.

    Where channels were pruned and the rest of an image's shape is as it was, maps are compared.
    """
    theirs, ours = (_seen(model, batch) for model in (teacher, student))
    blocks = _blocks(teacher.module.model)
    usable = {path: kind for path in theirs if path in ours and (kind := _comparable(ours[path], theirs[path]))}
    chosen = {path: kind for path, kind in usable.items() if path in blocks} or usable
    stages: dict[tuple[int, ...], list[str]] = {}
    for path in chosen:
        stages.setdefault(tuple(theirs[path].shape), []).append(path)
    ends = [paths[-1] for paths in stages.values()][-_MOST:]
    if len(stages) == 1:
        (alike,) = stages.values()
        ends = [alike[len(alike) * (index + 1) // _MOST - 1] for index in range(_MOST)] if len(alike) > _MOST else alike
    return tuple(Target(name=path, kind=chosen[path], scale=_scale(theirs[path])) for path in ends)


def _seen(model: LoadedModel, batch: Batch) -> Mapping[str, Tensor]:
    paths = [path for path, _ in model.module.model.named_modules() if path]
    with Taps(model.module.model, paths) as taps:
        model.module(*batch.inputs.values())
    return taps.seen


def _blocks(model: nn.Module) -> set[str]:
    """Paths of what stands in sequences, and is made of parts itself."""
    sequences = [(path, one) for path, one in model.named_modules() if isinstance(one, nn.Sequential | nn.ModuleList)]
    return {
        f"{path}.{name}" if path else name
        for path, sequence in sequences
        for name, part in sequence.named_children()
        if next(part.children(), None) is not None
    }


def _comparable(ours: Tensor, theirs: Tensor) -> Any:
    if not (ours.is_floating_point() and theirs.is_floating_point()) or theirs.ndim < 3 or not theirs.numel():
        return None
    if ours.shape == theirs.shape:
        return "values"
    spatial = theirs.ndim == 4 and ours.ndim == 4 and theirs[0, 0].numel() > 1
    return "maps" if spatial and ours.shape[2:] == theirs.shape[2:] else None
