"""What the student is to become better at.

Distilling classes: Hinton et al., "Distilling the Knowledge in a Neural Network" (2015). Values inside: Romero et al.,
"FitNets" (ICLR 2015); maps, where channels were pruned: Zagoruyko and Komodakis, "Paying More Attention to Attention"
(ICLR 2017).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from enginesmith.calibration import user_code
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.recovery import memory
from enginesmith.pipeline.recovery.features import Taps
from enginesmith.pipeline.recovery.material import Batch
from enginesmith.pipeline.recovery.record import Target
from enginesmith.pipeline.torch_model import NamedForward

_LEAST_PROBABILITY = 1e-7


class Loss(Protocol):
    """``(student, teacher, batch)`` → a scalar, the mean over the samples of the batch."""

    def __call__(self, student: NamedForward, teacher: NamedForward, batch: Batch) -> Tensor: ...


class Distil:
    """The student's outputs, and values inside of it, against the teacher's."""

    def __init__(
        self, outputs: Sequence[Target], features: Sequence[Target], names: Sequence[str], temperature: float
    ) -> None:
        """``names`` are those of all outputs, in order."""
        self._outputs = [(names.index(target.name), target) for target in outputs]
        self._features = tuple(features)
        self._temperature = temperature

    def __call__(self, student: NamedForward, teacher: NamedForward, batch: Batch) -> Tensor:
        paths = [target.name for target in self._features]
        with torch.no_grad(), Taps(teacher.model, paths) as inside:
            theirs = teacher(*batch.inputs.values())
        with Taps(student.model, paths) as own:
            ours = student(*batch.inputs.values())
        losses = [self._one(target, ours[index], theirs[index]) for index, target in self._outputs]
        total = torch.stack(losses).sum()
        if self._features:
            pairs = ((target, own.seen[target.name], inside.seen[target.name]) for target in self._features)
            total = total + torch.stack([self._one(*pair) for pair in pairs]).mean()
        return total

    def _one(self, target: Target, ours: Tensor, theirs: Tensor) -> Tensor:
        ours, theirs = ours.float(), theirs.float()
        if target.kind == "values":
            return F.mse_loss(ours, theirs) / target.scale
        if target.kind == "maps":
            return (_map(ours) - _map(theirs)).square().sum(1).mean()
        if target.kind == "probabilities":
            ours, theirs = (value.clamp_min(_LEAST_PROBABILITY).log() for value in (ours, theirs))
        heat, classes = self._temperature, ours.shape[-1]
        log_ours, log_theirs = (F.log_softmax(value.reshape(-1, classes) / heat, dim=1) for value in (ours, theirs))
        return heat**2 * F.kl_div(log_ours, log_theirs, reduction="batchmean", log_target=True)


def _map(value: Tensor) -> Tensor:
    """Where there is much: the sum of squares over channels (axis 1), of length 1 for each sample."""
    return F.normalize(value.square().sum(1).flatten(1), dim=1)


def supervised(student: NamedForward, teacher: NamedForward, batch: Batch) -> Tensor:
    """Cross entropy where labels are classes, and the mean squared error where they are numbers; of the first output.

    Raises:
        DataError: there are no labels, or they do not fit the output.
    """
    del teacher
    output, labels = student(*batch.inputs.values())[0].float(), batch.labels
    if labels is None:
        raise DataError(
            "supervised recovery needs labels, and the data has none",
            "add an array named labels, or recover by distil, which needs none",
        )
    if labels.is_floating_point() and labels.shape == output.shape:
        return F.mse_loss(output, labels)
    if not labels.is_floating_point() and labels.ndim == output.ndim - 1:
        for axis in (1, output.ndim - 1):
            if output.movedim(axis, -1).shape[:-1] == labels.shape:
                _hold_classes(labels, output.shape[axis])
                return F.cross_entropy(output.movedim(axis, 1), labels, ignore_index=-100)
    raise DataError(
        f"labels of shape {list(labels.shape)} do not fit the output of shape {list(output.shape)}",
        "give one class for each sample, or numbers in the shape of the output; else a loss of your own: "
        "module:function",
    )


def _hold_classes(labels: Tensor, classes: int) -> None:
    given = labels[labels != -100]
    if len(given) and (int(given.min()) < 0 or int(given.max()) >= classes):
        raise DataError(
            f"labels are from {int(given.min())} to {int(given.max())}, and the model has {classes} classes",
            f"number the classes from 0 to {classes - 1}",
        )


class UserLoss:
    """A function of the user's: ``(student, teacher, batch)`` with both modules, and arrays by name → a scalar."""

    def __init__(self, reference: str, function: Callable[..., Any]) -> None:
        self._reference, self._function = reference, function

    def __call__(self, student: NamedForward, teacher: NamedForward, batch: Batch) -> Tensor:
        values = {**batch.inputs, **({} if batch.labels is None else {"labels": batch.labels})}
        try:
            loss = self._function(student.model, teacher.model, values)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, AssertionError, RuntimeError) as error:
            if memory.ran_out(error):
                raise
            raise DataError(
                f"the loss {self._reference} raised {type(error).__name__}: {error}",
                f"it was given two modules and a batch of {', '.join(values)}",
            ) from error
        free = torch.is_grad_enabled() and not getattr(loss, "requires_grad", False)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or free:
            raise DataError(
                f"the loss {self._reference} returned {_described(loss)}",
                "return one number as a tensor that depends on the student's weights",
            )
        return loss.reshape(())


def user_loss(reference: str) -> UserLoss:
    """The loss that ``module:function`` or ``file.py:function`` names; that code runs, as the user asked for it.

    Raises:
        DataError: it is not there, or no function.
    """
    found = user_code.find(reference, "loss")
    if not callable(found):
        raise DataError(f"the loss {reference} is no function", "give it as module:function or file.py:function")
    return UserLoss(reference, found)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        free = "" if value.requires_grad else " that depends on no weight"
        return f"a tensor of shape {list(value.shape)}{free}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
