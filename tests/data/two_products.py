"""A graph of two products, with all that the search for their precision reads: ranges, a reference, and records."""

import json
import re
from pathlib import Path

import numpy as np
import onnx_ir as ir

from enginesmith.calibration.ranges import METHODS, ChannelStatistics, Ranges, TensorRange
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.samples import Case, Samples
from enginesmith.pipeline.passes.quantize.search import GroupFact
from enginesmith.pipeline.tasks.graph_forms import MODEL, RANGES, REFERENCE, SENSITIVITY
from enginesmith.pipeline.tensors import ShapeRange
from graphs import NOWHERE, parse_graph, run_model

NET = """net (float[batch, 8] x) => (float[batch, 6] y) {
    m = MatMul(x, w)
    b = MatMul(x, v)
    s = Mul(b, tiny)
    y = Add(m, s)
}"""
"""The answer is what the first product makes; hardly anything of the second one's reaches it."""
RNG = np.random.default_rng(0)
SHAPES = {"w": (8, 6), "v": (8, 6), "q": (6, 6), "u": (6,), "t": (6,)}
WEIGHTS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
WEIGHTS["far"] = np.array(2000, np.float32)
WEIGHTS["tiny"] = np.array(1e-3, np.float32)
WEIGHTS["units"] = np.repeat(np.float32([1e4, 1]), [1, 5])
WEIGHTS["heads"] = np.float32([[1, 0], *[[0, number] for number in (0.5, -0.3, 0.4, 0.2, -0.6)]])
X = 1 + RNG.standard_normal((8, 8), np.float32)


def facts(*groups: tuple[str, float, int]) -> list[GroupFact]:
    return [GroupFact(name=name, module="", kind="MatMul", macs=macs, sqnr_db=db) for name, db, macs in groups]


MISLEADING = facts(("first", 30.0, 100), ("second", 10.0, 100))
"""The second loses much in its own output."""


def prepare(folder: Path, net: str = NET) -> dict[str, Artifact]:
    def make() -> ir.Model:
        used = {name: value for name, value in WEIGHTS.items() if re.search(rf"\b{name}\b[,)]", net)}
        model = parse_graph(net, **used)
        products = [node for node in model.graph if node.op_type in ("MatMul", "Gemm")]
        for node, name in zip(products, ("first", "second"), strict=bool(products)):
            node.name = name
        return model

    path = folder / "model.onnx"
    ir.save(make(), path)
    values = {"x": X, **run_model(make(), {"x": X}, optimized=False, every_value=True)}
    tensors = {
        name: TensorRange(minimum=low, maximum=high, count=1, amax=dict.fromkeys(METHODS, max(-low, high)))
        for name, low, high in ((name, float(value.min()), float(value.max())) for name, value in values.items())
    }
    means = {
        name: ChannelStatistics(
            axis=-1,
            mean=value.mean(axis=0).tolist(),
            middle=((value.min(axis=0) + value.max(axis=0)) / 2).tolist(),
            amax=np.abs(value).max(axis=0).tolist(),
            mean_square=np.square(value).mean(axis=0).tolist(),
            mean_absolute=np.abs(value).mean(axis=0).tolist(),
        )
        for name, value in values.items()
        if value.shape in ((8, 6), (8, 8))
    }
    ranges = Ranges(model_sha256="m", provenance=NOWHERE, tensors=tensors, channels=means)
    (folder / "ranges.json").write_text(ranges.model_dump_json())
    (folder / "records.json").write_text(json.dumps([fact.model_dump() for fact in MISLEADING]))
    for index, rows in enumerate((1, 8)):
        samples.write_arrays(folder, "feeds", index, {"x": X[:rows]})
        samples.write_arrays(folder, "outputs", index, {"y": values["y"][:rows]})
    cases = tuple(Case(sizes={"batch": rows}, batch=rows) for rows in (1, 8))
    samples.write(folder, Samples(data="x", ranges={"batch": ShapeRange.parse("1:1:8")}, cases=cases))

    def record(name: str) -> Artifact:
        return Artifact(kind="record", path=folder / name, sha256="", bytes=0)

    return {
        MODEL: Artifact(kind="onnx", path=path, sha256="m", bytes=0, signature=model_file.signature(path)),
        RANGES: record("ranges.json"),
        SENSITIVITY: record("records.json"),
        REFERENCE: Artifact(kind="reference", path=folder / samples.RECORD, sha256="", bytes=0),
    }
