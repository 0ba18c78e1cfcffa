"""Memory limits held against real builds, and what the pipeline costs on top of TensorRT-RTX's own calls.

    python benchmarks/tensorrt_limits.py --graphs build/graphs [--parts workspace fit overhead] [--pairs 11]

- ``workspace``: the smallest limit that the product names after one build without a limit. It has to build, and 64 KiB
  less has to fail, where it is larger than that.
- ``fit``: ``enginesmith fit`` against brute force: an engine for every batch from 1 to 64, its weights, activations,
  inputs and outputs added up. Budgets lie between two batches, at a batch's need, and one byte below it.
- ``overhead``: ``enginesmith build`` of ResNet-50 in fp16 against a plain script in a process of its own, in turns.

Writes results/tensorrt_limits.json, parts that were not asked for as they were.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from command import Answer, call

import graphs
from enginesmith.pipeline.engines.base import EngineFacts
from enginesmith.pipeline.engines.tensorrt import builder
from enginesmith.pipeline.engines.tensorrt.engine import TensorRTRTX
from enginesmith.pipeline.errors import LimitTooSmall
from enginesmith.pipeline.tensors import Signature, total_bytes

RESULTS = Path(__file__).parent / "results" / "tensorrt_limits.json"
TARGET = "sm86"
_STEP_BYTES = 64 << 10
_MOST = 64
_WORKSPACE = (("resnet50", "fp32"), ("mobilenet_v2", "fp32"), ("unet", "fp32"))
_FIT = (("resnet50", "fp16"), ("mobilenet_v2", "fp32"), ("lstm", "fp32"))
_AT = (1, 6, 23, 47)
"""Batches that budgets are made for."""
_OVERHEAD = ("resnet50", "fp16")
_RESAMPLES = 2000

RAW = """
import sys, time
start = time.perf_counter()
import tensorrt_rtx as trt
logger = trt.Logger(trt.Logger.WARNING)
builder = trt.Builder(logger)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, logger)
assert parser.parse_from_file(sys.argv[1])
config = builder.create_builder_config()
config.num_compute_capabilities = 1
config.set_compute_capability(trt.ComputeCapability.SM86, 0)
profile = builder.create_optimization_profile()
profile.set_shape("image", (1, 3, 224, 224), (1, 3, 224, 224), (8, 3, 224, 224))
config.add_optimization_profile(profile)
plan = builder.build_serialized_network(network, config)
with open(sys.argv[2], "wb") as file:
    file.write(plan)
print(time.perf_counter() - start)
"""


def build(graph: Path, batch: int, *options: str) -> Answer:
    """Build for a largest batch, in a store and a folder that are thrown away."""
    with tempfile.TemporaryDirectory() as out:
        output, store = f"{out}/m.engine", f"{out}/store"
        ranges = ("--batch", f"{batch},1" if batch > 1 else "1")
        return call("build", str(graph), "-o", output, "--target", TARGET, *ranges, "--store", store, *options)


def _manifest(answer: Answer) -> Mapping[str, Any]:
    if answer.exit_code:
        sys.exit(f"the build failed: {answer.message}")
    manifest: Mapping[str, Any] = answer.document["manifest"]
    return manifest


def workspace(folder: Path) -> list[dict[str, Any]]:
    """The smallest limit of each model at each batch, and whether it is one."""
    rows = []
    for model, precision in _WORKSPACE:
        for batch in (1, 16, _MOST):
            rows.append({"model": model, "precision": precision, "batch": batch})
            rows[-1] |= _smallest(graphs.make(model, precision, folder), batch)
            print(rows[-1], flush=True)
    return rows


def _smallest(graph: Path, batch: int) -> dict[str, Any]:
    figures = _manifest(build(graph, batch))["figures"]
    names = ("weights_bytes", "activation_bytes", "scratch_bytes")
    facts = EngineFacts(**{name: figures[name] for name in names})
    tried: list[int] = []

    def attempt(limit: int) -> None:
        tried.append(limit)
        if not _holds(graph, batch, limit):
            raise LimitTooSmall(f"{limit} bytes")

    limit = builder.find_smallest_workspace(attempt, facts, TensorRTRTX.known())
    builds = 1 + len(tried)
    below = limit - _STEP_BYTES
    return {
        "smallest_bytes": limit,
        **{name: figures[name] for name in names},
        "builds": builds,
        "it_builds": _holds(graph, batch, limit),
        "less_fails": not _holds(graph, batch, below) if below > 0 else None,
    }


def _holds(graph: Path, batch: int, limit: int) -> bool:
    """Tell whether an engine is built within a limit; any other failure than the limit's ends the program."""
    answer = build(graph, batch, "--workspace", str(limit))
    if answer.exit_code and answer.failure != LimitTooSmall.failure:
        sys.exit(f"another failure than expected: {answer.failure}: {answer.message}")
    return answer.exit_code == 0


def fit(folder: Path) -> list[dict[str, Any]]:
    """`fit` and brute force, for several budgets of each model."""
    rows = []
    for model, precision in _FIT:
        graph = graphs.make(model, precision, folder)
        needs = {batch: _need(graph, batch) for batch in range(1, _MOST + 2)}
        ordered = list(needs.values())
        print(f"{model}: {ordered[0]} … {ordered[-1]} bytes, grows: {ordered == sorted(ordered)}", flush=True)
        for budget in _budgets(needs):
            rows.append({"model": model, "precision": precision, "grows": ordered == sorted(ordered)})
            rows[-1] |= _fitted(graph, budget, needs)
            print(rows[-1], flush=True)
    return rows


def _need(graph: Path, batch: int) -> int:
    """Bytes of weights, activations, inputs and outputs of a real engine."""
    manifest = _manifest(build(graph, batch))
    signature = Signature.model_validate(manifest["signature"])
    figures = manifest["figures"]
    io = total_bytes((*signature.inputs, *signature.outputs), {"batch": batch})
    return int(figures["weights_bytes"]) + int(figures["activation_bytes"]) + io


def _budgets(needs: Mapping[int, int]) -> list[int]:
    """Between a batch and the next, at its need, and one byte below it."""
    return [size for at in _AT for size in ((needs[at] + needs[at + 1]) // 2, needs[at], needs[at] - 1) if size > 0]


def _fitted(graph: Path, budget: int, needs: Mapping[int, int]) -> dict[str, Any]:
    expected = max((batch for batch, need in needs.items() if need <= budget), default=None)
    with tempfile.TemporaryDirectory() as store:
        answer = call("fit", str(graph), "--memory", str(budget), "--target", TARGET, "--store", store)
    found = answer.document if isinstance(answer.document, dict) else {}
    batch = found.get("largest_batch")
    row = {"budget_bytes": budget, "brute_force": expected, "fit": batch, "equal": batch == expected}
    row |= {"need_equal": batch is None or found["needed_bytes"] == needs.get(batch)}
    limit = found.get("smallest_workspace_bytes")
    if batch is not None and limit is not None:
        row["workspace_builds"] = _holds(graph, batch, limit)
        row["less_fails"] = not _holds(graph, batch, limit - _STEP_BYTES) if limit > _STEP_BYTES else None
    return row | {"workspace_bytes": limit, "builds": found.get("builds"), "seconds": round(answer.seconds, 1)}


def overhead(folder: Path, pairs: int) -> dict[str, Any]:
    """Pairs of a command and a plain script, which one first in turns."""
    graph = graphs.make(*_OVERHEAD, folder)
    rounds: list[dict[str, float]] = []
    for index in range(pairs + 1):
        sides: list[Callable[[Path], dict[str, float]]] = [_command, _raw]
        order = sides if index % 2 else sides[::-1]
        rounds.append({name: value for side in order for name, value in side(graph).items()})
        print(rounds[-1], flush=True)
    rounds = rounds[1:]  # the first pair reads the files into memory
    middle = {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}
    return {
        "model": "-".join(_OVERHEAD),
        "pairs": pairs,
        "median": middle,
        "step_ratio": _ratio(rounds, "step", "raw"),
        "command_ratio": _ratio(rounds, "command", "raw_process"),
        "target_step_ratio": 1.3,
        "rounds": rounds,
    }


def _ratio(rounds: Sequence[Mapping[str, float]], above: str, below: str) -> dict[str, float]:
    """Median of the pairs' ratios, with a percentile bootstrap's interval."""
    ratios = np.array([one[above] / one[below] for one in rounds])
    samples = np.random.default_rng(0).choice(ratios, (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    figures = {"median": float(np.median(ratios)), "low_95": float(low), "high_95": float(high)}
    return {name: round(value, 3) for name, value in figures.items()}


def _command(graph: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as out:
        options = ["-o", f"{out}/m.engine", "--target", TARGET, "--store", f"{out}/store", "--json", "--quiet"]
        text, seconds = _process([sys.executable, "-m", "enginesmith.cli", "build", str(graph), *options])
    history = json.loads(text)["history"]
    return {"step": history[-1]["seconds"], "load": history[0]["seconds"], "command": seconds}


def _raw(graph: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as out:
        text, seconds = _process([sys.executable, "-c", RAW, str(graph), f"{out}/m.engine"])
    return {"raw": float(text), "raw_process": seconds}


def _process(command: list[str]) -> tuple[str, float]:
    """Standard output and wall seconds of a whole process."""
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    if result.returncode:
        sys.exit(f"{command[:4]} failed:\n{result.stderr[-3000:]}")
    return result.stdout, time.perf_counter() - start


def main() -> None:
    """Measure, print, write."""
    names = ("workspace", "fit", "overhead")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, default=Path("build/graphs"), help="folder of benchmarks/graphs.py")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--pairs", type=int, default=11, help="of command and plain script")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found |= {"target": TARGET, "tensorrt_rtx": importlib.metadata.version("tensorrt-rtx")}
    if "workspace" in options.parts:
        found["workspace"] = workspace(options.graphs)
    if "fit" in options.parts:
        found["fit"] = fit(options.graphs)
    if "overhead" in options.parts:
        found["overhead"] = overhead(options.graphs, options.pairs)
        print({name: value for name, value in found["overhead"].items() if name != "rounds"})
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
