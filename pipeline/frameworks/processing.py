"""Read what ``--prepend`` and ``--append`` ask for, and fit it to the inputs and outputs of a model.

``frameworks/torch/processing.py`` and ``frameworks/onnx/processing.py`` compute it; a test compares both.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from enginesmith.pipeline.errors import SignatureError, UsageError
from enginesmith.pipeline.tensors import Signature, TensorSpec

PREPENDED = ("uint8", "nhwc", "resize", "scale", "normalize")
"""In the order in which they are applied, whatever order they are given in."""
ACTIVATIONS = ("softmax", "sigmoid")
SELECTIONS = ("argmax", "topk", "nms")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Means and standard deviations of ImageNet's channels, red first, as torchvision's and timm's weights expect them."""
_BYTE, _TOP = 255.0, 5
_BOX_SIDES, _PICTURE_RANK, _TABLE_RANK = 4, 4, 3
_CHANNELS = (1, 3, 4)
"""Numbers of channels of pictures: grey, and colours without and with transparency."""
_FLOATS = ("float16", "float32", "float64")
_HEIGHT, _WIDTH = "height", "width"
_DETECTIONS = "detections"
_T = TypeVar("_T")
_WORD = re.compile(r"([a-z0-9]+)(?::([^=\s]+))?(?:=(.*))?")


class Suppression(BaseModel, frozen=True):
    """Options of ``nms``."""

    iou: float = 0.5
    """Intersection over union above which the box with the lower score is dropped."""
    score: float = 0.25
    """Boxes with this score or less are dropped."""
    max: int = 100
    """Boxes of an image that are kept, at most."""
    boxes: Literal["corners", "center"] | None = None
    """Form of the boxes; by default that of the layout: corners if boxes are an output of their own."""


class ProcessingRequest(BaseModel, frozen=True):
    """Words of ``--prepend`` and ``--append``."""

    prepend: tuple[str, ...] = ()
    append: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.prepend or self.append)

    @property
    def before(self) -> dict[str, str | None]:
        """The words of ``--prepend`` with their values.

        Raises:
            UsageError: a word is not known, or is given twice.
        """
        read = _read_words(self.prepend, "--prepend", PREPENDED)
        if named := next((name for _, name, _ in read if name), None):
            raise UsageError(f"--prepend names an input, {named!r}", "omit it: the only input that fits is taken")
        for word in ("uint8", "nhwc"):
            if next((value for key, _, value in read if key == word), None) is not None:
                raise UsageError(f"--prepend {word} takes no value", f"write --prepend {word}")
        return {word: value for word, _, value in read}

    @property
    def after(self) -> list[tuple[str, str | None, str | None]]:
        """Words of ``--append``, each with the output that it names and its value.

        Raises:
            UsageError: a word is not known, is given twice, or does not go together with another.
        """
        read = _read_words(self.append, "--append", (*ACTIVATIONS, *SELECTIONS))
        for group in (ACTIVATIONS, SELECTIONS):
            if len(both := [word for word, _, _ in read if word in group]) > 1:
                raise UsageError(f"--append {both[0]} and {both[1]} do not go together", "give one of them")
        for word, _, value in read:
            if word in (*ACTIVATIONS, "argmax") and value is not None:
                raise UsageError(f"--append {word} takes no value", f"write --append {word}")
        return sorted(read, key=lambda entry: entry[0] in SELECTIONS)

    def check(self) -> None:
        """Read all words and numbers.

        Raises:
            UsageError: one of them cannot be read.
        """
        self.read_size()
        self.read_numbers(None)
        for word, _, value in self.after:
            _read_selection(word, value)

    def read_size(self) -> tuple[int, int] | None:
        """Return the height and width that ``resize`` names; None where it names none, or is not asked for."""
        text = self.before.get("resize")
        if text is None:
            return None
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
        if match is None or not int(match[1]) or (match[2] and not int(match[2])):
            raise UsageError(f"cannot read --prepend resize={text}", "write it as resize=224 or resize=HEIGHTxWIDTH")
        return int(match[1]), int(match[2] or match[1])

    def read_numbers(self, channels: int | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return factors and offsets, one for all channels or one for each: ``raw * factor + offset``.

        Raises:
            UsageError: a number cannot be read, or there are not as many as channels.
        """
        words = self.before
        divisor = _BYTE if words.get("scale") is None else _read_number(str(words["scale"]), "--prepend scale")
        divisor = divisor if "scale" in words else 1.0
        means, deviations = _read_means(words["normalize"]) if "normalize" in words else ((0.0,), (1.0,))
        if divisor <= 0 or min(deviations) <= 0:
            raise UsageError(
                "--prepend divides by a number that is not above 0", "give scale and standard deviations above 0"
            )
        counts = {len(means), len(deviations)} - {1}
        if len(counts) > 1 or (channels is not None and counts - {channels}):
            given = " and ".join(map(str, sorted(counts)))
            raise UsageError(
                f"--prepend normalize has {given} numbers"
                + (f", and the input has {channels} channels" if channels else ""),
                "give one number, or one for each channel: normalize=MEAN,MEAN,MEAN/STD,STD,STD",
            )
        count = max(counts, default=1)
        means, deviations = (each * count if len(each) == 1 else each for each in (means, deviations))
        factors = tuple(1.0 / (divisor * deviation) for deviation in deviations)
        return factors, tuple(-mean / deviation for mean, deviation in zip(means, deviations, strict=True))


def _read_words(texts: Iterable[str], option: str, known: Sequence[str]) -> list[tuple[str, str | None, str | None]]:
    """Split ``resize=224,scale`` into words, each with the name and the value behind it."""
    border = re.compile(rf",(?=(?:{'|'.join((*PREPENDED, *ACTIVATIONS, *SELECTIONS))})(?:[=:,]|$))")
    read: list[tuple[str, str | None, str | None]] = []
    for part in (part.strip() for text in texts for part in border.split(text)):
        match = _WORD.fullmatch(part)
        if match is None or match[1] not in known:
            raise UsageError(f"{option} does not know {part!r}", f"use one of {', '.join(known)}")
        if any(match[1] == word for word, _, _ in read):
            raise UsageError(f"{option} {match[1]} is given twice", "give it once")
        read.append((match[1], match[2], match[3]))
    return read


def _read_number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{option}: {text!r} is no number", "write it like 0.5") from None


def _read_means(text: str | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if text in (None, "imagenet"):
        return IMAGENET
    means, separator, deviations = str(text).partition("/")
    if not separator:
        raise UsageError(
            f"cannot read --prepend normalize={text}",
            "write it as normalize=imagenet, or as means/standard deviations: normalize=0.5,0.5,0.5/0.25,0.25,0.25",
        )
    read = [tuple(_read_number(n, "--prepend normalize") for n in side.split(",")) for side in (means, deviations)]
    return read[0], read[1]


def _read_selection(word: str, value: str | None) -> tuple[int, Suppression]:
    """Return the count of ``topk``, and the options of ``nms``."""
    if word == "topk" and value is not None and not (value.isdecimal() and int(value)):
        raise UsageError(f"cannot read --append topk={value}", "write it as topk=5")
    options: dict[str, Any] = {}
    for part in value.split(",") if word == "nms" and value else ():
        name, _, text = part.partition(":")
        if name not in Suppression.model_fields or name in options:
            raise UsageError(
                f"cannot read {part!r} in --append nms={value}",
                "write it as nms=iou:0.5,score:0.25,max:100,boxes:center",
            )
        options[name] = text if name == "boxes" else _read_number(text, f"--append nms={name}")
    suppression = Suppression.model_construct(**options)
    wrong = (
        not 0 < suppression.iou <= 1
        or suppression.score < 0
        or suppression.max < 1
        or suppression.max != int(suppression.max)
        or suppression.boxes not in (None, "corners", "center")
    )
    if wrong:
        raise UsageError(
            f"--append nms={value} is out of range",
            "iou is above 0 and at most 1, score 0 or more, max a whole number from 1, boxes corners or center",
        )
    return int(value or _TOP) if word == "topk" else _TOP, Suppression(**{**options, "max": int(suppression.max)})


class Prepared(BaseModel, frozen=True):
    """Computation that makes an input of the model from a raw one of the same name."""

    position: int
    raw: TensorSpec
    core: TensorSpec
    channels_last: bool
    """The raw input has its channels last, and the model's own has them second."""
    own_last: bool = False
    """Both have their channels last."""
    size: tuple[int, int] | None
    """Height and width that pictures are resized to."""
    factors: tuple[float, ...]
    offsets: tuple[float, ...]

    @property
    def scales(self) -> bool:
        """True if numbers change."""
        return set(self.factors) != {1.0} or set(self.offsets) != {0.0}

    @property
    def raw_sides(self) -> tuple[int, int]:
        """Axes of height and width of the raw input."""
        return (1, 2) if self.channels_last or self.own_last else (2, 3)

    @property
    def has_open_channels(self) -> bool:
        """True if nothing tells how many channels there are."""
        axis = _PICTURE_RANK - 1 if self.channels_last or self.own_last else 1
        return isinstance(self.raw.shape[axis], str)

    @property
    def channels_shape(self) -> tuple[int, ...]:
        """Shape that factors and offsets broadcast with, along the channels of the model's own input."""
        ones = (1,) * (len(self.core.shape) - 2)
        count = len(self.factors)
        return () if count == 1 else (1, *ones, count) if self.own_last else (1, count, *ones)


class Appended(BaseModel, frozen=True):
    """Computation that replaces outputs of the model."""

    word: Literal["softmax", "sigmoid", "argmax", "topk", "nms"]
    reads: tuple[int, ...]
    """Positions of the outputs that it takes; of nms boxes and scores, or the one that has both."""
    made: tuple[TensorSpec, ...]
    """Outputs that take their place; the first one's."""
    axis: int = -1
    note: str = ""
    """Description of what the axis is, where it may be another one."""
    count: int = 0
    suppression: Suppression = Suppression()
    activation: Literal["softmax", "sigmoid"] | None = None
    """Applied to the scores before they are judged."""
    classes: int = 0


class Processing(BaseModel, frozen=True):
    """Describe the computation before and after a model, and the model's own signature."""

    core: Signature
    prepared: Prepared | None
    appended: tuple[Appended, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on axes that may be other ones."""
        return tuple(step.note for step in self.appended if step.note)

    @property
    def signature(self) -> Signature:
        """Inputs as they are given and outputs as they are returned."""
        inputs = list(self.core.inputs)
        if self.prepared:
            inputs[self.prepared.position] = self.prepared.raw
        outputs = list(self.core.outputs)
        returns, unordered = self.core.returns, dict(self.core.unordered)
        for step in self.appended:
            outputs = replace_outputs(outputs, step.reads, step.made)
            if step.word in ("topk", "nms"):
                unordered |= {spec.name: "rows" for spec in step.made}
                names: list[Any] = [spec.name for spec in outputs]
                returns = names[0] if len(names) == 1 else names
        named = {spec.name for spec in outputs}
        return Signature(
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            returns=returns,
            unordered={name: kind for name, kind in unordered.items() if name in named},
            tables=self.core.tables,
            lengths=self.core.lengths,
            constants=self.core.constants,
            batched=self.core.batched,
        )


def _has_channels_last(shape: Sequence[int | str]) -> bool:
    """Tell whether a picture's channels are its last axis, by the sizes; [batch, 12, 3, 3] has them second."""
    if len(shape) != _PICTURE_RANK or shape[2] == shape[3]:
        return False
    return shape[3] in _CHANNELS and shape[1] not in _CHANNELS


def replace_outputs(outputs: Sequence[_T], reads: Sequence[int], new_values: Iterable[_T]) -> list[_T]:
    """Put what was made in the place of the first output that was read, and drop the others that were."""
    first = reads[0]
    groups = [[value] if index not in reads else [] for index, value in enumerate(outputs)]
    groups[first] = list(new_values)
    return [value for group in groups for value in group]


def choose_input(specs: Sequence[TensorSpec], request: ProcessingRequest) -> int:
    """Return the position of the only input that ``--prepend`` fits.

    Raises:
        UsageError: there is none, or there are several.
    """
    words = request.before
    picture = not {"nhwc", "resize", "uint8"}.isdisjoint(words)
    able = [
        position
        for position, spec in enumerate(specs)
        if (len(spec.shape) == _PICTURE_RANK if picture else len(spec.shape) > 1)
        and spec.dtype in (*_FLOATS, *(("uint8",) if "uint8" in words else ()))
    ]
    if len(able) != 1:
        needs = "floats with 4 axes: batch, channels, height, width" if picture else "floats with 2 axes or more"
        raise UsageError(
            f"--prepend {','.join(words)} needs one input of {needs}; the model has "
            f"{len(able) or 'none'} among {', '.join(map(str, specs))}",
            "omit --prepend, or write this computation into the model",
        )
    return able[0]


def describe_core(
    given: tuple[TensorSpec, ...], request: ProcessingRequest, own: Mapping[str, TensorSpec]
) -> tuple[TensorSpec, ...]:
    """Derive the model's own inputs from raw ones that ``--input`` describes; ``own`` are those known from an example.

    Raises:
        UsageError: ``--prepend`` fits none of them.
        SignatureError: a raw input has another dtype or number of axes than it has to have.
    """
    words = request.before
    if not words:
        return given
    position = choose_input(given, request)
    spec = given[position]
    known = own.get(spec.name)
    if ("uint8" in words) != (spec.dtype == "uint8"):
        raise SignatureError(
            f"--input says {spec}, and with --prepend {','.join(words)} the raw input is "
            f"{'uint8' if 'uint8' in words else 'no uint8'}",
            "make the two agree: uint8 in both or in neither",
        )
    last = _has_channels_last(known.shape) if known else "nhwc" not in words and _has_channels_last(spec.shape)
    shape = [spec.shape[axis] for axis in (0, 3, 1, 2)] if "nhwc" in words and not last else list(spec.shape)
    if "resize" in words:
        sides = slice(1, 3) if last else slice(2, 4)
        size = request.read_size() or (known.shape[sides] if known and len(known.shape) == _PICTURE_RANK else ())
        if not size:
            raise UsageError("--prepend resize: the size of the model's input is not known", "write resize=224")
        shape[sides] = size
    dtype = known.dtype if known else spec.dtype if spec.dtype in _FLOATS else "float32"
    core = TensorSpec(name=spec.name, dtype=dtype, shape=tuple(shape))
    return (*given[:position], core, *given[position + 1 :])


def fit(request: ProcessingRequest, core: Signature, given: tuple[TensorSpec, ...] = ()) -> Processing:
    """Fit a request to a model's signature; ``given`` are the raw inputs as ``--input`` describes them.

    Raises:
        UsageError: it does not fit.
        SignatureError: ``given`` has other raw inputs.
    """
    prepared = _prepare(request, core.inputs, given) if request.before else None
    return Processing(core=core, prepared=prepared, appended=tuple(_append(request, core)))


def _prepare(request: ProcessingRequest, specs: tuple[TensorSpec, ...], given: tuple[TensorSpec, ...]) -> Prepared:
    words, position = request.before, choose_input(specs, request)
    core = specs[position]
    shape: list[int | str] = list(core.shape)
    last = _has_channels_last(core.shape)
    size = None
    if "resize" in words:
        sides = slice(1, 3) if last else slice(2, 4)
        size = _choose_size(request, core, core.shape[sides])
        shape[sides] = (_HEIGHT, _WIDTH)
    if "nhwc" in words and not last:
        shape = [shape[axis] for axis in (0, 2, 3, 1)]
    raw = TensorSpec(name=core.name, dtype="uint8" if "uint8" in words else core.dtype, shape=tuple(shape))
    if given:
        raw = _take_sizes(raw, given, position)
    channels = core.shape[-1 if last else 1]
    factors, offsets = request.read_numbers(channels if isinstance(channels, int) else None)
    return Prepared(
        position=position,
        raw=raw,
        core=core,
        channels_last="nhwc" in words and not last,
        own_last=last,
        size=size,
        factors=factors,
        offsets=offsets,
    )


def _choose_size(request: ProcessingRequest, core: TensorSpec, own: Sequence[int | str]) -> tuple[int, int]:
    """Choose the height and width to resize to: those that are asked for, or the model's ``own``.

    Raises:
        UsageError: the model takes any size, and none is asked for; or it takes another one.
    """
    height, width = own
    size = request.read_size()
    if size is None and isinstance(height, int) and isinstance(width, int):
        return height, width
    free = isinstance(height, str) and isinstance(width, str)
    usual = "224" if free else "x".join(str(dim) if isinstance(dim, int) else "224" for dim in own)
    remedy = f"name one that it takes: resize={usual}"
    if size is None:
        raise UsageError(f"--prepend resize: the model takes {'any size' if free else 'several sizes'}, {core}", remedy)
    if any(isinstance(dim, int) and dim != side for dim, side in zip(own, size, strict=True)):
        raise UsageError(f"--prepend resize={size[0]}x{size[1]} does not fit the model's input {core}", remedy)
    return size


def _take_sizes(raw: TensorSpec, given: tuple[TensorSpec, ...], position: int) -> TensorSpec:
    """Take the sizes that ``--input`` names for dimensions that may have any size."""
    spec = given[position] if position < len(given) else None
    fits = (
        spec is not None
        and (spec.name, spec.dtype, len(spec.shape)) == (raw.name, raw.dtype, len(raw.shape))
        and all(isinstance(own, str) or own == dim for own, dim in zip(raw.shape, spec.shape, strict=True))
    )
    if spec is None or not fits:
        raise SignatureError(
            f"--input says {', '.join(map(str, given))}, and with --prepend the raw input is {raw}",
            "describe the raw input with --input",
        )
    return spec


def _append(request: ProcessingRequest, core: Signature) -> Iterable[Appended]:
    outputs, words = list(core.outputs), request.after
    reads = next((_choose_tables(outputs, name) for word, name, _ in words if word == "nms"), ())
    activation: Any = None
    for word, name, value in words:
        count, suppression = _read_selection(word, value)
        if word in ACTIVATIONS and reads and (name is None or _choose_output(word, outputs, name) in reads):
            _check_names_scores(word, name, outputs, reads)
            activation = word
            continue
        if word == "nms":
            step = _fit_suppression(outputs, reads, suppression, activation)
        else:
            step = _fit_output(word, outputs, _choose_output(word, outputs, name), count)
        yield step
        outputs = replace_outputs(outputs, step.reads, step.made)


def _check_names_scores(word: str, name: str | None, outputs: Sequence[TensorSpec], reads: Sequence[int]) -> None:
    """Refuse to apply an activation to the boxes of ``nms``, which takes it for the scores."""
    scores = outputs[reads[-1]].name
    if name not in (None, scores):
        raise UsageError(f"--append {word}:{name}: nms reads boxes there", f"name its scores: {word}:{scores}")


def _choose_output(word: str, outputs: Sequence[TensorSpec], name: str | None) -> int:
    names = [spec.name for spec in outputs]
    if name is not None and name not in names:
        raise UsageError(f"--append {word}: the model has no output {name!r}", f"its outputs are {', '.join(names)}")
    if name is None and len(outputs) > 1:
        raise UsageError(
            f"--append {word}: the model has {len(outputs)} outputs, {', '.join(names)}",
            f"name one of them: {word}:{names[0]}",
        )
    return names.index(name) if name else 0


def _fit_output(word: Any, outputs: Sequence[TensorSpec], position: int, count: int) -> Appended:
    """Fit what is computed along the classes: the second axis, or the last one of three (tokens).

    Also the last one of a picture whose second and third are alike, and not as small: [batch, 32, 32, 5].
    """
    spec = outputs[position]
    rank = len(spec.shape)
    if spec.dtype not in _FLOATS or (rank < 2 and word != "sigmoid"):
        raise UsageError(
            f"--append {word} needs floats of shape [batch, classes, ...], and the output is {spec}",
            f"omit --append {word}",
        )
    axis = 2 if rank == _TABLE_RANK else 1
    if rank == _PICTURE_RANK:
        (_, height, width, last), axis = spec.shape, 1
        if height == width and isinstance(last, int) and (isinstance(height, str) or last < height):
            axis = 3
    note = f"--append {word} takes axis {axis} of {spec} for the classes, {spec.shape[axis]} of them"
    specs: tuple[TensorSpec, ...] = (spec,)
    if word == "argmax":
        shape = (*spec.shape[:axis], *spec.shape[axis + 1 :])
        specs = (TensorSpec(name=spec.name, dtype="int64", shape=shape),)
    elif word == "topk":
        classes = spec.shape[axis]
        if isinstance(classes, int) and count > classes:
            raise UsageError(f"--append topk={count}: the output {spec} has {classes} classes", f"use topk={classes}")
        shape = (*spec.shape[:axis], count, *spec.shape[axis + 1 :])
        indices = TensorSpec(name=f"{spec.name}_indices", dtype="int64", shape=shape)
        specs = (spec.model_copy(update={"shape": shape}), indices)
        if any(other.name == indices.name for other in outputs):
            raise UsageError(f"--append topk: the model has an output {indices.name!r} already", "rename it")
    told = note if rank > _TABLE_RANK and word != "sigmoid" else ""
    return Appended(word=word, reads=(position,), made=specs, axis=axis, note=told, count=count)


def _choose_tables(outputs: Sequence[TensorSpec], name: str | None) -> tuple[int, ...]:
    """Choose the outputs that ``nms`` reads: boxes [N, boxes, 4] and scores [N, classes, boxes], or the one with both.

    These are all outputs, or the named one: of boxes with the scores that fit.

    Raises:
        UsageError: there is no such output, or it does not have this form, or one of several forms.
    """
    tables = [at for at, spec in enumerate(outputs) if spec.dtype in _FLOATS and len(spec.shape) == _TABLE_RANK]
    pairs: list[tuple[int, ...]] = [
        (boxes, scores)
        for boxes, scores in itertools.permutations(tables, 2)
        if outputs[boxes].shape[1:] == (outputs[scores].shape[2], _BOX_SIDES)
        and isinstance(outputs[scores].shape[1], int)
    ]
    whole = [(at,) for at in tables if isinstance(size := outputs[at].shape[1], int) and size > _BOX_SIDES]
    if name is None:
        choices = [reads for reads in (*pairs, *whole) if len(reads) == len(outputs)][:1]
    else:
        position = _choose_output("nms", outputs, name)
        choices = [reads for reads in pairs if reads[0] == position]
        choices = choices or [reads for reads in (*pairs, *whole) if position in reads]
    if len(choices) == 1:
        return choices[0]
    names = [spec.name for spec in outputs]
    if choices:
        forms = " or ".join(" and ".join(names[at] for at in reads) for reads in choices)
        raise UsageError(
            f"--append nms:{name}: boxes and scores may be {forms}",
            "let the model return the outputs that are meant, and no other ones in this form",
        )
    able = [names[reads[0]] for reads in (*pairs, *whole)]
    raise UsageError(
        "--append nms needs outputs boxes [batch, boxes, 4] and scores [batch, classes, boxes], or one output "
        f"[batch, 4 + classes, boxes]; {f'the output {name!r} is' if name else 'the model has'} "
        f"{', '.join(str(spec) for spec in outputs if name in (None, spec.name))}",
        f"name one of them: nms:{able[0]}" if able else "let the model return them in this form",
    )


def _fit_suppression(
    outputs: Sequence[TensorSpec], reads: tuple[int, ...], options: Suppression, activation: Any
) -> Appended:
    """Fit ``nms`` to the outputs that it reads."""
    if any(spec.name == _DETECTIONS for at, spec in enumerate(outputs) if at not in reads):
        raise UsageError(f"--append nms: the model has an output {_DETECTIONS!r} already", "rename it")
    _, rows_of_scores, boxes = outputs[reads[-1]].shape
    assert isinstance(rows_of_scores, int)
    classes = rows_of_scores if len(reads) > 1 else rows_of_scores - _BOX_SIDES
    rows = min(options.max, classes * boxes) if isinstance(boxes, int) else f"{_DETECTIONS}_rows"
    form = options.boxes or ("corners" if len(reads) > 1 else "center")
    return Appended(
        word="nms",
        reads=reads,
        made=(TensorSpec(name=_DETECTIONS, dtype="float32", shape=(outputs[reads[0]].shape[0], rows, _BOX_SIDES + 2)),),
        suppression=options.model_copy(update={"boxes": form}),
        activation=activation,
        classes=classes,
    )
