"""GPU tests skip with what is missing; everything here is marked ``gpu``."""

from pathlib import Path

import pytest


def _missing() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device: torch.cuda.is_available() is false"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    reason = _missing() if ours else ""
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
