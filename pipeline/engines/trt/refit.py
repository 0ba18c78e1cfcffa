"""New weights into a built engine of the same architecture; a stripped engine gets its first ones this way."""

from pathlib import Path
from typing import Any

from enginesmith.pipeline.artifact import Artifact, Effect, file_digest
from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.engines.trt import manifest
from enginesmith.pipeline.engines.trt.build_log import BuildLog, listening
from enginesmith.pipeline.engines.trt.flavours import module
from enginesmith.pipeline.engines.trt.manifest import EngineManifest
from enginesmith.pipeline.errors import BuilderFailed, SignatureError, UsageError


def refit(engine: Artifact, graph: Artifact, file: Path, device: Device) -> Effect:
    """Write ``engine`` with the weights of ``graph`` to ``file``, and its manifest beside it.

    Raises:
        MissingCapability: this machine cannot run the engine, and so not open it.
        UsageError: the engine was not built for it.
        SignatureError: the graph has other inputs or outputs than the engine.
        BuilderFailed: weights of the engine are missing in the graph, or TensorRT refuses them.
    """
    import torch

    before = manifest.read(engine.path)
    if not (before.options.refit or before.options.strip_plan):
        raise UsageError("the engine was not built to be refitted", "build it with --refit or --strip-plan")
    if graph.signature != before.signature:
        raise SignatureError(
            "the graph has other inputs or outputs than the engine was built for", "build a new engine from it"
        )
    manifest.hold(before, device.index)
    trt, log = module(before.engine), BuildLog()
    torch.cuda.set_device(device.index)
    with listening(trt, log) as sink:
        runtime = trt.Runtime(sink)
        native = runtime.deserialize_cuda_engine(engine.path.read_bytes())
        if native is None:
            raise BuilderFailed("TensorRT cannot open the engine that is to be refitted", "build it again here")
        _set_weights(trt, native, sink, graph.path, log)
        config = native.create_serialization_config()
        config.clear_flag(trt.SerializationFlag.EXCLUDE_WEIGHTS)  # left set, a stripped engine answers zeros
        file.write_bytes(native.serialize_with_config(config))
    record = before.model_copy(update=_changed(before, graph, file))
    manifest.path_beside(file).write_text(record.model_dump_json(indent=1) + "\n")
    file.with_name(file.name + ".log").write_text(log.text)
    return Effect(file=file.name, summary="refitted with the weights of the graph", signature=graph.signature)


def _set_weights(trt: Any, engine: Any, sink: Any, graph: Path, log: BuildLog) -> None:
    refitter = trt.Refitter(engine, sink)
    parser = trt.OnnxParserRefitter(refitter, sink)
    if not parser.refit_from_file(str(graph)):
        said = parser.get_error(0).desc() if parser.num_errors else "nothing"
        raise BuilderFailed(f"TensorRT does not take the graph's weights, and said: {said}", _SAME)
    if missing := refitter.get_missing_weights():
        shown = ", ".join(str(name) for name in list(missing)[:4])
        raise BuilderFailed(f"the graph lacks weights of the engine, {len(missing)} in all: {shown}", _SAME)
    if not refitter.refit_cuda_engine():
        raise BuilderFailed(f"refitting failed: {log.errors[0] if log.errors else 'no reason was given'}", _SAME)


_SAME = "give a graph of the same architecture, exported and simplified the same way"


def _changed(before: EngineManifest, graph: Artifact, file: Path) -> dict[str, Any]:
    """What of the manifest is not as it was."""
    options = before.options.model_copy(update={"strip_plan": False, "refit": False})
    return {
        "sha256": file_digest(file),
        "bytes": file.stat().st_size,
        "model_sha256": graph.sha256,
        "options": options,
        "notes": (*before.notes, f"refitted; the engine was built from {before.model_sha256[:16]}"),
    }
