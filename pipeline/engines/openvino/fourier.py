"""Read DFT, Fourier transforms along one axis, by a translation of its own: OpenVINO's does not heed the axis."""

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from enginesmith.pipeline.frameworks.onnx import traversal

if TYPE_CHECKING:
    import onnx
    import openvino

_OPERATOR = "DFT"
_PARTS = -1
"""Axis of the real and imaginary parts, which is the last one, of size 1 (real numbers) or 2."""
_AXIS_AS_INPUT = 20
"""Opset from which the axis is an input, and the last of the signal's axes if it is not given; before, axis 1."""


def translate_transforms(core: "openvino.Core", model: "onnx.ModelProto") -> None:
    """Have a registry of its own read the DFTs of this ONNX graph along their axes.

    OpenVINO 2026.4.1 always takes axis 1 from opset 20 on, and leaves an axis of size 1 behind a one-sided transform,
    where the parts of the real numbers were. Most such graphs cannot be read then: what follows has other sizes.
    """
    from openvino.frontend.onnx import ConversionExtension

    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    core.add_extension(ConversionExtension(_OPERATOR, functools.partial(_translate, opset)))


def has_transforms(model: "onnx.ModelProto") -> bool:
    """Tell whether an ONNX graph, or one inside of it, has a DFT."""
    return any(node.op_type == _OPERATOR for node in traversal.nodes(model))


def _translate(opset: int, node: Any) -> list[Any]:
    """Write one DFT [..., parts] in OpenVINO's operations; see https://onnx.ai/onnx/operators/onnx__DFT.html."""
    from openvino import opset13

    source, length = node.get_input(0), _read_input(node, 1)
    axes = np.array([_read_axis(opset, node)])
    more = () if length is None else (opset13.reshape(length, np.array([1]), False),)
    match bool(node.get_attribute("onesided", 0)), bool(node.get_attribute("inverse", 0)):
        case True, False:
            transform = opset13.rdft(opset13.squeeze(source, np.array([_PARTS])), axes, *more)
        case True, True:
            transform = opset13.unsqueeze(opset13.irdft(source, axes, *more), np.array([_PARTS]))
        case False, inverse:
            transform = (opset13.idft if inverse else opset13.dft)(_complete_parts(source), axes, *more)
    return list(transform.outputs())


def _read_axis(opset: int, node: Any) -> int:
    """Read the axis of a DFT as OpenVINO counts it: from the back, the axis of the parts does not count."""
    if opset < _AXIS_AS_INPUT:
        axis = int(node.get_attribute("axis", 1))
    elif (given := _read_input(node, 2)) is None:
        axis = -2
    elif given.get_node().get_type_name() == "Constant":
        axis = int(given.get_node().get_data().item())
    else:
        raise ValueError("the axis of a Fourier transform is computed, and no constant")
    return axis if axis >= 0 else axis + 1


def _read_input(node: Any, at: int) -> Any:
    """Return an input of an ONNX node, or None where it is left out."""
    value = node.get_input(at) if at < node.get_input_size() else None
    return None if value is None or value.get_node().get_type_name() == "NullNode" else value


def _complete_parts(source: Any) -> Any:
    """Give real numbers [..., 1] imaginary parts of 0; complex ones [..., 2] stay as they are."""
    from openvino import opset13

    shape = source.get_partial_shape()
    if shape.rank.is_static and shape[len(shape) - 1] == 2:
        return source
    start, stop, step, axes = (np.array([value]) for value in (0, 1, 1, _PARTS))
    real = opset13.slice(source, start, stop, step, axes)
    zeros = opset13.subtract(real, real)
    both = opset13.concat([source, zeros], _PARTS)
    return opset13.slice(both, start, np.array([2]), step, axes)
