"""Profiles by module: rows that add up, modules that share one, what a table says of why."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.engines.profiling import BETWEEN, OperatorTime, Origin, Profiled, Tally
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.errors import MissingCapability, StepCrashed
from enginesmith.pipeline.measure import profile as profiles
from enginesmith.pipeline.measure.profile import (
    fill_profile,
    format_cells,
    join_profiles,
    list_columns,
    measure_profile,
    merge_layers,
    name_modules,
)
from enginesmith.pipeline.measure.rows import Profile
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks import measure as tasks
from enginesmith.pipeline.tasks.base import RECORDS
from enginesmith.pipeline.tasks.measure import GRAPH, ProfileVariant


def operator(
    kind: str, ms: float, *modules: str, name: str = "", precision: str = "", **origin: object
) -> OperatorTime:
    made = Origin.model_validate({"modules": modules, "multiplies": bool(precision), **origin})
    return OperatorTime(
        name=name or f"{kind} {modules}", operator=kind, origin=made, precision=precision, seconds=ms / 1e3
    )


def profile(variant: str, *operators: OperatorTime, call_ms: float | None = None) -> Profile:
    found = Profiled(operators=operators, source="a test", call_seconds=call_ms and call_ms / 1e3)
    return fill_profile(Profile(variant=variant, batch=1, device="cpu", calls=3), found)


EAGER = profile(
    "eager",
    operator("aten::conv2d", 4.0, "block.conv"),
    operator("aten::batch_norm", 1.0, "block.bn"),
    operator("aten::relu", 0.5, "block"),
    operator(BETWEEN, 0.25, "stage"),
    operator("aten::linear", 2.0, "head"),
    operator("aten::mean", 0.25, ""),
)
FUSED = profile(
    "ort",
    operator("FusedConv", 3.0, "block.conv", "block.bn", precision="fp32", also={"block": ("Relu",)}),
    operator("ReorderOutput", 0.5, "block.bn", converts=True),
    operator("SlowGemm", 3.0, "head", precision="fp32"),
    operator("ReduceMean", 0.1, ""),
    operator("Mystery", 0.4, name="node_7"),
)


def test_rows_add_up_to_the_total_and_shares_to_one() -> None:
    for one in (EAGER, FUSED):
        assert one.total_ms is not None
        assert sum(row.ms for row in one.rows) == pytest.approx(one.total_ms)
        assert sum(row.share for row in one.rows) == pytest.approx(1)
    rows = join_profiles([EAGER, FUSED])
    assert sum(row.ms["eager"] or 0 for row in rows) == pytest.approx(8.0)
    assert sum(row.ms["ort"] or 0 for row in rows) == pytest.approx(7.0)
    *lines, total = format_cells([EAGER, FUSED], most=2)  # also where people see a part of them only
    for column, expected in ((1, 8.0), (2, 7.0)):
        assert float(total[column]) == expected
        assert sum(float(line[column]) for line in lines if line[column] != "–") == pytest.approx(expected, rel=0.01)


def test_modules_that_one_operator_does_share_a_row() -> None:
    row = next(row for row in join_profiles([EAGER, FUSED]) if "block.conv" in row.modules)
    assert (row.module, row.ms) == ("block.conv + bn", {"eager": pytest.approx(5.0), "ort": pytest.approx(3.5)})
    assert row.ratio["ort"] == pytest.approx(0.7)


def test_what_got_slower_comes_first_and_says_in_which_operator() -> None:
    first = join_profiles([EAGER, FUSED])[0]
    assert (first.module, first.lost_ms, first.why["ort"]) == ("head", pytest.approx(1.0), "mostly SlowGemm")


def test_why_names_evidence_only() -> None:
    rows = {row.module: row for row in join_profiles([EAGER, FUSED])}
    assert rows["block"].ms["ort"] is None
    assert rows["block"].ratio["ort"] is None
    assert rows["block"].why["ort"] == "Relu done within block.conv + bn"
    assert rows["block.conv + bn"].why["ort"] == "14 % in ReorderOutput; with Relu of block"
    assert "ort" not in rows["stage"].why  # nothing but Python ran there, and that is nowhere
    assert "ort" not in rows["(model)"].why


def test_what_is_not_known_has_a_row_of_its_own() -> None:
    assert FUSED.unattributed_share == pytest.approx(0.4 / 7.0)
    row = next(row for row in join_profiles([EAGER, FUSED]) if not row.modules)
    assert (row.module, row.ms) == ("(unknown: node_7)", {"eager": None, "ort": pytest.approx(0.4)})


def test_a_module_that_is_gone() -> None:
    base = profile("eager", operator("aten::dropout", 1.0, "drop"), operator("aten::linear", 1.0, "head"))
    told = profile("ort", operator("Gemm", 1.0, "head"))
    gone = next(row for row in join_profiles([base, told]) if row.module == "drop")
    assert gone.why["ort"] == "no operator of it is left"
    silent = profile("compiled", operator("kernel", 1.0))  # where modules are not told, this one may be anywhere
    gone = next(row for row in join_profiles([base, silent]) if row.module == "drop")
    assert gone.why == {}


def test_products_left_in_float_are_told() -> None:
    base = profile("eager", operator("aten::linear", 1.0, "a"), operator("aten::linear", 1.0, "b"))
    low = profile(
        "int8",
        operator("QGemm", 0.2, "a", precision="int8"),
        operator("Gemm", 0.9, "b", precision="fp32"),
        operator("DequantizeLinear", 0.3, "b", converts=True),
    )
    rows = {row.module: row for row in join_profiles([base, low])}
    assert rows["b"].why["int8"] == (
        "mostly Gemm; 25 % in DequantizeLinear; computed in fp32 on what was dequantized: not fused"
    )
    assert rows["a"].why == {}


def test_layers_that_differ_in_their_number_are_one_row_where_there_are_many() -> None:
    base = profile("eager", *(operator("aten::norm", 1.0, f"layer.{i}.norm") for i in range(12)))
    slow = profile("ort", *(operator("Skip", 5.0, f"layer.{i}.norm") for i in range(12)))
    (row,) = merge_layers(join_profiles([base, slow]))
    assert (row.module, row.ms["ort"], row.why["ort"]) == ("layer.*.norm (12×)", pytest.approx(60), "mostly Skip")
    assert list_columns([base, slow]) == ("module", "eager ms", "ort ms", "ort / eager", "why")
    assert format_cells([base, slow], most=5) == [
        ("layer.*.norm (12×)", "12", "60", "5.00×", "mostly Skip"),
        ("total", "12", "60", "5.00×", ""),
    ]


def test_what_is_said_of_a_single_layer_is_not_said_of_all() -> None:
    base = profile("eager", *(operator("aten::norm", 1.0, f"layer.{i}.norm") for i in range(3)))
    also = {"head": ("Add",)}
    noisy = profile("ort", *(operator("Skip", 0.9 + i, f"layer.{i}.norm", also=also) for i in range(3)))
    (row,) = merge_layers(join_profiles([base, noisy]))
    assert row.why["ort"] == "with Add of head"


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (("",), "(model)"),
        (("node:conv_1",), "conv_1"),
        (("a.q", "a.k"), "a.q + k"),
        (("a.q", "a.k", "a.v"), "a"),
        (("a.q", "head"), "a.q + head"),
    ],
)
def test_labels(modules: tuple[str, ...], expected: str) -> None:
    assert name_modules(modules, {"a.q", "a.k", "a.v", "ab.x", "head", ""}) == expected


def test_medians_are_of_inferences_and_absence_counts() -> None:
    tally = Tally()
    tally.add("warm", 9.0)
    for seconds in ((1.0, 2.0), (4.0,), ()):
        tally.begin()
        for one in seconds:
            tally.add("a", one)
    assert tally.medians() == {"a": (3.0, 1)}


def test_overhead_is_told_against_the_unprofiled_latency() -> None:
    assert profile("x", operator("a", 5.0, "m"), call_ms=10.0).overhead(8.0) == (
        "10 ms a call while profiled, 8 ms without: 1.25×"
    )
    assert profile("x", operator("a", 5.0, "m")).overhead(8.0) == ""
    assert "call_ms" in profile("x", operator("a", 5.0, "m")).reasons


@pytest.mark.parametrize(
    ("error", "failed"), [(MissingCapability("no profiler", "another"), False), (StepCrashed("it died", "again"), True)]
)
def test_no_profile_says_why(error: Exception, failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(profiles, "run", refuse)
    candidate = Candidate("eager", Eager(), None, Device())  # type: ignore[arg-type]
    found = measure_profile(candidate, 1, {}, None, 3, tmp_path, lambda text: None)
    assert (found.total_ms, found.rows) == (None, ())
    assert str(error) in found.reasons["total_ms"]
    assert (found.failure is not None) == failed
    assert join_profiles([found]) == ()
    assert format_cells([found]) == []


FEEDS = {batch: {"x": np.ones((batch, 4), np.float32)} for batch in (8, 1)}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record what was asked to be profiled; the answer is always the same."""
    found: list[tuple[Any, ...]] = []

    def profile(candidate: Any, batch: int, feeds: Any, graph: Path | None, calls: int, *rest: Any) -> Profile:
        found.append((candidate.id, batch, feeds["x"].shape, graph, calls))
        return ANSWERS.get(batch, FAILED)

    monkeypatch.setattr(tasks, "measure_profile", profile)
    monkeypatch.setattr(tasks, "measured_feeds", lambda reference: FEEDS)
    return found


COMMON = {"variant": "v", "device": "cpu", "calls": 5}
ANSWERS = {1: Profile(**COMMON, batch=1, total_ms=12.0, unattributed_share=0.25)}
FAILED = Profile(**COMMON, batch=8, failure="it died", reasons={"total_ms": "it died"})


def artifact(kind: Any, folder: Path) -> Artifact:
    return Artifact(kind=kind, path=folder / kind, sha256="", bytes=0)


def task() -> ProfileVariant:
    return ProfileVariant(variant="v", engine=Eager(), device=Device(), calls=5)


def inputs(folder: Path, *kinds: str) -> dict[str, Artifact]:
    model, *graph = kinds
    found = {"reference": artifact("reference", folder), "model": artifact(model, folder)}
    return found | ({GRAPH: artifact(graph[0], folder)} if graph else {})


@pytest.mark.parametrize(
    ("kinds", "graph"), [(("torch",), None), (("onnx",), "onnx"), (("engine", "onnx"), "onnx"), (("engine",), None)]
)
def test_the_graph_is_what_the_engine_was_built_from(
    kinds: tuple[str, ...], graph: str | None, asked: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    effect = task().run(inputs(tmp_path, *kinds), tmp_path, lambda text: None)
    assert asked == [("v", 1, (1, 4), tmp_path / graph if graph else None, 5)]
    assert effect.summary == "12 ms in operators at batch 1, 75% of it on modules"
    assert not effect.incomplete
    assert Profile.model_validate(json.loads((tmp_path / RECORDS).read_text())[0]) == ANSWERS[1]


def test_a_failure_is_shown_and_not_kept(
    asked: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FEEDS, 1)
    effect = task().run(inputs(tmp_path, "torch"), tmp_path, lambda text: None)
    assert (effect.summary, effect.incomplete) == ("it died", True)
