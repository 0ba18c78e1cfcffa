"""Graphs with zeros, and what tests of them read."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from enginesmith.pipeline.artifact import Artifact, Effect, file_digest
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.passes.sparsify.sparsify import Sparsify
from graphs import Weights


def artifact(path: Path) -> Artifact:
    sha = file_digest(path)
    return Artifact(kind="onnx", path=path, sha256=sha, bytes=0, signature=model_file.signature(path))


def sparsified(path: Path, folder: Path, **fields: Any) -> tuple[Path, Effect]:
    folder.mkdir(parents=True, exist_ok=True)
    effect = run_pass(Sparsify(**fields), artifact(path), folder, lambda _: None)
    return folder / effect.file, effect


def arrays(path: Path) -> Weights:
    return {one.name: numpy_helper.to_array(one, str(path.parent)) for one in onnx.load(path).graph.initializer}


def eligible(weight: Any) -> bool:
    """TensorRT's test, as its developer guide has it, for a weight of K × C × places in the kernel."""
    rows, length = weight.reshape(*weight.shape[:2], -1), weight.shape[1]
    assert length % 4 == 0
    return all(
        np.count_nonzero(rows[k, c : c + 4, place]) <= 2
        for k in range(rows.shape[0])
        for c in range(0, length, 4)
        for place in range(rows.shape[2])
    )
