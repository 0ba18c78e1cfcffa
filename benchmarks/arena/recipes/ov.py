"""OpenVINO, and int8 by NNCF.

- https://docs.openvino.ai → "High-level Performance Hints" (LATENCY for one request at a time), "Precision Control"
  (``INFERENCE_PRECISION_HINT``), "Changing Input Shapes" (static shapes are faster), "OpenVINO Python API": shared
  memory on inputs and outputs.
- https://docs.openvino.ai → "Basic Quantization Flow" (``model_type=TRANSFORMER`` for transformers) and "Quantizing
  with Accuracy Control".
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import openvino
from job import CALIBRATION, EVALUATION, Call, Feeds, Job, Recipe

_MADE = "made.xml"


def _opener(made: bool, precision: str | None) -> Any:
    """Make the function that opens the exported graph or the quantized one."""

    def open_model(job: Job) -> Call:
        core = openvino.Core()
        if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise RuntimeError("this processor has no bfloat16 instructions")
        model = core.read_model(job.file(_MADE) if made else job.graph)
        model.reshape({port.any_name: [job.batch, *_tail(port)] for port in model.inputs})
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": job.threads}
        if precision is not None:
            settings["INFERENCE_PRECISION_HINT"] = precision
        compiled = core.compile_model(model, "CPU", settings)

        def call(feeds: Feeds) -> Any:
            return compiled(feeds, share_inputs=True, share_outputs=True)[0]

        return call

    return open_model


def _tail(port: Any) -> list[Any]:
    """List the dimensions after the batch."""
    return list(port.partial_shape)[1:]


def _nothing(job: Job) -> None:
    """Do nothing: the graph is read as it is."""


def _items(job: Job, part: str = CALIBRATION) -> list[dict[str, Any]]:
    return list(job.rows(1, part))


def _model_type(job: Job) -> Any:
    import nncf

    return nncf.ModelType.TRANSFORMER if job.transformer else None


def _quantize(job: Job) -> None:
    import nncf

    items = _items(job)
    model = openvino.Core().read_model(job.graph)
    made = nncf.quantize(model, nncf.Dataset(items), subset_size=len(items), model_type=_model_type(job))
    openvino.save_model(made, job.file(_MADE), compress_to_fp16=False)


def _quantize_with_control(job: Job) -> None:
    import nncf

    _, labels = job.data(EVALUATION)
    assert labels is not None
    items, judged = _items(job), [(row, number) for number, row in enumerate(_items(job, EVALUATION))]

    def validate(compiled: Any, rows: Iterable[Any]) -> tuple[float, list[float]]:
        scores = [float(np.ravel(job.score(compiled(row)[0], labels[number : number + 1]))[0]) for row, number in rows]
        return float(np.mean(scores)), scores

    made = nncf.quantize_with_accuracy_control(
        openvino.Core().read_model(job.graph),
        calibration_dataset=nncf.Dataset(items),
        validation_dataset=nncf.Dataset(judged, lambda pair: pair[0]),
        validation_fn=validate,
        max_drop=job.max_drop,
        drop_type=nncf.DropType.ABSOLUTE,
        subset_size=len(items),
        model_type=_model_type(job),
    )
    openvino.save_model(made, job.file(_MADE), compress_to_fp16=False)


RECIPES = {
    "fp32": Recipe(_nothing, _opener(False, "f32")),
    "bf16": Recipe(_nothing, _opener(False, "bf16")),
    "nncf": Recipe(_quantize, _opener(True, None)),
    "nncf_control": Recipe(_quantize_with_control, _opener(True, None)),
}
