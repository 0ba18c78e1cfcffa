"""Example inputs of a module: the source's, brought into the order of its inputs, or drawn where nobody gives any."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from enginesmith.pipeline.errors import SignatureError, SourceError
from enginesmith.pipeline.frameworks.torch import factories, hugging_face_inputs
from enginesmith.pipeline.frameworks.torch.dims import resize_example
from enginesmith.pipeline.tensors import BATCH, TensorSpec, is_sum, read_sizes

_ROWS, _SIZE = 2, 8
"""Sizes of inputs that are drawn: along the batch, and along other dynamic dimensions whose size is not known."""


def make_example(
    built: factories.Built, inputs: Sequence[TensorSpec], usual: Mapping[str, int]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Bring the factory's example inputs in the order of the specifications; without any they are drawn.

    ``inputs`` are those of ``--input``, if there are any; ``usual`` are sizes of dynamic dimensions to draw with.
    Returns also the size that was chosen for each dynamic dimension of those that are drawn.

    Raises:
        SourceError: there are neither, or one is no tensor.
        SignatureError: they are called otherwise than ``--input`` says.
    """
    specs = tuple(inputs) or built.inputs
    names = tuple(spec.name for spec in specs)
    if built.example is None:
        if not names and built.takes:
            raise hugging_face_inputs.explain_unknown(built.module)
        if not names:
            remedy = "return (module, example_inputs) from it, or add --input name:dtype:batch,3,224,224"
            raise SourceError("the factory gives no example inputs", remedy)
    if built.takes and not set(names) <= set(built.takes):
        raise hugging_face_inputs.explain_refused(built.module, names)
    if built.example is None or (names and built.takes):
        return _make_up(built, specs, usual)
    example = name_inputs(built, names)
    if names and set(names) != set(example):
        message = f"--input names {', '.join(names)}, and the example inputs are {', '.join(example)}"
        raise SignatureError(message, "use the same names")
    for name, value in example.items():
        example[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if not isinstance(example[name], Tensor):
            raise SourceError(
                f"the example input {name!r} is a {type(value).__name__}, not a tensor",
                "wrap the model so that its inputs are tensors, and fix the rest inside the wrapper; "
                "arguments that forward names may be True, False, None, numbers or words",
            )
    return {name: example[name] for name in names or example}, {}


def _make_up(
    built: factories.Built, specs: Sequence[TensorSpec], usual: Mapping[str, int]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Fit the values that the library's configuration led to into the specifications, and draw the other inputs."""
    values: dict[str, Tensor] = built.example or {}
    alike = [spec for spec in specs if spec.name in values and values[spec.name].ndim == len(spec.shape)]
    known = read_sizes((spec for spec in alike if not any(map(is_sum, spec.shape))), values)
    known |= {word: usual[word] for word in known if word in usual and word != BATCH}
    sizes = _choose_sizes(specs, usual) | known
    fitted = {spec.name: value for spec in alike if (value := _fit(values[spec.name], spec, sizes)) is not None}
    by_library = bool(built.takes)
    example = {spec.name: fitted.get(spec.name, _draw(spec, sizes, by_library=by_library)) for spec in specs}
    words = (word for spec in specs if spec.name not in fitted for word in spec.symbols)
    return example, {word: sizes[word] for word in words if word not in known}


def describe_made_up(
    built: factories.Built, specs: Sequence[TensorSpec], example: Mapping[str, Tensor], drawn: Mapping[str, int]
) -> tuple[str, str]:
    """Name inputs that were made up, and what to do where the model does not take them.

    ``drawn`` are the sizes that nobody gave.
    """
    arrays = (f"{spec.name} {spec.dtype}{list(example[spec.name].shape)}" for spec in specs)
    remedies = []
    if options := " ".join(f"--shape {dim}=MIN:OPT:MAX" for dim in drawn if dim != BATCH):
        remedies.append(f"inputs are drawn with the usual size, OPT, of {options}: give one that it takes")
    if built.takes:
        flags = " ".join(f"--input {spec}" for spec in specs)
        others = ", ".join(name for name in built.usual if name not in example)
        more = f", and it may need more of {others}" if others else ""
        remedies.append(f"describe other ones with --input, for all inputs; these are {flags}{more}")
    remedies.append("return (module, example_inputs) from a factory in a file.py")
    return f"inputs that enginesmith made up ({', '.join(arrays)})", "; or ".join(remedies)


def note_guessed(drawn: Mapping[str, int], usual: Mapping[str, int]) -> Iterator[str]:
    """Note the sizes that inputs were drawn with and that nobody gave."""
    for dim, size in drawn.items():
        if dim != BATCH and dim not in usual:
            yield f"inputs were drawn with {dim} = {size}: --shape {dim}=MIN:OPT:MAX gives the size that is usual, OPT"


def name_inputs(built: factories.Built, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the example by input name, whatever form the factory gave it in."""
    value = built.example
    if isinstance(value, Mapping):
        return dict(value)
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(values) == len(names):
        return dict(zip(names, values, strict=True))
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = inspect.signature(built.module.forward).parameters
    parameters = [name for name, value in given.items() if value.kind in kinds]
    if len(values) > len(parameters):
        parameters = [f"input_{index}" for index in range(len(values))]  # names of inputs that have none
    return dict(zip(parameters, values, strict=False))


def _choose_sizes(specs: Sequence[TensorSpec], usual: Mapping[str, int]) -> dict[str, int]:
    """Choose two rows, where a word is the batch or leads an input, and ``usual`` sizes, else eight, for others.

    The batch has two rows whatever is usual: one row does not show what becomes of others, and many take long.
    """
    leading = {BATCH, *(spec.shape[0] for spec in specs if spec.shape)}
    sizes = {word: _ROWS if word in leading else _SIZE for spec in specs for word in spec.symbols}
    return {word: size if word == BATCH else usual.get(word, size) for word, size in sizes.items()}


def _fit(value: Tensor, spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor | None:
    """Cut or repeat an array of as many dimensions as an input has, and cast it; None if other numbers come out."""
    resized = resize_example([spec], {spec.name: value}, sizes)[spec.name]
    cast = resized.to(getattr(torch, spec.dtype))
    rounded = cast.is_floating_point() and value.is_floating_point()
    return cast if rounded or torch.equal(cast.to(value.dtype), resized) else None


def _draw(spec: TensorSpec, sizes: Mapping[str, int], *, by_library: bool) -> Tensor:
    """Draw a feed of these sizes: normal floats, else zeros and ones; positions in order; masks that hide nothing.

    Ones do so in whole numbers; in bools and floats, only by the convention of the library that has such models.
    Lengths are 1, which no model refuses, as it may 0.
    """
    generator, shape = torch.Generator().manual_seed(0), spec.resolve(sizes)
    dtype = getattr(torch, spec.dtype)
    whole = not dtype.is_floating_point and dtype is not torch.bool
    if spec.is_length or (spec.name.endswith("mask") and (whole or by_library)):
        return torch.ones(shape, dtype=dtype)
    if spec.name.endswith("position_ids") and whole and shape:
        return torch.arange(shape[-1]).expand(shape).to(dtype).contiguous()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
