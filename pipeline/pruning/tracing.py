"""The dependency graph of a module: torch_pruning follows what autograd recorded of one run.

Fang et al., "DepGraph: Towards Any Structural Pruning", CVPR 2023.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import ModelError

if TYPE_CHECKING:
    from torch_pruning import DependencyGraph

Run = Callable[[], tuple[Tensor, ...]]
"""Calls the module on its example, and returns the tensors that come out."""


def trace(model: nn.Module, run: Run) -> "DependencyGraph":
    """Run the module once and follow its values; parameters have to ask for gradients.

    Raises:
        ModelError: it does not run where gradients are recorded, or no output can be followed.
    """
    import torch_pruning

    graph = torch_pruning.DependencyGraph()
    where = _Innermost(model)
    try:
        with torch.enable_grad(), _by_operators(), warnings.catch_warnings(), where:
            warnings.simplefilter("ignore")  # what it could not follow is found out by trying
            graph.build_dependency(model, (), forward_fn=lambda *_: run(), output_transform=_followed, verbose=False)
            _follow_splits(graph)
            return graph
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"the dependency graph of the model cannot be traced: {where.described}{_unknown(model)}"
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            "structured pruning follows the gradients of one run through layers of torch.nn; "
            "`sparsify` needs no such graph",
        ) from error


def _follow_splits(graph: "DependencyGraph") -> None:
    """Tell torch_pruning 1.6 of splits along the last axis of a Linear's output, where it looks at the second only."""
    from torch_pruning import ops
    from torch_pruning.dependency import index_mapping, shape_infer

    changed = False
    for node in graph.module2node.values():
        if node.type != ops.OPTYPE.SPLIT or not all(isinstance(one.module, nn.Linear) for one in node.inputs):
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


def _unknown(model: nn.Module) -> str:
    """Which layers there are that hold weights and have no channels to be followed; a part of a sentence."""
    found = [
        f"{path} ({type(module).__name__})"
        for path, module in model.named_modules()
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase))
        or (_holds(module) and not type(module).__module__.startswith("torch.nn"))
    ]
    return f"there is {', '.join(found[:3])}: " if found else ""


def _holds(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _followed(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    found = [value for value in outputs if value.grad_fn is not None]
    if not found:
        raise ModelError(
            "no output of the model depends on its parameters in a way that gradients follow",
            "take torch.no_grad(), detach() and argmax out of forward, and out of what it calls",
        )
    return found


@contextlib.contextmanager
def _by_operators() -> Iterator[None]:
    """Transformers of torch.nn take one fused operator in eval mode, which hides what is inside."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Innermost:
    """Which module was running when something was raised."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running: list[str] = []
        self._hooks: list[Any] = []

    @property
    def described(self) -> str:
        """The beginning of a sentence, or nothing."""
        return f"in {self._running[-1]}: " if self._running else ""

    def __enter__(self) -> "_Innermost":
        for path, module in self._model.named_modules():
            if path:
                name = f"{path} ({type(module).__name__})"
                self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)))
                self._hooks.append(module.register_forward_hook(lambda *_: self._left()))
        return self

    def _left(self) -> None:
        self._running.pop()

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def failure(model: nn.Module, run: Run) -> tuple[tuple[Tensor, ...], str]:
    """What a run gives; or nothing, and why: the module that it fails in and what is raised there."""
    where = _Innermost(model)
    try:
        with torch.no_grad(), _by_operators(), where:
            return run(), ""
    except Exception as error:  # noqa: BLE001 - the user's forward, on sizes that it may not be written for
        return (), f"{where.described}{type(error).__name__}: {' '.join(str(error).split())[:200]}"
