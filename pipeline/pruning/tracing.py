"""The dependency graph of a module: torch_pruning follows what autograd recorded of one run.

Fang et al., "DepGraph: Towards Any Structural Pruning", CVPR 2023.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from enginesmith.pipeline import user_line
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.pruning.following import Following

if TYPE_CHECKING:
    from torch_pruning import DependencyGraph

Run = Callable[[], tuple[Tensor, ...]]
"""Calls the module on its example, and returns the tensors that come out."""


def trace(model: nn.Module, run: Run) -> "tuple[DependencyGraph, Following]":
    """Run the module once and follow its values; parameters have to ask for gradients.

    Raises:
        ModelError: it does not run where gradients are recorded, no output can be followed, or other inputs may take
            a way through other layers.
    """
    import torch_pruning

    graph = torch_pruning.DependencyGraph()
    following = Following(model)
    try:
        with torch.enable_grad(), by_operators(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it could not follow is found out by trying
            graph.build_dependency(
                model,
                (),
                forward_fn=lambda *_: _watched(run, following),
                output_transform=lambda outputs: _followed(outputs, following),
                verbose=False,
            )
            _follow_splits(graph)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"the dependency graph of the model cannot be traced: {_told(error, following, _unknown(model))}",
            "structured pruning follows the gradients of one run through layers of torch.nn; "
            "`sparsify` needs no such graph",
        ) from error
    _hold_one_way(following)
    return graph, following


def _watched(run: Run, following: Following) -> tuple[Tensor, ...]:
    with following:
        return run()


def _hold_one_way(following: Following) -> None:
    """Refuse a forward that looks at values and leaves layers out: with other values it may call them."""
    left_out = following.not_called()
    if not following.read or not left_out:
        return
    raise ModelError(
        f"the forward decides by what values are, {next(iter(following.read))}, and does not call "
        f"{', '.join(left_out[:3])} on the example: what else reads the channels that would go cannot be known",
        "prune the ways through the model as models of their own, or decide outside of forward; "
        "`sparsify` needs no such graph",
    )


def _told(error: Exception, following: Following, more: str = "") -> str:
    """Where something was raised, and what."""
    line = user_line.raised_at(error)
    text = " ".join(str(error).split())[:300]
    return f"{following.described}{more}{type(error).__name__}: {text}{f' ({line})' if line else ''}"


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


def _followed(outputs: tuple[Tensor, ...], following: Following) -> list[Tensor]:
    found = [value for value in outputs if value.grad_fn is not None]
    following.came_out(found)
    if not found:
        why = f": values leave autograd {next(iter(following.left))}" if following.left else ""
        raise ModelError(
            f"no output of the model depends on its parameters in a way that gradients follow{why}",
            "take torch.no_grad(), detach(), NumPy and argmax out of forward, and out of what it calls",
        )
    return found


@contextlib.contextmanager
def by_operators() -> Iterator[None]:
    """Transformers of torch.nn take one fused operator in eval mode, which hides what is inside."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def failure(model: nn.Module, run: Run) -> tuple[tuple[Tensor, ...], str]:
    """What a run gives; or nothing, and why: the module that it fails in, what is raised there, and the line."""
    following = Following(model)
    try:
        with torch.no_grad(), by_operators(), following:
            return run(), ""
    except Exception as error:  # noqa: BLE001 - the user's forward, on sizes that it may not be written for
        return (), _told(error, following)
