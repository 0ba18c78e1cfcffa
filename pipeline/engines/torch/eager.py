"""Run PyTorch modules as they are, in inference mode, and compiled by ``torch.compile``.

Eager is the baseline that every other engine is held against; compiled shows whether leaving PyTorch is worth it.

By default float32 means float32: so answers are compared. torch lets cuDNN round the products of convolutions and
recurrent layers to TF32 if nobody says otherwise (``torch.backends.cudnn.allow_tf32`` starts as True, that of matrix
products as False); so eager is timed on CUDA, because so people run it. A session sets the one or the other. TF32 in
all products, half types and CUDA graphs are options, each a variant of its own.
"""

import functools
import gc
import os
import re
import shutil
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from enginesmith.pipeline.artifact import Artifact, Kind
from enginesmith.pipeline.engines.base import Configuration, Engine
from enginesmith.pipeline.engines.compatibility import NO_GPU, Check, check, check_driver, check_packages
from enginesmith.pipeline.engines.profiling import Profiled, ProfileRequest
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.cpu import vector_units
from enginesmith.pipeline.system.device import Availability, Device, unavailable
from enginesmith.pipeline.system.software import Formats, Numbers, Stack, numbers

if TYPE_CHECKING:
    import torch

    from enginesmith.pipeline.engines.options import EngineOptions
    from enginesmith.pipeline.engines.torch.session import EagerSession, Forward


_PRIMING_SIDE = 1024
"""Rows and columns of the matrix that starts torch's thread pool, and has MKL take the buffers of 1 MiB that each of
its threads keeps for products (with 512 it takes none)."""
_TF32_SINCE = (8, 0)
"""Compute capability that brought matrix units for TF32 and bfloat16."""
_TRITON_SINCE = (7, 0)
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
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    tools: ClassVar[tuple[str, ...]] = ("torch",)
    reads: ClassVar[tuple[str, ...]] = ("eager",)
    precisions: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    memory_from_torch: ClassVar[bool] = True

    dtype: DType = "float32"
    """Type that weights and float inputs are cast to; outputs come back in the model's own. float32 casts nothing."""
    tf32: bool | Literal["convolutions"] = False
    """Let products of float32 be rounded to TF32's 10 bits, on CUDA; a setting of the process, made by ``load``.
    ``convolutions`` is what torch does where nobody changes it."""
    cuda_graphs: bool = False
    """Replay each bound set of feeds as a CUDA graph: one launch instead of one for each operator."""

    @classmethod
    def configurations(cls, options: "EngineOptions", precision: str) -> Iterator[Configuration]:
        chosen = cls(dtype=DTYPES[precision], tf32=options.eager.tf32)
        yield Configuration(chosen, chosen.arithmetic)

    @classmethod
    def check_software(cls, stack: Stack, exported: Formats | None) -> Iterator[Check]:
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
        availability = Eager.installed(device)
        if not availability.ok or device.kind == "cpu":
            return availability
        import torch

        try:
            with warnings.catch_warnings(action="ignore"):
                if not torch.cuda.is_available():
                    torch.cuda.init()  # type: ignore[no-untyped-call]  # raises, and says why
        except RuntimeError as error:
            reason = str(error).partition(". ")[0]
            return unavailable(f"torch cannot use the CUDA device: {reason}", "look at what nvidia-smi says")
        return Availability(ok=True)

    @classmethod
    def installed(cls, device: Device) -> Availability:
        return Availability(ok=True) if device.kind == "cpu" else nvidia.available(device.index)

    def runnable(self, device: Device) -> Availability:
        availability = type(self).available(device)
        if not availability.ok:
            return availability
        settings = (("TF32", self.tf32), ("replays of CUDA graphs", self.cuda_graphs))
        features = [name for name, value in settings if value is True]
        if device.kind == "cpu" and features:
            reason = f"{' and '.join(features)} can be had on CUDA devices only"
            return unavailable(reason, "use --device cuda, or omit that")
        here = nvidia.cuda_device(device.index) if device.kind == "cuda" else None
        if self.tf32 is True and here and here.compute_capability < _TF32_SINCE:
            reason = f"TF32 needs compute capability 8.0, and {device} is {here.target} ({here.name})"
            return unavailable(reason, "omit tf32: products are in float32 here anyway")
        return availability

    @classmethod
    def usual_half(cls, device: Device) -> str:
        """Choose the half precision that people would take on a device.

        It is bf16 from compute capability 8.0: as fast as fp16 there, and no value overflows, as its range is that of
        float32. Below it is fp16, because matrix units for bf16 begin with 8.0.
        """
        here = nvidia.cuda_device(device.index) if device.kind == "cuda" else None
        return "fp16" if here and here.compute_capability < _TF32_SINCE else "bf16"

    @classmethod
    def candidate_precisions(cls, device: Device) -> tuple[str, ...]:
        """List float32, and the half precision that people would take where there are instructions for it."""
        fast = device.kind == "cuda" or any("bf16" in unit for unit in vector_units())
        return ("fp32", cls.usual_half(device)) if fast else ("fp32",)

    def as_shipped(self, device: Device) -> Self:
        """Round convolutions on CUDA to TF32, as torch does, unless TF32 was asked for in all products."""
        return self if self.tf32 or device.kind == "cpu" else self.model_copy(update={"tf32": "convolutions"})

    def exact(self) -> Self:
        """Round nothing to TF32."""
        return self.model_copy(update={"tf32": False})

    @property
    def arithmetic(self) -> str:
        named = next(name for name, dtype in DTYPES.items() if dtype == self.dtype)
        return "tf32" if self.tf32 and named == "fp32" else named

    @property
    def rounds_to_tf32(self) -> str:
        return "convolutions" if self.tf32 == "convolutions" else super().rounds_to_tf32

    def load(self, artifact: Artifact, device: Device) -> "EagerSession":
        import torch

        from enginesmith.pipeline.engines.torch.session import EagerSession, GraphedSession
        from enginesmith.pipeline.frameworks.torch.saved import load_artifact

        self.require_runnable(device)
        self.enter_thread(device)
        shipped = self.tf32 == "convolutions"
        if shipped:  # what the model's own code sets is part of how people run it
            allow_tf32(device, matmul=False, cudnn=True)
        loaded = load_artifact(artifact)
        if not shipped:
            allow_tf32(device, matmul=bool(self.tf32), cudnn=bool(self.tf32))
        dtype = None if self.dtype == "float32" else getattr(torch, self.dtype)
        module = loaded.module.eval().to(device=str(device), dtype=dtype)
        if device.kind == "cuda":
            torch.cuda.synchronize(device.index)  # the weights came by another stream than the session's
        kind = GraphedSession if self.cuda_graphs else EagerSession
        enter = functools.partial(self.enter_thread, device)
        return kind(self.forward(module), loaded.signature, device, dtype, enter)

    def profile(self, request: ProfileRequest) -> Profiled:
        from enginesmith.pipeline.engines.torch.session import profile

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
        from enginesmith.pipeline.frameworks.torch.saved import load_artifact

        self.enter_thread(device)
        load_artifact(artifact)
        start_threads(device)
        gc.collect()


def start_threads(device: Device) -> None:
    """Start torch's thread pool, or its libraries on CUDA, with all that they keep."""
    import torch

    with torch.inference_mode():
        square = torch.ones(_PRIMING_SIDE, _PRIMING_SIDE, device=str(device))
        (square @ square).relu_().sum().item()


def allow_tf32(device: Device, *, matmul: bool, cudnn: bool) -> None:
    """Have this process's matrix products of float32 on CUDA in TF32, or not; likewise cuDNN's.

    The older of torch's two ways to say so sets both, and has them agree. After the newer one (``fp32_precision``),
    asking the older way raises, which Inductor does (pytorch/pytorch#166387). The older way warns in torch 2.9.
    """
    if device.kind != "cuda":
        return
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = cudnn


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


def check_inductor(device: Device, kinds: Iterable[str]) -> Availability:
    """Check for what Inductor compiles with: Python's headers, and compilers; on CUDA Triton.

    ``kinds`` names the compilers: ``cpu`` for that of C++ code, ``cuda`` for that of the C code with which Triton
    launches its kernels, which Triton chooses.
    """
    here = nvidia.cuda_device(device.index) if device.kind == "cuda" else None
    if here and here.compute_capability < _TRITON_SINCE:
        reason = f"Triton needs compute capability 7.0, and {device} is {here.target} ({here.name})"
        return unavailable(reason, "use eager or onnxruntime")
    if device.kind == "cuda" and find_spec("triton") is None:
        return unavailable("the package triton is not installed", "install it: pip install triton")
    for kind in kinds:
        variable, names = ("CC", ("gcc", "clang")) if kind == "cuda" else ("CXX", ("g++",))
        names = (os.environ[variable],) if variable in os.environ else names
        if not any(map(shutil.which, names)):
            language, packages = ("C", "gcc libc6-dev") if kind == "cuda" else ("C++", "g++")
            remedy = f"install it: apt-get install {packages}, or set {variable} to the compiler that is there"
            return unavailable(f"there is no {language} compiler {' or '.join(map(repr, names))}", remedy)
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return unavailable("Python's C headers (Python.h) are missing", "install them: apt-get install python3-dev")
    return Availability(ok=True)


class Compiled(Eager):
    """Run a torch artifact's module compiled by Inductor, once for each set of input shapes."""

    name: ClassVar[str] = "compiled"
    title: ClassVar[str] = "torch.compile"
    times_kernels: ClassVar[bool] = True

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """CUDA graphs are a variant of their own, so no mode captures them."""

    @classmethod
    def configurations(cls, options: "EngineOptions", precision: str) -> Iterator[Configuration]:
        for each in super().configurations(options, precision):
            if options.eager.compile_mode == "default":
                yield each
            else:
                engine = each.engine.model_copy(update={"mode": "max-autotune-no-cudagraphs"})
                yield replace(each, engine=engine, mode=options.eager.compile_mode)

    @classmethod
    def available(cls, device: Device) -> Availability:
        answer = cls.installed(device)
        return Eager.available(device) if answer.ok else answer

    @classmethod
    def installed(cls, device: Device) -> Availability:
        """Check for what eager needs, and for what Inductor needs."""
        availability = super().installed(device)
        return check_inductor(device, [device.kind]) if availability.ok else availability

    def profile(self, request: ProfileRequest) -> Profiled:
        """Time each kernel; compiled code does not say which module it came from."""
        from torch._inductor import config

        from enginesmith.pipeline.engines.torch.session import profile

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
        """Make the settings of eager, and those of Dynamo and Inductor, which are of a thread, too.

        Random numbers are torch's: of the same seed, Inductor would draw others, so that a Reformer hashes otherwise.
        """
        from torch._dynamo import config
        from torch._inductor import config as inductor

        super().enter_thread(device)
        config.recompile_limit = config.accumulated_recompile_limit = _SHAPES
        config.fail_on_recompile_limit_hit = True
        inductor.fallback_random = True
