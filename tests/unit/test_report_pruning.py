"""Reports of pruned and trained models."""

import json
from pathlib import Path

from enginesmith.pipeline.report import training_tables
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.run import Run, VariantRecord
from runs import PRUNING, RECOVERY, small, variant


def pruned_run(*records: VariantRecord) -> Run:
    return small(variant("eager", engine="eager"), *records, winner=None)


def pruned(name: str, **more: object) -> VariantRecord:
    return variant(name, **{"prune": "macs=-50%", "pruning": (PRUNING,), **more})


def test_a_pruned_model_has_one_row_whatever_is_made_of_it() -> None:
    made = pruned_run(pruned("a", recovery=(RECOVERY,)), pruned("b", recovery=(RECOVERY,)))
    assert training_tables.tabulate_pruning(made).rows == (("macs=-50%", "l2, global", "16 → 8", "49.7%", "52.5%"),)
    assert training_tables.tabulate_training(made).rows == (
        ("macs=-50%", "distil", "20: all 20 planned steps are done", "top1", "0.4700", "0.9900", "1.0000", "240"),
    )


def test_a_training_that_made_nothing_better_says_so() -> None:
    points = (RECOVERY.curve[0], *(point.model_copy(update={"metric": 0.4}) for point in RECOVERY.curve[1:]))
    in_vain = RECOVERY.model_copy(update={"best_step": 0, "after": 0.47, "curve": points})
    (row,) = training_tables.tabulate_training(pruned_run(pruned("a", recovery=(in_vain,)))).rows
    steps = "20: training made it no better (top1 at best 0.4000): the weights are those from before"
    assert row[2] == f"{steps}; all 20 planned steps are done"


def test_each_turn_of_pruning_has_its_row() -> None:
    made = pruned_run(pruned("a", pruning=(PRUNING, PRUNING), recovery=(RECOVERY, RECOVERY)))
    pruned_to = [row[0] for row in training_tables.tabulate_pruning(made).rows]
    trained = [row[0] for row in training_tables.tabulate_training(made).rows]
    assert (pruned_to, trained) == (
        ["macs=-50%, step 1", "macs=-50%, step 2"],
        ["macs=-50%, turn 1", "macs=-50%, turn 2"],
    )


def test_each_training_is_named_after_what_was_trained() -> None:
    int8, sparse = (RECOVERY.model_copy(update={"subject": subject}) for subject in ("int8", "sparse"))
    made = pruned_run(
        variant("onnxruntime-int8-qat", recovery=(int8,)),
        variant("onnxruntime-fp32-sparse24", sparsity="2:4", recovery=(sparse,)),
        variant("onnxruntime-int8-sparse24", sparsity="2:4", recovery=(sparse,)),
    )
    assert [row[0] for row in training_tables.tabulate_training(made).rows] == ["onnxruntime-int8-qat", "2:4"]


def test_groups_and_curve() -> None:
    assert training_tables.tabulate_groups(PRUNING).rows == (("conv1", "channel", "16", "8"),)
    (row, *_) = training_tables.tabulate_training_steps(pruned_run(pruned("a", recovery=(RECOVERY,)))).rows
    assert row[1:] == ("0", "–", "0.4700", "0.001")


def test_rows_of_groups_add_up_to_all_channels() -> None:
    """Heads stand for their channels, and what lost nothing has a row, too."""
    (group,) = PRUNING.groups
    heads = group.model_copy(update={"root": "query", "unit": "head", "before": 4, "after": 3, "width": 8})
    facts = PRUNING.model_copy(update={"channels_before": 64, "channels_after": 48, "groups": (group, heads)})
    assert training_tables.tabulate_groups(facts).rows == (
        ("conv1", "channel", "16", "8"),
        ("query", "head of 8 channels", "4", "3"),
        ("all others", "channel", "16", "16"),
    )


def test_a_run_with_it_can_be_read_again(tmp_path: Path) -> None:
    made = pruned_run(pruned("a", recovery=(RECOVERY,)))
    runs.write(made, tmp_path)
    assert runs.read(tmp_path) == made
    assert json.loads((tmp_path / "run.json").read_text())["variants"][0]["recovery"][0]["after"] == 0.99
