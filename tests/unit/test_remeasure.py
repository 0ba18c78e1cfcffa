"""Measure a baseline and a candidate again, until it is clear whether one is slower."""

from pathlib import Path

import numpy as np
import pytest

from enginesmith.pipeline.measure.latency.rows import LatencyResult, launches_of
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.results import remeasure
from enginesmith.pipeline.results import run as documents
from gates import record, write


def test_samples_are_put_back_into_blocks_and_launches() -> None:
    samples = {
        "a/1/seconds": np.arange(6.0),
        "a/1/waited": np.zeros(6),
        "a/1/calls": np.array([1, 2, 3]),
        "a/1/rounds": np.array([2, 1]),
    }
    found = launches_of(samples, "a", 1)
    assert [[block.seconds.tolist() for block in launch] for launch in found] == [[[0], [1, 2]], [[3, 4, 5]]]
    assert all(one.waited is not None and len(one.waited) == len(one.seconds) for launch in found for one in launch)
    del samples["a/1/waited"]
    assert launches_of(samples, "a", 1)[0][0].waited is None


@pytest.mark.parametrize(("ratios", "looks"), [((1.0,), 1), ((1.06,) * 4, 4), ((1.2,), 1)])
def test_measured_until_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratios: tuple[float, ...], looks: int
) -> None:
    """The clock is replaced, and nothing else: launches whose blocks differ by as much as is wanted."""
    taken: list[float] = []

    def measured(*_: object) -> LatencyResult:
        ratio = ratios[len(taken)]
        taken.append(ratio)
        noise = np.random.default_rng(len(taken)).normal(1, 0.02 if ratio == 1.06 else 1e-4, 5)
        found: dict[str, np.ndarray] = {}
        for name, factor in (("baseline", np.ones(5)), ("candidate", ratio * noise)):
            found |= {f"{name}/1/seconds": 1e-3 * factor, f"{name}/1/calls": np.ones(5, int)}
            found |= {f"{name}/1/rounds": np.ones(5, int)}
        return LatencyResult({name: (LatencyRow(batch=1),) for name in ("baseline", "candidate")}, found)

    run = documents.read(write(tmp_path / "run", record()))
    stored = remeasure.Stored(tmp_path, run, run.variants[0])
    monkeypatch.setattr(remeasure, "measure_latency", measured)
    monkeypatch.setattr(remeasure, "_feeds", lambda *_: {})

    def decided(ratio: Interval) -> bool:
        return ratio.high < 1.05 or ratio.low > 1.05

    found = remeasure.remeasure(stored, stored, 1, seconds=1.0, decided=decided, progress=lambda text: None)
    assert found.launches == 5 * looks
    assert found.ratio.median == pytest.approx(ratios[0], rel=0.05)
    assert (found.before_ms, found.after_ms) == pytest.approx((1.0, ratios[0]), rel=0.05)
