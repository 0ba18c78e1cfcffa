"""The museum: which cases hold, and that hardened networks answer as before."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from enginesmith.pipeline.frameworks.records import Coverage
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.results.run import VariantRecord
from enginesmith.pipeline.tasks.race import explain_drop
from runs import RECOVERY

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def museum() -> Iterator[SimpleNamespace]:
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for folder in (BENCHMARKS / "nets", BENCHMARKS / "arena" / "recipes", BENCHMARKS / "arena", BENCHMARKS):
            patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, "nets", raising=False)  # the tests' own file of networks, where that was loaded
        names = ("museum", "harden", "attention", "training")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def variant(name: str, share: float, drop: float, status: Any = "measured") -> VariantRecord:
    empty: dict[str, Any] = {"operators": {}, "weights": {}, "products": {}}
    coverage = Coverage(total_macs=1, macs={"int8": share, "fp32": 1 - share}, **empty)
    quality = Quality(metric="top1", value=0.9, baseline=0.9, drop=drop, samples=100)
    known = {"engine": "e", "precision": "int8", "status": status, "coverage": coverage, "quality": quality}
    return VariantRecord.model_validate({"id": name, **known})


def row(name: str, times: float, allowed: bool) -> dict[str, Any]:
    ratio = None if times == 1 else {"median": times, "low": times, "high": times}
    return {"rival": name, "allowed": allowed, "times_the_winner": ratio, "quality": {"drop": 0.0}, "job_seconds": 60}


@pytest.mark.parametrize(
    ("share", "drop", "broken", "missing"),
    [(1.0, 0.0, 1.2, set()), (0.7, 0.0, 1.2, {"share"}), (1.0, 0.05, 1.2, {"share"}), (1.0, 0.0, 0.9, {"speed"})],
)
def test_a_case_holds_with_most_of_the_work_in_int8_at_the_speed_of_what_is_broken(
    museum: SimpleNamespace, share: float, drop: float, broken: float, missing: set[str]
) -> None:
    """A faster recipe that loses too much is what has to be reached; one that loses nothing does not count."""
    rows = [row("enginesmith", 1, allowed=True), row("lossy", broken, allowed=False), row("slow", 0.5, allowed=True)]
    case = next(iter(museum.museum.CASES.values()))
    run = SimpleNamespace(winner="other", variants=[variant("a", share, drop), variant("b", 1.0, 0.0, "failed")])
    judged = museum.museum._judge(case, {"rows": rows}, run)
    assert {name for name, held in judged["held"].items() if not held} == missing
    assert judged["holds"] == (not missing)


def test_a_variant_that_the_search_dropped_for_its_loss_is_not_the_best(museum: SimpleNamespace) -> None:
    """Nothing was measured of either; the reason tells that the one loses too much, and the other is just slow."""
    quality = variant("a", 1.0, 0.05).quality
    assert quality is not None
    reasons = {"lossy": explain_drop([quality], 0.01), "slow": "openvino-fp32 is 1.5× faster"}
    shares = {"lossy": 1.0, "slow": 0.85}
    known = [
        variant(name, shares[name], 0.0, "skipped").model_copy(update={"quality": None, "reason": reason})
        for name, reason in reasons.items()
    ]
    case = next(iter(museum.museum.CASES.values()))
    run = SimpleNamespace(winner="openvino-fp32", variants=known)
    assert museum.museum._judge(case, {"rows": [row("enginesmith", 1, allowed=True)]}, run)["variant"] == "slow"


def test_the_report_says_what_stands_in_the_way_and_lists_all_commands(museum: SimpleNamespace) -> None:
    def judged(name: str, command: str) -> dict[str, Any]:
        held = {"loss": True, "share": False}
        known = {"winner_variant": "w", "variant": "", "share": 0.0, "times_the_broken": None, "held": held}
        rows = [row("enginesmith", 1, allowed=True) | {"quality": {"baseline": 0.9, "drop": 0.0}}]
        about = {"model": name, "cause": "c", "machine": "m", "command": command, "max_drop": 0.01, "failures": {}}
        return {"rows": rows, "holds": False, "failed": ["x: it failed"], **known, **about}

    cases = [judged("gru", "one"), judged("lstm", "two"), judged("detector", "one")]
    lines = list(museum.museum._lines({"cases": cases}))
    assert f"- **gru**: share. {museum.museum.CASES['gru'].obstacle}. x: it failed." in lines
    assert "- **lstm**: share. x: it failed." in lines
    assert lines[-2:] == ["- `one`", "- `two`"]


def test_outliers_leave_the_answers_as_they_were(museum: SimpleNamespace) -> None:
    """A layer of a transformer: exactly behind normalizations and values, nearly behind the curve."""
    torch.manual_seed(0)
    layer = museum.attention.Layer(64, 16).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        before = layer(x)
        museum.harden._outliers(layer)
        hidden = layer.mlp[0](layer.norm2(x)).abs().amax((0, 1))
        assert (layer(x) - before).abs().max() < 0.05
    assert hidden.max() > 20 * hidden.median()


@pytest.mark.parametrize(("before", "after", "back"), [(0.8, 0.95, 0.75), (0.8, 0.8, 0.0), (1.0, 1.0, None)])
def test_what_training_brought_back_is_a_share_of_what_was_lost(
    museum: SimpleNamespace, before: float, after: float, back: float | None
) -> None:
    trained = RECOVERY.model_copy(update={"teacher": 1.0, "before": before, "after": after})
    record = variant("openvino-int8-qat", 1.0, 0.02).model_copy(update={"recovery": (trained,)})
    found = museum.training.describe(record)
    assert found["back"] == (None if back is None else pytest.approx(back))
    assert (found["drop"], found["steps"], found["batch"]) == (0.02, 20, 64)
