"""Weights in few bits: their scales and levels."""

import ml_dtypes
import numpy as np
import pytest

from enginesmith.pipeline.passes.quantize import quantizers
from enginesmith.pipeline.tensors import Array


@pytest.fixture
def weight() -> Array:
    """Channels of very different sizes."""
    rng = np.random.default_rng(0)
    return (rng.standard_normal((6, 5, 3, 3)) * 10.0 ** np.arange(-3, 3).reshape(6, 1, 1, 1)).astype(np.float32)


def test_each_channel_has_a_step_of_its_own(weight: Array) -> None:
    narrow = quantizers.quantize_symmetrically(weight, 0, "int8", "fp32")
    largest = np.abs(weight).max(axis=(1, 2, 3))
    assert narrow.levels.dtype == np.int8
    assert (np.abs(narrow.levels).max(axis=(1, 2, 3)) == 127).all()
    np.testing.assert_allclose(narrow.scale, largest / 127, rtol=1e-6)
    assert (np.abs(narrow.wide() - weight).max(axis=(1, 2, 3)) <= narrow.scale / 2 * 1.001).all()


def test_one_step_for_the_tensor(weight: Array) -> None:
    narrow = quantizers.quantize_symmetrically(weight, None, "int8", "fp32")
    assert narrow.scale.shape == ()
    assert np.abs(narrow.wide() - weight).max() <= narrow.scale / 2 * 1.001


def test_each_column_of_a_stack_of_matrices_has_a_step(weight: Array) -> None:
    narrow = quantizers.quantize_symmetrically(weight, None, "int8", "fp32", stacked=True)
    assert (narrow.axis, narrow.block, narrow.scale.shape) == (2, 3, (6, 5, 1, 3))
    assert (np.abs(narrow.levels).max(axis=2) == 127).all()
    assert (np.abs(narrow.wide() - weight) <= narrow.scale / 2 * 1.001).all()


def test_e4m3_takes_the_largest_number_to_448_and_never_beyond(weight: Array) -> None:
    narrow = quantizers.quantize_symmetrically(weight, 0, "fp8", "fp16")
    assert narrow.levels.dtype == ml_dtypes.float8_e4m3fn
    levels = narrow.levels.astype(np.float32)
    assert np.isfinite(levels).all()
    assert levels.max() <= 448
    large = np.abs(weight) > 0.2 * np.abs(weight).max(axis=(1, 2, 3), keepdims=True)
    np.testing.assert_allclose(narrow.wide()[large], weight[large], rtol=2**-4)


def test_scales_of_a_float16_graph_are_float16_numbers_and_none_is_subnormal(weight: Array) -> None:
    scale = quantizers.quantize_symmetrically(weight * 1e-4, 0, "int8", "fp16").scale
    assert (scale == scale.astype(np.float16).astype(np.float32)).all()
    assert scale.min() == np.finfo(np.float16).tiny


def test_a_dead_channel_has_a_scale_and_no_levels() -> None:
    narrow = quantizers.quantize_symmetrically(np.array([[0.0, 0.0], [1.0, -1.0]], np.float32), 0, "int8", "fp32")
    assert narrow.scale[0] > 0
    assert narrow.levels.tolist() == [[0, 0], [127, -127]]


def test_the_bias_of_a_nearly_dead_channel_fits_an_int32() -> None:
    weight, bias = np.array([[1e-12, 1.0]], np.float32), np.array([3.0, 3.0], np.float32)
    least = quantizers.least_scale(bias, activation_scale=0.01)
    narrow = quantizers.quantize_symmetrically(weight, 1, "int8", "fp32", least=least)
    levels = quantizers.integer_bias(bias, 0.01 * narrow.scale.astype(np.float64))
    np.testing.assert_allclose(levels * narrow.scale.astype(np.float64) * 0.01, bias, rtol=1e-5)
    assert narrow.levels[0, 1] == 127


def test_blocks_divide_what_they_are_of() -> None:
    assert [quantizers.block_size(length) for length in (768, 320, 96, 100)] == [128, 64, 32, 0]


def matrix() -> Array:
    return np.random.default_rng(1).standard_t(4, (256, 40)).astype(np.float32)


def plain(weight: Array, block: int) -> Array:
    """int4 with the scale that represents each block's largest number."""
    blocks = weight.reshape(-1, block, weight.shape[1])
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 7
    return (np.rint(blocks / scale) * scale).reshape(weight.shape)


def test_scales_of_blocks_are_chosen_for_the_least_error() -> None:
    weight = matrix()
    narrow = quantizers.blocked(weight, 64, "fp32")
    assert (narrow.levels.dtype, narrow.scale.shape) == (ml_dtypes.int4, (4, 40))
    levels = narrow.levels.astype(np.int8)
    assert (levels.min(), levels.max()) == (-8, 7)
    assert ((narrow.wide() - weight) ** 2).sum() < 0.9 * ((plain(weight, 64) - weight) ** 2).sum()


def test_important_inputs_are_kept_better() -> None:
    weight, importance = matrix(), np.where(np.arange(256) % 64 < 4, 100.0, 1.0)

    def error(rounded: Array) -> float:
        return float((importance[:, None] * (rounded - weight) ** 2).sum())

    assert error(quantizers.blocked(weight, 64, "fp32", importance).wide()) < error(
        quantizers.blocked(weight, 64, "fp32").wide()
    )


def test_large_matrices_are_done_in_pieces_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantizers.blocked(matrix(), 32, "fp16")
    monkeypatch.setattr(quantizers, "_CHUNK_ELEMENTS", 1)
    pieces = quantizers.blocked(matrix(), 32, "fp16")
    assert (whole.levels == pieces.levels).all()
    assert (whole.scale == pieces.scale).all()
