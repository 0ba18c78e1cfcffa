"""Declare what a recipe can say about engines; each engine reads the fields that concern it."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from enginesmith.pipeline.engines.tensorrt.options import BuildOptions, RunOptions
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.units import COMMA_LIST, Option, parse_bytes

DEFAULT_ENGINES = ("onnxruntime",)
"""Engines that a model is made into where none is named."""
GraphOptimization = Literal["disabled", "basic", "extended", "all"]
_MOST_BYTES = 1 << 50


class ModuleOptions(BaseModel, frozen=True, extra="forbid"):
    """Choose how eager and compiled run the module, in variants of their own; the baseline is always plain float32."""

    tf32: bool = Field(False, description="let fp32 products be rounded to TF32's 10 bits, on CUDA")
    cuda_graphs: bool = Field(False, description="capture each set of inputs once as a CUDA graph, and replay it")


class OnnxRuntimeOptions(BaseModel, frozen=True, extra="forbid"):
    """Choose how ONNX Runtime runs a graph."""

    tf32: bool = Field(False, description="let fp32 products be rounded to TF32's 10 bits, on CUDA")


class EngineOptions(BaseModel, frozen=True, extra="forbid"):
    """The fields of a recipe that engines read."""

    engines: Annotated[tuple[str, ...], Option("Variants", "--engine", everyday=True)] = Field(
        DEFAULT_ENGINES, min_length=1, description="engines to build, each a variant"
    )
    graph_optimization: Annotated[tuple[GraphOptimization, ...], Option("Variants", metavar="LEVEL")] = Field(
        ("all",), min_length=1, description="ONNX Runtime's optimization levels; each one is a variant"
    )
    device: Annotated[str | None, Option("Where and how it runs", everyday=True, metavar="cpu|cuda[:I]")] = Field(
        None, description="device: cpu, cuda or cuda:1; by default cuda if an engine needs it and there is one"
    )
    threads: Annotated[int, Option("Where and how it runs")] = Field(
        0, ge=0, description="CPU threads of each session; 0 means one per core"
    )
    targets: Annotated[tuple[str, ...], Option("Building engines", "--target", everyday=True)] = Field(
        (), description="GPUs that TensorRT-RTX builds for, present or not: sm86, portable …; by default the one here"
    )
    workspace: Annotated[
        tuple[str, ...], COMMA_LIST, Option("Building engines", everyday=True, metavar="SIZE,SIZE")
    ] = Field((), description="workspace of TensorRT: 64MiB, max; sweep tries many")
    tensorrt: BuildOptions = BuildOptions()
    tensorrt_run: RunOptions = RunOptions()
    eager: ModuleOptions = ModuleOptions()
    onnxruntime: OnnxRuntimeOptions = OnnxRuntimeOptions()

    @field_validator("engines", "targets", "workspace")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(value))

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
    def named_device(self) -> Device | None:
        """Read the device; None where none was named.

        Raises:
            UsageError: it is neither cpu nor cuda.
        """
        if self.device is None:
            return None
        kind, _, index = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
            raise UsageError(f"there is no device {self.device!r}", "use cpu, cuda or cuda:1")
        return Device(kind=kind, index=int(index or 0), threads=self.threads)
