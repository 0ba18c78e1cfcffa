"""Have recurrent layers of OpenVINO heed the lengths of sequences, and refuse those that it computes otherwise."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import traversal

if TYPE_CHECKING:
    import onnx
    import openvino

_STATES = {"GRUSequence": 1, "LSTMSequence": 2, "RNNSequence": 1}
"""Operations, and the number of their states; what follows these among the inputs are lengths, and three weights."""
_TIME = 1
"""Axis of the steps of the input [batch, steps, features]."""


class _Lengths(NamedTuple):
    """Values that tell which steps are within a sequence."""

    reversible: Any
    """[batch], at least 1."""
    within: Any
    """[batch, 1, steps, 1], true for steps before the end."""
    last: Any
    """[batch, 1, steps, 1], true for the last step before the end."""


def refuse_coupled(model: "onnx.ModelProto") -> None:
    """Refuse an LSTM whose forget gate is 1 minus its input gate: OpenVINO 2026.4.1 ignores this without a word.

    Raises:
        ModelError: there is one.
    """
    for node in traversal.nodes(model):
        if node.op_type == "LSTM" and traversal.attributes(node).get("input_forget"):
            raise ModelError(
                f"OpenVINO ignores the attribute input_forget of {node.name or node.output[0]}, an LSTM whose forget "
                "gate is 1 minus its input gate, and would answer otherwise",
                "use another engine",
            )


def heed_lengths(graph: "openvino.Model") -> None:
    """Write recurrent layers of given lengths as layers of all steps, whose answers behind the ends are replaced.

    OpenVINO 2026.4.1 heeds lengths where the batch and the number of steps are fixed, and ignores them without a word
    where one of them is not.
    A layer that runs backwards reads sequences that are reversed up to their ends.

    Raises:
        ModelError: the last state of an LSTM's cell is read, which is in no output of all steps.
    """
    changed = False
    for node in graph.get_ordered_ops():
        count = _STATES.get(node.get_type_name())
        if count is None or all(dim.is_static for dim in list(node.input_value(0).get_partial_shape())[: 1 + _TIME]):
            continue
        if not _is_given(node.input_value(1 + count)):
            continue
        if count > 1 and node.output(2).get_target_inputs():
            raise ModelError(
                f"OpenVINO ignores the lengths of sequences in {node.get_friendly_name()}, an LSTM whose last cell "
                "state is read, where the batch or the number of steps is dynamic",
                "fix both by --input, or use another engine",
            )
        _rewrite(node, count)
        changed = True
    if changed:
        graph.validate_nodes_and_infer_types()


def _is_given(lengths: Any) -> bool:
    """Tell whether lengths are not just the number of steps, made of the shape of what is read."""
    waiting, seen, kinds = [lengths.get_node()], set(), set()
    while waiting:
        node = waiting.pop()
        name, count = node.get_friendly_name(), node.get_input_size()
        if name in seen:
            continue
        seen.add(name)
        if node.get_type_name() == "ShapeOf" or not count:
            kinds.add(node.get_type_name())
        else:
            waiting.extend(node.input_value(at).get_node() for at in range(count))
    return "ShapeOf" not in kinds or not kinds <= {"ShapeOf", "Constant"}


def _rewrite(node: Any, count: int) -> None:
    """Put layers of one direction each in the place of one, and correct their answers."""
    from openvino import opset13

    name, direction = node.get_friendly_name(), node.get_attributes()["direction"]
    directions = ["forward", "reverse"] if direction == "bidirectional" else [direction]
    lengths = _describe_lengths(node.input_value(0), node.input_value(1 + count))
    made = [_write_direction(node, count, at, each, lengths) for at, each in enumerate(directions)]
    for index, parts in enumerate(zip(*made, strict=True)):
        value = node.output(index)
        readers, names = value.get_target_inputs(), value.get_names()
        value.set_names(set())
        joined = opset13.concat(list(parts), 1, name=f"{name}/joined_{index}").output(0)
        joined.set_names(names)
        for reader in readers:
            reader.replace_source_output(joined)


def _describe_lengths(source: Any, lengths: Any) -> _Lengths:
    from openvino import opset13

    lengths = opset13.convert(lengths, "i64")
    size = opset13.gather(opset13.shape_of(source), np.int64(_TIME), np.int64(0))
    steps = opset13.unsqueeze(opset13.range(np.int64(0), size, np.int64(1), "i64"), np.array([0, 1, 3]))
    ends = opset13.unsqueeze(lengths, np.array([1, 2, 3]))
    return _Lengths(
        opset13.maximum(lengths, np.int64(1)),
        opset13.less(steps, ends),
        opset13.equal(steps, opset13.subtract(ends, np.int64(1))),
    )


def _write_direction(node: Any, count: int, at: int, direction: str, lengths: _Lengths) -> tuple[Any, Any]:
    """Return the answers [batch, 1, steps, hidden] and the last state [batch, 1, hidden] of one direction."""
    from openvino import opset13

    def take(index: int, axis: int) -> Any:
        return opset13.gather(node.input_value(index), np.array([at]), np.int64(axis))

    source, states = node.input_value(0), [take(1 + index, 1) for index in range(count)]
    if direction == "reverse":
        source = opset13.reverse_sequence(source, lengths.reversible, 0, _TIME)
    weights = [take(index, 0) for index in range(2 + count, 5 + count)]
    attributes = node.get_attributes()
    options = {key: attributes[key] for key in ("activations", "activations_alpha", "activations_beta", "clip")}
    if "linear_before_reset" in attributes:
        options["linear_before_reset"] = attributes["linear_before_reset"]
    operation = {"GRUSequence": "gru_sequence", "LSTMSequence": "lstm_sequence", "RNNSequence": "rnn_sequence"}
    shape = opset13.shape_of(source)
    every = opset13.broadcast(
        opset13.gather(shape, np.array([_TIME]), np.int64(0)), opset13.gather(shape, np.array([0]), np.int64(0))
    )
    layer = getattr(opset13, operation[node.get_type_name()])(
        source, *states, every, *weights, attributes["hidden_size"], "forward", **options
    )
    layer.set_friendly_name(f"{node.get_friendly_name()}/{direction}")
    answers, zero = layer.output(0), opset13.constant(0, layer.output(0).get_element_type())
    last = opset13.reduce_sum(opset13.select(lengths.last, answers, zero), np.array([2]), False)
    if direction == "reverse":
        answers = opset13.reverse_sequence(answers, lengths.reversible, 0, 2).output(0)
    return opset13.select(lengths.within, answers, zero), last
