"""ONNX Runtime's own operators, told in standard ones that have the same shapes and types.

A graph that ONNX Runtime has optimised is full of operators that onnx knows nothing of. For finding out shapes, and
for nothing else, each is replaced by standard ones; what they compute does not matter. Operators without a rule are
left alone: ONNX Runtime writes down the shapes of values that were in the graph before it was optimised.

Rules follow docs/ContribOperators.md of ONNX Runtime, and its internal domains ``com.microsoft.nchwc`` (channels in
blocks, their number rounded up) and ``com.ms.internal.nhwc`` (channels last).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.tensors import Signature

if TYPE_CHECKING:
    import onnx.inliner


STANDARD = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training")
_BLOCKED, _CHANNELS_LAST = "com.microsoft.nchwc", "com.ms.internal.nhwc"
_FLOAT = 1  # TensorProto.FLOAT
_LIKE_FIRST = (
    *("BiasGelu", "FastGelu", "Gelu", "QuickGelu", "BiasSoftmax", "BiasAdd", "BiasSplitGelu", "SkipLayerNormalization"),
    *("SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization", "QLinearSigmoid", "QLinearLeakyRelu"),
    *("QLinearSoftmax", "MultiHeadAttention", "RotaryEmbedding", "ReorderInput"),
)
_POOLS = {
    "QLinearAveragePool": "AveragePool",
    "QLinearGlobalAveragePool": "GlobalAveragePool",
    "NhwcMaxPool": "MaxPool",
    "MaxPool": "MaxPool",
    "AveragePool": "AveragePool",
    "GlobalMaxPool": "GlobalMaxPool",
    "GlobalAveragePool": "GlobalAveragePool",
}
_CONVOLUTIONS = {
    "Conv": ("Conv", (0, 1)),
    "FusedConv": ("Conv", (0, 1)),
    "NhwcFusedConv": ("Conv", (0, 1)),
    "QLinearConv": ("QLinearConv", tuple(range(8))),
    "ConvTranspose": ("ConvTranspose", (0, 1)),
}
_WINDOW = (
    *("auto_pad", "ceil_mode", "dilations", "group", "kernel_shape", "output_padding", "output_shape", "pads"),
    "strides",
)
_MATRIX = 2
_FLAT = 4  # rank of what is pooled whole, where no kernel tells it


def replace_contrib_op(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "list[onnx.NodeProto] | None":
    """Make standard nodes with the shapes and types of a foreign one; None where no rule for it fits.

    ``dims`` has the dimensions of initialisers by name.
    """
    rule = _RULES.get(node.op_type)
    try:
        return list(rule(node, dims)) if rule else None
    except (LookupError, ValueError):  # an input or attribute that the operator should have is not there
        return None


def attributes(node: "onnx.NodeProto") -> dict[str, Any]:
    """Return a node's attributes by name, as Python values."""
    import onnx.inliner

    return {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}


def channels_last(node: "onnx.NodeProto") -> bool:
    """Tell whether a node reads and writes images with the channels as the last dimension."""
    return (
        node.domain == _CHANNELS_LAST
        or node.op_type in ("NhwcFusedConv", "NhwcMaxPool")
        or bool(attributes(node).get("channels_last", 0))
    )


def _make(operator: str, inputs: Sequence[str], outputs: Sequence[str], **given: Any) -> "onnx.NodeProto":
    import onnx.inliner

    return onnx.helper.make_node(operator, list(inputs), list(outputs), **given)


def _like_first(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    if node.op_type == "ReorderInput" and channels_last(node):
        yield _make("Transpose", node.input[:1], node.output[:1], perm=_to_channels_first(_FLAT))
    else:
        yield _make("Identity", node.input[:1], node.output[:1])
    if node.op_type.startswith("Skip") and len(node.output) > 3 and node.output[3]:
        yield _make("Identity", node.input[:1], node.output[3:4])


def _to_channels_first(rank: int) -> list[int]:
    return [0, rank - 1, *range(1, rank - 1)]


def _to_channels_last(rank: int) -> list[int]:
    return [0, *range(2, rank), 1]


def _turned(node: "onnx.NodeProto", inner: "onnx.NodeProto", rank: int) -> "Iterator[onnx.NodeProto]":
    """Make a standard node, between transpositions where the foreign one has its channels last."""
    if not channels_last(node):
        yield inner
        return
    before, after = f"{node.output[0]}/first", f"{node.output[0]}/last"
    yield _make("Transpose", node.input[:1], [before], perm=_to_channels_first(rank))
    inner.input[0], inner.output[0] = before, after
    yield inner
    yield _make("Transpose", [after], node.output[:1], perm=_to_channels_last(rank))


def _window(node: "onnx.NodeProto") -> dict[str, Any]:
    return {name: value for name, value in attributes(node).items() if name in _WINDOW}


def _convolution(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    operator, kept = _CONVOLUTIONS[node.op_type]
    inputs = [node.input[index] for index in kept if index < len(node.input)]
    weight = node.input[3] if operator == "QLinearConv" else node.input[1]
    inner = _make(operator, inputs, node.output[:1], **_window(node))
    yield from _turned(node, inner, len(dims.get(weight, ())) or _FLAT)


def _pool(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    window = _window(node)
    rank = len(window["kernel_shape"]) + 2 if "kernel_shape" in window else _FLAT
    yield from _turned(node, _make(_POOLS[node.op_type], node.input[:1], node.output[:1], **window), rank)


def _reorder_output(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    """Cut off channels beyond the real ones, which fill the last block."""
    given, name = attributes(node), node.output[0]
    for part, value in (("start", 0), ("end", given["channels"]), ("axis", 1)):
        yield _make("Constant", [], [f"{name}/{part}"], value_ints=[value])
    cut = f"{name}/cut" if channels_last(node) else name
    yield _make("Slice", [node.input[0], f"{name}/start", f"{name}/end", f"{name}/axis"], [cut])
    if cut != name:
        yield _make("Transpose", [cut], [name], perm=_to_channels_last(_FLAT))


def _pair(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    yield _make("Add", [node.input[0], node.input[3]], node.output[:1])


def _concatenation(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    """Scale and zero point of the result, then value, scale and zero point of each part."""
    yield _make("Concat", node.input[2::3], node.output[:1], axis=attributes(node)["axis"])


def _choice(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    yield _make("Where", [node.input[0], node.input[1], node.input[4]], node.output[:1])


def _same_name(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    yield _make(node.op_type, node.input, node.output, **{k: v for k, v in attributes(node).items() if k == "axis"})


def _gemm(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    turned = {name: value for name, value in attributes(node).items() if name in ("transA", "transB")}
    if node.op_type == "FusedGemm":
        yield _make("Gemm", node.input[:2], node.output[:1], **turned)
        return
    requantised = len(node.input) > 7 and bool(node.input[7])
    whole = node.output[0] if requantised else f"{node.output[0]}/whole"
    yield _make("Gemm", [node.input[0], node.input[3]], [whole], **turned)
    if not requantised:
        yield _make("Cast", [whole], node.output[:1], to=_FLOAT)


def _matrix_product(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    given = attributes(node)
    left = "...km" if given.get("transA", 0) else "...mk"
    right = "nk" if given.get("transB", 0) else "kn"
    dots = "" if len(dims.get(node.input[1], ())) == _MATRIX else "..."
    if node.op_type == "MatMulIntegerToFloat":
        yield _make("MatMulInteger", node.input[:2], [f"{node.output[0]}/whole"])
        yield _make("Cast", [f"{node.output[0]}/whole"], node.output[:1], to=_FLOAT)
    elif (left, right) == ("...mk", "kn"):
        yield _make("MatMul", node.input[:2], node.output[:1])
    else:
        yield _make("Einsum", node.input[:2], node.output[:1], equation=f"{left},{dots}{right}->...mn")


def _times(node: "onnx.NodeProto", rows: int, columns: int) -> "Iterator[onnx.NodeProto]":
    """Return a product with a matrix of these dimensions that is not there as such."""
    name = f"{node.output[0]}/matrix"
    yield _make("Constant", [], [f"{name}/shape"], value_ints=[rows, columns])
    yield _make("ConstantOfShape", [f"{name}/shape"], [name])
    yield _make("MatMul", [node.input[0], name], node.output[:1])


def _packed_product(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    given = attributes(node)
    yield from _times(node, given["K"], given["N"])


def _attention(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    """Replace attention with its projections inside; the size of the values' projection is the result's."""
    rows, columns = dims[node.input[1]]
    sizes = attributes(node).get("qkv_hidden_sizes")
    if node.op_type == "QAttention":
        yield _make("Cast", node.input[:1], [f"{node.output[0]}/float"], to=_FLOAT)
        node = _make("Attention", [f"{node.output[0]}/float"], node.output[:1])
    yield from _times(node, rows, sizes[2] if sizes else columns // 3)


def _recurrent(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    given = {name: value for name, value in attributes(node).items() if name in ("direction", "hidden_size")}
    yield _make("LSTM", node.input[:3], node.output, **given)


def _embedding(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    yield _make("Gather", [node.input[2], node.input[0]], node.output[:1])


_RULES: "dict[str, Callable[[onnx.NodeProto, Mapping[str, Sequence[int]]], Iterator[onnx.NodeProto]]]" = {
    **dict.fromkeys(_LIKE_FIRST, _like_first),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_POOLS, _pool),
    "ReorderOutput": _reorder_output,
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), _pair),
    "QLinearConcat": _concatenation,
    "QLinearWhere": _choice,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _same_name),
    **dict.fromkeys(("FusedGemm", "QGemm"), _gemm),
    **dict.fromkeys(
        ("FusedMatMul", "TransposeMatMul", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"), _matrix_product
    ),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4"), _packed_product),
    **dict.fromkeys(("Attention", "QAttention"), _attention),
    "DynamicQuantizeLSTM": _recurrent,
    "EmbedLayerNormalization": _embedding,
}


# Every node of a file, and dtype and shape of every value, at concrete sizes of the dynamic dimensions.

_OPSET = 21
"""Of standard operators, where a file has none but those of ONNX Runtime."""


@dataclass(frozen=True)
class Value:
    """What is known of a value; a shape is known as a whole or not at all."""

    dtype: str = ""
    shape: tuple[int, ...] | None = None


def value_bytes(value: Value) -> int | None:
    """Compute the bytes of a tensor in memory; None where its shape is not known, or its elements are texts."""
    bits = _item_bits(value.dtype)
    return None if value.shape is None or bits is None else -(-prod(value.shape) * bits // 8)


def _item_bits(dtype: str) -> int | None:
    """Return bits of one element in memory; None for texts, and for what is not known."""
    if dtype in ("int4", "uint4", "float4e2m1"):
        return 4
    if dtype.startswith("float8") or dtype == "bool":
        return 8
    digits = "".join(filter(str.isdigit, dtype))
    return int(digits) if digits else None


@dataclass(frozen=True)
class View:
    """A file without its structure: the nodes of the graph and of all subgraphs, and the values between them."""

    nodes: "dict[str, onnx.NodeProto]"
    """By name; nodes without one are called after their operator and their place."""
    values: dict[str, Value]
    constants: frozenset[str]
    """Names of initialisers and of what Constant nodes make."""

    def value(self, name: str) -> Value:
        """Return type and shape of a value as far as they are known."""
        return self.values.get(name, Value())


def view(path: Path, sizes: Mapping[str, int]) -> View:
    """Read a file; ``sizes`` are those of the words in its signature, and without one a dimension stays unknown.

    Raises:
        InvalidGraph: the file cannot be read.
        SignatureError: its inputs are no tensors.
    """
    import onnx.inliner

    model = model_file.skeleton(path)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    _bind(model.graph, _sizes_by_text(model.graph, model_file.signature(path), sizes))
    nodes, constants = _named(model), _constants(model)
    values = {name: Value(dtype, tuple(dims)) for name, (dtype, dims) in _initialisers(model).items()}
    _replace_foreign(model)
    _import_domains(model)
    known = onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False, data_prop=True)
    for graph in _graphs(known.graph):
        for one in (*graph.input, *graph.output, *graph.value_info):
            _note(values, one)
    return View(nodes, values, constants)


def _sizes_by_text(graph: "onnx.GraphProto", signature: Signature, sizes: Mapping[str, int]) -> dict[str, int]:
    """Map sizes by what stands in the file; inputs get theirs at once, since they may have nothing written there."""
    found = {}
    inputs = {value.name: value for value in graph.input}
    for spec in signature.inputs:
        for dim, word in zip(inputs[spec.name].type.tensor_type.shape.dim, spec.shape, strict=True):
            if isinstance(word, str) and word in sizes:
                if dim.dim_param:
                    found[dim.dim_param] = sizes[word]
                dim.dim_value = sizes[word]
    return found


def _bind(graph: "onnx.GraphProto", sizes: Mapping[str, int]) -> None:
    """Put sizes where words stand; the rest is for inference to find out."""
    for one in _graphs(graph):
        for value in (*one.input, *one.output, *one.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in sizes:
                    dim.dim_value = sizes[dim.dim_param]


def _named(model: "onnx.ModelProto") -> "dict[str, onnx.NodeProto]":
    import onnx.inliner

    found: dict[str, onnx.NodeProto] = {}
    for index, node in enumerate(model_file.nodes(model)):
        name = node.name if node.name and node.name not in found else f"{node.name or node.op_type}_{index}"
        found[name] = onnx.NodeProto.FromString(node.SerializeToString())
    return found


def _constants(model: "onnx.ModelProto") -> frozenset[str]:
    names = {tensor.name for graph in _graphs(model.graph) for tensor in graph.initializer}
    return frozenset(names | {node.output[0] for node in model_file.nodes(model) if node.op_type == "Constant"})


def _initialisers(model: "onnx.ModelProto") -> dict[str, tuple[str, list[int]]]:
    return {
        tensor.name: (model_file.dtype_name(tensor.data_type), list(tensor.dims))
        for graph in _graphs(model.graph)
        for tensor in graph.initializer
    }


def _graphs(graph: "onnx.GraphProto") -> "Iterator[onnx.GraphProto]":
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graphs(inner)


def _replace_foreign(model: "onnx.ModelProto") -> None:
    dims = {name: dims for name, (_, dims) in _initialisers(model).items()}
    for graph in _graphs(model.graph):
        nodes = []
        for node in graph.node:
            nodes += (node.domain not in STANDARD and replace_contrib_op(node, dims)) or [node]
        if len(nodes) != len(graph.node) or any(new is not old for new, old in zip(nodes, graph.node, strict=True)):
            copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
            del graph.node[:]
            graph.node.extend(copies)


def _import_domains(model: "onnx.ModelProto") -> None:
    """Import domains that a file uses without naming them: inference gives up on it otherwise."""
    named = {entry.domain for entry in model.opset_import}
    missing = {node.domain for node in model_file.nodes(model)} - named
    for domain in sorted(missing):
        model.opset_import.add(domain=domain, version=1 if domain else _OPSET)


def _note(values: dict[str, Value], info: "onnx.ValueInfoProto") -> None:
    """Note a value; where branches use one name for different ones, what they do not agree in is unknown."""
    tensor = info.type.tensor_type
    if not tensor.elem_type:
        return
    known = tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
    shape = tuple(int(dim.dim_value) for dim in tensor.shape.dim) if known else None
    found = Value(model_file.dtype_name(tensor.elem_type), shape)
    before = values.setdefault(info.name, found)
    if before != found:
        values[info.name] = Value(found.dtype if before.dtype == found.dtype else "", None)
