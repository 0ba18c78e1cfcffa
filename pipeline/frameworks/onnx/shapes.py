"""Find dtype and shape of every value of a graph, also of one that ONNX Runtime has optimized.

Such a graph is full of operators that onnx knows nothing of. For finding out shapes, and for nothing else, each is
replaced by standard ones that have the same shapes and types; what they compute does not matter. Operators without a
rule are left alone: ONNX Runtime writes down the shapes of values that were in the graph before it was optimized.

Rules follow docs/ContribOperators.md of ONNX Runtime, and its internal domains ``com.microsoft.nchwc`` (channels in
blocks, their number rounded up) and ``com.ms.internal.nhwc`` (channels last).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginesmith.pipeline.frameworks.onnx import model_file, reference, traversal
from enginesmith.pipeline.frameworks.onnx.traversal import attributes
from enginesmith.pipeline.tensors import compute_size, list_words

if TYPE_CHECKING:
    import onnx

Dims = Mapping[str, Sequence[int]]
"""Initializer's name → its dimensions."""
_STANDARD = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training")
_FLOAT = 1  # TensorProto.FLOAT
_LIKE_FIRST = (
    *("BiasGelu", "FastGelu", "Gelu", "QuickGelu", "BiasSoftmax", "BiasAdd", "BiasSplitGelu", "SkipLayerNormalization"),
    *("SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization", "QLinearSigmoid", "QLinearLeakyRelu"),
    *("QLinearSoftmax", "MultiHeadAttention", "RotaryEmbedding", "ReorderInput"),
)
_RENAMED: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {
    "QLinearAdd": ("Add", (0, 3), ()),
    "QLinearMul": ("Mul", (0, 3), ()),
    "QLinearWhere": ("Where", (0, 1, 4), ()),
    "FusedGemm": ("Gemm", (0, 1), ("transA", "transB")),
    "EmbedLayerNormalization": ("Gather", (2, 0), ()),
    "DynamicQuantizeLSTM": ("LSTM", (0, 1, 2), ("direction", "hidden_size")),
}
"""Operator → standard one, the inputs and the attributes that it gets."""
_POOLS = {
    "QLinearAveragePool": "AveragePool",
    "QLinearGlobalAveragePool": "GlobalAveragePool",
    "NhwcMaxPool": "MaxPool",
    **{name: name for name in ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")},
}
_CONVOLUTIONS = {
    **dict.fromkeys(("Conv", "FusedConv", "NhwcFusedConv"), ("Conv", 2)),
    "QLinearConv": ("QLinearConv", 8),
    "ConvTranspose": ("ConvTranspose", 2),
}
"""Operator → standard one, and how many inputs it gets."""
_WINDOW = (
    *("auto_pad", "ceil_mode", "dilations", "group", "kernel_shape", "output_padding", "output_shape", "pads"),
    "strides",
)
_ROUNDS = 50
"""Shapes that depend on other computed shapes, one after the other, that are followed."""
_MATRIX = 2
_FLAT = 4  # rank of what is pooled whole, where no kernel tells it
_TO_CHANNELS_FIRST, _TO_CHANNELS_LAST = [0, _FLAT - 1, *range(1, _FLAT - 1)], [0, *range(2, _FLAT), 1]


def _has_channels_last(node: "onnx.NodeProto") -> bool:
    """Tell whether a node reads and writes images with the channels as the last dimension."""
    known = node.domain == "com.ms.internal.nhwc" or node.op_type in ("NhwcFusedConv", "NhwcMaxPool")
    return known or bool(attributes(node).get("channels_last", 0))


def _make(operator: str, inputs: Sequence[str], outputs: Sequence[str], **given: Any) -> "onnx.NodeProto":
    from onnx import helper

    return helper.make_node(operator, list(inputs), list(outputs), **given)


def _like_first(node: "onnx.NodeProto", dims: Dims) -> "Iterator[onnx.NodeProto]":
    if node.op_type == "ReorderInput" and _has_channels_last(node):
        yield _make("Transpose", node.input[:1], node.output[:1], perm=_TO_CHANNELS_FIRST)
    else:
        yield _make("Identity", node.input[:1], node.output[:1])
    if node.op_type.startswith("Skip") and len(node.output) > 3 and node.output[3]:
        yield _make("Identity", node.input[:1], node.output[3:4])


def _rename(node: "onnx.NodeProto", dims: Dims) -> "Iterator[onnx.NodeProto]":
    operator, inputs, names = _RENAMED[node.op_type]
    outputs = node.output if operator == "LSTM" else node.output[:1]
    options = {name: value for name, value in attributes(node).items() if name in names}
    yield _make(operator, [node.input[index] for index in inputs], outputs, **options)


def _replace_window(node: "onnx.NodeProto", dims: Dims) -> "Iterator[onnx.NodeProto]":
    """Replace a convolution or pooling, between transpositions where it has its channels last."""
    window = {name: value for name, value in attributes(node).items() if name in _WINDOW}
    if node.op_type in _POOLS:
        operator, inputs = _POOLS[node.op_type], 1
        rank = len(window["kernel_shape"]) + 2 if "kernel_shape" in window else _FLAT
    else:
        operator, inputs = _CONVOLUTIONS[node.op_type]
        rank = len(dims.get(node.input[3 if operator == "QLinearConv" else 1], ())) or _FLAT
    inner = _make(operator, node.input[:inputs], node.output[:1], **window)
    if not _has_channels_last(node):
        yield inner
        return
    before, after = f"{node.output[0]}/first", f"{node.output[0]}/last"
    yield _make("Transpose", node.input[:1], [before], perm=[0, rank - 1, *range(1, rank - 1)])
    inner.input[0], inner.output[0] = before, after
    yield inner
    yield _make("Transpose", [after], node.output[:1], perm=[0, *range(2, rank), 1])


def _reorder_output(node: "onnx.NodeProto", dims: Dims) -> "Iterator[onnx.NodeProto]":
    """Cut off channels beyond the real ones, which fill the last block."""
    name = node.output[0]
    for part, value in (("start", 0), ("end", attributes(node)["channels"]), ("axis", 1)):
        yield _make("Constant", [], [f"{name}/{part}"], value_ints=[value])
    cut = f"{name}/cut" if _has_channels_last(node) else name
    yield _make("Slice", [node.input[0], f"{name}/start", f"{name}/end", f"{name}/axis"], [cut])
    if cut != name:
        yield _make("Transpose", [cut], [name], perm=_TO_CHANNELS_LAST)


def _concatenation(node: "onnx.NodeProto", dims: Dims) -> "Iterator[onnx.NodeProto]":
    """Join parts: inputs are scale and zero point of the result, then value, scale and zero point of each part."""
    yield _make("Concat", node.input[2::3], node.output[:1], axis=attributes(node)["axis"])


def _quantization(node: "onnx.NodeProto", dims: Dims) -> "Iterator[onnx.NodeProto]":
    axis = {name: value for name, value in attributes(node).items() if name == "axis"}
    yield _make(node.op_type, node.input, node.output, **axis)


def _quantized_gemm(node: "onnx.NodeProto", dims: Dims) -> "Iterator[onnx.NodeProto]":
    transposed = {name: value for name, value in attributes(node).items() if name in ("transA", "transB")}
    requantized = len(node.input) > 7 and bool(node.input[7])
    whole = node.output[0] if requantized else f"{node.output[0]}/whole"
    yield _make("Gemm", [node.input[0], node.input[3]], [whole], **transposed)
    if not requantized:
        yield _make("Cast", [whole], node.output[:1], to=_FLOAT)


def _matrix_product(node: "onnx.NodeProto", dims: Dims) -> "Iterator[onnx.NodeProto]":
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


def _absent_matrix_product(node: "onnx.NodeProto", dims: Dims) -> "Iterator[onnx.NodeProto]":
    """Multiply by a matrix that is not there as such: packed weights, or attention's projection of the values."""
    given, value, name = attributes(node), node.input[0], f"{node.output[0]}/matrix"
    if node.op_type in ("Attention", "QAttention"):
        rows, columns = dims[node.input[1]]
        columns = given["qkv_hidden_sizes"][2] if "qkv_hidden_sizes" in given else columns // 3
    else:
        rows, columns = given["K"], given["N"]
    if node.op_type == "QAttention":
        value = f"{node.output[0]}/float"
        yield _make("Cast", node.input[:1], [value], to=_FLOAT)
    yield _make("Constant", [], [f"{name}/shape"], value_ints=[rows, columns])
    yield _make("ConstantOfShape", [f"{name}/shape"], [name])
    yield _make("MatMul", [value, name], node.output[:1])


_RULES: "dict[str, Callable[[onnx.NodeProto, Dims], Iterator[onnx.NodeProto]]]" = {
    **dict.fromkeys(_LIKE_FIRST, _like_first),
    **dict.fromkeys(_RENAMED, _rename),
    **dict.fromkeys((*_CONVOLUTIONS, *_POOLS), _replace_window),
    "ReorderOutput": _reorder_output,
    "QLinearConcat": _concatenation,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantization),
    "QGemm": _quantized_gemm,
    **dict.fromkeys(
        ("FusedMatMul", "TransposeMatMul", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"), _matrix_product
    ),
    **dict.fromkeys(("MatMulNBits", "MatMulBnb4", "Attention", "QAttention"), _absent_matrix_product),
}


# Every node of a file, and dtype and shape of every value, at concrete sizes of the dynamic dimensions.

_OPSET = 21
"""Version of the standard operators, where a file has none but those of ONNX Runtime."""


@dataclass(frozen=True)
class Value:
    """Type of a value, as far as it is known; a shape is known as a whole or not at all."""

    dtype: str = ""
    shape: tuple[int, ...] | None = None


def value_bytes(value: Value) -> int | None:
    """Compute the bytes of a tensor in memory; None where its shape is not known, or its elements are texts."""
    return None if value.shape is None else model_file.storage_bytes(value.dtype, prod(value.shape))


@dataclass(frozen=True)
class View:
    """A file without its structure: the nodes of the graph and of all subgraphs, and the values between them."""

    nodes: "dict[str, onnx.NodeProto]"
    """By name; nodes without one are called after their operator and their place."""
    values: dict[str, Value]
    constants: frozenset[str]
    """Names of initializers and of what Constant nodes make."""

    def value(self, name: str) -> Value:
        """Look up type and shape of a value as far as they are known."""
        return self.values.get(name, Value())


def view(path: Path, sizes: Mapping[str, int]) -> View:
    """Read a file; ``sizes`` are those of the words in its signature, and without one a dimension stays unknown.

    Raises:
        InvalidGraph: the file cannot be read.
        SignatureError: its inputs are no tensors.
    """
    model = model_file.skeleton(path)
    _fix_sizes(path, model, sizes)
    initializers = [tensor for graph in traversal.list_graphs(model) for tensor in graph.initializer]
    values = {item.name: Value(model_file.dtype_name(item.data_type), tuple(item.dims)) for item in initializers}
    constants = {*values, *(node.output[0] for node in traversal.nodes(model) if node.op_type == "Constant")}
    nodes: dict[str, onnx.NodeProto] = {}
    for index, node in enumerate(traversal.nodes(model)):
        name = node.name if node.name and node.name not in nodes else f"{node.name or node.op_type}_{index}"
        nodes[name] = _copy(node)
    _replace_foreign(model, {tensor.name: tensor.dims for tensor in initializers})
    imported = {entry.domain for entry in model.opset_import}  # inference gives up if a domain in use is not named
    for domain in sorted({node.domain for node in traversal.nodes(model)} - imported):
        model.opset_import.add(domain=domain, version=1 if domain else _OPSET)
    inferred = _infer(model)
    for _ in range(_ROUNDS):
        if not _fold_shapes(model, {name: value.shape for name, value in inferred.items()}):
            break
        inferred = _infer(model)
    return View(nodes, inferred | values, frozenset(constants))


def _infer(model: "onnx.ModelProto") -> dict[str, Value]:
    """Infer types and shapes by name."""
    import onnx.shape_inference

    known = onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False, data_prop=True)
    values: dict[str, Value] = {}
    for graph in traversal.list_graphs(known):
        for info in (*graph.input, *graph.output, *graph.value_info):
            _note(values, info)
    return values


def _fix_sizes(path: Path, model: "onnx.ModelProto", sizes: Mapping[str, int]) -> None:
    """Put sizes where words stand; inputs get theirs even if no word is written there. The rest is for inference."""
    by_text = {}
    inputs = {value.name: value for value in model.graph.input}
    for spec in model_file.signature(path).inputs:
        for dim, word in zip(inputs[spec.name].type.tensor_type.shape.dim, spec.shape, strict=True):
            if isinstance(word, str) and sizes.keys() >= {*list_words(word)}:
                if dim.dim_param not in model_file.UNNAMED:
                    by_text[dim.dim_param] = compute_size(word, sizes)
                dim.dim_value = compute_size(word, sizes)
    for body in traversal.list_graphs(model):
        for value in (*body.input, *body.output, *body.value_info):
            for dim in value.type.tensor_type.shape.dim:
                parts = [dim.dim_param] if dim.dim_param in by_text else map(str.strip, dim.dim_param.split("+"))
                terms = [int(part) if part.isdecimal() else by_text.get(part) for part in parts]
                if dim.dim_param and None not in terms:
                    dim.dim_value = sum(term for term in terms if term is not None)


def _copy(node: "onnx.NodeProto") -> "onnx.NodeProto":
    copy: onnx.NodeProto = type(node).FromString(node.SerializeToString())
    return copy


def _replace_foreign(model: "onnx.ModelProto", dims: Dims) -> None:
    """Replace nodes of other domains by standard ones, where a rule fits."""
    for graph in traversal.list_graphs(model):
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            rule = _RULES.get(node.op_type) if node.domain not in _STANDARD else None
            try:
                nodes += list(rule(node, dims)) if rule else [node]
            except (LookupError, ValueError):  # an input or attribute that the operator should have is not there
                nodes.append(node)
        if len(nodes) != len(graph.node) or any(new is not old for new, old in zip(nodes, graph.node, strict=True)):
            copies = [_copy(node) for node in nodes]
            del graph.node[:]
            graph.node.extend(copies)


def _note(values: dict[str, Value], info: "onnx.ValueInfoProto") -> None:
    """Note a value; where branches use one name for different ones, what they do not agree in is unknown.

    So is a shape of sizes below 0, which inference gives behind a window that is larger than what it moves over.
    """
    tensor = info.type.tensor_type
    if not tensor.elem_type:
        return
    known = tensor.HasField("shape") and all(map(model_file.is_fixed, tensor.shape.dim))
    shape = tuple(int(dim.dim_value) for dim in tensor.shape.dim) if known else None
    value = Value(model_file.dtype_name(tensor.elem_type), shape)
    before = values.setdefault(info.name, value)
    if before != value:
        values[info.name] = Value(value.dtype if before.dtype == value.dtype else "", None)


# What a graph computes of shapes that are known becomes constants, so that shapes behind it can be inferred.
#
# onnx's inference follows such computations in part: not through a Slice along an axis that is named, for example.

_OF_SHAPES = (
    *("Add", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Gather", "Identity", "Max", "Min", "Mul"),
    *("Range", "ReduceProd", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where"),
)
"""Operators by which graphs compute shapes from shapes."""
_INTEGERS = (6, 7, 9)  # TensorProto.INT32, INT64, BOOL
_MOST_OF_SHAPE = 64
"""Elements up to which a constant may be a shape, or a part of one."""


def _fold_shapes(model: "onnx.ModelProto", shapes: Mapping[str, tuple[int, ...] | None]) -> bool:
    """Replace, in the main graph, nodes that compute of ``shapes`` alone; tell whether there was any."""
    import onnx.helper
    import onnx.numpy_helper

    graph = model.graph
    inputs = {value.name for value in graph.input}
    held = [tensor for tensor in graph.initializer if tensor.name not in inputs]
    known = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in held if _may_be_shape(tensor)}
    changed = False
    for node in graph.node:
        if node.op_type == "Constant":
            for item in node.attribute:
                if item.name == "value" and _may_be_shape(item.t):
                    known[node.output[0]] = onnx.numpy_helper.to_array(item.t)
        elif (result := _compute(node, known, shapes, model)) is not None:
            known[node.output[0]] = result
            value = onnx.numpy_helper.from_array(result)
            node.CopyFrom(onnx.helper.make_node("Constant", [], [node.output[0]], value=value))
            changed = True
    return changed


def _may_be_shape(tensor: "onnx.TensorProto") -> bool:
    return prod(tensor.dims) <= _MOST_OF_SHAPE and tensor.data_type in _INTEGERS


def _compute(
    node: "onnx.NodeProto", known: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...] | None], model: Any
) -> Any:
    """Compute a node's result; None where it is not known, or no part of a shape."""
    if node.op_type == "Shape" and (shape := shapes.get(node.input[0])) is not None:
        ends = {item.name: item.i for item in node.attribute}
        return np.array(shape[ends.get("start", 0) : ends.get("end", len(shape))], np.int64)
    given = {name: known[name] for name in node.input if name in known}
    if node.op_type not in _OF_SHAPES or len(node.output) != 1 or any(n and n not in given for n in node.input):
        return None
    try:
        results: Any = reference.open_reference(_alone(node, given, model)).run(None, given)
    except Exception:  # noqa: BLE001 - whatever is wrong with this node, its shape stays unknown
        return None
    (result,) = results
    return result if result.size <= _MOST_OF_SHAPE else None


def _alone(node: "onnx.NodeProto", given: Mapping[str, Any], model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Make a model of one node."""
    import onnx.helper

    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in given.items()
    ]
    result = onnx.helper.make_empty_tensor_value_info(node.output[0])
    graph = onnx.helper.make_graph([node], "shapes", ends, [result])
    return onnx.helper.make_model(graph, opset_imports=model.opset_import)
