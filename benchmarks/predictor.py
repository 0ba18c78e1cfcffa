"""Predicted against measured peak memory of the zoo in ONNX Runtime and eager, on the CPU.

    python benchmarks/predictor.py [--models digits,…] [--batches 1,8,32] [--work FOLDER]

Each model is exported, simplified and built; each figure is measured in a fresh process. ``executed`` is the prediction
from the graph that the engine runs, ``source`` that from the simplified graph before it was optimised. Both are held
against the engine without the memory arena; the arena and eager have their own factors. ``fit`` holds the engine with
the arena against what the command ``fit`` counts for it: up to 1, what is said to fit does. ``--work`` keeps the graphs
for another run. Writes results/predictor.json and results/predictor.md.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from command import call

from enginesmith.calibration.dataset import synthetic
from enginesmith.models import MODELS
from enginesmith.pipeline import onnx_file, workers
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Device, Engine
from enginesmith.pipeline.engines.eager import Eager
from enginesmith.pipeline.engines.onnxruntime import OnnxRuntime
from enginesmith.pipeline.footprints import parts_of
from enginesmith.pipeline.measure.memory import MemoryRow, measure_memory
from enginesmith.pipeline.measure.predictor import Prediction, predict
from enginesmith.pipeline.measure.race import Candidate
from enginesmith.pipeline.source import resolve
from enginesmith.pipeline.tasks.base import Inputs, Task
from enginesmith.pipeline.tasks.load import Load
from enginesmith.pipeline.tasks.transform import Build
from enginesmith.pipeline.tensors import Array

RESULTS = Path(__file__).parent / "results"
_SEQUENCE = 128
_PLAIN = OnnxRuntime(memory_arena=False)
_ENGINES: Mapping[str, Engine] = {"plain": _PLAIN, "arena": OnnxRuntime(), "eager": Eager()}
_MIB = 1 << 20


def prepare(model: str, folder: Path) -> dict[str, Artifact]:
    """The loaded model, its simplified graph and its engine; what lies there from another run is taken as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    raw, graph, engine, module = (folder / name for name in ("raw.onnx", "graph.onnx", "engine", "module"))
    for command, output in ((("export", model), raw), (("simplify", str(raw)), graph)):
        if not output.exists() and (answer := call(*command, "-o", str(output))).exit_code:
            sys.exit(f"{command[0]} of {model} failed: {answer.message}")
    given = Artifact(kind="onnx", path=graph, sha256="", bytes=0, signature=onnx_file.signature(graph))
    tasks: tuple[tuple[Path, Task, Inputs], ...] = (
        (engine, Build(engine=_PLAIN, device=Device()), {"model": given}),
        (module, Load(source=resolve(model)), {}),
    )
    for made, task, inputs in tasks:
        if not made.exists():
            made.mkdir()
            workers.run(task.run, inputs, made, log=folder / "log")
    model_file = engine / "model.onnx"
    return {
        "graph": given,
        "engine": given.model_copy(update={"kind": "engine", "path": model_file}),
        "module": given.model_copy(update={"kind": "torch", "path": next(module.glob("*.json"))}),
    }


def feeds(module: Artifact, batch: int) -> dict[str, Array]:
    """Made-up inputs that look like the model's example."""
    from safetensors.numpy import load_file

    example = load_file(next(module.folder.glob("*example*")))
    assert module.signature is not None
    return dict(synthetic(module.signature.inputs, example, {"sequence": _SEQUENCE}, batch, 0).arrays)


def rows(model: str, batches: list[int], folder: Path) -> Iterator[dict[str, Any]]:
    """One row for each batch size."""
    made = prepare(model, folder)
    for batch in batches:
        sizes = {"batch": batch, "sequence": _SEQUENCE}
        given, threads = feeds(made["module"], batch), Device().thread_count
        found: dict[str, Any] = {"model": model, "batch": batch}
        for name, part in (("executed", "engine"), ("source", "graph")):
            found[name] = predict(made[part].path, sizes, threads, mapped=True).model_dump(mode="json")
        for name, engine in _ENGINES.items():
            artifact = made["module" if name == "eager" else "engine"]
            row = measure_memory(Candidate(name, engine, artifact, Device()), batch, given, folder, lambda text: None)
            found[name] = _measured(row)
        yield found


def _measured(row: MemoryRow) -> dict[str, Any]:
    if row.peak_bytes is None:
        sys.exit(f"not measured: {row.reasons}")
    return {"peak_bytes": row.peak_bytes, "weights_bytes": row.weights_bytes, "activation_bytes": row.activation_bytes}


def ratio(row: Mapping[str, Any], predicted: str, measured: str) -> float:
    """Measured over predicted."""
    return float(row[measured]["peak_bytes"] / row[predicted]["peak_bytes"])


def fit_ratio(row: Mapping[str, Any]) -> float:
    """Measured with the memory arena, over what ``fit`` counts; inputs left out of both."""
    predicted = Prediction.model_validate(row["executed"])
    return float(row["arena"]["peak_bytes"] / (sum(parts_of(predicted).values()) - predicted.input_bytes))


def document(found: list[dict[str, Any]], command: str) -> str:
    """The Markdown table."""
    worst = max(found, key=lambda row: abs(ratio(row, "executed", "plain") - 1))
    lines = [
        "# Predicted and measured peak memory\n",
        f"By `{command}`, on ONNX Runtime {_version()}, {Device().thread_count} threads. MiB over the",
        "loaded libraries. Ratios are measured over predicted: `executed` and `source` for ONNX Runtime without its",
        "memory arena, from the graph that runs and from the one before optimisation; `arena` and `eager` are held",
        "against what is predicted from the graph that runs; `fit` is the arena's against what the command `fit`",
        "counts for it, so that what it says fits does where this is no more than 1.\n",
        f"Without the arena, the worst of {len(found)} is {worst['model']} at batch {worst['batch']}: "
        f"{ratio(worst, 'executed', 'plain'):.3f}. {_spread(found, 'executed', 'arena')}; "
        f"{_spread(found, 'executed', 'eager')}; {_spread(found, 'source', 'plain')}; "
        f"fit: {min(map(fit_ratio, found)):.2f} to {max(map(fit_ratio, found)):.2f}.\n",
        "| model | batch | predicted | measured | executed | source | arena | eager | fit | peak at |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *map(_line, found)]) + "\n"


def _spread(found: list[dict[str, Any]], predicted: str, measured: str) -> str:
    ratios = [ratio(row, predicted, measured) for row in found]
    name = measured if predicted == "executed" else predicted
    return f"{name}: {min(ratios):.2f} to {max(ratios):.2f}"


def _line(row: Mapping[str, Any]) -> str:
    predicted = Prediction.model_validate(row["executed"])
    more = " (a lower bound)" if predicted.is_lower_bound else ""
    sizes = f"{predicted.peak_bytes / _MIB:.1f}{more} | {row['plain']['peak_bytes'] / _MIB:.1f}"
    pairs = (("executed", "plain"), ("source", "plain"), ("executed", "arena"), ("executed", "eager"))
    ratios = " | ".join(f"{ratio(row, *pair):.3f}" for pair in pairs)
    return f"| {row['model']} | {row['batch']} | {sizes} | {ratios} | {fit_ratio(row):.3f} | {predicted.peak_at} |"


def _version() -> str:
    from importlib.metadata import version

    return version("onnxruntime")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    batches = [int(text) for text in given.batches.split(",")]
    command = "python benchmarks/predictor.py"
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models.split(","):
            for row in rows(model, batches, (given.work or Path(folder)) / model):
                found.append(row)
                print(_line(row), flush=True)
                (RESULTS / "predictor.json").write_text(
                    json.dumps({"command": command, "rows": found}, indent=1) + "\n"
                )
                (RESULTS / "predictor.md").write_text(document(found, command))


if __name__ == "__main__":
    main()
