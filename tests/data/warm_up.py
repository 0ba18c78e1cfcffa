"""Prepare the fork server of a test session, which imports this as ``enginesmith.tests.data.warm_up``."""

import sys
import tempfile
from pathlib import Path

import torch

from enginesmith.pipeline.frameworks.torch.module import LoadedModel, NamedForward
from enginesmith.pipeline.passes.export.export import Export, export_module
from enginesmith.pipeline.tensors import Signature, TensorSpec


def export_once() -> None:
    """Export a small module: in workers that are forked afterwards, an export takes a quarter of the time.

    This file is forgotten in the end: a model that is loaded in such a worker would count it among its own.
    """
    module = NamedForward(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval(), ("x",), ())
    inputs, outputs = (TensorSpec.parse(text) for text in ("x:float32:batch,4", "y:float32:batch,3"))
    loaded = LoadedModel(module, Signature(inputs=(inputs,), outputs=(outputs,)), {"x": torch.ones(2, 4)})
    with tempfile.TemporaryDirectory() as folder:
        export_module(loaded, Path(folder), Export(), lambda text: None)
    del sys.modules[__name__]
