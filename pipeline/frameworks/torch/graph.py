"""Compute an ONNX graph in torch, train its weights, and put them back.

Each node is a module, named after the value that it makes. What QuantizeLinear and DequantizeLinear do to a value is
one rounding to the very grid of the graph, whose gradient is passed straight through (Jacob et al., "Quantization and
Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018, section 3). Scales of
activations are trained with the weights (Esser et al., "Learned Step Size Quantization", ICLR 2020); those that are
equal stay equal, as kernels may need them to be. Zero points and the nodes stay as they are; so do scales of weights,
but where a bias would not fit an int32.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import edit, ir, model_file
from enginesmith.pipeline.frameworks.torch import operators
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, NamedForward
from enginesmith.pipeline.tensors import Array

_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_WEIGHTS = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Gemm": (1, 2),
    "MatMul": (0, 1),
    "LSTM": (1, 2, 3),
    "GRU": (1, 2, 3),
    "RNN": (1, 2, 3),
    "BatchNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "PRelu": (1,),
}
"""Operator → its inputs that are trained where they are constants."""
_BY_CHANNEL = ("Add", "Mul")
"""Operators whose constants are trained where they have one number for each channel of a product, and no other axis."""
_CHANNELS_SECOND = ("Conv", "ConvTranspose", "BatchNormalization", "InstanceNormalization", "GroupNormalization")
_CHANNELS_LAST = ("MatMul", "Gemm", "LayerNormalization")
_ROOTS = ("Sqrt", "Reciprocal")
"""Operators that make what a normalization divides or multiplies by."""
_TIED = ("Gather", "Transpose", "Reshape", "Unsqueeze", "Cast", "Identity")
"""Operators that read a weight of another node as a weight, too, such as an embedding whose table a product has: it
stays one."""
_LARGEST = 1e4
"""Constants with larger numbers are masks, and no weights."""
_SPARSE = 0.45
"""Share of zeros from which on they stay zeros: a float weight of a product has so many only if it was made sparse."""
_GROUP, _ZEROS = 4, 2
"""A weight in few bits was made sparse if two of each four numbers along an axis are zero."""
_GRIDS: dict[str, tuple[int, int]] = {"int8": (-128, 127), "uint8": (0, 255), "int32": (-(1 << 30), 1 << 30)}
_NARROWER = 63
"""Weights in 7 bits stay within it: on CPUs without VNNI, sums of larger products saturate."""
_WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")
"""Operators whose third input is a bias, which engines add up in int32: in steps of the product of both scales."""
_SCALES_FASTER = 25.0
"""A scale is its first value times the exponential of so many times what is trained, which begins at zero: at a
learning rate of 4e-5, about that of weights, a step changes it by a thousandth."""

Compute = Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Grid:
    """Whole numbers from ``low`` to ``high``: less ``zero`` and times ``scale`` they are the floats they stand for."""

    scale: Array
    zero: Array
    """Like the scale: one number, one for each entry of the axis, or one for each column along it, which is a block."""
    axis: int
    low: int
    high: int
    dtype: str

    def widen(self, levels: Array) -> Array:
        """Return the floats that levels stand for."""
        scale, zero = self._align(levels.shape)
        numbers: Array = (levels.astype(np.float64) - zero) * scale
        return numbers.astype(np.float32)

    def narrow(self, numbers: Array) -> Array:
        """Return the nearest levels."""
        scale, zero = self._align(numbers.shape)
        return (np.rint(numbers.astype(np.float64) / scale) + zero).clip(self.low, self.high).astype(self.dtype)

    def _align(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        scale, zero = self.scale.astype(np.float64), self.zero.astype(np.int64)
        return (
            (scale, zero)
            if scale.ndim > 1
            else (edit.spread(scale, shape, self.axis), edit.spread(zero, shape, self.axis))
        )

    @property
    def tie(self) -> tuple[float, int, str]:
        """Return what tells this grid from another one with a single scale: scale, zero point, dtype."""
        return float(self.scale.reshape(())), int(self.zero.reshape(())), self.dtype

    def compute(self) -> Compute:
        """Return what rounds floats to the grid, and passes gradients of those within it straight through."""
        low, high = self.low, self.high
        if self.dtype == "int32":  # a bias: its steps are finer than those of floats
            return lambda values: (_first(values),)
        if self.scale.size == 1:
            scale, zero = float(self.scale.reshape(())), int(self.zero.reshape(()))
            return lambda values: (torch.fake_quantize_per_tensor_affine(_first(values), scale, zero, low, high),)
        scales, zeros = (
            torch.from_numpy(np.array(each).reshape(-1)) for each in (self.scale, self.zero.astype(np.int32))
        )

        def compute(values: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
            value, axis, columns = _first(values), self.axis, self.scale.ndim > 1
            given = value.movedim(axis, -1) if columns else value
            flat, axis = (given.flatten(0, -2), 0) if columns else (given, axis)
            rounded = torch.fake_quantize_per_channel_affine(
                flat, scales.to(value.device), zeros.to(value.device), axis, low, high
            )
            return (rounded.reshape(given.shape).movedim(-1, self.axis) if columns else rounded,)

        return compute


def _first(values: Sequence[Tensor | None]) -> Tensor:
    assert values[0] is not None
    return values[0]


class _Node(nn.Module):
    """Compute one node."""

    def __init__(self, compute: Compute, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.compute, self.inputs, self.outputs = compute, inputs, outputs

    def forward(self, *values: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        """Return the only output as it is, so that it can be looked at as any module's."""
        results = self.compute(values)
        return results[0] if len(self.outputs) == 1 else results


class GraphModule(nn.Module):
    """Compute a graph: tensors in the order of its inputs → tensors by the names of its outputs."""

    def __init__(self, model: "ir.Model") -> None:
        """Take the constants out of a graph.

        Raises:
            ModelError: an operator has no form in torch, or pairs of Q/DQ are of a kind that is not trained.
        """
        super().__init__()
        self._inputs = [str(value.name) for value in model.graph.inputs]
        self._outputs = [str(value.name) for value in model.graph.outputs]
        self._grids: dict[str, _Grid] = {}
        """By the name of a weight in few bits."""
        self._constants: dict[str, str] = {}
        """Name of a constant → that of the parameter or buffer."""
        self._pairs: dict[str, _Grid] = {}
        """By the name of what QuantizeLinear makes of an activation."""
        self._ties: dict[tuple[float, int, str], int] = {}
        """Scale, zero point and type → place of their number in what is trained."""
        self._masks: dict[str, str] = {}
        """Name of a weight → that of the buffer with 0 where it stays 0, and else 1."""
        self._paths: list[str] = []
        trained = {_name(node.inputs[index]) for node, index in _list_trained(model)}
        opset = model.opset_imports[""]
        self._fixed = not all(map(_has_own_product, model.graph))
        """True where scales stay: a bias in int32 counts in steps of a scale that is not known."""
        for node in model.graph:
            outputs = [_name(value) for value in node.outputs]
            path = f"value {next(filter(None, outputs), '')}".replace(".", "/")
            path += f" {len(self._paths)}" if path in self._paths else ""
            self._paths.append(path)
            compute = self._find_rounding(node) or operators.find(node, opset)
            self.add_module(path, _Node(compute, [_name(value) for value in node.inputs], outputs))
        if self._ties:
            self.scales = nn.Parameter(torch.zeros(len(self._ties)))
        for name, value in model.graph.initializers.items():
            if (numbers := edit.read(value)) is not None:
                self._add_constant(name, numbers, trained=name in trained or name in self._grids)
        self._read_last = self._find_last_reads()

    def _find_rounding(self, node: "ir.Node") -> Compute | None:
        """Return what a node of a Q/DQ pair does; None for other nodes."""
        if node.op_type == _QUANTIZE:
            if any(use.node.op_type != _DEQUANTIZE for use in node.outputs[0].uses()):
                raise _explain_pair(node, "something else than DequantizeLinear reads it")
            grid = _read_grid(node, edit.read(edit.find_input(node, 2)))
            if self._fixed or grid.scale.size > 1 or edit.read(node.inputs[0]) is not None:
                return grid.compute()
            self._pairs[_name(node.outputs[0])] = grid
            self._ties.setdefault(grid.tie, len(self._ties))
            return lambda values: (self._round(_first(values), grid),)
        if node.op_type != _DEQUANTIZE:
            return None
        given, producer = node.inputs[0], node.inputs[0].producer() if node.inputs[0] else None
        if producer is not None and producer.op_type == _QUANTIZE:
            if not np.array_equal(_read_scale(node), _read_scale(producer)):
                raise _explain_pair(node, "its scale is another than that of QuantizeLinear")
            return lambda values: (_first(values),)  # QuantizeLinear has rounded it
        levels = edit.read(given)
        if levels is None:
            raise _explain_pair(node, "it reads what is computed otherwise")
        grid = _read_grid(node, levels)
        if grid.dtype == "int8" and int(np.abs(levels.astype(np.int16)).max(initial=0)) <= _NARROWER:
            grid = _Grid(grid.scale, grid.zero, grid.axis, -_NARROWER, _NARROWER, grid.dtype)
        elif grid.dtype == "int8" and levels.size and int(levels.min()) > grid.low:
            grid = _Grid(grid.scale, grid.zero, grid.axis, -grid.high, grid.high, grid.dtype)
        self._grids[_name(given)] = grid
        return grid.compute()

    def _round(self, values: Tensor, grid: _Grid) -> Tensor:
        """Round to the grid; gradients go to the scale, too."""
        scale, steps = self._scale(grid), values.numel() * (grid.high - grid.low) / 2
        zero = scale.new_full((1,), float(grid.zero.reshape(())))
        return torch._fake_quantize_learnable_per_tensor_affine(
            values.float(), scale, zero, grid.low, grid.high, 1 / math.sqrt(max(steps, 1))
        )

    def _scale(self, grid: _Grid) -> Tensor:
        """Return the scale as it is trained by now, of shape (1,)."""
        index = self._ties[grid.tie]
        return (_SCALES_FASTER * self.scales[index : index + 1]).exp() * float(grid.scale.reshape(()))

    def _add_constant(self, name: str, numbers: Array, *, trained: bool) -> None:
        key = self._constants[name] = f"constant {len(self._constants)}"
        grid = self._grids.get(name)
        if not trained:
            self.register_buffer(key, torch.from_numpy(np.array(numbers)))
            return
        floats = grid.widen(numbers) if grid else np.array(numbers)
        self.register_parameter(key, nn.Parameter(torch.from_numpy(floats)))
        sparse = (
            _has_pattern(floats)
            if grid
            else floats.size > max(floats.shape, default=1) and np.mean(floats == 0) >= _SPARSE
        )
        if sparse:
            self._masks[name] = f"mask {key}"
            self.register_buffer(self._masks[name], torch.from_numpy((floats != 0).astype(np.float32)))

    def _find_last_reads(self) -> list[list[str]]:
        """List by node the values that no later node reads, so that their memory is free."""
        last = {name: index for index, path in enumerate(self._paths) for name in self._node(path).inputs}
        free: list[list[str]] = [[] for _ in self._paths]
        for name, index in last.items():
            if name and name not in self._outputs:
                free[index].append(name)
        return free

    def _node(self, path: str) -> _Node:
        node = self.get_submodule(path)
        assert isinstance(node, _Node)
        return node

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Compute all nodes, one after the other."""
        values: dict[str, Tensor] = dict(zip(self._inputs, tensors, strict=True))
        for path, free in zip(self._paths, self._read_last, strict=True):
            node = self._node(path)
            results = node(*(self._read(name, values) for name in node.inputs))
            for name, value in zip(node.outputs, (results,) if isinstance(results, Tensor) else results, strict=False):
                values[name] = value
            for name in free:
                values.pop(name, None)
        return {name: values[name] if name in values else self._constant(name) for name in self._outputs}

    def _read(self, name: str, values: dict[str, Tensor]) -> Tensor | None:
        if not name:
            return None
        return values[name] if name in values else self._constant(name)

    def _constant(self, name: str) -> Tensor:
        value: Tensor = getattr(self, self._constants[name])
        return value * getattr(self, self._masks[name]) if name in self._masks else value

    @torch.no_grad()
    def write_trained(self, model: "ir.Model") -> None:
        """Put weights and scales into the graph that they were taken from."""
        grids = self._grids | self._write_scales(model)
        for name, key in self._constants.items():
            if key not in self._parameters:
                continue
            numbers = self._constant(name).cpu().numpy()
            stored = grids[name].narrow(numbers) if name in grids else numbers
            model.graph.initializers[name].const_value = ir.tensor(stored, name=name)

    def _write_scales(self, model: "ir.Model") -> dict[str, _Grid]:
        """Write the scales that were trained, and return the grids of weights and biases that change with them.

        A weight near zero has so fine a scale that its bias just fits an int32: it is as coarse as that needs again.
        """
        for node in model.graph:
            grid = self._pairs.get(_name(node.outputs[0])) if node.op_type == _QUANTIZE else None
            if grid is not None and self._is_trained(grid):
                pair = [node, *(use.node for use in node.outputs[0].uses())]
                edit.write([(each, 1) for each in pair], self._trained_scale(grid))
        products, changed = list(self._list_products(model)), dict[str, _Grid]()
        for grid, weight, bias in products:
            numbers = self._read_bias(bias)
            if self._is_trained(grid) and numbers is not None:
                name = _name(weight.inputs[0])
                old = changed.get(name, self._grids[name])
                least = np.abs(numbers) / float(self._trained_scale(grid)) / _GRIDS["int32"][1]
                least = least.reshape(old.scale.shape) if least.size == old.scale.size else least.max(initial=0.0)
                changed[name] = replace(old, scale=np.maximum(old.scale, least).astype(np.float32))
        for name, grid in changed.items():
            edit.write([(use.node, 1) for use in model.graph.initializers[name].uses()], grid.scale)
        for grid, weight, bias in products:
            scale = changed[name].scale if (name := _name(weight.inputs[0])) in changed else None
            if scale is None:
                continue
            widening = bias.producer()
            if widening is not None and (name := _name(widening.inputs[0])) in self._grids:
                product = (float(self._trained_scale(grid)) * scale.astype(np.float64)).astype(np.float32)
                product = np.broadcast_to(product, np.broadcast_shapes(product.shape, self._grids[name].scale.shape))
                changed[name] = replace(self._grids[name], scale=product)
                edit.write([(widening, 1)], np.array(product))
        return changed

    def _list_products(self, model: "ir.Model") -> "Iterator[tuple[_Grid, ir.Node, ir.Value]]":
        """List products with a bias: the grid of the input, which may be trained, the weight's node, and the bias."""
        for node in model.graph:
            if node.op_type not in _WITH_BIAS or (bias := edit.find_input(node, 2)) is None:
                continue
            source, weight = _find_quantize(node.inputs[0]), node.inputs[1].producer() if node.inputs[1] else None
            grid = self._pairs.get(_name(source.outputs[0])) if source is not None else None
            if grid is not None and weight is not None and _name(weight.inputs[0]) in self._grids:
                yield grid, weight, bias

    def _read_bias(self, bias: "ir.Value") -> Array | None:
        """Return a bias as it was trained, a vector; None where it is computed."""
        widening = bias.producer()
        name = _name(bias if widening is None else widening.inputs[0])
        return self._constant(name).cpu().numpy().reshape(-1).astype(np.float64) if name in self._constants else None

    @torch.no_grad()
    def _trained_scale(self, grid: _Grid) -> Array:
        scale: Array = self._scale(grid).cpu().numpy().reshape(grid.scale.shape)
        return scale

    def _is_trained(self, grid: _Grid) -> bool:
        return not np.array_equal(self._trained_scale(grid), grid.scale)


def _find_quantize(value: "ir.Value | None") -> "ir.Node | None":
    """Return the QuantizeLinear of the pair that makes a value; None where none does."""
    pair = value.producer() if value is not None else None
    given = pair.inputs[0] if pair is not None and pair.op_type == _DEQUANTIZE else None
    source = given.producer() if given is not None else None
    return source if source is not None and source.op_type == _QUANTIZE else None


def _has_own_product(node: "ir.Node") -> bool:
    """Tell whether a bias in int32 is that of one product, whose input and weight are in few bits; True for others."""
    levels = edit.read(node.inputs[0]) if node.op_type == _DEQUANTIZE else None
    if levels is None or levels.dtype != np.int32:
        return True
    given, readers = node.inputs[0], list(node.outputs[0].uses())
    if given is None or len(given.uses()) > 1 or [use.idx for use in readers] != [2]:
        return False
    product = readers[0].node
    weight = product.inputs[1].producer() if product.inputs[1] is not None else None
    in_bits = weight is not None and weight.op_type == _DEQUANTIZE and edit.read(weight.inputs[0]) is not None
    return product.op_type in _WITH_BIAS and in_bits and _find_quantize(product.inputs[0]) is not None


def _name(value: "ir.Value | None") -> str:
    return "" if value is None else str(value.name or "")


def _list_trained(model: "ir.Model") -> "Iterator[tuple[ir.Node, int]]":
    """List the inputs of nodes, by node and index, that are weights: constants of float32."""
    for node in model.graph:
        places = _WEIGHTS.get(node.op_type, ())
        by_channel = node.op_type in _BY_CHANNEL
        for index, value in enumerate(node.inputs):
            if value is None or not (index in places or by_channel) or not edit.is_weight(value):
                continue
            numbers = edit.read(value)
            assert numbers is not None
            along_one = by_channel and numbers.size > 1 and numbers.size == max(numbers.shape)
            axis = numbers.shape.index(numbers.size) - numbers.ndim if along_one else 0
            fits = along_one and _has_channels(node.inputs[1 - index], axis)
            if (fits or not by_channel) and np.abs(numbers).max(initial=0.0) < _LARGEST:
                yield node, index


def _has_channels(value: "ir.Value | None", axis: int) -> bool:
    """Tell whether a value has its channels along an axis, counted from the end.

    It is made by a product with weights or a normalization, or by vectors behind one. Along other axes, and elsewhere,
    vectors are no weights, but strides or frequencies.
    """
    node = value.producer() if value is not None else None
    if value is None or node is None:
        return False
    if node.op_type in (_QUANTIZE, _DEQUANTIZE):
        return _has_channels(node.inputs[0], axis)
    if node.op_type in _BY_CHANNEL and any(map(edit.is_weight, node.inputs)):
        return any(_has_channels(each, axis) for each in node.inputs)
    if node.op_type in _CHANNELS_SECOND:
        return value.shape is not None and axis == 1 - len(value.shape)
    if node.op_type in _CHANNELS_LAST:
        return axis == -1 and _is_constant(node.inputs[1])
    producers = [each.producer() for each in node.inputs if each is not None]
    return node.op_type in ("Div", "Mul") and any(each is not None and each.op_type in _ROOTS for each in producers)


def _is_constant(value: "ir.Value | None") -> bool:
    """Tell whether a value is a constant, be it in few bits."""
    node = value.producer() if value is not None else None
    source = node.inputs[0] if node is not None and node.op_type == _DEQUANTIZE else value
    return source is not None and source.is_initializer()


def _read_scale(node: "ir.Node") -> Array:
    """Read a scale; it is empty where it is computed."""
    scale = edit.read(node.inputs[1])
    return np.empty(0) if scale is None else scale


def _read_grid(node: "ir.Node", levels: Array | None) -> _Grid:
    """Read the grid of a node of a pair; ``levels`` are numbers of its type, the zero points for instance.

    Raises:
        ModelError: the scale is computed, or the type is not an integer of 8 bits or of a bias.
    """
    scale, zero = edit.read(node.inputs[1]), edit.read(edit.find_input(node, 2))
    dtype = str(levels.dtype) if levels is not None else "uint8"
    if scale is None or scale.dtype != np.float32 or dtype not in _GRIDS:
        raise _explain_pair(node, f"its numbers are {dtype}, or its scale is no constant of float32")
    axis, value = node.attributes.get_int("axis", 1), node.inputs[0]
    rank = len(value.shape) if value is not None and value.shape is not None else 0
    if scale.ndim > 1 and scale.shape[axis] > 1:
        raise _explain_pair(node, "its scales are those of blocks, several in a column")
    zeros = np.zeros(scale.shape, np.int32) if zero is None else np.broadcast_to(zero, scale.shape).astype(np.int32)
    return _Grid(scale, zeros, axis + rank if axis < 0 else axis, *_GRIDS[dtype], dtype)


def _explain_pair(node: "ir.Node", why: str) -> ModelError:
    return ModelError(f"{node.op_type} {node.name!r} cannot be trained: {why}", "train graphs that are static int8")


def _has_pattern(numbers: Array) -> bool:
    """Tell whether two of each four numbers along one axis are zero."""
    for axis in range(numbers.ndim if numbers.size > _GROUP else 0):
        if numbers.shape[axis] % _GROUP == 0:
            groups = np.moveaxis(numbers, axis, -1).reshape(-1, _GROUP)
            if ((groups == 0).sum(axis=1) >= _ZEROS).all():
                return True
    return False


def load_graph(path: Path) -> LoadedModel:
    """Load an ONNX file as a module whose weights can be trained; its example is empty.

    Raises:
        InvalidGraph: the file cannot be read.
        ModelError: an operator has no form in torch.
    """
    signature = model_file.signature(path)
    module = GraphModule(_load_with_constants(path))
    names = tuple(spec.name for spec in signature.outputs)
    return LoadedModel(NamedForward(module, tuple(spec.name for spec in signature.inputs), names), signature, {})


def save_graph(path: Path, loaded: LoadedModel, out: Path, external_data_bytes: int) -> None:
    """Write the graph at ``path`` with the weights of the module that was loaded from it."""
    model = _load_with_constants(path)
    assert isinstance(loaded.module.model, GraphModule)
    loaded.module.model.write_trained(model)
    edit.save(model, out, external_data_bytes)


def _load_with_constants(path: Path) -> "ir.Model":
    """Load a graph whose constants are all initializers."""
    model = edit.load(path)
    edit.fix_weights(model)
    edit.lift_constants(model)
    _split_shared(model)
    return model


def _split_shared(model: "ir.Model") -> None:
    """Give a weight a constant of its own where inputs that are not trained read the same one; biases in int32 always.

    Exporters merge equal constants, such as the bias and the means of a batch normalization that are all zero. A bias
    in int32 counts in steps that are trained with one product's input.
    """
    trained, names = set(_list_trained(model)), edit.Names(model.graph)
    trained |= {(node, 0) for node in model.graph if node.op_type == _DEQUANTIZE}
    for name, value in list(model.graph.initializers.items()):
        uses = [(use.node, use.idx) for use in value.uses()]
        shared_bias = value.dtype == ir.DataType.INT32 and len(uses) > 1
        if not shared_bias and all(use in trained or use[0].op_type in _TIED for use in uses):
            continue
        for node, index in uses:
            if (node, index) in trained and (numbers := edit.read(value)) is not None:
                node.replace_input_with(index, edit.add_constant(model.graph, names.new(name), numbers))
