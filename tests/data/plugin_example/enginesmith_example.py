"""An engine in one file: a graph as the ONNX project's reference implementation computes it, in numpy."""

import shutil
from typing import Any, ClassVar, Self

from onnx import load
from onnx.reference import ReferenceEvaluator

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.base import Availability, BuildRequest, Device, Engine, Session
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.tensors import Array, Feeds, Signature


class OnnxReference(Engine):
    """Compute a graph operator by operator: slow and exact."""

    name: ClassVar[str] = "onnx_reference"
    title: ClassVar[str] = "ONNX reference"
    consumes: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ("onnx",)
    kinds: ClassVar[tuple[str, ...]] = ("cpu",)

    @classmethod
    def available(cls, device: Device) -> Availability:
        """Run on any CPU, and on nothing else."""
        if device.kind == "cpu":
            return Availability(ok=True)
        return Availability(ok=False, reason="it runs on the CPU only", remedy="use --device cpu")

    def build(self, request: BuildRequest) -> Effect:
        """Copy the graph and its weights: there is nothing to build."""
        graph = request.artifact
        shutil.copytree(graph.folder, request.out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("artifact.json"))
        return Effect(file=graph.path.name, summary="the same graph", signature=graph.signature)

    def load(self, artifact: Artifact, device: Device) -> Session:
        """Read the graph."""
        self.require(device)
        assert artifact.signature is not None
        return _Session(ReferenceEvaluator(load(artifact.path)), artifact.signature)

    def prime(self, artifact: Artifact, device: Device) -> None:
        """Bring in nothing: importing this module has imported all there is."""


class _Session(Session):
    """An evaluator with the outputs of its last call; closed, it has none."""

    def __init__(self, evaluator: ReferenceEvaluator, signature: Signature) -> None:
        self.signature = signature
        self._evaluator: ReferenceEvaluator | None = evaluator
        self._outputs: dict[str, Array] = {}

    def bind(self, feeds: Feeds) -> Any:
        return dict(feeds)

    def enqueue(self, bound: Any) -> None:
        evaluator = self._opened()
        self._outputs = dict(zip(evaluator.output_names, evaluator.run(None, bound), strict=True))

    def synchronize(self) -> None:
        """Wait for nothing: a call returns when it is done."""

    def fetch(self) -> dict[str, Array]:
        return dict(self._outputs)

    def sibling(self) -> Self:
        return type(self)(self._opened(), self.signature)

    def close(self) -> None:
        self._evaluator = None

    def _opened(self) -> ReferenceEvaluator:
        if self._evaluator is None:
            raise UsageError("the session is closed", "load the engine again")
        return self._evaluator
