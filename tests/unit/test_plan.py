"""The plan: shared prefixes, checks before measurements, and identities that tell tasks apart."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from enginesmith import cli
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.execution.events import Outcome, Outcomes
from enginesmith.pipeline.execution.local import Gpus, LocalExecutor
from enginesmith.pipeline.execution.scheduler import Runner
from enginesmith.pipeline.frameworks import source
from enginesmith.pipeline.planning.plan import REFERENCE, Step
from enginesmith.pipeline.planning.planner import Plan, plan
from enginesmith.pipeline.planning.single_stages import benchmark_plan, choose_baseline
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import machine
from enginesmith.pipeline.tasks.measure import Quality
from enginesmith.pipeline.tasks.verify import Sample, Verify


def planned(**values: Any) -> Plan:
    return plan(resolve_recipe(make({"model": "digits", **values})))


def test_every_step_comes_after_what_it_takes() -> None:
    known: set[str] = set()
    for step in planned(engines=["onnxruntime", "compiled"], graph_optimization=["all", "basic"]).steps:
        assert set(step.sources) <= known
        assert step.id not in known
        known.add(step.id)


def test_variants_share_everything_up_to_the_build() -> None:
    ids = [step.id for step in planned(graph_optimization=["all", "basic"]).steps]
    assert ids.count("export") == ids.count("simplify") == ids.count("reference") == 1
    assert {"build-onnxruntime-fp32", "build-onnxruntime-fp32-basic"} <= set(ids)


def test_nothing_is_measured_before_it_is_verified() -> None:
    by_id = {step.id: step for step in planned().steps}
    assert by_id["memory-onnxruntime-fp32"].inputs["verified"] == "verify-onnxruntime-fp32"
    assert by_id["latency"].optional_inputs["onnxruntime-fp32 verified"] == "verify-onnxruntime-fp32"
    assert {"verify-export", "verify-simplify"} <= set(by_id["verify-onnxruntime-fp32"].inputs.values())


@pytest.mark.parametrize(("tf32", "row"), [(True, "tf32"), (False, "fp32")])
def test_an_engine_is_held_to_the_arithmetic_that_it_may_use(tf32: bool, row: str) -> None:
    engines = {"engines": ["onnxruntime", "tensorrt_rtx"], "targets": ["sm86"], "tensorrt": {"tf32": tf32}}
    checks = {step.id: step.task for step in planned(**engines).steps if isinstance(step.task, Verify)}
    rows = {name: task.precision for name, task in checks.items()}
    assert rows.pop("verify-tensorrt_rtx-fp32-sm86") == row
    assert rows == dict.fromkeys(("verify-export", "verify-simplify", "verify-onnxruntime-fp32"), "fp32")


def test_engines_of_modules_need_no_graph() -> None:
    steps = planned(engines=["compiled"])
    assert "export" not in [step.id for step in steps.steps]
    assert [variant.artifact for variant in steps.variants] == ["load"]


FORMS = [
    ({"precisions": ["fp32", "fp16", "int8"]}, ["eager-fp16", "compiled-fp32", "compiled-fp16"]),
    ({"precisions": ["int8"]}, ["compiled-fp32"]),
    ({"eager": {"tf32": True}}, ["eager-tf32", "compiled-tf32"]),
    (
        {"eager": {"tf32": True, "cuda_graphs": True}, "precisions": ["fp32", "bf16"]},
        ["eager-tf32-graphs", "eager-bf16-graphs", "compiled-tf32-graphs", "compiled-bf16-graphs"],
    ),
]


@pytest.mark.parametrize(("values", "ids"), FORMS)
def test_a_module_is_cast_for_the_engines_that_run_it(values: dict[str, Any], ids: list[str]) -> None:
    """Plain eager is the baseline, whatever is asked of the others."""
    found = planned(engines=["eager", "compiled"], synthetic_calibration=True, **values)
    assert [variant.id for variant in found.variants] == ids
    assert found.baseline.engine == Eager()
    checks = {step.id: step.task for step in found.steps if isinstance(step.task, Verify)}
    for variant in found.variants:
        assert (variant.artifact, variant.id.split("-")[1]) == ("load", variant.engine.arithmetic)
        assert checks[variant.verified[0]].precision == variant.engine.arithmetic


def test_tf32_of_onnxruntime_is_held_to_its_own_thresholds() -> None:
    found = planned(onnxruntime={"tf32": True})
    check = next(step.task for step in found.steps if step.id == "verify-onnxruntime-fp32")
    assert isinstance(check, Verify)
    assert check.precision == "tf32"
    assert check.engine.tf32  # type: ignore[attr-defined]


def benchmarked(*models: str, **values: Any) -> Plan:
    recipe, others = choose_baseline(make({"model": models[0], **values}), models)
    return benchmark_plan(recipe, others, "now")


def test_a_benchmark_takes_the_module_in_other_forms_too() -> None:
    found = benchmarked("digits", "resnet18", engines=["eager", "compiled"], precisions=["fp16"])
    assert [variant.id for variant in found.variants] == ["resnet18", "eager-fp16", "compiled-fp16"]
    by_id = {step.id: step for step in found.steps}
    assert by_id["latency"].optional_inputs["eager-fp16 verified"] == "verify-eager-fp16"
    assert by_id["memory-compiled-fp16"].inputs["verified"] == "verify-compiled-fp16"
    assert [variant.id for variant in benchmarked("digits").variants] == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"precisions": ["fp16"]}, "--precision fp16 has no effect"),
        ({"engines": ["eager"], "precisions": ["fp32", "int8"]}, "--precision int8 has no effect"),
        ({"engines": ["compiled"], "model": "m.onnx"}, "compiled runs a PyTorch module, and .*m.onnx is an ONNX file"),
    ],
)
def test_what_a_benchmark_cannot_cast_is_refused(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    onnx.save(helper.make_model(helper.make_graph([], "g", [value], [value])), tmp_path / "m.onnx")
    model = values.pop("model", None)
    with pytest.raises(UsageError, match=said) as caught:
        benchmarked(str(tmp_path / model) if model else "digits", synthetic_calibration=True, **values)
    assert caught.value.remedy


def test_an_onnx_file_is_held_against_itself(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    onnx.save(helper.make_model(helper.make_graph([], "g", [value], [value])), tmp_path / "m.onnx")
    steps = planned(model=str(tmp_path / "m.onnx"))
    assert steps.baseline.id == "source"
    assert "export" not in [step.id for step in steps.steps]
    for engine in ("compiled", "eager"):
        with pytest.raises(UsageError, match=engine):
            planned(model=str(tmp_path / "m.onnx"), engines=[engine])


def test_identities_differ_where_results_may(tmp_path: Path) -> None:
    def identity(step: str, **values: Any) -> Any:
        return next(one.task.identity for one in planned(**values).steps if one.id == step)

    assert identity("export") == identity("export", batch=[4])
    assert identity("export") != identity("export", export={"opset": 20})
    assert identity("load") != identity("load", seed=1)
    assert identity("reference") != identity("reference", batch=[4])
    assert identity("latency") != identity("latency", threads=1)
    assert identity("memory-eager") != identity("memory-onnxruntime-fp32")


def test_the_place_of_a_source_is_not_part_of_its_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identities = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.py").write_text("")
        monkeypatch.chdir(tmp_path / name)
        identities.append(planned(model="net.py:build").steps[0].task)
    assert identities[0].identity == identities[1].identity
    assert identities[0].place != identities[1].place


def test_measurements_have_the_machine_to_themselves(tmp_path: Path) -> None:
    steps = {step.id: step for step in planned(graph_optimization=["all", "basic"]).steps}
    executor = LocalExecutor(Store(tmp_path / "store"), 4)
    measuring, build, other = (
        steps[name] for name in ("memory-eager", "build-onnxruntime-fp32", "build-onnxruntime-fp32-basic")
    )
    assert executor.can_start(measuring, [])
    assert executor.can_start(build, [other])
    assert not executor.can_start(measuring, [build])
    assert not executor.can_start(build, [measuring])


def test_several_gpus_measure_at_the_same_time(tmp_path: Path) -> None:
    steps = {step.id: step for step in planned(engines=["onnxruntime", "compiled"], device="cuda").steps}
    executor = LocalExecutor(Store(tmp_path / "store"), 2, Gpus(2))
    one, other, third = (steps[f"memory-{name}"] for name in ("eager", "onnxruntime-fp32", "compiled-fp32"))
    export, build = steps["export"], steps["build-onnxruntime-fp32"]
    assert executor.can_start(one, [other])
    assert not executor.can_start(third, [one, other])
    assert executor.can_start(export, [one, other])
    assert executor.can_start(build, [one])
    assert not executor.can_start(build, [one, other])


def test_without_labelled_data_fidelity_is_judged_on_data_that_calibration_leaves(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 3, 224, 224), np.float32))
    tasks = [
        next(step.task for step in planned(**{"model": "resnet18", **values}).steps if step.id == REFERENCE)
        for values in ({}, {"calibration": str(tmp_path / "data.npz")}, {"model": "digits", "calibration": "digits"})
    ]
    assert all(isinstance(task, Sample) for task in tasks)
    assert [task.held_out is not None for task in tasks if isinstance(task, Sample)] == [False, True, False]


@pytest.mark.parametrize(
    ("values", "largest"),
    [({}, (32, 32, 1)), ({"shapes": {"batch": "1:8:16"}}, (16, 16, 16)), ({"batch": [1, 64]}, (64, 64, 64))],
)
def test_quality_is_judged_in_batches_that_engines_take(values: dict[str, Any], largest: tuple[int, ...]) -> None:
    engines = {"engines": ["onnxruntime", "tensorrt_rtx"], "targets": ["sm86"]}
    tasks = [step.task for step in planned(**{"batch": [1], **engines, **values}).steps]
    assert tuple(task.largest_batch for task in tasks if isinstance(task, Quality)) == largest


def test_a_run_looks_at_model_and_machine_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    def count(function: Any) -> None:
        def counted(*args: Any) -> Any:
            calls.append(function.__name__)
            return function(*args)

        for module in [module for name, module in sys.modules.items() if name.startswith("enginesmith.")]:
            if getattr(module, function.__name__, None) is function:
                monkeypatch.setattr(module, function.__name__, counted)

    def fail(self: Runner, steps: Sequence[Step], given: Outcomes, on_new: Callable[[Outcomes], object]) -> Outcomes:
        outcomes = {step.id: Outcome(step.id, "failed", error=ModelError("it is a test")) for step in steps}
        on_new(outcomes)
        return outcomes

    monkeypatch.setattr(Runner, "run", fail)
    for function in (source.resolve, machine.environment):
        count(function)
    monkeypatch.chdir(tmp_path)
    options = ["--engine", "onnxruntime", "--precision", "int8", "--prune", "30%", "--store", str(tmp_path / "store")]
    result = CliRunner().invoke(cli.main, ["optimize", "digits", "--quiet", *options])
    assert isinstance(result.exception, ModelError) or "it is a test" in result.output
    assert list(tmp_path.glob("runs/digits-*/run.json"))
    assert sorted(calls) == ["environment", "resolve"]
