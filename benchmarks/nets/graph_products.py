"""Products that random graphs grow by: convolutions, matrix products, attention, recurrent layers, and one in int8."""

import math
from typing import Any

import numpy as np
from graph_builder import RandomGraph

_WIDTHS = (1, 2, 3, 5, 7, 8, 12, 16, 32, 32)


def add_conv(graph: RandomGraph) -> None:
    """Add a convolution of a picture, perhaps in groups, with a stride or a dilation."""
    value = graph.pick(3)
    if value is None:
        return
    channels, height, width = value.shape
    kernel, stride, dilation = graph.choose((1, 3)), graph.choose((1, 1, 2)), graph.choose((1, 1, 1, 2))
    groups = graph.choose([number for number in (1, 1, 2, channels) if channels % number == 0])
    outputs = groups * graph.choose((1, 2, 3, 4, 4, 8))
    pads = dilation * (kernel - 1) // 2
    bias = [graph.weight(outputs, scale=0.3)] if graph.chance(0.6) else []
    sizes = [(size + 2 * pads - dilation * (kernel - 1) - 1) // stride + 1 for size in (height, width)]
    attributes: dict[str, Any] = {"group": groups, "strides": [stride] * 2, "dilations": [dilation] * 2}
    if stride == dilation == 1 and graph.chance(0.2):  # ONNX Runtime takes no other dilation here
        attributes["auto_pad"] = "SAME_UPPER"
        sizes = [height, width]
    else:
        attributes["pads"] = [pads] * 4
    weight = graph.weight(outputs, channels // groups, kernel, kernel)
    graph.add(graph.node("Conv", [value.name, weight, *bias], **attributes), (outputs, *sizes))


def add_conv_transpose(graph: RandomGraph) -> None:
    """Add a transposed convolution of a small picture."""
    value = graph.pick(3)
    if value is None or max(value.shape[1:]) > 16:
        return
    channels, height, width = value.shape
    groups = graph.choose([number for number in (1, 1, 2) if channels % number == 0])
    each, stride = int(graph.rng.integers(1, 4)), graph.choose((1, 2))
    bias = [graph.weight(groups * each, scale=0.3)] if graph.chance(0.5) else []
    weight = graph.weight(channels, each, 2, 2, scale=1 / math.sqrt(channels))
    made = graph.node("ConvTranspose", [value.name, weight, *bias], group=groups, strides=[stride] * 2)
    graph.add(made, (groups * each, (height - 1) * stride + 2, (width - 1) * stride + 2))


def add_conv_1d(graph: RandomGraph) -> None:
    """Add a convolution along a sequence."""
    value = graph.pick(2)
    if value is None:
        return
    outputs = int(graph.rng.integers(1, 9))
    weight = graph.weight(outputs, value.shape[0], 3)
    graph.add(graph.node("Conv", [value.name, weight], pads=[1, 1], kernel_shape=[3]), (outputs, value.shape[1]))


def add_gemm(graph: RandomGraph) -> None:
    """Add a product of a vector, with any bias that a Gemm takes."""
    value = graph.pick(1)
    if value is None:
        return
    (width,), outputs = value.shape, graph.choose(_WIDTHS)
    transposed = graph.chance(0.6)
    weight = graph.weight(outputs, width) if transposed else graph.weight(width, outputs, scale=1 / math.sqrt(width))
    attributes: dict[str, Any] = {"transB": int(transposed)} if transposed else {}
    if graph.chance(0.2):
        attributes["alpha"] = 0.5
    if graph.chance(0.2):
        attributes["beta"] = 2.0
    shape = graph.choose(((outputs,), (1, outputs), (1,), ()))
    bias = graph.choose(([], [graph.weight(*shape, scale=0.3)], [graph.weight(outputs, scale=0.3)]))
    graph.add(graph.node("Gemm", [value.name, weight, *bias], **attributes), (outputs,))


def add_matmul(graph: RandomGraph) -> None:
    """Add a product of a vector or of each row of a sequence, perhaps with a bias in front or behind."""
    value = graph.pick(graph.choose((1, 2, 2)))
    if value is None:
        return
    width, outputs = value.shape[-1], graph.choose(_WIDTHS)
    weight = graph.weight(width, outputs, scale=1 / math.sqrt(width))
    made = graph.node("MatMul", [value.name, weight])
    if graph.chance(0.5):
        summands = [made, graph.weight(outputs, scale=0.3)]
        made = graph.node("Add", summands if graph.chance(0.5) else summands[::-1])
    graph.add(made, (*value.shape[:-1], outputs))


def add_attention(graph: RandomGraph) -> None:
    """Add attention of a sequence to itself, written out: products of two activations."""
    value = graph.pick(2)
    if value is None:
        return
    turned = graph.node("Transpose", [value.name], perm=[0, 2, 1])
    scores = graph.node("MatMul", [value.name, turned])
    scaled = graph.node("Mul", [scores, graph.constant(1 / math.sqrt(value.shape[1]), np.float32)])
    shares = graph.node("Softmax", [scaled], axis=-1)
    graph.add(graph.node("MatMul", [shares, value.name]), value.shape)


def add_einsum(graph: RandomGraph) -> None:
    """Add a product that is written as an equation."""
    value = graph.pick(2)
    if value is None:
        return
    weight = graph.weight(value.shape[1], 3, scale=1 / math.sqrt(value.shape[1]))
    graph.add(graph.node("Einsum", [value.name, weight], equation="nij,jk->nik"), (value.shape[0], 3))


def add_recurrent(graph: RandomGraph) -> None:
    """Add an LSTM or a GRU along a sequence."""
    value = graph.pick(2)
    if value is None:
        return
    (steps, width), hidden = value.shape, int(graph.rng.integers(2, 5))
    operator, gates = graph.choose((("LSTM", 4), ("GRU", 3)))
    turned = graph.node("Transpose", [value.name], perm=[1, 0, 2])
    ways = graph.choose((1, 1, 2))
    direction = "bidirectional" if ways == 2 else graph.choose(("forward", "reverse"))
    inputs = [turned, graph.weight(ways, gates * hidden, width, scale=0.4)]
    inputs.append(graph.weight(ways, gates * hidden, hidden, scale=0.4))
    if graph.chance(0.5):
        inputs.append(graph.weight(ways, 2 * gates * hidden, scale=0.2))
    elif graph.chance(0.3):
        inputs += ["", ""]
    attributes = {"linear_before_reset": int(graph.chance(0.5))} if operator == "GRU" else {}
    states = int(graph.rng.integers(1, 3))
    made = graph.node(operator, inputs, states, hidden_size=hidden, direction=direction, **attributes)
    back = graph.node("Transpose", [made], perm=[2, 0, 1, 3])
    shape = graph.integers(0, steps, ways * hidden)
    graph.add(graph.node("Reshape", [back, shape]), (steps, ways * hidden))


def add_quantized_island(graph: RandomGraph) -> None:
    """Add a product that is quantized already, or a Q/DQ pair alone."""
    value = graph.pick(graph.choose((1, 2, 3)))
    if value is None:
        return
    dtype = graph.choose((np.int8, np.uint8))
    pair = [graph.constant(0.05, np.float32), graph.constant(0 if dtype is np.int8 else 128, dtype)]
    levels = graph.node("QuantizeLinear", [value.name, *pair])
    rounded = graph.node("DequantizeLinear", [levels, *pair])
    if graph.chance(0.4):
        graph.add(rounded, value.shape)
        return
    width = value.shape[-1]
    weight = graph.constant(graph.rng.integers(-100, 100, (width, 4)), np.int8)
    scale = graph.constant(np.full(4, 0.01 / math.sqrt(width)), np.float32)
    zero = graph.constant(np.zeros(4), np.int8)
    matrix = graph.node("DequantizeLinear", [weight, scale, zero], axis=1)
    graph.add(graph.node("MatMul", [rounded, matrix]), (*value.shape[:-1], 4))
