"""Measure how far a busy neighbor moves the reported speed-up.

    python benchmarks/noise.py [--models resnet18,digits] [--runs 10] [--seconds 20] [--only quiet|even|...]

For each model: the speed-up of ONNX Runtime over eager on the machine as it is when nothing else runs (several runs,
each in fresh processes), and as many runs beside each synthetic load, a process that takes one core half of the time. A
run is right if its 95 % interval contains the quiet value: once that of the quiet runs just before and after it (their
geometric mean), once the median of all quiet runs. The quiet runs are held against the latter too: where they do not
hold it, the machine itself was not the same all the time. Loads differ in how long they run and sleep at a stretch:

    fine     5 ms and 5 ms, shorter than most calls and blocks
    even     50 ms and 50 ms
    random   exponentially distributed, 100 ms each on average

With ``pinned`` in front the load stays on one core; otherwise the kernel places it. Writes results/noise.json.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from command import call

RESULTS = Path(__file__).parent / "results"
LOAD = """
import os, random, sys, time
busy, idle, pinned = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "pinned"
if pinned:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
draw = random.Random(0).expovariate if sys.argv[4] == "random" else None
while True:
    end = time.monotonic() + (draw(1 / busy) if draw else busy)
    while time.monotonic() < end:
        pass
    time.sleep(draw(1 / idle) if draw else idle)
"""
LOADS = {
    "fine": ("0.005", "0.005", "free", "even"),
    "even": ("0.05", "0.05", "free", "even"),
    "random": ("0.1", "0.1", "free", "random"),
    "pinned even": ("0.05", "0.05", "pinned", "even"),
}


@contextmanager
def load(name: str) -> Iterator[None]:
    """A neighbor, while the block lasts; ``quiet`` is none."""
    if name == "quiet":
        yield
        return
    neighbor = subprocess.Popen([sys.executable, "-c", LOAD, *LOADS[name]])
    try:
        yield
    finally:
        neighbor.kill()
        neighbor.wait()


def speedup(graph: str, model: str, seconds: int) -> dict[str, Any]:
    """One benchmark, in fresh processes: the speed-up of the graph over the model."""
    words = ("benchmark", model, graph, "--batch", "1", "--measure-time", f"{seconds}s", "--no-memory")
    answer = call(*words)
    if answer.exit_code:
        sys.exit(f"benchmark failed: {answer.message}")
    row = answer.document["variants"][0]["latency"][0]
    baseline = answer.document["baseline"]["latency"][0]
    return {
        "speedup": row["speedup"],
        "rounds": row["rounds"],
        "judged_rounds": row["speedup_rounds"],
        "disturbed": {"eager": baseline["disturbed_share"], "engine": row["disturbed_share"]},
        "all_calls": baseline["p50_ms"] / row["p50_ms"],
        "stopped": row["stopped_because"],
    }


def examine(model: str, graph: str, runs: int, seconds: int, loads: list[str]) -> dict[str, Any]:
    """Quiet runs, and runs beside each load, in turns, so that a machine that drifts does so for all of them."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("quiet", *loads)}
    for turn in range(runs):
        for name in found:
            with load(name):
                found[name].append(speedup(graph, model, seconds))
            said = found[name][-1]
            interval = said["speedup"] or {"median": float("nan"), "low": float("nan"), "high": float("nan")}
            print(
                f"{model} {turn + 1}/{runs} {name}: {interval['median']:.3f} [{interval['low']:.3f}, "
                f"{interval['high']:.3f}], all calls {said['all_calls']:.2f}, disturbed {said['disturbed']}",
                flush=True,
            )
    return judged(found)


def judged(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Count the intervals of each load that contain the quiet value."""
    medians = [one["speedup"]["median"] for one in found["quiet"] if one["speedup"]]
    quiet = statistics.median(medians)
    around = [math.sqrt(one * other) for one, other in zip(medians, [*medians[1:], medians[-1]], strict=True)]
    summary = {}
    for name, each in found.items():
        near = None if name == "quiet" else sum(map(_holds, each, around))
        right = sum(_holds(one, quiet) for one in each)
        summary[name] = {"right_around": near, "right": right, "of": len(each), "runs": each}
    return {"quiet": quiet, "quiet_range": [min(medians), max(medians)], "loads": summary}


def _holds(run: dict[str, Any], value: float) -> bool:
    interval = run["speedup"]
    return interval is not None and interval["low"] <= value <= interval["high"]


def main() -> None:
    """Measure, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet18,digits")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--out", type=Path, default=RESULTS / "noise.json")
    given = parser.parse_args()
    found: dict[str, Any] = {"command": " ".join(["python benchmarks/noise.py", *sys.argv[1:]])}
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models.split(","):
            graph = str(Path(folder, f"{model}.onnx"))
            exported = call("export", model, "-o", graph)
            if exported.exit_code:
                sys.exit(f"export failed: {exported.message}")
            found[model] = examine(model, graph, given.runs, given.seconds, given.loads.split(","))
            given.out.write_text(json.dumps(found, indent=1) + "\n")
            for name, one in found[model]["loads"].items():
                near = "" if name == "quiet" else f"{one['right_around']} hold the quiet runs around, "
                print(f"{model}, {name}: of {one['of']}, {near}{one['right']} hold {found[model]['quiet']:.3f}")


if __name__ == "__main__":
    main()
