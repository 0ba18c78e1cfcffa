"""Which preprocessing images get: as given, from a Hugging Face configuration, or by default."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from enginesmith.calibration.options import DataOptions
from enginesmith.calibration.preprocessing import Mode, Preprocessing, Size
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import TensorSpec

CONFIGURATION = "preprocessor_config.json"
_MODES: Mapping[int, Mode] = {1: "L", 3: "RGB", 4: "RGBA"}
_FLOATS = ("float16", "float32", "float64")
_BILINEAR = 2
_WHOLE_IMAGE_FROM = 384
"""ConvNeXt's processor cuts nothing off from this side on."""
_NOT_DONE = ("do_pad", "do_flip_channel_order", "rescale_offset", "do_thumbnail", "do_align_long_axis")


class _Configuration(BaseModel):
    """The keys of preprocessor_config.json that say what is done to pixels; old files leave the ``do_…`` out."""

    model_config = ConfigDict(extra="allow")

    do_resize: bool = True
    size: int | dict[str, int | None] | None = None
    resample: int | None = None
    crop_pct: float | None = None
    do_center_crop: bool = True
    crop_size: int | dict[str, int | None] | None = None
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None

    @field_validator("size", "crop_size")
    @classmethod
    def _understood(cls, value: int | dict[str, int | None] | None) -> int | dict[str, int | None] | None:
        if isinstance(value, dict) and not (value.get("shortest_edge") or (value.get("height") and value.get("width"))):
            raise ValueError("a size is one number, shortest_edge, or height and width")
        return value

    @property
    def geometry(self) -> tuple[int | Size | None, Size | None]:
        """Resize and crop."""
        crop = _sides(self.crop_size) if self.do_center_crop else None
        if not self.do_resize or self.size is None:
            return None, crop
        edge = self.size if isinstance(self.size, int) else self.size.get("shortest_edge")
        if edge is None:
            return _sides(self.size), crop
        if self.crop_pct is not None:
            return (_square(edge), None) if edge >= _WHOLE_IMAGE_FROM else (int(edge / self.crop_pct), _square(edge))
        return (edge if crop or isinstance(self.size, dict) else _square(edge)), crop


class _Values(NamedTuple):
    rescale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


def preprocessing_for(spec: TensorSpec, folder: Path, options: DataOptions) -> Preprocessing:
    """The steps that make what the model takes of the images in a folder.

    Raises:
        DataError: the input is no image, or what is given does not make one that fits it.
    """
    channels, sides, channels_last = _layout(spec)
    found = _configuration(folder)
    config = found or _Configuration()
    own_geometry = options.resize is not None or options.crop is not None
    resize, crop = (options.resize, _pair(options.crop)) if own_geometry else config.geometry
    size = crop or _size(spec, resize, sides)
    if any(isinstance(side, int) and side != made for side, made in zip(sides, size, strict=True)):
        source = "the options make" if own_geometry else f"{CONFIGURATION} makes"
        raise DataError(f"{source} images of {size[0]}×{size[1]}, and the model takes {spec}", "give resize and crop")
    values = _Values() if spec.dtype == "uint8" else _values(config, options, channels)
    return Preprocessing(
        mode=_MODES[channels],
        resize=resize if resize or crop else "cover",
        resample=_BILINEAR if config.resample is None else config.resample,
        size=size,
        rescale=values.rescale,
        mean=values.mean,
        std=values.std,
        channels_last=channels_last,
        dtype=spec.dtype,
        origin=_origin(found, options),
    )


def _layout(spec: TensorSpec) -> tuple[int, tuple[int | str, int | str], bool]:
    """Channels, height and width, and whether the channels come last."""
    if len(spec.shape) != 4 or spec.dtype not in (*_FLOATS, "uint8"):
        raise DataError(
            f"the model takes {spec}, which no images can be made into",
            "images are for an input of [batch, channels, height, width] in floats or uint8; give arrays instead",
        )
    _, first, middle, last = spec.shape
    if first in _MODES or (isinstance(first, str) and last not in _MODES):
        return (first if isinstance(first, int) else 3), (middle, last), False
    if isinstance(last, int) and last in _MODES:
        return last, (first, middle), True
    raise DataError(f"the model takes {spec}, and images have 1, 3 or 4 channels", "give arrays instead")


def _size(spec: TensorSpec, resize: int | Size | None, sides: tuple[int | str, int | str]) -> Size:
    """What comes out where nothing is said about a crop."""
    if isinstance(resize, tuple):
        return resize
    height, width = (resize if resize and isinstance(side, str) else side for side in sides)
    if isinstance(height, str) or isinstance(width, str):
        raise DataError(
            f"the height and width of {spec} are dynamic, and nothing says how large the images are to be",
            f"give a crop in pixels, or put a {CONFIGURATION} beside the images",
        )
    return height, width


def _values(config: _Configuration, options: DataOptions, channels: int) -> _Values:
    rescale = options.rescale or (config.rescale_factor if config.do_rescale else 1.0)
    mean, std = (config.image_mean, config.image_std) if config.do_normalize else (None, None)
    values = _Values(rescale, options.mean or mean or (0.0,), options.std or std or (1.0,))
    for name, given in (("mean", values.mean), ("std", values.std)):
        if len(given) not in (1, channels) or (name == "std" and 0 in given):
            raise DataError(
                f"the {name} {list(given)} does not fit images of {channels} channels",
                "give one number, or one for each channel; a standard deviation is not 0",
            )
    return values


def _configuration(folder: Path) -> _Configuration | None:
    """The file in the folder, else the one beside it."""
    for place in (folder, folder.absolute().parent):
        path = place / CONFIGURATION
        if path.is_file():
            try:
                return _Configuration.model_validate_json(path.read_bytes())
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise DataError(
                    f"{path}: {where}: {first['msg']}", "mend it, or give resize, crop, mean and std"
                ) from error
    return None


def _origin(found: _Configuration | None, options: DataOptions) -> str:
    given = [name for name in ("resize", "crop", "rescale", "mean", "std") if getattr(options, name) is not None]
    parts = [f"{', '.join(given)} as given"] if given else []
    if found is None:
        return "; ".join([*parts, f"the rest by default: there is no {CONFIGURATION}" if given else _BY_DEFAULT])
    skipped = [name for name in _NOT_DONE if (found.model_extra or {}).get(name)]
    parts.append(f"{'the rest ' if given else ''}from {CONFIGURATION}")
    return "; ".join([*parts, *([f"not done: {', '.join(skipped)}"] if skipped else [])])


_BY_DEFAULT = f"by default: there is no {CONFIGURATION}, and no mean or standard deviation is given"


def _sides(size: int | dict[str, int | None] | None) -> Size | None:
    if not isinstance(size, dict):
        return size if size is None else _square(size)
    edge = size.get("shortest_edge")
    return _square(edge) if edge else (size["height"] or 0, size["width"] or 0)


def _pair(side: int | Size | None) -> Size | None:
    return _square(side) if isinstance(side, int) else side


def _square(side: int) -> Size:
    return side, side
