"""Convert a graph to another precision."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline import engines
from enginesmith.pipeline.commands.context import recipe_of, settings_of, shown
from enginesmith.pipeline.commands.options import (
    Command,
    how_to_calibrate,
    how_to_export,
    how_to_work,
    model_argument,
    output_option,
    recipe_options,
    what_to_load,
    where_to_run,
)


@click.command(cls=Command)
@model_argument
@output_option
@click.option("--precision", "precisions", multiple=True, required=True, help="fp16, bf16, int8, int8+fp16 …")
@click.option("--engine", "engines", multiple=True, help="Made for this engine; without it, for all of them.")
@recipe_options("min_sqnr_db")
@what_to_load
@how_to_export
@how_to_calibrate
@where_to_run
@how_to_work
def precision(model: str, output: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Convert MODEL or an ONNX file to another precision.

    The graph is calibrated where the precision needs it, and compared with the original.

    Example: enginesmith precision net.onnx -o net-int8.onnx --precision int8 --calibration data.npz
    """
    from enginesmith.pipeline.workflows import stages

    if not options["engines"] and not options["quantisation__placement"]:
        options["quantisation__placement"] = engines.PORTABLE_PLACEMENT
    with settings_of(options, quiet) as settings:
        result = stages.precision(recipe_of(model, None, options), output, settings)
    shown().show_stage(result, as_json)
