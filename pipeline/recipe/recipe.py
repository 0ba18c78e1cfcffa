"""What the user asks for, as one document; every default of the project stands here."""

from typing import Any

from pydantic import Field, field_validator

from enginesmith.calibration.options import AS_FOUND, DataOptions
from enginesmith.models import MODELS
from enginesmith.pipeline.engines.options import EngineOptions
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.passes.finetune.options import RecoverOptions
from enginesmith.pipeline.passes.prune.options import PruneOptions, Target
from enginesmith.pipeline.passes.quantize.precisions import KINDS, Name
from enginesmith.pipeline.passes.sparsify.options import SparsifyOptions, Sparsity
from enginesmith.pipeline.recipe.options import (
    Budgets,
    ExportOptions,
    MeasureOptions,
    Objective,
    Part,
    QuantisationOptions,
)
from enginesmith.pipeline.tensors import ShapeRange, TensorSpec

_LARGEST_SWEPT = 1 << 16


class ModelOptions(Part):
    """What is optimised."""

    model: str = Field(description="zoo name, file.py:factory, package.module:factory, .onnx, .pt2, hf:…, timm:…")
    inputs: tuple[str, ...] = Field((), description="name:dtype:batch,3,224,224 for each input; words are dynamic")
    shapes: dict[str, str] = Field({}, description="min:opt:max for each dynamic dimension")


class Recipe(EngineOptions, ModelOptions):
    """The whole of what ``optimize`` is asked to do."""

    precisions: tuple[Name, ...] = Field(
        ("fp32",), min_length=1, description=f"each one is a variant of each engine: {', '.join(KINDS)}"
    )
    batch: tuple[int, ...] = Field((1, 8), min_length=1, description="batch sizes that are measured")
    simplify: bool = Field(True, description="clean the exported graph")
    passes: tuple[str, ...] = Field((), description="more passes on that graph, in their order: names of plug-ins")
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
        (),
        description="what pruning removes, each one more variant: 30% of the channels, macs=-50%, latency=-40%",
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

    @field_validator("batch")
    @classmethod
    def _positive_batches(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 1:
            raise ValueError(f"a batch size is at least 1, and {min(value)} was given")
        return tuple(dict.fromkeys(value))

    @field_validator("prune", "sparsity", mode="before")
    @classmethod
    def _numbers_too(cls, value: Any) -> Any:
        """``0.3`` in a recipe is a number, and as good a target."""
        parts = value if isinstance(value, (list, tuple)) else [value]
        return [str(part) if isinstance(part, float) else part for part in parts]

    @field_validator("precisions", "prune", "sparsity")
    @classmethod
    def _once_each(cls, value: tuple[str, ...]) -> tuple[str, ...]:
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
