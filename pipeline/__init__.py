"""The public API. Nothing heavy is imported until it is used.

from enginesmith.pipeline import Recipe, optimize
run = optimize(Recipe(model="digits"), Path("runs/digits"))
print(run.winner)
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginesmith.pipeline.errors import EnginesmithError
    from enginesmith.pipeline.execution.settings import Settings
    from enginesmith.pipeline.recipe import Recipe
    from enginesmith.pipeline.results.run import Run
    from enginesmith.pipeline.results.run import read as load_run
    from enginesmith.pipeline.workflows.optimize import optimize, resume

for _name in ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY"):  # they report on models to their makers
    os.environ.setdefault(_name, "1")
__all__ = ["EnginesmithError", "Recipe", "Run", "Settings", "load_run", "optimize", "resume"]

_HOMES = {
    "EnginesmithError": ("errors", "EnginesmithError"),
    "Recipe": ("recipe", "Recipe"),
    "Run": ("results.run", "Run"),
    "Settings": ("execution.settings", "Settings"),
    "load_run": ("results.run", "read"),
    "optimize": ("workflows.optimize", "optimize"),
    "resume": ("workflows.optimize", "resume"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
