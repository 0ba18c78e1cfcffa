"""Validate that the fields of a recipe go together."""

import os
from pathlib import Path

from pydantic import BaseModel

from enginesmith.calibration import file_formats, user_code
from enginesmith.calibration.sources import Request
from enginesmith.pipeline.engines import ENGINES, engine_class
from enginesmith.pipeline.engines.options import DEFAULT_ENGINES
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.measure.quality import check_metric
from enginesmith.pipeline.passes import requested_pass
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.recipe.cli_options import option_for
from enginesmith.pipeline.recipe.recipe import Recipe


def validate_recipe(recipe: Recipe) -> None:
    """Validate what fields of a recipe say about each other.

    Raises:
        UsageError: something that was asked for has no effect, or lacks what it needs.
    """
    _check_smaller(recipe)
    _check_metric(recipe)
    _check_passes(recipe)
    _check_engines(recipe)
    _check_calibration(recipe)
    _check_files(recipe)


def _check_engines(recipe: Recipe) -> None:
    """Options of engines that are not asked for have no effect; those that are may refuse what does not go together."""
    asked = [engine_class(name) for name in recipe.engines]
    for engine in asked:
        engine.check_options(recipe)
    heard = {field for engine in asked for field in engine.reads}
    for name in ENGINES:
        for field in engine_class(name).reads:
            given = _given(recipe, field)
            if given and field not in heard:
                able = [other for other in map(engine_class, ENGINES) if field in other.reads]
                best = next((other for other in able if other.built_elsewhere), able[0])
                raise UsageError(
                    f"{given} has no effect on {', '.join(recipe.engines)}",
                    f"add --engine {best.name}, or leave it away",
                )


def _given(recipe: Recipe, field: str) -> str:
    """Name the first option of a field that differs from its default; empty if none does."""
    value, default = getattr(recipe, field), Recipe.model_fields[field].default
    if value == default:
        return ""
    if not isinstance(value, BaseModel):
        return option_for((field,))
    changed = next(name for name in type(value).model_fields if getattr(value, name) != getattr(default, name))
    return option_for((field, changed))


def _check_passes(recipe: Recipe) -> None:
    """Check that each pass which the recipe names is there, before anything is exported for it."""
    for index, name in enumerate(recipe.passes):
        requested_pass(name)
        if name in recipe.passes[:index]:
            raise UsageError(f"--pass is given twice as {name}", "give each one once")
    if recipe.passes and not any(engine_class(name).consumes == "onnx" for name in recipe.engines):
        raise UsageError(
            f"--pass has no effect on {', '.join(recipe.engines)}",
            f"add --engine {DEFAULT_ENGINES[0]}, or leave it away",
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
        file_formats.check_readable(data, Request(recipe.specs, options=recipe.data_options))
    options = {"--tokenizer": (recipe.data_options.tokenizer,), **recipe.engine_files}
    for option, names in options.items():
        for name in filter(None, names):
            if not os.access(Path(name).expanduser(), os.R_OK):
                raise UsageError(f"{option} names {name}, which is not there or cannot be read", "check the path")


def _check_smaller(recipe: Recipe) -> None:
    """Check that pruning has a module, and training has data."""
    for option, ids in (
        ("--prune", [target.slug for target in recipe.prune_targets]),
        ("--sparsity", [pattern.slug for pattern in recipe.sparsities]),
    ):  # each raises its own message
        if twice := next((one for one in ids if ids.count(one) > 1), None):
            raise UsageError(f"{option} is given twice as {twice}", "give each one once")
    for what, part, empty, missing in (
        ("pruning", recipe.pruning, not recipe.prune, "--prune macs=-50%"),
        ("recovery", recipe.recovery, not recipe.recover, "--recover distil"),
        ("sparsifying", recipe.sparsifying, not recipe.sparsity, "--sparsity 2:4"),
    ):
        given = [name for name in type(part).model_fields if getattr(part, name) != getattr(type(part)(), name)]
        if given and empty:
            raise UsageError(f"{what}.{given[0]} has no effect here", f"add {missing}, or leave it away")
    if recipe.recover and not recipe.prune:
        raise UsageError("--recover trains back what was pruned, and nothing is", "add --prune macs=-50%")
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
    """Check that the metric exists and has labelled data."""
    metric = recipe.metric
    if metric:
        check_metric(metric)
    if recipe.data is None and (metric or recipe.budgets.max_drop is not None):
        asked = f"the metric {metric}" if metric else "the budget max_drop"
        raise UsageError(f"{asked} needs labelled data, and there is none", "give some with --eval DATA")
