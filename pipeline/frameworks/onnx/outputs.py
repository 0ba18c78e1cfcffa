"""Complete what a file says of its outputs: types that it leaves out, and tensors where it has maps of classes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline.frameworks.onnx import dimensions, edit, model_file, traversal, validation
from enginesmith.pipeline.tensors import Feeds, Signature
from enginesmith.pipeline.units import name_some

if TYPE_CHECKING:
    import onnx

Draw = Callable[[Signature], tuple[Mapping[str, int], Callable[[Mapping[str, int], int], Feeds]]]
"""Choose usual sizes for a signature, and how to draw feeds of sizes and a seed."""
_SHOWN = 3
"""Classes that a note has."""


def complete(path: Path, folder: Path, draw: Draw) -> tuple[Path, tuple[str, ...]]:
    """Write a model into a folder that is made, with a type and shape for each output; return file and notes.

    A map of classes to probabilities (ZipMap) gives way to the tensor that it is made of, under its name. Types are
    inferred; so are shapes, or the model is run for them on what ``draw`` draws. The file is ``path`` itself where
    there is nothing to complete.

    Raises:
        InvalidGraph: the file cannot be read, lacks files of its weights, or lacks a shape and is broken besides, or
            cannot be run to see it.
        ModelError: it lacks a shape, and its sparse weights are too large.
        SignatureError: an input is no tensor of a supported dtype and known rank.
    """
    model = model_file.read(path)
    before = [value.SerializeToString() for value in model.graph.output]
    notes = (*_unwrap_maps(model), *_write_types(model))
    unknown = [value for value in model.graph.output if model_file.lacks_shape(value)]
    if not unknown and [value.SerializeToString() for value in model.graph.output] == before:
        return path, ()
    validation.check_weight_files(path, model, str(path))
    target = folder / edit.FILE
    model_file.copy(path, target)
    target.write_bytes(model.SerializeToString())
    if unknown:
        signature = _read_signature(model, folder, str(path))
        dimensions.find_shapes(target, signature, *draw(signature))
    return target, notes


def _read_signature(model: "onnx.ModelProto", folder: Path, name: str) -> Signature:
    """Check a model of this name, and read its signature; outputs whose shapes are not known have no dimensions.

    Raises:
        InvalidGraph: something is wrong with it besides.
        SignatureError: an input is no tensor of a supported dtype and known rank.
    """
    for value in model.graph.output:
        if model_file.lacks_shape(value):
            value.type.tensor_type.shape.SetInParent()
    (placeholder := folder / "signature.onnx").write_bytes(model.SerializeToString())
    validation.check(placeholder, name, outputs_checked=False)
    return model_file.signature(placeholder)


def _unwrap_maps(model: "onnx.ModelProto") -> list[str]:
    """Replace outputs that a ZipMap makes by what it reads, in place; return a note on each.

    They are copies where that is an output itself.
    """
    graph = model.graph
    notes, outputs = list[str](), {value.name: value for value in graph.output}
    for node in [node for node in graph.node if node.op_type == "ZipMap" and node.output[0] in outputs]:
        read, name = node.input[0], node.output[0]
        made = {output for other in graph.node for output in other.output}
        if read not in made or any(name in other.input for other in traversal.walk(graph.node)):
            continue
        if read in outputs and all(entry.domain for entry in model.opset_import):
            continue  # it has no Identity
        classes = [text.decode() for each in node.attribute for text in each.strings]
        classes += [str(number) for each in node.attribute for number in each.ints]
        if read in outputs:
            node.CopyFrom(type(node)(op_type="Identity", name=node.name, input=[read], output=[name]))
        else:
            graph.node.remove(node)
            _rename(graph, read, name)
        _write_type_of_map(graph, outputs[name], read)
        notes.append(
            f"the output {name!r} maps classes to numbers (ZipMap), and is the tensor of these numbers instead, a "
            f"column for each class: {name_some(classes, _SHOWN)}"
        )
    return notes


def _rename(graph: "onnx.GraphProto", old: str, new: str) -> None:
    """Call a value otherwise, where it is made and read."""
    for node in traversal.walk(graph.node):
        for names in (node.input, node.output):
            names[:] = [new if each == old else each for each in names]


def _write_type_of_map(graph: "onnx.GraphProto", output: "onnx.ValueInfoProto", read: str) -> None:
    """Write the type of the tensor that a map was made of, with the shape that the file has of it, if any."""
    from onnx import TensorProto

    output.type.tensor_type.elem_type = TensorProto.FLOAT  # the only type that the operator takes
    for value in [value for value in (*graph.value_info, *graph.output) if value.name == read]:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            output.type.CopyFrom(value.type)
    known = {value.name for value in graph.output}
    for value in [
        value for value in graph.value_info if value.name == output.name or (value.name == read not in known)
    ]:
        graph.value_info.remove(value)


def _write_types(model: "onnx.ModelProto") -> list[str]:
    """Write inferred types and shapes of outputs that have none, in place; return a note on each type."""
    import onnx

    lacking = [
        value for value in model.graph.output if not value.type.WhichOneof("value") or model_file.lacks_shape(value)
    ]
    if not lacking:
        return []
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.output
    except onnx.shape_inference.InferenceError:
        return []
    types, notes = {value.name: value.type for value in inferred}, list[str]()
    for value in lacking:
        tensor_type = types[value.name].tensor_type
        if tensor_type.elem_type:
            if not value.type.WhichOneof("value"):
                dtype = model_file.dtype_name(tensor_type.elem_type)
                notes.append(f"the file gives no type of the output {value.name!r}: it is inferred to be {dtype}")
            value.type.tensor_type.CopyFrom(tensor_type)
    return notes
