"""enginesmith: what one command gives, opened with ``enginesmith.load``."""

import contextlib
import subprocess
import sys
from typing import Any

import onnxruntime  # noqa: F401  # before the server's memory is counted, as the rivals import theirs
from job import KNOWN, Call, Feeds, Job, Recipe

from enginesmith import load

with contextlib.suppress(ImportError):
    import openvino  # noqa: F401

_RUN = "run"


def command(job: Job) -> list[str]:
    """List the words of the command: the only place that says how enginesmith is called."""
    return [
        *("optimize", job.source, "--data", f"{job.model}/{KNOWN}.npz", "--time", "5m"),
        *("--metric", job.metric, "--max-drop", str(job.max_drop)),
        *("--batch", str(job.batch), "--threads", str(job.threads), "--measure-time", "10s"),
        *("--out", str(job.file(_RUN)), "--store", str(job.file("store")), "--quiet"),
    ]


def _optimize(job: Job) -> None:
    done = subprocess.run([sys.executable, "-m", "enginesmith.cli", *command(job)])
    if done.returncode:
        sys.exit(done.returncode)  # the last line of the log is its message


def _open(job: Job) -> Call:
    loaded = load(job.file(_RUN))

    def call(feeds: Feeds) -> Any:
        outputs = loaded(**feeds)
        return list(outputs.values()) if isinstance(outputs, dict) else outputs

    return call


RECIPES = {"optimize": Recipe(_optimize, _open)}
