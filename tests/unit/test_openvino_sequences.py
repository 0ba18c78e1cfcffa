"""Recurrent layers in OpenVINO, whose sequences have lengths of their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.engines.openvino.engine import OpenVINO
from enginesmith.pipeline.errors import ModelError
from graphs import parse_graph, run_model
from openvino_graphs import CPU, build

if not (openvino := OpenVINO.available(CPU)).ok:
    pytest.skip(f"{openvino.reason}; {openvino.remedy}", allow_module_level=True)

_GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
_HIDDEN, _FEATURES = 3, 4
_GIVEN = "int32[b] l"


def make_layer(
    operator: str,
    direction: str,
    *,
    batch: str = "b",
    steps: str = "t",
    lengths: str = _GIVEN,
    more: str = "",
    outputs: str = "y, h",
) -> Any:
    """Make a graph of a recurrent layer with a first state."""
    rng, count = np.random.default_rng(0), 2 if direction == "bidirectional" else 1
    rows = _GATES[operator] * _HIDDEN
    shapes = {"w": (count, rows, _FEATURES), "r": (count, rows, _HIDDEN), "k": (count, 2 * rows)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    read = "l" if lengths else ""
    ends = ", ".join(f"float[{'s, d, b, u' if name == 'y' else 'd, b, u'}] {name}" for name in outputs.split(", "))
    attributes = f'hidden_size = {_HIDDEN}, direction = "{direction}"{more}'
    inputs = ", ".join(filter(None, (f"float[{steps}, b, {_FEATURES}] x", f"float[{count}, b, {_HIDDEN}] s", lengths)))
    text = f"net ({inputs}) => ({ends}) {{ {outputs} = {operator} <{attributes}> (x, w, r, k, {read}, s) }}"
    return parse_graph(text.replace("b,", f"{batch},").replace("[b]", f"[{batch}]"), 17, **weights)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(
    ("operator", "more"), [("GRU", ""), ("GRU", ", linear_before_reset = 1"), ("LSTM", ""), ("RNN", "")]
)
@pytest.mark.parametrize(("lengths", "steps"), [(_GIVEN, "s"), (_GIVEN, "5"), ("", "s")])
def test_steps_behind_the_end_of_a_sequence_are_left_out(
    tmp_path: Path, operator: str, more: str, direction: str, lengths: str, steps: str
) -> None:
    """OpenVINO ignores the lengths where the batch or the number of steps is dynamic."""
    model = make_layer(operator, direction, lengths=lengths, more=more, steps=steps)
    artifact, _ = build(make_layer(operator, direction, lengths=lengths, more=more, steps=steps), tmp_path)
    rng = np.random.default_rng(1)
    feeds: dict[str, Any] = {"x": rng.standard_normal((5, 3, _FEATURES)).astype(np.float32)}
    feeds["s"] = rng.standard_normal((1 + (direction == "bidirectional"), 3, _HIDDEN)).astype(np.float32)
    if lengths:
        feeds["l"] = np.int32([5, 3, 0])
    with OpenVINO().load(artifact, CPU) as session:
        found = session.run(feeds)
    for name, wanted in run_model(model, feeds).items():
        np.testing.assert_allclose(found[name], wanted, atol=1e-5)


def test_an_lstm_of_coupled_gates_is_refused(tmp_path: Path) -> None:
    """OpenVINO ignores it that the forget gate is made of the input gate."""
    with pytest.raises(ModelError, match="OpenVINO ignores the attribute input_forget"):
        build(make_layer("LSTM", "forward", lengths="", more=", input_forget = 1"), tmp_path)
    (tmp_path / "own").mkdir()
    build(make_layer("LSTM", "forward", lengths="", more=", input_forget = 0"), tmp_path / "own")


def test_the_last_state_of_a_cell_is_refused_where_lengths_are_ignored(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ignores the lengths of sequences in"):
        build(make_layer("LSTM", "forward", outputs="y, h, c"), tmp_path)
    for name, options in (("fixed", {"steps": "5", "batch": "3"}), ("none", {"lengths": ""})):
        (tmp_path / name).mkdir()
        build(make_layer("LSTM", "forward", outputs="y, h, c", **options), tmp_path / name)
