"""Pruning to a latency, as tasks: what trials leave behind is gone on from, and the best of them is made."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import read_records, write_records
from enginesmith.pipeline.tasks.load import Load
from enginesmith.pipeline.tasks.prune import (
    TRIALS,
    LatencyTrial,
    Prune,
    PruneToLatency,
    ToEngine,
    TryLatency,
    choose_trial,
    describe_fastest,
    propose_share,
    read_facts,
)

NETS = f"{Path(__file__).parents[1] / 'data' / 'nets.py'}:mlp"
Steps = list[tuple[float, float | None]]


def quiet(_: str) -> None:
    return None


def inputs(folder: Path, steps: Steps) -> dict[str, Artifact]:
    """A small net, and the record of trials: MACs left, latency left."""
    effect = Load(source=resolve(NETS)).run({}, made(folder / "model"), quiet)
    model = Artifact(kind="torch", path=folder / "model" / effect.file, sha256="", bytes=0, signature=effect.signature)
    trials = [LatencyTrial(macs_left=macs, latency_left=left, reason="" if left else "no") for macs, left in steps]
    write_records(made(folder / "before"), trials)
    return {"model": model, "before": record(folder / "before" / "records.json")}


def record(path: Path) -> Artifact:
    return Artifact(kind="record", path=path, sha256="", bytes=0)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def wanted(**options: Any) -> PruneToLatency:
    return PruneToLatency(target=PruneTarget.parse("latency=-40%"), options=PruneOptions(multiple_of=1, **options))


def trial(**options: Any) -> TryLatency:
    return TryLatency(prune=wanted(**options), way=ToEngine(engine=OnnxRuntime(), device=Device(), passes=()))


def test_the_trial_that_keeps_the_most_is_made_again(tmp_path: Path) -> None:
    steps: Steps = [(0.6, 0.8), (0.25, 0.4), (0.5, 0.59), (0.55, 0.7)]
    given = inputs(tmp_path, steps)
    effect = wanted().run(given, made(tmp_path / "out"), quiet)
    assert effect.summary.endswith("; 59.0% of the dense latency, in 4 trials")
    assert any("in too few rounds" in note for note in effect.notes)
    small = Artifact(kind="torch", path=tmp_path / "out" / effect.file, sha256="", bytes=0)
    facts = read_facts(small)
    assert facts.macs_after / facts.macs_before == 0.5
    assert [one["macs_left"] for one in json.loads((tmp_path / "out" / TRIALS).read_text())] == [0.6, 0.25, 0.5, 0.55]
    same = Prune(target=PruneTarget.parse("macs=-50%"), options=PruneOptions(multiple_of=1))
    same.run(given, made(tmp_path / "same"), quiet)
    for name in ("model.json", "state.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()


def test_where_none_is_fast_enough_the_fastest_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"latency=-40% is not reached: the fastest of 2 trials takes 70.0% with 20.0%"
    ):
        wanted().run(inputs(tmp_path, [(0.6, 0.9), (0.2, 0.7)]), made(tmp_path / "out"), quiet)


def test_a_search_that_is_over_passes_its_trials_on(tmp_path: Path) -> None:
    given = inputs(tmp_path, [(0.6, 0.8), (0.33, 0.6)])
    effect = trial().run(given, made(tmp_path / "out"), quiet)
    assert effect.summary == "the search is over"
    assert read_records(record(tmp_path / "out" / effect.file)) == read_records(given["before"])


def test_what_would_empty_a_layer_is_a_trial_that_failed(tmp_path: Path) -> None:
    given = inputs(tmp_path, [(0.08, 0.7)])
    effect = trial().run(given, made(tmp_path / "out"), quiet)
    last = read_records(record(tmp_path / "out" / effect.file))[-1]
    assert last["latency_left"] is None
    assert "would empty a layer" in last["reason"]


def test_a_first_trial_that_would_empty_a_layer_does_not_end_the_search(tmp_path: Path) -> None:
    far = wanted().model_copy(update={"target": PruneTarget.parse("latency=-98%")})
    first = trial().model_copy(update={"prune": far})
    effect = first.run(inputs(tmp_path, []), made(tmp_path / "out"), quiet)
    (only,) = read_records(record(tmp_path / "out" / effect.file))
    assert only["latency_left"] is None
    assert "would empty a layer" in only["reason"]


def test_what_is_wrong_with_the_request_ends_the_search_at_once(tmp_path: Path) -> None:
    given = inputs(tmp_path, [])
    with pytest.raises(UsageError, match="lyers"):
        trial(protect=("lyers.0",)).run(given, made(tmp_path / "out"), quiet)


MOST = 12
"""More than any search takes."""


def searched(latency: Callable[[float], float | None], wanted: float) -> list[LatencyTrial]:
    trials: list[LatencyTrial] = []
    while (share := propose_share(trials, wanted)) is not None:
        left = latency(share)
        trials.append(LatencyTrial(macs_left=share, latency_left=left, reason="" if left else "too few"))
        assert len(trials) <= MOST
    return trials


@pytest.mark.parametrize("fixed", [0.0, 0.2, 0.5])
def test_it_comes_near_where_part_of_the_time_stays(fixed: float) -> None:
    trials = searched(lambda share: fixed + (1 - fixed) * share, 0.6)
    best = choose_trial(trials, 0.6)
    assert best is trials[-1]
    assert best.latency_left == pytest.approx(0.6, rel=0.02)


def test_the_first_trial_may_do() -> None:
    assert len(searched(lambda share: share, 0.6)) == 1
    assert propose_share([], 0.6) == 0.6


def test_of_those_that_are_fast_enough_the_largest_is_chosen() -> None:
    steps = [(0.6, 0.8), (0.3, 0.4), (0.45, 0.5), (0.5, 0.7)]
    trials = [LatencyTrial(macs_left=macs, latency_left=left) for macs, left in steps]
    assert choose_trial(trials, 0.6) is trials[2]
    assert propose_share(trials[:3], 0.6) == pytest.approx(0.525)


def test_what_cannot_be_pruned_that_far_is_tried_with_more() -> None:
    trials = searched(lambda share: share if share > 0.5 else None, 0.3)
    assert trials[0].latency_left is None
    assert trials[1].macs_left > trials[0].macs_left
    assert choose_trial(trials, 0.3) is None
    fastest = min(one.latency_left for one in trials if one.latency_left)
    assert describe_fastest(trials).startswith(f"the fastest of {len(trials)} trials takes {fastest:.1%}")


def test_where_none_can_be_had_the_reason_is_told() -> None:
    trials = searched(lambda share: None, 0.3)
    assert (choose_trial(trials, 0.3), describe_fastest(trials)) == (None, "too few")
