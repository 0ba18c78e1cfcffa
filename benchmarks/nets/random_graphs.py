"""Make random ONNX graphs that are valid by construction: the same seed gives the same graph.

A graph grows node by node (graph_builder.py): an operator is drawn (graph_products.py, graph_elementwise.py,
graph_reductions.py, graph_layout.py and graph_subgraphs.py), then a value that it takes, then its attributes and its
weights. The first axis is the batch everywhere; values that have lost it become outputs.
"""

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from graph_builder import BATCH, BOOL, FLOAT, INT64, VOCABULARY, Array, RandomGraph, Shape
from graph_elementwise import (
    add_binary,
    add_channel_broadcast,
    add_half_island,
    add_integer_island,
    add_masked,
    add_unary,
    add_where,
    add_written_out,
)
from graph_layout import (
    add_concat,
    add_embed,
    add_expand,
    add_gather,
    add_pad,
    add_reshape,
    add_resize,
    add_slice,
    add_split,
    add_transpose,
)
from graph_products import (
    add_attention,
    add_conv,
    add_conv_1d,
    add_conv_transpose,
    add_einsum,
    add_gemm,
    add_matmul,
    add_quantized_island,
    add_recurrent,
)
from graph_reductions import add_argmax, add_normalize, add_pool, add_reduce, add_reduce_all, add_softmax, add_topk
from graph_subgraphs import FUNCTIONS, add_function, add_if, add_loop, add_scan, make_doubled
from onnx import helper, numpy_helper

_OPSETS = tuple(range(13, 24))
_STATIC_SHARE, _FIXED_BATCH = 0.15, 2
Grow = Callable[[RandomGraph], None]
_GROWTHS: Sequence[Grow] = (
    *(add_conv, add_conv, add_conv, add_conv_transpose),
    *(add_gemm, add_gemm, add_gemm, add_matmul, add_matmul, add_matmul),
    *(add_conv, add_conv, add_conv, add_conv_transpose, add_conv_1d),
    *(add_gemm, add_gemm, add_matmul, add_matmul, add_attention, add_einsum, add_recurrent),
    *(add_unary, add_unary, add_unary, add_written_out, add_written_out),
    *(add_binary, add_binary, add_channel_broadcast, add_normalize, add_normalize),
    *(add_pool, add_resize, add_concat, add_concat, add_split, add_slice, add_gather, add_embed, add_embed),
    *(add_pad, add_reshape, add_transpose, add_expand),
    *(add_reduce, add_reduce_all, add_softmax, add_topk, add_argmax),
    *(add_where, add_masked, add_half_island, add_integer_island, add_quantized_island),
    *(add_if, add_loop, add_scan, add_function),
)
"""What is drawn from, as often as it stands here; in another order, seeds give other graphs."""


def make_graph(seed: int) -> onnx.ModelProto:
    """Make the graph of a seed."""
    rng = np.random.default_rng(seed)
    static = rng.random() < _STATIC_SHARE
    graph = RandomGraph(seed, rng, _OPSETS[int(rng.integers(len(_OPSETS)))], _FIXED_BATCH if static else BATCH)
    _add_inputs(graph)
    wanted = int(rng.integers(3, 24))
    for _ in range(6 * wanted):
        if len(graph.nodes) >= wanted:
            break
        graph.choose(_GROWTHS)(graph)
    outputs = _choose_outputs(graph)
    inputs = [*graph.inputs]
    floats = [name for name, array in graph.weights.items() if array.dtype == np.float32 and array.ndim > 0]
    if floats and graph.chance(0.1):  # a weight that may be fed
        name = graph.choose(floats)
        inputs.append(helper.make_tensor_value_info(name, FLOAT, graph.weights[name].shape))
    initializers = [numpy_helper.from_array(array, name) for name, array in graph.weights.items()]
    body = helper.make_graph(graph.nodes, f"random_{seed}", inputs, outputs, initializers)
    imports = [helper.make_opsetid("", graph.opset)]
    functions = []
    if any(node.domain == FUNCTIONS for node in graph.nodes):
        imports.append(helper.make_opsetid(FUNCTIONS, 1))
        functions.append(make_doubled(graph.opset))
    return helper.make_model(body, opset_imports=imports, functions=functions, ir_version=10)


def _add_inputs(graph: RandomGraph) -> None:
    shapes: list[tuple[str, Shape, int]] = []
    main = graph.choose(("picture", "picture", "sequence", "vector"))
    size = int(graph.rng.integers(4, 10))
    channels = graph.choose((1, 3, 4, 8, 16))
    sizes = {"picture": (channels, size, size), "sequence": (size, 2 * channels), "vector": (4 * channels,)}
    shapes.append((main, sizes[main], FLOAT))
    if graph.chance(0.3):
        kind = graph.choose(tuple(sizes))
        shapes.append(("other", sizes[kind], FLOAT))
    if graph.chance(0.2):
        shapes.append(("tokens", (size,), INT64))
    if graph.chance(0.15):
        shapes.append(("mask", (size,), BOOL))
    for name, shape, kind in shapes:
        graph.inputs.append(graph.describe(graph.add(name, shape, kind)))


def _choose_outputs(graph: RandomGraph) -> list[onnx.ValueInfoProto]:
    """Make outputs of what nothing reads, mostly, and of some other values; rarely of an input or a weight."""
    read = {name for node in graph.nodes for name in node.input}
    fed = {value.name for value in graph.inputs}
    made = [value for value in graph.values if value.name not in fed]
    ends = [value for value in made if value.name not in read and not graph.chance(0.1)]
    inner = [value for value in made if value.name in read and graph.chance(0.08)]
    chosen = {value.name: graph.describe(value) for value in (*ends, *inner)}
    if graph.chance(0.04):
        value = graph.values[0]
        chosen[value.name] = graph.describe(value)
    outputs = [*chosen.values(), *graph.extras]
    weights = [name for name, array in graph.weights.items() if array.dtype == np.float32]
    if weights and graph.chance(0.04):
        name = graph.choose(weights)
        outputs.append(helper.make_tensor_value_info(name, FLOAT, graph.weights[name].shape))
    if not outputs:
        outputs.append(graph.describe(graph.values[-1]))
    return outputs


def make_feeds(model: onnx.ModelProto, batch: int, seed: int = 0) -> dict[str, Array]:
    """Draw feeds of a batch size for a random graph; one with a fixed batch has that one."""
    rng = np.random.default_rng((seed, batch))
    weights = {tensor.name for tensor in model.graph.initializer}
    feeds: dict[str, Array] = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        kind = value.type.tensor_type
        shape = [batch if dim.dim_param else dim.dim_value for dim in kind.shape.dim]
        if kind.elem_type == FLOAT:
            feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
        elif kind.elem_type == BOOL:
            feeds[value.name] = rng.random(shape) < 0.5
        else:
            feeds[value.name] = rng.integers(0, VOCABULARY, shape)
    return feeds
