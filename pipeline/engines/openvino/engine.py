"""Build and run engines of OpenVINO on the CPU: its own files of the graph, compiled for the processor at each load."""

import platform
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines.base import BuildRequest, Configuration, Engine, EngineFacts, PackageFacts
from enginesmith.pipeline.engines.openvino import profiler, rewrites, session
from enginesmith.pipeline.engines.openvino.sequences import refuse_coupled
from enginesmith.pipeline.engines.openvino.whole_numbers import find_whole_numbers
from enginesmith.pipeline.engines.profiling import Profiled, ProfileRequest
from enginesmith.pipeline.engines.telemetry import import_without_telemetry
from enginesmith.pipeline.engines.triton import Fields, Message, TritonBackend, quoted
from enginesmith.pipeline.errors import ModelError, install_command
from enginesmith.pipeline.frameworks.onnx import coverage, model_file
from enginesmith.pipeline.passes.quantize.precisions import Placement, Quantizer
from enginesmith.pipeline.system import cpu, software
from enginesmith.pipeline.system.cpu import int8_weight_bits, vector_units
from enginesmith.pipeline.system.device import Availability, Device, unavailable
from enginesmith.pipeline.units import name_some

if TYPE_CHECKING:
    from enginesmith.pipeline.engines.options import EngineOptions

_MODEL, _AUDIT = "model.xml", "audit.json"
_TRITON_OPTIONS = ("PERFORMANCE_HINT", "NUM_STREAMS", "INFERENCE_NUM_THREADS")
_FLOATS = {"f32": "float32", "f16": "float16"}
_BFLOAT16_ON_TRITON = (
    "floating-point layers were measured in {}, for which Triton's OpenVINO backend has no option: where the processor "
    "has bfloat16 (AVX512_BF16 or AMX) it computes them in bfloat16, with larger errors than in the run"
)
_FIXED = "FIXED_BATCHES"
"""Option of packages: the sizes of ``fixed_batches``."""
_MOST_FIXED, _SHOWN = 4, 3
_PRIMING_SIDE = 64

_REPRODUCE = """
import openvino

graph = openvino.Core().read_model(MODEL)
floats = {floats}
compiled = openvino.Core().compile_model(graph, "CPU", {{"INFERENCE_PRECISION_HINT": floats}})
answers = compiled([inputs[name] for name in INPUTS])  # in order: an input that is passed on loses its name
found = {{name: answers[place] for place, name in enumerate(OUTPUTS)}}
"""
_WRITTEN_OR_CAST = f'"f32" if graph.has_rt_info(["{session.AS_WRITTEN}"]) else "bf16"'


class OpenVINO(Engine):
    """Run an ONNX graph; the outputs and inputs keep the model's names."""

    name: ClassVar[str] = "openvino"
    consumes: ClassVar[Kind] = "onnx"
    title: ClassVar[str] = "OpenVINO"
    tools: ClassVar[tuple[str, ...]] = ("openvino",)
    placement: ClassVar[Placement] = "inputs+read outputs"
    quantizers: ClassVar[tuple[Quantizer, ...]] = ("own", "nncf", "qat")
    casts: ClassVar[tuple[str, ...]] = ("bf16",)  # it fuses what follows a product first, and then rounds less often
    kinds: ClassVar[tuple[str, ...]] = ("cpu",)
    has_infer_script: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("onnx", "openvino")
    modules: ClassVar[tuple[str, ...]] = (f"{session.__name__}:load_openvino", __name__)
    reads: ClassVar[tuple[str, ...]] = ("tune_seconds",)
    only_running: ClassVar[frozenset[str]] = frozenset({"session_options", "fixed_batches"})

    floats: session.FloatType = "f32"
    """Type that floating-point layers compute in, where the processor has instructions for it."""
    session_options: tuple[str, ...] = ()
    """Options of the compiled model that are not the defaults: ``INFERENCE_NUM_THREADS=1``."""
    fixed_batches: tuple[int, ...] = ()
    """Batch sizes that the graph is compiled apart for, where nothing but the batch is dynamic."""

    @classmethod
    def configurations(cls, options: "EngineOptions", precision: str) -> Iterator[Configuration]:
        low: session.FloatType = "bf16" if precision == "bf16" else "f16" if "fp16" in precision else "f32"
        yield Configuration(cls(floats=low, **cls.running_options(options)), precision)

    @classmethod
    def running_options(cls, options: "EngineOptions") -> dict[str, Any]:
        return {"fixed_batches": options.batch[:_MOST_FIXED]}

    @classmethod
    def candidate_precisions(cls, device: Device) -> tuple[str, ...]:
        return ("fp32", "int8", "bf16") if any("bf16" in unit for unit in vector_units()) else ("fp32", "int8")

    @classmethod
    def prefers_signed(cls, device: Device) -> bool:
        """Prefer them with AMX, which multiplies two signed numbers: a reader of text takes 0.73 of the time."""
        return "amx_int8" in vector_units()

    @property
    def arithmetic(self) -> str:
        return "bf16" if self.floats == "bf16" else "fp32"

    @classmethod
    def weight_bits(cls, device: Device) -> int:
        return int8_weight_bits()

    @classmethod
    def available(cls, device: Device) -> Availability:
        if not (answer := cls.installed(device)).ok:
            return answer
        return software.check_import("openvino", import_without_telemetry)

    @classmethod
    def installed(cls, device: Device) -> Availability:
        if device.kind != "cpu":
            return unavailable("it runs on the CPU only", "use --device cpu")
        if software.find("openvino") is not None:
            return Availability(ok=True)
        return unavailable("openvino is not installed", f"install it: {install_command('openvino')}")

    def runnable(self, device: Device) -> Availability:
        availability = type(self).available(device)
        if not availability.ok or self.floats != "bf16" or session.computes_in_bf16():
            return availability
        reason = "this processor has no instructions for bf16 (AVX512_BF16, AMX): OpenVINO would compute in float32"
        return unavailable(reason, "use --precision fp32")

    def package_facts(self, main: Path, device: Device) -> PackageFacts:
        record = main.parent / _AUDIT
        audit = profiler.Audit.model_validate_json(record.read_bytes()) if record.is_file() else None
        options = session.compile_options(device.threads, audit.floats if audit and audit.floats else self.floats)
        options |= (audit.options if audit else {}) | self._tuned_options
        return PackageFacts(options={**options, _FIXED: self.fixed_batches})

    @classmethod
    def from_package(cls, main: Path, options: Mapping[str, Any]) -> Engine:
        threads = int(options.get(session.THREADS, 0))
        tuned = (f"{session.THREADS}={threads}",) if threads else ()
        floats, fixed = options.get("INFERENCE_PRECISION_HINT", "f32"), tuple(options.get(_FIXED, ()))
        return cls(floats=floats, session_options=tuned, fixed_batches=fixed[:_MOST_FIXED])

    def reproduce(self, device: Device) -> str:
        return _REPRODUCE.format(floats=_WRITTEN_OR_CAST if self.floats == "bf16" else f'"{self.floats}"')

    @classmethod
    def triton(cls) -> TritonBackend:
        def remark(engine: Mapping[str, Any]) -> tuple[str, ...]:
            measured = _FLOATS.get(engine["options"]["INFERENCE_PRECISION_HINT"])
            return (_BFLOAT16_ON_TRITON.format(measured),) if measured else ()

        return TritonBackend("openvino", _MODEL, configure=_configure_triton, remark=remark)

    def environment_key(self, device: Device) -> dict[str, Any]:
        return {"processor": " ".join((platform.machine(), *vector_units()))}  # that the audit is of

    def build(self, request: BuildRequest) -> Effect:
        """Write ``model.xml`` with its weights in ``model.bin``, and the record of how this processor runs it."""
        artifact, out = request.artifact, request.out
        self.require_runnable(request.device)
        source = model_file.skeleton(artifact.path)
        graph = session.read_graph(artifact.path, source)
        refuse_coupled(source)
        rewrites.restore_empty(graph, model_file.list_empty(source))
        wide = coverage.list_float32(source) if self.floats != "f32" else []
        marked = self.floats == "f16" and bool(wide)
        if self.floats == "bf16" and wide:
            session.mark_written(graph)
        if marked:
            session.mark_float32(graph, [node for node, _ in wide])
        session.load_openvino().save_model(graph, out / _MODEL, compress_to_fp16=False)
        saved = session.read_graph(out / _MODEL) if marked else graph  # marks are heeded in a file that is read
        compiled = session.compile_graph(saved, artifact.path.name, request.device, self.floats)
        rounded, int8_products = profiler.find_rounded(source)
        layers = list(profiler.read_layers(compiled, rounded))
        audit = profiler.audit(layers, int8_products)
        notes = (*audit.notes, *self._describe_lowered(profiler.find_lowered(layers, wide)))
        fixed = session.has_only_a_batch(artifact.signature or model_file.signature(artifact.path))
        additions = {
            "options": session.find_workarounds(graph, fixed=fixed),
            "whole_numbers": find_whole_numbers(source),
            "floats": session.choose_hint(saved, self.floats),
        }
        record = audit.model_copy(update=additions)
        (out / _AUDIT).write_text(record.model_dump_json(indent=1), encoding="utf-8")
        summary = ", ".join(f"{count} layers in {name}" for name, count in audit.layers.items())
        return Effect(file=_MODEL, summary=summary, notes=notes, signature=artifact.signature)

    def _describe_lowered(self, lowered: Mapping[str, str]) -> Iterator[str]:
        """Note products that the graph has in float32 and that run in less, by name with the reasons for float32.

        Raises:
            ModelError: somebody asked for float32.
        """
        asked = [name for name, reason in lowered.items() if reason == model_file.ASKED]
        names = name_some(asked or [*lowered], _SHOWN)
        what = f"OpenVINO computes {names} in {self.floats}, which the graph has in float32"
        if asked:
            raise ModelError(what, "keep other nodes, or use another engine or precision")
        if lowered:
            yield what

    def facts(self, artifact: Artifact) -> EngineFacts:
        audit = profiler.Audit.model_validate_json((artifact.folder / _AUDIT).read_bytes())
        return EngineFacts(layers=audit.layers, cautions=audit.cautions)

    @property
    def _tuned_options(self) -> dict[str, int]:
        return {name: int(value) for name, value in (text.split("=", 1) for text in self.session_options)}

    def tunable_options(self, graph: Path | None, device: Device) -> dict[str, tuple[str, ...]]:
        """List numbers of threads; more streams were measured and do not pay (benchmarks/session_options.py)."""
        counts = cpu.fewer_threads(device.thread_count)
        return {session.THREADS: counts} if counts and not self._tuned_options else {}

    def with_option(self, name: str, value: str) -> Self:
        return self.model_copy(update={"session_options": (*self.session_options, f"{name}={value}")})

    def load(self, artifact: Artifact, device: Device) -> session.OpenVINOSession:
        return self.tuned(artifact)._open(artifact, device)

    def profile(self, request: ProfileRequest) -> Profiled:
        with self.tuned(request.artifact)._open(request.artifact, request.device, PERF_COUNT=True) as opened:
            return profiler.profile(opened, request)

    def _open(self, artifact: Artifact, device: Device, **more: Any) -> session.OpenVINOSession:
        self.require_runnable(device)
        tuned = self._tuned_options
        if session.THREADS in tuned:  # never more than are allowed
            tuned[session.THREADS] = min(tuned[session.THREADS], device.thread_count)
        file, signature = artifact.path, artifact.signature or model_file.signature(artifact.path)
        session.read_graph(file)  # it fails here, and not at the first call, if it is damaged

        def compile_for(batch: int | None, twofold: bool) -> Any:
            threads = {session.THREADS: max(2, tuned.get(session.THREADS, device.thread_count))} if twofold else {}
            graph = session.read_graph(file) if batch is None else session.read_with_batch(file, signature, batch)
            return session.compile_graph(graph, file.name, device, self.floats, **{**tuned, **threads, **more})

        able = session.has_only_a_batch(signature)
        return session.OpenVINOSession(session.Compiled(compile_for, self.fixed_batches if able else ()), signature)

    def prime(self, artifact: Artifact, device: Device) -> None:
        """Write, read and run a model of a few bytes: the libraries are in then, and the threads have started."""
        self.require(device)
        openvino = session.load_openvino()
        side = openvino.opset13.parameter([_PRIMING_SIDE, _PRIMING_SIDE], np.float32)
        product = openvino.opset13.matmul(side, side, False, False)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, _MODEL)
            openvino.save_model(openvino.Model([product], [side], "prime"), path, compress_to_fp16=False)
            compiled = session.compile_graph(session.read_graph(path), path.name, device, self.floats)
        compiled.create_infer_request().infer([np.ones((_PRIMING_SIDE, _PRIMING_SIDE), np.float32)])


def _configure_triton(options: Mapping[str, Any], device: str) -> Fields:
    """Set the hint, the streams and the threads, as the backend's README has them; 0 threads are its default."""
    chosen = {name: options[name] for name in _TRITON_OPTIONS if options[name]}
    if options["INFERENCE_PRECISION_HINT"] == "bf16":
        chosen["HINT_BF16"] = "YES"
    entries = {name: Message([("string_value", quoted(str(value)))]) for name, value in chosen.items()}
    return [("parameters", Message([("key", quoted(name)), ("value", value)])) for name, value in entries.items()]
