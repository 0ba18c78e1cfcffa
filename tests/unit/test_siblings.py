"""Siblings: what they share with the session that they were made from, and what the thread that makes one is set to."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from enginesmith.pipeline.engines.onnxruntime.session import OnnxRuntimeSession
from enginesmith.pipeline.engines.torch.eager import Compiled, Eager
from enginesmith.pipeline.engines.torch.session import EagerSession
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Signature, TensorSpec

CPU = Device(threads=1)
SIGNATURE = Signature(inputs=(TensorSpec.parse("x:float32:2"),), outputs=(TensorSpec.parse("y:float32:2"),))


def in_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    return found[0]


@pytest.fixture
def native() -> ort.InferenceSession:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_on_the_cpu_onnxruntime_has_its_weights_once(native: ort.InferenceSession) -> None:
    def refused() -> OnnxRuntimeSession:
        raise AssertionError("another session was opened")

    first = OnnxRuntimeSession(native, SIGNATURE, CPU, None, refused)
    second = first.sibling()
    assert second._session is native
    assert not first.sibling_note
    first.close()
    np.testing.assert_array_equal(second.run({"x": np.ones(2, np.float32)})["y"], [-1, -1])


def test_on_cuda_onnxruntime_opens_a_session_for_each_stream(native: ort.InferenceSession) -> None:
    again = OnnxRuntimeSession(native, SIGNATURE, CPU, None, lambda: again)
    first = OnnxRuntimeSession(native, SIGNATURE, CPU, object(), lambda: again)
    assert first.sibling() is again
    assert "weights" in first.sibling_note


def test_eager_shares_the_module() -> None:
    def module(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (-x,)

    entered: list[int] = []
    first = EagerSession(module, SIGNATURE, CPU, None, lambda: entered.append(threading.get_ident()))
    second = in_thread(first.sibling)
    assert second._forward is module
    assert entered
    assert entered != [threading.get_ident()]


def test_a_thread_gets_as_many_openmp_threads_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP has a number for each thread: a new one starts with that of the machine."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda count: asked.append((count, threading.get_ident())))
    ident = in_thread(lambda: (Eager().enter_thread(Device(threads=3)), threading.get_ident())[1])
    assert asked == [(3, ident)]


def test_a_thread_has_dynamos_settings_too() -> None:
    """They are of a context, and one at torch's own would fall back to eager without a word."""
    from torch._dynamo import config

    def settings() -> tuple[int, bool]:
        Compiled().enter_thread(CPU)
        return config.recompile_limit, config.fail_on_recompile_limit_hit

    assert in_thread(settings) == (64, True)
