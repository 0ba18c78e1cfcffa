"""The task that trains graphs, and the assignment of what is trained."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import edit, model_file
from enginesmith.pipeline.frameworks.torch.graph import load_graph
from enginesmith.pipeline.passes.finetune.options import RecoverOptions
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.quantize.search import GroupFact, Trial
from enginesmith.pipeline.tasks.base import read_records, scratch_artifact, write_records
from enginesmith.pipeline.tasks.finetune import TEACHER, TrainGraph
from enginesmith.pipeline.tasks.graph_forms import MODEL, REFERENCE, RESCALED, SENSITIVITY
from enginesmith.pipeline.tasks.mixed_precision import ASSIGNMENT, Assign, trial_role
from graphs import node, normal, quiet, save_graph

NODES = [node("MatMul", "x w", "h"), node("Relu", "h", "r"), node("MatMul", "r v", "y")]
WORK = {"MatMul_h": 7, "MatMul_y": 2, "MatMul_z": 1, "MatMul_of_unknown_size": 0}
GROUPS = [GroupFact(name=name, module="", kind="MatMul", macs=macs, sqnr_db=20.0) for name, macs in WORK.items()]


def trial(**changes: Any) -> Trial:
    facts: dict[str, Any] = {"phase": "everything", "method": "mse", "kept": (), "why": "everything quantized"}
    return Trial(**{**facts, "passed": False, "error": 0.2, **changes})


def records(folder: Path, *rows: Any) -> Artifact:
    folder.mkdir(parents=True)
    write_records(folder, rows)
    return scratch_artifact("record", folder / "records.json", None)


def assigned(
    tmp_path: Path, to_train: Any, *trials: Trial, groups: Sequence[GroupFact] = GROUPS
) -> tuple[str, list[dict[str, Any]]]:
    inputs = {
        trial_role(1): records(tmp_path / "first", *trials[:1]),
        trial_role(3): records(tmp_path / "last", *trials),  # the second one failed
        SENSITIVITY: records(tmp_path / "sensitivity", *groups),
        RESCALED: records(tmp_path / "rescaled", *groups),
    }
    (out := tmp_path / "out").mkdir()
    effect = Assign(step=Precision(precision="int8"), keep=(), to_train=to_train).run(inputs, out, quiet)
    return effect.rejected, read_records(scratch_artifact("record", out / "records.json", None))


def test_what_is_trained_is_quantized_as_in_the_trial_that_came_nearest(tmp_path: Path) -> None:
    far, near = trial(error=0.3), trial(error=0.1, form="rescaled", method="entropy")
    mixed = trial(error=0.0, passed=True, phase="sensitive", kept=("MatMul_h",))
    rejected, found = assigned(tmp_path, "needed", far, near, mixed)
    assert not rejected
    assert {(row["precision"], row["form"], row["method"]) for row in found} == {("int8", "rescaled", "entropy")}


@pytest.mark.parametrize(("to_train", "told"), [("needed", "not needed: everything quantized reaches"), ("asked", "")])
def test_a_search_trains_only_where_it_is_needed(tmp_path: Path, to_train: str, told: str) -> None:
    rejected, _ = assigned(tmp_path, to_train, trial(error=0.0), trial(error=0.1, passed=True))
    assert rejected.startswith(told)
    assert bool(rejected) == bool(told)


@pytest.mark.parametrize(
    ("to_train", "kept", "error", "left"),
    [
        ("needed", ("MatMul_y",), 0.1, ("MatMul_y",)),
        ("asked", ("MatMul_y",), 0.1, ()),  # what was asked for is everything
        ("needed", ("MatMul_h",), 0.1, ()),  # too much of the work
        ("needed", ("MatMul_of_unknown_size",), 0.1, ()),
        ("needed", ("MatMul_y",), 0.19, ()),  # hardly nearer
    ],
)
def test_a_search_trains_with_a_little_in_floating_point(
    tmp_path: Path, to_train: Any, kept: tuple[str, ...], error: float, left: tuple[str, ...]
) -> None:
    mixed = trial(phase="sensitive", kept=kept, error=error)
    rejected, found = assigned(tmp_path, to_train, trial(error=0.3), trial(error=0.2), mixed)
    assert not rejected
    assert tuple(row["group"] for row in found if row["precision"] == "fp32") == left


def test_no_more_is_left_in_floating_point_than_was_enough_without_training(tmp_path: Path) -> None:
    enough = trial(phase="sensitive", kept=("MatMul_z",), error=0.01, passed=True)
    more = trial(phase="speed", kept=("MatMul_y",), error=0.02)
    _, found = assigned(tmp_path, "needed", trial(error=0.3), trial(error=0.2), enough, more)
    assert {row["precision"] for row in found} == {"int8"}


def test_where_the_work_of_no_group_is_known_everything_is_trained(tmp_path: Path) -> None:
    unknown = [group.model_copy(update={"macs": 0}) for group in GROUPS]
    mixed = trial(phase="sensitive", kept=tuple(sorted(WORK)), error=0.01)
    _, found = assigned(tmp_path, "needed", trial(error=0.3), mixed, groups=unknown)
    assert {row["precision"] for row in found} == {"int8"}


def test_without_a_trial_of_everything_nothing_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no trial had everything quantized"):
        assigned(tmp_path, "asked", trial(phase="sensitive", kept=("MatMul_h",)))


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Artifact]:
    """A float graph, a sparse one, and what the float one answers."""
    weights = {"w": normal(4, 8), "v": normal(8, 2, seed=1)}
    sparse = {**weights, "w": np.where(np.arange(4)[:, None] % 2, weights["w"], 0)}
    found = {}
    for role, values in ((TEACHER, weights), (MODEL, sparse)):
        path = save_graph(tmp_path / role, NODES, values, x=("batch", 4))
        signature = model_file.signature(path)
        found[role] = Artifact(kind="onnx", path=path, sha256=role, bytes=1, signature=signature)
    (folder := tmp_path / "reference").mkdir()
    x = normal(3, 4, seed=2)
    answers = load_graph(found[TEACHER].path).module(torch.from_numpy(x))[0].detach().numpy()
    case = samples.Case(sizes={"batch": 3}, batch=3)
    samples.write_arrays(folder, "feeds", 0, {"x": x})
    samples.write_arrays(folder, "outputs", 0, {"y": answers})
    samples.write(folder, samples.Samples(cases=(case,), ranges={}, data="drawn"))
    found[REFERENCE] = Artifact(kind="reference", path=folder / samples.RECORD, sha256="r", bytes=1)
    return found


def task(**changes: Any) -> TrainGraph:
    return TrainGraph(options=RecoverOptions(), data=None, **changes)


def test_the_float_graph_is_learnt_from(inputs: dict[str, Artifact]) -> None:
    models = task(stays_float=True).load(inputs)
    x = torch.from_numpy(normal(2, 4))
    for loaded, role in ((models.student, MODEL), (models.average, MODEL), (models.teacher, TEACHER)):
        expected = load_graph(inputs[role].path).module(x)[0]
        torch.testing.assert_close(loaded.module(x)[0], expected)
    assert models.student.module is not models.average.module


def test_the_form_that_was_quantized_is_learnt_from(inputs: dict[str, Artifact], tmp_path: Path) -> None:
    """Values inside of it are other ones than those of the graph as it was given."""
    weights = {"w": 2 * normal(4, 8), "v": normal(8, 2, seed=1) / 2}
    path = save_graph(tmp_path / "rescaled", NODES, weights, x=("batch", 4))
    inputs[RESCALED] = Artifact(kind="onnx", path=path, sha256="f", bytes=1, signature=inputs[MODEL].signature)
    inputs[ASSIGNMENT] = records(tmp_path / "assignment", {"form": "rescaled"})
    teacher = task().load(inputs).teacher.module.model
    found = dict(teacher.named_parameters())
    assert any(np.allclose(value.detach().numpy(), weights["w"]) for value in found.values())


def test_a_graph_that_torch_computes_otherwise_is_not_trained(inputs: dict[str, Artifact]) -> None:
    folder = inputs[REFERENCE].folder
    samples.write_arrays(folder, "outputs", 0, {"y": normal(3, 2, seed=9)})
    with pytest.raises(ModelError, match="computes this graph otherwise"):
        task().load(inputs)


def test_an_unchanged_graph_is_passed_on_as_it_is(inputs: dict[str, Artifact], tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    made = task(stays_float=True).load(inputs)
    with torch.no_grad():
        next(made.average.module.parameters()).add_(1.0)
    assert task().save(inputs, made.average, out, changed=False) == edit.FILE
    assert (out / edit.FILE).read_bytes() == inputs[MODEL].path.read_bytes()
    task().save(inputs, made.average, out, changed=True)
    x = torch.from_numpy(normal(2, 4))
    torch.testing.assert_close(load_graph(out / edit.FILE).module(x)[0], made.average.module(x)[0])


def test_kinds_of_training_have_rates_and_names_of_their_own() -> None:
    int8, sparse = task(), task(stays_float=True)
    assert (int8.training.subject, sparse.training.subject) == ("int8", "sparse")
    assert max(int8.training.rates) < max(sparse.training.rates)
    assert int8.training.limits.least < sparse.training.limits.least
    assert (int8.training.unchanged[:27], sparse.training.unchanged) == ("training made it no better:", "")
