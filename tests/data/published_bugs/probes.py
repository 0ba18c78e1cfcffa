"""Run a model in an installed tool, and compare its answers with the reference's."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

Answers = list[NDArray[Any]]
Feeds = Mapping[str, NDArray[Any]]
Run = Callable[[onnx.ModelProto, Feeds], Answers]
_TOLERANCE = 1e-3


def differs(run: Run, reference: Run, feeds: Feeds | None = None) -> Callable[[onnx.ModelProto], bool]:
    """Make a probe that tells whether two ways to run a model give other answers."""

    def probe(model: onnx.ModelProto) -> bool:
        given = feeds or draw_feeds(model)
        pairs = zip(run(model, given), reference(model, given), strict=True)
        return any(not np.allclose(each, wanted, _TOLERANCE, _TOLERANCE, equal_nan=True) for each, wanted in pairs)

    return probe


def draw_feeds(model: onnx.ModelProto, batch: int = 2, scale: float = 1.0) -> dict[str, NDArray[Any]]:
    """Draw normal numbers of a scale for each input."""
    rng, feeds = np.random.default_rng(0), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value or batch for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        feeds[value.name] = (scale * rng.standard_normal(shape)).astype(dtype)
    return feeds


def evaluate(model: onnx.ModelProto, feeds: Feeds) -> Answers:
    """Compute a model with ONNX's reference."""
    from onnx.reference import ReferenceEvaluator

    answers: Answers = ReferenceEvaluator(model).run(None, dict(feeds))
    return answers


def run_optimized(model: onnx.ModelProto, feeds: Feeds) -> Answers:
    """Run a model in ONNX Runtime as it is by default."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    answers: Answers = session.run(None, dict(feeds))
    return answers


def run_unoptimized(model: onnx.ModelProto, feeds: Feeds) -> Answers:
    """Run a model in ONNX Runtime without graph optimization."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    answers: Answers = session.run(None, dict(feeds))
    return answers


def run_openvino(model: onnx.ModelProto, feeds: Feeds, threads: int = 0) -> Answers:
    """Run a model in OpenVINO on the CPU, in float32; 0 threads are its default."""
    import io

    import openvino

    core = openvino.Core()
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    compiled = core.compile_model(core.read_model(io.BytesIO(model.SerializeToString())), "CPU", options)
    found = compiled(dict(feeds))
    return [np.asarray(found[output]) for output in compiled.outputs]


def run_rewritten(model: onnx.ModelProto, feeds: Feeds) -> Answers:
    """Run a model after onnxscript's rewriting, which torch's exporter applies."""
    from onnxscript.rewriter import rewrite

    return run_unoptimized(rewrite(model), feeds)


def exports_wrongly(function: Callable[[Any, Any], Any], feeds: NDArray[Any]) -> Callable[[onnx.ModelProto], bool]:
    """Make a probe that exports a function, of PyTorch and a tensor, without this project's translations."""

    def probe(_: onnx.ModelProto) -> bool:
        import torch

        class Module(torch.nn.Module):
            def forward(self, given: torch.Tensor) -> Any:
                return function(torch, given)

        values = torch.from_numpy(feeds)
        program = torch.onnx.export(Module(), (values,), dynamo=True, verbose=False)
        assert program is not None
        (found,) = run_optimized(program.model_proto, {program.model_proto.graph.input[0].name: feeds})
        return not np.allclose(found, function(torch, values).numpy(), 1e-6 if found.dtype.kind == "f" else 0, 0)

    return probe
