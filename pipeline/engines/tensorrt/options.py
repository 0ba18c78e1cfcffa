"""Declare the options of builds and runs, and refuse or note those that a flavour does not have."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator

from enginesmith.pipeline.engines.tensorrt.versions import NEEDS_DEVICE, Capabilities, FlavourName
from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.units import SIZE, Bytes, Heading, Option, flag_of

_BUILDING: Heading = "Building engines"
_ADVANCED = Option(_BUILDING)
_Switch = Annotated[bool, _ADVANCED]
_Size = Annotated[Bytes | None, _ADVANCED]


class BuildOptions(BaseModel, frozen=True, extra="forbid"):
    """Choose how TensorRT engines are built; null leaves it to the builder."""

    tactic_dram: _Size = Field(None, description="device memory that the builder may use to try one kernel")
    tactic_shared_memory: _Size = Field(None, description="shared memory that a kernel may use")
    optimization_level: Annotated[int | None, _ADVANCED] = Field(
        None, ge=0, le=5, description="effort of the builder: 0 is fastest, 5 searches longest"
    )
    aux_streams: Annotated[int | None, _ADVANCED] = Field(
        None, ge=0, description="largest number of streams besides the main one"
    )
    tiling: Annotated[Literal["none", "fast", "moderate", "full"] | None, _ADVANCED] = Field(
        None, description="effort of the builder's search for tiled kernels"
    )
    sparse_weights: _Switch = Field(
        False, description="use kernels for 2:4 sparse weights; always on for graphs that were made 2:4"
    )
    weight_streaming: _Switch = Field(False, description="stream weights from the host while the engine runs")
    strip_plan: _Switch = Field(False, description="leave the weights out of the engine, to be refitted later")
    refit: _Switch = Field(False, description="let the weights be replaced in the built engine")
    version_compatible: _Switch = Field(
        False, description="let later versions of TensorRT load the engine; needs host_code"
    )
    hardware_compatibility: Annotated[Literal["none", "ampere_plus", "same_compute_capability"], _ADVANCED] = Field(
        "none", description="other GPUs that the engine also runs on"
    )
    tf32: Annotated[bool, Option(_BUILDING, "--tf32/--no-tf32")] = Field(
        True, description="let fp32 products be rounded to TF32's 10 bits; on by default"
    )
    plugins: Annotated[tuple[str, ...], Option(_BUILDING, metavar="FILE.so")] = Field(
        (), description="plugin libraries to load; their code is run"
    )
    timing_cache: Annotated[str | None, Option(_BUILDING, metavar="FILE")] = Field(
        None, description="file of kernel timings; by default one for each device and version"
    )
    locked: _Switch = Field(False, description="fail if a kernel timing is missing, so that builds repeat")
    profiles: Annotated[tuple[str, ...], Option(_BUILDING, "--optimization-profile", metavar="DIM=MIN:OPT:MAX,…")] = (
        Field((), description="more optimization profiles: batch=1:1:1,seq=1:128:128; tried before the whole range")
    )
    host_code: _Switch = Field(False, description="also load engines that contain code for the CPU")

    @field_validator("tiling", mode="before")
    @classmethod
    def _word(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @property
    def asked(self) -> dict[str, object]:
        """Options that are not as they are by default."""
        return {name: value for name, value in self if value != type(self).model_fields[name].default}


class RunOptions(BaseModel, frozen=True, extra="forbid"):
    """Choose how TensorRT engines are run; nothing here changes what is built."""

    share_activation_memory: _Switch = Field(
        False, description="let all engines of a process work in one buffer for activations, one at a time"
    )
    weight_streaming_budget: Annotated[Annotated[int, Field(ge=0), SIZE] | None, _ADVANCED] = Field(
        None,
        description="size of the streamed weights that stay on the device; for engines built with weight_streaming",
    )
    kernel_cache: bool = Field(True, description="keep the kernels that TensorRT-RTX compiles at a first run")


class SessionOptions(RunOptions):
    """Choose how one session runs its engine."""

    cuda_graphs: bool = False
    """Capture each set of shapes once as a CUDA graph, and replay it."""


def validate_options(
    options: BuildOptions, flavour: FlavourName, known: Capabilities, *, device: bool
) -> tuple[str, ...]:
    """Refuse what cannot be had; list a note for each option that changes nothing.

    Raises:
        MissingCapability: an option that this flavour does not have, or not without a device.
    """
    refused = known.refused if device else {**NEEDS_DEVICE, **known.refused}
    names = {name: flag_of(BuildOptions, name) for name in options.asked}
    for name, flag in names.items():
        if name in refused:
            elsewhere = name in NEEDS_DEVICE and name not in known.refused
            remedy = f"omit {flag}" + (", or build on a machine with a GPU" if elsewhere else "")
            raise MissingCapability(f"{flavour} cannot do {flag} here: {refused[name]}", remedy)
    return tuple(
        f"{flag} has no effect in {flavour}: {known.no_effect[name]}"
        for name, flag in names.items()
        if name in known.no_effect
    )
