"""The plan: shared prefixes, checks before measurements, and identities that tell tasks apart."""

import contextlib
import os
import queue
import sys
import threading
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
from enginesmith.pipeline.errors import ModelError, StepError, UsageError
from enginesmith.pipeline.execution.events import Outcome, Outcomes
from enginesmith.pipeline.execution.local import Gpus, LocalExecutor
from enginesmith.pipeline.execution.scheduler import Runner
from enginesmith.pipeline.frameworks import source
from enginesmith.pipeline.planning.plan import LATENCY, REFERENCE, Step, is_optional
from enginesmith.pipeline.planning.planner import Plan, load_task, plan, quality_step
from enginesmith.pipeline.planning.single_stages import benchmark_plan, choose_baseline
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import machine, nvidia
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.nvidia import Driver
from enginesmith.pipeline.tasks.build import Build
from enginesmith.pipeline.tasks.load import Load
from enginesmith.pipeline.tasks.measure import VERIFIED
from enginesmith.pipeline.tasks.prosecute import Prosecute
from enginesmith.pipeline.tasks.quality import Quality
from enginesmith.pipeline.tasks.tune import Tune
from enginesmith.pipeline.tasks.verify import Sample, Verify


def planned(**values: Any) -> Plan:
    return plan(resolve_recipe(make({"model": "digits", "engines": ["onnxruntime"], **values})))


@pytest.mark.parametrize(
    ("values", "data"),
    [
        ({}, None),  # the zoo's data, too, is not for a model that brings its own example
        ({"eval_data": "e.npz"}, None),
        ({"inputs": ["image:float32:batch,1,8,8"], "eval_data": "e.npz"}, "e.npz"),
        ({"inputs": ["image:float32:batch,1,8,8"], "data": "d.npz", "eval_data": "e.npz"}, "d.npz"),
        ({"inputs": ["image:float32:batch,1,8,8"], "model": "net.py:build", "calibration": "c.npz"}, "c.npz"),
        ({"inputs": ["raw:uint8:batch,8,8,1"], "prepend": ["nhwc"], "eval_data": "r.npz"}, None),
        ({"model": "hf:.", "eval_data": "e.npz"}, "e.npz"),
        ({"model": "hf:."}, None),
    ],
)
def test_an_example_is_taken_from_data_where_it_would_be_made_up(
    values: dict[str, Any], data: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "net.py"):
        (tmp_path / name).write_text("{}")
    for name in ("c", "d", "e"):
        np.savez(name, image=np.zeros((1, 1, 8, 8), np.float32))
    np.savez("r", raw=np.zeros((1, 8, 8, 1), np.uint8))
    recipe = make({"model": "digits", **values})
    task = load_task(recipe, source.resolve(recipe.model))
    assert isinstance(task, Load)
    assert task.data == data


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ({"model": "net.py:build", "inputs": ["x:float32:batch,time"]}, {"time": 30}),
        ({"model": "hf:.", "inputs": ["x:float32:batch,time"]}, {"time": 30}),
        ({"model": "net.py:build"}, {}),
        ({"model": "hf:."}, {}),
        ({"model": "net.py:build", "inputs": ["x:float32:batch,30"]}, {}),
        ({"model": "hf:.", "inputs": ["x:float32:batch,time"], "eval_data": "e.npz"}, {}),
        ({"inputs": ["image:float32:batch,1,8,time"]}, {}),
    ],
)
def test_ranges_are_part_of_the_loading_where_an_example_may_be_drawn(
    values: dict[str, Any], sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "net.py"):
        (tmp_path / name).write_text("{}")
    np.savez("e", x=np.zeros((1, 8), np.float32))
    recipe = make({"model": "digits", "shapes": {"time": "8:30:64", "batch": "1:4:8"}, **values})
    task = load_task(recipe, source.resolve(recipe.model))
    assert isinstance(task, Load)
    assert task.sizes == sizes


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
    by_id = {step.id: step for step in planned(prosecute_seconds=0).steps}
    assert by_id["memory-onnxruntime-fp32"].inputs["verified"] == "verify-onnxruntime-fp32"
    assert by_id["latency"].optional_inputs["onnxruntime-fp32 verified"] == "verify-onnxruntime-fp32"
    assert {"verify-export", "verify-simplify"} <= set(by_id["verify-onnxruntime-fp32"].inputs.values())


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({}, {"": "load"}),
        ({"sparsity": ["2:4"]}, {"": "load", "-sparse24": "sparsify-sparse24"}),
        ({"sparsity": ["2:4"], "recover": True}, {"": "load", "-sparse24": "recover-sparsify-sparse24"}),
        ({"prune": ["macs=-30%"]}, {"": "load", "-prune-macs30": "prune-macs30"}),
        ({"prune": ["macs=-30%"], "recover": True}, {"": "load", "-prune-macs30": "recover-prune-macs30"}),
    ],
)
def test_a_variant_is_prosecuted_against_the_model_that_it_was_made_from(
    asked: dict[str, Any], given: dict[str, str]
) -> None:
    """A pruned, sparse or trained one answers otherwise than the given model, and is not wrong for that."""
    steps = planned(**asked, calibration="digits", prosecute_seconds=1).steps
    found = {step.id: step.inputs for step in steps if step.id.kind == "prosecute"}
    kinds = {
        step.inputs["given"]: step.task.given_engine.consumes for step in steps if isinstance(step.task, Prosecute)
    }
    assert kinds == {model: "onnx" if "sparsify" in model else "torch" for model in given.values()}
    assert {name: inputs["given"] for name, inputs in found.items()} == {
        f"prosecute-onnxruntime-fp32{change}": model for change, model in given.items()
    }
    for change in given:  # the answers that a bundle brings along are taken from here
        assert found[f"prosecute-onnxruntime-fp32{change}"]["reference"] == f"reference{change}"


def test_what_is_measured_waits_for_the_samples_and_not_for_other_inputs() -> None:
    """Else a search on a busy machine might end with nothing that was measured."""
    found = planned(calibration="digits", prosecute_seconds=1)
    steps = {step.id: step for step in found.steps}
    (variant,) = found.variants
    assert variant.verified[-1] == variant.prosecuted
    memory, latency = steps[variant.memory or ""], steps[LATENCY]
    assert memory.inputs[VERIFIED] == latency.optional_inputs[f"{variant.id} {VERIFIED}"] == variant.verified[-2]
    assert latency.task.time_share == 1.0, "it ends by itself, and is not ended"
    order = [step.id.kind for step in sorted(found.steps, key=is_optional)]
    assert order.index("latency") < order.index("prosecute")


@pytest.mark.parametrize("recover", [False, True])
def test_what_runs_a_pruned_model_itself_is_prosecuted_against_that(recover: bool) -> None:
    asked: dict[str, Any] = {"engines": ["compiled", "aotinductor"], "prune": ["macs=-30%"], "recover": recover}
    steps = planned(**asked, calibration="digits", prosecute_seconds=1).steps
    found = {step.id: step.inputs["given"] for step in steps if step.id.kind == "prosecute"}
    pruned = "recover-prune-macs30" if recover else "prune-macs30"
    assert {given for name, given in found.items() if "prune" in name} == {pruned}
    assert {given for name, given in found.items() if "prune" not in name} == {"load"}


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


ALONE = {"references": False}
FORMS = [
    ({"precisions": ["fp32", "fp16", "int8"]}, ["eager-fp16", "compiled-fp32", "compiled-fp16"]),
    ({"precisions": ["int8"]}, ["compiled-fp32"]),
    ({"eager": {"tf32": True}}, ["eager-tf32", "compiled-tf32"]),
    (
        {"eager": {"tf32": True}, "cuda_graphs": "on", "device": "cuda", "precisions": ["fp32", "bf16"]},
        ["eager-tf32-graphs", "eager-bf16-graphs", "compiled-tf32-graphs", "compiled-bf16-graphs"],
    ),
    ({"cuda_graphs": True, "device": "cuda"}, ["eager-fp32-graphs", "compiled-fp32-graphs"]),
    ({"cuda_graphs": "both"}, ["compiled-fp32"]),  # ignored on the CPU
    ({"device": "cuda"}, ["eager-fp32-graphs", "compiled-fp32", "compiled-fp32-graphs"]),
]


@pytest.mark.parametrize(("values", "ids"), FORMS)
def test_a_module_is_cast_for_the_engines_that_run_it(values: dict[str, Any], ids: list[str]) -> None:
    """Plain eager is the baseline, whatever is asked of the others: on CUDA as torch ships it."""
    found = planned(engines=["eager", "compiled"], synthetic_calibration=True, measure=ALONE, **values)
    assert [variant.id for variant in found.variants] == ids
    shipped = "convolutions" if values.get("device") else False
    assert found.baseline.engine == Eager(tf32=shipped)  # type: ignore[arg-type]
    checks = {step.id: step.task for step in found.steps if isinstance(step.task, Verify)}
    for variant in found.variants:
        arithmetic = variant.engine.model_copy(update={"tf32": False}).arithmetic if shipped else ""
        assert (variant.artifact, variant.precision) == ("load", arithmetic or variant.precision)
        assert checks[variant.verified[0]].precision == variant.engine.arithmetic
        assert variant.engine.cuda_graphs == variant.id.endswith("-graphs")  # type: ignore[attr-defined]


def test_tuning_stands_between_an_engine_and_all_that_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"device": "cuda", "engines": ["onnxruntime", "tensorrt_rtx"], "targets": ["sm86"], "tune_seconds": "30s"}
    found = planned(**values, prune=["30%"])
    steps = {step.id: step for step in found.steps}
    assert [step for step in steps if step.startswith("tune")] == [
        "tune-onnxruntime-fp32",
        "tune-onnxruntime-fp32-prune30",
    ]
    tune = steps["tune-onnxruntime-fp32"]
    assert tune.inputs == {"model": "simplify", "engine": "build-onnxruntime-fp32", "reference": "reference"}
    for variant in ("onnxruntime-fp32", "onnxruntime-fp32-graphs"):  # both run with the same options
        assert steps[f"verify-{variant}"].inputs["model"] == steps[f"memory-{variant}"].inputs["model"] == tune.id
    monkeypatch.setattr(nvidia, "driver", lambda: Driver(reason="there is none"))
    with pytest.raises(UsageError, match="onnxruntime has no options to tune on cpu"):
        planned(tune_seconds=30, threads=1)
    asked = {"objective": "throughput", "batch": [1, 8], "measure": {"concurrency": [4, 2]}, "threads": 4}
    found = planned(tune_seconds=30, budgets={"max_memory_bytes": "1MiB"}, min_sqnr_db=20, **asked)
    task = next(step.task for step in found.steps if step.id == "tune-onnxruntime-fp32")
    assert isinstance(task, Tune)
    assert (task.batch, task.callers, task.max_memory_bytes, task.min_sqnr_db) == (8, (2, 4), 1 << 20, 20)
    task = next(step.task for step in planned(tune_seconds=30, threads=4).steps if step.id.kind == "tune")
    assert isinstance(task, Tune)
    assert (task.batch, task.callers, task.max_memory_bytes) == (None, (), None)


def test_variants_with_cuda_graphs_run_the_engine_of_those_without() -> None:
    """They are checked and measured by themselves, and their model is built, searched and audited once."""
    values = {"targets": ["sm86"], "precisions": ["fp32", "int8"], "synthetic_calibration": True}
    found = planned(engines=["tensorrt_rtx"], cuda_graphs="both", measure=ALONE, **values)
    names = [f"tensorrt_rtx-{precision}-sm86" for precision in ("fp32", "int8")]
    assert [variant.id for variant in found.variants] == [id_ for name in names for id_ in (name, f"{name}-graphs")]
    for plain, graphs in zip(found.variants[::2], found.variants[1::2], strict=True):
        assert graphs.artifact == plain.artifact == f"build-{plain.id}"
        assert (graphs.audits, graphs.verified[:-1]) == (plain.audits, plain.verified[:-1])
        assert (graphs.verified[-1], graphs.memory) == (f"verify-{graphs.id}", f"memory-{graphs.id}")
    alone = planned(engines=["tensorrt_rtx"], cuda_graphs="on", measure=ALONE, **values)
    for made in (found, alone):
        builds = {step.id: step.task for step in made.steps if isinstance(step.task, Build)}
        assert list(builds) == [f"build-{name}" for name in names]
        assert not any(task.engine.cuda_graphs for task in builds.values())  # type: ignore[attr-defined]
    assert all(variant.engine.cuda_graphs == variant.name.graphs for variant in found.variants)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("values", "ids"),
    [
        ({}, ["eager-bf16", "compiled-fp32", "compiled-bf16", "compiled-bf16-graphs"]),
        (
            {"precisions": ["fp32", "fp16"], "cuda_graphs": "off", "engines": ["onnxruntime", "compiled"]},
            ["eager-fp16"],
        ),
        (
            {"eager": {"compile_mode": "max-autotune"}, "cuda_graphs": "off", "engines": ["eager"]},
            ["eager-bf16", "compiled-fp32-max-autotune", "compiled-bf16-max-autotune"],
        ),
        ({"device": "cpu"}, []),
        ({"device": "cpu", "measure": {"references": True}}, ["eager-bf16", "compiled-fp32", "compiled-bf16"]),
        ({"measure": ALONE}, []),
    ],
)
def test_pytorch_alone_stands_beside_in_a_race_of_its_own(values: dict[str, Any], ids: list[str]) -> None:
    """Without what was asked for anyway; the race of what was asked for is the same with and without them."""
    found = planned(**{"device": "cuda", **values})
    assert [variant.id for variant in found.variants if variant.reference] == ids
    steps = {step.id: step for step in found.steps}
    assert found.references_latency == ("latency-references" if ids else None)
    if ids:
        assert list(steps["latency-references"].task.engines) == ["eager", *ids]  # type: ignore[attr-defined]
        assert f"verify-{ids[0]}" in steps["latency-references"].optional_inputs.values()
    alone = planned(**{"device": "cuda", **values, "measure": ALONE})
    assert steps["latency"] == next(step for step in alone.steps if step.id == "latency")


def test_accuracy_is_held_against_exact_float32() -> None:
    """Eager is timed as torch ships it, which rounds convolutions on CUDA."""
    quality = next(step.task for step in planned(device="cuda").steps if step.id == "quality-eager")
    assert quality.engine == Eager()  # type: ignore[attr-defined]


def test_tf32_of_onnxruntime_is_held_to_its_own_thresholds() -> None:
    found = planned(onnxruntime={"tf32": True})
    check = next(step.task for step in found.steps if step.id == "verify-onnxruntime-fp32")
    assert isinstance(check, Verify)
    assert check.precision == "tf32"
    assert check.engine.tf32  # type: ignore[attr-defined]


def benchmarked(*models: str, **values: Any) -> Plan:
    recipe, others = choose_baseline(make({"model": models[0], **values}, listed=True), models)
    return benchmark_plan(recipe, others, "now")


def test_a_benchmark_takes_the_module_in_other_forms_too() -> None:
    found = benchmarked("digits", "resnet18", engines=["eager", "compiled"], precisions=["fp16"])
    assert [variant.id for variant in found.variants] == ["resnet18", "eager-fp16", "compiled-fp16"]
    by_id = {step.id: step for step in found.steps}
    assert by_id["latency"].optional_inputs["eager-fp16 verified"] == "verify-eager-fp16"
    assert by_id["memory-compiled-fp16"].inputs["verified"] == "verify-compiled-fp16"
    assert [variant.id for variant in benchmarked("digits").variants] == []


def test_no_other_model_s_graph_stands_for_a_module_in_a_benchmark(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).touch()
    others = [str(tmp_path / name) for name in ("a.onnx", "b.onnx")]
    found = benchmarked("digits", *others, engines=["compiled"], measure={"limits": True})
    counted = {step.id: step.inputs["model"] for step in found.steps if step.id.kind == "work"}
    assert counted == {"work-a.onnx": "load-1", "work-b.onnx": "load-2"}


def test_an_engine_that_is_compiled_from_the_module_needs_no_graph() -> None:
    found = planned(engines=["aotinductor", "eager"], precisions=["fp32", "bf16", "int8"], prune=["30%"])
    names = ["aotinductor-fp32", "aotinductor-bf16", "eager-bf16"]
    assert [variant.id for variant in found.variants] == [*names, *(f"{name}-prune30" for name in names)]
    by_id = {step.id: step for step in found.steps}
    assert not {"export", "simplify"} & {*by_id}
    assert by_id["build-aotinductor-bf16"].inputs == {"model": "load"}
    assert by_id["verify-aotinductor-bf16"].inputs["model"] == "build-aotinductor-bf16"
    assert by_id["build-aotinductor-bf16-prune30"].inputs == {"model": "prune30"}
    both = planned(engines=["aotinductor", "onnxruntime"], measure={"limits": True})
    by_id = {step.id: step for step in both.steps}
    assert by_id["build-aotinductor-fp32"].inputs == {"model": "load"}
    assert "verify-export" not in by_id["verify-aotinductor-fp32"].inputs
    assert by_id["work-aotinductor-fp32"].inputs["model"] == "simplify", (
        "its operations are counted in the graph, not in its own file"
    )


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


@pytest.mark.parametrize(("kind", "row"), [("FLOAT16", "fp16"), ("BFLOAT16", "bf16"), ("FLOAT", "fp32")])
def test_files_in_half_precision_are_held_to_its_thresholds(tmp_path: Path, kind: str, row: str) -> None:
    """So are the graphs made of them, and answers to inputs beside the samples."""
    dtype = getattr(TensorProto, kind)
    x, y = (helper.make_tensor_value_info(name, dtype, ["batch", 4]) for name in "xy")
    weight = helper.make_tensor("w", dtype, [4, 4], np.ones(16))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "m.onnx")
    tasks = [step.task for step in planned(model=str(tmp_path / "m.onnx")).steps]
    checks = [task for task in tasks if isinstance(task, Verify) and task.stage != "source"]
    assert {task.precision for task in checks} == {row}
    (prosecuted,) = (task for task in tasks if isinstance(task, Prosecute))
    assert {prosecuted.precision, *(graph.precision for graph in prosecuted.graphs)} == {row}


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
    assert executor.can_start(measuring, [steps["memory-onnxruntime-fp32"]])  # each reads its own process's memory
    assert not executor.can_start(measuring, [steps["memory-onnxruntime-fp32"], build])
    assert not executor.can_start(steps["latency"], [measuring])


@pytest.mark.parametrize("engines", [["onnxruntime"], ["onnxruntime", "openvino"]])
def test_prosecutions_share_the_cores_from_the_start_where_there_are_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: list[str]
) -> None:
    """The first one's threads would else wait for those of the second, which begins at the same time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3})
    executor = LocalExecutor(Store(tmp_path / "store"), 2, Gpus(0))
    steps = [step for step in planned(engines=engines, prosecute_seconds=1).steps if step.id.kind == "prosecute"]
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(executor._reserve_cores(step)) for step in steps]
    assert found == ([None] if len(engines) == 1 else [{2}, {3}])


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


@pytest.mark.parametrize(
    ("timing", "beside"),
    [
        ("build-tensorrt-fp32", "verify-onnxruntime-fp32"),
        ("build-onnxruntime_tensorrt-fp32", "build-tensorrt-fp32"),
        ("build-aotinductor-fp32", "build-onnxruntime-fp32"),
        ("verify-compiled-fp32", "build-onnxruntime-fp32"),
    ],
)
def test_what_chooses_kernels_by_their_times_has_its_gpu_to_itself(tmp_path: Path, timing: str, beside: str) -> None:
    names = ["onnxruntime", "compiled", "aotinductor", "tensorrt", "onnxruntime_tensorrt"]
    recipe = resolve_recipe(make({"model": "digits", "engines": names, "device": "cuda"}))
    steps = {str(step.id): step for step in plan(recipe, here=False).steps}
    one_gpu, two = (LocalExecutor(Store(tmp_path), 2, Gpus(count)) for count in (1, 2))
    assert not one_gpu.can_start(steps[timing], [steps[beside]])
    assert not one_gpu.can_start(steps[beside], [steps[timing]])
    assert one_gpu.can_start(steps["export"], [steps[timing]])
    assert one_gpu.can_start(steps["verify-onnxruntime-fp32"], [steps["build-onnxruntime-fp32"]])
    assert two.can_start(steps[beside], [steps[timing]])


def test_a_gpu_of_another_kind_is_reserved_and_a_wait_ends_with_the_run(tmp_path: Path) -> None:
    """With two A100s and a T4, say, the T4 was named."""
    gpus = Gpus(2)
    third = Device(kind="cuda", index=2)
    outcomes: queue.SimpleQueue[str] = queue.SimpleQueue()

    def book() -> None:
        try:
            with gpus.reserve(third) as reserved:
                outcomes.put(str(reserved))
                with gpus.reserve(third):
                    outcomes.put("twice")
        except StepError as error:
            outcomes.put(error.message)

    threading.Thread(target=book, daemon=True).start()
    assert outcomes.get(timeout=5) == "(2, {})"
    LocalExecutor(Store(tmp_path), 1, gpus).stop()
    assert outcomes.get(timeout=5) == "it was ended"


def test_without_labeled_data_fidelity_is_judged_on_data_that_calibration_leaves(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 3, 224, 224), np.float32))
    tasks = [
        next(step.task for step in planned(**{"model": "resnet18", **values}).steps if step.id == REFERENCE)
        for values in ({}, {"calibration": str(tmp_path / "data.npz")}, {"model": "digits", "calibration": "digits"})
    ]
    assert all(isinstance(task, Sample) for task in tasks)
    assert [task.held_out is not None for task in tasks if isinstance(task, Sample)] == [False, True, False]


@pytest.mark.parametrize(
    ("values", "largest"),
    [({}, (32, 32, 1)), ({"shapes": {"batch": "1:8:16"}}, (32, 32, 1)), ({"batch": [1, 64]}, (64, 64, 64))],
)
def test_quality_is_judged_in_batches_that_engines_take(values: dict[str, Any], largest: tuple[int, ...]) -> None:
    engines = {"engines": ["onnxruntime", "tensorrt_rtx"], "targets": ["sm86"]}
    tasks = [step.task for step in planned(**{"batch": [1], **engines, **values}).steps]
    judging = [task for task in tasks if isinstance(task, Quality)]
    assert tuple(task.largest_batch for task in judging) == largest
    assert {tuple(task.ranges) for task in judging} == {tuple(values.get("shapes", ()))}


def test_metrics_are_judged_with_the_reference_which_names_the_classes() -> None:
    recipe = make({"model": "digits", "data": "digits", "engines": ["onnxruntime"], "budgets": {"max_drop": 0.01}})
    made = plan(resolve_recipe(recipe))
    for variant in (made.baseline, *made.variants):
        for for_search in (True, False):
            step = quality_step(recipe, variant, made.baseline.name, for_search=for_search)
            assert step
            assert step.inputs["reference"] == REFERENCE


def test_only_default_batches_give_way_to_a_range() -> None:
    for values, given in (({}, False), ({"batch": [1, 4]}, True)):
        tasks = [step.task for step in planned(model="digits", **values).steps]
        assert [task.batches_given for task in tasks if isinstance(task, Sample)] == [given]


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
