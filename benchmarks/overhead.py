"""Measure the pipeline's cost on top of the raw calls that it wraps.

    python benchmarks/overhead.py [--models digits,resnet50,bert_base] [--repeats 3]

For each model, in turn: ``optimize`` with one fp32 variant on an empty store, the same again with everything stored,
and a plain script in a process of its own that imports torch, builds the model, exports it, and opens an ONNX Runtime
session. The measuring time, which both would spend, is taken from the run's own records. Writes results/overhead.json.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CLI = [sys.executable, "-m", "enginesmith.cli"]

RAW = """
import sys, time, tempfile, importlib
start = time.perf_counter()
import torch, onnxruntime
from enginesmith.models import MODELS
entry = MODELS[sys.argv[1]]
module, _, factory = entry.factory.partition(":")
torch.manual_seed(0)
model, example = getattr(importlib.import_module(module), factory)()
names = {word: torch.export.Dim.DYNAMIC for spec in entry.specs for word in spec.symbols}
shapes = {spec.name: {axis: names[dim] for axis, dim in enumerate(spec.shape) if dim in names} for spec in entry.specs}
with tempfile.TemporaryDirectory() as folder:
    torch.onnx.export(model, (), folder + "/m.onnx", kwargs=example, dynamic_shapes=shapes, dynamo=True,
                      external_data=True, opset_version=23)
    onnxruntime.InferenceSession(folder + "/m.onnx", providers=["CPUExecutionProvider"])
print(time.perf_counter() - start, file=sys.stderr)
"""


def timed(command: list[str], environment: dict[str, str]) -> float:
    """Wall seconds of a whole process."""
    start = time.perf_counter()
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    return time.perf_counter() - start


def measuring_seconds(run: Path) -> float:
    """Sum up the time of measuring and of looking for wrong answers, from the run's own record of those steps."""
    steps, kinds = json.loads((run / "run.json").read_text())["steps"], ("latency", "memory", "quality", "prosecute")
    return sum(step["seconds"] for step in steps if step["id"].startswith(kinds))


def once(model: str) -> dict[str, float]:
    """One round: empty store, full store, raw."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "ENGINESMITH_STORE": f"{folder}/store"}
        optimize = [*CLI, "optimize", model, "--engine", "onnxruntime", "--measure-time", "5s", "--quiet", "--out"]
        cold = timed([*optimize, f"{folder}/cold"], environment)
        warm = timed([*optimize, f"{folder}/warm"], environment)
        raw = timed([sys.executable, "-c", RAW, model], environment)
        measuring = measuring_seconds(Path(folder, "cold"))
    bound = 1.15 * (raw + measuring) + 3
    return {"optimize": cold, "again": warm, "raw": raw, "measuring": measuring, "bound": bound}


def help_seconds(repeats: int) -> float:
    """Median wall seconds of ``--help``."""
    return statistics.median(timed([*CLI, "--help"], dict(os.environ)) for _ in range(repeats))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="digits,resnet50,bert_base")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, Any] = {"help_seconds": help_seconds(9), "models": {}}
    print(f"--help: {found['help_seconds']:.3f} s (target 0.2)")
    for model in options.models.split(","):
        rounds = [once(model) for _ in range(options.repeats)]
        middle = {name: statistics.median(round_[name] for round_ in rounds) for name in rounds[0]}
        found["models"][model] = {"median": middle, "rounds": rounds}
        parts = f"raw {middle['raw']:.1f} + measuring {middle['measuring']:.1f}"
        again = f"again {middle['again']:.2f} s (target 1.5)"
        print(f"{model}: optimize {middle['optimize']:.1f} s, bound {middle['bound']:.1f} s ({parts}); {again}")
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    (HERE / "results" / "overhead.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
