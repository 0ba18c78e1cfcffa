"""Show what is inside a file."""

from pathlib import Path

import click

from enginesmith.pipeline.commands.context import shown
from enginesmith.pipeline.commands.options import as_json_option, file_argument


@click.command("inspect")
@file_argument
@as_json_option
def inspect_file(file: Path, as_json: bool) -> None:
    """Show what is inside a model, an engine, a data set or a run.

    FILE is an ONNX file, a torch.export archive, an engine, a data set, a run directory or a fleet's folder.

    Example: enginesmith inspect net.onnx
    """
    from enginesmith.pipeline.workflows import inspect

    shown().show_facts(inspect.inspect(file), as_json)
