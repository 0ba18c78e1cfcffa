"""Check ONNX files: that they meet the specification, that their weights are there, and are numbers."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.errors import InvalidGraph
from enginesmith.pipeline.frameworks.onnx import model_file, traversal
from enginesmith.pipeline.frameworks.onnx.flatten import has_sparse_weights, make_dense

if TYPE_CHECKING:
    import onnx

EXPORT_AGAIN = "export it again"
"""Remedy for a file that breaks the specification."""
_CHUNK_BYTES = 1 << 22
_NAN_ABOVE = {"float16": 0x7C00, "bfloat16": 0x7F80}  # greatest bit pattern, sign aside, that is not NaN


def check(path: Path, name: str = "", remedy: str = EXPORT_AGAIN, *, outputs_checked: bool = True) -> None:
    """Check that a file meets the specification, and that its weights hold no NaN; a single number is a fill.

    ``name`` is what messages call the file, if not by its path; ``remedy`` is for one that breaks the specification.
    The shapes that it declares of its outputs may contradict its nodes unless ``outputs_checked``.

    Raises:
        InvalidGraph: says what is wrong with it.
        ModelError: its sparse weights are too large.
    """
    import onnx

    model, name = model_file.read(path), name or str(path)
    newest, update = onnx.defs.onnx_opset_version(), "export with an older opset, or upgrade the onnx package"
    if model.ir_version > onnx.IR_VERSION:
        given, known = model.ir_version, onnx.IR_VERSION
        raise InvalidGraph(f"{name} has IR version {given}, and the installed onnx knows up to {known}", update)
    opset = max((entry.version for entry in model.opset_import if not entry.domain), default=0)
    if opset > newest:
        raise InvalidGraph(f"{name} needs opset {opset}, and the installed onnx knows up to {newest}", update)
    if not model.graph.output:
        raise InvalidGraph(f"{name} has no outputs", "name at least one output when the graph is exported")
    check_weight_files(path, model, name)
    try:
        is_dense = not has_sparse_weights(model)
        try:
            onnx.checker.check_model(os.fspath(path), full_check=is_dense)
        except onnx.shape_inference.InferenceError:
            if outputs_checked:
                raise
            onnx.shape_inference.infer_shapes(_leave_outputs_open(model), check_type=True, strict_mode=True)
        if not is_dense:  # which this does not take for weights
            make_dense(model, path, name)
            onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except onnx.checker.ValidationError as error:
        raise InvalidGraph(f"{name} breaks the ONNX specification: {_brief(error)}", remedy) from error
    except (onnx.shape_inference.InferenceError, ValueError) as error:
        raise InvalidGraph(f"types or shapes in {name} contradict each other: {_brief(error)}", remedy) from error
    for tensor in traversal.tensors(model):
        if model_file.count_elements(tensor) > 1 and _has_nan(path, tensor):
            nodes = traversal.nodes(model)
            constants = (node.output[0] for node in nodes if any(tensor == entry.t for entry in node.attribute))
            weight = next(constants, tensor.name)
            raise InvalidGraph(f"the weight {weight!r} of {name} holds NaN", "train or convert the model again")


def _leave_outputs_open(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Copy a model without the shapes of its outputs."""
    import onnx

    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for value in bare.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return bare


def check_weight_files(path: Path, model: "onnx.ModelProto", name: str) -> None:
    """Check that the files of weights lie beside the model, and are long enough; messages call the model ``name``.

    Raises:
        InvalidGraph: names the weight whose file is not there, too short, or elsewhere.
    """
    for tensor in traversal.tensors(model):
        if model_file.is_external(tensor):
            _check_external(path, name, tensor)


def _check_external(path: Path, name: str, tensor: "onnx.TensorProto") -> None:
    location, offset, length = model_file.locate_external(tensor)
    what = f"the weight {tensor.name!r} of {name} lies in {location!r}"
    if Path(location).is_absolute() or ".." in Path(location).parts:
        raise InvalidGraph(f"{what}, which is outside of the model's folder", "keep external data beside the model")
    parts = (path.parent / location, *(path.parent / folder for folder in Path(location).parents))
    if location and any(part.is_symlink() for part in parts):
        raise InvalidGraph(f"{what}, which is a symbolic link", "put the file itself beside the model")
    file = path.parent / location
    if not location or not file.is_file():
        raise InvalidGraph(f"{what}, and there is no such file", f"put it beside {path.name}")
    if file.stat().st_size < offset + length:
        raise InvalidGraph(f"{what}, which is too short: {offset + length} bytes needed", "copy it again")


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400]


def _has_nan(path: Path, tensor: "onnx.TensorProto") -> bool:
    dtype = model_file.dtype_name(tensor.data_type)
    if dtype in _NAN_ABOVE:
        words = (np.frombuffer(block, np.uint16) for block in _blocks(path, tensor))
        return any(((block & 0x7FFF) > _NAN_ABOVE[dtype]).any() for block in words)
    if dtype not in ("float32", "float64"):
        return False
    blocks = (np.frombuffer(block, dtype) for block in _blocks(path, tensor))
    return any(np.isnan(block.min()) for block in blocks if block.size)  # min passes NaN on, the cheapest that does


def _blocks(path: Path, tensor: "onnx.TensorProto") -> Iterator[bytes | memoryview]:
    if not model_file.is_external(tensor):
        from onnx import numpy_helper

        yield tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
        return
    location, offset, length = model_file.locate_external(tensor)
    buffer = memoryview(bytearray(min(length, _CHUNK_BYTES)))
    with (path.parent / location).open("rb", buffering=0) as stream:
        stream.seek(offset)
        while length > 0 and (count := stream.readinto(buffer[: min(length, _CHUNK_BYTES)])):
            yield buffer[:count]
            length -= count
