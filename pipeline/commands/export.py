"""Export a model to ONNX."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands import context, parameters


@click.command(cls=parameters.Command)
@parameters.model_argument
@parameters.output_option
@parameters.what_to_load
@parameters.how_to_export
@parameters.how_to_work
def export(model: str, output: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Export MODEL to ONNX and compare the graph with PyTorch.

    Example: enginesmith export net.py:build -o net.onnx --input image:float32:batch,3,224,224
    """
    from enginesmith.pipeline.workflows import stages

    with context.open_settings(options, quiet) as settings:
        result = stages.export(context.recipe_of(model, None, options), output, settings)
    context.terminal().show_stage(result, as_json)
