"""Time the operators of a PyTorch module by torch's profiler; each counts for the module that called it.

Each module's ``forward`` is wrapped in a named range while it is profiled. Hooks would do the same, but some modules
(``nn.TransformerEncoderLayer``) take another path through their code when they have hooks.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from enginesmith.pipeline.engines.base import BETWEEN, OperatorTime, Origin, Profiled, ProfileRequest, Tally, warm_up
from enginesmith.pipeline.engines.torch.session import EagerSession

if TYPE_CHECKING:
    import torch

    Ranges = Callable[[torch.nn.Module], contextlib.AbstractContextManager[None]]


_CALL, _MODULE = "enginesmith call", "enginesmith module "
_WRAPPER = "model"
"""Where the session's module holds the user's."""
_COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")
"""Ranges that torch puts around the operators and kernels of compiled code."""
_MICRO = 1e-6


def profile(session: EagerSession, request: ProfileRequest, *, modules: bool, notes: tuple[str, ...] = ()) -> Profiled:
    """Profile an open session; without ``modules`` nothing is said of where operators belong."""
    from torch.profiler import ProfilerActivity, record_function
    from torch.profiler import profile as record

    on_cuda = request.device.kind == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with named_ranges(session.module) if modules else contextlib.nullcontext():
        bound = warm_up(session, request.feeds)
        with record(activities=activities, acc_events=True) as recorded:
            for _ in range(request.calls):
                with record_function(_CALL):
                    session.enqueue(bound)
                    session.synchronize()
    return profiled(recorded.events(), modules=modules, on_cuda=on_cuda, notes=notes)


@contextlib.contextmanager
def named_ranges(root: Any) -> Iterator[None]:
    """Have each module below ``root`` say when it runs; what TorchScript compiled stays as it is."""
    import torch

    wrapped: list[torch.nn.Module] = []
    try:
        for path, module in root.named_modules():
            if path and not isinstance(module, torch.jit.ScriptModule) and "forward" not in vars(module):
                vars(module)["forward"] = _in_range(module.forward, _MODULE + module_path(path))
                wrapped.append(module)
        yield
    finally:
        for module in wrapped:
            del vars(module)["forward"]


def module_path(path: str) -> str:
    """Strip our wrapper from a path, which leaves that in the user's module; empty for the wrapper itself."""
    return "" if path == _WRAPPER else path.removeprefix(f"{_WRAPPER}.")


def _in_range(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    from torch.profiler import record_function

    def within(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return forward(*args, **kwargs)

    return within


def profiled(events: Any, *, modules: bool, on_cuda: bool, notes: tuple[str, ...] = ()) -> Profiled:
    """Sum up the operators among the profiler's events.

    Each event counts with its own time, for the outermost operator that it is part of and the innermost module around
    that, so that nothing counts twice. On CUDA that is the time of the kernels that it launched.
    """
    tally, known = Tally(), dict[str, tuple[str, str]]()
    calls = sorted(
        (event for event in events if _host(event) and event.name == _CALL), key=lambda call: call.time_range.start
    )
    by_call: dict[int, list[Any]] = {id(call): [] for call in calls}
    for event in events:
        if _host(event) and (call := _call_of(event)) is not None:
            by_call[id(call)].append(event)
    for call in calls:
        tally.begin()
        for event in by_call[id(call)]:
            module, operator, outermost = _place(event)
            parts = _kernel_seconds(event, operator) if on_cuda else [(operator, _own_seconds(event))]
            for what, seconds in parts:
                name = f"{module or '(model)'}: {what}" if modules else what
                known[name] = (module, what)
                tally.add(name, seconds, run=outermost)
    operators = tuple(
        OperatorTime(
            name=name,
            operator=known[name][1],
            origin=Origin(modules=(known[name][0],) if modules else ()),
            seconds=seconds,
            calls=count,
        )
        for name, (seconds, count) in tally.medians().items()
    )
    whole = statistics.median(call.time_range.elapsed_us() * _MICRO for call in calls)
    return Profiled(operators=operators, source="torch's profiler", call_seconds=whole, notes=notes)


def _host(event: Any) -> bool:
    return bool(event.device_type.name == "CPU")


def _call_of(event: Any) -> Any:
    while event is not None and event.name != _CALL:
        event = event.cpu_parent
    return event


def _place(event: Any) -> tuple[str, str, bool]:
    """Find the module and the operator that an event is part of, and whether it is the operator itself."""
    operator, outermost, at = BETWEEN, False, event
    while at.name != _CALL and not at.name.startswith(_MODULE):
        if not at.name.startswith(_COMPILED):
            operator, outermost = at.name, at is event
        at = at.cpu_parent
    return at.name.removeprefix(_MODULE) if at.name != _CALL else "", operator, outermost


def _own_seconds(event: Any) -> float:
    inner = sum(child.time_range.elapsed_us() for child in event.cpu_children)
    return float(max(0.0, event.time_range.elapsed_us() - inner)) * _MICRO


def _kernel_seconds(event: Any, operator: str) -> list[tuple[str, float]]:
    """List kernels and seconds; those that no operator launched keep their names: Triton's, of a compiled module."""
    return [(kernel.name if operator == BETWEEN else operator, kernel.duration * _MICRO) for kernel in event.kernels]
