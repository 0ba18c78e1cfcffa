"""ONNX Runtime's own operators, told in standard ones that have the same shapes and types.

A graph that ONNX Runtime has optimised is full of operators that onnx knows nothing of. For finding out shapes, and
for nothing else, each is replaced by standard ones; what they compute does not matter. Operators without a rule are
left alone: ONNX Runtime writes down the shapes of values that were in the graph before it was optimised.

Rules follow docs/ContribOperators.md of ONNX Runtime, and its internal domains ``com.microsoft.nchwc`` (channels in
blocks, their number rounded up) and ``com.ms.internal.nhwc`` (channels last).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

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


def stand_ins(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "list[onnx.NodeProto] | None":
    """Standard nodes with the shapes and types of a foreign one; None where no rule for it fits.

    ``dims`` has the dimensions of initialisers by name.
    """
    rule = _RULES.get(node.op_type)
    try:
        return list(rule(node, dims)) if rule else None
    except (LookupError, ValueError):  # an input or attribute that the operator should have is not there
        return None


def attributes(node: "onnx.NodeProto") -> dict[str, Any]:
    """A node's attributes by name, as Python values."""
    import onnx

    return {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}


def channels_last(node: "onnx.NodeProto") -> bool:
    """Whether a node reads and writes images with the channels as the last dimension."""
    return (
        node.domain == _CHANNELS_LAST
        or node.op_type in ("NhwcFusedConv", "NhwcMaxPool")
        or bool(attributes(node).get("channels_last", 0))
    )


def _make(operator: str, inputs: Sequence[str], outputs: Sequence[str], **given: Any) -> "onnx.NodeProto":
    import onnx

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
    """A standard node, between transpositions where the foreign one has its channels last."""
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
    """Channels beyond the real ones, which fill the last block, are cut off."""
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
    """A product with a matrix of these dimensions that is not there as such."""
    name = f"{node.output[0]}/matrix"
    yield _make("Constant", [], [f"{name}/shape"], value_ints=[rows, columns])
    yield _make("ConstantOfShape", [f"{name}/shape"], [name])
    yield _make("MatMul", [node.input[0], name], node.output[:1])


def _packed_product(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    given = attributes(node)
    yield from _times(node, given["K"], given["N"])


def _attention(node: "onnx.NodeProto", dims: Mapping[str, Sequence[int]]) -> "Iterator[onnx.NodeProto]":
    """With the projections of queries, keys and values inside; the last ones' size is that of the result."""
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
