"""Write a transposed convolution as a convolution whose channels are then moved to pixels.

ONNX Runtime has no int8 kernel for ConvTranspose, and one for each of the two. With strides of s, every s-th pixel of
an output reads the same places of the kernel: s² convolutions, whose results DepthToSpace interleaves (Shi et al.: Is
the Deconvolution Layer the Same as a Convolutional Layer?, 2016, arXiv:1609.07009).
"""

import math
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.quantize import layers, quantizers
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    from enginesmith.pipeline.passes.quantize.writer import Writer

UPSAMPLING = "upsampling ConvTranspose"
"""Kind of transposed convolutions that are worth writing so."""
_LEAST_TERMS = 128
"""Numbers that an output sums up from which on int8 is faster so than ConvTranspose in float32.

ONNX Runtime 1.31.1, AVX-512 VNNI, one thread: 0.9 × its speed with 128 and a kernel of 2, 1.3 × with 128 and one of 4,
1.25 to 1.32 × with 256, 1.75 × with 1024; with 32 to 64 terms 0.46 to 0.7 ×.
"""
_KERNEL_ATTRIBUTES = ("auto_pad", "dilations", "group", "kernel_shape", "output_padding", "output_shape")


def name_kind(node: "ir.Node") -> str:
    """Name the kind of operator of a product; convolutions in groups are one of their own.

    They move more numbers than they compute.
    """
    if node.op_type == "Conv" and node.attributes.get_int("group", 1) > 1:
        return "grouped Conv"
    return UPSAMPLING if node.op_type == "ConvTranspose" and _is_worth_it(node) else node.op_type


def write_as_convolution(node: "ir.Node", written: "ir.Value", writer: "Writer") -> "ir.Value":
    """Make a convolution of an upsampling ConvTranspose, in place, and move its channels to pixels behind ``written``.

    That is what the node writes, [N, C, H, W], or what an activation behind it does; it becomes [N, s² C, H/s, W/s].
    Returns the value that takes its place.
    """
    weight, bias = layers.read_weight(node), quantizers.read_bias(node)
    strides, starts = _list_strides(node), _list_pads(node)[:2]
    stride = strides[0]
    convolved, pads = _split_kernel(weight, stride, starts)
    edit.write([(node, layers.WEIGHT)], convolved)
    if bias is not None:
        edit.write([(node, layers.BIAS)], np.repeat(bias, stride**2))
    node.op_type = "Conv"
    for name in (*_KERNEL_ATTRIBUTES, "strides"):
        node.attributes.pop(name, None)
    node.attributes["pads"] = ir.AttrInt64s("pads", pads)
    readers = [(use.node, use.idx) for use in written.uses()]
    shuffle = writer.node(
        "DepthToSpace",
        [written],
        [f"{written.name}_pixels"],
        attributes={"blocksize": stride, "mode": "CRD"},
        like=node,
    )
    edit.insert_behind(writer.graph, written, [shuffle])
    pixels = shuffle.outputs[0]
    pixels.type, pixels.shape = written.type, written.shape
    written.shape = node.outputs[0].shape = None
    writer.hand_over(written, pixels, readers, outputs=True)
    return pixels


def _is_worth_it(node: "ir.Node") -> bool:
    """Tell whether a transposed convolution enlarges both sides by its stride, and sums up enough for that."""
    content = layers.find_weight(edit.find_input(node, layers.WEIGHT))
    bias = edit.find_input(node, layers.BIAS)
    plain = node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET" and "output_shape" not in node.attributes
    if content is None or len(content.shape) != 4 or not plain or (bias is not None and edit.read(bias) is None):
        return False
    if node.attributes.get_int("group", 1) != 1 or set(node.attributes.get_ints("dilations", [1])) != {1}:
        return False
    channels, _, *kernel = content.shape.numpy()
    strides, pads, more = _list_strides(node), _list_pads(node), node.attributes.get_ints("output_padding", [0, 0])
    grows = all(
        kernel[axis] + more[axis] - pads[axis] - pads[axis + 2] == strides[axis] and pads[axis] < kernel[axis]
        for axis in range(2)
    )
    terms = channels * math.prod(kernel) / math.prod(strides)
    return strides[0] == strides[1] > 1 and grows and terms >= _LEAST_TERMS


def _list_strides(node: "ir.Node") -> list[int]:
    return list(node.attributes.get_ints("strides", [1, 1]))


def _list_pads(node: "ir.Node") -> list[int]:
    return list(node.attributes.get_ints("pads", [0, 0, 0, 0]))


def _split_kernel(weight: Array, stride: int, starts: list[int]) -> tuple[Array, list[int]]:
    """Sort a kernel [inputs, outputs, h, w] by the pixels that read it: [outputs · s · s, inputs, h', w'], and pads.

    The output at s · place + phase reads the input at place + step through the kernel at phase + start - s · step.
    """
    steps = [
        [
            (phase, step)
            for phase in range(stride)
            for step in range(-size, size)
            if 0 <= phase + start - stride * step < size
        ]
        for size, start in zip(weight.shape[2:], starts, strict=True)
    ]
    first, last = ([choose(step for _, step in axis) for axis in steps] for choose in (min, max))
    inputs, outputs = weight.shape[:2]
    sizes = [high - low + 1 for low, high in zip(first, last, strict=True)]
    split = np.zeros((outputs, stride, stride, inputs, *sizes), weight.dtype)
    for row, down in steps[0]:
        for column, right in steps[1]:
            part = weight[:, :, row + starts[0] - stride * down, column + starts[1] - stride * right]
            split[:, row, column, :, down - first[0], right - first[1]] = part.T
    return split.reshape(-1, inputs, *sizes), [-first[0], -first[1], *last]
