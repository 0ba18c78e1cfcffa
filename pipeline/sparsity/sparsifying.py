"""Zeros put into the weights of a graph, each weight computed when it is written."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.errors import InvalidGraph, UsageError
from enginesmith.pipeline.sparsity import candidates, marks, masks
from enginesmith.pipeline.sparsity.candidates import Candidate
from enginesmith.pipeline.sparsity.options import Sparsity
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir

PROTECTED = "it is protected"
_REASONS = 3


@dataclass
class Sparsified:
    """What became of the weights of products; counts are of their elements."""

    done: int = 0
    weights: int = 0
    zeros: int = 0
    elements: int = 0
    signal: float = 0.0
    """Sum of the squares of all weights, those left dense too."""
    noise: float = 0.0
    """Sum of the squares of what became zero."""
    left: dict[str, str] = field(default_factory=dict)
    """Weight → why it stays dense."""

    @property
    def share(self) -> float:
        """Of the elements, those that are zero."""
        return self.zeros / self.elements if self.elements else 0.0

    @property
    def sqnr_db(self) -> float | None:
        """Of the weights; None where nothing that was not zero became zero, or everything is."""
        return float(10 * np.log10(self.signal / self.noise)) if self.noise and self.signal else None


def sparsify(model: "ir.Model", asked: Sparsity) -> Sparsified:
    """Put a pattern into every weight that can have it, in place, and mark the graph.

    Raises:
        InvalidGraph: no weight of the graph can have it.
        UsageError: a protected name that there is none of, or all of them are protected.
    """
    found = candidates.find(model)
    done = Sparsified(weights=len(found), left=_left(found, asked))
    chosen = [one for one in found if one.name not in done.left]
    if not chosen:
        raise _refusal(found, asked, done.left)
    done.done = len(chosen)
    bounds = _thresholds(chosen, asked)
    for one in found:
        weight = numbers(one.value)
        kept = None
        if one.name not in done.left:
            kept, bounds = _mask(weight, one.axis, asked, bounds)
            _apply(one.value, kept)
        _count(done, weight, kept)
    marks.put(model, str(asked))
    return done


def numbers(value: "ir.Value") -> Array:
    """An initialiser's content; of what lies beside the file, a view."""
    assert value.const_value is not None
    return value.const_value.numpy()


def _left(found: Sequence[Candidate], asked: Sparsity) -> dict[str, str]:
    protected = _protected(found, asked.protect)
    reasons = ((one.name, one.structured if asked.pattern == "2:4" else one.reason) for one in found)
    return {name: PROTECTED if name in protected else why for name, why in reasons if why or name in protected}


def _protected(found: Sequence[Candidate], patterns: Sequence[str]) -> set[str]:
    known = sorted({name for one in found for name in one.names})
    chosen: set[str] = set()
    for pattern in patterns:
        hit = {one.name for one in found if any(_fits(name, pattern) for name in one.names)}
        if not hit:
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
            raise UsageError(
                f"{pattern!r} is to be protected, and no weight of a product, its node or module is called so",
                f"did you mean {' or '.join(near)}?" if near else "take names from `enginesmith inspect`",
            )
        chosen |= hit
    return chosen


def _fits(name: str, pattern: str) -> bool:
    """A name itself, what lies below a module, or what a pattern with * stands for."""
    return name == pattern or name.startswith(f"{pattern}.") or ("*" in pattern and fnmatchcase(name, pattern))


def _refusal(found: Sequence[Candidate], asked: Sparsity, left: dict[str, str]) -> InvalidGraph | UsageError:
    if not found:
        return InvalidGraph(
            "the graph has no weight that can be sparse: no Conv, Gemm or MatMul with a constant one",
            "run `enginesmith simplify` first, if its weights are computed from constants",
        )
    if set(left.values()) == {PROTECTED}:
        return UsageError(
            f"all {len(left)} weights of the graph are protected, and none is left to be {asked}", "protect less"
        )
    reasons = "; ".join(list(dict.fromkeys(left.values()))[:_REASONS])
    return InvalidGraph(f"no weight of the graph can be {asked}: {reasons}", "protect less, or take another pattern")


def _thresholds(chosen: Sequence[Candidate], asked: Sparsity) -> masks.Threshold | None:
    """The one threshold that holds for all weights, where there is one."""
    if asked.pattern == "2:4" or asked.scope == "layer":
        return None
    return masks.threshold([lambda one=one: numbers(one.value) for one in chosen], asked.ratio)  # type: ignore[misc]


def _mask(
    weight: Array, axis: int, asked: Sparsity, bound: masks.Threshold | None
) -> tuple[Array, masks.Threshold | None]:
    if asked.pattern == "2:4":
        return masks.two_of_four(weight, axis), None
    if bound is None:
        return masks.threshold([lambda: weight], asked.ratio).mask(weight)[0], None
    return bound.mask(weight)


def _apply(value: "ir.Value", kept: Array) -> None:
    """Let an initialiser be zero where it is not kept; until then one bit an element is remembered."""
    import onnx_ir as ir

    given, name, bits = value.const_value, value.name, np.packbits(kept)
    assert given is not None
    shape, count = kept.shape, kept.size

    def compute() -> "ir.TensorProtocol":
        stays = np.unpackbits(bits, count=count).astype(bool).reshape(shape)
        weight = given.numpy()
        return ir.tensor(np.where(stays, weight, weight.dtype.type(0)), name=name)

    value.const_value = ir.LazyTensor(compute, dtype=given.dtype, shape=ir.Shape(shape), name=name)


def _count(done: Sparsified, weight: Array, kept: Array | None) -> None:
    if weight.dtype.kind not in "fV" and weight.dtype.name != "bfloat16":
        return
    values = weight.astype(np.float32).reshape(-1)
    done.elements += values.size
    done.signal += float(np.dot(values, values))
    zero = values == 0
    if kept is not None:
        gone = values[~kept.reshape(-1)]
        done.noise += float(np.dot(gone, gone))
        zero |= ~kept.reshape(-1)
    done.zeros += int(zero.sum())
