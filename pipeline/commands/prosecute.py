"""Look for inputs on which an engine is wrong."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands import context, parameters
from enginesmith.pipeline.errors import UsageError


@click.command(cls=parameters.Command)
@click.argument("subject", metavar="RUN|MODEL")
@click.argument("engine", metavar="[VARIANT|FILE]", required=False)
@parameters.option(
    "--time", "seconds", callback=parameters.TIME_ABOVE_ZERO, default="1m", show_default=True, metavar="TIME",
    help="Time for trying inputs; the samples are tried in any case.",
)  # fmt: skip
@parameters.option(
    "-o", "--output", type=parameters.PATH, default=Path("finding"), show_default=True,
    help="Folder to write the evidence into.",
)  # fmt: skip
@parameters.option(
    "--as", "precision", type=parameters.PrecisionName(), metavar="NAME",
    help="Precision of FILE, as --precision of other commands names it; by default what its graph says.",
)  # fmt: skip
@parameters.what_to_load
@parameters.where_to_run
@parameters.without_limit
def prosecute(
    subject: str,
    engine: str | None,
    seconds: float,
    output: Path,
    precision: str | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Look for allowed inputs on which an engine is wrong.

    Inputs that nobody sampled are tried: sizes and batches, paddings, patterns of values, changed samples. What the
    precision and the input's own sensitivity explain is no fault. If one is found, the guilty stage is named, the
    graph is reduced to the nodes that show it, and a folder is written that proves it: repro.py needs no more than the
    runtime's own package. The exit code is then 1.

    RUN with VARIANT (by default the winner), or MODEL with an ONNX or engine FILE.

    Example: enginesmith prosecute runs/net openvino-int8 --time 5m; enginesmith prosecute net.py:build net.onnx
    """
    from enginesmith.pipeline.workflows import prosecute as workflow

    is_run = Path(subject).is_dir() and Path(subject, "run.json").is_file()
    if not is_run and engine is None:
        raise UsageError(
            f"{subject} is no run, and no engine is named", "give a run, or a model and a file: prosecute MODEL FILE"
        )
    given = [*(["--as"] if precision else []), *parameters.list_given_options(options)]
    if is_run and given:
        raise UsageError(
            f"{', '.join(given)} cannot be given with a run, whose recipe has the model, its inputs and the device",
            f"omit {'it' if len(given) == 1 else 'them'}; or give the model and a file: prosecute MODEL FILE",
        )
    with context.open_settings(options, quiet) as settings:
        if is_run:
            result = workflow.prosecute_variant(Path(subject), engine, seconds, output, settings)
        else:
            recipe = context.recipe_of(subject, None, options)
            result = workflow.prosecute_file(recipe, Path(str(engine)), precision, seconds, output, settings)
    context.terminal().show_prosecution(result, as_json)
    return 1 if result.prosecution.finding else 0
