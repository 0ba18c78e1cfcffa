"""Measure the gain of `simplify` on ONNX Runtime: nodes before and after, and the paired ratio of latencies.

    python benchmarks/simplify.py

Both graphs of a model are loaded side by side and run in turns, one thread each, in random order within a pair; the
ratio is the median over pairs, its interval a percentile bootstrap. Numbers go to benchmarks/results/simplify.json.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from enginesmith.models import MODELS
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, LoadOptions, load
from enginesmith.pipeline.passes.export.export import Export, export_module
from enginesmith.pipeline.passes.simplify import Simplify, simplify_file

ZOO = ("resnet50", "mobilenet_v2", "vit_b16", "bert_base", "unet", "lstm")
RESULTS = Path(__file__).parent / "results" / "simplify.json"
_RESAMPLES = 2000


def main() -> None:
    """Measure the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=ZOO, help=f"of {', '.join(MODELS)}")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring per model")
    arguments = parser.parse_args()
    rows = [_measure(name, arguments.seconds) for name in arguments.models]
    versions = {"onnxruntime": onnxruntime.__version__, "numpy": np.__version__}
    RESULTS.write_text(json.dumps({"threads": 1, "batch": 1, "versions": versions, "models": rows}, indent=1) + "\n")


def _measure(name: str, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        plain, simple = Path(folder, "plain"), Path(folder, "simple")
        plain.mkdir()
        simple.mkdir()
        loaded = load(resolve(name), LoadOptions())
        exported, export_seconds = _timed(lambda: export_module(loaded, plain, Export(), _quiet))
        limit = Simplify().external_data_bytes
        effect, simplify_seconds = _timed(lambda: simplify_file(plain / exported.file, simple, limit, _quiet))
        paths = (plain / exported.file, simple / effect.file)
        same = paths[0].read_bytes() == paths[1].read_bytes()
        nodes = [model_file.summary(path).nodes for path in paths]
        ratio, low, high, pairs, milliseconds = _paired(paths, _feeds(loaded), seconds)
    print(f"{name:14} {nodes[0]:4} → {nodes[1]:4} nodes   {ratio:.3f} [{low:.3f}, {high:.3f}] of {milliseconds:.2f} ms")
    return {
        "model": name,
        "nodes": nodes,
        "same_file": same,
        "ratio": ratio,
        "ratio_interval_95": [low, high],
        "pairs": pairs,
        "plain_p50_ms": milliseconds,
        "export_seconds": export_seconds,
        "simplify_seconds": simplify_seconds,
        "notes": list(effect.notes),
    }


def _quiet(text: str) -> None:
    del text


def _timed(work: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), round(time.perf_counter() - start, 2)


def _feeds(loaded: LoadedModel) -> dict[str, Any]:
    """The first row of the example, and of a sequence 128 elements."""
    feeds = {}
    for spec in loaded.signature.inputs:
        value = loaded.example[spec.name].numpy()
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str):
                size = 1 if axis == 0 else 128
                value = np.take(value, np.arange(size) % value.shape[axis], axis)
        feeds[spec.name] = value
    return feeds


def _paired(paths: tuple[Path, Path], feeds: dict[str, Any], seconds: float) -> tuple[float, float, float, int, float]:
    """Median ratio second/first, its 95 % interval, the number of pairs and the first one's median in ms."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    sessions = [onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]) for path in paths]
    generator = np.random.default_rng(0)
    for session in sessions * 3:
        session.run(None, feeds)
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 10:
        pair = [0.0, 0.0]
        for position in generator.permutation(2):
            start = time.perf_counter()
            sessions[position].run(None, feeds)
            pair[position] = time.perf_counter() - start
        times.append((pair[0], pair[1]))
    array = np.array(times)
    ratios = array[:, 1] / array[:, 0]
    samples = generator.choice(ratios, (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(samples, axis=1), [2.5, 97.5])
    figures = (float(np.median(ratios)), float(low), float(high))
    return (*(round(figure, 4) for figure in figures), len(times), round(float(np.median(array[:, 0])) * 1e3, 3))  # type: ignore[return-value]


if __name__ == "__main__":
    main()
