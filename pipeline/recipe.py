"""What the user asks for, as one document; every default of the project stands here."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator

from enginesmith.calibration.options import AS_FOUND, DataOptions
from enginesmith.models import MODELS
from enginesmith.pipeline.engines import ENGINES, engine_class
from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.engines.cuda import cuda_device
from enginesmith.pipeline.engines.trt.options import BuildOptions, RunOptions
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.measure.quality import METRICS
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
from enginesmith.pipeline.source import resolve
from enginesmith.pipeline.sparsity.options import SparsifyOptions, Sparsity
from enginesmith.pipeline.tensors import ShapeRange, TensorSpec
from enginesmith.pipeline.units import parse_bytes, parse_seconds


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
    prune_sensitivity: bool = Field(
        False, description="prune every group of layers alone at a few ratios, and show what that costs"
    )
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


_MOST_BYTES = 1 << 50
_LARGEST_SWEPT = 1 << 16


def _within_shape(values: dict[str, Any]) -> dict[str, Any]:
    """Where a range of batches is given and no batches are, those of the default that are in it, else its usual one."""
    shapes = values.get("shapes")
    given = shapes.get("batch") if isinstance(shapes, dict) else None
    if "batch" in values or not isinstance(given, str):
        return values
    range_, default = ShapeRange.parse(given), Recipe.model_fields["batch"].default
    return {**values, "batch": [one for one in default if range_.min <= one <= range_.max] or [range_.opt]}


def _limit(text: str) -> int:
    found = parse_bytes(text)
    if found > _MOST_BYTES:
        raise UsageError(f"a workspace of {text!r} is more than any device has", "give max for no limit")
    if found < 1:
        raise UsageError(f"a workspace of {text!r} holds nothing", "give at least 1 byte, or max")
    return found


_YAML_WORDS = {"Value": "", "tuple": "list", "dicti": "mapping"}
_IN_PYTHON_WORDS = re.compile(r"^Value error, |tuple|dictionary or instance of \w+|dictionary")
"""What pydantic says of Python, in the words of a recipe."""


def make(values: dict[str, Any]) -> Recipe:
    """A recipe from plain values, sizes and durations as text included.

    Raises:
        UsageError: a key or a value that does not belong there.
    """
    try:
        recipe = Recipe.model_validate(_within_shape(_read_units(values)))
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            raise _unknown(Recipe, first["loc"]) from error
        named = (str(part) for part in first["loc"])
        place = ".".join(part for part in named if part.isalnum() or part.isidentifier()) or "the recipe"
        message = _IN_PYTHON_WORDS.sub(lambda found: _YAML_WORDS[found[0][:5]], first["msg"])
        raise UsageError(f"{place}: {message} (given: {first['input']!r})", "see docs/recipe.md") from error
    _ = recipe.specs, recipe.ranges, recipe.where, recipe.workspace_limits  # each raises its own message
    _check_smaller(recipe)
    _check_metric(recipe)
    _check_tensorrt(recipe)
    _check_run(recipe)
    _check_calibration(recipe)
    return recipe


def _unknown(part: type[BaseModel], place: Sequence[str | int]) -> UsageError:
    """The message for a field that there is not."""
    *above, name = (str(one) for one in place)
    for step in above:
        inner = part.model_fields[step].annotation
        assert isinstance(inner, type)
        part = inner
    near = difflib.get_close_matches(name, part.model_fields, n=1)
    return UsageError(
        f"the recipe has no field {name!r}"
        + (f" in {'.'.join(above)}" if above else "")
        + (f"; did you mean {near[0]}?" if near else ""),
        f"the fields are {', '.join(part.model_fields)}",
    )


def _check_tensorrt(recipe: Recipe) -> None:
    """Targets, limits and build options are for TensorRT engines, and have no effect on others."""
    if recipe.tensorrt_run.weight_streaming_budget is not None and not recipe.tensorrt.weight_streaming:
        raise UsageError("--weight-streaming-budget needs an engine that streams weights", "add --weight-streaming")
    if any(name.startswith("tensorrt") for name in recipe.engines):
        return
    given = [option for option, value in (("--target", recipe.targets), ("--workspace", recipe.workspace)) if value]
    given += [f"--{name.replace('_', '-')}" for name in recipe.tensorrt.asked]
    if given:
        raise UsageError(
            f"{given[0]} has no effect on {', '.join(recipe.engines)}", "add --engine tensorrt_rtx, or leave it away"
        )


def _check_run(recipe: Recipe) -> None:
    """Options of an engine that is not asked for have no effect."""
    for part, engines in ((recipe.eager, ("eager", "compiled")), (recipe.onnxruntime, ("onnxruntime",))):
        given = [name for name, value in part if value]
        if given and not set(engines) & set(recipe.engines):
            where = f"{engines[0]}.{given[0]}"
            raise UsageError(
                f"{where} has no effect on {', '.join(recipe.engines)}", f"add --engine {engines[0]}, or leave it away"
            )


def _check_calibration(recipe: Recipe) -> None:
    """Ranges come from real data, or from made-up data that was asked for."""
    needing = [name for name in recipe.precisions if KINDS[name].calibrated]
    if needing and not recipe.calibration_data and not recipe.synthetic_calibration:
        raise UsageError(
            f"{needing[0]} needs calibration data, and there is none",
            "give some samples with --calibration DATA; --synthetic-calibration makes some up, which is good for "
            "measuring speed and memory, and not for accuracy",
        )


def _check_smaller(recipe: Recipe) -> None:
    """What is pruned has to be a module, and what is learnt needs data."""
    for option, ids in (
        ("--prune", [target.slug for target in recipe.prune_targets]),
        ("--sparsity", [pattern.slug for pattern in recipe.sparsities]),
    ):  # each raises its own message
        if twice := next((one for one in ids if ids.count(one) > 1), None):
            raise UsageError(f"{option} is given twice as {twice}", "give each one once")
    for what, part, empty, missing in (
        ("pruning", recipe.pruning, not (recipe.prune or recipe.prune_sensitivity), "--prune macs=0.5"),
        ("recovery", recipe.recovery, not recipe.recover, "--recover distil"),
        ("sparsifying", recipe.sparsifying, not recipe.sparsity, "--sparsity 2:4"),
    ):
        given = [name for name in type(part).model_fields if getattr(part, name) != getattr(type(part)(), name)]
        if given and empty:
            raise UsageError(f"{what}.{given[0]} has no effect here", f"add {missing}, or leave it away")
    if recipe.prune and not resolve(recipe.model).is_torch:
        raise UsageError(
            f"{recipe.model} is a graph, and channels are pruned in a module",
            "give the model as file.py:factory; --sparsity 2:4 works on graphs",
        )
    if recipe.recover and not recipe.prune:
        raise UsageError("--recover trains back what was pruned, and nothing is", "add --prune macs=0.5")
    needing = [
        what
        for what, asked in (
            ("recovery", recipe.recover),
            ("importance by taylor", recipe.pruning.importance == "taylor"),
        )
        if asked and recipe.prune
    ]
    if needing and recipe.calibration_data is None:
        raise UsageError(
            f"{needing[0]} needs data, and there is none",
            "give some samples with --calibration DATA; distilling needs no labels",
        )


def _check_metric(recipe: Recipe) -> None:
    """What was asked for, by name or by a budget on it, has to be there and needs data."""
    metric = recipe.metric
    if metric and ":" not in metric and metric not in METRICS:
        raise UsageError(
            f"there is no metric {metric!r}", f"use {', '.join(METRICS)}, module:function or file.py:function"
        )
    if recipe.data is None and (metric or recipe.budgets.max_drop is not None):
        asked = f"the metric {metric}" if metric else "the budget max_drop"
        raise UsageError(f"{asked} needs labelled data, and there is none", "give some with --eval DATA")


def read(path: Path) -> dict[str, Any]:
    """The values of a recipe file, not yet checked.

    Raises:
        UsageError: no such file, or not a YAML mapping.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read the recipe {path}: {error.strerror}", "check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"{error.problem} in line {error.problem_mark.line + 1}"
        raise UsageError(f"the recipe {path} is not YAML: {reason}", "start from `enginesmith init MODEL`") from error
    if not isinstance(values, dict):
        raise UsageError(f"the recipe {path} is no mapping of names to values", "start from `enginesmith init MODEL`")
    return values


def commented(recipe: Recipe) -> str:
    """The recipe as YAML, every field with what it means."""
    return "\n".join(_lines(recipe, "")) + "\n"


def _lines(part: BaseModel, indent: str) -> list[str]:
    lines = []
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            about = (type(value).__doc__ or "").partition("\n")[0]
            lines += [f"{indent}# {about}", f"{indent}{name}:", *_lines(value, indent + "  ")]
        else:
            plain = part.model_dump(mode="json")[name]
            text = yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()
            lines += [f"{indent}# {field.description}", f"{indent}{name}: {text}"]
    return lines


_UNITS = {
    ("budgets", "max_memory_bytes"): parse_bytes,
    ("budgets", "max_latency_ms"): lambda text: parse_seconds(text) * 1e3,
    ("measure", "seconds"): parse_seconds,
    ("measure", "memory_limit_bytes"): parse_bytes,
    ("quantisation", "search_limit_seconds"): parse_seconds,
    ("recovery", "seconds"): parse_seconds,
    ("recovery", "memory_bytes"): parse_bytes,
    ("export", "external_data_bytes"): parse_bytes,
    ("tensorrt", "tactic_dram"): parse_bytes,
    ("tensorrt", "tactic_shared_memory"): parse_bytes,
    ("tensorrt_run", "weight_streaming_budget"): parse_bytes,
}


def _read_units(values: dict[str, Any]) -> dict[str, Any]:
    read = dict(values)
    for (part, name), parse in _UNITS.items():
        inner = read.get(part)
        if isinstance(inner, dict) and isinstance(inner.get(name), str):
            read[part] = {**inner, name: parse(inner[name])}
    return read
