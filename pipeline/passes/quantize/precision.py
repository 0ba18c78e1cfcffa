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
from typing import Any, ClassVar, Literal, Self

import numpy as np

from enginesmith.calibration.ranges import METHODS, Method, Ranges, load
from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.base import PrecisionPass, PrecisionRequest, Progress, Records, Stage, by_reason
from enginesmith.pipeline.passes.float16.convert import Half, Lowered, lower, mark_kept
from enginesmith.pipeline.passes.graph_pass import GraphPass
from enginesmith.pipeline.passes.quantize import cast_pairs, layers, qdq, weights
from enginesmith.pipeline.passes.quantize.layers import Correct, QuantizableOp, Quantized, find_kept
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.passes.quantize.quantizers import correct_bias
from enginesmith.pipeline.passes.quantize.writer import Writer
from enginesmith.pipeline.passes.rescale.products import inputs_first
from enginesmith.pipeline.tensors import Array

FILE = "assignment.json"
"""Beside the graph: what each group is computed in, and why."""
_NAMES = 3
_NO_NODE = "no node that computes in float32 is called"


def read(folder: Path) -> list[dict[str, str]]:
    """Read the precision of each group that came out, and why."""
    groups: list[dict[str, str]] = json.loads((folder / FILE).read_bytes())
    return groups


@dataclass(frozen=True)
class Assignment:
    """Decision on single groups, made before."""

    method: Method
    """Method whose ranges are taken."""
    signed: bool = False
    """True where activations with both signs are in int8 around 0, rather than in uint8 with a zero point."""
    corrected: bool = False
    """True where biases make up for the mean error of rounded weights."""
    keep: frozenset[str] = frozenset()
    """Groups that are not to be quantized."""
    floating: frozenset[str] = frozenset()
    """Groups that were chosen to stay in float32, also where the rest is lowered."""
    why: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, record: Artifact | None, precision: str, method: Method) -> "Assignment":
        """Read a record: a JSON list of ``{"group": …, "precision": …}``; others are optional.

        Raises:
            UsageError: it is something else.
        """
        if record is None:
            return cls(method)
        try:
            entries: list[dict[str, Any]] = json.loads(record.path.read_bytes())
            given = {str(entry["group"]): str(entry["precision"]) for entry in entries}
            why = {str(entry["group"]): str(entry.get("why", "")) for entry in entries}
            signed = any(entry.get("signed") for entry in entries)
            corrected = any(entry.get("corrected") for entry in entries)
            named = sorted({str(entry["method"]) for entry in entries if entry.get("method")})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{record.path.name} is no assignment ({type(error).__name__}: {error})",
                'give a JSON list of objects like {"group": "conv1", "precision": "int8", "why": ""}',
            ) from error
        methods = [method for method in METHODS if [method] == named]
        if named and not methods:
            raise UsageError(
                f"the assignment names ranges by {' and '.join(named)}", f"name one of {', '.join(METHODS)}"
            )
        low = precision.partition("+")[0]
        wide_groups = frozenset(name for name, width in given.items() if width != low)
        anyway = {str(entry["group"]) for entry in entries if entry.get("anyway")}
        floating = frozenset(name for name in wide_groups - anyway if given[name] == "fp32")
        return cls(methods[0] if methods else method, signed, corrected, wide_groups, floating, why)


class Precision(PrecisionPass, GraphPass):
    """Bring a float32 graph into another precision; ``int8`` and ``fp8`` need ``ranges`` of the same graph."""

    name: ClassVar[str] = "precision"
    tools: ClassVar[tuple[str, ...]] = ("ml-dtypes", "networkx", "numpy", "onnx", "onnx-ir", "onnxscript")
    stage: ClassVar[Stage] = "precision"
    reads: ClassVar[tuple[str, ...]] = ("quantization",)

    precision: Literal["fp16", "bf16", "int8", "int8+fp16", "int8-dynamic", "fp8", "int4-weights"]
    weight_bits: Literal[7, 8] = 8
    """Bits of int8 weights; 7 where the processor would saturate."""
    bias_correction: bool = False
    """Biases make up for the mean error of rounded weights; needs ranges with statistics by channel."""
    inputs_only: bool = False
    """Only inputs of products are rounded, and the rest is float32, so that each product's error can be measured; of
    fp16 and bf16, results of products, too."""
    keep: tuple[str, ...] = ()
    """Patterns of nodes and modules that stay in float32 in float16 and bfloat16; elsewhere an assignment says it."""

    @classmethod
    def requested(cls, options: Mapping[str, Any], request: PrecisionRequest) -> Iterable[Self]:
        """Make the one for a variant's precision, by its engine's rules where the recipe has none."""
        quantization = options["quantization"]
        values = {
            "precision": request.precision,
            "placement": request.placement,
            "method": "mse" if quantization.ranges == "auto" else quantization.ranges,
            "weight_bits": quantization.weight_bits or request.weight_bits,
            "bias_correction": quantization.bias_correction,
            "keep": () if KINDS[request.precision].searched else quantization.keep,
        }
        return (cls.model_validate(values),)

    def rounding_inputs(self) -> Self:
        placement = "inputs" if self.placement == "inputs" else "inputs+read outputs"  # of the two, it has more kernels
        return self.model_copy(update={"inputs_only": True, "placement": placement})

    def rounding_alone(self) -> Self:
        return self if self.rounds_outputs else self.rounding_inputs()

    @property
    def rounds_outputs(self) -> bool:
        return bool(self._low) and self._rules.outputs == "all"

    def rounding_outputs(self) -> Self | None:
        if self.placement == "inputs" or not KINDS[self.precision].calibrated:
            return None
        whole = self.model_copy(update={"inputs_only": False, "placement": "inputs+outputs"})
        return whole if whole.rounds_outputs else None

    def find_writers(self, model: "ir.Model") -> "Mapping[ir.Value, str]":
        return qdq.find_writers(model, self._rules) if self._low else cast_pairs.find_written(model)

    def explain_kind(self, kind: str) -> str:
        if not KINDS[self.precision].calibrated:
            return ""
        return qdq.explain_kind(kind, self._rules)

    @property
    def _rules(self) -> qdq.Rules:
        return qdq.Settings(self._number, self.placement, inputs_only=self.inputs_only).rules

    @property
    def _number(self) -> Literal["int8", "fp8"]:
        return "fp8" if self.precision == "fp8" else "int8"

    @property
    def remainder(self) -> Literal["fp32", "fp16", "bf16"]:
        """Type of operators that are not quantized; CPUs have no float16 kernels beside fp8 and int4."""
        if self.inputs_only or self._half:
            return "fp32"
        if self.precision in ("fp8", "int4-weights"):
            return "fp16" if self.placement == "inputs" else "fp32"
        return KINDS[self.precision].rest

    @property
    def _low(self) -> str:
        """Name of the precision of quantized groups; empty if none are."""
        return "" if self._half else self.precision.partition("+")[0]

    @property
    def _half(self) -> Half | None:
        """Float that the whole graph is lowered to; None where groups are quantized."""
        return self.precision if self.precision == "fp16" or self.precision == "bf16" else None

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Rewrite the graph, and write down what became of each group.

        Raises:
            InvalidGraph: the graph is too old or no float32 graph, or has nothing in it that the precision is for.
            UsageError: the records are of another graph, or there are no ranges.
            ModelError: nothing could be quantized or lowered.
        """
        if self._half and self.inputs_only:
            return self._round_alone(artifact, out, records)
        ranges = self._load_ranges(artifact, records)
        chosen = Assignment.read(records.get("assignment"), self.precision, self.method)
        model = edit.load(artifact.path)
        values = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
        total = sum(array.size for array in values if array is not None and array.dtype == ir.DataType.FLOAT)
        progress(f"rewriting for {self.precision}")
        if self._low:  # of others, what has a form in an older opset can be lowered all the same
            layers.require_opset(model, self.precision)
        done = self._quantize(model, ranges, chosen) if self._low else None
        groups = done.groups if done else layers.find_groups(model)
        lowered = self._lower(model, ranges, chosen)
        left = done.left if done else {}
        progress("writing")
        (out / FILE).write_text(
            json.dumps(self._list_entries(groups, left, chosen, lowered), indent=1) + "\n", encoding="utf-8"
        )
        return self.save(
            model,
            out,
            ", ".join(self._summarize(done, lowered, total)),
            notes=by_reason("not quantized", {name: chosen.why.get(name) or why for name, why in left.items()}),
        )

    def _round_alone(self, artifact: Artifact, out: Path, records: Records) -> Effect:
        """Round what each group reads and writes, but not of those that an assignment keeps."""
        assert self._half
        chosen, model = (
            Assignment.read(records.get("assignment"), self.precision, self.method),
            edit.load(artifact.path),
        )
        edit.fix_weights(model)
        names = {group.name for group in layers.find_groups(model)} - chosen.keep
        pairs = cast_pairs.round_products(model, self._half, names)
        return self.save(model, out, f"{pairs} pairs of casts")

    def _load_ranges(self, artifact: Artifact, records: Records) -> Ranges | None:
        if "ranges" in records:
            return load(records["ranges"].path, model_sha256=artifact.sha256)
        if KINDS[self.precision].calibrated or self.bias_correction:
            what = self.precision if KINDS[self.precision].calibrated else "bias correction"
            raise UsageError(f"{what} needs the ranges of activations, and got none", "calibrate the graph first")
        return None

    def _quantize(self, model: "ir.Model", ranges: Ranges | None, chosen: Assignment) -> Quantized:
        settings = qdq.Settings(
            number=self._number,
            placement=self.placement,
            method=chosen.method,
            signed=chosen.signed,
            weight_bits=self.weight_bits,
            rest="fp16" if self.remainder == "fp16" else "fp32",
            keep=chosen.keep,
            inputs_only=self.inputs_only,
        )
        correct = _make_corrector(ranges) if (self.bias_correction or chosen.corrected) and ranges else None
        if self.precision == "int8-dynamic":
            done = weights.quantize_dynamically(model, settings, correct)
        elif self.precision == "int4-weights":
            done = weights.quantize_to_int4(model, settings, ranges, correct)
        else:
            assert ranges is not None
            done = qdq.quantize(model, ranges, settings, correct)
        if not done.done and layers.ON_REQUEST not in done.left.values():
            raise ModelError(
                f"no product of this graph can be in {self.precision}: {_count_reasons(done.left.values())}",
                "look at the calibration data, or take fp16",
            )
        if self.placement == "inputs+outputs" or self.precision == "int8-dynamic":
            keep_clamps_apart(model)
            keep_weights_floating(model)
        return done

    def _lower(self, model: "ir.Model", ranges: Ranges | None, chosen: Assignment) -> Lowered | None:
        low = self._half or self.remainder
        if low == "fp32":
            return None
        known = ranges.tensors.items() if ranges else ()
        largest = {name: max(-span.minimum, span.maximum) if span.finite else math.inf for name, span in known}
        kept = chosen.floating | find_kept(self.keep, layers.list_float_nodes(model), _NO_NODE)
        if self._half:  # a bias of thousands is lost in the sum, and not in the product
            groups = [node for node in model.graph if node.name in chosen.floating]
            kept |= {str(node.name) for group in groups for node in layers.list_epilogue(group)}
        lowered = lower(model, low, keep=kept, largest=largest)
        mark_kept(model, lowered)
        if not self._low and not lowered.nodes:
            shown = _count_reasons(lowered.kept.values()) or "none computes in floating point"
            raise ModelError(f"no node of this graph can be in {self.precision}: {shown}", lowered.remedy)
        return lowered

    def _list_entries(
        self, groups: Sequence[QuantizableOp], left: Mapping[str, str], chosen: Assignment, lowered: Lowered | None
    ) -> list[dict[str, str]]:
        """List each group's precision now, and the reason of those that are not quantized."""
        halved = set(lowered.nodes) if lowered else set()
        reasons = {**(lowered.kept if lowered else {}), **left, **{key: why for key, why in chosen.why.items() if why}}
        entries = []
        for group in groups:
            precision, why = self._low, ""
            if not self._low or group.name in left:
                precision = lowered.dtype if lowered and group.name in halved else group.given
                why = chosen.why.get(group.name) or reasons.get(group.name, "")
            names = {"group": group.name, "module": group.module, "operator": group.operator}
            entries.append({**names, "precision": precision, "why": why})
        return entries

    def _summarize(self, done: Quantized | None, lowered: Lowered | None, total: int) -> list[str]:
        """Describe the outcome; ``total`` is the number of float weights that there were."""
        parts = []
        if done is not None:
            in_groups = sum(group.parameters for group in done.groups)  # Constant nodes may hold some of them
            share = sum(group.parameters for group in done.done) / max(total, in_groups, 1)
            parts += [f"{done.pairs} Q/DQ pairs"] if done.pairs else []
            parts += [f"{len(done.done)} of {len(done.groups)} products in {self._low}", f"{share:.1%} of weights"]
        if lowered is not None:
            parts.append(f"{len(lowered.nodes)} nodes in {lowered.dtype}, {len(lowered.casts)} casts")
        return parts


def _make_corrector(ranges: Ranges) -> Correct:
    """Make the correction of a weight's mean error, for inputs whose mean is known."""

    def correct(node: "ir.Node", weight: Array, dequantized: Array) -> None:
        known = layers.find_channel_statistics(node, ranges)
        if known is not None:
            correct_bias(node, weight, dequantized, np.array(known.mean))

    return correct


def _count_reasons(reasons: Collection[str]) -> str:
    return "; ".join(f"{count} ×: {why}" for why, count in Counter(reasons).most_common(_NAMES))


# Patterns that ONNX Runtime's CPU provider fuses to its own loss, or stumbles over, written such that it does not.


def keep_clamps_apart(model: "ir.Model") -> int:
    """Write a Relu or Clip behind a quantized MatMul or Gemm as Max and Min; return how often that was.

    ONNX Runtime 1.31 takes a clamp for part of the product, and where it cannot be, as no QuantizeLinear that includes
    it follows, leaves the product in floats behind a weight that is dequantized at every call.
    """
    writer = Writer(model.graph)
    count = 0
    for node in list(model.graph):
        maker = layers.get_input(node, 1).producer() if node.op_type in layers.MATRIX_PRODUCTS else None
        if maker is None or maker.op_type != "DequantizeLinear":
            continue
        clamp, index = edit.find_only_reader(node.outputs[0])
        if clamp is None or index or clamp.op_type not in ("Relu", "Clip"):
            continue
        reader, _ = edit.find_only_reader(clamp.outputs[0])
        if reader is None or reader.op_type != "QuantizeLinear":
            _write_out_clamp(clamp, writer)
            count += 1
    return count


_ROUNDED_BY_RUNTIME = ("Conv", "ConvTranspose", "Gemm")


def keep_weights_floating(model: "ir.Model") -> int:
    """Have products with float weights between pairs read a scale for each channel; return how many there were.

    ONNX Runtime (1.21 and later) rounds such a weight to int8 by itself, with one scale for the whole tensor, if its
    product reads what one scale dequantizes (WeightBiasQuantization). The scales of all channels are the same here.
    """
    writer = Writer(model.graph)
    count = 0
    for node in list(model.graph):
        weight = edit.read_constant(node.inputs[1]) if node.op_type in _ROUNDED_BY_RUNTIME else None
        restore = layers.get_input(node, 0).producer() if weight is not None else None
        if weight is None or restore is None or restore.op_type != "DequantizeLinear" or not _is_read_rounded(node):
            continue
        channels = _count_inputs(node, tuple(weight.shape.numpy()))
        levels, scale, zero = (layers.get_input(restore, index) for index in range(3))
        numbers = [edit.read_constant(value) for value in (scale, zero)]
        if any(each is None or each.size > 1 for each in numbers):
            continue
        parts = [
            writer.share_constant(f"{value.name}_by_channel", np.repeat(each.numpy().reshape(1), channels))
            for value, each in zip((scale, zero), numbers, strict=True)
            if each is not None
        ]
        name = f"{restore.outputs[0].name}_by_channel"
        attributes = {"axis": 0 if node.attributes.get_int("transA", 0) else 1}
        own = writer.node("DequantizeLinear", [levels, *parts], [name], attributes=attributes, before=node)
        own.outputs[0].type, own.outputs[0].shape = restore.outputs[0].type, restore.outputs[0].shape
        node.replace_input_with(0, own.outputs[0])
        count += 1
    writer.finish(model)
    return count


def _is_read_rounded(node: "ir.Node") -> bool:
    """Tell whether all that reads a value is a QuantizeLinear, perhaps behind clamps."""
    reader, _ = edit.find_only_reader(node.outputs[0])
    while reader is not None and reader.op_type in ("Relu", "Clip"):
        reader, _ = edit.find_only_reader(reader.outputs[0])
    return reader is not None and reader.op_type == "QuantizeLinear"


def _count_inputs(node: "ir.Node", weight: tuple[int, ...]) -> int:
    """Count the channels that a product reads, along axis 1 of its input, or 0 where Gemm transposes it."""
    return weight[0] if inputs_first(node) else weight[1] * node.attributes.get_int("group", 1)


def _write_out_clamp(clamp: "ir.Node", writer: Writer) -> None:
    value = layers.get_input(clamp, 0)
    bounds = [*clamp.inputs[1:], None, None][:2]
    if clamp.op_type == "Relu":
        bounds = [writer.share_constant("zero", np.zeros((), np.float32)), None]
    for operator, bound in zip(("Max", "Min"), bounds, strict=True):
        if bound is not None:
            name = f"{clamp.outputs[0].name}_{operator}"
            value = writer.node(operator, [value, bound], [name], before=clamp).outputs[0]
    if value is not clamp.inputs[0]:
        writer.replace(clamp, [value])
