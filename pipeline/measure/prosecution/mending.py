"""Look for an option with which a wrong answer is right: an optimization left out, a node in float, another export."""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import simulation
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.frameworks.onnx import traversal
from enginesmith.pipeline.measure.prosecution import reduction
from enginesmith.pipeline.measure.prosecution.judging import EXACT
from enginesmith.pipeline.measure.prosecution.search import Disagreement
from enginesmith.pipeline.measure.prosecution.stages import Reduced, Stage, Stages, differ, is_wrong, open_engine
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array, Feeds
from enginesmith.pipeline.units import AddedOption

_MOST_TRIALS = 80
Trial = tuple[AddedOption, Callable[[Path], bool]]
"""An option, and a function that tells, in a folder that is not there yet, if the answer is right with it."""


def find_option(known: Stages, at: int, shown: Disagreement, reduced: Reduced | None) -> AddedOption | None:
    """Find an option with which the guilty stage, at this position, answers right; None if there is none in time."""
    end = time.monotonic() + known.seconds
    with tempfile.TemporaryDirectory(prefix="enginesmith-mend-") as scratch:
        trials = itertools.islice(_list_trials(known, at, shown, reduced), _MOST_TRIALS)
        for number, (option, is_right) in enumerate(trials):
            if time.monotonic() > end:
                return None
            with contextlib.suppress(EnginesmithError):
                if is_right(Path(scratch, str(number))):
                    return option
    return None


def _list_trials(known: Stages, at: int, shown: Disagreement, reduced: Reduced | None) -> Iterator[Trial]:
    stage, before = known.stages[at], known.stages[at - 1]
    if at < len(known.stages) - 1:
        yield from _change_graph(stage, before, shown.feeds)
        return
    if reduced is not None:
        yield from _change_engine(known, reduced)
        yield from _change_graph_of_engine(known, before, reduced, shown.feeds)
    yield from _change_float_graph(known, shown.feeds)


def _change_engine(known: Stages, reduced: Reduced) -> Iterator[Trial]:
    """Try options of the engine on the reduced graph."""
    precision = known.own_precision
    for option, engine in known.engine.variations():

        def is_right(place: Path, engine: Engine = engine) -> bool:
            return not is_wrong(engine, reduced.model, reduced.feeds, precision, known.device, place, reduced.compute)

        yield option, is_right


def _change_graph_of_engine(known: Stages, graph: Stage, reduced: Reduced, feeds: Feeds) -> Iterator[Trial]:
    """Try to spare the engine the nodes that it gets wrong."""
    names = [node.name for node in reduced.model.graph.node]
    for option, make in graph.other_graphs(names) if graph.other_graphs and graph.precision not in EXACT else ():

        def is_right(place: Path, make: Callable[[Path], Artifact] = make) -> bool:
            model = reduction.read_whole(make(place / "graph").path)
            precision, engine_place = known.own_precision, place / "engine"
            return not is_wrong(known.engine, model, feeds, precision, known.device, engine_place, reduced.compute)

        yield option, is_right


def _change_float_graph(known: Stages, feeds: Feeds) -> Iterator[Trial]:
    """Try to export or simplify the model otherwise, where the engine gets its graph in float wrong."""
    model, precision = known.stages[0], known.stages[-1].precision
    wanted = model.answer(feeds)

    def is_right(graph: Path, place: Path) -> bool:
        with open_engine(known.engine, reduction.read_whole(graph), known.device, place) as answer:
            return not differ(precision, model, wanted, answer(feeds), feeds)

    stages = [stage for stage in known.stages[1:-1] if stage.precision in EXACT and stage.graph]
    with tempfile.TemporaryDirectory(prefix="enginesmith-mend-") as scratch:
        if not stages or stages[-1].graph is None or is_right(stages[-1].graph, Path(scratch, "now")):
            return
    for stage in stages:
        for option, make in stage.other_graphs(()) if stage.other_graphs else ():

            def is_mended(place: Path, make: Callable[[Path], Artifact] = make) -> bool:
                return is_right(make(place / "graph").path, place / "engine")

            yield option, is_mended


def _change_graph(stage: Stage, before: Stage, feeds: Feeds) -> Iterator[Trial]:
    """Try to make the guilty graph otherwise."""
    if stage.other_graphs is None:
        return
    wanted = before.answer(feeds)
    for option, make in stage.other_graphs(_rank_nodes(stage, before, feeds)):

        def is_right(place: Path, make: Callable[[Path], Artifact] = make) -> bool:
            with simulation().load(make(place), Device()) as session:
                return not differ(stage.precision, before, wanted, session.run(feeds), feeds)

        yield option, is_right


def _rank_nodes(stage: Stage, before: Stage, feeds: Feeds) -> list[str]:
    """List the nodes by how much further their result is off than what they take, the furthest first."""
    if stage.graph is None or before.graph is None:
        return []
    model = reduction.read_whole(before.graph)
    truth = reduction.record_values(model, feeds)
    values = reduction.record_values(reduction.read_whole(stage.graph), feeds)
    errors = {name: _measure_error(truth[name], values[name]) for name in truth.keys() & values.keys()}
    jumps: dict[str, float] = {}
    for node in model.graph.node:
        given = max((errors.get(name, 0.0) for name in traversal.list_reads(node)), default=0.0)
        jumps[node.name] = max((errors.get(name, 0.0) for name in node.output), default=0.0) - given
    return sorted(jumps, key=lambda name: -jumps[name])


def _measure_error(wanted: Array, given: Array) -> float:
    """Measure the error of a value as a share of its own size."""
    if wanted.shape != given.shape or wanted.dtype.kind != "f" or not wanted.size:
        return 0.0
    difference = np.nan_to_num(wanted.astype(float) - given.astype(float), nan=np.inf)
    size = float(np.linalg.norm(np.nan_to_num(wanted.astype(float))))
    return float(np.linalg.norm(difference)) / size if size else 0.0
