"""Compare what an export made with its module, as verification does, at other sizes and values than the example's.

Tracing keeps what was a Python number, and the path through the code that the example took.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.fidelity import Thresholds, compare
from enginesmith.pipeline.frameworks.onnx import evaluator, model_file
from enginesmith.pipeline.frameworks.rounding import FINE, round_otherwise
from enginesmith.pipeline.tensors import BATCH, Array, Feeds

if TYPE_CHECKING:
    from torch import Tensor

    from enginesmith.pipeline.frameworks.torch.module import LoadedModel

Fault = Literal["", "wrong", "fails"]
Unordered = Mapping[str, Literal["rows", "positions"]]
FAILURES = (RuntimeError, ValueError, LookupError, AssertionError, TypeError)
"""Errors that a program raises for sizes that it was not captured for."""
_THRESHOLDS = Thresholds(min_sqnr_db=60, max_error_of_range=1e-3)
"""Another path through the code, or a size that was kept by mistake, is off by far more."""
_SHORT = 16
"""Length up to which one of several times as much is tried, too: all that are near may lie within one block."""


def find_fault(
    loaded: "LoadedModel",
    feeds: "Mapping[str, Tensor]",
    answer: Callable[[Feeds], Sequence[Array]],
    unordered: Unordered,
) -> Fault:
    """Find out whether ``answer`` differs from the module's, or fails, at feeds that the module takes.

    A difference counts for nothing where the module differs as much from itself once its operations are rounded
    otherwise, as with boxes of equal scores, of which the first ones are kept. ``unordered`` are the outputs that are
    compared as sets of rows.
    """
    import torch

    arrays = {name: to_array(value) for name, value in feeds.items()}
    with torch.inference_mode():
        try:
            expected = _name_outputs(loaded, loaded.module(*feeds.values()))
        except Exception:  # noqa: BLE001 - the module's own class, say: these feeds are not for it
            return ""
        try:
            values = answer(arrays)
        except (*FAILURES, ModelError):
            return "fails"
    actual = dict(zip(expected, values, strict=True))
    if _agree(loaded, expected, actual, unordered):
        return ""
    others = round_otherwise(functools.partial(_perturb, loaded), arrays, FINE)
    is_steady = all(_agree(loaded, expected, other, unordered) for other in others if other)
    return "wrong" if is_steady else ""


def _name_outputs(loaded: "LoadedModel", values: "Sequence[Tensor]") -> dict[str, Array]:
    return {spec.name: to_array(value) for spec, value in zip(loaded.signature.outputs, values, strict=True)}


def to_array(value: "Tensor") -> Array:
    """Copy a tensor of any device as numbers that numpy has: bfloat16 becomes float32."""
    import torch

    return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()


def _agree(loaded: "LoadedModel", expected: Feeds, actual: Feeds, unordered: Unordered) -> bool:
    signature = loaded.signature.model_copy(update={"unordered": dict(unordered)})
    try:
        return compare(expected, actual, _THRESHOLDS, signature).passed
    except ModelError:  # another shape
        return False


def _perturb(loaded: "LoadedModel", feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
    import torch

    from enginesmith.pipeline.frameworks.torch.rounding import answer_perturbed

    with torch.inference_mode():
        inputs = [torch.from_numpy(value).to(loaded.example[name]) for name, value in feeds.items()]
        return _name_outputs(loaded, answer) if (answer := answer_perturbed(loaded.module, inputs, step, seed)) else {}


def find_trace_fault(path: Path, loaded: "LoadedModel") -> Literal["", "example", "sizes", "values"]:
    """Find out at which feeds a traced file differs from its module, by running both.

    They are the example; other sizes, one more along each dynamic dimension, twice as many, and half, as one more step
    may make no more blocks of them, and four times as many of short ones; and other values that send branches the other
    way: negative, large, zero.

    Raises:
        MissingCapability: ONNX Runtime is not installed.
    """
    differs = functools.partial(_differs, path, loaded)
    if differs(loaded.example):
        return "example"
    if any(differs_at(path, loaded, sizes) for sizes in _list_other_sizes(loaded.dynamic_sizes)):
        return "sizes"
    for factor in (-1.0, 8.0, 0.0):
        feeds = {name: value * factor if value.is_floating_point() else value for name, value in loaded.example.items()}
        if differs(feeds):
            return "values"
    return ""


def find_fixed_sizes(path: Path, loaded: "LoadedModel") -> dict[str, int]:
    """Find the dynamic dimensions along which, changed alone, a trace differs; with their sizes in the example."""
    example = loaded.dynamic_sizes
    trials = [(name, {**example, name: sizes[name]}) for sizes in _list_other_sizes(example) for name in example]
    return {name: example[name] for name, sizes in trials if differs_at(path, loaded, sizes)}


def differs_at(path: Path, loaded: "LoadedModel", sizes: Mapping[str, int]) -> bool:
    """Tell whether a file answers otherwise than its module at these sizes, or cannot answer.

    Raises:
        MissingCapability: ONNX Runtime is not installed.
    """
    return _differs(path, loaded, loaded.resize(sizes))


def _differs(path: Path, loaded: "LoadedModel", feeds: "Mapping[str, Tensor]") -> bool:
    answer = functools.partial(evaluator.run_graph, path)
    return bool(find_fault(loaded, feeds, answer, model_file.signature(path).unordered))


def _list_other_sizes(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    changes: list[Callable[[int], int]] = [lambda size: size + 1, lambda size: 2 * size, lambda size: (size + 1) // 2]
    others = [{symbol: change(size) for symbol, size in sizes.items()} for change in changes]
    short = [symbol for symbol, size in sizes.items() if symbol != BATCH and size <= _SHORT]
    longer = [{**sizes, **{symbol: 4 * sizes[symbol] + more for symbol in short}} for more in (1, 0)] if short else []
    return others + longer


def runs(loaded: "LoadedModel", sizes: Mapping[str, int]) -> bool:
    """Tell whether the module runs on the example at other sizes."""
    import torch

    with contextlib.suppress(Exception), torch.inference_mode():  # whatever it raises, it does not take such sizes
        loaded.module(*loaded.resize(sizes).values())
        return True
    return False


def find_other_sizes(loaded: "LoadedModel") -> dict[str, int] | None:
    """Find sizes at which the module runs, other ones than the example's, so that none has to equal another.

    Each dimension is longer by another number; or all but the batch are several times as long, as where they have to be
    multiples. None where the module runs at neither.
    """
    sizes = loaded.dynamic_sizes
    longer = {name: size + more for more, (name, size) in enumerate(sizes.items(), 1)}
    lengths = [name for name in sizes if name != BATCH]
    multiples = {**longer, **{name: times * sizes[name] for times, name in enumerate(lengths, 2)}}
    candidates = (longer, multiples) if lengths else (longer,)
    return next((other for other in candidates if runs(loaded, other)), None)
