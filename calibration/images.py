"""Read folders of images, which are decoded when they are needed; sub-folders are classes."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError, field_validator

from enginesmith.calibration.image_files import (
    CONFIGURATION,
    GIVE_IMAGES,
    ImageFile,
    describe_other_files,
    describe_turned,
    list_folders,
    list_images,
    list_other_files,
    list_tree,
    read_header,
)
from enginesmith.calibration.lazy_arrays import LazyRows
from enginesmith.calibration.options import DataOptions
from enginesmith.calibration.preprocessing import Mode, Preprocessing, Size
from enginesmith.calibration.sources import RawData, Request
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.tensors import Array, TensorSpec

# The preprocessing that images get: as given, from a Hugging Face configuration, or by default.

_MODES: Mapping[int, Mode] = {1: "L", 3: "RGB", 4: "RGBA"}
_FLOATS = ("float16", "float32", "float64")
_BILINEAR = 2
_WHOLE_IMAGE_FROM = 384
"""ConvNeXt's processor cuts nothing off from this side on."""
_NOT_DONE = ("do_pad", "do_flip_channel_order", "rescale_offset", "do_thumbnail", "do_align_long_axis")


class _Configuration(BaseModel, extra="allow"):
    """The keys of preprocessor_config.json that say what is done to pixels; old files leave the ``do_…`` out."""

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
        """Sizes to resize and to crop to."""
        crop = _sides(self.crop_size) if self.do_center_crop else None
        if not self.do_resize or self.size is None:
            return None, crop
        edge = self.size if isinstance(self.size, int) else self.size.get("shortest_edge")
        if edge is None:
            return _sides(self.size), crop
        if self.crop_pct is not None:
            return (_square(edge), None) if edge >= _WHOLE_IMAGE_FROM else (int(edge / self.crop_pct), _square(edge))
        return (edge if crop or isinstance(self.size, dict) else _square(edge)), crop


_Values = tuple[float, tuple[float, ...], tuple[float, ...]]
"""Factor, mean and standard deviation."""
_AS_THEY_ARE: _Values = (1.0, (0.0,), (1.0,))


def preprocessing_for(spec: TensorSpec, folder: Path, options: DataOptions) -> Preprocessing:
    """Choose the steps that turn the images of a folder into the model's input.

    Raises:
        DataError: the input is no image, or what is given does not make one that fits it.
    """
    channels, sides, channels_last = _layout(spec)
    configuration = _read_configuration(folder)
    config = configuration or _Configuration()
    own_geometry = options.resize is not None or options.crop is not None
    resize, crop = (options.resize, _pair(options.crop)) if own_geometry else config.geometry
    size = crop or _size(spec, resize, sides)
    if any(isinstance(side, int) and side != pixels for side, pixels in zip(sides, size, strict=True)):
        source = "the options make" if own_geometry else f"{CONFIGURATION} makes"
        raise DataError(f"{source} images of {size[0]}×{size[1]}, and the model takes {spec}", "give resize and crop")
    rescale, mean, std = _AS_THEY_ARE if spec.dtype == "uint8" else _values(config, options, channels)
    return Preprocessing(
        mode=_MODES[channels],
        resize=resize if resize or crop else "cover",
        resample=_BILINEAR if config.resample is None else config.resample,
        size=size,
        rescale=rescale,
        mean=mean,
        std=std,
        channels_last=channels_last,
        dtype=spec.dtype,
        origin=_describe_origin(configuration, options),
    )


def _layout(spec: TensorSpec) -> tuple[int, tuple[int | str, int | str], bool]:
    """Return channels, height and width, and whether the channels come last."""
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
    """Return the size of the result where no crop is given."""
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
    mean, std = options.mean or mean or (0.0,), options.std or std or (1.0,)
    for name, given in (("mean", mean), ("std", std)):
        if len(given) not in (1, channels) or (name == "std" and 0 in given):
            raise DataError(
                f"the {name} {list(given)} does not fit images of {channels} channels",
                "give one number, or one for each channel; a standard deviation is not 0",
            )
    return rescale, mean, std


def _read_configuration(folder: Path) -> _Configuration | None:
    """Find the configuration in the folder, else the one beside it."""
    for place in (folder, folder.absolute().parent):
        path = place / CONFIGURATION
        if path.is_file():
            try:
                return _Configuration.model_validate_json(path.read_bytes())
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise DataError(
                    f"{path}: {where}: {first['msg']}", "fix it, or give resize, crop, mean and std"
                ) from error
    return None


def _describe_origin(configuration: _Configuration | None, options: DataOptions) -> str:
    given = [name for name in ("resize", "crop", "rescale", "mean", "std") if getattr(options, name) is not None]
    parts = [f"{', '.join(given)} as given"] if given else []
    if configuration is None:
        return "; ".join([*parts, f"the rest by default: there is no {CONFIGURATION}" if given else _BY_DEFAULT])
    skipped = [name for name in _NOT_DONE if (configuration.model_extra or {}).get(name)]
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


class Listing(NamedTuple):
    """The images of a folder, sorted by class and name."""

    files: tuple[Path, ...]
    labels: Array | None
    classes: Mapping[int, str]
    """Names by label."""
    folders: tuple[Path, ...]


class ImageRows(LazyRows):
    """Images as one array; only those that are asked for are decoded."""

    finite = True  # pixels are, and so is what the preprocessing makes of them

    def __init__(self, files: Sequence[ImageFile], steps: Preprocessing) -> None:
        self._files = np.asarray(files, object)
        self._steps = steps
        super().__init__((len(files), *steps.row), steps.dtype)

    def __getitem__(self, key: Any) -> Array:
        chosen = self._files[key]
        if isinstance(chosen, ImageFile):
            return self._decode(chosen)
        samples = np.empty((len(chosen), *self.shape[1:]), self.dtype)
        for index, file in enumerate(chosen):
            samples[index] = self._decode(file)
        return samples

    def origin(self, rows: Array | slice) -> Iterator[bytes]:
        """Yield the steps and the files' bytes: the pixels follow from these.

        Data of runs of all versions is compared by this: a step that a later version adds shows only where it is taken.
        """
        yield self._steps.model_dump_json(exclude={"origin"}, exclude_defaults=True).encode()
        for image in self._files[rows]:
            if image.is_turned:
                yield f"orientation {image.orientation}".encode()
            with image.path.open("rb") as file:
                yield hashlib.file_digest(file, "sha256").digest()

    def _decode(self, file: ImageFile) -> Array:
        with file.open() as image:
            return self._steps.apply(image)


def read_images(reference: str, request: Request) -> RawData:
    """Read the images of a folder as the model's one input.

    Raises:
        DataError: there are none, one is damaged, or the model takes something else.
        MissingCapability: Pillow is not installed.
    """
    spec, folder = only_input(reference, request), Path(reference)
    contents = listing(folder)
    files = [read_header(path) for path in contents.files]  # one that is no image fails here; all are recorded as read
    steps = preprocessing_for(spec, folder, request.options)
    notes = [f"images as {steps}", *describe_turned(files)]
    if contents.labels is not None:
        notes.append(f"labels from {len(contents.classes)} sub-folders{_list_empty(contents)}")
    notes += describe_other_files(folder, list_other_files(contents.folders))
    beside = () if (folder / CONFIGURATION).is_file() else (folder.absolute().parent,)  # it may appear there
    return RawData(
        folder.resolve().name,
        {spec.name: ImageRows(files, steps)},
        contents.labels,
        tuple(notes),
        tuple(each.absolute() for each in (*contents.folders, *beside)),
        class_names={} if are_numbers(contents.classes.values()) else contents.classes,
    )


def only_input(reference: str, request: Request) -> TensorSpec:
    """Return the model's one input.

    Raises:
        DataError: it has several.
    """
    if len(request.inputs) != 1:
        names = ", ".join(spec.name for spec in request.inputs)
        raise DataError(f"{reference} holds images, and the model takes {names}", "give one array for each input")
    return request.inputs[0]


def listing(folder: Path) -> Listing:
    """List the images in a folder, or in its sub-folders, which are classes: in order, or by their own number.

    An empty sub-folder is a class without images.

    Raises:
        DataError: there are none, or some in both places.
        MissingCapability: Pillow is not installed.
    """
    flat = list_images(folder)
    trees = {path.name: list_tree(path) for path in list_folders(folder)}
    by_class = {name: [image for each in tree for image in list_images(each)] for name, tree in trees.items()}
    nested = [image for images in by_class.values() for image in images]
    folders = (folder, *(each for tree in trees.values() for each in tree))
    if not flat and not nested:
        raise DataError(f"the folder {folder} holds no images", GIVE_IMAGES)
    if flat and nested:
        raise DataError(
            f"the folder {folder} holds images itself and in sub-folders ({nested[0].relative_to(folder)})",
            "give one folder for each class, or all images in one folder without labels",
        )
    named = _number_classes(tuple(by_class))
    if not flat and not are_numbers(by_class):
        for name, images in by_class.items():
            if not images and (others := list_other_files(trees[name])):
                raise DataError(
                    f"the sub-folder {name} of {folder} holds no images, but other files ({others[0].name}), and "
                    "classes are numbered by their folders",
                    "take it away, put the images of that class into it, or empty it if there are none of that class",
                )
    if flat or len(by_class) == 1:
        return Listing(tuple(flat or nested), None, {}, folders)
    labels = [label for name, label in named for _ in by_class[name]]
    files = tuple(image for name, _ in named for image in by_class[name])
    return Listing(files, np.asarray(labels, np.int64), {label: name for name, label in named}, folders)


def _list_empty(contents: Listing) -> str:
    """List the classes without images, as the end of a sentence; numbers that no folder has are no classes."""
    counted = {*np.asarray(contents.labels).tolist()}
    empty = [name for label, name in contents.classes.items() if label not in counted]
    return f"; without images: {', '.join(empty)}" if empty and not are_numbers(contents.classes.values()) else ""


def _number_classes(classes: tuple[str, ...]) -> list[tuple[str, int]]:
    """Number the classes, and return them with their labels, in order."""
    if are_numbers(classes):
        return sorted(((name, int(name)) for name in classes), key=lambda item: (item[1], item[0]))
    return [(name, label) for label, name in enumerate(sorted(classes))]


def are_numbers(names: Iterable[str]) -> bool:
    """Tell whether all names of classes are whole numbers, which are the classes then."""
    return all(name.isascii() and name.isdigit() for name in names)
