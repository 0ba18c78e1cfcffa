"""Define the work of a step, as it runs in a worker: artifacts in, files and one sentence out.

A task's fields, with the digests of what it takes, make its key; so everything that changes the result is a field.
"""

import json
import math
import resource
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.frameworks.torch.file_tracking import list_code, take_dependencies
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Signature

Inputs = Mapping[str, Artifact]
M = TypeVar("M", bound=BaseModel)

RECORDS = "records.json"
"""The main file of a ``record`` artifact: a list of plain objects."""


class Task(BaseModel, ABC, frozen=True, extra="forbid"):
    """Define the work of one step."""

    title: ClassVar[str]
    """Word for people: export, measure …"""
    produces: ClassVar[Kind]
    exclusive: ClassVar[bool] = False
    """True where nothing else may run on the machine at the same time."""
    in_process: ClassVar[bool] = False
    """True where it takes next to nothing and leaves nothing behind, so that others may be done in its process."""
    other_tools: ClassVar[tuple[str, ...]] = ()
    """Distributions whose versions decide what comes out, besides those of its fields."""

    time_share: float = Field(1.0, exclude=True)
    """Share that it may take of the time left when it begins; after that it counts as hanging. No part of the key."""
    left_seconds: float = Field(math.inf, exclude=True)
    """That share in seconds, as the scheduler finds it out; no part of the key."""
    grace_seconds: float = Field(0.0, exclude=True)
    """Seconds after that until it is ended, in which it brings what it has begun to an end; no part of the key."""

    shares_cores: bool = Field(False, exclude=True)
    """True where others begin at the same time: it takes its share of the cores, and not all; no part of the key."""

    @property
    def identity(self) -> dict[str, Any]:
        """Describe what is done, without where on this machine: the class, the fields, the classes of the fields."""
        fields = ((name, getattr(self, name)) for name in type(self).model_fields)
        kinds = {name: type(value).__name__ for name, value in fields if isinstance(value, BaseModel)}
        return {"task": type(self).__name__, **kinds, "fields": self.model_dump(mode="json")}

    @property
    def place(self) -> str:
        """Place on this machine that the task reads from, besides its inputs."""
        return ""

    @property
    def runs_on(self) -> Device:
        """Device that it takes."""
        device = getattr(self, "device", None)
        return device if isinstance(device, Device) else Device()

    @property
    def gpus(self) -> Literal["", "one", "all"]:
        """GPUs that it takes."""
        return "one" if self.runs_on.kind == "cuda" else ""

    @property
    def times_kernels(self) -> bool:
        """Tell whether it chooses kernels by their times, so that nothing else may run on its GPU at the same time."""
        return False

    @property
    def pairs(self) -> bool:
        """Tell whether others of the same title may run beside it, although it is exclusive."""
        return False

    @property
    def machine_specific(self) -> bool:
        """Tell whether it has to run on a machine of the target: what it makes or tells holds for no other kind."""
        return self.exclusive or bool(self.gpus)

    @property
    def expected_seconds(self) -> float | None:
        """Time that the task is given; None where no limit tells it."""
        return None

    @property
    def tools(self) -> tuple[str, ...]:
        """Distributions whose versions decide what comes out, with those of engines, passes and tasks in the fields."""
        parts = list[Any]()
        for name in type(self).model_fields:
            value = getattr(self, name)
            parts += value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
        return tuple(
            dict.fromkeys((*(tool for part in parts for tool in getattr(part, "tools", ())), *self.other_tools))
        )

    @property
    def environment_key(self) -> dict[str, Any]:
        """Facts about this machine that decide what comes out; only measurements have some."""
        return {}

    @abstractmethod
    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        """Run the task: read the inputs, write into the empty folder ``out``."""


class ResumableTask(Task):
    """Define a long task that keeps what it has so far, so that another process can go on where one was ended."""

    @abstractmethod
    def go_on(self, inputs: Inputs, out: Path, begun: Path, progress: Progress) -> Effect:
        """Run as :meth:`run` does; ``begun`` holds what an earlier process left there, and is removed in the end."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        with tempfile.TemporaryDirectory(prefix="enginesmith-begun-") as begun:
            return self.go_on(inputs, out, Path(begun), progress)


class Done(BaseModel):
    """Report a task's result and cost."""

    effect: Effect
    seconds: float
    host_peak_bytes: int | None


def execute(task: Task, inputs: Inputs, out: Path, progress: Progress, begun: Path | None = None) -> Done:
    """Run a task in this process, from where an earlier one left it in ``begun`` if there is one; measure the cost."""
    start = time.monotonic()
    take_dependencies()
    if begun is None:
        effect = task.run(inputs, out, progress)
    else:
        assert isinstance(task, ResumableTask)
        effect = task.go_on(inputs, out, begun, progress)
    asked = take_dependencies()
    late = () if task.in_process else _list_late_code(inputs)
    effect = effect.model_copy(
        update={
            "reads": (*effect.reads, *asked.folders, *asked.loose, *late),
            **{name: value for name, value in asked._asdict().items() if name not in ("folders", "loose")},
        }
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Done(effect=effect, seconds=time.monotonic() - start, host_peak_bytes=peak)


def _list_late_code(inputs: Inputs) -> tuple[Path, ...]:
    """List code that a torch module imported only now, at sizes, say, that it was not loaded at."""
    folders = [artifact.folder for artifact in inputs.values() if artifact.kind == "torch"]
    if not folders:
        return ()
    from enginesmith.pipeline.frameworks.torch.saved import list_code_files

    return tuple(sorted(list_code().difference(*map(list_code_files, folders))))


def write_records(
    out: Path, records: Sequence[BaseModel | Mapping[str, Any]], summary: str = "", **more: Any
) -> Effect:
    """Write the main file of a record; the effect has ``more`` fields beside the summary."""
    plain = [record.model_dump(mode="json") if isinstance(record, BaseModel) else record for record in records]
    (out / RECORDS).write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return Effect(file=RECORDS, summary=summary, **more)


def read_records(artifact: Artifact) -> list[dict[str, Any]]:
    """Read the main file of a record."""
    records: list[dict[str, Any]] = json.loads(artifact.path.read_bytes())
    return records


def read_models(artifact: Artifact | None, kind: type[M]) -> list[M]:
    """Read the main file of a record as models; none without a record."""
    return [kind.model_validate(record) for record in read_records(artifact)] if artifact else []


def scratch_artifact(kind: Kind, path: Path, signature: Signature | None) -> Artifact:
    """Describe a file on the way to a result: it is never stored, and needs no digest."""
    return Artifact(kind=kind, path=path, sha256="", bytes=0, signature=signature)
