"""Passes: one per file, listed here as ``module:Class`` so that naming them imports nothing heavy."""

PASSES: tuple[str, ...] = (
    "enginesmith.pipeline.passes.export.export:Export",
    "enginesmith.pipeline.passes.simplify:Simplify",
    "enginesmith.pipeline.passes.export.attention:DecomposeAttention",
    "enginesmith.pipeline.passes.rescale.equalize:Equalise",
    "enginesmith.pipeline.passes.rescale.smooth_quant:Smooth",
    "enginesmith.pipeline.passes.quantize.precision:Precision",
    "enginesmith.pipeline.passes.sparsify.sparsify:Sparsify",
)
