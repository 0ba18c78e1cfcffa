"""Mixed precision: the products of a graph, and what lies between them, in float16 or bfloat16; the rest in float32.

The result is strongly typed: every value has one type, and where types meet stands a Cast, as few of them as can be.
Rules are in ``rules`` and ``range``. The softmax inside an Attention operator has no type of its own here:
TensorRT refuses the attribute ``softmax_precision``, and its fused kernels add up in float32 anyway, as those of
ONNX Runtime do.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from enginesmith.pipeline.errors import InvalidGraph, UsageError

if TYPE_CHECKING:
    import onnx_ir as ir

Half = Literal["fp16", "bf16"]
_NOTHING: Mapping[str, float] = MappingProxyType({})
_CHEAP = "its neighbours are in float32"


@dataclass(frozen=True)
class Lowered:
    """What was done to a graph, by names of nodes in its order."""

    dtype: Half
    nodes: tuple[str, ...]
    """Those that compute in the low type now."""
    kept: Mapping[str, str]
    """Those that stayed in float32, and why."""
    casts: tuple[str, ...]
    """Cast nodes that were put in."""
    clips: tuple[str, ...]
    """Clip nodes that were put in before the cast of an attention mask, whose lowest number would become infinite."""


def lower(
    model: "ir.Model",
    dtype: Half,
    *,
    keep_io: bool = True,
    keep: Collection[str] = (),
    largest: Mapping[str, float] = _NOTHING,
) -> Lowered:
    """Change a float32 graph, or one with Q/DQ pairs, in place; constants are converted when it is saved.

    ``keep_io`` leaves inputs and outputs in float32, ``keep`` names nodes that are to stay. ``largest`` is the largest
    magnitude of values on real data, by name: in float16, nodes around one beyond 65504 / 2 stay.

    Raises:
        UsageError: ``keep`` names a node that is not there.
        InvalidGraph: the graph is in a low type already.
    """
    import onnx_ir as ir

    from enginesmith.pipeline.precision.half import scales
    from enginesmith.pipeline.precision.half.casts import Retyper
    from enginesmith.pipeline.precision.half.placement import choose
    from enginesmith.pipeline.precision.half.rules import judge

    target = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}[dtype]
    _prepare(model)
    _hold(model, keep)
    opset = max(model.opset_imports.get(domain, 1) for domain in ("", "ai.onnx"))
    judged = judge(model.graph, opset, target.name.lower(), keep, largest)
    low = judged.low | choose(model.graph, judged, keep_io=keep_io)
    order = [node for node in model.graph if node in low]
    kept = {node.name or "": reason for node, reason in judged.kept.items()}
    kept |= {node.name or "": _CHEAP for node in judged.free if node not in low}
    scales.fit(model.graph, low, target)
    retyper = Retyper(model.graph, {node: judged.slots[node] for node in order}, target)
    retyper.run(keep_io=keep_io)
    names = tuple(node.name or "" for node in order if node.graph is not None)
    return Lowered(dtype, names, kept, tuple(retyper.casts), tuple(retyper.clips))


def _prepare(model: "ir.Model") -> None:
    """Functions inlined, constants as initialisers, a name for every node, a type for every value."""
    import onnx_ir as ir
    from onnx_ir.passes import common

    model.ir_version = max(model.ir_version, 4)  # from then on weights need not be listed as inputs
    ir.passes.Sequential(
        common.InlinePass(),
        common.RemoveInitializersFromInputsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.NameFixPass(),
    )(model)
    if any(value.type is None for node in model.graph.all_nodes() for value in node.outputs):
        declared = [(value.name, value.shape) for value in model.graph.outputs]
        common.ShapeInferencePass(strict_mode=False)(model)
        for value, (name, shape) in zip(model.graph.outputs, declared, strict=True):
            value.name, value.shape = name, shape


def _hold(model: "ir.Model", keep: Collection[str]) -> None:
    """Refuse what makes no sense."""
    import onnx_ir as ir

    from enginesmith.pipeline.precision.half.rules import is_product
    from enginesmith.pipeline.precision.half.types import is_float

    unknown = sorted(set(keep) - {node.name for node in model.graph})
    if unknown:
        raise UsageError(f"the graph has no node {unknown[0]!r} that could be kept in float32", "name a node of it")
    products = [node for node in model.graph if is_product(node)]
    halves = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    done = [node for node in products if any(value is not None and value.dtype in halves for value in node.inputs)]
    if done and not any(is_float(value) for node in products for value in node.inputs):
        value = next(value for value in done[0].inputs if value is not None and value.dtype in halves)
        assert value.dtype is not None
        raise InvalidGraph(
            f"the graph is in {value.dtype.name.lower()} already: all its products are, as {done[0].name!r} is",
            "give the float32 graph",
        )
