"""Declare the parts of a recipe, with their defaults."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from enginesmith.calibration.ranges import Method
from enginesmith.pipeline.engines import ENGINES
from enginesmith.pipeline.passes.quantize.precisions import Quantizer
from enginesmith.pipeline.units import COMMA_LIST, SIZE, Bytes, Heading, Milliseconds, Option, Seconds

_DATA: Heading = "Data and accuracy"
_MEASURING: Heading = "Measuring"
_EXPORT = Option("Variants")
_BUDGET = Option("Budgets", everyday=True)
_QUANTIZING = Option(_DATA)

Objective = Literal["latency", "throughput", "memory", "size"]


class Part(BaseModel, frozen=True, extra="forbid"):
    """A mapping of fields that are all known."""


class ExportOptions(Part):
    """Options of the export to ONNX."""

    opset: Annotated[int, _EXPORT] = Field(23, ge=18, description="ONNX opset version of the graph")
    exporter: Annotated[Literal["auto", "dynamo", "torchscript"], _EXPORT] = Field(
        "auto", description="exporter: auto tries torch.export first, then TorchScript"
    )
    attention: Annotated[Literal["fused", "decomposed"], _EXPORT] = Field(
        "fused", description="attention: fused keeps opset 23's operator; decomposed is for engines that refuse it"
    )
    external_data_bytes: Annotated[Annotated[int, Field(ge=0), SIZE], Option("Variants", "--external-data")] = Field(
        128 << 20, description="weights above this size go to a file beside the graph"
    )


class MeasureOptions(Part):
    """Options of measuring; docs/measurement.md explains the numbers."""

    precision: Annotated[float, Option(_MEASURING, "--precision-target", metavar="SHARE")] = Field(
        0.02, gt=0, lt=1, description="stop measuring when the interval of every median is within ± this share"
    )
    seconds: Annotated[Seconds, Option(_MEASURING, "--measure-time", everyday=True)] = Field(
        20.0, description="longest time for one batch size, over all variants together"
    )
    latency: bool = Field(True, description="measure latency")
    memory: Annotated[bool, Option(_MEASURING, "--no-memory")] = Field(True, description="measure peak memory")
    limits: Annotated[bool, Option(_MEASURING, "--limits/--no-limits")] = Field(
        False, description="measure what the machine can do at best, and compare every variant with it"
    )
    references: Annotated[bool | None, Option(_MEASURING, "--references/--no-references")] = Field(
        None, description="measure PyTorch in half precision and compiled, to compare with; by default on CUDA"
    )
    profile: Annotated[bool, Option(_MEASURING, everyday=True)] = Field(
        False, description="time every operator, and name its module"
    )
    concurrency: Annotated[
        tuple[Annotated[int, Field(ge=1, le=256)], ...], COMMA_LIST, Option(_MEASURING, metavar="N,N")
    ] = Field((), description="numbers of callers at once to measure throughput with")
    sweep: bool = Field(False, description="measure ever larger batch sizes until one does not fit")
    memory_limit_bytes: Annotated[Bytes | None, Option(_MEASURING, "--memory-limit")] = Field(
        None, description="memory that a measured session may use; a batch that needs more is out of memory"
    )


class Budgets(Part):
    """Limits that a variant has to meet to win."""

    max_drop: Annotated[float | None, _BUDGET] = Field(
        None, ge=0, allow_inf_nan=False, description="largest loss of the metric, in its unit"
    )
    max_memory_bytes: Annotated[Bytes | None, Option("Budgets", "--max-memory", everyday=True)] = Field(
        None, description="largest peak memory"
    )
    max_latency_ms: Annotated[Milliseconds | None, Option("Budgets", "--max-latency", everyday=True)] = Field(
        None, description="largest median latency (first batch size)"
    )
    max_p99_ms: Annotated[Milliseconds | None, Option("Budgets", "--max-p99", everyday=True)] = Field(
        None, description="largest p99 latency (first batch size)"
    )
    min_throughput_per_s: Annotated[float | None, Option("Budgets", "--min-throughput", everyday=True, metavar="N")] = (
        Field(
            None,
            gt=0,
            allow_inf_nan=False,
            description="smallest throughput in samples a second, at the best batch size",
        )
    )
    max_size_bytes: Annotated[Bytes | None, Option("Budgets", "--max-size", everyday=True)] = Field(
        None, description="largest size of the engine's files together"
    )
    max_build_seconds: Annotated[Seconds | None, Option("Budgets", "--max-build-time")] = Field(
        None, description="longest time that building the engine takes"
    )


class QuantizationOptions(Part):
    """Options of ranges and quantized graphs; docs/precision.md explains them."""

    ranges: Annotated[Literal["auto", Method], _QUANTIZING] = Field(
        "auto", description="method that takes ranges from histograms; auto tries mse first, then the others"
    )
    quantizers: Annotated[tuple[Quantizer, ...], Option(_DATA, "--quantizer", metavar="own|nncf|qat")] = Field(
        ("own",),
        min_length=1,
        description="makers of int8 graphs, each a variant: own; nncf (NNCF's post-training quantization, for CPUs); "
        "qat (own rules, everything in int8, and training)",
    )
    placement: Annotated[str, Option(_DATA, metavar="auto|ENGINE")] = Field(
        "auto",
        description="engine whose rules place Q/DQ pairs; auto: the variant's. TensorRT's rules suit all engines",
    )
    percentile: Annotated[float, _QUANTIZING] = Field(
        99.99, gt=50, le=100, description="percentage of the values inside the range, for the method percentile"
    )
    weight_bits: Annotated[Literal[7, 8] | None, _QUANTIZING] = Field(
        None,
        description="bits of int8 weights; by default 8, or 7 for ONNX Runtime on CPUs without VNNI, which saturate",
    )
    keep: Annotated[tuple[str, ...], Option(_DATA, metavar="NAME")] = Field(
        (), description="nodes or modules to keep in float (with fp16 and bf16: in float32); may contain *"
    )
    smooth: Annotated[
        Annotated[float, Field(ge=0, le=1)] | Literal["auto"] | None, Option(_DATA, metavar="ALPHA|auto")
    ] = Field(
        None,
        description="SmoothQuant's alpha, 0 to 1: share of the outliers that moves into weights; auto finds the best",
    )
    smooth_insert: Annotated[bool, _QUANTIZING] = Field(
        False,
        description="apply SmoothQuant also where no operator can absorb its factors, which costs a multiplication",
    )
    awq: Annotated[bool, _QUANTIZING] = Field(False, description="scale weights by their activations before int4 (AWQ)")
    shift: Annotated[bool, _QUANTIZING] = Field(
        False, description="shift channels that are far from zero and vary little, where biases can take the offsets"
    )
    equalize: Annotated[bool, _QUANTIZING] = Field(
        False, description="equalize the ranges of channels across layers, for depthwise networks"
    )
    bias_correction: Annotated[bool, _QUANTIZING] = Field(
        False, description="correct biases by the mean error that quantized weights cause"
    )
    search_steps: Annotated[int, _QUANTIZING] = Field(
        16, ge=1, le=64, description="largest number of trials to find the groups that stay in floating point"
    )

    @field_validator("placement")
    @classmethod
    def _known_placement(cls, value: str) -> str:
        known = ("auto", *ENGINES)
        if value not in known:
            raise ValueError(f"there are no rules of {value!r}; give one of {', '.join(known)}")
        return value
