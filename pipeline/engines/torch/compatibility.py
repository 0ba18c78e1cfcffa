"""Check whether torch, its CUDA and the GPUs here fit each other."""

import re
from collections.abc import Iterator

from enginesmith.pipeline.engines.compatibility import NO_GPU, Check, check, check_driver, check_packages
from enginesmith.pipeline.system.software import Numbers, Stack, numbers


def check_software(stack: Stack) -> Iterator[Check]:
    """Check torch's driver, its build for CUDA, the libraries that it brings and its kernels for the GPUs here."""
    yield from check_driver(stack, "torch", stack.torch_cuda)
    found = stack.versions.get("torch")
    if found and stack.torch_cuda is None:
        wanted = bool(stack.gpus) or stack.gpu_without_driver
        text, needed = f"{found}, built without CUDA", "a build with CUDA, to run on a GPU"
        fix = "pip uninstall -y torch && pip install torch"
        yield check("torch", text, needed, False if wanted else None, fix, "" if wanted else NO_GPU)
    if stack.torch_cuda and (pinned := stack.requirements.get("torch")):
        yield check_packages(stack, "CUDA libraries of torch", [one for one in pinned if not one.extra])
    for index, gpu in enumerate(stack.gpus if stack.torch_targets else ()):
        fits = _has_kernels(numbers(gpu.compute_capability), stack.torch_targets)
        needed = f"{gpu.name}: compute capability {gpu.compute_capability}"
        fix = "pip install --upgrade torch; for an old GPU: a torch that is built for an older CUDA"
        yield check(f"torch's kernels for cuda:{index}", ", ".join(stack.torch_targets), needed, fits, fix)


def _has_kernels(capability: Numbers, targets: tuple[str, ...]) -> bool:
    """Kernels run from theirs on within a major version, PTX on anything newer (CUDA's programming guide)."""
    for target in targets:
        kind, _, digits = target.partition("_")
        if not digits.isdecimal():  # sm_90a and the like run on exactly that one
            continue
        theirs = (int(digits[:-1]), int(digits[-1]))
        if theirs <= capability and (kind == "compute" or theirs[0] == capability[0]):
            return True
    return any(re.fullmatch(rf"sm_{capability[0]}{capability[1]}[af]", target) for target in targets)
