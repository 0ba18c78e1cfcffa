"""The parts of a recipe, with their defaults."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from enginesmith.calibration.ranges import Method
from enginesmith.pipeline.engines import ENGINES

Objective = Literal["latency", "throughput", "memory", "size"]


class Part(BaseModel):
    """A mapping of fields that are all known."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ExportOptions(Part):
    """How the module becomes a graph."""

    opset: int = Field(23, ge=18, description="ONNX opset version of the graph")
    exporter: Literal["auto", "dynamo", "torchscript"] = Field(
        "auto", description="auto tries torch.export first, then TorchScript"
    )
    attention: Literal["fused", "decomposed"] = Field(
        "fused", description="fused keeps the Attention operator of opset 23; decomposed is for engines that refuse it"
    )
    external_data_bytes: int = Field(128 << 20, ge=0, description="weights above this go to a file beside the graph")


class MeasureOptions(Part):
    """How latency is measured; docs/measurement.md explains the numbers."""

    precision: float = Field(0.02, gt=0, lt=1, description="stop when every median is known to within ± this share")
    seconds: float = Field(20.0, gt=0, description="longest time for one batch size, over all variants together")
    latency: bool = Field(True, description="measure latency")
    memory: bool = Field(True, description="measure peak memory")
    limits: bool = Field(False, description="measure what the machine can do, and hold every variant against it")
    profile: bool = Field(False, description="time every operator, by the module that it comes from")
    concurrency: tuple[Annotated[int, Field(ge=1, le=256)], ...] = Field(
        (), description="numbers of callers at the same time that throughput is measured with"
    )
    sweep: bool = Field(False, description="go on to larger batch sizes until one does not fit")
    memory_limit_bytes: int | None = Field(
        None, gt=0, description="what a measured session may take; a batch that needs more is out of memory"
    )


class Budgets(Part):
    """What a variant has to hold to win."""

    max_drop: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="largest loss of the metric against eager"
    )
    max_memory_bytes: int | None = Field(None, gt=0, description="largest peak device memory")
    max_latency_ms: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="largest median latency at the first batch size"
    )
    max_p99_ms: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="largest 99th percentile of latency, there"
    )
    min_throughput_per_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="smallest throughput in samples a second, at the batch size that has the most",
    )
    max_size_bytes: int | None = Field(None, gt=0, description="largest size of the engine's files together")
    max_build_seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="longest time that building the engine takes"
    )


class QuantisationOptions(Part):
    """How ranges are chosen and graphs are quantised; docs/precision.md explains it."""

    ranges: Literal["auto", Method] = Field(
        "auto", description="how ranges are taken from histograms; auto tries mse first, and the others if that fails"
    )
    placement: str = Field(
        "auto", description="whose rules Q/DQ pairs are placed by; auto takes the engine's. TensorRT's run everywhere"
    )

    @field_validator("placement")
    @classmethod
    def _known_placement(cls, value: str) -> str:
        known = ("auto", *ENGINES)
        if value not in known:
            raise ValueError(f"there are no rules of {value!r}; give one of {', '.join(known)}")
        return value

    percentile: float = Field(99.99, gt=50, le=100, description="share of the values that ranges by percentile hold")
    weight_bits: Literal[7, 8] | None = Field(
        None, description="bits of int8 weights; by default 7 for ONNX Runtime on x86 CPUs without VNNI, which saturate"
    )
    keep: tuple[str, ...] = Field(
        (), description="groups that stay in floating point: names of nodes or modules, * for any part"
    )
    smooth: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] | None = Field(
        None,
        description="SmoothQuant's alpha: how much of activations' outliers goes into weights; auto looks for the best",
    )
    smooth_insert: bool = Field(
        False, description="also where factors cost a multiplication, as nothing before can take them up"
    )
    awq: bool = Field(False, description="scale weights by their activations before int4 (AWQ)")
    equalise: bool = Field(False, description="equalise the ranges of channels across layers, for depthwise networks")
    bias_correction: bool = Field(False, description="take the mean error of quantised weights out of the biases")
    convert_io: bool = Field(False, description="give inputs and outputs the type of fp16 and bf16 graphs too")
    search_limit_seconds: float = Field(600.0, ge=0, description="time for trying which groups stay in floating point")
    search_steps: int = Field(12, ge=1, le=64, description="most assignments that are tried")
