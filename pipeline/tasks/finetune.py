"""Train back what was pruned, made sparse or put into int8; from the last checkpoint if the process was ended."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import SerializeAsAny

from enginesmith.calibration.dataset import Dataset, Labels, assign_labels, open_dataset
from enginesmith.calibration.options import AS_FOUND, DataOptions
from enginesmith.calibration.user_code import is_reference
from enginesmith.pipeline.artifact import Artifact, Effect, Kind, file_digest, json_digest, relative_digests
from enginesmith.pipeline.errors import DataError, EnginesmithError, ModelError, SampleError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.fidelity import compare, thresholds_for
from enginesmith.pipeline.frameworks.onnx import edit, model_file
from enginesmith.pipeline.frameworks.torch.file_tracking import track_files
from enginesmith.pipeline.measure import quality
from enginesmith.pipeline.measure.memory.limits import StepMeter
from enginesmith.pipeline.measure.metrics.table import find_own
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.passes.finetune.options import FILE, METHODS, BatchLimits, RecoverOptions, Recovery, Subject
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.worker import Worker, serve
from enginesmith.pipeline.tasks.base import Inputs, ResumableTask
from enginesmith.pipeline.tasks.calibrate import read_class_names
from enginesmith.pipeline.tasks.graph_forms import MODEL, REFERENCE, find_form
from enginesmith.pipeline.tasks.mixed_precision import ASSIGNMENT, read_form
from enginesmith.pipeline.tensors import Feeds, TensorSpec
from enginesmith.pipeline.units import format_bytes, format_metric

if TYPE_CHECKING:
    from enginesmith.pipeline.frameworks.torch.module import LoadedModel
    from enginesmith.pipeline.passes.finetune.evaluate import Metric, Work
    from enginesmith.pipeline.passes.finetune.trainer import Models


TEACHER = "teacher"


class _Training(NamedTuple):
    """Tell how a kind of model is trained."""

    subject: Subject
    teacher: str
    """Word for the model that is learnt from."""
    rates: tuple[float, ...]
    """Learning rates to choose from, where none is given."""
    limits: BatchLimits = BatchLimits()
    """Limit how far batches are made smaller where time is short."""
    unchanged: str = ""
    """Why weights that training made no better are not gone on with; empty where they are."""


_PRUNED = _Training("pruned", "dense", (2e-3,))
_SPARSE = _Training("sparse", "float", (2e-3, 5e-4))
_INT8 = _Training(
    *("int8", "float", (2e-4, 4e-5, 8e-6)),
    limits=BatchLimits(steps=2000, least=2),  # many small steps bring back more of what rounding lost
    unchanged="training made it no better: it would be int8 without training",
)
_SHARE_OF_LEFT = 0.8
_SAME = "fp16"
"""Row of the fidelity thresholds: a graph with rescaled channels may cut a little of what calibration did not see."""


class Recover(ResumableTask):
    """Train the weights of a pruned model to do what the dense one does."""

    title: ClassVar[str] = "recover"
    produces: ClassVar[Kind] = "torch"
    exclusive: ClassVar[bool] = True
    other_tools: ClassVar[tuple[str, ...]] = ("torch", "numpy")
    """The number of steps is planned by the clock."""

    options: RecoverOptions
    data: str | None
    """An embedded set without a split means its training split."""
    data_options: SerializeAsAny[DataOptions] = AS_FOUND
    samples: int | None = None
    """None means all there are."""
    metric: str | None = None
    """None means top1 where labels are classes of samples, else the loss on labels that are learnt, else how far the
    dense model is agreed with."""
    seed: int = 0
    max_drop: float | None = None
    """Drop of the metric that is allowed, where training that cannot come near it is of no use; None otherwise."""
    device: Device = Device()

    @property
    def identity(self) -> dict[str, Any]:
        identity = super().identity
        identity["fields"]["options"].pop("checkpoint_seconds")
        return {**identity, **quality.identify_metric(self.metric)}

    @property
    def training(self) -> _Training:
        return _PRUNED

    @property
    def _seconds(self) -> float:
        """The time that was given, or what is left of the run's, less a little for loading and writing."""
        return min(self.options.seconds, _SHARE_OF_LEFT * self.left_seconds)

    @property
    def gpus(self) -> Literal["", "one", "all"]:
        return "all" if self.device.kind == "cuda" else ""

    @property
    def machine_specific(self) -> bool:
        return bool(self.gpus)

    def go_on(self, inputs: Inputs, out: Path, begun: Path, progress: Progress) -> Effect:
        size = self.options.processes or 1
        if not self.options.processes and self.device.kind == "cuda":
            size = max(1, nvidia.count_alike(self.device.index))
        with _start_helpers(self, inputs, begun, size) as start:
            opened = self.prepare(inputs, 0, size)
            start()
            record = opened.recover(0, size, begun, progress)
        assert record is not None
        opened.work.models.restore()
        average = opened.work.models.average
        average.module.to("cpu")
        file = self.save(inputs, average, out, changed=record.best_step > 0)
        record = record.model_copy(update={"subject": self.training.subject})
        (out / FILE).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        return Effect(
            file=file,
            summary=f"{record.metric} {format_metric(record.before)} → {format_metric(record.after)} "
            f"({self.training.teacher} {format_metric(record.teacher)}) on {record.held_back} samples held out; "
            f"{record.steps} steps: {record.outcome}",
            notes=(*opened.work.material.data.notes, *_list_notes(record, opened.work, self.device)),
            rejected=self.training.unchanged if record.best_step == 0 else "",
            signature=average.signature,
            reads=opened.reads,
            incomplete=record.plan.seconds < self.options.seconds
            or (record.ending == "time" and self._seconds < self.options.seconds),
        )

    def load(self, inputs: Inputs) -> "Models":
        """Load the model that is to be trained, twice, and the one that it learns from."""
        from enginesmith.pipeline.frameworks.torch.saved import load_artifact
        from enginesmith.pipeline.passes.finetune.trainer import Models

        return Models(load_artifact(inputs[MODEL]), load_artifact(inputs[MODEL]), load_artifact(inputs[TEACHER]))

    def save(self, inputs: Inputs, trained: "LoadedModel", out: Path, *, changed: bool) -> str:
        """Write the trained model, and return the name of its main file; it may not have ``changed``."""
        from enginesmith.pipeline.frameworks.torch import saved

        saved.save_changed(inputs[MODEL], trained, out, None)
        return saved.RECORD

    def prepare(self, inputs: Inputs, rank: int, size: int) -> "Opened":
        """Load models and data, on the device of one of several processes."""
        import torch

        from enginesmith.pipeline.passes.finetune.batches import split_data
        from enginesmith.pipeline.passes.finetune.evaluate import Work
        from enginesmith.pipeline.passes.finetune.trainer import load_libraries

        device = self.device.model_copy(update={"index": self.device.index + rank})
        place = torch.device(str(device))
        load_libraries()
        meter = StepMeter(device, self.options.memory_bytes)
        options = self.options.model_copy(update={"seconds": self._seconds})
        signature = inputs[MODEL].model_signature
        with track_files(allow_pickle=False) as tracker:
            data = self._data(inputs)
            metric = self._metric(data, signature.outputs)
            if self.options.method not in METHODS:
                from enginesmith.pipeline.passes.finetune.losses import user_loss

                user_loss(self.options.method)
        own_code = (
            is_reference(self.data or "")
            or is_reference(self.options.method)
            or is_reference(quality.parse_metric(self.metric or "")[0])
        )
        files = sorted(path for path in tracker.files if path.suffix != ".py" or own_code)
        models = self.load(inputs)
        models.ready(place)
        material = split_data(data, self.options.held_back, self.seed, place)
        material = dataclasses.replace(material, labeled=self._find_labeled(signature.outputs).name)
        fixed = None if samples.batch_symbol(signature) else samples.fixed_batch(signature)
        threads = max(1, torch.get_num_threads() // size)  # --threads is for sessions; no other step runs now
        work = Work(
            *(models, material, options, metric, self.seed, threads, size, meter, fixed),
            *(self.training.rates, self.training.limits),
            max_drop=self.max_drop,
            total_seconds=self.options.seconds,
        )
        fingerprint = json_digest([data.digest, relative_digests({path: file_digest(path) for path in files}), size])
        return Opened(work, fingerprint, (*files, *data.folders))

    def _data(self, inputs: Inputs) -> Dataset:
        signature = inputs[MODEL].model_signature
        if self.data is None:
            raise DataError(
                "recovery needs data to learn from, and there is none",
                "give some samples with --data DATA; distilling needs no labels",
            )
        data = open_dataset(self.data, signature.inputs, split="train", options=self.data_options)
        if {"calibration", "choice"} <= data.parts.keys():
            rows = np.concatenate([data.parts["calibration"], data.parts["choice"]])
            whole = dataclasses.replace(data.whole, parts=data.parts)
            data = whole.take(rows, f"{whole.name} (calibration and choice: {len(rows)} of {len(whole)})")
        data = data.number_words(read_class_names(inputs))
        names = [spec.name for spec in signature.outputs]
        if self.options.method == "supervised" and not assign_labels(data.number_labels, names):
            raise DataError(
                f"{data.name} has {'no' if data.labels is None else 'other'} labels, and supervised recovery needs an "
                f"array of numbers, or one for each output, by name: {', '.join(names)}",
                "name it with --labels KEY, or add an array named labels, or recover by distil, which needs none",
            )
        self._check_labels(data, names)
        return data if self.samples is None else data.sample(self.samples, self.seed)

    def _check_labels(self, data: Dataset, outputs: Sequence[str]) -> None:
        """Check that labels are finite that are learnt, or that a metric of enginesmith's judges by.

        Raises:
            DataError: one is not; its row is named.
        """
        try:
            if self.options.method == "supervised":
                learnt = assign_labels(data.number_labels, outputs)
                quality.check_finite(learnt, "remove those samples, or recover by distil, which needs no labels")
            if data.labels is not None and find_own(quality.parse_metric(self.metric or "")[0]):
                quality.check_finite(data.labels)
        except SampleError as error:
            raise error.on_row(data.rows[error.sample], data.whole.name) from error

    def _find_labeled(self, outputs: Sequence[TensorSpec]) -> TensorSpec:
        """Find the output that labels of one array are of: the one that is judged, else the first."""
        names = [spec.name for spec in outputs]
        metric = quality.name_output(self.metric or quality.DEFAULT_METRIC, self.data_options.label_keys, names)
        judged = quality.parse_metric(metric)[1]
        return next((spec for spec in outputs if spec.name == judged), outputs[0])

    def _metric(self, data: Dataset, outputs: Sequence[TensorSpec]) -> "Metric":
        from enginesmith.pipeline.passes.finetune.evaluate import AGREEMENT, Metric, loss_on_labels

        names, output = [spec.name for spec in outputs], self._find_labeled(outputs)
        name = quality.name_output(self.metric or quality.DEFAULT_METRIC, self.data_options.label_keys, names)
        single = "float" in output.dtype and all(size == 1 for size in output.as_row.shape[1:])
        classes = data.class_labels is not None and not single
        if data.labels is None:  # the metric is then for other data
            return AGREEMENT
        if self.metric is None and not classes:
            return loss_on_labels(names, output.name) if self.options.method == "supervised" else AGREEMENT

        def value(outputs: Feeds, theirs: Feeds, labels: Labels | None) -> float:
            settled = name if data.whole.labels is None else quality.settle_metric(name, theirs, data.whole.labels)
            return quality.evaluate(settled, outputs, theirs, labels, self.seed).value

        return Metric(name, value, quality.sign_of(name))


class TrainGraph(Recover):
    """Train the weights of a graph that is sparse, or in int8, to do what the float graph does.

    Scales of activations are trained, too; zero points and zeros stay as they are. The float graph is the one that was
    put into int8, as the assignment says: perhaps with rescaled channels.
    """

    title: ClassVar[str] = "train"
    produces: ClassVar[Kind] = "onnx"
    other_tools: ClassVar[tuple[str, ...]] = ("torch", "onnx", "onnx-ir", "numpy")

    stays_float: bool = False
    """True for a sparse graph, whose weights have further to go than those that were rounded."""
    external_data_bytes: int = edit.EXTERNAL_DATA_BYTES

    @property
    def training(self) -> _Training:
        return _SPARSE if self.stays_float else _INT8

    def load(self, inputs: Inputs) -> "Models":
        """Load the graphs, and check that torch computes the float one as the reference has it.

        Raises:
            ModelError: it does not, or an operator has no form in torch.
        """
        from enginesmith.pipeline.frameworks.torch import graph
        from enginesmith.pipeline.passes.finetune.trainer import Models

        signature = inputs[MODEL].model_signature
        form = read_form(inputs[ASSIGNMENT]) if ASSIGNMENT in inputs else "given"
        teacher = find_form(form, {**inputs, MODEL: inputs[TEACHER]})[0].path
        paths = (inputs[MODEL].path, inputs[MODEL].path, teacher)
        models = Models(*(dataclasses.replace(graph.load_graph(path), signature=signature) for path in paths))
        _check_teacher(models.teacher, inputs[REFERENCE])
        return models

    def save(self, inputs: Inputs, trained: "LoadedModel", out: Path, *, changed: bool) -> str:
        from enginesmith.pipeline.frameworks.torch import graph

        if changed:
            graph.save_graph(inputs[MODEL].path, trained, out, self.external_data_bytes)
        else:
            model_file.copy(inputs[MODEL].path, out / edit.FILE)
        return edit.FILE


def _check_teacher(teacher: "LoadedModel", reference: Artifact) -> None:
    import torch

    first = next(iter(samples.read_calls(reference.folder)))
    feeds, expected = first.feeds[0], first.outputs[0]
    with torch.no_grad():
        values = teacher.module(*(torch.from_numpy(feeds[spec.name]) for spec in teacher.signature.inputs))
    answers = {spec.name: value.numpy() for spec, value in zip(teacher.signature.outputs, values, strict=True)}
    if not compare(expected, answers, thresholds_for(_SAME)).passed:
        raise ModelError(
            "torch computes this graph otherwise than it should, so it cannot be trained", "omit --recover"
        )


@dataclasses.dataclass(frozen=True)
class Opened:
    """Keep models and data of one process, and the files that they were read from."""

    work: "Work"
    fingerprint: str
    reads: tuple[Path, ...]

    def recover(self, rank: int, size: int, begun: Path, tell: Progress) -> Recovery | None:
        """Recover, as one of several processes; the first has a record to give."""
        from enginesmith.pipeline.passes.finetune.batches import join_processes
        from enginesmith.pipeline.passes.finetune.loop import recover

        with join_processes(rank, size, self.work.material.device, begun / _MEETING) as team:
            return recover(self.work, team, begun, self.fingerprint, tell)


_MEETING = ".meeting"
"""The file by which processes find each other."""


@contextlib.contextmanager
def _start_helpers(task: Recover, inputs: Inputs, begun: Path, size: int) -> Iterator[Callable[[], None]]:
    """Start other processes that share this one's batches; gives what has them begin, once all are ready.

    Raises:
        EnginesmithError: one of them failed, for which others may have failed too.
    """
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(max(1, size - 1)))
        helpers = [
            stack.enter_context(Worker(_help, task, dict(inputs), begun, rank, size, log=begun / f"helper-{rank}.log"))
            for rank in range(1, size)
        ]
        going: list[Future[None]] = []

        def start() -> None:
            for ready in [pool.submit(helper.request, "open") for helper in helpers]:
                ready.result()
            (begun / _MEETING).unlink(missing_ok=True)
            going.extend(pool.submit(helper.request, "go") for helper in helpers)

        try:
            yield start
        except EnginesmithError:
            for future in going:
                if future.done():
                    future.result()
            raise
        for future in going:
            future.result()


def _help(connection: Connection, task: Recover, inputs: Inputs, begun: Path, rank: int, size: int) -> None:
    """Run a helping process: it makes ready, and then does its part."""
    opened: list[Opened] = []

    def answer(what: str, tell: Progress) -> None:
        if what == "open":
            opened.append(task.prepare(inputs, rank, size))
        else:
            opened[0].recover(rank, size, begun, lambda text: None)

    serve(connection, answer)


def _list_notes(record: Recovery, work: "Work", device: Device) -> Iterator[str]:
    """List what is to be known of a recovery; the peak of the host's memory is in every step's history."""
    plan, learnt = record.plan, len(work.material.learnt)
    if record.ending in ("diverged", "time"):
        yield record.reason
    if record.ending in ("planned", "time") and record.steps < learnt // plan.batch:
        yield (
            f"{record.steps} steps of {plan.batch} samples are less than one pass over the {learnt} there are to learn "
            "from: more time for recovery gives more"
        )
    if plan.seconds < work.options.seconds:
        yield f"its steps were planned for {plan.seconds:.0f} s, before it was interrupted; the next run trains anew"
    if record.best_step == 0:
        yield record.unchanged
    if work.fixed is None and plan.micro_batch < plan.batch // plan.processes:
        again = ", computing activations again" if plan.checkpointed else ""
        yield f"batches of {plan.batch} in parts of {plan.micro_batch} to fit the memory{again}"
    if plan.judged_at_once is not None and plan.judged_at_once < plan.micro_batch:
        yield f"evaluated {plan.judged_at_once} samples at a time to fit the memory"
    if plan.frozen_norms:
        yield f"batch norms kept their statistics while training: parts of {plan.micro_batch} are too few for them"
    if device.kind == "cuda":
        import torch

        yield f"peak device memory {format_bytes(torch.cuda.max_memory_allocated(device.index))}"
