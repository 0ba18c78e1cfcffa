"""Simplify: the same function with fewer nodes, in standard operators, so that every engine starts from a clean graph.

The work is done by passes of onnx-ir and onnxscript (constant folding, rewriting, common subexpressions), chosen
because they keep weights lazy, names and dynamic shapes intact, and metadata on the nodes. Whatever comes out is held
against what went in; if it is not provably as good, the graph is passed on as it was.
"""

import tempfile
from pathlib import Path
from typing import ClassVar

from enginesmith.pipeline import graph
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import EnginesmithError, ModelError
from enginesmith.pipeline.passes.base import Pass, Progress, Records

# What the libraries raise on graphs they were not made for.
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, NotImplementedError)


class Simplify(Pass):
    """Rewrite a graph into fewer nodes that compute the same."""

    name: ClassVar[str] = "simplify"
    consumes: ClassVar[Kind] = "onnx"
    produces: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ("onnx", "onnx-ir", "onnxscript")

    external_data_bytes: int = graph.EXTERNAL_DATA_BYTES

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Simplify, check, and keep the better of both graphs."""
        return simplify_file(artifact.path, out, self.external_data_bytes, progress)


def simplify_file(path: Path, out: Path, external_data_bytes: int, progress: Progress) -> Effect:
    """Write a simplified ``model.onnx``, or the same graph with a note that says why."""
    from enginesmith.pipeline import onnx_file

    with tempfile.TemporaryDirectory(dir=out) as scratch:
        try:
            progress("rewriting the graph")
            given, left = _rewrite(path, Path(scratch), external_data_bytes)
            if left == given:
                return graph.pass_on(path, out, "there was nothing to simplify")
            progress("checking the result")
            _hold_against(path, Path(scratch, graph.FILE))
        except (EnginesmithError, *_FAILURES) as error:
            return graph.pass_on(path, out, f"passed on unchanged: {error}")
        for file in list(Path(scratch).iterdir()):
            file.rename(out / file.name)
    return Effect(file=graph.FILE, summary=f"{given} → {left} nodes", signature=onnx_file.signature(out / graph.FILE))


def _rewrite(path: Path, out: Path, external_data_bytes: int) -> tuple[int, int]:
    """Nodes before and after; writes into ``out`` if there are fewer.

    Raises:
        ModelError: there are more.
    """
    from enginesmith.pipeline.passes.rewriting import rewrite

    model = graph.load(path)
    given = graph.node_count(model)
    rewrite(model)
    left = graph.node_count(model)
    if left > given:
        raise ModelError(f"rewriting gave {left} nodes instead of {given}")
    if left < given:
        graph.tidy(model)
        graph.save(model, out, external_data_bytes)
    return given, left


def _hold_against(before: Path, after: Path) -> None:
    """Check the result: sound, with the same signature, and numerically equal.

    Raises:
        ModelError: it is not.
    """
    from enginesmith.pipeline import onnx_file
    from enginesmith.pipeline.passes.equivalence import compare

    onnx_file.check(after)
    if onnx_file.signature(before) != onnx_file.signature(after):
        raise ModelError("the signature changed")
    compare(before, after)
