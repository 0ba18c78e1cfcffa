"""Measure seconds and peak memory of calibration and quantization, the steps of ``enginesmith precision``.

    python benchmarks/precision_cost.py [--work build/precision] [--models resnet50 …]

The steps are ``calibrate`` and ``precision``, and what lies between them: sensitivity, and one trial. Numbers are made
up, so that it is about cost alone. Writes results/precision_cost.json.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import judging
import numpy as np
from command import call

from nets import workbench

RESULTS = Path(__file__).parent / "results" / "precision_cost.json"
COSTS = (("bert_base", 64), ("resnet50", 128), ("resnet20", 64), ("resnet20", 1024), ("minilm", 64), ("minilm", 1024))
"""(model, samples): of those that benchmarks/nets/ trains, too, whether memory grows with the samples."""
_TOKENS = 128
_VOCABULARY = 30522
_STEPS = ("calibrate", "sensitivity", "search", "precision")
_FLOAT = "simplify"


def cost(work: Path, chosen: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Steps of ``enginesmith precision``, for the models that are chosen."""
    for model, samples in COSTS:
        if model in chosen:
            folder = work / model
            folder.mkdir(parents=True, exist_ok=True)
            source = workbench.prepare(model, work).source if model in workbench.TASKS else model
            row = {"model": model, "samples": samples} | _steps(source, samples, folder)
            print(row, flush=True)
            yield row


def _steps(source: str, samples: int, folder: Path) -> dict[str, Any]:
    """Seconds and memory of the steps; a worker that has done next to nothing has the memory of the smallest step."""
    data, store = folder / f"samples-{samples}.npz", folder / f"store-{samples}"
    if not data.is_file():
        np.savez(data, **_feeds(source, samples))
    shutil.rmtree(store, ignore_errors=True)
    answer = call(
        *("precision", source, "-o", str(folder / f"int8-{samples}.onnx"), "--precision", "int8"),
        *("--calibration", str(data), "--samples", str(samples), "--jobs", "1", "--search-steps", "1"),
        *("--store", str(store), "--batch", "1", *_shapes(source)),
    )
    manifests = [json.loads(path.read_text())["manifest"] for path in store.glob("objects/*/*/artifact.json")]
    last = {one["history"][-1]["step"]: one for one in manifests if one["history"]}
    taken = {name: one["history"][-1] for name, one in last.items()}
    idle = min(one["host_peak_bytes"] for one in taken.values())
    size = sum(file["bytes"] for name, file in last[_FLOAT]["files"].items() if name.startswith("model.onnx"))
    steps = {name: one for kind in _STEPS for name, one in taken.items() if name.startswith(kind)}
    extra = {name: one["host_peak_bytes"] - idle for name, one in steps.items()}
    return {
        "refusal": answer.message if answer.exit_code else "",
        "command_seconds": round(answer.seconds, 1),
        "seconds": {name: one["seconds"] for name, one in steps.items()},
        "extra_peak_bytes": extra,
        "idle_bytes": idle,
        "model_bytes": size,
        "peak_share": max(extra.values()) / size,
    }


def _shapes(source: str) -> tuple[str, ...]:
    return ("--shape", f"sequence={_TOKENS}:{_TOKENS}:{_TOKENS}") if source == "bert_base" else ()


def _feeds(source: str, count: int) -> dict[str, np.ndarray[Any, Any]]:
    """Rows like the example: normal numbers, tokens of one sentence, masks that hide nothing."""
    generator = np.random.default_rng(0)
    feeds: dict[str, np.ndarray[Any, Any]] = {}
    for name, example in judging.built(source).example.items():
        shape = (count, _TOKENS) if source == "bert_base" else (count, *example.shape[1:])
        if example.is_floating_point():
            feeds[name] = generator.standard_normal(shape, np.float32)
        elif name == "input_ids":
            feeds[name] = generator.integers(0, _VOCABULARY, shape)
        else:
            feeds[name] = np.full(shape, int(name == "attention_mask"))
    return feeds


def main() -> None:
    """Measure the models named on the command line, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = sorted({model for model, _ in COSTS})
    parser.add_argument("--work", type=Path, default=Path("build/precision"), help="folder of weights, data and graphs")
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    rows = {(row["model"], row["samples"]): row for row in found}
    for row in cost(options.work.resolve(), options.models):
        rows[row["model"], row["samples"]] = row
        RESULTS.write_text(json.dumps([rows[each] for each in COSTS if each in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
