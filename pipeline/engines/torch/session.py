"""Run PyTorch modules on a device, called op by op or replayed as a CUDA graph, and time their operators.

A profile is that of torch's profiler; each operator counts for the module that called it. Each module's ``forward`` is
wrapped in a named range while it is profiled. Hooks would do the same, but some modules
(``nn.TransformerEncoderLayer``) take another path through their code when they have hooks.
"""

import contextlib
import gc
import re
import statistics
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import profiler

from enginesmith.pipeline.engines.base import Session, refuse_closed
from enginesmith.pipeline.engines.cuda_allocator import release_workspaces
from enginesmith.pipeline.engines.profiling import BETWEEN, OperatorTime, Origin, Profiled, ProfileRequest, Tally
from enginesmith.pipeline.errors import EnginesmithError, ModelError
from enginesmith.pipeline.frameworks.torch import file_tracking
from enginesmith.pipeline.frameworks.torch.rounding import answer_perturbed, may_choose_rows
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.oom import find_cause, out_of_memory, says_out_of_memory
from enginesmith.pipeline.tensors import Array, Feeds, Signature

Tensors = tuple[torch.Tensor, ...]
Forward = Callable[..., Tensors]
_Mode = type[torch.inference_mode] | type[torch.no_grad]
_WITHIN_COMPILED = re.compile(r"got (\w+)\([\"'](.+)[\"']\)$", re.MULTILINE)
"""The exception that TorchDynamo met, in its message."""
_OTHER_KEYS = "dispatch key set mismatch"
"""Part of TorchDynamo's message where it expects a tensor of inference mode to be none, as one that went through numpy.
Compiled code is called without that mode then; it has some percent more to do, as operators keep count of changes."""
_SHORT = {"BFloat16": "bf16", "Half": "fp16"}
_WARM_CALLS = 2
"""Calls before a graph is captured: the first loads kernels and picks algorithms, which a capture cannot hold."""
_capturing = threading.Lock()
"""CUDA captures one graph at a time in a process."""
_open: "weakref.WeakSet[EagerSession]" = weakref.WeakSet()
"""Sessions of this process on CUDA that are open."""
_CALL, _MODULE = "enginesmith call", "enginesmith module "
_WRAPPER = "model"
"""Name under which the session's module holds the user's."""
_COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")
"""Ranges that torch puts around the operators and kernels of compiled code."""
_MICRO = 1e-6


class EagerSession(Session):
    """Call a module on a device. On CUDA all work goes to one stream of its own, whichever thread it is called from."""

    def __init__(
        self,
        forward: Forward,
        signature: Signature,
        device: Device,
        dtype: torch.dtype | None,
        enter_thread: Callable[[], None],
    ) -> None:
        """``dtype`` is what float inputs are cast to; ``enter_thread`` makes settings of the thread that calls it."""
        self.signature, self._where, self._device = signature, device, str(device)
        self._inference_mode: _Mode = torch.inference_mode
        self._set_stream = torch.cuda.set_stream
        self.forward: Forward = forward
        self._dtype, self._enter_thread = dtype, enter_thread
        self._thread_count, self._entered = device.thread_count, threading.local()
        self._entered.here = True
        self._stream = torch.cuda.Stream(self._device) if device.kind == "cuda" else None  # type: ignore[no-untyped-call]
        self._outputs: Tensors = ()
        if self._stream:
            _open.add(self)

    @property
    def cuda_stream(self) -> int | None:
        return self._stream.cuda_stream if self._stream else None

    def sibling(self) -> Self:
        if self.forward is refuse_closed:
            refuse_closed()
        self._enter_thread()
        return type(self)(self.forward, self.signature, self._where, self._dtype, self._enter_thread)

    def _use_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def bind(self, feeds: Feeds) -> Any:
        """Copy feeds to tensors on the device, cast where the module is, in the order of the inputs."""
        tensors = []
        with self._use_stream():
            for spec in self.signature.inputs:
                tensor = torch.from_numpy(np.require(feeds[spec.name], requirements=("C", "W")))
                dtype = self._dtype if tensor.is_floating_point() else None
                tensors.append(tensor.to(self._device, dtype))
        return tuple(tensors)

    def enqueue(self, bound: Any) -> None:
        """Run the module; on CUDA this returns before the kernels have finished.

        The session's stream stays the calling thread's current one: to put the one before back would cost each call
        some microseconds, and these would be counted as the module's.

        Raises:
            ModelError: the module raised; StepOutOfMemory where memory was what it lacked.
        """
        self._outputs = ()  # its memory is free for this call
        self._enter_stream()
        try:
            with self._inference_mode():
                self._outputs = self.forward(*bound)
        except EnginesmithError:
            raise
        except AssertionError as error:
            if _OTHER_KEYS not in str(error) or self._inference_mode is torch.no_grad:
                raise _translate_error(error) from error
            self._inference_mode = torch.no_grad
            self.enqueue(bound)
        except Exception as error:  # libraries have classes of their own
            spans = self._describe_indices(bound) if "index" in str(error) else ""
            hint = f": integers may be beyond what it takes ({spans})" if spans else " to see where"
            raise _translate_error(error, remedy=f"run it alone with these inputs{hint}") from error

    def _describe_indices(self, bound: Tensors) -> str:
        """Describe the integer inputs by their least and greatest values: ``tokens from 0 to 30522``.

        Not on CUDA, where nothing can be computed after an error.
        """
        if self._where.kind != "cpu":
            return ""
        whole = [
            f"{spec.name} from {int(tensor.min())} to {int(tensor.max())}"
            for spec, tensor in zip(self.signature.inputs, bound, strict=True)
            if tensor.numel() and not (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype.itemsize > 1
        ]
        return ", ".join(whole)

    def differentiate(self, feeds: Feeds, weights: Feeds) -> dict[str, Array]:
        inputs = [tensor.clone() for tensor in self.bind(feeds)]
        floats = {
            spec.name: tensor.requires_grad_()
            for spec, tensor in zip(self.signature.inputs, inputs, strict=True)
            if tensor.is_floating_point()
        }
        self._enter_stream()
        try:
            with torch.enable_grad():
                outputs = zip(self.signature.outputs, self.forward(*inputs), strict=True)
                moving = [(weights[spec.name], value) for spec, value in outputs if spec.name in weights]
                parts = [
                    (value * torch.from_numpy(weight).to(value)).sum()
                    for weight, value in moving
                    if value.requires_grad and value.is_floating_point()
                ]
                if not parts or not floats:
                    return {}
                gradients = torch.autograd.grad(sum(parts[1:], parts[0]), [*floats.values()], allow_unused=True)
        except EnginesmithError:
            raise
        except Exception:  # noqa: BLE001 - an operator without a gradient, or what the module itself raises
            return {}
        return {
            name: value.float().cpu().numpy()
            for name, value in zip(floats, gradients, strict=True)
            if value is not None
        }

    def perturb(self, feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        if not isinstance(self.forward, torch.nn.Module):
            return {}
        with self._use_stream(), self._inference_mode():
            outputs = answer_perturbed(self.forward, self.bind(feeds), step, seed, self._device)
            specs = self.signature.outputs if outputs else ()
            pairs = zip(specs, outputs, strict=True)
            return {spec.name: value.to("cpu", getattr(torch, spec.dtype)).numpy() for spec, value in pairs}

    def find_choosing(self, feeds: Feeds) -> frozenset[str] | None:
        own, known = frozenset(self.signature.unordered), {*self.signature.symbols}
        if any({*spec.symbols} - known for spec in self.signature.outputs) or not isinstance(
            self.forward, torch.nn.Module
        ):
            return None
        with self._use_stream(), self._inference_mode():
            return None if may_choose_rows(self.forward, self.bind(feeds)) else own

    def _enter_stream(self) -> None:
        if self._stream:
            self._set_stream(self._stream)

    def synchronize(self) -> None:
        if self._stream:
            self._stream.synchronize()

    def answer(self, values: Sequence[Array]) -> Sequence[Array]:
        before = torch.get_num_threads()  # of this thread; compiled code is compiled again where it differs
        if not hasattr(self._entered, "here"):
            self._enter_thread()
            self._entered.here = True
        torch.set_num_threads(self._thread_count)
        try:
            with self._use_stream():
                return super().answer(values)
        finally:
            torch.set_num_threads(before)

    def fetch(self) -> dict[str, Array]:
        outputs = {}
        with self._use_stream():
            for spec, tensor in zip(self.signature.outputs, self._outputs, strict=True):
                outputs[spec.name] = np.array(tensor.to("cpu", getattr(torch, spec.dtype)).numpy())
        return outputs

    @property
    def has_graphs(self) -> bool:
        """True if CUDA graphs may be replayed, which hold addresses of memory."""
        return False

    def release_idle_memory(self) -> None:
        """Give back cuBLAS's workspaces, unless a CUDA graph uses one: torch keeps one for each session's stream."""
        if self._stream and not any(session.has_graphs for session in _open):
            release_workspaces(self._where.index)
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Let go of the module, once what was enqueued has finished; the last session gives back the workspaces."""
        self.synchronize()
        self.forward, self._outputs = refuse_closed, ()
        gc.collect()
        _open.discard(self)
        if not _open:
            self.release_idle_memory()


@dataclass(eq=False)
class Captured:
    """Keep inputs on the device, and the graph that reads them."""

    inputs: Tensors
    calls: int = 0
    graph: Any = None
    outputs: Tensors = ()
    """Tensors that the graph writes: in memory of its own, which stays as long as it does."""


class GraphedSession(EagerSession):
    """Capture a call as a CUDA graph, once for each ``bind``, and replay it from then on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._bound: weakref.WeakSet[Captured] = weakref.WeakSet()

    def bind(self, feeds: Feeds) -> Captured:
        """Copy feeds to tensors on the device, whose addresses the graph will hold."""
        bound = Captured(super().bind(feeds))
        self._bound.add(bound)
        return bound

    def enqueue(self, bound: Captured) -> None:
        """Replay the graph, which the third call captures.

        Raises:
            ModelError: the module raised, or does what no graph can hold; StepOutOfMemory where memory was lacking.
        """
        if bound.graph is None:
            if bound.calls < _WARM_CALLS or self.forward is refuse_closed:
                super().enqueue(bound.inputs)
                bound.calls += 1
                return
            self._capture(bound)
        self._enter_stream()
        bound.graph.replay()
        self._outputs = bound.outputs

    def _capture(self, bound: Captured) -> None:
        self._outputs = ()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        self._enter_stream()
        try:
            with _capturing, self._inference_mode():
                torch.cuda.empty_cache()  # a graph has a pool of its own: what the warm calls left would lie beside it
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    bound.outputs = self.forward(*bound.inputs)
                finally:
                    graph.capture_end()
        except EnginesmithError:
            raise
        except Exception as error:
            first = error.__context__ or error  # where the module raised, the end fails too
            message = "CUDA captured no graph of this module, which raised"
            raise _translate_error(first, message, "run it without CUDA graphs") from error
        bound.graph = graph

    @property
    def has_graphs(self) -> bool:
        return any(bound.graph for bound in self._bound)

    def close(self) -> None:
        """Let go of the module and of all graphs, even where someone still has what was bound."""
        self.synchronize()
        for bound in self._bound:
            bound.graph, bound.outputs = None, ()
        super().close()


def _translate_error(
    error: BaseException, what: str = "the module raised", remedy: str = "run it alone with these inputs to see where"
) -> EnginesmithError:
    if says_out_of_memory(str(error)):
        return out_of_memory(str(error))
    if memory := find_cause(error):
        return memory
    name, text = type(error).__name__, next(iter(str(error).strip().splitlines()), "no message")
    place = file_tracking.find_user_line(error)
    if within := _WITHIN_COMPILED.search(str(error)):
        name, text = within[1], within[2]
    short = next((word for kind, word in _SHORT.items() if kind in text), "")
    if short and re.search(r"\bfloat\b", text, re.IGNORECASE):
        remedy = (
            f"the module casts to float32 inside, and its weights are {short}: leave --precision {short} out, or cast "
            "to the weights' type there, as x.to(self.weight.dtype) does"
        )
    return ModelError(f"{what} {name}: {text}{f' ({place})' if place else ''}", remedy)


def profile(session: EagerSession, request: ProfileRequest, *, modules: bool, notes: tuple[str, ...] = ()) -> Profiled:
    """Profile an open session; without ``modules`` nothing is said of where operators belong."""
    on_cuda = request.device.kind == "cuda"
    activities = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if on_cuda else [])]
    with named_ranges(session.forward) if modules else contextlib.nullcontext():
        bound = session.warm_up(request.feeds)
        with profiler.profile(activities=activities, acc_events=True) as recorded:
            for _ in range(request.calls):
                with profiler.record_function(_CALL):
                    session.enqueue(bound)
                    session.synchronize()
    return profiled(recorded.events(), modules=modules, on_cuda=on_cuda, notes=notes)


@contextlib.contextmanager
def named_ranges(root: Any) -> Iterator[None]:
    """Have each module below ``root`` say when it runs; what TorchScript compiled stays as it is."""

    def in_range(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(name):
                return forward(*args, **kwargs)

        return within

    wrapped: list[torch.nn.Module] = []
    try:
        for path, module in root.named_modules():
            if path and not isinstance(module, torch.jit.ScriptModule) and "forward" not in vars(module):
                path_in_model = "" if path == _WRAPPER else path.removeprefix(f"{_WRAPPER}.")
                vars(module)["forward"] = in_range(module.forward, _MODULE + path_in_model)
                wrapped.append(module)
        yield
    finally:
        for module in wrapped:
            del vars(module)["forward"]


def profiled(events: Any, *, modules: bool, on_cuda: bool, notes: tuple[str, ...] = ()) -> Profiled:
    """Sum up the operators among the profiler's events.

    Each event counts with its own time, for the outermost operator that it is part of and the innermost module around
    that, so that nothing counts twice. On CUDA that is the time of the kernels that it launched.
    """
    tally, known = Tally(), dict[str, tuple[Origin, str]]()
    on_host = [event for event in events if event.device_type.name == "CPU"]
    calls = sorted((event for event in on_host if event.name == _CALL), key=lambda call: call.time_range.start)
    by_call: dict[int, list[Any]] = {id(call): [] for call in calls}
    for event in on_host:
        call = event
        while call is not None and call.name != _CALL:
            call = call.cpu_parent
        if call is not None:
            by_call[id(call)].append(event)
    for call in calls:
        tally.begin()
        for event in by_call[id(call)]:
            module, operator, outermost = _enclosing(event)
            for kind, seconds in _seconds(event, operator, on_cuda):
                name = f"{module or '(model)'}: {kind}" if modules else kind
                known[name] = (Origin(modules=(module,) if modules else ()), kind)
                tally.add(name, seconds, run=outermost)
    operators = tuple(
        OperatorTime(name=name, operator=known[name][1], origin=known[name][0], seconds=seconds, calls=count)
        for name, (seconds, count) in tally.medians().items()
    )
    whole = statistics.median(call.time_range.elapsed_us() * _MICRO for call in calls)
    return Profiled(operators=operators, source="torch's profiler", call_seconds=whole, notes=notes)


def _enclosing(event: Any) -> tuple[str, str, bool]:
    """Find the module and the operator that an event is part of, and whether it is the operator itself."""
    operator, outermost, at = BETWEEN, False, event
    while at.name != _CALL and not at.name.startswith(_MODULE):
        if not at.name.startswith(_COMPILED):
            operator, outermost = at.name, at is event
        at = at.cpu_parent
    return at.name.removeprefix(_MODULE) if at.name != _CALL else "", operator, outermost


def _seconds(event: Any, operator: str, on_cuda: bool) -> list[tuple[str, float]]:
    """List an event's own time, or that of its kernels; those that no operator launched keep their names (Triton's)."""
    if on_cuda:
        own = operator == BETWEEN
        return [(kernel.name if own else operator, kernel.duration * _MICRO) for kernel in event.kernels]
    inner = sum(child.time_range.elapsed_us() for child in event.cpu_children)
    return [(operator, float(max(0.0, event.time_range.elapsed_us() - inner)) * _MICRO)]
