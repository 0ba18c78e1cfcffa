"""Find the stage that made an answer wrong, and reduce its graph to the nodes that show it."""

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.engines import baseline, simulation
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.errors import EnginesmithError, ModelError
from enginesmith.pipeline.frameworks.onnx import model_file, reference
from enginesmith.pipeline.measure.prosecution import reduction
from enginesmith.pipeline.measure.prosecution.evidence import Evidence
from enginesmith.pipeline.measure.prosecution.finding import Finding
from enginesmith.pipeline.measure.prosecution.issue import write_evidence
from enginesmith.pipeline.measure.prosecution.judging import find_tolerance
from enginesmith.pipeline.measure.prosecution.mending import find_option
from enginesmith.pipeline.measure.prosecution.search import ALONE, GRAPH, MODEL, Disagreement
from enginesmith.pipeline.measure.prosecution.stages import Reduced, Stage, Stages, differ, is_wrong, open_engine
from enginesmith.pipeline.system import software
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.machine import environment
from enginesmith.pipeline.tensors import Array, Feeds
from enginesmith.pipeline.units import AddedOption

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
    script = known.engine.reproduce(known.device) if is_engine else simulation().reproduce(Device())
    if reduced:
        evidence = Evidence(
            reduced.model, reduced.feeds, reduced.expected, reduced.found, script, tolerance=reduced.tolerance
        )
    else:
        precision = stage.precision if shown.witness == MODEL else known.own_precision
        answers = shown.found if is_engine else _answer(stage, shown.feeds)
        last = next((each.graph for each in reversed(known.stages) if each.graph), None)
        model, tolerance = _read_whole(stage.graph or last), find_tolerance(precision)
        evidence = Evidence(model, shown.feeds, shown.expected, answers, script, tolerance)
    answered_by = reduced.reference if reduced else _describe_reference(known, shown)
    if not is_engine and (whole := _read_whole(stage.graph)):
        answered_by += describe_unasked(whole)
    finding = Finding(
        walk=shown.walk,
        note=shown.note,
        reason=shown.reason,
        ties=find_ties(evidence),
        witness=shown.witness,
        attempts=shown.attempts,
        guilty=stage.name,
        nodes=reduced.nodes if reduced else (),
        whole=reduced.whole if reduced else None,
        workaround=option.words if option else "",
        option=option,
        software=_name_software(known, at),
        reference=answered_by,
        right_on=shown.right_on,
        elsewhere=_try_other_numbers(known, reduced) if is_engine and reduced else {},
        versions=_list_versions(known, at),
        unreduced=reason,
    )
    write_evidence(folder, finding, evidence)
    return finding


def _answer(stage: Stage, feeds: Feeds) -> dict[str, Array] | None:
    try:
        return stage.answer(feeds)
    except EnginesmithError:
        return None


def _read_whole(graph: Path | None) -> "onnx.ModelProto | None":
    try:
        return reduction.read_whole(graph) if graph else None
    except EnginesmithError:
        return None


def describe_unasked(model: "onnx.ModelProto") -> str:
    """Say why onnx's own evaluator did not judge a graph; empty where it can."""
    doubtful = reference.find_distrusted(model)
    return f" (onnx's own evaluator was not asked, as it does not compute {doubtful} right)" if doubtful else ""


def find_guilty_stage(known: Stages, shown: Disagreement) -> int:
    """Return the position of the first stage that answers otherwise than the one before it; else the engine's.

    A graph is computed by ONNX Runtime, which may be what is wrong: so it is right if onnx's own evaluator says so,
    where that can be trusted.
    """
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
                by_definition = stage.compute_by_reference(shown.feeds) if at < last else {}
                if not by_definition or differ(stage.precision, before, wanted, by_definition, shown.feeds):
                    return at
                given = by_definition
            before, wanted = stage, given
    return last


# What the engine makes of a graph


def _reduce_engine(known: Stages, graph: Path, shown: Disagreement) -> Reduced | None:
    """Reduce the graph that the engine was built from to nodes that the engine gets wrong.

    Raises:
        ModelError: the graph cannot be computed without optimization.
    """
    model, precision = reduction.read_whole(graph), known.own_precision
    compute = reduction.choose_compute(model, shown.feeds, find_tolerance(precision))
    values = reduction.record_values(model, shown.feeds, compute)
    with tempfile.TemporaryDirectory(prefix="enginesmith-reduce-") as scratch:
        places = (Path(scratch, str(number)) for number in itertools.count())

        def fails(nodes: Sequence[int]) -> bool:
            try:
                part, feeds = reduction.take_nodes(model, nodes, values)
                return bool(is_wrong(known.engine, part, feeds, precision, known.device, next(places), compute))
            except ModelError:
                return False

        everything = list(range(len(model.graph.node)))
        if not fails(everything):
            return None
        nodes = reduction.shrink(len(everything), fails, known.seconds)
        part, feeds = reduction.take_nodes(model, nodes, values)
        with open_engine(known.engine, part, known.device, next(places)) as answer:
            answers = answer(feeds)
    by_runtime = compute is reduction.compute
    computer = f"the evaluator of onnx {software.version('onnx')}"
    if by_runtime:
        computer = describe_software(simulation()) + describe_unasked(model)
    return Reduced(
        model=part,
        feeds=feeds,
        expected=compute(part, feeds),
        found=answers,
        reference=f"the same graph, computed by {computer}",
        compute=compute,
        tolerance=find_tolerance(precision),
        nodes=_name_nodes(model, nodes),
        whole=len(everything),
    )


# What a graph is, beside the one that it was made from


def _reduce_graph(known: Stages, at: int, shown: Disagreement) -> Reduced | None:
    """Find the first nodes of a stage's graph that give wrong values.

    Raises:
        ModelError: a graph cannot be computed without optimization.
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
    tolerance = find_tolerance(stage.precision)
    answered = {name: value for name, value in wanted.items() if name in values}
    wrong = reduction.find_wrong_part(model, values, truth, answered, tolerance=tolerance, seconds=known.seconds)
    if wrong is None:
        return None
    part, feeds = reduction.take_nodes(model, wrong.nodes, values)
    expected, answered_by = answered.get(wrong.value), before.software
    if expected is None:
        computed = f"computed by {describe_software(simulation())}"
        expected, answered_by = truth[wrong.value], f"the same value of another graph of the model, {computed}"
    return Reduced(
        model=part,
        feeds=feeds,
        expected={wrong.value: expected},
        found={wrong.value: values[wrong.value]},
        reference=answered_by,
        tolerance=tolerance,
        nodes=_name_nodes(model, wrong.suspects),
        whole=len(model.graph.node),
    )


def _name_nodes(model: "onnx.ModelProto", nodes: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{node.op_type} {node.name}".strip() for node in (model.graph.node[at] for at in nodes))


# What a report says beside the nodes

_NUMBERS: Mapping[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "standard normal numbers": lambda rng, shape: rng.standard_normal(shape),
    "zeros": lambda rng, shape: np.zeros(shape),
    "ones": lambda rng, shape: np.ones(shape),
}


def _try_other_numbers(known: Stages, reduced: Reduced) -> dict[str, bool]:
    """Tell for other numbers in place of the reduced graph's floats whether the engine is wrong on them, too."""
    wrong = dict[str, bool]()
    if not any(value.dtype.kind == "f" for value in reduced.feeds.values()):
        return wrong
    with tempfile.TemporaryDirectory(prefix="enginesmith-reduce-") as scratch:
        for name, draw in _NUMBERS.items():
            rng, feeds = np.random.default_rng(0), dict(reduced.feeds)
            for key, value in reduced.feeds.items():
                feeds[key] = draw(rng, value.shape).astype(value.dtype) if value.dtype.kind == "f" else value
            with contextlib.suppress(EnginesmithError):
                place, precision = Path(scratch, name), known.own_precision
                wrong[name] = bool(
                    is_wrong(known.engine, reduced.model, feeds, precision, known.device, place, reduced.compute)
                )
    return wrong


_CHOICES = {"TopK": 1, "ArgMax": 0, "ArgMin": 0}
"""Operators that answer the places of numbers which they choose, and the output that has them."""


def find_ties(evidence: Evidence) -> str:
    """Say that answers differ in nothing but which of exactly equal numbers an operator chooses; empty otherwise."""
    model, expected, given = evidence.model, evidence.expected, evidence.found or {}
    answers = {name: np.asarray(value) for name, value in given.items()}
    if model is None or not answers.keys() >= expected.keys():
        return ""
    names = [name for name in expected if not reduction.are_equal(answers[name], expected[name], evidence.tolerance)]
    choices = {name: node for name in names if (node := _find_choice(model, name)) is not None}
    if len(choices) < len(names) or not names:
        return ""
    try:
        values = reduction.record_values(model, evidence.feeds)
    except EnginesmithError:
        return ""
    for name, node in choices.items():
        data = values.get(node.input[0])
        if data is None or not _are_tied(node, data, expected[name], answers[name]):
            return ""
    operators = " and ".join(dict.fromkeys(node.op_type for node in choices.values()))
    return f"{operators} chose others among exactly equal numbers, of which ONNX takes the first"


def _find_choice(model: "onnx.ModelProto", name: str) -> "onnx.NodeProto | None":
    """Find the node that chose the places which a value of the main graph holds."""
    makers = {output: (node, at) for node in model.graph.node for at, output in enumerate(node.output)}
    while name in makers:
        node, at = makers[name]
        if node.op_type not in ("Identity", "Cast"):
            return node if _CHOICES.get(node.op_type) == at else None
        name = node.input[0]
    return None


def _are_tied(node: "onnx.NodeProto", data: Array, wanted: Array, given: Array) -> bool:
    """Tell whether both sides chose numbers of the same values, none of them twice, and the given side later ones.

    Where the other side does not take the first of equal numbers, as ONNX does, the given one may be right.
    """
    from onnx import helper

    if wanted.shape != given.shape:
        return False
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    axis = attributes.get("axis", -1 if node.op_type == "TopK" else 0)
    places = [side.astype(np.int64) for side in (wanted, given)]
    if node.op_type != "TopK" and not attributes.get("keepdims", 1):
        places = [np.expand_dims(side, axis) for side in places]
    in_range = all(((side >= 0) & (side < data.shape[axis])).all() for side in places)
    if not in_range or attributes.get("select_last_index", 0):
        return False
    ours, theirs = (np.take_along_axis(data, side, axis) for side in places)
    distinct = np.diff(np.sort(places[1], axis), axis=axis).all()
    differing = wanted != given
    return bool(np.array_equal(ours, theirs) and distinct and (wanted < given)[differing][0])


def describe_software(engine: Engine) -> str:
    """Name an engine with its version: ``OpenVINO 2026.1.0``."""
    version = next(iter(software.versions(engine.tools).values()), "")
    plain = " without optimization" if engine in (baseline("onnx").exact(), simulation()) else ""
    return f"{engine.title} {version}".strip() + plain


def _name_software(known: Stages, at: int) -> str:
    """Name what made the answer wrong."""
    stage = known.stages[at]
    if at == len(known.stages) - 1:
        return describe_software(known.engine)
    if stage.name.startswith("export"):
        return f"torch.onnx.export of PyTorch {software.version('torch')}"
    if stage.name != "graph":
        return f"enginesmith {software.version('enginesmith')}, step {stage.name}"
    with contextlib.suppress(EnginesmithError):
        if stage.graph and (producer := model_file.summary(stage.graph).producer):
            return f"the ONNX file, which {producer} made"
    return "the ONNX file"


def _describe_reference(known: Stages, shown: Disagreement) -> str:
    if shown.witness == ALONE:
        return "the same engine, asked for one sample of the batch alone"
    if shown.witness == GRAPH:
        return f"the engine's own graph, computed by {describe_software(simulation())}"
    return known.stages[0].software


def _list_versions(known: Stages, at: int) -> dict[str, str]:
    """List what may matter for a fault of this stage: what made the graph does not, where an engine gets it wrong."""
    exporters = ("torch", "onnxscript") if at < len(known.stages) - 1 else ()
    names = dict.fromkeys((*known.engine.tools, *simulation().tools, *exporters, "onnx", "numpy"))
    here = environment((*names, "enginesmith"))
    system = {"operating system": f"{here.system}, kernel {here.kernel}", "Python": here.python}
    processor = {"processor": f"{here.processor} ({here.architecture}; {', '.join(here.vector_units)})"}
    gpus = {"GPU": ", ".join(gpu.name for gpu in here.gpus or ())} if known.device.kind == "cuda" else {}
    return {**here.packages, **system, **processor, **gpus}
