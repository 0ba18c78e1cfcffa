"""Describe the software between a model and a GPU: driver, CUDA, libraries, what each was built for."""

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.system.nvml import GpuState
from enginesmith.pipeline.system.software import Requirement


class Formats(BaseModel):
    """The newest ONNX that something writes or takes."""

    model_config = ConfigDict(frozen=True)

    ir: int
    opset: int


class Stack(BaseModel):
    """What is here. None is what is not there, or cannot be known."""

    model_config = ConfigDict(frozen=True)

    driver: str | None = None
    """Its version, which NVML tells."""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that it knows."""
    driver_reason: str = ""
    gpu_without_driver: bool = False
    gpus: tuple[GpuState, ...] = ()
    versions: dict[str, str] = {}
    torch_cuda: str | None = None
    torch_targets: tuple[str, ...] = ()
    """``sm_90``, ``compute_90``: what torch has kernels for."""
    onnxruntime_cuda: str | None = None
    cudnn: str | None = None
    requirements: dict[str, tuple[Requirement, ...]] = {}
    """Of a package: NVIDIA's packages that it asks for."""
    packages: dict[str, str] = {}
    """Those of them that are installed, and TensorRT's parts."""
    variants: dict[str, dict[int, list[str]]] = {}
    """``tensorrt`` → CUDA's major version → distributions."""
    loadable: tuple[str, ...] = ()
    """Libraries that the system's loader finds."""
    glibc: str | None = None
    glibc_needed: dict[str, str] = {}
    written: Formats | None = None
    """By the installed onnx."""
    taken: Formats | None = None
    """By the installed ONNX Runtime, found out by trying."""
