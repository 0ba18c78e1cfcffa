"""Preprocess images for a model."""

from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from enginesmith.pipeline.tensors import Array

Mode = Literal["L", "RGB", "RGBA"]
Size = tuple[int, int]
"""Height and width in pixels."""


class Preprocessing(BaseModel, frozen=True):
    """Mode, resize, centre crop, rescale, mean and standard deviation, axes and dtype: done in that order."""

    mode: Mode
    resize: int | Size | Literal["cover"] | None
    """The shorter side, or exactly, or as small as still covers ``size``."""
    resample: int
    """Pillow's number of the filter."""
    size: Size
    """Size that is cut out of the centre; where an image is smaller, zeros are put around it."""
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels_last: bool
    dtype: str
    origin: str
    """Source of these steps, in words."""

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of one sample."""
        channels = len(self.mode)
        return (*self.size, channels) if self.channels_last else (channels, *self.size)

    def __str__(self) -> str:
        parts: list[str] = [self.mode]
        if isinstance(self.resize, int):
            parts.append(f"shorter side {self.resize}")
        elif self.resize == "cover":
            parts.append("as small as covers")
        elif self.resize is not None and self.resize != self.size:
            parts.append("{}×{}".format(*self.resize))
        parts.append(("{}×{}" if self.resize == self.size else "center {}×{}").format(*self.size))
        parts += [] if self.rescale == 1 else [f"divided by {1 / self.rescale:.6g}"]
        parts += [] if not any(self.mean) else [f"mean {_join(self.mean)}"]
        parts += [] if set(self.std) == {1.0} else [f"standard deviation {_join(self.std)}"]
        return f"{', '.join(parts)} ({self.origin})"

    def apply(self, image: Any) -> Array:
        """Turn a Pillow image into one sample.

        Raises:
            ValueError: its pixels are of a kind that has no agreed range.
        """
        cut = _crop_centre(_resize(_convert(image, self.mode), self), self.size)
        pixels = np.asarray(cut).reshape(*self.size, len(self.mode))
        if self.dtype != "uint8":
            values = pixels.astype(np.float32)
            values *= np.float32(self.rescale)
            values -= np.asarray(self.mean, np.float32)
            values /= np.asarray(self.std, np.float32)
            pixels = values.astype(self.dtype)
        return pixels if self.channels_last else pixels.transpose(2, 0, 1)


def _convert(image: Any, mode: Mode) -> Any:
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range nobody knows")
    if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off instead of scaling
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _resize(image: Any, steps: Preprocessing) -> Any:
    width, height = image.size
    if steps.resize is None:
        return image
    if isinstance(steps.resize, tuple):
        wanted = steps.resize
    elif isinstance(steps.resize, int):
        shorter = min(height, width)
        wanted = (int(steps.resize * height / shorter), int(steps.resize * width / shorter))
    else:
        scale = max(steps.size[0] / height, steps.size[1] / width)
        wanted = (round(height * scale), round(width * scale))
    return image if wanted == (height, width) else image.resize((max(1, wanted[1]), max(1, wanted[0])), steps.resample)


def _crop_centre(image: Any, size: Size) -> Any:
    top, left = (image.size[1] - size[0]) // 2, (image.size[0] - size[1]) // 2
    return image if (image.size[1], image.size[0]) == size else image.crop((left, top, left + size[1], top + size[0]))


def _join(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4g}" for value in dict.fromkeys(values))
