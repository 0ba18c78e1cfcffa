"""Declare the recipe: all that a user can ask for, with every default."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from enginesmith.calibration.options import AS_FOUND, DataOptions, PartName, PartOptions
from enginesmith.models import MODELS
from enginesmith.pipeline.engines import needs_cuda
from enginesmith.pipeline.engines.options import EngineOptions
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.frameworks.processing import ProcessingRequest
from enginesmith.pipeline.measure.quality import DEFAULT_METRIC
from enginesmith.pipeline.passes.finetune.options import RecoverOptions
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.passes.quantize.precisions import KINDS, Name
from enginesmith.pipeline.passes.sparsify.options import SparsifyOptions, Sparsity
from enginesmith.pipeline.recipe.options import (
    Budgets,
    ExportOptions,
    MeasureOptions,
    Objective,
    Part,
    QuantizationOptions,
)
from enginesmith.pipeline.tensors import ShapeRange, TensorSpec, list_unbound, list_words, to_word
from enginesmith.pipeline.units import UNIQUE, AddedOption, Heading, Option, Seconds, SecondsOrNone

_INPUTS: Heading = "Model and inputs"
_DATA: Heading = "Data and accuracy"

LISTS = ("engines", "precisions", "prune", "sparsity", "graph_optimization", "workspace")
"""Fields that list variants by hand: with one of them, no other variants are looked for."""
LEAST_SECONDS = 30.0
"""Time below which nothing can be found: the model is loaded, exported and measured in it, too."""
_LARGEST_SWEPT = 1 << 16


class ModelOptions(Part):
    """The model and its inputs."""

    model: str = Field(description="zoo model, file.py:factory, package.module:factory, .onnx, .pt2, hf:…, timm:…")
    inputs: Annotated[tuple[str, ...], Option(_INPUTS, "--input", everyday=True, metavar="NAME:DTYPE:DIMS")] = Field(
        (), description="an input, such as x:float32:batch,3,224,224"
    )
    prepend: Annotated[tuple[str, ...], Option(_INPUTS, metavar="WORD[=VALUE]")] = Field(
        (),
        description="computation before the model, as part of it: uint8, nhwc, resize[=HEIGHTxWIDTH], scale[=255], "
        "normalize[=imagenet|MEANS/STDS]; data and callers then give the raw input",
    )
    append: Annotated[tuple[str, ...], Option(_INPUTS, metavar="WORD[=VALUE]")] = Field(
        (),
        description="computation behind the model, as part of it: softmax, sigmoid, argmax, topk[=5] or "
        "nms[=iou:0.5,score:0.25,max:100]; softmax:OUTPUT where there are several outputs",
    )
    shapes: Annotated[dict[str, str], Option(_INPUTS, "--shape", everyday=True, metavar="DIM=MIN:OPT:MAX")] = Field(
        {}, description="range of each dynamic dimension: min:opt:max"
    )


class Recipe(EngineOptions, ModelOptions):
    """All that ``optimize`` is asked to do."""

    precisions: Annotated[
        tuple[Name, ...], UNIQUE, Option("Variants", "--precision", everyday=True, metavar="NAME")
    ] = Field(("fp32",), min_length=1, description=f"precision of the variants: {', '.join(KINDS)}")
    variants: Literal["listed", "found"] = Field(
        "listed", description="listed by hand; or found: engines and precisions that can pay on this machine"
    )
    time_seconds: Annotated[
        Annotated[Seconds, Field(ge=LEAST_SECONDS)] | None, Option("Variants", "--time", everyday=True)
    ] = Field(
        None, description="time to find the fastest variant, at least 30s; those that no time is left for are named"
    )
    simplify: Annotated[bool, Option("Variants", "--no-simplify")] = Field(True, description="clean the exported graph")
    passes: Annotated[tuple[str, ...], Option("Variants", "--pass", metavar="NAME")] = Field(
        (), description="passes of plug-ins to apply to the simplified graph, in this order"
    )
    export: ExportOptions = ExportOptions()
    data: Annotated[str | None, Option(_DATA, everyday=True, metavar="DATA")] = Field(
        None,
        description="samples, split into calibration, choice and judgement: an embedded set, .npz, images, texts …",
    )
    calibration: Annotated[str | None, Option(_DATA, everyday=True, metavar="DATA")] = Field(
        None, description="calibration data for ranges and recovery"
    )
    samples: Annotated[int, Option(_DATA)] = Field(128, gt=0, description="samples of the calibration data to use")
    synthetic_calibration: Annotated[bool, Option(_DATA)] = Field(
        False,
        description="calibrate on random data if there is no other; speed and memory are then right, accuracy is not",
    )
    data_options: DataOptions = AS_FOUND
    quantization: QuantizationOptions = QuantizationOptions()
    prune: Annotated[tuple[str, ...], UNIQUE, Option("Variants", everyday=True, metavar="TARGET")] = Field(
        (), description="what to prune: 30% of the channels, macs=-50%, params=-50% or latency=-40%"
    )
    pruning: PruneOptions = PruneOptions()
    recover: Annotated[bool, Option("Variants", everyday=True, metavar="METHOD")] = Field(
        False,
        description="train what is pruned, sparse or in int8 on the calibration data: distil, supervised or "
        "module:function",
    )
    recovery: RecoverOptions = RecoverOptions()
    sparsity: Annotated[tuple[str, ...], UNIQUE, Option("Variants", everyday=True, metavar="PATTERN")] = Field(
        (), description="weights to set to zero: 2:4, or unstructured=0.5"
    )
    sparsifying: SparsifyOptions = SparsifyOptions()
    eval_data: Annotated[str | None, Option(_DATA, "--eval", everyday=True, metavar="DATA")] = Field(
        None, description="labeled data to measure accuracy on"
    )
    metric: Annotated[str | None, Option(_DATA, everyday=True)] = Field(
        None,
        description="metric: top1, miou, map …, or file.py:f for f(outputs, labels), more is better; :OUTPUT picks one",
    )
    eval_samples: Annotated[int | None, Option(_DATA)] = Field(
        None, gt=0, description="number of samples of the labeled data to use; all by default"
    )
    measure: MeasureOptions = MeasureOptions()
    budgets: Budgets = Budgets()
    objective: Annotated[Objective, Option("Budgets", everyday=True)] = Field(
        "latency", description="what decides between variants within the budgets"
    )
    min_sqnr_db: Annotated[float | None, Option("Budgets", "--min-sqnr", metavar="DB")] = Field(
        None, allow_inf_nan=False, description="lowest fidelity in dB (SQNR), instead of the threshold of the precision"
    )
    prosecute_seconds: Annotated[SecondsOrNone | None, Option("Budgets", "--prosecute")] = Field(
        None,
        description="time for each variant to look for allowed inputs, beside the samples, on which it is wrong; one "
        "that is fails, and an option that mends it is added (`enginesmith prosecute` shows the proof); default 3s on "
        "the CPU; 0s: none",
    )
    seed: Annotated[int, Option(_INPUTS)] = Field(
        0, ge=0, description="seed of random weights, of the choice of samples, and of the order of measuring"
    )
    allow_pickle: Annotated[bool, Option(_INPUTS)] = Field(
        False, description="let the model's own code read pickles, which can run any code"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_shorthands(cls, values: Any) -> Any:
        """Read ``batch: sweep`` and ``recover: METHOD``, which stand for two fields each."""
        if not isinstance(values, dict):
            return values
        if values.get("batch") == "sweep":
            values = {**values, "batch": [1], "measure": {**(values.get("measure") or {}), "sweep": True}}
        if isinstance(method := values.get("recover"), str):
            values = {**values, "recover": True, "recovery": {**(values.get("recovery") or {}), "method": method}}
        return values

    @field_validator("batch")
    @classmethod
    def _positive_batches(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 1:
            raise ValueError(f"a batch size is at least 1, and {min(value)} was given")
        return tuple(dict.fromkeys(value))

    @field_validator("prune", "sparsity", mode="before")
    @classmethod
    def _numbers_too(cls, value: Any) -> Any:
        """Accept numbers: ``0.3`` in YAML is no text."""
        parts = value if isinstance(value, (list, tuple)) else [value]
        return [str(part) if isinstance(part, float) else part for part in parts]

    def for_other_machines(self) -> Self:
        """Name the CPU as the device where only the GPU of this machine made it cuda: other machines may have none."""
        found_here = self.device is None and not any(map(needs_cuda, self.engines)) and self.where.kind == "cuda"
        return self.model_copy(update={"device": "cpu"}) if found_here else self

    def with_option(self, option: AddedOption) -> Self:
        """Copy the recipe with the option's value at the end of its list, unless it is there, or instead of another."""
        if option.instead_of is not None:
            return self._change(option.field, lambda _: option.value)
        return self._change(option.field, lambda values: (*dict.fromkeys((*values, option.value)),))

    def without_option(self, option: AddedOption) -> Self:
        """Copy the recipe without the option's value in its list, or with the one that it replaced."""
        if option.instead_of is not None:
            return self._change(option.field, lambda _: option.instead_of)
        return self._change(option.field, lambda values: (*(each for each in values if each != option.value),))

    def _change(self, field: str, change: Callable[[Any], Any]) -> Self:
        part, _, name = field.rpartition(".")
        if not part:
            return self.model_copy(update={name: change(getattr(self, name))})
        inner = getattr(self, part)
        return self.model_copy(update={part: inner.model_copy(update={name: change(getattr(inner, name))})})

    @property
    def races(self) -> bool:
        """True if variants are measured briefly first, and only the fastest in full.

        Briefly, only speed is measured: where something else decides, all are measured in full.
        """
        by_speed = self.objective in ("latency", "throughput") and self.measure.latency and not self.measure.sweep
        return by_speed and (self.variants == "found" or self.time_seconds is not None)

    @property
    def speed_decides(self) -> bool:
        """True if the fastest variant wins that is accurate enough: with one caller, at the batch size of a race."""
        budgets, largest = self.budgets, self.objective == "throughput"
        elsewhere = budgets.max_latency_ms or budgets.max_p99_ms if largest else budgets.min_throughput_per_s
        space = budgets.max_memory_bytes is not None or budgets.max_size_bytes is not None
        return not (space or elsewhere or set(self.measure.concurrency) - {1})

    @property
    def trains(self) -> bool:
        """True if graphs are trained that are sparse or in int8; where something is pruned, that alone is."""
        return self.recover and (not self.prune or "qat" in self.quantization.quantizers)

    @property
    def prune_targets(self) -> tuple[PruneTarget, ...]:
        """The targets of pruning, read.

        Raises:
            UsageError: one is no target.
        """
        return tuple(PruneTarget.parse(text) for text in self.prune)

    @property
    def sparsities(self) -> tuple[Sparsity, ...]:
        """The patterns of zeros, read.

        Raises:
            UsageError: one is no pattern.
        """
        return tuple(Sparsity.parse(text, self.sparsifying) for text in self.sparsity)

    @property
    def evaluation_data(self) -> str | None:
        """The data that the reported accuracy is measured on."""
        return self.eval_data or self.choice_data

    @property
    def searches_lowered(self) -> bool:
        """Tell whether what stays in float32 in a narrow float is searched for: for a metric alone."""
        return self.budgets.max_drop is not None and self.evaluation_data is not None

    @property
    def choice_data(self) -> str | None:
        """The data that searches judge their trials on: of ``data`` other samples than those of the evaluation."""
        return self.data or self.eval_data or self._zoo_data

    @property
    def required_metric(self) -> str | None:
        """The metric that has to be computed: what was named, else the default where a budget limits its drop."""
        return self.metric or (DEFAULT_METRIC if self.budgets.max_drop is not None else None)

    @property
    def calibration_data(self) -> str | None:
        """The calibration data."""
        return self.calibration or self.data or self._zoo_data

    @property
    def _zoo_data(self) -> str | None:
        """The data that comes with the zoo's model, which is no raw input."""
        entry = None if self.prepend else MODELS.get(self.model.partition("(")[0])
        return entry.data if entry else None

    def options_for(self, part: PartName) -> DataOptions:
        """Choose the options of reading the data of a part: of ``data``, only the part's own samples are read."""
        apart = {"calibration": self.calibration, "choice": None, "judgement": self.eval_data}
        if self.data is None or apart[part]:
            return self.reading_options
        return PartOptions(
            **dict(self.reading_options),
            part=part,
            shared_by=tuple(name for name, data in apart.items() if not data),
            calibration_samples=None if self.recover else self.samples,
        )

    @property
    def reading_options(self) -> DataOptions:
        """The options of reading data; what ``--prepend`` does with the values of images is not done before it, too."""
        before, options = self.processing.before, self.data_options
        raw: dict[str, Any] = {"rescale": 1.0} if "scale" in before else {}
        if before.keys() & {"scale", "normalize"}:  # means are those of values that are scaled already
            raw |= {"mean": (0.0,), "std": (1.0,)}
        return options.model_copy(update={name: raw[name] for name in raw if getattr(options, name) is None})

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The inputs, read.

        Raises:
            UsageError: one cannot be read, two have the same name, or a word stands in sums that do not tell its size.
        """
        specs = tuple(TensorSpec.parse(text) for text in self.inputs)
        names = [spec.name for spec in specs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(f"the input {twice!r} is given twice", "give each input once, all its dimensions together")
        if unbound := list_unbound(specs):
            dim = next(dim for spec in specs for dim in spec.shape if unbound[0] in list_words(dim))
            raise UsageError(
                f"no input tells the size of {unbound[0]!r}, which stands in {dim!r} alone",
                "write one word for the sum, or the word alone where an input has that dimension",
            )
        return specs

    @property
    def processing(self) -> ProcessingRequest:
        """Return the computation before and after the model.

        Raises:
            UsageError: a word cannot be read, or training is asked for behind outputs that were computed from others.
        """
        request = ProcessingRequest(prepend=self.prepend, append=self.append)
        request.check()
        if self.append and self.recover:
            raise UsageError(
                "--append does not go together with training (--recover, --recover-time, --quantizer qat), which needs "
                "the outputs of the model itself",
                "prune and train the model first, and optimize the result with --append",
            )
        return request

    def for_file(self) -> Self:
        """Describe no inputs and no computation around them, as for a file that has its own."""
        return self.model_copy(update={"inputs": (), "prepend": (), "append": ()})

    @property
    def batches_given(self) -> bool:
        """True if the batch sizes are others than the default ones."""
        return bool(self.batch != type(self).model_fields["batch"].default)

    @property
    def largest_batch(self) -> int:
        """The last batch size that a sweep looks at."""
        batch_range = self.ranges.get("batch")
        return batch_range.max if batch_range else _LARGEST_SWEPT

    @property
    def ranges(self) -> dict[str, ShapeRange]:
        """The shape ranges, read, by the dimensions' words.

        Raises:
            UsageError: one cannot be read, or is for a sum.
        """
        if summed := next((name for name in self.shapes if "+" in name), None):
            words = [part.strip() for part in summed.split("+") if not part.strip().isdecimal()]
            remedy = f"give ranges to its words: {' '.join(f'--shape {word}=MIN:OPT:MAX' for word in words)}"
            raise UsageError(f"{summed!r} is a sum, whose sizes follow from those of its words", remedy)
        return {to_word(name): ShapeRange.parse(text) for name, text in self.shapes.items()}
