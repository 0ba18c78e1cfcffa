"""Graphs that tests of OpenVINO build, and what builds them."""

from pathlib import Path

import numpy as np
import onnx_ir as ir

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.openvino.engine import OpenVINO
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.system.device import Device
from graphs import parse_graph

CPU = Device(threads=1)
RESIDUAL = """net (float[n, 3, 16, 16] x) => (float[n, 5] y) {
    c0 = Conv <strides = [2, 2]> (x, w0)
    r0 = Relu(c0)
    c1 = Conv <pads = [1, 1, 1, 1]> (r0, w1)
    r1 = Clip(c1, zero, six)
    c2 = Conv <pads = [1, 1, 1, 1], group = 8> (r1, w2)
    s = Conv (r0, w3)
    a = Add(c2, s)
    r2 = Relu(a)
    g = GlobalAveragePool(r2)
    f = Flatten(g)
    y = Gemm <transB = 1> (f, w4, b4)
}"""
MATRIX = """net (float[n, 64] x) => (float[n, 64] y) { y = MatMul(x, w) }"""
RNG = np.random.default_rng(0)
SHAPES = {"w0": (8, 3, 3, 3), "w1": (8, 8, 3, 3), "w2": (8, 1, 3, 3), "w3": (8, 8, 1, 1), "w4": (5, 8), "b4": (5,)}
WEIGHTS = {name: RNG.standard_normal(shape, np.float32) / 3 for name, shape in SHAPES.items()}
FEEDS = {"x": RNG.standard_normal((4, 3, 16, 16), np.float32)}
WEIGHT = np.random.default_rng(0).standard_normal((64, 64), np.float32)


def build(model: ir.Model, folder: Path, engine: OpenVINO | None = None) -> tuple[Artifact, tuple[str, ...]]:
    for index, node in enumerate(model.graph):
        node.name = node.name or f"{node.op_type}_{index}"
    (folder / "engine").mkdir()
    ir.save(model, folder / "model.onnx")
    signature = model_file.signature(folder / "model.onnx")
    given = Artifact(kind="onnx", path=folder / "model.onnx", sha256="", bytes=0, signature=signature)
    effect = (engine or OpenVINO()).build(BuildRequest(given, folder / "engine", CPU))
    path = folder / "engine" / effect.file
    return Artifact(kind="engine", path=path, sha256="", bytes=0, signature=signature), effect.notes


def residual() -> ir.Model:
    return parse_graph(RESIDUAL, zero=np.float32(0), six=np.float32(6), **WEIGHTS)
