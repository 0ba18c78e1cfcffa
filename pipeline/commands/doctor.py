"""Report what this machine can do."""

import click

from enginesmith.pipeline.commands.context import shown
from enginesmith.pipeline.commands.options import as_json_option


@click.command()
@as_json_option
def doctor(as_json: bool) -> None:
    """Report what this machine can do and how to install the rest.

    Example: enginesmith doctor
    """
    from enginesmith.pipeline.workflows import inspect

    found = inspect.examine()
    shown().show_facts(found.model_dump(mode="json") if as_json else inspect.readable(found), as_json)
