"""Train a pruned model back; a task that goes on from its last checkpoint if its process was ended."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import SerializeAsAny

from enginesmith.calibration.dataset import Dataset, Labels, open_dataset
from enginesmith.calibration.options import AS_FOUND, DataOptions
from enginesmith.calibration.user_code import is_reference
from enginesmith.pipeline.artifact import Effect, Kind, file_digest, json_digest, relative_digests
from enginesmith.pipeline.errors import DataError, EnginesmithError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.torch.file_tracking import track_files
from enginesmith.pipeline.measure import quality
from enginesmith.pipeline.measure.memory.limits import StepMeter
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.passes.finetune.options import FILE, METHODS, RecoverOptions, Recovery
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.worker import Worker, serve
from enginesmith.pipeline.tasks.base import Inputs, ResumableTask
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.units import format_bytes

if TYPE_CHECKING:
    from enginesmith.pipeline.passes.finetune.evaluate import Metric, Work


MODEL, TEACHER = "model", "teacher"


class Recover(ResumableTask):
    """Train the weights of a pruned model to do what the dense one does."""

    title: ClassVar[str] = "recover"
    produces: ClassVar[Kind] = "torch"
    exclusive: ClassVar[bool] = True
    """The number of steps is planned by the clock."""

    options: RecoverOptions
    data: str | None
    """An embedded set without a split means its training split."""
    data_options: SerializeAsAny[DataOptions] = AS_FOUND
    samples: int | None = None
    """None means all there are."""
    metric: str | None = None
    """None means top1 where there are labels, and else how far the dense model is agreed with."""
    seed: int = 0
    device: Device = Device()

    @property
    def identity(self) -> dict[str, Any]:
        identity = super().identity
        identity["fields"]["options"].pop("checkpoint_seconds")
        return {**identity, **quality.identify_metric(self.metric)}

    @property
    def gpus(self) -> Literal["", "one", "all"]:
        return "all" if self.device.kind == "cuda" else ""

    @property
    def machine_specific(self) -> bool:
        return bool(self.gpus)

    @property
    def tools(self) -> tuple[str, ...]:
        return ("torch", "numpy")

    def go_on(self, inputs: Inputs, out: Path, begun: Path, progress: Progress) -> Effect:
        from enginesmith.pipeline.frameworks.torch import saved

        size = self.options.processes or 1
        if not self.options.processes and self.device.kind == "cuda":
            import torch

            size = max(1, torch.cuda.device_count() - self.device.index)
        with _start_helpers(self, inputs, begun, size) as start:
            opened = self.prepare(inputs, 0, size)
            start()
            record = opened.recover(0, size, begun, progress)
        assert record is not None
        kept = opened.work.models.average
        kept.module.to("cpu")
        saved.save_changed(inputs[MODEL], kept, out, None)
        (out / FILE).write_text(record.model_dump_json(indent=1) + "\n")
        return Effect(
            file=saved.RECORD,
            summary=f"{record.metric} {record.before:.4f} → {record.after:.4f} (dense {record.teacher:.4f}) on "
            f"{record.held_back} samples held out; {record.steps} steps: {record.reason}",
            notes=(*opened.work.material.data.notes, *_list_notes(record, opened.work, self.device)),
            signature=kept.signature,
            reads=opened.reads,
        )

    def prepare(self, inputs: Inputs, rank: int, size: int) -> "Opened":
        """Load models and data, on the device of one of several processes."""
        import torch

        from enginesmith.pipeline.frameworks.torch.saved import load_artifact
        from enginesmith.pipeline.passes.finetune.batches import split_data
        from enginesmith.pipeline.passes.finetune.evaluate import Work
        from enginesmith.pipeline.passes.finetune.trainer import Models, load_libraries

        device = self.device.model_copy(update={"index": self.device.index + rank})
        place = torch.device(str(device))
        load_libraries()
        meter = StepMeter(device, self.options.memory_bytes)
        signature = inputs[MODEL].signature
        assert signature is not None
        with track_files(allow_pickle=False) as tracker:
            data = self._data(inputs)
            metric = self._metric(data)
            if self.options.method not in METHODS:
                from enginesmith.pipeline.passes.finetune.losses import user_loss

                user_loss(self.options.method)
        own_code = (
            is_reference(self.data or "")
            or is_reference(self.options.method)
            or is_reference(quality.parse_metric(self.metric or "")[0])
        )
        files = sorted(path for path in tracker.files if path.suffix != ".py" or own_code)
        models = Models(load_artifact(inputs[MODEL]), load_artifact(inputs[MODEL]), load_artifact(inputs[TEACHER]))
        models.ready(place)
        material = split_data(data, self.options.held_back, self.seed, place)
        fixed = None if samples.batch_symbol(signature) else samples.fixed_batch(signature)
        threads = max(1, self.device.thread_count // size)
        work = Work(models, material, self.options, metric, self.seed, threads, size, meter, fixed)
        fingerprint = json_digest([data.digest, relative_digests({path: file_digest(path) for path in files}), size])
        return Opened(work, fingerprint, (*files, *data.folders))

    def _data(self, inputs: Inputs) -> Dataset:
        signature = inputs[MODEL].signature
        assert signature is not None
        if self.data is None:
            raise DataError(
                "recovery needs data to learn from, and there is none",
                "give some samples with --calibration DATA; distilling needs no labels",
            )
        data = open_dataset(self.data, signature.inputs, split="train", options=self.data_options)
        if {"calibration", "choice"} <= data.parts.keys():
            rows = np.concatenate([data.parts["calibration"], data.parts["choice"]])
            whole = dataclasses.replace(data.whole, parts=data.parts)
            data = whole.take(rows, f"{whole.name} (calibration and choice: {len(rows)} of {len(whole)})")
        if self.options.method == "supervised" and data.one_label is None:
            raise DataError(
                f"{data.name} has {'several' if data.labels else 'no'} labels, and supervised recovery needs one array",
                "name it with --labels KEY, or add an array named labels, or recover by distil, which needs none",
            )
        return data if self.samples is None else data.sample(self.samples, self.seed)

    def _metric(self, data: Dataset) -> "Metric":
        from enginesmith.pipeline.passes.finetune.evaluate import AGREEMENT, Metric

        name = self.metric or quality.DEFAULT_METRIC
        labels = data.one_label
        if self.metric is None and (labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu"):
            return AGREEMENT

        def value(outputs: Feeds, theirs: Feeds, labels: Labels | None) -> float:
            return quality.evaluate(name, outputs, theirs, labels, self.seed).value

        return Metric(name, value, quality.sign_of(name))


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
    if record.best_step == 0:
        yield "recovery made it no better: the weights are those from before"
    if plan.micro_batch < plan.batch // plan.processes:
        again = ", computing activations again" if plan.checkpointed else ""
        yield f"batches of {plan.batch} in parts of {plan.micro_batch} to fit the memory{again}"
    if plan.judged_at_once is not None and plan.judged_at_once < plan.micro_batch:
        yield f"evaluated {plan.judged_at_once} samples at a time to fit the memory"
    if plan.frozen_norms:
        yield f"batch norms kept their statistics while training: parts of {plan.micro_batch} are too few for them"
    if device.kind == "cuda":
        import torch

        yield f"peak device memory {format_bytes(torch.cuda.max_memory_allocated(device.index))}"
