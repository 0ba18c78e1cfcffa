"""The device's limits, twice over, and how far from them ONNX Runtime is.

    python benchmarks/limits.py [--models resnet18,bert_base] [--precisions fp32,int8] [--threads 1]

- ``device``: all rates measured twice, on all cores and on the threads of the rest, and how far apart they are.
- ``checks``: a large product of matrices, a large negation and a chain of tiny operators must be bound by arithmetic,
  memory and the start of operators; the first must come within 1.3 × its floor.
- ``models``: graphs of the zoo, made by the product, at batch 1.

Limits are those of a quiet machine, so the least time of an inference is held against them; its median stands beside.
Writes results/limits.json.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import graphs
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.measure.device_rates import measure_limits
from enginesmith.pipeline.measure.latency.timer import SessionTimer
from enginesmith.pipeline.measure.roofline import count_work, floor
from enginesmith.pipeline.measure.rows import DeviceLimits, LimitRow
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.units import format_si

RESULTS = Path(__file__).parent / "results"
SIDE, NUMBERS, OPERATORS = 1024, 64 << 20, 500
SIZES = {"batch": 1, "sequence": 128}
BLOCKS = 6
MOST_OVER_FLOOR = 1.3


def rates(limits: DeviceLimits) -> dict[str, float]:
    """Every figure by name, in a second."""
    names = ("copy_bandwidth", "read_bandwidth", "cache_bandwidth", "operators", "calls")
    figures = {name: getattr(limits, name) for name in names} | limits.products
    return {name: rate.per_second for name, rate in figures.items() if rate}


def compared(one: DeviceLimits, other: DeviceLimits) -> dict[str, float]:
    """Share by which figures of the same device differ; printed, too."""
    first, second = rates(one), rates(other)
    apart = {name: round(abs(first[name] / second[name] - 1), 4) for name in first if name in second}
    print(f"{one.device}: measured in {one.seconds:.1f} and {other.seconds:.1f} s")
    for name, share in apart.items():
        both = f"{format_si(first[name], '/s'):>10} {format_si(second[name], '/s'):>10}"
        print(f"  {name:16} {both}   {100 * share:.1f} % apart")
    return apart


def made(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Graphs that leave no doubt about what they are bound by, and what that is."""
    weights = np.random.default_rng(0).standard_normal((SIDE, SIDE)).astype(np.float32)
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    chain = [helper.make_node("Neg", [f"v{i}" if i else "x"], [f"v{i + 1}"]) for i in range(OPERATORS - 1)]
    chain.append(helper.make_node("Neg", [f"v{OPERATORS - 1}"], ["y"]))
    kinds: dict[str, tuple[list[onnx.NodeProto], list[int], list[onnx.TensorProto], str]] = {
        "product": ([product], [SIDE, SIDE], [numpy_helper.from_array(weights, "w")], "arithmetic"),
        "negation": ([helper.make_node("Neg", ["x"], ["y"])], [NUMBERS], [], "memory"),
        "chain": (chain, [1], [], "launch"),
    }
    for name, (nodes, shape, stored, bound) in kinds.items():
        given, result = (helper.make_tensor_value_info(one, TensorProto.FLOAT, shape) for one in "xy")
        graph = helper.make_graph(nodes, name, [given], [result], stored)
        path = folder / f"{name}.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        yield name, path, bound


def feeds_of(path: Path) -> Feeds:
    """Normal floats; integers that every vocabulary has."""
    inputs = model_file.signature(path).inputs
    rng = np.random.default_rng(0)
    shapes = {spec.name: spec.resolve(SIZES) for spec in inputs}
    return {
        spec.name: rng.standard_normal(shapes[spec.name]).astype(spec.dtype)
        if spec.dtype.startswith("float")
        else np.ones(shapes[spec.name], spec.dtype)
        for spec in inputs
    }


def held(path: Path, limits: DeviceLimits, device: Device, seconds: float) -> tuple[LimitRow, float]:
    """Build a graph, time it, and hold its least time against the limits; its median in ms, too."""
    engine = OnnxRuntime()
    with tempfile.TemporaryDirectory() as folder:
        source = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
        effect = engine.build(BuildRequest(source, Path(folder), device))
        built = source.model_copy(update={"kind": "engine", "path": Path(folder, effect.file)})
        timer = SessionTimer(engine, built, device)
        timer.load()
        timer.make_ready(feeds_of(path), seconds)
        taken = np.concatenate([timer.block(seconds / BLOCKS).host_seconds for _ in range(BLOCKS)])
        work = count_work(built.path, SIZES, 1, executed=True, arithmetic=engine.arithmetic)
    return floor(work, limits, float(taken.min()) * 1e3), float(np.median(taken)) * 1e3


def entry(name: str, row: LimitRow, median_ms: float) -> dict[str, Any]:
    """Make a graph's entry in the results, and print it."""
    print(f"{name}: {row.measured_ms:.4g} ms (median {median_ms:.4g}), {row.summary}", flush=True)
    return {**row.model_dump(mode="json"), "median_ms": median_ms}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,mobilenet_v2,bert_base,digits")
    parser.add_argument("--precisions", default="fp32,int8")
    parser.add_argument("--threads", type=int, default=1, help="one is disturbed least by other work")
    parser.add_argument("--seconds", type=float, default=3.0, help="for timing each graph")
    parser.add_argument("--graphs", type=Path, default=Path("build/graphs"), help="where graphs are, or are made")
    options = parser.parse_args()
    device = Device(threads=options.threads)
    measured_on = [one for one in (Device(), device) for _ in range(2)]
    found: dict[str, Any] = {"device": [], "apart": {}, "checks": {}, "models": {}}
    every = [measure_limits(one) for one in measured_on]
    found["device"] = [one.model_dump(mode="json") for one in every]
    found["apart"] = {one.device: compared(one, other) for one, other in zip(every[::2], every[1::2], strict=True)}
    limits = every[-1]
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path, bound in made(Path(folder)):
            row, median_ms = held(path, limits, device, options.seconds)
            found["checks"][name] = entry(name, row, median_ms)
            far = bound == "arithmetic" and (row.measured_over_floor or 0) > MOST_OVER_FLOOR
            wrong += [name] if row.bound_by != bound or far else []
    for model in options.models.split(","):
        for precision in options.precisions.split(","):
            graph = graphs.attempt(model, precision, options.graphs, "onnxruntime")
            if graph.path is None:
                print(f"{model} {precision}: not made: {graph.reason}")
                continue
            name = f"{model} {precision}"
            found["models"][name] = entry(name, *held(graph.path, limits, device, options.seconds))
    (RESULTS / "limits.json").write_text(json.dumps(found, indent=1) + "\n")
    if wrong:
        sys.exit(f"not as it must be: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
