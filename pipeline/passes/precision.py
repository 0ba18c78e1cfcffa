"""Precision: the same graph with its products, its weights or the whole of it in fewer bits.

Precisions are in the graph, as casts and Q/DQ pairs, and engines do what it says. What decides is the float graph, the
``ranges`` of its values, and an ``assignment`` that may leave some groups in floating point.
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from enginesmith.calibration import ranges as calibration
from enginesmith.calibration.ranges import Method, Ranges
from enginesmith.pipeline import graph
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.passes import assignment
from enginesmith.pipeline.passes.assignment import Assignment
from enginesmith.pipeline.passes.base import Pass, Progress, Records, by_reason
from enginesmith.pipeline.precision.kinds import KINDS, Placement
from enginesmith.pipeline.precision.quantise.preparation import ON_REQUEST
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir

    from enginesmith.pipeline.precision.half.lowering import Lowered
    from enginesmith.pipeline.precision.quantise.qdq import Correct, Quantised

_NAMES = 3


class Precision(Pass):
    """Bring a float32 graph into another precision; ``int8`` and ``fp8`` need ``ranges`` of the same graph."""

    name: ClassVar[str] = "precision"
    consumes: ClassVar[Kind] = "onnx"
    produces: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ("ml-dtypes", "networkx", "numpy", "onnx", "onnx-ir", "onnxscript")

    precision: Literal["fp16", "bf16", "int8", "int8+fp16", "int8-dynamic", "fp8", "int4-weights"]
    placement: Placement = "tensorrt"
    """The engine that Q/DQ pairs are placed for. For TensorRT, what is beside fp8 and int4 becomes float16."""
    method: Method = "mse"
    """Whose ranges; an assignment may say otherwise."""
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
    external_data_bytes: int = graph.EXTERNAL_DATA_BYTES

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Rewrite the graph, and write down what became of each group.

        Raises:
            InvalidGraph: the graph is no float32 graph, or has nothing in it that the precision is for.
            UsageError: the records are of another graph, or there are no ranges.
            ModelError: nothing could be quantised.
        """
        from enginesmith.pipeline import onnx_file
        from enginesmith.pipeline.precision import groups

        ranges = self._ranges(artifact, records)
        chosen = Assignment.read(records.get("assignment"), self.precision, self.method)
        model = graph.load(artifact.path)
        total = _float_elements(model)
        progress(f"rewriting for {self.precision}")
        done = self._quantise(model, ranges, chosen) if self._quantises else None
        found = done.groups if done else groups.find(model)
        low = self.remainder
        lowered = self._lower(model, low, ranges, chosen) if low != "fp32" else None
        if done is None and lowered is not None and not lowered.nodes:
            _refuse_unchanged(self.precision, lowered.kept)
        progress("writing")
        graph.save(model, out, self.external_data_bytes)
        left = done.left if done else {}
        low_name = self._low if self._quantises else ""
        assignment.write(out, assignment.entries(found, left, chosen, lowered, low_name))
        return Effect(
            file=graph.FILE,
            summary=", ".join(_summary(self.precision, done, lowered, total)),
            notes=by_reason("not quantised", {name: chosen.why.get(name) or why for name, why in left.items()}),
            signature=onnx_file.signature(out / graph.FILE),
        )

    @property
    def _quantises(self) -> bool:
        return self.precision not in ("fp16", "bf16")

    @property
    def _low(self) -> str:
        """What quantised groups are said to be in."""
        return self.precision.partition("+")[0]

    @property
    def remainder(self) -> Literal["fp32", "fp16", "bf16"]:
        """What is beside the quantised groups is brought into."""
        """What is not quantised is brought into; the CPU has no kernels for what is half the size."""
        if self.rest is not None and self._quantises:
            return self.rest
        if self.precision in ("fp8", "int4-weights"):
            return "fp16" if self.placement == "tensorrt" else "fp32"
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
        from enginesmith.pipeline.precision.quantise import cpu_kernels

        correct = _corrector(ranges) if self.bias_correction and ranges else None
        done = self._narrowed(model, ranges, chosen, correct)
        _hold(self.precision, done)
        if self.placement == "onnxruntime" or self.precision == "int8-dynamic":
            cpu_kernels.keep_clamps_apart(model)
            alone = KINDS[self.precision].calibrated  # else the bias before a Gelu is part of the product
            cpu_kernels.keep_sums_apart(model, ("LayerNormalization", *(["Gelu"] if alone else [])))
        return done

    def _narrowed(
        self, model: "ir.Model", ranges: Ranges | None, chosen: Assignment, correct: "Correct | None"
    ) -> "Quantised":
        from enginesmith.pipeline.precision.quantise import dynamic, qdq, weight_only

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
        from enginesmith.pipeline.precision.half import lowering as half

        known = ranges.tensors.items() if ranges else ()
        largest = {name: max(-found.minimum, found.maximum) if found.finite else math.inf for name, found in known}
        return half.lower(model, low, keep_io=self.keep_io_types, keep=chosen.floating, largest=largest)


def _corrector(ranges: Ranges) -> "Correct":
    """What makes up for the mean error of a weight, where the mean of what it is multiplied with is known."""
    from enginesmith.pipeline.precision.quantise import bias

    def correct(node: "ir.Node", given: Array, narrow: Array) -> Array | None:
        read = node.inputs[0]
        known = ranges.channels.get(str(read.name)) if read is not None else None
        return None if known is None else bias.of_node(node, given, narrow, np.array(known.mean))

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
