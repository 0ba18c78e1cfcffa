"""Read ONNX files: their signature and contents.

Weights that lie beside the file are never loaded as a whole: they are streamed when their values matter, and left alone
when they do not.
"""

import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel

from enginesmith.pipeline.errors import InvalidGraph, SignatureError
from enginesmith.pipeline.frameworks.onnx import choices, traversal
from enginesmith.pipeline.frameworks.samples import batch_symbol
from enginesmith.pipeline.tensors import (
    BATCH,
    DESCRIBED,
    DTYPES,
    Signature,
    TensorSpec,
    is_sum,
    join_sum,
    list_words,
    to_word,
)

if TYPE_CHECKING:
    import onnx


MODULE_KEY = "enginesmith.module"
"""Metadata of a node: dotted path of the PyTorch module that it came from (``encoder.layer.0.attention``)."""
FLOAT32_KEY = "enginesmith.float32"
"""Metadata of a node that stays in float32 in a graph of few bits: the reason. Some engines would cast it."""
ASKED = "was asked for"
"""The reason where somebody named the node."""

_SKELETON_BYTES = 1 << 10
"""Weights up to this size stay: they may be the shapes and scales that structure depends on."""
_PROTOBUF_LIMIT_BYTES = (1 << 31) - 1
_IR_VERSION_TAG = b"\x08"  # field 1 as a varint: what every writer puts first
_EXPRESSION = set("+-*/%()<>, ")
UNNAMED = ("", "?", "None", "-1", "unk")
"""Texts that exporters write at dimensions that have no name."""
_NUMBERED = re.compile(r"unk__\d+")
"""Name that tf2onnx gives each of them."""


class Summary(BaseModel, frozen=True):
    """Contents of a graph; counts include subgraphs and function bodies."""

    opset: int
    domains: dict[str, int]
    ir_version: int
    producer: str
    nodes: int
    operators: dict[str, int]
    weight_bytes: int
    parameters: int
    weight_dtypes: dict[str, int]
    """Bytes by dtype."""


def read(path: Path) -> "onnx.ModelProto":
    """Parse a file, its external weights left on disk; ONNX's own domain is imported under its empty name.

    Raises:
        InvalidGraph: there is no such file, or it is not a whole ONNX model.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidGraph(f"cannot read {path}: {error.strerror}", "give the path of an ONNX file") from error
    if not data:
        raise InvalidGraph(f"{path} is empty", "export or copy the model again")
    if len(data) > _PROTOBUF_LIMIT_BYTES:
        raise InvalidGraph(f"{path} is larger than 2 GB", "save it with external data: the format allows no more")
    cause = None
    try:
        model = onnx.load_model_from_string(data)
        if model.ir_version and model.HasField("graph"):
            for entry in (*model.opset_import, *(each for body in model.functions for each in body.opset_import)):
                entry.domain = "" if entry.domain == "ai.onnx" else entry.domain
            return model
    except DecodeError as error:
        cause = error
    if data.startswith(_IR_VERSION_TAG):
        message = f"{path} is truncated or damaged: it starts like ONNX and breaks off"
        raise InvalidGraph(message, "copy it again") from cause
    raise InvalidGraph(f"{path} is not an ONNX file", "give a model that was saved by an ONNX exporter") from cause


def skeleton(path: Path) -> "onnx.ModelProto":
    """Parse a file without the values of large weights: enough to read structure and types."""
    return _without_weights(read(path))


def _without_weights(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Take the values of large weights out of a model; returns it."""
    for tensor in traversal.tensors(model):
        if len(tensor.raw_data) > _SKELETON_BYTES:
            tensor.ClearField("raw_data")
    return model


def signature(path: Path) -> Signature:
    """Read names, dtypes and shapes of inputs and outputs; unnamed dimensions get names like ``output_0_dim_1``.

    So do those whose name is an expression, unless it is a sum (``past + 1``) of words that stand alone in inputs.
    Where no input's first dimension has a name or a fixed size, they are the batch, and so are outputs' without a name.
    What would be the batch is none where :func:`may_follow` says that no output follows it.

    Raises:
        InvalidGraph: the file cannot be read.
        SignatureError: an input or output is no tensor of a supported dtype and known rank.
    """
    model = read(path)
    graph = model.graph
    inputs = list_inputs(graph)
    shapes = [dims for value in inputs if (dims := value.type.tensor_type.shape.dim)]
    named = any(dim.dim_param == BATCH for dims in shapes for dim in dims)
    words = {} if named or any(not is_unnamed(dims[0]) for dims in shapes) else {"": BATCH}
    specs = [_spec("input", position, value, words) for position, value in enumerate(inputs)]
    results = [_spec("output", position, value, words) for position, value in enumerate(graph.output)]
    alone, names = {dim for spec in specs for dim in spec.shape}, dict[str, str]()
    declared = Signature(
        inputs=tuple(_name_sums(spec, f"input_{position}", alone, names) for position, spec in enumerate(specs)),
        outputs=tuple(_name_sums(spec, f"output_{position}", alone, names) for position, spec in enumerate(results)),
        unordered=choices.find_unordered(graph),
        tables=_count_table_rows(graph),
        lengths=_find_lengths(graph, [spec.name for spec in specs if spec.is_number]),
    )
    symbol = batch_symbol(declared)
    return declared.model_copy(update={"batched": symbol is None or may_follow(model, declared, symbol)})


def list_inputs(graph: "onnx.GraphProto") -> "list[onnx.ValueInfoProto]":
    """List the inputs of a graph that are no weights: old files declare these as inputs, too."""
    weights = {tensor.name for tensor in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return [value for value in graph.input if value.name not in weights]


def _name_sums(spec: TensorSpec, prefix: str, words: Collection[int | str], names: dict[str, str]) -> TensorSpec:
    """Give a name of its own to each sum that has another word than these; ``names`` has those of earlier sums."""
    shape = (
        names.setdefault(str(dim), f"{prefix}_dim_{axis}") if is_sum(dim) and {*list_words(dim)} - {*words} else dim
        for axis, dim in enumerate(spec.shape)
    )
    return spec.model_copy(update={"shape": tuple(shape)})


_FEW, _MANY = 3, 1 << 16
"""Sizes that are so far apart that strides, and cuts at a length, do not give the same result for both."""


def may_follow(model: "onnx.ModelProto", declared: Signature, symbol: str) -> bool:
    """Tell whether an output may have other sizes where an input's dimension has.

    Not where shape inference gives all of them, the same at two sizes of it. What the file declares of outputs is not
    relied on for that: exporters write the sizes of an example there, and names of their own.
    """
    if any(symbol in spec.shape for spec in declared.outputs):
        return True
    few, many = (_infer_outputs(model, declared, symbol, size) for size in (_FEW, _MANY))
    return few is None or few != many


def _infer_outputs(
    model: "onnx.ModelProto", declared: Signature, symbol: str, size: int
) -> list[tuple[int, ...]] | None:
    """Infer the outputs' shapes where a dimension of the inputs has this size; None if one is not known."""
    bare = _without_shapes(model)
    inputs = {value.name: value for value in bare.graph.input}
    sizes = {**dict.fromkeys(declared.symbols, _MANY), symbol: size}
    for spec in declared.inputs:
        for dim, length in zip(inputs[spec.name].type.tensor_type.shape.dim, spec.resolve(sizes), strict=True):
            dim.dim_value = length
    inferred = _infer(bare)
    shapes = [inferred.get(output.name) for output in model.graph.output]
    known = [tuple(dim for dim in shape if dim) for shape in shapes if shape is not None and all(shape)]
    return known if len(known) == len(shapes) else None


def infer_outputs(model: "onnx.ModelProto") -> dict[str, tuple[int | None, ...]]:
    """Infer the outputs' shapes from the inputs' alone, by name; sizes that are not known are None.

    The values of large weights are taken out of the model.
    """
    return _infer(_without_shapes(model))


def _without_shapes(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Copy a model without the shapes of its outputs and of what is within it."""
    import onnx

    bare = onnx.ModelProto()
    bare.CopyFrom(_without_weights(model))
    del bare.graph.value_info[:]
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    return bare


def _infer(bare: "onnx.ModelProto") -> dict[str, tuple[int | None, ...]]:
    import onnx.shape_inference

    try:
        inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    except onnx.shape_inference.InferenceError:  # it knows an operator's domain in no version, say
        return {}
    results = {output.name: output.type.tensor_type for output in inferred.graph.output}
    return {
        name: tuple(dim.dim_value if is_fixed(dim) else None for dim in result.shape.dim)
        for name, result in results.items()
        if result.HasField("shape")
    }


_CONVERT = "convert the model without this output; skl2onnx does with zipmap=False, and labels as whole numbers"

_VECTORIZE = "convert the steps behind the vectorizer or encoder alone, and give the numbers that it makes as the input"


def _spec(side: str, position: int, value: "onnx.ValueInfoProto", words: dict[str, str]) -> TensorSpec:
    what = f"the {side} {value.name!r}"
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        noun = (kind or "value without a type").removesuffix("_type")
        remedy = "only tensors can be fed" if side == "input" else f"only tensors can be compared: {_CONVERT}"
        raise SignatureError(f"{what} is a {noun}", remedy)
    tensor = value.type.tensor_type
    dtype = dtype_name(tensor.elem_type)
    if dtype not in DESCRIBED:
        remedy = f"supported are {', '.join(DTYPES)}: cast inside the graph"
        if dtype == "string":
            remedy = (
                f"texts cannot be compared: {_CONVERT}" if side == "output" else f"texts cannot be fed: {_VECTORIZE}"
            )
        raise SignatureError(f"{what} has the dtype {dtype}", remedy)
    if not tensor.HasField("shape"):
        raise SignatureError(f"{what} has no shape, not even a rank", "write its shape into the file, or export again")
    shape = (_dim(dim, axis, f"{side}_{position}_dim_{axis}", words) for axis, dim in enumerate(tensor.shape.dim))
    return TensorSpec(name=value.name, dtype=dtype, shape=tuple(shape))


def _dim(dim: "onnx.TensorShapeProto.Dimension", axis: int, fallback: str, words: dict[str, str]) -> int | str:
    """Return a dimension's size or word; ``words`` has those of earlier texts, as dimensions of one text are equal.

    Its word of no text, if there is one, is that of first dimensions without a name.
    """
    if is_fixed(dim):
        return int(dim.dim_value)
    text = dim.dim_param
    if not axis and "" in words and is_unnamed(dim):
        return words.setdefault(text, words[""])
    if text in UNNAMED:
        return fallback
    if set(text) & _EXPRESSION:
        return _read_sum(text) or words.setdefault(text, fallback)
    return words.setdefault(text, to_word(text))


def _read_sum(text: str) -> str:
    """Read ``past_sequence_length + 1`` as a sum of words; empty where it is none."""
    parts = [part.strip() for part in text.split("+")]
    if any(not part or set(part) & _EXPRESSION for part in parts) or all(part.isdecimal() for part in parts):
        return ""
    return str(join_sum(part if part.isdecimal() else to_word(part) for part in parts))


def is_unnamed(dim: "onnx.TensorShapeProto.Dimension") -> bool:
    """Tell whether a dimension has neither a size nor a name that somebody chose."""
    return not is_fixed(dim) and (dim.dim_param in UNNAMED or _NUMBERED.fullmatch(dim.dim_param) is not None)


def is_fixed(dim: "onnx.TensorShapeProto.Dimension") -> bool:
    """Tell whether a dimension is declared with a size."""
    return dim.HasField("dim_value") and dim.dim_value >= 0  # some exporters write -1 for any size


def lacks_shape(value: "onnx.ValueInfoProto") -> bool:
    """Tell whether not even the rank of a tensor is declared."""
    return value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")


def dtype_name(elem_type: int) -> str:
    """Return numpy's name for an ONNX element type; ONNX's own, in lower case, where numpy has none."""
    import onnx

    try:
        name = str(onnx.TensorProto.DataType.Name(elem_type)).lower()
    except ValueError:
        return f"unknown type {elem_type}"
    return {"float": "float32", "double": "float64"}.get(name, name)


def summary(path: Path) -> Summary:
    """Count what is in the file, without loading its weights.

    Raises:
        InvalidGraph: the file cannot be read.
    """
    model = read(path)
    operators, sizes = Counter(node.op_type for node in traversal.nodes(model)), _bytes_by_dtype(model)
    domains = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    return Summary(
        opset=domains.get("ai.onnx", 0),
        domains=domains,
        ir_version=model.ir_version,
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        nodes=operators.total(),
        operators=dict(sorted(operators.items(), key=lambda item: (-item[1], item[0]))),
        weight_bytes=sizes.total(),
        parameters=sum(map(count_elements, traversal.tensors(model))),
        weight_dtypes=dict(sizes.most_common()),
    )


def count_weight_bytes(model: "onnx.ModelProto") -> int:
    """Add up the sizes of all constants, of those in external files, too."""
    return _bytes_by_dtype(model).total()


def _bytes_by_dtype(model: "onnx.ModelProto") -> Counter[str]:
    sizes = Counter[str]()
    for tensor in traversal.tensors(model):
        sizes[dtype_name(tensor.data_type)] += _bytes(tensor)
    return sizes


def storage_bytes(dtype: str, elements: int) -> int | None:
    """Compute the bytes of so many elements; None for texts and types without a size."""
    sized = re.match(r"[a-z]+(\d+)", "uint8" if dtype == "bool" else dtype)
    return -(-elements * int(sized[1]) // 8) if sized else None


def _bytes(tensor: "onnx.TensorProto") -> int:
    return storage_bytes(dtype_name(tensor.data_type), count_elements(tensor)) or 0


def count_elements(tensor: "onnx.TensorProto") -> int:
    """Count the numbers of a constant, also of one that is stored elsewhere."""
    return int(np.prod(tensor.dims, dtype=np.int64))


def external_files(path: Path) -> list[str]:
    """Return names of the weight files beside the model, sorted.

    Raises:
        InvalidGraph: the file cannot be read.
    """
    return sorted({locate_external(tensor)[0] for tensor in traversal.tensors(read(path)) if is_external(tensor)})


def copy(path: Path, target: Path) -> None:
    """Copy a model to the file ``target``, and the files of its weights beside that."""
    for source, name in ((path.name, target.name), *((name, name) for name in external_files(path))):
        (target.parent / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path.parent / source, target.parent / name)


def list_empty(model: "onnx.ModelProto") -> set[str]:
    """Name the constants of one dimension that have no elements, of subgraphs, too."""
    return {name for name, tensor in traversal.constants(model) if list(tensor.dims) == [0]}


def is_external(tensor: "onnx.TensorProto") -> bool:
    """Tell whether a tensor's values lie in a file beside the model."""
    return bool(tensor.data_location == tensor.EXTERNAL)


def locate_external(tensor: "onnx.TensorProto") -> tuple[str, int, int]:
    """Locate external data: file name, offset and length in bytes.

    Raises:
        InvalidGraph: offset or length are no numbers.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    offset, length = (entries.get(name, "") for name in ("offset", "length"))
    if not (offset or "0").isdecimal() or not (length or "0").isdecimal():
        message = f"the external data of {tensor.name!r} has offset {offset!r} and length {length!r}"
        raise InvalidGraph(message, "export the model again")
    return entries.get("location", ""), int(offset or 0), int(length or _bytes(tensor))


_CARRYING = (
    *("Add", "Sub", "Mul", "Neg", "Abs", "Max", "Min", "Sum", "ReduceSum", "ReduceMax", "ReduceMin", "CumSum"),
    *(*choices.SAME_NUMBERS, "Tile", "Slice", "Split", "Concat", "Gather", "Pad", "Clip"),
)
"""Operators whose results are numbers if their inputs are, and indices or masks if those are."""
_OF_NUMBERS = ("Div", "Mod", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot")
"""Operators of whole numbers that nobody applies to masks; their results may be indices."""
_ROUNDING = ("Floor", "Ceil", "Round")
_OF_FEATURES = (
    *("DequantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"),
    *("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor", "LinearClassifier", "LinearRegressor"),
    *("SVMClassifier", "SVMRegressor", "Scaler", "Normalizer"),
)
"""Operators whose first input is quantized numbers, or features."""
_OF_ALIKE = ("Add", "Sub", "Mul", "Max", "Min", "Sum", "Concat", "BitwiseAnd", "BitwiseOr", "BitwiseXor")
"""Operators all of whose inputs may be numbers; of others, the first alone."""
MASKS = ("mask", "flag", "keep", "valid", "pad", "visible", "present")
"""Parts of the names of inputs that are masks and flags."""


def list_quantities(path: Path, signature: Signature) -> tuple[str, ...]:
    """List the inputs of whole numbers that may be large: no indices, sizes, counts, lengths, masks or flags.

    They are followed through all that is made of them. Nothing is compared with them, divided by them, or read by a
    graph within a node. Where they are cast to floats, as masks are, something else tells that they are numbers: they
    have at most 16 bits, or were divided, shifted or combined bit by bit. Floats that become whole numbers again are
    followed, too.
    """
    readers = defaultdict[str, list["onnx.NodeProto"]](list)
    for node in skeleton(path).graph.node:
        for name in dict.fromkeys(traversal.list_reads(node)):
            readers[name].append(node)
    whole = (spec for spec in signature.inputs if "int" in spec.dtype and not spec.is_number)
    unmasked = (spec for spec in whole if not any(word in spec.name.lower() for word in MASKS))
    short = ("int8", "uint8", "int16", "uint16")
    return tuple(spec.name for spec in unmasked if _are_quantities(spec.name, readers, known=spec.dtype in short))


def _are_quantities(name: str, readers: "Mapping[str, list[onnx.NodeProto]]", *, known: bool) -> bool:
    pending, seen = {(name, known)}, set[tuple[str, bool]]()
    while pending:
        seen.add(each := pending.pop())
        value, known = each
        for node in readers.get(value, ()):
            kind, is_first = node.op_type, value not in node.input[1:]
            if kind in choices.SHAPES or (kind in _OF_FEATURES and is_first):
                continue
            if kind not in (*_CARRYING, *_OF_NUMBERS) or not (is_first or kind in _OF_ALIKE):
                return False
            target = _read_cast(node)
            if target is None or "int" in target:
                pending |= {(result, known or kind in _OF_NUMBERS) for result in node.output} - seen
            elif known and "float" in target:
                pending |= {(result, True) for result in _list_whole_again(node.output[0], readers)} - seen
            else:
                return False
    return True


def _list_whole_again(name: str, readers: "Mapping[str, list[onnx.NodeProto]]") -> set[str]:
    """List the whole numbers that floats are cast to once they were computed with one by one, as indices are."""
    pending, seen, whole = {name}, set[str](), set[str]()
    while pending:
        seen.add(value := pending.pop())
        for node in readers.get(value, ()):
            if node.op_type in (*_CARRYING, *_OF_NUMBERS, *_ROUNDING):
                target = _read_cast(node)
                (whole if target and "int" in target else pending).update({*node.output} - seen)
    return whole


def _read_cast(node: "onnx.NodeProto") -> str | None:
    """Read the dtype that a node casts to; None if it is no Cast."""
    return dtype_name(next(each.i for each in node.attribute if each.name == "to")) if node.op_type == "Cast" else None


COUNTING = ("Shape", "Size", "ArgMax", "ArgMin", "NonZero", "TopK")
"""Operators whose whole numbers are sizes and places, whatever they are of."""


def _count_table_rows(graph: "onnx.GraphProto") -> dict[str, int]:
    """Count the rows of the smallest constant table that an input is an index of, as tokens are, by the input's name.

    Tables may be quantized. Inputs that are computed with before they become indices are left out.
    """
    sizes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    inputs = {value.name: value.name for value in graph.input if value.name not in sizes}
    rows = dict[str, int]()
    for node in graph.node:
        read = node.input[0] if node.input else ""
        if node.op_type in choices.SAME_NUMBERS and read in inputs:
            inputs[node.output[0]] = inputs[read]
        elif node.op_type == "DequantizeLinear" and read in sizes:
            sizes[node.output[0]] = sizes[read]
        elif node.op_type == "Gather" and read in sizes and (name := inputs.get(node.input[1])):
            size = sizes[read][next((entry.i for entry in node.attribute if entry.name == "axis"), 0)]
            rows[name] = min(size, rows.get(name, size))
    return rows


_LENGTHS = {"LSTM": 4, "GRU": 4, "RNN": 4, "Attention": 6, "GroupQueryAttention": 5}
"""Operators that read lengths of sequences, and the place of these among their inputs."""
_COMPUTING = (*choices.SAME_NUMBERS, "Add", "Sub", "Mul", "Div", "Min", "Max", "Clip", "Neg", "Floor", "Ceil", "Round")
"""Operators that make lengths of lengths, as of those of a strided layer."""
_COMPARING = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")


def _find_lengths(graph: "onnx.GraphProto", numbers: Collection[str]) -> tuple[str, ...]:
    """Find those of these inputs that an operator reads as lengths, or that are compared with places counted from 0."""
    sources, places, lengths = {name: {name} for name in numbers}, set[str](), set[str]()
    for node in traversal.walk(graph.node):  # of graphs within nodes, too: they read values by their names
        read = [sources.get(name, set()) for name in node.input]
        if (place := _LENGTHS.get(node.op_type, len(read))) < len(read):
            lengths |= read[place]
        elif node.op_type in _COMPARING and not places.isdisjoint(node.input):
            lengths = lengths.union(*read)
        elif node.op_type == "Range" or (node.op_type in _COMPUTING and not places.isdisjoint(node.input)):
            places.update(node.output)
        elif node.op_type in _COMPUTING:
            sources.update(dict.fromkeys(node.output, set().union(*read)))
    return tuple(name for name in numbers if name in lengths)
