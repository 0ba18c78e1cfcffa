"""Plans with other precisions: which steps, in which order, shared by which variants."""

from typing import Any

import pytest

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.execution.local import LocalExecutor
from enginesmith.pipeline.execution.scheduler import Runner
from enginesmith.pipeline.planning.plan import Plan, Step
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.stages import precision_steps
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.tasks.load import Shapes


def planned(**values: Any) -> Plan:
    return plan(make({"model": "digits", **values}))


def ids(found: Plan) -> list[str]:
    return [step.id for step in found.steps]


@pytest.mark.parametrize(
    "values",
    [
        {"precisions": ["fp32", "fp16", "bf16", "int8", "int8+fp16", "int8-dynamic", "fp8", "int4-weights"]},
        {"precisions": ["int8"], "quantisation": {"equalise": True, "smooth": 0.5}},
        {"precisions": ["int4-weights"], "quantisation": {"awq": True}, "budgets": {"max_drop": 0.01}},
        {"precisions": ["int8"], "engines": ["onnxruntime", "tensorrt_rtx"], "targets": ["sm86", "sm89"]},
        {"precisions": ["fp32", "int8"], "graph_optimization": ["basic", "all"], "budgets": {"max_drop": 0.01}},
    ],
)
def test_each_step_comes_once_and_after_what_it_needs(values: dict[str, Any]) -> None:
    found = planned(**values)
    assert len(set(ids(found))) == len(found.steps)
    seen: set[str] = set()
    for step in found.steps:
        assert set(step.sources) <= seen, step.id
        seen.add(step.id)


def test_variants_share_calibration_and_the_float_engine() -> None:
    found = ids(planned(precisions=["fp32", "int8", "int8+fp16"]))
    assert found.count("calibrate") == 1
    assert found.count("build-onnxruntime-fp32") == 1


def test_each_engine_has_its_own_placement_and_search() -> None:
    found = ids(planned(precisions=["int8"], engines=["onnxruntime", "tensorrt_rtx"], targets=["sm86", "sm89"]))
    made = [name for name in found if name.startswith("precision-")]
    assert made == ["precision-int8-onnxruntime", "precision-int8-tensorrt_rtx"]


def test_statistics_are_taken_again_after_the_float_graph_was_changed() -> None:
    steps = {
        step.id: step for step in planned(precisions=["int8"], quantisation={"equalise": True, "smooth": 0.5}).steps
    }
    made = steps["precision-int8-onnxruntime"]
    assert made.inputs["model"] == steps[made.inputs["ranges"]].inputs["model"]
    assert made.inputs["model"] not in ("simplify", "export")


def test_the_metric_is_searched_for_only_with_a_budget() -> None:
    with_budget = planned(precisions=["int8"], budgets={"max_drop": 0.01})
    without = planned(precisions=["int8"])
    needs = [next(s for s in one.steps if s.id.startswith("search-")).inputs for one in (with_budget, without)]
    assert ["baseline" in one for one in needs] == [True, False]


def test_static_precisions_need_data_or_the_word() -> None:
    with pytest.raises(UsageError, match="int8 needs calibration data"):
        make({"model": "resnet50", "precisions": ["int8"]})
    make({"model": "resnet50", "precisions": ["int8"], "synthetic_calibration": True})
    make({"model": "resnet50", "precisions": ["fp16", "int8-dynamic"]})


def test_one_graph_at_a_time_is_written() -> None:
    with pytest.raises(UsageError, match="2 graphs"):
        precision_steps(make({"model": "digits", "precisions": ["int8", "fp16"]}))
    with pytest.raises(UsageError, match="0 graphs"):
        precision_steps(make({"model": "digits", "precisions": ["fp32"]}))


def test_a_graph_for_tensorrt_needs_no_target() -> None:
    made = precision_steps(make({"model": "digits", "precisions": ["fp16"], "engines": ["tensorrt_rtx"]}))[1]
    assert made.graph == "precision-fp16"


def test_a_plan_with_a_hole_is_an_error_and_no_endless_wait(tmp_path: Any) -> None:
    step = Step("lonely", Shapes(ranges={}, batches=(1,)), {"model": "nowhere"})
    runner = Runner(LocalExecutor(Store(tmp_path / "store"), 1), lambda step: tmp_path / f"{step.id}.log")
    with pytest.raises(ValueError, match="nowhere"):
        runner.run([step])
