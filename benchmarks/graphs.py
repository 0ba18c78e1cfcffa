"""ONNX graphs of the zoo's models in several precisions, for benchmarks that build them with TensorRT-RTX.

    python benchmarks/graphs.py --out build/graphs --models resnet50 unet --precisions fp32 int8

A graph lies in FOLDER/MODEL-PRECISION/model.onnx, large weights beside it; what is there already is left alone. Inputs
keep the zoo's dynamic dimensions. Calibration samples are random, so the quantised graphs are good for measuring speed
and memory, and for nothing else.

What is quantised is symmetric and in Q/DQ form: int8 and fp8 (E4M3) weights per output channel and activations per
tensor, of Conv, MatMul and Gemm; int4 weights by blocks of MatMul and Gemm. The rest is float32 in ``int8`` and
float16 in ``int8+fp16``, ``fp8`` and ``int4-weights``.
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static

from enginesmith.calibration.dataset import synthetic
from enginesmith.pipeline import graph, onnx_file
from enginesmith.pipeline.passes import torch_exporters
from enginesmith.pipeline.passes.export import Export, export_module
from enginesmith.pipeline.passes.rewriting import rewrite
from enginesmith.pipeline.passes.simplify import Simplify, simplify_file
from enginesmith.pipeline.source import resolve
from enginesmith.pipeline.tensors import Array
from enginesmith.pipeline.torch_model import LoadedModel, LoadOptions, load

MODELS = ("resnet50", "mobilenet_v2", "unet", "vit_b16", "bert_base", "lstm")
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int8+fp16", "fp8", "int4-weights")
SHAPES = {"bert_base": ("--shape", "sequence=16:128:384")}
"""Options for dynamic dimensions other than the batch, which an ONNX file brings no range for."""
_DECOMPOSED = "fp32-decomposed"
"""What quantised graphs are made from, kept beside them: float32, attention's products as MatMul nodes of their own."""
_OPSET = Export().opset
_CALIBRATION_BATCHES = 2
_BLOCKS = (128, 64, 32)
_INT8_MAX, _INT4_MAX = 127.0, 7.0
_FP8_MAX = 448.0
_FLOAT16_TINY = float(np.finfo(np.float16).tiny)


class NothingToQuantise(ValueError):
    """The graph has no node that the precision is for."""


def make(model: str, precision: str, folder: Path) -> Path:
    """Path of the graph of a zoo model in a precision; made unless it is there.

    Raises:
        NothingToQuantise: ``int4-weights`` of a model without matrix products.
    """
    target = folder / f"{model}-{precision}"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            out = Path(scratch, "whole")
            out.mkdir()
            _write(model, precision, folder, out)
            onnx_file.check(out / graph.FILE)
            out.rename(target)  # at once, so that what is there is complete
    return target / graph.FILE


def _write(model: str, precision: str, folder: Path, out: Path) -> None:
    match precision:
        case "fp32" | "fp32-decomposed":
            _export(model, Export(attention="decomposed" if precision == _DECOMPOSED else "fused"), out)
        case "fp16":
            _export_typed(model, torch.float16, ir.DataType.FLOAT16, out)
        case "bf16":
            _export_typed(model, torch.bfloat16, ir.DataType.BFLOAT16, out)
        case "int8":
            _quantise_int8(model, make(model, _DECOMPOSED, folder), out)
        case "int8+fp16":
            quantised = graph.load(make(model, "int8", folder))
            _floor_scales(quantised)
            graph.save(_retyped(quantised, ir.DataType.FLOAT16), out)
        case "fp8":
            quantised = graph.load(make(model, "int8", folder))
            _int8_to_fp8(quantised, graph.load(make(model, _DECOMPOSED, folder)))
            _floor_scales(quantised)
            graph.save(_retyped(quantised, ir.DataType.FLOAT16), out)
        case "int4-weights":
            floating = graph.load(make(model, _DECOMPOSED, folder))
            _quantise_int4(floating)
            graph.save(_retyped(floating, ir.DataType.FLOAT16), out)
        case _:
            raise ValueError(f"unknown precision {precision!r}, known are {', '.join(PRECISIONS)}")


def _load(model: str) -> LoadedModel:
    return load(resolve(model), LoadOptions())


def _quiet(text: str) -> None:
    del text


def _export(model: str, options: Export, out: Path) -> None:
    """The product's own float32 graph."""
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        effect = export_module(_load(model), Path(scratch), options, _quiet)
        simplify_file(Path(scratch, effect.file), out, Simplify().external_data_bytes, _quiet)


def _export_typed(model: str, dtype: torch.dtype, onnx_dtype: ir.DataType, out: Path) -> None:
    """The graph of the module with all its floats in ``dtype``, inputs and outputs too."""
    loaded = _load(model)
    loaded.module.to(dtype)
    example = {name: value.to(dtype) if value.is_floating_point() else value for name, value in loaded.example.items()}
    exported = torch_exporters.dynamo(dataclasses.replace(loaded, example=example), _OPSET, _quiet)
    graph.rename(exported.graph.inputs, (spec.name for spec in loaded.signature.inputs))
    graph.rename(exported.graph.outputs, (spec.name for spec in loaded.signature.outputs))
    graph.tidy(exported, wrapper="model")
    _retyped(exported, onnx_dtype)  # folded constants (of bf16 Conv with BatchNormalization) come out in float32
    rewrite(exported)
    graph.save(exported, out)


class _Samples(CalibrationDataReader):  # type: ignore[misc]
    """A few batches of random feeds like the example."""

    def __init__(self, loaded: LoadedModel) -> None:
        inputs, sizes = loaded.signature.inputs, loaded.dynamic_sizes
        example = {name: value.numpy() for name, value in loaded.example.items()}
        seeds = range(_CALIBRATION_BATCHES)
        self._feeds = (synthetic(inputs, example, sizes, sizes["batch"], seed).arrays for seed in seeds)

    def get_next(self) -> Any:
        """The next feeds, None at the end."""
        return next(self._feeds, None)


def _quantise_int8(model: str, source: Path, out: Path) -> None:
    """Calibrate on random samples and insert Q/DQ; biases stay as they are, for TensorRT refuses int32 ones."""
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        written = Path(scratch, graph.FILE)
        quantize_static(
            source,
            written,
            _Samples(_load(model)),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "MatMul", "Gemm"],
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False},
        )
        graph.save(graph.load(written), out)


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _array(value: ir.Value) -> Array:
    assert value.const_value is not None, value
    return value.const_value.numpy()


def _set(value: ir.Value, array: Array) -> None:
    """Give an initialiser another content, its dtype the array's."""
    value.const_value = ir.tensor(np.asarray(array), name=value.name)
    value.dtype = value.const_value.dtype


def _int8_to_fp8(quantised: ir.Model, floating: ir.Model) -> None:
    """Turn int8 Q/DQ into E4M3 with the same ranges; weights are quantised anew from the floating graph."""
    nodes = [node for node in quantised.graph if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    for scale in {_input(node, 1) for node in nodes}:
        _set(scale, _array(scale) * np.float32(_INT8_MAX / _FP8_MAX))
    for zero_point in {_input(node, 2) for node in nodes}:
        _set(zero_point, _array(zero_point).astype(ml_dtypes.float8_e4m3fn))
    for node in nodes:
        value = _input(node, 0)
        if value.const_value is not None:
            weight = _array(floating.graph.initializers[str(value.name).removesuffix("_quantized")])
            axis = node.attributes.get_int("axis", 1)
            scales = np.expand_dims(_array(_input(node, 1)), [i for i in range(weight.ndim) if i != axis])
            _set(value, (weight / scales).astype(ml_dtypes.float8_e4m3fn))


def _floor_scales(quantised: ir.Model) -> None:
    """Raise activations' scales to what float16 holds: signals vanish in mobilenet_v2 with its random weights."""
    for node in quantised.graph:
        if node.op_type == "QuantizeLinear":
            scale = _input(node, 1)
            _set(scale, np.maximum(_array(scale), np.float32(_FLOAT16_TINY)))


def _quantise_int4(model: ir.Model) -> None:
    """Put a blocked DequantizeLinear before every constant matrix of MatMul and Gemm.

    Raises:
        NothingToQuantise: there is none.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type in ("MatMul", "Gemm") and _input(node, 1).const_value is not None:
            axis = 1 if node.attributes.get_int("transB", 0) else 0
            matrix = _array(_input(node, 1))
            block = next((size for size in _BLOCKS if matrix.shape[axis] % size == 0), 0)
            if matrix.ndim == 2 and block:
                node.replace_input_with(1, _dequantised(model.graph, node, matrix, axis, block))
                count += 1
    if not count:
        raise NothingToQuantise("no MatMul or Gemm has a constant matrix that divides into blocks")
    common.RemoveUnusedNodesPass()(model)


def _dequantised(body: ir.Graph, node: ir.Node, matrix: Array, axis: int, block: int) -> ir.Value:
    """A matrix as int4 with one scale for each block along ``axis``, behind a new DequantizeLinear."""
    blocks = np.stack(np.split(matrix, matrix.shape[axis] // block, axis), axis)
    scale = np.maximum(np.abs(blocks).max(axis + 1) / _INT4_MAX, _FLOAT16_TINY).astype(np.float32)
    levels = np.rint(matrix / np.repeat(scale, block, axis)).astype(ml_dtypes.int4)
    name = f"{_input(node, 1).name}_{node.name}"
    parts = {"int4": ir.tensor(levels), "scale": ir.tensor(scale)}
    values = [ir.val(f"{name}_{part}", const_value=tensor) for part, tensor in parts.items()]
    for value in values:
        body.register_initializer(value)
    new = ir.node("DequantizeLinear", values, {"axis": axis, "block_size": block})
    body.insert_before(node, new)
    return new.outputs[0]


def _retyped(model: ir.Model, dtype: ir.DataType) -> ir.Model:
    """Change every float32 of a graph to ``dtype``: weights, scales, inputs, outputs, targets of casts."""
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    for value in model.graph.initializers.values():
        if value.dtype == ir.DataType.FLOAT:
            _set(value, _array(value).astype(dtype.numpy()))
    outputs = (value for node in model.graph for value in node.outputs)
    for value in (*model.graph.inputs, *outputs):
        if value.dtype == ir.DataType.FLOAT:
            value.dtype = dtype
    for node in model.graph:
        for attribute in list(node.attributes.values()):
            if attribute.name in ("to", "dtype", "output_dtype") and attribute.value == ir.DataType.FLOAT:
                node.attributes[attribute.name] = ir.AttrInt64(attribute.name, dtype)
    common.NameFixPass()(model)
    return model


def main() -> None:
    """Make the graphs named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    arguments = parser.parse_args()
    for model in arguments.models:
        for precision in arguments.precisions:
            start = time.perf_counter()
            try:
                result = str(make(model, precision, arguments.out))
            except NothingToQuantise as error:
                result = f"not made: {error}"
            print(f"{model:14}{precision:14}{time.perf_counter() - start:6.1f} s  {result}", flush=True)


if __name__ == "__main__":
    main()
