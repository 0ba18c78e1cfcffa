"""Compare the outputs of two models."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands import context, parameters
from enginesmith.pipeline.errors import UsageError


@click.command(cls=parameters.Command)
@parameters.file_argument
@click.option("--against", "model", metavar="MODEL", help="Model to compare with; not for a bundle.")
@click.option(
    "--trust",
    is_flag=True,
    help="Also load a bundle's machine code (aotinductor, TensorRT with host code): you trust its maker.",
)
@parameters.recipe_options("min_sqnr_db")
@parameters.what_to_load
@parameters.where_to_run
@parameters.how_to_work
def verify(file: Path, model: str | None, trust: bool, as_json: bool, quiet: bool, **options: Any) -> int:
    """Compare the outputs of an ONNX FILE with those of a model.

    The outputs are compared at the smallest, usual and largest shape.

    If FILE is a bundle that `package` wrote, check every file's digest and run its test vector.

    Example: enginesmith verify net.onnx --against net.py:build; enginesmith verify net-bundle
    """
    from enginesmith.pipeline.workflows import stages

    min_sqnr_db = options["min_sqnr_db"]
    given = parameters.list_given_options({**options, "min_sqnr_db": None})
    if model is None and given and file.is_dir():
        raise UsageError(
            f"{', '.join(given)} cannot be given with a bundle, which has its inputs and the device with it",
            f"omit {'it' if len(given) == 1 else 'them'}; or give an ONNX file and the model: --against MODEL",
        )
    if model is not None and trust:
        raise UsageError("--trust is for a bundle, and with --against FILE is none", "omit it")
    with context.open_settings(options, quiet) as settings:
        result = (
            stages.verify(context.recipe_of(model, None, options), file, settings)
            if model
            else stages.verify_bundle(file, settings, trust=trust, min_sqnr_db=min_sqnr_db)
        )
    context.terminal().show_stage(result, as_json)
    return 0 if result.passed else 1
