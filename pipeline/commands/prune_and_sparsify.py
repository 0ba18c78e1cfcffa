"""Make a model smaller: remove channels, or set weights to zero."""

from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.commands import context, parameters


@click.command(cls=parameters.Command)
@parameters.model_argument
@click.option("-o", "--output", type=parameters.PATH, required=True, help="Folder to write.")
@click.option(
    "--prune",
    required=True,
    metavar="TARGET",
    help="What is removed: 30% of the channels, macs=-50%, params=-50%, latency=-40%.",
)
@click.option("--engine", "engines", multiple=True, help="Engine that measures latency=…; default onnxruntime.")
@click.option("--measure-time", metavar="TIME", help="Longest time for one trial of latency=…, at most 6s.")
@click.option("--data", "calibration", metavar="DATA", help="Data for taylor and recovery: embedded set, .npz …")
@click.option("--samples", type=int, help="Samples that the importance taylor uses; default 128.")
@parameters.how_to_prune
@parameters.what_to_load
@parameters.how_to_work
def prune(model: str, output: Path, prune: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Remove channels, hidden units and attention heads of MODEL.

    The result is a folder with a smaller model, which all commands take as MODEL.

    Example: enginesmith prune net.py:build -o pruned --prune macs=-50% --recover distil --data data.npz
    """
    from enginesmith.pipeline.workflows import stages

    options["prune"] = (prune,)
    with context.open_settings(options, quiet) as settings:
        result = stages.prune(context.recipe_of(model, None, options), output, settings)
    context.terminal().show_pruned(result, as_json)


@click.command(cls=parameters.Command)
@parameters.model_argument
@parameters.output_option
@click.option("--sparsity", default="2:4", show_default=True, metavar="PATTERN", help="2:4, or unstructured=0.5.")
@click.option("--per-layer", is_flag=True, help="Unstructured: a threshold for each layer, not one for all.")
@click.option("--protect", multiple=True, metavar="NAME", help="Weight, node, module or pattern that stays dense.")
@click.option("--data", "calibration", metavar="DATA", help="Data for recovery: embedded set, .npz …")
@parameters.recipe_options("min_sqnr_db", "recover", "recovery", "metric")
@parameters.what_to_load
@parameters.how_to_export
@parameters.how_to_work
def sparsify(
    model: str,
    output: Path,
    sparsity: str,
    per_layer: bool,
    protect: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Set weights of MODEL or of an ONNX file to zero.

    Use 2:4 for sparse tensor cores, or unstructured for the smallest weights. With --recover, the weights that are
    left are trained; the distance from the dense model's outputs is shown.

    Example: enginesmith sparsify net.onnx -o net-24.onnx --sparsity 2:4 --recover distil --data data.npz
    """
    from enginesmith.pipeline.passes.sparsify.options import SparsifyOptions
    from enginesmith.pipeline.workflows import stages

    chosen = SparsifyOptions(scope="layer" if per_layer else "global", protect=protect)
    recipe = context.recipe_of(model, None, {**options, "sparsity": (sparsity,)}).model_copy(
        update={"sparsifying": chosen}
    )
    with context.open_settings(options, quiet) as settings:
        result = stages.sparsify(recipe, output, settings)
    context.terminal().show_stage(result, as_json)
