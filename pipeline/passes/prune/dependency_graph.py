"""Trace the dependency graph of a module, and note in the same run all that such a graph does not see.

torch_pruning follows the values that autograd recorded (Fang et al., "DepGraph: Towards Any Structural Pruning", CVPR
2023). Values leave autograd by ``detach``, NumPy or ``no_grad``, and are followed no further; a forward may decide by
values, and another input takes another way. Layers may not be called at all.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.torch import file_tracking
from enginesmith.pipeline.frameworks.torch.module import by_operators

if TYPE_CHECKING:
    from torch_pruning import DependencyGraph


_LEAVES: Mapping[Any, str] = {
    Tensor.detach: "detach()",
    Tensor.numpy: "numpy()",
    Tensor.data.__get__: ".data",  # type: ignore[attr-defined]
}
_READS: Mapping[Any, str] = {
    Tensor.__bool__: "bool()",
    Tensor.__int__: "int()",
    Tensor.__float__: "float()",
    Tensor.__index__: "an index",
    Tensor.item: "item()",
    Tensor.tolist: "tolist()",
}


@dataclass(frozen=True)
class Event:
    """Something that a forward does with a value."""

    how: str
    module: str
    """Path and type of the innermost module that was running; empty for the model itself."""
    line: str
    """``net.py:12``; empty where it is not known."""

    def __str__(self) -> str:
        """Describe it as a part of a sentence."""
        at = f" at {self.line}" if self.line else ""
        return f"by {self.how}{at} in {self.module or 'the forward of the model itself'}"


class ForwardHooks(TorchFunctionMode):
    """Watches a module within the block: the part that is running, those that were called, and blind spots."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._names = {module: f"{path} ({type(module).__name__})" for path, module in model.named_modules() if path}
        self._own = {id(value) for value in (*model.parameters(), *model.buffers())}
        self._weights: set[int] = set()
        self._running: list[nn.Module] = []
        self._hooks = ExitStack()
        self.called: set[nn.Module] = set()
        self.left: dict[Event, None] = {}
        """Events at which values left autograd."""
        self.read: dict[Event, None] = {}
        """Events at which Python looked at values, and may have decided by them."""

    def running(self) -> str:
        """Name the innermost module that is running; empty outside of all."""
        return self._names.get(self._running[-1], "") if self._running else ""

    def not_called(self) -> list[str]:
        """Name layers with weights that were not called, and whose weights nothing read that came out."""
        return [
            name
            for module, name in self._names.items()
            if module not in self.called
            and (own := {id(value) for value in module.parameters(recurse=False)})
            and not own & self._weights
        ]

    def note_weights(self, outputs: Sequence[Tensor]) -> None:
        """Note the weights that outputs depend on."""
        waiting, past_functions = [value.grad_fn for value in outputs], set[Any]()
        while waiting:
            if (function := waiting.pop()) is None or function in past_functions:
                continue
            past_functions.add(function)
            self._weights.add(id(getattr(function, "variable", None)))
            waiting += [before for before, _ in function.next_functions]

    def unfollowed(self, followed: Callable[[nn.Module], bool]) -> Iterator[tuple[nn.Module, str]]:
        """Name layers of channels that are not ``followed``, and why."""
        for module in self._model.modules():
            if not isinstance(module, (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding)) or followed(module):
                continue
            if self._names.get(module) in self.not_called():
                yield module, "the run on the example does not call it"
            elif module in self.called and self.left:
                yield module, f"what it makes leaves autograd, {next(iter(self.left))}"

    def _enter(self, module: nn.Module, given: Any) -> None:
        if not torch.is_grad_enabled() and self._recording:
            self.left[Event("no_grad()", self.running(), file_tracking.find_user_line())] = None
        self._running.append(module)
        self.called.add(module)

    def _leave(self, module: nn.Module, given: Any, outputs: Any) -> None:
        self._running.pop()
        if not self._recording or not torch.is_grad_enabled() or self.left:
            return
        values = [value for value in _tensors(outputs) if value.is_floating_point()]
        before = any(value.requires_grad for value in (*_tensors(given), *module.parameters()))
        if values and before and not any(value.requires_grad for value in values):
            self.left[Event("an operation without a gradient", self._names.get(module, ""), "")] = None

    def __enter__(self) -> Self:
        self._recording = torch.is_grad_enabled()
        for module in self._model.modules():
            self._hooks.enter_context(module.register_forward_pre_hook(self._enter))
            self._hooks.enter_context(module.register_forward_hook(self._leave))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        events = self.read if func in _READS else self.left if func in _LEAVES and args[0].requires_grad else None
        if events is not None and id(args[0]) not in self._own:
            how = _READS.get(func) or _LEAVES[func]
            events[Event(how, self.running(), file_tracking.find_user_line())] = None
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for element in value.values() if isinstance(value, dict) else value:
            yield from _tensors(element)


Run = Callable[[], tuple[Tensor, ...]]
"""Calls the module on its example, and returns the tensors that come out."""


def trace(model: nn.Module, run: Run) -> "tuple[DependencyGraph, ForwardHooks]":
    """Run the module once and follow its values; parameters have to ask for gradients.

    Raises:
        ModelError: it does not run where gradients are recorded, no output can be followed, or other inputs may take
            a way through other layers.
    """
    import torch_pruning

    graph = torch_pruning.DependencyGraph()
    hooks = ForwardHooks(model)

    def forward(*_: Any) -> tuple[Tensor, ...]:
        with hooks:
            return run()

    try:
        with torch.enable_grad(), by_operators(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # groups that it could not follow are found by trying
            graph.build_dependency(
                model,
                (),
                forward_fn=forward,
                output_transform=lambda outputs: _with_gradients(outputs, hooks),
                verbose=False,
            )
            _follow_splits(graph)
    except ModelError:
        raise
    except Exception as error:
        why = _describe_failure(error, hooks, _list_unknown(model))
        raise ModelError(
            f"the dependency graph of the model cannot be traced: {why}",
            "structured pruning follows the gradients of one run through layers of torch.nn; "
            "`sparsify` needs no such graph",
        ) from error
    left_out = hooks.not_called()
    if hooks.read and left_out:  # with other values the forward may call them
        raise ModelError(
            f"the forward decides by what values are, {next(iter(hooks.read))}, and does not call "
            f"{', '.join(left_out[:3])} on the example: what else reads the channels that would go cannot be known",
            "prune the ways through the model as models of their own, or decide outside of forward; "
            "`sparsify` needs no such graph",
        )
    return graph, hooks


def _describe_failure(error: Exception, hooks: ForwardHooks, more: str = "") -> str:
    line, module = file_tracking.find_user_line(error), hooks.running()
    text = " ".join(str(error).split())[:300]
    return f"{f'in {module}: ' if module else ''}{more}{type(error).__name__}: {text}{f' ({line})' if line else ''}"


def _follow_splits(graph: "DependencyGraph") -> None:
    """Tell torch_pruning 1.6 of splits along the last axis of a Linear's output, where it looks at the second only."""
    from torch_pruning import ops
    from torch_pruning.dependency import index_mapping, shape_infer

    changed = False
    for node in graph.module2node.values():
        if node.type != ops.OPTYPE.SPLIT or not all(isinstance(source.module, nn.Linear) for source in node.inputs):
            continue
        sizes = tuple(node.grad_fn._saved_self_sym_sizes)
        if len(sizes) < 3 or node.grad_fn._saved_dim % (1 << 64) not in (len(sizes) - 1, (1 << 64) - 1):
            continue
        given = getattr(node.grad_fn, "_saved_split_sizes", None)
        each = getattr(node.grad_fn, "_saved_split_size", sizes[-1])
        parts = list(given) if given else [min(each, sizes[-1] - start) for start in range(0, sizes[-1], each)]
        node.grad_fn = SimpleNamespace(_saved_self_sizes=sizes, _saved_split_sizes=parts, _saved_dim=1)
        node.enable_index_mapping = changed = True
    if changed:
        shape_infer.init_shape_information(graph)
        index_mapping.update_index_mapping(graph)


def _list_unknown(model: nn.Module) -> str:
    """Name layers that hold weights and have no channels to follow; a part of a sentence."""
    unknown = [
        f"{path} ({type(module).__name__})"
        for path, module in model.named_modules()
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase))
        or (not type(module).__module__.startswith("torch.nn") and any(True for _ in module.parameters(recurse=False)))
    ]
    return f"there is {', '.join(unknown[:3])}: " if unknown else ""


def _with_gradients(outputs: tuple[Tensor, ...], hooks: ForwardHooks) -> list[Tensor]:
    followed = [value for value in outputs if value.grad_fn is not None]
    hooks.note_weights(followed)
    if not followed:
        why = f": values leave autograd {next(iter(hooks.left))}" if hooks.left else ""
        raise ModelError(
            f"no output of the model depends on its parameters in a way that gradients follow{why}",
            "take torch.no_grad(), detach(), NumPy and argmax out of forward, and out of what it calls",
        )
    return followed


def run_or_explain(model: nn.Module, run: Run) -> tuple[tuple[Tensor, ...], str]:
    """Run a module for its outputs; or return none, and the module that it fails in, the error, and the line."""
    hooks = ForwardHooks(model)
    try:
        with torch.no_grad(), by_operators(), hooks:
            return tuple(value.detach() for value in run()), ""  # a view of a parameter would keep its gradient
    except Exception as error:  # noqa: BLE001 - the user's forward, on sizes that it may not be written for
        return (), _describe_failure(error, hooks)
