"""The memory instrument against networks whose need is known by construction, on the CPU.

    python benchmarks/memory_truth.py [--repeats 5] [--threads 1]

Chains of matrix products have two values live at a time, branches have all of theirs and what joins them, and a lookup
has one; its calls read one row of its embedding. What a
runtime adds to that is part of the truth only where it is a rule of its own that can be counted: ONNX Runtime writes
into the output of the call before, which is therefore live all the time (``IOBinding`` hands it in again). Each figure
is of a fresh process. Rows without a truth of their own (the arena, which rounds up) show a factor and no error.
Writes results/memory_truth.json and results/memory_truth.md.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Candidate, Engine
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.measure.memory.peak import measure_memory
from enginesmith.pipeline.measure.rows import MemoryRow
from enginesmith.pipeline.system import worker
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import execute
from enginesmith.pipeline.tasks.build import Build
from enginesmith.pipeline.tasks.load import Load

HERE = Path(__file__).parent
_FLOAT_BYTES = 4
_MIB = 1 << 20
_TARGET, _SPREAD_TARGET = 0.05, 0.03
_PLAIN, _ARENA = OnnxRuntime(memory_arena=False), OnnxRuntime()


@dataclass(frozen=True)
class Net:
    """A network of ``depth`` square products, or an embedding of as many weights."""

    form: str
    width: int
    depth: int
    batch: int

    @property
    def name(self) -> str:
        """``chain 8 × 1024², batch 4096``."""
        return f"{self.form} {self.depth} × {self.width}², batch {self.batch}"

    @property
    def weights(self) -> int:
        """Bytes of all matrices."""
        return self.depth * self.width**2 * _FLOAT_BYTES

    @property
    def largest(self) -> int:
        """Bytes of the largest weight."""
        return self.weights if self.form == "lookup" else self.weights // self.depth

    @property
    def value(self) -> int:
        """Bytes of what one product makes."""
        return self.batch * self.width * _FLOAT_BYTES

    def live(self, *, output_kept: bool) -> int:
        """Bytes of the values that are live at once, without the input, which is the caller's."""
        if self.form == "branches":  # all of them, and the output that they are joined in
            return 2 * self.depth * self.value
        return (3 if output_kept else 2) * self.value if self.form == "chain" else self.value

    @property
    def feed(self) -> np.ndarray:
        """The input: ones, or the same row for the whole batch."""
        return np.ones(self.batch, np.int64) if self.form == "lookup" else np.ones((self.batch, self.width), np.float32)


NETS = (
    Net("chain", 1024, 8, 4096),
    Net("chain", 1024, 24, 2048),
    Net("chain", 512, 6, 32768),
    Net("branches", 512, 8, 8192),
    Net("branches", 256, 16, 4096),
    Net("lookup", 256, 256, 16384),
)


@dataclass(frozen=True)
class Way:
    """Describe how a network is run, and whether the memory that this needs is known by construction."""

    name: str
    engine: Engine
    make: Callable[[Net, Path], Artifact]
    output_kept: bool
    known: bool = True
    reads_file: bool = False
    """True where a weight is copied out of the file that was read: the largest is there twice while it is loaded."""


def module(net: Net, folder: Path) -> Artifact:
    """The torch artifact."""
    source = f"{HERE / 'nets' / 'products.py'}:{net.form}(width={net.width},depth={net.depth})"
    done = worker.run(execute, Load(source=resolve(source)), {}, folder, log=folder.with_suffix(".log"))
    path = folder / done.effect.file
    return Artifact(kind="torch", path=path, sha256="", bytes=0, signature=done.effect.signature)


def graph(net: Net, folder: Path, *, mapped: bool) -> Artifact:
    """Write the ONNX graph; its weights in a file of their own, which ONNX Runtime maps, or inside, to be read."""
    generator = np.random.default_rng(0)
    scale = np.float32(net.width**-0.5)
    names = [f"w{index}" for index in range(net.depth)]
    matrices = [generator.standard_normal((net.width, net.width), dtype=np.float32) * scale for _ in names]
    weights = [numpy_helper.from_array(matrix, name) for matrix, name in zip(matrices, names, strict=True)]
    values = ["x", *(f"v{index}" for index in range(1, net.depth)), "y"]
    if net.form == "lookup":
        weights = [numpy_helper.from_array(np.concatenate(matrices), "w")]
        nodes = [helper.make_node("Gather", ["w", "x"], ["y"])]
    elif net.form == "chain":
        nodes = [helper.make_node("MatMul", [values[i], names[i]], [values[i + 1]]) for i in range(net.depth)]
    else:
        parts = [f"part{index}" for index in range(net.depth)]
        nodes = [helper.make_node("MatMul", ["x", name], [part]) for name, part in zip(names, parts, strict=True)]
        nodes.append(helper.make_node("Concat", parts, ["y"], axis=1))
    wide = net.width * net.depth if net.form == "branches" else net.width
    dtype, shape = (TensorProto.INT64, ["batch"]) if net.form == "lookup" else (TensorProto.FLOAT, ["batch", net.width])
    given = [helper.make_tensor_value_info("x", dtype, shape)]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", wide])]
    model = helper.make_model(
        helper.make_graph(nodes, net.form, given, made, weights),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=mapped, location="weights", size_threshold=0)
    return Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))


def read_graph(net: Net, folder: Path) -> Artifact:
    """Weights inside the file."""
    return graph(net, folder, mapped=False)


def mapped_graph(net: Net, folder: Path) -> Artifact:
    """Weights in a file of their own."""
    return graph(net, folder, mapped=True)


def built(net: Net, folder: Path) -> Artifact:
    """The engine that ``build`` makes: the optimized graph, its weights mapped."""
    (folder / "source").mkdir()
    source = graph(net, folder / "source", mapped=True)
    task = Build(engine=_PLAIN, device=Device())
    done = worker.run(execute, task, {"model": source}, folder, log=folder.with_suffix(".log"))
    return Artifact(kind="engine", path=folder / done.effect.file, sha256="", bytes=0, signature=done.effect.signature)


WAYS = (
    Way("eager", Eager(), module, output_kept=False),
    Way("onnxruntime, weights read", _PLAIN, read_graph, output_kept=True, reads_file=True),
    Way("onnxruntime, weights mapped", _PLAIN, mapped_graph, output_kept=True),
    Way("onnxruntime, built", _PLAIN, built, output_kept=True),
    Way("onnxruntime with its arena", _ARENA, built, output_kept=True, known=False),
)


def measured(way: Way, net: Net, folder: Path, repeats: int, threads: int) -> list[MemoryRow]:
    """One row for each fresh process."""
    made = folder / f"{WAYS.index(way)}-{NETS.index(net)}"
    made.mkdir()
    candidate = Candidate("truth", way.engine, way.make(net, made), Device(threads=threads))
    return [measure_memory(candidate, net.batch, {"x": net.feed}, folder, lambda text: None) for _ in range(repeats)]


def figures(rows: list[MemoryRow], truth: dict[str, int], *, known: bool) -> dict[str, Any]:
    """For weights, activations and the peak: the truth, the median, its error, and the widest over the narrowest."""
    found: dict[str, Any] = {}
    for name, right in truth.items():
        values = [getattr(row, name) for row in rows]
        if None in values:
            raise SystemExit(f"not measured: {next(row.failure or row.reasons for row in rows if row.failure)}")
        middle = statistics.median(values)
        found[name] = {
            "truth": right,
            "median": middle,
            "spread": (max(values) - min(values)) / middle,
            "error" if known else "factor": middle / right - known,
            "values": values,
        }
    return found


def compare(net: Net, way: Way, folder: Path, repeats: int, threads: int) -> dict[str, Any]:
    """One line of the table."""
    live = net.live(output_kept=way.output_kept)
    peak = net.weights + max(live, net.largest if way.reads_file else 0)
    truth = {"weights_bytes": net.weights, "activation_bytes": live, "peak_bytes": peak}
    rows = measured(way, net, folder, repeats, threads)
    found = {"net": net.name, "way": way.name, "figures": figures(rows, truth, known=way.known)}
    found["mapped_bytes"] = statistics.median(row.lenses["mapped_files"].bytes for row in rows)
    print(_line(found), flush=True)
    return found


def _line(row: dict[str, Any]) -> str:
    cells = []
    for figure in row["figures"].values():
        off = f"{figure['error']:+.1%}" if "error" in figure else f"× {figure['factor']:.2f}"
        cells.append(f"{figure['truth'] / _MIB:.1f} | {figure['median'] / _MIB:.1f} | {off} | {figure['spread']:.1%}")
    return f"| {row['net']} | {row['way']} | {' | '.join(cells)} |"


def markdown(rows: list[dict[str, Any]], repeats: int, threads: int) -> str:
    """The table with what it says."""
    known = [figure for row in rows for figure in row["figures"].values() if "error" in figure]
    everything = [figure for row in rows for figure in row["figures"].values()]
    right = sum(abs(figure["error"]) <= _TARGET for figure in known)
    steady = sum(figure["spread"] <= _SPREAD_TARGET for figure in everything)
    head = (
        "# Memory against what is known by construction\n\n"
        f"    python benchmarks/memory_truth.py --repeats {repeats} --threads {threads}\n\n"
        f"{right} of {len(known)} figures are within {_TARGET:.0%} of the truth (the largest error is "
        f"{max(abs(figure['error']) for figure in known):.1%}); {steady} of {len(everything)} spread by at most "
        f"{_SPREAD_TARGET:.0%} over {repeats} fresh processes (the widest by "
        f"{max(figure['spread'] for figure in everything):.1%}). MiB: truth, median, error, spread.\n\n"
    )
    names = ("weights", "activations", "peak")
    titles = ["net", "run by", *(f"{name}{part}" for name in names for part in ("", " measured", " error", " spread"))]
    rule = "| --- | --- |" + " ---: |" * (len(titles) - 2)
    return head + "\n".join([f"| {' | '.join(titles)} |", rule, *map(_line, rows)]) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [compare(net, way, Path(folder), options.repeats, options.threads) for net in NETS for way in WAYS]
    results = HERE / "results"
    document = {"repeats": options.repeats, "threads": options.threads, "rows": rows}
    (results / "memory_truth.json").write_text(json.dumps(document, indent=1) + "\n")
    (results / "memory_truth.md").write_text(markdown(rows, options.repeats, options.threads))


if __name__ == "__main__":
    main()
