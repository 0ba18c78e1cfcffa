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
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING

from enginesmith.pipeline.passes.export.agreement import Fault, find_fault, to_array
from enginesmith.pipeline.tensors import BATCH, Array, Feeds, ShapeRange, is_sum

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
_RIGHT, _CAPTURED = "right only where", "captured where"
_SIZE = re.compile(r"L\['\w+'\](?:\[(\d+)\])?\.size\(\)\[(\d+)\]")


@dataclass(frozen=True)
class SizeLimit:
    """Hold a condition on a size that a program takes for granted, and a size at which it is wrong or fails."""

    condition: str
    symbol: str
    """The dynamic dimension that was changed."""
    sizes: Mapping[str, int]
    """All sizes of the trial: the example's but for the one that was changed."""
    fault: Fault
    """``fails`` where that is known of the program alone, and not of the graph that is made of it."""
    fixed: bool = False
    """True where the program takes about the example's size alone."""

    @property
    def change(self) -> str:
        """Write the size that was changed: ``height = 63``."""
        return f"{self.symbol} = {self.sizes[self.symbol]}"

    def breaks_in(self, ranges: Mapping[str, ShapeRange]) -> bool:
        """Tell whether the program is wrong at a size within these ranges."""
        span = ranges.get(self.symbol)
        return self.fault == "wrong" and span is not None and span.min <= self.sizes[self.symbol] <= span.max


def describe_limits(limits: Sequence[SizeLimit]) -> str:
    """Say where a graph is right, and with which sizes it is not; empty for no limits."""
    parts: list[str] = []
    if wrong := [limit for limit in limits if limit.fault == "wrong"]:
        parts.append(f"{_RIGHT} {_join_limits(wrong)}, the module answers otherwise")
    if failing := [limit for limit in limits if limit.fault == "fails"]:
        fails = f"{_CAPTURED} {_join_limits(failing)}, PyTorch's own program fails"
        others = "other sizes than those of --shape and --batch, which are compared, may be wrong"
        parts.append(fails if all(limit.fixed for limit in failing) else f"{fails}, so {others}")
    return "; and ".join(parts)


def find_limits(notes: Iterable[str]) -> str:
    """Find the note of an export that says where its graph is right; empty if there is none."""
    beginnings = (f"the graph is {_RIGHT} ", f"the graph is {_CAPTURED} ")
    return next((note for note in notes if note.startswith(beginnings)), "")


def _join_limits(limits: Sequence[SizeLimit]) -> str:
    conditions = dict.fromkeys(limit.condition for limit in limits)
    return f"{' and '.join(conditions)}: with {' or '.join(limit.change for limit in limits)}"


def find_size_limits(
    program: "ExportedProgram", loaded: "LoadedModel", ranges: Mapping[str, ShapeRange]
) -> Iterator[SizeLimit]:
    """Find a size of each dimension at which the program answers otherwise than its module, or fails, if there is one.

    Sizes within the ranges are tried first.
    """
    names = [spec.shape for spec in loaded.signature.inputs]

    def name(size: re.Match[str]) -> str:
        return f"({dim})" if is_sum(dim := names[int(size[1] or 0)][int(size[2])]) else str(dim)

    guards = [_SIZE.sub(name, guard) for guard in program._guards_code]
    example = loaded.dynamic_sizes
    for symbol in example:
        for size, broken in _list_trials(guards, loaded, symbol, ranges.get(symbol)):
            sizes = {**example, symbol: size}
            if fault := find_program_fault(program, loaded, sizes):
                yield SizeLimit(broken, symbol, sizes, fault, _fixes(broken, example, symbol))
                break


def find_program_fault(program: "ExportedProgram", loaded: "LoadedModel", sizes: Mapping[str, int]) -> Fault:
    """Find out whether program and module answer differently at these sizes, or the program alone cannot answer."""
    feeds = loaded.resize(sizes)

    def run(_: Feeds) -> list[Array]:
        return [to_array(value) for value in program.module(check_guards=False)(*feeds.values())]

    return find_fault(loaded, feeds, run, loaded.signature.unordered)


def list_neighbors(loaded: "LoadedModel") -> dict[str, int]:
    """List sizes beside the example's, one less of each dimension but the batch: no multiples of what those are."""
    return {word: size - (word != BATCH and size > 1) for word, size in loaded.dynamic_sizes.items()}


def _list_trials(
    guards: Sequence[str], loaded: "LoadedModel", symbol: str, span: ShapeRange | None
) -> Iterator[tuple[int, str]]:
    """List sizes of a dimension at which a guard breaks, each with the first guard that does.

    Those within the range come first, then the nearest. One that is much larger is the last, if a guard breaks
    there that breaks at none of the others: of ``split(128)``.
    """
    example, specs = loaded.dynamic_sizes, loaded.signature.inputs
    given = example[symbol]

    def list_broken(guards: Iterable[str], size: int) -> list[str]:
        return [guard for guard in guards if not _holds(guard, {**example, symbol: size})]

    def order(size: int) -> tuple[bool, int]:
        return span is not None and not span.min <= size <= span.max, abs(size - given)

    largest = max(_LARGEST_TRIED, 2 * given)
    tried = set(range(1, largest + 1))
    if span is not None:
        tried.update(range(max(1, span.min), min(span.max, span.min + _LARGEST_TRIED) + 1))
    nearest = sorted(tried, key=order)
    broken = {size: guards_there for size in nearest if (guards_there := list_broken(guards, size))}
    yield from ((size, first) for size, (first, *_) in itertools.islice(broken.items(), _TRIALS))
    others = set(guards).difference(*broken.values())
    for size in range(largest + 1, _MOST_GROWTH * given + 1):
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
