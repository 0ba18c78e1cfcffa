"""Find the values of a graph whose rows are chosen by values, so that rounding may change their number and order."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import numpy as np

from enginesmith.pipeline.frameworks.onnx import traversal

if TYPE_CHECKING:
    import onnx

SAME_NUMBERS = ("Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "Expand")
"""Operators that hand on their numbers, in another shape, order or type."""
_SELECTING = {"NonMaxSuppression": 0, "NonZero": 0, "Compress": 0, "TopK": 1, "Unique": 0}
"""Operators that choose by value, and their first output that depends on the order (a TopK's values are sorted)."""
_LISTING = {"NonZero": 0, "Unique": 0, "Compress": 1}
"""Selecting operators that list what has certain values, and the input with these: equal values give equal lists, so
that an answer changes only where rounding changes the values. TopK is none: against ONNX, not all libraries put the
first of equal values first."""
_IN_ORDER = ("NonZero", "Compress")
"""Listing operators that keep the order of places."""
_COUNTING = (*_LISTING, "NonMaxSuppression")
"""Operators whose results have as many rows as values are of a kind."""
_SIZING = {
    **dict.fromkeys(("Range", "ConstantOfShape"), 0),
    **dict.fromkeys(("Expand", "Reshape", "Tile", "Slice", "Pad", "TopK", "OneHot", "Upsample", "Split"), 1),
    "CenterCropPad": 1,
    "Resize": 2,
}
"""Operators that read sizes, or places up to which is cut, and their first input with these."""
_SCATTERING = ("ScatterND", "ScatterElements", "Scatter")
_GATHERING = ("Gather", "GatherElements", "GatherND")
SHAPES = ("Shape", "Size")
_COPYING = ("Identity", "Cast")
_REDUCING = ("ArgMax", "ArgMin", "GlobalAveragePool", "GlobalMaxPool")
_COMPARING = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
_EXACT = frozenset(
    (*_COMPARING, "Not", "And", "Or", "Xor", "Where", "Add", "Sub", "Mul", "Max", "Min", "Neg", "Abs", "Sign", "Clip")
    + ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand", "Tile", "Slice", "Pad")
    + ("Split", "Concat", "Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "OneHot", "Trilu")
    + ("ReduceSum", "ReduceMax", "ReduceMin", "CumSum", "Range", "ConstantOfShape", "NonZero", "Compress", "Unique")
)
"""Operators that round nothing as long as all numbers are whole."""
_SAME_THROUGHOUT = (*SAME_NUMBERS, "Tile", "Neg", "Not")
_WHOLE = ("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
_SMALL = 1 << 12
"""Numbers of a constant, and bytes of an attribute, up to which it is looked at."""
_Choice = tuple[str, int]
"""Operator that chose rows, with a number; those that do the same with the same values have the same one."""
_Choices = frozenset[_Choice]
_NONE: _Choices = frozenset()


def find_unordered(graph: "onnx.GraphProto") -> dict[str, Literal["rows", "positions"]]:
    """Find the outputs that depend on rows that NonMaxSuppression, TopK, NonZero, Compress or Unique chose by values.

    Not those behind a reduction, which do not depend on the order; not what is computed from shapes alone; not what
    others than a TopK choose by whole numbers of the inputs, which nothing rounds; nor what rows are written into at
    the places that they were chosen from, nor rows that the inverse of a TopK's indices puts back there. The values of
    a TopK count where what was chosen by its indices is an output, too.
    """
    return _ChoiceSearch(graph).find_outputs()


def find_chosen(graph: "onnx.GraphProto") -> frozenset[str]:
    """Find all values with rows that were chosen by values, as :func:`find_unordered` finds outputs."""
    return _ChoiceSearch(graph).find_values()


def find_counted(graph: "onnx.GraphProto") -> frozenset[str]:
    """Find all values whose sizes may depend on other values: on how many are chosen, or on a size that is computed.

    Unlike :func:`find_chosen`, these may be behind a choice by whole numbers, not behind a TopK of a constant number.
    """
    varying = {value.name for value in graph.input} - {weight.name for weight in graph.initializer}
    counted = set[str]()
    for node in graph.node:
        read, kind = set(traversal.list_reads(node)), node.op_type
        if read.isdisjoint(varying) or (kind in SHAPES and read.isdisjoint(counted)):
            continue
        varying.update(node.output)
        sizing = {name for name in node.input[_SIZING.get(kind, len(node.input)) :] if name in varying}
        counts = any(inner.op_type in _COUNTING for inner in traversal.walk([node]))
        shaping = set(node.input[:1]) if kind in _SCATTERING else read
        if counts or sizing or not shaping.isdisjoint(counted):
            counted.update(node.output)
    return frozenset(counted)


class _ChoiceSearch:
    """Follow through a graph in which values the order of rows depends on other values."""

    def __init__(self, graph: "onnx.GraphProto") -> None:
        self._outputs = [value.name for value in graph.output]
        self._varying = {value.name for value in graph.input} - {weight.name for weight in graph.initializer}
        self._chosen, self._sorted = dict[str, _Choices](), dict[str, _Choices]()
        self._orders, self._inverses = dict[str, _Choice](), dict[str, _Choice]()
        """Indices of a TopK, and the ranks that put rows which were gathered by them back, each with its choice."""
        self._positions, self._exact, self._fractions, self._uniform, self._counting = (set[str]() for _ in range(5))
        self._numbers = dict[object, int]()
        """A number for each value; those that are computed alike have the same one."""
        for value in graph.input:
            self._look_at_input(value)
        for weight in graph.initializer:
            self._look_at_constant(weight.name, weight)
        for node in graph.node:
            self._look_at_node(node)

    def find_outputs(self) -> dict[str, Literal["rows", "positions"]]:
        """Find the outputs that have such rows."""
        chosen = self.find_values()
        return {name: "positions" if name in self._positions else "rows" for name in self._outputs if name in chosen}

    def find_values(self) -> frozenset[str]:
        """Find the values that have such rows; and those sorted by value, where something chosen is an output."""
        return frozenset(self._chosen if self._chosen.keys().isdisjoint(self._outputs) else self._chosen | self._sorted)

    def _look_at_input(self, value: "onnx.ValueInfoProto") -> None:
        import onnx

        if value.name in self._varying and onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) in _WHOLE:
            self._exact.add(value.name)

    def _look_at_constant(self, name: str, tensor: "onnx.TensorProto") -> None:
        """Mark whole numbers, a single one that is none, numbers that are all the same, and those that count from 0."""
        import onnx
        from onnx import numpy_helper

        if onnx.TensorProto.DataType.Name(tensor.data_type) in _WHOLE:
            self._exact.add(name)
        if tensor.data_location == onnx.TensorProto.EXTERNAL or not 0 < np.prod(tensor.dims, dtype=int) <= _SMALL:
            return
        numbers = numpy_helper.to_array(tensor).reshape(-1)
        if numbers.dtype.kind == "f" and numbers.size == 1:
            (self._exact if numbers[0] == np.round(numbers[0]) else self._fractions).add(name)
        if (numbers == numbers[0]).all():
            self._uniform.add(name)
        row = [*tensor.dims[-1:]] or [1]
        if numbers.dtype.kind == "i" and (numbers.reshape(-1, *row) == np.arange(*row)).all():
            self._counting.add(name)

    def _look_at_node(self, node: "onnx.NodeProto") -> None:
        read, kind = set(traversal.list_reads(node)), node.op_type
        self._number(node)
        self._look_at_values(node)
        if read.isdisjoint(self._varying) or kind in SHAPES:
            return
        self._varying.update(node.output)
        if kind == "NonMaxSuppression" or (kind in _COPYING and not read.isdisjoint(self._positions)):
            self._positions.update(node.output)
        before = self._find_choices(read)
        if kind in _SELECTING:
            first = _SELECTING[kind]
            fixed = kind in _LISTING and node.input[_LISTING[kind]] in self._exact
            choice = (kind, self._numbers[node.output[first]])
            own = before if fixed else before | {choice}
            if kind == "TopK":
                self._orders[node.output[first]] = choice
            self._mark(self._chosen, node.output[first:], own)
            self._mark(self._sorted, node.output[:first], own)
        elif any(inner.op_type in _SELECTING for inner in traversal.walk([node])):
            self._mark(self._chosen, node.output, before | {(kind, self._numbers[node.output[0]])})
        elif kind in _SCATTERING and self._places_are_chosen_alone(node):
            return
        elif kind in _GATHERING and self._inverses.get(node.input[1]) in (moved := self._find_choices(node.input[:1])):
            self._mark(self._chosen, node.output, moved - {self._inverses[node.input[1]]})
        elif not read.isdisjoint(self._chosen) and not kind.startswith("Reduce") and kind not in _REDUCING:
            self._mark(self._chosen, node.output, before)
        elif read.isdisjoint(self._chosen):
            self._mark(self._sorted, node.output, before)

    def _find_choices(self, names: Iterable[str]) -> _Choices:
        return _NONE.union(*(self._chosen.get(name, _NONE) | self._sorted.get(name, _NONE) for name in names))

    @staticmethod
    def _mark(choices: dict[str, _Choices], names: Iterable[str], own: _Choices) -> None:
        if own:
            choices.update(dict.fromkeys(names, own))

    def _places_are_chosen_alone(self, node: "onnx.NodeProto") -> bool:
        """Tell whether a scatter writes the same whatever the order of its indices, into rows whose order is fixed.

        So it does if each update was chosen along with its index, since such pairs move together, or if all updates are
        the same. NonZero and Compress keep the order of places, so that no row of other updates changes its place.
        """
        given, indices, updates = node.input[:3]
        placed, moved = self._chosen.get(indices, _NONE), self._find_choices([updates])
        if not placed or self._find_choices([given]):
            return False
        if moved:
            return moved == placed
        return updates in self._uniform or all(operator in _IN_ORDER for operator, _ in placed)

    def _number(self, node: "onnx.NodeProto") -> None:
        """Give the node's results a number; large constants, and nodes with subgraphs, are alike to none."""
        given: list[object] = [self._numbers.setdefault(name, len(self._numbers)) for name in node.input]
        alone = any(entry.HasField("g") or entry.ByteSize() > _SMALL for entry in node.attribute)
        settings = [] if alone else sorted(entry.SerializeToString() for entry in node.attribute)
        own = node.output[0] if alone else ""
        for position, name in enumerate(node.output):  # an output that nobody asked for has no name
            key = (node.domain, node.op_type, own, *given, *settings, position)
            self._numbers[name] = self._numbers.setdefault(key, len(self._numbers))

    def _look_at_values(self, node: "onnx.NodeProto") -> None:
        """Mark results that are exact, or the same throughout."""
        given, kind = {name for name in node.input if name}, node.op_type
        if kind == "Constant":
            for entry in node.attribute:
                if entry.name == "value":
                    self._look_at_constant(node.output[0], entry.t)
        known = self._exact | self._fractions if kind in _COMPARING else self._exact
        exact = kind in _EXACT and bool(given) and given <= known
        if exact or (kind in SHAPES and given.isdisjoint(self._chosen)):
            self._exact.update(node.output)
        if kind == "ConstantOfShape" or (kind in _SAME_THROUGHOUT and node.input[0] in self._uniform):
            self._uniform.update(node.output)
        self._look_at_order(node)

    def _look_at_order(self, node: "onnx.NodeProto") -> None:
        """Mark results that count from 0, and those that are a TopK's indices or their inverse: counts put at these."""
        kind, first = node.op_type, next(iter(node.input), "")
        if kind in SAME_NUMBERS:
            for known in (self._orders, self._inverses):
                known.update(dict.fromkeys(node.output, known[first]) if first in known else {})
        if first in self._counting and (kind in SAME_NUMBERS or kind == "Range"):
            self._counting.update(node.output)
        if kind in _SCATTERING and node.input[1] in self._orders and node.input[2] in self._counting:
            self._inverses[node.output[0]] = self._orders[node.input[1]]
