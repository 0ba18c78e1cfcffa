"""Package an engine of a run for use elsewhere."""

from pathlib import Path

import click

from enginesmith.pipeline.commands import context, parameters


@click.command()
@parameters.run_argument
@click.option("-f", "--format", "form", type=click.Choice(["bundle", "triton"]), required=True, help="What to write.")
@click.option("-o", "--output", type=parameters.PATH, required=True, help="Folder to write; a new one.")
@click.option("--variant", metavar="ID", help="Which variant; the run's winner without it.")
@click.option("--no-samples", is_flag=True, help="Keep no sample of your data in a bundle: make its test vector up.")
@parameters.as_json_option
def package(run: Path, form: str, output: Path, variant: str | None, no_samples: bool, as_json: bool) -> None:
    """Package the winner of RUN: a bundle with a script, or for Triton.

    Everything in it is named by its sha256 in manifest.json. Engines are code: serve only what you trust.

    Example: enginesmith package runs/digits -f bundle -o digits-bundle
    """
    from enginesmith.pipeline.results.package import package as packages

    chosen = next(known for known in packages.FORMATS if known == form)
    bundle = packages.package(run, chosen, output, variant, keep_samples=not no_samples)
    if as_json:
        context.terminal().print_json(bundle.model_dump(mode="json"))
    else:
        click.echo(bundle.summary)
