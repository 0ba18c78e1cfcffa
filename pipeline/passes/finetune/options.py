"""Define the options and records of recovery; light, as the command line and recipes import it."""

import difflib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from enginesmith.calibration.user_code import is_reference
from enginesmith.pipeline.units import Bytes, Option, Seconds, format_metric

METHODS = ("distil", "supervised")
_LESS_IS_BETTER = ("mse", "loss")


class RecoverOptions(BaseModel, frozen=True, extra="forbid"):
    """Choices for training a pruned model back; the dense model is its teacher."""

    method: str = Field(
        "distil",
        description="distil learns from the dense model, without labels; supervised from labels; module:function is "
        "called with (student, teacher, batch) and returns the loss",
    )
    seconds: Annotated[Seconds, Option("Variants", "--recover-time")] = Field(
        120.0, description="time for recovery; its steps are planned to fit"
    )
    epochs: int | None = Field(
        None, ge=1, description="largest number of passes over the data; by default as many as there is time for"
    )
    batch: int = Field(64, ge=1, description="samples in each step of the optimizer")
    learning_rate: float | None = Field(
        None, gt=0, description="the highest, after the warm-up; then it falls along a cosine; found by short trials"
    )
    weight_decay: float = Field(0.01, ge=0, description="weight decay of AdamW; norms and biases have none")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the steps in which the learning rate goes up")
    temperature: float = Field(2.0, gt=0, description="temperature of the softmax when classes are distilled")
    features: bool = Field(True, description="compare intermediate values, too, when distilling")
    augment: bool = Field(
        True, description="shift, mirror and mix images when distilling, so that few samples teach more"
    )
    ema: float = Field(0.99, ge=0, lt=1, description="decay of the moving average of weights that is kept; 0 for none")
    evaluations: int = Field(20, ge=1, description="largest number of evaluations; fewer if they take long")
    patience: int = Field(10, ge=1, description="number of evaluations without a better one, after which recovery ends")
    held_back: float = Field(0.2, gt=0, lt=1, description="share of the samples that is used for evaluation alone")
    memory_bytes: Annotated[Bytes | None, Option("Variants", "--recover-memory")] = Field(
        None, description="memory for recovery; batches are split into parts that fit"
    )
    autocast: Literal["auto", "bf16", "off"] = Field(
        "auto", description="bfloat16 products while training; auto: on GPUs that have them"
    )
    processes: int | None = Field(
        None,
        ge=1,
        description="processes that share each batch; by default one for each GPU of one kind, or one on the CPU",
    )
    checkpoint_seconds: float = Field(20.0, ge=0, description="seconds between checkpoints; no effect on the result")

    @field_validator("method")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in METHODS or is_reference(value):
            return value
        near = difflib.get_close_matches(value, METHODS, n=1)
        raise ValueError(
            f"there is no method {value!r}{f'; did you mean {near[0]}?' if near else ''}; "
            f"use {', '.join(METHODS)}, module:function or file.py:function"
        )


class BatchLimits(BaseModel, frozen=True):
    """Limit how far batches are made smaller where time is short."""

    steps: int = 100
    """Those that are enough: batches are halved while there is no time for so many."""
    least: int = 8
    """The smallest batch that is made for that."""


FILE = "recovery.json"
"""Record beside the recovered model: plan, curve and ending. The same steps give the same record."""

Ending = Literal["planned", "patience", "diverged", "time", "hopeless"]


class Target(BaseModel, frozen=True):
    """One output, or one value inside of both models, that the student is to have as the teacher has it."""

    name: str
    kind: Literal["classes", "probabilities", "values", "maps"]
    """Logits or probabilities of classes; numbers; where in an image there is much, over channels that may differ."""
    scale: float = 1.0
    """Mean square of the teacher's deviation from its mean, which errors of ``values`` are divided by."""
    axis: int | None = None
    """Axis of unlike numbers, pixels beside probabilities for instance, with a scale for each."""
    scales: tuple[float, ...] = ()


class Shortened(BaseModel, frozen=True):
    """A cut of a schedule to end in time: the rest of it goes by in fewer steps."""

    step: int
    """From this one on."""
    position: float
    """Progress of the schedule by then, in steps as they were planned."""
    planned: int
    """Steps that there were to be at first."""


class Augmentation(BaseModel, frozen=True):
    """Changes of images that make other samples of them; the model that is learnt from answers those as well."""

    inputs: tuple[str, ...]
    """Inputs that are images: [samples, channels, height, width]."""
    mirror: bool
    """Left and right may be exchanged: the answers stay the same."""
    mix: bool
    """Two samples may be mixed: there is no other input, whose numbers may be no amounts."""


class TrainingPlan(BaseModel, frozen=True):
    """Everything that decides what the steps do; it is kept, as some of it was found out by the clock.

    It changes where memory runs out or time does, and a checkpoint is written whenever it has.
    """

    steps: int
    shortened: Shortened | None = None
    seconds: float = 0.0
    """Time that it was planned for; 0 in records of before this was kept."""
    batch: int
    micro_batch: int
    """Samples that are worked through at once, in each process."""
    evaluate_every: int
    judged: int
    """Samples that each evaluation looks at, of those that were held back."""
    judged_at_once: int | None = None
    """Samples of these that are worked through at once; as many as in a step if None."""
    statistics: int
    """Samples that batch norms' statistics are found from, before each evaluation."""
    processes: int
    threads: int
    least_part: int = 1
    """Below it no part can be: 1, or the batch that the model is fixed to."""
    checkpointed: bool = False
    """True where activations are computed again for the gradients instead of kept."""
    autocast: bool = False
    frozen_norms: bool = False
    """True where batch norms keep their statistics while training, as parts of a batch are too small to have some."""
    learning_rate: float = 2e-3
    """The highest."""
    augmentation: Augmentation | None = None
    outputs: tuple[Target, ...] = ()
    features: tuple[Target, ...] = ()

    @property
    def planned(self) -> int:
        """Steps that there were to be at first."""
        return self.steps if self.shortened is None else self.shortened.planned

    def position(self, step: int) -> float:
        """Find the progress of the schedule by a step, in steps as they were planned."""
        if (turn := self.shortened) is None:
            return step
        return turn.position + (step - turn.step) * (turn.planned - turn.position) / (self.steps - turn.step)

    def shorten(self, step: int, steps: int) -> "TrainingPlan":
        """Plan fewer steps in all: from ``step`` on the schedule goes faster, without a jump in the rate."""
        turn = Shortened(step=step, position=self.position(step), planned=self.planned)
        return self.model_copy(update={"steps": steps, "shortened": turn})


class Point(BaseModel, frozen=True):
    """One evaluation: of the averaged weights, on the samples that were held back."""

    step: int
    loss: float | None
    """Mean over the steps since the last point; None before the first step."""
    metric: float
    held_back_loss: float | None
    """None where it was NaN or infinite."""
    learning_rate: float


Subject = Literal["pruned", "sparse", "int8"]
"""The kind of model that is trained: a pruned module, a graph with zeros, or a graph in int8."""


class Recovery(BaseModel, frozen=True):
    """The record of a recovery, kept as :data:`FILE`."""

    subject: Subject = "pruned"
    method: str
    metric: str
    """More is better, but for ``mse`` and ``loss``, which is that of the labels."""
    teacher: float
    """The metric of the model that it learns from, on the samples that were held back."""
    before: float
    after: float
    best_step: int
    """The step whose weights were kept; 0 means that none was better than those that it began with."""
    steps: int
    ending: Ending
    reason: str
    samples: int
    held_back: int
    """Samples that the metric was taken on."""
    data: str
    plan: TrainingPlan
    curve: tuple[Point, ...]

    @property
    def unchanged(self) -> str:
        """Say that training made nothing better, with the best that it came to; empty where it did."""
        if self.best_step:
            return ""
        trained = [point.metric for point in self.curve[1:]]
        pick = min if self.metric in _LESS_IS_BETTER else max
        best = f" ({self.metric} at best {format_metric(pick(trained))})" if trained else ""
        return f"training made it no better{best}: the weights are those from before"

    @property
    def outcome(self) -> str:
        """Say what came of it, and why it ended."""
        return "; ".join(filter(None, (self.unchanged, self.reason)))


def read(folder: Path) -> Recovery:
    """Return the record of a recovered model, from the folder of its artifact."""
    return Recovery.model_validate_json((folder / FILE).read_bytes())
