"""Recovery as a whole, on a network of two layers: how it ends, what it leaves, what is refused."""

import functools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from enginesmith.calibration.dataset import Dataset, open_dataset
from enginesmith.calibration.options import PARTS, PartName, PartOptions
from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.errors import DataError, ModelError
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import saved
from enginesmith.pipeline.passes.finetune import trainer
from enginesmith.pipeline.passes.finetune.options import FILE, RecoverOptions, Recovery, read
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.finetune import MODEL, TEACHER, Recover
from enginesmith.pipeline.tasks.load import Load
from enginesmith.pipeline.tensors import TensorSpec
from graphs import quiet

NETS = Path(__file__).parent.parent / "data" / "nets.py"
Pair = dict[str, Artifact]


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
def unlabeled(data: Path) -> Path:
    path = data.with_name("unlabeled.npy")
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


@pytest.mark.parametrize("metric", [None, pytest.param("top1", marks=pytest.mark.thorough)])
def test_without_labels_it_comes_to_agree_with_the_dense_model(
    pair: Pair, unlabeled: Path, tmp_path: Path, metric: str | None
) -> None:
    """A metric is then for other data, which is labeled."""
    effect, record = done(task(unlabeled, metric=metric, epochs=40), pair, tmp_path / "out")
    assert (record.metric, record.teacher, record.ending) == ("agreement", 1.0, "planned")
    assert record.before < 0.7
    assert record.after > 0.85
    assert record.steps == record.plan.steps == 160
    assert [point.step for point in record.curve] == [0, 40, 80, 120, 160]
    assert record.curve[-1].held_back_loss < 0.3 * record.curve[0].held_back_loss
    assert (record.samples, record.held_back) == (100, 20)
    assert "agreement" in effect.summary
    made = Artifact(kind="torch", path=tmp_path / "out" / effect.file, sha256="", bytes=0, signature=effect.signature)
    own, theirs = (saved.load_artifact(one).module for one in (made, pair[TEACHER]))
    rows = torch.from_numpy(np.load(unlabeled))
    with torch.inference_mode():
        agreed = (own(rows)[0].argmax(1) == theirs(rows)[0].argmax(1)).float().mean()
    assert agreed > 0.85


@pytest.mark.parametrize(("shared_by", "samples", "judged"), [(PARTS, 66, 33), (PARTS[:2], 100, 50)])
def test_of_split_data_it_learns_from_calibration_and_is_judged_by_choice(
    shared_by: tuple[PartName, ...], samples: int, judged: int, pair: Pair, data: Path, tmp_path: Path
) -> None:
    options = PartOptions(part="calibration", shared_by=shared_by)
    _, record = done(task(data, epochs=1).model_copy(update={"data_options": options}), pair, tmp_path / "out")
    assert (record.samples, record.held_back) == (samples, judged)
    assert record.data == f"data.npz (calibration and choice: {samples} of 100)"


@pytest.mark.thorough
def test_it_takes_no_more_time_than_is_left_and_is_made_again_with_more(
    pair: Pair, unlabeled: Path, tmp_path: Path
) -> None:
    long = task(unlabeled, epochs=None, patience=99)
    effect, record = done(long.model_copy(update={"left_seconds": 1.5}), pair, tmp_path / "short")
    assert effect.incomplete
    assert record.steps > 0
    effect, _ = done(task(unlabeled, epochs=1).model_copy(update={"left_seconds": 6000.0}), pair, tmp_path / "whole")
    assert not effect.incomplete


@pytest.mark.thorough
def test_the_same_steps_leave_the_same_files(pair: Pair, data: Path, tmp_path: Path) -> None:
    for name in "ab":
        done(task(data, checkpoint_seconds=0 if name == "a" else 600), pair, tmp_path / name)
    for file in (FILE, "state.safetensors", saved.RECORD):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_it_trains_on_all_cores_with_however_many_threads_sessions_have(pair: Pair, data: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert task(data).prepare(pair, 0, 1).work.threads == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.thorough
def test_labels_are_learnt_where_that_is_asked_for(pair: Pair, data: Path, tmp_path: Path) -> None:
    _, record = done(task(data, method="supervised", epochs=60), pair, tmp_path / "out")
    assert record.metric == "top1"
    assert record.curve[-1].loss is not None
    assert record.curve[1].loss is not None
    assert record.curve[-1].loss < record.curve[1].loss
    assert record.curve[-1].learning_rate < 0.001 < record.curve[1].learning_rate


@pytest.mark.thorough
def test_weights_are_chosen_by_the_numbers_that_are_learnt(pair: Pair, unlabeled: Path, tmp_path: Path) -> None:
    """Not by the dense model, which answers otherwise."""
    path, x = tmp_path / "numbers.npz", np.load(unlabeled)
    np.savez(path, x=x, labels=np.tile(x.sum(1, keepdims=True), 3) + 5)
    _, record = done(task(path, method="supervised", epochs=60), pair, tmp_path / "out")
    assert record.metric == "loss"
    assert record.after == pytest.approx(record.curve[-1].held_back_loss, rel=1e-5)
    assert record.after < 0.2 * record.teacher


@pytest.mark.parametrize(
    ("output", "labels", "learnt", "distilled"),
    [
        ("y:float32:batch,10", np.arange(4), "top1", "top1"),
        ("y:int64:batch", np.arange(4), "top1", "top1"),
        ("y:float32:batch", np.arange(4), "loss", "agreement"),
        ("y:float32:batch,1", np.arange(4), "loss", "agreement"),
        ("y:float32:batch,1", np.ones(4, np.float32), "loss", "agreement"),
        ("y:float32:batch,3", np.ones((4, 3), np.int64), "loss", "agreement"),
        ("y:float32:batch,10,8", np.ones((4, 8), np.int64), "loss", "agreement"),
        ("y:float32:batch,10", None, "agreement", "agreement"),
    ],
)
def test_without_a_metric_weights_are_chosen_by_what_fits_the_labels(
    output: str, labels: np.ndarray | None, learnt: str, distilled: str
) -> None:
    data, spec = Dataset("set", {"x": np.zeros((4, 1))}, labels), TensorSpec.parse(output)
    assert task(None, method="supervised")._metric(data, [spec]).name == learnt
    assert task(None)._metric(data, [spec]).name == distilled


def test_a_loss_of_the_users_is_called(pair: Pair, unlabeled: Path, tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text("def apart(student, teacher, batch):\n    return (student(batch['x']) - 7).square().mean()\n")
    _, record = done(task(unlabeled, method=f"{code}:apart", epochs=10, patience=99), pair, tmp_path / "out")
    losses = [point.held_back_loss or 0.0 for point in record.curve]
    assert 0 < losses[-1] < losses[0]


def test_a_loss_that_becomes_nan_ends_it_with_the_best_so_far(pair: Pair, unlabeled: Path, tmp_path: Path) -> None:
    code = tmp_path / "nan.py"
    code.write_text(
        "start = None\n"
        "def loss(student, teacher, batch):\n"
        "    global start\n"
        "    weight = student.layers[0].weight.detach()\n"
        "    start = weight.clone() if start is None else start\n"
        "    apart = (student(batch['x']) - teacher(batch['x'])).square().mean()\n"
        "    return apart * float('nan') if (weight - start).abs().max() > 0.15 else apart\n"
    )
    effect, record = done(task(unlabeled, method=f"{code}:loss", epochs=20, evaluations=40), pair, tmp_path / "out")
    assert record.ending == "diverged"
    assert 2 <= record.best_step < record.steps < record.plan.steps
    assert any("NaN or infinite" in note for note in effect.notes)
    assert record.curve[-1].held_back_loss < record.curve[0].held_back_loss
    kept, before = (load_file(folder / "state.safetensors") for folder in (tmp_path / "out", pair[MODEL].folder))
    assert all(np.isfinite(value).all() for value in kept.values())
    assert not any(np.array_equal(kept[name], before[name]) for name in kept)


def test_an_exploding_learning_rate_leaves_the_weights(pair: Pair, unlabeled: Path, tmp_path: Path) -> None:
    effect, record = done(task(unlabeled, learning_rate=1e30, epochs=20), pair, tmp_path / "out")
    assert (record.ending, record.best_step) == ("diverged", 0)
    assert record.steps < record.plan.steps
    assert any("try a lower learning_rate" in note for note in effect.notes)
    kept, before = (load_file(folder / "state.safetensors") for folder in (tmp_path / "out", pair[MODEL].folder))
    assert all(np.array_equal(kept[name], before[name]) for name in before)


@pytest.mark.parametrize(("allowed", "steps"), [(0.001, 8), (0.9, 16)])
def test_it_stops_half_way_where_what_is_allowed_is_out_of_reach(
    pair: Pair, unlabeled: Path, tmp_path: Path, allowed: float, steps: int
) -> None:
    short = task(unlabeled, learning_rate=1e-9).model_copy(update={"max_drop": allowed})
    effect, record = done(short, pair, tmp_path / "out")
    assert (record.steps, record.ending) == (steps, "hopeless" if steps == 8 else "planned")
    assert ("after 8 of 16 steps it still loses" in effect.summary) is (steps == 8)


def test_it_stops_when_nothing_becomes_better(pair: Pair, unlabeled: Path, tmp_path: Path) -> None:
    same = {MODEL: pair[TEACHER], TEACHER: pair[TEACHER]}
    effect, record = done(task(unlabeled, patience=2, epochs=20), same, tmp_path / "out")
    assert (record.ending, record.best_step) == ("patience", 0)
    assert record.steps < record.plan.steps
    assert record.unchanged in effect.notes
    assert record.unchanged.startswith("training made it no better (agreement at best 1.0000)")
    assert record.unchanged.endswith("the weights are those from before")
    assert f"steps: {record.unchanged}; 2 evaluations in a row" in effect.summary
    kept, before = (load_file(folder / "state.safetensors") for folder in (tmp_path / "out", pair[TEACHER].folder))
    assert all(np.array_equal(kept[name], before[name]) for name in before)


def test_steps_are_planned_to_fit_the_time(pair: Pair, unlabeled: Path, tmp_path: Path) -> None:
    _, record = done(task(unlabeled, epochs=None, seconds=0.5, evaluations=2), pair, tmp_path / "out")
    assert record.plan.steps >= 1
    assert record.steps == record.plan.steps or record.ending == "time"


SLOWER = """
import time
from pathlib import Path

calls = 0

def loss(student, teacher, batch):
    global calls
    calls += 1
    if Path({marker!r}).exists():
        time.advance(0.005 if calls < 30 else 0.02)
        if calls > {end}:
            raise KeyboardInterrupt
    return (student(batch["x"]) - teacher(batch["x"])).square().mean()
"""


@pytest.fixture
def slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A loss that moves the clock; after a while, it takes four times as long. All else takes a microsecond."""
    now = [0.0]

    def advance(seconds: float = 1e-6) -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(time, "monotonic", advance)
    monkeypatch.setattr(time, "advance", advance, raising=False)
    return functools.partial(write_slower, tmp_path)


def write_slower(folder: Path, end: int = 10**6) -> str:
    """Write the loss, which is slow as long as there is a file, and interrupts itself at a call."""
    (folder / "marker").touch()
    (folder / "slower.py").write_text(SLOWER.format(marker=str(folder / "marker"), end=end))
    return f"{folder / 'slower.py'}:loss"


def test_slower_steps_are_fewer_so_that_it_ends_in_time(
    pair: Pair, unlabeled: Path, tmp_path: Path, slower: Callable[..., str]
) -> None:
    own = task(unlabeled, method=slower(), epochs=None, seconds=1.0, evaluations=2, patience=99)
    effect, record = done(own, pair, tmp_path / "out")
    turn = record.plan.shortened
    assert record.steps == record.plan.steps < turn.planned
    assert (record.ending, record.curve[-1].step) == ("time", record.steps)
    assert record.curve[-1].learning_rate < 0.3 * record.curve[0].learning_rate + 0.01
    assert any("the schedule was shortened" in note for note in effect.notes)


@pytest.mark.thorough
def test_a_schedule_that_was_shortened_is_gone_on_with(
    pair: Pair, unlabeled: Path, tmp_path: Path, slower: Callable[..., str]
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    method = slower(end=45)
    with pytest.raises(KeyboardInterrupt):
        task(unlabeled, method=method, epochs=None, seconds=2.0).go_on(pair, tmp_path, begun, quiet)
    (tmp_path / "marker").unlink()
    last = json.loads(next(begun.glob("state-*/progress.json")).read_bytes())
    assert last["step"] > 0  # although none was due for long
    unhurried = task(unlabeled, method=method, epochs=None, seconds=600.0)  # so that nothing is cut once more
    ends = []
    for name in "ab":
        shutil.copytree(begun, tmp_path / f"begun-{name}")
        (tmp_path / name).mkdir()
        unhurried.go_on(pair, tmp_path / name, tmp_path / f"begun-{name}", quiet)
        ends.append({file: (tmp_path / name / file).read_bytes() for file in (FILE, "state.safetensors")})
    assert ends[0] == ends[1]
    plan = read(tmp_path / "a").plan
    assert plan.model_dump(mode="json") == last["plan"]
    assert plan.shortened is not None


@pytest.mark.thorough
def test_a_process_has_its_own_time_whatever_earlier_ones_took(
    pair: Pair, unlabeled: Path, tmp_path: Path, slower: Callable[..., str]
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    own = task(unlabeled, method=slower(end=25), epochs=None, seconds=2.0)
    with pytest.raises(KeyboardInterrupt):
        own.model_copy(update={"options": own.options.model_copy(update={"checkpoint_seconds": 0})}).go_on(
            pair, tmp_path, begun, quiet
        )
    (tmp_path / "marker").unlink()
    last = json.loads(next(begun.glob("state-*/progress.json")).read_bytes())
    assert 0 < last["step"] < last["plan"]["steps"]
    effect = own.model_copy(update={"left_seconds": last["seconds"]}).go_on(pair, tmp_path, begun, quiet)
    record = read(tmp_path)
    assert (record.ending, record.steps) == ("planned", last["plan"]["steps"])
    assert not effect.incomplete


@pytest.mark.thorough
def test_one_that_was_planned_for_less_time_than_there_is_now_is_not_final(
    pair: Pair, unlabeled: Path, tmp_path: Path, slower: Callable[..., str]
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    whole = task(unlabeled, method=slower(end=45), epochs=None, seconds=600.0)
    with pytest.raises(KeyboardInterrupt):
        whole.model_copy(update={"left_seconds": 2.5}).go_on(pair, tmp_path, begun, quiet)
    (tmp_path / "marker").unlink()
    effect = whole.go_on(pair, tmp_path, begun, quiet)
    assert read(tmp_path).plan.seconds == 2.0
    assert effect.incomplete
    assert any("planned for 2 s" in note for note in effect.notes)


SHORT = """
import torch

calls = 0

def loss(student, teacher, batch):
    global calls
    x = batch["x"]
    if not torch.is_grad_enabled():
        calls += 1
    learning = torch.is_grad_enabled() == {learning}
    if calls > {after} and learning and len(x) > 5:
        torch.empty(1 << 60, dtype=torch.uint8)  # as much as no machine has
    return (student(x) - teacher(x)).square().mean()
"""


@pytest.mark.thorough
def test_what_memory_ran_out_in_is_done_again_in_smaller_parts(pair: Pair, unlabeled: Path, tmp_path: Path) -> None:
    found = {}
    for name, learning, after in (("whole", True, 10**6), ("step", True, 2), ("evaluation", False, 2)):
        code = tmp_path / f"{name}.py"  # the first evaluations are before the first step
        code.write_text(SHORT.format(learning=learning, after=after))
        found[name] = done(task(unlabeled, epochs=2, method=f"{code}:loss"), pair, tmp_path / name)
    whole = found.pop("whole")[1]
    for name, parts, said in (("step", (5, 20), "in parts of 5"), ("evaluation", (20, 5), "evaluated 5 samples at a")):
        effect, record = found[name]
        assert record.steps == whole.steps
        assert (record.plan.micro_batch, record.plan.judged_at_once) == parts
        assert any(said in note for note in effect.notes)
        assert record.curve[-1].held_back_loss == pytest.approx(whole.curve[-1].held_back_loss, rel=1e-3)


def test_what_cannot_be_recovered_from_is_refused(pair: Pair, unlabeled: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs data to learn from"):
        done(task(None), pair, tmp_path / "none")
    with pytest.raises(DataError, match="has no labels, and supervised"):
        done(task(unlabeled, method="supervised"), pair, tmp_path / "supervised")
    x, words = np.load(unlabeled), tmp_path / "words.npz"
    np.savez(words, x=x, labels=np.full(len(x), "cat"))
    with pytest.raises(DataError, match="has other labels, and supervised"):
        done(task(words, method="supervised"), pair, tmp_path / "words")
    with pytest.raises(DataError, match="no function 'nothing'"):
        done(task(unlabeled, method=f"{NETS}:nothing"), pair, tmp_path / "loss")


@pytest.mark.parametrize(
    ("method", "metric", "remedy"),
    [("supervised", None, "or recover by distil"), ("distil", "mse", "or give a function"), ("distil", None, "")],
)
def test_labels_that_are_no_numbers_are_refused_where_they_are_needed(
    method: str, metric: str | None, remedy: str, pair: Pair, unlabeled: Path
) -> None:
    """Also of samples that are for calibration alone, and are learnt from."""
    x, options = np.load(unlabeled), PartOptions(part="calibration", shared_by=PARTS)
    row = open_dataset(str(unlabeled), [TensorSpec.parse("x:float32:batch,4")], options=options).rows[0]
    labels, path = np.zeros((len(x), 3), np.float32), unlabeled.with_name("gaps.npz")
    labels[row] = np.nan
    np.savez(path, x=x, labels=labels)
    learning = task(path, method=method, metric=metric).model_copy(update={"data_options": options})
    if not remedy:
        assert row in learning._data(pair).rows
        return
    with pytest.raises(DataError, match=f"^the labels have NaN or infinity, first for row {row} of gaps.npz") as error:
        learning._data(pair)
    assert remedy in error.value.remedy


def test_weights_of_half_precision_are_refused(pair: Pair) -> None:
    loaded = saved.load_artifact(pair[TEACHER])
    loaded.module.half()
    with pytest.raises(ModelError, match="is float16, whose steps are too coarse"):
        trainer.Models(loaded, loaded, loaded).ready(torch.device("cpu"))


@pytest.mark.thorough
def test_another_checkpoint_than_of_this_data_is_not_gone_on_from(pair: Pair, data: Path, tmp_path: Path) -> None:
    begun, out = tmp_path / "begun", tmp_path / "out"
    for folder in (begun, out):
        folder.mkdir()
    task(data, epochs=1, checkpoint_seconds=0).go_on(pair, out, begun, quiet)
    assert len(list(begun.glob("state-*"))) == 1
    told: list[str] = []
    task(data, epochs=1).go_on(pair, out, begun, told.append)
    assert "planning" not in told  # it is done already
    with np.load(data) as stored:
        np.savez(data, x=stored["x"] + 1, labels=stored["labels"])
    task(data, epochs=1).go_on(pair, out, begun, told.append)
    assert "planning" in told
