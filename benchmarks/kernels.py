"""Show where ONNX Runtime spends its time in graphs, by operator, and compare the graphs' speed in turns.

    python benchmarks/kernels.py plain.onnx net.onnx net.onnx@SkipLayerNormFusion --batch 8

`@NAME,NAME` leaves out optimizers of ONNX Runtime. One thread on the CPU. Times are of the processor, not of the clock,
so that other programs disturb less; a ratio is the median over rounds in which each graph ran once, in random order,
with a bootstrap 95 % interval. The table by operator has the least time of each node over all calls.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

_WARM_CALLS = 2
_SHOWN = 8
_RESAMPLES = 2000


def main() -> None:
    """Print the operators of each graph, and each graph's speed relative to the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128, help="of all other dynamic dimensions")
    parser.add_argument("--rounds", type=int, default=21)
    asked = parser.parse_args()
    for graph in asked.graphs:
        print(f"{graph}: {', '.join(_profile(graph, asked.batch, asked.length))}")
    sessions = [_open(graph) for graph in asked.graphs]
    calls = [(session, _make_feeds(session, asked.batch, asked.length)) for session in sessions]
    times: NDArray[np.float64] = np.zeros((asked.rounds + _WARM_CALLS, len(calls)))
    for row in times:
        for index in random.sample(range(len(calls)), len(calls)):
            start = time.process_time()
            calls[index][0].run(None, calls[index][1])
            row[index] = time.process_time() - start
    generator = np.random.default_rng(0)
    for graph, own in zip(asked.graphs, times[_WARM_CALLS:].T, strict=True):
        ratios = times[_WARM_CALLS:, 0] / own
        drawn = np.median(generator.choice(ratios, (_RESAMPLES, len(ratios))), axis=1)
        low, high = np.percentile(drawn, (2.5, 97.5))
        print(f"{graph}: {np.median(own) * 1e3:.2f} ms, {np.median(ratios):.3f} × the first [{low:.3f}, {high:.3f}]")


def _open(graph: str, trace: Path | None = None) -> onnxruntime.InferenceSession:
    path, _, left_out = graph.partition("@")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if trace:
        options.enable_profiling, options.profile_file_prefix = True, str(trace)
    return onnxruntime.InferenceSession(path, options, disabled_optimizers=left_out.split(",") if left_out else None)


def _make_feeds(session: onnxruntime.InferenceSession, batch: int, length: int) -> dict[str, NDArray[np.generic]]:
    """Make random floats, and ones for integers, which all masks and vocabularies have."""
    generator, feeds = np.random.default_rng(0), dict[str, NDArray[np.generic]]()
    for value in session.get_inputs():
        sizes = [size if isinstance(size, int) else length if axis else batch for axis, size in enumerate(value.shape)]
        numbers = generator.standard_normal(sizes).astype(np.float32)
        feeds[value.name] = np.ones(sizes, np.int64) if "int64" in value.type else numbers
    return feeds


def _profile(graph: str, batch: int, length: int, calls: int = 8) -> list[str]:
    """List the operators that take the most time, with how many nodes they are."""
    with tempfile.TemporaryDirectory() as folder:
        session = _open(graph, Path(folder, "trace"))
        feeds = _make_feeds(session, batch, length)
        for _ in range(calls):
            session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    nodes: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            nodes[event["args"]["op_name"], event["name"]].append(event["dur"] / 1e3)
    count, total = Counter(operator for operator, _ in nodes), dict.fromkeys((operator for operator, _ in nodes), 0.0)
    for (operator, _), times in nodes.items():
        total[operator] += min(times)
    longest = sorted(total, key=lambda name: -total[name])[:_SHOWN]
    return [f"{count[name]} {name} {total[name]:.2f} ms" for name in longest]


if __name__ == "__main__":
    main()
