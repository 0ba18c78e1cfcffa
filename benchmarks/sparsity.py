"""Measure coverage, fidelity and time of one-shot 2:4, with and without an order of channels.

    python benchmarks/sparsity.py [digits resnet18 …]

Each model is exported, simplified, and made 2:4 twice. SQNR of the outputs is against the dense graph on one set of
feeds, run unoptimized; of digits, the share of test images that are recognized, too. The other models of the zoo have
random weights, so their outputs say little of trained ones. The pattern is followed into float16. Writes
results/sparsity.json and results/sparsity.md.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from enginesmith.calibration.dataset import embedded
from enginesmith.models import MODELS
from enginesmith.pipeline.artifact import Artifact, Effect, file_digest
from enginesmith.pipeline.frameworks.fidelity import compare, thresholds_for
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, model_file
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, LoadOptions, load
from enginesmith.pipeline.passes.export.export import Export, export_module
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.passes.simplify import Simplify, simplify_file
from enginesmith.pipeline.passes.sparsify import check
from enginesmith.pipeline.passes.sparsify.sparsify import Sparsify
from enginesmith.pipeline.tensors import Feeds

ZOO = ("digits", "resnet18", "resnet50", "vit_b16", "bert_base")
RESULTS = Path(__file__).parent / "results"
_TOKENS = 64


def main() -> None:
    """Measure the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=ZOO, help=f"of {', '.join(MODELS)}")
    rows = []
    for name in parser.parse_args().models:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(_measure(name, Path(folder)))
        print(json.dumps(rows[-1], indent=1))
    versions = {"onnxruntime": onnxruntime.__version__, "numpy": np.__version__}
    (RESULTS / "sparsity.json").write_text(json.dumps({"versions": versions, "models": rows}, indent=1) + "\n")
    (RESULTS / "sparsity.md").write_text(_table(rows))


def _measure(name: str, folder: Path) -> dict[str, Any]:
    for word in ("raw", "simple", "sparse", "fp16"):
        (folder / word).mkdir()
    loaded = load(resolve(name), LoadOptions())
    exported = export_module(loaded, folder / "raw", Export(), _quiet)
    effect = simplify_file(folder / "raw" / exported.file, folder / "simple", Simplify().external_data_bytes, _quiet)
    dense = folder / "simple" / effect.file
    feeds = _feeds(loaded)
    row = _sparsify(dense, folder / "sparse", feeds, name)
    facts = check.sparse_weights(folder / "sparse" / edit.FILE)
    sparse = _artifact(folder / "sparse" / edit.FILE)
    lower = run_pass(Precision(precision="fp16"), sparse, folder / "fp16", _quiet)
    return {
        "model": name,
        "weights": len(facts),
        "two_of_four": sum(one.two_of_four for one in facts),
        "elements": sum(one.elements for one in facts),
        "zeros": sum(one.zeros for one in facts),
        **row,
        "top1_dense": _top1(dense, name),
        "after_fp16": _counts(check.follow(sparse.path, folder / "fp16" / lower.file)),
    }


def _sparsify(dense: Path, out: Path, feeds: Feeds, name: str) -> dict[str, Any]:
    effect, seconds = _timed(lambda: run_pass(Sparsify(), _artifact(dense), out, _quiet))
    made = out / effect.file
    names = [spec.name for spec in model_file.signature(dense).outputs]
    outputs = [dict(zip(names, evaluator.run_graph(path, feeds), strict=True)) for path in (dense, made)]
    found = compare(outputs[0], outputs[1], thresholds_for("fp32"))
    return {"summary": effect.summary, "seconds": seconds, "sqnr_outputs_db": found.sqnr_db, "top1": _top1(made, name)}


def _top1(path: Path, name: str) -> float | None:
    """Share of digits' test images that are recognized; None for models that have no labeled data."""
    if name != "digits":
        return None
    data = embedded("digits", "test")
    inputs = {spec.name: data.arrays[spec.name] for spec in model_file.signature(path).inputs}
    (scores,) = evaluator.run_graph(path, inputs)
    assert data.labels is not None
    return float((scores.argmax(axis=1) == data.labels).mean())


def _counts(found: check.Followed) -> dict[str, int]:
    return {"held": len(found.held), "lost": len(found.lost), "missing": len(found.missing)}


def _artifact(path: Path) -> Artifact:
    sha = file_digest(path)
    return Artifact(kind="onnx", path=path, sha256=sha, bytes=0, signature=model_file.signature(path))


def _feeds(loaded: LoadedModel) -> Feeds:
    """The first rows of the example, and of a sequence 64 elements."""
    feeds = {}
    for spec in loaded.signature.inputs:
        value = loaded.example[spec.name].numpy()
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str):
                size = 2 if axis == 0 else _TOKENS
                value = np.take(value, np.arange(size) % value.shape[axis], axis)
        feeds[spec.name] = value
    return feeds


def _quiet(text: str) -> None:
    del text


def _timed(work: Callable[[], Effect]) -> tuple[Effect, float]:
    start = time.perf_counter()
    return work(), round(time.perf_counter() - start, 2)


def _table(rows: list[dict[str, Any]]) -> str:
    head = (
        "One-shot 2:4 by magnitude, without training. Only digits is trained.\n\n"
        "| model | 2:4 weights | zeros | SQNR of weights | SQNR of outputs "
        "| top-1 dense, 2:4 "
        "| seconds | held in fp16 |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    return head + "".join(_row(row) for row in rows)


def _row(row: dict[str, Any]) -> str:
    weights = row["summary"].partition("SQNR of the weights ")[2].partition(" dB")[0]
    top = [row["top1_dense"], row["top1"]]
    cells = (
        row["model"],
        f"{row['two_of_four']} of {row['weights']}",
        f"{row['zeros'] / row['elements']:.1%}",
        f"{weights} dB",
        f"{row['sqnr_outputs_db']:.1f} dB",
        "–" if None in top else ", ".join(f"{value:.3f}" for value in top),
        f"{row['seconds']:.1f}",
        f"{row['after_fp16']['held']} of {row['two_of_four']}",
    )
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    main()
