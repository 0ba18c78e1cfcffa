"""Which share of the MACs takes a wanted share of the latency: bisection, as a pure function of the trials so far."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

CLOSE = 0.02
"""A trial that misses what is wanted by no more than this share ends the search."""
_LEAST, _FINEST = 0.05, 0.01


class LatencyTrial(BaseModel):
    """One trial: the MACs that were left, and the latency; both as shares of the dense model's."""

    model_config = ConfigDict(frozen=True)

    macs_left: float
    latency_left: float | None
    low: float | None = None
    high: float | None = None
    """95 % interval of the latency; None where there were too few rounds."""
    reason: str = ""
    """Why there is no latency: so few MACs cannot be had."""


def propose(trials: Sequence[LatencyTrial], wanted: float) -> float | None:
    """The share of MACs to try next; None where the search is over."""
    low, high, share = _LEAST, 1.0, wanted
    for one in trials:
        left = one.latency_left
        if left is not None and abs(left - wanted) <= CLOSE * wanted:
            return None
        if left is None or left < wanted:
            low = one.macs_left
        else:
            high = one.macs_left
        if high - low <= _FINEST:
            return None
        share = round((low + high) / 2, 4)
    return share


def chosen(trials: Sequence[LatencyTrial], wanted: float) -> LatencyTrial | None:
    """The trial that keeps the most MACs among those that are fast enough."""
    most = wanted * (1 + CLOSE)
    fast = [one for one in trials if one.latency_left is not None and one.latency_left <= most]
    return max(fast, key=lambda one: one.macs_left, default=None)


def told(trials: Sequence[LatencyTrial]) -> str:
    """What came of trials none of which is fast enough."""
    known = {one.latency_left: one for one in trials if one.latency_left is not None}
    if not known:
        return trials[-1].reason
    best = known[min(known)]
    return f"the fastest of {len(trials)} trials takes {best.latency_left:.1%} with {best.macs_left:.1%} of the MACs"
