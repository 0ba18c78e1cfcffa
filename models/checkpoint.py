"""Weights from a file into a module, with the mismatch named when there is one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from enginesmith.pipeline.errors import SourceError

_FORM = "give a state dict as .safetensors, or as .pt saved with torch.save(module.state_dict(), path)"


def load_weights(module: nn.Module, path: str, rename: Callable[[str], str | None] = lambda key: key) -> None:
    """Copy the tensors of a ``.safetensors`` or ``.pt`` file into ``module``.

    ``rename`` maps a key of the file to one of the module, or to None for a tensor that the module has no use for.

    Raises:
        SourceError: no such file, not a state dict, or its keys or shapes are not the module's.
    """
    renamed = {rename(key): value for key, value in _read(Path(path)).items()}
    state = {key: value for key, value in renamed.items() if key is not None}
    expected = module.state_dict()
    wrong = [
        f"{key} is {list(state[key].shape)} where the model has {list(value.shape)}"
        for key, value in expected.items()
        if key in state and state[key].shape != value.shape
    ]
    # BatchNorm's step counter is absent from files older than torch 0.4.1 and plays no part in inference.
    wrong += [f"{key} is missing" for key in expected if key not in state and not key.endswith("num_batches_tracked")]
    wrong += [f"{key} is not in the model" for key in state if key not in expected]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise SourceError(
            f"the weights in {path} do not fit {type(module).__name__}: {wrong[0]}{more}",
            "give the weights of this very architecture; for another number of classes, pass num_classes too",
        )
    module.load_state_dict(state, strict=False)


def _read(path: Path) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise SourceError(f"there is no weights file {path}", "check the path, or leave weights out")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, UnpicklingError, SafetensorError) as error:
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        raise SourceError(f"cannot read weights from {path}: {cause}", _FORM) from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise SourceError(f"{path} holds a {type(content).__name__} that is not a state dict", _FORM)
    return content
