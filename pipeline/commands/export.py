"""Export a model to ONNX."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands.context import recipe_of, settings_of, shown
from enginesmith.pipeline.commands.options import (
    Command,
    how_to_export,
    how_to_work,
    model_argument,
    output_option,
    what_to_load,
)


@click.command(cls=Command)
@model_argument
@output_option
@what_to_load
@how_to_export
@how_to_work
def export(model: str, output: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Export MODEL to ONNX and compare the graph with PyTorch.

    Example: enginesmith export net.py:build -o net.onnx --input image:float32:batch,3,224,224
    """
    from enginesmith.pipeline.workflows import stages

    with settings_of(options, quiet) as settings:
        result = stages.export(recipe_of(model, None, options), output, settings)
    shown().show_stage(result, as_json)
