"""Modules that are loaded as if a factory had built them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.frameworks.processing import ProcessingRequest
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.frameworks.torch import factories, saved
from enginesmith.pipeline.frameworks.torch import module as torch_model
from enginesmith.pipeline.frameworks.torch.factories import Built
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, LoadOptions
from enginesmith.pipeline.tensors import TensorSpec

SOURCE = Source(form="zoo", text="test", target="test")
ONE = torch.ones(2, 3)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Loads a module as if a factory had built it."""

    def run(module: nn.Module, example: Any = None, *inputs: str, **processing: tuple[str, ...]) -> LoadedModel:
        monkeypatch.setattr(factories, "build", lambda source: Built(module.eval(), example))
        specs, request = tuple(TensorSpec.parse(text) for text in inputs), ProcessingRequest(**processing)
        return torch_model.load(SOURCE, LoadOptions(inputs=specs, processing=request))

    return run


def stored(folder: Path) -> Artifact:
    return Artifact(kind="torch", path=folder / saved.RECORD, sha256="", bytes=0)


def lambda_module(function: Any) -> nn.Module:
    class Wrapped(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    return Wrapped()
