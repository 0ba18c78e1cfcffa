"""Explain a variant's precision."""

from pathlib import Path

import click

from enginesmith.pipeline.commands import context, parameters


@click.command()
@parameters.run_argument
@click.argument("variant", required=False)
@parameters.as_json_option
def explain(run: Path, variant: str | None, as_json: bool) -> None:
    """Explain what a variant loses in low precision.

    For each layer that loses much: the cause, the remedy that was found, and what it costs; then the trials that led
    there, and the training. VARIANT is by default the winner, or the first that was quantized, and measured if
    one was. The section "Precision" of report.html has the errors of all layers.

    Example: enginesmith explain runs/net openvino-int8
    """
    from enginesmith.pipeline.results import run as runs
    from enginesmith.pipeline.results.explain import choose_explained

    run_record = runs.read(run)
    context.terminal().show_explanation(run_record, choose_explained(run_record, variant), as_json)
