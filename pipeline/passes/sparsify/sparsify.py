"""Set weights of products to zero: 2:4 for sparse tensor cores, or unstructured by magnitude.

One shot, by magnitude alone; the metric tells how much the network loses by that. A 2:4 graph runs faster on devices
with sparse tensor cores, an unstructured one only compresses better.

Sparse tensor cores skip zeros along the dimension that a product sums over: input channels of a Conv, for each place in
its kernel, and K of Gemm and MatMul. TensorRT's test (developer guide, "Structured Sparsity") and NVIDIA's ASP (apex,
``contrib/sparsity``) take the same. A weight is followed through casts and transpositions to the initializer.
"""

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.errors import InvalidGraph, UsageError
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, ir
from enginesmith.pipeline.frameworks.onnx.model_file import MODULE_KEY
from enginesmith.pipeline.passes.base import PrecisionRequest, Progress, Records, Stage, by_reason
from enginesmith.pipeline.passes.graph_pass import GraphPass
from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.passes.sparsify.options import Sparsity
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx


class Sparsify(Sparsity, GraphPass):
    """Put zeros into the weights of products."""

    name: ClassVar[str] = "sparsify"
    tools: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnx-ir", evaluator.LIBRARY)

    stage: ClassVar[Stage] = "sparsity"
    reads: ClassVar[tuple[str, ...]] = ("sparsities",)

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make one for each pattern."""
        return tuple(cls(**pattern.model_dump()) for pattern in options["sparsities"])

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Put zeros into the weights.

        Raises:
            InvalidGraph: no weight can have the pattern.
            UsageError: a protected name that there is none of.
        """
        model = edit.load(artifact.path)
        edit.fix_weights(model)
        progress(f"making weights {self}")
        done = sparsify(model, self)
        progress("writing")
        sqnr = "" if done.sqnr_db is None else f"; SQNR of the weights {done.sqnr_db:.1f} dB"
        return self.save(
            model,
            out,
            f"{self} in {done.done} of {done.weights} weights, {done.share:.1%} of the weights' elements are "
            f"zero{sqnr}",
            notes=by_reason("left dense", done.left),
        )


GROUP, KEPT = 4, 2
_ROWS = 1 << 20
_HALF_BITS = 16
_BINS = 1 << _HALF_BITS


def two_of_four(weight: Array, axis: int) -> Array:
    """Mark the two largest magnitudes of each four neighbors along ``axis`` with True.

    Of equal ones the first stay. The length of the axis is a multiple of four.
    """
    along = np.moveaxis(weight, axis, -1)
    mask = np.empty(along.shape, bool)
    flat, out = np.ascontiguousarray(along).reshape(-1, GROUP), mask.reshape(-1, GROUP)
    for start in range(0, len(flat), _ROWS):
        magnitudes = np.abs(flat[start : start + _ROWS].astype(np.float32))
        before = np.zeros(magnitudes.shape, np.int8)  # neighbors that come first
        for first, second in itertools.combinations(range(GROUP), 2):
            ahead = magnitudes[:, first] >= magnitudes[:, second]
            before[:, second] += ahead
            before[:, first] += ~ahead
        out[start : start + _ROWS] = before < KEPT
    return np.moveaxis(mask, -1, axis)


def holds(nonzero: Array) -> bool:
    """Tell whether no four neighbors along the last axis have more than two that are not zero.

    This is TensorRT's own test for eligible weights (developer guide, "Structured Sparsity"), which lengths that are
    no multiple of four fail.
    """
    if nonzero.shape[-1] % GROUP:
        return False
    return bool((nonzero.reshape(-1, GROUP).sum(axis=1, dtype=np.int8) <= KEPT).all())


@dataclass(frozen=True)
class Threshold:
    """The magnitude below which elements become zero, and how many of those that equal it do, the first ones."""

    magnitude: np.float32
    ties: int

    def mask(self, weight: Array) -> tuple[Array, "Threshold"]:
        """Mark elements that stay with True, and return the threshold for the next weight, with the ties left."""
        magnitudes = np.abs(weight.astype(np.float32))
        mask = magnitudes > self.magnitude
        equal = np.flatnonzero(magnitudes == self.magnitude)
        gone = equal[: self.ties]
        mask.flat[equal[self.ties :]] = True
        return mask, Threshold(self.magnitude, self.ties - len(gone))


def threshold(weights: Sequence[Callable[[], Array]], ratio: float) -> Threshold:
    """Find the threshold that makes exactly ``ratio`` of all elements zero, rounded down.

    Magnitudes of float32 have the order of their bits, so two histograms find the element of that rank: of the upper
    half of the bits, then of the lower half of those with the right upper one. One weight is in memory at a time.
    """
    upper = np.zeros(_BINS, np.int64)
    for read in weights:
        upper += np.bincount(_bits(read()) >> _HALF_BITS, minlength=_BINS)
    rank = int(ratio * int(upper.sum()))
    if rank == 0:
        return Threshold(np.float32(0), 0)
    high, below = _bin(upper, rank)
    lower = np.zeros(_BINS, np.int64)
    for read in weights:
        bits = _bits(read())
        lower += np.bincount(bits[bits >> _HALF_BITS == high] & (_BINS - 1), minlength=_BINS)
    low, less = _bin(lower, rank - below)
    bits = np.array([high << _HALF_BITS | low], np.uint32)
    return Threshold(bits.view(np.float32)[0], rank - below - less)


def _bits(weight: Array) -> Array:
    return np.abs(weight.astype(np.float32)).reshape(-1).view(np.uint32)


def _bin(counts: Array, rank: int) -> tuple[int, int]:
    """Return the bin with the element of that rank, counted from one, and how many lie in bins before it."""
    total = np.cumsum(counts)
    index = int(np.searchsorted(total, rank))
    return index, int(total[index] - counts[index])


_LAYOUT = ("Cast", "Identity", "Transpose")
_QUANTIZED = ("DequantizeLinear", "QuantizeLinear")
_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")


@dataclass
class Candidate:
    """An initializer that products multiply by."""

    value: "ir.Value"
    axis: int
    """The axis that is summed over."""
    nodes: "list[ir.Node]" = field(default_factory=list)
    reason: str = ""
    """Reason why no pattern is put into it; empty where one can be."""
    structured: str = ""
    """Reason why 2:4 is not put into it, where another pattern could be."""

    @property
    def name(self) -> str:
        return str(self.value.name)

    @property
    def names(self) -> frozenset[str]:
        """Names that people may use: the initializer, its nodes, their modules."""
        modules = (node.metadata_props.get(MODULE_KEY, "") for node in self.nodes)
        return frozenset(name for name in (self.name, *(str(node.name) for node in self.nodes), *modules) if name)

    def numbers(self) -> Array:
        """Return the elements; a view where they lie beside the file."""
        assert self.value.const_value is not None
        return self.value.const_value.numpy()


def find(model: "ir.Model") -> tuple[Candidate, ...]:
    """Find the weights of all products of a graph and its subgraphs, in the order in which they are first read."""
    candidates: dict[ir.Value, Candidate] = {}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain or node.op_type not in layers.PRODUCTS or len(node.inputs) < 2:
            continue
        weight = node.inputs[1]
        if weight is None:
            continue
        summed = {"Conv": 1, "ConvTranspose": 0, "Gemm": int(bool(node.attributes.get_int("transB", 0)))}
        traced = _trace(weight, summed.get(node.op_type, -2))
        if traced is None:
            continue
        known = candidates.setdefault(traced[0], Candidate(*traced))
        if known.axis != traced[1]:
            known.reason = "two products sum over different axes of it"
        known.nodes.append(node)
    for candidate in candidates.values():
        candidate.reason = candidate.reason or _reason(candidate)
        candidate.structured = candidate.reason or _structure(candidate)
    return tuple(candidates.values())


def _trace(value: "ir.Value", axis: int) -> "tuple[ir.Value, int] | None":
    """Return the initializer behind a value and what its axis is there; None for what is computed.

    The given axis counts modulo the rank: -2 is the last but one, or the only one of a vector.
    """
    while not value.is_initializer():
        node = value.producer()
        if node is None or node.domain or node.op_type not in (*_LAYOUT, *_QUANTIZED):
            return None
        source = node.inputs[0]
        if source is None:
            return None
        if node.op_type == "Transpose":
            axis = edit.find_transposed_axis(node, axis)
        value = source
    return value, axis % max(len(value.shape or ()), 1)


def _reason(candidate: Candidate) -> str:
    value, tensor = candidate.value, candidate.value.const_value
    if tensor is None or value.is_graph_input():
        return "it can be fed from outside"
    if tensor.dtype.name not in _FLOATS:
        what = "quantized already" if tensor.dtype.is_integer() else f"of the type {tensor.dtype.name.lower()}"
        return f"it is {what}: sparse weights are made of a float graph"
    if len(tensor.shape) < 2:
        return "it is a vector"
    others = sorted(set(_others(value, set(candidate.nodes))))
    return f"it is also read by {', '.join(others)}" if others else ""


def _others(value: "ir.Value", nodes: "set[ir.Node]") -> Iterator[str]:
    """List readers of a weight besides the products that multiply by it."""
    if value.is_graph_output():
        yield "whoever takes the outputs"
    for use in value.uses():
        if use.node in nodes and use.idx == 1:
            continue
        if use.node.op_type in (*_LAYOUT, *_QUANTIZED) and use.idx == 0:
            yield from _others(use.node.outputs[0], nodes)
        else:
            yield use.node.op_type


def _structure(candidate: Candidate) -> str:
    tensor = candidate.value.const_value
    assert tensor is not None
    if any(node.op_type == "ConvTranspose" for node in candidate.nodes):
        return "there are no sparse kernels for ConvTranspose"
    length = int(tensor.shape.numpy()[candidate.axis])
    what = "inputs" if candidate.nodes[0].op_type in layers.MATRIX_PRODUCTS else "input channels of a group"
    return f"its {length} {what} are no multiple of {GROUP}" if length % GROUP else ""


KEY = "enginesmith.sparsity"
"""Metadata of a model that names the pattern of its weights; it travels with the graph through passes and files.

Code that relies on it looks at the weights too, as any tool may have written others into a marked file.
"""
TWO_OF_FOUR = "2:4"


def of(model: "onnx.ModelProto") -> str:
    """Return the pattern that a graph is marked with; empty for a dense one."""
    return next((str(entry.value) for entry in model.metadata_props if entry.key == KEY), "")


PROTECTED = "it is protected"
_REASONS = 3


@dataclass
class Sparsified:
    """The weights of products after zeros were put into them; counts are of their elements."""

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
        """Share of elements that are zero."""
        return self.zeros / self.elements if self.elements else 0.0

    @property
    def sqnr_db(self) -> float | None:
        """SQNR of the weights; None where no element that was not zero became zero, or all are."""
        return float(10 * np.log10(self.signal / self.noise)) if self.noise and self.signal else None


def sparsify(model: "ir.Model", sparsity: Sparsity) -> Sparsified:
    """Put a pattern into every weight that can have it, in place, and mark the graph.

    A graph that is marked 2:4 stays so, whatever else becomes zero in it. Each weight is computed when it is written.

    Raises:
        InvalidGraph: no weight of the graph can have it.
        UsageError: a protected name that there is none of, or all of them are protected.
    """
    weights = find(model)
    done = Sparsified(weights=len(weights), left=_left_dense(weights, sparsity))
    chosen = [weight for weight in weights if weight.name not in done.left]
    if not chosen:
        raise _refusal(weights, sparsity, done.left)
    done.done = len(chosen)
    bound: Threshold | None = None  # holds for all weights, where there is one for all
    if sparsity.pattern != "2:4" and sparsity.scope == "global":
        bound = threshold([weight.numbers for weight in chosen], sparsity.ratio)
    for weight in weights:
        array = weight.numbers()
        mask = None
        if weight.name not in done.left:
            if sparsity.pattern == "2:4":
                mask = two_of_four(array, weight.axis)
            elif bound is not None:
                mask, bound = bound.mask(array)
            else:
                mask, _ = threshold([weight.numbers], sparsity.ratio).mask(array)
            _apply(weight.value, mask)
        _count(done, array, mask)
    marks: MutableMapping[str, str] = model.metadata_props
    if marks.get(KEY) != TWO_OF_FOUR:
        marks[KEY] = str(sparsity)
    return done


def _left_dense(weights: Sequence[Candidate], sparsity: Sparsity) -> dict[str, str]:
    """Explain, by name, why weights stay dense."""
    protected: set[str] = set()
    for pattern in sparsity.protect:
        chosen = {weight.name for weight in weights if any(_fits(name, pattern) for name in weight.names)}
        if not chosen:
            known = sorted({name for weight in weights for name in weight.names})
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
            raise UsageError(
                f"{pattern!r} is to be protected, and no weight of a product, its node or module is called so",
                f"did you mean {' or '.join(near)}?" if near else "take names from `enginesmith inspect`",
            )
        protected |= chosen
    reasons = ((weight.name, weight.structured if sparsity.pattern == "2:4" else weight.reason) for weight in weights)
    return {name: PROTECTED if name in protected else why for name, why in reasons if why or name in protected}


def _fits(name: str, pattern: str) -> bool:
    """Match a name itself, what lies below a module, or a pattern with *."""
    return name == pattern or name.startswith(f"{pattern}.") or ("*" in pattern and fnmatchcase(name, pattern))


def _refusal(weights: Sequence[Candidate], sparsity: Sparsity, left: dict[str, str]) -> InvalidGraph | UsageError:
    if not weights:
        return InvalidGraph(
            "the graph has no weight that can be sparse: no Conv, Gemm or MatMul with a constant one",
            "run `enginesmith simplify` first, if its weights are computed from constants",
        )
    if set(left.values()) == {PROTECTED}:
        return UsageError(
            f"all {len(left)} weights of the graph are protected, and none is left to be {sparsity}", "protect less"
        )
    reasons = "; ".join(list(dict.fromkeys(left.values()))[:_REASONS])
    return InvalidGraph(f"no weight of the graph can be {sparsity}: {reasons}", "protect less, or take another pattern")


def _apply(value: "ir.Value", mask: Array) -> None:
    """Zero an initializer where it is not kept; until then one bit an element is remembered."""
    given, name, bits = value.const_value, value.name, np.packbits(mask)
    assert given is not None
    shape, count = mask.shape, mask.size

    def compute() -> "ir.TensorProtocol":
        stays = np.unpackbits(bits, count=count).astype(bool).reshape(shape)
        weight = given.numpy()
        return ir.tensor(np.where(stays, weight, weight.dtype.type(0)), name=name)

    value.const_value = ir.LazyTensor(compute, dtype=given.dtype, shape=ir.Shape(shape), name=name)


def _count(done: Sparsified, weight: Array, mask: Array | None) -> None:
    if weight.dtype.kind not in "fV" and weight.dtype.name != "bfloat16":
        return
    values = weight.astype(np.float32).reshape(-1)
    done.elements += values.size
    done.signal += float(np.dot(values, values))
    zero = values == 0
    if mask is not None:
        gone = values[~mask.reshape(-1)]
        done.noise += float(np.dot(gone, gone))
        zero |= ~mask.reshape(-1)
    done.zeros += int(zero.sum())
