"""Make a graph of a plan in another way, in case its own step made a wrong one."""

import functools
import glob
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.options import AddedOption
from enginesmith.pipeline.measure.prosecution.stages import OtherGraph
from enginesmith.pipeline.passes.base import Pass, PrecisionPass
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, read_records, scratch_artifact
from enginesmith.pipeline.tasks.build import Transform
from enginesmith.pipeline.tasks.mixed_precision import ASSIGNMENT


def list_other_graphs(task: Transform, inputs: Inputs, suspects: Sequence[str]) -> Iterator[OtherGraph]:
    """List other graphs that can be made of the inputs of a step, each with the option that has it made.

    ``suspects`` are names of nodes, the likeliest to be wrong first.
    """
    step = task.step
    for other in step.list_other_options():
        option = AddedOption(field=other.field, value=other.value, instead_of=other.instead_of, words=other.words)
        yield OtherGraph(option, functools.partial(_make, task, other.step, inputs))
    if isinstance(step, PrecisionPass) and ASSIGNMENT in inputs:
        yield from _keep_in_float(task, step, inputs, suspects)


def _make(task: Transform, step: Pass | None, inputs: Inputs, out: Path) -> Artifact:
    return inputs["model"] if step is None else _run(task.model_copy(update={"step": step}), inputs, out)


def _keep_in_float(
    task: Transform, step: PrecisionPass, inputs: Inputs, suspects: Sequence[str]
) -> Iterator[OtherGraph]:
    entries = read_records(inputs[ASSIGNMENT])
    low = step.precision.partition("+")[0]
    groups = [str(entry["group"]) for entry in entries if entry["precision"] == low]
    places = {name: place for place, name in enumerate(suspects)}
    for name in sorted(groups, key=lambda group: places.get(group, len(places))):
        pattern = glob.escape(name)
        words = f"--keep {shlex.quote(pattern)}"
        option = AddedOption(field="quantisation.keep", value=pattern, words=words)
        kept = [{**entry, "precision": step.remainder} if entry["group"] == name else entry for entry in entries]

        def make(out: Path, kept: list[dict[str, object]] = kept) -> Artifact:
            record = out / "assignment" / RECORDS
            record.parent.mkdir(parents=True)
            record.write_text(json.dumps(kept))
            return _run(task, {**inputs, ASSIGNMENT: scratch_artifact("record", record, None)}, out / "graph")

        yield OtherGraph(option, make)


def _run(task: Transform, inputs: Inputs, out: Path) -> Artifact:
    out.mkdir(parents=True)
    effect = task.run(inputs, out, lambda _: None)
    return scratch_artifact("onnx", out / effect.file, effect.signature or inputs["model"].signature)
