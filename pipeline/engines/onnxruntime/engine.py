"""Build and run engines of ONNX Runtime, on its CPU or CUDA provider.

By default the engine file is the graph that ONNX Runtime makes of the model, optimised once in ``build``. Against
optimising at every load (2 cores), ResNet-50 then loads in 18 instead of 137 ms and BERT-base in 355 instead of 399 ms;
loading ResNet-50 peaks at 17 instead of 163 MB, because the weights are mapped from the file and none is laid out anew.
Such a graph holds for the vector units and the version it was made with: both are recorded beside it, and ``load``
refuses others.
"""

import functools
import logging
import platform
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines import cuda_allocator
from enginesmith.pipeline.engines.base import (
    BuildRequest,
    Configuration,
    Engine,
    Fields,
    Message,
    PackageFacts,
    Profiled,
    ProfileRequest,
    TritonBackend,
    quoted,
    warm_up,
)
from enginesmith.pipeline.engines.compatibility import Check, check, check_driver, check_packages
from enginesmith.pipeline.engines.onnxruntime import profiler
from enginesmith.pipeline.engines.onnxruntime.session import (
    LEVELS,
    Level,
    OnnxRuntimeSession,
    disabled_optimizers,
    open_session,
    session_options,
)
from enginesmith.pipeline.errors import MissingCapability, install_command
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.passes.quantize.precisions import Placement
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.cpu import int8_weight_bits, vector_units
from enginesmith.pipeline.system.device import Availability, Device, unavailable
from enginesmith.pipeline.system.software import Formats, Stack, numbers, versions

if TYPE_CHECKING:
    from enginesmith.pipeline.engines.options import EngineOptions

_logger = logging.getLogger(__name__)
_MODEL, _RECORD, _TRACE = "model.onnx", "engine.json", "trace"
_TRITON_LEVELS = {"ORT_ENABLE_EXTENDED": 1, "ORT_ENABLE_BASIC": -1, "ORT_DISABLE_ALL": 2}
"""Levels of Triton's backend; all optimisations are on where none is given."""
_TENSORRT_OF_ONNXRUNTIME = 10
"""libnvinfer's major version that the TensorRT provider of onnxruntime-gpu is linked against (up to 1.31)."""
_CUDNN_OF_ONNXRUNTIME = 9


class _Record(BaseModel, frozen=True):
    """Record in ``engine.json`` what the graph beside it holds for."""

    onnxruntime: str
    processor: str
    device: str


class OnnxRuntime(Engine):
    """Run an ONNX graph; the outputs and inputs keep the model's names."""

    name: ClassVar[str] = "onnxruntime"
    consumes: ClassVar[Kind] = "onnx"
    title: ClassVar[str] = "ONNX Runtime"
    tools: ClassVar[tuple[str, ...]] = ("onnxruntime", "onnxruntime-gpu")
    reads: ClassVar[tuple[str, ...]] = ("onnxruntime",)
    placement: ClassVar[Placement] = "inputs+outputs"
    shows_graph: ClassVar[bool] = True
    loads_graph: ClassVar[bool] = True
    modules: ClassVar[tuple[str, ...]] = ("onnx", "onnx.checker", "onnxruntime", __name__)
    package_caution: ClassVar[str] = (
        "the package has the graph before ONNX Runtime's optimization; ONNX Runtime optimizes it again on the machine "
        "that loads it, so its speed there may differ from the run's"
    )
    only_running: ClassVar[frozenset[str]] = frozenset({"tf32"})

    graph_optimization: Level = "all"
    save_optimized: bool = True
    """Optimise in ``build`` and keep the result; otherwise the engine is the model itself, optimised at every load."""
    memory_arena: bool = True
    """Keep freed memory for the next call: faster, and the peak is somewhat higher."""
    tf32: bool = False
    """Let products of float32 be rounded to TF32's 10 bits, on CUDA; by itself ONNX Runtime does, without a word."""
    emulate: bool = False
    """Compute float16 and bfloat16 in float32 and round each value: slower, and near to what other hardware answers."""

    @classmethod
    def as_given(cls) -> Engine:
        return cls(graph_optimization="disabled")

    @classmethod
    def simulating(cls) -> Engine:
        """Run a graph without optimising it, half types and float8 emulated."""
        return cls(graph_optimization="disabled", emulate=True)

    @classmethod
    def configurations(cls, asked: "EngineOptions", precision: str) -> Iterator[Configuration]:
        for level in asked.graph_optimization:
            engine = cls(graph_optimization=level, tf32=asked.onnxruntime.tf32)
            yield Configuration(engine, precision, mode="" if level == "all" else level)

    @classmethod
    def running_options(cls, asked: "EngineOptions") -> dict[str, Any]:
        return {"tf32": asked.onnxruntime.tf32}

    def package_facts(self, main: Path, device: Device) -> PackageFacts:
        """List options by the names that onnxruntime has for them; ``session`` is for the session itself."""
        cuda_options = {"CUDAExecutionProvider": {"use_tf32": str(int(self.tf32))}} if device.kind == "cuda" else {}
        providers: dict[str, dict[str, str]] = {**cuda_options, "CPUExecutionProvider": {}}
        session = {
            "providers": list(providers),
            "provider_options": list(providers.values()),
            "disabled_optimizers": disabled_optimizers(main),
        }
        level = LEVELS[self.graph_optimization]
        options = {"graph_optimization_level": level, "intra_op_num_threads": device.threads, "session": session}
        return PackageFacts(options=options)

    @classmethod
    def from_package(cls, options: Mapping[str, Any]) -> Engine:
        """Take the optimisation level alone; the graph is optimised when it is loaded."""
        by_name = {value: key for key, value in LEVELS.items()}
        level = by_name.get(options.get("graph_optimization_level", ""), "all")
        return cls(graph_optimization=level, save_optimized=False)

    @classmethod
    def infer_script(cls) -> Path:
        return Path(__file__).parents[1] / "infer.py"

    @classmethod
    def triton(cls) -> TritonBackend:
        def remark(engine: Mapping[str, Any]) -> tuple[str, ...]:
            wrong = ", ".join(engine["options"]["session"]["disabled_optimizers"])
            told = f"optimization is off: {wrong} gets this graph wrong, and the backend cannot leave out one alone"
            return (told,) if wrong else ()

        return TritonBackend("onnxruntime", "model.onnx", configure=_configure_triton, remark=remark)

    @classmethod
    def check_software(cls, stack: Stack, exported: Formats) -> Iterator[Check]:
        yield from check_driver(stack, "onnxruntime-gpu", stack.onnxruntime_cuda)
        yield from _check_builds(stack)
        if stack.taken is None or stack.written is None:
            return
        taken, written = stack.taken, stack.written
        accepted = f"ONNX Runtime takes IR {taken.ir} and opset {taken.opset}"
        needed = f"IR {exported.ir} and opset {exported.opset}, for exported models"
        fits = taken.ir >= exported.ir and taken.opset >= exported.opset
        package = "onnxruntime-gpu" if "onnxruntime-gpu" in stack.versions else "onnxruntime"
        newest = f"the installed onnx writes up to IR {written.ir} and opset {written.opset}"
        ahead = written.opset > taken.opset or written.ir > taken.ir
        note = f"{newest}: such files open in tools and not in ONNX Runtime" if ahead else ""
        yield check("ONNX format", accepted, needed, fits, f"pip install --upgrade {package}", note)

    @classmethod
    def weight_bits(cls, device: Device) -> int:
        return int8_weight_bits() if device.kind == "cpu" else 8

    @classmethod
    def available(cls, device: Device) -> Availability:
        install = install_command("onnxruntime-gpu" if device.kind == "cuda" else "onnxruntime")
        try:
            import onnxruntime as ort
        except ImportError as error:
            return unavailable(f"onnxruntime cannot be imported: {error}", f"install it: {install}")
        if device.kind == "cpu":
            return Availability(ok=True)
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            remedy = f"replace it: pip uninstall onnxruntime; {install}"
            return unavailable("this onnxruntime is built without CUDA", remedy)
        return nvidia.available(device.index)

    def runnable(self, device: Device) -> Availability:
        availability = type(self).available(device)
        if not availability.ok or not self.tf32 or device.kind == "cuda":
            return availability
        return unavailable("TF32 is available on CUDA devices only", "use --device cuda")

    @property
    def arithmetic(self) -> str:
        return "tf32" if self.tf32 else "fp32"

    def environment_key(self, device: Device) -> dict[str, Any]:
        return _here(device).model_dump() if self._saves(device) else {}

    def build(self, request: BuildRequest) -> Effect:
        """Write ``model.onnx``, its weights beside it, and the record of what it was made for."""
        from enginesmith.pipeline.passes.sparsify import sparsify
        from enginesmith.pipeline.passes.sparsify.check import follow

        artifact, out, device = request.artifact, request.out, request.device
        self.require(device)
        if not self._saves(device):
            names = {artifact.path.name: _MODEL} | {name: name for name in model_file.external_files(artifact.path)}
            for name, copy in names.items():
                (out / copy).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(artifact.folder / name, out / copy)
            summary = f"the same graph; optimized at level {self.graph_optimization!r} at every load"
            return Effect(file=_MODEL, summary=summary, signature=artifact.signature)
        level, file, record = self.graph_optimization, out / _MODEL, _here(device)
        open_session(artifact.path, session_options(device, level, self.memory_arena, save_to=file), device)
        (out / _RECORD).write_text(record.model_dump_json(indent=1))
        old, new = (Counter(model_file.summary(path).operators) for path in (artifact.path, file))
        summary = f"optimized at level {level!r}: {old.total()} → {new.total()} nodes"
        if made := ", ".join(f"{count} {name}" for name, count in (new - old).most_common(4)):
            summary += f" (new: {made})"
        notes = [f"holds for processors with the same vector units, and onnxruntime {record.onnxruntime}"]
        if sparsify.of(model_file.skeleton(artifact.path)) == sparsify.TWO_OF_FOUR:
            zeros = follow(artifact.path, file)  # in weights that are repacked and fused: a loss is told, no failure
            notes.append(f"in the optimized graph, {zeros}; there are no sparse kernels for it here")
        return Effect(file=_MODEL, summary=summary, notes=tuple(notes), signature=artifact.signature)

    def _saves(self, device: Device) -> bool:
        """Tell whether the engine is the optimised graph; never on CUDA, where that may not load elsewhere."""
        wanted = self.save_optimized and self.graph_optimization != "disabled" and not self.emulate
        return wanted and device.kind == "cpu"

    def executed(self, artifact: Artifact, device: Device, scratch: Path) -> Path:
        """Give the engine itself where it is the optimised graph, else what a session makes of it when it is loaded."""
        if (artifact.folder / _RECORD).is_file():
            return artifact.path
        self.require(device)
        chosen = session_options(device, self.graph_optimization, memory_arena=False, save_to=scratch / _MODEL)
        open_session(artifact.path, chosen, device)
        return scratch / _MODEL

    def load(self, artifact: Artifact, device: Device) -> OnnxRuntimeSession:
        return self._open(artifact, device)

    def profile(self, request: ProfileRequest) -> Profiled:
        artifact, device, scratch = request.artifact, request.device, request.scratch
        saved = (artifact.folder / _RECORD).is_file()
        executed = artifact.path if saved else scratch / _MODEL
        with self._open(artifact, device, save_to=None if saved else executed, trace=scratch / _TRACE) as session:
            bound = warm_up(session, request.feeds)
            for _ in range(request.calls):
                session.enqueue(bound)
                session.synchronize()
            trace = session.end_trace()
        return profiler.profiled(profiler.read_trace(trace), executed, request.graph, on_cuda=device.kind == "cuda")

    def _open(
        self, artifact: Artifact, device: Device, save_to: Path | None = None, trace: Path | None = None
    ) -> OnnxRuntimeSession:
        self.require_runnable(device)
        level, path, file = self.graph_optimization, artifact.path, artifact.folder / _RECORD
        if file.is_file():
            level, record = "disabled", _Record.model_validate_json(file.read_bytes())
            for (field, made), (_, now) in zip(record, _here(device), strict=True):
                if made != now:
                    told = f"the engine was optimized for {field} {made!r}, and here it is {now!r}"
                    remedy = "build it here, or build a portable one with save_optimized: false"
                    raise MissingCapability(told, remedy)
        chosen = session_options(device, level, self.memory_arena, save_to, trace)
        stream: Any = None
        if device.kind == "cuda":  # ONNX Runtime shows no stream: it shares one of torch's with the clock
            import torch

            make = torch.cuda.default_stream if cuda_allocator.active(device.index) else torch.cuda.Stream
            stream = make(str(device))  # memory is counted on the default stream
        content = _emulated(path) if self.emulate else None
        session = open_session(path, chosen, device, stream and stream.cuda_stream, content, tf32=self.tf32)
        signature = artifact.signature or model_file.signature(path)
        return OnnxRuntimeSession(session, signature, device, stream, lambda: self.load(artifact, device))

    def prime(self, artifact: Artifact, device: Device) -> None:
        """Run a model of a few bytes, and read a record: the libraries are in then; thread pools belong to sessions."""
        import numpy as np
        from onnx import TensorProto, helper, save

        _Record.model_validate_json(_here(device).model_dump_json())
        value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 64]) for name in "xy"]
        graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"])], "prime", value[:1], value[1:])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, _MODEL)
            save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
            tiny = Artifact(kind="onnx", path=path, sha256="", bytes=0)
            with self.load(tiny, device) as session:
                session.run({"x": np.ones((64, 64), np.float32)})


def _emulated(path: Path) -> bytes | None:
    """Rewrite the graph, its weights still where they were; None if there is nothing to emulate in it."""
    import onnx_ir as ir

    from enginesmith.pipeline.frameworks.onnx import edit
    from enginesmith.pipeline.passes.float16.emulation import emulate

    model = edit.load(path)
    if not emulate(model):
        return None
    _logger.info("%s is emulated: float16 and bfloat16 are computed in float32, and each value is rounded", path.name)
    return bytes(ir.to_proto(model).SerializeToString())


@functools.cache
def _here(device: Device) -> _Record:
    """Record what a graph that is optimised here depends on; layouts follow the processor's vector units."""
    version = next(iter(versions(OnnxRuntime.tools).values()), "unknown")
    return _Record(onnxruntime=version, processor=" ".join((platform.machine(), *vector_units())), device=device.kind)


def _check_builds(stack: Stack) -> Iterator[Check]:
    names = [name for name in ("onnxruntime", "onnxruntime-gpu") if name in stack.versions]
    if len(names) > 1:
        fix = f"pip uninstall -y {' '.join(names)} && pip install {names[1] if stack.gpus else names[0]}"
        needed = "one of them: they overwrite each other"
        yield check("packages of ONNX Runtime", " and ".join(names), needed, False, fix)
    if "onnxruntime-gpu" not in names:
        return
    tensorrt = stack.versions.get("tensorrt")
    if tensorrt and numbers(tensorrt)[0] != _TENSORRT_OF_ONNXRUNTIME:
        needed, theirs = f"libnvinfer {_TENSORRT_OF_ONNXRUNTIME}", f"'tensorrt=={_TENSORRT_OF_ONNXRUNTIME}.*'"
        note = f"not used here, where TensorRT builds engines itself; other programs: pip install {theirs}"
        yield check("TensorRT provider of onnxruntime-gpu", f"tensorrt {tensorrt}", needed, None, note=note)
    if stack.onnxruntime_cuda is None:
        why = "the package does not say which CUDA it is built for"
        yield check("CUDA libraries of onnxruntime-gpu", "unknown", "unknown", None, note=why)
        return
    # the metadata names the libraries under two extras; torch may bring the same ones
    fix = f"pip install 'onnxruntime-gpu[cuda,cudnn]=={stack.versions['onnxruntime-gpu']}'"
    asked = [need for need in stack.requirements.get("onnxruntime-gpu", ()) if need.extra in ("cuda", "cudnn")]
    major = numbers(stack.onnxruntime_cuda)[0]
    if stack.torch_cuda:
        builds = f"{stack.torch_cuda} and {stack.onnxruntime_cuda}"
        same = numbers(stack.torch_cuda)[0] == major
        needed, other = "the same major version, to share libraries", f"a torch that is built for CUDA {major}"
        yield check("CUDA of torch and onnxruntime-gpu", builds, needed, same, f"{fix}; or {other}")
    if asked and f"libcudart.so.{major}" not in stack.loadable:
        yield check_packages(stack, "CUDA libraries of onnxruntime-gpu", asked, fix)
    fits = stack.cudnn is not None and numbers(stack.cudnn)[0] == _CUDNN_OF_ONNXRUNTIME
    package = f"pip install 'nvidia-cudnn-cu{major}=={_CUDNN_OF_ONNXRUNTIME}.*'"
    yield check("cuDNN", stack.cudnn or "not found", f"{_CUDNN_OF_ONNXRUNTIME}.x", fits, package)


def _configure_triton(options: Mapping[str, Any], device: str) -> Fields:
    """Set the optimisation level, the CUDA accelerator and the threads, as the backend's README has them."""
    left_out = options["session"]["disabled_optimizers"]
    level = _TRITON_LEVELS.get("ORT_DISABLE_ALL" if left_out else options["graph_optimization_level"])
    inner: Fields = [] if level is None else [("graph", Message([("level", level)]))]
    if device == "cuda":
        given = options["session"]["provider_options"][0]
        parameters = [("parameters", Message([("key", quoted(k)), ("value", quoted(v))])) for k, v in given.items()]
        cuda = Message([("gpu_execution_accelerator", Message([("name", quoted("cuda")), *parameters]))])
        inner.append(("execution_accelerators", cuda))
    fields: Fields = [("optimization", Message(inner))] if inner else []
    threads = {"intra_op_thread_count": options["intra_op_num_threads"], "inter_op_thread_count": 1}
    for key, number in threads.items():
        value = Message([("string_value", quoted(str(number)))])
        fields.append(("parameters", Message([("key", quoted(key)), ("value", value)])))
    return fields
