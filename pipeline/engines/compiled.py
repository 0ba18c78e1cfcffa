"""PyTorch through ``torch.compile``: shows whether leaving PyTorch is worth it at all."""

import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from enginesmith.pipeline.engines.base import Availability, Device
from enginesmith.pipeline.engines.eager import Eager
from enginesmith.pipeline.engines.profiling import Profiled, ProfileRequest

if TYPE_CHECKING:
    import torch

    from enginesmith.pipeline.engines.eager_session import Forward

_SHAPES = 64
"""Shapes a session may be compiled for before that is an error; torch's own limit of 8 falls back to eager silently."""

_NO_MODULES = "kernels of compiled code do not say which modules they came from"


class Compiled(Eager):
    """Runs a torch artifact's module compiled by Inductor, once for each set of input shapes."""

    name: ClassVar[str] = "compiled"
    title: ClassVar[str] = "torch.compile"

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

    def profile(self, request: ProfileRequest) -> Profiled:
        """Time of each kernel; compiled code does not say which module it came from."""
        from torch._inductor import config

        from enginesmith.pipeline.engines import profile_torch

        plain = self.model_copy(update={"cuda_graphs": False})
        with config.patch({"cpp.enable_kernel_profile": True}), plain.load(request.artifact, request.device) as session:
            return profile_torch.profile(session, request, modules=False, notes=(_NO_MODULES,))

    def forward(self, module: "torch.nn.Module") -> "Forward":
        """The module, compiled at the first call with each set of shapes."""
        import torch

        compiled: Forward = torch.compile(module, dynamic=False, mode=self.mode)
        return compiled

    def enter_thread(self, device: Device) -> None:
        """As eager; Dynamo's settings are of a thread, too."""
        from torch._dynamo import config

        super().enter_thread(device)
        config.recompile_limit = config.accumulated_recompile_limit = _SHAPES
        config.fail_on_recompile_limit_hit = True
