"""Rewrite operators that runtimes compute inaccurately as others that they compute accurately.

It is done once, where a graph is exported or loaded, so that the reference, all engines and packages have it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginesmith.pipeline.frameworks.onnx import edit, ir, model_file

if TYPE_CHECKING:
    from onnx_ir.tape import Tape

_SIGMOID, _NORMALIZATION = "Sigmoid", "GroupNormalization"
_RELATIVE = ("Log", "Reciprocal", "Sqrt")
"""Operators whose answers for small numbers follow from the relative error of these, and not from the absolute one."""
_CARRIES = frozenset(
    ("Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Slice", "Split", "Concat")
    + ("Gather", "GatherElements", "GatherND", "TopK", "Clip", "Max", "Min", "Where")
    + ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin")
)
"""Operators whose answers are as small as what they read."""
_SCALES = ("Add", "Mul")
"""Operators that keep small numbers small where the other number is a constant, and for Add a small one."""
_SMALL = 1e-3
_PER_CHANNEL_SINCE = 21
"""Opset from which on GroupNormalization has a scale for each channel, and not for each group."""


def write_exactly(model: "ir.Model") -> tuple[str, ...]:
    """Rewrite a graph in place, in bodies, too; return a note on each kind of operator that was written out.

    - Sigmoid, where a logarithm, a root or a quotient reads it: ONNX Runtime 1.31.1 takes it for 0 below -17.2, where
      it is 3e-8, and a logarithm is -inf then. log(sigmoid(x)) becomes -softplus(-x), others read 1 / (1 + exp(-x)).
    - GroupNormalization, for which ONNX Runtime 1.31.1 has the specification's function alone: its variance is the mean
      of squares less the square of the mean: no digit of it is right for numbers of 100 ± 0.01, and roots are NaN.
    """
    from onnx_ir.passes import common

    nodes = [each for each in _list_nodes(model) if each.op_type in (_SIGMOID, _NORMALIZATION) and not each.domain]
    if not any(node.op_type == _NORMALIZATION or _is_read_relatively(node.outputs[0]) for node in nodes):
        return ()
    edit.infer_shapes(model)
    logarithms, sigmoids, normalizations = 0, 0, 0
    for node in nodes:
        if node.inputs[0] is None or node.inputs[0].dtype != ir.DataType.FLOAT:
            continue
        if node.op_type == _NORMALIZATION:
            normalizations += _write_normalization(node, model.opset_imports[""])
            continue
        logarithms += _write_logarithms(node)
        sigmoids += _write_sigmoid(node)
    common.NameFixPass()(model)
    told = {
        "log(sigmoid(x)) was written as -softplus(-x)": logarithms,
        "Sigmoid was written as 1 / (1 + exp(-x))": sigmoids,
        "GroupNormalization was written with InstanceNormalization": normalizations,
    }
    return tuple(
        f"{what}, which runtimes compute more accurately ({count} times)" for what, count in told.items() if count
    )


def write_file_exactly(file: Path) -> tuple[str, ...]:
    """Rewrite a file as :func:`write_exactly` does, its weights where they are; return its notes.

    Raises:
        InvalidGraph: the file cannot be read.
    """
    if not {_SIGMOID, _NORMALIZATION} & model_file.summary(file).operators.keys():
        return ()
    model = edit.load(file)
    if notes := write_exactly(model):
        file.write_bytes(ir.to_proto(model).SerializeToString())
    return notes


def _list_nodes(model: "ir.Model") -> "list[ir.Node]":
    return list(ir.traversal.RecursiveGraphIterator(model.graph))


def _is_read_relatively(value: "ir.Value") -> bool:
    """Tell whether the relative error of a value's smallest numbers counts, in what reads it or behind that."""
    waiting, seen = [value], {value}
    while waiting:
        value = waiting.pop()
        for reader, place in value.uses():
            if _divides(reader, place):
                return True
            carried = [] if not _carries(reader, value) else [each for each in reader.outputs if each not in seen]
            waiting.extend(carried)
            seen.update(carried)
    return False


def _divides(reader: "ir.Node", place: int) -> bool:
    """Tell whether a node takes a logarithm, a root, or a quotient by this input."""
    if reader.op_type != "Pow":
        return reader.op_type in _RELATIVE or (reader.op_type == "Div" and place == 1)
    exponent = edit.read(edit.find_input(reader, 1))
    return place == 0 and (exponent is None or bool((exponent < 1).any()))


def _carries(reader: "ir.Node", value: "ir.Value") -> bool:
    if reader.op_type not in _SCALES:
        return reader.op_type in _CARRIES
    others = [edit.read(each) for each in reader.inputs if each is not value]
    if not others or any(each is None for each in others):
        return False
    return reader.op_type == "Mul" or all(np.abs(each).max(initial=0) <= _SMALL for each in others if each is not None)


def _write_logarithms(node: "ir.Node") -> int:
    """Write each Log of a Sigmoid as -Softplus(-x); return how many there were."""
    from onnx_ir.tape import Tape

    readers = [reader for reader, _ in node.outputs[0].uses() if reader.op_type == "Log"]
    for reader in readers:
        tape = Tape()
        result = tape.op("Neg", [tape.op("Softplus", [tape.op("Neg", [node.inputs[0]])])])
        _replace(reader, tape, result)
    if readers and not (node.outputs[0].uses() or node.outputs[0].is_graph_output()):
        assert node.graph is not None
        node.graph.remove(node, safe=True)
    return len(readers)


def _write_sigmoid(node: "ir.Node") -> bool:
    """Write a Sigmoid as 1 / (1 + exp(-x)) where the relative error of its small numbers counts."""
    from onnx_ir.tape import Tape

    if not _is_read_relatively(node.outputs[0]):
        return False
    tape = Tape()
    one = tape.op("Constant", [], {"value": ir.tensor(np.float32(1))})
    denominator = tape.op("Add", [tape.op("Exp", [tape.op("Neg", [node.inputs[0]])]), one])
    _replace(node, tape, tape.op("Reciprocal", [denominator]))
    return True


def _write_normalization(node: "ir.Node", opset: int) -> bool:
    """Write a GroupNormalization as InstanceNormalization of [N, groups, pixels], and a scale and a bias behind it.

    The mean is subtracted before, which is exact where it matters; what is left of it is a rounding error. Without,
    three digits are right for 100 ± 0.01, and two for 1000 ± 0.01. In ONNX Runtime it takes 0.6 of the function's time.
    """
    from onnx_ir.tape import Tape

    value, scale, bias = node.inputs[:3]
    if value is None or value.shape is None or scale is None or bias is None:
        return False
    tape, groups, rank = Tape(), node.attributes.get_int("num_groups"), len(value.shape)
    by_channel = opset >= _PER_CHANNEL_SINCE

    def constant(numbers: Any) -> "ir.Value":
        return tape.op("Constant", [], {"value": ir.tensor(numbers)})

    plain = [constant(np.full(groups, number, np.float32)) for number in (1, 0)]
    grouped = tape.op("Reshape", [value, constant(np.array([0, groups, -1]))])
    centered = tape.op("Sub", [grouped, _write_mean(tape, grouped)])
    factors = plain if by_channel else [scale, bias]
    epsilon = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
    result = tape.op("InstanceNormalization", [centered, *factors], epsilon)
    result = tape.op("Reshape", [result, tape.op("Shape", [value])])
    for name, factor in zip(("Mul", "Add"), (scale, bias), strict=True) if by_channel else ():
        spread = tape.op("Reshape", [factor, constant(np.array([-1, *[1] * (rank - 2)]))])
        result = tape.op(name, [result, spread])
    _replace(node, tape, result)
    return True


def _write_mean(tape: "Tape", grouped: "ir.Value") -> "ir.Value":
    """Write the mean over the last of three axes, which are an input in all opsets that have GroupNormalization."""
    return tape.op("ReduceMean", [grouped, tape.op("Constant", [], {"value": ir.tensor(np.array([2]))})])


def _replace(node: "ir.Node", tape: "Tape", result: "ir.Value") -> None:
    """Put what a tape has in the place of a node, under its name, so that parts are found by it."""
    result.type, result.shape = node.outputs[0].type, node.outputs[0].shape
    for number, each in enumerate(tape.nodes[:-1]):
        each.name = f"{node.name}/{each.op_type}_{number}" if node.name else None
    tape.nodes[-1].name = node.name
    edit.substitute(node, tape.nodes, [result])
