"""Look up passes by name. A pass is one file or folder here and one line in this table; or it is a plug-in.

Nothing is imported until passes are asked for. ``passes/base.py`` has the contract, docs/extending.md an example.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.system import plugins

if TYPE_CHECKING:
    from enginesmith.pipeline.artifact import Kind
    from enginesmith.pipeline.passes.base import Pass, PrecisionRequest, Stage


PASSES: Mapping[str, str] = {
    "export": "enginesmith.pipeline.passes.export.export:Export",
    "simplify": "enginesmith.pipeline.passes.simplify:Simplify",
    "decompose-attention": "enginesmith.pipeline.passes.export.attention:DecomposeAttention",
    "opset": "enginesmith.pipeline.passes.opset:ConvertOpset",
    "sparsify": "enginesmith.pipeline.passes.sparsify.sparsify:Sparsify",
    "shift": "enginesmith.pipeline.passes.rescale.shift:ChannelShift",
    "equalize": "enginesmith.pipeline.passes.rescale.equalize:CrossLayerEqualization",
    "smooth": "enginesmith.pipeline.passes.rescale.smooth_quant:Smooth",
    "precision": "enginesmith.pipeline.passes.quantize.precision:Precision",
}
"""Name → ``module:Class``. Passes of one stage run in this order."""


def pass_class(name: str) -> "type[Pass]":
    """Import a pass by name; only a name that the table lacks is looked up among the installed plug-ins.

    Raises:
        UsageError: no pass has that name.
        MissingCapability: it is a plug-in that cannot be loaded, or that is no pass of that name.
    """
    if name not in PASSES and not plugins.offered(plugins.PASSES, name):
        raise UsageError(f"there is no pass {name!r}", f"use {_requestable()}")
    kind: type[Pass] = plugins.load_class(plugins.PASSES, name, PASSES, "enginesmith.pipeline.passes.base:Pass")
    return kind


def requested_pass(name: str) -> "type[Pass]":
    """Import a pass that ``--pass`` may name: one from ONNX to ONNX that nothing else asks for.

    Raises:
        UsageError: no pass has that name, or it is not asked for like that.
        MissingCapability: as in :func:`pass_class`.
    """
    kind = pass_class(name)
    if kind.stage != "request" or kind.requires or (kind.consumes, kind.produces) != ("onnx", "onnx"):
        raise UsageError(f"the pass {name!r} is not asked for by --pass", f"use {_requestable()}")
    return kind


def passes_for(
    stage: "Stage", recipe: Any, kind: "Kind" = "onnx", request: "PrecisionRequest | None" = None
) -> "Iterator[Pass]":
    """Make the passes of a stage that a recipe asks for, in the table's order, each with the fields that it reads.

    ``kind`` is that of the artifact that the first of them gets.
    """
    for name in PASSES:
        pass_type = pass_class(name)
        if pass_type.stage == stage and pass_type.consumes == kind:
            for step in _make(pass_type, recipe, request):
                kind = step.produces
                yield step


def graph_passes(recipe: Any, kind: "Kind") -> "Iterator[Pass]":
    """Make the passes from a loaded model to the float graph of all engines; those that ``--pass`` names are last."""
    yield from passes_for("graph", recipe, kind)
    for name in recipe.passes:
        yield from _make(requested_pass(name), recipe, None)


def _make(kind: "type[Pass]", recipe: Any, request: "PrecisionRequest | None") -> "Iterator[Pass]":
    from enginesmith.pipeline.passes.base import PrecisionRequest

    size = {"external_data_bytes": recipe.export.external_data_bytes}
    for step in kind.requested({field: getattr(recipe, field) for field in kind.reads}, request or PrecisionRequest()):
        yield step.model_copy(update=size) if size.keys() <= kind.model_fields.keys() else step


def _requestable() -> str:
    own = [name for name in PASSES if pass_class(name).stage == "request"]
    installed = [f"{plugin.name} (of {plugin.distribution})" for plugin in plugins.installed(plugins.PASSES)]
    return ", ".join([*own, *installed]) + ("" if installed else "; no installed distribution offers others")
