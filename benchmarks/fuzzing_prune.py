"""Prune random modules as a plan does, and see that each keeps what pruning promises, or is refused in words.

    python benchmarks/fuzzing_prune.py --from 0 --to 1000         # goes on where it ended; --again starts anew
    python benchmarks/fuzzing_prune.py --seed 17 --stop           # one module, with the traceback of what is raised

Modules are made by nets/random_modules.py. Each is loaded, pruned by two of the trials (by all with --seed), and
judged (prune_judging.py): it runs at other batches and sizes and keeps its outputs' shapes; it answers as the original
in which every weight that reads what was removed is zero; record and counts are right; the target is met or a note says
why not; it comes back from what was written; and of every tenth seed the exported graph answers the same, too.
Numbers go to benchmarks/results/fuzzing_prune.json and fuzzing_prune.md.
"""

import functools
import importlib.metadata
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from fuzz_process import FINDINGS, Outcome, collect, run_command, shorten, write_report, write_table
from torch import Tensor, nn

from enginesmith.calibration.dataset import Dataset
from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.frameworks.records import PruningFacts
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import saved
from enginesmith.pipeline.passes.export.export import Export
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.tasks.base import scratch_artifact
from enginesmith.pipeline.tasks.calibrate import Feeder, Feeding
from enginesmith.pipeline.tasks.load import Load
from enginesmith.pipeline.tasks.prune import Prune, read_facts

NETS = Path(__file__).parent / "nets"
sys.path.append(str(NETS))
import prune_judging as judging  # noqa: E402 - it takes nets from there
from prune_judging import Fault, NotComparable  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "fuzzing_prune.json"
LOG = Path(tempfile.gettempdir()) / "enginesmith-fuzzing-prune.jsonl"
TAKEN_IN_TURN = 6
"""A seed takes one of so many trials."""
_EXPORT_EVERY = 10
_SAMPLES = 6
_DISTRIBUTIONS = functools.cache(importlib.metadata.packages_distributions)
"""Takes a second, and is called whenever a model is loaded."""
_CLOSE = 0.02
"""Share that a target may be missed by without a note, as docs/pruning.md says."""


@dataclass(frozen=True)
class Trial:
    """A target and options; ``again`` prunes what came out once more."""

    target: str
    options: Mapping[str, Any]
    again: bool = False


TRIALS: Mapping[str, Trial] = {
    "30%": Trial("30%", {}),
    "50%, any width": Trial("50%", {"multiple_of": 1}),
    "macs, multiples of 8": Trial("macs=-50%", {"multiple_of": 8}),
    "params, uniform": Trial("params=-40%", {"multiple_of": 1, "scope": "uniform"}),
    "70%, l1, three steps": Trial("70%", {"importance": "l1", "steps": 3, "multiple_of": 4}),
    "macs, taylor": Trial("macs=-30%", {"importance": "taylor", "multiple_of": 1}),
    "40%, batch norms": Trial("40%", {"importance": "bn", "multiple_of": 1}),
    "50%, random, no heads": Trial("50%", {"importance": "random", "heads": False, "multiple_of": 2}),
    "20%, uniform, two steps": Trial("20%", {"scope": "uniform", "steps": 2, "multiple_of": 1}),
    "macs, almost all": Trial("macs=-85%", {"multiple_of": 1}),
    "40%, protected": Trial("40%", {"protect": ("blocks.0",), "multiple_of": 1}),
    "30%, twice": Trial("30%", {"multiple_of": 1}, again=True),
}
QUICK = ("50%, any width", "macs, multiples of 8", "30%, twice")
"""Those of the quick test."""


class RandomFeeder(Feeder):
    """Repeat the example's rows as samples."""

    data: str | None = "random"
    samples: int = _SAMPLES
    seed: int = 0

    def open(self, model: Artifact, reference: Artifact) -> tuple[Feeding, tuple[Path, ...]]:
        assert model.signature is not None
        example = saved.read_example(model)
        count = _SAMPLES if model.signature.symbols else len(next(iter(example.values())))
        rows = {name: np.resize(value, (count, *value.shape[1:])) for name, value in example.items()}
        data = Dataset("random", rows)
        return Feeding(data, data.provenance(self.seed, 1 if model.signature.symbols else count)), ()


@dataclass
class Subject:
    """A random module, loaded as the first step of a plan does."""

    seed: int
    artifact: Artifact
    module: nn.Module
    calls: dict[str, tuple[Tensor, ...]]
    """Inputs that the original takes, by what is special about them."""
    rows: int
    """Batch of the example; 1 where it cannot change."""


def prepare(seed: int, folder: Path) -> Subject:
    """Load the module of a seed, and find the sizes that it runs with."""
    folder.mkdir(parents=True, exist_ok=True)
    effect = Load(source=resolve(f"{NETS / 'random_modules.py'}:build({seed})")).run({}, folder, _ignore)
    artifact = scratch_artifact("torch", folder / effect.file, effect.signature)
    loaded = saved.load_artifact(artifact)
    example, module = tuple(loaded.example.values()), loaded.module.model
    calls = {"the example": example}
    for batch in (1, 3):
        calls[f"batch {batch}"] = tuple(_resize(value, batch, 0) for value in example)
    if any(value.dim() > 2 for value in example):
        calls["larger inputs"] = tuple(_resize(value, 2, 4 if value.dim() == 4 else 1) for value in example)
    for name in list(calls):
        try:
            judging.answer(module, calls[name])
        except (RuntimeError, ValueError, AssertionError):
            del calls[name]
    return Subject(seed, artifact, module, calls, len(example[0]) if loaded.dynamic_sizes else 1)


def _resize(value: Tensor, batch: int, more: int) -> Tensor:
    """Repeat rows to another batch, and make images and sequences larger."""
    value = value[[row % len(value) for row in range(batch)]]
    axes = {4: (2, 3), 3: (1,)}.get(value.dim(), ())
    for axis in axes if more else ():
        value = torch.cat([value, value.narrow(axis, 0, more)], axis)
    return value


def _ignore(text: str) -> None:
    pass


def apply(subject: Subject, name: str, out: Path) -> Outcome:
    """Prune a module by one trial, and judge what came out; what is raised beside refusals is left to the caller."""
    trial, parent, notes = TRIALS[name], subject.artifact, ""
    module = subject.module
    for index in range(2 if trial.again else 1):
        folder = out / str(index)
        folder.mkdir(parents=True)
        try:
            effect = _prune(parent, trial, subject.seed, folder)
        except EnginesmithError as error:
            return Outcome(subject.seed, name, "refused", error.message)
        pruned = scratch_artifact("torch", folder / effect.file, effect.signature)
        try:
            smaller = _judge(subject, module, pruned, effect, trial)
        except NotComparable as reason:
            smaller, notes = saved.load_artifact(pruned).module.model, str(reason)
        except Fault as fault:
            return Outcome(subject.seed, name, "wrong", str(fault))
        parent, module = pruned, smaller
    if subject.seed % _EXPORT_EVERY == 0:
        try:
            _judge_graph(subject, parent, module, out / "graph")
        except EnginesmithError as error:
            return Outcome(subject.seed, name, "not exported", error.message)
        except Fault as fault:
            return Outcome(subject.seed, name, "wrong", str(fault))
    return Outcome(subject.seed, name, "not compared" if notes else "right", notes)


def _prune(parent: Artifact, trial: Trial, seed: int, out: Path) -> Effect:
    options = PruneOptions.model_validate(trial.options)
    task = Prune(target=PruneTarget.parse(trial.target), options=options, feeder=RandomFeeder(), seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return task.run({"model": parent}, out, _ignore)


def _judge(subject: Subject, original: nn.Module, pruned: Artifact, effect: Effect, trial: Trial) -> nn.Module:
    """Judge a pruned module by the one that it was made of; return it.

    Raises:
        Fault: it is wrong.
        NotComparable: its answers cannot be compared, and all else is right.
    """
    loaded, facts = saved.load_artifact(pruned), read_facts(pruned)
    module = loaded.module.model
    for where, feeds in subject.calls.items():
        try:
            actual = judging.answer(module, feeds)
        except Exception as error:
            raise Fault(f"{where}: it does not run: {shorten(error)}") from error
        judging.compare_forms(judging.answer(original, feeds), actual, where)
    _judge_reloaded(subject, pruned, module)
    _judge_counts(subject, original, module, facts, loaded.example)
    left = judging.find_all_left(original, module)
    judging.check_record(facts.groups, original, left)
    _judge_target(facts, effect, trial, module)
    if trial.options.get("protect"):
        _judge_protection(trial, original, module)
    masked = judging.make_masked(original, module, left)
    for where, feeds in subject.calls.items():
        judging.compare_with_masked(masked, module, feeds, where)
    return module


def _judge_reloaded(subject: Subject, pruned: Artifact, module: nn.Module) -> None:
    """Write the folder that a command writes, read it as the first step of another plan, and compare."""
    folder = pruned.folder.parent / f"{pruned.folder.name}-written"
    saved.write_saved(pruned, folder, folder)
    out = pruned.folder.parent / f"{pruned.folder.name}-read"
    out.mkdir()
    effect = Load(source=resolve(str(folder))).run({}, out, _ignore)
    again = saved.load_artifact(scratch_artifact("torch", out / effect.file, effect.signature)).module.model
    before, after = (judging.list_tensors(one, one) for one in (module, again))
    if set(before) != set(after) or any(not torch.equal(value, after[name]) for name, value in before.items()):
        raise Fault("read again, it has other tensors")
    feeds = next(iter(subject.calls.values()))
    judging.compare_numbers(judging.answer(module, feeds), judging.answer(again, feeds), "read again", 1e-5)


def _judge_counts(
    subject: Subject, original: nn.Module, module: nn.Module, facts: PruningFacts, example: Mapping[str, Tensor]
) -> None:
    feeds = tuple(example.values())
    counted = tuple(judging.count_products(one, feeds) // subject.rows for one in (original, module))
    if counted != (facts.macs_before, facts.macs_after):
        raise Fault(f"the record tells of {facts.macs_before} → {facts.macs_after} MACs, and {counted} were counted")
    counted = tuple(judging.count_parameters(one) for one in (original, module))
    told = facts.parameters_before, facts.parameters_after
    if counted != told:
        raise Fault(f"the record tells of {told} parameters, and {counted} were counted")


def _judge_target(facts: PruningFacts, effect: Effect, trial: Trial, module: nn.Module) -> None:
    """See that the target is met, or that a note says why not."""
    target = PruneTarget.parse(trial.target)
    sides = {
        "macs": (facts.macs_before, facts.macs_after),
        "params": (facts.parameters_before, facts.parameters_after),
        "ratio": (facts.channels_before, facts.channels_after),
    }[target.kind]
    left = sides[1] / max(sides[0], 1)
    if abs(left - target.left) > _CLOSE + 1e-9 and not any("are left, not" in note for note in effect.notes):
        raise Fault(f"{left:.1%} of {target.kind} are left, not {target.left:.1%}, and no note says why")
    gone, units = facts.channels_before - facts.channels_after, sum(one.before - one.after for one in facts.groups)
    if not units <= gone or (not units and facts.groups):
        raise Fault(f"the record tells of {gone} channels that are gone, and of {units} units")
    multiple = trial.options.get("multiple_of", PruneOptions().multiple_of)
    odd = [
        one.root
        for one in facts.groups
        if one.unit == "channel"
        and one.after < one.before
        and one.after % multiple
        and _count(module, one.root) % multiple
    ]
    if odd and not any("no multiples" in note for note in effect.notes):
        raise Fault(f"{odd[0]} has a width that is no multiple of {multiple}, and no note says so")


def _count(module: nn.Module, path: str) -> int:
    """Count the channels that a layer makes; units may have several each."""
    axis = _find_making_axis(module, path)
    return 1 if axis is None else module.get_submodule(path).get_parameter("weight").shape[axis]


def _judge_protection(trial: Trial, original: nn.Module, module: nn.Module) -> None:
    """See that layers that are protected make as many channels as before."""
    before, after = (judging.list_tensors(one, module) for one in (original, module))
    for name, value in before.items():
        path, _, leaf = name.rpartition(".")
        if any(path == one or path.startswith(f"{one}.") for one in trial.options["protect"]):
            axis = _find_making_axis(original, path)
            if leaf == "weight" and axis is not None and value.shape[axis] != after[name].shape[axis]:
                raise Fault(f"{name} is protected, and became {list(after[name].shape)}")


def _find_making_axis(module: nn.Module, path: str) -> int | None:
    try:
        layer = module.get_submodule(path)
    except AttributeError:  # a part of attention
        return 0
    if isinstance(layer, nn.Embedding):
        return 1
    if isinstance(layer, nn.modules.conv._ConvNd):
        return 1 if layer.transposed and layer.groups == 1 else 0
    return 0 if isinstance(layer, nn.Linear) else None


def _judge_graph(subject: Subject, pruned: Artifact, module: nn.Module, out: Path) -> None:
    """Export a pruned module, and compare what ONNX Runtime makes of the graph."""
    out.mkdir()
    effect = run_pass(Export(), pruned, out, _ignore)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(out / effect.file, options, providers=["CPUExecutionProvider"])
    for where, feeds in subject.calls.items():
        if where == "larger inputs":
            continue
        given = {value.name: feed.numpy() for value, feed in zip(session.get_inputs(), feeds, strict=True)}
        made = [torch.from_numpy(value) for value in session.run(None, given)]
        expected = judging.answer(module, feeds)
        actual = dict(zip(expected, made, strict=True))
        judging.compare_forms(expected, actual, f"exported, {where}")
        judging.compare_numbers(expected, actual, f"exported, {where}", 1e-3)


def fuzz(seed: int, names: list[str], folder: Path, begin: Callable[[str], None], *, stop: bool) -> Iterator[Outcome]:
    """Prune the module of a seed; ``begin`` is told what comes next."""
    torch.set_num_threads(1)
    importlib.metadata.packages_distributions = _DISTRIBUTIONS
    try:
        begin("prepare")
        subject = prepare(seed, folder / "loaded")
    except Exception as error:
        if stop:
            raise
        kind = "refused" if isinstance(error, EnginesmithError) else "traceback"
        yield Outcome(seed, "prepare", kind, shorten(error))
        return
    for index, name in enumerate(names):
        try:
            begin(name)
            yield apply(subject, name, folder / str(index))
        except Exception as error:
            if stop:
                raise
            yield Outcome(seed, name, "traceback", shorten(error))


def fuzz_in_turn(
    seed: int, names: list[str], folder: Path, begin: Callable[[str], None], *, stop: bool
) -> Iterator[Outcome]:
    """Prune the module of a seed by those trials whose turn it is; by all where they are asked for one by one."""
    chosen = [name for index, name in enumerate(names) if (index - seed) % TAKEN_IN_TURN == 0]
    return fuzz(seed, chosen, folder, begin, stop=stop)


def _report(log: Path) -> None:
    write_report(RESULTS, collect(log), _write_lines)


def _write_lines(document: dict[str, Any]) -> Iterator[str]:
    yield f"# {document['seeds']} random modules pruned"
    yield ""
    yield f"Seeds {document['first']} to {document['last']}; `python benchmarks/fuzzing_prune.py` made this."
    yield "Not compared: right but for the answers, which cannot be judged, as a normalization without weights was cut."
    yield ""
    yield from write_table(document, ("right", "not compared", "not exported", "refused", *FINDINGS))
    yield "Commonest reasons of refusals:"
    yield ""
    for reason, count in list(document["refusals"].items())[:12]:
        yield f"- {count} × {reason}"
    yield ""


if __name__ == "__main__":
    one = any(argument.startswith("--seed") for argument in sys.argv)
    run_command(__doc__, Path(__file__), LOG, list(TRIALS), fuzz if one else fuzz_in_turn, _report)
