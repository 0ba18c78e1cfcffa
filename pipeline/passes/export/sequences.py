"""Translate operators on sequences to ONNX where the exporter's own translations are slow, or lacking."""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from onnxscript import opset18, opset23
from onnxscript.function_libs.torch_lib.ops import core, nn

from enginesmith.pipeline.frameworks.onnx import ir

op, op23 = cast("Any", opset18), cast("Any", opset23)


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attend with any number of axes before lengths and sizes; the exporter's needs two, those of batch and heads.

    Where there are fewer heads of keys, each is for several of queries, whether or not ``enable_gqa`` says so.
    """
    if dropout_p:
        return nn.aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    rank = len(query.shape)
    values, mask = [query, key, value], attn_mask
    if rank == 3:
        axis = [0] if enable_gqa else [1]
        values = [op.Unsqueeze(each, axis) for each in values]
        mask = op.Unsqueeze(mask, axis) if mask is not None and len(mask.shape) == 3 else mask
    elif rank > 4:
        if mask is not None and len(mask.shape) == rank:
            leading = op.Concat(op.Shape(query, end=rank - 3), op.Constant(value_ints=[1] * 3), axis=0)
            mask = _join_leading(op.Expand(mask, leading))
        values = [_join_leading(each) for each in values]
    answer, *_ = op23.Attention(*values, attn_mask=mask, scale=scale, is_causal=is_causal)
    if rank == 3:
        return op.Squeeze(answer, axis)
    if rank > 4:
        return op.Reshape(answer, op.Concat(op.Shape(query, end=rank - 1), op.Shape(value, start=rank - 1), axis=0))
    return answer


def _join_leading(value: Any) -> Any:
    """Join all axes but the last three."""
    return op.Reshape(value, op.Concat(op.Constant(value_ints=[-1]), op.Shape(value, start=-3), axis=0))


_LARGEST_CONVOLVED, _LARGEST_POWER_OF_TWO = 2048, 512
"""The most samples of a spectrum that is convolved: the kernels are as many numbers as their square."""


def stft(
    self: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
) -> Any:
    """Compute spectra as a convolution with cosines and sines, [batch, bins, frames, 2].

    A second of sound with ``n_fft=400`` takes a convolution 0.8 ms in ONNX Runtime, and STFT 8.1 ms, with errors 80
    times as large (1.31, one thread). OpenVINO takes STFT with fixed shapes alone. With a large power of two, ONNX
    Runtime's STFT is the faster one, and stays.
    """
    if n_fft > (_LARGEST_POWER_OF_TWO if n_fft.bit_count() == 1 else _LARGEST_CONVOLVED):
        return core.aten_stft(self, n_fft, hop_length, win_length, window, normalized, onesided, return_complex)
    bins = n_fft if onesided is False else n_fft // 2 + 1
    angles = 2 * math.pi / n_fft * (np.outer(range(bins), range(n_fft)) % n_fft)
    waves = np.concatenate([np.cos(angles), -np.sin(angles)])[:, None] / (math.sqrt(n_fft) if normalized else 1)
    length = (win_length or n_fft) if window is None else window.shape[0]
    left = (n_fft - length) // 2
    pads = [left, n_fft - length - left]
    if window is None:
        waves *= np.pad(np.ones(length), pads)
    kernels = op.Constant(value=ir.tensor(waves.astype(self.dtype.numpy())))
    if window is not None:
        kernels = op.Mul(kernels, op.CastLike(op.Pad(window, pads) if length < n_fft else window, self))
    is_single = len(self.shape) == 1
    spectra = op.Conv(op.Unsqueeze(self, [0, 1] if is_single else [1]), kernels, strides=[hop_length or n_fft // 4])
    parts = op.Transpose(op.Reshape(spectra, [0, 2, bins, -1]), perm=[0, 2, 3, 1])
    return op.Squeeze(parts, [0]) if is_single else parts


def lstm(
    given: Any,
    hx: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Run an LSTM; one with a projection (``proj_size``), which ONNX does not have, by one without.

    The projection is multiplied into the weights of the state, and applied to what comes out. The first state, which is
    given projected, becomes a further input that is zero in all steps but the first.
    """
    if hx[0].shape[2] == hx[1].shape[2]:
        return core.aten_lstm(given, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    ways, per_way = 1 + bidirectional, 5 if has_biases else 3
    x = op.Transpose(given, perm=[1, 0, 2]) if batch_first else given
    ends = []
    for layer in range(num_layers):
        weights = [params[start : start + per_way] for start in range(layer * ways * per_way, len(params), per_way)]
        state, cell = (op.Slice(value, [layer * ways], [(layer + 1) * ways], [0]) for value in hx)
        cell.shape = ir.Shape([ways, None, hx[1].shape[2]])
        x, *end = _run_projected(x, state, cell, weights[:ways])
        ends.append(end)
    states, cells = (op.Concat(*values, axis=0) for values in zip(*ends, strict=True))
    return op.Transpose(x, perm=[1, 0, 2]) if batch_first else x, states, cells


def _run_projected(x: Any, state: Any, cell: Any, weights: Sequence[Sequence[Any]]) -> tuple[Any, Any, Any]:
    """Run one layer in one way or both: (length, batch, size), (ways, batch, projected), (ways, batch, hidden)."""
    ways = len(weights)
    later = op.Sub(op.Shape(x, start=0, end=1), op.Constant(value_ints=[1]))
    none, params, inputs = op.Constant(value_ints=[0]), [], [x]
    for way, (into, recurrent, *biases, projection) in enumerate(weights):
        pads = [none] * 6
        pads[0 if way else 3] = later  # the way back begins with the last step
        inputs.append(op.Pad(op.Slice(state, [way], [way + 1], [0]), op.Concat(*pads, axis=0)))
        nothing = op.Mul(recurrent, op.CastLike(0.0, recurrent))
        columns = [recurrent if way == other else nothing for other in range(ways)]
        params += [op.Concat(into, *columns, axis=1), op.MatMul(recurrent, projection), *biases]
    zeros = op.Mul(cell, op.CastLike(0.0, cell))
    zeros.shape = cell.shape
    given = op.Concat(*inputs, axis=2)
    y, hidden, cells = core.aten_lstm(given, [zeros, cell], params, len(biases) > 0, 1, 0.0, False, ways == 2, False)
    down = op.Concat(*(op.Unsqueeze(op.Transpose(each[-1], perm=[1, 0]), [0]) for each in weights), axis=0)
    by_way = op.Transpose(op.Reshape(y, op.Constant(value_ints=[0, 0, ways, -1])), perm=[0, 2, 1, 3])
    merged = op.Transpose(op.MatMul(by_way, down), perm=[0, 2, 1, 3])
    return op.Reshape(merged, op.Constant(value_ints=[0, 0, -1])), op.MatMul(hidden, down), cells
