"""Make CUDA fail at calls of single measurements: many faults in less time than inject.py takes with whole runs.

Memory of eager and of ONNX Runtime, and a race of both, run in workers as in a run. Every allocation fails once;
launches and calls of the other faults are drawn at random. A measurement has to end, to tell of the fault in its rows
or errors without a traceback, and to give the card's memory back; the next one has to have the same peaks.
Run it under the runtime of this folder (README.md): ``python tests/cuda/inject_steps.py --count 100``.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from control import Control
from inject import FAULTS, OUT_OF_MEMORY, Hangs, _hangs, call

LIMIT_SECONDS = 120
NETS = Path(__file__).with_name("nets.py")


def make_candidates(folder: Path) -> dict[str, Any]:
    """Load and export the zero-weight MLP."""
    from enginesmith.pipeline.artifact import Artifact, file_digest
    from enginesmith.pipeline.engines.base import Candidate
    from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
    from enginesmith.pipeline.engines.torch.eager import Eager
    from enginesmith.pipeline.frameworks.source import resolve
    from enginesmith.pipeline.frameworks.torch import module, saved
    from enginesmith.pipeline.system.device import Device

    code, text = call("export", f"{NETS}:mlp", "-o", folder / "mlp.onnx", "--store", folder / "store")
    if code:
        raise SystemExit(text)
    (folder / "torch").mkdir()
    source, options = resolve(f"{NETS}:mlp"), module.LoadOptions()
    loaded = module.load(source, options)
    saved.save(loaded, source, options, folder / "torch")
    net, graph, device = folder / "torch" / saved.RECORD, folder / "mlp.onnx", Device(kind="cuda")
    module_artifact = Artifact(kind="torch", path=net, sha256="", bytes=0, signature=loaded.signature)
    exported = Artifact(kind="onnx", path=graph, sha256=file_digest(graph), bytes=0, signature=loaded.signature)
    return {
        "eager": Candidate("eager", Eager(), module_artifact, device),
        "onnxruntime": Candidate("onnxruntime", OnnxRuntime(), exported, device),
    }


class Measurements:
    """The three measurements, each as texts that tell what came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.candidates = folder, make_candidates(folder)
        self.feeds = {"input": np.zeros((4, 64), np.float32)}
        self.kinds = ("memory-eager", "memory-onnxruntime", "race")

    def measure(self, kind: str) -> dict[str, Any]:
        """Measure; ``failed`` has the texts of what failed, ``peaks`` what does not depend on the clock."""
        from enginesmith.pipeline.errors import EnginesmithError
        from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
        from enginesmith.pipeline.measure.latency.rows import measure_latency
        from enginesmith.pipeline.measure.memory.peak import measure_memory

        brief = LatencySettings(
            block_ms=0.2, time_limit_seconds=0.05, min_rounds=2, launches=1, warmup_limit_seconds=0.01
        )
        try:
            if kind == "race":
                rows = measure_latency(
                    list(self.candidates.values()), {4: self.feeds}, brief, self.folder, lambda text: None
                ).rows
                row_list = [row for of_one in rows.values() for row in of_one]
                failed = [str(row.failure or row.oom) for row in row_list if row.failure or row.oom]
                return {"failed": failed, "peaks": [row.p50_ms is not None for row in row_list]}
            candidate = self.candidates[kind.partition("-")[2]]
            memory = measure_memory(candidate, 4, self.feeds, self.folder, lambda text: None)
            failed = [str(memory.reasons["peak_bytes"])] if memory.peak_bytes is None else []
            return {"failed": failed, "peaks": memory.peak_bytes}
        except EnginesmithError as error:
            return {"failed": [str(error)], "peaks": None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50, help="faults at random launches and calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="begin none after so many minutes")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="inject-"))
    control = Control(folder / "control")
    os.environ["ENGINESMITH_STAND_IN_CONTROL"] = str(control.path)
    measurements = Measurements(folder)
    names = ("calls", "allocations", "launches", "faults", "fault_pid", "lost", *FAULTS)

    def reset(**fault: int) -> None:
        control.write(out_of_memory_more=2, **(dict.fromkeys(names, 0) | fault))

    plan, expected, draw = [], {}, random.Random(options.seed)
    for kind in measurements.kinds:
        reset()
        expected[kind] = measurements.measure(kind)
        if expected[kind]["failed"]:
            raise SystemExit(f"without a fault, {kind} fails, too: {expected[kind]}")
        counts = {fault: control.read(counter) for fault, counter in FAULTS.items()}
        print(kind, counts, expected[kind]["peaks"], flush=True)
        plan += [(kind, "out_of_memory_at", number) for number in range(1, counts["out_of_memory_at"] + 1)]
        random_faults = [draw.choice(("sticky_at", "lost_at")) for _ in range(options.count // len(measurements.kinds))]
        plan += [(kind, fault, draw.randint(1, counts[fault])) for fault in random_faults]
    draw.shuffle(plan)
    end, problems, tally = time.monotonic() + 60 * options.minutes, 0, Counter[str]()
    for kind, fault, number in plan:
        if time.monotonic() > end:
            break
        reset(**{fault: number})
        wrong: list[object] = []
        signal.signal(signal.SIGALRM, _hangs)
        signal.alarm(LIMIT_SECONDS)
        try:
            seen = measurements.measure(kind)
            met = control.read("faults")
            if "Traceback" in str(seen["failed"]) or 'File "' in str(seen["failed"]):
                wrong.append(f"a traceback: {seen['failed']}")
            if met and fault == "out_of_memory_at" and not all(OUT_OF_MEMORY.search(text) for text in seen["failed"]):
                wrong.append(f"no word of memory: {seen['failed']}")
            if met and fault != "out_of_memory_at" and not seen["failed"] and seen["peaks"] != expected[kind]["peaks"]:
                wrong.append(f"another result and no word: {seen}")
            if taken := {pid: size for pid, size in control.used_bytes().items() if pid != os.getpid()}:
                wrong.append(f"memory is still taken: {taken}")
            reset()
            if (after := measurements.measure(kind)) != expected[kind]:
                wrong.append(f"the next measurement differs: {after}")
            tally[f"{kind} {fault}: {'failed' if seen['failed'] else 'went on'}{'' if met else ', not met'}"] += 1
        except Hangs:
            wrong.append(f"no end after {LIMIT_SECONDS} s")
        finally:
            signal.alarm(0)
        problems += bool(wrong)
        if wrong:
            print(json.dumps([kind, fault, number, [str(text) for text in wrong]]), flush=True)
    print(f"{tally.total()} measurements with a fault, {problems} with a problem")
    for line, count in sorted(tally.items()):
        print(f"{count:5} {line}")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
