"""Find sizes at which a captured program answers otherwise than its module.

``torch.export`` keeps the path through the code that the example's sizes took. What it took for granted about them is
in the program's guards: ``if length % 4 == 0`` holds at the example's length, and is dropped.
"""

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from enginesmith.pipeline.tensors import is_sum

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from enginesmith.pipeline.frameworks.torch.module import LoadedModel

COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
"""Functions that are left of decisions in a program's graph."""
_LARGEST_TRIED = 64
"""Sizes of a dimension that are tried at least up to here."""
_TRIALS = 3
"""Sizes of a dimension at which a guard is broken, and module and program are compared."""
_TOLERANCE = 1e-3
"""Share of the output's range: another path through the code is off by far more."""
_SIZE = re.compile(r"L\['\w+'\](?:\[(\d+)\])?\.size\(\)\[(\d+)\]")
_FAILURES = (RuntimeError, ValueError, LookupError, AssertionError, TypeError)


@dataclass(frozen=True)
class SizeLimit:
    """Hold a condition on sizes that a program takes for granted, with a size at which it is wrong or fails."""

    words: str
    fixed: str = ""
    """Dynamic dimension of which the program takes about the example's size alone."""


def find_size_limit(program: "ExportedProgram", loaded: "LoadedModel") -> SizeLimit | None:
    """Find a size at which the program answers otherwise than its module, or fails; None where there is none."""
    names = [spec.shape for spec in loaded.signature.inputs]

    def name(size: re.Match[str]) -> str:
        return f"({dim})" if is_sum(dim := names[int(size[1] or 0)][int(size[2])]) else str(dim)

    guards = [_SIZE.sub(name, guard) for guard in program._guards_code]
    example = loaded.dynamic_sizes
    for symbol, given in example.items():
        trials = 0
        for size in sorted(range(1, max(_LARGEST_TRIED, 2 * given) + 1), key=lambda size: abs(size - given)):
            sizes = {**example, symbol: size}
            broken = next((guard for guard in guards if not _holds(guard, sizes)), None)
            if broken is None or trials == _TRIALS:
                continue
            trials += 1
            fault = _find_fault(program, loaded, sizes)
            fixed = symbol if fault and _fixes(broken, example, symbol) else ""
            if fault == "wrong":
                words = f"right only where {broken}: with {symbol} = {size}, the module answers otherwise"
                return SizeLimit(words, fixed)
            if fault:
                fails = f"captured where {broken}: with {symbol} = {size}, PyTorch's own program fails"
                others = "other sizes than those of --shape and --batch, which are compared, may be wrong"
                return SizeLimit(fails if fixed else f"{fails}, so {others}", fixed)
    return None


def _fixes(guard: str, example: Mapping[str, int], symbol: str) -> bool:
    """Tell whether a guard breaks at each size that is half of the example's or less, or twice as large or more.

    So does ``1 + length // 4 == 9``; ``length % 4 == 0`` holds at many, and ``length > 4`` at all that are larger.
    """
    size = example[symbol]
    others = (*range(1, size // 2 + 1), *range(2 * size, 4 * size + 1))
    return not any(_holds(guard, {**example, symbol: other}) for other in others)


def _holds(guard: str, sizes: Mapping[str, int]) -> bool:
    """Evaluate a guard; one that uses anything but numbers holds."""
    try:
        return bool(eval(guard, {"__builtins__": {}}, dict(sizes)))
    except Exception:  # noqa: BLE001 (it is code of torch's, in a form of its own)
        return True


def _find_fault(
    program: "ExportedProgram", loaded: "LoadedModel", sizes: Mapping[str, int]
) -> Literal["", "wrong", "fails"]:
    """Find out whether program and module answer differently, or the program alone cannot answer."""
    import torch

    from enginesmith.pipeline.frameworks.torch.dims import resize_example

    feeds = resize_example(loaded.signature.inputs, loaded.example, sizes).values()
    with torch.inference_mode():
        try:
            expected = [value.numpy() for value in loaded.module(*feeds)]
        except _FAILURES:
            return ""  # such sizes are not for this module
        try:
            answers: Any = program.module(check_guards=False)(*feeds)
        except _FAILURES:
            return "fails"
    differs = any(not _are_close(value.numpy(), wanted) for value, wanted in zip(answers, expected, strict=True))
    return "wrong" if differs else ""


def _are_close(value: Any, wanted: Any) -> bool:
    if value.shape != wanted.shape:
        return False
    scale = float(np.ptp(wanted)) if wanted.size and np.isfinite(wanted).all() and wanted.dtype != bool else 0.0
    return bool(np.allclose(value, wanted, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True))
