"""Input channels of products put in an order in which 2:4 keeps more, and what makes them in the same one.

The function stays: a sum does not depend on the order of its terms but in the last bits. What cannot be followed
exactly (:mod:`enginesmith.pipeline.sparsity.coupling`) keeps its order.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.pipeline.sparsity import candidates, permutation
from enginesmith.pipeline.sparsity.coupling import Coupled, coupled
from enginesmith.pipeline.sparsity.options import Sparsity
from enginesmith.pipeline.sparsity.sparsifying import dense, numbers
from enginesmith.pipeline.tensors import Array

if TYPE_CHECKING:
    import onnx_ir as ir

_MOST_ROWS = 1 << 14
"""Rows of one weight that the search is given; more of them are thinned out evenly."""


@dataclass
class Permuted:
    """What was put in order; weights are those that are to be 2:4."""

    weights: int = 0
    orders: int = 0
    kept_before: float = 0.0
    """Magnitude that 2:4 keeps of those weights, without and with it; of thinned rows where there are many."""
    kept_after: float = 0.0
    left: dict[str, str] = field(default_factory=dict)
    """Weight → why its channels keep their order."""


def permute(model: "ir.Model", asked: Sparsity) -> Permuted:
    """Put channels in order, in place; shapes of values have to be in the graph."""
    found = candidates.find(model)
    stay = dense(found, asked)
    wanted = {one.value for one in found if one.name not in stay}
    orders: dict[tuple[ir.Value, int], Array] = {}
    seen: set[tuple[ir.Value, int]] = set()
    done = Permuted()
    for one in found:
        if one.value not in wanted or (one.value, one.axis) in seen:
            continue
        together = coupled(one.nodes[0]) if len(one.nodes) == 1 else "several products share it"
        if isinstance(together, str):
            done.left[one.name] = together
            continue
        seen |= set(together.slots)
        order = _order(together, wanted, done)
        if order is not None and not set(together.slots) & set(orders):
            orders |= dict.fromkeys(together.slots, order)
            done.orders += 1
    for value in {value: None for value, _ in orders}:
        _reorder(value, [(axis, order) for (other, axis), order in orders.items() if other is value])
    return done


def _order(together: Coupled, wanted: "set[ir.Value]", done: Permuted) -> Array | None:
    """The order to bring channels into; None where the given one is as good."""
    readers = [(value, axis) for value, axis in together.readers if value in wanted]
    if not readers:
        return None
    found = permutation.search(np.concatenate([_rows(value, axis) for value, axis in readers]))
    done.kept_before += found.before
    done.kept_after += found.after
    if found.after <= found.before:
        done.left |= {str(value.name): "no other order keeps more" for value, _ in readers}
        return None
    done.weights += len(readers)
    return found.order


def _rows(value: "ir.Value", axis: int) -> Array:
    """Magnitudes of a weight, one row for each sum that it takes part in."""
    weight = np.moveaxis(numbers(value), axis, -1)
    rows = np.abs(np.ascontiguousarray(weight).reshape(-1, weight.shape[-1]).astype(np.float32))
    return rows[:: -(-len(rows) // _MOST_ROWS)]


def _reorder(value: "ir.Value", orders: "list[tuple[int, Array]]") -> None:
    """Put a constant in order along some of its axes when it is read."""
    import onnx_ir as ir

    given, name = value.const_value, value.name
    assert given is not None

    def compute() -> "ir.TensorProtocol":
        ordered = given.numpy()
        for axis, order in orders:
            ordered = np.take(ordered, order, axis)
        return ir.tensor(np.ascontiguousarray(ordered), name=name)

    value.const_value = ir.LazyTensor(compute, dtype=given.dtype, shape=ir.Shape(given.shape.numpy()), name=name)
