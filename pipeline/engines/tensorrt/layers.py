"""Read an engine's layers: which precision each product runs in, and what was not fused.

Layers come as the builder's or the inspector's one-line dump; both write the same format.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

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
_ELEMENTS = {
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int8": "Int8",
    "uint8": "UInt8",
    "int32": "Int32",
    "int64": "Int64",
    "bool": "Bool",
}
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
_QUANTISED = ("int8", "fp8", "fp4", "int4")
_PRODUCTS = ("Conv", "ConvTranspose", "MatMul", "Gemm", "Attention", "LSTM", "GRU", "Einsum")
_LIGHT = ("kgen", "shape_call", "maxpool", "avgpool", "pool", "Reformat", "NoOp", "Constant", "copy", "signal", "wait")
_LINE = re.compile(
    r"Name: (?P<name>.*?), LayerType: (?P<type>[^,]*), Inputs: \[(?P<inputs>.*?)\], "
    r"(?:Constants: \[(?P<constants>.*?)\], )?Outputs: \[(?P<outputs>.*)\],? .*?(?:Metadata: (?P<metadata>.*))?$"
)
_DATATYPE = re.compile(r"Datatype: ([^,}\]]+)")
_SOURCE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_IO = re.compile(
    r"^ ?Name: (?P<name>.+?), IOMode: (?P<mode>\w+), DataType: (?P<type>\w+), Dimensions: \[(?P<dims>[^\]]*)\]"
)
_MOVES = re.compile(r"^__myl_(?:Move|Copy|Tran|Repl|Conc|Resh)+_|Reformatting CopyNode")
_SHOWN = 8


class Audit(BaseModel):
    """Record what a built engine's layers show."""

    model_config = ConfigDict(frozen=True)

    layers: dict[str, int]
    """Kernels by the narrowest type that they read."""
    products: dict[str, int] = {}
    """Convolutions and matrix products of the graph by the precision that they run in."""
    requested: dict[str, int] = {}
    """The same by the precision that the graph asks for."""
    otherwise: tuple[str, ...] = ()
    """Products that run in another precision than the graph asks for."""
    unseen: int = 0
    """Products that no layer names: folded into others, or renamed."""
    standalone_quantise: int = 0
    """Kernels that only turn floats into quantised values, which a fused engine would not have."""
    float_outputs: int = 0
    """Quantised products that write floats, so that something else has to quantise again."""
    reformats: int = 0
    """Kernels that only move data into another layout."""
    problems: tuple[str, ...] = ()
    """What contradicts the signature: an engine with any of these is not used."""
    source: str

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of it."""
        total = sum(self.requested.values())
        notes = []
        if total:
            notes.append(f"products by precision: {_counts(self.products) or 'none is known'}, of {total} in the graph")
        if self.unseen:
            notes.append(f"products that no kernel names, so that their precision is not known: {self.unseen}")
        if self.otherwise:
            notes.append(f"not as asked for: {', '.join(self.otherwise[:_SHOWN])}")
        if self.float_outputs:
            notes.append(
                f"quantised products that write floats: {self.float_outputs}; kernels that only quantise: "
                f"{self.standalone_quantise}; this may be slower than fp16"
            )
        if self.reformats:
            notes.append(f"kernels that only change the layout: {self.reformats}")
        return tuple(notes)


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
        """The narrowest type that it reads; None where it reads no number of the model."""
        return next((short for word, short in _PRECISIONS.items() if word in self.reads), None)

    @property
    def light(self) -> bool:
        """Whether it multiplies no matrices."""
        return self.kind in _LIGHT

    @property
    def moves(self) -> bool:
        """Whether it only brings data into another layout."""
        return self.light and bool(_MOVES.search(self.name)) and self.reads == self.writes

    @property
    def quantises(self) -> bool:
        """Whether it multiplies nothing, reads floats and writes quantised values."""
        narrow = {"Int8", "FP8", "FP4"} & set(self.writes)
        return self.light and self.precision in ("fp32", "fp16", "bf16") and bool(narrow)


def read_layers(dump: str) -> list[Layer]:
    """Read the layers of a dump; lines of another form are left out."""
    text = dump.partition("I/O Tensors:")[0]
    return [_layer(match) for line in text.splitlines() if (match := _LINE.match(line))]


def _layer(match: re.Match[str]) -> Layer:
    def types(part: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_DATATYPE.findall(match[part] or "")))

    nodes = _SOURCE.findall(match["metadata"] or "")
    return Layer(
        match["name"], match["type"].strip(), types("inputs"), types("constants"), types("outputs"), tuple(nodes)
    )


def audit(dump: str, model: "onnx.ModelProto", signature: Signature, source: str) -> Audit:
    """Compare a dump of layers with the graph it was built from, whose weights may be left out, and the signature."""
    layers = read_layers(dump)
    asked = dict(_asked(model))
    runs = {name: _runs_in(name, layers) for name in asked}
    seen = {name: precision for name, precision in runs.items() if precision}
    otherwise = [f"{name} {asked[name]} → {real}" for name, real in seen.items() if real != asked[name]]
    products = [layer for layer in layers if not layer.light]
    return Audit(
        layers=_ordered(Counter(layer.precision for layer in layers if layer.precision)),
        products=_ordered(Counter(seen.values())),
        requested=_ordered(Counter(asked.values())),
        otherwise=tuple(otherwise),
        unseen=len(asked) - len(seen),
        standalone_quantise=sum(layer.quantises for layer in layers),
        float_outputs=sum(_writes_float(layer) for layer in products),
        reformats=sum(layer.moves for layer in layers),
        problems=tuple(_io_problems(dump, signature)) if layers else ("the builder's layers could not be read",),
        source=source,
    )


def _ordered(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: counts[name] for name in sorted(counts, key=lambda name: (-counts[name], name))}


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _writes_float(layer: Layer) -> bool:
    return layer.precision in ("int8", "fp8", "fp4") and {"Float", "Half", "BFloat16"} & set(layer.writes) != set()


def _runs_in(node: str, layers: Sequence[Layer]) -> str | None:
    """Find the precision of the kernel that does a node's product: of those that name it, the one that is not light."""
    named = [layer for layer in layers if node in layer.nodes or layer.name.startswith(f"{node}_myl")]
    product = next((layer for layer in named if not layer.light), None) or next(iter(named), None)
    if product is None:
        return None
    weights = next((short for word, short in _PRECISIONS.items() if word in product.holds), None)
    if weights in ("int4", "fp4") and product.precision not in _QUANTISED:
        return f"{product.precision} with {weights} weights"
    return product.precision


def _asked(model: "onnx.ModelProto") -> Iterator[tuple[str, str]]:
    """Yield the graph's products by node name, with the precision that casts and Q/DQ ask for."""
    types = _element_types(model)
    makers = {output: node for node in model.graph.node for output in node.output}
    for node in model.graph.node:
        if node.op_type in _PRODUCTS and node.name and len(node.input) > 1:
            left, right = (_operand(name, makers, types) for name in node.input[:2])
            if left is None and right is None:
                continue
            yield node.name, _precision(left, right)


def _precision(left: str | None, right: str | None) -> str:
    if left in _QUANTISED and right in _QUANTISED:
        return left
    wide = next((side for side in (left, right) if side and side not in _QUANTISED), "fp32")
    if right in ("int4", "fp4"):
        return f"{wide} with {right} weights"
    return wide


def _operand(name: str, makers: Mapping[str, "onnx.NodeProto"], types: Mapping[str, int]) -> str | None:
    """Find the precision of a product's operand: of what a DequantizeLinear unpacks, else its own type."""
    node = makers.get(name)
    while node is not None and node.op_type in ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"):
        name = node.input[0]
        node = makers.get(name)
    if node is not None and node.op_type == "DequantizeLinear":
        name = node.input[0]
    kind = types.get(name)
    return _WEIGHT_PRECISIONS.get(model_file.dtype_name(kind)) if kind else None


def _element_types(model: "onnx.ModelProto") -> dict[str, int]:
    """Infer the element type of every tensor; weights are not loaded."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        types[value.name] = value.type.tensor_type.elem_type
    return types


def _io_problems(dump: str, signature: Signature) -> Iterator[str]:
    """Yield inputs and outputs of the engine that are not those of the signature."""
    tensors = {match["name"]: match for line in dump.splitlines() if (match := _IO.match(line))}
    for side, specs in (("Input", signature.inputs), ("Output", signature.outputs)):
        for spec in specs:
            tensor = tensors.get(spec.name)
            if tensor is None or tensor["mode"] != side:
                yield f"the engine has no {side.lower()} {spec.name!r}"
                continue
            kind = tensor["type"]
            if kind != _ELEMENTS.get(spec.dtype):
                yield f"the {side.lower()} {spec.name!r} is {kind} in the engine, and {spec.dtype} in the graph"
            if not _same_shape(tensor["dims"], spec.shape):
                yield f"the {side.lower()} {spec.name!r} is [{tensor['dims']}] in the engine, expected {spec}"


def _same_shape(dims: str, shape: Sequence[int | str]) -> bool:
    """Tell if the engine's sizes, −1 for free ones, are those of the signature."""
    sizes = [dim for dim in dims.split(",") if dim]
    if len(sizes) != len(shape):
        return False
    return all(dim in (str(size), "-1") for dim, size in zip(sizes, shape, strict=True) if isinstance(size, int))
