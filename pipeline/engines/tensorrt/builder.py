"""Build engines from ONNX graphs: configuration, profiles, timing cache, smallest workspace, and the build itself.

Where a workspace limit is only a gate (TensorRT-RTX 1.7), the smallest follows from an unlimited build: the builder
compares limit and weights together with the activations. Seen for four models at batch 1, 16 and 64, within 16 KiB.
"""

import contextlib
import fcntl
import hashlib
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginesmith.pipeline.artifact import file_digest, write_whole
from enginesmith.pipeline.engines.base import EngineFacts, MemoryFigures
from enginesmith.pipeline.engines.cuda_allocator import CudaAllocationTracker
from enginesmith.pipeline.engines.tensorrt import parser
from enginesmith.pipeline.engines.tensorrt.build_log import BuildLog, listening
from enginesmith.pipeline.engines.tensorrt.loader import allocator, ledger_of
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.engines.tensorrt.parser import NetworkTensor, node_name, plain, read_tensors
from enginesmith.pipeline.engines.tensorrt.versions import Capabilities, FlavourName, module
from enginesmith.pipeline.engines.workspace import PORTABLE
from enginesmith.pipeline.errors import (
    BuilderFailed,
    BuildError,
    LimitTooSmall,
    MissingCapability,
    ModelError,
    UnsupportedGraph,
    UsageError,
)
from enginesmith.pipeline.frameworks.onnx import model_file, traversal
from enginesmith.pipeline.units import format_bytes

_ASKED_FOR = re.compile(r"[Rr]equested size (?:was|of) (\d+)")
_MEMORY = (
    *("OutOfMemory", "insufficient memory", "workspace memory greater", "out of memory"),
    "within workspace limit",
)
_UNSUPPORTED = (
    *("not supported", "unsupported", "Could not find any implementation", "No tactic", "Cannot compile"),
    *("Could not infer output types", "has no runners", "layerImpls.empty", "violate shape"),
)
_OPERATORS = {"deconv": "ConvTranspose"}
"""The compiler's word → the operator it stands for, where it names no node."""
_NEVER_BUILT = {"tensorrt_rtx": ("NonMaxSuppression",)}
"""Operators that the parser takes and the builder has no kernels for, on any target (TensorRT-RTX 1.7)."""
_QUOTED = re.compile(r"'([^']+)'|\bnode (\S+?)[\s.:]|^(?:\[[^]]*\] )?(\S+?): ")
_WHERE = re.compile(
    r"\(?\[[\w./]+\.(?:cpp|hpp|h)\b[^\]]*\]|\b[\w./]+\.(?:cpp|hpp|h):\d+:?|\w+Exception:|\bMyelin\b|I\w+::\w+:"
    r"|\(?\bIn \w+ at\b ?\S*"
)
"""Places in TensorRT's source, of which messages speak."""
_LENGTH = 400
_SLACK_BYTES = 32 << 10
"""Bytes added to activations − weights, which was seen to be up to 16 KiB below the smallest limit, never above."""
_RESOLUTION_BYTES = 64 << 10
_LEAST_POINT_BYTES = 1 << 20
_SHARE = 0.05
"""Exactness of a search for the smallest limit, as a share of it."""
_STACK_BYTES = 512 << 20
"""A chain of some thousand layers overflows a stack of the usual 8 MiB, and with it the process."""
_HEARTBEAT_SECONDS = 2.0

Progress = Callable[[str], None]
Profile = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Input → its smallest, usual and largest shape."""


def build_error(log: BuildLog, graph: Path, workspace_bytes: int | None, flavour: str) -> BuildError:
    """Make an error of one of three classes from the builder's own words in the log."""
    text = "\n".join(log.errors)
    if any(words in text for words in _MEMORY) or any("insufficient memory" in words for words in log.warnings):
        sizes = [int(number) for number in _ASKED_FOR.findall(text + "\n".join(log.warnings))]
        words = f" (it asked for {max(sizes)} bytes in all)" if sizes else ""
        if workspace_bytes is None:
            remedy = "use a smaller largest batch, or a device with more memory"
            return LimitTooSmall(f"{flavour}'s builder ran out of memory{words}", remedy)
        remedy = "allow more, or find the smallest that builds with --workspace sweep"
        return LimitTooSmall(f"no engine fits a workspace of {format_bytes(workspace_bytes)}{words}", remedy)
    reason = plain(_WHERE.sub(" ", log.errors[0]))[:_LENGTH] if log.errors else "nothing"
    if "timing cache" in text.lower():
        message = f"a kernel's timing is missing, and the timing cache is locked: {reason}"
        return BuilderFailed(message, "build once without --locked")
    if any(words in text for words in _UNSUPPORTED):
        node = _node(text, graph)
        for operator in _NEVER_BUILT.get(flavour, ()) if not node else ():
            if any(each.op_type == operator for each in traversal.nodes(model_file.read(graph))):
                message = f"{flavour} has no kernel for {operator}, in any precision and for any target"
                remedy = "end the graph before it and choose boxes behind the engine, or use onnxruntime or openvino"
                return UnsupportedGraph(f"{message}: {reason}", remedy)
        message = f"{flavour} cannot build {node or 'this graph'}: {reason}"
        trial = "`build --check` tells which targets would do"
        return UnsupportedGraph(message, "use another precision for it, or another target", trial)
    remedy = "try the model in another precision, or for another target"
    return BuilderFailed(f"{flavour}'s builder failed and said: {reason}", remedy)


def _node(text: str, graph: Path) -> str:
    """Find the first node of the graph that the text names, with the module it comes from."""
    nodes = {node.name: node for node in traversal.nodes(model_file.read(graph)) if node.name}
    for match in _QUOTED.finditer(text):
        name = next(group for group in match.groups() if group)
        if name in nodes:
            return node_name(nodes[name])
    operators = [operator for word, operator in _OPERATORS.items() if word in text]
    return next((node_name(node) for node in nodes.values() if node.op_type in operators), "")


def estimate(facts: EngineFacts) -> int:
    """Estimate the smallest limit that builds, by the figures of an unlimited build.

    Raises:
        ModelError: the builder gave no figures.
    """
    if facts.activation_bytes is None or facts.weights_bytes is None:
        raise ModelError("the builder gave no memory figures, so there is nothing to sweep", "name the limits yourself")
    need = facts.activation_bytes - facts.weights_bytes
    return need + _SLACK_BYTES if need > 0 else 1


def space_workspaces(facts: EngineFacts, smallest: int, count: int) -> tuple[int, ...]:
    """Space ``count`` limits from the smallest to what the largest shape works in, evenly on a log scale."""
    top = max(facts.activation_bytes or 0, smallest)
    low = min(max(smallest, _LEAST_POINT_BYTES), top)
    if count == 1:
        return (smallest,)
    steps = (math.exp(math.log(low) + index * math.log(top / low) / (count - 1)) for index in range(1, count))
    return (smallest, *(round(step) for step in steps))


def find_smallest_workspace(build: Callable[[int], object], facts: EngineFacts, known: Capabilities) -> int:
    """Find the smallest limit that builds; the last successful ``build`` was with it.

    One build where the estimate holds; otherwise limits are halved or doubled, then bisected.
    """

    def builds(limit: int) -> bool:
        try:
            build(limit)
        except LimitTooSmall:
            return False
        return True

    limit = estimate(facts) if known.workspace_is_a_gate else facts.scratch_bytes or _LEAST_POINT_BYTES
    low, high = 0, limit
    if builds(limit):
        if known.workspace_is_a_gate or limit <= _RESOLUTION_BYTES:
            return limit
    else:
        low, high, enough = limit, 2 * limit, facts.workspace_limit_bytes or math.inf
        while high < enough and not builds(high):
            low, high = high, 2 * high
        high = int(min(high, enough))  # it was built with that before
    share = 0.0 if known.workspace_is_a_gate else _SHARE
    while high - low > max(_RESOLUTION_BYTES, share * high):
        middle = (low + high) // 2
        low, high = (low, middle) if builds(middle) else (middle, high)
    build(high)
    return high


def attach_timing_cache(trt: Any, config: Any, file: Path, *, locked: bool, named: bool) -> Any:
    """Give the configuration the timing cache in ``file``, or a new one: another build then chooses the same kernels.

    A file that TensorRT does not take is replaced, unless it is ``locked`` or the user ``named`` it.

    Raises:
        UsageError: the file is of another device or version, or not a timing cache; or it is locked and not there.
    """
    if locked and not file.is_file():
        message = f"--locked needs the timing cache {file}, and there is none"
        raise UsageError(message, "build once without --locked to make it")
    stored = file.read_bytes() if file.is_file() else b""
    cache = config.create_timing_cache(stored)
    # what it cannot read becomes an empty cache, which is shorter; a cache of graphs without tunable layers has no keys
    emptied = bool(stored) and not (cache.queryKeys() or len(bytes(cache.serialize())) == len(stored))
    if not emptied and config.set_timing_cache(cache, ignore_mismatch=False):
        return cache
    if locked or named:
        message = f"the timing cache {file} is damaged, or of another device or version of TensorRT {trt.__version__}"
        raise UsageError(message, "give another one with --timing-cache, or remove it: it is made again then")
    cache = config.create_timing_cache(b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def save_timing_cache(config: Any, cache: Any, file: Path, locked: bool) -> str:
    """Add the cache's timings to the file, and compute its digest; a locked one is left as it is.

    Other builds may have written there since this one began: their timings stay.
    """
    if locked:
        return file_digest(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f".{file.name}.lock").open("a") as lock:
        with contextlib.suppress(OSError):  # a network drive without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        stored = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
        combined = stored.combine(cache, ignore_mismatch=False)  # not with one of another device or version
        write_whole(file, bytes((stored if combined else cache).serialize()))
        return file_digest(file)


@dataclass(frozen=True)
class BuilderSettings:
    """Settings of one build of an engine."""

    flavour: FlavourName
    known: Capabilities
    options: BuildOptions
    workspace_bytes: int | None
    targets: tuple[str, ...]
    """Empty for the device that it is built on."""
    profiles: tuple[Profile, ...]
    timing_cache: Path | None = None
    device: int | None = None
    """The device that kernels are timed on; None for an engine that is built ahead of time."""


@dataclass(frozen=True)
class Built:
    """Record what a build gave besides the engine's file."""

    log: BuildLog
    workspace_limit_bytes: int
    """The limit that held, the builder's default where none was asked for."""
    sha256: str
    tensors: tuple[NetworkTensor, ...]
    """Inputs and outputs of the network that was built."""
    timing_cache_sha256: str | None = None
    device_peak_bytes: int | None = None
    """The most that the builder had of the device at once, as its allocator counted; None where it had no device."""

    @property
    def figures(self) -> MemoryFigures:
        """The builder's own figures; its peak on the device is the exact one where that was counted."""
        if self.device_peak_bytes is None:
            return self.log.figures
        return self.log.figures.model_copy(update={"build_device_peak_bytes": self.device_peak_bytes})


def build(settings: BuilderSettings, graph: Path, file: Path, progress: Progress) -> Built:
    """Build ``graph`` and write the engine to ``file``.

    Raises:
        UnsupportedGraph, LimitTooSmall, BuilderFailed: by what the builder said.
        UsageError: a profile that does not fit, a timing cache from elsewhere.
    """
    trt, log = module(settings.flavour), BuildLog()
    with listening(trt, log) as sink:
        return _build(trt, log, sink, settings, graph, file, progress)


def _build(
    trt: Any, log: BuildLog, sink: Any, settings: BuilderSettings, graph: Path, file: Path, progress: Progress
) -> Built:
    options, timings = settings.options, settings.timing_cache
    parser.load_plugins(trt, options.plugins, sink, settings.known)
    builder = trt.Builder(sink)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    ledger = _ledger(trt, builder, settings.device)
    config = builder.create_builder_config()
    monitor = _monitor(trt)
    config.progress_monitor = monitor
    _configure(trt, config, settings)
    named = options.timing_cache is not None
    cache = attach_timing_cache(trt, config, timings, locked=options.locked, named=named) if timings else None

    def work() -> Any:
        _choose_device(settings.device)
        log.take("INFO", "parsing the graph")
        parser.parse(trt, network, sink, graph, settings.known)
        for profile in settings.profiles:
            config.add_optimization_profile(_profile(builder, network, profile))
        log.take("INFO", "building the engine")
        return builder.build_serialized_network(network, config)

    _choose_device(settings.device)
    plan = _run_on_large_stack(work, monitor, progress)
    if plan is None:
        raise build_error(log, graph, settings.workspace_bytes, settings.flavour)
    with ThreadPoolExecutor(1) as pool:  # two things that both take a while and need no interpreter
        digest = pool.submit(lambda: hashlib.sha256(plan).hexdigest())
        file.write_bytes(plan)
    return Built(
        log=log,
        workspace_limit_bytes=config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE),
        sha256=digest.result(),
        tensors=read_tensors(network),
        timing_cache_sha256=save_timing_cache(config, cache, timings, options.locked) if cache and timings else None,
        device_peak_bytes=ledger.account().peak if ledger else None,
    )


def _ledger(trt: Any, builder: Any, device: int | None) -> CudaAllocationTracker | None:
    """Have the builder take its device memory through a ledger; None where it is built without a device."""
    if device is None:
        return None
    ledger = ledger_of(device)
    builder.gpu_allocator = allocator(trt, ledger, waits_for=device)
    return ledger


def _choose_device(index: int | None) -> None:
    """Build on that device, which each thread chooses for itself; without one nothing is touched."""
    if index is not None:
        import torch

        torch.cuda.set_device(index)


def _configure(trt: Any, config: Any, settings: BuilderSettings) -> None:
    options = settings.options
    _limit_pools(trt, config, settings)
    _set_flags(trt, config, settings)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.aux_streams is not None:
        config.max_aux_streams = options.aux_streams
    if options.tiling is not None:
        config.tiling_optimization_level = getattr(trt.TilingOptimizationLevel, options.tiling.upper())
    wider = options.hardware_compatibility
    if wider != "none" and "hardware_compatibility" not in settings.known.no_effect:
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, wider.upper())
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # the audit needs the layers
    if settings.targets:
        config.num_compute_capabilities = len(settings.targets)
        for index, target in enumerate(settings.targets):
            config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), index)


def _limit_pools(trt: Any, config: Any, settings: BuilderSettings) -> None:
    options, pools = settings.options, trt.MemoryPoolType
    limits = {
        pools.WORKSPACE: settings.workspace_bytes,
        pools.TACTIC_DRAM: options.tactic_dram,
        pools.TACTIC_SHARED_MEMORY: options.tactic_shared_memory,
    }
    for pool, limit in limits.items():
        if limit is not None:
            config.set_memory_pool_limit(pool, limit)
            if config.get_memory_pool_limit(pool) != limit:  # it logs, and keeps what it had
                message = f"{settings.flavour} does not take the limit of {limit} bytes for {pool.name}"
                raise UsageError(message, "give one between 1 byte and the memory of the device")


def _set_flags(trt: Any, config: Any, settings: BuilderSettings) -> None:
    options, flags = settings.options, trt.BuilderFlag
    chosen = {
        flags.TF32: options.tf32,
        flags.SPARSE_WEIGHTS: options.sparse_weights,
        flags.WEIGHT_STREAMING: options.weight_streaming,
        flags.STRIP_PLAN: options.strip_plan,
        flags.REFIT: options.refit,
        flags.VERSION_COMPATIBLE: options.version_compatible,
        flags.ERROR_ON_TIMING_CACHE_MISS: options.locked and settings.known.timing_cache,
        flags.EDITABLE_TIMING_CACHE: settings.known.timing_cache,
        flags.MONITOR_MEMORY: True,
    }
    for flag, wanted in chosen.items():
        (config.set_flag if wanted else config.clear_flag)(flag)
        if config.get_flag(flag) != wanted:
            raise MissingCapability(f"{settings.flavour} does not take the builder flag {flag.name}", "omit it")


def compute_capabilities(target: str | None, known: Capabilities) -> tuple[str, ...]:
    """List the compute capabilities that a target stands for; ``portable``: all that have fp32 and bf16 arithmetic."""
    if target == PORTABLE:
        return tuple(name for name in known.targets if name != "sm75")
    return (target,) if target else ()


def _profile(builder: Any, network: Any, shapes: Profile) -> Any:
    """Make an optimization profile.

    Raises:
        UnsupportedGraph: an input whose values decide shapes.
        UsageError: the shapes do not fit the network.
    """
    profile = builder.create_optimization_profile()
    for tensor in map(network.get_input, range(network.num_inputs)):
        if tensor.is_shape_tensor:
            message = f"the values of the input {tensor.name!r} decide shapes"
            remedy = "make it a constant of the model, or take the size from another input's shape"
            raise UnsupportedGraph(f"{message}, and TensorRT needs their range ahead of time", remedy)
        if tensor.name not in shapes:
            message = f"TensorRT calls an input {tensor.name!r}, which is not its name in the graph"
            remedy = "pass the input through an operator first, where it is an output too or what a loop goes by"
            raise UnsupportedGraph(message, remedy)
        try:
            profile.set_shape(tensor.name, *shapes[tensor.name])
        except (ValueError, RuntimeError) as error:
            given = ", ".join(str(list(shape)) for shape in shapes[tensor.name])
            message = f"the shapes {given} do not fit the input {tensor.name!r} of shape {list(tensor.shape)}"
            raise UsageError(message, "give a range for each dynamic dimension: --shape batch=1:8:64") from error
    if not profile:
        raise UsageError("TensorRT does not accept the shape ranges", "give min, opt and max for every dimension")
    return profile


def _monitor(trt: Any) -> Any:
    """Make a progress monitor, which knows the builder's phase and stops it when ``cancelled`` is set."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.cancelled = False
            self.phase = "parsing"
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._steps[phase_name] = num_steps
            self.phase = phase_name

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.phase = f"{phase_name} {step + 1} of {self._steps.get(phase_name, step + 1)}"
            return not self.cancelled

        def phase_finish(self, phase_name: str) -> None:
            self._steps.pop(phase_name, None)

    return Monitor()


def _run_on_large_stack(work: Callable[[], Any], monitor: Any, progress: Progress) -> Any:
    """Run ``work`` on a thread with a large stack, and tell every other second that it still goes on.

    If ``progress`` raises, the builder is told to stop, and the exception goes on once it has.
    """

    def body(outcome: Future[Any]) -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            outcome.set_exception(error)

    outcome: Future[Any] = Future()
    before = threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=body, args=(outcome,), name="build", daemon=True)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    started = time.monotonic()
    try:
        while True:
            thread.join(_HEARTBEAT_SECONDS)
            if not thread.is_alive():
                break
            progress(f"{monitor.phase}, {time.monotonic() - started:.0f} s")
    except BaseException:
        monitor.cancelled = True
        thread.join()
        raise
    try:
        return outcome.result()
    finally:
        del outcome  # else the trace of an error would keep itself alive, with the builder
