"""Graphs and eager asked the same questions, and timed in turns: for benchmarks of precision."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from command import Answer
from numpy.typing import NDArray
from racing import Race, race

from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch.factories import Built, build

EAGER = "eager"
_ROWS = 40
"""Samples that are judged at once."""

Feeds = dict[str, NDArray[Any]]


def load(path: Path) -> tuple[Feeds, NDArray[Any]]:
    """Inputs and labels of an .npz file; of calibration data there are no labels."""
    with np.load(path) as arrays:
        feeds = {name: arrays[name] for name in arrays.files}
    return feeds, feeds.pop("labels", np.zeros(0))


@cache
def built(source: str) -> Built:
    """The network that a source names."""
    return build(resolve(source))


def exported(source: str, path: Path) -> Path:
    """The graph of a plain script: ``torch.onnx.export`` with a dynamic batch.

    Shapes that the exporter notes of values are left out: ONNX Runtime's quantisation transposes weights of Gemm, and
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
    """ONNX Runtime as a plain script opens it, on one thread; a graph that is optimised already stays as it is."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if path.with_name("engine.json").is_file():
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def answers(path: Path, feeds: Feeds) -> Feeds:
    """The first output for every sample."""
    opened, count = session(path), len(next(iter(feeds.values())))
    batches = [{name: array[row : row + _ROWS] for name, array in feeds.items()} for row in range(0, count, _ROWS)]
    return {"output": np.concatenate([opened.run(None, batch)[0] for batch in batches])}


@torch.inference_mode()
def eager_answers(source: str, feeds: Feeds) -> Feeds:
    """The same from eager."""
    batches = zip(*(torch.from_numpy(array).split(_ROWS) for array in feeds.values()), strict=True)
    found = [built(source).module(**dict(zip(feeds, batch, strict=True))) for batch in batches]
    return {"output": torch.cat(found).numpy()}


def timed(source: str, feeds: Feeds, graphs: Mapping[str, Path], seconds: float) -> Race:
    """Eager and every graph in turns."""
    module, tensors = built(source).module, {name: torch.from_numpy(row) for name, row in feeds.items()}

    def eager() -> object:
        with torch.inference_mode():
            return module(**tensors)

    def runner(path: Path) -> Any:
        opened = session(path)
        return lambda: opened.run(None, feeds)

    return race({EAGER: eager} | {name: runner(path) for name, path in graphs.items()}, seconds)


def engines(answer: Answer, run: Path, names: Mapping[str, str]) -> dict[str, Path]:
    """Name → engine of each variant that the product measured, as ONNX Runtime loads it."""
    variants = (answer.document or {}).get("variants", ())
    return {
        names[each["id"]]: run / each["artifact"]["path"]
        for each in variants
        if each["id"] in names and each["status"] == "measured"
    }


def summary(answer: Answer, names: Mapping[str, str]) -> dict[str, Any]:
    """What the product says of its own run."""
    if answer.exit_code or not answer.document:
        return {"exit_code": answer.exit_code, "failure": answer.failure, "message": answer.message}
    document = answer.document
    found: dict[str, Any] = {"winner": document["winner"], "winner_reason": document["winner_reason"]}
    for each in document["variants"]:
        if each["id"] not in names:
            continue
        kept = [part["group"] for part in each["assignment"] if part["precision"].startswith("fp")]
        ratios = [one["speedup"]["median"] for one in each["latency"] if one["speedup"]]
        found[names[each["id"]]] = {
            "status": each["status"],
            "reason": each["reason"],
            "drop": each["quality"]["drop"] if each["quality"] else None,
            "speedup": ratios[0] if ratios else None,
            "groups": len(each["assignment"]),
            "kept": kept,
            "steps": [{key: step[key] for key in ("why", "drop", "speedup", "passed")} for step in each["search"]],
            "remarks": each["remarks"],
        }
    return found
