"""Run users' commands on the device at hand: the doctor, a search, models in all engines, bundles, the vendors' timers.

    python benchmarks/gpu/commands.py --models resnet18 bert_base --out gpu_lane.json [--measure-time 15s]

Each is a command in a process of its own, one after another, with a time limit; the part ``commands`` of the lane's
record has each one's exit code, seconds and document, and what it said where it failed. Reports stay in the folder
``runs`` beside the record. The vendors' timers (``trtexec``, ``onnxruntime_perf_test``) measure the same files
where they are installed: they differ from ours by 3 % at most, or one of them is wrong.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lane import Lane, enginesmith

_SEARCH = ("--data", "digits", "--max-drop", "0.01", "--time", "60s")
_BUNDLE = "onnxruntime-fp32"


def optimize(lane: Lane, model: str, engines: Sequence[str], measure_time: str, runs: Path) -> None:
    """All usable engines on one model, in float32 and float16; then a bundle that runs on its own, and the timers."""
    place = lane.record["models"][model]
    name = re.sub(r"\W+", "-", model)
    run, bundle = runs / name, runs / f"{name}-bundle"
    words = [word for engine in engines for word in ("--engine", engine)]
    words += ["--precision", "fp32", "--precision", "fp16", "--measure-time", measure_time]
    if not lane.note(place, "optimize", *enginesmith("optimize", model, "--device", "cuda", *words, "--out", str(run))):
        return
    if lane.note(
        place, "package", *enginesmith("package", str(run), "--variant", _BUNDLE, "-f", "bundle", "-o", str(bundle))
    ):
        lane.note(place, "infer.py", sys.executable, str(bundle / "infer.py"))
    graphs, plans = list(run.rglob("*.onnx")), [file for file in run.rglob("*.engine") if engine_of(file) == "tensorrt"]
    timers = {
        "trtexec": (plans, ("--useCudaGraph", "--useSpinWait", "--noDataTransfers")),
        "onnxruntime_perf_test": (graphs, ("-e", "cuda", "-I", "-t", "10")),
    }
    for timer, (files, given) in timers.items():
        if files and shutil.which(timer):
            file = f"--loadEngine={files[0]}" if timer == "trtexec" else str(files[0])
            lane.note(place, timer, timer, *given, file)
        else:
            place[timer] = {"skipped": f"{timer} is not installed" if files else "no variant that it reads was made"}


def engine_of(file: Path) -> str:
    """Which engine built a file, as its manifest says: trtexec reads no engine of TensorRT-RTX."""
    name: str = json.loads(file.with_name(f"{file.name}.json").read_text())["engine"]
    return name


def main() -> None:
    """Write the record; without a device it says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--measure-time", default="15s", help="for each batch size")
    given = parser.parse_args()
    lane = Lane(given.out, "commands")
    if lane.skip_without_device():
        return
    runs = given.out.parent / "runs"
    place: dict[str, Any] = lane.record
    place["models"] = {model: {} for model in given.models}
    lane.note(place, "doctor", *enginesmith("doctor"))
    lane.note(place, "engines", *enginesmith("engines", "--device", "cuda"))
    rows = place["engines"]["document"] or []
    engines = [row["engine"] for row in rows if row["usable"] == row["builds here"] == "yes"]
    search = ("optimize", "digits", *_SEARCH, "--device", "cuda", "--out", str(runs / "search"))
    lane.note(place, "search", *enginesmith(*search))
    for model in given.models:
        optimize(lane, model, engines, given.measure_time, runs)
    lane.record["complete"] = True
    lane.write()


if __name__ == "__main__":
    main()
