"""A branch: the same steps under other names, on another model."""

from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.planning.compression import Branch
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, Step, Variant
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.build import Build

TASK = Build(engine=OnnxRuntime(), device=Device())
EXPORT = Step("export", TASK, {"model": LOAD}, {"shape": "shapes"})
VERIFY = Step("verify-export", TASK, {"model": "export", "reference": REFERENCE})
SHARED = Step("shapes", TASK, {"model": LOAD})
VARIANT = Variant(
    "onnxruntime-int8", OnnxRuntime(), "int8", "build-onnxruntime-int8", ("verify-export",), search=("search-1",)
)
PRUNED = Branch("-prune30", {LOAD: "prune30", REFERENCE: "reference-prune30"}, {"shapes"})
SPARSE = Branch("-sparse24", {"export": "sparsify", REFERENCE: "reference-sparse24"}, {"shapes", LOAD})


def test_steps_are_renamed_with_what_they_take() -> None:
    made = PRUNED.steps([EXPORT, VERIFY, SHARED])
    assert [step.id for step in made] == ["export-prune30", "verify-export-prune30"]
    assert made[0].inputs == {"model": "prune30"}
    assert made[0].optional_inputs == {"shape": "shapes"}
    assert made[1].inputs == {"model": "export-prune30", "reference": "reference-prune30"}
    assert made[1].task == VERIFY.task


def test_what_it_has_another_in_the_place_of_is_not_made_again() -> None:
    assert [step.id for step in SPARSE.steps([EXPORT, VERIFY])] == ["verify-export-sparse24"]


def test_variants_name_their_dense_sibling() -> None:
    found = PRUNED.variant(VARIANT)
    assert (found.id, found.artifact) == ("onnxruntime-int8-prune30", "build-onnxruntime-int8-prune30")
    assert (found.verified, found.search) == (("verify-export-prune30",), ("search-1-prune30",))
    assert found.dense == VARIANT.id


def test_a_branch_of_a_branch() -> None:
    both = PRUNED.variant(SPARSE.variant(VARIANT))
    assert both.id == "onnxruntime-int8-sparse24-prune30"
    assert both.dense == VARIANT.id
    (step,) = PRUNED.steps(SPARSE.steps([VERIFY]))
    assert step.inputs == {"model": "sparsify-prune30", "reference": "reference-sparse24-prune30"}
