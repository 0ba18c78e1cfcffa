"""Float and quantised computation side by side in one graph: what each group alone does to its output.

Every group is computed twice on the same exact inputs, as it is and in few bits; the graph gives the energy of the
result and of the difference. So one pass over the data tells the error that each group brings in, and none that it
passes on.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from enginesmith.pipeline.precision.groups import Group

if TYPE_CHECKING:
    import onnx_ir as ir

SIGNAL, NOISE = "signal", "noise"


def output_name(group: Group, what: str) -> str:
    """The joint graph's output that holds the energy of a group's result, or of its error; float32, shape []."""
    return f"{group.name}/{what}"


def side_by_side(floating: "ir.Model", quantised: "ir.Model", groups: Sequence[Group]) -> tuple[Group, ...]:
    """Turn the float graph into the joint one, in place; says which groups are in it.

    ``quantised`` is the same graph with each group quantised at its inputs alone, so that its values of the same name
    are the same values. It is taken apart.
    """
    ours = {value.name: value for node in floating.graph for value in node.outputs}
    ours |= {value.name: value for value in floating.graph.inputs}
    theirs = {value.name: value for node in quantised.graph for value in node.outputs}
    done = []
    outputs = []
    for group in groups:
        copied = _Copy(floating.graph, ours, group.output)
        twin = theirs.get(group.output)
        if twin is None or not copied.chain(twin):
            continue
        outputs += _energies(floating.graph, group, ours[group.output], copied.last)
        done.append(group)
    floating.graph.outputs.clear()
    floating.graph.outputs.extend(outputs)
    return tuple(done)


class _Copy:
    """Copies the nodes that make one value into another graph, down to the values that both graphs have."""

    def __init__(self, graph: "ir.Graph", known: "dict[str | None, ir.Value]", output: str) -> None:
        self._graph, self._known, self._output = graph, known, output
        self._made: dict[str | None, ir.Value] = {}

    @property
    def last(self) -> "ir.Value":
        """The copy of the value that was asked for."""
        return self._made[self._output]

    def chain(self, value: "ir.Value") -> bool:
        """Copy what makes a value; False where that is what the graph has already: nothing is quantised."""
        return self._value(value, outermost=True) is not self._known.get(self._output) and self._narrow

    _narrow = False

    def _value(self, value: "ir.Value", *, outermost: bool = False) -> "ir.Value":
        import onnx_ir as ir

        if value.name in self._made:
            return self._made[value.name]
        if value.name in self._known and not outermost:
            return self._known[value.name]
        node = value.producer()
        if node is None:
            return self._initialiser(value)
        self._narrow = self._narrow or "uantize" in node.op_type
        inputs = [one and self._value(one) for one in node.inputs]
        copy = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            name=f"{self._output}/{node.name}",
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name, new.type, new.shape = f"{self._output}/{old.name}", old.type, old.shape
            self._made[old.name] = new
        self._graph.append(copy)
        return self._made[value.name]

    def _initialiser(self, value: "ir.Value") -> "ir.Value":
        import onnx_ir as ir

        given = self._graph.initializers.get(value.name or "")
        if given is not None and given.dtype == value.dtype:  # a bias or a shape: the same in both
            return given
        copy = ir.Value(
            name=f"{self._output}/{value.name}", type=value.type, shape=value.shape, const_value=value.const_value
        )
        self._graph.register_initializer(copy)
        self._made[value.name] = copy
        return copy


def _energies(graph: "ir.Graph", group: Group, exact: "ir.Value", rounded: "ir.Value") -> "list[ir.Value]":
    import onnx_ir as ir

    difference = ir.node("Sub", [rounded, exact])
    squares = [
        ir.node("ReduceSumSquare", [value], {"keepdims": 0}, name=output_name(group, what))
        for value, what in ((exact, SIGNAL), (difference.outputs[0], NOISE))
    ]
    graph.extend([difference, *squares])
    for node, what in zip(squares, (SIGNAL, NOISE), strict=True):
        node.outputs[0].name = output_name(group, what)
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(())
    return [node.outputs[0] for node in squares]
