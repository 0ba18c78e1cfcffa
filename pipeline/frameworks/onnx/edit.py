"""Load, name, tidy and save ONNX graphs for passes."""

import ast
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.artifact import Effect
from enginesmith.pipeline.errors import InvalidGraph
from enginesmith.pipeline.frameworks.onnx import ir, model_file
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx

FILE = "model.onnx"
EXTERNAL_DATA_BYTES = 128 << 20
"""Weights of more than this together lie beside the graph, so that writing them needs no second copy in memory."""
_DATA_FILE = "model.onnx.data"
_SCOPES_KEY = "pkg.torch.onnx.name_scopes"
_EXPORTER_KEYS = ("pkg.torch.", "pkg.onnxscript.", "namespace")
_INLINE_BYTES = 1024  # weights up to this size stay in the graph file, where shape inference sees them


def load(path: Path) -> "ir.Model":
    """Return the graph with its external weights mapped, not read.

    Raises:
        InvalidGraph: the file does not hold what its header says, or has values of types that onnx-ir lacks, as maps.
    """
    return from_proto(model_file.read(path), path)


def from_proto(proto: "onnx.ModelProto", path: Path) -> "ir.Model":
    """Return the graph of a file that was parsed; errors as in :func:`load`."""
    try:
        model = ir.from_proto(proto)
    except (ValueError, TypeError, KeyError, ir.serde.SerdeError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # onnx-ir writes whole parts of the graph into each error on its way
            cause = cause.__cause__
        raise InvalidGraph(f"{path} cannot be taken apart: {cause}", "hold it against onnx.checker") from error
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def save(model: "ir.Model", out: Path, external_data_bytes: int = EXTERNAL_DATA_BYTES) -> None:
    """Write ``model.onnx`` into a folder; weights of more bytes than that together go beside it."""
    data_file = _DATA_FILE if weight_bytes(model) > external_data_bytes else None
    if data_file is None:
        ir.external_data.load_to_model(model)  # what lay beside the file that was read has no file here
    ir.save(model, out / FILE, external_data=data_file, size_threshold_bytes=_INLINE_BYTES)


def save_with_summary(
    model: "ir.Model", out: Path, external_data_bytes: int, summary: str, notes: tuple[str, ...] = ()
) -> Effect:
    """Save as :func:`save` does, and describe the file."""
    save(model, out, external_data_bytes)
    return Effect(file=FILE, summary=summary, notes=notes, signature=model_file.signature(out / FILE))


def pass_on(path: Path, out: Path, *notes: str) -> Effect:
    """Write the same graph with its weights; the first note says why it is the same."""
    model_file.copy(path, out / FILE)
    nodes = model_file.summary(path).nodes
    return Effect(file=FILE, summary=f"{nodes} nodes, unchanged", notes=notes, signature=model_file.signature(path))


def weight_bytes(model: "ir.Model") -> int:
    """Add up the bytes of all initializers, subgraphs included."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


def node_count(model: "ir.Model") -> int:
    """Count the nodes of the graph, its subgraphs and its functions."""
    return sum(1 for body in _bodies(model) for _ in ir.traversal.RecursiveGraphIterator(body))


def _bodies(model: "ir.Model") -> list["ir.Graph | ir.Function"]:
    return [model.graph, *model.functions.values()]


def fix_weights(model: "ir.Model") -> None:
    """Make weights constants that cannot be fed."""
    from onnx_ir.passes import common

    model.ir_version = max(model.ir_version, 4)  # from then on weights need not be listed as inputs
    common.RemoveInitializersFromInputsPass()(model)


def infer_shapes(model: "ir.Model", *, strict: bool = False) -> None:
    """Infer types and shapes of all values, in place, as far as onnx finds them.

    Where it finds a contradiction, shapes stay as they are; ``strict`` counts what it cannot infer as one.
    """
    from onnx_ir.passes import common

    if any("Sequence" in node.op_type or node.op_type.startswith("Optional") for node in model.graph.all_nodes()):
        _infer_containers(model)
    common.ShapeInferencePass(strict_mode=strict)(model)


def _infer_containers(model: "ir.Model") -> None:
    """Infer the types of values that are sequences or may be absent.

    The library's pass takes a sequence of tensors for a tensor, unless its type is known (onnx_ir 1.1).
    """
    import onnx.shape_inference
    from onnx_ir.passes.common import _c_api_utils

    try:
        inferred = ir.from_proto(_c_api_utils.call_onnx_api(onnx.shape_inference.infer_shapes, model))
    except onnx.shape_inference.InferenceError:
        return
    for graph, known in zip(model.graphs(), inferred.graphs(), strict=True):
        values = ir.convenience.create_value_mapping(known)
        for name, value in ir.convenience.create_value_mapping(graph).items():
            kind = values[name].type if name in values else None
            if kind is not None and not isinstance(kind, ir.TensorType):
                value.type = kind


def lift_constants(model: "ir.Model") -> None:
    """Make initializers of what Constant nodes give."""
    from onnx_ir.passes import common

    ir.passes.Sequential(common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0))(model)


def has_body(node: "ir.Node") -> bool:
    """Tell whether a node is a branch or a loop."""
    return any(entry.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for entry in node.attributes.values())


def tidy(model: "ir.Model", wrapper: str = "") -> None:
    """Keep of all that exporters note about nodes the path of each one's module: no machine paths, no source text.

    ``wrapper`` is the attribute by which a wrapper around the user's module holds it; paths start below it.
    """
    holders: list[ir.Node | ir.Value | ir.Graph] = []
    for body in _bodies(model):
        nodes = list(ir.traversal.RecursiveGraphIterator(body))
        holders += [*body.inputs, *nodes, *(value for node in nodes for value in node.outputs)]
        for node in nodes:
            if module := _module_path(node, wrapper):
                node.metadata_props[model_file.MODULE_KEY] = module
    for graph in model.graphs():
        holders += [graph, *graph.initializers.values()]
    for holder in holders:
        holder.doc_string = None
        for key in [key for key in holder.metadata_props if key.startswith(_EXPORTER_KEYS)]:
            del holder.metadata_props[key]


def _module_path(node: "ir.Node", wrapper: str) -> str:
    """Return dotted path of the module that a node came from, as the exporters noted it; empty if they did not."""
    known = node.metadata_props.get(model_file.MODULE_KEY)
    if known is not None:
        return known
    path = ""
    if scopes := node.metadata_props.get(_SCOPES_KEY):
        path = ["", *ast.literal_eval(scopes)[:-1]][-1]
    elif node.name and node.name.startswith("/"):  # TorchScript's: layer1/layer1.0/conv1 is layer1.0.conv1
        parts: list[str] = []
        for scope in node.name.strip("/").split("/")[:-1]:
            if parts and scope.startswith(f"{parts[-1]}."):
                parts.pop()
            parts.append(scope)
        path = ".".join(parts)
    return "" if path == wrapper else path.removeprefix(f"{wrapper}.") if wrapper else path


def merge_equal_constants(model: "ir.Model") -> int:
    """Make one initializer of those of the main graph that are equal; return how many went.

    Only those of a type and a shape that others have are read, one at a time.
    """
    alike: dict[tuple[object, ...], list[ir.Value]] = {}
    for value in model.graph.initializers.values():
        content = value.const_value
        if content is not None and not (value.is_graph_input() or value.is_graph_output()):
            alike.setdefault((content.dtype, tuple(content.shape.numpy())), []).append(value)
    first: dict[bytes, ir.Value] = {}
    count = 0
    for key, values in alike.items():
        for value in values if len(values) > 1 and key[0] != ir.DataType.STRING else ():
            assert value.const_value is not None
            digest = hashlib.sha256(repr(key).encode() + value.const_value.tobytes()).digest()
            if first.setdefault(digest, value) is not value:
                value.replace_all_uses_with(first[digest])
                del model.graph.initializers[str(value.name)]
                count += 1
    return count


# Read constants of a graph, and put other numbers in their place.


def read_constant(value: "ir.Value | None") -> "ir.TensorProtocol | None":
    """Return the content of a constant; None for what is computed or could be fed."""
    return None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)


def read(value: "ir.Value | None") -> Array | None:
    """Return the numbers of a constant; None for what is computed, fed, or could be fed in its place."""
    content = read_constant(value)
    return None if content is None else content.numpy()


def find_input(node: "ir.Node", index: int) -> "ir.Value | None":
    """Return what a node reads at an input that may be left out; None where it is."""
    return node.inputs[index] if index < len(node.inputs) else None


def find_only_reader(value: "ir.Value") -> "tuple[ir.Node | None, int]":
    """Return the node of the same graph that alone reads a value, and at which input.

    None if others do, a subgraph does, or it is an output.
    """
    uses = tuple(value.uses())
    alone = len(uses) == 1 and uses[0].node.graph is value.graph and not value.is_graph_output()
    return (uses[0].node, uses[0].idx) if alone else (None, 0)


def find_added(node: "ir.Node") -> "tuple[ir.Node | None, int]":
    """Find the Add that alone reads what a MatMul makes and adds a constant, its bias, and the constant's index."""
    adder, index = find_only_reader(node.outputs[0]) if node.op_type == "MatMul" else (None, 0)
    added = adder is not None and adder.op_type == "Add" and read_constant(adder.inputs[1 - index]) is not None
    return (adder, 1 - index) if added else (None, 0)


def is_weight(value: "ir.Value | None") -> bool:
    """Tell whether it is an initializer of float32 that nothing can be fed in the place of."""
    return (
        value is not None
        and value.is_initializer()
        and not (value.is_graph_input() or value.is_graph_output())
        and value.const_value is not None
        and value.const_value.dtype == ir.DataType.FLOAT
    )


def is_factor(value: "ir.Value | None") -> bool:
    """Tell whether it is a constant of float32, so that :func:`multiply` can put another in its place."""
    numbers = read(value)
    return numbers is not None and numbers.dtype == np.float32


def rescale(weight: "ir.Value", factors: Sequence[Array]) -> None:
    """Multiply an initializer by arrays that broadcast to its shape; it is computed anew each time it is read.

    So a graph whose every weight is rescaled is written with one of them in memory at a time.
    """
    given = weight.const_value
    assert given is not None
    name = weight.name

    def compute() -> "ir.TensorProtocol":
        numbers = given.numpy() * factors[0]
        for factor in factors[1:]:
            numbers *= factor
        return ir.tensor(numbers, name=name)

    weight.const_value = ir.LazyTensor(compute, dtype=given.dtype, shape=ir.Shape(given.shape.numpy()), name=name)


def multiply(node: "ir.Node", index: int, factors: Array) -> None:
    """Multiply one small constant that a node reads; its other readers keep theirs."""
    numbers = read(node.inputs[index])
    assert numbers is not None
    write([(node, index)], np.multiply(numbers, factors).astype(numbers.dtype))


def write(places: "Sequence[tuple[ir.Node, int]]", numbers: Array) -> None:
    """Put these numbers in the place of one constant at some inputs of nodes.

    They keep its name where nothing else reads it, and are else one constant of their own.
    """
    node, index = places[0]
    old = find_input(node, index)
    if old is not None and is_weight(old) and set(old.uses()) == set(places):
        old.const_value = ir.tensor(numbers, name=old.name)
        old.shape = ir.Shape(numbers.shape)
        return
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    value = new(graph, f"{node.outputs[0].name}_input_{index}", numbers)
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    for reader, place in places:
        reader.replace_input_with(place, value)


def insert_behind(graph: "ir.Graph", value: "ir.Value", nodes: "Sequence[ir.Node]") -> None:
    """Insert nodes right behind the one that makes a value, or at the beginning of the graph where none does."""
    maker = value.producer()
    if maker is not None:
        graph.insert_after(maker, nodes)
    elif len(graph):
        graph.insert_before(graph[0], nodes)
    else:
        graph.extend(nodes)


def substitute(node: "ir.Node", nodes: "Sequence[ir.Node]", results: "Sequence[ir.Value]") -> None:
    """Put nodes in the place of one, as parts of its module; their results get the names and readers of its outputs."""
    assert node.graph is not None
    for each in nodes:
        each.metadata_props.update(node.metadata_props)
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], nodes, node.outputs[: len(results)], results)


def spread(numbers: Array, shape: Sequence[int], axis: int | None, block: int = 0) -> Array:
    """Give scales or zero points a shape that broadcasts to that of the numbers that they are for.

    There is one for all, for each place along an axis, or for each block of places there, the last one perhaps smaller.
    """
    if block:
        return np.repeat(numbers, block, axis).take(range(shape[axis or 0]), axis)
    if axis is None or numbers.size == 1:
        return numbers.reshape(())
    return numbers.reshape(-1, *(1,) * (len(shape) - 1 - axis % len(shape)))


def new(graph: "ir.Graph", name: str, numbers: Array) -> "ir.Value":
    """Add an initializer, under this name or one like it."""
    return add_constant(graph, Names(graph).new(name), numbers)


def add_constant(graph: "ir.Graph", name: str, numbers: Array) -> "ir.Value":
    """Add an initializer of this name, which nothing in the graph has."""
    tensor = ir.tensor(numbers, name=name)
    value = ir.Value(name=name, shape=ir.Shape(numbers.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


class Names:
    """Names of the values and nodes of a graph and of all bodies in it."""

    def __init__(self, graph: "ir.Graph") -> None:
        self._taken: set[str | None] = set()
        for body in (graph, *graph.subgraphs()):
            self._taken |= {value.name for value in body.inputs} | set(body.initializers)
            self._taken |= {node.name for node in body} | {value.name for node in body for value in node.outputs}

    def new(self, wanted: str) -> str:
        """Return the name that is wanted, with a number behind it if it is taken; it is taken from now on."""
        name, count = wanted, 1
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name


def find_axes(node: "ir.Node") -> Sequence[int] | None:
    """Find the axes of a reduction, an attribute in old opsets; none where all are meant, None if they are computed."""
    given = find_input(node, 1)
    if given is None:
        return node.attributes.get_ints("axes", ())
    numbers = read(given)
    return None if numbers is None else [int(axis) for axis in numbers.reshape(-1)]


def find_transposed_axis(node: "ir.Node", axis: int) -> int:
    """Return the axis of a Transpose's input that an axis of its output is; negative ones count from the end."""
    if "perm" not in node.attributes:
        return -1 - axis
    order = node.attributes["perm"].as_ints()
    return order[axis % len(order)]
