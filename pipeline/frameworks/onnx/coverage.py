"""Count the multiply-adds of a graph at concrete sizes, and compute the shares of its work and weights by precision.

Whatever a kernel multiplies counts, so blocks of channels that ONNX Runtime fills up with zeros do too. Additions alone
(normalizations, softmax, activations) do not. Loops count once, as their length is not in the file.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline.frameworks.onnx import model_file, traversal
from enginesmith.pipeline.frameworks.onnx.shapes import View, view
from enginesmith.pipeline.frameworks.onnx.traversal import attributes
from enginesmith.pipeline.frameworks.records import HALF, QUANTIZED, Coverage
from enginesmith.pipeline.units import group_values

if TYPE_CHECKING:
    import onnx

_PACKED = ("MatMulNBits", "MatMulBnb4")
Shape = tuple[int, ...]
ShapeOf = Callable[[str], Shape]
"""Value's name → shape; ValueError where that is not known."""


def count_macs(path: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    """Count multiply-adds by product's name (``op_index`` where it has none), except products of unknown shape.

    Raises:
        InvalidGraph: the file cannot be read.
    """
    return {name: count for name, count in count_products(view(path, sizes)).items() if count is not None}


def count_products(graph: View) -> dict[str, int | None]:
    """Count multiply-adds by product's name in a file that was read already; None where shapes are not known."""

    def shape(value: str) -> Shape:
        if (known := graph.value(value).shape) is None:
            raise ValueError(value)
        return known

    counts: dict[str, int | None] = {}
    for name, node in graph.nodes.items():
        if is_product(node):
            try:
                counts[name] = _FORMULAS[node.op_type](node, shape)
            except (LookupError, ValueError):  # a shape that is not known, or not what the operator takes
                counts[name] = None
    return counts


def is_product(node: "onnx.NodeProto") -> bool:
    """Tell whether a node's work is counted in multiply-adds."""
    return node.op_type in _FORMULAS and len(node.input) > 1


def _convolution(node: "onnx.NodeProto", shape: ShapeOf) -> int:
    """Count a convolution: each result (input of a transposed one) takes all of the weight but its first dimension.

    Where there is none, the input is smaller than the window, and no runtime computes that.
    """
    weight = 3 if node.op_type == "QLinearConv" else 1
    positions = shape(node.input[0] if node.op_type == "ConvTranspose" else node.output[0])
    if 0 in positions:
        raise ValueError(node.output[0])
    return prod(positions) * prod(shape(node.input[weight])[1:])


def _matrix_product(node: "onnx.NodeProto", shape: ShapeOf) -> int:
    given = attributes(node)
    if node.op_type in _PACKED:
        return prod(shape(node.output[0])) * int(given["K"])
    left = shape(node.input[0])
    transposed = given.get("transA", 0) and len(left) > 1
    return prod(shape(node.output[0])) * left[-2 if transposed else -1]


def _einsum(node: "onnx.NodeProto", shape: ShapeOf) -> int:
    """Count an Einsum: one loop over every label."""
    terms = attributes(node)["equation"].decode().replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, map(shape, node.input), strict=True):
        before, dots, after = term.partition("...")
        hidden = [f".{index}" for index in range(len(operand) - len(before) - len(after))] if dots else []
        for label, size in zip([*before, *reversed(hidden), *after], operand, strict=True):
            sizes[label] = max(size, sizes.get(label, 0))  # 1 is repeated
    return prod(sizes.values())


def _attention(node: "onnx.NodeProto", shape: ShapeOf) -> int:
    """Count attention; com.microsoft's has its projections inside, one matrix for all of them.

    Counted are queries times keys, and weights times values: each query's head meets each key. 3-D and 4-D inputs
    alike: queries and result together hold what is multiplied for one key.
    """
    queries, result = shape(node.input[0]), prod(shape(node.output[0]))
    if node.domain not in ("", "ai.onnx"):
        batch, length, _ = queries
        return batch * length * prod(shape(node.input[1])) + 2 * length * result
    keys = shape(node.input[1])[-2]
    if len(node.input) > 4 and node.input[4]:
        keys += shape(node.input[4])[-2]
    return keys * (prod(queries) + result)


def _fused_attention(node: "onnx.NodeProto", shape: ShapeOf) -> int:
    """Count com.microsoft's attention: without a key of its own, all are packed in one input."""
    query, result = shape(node.input[0]), prod(shape(node.output[0]))
    if len(node.input) > 1 and node.input[1]:
        key = shape(node.input[1])
        return (key[2] if len(key) == 4 else key[1]) * (prod(query) + result)
    return query[1] * (prod(query) // 3 + result)


def _recurrence(node: "onnx.NodeProto", shape: ShapeOf) -> int:
    """Count a recurrence: each step multiplies by the weights of input and state of every direction."""
    sequence, weights, recurrent = map(shape, node.input[:3])
    return sequence[0] * sequence[1] * (prod(weights) + prod(recurrent))


_FORMULAS: "dict[str, Callable[[onnx.NodeProto, ShapeOf], int]]" = {
    **dict.fromkeys(("Conv", "FusedConv", "NhwcFusedConv", "ConvInteger", "QLinearConv"), _convolution),
    **dict.fromkeys(("ConvTranspose", "DeformConv"), _convolution),
    **dict.fromkeys(("MatMul", "MatMulInteger", "QLinearMatMul", "FusedMatMul", "TransposeMatMul"), _matrix_product),
    **dict.fromkeys(("MatMulIntegerToFloat", "DynamicQuantizeMatMul"), _matrix_product),
    **dict.fromkeys(("Gemm", "FusedGemm", "QGemm"), _matrix_product),
    **dict.fromkeys(_PACKED, _matrix_product),
    "Einsum": _einsum,
    **dict.fromkeys(("Attention", "QAttention"), _attention),
    "MultiHeadAttention": _fused_attention,
    **dict.fromkeys(("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"), _recurrence),
}


# Producers and readers of values, seen through quantization and changes of layout.

_QUANTIZERS = ("QuantizeLinear", "DynamicQuantizeLinear")
CONVERTERS = (*_QUANTIZERS, "DequantizeLinear")
_LAYOUT = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Expand", "Slice", "Gather", "Split")
_MOVES = (*_LAYOUT, "MaxPool", "Resize", "Tile", "Concat")
"""Operators whose results are numbers that they read; so int8 stays int8."""
_SCALES = {**dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), (1, 2)), **dict.fromkeys(_PACKED, (2, 3, 4))}
"""Inputs that are scales and zero points, and have several dimensions where there is one for each block."""


class _Structure:
    """Makers and readers of every value."""

    def __init__(self, graph: View) -> None:
        self.graph = graph
        self.makers = {output: name for name, node in graph.nodes.items() for output in node.output if output}
        self.readers = group_values((value, name) for name, node in graph.nodes.items() for value in node.input)

    def has_dtype(self, value: str, dtypes: tuple[str, ...]) -> bool:
        """Tell whether a value's type is one of these."""
        return self.graph.value(value).dtype in dtypes

    def maker(self, value: str) -> "onnx.NodeProto | None":
        """Return the node that makes a value; None for inputs and initializers."""
        return self.graph.nodes[self.makers[value]] if value in self.makers else None

    def readers_of(self, node: "onnx.NodeProto") -> "Iterator[onnx.NodeProto]":
        """Yield the nodes that read a node's outputs."""
        return (self.graph.nodes[name] for output in node.output for name in self.readers.get(output, ()))

    def source(self, value: str, through: tuple[str, ...] = ()) -> str:
        """Return the value that one is made from by nothing but changes of layout, and operators of these types."""
        node = self.maker(value)
        while node is not None and node.op_type in (*_LAYOUT, *through):
            value = node.input[0]
            node = self.maker(value)
        return value

    def origins(self, value: str) -> "Iterator[str]":
        """Yield the values that all numbers of one come from."""
        node = self.maker(value)
        if node is None or node.op_type not in _MOVES:
            yield value
            return
        for name in node.input if node.op_type == "Concat" else node.input[:1]:
            yield from self.origins(name)

    def stored_precision(self, value: str, through: tuple[str, ...] = ()) -> str:
        """Return the precision that a value had before it was dequantized; its own, if it was not."""
        node = self.maker(self.source(value, through))
        if node is not None and node.op_type == "DequantizeLinear":
            value = node.input[0]
        return PRECISIONS.get(self.graph.value(value).dtype, _UNKNOWN)


def find_dequantized(nodes: "Iterable[onnx.NodeProto]") -> set[str]:
    """Find the values that are unpacked from few bits, or moved from such, in nodes that are in their order."""
    known: set[str] = set()
    for node in nodes:
        read = node.input if node.op_type == "Concat" else node.input[:1]
        if node.op_type == "DequantizeLinear" or (node.op_type in _MOVES and known.issuperset(read)):
            known.update(node.output)
    return known


def list_float32(model: "onnx.ModelProto") -> "list[tuple[onnx.NodeProto, str]]":
    """List the nodes that are marked to stay in float32, each with the reason."""
    entries = ((node, entry) for node in traversal.nodes(model) for entry in node.metadata_props)
    return [(node, entry.value) for node, entry in entries if entry.key == model_file.FLOAT32_KEY]


# Islands: how often a graph changes between low precision and the rest, which is what reformatting costs.

_HALF = ("float16", "bfloat16")
_FUSED = (
    *("Add", "Mul", "Relu", "Clip", "LeakyRelu", "Sigmoid", "MaxPool", "AveragePool", "GlobalAveragePool"),
    *("ReduceMean", "Concat", "Resize", "Pad", "Where", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"),
    *("Slice", "Split"),
)
"""Operators that engines have integer kernels for, or that only move values."""
_RECTIFIERS = ("Relu", "Clip")
_NARROW = ("int8", "uint8", "float8e4m3fn", "float8e5m2", "int4", "uint4", "float4e2m1")


def _count_islands(structure: _Structure, products: AbstractSet[str], *, halves: bool, executed: bool) -> int:
    """Count connected runs of operators in low precision; ``products`` are the ones known to be in it.

    In a graph still to be built (not ``executed``), an operator between DequantizeLinear and QuantizeLinear is in low
    precision, as engines fuse that; and a value quantized and dequantized between two of them connects them.
    """
    if not products:
        return 0
    import networkx

    graph, kinds = structure.graph, _HALF if halves else _NARROW
    low = dict.fromkeys(products)
    for name, node in graph.nodes.items():
        if name in low or node.op_type in (*CONVERTERS, "Cast", "Constant"):
            continue
        if halves or executed:  # it reads and writes values of low precision themselves
            reads = any(structure.has_dtype(value, kinds) for value in node.input if value not in graph.constants)
            is_low = reads and any(structure.has_dtype(value, kinds) for value in node.output)
        else:
            is_low = _is_between_pairs(node, structure, low)
        if is_low:
            low[name] = None
    linked = networkx.Graph()
    linked.add_nodes_from(low)
    for name in low:
        for value in graph.nodes[name].input:
            before = structure.makers.get(value if halves or executed else structure.source(value, CONVERTERS))
            if before in low and (halves or not executed or structure.has_dtype(value, _NARROW)):
                linked.add_edge(name, before)
    return int(networkx.number_connected_components(linked))


def _is_between_pairs(node: "onnx.NodeProto", structure: _Structure, low: "dict[str, None]") -> bool:
    """Tell whether all inputs were dequantized or are in low precision, and all outputs are quantized at once."""
    given = [value for value in node.input if value and value not in structure.graph.constants]
    if node.op_type not in _FUSED or not given:
        return False
    for value in given:
        maker = structure.maker(value)
        if maker is None or not structure.has_dtype(value, (*_HALF, "float32")):
            return False
        if maker.op_type != "DequantizeLinear" and structure.makers[value] not in low:
            return False
    return _is_quantized_at_once(node, structure)


def _is_quantized_at_once(node: "onnx.NodeProto", structure: _Structure) -> bool:
    """Fold a Relu into quantization, where it costs nothing: it is part of how the result is rounded."""
    readers = list(structure.readers_of(node))
    return bool(readers) and all(
        reader.op_type in _QUANTIZERS or (reader.op_type in _RECTIFIERS and _is_quantized_at_once(reader, structure))
        for reader in readers
    )


# Shares by precision.

PRECISIONS = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    **dict.fromkeys(("float8e4m3fn", "float8e5m2"), "fp8"),
    "float4e2m1": "fp4",
    **dict.fromkeys(("int16", "uint16"), "int16"),
    **dict.fromkeys(("int8", "uint8"), "int8"),
    **dict.fromkeys(("int4", "uint4"), "int4"),
}
"""Names of precisions by dtype."""
_INTEGER_KERNELS = (
    *("QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"),
    *("QGemm", "QAttention", "DynamicQuantizeLSTM"),
)
_EIGHT_BITS = ("int8", "fp8", "int16", "fp4")
"""Precisions that products are computed in if both operands have them; of fewer bits there are only weights."""
_INT8_ACCURACY = 4
"""MatMulNBits' ``accuracy_level`` that lets it round activations to int8."""
_OPERANDS = {"LSTM": 3, "GRU": 3, "RNN": 3, "Attention": 3}
_UNKNOWN = "unknown"


def compute_coverage(path: Path, sizes: Mapping[str, int], *, executed: bool = False) -> Coverage:
    """Compute a file's shares at concrete sizes of its dynamic dimensions.

    In a graph that is still to be built, a product of what DequantizeLinear unpacks counts as quantized: that is what
    it asks for. In one that is ``executed`` as it stands, it is computed in floating point.

    Raises:
        InvalidGraph: the file cannot be read.
        SignatureError: its inputs are no tensors.
    """
    graph = view(path, sizes)
    structure, counted, nodes = _Structure(graph), count_products(graph), list(graph.nodes.values())
    runs_in = {name: _precision(graph.nodes[name], structure, executed) for name in counted}
    work: Counter[str] = Counter()
    operators: dict[str, Counter[str]] = {}
    unfused = 0
    for name, macs in counted.items():
        node = graph.nodes[name]
        work[runs_in[name]] += macs or 0
        operators.setdefault(runs_in[name], Counter())[_usual_name(node.op_type)] += macs or 0
        read = structure.stored_precision(node.input[0], through=("Cast",))
        unfused += executed and read in _EIGHT_BITS and node.op_type not in _INTEGER_KERNELS
    total = work.total()
    shares = _shares(work, total)
    low = QUANTIZED if any(precision in QUANTIZED for precision in runs_in.values()) else HALF
    lowered = {name for name, precision in runs_in.items() if precision in low}
    quantizers = [node for node in nodes if node.op_type == "QuantizeLinear"]
    casts = [node for node in nodes if node.op_type == "Cast" and node.input[0] not in graph.constants]
    return Coverage(
        total_macs=total,
        macs=shares,
        operators={precision: _shares(operators[precision], total) for precision in shares},
        weights=_weight_shares(structure, _find_unpacked(structure, runs_in) if executed else {}),
        products=dict(Counter(runs_in.values()).most_common()),
        unknown_products=sum(macs is None for macs in counted.values()),
        qdq_pairs=sum(
            any(reader.op_type == "DequantizeLinear" for reader in structure.readers_of(node)) for node in quantizers
        ),
        unfused=unfused,
        islands=_count_islands(structure, lowered, halves=low == HALF, executed=executed),
        conversions=sum(node.op_type in CONVERTERS and node.input[0] not in graph.constants for node in nodes),
        casts=sum(all("float" in graph.value(end).dtype for end in (node.input[0], node.output[0])) for node in casts),
        reorders=sum(node.op_type in ("ReorderInput", "ReorderOutput", "Transpose") for node in nodes),
        copies=sum(node.op_type in ("MemcpyToHost", "MemcpyFromHost") for node in nodes),
    )


def _usual_name(operator: str) -> str:
    """Translate an operator to its usual name: ONNX Runtime's integer kernels are still convolutions and products."""
    names = ("ConvTranspose", "Conv", "MatMul", "Gemm", "Attention", "LSTM")
    return next((name for name in names if name in operator), operator)


def _shares(counts: Mapping[str, int], total: int) -> dict[str, float]:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {name: round(count / total, 6) for name, count in ordered if count}


def _precision(node: "onnx.NodeProto", structure: _Structure, executed: bool) -> str:
    """Find the precision that a product is computed in."""
    if node.op_type in _INTEGER_KERNELS:
        return "int8"
    if node.op_type in _PACKED and attributes(node).get("accuracy_level", 0) == _INT8_ACCURACY:
        return "int8"
    operands = [] if executed else [name for name in node.input[: _OPERANDS.get(node.op_type, 2)] if name]
    stored = {structure.stored_precision(origin) for name in operands for origin in structure.origins(name)}
    if len(stored) == 1 and (only := stored.pop()) in _EIGHT_BITS:
        return only
    return PRECISIONS.get(structure.graph.value(node.input[0]).dtype, _UNKNOWN)


def _find_unpacked(structure: _Structure, runs_in: Mapping[str, str]) -> dict[str, str]:
    """Find the weights of 8 bits that an engine unpacks at each call, by name → precision that the product reads.

    ONNX Runtime stores the float weights of a ConvTranspose between Q/DQ pairs as int8, and computes in float32.
    """
    unpacked = {}
    for name, precision in runs_in.items():
        for value in structure.graph.nodes[name].input[1:2]:
            maker = structure.maker(structure.source(value))
            if maker is not None and maker.op_type == "DequantizeLinear":
                unpacked[maker.input[0]] = precision
    return {name: read for name, read in unpacked.items() if structure.stored_precision(name) in _EIGHT_BITS}


def _weight_shares(structure: _Structure, unpacked: Mapping[str, str]) -> dict[str, float]:
    """Compute shares of parameters; scales and zero points of several dimensions are none."""
    graph = structure.graph
    nodes = list(graph.nodes.values())
    packed = {node.input[1]: attributes(node) for node in nodes if node.op_type in _PACKED}
    scales = {node.input[i] for node in nodes for i in _SCALES.get(node.op_type, ()) if i < len(node.input)}
    sizes: Counter[str] = Counter()
    for name in graph.constants - scales:
        value = graph.value(name)
        if name in packed:
            given = packed[name]
            sizes[f"int{given.get('bits', 4)}"] += given["K"] * given["N"]
        elif value.shape is not None and len(value.shape) > 1 and value.dtype in PRECISIONS:
            sizes[unpacked.get(name, PRECISIONS[value.dtype])] += prod(value.shape)
    return _shares(sizes, sizes.total())


# The precision of a whole file, without its shapes: a plan needs it before anything is loaded.

_FLOATS = ("fp32", *HALF)
_PACKABLE = ("fp8", "fp4", "int4", "int8", "int16")
"""Precisions that DequantizeLinear unpacks, the one that names a file with several first."""
_DYNAMIC = {"DynamicQuantizeLinear", "DynamicQuantizeLSTM"}
"""Operators that quantize activations as they come."""


def find_precision(path: Path) -> str:
    """Name the precision of a file as variants are named: by its Q/DQ nodes, else by the type it computes in.

    Raises:
        InvalidGraph: the file cannot be read.
    """
    model = _inline_functions(model_file.skeleton(path))
    stored: Counter[str] = Counter()
    for tensor in traversal.tensors(model):
        stored[_name_type(tensor.data_type)] += model_file.count_elements(tensor)
    read = _count_read_constants(model)
    floats = read if any(read[name] for name in _FLOATS) else stored
    rest = max(_FLOATS, key=lambda name: floats[name])
    operators = {node.op_type for node in traversal.nodes(model)}
    if "DequantizeLinear" not in operators:
        return rest if operators.isdisjoint(_DYNAMIC) else "int8-dynamic"
    narrow = next((name for name in _PACKABLE if stored[name]), "int8")
    if narrow == "int4":
        return "int4-weights"
    return f"{narrow}+{rest}" if rest != "fp32" else narrow


def _inline_functions(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Inline a model's functions; not where that fails, which is refused or noted when the file is loaded."""
    import onnx.inliner

    try:
        return onnx.inliner.inline_local_functions(model) if model.functions else model
    except (onnx.checker.ValidationError, RuntimeError):
        return model


def _count_read_constants(model: "onnx.ModelProto") -> Counter[str]:
    """Count the constants' numbers by the type that operators compute with, which is that behind a Cast."""
    constants = {tensor.name: tensor for graph in traversal.list_graphs(model) for tensor in graph.initializer}
    known = {name: (_name_type(each.data_type), model_file.count_elements(each)) for name, each in constants.items()}
    counts: Counter[str] = Counter()
    for node in traversal.nodes(model):
        source = known.get(node.input[0]) if node.input else None
        if node.op_type == "Constant":
            for tensor in (entry.t for entry in node.attribute if entry.name == "value"):
                value = _name_type(tensor.data_type), model_file.count_elements(tensor)
                known |= dict.fromkeys(node.output, value)
        elif source and node.op_type == "Cast":
            for to in (entry.i for entry in node.attribute if entry.name == "to"):
                known |= dict.fromkeys(node.output, (_name_type(to), source[1]))
        elif source and node.op_type in _MOVES:
            known |= dict.fromkeys(node.output, source)
        else:
            for name, size in (known[value] for value in node.input if value in known):
                counts[name] += size
    return counts


def _name_type(elem_type: int) -> str:
    return PRECISIONS.get(model_file.dtype_name(elem_type), _UNKNOWN)
