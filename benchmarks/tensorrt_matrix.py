"""The zoo in seven precisions for three targets: which engines TensorRT-RTX builds, and what it says of the others.

    python benchmarks/tensorrt_matrix.py --graphs build/graphs [--models resnet50 …] [--precisions fp16 …]

Each cell is one ``enginesmith build``, called in this process. Built: megabytes of engine, weights and activations (at
batch 8; of BERT at 384 tokens too), seconds of the build step, and the precisions that the audit found the graph's
products to run in. Refused: class, reason and remedy. Whether the vendor's support matrix lists the precision for the
target is said of each cell (``LISTED_FROM``). Writes results/tensorrt_matrix.json and .md.
"""

import argparse
import importlib.metadata
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from command import Answer, call

import graphs

RESULTS = Path(__file__).parent / "results"
TARGETS = ("sm86", "sm89", "sm120")
LISTED_FROM: Mapping[str, int] = {"fp32": 86, "fp16": 86, "bf16": 86, "int4-weights": 86, "fp8": 89}
"""Precision → the first target that the support matrix of TensorRT-RTX 1.5 lists it for (later ones could not be read).

Of int8 it lists weights alone; products of int8 activations and int8 weights, as in ``int8``, are in no column.
"""
_SHARE = 0.95
_MB = 1e6
_LENGTH = 200
"""Characters of a reason that the Markdown shows."""


def listed(precision: str, target: str) -> bool:
    """Tell whether the vendor's support matrix has the precision for the target."""
    return precision in LISTED_FROM and int(target.removeprefix("sm")) >= LISTED_FROM[precision]


def cells(models: Sequence[str], precisions: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Every cell, in turn."""
    for model in models:
        for precision in precisions:
            try:
                graph = graphs.make(model, precision, folder)
            except graphs.NothingToQuantize as error:
                for target in TARGETS:
                    yield {"model": model, "precision": precision, "target": target} | _not_made(error)
                continue
            with tempfile.TemporaryDirectory() as out:
                for target in TARGETS:
                    answer = _build(graph, target, graphs.SHAPES.get(model, ()), Path(out))
                    found = {"model": model, "precision": precision, "target": target}
                    yield found | {"listed": listed(precision, target)} | _cell(answer, out)


def _build(graph: Path, target: str, shapes: Sequence[str], out: Path) -> Answer:
    output, store = str(out / f"{target}.engine"), str(out / "store")
    return call("build", str(graph), "-o", output, "--target", target, *shapes, "--store", store)


def _not_made(error: graphs.NothingToQuantize) -> dict[str, Any]:
    """The graph's maker refuses, so that there is nothing to build."""
    return {"listed": False, "verdict": "no graph", "class": type(error).__name__, "reason": str(error), "remedy": ""}


def _cell(answer: Answer, out: str) -> dict[str, Any]:
    if answer.exit_code:
        reason = answer.message.replace(out, "…")
        found = {"verdict": "refused", "class": answer.failure, "reason": reason, "remedy": answer.remedy}
        return found | {"broken_promises": list(answer.broken_promises)}
    manifest, step = answer.document["manifest"], answer.document["history"][-1]
    figures, audit = manifest["figures"], manifest["audit"]
    return {
        "verdict": "built",
        "engine_mb": round(manifest["bytes"] / _MB, 1),
        "weights_mb": round(figures["weights_bytes"] / _MB, 1),
        "activation_mb": round(figures["activation_bytes"] / _MB, 1),
        "build_seconds": step["seconds"],
        "command_seconds": round(answer.seconds, 2),
        "products": audit["products"],
        "requested": audit["requested"],
        "otherwise": len(audit["otherwise"]),
        "unseen": audit["unseen"],
        "broken_promises": list(answer.broken_promises),
    }


def counts(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Cells by verdict, and the share of the listed ones that is built."""
    of = [cell for cell in found if cell["listed"]]
    built = sum(cell["verdict"] == "built" for cell in of)
    verdicts = [cell["verdict"] for cell in found]
    return {
        "cells": len(found),
        **{verdict: verdicts.count(verdict) for verdict in ("built", "refused", "no graph")},
        "listed": len(of),
        "listed_built": built,
        "listed_share": round(built / len(of), 4) if of else None,
        "unlisted_built": verdicts.count("built") - built,
        "broken_promises": sum(bool(cell.get("broken_promises")) for cell in found),
    }


def _text(cell: dict[str, Any]) -> str:
    """A cell of the table."""
    if cell["verdict"] == "no graph":
        return "no graph"
    star = "" if cell["listed"] else " *"
    if cell["verdict"] == "refused":
        return f"{cell['class']}{star}"
    products = ", ".join(f"{count} {name}" for name, count in cell["products"].items())
    sizes = f"{cell['engine_mb']:.0f} / {cell['activation_mb']:.0f} / {cell['weights_mb']:.0f}"
    return f"{sizes}, {cell['build_seconds']:.1f} s: {products}{star}"


def markdown(found: Sequence[dict[str, Any]], total: dict[str, Any], version: str) -> str:
    """The table, the refusals below it."""
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for cell in found:
        rows.setdefault((cell["model"], cell["precision"]), {})[cell["target"]] = cell
    lines = [
        f"# Engines of TensorRT-RTX {version}, built without a GPU",
        "",
        f"By `python benchmarks/tensorrt_matrix.py`. {total['built']} of {total['cells']} cells are built. Of the",
        f"{total['listed']} that the vendor's support matrix lists, {total['listed_built']} are "
        f"({total['listed_share'] or 0:.1%}; the target is {_SHARE:.0%}).",
        "",
        "A cell: MB of engine / activations / weights, seconds of the build, the graph's products by the precision",
        "that they run in. `*`: not listed; of int8 the matrix lists weights alone, products of int8 activations and",
        "int8 weights in no column (of fp8 the vendor's pages speak of products of matrices only; it is counted for",
        "convolutions too). Largest shape: batch 8, and 384 tokens for bert_base. Built is not run: no engine was",
        "executed here.",
        "",
        f"| model | precision | {' | '.join(TARGETS)} |",
        f"| --- | --- |{' --- |' * len(TARGETS)}",
        *(f"| {model} | {kind} | {' | '.join(map(_text, row.values()))} |" for (model, kind), row in rows.items()),
        "",
        "## What was refused",
        "",
    ]
    return "\n".join([*lines, *_refusals(found)]) + "\n"


def _refusals(found: Sequence[dict[str, Any]]) -> list[str]:
    """Reasons, each with the cells that it was given for."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for cell in found:
        if cell["verdict"] != "built":
            place = f"{cell['model']} {cell['precision']} {cell['target']}"
            reasons.setdefault((cell["class"], cell["reason"], cell["remedy"]), []).append(place)
    return [
        f"- {', '.join(places)}: {name}: {_brief(reason)}{f' → {remedy}' if remedy else ''}"
        for (name, reason, remedy), places in reasons.items()
    ]


def _brief(text: str) -> str:
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH].rstrip()} …"


def main() -> None:
    """Build, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, default=Path("build/graphs"), help="folder of benchmarks/graphs.py")
    parser.add_argument("--models", nargs="+", choices=graphs.MODELS, default=graphs.MODELS)
    parser.add_argument("--precisions", nargs="+", choices=graphs.PRECISIONS, default=graphs.PRECISIONS)
    options = parser.parse_args()
    found = []
    for cell in cells(options.models, options.precisions, options.graphs):
        found.append(cell)
        print(f"{cell['model']:14}{cell['precision']:14}{cell['target']:7}{_text(cell)}", flush=True)
    total, version = counts(found), importlib.metadata.version("tensorrt-rtx")
    print(total)
    document = {"tensorrt_rtx": version, "target_share": _SHARE, "counts": total, "cells": found}
    (RESULTS / "tensorrt_matrix.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    (RESULTS / "tensorrt_matrix.md").write_text(markdown(found, total, version))


if __name__ == "__main__":
    main()
