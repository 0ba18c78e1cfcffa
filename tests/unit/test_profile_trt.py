"""TensorRT's layers on modules: names and metadata that TensorRT-RTX wrote for real models, times from a stand-in."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Session
from enginesmith.pipeline.engines.profiling import WARM_CALLS, OperatorTime, ProfileRequest
from enginesmith.pipeline.engines.tensorrt import session as trt_profile
from enginesmith.pipeline.engines.tensorrt.layers import read_layers
from enginesmith.pipeline.errors import MissingCapability
from enginesmith.pipeline.frameworks.onnx.model_file import MODULE_KEY
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Signature, TensorSpec

DATA = Path(__file__).parent.parent / "data" / "trt"
SIGNATURE = Signature(inputs=(TensorSpec.parse("x:float32:batch,4"),), outputs=(TensorSpec.parse("y:float32:batch,4"),))


class Base:
    """Stands for the library's class that ours derives from."""


TRT: Any = SimpleNamespace(IProfiler=Base, LayerInformationFormat=SimpleNamespace(ONELINE="oneline"))


class FakeSession(Session):
    """Reports each layer of a dump with its time whenever it runs with a profiler, as execution contexts do."""

    signature = SIGNATURE

    def __init__(self, dump: str, times: dict[str, float]) -> None:
        self.native = SimpleNamespace(profiler=None)
        self.times, self.runs, self.dump = times, 0, dump
        self.engine = SimpleNamespace(create_engine_inspector=self.inspector)

    def inspector(self) -> Any:
        def told(form: str) -> str:
            assert form == "oneline"
            assert made.execution_context is self.native
            return self.dump

        made = SimpleNamespace(execution_context=None, get_engine_information=told)
        return made

    def bind(self, feeds: Any) -> Any:
        return SimpleNamespace(context=SimpleNamespace(native=self.native))

    def enqueue(self, bound: Any) -> None:
        self.runs += 1
        if self.native.profiler is not None:
            for name, ms in self.times.items():
                self.native.profiler.report_layer_time(name, ms)

    def synchronize(self) -> None:
        pass

    def fetch(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass

    def sibling(self) -> Session:
        raise NotImplementedError


def graph(folder: Path, nodes: dict[str, tuple[str, str]]) -> Path:
    """Nodes by name, with their operator and module."""
    made = []
    for name, (operator, module) in nodes.items():
        node = helper.make_node(operator, [f"{name}_in", f"{name}_with"], [f"{name}_out"], name=name)
        node.metadata_props.add(key=MODULE_KEY, value=module)
        made.append(node)
    onnx.save(helper.make_model(helper.make_graph(made, "g", [], [])), folder / "graph.onnx")
    return folder / "graph.onnx"


def profile(session: FakeSession, path: Path, folder: Path) -> Any:
    artifact = Artifact(kind="engine", path=folder / "model.engine", sha256="", bytes=0)
    request = ProfileRequest(artifact, Device(), {"x": np.ones((1, 4), np.float32)}, 5, folder, path)
    return trt_profile.profile(TRT, session, request, ())  # type: ignore[arg-type]


def found(dump: str, nodes: dict[str, tuple[str, str]], folder: Path) -> dict[str, OperatorTime]:
    text = (DATA / f"{dump}-layers.txt").read_text()
    session = FakeSession(text, {layer.name: 1.0 for layer in read_layers(text)})
    return {one.name: one for one in profile(session, graph(folder, nodes), folder).operators}


def test_merged_products_belong_to_all_of_their_modules(tmp_path: Path) -> None:
    names = {"node_MatMul_42": "self.query", "node_MatMul_50": "self.key", "node_MatMul_58": "self.value"}
    layers = found("int8-merged", {name: ("MatMul", path) for name, path in names.items()}, tmp_path)
    merged = layers["node_MatMul_58+node_MatMul_50+node_MatMul_42_myl0_1"]
    assert set(merged.origin.modules) == {"self.query", "self.key", "self.value"}
    assert (merged.precision, merged.operator) == ("int8", "gemm")
    assert merged.seconds == pytest.approx(1e-3)


def test_light_kernels_do_not_count_as_the_product_that_they_prepare(tmp_path: Path) -> None:
    nodes = {"image_QuantizeLinear": ("QuantizeLinear", ""), "node_Conv_806": ("Conv", "stem.conv")}
    layers = found("int8", nodes, tmp_path)
    quantize, product = layers["__myl_MulMinMaxRounCastConc_myl0_0"], layers["node_Conv_806_myl0_1"]
    assert quantize.origin.converts
    assert not quantize.origin.multiplies
    assert product.origin.modules == ("stem.conv",)
    assert product.origin.multiplies
    assert product.precision == "int8"


def test_names_without_metadata_are_taken_apart(tmp_path: Path) -> None:
    """TensorRT 10 and 11 name layers after the nodes in them, and the change of layout after the layer it is for."""
    session = FakeSession(
        "Layers:\n",
        {
            "node_conv + node_relu": 2.0,
            "Reformatting CopyNode for Input Tensor 0 to node_conv + node_relu": 1.0,
            "{ForeignNode[node_fc...]}": 1.0,
        },
    )
    path = graph(tmp_path, {"node_conv": ("Conv", "conv"), "node_relu": ("Relu", "act")})
    layers = {one.name: one for one in profile(session, path, tmp_path).operators}
    product = layers["node_conv + node_relu"].origin
    assert (product.modules, product.also) == (("conv",), {"act": ("Relu",)})
    reformat = layers["Reformatting CopyNode for Input Tensor 0 to node_conv + node_relu"].origin
    assert (reformat.modules, reformat.converts, reformat.multiplies) == (("conv",), True, False)
    assert layers["{ForeignNode[node_fc...]}"].origin.modules == ()
    assert session.runs == WARM_CALLS + 5


def test_an_engine_that_reports_nothing(tmp_path: Path) -> None:
    with pytest.raises(MissingCapability, match="no time of any layer"):
        profile(FakeSession("", {}), graph(tmp_path, {}), tmp_path)
