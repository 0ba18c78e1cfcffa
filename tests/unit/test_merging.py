"""Several plans as one list of steps, and steps put where their target is."""

from typing import Any

import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.onnxruntime.tensorrt import OnnxRuntimeTensorRT
from enginesmith.pipeline.execution.events import Outcome
from enginesmith.pipeline.execution.merge import assign_machines, deduplicate_steps
from enginesmith.pipeline.planning.plan import LATENCY, LOAD, REFERENCE, Plan
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.system.device import unavailable

H100, L4 = Place("cuda", "H100"), Place("cuda", "L4")


def planned(**values: Any) -> Plan:
    return plan(resolve_recipe(make({"model": "digits", **values})))


def names(plans: dict[str, Plan]) -> set[str]:
    return {step.id for step in deduplicate_steps(plans).steps}


def test_one_plan_stays_as_it_is() -> None:
    only = planned()
    assert deduplicate_steps({"only": only}).steps == only.steps


def test_engines_of_a_plan_share_what_is_the_same_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnnxRuntimeTensorRT, "available", lambda _: unavailable("no libnvinfer", "install it"))
    engines = ["onnxruntime", "onnxruntime_tensorrt", "tensorrt"]
    only = planned(engines=engines, device="cuda", precisions=["int8"], synthetic_calibration=True)
    together = deduplicate_steps({"only": only})
    known = {step.id: step for step in together.steps}
    rankings = {name for name in known if name.startswith("sensitivity")}
    assert rankings == {"sensitivity-int8-asymmetric-w8", "sensitivity-int8-symmetric-w8"}
    assert all(known.keys() >= set(step.sources) for step in together.steps)
    assert known["build-onnxruntime_tensorrt-int8"].unavailable == "no libnvinfer"  # a resume elsewhere builds it
    assert not known["build-onnxruntime-int8"].unavailable


def test_what_two_plans_share_is_one_step() -> None:
    first, second = planned(), planned(precisions=["int8"], quantization={"search_steps": 1})
    found = names({"first": first, "second": second})
    assert {"first/load", "first/reference", "first/export"} <= found
    assert not {"second/load", "second/reference", "second/export"} & found
    assert "second/build-onnxruntime-int8" in found
    assert {"first/latency", "second/latency"} <= found


def test_what_differs_in_anything_before_it_is_not_shared() -> None:
    found = names({"first": planned(), "second": planned(seed=1)})
    assert {f"{name}/export" for name in ("first", "second")} <= found


def test_steps_in_different_places_are_two() -> None:
    plans = {
        "h100": assign_machines(planned(device="cuda"), H100, ""),
        "l4": assign_machines(planned(device="cuda"), L4, ""),
    }
    found = names(plans)
    assert "l4/export" not in found
    assert {"h100/build-onnxruntime-fp32", "l4/build-onnxruntime-fp32", "h100/latency", "l4/latency"} <= found


def test_needs_lead_to_the_shared_steps() -> None:
    together = deduplicate_steps({"first": planned(), "second": planned(precisions=["fp16"])})
    known = set()
    for step in together.steps:
        assert set(step.sources) <= known, step.id
        known.add(step.id)
    assert together.shared_step("second", LATENCY).inputs["reference"] == "first/reference"


def test_histories_and_logs_name_steps_as_their_own_plan_does() -> None:
    together = deduplicate_steps({"first": planned(), "second": planned(seed=1)})
    assert together.shared_step("second", "export").name == "export"


def test_outcomes_come_back_under_each_plans_own_names(tmp_path: Any) -> None:
    together = deduplicate_steps({"first": planned(), "second": planned(precisions=["fp16"])})
    made = Artifact(kind="torch", path=tmp_path / "model", sha256="0", bytes=1)
    outcome = Outcome("first/load", "done", made)
    apart = together.by_plan({"first/load": outcome})
    assert {name: found[LOAD].step for name, found in apart.items()} == {"first": LOAD, "second": LOAD}
    assert together.combine({"second": apart["second"]}) == {"first/load": outcome}


def test_what_measures_or_runs_on_the_target_is_put_there() -> None:
    steps = {step.id: step for step in assign_machines(planned(device="cuda"), H100, "").steps}
    anywhere = {name for name, step in steps.items() if step.place is None}
    assert {LOAD, REFERENCE, "export", "simplify", "verify-export", "verify-simplify"} <= anywhere
    there = {"build-onnxruntime-fp32", "verify-onnxruntime-fp32", "memory-onnxruntime-fp32", "memory-eager", LATENCY}
    assert not there & anywhere


def test_on_a_cpu_what_is_built_for_the_machine_stays_there() -> None:
    steps = {step.id: step for step in assign_machines(planned(), Place(), "").steps}
    there = {name for name, step in steps.items() if step.place}
    assert {"build-onnxruntime-fp32", "verify-onnxruntime-fp32", "quality-onnxruntime-fp32", LATENCY} <= there
    assert "export" not in there


def test_an_engine_built_ahead_of_time_is_built_anywhere() -> None:
    recipe = make({"model": "digits", "engines": ["tensorrt_rtx"], "targets": ["sm86"], "device": "cuda"})
    made = plan(resolve_recipe(recipe), here=False)
    steps = {step.id: step for step in assign_machines(made, H100, "there is none").steps}
    assert steps["build-tensorrt_rtx-fp32-sm86"].place is None
    assert not steps["build-tensorrt_rtx-fp32-sm86"].unavailable
    assert steps["verify-tensorrt_rtx-fp32-sm86"].unavailable == "there is none"


def test_a_target_that_nobody_has_is_said_of_steps_and_variants() -> None:
    made = assign_machines(planned(device="cuda"), H100, "no node has a GPU of type H100")
    steps = {step.id: step for step in made.steps}
    assert steps["build-onnxruntime-fp32"].unavailable == "no node has a GPU of type H100"
    assert not steps["export"].unavailable
    assert {variant.unavailable for variant in made.variants} == {"no node has a GPU of type H100"}
