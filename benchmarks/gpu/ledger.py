"""Split one engine's device memory by use, in a fresh process, with every instrument.

    python benchmarks/gpu/ledger.py model.engine --batch 8 [--cuda-graphs] [--weight-streaming-budget BYTES]
    python benchmarks/gpu/ledger.py model.onnx --batch 8        # ONNX Runtime, through its external allocator

Prints JSON: after each step what the allocator of torch holds and had at most since the last, what it keeps back, what
the device has in use, and what the engine asked the ledger for, by tag; what was not given back; and what the manifest
and the opened engine say. What lies between device and allocator is the CUDA context, libraries, their modules, and
graphs. The exit code is that of the error, which is in the JSON too.
"""

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.pipeline.artifact import Artifact, file_digest
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Engine, Session
from enginesmith.pipeline.engines.cuda_allocator import ACTIVATIONS, TRANSFERS, WEIGHTS, CudaAllocationTracker, counting
from enginesmith.pipeline.engines.tensorrt import manifest
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT
from enginesmith.pipeline.engines.tensorrt.options import RunOptions, SessionOptions
from enginesmith.pipeline.engines.tensorrt.session import TensorRTSession
from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.measure.memory.cuda import read_moment, read_peaks
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Feeds, TensorSpec

CUDA = Device(kind="cuda")


class Lines:
    """Takes a line after each step; a line that follows shows what its step added."""

    def __init__(self, ledger: CudaAllocationTracker) -> None:
        self._ledger = ledger
        self.lines: list[dict[str, Any]] = []

    def take(self, step: str) -> None:
        """Wait for the device, and write down what it has."""
        import torch

        now, most, account = read_moment(CUDA), read_peaks(CUDA), self._ledger.account()
        line = {
            "after": step,
            "allocated_bytes": now.allocated,
            "requested_bytes": now.requested,
            "peak_allocated_bytes": most.allocated,
            "peak_requested_bytes": most.requested,
            "reserved_bytes": now.reserved,
            "device_used_bytes": now.device,
            "ledger_bytes": account.by_tag,
            "ledger_peak_bytes": account.peak,
            "ledger_peak_by_tag_bytes": account.peak_by_tag,
        }
        self.lines.append(line)
        torch.cuda.reset_peak_memory_stats()
        self._ledger.reset_peak()


def account(file: Path, batch: int, options: SessionOptions) -> dict[str, Any]:
    """Open the engine, run it, close it."""
    artifact, engine = _opened_by(file, options)
    assert artifact.signature is not None
    feeds = _feeds(artifact.signature.inputs, batch)
    with counting(CUDA.index) as ledger:
        lines = Lines(ledger)
        engine.prime(artifact, CUDA)
        lines.take("priming")
        before = ledger.account().taken
        with ledger.tagged(WEIGHTS):
            session = engine.load(artifact, CUDA)
        with session:
            lines.take("loading")
            with ledger.tagged(TRANSFERS):
                bound = session.bind(feeds)
            lines.take("binding")
            for call in ("the first call", "the second call", "the third call"):
                with ledger.tagged(ACTIVATIONS):
                    session.enqueue(bound)
                lines.take(call)
            said = _said(session) if isinstance(session, TensorRTSession) else {}
            finite = _finite(session)
            del bound
        del session
        gc.collect()
        lines.take("closing")
        left = ledger.account()
    return {
        "engine": engine.name,
        "batch": batch,
        "feeds_bytes": sum(array.nbytes for array in feeds.values()),
        "options": options.model_dump(),
        "ledger": lines.lines,
        "not_given_back_bytes": sum(block.size for block in ledger.leaks(before).values()),
        "given_back_twice": left.double_frees,
        "given_back_and_never_taken": left.unknown_frees,
        "manifest": manifest.read(file).figures.model_dump() if isinstance(engine, TensorRT) else None,
        "opened": said,
        "outputs_finite": finite,
    }


def _opened_by(file: Path, options: SessionOptions) -> tuple[Artifact, Engine]:
    """The file, and the engine that opens it: the one that built it, or ONNX Runtime."""
    digest, size = file_digest(file), file.stat().st_size
    if file.suffix == ".onnx":
        signature = model_file.signature(file)
        plain = Artifact(kind="onnx", path=file, sha256=digest, bytes=size, signature=signature)
        return plain, engine_class("onnxruntime")()
    found = manifest.read(file)
    kind = engine_class(found.engine)
    assert issubclass(kind, TensorRT)
    built = Artifact(kind="engine", path=file, sha256=digest, bytes=size, signature=found.signature)
    own = {name: getattr(options, name) for name in RunOptions.model_fields}
    return built, kind(run=RunOptions(**own), cuda_graphs=options.cuda_graphs)


def _feeds(inputs: tuple[TensorSpec, ...], batch: int) -> Feeds:
    random = np.random.default_rng(0)
    shapes = {spec.name: spec.resolve(dict.fromkeys(spec.symbols, batch)) for spec in inputs}
    return {spec.name: (random.random(shapes[spec.name]) * 2).astype(spec.dtype) for spec in inputs}


def _said(session: TensorRTSession) -> dict[str, Any]:
    """Read the opened engine's own figures; names that a version does not have are left out."""
    engine = session._opened.engine
    contexts = [context.native for context in session._contexts.values()]
    said: dict[str, Any] = {
        "activation_memory_bytes": session.activation_memory.bytes,
        "kernels_were_kept": session._opened.cached_bytes > 0,
        "profile_activation_bytes": [
            engine.get_device_memory_size_for_profile_v2(index) for index in range(engine.num_optimization_profiles)
        ],
        "device_memory_size_bytes": engine.device_memory_size_v2,
        "streamable_weights_bytes": engine.streamable_weights_size,
        "auxiliary_streams": engine.num_aux_streams,
        "layers": engine.num_layers,
    }
    if hasattr(engine, "get_engine_stat"):
        said["weights_bytes"] = engine.get_engine_stat()
    if contexts and hasattr(contexts[0], "is_stream_capturable"):
        said["capturable"] = [context.is_stream_capturable(session.cuda_stream) for context in contexts]
    return said


def _finite(session: Session) -> bool:
    return all(bool(np.isfinite(value).all()) for value in session.fetch().values())


def main() -> int:
    """Print the ledger, or the error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--weight-streaming-budget", type=int)
    given = parser.parse_args()
    options = SessionOptions(cuda_graphs=given.cuda_graphs, weight_streaming_budget=given.weight_streaming_budget)
    try:
        found = account(given.engine, given.batch, options)
    except EnginesmithError as error:
        print(json.dumps({"error": error.message, "remedy": error.remedy}, indent=1))
        return error.exit_code
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
