"""Write a recipe to start from."""

from pathlib import Path

import click

from enginesmith.pipeline.commands import parameters
from enginesmith.pipeline.errors import UsageError, storage_errors


@click.command()
@parameters.model_argument
@click.option("-o", "--output", type=parameters.PATH, help="File to write; otherwise standard output.")
def init(model: str, output: Path | None) -> None:
    """Write a recipe for MODEL with every option explained.

    Example: enginesmith init net.py:build -o recipe.yaml
    """
    from enginesmith.pipeline import recipe
    from enginesmith.pipeline.frameworks.source import resolve

    resolve(model)
    text = recipe.commented(recipe.make({"model": model}, listed=True))
    if output is None:
        click.echo(text, nl=False)
        return
    if output.exists():
        raise UsageError(f"{output} exists", "choose another name, or remove it first")
    with storage_errors(str(output)):
        output.write_text(text, encoding="utf-8")
    click.echo(f"wrote {output}; run it with: enginesmith optimize {model} --recipe {output}", err=True)
