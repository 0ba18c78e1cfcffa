"""Measure models as they are."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands import context, parameters


@click.command(cls=parameters.Command)
@click.argument("models", nargs=-1, required=True)
@parameters.what_to_load
@parameters.where_to_run
@parameters.how_to_measure
@click.option("--recipe", "recipe_file", type=parameters.PATH, help="Recipe file; options override its fields.")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    type=parameters.EngineName(),
    help="Measure the reference model with this engine too.",
)
@click.option("--precision", "precisions", multiple=True, help="Precision for those engines: fp32, fp16 or bf16.")
@parameters.how_to_work
def benchmark(models: tuple[str, ...], recipe_file: Path | None, as_json: bool, quiet: bool, **options: Any) -> int:
    """Measure latency and peak memory of MODELS side by side.

    The first PyTorch model, run without changes, is the reference; without one, the first ONNX file.

    With --engine, this model is measured with other engines too: --engine eager --engine compiled --precision fp16

    The limits of the machine are measured, too, and every model is compared with them: --no-limits leaves that out.

    Example: enginesmith benchmark net.py:build net.onnx net.engine --batch 1,8,32
    """
    from enginesmith.pipeline.workflows import stages

    options["measure__limits"] = options["measure__limits"] is not False
    with context.open_settings(options, quiet) as settings:
        run = stages.benchmark(context.recipe_of(models[0], recipe_file, options), models, settings)
    code: int = context.terminal().show_run(run, None, as_json)
    measured = any(record.status == "measured" for record in run.records)
    return code or (0 if measured else 1)
