"""Simplify an ONNX graph."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands import context, parameters


@click.command(cls=parameters.Command)
@parameters.file_argument
@parameters.output_option
@parameters.what_to_load
@parameters.how_to_work
def simplify(file: Path, output: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Simplify an ONNX FILE and compare the result with it.

    Example: enginesmith simplify net.onnx -o net-clean.onnx
    """
    from enginesmith.pipeline.workflows import stages

    with context.open_settings(options, quiet) as settings:
        result = stages.simplify(context.recipe_of(str(file), None, options), output, settings)
    context.terminal().show_stage(result, as_json)
