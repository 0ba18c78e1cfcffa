"""Small ONNX graphs: made, run, and held against each other."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from enginesmith.calibration.ranges import ChannelStatistics, Provenance, Ranges, TensorRange
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.frameworks.onnx import evaluator, model_file
from enginesmith.pipeline.tensors import Array

Weights = dict[str, Any]
NOWHERE = Provenance(data="made up", digest="", rows=(), seed=0, batch=1)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def node(operator: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    """Make a node that is called after its operator and its first output; names are separated by spaces."""
    outputs = output.split()
    return helper.make_node(operator, inputs.split(), outputs, name=f"{operator}_{outputs[0]}", **attributes)


def build_graph(
    nodes: list[onnx.NodeProto], weights: Weights, outputs: str = "y", *, opset: int = 20, **inputs: Any
) -> onnx.ModelProto:
    """Build a model; an input has a shape, or an element type and a shape."""
    typed = {name: one if len(one) == 2 and isinstance(one[1], tuple) else (1, one) for name, one in inputs.items()}
    given = [helper.make_tensor_value_info(name, *one) for name, one in typed.items()]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs.split()]
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", given, made, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def save_graph(folder: Path, *arguments: Any, **options: Any) -> Path:
    """Save what :func:`build_graph` builds, with the shapes of all values in it, as simplified graphs have them."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(
        onnx.shape_inference.infer_shapes(build_graph(*arguments, **options), data_prop=True), folder / "given.onnx"
    )
    return folder / "given.onnx"


def save_operator(path: Path, operator: str, *constants: float | np.int64 | Array) -> Artifact:
    """Save ``y = operator(x, constants …)``; constants are float32 where they are Python's."""
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 3]) for name in "xy"]
    stored = [
        numpy_helper.from_array(
            np.asarray(value if isinstance(value, np.int64 | np.ndarray) else np.float32(value)), f"c{index}"
        )
        for index, value in enumerate(constants)
    ]
    nodes = [helper.make_node(operator, ["x", *(one.name for one in stored)], ["y"])]
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))


def parse_graph(text: str, opset: int = 21, *, named: bool = False, **weights: Any) -> ir.Model:
    """Parse a graph in ONNX's textual syntax; its nodes may be called after their outputs."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> net {text.removeprefix("net ")}')
    tensors = (ir.tensor(np.asarray(value), name=name) for name, value in weights.items())
    proto.graph.initializer.extend(ir.serde.serialize_tensor(tensor) for tensor in tensors)
    for one in proto.graph.node if named else ():
        one.name = one.output[0]
    return ir.from_proto(proto)


def run_model(
    model: ir.Model, feeds: Weights, *, optimized: bool = True, every_value: bool = False, save_to: Path | None = None
) -> dict[str, Any]:
    """Run a model by ONNX Runtime; return its outputs, or every value of it."""
    import onnxruntime

    proto = ir.to_proto(model)
    if every_value:
        values = {name for one in proto.graph.node for name in one.output} - {one.name for one in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(values))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if save_to:
        options.optimized_model_filepath = str(save_to)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, feeds), strict=True))


def count_kernels(model: ir.Model, feeds: Weights, folder: Path) -> Counter[str]:
    """Count operators of the graph that ONNX Runtime makes of a model."""
    run_model(model, feeds, save_to=folder / "optimized.onnx")
    return Counter(operators(folder / "optimized.onnx"))


def operators(path: Path) -> list[str]:
    return [one.op_type for one in onnx.load(path).graph.node]


def sqnr_db(exact: Any, other: Any) -> float:
    return float(10 * np.log10((exact**2).sum() / max(((exact - other) ** 2).sum(), 1e-30)))


def evaluate(path: Path, x: Any, *names: str) -> dict[str, Any]:
    """Return the outputs of a graph and what else is named, by name."""
    model = onnx.load(path)
    for name in {*names} - {value.name for value in model.graph.output} - {"x"}:
        model.graph.output.add().name = name
    onnx.save(model, path.with_name("tapped.onnx"))
    found = evaluator.run_graph(path.with_name("tapped.onnx"), {"x": x})
    return dict(zip([value.name for value in model.graph.output], found, strict=True)) | {"x": x}


def difference(before: Path, after: Path, x: Any) -> float:
    """Return the greatest difference of any output, as a share of its range."""
    return evaluator.largest_difference(*(evaluator.run_graph(path, {"x": x}) for path in (before, after)))


def channel_statistics(value: Any, axis: int) -> ChannelStatistics:
    value = np.moveaxis(value, axis, -1).reshape(-1, value.shape[axis]).astype(np.float64)
    size = np.abs(value)
    numbers = {
        "amax": size.max(0),
        "middle": (value.min(0) + value.max(0)) / 2,
        "mean": value.mean(0),
        "mean_absolute": size.mean(0),
        "mean_square": (value**2).mean(0),
    }
    return ChannelStatistics(axis=axis, **{name: tuple(each) for name, each in numbers.items()})


def measure_ranges(path: Path, x: Any, *names: str, axis: int = 1) -> Ranges:
    """Return what calibration would find out about these values, by channel."""
    values = evaluate(path, x, *names)
    tensors = {
        name: TensorRange(minimum=values[name].min(), maximum=values[name].max(), count=values[name].size)
        for name in names
    }
    channels = {name: channel_statistics(values[name], axis) for name in names}
    return Ranges(model_sha256="model", provenance=NOWHERE, tensors=tensors, channels=channels)


def quiet(text: str) -> None:
    """Take progress that nobody wants to see."""


def artifact(path: Path, kind: Any = "onnx", sha256: str = "model") -> Artifact:
    return Artifact(kind=kind, path=path, sha256=sha256, bytes=1)
