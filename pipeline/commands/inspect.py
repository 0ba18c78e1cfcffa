"""What there is: files, models, engines, this machine."""

from pathlib import Path

import click

from enginesmith.pipeline.commands.context import shown
from enginesmith.pipeline.commands.options import as_json_option, model_argument


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@as_json_option
def inspect_file(file: Path, as_json: bool) -> None:
    """Show what is inside an ONNX model, a torch.export archive, a data set, a run directory or a fleet.

    Example: enginesmith inspect net.onnx
    """
    from enginesmith.pipeline.workflows import inspect

    shown().show_facts(inspect.inspect(file), as_json)


@click.command()
@model_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; otherwise standard output.")
def init(model: str, output: Path | None) -> None:
    """Write a commented recipe for MODEL to start from.

    Example: enginesmith init net.py:build -o recipe.yaml
    """
    from enginesmith.pipeline import recipe
    from enginesmith.pipeline.errors import UsageError, storage_errors
    from enginesmith.pipeline.frameworks.source import resolve

    resolve(model)
    text = recipe.commented(recipe.make({"model": model}))
    if output is None:
        click.echo(text, nl=False)
        return
    if output.exists():
        raise UsageError(f"{output} exists", "choose another name, or remove it first")
    with storage_errors(str(output)):
        output.write_text(text)
    click.echo(f"wrote {output}; run it with: enginesmith optimize {model} --recipe {output}", err=True)


@click.command()
@as_json_option
def doctor(as_json: bool) -> None:
    """Say what this machine can do, what is missing, and how to get it.

    Example: enginesmith doctor
    """
    from enginesmith.pipeline.workflows import doctor as doctors

    found = doctors.examine()
    shown().show_facts(found.model_dump(mode="json") if as_json else doctors.readable(found), as_json)


@click.command()
@as_json_option
def models(as_json: bool) -> None:
    """List the zoo: parameters, FLOPs of one sample and inputs.

    Example: enginesmith models
    """
    from enginesmith.pipeline.workflows import inspect

    shown().show_table(inspect.zoo(), as_json)


@click.command()
@click.option("--device", default="cpu", show_default=True, help="Device to look at.")
@as_json_option
def engines(device: str, as_json: bool) -> None:
    """List the engines: which can be used here, and why not.

    Example: enginesmith engines --device cuda
    """
    from enginesmith.pipeline.workflows import inspect

    shown().show_table(inspect.engines(device), as_json)
