"""Build and run engines of ONNX Runtime, on its CPU or CUDA provider.

By default the engine file is the graph that ONNX Runtime makes of the model, optimized once in ``build``. Against
optimizing at every load (2 cores), ResNet-50 then loads in 18 instead of 137 ms and BERT-base in 355 instead of 399 ms;
loading ResNet-50 peaks at 17 instead of 163 MB, because the weights are mapped from the file and none is laid out anew.
Such a graph holds for the vector units and the version it was made with: both are recorded beside it, and ``load``
refuses others.
"""

import functools
import logging
import platform
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines import cuda_allocator
from enginesmith.pipeline.engines.base import BuildRequest, Configuration, Engine, PackageFacts
from enginesmith.pipeline.engines.compatibility import Check, check, check_driver, check_packages
from enginesmith.pipeline.engines.onnxruntime import profiler, providers
from enginesmith.pipeline.engines.onnxruntime.optimizers import (
    OPTIMIZERS,
    SLOW_ON_CPU,
    disabled_optimizers,
    find_wrong_optimizers,
    quantizes_weights_alone,
)
from enginesmith.pipeline.engines.onnxruntime.providers import Provider
from enginesmith.pipeline.engines.onnxruntime.session import (
    ACCURACY,
    FLOATS,
    INT8,
    LEVELS,
    SPINNING,
    THREADS,
    GraphedOnnxRuntimeSession,
    Level,
    OnnxRuntimeSession,
    counted_options,
    open_session,
    session_options,
)
from enginesmith.pipeline.engines.profiling import Profiled, ProfileRequest
from enginesmith.pipeline.engines.triton import Fields, Message, TritonBackend, quoted
from enginesmith.pipeline.errors import MissingCapability, UsageError, install_command
from enginesmith.pipeline.frameworks.onnx import edit, ir, model_file
from enginesmith.pipeline.passes.float16.emulation import emulate
from enginesmith.pipeline.passes.quantize.precisions import Placement, Quantizer
from enginesmith.pipeline.system import cpu, nvidia, software
from enginesmith.pipeline.system.cpu import int8_weight_bits, vector_units
from enginesmith.pipeline.system.device import Availability, Device, unavailable
from enginesmith.pipeline.system.software import Formats, Stack, numbers, versions
from enginesmith.pipeline.units import AddedOption

if TYPE_CHECKING:
    from onnxruntime import OrtEpAssignedSubgraph

    from enginesmith.pipeline.engines.options import EngineOptions

_logger = logging.getLogger(__name__)
_MODEL, _RECORD, _TRACE = "model.onnx", "engine.json", "trace"
_TRITON_LEVELS = {"ORT_ENABLE_EXTENDED": 1, "ORT_ENABLE_BASIC": -1, "ORT_DISABLE_ALL": 2}
"""Levels of Triton's backend; all optimizations are on where none is given."""
_WEIGHTS_ALONE = "int4-weights"
_CUDNN_OF_ONNXRUNTIME = 9
_GRAPHS = "enable_cuda_graph"
RECORD_NODES = "session.record_ep_graph_assignment_info"
"""Entry of a session's options that has it record which provider runs each node."""
_NO_INT8 = (
    "ONNX Runtime has no int8 kernels for Q/DQ graphs on CUDA: it dequantizes, computes in float, quantizes again"
)


_REPRODUCE = """
import onnxruntime

{start}options = onnxruntime.SessionOptions()
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.{level}
options.add_session_config_entry("{entry}", "{accuracy}")
providers = {listed}
session = onnxruntime.InferenceSession(MODEL, options, providers=providers, disabled_optimizers={without})
if session.get_providers()[0] != providers[0][0]:
    raise ImportError("onnxruntime would run it on another device")
found = dict(zip(OUTPUTS, session.run(OUTPUTS, {{name: inputs[name] for name in INPUTS}})))
"""


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
    provider: ClassVar[Provider] = providers.CUDA
    """The execution provider that it runs on, on CUDA."""
    reads: ClassVar[tuple[str, ...]] = ("onnxruntime", "tune_seconds")
    placement: ClassVar[Placement] = "inputs+outputs"
    quantizers: ClassVar[tuple[Quantizer, ...]] = ("own", "nncf", "qat")
    shows_graph: ClassVar[bool] = True
    loads_graph: ClassVar[bool] = True
    has_infer_script: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("onnx", "onnxruntime")
    modules: ClassVar[tuple[str, ...]] = ("onnx", "onnx.checker", "onnxruntime", __name__)
    replays_in: ClassVar[tuple[str, ...]] = ("bundle",)
    package_caution: ClassVar[str] = (
        "the package has the graph before ONNX Runtime's optimization; ONNX Runtime optimizes it again on the machine "
        "that loads it, so its speed there may differ from the run's; loading it takes more memory than was measured, "
        "by up to the size of its weights"
    )
    only_running: ClassVar[frozenset[str]] = frozenset({"tf32", "cuda_graphs", "session_options"})

    graph_optimization: Level = "all"
    save_optimized: bool = True
    """Optimize in ``build`` and keep the result; otherwise the engine is the model itself, optimized at every load."""
    memory_arena: bool = True
    """Keep freed memory for the next call: faster, and the peak is somewhat higher."""
    tf32: bool = False
    """Let products of float32 be rounded to TF32's 10 bits, on CUDA; by itself ONNX Runtime does, without a word."""
    provider_options: tuple[str, ...] = ()
    """Options of the provider on CUDA that are not its defaults: ``prefer_nhwc=1``."""
    session_options: tuple[str, ...] = ()
    """Options of the session on the CPU that are not its defaults: ``session.intra_op.allow_spinning=0``."""
    without: tuple[str, ...] = ()
    """Optimizations that are left out, by ONNX Runtime's names: those that get the model wrong."""
    int8_activations: bool = False
    """Let fused products whose weights alone are quantized, as in int4, round their activations to int8, by blocks."""
    cuda_graphs: bool = False
    """Replay each bound set of feeds as a CUDA graph: one launch instead of one for each node."""
    emulate: bool = False
    """Compute float16 and bfloat16 in float32 and round each value: slower, and near to what other hardware answers."""

    @classmethod
    def as_given(cls) -> Engine:
        return cls(graph_optimization="disabled")

    @classmethod
    def simulating(cls) -> Engine:
        """Run a graph without optimizing it, half types and float8 emulated."""
        return cls(graph_optimization="disabled", emulate=True)

    def describe_plain_use(self, graph: Path) -> str:
        wrong = ", ".join(find_wrong_optimizers(graph))
        where = "ONNX Runtime may get this graph wrong where it runs without enginesmith"
        return f"{where}; pass disabled_optimizers to its session: {wrong}" if wrong else ""

    @classmethod
    def configurations(cls, options: "EngineOptions", precision: str) -> Iterator[Configuration]:
        settings = providers.parse_settings(options.onnxruntime.provider_options, options.engines)
        for level in options.graph_optimization:
            for chosen, word in providers.combine_settings(cls.provider, settings):
                engine = cls(
                    graph_optimization=level,
                    tf32=options.onnxruntime.tf32,
                    provider_options=chosen,
                    without=options.onnxruntime.disabled_optimizers,
                )
                mode = "-".join(filter(None, ("" if level == "all" else level, word)))
                yield Configuration(engine, precision, mode=mode)
                if precision == _WEIGHTS_ALONE and options.where.kind == "cpu" and level in ("extended", "all"):
                    faster = engine.model_copy(update={"int8_activations": True})
                    yield Configuration(faster, precision, mode="-".join(filter(None, (mode, "int8-activations"))))

    @classmethod
    def candidate_precisions(cls, device: Device) -> tuple[str, ...]:
        return ("fp32", "fp16") if device.kind == "cuda" else ("fp32", "int8", "int8-dynamic")

    @classmethod
    def candidate_quantizers(cls, device: Device) -> tuple[Quantizer, ...]:
        """Leave out NNCF where there is VNNI: in 24 of 24 searches there, its graph was not the fastest."""
        return cls.quantizers if int8_weight_bits() < 8 else ("own", "qat")

    @classmethod
    def check_options(cls, options: "EngineOptions") -> None:
        settings = providers.parse_settings(options.onnxruntime.provider_options, options.engines)
        own = [name for name in settings if name in cls.provider.settings]
        if own and "cpu" in cls.kinds and options.where.kind == "cpu":
            message = f"--ort-option {own[0]} is an option of {cls.provider.name}, and the device is cpu"
            raise UsageError(message, "omit it, or use --device cuda")

    @classmethod
    def running_options(cls, options: "EngineOptions") -> dict[str, Any]:
        return {"tf32": options.onnxruntime.tf32}

    @classmethod
    def restore_options(cls, record: Mapping[str, Any], *, trust: bool = False) -> dict[str, Any]:
        """Leave out options of the provider that no recipe can set: they may load libraries."""
        options, texts = super().restore_options(record, trust=trust), record.get("provider_options")
        if isinstance(texts, list | tuple):
            given = dict(text.split("=", 1) for text in texts if isinstance(text, str) and "=" in text)
            options["provider_options"] = providers.known_settings(cls.provider, given)
        return options

    def package_facts(self, main: Path, device: Device) -> PackageFacts:
        return PackageFacts(options=self.options_of_package(main, device))

    def options_of_package(self, main: Path, device: Device) -> dict[str, Any]:
        """List options by the names that onnxruntime has for them; ``session`` is for the session itself."""
        listed = dict(providers.session_providers(self.provider, device, self._options))
        for options in listed.values():
            options.pop("device_id", None)  # of the machine that packages it
        session = {
            "providers": list(listed),
            "provider_options": list(listed.values()),
            "disabled_optimizers": [*disabled_optimizers(main, device), *self.without],
        }
        tuned = self._tuned_session
        accuracy = {ACCURACY: self._accuracy} if quantizes_weights_alone(main) else {}
        return {
            "graph_optimization_level": LEVELS[self.graph_optimization],
            THREADS: int(tuned.get(THREADS, device.threads)),
            "config_entries": {name: value for name, value in tuned.items() if name != THREADS} | accuracy,
            "session": session,
        }

    @property
    def _accuracy(self) -> str:
        return INT8 if self.int8_activations else FLOATS

    @property
    def _tuned_session(self) -> dict[str, str]:
        return dict(text.split("=", 1) for text in self.session_options)

    @classmethod
    def from_package(cls, main: Path, options: Mapping[str, Any]) -> Engine:
        """Take the optimization level and known options; the graph is optimized when it is loaded."""
        by_name = {value: key for key, value in LEVELS.items()}
        level = by_name.get(options.get("graph_optimization_level", ""), "all")
        given = providers.packaged_settings(cls.provider, options)
        entries = {THREADS: options.get(THREADS) or None, SPINNING: options.get("config_entries", {}).get(SPINNING)}
        tuned = tuple(f"{name}={value}" for name, value in entries.items() if value is not None)
        left_out = tuple(options.get("session", {}).get("disabled_optimizers", ()))
        accuracy = options.get("config_entries", {}).get(ACCURACY)
        if accuracy is None and quantizes_weights_alone(main):  # an older package, whose run used the default
            accuracy = INT8
        return cls(
            graph_optimization=level,
            save_optimized=False,
            provider_options=given,
            session_options=tuned,
            without=left_out,
            int8_activations=accuracy == INT8,
        )

    @classmethod
    def triton(cls) -> TritonBackend | None:
        def remark(engine: Mapping[str, Any]) -> tuple[str, ...]:
            wrong = ", ".join(_list_wrong(engine["options"]))
            off = f"optimization is off: this graph needs it for {wrong}, and the backend cannot leave out single ones"
            graphs = (
                "no CUDA graphs, which the run had: each request has buffers of its own, and a graph has fixed ones"
            )
            replayed = any(_GRAPHS in given for given in engine["options"]["session"]["provider_options"])
            spins = "threads spin between operators, which the run had switched off: the backend has no option for it"
            entries = engine["options"].get("config_entries", {})
            basic = (
                "optimization is at its basic level, which dequantizes weights at each request: the backend cannot set "
                f"{ACCURACY}, and at higher levels products round their activations to int8 without it"
            )
            told = {off: wrong, graphs: replayed, spins: entries.get(SPINNING) == "0"}
            told[basic] = not wrong and entries.get(ACCURACY) == FLOATS
            return tuple(text for text, applies in told.items() if applies)

        return TritonBackend("onnxruntime", "model.onnx", configure=_configure_triton, remark=remark)

    @classmethod
    def check_software(cls, stack: Stack, exported: Formats | None) -> Iterator[Check]:
        yield from check_driver(stack, "onnxruntime-gpu", stack.onnxruntime_cuda)
        yield from _check_builds(stack)
        if stack.taken is None or stack.written is None or exported is None:
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
        if not (answer := cls.installed(device)).ok:
            return answer
        return software.check_import("onnxruntime")

    @classmethod
    def installed(cls, device: Device) -> Availability:
        folder = software.find("onnxruntime")
        if folder is None:
            return unavailable("onnxruntime is not installed", f"install it: {_install(device)}")
        if device.kind == "cpu":
            return Availability(ok=True)
        if not any(folder.glob("capi/*onnxruntime_providers_cuda.*")):
            remedy = f"replace it: pip uninstall onnxruntime; {_install(device)}"
            return unavailable("this onnxruntime is built without CUDA", remedy)
        return nvidia.available(device.index)

    def runnable(self, device: Device) -> Availability:
        availability = type(self).available(device)
        settings = {"TF32": self.tf32, "CUDA graphs": self.cuda_graphs, "provider options": self.provider_options}
        features = ", ".join(name for name, value in settings.items() if value)
        if not availability.ok or not features or device.kind == "cuda":
            return availability
        return unavailable(f"{features}: available on CUDA devices only", "use --device cuda")

    @property
    def _options(self) -> dict[str, str]:
        """Options of the provider on CUDA, by ONNX Runtime's names."""
        chosen = dict(text.split("=", 1) for text in self.provider_options)
        graphs = {_GRAPHS: "1"} if self.cuda_graphs else {}
        return {"use_tf32": str(int(self.tf32)), **chosen, **graphs}

    def _providers(self, device: Device, stream: int | None = None) -> list[tuple[str, dict[str, str]]]:
        """List a session's providers; one whose memory is counted uses the default stream, and no graph."""
        counted = counted_options(device.index) if device.kind == "cuda" else {}
        options = {**self._options, **counted}
        if counted:
            options.pop(_GRAPHS, None)
        return providers.session_providers(self.provider, device, options, None if counted else stream)

    @property
    def arithmetic(self) -> str:
        return "int8" if self.int8_activations else "tf32" if self.tf32 else "fp32"

    def environment_key(self, device: Device) -> dict[str, Any]:
        return _here(device).model_dump() if self._saves(device) else {}

    def build(self, request: BuildRequest) -> Effect:
        """Write ``model.onnx``, its weights beside it, and the record of what it was made for."""
        artifact, out, device = request.artifact, request.out, request.device
        self.require(device)
        if not self._saves(device):
            model_file.copy(artifact.path, out / _MODEL)
            summary = f"the same graph; optimized at level {self.graph_optimization!r} at every load"
            notes = []
            if device.kind == "cuda" and "QuantizeLinear" in model_file.summary(artifact.path).operators:
                summary, notes = f"{summary}; {_NO_INT8}", [f"{_NO_INT8}; TensorRT has kernels for such graphs"]
            return Effect(file=_MODEL, summary=summary, notes=tuple(notes), signature=artifact.signature)
        level, file, record = self.graph_optimization, out / _MODEL, _here(device)
        chosen = session_options(device, level, self.memory_arena, save_to=file, accuracy=self._accuracy)
        open_session(artifact.path, chosen, device, without=self.without)
        (out / _RECORD).write_text(record.model_dump_json(indent=1), encoding="utf-8")
        old, new = (Counter(model_file.summary(path).operators) for path in (artifact.path, file))
        summary = f"optimized at level {level!r}: {old.total()} → {new.total()} nodes"
        if additions := ", ".join(f"{count} {name}" for name, count in (new - old).most_common(4)):
            summary += f" (new: {additions})"
        note = f"holds for processors with the same vector units, and onnxruntime {record.onnxruntime}"
        return Effect(file=_MODEL, summary=summary, notes=(note,), signature=artifact.signature)

    def _saves(self, device: Device) -> bool:
        """Tell whether the engine is the optimized graph; never on CUDA, where that may not load elsewhere."""
        wanted = self.save_optimized and self.graph_optimization != "disabled" and not self.emulate
        return wanted and device.kind == "cpu"

    def executed(self, artifact: Artifact, device: Device, scratch: Path) -> Path:
        """Give the engine itself where it is the optimized graph, else what a session makes of it when it is loaded."""
        if (artifact.folder / _RECORD).is_file():
            return artifact.path
        self.require(device)
        level, file = self.graph_optimization, scratch / _MODEL
        chosen = session_options(device, level, memory_arena=False, save_to=file, accuracy=self._accuracy)
        listed = self.tuned(artifact).without_graphs()._providers(device)
        open_session(artifact.path, chosen, device, listed, without=self.without)
        return file

    def assign_nodes(self, artifact: Artifact, device: Device) -> dict[str, dict[str, int]]:
        """Count nodes by execution provider on CUDA, after ONNX Runtime's basic optimizations."""
        if device.kind == "cpu":
            return {}
        self.require(device)
        chosen = session_options(device, self.graph_optimization, memory_arena=False)
        chosen.add_session_config_entry(RECORD_NODES, "1")
        listed = self.tuned(artifact).without_graphs()._providers(device)
        session = open_session(artifact.path, chosen, device, listed, without=self.without)
        return count_nodes(session.get_provider_graph_assignment_info(), (name for name, _ in listed))

    def tunable_options(self, graph: Path | None, device: Device) -> dict[str, tuple[str, ...]]:
        """List the session's options where there are threads, or the CUDA provider's that are useful for the graph."""
        if device.kind == "cpu":
            threads = int(self._tuned_session.get(THREADS, device.thread_count))
            own = {SPINNING: ("0",), THREADS: cpu.fewer_threads(threads)} if threads > 1 else {}
            return {name: values for name, values in own.items() if name not in self._tuned_session}
        if self.provider is not providers.CUDA:
            return {}
        given = {text.partition("=")[0] for text in self.provider_options}
        convolves = graph is None or providers.CONVOLUTIONS & model_file.summary(graph).operators.keys()
        useful = (*(providers.FOR_CONVOLUTIONS if convolves else ()), *providers.FOR_ALL)
        return {name: self.provider.settings[name][1:] for name in useful if name not in given}

    def with_option(self, name: str, value: str) -> Self:
        field = "session_options" if name in (THREADS, SPINNING) else "provider_options"
        return self.model_copy(update={field: (*getattr(self, field), f"{name}={value}")})

    def variations(self) -> "Iterator[tuple[AddedOption, Engine]]":
        if self.graph_optimization == "disabled":
            return
        for name in OPTIMIZERS:
            option = AddedOption(field="onnxruntime.disabled_optimizers", value=name, words=f"--ort-disable {name}")
            yield option, self.model_copy(update={"without": (*self.without, name)})
        for level in ("extended", "basic", "disabled"):
            option = AddedOption(field="graph_optimization", value=level, words=f"--graph-optimization {level}")
            yield option, self.model_copy(update={"graph_optimization": level})

    def reproduce(self, device: Device) -> str:
        """Write lines with the session's options; without a CUDA graph, which fixed buffers belong to."""
        listed = providers.session_providers(self.provider, device, self.without_graphs()._options)
        without = [*(SLOW_ON_CPU if device.kind == "cpu" else ()), *self.without]
        start = "onnxruntime.preload_dlls()\n" if device.kind == "cuda" else ""
        level = LEVELS[self.graph_optimization]
        return _REPRODUCE.format(
            start=start, level=level, entry=ACCURACY, accuracy=self._accuracy, listed=listed, without=without
        )

    def load(self, artifact: Artifact, device: Device) -> OnnxRuntimeSession:
        return self.tuned(artifact)._open(artifact, device)

    def profile(self, request: ProfileRequest) -> Profiled:
        artifact, device, scratch = request.artifact, request.device, request.scratch
        saved = (artifact.folder / _RECORD).is_file()
        executed = artifact.path if saved else scratch / _MODEL
        plain = self.tuned(artifact).without_graphs()
        with plain._open(artifact, device, save_to=None if saved else executed, trace=scratch / _TRACE) as session:
            bound = session.warm_up(request.feeds)
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
            for (field, record_value), (_, now) in zip(record, _here(device), strict=True):
                if record_value != now:
                    message = f"the engine was optimized for {field} {record_value!r}, and here it is {now!r}"
                    remedy = (
                        "build it here: `enginesmith resume RUN`; or use `enginesmith package RUN`, which is portable"
                    )
                    raise MissingCapability(message, remedy)
        chosen = session_options(device, level, self.memory_arena, save_to, trace, self._accuracy)
        tuned = self._tuned_session
        if THREADS in tuned:  # never more than are allowed
            chosen.intra_op_num_threads = min(int(tuned[THREADS]), device.thread_count)
        if SPINNING in tuned:
            chosen.add_session_config_entry(SPINNING, tuned[SPINNING])
        stream: Any = None
        if device.kind == "cuda":  # ONNX Runtime shows no stream: it shares one of torch's with the clock
            import torch

            make = torch.cuda.default_stream if cuda_allocator.active(device.index) else torch.cuda.Stream
            stream = make(str(device))  # memory is counted on the default stream
        listed = self._providers(device, stream and stream.cuda_stream)
        content = _emulated(path) if self.emulate else None
        session = open_session(path, chosen, device, listed, content, self.without)
        signature = artifact.signature or model_file.signature(path)
        kind = GraphedOnnxRuntimeSession if _GRAPHS in listed[0][1] else OnnxRuntimeSession
        given = level == "disabled" and not self.emulate and device.kind == "cpu" and not file.is_file()
        graph = path if given else None
        return kind(session, signature, device, stream, lambda: self.load(artifact, device), graph)

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
    model = edit.load(path)
    if not emulate(model):
        return None
    _logger.info("%s is emulated: float16 and bfloat16 are computed in float32, and each value is rounded", path.name)
    return bytes(ir.to_proto(model).SerializeToString())


def _install(device: Device) -> str:
    return install_command("onnxruntime-gpu" if device.kind == "cuda" else "onnxruntime")


def count_nodes(parts: "Iterable[OrtEpAssignedSubgraph]", names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Count the nodes that each of these providers has, by operator; the first one is in it with none, too."""
    first, *others = names
    counted: dict[str, Counter[str]] = {name: Counter() for name in (first, *others)}
    for part in parts:
        counted.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return {name: dict(counts) for name, counts in counted.items() if counts or name == first}


@functools.cache
def _here(device: Device) -> _Record:
    """Record what a graph that is optimized here depends on; layouts follow the processor's vector units."""
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
    tensorrt, major = stack.versions.get("tensorrt"), providers.TENSORRT_MAJOR
    if tensorrt and numbers(tensorrt)[0] != major:
        note = f"the engine onnxruntime_tensorrt needs it, in another environment: pip install 'tensorrt=={major}.*'"
        needed = f"libnvinfer {major}"
        yield check("TensorRT provider of onnxruntime-gpu", f"tensorrt {tensorrt}", needed, None, note=note)
    if stack.onnxruntime_cuda is None:
        why = "the package does not say which CUDA it is built for"
        yield check("CUDA libraries of onnxruntime-gpu", "unknown", "unknown", None, note=why)
        return
    # the metadata names the libraries under two extras; torch may bring the same ones
    fix = f"pip install 'onnxruntime-gpu[cuda,cudnn]=={stack.versions['onnxruntime-gpu']}'"
    requirements = [need for need in stack.requirements.get("onnxruntime-gpu", ()) if need.extra in ("cuda", "cudnn")]
    major = numbers(stack.onnxruntime_cuda)[0]
    if stack.torch_cuda:
        builds = f"{stack.torch_cuda} and {stack.onnxruntime_cuda}"
        same = numbers(stack.torch_cuda)[0] == major
        needed, other = "the same major version, to share libraries", f"a torch that is built for CUDA {major}"
        yield check("CUDA of torch and onnxruntime-gpu", builds, needed, same, f"{fix}; or {other}")
    if requirements and f"libcudart.so.{major}" not in stack.loadable:
        yield check_packages(stack, "CUDA libraries of onnxruntime-gpu", requirements, fix)
    fits = stack.cudnn is not None and numbers(stack.cudnn)[0] == _CUDNN_OF_ONNXRUNTIME
    package = f"pip install 'nvidia-cudnn-cu{major}=={_CUDNN_OF_ONNXRUNTIME}.*'"
    yield check("cuDNN", stack.cudnn or "not found", f"{_CUDNN_OF_ONNXRUNTIME}.x", fits, package)


def _list_wrong(options: Mapping[str, Any]) -> list[str]:
    """List the optimizers that a package leaves out because they get its graph wrong, not because they are slow."""
    return [name for name in options["session"]["disabled_optimizers"] if name not in SLOW_ON_CPU]


def _configure_triton(options: Mapping[str, Any], device: str) -> Fields:
    """Set the optimization level, the CUDA accelerator and the threads, as the backend's README has them."""
    wanted = options["graph_optimization_level"]
    if device == "cpu" and options.get("config_entries", {}).get(ACCURACY) == FLOATS and wanted != "ORT_DISABLE_ALL":
        wanted = "ORT_ENABLE_BASIC"  # which fuses no product with int8 activations
    level = _TRITON_LEVELS.get("ORT_DISABLE_ALL" if _list_wrong(options) else wanted)
    inner: Fields = [] if level is None else [("graph", Message([("level", level)]))]
    if device == "cuda":
        given = {k: v for k, v in options["session"]["provider_options"][0].items() if k != _GRAPHS}
        parameters = [("parameters", Message([("key", quoted(k)), ("value", quoted(v))])) for k, v in given.items()]
        cuda = Message([("gpu_execution_accelerator", Message([("name", quoted("cuda")), *parameters]))])
        inner.append(("execution_accelerators", cuda))
    fields: Fields = [("optimization", Message(inner))] if inner else []
    threads = {"intra_op_thread_count": options["intra_op_num_threads"], "inter_op_thread_count": 1}
    for key, number in threads.items():
        value = Message([("string_value", quoted(str(number)))])
        fields.append(("parameters", Message([("key", quoted(key)), ("value", value)])))
    return fields
