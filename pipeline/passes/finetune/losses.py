"""Define the losses that the student is trained by.

Distilling classes: Hinton et al., "Distilling the Knowledge in a Neural Network" (2015). Values inside: Romero et al.,
"FitNets" (ICLR 2015); maps, where channels were pruned: Zagoruyko and Komodakis, "Paying More Attention to Attention"
(ICLR 2017).
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from enginesmith.calibration import user_code
from enginesmith.calibration.dataset import assign_labels
from enginesmith.pipeline.errors import DataError, ModelError
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, NamedForward
from enginesmith.pipeline.passes.finetune.batches import Batch, ran_out
from enginesmith.pipeline.passes.finetune.options import Target
from enginesmith.pipeline.tensors import Array
from enginesmith.pipeline.units import group_values

_LOGITS = re.compile(r"logits|scores", re.IGNORECASE)
_MOST = 4
"""Values inside that are compared; more cost time and teach little."""
_LEAST_SCALE = 1e-12
_LEAST_PROBABILITY = 1e-7
_TOKENS_NDIM = 3
"""Dimensions of a text's classes: those of an image's are more."""
_UNLABELED = (-100, 255)
"""Class numbers of what does not count: of samples and places, and of places alone."""
_MASKED = -1e9
"""Logit of a class that both models rule out with the same infinite one; a number that has gradients."""
_UNLIKE, _MOST_UNLIKE = 100.0, 128
"""Ratio of mean squares from which on numbers of an output are unlike, and the longest axis that is looked at."""
_CONSTANT = 1e-4
"""Share of the mean square that is taken for the spread of numbers that hardly vary."""
_LEAST_SPREAD, _LEAST_SHARE = 1e-4, 0.01
"""Smallest spread, that of a probability to a hundredth, or the share of the largest one where all are small: numbers
that hardly vary in the samples looked at, as those of a class that is not in them, would count for all."""


@contextmanager
def tap(model: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Collect, within the block, values that modules returned when they were last called, by path; tensors only."""
    values: dict[str, Tensor] = {}

    def keep(path: str, module: nn.Module, given: Any, value: Any) -> None:
        if isinstance(value, Tensor):
            values.pop(path, None)  # so that the order is that of the last calls
            values[path] = value

    with ExitStack() as hooks:
        for path in paths:
            hooks.enter_context(model.get_submodule(path).register_forward_hook(functools.partial(keep, path)))
        yield values


@torch.no_grad()
def output_targets(teacher: LoadedModel, batch: Batch) -> tuple[Target, ...]:
    """Describe how each output of floating-point numbers is compared, but for single numbers.

    Classes are what labels number, or what is called logits or scores; everything else is numbers.

    Raises:
        ModelError: there is none.
    """
    names = [spec.name for spec in teacher.signature.outputs]
    values, labels = teacher.module(*batch.inputs.values()), assign_labels(batch.labels, names, batch.labeled)
    targets = [
        _describe(name, _kind(name, value.float(), labels.get(name)), value.float())
        for name, value in zip(names, values, strict=True)
        if value.is_floating_point() and value.numel() and value.ndim
    ]
    if not targets:
        raise ModelError(
            "no output of the model has floating-point numbers for each sample: "
            + ", ".join(map(str, teacher.signature.outputs)),
            "have it return what its answer is made of, logits for instance; or recover by a loss of your own",
        )
    return tuple(targets)


def _kind(name: str, value: Tensor, labels: Tensor | None) -> Any:
    numbered = (
        labels is not None
        and not labels.is_floating_point()
        and _find_class_axis(value, labels) == value.ndim - 1
        and bool((labels < value.shape[-1]).all())
    )
    if value.ndim < 2 or value.shape[-1] < 2 or not (numbered or _LOGITS.search(name)):
        return "values"
    return "probabilities" if _are_probabilities(value) else "classes"


def _are_probabilities(value: Tensor) -> bool:
    """Tell whether numbers along the last axis are at least 0 and have the sum 1."""
    sums = value.sum(-1)
    return bool(value.min() >= 0) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)


def _describe(name: str, kind: Any, value: Tensor) -> Target:
    """Describe an output; one of unlike numbers has a scale for each index of the axis in which they differ most."""
    target = Target(name=name, kind=kind, scale=_scale(value))
    if kind != "values":
        return target
    candidates: list[tuple[float, int, list[float]]] = []
    for axis in range(1, value.ndim):
        if 1 < value.shape[axis] <= _MOST_UNLIKE:
            rows = value.masked_fill(~value.isfinite(), math.nan).movedim(axis, 0).flatten(1)
            deviation = (rows - rows.nanmean(1, keepdim=True)).square().nanmean(1)
            spread = torch.maximum(deviation, _CONSTANT * rows.square().nanmean(1))
            spread = spread.nan_to_num(float(spread.nan_to_num(0.0).max()))  # of an index that is always masked
            least = min(_LEAST_SPREAD, _LEAST_SHARE * float(spread.max()))
            spread = spread.clamp_min(max(least, _LEAST_SCALE))
            candidates.append((float(spread.max() / spread.min()), axis, spread.tolist()))
    ratio, place, scales = max(candidates, default=(0.0, 0, []))
    return target if ratio < _UNLIKE else target.model_copy(update={"axis": place, "scales": tuple(scales)})


def _scale(value: Tensor) -> float:
    finite = value[value.isfinite()].float()
    return max(float(finite.var(correction=0)), _LEAST_SCALE) if len(finite) else 1.0


@torch.no_grad()
def feature_targets(student: LoadedModel, teacher: LoadedModel, batch: Batch) -> tuple[Target, ...]:
    """Choose ends of stages: of the values with a shape in common, the last of each shape; of one shape only, some.

    Where channels were pruned and the rest of an image's shape is as it was, maps are compared.
    """
    theirs, ours = (_capture_outputs(model, batch) for model in (teacher, student))
    blocks = _blocks(teacher.module.model)
    usable = {path: kind for path in theirs if path in ours and (kind := _comparable(ours[path], theirs[path]))}
    chosen = {path: kind for path, kind in usable.items() if path in blocks} or usable
    stages = group_values((tuple(theirs[path].shape), path) for path in chosen)
    ends = [paths[-1] for paths in stages.values()][-_MOST:]
    if len(stages) == 1:
        (alike,) = stages.values()
        ends = [alike[len(alike) * (index + 1) // _MOST - 1] for index in range(_MOST)] if len(alike) > _MOST else alike
    return tuple(Target(name=path, kind=chosen[path], scale=_scale(theirs[path])) for path in ends)


def _capture_outputs(model: LoadedModel, batch: Batch) -> Mapping[str, Tensor]:
    with tap(model.module.model, [path for path, _ in model.module.model.named_modules() if path]) as values:
        model.module(*batch.inputs.values())
    return values


def _blocks(model: nn.Module) -> set[str]:
    """List paths of modules that stand in sequences and are made of parts themselves."""
    return {
        f"{path}.{name}" if path else name
        for path, sequence in model.named_modules()
        if isinstance(sequence, nn.Sequential | nn.ModuleList)
        for name, part in sequence.named_children()
        if next(part.children(), None) is not None
    }


def _comparable(ours: Tensor, theirs: Tensor) -> Any:
    """Choose the kind of a target inside of the models; None where the two values cannot be compared."""
    if not (ours.is_floating_point() and theirs.is_floating_point()) or theirs.ndim < 3 or not theirs.numel():
        return None
    if ours.shape == theirs.shape:
        return "values"
    spatial = theirs.ndim == 4 and ours.ndim == 4 and theirs[0, 0].numel() > 1
    return "maps" if spatial and ours.shape[2:] == theirs.shape[2:] else None


Binary = Literal["logits", "probabilities"]
"""Form of the answers to labels of 0 and 1."""
Loss = Callable[[NamedForward, NamedForward, Batch], Tensor]
"""``(student, teacher, batch)`` → a scalar, the mean over the samples of the batch."""


@dataclass(frozen=True)
class Distil:
    """The student's outputs, and values inside of it, against the teacher's."""

    outputs: Sequence[Target]
    features: Sequence[Target]
    names: Sequence[str]
    temperature: float

    def __call__(self, student: NamedForward, teacher: NamedForward, batch: Batch) -> Tensor:
        paths = [target.name for target in self.features]
        with torch.no_grad(), tap(teacher.model, paths) as inside:
            theirs = teacher(*batch.inputs.values())
        with tap(student.model, paths) as own:
            ours = student(*batch.inputs.values())
        outputs = [(target, self.names.index(target.name)) for target in self.outputs]
        total = torch.stack([self._compare(target, ours[index], theirs[index]) for target, index in outputs]).sum()
        if self.features:
            pairs = ((target, own[target.name], inside[target.name]) for target in self.features)
            total = total + torch.stack([self._compare(*pair) for pair in pairs]).mean()
        return total

    def _compare(self, target: Target, ours: Tensor, theirs: Tensor) -> Tensor:
        ours, theirs = ours.float(), theirs.float()
        if target.kind == "maps":
            return (_map(ours) - _map(theirs)).square().sum(1).mean()
        masked = (ours == theirs) & ~theirs.isfinite()  # the same infinity: there is nothing to learn there
        filler = 0.0 if target.kind == "values" else _MASKED
        ours, theirs = (value.masked_fill(masked, filler) for value in (ours, theirs))
        if target.kind == "values":
            errors = (ours - theirs).square()
            if target.axis is None:
                errors = errors / target.scale
            else:
                errors = errors.movedim(target.axis, -1) / errors.new_tensor(target.scales)
            return errors.sum() / (~masked).sum().clamp_min(1)
        if target.kind == "probabilities":
            ours, theirs = (value.clamp_min(_LEAST_PROBABILITY).log() for value in (ours, theirs))
        heat, classes = self.temperature, ours.shape[-1]
        log_ours, log_theirs = (F.log_softmax(value.reshape(-1, classes) / heat, dim=1) for value in (ours, theirs))
        return heat**2 * F.kl_div(log_ours, log_theirs, reduction="batchmean", log_target=True)


def _map(value: Tensor) -> Tensor:
    """Compute attention maps: the sum of squares over channels (axis 1), of length 1 for each sample."""
    return F.normalize(value.square().sum(1).flatten(1), dim=1)


@dataclass(frozen=True)
class Supervised:
    """Outputs against their labels: the sum of their losses, as :func:`compare_with_labels` computes them."""

    names: Sequence[str]
    """The model's outputs."""
    binary: frozenset[str] = frozenset()
    """Outputs whose labels are 0 or 1 in all samples."""
    _forms: dict[str, Binary] = field(default_factory=dict)

    def __call__(self, student: NamedForward, teacher: NamedForward, batch: Batch) -> Tensor:
        """Compute the loss.

        Raises:
            DataError: there are no labels, or they do not fit their output.
        """
        labels, total = assign_labels(batch.labels, self.names, batch.labeled), []
        if not labels:
            raise DataError(
                "supervised recovery needs labels, and the data has none",
                "add an array named labels, or one for an output with the output's name, and name it with --labels; "
                "or recover by distil, which needs none",
            )
        if not self._forms:
            with torch.no_grad():
                answers = zip(self.names, teacher(*batch.inputs.values()), strict=True)
                self._forms.update({name: find_form(value) for name, value in answers})
        outputs = dict(zip(self.names, student(*batch.inputs.values()), strict=True))
        for name, wanted in labels.items():
            loss = compare_with_labels(outputs[name], wanted, self._forms[name] if name in self.binary else None)
            if loss is None:
                raise DataError(
                    f"labels of {_form(wanted)} do not fit the output {name!r} of {_form(outputs[name])}",
                    "give one class for each sample, a whole number, or numbers in the shape of the output; else a "
                    "loss of your own: module:function",
                )
            total.append(loss)
        return torch.stack(total).sum()


def find_form(answers: Tensor | Array) -> Binary:
    """Find the form of answers to labels of 0 and 1."""
    return "probabilities" if bool(((answers >= 0) & (answers <= 1)).all()) else "logits"


def are_binary(labels: Array) -> bool:
    """Tell whether labels are 0 or 1 where they count, as whole numbers."""
    if labels.dtype.kind not in "biu":
        return False
    counted = labels[(labels >= 0) & ~np.isin(labels, _UNLABELED)]
    return bool(counted.size and counted.max() <= 1)


def _find_class_axis(output: Tensor, labels: Tensor) -> int | None:
    """Find the axis with a number for each class: the one that labels of classes lack.

    Where an image's sides, or a text's length, are as many as the classes, they are the second axis of an image's,
    [samples, classes, height, width], and the last one otherwise, [samples, tokens, classes].
    """
    second, last = 1, output.ndim - 1
    for axis in (second, last) if output.ndim > _TOKENS_NDIM else (last, second):
        if 0 < axis < output.ndim and labels.shape == (*output.shape[:axis], *output.shape[axis + 1 :]):
            return axis
    return None


def compare_with_labels(output: Tensor, labels: Tensor, binary: Binary | None = None) -> Tensor | None:
    """Compute the cross entropy where labels are classes, and the mean squared error where they are numbers.

    Numbers are in the shape of the output, but for axes of length 1; ``binary``: they are 0 or 1, and their cross
    entropy is computed from logits or probabilities. None where the labels fit neither.

    Raises:
        DataError: labels are numbers of classes that the output does not have.
    """
    if not output.is_floating_point():
        return None
    output = output.float()
    if output.squeeze().shape == labels.squeeze().shape:
        wanted = labels.reshape(output.shape)
        return _compute_binary(output, wanted, binary) if binary else F.mse_loss(output, wanted.float())
    axis = None if labels.is_floating_point() else _find_class_axis(output, labels)
    return None if axis is None else _compute_cross_entropy(output.movedim(axis, -1), labels.long())


def _compute_binary(output: Tensor, labels: Tensor, form: Binary) -> Tensor:
    """Compute the mean cross entropy of what is there or not, where labels are 0 or 1."""
    counted = (labels == 0) | (labels == 1)
    given, wanted = output[counted], labels[counted].float()
    if form == "probabilities":
        given = given.clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY).logit()
    return F.binary_cross_entropy_with_logits(given, wanted, reduction="sum") / max(1, len(wanted))


def _compute_cross_entropy(values: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross entropy of logits or probabilities, whose last axis has the classes."""
    classes = values.shape[-1]
    if labels.ndim > 1 and classes <= _UNLABELED[1]:  # a class for each place
        labels = labels.masked_fill(labels == _UNLABELED[1], _UNLABELED[0])
    given = labels[labels != _UNLABELED[0]]
    if len(given) and not 0 <= int(given.min()) <= int(given.max()) < classes:
        raise DataError(
            f"labels are from {given.min()} to {given.max()}, and the model has {classes} classes",
            f"number the classes from 0 to {classes - 1}",
        )
    if _are_probabilities(values):
        values = values.clamp_min(_LEAST_PROBABILITY).log()
        return F.nll_loss(values.movedim(-1, 1), labels, ignore_index=_UNLABELED[0])
    return F.cross_entropy(values.movedim(-1, 1), labels, ignore_index=_UNLABELED[0])


def _form(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} and shape {list(value.shape)}"


def call_user_loss(
    reference: str, function: Callable[..., Any], student: NamedForward, teacher: NamedForward, batch: Batch
) -> Tensor:
    """Call a function of the user's, ``(student, teacher, batch)`` with both modules, and arrays by name → a scalar."""
    values = {**batch.inputs, **({} if batch.labels is None else {"labels": batch.labels})}
    try:
        loss = function(student.model, teacher.model, values)
    except Exception as error:
        if ran_out(error):
            raise
        raise DataError(
            f"the loss {reference} raised {type(error).__name__}: {error}",
            f"it was given two modules and a batch of {', '.join(values)}",
        ) from error
    free = torch.is_grad_enabled() and not getattr(loss, "requires_grad", False)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or free:
        raise DataError(
            f"the loss {reference} returned {_described(loss)}",
            "return one number as a tensor that depends on the student's weights",
        )
    return loss.reshape(())


def user_loss(reference: str) -> Loss:
    """Load the loss that ``module:function`` or ``file.py:function`` names; that code runs, as the user asked for it.

    Raises:
        DataError: it is not there, or no function.
    """
    function = user_code.find(reference, "loss")
    if not callable(function):
        raise DataError(f"the loss {reference} is no function", "give it as module:function or file.py:function")
    return functools.partial(call_user_loss, reference, function)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        free = "" if value.requires_grad else " that depends on no weight"
        return f"a tensor of shape {list(value.shape)}{free}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
