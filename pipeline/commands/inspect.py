"""Show what is inside a file."""

from pathlib import Path

import click

from enginesmith.pipeline.commands import context, parameters


@click.command("inspect")
@parameters.file_argument
@parameters.as_json_option
def inspect_file(file: Path, as_json: bool) -> None:
    """Show what is inside a model, an engine, a data set, a run or a package.

    FILE is an ONNX file, a torch.export archive, an engine, a data set, a package, or the folder of a run or a fleet.

    Example: enginesmith inspect net.onnx
    """
    from enginesmith.pipeline.workflows import inspect

    context.terminal().show_facts(inspect.inspect(file), as_json)
