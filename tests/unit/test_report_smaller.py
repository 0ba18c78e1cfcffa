"""What the report shows of pruned models."""

import json
from pathlib import Path

from enginesmith.pipeline.frameworks.records import PrunedGroup, PruningFacts
from enginesmith.pipeline.passes.finetune.options import Point, Recovery, TrainingPlan
from enginesmith.pipeline.report import sections
from enginesmith.pipeline.results.run import Run, VariantRecord

GROUP = PrunedGroup(
    step=1, root="conv1", members=("conv1",), unit="channel", before=16, after=8, kept=(0,), importance="l2"
)
FACTS = PruningFacts(
    target="macs=-50%",
    importance="l2",
    scope="global",
    macs_before=1000,
    macs_after=497,
    parameters_before=400,
    parameters_after=210,
    channels_before=16,
    channels_after=8,
    groups=(GROUP,),
    whole={"fc": "its outputs are the model's"},
)
PLAN = TrainingPlan(
    steps=20, batch=64, micro_batch=64, evaluate_every=10, judged=240, statistics=64, processes=1, threads=2
)
BACK = Recovery(
    method="distil",
    metric="top1",
    teacher=1.0,
    before=0.47,
    after=0.99,
    best_step=20,
    steps=20,
    ending="planned",
    reason="all 20 planned steps are done",
    samples=960,
    held_back=240,
    data="digits",
    plan=PLAN,
    curve=tuple(
        Point(step=step, loss=None if step == 0 else 0.1, metric=metric, held_back_loss=0.1, learning_rate=1e-3)
        for step, metric in ((0, 0.47), (10, 0.98), (20, 0.99))
    ),
)


def run(*records: VariantRecord) -> Run:
    eager = VariantRecord(id="eager", engine="eager", precision="fp32", status="measured")
    values = {
        "name": "r", "created": "", "seconds": 0.0, "complete": True, "recipe": {"model": "digits"}, "environment": {},
        "model": {"source": "digits", "signature": None, "data": None}, "steps": (), "winner": None, "pareto": (),
        "verdicts": (), "baseline": eager, "variants": records,
    }  # fmt: skip
    return Run.model_validate(values)


def variant(name: str, **more: object) -> VariantRecord:
    found = {"id": name, "engine": "onnxruntime", "precision": "fp32", "status": "measured", "prune": "macs=-50%"}
    return VariantRecord.model_validate({**found, "pruning": (FACTS,), **more})


def test_a_pruned_model_has_one_row_whatever_is_made_of_it() -> None:
    (row,) = sections.tabulate_pruning(run(variant("a", recovery=(BACK,)), variant("b", recovery=(BACK,)))).rows
    assert row == (
        "macs=-50%",
        "l2, global",
        "16 → 8",
        "49.7%",
        "52.5%",
        "distil, 20 steps: all 20 planned steps are done",
        "top1 0.4700 → 0.9900 (dense 1.0000)",
    )


def test_each_turn_of_pruning_has_its_row() -> None:
    rows = sections.tabulate_pruning(run(variant("a", pruning=(FACTS, FACTS), recovery=(BACK,)))).rows
    assert [row[0] for row in rows] == ["macs=-50%, step 1", "macs=-50%, step 2"]
    assert [row[5] for row in rows][1] == "no"


def test_groups_and_curve() -> None:
    assert sections.tabulate_groups(FACTS).rows == (("conv1", "channel", "16", "8"),)
    assert sections.tabulate_recovery(run(variant("a", recovery=(BACK,)))).rows[0][1:] == (
        "1",
        "0",
        "–",
        "0.4700",
        "0.001",
    )


def test_a_run_with_it_can_be_read_again(tmp_path: Path) -> None:
    from enginesmith.pipeline.results import run as runs

    made = run(variant("a", recovery=(BACK,)))
    runs.write(made, tmp_path)
    assert runs.read(tmp_path) == made
    assert json.loads((tmp_path / "run.json").read_text())["variants"][0]["recovery"][0]["after"] == 0.99
