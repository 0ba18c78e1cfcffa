"""A search from data and a time alone: variants race, and what was not tried is continued by resume."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from enginesmith import load
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.planning import race
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.results.package.package import package
from enginesmith.pipeline.workflows import optimize as workflow
from enginesmith.pipeline.workflows.optimize import optimize, resume
from enginesmith.pipeline.workflows.request import is_finished

pytestmark = pytest.mark.thorough
_RECIPE = {
    "model": "digits",
    "engines": ["onnxruntime", "openvino"],
    "precisions": ["fp32", "int8"],
    "data": "digits",
    "budgets": {"max_drop": 0.05},
    "time_seconds": 900,
    "quantization": {"search_steps": 2},
    "batch": [1],
    "threads": 1,
    "measure": {"seconds": 1},
    "prosecute_seconds": 0,
}


@pytest.fixture
def settings(store: Path) -> Settings:
    """Settings with the session's store: a step of one test is not done again in another."""
    return Settings(store=store)


def test_variants_race_and_the_fastest_are_measured_in_full(tmp_path: Path, settings: Settings) -> None:
    run = optimize(make(_RECIPE), tmp_path / "run", settings)
    raced = [record for record in run.requested if record.race]
    assert len(run.requested) == len(raced) == 4
    measured = {record.id for record in run.requested if record.status == "measured"}
    assert 1 <= len(measured) <= 3
    assert run.winner in {run.baseline.id, *measured}
    assert "onnxruntime-fp32" in measured or "openvino-fp32" in measured
    for record in run.requested:
        assert bool(record.dropped) == (record.id not in measured)
        assert record.dropped in record.reason
    assert is_finished(run, tmp_path / "run")
    again = optimize(make(_RECIPE), tmp_path / "again", settings)
    assert all(step.cached for step in again.steps if step.status == "done")
    assert again.winner == run.winner
    vector = tmp_path / "again" / "test_vector.npz"
    vector.unlink()
    assert not is_finished(again, tmp_path / "again")
    resume(tmp_path / "again", settings)
    assert vector.is_file()


def test_what_cannot_pay_is_not_made(tmp_path: Path, settings: Settings) -> None:
    found = {name: value for name, value in _RECIPE.items() if name not in ("engines", "precisions")}
    run = optimize(make({**found, "time_seconds": 300}), tmp_path / "run", settings)
    records = {record.id: record for record in run.requested}
    assert "multiply-adds have a form in int8-dynamic" in str(records["onnxruntime-int8-dynamic"].reason)
    assert records["onnxruntime-int8-dynamic"].status == "skipped"
    for name in ("compiled-fp32", "aotinductor-fp32"):
        disturbed = any(row.disturbed for row in records[name].race)  # other programs ran, so that nothing is known
        assert disturbed or "faster" in records[name].dropped  # on a busy machine, some are made before that is sure
    assert run.winner


@pytest.mark.parametrize("allowed", [0.05, 0.95])
def test_of_a_pruned_module_that_loses_too_much_no_variant_is_made(
    allowed: float, tmp_path: Path, settings: Settings
) -> None:
    """Without training, half of digits is worth little: it loses 0.6."""
    found = {"variants": "found", "engines": ["onnxruntime"], "precisions": ["fp32"], "prune": ["macs=-50%"]}
    recipe = make({**_RECIPE, **found, "budgets": {"max_drop": allowed}})
    run = optimize(recipe, tmp_path / "run", settings)
    dense, pruned = run.requested
    steps = {step.id for step in run.steps if step.status == "done"}
    assert "prune-macs50" in steps
    assert ("export-prune-macs50" in steps) == (allowed > 0.5)
    assert dense.status == "measured"
    if allowed < 0.5:
        assert pruned.dropped.startswith("its accuracy on the samples for choosing: the drop of 0.")
        assert pruned.reason == f"dropped: {pruned.dropped}"
    else:
        assert pruned.status == "measured"
        assert pruned.quality is not None
        assert pruned.quality.drop > 0.3
    assert is_finished(run, tmp_path / "run")


def test_what_no_time_was_left_for_is_tried_by_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lossless variant is made all the same, so that there is a result; what the store has takes no time."""
    settings, out = Settings(store=tmp_path / "store"), tmp_path / "run"
    recipe = make({**_RECIPE, "engines": ["onnxruntime"]})
    with monkeypatch.context() as patch:
        patch.setattr(race, "_JUDGING", 1.0)  # all of the time is kept for measuring
        run = optimize(recipe, out, settings)
    assert run.winner == "onnxruntime-fp32"
    assert [record.id for record in run.requested if not record.untried] == [run.winner]
    run = resume(out, settings)
    assert run.winner
    assert not any(record.untried for record in run.requested)


def test_where_no_onnx_graph_is_right_a_variant_without_one_is_made_after_the_time_of_the_search(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX has no Bessel functions."""
    net = """
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)
def build():
    return Net(), (torch.rand(2, 8),)
"""
    (tmp_path / "net.py").write_text(net)
    monkeypatch.setattr(workflow, "searching_seconds", lambda recipe: 0.0)
    asked = {
        "variants": "found",
        "engines": ["onnxruntime", "compiled"],
        "time_seconds": 120,
        "batch": [2],
        "threads": 1,
        "measure": {"seconds": 1},
    }
    recipe = make({"model": f"{tmp_path / 'net.py'}:build", "prosecute_seconds": 0, **asked})
    run = optimize(recipe, tmp_path / "run", settings)
    ends = {record.id: record.status for record in run.requested}
    assert ends == {"onnxruntime-fp32": "failed", "compiled-fp32": "measured"}


def test_a_variant_that_failed_is_loaded_and_packaged_by_its_name(tmp_path: Path, settings: Settings) -> None:
    """Its engine was built, and not tuned."""
    asked = {
        name: _RECIPE[name]
        for name in ("model", "data", "precisions", "batch", "threads", "measure", "prosecute_seconds")
    }
    asked |= {"quantization": {"quantizers": ["nncf"]}}
    recipe = make({**asked, "engines": ["onnxruntime"], "time_seconds": 900, "min_sqnr_db": 80})
    out, failed = tmp_path / "run", "onnxruntime-int8-nncf"
    run = optimize(recipe, out, settings)
    assert {record.id: record.status for record in run.requested} == {"onnxruntime-fp32": "measured", failed: "failed"}
    with pytest.warns(UserWarning, match=f"{failed}: it failed"), load(out, failed) as model:
        assert model(np.zeros((1, 1, 8, 8), np.float32)).shape == (1, 10)
    made = package(out, "bundle", tmp_path / "bundle", failed)
    assert any(caution.startswith("it failed in the run") for caution in made.cautions)
    shutil.rmtree(out / "variants" / failed)
    with pytest.warns(UserWarning, match="it failed"), pytest.raises(ModelError, match=r"missing(?s:.*)resume"):
        load(out, failed)
    resume(out, settings)
    with pytest.warns(UserWarning, match="it failed"), load(out, failed) as model:
        assert model.variant == failed
