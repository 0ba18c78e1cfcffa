"""Prosecute an engine: look for allowed inputs on which it is wrong, and reduce what is found to a proof."""

import contextlib
import functools
import glob
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field, SerializeAsAny

from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.engines import simulation
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.errors import EnginesmithError, SignatureError, StepOutOfMemory
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.measure.prosecution.finding import Prosecution
from enginesmith.pipeline.measure.prosecution.inputs import InputSpace
from enginesmith.pipeline.measure.prosecution.judging import EXACT
from enginesmith.pipeline.measure.prosecution.locate import describe_software, locate_fault
from enginesmith.pipeline.measure.prosecution.search import InputSearch, Subject
from enginesmith.pipeline.measure.prosecution.stages import OtherGraph, Stage, Stages
from enginesmith.pipeline.passes.base import Pass, PrecisionPass, Progress
from enginesmith.pipeline.system import cpu
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, read_records, scratch_artifact, write_records
from enginesmith.pipeline.tasks.build import Transform
from enginesmith.pipeline.tasks.mixed_precision import ASSIGNMENT
from enginesmith.pipeline.tasks.quality import EngineCheck
from enginesmith.pipeline.tensors import Signature
from enginesmith.pipeline.units import AddedOption, format_bytes

GIVEN, TRUTH = "given", "truth"
"""Roles of the model as it is given, and of another graph of it that should be right."""
EVIDENCE = "finding"
"""Folder of the evidence, beside the record."""
_COPIES = 3
"""Times the size of its file that a graph takes in memory, while it is loaded and with what it computes."""
_REDUCING_SHARE = 0.5
_LEAST_REDUCING_SECONDS = 30.0
_SHARE_TO_TRY = 0.8
"""Share of the time that is left until inputs are tried no more, and nothing is reduced: the rest is for the record."""


class GraphStage(BaseModel, frozen=True):
    """A graph between the model and the engine."""

    role: str
    """Role of its artifact in the task."""
    name: str
    precision: str = "fp32"
    task: SerializeAsAny[Transform] | None = None
    """The work that made it, if it is a pass of the plan."""
    takes: dict[str, str] = {}
    """Roles of what that work took, in it → in this task."""


class Prosecute(EngineCheck):
    """Try inputs on an engine until one shows a fault, or the time is up.

    Where less is left than was asked for, less is tried or reduced, and it is done again when there is more.
    """

    title: ClassVar[str] = "prosecute"
    other_tools: ClassVar[tuple[str, ...]] = ("onnx",)
    time_share: float = Field(0.8, exclude=True)

    given_engine: SerializeAsAny[Engine]
    """Runs the model as it is given."""
    precision: str
    graphs: tuple[GraphStage, ...] = ()
    """Graphs on the way, in their order."""
    seconds: float
    seed: int = 0
    rows_apart: bool = True
    required: bool = True
    """False where nobody asked for it.

    Then it is no failure of the engine that inputs cannot be tried, and what a lower precision loses is left to
    fidelity and the metric.
    """

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        ends_at = time.monotonic() + _SHARE_TO_TRY * self.left_seconds
        with contextlib.ExitStack() as stack:
            search = None
            try:
                stages, search = self._begin(inputs, stack)
                budget, seconds = self.seconds, min(self.seconds, ends_at - time.monotonic())
                shown = search.run(seconds, progress)
            except EnginesmithError as error:
                if self.required:
                    raise
                return self._pass_over(search, error, out)
            finding = None
            if shown is not None:
                progress(f"reducing: {shown.reason}")
                truth = inputs[TRUTH].path if TRUTH in inputs else None
                budget = max(_LEAST_REDUCING_SECONDS, _REDUCING_SHARE * self.seconds)
                seconds = min(budget, (ends_at - time.monotonic()) / 2)  # for the graph, and again for an option
                known = Stages(stages, self.engine, self.device, seconds, truth)
                finding = locate_fault(known, search.shrink(shown), out / EVIDENCE)
        prosecution = self._record(
            search,
            finding=finding,
            cut=seconds < budget and not (finding and finding.option),  # with an option, nothing is left to look for
        )
        counts = ", ".join(f"{count} {name}" for name, count in prosecution.walks.items())
        tried = f"{prosecution.attempts} inputs tried ({counts})"
        if finding is None:
            caution = f"; {prosecution.caution}" if prosecution.caution else ""
            summary = f"{tried}: none on which it is wrong{caution}"
            return write_records(out, [prosecution], summary, incomplete=prosecution.cut)
        sentence = finding.sentence
        return write_records(out, [prosecution], f"{tried}: {sentence}", rejected=sentence, incomplete=prosecution.cut)

    def _pass_over(self, search: InputSearch | None, error: EnginesmithError, out: Path) -> Effect:
        """Record why no input was tried, or no further one; the engine's own errors are findings."""
        end = f"ended at input {search.attempts}" if search and search.attempts else "no input was tried"
        reason = f"{end}: {error.message}"
        return write_records(out, [self._record(search, reason=reason)], reason, incomplete=True)

    def _record(self, search: InputSearch | None, **outcome: Any) -> Prosecution:
        """Describe what a search has tried, and its outcome."""
        if search is None:
            return Prosecution(seconds=self.seconds, attempts=0, walks={}, **outcome)
        tried = {"walks": search.walked, "excused": search.excused, "excuses": search.excuses}
        return Prosecution(seconds=self.seconds, attempts=search.attempts, **tried, **outcome)

    def _begin(self, inputs: Inputs, stack: contextlib.ExitStack) -> tuple[list[Stage], InputSearch]:
        """Open the model, its graphs and its engine, and make the search."""
        _check_names(inputs[GIVEN].signature, inputs["model"].signature)
        if not self.required:
            self._check_memory(inputs)
        stages = [stack.enter_context(stage) for stage in self._open_stages(inputs)]
        return stages, InputSearch(self._make_subject(inputs, stages), self.seed)

    def _check_memory(self, inputs: Inputs) -> None:
        """Check that there is memory for the model, its graphs and its engine at once.

        Raises:
            StepOutOfMemory: there is not.
        """
        free = cpu.free_bytes()
        roles = (GIVEN, "model", *(graph.role for graph in self.graphs))
        needed = _COPIES * sum(inputs[role].bytes for role in roles if role in inputs)
        if free is not None and needed > free:
            raise StepOutOfMemory(
                f"the model, its graphs and its engine take about {format_bytes(needed)} at once, and "
                f"{format_bytes(free)} are free"
            )

    def _open_stages(self, inputs: Inputs) -> "Iterator[contextlib.AbstractContextManager[Stage]]":
        yield _open(self.given_engine, inputs[GIVEN], Device(), "model", "fp32", None)
        for graph in self.graphs:
            if graph.role in inputs:
                artifact, others = inputs[graph.role], None
                if graph.task is not None:
                    given = {role: inputs[there] for role, there in graph.takes.items() if there in inputs}
                    others = functools.partial(list_other_graphs, graph.task, given)
                yield _open(simulation(), artifact, Device(), graph.name, graph.precision, artifact.path, others)
        yield _open(self.engine, inputs["model"], self.device, "engine", self.precision, None)

    def _make_subject(self, inputs: Inputs, stages: Sequence[Stage]) -> Subject:
        reference = inputs["reference"].folder
        feeds = [call for answered in samples.read_calls(reference) for call in answered.feeds]
        signature = inputs["model"].signature or inputs[GIVEN].signature
        assert signature is not None
        graph = stages[-2].answer if len(stages) > 2 and stages[-2].precision == self.precision else None
        known = samples.read(reference)
        space = InputSpace(known.limit_sets(signature), known.ranges, feeds)
        if self.precision in EXACT:
            graph = None
        floats = [stage.answer for stage in stages[1:-1] if stage.precision in EXACT]
        model = stages[0]
        engine = stages[-1].answer
        return Subject(
            space,
            self.precision,
            engine,
            model.answer,
            graph,
            floats[-1] if floats else None,
            stages[-2].compute_by_reference,
            rows_apart=self.rows_apart,
            loss_judged=self.required,
            differentiate=model.differentiate,
            perturb=model.perturb,
        )


def _check_names(model: Signature | None, engine: Signature | None) -> None:
    """Check that a model and an engine of it have the same inputs and outputs, by name.

    Raises:
        SignatureError: they have not.
    """
    if model is None or engine is None:
        return
    for word, sides in (("inputs", (model.inputs, engine.inputs)), ("outputs", (model.outputs, engine.outputs))):
        wanted, given = ([spec.name for spec in side] for side in sides)
        if sorted(wanted) != sorted(given):
            raise SignatureError(
                f"the {word} of the engine are {', '.join(given)}, and those of the model {', '.join(wanted)}",
                "give a file with the names of the model's inputs and outputs",
            )


@contextlib.contextmanager
def _open(
    engine: Engine,
    artifact: Artifact,
    device: Device,
    name: str,
    precision: str,
    graph: Path | None,
    others: Callable[[Sequence[str]], Iterator[OtherGraph]] | None = None,
) -> Iterator[Stage]:
    with engine.load(artifact, device) as session:
        software, perturb = describe_software(engine), session.perturb
        yield Stage(name, session.run, precision, graph, session.differentiate, software, others, perturb)


# Other graphs of a plan, in case its own step made a wrong one.


def list_other_graphs(task: Transform, inputs: Inputs, suspects: Sequence[str]) -> Iterator[OtherGraph]:
    """List other graphs that can be made of the inputs of a step, each with the option that has it made.

    ``suspects`` are names of nodes, the likeliest to be wrong first.
    """
    step = task.step
    for option, other in step.list_other_options():
        yield option, functools.partial(_make_with, task, other, inputs)
    if isinstance(step, PrecisionPass) and ASSIGNMENT in inputs:
        yield from _keep_in_float(task, step, inputs, suspects)


def _make_with(task: Transform, step: Pass | None, inputs: Inputs, out: Path) -> Artifact:
    return inputs["model"] if step is None else _run_step(task.model_copy(update={"step": step}), inputs, out)


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
        option = AddedOption(field="quantization.keep", value=pattern, words=words)
        new_entries = [{**entry, "precision": step.remainder} if entry["group"] == name else entry for entry in entries]

        def make(out: Path, new_entries: list[dict[str, object]] = new_entries) -> Artifact:
            record = out / "assignment" / RECORDS
            record.parent.mkdir(parents=True)
            record.write_text(json.dumps(new_entries), encoding="utf-8")
            return _run_step(task, {**inputs, ASSIGNMENT: scratch_artifact("record", record, None)}, out / "graph")

        yield option, make


def _run_step(task: Transform, inputs: Inputs, out: Path) -> Artifact:
    out.mkdir(parents=True)
    effect = task.run(inputs, out, lambda _: None)
    return scratch_artifact("onnx", out / effect.file, effect.signature or inputs["model"].signature)
