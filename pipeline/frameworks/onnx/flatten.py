"""Write a model as one graph of plain operators and dense weights, which is what engines and passes work on.

A file may also have functions of its own, whose bodies stand beside the graph, and sparse weights, which onnx's shape
inference does not know. Both are written out once, when a file is loaded.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import edit, ir, model_file, traversal
from enginesmith.pipeline.units import format_bytes, name_some

if TYPE_CHECKING:
    import onnx

_DENSE_BYTES = 64 << 20
"""Most that the sparse weights of a model may take as dense ones, all together."""
_SHOWN = 3
"""Names that a note has."""


def flatten(path: Path, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Write a model into an empty folder, its functions inlined and its sparse weights dense; return file and notes.

    The file is ``path`` itself where there is nothing to write out.

    Raises:
        InvalidGraph: the file cannot be read.
        ModelError: its weights are too large as dense ones.
    """
    proto = model_file.read(path)
    dense = make_dense(proto, path, str(path))
    if not dense and not proto.functions:
        return path, ()
    notes = [f"sparse weights were made dense: {name_some(dense, _SHOWN)}"] if dense else []
    model = edit.from_proto(proto, path)
    if proto.functions:
        try:
            notes.append(f"functions were inlined: {name_some(inline_functions(model), _SHOWN)}")
        except (ValueError, ir.passes.PreconditionError) as error:
            notes.append(f"functions are not inlined, and what is in them is not looked into: {error}")
            if not dense:
                return path, tuple(notes)
            model = edit.from_proto(proto, path)
    edit.save(model, folder)
    return folder / edit.FILE, tuple(notes)


def make_dense(model: "onnx.ModelProto", path: Path, name: str) -> list[str]:
    """Replace sparse weights by dense ones, in place, also in bodies; return their names.

    ``name`` is what the message calls the file at ``path``.

    Raises:
        ModelError: together they would take more than 64 MiB.
    """
    import onnx

    bodies, constants = _list_sparse_bodies(model), _list_sparse_constants(model)
    sparse = [(each.values.name, each) for graph in bodies for each in graph.sparse_initializer]
    sparse += [(output, attribute.sparse_tensor) for output, attribute in constants]
    size = sum(_dense_bytes(each) for _, each in sparse)
    if size > _DENSE_BYTES:
        raise ModelError(
            f"{name_some([weight for weight, _ in sparse], _SHOWN)} of {name} are sparse weights that take "
            f"{format_bytes(size)} when they are dense, and engines have dense weights alone",
            f"up to {format_bytes(_DENSE_BYTES)} are made dense on loading; store larger ones as dense weights",
        )
    for graph in bodies:
        graph.initializer.extend(_to_dense(each, path) for each in graph.sparse_initializer)
        del graph.sparse_initializer[:]
    for _, attribute in constants:
        attribute.t.CopyFrom(_to_dense(attribute.sparse_tensor, path))
        attribute.ClearField("sparse_tensor")
        attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
    return [weight for weight, _ in sparse]


def has_sparse_weights(model: "onnx.ModelProto") -> bool:
    """Tell whether a model has weights that :func:`make_dense` replaces."""
    return bool(_list_sparse_bodies(model) or _list_sparse_constants(model))


def _list_sparse_bodies(model: "onnx.ModelProto") -> list["onnx.GraphProto"]:
    return [graph for graph in traversal.list_graphs(model) if graph.sparse_initializer]


def _list_sparse_constants(model: "onnx.ModelProto") -> list[tuple[str, "onnx.AttributeProto"]]:
    return [
        (node.output[0], attribute)
        for node in traversal.nodes(model)
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.HasField("sparse_tensor")
    ]


def _dense_bytes(sparse: "onnx.SparseTensorProto") -> int:
    elements = int(np.prod(sparse.dims, dtype=np.int64))
    return model_file.storage_bytes(model_file.dtype_name(sparse.values.data_type), elements) or 0


def _to_dense(sparse: "onnx.SparseTensorProto", path: Path) -> "onnx.TensorProto":
    """Return the dense form; indices are places in the flat tensor, or a row of coordinates for each value."""
    from onnx import numpy_helper

    values, places = (numpy_helper.to_array(part, str(path.parent)) for part in (sparse.values, sparse.indices))
    array = np.zeros(tuple(sparse.dims), values.dtype)
    array[np.unravel_index(places, array.shape) if places.ndim == 1 else tuple(places.T)] = values
    tensor = numpy_helper.from_array(array, sparse.values.name)
    tensor.data_type = sparse.values.data_type  # 4-bit types have no dtype of numpy's own
    return tensor


def inline_functions(model: "ir.Model") -> list[str]:
    """Put the bodies of functions where they are called, in place; return their names.

    A function may be of other opsets than the model, where its operators are the same in both: the checker sees to it.

    Raises:
        ValueError: a function is called in a way that the library does not know.
    """
    from onnx_ir.passes import common

    names = sorted({function.name for function in model.functions.values()})
    for function in model.functions.values():
        shared = function.opset_imports.keys() & model.opset_imports.keys()
        function.opset_imports.update({domain: model.opset_imports[domain] for domain in shared})
    common.InlinePass()(model)
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    common.RemoveUnusedOpsetsPass()(model)
    common.NameFixPass()(model)  # the first pass does not look into bodies for names that are taken
    return names
