"""Promises of passes, checked when they have run: whose fault it is if one is broken."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.errors import InvalidGraph
from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.passes.base import Progress, Records
from enginesmith.pipeline.passes.graph_pass import GraphPass
from enginesmith.pipeline.passes.run import run_pass
from graphs import parse_graph


class Contradicting(GraphPass):
    """Rewrites the weight to a shape that the product does not take."""

    name: ClassVar[str] = "contradicting"
    tools: ClassVar[tuple[str, ...]] = ()

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        model = edit.load(artifact.path)
        edit.write([(model.graph[0], 1)], np.ones((8, 1), np.float32))
        return self.save(model, out, "rewritten")


def test_an_invalid_graph_of_a_pass_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    model = parse_graph("(float[N,4] x) => (float[N,2] y) { y = MatMul(x, w) }", 20, w=np.ones((4, 2), np.float32))
    edit.save(model, tmp_path)
    artifact = Artifact(kind="onnx", path=tmp_path / edit.FILE, sha256="", bytes=0)
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidGraph, match="in the graph that the pass 'contradicting' wrote contradict") as caught:
        run_pass(Contradicting(), artifact, tmp_path / "out", print)
    assert str(tmp_path) not in str(caught.value)
    assert caught.value.remedy == "this is a fault of the pass, not of the model"
