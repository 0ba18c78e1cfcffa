"""Build and run ONNX Runtime's two TensorRT providers, each an engine of its own.

A provider takes the parts of a graph that TensorRT can run, and builds an engine of each; other providers run the rest.
``build`` has ONNX Runtime write those engines into a context file: the graph, with a node (``EPContext``) in place of
each part. The TensorRT provider can do so only if it takes the whole graph; otherwise the graph itself is kept, and the
engines in a folder beside it. That folder also has kernels that TensorRT-RTX compiles on the GPU. Sessions write there,
so they get a copy of it.

Nothing here has run on a GPU yet.
"""

import gc
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from enginesmith.pipeline.artifact import Artifact, Effect, copy_folder
from enginesmith.pipeline.engines import cuda_allocator
from enginesmith.pipeline.engines.base import BuildRequest, Configuration, Engine, PackageFacts
from enginesmith.pipeline.engines.onnxruntime import providers
from enginesmith.pipeline.engines.onnxruntime.engine import RECORD_NODES, OnnxRuntime, count_nodes
from enginesmith.pipeline.engines.onnxruntime.providers import Provider
from enginesmith.pipeline.engines.onnxruntime.session import OnnxRuntimeSession, open_session, session_options
from enginesmith.pipeline.engines.profiling import Profiled, ProfileRequest
from enginesmith.pipeline.errors import MissingCapability, ModelError, install_command
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.records import describe_fallback
from enginesmith.pipeline.passes.quantize.precisions import Placement, Quantizer
from enginesmith.pipeline.store.address import default_address
from enginesmith.pipeline.system import nvidia, software
from enginesmith.pipeline.system.device import Availability, Device, unavailable
from enginesmith.pipeline.tensors import Point, ShapeRange, Signature

if TYPE_CHECKING:
    from enginesmith.pipeline.engines.options import EngineOptions

_MODEL, _RECORD, CACHE = "model.onnx", "context.json", "cache"
_EMBEDDED_BYTES = 1 << 30
"""Size of a graph from which engines lie beside the context file: a protobuf file has at most 2 GiB."""
_POINTS: tuple[Point, ...] = ("min", "max", "opt")
_PRECISION_FLAGS = {"float16": "trt_fp16_enable", "bfloat16": "trt_bf16_enable"}
_INT8, _CACHED = "trt_int8_enable", "trt_engine_cache_enable"
_SHAPES = re.compile(r"(trt|nv)_profile_(min|max|opt)_shapes")


class _Record(BaseModel, frozen=True):
    """Record in ``context.json`` what the file beside it was built for, and with."""

    versions: dict[str, str]
    """Versions of ONNX Runtime and of the libraries that build and run the engines, by name."""
    compute_capability: str
    driver: int | None
    context: bool
    """True if the file holds the engines; False if it is the graph."""
    options: dict[str, str]
    """Options of the provider that loading needs, too."""
    assigned: dict[str, dict[str, int]]


class OnnxRuntimeTensorRT(OnnxRuntime):
    """Run an ONNX graph by the TensorRT provider of onnxruntime-gpu; the CUDA provider takes what it does not."""

    name: ClassVar[str] = "onnxruntime_tensorrt"
    title: ClassVar[str] = "ONNX Runtime's TensorRT provider"
    provider: ClassVar[Provider] = providers.TENSORRT
    tools: ClassVar[tuple[str, ...]] = ("onnxruntime-gpu", "tensorrt")
    reads: ClassVar[tuple[str, ...]] = ("onnxruntime", "workspace")
    placement: ClassVar[Placement] = "inputs"
    quantizers: ClassVar[tuple[Quantizer, ...]] = ("own", "qat")
    packages: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    modules: ClassVar[tuple[str, ...]] = ("onnx", "onnx.checker", "onnxruntime", __name__)
    kinds: ClassVar[tuple[str, ...]] = ("cuda",)
    times_kernels: ClassVar[bool] = True
    needs_shapes: ClassVar[bool] = True
    shows_graph: ClassVar[bool] = False
    loads_graph: ClassVar[bool] = False
    package_caution: ClassVar[str] = ""

    workspace_bytes: int | None = None
    """Most memory that a kernel may take to work in, while engines are built."""

    @classmethod
    def replays_graphs(cls) -> bool:
        """Tell that it does not: it would capture the parts that TensorRT runs by itself."""
        return False

    @classmethod
    def configurations(cls, options: "EngineOptions", precision: str) -> Iterator[Configuration]:
        """Yield its variants, with each workspace; a sweep is for TensorRT itself, and left out here."""
        requested_limits = dict(zip(options.workspace, options.workspace_limits, strict=True))
        limits = {word: limit for word, limit in requested_limits.items() if limit != "sweep"} or {"": None}
        for config in super().configurations(options, precision):
            for word, limit in limits.items():
                engine = config.engine.model_copy(update={"workspace_bytes": limit})
                yield Configuration(engine, precision, workspace=word, mode=config.mode)

    @classmethod
    def installed(cls, device: Device) -> Availability:
        if device.kind not in cls.kinds:
            return unavailable("it runs on CUDA only", "use --device cuda")
        answer = super().installed(device)
        return cls._provided(device) if answer.ok else answer

    @classmethod
    def _provided(cls, device: Device) -> Availability:
        """Tell whether TensorRT is there in the version that onnxruntime-gpu is linked against."""
        here, major = software.version("tensorrt"), providers.TENSORRT_MAJOR
        if here and software.numbers(here)[0] == major:
            return Availability(ok=True)
        install = install_command("onnxruntime-gpu", f"tensorrt=={major}.*")
        if here:
            reason = f"onnxruntime-gpu needs TensorRT {major} and {here} is installed: one environment has one of them"
            return unavailable(reason, f"in another environment: {install}")
        if software.loads(f"libnvinfer.so.{major}"):
            return Availability(ok=True)
        return unavailable(f"TensorRT {major} (libnvinfer.so.{major}) is not installed", f"install it: {install}")

    @classmethod
    def triton(cls) -> None:
        """Return None: which context files Triton's backend loads has not been tried."""

    def reproduce(self, device: Device) -> str:
        """Return nothing: the options of its session follow the graph."""
        return ""

    @property
    def _options(self) -> dict[str, str]:
        chosen = dict(text.split("=", 1) for text in self.provider_options)
        if self.workspace_bytes:
            chosen[f"{self.provider.prefix}_max_workspace_size"] = str(self.workspace_bytes)
        return chosen

    @property
    def arithmetic(self) -> str:
        """Round to TF32: TensorRT does by default, and the providers have no option for it."""
        return "tf32"

    def _providers(self, device: Device, stream: int | None = None) -> list[tuple[str, dict[str, str]]]:
        return providers.session_providers(self.provider, device, self._options, stream)

    def environment_key(self, device: Device) -> dict[str, Any]:
        return nvidia.describe_device(device.index)

    def build(self, request: BuildRequest) -> Effect:
        """Write the context file, or the graph where ONNX Runtime writes none, and a record of what it was made for.

        Raises:
            MissingCapability: the device or a library is not here.
            ModelError: the provider takes no part of the graph.
        """
        artifact, out, device = request.artifact, request.out, request.device
        self.require(device)
        given = {
            **_shape_options(self.provider, artifact.model_signature, request.ranges),
            **self._precision(artifact.path),
        }
        dump, entries = self._context_options(out / _MODEL, embedded=artifact.bytes < _EMBEDDED_BYTES)
        request.progress(f"{self.title} builds engines")
        session = self._session(artifact.path, device, given | dump, entries | {RECORD_NODES: "1"})
        parts = session.get_provider_graph_assignment_info()
        assigned, engines = count_nodes(parts, [self.provider.name]), [part.ep_name for part in parts]
        del session, parts  # two at a time may not fit on the GPU
        if not assigned[self.provider.name]:
            raise ModelError(f"{self.title} takes no part of this graph", "use onnxruntime or TensorRT itself")
        if written := _is_whole(out / _MODEL, artifact.model_signature):
            given = {}
        else:
            for file in out.iterdir():  # of one part alone
                file.unlink()
            model_file.copy(artifact.path, out / _MODEL)
            given |= {} if self.provider.plugin else {_CACHED: "True"}
        if given or self.provider.plugin:
            (out / CACHE).mkdir()
            self._session(out / _MODEL, device, {**given, self.provider.cache: str(out / CACHE)}, {})
            gc.collect()  # it may write when it is closed
        here = nvidia.cuda_device(device.index)
        record = _Record(
            versions=software.versions(self.tools),
            compute_capability=here.target if here else "unknown",
            driver=nvidia.driver().version,
            context=written,
            options=given,
            assigned=assigned,
        )
        (out / _RECORD).write_text(record.model_dump_json(indent=1), encoding="utf-8")
        count = sum(assigned[self.provider.name].values())
        form = "kept in a context file" if written else "kept in a folder beside the graph"
        if not written and not any((out / CACHE).iterdir()):
            form = "built again at every load: ONNX Runtime wrote no file"
        summary = f"{count} nodes in {engines.count(self.provider.name)} TensorRT engines, {form}"
        rest = describe_fallback(assigned)
        return Effect(file=_MODEL, summary=summary, notes=(rest,) if rest else (), signature=artifact.model_signature)

    def _context_options(self, file: Path, *, embedded: bool) -> tuple[dict[str, str], dict[str, str]]:
        """List the provider's options and the session's entries that have engines written into a context file."""
        settings = {"file_path": str(file), "embed_mode": str(int(embedded))}
        if self.provider.plugin:
            return {}, {"ep.context_enable": "1", **{f"ep.context_{name}": text for name, text in settings.items()}}
        options = {"trt_dump_ep_context_model": "True", **{f"trt_ep_context_{k}": text for k, text in settings.items()}}
        # engines that are not embedded are those of its cache, which is the folder of the context file then
        return options | ({} if embedded else {_CACHED: "True"}), {}

    def _session(self, path: Path, device: Device, given: Mapping[str, str], entries: Mapping[str, str]) -> Any:
        """Open a session that builds what it lacks; TensorRT keeps times of kernels.

        Its file of them is named by the compute capability, which several models of GPU have: each gets a folder.
        """
        if not self.provider.plugin:
            here = nvidia.cuda_device(device.index)
            timing = default_address().folder / "timing" / self.name / (here.file_stem if here else "unknown")
            timing.mkdir(parents=True, exist_ok=True)
            given = {**given, "trt_timing_cache_enable": "True", "trt_timing_cache_path": str(timing)}
        chosen = session_options(device, self.graph_optimization, self.memory_arena)
        for name, value in entries.items():
            chosen.add_session_config_entry(name, value)
        listed = providers.session_providers(self.provider, device, {**self._options, **given})
        return open_session(path, chosen, device, listed)

    def _precision(self, path: Path) -> dict[str, str]:
        """Allow the types that are in the graph: the provider builds weakly typed engines, in float32 by default."""
        summary = model_file.summary(path)
        flags = {flag: "True" for dtype, flag in _PRECISION_FLAGS.items() if dtype in summary.weight_dtypes}
        return flags | ({_INT8: "True"} if "QuantizeLinear" in summary.operators else {})

    def profile(self, request: ProfileRequest) -> Profiled:
        raise MissingCapability(f"{self.title} does not time the layers within its engines", "profile TensorRT itself")

    def package_facts(self, main: Path, device: Device) -> PackageFacts:
        record = _read_record(main.parent)
        facts = self._with(record).options_of_package(main, device)
        cache = self.provider.cache if (main.parent / CACHE).is_dir() else ""
        extra = {"imports": list(self.provider.imports), "plugin": self.provider.plugin, "cache": cache}
        return PackageFacts(targets=(record.compute_capability,), options={**facts, **extra}, module="onnxruntime")

    def _with(self, record: _Record) -> "OnnxRuntimeTensorRT":
        """Copy the engine with the options that loading what was built needs, too."""
        texts = (f"{name}={value}" for name, value in record.options.items())
        return self.model_copy(update={"provider_options": (*self.provider_options, *texts)})

    @classmethod
    def from_package(cls, main: Path, options: Mapping[str, Any]) -> Engine:
        return cls(provider_options=providers.packaged_settings(cls.provider, options))

    def load(self, artifact: Artifact, device: Device) -> OnnxRuntimeSession:
        """Open a session; its memory is not counted, as TensorRT takes it past every allocator that we could give."""
        self.require_runnable(device)
        if cuda_allocator.active(device.index):
            message = f"{self.title} takes its memory by itself, where it is not counted"
            raise MissingCapability(message, "look at what the deployment takes of the GPU")
        record = _read_record(artifact.folder)
        here, versions = nvidia.cuda_device(device.index), software.versions(self.tools)
        wrong = [name for name, built_with in record.versions.items() if versions.get(name) != built_with]
        if (here and here.target != record.compute_capability) or wrong:
            built_with = ", ".join(f"{name} {version}" for name, version in record.versions.items())
            message = (
                f"the engines are built for {record.compute_capability} with {built_with}, which is not what is here"
            )
            raise MissingCapability(message, "build them here")
        if not (artifact.folder / CACHE).is_dir():
            return self._with(record)._open(artifact, device)
        copy = tempfile.mkdtemp(prefix="enginesmith-cache-")
        copy_folder(artifact.folder / CACHE, Path(copy))
        record.options[self.provider.cache] = copy
        session = self._with(record)._open(artifact, device)
        weakref.finalize(session, shutil.rmtree, copy, ignore_errors=True)
        return session

    def prime(self, artifact: Artifact, device: Device) -> None:
        """Start CUDA and ONNX Runtime; the engines' libraries come with the session."""
        OnnxRuntime().prime(artifact, device)


class OnnxRuntimeTensorRTRTX(OnnxRuntimeTensorRT):
    """Run an ONNX graph by NVIDIA's plug-in for ONNX Runtime that has TensorRT-RTX; the CPU takes what it does not."""

    name: ClassVar[str] = "onnxruntime_tensorrt_rtx"
    title: ClassVar[str] = "ONNX Runtime's TensorRT-RTX provider"
    provider: ClassVar[Provider] = providers.TENSORRT_RTX
    tools: ClassVar[tuple[str, ...]] = ("onnxruntime-gpu", "onnxruntime-ep-nv-tensorrt-rtx-cu13")

    @classmethod
    def _provided(cls, device: Device) -> Availability:
        """Tell whether the plug-in is installed, and the GPU new enough for it."""
        if not software.find(cls.provider.plugin):
            install = install_command("onnxruntime-gpu", "onnxruntime-ep-nv-tensorrt-rtx")
            reason = "NVIDIA's plug-in for ONNX Runtime is not installed, and onnxruntime-gpu has no such provider"
            return unavailable(reason, f"install it: {install}")
        here = nvidia.cuda_device(device.index)
        capability = here.compute_capability if here else providers.RTX_SINCE
        if here and capability < providers.RTX_SINCE and capability not in providers.RTX_TARGETS:
            needed = "compute capability 8.6, 8.9, or 12.0 and newer"
            return unavailable(f"it needs {needed}, and {device} is {here.target}", "use onnxruntime")
        return Availability(ok=True)

    def _precision(self, path: Path) -> dict[str, str]:
        """List nothing: its engines are strongly typed."""
        return {}


def _is_whole(file: Path, signature: Signature) -> bool:
    """Tell whether a context file was written for the whole graph: that of a part has other inputs or outputs."""
    file_signature = model_file.signature(file) if file.is_file() else None
    sides = (
        ((file_signature.inputs, signature.inputs), (file_signature.outputs, signature.outputs))
        if file_signature
        else ()
    )
    return file_signature is not None and all(
        {spec.name for spec in ours} == {spec.name for spec in own} for ours, own in sides
    )


def _shape_options(provider: Provider, signature: Signature, ranges: Mapping[str, ShapeRange]) -> dict[str, str]:
    """Write the ranges of dynamic inputs as the provider reads them: ``x:1x64,ids:1x128``."""
    dynamic = [spec for spec in signature.inputs if any(isinstance(size, str) for size in spec.shape)]
    options = {}
    for point in _POINTS if dynamic else ():
        sizes = {name: span.at(point) for name, span in ranges.items()}
        shapes = (f"{spec.name}:{'x'.join(map(str, spec.resolve(sizes)))}" for spec in dynamic)
        options[f"{provider.prefix}_profile_{point}_shapes"] = ",".join(shapes)
    return options


def _read_record(folder: Path) -> _Record:
    """Read the record of what was built; other options than those that ``build`` writes may load libraries."""
    try:
        record = _Record.model_validate_json((folder / _RECORD).read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / _RECORD} is missing or damaged", "build the engine again") from error
    known = {*_PRECISION_FLAGS.values(), _INT8, _CACHED}
    if other := next((name for name in record.options if name not in known and not _SHAPES.fullmatch(name)), None):
        message = f"{folder / _RECORD} has the option {other}, which enginesmith does not write"
        raise ModelError(message, "build the engine again")
    return record
