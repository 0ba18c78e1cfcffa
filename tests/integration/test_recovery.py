"""Recovery in processes of its own: killed and resumed, shared between two, held to a limit of memory."""

import threading
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from enginesmith.calibration.dataset import embedded
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import DataError, StepKilled, StepOutOfMemory
from enginesmith.pipeline.execution.events import Outcome
from enginesmith.pipeline.execution.local import LocalExecutor
from enginesmith.pipeline.execution.scheduler import Runner
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import saved
from enginesmith.pipeline.passes.finetune.options import RecoverOptions, Recovery, read
from enginesmith.pipeline.planning.plan import Step
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.system import worker
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import execute
from enginesmith.pipeline.tasks.finetune import MODEL, TEACHER, Recover
from enginesmith.pipeline.tasks.load import Load
from graphs import quiet

NETS = Path(__file__).parent.parent / "data" / "nets.py"
Pair = dict[str, Artifact]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The digits network, and the same one with the smaller half of each convolution's filters at zero."""
    folder = tmp_path_factory.mktemp("digits")
    teacher, thinned = loaded("digits", folder / "dense", 0), folder / "thinned"
    thinned.mkdir()
    model = saved.load_artifact(teacher)
    with torch.no_grad():
        for module in model.module.modules():
            if isinstance(module, torch.nn.Conv2d):
                norms = module.weight.abs().sum((1, 2, 3))
                module.weight[norms < norms.median()] = 0
    saved.save_changed(teacher, model, thinned)
    student = teacher.model_copy(update={"path": thinned / saved.RECORD, "sha256": "thinned"})
    return {MODEL: student, TEACHER: teacher}


def loaded(factory: str, folder: Path, seed: int) -> Artifact:
    folder.mkdir()
    effect = Load(source=resolve(factory), seed=seed).run({}, folder, quiet)
    return Artifact(kind="torch", path=folder / effect.file, sha256=folder.name, bytes=0, signature=effect.signature)


def task(samples: int = 600, **options: Any) -> Recover:
    chosen = {"epochs": 4, "evaluations": 4, "seconds": 600.0, **options}
    return Recover(options=RecoverOptions(**chosen), data="digits", samples=samples, device=Device(threads=1))


def recovered(task: Recover, pair: Pair, folder: Path) -> tuple[dict[str, Any], Recovery]:
    out = folder / "out"
    out.mkdir()
    worker.run(execute, task, pair, out, log=folder / "log")
    return load_file(out / "state.safetensors"), read(out)


def top1(artifact: Artifact) -> float:
    data = embedded("digits", "test")
    image = torch.from_numpy(data.batch(0, len(data))["image"])
    with torch.inference_mode():
        (logits,) = saved.load_artifact(artifact).module(image)
    return float(np.mean(logits.argmax(1).numpy() == data.labels))


@pytest.mark.thorough
def test_killed_and_begun_again_it_ends_with_the_same_weights(digits: Pair, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    given = {role: Outcome(role, "done", artifact) for role, artifact in digits.items()}
    step = Step("recover", task(epochs=3, checkpoint_seconds=0), {role: role for role in digits})
    over = threading.Event()
    with LocalExecutor(store, 1) as executor:
        runner = Runner(executor, lambda step: tmp_path / f"{step.id}.log")
        killer = Thread(target=_keep_killing, args=(executor, store.root / "begun", over), daemon=True)
        killer.start()
        failed = runner.run([step], given)["recover"]
    over.set()
    killer.join()
    assert isinstance(failed.error, StepKilled)
    (begun,) = store.root.glob("begun/*")
    assert 5 <= max(int(path.name.removeprefix("state-")) for path in begun.glob("state-*")) < 21
    assert [entry.step for entry in store.entries()] == ["unfinished"]

    with LocalExecutor(store, 1) as executor:
        resumed = Runner(executor, lambda step: tmp_path / f"{step.id}.log").run([step], given)["recover"].artifact
    assert not list(store.root.glob("begun/*"))
    whole, record = recovered(step.task, digits, tmp_path)  # type: ignore[arg-type]
    found = load_file(resumed.folder / "state.safetensors")
    assert record.steps == 21
    assert read(resumed.folder) == record
    assert all(np.array_equal(whole[name], found[name]) for name in whole)


def _keep_killing(executor: LocalExecutor, begun: Path, over: threading.Event) -> None:
    """Kill the worker in the middle, and the one that is started once more as soon as it has come further."""
    killed: set[object] = set()
    while not over.wait(0.001):
        reached = max((int(path.name.removeprefix("state-")) for path in begun.glob("*/state-*")), default=0)
        for active in set(executor._active) - killed:
            if reached >= 5 * (len(killed) + 1):
                killed.add(active)
                active.kill()


@pytest.fixture(scope="module")
def mlps(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two networks of one kind with other weights each."""
    folder = tmp_path_factory.mktemp("mlps")
    return {role: loaded(f"{NETS}:mlp", folder / role, seed) for seed, role in enumerate((MODEL, TEACHER))}


@pytest.mark.thorough
def test_two_processes_take_the_steps_that_one_takes(mlps: Pair, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((150, 4)).astype(np.float32))
    options = {"epochs": 3, "batch": 12, "learning_rate": 0.01, "seconds": 600, "evaluations": 2}
    ends = []
    for processes in (1, 2):
        recover = Recover(
            options=RecoverOptions(processes=processes, **options),
            data=str(tmp_path / "x.npy"),
            device=Device(threads=1),
        )
        folder = tmp_path / str(processes)
        folder.mkdir()
        ends.append(recovered(recover, mlps, folder))
    (one, alone), (two, shared) = ends
    assert (alone.plan.processes, shared.plan.processes) == (1, 2)
    assert (alone.plan.micro_batch, shared.plan.micro_batch) == (12, 6)
    assert alone.steps == shared.steps == 30
    assert alone.after > alone.before
    before = load_file(mlps[MODEL].folder / "state.safetensors")
    for name, value in one.items():
        moved = np.abs(value - before[name]).max()
        assert moved > 0.01
        assert np.abs(value - two[name]).max() < 1e-3 * moved


@pytest.mark.thorough
def test_what_fails_in_another_process_is_told(digits: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("losses.py").write_text(
        "import multiprocessing\n"
        "assert '_help' not in multiprocessing.current_process().name, 'not here'\n"
        "def loss(student, teacher, batch):\n"
        "    return student(batch['image']).square().mean()\n",
        encoding="utf-8",
    )
    with pytest.raises(DataError, match="not here"):
        recovered(task(processes=2, method="losses.py:loss"), digits, tmp_path)


@pytest.mark.thorough
def test_a_limit_of_memory_is_held_in_smaller_parts(digits: Pair, tmp_path: Path) -> None:
    limited = task(300, epochs=4, evaluations=1, memory_bytes=24 << 20)
    _, record = recovered(limited, digits, tmp_path)
    assert 2 <= record.plan.micro_batch < 64
    assert record.after > record.before + 0.1


HOARDING = """
import torch

calls = 0

def loss(student, teacher, batch):
    global calls
    calls += 1
    x = batch["x"]
    hoarding = {after} < calls <= {after} + 40 and torch.is_grad_enabled() == {learning}
    taken = torch.ones(len(x), 1 << 18) if hoarding else None
    return (student(x) - teacher(x)).square().mean()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("learning", [True, False], ids=["a step", "an evaluation"])
def test_what_exceeds_the_limit_is_done_again_in_smaller_parts(learning: bool, mlps: Pair, tmp_path: Path) -> None:
    """A mebibyte for each sample is taken after a while, of 24 that are allowed."""
    (tmp_path / "own.py").write_text(HOARDING.format(after=60, learning=learning))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32))
    options = {"epochs": 20, "batch": 32, "seconds": 600, "evaluations": 10, "patience": 99}
    recover = Recover(
        options=RecoverOptions(method=f"{tmp_path / 'own.py'}:loss", memory_bytes=24 << 20, **options),
        data=str(tmp_path / "x.npy"),
        device=Device(threads=1),
    )
    _, record = recovered(recover, mlps, tmp_path)
    assert (record.plan.micro_batch, record.plan.judged_at_once) == ((16, 32) if learning else (32, 16))
    assert record.steps == record.plan.steps == 100
    assert record.after > record.before


@pytest.mark.thorough
def test_what_does_not_fit_at_all_is_said(digits: Pair, tmp_path: Path) -> None:
    with pytest.raises(StepOutOfMemory, match="even one sample at a time"):
        recovered(task(memory_bytes=1 << 20), digits, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["distil", "supervised"])
def test_a_network_that_lost_half_of_its_filters_is_recovered(digits: Pair, tmp_path: Path, method: str) -> None:
    _, record = recovered(task(epochs=10, method=method), digits, tmp_path)
    assert top1(digits[MODEL]) < 0.8
    assert record.before < 0.8
    after = digits[MODEL].model_copy(update={"path": tmp_path / "out" / saved.RECORD})
    assert top1(after) > 0.97
