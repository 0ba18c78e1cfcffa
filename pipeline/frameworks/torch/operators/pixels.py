"""Compute operators that change the size of pictures."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from enginesmith.pipeline.frameworks.onnx import ir
from enginesmith.pipeline.frameworks.torch.operators.attributes import (
    Compute,
    Make,
    list_sizes,
    read_float,
    read_int,
    read_text,
    refuse,
)

_OPSET_OF_COORDINATES = 11
"""The first opset whose Resize says how it takes coordinates; before, it was asymmetric, as Upsample was."""


def _depth_to_space(x: Tensor, *, blocksize: int = 1, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, blocksize, blocksize, channels // blocksize**2, height, width)
    blocks = parts.permute(0, 3, 4, 1, 5, 2)
    return blocks.reshape(batch, channels // blocksize**2, height * blocksize, width * blocksize)


def _space_to_depth(x: Tensor, *, blocksize: int = 1) -> Tensor:
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, channels, height // blocksize, blocksize, width // blocksize, blocksize)
    blocks = parts.permute(0, 3, 5, 1, 2, 4)
    return blocks.reshape(batch, channels * blocksize**2, height // blocksize, width // blocksize)


def _resize(node: "ir.Node", opset: int) -> Compute:
    mode, old = read_text(node, "mode", "nearest"), opset < _OPSET_OF_COORDINATES
    place = read_text(node, "coordinate_transformation_mode", "asymmetric" if old else "half_pixel")
    rounding = read_text(node, "nearest_mode", "floor" if old else "round_prefer_floor")
    fixed = node.attributes["scales"].as_floats() if "scales" in node.attributes else ()
    if read_int(node, "antialias", 0) or "axes" in node.attributes or mode not in ("nearest", "linear", "cubic"):
        raise refuse(node, "antialias, axes or an unknown mode")
    if place not in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"):
        raise refuse(node, f"coordinates {place}")
    if read_text(node, "keep_aspect_ratio_policy", "stretch") != "stretch" or read_int(node, "exclude_outside", 0):
        raise refuse(node, "keep_aspect_ratio_policy or exclude_outside")
    if mode == "cubic" and (place == "asymmetric" or read_float(node, "cubic_coeff_a", -0.75) != -0.75):
        raise refuse(node, "cubic with other coordinates or coefficients than torch's")

    def compute(x: Tensor, *given: Tensor | None) -> Tensor:
        scales = torch.tensor(fixed) if fixed else given[0] if old else given[1]
        sizes = list_sizes(given[2]) if len(given) > 2 and given[2] is not None else []
        factors = [] if scales is None or sizes else [float(each) for each in scales.tolist()]
        wanted = sizes or [
            int(np.float32(size) * np.float32(each)) for size, each in zip(x.shape, factors, strict=True)
        ]
        factors = factors or [new / old for new, old in zip(wanted, x.shape, strict=True)]
        if wanted == list(x.shape):  # whatever the scales: as ONNX Runtime does
            return x
        if mode == "cubic":
            if x.ndim != 4 or wanted[:2] != list(x.shape[:2]) or (place == "pytorch_half_pixel" and 1 in wanted[2:]):
                raise refuse(node, "cubic over other axes than two of pixels, or to a single one")
            result: Tensor = torch.ops.aten.upsample_bicubic2d(x, wanted[2:], place == "align_corners", *factors[2:])
            return result
        for axis in range(x.ndim):
            if wanted[axis] != x.shape[axis] or factors[axis] != 1:
                nearest = "ceil" if old and factors[axis] < 1 else rounding  # as ONNX Runtime rounds
                x = _resize_axis(x, axis, wanted[axis], factors[axis], mode, place, nearest)
        return x

    return compute


def _resize_axis(x: Tensor, axis: int, size: int, factor: float, mode: str, place: str, rounding: str) -> Tensor:
    old, new, scale = x.shape[axis], np.arange(size, dtype=np.float32), np.float32(factor)  # as ONNX Runtime has them
    if place == "asymmetric":
        at = new / scale
    elif place == "align_corners":
        at = new * (old - 1) / max(size - 1, 1)
    else:
        at = (new + np.float32(0.5)) / scale - np.float32(0.5)
        at = at * 0 if place == "pytorch_half_pixel" and size == 1 else at
    if mode == "nearest":
        nearest = {"floor": np.floor(at), "ceil": np.ceil(at), "round_prefer_ceil": np.floor(at + 0.5)}
        chosen = nearest.get(rounding, np.ceil(at - 0.5)).clip(0, old - 1).astype(np.int64)
        return x.index_select(axis, torch.from_numpy(chosen).to(x.device))
    at = at.clip(0, old - 1)
    low = np.floor(at).astype(np.int64)
    high = np.minimum(low + 1, old - 1)
    share = torch.from_numpy((at - low).astype(np.float32)).to(x.device)
    share = share.reshape([-1 if dim == axis else 1 for dim in range(x.ndim)])
    first, second = (x.index_select(axis, torch.from_numpy(each).to(x.device)) for each in (low, high))
    return first + (second - first) * share


def _grid_sample(
    x: Tensor, grid: Tensor, *, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> Tensor:
    way = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return F.grid_sample(x, grid, way, padding_mode, bool(align_corners))


PLAIN: dict[str, Compute] = {
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "GridSample": _grid_sample,
}
MADE: dict[str, Make] = {"Resize": _resize, "Upsample": _resize}
