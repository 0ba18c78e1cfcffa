"""What has to hold of a graph before anything in it is quantised."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from enginesmith.pipeline.errors import InvalidGraph, UsageError
from enginesmith.pipeline.precision import groups
from enginesmith.pipeline.precision.groups import Group

if TYPE_CHECKING:
    import onnx_ir as ir

ON_REQUEST = "the assignment keeps it in floating point"
"""Why a group is not quantised that could be."""
_MARKS = ("Quantize", "QLinear", "Integer", "NBits", "MatMulBnb4", "QGemm", "QAttention")
_STANDARD = ("", "ai.onnx")
_INITIALISERS_ARE_NO_INPUTS = 4  # IR version from which weights need not be listed as inputs
_SHOWN = 3


def prepare(model: "ir.Model", precision: str, keep: Collection[str] = ()) -> tuple[Group, ...]:
    """Make a float32 graph flat, with weights that cannot be fed and names for all nodes; its groups.

    Raises:
        InvalidGraph: it is quantised already, not in float32, or has no product.
        UsageError: ``keep`` names groups that there are none of.
    """
    import onnx_ir as ir
    from onnx_ir.passes import common

    _hold(model, precision)
    model.ir_version = max(model.ir_version, _INITIALISERS_ARE_NO_INPUTS)
    ir.passes.Sequential(common.InlinePass(), common.RemoveInitializersFromInputsPass())(model)
    found = groups.find(model)
    if unknown := sorted(set(keep) - {group.name for group in found}):
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise UsageError(
            f"{', '.join(map(repr, unknown[:_SHOWN]))}{more} are to stay in floating point, and the graph has no "
            "such products",
            "take the names from the table of groups of this graph",
        )
    return found


def require_opset(model: "ir.Model", least: int, precision: str) -> None:
    """Convert a graph to the opset that a precision needs, if it is older.

    Raises:
        InvalidGraph: it cannot be converted.
    """
    from onnxscript import version_converter

    given = _opset(model)
    if given >= least:
        return
    try:
        version_converter.convert_version(model, target_version=least, fallback=True)
    except (ValueError, RuntimeError) as error:
        raise _too_old(given, least, precision) from error
    if _opset(model) < least:
        raise _too_old(given, least, precision)


def _opset(model: "ir.Model") -> int:
    return max((model.graph.opset_imports.get(domain, 0) for domain in _STANDARD), default=0)


def _too_old(given: int, least: int, precision: str) -> InvalidGraph:
    return InvalidGraph(
        f"the graph has opset {given}, {precision} needs opset {least}, and it cannot be converted",
        f"export it with --opset {least} or later",
    )


def _hold(model: "ir.Model", precision: str) -> None:
    import onnx_ir as ir

    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if any(mark in node.op_type for mark in _MARKS):
            raise InvalidGraph(
                f"the graph is quantised already: it has a {node.op_type} ({node.name or node.outputs[0].name!r}), and "
                f"{precision} is made of a float32 graph",
                "give the graph as it was before",
            )
    low = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    for value in values:
        if value.const_value is not None and value.const_value.dtype in low and value.const_value.size > 1:
            raise InvalidGraph(
                f"the weight {value.name!r} is {value.const_value.dtype.name.lower()}, and {precision} is made of a "
                "float32 graph",
                "export the model in float32: precisions that mix types lower the rest themselves",
            )


def require_products(
    found: Collection[Group], precision: str, usable: Collection[Group], operators: Collection[str] = groups.PRODUCTS
) -> None:
    """Refuse a graph that has nothing to quantise.

    Raises:
        InvalidGraph: says which operators would be, or why those that are there cannot be.
    """
    if usable:
        return
    reasons = sorted({f"{group.operator}: {group.reason}" for group in found if group.reason})
    what = f"has no product that can be in {precision}" + (f" ({'; '.join(reasons[:_SHOWN])})" if reasons else "")
    raise InvalidGraph(
        f"the graph {what}; {', '.join(operators)} with a constant float32 weight can", "use fp16 or fp32"
    )
