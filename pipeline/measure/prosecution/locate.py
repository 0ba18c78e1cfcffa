"""Find the stage that made an answer wrong, and reduce its graph to the nodes that show it."""

import contextlib
import importlib.metadata
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline.engines import simulation
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.engines.options import AddedOption
from enginesmith.pipeline.errors import EnginesmithError, ModelError
from enginesmith.pipeline.measure.prosecution import reduction
from enginesmith.pipeline.measure.prosecution.evidence import Finding, write_evidence
from enginesmith.pipeline.measure.prosecution.judging import EXACT, OWN_GRAPH
from enginesmith.pipeline.measure.prosecution.mending import find_option
from enginesmith.pipeline.measure.prosecution.search import GRAPH, Disagreement
from enginesmith.pipeline.measure.prosecution.stages import Reduced, Stages, differ, is_wrong
from enginesmith.pipeline.tensors import Feeds

if TYPE_CHECKING:
    import onnx

_NONE_FOUND = "no part of the graph alone shows it"


def locate_fault(known: Stages, shown: Disagreement, folder: Path) -> Finding:
    """Name the guilty stage, reduce its graph, look for an option that mends it, and write the evidence."""
    at = find_guilty_stage(known, shown)
    stage = known.stages[at]
    reduced: Reduced | None = None
    reason = ""
    is_engine = at == len(known.stages) - 1
    with contextlib.suppress(StopIteration):
        stage_graph = next(each.graph for each in reversed(known.stages[: at + 1]) if each.graph)
        try:
            reduced = _reduce_engine(known, stage_graph, shown) if is_engine else _reduce_graph(known, at, shown)
            reason = "" if reduced else _NONE_FOUND
        except EnginesmithError as error:
            reason = error.message
    option: AddedOption | None = None
    with contextlib.suppress(EnginesmithError):
        option = find_option(known, at, shown, reduced)
    finding = Finding(
        walk=shown.walk,
        note=shown.note,
        reason=shown.reason,
        witness=shown.witness,
        attempts=shown.attempts,
        guilty=stage.name,
        nodes=reduced.nodes if reduced else (),
        whole=reduced.whole if reduced else None,
        workaround=option.words if option else "",
        option=option,
        versions=_list_versions(known.engine),
        unreduced=reason,
    )
    model = (
        reduced.model.SerializeToString()
        if reduced
        else _whole(stage.graph or next((each.graph for each in reversed(known.stages) if each.graph), None))
    )
    script = known.engine.reproduce() if is_engine else simulation().reproduce()
    feeds, expected = (reduced.feeds, reduced.expected) if reduced else (shown.feeds, shown.expected)
    write_evidence(folder, finding, model, feeds, expected, script)
    return finding


def find_guilty_stage(known: Stages, shown: Disagreement) -> int:
    """Return the position of the first stage that answers otherwise than the one before it; else the engine's."""
    last = len(known.stages) - 1
    if shown.witness != GRAPH:
        before = known.stages[0]
        wanted = before.answer(shown.feeds)
        for at, stage in enumerate(known.stages[1:], 1):
            try:
                given = stage.answer(shown.feeds)
            except EnginesmithError:
                return at
            if differ(stage.precision, before, wanted, given, shown.feeds):
                return at
            before, wanted = stage, given
    return last


def _whole(graph: Path | None) -> bytes | None:
    try:
        return reduction.read_whole(graph).SerializeToString() if graph else None
    except EnginesmithError:
        return None


# What the engine makes of a graph


def _reduce_engine(known: Stages, graph: Path, shown: Disagreement) -> Reduced | None:
    """Reduce the graph that the engine was built from to nodes that the engine gets wrong.

    Raises:
        ModelError: the graph cannot be computed without optimisation.
    """
    model = reduction.read_whole(graph)
    values = reduction.record_values(model, shown.feeds)
    precision = "fp32" if known.stages[-1].precision in EXACT else OWN_GRAPH
    with tempfile.TemporaryDirectory(prefix="enginesmith-reduce-") as scratch:
        places = (Path(scratch, str(number)) for number in itertools.count())

        def fails(kept: Sequence[int]) -> bool:
            try:
                part, feeds = reduction.take_nodes(model, kept, values)
                return bool(is_wrong(known.engine, part, feeds, precision, known.device, next(places)))
            except ModelError:
                return False

        everything = list(range(len(model.graph.node)))
        if not fails(everything):
            return None
        kept = reduction.shrink(len(everything), fails, known.seconds)
    part, feeds = reduction.take_nodes(model, kept, values)
    expected = reduction.compute(part, feeds)
    return Reduced(part, feeds, expected, _name_nodes(model, kept), len(everything))


# What a graph is, beside the one that it was made from


def _reduce_graph(known: Stages, at: int, shown: Disagreement) -> Reduced | None:
    """Find the first nodes of a stage's graph that give wrong values.

    Raises:
        ModelError: a graph cannot be computed without optimisation.
    """
    stage, before = known.stages[at], known.stages[at - 1]
    assert stage.graph is not None
    truth_graph = before.graph or known.truth
    if truth_graph is None:
        raise ModelError("there is no other graph of the model to compare its values with")
    truth_model, model = (reduction.read_whole(path) for path in (truth_graph, stage.graph))
    truth = reduction.record_values(truth_model, shown.feeds)
    wanted = before.answer(shown.feeds)
    if before.graph is None and any(
        not reduction.are_equal(truth[name], wanted[name]) for name in wanted if name in truth
    ):
        raise ModelError("no graph of the model answers as the model does")
    values = reduction.record_values(model, shown.feeds)
    outputs = [value.name for value in model.graph.output]
    wrong = [name for name in outputs if name in wanted and not reduction.are_equal(values[name], wanted[name])]
    first = reduction.find_wrong_nodes(model, values, truth, wrong)
    if not first:
        return None
    return _with_known_answer(model, first, values, truth) or _up_to_outputs(model, first, values, wanted, wrong)


def _with_known_answer(model: "onnx.ModelProto", first: Sequence[int], values: Feeds, truth: Feeds) -> Reduced | None:
    """Take the nodes alone whose right answers are known by their names."""
    kept = [
        at
        for at in first
        if all(name in truth and truth[name].shape is not None for name in model.graph.node[at].output if name)
    ]
    if not kept:
        return None
    part, feeds = reduction.take_nodes(model, kept[:1], values)
    expected = {value.name: truth[value.name] for value in part.graph.output}
    if all(reduction.are_equal(values[name], right) for name, right in expected.items()):
        return None
    return Reduced(part, feeds, expected, _name_nodes(model, kept[:1]), len(model.graph.node))


def _up_to_outputs(
    model: "onnx.ModelProto", first: Sequence[int], values: Feeds, wanted: Feeds, wrong: Sequence[str]
) -> Reduced:
    """Take all nodes from the first wrong ones to the wrong outputs, whose right answers are known."""
    kept = reduction.slice_between(model, first, wrong)
    part, feeds = reduction.take_nodes(model, kept, values)
    expected = {name: wanted[name] for name in wrong}
    named = _name_nodes(model, [*first, *(at for at in kept if at not in set(first))])  # the first wrong ones first
    return Reduced(part, feeds, expected, named, len(model.graph.node))


def _name_nodes(model: "onnx.ModelProto", kept: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{node.op_type} {node.name}".strip() for node in (model.graph.node[at] for at in kept))


def _list_versions(engine: Engine) -> dict[str, str]:
    versions = {}
    for name in ("onnx", "torch", *engine.tools):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
