"""Rewrite parts of graphs that OpenVINO would compute wrongly; engines are files of the result."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from enginesmith.pipeline.engines.openvino.sequences import heed_lengths

if TYPE_CHECKING:
    import openvino

WITH_BODIES = ("If", "Loop", "TensorIterator")
_REDUCTIONS = frozenset(f"Reduce{word}" for word in ("L1", "L2", "Max", "Mean", "Min", "Prod", "Sum"))
_CONVOLUTIONS = ("Convolution", "GroupConvolution", "ConvolutionBackpropData", "GroupConvolutionBackpropData")
_ARITHMETIC = ("Add", "Subtract", "Multiply", "Divide", "Power", "Negative", "Abs")
_SLICE_INPUTS = ("data", "start", "stop", "step", "axes")
_LOG1P_TERMS = (9, 7, 5, 3, 1)
"""Odd powers of atanh's series below the 11th: up to 1/3, all above add 1.5e-7 times the sum, as little as rounding."""

_ADDED_TO_NORMS = np.finfo(np.float32).eps
"""Constant that OpenVINO's reader of ONNX adds to the sum of powers in LpNormalization."""


def correct(graph: "openvino.Model") -> None:
    """Rewrite all that is known to be computed wrongly, but for the constants of :func:`restore_empty`."""
    _replace_lost_slices(graph)
    _keep_reduced_axes(graph)
    _replace_softplus(graph)
    _guard_norms(graph)
    heed_lengths(graph)
    _widen_bytes(graph)
    _keep_scales_before_forks(graph)


def _keep_scales_before_forks(graph: "openvino.Model") -> None:
    """Clamp what int8 convolutions without a bias write, to all of float32's range, where several operators read it.

    OpenVINO 2026.4.1 scales the sums of an int8 convolution in an operator of its own. It moves the scale behind a Relu
    or into the next rounding, for that reader alone; and where sizes are dynamic, it then makes the scale for another
    reader a part of the convolution, so that the first one's numbers are scaled twice. Nothing is moved past a clamp,
    which becomes a part of the convolution.
    """
    from openvino import opset13

    nodes = graph.get_ordered_ops()
    if not any(node.get_type_name() == "FakeQuantize" for node in nodes):
        return
    for node in nodes:
        if node.get_type_name() not in _CONVOLUTIONS:
            continue
        value = node.output(0)
        readers = value.get_target_inputs()
        if len({reader.get_node().get_friendly_name() for reader in readers}) < 2:
            continue
        names, name = value.get_names(), node.get_friendly_name()
        most = float(np.finfo(np.float32).max)
        clamped = opset13.clamp(value, -most, most)
        clamped.set_friendly_name(f"{name}/clamped")
        value.set_names(set())
        clamped.output(0).set_names(names)
        for reader in readers:
            reader.replace_source_output(clamped.output(0))
    graph.validate_nodes_and_infer_types()


def _replace_softplus(graph: "openvino.Model") -> None:
    """Compute log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), also where it is written so.

    OpenVINO 2026.4.1 makes SoftPlus of both, which below -12 is 0, negative, or 4e32 times what it should be. Its Mish,
    which it makes of x tanh(softplus(x)), is off by less than 1e-6, and quicker: that is left alone.
    """
    for node in graph.get_ordered_ops():
        for body in _list_bodies(node):
            _replace_softplus(body)
        source = _find_softplus_input(node)
        if source is None or not source.get_element_type().is_real() or _is_mish(node, source):
            continue
        value = node.output(0)
        readers, names, name = value.get_target_inputs(), value.get_names(), node.get_friendly_name()
        value.set_names(set())
        node.set_friendly_name(f"{name}/replaced")
        computed = _compute_softplus(source, name)
        computed.set_names(names)
        for reader in readers:
            reader.replace_source_output(computed)
    graph.validate_nodes_and_infer_types()


def _find_softplus_input(node: Any) -> Any:
    """Find x where a node is softplus(x) or log(1 + exp(x)), else None; with the axes that the constant adds to it."""
    from openvino import opset13

    if node.get_type_name() == "SoftPlus":
        return node.input_value(0)
    added = node.input_value(0).get_node() if node.get_type_name() == "Log" else None
    if added is None or added.get_type_name() != "Add":
        return None
    for at in range(2):
        exponential, one = added.input_value(at).get_node(), added.input_value(1 - at).get_node()
        if (exponential.get_type_name(), one.get_type_name()) != ("Exp", "Constant") or not (one.get_data() == 1).all():
            continue
        source, shape = exponential.input_value(0), added.get_output_partial_shape(0)
        if source.get_partial_shape() == shape:
            return source
        if one.get_data().size == 1 and source.get_partial_shape().rank.is_static:
            more = len(shape) - len(source.get_partial_shape())
            return opset13.unsqueeze(source, np.arange(more)).output(0)
    return None


def _is_mish(node: Any, source: Any) -> bool:
    """Tell whether softplus(x) is read by nothing but x tanh(softplus(x)), of which OpenVINO makes one operation."""
    value = node
    for kind in ("Tanh", "Multiply"):
        readers = [reader.get_node() for reader in value.output(0).get_target_inputs()]
        if [each.get_type_name() for each in readers] != [kind]:
            return False
        value = readers[0]
    return source in (value.input_value(0), value.input_value(1))


def _compute_softplus(x: Any, name: str) -> Any:
    """Compute max(x, 0) + log1p(e), e = exp(-|x|), with log1p(e) = 2 atanh(z), z = e / (e + 2), as a series.

    z is at most 1/3, and nothing cancels. With sizes that are fixed, it takes as long as SoftPlus, where logarithms and
    comparisons take three times as long; with dynamic ones, up to 2.2 times, which is 2 ns more for each number.
    """
    from openvino import opset13

    def apply(operation: str, *values: Any) -> Any:
        # parts are named like the node: what is read of the engine finds it by its name
        return getattr(opset13, operation)(*values, name=f"{name}/{operation}")

    def number(value: float) -> Any:
        return opset13.constant(value, x.get_element_type())

    e = apply("exp", apply("negative", apply("abs", x)))
    z = apply("divide", e, apply("add", e, number(2)))
    square, series = apply("multiply", z, z), number(2 / (_LOG1P_TERMS[0] + 2))
    for power in _LOG1P_TERMS:
        series = apply("add", apply("multiply", series, square), number(2 / power))
    return opset13.add(apply("maximum", x, number(0)), apply("multiply", z, series), name=name).output(0)


def _guard_norms(graph: "openvino.Model") -> None:
    """Divide by norms as they are, and by 1 where they are 0, instead of adding 1.2e-7 to the sum before its root.

    OpenVINO 2026.4.1 reads LpNormalization so: rows that are shorter than 1e-3 come out too short by 0.1 and more.
    """
    from openvino import opset13

    for node in graph.get_ordered_ops():
        for body in _list_bodies(node):
            _guard_norms(body)
        added = _find_padded_sum(node)
        if added is None:
            continue
        total = added.input_value(0)
        for reader in added.output(0).get_target_inputs():
            reader.replace_source_output(total)
        norm = node.input_value(1)
        none = opset13.equal(norm, opset13.constant(0, norm.get_element_type()))
        divisor = opset13.select(none, opset13.constant(1, norm.get_element_type()), norm)
        node.input(1).replace_source_output(divisor.output(0))
    graph.validate_nodes_and_infer_types()


def _find_padded_sum(node: Any) -> Any:
    """Find the sum of powers and of a tiny constant by whose root a node divides what was summed up, else None."""
    if node.get_type_name() != "Divide":
        return None
    added = node.input_value(1).get_node()
    if added.get_type_name() in ("Sqrt", "Power"):
        added = added.input_value(0).get_node()
    kinds = [added.input_value(at).get_node() for at in range(2)] if added.get_type_name() == "Add" else []
    if [each.get_type_name() for each in kinds] != ["ReduceSum", "Constant"]:
        return None
    powers = kinds[0].input_value(0).get_node()
    of_source = powers.get_type_name() in ("Power", "Abs") and powers.input_value(0) == node.input_value(0)
    own = not added.output(0).get_names()  # what the file itself adds has a name
    return added if of_source and own and (kinds[1].get_data() == _ADDED_TO_NORMS).all() else None


def _widen_bytes(graph: "openvino.Model") -> None:
    """Compute numbers of 8 bits in 32, and take the lowest 8 of the results, as ONNX has it.

    OpenVINO 2026.4.1 rounds their quotients to the nearest number where there are 16 or more, also those of a shift
    to the right, which it makes a division; and it clips sums, differences and products that are out of their range.
    """
    from openvino import Type, opset13

    for node in graph.get_ordered_ops():
        for body in _list_bodies(node):
            _widen_bytes(body)
        value = node.output(0) if node.get_type_name() in _ARITHMETIC else None
        if value is None or value.get_element_type() not in (Type.u8, Type.i8):
            continue
        kind, readers, names = value.get_element_type(), value.get_target_inputs(), value.get_names()
        for at in range(node.get_input_size()):
            node.input(at).replace_source_output(opset13.convert(node.input_value(at), "i32").output(0))
        node.validate_and_infer_types()
        value.set_names(set())
        lowest = opset13.bitwise_and(value, np.int32(0xFF))
        if kind == Type.i8:  # 128 to 255 stand for −128 to −1
            lowest = opset13.subtract(opset13.bitwise_xor(lowest, np.int32(0x80)), np.int32(0x80))
        short = opset13.convert(lowest, kind.get_type_name(), name=f"{node.get_friendly_name()}/8 bits").output(0)
        short.set_names(names)
        for reader in readers:
            reader.replace_source_output(short)
    graph.validate_nodes_and_infer_types()


def _keep_reduced_axes(graph: "openvino.Model") -> None:
    """Reduce with axes of size 1 left, and squeeze them out behind it.

    OpenVINO 2026.4.1 computes element-wise operations as a part of the reduction before them, and takes the channels of
    a result without these axes from the wrong axis: of a mean over tokens in int8, or over the last of three axes also
    in floats (docs/precision.md).
    """
    from openvino import opset13

    for node in graph.get_ordered_ops():
        for body in _list_bodies(node):
            _keep_reduced_axes(body)
        if node.get_type_name() not in _REDUCTIONS or node.get_attributes()["keep_dims"]:
            continue
        value, axes = node.output(0), node.input_value(1)
        known = axes.get_node().get_type_name() == "Constant" and axes.get_node().get_data().size
        if not known or not value.get_element_type().is_real():
            continue
        readers, names = value.get_target_inputs(), value.get_names()
        node.set_attribute("keep_dims", True)
        node.validate_and_infer_types()
        value.set_names(set())
        squeezed = opset13.squeeze(value, axes, name=f"{node.get_friendly_name()}/squeezed").output(0)
        squeezed.set_names(names)
        for reader in readers:
            reader.replace_source_output(squeezed)
    graph.validate_nodes_and_infer_types()


def _replace_lost_slices(graph: "openvino.Model") -> None:
    """Take by Gather what GatherElements reads of a Slice, which OpenVINO 2026.4.1 loses, and then does not compile."""
    from openvino import opset8

    for reader in graph.get_ordered_ops():
        sliced = reader.input_value(0).get_node() if reader.get_type_name() == "GatherElements" else None
        if sliced is None or sliced.get_type_name() != "Slice" or sliced.get_input_size() != len(_SLICE_INPUTS):
            continue
        source, *bounds = (sliced.input_value(index) for index in range(sliced.get_input_size()))
        if any(bound.get_node().get_type_name() != "Constant" for bound in bounds):
            continue
        for start, stop, step, axis in zip(*(bound.get_node().get_data().tolist() for bound in bounds), strict=True):
            shape = source.get_partial_shape()
            size = shape[axis % len(shape)]
            if size.is_static:
                taken = np.arange(size.get_length())[start:stop:step]
                source = opset8.gather(source, taken, np.int64(axis)).output(0)
        if source.get_partial_shape() == sliced.get_output_partial_shape(0):
            reader.input(0).replace_source_output(source)


def restore_empty(graph: "openvino.Model", empty: Collection[str]) -> None:
    """Restore the size 0 of constants that are outputs, by name: OpenVINO 2026.4.1 reads them as single numbers.

    A branch for the case that a detector finds nothing then answers a row of arbitrary numbers. What else reads such
    constants is left alone: a Gather by no indices would end the process.
    """
    from openvino import Shape, op

    if not empty:
        return
    for node in graph.get_ordered_ops():
        for body in _list_bodies(node):
            restore_empty(body, empty)
        value = node.output(0) if node.get_type_name() == "Constant" else None
        if value is not None and not value.get_shape() and not value.get_names().isdisjoint(empty):
            constant = op.Constant(node.get_element_type(), Shape([0]), []).output(0)
            for reader in value.get_target_inputs():
                if reader.get_node().get_type_name() == "Result":
                    reader.replace_source_output(constant)
    graph.validate_nodes_and_infer_types()


def _list_bodies(node: Any) -> list["openvino.Model"]:
    """List the branches of a node, or the body of a loop."""
    if node.get_type_name() == "If":
        return [node.get_function(index) for index in range(2)]
    return [node.get_function()] if node.get_type_name() in WITH_BODIES else []
