"""Measure what each group alone in few bits does, to its own output and to the answers.

For its own output, every group is computed twice on the same exact inputs, as it is and in few bits, side by side in
one graph, which gives the energy of the result and of the difference. So one pass over the data tells the error that
each group brings in, and none that it passes on. What rounding its output does, as some engines have to, is measured in
what other products read of it: a normalization in between makes small channels as large as the others, and their errors
too. For the answers, a graph has a switch for each group.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from enginesmith.pipeline.frameworks.fidelity import average_over_samples, find_audible
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.quantize import cast_pairs, layers, upsampling
from enginesmith.pipeline.passes.quantize.cast_pairs import find_adder
from enginesmith.pipeline.passes.quantize.layers import CONVOLUTIONS, PRODUCTS, QuantizableOp
from enginesmith.pipeline.passes.quantize.writer import Writer
from enginesmith.pipeline.tensors import Array, Feeds

SIGNAL, NOISE, SUM, COUNT = "signal", "noise", "sum", "count"
_SQUARES = "written squares"
_READ_SIGNAL, _READ_NOISE = "read signal", "read noise"
_READS = 4
"""Values read behind a group in which the rounding of its output is looked at, the nearest first."""
SWITCHES = "enginesmith/switches"
_PAIR = ("QuantizeLinear", "DequantizeLinear")
_OPSET_OF_AXES_INPUT = 13
"""The first opset in which ReduceSum reads its axes; before, they are an attribute."""


def output_name(group: str, what: str) -> str:
    """Return the joint graph's output that holds something of a group, in float32.

    The energies of its result and of its error, and how many numbers there are, shape []; for products whose rank is
    known, also the sum of the error by channel, [channels].
    """
    return f"{group}/{what}"


def add_layerwise_error(
    floating: "ir.Model", quantized: "ir.Model", groups: Sequence[QuantizableOp]
) -> tuple[QuantizableOp, ...]:
    """Turn the float graph into the joint one, in place, and return the groups that are in it.

    ``quantized`` is the same graph with each group quantized at its inputs alone, so that its values of the same name
    are the same values. It is taken apart.
    """
    ours = {value.name: value for node in floating.graph for value in node.outputs}
    ours |= {value.name: value for value in floating.graph.inputs}
    theirs = {value.name: value for node in quantized.graph for value in node.outputs if value.name}
    done: list[QuantizableOp] = []
    outputs: list[ir.Value] = []
    for group in groups:
        twin = theirs.get(group.output)
        rounded = _Copy(floating.graph, ours, group.output).copy(twin) if twin is not None else None
        if rounded is None:
            continue
        exact = ours[group.output]
        difference = ir.node("Sub", [rounded, exact])
        error = difference.outputs[0]
        size = ir.node("Size", [error])
        floating.graph.extend([difference, size])
        reductions: list[tuple[ir.Node, str, tuple[str, ...]]] = [
            (ir.node("ReduceSumSquare", [exact], {"keepdims": 0}), SIGNAL, ()),
            (ir.node("ReduceSumSquare", [error], {"keepdims": 0}), NOISE, ()),
            (ir.node("Cast", size.outputs, {"to": ir.DataType.FLOAT}), COUNT, ()),
        ]
        if exact.shape is not None and len(exact.shape) > 1 and group.operator in PRODUCTS:
            channel = 1 if group.operator in CONVOLUTIONS else len(exact.shape) - 1
            sums = _sum_by_channel(floating.graph, group.name, error, len(exact.shape), channel)
            reductions.append((sums, SUM, (f"{group.name}/channels",)))
        for node, what, shape in reductions:
            floating.graph.append(node)
            outputs.append(_describe(node.outputs[0], output_name(group.name, what), shape))
        done.append(group)
    floating.graph.outputs.clear()
    floating.graph.outputs.extend(outputs)
    return tuple(done)


def add_output_errors(
    floating: "ir.Model", quantized: "ir.Model", groups: Sequence[QuantizableOp], writers: "Mapping[ir.Value, str]"
) -> "list[ir.Value]":
    """Compute in the float graph what rounding the output of one group alone does to what is read behind it.

    ``quantized`` is the same graph with outputs rounded: ``writers`` are values in it, with the groups that write them.
    Returns the values that the joint graph is to have as outputs besides: for the nearest values that groups read, the
    energies of the value and of its error; and the sum of squares by channel of what is written, [channels].
    """
    graph = floating.graph
    ours = {value.name: value for node in graph for value in node.outputs}
    order = {node: index for index, node in enumerate(graph)}
    ends = {node for group in groups if group.output in ours and (node := ours[group.output].producer()) is not None}
    outputs: list[ir.Value] = []
    for value, group in writers.items():
        exact, restored = ours.get(value.name), _find_restored(value)
        rounded = _Copy(graph, ours, f"{group}/written").copy(restored) if exact is not None and restored else None
        if exact is None or rounded is None or exact.shape is None:
            continue
        square = ir.node("Mul", [exact, exact])
        sums = _sum_by_channel(graph, f"{group}/written", square.outputs[0], len(exact.shape), 1)
        graph.extend([square, sums])
        outputs.append(_describe(sums.outputs[0], output_name(group, _SQUARES), (f"{group}/written channels",)))
        for count, (read, changed) in enumerate(_follow(graph, order, ends, (exact, rounded), group)):
            difference = ir.node("Sub", [changed, read])
            energies = [ir.node("ReduceSumSquare", [each], {"keepdims": 0}) for each in (read, difference.outputs[0])]
            graph.extend([difference, *energies])
            for node, what in zip(energies, (_READ_SIGNAL, _READ_NOISE), strict=True):
                outputs.append(_describe(node.outputs[0], output_name(group, f"{what} {count}"), ()))
    return outputs


def _find_restored(value: "ir.Value") -> "ir.Value | None":
    """Find what comes out of the pair behind a value; None where it is not rounded."""
    rounding = next((use.node for use in value.uses() if use.node.op_type == _PAIR[0]), None)
    restoring = next((use.node for use in rounding.outputs[0].uses()), None) if rounding is not None else None
    return restoring.outputs[0] if restoring is not None else None


def _follow(
    graph: "ir.Graph",
    order: "Mapping[ir.Node, int]",
    ends: "Collection[ir.Node]",
    written: "tuple[ir.Value, ir.Value]",
    prefix: str,
) -> "list[tuple[ir.Value, ir.Value]]":
    """Copy what is computed from a value, here an exact and a rounded one, as far as the nearest groups, the ends.

    Returns what these read, and the outputs of the graph on the way, exact and with the rounded value.
    """
    nodes, changed = list(order), dict([written])
    reads: dict[ir.Value, ir.Value] = {}
    waiting = sorted({order[use.node] for use in written[0].uses() if use.node in order})
    queued = set(waiting)
    while waiting and len(reads) < _READS:
        node = nodes[heapq.heappop(waiting)]
        kinds = {attribute.type for attribute in node.attributes.values()}
        if node in ends or not kinds.isdisjoint((ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)):
            read = [value for value in node.inputs if value in changed and value.dtype in (None, ir.DataType.FLOAT)]
            reads.update((value, changed[value]) for value in read)
            continue
        inputs = [value if value is None else changed.get(value, value) for value in node.inputs]
        attributes = list(node.attributes.values())
        name = f"{prefix}/written/{node.name or order[node]}"
        copy = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs), name=name)
        graph.append(copy)
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = f"{prefix}/written/{old.name}" if old.name else ""
            new.type, new.shape = old.type, old.shape
            changed[old] = new
            if old.is_graph_output() and old.dtype == ir.DataType.FLOAT:
                reads[old] = new
            for place in {order[use.node] for use in old.uses() if use.node in order} - queued:
                queued.add(place)
                heapq.heappush(waiting, place)
    return list(reads.items())[:_READS]


def _describe(value: "ir.Value", name: str, shape: "Sequence[str]") -> "ir.Value":
    value.name, value.type, value.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    return value


def _sum_by_channel(graph: "ir.Graph", prefix: str, value: "ir.Value", rank: int, channel: int) -> "ir.Node":
    """Make the node that adds up a value over all axes but that of its channels."""
    others = [axis for axis in range(rank) if axis != channel]
    if graph.opset_imports[""] < _OPSET_OF_AXES_INPUT:
        return ir.node("ReduceSum", [value], {"axes": others, "keepdims": 0})
    axes = ir.Value(name=f"{prefix}/axes", const_value=ir.tensor(others))
    graph.register_initializer(axes)
    return ir.node("ReduceSum", [value, axes], {"keepdims": 0})


class OutputError(NamedTuple):
    """Tell what rounding the output of a group alone does, with one scale for all its channels."""

    energy: float
    """Energy of the error in what is read behind it, of that of what is read: the largest of the nearest values."""
    sizes: tuple[float, ...]
    """Root mean square of each channel of the output, to a common factor."""


class OwnError(NamedTuple):
    """Tell how a group alone in few bits changes its own output, its inputs being exact."""

    energy: float
    """Energy of the error, of that of the output, over all samples together."""
    sample_energy: float | None = None
    """The mean over samples of the error's energy, of that of the sample's own output; None where it is not known."""
    spread: float = 1.0
    """Times by which the largest sample's output is larger than the smallest's."""
    size: float = 0.0
    """Root mean square of the error."""
    shift: float = 0.0
    """Share of the error's energy that is the error's mean by channel, 0 to 1; 0 where it is not known."""
    output: OutputError | None = None
    """SQNR that rounding its output leaves besides, in engines that do so; None where that was not measured."""


class OwnErrors:
    """Add up what the joint graph gives for one feed after the other.

    ``single`` tells that each feed is one sample, so that errors are also known by sample.
    """

    def __init__(self, groups: Sequence[QuantizableOp], *, single: bool) -> None:
        self._groups, self._single = groups, single
        self._totals = dict[str, Array]()
        self._energies = dict[str, list[float]]()

    def add(self, outputs: Feeds) -> None:
        """Add the outputs of one feed."""
        for name, value in outputs.items():
            self._totals[name] = self._totals.get(name, np.float64(0)) + value.astype(np.float64)
            if name.endswith((f"/{SIGNAL}", f"/{NOISE}")):
                self._energies.setdefault(name, []).append(float(value))

    def find(self) -> dict[str, OwnError]:
        """Return the error of each group, by name."""
        return {group.name: self._find(group) for group in self._groups}

    def _find(self, group: QuantizableOp) -> OwnError:
        names = [output_name(group.name, what) for what in (SIGNAL, NOISE, COUNT)]
        signal, noise, count = (float(self._totals[name]) for name in names)
        sums = self._totals.get(output_name(group.name, SUM))
        shift = find_shift(sums, count, noise) if sums is not None and noise > 0 else 0.0
        error = OwnError(
            max(noise, 1e-30) / max(signal, 1e-30),
            size=float(np.sqrt(noise / max(1, count))),
            shift=shift,
            output=self._find_output_error(group.name),
        )
        signals, noises = (np.array(self._energies[name]) for name in names[:2])
        if not self._single or not (audible := find_audible(signals)).any():
            return error
        sizes = np.sqrt(signals[audible])
        mean = average_over_samples(signals, noises, count / len(signals))
        return error._replace(sample_energy=mean, spread=float(sizes.max() / sizes.min()))

    def _find_output_error(self, group: str) -> OutputError | None:
        squares, shares = self._totals.get(output_name(group, _SQUARES)), list[float]()
        for count in range(_READS):
            names = [output_name(group, f"{what} {count}") for what in (_READ_SIGNAL, _READ_NOISE)]
            if names[0] in self._totals:
                signal, noise = (float(self._totals[name]) for name in names)
                shares.append(max(noise, 1e-30) / max(signal, 1e-30))
        if squares is None or not shares:
            return None
        return OutputError(max(shares), tuple(np.sqrt(squares).tolist()))


def find_shift(sums: Array, count: float, noise: float) -> float:
    """Find the share of an error's energy that is left if each channel has the mean of its error, 0 to 1.

    ``sums`` are those of the error by channel, [channels]; ``count`` is how many numbers there are in all channels.
    """
    return float((sums**2).sum()) * len(sums) / count / noise


def add_switches(
    floating: "ir.Model", quantized: "ir.Model", writers: "Mapping[ir.Value, str]" = MappingProxyType({})
) -> tuple[str, ...]:
    """Give a graph a further input that says which of its groups are quantized, in place; return their names.

    The input :data:`SWITCHES` is a bool for each of them. ``quantized`` is ``floating`` with pairs (Q/DQ, or casts) at
    the inputs of its groups, and perhaps behind them and with biases that make up for the rounded weights. A value is
    rounded for the group that reads it, and for all that read it with the group that writes it, as ``writers`` says.
    """
    graph = quantized.graph
    products = {str(node.name): node for node in floating.graph if node.op_type in PRODUCTS}
    switches = _Switches(graph)
    nodes = [node for node in graph if node.op_type not in _PAIR]
    for node in nodes:
        twin = products.get(str(node.name))
        if twin is not None and (twin.op_type, node.op_type) == ("ConvTranspose", "Conv"):
            upsampling.write_as_convolution(twin, twin.outputs[0], Writer(floating.graph))
        if twin is None or node.op_type != twin.op_type:
            continue
        changed = _list_changed(node, twin, graph)
        if not changed and not any(_find_rounded(value) for value in node.inputs):
            continue
        adders = find_adder(node), find_adder(twin)
        if adders[0] is not None and adders[1] is not None:
            changed += _list_changed(adders[0], adders[1], graph)
        switch = switches.add(str(node.name))
        for reader, index, exact in changed:
            reader.replace_input_with(index, switches.choose([switch], layers.get_input(reader, index), exact, reader))
    for node in nodes:
        for index, value in enumerate(node.inputs):
            source = _find_rounded(value)
            if value is not None and source is not None:
                given = switches.find(str(node.name), writers.get(source, ""))
                node.replace_input_with(index, switches.choose(given, value, source, node))
    for index, output in enumerate(graph.outputs):
        source = _find_rounded(output)
        if source is not None:
            chosen = switches.choose(switches.find(writers.get(source, "")), output, source)
            chosen.name, output.name, source.name = output.name, f"{output.name}/rounded", f"{output.name}/exact"
            chosen.type, chosen.shape = output.type, output.shape
            graph.outputs[index] = chosen
    switches.finish()
    return tuple(switches.of_group)


class _Switches:
    """Adds an input of bools, one for each group, and what chooses by them."""

    def __init__(self, graph: "ir.Graph") -> None:
        self._graph, self._first = graph, graph[0]
        self._input = ir.Value(name=SWITCHES, type=ir.TensorType(ir.DataType.BOOL))
        self.of_group: dict[str, ir.Value] = {}

    def add(self, group: str) -> "ir.Value":
        """Make the switch of one more group."""
        place = ir.Value(name=f"{group}/place", const_value=ir.tensor(len(self.of_group)))
        self._graph.register_initializer(place)
        gather = ir.node("Gather", [self._input, place], {"axis": 0})
        self._graph.insert_before(self._first, gather)
        self.of_group[group] = gather.outputs[0]
        return gather.outputs[0]

    def find(self, *groups: str) -> "list[ir.Value]":
        """Find the switches of these, as far as they are groups with one."""
        return [self.of_group[name] for name in dict.fromkeys(groups) if name in self.of_group]

    def choose(
        self, given: "Sequence[ir.Value]", rounded: "ir.Value", exact: "ir.Value", reader: "ir.Node | None" = None
    ) -> "ir.Value":
        """Return the rounded value where one of the switches is on; without a reader, for the end of the graph."""
        nodes: list[ir.Node] = []
        condition = given[0] if given else None
        for switch in given[1:]:
            nodes.append(ir.node("Or", [condition, switch]))
            condition = nodes[-1].outputs[0]
        if condition is None and reader is not None:
            return exact
        nodes.append(
            ir.node("Identity", [exact]) if condition is None else ir.node("Where", [condition, rounded, exact])
        )
        if reader is None:
            self._graph.extend(nodes)
        else:
            self._graph.insert_before(reader, nodes)
        return nodes[-1].outputs[0]

    def finish(self) -> None:
        """Add the input."""
        self._input.shape = ir.Shape([len(self.of_group)])
        self._graph.inputs.append(self._input)


def _find_rounded(value: "ir.Value | None") -> "ir.Value | None":
    """Find the value that a pair rounds, from what comes out of it; None for other values."""
    restored = value.producer() if value is not None else None
    if restored is None or restored.op_type != _PAIR[1]:
        return cast_pairs.find_rounded(value)
    rounding = layers.get_input(restored, 0).producer()
    return layers.get_input(rounding, 0) if rounding is not None and rounding.op_type == _PAIR[0] else None


def _list_changed(node: "ir.Node", twin: "ir.Node", graph: "ir.Graph") -> "list[tuple[ir.Node, int, ir.Value]]":
    """List the constants that quantization has changed, each with the one that the float graph has there."""
    changed = list[tuple[ir.Node, int, ir.Value]]()
    turned = node.attributes.get_int("transB", 0) != twin.attributes.get_int("transB", 0)
    for index, value in enumerate(node.inputs):
        maker, numbers = value.producer() if value is not None else None, edit.read_constant(value)
        before = edit.find_input(twin, index)
        given = layers.find_weight(before)
        if maker is not None and maker.op_type == _PAIR[1]:
            if _find_rounded(value) is not None:
                continue
        elif numbers is None or (given is not None and np.array_equal(numbers.numpy(), given.numpy())):
            continue
        if given is not None:
            exact = given.numpy().T if turned and index == layers.WEIGHT else given.numpy()
        elif before is None and numbers is not None:  # a bias where there was none
            exact = np.zeros_like(numbers.numpy())
        else:
            continue
        name = f"{node.name}/exact_{index}"
        constant = ir.Value(name=name, const_value=ir.tensor(np.ascontiguousarray(exact), name=name))
        graph.register_initializer(constant)
        changed.append((node, index, constant))
    return changed


class _Copy:
    """Copies the nodes that make one value into another graph, down to the values that both graphs have."""

    def __init__(self, graph: "ir.Graph", known: "dict[str | None, ir.Value]", output: str) -> None:
        self._graph, self._known, self._output = graph, known, output
        self._made: dict[str | None, ir.Value] = {}
        self._quantized = False

    def copy(self, value: "ir.Value") -> "ir.Value | None":
        """Copy what makes the output; None where nothing in it is quantized."""
        result = self._copy_value(value, outermost=True)
        return result if self._quantized else None

    def _copy_value(self, value: "ir.Value", *, outermost: bool = False) -> "ir.Value":
        if value.name in self._made:
            return self._made[value.name]
        if value.name in self._known and not outermost:
            return self._known[value.name]
        name, node = f"{self._output}/{value.name}", value.producer()
        if node is None:
            given = self._graph.initializers.get(value.name or "")
            if given is not None and given.dtype == value.dtype:  # a bias or a shape: the same in both
                return given
            constant = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
            self._graph.register_initializer(constant)
            self._made[value.name] = constant
            return constant
        self._quantized = self._quantized or "uantize" in node.op_type
        copy = ir.Node(
            node.domain,
            node.op_type,
            [input_ and self._copy_value(input_) for input_ in node.inputs],
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            name=f"{self._output}/{node.name}",
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = f"{self._output}/{old.name}" if old.name else ""
            new.type, new.shape = old.type, old.shape
            self._made[old.name] = new
        self._graph.append(copy)
        return self._made[value.name]
