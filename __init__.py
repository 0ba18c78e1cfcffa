"""The public API. Nothing heavy is imported until it is used.

from enginesmith import load, make_recipe, optimize
run = optimize(make_recipe({"model": "digits"}), "runs/digits")
print(run.winner)
with load("runs/digits") as model:
    logits = model(image)
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginesmith.pipeline.errors import EnginesmithError
    from enginesmith.pipeline.execution.settings import Settings
    from enginesmith.pipeline.recipe import Recipe
    from enginesmith.pipeline.recipe import make as make_recipe
    from enginesmith.pipeline.results.run import Run
    from enginesmith.pipeline.results.run import read as load_run
    from enginesmith.pipeline.workflows.load import LoadedModel, load
    from enginesmith.pipeline.workflows.optimize import optimize, resume

for _name in ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY"):  # they report on models to their makers
    os.environ.setdefault(_name, "1")
__all__ = [
    "EnginesmithError",
    "LoadedModel",
    "Recipe",
    "Run",
    "Settings",
    "load",
    "load_run",
    "make_recipe",
    "optimize",
    "resume",
]

_HOMES = {
    "EnginesmithError": ("errors", "EnginesmithError"),
    "LoadedModel": ("workflows.load", "LoadedModel"),
    "Recipe": ("recipe", "Recipe"),
    "Run": ("results.run", "Run"),
    "Settings": ("execution.settings", "Settings"),
    "load": ("workflows.load", "load"),
    "load_run": ("results.run", "read"),
    "make_recipe": ("recipe", "make"),
    "optimize": ("workflows.optimize", "optimize"),
    "resume": ("workflows.optimize", "resume"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(f"{__name__}.pipeline.{module}"), attribute)
