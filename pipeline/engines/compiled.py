"""PyTorch through ``torch.compile``: shows whether leaving PyTorch is worth it at all."""

import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from enginesmith.pipeline.engines.base import Availability, Device
from enginesmith.pipeline.engines.eager import Eager

if TYPE_CHECKING:
    import torch

    from enginesmith.pipeline.engines.eager import Forward

_SHAPES = 64
"""Shapes a session may be compiled for before that is an error; torch's own limit of 8 falls back to eager silently."""


class Compiled(Eager):
    """Runs a torch artifact's module compiled by Inductor, once for each set of input shapes."""

    name: ClassVar[str] = "compiled"

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"

    @classmethod
    def available(cls, device: Device) -> Availability:
        """As eager; on the CPU Inductor also needs a C++ compiler and Python's headers."""
        found = Eager.available(device)
        if not found.ok or device.kind == "cuda":
            return found
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            remedy = "install it: apt-get install g++, or set CXX to the compiler that is there"
            return Availability(ok=False, reason=f"there is no C++ compiler {compiler!r}", remedy=remedy)
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            remedy = "install them: apt-get install python3-dev"
            return Availability(ok=False, reason="Python's C headers (Python.h) are missing", remedy=remedy)
        return found

    def forward(self, module: "torch.nn.Module") -> "Forward":
        """The module, compiled at the first call with each set of shapes."""
        import torch
        from torch._dynamo import config

        config.recompile_limit = config.accumulated_recompile_limit = _SHAPES
        config.fail_on_recompile_limit_hit = True
        compiled: Forward = torch.compile(module, dynamic=False, mode=self.mode)
        return compiled
