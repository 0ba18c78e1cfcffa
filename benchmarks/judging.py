"""Networks and graphs as a plain script builds, exports and opens them: for benchmarks that compare with one."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from command import Answer
from numpy.typing import NDArray

from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch.factories import Built, build

Feeds = dict[str, NDArray[Any]]


@cache
def built(source: str) -> Built:
    """The network that a source names."""
    return build(resolve(source))


def exported(source: str, path: Path) -> Path:
    """The graph of a plain script: ``torch.onnx.export`` with a dynamic batch.

    Shapes that the exporter notes of values are left out: ONNX Runtime's quantization transposes weights of Gemm, and
    then refuses the shapes noted before.
    """
    if not path.is_file():
        example = dict(built(source).example)
        shapes = {name: {0: torch.export.Dim.DYNAMIC} for name in example}
        torch.onnx.export(
            built(source).module, (), path, kwargs=example, dynamic_shapes=shapes, dynamo=True, external_data=False
        )
        model = onnx.load(path)
        del model.graph.value_info[:]
        onnx.save(model, path)
    return path


@cache
def session(path: Path) -> onnxruntime.InferenceSession:
    """ONNX Runtime as a plain script opens it, on one thread; a graph that is optimized already stays as it is."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if path.with_name("engine.json").is_file():
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def engines(answer: Answer, run: Path, names: Mapping[str, str]) -> dict[str, Path]:
    """Name → engine of each variant that the product measured, as ONNX Runtime loads it."""
    variants = (answer.document or {}).get("variants", ())
    return {
        names[each["id"]]: run / each["artifact"]["path"]
        for each in variants
        if each["id"] in names and each["status"] == "measured"
    }
