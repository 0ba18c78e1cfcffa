"""Translate operators on matrices to ONNX, which has products alone, and a determinant that OpenVINO does not run.

Systems are solved by elimination, a few nodes for each row, so that the number of rows has to be known at export. A
matrix that has no inverse, for which PyTorch raises an error, gets an answer that says nothing.
"""

import math
from typing import Any, cast

import numpy as np
from onnxscript import opset18

from enginesmith.pipeline.errors import ExportError
from enginesmith.pipeline.frameworks.onnx import ir

op = cast("Any", opset18)
_MOST_ROWS = 32


def _has_few_rows(matrix: Any) -> bool:
    rows = matrix.shape[-1]
    return isinstance(rows, int) and rows <= _MOST_ROWS


def _count_rows(matrix: Any) -> int:
    """Return the number of rows of a square matrix.

    Raises:
        ExportError: it is not known, or too large.
    """
    rows = matrix.shape[-1]
    if _has_few_rows(matrix):
        return cast("int", rows)
    raise ExportError(
        f"ONNX solves no matrices: those of up to {_MOST_ROWS} rows are solved row by row, and this one has "
        f"{rows if isinstance(rows, int) else 'any number of them'}",
        "compute in the module's __init__ what does not depend on inputs; a size that is open, fix with --input",
    )


def _flip(matrix: Any, rank: int) -> Any:
    axes = [*range(rank)]
    return op.Transpose(matrix, perm=[*axes[:-2], axes[-1], axes[-2]])


def _write_constant(numbers: Any, like: Any = None) -> Any:
    constant = op.Constant(value=ir.tensor(np.asarray(numbers)))
    return constant if like is None else op.CastLike(constant, like)


def _eliminate(matrix: Any, right: Any, rows: int) -> tuple[Any, Any, Any]:
    """Solve by Gauss-Jordan elimination, with the largest number of a column as its pivot.

    Rows stay where they are until the end. Return the solution, [..., rows, any], the pivots, [..., 1, rows], and the
    rows that they are in, [..., rows, 1].
    """
    batches = [op.Concat(op.Shape(each, end=-2), _write_constant([1, 1]), axis=0) for each in (right, matrix)]
    table = op.Concat(*map(op.Expand, (matrix, right), batches), axis=-1)
    numbers, zero = _write_constant(np.arange(rows)[:, None]), op.CastLike(0.0, matrix)
    is_free = _write_constant(np.full((rows, 1), True))
    pivots, places = [], []
    for step in range(rows):
        column = op.Slice(table, [step], [step + 1], [-1])
        size = op.Where(is_free, op.Abs(column), op.CastLike(-1.0, matrix))
        places.append(op.ArgMax(size, axis=-2, keepdims=1))
        is_pivot = op.Equal(numbers, places[-1])
        row = op.ReduceSum(op.Where(is_pivot, table, zero), [-2], keepdims=1)
        pivots.append(op.Slice(row, [step], [step + 1], [-1]))
        divisor = op.Where(op.Equal(pivots[-1], zero), op.CastLike(1.0, matrix), pivots[-1])
        row = op.Div(row, divisor)
        table = op.Where(is_pivot, row, op.Sub(table, op.Mul(column, row)))
        is_free = op.And(is_free, op.Not(is_pivot))
    place = op.Concat(*places, axis=-2)
    solved = op.Slice(table, [rows], [np.iinfo(np.int64).max], [-1])
    return op.GatherElements(solved, op.Expand(place, op.Shape(solved)), axis=-2), op.Concat(*pivots, axis=-1), place


def invert(self: Any) -> Any:
    """Invert matrices."""
    rows = _count_rows(self)
    return _eliminate(self, _write_constant(np.eye(rows), self), rows)[0]


def invert_unchecked(self: Any, check_errors: bool = False) -> tuple[Any, Any]:
    """Invert matrices, and say of all that they have an inverse."""
    return invert(self), _write_successes(self)


def _write_successes(matrix: Any) -> Any:
    return op.ConstantOfShape(op.Shape(matrix, end=-2), value=ir.tensor([0], dtype=ir.DataType.INT32))


def solve(self: Any, other: Any, left: bool = True) -> Any:
    """Solve A X = B, or X A = B, for A and B, which may be a vector."""
    is_vector = len(other.shape) == 1 or [*other.shape] == [*self.shape[:-1]]
    right = op.Unsqueeze(other, [-1]) if is_vector else other
    rows, ranks = _count_rows(self), [len(self.shape), max(2, len(other.shape))]
    if left:
        solved, *_ = _eliminate(self, right, rows)
        return op.Squeeze(solved, [-1]) if is_vector else solved
    solved, *_ = _eliminate(_flip(self, ranks[0]), _flip(right, ranks[1]), rows)
    return _flip(solved, max(ranks))


def solve_triangular(self: Any, other: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """Solve with the upper or lower triangle of a matrix; see `solve`."""
    triangle = op.Trilu(self, upper=int(upper))
    if unitriangular:
        is_diagonal = _write_constant(np.eye(_count_rows(self), dtype=bool))
        triangle = op.Where(is_diagonal, op.CastLike(1.0, self), triangle)
    triangle.shape = self.shape
    return solve(triangle, other, left)


def cholesky(self: Any, upper: bool = False) -> Any:
    """Factor symmetric matrices of positive eigenvalues, column by column."""
    rows, rank = _count_rows(self), len(self.shape)
    numbers, zero = _write_constant(np.arange(rows)[:, None]), op.CastLike(0.0, self)
    rest, columns = _flip(self, rank) if upper else self, []
    for step in range(rows):
        column = op.Slice(rest, [step], [step + 1], [-1])
        scaled = op.Div(column, op.Sqrt(op.Slice(column, [step], [step + 1], [-2])))
        columns.append(op.Where(op.Less(numbers, _write_constant(step)), zero, scaled))
        rest = op.Sub(rest, op.Mul(columns[-1], _flip(columns[-1], rank)))
    lower = op.Concat(*columns, axis=-1)
    return _flip(lower, rank) if upper else lower


def cholesky_unchecked(self: Any, *, upper: bool = False, check_errors: bool = False) -> tuple[Any, Any]:
    """Factor matrices, and say of all that they can be; see `cholesky`."""
    return cholesky(self, upper), _write_successes(self)


def log_determinant(self: Any) -> tuple[Any, Any]:
    """Compute signs of determinants, and the logarithms of their sizes."""
    rows = _count_rows(self)
    _, pivots, places = _eliminate(self, _write_constant(np.zeros((rows, 0)), self), rows)
    order = op.CastLike(op.Sub(_flip(places, len(self.shape)), places), self)
    is_later = _write_constant(np.triu(np.full((rows, rows), True), 1))
    signs = op.Where(is_later, op.Sign(order), op.CastLike(1.0, self))
    sign = op.Mul(*(op.ReduceProd(each, [-2, -1], keepdims=0) for each in (signs, op.Sign(pivots))))
    return sign, op.ReduceSum(op.Log(op.Abs(pivots)), [-2, -1], keepdims=0)


def determinant(self: Any) -> Any:
    """Compute determinants; those of many rows by ONNX's operator."""
    if not _has_few_rows(self):
        return op.Det(self)
    sign, size = log_determinant(self)
    return op.Mul(sign, op.Exp(size))


def log_of_determinant(self: Any) -> Any:
    """Compute logarithms of determinants, NaN below 0; see `determinant`."""
    if not _has_few_rows(self):
        return op.Log(op.Det(self))
    sign, size = log_determinant(self)
    return op.Where(op.Less(sign, op.CastLike(0.0, self)), op.CastLike(math.nan, self), size)


_PRODUCT_ROWS, _NEVER_PRODUCTS = 25, 2  # of torch.cdist: rows from which products pay, and the mode that forbids them


def cdist(x1: Any, x2: Any, p: float, compute_mode: int | None) -> Any:
    """Measure the distances of rows [..., P, M] to rows [..., R, M], as [..., P, R]; see `torch.cdist`.

    Euclidean ones are made of products, as in PyTorch, but for few rows, where those would be less exact.
    """
    rows = (x1.shape[-2], x2.shape[-2])
    are_few = all(isinstance(count, int) and count <= _PRODUCT_ROWS for count in rows)
    if p == 2 and not are_few and compute_mode != _NEVER_PRODUCTS:
        sizes = [op.ReduceSum(op.Mul(each, each), [-1], keepdims=1) for each in (x1, x2)]
        flipped, across = (_flip(each, len(x2.shape)) for each in (x2, sizes[1]))
        doubled = op.MatMul(op.Mul(x1, op.CastLike(-2.0, x1)), flipped)
        squares = op.Add(op.Add(doubled, sizes[0]), across)
        return op.Sqrt(op.Max(squares, op.CastLike(0.0, x1)))
    apart = op.Abs(op.Sub(op.Unsqueeze(x1, [-2]), op.Unsqueeze(x2, [-3])))
    if p == 0:
        return op.ReduceSum(op.CastLike(op.Not(op.Equal(apart, op.CastLike(0.0, x1))), x1), [-1], keepdims=0)
    if p in (1, 2):
        reduce = op.ReduceL1 if p == 1 else op.ReduceL2
        return reduce(apart, [-1], keepdims=0)
    if p == math.inf:
        return op.ReduceMax(apart, [-1], keepdims=0)
    total = op.ReduceSum(op.Pow(apart, op.CastLike(p, x1)), [-1], keepdims=0)
    return op.Pow(total, op.CastLike(1 / p, x1))


def pdist(self: Any, p: float = 2.0) -> Any:
    """Measure the distance of each row to each later one; see `torch.pdist`."""
    steps = op.Range(0, op.Squeeze(op.Shape(self, start=0, end=1)), 1)
    pairs = op.NonZero(op.Less(op.Unsqueeze(steps, [1]), steps))
    return op.GatherND(cdist(self, self, p, _NEVER_PRODUCTS), op.Transpose(pairs, perm=[1, 0]))
