"""PyTorch's own: eager, torch.compile in three ways, AOTInductor, and torchao's dynamic int8.

- https://docs.pytorch.org/docs/stable/generated/torch.compile.html
- https://docs.pytorch.org/tutorials/unstable/max_autotune_on_CPU_tutorial.html: ``max-autotune`` on CPUs has its
  templates of matrix products only with ``freezing`` and without gradients.
- https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_aot_inductor.html
- https://docs.pytorch.org/ao/stable/ → ``quantize_(model, Int8DynamicActivationInt8WeightConfig())``, then compile.
"""

import os
from typing import Any

import torch
from job import Call, Feeds, Job, Recipe

_PACKAGE = "made.pt2"


def _nothing(job: Job) -> None:
    """Do nothing: the compiler runs at the first call, and keeps its result in the job's folder."""


def _opener(change: Any) -> Any:
    """Make the function that opens the module after a change."""

    def open_module(job: Job) -> Call:
        torch.set_num_threads(job.threads)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(job.file("inductor"))
        module = change(job.module())

        @torch.no_grad()
        def call(feeds: Feeds) -> Any:
            return as_arrays(module(*tensors(feeds)))

        return call

    return open_module


def as_arrays(outputs: Any) -> list[Any]:
    """View tensors, or the values of a mapping, as arrays."""
    if isinstance(outputs, torch.Tensor):
        return [outputs.numpy()]
    values = outputs.values() if hasattr(outputs, "values") else outputs
    return [value.numpy() for value in values if value is not None]


def _compile(**options: Any) -> Any:
    return lambda module: torch.compile(module, dynamic=False, **options)


def _autotune(module: Any) -> Any:
    return torch.compile(module, dynamic=False, options={"max_autotune": True, "freezing": True})


def _torchao(module: Any) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(module, Int8DynamicActivationInt8WeightConfig())
    return torch.compile(module, dynamic=False)


def tensors(feeds: Feeds) -> tuple[torch.Tensor, ...]:
    """View arrays as tensors, in the order of the module's inputs."""
    return tuple(torch.from_numpy(array) for array in feeds.values())


def _package(job: Job) -> None:
    """Compile ahead of time for the cell's batch size and threads, which the code is made for."""
    from torch._inductor import aoti_compile_and_package

    torch.set_num_threads(job.threads)
    with torch.no_grad():
        exported = torch.export.export(job.module(), tensors(job.example()))
        aoti_compile_and_package(exported, package_path=str(job.file(_PACKAGE)), inductor_configs={"freezing": True})


def _open_package(job: Job) -> Call:
    torch.set_num_threads(job.threads)
    loaded = torch._inductor.aoti_load_package(str(job.file(_PACKAGE)))

    def call(feeds: Feeds) -> Any:
        return as_arrays(loaded(*tensors(feeds)))

    return call


RECIPES = {
    "eager": Recipe(_nothing, _opener(lambda module: module)),
    "compile": Recipe(_nothing, _opener(_compile())),
    "compile_autotune": Recipe(_nothing, _opener(_autotune)),
    "compile_freezing": Recipe(_nothing, _opener(_compile(options={"freezing": True}))),
    "aotinductor": Recipe(_package, _open_package),
    "torchao": Recipe(_nothing, _opener(_torchao)),
}
