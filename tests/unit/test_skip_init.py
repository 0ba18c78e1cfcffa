"""Building without random weights: only what is replaced anyway is left out."""

from pathlib import Path

import torch
from torch import nn

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import module, saved
from enginesmith.pipeline.frameworks.torch.saved import parameters_left_empty

NET = """
import torch
from torch import nn

hidden = []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layer.weight
        self.register_buffer("shift", nn.init.normal_(torch.empty(4)), persistent=False)
        {extra}

    def forward(self, x):
        return self.tied(self.layer(x)) + self.shift {use}

def build():
    return Net(), torch.randn(2, 4)
"""


def round_trip(tmp_path: Path, extra: str = "pass", use: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of a module as it was loaded, and as it comes back from its artifact."""
    file = tmp_path / f"net_{tmp_path.name}.py"
    file.write_text(NET.format(extra=extra, use=use))
    source, options = resolve(f"{file}:build"), module.LoadOptions(seed=3)
    loaded = module.load(source, options)
    saved.save(loaded, source, options, tmp_path)
    artifact = Artifact(kind="torch", path=tmp_path / saved.RECORD, sha256="", bytes=0)
    again = saved.load_artifact(artifact)
    x = torch.randn(5, 4)
    return loaded.module(x)[0], again.module(x)[0]


def test_parameters_are_listed_and_buffers_are_filled() -> None:
    with parameters_left_empty():
        layer = nn.Linear(8, 8)
        plain = nn.init.constant_(torch.zeros(3), 2.0)
    with parameters_left_empty():
        assert nn.init.ones_(layer.weight) is layer.weight
    assert not torch.equal(layer.weight, torch.ones(8, 8))
    assert plain.tolist() == [2.0, 2.0, 2.0]
    assert nn.init.constant_(nn.Parameter(torch.zeros(1)), 3.0).item() == 3.0


def test_tied_weights_and_hidden_buffers_come_back(tmp_path: Path) -> None:
    before, after = round_trip(tmp_path)
    assert torch.equal(before, after)


def test_a_parameter_the_module_does_not_know_of_is_still_filled(tmp_path: Path) -> None:
    secret = "self.secret = [nn.init.ones_(nn.Parameter(torch.empty(4)))]"
    before, after = round_trip(tmp_path, secret, "+ self.secret[0]")
    assert torch.equal(before, after)
