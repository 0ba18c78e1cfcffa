"""Precision: the same graph with its products, its weights or the whole of it in fewer bits.

Precisions are in the graph, as casts and Q/DQ pairs, and engines do what it says. What decides is the float graph, the
``ranges`` of its values, and an ``assignment`` that may leave some groups in floating point.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from enginesmith.calibration import ranges as calibration
from enginesmith.calibration.ranges import METHODS, Method, Ranges
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.passes.base import PrecisionPass, PrecisionRequest, Progress, Records, Stage, by_reason
from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.passes.quantize.qdq import ON_REQUEST
from enginesmith.pipeline.passes.quantize.writer import Writer
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir

    from enginesmith.pipeline.passes.float16.convert import Lowered
    from enginesmith.pipeline.passes.quantize.layers import QuantizableOp
    from enginesmith.pipeline.passes.quantize.qdq import Correct, Quantised


# What single groups are computed in: as it was decided, and as it came out.

FILE = "assignment.json"
"""Beside the graph: what each group is computed in, and why."""


@dataclass(frozen=True)
class Assignment:
    """What was decided."""

    method: Method
    """Whose ranges to take."""
    keep: frozenset[str] = frozenset()
    """Groups that are not to be quantised."""
    floating: frozenset[str] = frozenset()
    """Groups that stay in float32, also where the rest is lowered."""
    why: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, record: Artifact | None, precision: str, method: Method) -> "Assignment":
        """Read a record: a JSON list of ``{"group": …, "precision": …, "why": …, "method": …}``, the last two optional.

        Raises:
            UsageError: it is something else.
        """
        if record is None:
            return cls(method)
        try:
            entries: list[dict[str, Any]] = json.loads(record.path.read_bytes())
            given = {str(entry["group"]): str(entry["precision"]) for entry in entries}
            why = {str(entry["group"]): str(entry.get("why", "")) for entry in entries}
            methods = {str(entry["method"]) for entry in entries if entry.get("method")}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{record.path.name} is no assignment ({type(error).__name__}: {error})",
                'give a JSON list of objects like {"group": "conv1", "precision": "int8", "why": ""}',
            ) from error
        low = precision.partition("+")[0]
        kept = frozenset(name for name, one in given.items() if one != low)
        floating = frozenset(name for name in kept if given[name] == "fp32")
        return cls(_method(methods, method), kept, floating, why)


def _method(named: Iterable[str], otherwise: Method) -> Method:
    found = sorted(named)
    known = [method for method in METHODS if method in found]
    if len(found) > 1 or len(known) != len(found):
        raise UsageError(f"the assignment names ranges by {' and '.join(found)}", f"name one of {', '.join(METHODS)}")
    return known[0] if known else otherwise


def entries(
    found: "Sequence[QuantizableOp]", left: Mapping[str, str], chosen: Assignment, lowered: "Lowered | None", low: str
) -> list[dict[str, str]]:
    """List each group's precision now; ``low`` is that of groups not in ``left``, empty if there is none."""
    halved = set(lowered.nodes) if lowered else set()
    reasons = {**(lowered.kept if lowered else {}), **left}

    def entry(group: "QuantizableOp") -> dict[str, str]:
        described = {"group": group.name, "module": group.module, "operator": group.operator}
        if low and group.name not in left:
            return {**described, "precision": low, "why": ""}
        precision = lowered.dtype if lowered and group.name in halved else "fp32"
        return {**described, "precision": precision, "why": chosen.why.get(group.name) or reasons.get(group.name, "")}

    return [entry(group) for group in found]


def write(out: Path, described: Sequence[Mapping[str, str]]) -> None:
    """Write what became of the groups beside the graph."""
    (out / FILE).write_text(json.dumps(described, indent=1) + "\n")


def read(folder: Path) -> list[dict[str, str]]:
    """Read what :func:`write` wrote."""
    found: list[dict[str, str]] = json.loads((folder / FILE).read_bytes())
    return found


_NAMES = 3


class Precision(PrecisionPass):
    """Bring a float32 graph into another precision; ``int8`` and ``fp8`` need ``ranges`` of the same graph."""

    name: ClassVar[str] = "precision"
    consumes: ClassVar[Kind] = "onnx"
    produces: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ("ml-dtypes", "networkx", "numpy", "onnx", "onnx-ir", "onnxscript")
    stage: ClassVar[Stage] = "precision"
    reads: ClassVar[tuple[str, ...]] = ("quantisation", "export")

    precision: Literal["fp16", "bf16", "int8", "int8+fp16", "int8-dynamic", "fp8", "int4-weights"]
    weight_bits: Literal[7, 8] = 8
    """Of int8 weights; 7 where the processor would saturate."""
    keep_io_types: bool = True
    """Whether inputs and outputs stay in float32."""
    bias_correction: bool = False
    """Whether biases make up for the mean error of rounded weights; needs ranges with statistics by channel."""
    per_channel: bool = True
    rest: Literal["fp32", "fp16"] | None = None
    """What is beside the quantised products is brought into; None for what the precision is made of."""
    inputs_only: bool = False
    """Whether nothing but inputs of products is rounded, so that the error of each can be told from the others'."""
    external_data_bytes: int = edit.EXTERNAL_DATA_BYTES

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make the one for a variant's precision, by its engine's rules where the recipe has none."""
        asked = options["quantisation"]
        values = {
            "precision": request.precision,
            "placement": request.placement,
            "method": "mse" if asked.ranges == "auto" else asked.ranges,
            "weight_bits": asked.weight_bits or request.weight_bits,
            "keep_io_types": not asked.convert_io,
            "bias_correction": asked.bias_correction,
            "external_data_bytes": options["export"].external_data_bytes,
        }
        return (cls.model_validate(values),)

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Rewrite the graph, and write down what became of each group.

        Raises:
            InvalidGraph: the graph is no float32 graph, or has nothing in it that the precision is for.
            UsageError: the records are of another graph, or there are no ranges.
            ModelError: nothing could be quantised.
        """
        from enginesmith.pipeline.frameworks.onnx import model_file
        from enginesmith.pipeline.passes.quantize import layers

        ranges = self._ranges(artifact, records)
        chosen = Assignment.read(records.get("assignment"), self.precision, self.method)
        model = edit.load(artifact.path)
        total = _float_elements(model)
        progress(f"rewriting for {self.precision}")
        done = self._quantise(model, ranges, chosen) if self._quantises else None
        found = done.groups if done else layers.find(model)
        low = self.remainder
        lowered = self._lower(model, low, ranges, chosen) if low != "fp32" else None
        if done is None and lowered is not None and not lowered.nodes:
            _refuse_unchanged(self.precision, lowered.kept)
        progress("writing")
        edit.save(model, out, self.external_data_bytes)
        left = done.left if done else {}
        low_name = self._low if self._quantises else ""
        write(out, entries(found, left, chosen, lowered, low_name))
        return Effect(
            file=edit.FILE,
            summary=", ".join(_summary(self.precision, done, lowered, total)),
            notes=by_reason("not quantised", {name: chosen.why.get(name) or why for name, why in left.items()}),
            signature=model_file.signature(out / edit.FILE),
        )

    @property
    def _quantises(self) -> bool:
        return self.precision not in ("fp16", "bf16")

    @property
    def _low(self) -> str:
        """Return the name of the precision of quantised groups."""
        return self.precision.partition("+")[0]

    def rounding_inputs(self) -> Self:
        return self.model_copy(update={"inputs_only": True, "rest": "fp32"})

    @property
    def remainder(self) -> Literal["fp32", "fp16", "bf16"]:
        """What is beside the quantised groups is brought into."""
        """What is not quantised is brought into; the CPU has no kernels for what is half the size."""
        if self.rest is not None and self._quantises:
            return self.rest
        if self.precision in ("fp8", "int4-weights"):
            return "fp16" if self.placement == "inputs" else "fp32"
        return KINDS[self.precision].rest

    def _ranges(self, artifact: Artifact, records: Records) -> Ranges | None:
        if "ranges" in records:
            path = records["ranges"].path
            return calibration.load(path, model_sha256=artifact.sha256)
        if KINDS[self.precision].calibrated or self.bias_correction:
            what = self.precision if KINDS[self.precision].calibrated else "bias correction"
            raise UsageError(f"{what} needs the ranges of activations, and got none", "calibrate the graph first")
        return None

    def _quantise(self, model: "ir.Model", ranges: Ranges | None, chosen: Assignment) -> "Quantised":

        correct = _corrector(ranges) if self.bias_correction and ranges else None
        done = self._narrowed(model, ranges, chosen, correct)
        _hold(self.precision, done)
        if self.placement == "inputs+outputs" or self.precision == "int8-dynamic":
            keep_clamps_apart(model)
            alone = KINDS[self.precision].calibrated  # else the bias before a Gelu is part of the product
            keep_sums_apart(model, ("LayerNormalization", *(["Gelu"] if alone else [])))
        return done

    def _narrowed(
        self, model: "ir.Model", ranges: Ranges | None, chosen: Assignment, correct: "Correct | None"
    ) -> "Quantised":
        from enginesmith.pipeline.passes.quantize import dynamic, qdq, weight_only

        scales: Literal["fp32", "fp16"] = "fp16" if self.remainder == "fp16" else "fp32"
        if self.precision == "int8-dynamic":
            settings = dynamic.Settings(self.weight_bits, self.per_channel, chosen.keep)
            return dynamic.quantise(model, settings, correct)
        if self.precision == "int4-weights":
            return weight_only.quantise(model, weight_only.Settings(scales, chosen.keep), ranges, correct)
        assert ranges is not None
        static = qdq.Settings(
            number="fp8" if self.precision == "fp8" else "int8",
            placement=self.placement,
            method=chosen.method,
            weight_bits=self.weight_bits,
            per_channel=self.per_channel,
            rest=scales,
            keep=chosen.keep,
            inputs_only=self.inputs_only,
        )
        return qdq.quantise(model, ranges, static, correct)

    def _lower(
        self, model: "ir.Model", low: Literal["fp16", "bf16"], ranges: Ranges | None, chosen: Assignment
    ) -> "Lowered":
        from enginesmith.pipeline.passes.float16 import convert as half

        known = ranges.tensors.items() if ranges else ()
        largest = {name: max(-found.minimum, found.maximum) if found.finite else math.inf for name, found in known}
        return half.lower(model, low, keep_io=self.keep_io_types, keep=chosen.floating, largest=largest)


def _corrector(ranges: Ranges) -> "Correct":
    """Make the correction of a weight's mean error, for inputs whose mean is known."""
    from enginesmith.pipeline.passes.quantize import bias_correction

    def correct(node: "ir.Node", given: Array, narrow: Array) -> Array | None:
        read = node.inputs[0]
        known = ranges.channels.get(str(read.name)) if read is not None else None
        return None if known is None else bias_correction.of_node(node, given, narrow, np.array(known.mean))

    return correct


def _hold(precision: str, done: "Quantised") -> None:
    """Refuse a graph in which nothing was quantised, unless that was asked for."""
    if done.done or ON_REQUEST in done.left.values():
        return
    reasons = Counter(done.left.values())
    shown = "; ".join(f"{count} ×: {why}" for why, count in reasons.most_common(_NAMES))
    raise ModelError(
        f"no product of this graph can be in {precision}: {shown}", "look at the calibration data, or take fp16"
    )


def _refuse_unchanged(precision: str, kept: Mapping[str, str]) -> None:
    """Refuse a half-precision graph in which every node stayed in float32."""
    reasons = Counter(kept.values())
    shown = "; ".join(f"{count} ×: {why}" for why, count in reasons.most_common(_NAMES)) or "there are no such nodes"
    raise ModelError(f"no node of this graph can be in {precision}: {shown}", "export it again with a newer opset")


def _float_elements(model: "ir.Model") -> int:
    import onnx_ir as ir

    values = (value.const_value for one in model.graphs() for value in one.initializers.values())
    return sum(found.size for found in values if found is not None and found.dtype == ir.DataType.FLOAT)


def _summary(precision: str, done: "Quantised | None", lowered: "Lowered | None", total: int) -> list[str]:
    parts = []
    if done is not None:
        weights = sum(group.parameters for group in done.groups)  # Constant nodes may hold some of them
        share = sum(group.parameters for group in done.done) / max(total, weights, 1)
        low = precision.partition("+")[0]
        parts += [f"{done.pairs} Q/DQ pairs"] if done.pairs else []
        parts += [f"{len(done.done)} of {len(done.groups)} products in {low}", f"{share:.1%} of weights"]
    if lowered is not None:
        parts.append(f"{len(lowered.nodes)} nodes in {lowered.dtype}, {len(lowered.casts)} casts")
    return parts


# What ONNX Runtime's CPU provider fuses to its own loss, or stumbles over, written such that it does not.

_STANDARD = ("", "ai.onnx")


def keep_sums_apart(model: "ir.Model", readers: Collection[str]) -> int:
    """Write Add as Sum where one of these operators reads it; how often that was.

    ONNX Runtime makes SkipLayerNormalization and BiasGelu of such an Add and what follows, and takes longer for them
    than for the two: BERT-base in int8 on one thread (1.31, sequence 128, AVX-512 with VNNI) spends 11.7 ms on the one
    instead of 2.4, and 4.5 ms on the other instead of 3.7. It does not look for Sum, which computes the same.
    """
    count = 0
    for node in model.graph:
        value = node.inputs[0] if node.op_type in readers and node.domain in _STANDARD else None
        producer = value.producer() if value is not None else None
        if producer is not None and producer.op_type == "Add" and producer.domain in _STANDARD:
            producer.op_type = "Sum"
            count += 1
    return count


def keep_clamps_apart(model: "ir.Model") -> int:
    """Write a Relu or Clip behind a quantised MatMul or Gemm as Max and Min; how often that was.

    ONNX Runtime 1.31 takes a clamp for part of the product, and where it cannot be, as no QuantizeLinear that includes
    it follows, leaves the product in floats behind a weight that is dequantised at every call.
    """
    writer = Writer(model.graph)
    count = 0
    for node in list(model.graph):
        if node.op_type not in layers.MATRIX_PRODUCTS or not _dequantised(node.inputs[1]):
            continue
        clamp, index = layers.only_reader(node.outputs[0])
        if clamp is None or index or clamp.op_type not in ("Relu", "Clip"):
            continue
        reader, _ = layers.only_reader(clamp.outputs[0])
        if reader is None or reader.op_type != "QuantizeLinear":
            _write_out(clamp, writer)
            count += 1
    return count


def _dequantised(value: "ir.Value | None") -> bool:
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type == "DequantizeLinear"


def _write_out(clamp: "ir.Node", writer: Writer) -> None:
    value = clamp.inputs[0]
    bounds = [*clamp.inputs[1:], None, None][:2]
    if clamp.op_type == "Relu":
        bounds = [writer.shared("zero", np.zeros((), np.float32)), None]
    for operator, bound in zip(("Max", "Min"), bounds, strict=True):
        if bound is not None:
            node = writer.node(operator, [value, bound], [f"{clamp.outputs[0].name}_{operator}"], like=clamp)
            writer.graph.insert_before(clamp, node)
            value = node.outputs[0]
    if value is not None and value is not clamp.inputs[0]:
        writer.replace(clamp, [value])
