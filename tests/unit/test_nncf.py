"""Test what becomes of NNCF's graphs before ONNX Runtime and OpenVINO get them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.tasks import nncf
from enginesmith.pipeline.tasks.nncf import _make_unsigned


def make_convolution() -> onnx.ModelProto:
    """Make a Conv1d whose input has signed numbers and gets its channel behind the Q/DQ pair, as NNCF places it."""
    rng = np.random.default_rng(0)
    constants = {
        "scale": np.float32(0.02),
        "zero": np.int8(-3),
        "axes": np.array([1]),
        "low": rng.integers(-127, 127, (4, 1, 3), np.int8),
        "weight_scale": np.full(4, 0.01, np.float32),
        "weight_zero": np.zeros(4, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["dq"]),
        helper.make_node("Unsqueeze", ["dq", "axes"], ["wide"]),
        helper.make_node("DequantizeLinear", ["low", "weight_scale", "weight_zero"], ["w"], axis=0),
        helper.make_node("Conv", ["wide", "w"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(*end)
        for end in (("x", TensorProto.FLOAT, (2, 16)), ("y", TensorProto.FLOAT, (2, 4, 14)))
    ]
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    between = [helper.make_tensor_value_info("q", TensorProto.INT8, (2, 16))]
    graph = helper.make_graph(nodes, "conv1d", ends[:1], ends[1:], initializers, value_info=between)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def answer(model: onnx.ModelProto, level: str) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}_ALL")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((2, 16)).astype(np.float32)
    return np.asarray(session.run(None, {"x": x})[0])


def test_signed_activations_become_unsigned_with_the_same_answers() -> None:
    model = make_convolution()
    before = answer(model, "DISABLE")
    _make_unsigned(model.graph)
    onnx.checker.check_model(model, full_check=True)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert constants["zero_uint8"] == 125
    assert constants["weight_zero"].dtype == np.int8
    assert "zero" not in constants
    np.testing.assert_array_equal(answer(model, "DISABLE"), before)
    np.testing.assert_allclose(answer(model, "ENABLE"), before, atol=1e-5)


def test_what_is_unsigned_stays() -> None:
    model = make_convolution()
    _make_unsigned(model.graph)
    again = onnx.ModelProto.FromString(model.SerializeToString())
    _make_unsigned(again.graph)
    assert again == model


class FailsToSmooth:
    """NNCF as far as it is called here: its SmoothQuant fails, as it does at the tied embedding of a GPT."""

    def __init__(self) -> None:
        self.errors = SimpleNamespace()
        self.ModelType = SimpleNamespace(TRANSFORMER="transformer")
        self.OverflowFix = SimpleNamespace(ENABLE="enable", DISABLE="disable")
        self.TargetDevice = SimpleNamespace(CPU="cpu")
        self.QuantizationPreset = self.Dataset = self.IgnoredScope = lambda given, **names: given
        self.AdvancedQuantizationParameters = self.AdvancedSmoothQuantParameters = dict
        self.refuses_all = False

    def set_log_level(self, level: int) -> None:
        """Accept any level."""

    def quantize(self, model: str, data: list[int], advanced_parameters: dict[str, Any], **settings: Any) -> str:
        """Quantize without SmoothQuant alone."""
        if self.refuses_all or "smooth_quant_alphas" not in advanced_parameters:
            raise AttributeError("'NoneType' object has no attribute 'shape'")
        assert advanced_parameters["smooth_quant_alphas"] == {"convolution": -1, "matmul": -1}
        return f"{model}, quantized"


def test_where_its_smoothing_fails_it_quantizes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FailsToSmooth()
    monkeypatch.setattr(nncf, "import_without_telemetry", lambda name: library)
    step: Any = SimpleNamespace(weight_bits=7, preset="mixed")
    quantize: Any = nncf.QuantizeWithNncf._quantize
    made, settings = quantize(step, "graph", [1, 2], (), [])
    assert made == "graph, quantized"
    assert settings == "preset mixed, 7-bit weights, without SmoothQuant, which failed, fast bias correction, 2 feeds"
    library.refuses_all = True
    with pytest.raises(ModelError, match="NNCF cannot quantize this graph: 'NoneType' object has no attribute 'shape'"):
        quantize(step, "graph", [1, 2], (), [])
