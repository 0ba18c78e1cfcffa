"""Run a module as another implementation may compute it: the results of its operations differ by some rounding."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from enginesmith.pipeline.tensors import INFINITE, find_fill

_CHOOSING = (
    *(
        "max",
        "min",
        "amax",
        "amin",
        "aminmax",
        "cummax",
        "cummin",
        "topk",
        "sort",
        "kthvalue",
        "median",
        "where",
        "clone",
    ),
    *("_to_copy", "to"),
    *("max_pool1d", "max_pool2d", "max_pool2d_with_indices", "max_pool3d", "adaptive_max_pool2d", "contiguous"),
    *("gather", "index", "index_select", "take", "take_along_dim", "embedding", "cat", "stack", "hstack", "vstack"),
    *("pad", "constant_pad_nd", "masked_fill", "masked_select", "repeat", "repeat_interleave", "roll", "flip", "tril"),
    *("triu", "scatter", "index_put", "slice_scatter", "select_scatter"),
    *("full", "full_like", "new_full", "ones", "ones_like", "new_ones"),
)
"""Operations whose results are numbers that they were given: nothing is rounded."""
_CHOOSING_ROWS = (
    *("topk", "sort", "argsort", "msort", "kthvalue", "nonzero", "nonzero_static", "argwhere", "masked_select"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
)
"""Operations that choose or sort rows by values; so does indexing with a mask."""
_MASKS = (torch.bool, torch.uint8)
_NAMESPACES = ("aten", "prims", "prim")
_PROBABILITIES = ("sigmoid", "softmax", "_softmax")
_UP_TO_ONE = (*_PROBABILITIES, "tanh", "erf")
_APPROXIMATE = (*_UP_TO_ONE, "silu", "gelu", "mish", "softplus", "elu", "selu", "hardswish", "log_sigmoid")
"""Functions that runtimes compute by polynomials, whose error is one of the whole range."""
_SUMS_OF_PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "mv", "dot"),
    *("convolution", "_convolution"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
"""Operations of which each result is a sum of products; none of them mixes the numbers of another result in."""
_MATRIX_PRODUCTS = _SUMS_OF_PRODUCTS[:8]
_EXACT_SUMS = (*_MATRIX_PRODUCTS, "sum", "nansum", "cumsum", "prod", "cumprod", "scatter_add", "index_add")
"""Operations that are exact in any order while whole numbers are small; convolutions may be computed in fractions."""
_DEVIATIONS = 4.0
"""The largest of a tensor's numbers, as a multiple of their root mean square: sums are changed by as much of theirs."""
_MOST_OPERATIONS = 100_000
_NEARER_TO_0, _LEAST_FILL = 16.0, 900.0
_INWARDS = 4.0
"""Steps by which functions that end at 0 or 1 are moved away from there, so that changes do not lead beyond."""


def answer_perturbed(
    forward: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    step: float,
    seed: int,
    device: str = "cpu",
) -> Sequence[torch.Tensor]:
    """Answer with changed operations, as :class:`Perturbed` changes them; with nothing where the module then fails."""
    try:
        with Perturbed(step, seed, device):
            return forward(*inputs)
    except Exception:  # noqa: BLE001 - the module's own, as where sizes that it computes in floats no longer fit
        if dynamo := sys.modules.get("torch._dynamo"):  # what it compiled of a torch.cond meanwhile fails later
            dynamo.reset()
        return ()


def may_choose_rows(forward: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> bool:
    """Tell whether a module runs an operation that chooses or sorts rows by values; True where that cannot be seen."""
    search = _ChoiceFinder()
    try:
        with search:
            forward(*inputs)
    except Exception:  # noqa: BLE001 - the module's own, or a branch, for which the mode has no rule
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()
        return True
    return search.found


class _ChoiceFinder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watch for operations whose results depend on the order of values: of what is not PyTorch's own, any may."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        chosen = name == "index" and any(index is not None and index.dtype in _MASKS for index in args[1])
        self.found = self.found or chosen or name in _CHOOSING_ROWS or func.namespace not in _NAMESPACES
        return func(*args, **(kwargs or {}))


class Perturbed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Change what operations compute at random: sums by ``step`` of the range of all, products by that of each.

    Sums of products are changed by the size of their own products: columns of a matrix may have different units.
    Negative steps change everything the other way. No number changes its sign, and 0 stays 0, but where a function that
    ends at 1 is far from it. Masks and counts stay as they are, also where all places are masked.

    Raises:
        RuntimeError: there are too many operations, as in a loop that ends where two numbers are equal.
    """

    def __init__(self, step: float, seed: int, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step, self._generator, self._left = step, torch.Generator(device).manual_seed(seed), _MOST_OPERATIONS

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self._left -= 1
        if self._left < 0:
            raise RuntimeError(f"there are more than {_MOST_OPERATIONS} operations")
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        views = any(value.alias_info is not None for value in func._schema.returns)
        if views or name in _CHOOSING or not any(isinstance(arg, (torch.Tensor, list, tuple)) for arg in args):
            return result
        by_element = torch.Tag.pointwise in func.tags and name not in _APPROXIMATE
        if name in _EXACT_SUMS and _is_exact_sum(func, args, kwargs or {}, result):
            return result
        spread = _compute_spread(func, args, kwargs or {}) if name in _SUMS_OF_PRODUCTS else None

        def change(value: object) -> object:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim and value.numel():
                return self._change(value, name, spread, by_element=by_element)
            return value

        return type(result)(map(change, result)) if type(result) in (tuple, list) else change(result)

    def _change(self, value: torch.Tensor, name: str, spread: torch.Tensor | None, *, by_element: bool) -> torch.Tensor:
        floats, largest = value.float(), float(value.abs().max())
        if by_element and _are_exact(value):
            return value  # a mask, or counts
        numbers = None
        if not largest < _LEAST_FILL:  # NaN, infinity, or what may fill masked places
            sizes = floats.abs()
            numbers = sizes.isfinite() & (sizes < find_fill([sizes.cpu().numpy()]))
            alike = sizes == (largest := float(sizes.where(numbers, 0).max()))
            if largest >= INFINITE and int(alike.sum()) > 1:  # else a row of nothing else would not be one any more
                numbers &= ~alike
                largest = float(sizes.where(numbers, 0).max())
        step = self._step * max(1.0, 2 * torch.finfo(value.dtype).eps / abs(self._step))
        noise = torch.randn(value.shape, generator=self._generator, device=value.device).mul_(step)
        if by_element:
            moved = noise.mul_(floats).add_(floats)
        elif name in _UP_TO_ONE:
            inwards = torch.where(floats.abs() > 0.5, -floats.sign(), float(name in _PROBABILITIES))
            moved = noise.add_(inwards, alpha=_INWARDS * abs(step)).add_(floats)
            moved = torch.where(moved * floats < 0, floats / _NEARER_TO_0, moved)
        else:
            size: torch.Tensor | float = largest
            if spread is not None:
                size = torch.maximum(floats.abs(), _DEVIATIONS * spread).nan_to_num(largest, largest).clamp(max=largest)
            moved = noise.mul_(size).add_(floats)
            moved = torch.where(moved * floats <= 0, floats / _NEARER_TO_0, moved)
        return moved.to(value.dtype) if numbers is None else torch.where(numbers, moved.to(value.dtype), value)


def _are_exact(value: torch.Tensor) -> bool:
    """Tell whether all are whole numbers as large as all are exact up to."""
    return bool((value.abs() <= 2 / torch.finfo(value.dtype).eps).all()) and bool((value == value.round()).all())


def _is_exact_sum(
    func: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object], result: object
) -> bool:
    """Tell whether no implementation rounds sums or products: of whole numbers alone, whose sizes are exact together.

    Sums of sizes are no less than any part of a sum, in whichever order it is computed; so are products without zeros.
    """
    if not (isinstance(result, torch.Tensor) and result.is_floating_point() and _are_exact(result)):
        return False
    product = "prod" in func.__name__

    def measure(value: object) -> object:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.abs().clamp(min=1) if product else value.abs()

    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if not all(_are_exact(value) for value in given if value.is_floating_point()):
        return False
    factors = {name: abs(value) for name, value in kwargs.items() if isinstance(value, int | float) and name != "dim"}
    measured = {name: measure(value) for name, value in kwargs.items()}
    return _are_exact(func(*map(measure, args), **{**measured, **factors}))


def _compute_spread(
    func: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> torch.Tensor | None:
    """Compute the root of the sum of squared products, for each result of an operation; None where it has no such form.

    Rounding moves a sum of products by about that times the error of one of them.
    """

    def square(value: object) -> object:
        return value.float().square() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    squared = func(*map(square, args), **{name: square(value) for name, value in kwargs.items()})
    return squared.sqrt() if isinstance(squared, torch.Tensor) else None
