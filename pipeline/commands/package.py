"""Package an engine of a run for use elsewhere."""

from pathlib import Path

import click

from enginesmith.pipeline.commands import context, parameters


@click.command()
@parameters.run_argument
@click.option("-f", "--format", "form", type=click.Choice(["bundle", "triton"]), required=True, help="What to write.")
@click.option("-o", "--output", type=parameters.PATH, required=True, help="Folder to write; a new one.")
@click.option("--variant", metavar="ID", help="Variant to package; default: the winner.")
@click.option("--no-samples", is_flag=True, help="Put random input into the bundle, not a sample of your data.")
@click.option(
    "--trust",
    is_flag=True,
    help="Also try out machine code (aotinductor, TensorRT with host code): you trust who made the run.",
)
@parameters.as_json_option
def package(
    run: Path, form: str, output: Path, variant: str | None, no_samples: bool, trust: bool, as_json: bool
) -> None:
    """Package the winner of RUN as a bundle with a script, or for Triton.

    manifest.json has the sha256 of every file. Engines are code: serve only what you trust.

    Example: enginesmith package runs/digits -f bundle -o digits-bundle
    """
    from enginesmith.pipeline.results.package import package as packages

    chosen = next(known for known in packages.FORMATS if known == form)
    bundle = packages.package(run, chosen, output, variant, keep_samples=not no_samples, trust=trust)
    if as_json:
        context.terminal().print_json(bundle.model_dump(mode="json"))
    else:
        click.echo(bundle.summary)
