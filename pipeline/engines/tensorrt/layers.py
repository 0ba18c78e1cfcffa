"""Read an engine's layers: which precision each product runs in, and what was not fused.

Layers come as the builder's or the inspector's one-line dump; both write the same format. TensorRT 10 writes layout
and type of a tensor in one field (``Format/Datatype: Channel major FP16 format``), and constants among the inputs;
TensorRT 11 and TensorRT-RTX have a field for each.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel

from enginesmith.pipeline.engines.profiling import narrowest
from enginesmith.pipeline.engines.tensorrt.parser import NetworkTensor
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.tensors import Signature

if TYPE_CHECKING:
    import onnx


_PRECISIONS = {
    "FP4": "fp4",
    "Int4": "int4",
    "FP8": "fp8",
    "Int8": "int8",
    "UInt8": "uint8",
    "Half": "fp16",
    "BFloat16": "bf16",
    "Float": "fp32",
}
"""TensorRT's words, the narrowest first."""
_TYPES = {word.lower(): word for word in (*_PRECISIONS, "Int32", "Int64", "Bool")} | {
    "fp32": "Float",
    "fp16": "Half",
    "bf16": "BFloat16",
    "fp4e2m1": "FP4",
}
"""Words for types in a dump, in lower case → TensorRT's own word."""
_WEIGHT_PRECISIONS = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "int8",
    "float8e4m3fn": "fp8",
    "int4": "int4",
    "float4e2m1": "fp4",
    "float64": "fp64",
}
_QUANTIZED, _FLOATS = ("int8", "fp8", "fp4", "int4"), ("fp32", "fp16", "bf16")
_PRODUCTS = ("Conv", "ConvTranspose", "MatMul", "Gemm", "Attention", "LSTM", "GRU", "Einsum")
_LIGHT = ("kgen", "shape_call", "maxpool", "avgpool", "pool", "copy", "signal", "wait")
"""Kinds of the compiler's kernels that multiply no matrices."""
_HEAVY = re.compile(r"conv|gemm|mat(?:rix)?mul|attention|mha|rnn|einsum|fullyconnected|plugin|myelin", re.IGNORECASE)
"""Kinds of TensorRT's own layers that may multiply matrices; all others (CaskPooling, PointWiseV2, …) do not."""
_REGION = ("Myelin", "ForeignNode")
"""Kinds of layers that are several kernels, of which nothing is said."""
_LINE = re.compile(
    r"Name: (?P<name>.*?), LayerType: (?P<type>[^,]*), Inputs: \[(?P<inputs>.*?)\], "
    r"(?:Constants: \[(?P<constants>.*?)\], )?Outputs: \[(?P<outputs>|.*?\})\](?:, (?P<more>.*?))?"
    r"(?:Metadata: (?P<metadata>.*))?$"
)
_TENSOR = re.compile(r"Name: (?P<name>[^{}]*?), (?:Location: \w+, )?Dimensions: [^{}]*?Datatype: (?P<type>[^,}]+)")
_CONSTANT = re.compile(r"_d?const(?:ant\w*)?(?:_myl\d+)?$")
"""Names of constants that the compiler made."""
_WEIGHTS = re.compile(r'Weights: \{"Type": "(\w+)"')
_SOURCE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_MOVES = re.compile(r"^__myl_(?:Move|Copy|Tran|Repl|Conc|Resh)+_|Reformatting CopyNode")
_SHOWN = 8


class Audit(BaseModel, frozen=True):
    """Record what a built engine's layers show."""

    layers: dict[str, int]
    """Kernels by the narrowest type that they read."""
    products: dict[str, int] = {}
    """Convolutions and matrix products of the graph by the precision that they run in."""
    requested: dict[str, int] = {}
    """Convolutions and matrix products by the precision that the graph asks for."""
    otherwise: tuple[str, ...] = ()
    """Products that run in another precision than the graph asks for."""
    unseen: int = 0
    """Products that no layer names: folded into others, or renamed."""
    standalone_quantize: int = 0
    """Kernels that only turn floats into quantized values, which a fused engine would not have."""
    float_outputs: int = 0
    """Quantized products that write floats, so that something else has to quantize again."""
    reformats: int = 0
    """Kernels that only move data into another layout."""
    problems: tuple[str, ...] = ()
    """Contradictions to the signature: an engine with any of these is not used."""
    source: str

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for people."""
        total = sum(self.requested.values())
        counts = ", ".join(f"{count} {name}" for name, count in self.products.items()) or "none is known"
        slow = f"kernels that only quantize: {self.standalone_quantize}; this may be slower than fp16"
        notes = (
            (total, f"products by precision: {counts}, of {total} in the graph"),
            (not self.layers, "no layer can be read in the builder's log, so the precisions are not known"),
            (self.unseen, f"products that no kernel names, so that their precision is not known: {self.unseen}"),
            (self.otherwise, f"not as asked for: {', '.join(self.otherwise[:_SHOWN])}"),
            (self.float_outputs, f"quantized products that write floats: {self.float_outputs}; {slow}"),
            (self.reformats, f"kernels that only change the layout: {self.reformats}"),
        )
        return tuple(note for applies, note in notes if applies)


@dataclass(frozen=True)
class Layer:
    """Describe a kernel of the engine."""

    name: str
    kind: str
    reads: tuple[str, ...]
    holds: tuple[str, ...]
    writes: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def precision(self) -> str | None:
        """The narrowest type that it reads, else that of a product's weights; None for a kernel without numbers."""
        if self.kind in _REGION:
            return None
        weights = "" if self.light else narrowest(self.holds, _PRECISIONS)
        return narrowest(self.reads, _PRECISIONS) or weights or None

    @property
    def light(self) -> bool:
        """True if it multiplies no matrices."""
        return self.kind in _LIGHT or (self.kind[:1].isupper() and not _HEAVY.search(self.kind))

    @property
    def moves(self) -> bool:
        """True if it only brings data into another layout."""
        return self.light and bool(_MOVES.search(self.name)) and self.reads == self.writes

    @property
    def quantizes(self) -> bool:
        """True if it multiplies nothing, reads floats and writes quantized values."""
        return self.light and self.precision in _FLOATS and not {"Int8", "FP8", "FP4"}.isdisjoint(self.writes)


def read_layers(dump: str) -> list[Layer]:
    """Read the layers of a dump; lines of another form are left out."""
    layers = []
    body = dump.partition("\nI/O Tensors:")[0].partition("\nBindings:")[0]
    lines = body.split("\n")  # splitlines would break at the control character between names of nodes, too
    for match in filter(None, map(_LINE.match, lines)):
        inputs, constants, outputs = (_tensors(match[part]) for part in ("inputs", "constants", "outputs"))
        if match["constants"] is None:
            constants = [tensor for tensor in inputs if _CONSTANT.search(tensor[0])]
            inputs = [tensor for tensor in inputs if tensor not in constants]
        weights = [_TYPES.get(word.lower(), word) for word in _WEIGHTS.findall(match["more"] or "")]
        reads, holds, writes = ([kind for _, kind in side] for side in (inputs, constants, outputs))
        reads, holds, writes = (list(dict.fromkeys(side)) for side in (reads, [*holds, *weights], writes))
        nodes = tuple(_SOURCE.findall(match["metadata"] or "")) or tuple(match["name"].split(" + "))
        layers.append(Layer(match["name"], match["type"].strip(), tuple(reads), tuple(holds), tuple(writes), nodes))
    return layers


def _tensors(text: str | None) -> list[tuple[str, str]]:
    """List names and types of the tensors in one field of a line."""
    tensors = []
    for match in _TENSOR.finditer(text or ""):
        words = match["type"].split()
        known = (_TYPES[word.lower()] for word in words if word.lower() in _TYPES)
        tensors.append((match["name"], next(known, " ".join(words))))
    return tensors


def audit(
    dump: str, model: "onnx.ModelProto", signature: Signature, source: str, tensors: Sequence[NetworkTensor]
) -> Audit:
    """Compare a dump of layers with the graph it was built from, whose weights may be left out.

    ``tensors`` are the network's inputs and outputs, which are compared with the signature.
    """
    layers = read_layers(dump)
    requested_precisions = dict(_list_asked(model))
    runs = {name: _runs_in(name, layers) for name in requested_precisions}
    engine_precisions = {name: precision for name, precision in runs.items() if precision}
    otherwise = [
        f"{name} {requested_precisions[name]} → {real}"
        for name, real in engine_precisions.items()
        if real != requested_precisions[name]
    ]
    narrow = [layer for layer in layers if not layer.light and layer.precision in ("int8", "fp8", "fp4")]
    return Audit(
        layers=_count(layer.precision for layer in layers if layer.precision),
        products=_count(engine_precisions.values()),
        requested=_count(requested_precisions.values()),
        otherwise=tuple(otherwise),
        unseen=len(requested_precisions) - len(engine_precisions),
        standalone_quantize=sum(layer.quantizes for layer in layers),
        float_outputs=sum(not {"Float", "Half", "BFloat16"}.isdisjoint(layer.writes) for layer in narrow),
        reformats=sum(layer.moves for layer in layers),
        problems=tuple(_io_problems(tensors, signature)),
        source=source,
    )


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def _runs_in(node: str, layers: Sequence[Layer]) -> str | None:
    """Find the precision of the kernel that does a node's product: of those that name it, the one that is not light."""
    named = [layer for layer in layers if node in layer.nodes or layer.name.startswith(f"{node}_myl")]
    product = next((layer for layer in named if not layer.light), None) or next(iter(named), None)
    if product is None:
        return None
    weights = narrowest(product.holds, _PRECISIONS)
    if weights in ("int4", "fp4") and product.precision not in _QUANTIZED:
        return f"{product.precision} with {weights} weights"
    return product.precision


def _list_asked(model: "onnx.ModelProto") -> Iterator[tuple[str, str]]:
    """Yield the graph's products by node name, with the precision that casts and Q/DQ ask for."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(model).graph  # weights are not loaded
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    types |= {it.name: it.type.tensor_type.elem_type for it in (*graph.input, *graph.output, *graph.value_info)}
    makers = {output: node for node in model.graph.node for output in node.output}
    for node in model.graph.node:
        if node.op_type in _PRODUCTS and node.name and len(node.input) > 1:
            left, right = (_operand(name, makers, types) for name in node.input[:2])
            wide = next((side for side in (left, right) if side and side not in _QUANTIZED), "fp32")
            if left in _QUANTIZED and right in _QUANTIZED:
                yield node.name, left
            elif left is not None or right is not None:
                yield node.name, f"{wide} with {right} weights" if right in ("int4", "fp4") else wide


def _operand(name: str, makers: Mapping[str, "onnx.NodeProto"], types: Mapping[str, int]) -> str | None:
    """Find the precision of a product's operand: that of what a DequantizeLinear unpacks, else its own type."""
    node = makers.get(name)
    while node is not None and node.op_type in ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"):
        name = node.input[0]
        node = makers.get(name)
    if node is not None and node.op_type == "DequantizeLinear":
        name = node.input[0]
    kind = types.get(name)
    return _WEIGHT_PRECISIONS.get(model_file.dtype_name(kind)) if kind else None


def _io_problems(tensors: Sequence[NetworkTensor], signature: Signature) -> Iterator[str]:
    """Yield inputs and outputs of the network that are not those of the signature."""
    known = {(tensor.is_input, tensor.name): tensor for tensor in tensors}
    for side, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            tensor, value = known.get((side == "input", spec.name)), f"the {side} {spec.name!r}"
            if tensor is None:
                yield f"the engine has no {side} {spec.name!r}"
                continue
            if tensor.dtype != spec.dtype:
                yield f"{value} is {tensor.dtype} in the engine, and {spec.dtype} in the graph"
            if tensor.shape is None:
                continue
            pairs = zip(tensor.shape, spec.shape, strict=False)
            fits = all(dim in (size, -1) for dim, size in pairs if isinstance(size, int))
            if not fits or len(tensor.shape) != len(spec.shape):
                yield f"{value} is {list(tensor.shape)} in the engine, expected {spec}"
