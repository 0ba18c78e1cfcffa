"""Add to a graph what ``--prepend`` and ``--append`` ask for."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.frameworks.processing import Appended, Processing, replace_outputs
from enginesmith.pipeline.tensors import Array, TensorSpec

OLDEST_OPSET = 13
"""Opset since which the operators take sizes and axes as they are given here."""


def extend(model: "ir.Model", processing: Processing) -> None:
    """Add the nodes before the inputs and behind the outputs, which stay in their order.

    Raises:
        UsageError: the graph is of an opset before 13, or an output is an input.
    """
    opset = model.opset_imports.get("", 0)
    if opset < OLDEST_OPSET:
        raise UsageError(
            f"--prepend and --append need a graph of opset {OLDEST_OPSET} or newer; this has opset {opset}, and cannot "
            "be converted",
            f"export it again, of opset {OLDEST_OPSET} or newer",
        )
    builder = _Builder(model.graph)
    _prepend(builder, processing)
    for step in processing.appended:
        _append(builder, step)
    model.graph.sort()


class _Builder:
    """Add nodes and constants to a graph, under names that nothing else has."""

    def __init__(self, graph: "ir.Graph") -> None:
        self.graph, self.names = graph, edit.Names(graph)
        self.stage = ""
        """A word that what is added is called after."""

    def add(self, operator: str, *inputs: "ir.Value | None", outputs: int = 1, **attributes: Any) -> "ir.Value":
        """Add a node, and return its first output."""
        return self.add_several(operator, *inputs, outputs=outputs, **attributes)[0]

    def add_several(
        self, operator: str, *inputs: "ir.Value | None", outputs: int, **attributes: Any
    ) -> "Sequence[ir.Value]":
        """Add a node, and return its outputs."""
        name = self.names.new(f"{self.stage}/{operator}")
        values = [ir.Value(name=self.names.new(f"{name}_{index}")) for index in range(outputs)]
        self.graph.append(ir.node(operator, inputs, attributes or None, outputs=values, name=name))
        return values

    def constant(self, numbers: Any, dtype: Any = np.int64) -> "ir.Value":
        """Add a constant."""
        array: Array = np.asarray(numbers, dtype)
        return edit.add_constant(self.graph, self.names.new(f"{self.stage}/constant"), array)

    def cast(self, value: "ir.Value", dtype: str) -> "ir.Value":
        """Convert numbers to a type of numpy's."""
        return self.add("Cast", value, to=int(_type_of(dtype)))


def _type_of(dtype: str) -> "ir.DataType":
    return ir.DataType.from_numpy(np.dtype(dtype))


def _describe(value: "ir.Value", spec: TensorSpec) -> None:
    """Give a value the name, type and shape of a specification."""
    value.name, value.type, value.shape = spec.name, ir.TensorType(_type_of(spec.dtype)), ir.Shape(spec.shape)


def _prepend(builder: _Builder, processing: Processing) -> None:
    prepared = processing.prepared
    if prepared is None:
        return
    builder.stage = "prepend"
    if len(prepared.factors) > 1 and prepared.has_open_channels:
        raise UsageError(
            f"--prepend has {len(prepared.factors)} numbers, and the model's input {prepared.core} any channels",
            f"give one number for all channels, or fix them with --input, as in {prepared.raw.name}:"
            f"{prepared.raw.dtype}:{','.join(map(str, prepared.raw.shape))}",
        )
    position = next(i for i, value in enumerate(builder.graph.inputs) if value.name == prepared.core.name)
    old = builder.graph.inputs[position]
    raw = ir.Value()
    _describe(raw, prepared.raw)
    old.name = builder.names.new(f"{prepared.core.name}_prepared")
    builder.graph.inputs[position] = raw
    value = raw if prepared.raw.dtype == prepared.core.dtype else builder.cast(raw, prepared.core.dtype)
    if prepared.channels_last:
        value = builder.add("Transpose", value, perm=[0, 3, 1, 2])
    if prepared.size:
        value = builder.add("Transpose", value, perm=[0, 3, 1, 2]) if prepared.own_last else value
        value = _resize(builder, value, prepared.size)
        value = builder.add("Transpose", value, perm=[0, 2, 3, 1]) if prepared.own_last else value
    if prepared.scales:
        factors, offsets = (
            builder.constant(np.reshape(each, prepared.channels_shape), prepared.core.dtype)
            for each in (prepared.factors, prepared.offsets)
        )
        value = builder.add("Add", builder.add("Mul", value, factors), offsets)
    if value is raw:
        value = builder.add("Identity", raw)
    name = old.name
    old.name = None
    value.name, value.type, value.shape = name, old.type, old.shape
    old.replace_all_uses_with(value, replace_graph_outputs=True)


def _resize(builder: _Builder, value: "ir.Value", size: tuple[int, int]) -> "ir.Value":
    """Interpolate linearly between pixels, whose centers are at halves, as ``interpolate`` of PyTorch does."""
    shape = builder.add("Slice", builder.add("Shape", value), builder.constant([0]), builder.constant([2]))
    sizes = builder.add("Concat", shape, builder.constant(size), axis=0)
    return builder.add("Resize", value, None, None, sizes, mode="linear", coordinate_transformation_mode="half_pixel")


def _append(builder: _Builder, step: Appended) -> None:
    builder.stage = f"append/{step.word}"
    graph = builder.graph
    given = [graph.outputs[index] for index in step.reads]
    for value in given:
        if value.is_graph_input():
            raise UsageError(f"--append {step.word}: the output {value.name!r} is an input", "omit --append")
        if any(spec.name == value.name for spec in step.made):
            value.name = builder.names.new(f"{value.name}_core")
    results = _compute(builder, step, given)
    for value, spec in zip(results, step.made, strict=True):
        _describe(value, spec)
    outputs = replace_outputs(list(graph.outputs), step.reads, results)
    graph.outputs.clear()
    graph.outputs.extend(outputs)


def _compute(builder: _Builder, step: Appended, values: "Sequence[ir.Value]") -> "Sequence[ir.Value]":
    value = values[0]
    if step.word == "softmax":
        return (builder.add("Softmax", value, axis=step.axis),)
    if step.word == "sigmoid":
        return (builder.add("Sigmoid", value),)
    if step.word == "argmax":
        return (builder.add("ArgMax", value, axis=step.axis, keepdims=0),)
    if step.word == "topk":
        return builder.add_several("TopK", value, builder.constant([step.count]), axis=step.axis, outputs=2)
    if len(values) > 1:
        boxes, scores = values
    else:
        sides, scores = builder.add_several("Split", value, builder.constant([4, step.classes]), axis=1, outputs=2)
        boxes = builder.add("Transpose", sides, perm=[0, 2, 1])
    if value.dtype is None or value.dtype.name != "FLOAT":
        boxes, scores = builder.cast(boxes, "float32"), builder.cast(scores, "float32")
    if step.activation == "softmax":
        scores = builder.add("Softmax", scores, axis=1)
    elif step.activation:
        scores = builder.add("Sigmoid", scores)
    return (_suppress(builder, step, boxes, scores),)


def _suppress(builder: _Builder, step: Appended, boxes: "ir.Value", scores: "ir.Value") -> "ir.Value":
    """Add NonMaxSuppression, and a table of fixed size with what it selects: [N, rows, 6], the best first."""
    options, center = step.suppression, step.suppression.boxes == "center"
    limits = (
        builder.constant([options.max]),
        builder.constant([options.iou], np.float32),
        builder.constant([options.score], np.float32),
    )
    chosen = builder.add("NonMaxSuppression", boxes, scores, *limits, center_point_box=int(center))
    shape = builder.add("Shape", scores)
    zero = builder.add("ConstantOfShape", shape)  # of float32 zeros
    kept_scores = builder.add("ScatterND", zero, chosen, builder.add("GatherND", scores, chosen))
    flat = builder.add("Reshape", kept_scores, builder.constant([0, -1]))
    count = builder.add("Gather", shape, builder.constant([2]), axis=0)
    rows = step.made[0].shape[1]
    if isinstance(rows, int):
        most = builder.constant([rows])
    else:
        total = builder.add("Mul", count, builder.constant([step.classes]))
        most = builder.add("Min", total, builder.constant([options.max]))
    best, places = builder.add_several("TopK", flat, most, axis=1, outputs=2)
    classes = builder.add("Div", places, count)
    position = builder.add("Sub", places, builder.add("Mul", classes, count))
    last = builder.constant([2])
    corners = builder.add("GatherND", boxes, builder.add("Unsqueeze", position, last), batch_dims=1)
    if center:
        middle, extent = builder.add_several("Split", corners, builder.constant([2, 2]), axis=2, outputs=2)
        half = builder.add("Mul", extent, builder.constant(0.5, np.float32))
        corners = builder.add("Concat", builder.add("Sub", middle, half), builder.add("Add", middle, half), axis=2)
    columns = [builder.add("Unsqueeze", each, last) for each in (best, builder.cast(classes, "float32"))]
    table = builder.add("Concat", corners, *columns, axis=2)
    mask = builder.cast(builder.add("Greater", best, builder.constant(0, np.float32)), "float32")
    return builder.add("Mul", table, builder.add("Unsqueeze", mask, last))
