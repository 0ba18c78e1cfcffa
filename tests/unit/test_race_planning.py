"""Variants are found for a race, and the plan is made around it."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import ENGINES, engine_class
from enginesmith.pipeline.engines.openvino import engine as openvino
from enginesmith.pipeline.engines.torch import eager
from enginesmith.pipeline.errors import NO_TIME, InvalidGraph, UsageError
from enginesmith.pipeline.execution.events import Outcome, Status
from enginesmith.pipeline.measure.rows import LatencyRow, RaceRow
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.planning.plan import Plan, StepRef
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.race import race_again
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import Recipe, make
from enginesmith.pipeline.results.assemble import End, explain_end
from enginesmith.pipeline.system import cpu, software
from enginesmith.pipeline.system.device import Availability
from enginesmith.pipeline.tasks.graph_forms import Sensitivity
from enginesmith.pipeline.tasks.mixed_precision import ASSIGNMENT, Search
from enginesmith.pipeline.tasks.quality import Quality
from enginesmith.pipeline.tasks.race import CHOICE, EARLIER, PRUNED_CHOICE, RACE, STAY, Race
from enginesmith.pipeline.workflows.optimize import _ActiveRun
from enginesmith.pipeline.workflows.request import RunRequest


@pytest.fixture(autouse=True)
def everything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all engines for the CPU installed, and no GPU."""
    for name in ENGINES:
        kind = engine_class(name)
        answer = Availability(ok="cpu" in kind.kinds, reason="no GPU")
        monkeypatch.setattr(
            kind, "installed", lambda device, answer=answer: answer if device.kind == "cpu" else Availability(ok=False)
        )


def planned(kept: tuple[str, ...] = (), **values: Any) -> Plan:
    return plan(resolve_recipe(make({"model": "digits", **values})), kept=kept)


# Variants that are found.


@pytest.mark.parametrize("able", [True, False])
def test_what_cannot_be_built_here_is_not_tried(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_class("aotinductor"), "buildable", lambda device: Availability(ok=able))
    assert ("aotinductor" in make({"model": "digits", "time_seconds": 60}).engines) == able


@pytest.mark.parametrize(
    ("values", "lossy"),
    [
        ({"time_seconds": 60}, False),
        ({"data": "digits"}, False),
        ({"data": "digits", "budgets": {"max_drop": 0}}, True),
    ],
)
def test_engines_and_precisions_are_found_where_none_is_listed(values: dict[str, Any], lossy: bool) -> None:
    recipe = make({"model": "digits", **values})
    assert {"onnxruntime", "openvino", "compiled"} <= set(recipe.engines)
    assert "eager" not in recipe.engines
    assert "tensorrt" not in recipe.engines
    assert ("int8" in recipe.precisions) == lossy
    names = [variant.id for variant in plan(resolve_recipe(recipe)).variants]
    assert names[:2] == ["onnxruntime-fp32", "openvino-fp32"]
    assert names[-1].startswith(("compiled", "aotinductor"))
    assert ("openvino-int8" in names) == lossy
    assert "openvino-int8-dynamic" not in names


@pytest.mark.parametrize(
    ("version", "values", "quantizers"),
    [
        ("3.4.0", {}, ("own", "nncf")),
        (None, {}, ("own",)),
        ("3.4.0", {"quantization": {"quantizers": ["nncf"]}}, ("nncf",)),
        ("3.4.0", {"budgets": {}}, ("own",)),
    ],
)
def test_nncf_is_tried_where_it_is_installed(
    version: str | None, values: dict[str, Any], quantizers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "version", lambda name: version)
    recipe = make({"model": "digits", "data": "digits", "budgets": {"max_drop": 0.01}, **values})
    assert recipe.quantization.quantizers == quantizers
    if version and "quantization" not in values and recipe.budgets.max_drop:
        for unit, runtime in (("avx2", True), ("avx512_vnni", False)):
            monkeypatch.setattr(cpu, "vector_units", lambda unit=unit: (unit,))
            names = [variant.id for variant in plan(resolve_recipe(recipe)).variants]
            assert names.index("openvino-int8") < names.index("openvino-int8-nncf") < names.index("compiled-fp32")
            assert ("onnxruntime-int8-nncf" in names) == runtime


def test_what_a_search_found_is_judged_by_its_own_trial() -> None:
    made = planned(data="digits", budgets={"max_drop": 0.01})
    race = next(step for step in made.steps if step.id == RACE)
    searched = {variant.id: variant.assignment for variant in made.variants if variant.search}
    assert "onnxruntime-int8" in searched
    for variant in made.variants:
        beside = (race.optional_inputs.get(f"{variant.id} {role}") for role in (ASSIGNMENT, CHOICE))
        assert next(beside) == searched.get(variant.id)
        assert next(beside) is None or variant.id not in searched


def test_the_first_lossless_variant_has_more_time_than_the_others() -> None:
    """Without one there is no result: what leads to it does not end with the time in which variants are found."""
    made = planned(data="digits", budgets={"max_drop": 0.01}, time_seconds=60)
    ends = {step.id: step.search for step in made.steps}
    lasting = ("load", "reference", "export", "simplify", "build-onnxruntime-fp32", "verify-onnxruntime-fp32")
    assert {ends[name] for name in lasting} == {False}
    assert {ends[name] for name in ("build-openvino-fp32", "calibrate", "build-onnxruntime-int8")} == {True}


def test_the_first_variant_has_more_time_where_none_is_lossless() -> None:
    """Its search may take the first trial alone: without one there is no variant."""
    more = {"engines": ["onnxruntime", "openvino"], "precisions": ["int8"], "budgets": {"max_drop": 0.01}}
    made = planned(data="digits", time_seconds=90, **more)
    ends = {step.id: step.search for step in made.steps}
    lasting = ("export", "simplify", "calibrate", "search-int8-onnxruntime-1", "verify-onnxruntime-int8")
    assert {ends[name] for name in lasting} == {False}
    others = ("search-int8-onnxruntime-2", "search-int8-openvino-1", "build-openvino-int8", "verify-openvino-int8")
    assert {ends[name] for name in others} == {True}


def test_engines_for_targets_are_built_beside_those_that_race_here() -> None:
    recipe = make({"model": "digits", "data": "digits", "budgets": {"max_drop": 0.01}, "targets": ["sm86"]})
    made = plan(resolve_recipe(recipe))
    ahead = [variant for variant in made.variants if variant.target]
    assert [variant.id for variant in ahead] == [f"tensorrt_rtx-{it}-sm86" for it in ("fp32", "fp16", "int8+fp16")]
    (race,) = (step.task for step in made.steps if step.id == RACE)
    assert isinstance(race, Race)
    assert {"onnxruntime-int8", "openvino-fp32"} <= set(race.engines)
    assert not {variant.id for variant in ahead} & set(race.engines)
    assert {StepRef("build", variant.name) for variant in ahead} <= {step.id for step in made.steps}


@pytest.mark.parametrize("listed", [{"engines": ["openvino"]}, {"precisions": ["fp32"]}, {"prune": ["30%"]}])
def test_a_list_by_hand_means_exactly_that_list(listed: dict[str, Any]) -> None:
    recipe = make({"model": "digits", "time_seconds": 60, **listed})
    assert recipe.variants == "listed"
    assert recipe.engines == tuple(listed.get("engines", ["onnxruntime"]))
    assert recipe.races


def test_a_graph_has_no_engines_for_modules(tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    file.touch()
    assert set(make({"model": str(file), "time_seconds": 60}).engines) == {"onnxruntime", "openvino"}


def test_a_time_that_is_too_short_is_refused() -> None:
    with pytest.raises(UsageError, match="--time: must be at least 30 s"):
        make({"model": "digits", "time_seconds": 5}, {"time_seconds": 5})


@pytest.mark.parametrize("decides", [{"objective": "size"}, {"objective": "memory"}, {"measure": {"sweep": True}}])
def test_what_does_not_go_by_speed_is_measured_in_full(decides: dict[str, Any]) -> None:
    assert RACE not in {step.id for step in planned(time_seconds=60, **decides).steps}


@pytest.mark.parametrize(
    ("asked", "by_speed"),
    [
        ({}, True),
        ({"budgets": {"max_latency_ms": 5.0}, "measure": {"concurrency": [1]}}, True),
        ({"budgets": {"max_memory_bytes": 1 << 30}}, False),
        ({"budgets": {"max_size_bytes": 1 << 30}}, False),
        ({"budgets": {"min_throughput_per_s": 5.0}}, False),
        ({"budgets": {"min_throughput_per_s": 5.0}, "objective": "throughput"}, True),
        ({"budgets": {"max_p99_ms": 5.0}, "objective": "throughput"}, False),
        ({"measure": {"concurrency": [1, 4]}}, False),
    ],
)
def test_a_race_drops_the_slower_ones_only_where_speed_decides(asked: dict[str, Any], by_speed: bool) -> None:
    steps = {step.id: step for step in planned(time_seconds=100, engines=["onnxruntime", "openvino"], **asked).steps}
    race = steps[RACE].task
    assert isinstance(race, Race)
    assert race.by_speed == by_speed
    assert by_speed or race.most == len(race.engines)


# The plan.


def test_eager_alone_is_measured_without_a_race() -> None:
    made = planned(engines=["eager"], time_seconds=30)
    assert "latency" in {step.id for step in made.steps}
    assert not [step for step in made.steps if isinstance(step.task, Race)]


def test_what_is_dropped_is_not_measured_in_full() -> None:
    made = planned(data="digits", budgets={"max_drop": 0.01}, time_seconds=100, engines=["onnxruntime", "compiled"])
    by_id = {step.id: step for step in made.steps}
    race = by_id[RACE]
    assert isinstance(race.task, Race)
    assert race.optional_inputs["onnxruntime-fp32 verified"] == "verify-onnxruntime-fp32"
    variant = next(variant for variant in made.variants if variant.id == "onnxruntime-fp32")
    for kind in ("memory", "quality"):
        for name in ("onnxruntime-fp32", "compiled-fp32"):  # the second one has no options to tune
            assert f"stay-{name}" in made.leading_to([by_id[f"{kind}-{name}"].id])
    assert by_id["latency"].optional_inputs["onnxruntime-fp32"] == variant.artifact
    assert "stay-onnxruntime-fp32" in made.leading_to([by_id["latency"].optional_inputs["onnxruntime-fp32 verified"]])
    assert by_id["latency"].task.settings.time_limit_seconds == 5.0  # type: ignore[attr-defined]
    assert by_id["verify-compiled-fp32"].search
    assert not by_id["reference"].search
    assert not race.search
    assert not any(step.search for step in made.steps if "tuned" in step.id or step.id.kind in ("tune", "memory"))


def test_int8_dynamic_is_judged_in_a_batch_that_is_measured() -> None:
    recipe = {
        "data": "digits",
        "budgets": {"max_drop": 0.01},
        "precisions": ["fp32", "int8-dynamic"],
        "engines": ["onnxruntime"],
    }
    steps = {step.id: step.task for step in planned(**recipe).steps}
    apart = {name: task.rows_apart for name, task in steps.items() if isinstance(task, Quality)}
    assert apart["quality-onnxruntime-fp32"]
    assert not apart["quality-onnxruntime-int8-dynamic"]


def test_a_loss_is_judged_before_the_race_on_samples_for_choosing() -> None:
    made = planned(data="digits", budgets={"max_drop": 0.01}, engines=["onnxruntime"], time_seconds=60,
                   precisions=["fp32", "int8"], quantization={"quantizers": ["own", "nncf"]})  # fmt: skip
    by_id = {step.id: step for step in made.steps}
    assert by_id[RACE].optional_inputs["onnxruntime-int8-nncf choice"] == "choice-onnxruntime-int8-nncf"
    assert by_id["choice-onnxruntime-int8-nncf"].task.data_options.part == "choice"  # type: ignore[attr-defined]
    assert by_id["quality-onnxruntime-int8-nncf"].task.data_options.part == "judgement"  # type: ignore[attr-defined]
    assert by_id["search-int8-onnxruntime-1"].task.goal.quality.data_options.part == "choice"  # type: ignore[attr-defined]
    for known in ("onnxruntime-fp32", "onnxruntime-int8"):  # a search has judged the second one on the same samples
        assert f"{known} choice" not in by_id[RACE].optional_inputs


@pytest.fixture(params=["avx2", "amx_bf16"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Plan for a processor, with or without instructions for bf16."""
    for module in (eager, openvino):
        monkeypatch.setattr(module, "vector_units", lambda: (request.param,))
    return str(request.param)


def test_what_takes_long_to_make_waits_for_a_first_race(processor: str) -> None:
    made = planned(("compiled-fp32",), data="digits", budgets={"max_drop": 0.01})
    order = [step.id for step in made.steps]
    assert all(order.index(source) < order.index(step.id) for step in made.steps for source in step.sources)
    by_id = {step.id: step for step in made.steps}
    first, race = by_id["race-first"].task, by_id[RACE]
    assert isinstance(first, Race)
    lossy = {"compiled-bf16"} if "bf16" in processor else set()
    in_fp32 = ("eager", "onnxruntime-fp32", "openvino-fp32")
    assert first.unmade == {
        "compiled-fp32": in_fp32,
        "aotinductor-fp32": in_fp32,
        **dict.fromkeys(lossy, ("eager-bf16", "openvino-bf16")),
    }
    assert lossy == {name for name in first.unmade if f"{name} choice" in race.optional_inputs}
    assert first.kept == ("compiled-fp32",)
    assert first.originals == ("eager", *(["eager-bf16"] if lossy else []))
    assert {by_id["race-first"].inputs[name] for name in first.originals} == {"load"}
    assert [first.engines[name].arithmetic for name in first.originals] == ["fp32", *(["bf16"] if lossy else [])]
    assert not any("compiled" in name or "aotinductor" in name for name in by_id["race-first"].optional_inputs)
    assert race.inputs[EARLIER] == "race-first"
    assert {"compiled-fp32", "onnxruntime-int8"} < set(race.optional_inputs)
    for name in ("verify-compiled-fp32", "build-aotinductor-fp32"):
        assert by_id[name].inputs[STAY] == f"stay-{name.partition('-')[2]}-first"
    assert STAY not in by_id["build-onnxruntime-fp32"].inputs
    listed = planned(time_seconds=60, engines=["onnxruntime", "openvino", "compiled"])
    assert "race-first" not in {step.id for step in listed.steps}


@pytest.mark.parametrize(
    ("values", "recovery"),
    [
        ({"time_seconds": 600}, 120),
        ({"time_seconds": 600, "recovery": {"seconds": 30}}, 30),
        ({"time_seconds": 300}, None),
        ({}, None),
        ({"time_seconds": 600, "budgets": {"max_drop": 0}}, None),
        ({"time_seconds": 600, "engines": ["onnxruntime"]}, None),
        ({"time_seconds": 600, "append": ["softmax"]}, None),
    ],
)
def test_half_of_the_work_is_pruned_where_there_is_time_to_train_back(
    values: dict[str, Any], recovery: float | None
) -> None:
    recipe = make({"model": "digits", "data": "digits", "budgets": {"max_drop": 0.01}, **values})
    assert recipe.prune == (("macs=-50%",) if recovery else ())
    assert recipe.recover == bool(recovery)
    if recovery:
        assert recipe.recovery.seconds == recovery


def test_a_graph_is_not_pruned(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").touch()
    model = str(tmp_path / "net.onnx")
    assert not make({"model": model, "data": "digits", "budgets": {"max_drop": 0.01}, "time_seconds": 600}).prune


@pytest.mark.parametrize("trains", [False, True])
def test_the_last_search_takes_what_is_left_unless_something_slow_follows(tmp_path: Path, trains: bool) -> None:
    """Training follows, and compiled variants of a module; of a graph there are none."""
    asked: dict[str, Any] = {"data": "digits", "budgets": {"max_drop": 0.01}, "time_seconds": 600}
    text = '<ir_version: 9, opset_import: ["": 20]> g (float[batch, 8] x) => (float[batch, 8] y) { y = Neg(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    asked |= {"recovery": {"seconds": 60}} if trains else {}
    shares = defaultdict(set)
    for step in planned(model=str(tmp_path / "net.onnx"), **asked).steps:
        if isinstance(step.task, Search) and step.id.subject[0] == "int8":
            shares[step.id.subject[1]].add(step.task.time_share)
    assert shares == {"onnxruntime": {0.5}, "openvino": {0.5 if trains else 0.9}}


@pytest.mark.parametrize(
    ("asked", "ends"),
    [
        ({}, True),
        ({"budgets": {"max_drop": 0.01, "max_size_bytes": 1 << 20}}, False),
        ({"engines": ["onnxruntime", "openvino"], "precisions": ["fp32", "int8"]}, False),
    ],
)
def test_a_search_ends_early_where_speed_alone_decides_among_variants_that_were_found(
    asked: dict[str, Any], ends: bool
) -> None:
    steps = planned(**{"data": "digits", "budgets": {"max_drop": 0.01}, "time_seconds": 600, **asked}).steps
    rivals = defaultdict(set)
    for step in steps:
        if isinstance(step.task, Search):
            rivals[step.task.engine.name].add(tuple(step.task.rivals))
            roles = {role for name in step.task.rivals for role in (f"rival {name}", f"rival {name} verified")}
            assert roles == {role for role in step.optional_inputs if role.startswith("rival")}
    expected = {"onnxruntime": {("openvino-fp32",)}, "openvino": {("onnxruntime-fp32",)}}
    assert rivals == (expected if ends else {name: {()} for name in expected})


def test_what_is_pruned_waits_for_its_dense_variant_and_for_its_own_loss() -> None:
    made = planned(data="digits", budgets={"max_drop": 0.01}, time_seconds=600)
    order = [step.id for step in made.steps]
    assert all(order.index(source) < order.index(step.id) for step in made.steps for source in step.sources)
    by_id = {step.id: step for step in made.steps}
    first, race = by_id["race-first"].task, by_id[RACE]
    assert isinstance(first, Race)
    assert isinstance(race.task, Race)
    assert first.dense["onnxruntime-int8-prune-macs50"] == "onnxruntime-int8"
    assert not any(name.startswith(("compiled", "aotinductor")) for name in first.dense)
    assert not any("prune" in name for name in (*first.engines, *first.unmade))
    stay, gated = by_id[by_id["recover-prune-macs50"].inputs[STAY]], by_id[by_id["export-prune-macs50"].inputs[STAY]]
    assert by_id["prune-macs50"].inputs[STAY] == stay.id
    assert stay.task.variants == gated.task.variants == tuple(first.dense)  # type: ignore[attr-defined]
    assert (stay.task.max_drop, gated.task.max_drop) == (None, 0.01)  # type: ignore[attr-defined]
    assert (CHOICE in stay.inputs, gated.inputs[CHOICE]) == (False, "choice-eager-prune-macs50")
    assert race.optional_inputs[PRUNED_CHOICE] == by_id["choice-eager-prune-macs50"].id
    assert by_id["choice-eager-prune-macs50"].inputs["model"] == "recover-prune-macs50"
    own = by_id[by_id["verify-openvino-int8-prune-macs50"].inputs[STAY]].task
    assert own.variants == ("openvino-int8-prune-macs50",)  # type: ignore[attr-defined]
    assert not any("stay-prune" in made.leading_to([step.id]) for step in made.steps if step.id.endswith("int8"))


def test_on_cuda_where_compiling_gains_more_it_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("onnxruntime", "compiled"):
        monkeypatch.setattr(engine_class(name), "installed", lambda device: Availability(ok=True))
    made = planned(device="cuda", data="digits", budgets={"max_drop": 0.01})
    assert "compiled-fp32" in {variant.id for variant in made.variants}
    assert "race-first" not in {step.id for step in made.steps}


@pytest.mark.parametrize(("listed", "least"), [({}, 0.05), ({"engines": ["onnxruntime"], "precisions": ["int8"]}, 0)])
def test_a_precision_with_little_work_is_tried_only_where_it_was_asked_for(listed: dict[str, Any], least: int) -> None:
    made = planned(data="digits", budgets={"max_drop": 0.01}, **listed)
    tasks = [step.task for step in made.steps if isinstance(step.task, Sensitivity)]
    assert {task.least_share for task in tasks if not KINDS[task.step.precision].lowered} == {least}


def test_what_was_measured_earlier_is_kept() -> None:
    race = next(step for step in planned(("openvino-fp32", "gone"), time_seconds=60).steps if step.id == RACE)
    assert race.task.kept == ("openvino-fp32",)  # type: ignore[attr-defined]


def test_races_know_what_dropped_out_of_earlier_ones() -> None:
    rows = [RaceRow(variant="openvino-fp32", lap=1, dropped="slower", engine_sha256="ab")]
    made = planned(data="digits", budgets={"max_drop": 0.01})
    races = {step.id: step.task for step in race_again(made, rows, {}).steps if isinstance(step.task, Race)}
    assert {name: task.earlier for name, task in races.items()} == {"race-first": (*rows,), RACE: (*rows,)}


@pytest.mark.parametrize(("guilty", "out"), [("export", True), ("engine", False), ("", False)])
def test_all_variants_drop_out_that_share_a_stage_which_is_wrong(guilty: str, out: bool) -> None:
    made = race_again(planned(time_seconds=60), [], {"onnxruntime-fp32": guilty})
    race = next(step.task for step in made.steps if step.id == RACE)
    assert isinstance(race, Race)
    assert race.failed == ("onnxruntime-fp32",)
    reasons = {row.variant: row.dropped for row in race.earlier}
    assert reasons == ({"openvino-fp32": "export is wrong, as onnxruntime-fp32 showed"} if out else {})


@pytest.mark.parametrize(
    ("failures", "end"),
    [
        ([], End(unfinished=NO_TIME)),
        ([None, NO_TIME], End()),
        ([NO_TIME, NO_TIME], End(unfinished=NO_TIME)),
        (["it hangs", "it hangs"], End("latency at batch 1: it hangs")),
    ],
)
def test_a_variant_whose_latency_is_known_can_be_used_without_its_memory(failures: list[str | None], end: End) -> None:
    made = planned(time_seconds=60)
    variant = made.variants[0]
    assert variant.memory
    outcomes = {step.id: Outcome(step.id, "done") for step in made.steps}
    outcomes[variant.memory] = Outcome(variant.memory, "skipped", reason=NO_TIME)
    rows = tuple(LatencyRow(batch=1, failure=failure, late=failure == NO_TIME) for failure in failures)
    assert explain_end(variant, made, outcomes, rows) == end


LOSSY = {"precisions": ["fp32", "int8"], "budgets": {"max_drop": 0.01}}
GOOD = Artifact(kind="record", path=Path("r"), sha256="", bytes=0)


def begun(*engines: str, **more: Any) -> _ActiveRun:
    return start(make({"model": "digits", "data": "digits", "time_seconds": 60, "engines": engines, **more}))


def start(recipe: Recipe) -> _ActiveRun:
    made, directory = plan(resolve_recipe(recipe)), SimpleNamespace(update=lambda outcomes: None)
    return _ActiveRun(RunRequest("demo", recipe, Path("demo")), made, directory)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "status", "over"),
    [("quality", "skipped", ""), ("memory", "skipped", ""), ("build", "skipped", NO_TIME), ("quality", "failed", "no")],
)
def test_latency_is_measured_although_no_time_is_left_to_judge(kind: str, status: Status, over: str) -> None:
    """A variant that no time was left to make cannot win, nor can any if the metric cannot be computed."""
    active = begun("onnxruntime", "openvino")
    ends = {"status": status, "reason": NO_TIME if status == "skipped" else "no class"}
    for step in active.plan.steps:
        ended = {"status": "done"} if step.id.kind != kind else ends
        active.add({step.id: Outcome(step.id, **ended)})  # type: ignore[arg-type]
    assert bool(active.over) is bool(over)
    assert over in active.over


def test_variants_that_no_time_was_left_to_make_may_be_tried_again() -> None:
    """Steps that are skipped for that have the time as their reason, too."""
    active = begun("onnxruntime", "openvino", precisions=["int8"], budgets={"max_drop": 0.01})
    active.add({step: Outcome(step, "done", artifact=GOOD) for step in ("load", "reference")})
    active.add({"export": Outcome("export", "skipped", reason=NO_TIME)})
    assert {*active.list_pointless().values()} == {active.over} == {NO_TIME}


def test_inputs_are_tried_first_on_the_variant_that_wins_as_things_stand() -> None:
    """Which one that is can change with the latencies, and with each variant that turns out to be wrong."""
    active = begun("onnxruntime", "openvino")
    active.directory.write = lambda: SimpleNamespace(winner="openvino-fp32")  # type: ignore[method-assign, assignment, return-value]
    first, *others = active.order_prosecutions()
    assert first == "prosecute-openvino-fp32"
    assert set(others) == {variant.prosecuted for variant in active.plan.variants} - {first}
    telling = {step.id for step in active.plan.steps if active.may_change_winner(step.id)}
    assert telling == {"latency", first, *others}


def test_the_first_stage_that_is_wrong_is_to_blame_in_whatever_order_stages_are_verified() -> None:
    active = begun("onnxruntime")
    for step in ("load", "reference", "export", "simplify"):
        active.add({step: Outcome(step, "done")})
    for step, over in (("verify-simplify", ""), ("verify-export", "no variant can win any more: verify-export: wrong")):
        active.add({step: Outcome(step, "failed", reason="wrong")})
        assert active.over == over


def test_the_reason_why_no_variant_can_win_any_more_keeps_what_to_do() -> None:
    active, error = begun("onnxruntime"), InvalidGraph("it has no kernel", "take opset 21")
    for step in ("load", "reference", "export"):
        active.add({step: Outcome(step, "done")})
    active.add({"verify-export": Outcome("verify-export", "failed", reason=f"{error}\nby far", error=error)})
    assert active.over == "no variant can win any more: verify-export: it has no kernel\n  → take opset 21"


def test_nothing_more_is_made_for_variants_whose_graph_is_wrong() -> None:
    """Steps that others need, or that compare all, go on; so does the search of an engine whose fp32 alone is wrong."""
    active = begun("onnxruntime", "compiled", **LOSSY)
    steps = {step.id for step in active.plan.steps}
    active.add({step: Outcome(step, "done") for step in ("load", "reference", "export", "simplify")})
    assert active.list_pointless() == {}
    active.add({"verify-simplify": Outcome("verify-simplify", "failed", reason="simplified")})
    assert active.list_pointless() == {}, "the export may be to blame"
    active.add({"verify-export": Outcome("verify-export", "failed", reason="wrong\nby far")})
    pointless = active.list_pointless()
    searched = {"calibrate", "search-int8-onnxruntime-1", "search-int8-onnxruntime-2", "assign-int8-onnxruntime"}
    assert searched | {"build-onnxruntime-fp32", "verify-onnxruntime-int8", "memory-onnxruntime-int8"} <= set(pointless)
    assert set(pointless.values()) == {"verify-export: wrong"}
    needed = {"load", "reference", "latency", "verify-compiled-fp32", "memory-eager", "memory-compiled-fp32"}
    assert needed <= steps - set(pointless)
    assert "quality-eager" not in pointless


def test_a_variant_whose_graph_is_wrong_has_failed_also_where_a_step_before_the_check_was_skipped() -> None:
    active = begun("onnxruntime", "compiled")
    active.add({step: Outcome(step, "done") for step in ("load", "reference", "export")})
    wrong = GOOD.model_copy(update={"rejected": "after export: wrong"})
    active.add({"verify-export": Outcome("verify-export", "done", artifact=wrong)})
    active.add({"simplify": Outcome("simplify", "skipped", reason="after export: wrong")})
    (variant,) = (each for each in active.plan.variants if each.id == "onnxruntime-fp32")
    assert explain_end(variant, active.plan, active.outcomes).failure == "after export: wrong"


def test_an_engine_of_which_the_last_graph_alone_is_wrong_is_built() -> None:
    """It is kept to be loaded by its name; nothing is measured of it."""
    active = begun("onnxruntime", "compiled", **LOSSY)
    ends = {step: Outcome(step, "done") for step in ("load", "reference", "export", "simplify")}
    active.add(ends | {"verify-export": Outcome("verify-export", "done", artifact=GOOD)})
    active.add({"verify-simplify": Outcome("verify-simplify", "failed", reason="wrong")})
    pointless = active.list_pointless()
    assert "build-onnxruntime-fp32" not in pointless
    assert {"memory-onnxruntime-fp32", "search-int8-onnxruntime-1", "build-onnxruntime-int8"} <= set(pointless)


def test_what_a_search_needs_of_a_wrong_variant_is_made_all_the_same() -> None:
    active = begun("onnxruntime", **LOSSY)
    ends = {step: Outcome(step, "done") for step in ("load", "reference", "export", "simplify")}
    active.add(ends | {step: Outcome(step, "done", artifact=GOOD) for step in ("verify-export", "verify-simplify")})
    wrong = Outcome("verify-onnxruntime-fp32", "failed", reason="its kernels")
    active.add({"build-onnxruntime-fp32": Outcome("build-onnxruntime-fp32", "done", artifact=GOOD), wrong.step: wrong})
    pointless = active.list_pointless()
    assert "memory-onnxruntime-fp32" in pointless
    assert not {"build-onnxruntime-fp32", "calibrate", "search-int8-onnxruntime-1", "latency"} & set(pointless)


def test_a_variant_without_onnx_graph_outlasts_a_search_once_those_with_one_have_failed() -> None:
    active = begun("onnxruntime", "compiled", "aotinductor")
    active.add({step: Outcome(step, "done") for step in ("load", "reference", "export", "simplify")})
    assert active.list_last_resort() == []
    active.add({"verify-export": Outcome("verify-export", "failed", reason="wrong")})
    assert {"load", "verify-compiled-fp32"} <= set(active.list_last_resort())
    assert "build-aotinductor-fp32" not in active.list_last_resort()
    active.add({"verify-compiled-fp32": Outcome("verify-compiled-fp32", "failed", reason="wrong")})
    assert "verify-compiled-fp32" not in active.list_last_resort()
    assert {"build-aotinductor-fp32", "verify-aotinductor-fp32"} <= set(active.list_last_resort())
    active.add({"build-aotinductor-fp32": Outcome("build-aotinductor-fp32", "failed", reason="no compiler")})
    assert active.list_last_resort() == []


def test_where_no_variant_has_an_onnx_graph_one_outlasts_a_search_from_the_beginning() -> None:
    assert "build-aotinductor-fp32" in begun("aotinductor").list_last_resort()


def test_a_variant_without_onnx_graph_begins_as_soon_as_no_graph_can_win() -> None:
    """It waits for the first race, which waits for all that have a graph: these end at once."""
    active = start(make({"model": "digits", "data": "digits", "time_seconds": 60, "budgets": {"max_drop": 0.01}}))
    active.add({step: Outcome(step, "done") for step in ("load", "reference", "export", "simplify", "choice-eager")})
    active.add({"verify-export": Outcome("verify-export", "failed", reason="wrong")})
    waits_for, pointless = {"build-aotinductor-fp32"}, active.list_pointless()
    for step in reversed(active.plan.steps):
        if step.id in waits_for and step.id not in pointless:
            waits_for.update(step.sources)
    left = waits_for - pointless.keys() - active.outcomes.keys()
    assert left == {"race-first", "stay-aotinductor-fp32-first", "build-aotinductor-fp32"}
