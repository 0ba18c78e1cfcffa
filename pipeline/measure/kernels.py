"""What ONNX Runtime's CPU kernels take besides inputs and outputs: work space, and weights in a layout of their own.

Formulas are those of its sources (named beside each), held against traces of every allocation of version 1.31.1. A
kernel that is not named here takes nothing, or less than 64 KiB a thread.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from enginesmith.pipeline.measure.liveness import item_bits
from enginesmith.pipeline.precision.audit.foreign import attributes
from enginesmith.pipeline.precision.audit.values import Value

if TYPE_CHECKING:
    import onnx

Values = Callable[[str], Value]
_FLOAT = 4
_SEGMENT_BYTES = 128 * 128 * _FLOAT
"""Of a convolution, for each thread (MLAS_CONV_WORKING_BUFFER_SIZE_PER_THREAD)."""
_PACKED_COLUMNS = 16
"""Columns of a packed matrix come in multiples of this (MlasGemmPackBSize)."""
_OWN = "com.microsoft"


def workspace(node: "onnx.NodeProto", values: Values, threads: int = 1) -> int:
    """Bytes that a kernel takes while it runs, and gives back; 0 where shapes are not known.

    The number of ``threads`` decides the work space of convolutions that unfold their input piece by piece.
    """
    rule = _RULES.get((_domain(node), node.op_type))
    if rule is None:
        return 0
    try:
        return rule(_Shapes(node, values, threads))
    except (LookupError, ValueError):  # a shape that is not known, or not what the operator takes
        return 0


def packed_bytes(node: "onnx.NodeProto", position: int, value: Value) -> int | None:
    """Bytes of the copy that a kernel makes of a constant input when it is loaded; None if it reads it as it is."""
    operator = (_domain(node), node.op_type)
    shape = value.shape
    if value.dtype != "float32" or shape is None or (position, len(shape)) not in _PACKED.get(operator, ()):
        return None
    if operator[1] == "ConvTranspose":
        return prod(shape) * _FLOAT
    if operator[1] in ("LSTM", "GRU"):
        return shape[0] * _matrix(shape[1], shape[2])
    turned = attributes(node).get("transB", 0)
    return _matrix(*(shape if turned else shape[::-1]))


def _matrix(columns: int, rows: int) -> int:
    return -(-columns // _PACKED_COLUMNS) * _PACKED_COLUMNS * rows * _FLOAT


_PACKED: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {
    **dict.fromkeys((("", "MatMul"), ("", "Gemm"), (_OWN, "FusedMatMul"), (_OWN, "FusedGemm")), ((1, 2),)),
    (_OWN, "Attention"): ((1, 2),),
    ("", "ConvTranspose"): tuple((1, rank) for rank in (3, 4, 5)),
    **dict.fromkeys((("", "LSTM"), ("", "GRU")), ((1, 3), (2, 3))),
}
"""Position and rank of inputs that are packed, by operator (``OpKernel::PrePack``)."""


def _domain(node: "onnx.NodeProto") -> str:
    return "" if node.domain == "ai.onnx" else str(node.domain)


class _Shapes:
    """A node's shapes, sizes and attributes."""

    def __init__(self, node: "onnx.NodeProto", values: Values, threads: int) -> None:
        self._node, self._values, self.threads = node, values, threads
        self.given: Mapping[str, Any] = attributes(node)

    def shape(self, position: int) -> tuple[int, ...]:
        return _known(self._values(self._node.input[position]))

    def result(self, position: int = 0) -> tuple[int, ...]:
        return _known(self._values(self._node.output[position]))

    def has(self, position: int) -> bool:
        return len(self._node.input) > position and bool(self._node.input[position])

    def item(self) -> int:
        """Bytes of an element of the first input."""
        bits = item_bits(self._values(self._node.input[0]).dtype)
        if bits is None:
            raise ValueError
        return bits // 8

    def whole(self) -> int:
        """Bytes of the first input."""
        return prod(self.shape(0)) * self.item()


def _known(value: Value) -> tuple[int, ...]:
    if value.shape is None:
        raise ValueError
    return value.shape


def _convolution(at: _Shapes) -> int:
    """MlasConvPrepare (convolve.cpp): the input is unfolded whole where there are more filters than places to compute.

    Without strides and padding a 1 × 1 convolution is a product as it is.
    """
    weight, result = at.shape(1), at.result()
    group = int(at.given.get("group", 1))
    plain = all(size == 1 for size in at.given.get("strides", ())) and not any(at.given.get("pads", ()))
    if plain and prod(weight[2:]) == 1:
        return 0
    places, unfolded = prod(result[2:]), prod(weight[1:])
    if weight[0] // group > places:
        return places * unfolded * _FLOAT
    return at.threads * _SEGMENT_BYTES


def _transposed_convolution(at: _Shapes) -> int:
    """ConvTranspose (conv_transpose.cc): one image's products of every input place, for one group at a time."""
    image, weight = at.shape(0), at.shape(1)
    return prod(weight[1:]) * prod(image[2:]) * _FLOAT


def _attention(at: _Shapes) -> int:
    """Attention (attention.cc of opset 23): weights of every query for every key."""
    query, keys = at.shape(0), at.shape(1)
    heads = query[1] if len(query) == 4 else int(at.given["q_num_heads"])
    length = keys[-2] + (at.shape(4)[-2] if at.has(4) else 0)
    return query[0] * heads * query[-2] * length * at.item()


def _own_attention(at: _Shapes) -> int:
    """com.microsoft Attention: queries, keys and values, their weights, and the result before it is reordered."""
    batch, length, _ = at.shape(0)
    heads = int(at.given["num_heads"])
    projected = batch * length * at.shape(1)[-1]
    return (projected + batch * heads * length * length + prod(at.result())) * _FLOAT


def _multi_head(at: _Shapes) -> int:
    """MultiHeadAttention: queries, keys and values with the heads apart; it works off the weights in small blocks."""
    return sum(prod(at.shape(position)) for position in range(3) if at.has(position)) * at.item()


def _recurrence(gates: int, both: bool) -> Callable[[_Shapes], int]:
    """DeepCpuLstmOp and DeepCpuGruOp: products of all steps by direction; what runs backwards is turned, twice."""

    def taken(at: _Shapes) -> int:
        steps, batch, features = at.shape(0)
        hidden = at.shape(2)[2]
        direction = at.given.get("direction", b"forward")
        directions = 2 if direction == b"bidirectional" and both else 1
        products = directions * steps * batch * gates * hidden
        turned = steps * batch * (features + hidden) if direction != b"forward" and both else 0
        return (products + turned) * _FLOAT

    return taken


def _einsum(at: _Shapes) -> int:
    """Both operands transposed, and their product before it is (einsum_typed_compute_processor.cc)."""
    return (prod(at.shape(0)) + prod(at.shape(1)) + prod(at.result())) * at.item() if at.has(1) else 0


def _once(at: _Shapes) -> int:
    """A second tensor of the input's size."""
    return at.whole()


def _once_with_bias(at: _Shapes) -> int:
    return at.whole() if at.has(1) else 0


def _softmax(at: _Shapes) -> int:
    """Along any axis but the last one the input is transposed, and the result transposed back."""
    axis = int(at.given.get("axis", -1))
    return 0 if axis in (-1, len(at.shape(0)) - 1) else 2 * at.whole()


def _sum(at: _Shapes) -> int:
    """Of three and more, partial sums go to a second tensor."""
    return prod(at.result()) * at.item() if at.has(2) else 0


_RULES: dict[tuple[str, str], Callable[[_Shapes], int]] = {
    **dict.fromkeys((("", "Conv"), (_OWN, "FusedConv")), _convolution),
    ("", "ConvTranspose"): _transposed_convolution,
    ("", "Attention"): _attention,
    (_OWN, "Attention"): _own_attention,
    (_OWN, "MultiHeadAttention"): _multi_head,
    ("", "Einsum"): _einsum,
    ("", "LSTM"): _recurrence(4, both=True),
    ("", "GRU"): _recurrence(3, both=True),
    ("", "RNN"): _recurrence(1, both=False),
    **dict.fromkeys((("", "HardSwish"), ("", "Mish"), (_OWN, "BiasGelu")), _once),
    (_OWN, "FastGelu"): _once_with_bias,
    **dict.fromkeys((("", "Softmax"), ("", "LogSoftmax")), _softmax),
    **dict.fromkeys((("", "Sum"), ("", "Max"), ("", "Min"), ("", "Mean")), _sum),
}
