"""Opening an engine: its weights in torch's memory, contexts without memory of their own, compiled kernels kept."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.engines.cuda import cuda_device, driver
from enginesmith.pipeline.engines.trt.build_log import BuildLog, logger
from enginesmith.pipeline.engines.trt.flavours import Capabilities
from enginesmith.pipeline.engines.trt.manifest import EngineManifest
from enginesmith.pipeline.engines.trt.memory import allocator
from enginesmith.pipeline.engines.trt.options import RunOptions
from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.store import default_root

_KERNELS = "kernels"
"""Folder below the store's root for kernels that were compiled at a first run."""


@dataclass
class Opened:
    """An engine with all that has to live as long as it does."""

    engine: Any
    runtime: Any
    allocator: Any
    config: Any
    captures_itself: bool
    cache: Any = None
    cache_file: Path | None = None
    warm: bool = False
    """Whether kernels of an earlier run were taken over, so that nothing is compiled now."""

    def keep_kernels(self) -> None:
        """Write the compiled kernels back, whole or not at all."""
        if self.cache is None or self.cache_file is None or self.warm:
            return
        data = bytes(self.cache.serialize() or b"")
        if data:
            self.cache_file.parent.mkdir(parents=True, exist_ok=True)
            partial = self.cache_file.with_suffix(".partial")
            partial.write_bytes(data)
            partial.replace(self.cache_file)


def open_engine(
    trt: Any, path: Path, manifest: EngineManifest, known: Capabilities, device: Device, options: RunOptions
) -> Opened:
    """Deserialise an engine whose manifest was checked.

    Raises:
        ModelError: TensorRT does not take the file.
        UsageError: a streaming budget for an engine that streams nothing.
    """
    import torch

    torch.cuda.set_device(device.index)
    log = BuildLog()
    runtime = trt.Runtime(logger(trt, log))
    if manifest.options.host_code:
        runtime.engine_host_code_allowed = True
    taken = allocator(trt, device.index)
    runtime.gpu_allocator = taken
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        said = log.errors[0] if log.errors else "nothing"
        raise ModelError(f"TensorRT cannot load {path.name}, and said: {said}", "build it again on this machine")
    _stream_weights(engine, options)
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    opened = Opened(engine, runtime, taken, config, captures_itself=known.runtime_cache)
    if known.runtime_cache:
        _compile_at_once(trt, config, options)
        if options.kernel_cache:
            _attach_kernels(opened, manifest, device)
    return opened


def _stream_weights(engine: Any, options: RunOptions) -> None:
    budget = options.weight_streaming_budget
    if budget is None:
        return
    if not engine.streamable_weights_size:
        raise UsageError(
            "the engine streams no weights, and a weight streaming budget was given",
            "build it with --weight-streaming",
        )
    engine.weight_streaming_budget_v2 = min(budget, engine.streamable_weights_size)
    if engine.weight_streaming_budget_v2 != min(budget, engine.streamable_weights_size):
        raise UsageError(f"TensorRT does not take the weight streaming budget {budget}", "give a larger one")


def _compile_at_once(trt: Any, config: Any, options: RunOptions) -> None:
    """Compile kernels before a shape first runs: compiled in the background, speed would change meanwhile."""
    config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
    graphs = trt.CudaGraphStrategy
    config.cuda_graph_strategy = graphs.WHOLE_GRAPH_CAPTURE if options.cuda_graphs else graphs.DISABLED


def _attach_kernels(opened: Opened, manifest: EngineManifest, device: Device) -> None:
    """Take over the kernels of an earlier run of this engine on this device and driver; TensorRT checks them too."""
    here = cuda_device(device.index)
    name = f"{manifest.sha256[:24]}-{here.target if here else 'unknown'}-{driver().version}.cache"
    opened.cache_file = default_root() / _KERNELS / name
    opened.cache = opened.config.create_runtime_cache()
    if opened.cache_file.is_file():
        opened.warm = bool(opened.cache.deserialize(opened.cache_file.read_bytes()))
    opened.config.set_runtime_cache(opened.cache)
