"""Every precision of every model of the zoo: made, held against eager in ONNX Runtime, and built by TensorRT-RTX.

    python benchmarks/precision_matrix.py --graphs build/graphs [--models resnet50 …] [--precisions fp16 …]

Each cell is one ``enginesmith precision`` (benchmarks/graphs.py) and one ``enginesmith build --check``. Fidelity is
ONNX Runtime's on the CPU, at the smallest, usual and largest shape, held to the precision's own threshold; types that
it has no kernels for are rounded as they would be, in float32. Graphs are made by TensorRT's placement rules; those of
the rows ``… for ONNX Runtime`` by ONNX Runtime's. Writes results/precision_matrix.json and .md, cell by cell: cells
that were not asked for stay as they were.
"""

import argparse
import datetime
import importlib.metadata
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from command import call

import graphs

RESULTS = Path(__file__).parent / "results" / "precision_matrix.json"
CELLS: Mapping[str, tuple[str, str]] = {
    "fp32": ("fp32", graphs.ENGINE),
    "fp16": ("fp16", graphs.ENGINE),
    "bf16": ("bf16", graphs.ENGINE),
    "int8": ("int8", graphs.ENGINE),
    "int8 for ONNX Runtime": ("int8", "onnxruntime"),
    "int8+fp16": ("int8+fp16", graphs.ENGINE),
    "int8-dynamic for ONNX Runtime": ("int8-dynamic", "onnxruntime"),
    "fp8": ("fp8", graphs.ENGINE),
    "int4-weights": ("int4-weights", graphs.ENGINE),
}
"""Row → the precision, and the engine that the graph is made for."""
TARGETS: Mapping[str, str] = {"fp8": "sm89"}
_TARGET = "sm86"
_LENGTH = 160
"""Characters of a reason that the table shows."""


def cell(model: str, row: str, folder: Path) -> dict[str, Any]:
    """Make one graph and try to build it."""
    precision, engine = CELLS[row]
    made = graphs.attempt(model, precision, folder, engine)
    found: dict[str, Any] = {"model": model, "precision": row, "seconds": made.seconds}
    if made.path is None:
        return found | {"made": False, "failure": made.failure, "reason": made.reason}
    points = [
        {key: one[key] for key in ("point", "sqnr_db", "passed")} for one in made.fidelity if _last(made.fidelity, one)
    ]
    target = TARGETS.get(precision, _TARGET)
    return (
        found
        | {"made": True, "summary": made.summary, "fidelity": points, "target": target}
        | _built(model, made.path, target)
    )


def _last(fidelity: Sequence[Mapping[str, Any]], entry: Mapping[str, Any]) -> bool:
    """Tell whether an entry is of the last stage: stages before it are the float graph's."""
    return bool(entry["stage"] == fidelity[-1]["stage"])


def _built(model: str, path: Path, target: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as store:
        shapes = graphs.SHAPES.get(model, ())
        answer = call("build", str(path), "--check", "--target", target, *shapes, "--store", store)
    if not isinstance(answer.document, list):
        return {"builds": False, "refusal": f"{answer.failure}: {answer.message}"}
    row = answer.document[0]
    return {"builds": row["builds"], "refusal": "" if row["builds"] else f"{row['failure']}: {row['reason']}"}


def markdown(found: Mapping[str, Any]) -> str:
    """The table, and the reasons below it."""
    cells: list[dict[str, Any]] = found["cells"]
    made, held = ([one for one in cells if one["made"]], [one for one in cells if _held(one)])
    lines = [
        "# Every precision of every model",
        "",
        f"{found['date']}, ONNX Runtime {found['onnxruntime']}, TensorRT-RTX {found['tensorrt_rtx']}. By",
        f"`python benchmarks/precision_matrix.py`. Of {len(cells)} cells {len(made)} are made, {len(held)} of",
        "those within their fidelity threshold in ONNX Runtime at every point, and",
        f"{sum(one['builds'] for one in made)} built by TensorRT-RTX, without a GPU: built is not run. Calibration is",
        "made up.",
        "",
        "| model | precision | what was made | SQNR dB at min / opt / max | held | TensorRT-RTX |",
        "| --- | --- | --- | --- | --- | --- |",
        *map(_row, cells),
        "",
        "## What was refused",
        "",
        *(f"- {one['model']} {one['precision']}: {_why(one)}" for one in cells if _why(one)),
    ]
    return "\n".join(lines) + "\n"


def _held(one: Mapping[str, Any]) -> bool:
    return one["made"] and all(point["passed"] for point in one["fidelity"])


def _row(one: Mapping[str, Any]) -> str:
    start = f"| {one['model']} | {one['precision']} |"
    if not one["made"]:
        return f"{start} not made: {one['failure']} | – | – | – |"
    ratios = " / ".join("∞" if point["sqnr_db"] is None else f"{point['sqnr_db']:.1f}" for point in one["fidelity"])
    built = f"{one['target']}: {'built' if one['builds'] else 'refused'}"
    return f"{start} {one['summary'] or 'as exported'} | {ratios} | {'yes' if _held(one) else 'no'} | {built} |"


def _why(one: Mapping[str, Any]) -> str:
    text = f"not made: {one['reason']}" if not one["made"] else one["refusal"] and f"TensorRT-RTX: {one['refusal']}"
    text = " ".join(text.split())
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH].rstrip()} …"


def main() -> None:
    """Make, check, write after each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, default=Path("build/graphs"), help="folder of benchmarks/graphs.py")
    parser.add_argument("--models", nargs="+", choices=graphs.MODELS, default=graphs.MODELS)
    parser.add_argument("--precisions", nargs="+", choices=CELLS, default=tuple(CELLS))
    options = parser.parse_args()
    known = json.loads(RESULTS.read_text())["cells"] if RESULTS.is_file() else []
    cells = {(one["model"], one["precision"]): one for one in known}
    for model in options.models:
        for row in options.precisions:
            cells[model, row] = cell(model, row, options.graphs)
            print(_row(cells[model, row]), _why(cells[model, row]), flush=True)
            _write([cells[at] for name in graphs.MODELS for each in CELLS if (at := (name, each)) in cells])


def _write(cells: list[dict[str, Any]]) -> None:
    found = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "cells": cells}
    found |= {name.replace("-", "_"): importlib.metadata.version(name) for name in ("onnxruntime", "tensorrt-rtx")}
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    RESULTS.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
    main()
