"""Run one rival in its own environment: ``prepare`` its files, or ``serve`` calls that the driver asks for.

    python server.py prepare JOB.json MODULE:RECIPE
    python server.py serve JOB.json MODULE:RECIPE

A server reads one JSON object a line from standard input, and answers each with one on standard output: ``open``,
``block`` (time a block of calls), ``predict`` (answer the judged rows), ``memory``. What libraries print goes to
standard error. It times with the monotonic clock around a call that returns finished arrays.
"""

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from job import JUDGEMENT, PEAK, Call, Feeds, Job, Recipe

_MOST_CALLS = 10_000
_SLICE_SECONDS = 0.004
"""Calls between two readings of the threads' waiting take about so long, one at least."""


class Server:
    """Answer the driver's requests."""

    def __init__(self, job: Job, recipe: Recipe) -> None:
        self._job, self._recipe = job, recipe
        self._call: Call
        self._feeds: Feeds = {}
        self._call_seconds = 0.0
        self._libraries_bytes = 0

    def open(self, warmup_seconds: float) -> dict[str, float]:
        """Open the engine and call it until it is warm. Memory is counted from before the engine is opened."""
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts again (proc(5))
        self._libraries_bytes = _status_bytes("VmRSS")
        self._feeds, self._call = self._job.example(), self._recipe.open(self._job)
        end = time.perf_counter() + warmup_seconds
        while self._call_seconds == 0 or time.perf_counter() < end:
            self._call_seconds = float(np.median(self._time(3)))
        return {"call_seconds": self._call_seconds}

    def block(self, seconds: float) -> dict[str, Any]:
        """Time about so many seconds of calls; one before them takes the cost of having been asleep."""
        calls = max(1, min(_MOST_CALLS, round(seconds / max(self._call_seconds, 1e-9))))
        at_once = max(1, round(_SLICE_SECONDS / max(self._call_seconds, 1e-9)))
        if calls > 1:
            self._time(1)
        taken: list[float] = []
        waited: list[float] = []
        gc.disable()
        while len(taken) < calls:
            before, start = _waited_ns(), time.perf_counter_ns()
            part = self._time(min(at_once, calls - len(taken)))
            waited += [(_waited_ns() - before) / (time.perf_counter_ns() - start)] * len(part)
            taken += part
        gc.enable()
        return {"seconds": taken, "waited": waited}

    def predict(self, out: str) -> dict[str, int]:
        """Answer all rows that are judged, in the cell's batch size; the first output goes to a file."""
        found = []
        for feeds in self._job.rows(self._job.batch, JUDGEMENT):
            outputs = self._call(feeds)
            found.append(np.array(outputs[0] if isinstance(outputs, list | tuple) else outputs))
        np.save(out, np.concatenate(found))
        return {"rows": sum(map(len, found))}

    def memory(self) -> dict[str, int]:
        """Read the peak since ``open``, in all and above what the libraries alone take."""
        peak = _status_bytes("VmHWM")
        return {"peak_bytes": peak, "growth_bytes": max(0, peak - self._libraries_bytes)}

    def _time(self, calls: int) -> list[float]:
        call, feeds, clock, taken = self._call, self._feeds, time.perf_counter_ns, []
        for _ in range(calls):
            start = clock()
            call(feeds)
            taken.append((clock() - start) / 1e9)
        return taken


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _waited_ns() -> int:
    """Add up the nanoseconds that all threads waited for a core (the kernel's sched-stats.rst)."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError):  # it ended meanwhile
            continue
    return total


def prepare(job: Job, recipe: Recipe) -> None:
    """Do the whole job, from the model to the first answer, and write the process's own peak memory."""
    recipe.prepare(job)
    recipe.open(job)(job.example())
    job.file(PEAK).write_text(str(_status_bytes("VmHWM")))


def serve(server: Server) -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(server, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001  # whatever a rival raises is its answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Run what the command line says."""
    mode, path, name = sys.argv[1:]
    module, _, recipe_name = name.partition(":")
    job = Job.read(Path(path))
    recipe: Recipe = importlib.import_module(module).RECIPES[recipe_name]
    if mode == "prepare":
        prepare(job, recipe)
    else:
        serve(Server(job, recipe))


if __name__ == "__main__":
    main()
