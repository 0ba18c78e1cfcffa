"""Plans with pruned and sparse models: each has its own model and answers, and is paired with its dense sibling."""

import pickle
from dataclasses import replace
from typing import Any

import onnx
import pytest
from onnx import parser

from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.planning.compression import PlanTransform
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, SHAPES, Step, StepRef, Variant, VariantName
from enginesmith.pipeline.planning.planner import Plan, plan
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.build import Build
from enginesmith.pipeline.tasks.finetune import Recover
from enginesmith.pipeline.tasks.measure import Latency
from enginesmith.pipeline.tasks.prune import Prune, TryLatency

FULL = {
    "engines": ["onnxruntime", "compiled", "tensorrt_rtx"],
    "targets": ["sm86"],
    "precisions": ["fp32", "fp16"],
    "prune": ["macs=-50%", "30%"],
    "sparsity": ["2:4"],
}


def planned(**values: Any) -> Plan:
    return plan(resolve_recipe(make({"model": "digits", **values})))


def by_id(made: Plan) -> dict[str, Step]:
    return {step.id: step for step in made.steps}


def test_every_variant_has_a_sibling_for_each_change() -> None:
    found = {variant.id: variant for variant in planned(**FULL).variants}
    dense = [variant for variant in found.values() if variant.dense is None]
    for one in dense:
        pruned = found[f"{one.id}-prune-macs50"]
        assert (pruned.dense, pruned.prune, pruned.sparsity) == (one.id, "macs=-50%", None)
        assert (f"{one.id}-sparse24" in found) == (one.engine.consumes == "onnx")
    both = found["onnxruntime-fp16-sparse24-prune30"]
    assert (both.dense, both.prune, both.sparsity) == ("onnxruntime-fp16", "30%", "2:4")


def test_pruned_engines_are_held_against_the_pruned_model() -> None:
    steps = by_id(planned(**FULL))
    assert steps["export-prune30"].inputs == {"model": "prune30"}
    assert steps["reference-prune30"].inputs == {"model": "prune30", "reference": "reference"}
    assert steps["verify-onnxruntime-fp32-prune30"].inputs["reference"] == "reference-prune30"
    assert steps["verify-onnxruntime-fp32-sparse24"].inputs["reference"] == "reference-sparse24"
    assert steps["sparsify-sparse24-prune30"].inputs == {"model": "simplify-prune30"}
    assert not steps["verify-prune30"].task.judged  # type: ignore[attr-defined]
    assert steps["verify-prune30"].inputs["reference"] == "reference"


def test_its_accuracy_is_held_against_the_given_model() -> None:
    steps = by_id(planned(**FULL))
    assert steps["quality-onnxruntime-fp32-prune30"].inputs["baseline"] == "quality-eager"


def test_siblings_are_paired_in_the_measurement() -> None:
    latency = by_id(planned(**FULL))["latency"].task
    assert isinstance(latency, Latency)
    assert latency.dense["onnxruntime-fp32-prune30"] == "onnxruntime-fp32"
    assert "onnxruntime-fp32" not in latency.dense


def test_pruning_in_steps_recovers_after_each() -> None:
    steps = by_id(planned(prune=["macs=-50%"], pruning={"steps": 2}, recover=True, recovery={"seconds": 60}))
    first, second = (steps[f"prune-macs50-{turn}of2"] for turn in (1, 2))
    assert isinstance(first.task, Prune)
    assert isinstance(second.task, Prune)
    assert second.inputs["model"] == "recover-prune-macs50-1of2"
    assert (1 - first.task.target.value) * (1 - second.task.target.value) == pytest.approx(0.5)
    recover = steps["recover-prune-macs50-2of2"].task
    assert isinstance(recover, Recover)
    assert recover.options.seconds == 30
    assert steps["export-prune-macs50"].inputs == {"model": "recover-prune-macs50-2of2"}


def test_a_latency_is_searched_for_in_a_chain_of_trials() -> None:
    steps = by_id(planned(prune=["latency=-40%"], engines=["onnxruntime", "compiled"], measure={"seconds": 2.0}))
    name = "prune-latency40"
    chain = [step for key, step in steps.items() if key.startswith(f"{name}-trial-")]
    assert all(isinstance(step.task, TryLatency) and step.task.seconds == 2.0 for step in chain)
    assert all(step.inputs["dense"] == f"{name}-dense" for step in chain)
    assert [step.inputs.get("before") for step in chain] == [None, *(step.id for step in chain[:-1])]
    assert steps[name].inputs == {"model": "load", "reference": "reference", "before": chain[-1].id}
    assert steps[f"export-{name}"].inputs == {"model": name}
    variant = next(one for one in planned(prune=["latency=-40%"]).variants if one.prune)
    assert (variant.prune, variant.pruned) == ("latency=-40%", (name,))


def test_a_latency_needs_an_engine_that_takes_graphs() -> None:
    with pytest.raises(UsageError, match="none such is asked for") as caught:
        planned(prune=["latency=-40%"], engines=["compiled"])
    assert "give --engine onnxruntime" in caught.value.remedy


def test_a_graph_can_be_sparse_and_not_pruned(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("graph") / "net.onnx"
    text = '<ir_version: 9, opset_import: ["": 20]> g (float[batch, 8] x) => (float[batch, 8] y) { y = Neg(x) }'
    onnx.save(parser.parse_model(text), path)
    made = plan(resolve_recipe(make({"model": str(path), "sparsity": ["unstructured=0.5"], "simplify": False})))
    assert [variant.id for variant in made.variants] == ["onnxruntime-fp32", "onnxruntime-fp32-sparse50"]
    assert by_id(made)["build-onnxruntime-fp32-sparse50"].inputs == {"model": "sparsify-sparse50"}
    with pytest.raises(UsageError, match="channels are pruned in a module"):
        plan(resolve_recipe(make({"model": str(path), "prune": ["0.3"]})))


def test_a_searched_precision_is_planned_for_a_sparse_model() -> None:
    made = by_id(planned(sparsity=["2:4"], precisions=["int8"]))
    ranking = made["assign-int8-onnxruntime-sparse24"].inputs["sensitivity"]
    assert (ranking.kind, ranking.changes) == ("sensitivity", ("sparse24",))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prune": ["1.5"]}, "the share of the channels that is removed"),
        ({"prune": ["speed=0.5"]}, "nothing that pruning can aim at"),
        ({"sparsity": ["1:2"]}, "cannot read the sparsity"),
        ({"recover": True}, "nothing is"),
        ({"model": "resnet18", "prune": ["0.3"], "recover": True}, "recovery needs data"),
        ({"model": "resnet18", "prune": ["0.3"], "pruning": {"importance": "taylor"}}, "taylor needs data"),
        ({"prune": ["0.3"], "recover": True, "recovery": {"method": "distill"}}, "did you mean distil"),
        ({"prune": ["0.5", "0.50"]}, "given twice as prune50"),
        ({"pruning": {"importance": "l1"}}, "pruning.importance has no effect"),
        ({"prune": ["0.5"], "recovery": {"seconds": 10}}, "recovery.seconds has no effect"),
        ({"sparsifying": {"scope": "layer"}}, "sparsifying.scope has no effect"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        make({"model": "digits", **values})
    assert caught.value.remedy


TASK = Build(engine=OnnxRuntime(), device=Device())
EXPORT = Step(StepRef("export"), TASK, {"model": LOAD}, {"shape": SHAPES})
VERIFY = Step(StepRef("verify", EXPORT.id), TASK, {"model": EXPORT.id, "reference": REFERENCE})
SHARED = Step(SHAPES, TASK, {"model": LOAD})
INT8 = VariantName("onnxruntime", "int8")
VARIANT = Variant(
    *(INT8, OnnxRuntime(), "int8", StepRef("build", INT8), Device(), (VERIFY.id,)), search=(StepRef("search", 1),)
)
PRUNED = PlanTransform("prune30", {LOAD: StepRef("prune30"), REFERENCE: REFERENCE.with_change("prune30")}, {SHAPES})
SPARSE = PlanTransform(
    "sparse24", {EXPORT.id: StepRef("sparsify"), REFERENCE: REFERENCE.with_change("sparse24")}, {SHAPES, LOAD}
)


def test_steps_are_renamed_with_what_they_take() -> None:
    made = PRUNED.steps([EXPORT, VERIFY, SHARED])
    assert [step.id for step in made] == ["export-prune30", "verify-export-prune30"]
    assert (made[0].inputs, made[0].optional_inputs) == ({"model": "prune30"}, {"shape": "shapes"})
    assert made[1].inputs == {"model": "export-prune30", "reference": "reference-prune30"}
    assert made[1].task == VERIFY.task


def test_what_it_has_another_in_the_place_of_is_not_made_again() -> None:
    assert [step.id for step in SPARSE.steps([EXPORT, VERIFY])] == ["verify-export-sparse24"]


def test_variants_name_their_dense_sibling() -> None:
    found = PRUNED.variant(VARIANT)
    assert (found.id, found.artifact) == ("onnxruntime-int8-prune30", "build-onnxruntime-int8-prune30")
    assert (found.verified, found.search) == (("verify-export-prune30",), ("search-1-prune30",))
    assert found.dense == VARIANT.id


def test_a_change_of_a_changed_model() -> None:
    both = PRUNED.variant(SPARSE.variant(VARIANT))
    assert (both.id, both.dense) == ("onnxruntime-int8-sparse24-prune30", VARIANT.id)
    (step,) = PRUNED.steps(SPARSE.steps([VERIFY]))
    assert step.inputs == {"model": "sparsify-prune30", "reference": "reference-sparse24-prune30"}


def test_a_reference_is_its_printed_id_in_every_process() -> None:
    ref = StepRef("build", replace(INT8, workspace="min", target="sm86"), changes=("sparse24",)).with_change("prune30")
    assert ref == "build-onnxruntime-int8-wsmin-sm86-sparse24-prune30"
    assert ref.in_run("first").with_kind("verify") == "first/verify-onnxruntime-int8-wsmin-sm86-sparse24-prune30"
    sent = pickle.loads(pickle.dumps(ref))
    assert (sent, sent.kind, sent.subject, sent.changes) == (ref, "build", ref.subject, ("sparse24", "prune30"))
