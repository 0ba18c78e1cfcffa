"""Quantize a float graph by NNCF, Intel's toolkit, in the place of enginesmith's own rules and search.

Its post-training quantization gets the calibration data that our own would get, and is called as its documentation
advises for CPUs: asymmetric activations (preset MIXED), model type TRANSFORMER where there is attention (SmoothQuant,
and normalizations in floating point), fast bias correction. It takes and gives ONNX, so all other steps are the same.
With OpenVINO 2026.4 on AVX2, its ONNX graphs are 0.9 to 1.3 times as fast as those that it makes of OpenVINO's own.
Accuracy is for our verdicts: nothing is searched, and what fails stays failed, unless ``keep`` names groups.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from enginesmith.calibration.ranges import FILE
from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.engines.telemetry import import_without_telemetry
from enginesmith.pipeline.errors import MissingCapability, ModelError, install_command
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, ir
from enginesmith.pipeline.frameworks.onnx.coverage import find_dequantized
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.passes.quantize import layers
from enginesmith.pipeline.passes.run import check_graph
from enginesmith.pipeline.system import software
from enginesmith.pipeline.tasks.base import Inputs, Task
from enginesmith.pipeline.tasks.calibrate import Feeder, Feeding

if TYPE_CHECKING:
    import onnx

_NAME = "nncf"
Preset = Literal["performance", "mixed"]
"""NNCF's words for symmetric weights with activations in int8 around 0, or in uint8 with a zero point."""


def require_nncf() -> None:
    """Insist that NNCF is installed, without importing it.

    Raises:
        MissingCapability: it is not; says how to install it.
    """
    if software.version(_NAME) is None:
        raise MissingCapability("--quantizer nncf needs NNCF, which is not installed", install_command(_NAME))


class QuantizeWithNncf(Task):
    """Make an int8 graph with Q/DQ pairs where NNCF places them."""

    title: ClassVar[str] = "pass"
    produces: ClassVar[Kind] = "onnx"
    other_tools: ClassVar[tuple[str, ...]] = (_NAME, *evaluator.TOOLS, "numpy", "onnx", "onnx-ir")

    feeder: Feeder
    weight_bits: Literal[7, 8]
    """Bits of weights; 7 where the processor would saturate."""
    keep: tuple[str, ...] = ()
    """Patterns of groups that stay in floating point."""
    preset: Preset = "mixed"
    external_data_bytes: int = edit.EXTERNAL_DATA_BYTES

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        """Quantize, and write down which samples the ranges come from; the ranges themselves stay with NNCF.

        Raises:
            MissingCapability: NNCF is not installed.
            InvalidGraph: the graph is too old or no float32 graph, or has nothing to quantize.
            ModelError: NNCF does not take it.
            UsageError: ``keep`` names no group.
        """
        require_nncf()
        artifact = inputs["model"]
        feeding, reads = self.feeder.open(artifact, inputs["reference"])
        model = edit.load(artifact.path)
        layers.require_opset(model, "int8")
        groups = layers.prepare(model, "int8")
        usable = [group for group in groups if not group.reason]
        layers.require_products(model, groups, "int8", usable)
        float_groups = layers.find_kept(self.keep, groups)
        progress(f"NNCF is quantizing, with {len(feeding)} feeds")
        ir.external_data.load_to_model(model)  # NNCF looks for weights beside the graph in another folder
        quantized_model, settings = self._quantize(ir.to_proto(model), feeding, groups, sorted(float_groups))
        if self.preset == "mixed":
            _make_unsigned(quantized_model.graph)
        known = find_dequantized(quantized_model.graph.node)
        names = {group.name for group in usable}
        low = sum(node.name in names and known.issuperset(node.input[:2]) for node in quantized_model.graph.node)
        if not low:
            raise ModelError("NNCF left all products of this graph in floating point", "omit --quantizer nncf")
        (out / FILE).write_text(f'{{"provenance": {feeding.provenance.model_dump_json()}}}\n', encoding="utf-8")
        pairs = sum(node.op_type == "QuantizeLinear" for node in quantized_model.graph.node)
        summary = f"{pairs} Q/DQ pairs, {low} of {len(groups)} products in int8; NNCF {software.version(_NAME)}: "
        effect = edit.save_with_summary(
            ir.from_proto(quantized_model), out, self.external_data_bytes, summary + settings
        )
        return check_graph(_NAME, artifact, out, effect).model_copy(update={"reads": reads})

    def _quantize(
        self,
        model: "onnx.ModelProto",
        feeding: Feeding,
        groups: Sequence[layers.QuantizableOp],
        float_groups: list[str],
    ) -> "tuple[onnx.ModelProto, str]":
        """Call NNCF; return the graph and the settings in words."""
        nncf = import_without_telemetry(_NAME)
        nncf.set_log_level(logging.ERROR)
        attention = any(group.operator == "Attention" or group.reason == layers.TWO_ACTIVATIONS for group in groups)
        kind = nncf.ModelType.TRANSFORMER if attention else None
        overflow = nncf.OverflowFix.ENABLE if self.weight_bits == 7 else nncf.OverflowFix.DISABLE
        words = [f"preset {self.preset}", "model type transformer" if kind else "", f"{self.weight_bits}-bit weights"]
        quantize = partial(
            nncf.quantize,
            model,
            preset=nncf.QuantizationPreset(self.preset),
            target_device=nncf.TargetDevice.CPU,
            subset_size=len(feeding),
            fast_bias_correction=True,
            model_type=kind,
            ignored_scope=nncf.IgnoredScope(names=float_groups) if float_groups else None,
        )
        advanced = partial(nncf.AdvancedQuantizationParameters, overflow_fix=overflow)
        try:
            try:
                quantized_model = quantize(nncf.Dataset(feeding), advanced_parameters=advanced())
            except AttributeError:  # NNCF 3.4: SmoothQuant finds no weight behind a Transpose, as of a tied embedding
                off = nncf.AdvancedSmoothQuantParameters(convolution=-1, matmul=-1)
                parameters = advanced(smooth_quant_alphas=off)
                quantized_model = quantize(nncf.Dataset(feeding), advanced_parameters=parameters)
                words.append("without SmoothQuant, which failed")
        except _list_errors(nncf) as error:
            raise ModelError(f"NNCF cannot quantize this graph: {error}", "omit --quantizer nncf") from error
        return quantized_model, ", ".join(filter(None, (*words, "fast bias correction", f"{len(feeding)} feeds")))


def _make_unsigned(graph: "onnx.GraphProto") -> None:
    """Write int8 activations as uint8, whose zero points are greater by 128: the same numbers on the same grid.

    ONNX Runtime 1.31 does so itself, but refuses the graph where it also moved a pair over an Unsqueeze (Conv1d).
    """
    from onnx import TensorProto, numpy_helper

    constants = {tensor.name: tensor for tensor in graph.initializer}
    pairs = [
        node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.input) > 2
    ]
    activations = [node for node in pairs if node.op_type == "QuantizeLinear" and node.input[0] not in constants]
    signed = {node.output[0] for node in activations if constants[node.input[2]].data_type == TensorProto.INT8}
    replaced = set()
    for node in pairs:
        if signed.isdisjoint((node.input[0], node.output[0])):
            continue
        zero = node.input[2]
        replaced.add(zero)
        node.input[2] = f"{zero}_uint8"
        if node.input[2] not in constants:
            shifted = (numpy_helper.to_array(constants[zero]).astype("int16") + 128).astype("uint8")
            constants[node.input[2]] = numpy_helper.from_array(shifted, node.input[2])
            graph.initializer.append(constants[node.input[2]])
    for name in replaced.difference(*(node.input for node in graph.node)):
        graph.initializer.remove(constants[name])
    for value in graph.value_info:
        if value.name in signed:
            value.type.tensor_type.elem_type = TensorProto.UINT8


def _list_errors(nncf: Any) -> tuple[type[Exception], ...]:
    """List what NNCF raises: its own exceptions, which have no class in common, and those of libraries under it."""
    own = (kind for kind in vars(nncf.errors).values() if isinstance(kind, type) and issubclass(kind, Exception))
    return (RuntimeError, ValueError, LookupError, TypeError, AttributeError, *own)
