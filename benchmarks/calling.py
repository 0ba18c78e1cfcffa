"""Measure a call through ``enginesmith.load`` beside the raw session, and check the answers from many threads.

    python benchmarks/calling.py [--blocks 500] [--calls 20] [--threads 8] [--calls-per-thread 10000]

- ``overhead``: a network of one small layer; blocks of calls of the engine's own session, of it with tensors viewed as
  arrays and back (``raw_torch``), and of the loaded model with arrays and with tensors, in turns on the same session.
  OpenVINO is called as its documentation does (``raw``: ``compiled(x)``). Microseconds of a call, by the clock and of
  the processor: medians over blocks, and quartiles of the differences within a round. The target is 10 µs.
- ``threads``: each thread calls one loaded model with feeds of its own; every answer is compared, bit by bit, with the
  answer of one thread alone. ``onnxruntime`` serves all threads with one session, others with sessions in turn.

Writes results/calling.json.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command import call

import enginesmith

RESULTS = Path(__file__).parent / "results"
NET = """
import torch
def build():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 4), {"input": torch.randn(1, 8)}
"""


def block_us(function: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Microseconds of one call, in a block of calls: by the clock, and of the processor."""
    start, used = time.perf_counter(), time.process_time()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls * 1e6, (time.process_time() - used) / calls * 1e6


def raw_call(model: enginesmith.LoadedModel) -> Callable[[Any], Any]:
    """A call of the very engine that the model calls, as its own documentation does it: an array in, an array out."""
    session: Any = model._pool._first
    if "openvino" in model.variant:
        return lambda x: session.compiled(x)[0]
    return lambda x: session._session.run(None, {"input": x})[0]


def measure_overhead(run: Path, variant: str, blocks: int, calls: int) -> dict[str, Any]:
    """Raw calls, and those with arrays and with tensors, in turns."""
    x = np.random.default_rng(0).standard_normal((1, 8)).astype(np.float32)
    tensor = torch.from_numpy(x)
    with enginesmith.load(run, variant) as model:
        raw = raw_call(model)
        sides = {
            "raw": lambda: raw(x),
            "raw_torch": lambda: torch.from_numpy(raw(tensor.numpy())),
            "numpy": lambda: model(x),
            "torch": lambda: model(tensor),
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for index in range(blocks):
            for name in sorted(sides, reverse=index % 2 == 0):
                taken[name].append(block_us(sides[name], calls))
    times = {name: np.transpose(pairs) for name, pairs in taken.items()}
    report: dict[str, Any] = {}
    for at, clock in enumerate(("wall", "cpu")):
        rows = {f"{name}_us": np.median(each[at]).round(2).tolist() for name, each in times.items()}
        for name, plain in (("numpy", "raw"), ("torch", "raw_torch"), ("torch", "raw")):
            more = np.quantile(times[name][at] - times[plain][at], (0.25, 0.5, 0.75))
            rows[f"{name}_over_{plain}_us"] = more.round(2).tolist()
        report[clock] = rows
    return {"blocks": blocks, "calls_per_block": calls, **report}


def call_from_threads(run: Path, variant: str, threads: int, calls: int) -> dict[str, Any]:
    """Calls of all threads, the wrong ones among them, and what they raised."""
    wrong, errors = [0] * threads, []
    with enginesmith.load(run, variant) as model:
        rng = np.random.default_rng(1)
        feeds = [rng.standard_normal((1 + index % 4, 8)).astype(np.float32) for index in range(4 * threads)]
        expected = [model(feed) for feed in feeds]

        def work(thread: int) -> None:
            try:
                for index in range(calls):
                    at = (thread + index * threads) % len(feeds)
                    wrong[thread] += not np.array_equal(model(feeds[at]), expected[at])
            except enginesmith.EnginesmithError as error:
                errors.append(str(error))

        workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - start
        sessions = model._pool._free.qsize()
    counts = {"threads": threads, "calls": threads * calls, "sessions": sessions, "wrong": sum(wrong), "errors": errors}
    return {**counts, "seconds": round(seconds, 2)}


def main() -> None:
    """Make the run, measure, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=500)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls-per-thread", type=int, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        net, run = Path(folder, "net.py"), Path(folder, "run")
        net.write_text(NET, encoding="utf-8")
        words = ("--engine", "onnxruntime", "--engine", "openvino", "--engine", "eager", "--threads", "1")
        call("optimize", f"{net}:build", *words, "--measure-time", "0.3s", "--no-memory", "--out", str(run))
        report = {"load_1_minute": round(os.getloadavg()[0], 1), "cores": len(os.sched_getaffinity(0))}
        engines = ("onnxruntime-fp32", "openvino-fp32")
        overhead = {variant: measure_overhead(run, variant, given.blocks, given.calls) for variant in engines}
        report |= {"overhead": overhead, "threads": {}}
        for variant in (*engines, "eager"):
            report["threads"][variant] = call_from_threads(run, variant, given.threads, given.calls_per_thread)
    (RESULTS / "calling.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
