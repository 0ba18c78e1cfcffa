"""Measure what each group alone in few bits does, to its own output and to the answers, and say why.

For its own output, every group is computed twice on the same exact inputs, as it is and in few bits, side by side in
one graph, which gives the energy of the result and of the difference. So one pass over the data tells the error that
each group brings in, and none that it passes on. For the answers, a graph has a switch for each group.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from enginesmith.calibration.ranges import ChannelStatistics, Ranges
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.quantize import cast_pairs, layers
from enginesmith.pipeline.passes.quantize.cast_pairs import find_adder
from enginesmith.pipeline.passes.quantize.layers import CONVOLUTIONS, PRODUCTS, QuantizableOp
from enginesmith.pipeline.passes.quantize.precisions import Cause
from enginesmith.pipeline.passes.rescale.products import by_channel
from enginesmith.pipeline.tensors import Array

SIGNAL, NOISE, SUM, COUNT = "signal", "noise", "sum", "count"
SWITCHES = "enginesmith/switches"
_PAIR = ("QuantizeLinear", "DequantizeLinear")
_OPSET_OF_AXES_INPUT = 13
"""The first opset in which ReduceSum reads its axes; before, they are an attribute."""


def output_name(group: QuantizableOp, what: str) -> str:
    """Return the joint graph's output that holds something of a group, in float32.

    The energies of its result and of its error, shape []; the sum of the error by channel, [channels], and how many
    numbers there are, [], for products whose rank is known.
    """
    return f"{group.name}/{what}"


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
        floating.graph.append(difference)
        error = difference.outputs[0]
        reductions: list[tuple[ir.Node, str, tuple[str, ...]]] = [
            (ir.node("ReduceSumSquare", [exact], {"keepdims": 0}), SIGNAL, ()),
            (ir.node("ReduceSumSquare", [error], {"keepdims": 0}), NOISE, ()),
        ]
        if exact.shape is not None and len(exact.shape) > 1 and group.operator in PRODUCTS:
            sums = _sum_by_channel(floating.graph, group, error, len(exact.shape))
            reductions.append((sums, SUM, (f"{group.name}/channels",)))
            size = ir.node("Size", [error])
            floating.graph.append(size)
            reductions.append((ir.node("Cast", size.outputs, {"to": ir.DataType.FLOAT}), COUNT, ()))
        for node, what, shape in reductions:
            floating.graph.append(node)
            value = node.outputs[0]
            value.name = output_name(group, what)
            value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
            outputs.append(value)
        done.append(group)
    floating.graph.outputs.clear()
    floating.graph.outputs.extend(outputs)
    return tuple(done)


def _sum_by_channel(graph: "ir.Graph", group: QuantizableOp, error: "ir.Value", rank: int) -> "ir.Node":
    """Make the node that adds up an error over all axes but that of a product's channels."""
    channel = 1 if group.operator in CONVOLUTIONS else rank - 1
    others = [axis for axis in range(rank) if axis != channel]
    if graph.opset_imports[""] < _OPSET_OF_AXES_INPUT:
        return ir.node("ReduceSum", [error], {"axes": others, "keepdims": 0})
    axes = ir.Value(name=f"{group.name}/axes", const_value=ir.tensor(others))
    graph.register_initializer(axes)
    return ir.node("ReduceSum", [error, axes], {"keepdims": 0})


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
        before = twin.inputs[index] if index < len(twin.inputs) else None
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


# Reasons for large errors: which input of a product has numbers that one scale does not fit, and which.
#
# A value has one scale for all channels, so a few large channels leave the others few levels. A weight has one scale
# for each output channel, so there it is the input channels that have to be alike (Nagel et al., "Data-Free
# Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 3); section 4 is on shifted means.

_UNLIKE = 8.0
"""Times the middle channel from which on one is an outlier: it takes three bits from the others."""
_LARGE = 4.0
"""Times the middle channel from which on channels are counted as large, where one is an outlier."""
_OFFSET = 4.0
"""Times what any channel varies by from which on offsets of channels take the levels: two bits."""
_SEEN = 16
"""Numbers of each channel from which on it is known what varies."""
_SHIFTED = 0.5
"""Share of an error that is its mean from which on biases can make up for most of it."""
_PEAK = 40.0
"""Times the root mean square from which on single numbers take the levels of the others: normal ones stay below 6."""


def explain_loss(node: "ir.Node", ranges: Ranges, shift: float) -> tuple[Cause, str]:
    """Explain the loss of a product by its activations, by its weight, or by neither: the cause, and a sentence.

    ``shift`` is the share of its error's energy that is the error's mean by channel.
    """
    value = node.inputs[0]
    name = str(value.name) if value is not None else ""
    known = ranges.tensors.get(name)
    channels = layers.find_channel_statistics(node, ranges) if value is not None else None
    if channels is not None and known is not None and (words := _describe_offsets(channels, known.count)):
        return "constant offsets", words
    if channels is not None and (outliers := _describe_outliers(np.asarray(channels.amax))):
        count, largest, middle = outliers
        share = f"{count} of {len(channels.amax)} channels"
        words = f"activations to {_write(largest)} in {share}, and to {_write(middle)} in the middle one"
        return "uneven activations", words
    weight = layers.find_weight(node.inputs[layers.WEIGHT]) if node.op_type in layers.PRODUCTS else None
    if weight is not None and (outliers := _describe_outliers(_input_channels(node, weight.numpy()))):
        count, largest, middle = outliers
        return "uneven weights", (
            f"weights of {count} input channels are up to {largest / middle:.0f} times as large as those of the middle "
            "one, and have the same scale"
        )
    if shift >= _SHIFTED:
        words = f"{shift:.0%} of its error is the same for all samples: rounding shifts the means of channels"
        return "shifted means", words
    if channels is not None and known is not None:
        rms = float(np.sqrt(np.mean(channels.mean_square)))
        largest = max(abs(known.minimum), abs(known.maximum))
        if rms > 0 and largest > _PEAK * rms:
            words = f"single activations to {_write(largest)}, {largest / rms:.0f} times their root mean square"
            return "single peaks", words
    return "no outliers", "no channel stands out: 8 bits are few for what it computes"


def _describe_offsets(channels: ChannelStatistics, count: int) -> str:
    """Describe constants that are added to channels; empty where none leaves few levels for what varies.

    ``count`` is how many numbers were seen in all channels together.
    """
    offsets = np.abs(channels.middle)
    varying = np.asarray(channels.amax) - offsets
    vary = float(varying.max(initial=0))
    if count < _SEEN * len(offsets) or vary <= 0 or max(channels.amax) < _OFFSET * vary:
        return ""
    far = offsets > vary
    reach = f"constant offsets of up to {_write(float(offsets.max()))} in {far.sum()} of {len(offsets)} channels"
    return f"{reach} of its input, which vary by ±{_write(float(varying[far].max()))}"


def _write(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _describe_outliers(sizes: Array) -> tuple[int, float, float] | None:
    """Count the large channels, and return the largest and the middle size; None where none is an outlier."""
    used = sizes[sizes > 0]
    if used.size < 2:
        return None
    largest, middle = float(used.max()), float(np.median(used))
    return (int((used > _LARGE * middle).sum()), largest, middle) if largest >= _UNLIKE * middle else None


def _input_channels(node: "ir.Node", weight: Array) -> Array:
    """Return the largest weight of each input channel."""
    if weight.ndim < 2:
        return np.zeros(0, np.float32)
    sizes: Array = np.abs(by_channel(node, weight)).max(axis=(0, 2))
    return sizes
