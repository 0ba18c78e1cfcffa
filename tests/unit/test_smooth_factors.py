"""The choice of factors for the channels of an activation, from statistics alone."""

import numpy as np
import pytest

from enginesmith.pipeline.passes.rescale.smooth_quant import choose_smooth
from graphs import channel_statistics, normal

WIDTH = 16


@pytest.mark.parametrize("kind", ["conv", "matrix"])
def test_the_estimated_error_is_the_error(kind: str) -> None:
    """Held against rounding activations and weights for real, without and with factors."""
    places = 9 if kind == "conv" else 1
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, WIDTH, places)) * np.where(np.arange(WIDTH) % 8 == 3, 30.0, 1.0)[:, None]
    w = normal(1, 8, WIDTH, places)
    found = channel_statistics(x, 1)
    choice = choose_smooth([w], found, [0.5])
    for scale, expected in ((np.ones(WIDTH), choice.before), (choice.factors, choice.after)):
        activation, matrix = x / scale[:, None], w[0] * scale[:, None]
        steps = np.abs(activation).max() / 127, np.abs(matrix).max((1, 2), keepdims=True) / 127
        rounded = np.einsum(
            "nik,oik->no", np.rint(activation / steps[0]) * steps[0], np.rint(matrix / steps[1]) * steps[1]
        )
        exact = np.einsum("nik,oik->no", x, w[0])
        assert ((rounded - exact) ** 2).sum() / (exact**2).sum() == pytest.approx(expected, rel=0.15)
