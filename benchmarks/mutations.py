"""Ways to break an ONNX model, each with a seed: what comes out may still be sound, and mostly is not."""

import itertools
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_T = TypeVar("_T")
Mutation = Callable[[onnx.ModelProto, np.random.Generator], str]
"""Changes a model in place and says what it did."""

_KINDS = ("Relu", "Conv", "MatMul", "TopK", "Loop", "Reshape", "Softmax", "Resize", "LSTM", "NonZero", "Split", "If")
_DTYPES = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT8, TensorProto.INT64, TensorProto.STRING, 0, 99)
_SIZES = (-1, 0, 1, 7, 1 << 20, 1 << 40)
_OPSETS = (0, 1, 6, 13, 99, -5)
_DATA = "weights.bin"


def _pick(values: "list[_T]", random: np.random.Generator) -> _T:
    return values[int(random.integers(len(values)))]


def _node(model: onnx.ModelProto, random: np.random.Generator) -> onnx.NodeProto:
    nodes: list[onnx.NodeProto] = list(model.graph.node)
    return _pick(nodes, random)


def _weight(model: onnx.ModelProto, random: np.random.Generator) -> TensorProto:
    weights: list[TensorProto] = list(model.graph.initializer)
    if not weights:
        weights = [model.graph.initializer.add(name="added", data_type=TensorProto.FLOAT, dims=[1])]
        weights[0].raw_data = struct.pack("f", 1.0)
    return _pick(weights, random)


def _value(model: onnx.ModelProto, random: np.random.Generator) -> onnx.ValueInfoProto:
    values: list[onnx.ValueInfoProto] = [*model.graph.input, *model.graph.output]
    return _pick(values, random)


def operator(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """Another operator with the same inputs."""
    node = _node(model, random)
    before, node.op_type = node.op_type, _pick(list(_KINDS), random)
    return f"{before} {node.name!r} → {node.op_type}"


def unknown_operator(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """An operator that nobody has, in a domain of its own or in the standard one."""
    node = _node(model, random)
    node.op_type, node.domain = "Frobnicate", _pick(["", "com.example"], random)
    if node.domain:
        model.opset_import.append(helper.make_opsetid(node.domain, 1))
    return f"{node.name!r} → {node.domain}:Frobnicate"


def drop_input(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A node with one input less."""
    node = _pick([one for one in model.graph.node if one.input] or [model.graph.node[0]], random)
    if node.input:
        del node.input[int(random.integers(len(node.input)))]
    return f"{node.op_type} {node.name!r}"


def empty_input(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A node one of whose inputs is left out."""
    node = _pick([one for one in model.graph.node if one.input] or [model.graph.node[0]], random)
    if node.input:
        node.input[int(random.integers(len(node.input)))] = ""
    return f"{node.op_type} {node.name!r}"


def drop_output(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A node with one output less."""
    node = _node(model, random)
    if node.output:
        del node.output[int(random.integers(len(node.output)))]
    return f"{node.op_type} {node.name!r}"


def extra_inputs(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A node with more inputs than its operator has."""
    node = _node(model, random)
    node.input.extend([node.input[0] if node.input else ""] * int(random.integers(1, 9)))
    return f"{node.op_type} {node.name!r}"


def extra_outputs(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A node with more outputs than its operator has."""
    node = _node(model, random)
    node.output.extend(f"extra_{index}" for index in range(int(random.integers(1, 9))))
    return f"{node.op_type} {node.name!r}"


def rename_input(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A node that reads what nobody writes, or a name with odd characters."""
    node = _pick([one for one in model.graph.node if one.input] or [model.graph.node[0]], random)
    if node.input:
        node.input[int(random.integers(len(node.input)))] = _pick(["nowhere", "a b\n'\"", "é" * 300], random)
    return f"{node.op_type} {node.name!r}"


def odd_names(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A tensor with an odd name everywhere it is used, so that the graph stays sound."""
    old = _value(model, random).name
    new = _pick(["a b", "x'); --", "名前", "../up", "n" * 5000, "[ONNX Layer: x]", "{}%s"], random)
    for names in [*(node.input for node in model.graph.node), *(node.output for node in model.graph.node)]:
        for index, name in enumerate(names):
            if name == old:
                names[index] = new
    for value in (*model.graph.input, *model.graph.output):
        value.name = new if value.name == old else value.name
    return f"{old!r} → {new[:20]!r}"


def drop_attribute(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A node without one of its attributes."""
    node = _pick([one for one in model.graph.node if one.attribute] or [model.graph.node[0]], random)
    name = ""
    if node.attribute:
        index = int(random.integers(len(node.attribute)))
        name = node.attribute[index].name
        del node.attribute[index]
    return f"{name!r} of {node.op_type} {node.name!r}"


def bogus_attribute(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """An attribute that the operator does not have, or one of another type."""
    node = _node(model, random)
    choices: list[object] = [3.5, "text", [1, 2, 3], -(1 << 62), b"\xff\xfe"]
    known = [one.name for one in node.attribute] or ["axis"]
    name = _pick(["bogus", *known], random)
    for index in reversed(range(len(node.attribute))):
        if node.attribute[index].name == name:
            del node.attribute[index]
    node.attribute.append(helper.make_attribute(name, _pick(choices, random)))
    return f"{name} of {node.op_type} {node.name!r}"


def attribute_values(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """Integers of an attribute replaced by senseless ones of the same type."""
    found = [one for node in model.graph.node for one in node.attribute if one.ints or one.type == one.INT]
    if not found:
        return bogus_attribute(model, random)
    attribute = _pick(found, random)
    wild = [-1, 0, 7, 1 << 20, 1 << 62, -(1 << 31)]
    if attribute.ints:
        attribute.ints[int(random.integers(len(attribute.ints)))] = _pick(wild, random)
    else:
        attribute.i = _pick(wild, random)
    return f"{attribute.name} = {attribute.i or list(attribute.ints)}"


def value_dtype(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """An input or output of another element type."""
    value = _value(model, random)
    value.type.tensor_type.elem_type = _pick(list(_DTYPES), random)
    return f"{value.name!r} → {value.type.tensor_type.elem_type}"


def weight_dtype(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A weight that claims another element type."""
    tensor = _weight(model, random)
    tensor.data_type = _pick(list(_DTYPES), random)
    return f"{tensor.name!r} → {tensor.data_type}"


def value_dims(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """An input or output with a senseless size, no rank, or one more dimension."""
    value = _value(model, random)
    shape = value.type.tensor_type.shape
    change = _pick(["size", "no rank", "rank", "symbol"], random)
    if change == "no rank" or not shape.dim:
        value.type.tensor_type.ClearField("shape")
    elif change == "rank":
        shape.dim.add().dim_value = 3
    elif change == "symbol":
        _pick(list(shape.dim), random).dim_param = _pick(["batch", "N/2", "1x", " "], random)
    else:
        _pick(list(shape.dim), random).dim_value = _pick(list(_SIZES), random)
    return f"{value.name!r}: {change}"


def weight_dims(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A weight whose sizes do not belong to its data."""
    tensor = _weight(model, random)
    if tensor.dims:
        tensor.dims[int(random.integers(len(tensor.dims)))] = _pick(list(_SIZES), random)
    else:
        tensor.dims.append(3)
    return f"{tensor.name!r} → {list(tensor.dims)}"


def weight_shape(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A weight of another shape, with data for it: sound by itself, and wrong for its node."""
    tensor = _weight(model, random)
    if tensor.data_type not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        return weight_dims(model, random)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape = [*tensor.dims[:-1], int(tensor.dims[-1]) + 1] if tensor.dims else [2]
    tensor.CopyFrom(numpy_helper.from_array(np.zeros(shape, dtype), tensor.name))
    return f"{tensor.name!r} → {shape}"


def weight_values(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """NaN or infinity in a floating weight."""
    floats = [one for one in model.graph.initializer if one.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16)]
    if not floats:
        return weight_dtype(model, random)
    tensor = _pick(floats, random)
    array = numpy_helper.to_array(tensor).copy()
    array.flat[0] = _pick([np.nan, np.inf], random)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return f"{array.flat[0]} in {tensor.name!r}"


def integers(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """Another value in an integer weight: a shape, an axis, a count, a zero point."""
    found = [one for one in model.graph.initializer if one.data_type in (TensorProto.INT64, TensorProto.INT8)]
    if not found:
        return attribute_values(model, random)
    tensor = _pick(found, random)
    array = numpy_helper.to_array(tensor).copy()
    array.flat[int(random.integers(array.size))] = _pick([-128, -1, 0, 1, 5, 127], random)
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return f"{tensor.name!r} = {array.flat[:8].tolist()}"


def scales(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A scale of Q/DQ that is no positive number; elsewhere a weight all zero."""
    names = {one.input[1] for one in model.graph.node if one.op_type.endswith("eLinear")}
    found = [one for one in model.graph.initializer if one.name in names]
    tensor = _pick(found, random) if found else _weight(model, random)
    array = numpy_helper.to_array(tensor).copy()
    array[...] = _pick([0, -1, np.inf], random) if found else 0
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return f"{tensor.name!r}: {array.flat[0]}"


def same_arity(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """Another operator with as many inputs, so that the specification may have nothing against it."""
    unary, binary = ("Round", "Erf", "Det", "NonZero", "Hardmax", "Size", "IsNaN"), ("Mod", "MatMul", "Pow", "Equal")
    node = _node(model, random)
    choices = unary if len(node.input) == 1 else binary
    before, node.op_type = node.op_type, _pick(list(choices), random)
    del node.attribute[:]
    return f"{before} {node.name!r} → {node.op_type}"


def chain(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """Thousands of operators one after the other behind an output."""
    output = model.graph.output[0].name
    count = int(random.integers(1000, 4000))
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            node.output[index] = "link_0" if name == output else name
    ends = [*(f"link_{index}" for index in range(count)), output]
    kind = _pick(["Neg", "Tanh"], random)
    model.graph.node.extend(helper.make_node(kind, [a], [b], b) for a, b in itertools.pairwise(ends))
    return f"{count} × {kind}"


def drop_weight(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A weight that is not there."""
    tensor = _weight(model, random)
    name = tensor.name
    model.graph.initializer.remove(tensor)
    return repr(name)


def weight_as_input(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A weight that became an input of the graph."""
    tensor = _weight(model, random)
    name = tensor.name
    model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
    model.graph.initializer.remove(tensor)
    return repr(name)


def duplicate(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """Two nodes, weights, inputs or outputs of one name."""
    field = _pick(["node", "initializer", "input", "output"], random)
    values = getattr(model.graph, field)
    if values:
        values.append(_pick(list(values), random))
    return field


def cycle(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A node that reads what comes after it."""
    nodes = [one for one in model.graph.node if one.input]
    first, last = nodes[0], nodes[-1]
    first.input[0] = last.output[0]
    return f"{first.name!r} reads {last.output[0]!r}"


def shuffle(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """Nodes out of order."""
    nodes = list(model.graph.node)
    order = random.permutation(len(nodes))
    del model.graph.node[:]
    model.graph.node.extend(nodes[index] for index in order)
    return f"{len(nodes)} nodes"


def opset(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """Another opset or IR version, or none at all."""
    change = _pick(["opset", "none", "ir", "twice"], random)
    if change == "opset":
        model.opset_import[0].version = _pick(list(_OPSETS), random)
    elif change == "none":
        del model.opset_import[:]
    elif change == "ir":
        model.ir_version = _pick([1, 3, 99, -1], random)
    else:
        model.opset_import.append(helper.make_opsetid("", 11))
    return f"{change}: {[one.version for one in model.opset_import]}, IR {model.ir_version}"


def no_outputs(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """A graph without inputs, outputs or nodes."""
    field = _pick(["output", "input", "node"], random)
    del getattr(model.graph, field)[:]
    return field


def passthrough(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """An input or a weight that is an output too."""
    source = _pick([*(one.name for one in model.graph.input), _weight(model, random).name], random)
    kinds = {one.name: one for one in model.graph.input}
    if source in kinds:
        model.graph.output.append(kinds[source])
    else:
        tensor = next(one for one in model.graph.initializer if one.name == source)
        model.graph.output.append(helper.make_tensor_value_info(source, tensor.data_type, list(tensor.dims)))
    return repr(source)


def output_type(model: onnx.ModelProto, random: np.random.Generator) -> str:
    """An input or output that is no tensor, or has no type at all."""
    value = _value(model, random)
    change = _pick(["sequence", "none", "optional"], random)
    value.ClearField("type")
    if change == "sequence":
        value.type.sequence_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    elif change == "optional":
        value.type.optional_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    return f"{value.name!r}: {change}"


GRAPH: Mapping[str, Mutation] = {
    one.__name__: one
    for one in (operator, unknown_operator, drop_input, empty_input, drop_output, extra_inputs, extra_outputs)
    + (rename_input, odd_names, drop_attribute, bogus_attribute, attribute_values, value_dtype, weight_dtype)
    + (
        value_dims,
        weight_dims,
        weight_shape,
        weight_values,
        integers,
        scales,
        same_arity,
        chain,
        drop_weight,
        weight_as_input,
        duplicate,
        cycle,
        shuffle,
    )
    + (opset, no_outputs, passthrough, output_type)
}
"""Changes of the graph, by name."""


def truncated(data: bytes, random: np.random.Generator) -> bytes:
    """The beginning of the file."""
    return data[: int(random.integers(len(data)))]


def flipped(data: bytes, random: np.random.Generator) -> bytes:
    """A few bytes changed, half of them in the first 4 KiB."""
    changed = bytearray(data)
    for end in [min(len(data), 4096)] * 4 + [len(data)] * 4:
        changed[int(random.integers(end))] = int(random.integers(256))
    return bytes(changed)


def zeroed(data: bytes, random: np.random.Generator) -> bytes:
    """A hole of zeros."""
    start = int(random.integers(len(data)))
    hole = data[start : start + 512]
    return data[:start] + bytes(len(hole)) + data[start + len(hole) :]


def other_file(data: bytes, random: np.random.Generator) -> bytes:
    """No ONNX at all."""
    return _pick([b"", b"hello, world\n", random.bytes(4096), b"\x08", b"PK\x03\x04" + data[:100]], random)


BYTES: Mapping[str, Callable[[bytes, np.random.Generator], bytes]] = {
    one.__name__: one for one in (truncated, flipped, zeroed, other_file)
}
"""Changes of the file, by name."""


def external(model: onnx.ModelProto, path: Path, random: np.random.Generator) -> str:
    """Save with the weights in a file beside the model, and damage that, or what points to it."""
    onnx.save(model, path, save_as_external_data=True, location=_DATA, size_threshold=0)
    data, damage = path.parent / _DATA, _pick(["missing", "short", "empty", "outside", "offset", "length"], random)
    if damage == "missing":
        data.unlink(missing_ok=True)
    elif damage in ("short", "empty"):
        data.write_bytes(data.read_bytes()[: 100 if damage == "short" else 0])
    else:
        _point_elsewhere(path, damage, random)
    return damage


def _point_elsewhere(path: Path, damage: str, random: np.random.Generator) -> None:
    model = onnx.load(path, load_external_data=False)
    tensor = _pick([one for one in model.graph.initializer if one.external_data], random)
    key = {"outside": "location"}.get(damage, damage)
    wrong = {
        "outside": ["../weights.bin", "/etc/hostname"],
        "offset": ["-1", "x", "1" * 18],
        "length": ["-1", "3", "x"],
    }
    for entry in list(tensor.external_data):
        if entry.key == key:
            tensor.external_data.remove(entry)
    tensor.external_data.add(key=key, value=_pick(wrong[damage], random))
    path.write_bytes(model.SerializeToString())
