"""What TensorRT takes without a word and gets wrong, or dies of: found in the ONNX graph before the parser sees it."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from enginesmith.pipeline import onnx_file
from enginesmith.pipeline.engines.trt.flavours import Capabilities
from enginesmith.pipeline.errors import UnsupportedGraph

if TYPE_CHECKING:
    import onnx

_SHOWN = 4
_QUANTISING = ("QuantizeLinear", "DequantizeLinear")
_LEAST_TARGET: Mapping[str, int] = {"float8e4m3fn": 89, "float8e5m2": 89, "bfloat16": 80, "int4": 80, "float4e2m1": 120}
"""Element type → the first compute capability that has it (the vendor's support matrix)."""
_WHY_TYPES = {
    "float64": "TensorRT has no float64 arithmetic, and builds such a graph without a word",
    "uint8": "TensorRT reads uint8 quantisation as int8, and answers wrongly without a word",
    "string": "TensorRT has no strings",
    "complex64": "TensorRT has no complex numbers",
    "complex128": "TensorRT has no complex numbers",
    "uint16": "TensorRT has no uint16",
    "uint32": "TensorRT has no uint32",
    "uint64": "TensorRT has no uint64",
    "int16": "TensorRT has no int16",
    "float8e5m2": "TensorRT has E4M3 only",
}


Problem = tuple[str, str]
"""What is wrong, and why that is."""


def node_name(node: "onnx.NodeProto") -> str:
    """What the node is called: its name, its first output, the PyTorch module that it came from."""
    name = node.name or next(iter(node.output), "")
    module = next((entry.value for entry in node.metadata_props if entry.key == onnx_file.MODULE_KEY), "")
    return f"{node.op_type} {name!r}" + (f" (of the module {module!r})" if module else "")


def hold(model: "onnx.ModelProto", targets: tuple[str, ...], known: Capabilities) -> None:
    """Refuse what the builder would take and get wrong.

    ``targets`` are those that the engine is for, as far as they are known.

    Raises:
        UnsupportedGraph: says which nodes, why, and what to do.
    """
    problems = [*_types(model), *_zero_points(model), *_outputs(model)]
    problems += _attention_to_itself(model) if known.dies_of_attention_to_itself else ()
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        shown = "; ".join(what for what, _ in problems[:_SHOWN]) + more
        why = problems[0][1]
        raise UnsupportedGraph(f"TensorRT cannot take this graph: {shown} ({why})", _remedy(why))
    for name, least in _LEAST_TARGET.items():
        lacking = [target for target in targets if int(target.removeprefix("sm")) < least]
        if lacking and name in _used_types(model):
            raise UnsupportedGraph(
                f"the graph uses {name}, which needs sm{least} or later, and the engine is to run on "
                f"{', '.join(lacking)} too"
                if len(lacking) < len(targets)
                else f"the graph uses {name}, which needs sm{least} or later, and the target is {', '.join(lacking)}",
                f"leave {', '.join(lacking)} away, or use another precision",
            )


def _remedy(why: str) -> str:
    if "quantisation" in why:
        return "quantise symmetrically to int8 with zero point 0"
    if "queries" in why:
        return "export it with --attention decomposed"
    if "parser" in why:
        return "export the model again"
    return "cast inside the graph, or convert the model to float32 and int64"


def _used_types(model: "onnx.ModelProto") -> set[str]:
    """Element types of weights and of what Cast and QuantizeLinear make."""
    import onnx

    found = {onnx_file.dtype_name(tensor.data_type) for tensor in onnx_file.tensors(model)}
    for node in onnx_file.nodes(model):
        found |= {
            onnx_file.dtype_name(one.i) for one in node.attribute if one.name in ("to", "output_dtype") and one.i > 0
        }
    values = (*model.graph.input, *model.graph.output)
    found |= {
        onnx_file.dtype_name(value.type.tensor_type.elem_type)
        for value in values
        if value.type.WhichOneof("value") == "tensor_type"
    }
    return found - {onnx_file.dtype_name(onnx.TensorProto.UNDEFINED)}


def _types(model: "onnx.ModelProto") -> Iterator[Problem]:
    """Inputs, outputs, weights and casts of types that TensorRT does not compute in."""
    for side, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            name = onnx_file.dtype_name(value.type.tensor_type.elem_type)
            if name in _WHY_TYPES and name != "uint8":
                yield f"the {side} {value.name!r} is {name}", _WHY_TYPES[name]
    for tensor in model.graph.initializer:
        name = onnx_file.dtype_name(tensor.data_type)
        if name in _WHY_TYPES and name != "uint8" and tensor.dims:
            yield f"the weight {tensor.name!r} is {name}", _WHY_TYPES[name]
    for node in onnx_file.nodes(model):
        to = next((onnx_file.dtype_name(one.i) for one in node.attribute if one.name == "to" and one.i), "")
        if node.op_type == "Cast" and to in ("float64", "complex64", "complex128", "string"):
            yield f"{node_name(node)} casts to {to}", _WHY_TYPES[to]


def _zero_points(model: "onnx.ModelProto") -> Iterator[Problem]:
    """Q/DQ nodes that quantise to uint8, with or without a zero point that says so."""
    kinds = {tensor.name: onnx_file.dtype_name(tensor.data_type) for tensor in model.graph.initializer}
    for node in onnx_file.nodes(model):
        if node.op_type not in _QUANTISING:
            continue
        zero = kinds.get(node.input[2], "") if len(node.input) > 2 else ""
        asked = next(
            (onnx_file.dtype_name(one.i) for one in node.attribute if one.name == "output_dtype" and one.i), ""
        )
        by_default = node.op_type == "QuantizeLinear" and not (len(node.input) > 2 and node.input[2]) and not asked
        weights = kinds.get(node.input[0], "") if node.op_type == "DequantizeLinear" else ""
        if "uint8" in (zero, asked, weights) or by_default:
            yield f"{node_name(node)} quantises to uint8", _WHY_TYPES["uint8"]


def _outputs(model: "onnx.ModelProto") -> Iterator[Problem]:
    """Nodes with fewer outputs than their operator has: the parser reads past the end of the list."""
    import onnx

    versions = {entry.domain: entry.version for entry in model.opset_import}
    for node in onnx_file.nodes(model):
        if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, versions.get("", 1), ""):
            continue
        schema = onnx.defs.get_schema(node.op_type, versions.get("", 1), "")
        if len(node.output) < schema.min_output:
            what = f"{node_name(node)} lacks outputs: it has {len(node.output)} and needs {schema.min_output}"
            yield what, "the parser reads past the end of the list"


def _attention_to_itself(model: "onnx.ModelProto") -> Iterator[Problem]:
    """Attention without projections: Q and K are one tensor."""
    same = {node.output[0]: node.input[0] for node in onnx_file.nodes(model) if node.op_type == "Identity"}
    for node in onnx_file.nodes(model):
        if node.op_type != "Attention" or node.domain not in ("", "ai.onnx"):
            continue
        queries, keys = (_origin(name, same) for name in node.input[:2])
        if queries == keys:
            yield f"{node_name(node)} attends to its own queries", "the builder crashes where queries are the keys"


def _origin(name: str, same: Mapping[str, str]) -> str:
    while name in same:
        name = same[name]
    return name
