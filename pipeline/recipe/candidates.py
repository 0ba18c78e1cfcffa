"""Find the engines and precisions that can pay on this machine, for recipes that list none by hand."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from enginesmith.pipeline.engines import BASELINES, ENGINES, engine_class
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.engines.options import DEFAULT_ENGINES
from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.recipe.recipe import LISTS, Recipe
from enginesmith.pipeline.system import software
from enginesmith.pipeline.system.device import Device

LOSSLESS = "fp32"
"""The precision that changes nothing but the order of sums."""
_PRUNED = "macs=-50%"
"""The pruning target where there is time to train what is left: half of the work (benchmarks/results/pruning.md)."""
_RECOVERING, _TIME_TO_RECOVER = 0.2, 480.0
"""Share of a run's time for training back, and the least time of a run that has it: half of digits needs 86 s."""


def fill_variants(values: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Fill in engines, precisions and quantizers where the values of a recipe list no variants.

    Engines that are built for the recipe's targets, which need not be here, are added to those that run here.
    ``recipe`` is made of the values. Precisions that lose accuracy are among them where there are calibration data, and
    a budget allows a loss.
    """
    if any(values.get(name) for name in LISTS):
        return dict(values) if recipe.variants == "found" else _fill_training(values, recipe)
    full_recipe = recipe.model_copy(update={"engines": tuple(ENGINES)})
    device = full_recipe.where
    ahead = [name for name in ENGINES if recipe.targets and engine_class(name).check_targets()]
    engines = [*dict.fromkeys((*(list(_list_engines(full_recipe)) or DEFAULT_ENGINES), *ahead))]
    allowed = recipe.budgets.max_drop is not None or recipe.min_sqnr_db is not None
    lossy = allowed and recipe.calibration_data is not None
    names = [name for engine in engines for name in engine_class(engine).candidate_precisions(device)]
    precisions = [name for name in dict.fromkeys((LOSSLESS, *names)) if lossy or name == LOSSLESS]
    chosen: dict[str, Any] = {"engines": engines, "precisions": precisions, "variants": "found"}
    quantization = values.get("quantization") or {}
    takes_nncf = device.kind == "cpu" and any("nncf" in engine_class(name).quantizers for name in engines)
    if "int8" in precisions and takes_nncf and "quantizers" not in quantization and software.version("nncf"):
        chosen["quantization"] = {**quantization, "quantizers": ["own", "nncf"]}
    if lossy and recipe.budgets.max_drop:
        chosen |= _fill_pruning(values, recipe)
    return _fill_training({**values, **chosen}, recipe)


def _fill_training(values: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Fill in int8 graphs that are trained, where training is asked for: in a search also by giving time for it."""
    quantization, is_search = values.get("quantization") or {}, values.get("variants") == "found"
    makers = [*(quantization.get("quantizers") or ["own"])]
    timed = is_search and "seconds" in recipe.recovery.model_fields_set
    trains = timed or "qat" in makers or (recipe.recover and (is_search or not recipe.prune))
    if not trains or "int8" not in (values.get("precisions") or ()):
        return dict(values)
    makers += [] if "qat" in makers else ["qat"]
    return {**values, "recover": values.get("recover") or True, "quantization": {**quantization, "quantizers": makers}}


def _fill_pruning(values: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Fill in a pruned model that is trained back, where the model is a module and there is the time.

    Behind computation that is appended, nothing can be trained.
    """
    seconds = recipe.time_seconds or 0.0
    if seconds < _TIME_TO_RECOVER or recipe.append or not _is_torch(recipe):
        return {}
    recovery = {"seconds": _RECOVERING * seconds, **(values.get("recovery") or {})}
    return {"prune": [_PRUNED], "recover": True, "recovery": recovery}


def _is_torch(recipe: Recipe) -> bool:
    with contextlib.suppress(SourceError):  # it is told when the model is looked for
        return resolve(recipe.model).is_torch
    return True


def _list_engines(recipe: Recipe) -> Iterator[str]:
    """List the engines that run a recipe's model here; those that compile for long, for PyTorch alone, come last."""
    is_torch = _is_torch(recipe)
    able = [
        name
        for name in ENGINES
        if name != BASELINES["torch"]
        and recipe.where.kind in engine_class(name).kinds
        and (is_torch or engine_class(name).consumes == "onnx")
        and _is_here(engine_class(name), recipe.where)
    ]
    yield from sorted(able, key=lambda name: engine_class(name).consumes == "torch")


def _is_here(engine: type[Engine], device: Device) -> bool:
    """Tell whether an engine runs here and, if it is built from a module, whether it can be built."""
    is_built = engine.consumes == "torch" and not engine.runs_module()
    return engine.installed(device).ok and (not is_built or engine.buildable(device).ok)
