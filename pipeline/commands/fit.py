"""Find the largest batch and the smallest workspace that fit a memory budget."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands import context, parameters
from enginesmith.pipeline.engines import DEFAULT_BUILD


@click.command(cls=parameters.Command)
@click.argument("models", nargs=-1, required=True)
@click.option(
    "--memory", callback=parameters.SIZE, metavar="SIZE", help="Device memory that all models together may take."
)
@click.option(
    "--keep-speed",
    type=click.FloatRange(0, 1),
    default=0.95,
    show_default=True,
    help="Share of the full speed that must remain.",
)
@click.option("--engine", "engines", multiple=True, default=(DEFAULT_BUILD,), show_default=True, help="Engine to use.")
@parameters.what_to_load
@parameters.how_to_build
@parameters.how_to_run_engines
@parameters.where_to_run
@parameters.how_to_work
def fit(
    models: tuple[str, ...], memory: int | None, keep_speed: float, as_json: bool, quiet: bool, **options: Any
) -> int:
    """Find the largest batch of MODELS that fits a memory budget.

    TensorRT's builder reports the memory that engines need, without a GPU. For --engine onnxruntime, batches are run.

    For a run directory with a workspace sweep, find the smallest workspace that keeps the speed.

    Example: enginesmith fit net.onnx --memory 8GiB --target sm86
    """
    from enginesmith.pipeline.results import run
    from enginesmith.pipeline.workflows import fit

    if len(models) == 1 and Path(models[0]).is_dir():
        records = fit.keeping(run.read(Path(models[0])), keep_speed)
        context.terminal().show_table([record.model_dump(mode="json") for record in records], as_json)
        return 0
    if memory is None:
        raise click.UsageError("give --memory SIZE, or a run directory")

    with context.open_settings(options, quiet) as settings:
        fits = fit.fit(context.recipe_of(models[0], None, options), models, memory, settings)
    context.terminal().show_facts(fits.model_dump(mode="json"), as_json)
    return 0 if fits.largest_batch is not None else 3
