"""The race: how variants are found, which of them drop out, and how a plan goes around it."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from enginesmith.pipeline.engines import ENGINES, engine_class
from enginesmith.pipeline.engines.openvino import engine as openvino
from enginesmith.pipeline.engines.torch import eager
from enginesmith.pipeline.errors import NO_TIME, ModelError, UsageError
from enginesmith.pipeline.execution.events import Outcome
from enginesmith.pipeline.measure.rows import LatencyRow, RaceRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.planning.plan import Plan, StepRef
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report.run_tables import _status
from enginesmith.pipeline.report.sentences import _describe_search
from enginesmith.pipeline.results.assemble import explain_end
from enginesmith.pipeline.results.run import VariantRecord
from enginesmith.pipeline.system import cpu, software
from enginesmith.pipeline.system.device import Availability, Device
from enginesmith.pipeline.tasks.base import RECORDS, read_models, scratch_artifact, write_records
from enginesmith.pipeline.tasks.mixed_precision import ASSIGNMENT, DROP_HIGH, Search
from enginesmith.pipeline.tasks.race import (
    CHOICE,
    EARLIER,
    PRUNED_CHOICE,
    RACE,
    STAY,
    Race,
    Stay,
    drop_slow,
    explain_unmade,
)


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
        ("3.4.0", {"quantisation": {"quantizers": ["nncf"]}}, ("nncf",)),
        ("3.4.0", {"budgets": {}}, ("own",)),
    ],
)
def test_nncf_is_tried_where_it_is_installed(
    version: str | None, values: dict[str, Any], quantizers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "version", lambda name: version)
    recipe = make({"model": "digits", "data": "digits", "budgets": {"max_drop": 0.01}, **values})
    assert recipe.quantisation.quantizers == quantizers
    if version and "quantisation" not in values and recipe.budgets.max_drop:
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


# The plan.


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
    assert by_id["build-onnxruntime-fp32"].search
    assert not by_id["reference"].search
    assert not race.search
    assert not any(step.search for step in made.steps if "tuned" in step.id or step.id.kind in ("tune", "memory"))


def test_a_loss_is_judged_before_the_race_on_samples_for_choosing() -> None:
    made = planned(data="digits", budgets={"max_drop": 0.01}, engines=["onnxruntime"], time_seconds=60,
                   precisions=["fp32", "int8"], quantisation={"quantizers": ["own", "nncf"]})  # fmt: skip
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
    rankings = [step.task.least_share for step in made.steps if step.id.kind == "sensitivity"]  # type: ignore[attr-defined]
    assert set(rankings) == {least}


def test_what_was_measured_earlier_is_kept() -> None:
    race = next(step for step in planned(("openvino-fp32", "gone"), time_seconds=60).steps if step.id == RACE)
    assert race.task.kept == ("openvino-fp32",)  # type: ignore[attr-defined]


# The race itself.


def row(low: float, median: float, high: float) -> LatencyRow:
    return LatencyRow(batch=1, speedup=Interval(median=median, low=low, high=high))


@pytest.mark.parametrize(
    ("rows", "last", "dropped"),
    [
        ({"a": (1, 1, 1), "b": (1.9, 2, 2.1)}, False, {"a"}),
        ({"a": (1, 1, 1), "b": (1.05, 1.1, 1.2)}, False, set()),
        ({"a": (1, 1, 1), "b": (0.5, 2, 9)}, False, set()),
        ({"a": (1, 1, 1), "b": (1, 1.1, 1.2), "c": (1, 1.2, 1.3)}, True, {"a"}),
        ({"a": (1, 1, 1), "b": (1, 1.1, 1.2), "c": (1, 1.2, 1.3)}, False, set()),
        ({"safe": (1, 1, 1), "b": (4, 4, 4), "c": (4, 4, 4)}, True, set()),
        ({"safe": (4, 4, 4), "also safe": (1, 1, 1)}, False, {"also safe"}),
    ],
)
def test_the_clearly_slower_drop_out_and_the_fastest_lossless_stays(
    rows: dict[str, tuple[float, float, float]], last: bool, dropped: set[str]
) -> None:
    measured = {name: row(*ends) for name, ends in rows.items()}
    reasons = drop_slow(measured, (("safe", "also safe"),), 2, {}, last=last)
    assert set(reasons) == dropped
    assert all(reasons.values())


def test_the_dense_one_of_a_pruned_one_that_stays_stays_beside_it() -> None:
    measured = {
        name: row(speed, speed, speed) for name, speed in {"a-pruned": 4, "a": 2, "b-pruned": 2, "b": 1}.items()
    }
    assert set(drop_slow(measured, (), 3, {"a-pruned": "a", "b-pruned": "b"})) == {"b-pruned", "b"}


def test_the_fastest_that_hardly_loses_anything_stays_beside_the_lossless_one(tmp_path: Path) -> None:
    speeds = {"int8": 5, "nncf": 4.9, "int8-dynamic": 4.8, "bf16": 4, "slow-bf16": 3.9, "fp32": 2}
    measured = {name: row(speed, speed, speed) for name, speed in speeds.items()}
    safe = ("bf16", "slow-bf16", "fp32")
    assert set(drop_slow(measured, (("fp32",), safe), 3, {})) == {"slow-bf16"}
    assert set(drop_slow(measured, (("fp32",), ("fp32",)), 3, {})) == {"bf16", "slow-bf16"}
    inputs = {}
    for name, high in {"bf16": 0.002, "int8": 0.003}.items():
        quality = {"metric": "close", "value": 0.9, "baseline": 0.9, "drop": 0.001, "drop_high": high, "samples": 100}
        (tmp_path / name).mkdir()
        write_records(tmp_path / name, [quality])
        inputs[f"{name} {CHOICE}"] = scratch_artifact("record", tmp_path / name / RECORDS, None)
    task = Race(engines={}, lossless=("fp32",), seconds=1, most=3, max_drop=0.01, largest=False, device=Device())
    assert [name for name in speeds if task._hardly_loses(name, inputs)] == ["bf16", "fp32"]
    for name, most in {"found": 0.002, "lossy": 0.003, "unknown": None}.items():  # by a search, which judged it itself
        (tmp_path / name).mkdir()
        write_records(tmp_path / name, [{"group": "Conv_1", DROP_HIGH: most}])
        inputs = {f"{name} {ASSIGNMENT}": scratch_artifact("record", tmp_path / name / RECORDS, None)}
        assert task._hardly_loses(name, inputs) is (name == "found")


def test_a_noisy_ratio_is_told_by_its_near_end() -> None:
    reasons = drop_slow({"a": row(1, 1, 1), "b": row(2, 6, 20)}, (), 3, {})
    assert reasons == {"a": "b is at least 2.00× faster"}


@pytest.mark.parametrize(
    ("eager", "safe", "best", "said"),
    [
        ((0.9, 1, 1.1), (2, 2, 2), (2.1, 2.1, 2.1), ""),
        ((1, 1, 1), (2, 2, 2), (3, 3, 3), "best is 1.50× [1.50, 1.50] faster than safe"),
        ((1, 1, 1), (4.5, 4.5, 4.5), (5, 5, 5), "best is 5.00× [5.00, 5.00] faster than eager"),
        ((1, 1, 1), (5, 5, 5), (4, 4, 4), "safe is 5.00× [5.00, 5.00] faster than eager"),
        ((1, 1, 1), (2, 2, 2), (1, 3, 9), ""),
        ((1, 1, 1), (2, 2, 2), (9, 30, 90), "best is at least 9.00× faster than eager"),
    ],
)
def test_compiling_is_dropped_where_it_has_never_gained_so_much(
    eager: tuple[float, float, float],
    safe: tuple[float, float, float],
    best: tuple[float, float, float],
    said: str,
) -> None:
    rows = [
        RaceRow(variant=name, lap=1, speedup=row(*ends).speedup)
        for name, ends in {"eager": eager, "safe": safe, "best": best}.items()
    ]
    explained = explain_unmade(rows, ("eager", "safe", "dropped before"), ("eager", "eager-bf16"))
    assert explain_unmade(rows, ("dropped before",), ("eager",)) == ""
    assert said in explained
    assert bool(said) == bool(explained)


def test_compiling_in_bf16_is_judged_by_eager_in_bf16() -> None:
    speeds = {"eager": 1, "eager-bf16": 3, "best": 5}
    rows = [RaceRow(variant=name, lap=1, speedup=row(*[speed] * 3).speedup) for name, speed in speeds.items()]
    assert explain_unmade(rows, ("eager-bf16",), ("eager", "eager-bf16")) == ""
    slow = [*rows[:1], rows[1].model_copy(update={"speedup": row(0.5, 0.5, 0.5).speedup}), rows[2]]
    assert "faster than eager-bf16" in explain_unmade(slow, ("eager-bf16",), ("eager", "eager-bf16"))


def test_an_original_whose_calls_were_disturbed_says_nothing_of_compiling() -> None:
    """With other programs on the cores, eager was 4000 × slower than a variant of one thread."""
    eager = RaceRow(variant="eager", lap=1, speedup=row(1, 1, 1).speedup)
    best = RaceRow(variant="best", lap=1, speedup=row(3000, 4000, 5000).speedup)
    assert "faster than eager" in explain_unmade([eager, best], ("eager",), ("eager",))
    assert explain_unmade([eager, best.model_copy(update={"disturbed": True})], ("eager",), ("eager",)) == ""


def test_a_race_begins_with_what_an_earlier_one_dropped(tmp_path: Path) -> None:
    speed = row(1, 1, 1).speedup
    rows = [RaceRow(variant="a", lap=1, speedup=speed), RaceRow(variant="b", lap=1, speedup=speed, dropped="slow"),
            RaceRow(variant="c", lap=0, dropped="it was not made")]  # fmt: skip
    write_records(tmp_path, rows)
    record = scratch_artifact("record", tmp_path / RECORDS, None)
    engine = engine_class("onnxruntime")()
    task = Race(engines=dict.fromkeys("abc", engine), lossless=(), seconds=1, most=0, max_drop=None, largest=False,
                device=Device())  # fmt: skip
    (tmp_path / "out").mkdir()
    effect = task.run({EARLIER: record, "a verified": record, "b verified": record}, tmp_path / "out", print)
    assert read_models(scratch_artifact("record", tmp_path / "out" / RECORDS, None), RaceRow) == rows
    assert effect.summary == "1 of 2 variants are measured in full"


def test_rounds_that_are_too_few_drop_nobody() -> None:
    assert drop_slow({"a": LatencyRow(batch=1), "b": row(1, 1, 1)}, (), 1, {}, last=True) == {}


def few(milliseconds: float) -> LatencyRow:
    return LatencyRow(batch=1, p50_ms=milliseconds)


class Laps:
    """A benchmark whose rows are known: by lap, the speed of each variant, the time of a call, or why it has none."""

    def __init__(self, laps: list[dict[str, Any]], late_after: int) -> None:
        self.laps, self.late_after, self.lap = laps, late_after, 0

    @property
    def late(self) -> bool:
        return self.lap >= self.late_after

    def measure(self, batch: int, feeds: Any, only: list[str]) -> None:
        self.lap += 1

    def rows(self, name: str) -> list[LatencyRow]:
        found = self.laps[self.lap - 1].get(name, NO_TIME)
        if isinstance(found, LatencyRow):
            return [found]
        return [LatencyRow(batch=1, failure=found) if isinstance(found, str) else row(found, found, found)]


@pytest.mark.parametrize(
    ("laps", "ends"),
    [
        ([{"a": 1, "b": 5, "c": 4, "d": 4.9}], {"c": "b is 1.25× [1.25, 1.25] faster"}),
        ([{"a": 1, "b": 4.7, "c": 4.8, "d": 4.9}], {"b": "it is number 3 in speed, and 2 are measured in full"}),
        (
            [{"a": 1, "b": 4.7, "c": 4.8, "d": 4.9}, {"a": 1}],
            {"b": "it is number 3 in speed, and 2 are measured in full"},
        ),
        ([{"a": 1, "b": 5}], {"c": NO_TIME, "d": NO_TIME}),
        ([{}], {"c": NO_TIME, "d": NO_TIME}),
        ([{"b": "it crashed"}], {"b": "it crashed", "d": NO_TIME}),
        ([{"a": few(9), "b": few(5), "c": few(2), "d": few(1)}], {"b": NO_TIME, "c": NO_TIME}),
        ([{"a": few(9), "b": few(5), "c": few(2), "d": few(4)}, {}], {"b": NO_TIME, "d": NO_TIME}),
        ([{"a": 1, "b": few(5), "c": few(2), "d": few(4)}], {"b": NO_TIME, "d": NO_TIME}),
    ],
)
def test_what_an_earlier_lap_found_counts_where_the_time_was_over(
    laps: list[dict[str, Any]], ends: dict[str, str]
) -> None:
    """Else all would be tuned, in the time that is kept for their latencies; or nothing would be left to measure."""
    task = Race(engines={}, lossless=("a",), seconds=1, most=2, max_drop=None, largest=False, device=Device())
    rows = list(task._run_laps(Laps(laps, len(laps)), [*"abcd"], [], 1, {}, print))  # type: ignore[arg-type]
    found = {each.variant: each.dropped or each.failure for each in rows if each.dropped or each.failure}
    assert found == ends


def test_too_large_a_loss_drops_a_variant_before_the_first_lap(tmp_path: Path) -> None:
    quality = {"metric": "top1", "title": "top-1", "value": 0.9, "baseline": 0.95, "drop": 0.05, "samples": 100}
    write_records(tmp_path, [quality])
    task = Race(engines={}, lossless=(), seconds=1, most=3, max_drop=0.01, largest=False, device=Device())
    inputs = {"a choice": scratch_artifact("record", tmp_path / RECORDS, None)}
    judged = task._judge_drop("a", inputs, "a choice")
    assert judged is not None
    assert judged.dropped == "its accuracy on the samples for choosing: the drop of 0.0500 is more than 0.01"
    assert task._judge_drop("b", inputs, "b choice") is None
    assert task.model_copy(update={"kept": ("a",)})._judge_drop("a", inputs, "a choice") is None


def test_a_pruned_variant_is_made_if_its_dense_one_is_left_and_its_module_is_good_enough(tmp_path: Path) -> None:
    quality = {"metric": "top1", "title": "top-1", "value": 0.4, "baseline": 0.95, "drop": 0.55, "samples": 100}
    speed = row(1, 1, 1).speedup
    inputs, device = {}, Device()
    for name, records in {
        "race": [
            RaceRow(variant="a", lap=1, speedup=speed),
            RaceRow(variant="b", lap=1, speedup=speed, dropped="slow"),
        ],
        "quality": [quality],
    }.items():
        (tmp_path / name).mkdir()
        write_records(tmp_path / name, records)
        inputs[name] = scratch_artifact("record", tmp_path / name / RECORDS, None)
    engines = dict.fromkeys(("a", "b"), engine_class("onnxruntime")())
    dense = {"a-pruned": "a", "b-pruned": "b"}
    task = Race(
        engines=engines, lossless=(), seconds=1, most=0, max_drop=0.01, largest=False, device=device, dense=dense
    )
    verified = {EARLIER: inputs["race"], "a verified": inputs["race"], "b verified": inputs["race"]}
    task.run(verified, tmp_path, print)
    said = {
        each.variant: each.dropped
        for each in read_models(scratch_artifact("record", tmp_path / RECORDS, None), RaceRow)
    }
    assert said == {"a": "", "b": "slow", "b-pruned": "it was not made: b is out of the race"}
    last = task.model_copy(update={"engines": engines | {"a-pruned": engines["a"]}})
    last.run({**verified, PRUNED_CHOICE: inputs["quality"]}, tmp_path, print)
    said = {
        each.variant: each.dropped
        for each in read_models(scratch_artifact("record", tmp_path / RECORDS, None), RaceRow)
    }
    assert said["a-pruned"] == "its accuracy on the samples for choosing: the drop of 0.5500 is more than 0.01"


def test_steps_of_several_variants_continue_while_one_stays(tmp_path: Path) -> None:
    quality = {"metric": "top1", "title": "top-1", "value": 0.94, "baseline": 0.95, "drop": 0.01, "samples": 100}
    write_records(tmp_path, [RaceRow(variant="b", lap=1, dropped="no"), RaceRow(variant="c", lap=1, dropped="slow")])
    record = scratch_artifact("record", tmp_path / RECORDS, None)
    (tmp_path / "out").mkdir()
    assert Stay(variants=("b", "a")).run({RACE: record}, tmp_path / "out", print).rejected == ""
    assert Stay(variants=("b", "c")).run({RACE: record}, tmp_path / "out", print).rejected == "dropped: no"
    (tmp_path / "quality").mkdir()
    write_records(tmp_path / "quality", [quality])
    judged = {RACE: record, CHOICE: scratch_artifact("record", tmp_path / "quality" / RECORDS, None)}
    assert Stay(variants=("a",), max_drop=0.01).run(judged, tmp_path / "out", print).rejected == ""
    rejected = Stay(variants=("a",), max_drop=0.0).run(judged, tmp_path / "out", print).rejected
    assert rejected == "dropped: its accuracy on the samples for choosing: the drop of 0.0100 is more than 0"


@pytest.mark.parametrize(("end", "rejected"), [({}, ""), ({"dropped": "b is 2× faster"}, "dropped: b is 2× faster")])
def test_a_variant_stays_or_ends_with_the_reason(tmp_path: Path, end: dict[str, str], rejected: str) -> None:
    write_records(tmp_path, [RaceRow(variant="b", lap=1, dropped="no"), RaceRow(variant="a", lap=1, **end)])
    inputs = {RACE: scratch_artifact("record", tmp_path / RECORDS, None)}
    assert Stay(variants=("a",)).run(inputs, tmp_path, print).rejected == rejected


def test_a_variant_that_crashes_in_the_race_has_failed(tmp_path: Path) -> None:
    write_records(tmp_path, [RaceRow(variant="a", lap=1, failure="it crashed")])
    with pytest.raises(ModelError, match="it failed in the race: it crashed"):
        Stay(variants=("a",)).run({RACE: scratch_artifact("record", tmp_path / RECORDS, None)}, tmp_path, print)


def test_a_variant_that_no_time_was_left_for_has_not_failed(tmp_path: Path) -> None:
    write_records(tmp_path, [RaceRow(variant="a", lap=1, failure=NO_TIME)])
    inputs = {RACE: scratch_artifact("record", tmp_path / RECORDS, None)}
    assert Stay(variants=("a",)).run(inputs, tmp_path, print).rejected == NO_TIME


@pytest.mark.parametrize(
    ("failures", "end"),
    [
        ([], ("", "", NO_TIME)),
        ([None, NO_TIME], ("", "", "")),
        ([NO_TIME, NO_TIME], ("", "", NO_TIME)),
        (["it hangs", "it hangs"], ("latency at batch 1: it hangs", "", "")),
    ],
)
def test_a_variant_whose_latency_is_known_can_be_used_without_its_memory(
    failures: list[str | None], end: tuple[str, str, str]
) -> None:
    made = planned(time_seconds=60)
    variant = made.variants[0]
    assert variant.memory
    outcomes = {step.id: Outcome(step.id, "done") for step in made.steps}
    outcomes[variant.memory] = Outcome(variant.memory, "skipped", reason=NO_TIME)
    rows = tuple(LatencyRow(batch=1, failure=failure) for failure in failures)
    assert explain_end(variant, made, outcomes, rows) == end


# What the report says.


def test_the_report_tells_what_became_of_each_variant_and_what_is_left() -> None:
    ends: dict[str, dict[str, Any]] = {
        "a": {"status": "measured", "race": [RaceRow(variant="a", lap=1)]},
        "b": {"status": "skipped", "race": [RaceRow(variant="b", lap=1, dropped="a is faster")]},
        "c": {"status": "skipped", "untried": True},
        "d": {"status": "failed", "race": [RaceRow(variant="d", lap=1, dropped="a is faster")]},
        "e": {"status": "skipped", "reason": "only 0 % of the multiply-adds have a form in int8-dynamic"},
        "f": {"status": "built", "reason": "no CUDA device here"},
    }
    records = [VariantRecord(id=name, engine="openvino", precision="fp32", **end) for name, end in ends.items()]
    said = list(_describe_search(SimpleNamespace(requested=tuple(records))))  # type: ignore[arg-type]
    assert said == [
        "search: 6 variants: 1 measured in full, 1 dropped, 1 skipped, 1 built and not measured, 1 failed, "
        "1 not tried, as the time was over",
        "search: with as much time again, `enginesmith resume` tries c",
    ]
    assert records[1].dropped == "a is faster"
    assert [_status(record) for record in records] == ["measured", "dropped", "not tried", "failed", "skipped", "built"]
