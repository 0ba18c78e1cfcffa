"""Measure models as they are."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands.context import recipe_of, settings_of, shown
from enginesmith.pipeline.commands.options import (
    PATH,
    Command,
    EngineName,
    how_to_measure,
    how_to_work,
    what_to_load,
    where_to_run,
)


@click.command(cls=Command)
@click.argument("models", nargs=-1, required=True)
@what_to_load
@where_to_run
@how_to_measure
@click.option("--recipe", "recipe_file", type=PATH, help="Recipe; options change it.")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    type=EngineName("torch"),
    help="Measure the baseline's module by this engine too.",
)
@click.option("--precision", "precisions", multiple=True, help="fp32, fp16 or bf16: what those engines cast it to.")
@how_to_work
def benchmark(models: tuple[str, ...], recipe_file: Path | None, as_json: bool, quiet: bool, **options: Any) -> int:
    """Measure latency and peak memory of MODELS side by side.

    The first PyTorch model is the baseline, which runs as it is; without one, the first ONNX file.

    With --engine, that PyTorch model is measured in other ways too: --engine eager --engine compiled --precision fp16

    Example: enginesmith benchmark net.py:build net.onnx net.engine --batch 1,8,32
    """
    from enginesmith.pipeline.workflows import stages

    options["measure__limits"] = options["measure__limits"] is not False
    with settings_of(options, quiet) as settings:
        run = stages.benchmark(recipe_of(models[0], recipe_file, options), models, settings)
    code: int = shown().show_run(run, None, as_json)
    measured = any(record.status == "measured" for record in run.records)
    return code or (0 if measured else 1)
