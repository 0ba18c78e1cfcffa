"""Structured pruning of a torch module, as a task: it may look at calibration data."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from enginesmith.pipeline import samples
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.pruning.facts import Facts, Kept
from enginesmith.pipeline.pruning.options import PruneOptions
from enginesmith.pipeline.pruning.target import Target
from enginesmith.pipeline.tasks.base import Inputs, Task
from enginesmith.pipeline.tasks.calibrate import Feeder, Feeding

if TYPE_CHECKING:
    from enginesmith.pipeline.pruning.gradients import Sample
    from enginesmith.pipeline.pruning.pruner import Pruned
    from enginesmith.pipeline.torch_model import LoadedModel

MODEL = "model"
FACTS = "pruning.json"
"""Beside the pruned model: what was done, as :class:`~enginesmith.pipeline.pruning.facts.Facts`."""
TOOLS = ("torch", "torch-pruning", "numpy")


class Prune(Task):
    """A smaller module: whole channels, hidden units and heads are gone, and it runs as before."""

    title: ClassVar[str] = "prune"
    produces: ClassVar[Kind] = "torch"

    target: Target
    options: PruneOptions = PruneOptions()
    feeder: Feeder | None = None
    """Where samples come from for ``taylor``."""
    seed: int = 0
    """Of random importance."""

    @property
    def tools(self) -> tuple[str, ...]:
        return TOOLS

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        """Prune, hold what came out against the signature, and write it down.

        Raises:
            UsageError: the target cannot be met, a protected layer is not there, or ``taylor`` has no data.
            ModelError: the module's values cannot be followed, or the pruned module does not run.
        """
        from enginesmith.pipeline import saved_module

        loaded = saved_module.load_artifact(inputs[MODEL])
        done, notes, reads = pruned(self, inputs, loaded, progress)
        hold_runs(loaded)
        progress("writing")
        saved_module.save_changed(inputs[MODEL], loaded, out, done.surgery)
        facts = _facts(self, loaded, done)
        (out / FACTS).write_text(facts.model_dump_json(indent=1) + "\n")
        return Effect(
            file=saved_module.RECORD,
            summary=summary(facts),
            notes=notes,
            signature=loaded.signature,
            reads=reads,
        )


def read_facts(artifact: Artifact) -> Facts:
    """What was done to make a pruned model."""
    return Facts.model_validate_json((artifact.folder / FACTS).read_bytes())


def pruned(
    task: Prune, inputs: Inputs, loaded: "LoadedModel", progress: Progress
) -> "tuple[Pruned, tuple[str, ...], tuple[Path, ...]]":
    """Prune a loaded module in place; notes on the data, and the files that it was read from."""
    from enginesmith.pipeline.pruning import pruner

    feeding: Feeding | None = None
    reads: tuple[Path, ...] = ()
    gradients = None
    if task.options.importance == "taylor":
        feeding, reads = _feeding(task, inputs)
        gradients = gradients_over(loaded, feeding)
    feeds = tuple(value.clone() for value in loaded.example.values())
    done = pruner.prune(
        loaded.module.model,
        lambda: loaded.module(*feeds),
        task.target,
        task.options,
        seed=task.seed,
        gradients=gradients,
        progress=progress,
    )
    for parameter in loaded.module.model.parameters():
        parameter.grad = None
    return done, (*done.notes, *(feeding.data.notes if feeding else ())), reads


def _feeding(task: Prune, inputs: Inputs) -> tuple[Feeding, tuple[Path, ...]]:
    if task.feeder is None or task.feeder.data is None:
        raise UsageError(
            "importance by taylor needs samples, and there are none", "give some with --data DATA, or rank by l2"
        )
    return task.feeder.open(inputs[MODEL], inputs[MODEL])  # a reference is looked at only where there is no data


def gradients_over(loaded: "LoadedModel", feeding: Feeding) -> Callable[[], None]:
    from enginesmith.pipeline.pruning import gradients

    return lambda: gradients.collect(loaded.module.model, loaded.module, _samples(loaded, feeding))


def _samples(loaded: "LoadedModel", feeding: Feeding) -> "Iterator[Sample]":
    import torch

    data, size = feeding.data, feeding.provenance.batch
    for index, feeds in enumerate(feeding):
        values = tuple(torch.from_numpy(feeds[spec.name]) for spec in loaded.signature.inputs)
        rows = [row % len(data) for row in range(index * size, (index + 1) * size)]
        yield values, None if data.labels is None else torch.as_tensor(data.labels[rows])


def hold_runs(loaded: "LoadedModel") -> None:
    """Insist on a module that runs at its example's batch size and at another one.

    Raises:
        ModelError: it does not; the message says in which module.
    """
    import torch

    from enginesmith.pipeline.pruning import tracing

    symbol, sizes = samples.batch_symbol(loaded.signature), loaded.dynamic_sizes
    tried = [sizes, *([{**sizes, symbol: sizes[symbol] + 1}] if symbol in sizes else [])]
    example = {name: value.numpy() for name, value in loaded.example.items()}
    for one in tried:
        feeds = [torch.from_numpy(value) for value in samples.resized(example, loaded.signature, one).values()]
        _, why = tracing.failure(loaded.module.model, partial(loaded.module, *feeds))
        if why:
            at = f" at batch size {one[symbol]}" if symbol in one else ""
            raise ModelError(
                f"the pruned model does not run{at}: {why}",
                "its forward counts on sizes that were pruned; protect the layers before it with --protect",
            )


def _facts(task: Prune, loaded: "LoadedModel", done: "Pruned") -> Facts:
    rows = loaded.dynamic_sizes.get(samples.batch_symbol(loaded.signature) or "", 1)
    return Facts(
        target=str(task.target),
        importance=task.options.importance,
        scope=task.options.scope,
        macs_before=done.before.macs // rows,
        macs_after=done.after.macs // rows,
        parameters_before=done.before.parameters,
        parameters_after=done.after.parameters,
        channels_before=done.channels_before,
        channels_after=done.channels_after,
        groups=_overall(done),
        whole=done.whole,
    )


def _overall(done: "Pruned") -> tuple[Kept, ...]:
    """One entry for each group, over all steps."""
    found: dict[str, Kept] = {}
    for one in done.surgery.history:
        first = found.get(one.root, one)
        kept = one.kept if first is one else tuple(first.kept[index] for index in one.kept)
        found[one.root] = one.model_copy(update={"before": first.before, "kept": kept, "step": 1})
    return tuple(found.values())


def summary(facts: Facts) -> str:
    """One sentence."""
    macs = f"{1 - facts.macs_after / max(facts.macs_before, 1):.1%} of MACs"
    numbers = f"{1 - facts.parameters_after / max(facts.parameters_before, 1):.1%} of parameters"
    width = f"channels {facts.channels_before:,} → {facts.channels_after:,} in {len(facts.groups)} groups"
    return f"{width}; {macs} and {numbers} gone"
