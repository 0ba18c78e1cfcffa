"""List the models of the zoo and the engines."""

import click

from enginesmith.pipeline.commands import context, parameters


@click.command()
@parameters.as_json_option
def models(as_json: bool) -> None:
    """List the models of the zoo: parameters, FLOPs, inputs.

    Example: enginesmith models
    """
    from enginesmith.pipeline.workflows import inspect

    context.terminal().show_table(inspect.zoo(), as_json)


@click.command()
@click.option("--device", default="cpu", show_default=True, help="Device to look at.")
@parameters.as_json_option
def engines(device: str, as_json: bool) -> None:
    """List the engines, and why some are not available here.

    Example: enginesmith engines --device cuda
    """
    from enginesmith.pipeline.workflows import inspect

    context.terminal().show_table(inspect.engines(device), as_json)
