"""torch-pruning by hand (by_hand.py) beside ``enginesmith prune``: as many MACs, latency, accuracy and lines of code.

By hand one gives a share of channels; how many MACs are left is seen afterwards. The product is asked for as many. Both
modules are exported, by ``torch.onnx.export`` and by ``enginesmith export``, and the graphs timed in turns. Of digits,
both are also trained back by the product, for the same time.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import by_hand
import judging
import numpy as np
import torch
from command import Answer, call
from racing import race

from enginesmith.calibration.dataset import embedded
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import saved
from enginesmith.pipeline.passes.finetune import options
from enginesmith.pipeline.passes.finetune.options import RecoverOptions
from enginesmith.pipeline.tasks.finetune import MODEL, TEACHER, Recover
from enginesmith.pipeline.tasks.load import Load

MODELS = ("digits", "resnet18", "resnet50", "mobilenet_v2")
RATIO = 0.3
SCOPES: Mapping[str, bool] = {"global": True, "uniform": False}
HAND, OURS, DENSE = "by hand", "ours", "dense"


def compared(models: Sequence[str], work: Path, seconds: float, recover: float) -> Iterator[dict[str, Any]]:
    """A row for each model and way of ranking."""
    for model in models:
        for scope, everywhere in SCOPES.items():
            folder = work / f"{model}-{scope}"
            folder.mkdir(parents=True, exist_ok=True)
            yield _row(model, scope, everywhere, folder, seconds, recover)


def _row(model: str, scope: str, everywhere: bool, folder: Path, seconds: float, recover: float) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "scope": scope, "ratio": RATIO, "recover_limit_seconds": recover}
    source = f"{Path(by_hand.__file__)}:pruned(model={model!r}, ratio={RATIO}, everywhere={everywhere})"
    torch.manual_seed(0)
    example = next(iter(judging.built(model).example.values()))
    dense_macs = by_hand.macs(judging.built(model).module, example)
    try:
        left = by_hand.macs(judging.built(source).module, example) / dense_macs
    except Exception as error:  # noqa: BLE001  # whatever it raises is what its user sees
        row["refused"] = {HAND: f"{type(error).__name__}: {error}"}
        return row
    commands = _commands(model, scope, left)
    answers = [_called(words, folder) for words in commands]
    row["lines"] = {HAND: by_hand.code(), OURS: [f"enginesmith {' '.join(words)}" for words in commands]}
    row["macs_left"] = {HAND: left}
    if refused := next((each.message for each in answers if each.exit_code), None):
        row["refused"] = {OURS: refused}
        return row
    ours = saved.load_artifact(_loaded(str(folder / "pruned"), folder / "student-ours")).module.model
    modules = {DENSE: judging.built(model).module, HAND: judging.built(source).module, OURS: ours}
    row["macs_left"][OURS] = by_hand.macs(ours, example) / dense_macs
    row["parameters"] = {name: sum(each.numel() for each in one.parameters()) for name, one in modules.items()}
    graphs = {
        DENSE: judging.exported(model, folder / "dense.onnx"),
        HAND: judging.exported(source, folder / "hand.onnx"),
        OURS: folder / "pruned.onnx",
    }
    times = race({name: runner(path, feeds(model, 1)) for name, path in graphs.items()}, seconds)
    row["p50_ms"] = {name: times.p50_ms(name) for name in graphs}
    row["over_dense"] = {name: dataclasses.asdict(times.speedup(name, DENSE)) for name in (HAND, OURS)}
    row["over_by_hand"] = dataclasses.asdict(times.speedup(OURS, HAND))
    if model == "digits":
        row["top1"] = _accuracies(model, source, folder, recover)
    return row


def _commands(model: str, scope: str, left: float) -> tuple[tuple[str, ...], ...]:
    return (
        ("prune", model, "-o", "pruned", "--prune", f"macs=-{1 - left:.1%}", "--prune-scope", scope),
        ("export", "pruned", "-o", "pruned.onnx"),
    )


def _called(words: Sequence[str], folder: Path) -> Answer:
    placed = [str(folder / word) if word.startswith("pruned") else word for word in words]
    return call(*placed, "--store", str(folder / "store"))


def feeds(model: str, rows: int) -> judging.Feeds:
    """The first rows of a model's example."""
    return {name: value[:rows].numpy() for name, value in judging.built(model).example.items()}


def runner(path: Path, arrays: judging.Feeds) -> Callable[[], object]:
    """One call of ONNX Runtime, on one thread."""
    opened = judging.session(path)
    return lambda: opened.run(None, arrays)


def _accuracies(model: str, source: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Top-1 on the embedded test data: dense, pruned, and trained back in the same way."""
    teacher = _loaded(model, folder / "teacher")
    found: dict[str, Any] = {DENSE: _top1(teacher)}
    for name, text in ((HAND, source), (OURS, str(folder / "pruned"))):
        student = _loaded(text, folder / f"student-{name.replace(' ', '-')}")
        found[name] = _top1(student)
        out = _fresh(folder / f"recovered-{name.replace(' ', '-')}")
        task = Recover(options=RecoverOptions(seconds=seconds), data=model)
        effect = task.run({MODEL: student, TEACHER: teacher}, out, _quiet)
        found[f"{name}, recovered"] = _top1(_artifact(out / effect.file, effect.signature))
        found[f"{name}, steps"] = options.read(out).steps
    return found


def _loaded(source: str, folder: Path) -> Artifact:
    effect = Load(source=resolve(source)).run({}, _fresh(folder), _quiet)
    return _artifact(folder / effect.file, effect.signature)


def _artifact(path: Path, signature: Any) -> Artifact:
    return Artifact(kind="torch", path=path, sha256=path.parent.name, bytes=0, signature=signature)


def _fresh(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    return folder


def _top1(artifact: Artifact) -> float:
    data = embedded("digits", "test")
    assert data.labels is not None
    module = saved.load_artifact(artifact).module
    with torch.inference_mode():
        (logits,) = module(torch.from_numpy(np.array(data.arrays["image"])))
    return float(np.mean(logits.argmax(1).numpy() == data.labels))


def _quiet(text: str) -> None:
    del text
