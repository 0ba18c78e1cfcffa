"""From a chosen variant to the manifest of its package."""

from collections.abc import Mapping
from typing import Any, Literal

from enginesmith.calibration.options import AS_FOUND
from enginesmith.pipeline import documents
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Device, Engine
from enginesmith.pipeline.engines.onnxruntime import OnnxRuntime
from enginesmith.pipeline.engines.onnxruntime_session import LEVELS, disabled_optimizers
from enginesmith.pipeline.engines.trt import manifest as engine_manifest
from enginesmith.pipeline.measure.fidelity import Thresholds
from enginesmith.pipeline.packaging.choice import Chosen
from enginesmith.pipeline.packaging.manifest import (
    EngineRecord,
    Manifest,
    Measured,
    Origin,
    PackagedFile,
    Preprocessing,
    Summary,
)
from enginesmith.pipeline.precision.kinds import KINDS
from enginesmith.pipeline.run import VariantRecord
from enginesmith.pipeline.steps import REFERENCE
from enginesmith.pipeline.tasks.compare import required
from enginesmith.pipeline.tensors import ShapeRange, TensorSpec
from enginesmith.pipeline.variants import device_for

_ONE_GRAPH = (
    "what was measured is this graph as ONNX Runtime optimised it on the machine of the run; here it is optimised when "
    "it is loaded, for the processor and the onnxruntime that are there"
)
_SYNTHETIC = "ranges were taken from made-up data: its accuracy says nothing of real data"
_CHANNELS = (1, 3, 4)


def describe(
    chosen: Chosen, form: Literal["bundle", "triton"], file: str, files: Mapping[str, PackagedFile]
) -> Manifest:
    """The manifest of a package of these files, of which the engine loads ``file``."""
    run, record = chosen.run, chosen.record
    assert run.model.signature is not None
    engine, device = engine_of(chosen), device_of(chosen)
    own_graph = record.graph != record.artifact and record.graph is not None
    cautions = (
        *chosen.cautions,
        *([_ONE_GRAPH] if own_graph else []),
        *([_SYNTHETIC] if record.synthetic_calibration else []),
        *([record.shortfall] if record.shortfall else []),
    )
    return Manifest.model_validate(
        {
            "format": form,
            "variant": record.id,
            "precision": record.precision,
            "engine": _engine(chosen, engine, device, file),
            "signature": run.model.signature,
            "shapes": ranges(chosen),
            "preprocessing": _preprocessing(chosen),
            "measured": _summary(record),
            "thresholds": _thresholds(chosen, engine),
            "origin": _origin(chosen),
            "cautions": cautions,
            "files": dict(files),
        }
    )


def engine_of(chosen: Chosen) -> Engine:
    """The engine with the options that the run had it built and measured with."""
    recipe, options = chosen.run.recipe, dict[str, Any](chosen.engine_options)
    options |= {"tf32": recipe.onnxruntime.tf32} if chosen.record.engine == OnnxRuntime.name else {}
    kind = engine_class(chosen.record.engine)
    return documents.made(kind, options, f"what {chosen.record.id} was built with")


def device_of(chosen: Chosen) -> Device:
    """What the run measured it on."""
    return device_for(chosen.run.recipe, engine_of(chosen))


def ranges(chosen: Chosen) -> dict[str, ShapeRange]:
    """Sizes by dynamic dimension, as the engine was built and checked for."""
    return {name: ShapeRange.parse(text) for name, text in chosen.run.model.shapes.items()}


def _engine(chosen: Chosen, engine: Engine, device: Device, file: str) -> EngineRecord:
    record = chosen.record
    built = record.history[-1].tools
    version = next((built[name] for name in engine.tools if name in built), "unknown")
    targets: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    if isinstance(engine, OnnxRuntime):
        options = _session_options(chosen, engine, device)
    else:
        found = engine_manifest.read(chosen.main)
        version, targets = found.version, found.compute_capabilities
        options = {"tf32": found.options.tf32, "version_compatible": found.options.version_compatible}
    return EngineRecord(
        name=record.engine,
        package=record.engine,
        version=version,
        file=file,
        device="cuda" if device.kind == "cuda" else "cpu",
        compute_capabilities=targets,
        options=options,
    )


def _session_options(chosen: Chosen, engine: OnnxRuntime, device: Device) -> dict[str, Any]:
    """By the names that onnxruntime has for them; ``session`` is for the session itself."""
    cuda = {"CUDAExecutionProvider": {"use_tf32": str(int(engine.tf32))}} if device.kind == "cuda" else {}
    providers: dict[str, dict[str, str]] = {**cuda, "CPUExecutionProvider": {}}
    return {
        "graph_optimization_level": LEVELS[engine.graph_optimization],
        "intra_op_num_threads": device.threads,
        "session": {
            "providers": list(providers),
            "provider_options": list(providers.values()),
            "disabled_optimizers": disabled_optimizers(chosen.main),
        },
    }


def _thresholds(chosen: Chosen, engine: Engine) -> Thresholds:
    """Those that the run held the engine to."""
    signature, kind = chosen.run.model.signature, KINDS.get(chosen.record.precision)  # type: ignore[call-overload]
    assert signature is not None
    row = kind.threshold if kind and kind.threshold != "fp32" else engine.arithmetic
    return required((spec.dtype for spec in signature.outputs), row, chosen.run.recipe.min_sqnr_db)


def _summary(record: VariantRecord) -> Summary:
    sqnr = [one.sqnr_db for one in record.fidelity if one.stage == "engine" and one.sqnr_db is not None]
    reasons = {name: record.reasons[name] for name in ("latency", "memory", "quality") if name in record.reasons}
    return Summary(
        latency=tuple(
            Measured(
                batch=row.batch,
                p50_ms=row.p50_ms,
                p99_ms=row.p99_ms,
                throughput_per_s=row.throughput_per_s,
                speedup=row.speedup.median if row.speedup else None,
                reasons={name: row.reasons[name] for name in Measured.model_fields if name in row.reasons},
            )
            for row in record.latency
        ),
        peak_bytes=record.peak_bytes,
        sqnr_db=min(sqnr, default=None),
        metric=record.quality.metric if record.quality else None,
        value=record.quality.value if record.quality else None,
        drop=record.quality.drop if record.quality else None,
        reasons=reasons | ({} if sqnr else {"sqnr_db": "the built engine was not held against the reference"}),
    )


def _preprocessing(chosen: Chosen) -> Preprocessing:
    run = chosen.run
    options = run.recipe.data_options
    given = {name: value for name, value in options if value != getattr(AS_FOUND, name)}
    signature = run.model.signature
    assert signature is not None
    fed = next((step.effect for step in run.steps if step.id == REFERENCE), "")
    layouts = (f"{spec.name} is {layout}" for spec in signature.inputs if (layout := _layout(spec)))
    return Preprocessing(options=given, notes=(*([f"the run fed {fed}"] if fed else []), *layouts))


def _layout(spec: TensorSpec) -> str:
    """How images lie in an input, where its sizes tell."""
    if len(spec.shape) != 4:
        return ""
    if spec.shape[1] in _CHANNELS:
        return "NCHW: batch, channels, height, width"
    return "NHWC: batch, height, width, channels" if spec.shape[3] in _CHANNELS else ""


def _origin(chosen: Chosen) -> Origin:
    run = chosen.run
    here = run.environment
    return Origin(
        run=run.name,
        created=run.created,
        model=run.model.source,
        model_sha256=run.model.sha256,
        data=run.model.data,
        processor=here.get("processor"),
        gpus=tuple(str(one.get("name", "unknown")) for one in here.get("gpus") or ()),
        packages=here.get("packages") or {},
        recipe=run.recipe.model_dump(mode="json"),
        history=chosen.record.history,
    )
