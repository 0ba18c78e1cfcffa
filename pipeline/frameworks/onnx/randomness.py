"""Refuse graphs that answer at random, and name the nodes that make them do so."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.errors import MissingCapability, ModelError, SourceError
from enginesmith.pipeline.frameworks.onnx import evaluator, model_file, traversal
from enginesmith.pipeline.tensors import DTYPES
from enginesmith.pipeline.units import count_words, name_some

if TYPE_CHECKING:
    import onnx

_DRAWING = frozenset(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Sampling")
)
"""Operators whose results are random, with a seed, too: it counts for a session, and not for each of its calls."""
_DROPPING, _TRAINING = "Dropout", 2
"""Operator whose results are random in training mode, and its input that switches that on."""
_RUNS = 8
"""Times that a graph is run again until it counts as steady: of few values, the same may be drawn twice."""
_NAMED = 3
_TAKE_OUT = (
    "take out what is random: let the model answer probabilities, or give it random numbers as an input; what an input "
    "switches off has to be off by a constant"
)
_EVALUATE = (
    "export the model in evaluation mode: call model.eval() before, and export without training=…; training_mode has "
    "to be a constant"
)


def check_steady(path: Path, name: str, sizes: Mapping[str, int]) -> None:
    """Check that a file answers the same input alike each time; only one with random nodes is run for that.

    Its functions are inlined. ``name`` is the model's in messages; ``sizes`` are known ones of dimensions. A graph that
    takes no drawn input is not judged.

    Raises:
        SourceError: it does not.
    """
    nodes = find_random_nodes(model_file.skeleton(path))
    if nodes and _answers_differ(path, sizes):
        labels = dict.fromkeys(f"{node.op_type} {node.name or node.output[0]!r}" for node in nodes)
        remedies = dict.fromkeys(_EVALUATE if node.op_type == _DROPPING else _TAKE_OUT for node in nodes)
        raise SourceError(
            f"{name} answers differently each time it is run on the same input, by "
            f"{count_words(len(labels), 'random node')}: {name_some([*labels], _NAMED)}",
            "; ".join(remedies),
        )


def _answers_differ(path: Path, sizes: Mapping[str, int]) -> bool:
    signature = model_file.signature(path)
    if not all(spec.dtype in DTYPES for spec in (*signature.inputs, *signature.outputs)):
        return False
    try:
        run = evaluator.open_graph(path, threads=1)  # which computes all that is not random bit by bit alike
    except (ModelError, MissingCapability):
        return False
    for feeds in evaluator.draw_candidates(signature, sizes):
        try:
            first = run(feeds)
        except ModelError:
            continue
        again = (run(feeds) for _ in range(_RUNS))
        return any(evaluator.largest_difference(first, answers) > evaluator.TOLERANCE for answers in again)
    return False


def find_random_nodes(model: "onnx.ModelProto") -> "list[onnx.NodeProto]":
    """List the nodes with random results that an output may depend on, of subgraphs, too."""
    if not any(node.op_type in _DRAWING or _may_drop(node) for node in traversal.nodes(model)):
        return []
    return list(_find_random(model.graph, set()))


def _find_random(graph: "onnx.GraphProto", false_outside: Collection[str]) -> "Iterator[onnx.NodeProto]":
    """Go from a graph's outputs to what they depend on."""
    wanted = {value.name for value in graph.output}
    false = {*false_outside, *_list_false(graph.node, graph.initializer)}
    for node in reversed(graph.node):
        if wanted.isdisjoint(node.output):
            continue
        wanted.update(traversal.list_reads(node))
        if node.op_type in _DRAWING or (_may_drop(node) and node.input[_TRAINING] not in false):
            yield node
        for body in traversal.subgraphs(node):
            yield from _find_random(body, false)


def _may_drop(node: "onnx.NodeProto") -> bool:
    return node.op_type == _DROPPING and len(node.input) > _TRAINING and bool(node.input[_TRAINING])


def _list_false(nodes: "Iterable[onnx.NodeProto]", weights: "Iterable[onnx.TensorProto]") -> Iterator[str]:
    """List the constants in the file itself that are false alone."""
    from onnx import TensorProto, numpy_helper

    constants = [(node.output[0], node.attribute[0].t) for node in nodes if node.op_type == "Constant"]
    for name, tensor in (*((tensor.name, tensor) for tensor in weights), *constants):
        single = tensor.data_type == TensorProto.BOOL and np.prod(tensor.dims) == 1
        if single and not model_file.is_external(tensor) and not numpy_helper.to_array(tensor):
            yield name
