"""Workspace limits to try: the smallest that builds, and points above it on a log scale.

Where a limit is only a gate (TensorRT-RTX 1.7), the smallest follows from an unlimited build: the builder compares
limit and weights together with the activations. Seen for four models at batch 1, 16 and 64, within 16 KiB.
"""

import math
from collections.abc import Callable

from enginesmith.pipeline.engines.base import EngineFacts
from enginesmith.pipeline.engines.trt.flavours import Capabilities
from enginesmith.pipeline.errors import LimitTooSmall, ModelError

_SLACK_BYTES = 32 << 10
"""On top of the difference, which is up to 16 KiB short of the need, and never above it (seen)."""
_RESOLUTION_BYTES = 64 << 10
_LEAST_POINT_BYTES = 1 << 20
_SHARE = 0.05
"""How exactly a search finds the smallest limit, where it has to search."""


def estimate(facts: EngineFacts) -> int:
    """The smallest limit that builds, by the figures of an unlimited build.

    Raises:
        ModelError: the builder gave no figures.
    """
    if facts.activation_bytes is None or facts.weights_bytes is None:
        raise ModelError("the builder gave no memory figures, so there is nothing to sweep", "name the limits yourself")
    need = facts.activation_bytes - facts.weights_bytes
    return need + _SLACK_BYTES if need > 0 else 1


def points(facts: EngineFacts, smallest: int, count: int) -> tuple[int, ...]:
    """``count`` limits from the smallest to what the largest shape works in, evenly on a log scale."""
    top = max(facts.activation_bytes or 0, smallest)
    low = min(max(smallest, _LEAST_POINT_BYTES), top)
    if count == 1:
        return (smallest,)
    steps = (math.exp(math.log(low) + index * math.log(top / low) / (count - 1)) for index in range(1, count))
    return (smallest, *(round(step) for step in steps))


def smallest(build: Callable[[int], object], facts: EngineFacts, known: Capabilities) -> int:
    """The smallest limit that builds; the last successful ``build`` was with it.

    One build where the estimate holds; otherwise limits are halved or doubled, then bisected.
    """
    limit = estimate(facts) if known.workspace_is_a_gate else facts.scratch_bytes or _LEAST_POINT_BYTES
    low, high = 0, 0
    if _builds(build, limit):
        if known.workspace_is_a_gate or limit <= _RESOLUTION_BYTES:
            return limit
        high = limit
    else:
        low, high, enough = limit, 2 * limit, facts.workspace_limit_bytes or math.inf
        while high < enough and not _builds(build, high):
            low, high = high, 2 * high
        high = int(min(high, enough))  # it was built with that before
    share = 0.0 if known.workspace_is_a_gate else _SHARE
    while high - low > max(_RESOLUTION_BYTES, share * high):
        middle = (low + high) // 2
        if _builds(build, middle):
            high = middle
        else:
            low = middle
    build(high)
    return high


def _builds(build: Callable[[int], object], limit: int) -> bool:
    try:
        build(limit)
    except LimitTooSmall:
        return False
    return True
