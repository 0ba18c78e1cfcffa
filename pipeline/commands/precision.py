"""Convert a graph to another precision."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline import engines
from enginesmith.pipeline.commands import context, parameters


@click.command(cls=parameters.Command)
@parameters.model_argument
@parameters.output_option
@click.option("--precision", "precisions", multiple=True, required=True, help="fp16, bf16, int8, int8+fp16 …")
@click.option("--engine", "engines", multiple=True, help="Engine that the graph is for; default: all of them.")
@parameters.recipe_options("min_sqnr_db")
@parameters.what_to_load
@parameters.how_to_export
@parameters.how_to_calibrate
@parameters.where_to_run
@parameters.how_to_work
def precision(model: str, output: Path, as_json: bool, quiet: bool, **options: Any) -> None:
    """Convert MODEL or an ONNX file to another precision.

    The graph is calibrated where the precision needs it, and compared with the original.

    Example: enginesmith precision net.onnx -o net-int8.onnx --precision int8 --calibration data.npz
    """
    from enginesmith.pipeline.workflows import stages

    by_nncf = "nncf" in (options["quantization__quantizers"] or ())  # which places pairs for CPUs
    if not options["engines"] and not options["quantization__placement"] and not by_nncf:
        options["quantization__placement"] = engines.PORTABLE_PLACEMENT
    with context.open_settings(options, quiet) as settings:
        result = stages.precision(context.recipe_of(model, None, options), output, settings)
    context.terminal().show_stage(result, as_json)
