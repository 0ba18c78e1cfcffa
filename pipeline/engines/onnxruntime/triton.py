"""Configure Triton's ONNX Runtime backend."""

from collections.abc import Mapping
from typing import Any

from enginesmith.pipeline.engines.triton import Fields, Message, TritonBackend, quoted

_LEVELS = {"ORT_ENABLE_EXTENDED": 1, "ORT_ENABLE_BASIC": -1, "ORT_DISABLE_ALL": 2}
"""Of the backend; all optimisations are on where none is given."""


def configure(options: Mapping[str, Any], device: str) -> Fields:
    """Set the optimisation level, the CUDA accelerator and the threads, as the backend's README has them."""
    fields: list[tuple[str, Any]] = []
    left_out = options["session"]["disabled_optimizers"]
    level = _LEVELS["ORT_DISABLE_ALL"] if left_out else _LEVELS.get(options["graph_optimization_level"])
    inner: list[tuple[str, Any]] = [] if level is None else [("graph", Message([("level", level)]))]
    if device == "cuda":
        given = options["session"]["provider_options"][0]
        parameters = [("parameters", Message([("key", quoted(k)), ("value", quoted(v))])) for k, v in given.items()]
        cuda = Message([("gpu_execution_accelerator", Message([("name", quoted("cuda")), *parameters]))])
        inner.append(("execution_accelerators", cuda))
    if inner:
        fields.append(("optimization", Message(inner)))
    threads = {"intra_op_thread_count": options["intra_op_num_threads"], "inter_op_thread_count": 1}
    for key, number in threads.items():
        value = Message([("string_value", quoted(str(number)))])
        fields.append(("parameters", Message([("key", quoted(key)), ("value", value)])))
    return fields


def remark(engine: Mapping[str, Any]) -> tuple[str, ...]:
    """Tell that optimisation is off, where ONNX Runtime gets a graph wrong."""
    wrong = ", ".join(engine["options"]["session"]["disabled_optimizers"])
    if not wrong:
        return ()
    return (f"optimisation is off: {wrong} gets this graph wrong, and the backend cannot leave out one alone",)


BACKEND = TritonBackend("onnxruntime", "model.onnx", configure=configure, remark=remark)
