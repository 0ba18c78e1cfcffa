"""Quantize statically: QuantizeLinear/DequantizeLinear pairs, so that an engine computes in few bits and fuses.

                 TensorRT                                   ONNX Runtime and OpenVINO, CPU
activations      symmetric int8, zero point 0               uint8 with a zero point: costs nothing, includes a ReLU
Conv             its input                                  its input, and its output: for ONNX Runtime always, behind
                                                            the Relu or Clip, since no kernel writes floats; for
                                                            OpenVINO where it is read in int8, behind any activation
ConvTranspose    its input                                  as Conv for OpenVINO; ONNX Runtime has no int8 kernel,
                                                            and gets a Conv and a DepthToSpace if that is faster
MatMul, Gemm     their input                                their input; what they write stays floating, which is the
                                                            faster kernel, and the better one
stacked matrices one scale for all                         a scale for each column of each, where blocks may have one
bias             floating                                   floating for Conv, whose bias becomes int32 at load; int32
                                                            for Gemm in ONNX Runtime, which does not fuse it otherwise
residual Add     the input that comes from no convolution,  both inputs and the sum, where what goes in is int8 already
                 or from the one nearer to the fork: the
                 other convolution takes the sum in
pooling, Concat  never: Q moves through them by itself      where what they read is int8 already
Reshape and so on, likewise

TensorRT: "Q/DQ layer-placement recommendations" in its guide to quantized types. ONNX Runtime: its selectors in
``core/optimizer/qdq_transformer`` say which patterns become integer kernels. It makes unsigned activations of signed
ones by itself on x64, but not where a value has two readers: half of ResNet-50 then runs in floats.

OpenVINO computes an activation, SiLU and hard-swish too, as part of the convolution. A pair between the two, which
ONNX Runtime needs, makes them separate operators: a YOLO-like network with SiLU is 1.3 times as fast without these
pairs, one with hard-swish 1.1 times (2026.4, AVX2, batch 8). A pair behind an operator that only moves numbers, which
ONNX Runtime needs, too, makes it round them once more: without these, and with one grid for all that a Concat reads,
the first is 1.08 times as fast once more, and a U-Net 1.04 times.

A stack of matrices stays one MatMul: with 8 of 256 × 128 and 1 to 512 rows, it takes 0.3 to 0.97 of the time of 8
products in ONNX Runtime, and 0.8 to 1.2 of it in OpenVINO (1.31, 2026.4, AVX-512 VNNI).

Of a number that is only simulated (E4M3 on a CPU), ONNX Runtime gets inputs of products and nothing else.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from enginesmith.calibration.ranges import Method, Ranges
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.passes.quantize import layers, quantizers, upsampling
from enginesmith.pipeline.passes.quantize.layers import BIAS, WEIGHT, Correct, QuantizableOp, Quantized
from enginesmith.pipeline.passes.quantize.precisions import Placement
from enginesmith.pipeline.passes.quantize.quantizers import Grid, Layout, Narrow, Number, Rest, Scales
from enginesmith.pipeline.passes.quantize.upsampling import UPSAMPLING
from enginesmith.pipeline.passes.quantize.writer import Stored, Writer
from enginesmith.pipeline.tensors import Array

_SAME_SCALE = frozenset(
    ("MaxPool", "Resize", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Gather")
    + ("Expand", "Tile", "DepthToSpace")
)
"""They hand on numbers as they are: ONNX Runtime runs them on int8 if input and output have one grid."""
_OWN_SCALE = frozenset(("Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid"))
"""They have int8 kernels that take a grid for each input and one for the output."""
_MANY_INPUTS = frozenset(("Add", "Mul", "Concat"))
_CLAMPS = frozenset(("Relu", "Clip"))
_OPSET_OF_BLOCKS = 21
"""The first opset whose DequantizeLinear has scales for blocks."""
_ACTIVATIONS = _CLAMPS | {"Elu", "Gelu", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Sigmoid", "Swish", "Tanh"}
"""OpenVINO computes them, and the product of a value with its Sigmoid, in the convolution that writes their input."""


@dataclass(frozen=True)
class Rules:
    """Patterns that one engine fuses."""

    products: frozenset[str] = frozenset(layers.PRODUCTS)
    """Operators that it has kernels for, or kinds of them that can be written as such."""
    symmetric: bool = True
    outputs: Literal["none", "read", "all"] = "none"
    """Outputs of convolutions that are quantized too: those that an int8 operator reads, perhaps through others that
    are quantized with them and, where they only move numbers, need no pair behind them; or all."""
    activations: frozenset[str] = _CLAMPS
    """Operators that become part of the convolution before them, which then writes their output."""
    factors: bool = False
    """A multiplication by constants behind them becomes part of it, too."""
    own_scale: frozenset[str] = _OWN_SCALE
    """Operators between products that are quantized, beside those that hand numbers on as they are."""
    residual: bool = False
    """One input of a sum is to be quantized so that the sum becomes part of a convolution."""
    integer_bias: frozenset[str] = frozenset()
    """Operators whose bias has to be int32."""
    stacks: bool = False
    """A MatMul with a stack of matrices may have a scale for each column of each, written as a block of inputs."""


RULES: Mapping[Placement, Rules] = {
    "inputs": Rules(residual=True),
    "inputs+outputs": Rules(
        frozenset(("Conv", UPSAMPLING, "MatMul", "Gemm")),
        symmetric=False,
        outputs="all",
        integer_bias=frozenset(("Gemm",)),
        stacks=True,
    ),
    "inputs+read outputs": Rules(
        frozenset(("Conv", "ConvTranspose", "MatMul", "Gemm")),
        symmetric=False,
        outputs="read",
        activations=_ACTIVATIONS,
        factors=True,
        own_scale=frozenset(("Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "ReduceMean")),
        stacks=True,
    ),
}


@dataclass(frozen=True)
class Settings:
    """Options of a quantization."""

    number: Number = "int8"
    placement: Placement = "inputs"
    method: Method = "minmax"
    """Method whose ranges are taken; fp8 has the range to spare, and takes the largest number seen."""
    signed: bool = False
    """True where activations with both signs are in int8 around 0 by rules that have them in uint8."""
    weight_bits: int = 8
    """7 keeps int8 weights within ±63: processors without VNNI add two products in 16 bits, and saturate."""
    rest: Rest = "fp32"
    keep: frozenset[str] = frozenset()
    """Names of groups that stay in floating point."""
    inputs_only: bool = False
    """Only inputs of products are rounded, each product's apart from the others', so that errors can be measured."""

    @property
    def rules(self) -> Rules:
        """Rules by which pairs are placed."""
        if self.number == "fp8" and self.placement != "inputs":
            return Rules()  # the engine only simulates the number
        rules = RULES[self.placement]
        return Rules(rules.products, rules.symmetric, stacks=rules.stacks) if self.inputs_only else rules


def quantize(model: "ir.Model", ranges: Ranges, settings: Settings, correct: Correct | None = None) -> Quantized:
    """Quantize a float32 graph in place; ``correct`` is called for each weight, one after the other.

    Raises:
        InvalidGraph: it is quantized already, or has none of the operators that can be.
        UsageError: the ranges are of another graph, or ``keep`` names groups that there are none of.
    """
    groups = layers.prepare(model, settings.number, settings.keep)
    usable = [group for group in groups if not group.reason]
    layers.require_products(model, groups, settings.number, usable)
    names = {name for group in usable for name in group.activations}
    if names and not names & set(ranges.tensors):
        raise UsageError(
            f"the ranges are of another model: they have {len(ranges.tensors)} values, and none that its products "
            f"read ({', '.join(sorted(names)[:3])})",
            "calibrate this graph",
        )
    layout: Layout = "symmetric" if settings.rules.symmetric else "signed" if settings.signed else "unsigned"
    scales = Scales(ranges, settings.number, settings.method, settings.rest, layout)
    nodes = {str(node.name): node for node in model.graph}
    left = {group.name: why for group in groups if (why := _explain_group(group, nodes[group.name], scales, settings))}
    chosen = [nodes[group.name] for group in groups if group.name not in left]
    writer = Writer(model.graph)
    for node in chosen:
        if node.op_type not in settings.rules.products:
            written = _find_written(node, settings.rules)
            scales.share(written, upsampling.write_as_convolution(node, written, writer))
    plan = _place_pairs(model, chosen, settings.rules, scales.problem)
    grids = _choose_grids(plan, scales)
    weights = _Weights(writer, settings, correct, {node: grids[layers.get_input(node, 0)] for node in chosen})
    for node in chosen:
        weights.quantize(node)
    for value in (value for value in grids if value not in plan.moved):
        writer.insert_pair(value, grids[value], None if value in plan.native else plan.readers[value])
    writer.finish(model)
    return Quantized(len(grids) - len(plan.moved), groups, left)


def explain_kind(kind: str, rules: Rules) -> str:
    """Explain why operators of a kind stay in floating point; empty where they have a kernel."""
    operator = kind.split()[-1]
    return "" if rules.products & {kind, operator} else f"there is no int8 kernel for {operator}"


def _explain_group(group: QuantizableOp, node: "ir.Node", scales: Scales, settings: Settings) -> str:
    """Explain why a group stays in floating point; empty if it does not."""
    rules = settings.rules
    if group.reason:
        return group.reason
    if group.name in settings.keep:
        return layers.ON_REQUEST
    if why := explain_kind(upsampling.name_kind(node), rules):
        return why
    if node.op_type in rules.integer_bias and (why := _explain_bias(node)):
        return why
    if why := scales.problem(layers.get_input(node, 0)):
        return f"its input {why}"
    written = _find_written(node, rules) if rules.outputs == "all" and node.op_type in layers.CONVOLUTIONS else None
    if written is not None and (why := scales.problem(written)):
        return f"its output {why}"
    numbers = layers.read_weight(node)
    largest = float(np.abs([numbers.max(), numbers.min()]).max()) if numbers.size else 0.0
    if not largest:
        return "its weight is all zero"
    return "" if np.isfinite(largest) else "its weight is not finite"


def _explain_bias(node: "ir.Node") -> str:
    bias = edit.find_input(node, BIAS)
    if bias is None:
        return ""
    content = edit.read_constant(bias)
    if content is None:
        return "its bias is computed"
    columns = layers.read_weight(node).shape[0 if node.attributes.get_int("transB", 0) else 1]
    wide = content.size == columns == [1, *content.shape.numpy()][-1]
    if not wide or node.attributes.get_float("beta", 1.0) != 1 or node.attributes.get_float("alpha", 1.0) != 1:
        return "its bias is not added as it is, one number for each column"
    return ""


_Rounding = tuple["ir.Value", int | None]
"""A weight, and the axis that its scales lie along."""


class _Weights:
    """Puts weights in few bits behind a DequantizeLinear, one at a time; what several products read is rounded once."""

    def __init__(
        self, writer: Writer, settings: Settings, correct: Correct | None, grids: "Mapping[ir.Node, Grid]"
    ) -> None:
        """Take the products, each with the grid of its input."""
        self._writer, self._settings, self._correct, self._grids = writer, settings, correct, grids
        self._least: dict[_Rounding, Array] = {}
        """The smallest scales with which the biases of all products that share a weight fit an int32."""
        self._done: dict[_Rounding, tuple[Stored, Narrow]] = {}
        for node, grid in grids.items():
            bias = quantizers.read_bias(node)
            if bias is not None:  # ONNX Runtime makes int32 of it, also where it is written in floats
                rounding = self._find_rounding(node)
                least = quantizers.least_scale(bias.reshape(-1), grid.scale)
                least = least if rounding[1] is not None else np.asarray(least.max())
                self._least[rounding] = np.maximum(least, self._least.get(rounding, 0.0))

    def quantize(self, node: "ir.Node") -> None:
        """Quantize a product's weight, and its bias where the engine wants that."""
        settings, numbers, rounding = self._settings, layers.read_weight(node), self._find_rounding(node)
        if rounding not in self._done:
            least = self._least.get(rounding, 0.0)
            narrow = quantizers.quantize_symmetrically(
                numbers,
                rounding[1],
                settings.number,
                settings.rest,
                settings.weight_bits,
                least,
                stacked=self._has_scales_by_matrix(node, numbers.ndim),
            )
            self._done[rounding] = self._writer.store(str(rounding[0].name), narrow), narrow
        stored, narrow = self._done[rounding]
        if self._correct is not None:
            self._correct(node, numbers, narrow.wide())
        bias = quantizers.read_bias(node)
        if bias is not None and node.op_type in settings.rules.integer_bias:
            grid = self._grids[node]
            steps = grid.scale * narrow.scale.astype(np.float64)
            levels = quantizers.integer_bias(bias.reshape(-1), steps)
            whole = Narrow(levels, steps.astype(np.float32), 0 if steps.ndim else None)
            sums = self._writer.store(str(layers.get_input(node, BIAS).name), whole)
            node.replace_input_with(BIAS, self._writer.insert_dequantize(sums, node))
        node.replace_input_with(WEIGHT, self._writer.insert_dequantize(stored, node))

    def _has_scales_by_matrix(self, node: "ir.Node", rank: int) -> bool:
        """Tell whether each column of a stack of matrices has a scale of its own, for which blocks have to exist."""
        opset = self._writer.graph.opset_imports.get("", 0)
        return node.op_type == "MatMul" and rank > 2 and self._settings.rules.stacks and opset >= _OPSET_OF_BLOCKS

    def _find_rounding(self, node: "ir.Node") -> "_Rounding":
        """Return what a product's rounded weight depends on beside the settings: its numbers, and the scales' axis."""
        return layers.get_input(node, WEIGHT), quantizers.channel_axis(node, layers.read_weight_shape(node))


# Placement of the pairs.

Problem = Callable[["ir.Value"], str]
"""Explains why a value cannot be rounded; empty where it can."""


@dataclass
class _Plan:
    """Values that are rounded, and who reads them so."""

    readers: "dict[ir.Value, list[tuple[ir.Node, int]]]" = field(default_factory=dict)
    """Value → where the rounded one is read; all other readers go on reading the floats."""
    native: "dict[ir.Value, None]" = field(default_factory=dict)
    """Values, in the graph's order, that exist in few bits alone: everything, outputs too, reads the rounded one."""
    moved: "set[ir.Value]" = field(default_factory=set)
    """Values that get no pair, as all of their numbers are moved from values that do."""
    same: "list[tuple[ir.Value, ir.Value]]" = field(default_factory=list)
    """Pairs that have to share a grid."""

    def read(self, node: "ir.Node", index: int) -> None:
        """Round an input of a node."""
        self.readers.setdefault(layers.get_input(node, index), []).append((node, index))


def _choose_grids(plan: _Plan, scales: Scales) -> "dict[ir.Value, Grid]":
    """Return a grid for each value that is rounded; those that have to share one get the widest."""
    import networkx

    values = dict.fromkeys((*plan.readers, *plan.native))
    linked = networkx.Graph(plan.same)
    linked.add_nodes_from(values)
    shared: dict[ir.Value, Grid] = {}
    for members in networkx.connected_components(linked):
        shared |= dict.fromkeys(members, scales.grid(members))
    return {value: shared[value] for value in values}


def _place_pairs(model: "ir.Model", chosen: "Iterable[ir.Node]", rules: Rules, problem: Problem) -> _Plan:
    """Place the pairs for the products that are to be computed in few bits."""
    plan = _Plan()
    products = dict.fromkeys(chosen)
    for node in products:
        plan.read(node, 0)
    if rules.outputs != "none":
        _follow_convolutions(model, products, rules, problem, plan)
    if rules.residual:
        for node in model.graph:
            index = _choose_residual_input(node, products)
            if index is not None and not problem(layers.get_input(node, index)):
                plan.read(node, index)
    return plan


def _find_written(node: "ir.Node", rules: Rules) -> "ir.Value":
    """Find the value that a node writes, behind what engines fuse into it: an activation, and factors."""
    value = _find_activated(node.outputs[0], rules)
    reader, index = edit.find_only_reader(value)
    if rules.factors and reader is not None and reader.op_type == "Mul" and not _is_computed(reader.inputs[1 - index]):
        return reader.outputs[0]
    return value


def _find_activated(value: "ir.Value", rules: Rules) -> "ir.Value":
    if "Sigmoid" in rules.activations and len(value.uses()) == 2 and not value.is_graph_output():  # SiLU in two parts
        first, second = sorted((use.node for use in value.uses()), key=lambda reader: reader.op_type)
        if (first.op_type, second.op_type) == ("Mul", "Sigmoid") and second.outputs[0] in first.inputs:
            return first.outputs[0] if len(second.outputs[0].uses()) == 1 else value
    reader, index = edit.find_only_reader(value)
    if reader is None or reader.op_type not in rules.activations or index or any(map(_is_computed, reader.inputs[1:])):
        return value
    return reader.outputs[0]


def find_writers(model: "ir.Model", rules: Rules) -> "dict[ir.Value, str]":
    """Find what convolutions write that is rounded wherever they are in few bits, and the names of these."""
    if rules.outputs != "all":
        return {}
    return {_find_written(node, rules): str(node.name) for node in model.graph if node.op_type in layers.CONVOLUTIONS}


def _is_computed(value: "ir.Value | None") -> bool:
    return value is not None and edit.read_constant(value) is None


def _follow_convolutions(
    model: "ir.Model", products: "Collection[ir.Node]", rules: Rules, problem: Problem, plan: _Plan
) -> None:
    """Follow what convolutions write in int8 through operators that go on with it, if that saves moving floats."""
    carrying = _SAME_SCALE | rules.own_scale
    wanted: set[ir.Value] = set()  # values that are rounded anyway, since a product reads them, perhaps through others
    for node in reversed(model.graph):
        if node in products:
            wanted.add(layers.get_input(node, 0))
        elif node.op_type in carrying and not wanted.isdisjoint(_list_rounded_outputs(node, rules)):
            wanted.update(_list_operands(node))
    for node in model.graph:
        if node in products and node.op_type in layers.CONVOLUTIONS:
            written = _find_written(node, rules)
            if rules.outputs == "all" or (written in wanted and not problem(written)):
                plan.native[written] = None
        if node in products or node.domain or not _has_kernel(node, carrying):
            continue
        read, outputs = _list_operands(node), _list_rounded_outputs(node, rules)
        native = [value in plan.native for value in read]
        useful = any(native) and ((rules.outputs == "all" and all(native)) or not wanted.isdisjoint(outputs))
        if not useful or any(map(problem, (*read, *outputs))):
            continue
        for index, value in enumerate(node.inputs):
            if value in read:
                plan.read(node, index)
        if node.op_type == "Concat" and rules.outputs == "all":  # which reads several grids
            read = [value for value in read if value not in plan.native and len(value.uses()) == 1]
        if node.op_type == "Concat" or node.op_type in _SAME_SCALE:
            plan.same += [(value, output) for value in read for output in outputs]
            plan.moved.update(outputs if rules.outputs == "read" else ())
        plan.native |= dict.fromkeys(outputs)


def _list_rounded_outputs(node: "ir.Node", rules: Rules) -> "list[ir.Value]":
    """Return the values that are rounded behind a node, if it is computed in int8."""
    return [_find_written(node, rules)] if node.op_type in rules.own_scale else list(node.outputs)


def _list_operands(node: "ir.Node") -> "list[ir.Value]":
    """Return the values that a node computes with; indices, shapes and bounds are not among them."""
    inputs = node.inputs if node.op_type in _MANY_INPUTS else node.inputs[:1]
    return list(dict.fromkeys(value for value in inputs if value is not None))


def _has_kernel(node: "ir.Node", carrying: Collection[str]) -> bool:
    """Tell whether the engine has an integer kernel for it, and for how it is used here."""
    if node.op_type not in carrying or not all(node.inputs[: 1 + (node.op_type in _MANY_INPUTS)]):
        return False
    if any(value.dtype not in (None, ir.DataType.FLOAT) or not _is_computed(value) for value in _list_operands(node)):
        return False
    if not all(value.uses() or value.is_graph_output() for value in node.outputs):
        return False
    if node.op_type == "MaxPool":
        return len(node.outputs) == 1
    return node.op_type != "Resize" or node.attributes.get_string("mode", "nearest") == "nearest"


def _choose_residual_input(node: "ir.Node", products: "Collection[ir.Node]") -> int | None:
    """Return the input of an Add that is to be rounded so that the other one's convolution takes in the sum."""
    if node.op_type != "Add" or not all(map(_is_computed, node.inputs)):
        return None
    first, second = (_find_convolution(value, products) for value in node.inputs)
    if first is None or second is None:
        return None if first is second else int(first is not None)
    return 0 if _count_convolutions(first) < _count_convolutions(second) else 1


def _find_convolution(value: "ir.Value | None", products: "Collection[ir.Node]") -> "ir.Node | None":
    """Return the quantized convolution whose output a value is, and that nothing else reads."""
    node = value.producer() if value is not None else None
    if value is None or node is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    if node.op_type == "BatchNormalization":
        return _find_convolution(node.inputs[0], products)
    return node if node in products and node.op_type in layers.CONVOLUTIONS else None


def _count_convolutions(node: "ir.Node") -> int:
    """Count the convolutions one behind the other in front of a node, on the way of first inputs."""
    depth, source = 0, node.inputs[0]
    while source is not None and (producer := source.producer()) is not None:
        depth += producer.op_type in layers.CONVOLUTIONS
        source = producer.inputs[0] if producer.inputs else None
    return depth
