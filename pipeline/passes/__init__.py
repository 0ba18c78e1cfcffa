"""Passes: one per file, listed here as ``module:Class`` so that naming them imports nothing heavy."""

PASSES: tuple[str, ...] = (
    "enginesmith.pipeline.passes.export:Export",
    "enginesmith.pipeline.passes.simplify:Simplify",
    "enginesmith.pipeline.passes.decompose:DecomposeAttention",
    "enginesmith.pipeline.passes.equalise:Equalise",
    "enginesmith.pipeline.passes.smooth:Smooth",
    "enginesmith.pipeline.passes.precision:Precision",
    "enginesmith.pipeline.passes.sparsify:Sparsify",
)
