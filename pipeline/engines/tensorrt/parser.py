"""Parse ONNX graphs into TensorRT networks, and refuse what TensorRT takes without a word and gets wrong or dies of."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginesmith.pipeline.engines.tensorrt.versions import Capabilities
from enginesmith.pipeline.errors import UnsupportedGraph, UsageError
from enginesmith.pipeline.frameworks.onnx import model_file, traversal
from enginesmith.pipeline.system.software import numbers

if TYPE_CHECKING:
    import onnx


_SHOWN = 4
_LEAST_TARGET: Mapping[str, int] = {"float8e4m3fn": 89, "float8e5m2": 89, "bfloat16": 80, "int4": 80, "float4e2m1": 120}
"""Element type → the first compute capability that has it (the vendor's support matrix)."""
_WHY_TYPES = {
    "float64": "TensorRT has no float64 arithmetic, and builds such a graph without a word",
    "uint8": "TensorRT reads uint8 quantization as int8, and silently gives wrong answers",
    "string": "TensorRT has no strings",
    "complex64": "TensorRT has no complex numbers",
    "complex128": "TensorRT has no complex numbers",
    "uint16": "TensorRT has no uint16",
    "uint32": "TensorRT has no uint32",
    "uint64": "TensorRT has no uint64",
    "int16": "TensorRT has no int16",
    "float8e5m2": "TensorRT has E4M3 only",
}
_WHY: Mapping[str, tuple[str, str]] = {
    "Plugin not found": ("no importer and no plugin has this operator", "load its library: --plugins FILE.so"),
    "Non-zero zero point": ("its zero point is not 0", "quantize symmetrically: int8 with zero point 0"),
    "input has type Int32 but must have type": ("it dequantizes int32", "leave biases in float: do not quantize them"),
    "must have same input types": ("its inputs differ in type", "cast one of them: TensorRT converts nothing itself"),
    "convertDtype": ("TensorRT does not have its element type", "convert it to float32, float16 or int64"),
    "more output tensors than TRT expected": ("it has fewer outputs than the operator", "export the model again"),
}
"""Words of the parser → their meaning, and a remedy."""
_OTHER_FORMATS = ("QLinear", "DynamicQuantize", "MatMulInteger", "ConvInteger", "MatMulNBits", "MatMulBnb4")
_NOISE = re.compile(
    r"Error Code \d+: |API Usage Error |Internal Error |\(?\bIn \w+ at /\S+\)?|Assertion failed: |Invalid Node - \S+"
)
_QDQ = "quantize in the Q/DQ format: QuantizeLinear and DequantizeLinear around ordinary operators"
_WORKS_WITH = "replace the operator in the model, or export it with another opset"
_FAULT = "look at the node's inputs and attributes; export the model again"

DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
}
"""TensorRT's ``DataType`` by name → dtype, of those that a host array can have."""

Problem = tuple[str, str]
"""A fault of a graph, and the reason why it is one."""


def node_name(node: "onnx.NodeProto") -> str:
    """Name a node for people: operator, name or first output, and the PyTorch module that it came from."""
    name = node.name or next(iter(node.output), "")
    module = next((entry.value for entry in node.metadata_props if entry.key == model_file.MODULE_KEY), "")
    return f"{node.op_type} {name!r}" + (f" (of the module {module!r})" if module else "")


def validate_graph(model: "onnx.ModelProto", targets: tuple[str, ...], known: Capabilities) -> None:
    """Refuse what the builder would take and get wrong.

    ``targets`` are those that the engine is for, as far as they are known.

    Raises:
        UnsupportedGraph: says which nodes, why, and what to do.
    """
    problems = [*_types(model), *_zero_points(model), *_outputs(model)]
    problems += _attention_to_itself(model) if known.dies_of_attention_to_itself else ()
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        shown = "; ".join(fault for fault, _ in problems[:_SHOWN]) + more
        why, remedy = problems[0][1], "cast inside the graph, or convert the model to float32 and int64"
        if "quantization" in why:
            remedy = "quantize symmetrically to int8 with zero point 0"
        elif "queries" in why:
            remedy = "export it with --attention decomposed"
        elif "parser" in why:
            remedy = "export the model again"
        raise UnsupportedGraph(f"TensorRT cannot take this graph: {shown} ({why})", remedy)
    for name, least in _LEAST_TARGET.items():
        lacking = [target for target in targets if int(target.removeprefix("sm")) < least]
        if lacking and name in _used_types(model):
            listed = ", ".join(lacking)
            where = (
                f"the engine is to run on {listed} too" if len(lacking) < len(targets) else f"the target is {listed}"
            )
            message = f"the graph uses {name}, which needs sm{least} or later, and {where}"
            raise UnsupportedGraph(message, f"omit {listed}, or use another precision")


def _used_types(model: "onnx.ModelProto") -> set[str]:
    """Collect element types of weights, of what Cast and QuantizeLinear make, and of the graph's inputs and outputs."""
    kinds = {tensor.data_type for tensor in traversal.tensors(model)}
    kinds |= {_attribute(node, name) for node in traversal.nodes(model) for name in ("to", "output_dtype")}
    values = (*model.graph.input, *model.graph.output)
    kinds |= {value.type.tensor_type.elem_type for value in values if value.type.WhichOneof("value") == "tensor_type"}
    return {model_file.dtype_name(kind) for kind in kinds if kind > 0}


def _attribute(node: "onnx.NodeProto", name: str) -> int:
    """Read an attribute that is a number, as element types are; 0 if it is not there."""
    return next((field.i for field in node.attribute if field.name == name), 0)


def _types(model: "onnx.ModelProto") -> Iterator[Problem]:
    """Yield inputs, outputs, weights and casts of types that TensorRT does not compute in."""
    values = [
        *(("input", value.name, value.type.tensor_type.elem_type) for value in model.graph.input),
        *(("output", value.name, value.type.tensor_type.elem_type) for value in model.graph.output),
        *(("weight", tensor.name, tensor.data_type) for tensor in model.graph.initializer if tensor.dims),
    ]
    for side, value, kind in values:
        name = model_file.dtype_name(kind)
        if name in _WHY_TYPES and name != "uint8":
            yield f"the {side} {value!r} is {name}", _WHY_TYPES[name]
    for node in traversal.nodes(model):
        to = model_file.dtype_name(_attribute(node, "to")) if node.op_type == "Cast" else ""
        if to in ("float64", "complex64", "complex128", "string"):
            yield f"{node_name(node)} casts to {to}", _WHY_TYPES[to]


def _zero_points(model: "onnx.ModelProto") -> Iterator[Problem]:
    """Yield Q/DQ nodes that quantize to uint8, with or without a zero point that says so."""
    kinds = {tensor.name: model_file.dtype_name(tensor.data_type) for tensor in model.graph.initializer}
    for node in traversal.nodes(model):
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            continue
        zero = node.input[2] if len(node.input) > 2 else ""
        output_dtype = _attribute(node, "output_dtype")
        by_default = node.op_type == "QuantizeLinear" and not zero and not output_dtype
        weights = node.input[0] if node.op_type == "DequantizeLinear" else ""
        if by_default or "uint8" in (kinds.get(zero), kinds.get(weights), model_file.dtype_name(output_dtype)):
            yield f"{node_name(node)} quantizes to uint8", _WHY_TYPES["uint8"]


def _outputs(model: "onnx.ModelProto") -> Iterator[Problem]:
    """Yield nodes with fewer outputs than their operator has: the parser reads past the end of the list."""
    import onnx

    versions = {entry.domain: entry.version for entry in model.opset_import}
    for node in traversal.nodes(model):
        if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, versions.get("", 1), ""):
            continue
        schema = onnx.defs.get_schema(node.op_type, versions.get("", 1), "")
        if len(node.output) < schema.min_output:
            what = f"{node_name(node)} lacks outputs: it has {len(node.output)} and needs {schema.min_output}"
            yield what, "the parser reads past the end of the list"


def _attention_to_itself(model: "onnx.ModelProto") -> Iterator[Problem]:
    """Yield attention without projections: Q and K are one tensor."""
    same = {node.output[0]: node.input[0] for node in traversal.nodes(model) if node.op_type == "Identity"}
    for node in traversal.nodes(model):
        if node.op_type == "Attention" and node.domain in ("", "ai.onnx"):
            queries, keys = node.input[:2]
            while queries in same:
                queries = same[queries]
            while keys in same:
                keys = same[keys]
            if queries == keys:
                yield f"{node_name(node)} attends to its own queries", "the builder crashes where queries are the keys"


def parse(trt: Any, network: Any, logger: Any, path: Path, known: Capabilities) -> None:
    """Fill ``network`` with the graph.

    Raises:
        UnsupportedGraph: the parser refuses nodes; they are named, with the PyTorch modules that they come from.
    """
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        raise _refusal([_Refused(error) for error in errors], path)
    if not network.num_layers or not network.num_outputs:
        raise UnsupportedGraph(f"TensorRT finds no layer or no output in {path.name}", "export the model again")
    if numbers(trt.__version__) >= known.attention_layers_since:
        for layer in map(network.get_layer, range(network.num_layers)):
            if layer.type == trt.LayerType.ATTENTION_INPUT:
                layer.__class__ = trt.IAttentionInputLayer  # the binding hands out the base class
                # without a fused kernel (fp32, say) it is built from several; a fused one is still taken first
                layer.attention.decomposable = True


@dataclass(frozen=True)
class NetworkTensor:
    """Describe an input or output of a network."""

    name: str
    is_input: bool
    dtype: str
    """Ours where a host array can have it, else TensorRT's own word."""
    shape: tuple[int, ...] | None
    """−1 for a free size; None where even the rank is not known."""


def read_tensors(network: Any) -> tuple[NetworkTensor, ...]:
    """Read inputs and outputs off a network that was parsed."""
    inputs = ((network.get_input(index), True) for index in range(network.num_inputs))
    outputs = ((network.get_output(index), False) for index in range(network.num_outputs))
    tensors = []
    for tensor, is_input in (*inputs, *outputs):
        try:
            shape: tuple[int, ...] | None = tuple(tensor.shape)
        except ValueError:  # the binding's word for a rank of −1
            shape = None
        word = tensor.dtype.name
        tensors.append(NetworkTensor(tensor.name, is_input, DTYPES.get(word, word), shape))
    return tuple(tensors)


def load_plugins(trt: Any, paths: tuple[str, ...], logger: Any, known: Capabilities) -> None:
    """Load the plugins that come along, and libraries of others, which runs their code: only those that were named.

    Raises:
        UsageError: there is no such file, or it is no library of plugins.
    """
    if known.standard_plugins:
        trt.init_libnvinfer_plugins(logger, "")
    for text in paths:
        if not Path(text).is_file():
            raise UsageError(f"there is no plugin library {text}", "give the path of an .so file")
        registry = trt.get_plugin_registry()
        if registry.load_library(str(Path(text).absolute())) is None:  # a bare name is looked for in system folders
            message = f"{text} is no library of TensorRT plugins, or lacks libraries that it needs"
            raise UsageError(message, f"build it for TensorRT {trt.__version__}; `ldd {text}` lists what it needs")


class _Refused:
    """Copy an error of the parser to plain values."""

    def __init__(self, error: Any) -> None:
        self.index: int = error.node()
        self.operator: str = error.node_operator()
        self.name: str = error.node_name()
        self.code: str = error.code().name
        self.text: str = error.desc()


def _refusal(errors: list[_Refused], path: Path) -> UnsupportedGraph:
    model = model_file.read(path)
    first = next((error for error in errors if error.operator), errors[0] if errors else None)
    if first is None:
        return UnsupportedGraph(f"TensorRT's parser refuses {path.name} without a reason", _FAULT)
    faults: dict[str, str] = {}
    for error in (first, *(error for error in errors if error is not first)):
        node = _node(error, model)
        name = f"{error.operator} {error.name!r}" if error.operator else "an input or output"
        reason, remedy = _reason(error, node)
        faults.setdefault(f"{name if node is None else node_name(node)}: {reason}", remedy)
    listed, remedies = list(faults), list(faults.values())
    more = f"; and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return UnsupportedGraph(f"TensorRT's parser refuses {'; '.join(listed[:_SHOWN])}{more}", remedies[0])


def _node(error: _Refused, model: "onnx.ModelProto") -> "onnx.NodeProto | None":
    nodes = model.graph.node
    if 0 <= error.index < len(nodes) and nodes[error.index].op_type == error.operator:
        node: onnx.NodeProto = nodes[error.index]
        return node
    return next((node for node in traversal.nodes(model) if error.name and node.name == error.name), None)


def _reason(error: _Refused, node: "onnx.NodeProto | None") -> tuple[str, str]:
    standard = node is not None and node.domain in ("", "ai.onnx")
    lacking = error.code == "UNSUPPORTED_NODE" and error.text in ("false", "")
    if lacking or (standard and ("Plugin not found" in error.text or "plugin creator" in error.text)):
        quantized = error.operator.startswith(_OTHER_FORMATS)
        return "TensorRT does not have this operator", _QDQ if quantized else _WORKS_WITH
    for words, reason in _WHY.items():
        if words in error.text:
            return reason
    quoted = re.search(r'&& "([^"]+)"', error.text)
    lines = [line for line in error.text.splitlines() if "catchCudaError" not in line]
    return plain(quoted[1] if quoted else " ".join(lines)) or error.code, _FAULT


def plain(text: str) -> str:
    """Strip source lines, conditions and error numbers from a message of TensorRT."""
    text = text.rpartition("): ")[2] if "||" in text else text
    return " ".join(_NOISE.sub(" ", text).split()).strip(" .()")
