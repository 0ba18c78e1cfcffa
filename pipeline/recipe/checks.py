"""Whether the fields of a recipe fit together."""

import os
from pathlib import Path

from enginesmith.calibration import forms, user_code
from enginesmith.calibration.source import Request
from enginesmith.pipeline.engines.trt.options import option_name
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.measure.quality import METRICS
from enginesmith.pipeline.precision.kinds import KINDS
from enginesmith.pipeline.recipe.model import Recipe
from enginesmith.pipeline.source import resolve


def hold_together(recipe: Recipe) -> None:
    """What fields say of each other, which none of them says alone.

    Raises:
        UsageError: something that was asked for has no effect, or lacks what it needs.
    """
    _check_smaller(recipe)
    _check_metric(recipe)
    _check_tensorrt(recipe)
    _check_run(recipe)
    _check_calibration(recipe)
    _check_files(recipe)


def _check_tensorrt(recipe: Recipe) -> None:
    """Targets, limits and build options are for TensorRT engines, and have no effect on others."""
    if recipe.tensorrt_run.weight_streaming_budget is not None and not recipe.tensorrt.weight_streaming:
        raise UsageError("--weight-streaming-budget needs an engine that streams weights", "add --weight-streaming")
    if any(name.startswith("tensorrt") for name in recipe.engines):
        return
    given = [option for option, value in (("--target", recipe.targets), ("--workspace", recipe.workspace)) if value]
    given += [option_name(name) for name in recipe.tensorrt.asked]
    if given:
        raise UsageError(
            f"{given[0]} has no effect on {', '.join(recipe.engines)}", "add --engine tensorrt_rtx, or leave it away"
        )


def _check_run(recipe: Recipe) -> None:
    """Options of an engine that is not asked for have no effect."""
    for part, engines in ((recipe.eager, ("eager", "compiled")), (recipe.onnxruntime, ("onnxruntime",))):
        given = [name for name, value in part if value]
        if given and not set(engines) & set(recipe.engines):
            where = f"{engines[0]}.{given[0]}"
            raise UsageError(
                f"{where} has no effect on {', '.join(recipe.engines)}", f"add --engine {engines[0]}, or leave it away"
            )


def _check_calibration(recipe: Recipe) -> None:
    """Ranges come from real data, or from made-up data that was asked for."""
    needing = [name for name in recipe.precisions if KINDS[name].calibrated]
    if needing and not recipe.calibration_data and not recipe.synthetic_calibration:
        raise UsageError(
            f"{needing[0]} needs calibration data, and there is none",
            "give some samples with --calibration DATA; --synthetic-calibration makes some up, which is good for "
            "measuring speed and memory, and not for accuracy",
        )


def _check_files(recipe: Recipe) -> None:
    """Check that files which the recipe names are there and can be read, before any step waits for them.

    Raises:
        UsageError: one is not there, or its header cannot be read.
    """
    for data in dict.fromkeys(filter(None, (recipe.calibration, recipe.eval_data))):
        forms.check_readable(data, Request(recipe.specs, options=recipe.data_options))
    options = {"--tokenizer": (recipe.data_options.tokenizer,), "--plugins": recipe.tensorrt.plugins}
    for option, names in options.items():
        for name in filter(None, names):
            if not os.access(Path(name).expanduser(), os.R_OK):
                raise UsageError(f"{option} names {name}, which is not there or cannot be read", "check the path")


def _check_smaller(recipe: Recipe) -> None:
    """What is pruned has to be a module, and what is learnt needs data."""
    for option, ids in (
        ("--prune", [target.slug for target in recipe.prune_targets]),
        ("--sparsity", [pattern.slug for pattern in recipe.sparsities]),
    ):  # each raises its own message
        if twice := next((one for one in ids if ids.count(one) > 1), None):
            raise UsageError(f"{option} is given twice as {twice}", "give each one once")
    for what, part, empty, missing in (
        ("pruning", recipe.pruning, not recipe.prune, "--prune macs=0.5"),
        ("recovery", recipe.recovery, not recipe.recover, "--recover distil"),
        ("sparsifying", recipe.sparsifying, not recipe.sparsity, "--sparsity 2:4"),
    ):
        given = [name for name in type(part).model_fields if getattr(part, name) != getattr(type(part)(), name)]
        if given and empty:
            raise UsageError(f"{what}.{given[0]} has no effect here", f"add {missing}, or leave it away")
    if recipe.prune and not resolve(recipe.model).is_torch:
        raise UsageError(
            f"{recipe.model} is a graph, and channels are pruned in a module",
            "give the model as file.py:factory; --sparsity 2:4 works on graphs",
        )
    if recipe.recover and not recipe.prune:
        raise UsageError("--recover trains back what was pruned, and nothing is", "add --prune macs=0.5")
    if recipe.recover and user_code.is_reference(recipe.recovery.method):
        user_code.check_reference(recipe.recovery.method, "loss")
    needing = [
        what
        for what, asked in (
            ("recovery", recipe.recover),
            ("importance by taylor", recipe.pruning.importance == "taylor"),
        )
        if asked and recipe.prune
    ]
    if needing and recipe.calibration_data is None:
        raise UsageError(
            f"{needing[0]} needs data, and there is none",
            "give some samples with --calibration DATA; distilling needs no labels",
        )


def _check_metric(recipe: Recipe) -> None:
    """What was asked for, by name or by a budget on it, has to be there and needs data."""
    metric = recipe.metric
    if metric and ":" not in metric and metric not in METRICS:
        raise UsageError(
            f"there is no metric {metric!r}", f"use {', '.join(METRICS)}, module:function or file.py:function"
        )
    if metric and metric not in METRICS:
        user_code.check_reference(metric, "metric")
    if recipe.data is None and (metric or recipe.budgets.max_drop is not None):
        asked = f"the metric {metric}" if metric else "the budget max_drop"
        raise UsageError(f"{asked} needs labelled data, and there is none", "give some with --eval DATA")
