"""torch's profiler on a real module: operators on their modules, and nothing left behind."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.profiling import BETWEEN, Profiled, ProfileRequest
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.engines.torch.session import named_ranges, profiled
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import module, saved
from enginesmith.pipeline.system.device import Device

NETS = Path(__file__).parent.parent / "data" / "nets.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    folder = tmp_path_factory.mktemp("mlp")
    source, options = resolve(f"{NETS}:mlp"), module.LoadOptions()
    loaded = module.load(source, options)
    saved.save(loaded, source, options, folder)
    artifact = Artifact(kind="torch", path=folder / saved.RECORD, sha256="", bytes=0, signature=loaded.signature)
    feeds = saved.read_example(artifact)
    return Eager().profile(ProfileRequest(artifact, Device(threads=1), feeds, 5, folder))


def test_operators_are_on_the_module_that_called_them(found: Profiled) -> None:
    places = {(one.operator, one.origin.modules): one.calls for one in found.operators if one.operator != BETWEEN}
    assert places == {
        ("aten::linear", ("layers.0",)): 1,
        ("aten::relu", ("layers.1",)): 1,
        ("aten::linear", ("layers.2",)): 1,
    }
    assert all(one.origin.modules for one in found.operators)


def test_times_are_those_of_a_call(found: Profiled) -> None:
    assert found.call_seconds is not None
    total = sum(one.seconds for one in found.operators)
    assert total == pytest.approx(found.call_seconds, rel=0.5)
    assert all(one.seconds >= 0 for one in found.operators)


def test_modules_are_as_they_were_afterwards() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    own = root[1].forward = root[1].forward  # a module may have a forward of its own
    with named_ranges(root):
        assert "forward" in vars(root[0])
        assert not root[0]._forward_pre_hooks  # some modules take another path when they have any
        assert root[1].forward is own
    assert "forward" not in vars(root[0])
    assert root[1].forward is own
    assert root(torch.ones(1, 2)).shape == (1, 2)


class Event:
    """One of the profiler's, its times in microseconds."""

    def __init__(self, name: str, start: float, end: float, *children: "Event", kernels: tuple[Any, ...] = ()) -> None:
        self.name, self.kernels, self.cpu_children, self.cpu_parent = name, kernels, children, None
        self.time_range = SimpleNamespace(start=start, elapsed_us=lambda: end - start)
        self.device_type = SimpleNamespace(name="CPU")
        for child in children:
            child.cpu_parent = self

    def all(self) -> "list[Event]":
        return [self, *(event for child in self.cpu_children for event in child.all())]


def kernel(name: str, duration: float) -> Any:
    return SimpleNamespace(name=name, duration=duration)


def test_on_cuda_kernels_count_for_the_operator_that_launched_them() -> None:
    """The host's time is not the device's; a kernel outside of any operator has its own name."""
    launch = Event("aten::mm", 2, 4, kernels=(kernel("gemm", 50.0),))
    linear = Event("aten::linear", 1, 6, launch, Event("aten::add", 4, 5, kernels=(kernel("add", 5.0),)))
    module = Event("enginesmith module fc", 0, 7, linear, kernels=(kernel("triton_fused_0", 7.0),))
    call = Event("enginesmith call", 0, 10, module)
    on_device = Event("gemm", 3, 53)
    on_device.device_type = SimpleNamespace(name="CUDA")
    found = profiled([*call.all(), on_device], modules=True, on_cuda=True)
    times = {(one.operator, one.origin.modules): round(one.seconds * 1e6, 3) for one in found.operators}
    assert times == {("aten::linear", ("fc",)): 55.0, ("triton_fused_0", ("fc",)): 7.0}


def test_compiled_code_is_told_by_kernel_and_of_no_module() -> None:
    inner = Event("graph_0_cpp_fused_relu_0", 2, 5)
    region = Event("Torch-Compiled Region: 0/0", 1, 8, Event("## Call CompiledFxGraph f ##", 2, 7, inner))
    found = profiled(Event("enginesmith call", 0, 10, region).all(), modules=False, on_cuda=False)
    times = {one.operator: (round(one.seconds * 1e6, 3), one.origin.modules) for one in found.operators}
    assert times == {BETWEEN: (7.0, ()), "graph_0_cpp_fused_relu_0": (3.0, ())}
