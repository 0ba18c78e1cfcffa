"""A run that nobody had to make, to be packaged; tests say which of the fixtures they use.

``made, no_script = packaged_runs.made, packaged_runs.no_script`` in a file of tests gives its tests both fixtures.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from enginesmith.pipeline.artifact import file_digest, folder_digest
from enginesmith.pipeline.engines.base import MemoryFigures
from enginesmith.pipeline.engines.tensorrt.manifest import EngineManifest, path_beside
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.package import manifest
from enginesmith.pipeline.results.package import package as bundle
from enginesmith.pipeline.results.package.package import package
from enginesmith.pipeline.results.run import ModelRecord, Run, StepRecord, StoredArtifact, VariantRecord
from enginesmith.pipeline.tensors import Signature, TensorSpec

SIGNATURE = Signature(inputs=(TensorSpec.parse("x:float32:batch,4"),), outputs=(TensorSpec.parse("y:float32:batch,4"),))
ENTRY = {"tools": {"onnxruntime": "1.0"}, "seconds": 1, "host_peak_bytes": None, "effect": "made"}
BUILT = {"step": "build", "parameters": {"fields": {"engine": {"graph_optimization": "all"}}}, **ENTRY}


def stored(folder: Path, path: Path) -> StoredArtifact:
    digests = {one.name: file_digest(one) for one in path.parent.iterdir()}
    size = sum(one.stat().st_size for one in path.parent.iterdir())
    return StoredArtifact(path=str(path.relative_to(folder)), sha256=folder_digest(digests), bytes=size)


def row(batch: int, rate: float | None) -> dict[str, Any]:
    return {"batch": batch, "n": 9, "p50_ms": 1.0, "throughput_per_s": rate}


class ExampleRun:
    """A run directory with a portable graph, an engine of TensorRT-RTX, and the module itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        graph = folder / "graphs/simplify/model.onnx"
        graph.parent.mkdir(parents=True)
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
        weight = helper.make_tensor("w", TensorProto.FLOAT, [4], np.arange(4.0))
        node = helper.make_node("Mul", ["x", "w"], ["y"])
        made = helper.make_graph([node], "tiny", values[:1], values[1:], [weight])
        onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), graph)
        x = np.ones((1, 4), np.float32)
        np.savez(folder / "test_vector.npz", **{"input:x": x, "output:y": x * np.arange(4, dtype=np.float32)})
        vector = folder / "test_vector.npz"
        self.vector = StoredArtifact(path=vector.name, sha256=file_digest(vector), bytes=vector.stat().st_size)
        self.graph = stored(folder, graph)
        self.variants = [self.record("onnxruntime-fp32", graph=self.graph, artifact=self.graph)]
        self.changes: dict[str, Any] = {"winner": "onnxruntime-fp32"}

    def record(self, name: str, **fields: Any) -> VariantRecord:
        engine, _, precision = name.partition("-")
        values = {"id": name, "engine": engine, "precision": precision or "fp32", "status": "measured"}
        values |= {"test_vector": self.vector, "history": (BUILT,), "latency": (row(1, 10), row(8, 40))}
        return VariantRecord.model_validate(values | fields)

    def engine(self, flavour: str) -> VariantRecord:
        path = self.folder / f"variants/{flavour}/model.engine"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"engine")
        made = EngineManifest.model_validate(
            {
                "engine": flavour,
                "version": "10.14.1",
                "target": None,
                "compute_capabilities": ("sm86",),
                "sha256": file_digest(path),
                "bytes": 6,
                "model_sha256": "1",
                "options": BuildOptions(),
                "workspace_limit_bytes": 1,
                "workspace_asked_bytes": None,
                "signature": SIGNATURE,
                "audit": None,
                "profiles": ({"x": ((1, 4), (1, 4), (8, 4))},),
                "figures": MemoryFigures(),
            }
        )
        path_beside(path).write_text(made.model_dump_json())
        built = {**BUILT, "parameters": {"fields": {"engine": {}}}}
        return self.record(f"{flavour}-fp16", artifact=stored(self.folder, path), history=(built,))

    def write(self, **changes: Any) -> Path:
        values: dict[str, Any] = {
            "name": "demo",
            "created": "2026-01-01",
            "seconds": 1,
            "complete": True,
            "pareto": (),
            "verdicts": (),
            "recipe": make({"model": "net.py:build"}),
            "environment": {"processor": "a CPU"},
            "model": ModelRecord(source="net.py:build", signature=SIGNATURE, data="set", shapes={"batch": "1:8:8"}),
            "steps": (StepRecord(id="reference", status="done", cached=False, seconds=1, effect="2 sets of feeds"),),
            "baseline": self.record("eager", test_vector=None),
            "variants": tuple(self.variants),
        }
        runs.write(Run.model_validate(values | self.changes | changes), self.folder)
        return self.folder


@pytest.fixture
def with_script() -> None:
    """Packages run their script when they are written, as they do for users."""


@pytest.fixture(autouse=True)
def no_script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are written without running their script, which takes half a second, except ``with_script``."""
    if "with_script" not in request.fixturenames:
        monkeypatch.setattr(bundle, "run_script", lambda folder, kept: "not run")


@pytest.fixture
def made(tmp_path: Path) -> ExampleRun:
    """A run that a test may change before it is written."""
    return ExampleRun(tmp_path / "run")


@pytest.fixture
def found(made: ExampleRun, tmp_path: Path) -> manifest.Manifest:
    """Read what the bundle of that run says, in ``b``."""
    package(made.write(), "bundle", tmp_path / "b")
    return manifest.read(tmp_path / "b")
