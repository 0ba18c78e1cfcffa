"""Simplify an ONNX graph."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands.context import recipe_of, settings_of, shown
from enginesmith.pipeline.commands.options import Command, file_argument, how_to_work, output_option, what_to_load


@click.command(cls=Command)
@file_argument
@output_option
@what_to_load
@how_to_work
def simplify(file: Path, output: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Simplify an ONNX FILE and compare the result with it.

    Example: enginesmith simplify net.onnx -o net-clean.onnx
    """
    from enginesmith.pipeline.workflows import stages

    with settings_of(options, quiet) as settings:
        result = stages.simplify(recipe_of(str(file), None, options), output, settings)
    shown().show_stage(result, as_json)
