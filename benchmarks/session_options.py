"""Each option of a session on the CPU against the defaults: which ones are worth trying with ``--tune``.

    python benchmarks/session_options.py [--models digits,lstm] [--batch 1,8] [--seconds 30] [--options NUM_STREAMS=2]

All values of an engine and the defaults are measured in the same rounds: the time of a call by one caller, and the
throughput of as many callers as there are threads. A cell is a model at a batch size. An option is worth trying where
it is at least 1.1 × as fast as the defaults, with an interval above 1, in a third of the cells.
Writes results/session_options.json and results/session_options.md, and leaves the cells of other calls in them.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from command import call

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Candidate, Engine
from enginesmith.pipeline.engines.onnxruntime import engine as onnxruntime_engine
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.openvino.engine import OpenVINO
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import measure_latency
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import Interval, divide
from enginesmith.pipeline.system import cpu
from enginesmith.pipeline.system.device import Device

_RECORD = Path(__file__).parent / "results/session_options.json"
_WORTH, _SHARE = 1.1, 1 / 3
DEFAULTS = "defaults"
ONNXRUNTIME: Mapping[str, Mapping[str, Any]] = {
    "session.intra_op.allow_spinning=0": {"session.intra_op.allow_spinning": "0"},
    "intra_op_num_threads=1": {"intra_op_num_threads": 1},
    "enable_cpu_mem_arena=0": {"enable_cpu_mem_arena": False},
    "enable_mem_pattern=0": {"enable_mem_pattern": False},
    "execution_mode=ORT_PARALLEL": {"execution_mode": "ORT_PARALLEL", "inter_op_num_threads": 2},
    "graph_optimization_level=ORT_ENABLE_EXTENDED": {"graph_optimization_level": "ORT_ENABLE_EXTENDED"},
    "session.dynamic_block_base=4": {"session.dynamic_block_base": "4"},
    "session.set_denormal_as_zero=1": {"session.set_denormal_as_zero": "1"},
}
OPENVINO: Mapping[str, Mapping[str, Any]] = {
    "NUM_STREAMS=2": {"NUM_STREAMS": 2},
    "INFERENCE_NUM_THREADS=1": {"INFERENCE_NUM_THREADS": 1},
    "ENABLE_CPU_PINNING=True": {"ENABLE_CPU_PINNING": True},
    "PERFORMANCE_HINT=THROUGHPUT": {"PERFORMANCE_HINT": "THROUGHPUT"},
    "CPU_DENORMALS_OPTIMIZATION=True": {"CPU_DENORMALS_OPTIMIZATION": True},
}


class AnyOnnxRuntime(OnnxRuntime):
    """ONNX Runtime with any option of its sessions, on the graph as it was exported."""

    save_optimized: bool = False
    given: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it

    def _open(self, *arguments: Any) -> Any:
        import onnxruntime

        usual = onnxruntime_engine.session_options
        enumerations = {
            "execution_mode": onnxruntime.ExecutionMode,
            "graph_optimization_level": onnxruntime.GraphOptimizationLevel,
        }

        def session_options(*arguments: Any) -> Any:
            chosen = usual(*arguments)
            for name, value in self.given.items():
                if "." in name:
                    chosen.add_session_config_entry(name, value)
                else:
                    setattr(chosen, name, getattr(enumerations[name], value) if name in enumerations else value)
            return chosen

        onnxruntime_engine.session_options = session_options  # type: ignore[assignment]  # the process has one session
        return super()._open(*arguments)


class AnyOpenVINO(OpenVINO):
    """OpenVINO with any option of a compiled model."""

    given: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it

    def _open(self, artifact: Artifact, device: Device, **more: Any) -> Any:
        return super()._open(artifact, device, **self.given, **more)


def sides(engine: str, only: set[str]) -> dict[str, Engine]:
    """Engines by option, all or ``only`` some; the defaults come first."""
    options, made = (ONNXRUNTIME, AnyOnnxRuntime) if engine == "onnxruntime" else (OPENVINO, AnyOpenVINO)
    named = {name: given for name, given in options.items() if not only or name in only}
    return {name: made(given=dict(given)) for name, given in {DEFAULTS: {}, **named}.items()} if named else {}


def measured(
    graph: Path, engines: Mapping[str, Engine], batch: int, seconds: float, threads: int
) -> list[dict[str, Any]]:
    """Gains of each option in one cell, for one caller and for several."""
    signature = model_file.signature(graph)
    artifact = Artifact(kind="onnx", path=graph, sha256="", bytes=0, signature=signature)
    generator = np.random.default_rng(0)
    feeds = {
        spec.name: generator.standard_normal([batch, *map(int, spec.shape[1:])], np.float32)
        for spec in signature.inputs
    }
    candidates = [Candidate(name, made, artifact, Device(threads=threads)) for name, made in engines.items()]
    settings = LatencySettings(time_limit_seconds=seconds, launches=3, concurrency=(threads,))
    with tempfile.TemporaryDirectory() as logs:
        rows = measure_latency(candidates, {batch: feeds}, settings, Path(logs), lambda text: None).rows
    base, *others = ((name, rows[name][0]) for name in rows)
    found = []
    for name, row in others:
        gains = {"one caller": row.speedup, f"{threads} callers": throughputs(row, base[1])}
        for callers, gain in gains.items():
            numbers = [round(value, 3) for value in (gain.median, gain.low, gain.high)] if gain else None
            found.append({"option": name, "callers": callers, "gain": numbers, "failure": row.failure})
        print(graph.stem, batch, found[-2:], flush=True)
    return found


def throughputs(row: LatencyRow, base: LatencyRow) -> Interval | None:
    """Gain in samples a second."""
    rates = [each.concurrency[0].samples_per_s for each in (row, base) if each.concurrency]
    return divide(rates[0], rates[1]) if len(rates) == 2 else None


def table(cells: list[dict[str, Any]]) -> Iterator[str]:
    """A row for each option: its gain in each cell, and whether it is worth trying."""
    names = list(dict.fromkeys((cell["model"], cell["batch"]) for cell in cells))
    heads = [f"{model}, {batch}" for model, batch in names]
    yield f"| engine | callers | option | {' | '.join(heads)} | worth trying |"
    yield f"| --- | --- | --- | {'--- | ' * len(heads)}--- |"
    rows: dict[tuple[str, str, str], dict[tuple[str, int], Any]] = {}
    for cell in cells:
        for entry in cell["options"]:
            row = rows.setdefault((cell["engine"], entry["callers"], entry["option"]), {})
            row[cell["model"], cell["batch"]] = entry["gain"]
    for (engine, callers, option), gains in sorted(rows.items()):
        found = [gains.get(name) for name in names]
        worth = sum(gain is not None and gain[0] >= _WORTH and gain[1] > 1 for gain in found)
        texts = ["–" if gain is None else f"{gain[0]:.2f} [{gain[1]:.2f}, {gain[2]:.2f}]" for gain in found]
        answer = f"{'yes' if worth >= _SHARE * len(gains) else 'no'}, {worth} of {len(gains)}"
        yield f"| {engine} | {callers} | `{option}` | {' | '.join(texts)} | {answer} |"


def main() -> None:
    """Answer the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="digits,lstm,mobilenet_v2")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each cell and engine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--options", default="", help="only these, such as NUM_STREAMS=2; fewer take more rounds")
    given = parser.parse_args()
    known = json.loads(_RECORD.read_bytes())["cells"] if _RECORD.is_file() else []
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models.split(","):
            graph = Path(folder, f"{model}.onnx")
            if (answer := call("export", model, "-o", graph)).exit_code:
                sys.exit(f"export failed: {answer.message}")
            for batch, engine in itertools.product(map(int, given.batch.split(",")), ("onnxruntime", "openvino")):
                cell = {"model": model, "batch": batch, "engine": engine, "threads": given.threads}
                if not (engines := sides(engine, set(given.options.split(",")) - {""})):
                    continue
                options = measured(graph, engines, batch, given.seconds, given.threads)
                for entry in [other for other in known if cell.items() <= other.items()]:
                    known.remove(entry)
                    options += [other for other in entry["options"] if other["option"] not in engines]
                known.append({**cell, "processor": cpu.model(), "options": options})
                write(known)


def write(cells: list[dict[str, Any]]) -> None:
    """Write both files, with cells of earlier calls."""
    _RECORD.write_text(json.dumps({"cells": cells}, indent=1) + "\n")
    places = ", ".join(sorted({f"{cell['processor']}, {cell['threads']} threads" for cell in cells}))
    head = ["# `python benchmarks/session_options.py`", "", f"{places}; gain over the defaults, 95 % interval.", ""]
    _RECORD.with_suffix(".md").write_text("\n".join([*head, *table(cells), ""]))


if __name__ == "__main__":
    import session_options  # its classes have a module that other processes can import

    session_options.main()
