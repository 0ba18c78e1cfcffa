"""Two targets of their own: the pipeline against a plain script, and what calibration and quantisation take.

``plain``: resnet50 in static and bert_base (128 tokens) in dynamic int8, as a plain script makes them with ONNX
Runtime's tools, in turns with eager and with the pipeline's winner. Calibration is synthetic: it is about speed alone.
``cost``: seconds and peak memory of the steps ``calibrate`` and ``precision`` of ``enginesmith precision``.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import judging
import numpy as np
import peers
from command import call
from judging import EAGER

_PEERS: Mapping[str, tuple[str, str]] = {
    "resnet50": ("ort-static", "int8"),
    "bert_base": ("ort-dynamic", "int8-dynamic"),
}
"""Model → what a plain script uses, and the precision of ours that is held against it."""
_SAMPLES = 8
_COSTS = (("bert_base", 64), ("resnet50", 128), ("resnet50", 64), ("resnet50", 1024))
_TOKENS = 128


def plain(work: Path, seconds: float) -> list[dict[str, Any]]:
    """Both models, each in a process of its own: memory that one leaves behind is no matter of the other."""
    rows = []
    for model in _PEERS:
        command = [sys.executable, __file__, model, str(work), str(seconds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(done.stdout.splitlines()[-1], flush=True)
    return rows


def _plain(model: str, work: Path, seconds: float) -> dict[str, Any]:
    peer, precision = _PEERS[model]
    folder = work / model
    folder.mkdir(parents=True, exist_ok=True)
    graph = judging.exported(model, folder / "plain.onnx")
    outcome = peers.quantised(peer, graph, _feeds(model, _SAMPLES), folder)
    graphs = {"plain-fp32": graph} | ({peer: outcome.path} if outcome.path else {})
    names = {f"onnxruntime-{each}": f"ours-{each}" for each in ("fp32", precision)}
    answer = call(
        *("optimize", model, "--precision", "fp32", "--precision", precision, "--synthetic-calibration"),
        *("--samples", str(_SAMPLES), "--batch", "1", "--threads", "1", "--measure-time", "10s"),
        *("--search-limit", "3m", "--out", str(folder / "run"), "--store", str(folder / "store")),
        *(("--shape", f"sequence={_TOKENS}:{_TOKENS}:{_TOKENS}") if model == "bert_base" else ()),
    )
    graphs |= judging.engines(answer, folder / "run", names)
    times = judging.timed(model, _feeds(model, 1), graphs, seconds)
    found = {
        name: {
            "p50_ms": times.p50_ms(name),
            "speedup": dataclasses.asdict(times.speedup(name, EAGER)),
            "over_plain": dataclasses.asdict(times.speedup(name, peer)) if peer in graphs else None,
        }
        for name in times.names
    }
    return {"model": model, "graphs": found, "refused": outcome.reason, "ours": judging.summary(answer, names)}


def cost(work: Path) -> list[dict[str, Any]]:
    """Steps of ``enginesmith precision`` on real-sized models."""
    rows = []
    for model, samples in _COSTS:
        folder = work / model
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / f"samples-{samples}.{'npy' if model == 'resnet50' else 'npz'}"
        _save(model, samples, data)
        rows.append({"model": model, "samples": samples} | _steps(model, samples, data, folder))
        print(rows[-1], flush=True)
    return rows


def _steps(model: str, samples: int, data: Path, folder: Path) -> dict[str, Any]:
    """What a run's steps took; the memory of a worker that has done nothing is that of the smallest step."""
    answer = call(
        *("precision", model, "-o", str(folder / f"int8-{samples}.onnx"), "--precision", "int8"),
        *("--calibration", str(data), "--samples", str(samples), "--jobs", "1", "--no-cache"),
        *("--store", str(folder / f"store-{samples}"), "--batch", "1"),
        *(("--shape", f"sequence={_TOKENS}:{_TOKENS}:{_TOKENS}") if model == "bert_base" else ()),
    )
    return {"exit_code": answer.exit_code, "message": answer.message, "document": answer.document}


def _feeds(model: str, count: int) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    if model == "resnet50":
        return {"image": generator.standard_normal((count, 3, 224, 224), np.float32)}
    ids = generator.integers(0, 30522, (count, _TOKENS))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def _save(model: str, samples: int, path: Path) -> None:
    if path.is_file():
        return
    feeds = _feeds(model, samples)
    if path.suffix == ".npy":
        np.save(path, next(iter(feeds.values())))
    else:
        np.savez(path, **feeds)


if __name__ == "__main__":
    print(json.dumps(_plain(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))))
