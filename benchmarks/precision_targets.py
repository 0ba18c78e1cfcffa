"""Two targets of their own: the pipeline against a plain script, and what calibration and quantisation take.

``plain``: resnet50 in static and bert_base (128 tokens) in dynamic int8, as a plain script makes them with ONNX
Runtime's tools, in turns with eager and with the pipeline's winner. Calibration is synthetic: it is about speed alone.
``cost``: seconds and peak memory of the steps ``calibrate`` and ``precision`` of ``enginesmith precision``, and of what
lies between them: sensitivity, and one trial. Numbers are made up, so that it is about cost alone.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import judging
import numpy as np
import peers
import torch
from command import call
from judging import EAGER

from nets import workbench

_PEERS = {"resnet50": ("ort-static", "int8"), "bert_base": ("ort-dynamic", "int8-dynamic")}
"""Model → what a plain script uses, and the precision of ours that is held against it."""
_SAMPLES = 8
COSTS = (("bert_base", 64), ("resnet50", 128), ("resnet20", 64), ("resnet20", 1024), ("minilm", 64), ("minilm", 1024))
"""(model, samples): of those that benchmarks/nets/ trains, too, whether memory grows with the samples."""
_TOKENS = 128
_VOCABULARY = 30522
_STEPS = ("calibrate", "sensitivity", "search", "precision")
_FLOAT = "simplify"


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
        *_shapes(model),
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(_plain(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))))
