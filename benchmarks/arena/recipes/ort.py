"""ONNX Runtime by hand. https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html recommends:

- to prepare a graph before quantization (``quant_pre_process``: shapes, and the optimizer);
- dynamic quantization for transformers and recurrent networks, static quantization for convolutional ones;
- ``reduce_range`` on AVX2 and AVX-512 processors without VNNI, where sums of two 8-bit products saturate.

The fast kernels of x86-64 take unsigned activations, so the strongest static recipe has those, though the default does
not. https://onnxruntime.ai/docs/performance/transformers-optimization.html has the optimizer of transformers.
"""

from pathlib import Path
from typing import Any

import onnxruntime
from job import Call, Feeds, Job, Recipe

_MADE = "made.onnx"


def _open(path: Path, threads: int) -> Call:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def call(feeds: Feeds) -> Any:
        return session.run(None, feeds)

    return call


def open_exported(job: Job) -> Call:
    """Open the graph as it was exported; the session optimizes it with all that it has."""
    return _open(job.graph, job.threads)


def open_made(job: Job) -> Call:
    """Open the graph that was made."""
    return _open(job.file(_MADE), job.threads)


def _nothing(job: Job) -> None:
    """Do nothing: the exported graph is used as it is."""


def _preprocess(job: Job) -> Path:
    """Prepare the graph as documented; where symbolic shapes fail (some transformers), without them."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared, graph = job.file("preprocessed.onnx"), job.upgraded_graph()
    try:
        quant_pre_process(graph, prepared)
    except Exception:  # noqa: BLE001  # it raises plain Exception for a graph whose shapes it cannot infer
        quant_pre_process(graph, prepared, skip_symbolic_shape=True)
    return prepared


def _reader(job: Job) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._rows = job.rows()

        def get_next(self) -> Any:
            return next(self._rows, None)

    return Reader()


def _static(job: Job) -> None:
    """Quantize with all defaults."""
    from onnxruntime.quantization import quantize_static

    quantize_static(_preprocess(job), job.file(_MADE), _reader(job))


def _static_u8(job: Job) -> None:
    """Quantize to asymmetric uint8 activations and int8 weights per channel: the fast kernels of x86-64."""
    from onnxruntime.quantization import QuantType, quantize_static

    quantize_static(
        _preprocess(job),
        job.file(_MADE),
        _reader(job),
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
        reduce_range=not _has_vnni(),
        extra_options={"ActivationSymmetric": False, "WeightSymmetric": True},
    )


def _has_vnni() -> bool:
    return "vnni" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def _dynamic(job: Job) -> None:
    """Quantize weights per channel, and activations at run time."""
    _quantize_dynamic(_preprocess(job), job)


def _quantize_dynamic(graph: Path, job: Job) -> None:
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        graph,
        job.file(_MADE),
        per_channel=True,
        weight_type=QuantType.QInt8,
        reduce_range=not _has_vnni(),
        extra_options={"DefaultTensorType": TensorProto.FLOAT},  # shapes are not inferred past fused operators
    )


def _optimize(job: Job, name: str = _MADE) -> Path:
    """Fuse attention, layer normalization and GELU by the optimizer of transformers."""
    from onnxruntime.transformers.optimizer import optimize_model

    optimized = optimize_model(str(job.graph), model_type="bert", opt_level=1)
    optimized.save_model_to_file(str(job.file(name)))
    return job.file(name)


def _optimize_dynamic(job: Job) -> None:
    """Fuse first, then quantize: the order that the page on transformers has."""
    _quantize_dynamic(_optimize(job, "fused.onnx"), job)


RECIPES = {
    "fp32": Recipe(_nothing, open_exported),
    "static": Recipe(_static, open_made),
    "static_u8": Recipe(_static_u8, open_made),
    "dynamic": Recipe(_dynamic, open_made),
    "optimizer": Recipe(lambda job: (_optimize(job), None)[1], open_made),
    "optimizer_dynamic": Recipe(_optimize_dynamic, open_made),
}
