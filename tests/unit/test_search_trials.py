"""Test trials of a precision: what they are judged by, and which groups stay in floating point."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginesmith.calibration.options import PartOptions
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import simulation
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.samples import Case, Samples
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.passes.quantize.layers import NothingToQuantize
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.quantize.search import Trial
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks import graph_forms, mixed_precision
from enginesmith.pipeline.tasks.base import RECORDS, read_models, write_records
from enginesmith.pipeline.tasks.calibrate import Feeder
from enginesmith.pipeline.tasks.graph_forms import REFERENCE, Sensitivity
from enginesmith.pipeline.tasks.mixed_precision import BEFORE, FLOAT, Assign, Goal, Search, trial_role
from enginesmith.pipeline.tasks.quality import BASELINE
from graphs import save_operator
from two_products import prepare

FAILED = Trial(passed=False, error=1.0, phase="everything", method="mse", kept=(), why="everything quantized")


def search(inputs: dict[str, Artifact], folder: Path, **fields: Any) -> list[Trial]:
    """Make three trials for a goal that int8 cannot reach, unless the search ends before."""
    engine = simulation()
    goal = Goal(threshold="int8", min_sqnr_db=150, max_drop=None, quality=None, simulation=engine)
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax")
    settings = {"step": step, "engine": engine, "device": Device(), "goal": goal, "methods": ("minmax",), "keep": ()}
    task = Search(**{**settings, **fields})
    for index in range(3):
        (out := folder / str(index)).mkdir()
        effect = task.run(inputs, out, lambda _: None)
        inputs[BEFORE] = Artifact(kind="record", path=out / effect.file, sha256="", bytes=0)
    return read_models(inputs[BEFORE], Trial)


@pytest.mark.parametrize(
    ("low", "ranges", "reason"),
    [
        (300.0, {"y": 6.0}, "the root mean square error is"),
        (0.0, {}, "SQNR 0.0 dB is too little, below 10 dB"),
    ],
)
def test_a_trial_names_the_bound_that_failed(tmp_path: Path, low: float, ranges: dict[str, float], reason: str) -> None:
    rows = (low + np.random.default_rng(0).standard_normal((64, 3))).astype(np.float32)
    case = Case(points=("min",), sizes={"batch": 64}, batch=64)
    samples.write(tmp_path, Samples(data="x", ranges={}, cases=(case,), spans=ranges))
    samples.write_arrays(tmp_path, "feeds", 0, {"x": rows})
    samples.write_arrays(tmp_path, "outputs", 0, {"y": rows})
    reference = Artifact(kind="reference", path=tmp_path / samples.RECORD, sha256="", bytes=0)
    goal = Goal(threshold="int8", min_sqnr_db=None, max_drop=None, quality=None, simulation=simulation())
    made = save_operator(tmp_path / "flat.onnx", "Clip", low, low)
    judged, _ = goal.judge(simulation(), made, Device(), {REFERENCE: reference}, lambda _: None)
    assert not judged.passed
    assert judged.reason.startswith(reason)
    assert ("too little" in judged.reason) is (low == 0)


@pytest.mark.parametrize(("deviation", "missing"), [(0.05, 171), (0.001, 0)])
def test_a_trial_that_fails_for_lack_of_samples_tells_how_many_are_missing(
    tmp_path: Path, deviation: float, missing: int
) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    case = Case(points=("min",), sizes={"batch": 4}, batch=4)
    samples.write(tmp_path, Samples(data="x", ranges={}, cases=(case,)))
    for what, name in (("feeds", "x"), ("outputs", "y")):
        samples.write_arrays(tmp_path, what, 0, {name: rows})
    reference = Artifact(kind="reference", path=tmp_path / samples.RECORD, sha256="", bytes=0)
    found = Quality(metric="m", value=0.9, baseline=0.904, drop=0.004, deviation=deviation, samples=96)
    part = PartOptions(part="choice")
    quality = SimpleNamespace(judge=lambda *_: (found, None, ()), data_options=part)
    goal = Goal(threshold="int8", min_sqnr_db=None, max_drop=0.01, quality=None, simulation=simulation())
    goal = goal.model_copy(update={"quality": quality})
    made = save_operator(tmp_path / "same.onnx", "Clip", -9.0, 9.0)
    judged, _ = goal.judge(simulation(), made, Device(), {REFERENCE: reference, BASELINE: made}, lambda _: None)
    assert (judged.passed, judged.missing_samples) == (not missing, missing)
    assert (f"about {missing} more samples" in judged.reason) is bool(missing)


def test_the_first_trial_with_groups_in_floating_point_measures_impacts_and_the_next_ones_know_them(
    tmp_path: Path,
) -> None:
    trials = search(prepare(tmp_path), tmp_path)
    assert [trial.kept for trial in trials] == [(), ("first",), ("first", "second")]
    assert [set(trial.impacts) for trial in trials] == [set(), {"first", "second"}, set()]
    assert all(trial.seconds > 0 for trial in trials)
    assert [trial.impact_seconds > 0.001 for trial in trials] == [False, True, False]


@pytest.mark.parametrize(
    ("speedup", "disturbed", "of_float", "ends"),
    [
        (Interval(median=1.5, low=1.4, high=1.6), False, 0.9, True),
        (Interval(median=1.5, low=1.4, high=1.6), False, 1.2, False),
        (Interval(median=1.5, low=1.1, high=1.8), False, 0.9, False),
        (Interval(median=1.5, low=1.4, high=1.6), True, 0.9, False),
        (None, False, 0.9, False),
        (Interval(median=1.5, low=1.4, high=1.6), False, None, True),
    ],
)
def test_a_search_ends_where_a_rival_is_much_faster_than_everything_quantized(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    speedup: Interval | None,
    disturbed: bool,
    of_float: float | None,
    ends: bool,
) -> None:
    """It would only have made it slower, and it could not win; nobody says that it is wrong."""
    rows: list[Any] = [None]
    if of_float is not None:
        gain = Interval(median=of_float, low=of_float, high=of_float)
        rows.append(SimpleNamespace(speedup=gain, speedup_disturbed=False))
    rows += [SimpleNamespace(speedup=speedup, speedup_disturbed=disturbed)]
    monkeypatch.setattr(mixed_precision, "measure_beside", lambda sides, *_: rows[-len(sides) :])
    inputs, rival = prepare(tmp_path), OnnxRuntime()
    roles = ("rival other-fp32", "rival other-fp32 verified", *([FLOAT] if of_float is not None else []))
    float_engine = dict.fromkeys(roles, inputs["model"])
    trials = search(
        {**inputs, **float_engine}, tmp_path, engine=OnnxRuntime(), runs_here=True, rivals={"other-fp32": rival}
    )
    assert len(trials) == (1 if ends else 3)
    assert trials[0].outpaced == (
        "other-fp32 is 1.50× [1.40, 1.60] faster than that, and loses nothing" if ends else ""
    )
    (tmp_path / "trials").mkdir()
    write_records(tmp_path / "trials", trials)
    inputs[trial_role(1)] = Artifact(kind="record", path=tmp_path / "trials" / RECORDS, sha256="", bytes=0)
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax")
    (out := tmp_path / "assigned").mkdir()
    for to_train in ("", "needed"):
        effect = Assign(step=step, keep=(), to_train=to_train).run(inputs, out, lambda _: None)
        assert (effect.rejected or "").startswith("dropped: everything quantized, ranges by minmax: SQNR") is ends


def test_where_groups_cannot_be_run_alone_their_own_errors_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ModelError("no such kernel")

    monkeypatch.setattr(graph_forms, "open_activation_capture", fail)
    trials = search(prepare(tmp_path), tmp_path)
    assert [trial.kept for trial in trials] == [(), ("second",), ("first", "second")]
    assert "ranked by their own errors: no such kernel" in caplog.text


def test_the_assignment_says_how_much_a_group_changes_the_answers(tmp_path: Path) -> None:
    inputs = prepare(tmp_path)
    trials = search(inputs, tmp_path)
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax")
    (out := tmp_path / "assigned").mkdir()
    effect = Assign(step=step, keep=()).run({**inputs, trial_role(1): inputs[BEFORE]}, out, lambda _: None)
    changes = {row["group"]: row["answer_change"] for row in json.loads((out / effect.file).read_bytes())}
    assert changes == {name: pytest.approx(impact**0.5) for name, impact in trials[1].impacts.items()}


@pytest.mark.parametrize(
    ("slower", "words"),
    [(False, "the goal is reached only with nothing in int8"),
     (True, "with groups in int8, what reaches the goal is no faster")],
)  # fmt: skip
def test_a_variant_with_everything_in_float_says_whether_int8_reached_the_goal(
    tmp_path: Path, slower: bool, words: str
) -> None:
    inputs, whole = prepare(tmp_path), {"passed": True, "speedup": 1.0, "phase": "sensitive"}
    trials = [FAILED, FAILED.model_copy(update={"phase": "sensitive", "kept": ("first",)})]
    trials = [FAILED.model_copy(update={**whole, "kept": ("first", "second")}), *trials]
    trials += [FAILED.model_copy(update={**whole, "kept": ("first",), "speedup": 0.9})] if slower else []
    for folder in ("trials", "assigned"):
        (tmp_path / folder).mkdir()
    write_records(tmp_path / "trials", trials)
    inputs[trial_role(1)] = Artifact(kind="record", path=tmp_path / "trials" / RECORDS, sha256="", bytes=0)
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax")
    effect = Assign(step=step, keep=()).run(inputs, tmp_path / "assigned", lambda _: None)
    assert effect.rejected == words
    reasons = {row["group"]: row["why"] for row in json.loads((tmp_path / "assigned" / effect.file).read_bytes())}
    needed, faster = "the goal needs it", "the goal is reached with it quantized, too, but slower"
    assert reasons == {
        name: f"among the most sensitive groups; {faster if slower and name == 'second' else needed}"
        for name in ("first", "second")
    }


def test_a_group_that_is_needed_for_lack_of_samples_says_how_many_are_enough(tmp_path: Path) -> None:
    inputs = prepare(tmp_path)
    trials = [
        FAILED,
        FAILED.model_copy(update={"phase": "sensitive", "kept": ("first",), "missing_samples": 120}),
        FAILED.model_copy(update={"phase": "sensitive", "kept": ("first",), "missing_samples": 150}),
        FAILED.model_copy(update={"phase": "sensitive", "kept": ("first", "second"), "passed": True}),
    ]
    for folder in ("trials", "assigned"):
        (tmp_path / folder).mkdir()
    write_records(tmp_path / "trials", trials)
    inputs[trial_role(1)] = Artifact(kind="record", path=tmp_path / "trials" / RECORDS, sha256="", bytes=0)
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax")
    effect = Assign(step=step, keep=()).run(inputs, tmp_path / "assigned", lambda _: None)
    needed = "among the most sensitive groups; the goal needs it"
    assert {row["group"]: row["why"] for row in json.loads((tmp_path / "assigned" / effect.file).read_bytes())} == {
        "first": needed,
        "second": f"{needed}, unless about 120 more samples for choosing show that the same drop is allowed without",
    }


@pytest.mark.parametrize(
    ("failed", "records", "untried", "end"),
    [
        ([], 1, ("first", "second"), "the search ended before"),
        ([], 2, ("first", "second"), "the time was over"),
        ([("first",)], 1, (), ""),
    ],
)
def test_a_group_that_was_not_tried_quantized_is_not_called_needed(
    tmp_path: Path, failed: list[tuple[str, ...]], records: int, untried: tuple[str, ...], end: str
) -> None:
    """Two groups in floating point were enough, and time was over before one of them was."""
    inputs = prepare(tmp_path)
    sensitive = [(kept, False) for kept in failed] + [(("first", "second"), True)]
    trials = [FAILED, *(FAILED.model_copy(update={"phase": "sensitive", "kept": k, "passed": p}) for k, p in sensitive)]
    for folder in ("trials", "assigned"):
        (tmp_path / folder).mkdir()
    write_records(tmp_path / "trials", trials)
    record = Artifact(kind="record", path=tmp_path / "trials" / RECORDS, sha256="", bytes=0)
    inputs |= {trial_role(index): record for index in range(1, len(trials) + records)}
    step = Precision(precision="int8", placement="inputs+read outputs", method="minmax")
    effect = Assign(step=step, keep=()).run(inputs, tmp_path / "assigned", lambda _: None)
    reasons = {row["group"]: row["why"] for row in json.loads((tmp_path / "assigned" / effect.file).read_bytes())}
    late = f"not tried quantized with the others in floating point, as {end}"
    assert reasons == {
        name: f"among the most sensitive groups; {late if name in untried else 'the goal needs it'}"
        for name in ("first", "second")
    }


@pytest.mark.parametrize("least", [0.0, 0.05])
def test_a_graph_without_products_is_no_failure_of_a_precision_that_nobody_listed(tmp_path: Path, least: float) -> None:
    inputs = prepare(tmp_path, "net (float[batch, 8] x) => (float[batch, 8] y) {\n y = Relu(x)\n}")
    feeder = Feeder(data=None, seed=0, samples=8)
    task = Sensitivity(step=Precision(precision="int8-dynamic"), feeder=feeder, least_share=least)
    (out := tmp_path / "out").mkdir()
    if least:
        assert task.run(inputs, out, print).rejected.startswith("the graph has no product that can be in int8-dynamic")
        return
    with pytest.raises(NothingToQuantize, match="no product that can be in int8-dynamic"):
        task.run(inputs, out, print)


def test_products_of_unknown_size_have_the_work_of_one_sample_at_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_forms.coverage, "count_macs", lambda path, sizes: {"first": 5})
    task = Sensitivity(step=Precision(precision="int8-dynamic"), feeder=Feeder(data=None, seed=0, samples=8))
    (out := tmp_path / "out").mkdir()
    effect = task.run(prepare(tmp_path), out, lambda _: None)
    found = {row["name"]: row["macs"] for row in json.loads((out / effect.file).read_bytes())}
    assert found.pop("first") == 5
    assert found
    assert all(found.values())
