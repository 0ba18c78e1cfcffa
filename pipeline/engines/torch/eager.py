"""Run PyTorch modules as they are, in inference mode, and compiled by ``torch.compile``.

Eager is the baseline that every other engine is held against; compiled shows whether leaving PyTorch is worth it.

By default float32 means float32. torch lets cuDNN round the products of convolutions and recurrent layers to TF32 if
nobody says otherwise (``torch.backends.cudnn.allow_tf32`` starts as True, that of matrix products as False), so a
session says it. TF32, half types and CUDA graphs are options, each a variant of its own.
"""

import functools
import gc
import os
import re
import shutil
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from enginesmith.pipeline.artifact import Artifact, Kind
from enginesmith.pipeline.engines.base import Configuration, Engine, Profiled, ProfileRequest
from enginesmith.pipeline.engines.compatibility import NO_GPU, Check, check, check_driver, check_packages
from enginesmith.pipeline.engines.torch.session import EagerSession, GraphedSession, profile
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.device import Availability, Device, unavailable
from enginesmith.pipeline.system.software import Formats, Numbers, Stack, numbers

if TYPE_CHECKING:
    import torch

    from enginesmith.pipeline.engines.options import EngineOptions
    from enginesmith.pipeline.engines.torch.session import Forward


_PRIMING_SIDE = 1024
"""Rows and columns of the matrix that starts torch's thread pool, and has MKL take the buffers of 1 MiB that each of
its threads keeps for products (with 512 it takes none)."""
_TF32_SINCE = (8, 0)
DType = Literal["float32", "float16", "bfloat16"]
DTYPES: Mapping[str, DType] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Types that a module can be cast to, by the name of the precision."""
_SHAPES = 64
"""Shapes a session may be compiled for before that is an error; torch's own limit of 8 falls back to eager silently."""


class Eager(Engine):
    """Run a torch artifact's module, op by op."""

    name: ClassVar[str] = "eager"
    consumes: ClassVar[Kind] = "torch"
    title: ClassVar[str] = "eager PyTorch"
    tools: ClassVar[tuple[str, ...]] = ("torch",)
    reads: ClassVar[tuple[str, ...]] = ("eager",)
    precisions: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    memory_from_torch: ClassVar[bool] = True

    dtype: DType = "float32"
    """Type that weights and float inputs are cast to; outputs come back in the model's own. float32 casts nothing."""
    tf32: bool = False
    """Let products of float32 be rounded to TF32's 10 bits, on CUDA; a setting of the process, made by ``load``."""
    cuda_graphs: bool = False
    """Replay each bound set of feeds as a CUDA graph: one launch instead of one for each operator."""

    @classmethod
    def configurations(cls, asked: "EngineOptions", precision: str) -> Iterator[Configuration]:
        chosen = cls(dtype=DTYPES[precision], tf32=asked.eager.tf32, cuda_graphs=asked.eager.cuda_graphs)
        if chosen != Eager():
            yield Configuration(chosen, chosen.arithmetic, mode="graphs" if chosen.cuda_graphs else "")

    @classmethod
    def check_software(cls, stack: Stack, exported: Formats) -> Iterator[Check]:
        yield from check_driver(stack, "torch", stack.torch_cuda)
        version = stack.versions.get("torch")
        if version and stack.torch_cuda is None:
            wanted = bool(stack.gpus) or stack.gpu_without_driver
            text, needed = f"{version}, built without CUDA", "a build with CUDA, to run on a GPU"
            fix = "pip uninstall -y torch && pip install torch"
            yield check("torch", text, needed, False if wanted else None, fix, "" if wanted else NO_GPU)
        if stack.torch_cuda and (pinned := stack.requirements.get("torch")):
            yield check_packages(stack, "CUDA libraries of torch", [need for need in pinned if not need.extra])
        for index, gpu in enumerate(stack.gpus if stack.torch_targets else ()):
            fits = _has_kernels(numbers(gpu.compute_capability), stack.torch_targets)
            needed = f"{gpu.name}: compute capability {gpu.compute_capability}"
            fix = "pip install --upgrade torch; for an old GPU: a torch that is built for an older CUDA"
            yield check(f"torch's kernels for cuda:{index}", ", ".join(stack.torch_targets), needed, fits, fix)

    @classmethod
    def available(cls, device: Device) -> Availability:
        if device.kind == "cpu":
            return Availability(ok=True)
        import torch

        if torch.version.cuda is None:
            return unavailable(f"the installed torch {torch.__version__} is built without CUDA", nvidia.OTHER_TORCH)
        if not torch.cuda.is_available():
            remedy = "look at what nvidia-smi says; the driver is missing or older than this torch needs"
            return unavailable("torch finds no CUDA device", remedy)
        count = torch.cuda.device_count()
        if device.index >= count:
            return unavailable(f"there is no {device}", f"use one of cuda:0 … cuda:{count - 1}")
        return Availability(ok=True)

    def runnable(self, device: Device) -> Availability:
        availability = type(self).available(device)
        if not availability.ok:
            return availability
        asked = [name for name, value in (("TF32", self.tf32), ("replays of CUDA graphs", self.cuda_graphs)) if value]
        if device.kind == "cpu" and asked:
            reason = f"{' and '.join(asked)} can be had on CUDA devices only"
            return unavailable(reason, "use --device cuda, or omit that")
        here = nvidia.cuda_device(device.index) if device.kind == "cuda" else None
        if self.tf32 and here and here.compute_capability < _TF32_SINCE:
            reason = f"TF32 needs compute capability 8.0, and {device} is {here.target} ({here.name})"
            return unavailable(reason, "omit tf32: products are in float32 here anyway")
        return availability

    @property
    def arithmetic(self) -> str:
        named = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        return "tf32" if self.tf32 and named == "fp32" else named

    def load(self, artifact: Artifact, device: Device) -> EagerSession:
        import torch

        from enginesmith.pipeline.frameworks.torch.saved import load_artifact

        self.require_runnable(device)
        self.enter_thread(device)
        _allow_tf32(device, self.tf32)
        loaded = load_artifact(artifact)
        dtype = None if self.dtype == "float32" else getattr(torch, self.dtype)
        module = loaded.module.eval().to(device=str(device), dtype=dtype)
        if device.kind == "cuda":
            torch.cuda.synchronize(device.index)  # the weights came by another stream than the session's
        kind = GraphedSession if self.cuda_graphs else EagerSession
        enter = functools.partial(self.enter_thread, device)
        return kind(self.forward(module), loaded.signature, device, dtype, enter)

    def profile(self, request: ProfileRequest) -> Profiled:
        notes = ("profiled without CUDA graphs",) if self.cuda_graphs else ()
        with self.model_copy(update={"cuda_graphs": False}).load(request.artifact, request.device) as session:
            return profile(session, request, modules=True, notes=notes)

    def forward(self, module: "torch.nn.Module") -> "Forward":
        """Transform the module into the function that a session calls."""
        return module

    def enter_thread(self, device: Device) -> None:
        """Make the settings that hold for the calling thread alone: OpenMP's threads and CUDA's device."""
        import torch

        torch.set_num_threads(device.thread_count)
        if device.kind == "cuda":
            torch.cuda.set_device(device.index)

    def prime(self, artifact: Artifact, device: Device) -> None:
        """Build the module once, which imports all of its code, and start the thread pool."""
        import torch

        from enginesmith.pipeline.frameworks.torch.saved import load_artifact

        self.enter_thread(device)
        load_artifact(artifact)
        with torch.inference_mode():
            square = torch.ones(_PRIMING_SIDE, _PRIMING_SIDE, device=str(device))
            (square @ square).relu_().sum().item()
        gc.collect()


def _allow_tf32(device: Device, allowed: bool) -> None:
    """Have this process's products of float32 on CUDA in TF32, or not.

    The older of torch's two ways to say so sets both, and has them agree. After the newer one (``fp32_precision``),
    asking the older way raises, which Inductor does (pytorch/pytorch#166387). The older way warns in torch 2.9.
    """
    if device.kind != "cuda":
        return
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed


def _has_kernels(capability: Numbers, targets: tuple[str, ...]) -> bool:
    """Tell if there are kernels for a GPU: they run on newer minor versions, PTX on anything newer (CUDA's guide)."""
    for target in targets:
        kind, _, digits = target.partition("_")
        if not digits.isdecimal():  # sm_90a and the like run on exactly that one
            continue
        theirs = (int(digits[:-1]), int(digits[-1]))
        if theirs <= capability and (kind == "compute" or theirs[0] == capability[0]):
            return True
    return any(re.fullmatch(rf"sm_{capability[0]}{capability[1]}[af]", target) for target in targets)


class Compiled(Eager):
    """Run a torch artifact's module compiled by Inductor, once for each set of input shapes."""

    name: ClassVar[str] = "compiled"
    title: ClassVar[str] = "torch.compile"

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"

    @classmethod
    def available(cls, device: Device) -> Availability:
        """Check for what eager needs; on the CPU Inductor also needs a C++ compiler and Python's headers."""
        availability = Eager.available(device)
        if not availability.ok or device.kind == "cuda":
            return availability
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            remedy = "install it: apt-get install g++, or set CXX to the compiler that is there"
            return unavailable(f"there is no C++ compiler {compiler!r}", remedy)
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            return unavailable("Python's C headers (Python.h) are missing", "install them: apt-get install python3-dev")
        return availability

    def profile(self, request: ProfileRequest) -> Profiled:
        """Time each kernel; compiled code does not say which module it came from."""
        from torch._inductor import config

        plain = self.model_copy(update={"cuda_graphs": False})
        notes = ("kernels of compiled code do not say which modules they came from",)
        with config.patch({"cpp.enable_kernel_profile": True}), plain.load(request.artifact, request.device) as session:
            return profile(session, request, modules=False, notes=notes)

    def forward(self, module: "torch.nn.Module") -> "Forward":
        """Compile the module at the first call with each set of shapes."""
        import torch

        compiled: Forward = torch.compile(module, dynamic=False, mode=self.mode)
        return compiled

    def enter_thread(self, device: Device) -> None:
        """Make the settings of eager, and Dynamo's, which are of a thread, too."""
        from torch._dynamo import config

        super().enter_thread(device)
        config.recompile_limit = config.accumulated_recompile_limit = _SHAPES
        config.fail_on_recompile_limit_hit = True
