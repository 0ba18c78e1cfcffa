"""Whether a traced graph holds at other sizes than those of its example: tracing keeps what was a Python number."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline.errors import ExportError, MissingCapability, ModelError
from enginesmith.pipeline.passes import equivalence
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    from torch import Tensor

    from enginesmith.pipeline.torch_model import LoadedModel

_TOLERANCE = 1e-3  # of the output's range: what tracing kept by mistake is off by far more
_log = logging.getLogger(__name__)


def check_trace(path: Path, loaded: "LoadedModel") -> None:
    """Run file and module on feeds with every dynamic dimension changed, and compare.

    Raises:
        ExportError: they differ.
    """
    feeds = _other_sizes(loaded)
    expected = _run_module(loaded, feeds)
    if not loaded.signature.symbols or expected is None:
        return
    try:
        found = equivalence.run(path, {name: value.numpy() for name, value in feeds.items()})
    except MissingCapability:
        _log.warning("onnxruntime is not installed: the trace was not checked at other sizes")
        return
    except ModelError as error:
        raise _specialised(loaded) from error
    if equivalence.worst(expected, found) > _TOLERANCE:
        raise _specialised(loaded)


def _specialised(loaded: "LoadedModel") -> ExportError:
    dims = ", ".join(f"{name} = {size}" for name, size in loaded.dynamic_sizes.items())
    return ExportError(
        f"the trace holds only at the sizes of the example ({dims})",
        "write these numbers with --input, or remove what turns sizes into Python numbers from the model's code",
    )


def _other_sizes(loaded: "LoadedModel") -> dict[str, "Tensor"]:
    """The example with one more element along each dynamic dimension."""
    import torch

    feeds = {}
    for spec in loaded.signature.inputs:
        value = loaded.example[spec.name]
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str):
                size = value.shape[axis]
                value = value.index_select(axis, torch.arange(size + 1) % size)
        feeds[spec.name] = value
    return feeds


def _run_module(loaded: "LoadedModel", feeds: dict[str, "Tensor"]) -> list[Array] | None:
    """What the module gives; None where it does not take these sizes."""
    import torch

    try:
        with torch.inference_mode():
            return [value.numpy() for value in loaded.module(*feeds.values())]
    except (RuntimeError, ValueError, LookupError, AssertionError, TypeError):
        return None
