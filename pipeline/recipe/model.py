"""What the user asks for, as one document; every default of the project stands here."""

from typing import Any, Literal

from pydantic import Field, field_validator

from enginesmith.calibration.options import AS_FOUND, DataOptions
from enginesmith.models import MODELS
from enginesmith.pipeline.engines import ENGINES, engine_class
from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.engines.cuda import cuda_device
from enginesmith.pipeline.engines.trt.options import BuildOptions, RunOptions
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.options import (
    Budgets,
    ExportOptions,
    GraphOptimization,
    MeasureOptions,
    ModuleOptions,
    Objective,
    OnnxRuntimeOptions,
    Part,
    QuantisationOptions,
)
from enginesmith.pipeline.precision.kinds import KINDS, Name
from enginesmith.pipeline.pruning.options import PruneOptions
from enginesmith.pipeline.pruning.target import Target
from enginesmith.pipeline.recovery.options import RecoverOptions
from enginesmith.pipeline.sparsity.options import SparsifyOptions, Sparsity
from enginesmith.pipeline.tensors import ShapeRange, TensorSpec
from enginesmith.pipeline.units import parse_bytes

_MOST_BYTES = 1 << 50


_LARGEST_SWEPT = 1 << 16


class Recipe(Part):
    """The whole of what ``optimize`` is asked to do."""

    model: str = Field(description="zoo name, file.py:factory, package.module:factory, .onnx, .pt2, hf:…, timm:…")
    inputs: tuple[str, ...] = Field((), description="name:dtype:batch,3,224,224 for each input; words are dynamic")
    shapes: dict[str, str] = Field({}, description="min:opt:max for each dynamic dimension")
    engines: tuple[str, ...] = Field(("onnxruntime",), min_length=1, description="what the model is made into")
    precisions: tuple[Name, ...] = Field(
        ("fp32",), min_length=1, description=f"each one is a variant of each engine: {', '.join(KINDS)}"
    )
    graph_optimization: tuple[GraphOptimization, ...] = Field(
        ("all",), min_length=1, description="ONNX Runtime's optimisation levels; each one is a variant"
    )
    batch: tuple[int, ...] = Field((1, 8), min_length=1, description="batch sizes that are measured")
    device: str | None = Field(
        None, description="cpu, cuda or cuda:1; without it cuda where an engine needs it and there is one, else cpu"
    )
    threads: int = Field(0, ge=0, description="CPU threads of a session; 0 means one a core")
    targets: tuple[str, ...] = Field(
        (), description="what TensorRT-RTX builds for: sm86, portable, …; the device that is here without it"
    )
    workspace: tuple[str, ...] = Field(
        (), description="TensorRT's limits for intermediate buffers, each a variant: 64MiB, max; or sweep"
    )
    tensorrt: BuildOptions = BuildOptions()
    tensorrt_run: RunOptions = RunOptions()
    eager: ModuleOptions = ModuleOptions()
    onnxruntime: OnnxRuntimeOptions = OnnxRuntimeOptions()
    simplify: bool = Field(True, description="clean the exported graph")
    export: ExportOptions = ExportOptions()
    calibration: str | None = Field(
        None, description="data that ranges are taken from: an embedded set, .npz, .npy, .safetensors, images, texts …"
    )
    samples: int = Field(128, gt=0, description="how many samples of it are used")
    synthetic_calibration: bool = Field(
        False, description="take ranges from made-up data where there is none: speed is right then, accuracy is not"
    )
    data_options: DataOptions = AS_FOUND
    quantisation: QuantisationOptions = QuantisationOptions()
    prune: tuple[str, ...] = Field(
        (), description="how far to prune, each one more variant: 0.3 of the channels, or what is left: macs=0.5 …"
    )
    pruning: PruneOptions = PruneOptions()
    recover: bool = Field(False, description="train what was pruned back, with the calibration data")
    recovery: RecoverOptions = RecoverOptions()
    sparsity: tuple[str, ...] = Field(
        (), description="zeros in the weights, each one more variant: 2:4, or unstructured=0.5"
    )
    sparsifying: SparsifyOptions = SparsifyOptions()
    eval_data: str | None = Field(None, description="labelled data: an embedded set, .npz, .npy, .safetensors …")
    metric: str | None = Field(
        None, description="top1, top5, mse, or module:function; top1 without it, where the data has labels"
    )
    eval_samples: int | None = Field(None, gt=0, description="how many samples of it are used; all without it")
    measure: MeasureOptions = MeasureOptions()
    budgets: Budgets = Budgets()
    objective: Objective = Field("latency", description="what the winner is best at, among those within the budgets")
    min_sqnr_db: float | None = Field(None, description="fidelity threshold, instead of the one for the precision")
    seed: int = Field(0, ge=0, description="seed of random weights, samples and the order of rounds")
    allow_pickle: bool = Field(False, description="let the model's own code read pickles, which can run any code")

    @field_validator("engines")
    @classmethod
    def _known_engines(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in ENGINES:
                raise ValueError(f"there is no engine {name!r}; the engines are {', '.join(ENGINES)}")
        return tuple(dict.fromkeys(value))

    @field_validator("batch")
    @classmethod
    def _positive_batches(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 1:
            raise ValueError(f"a batch size is at least 1, and {min(value)} was given")
        return tuple(dict.fromkeys(value))

    @property
    def workspace_limits(self) -> tuple[int | Literal["sweep"] | None, ...]:
        """The limits, read: bytes, None for the builder's default, or a sweep.

        Raises:
            UsageError: one is no size.
        """
        words: dict[str, int | Literal["sweep"] | None] = {"max": None, "sweep": "sweep"}
        return tuple(words[text] if text in words else _limit(text) for text in self.workspace)

    @field_validator("prune", "sparsity", mode="before")
    @classmethod
    def _numbers_too(cls, value: Any) -> Any:
        """``0.3`` in a recipe is a number, and as good a target."""
        parts = value if isinstance(value, (list, tuple)) else [value]
        return [str(part) if isinstance(part, float) else part for part in parts]

    @field_validator("targets", "workspace", "precisions", "prune", "sparsity")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value))

    @property
    def prune_targets(self) -> tuple[Target, ...]:
        """How far to prune, read.

        Raises:
            UsageError: one is no target.
        """
        return tuple(Target.parse(text) for text in self.prune)

    @property
    def sparsities(self) -> tuple[Sparsity, ...]:
        """The patterns of zeros, read.

        Raises:
            UsageError: one is no pattern.
        """
        return tuple(Sparsity.parse(text, self.sparsifying) for text in self.sparsity)

    @property
    def data(self) -> str | None:
        """The evaluation data: what was named, else what comes with the zoo's model."""
        entry = MODELS.get(self.model.partition("(")[0])
        return self.eval_data or (entry.data if entry else None)

    @property
    def calibration_data(self) -> str | None:
        """The calibration data: what was named, else what comes with the zoo's model."""
        entry = MODELS.get(self.model.partition("(")[0])
        return self.calibration or (entry.data if entry else None)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The inputs, read.

        Raises:
            UsageError: one cannot be read, or two have the same name.
        """
        specs = tuple(TensorSpec.parse(text) for text in self.inputs)
        names = [spec.name for spec in specs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"the input {twice!r} is given twice", "give each input once, all its dimensions together")
        return specs

    @property
    def largest_batch(self) -> int:
        """The last batch size that a sweep looks at."""
        asked = self.ranges.get("batch")
        return asked.max if asked else _LARGEST_SWEPT

    @property
    def ranges(self) -> dict[str, ShapeRange]:
        """The shape ranges, read."""
        return {name: ShapeRange.parse(text) for name, text in self.shapes.items()}

    @property
    def where(self) -> Device:
        """The device, read; where none was named, cuda if an engine runs only there and this machine has it.

        Raises:
            UsageError: it is neither cpu nor cuda.
        """
        if self.device is None:
            on_cuda = any(engine_class(name).kinds == ("cuda",) for name in self.engines)
            return Device(kind="cuda" if on_cuda and cuda_device(0) else "cpu", threads=self.threads)
        kind, _, index = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
            raise UsageError(f"there is no device {self.device!r}", "use cpu, cuda or cuda:1")
        return Device(kind=kind, index=int(index or 0), threads=self.threads)


def _limit(text: str) -> int:
    found = parse_bytes(text)
    if found > _MOST_BYTES:
        raise UsageError(f"a workspace of {text!r} is more than any device has", "give max for no limit")
    if found < 1:
        raise UsageError(f"a workspace of {text!r} holds nothing", "give at least 1 byte, or max")
    return found
