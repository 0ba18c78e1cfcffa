"""Put faults into a graph, as they are published of engines and exporters: each makes some allowed answers wrong."""

import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Graph = onnx.GraphProto


class Fault(NamedTuple):
    """A graph with one fault."""

    kind: str
    place: str
    """Node at which it is."""
    model: onnx.ModelProto


def list_faults(model: onnx.ModelProto) -> Iterator[Fault]:
    """Yield the model with each fault that it has a place for, at the first, the middle and the last such place."""
    for kind, (fits, change) in _FAULTS.items():
        places = [at for at, node in enumerate(model.graph.node) if fits(model.graph, node)]
        for at in sorted({places[0], places[len(places) // 2], places[-1]}) if places else ():
            made = copy.deepcopy(model)
            change(made.graph, at)
            del made.graph.value_info[:]
            yield Fault(kind, f"{made.graph.node[at].op_type} {made.graph.node[at].name}", made)


def _weight(graph: Graph, name: str) -> onnx.TensorProto | None:
    return next((tensor for tensor in graph.initializer if tensor.name == name), None)


def _set(tensor: onnx.TensorProto, array: NDArray[np.generic]) -> None:
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _constant(graph: Graph, name: str, array: NDArray[np.generic]) -> str:
    graph.initializer.append(numpy_helper.from_array(array, name))
    return name


def _attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    return next((attribute for attribute in node.attribute if attribute.name == name), None)


def _behind(graph: Graph, at: int, *made: onnx.NodeProto) -> None:
    """Put nodes behind a node, whose output is called ``right`` then; the last of them gives what it gave."""
    node = graph.node[at]
    name, node.output[0] = node.output[0], "right"
    made[-1].output[0] = name
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*rest[: at + 1], *made, *rest[at + 1 :]])


def _is(*operators: str) -> Callable[[Graph, onnx.NodeProto], bool]:
    return lambda graph, node: node.op_type in operators


def _has_weight(*operators: str) -> Callable[[Graph, onnx.NodeProto], bool]:
    return lambda graph, node: node.op_type in operators and len(node.input) > 1 and bool(_weight(graph, node.input[1]))


def _computes(graph: Graph, node: onnx.NodeProto) -> bool:
    """Tell whether it gives floats with a batch: the main operators."""
    return node.op_type in ("Conv", "Gemm", "MatMul", "ConvTranspose", "Relu", "LayerNormalization", "Softmax", "Add")


# Structure


def _softmax_axis(graph: Graph, at: int) -> None:
    node = graph.node[at]
    axis = _attribute(node, "axis")
    value = axis.i if axis else -1
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("axis", 1 if value in (-1, 3) else 0))


def _swap(graph: Graph, at: int) -> None:
    node = graph.node[at]
    node.input[0], node.input[1] = node.input[1], node.input[0]


def _shift_padding(graph: Graph, at: int) -> None:
    pads = _attribute(graph.node[at], "pads")
    assert pads is not None
    half = len(pads.ints) // 2
    pads.ints[half - 1] -= 1
    pads.ints[-1] += 1


def _is_padded(graph: Graph, node: onnx.NodeProto) -> bool:
    pads = _attribute(node, "pads")
    return node.op_type == "Conv" and pads is not None and min(pads.ints) > 0


def _skip(graph: Graph, at: int) -> None:
    node = graph.node[at]
    node.op_type = "Identity"
    del node.input[1:], node.attribute[:]


def _drop_bias(graph: Graph, at: int) -> None:
    node = graph.node[at]
    bias = _weight(graph, node.input[2])
    assert bias is not None
    _set(bias, np.zeros_like(numpy_helper.to_array(bias)))


def _has_bias(graph: Graph, node: onnx.NodeProto) -> bool:
    return (
        node.op_type in ("Conv", "Gemm", "ConvTranspose")
        and len(node.input) > 2
        and bool(_weight(graph, node.input[2]))
    )


# Weights


def _change_weight(change: Callable[[NDArray[np.float32]], NDArray[np.generic]]) -> Callable[[Graph, int], None]:
    def apply(graph: Graph, at: int) -> None:
        weight = _weight(graph, graph.node[at].input[1])
        assert weight is not None
        _set(weight, np.ascontiguousarray(change(numpy_helper.to_array(weight).copy())).astype(np.float32))

    return apply


def _stale_scale(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    weight[..., 0] *= 1.25
    return weight


def _as_bfloat16(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    return (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _reverse_channel(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    weight[0] = weight[0][..., ::-1]
    return weight


# What shows on some inputs alone


def _wrong_for_batch(size: int) -> Callable[[Graph, int], None]:
    """Scale the result for one batch size, as an engine that takes another kernel there."""

    def apply(graph: Graph, at: int) -> None:
        source = graph.input[0].name
        zero, wanted = _constant(graph, "fault_zero", np.int64(0)), _constant(graph, "fault_size", np.int64(size))
        factor = _constant(graph, "fault_factor", np.float32(1.1))
        _behind(
            graph,
            at,
            helper.make_node("Shape", [source], ["fault_shape"]),
            helper.make_node("Gather", ["fault_shape", zero], ["fault_batch"]),
            helper.make_node("Equal", ["fault_batch", wanted], ["fault_here"]),
            helper.make_node("Mul", ["right", factor], ["fault_wrong"]),
            helper.make_node("Where", ["fault_here", "fault_wrong", "right"], [""]),
        )

    return apply


def _mix_rows(graph: Graph, at: int) -> None:
    """Give the last sample of a batch of more than one what belongs to the first."""
    zero, last = _constant(graph, "fault_zero", np.array([0])), _constant(graph, "fault_last", np.array([-1]))
    end, axis = _constant(graph, "fault_end", np.array([2**31])), _constant(graph, "fault_axis", np.array([0]))
    one = _constant(graph, "fault_one", np.array([1]))
    _behind(
        graph,
        at,
        helper.make_node("Slice", ["right", zero, last, axis], ["fault_head"]),
        helper.make_node("Slice", ["right", zero, one, axis], ["fault_first"]),
        helper.make_node("Slice", ["right", one, end, axis], ["fault_rest"]),
        helper.make_node("Concat", ["fault_head", "fault_first"], [""], axis=0),
    )


def _saturate(graph: Graph, at: int) -> None:
    """Cut large results off, as a stale range does; at 2.5, which few reach."""
    low, high = _constant(graph, "fault_low", np.float32(-2.5)), _constant(graph, "fault_high", np.float32(2.5))
    _behind(graph, at, helper.make_node("Clip", ["right", low, high], [""]))


def _overflow(graph: Graph, at: int) -> None:
    """Compute in float16 and back, as an engine in another precision than it says."""
    _behind(
        graph,
        at,
        helper.make_node("Cast", ["right"], ["fault_half"], to=onnx.TensorProto.FLOAT16),
        helper.make_node("Cast", ["fault_half"], [""], to=onnx.TensorProto.FLOAT),
    )


def _wrong_where(condition: Callable[[Graph, str], tuple[list[onnx.NodeProto], str]]) -> Callable[[Graph, int], None]:
    """Scale the result where a condition on the graph's inputs or the result holds; it names a bool value."""

    def apply(graph: Graph, at: int) -> None:
        made, here = condition(graph, "right")
        factor = _constant(graph, "fault_factor", np.float32(1.1))
        wrong = helper.make_node("Mul", ["right", factor], ["fault_wrong"])
        _behind(graph, at, *made, wrong, helper.make_node("Where", [here, "fault_wrong", "right"], [""]))

    return apply


def _batch(graph: Graph) -> list[onnx.NodeProto]:
    """Compute the batch as ``fault_batch``."""
    zero = _constant(graph, "fault_zero", np.int64(0))
    shape = helper.make_node("Shape", [graph.input[0].name], ["fault_shape"])
    return [shape, helper.make_node("Gather", ["fault_shape", zero], ["fault_batch"])]


def _batch_between(graph: Graph, right: str) -> tuple[list[onnx.NodeProto], str]:
    """Hold for batches above one that are no multiple of eight: the tail of a tile."""
    eight, one = _constant(graph, "fault_eight", np.int64(8)), _constant(graph, "fault_one", np.int64(1))
    zero = _constant(graph, "fault_none", np.int64(0))
    return [
        *_batch(graph),
        helper.make_node("Mod", ["fault_batch", eight], ["fault_rest"]),
        helper.make_node("Greater", ["fault_rest", zero], ["fault_tail"]),
        helper.make_node("Greater", ["fault_batch", one], ["fault_several"]),
        helper.make_node("And", ["fault_tail", "fault_several"], ["fault_here"]),
    ], "fault_here"


def _odd_batch(graph: Graph, right: str) -> tuple[list[onnx.NodeProto], str]:
    """Hold for odd batches above one: the rest of a loop that takes two rows at a time."""
    two, one = _constant(graph, "fault_two", np.int64(2)), _constant(graph, "fault_one", np.int64(1))
    return [
        *_batch(graph),
        helper.make_node("Mod", ["fault_batch", two], ["fault_rest"]),
        helper.make_node("Equal", ["fault_rest", one], ["fault_odd"]),
        helper.make_node("Greater", ["fault_batch", one], ["fault_several"]),
        helper.make_node("And", ["fault_odd", "fault_several"], ["fault_here"]),
    ], "fault_here"


def _all_equal(graph: Graph, right: str) -> tuple[list[onnx.NodeProto], str]:
    """Hold where all numbers of an input are the same: ties of everything."""
    name = graph.input[0].name
    return [
        helper.make_node("ReduceMax", [name], ["fault_max"], keepdims=0),
        helper.make_node("ReduceMin", [name], ["fault_min"], keepdims=0),
        helper.make_node("Equal", ["fault_max", "fault_min"], ["fault_here"]),
    ], "fault_here"


def _rows_alike(graph: Graph, right: str) -> tuple[list[onnx.NodeProto], str]:
    """Hold where the first sample of a batch is also the last: rows that are merged."""
    name = graph.input[0].name
    first, last = _constant(graph, "fault_first", np.int64(0)), _constant(graph, "fault_last", np.int64(-1))
    nothing, one = _constant(graph, "fault_nothing", np.float32(0)), _constant(graph, "fault_one", np.int64(1))
    return [
        *_batch(graph),
        helper.make_node("Gather", [name, first], ["fault_head"], axis=0),
        helper.make_node("Gather", [name, last], ["fault_foot"], axis=0),
        helper.make_node("Sub", ["fault_head", "fault_foot"], ["fault_apart"]),
        helper.make_node("Cast", ["fault_apart"], ["fault_float"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Abs", ["fault_float"], ["fault_far"]),
        helper.make_node("ReduceMax", ["fault_far"], ["fault_farthest"], keepdims=0),
        helper.make_node("LessOrEqual", ["fault_farthest", nothing], ["fault_same"]),
        helper.make_node("Greater", ["fault_batch", one], ["fault_several"]),
        helper.make_node("And", ["fault_same", "fault_several"], ["fault_here"]),
    ], "fault_here"


def _row_of_length(length: int) -> Callable[[Graph, str], tuple[list[onnx.NodeProto], str]]:
    """Hold where the mask of some row has so many places: one alone, or none."""

    def condition(graph: Graph, right: str) -> tuple[list[onnx.NodeProto], str]:
        wanted, axis = _constant(graph, "fault_one", np.int64(length)), _constant(graph, "fault_axis", np.array([1]))
        return [
            helper.make_node("ReduceSum", ["mask", axis], ["fault_lengths"], keepdims=0),
            helper.make_node("ReduceMin", ["fault_lengths"], ["fault_shortest"], keepdims=0),
            helper.make_node("Equal", ["fault_shortest", wanted], ["fault_here"]),
        ], "fault_here"

    return condition


def _reads_mask(graph: Graph, node: onnx.NodeProto) -> bool:
    return _computes(graph, node) and any(value.name == "mask" for value in graph.input)


def _clip_input(low: float, high: float) -> Callable[[Graph, int], None]:
    """Cut what the graph reads off: a calibrated range, which no sample leaves."""

    def apply(graph: Graph, at: int) -> None:
        node, ends = graph.node[at], [_constant(graph, "fault_low", np.float32(low))]
        ends.append(_constant(graph, "fault_high", np.float32(high)))
        made = helper.make_node("Clip", [node.input[0], *ends], ["fault_clipped"])
        node.input[0] = "fault_clipped"
        rest = list(graph.node)
        del graph.node[:]
        graph.node.extend([*rest[:at], made, *rest[at:]])

    return apply


def _reads_floats(graph: Graph, node: onnx.NodeProto) -> bool:
    floats = {each.name for each in graph.input if each.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    return bool(node.input) and node.input[0] in floats


def _saturate_top(graph: Graph, at: int) -> None:
    """Cut large results off at one end alone, at 9, as int8 with a zero point at its end."""
    high = _constant(graph, "fault_high", np.float32(9))
    _behind(graph, at, helper.make_node("Min", ["right", high], [""]))


def _nan_at_zero(graph: Graph, at: int) -> None:
    """Divide by the greatest magnitude and multiply by it again: NaN where all are zero."""
    _behind(
        graph,
        at,
        helper.make_node("Abs", ["right"], ["fault_abs"]),
        helper.make_node("ReduceMax", ["fault_abs"], ["fault_max"], keepdims=1),
        helper.make_node("Div", ["right", "fault_max"], ["fault_unit"]),
        helper.make_node("Mul", ["fault_unit", "fault_max"], [""]),
    )


def _epsilon(graph: Graph, at: int) -> None:
    node = graph.node[at]
    kept = [attribute for attribute in node.attribute if attribute.name != "epsilon"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("epsilon", 1e-2)])


def _drop_mask(graph: Graph, at: int) -> None:
    """Take the branch of a Where that is not masked."""
    node = graph.node[at]
    kept = node.input[2] if _weight(graph, node.input[1]) else node.input[1]
    node.op_type = "Identity"
    del node.input[:]
    node.input.append(kept)


def _has_mask(graph: Graph, node: onnx.NodeProto) -> bool:
    return node.op_type == "Where" and any(_weight(graph, name) for name in node.input[1:])


def _wrap_ids(graph: Graph, at: int) -> None:
    """Read ids as 8 bits."""
    node = graph.node[at]
    name = node.input[1]
    node.input[1] = "fault_ids"
    made = [
        helper.make_node("Cast", [name], ["fault_narrow"], to=onnx.TensorProto.UINT8),
        helper.make_node("Cast", ["fault_narrow"], ["fault_wide"], to=onnx.TensorProto.INT64),
        helper.make_node("Mod", ["fault_wide", _constant(graph, "fault_mod", np.int64(128))], ["fault_ids"]),
    ]
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*rest[:at], *made, *rest[at:]])


def _reads_ids(graph: Graph, node: onnx.NodeProto) -> bool:
    return node.op_type == "Gather" and node.input[1] in {value.name for value in graph.input}


Change = Callable[[Graph, int], None]
_FAULTS: dict[str, tuple[Callable[[Graph, onnx.NodeProto], bool], Change]] = {
    "wrong axis": (_is("Softmax", "LogSoftmax"), _softmax_axis),
    "swapped inputs": (_is("Sub", "Div", "Concat"), _swap),
    "padding shifted": (_is_padded, _shift_padding),
    "activation dropped": (_is("Relu", "Tanh", "HardSwish", "LeakyRelu", "Elu", "Gelu", "Clip"), _skip),
    "bias dropped": (_has_bias, _drop_bias),
    "stale scale": (_has_weight("Conv", "Gemm", "MatMul"), _change_weight(_stale_scale)),
    "weights in bfloat16": (_has_weight("Conv", "Gemm", "MatMul"), _change_weight(_as_bfloat16)),
    "weight reversed": (_has_weight("Conv", "ConvTranspose"), _change_weight(_reverse_channel)),
    "tail of a tile": (_computes, _wrong_where(_batch_between)),
    "wrong for odd batches": (_computes, _wrong_where(_odd_batch)),
    "wrong where all is equal": (_computes, _wrong_where(_all_equal)),
    "wrong where rows are alike": (_computes, _wrong_where(_rows_alike)),
    "wrong with a row of one place": (_reads_mask, _wrong_where(_row_of_length(1))),
    "wrong with a row of no place": (_reads_mask, _wrong_where(_row_of_length(0))),
    "input cut at six": (_reads_floats, _clip_input(-6, 6)),
    "input cut below six": (_reads_floats, _clip_input(-6, 3e38)),
    "results cut above nine": (_computes, _saturate_top),
    "wrong for batch 3": (_computes, _wrong_for_batch(3)),
    "wrong for batch 7": (_computes, _wrong_for_batch(7)),
    "rows mixed": (_is("Relu", "Gemm", "LayerNormalization", "Softmax"), _mix_rows),
    "saturated": (_computes, _saturate),
    "computed in float16": (_computes, _overflow),
    "NaN at zero": (_is("Relu", "Softmax", "Tanh"), _nan_at_zero),
    "epsilon": (_is("LayerNormalization"), _epsilon),
    "mask dropped": (_has_mask, _drop_mask),
    "ids in 7 bits": (_reads_ids, _wrap_ids),
}
"""Kind → the nodes that it fits, and what it does to one."""
