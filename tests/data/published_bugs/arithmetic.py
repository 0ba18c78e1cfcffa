"""Arithmetic in few bits: saturation, and zero points that are not read."""

import numpy as np
from onnx import numpy_helper

from published_bugs.case import Graphs, graph, known_bug


@known_bug(
    "microsoft/onnxruntime#19109",
    "products of uint8 by int8 are added in saturating 16 bits on processors before VNNI",
    "onnxruntime",
    "1.16",
    guard="pipeline/system/cpu.py",
)
def saturating_products() -> Graphs:
    bounds = "float low = {-32768.0}, float high = {32767.0}"
    head = f"(float[N,2] x) => (float[N,1] y) <float scale = {{0.01}}, uint8 zero = {{128}}, {bounds}>"
    weight = numpy_helper.from_array(np.array([[127.0], [127.0]], np.float32), "w")
    levels = "{ q = QuantizeLinear(x, scale, zero) f = Cast<to=1>(q) p = MatMul(f, w)"
    return Graphs(
        graph(f"{head} {levels} y = Mul(p, scale) }}", 18, weight),
        graph(f"{head} {levels} c = Clip(p, low, high) y = Mul(c, scale) }}", 18, weight),
    )


@known_bug(
    "docs/tensorrt.md",
    "TensorRT reads uint8 quantization as int8, so numbers above the middle of the range turn negative",
    "tensorrt",
    "RTX 1.7",
    guard="pipeline/engines/tensorrt/parser.py",
)
def unsigned_as_signed() -> Graphs:
    head = "(float[N,6] x) => (float[N,6] y) <float scale = {0.012}, uint8 zero = {0}, int8 none = {0}>"
    start = "{ r = Relu(x) q = QuantizeLinear(r, scale, zero)"
    return Graphs(
        graph(f"{head} {start} y = DequantizeLinear(q, scale, zero) }}"),
        graph(f"{head} {start} s = Cast<to=3>(q) y = DequantizeLinear(s, scale, none) }}"),
    )
