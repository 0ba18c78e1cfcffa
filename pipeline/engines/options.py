"""Declare what a recipe can say about engines; each engine reads the fields that concern it."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from enginesmith.pipeline.engines import can_use_cuda
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions, RunOptions
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.units import COMMA_LIST, UNIQUE, Option, Seconds, parse_bytes

DEFAULT_ENGINES = ("onnxruntime",)
"""Engines that a model is made into where none is named."""
GraphOptimization = Literal["disabled", "basic", "extended", "all"]
CudaGraphs = Literal["off", "on", "both"]
_GRAPH_MODES: Mapping[CudaGraphs, tuple[bool, ...]] = {"off": (False,), "on": (True,), "both": (False, True)}
_MOST_BYTES = 1 << 50


class ModuleOptions(BaseModel, frozen=True, extra="forbid"):
    """Choose how eager and compiled run the module, in variants of their own."""

    tf32: bool = Field(
        False, description="let all fp32 products be rounded to TF32's 10 bits, on CUDA; torch does so in convolutions"
    )
    compile_mode: Literal["default", "max-autotune"] = Field(
        "default", description="mode of torch.compile: default, or max-autotune, which measures many kernels first"
    )


class OnnxRuntimeOptions(BaseModel, frozen=True, extra="forbid"):
    """Choose how ONNX Runtime runs a graph."""

    tf32: bool = Field(False, description="let fp32 products be rounded to TF32's 10 bits, on CUDA")
    provider_options: Annotated[tuple[str, ...], Option("Variants", "--ort-option", metavar="NAME=VALUE,VALUE")] = (
        Field(
            (),
            description="an option of ONNX Runtime's CUDA provider, such as prefer_nhwc=0,1; each value is a variant",
        )
    )
    disabled_optimizers: Annotated[tuple[str, ...], Option("Variants", "--ort-disable", metavar="NAME")] = Field(
        (), description="an optimization of ONNX Runtime to leave out, by its name: one that gets the model wrong"
    )


class EngineOptions(BaseModel, frozen=True, extra="forbid"):
    """The fields of a recipe that engines read."""

    engines: Annotated[tuple[str, ...], UNIQUE, Option("Variants", "--engine", everyday=True)] = Field(
        DEFAULT_ENGINES,
        min_length=1,
        description="engines, each a variant (`enginesmith engines`); with no list of variants, all that run here",
    )
    batch: Annotated[tuple[int, ...], COMMA_LIST, Option("Model and inputs", everyday=True, metavar="N,N")] = Field(
        (1, 8), min_length=1, description="batch sizes to measure; sweep: larger until one does not fit"
    )
    graph_optimization: Annotated[tuple[GraphOptimization, ...], Option("Variants", metavar="LEVEL")] = Field(
        ("all",), min_length=1, description="ONNX Runtime's optimization levels; each one is a variant"
    )
    device: Annotated[str | None, Option("Where and how it runs", everyday=True, metavar="cpu|cuda[:I]")] = Field(
        None, description="device: cpu, cuda or cuda:1; by default cuda where an engine of the run can use a GPU"
    )
    cuda_graphs: Annotated[CudaGraphs | None, Option("Variants", metavar="off|on|both")] = Field(
        None,
        description="variants on CUDA that replay each set of shapes as a CUDA graph: off, on, or both (with those "
        "that do not) as in a run on CUDA by default",
    )
    tune_seconds: Annotated[Seconds | None, Option("Variants", "--tune")] = Field(
        None,
        description="time for each engine of ONNX Runtime or OpenVINO to try useful options of its sessions one by one "
        "(threads, spinning; on CUDA those of the provider), and keep those that are measurably faster",
    )
    threads: Annotated[int, Option("Where and how it runs")] = Field(
        0, ge=0, description="CPU threads of each session; 0 means one per core"
    )
    targets: Annotated[tuple[str, ...], UNIQUE, Option("Building engines", "--target", everyday=True)] = Field(
        (), description="GPUs that TensorRT-RTX builds for, present or not: sm86, portable …; by default the GPU here"
    )
    workspace: Annotated[
        tuple[str, ...], COMMA_LIST, UNIQUE, Option("Building engines", everyday=True, metavar="SIZE,SIZE")
    ] = Field((), description="workspace of TensorRT: 64MiB, max; sweep tries many")
    tensorrt: BuildOptions = BuildOptions()
    tensorrt_run: RunOptions = RunOptions()
    eager: ModuleOptions = ModuleOptions()
    onnxruntime: OnnxRuntimeOptions = OnnxRuntimeOptions()

    @field_validator("cuda_graphs", mode="before")
    @classmethod
    def _read_switch(cls, value: object) -> object:
        """Accept booleans: ``on`` and ``off`` in YAML are no text."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    def graph_modes(self, default: CudaGraphs = "off") -> tuple[bool, ...]:
        """List whether variants replay CUDA graphs, the ones that do not first."""
        return _GRAPH_MODES[self.cuda_graphs or default]

    @property
    def workspace_limits(self) -> tuple[int | Literal["sweep"] | None, ...]:
        """Read the limits: bytes, None for the builder's default, or a sweep.

        Raises:
            UsageError: one is no size.
        """
        words: dict[str, int | Literal["sweep"] | None] = {"max": None, "sweep": "sweep"}
        limits = {text: parse_bytes(text) for text in self.workspace if text not in words}
        for text, limit in limits.items():
            if limit > _MOST_BYTES:
                raise UsageError(f"a workspace of {text!r} is more than any device has", "give max for no limit")
            if limit < 1:
                raise UsageError(f"a workspace of {text!r} holds nothing", "give at least 1 byte, or max")
        return tuple((words | limits)[text] for text in self.workspace)

    @property
    def engine_files(self) -> dict[str, tuple[str, ...]]:
        """List the files that options name for an engine: option → paths."""
        return {"--plugins": self.tensorrt.plugins}

    @property
    def where(self) -> Device:
        """Read the device; where none was named, cuda if one of the engines can use the GPU of this machine.

        Raises:
            UsageError: it is neither cpu nor cuda.
        """
        return self.named_device or Device(kind="cuda" if can_use_cuda(self.engines) else "cpu", threads=self.threads)

    @property
    def named_device(self) -> Device | None:
        """Read the device; None where none was named.

        Raises:
            UsageError: it is neither cpu nor cuda.
        """
        return None if self.device is None else Device.parse(self.device, self.threads)
