"""Every node of a file, and dtype and shape of every value, at concrete sizes of the dynamic dimensions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline import onnx_file
from enginesmith.pipeline.precision.audit.foreign import STANDARD, stand_ins
from enginesmith.pipeline.tensors import Signature

if TYPE_CHECKING:
    import onnx


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
    """Bits of one element in memory; None for texts, and for what is not known."""
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
        """What is known of a value; nothing, if nothing is."""
        return self.values.get(name, Value())


def view(path: Path, sizes: Mapping[str, int]) -> View:
    """Read a file; ``sizes`` are those of the words in its signature, and without one a dimension stays unknown.

    Raises:
        InvalidGraph: the file cannot be read.
        SignatureError: its inputs are no tensors.
    """
    import onnx

    model = onnx_file.skeleton(path)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    _bind(model.graph, _sizes_by_text(model.graph, onnx_file.signature(path), sizes))
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
    """Sizes by what stands in the file; inputs get theirs at once, since they may have nothing written there."""
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
    import onnx

    found: dict[str, onnx.NodeProto] = {}
    for index, node in enumerate(onnx_file.nodes(model)):
        name = node.name if node.name and node.name not in found else f"{node.name or node.op_type}_{index}"
        found[name] = onnx.NodeProto.FromString(node.SerializeToString())
    return found


def _constants(model: "onnx.ModelProto") -> frozenset[str]:
    names = {tensor.name for graph in _graphs(model.graph) for tensor in graph.initializer}
    return frozenset(names | {node.output[0] for node in onnx_file.nodes(model) if node.op_type == "Constant"})


def _initialisers(model: "onnx.ModelProto") -> dict[str, tuple[str, list[int]]]:
    return {
        tensor.name: (onnx_file.dtype_name(tensor.data_type), list(tensor.dims))
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
            nodes += (node.domain not in STANDARD and stand_ins(node, dims)) or [node]
        if len(nodes) != len(graph.node) or any(new is not old for new, old in zip(nodes, graph.node, strict=True)):
            copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
            del graph.node[:]
            graph.node.extend(copies)


def _import_domains(model: "onnx.ModelProto") -> None:
    """Inference gives up on a file that uses a domain without naming it."""
    named = {entry.domain for entry in model.opset_import}
    missing = {node.domain for node in onnx_file.nodes(model)} - named
    for domain in sorted(missing):
        model.opset_import.add(domain=domain, version=1 if domain else _OPSET)


def _note(values: dict[str, Value], info: "onnx.ValueInfoProto") -> None:
    """Branches may use one name for different values: what they do not agree in is unknown."""
    tensor = info.type.tensor_type
    if not tensor.elem_type:
        return
    known = tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
    shape = tuple(int(dim.dim_value) for dim in tensor.shape.dim) if known else None
    found = Value(onnx_file.dtype_name(tensor.elem_type), shape)
    before = values.setdefault(info.name, found)
    if before != found:
        values[info.name] = Value(found.dtype if before.dtype == found.dtype else "", None)
