"""Preprocess images for a model."""

from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from enginesmith.pipeline.tensors import Array

Mode = Literal["L", "RGB", "RGBA"]
Size = tuple[int, int]
"""Height and width in pixels."""
MASK_MODES = ("1", "L", "P", "I", "I;16")
"""Pillow's modes of one whole number for each pixel, which may be a class."""
_OF_16_BITS = ("PNG", "PPM")
"""Formats whose whole numbers have 16 bits, also where Pillow reads them as 32."""
_LARGEST_OF_16_BITS = range(1 << 8, 1 << 16)
"""Largest number of an image of 32 bits that is taken for one of 16."""


class Preprocessing(BaseModel, frozen=True):
    """Mode, resize, center crop, rescale, mean and standard deviation, axes and dtype: done in that order."""

    mode: Mode
    resize: int | Size | Literal["cover"] | None
    """The shorter side, or exactly, or as small as still covers ``size``."""
    resample: int
    """Pillow's number of the filter."""
    size: Size
    """Size that is cut out of the center; where an image is smaller, zeros are put around it."""
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

    def place(self, size: Size) -> tuple[tuple[float, float], Size]:
        """Find where pixels of an image of this size come to lie: the factors of height and width, and what is cut off
        above and to the left, in pixels of the sample.
        """
        height, width = _wanted_size(size, self)
        cut = ((height - self.size[0]) // 2, (width - self.size[1]) // 2)
        return (height / size[0], width / size[1]), cut

    def cuts(self, size: Size) -> tuple[bool, bool]:
        """Tell whether something of an image of this size is cut off in its height, and in its width."""
        height, width = _wanted_size(size, self)
        return height > self.size[0], width > self.size[1]

    def covers(self, size: Size) -> Array:
        """Tell which pixels of a sample are of an image of this size, bool[height, width]; around it there is none."""
        return self._find_rows(size, 0)[1][:, None] & self._find_rows(size, 1)[1]

    def apply_to_mask(self, image: Any, outside: int) -> Array:
        """Turn a Pillow image of class numbers into the map of one sample, uint8[height, width] or int32.

        The image is of one of MASK_MODES. Its size is changed by the nearest pixel, so that no class comes from two
        others.
        """
        numbers = np.asarray(image)
        rows, columns = (self._find_rows(numbers.shape, axis)[0] for axis in (0, 1))
        class_map: Array = np.where(self.covers(numbers.shape), numbers[rows[:, None], columns], outside)
        return class_map.astype(np.uint8 if int(numbers.max(initial=0)) < 256 else np.int32)

    def _find_rows(self, size: Size, axis: int) -> tuple[Array, Array]:
        """Find the row or column of an image of this size that is nearest to each of a sample, and which are inside."""
        wanted, given = _wanted_size(size, self)[axis], size[axis]
        places = np.arange(self.size[axis]) + self.place(size)[1][axis]
        nearest = ((places + 0.5) * given / wanted).astype(np.int64).clip(0, given - 1)
        return nearest, (places >= 0) & (places < wanted)

    def apply(self, image: Any) -> Array:
        """Turn a Pillow image into one sample.

        Raises:
            ValueError: its pixels are of a kind that has no agreed range.
        """
        cut = _crop_center(_resize(_convert(image, self.mode), self), self.size)
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
        numbers = np.asarray(image)
        least, most = int(numbers.min()), int(numbers.max())
        if image.mode == "I" and image.format not in _OF_16_BITS and (least < 0 or most not in _LARGEST_OF_16_BITS):
            raise ValueError(f"its pixels are 32-bit whole numbers from {least} to {most}, whose range nobody knows")
        image = Image.fromarray((numbers >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _resize(image: Any, steps: Preprocessing) -> Any:
    size = image.size[::-1]
    height, width = _wanted_size(size, steps)
    return image if (height, width) == size else image.resize((width, height), steps.resample)


def _wanted_size(size: Size, steps: Preprocessing) -> Size:
    """Return the size that an image of this size is changed to, before the crop."""
    height, width = size
    if steps.resize is None:
        return size
    if isinstance(steps.resize, tuple):
        wanted = steps.resize
    elif isinstance(steps.resize, int):
        shorter = min(height, width)
        wanted = (int(steps.resize * height / shorter), int(steps.resize * width / shorter))
    else:
        scale = max(steps.size[0] / height, steps.size[1] / width)
        wanted = (round(height * scale), round(width * scale))
    return max(1, wanted[0]), max(1, wanted[1])


def _crop_center(image: Any, size: Size) -> Any:
    top, left = (image.size[1] - size[0]) // 2, (image.size[0] - size[1]) // 2
    return image if (image.size[1], image.size[0]) == size else image.crop((left, top, left + size[1], top + size[0]))


def _join(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4g}" for value in dict.fromkeys(values))
