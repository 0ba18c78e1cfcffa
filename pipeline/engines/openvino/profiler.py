"""Read the graph that OpenVINO really runs: the type that each layer computes in, and the time that it takes.

The runtime model of a compiled model has a node for each layer: its kind (``layerType``), the type of its kernel
(``runtimePrecision``) and the nodes of the graph that are fused into it (``originalLayersNames``), whose names begin
with those of the ONNX nodes: ``node_Conv_217/WithoutBiases``.
"""

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from enginesmith.pipeline.engines.onnxruntime.profiler import Provenance
from enginesmith.pipeline.engines.openvino.session import FloatType, OpenVINOSession
from enginesmith.pipeline.engines.openvino.whole_numbers import WholeNumbers
from enginesmith.pipeline.engines.profiling import OperatorTime, Origin, Profiled, ProfileRequest, Tally
from enginesmith.pipeline.frameworks.onnx import model_file, traversal
from enginesmith.pipeline.frameworks.onnx.coverage import CONVERTERS, find_dequantized, is_product

if TYPE_CHECKING:
    import onnx

_TYPES = {"u4": "int4", "i4": "int4", "u8": "int8", "i8": "int8", "f16": "fp16", "bf16": "bf16", "f32": "fp32"}
"""OpenVINO's words for types."""
_NO_WORK = ("Const", "Input", "Output")
_CONVERTS = ("Reorder", "Convert", "FakeQuantize")
"""Layers that change types and layouts alone."""
_HEAVY = ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "RNNSeq", "RNNCell", "ScaledDotProductAttention")
_SHOWN = 8


@dataclass(frozen=True)
class Layer:
    """Describe a layer that runs."""

    name: str
    kind: str
    precision: str
    """Type that it computes in; empty for integers that are no numbers of the network: shapes, indices."""
    nodes: tuple[str, ...]
    """Names of OpenVINO's nodes that it does the work of."""

    def covers(self, node: str) -> bool:
        """Tell whether the work of an ONNX node is in it."""
        return any(name == node or name.startswith(f"{node}/") for name in self.nodes)


class Audit(BaseModel, frozen=True):
    """Record the types that the layers of a compiled graph compute in, and what it has to be compiled with."""

    layers: dict[str, int]
    """Layers by type."""
    products: dict[str, int]
    """Convolutions, matrix products and recurrent layers by type."""
    asked: int = 0
    """Products that the graph has in int8."""
    floating: tuple[str, ...] = ()
    """Names of those among them that run in floating point."""
    options: dict[str, str] = {}
    """Options without which OpenVINO would compute the graph wrongly where its batch is fixed."""
    floats: FloatType | None = None
    """Type that OpenVINO casts layers to; None in records of before."""
    whole_numbers: WholeNumbers = WholeNumbers()
    """Nodes whose whole numbers may be larger than it computes right."""

    @property
    def cautions(self) -> tuple[str, ...]:
        """On which numbers the answers would be wrong."""
        limits = {
            "computes whole numbers in 32 bits: products of int64 beyond ±2147483647": self.whole_numbers.products,
            "divides whole numbers as float32: quotients and remainders of those beyond ±16777216": (
                self.whole_numbers.quotients
            ),
        }
        shown = {words: ", ".join(names[:_SHOWN]) for words, names in limits.items() if names}
        return tuple(f"OpenVINO {words} would be wrong ({names})" for words, names in shown.items())

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for people."""
        counts = ", ".join(f"{count} {name}" for name, count in self.products.items()) or "none"
        shown = ", ".join(self.floating[:_SHOWN])
        slow = f"{len(self.floating)} of {self.asked} products are int8 in the graph and run in floating point: {shown}"
        return (f"products by the type that they run in: {counts}", *([slow] if self.floating else []))


def read_layers(compiled: Any, rounded: Collection[str]) -> Iterator[Layer]:
    """Yield the layers of a compiled model that compute, in the order that they run in.

    ``rounded`` are the nodes of the graph that read or write int8; OpenVINO also has booleans in u8.
    """
    for node in compiled.get_runtime_model().get_ordered_ops():
        facts = {name: value.astype(str) for name, value in node.get_rt_info().items()}
        kind, names = facts.get("layerType", ""), facts.get("originalLayersNames", "")
        sources = [port.get_source_output().get_node().get_rt_info() for port in node.inputs()]
        if kind in _NO_WORK or {source["layerType"].astype(str) for source in sources} == {"Const"}:
            continue
        precision = _TYPES.get(facts.get("runtimePrecision", ""), "")
        layer = Layer(node.get_friendly_name(), kind, precision, tuple(filter(None, names.split(","))))
        boolean = precision == "int8" and kind not in _HEAVY and not any(map(layer.covers, rounded))
        yield replace(layer, precision="") if boolean else layer


def find_rounded(graph: "onnx.ModelProto") -> tuple[set[str], list[str]]:
    """Find the nodes that read or write int8, and the products that multiply two factors in it, by name."""
    nodes = list(traversal.nodes(graph))
    quantized = {node.input[0] for node in nodes if node.op_type == "QuantizeLinear"}
    known = find_dequantized(nodes)
    products = [node.name for node in nodes if is_product(node) and known.issuperset(node.input[:2])]
    near = (node for node in nodes if known & set(node.input) or quantized & set(node.output))
    return {node.name for node in (*near, *(node for node in nodes if node.op_type in CONVERTERS))}, products


def find_lowered(layers: Iterable[Layer], nodes: "Iterable[tuple[onnx.NodeProto, str]]") -> dict[str, str]:
    """Find the products among nodes of float32 that run in a narrower float, by name, with the reason of each."""
    low = [layer for layer in layers if layer.kind in _HEAVY and layer.precision in ("fp16", "bf16")]
    products = ((node.name, reason) for node, reason in nodes if is_product(node))
    return {name: reason for name, reason in products if any(layer.covers(name) for layer in low)}


def audit(layers: Iterable[Layer], int8_products: Sequence[str]) -> Audit:
    """Compare the types that layers compute in with the products that a graph asks for in int8."""
    counted = [layer for layer in layers if layer.precision]
    products = [layer for layer in counted if layer.kind in _HEAVY]
    floats = [layer for layer in products if layer.precision not in ("int8", "int4")]
    return Audit(
        layers=dict(Counter(layer.precision for layer in counted).most_common()),
        products=dict(Counter(layer.precision for layer in products).most_common()),
        asked=len(int8_products),
        floating=tuple(name for name in int8_products if any(layer.covers(name) for layer in floats)),
    )


def profile(session: OpenVINOSession, request: ProfileRequest) -> Profiled:
    """Time the layers of an open session that is compiled to count."""
    bound, tally, calls = session.warm_up(request.feeds), Tally(), list[float]()
    rounded = find_rounded(model_file.skeleton(request.graph))[0] if request.graph else ()
    layers = {layer.name: layer for layer in read_layers(session.compiled, rounded)}
    for _ in range(request.calls):
        session.enqueue(bound)
        tally.begin()
        for info in session.request.get_profiling_info():
            if info.node_name in layers and "EXECUTED" in str(info.status) and "NOT" not in str(info.status):
                tally.add(info.node_name, info.real_time.total_seconds())
        calls.append(session.request.latency / 1e3)
    known = Provenance(request.graph) if request.graph else None
    return Profiled(
        operators=tuple(_operator(layers[name], known, *figures) for name, figures in tally.medians().items()),
        source="OpenVINO's profiler",
        call_seconds=statistics.median(calls),
    )


def _operator(layer: Layer, known: Provenance | None, seconds: float, calls: int) -> OperatorTime:
    names = [name.partition("/")[0] for name in layer.nodes] + list(layer.nodes)
    origin = known.named(names, light=layer.kind not in _HEAVY) if known else Origin()
    if layer.kind in _CONVERTS:
        origin = Origin(modules=origin.modules, converts=True)
    own = {"name": layer.name, "operator": layer.kind, "precision": "" if origin.converts else layer.precision}
    return OperatorTime(origin=origin, seconds=seconds, calls=calls, **own)
