"""Translate operators of PyTorch to ONNX where the exporter's own translations are wrong or slow, or lacking.

They replace those of onnxscript's torch library. Values of a trace have no types.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from onnx_ir.tensor_adapters import from_torch_dtype, to_torch_dtype
from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops import core, linalg

from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.passes.export import matrices
from enginesmith.pipeline.passes.export.experts import list_expert_translations
from enginesmith.pipeline.passes.export.functions import (
    atan2,
    copysign,
    divide,
    divide_down,
    divide_exactly,
    erfc,
    erfcx,
    erfinv,
    expm1,
    fmax,
    fmin,
    hypot,
    in_float32,
    log1p,
    log_sigmoid,
    logaddexp,
    logaddexp2,
    promote,
    signbit,
)
from enginesmith.pipeline.passes.export.pools import adaptive_average_pool, adaptive_max_pool, average_pool
from enginesmith.pipeline.passes.export.sequences import attention, lstm, stft

aten, prims, op = torch.ops.aten, torch.ops.prims, cast("Any", opset18)
_ATTENTION_OPSET = 23


def list_translations(opset: int) -> dict[Any, Callable[..., Any]]:
    """List the translations by operator."""
    return {
        **dict.fromkeys((aten.floor_divide.default, aten.floor_divide.Scalar), divide_down),
        **dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), divide),
        aten.log_sigmoid.default: log_sigmoid,
        aten.log1p.default: log1p,
        **dict.fromkeys((aten.expm1.default, aten.special_expm1.default), expm1),
        aten.logaddexp.default: logaddexp,
        aten.logaddexp2.default: logaddexp2,
        **dict.fromkeys((aten.special_erfc.default, aten.erfc.default), erfc),
        **dict.fromkeys((aten.divide.Tensor, aten.divide.Scalar), promote(divide_exactly)),
        **dict.fromkeys((aten.multiply.Tensor, aten.multiply.Scalar), promote(core.aten_mul)),
        **dict.fromkeys((aten.subtract.Tensor, aten.subtract.Scalar), promote(core.aten_sub)),
        aten.greater.Tensor: promote(core.aten_gt),
        aten.greater_equal.Tensor: promote(core.aten_ge),
        aten.less.Tensor: promote(core.aten_lt),
        aten.less_equal.Tensor: promote(core.aten_le),
        aten.pow.Tensor_Tensor: promote(core.aten_pow),
        **dict.fromkeys((aten.concat.default, aten.concatenate.default), concatenate),
        aten.atan2.default: atan2,
        aten.logcumsumexp.default: logcumsumexp,
        aten.special_erfcx.default: erfcx,
        aten.scatter_reduce.two: scatter_reduce,
        **dict.fromkeys((aten.searchsorted.Tensor, aten.searchsorted.Scalar), searchsorted),
        aten.bucketize.Tensor: bucketize,
        aten.signbit.default: signbit,
        aten.copysign.Tensor: copysign,
        aten.kthvalue.default: kthvalue,
        aten.median.dim: median,
        aten.median.default: median_of_all,
        **dict.fromkeys((aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default), adaptive_average_pool),
        **dict.fromkeys((aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default), adaptive_max_pool),
        **dict.fromkeys((aten.avg_pool2d.default, aten.avg_pool3d.default), average_pool),
        aten._native_batch_norm_legit_functional.default: batch_norm,
        aten.stft.default: stft,
        prims.prod.default: prod,
        prims.fmax.default: fmax,
        prims.fmin.default: fmin,
        aten.lstm.input: lstm,
        aten.amax.default: amax,
        aten.amin.default: amin,
        aten.sort.stable: sort,
        aten.convolution.default: convolution,
        aten.cummax.default: cummax,
        aten.cummin.default: cummin,
        prims.erf_inv.default: erfinv,
        prims.hypot.default: hypot,
        aten.index_reduce.default: index_reduce,
        aten.diagonal_scatter.default: diagonal_scatter,
        prims.as_strided_scatter.default: as_strided_scatter,
        aten._cdist_forward.default: matrices.cdist,
        aten._pdist_forward.default: matrices.pdist,
        **dict.fromkeys((aten.inverse.default, aten.linalg_inv.default), matrices.invert),
        aten.linalg_inv_ex.default: matrices.invert_unchecked,
        aten.linalg_solve.default: matrices.solve,
        aten.linalg_solve_triangular.default: matrices.solve_triangular,
        **dict.fromkeys((aten.cholesky.default, aten.linalg_cholesky.default), matrices.cholesky),
        aten.linalg_cholesky_ex.default: matrices.cholesky_unchecked,
        **dict.fromkeys((aten.det.default, aten.linalg_det.default), matrices.determinant),
        aten.linalg_vector_norm.default: vector_norm,
        aten.logdet.default: matrices.log_of_determinant,
        aten._linalg_slogdet.default: matrices.log_determinant,
        aten.masked_select.default: masked_select,
        aten._is_all_true.default: core.aten_all,
        aten._is_any_true.default: core.aten_any,
        **({aten.scaled_dot_product_attention.default: attention} if opset >= _ATTENTION_OPSET else {}),
        **list_expert_translations(),
    }


def _list_runs(self: Any, axis: int, filler: Any) -> Any:
    """Put numbers, [..., n, ...], into rows of those up to each place, [..., n, n, ...], with a filler behind them.

    Memory grows with the square of the length.
    """
    rank = len(self.shape)
    steps = op.Range(0, op.Squeeze(op.Shape(self, start=axis, end=axis + 1)), 1)
    trailing = list(range(1, rank - axis))
    is_before = op.LessOrEqual(
        op.Unsqueeze(steps, [*trailing]), op.Unsqueeze(steps, [1, *(1 + each for each in trailing)])
    )
    return op.Where(is_before, op.Unsqueeze(self, [axis]), op.CastLike(filler, self))


@in_float32
def logcumsumexp(self: Any, dim: int) -> Any:
    """Compute the log of running sums of exp, each with its own maximum subtracted.

    The exporter subtracts the maximum of the whole, so that sums before it are 0, and their log -inf.
    """
    if not len(self.shape):
        return op.Identity(self)
    axis = dim % len(self.shape)
    rows = _list_runs(self, axis, -math.inf)
    largest = op.ReduceMax(rows, [axis + 1], keepdims=1)
    largest = op.Where(op.IsInf(largest), op.CastLike(0.0, self), largest)
    total = op.ReduceSum(op.Exp(op.Sub(rows, largest)), [axis + 1], keepdims=1)
    return op.Squeeze(op.Add(op.Log(total), largest), [axis + 1])


def cummax(self: Any, dim: int) -> tuple[Any, Any]:
    """Find the largest number up to each place, and the last place that it is at."""
    return _find_running(self, dim, True)


def cummin(self: Any, dim: int) -> tuple[Any, Any]:
    """Find the smallest number up to each place; see `cummax`."""
    return _find_running(self, dim, False)


def _find_running(self: Any, dim: int, is_max: bool) -> tuple[Any, Any]:
    rank = len(self.shape)
    if not rank:
        return op.Identity(self), op.Constant(value_int=0)
    if self.dtype == ir.DataType.BOOL:
        number = op.Cast(self, to=ir.DataType.INT32)
        number.dtype, number.shape = ir.DataType.INT32, self.shape
        values, places = _find_running(number, dim, is_max)
        return op.Cast(values, to=ir.DataType.BOOL), places
    axis = dim % rank
    filler: float = -math.inf if is_max else math.inf
    if self.dtype.is_integer():
        limits = np.iinfo(self.dtype.numpy())
        filler = int(limits.min if is_max else limits.max)
    reduce = op.ReduceMax if is_max else op.ReduceMin
    extremes = reduce(_list_runs(self, axis, filler), [axis + 1], keepdims=0)
    steps = op.Range(0, op.Squeeze(op.Shape(self, start=axis, end=axis + 1)), 1)
    steps = op.Unsqueeze(steps, list(range(1, rank - axis)))
    places = op.Where(op.Equal(self, extremes), steps, op.Constant(value_int=0))
    places.shape = self.shape
    return extremes, op.ReduceMax(_list_runs(places, axis, 0), [axis + 1], keepdims=0)


def scatter_reduce(self: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True) -> Any:
    """Reduce what falls to the same place.

    ONNX has no mean, for which the exporter takes the last value. Where the places' own values do not count, the
    exporter starts a maximum from the lowest finite number, and a minimum from the highest.
    """
    if reduce == "mean":
        ones = [op.ConstantOfShape(op.Shape(value), value=ir.tensor([1], dtype=self.dtype)) for value in (self, src)]
        for tensor, value in zip(ones, (self, src), strict=True):
            tensor.dtype, tensor.shape = value.dtype, value.shape
        total = core.aten_scatter_reduce(self, dim, index, src, "sum", include_self)
        count = core.aten_scatter_reduce(ones[0], dim, index, ones[1], "sum", include_self)
        total.dtype = self.dtype
        return divide(total, count, "floor") if self.dtype.is_integer() else op.Div(total, count)
    if reduce in ("amax", "amin") and not include_self and len(self.shape):
        start = op.ScatterElements(self, index, src, axis=dim)  # one of the values, which may count twice
        start.dtype, start.shape = self.dtype, self.shape
        return core.aten_scatter_reduce(start, dim, index, src, reduce)
    return core.aten_scatter_reduce(self, dim, index, src, reduce, include_self)


def index_reduce(self: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True) -> Any:
    """Reduce whole slices that fall to the same place; see `scatter_reduce`."""
    rank = len(self.shape)
    if rank:
        around = [axis for axis in range(rank) if axis != dim % rank]
        index = op.Expand(op.Unsqueeze(op.Reshape(index, [-1]), around), op.Shape(source))
    return scatter_reduce(self, dim, index, source, reduce, include_self)


def diagonal_scatter(self: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Write a diagonal, as ``x.diagonal().fill_(0)`` does, which the exporter does not capture."""
    rank = len(self.shape)
    pair = [dim1 % rank, dim2 % rank]
    axes = [*(axis for axis in range(rank) if axis not in pair), *pair]
    rows, columns = (op.Range(0, op.Squeeze(op.Shape(self, start=axis, end=axis + 1)), 1) for axis in pair)
    is_diagonal = op.Equal(op.Unsqueeze(op.Add(rows, offset), [1]), columns)
    last = op.Sub(op.Squeeze(op.Shape(src, start=-1)), 1)
    numbers = op.Gather(src, op.Clip(op.Add(rows, min(offset, 0)), 0, last), axis=-1)
    written = op.Where(is_diagonal, op.Unsqueeze(numbers, [-1]), op.Transpose(self, perm=axes))
    return op.Transpose(written, perm=[axes.index(axis) for axis in range(rank)])


def as_strided_scatter(
    self: Any, src: Any, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> Any:
    """Write strides of what lies in memory in its order, as ``x.fill_diagonal_(0)`` does."""
    shape = op.Shape(self)
    numbers = op.Range(0, op.ReduceProd(shape, keepdims=0), 1)
    places = core.aten_as_strided(numbers, size, stride, storage_offset)
    return op.Reshape(op.ScatterElements(*(op.Reshape(each, [-1]) for each in (self, places, src))), shape)


def masked_select(self: Any, mask: Any) -> Any:
    """List the numbers that a mask takes."""
    numbers, is_taken = op.Expand(self, op.Shape(mask)), op.Expand(mask, op.Shape(self))
    return op.GatherND(numbers, op.Transpose(op.NonZero(is_taken), perm=[1, 0]))


def searchsorted(
    sorted_sequence: Any,
    self: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Count the elements before each value, NaN being the last; memory grows with both lengths."""
    rank = len(sorted_sequence.shape)
    value = op.CastLike(self, sorted_sequence)
    if sorter is not None:
        sorted_sequence = op.GatherElements(sorted_sequence, sorter, axis=-1)
    if rank > 1:
        sorted_sequence = op.Unsqueeze(sorted_sequence, [-2])
    is_behind = op.Greater if right or side == "right" else op.GreaterOrEqual
    is_before = op.Not(is_behind(sorted_sequence, op.Unsqueeze(value, [-1])))
    counted = op.Cast(is_before, to=ir.DataType.INT32 if out_int32 else ir.DataType.INT64)
    return op.ReduceSum(counted, [-1], keepdims=0)


def bucketize(self: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    """Find the bucket of each value; see `searchsorted`."""
    return searchsorted(boundaries, self, out_int32, right)


def prod(inp: Any, dims: Sequence[int] | None = None) -> Any:
    """Multiply along axes, as `cumprod` does with what is masked."""
    return op.ReduceProd(inp, dims, keepdims=0)


def amax(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """Find the largest numbers along axes, or of all; the exporter needs axes."""
    return op.ReduceMax(self, [*(dim or range(len(self.shape)))], keepdims=int(keepdim))


def amin(self: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """Find the smallest numbers; see `amax`."""
    return op.ReduceMin(self, [*(dim or range(len(self.shape)))], keepdims=int(keepdim))


def concatenate(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Join tensors in the type that holds the numbers of all; see `promote`."""
    kinds = (to_torch_dtype(each.dtype) for each in tensors)
    kind = from_torch_dtype(functools.reduce(torch.promote_types, kinds))
    return op.Concat(*(op.Cast(each, to=kind) for each in tensors), axis=dim)


def vector_norm(
    self: Any, order: float = 2.0, dim: Sequence[int] | None = None, keepdim: bool = False, dtype: int = -1
) -> Any:
    """Compute norms along axes, or of all numbers, of which the exporter does not keep the axes."""
    axes = [*range(len(self.shape))] if dim is None else dim
    return linalg.aten_linalg_vector_norm(self, order, axes, keepdim, dtype)


def sort(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """Sort along an axis; of equal numbers the first stays first, which TopK promises, too."""
    if not len(self.shape):
        return op.Identity(self), op.Constant(value_int=0)
    axis = dim % len(self.shape)
    return cast(
        "tuple[Any, Any]", op.TopK(self, op.Shape(self, start=axis, end=axis + 1), axis=axis, largest=int(descending))
    )


def kthvalue(self: Any, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """Find the ``k``-th smallest number, from 1, and its place; of equal numbers PyTorch may name another place."""
    count = op.Reshape(k, [-1])
    smallest = op.TopK(self, count, axis=dim, largest=0)
    values, places = (op.Gather(each, op.Sub(count, 1), axis=dim) for each in smallest)
    return (values, places) if keepdim else (op.Squeeze(values, [dim]), op.Squeeze(places, [dim]))


def median(self: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """Find the number in the middle, the lower one of two, and its place; or the first NaN."""
    axis = dim % len(self.shape)
    size = op.Shape(self, start=axis, end=axis + 1)
    if self.dtype.is_integer():
        return kthvalue(self, op.Div(op.Add(size, 1), 2), dim, keepdim)
    is_nan = op.Cast(op.IsNaN(self), to=ir.DataType.INT32)
    has_nan = op.Cast(op.ReduceMax(is_nan, [dim], keepdims=int(keepdim)), to=ir.DataType.BOOL)
    numbers = op.Where(op.IsNaN(self), op.CastLike(math.inf, self), self)
    value, place = kthvalue(numbers, op.Div(op.Add(size, 1), 2), dim, keepdim)
    first = op.ArgMax(is_nan, axis=dim, keepdims=int(keepdim))
    return op.Where(has_nan, op.CastLike(math.nan, self), value), op.Where(has_nan, first, place)


def median_of_all(self: Any) -> Any:
    """Find the number in the middle of all; see `median`."""
    flat = op.Reshape(self, [-1])
    flat.dtype, flat.shape = self.dtype, ir.Shape([None])
    return median(flat, 0)[0]


def batch_norm(
    self: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """Normalize channels; in training by the batch's mean and variance, where the exporter takes those kept."""
    if training:
        running_mean = running_var = None
    translate = cast("Any", core.aten__native_batch_norm_legit_functional)
    return cast("tuple[Any, ...]", translate(self, weight, bias, running_mean, running_var, False, momentum, eps))


def convolution(
    self: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    transposed: bool = False,
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
) -> Any:
    """Convolve; ONNX Runtime refuses a transposed one that is padded by its stride or more.

    Such a one is cropped by as much less, and gets zeros where there is nothing to crop.
    """
    spatial = len(weight.shape) - 2
    strides, pads, extras = ([*each] * (spatial // len(each)) for each in (stride, padding, output_padding))
    if not transposed or all(extra < step for extra, step in zip(extras, strides, strict=True)):
        return core.aten_convolution(self, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    differences = [extra - pad for extra, pad in zip(extras, pads, strict=True)]
    wide = op.ConvTranspose(
        self,
        weight,
        strides=strides,
        pads=[*pads, *(max(0, -each) for each in differences)],
        dilations=[*dilation] * (spatial // len(dilation)),
        group=groups,
    )
    if any(each > 0 for each in differences):
        ends = [0] * (4 + spatial) + [max(0, each) for each in differences]
        wide = op.Pad(wide, op.Constant(value_ints=ends))
    return wide if bias is None else op.Add(wide, op.Unsqueeze(bias, [*range(1, 1 + spatial)]))
