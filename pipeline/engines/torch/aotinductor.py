"""Compile modules ahead of time: ``torch.export`` captures a program, and AOTInductor makes machine code of it.

No ONNX graph is made. The engine is a package (``model.pt2``: the library, and the C++ code that it was compiled from)
with a record of where it was made. If that does not match this machine and this torch, the package is not loaded.
"""

import dataclasses
import functools
import importlib
import json
import os
import platform
import re
import shutil
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ValidationError

from enginesmith.pipeline.artifact import Artifact, Effect, Kind, file_digest
from enginesmith.pipeline.engines.base import BuildRequest, Configuration, Engine, EngineFacts, PackageFacts
from enginesmith.pipeline.engines.torch.eager import DTYPES, DType, Eager, allow_tf32, check_inductor, start_threads
from enginesmith.pipeline.errors import BuilderFailed, MissingCapability, ModelError
from enginesmith.pipeline.system import nvidia, software
from enginesmith.pipeline.system.cpu import vector_units
from enginesmith.pipeline.system.device import Availability, Device, unavailable

if TYPE_CHECKING:
    import torch

    from enginesmith.pipeline.engines.options import EngineOptions
    from enginesmith.pipeline.engines.torch.session import EagerSession
    from enginesmith.pipeline.frameworks.torch.module import LoadedModel

_PACKAGE, _RECORD = "model.pt2", "engine.json"
_RUNNERS = 16  # calls that can run at the same time, with shared weights; further ones wait
_SHOWN = 8
_HEADERS = ("cuda.h", "cuda_runtime.h", "crt/host_config.h")
"""Files of the CUDA toolkit that compiled code includes, and what these include."""


class Audit(BaseModel, frozen=True):
    """Count what the generated C++ code calls, as it lies in the package."""

    fused: int  # calls of kernels that Inductor wrote
    operators: dict[str, int]  # calls of PyTorch's own kernels, by operator
    dispatched: tuple[str, ...]  # operators that whoever loads the package has to register in torch
    layers: dict[str, int]  # calls by the floating-point type of the tensors that they are given, if the code says it
    weights_bytes: int

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for people."""
        most = ", ".join(f"{name} {count} ×" for name, count in [*self.operators.items()][:_SHOWN]) or "none"
        lacking = f"the package needs these operators registered where it is loaded: {', '.join(self.dispatched)}"
        return (f"PyTorch's own kernels that it calls: {most}", *([lacking] if self.dispatched else []))


class Record(BaseModel, frozen=True):
    """Describe a package: where it was made, and so where it runs."""

    sha256: str
    torch: str
    machine: str
    instructions: tuple[str, ...]  # vector extensions of the processor: the compiler may make code for all of them
    device: Literal["cpu", "cuda"]
    target: str  # the kind of GPU: sm86; empty on the CPU
    threads: int  # that each kernel of Inductor's takes
    audit: Audit
    cautions: tuple[str, ...] = ()  # sizes at which its answers are wrong

    def check(self, path: Path, device: Device) -> None:
        """Insist that a package is the one described (else ModelError) and runs here (else MissingCapability)."""
        if file_digest(path) != self.sha256:
            raise ModelError(f"{path.name} is not the package that {_RECORD} describes", "build the engine again")
        here = describe_machine(device)
        lacking = [name for name in self.instructions if name not in here["instructions"]]
        wrong = [
            f"{what} {getattr(self, name)}, and here is {here[name] or 'none'}"
            for name, what in (("device", "for"), ("torch", "with torch"), ("machine", "for"), ("target", "for"))
            if getattr(self, name) != here[name]
        ]
        wrong += [f"for a processor with {', '.join(lacking)}, which this one lacks"] if lacking else []
        if wrong:
            message = f"{path.name} is machine code that was compiled {'; '.join(wrong)}"
            raise MissingCapability(message, "build the engine here: enginesmith optimize with --engine aotinductor")


def describe_machine(device: Device) -> dict[str, Any]:
    """Collect what decides whether a package runs here, by the fields of :class:`Record`."""
    gpu = nvidia.cuda_device(device.index) if device.kind == "cuda" else None
    return {
        "torch": software.version("torch") or "",
        "machine": platform.machine(),
        "instructions": vector_units(),
        "device": device.kind,
        "target": gpu.target if gpu else "",
    }


def read_record(folder: Path) -> Record:
    """Read the record beside a package; ModelError if it is missing or damaged."""
    try:
        return Record.model_validate_json((folder / _RECORD).read_bytes())
    except (OSError, ValidationError) as error:
        raise ModelError(f"the record of the package ({_RECORD}) cannot be read", "build the engine again") from error


# What the package says of itself.

_CONSTANT = re.compile(r"constants_info_\[(\d+)\]\.(name|dtype|data_size) = \W?(\w+)")
_ALLOCATED = re.compile(r"aoti_torch_empty_strided\w*\(.*cached_torch_dtype_(\w+),.*&(\w+)_handle")
_MOVED = re.compile(r"auto (\w+) = std::move\((\w+)\)")
_FUSED = re.compile(r"^\s+(?:cpp_fused\w*|call_triton_\w+|launch_triton_\w+|launchKernel)\(")
_OPERATOR = re.compile(r"\baoti_torch_(?:cpu|cuda)_(\w+)\(")
_RESULT = re.compile(r"&(\w+)_handle")
_WORD = re.compile(r"\b[A-Za-z_]\w*")
_FLOATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def audit_package(path: Path) -> Audit:
    """Count the calls in the code of a package, without loading it; BuilderFailed if there is no code in it."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        wrapper = next((name for name in names if name.endswith(".wrapper.cpp")), None)
        if wrapper is None:
            raise BuilderFailed("the package has no C++ code to audit", "look at the log; report the version of torch")
        code = archive.read(wrapper).decode()
        nodes = [json.loads(archive.read(name)) for name in names if name.endswith("extern_kernel_nodes.json")]
    dispatched = (node["node"]["target"] for document in nodes for node in document.get("nodes", ()))
    return audit_code(code.splitlines(), dispatched)


def audit_code(lines: Iterable[str], dispatched: Iterable[str] = ()) -> Audit:
    """Count calls in the lines of C++ code; the types of buffers are followed from where they are allocated."""
    constants: dict[str, dict[str, str]] = {}
    types: dict[str, str] = {}
    layers, operators, fused = Counter[str](), Counter[str](), 0
    for line in lines:
        if constant := _CONSTANT.search(line):
            fields = constants.setdefault(constant[1], {})
            fields[constant[2]] = constant[3].removeprefix("cached_torch_dtype_")
            types[fields.get("name", "")] = fields.get("dtype", "")
        elif allocated := _ALLOCATED.search(line):
            types[allocated[2]] = allocated[1]
        elif moved := _MOVED.search(line):
            types[moved[1]] = types.get(moved[2], "")
        elif (operator := _OPERATOR.search(line)) or _FUSED.search(line):
            given = [_FLOATS[types[word]] for word in _WORD.findall(line) if types.get(word) in _FLOATS]
            layers.update(given[:1])
            operators.update([operator[1]] if operator else [])
            fused += not operator
            if result := _RESULT.search(line):
                types[result[1]] = next((name for name, label in _FLOATS.items() if [label] == given[:1]), "")
    return Audit(
        fused=fused,
        operators=dict(operators.most_common()),
        dispatched=tuple(dict.fromkeys(dispatched)),
        layers=dict(layers.most_common()),
        weights_bytes=sum(int(fields["data_size"]) for fields in constants.values()),
    )


class AOTInductor(Engine):
    """Compile a torch artifact's module into a package, and run that."""

    name: ClassVar[str] = "aotinductor"
    consumes: ClassVar[Kind] = "torch"
    title: ClassVar[str] = "AOTInductor"
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    tools: ClassVar[tuple[str, ...]] = ("torch", "triton")
    precisions: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    modules: ClassVar[tuple[str, ...]] = ("torch", "torch._inductor.package", __name__)
    native_code: ClassVar[bool] = True
    times_kernels: ClassVar[bool] = True
    has_infer_script: ClassVar[bool] = True
    memory_from_torch: ClassVar[bool] = True

    dtype: DType = "float32"
    """Type that weights and float inputs are cast to; outputs come back in the model's own. float32 casts nothing."""

    @classmethod
    def configurations(cls, options: "EngineOptions", precision: str) -> Iterator[Configuration]:
        yield Configuration(cls(dtype=DTYPES[precision]), precision)

    @classmethod
    def available(cls, device: Device) -> Availability:
        return Eager.available(device)

    @classmethod
    def installed(cls, device: Device) -> Availability:
        return Eager.installed(device)

    @classmethod
    def buildable(cls, device: Device) -> Availability:
        """Check for the tools of a build: the code around the kernels is C++ everywhere; on CUDA it calls CUDA, too."""
        on_cuda = device.kind == "cuda"
        tools = check_inductor(device, ["cpu", "cuda"] if on_cuda else ["cpu"])
        return _check_toolkit() if on_cuda and tools.ok else tools

    @property
    def arithmetic(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    def package_facts(self, main: Path, device: Device) -> PackageFacts:
        record = read_record(main.parent)
        options = record.model_dump(include={"torch", "machine", "instructions", "target"})
        options |= {"dtype": self.dtype, "threads": device.threads}
        return PackageFacts(version=record.torch, options=options, module="torch")

    @classmethod
    def from_package(cls, main: Path, options: Mapping[str, Any]) -> Engine:
        return cls(dtype=options["dtype"])

    def environment_key(self, device: Device) -> dict[str, Any]:
        return {**describe_machine(device), "threads": device.full_thread_count}

    def build(self, request: BuildRequest) -> Effect:
        """Write the package and its record.

        Raises:
            MissingCapability: there is no compiler, or the device is not here.
            ExportError: the module cannot be captured for all sizes that were asked for.
            BuilderFailed: Inductor or the compiler failed.
        """
        from enginesmith.pipeline.frameworks.torch.saved import load_artifact
        from enginesmith.pipeline.passes.export.export import capture_widely

        device = request.device
        self.require(device)
        self.buildable(device).require(f"{self.name} cannot compile for {device}")
        Eager().enter_thread(device)
        loaded = self._cast(load_artifact(request.artifact), device)
        request.progress("capturing the program with torch.export")
        program, others = capture_widely(loaded, request.ranges)
        request.progress("compiling with AOTInductor")
        _compile(program, request.out / _PACKAGE, device)
        audit = audit_package(request.out / _PACKAGE)
        sha256, threads = file_digest(request.out / _PACKAGE), device.full_thread_count
        cautions = (f"the program is {others}",) if others else ()
        record = Record(sha256=sha256, threads=threads, audit=audit, cautions=cautions, **describe_machine(device))
        (request.out / _RECORD).write_text(record.model_dump_json(indent=1), encoding="utf-8")
        calls = sum(audit.operators.values()) + len(audit.dispatched)
        summary = f"{audit.fused} calls of fused kernels, {calls} of PyTorch's own"
        return Effect(file=_PACKAGE, summary=summary, notes=audit.notes, signature=loaded.signature)

    def _cast(self, loaded: "LoadedModel", device: Device) -> "LoadedModel":
        where, dtype = str(device), self._torch_dtype
        cast = {
            name: value.to(where, dtype if value.is_floating_point() else None)
            for name, value in loaded.example.items()
        }
        return dataclasses.replace(loaded, module=loaded.module.eval().to(device=where, dtype=dtype), example=cast)

    @property
    def _torch_dtype(self) -> "torch.dtype | None":
        import torch

        return None if self.dtype == "float32" else getattr(torch, self.dtype)

    def facts(self, artifact: Artifact) -> EngineFacts:
        record = read_record(artifact.folder)
        audit = record.audit
        return EngineFacts(layers=audit.layers, weights_bytes=audit.weights_bytes, cautions=record.cautions)

    def load(self, artifact: Artifact, device: Device) -> "EagerSession":
        """Open the package, if its record says that it is the one, and runs here."""
        self.require(device)
        read_record(artifact.folder).check(artifact.path, device)
        from torch._inductor.package.package import load_package

        from enginesmith.pipeline.engines.torch.session import EagerSession

        Eager().enter_thread(device)
        allow_tf32(device, matmul=False, cudnn=False)
        index = device.index if device.kind == "cuda" else -1
        try:
            package = load_package(str(artifact.path), num_runners=_RUNNERS, device_index=index)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise ModelError(f"torch cannot load {artifact.path.name}: {first}", "build the engine again") from error
        enter = functools.partial(Eager().enter_thread, device)
        forward = functools.partial(_call, package.loader)  # the package's own call reads its description each time
        return EagerSession(forward, artifact.model_signature, device, self._torch_dtype, enter)

    def prime(self, artifact: Artifact, device: Device) -> None:
        """Import what loads packages, and start the thread pool."""
        importlib.import_module("torch._inductor.package")
        self.require(device)
        Eager().enter_thread(device)
        start_threads(device)


def _check_toolkit() -> Availability:
    """Look for the headers of the CUDA toolkit where torch does (``torch.utils.cpp_extension``)."""
    compiler = shutil.which("nvcc")
    default_home = str(Path(compiler).parents[1]) if compiler else "/usr/local/cuda"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or default_home
    missing = [name for name in _HEADERS if not Path(home, "include", name).is_file()]
    if not missing:
        return Availability(ok=True)
    remedy = "install NVIDIA's CUDA toolkit, of the CUDA that torch is built for, and set CUDA_HOME to its folder"
    return unavailable(f"there is no CUDA toolkit in {home}: it lacks include/{missing[0]}", remedy)


def _compile(program: Any, path: Path, device: Device) -> None:
    """Compile a program into a package; files that Inductor writes on the way are removed.

    The number of threads becomes part of the code. Where it is left open (``cpp.dynamic_threads``), even the smallest
    kernels start threads. On the CPU weights are frozen: normalizations are folded into convolutions, and weights
    are laid out for the kernels (ResNet-18, batch 1, one thread: 1.4 times as fast as without). On CUDA weights come
    from torch's caching allocator, as all else that the package takes there.
    """
    import torch
    from torch._inductor.utils import fresh_cache

    on_cuda = device.kind == "cuda"
    options = {
        "cpp.threads": device.full_thread_count,
        "freezing": not on_cuda,
        "aot_inductor.weight_use_caching_allocator": on_cuda,
    }
    scratch = tempfile.TemporaryDirectory(dir=path.parent)
    with scratch as folder, warnings.catch_warnings(action="ignore"), fresh_cache(dir=folder):
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
        except Exception as error:  # what its parts raise has no common class
            first = str(error).strip().partition("\n")[0][:300]
            message = f"AOTInductor cannot compile the program: {type(error).__name__}: {first}"
            raise BuilderFailed(message, "the whole trace is in the step's log") from error


def _call(loader: Any, *tensors: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
    return tuple(loader.boxed_run(list(tensors)))
