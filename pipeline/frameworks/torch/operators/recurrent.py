"""Compute recurrent layers by torch's own, with gates in its order; a GRU that resets first step by step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.frameworks.torch.operators.attributes import Compute, Make, read_int, read_text, refuse

_USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


def _recurrent(node: "ir.Node", opset: int) -> Compute:
    kind, direction = node.op_type, read_text(node, "direction", "forward")
    ways = 2 if direction == "bidirectional" else 1
    listed = list(node.attributes["activations"].as_strings()) if "activations" in node.attributes else []
    if listed and listed != _USUAL[kind] * ways:
        raise refuse(node, f"activations {', '.join(listed)}")
    if "clip" in node.attributes or read_int(node, "layout", 0) or read_int(node, "input_forget", 0):
        raise refuse(node, "clip, layout or input_forget")
    if any(value is not None for value in (*node.inputs[4:5], *node.inputs[7:])):
        raise refuse(node, "lengths of sequences, or peepholes")
    before = kind == "GRU" and not read_int(node, "linear_before_reset", 0)

    def compute(
        x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None = None, *rest: Tensor | None
    ) -> tuple[Tensor, ...]:
        _, first, cell = (*rest, *[None] * 3)[:3]
        size, batch = state.shape[2], x.shape[1]
        zeros = x.new_zeros(ways, batch, size)
        starts = (zeros if first is None else first, zeros if cell is None else cell)
        results = []
        for way in range(ways):
            back = direction == "reverse" or way == 1
            own = (weight[way], state[way], None if bias is None else bias[way])
            begin = tuple(each[way] for each in starts)
            outputs, *last = _LAYERS[kind](x.flip(0) if back else x, *own, *begin, before)
            results.append((outputs.flip(0) if back else outputs, *last))
        joined = tuple(torch.stack(each) for each in zip(*results, strict=True))
        return (joined[0].movedim(0, 1), *joined[1:])

    return compute


def _reorder(value: Tensor, order: Sequence[int]) -> Tensor:
    """Put gates in torch's order."""
    parts = value.chunk(len(order), 0)
    return torch.cat([parts[place] for place in order], 0)


def _weights(weight: Tensor, state: Tensor, bias: Tensor | None, order: Sequence[int]) -> list[Tensor]:
    halves = weight.new_zeros(2, weight.shape[0]) if bias is None else bias.reshape(2, -1)
    return [_reorder(each, order) for each in (weight, state, halves[0], halves[1])]


def _lstm(
    x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None, hidden: Tensor, cell: Tensor, before: bool
) -> tuple[Tensor, ...]:
    flat = _weights(weight, state, bias, (0, 2, 3, 1))  # i o f c → i f g o
    outputs, last, last_cell = torch.lstm(x, (hidden[None], cell[None]), flat, True, 1, 0.0, False, False, False)
    return outputs, last[0], last_cell[0]


def _gru(
    x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None, hidden: Tensor, cell: Tensor, before: bool
) -> tuple[Tensor, ...]:
    if not before:
        flat = _weights(weight, state, bias, (1, 0, 2))  # z r h → r z n
        answers, last = torch.gru(x, hidden[None], flat, True, 1, 0.0, False, False, False)
        return answers, last[0]
    halves = weight.new_zeros(2, weight.shape[0]) if bias is None else bias.reshape(2, -1)
    given, size, outputs = x @ weight.t() + halves.sum(0), hidden.shape[1], []
    for step in given:
        gates = torch.sigmoid(step[:, : 2 * size] + hidden @ state[: 2 * size].t())
        update, reset = gates.chunk(2, 1)
        new = torch.tanh(step[:, 2 * size :] + (reset * hidden) @ state[2 * size :].t())
        hidden = (1 - update) * new + update * hidden
        outputs.append(hidden)
    return torch.stack(outputs), hidden


def _rnn(
    x: Tensor, weight: Tensor, state: Tensor, bias: Tensor | None, hidden: Tensor, cell: Tensor, before: bool
) -> tuple[Tensor, ...]:
    flat = _weights(weight, state, bias, (0,))
    outputs, last = torch.rnn_tanh(x, hidden[None], flat, True, 1, 0.0, False, False, False)
    return outputs, last[0]


_LAYERS: dict[str, Callable[..., tuple[Tensor, ...]]] = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}

MADE: dict[str, Make] = dict.fromkeys(_LAYERS, _recurrent)
