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
    """Run file and module on feeds of other sizes and other values than the example's, and compare.

    Raises:
        ExportError: they differ.
    """
    resized = _other_sizes(loaded)
    try:
        if not _agrees(path, loaded, resized):
            raise _holds_only(loaded, "at the sizes")
        if not all(_agrees(path, loaded, feeds) for feeds in _other_values(loaded.example)):
            raise _holds_only(loaded, "for the values")
    except MissingCapability:
        _log.warning("onnxruntime is not installed: the trace was not checked")


def _agrees(path: Path, loaded: "LoadedModel", feeds: "dict[str, Tensor]") -> bool:
    expected = _run_module(loaded, feeds)
    if expected is None:  # these feeds are not for this module
        return True
    try:
        found = equivalence.run(path, {name: value.numpy() for name, value in feeds.items()})
    except ModelError:
        return False
    return equivalence.worst(expected, found) <= _TOLERANCE


def _other_values(example: "dict[str, Tensor]") -> "list[dict[str, Tensor]]":
    """Feeds that send branches on values the other way: negative, large, and all zero."""
    return [
        {name: value * factor if value.is_floating_point() else value for name, value in example.items()}
        for factor in (-1.0, 8.0, 0.0)
    ]


def _holds_only(loaded: "LoadedModel", what: str) -> ExportError:
    dims = ", ".join(f"{name} = {size}" for name, size in loaded.dynamic_sizes.items())
    return ExportError(
        f"the trace holds only {what} of the example ({dims or 'all sizes fixed'})",
        "remove from the model's code what depends on values or turns sizes into Python numbers",
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
