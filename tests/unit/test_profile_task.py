"""The profile step: which feeds and which graph it takes, and what it says it found."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.measure.rows import Profile
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks import measure as tasks
from enginesmith.pipeline.tasks.base import RECORDS
from enginesmith.pipeline.tasks.measure import GRAPH, ProfileVariant

FEEDS = {batch: {"x": np.ones((batch, 4), np.float32)} for batch in (8, 1)}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked to be profiled; the answer is always the same."""
    found: list[tuple[Any, ...]] = []

    def profile(candidate: Any, batch: int, feeds: Any, graph: Path | None, calls: int, *rest: Any) -> Profile:
        found.append((candidate.id, batch, feeds["x"].shape, graph, calls))
        return ANSWERS.get(batch, FAILED)

    monkeypatch.setattr(tasks, "measure_profile", profile)
    monkeypatch.setattr(tasks, "measured_feeds", lambda reference: FEEDS)
    return found


COMMON = {"variant": "v", "device": "cpu", "calls": 5}
ANSWERS = {1: Profile(**COMMON, batch=1, total_ms=12.0, unattributed_share=0.25)}
FAILED = Profile(**COMMON, batch=8, failure="it died", reasons={"total_ms": "it died"})


def artifact(kind: Any, folder: Path) -> Artifact:
    return Artifact(kind=kind, path=folder / kind, sha256="", bytes=0)


def task(batch: int | None = None) -> ProfileVariant:
    return ProfileVariant(variant="v", engine=Eager(), device=Device(), batch=batch, calls=5)


def inputs(folder: Path, *kinds: str) -> dict[str, Artifact]:
    model, *graph = kinds
    found = {"reference": artifact("reference", folder), "model": artifact(model, folder)}
    return found | ({GRAPH: artifact(graph[0], folder)} if graph else {})


@pytest.mark.parametrize(
    ("kinds", "graph"), [(("torch",), None), (("onnx",), "onnx"), (("engine", "onnx"), "onnx"), (("engine",), None)]
)
def test_the_graph_is_what_the_engine_was_built_from(
    kinds: tuple[str, ...], graph: str | None, asked: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    effect = task().run(inputs(tmp_path, *kinds), tmp_path, lambda text: None)
    assert asked == [("v", 1, (1, 4), tmp_path / graph if graph else None, 5)]
    assert effect.summary == "12 ms in operators at batch 1, 75% of it on modules"
    assert not effect.incomplete
    assert Profile.model_validate(json.loads((tmp_path / RECORDS).read_text())[0]) == ANSWERS[1]


def test_a_failure_is_shown_and_not_kept(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    effect = task(batch=8).run(inputs(tmp_path, "torch"), tmp_path, lambda text: None)
    assert (effect.summary, effect.incomplete) == ("it died", True)


def test_a_batch_that_is_not_measured(asked: list[tuple[Any, ...]], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="batch 3"):
        task(batch=3).run(inputs(tmp_path, "torch"), tmp_path, lambda text: None)
