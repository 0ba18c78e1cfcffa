"""Which dimensions of a model may vary, and which output dimension follows which input: found out by running it."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.tensors import DTYPES, Signature, TensorSpec

_LONG = 16
"""From this size on a shorter one is tried first, as it runs faster."""

Forward = Callable[..., tuple[Tensor, ...]]
Shapes = list[tuple[int, ...]]


def default_specs(example: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Without a word from the user the first dimension is the batch, if all inputs agree on it."""
    ranks = [value.ndim for value in example.values()]
    batched = all(ranks) and len({value.shape[0] for value in example.values()}) == 1
    return tuple(
        TensorSpec(
            name=name,
            dtype=dtype_name(value),
            shape=("batch", *value.shape[1:]) if batched else tuple(value.shape),
        )
        for name, value in example.items()
    )


def sizes_of(specs: tuple[TensorSpec, ...], example: Mapping[str, Tensor]) -> dict[str, int]:
    """The size of each dynamic dimension in these tensors."""
    return {
        dim: size
        for spec in specs
        for dim, size in zip(spec.shape, example[spec.name].shape, strict=True)
        if isinstance(dim, str)
    }


def dtype_name(tensor: Tensor) -> str:
    """numpy's name of a tensor's dtype.

    Raises:
        SourceError: numpy has none.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SourceError(f"a tensor of dtype {name} cannot cross the boundary", "cast it to float32 inside the model")
    return name


def infer_dims(
    module: Forward,
    specs: tuple[TensorSpec, ...],
    example: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    asked: bool,
) -> tuple[Signature, list[str]]:
    """The signature, found by running again with each dynamic dimension changed; and notes on what was found.

    ``outputs`` are those for ``example``. A batch that nobody asked for (``asked`` is false), and that the model does
    not allow to vary, becomes fixed, with a note.

    Raises:
        SourceError: a dimension that was asked to be dynamic cannot vary.
    """
    dims: dict[str, list[int | str]] = {name: list(value.shape) for name, value in outputs.items()}
    notes: list[str] = []
    for symbol, size in sizes_of(specs, example).items():
        other, shapes = _changed(module, specs, example, symbol, size)
        if shapes is not None:
            if [len(shape) for shape in shapes] != [value.ndim for value in outputs.values()]:
                raise SourceError(
                    f"the outputs have other ranks at {symbol} = {other} than at {symbol} = {size}",
                    f"squeeze() drops every dimension of size 1: name the one, or give an example with {symbol} = 2",
                )
            for (name, value), changed in zip(outputs.items(), shapes, strict=True):
                _mark(dims[name], name, tuple(value.shape), changed, {(size, other): symbol})
        elif asked:
            raise SourceError(
                f"the model runs with {symbol} = {size}, and with no other size that was tried",
                f"write the number {size} instead of {symbol!r} in --input, or fix the model",
            )
        else:
            specs = tuple(_fixed(spec, symbol, size) for spec in specs)
            notes.append(f"the model runs with a batch of {size} only, so the dimension is fixed")
    found = tuple(
        TensorSpec(name=name, dtype=dtype_name(value), shape=tuple(dims[name])) for name, value in outputs.items()
    )
    return Signature(inputs=specs, outputs=found), notes


def _mark(
    dims: list[int | str],
    name: str,
    before: tuple[int, ...],
    after: tuple[int, ...],
    follows: Mapping[tuple[int, int], str],
) -> None:
    for axis, change in enumerate(zip(before, after, strict=True)):
        if change[0] != change[1]:
            dims[axis] = follows.get(change, f"{name}_dim_{axis}")


def _changed(
    module: Forward, specs: tuple[TensorSpec, ...], example: Mapping[str, Tensor], symbol: str, size: int
) -> tuple[int, Shapes | None]:
    """Another size that the model runs with, and the shapes it gives; None where there is none."""
    for other in (size + 1, max(1, size // 2), size * 2) if size < _LONG else (size // 2, size + 1, size * 2):
        feeds = {spec.name: _resized(example[spec.name], spec, symbol, other) for spec in specs}
        if other != size and (shapes := _shapes(module, feeds)) is not None:
            return other, shapes
    return size, None


def _resized(value: Tensor, spec: TensorSpec, symbol: str, size: int) -> Tensor:
    for axis, dim in enumerate(spec.shape):
        if dim == symbol:
            value = value.index_select(axis, torch.arange(size) % value.shape[axis])
    return value


def _shapes(module: Forward, feeds: Mapping[str, Tensor]) -> Shapes | None:
    try:
        with torch.inference_mode():
            return [tuple(value.shape) for value in module(*feeds.values())]
    except (RuntimeError, ValueError, IndexError, AssertionError, TypeError):
        return None


def _fixed(spec: TensorSpec, symbol: str, size: int) -> TensorSpec:
    return spec.model_copy(update={"shape": tuple(size if dim == symbol else dim for dim in spec.shape)})
