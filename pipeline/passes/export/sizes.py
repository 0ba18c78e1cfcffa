"""Find sizes at which a captured program answers otherwise than its module.

``torch.export`` keeps the path through the code that the example's sizes took. What it took for granted about them is
in the program's guards: ``if length % 4 == 0`` holds at the example's length, and is dropped.
"""

import functools
import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import TYPE_CHECKING

from enginesmith.pipeline.passes.export.agreement import Fault, find_fault, to_array
from enginesmith.pipeline.tensors import BATCH, Array, Feeds, is_sum

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from enginesmith.pipeline.frameworks.torch.module import LoadedModel

COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
"""Functions that are left of decisions in a program's graph."""
_LARGEST_TRIED = 64
"""Sizes of a dimension that are tried at least up to here."""
_TRIALS = 3
"""Sizes of a dimension at which a guard is broken, and module and program are compared."""
_MOST_GROWTH, _MOST_ELEMENTS = 200, 1 << 24
"""Factor of the example's size up to which one more size is tried, and the most numbers in all inputs there."""
_SIZE = re.compile(r"L\['\w+'\](?:\[(\d+)\])?\.size\(\)\[(\d+)\]")


@dataclass(frozen=True)
class SizeLimit:
    """Hold a condition on sizes that a program takes for granted, with a size at which it is wrong or fails."""

    words: str
    sizes: Mapping[str, int]
    """Sizes at which it is wrong or fails."""
    fixed: tuple[str, ...] = ()
    """Dynamic dimensions of which the program takes about the example's size alone."""


def find_size_limit(program: "ExportedProgram", loaded: "LoadedModel") -> SizeLimit | None:
    """Find a size at which the program answers otherwise than its module, or fails; None where there is none.

    Where a dimension is fixed, others that are fixed, too, are named with it.
    """
    names = [spec.shape for spec in loaded.signature.inputs]

    def name(size: re.Match[str]) -> str:
        return f"({dim})" if is_sum(dim := names[int(size[1] or 0)][int(size[2])]) else str(dim)

    guards = [_SIZE.sub(name, guard) for guard in program._guards_code]
    first: SizeLimit | None = None
    for symbol in loaded.dynamic_sizes:
        limit = _find_limit_along(program, loaded, guards, symbol)
        if limit and first is None:
            if not limit.fixed:
                return limit
            first = limit
        elif limit and first:
            first = replace(first, fixed=(*first.fixed, *limit.fixed))
    return first


def _find_limit_along(
    program: "ExportedProgram", loaded: "LoadedModel", guards: Sequence[str], symbol: str
) -> SizeLimit | None:
    """Find a size of one dimension at which the program is wrong or fails."""
    example = loaded.dynamic_sizes
    for size, broken in _list_trials(guards, loaded, symbol):
        sizes = {**example, symbol: size}
        fault = find_program_fault(program, loaded, sizes)
        fixed = (symbol,) if fault and _fixes(broken, example, symbol) else ()
        if fault == "wrong":
            words = f"right only where {broken}: with {symbol} = {size}, the module answers otherwise"
            return SizeLimit(words, sizes, fixed)
        if fault:
            fails = f"captured where {broken}: with {symbol} = {size}, PyTorch's own program fails"
            others = "other sizes than those of --shape and --batch, which are compared, may be wrong"
            return SizeLimit(fails if fixed else f"{fails}, so {others}", sizes, fixed)
    return None


def find_program_fault(program: "ExportedProgram", loaded: "LoadedModel", sizes: Mapping[str, int]) -> Fault:
    """Find out whether program and module answer differently at these sizes, or the program alone cannot answer."""
    from enginesmith.pipeline.frameworks.torch.dims import resize_example

    feeds = resize_example(loaded.signature.inputs, loaded.example, sizes)

    def run(_: Feeds) -> list[Array]:
        return [to_array(value) for value in program.module(check_guards=False)(*feeds.values())]

    return find_fault(loaded, feeds, run, loaded.signature.unordered)


def list_neighbors(loaded: "LoadedModel") -> dict[str, int]:
    """List sizes beside the example's, one less of each dimension but the batch: no multiples of what those are."""
    return {word: size - (word != BATCH and size > 1) for word, size in loaded.dynamic_sizes.items()}


def _list_trials(guards: Sequence[str], loaded: "LoadedModel", symbol: str) -> Iterator[tuple[int, str]]:
    """List sizes of a dimension at which a guard breaks, the nearest first, each with the first guard that does.

    One that is much larger is the last, if a guard breaks there that breaks at none of the others: of ``split(128)``.
    """
    example, specs = loaded.dynamic_sizes, loaded.signature.inputs
    given = example[symbol]

    def list_broken(guards: Iterable[str], size: int) -> list[str]:
        return [guard for guard in guards if not _holds(guard, {**example, symbol: size})]

    nearest = sorted(range(1, max(_LARGEST_TRIED, 2 * given) + 1), key=lambda size: abs(size - given))
    broken = {size: guards_there for size in nearest if (guards_there := list_broken(guards, size))}
    yield from ((size, first) for size, (first, *_) in itertools.islice(broken.items(), _TRIALS))
    others = set(guards).difference(*broken.values())
    for size in range(len(nearest) + 1, _MOST_GROWTH * given + 1):
        if guards_there := list_broken(others, size):
            if sum(math.prod(spec.resolve({**example, symbol: size})) for spec in specs) <= _MOST_ELEMENTS:
                yield size, guards_there[0]
            return


def _fixes(guard: str, example: Mapping[str, int], symbol: str) -> bool:
    """Tell whether a guard breaks at each size that is half of the example's or less, or twice as large or more.

    So does ``1 + length // 4 == 9``; ``length % 4 == 0`` holds at many, and ``length > 4`` at all that are larger.
    """
    size = example[symbol]
    others = (*range(1, size // 2 + 1), *range(2 * size, 4 * size + 1))
    return not any(_holds(guard, {**example, symbol: other}) for other in others)


def _holds(guard: str, sizes: Mapping[str, int]) -> bool:
    """Evaluate a guard; one that uses anything but numbers and functions of them holds."""
    try:
        return bool(eval(_compile(guard), {"__builtins__": {}, "math": math}, dict(sizes)))
    except Exception:  # noqa: BLE001 (it is code of torch's, in a form of its own)
        return True


@functools.cache
def _compile(guard: str) -> CodeType:
    return compile(guard, "<guard>", "eval")
