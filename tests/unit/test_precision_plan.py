"""Plans with other precisions: which steps, in which order, shared by which variants."""

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginesmith.calibration.options import DataOptions, PartOptions
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.openvino import engine as openvino
from enginesmith.pipeline.errors import FidelityError, MissingCapability, UsageError
from enginesmith.pipeline.execution.events import Outcome
from enginesmith.pipeline.execution.local import LocalExecutor
from enginesmith.pipeline.execution.scheduler import Runner
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.frameworks.fidelity import Fidelity, OutputFidelity
from enginesmith.pipeline.measure.quality import Quality as Judged
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.quantize.precisions import Placement
from enginesmith.pipeline.passes.quantize.search import Candidate, GroupFact
from enginesmith.pipeline.passes.quantize.upsampling import UPSAMPLING
from enginesmith.pipeline.planning.plan import Plan, Step
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.race import searching_seconds
from enginesmith.pipeline.planning.single_stages import precision_steps, sparsify_steps
from enginesmith.pipeline.planning.variants import list_variants, resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import software
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.build import Transform
from enginesmith.pipeline.tasks.finetune import TEACHER, TrainGraph
from enginesmith.pipeline.tasks.graph_forms import MULTIPLIED, RESCALED, Rescale
from enginesmith.pipeline.tasks.load import Shapes
from enginesmith.pipeline.tasks.mixed_precision import ASSIGNMENT, FLOAT, Assign, Goal, LowerForm, Search, assignment
from enginesmith.pipeline.tasks.nncf import QuantizeWithNncf
from enginesmith.pipeline.tasks.quality import BASELINE, Quality
from enginesmith.pipeline.workflows import stages


def planned(**values: Any) -> Plan:
    return plan(resolve_recipe(make({"model": "digits", **values})))


def ids(found: Plan) -> list[str]:
    return [step.id for step in found.steps]


@pytest.mark.parametrize(
    "values",
    [
        {"precisions": ["fp32", "fp16", "bf16", "int8", "int8+fp16", "int8-dynamic", "fp8", "int4-weights"]},
        {"precisions": ["fp16", "bf16"], "prune": ["macs=-50%"], "recover": "distil", "budgets": {"max_drop": 0.01}},
        {"precisions": ["int8"], "quantization": {"equalize": True, "smooth": 0.5}},
        {"precisions": ["int4-weights"], "quantization": {"awq": True}, "budgets": {"max_drop": 0.01}},
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


def test_searches_are_judged_on_other_samples_than_the_drop_that_is_reported() -> None:
    asked: dict[str, Any] = {"data": "digits", "precisions": ["int8"], "prune": ["macs=-50%"], "recover": "distil"}
    steps = {step.id: step for step in planned(**asked, budgets={"max_drop": 0.01}).steps}
    found = {
        name: next(iter(re.findall("'part': '([a-z]+)'", str(steps[name].task.identity))), "none")
        for name in ("reference", "calibrate", "choice-eager", "quality-eager", "quality-onnxruntime-int8")
    }
    assert list(found.values()) == ["choice", "calibration", "choice", "judgement", "judgement"]
    for change in ("", "-prune-macs50"):
        search, final = steps[f"search-int8-onnxruntime-1{change}"], steps[f"quality-onnxruntime-int8{change}"]
        assert isinstance(search.task, Search)
        assert search.task.goal.quality
        assert search.task.goal.quality.data_options == steps["choice-eager"].task.data_options  # type: ignore[attr-defined]
        assert (search.inputs[BASELINE], final.inputs[BASELINE]) == ("choice-eager", "quality-eager")


@pytest.mark.parametrize("values", [{}, {"eval_data": "digits/test"}, {"data": "digits", "budgets": {}}])
def test_one_step_judges_eager_where_no_search_judges_by_the_metric_of_its_own_samples(values: dict[str, Any]) -> None:
    asked = {"precisions": ["int8"], "budgets": {"max_drop": 0.01}, **values}
    assert [step.id for step in planned(**asked).steps if "eager" in step.id and isinstance(step.task, Quality)] == [
        "quality-eager"
    ]


def test_what_is_kept_stays_in_the_halves_of_graphs_and_is_refused_where_a_module_is_cast() -> None:
    """Modules that are measured for comparison are as PyTorch would cast them."""
    values = {"engines": ["onnxruntime", "eager"], "precisions": ["fp16", "int8"], "quantization": {"keep": ["head"]}}
    made = planned(**values, measure={"references": True})
    steps = {step.id: step for step in made.steps}
    lowering = {name: steps[name].task.step.keep for name in ("precision-fp16", "precision-int8-onnxruntime")}  # type: ignore[attr-defined]
    assert lowering == {"precision-fp16": ("head",), "precision-int8-onnxruntime": ()}  # int8's assignment says it
    refused = {variant.id: variant.refused for variant in made.variants if variant.refused}
    assert refused == {"eager-fp16": "eager casts the whole module to fp16, and head is to stay in float32"}
    assert "refuse-eager-fp16" in steps["verify-eager-fp16"].inputs.values()
    assert "refuse-eager-fp16" in next(each for each in made.variants if each.refused).verified
    with pytest.raises(UsageError, match="eager casts the whole module"):
        steps["refuse-eager-fp16"].task.run({}, Path(), lambda text: None)
    assert "compiled-fp16" in {variant.id for variant in made.variants if variant.reference}


def test_variants_share_calibration_and_the_float_engine() -> None:
    found = ids(planned(precisions=["fp32", "int8", "int8+fp16"]))
    assert found.count("calibrate") == 1
    assert found.count("build-onnxruntime-fp32") == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"calibration": "digits"}, True),
        ({"model": "unet", "synthetic_calibration": True}, False),
        ({"calibration": "digits", "quantization": {"equalize": True}}, False),
        ({"calibration": "digits", "quantization": {"shift": True}}, False),
        ({"calibration": "digits", "quantization": {"smooth": 0.5}}, False),
        ({"calibration": "digits", "precisions": ["int8-dynamic"]}, False),
    ],
)
def test_a_search_may_rescale_unless_the_recipe_says_how(values: dict[str, Any], expected: bool) -> None:
    """Data that are made up say nothing of channels. One step makes the graph for all engines that share a ranking."""
    made = planned(**{"precisions": ["int8"], "engines": ["onnxruntime", "openvino"], **values})
    steps = {step.id: step for step in made.steps}
    rescaling = [step for step in made.steps if isinstance(step.task, Rescale)]
    readers = [step.id for step in made.steps if RESCALED in step.optional_inputs]
    assert bool(rescaling) == bool(readers) == expected
    assert [step.task.only_weak for step in rescaling] == [False, True] * expected  # type: ignore[attr-defined]
    for name in ("onnxruntime", "openvino") if expected else ():
        ends = [steps[f"{kind}-int8-{name}"] for kind in ("assign", "precision")]
        for step in (steps[f"search-int8-{name}-1"], *ends):
            assert [steps[step.optional_inputs[form]] for form in (RESCALED, MULTIPLIED)] == rescaling
        assert isinstance(ends[-1].task, LowerForm)


@pytest.mark.parametrize(
    ("precision", "placement", "left"),
    [
        ("int8", "inputs+outputs", True),
        ("int8", "inputs+read outputs", False),
        ("int8", "inputs", False),
        ("fp8", "inputs+outputs", False),
        ("int8-dynamic", "inputs+outputs", False),
    ],
)
def test_what_an_engine_has_no_kernel_for_is_not_searched(precision: str, placement: str, left: bool) -> None:
    """Engines share the errors of groups, and not their kernels."""
    step = Precision.model_validate({"precision": precision, "placement": placement})
    assert bool(step.explain_kind("ConvTranspose")) == left
    assert not step.explain_kind("grouped Conv")
    assert not step.explain_kind(UPSAMPLING)


@pytest.mark.parametrize(("units", "signs"), [(("avx2",), (False,)), (("avx512_vnni", "amx_int8"), (True, False))])
def test_signed_activations_are_tried_first_where_they_are_faster(
    units: tuple[str, ...], signs: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino, "vector_units", lambda: units)
    steps = {step.id: step.task for step in planned(precisions=["int8"], engines=["onnxruntime", "openvino"]).steps}
    searches = [steps[f"search-int8-{name}-1"] for name in ("onnxruntime", "openvino")]
    assert [task.signs for task in searches if isinstance(task, Search)] == [(False,), signs]


def test_each_engine_has_its_own_placement_and_search() -> None:
    found = ids(planned(precisions=["int8"], engines=["onnxruntime", "tensorrt_rtx"], targets=["sm86", "sm89"]))
    made = [name for name in found if name.startswith("precision-")]
    assert made == ["precision-int8-onnxruntime", "precision-int8-tensorrt_rtx"]


def test_engines_with_the_same_rules_for_inputs_share_a_ranking() -> None:
    made = planned(engines=["onnxruntime", "openvino"], precisions=["int8"], calibration="digits",
                   quantization={"weight_bits": 8})  # fmt: skip
    rankings = [step for step in made.steps if step.id.kind == "sensitivity"]
    assert [step.id for step in rankings] == ["sensitivity-int8-asymmetric-w8"]
    steps = {step.id: step for step in made.steps}
    for name in ("onnxruntime", "openvino"):
        search = steps[f"search-int8-{name}-1"]
        assert search.inputs["sensitivity"] == rankings[0].id
        assert search.task.step.rounding_inputs() == rankings[0].task.step  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("engines", "placement", "wanted"),
    [
        (("onnxruntime", "openvino"), "auto", True),
        (("openvino",), "auto", False),
        (("openvino",), "onnxruntime", True),
        (("onnxruntime",), "openvino", False),
    ],
)
def test_a_graph_is_rescaled_for_rounded_outputs_where_an_engine_rounds_them(
    engines: tuple[str, ...], placement: str, wanted: bool
) -> None:
    made = planned(
        engines=engines, precisions=["int8"], data="digits", quantization={"placement": placement, "weight_bits": 8}
    )
    rescaling = {step.task.outputs for step in made.steps if isinstance(step.task, Rescale)}
    assert rescaling == {wanted}


@pytest.mark.parametrize(
    ("units", "presets"), [(("avx2",), ("mixed", "mixed")), (("avx512_vnni", "amx_int8"), ("mixed", "performance"))]
)
def test_nncf_is_a_variant_beside_our_own(
    units: tuple[str, ...], presets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for all engines of the same kind; nothing is searched for it; other precisions are ours."""
    monkeypatch.setattr(software, "version", lambda name: "3.4.0")
    monkeypatch.setattr(openvino, "vector_units", lambda: units)
    made = planned(
        precisions=["int8", "fp16", "int8-dynamic"],
        engines=["onnxruntime", "openvino", "tensorrt_rtx"],
        quantization={"quantizers": ["own", "nncf"], "weight_bits": 7, "keep": ["fc"]},
        targets=["sm86"],
    )
    by_nncf = {variant.id: variant for variant in made.variants if variant.name.quantizer}
    assert list(by_nncf) == ["onnxruntime-int8-nncf", "openvino-int8-nncf"]
    assert {"onnxruntime-int8", "openvino-int8", "tensorrt_rtx-int8-sm86"} <= {variant.id for variant in made.variants}
    steps = {step.id: step for step in made.steps}
    for variant, preset in zip(by_nncf.values(), presets, strict=True):
        graph = steps[variant.artifact].inputs["model"]
        assert (graph, set(steps[graph].inputs)) == (f"precision-int8-nncf-{preset}-w7", {"model", "reference"})
        task = steps[graph].task
        assert isinstance(task, QuantizeWithNncf)
        assert (task.weight_bits, task.keep, task.feeder) == (7, ("fc",), steps["calibrate"].task.feeder)
        assert task.preset == preset
        assert (variant.search, variant.assignment, variant.calibration) == ((), None, graph)
        assert f"verify-{graph}" in variant.verified
        assert variant.audits


def test_without_nncf_the_remedy_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "version", lambda name: None)
    with pytest.raises(MissingCapability, match="needs NNCF") as raised:
        planned(precisions=["int8"], quantization={"quantizers": ["nncf"]})
    assert re.match(r"pip install \S*nncf", raised.value.remedy)
    assert [variant.id for variant in planned(precisions=["int8"]).variants] == ["onnxruntime-int8"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precisions": ["fp16"]}, "no effect without --precision int8"),
        ({"precisions": ["int8"], "engines": ["tensorrt_rtx"]}, "no effect on tensorrt_rtx"),
        ({"precisions": ["int8"], "engines": ["onnxruntime_tensorrt"]}, "no effect on onnxruntime_tensorrt"),
        ({"precisions": ["int8"], "quantization": {"quantizers": ["nncv"]}}, "quantizers"),
        *(
            (
                {"precisions": ["int8"], "quantization": {"quantizers": ["nncf"], field: value}},
                f"{option} has no effect",
            )
            for field, value, option in (
                ("ranges", "entropy", "--ranges"),
                ("smooth", 0.5, "--smooth"),
                ("equalize", True, "--equalize"),
                ("shift", True, "--shift"),
                ("placement", "openvino", "--placement"),
            )
        ),
    ],
)
def test_nncf_has_to_have_an_effect(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make({"model": "digits", "quantization": {"quantizers": ["nncf"]}, **values})


@pytest.mark.parametrize("more", [{"precisions": ["int8", "fp8"]}, {"quantization": {"quantizers": ["own", "nncf"]}}])
def test_options_that_our_own_graphs_read_may_stand_beside_nncf(more: dict[str, Any]) -> None:
    quantization = {"quantizers": ["nncf"], **more.get("quantization", {}), "smooth": 0.5}
    recipe = make({"model": "digits", "precisions": ["int8"], **more, "quantization": quantization})
    assert recipe.quantization.smooth == 0.5


def test_statistics_are_taken_again_after_the_float_graph_was_changed() -> None:
    steps = {one.id: one for one in planned(precisions=["int8"], quantization={"equalize": True, "smooth": 0.5}).steps}
    made = steps["precision-int8-onnxruntime"]
    assert made.inputs["model"] == steps[made.inputs["ranges"]].inputs["model"]
    assert made.inputs["model"] not in ("simplify", "export")


def test_the_metric_is_searched_for_only_with_a_budget() -> None:
    with_budget = planned(precisions=["int8"], budgets={"max_drop": 0.01})
    without = planned(precisions=["int8"])
    needs = [next(s for s in one.steps if s.id.startswith("search-")).inputs for one in (with_budget, without)]
    assert ["baseline" in one for one in needs] == [True, False]


@pytest.mark.parametrize(
    "values", [{}, {"budgets": {"max_drop": 0.01}}, {"data": "digits"}, {"min_sqnr_db": 30.0}], ids=str
)
def test_what_is_lowered_as_a_whole_is_searched_for_a_metric_alone(values: dict[str, Any]) -> None:
    made = planned(engines=["onnxruntime"], precisions=["fp16"], **values)
    searched = {step.id.kind for step in made.steps if step.id.kind in ("search", "sensitivity", "assign")}
    lowering = {step.id: type(step.task) for step in made.steps if step.id.kind == "precision"}
    if "budgets" in values:
        assert searched == {"search", "sensitivity", "assign"}
    else:
        assert (searched, lowering) == (set(), {"precision-fp16": Transform})


def test_a_search_of_what_is_lowered_tries_groups_alone_and_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino.session, "computes_in_bf16", lambda: True)
    asked: dict[str, Any] = {"engines": ["onnxruntime", "openvino", "eager"], "precisions": ["fp16", "bf16"]}
    made = planned(**asked, budgets={"max_drop": 0.01}, quantization={"bias_correction": True})
    steps = {step.id: step for step in made.steps}
    first = {name: step for name, step in steps.items() if name.startswith("search-") and name.endswith("-1")}
    assert set(first) == {f"search-{low}-{engine}-1" for low in ("fp16", "bf16") for engine in asked["engines"][:2]}
    for name, step in first.items():
        task = step.task
        assert isinstance(task, Search)
        assert (task.methods, task.signs, task.corrections, task.keep) == (("",), (False,), (False,), ())
        assert {FLOAT, RESCALED, MULTIPLIED}.isdisjoint(step.sources | step.inputs.keys())
        assert step.inputs[BASELINE]
        assert task.runs_here
        assert task.casts is (name == "search-bf16-openvino-1")
    lowering = {name: getattr(step.task, "casts", None) for name, step in steps.items() if name.startswith("precision")}
    assert lowering == {
        "precision-fp16-onnxruntime": None,
        "precision-bf16-onnxruntime": None,
        "precision-fp16-openvino": None,
        "precision-bf16-openvino": True,
    }
    assert steps["build-openvino-bf16"].inputs["model"] == "precision-bf16-openvino"
    assert "audit-precision-bf16-openvino" not in steps
    assert {variant.engine.name for variant in made.variants if not variant.search} == {"eager"}


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


def test_a_graph_that_an_engine_runs_in_two_ways_is_one() -> None:
    recipe = resolve_recipe(make({"model": "digits", "precisions": ["int4-weights"]}))
    lowered = [variant for variant in list_variants(recipe, recipe.recipe.engines) if variant.lowering]
    assert len(lowered) == 2
    assert precision_steps(recipe)[1].graph == "precision-int4-weights-onnxruntime"


def test_a_graph_for_tensorrt_needs_no_target() -> None:
    recipe = make({"model": "digits", "precisions": ["fp16"], "engines": ["tensorrt_rtx"]})
    assert precision_steps(resolve_recipe(recipe))[1].graph == "precision-fp16"


def test_a_graph_that_was_not_written_has_the_reason_of_what_it_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a form of the graph could not be made, which would have been tried first, is no reason."""
    reasons = {"rescale": "no channels can be scaled against each other", "assign": "nothing reaches the goal"}

    def run_steps(steps: list[Step], *rest: Any) -> dict[str, Outcome]:
        found = {}
        for step in steps:
            why = reasons.get(step.id.kind, "")
            made = Artifact(kind="record", path=tmp_path / "made", sha256="", bytes=0, rejected=why)
            missing = step.id.kind == "precision"
            found[step.id] = Outcome(step.id, "skipped" if missing else "done", None if missing else made)
        return found

    monkeypatch.setattr(stages, "run_steps", run_steps)
    recipe = make({"model": "digits", "precisions": ["int8"], "calibration": "digits"})
    with pytest.raises(FidelityError, match="nothing reaches the goal"):
        stages.precision(recipe, tmp_path / "out.onnx", Settings())


def test_a_graph_is_not_written_where_a_stage_before_it_was_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The goal of the last stage may be so low that it is reached all the same."""
    (tmp_path / "records.json").write_text("[]")

    def run_steps(steps: list[Step], *rest: Any) -> dict[str, Outcome]:
        def end(step: Step) -> Outcome:
            wrong = "an SQNR of 14.1 dB" if step.id == "verify-equalize" else ""
            made = Artifact(kind="record", path=tmp_path / "records.json", sha256="", bytes=0, rejected=wrong)
            return Outcome(step.id, "done", made)

        return {step.id: end(step) for step in steps}

    monkeypatch.setattr(stages, "run_steps", run_steps)
    wanted = {"precisions": ["int8"], "calibration": "digits", "quantization": {"equalize": True}}
    with pytest.raises(FidelityError, match=r"14\.1 dB"):
        stages.precision(make({"model": "digits", **wanted}), tmp_path / "out.onnx", Settings())
    assert not (tmp_path / "out.onnx").exists()


def test_a_plan_with_a_hole_is_an_error_and_no_endless_wait(tmp_path: Any) -> None:
    step = Step("lonely", Shapes(ranges={}, batches=(1,)), {"model": "nowhere"})
    runner = Runner(LocalExecutor(Store(tmp_path / "store"), 1), lambda step: tmp_path / f"{step.id}.log")
    with pytest.raises(ValueError, match="nowhere"):
        runner.run([step])


@pytest.mark.parametrize(("placement", "rest"), [("inputs", "fp16"), ("inputs+outputs", "fp32")])
def test_what_has_no_form_goes_with_the_rest(placement: Placement, rest: str) -> None:
    facts = [GroupFact(name="attention", module="", kind="Attention", macs=1, sqnr_db=None, reason="stays whole")]
    step = Precision(precision="int4-weights", placement=placement)
    (entry,) = assignment(facts, Candidate("everything", "given", False, "mse", frozenset(), ""), step, {})
    assert (entry["precision"], entry["why"]) == (rest, "stays whole")


@pytest.mark.parametrize(("options", "accepted"), [(PartOptions(part="choice"), True), (DataOptions(), False)])
def test_a_single_sample_decides_only_where_the_loss_is_reported_on_it(options: DataOptions, accepted: bool) -> None:
    task = Quality.model_construct(data_options=options)
    goal = Goal.model_construct(max_drop=0.01, quality=task)
    judged = Judged(metric="top1", value=0.9, baseline=0.9 + 1 / 96, drop=1 / 96, samples=96, counted=True)
    assert bool(goal._judge_drop(judged)) != accepted


@pytest.mark.parametrize(("passed", "metrics", "error"), [(True, 1, 0.02), (False, 0, 1e9 - 9)])
def test_a_metric_is_not_computed_where_outputs_differ_too_much(
    monkeypatch: pytest.MonkeyPatch, passed: bool, metrics: int, error: float
) -> None:
    computed = []

    def judge(*given: Any) -> tuple[Any, dict[str, Any], tuple[Path, ...]]:
        computed.append(given)
        return SimpleNamespace(drop=0.02, seen_high=0.03, count_missing=lambda max_drop: 0), {}, ()

    compared = Fidelity(passed=passed, sqnr_db=9.0, outputs=(OutputFidelity(name="y", sqnr_db=9.0, passed=passed),))
    monkeypatch.setattr(Goal, "_compare", lambda *given: compared)
    quality = SimpleNamespace(judge=judge, data_options=None)
    goal = Goal.model_construct(threshold="int8", min_sqnr_db=None, max_drop=0.01, quality=quality)
    engine = SimpleNamespace(load=lambda *given: contextlib.nullcontext())
    judged, _ = goal.judge(engine, None, Device(), {"reference": None, "baseline": None}, print)  # type: ignore[arg-type, dict-item]
    assert len(computed) == metrics
    assert judged.error == error
    assert judged.drop_high == (0.03 if passed else None)
    assert not judged.passed


TRAINED: dict[str, Any] = {"precisions": ["int8"], "engines": ["onnxruntime"], "calibration": "digits"}


def test_an_int8_graph_is_trained_after_all_of_it_is_quantized() -> None:
    found = planned(**TRAINED, recover="distil")
    assert [variant.id for variant in found.variants] == ["onnxruntime-int8", "onnxruntime-int8-qat"]
    trained = found.variants[1]
    (step,) = (step for step in found.steps if step.id in trained.recovered)
    assert step.id == "precision-int8-onnxruntime-qat"
    assert isinstance(step.task, TrainGraph)
    assert step.inputs == {
        "model": "quantize-int8-onnxruntime",
        TEACHER: "simplify",
        ASSIGNMENT: "assign-int8-onnxruntime-everything",
        "reference": "reference",
    }
    assign = next(step for step in found.steps if step.id == "assign-int8-onnxruntime-everything")
    assert isinstance(assign.task, Assign)
    assert assign.task.to_train == "asked"
    build = next(step for step in found.steps if step.id == trained.artifact)
    assert build.inputs["model"] == step.id
    assert not trained.search


def test_training_alone_makes_only_trials_with_everything_quantized() -> None:
    found = planned(**TRAINED, recover="distil", quantization={"quantizers": ["qat"]})
    assert [variant.id for variant in found.variants] == ["onnxruntime-int8-qat"]
    searches = [name for name in ids(found) if name.startswith("search-")]
    assert searches == [f"search-int8-onnxruntime-{number}" for number in (1, 2, 3)]


def test_a_search_that_ends_early_has_its_trials_all_the_same() -> None:
    found = planned(precisions=["int8"], engines=["onnxruntime"], calibration="digits")
    steps = {step.id: step for step in found.steps}
    assign = steps["assign-int8-onnxruntime"]
    trials = [name for name in ids(found) if name.startswith("search-")]
    assert [assign.inputs["trial 1"], *(assign.optional_inputs[f"trial {index}"] for index in range(2, 17))] == trials
    assert trials[1] not in found.leading_to([assign.id])


def test_what_is_pruned_is_trained_alone() -> None:
    found = planned(**TRAINED, recover="distil", prune=["macs=-50%"], sparsity=["2:4"])
    assert not [step.id for step in found.steps if isinstance(step.task, TrainGraph)]


def test_a_sparse_graph_is_trained_and_the_rest_is_made_of_that() -> None:
    found = planned(engines=["onnxruntime"], calibration="digits", sparsity=["2:4"], recover="distil")
    step = next(step for step in found.steps if isinstance(step.task, TrainGraph))
    assert step.id == "recover-sparsify-sparse24"
    assert step.inputs == {"model": "sparsify-sparse24", TEACHER: "simplify", "reference": "reference"}
    assert step.task.stays_float
    (_, sparse) = found.variants
    assert sparse.recovered == (step.id,)
    build = next(step for step in found.steps if step.id == sparse.artifact)
    assert build.inputs["model"] == step.id


@pytest.mark.parametrize("trained", [False, True])
def test_the_command_sparsify_trains_where_that_is_asked(trained: bool) -> None:
    more = {"recover": "distil"} if trained else {}
    made, last = sparsify_steps(
        resolve_recipe(make({"model": "digits", "calibration": "digits", "sparsity": ["2:4"], **more}))
    )
    steps = {step.id: step for step in made}
    assert last == ("recover-sparsify" if trained else "sparsify")
    assert f"verify-{last}" in steps
    if trained:
        assert steps[last].inputs == {"model": "sparsify", TEACHER: "simplify", "reference": "reference"}


@pytest.mark.parametrize("asked", [{"recover": "distil"}, {"recovery": {"seconds": 60}}])
def test_a_search_trains_for_one_engine_and_only_where_it_is_allowed(asked: dict[str, Any]) -> None:
    search = {"data": "digits", "budgets": {"max_drop": 0.01}, "time_seconds": 120}
    assert not [variant for variant in planned(**search).variants if variant.recovered]
    found = planned(**search, **asked)
    trained = [variant for variant in found.variants if variant.recovered]
    assert len(trained) == 1
    assert trained[0].name.quantizer == "qat"
    assign = next(step for step in found.steps if step.id == trained[0].assignment)
    assert isinstance(assign.task, Assign)
    assert assign.task.to_train == "needed"


def test_a_search_that_prunes_and_trains_does_not_train_what_is_pruned_in_int8() -> None:
    search: dict[str, Any] = {"data": "digits", "budgets": {"max_drop": 0.01}, "time_seconds": 600}
    found = planned(**search, recovery={"seconds": 60})
    trained = [variant for variant in found.variants if variant.name.quantizer == "qat"]
    assert [variant.prune for variant in trained] == [None]


def test_trainings_of_pruned_models_are_steps_of_their_own() -> None:
    asked: dict[str, Any] = {**TRAINED, "recover": "distil", "prune": ["macs=-50%"], "sparsity": ["2:4"]}
    found = planned(**asked, quantization={"quantizers": ["qat"]})
    (last,) = (variant for variant in found.variants if variant.prune and variant.sparsity)
    assert len(last.recovered) == 3
    for variant in found.variants:
        leading = found.leading_to([variant.artifact])
        assert set(variant.recovered) <= set(leading), variant.id


@pytest.mark.parametrize(
    ("time", "training", "seconds"),
    [
        (60, None, 0.55 * 51),  # 9 s are kept for trying inputs, and shares of 10, 15, 10 and 10 % of the rest
        (600, None, 590 - 59 - 88.5 - 30 - 50),  # three times 10 s for options, twice 25 s for latencies
        (300, 90, 90 + 200 - 20 - 30 - 20 - 20),
        (300, 280, 145 + 145 - 14.5 - 21.75 - 14.5 - 14.5),
    ],
)
def test_a_search_keeps_time_for_what_follows_and_training_has_its_own(
    time: float, training: float | None, seconds: float
) -> None:
    asked = {"model": "digits", "data": "digits", "budgets": {"max_drop": 0.01}, "time_seconds": time}
    asked |= {"recovery": {"seconds": training}} if training else {}
    assert searching_seconds(make(asked)) == pytest.approx(seconds)


def test_time_to_prune_in_a_search_is_none_to_train_in_int8() -> None:
    found = planned(data="digits", budgets={"max_drop": 0.01}, time_seconds=600)
    assert any(variant.prune for variant in found.variants)
    assert not any(variant.name.quantizer == "qat" for variant in found.variants)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recover": "distil", "calibration": "digits"}, "trains what is pruned, sparse or in int8, and nothing is"),
        ({"quantization": {"quantizers": ["qat"]}, "calibration": "digits"}, "no effect without --precision int8"),
    ],
)
def test_training_of_nothing_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make({"model": "digits", "engines": ["onnxruntime"], **values})


@pytest.mark.parametrize(
    ("quantization", "corrections"),
    [({}, (False, True)), ({"bias_correction": True}, (True,)), ({"ranges": "mse"}, (False,))],
)
def test_a_search_may_correct_biases_unless_the_recipe_decides(
    quantization: dict[str, Any], corrections: tuple[bool, ...]
) -> None:
    steps = planned(precisions=["int8"], engines=["onnxruntime"], quantization=quantization).steps
    found = {step.task.corrections for step in steps if isinstance(step.task, Search)}
    assert found == {corrections}
