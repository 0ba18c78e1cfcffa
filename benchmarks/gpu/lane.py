"""Try TensorRT on the device at hand: build, verify, sweep and measure engines, with and without CUDA graphs.

    python benchmarks/gpu/lane.py --models digits resnet50 --out gpu_lane.json [--seconds 10]

Everything is a command in a process of its own, with a time limit; the part ``tensorrt`` of the lane's record has each
one's exit code, seconds and document. What a flavour refuses (TensorRT-RTX has no target for sm90) is its document, and
no failure of the lane. The file is written anew after each command: a lane which is cut short leaves what it has.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import Record

from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.device import Device

FLAVOURS = ("tensorrt", "tensorrt_rtx")
LEDGER = Path(__file__).with_name("ledger.py")
_LIMIT_SECONDS = 400
_TAIL = 2000
_BATCHES = "1,8,64"
_RANGE = "batch=1:8:64"


class Lane:
    """Runs commands and keeps the record."""

    def __init__(self, out: Path, part: str) -> None:
        self._whole = Record(out)
        self._part, self.record = part, self._whole.start(part)

    def write(self) -> None:
        """The record as it is now."""
        self._whole.write()

    def skip_without_device(self) -> bool:
        """Tell whether there is no device, which the record and the terminal then say."""
        if nvidia.cuda_device(0) is not None:
            return False
        self.record |= {"skipped": f"no CUDA device: {nvidia.driver().reason}", "complete": True}
        print(f"{self._part} skipped: {self.record['skipped']}")
        self.write()
        return True

    def note(self, place: dict[str, Any], name: str, *command: str) -> bool:
        """Run ``command`` and put what came of it into ``place``; whether its exit code was 0."""
        started = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
            code, output, said = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            code, output, said = 124, "", f"it took longer than {_LIMIT_SECONDS} s"
        document = _parsed(output)
        found = {"exit": code, "seconds": round(time.monotonic() - started, 2), "document": document}
        if code or document is None:
            found["said"] = (output + said)[-_TAIL:]
        place[name] = found
        print(f"  {name}: {'done' if not code else _reason(document, said)}", flush=True)
        self.write()
        return code == 0


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _reason(document: Any, said: str) -> str:
    if isinstance(document, dict) and "error" in document:
        return str(document["error"]).partition("\n")[0]
    return next(iter(reversed(said.strip().splitlines())), "no message")


def enginesmith(*arguments: str) -> tuple[str, ...]:
    """A command of ours that prints a document."""
    return (sys.executable, "-m", "enginesmith.cli", *arguments, "--json")


def flavour(lane: Lane, name: str, models: list[str], seconds: int, scratch: Path) -> None:
    """All that one flavour is asked, of each model."""
    kind = engine_class(name)
    assert issubclass(kind, TensorRT)
    found = kind.available(Device(kind="cuda"))
    place: dict[str, Any] = lane.record.setdefault("flavours", {}).setdefault(name, {})
    if not found.ok:
        place["skipped"] = found.reason
        print(f"{name} skipped: {found.reason}", flush=True)
        lane.write()
        return
    for model in models:
        print(f"{name}, {model}", flush=True)
        of_model: dict[str, Any] = place.setdefault(model, {})
        graph = scratch / f"{model}.onnx"
        if not graph.exists() and not lane.note(
            of_model, "export", *enginesmith("export", model, "-o", str(graph), "--shape", _RANGE)
        ):
            continue
        _engine(lane, of_model, kind, graph, scratch / f"{model}-{name}.engine")
        for graphs in ("off", "on"):
            words = ("optimize", model, "--device", "cuda", "--engine", name, "--batch", _BATCHES)
            more = ("--workspace", "max,sweep" if graphs == "off" else "max", "--measure-time", f"{seconds}s")
            more += ("--cuda-graphs", graphs)
            run = scratch / f"{model}-{name}{'' if graphs == 'off' else '-graphs'}"
            title = "optimize" if graphs == "off" else "optimize with CUDA graphs"
            lane.note(of_model, title, *enginesmith(*words, *more, "--out", str(run)))


def _engine(lane: Lane, place: dict[str, Any], kind: type[TensorRT], graph: Path, engine: Path) -> None:
    """An engine for this device, and where its memory goes; where there can be none, one for another, to be refused."""
    words: tuple[str, ...] = ("build", str(graph), "--engine", kind.name, "--shape", _RANGE, "-o")
    if not lane.note(place, "build", *enginesmith(*words, str(engine))):
        targets = kind.known().targets
        if not targets or not lane.note(
            place, f"build for {targets[1]}", *enginesmith(*words, str(engine), "--target", targets[1])
        ):
            return
    for title, more in {
        "ledger": (),
        "ledger, opened again": (),
        "ledger at batch 64": ("--batch", "64"),
        "ledger with CUDA graphs": ("--cuda-graphs",),
    }.items():
        if not lane.note(place, title, sys.executable, str(LEDGER), str(engine), *more):
            return
    streaming = engine.with_name(f"streaming-{engine.name}")
    if lane.note(place, "build with weight streaming", *enginesmith(*words, str(streaming), "--weight-streaming")):
        command = (sys.executable, str(LEDGER), str(streaming), "--weight-streaming-budget", "0")
        lane.note(place, "ledger with weights streamed", *command)


def main() -> None:
    """Write the record; without a device it says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["digits", "resnet50"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=int, default=10)
    given = parser.parse_args()
    lane = Lane(given.out, "tensorrt")
    if lane.skip_without_device():
        return
    with tempfile.TemporaryDirectory() as scratch:
        for name in FLAVOURS:
            flavour(lane, name, given.models, given.seconds, Path(scratch))
    lane.record["complete"] = True
    lane.write()


if __name__ == "__main__":
    main()
