"""Islands: how often a graph changes between low precision and the rest, which is what reformatting costs."""

from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from enginesmith.pipeline.precision.audit.structure import CONVERTERS, QUANTISERS, Structure

if TYPE_CHECKING:
    import onnx

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
    """Connected runs of operators in low precision; ``products`` are the ones known to be in it.

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
    """Whether a node reads and writes values of low precision themselves."""
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
    """Rectifying before quantising costs nothing: it is part of how the result is rounded."""
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
