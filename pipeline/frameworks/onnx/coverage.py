"""Compute which share of a graph's work and of its weights is in which precision."""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline.frameworks.onnx.macs import CONVERTERS, QUANTISERS, Structure, count_products
from enginesmith.pipeline.frameworks.onnx.shapes import View, attributes, view
from enginesmith.pipeline.frameworks.onnx.shares import HALF, QUANTISED, Coverage

if TYPE_CHECKING:
    import onnx


# Islands: how often a graph changes between low precision and the rest, which is what reformatting costs.

_HALF = ("float16", "bfloat16")
_FUSED = (
    *(
        "Add",
        "Mul",
        "Relu",
        "Clip",
        "LeakyRelu",
        "Sigmoid",
        "MaxPool",
        "AveragePool",
        "GlobalAveragePool",
        "ReduceMean",
    ),
    *("Concat", "Resize", "Pad", "Where", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split"),
)
"""What engines have integer kernels for, or move as it is."""
_RECTIFIERS = ("Relu", "Clip")
_NARROW = ("int8", "uint8", "float8e4m3fn", "float8e5m2", "int4", "uint4", "float4e2m1")


def count(structure: Structure, products: AbstractSet[str], *, halves: bool, executed: bool) -> int:
    """Find connected runs of operators in low precision; ``products`` are the ones known to be in it.

    In a graph still to be built (not ``executed``), an operator between DequantizeLinear and QuantizeLinear is in low
    precision, as engines fuse that; and a value quantised and dequantised between two of them connects them.
    """
    if not products:
        return 0
    low = dict.fromkeys(products)
    for name, node in structure.seen.nodes.items():
        if name not in low and node.op_type not in (*CONVERTERS, "Cast", "Constant"):
            typed = halves or executed
            if _typed_low(node, structure, halves) if typed else _between_pairs(node, structure, low):
                low[name] = None
    groups = {name: name for name in low}
    for name in low:
        for value in structure.seen.nodes[name].input:
            before = structure.makers.get(_origin(value, structure, through_pairs=not halves and not executed))
            if before in groups and (halves or not executed or _is(value, structure, _NARROW)):
                groups[_root(groups, name)] = _root(groups, before)
    return len({_root(groups, name) for name in groups})


def _typed_low(node: "onnx.NodeProto", structure: Structure, halves: bool) -> bool:
    """Tell whether a node reads and writes values of low precision themselves."""
    kinds = _HALF if halves else _NARROW
    reads = any(_is(value, structure, kinds) for value in node.input if value not in structure.seen.constants)
    return reads and any(_is(value, structure, kinds) for value in node.output)


def _between_pairs(node: "onnx.NodeProto", structure: Structure, low: "dict[str, None]") -> bool:
    """Whether all that a node reads was dequantised or is in low precision, and all it writes is quantised at once."""
    if node.op_type not in _FUSED:
        return False
    given = [value for value in node.input if value and value not in structure.seen.constants]
    if not given or not all(_is(value, structure, (*_HALF, "float32")) for value in given):
        return False
    makers = [structure.maker(value) for value in given]
    if not all(
        maker is not None and (maker.op_type == "DequantizeLinear" or structure.makers[value] in low)
        for value, maker in zip(given, makers, strict=True)
    ):
        return False
    return _quantised_at_once(node, structure)


def _quantised_at_once(node: "onnx.NodeProto", structure: Structure) -> bool:
    """Fold a Relu into quantisation, where it costs nothing: it is part of how the result is rounded."""
    readers = list(structure.readers_of(node))
    return bool(readers) and all(
        reader.op_type in QUANTISERS or (reader.op_type in _RECTIFIERS and _quantised_at_once(reader, structure))
        for reader in readers
    )


def _is(value: str, structure: Structure, dtypes: tuple[str, ...]) -> bool:
    return structure.seen.value(value).dtype in dtypes


def _origin(value: str, structure: Structure, through_pairs: bool) -> str:
    return structure.source(value, CONVERTERS) if through_pairs else value


def _root(groups: "dict[str, str]", name: str) -> str:
    while groups[name] != name:
        name = groups[name]
    return name


_PRECISIONS = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8e4m3fn": "fp8",
    "float8e5m2": "fp8",
    "float4e2m1": "fp4",
    "int16": "int16",
    "uint16": "int16",
    "int8": "int8",
    "uint8": "int8",
    "int4": "int4",
    "uint4": "int4",
}
_INTEGER_KERNELS = (
    *("QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"),
    *("QGemm", "QAttention", "DynamicQuantizeLSTM"),
)
_EIGHT_BITS = ("int8", "fp8", "int16", "fp4")
"""What products are computed in if both operands are; of fewer bits there are only weights."""
_PACKED = ("MatMulNBits", "MatMulBnb4")
_INT8_ACCURACY = 4
"""MatMulNBits' ``accuracy_level`` that lets it round activations to int8."""
_OPERANDS = {"LSTM": 3, "GRU": 3, "RNN": 3, "Attention": 3}
_UNKNOWN = "unknown"


def of(path: Path, sizes: Mapping[str, int], *, executed: bool = False) -> Coverage:
    """Look at a file at concrete sizes of its dynamic dimensions.

    In a graph that is still to be built, a product of what DequantizeLinear unpacks counts as quantised: that is what
    it asks for. In one that is ``executed`` as it stands, it is computed in floating point.

    Raises:
        InvalidGraph: the file cannot be read.
        SignatureError: its inputs are no tensors.
    """
    seen = view(path, sizes)
    structure = Structure(seen)
    counted = count_products(seen)
    runs_in = {name: _precision(seen.nodes[name], structure, executed) for name in counted}
    work: Counter[str] = Counter()
    operators: dict[str, Counter[str]] = {}
    for name, macs in counted.items():
        work[runs_in[name]] += macs or 0
        operators.setdefault(runs_in[name], Counter())[_plain(seen.nodes[name].op_type)] += macs or 0
    total = work.total()
    low = QUANTISED if any(one in QUANTISED for one in runs_in.values()) else HALF
    lowered = {name for name, precision in runs_in.items() if precision in low}
    return Coverage(
        total_macs=total,
        macs=_shares(work, total),
        operators={precision: _shares(operators[precision], total) for precision in _shares(work, total)},
        weights=_weights(seen, structure),
        products=dict(Counter(runs_in.values()).most_common()),
        unknown_products=sum(macs is None for macs in counted.values()),
        qdq_pairs=structure.pairs,
        unfused=sum(_unfused(seen.nodes[name], structure) for name in counted) if executed else 0,
        islands=count(structure, lowered, halves=low == HALF, executed=executed),
        **_conversions(seen),
    )


def _plain(operator: str) -> str:
    """Translate an operator to its usual name: ONNX Runtime's integer kernels are still convolutions and products."""
    for word in ("ConvTranspose", "Conv", "MatMul", "Gemm", "Attention", "LSTM"):
        if word in operator:
            return word
    return operator


def _shares(counts: Mapping[str, int], total: int) -> dict[str, float]:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {name: round(count / total, 6) for name, count in ordered if count}


def _precision(node: "onnx.NodeProto", structure: Structure, executed: bool) -> str:
    """Find the precision that a product is computed in."""
    if node.op_type in _INTEGER_KERNELS:
        return "int8"
    if node.op_type in _PACKED and attributes(node).get("accuracy_level", 0) == _INT8_ACCURACY:
        return "int8"
    asked = set() if executed else _asked(node, structure)
    if len(asked) == 1 and (only := asked.pop()) in _EIGHT_BITS:
        return only
    return _PRECISIONS.get(structure.seen.value(node.input[0]).dtype, _UNKNOWN)


def _asked(node: "onnx.NodeProto", structure: Structure) -> set[str]:
    """Return precisions of a product's operands before they are dequantised."""
    operands = node.input[: _OPERANDS.get(node.op_type, 2)]
    return {_PRECISIONS.get(structure.stored(name), _UNKNOWN) for name in operands if name}


def _unfused(node: "onnx.NodeProto", structure: Structure) -> bool:
    """Tell whether a product in floating point reads what was dequantised, and perhaps cast after that."""
    given = _PRECISIONS.get(structure.stored(node.input[0], through=("Cast",)))
    return given in _EIGHT_BITS and node.op_type not in _INTEGER_KERNELS


def _weights(seen: View, structure: Structure) -> dict[str, float]:
    packed = {node.input[1]: attributes(node) for node in seen.nodes.values() if node.op_type in _PACKED}
    sizes: Counter[str] = Counter()
    for name in seen.constants - structure.scales:
        value = seen.value(name)
        if name in packed:
            given = packed[name]
            sizes[f"int{given.get('bits', 4)}"] += given["K"] * given["N"]
        elif value.shape is not None and len(value.shape) > 1 and value.dtype in _PRECISIONS:
            sizes[_PRECISIONS[value.dtype]] += prod(value.shape)
    return _shares(sizes, sizes.total())


def _conversions(seen: View) -> dict[str, int]:
    nodes = list(seen.nodes.values())
    return {
        "conversions": sum(node.op_type in CONVERTERS and node.input[0] not in seen.constants for node in nodes),
        "casts": sum(_float_cast(node, seen) for node in nodes),
        "reorders": sum(node.op_type in ("ReorderInput", "ReorderOutput", "Transpose") for node in nodes),
    }


def _float_cast(node: "onnx.NodeProto", seen: View) -> bool:
    if node.op_type != "Cast" or node.input[0] in seen.constants:
        return False
    ends = (seen.value(node.input[0]).dtype, seen.value(node.output[0]).dtype)
    return all("float" in end for end in ends)
