"""Report what this machine can do."""

import click

from enginesmith.pipeline.commands import context, parameters


@click.command()
@parameters.as_json_option
def doctor(as_json: bool) -> None:
    """Report what this machine can do and how to install the rest.

    Example: enginesmith doctor
    """
    from enginesmith.pipeline.workflows import inspect

    state = inspect.examine()
    context.terminal().show_facts(state.model_dump(mode="json") if as_json else inspect.readable(state), as_json)
