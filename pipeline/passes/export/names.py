"""Name what exporters leave open in a graph: its inputs, outputs and dimensions as in the signature, and axes."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from enginesmith.pipeline.errors import ExportError
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.export.failures import FixedDimension

if TYPE_CHECKING:
    from enginesmith.pipeline.tensors import Signature, TensorSpec


def name_squeezed_axes(model: "ir.Model", words: Iterable[str]) -> int:
    """Give each Squeeze without axes, in place, those that are of size 1 at any batch; return how many there were.

    The exporters write ``squeeze()`` so, and with a batch of 1 it would take the batch away, too. ``words`` are the
    dynamic dimensions of the inputs, which were not 1 at the export. Where the known sizes do not tell how many axes
    were taken away, a Squeeze stays.
    """
    dynamic, count = {*words}, 0
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type != "Squeeze" or node.domain or len(node.inputs) != 1 or "axes" in node.attributes:
            continue
        given, result = (value.shape if value else None for value in (node.inputs[0], node.outputs[0]))
        if given is None:
            continue
        axes = [axis for axis, size in enumerate(given) if size == 1]
        known = all(isinstance(size, int) or size.value in dynamic for size in given)
        if len(given) - len(axes) != len(result) if result is not None else not known:
            continue
        count += 1
        if not axes:
            node.op_type = "Identity"  # a Squeeze of an empty list takes every axis of size 1 away
            continue
        constant = ir.node("Constant", [], {"value_ints": axes}, name=f"{node.outputs[0].name}_axes")
        node.prepend(constant)
        node.resize_inputs(2)
        node.replace_input_with(1, constant.outputs[0])
    if count:
        edit.infer_shapes(model)
    return count


def name_values(model: "ir.Model", signature: "Signature") -> None:
    """Give inputs, outputs and their dynamic dimensions the signature's names.

    Inputs that nothing reads, which the TorchScript exporter drops, are restored: callers feed them all the same.
    """
    import numpy as np
    from onnx_ir.passes import common

    common.OutputFixPass()(model)
    if len(model.graph.inputs) != len(signature.inputs):
        present = {value.name: value for value in model.graph.inputs}
        model.graph.inputs.clear()
        for spec in signature.inputs:
            kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(spec.dtype)))
            new = ir.Value(name=spec.name, type=kind, shape=ir.Shape(spec.shape))
            model.graph.inputs.append(present.get(spec.name, new))
    for value, spec in zip(model.graph.inputs, signature.inputs, strict=True):
        value.name = spec.name
    for value, spec in zip(model.graph.outputs, signature.outputs, strict=True):
        value.name, value.shape = spec.name, ir.Shape(_name_output_dims(value, spec))
    common.NameFixPass()(model)


def _name_output_dims(value: "ir.Value", spec: "TensorSpec") -> list[int | str]:
    """Return the signature's names; dimensions that the graph leaves open stay so, whatever the example's size was."""
    if value.shape is None:
        return list(spec.shape)
    if len(value.shape) != len(spec.shape):
        raise ExportError(f"output {spec.name!r} came out with shape {value.shape}, expected {spec}")
    dims: list[int | str] = []
    for axis, (given, wanted) in enumerate(zip(value.shape, spec.shape, strict=True)):
        if isinstance(wanted, str) and isinstance(given, int):
            raise FixedDimension(
                f"dimension {axis} of output {spec.name!r} came out fixed at {given}, though it varies with {wanted!r}",
                "look for sizes that the module turns into Python numbers, as int(x.shape[0]) does",
            )
        open_ended = isinstance(wanted, int) and not isinstance(given, int)
        dims.append(f"{spec.name}_dim_{axis}" if open_ended else wanted)
    return dims
