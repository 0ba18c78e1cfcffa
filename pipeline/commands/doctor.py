"""Report what this machine can do."""

import click

from enginesmith.pipeline.commands import context, parameters
from enginesmith.pipeline.errors import MissingCapability


@click.command()
@parameters.as_json_option
def doctor(as_json: bool) -> int:
    """Report what this machine can do and how to install the rest.

    It ends with exit code 4 if a package is installed and cannot be imported.

    Example: enginesmith doctor
    """
    from enginesmith.pipeline.workflows import inspect

    state = inspect.examine()
    context.terminal().show_facts(state.model_dump(mode="json") if as_json else inspect.readable(state), as_json)
    return MissingCapability.exit_code if state.broken else 0
