"""Measure the instrument's own cost, and compare it with a plain timing loop.

    python benchmarks/harness.py [--models digits,resnet18] [--runs 5]

- ``overhead``: the harness around an engine that does nothing: what a sample of it says, and what a call costs in all.
- ``parent``: share of a core that the measuring parent uses while its sessions run.
- ``idle``: cores that sessions keep busy while another one is measured, with eager's OpenMP pool among them.
- ``agreement``: medians against a hand-written loop over ``run_with_iobinding`` and ``module(x)``, in turns; the target
  is 3 % on a quiet machine. The loop is started as often as sessions are, for a part of the time each.

Writes results/harness.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from command import call

from enginesmith.pipeline.artifact import Artifact, Kind
from enginesmith.pipeline.engines.base import Engine, Session
from enginesmith.pipeline.measure.latency.timer import SessionTimer
from enginesmith.pipeline.system.device import Availability, Device
from enginesmith.pipeline.tensors import Array, Feeds, Signature

RESULTS = Path(__file__).parent / "results"
_LAUNCHES = 5

LOOP = """
import sys, time
import numpy as np
kind, path, shape, seconds = sys.argv[1], sys.argv[2], [int(n) for n in sys.argv[3].split(",")], float(sys.argv[4])
x = np.random.default_rng(0).random(shape, np.float32)
if kind == "engine":
    import onnxruntime
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    bound = session.io_binding()
    bound.bind_cpu_input(session.get_inputs()[0].name, x)
    for output in session.get_outputs():
        bound.bind_output(output.name)
    call = lambda: session.run_with_iobinding(bound)
else:
    import importlib, torch
    from enginesmith.models import MODELS
    module, _, factory = MODELS[path].factory.partition(":")
    net = getattr(importlib.import_module(module), factory)()[0].eval()
    tensor = torch.from_numpy(x)
    call = lambda: net(tensor)
    torch.inference_mode().__enter__()
for _ in range(20):
    call()
taken, end = [], time.perf_counter() + seconds
while time.perf_counter() < end:
    start = time.perf_counter()
    call()
    taken.append(time.perf_counter() - start)
print(np.median(taken) * 1e3)
"""


class Nothing(Session):
    """A session that does nothing."""

    signature = Signature(inputs=(), outputs=())

    def bind(self, feeds: Feeds) -> Feeds:
        return feeds

    def enqueue(self, bound: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def sibling(self) -> "Nothing":
        return Nothing()

    def fetch(self) -> dict[str, Array]:
        return {}

    def close(self) -> None:
        pass


class NoOp(Engine):
    """An engine of such sessions."""

    name: ClassVar[str] = "no-op"
    consumes: ClassVar[Kind] = "torch"
    tools: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def available(cls, device: Device) -> Availability:
        return Availability(ok=True)

    def load(self, artifact: Artifact, device: Device) -> Session:
        return Nothing()

    def prime(self, artifact: Artifact, device: Device) -> None:
        pass


def overhead() -> dict[str, float]:
    """Microseconds: of a sample, and of a call with all that is done around it."""
    timer = SessionTimer(NoOp(), Artifact(kind="torch", path=Path("none"), sha256="", bytes=0), Device())
    timer.load()
    timer.make_ready({}, 0.05)
    samples, whole = [], []
    for _ in range(20):
        block = timer.block(1.0)
        samples.append(float(np.median(block.host_seconds)) * 1e6)
        whole.append(block.wall_seconds / block.host_seconds.size * 1e6)
    return {"sample_us": statistics.median(samples), "call_us": statistics.median(whole), "limit_us": 5.0}


def measured(model: str, graph: str, seconds: int) -> dict[str, Any]:
    """One benchmark of ours, and the share of a core that this process used meanwhile."""
    start, used = time.perf_counter(), time.process_time()
    answer = call(
        "benchmark", model, graph, "--batch", "1", "--measure-time", f"{seconds}s", "--no-memory", "--no-limits"
    )
    if answer.exit_code:
        sys.exit(f"benchmark failed: {answer.message}")
    parent = (time.process_time() - used) / (time.perf_counter() - start)
    rows = {"eager": answer.document["baseline"]["latency"][0], "engine": answer.document["variants"][0]["latency"][0]}
    return {
        "parent_cores": parent,
        "idle_cores": {name: row["idle_cpu_share"] for name, row in rows.items()},
        "p50_ms": {name: row["p50_ms"] for name, row in rows.items()},
        "median_ms": {name: row["median_ms"]["median"] for name, row in rows.items()},
        "disturbed": {name: row["disturbed_share"] for name, row in rows.items()},
    }


def plain(kind: str, path: str, shape: str, seconds: int) -> float:
    """The hand-written loop, in processes of its own: the median of their medians, in milliseconds."""
    command = [sys.executable, "-c", LOOP, kind, path, shape, str(seconds / _LAUNCHES)]
    medians = []
    for _ in range(_LAUNCHES):
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        medians.append(float(done.stdout.split()[-1]))
    return statistics.median(medians)


def agreement(model: str, shape: str, graph: str, runs: int, seconds: int) -> dict[str, Any]:
    """Ours and the loops, in turns; the ratio of the medians over all turns."""
    ours, loops = [], []
    for turn in range(runs):
        ours.append(measured(model, graph, seconds))
        loops.append({"eager": plain("eager", model, shape, seconds), "engine": plain("engine", graph, shape, seconds)})
        print(f"{model} {turn + 1}/{runs}: ours {ours[-1]['p50_ms']}, loop {loops[-1]}", flush=True)
    ratios = {
        side: statistics.median(one["p50_ms"][side] for one in ours) / statistics.median(one[side] for one in loops)
        for side in ("eager", "engine")
    }
    return {"ratio": ratios, "ours": ours, "loops": loops}


def main() -> None:
    """Measure, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="digits=1,1,8,8;resnet18=1,3,224,224")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=8)
    given = parser.parse_args()
    found = {"command": " ".join(["python benchmarks/harness.py", *sys.argv[1:]]), "overhead": overhead()}
    print(found["overhead"])
    with tempfile.TemporaryDirectory() as folder:
        for entry in given.models.split(";"):
            model, _, shape = entry.partition("=")
            graph = str(Path(folder, f"{model}.onnx"))
            exported = call("export", model, "-o", graph)
            if exported.exit_code:
                sys.exit(f"export failed: {exported.message}")
            found[model] = agreement(model, shape, graph, given.runs, given.seconds)
            print(model, found[model]["ratio"])
            (RESULTS / "harness.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
