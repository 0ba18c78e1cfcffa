"""Where the device memory of one TensorRT engine goes, in a fresh process, by every instrument there is.

    python benchmarks/gpu/ledger.py model.engine --batch 8 [--cuda-graphs] [--weight-streaming-budget BYTES]

Prints JSON: after each step what torch's allocator holds and had at most since the step before, what it keeps back, and
what the device has in use; and what the manifest and the opened engine say. What lies between device and allocator is
the CUDA context, libraries, their modules, and graphs. The exit code is that of the error, which is in the JSON too.
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
from enginesmith.pipeline.engines.base import Device, Session
from enginesmith.pipeline.engines.tensorrt import TensorRT
from enginesmith.pipeline.engines.trt import manifest
from enginesmith.pipeline.engines.trt.options import RunOptions
from enginesmith.pipeline.engines.trt.session import TensorRTSession
from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.tensors import Feeds, TensorSpec

CUDA = Device(kind="cuda")


class Ledger:
    """Takes a line after each step; a line that follows shows what its step added."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def take(self, step: str) -> None:
        """Wait for the device, and write down what it has."""
        import torch

        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info()
        line = {
            "after": step,
            "allocated_bytes": torch.cuda.memory_allocated(),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "device_used_bytes": whole - free,
        }
        self.lines.append(line)
        torch.cuda.reset_peak_memory_stats()


def ledger(engine: Path, batch: int, options: RunOptions) -> dict[str, Any]:
    """Open the engine, run it, close it."""
    found = manifest.read(engine)
    kind = engine_class(found.engine)
    assert issubclass(kind, TensorRT)
    artifact = Artifact(kind="engine", path=engine, sha256=file_digest(engine), bytes=engine.stat().st_size)
    one = kind(run=options)
    lines = Ledger()
    one.prime(artifact, CUDA)
    lines.take("priming")
    with one.load(artifact, CUDA) as session:
        assert isinstance(session, TensorRTSession)
        lines.take("loading")
        feeds = _feeds(found.signature.inputs, batch)
        bound = session.bind(feeds)
        lines.take("binding")
        for call in ("the first call", "the second call", "the third call"):
            session.enqueue(bound)
            lines.take(call)
        said = _said(session)
        finite = _finite(session)
        del bound
    gc.collect()
    lines.take("closing")
    return {
        "engine": f"{found.engine} {found.version}",
        "batch": batch,
        "feeds_bytes": sum(array.nbytes for array in feeds.values()),
        "options": options.model_dump(),
        "ledger": lines.lines,
        "manifest": found.figures.model_dump(),
        "opened": said,
        "outputs_finite": finite,
    }


def _feeds(inputs: tuple[TensorSpec, ...], batch: int) -> Feeds:
    random = np.random.default_rng(0)
    shapes = {spec.name: spec.resolve(dict.fromkeys(spec.symbols, batch)) for spec in inputs}
    return {spec.name: (random.random(shapes[spec.name]) * 2).astype(spec.dtype) for spec in inputs}


def _said(session: TensorRTSession) -> dict[str, Any]:
    """What the opened engine says of itself; names that a version does not have are left out."""
    engine = session._opened.engine
    contexts = [context.native for context in session._contexts.values()]
    said: dict[str, Any] = {
        "activation_memory_bytes": session.activation_memory.bytes,
        "kernels_were_kept": session._opened.warm,
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
    options = RunOptions(cuda_graphs=given.cuda_graphs, weight_streaming_budget=given.weight_streaming_budget)
    try:
        found = ledger(given.engine, given.batch, options)
    except EnginesmithError as error:
        print(json.dumps({"error": error.message, "remedy": error.remedy}, indent=1))
        return error.exit_code
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
