"""Find optimizations of ONNX Runtime that get a graph wrong, crash or slow down, and products that it would fuse."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline.errors import InvalidGraph
from enginesmith.pipeline.frameworks.onnx import model_file, traversal
from enginesmith.pipeline.system.device import Device

if TYPE_CHECKING:
    import onnx

_WRONG_IN_HALF = ("WeightBiasQuantization",)
"""Optimizations that multiply two scales in their own type, and get next to nothing in float16."""
_WRONG_IN_FLOAT8 = (*_WRONG_IN_HALF, "ReluQuantRewrite", "ClipQuantRewrite", "QDQSelectorActionTransformer")
"""Optimizations that take all pairs for pairs of integers: biases become int32, also those that are too large for it; a
Relu before a pair goes, as if what rounds stored nothing below 0; a Clip ends loading; and products become kernels of
integers, which refuse to load float8, or lose what they read."""
_CRASHING_ON_CPU = ("MatmulTransposeFusion",)
"""Optimizations that swap a Cast with the Transpose before it, and leave it without a schema, which ends the process
with a SIGSEGV where the next one looks at it (microsoft/onnxruntime#28392, also in 1.31)."""
SLOW_ON_CPU = ("SkipLayerNormFusion", "BiasGeluFusion")
"""Optimizations that fuse an Add with what reads it, into kernels that take longer on the CPU than the two operators:
BERT-base in 1.31 (1 thread, sequence 128) spends 11.7 instead of 2.4 ms on the first (AVX-512 VNNI; AVX2: 13.8 instead
of 3.5 ms), and 4.5 instead of 3.7 ms on the second."""

OPTIMIZERS = (
    *("ConstantFolding", "CommonSubexpressionElimination", "TransposeOptimizer", "ReshapeFusion", "MatMulAddFusion"),
    *("GemmSumFusion", "GemmTransposeFusion", "GemmActivationFusion", "MatmulTransposeFusion", "MatMulScaleFusion"),
    *("MatMulActivationFusion", "MatMulBNFusion", "ConvAddFusion", "ConvMulFusion", "ConvBNFusion"),
    *("ConvActivationFusion", "ConvAddActivationFusion", "PadFusion", "FuseReluClip", "DivMulFusion"),
    *("GeluFusionL1", "GeluFusionL2", "QuickGeluFusion", "FastGeluFusion", "LayerNormFusionL1", "LayerNormFusionL2"),
    *("SimplifiedLayerNormFusion", "AttentionFusion", "EmbedLayerNormFusion", "GroupQueryAttentionFusion"),
    *("BiasSoftmaxFusion", "BiasDropoutFusion", "GatherToSliceFusion", "GatherSliceToSplitFusion"),
    *("ConcatSliceElimination", "CastElimination", "CastChainElimination", "ExpandElimination", "NoopElimination"),
    *("UnsqueezeElimination", "EliminateSlice", "EliminateIdentity", "PreShapeNodeElimination", "NotWhereFusion"),
    *("SliceConcatToSpaceToDepthFusion", "QDQPropagationTransformer", "QDQSelectorActionTransformer"),
    *("QDQS8ToU8Transformer", "QDQFinalCleanupTransformer", "Avx2WeightS8ToU8Transformer", "WeightBiasQuantization"),
    *("ReluQuantRewrite", "ClipQuantRewrite"),
    *("MatMulIntegerToFloatFusion", "DynamicQuantizeMatMulFusion", "NchwcTransformer", "NhwcTransformer"),
)
"""Names of ONNX Runtime's optimizations that can be left out, one by one, to find the one that gets a graph wrong."""


def disabled_optimizers(path: Path, device: Device, without: Sequence[str] = ()) -> list[str]:
    """List optimizations that get a graph wrong, or crash or slow it down on this device, by ONNX Runtime's names.

    Those that are left out anyway, as ``without`` says, need not be among them: to find out takes a copy of the graph.
    """
    wrong = find_wrong_optimizers(path)
    if device.kind != "cpu":
        return [*wrong]
    crashing = () if {*_CRASHING_ON_CPU} <= {*without} else _find_crashing_optimizers(path)
    return [*wrong, *crashing, *SLOW_ON_CPU]


def _read_if_named(path: Path, *operators: bytes) -> "onnx.ModelProto | None":
    """Parse a graph that has operators with these in their names; None if it has not, or cannot be read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            has_all = all(content.find(operator) >= 0 for operator in operators)
        return model_file.read(path) if has_all else None
    except (OSError, ValueError, InvalidGraph):  # ValueError: an empty file
        return None


def quantizes_weights_alone(path: Path) -> bool:
    """Tell whether a matrix product reads a weight that is stored in few bits, and another value that is a float."""
    model = _read_if_named(path, b"DequantizeLinear", b"MatMul") or _read_if_named(path, b"DequantizeLinear", b"Gemm")
    if model is None:
        return False
    made = {node.output[0]: node for node in traversal.nodes(model) if node.op_type in ("Cast", "DequantizeLinear")}
    stored = {tensor.name for tensor in traversal.tensors(model)}

    def is_unpacked(name: str) -> bool:
        while (node := made.get(name)) is not None and node.op_type == "Cast":
            name = node.input[0]
        return node is not None

    def is_weight(name: str) -> bool:
        while (node := made.get(name)) is not None:
            name = node.input[0]
        return name in stored

    products = (node for node in traversal.nodes(model) if node.op_type in ("MatMul", "Gemm"))
    return any(
        is_unpacked(node.input[1]) and is_weight(node.input[1]) and not is_unpacked(node.input[0]) for node in products
    )


def _find_crashing_optimizers(path: Path) -> tuple[str, ...]:
    """Find the optimizations that crash where a product may read a cast of what was transposed.

    Casts are also inserted by ONNX Runtime, where an operator has no kernel for float16.
    """
    model = _read_if_named(path, b"Transpose", b"MatMul")
    if model is None:
        return ()
    casts = {node.output[0] for node in traversal.nodes(model) if node.op_type == "Cast" and node.output}
    products = (node for node in traversal.nodes(model) if node.op_type == "MatMul")
    read = any(not casts.isdisjoint(node.input) for node in products)
    return _CRASHING_ON_CPU if read or _has_float16(model) else ()


def _has_float16(model: "onnx.ModelProto") -> bool:
    """Look for float16 in constants, in inputs, and in what operators make."""
    types = {tensor.data_type for tensor in traversal.tensors(model)}
    types |= {value.type.tensor_type.elem_type for value in model.graph.input}
    made = (entry.i for node in traversal.nodes(model) for entry in node.attribute if entry.name in ("to", "dtype"))
    return any(model_file.dtype_name(dtype) == "float16" for dtype in (*types, *set(made)))


def find_wrong_optimizers(path: Path) -> tuple[str, ...]:
    """Find the optimizations that get a graph wrong by the types of its Q/DQ pairs; graphs without are not parsed."""
    model = _read_if_named(path, b"QuantizeLinear")
    if model is None:
        return ()
    pairs = [node for node in traversal.nodes(model) if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    constants = [(tensor.name, model_file.dtype_name(tensor.data_type)) for tensor in traversal.tensors(model)]
    if any(dtype.startswith("float8") for _, dtype in constants):
        return _WRONG_IN_FLOAT8
    scales = {node.input[1] for node in pairs if len(node.input) > 1}
    half = any(name in scales and dtype in ("float16", "bfloat16") for name, dtype in constants)
    return _WRONG_IN_HALF if half else ()
