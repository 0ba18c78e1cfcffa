"""Make CUDA fail at random calls of whole runs, and see what becomes of them.

One clean run of ``optimize`` fills a store and tells how many calls there are. Each later one finds in the store what
needs no device, so it verifies and measures on the device, with one fault: an allocation that fails, a sticky error
after a launch, or a device that is lost for all processes. Then the fault is taken away, and ``resume`` has to come to
the clean run's result. Run it under the runtime of this folder (README.md): ``python tests/cuda/inject.py --runs 50``.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
from control import Control

LIMIT_SECONDS = 240
"""After that a run counts as hanging."""
FAULTS = {"out_of_memory_at": "allocations", "sticky_at": "launches", "lost_at": "calls"}
OUT_OF_MEMORY = re.compile("out of memory|memory ran out|asked_bytes", re.IGNORECASE)
"""An allocation that fails ends in a row or a reason that says so, or torch frees its cache and the run continues."""
CODES = {0, 1, 3, 4, 130}
"""Of a run that met a fault: a result, or one of the documented failures; 2 is a mistake in the command."""


class Hangs(Exception):
    """A run that does not end."""


def _hangs(*_: object) -> None:
    raise Hangs


def call(*words: object) -> tuple[int, str]:
    """Run a command in this process, whose fork server all runs share; its exit code and what it wrote.

    Raises:
        Hangs: It took longer than ``LIMIT_SECONDS``.
    """
    from enginesmith.cli import main

    handler = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(LIMIT_SECONDS)
    try:
        result = CliRunner().invoke(main, [str(word) for word in words])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGTERM, handler)
    if isinstance(result.exception, Hangs):
        raise result.exception
    text = result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        text += "".join(traceback.format_exception(result.exception))
    return result.exit_code, text


def outcome(run: Path) -> dict[str, Any]:
    """List what of a result does not depend on the clock: variants, their verdicts, which rows have numbers."""
    record = json.loads((run / "run.json").read_text())
    return {
        variant["id"]: {
            "status": variant["status"],
            "passed": [entry["passed"] for entry in variant["fidelity"]],
            "rows": [(row["batch"], row["p50_ms"] is not None) for row in variant["latency"]],
        }
        for variant in [record["baseline"], *record["variants"]]
    }


class Injections:
    """Runs with one fault each, in one folder."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder, self.words = folder, words
        self.control = Control(Path(os.environ["ENGINESMITH_STAND_IN_CONTROL"]))
        self.store = folder / "store"

    def optimize(self, out: Path) -> tuple[int, str]:
        return call("optimize", *self.words, "--store", self.store, "--out", out)

    def clean(self) -> None:
        """Run without a fault, twice: the second run says how many calls there are with a full store."""
        for name in ("first", "clean"):
            self.reset()
            self.forget_measured()
            code, text = self.optimize(self.folder / name)
            if code:
                raise SystemExit(f"without a fault it fails, too ({code}):\n{text}")
        self.counts = {fault: self.control.read(counter) for fault, counter in FAULTS.items()}
        self.expected = outcome(self.folder / "clean")

    def forget_measured(self) -> None:
        """Leave in the store what needs no device, so that all the rest is done again."""
        if not self.store.exists():
            return
        _, text = call("cache", "list", "--store", self.store, "--json")
        for entry in json.loads(text):
            if entry["step"].partition("-")[0] not in ("load", "export", "simplify", "build", "audit"):
                (folder,) = (self.store / "objects" / entry["key"][:2]).glob(f"{entry['key']}*")
                shutil.rmtree(folder)

    def reset(self, **fault: int) -> None:
        names = ("calls", "allocations", "launches", "faults", "fault_pid", "lost", *FAULTS)
        self.control.write(out_of_memory_more=2, **(dict.fromkeys(names, 0) | fault))

    def inject(self, fault: str, call_number: int) -> dict[str, Any]:
        """Run with a fault, then resume; ``problems`` is empty where all is as it has to be."""
        out = self.folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        self.forget_measured()
        self.reset(**{fault: call_number})
        entry: dict[str, Any] = {"fault": fault, "at": call_number, "problems": []}
        problems = entry["problems"]
        start = time.monotonic()
        try:
            entry["code"], entry["text"] = self.optimize(out)
            entry["met"] = self.control.read("faults")
            if "Traceback" in entry["text"] or 'File "' in entry["text"]:
                problems.append("a traceback is shown")
            if fault == "out_of_memory_at" and entry["code"] and not OUT_OF_MEMORY.search(entry["text"]):
                problems.append(f"no word of memory: {entry['text']}")
            if entry["code"] not in CODES:
                problems.append(f"exit code {entry['code']}")
            if taken := {pid: size for pid, size in self.control.used_bytes().items() if pid != os.getpid()}:
                problems.append(f"memory is still taken: {taken}")
            self.reset()
            complete = entry["code"] == 0 and outcome(out) == self.expected
            if not complete:
                code, text = call("resume", out)
                entry["resumed"] = code
                if code:
                    problems.append(f"resume ends with {code}: {text}")
                elif outcome(out) != self.expected:
                    problems.append(f"resume comes to another result: {outcome(out)}")
        except Hangs:
            problems.append(f"no end after {LIMIT_SECONDS} s")
        except Exception:  # noqa: BLE001 - a fault of the check is a finding, too
            problems.append(traceback.format_exc())
        entry["seconds"] = round(time.monotonic() - start, 1)
        return entry


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--each-allocation", action="store_true", help="one run for each allocation, in turn, which fails"
    )
    parser.add_argument("--minutes", type=float, default=60, help="begin no run after so many minutes")
    parser.add_argument("--out", type=Path, help="a file with one JSON object a line, one for each run")
    parser.add_argument("words", nargs="*", help="arguments of optimize, after --")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="inject-"))
    os.environ["ENGINESMITH_STAND_IN_CONTROL"] = str(Control(folder / "control").path)
    nets = Path(__file__).with_name("nets.py")
    default = [f"{nets}:mlp", "--device", "cuda", "--engine", "onnxruntime", "--no-references", "--batch", "4"]
    default += ["--measure-time", "0.2s", "--threads", "1"]
    injections = Injections(folder, options.words or default)
    injections.clean()
    print(f"calls of a clean run: {injections.counts}", flush=True)
    draw, codes, failed, number = random.Random(options.seed), Counter[str](), 0, 0
    end = time.monotonic() + 60 * options.minutes
    plan = [(fault, draw.randint(1, injections.counts[fault])) for fault in draw.choices(list(FAULTS), k=options.runs)]
    if options.each_allocation:
        plan = [("out_of_memory_at", call) for call in range(1, injections.counts["out_of_memory_at"] + 1)]
    for fault, call_number in plan:
        if time.monotonic() > end:
            break
        number += 1
        entry = injections.inject(fault, call_number)
        codes[f"{fault} → {entry.get('code')}, {'met' if entry.get('met') else 'not met'}"] += 1
        failed += bool(entry["problems"])
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        for problem in entry["problems"]:
            print(f"{fault} {entry['at']}: {problem}", flush=True)
    print(f"{number} runs with a fault, {failed} with a problem")
    for kind, count in sorted(codes.items()):
        print(f"{count:5} {kind}")
    shutil.rmtree(folder)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
