"""Recovery as a whole, on a network of two layers: how it ends, what it leaves, what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from enginesmith.pipeline import saved_module
from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.errors import DataError, ModelError
from enginesmith.pipeline.recovery import training
from enginesmith.pipeline.recovery.options import RecoverOptions
from enginesmith.pipeline.recovery.record import FILE, Recovery, read
from enginesmith.pipeline.source import resolve
from enginesmith.pipeline.tasks.load import Load
from enginesmith.pipeline.tasks.recover import MODEL, TEACHER, Recover

NETS = Path(__file__).parent.parent / "data" / "nets.py"
Pair = dict[str, Artifact]


def quiet(text: str) -> None:
    del text


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two networks of one kind with other weights each."""
    found = {}
    for seed, role in enumerate((MODEL, TEACHER)):
        folder = tmp_path_factory.mktemp(role)
        effect = Load(source=resolve(f"{NETS}:mlp"), seed=seed).run({}, folder, quiet)
        found[role] = Artifact(
            kind="torch", path=folder / effect.file, sha256=role, bytes=0, signature=effect.signature
        )
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "data.npz"
    np.savez(path, x=rng.standard_normal((100, 4)).astype(np.float32), labels=rng.integers(0, 3, 100))
    return path


@pytest.fixture
def unlabelled(data: Path) -> Path:
    path = data.with_name("unlabelled.npy")
    with np.load(data) as stored:
        np.save(path, stored["x"])
    return path


def task(data: Path | None, *, metric: str | None = None, **options: Any) -> Recover:
    chosen = {"epochs": 4, "batch": 20, "evaluations": 4, "learning_rate": 0.02, "seconds": 600.0, **options}
    return Recover(options=RecoverOptions(**chosen), data=data and str(data), metric=metric, device=Device(threads=1))


def done(task: Recover, pair: Pair, out: Path) -> tuple[Effect, Recovery]:
    out.mkdir()
    effect = task.run(pair, out, quiet)
    return effect, read(out)


def test_without_labels_it_comes_to_agree_with_the_dense_model(pair: Pair, unlabelled: Path, tmp_path: Path) -> None:
    effect, record = done(task(unlabelled, epochs=40), pair, tmp_path / "out")
    assert (record.metric, record.teacher, record.ending) == ("agreement", 1.0, "planned")
    assert record.before < 0.7
    assert record.after > 0.85
    assert record.steps == record.plan.steps == 160
    assert [point.step for point in record.curve] == [0, 40, 80, 120, 160]
    assert record.curve[-1].held_back_loss < 0.3 * record.curve[0].held_back_loss
    assert (record.samples, record.held_back) == (100, 20)
    assert "agreement" in effect.summary
    made = Artifact(kind="torch", path=tmp_path / "out" / effect.file, sha256="", bytes=0, signature=effect.signature)
    own, theirs = (saved_module.load_artifact(one).module for one in (made, pair[TEACHER]))
    rows = torch.from_numpy(np.load(unlabelled))
    with torch.inference_mode():
        agreed = (own(rows)[0].argmax(1) == theirs(rows)[0].argmax(1)).float().mean()
    assert agreed > 0.85


def test_the_same_steps_leave_the_same_files(pair: Pair, data: Path, tmp_path: Path) -> None:
    for name in "ab":
        done(task(data, checkpoint_seconds=0 if name == "a" else 600), pair, tmp_path / name)
    for file in (FILE, "state.safetensors", saved_module.RECORD):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_labels_are_learnt_where_that_is_asked_for(pair: Pair, data: Path, tmp_path: Path) -> None:
    _, record = done(task(data, method="supervised", epochs=60), pair, tmp_path / "out")
    assert record.metric == "top1"
    assert record.curve[-1].loss is not None
    assert record.curve[1].loss is not None
    assert record.curve[-1].loss < record.curve[1].loss
    assert record.curve[-1].learning_rate < 0.001 < record.curve[1].learning_rate


def test_a_loss_of_the_users_is_called(pair: Pair, unlabelled: Path, tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text("def apart(student, teacher, batch):\n    return (student(batch['x']) - 7).square().mean()\n")
    _, record = done(task(unlabelled, method=f"{code}:apart", epochs=10, patience=99), pair, tmp_path / "out")
    losses = [point.held_back_loss or 0.0 for point in record.curve]
    assert 0 < losses[-1] < losses[0]


def test_a_loss_that_is_nan_from_the_start_is_refused(pair: Pair, unlabelled: Path, tmp_path: Path) -> None:
    code = tmp_path / "nan.py"
    code.write_text("def loss(student, teacher, batch):\n    return student(batch['x']).mean() * float('nan')\n")
    with pytest.raises(ModelError, match="the loss is nan before the first step"):
        done(task(unlabelled, method=f"{code}:loss", epochs=5), pair, tmp_path / "out")


def test_a_loss_that_becomes_nan_ends_it_with_the_best_so_far(pair: Pair, unlabelled: Path, tmp_path: Path) -> None:
    code = tmp_path / "nan.py"
    code.write_text(
        "steps = 0\n"
        "def loss(student, teacher, batch):\n"
        "    global steps\n"
        "    steps += student.layers[0].weight.requires_grad\n"
        "    apart = (student(batch['x']) - teacher(batch['x'])).square().mean()\n"
        "    return apart * float('nan') if steps > 30 else apart\n"
    )
    effect, record = done(task(unlabelled, method=f"{code}:loss", epochs=20), pair, tmp_path / "out")
    assert record.ending == "diverged"
    assert record.steps < record.plan.steps
    assert any("NaN or infinite" in note for note in effect.notes)
    state = load_file(tmp_path / "out" / "state.safetensors")
    assert all(np.isfinite(value).all() for value in state.values())


def test_it_stops_when_nothing_becomes_better(pair: Pair, unlabelled: Path, tmp_path: Path) -> None:
    same = {MODEL: pair[TEACHER], TEACHER: pair[TEACHER]}
    effect, record = done(task(unlabelled, patience=2, epochs=20), same, tmp_path / "out")
    assert (record.ending, record.best_step) == ("patience", 0)
    assert record.steps < record.plan.steps
    assert any("those that it began with" in note for note in effect.notes)
    kept, before = (load_file(folder / "state.safetensors") for folder in (tmp_path / "out", pair[TEACHER].folder))
    assert all(np.array_equal(kept[name], before[name]) for name in before)


def test_steps_are_planned_to_fit_the_time(pair: Pair, unlabelled: Path, tmp_path: Path) -> None:
    _, record = done(task(unlabelled, epochs=None, seconds=0.5, evaluations=2), pair, tmp_path / "out")
    assert record.plan.steps >= 1
    assert record.steps == record.plan.steps or record.ending == "time"


def test_a_step_that_memory_ran_out_in_is_done_again_in_smaller_parts(
    pair: Pair, unlabelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = training.Trainer._part

    def short(trainer: training.Trainer, rows: Any, weight: float) -> float:
        if trainer.step == 5 and len(rows) > 5:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")
        return part(trainer, rows, weight)

    _, whole = done(task(unlabelled), pair, tmp_path / "whole")
    monkeypatch.setattr(training.Trainer, "_part", short)
    effect, record = done(task(unlabelled), pair, tmp_path / "short")
    assert record.steps == whole.steps
    assert record.plan.micro_batch == 5
    assert any("in parts of 5" in note for note in effect.notes)
    assert record.curve[-1].held_back_loss == pytest.approx(whole.curve[-1].held_back_loss, rel=1e-3)


def test_what_cannot_be_recovered_from_is_refused(pair: Pair, unlabelled: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs data to learn from"):
        done(task(None), pair, tmp_path / "none")
    with pytest.raises(DataError, match="has no labels, and supervised"):
        done(task(unlabelled, method="supervised"), pair, tmp_path / "supervised")
    with pytest.raises(DataError, match="the metric top5 needs them"):
        done(task(unlabelled, metric="top5"), pair, tmp_path / "metric")
    with pytest.raises(DataError, match="no function 'nothing'"):
        done(task(unlabelled, method=f"{NETS}:nothing"), pair, tmp_path / "loss")


def test_weights_of_half_precision_are_refused(pair: Pair) -> None:
    loaded = saved_module.load_artifact(pair[TEACHER])
    loaded.module.half()
    with pytest.raises(ModelError, match="is float16, whose steps are too coarse"):
        training.Models(loaded, loaded, loaded).ready(torch.device("cpu"))


def test_another_checkpoint_than_of_this_data_is_not_gone_on_from(pair: Pair, data: Path, tmp_path: Path) -> None:
    begun, out = tmp_path / "begun", tmp_path / "out"
    for folder in (begun, out):
        folder.mkdir()
    task(data, checkpoint_seconds=0).go_on(pair, out, begun, quiet)
    assert len(list(begun.glob("state-*"))) == 1
    told: list[str] = []
    task(data).go_on(pair, out, begun, told.append)
    assert "planning" not in told  # it is done already
    with np.load(data) as stored:
        np.savez(data, x=stored["x"] + 1, labels=stored["labels"])
    task(data).go_on(pair, out, begun, told.append)
    assert "planning" in told


def test_how_often_checkpoints_are_written_is_no_part_of_what_is_made(data: Path) -> None:
    assert task(data, checkpoint_seconds=1).identity == task(data, checkpoint_seconds=2).identity
    assert task(data).identity != task(data, batch=10).identity
