"""Time per layer of a TensorRT engine, as its execution context reports it (``IProfiler``), on the model's modules.

The names that it reports are those of the inspector's dump, whose metadata says which ONNX nodes are in a layer. While
a profiler is attached, ``execute_async_v3`` waits for the layers and reports them before it returns
(``enqueue_emits_profile``, on by default).
"""

import re
from collections.abc import Mapping
from typing import Any

from enginesmith.pipeline.engines.profiling import OperatorTime, Origin, Profiled, ProfileRequest, Tally, warm_up
from enginesmith.pipeline.engines.provenance import Provenance
from enginesmith.pipeline.engines.trt.audit import Layer, read_layers
from enginesmith.pipeline.engines.trt.session import TensorRTSession
from enginesmith.pipeline.errors import MissingCapability

_WORDS = re.compile(r"\s\+\s|[\s+,{}\[\]]|_myl\d+_\d+$")
"""Between the names of nodes in the name of a layer."""
_REFORMAT = "Reformatting CopyNode"


def profile(trt: Any, session: TensorRTSession, request: ProfileRequest, notes: tuple[str, ...]) -> Profiled:
    """Profile an open session that captures no CUDA graph.

    Raises:
        MissingCapability: TensorRT reported no layer.
    """
    bound: Any = warm_up(session, request.feeds)
    native = bound.context.native
    layers = {layer.name: layer for layer in read_layers(_dump(trt, session.engine, native))}
    reporter = _reporter(trt)
    native.profiler = reporter
    for _ in range(request.calls):
        reporter.tally.begin()
        session.enqueue(bound)
        session.synchronize()
    times = reporter.tally.medians()
    if not times:
        raise MissingCapability(
            "TensorRT reported no time of any layer", "build the engine again: it may be without profiling information"
        )
    known = Provenance.read(request.graph) if request.graph else None
    return Profiled(
        operators=tuple(_operator(name, layers, known, *found) for name, found in times.items()),
        source="TensorRT's IProfiler",
        call_seconds=None,
        notes=("layers are timed one after another, and launching them is not in it", *notes),
    )


def _dump(trt: Any, engine: Any, native: Any) -> str:
    inspector = engine.create_engine_inspector()
    inspector.execution_context = native
    return str(inspector.get_engine_information(trt.LayerInformationFormat.ONELINE))


def _reporter(trt: Any) -> Any:
    """Takes what the context reports; the class can only be made once the library is there."""

    class Reporter(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.tally = Tally()

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.tally.add(layer_name, ms / 1e3)

    return Reporter()


def _operator(
    name: str, layers: Mapping[str, Layer], known: Provenance | None, seconds: float, calls: int
) -> OperatorTime:
    layer = layers.get(name)
    moves = layer.moves if layer is not None else name.startswith(_REFORMAT)
    light = layer is not None and layer.light and not moves
    origin = known.named(_nodes(name, layer), light=light) if known else Origin()
    if moves:
        origin = Origin(modules=origin.modules, converts=True)
    precision = (layer.precision or "") if layer is not None and not origin.converts else ""
    kind = layer.kind if layer is not None else name
    return OperatorTime(name=name, operator=kind, origin=origin, precision=precision, seconds=seconds, calls=calls)


def _nodes(name: str, layer: Layer | None) -> tuple[str, ...]:
    """Names of ONNX nodes: as the metadata has them, else those in the layer's own name."""
    if layer is not None and layer.nodes:
        return layer.nodes
    return tuple(word for word in _WORDS.split(name) if word)
