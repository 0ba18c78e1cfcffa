"""Plans with other precisions: which steps, in which order, shared by which variants."""

from collections.abc import Callable
from typing import Any

import pytest

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.execution.local import LocalExecutor
from enginesmith.pipeline.execution.scheduler import Runner
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.quantize.precisions import Placement
from enginesmith.pipeline.passes.quantize.search import Candidate, GroupFact, Trial, best, propose
from enginesmith.pipeline.planning.plan import Plan, Step
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.single_stages import precision_steps
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.tasks.load import Shapes
from enginesmith.pipeline.tasks.mixed_precision import assignment


def planned(**values: Any) -> Plan:
    return plan(resolve_recipe(make({"model": "digits", **values})))


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
    steps = {one.id: one for one in planned(precisions=["int8"], quantisation={"equalise": True, "smooth": 0.5}).steps}
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
        precision_steps(resolve_recipe(make({"model": "digits", "precisions": ["int8", "fp16"]})))
    with pytest.raises(UsageError, match="0 graphs"):
        precision_steps(resolve_recipe(make({"model": "digits", "precisions": ["fp32"]})))


def test_a_graph_for_tensorrt_needs_no_target() -> None:
    recipe = make({"model": "digits", "precisions": ["fp16"], "engines": ["tensorrt_rtx"]})
    assert precision_steps(resolve_recipe(recipe))[1].graph == "precision-fp16"


def test_a_plan_with_a_hole_is_an_error_and_no_endless_wait(tmp_path: Any) -> None:
    step = Step("lonely", Shapes(ranges={}, batches=(1,)), {"model": "nowhere"})
    runner = Runner(LocalExecutor(Store(tmp_path / "store"), 1), lambda step: tmp_path / f"{step.id}.log")
    with pytest.raises(ValueError, match="nowhere"):
        runner.run([step])


Judge = Callable[[Candidate], tuple[bool, float, float | None]]
METHODS = ("mse", "minmax")


def groups(*sensitivities: float, macs: tuple[int, ...] = (), kinds: tuple[str, ...] = ()) -> list[GroupFact]:
    return [
        GroupFact(
            name=f"g{index}",
            module="",
            kind=kinds[index] if kinds else "Conv",
            macs=macs[index] if macs else 100,
            sqnr_db=sqnr,
        )
        for index, sqnr in enumerate(sensitivities)
    ]


def run(
    facts: list[GroupFact], judge: Judge, methods: tuple[str, ...] = METHODS, keep: tuple[str, ...] = ()
) -> list[Trial]:
    """The whole search: each candidate judged by (passed, error, speed-up)."""
    trials: list[Trial] = []
    while candidate := propose(trials, facts, methods, frozenset(keep)):
        passed, error, speedup = judge(candidate)
        trials.append(
            Trial(
                phase=candidate.phase,
                method=candidate.method,
                kept=tuple(sorted(candidate.kept)),
                why=candidate.why,
                passed=passed,
                error=error,
                speedup=speedup,
            )
        )
        assert len(trials) < 50
    return trials


def needs(*names: str) -> Judge:
    return lambda candidate: (set(names) <= candidate.kept, float(len(set(names) - candidate.kept)), None)


def test_one_trial_where_everything_can_be_quantised() -> None:
    trials = run(groups(30, 20, 10), lambda candidate: (True, 0.0, None))
    assert [(trial.phase, trial.kept) for trial in trials] == [("everything", ())]


def test_other_methods_are_tried_before_anything_is_kept() -> None:
    facts = groups(30, 20, 10)
    trials = run(facts, lambda candidate: (candidate.method == "minmax", 1.0, None))
    found = best(trials, facts)
    assert (found.method, found.kept) == ("minmax", ())


def test_the_best_method_is_gone_on_with() -> None:
    facts = groups(30, 20, 10)
    trials = run(facts, lambda one: (bool(one.kept), 1.0 if one.method == "minmax" else 2.0, None))
    assert trials[-1].method == "minmax"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 30])
def test_no_more_groups_are_kept_than_needed(count: int) -> None:
    facts = groups(*range(30))
    worst = {f"g{index}" for index in range(count)}
    trials = run(facts, needs(*worst))
    found = best(trials, facts)
    assert set(found.kept) == worst
    assert len(trials) <= 16


def test_work_is_given_back() -> None:
    facts = groups(1, 2, 3, 30, 40, macs=(10, 1000, 10, 10, 10))
    trials = run(facts, needs("g0", "g2"))
    found = best(trials, facts)
    assert (found.phase, found.kept) == ("give back", ("g0", "g2"))


def test_speed_is_looked_at_after_nothing_could_be_given_back() -> None:
    facts = groups(1, 2, 30, 31, macs=(10, 1000, 10, 100), kinds=("Conv", "Conv", "Gemm", "Conv"))
    trials = run(facts, lambda one: ({"g0", "g1"} <= one.kept, 1.0, 2.0 if "g2" in one.kept else 1.0))
    assert trials[-1].phase == "speed"


def test_a_kind_that_loses_stays_in_floating_point() -> None:
    facts = groups(20, 20, 20, macs=(1000, 10, 500), kinds=("Conv", "depthwise Conv", "Gemm"))
    speeds = {frozenset(): 1.5, frozenset({"g1"}): 1.8, frozenset({"g1", "g2"}): 1.7}
    trials = run(facts, lambda candidate: (True, 0.0, speeds[candidate.kept]))
    found = best(trials, facts)
    assert found.kept == ("g1",)


def test_a_gain_within_the_noise_keeps_nothing() -> None:
    facts = groups(20, 20, macs=(1000, 10), kinds=("Conv", "depthwise Conv"))
    trials = run(facts, lambda candidate: (True, 0.0, 1.5 if not candidate.kept else 1.51))
    found = best(trials, facts)
    assert found.kept == ()


def test_what_the_user_keeps_is_kept_throughout() -> None:
    trials = run(groups(30, 20, 10), needs("g2", "g0"), keep=("g0",))
    assert all("g0" in trial.kept for trial in trials)
    assert trials[-1].passed


def test_nothing_passes() -> None:
    facts = groups(30, 20, 10)
    trials = run(facts, lambda candidate: (False, 1.0, None))
    assert best(trials, facts) is None
    assert set(trials[-1].kept) == {"g0", "g1", "g2"}


@pytest.mark.parametrize(("placement", "rest"), [("inputs", "fp16"), ("inputs+outputs", "fp32")])
def test_what_has_no_form_goes_with_the_rest(placement: Placement, rest: str) -> None:
    facts = [GroupFact(name="attention", module="", kind="Attention", macs=1, sqnr_db=None, reason="stays whole")]
    step = Precision(precision="int4-weights", placement=placement)
    (entry,) = assignment(facts, (), "mse", step, {})
    assert (entry["precision"], entry["why"]) == (rest, "stays whole")
