"""Inputs of Hugging Face models: the tensors that a forward takes, and an example that fits the configuration."""

import contextlib
import inspect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from enginesmith.pipeline.errors import SignatureError, SourceError
from enginesmith.pipeline.frameworks.torch.dims import resize_example
from enginesmith.pipeline.tensors import BATCH, TensorSpec, read_sizes

Example = dict[str, tuple[Tensor, TensorSpec]]
"""By name of the input."""

FACTORY = "a file.py with a factory that returns (module, example_inputs)"
_ROWS, _SEQUENCE, _SAMPLES, _PIXELS, _CHANNELS = 2, 32, 16_000, 224, 3
_CHOICES = 3
_CHOOSES_TEXT = "ForMultipleChoice"
"""End of the names of classes that read several texts for each sample, and choose one."""
_VIDEO_RANK = 5
_READS_TEXT_ITSELF = ("ForSequenceClassification", "ForQuestionAnswering")
"""Ends of the names of classes whose decoder, if there is one, reads the text that the encoder reads."""
_TOWERS = {
    "input_ids": ("text_config",),
    "pixel_values": ("vision_config", "image_size"),
    "input_features": ("audio_config",),
}
"""Fields of a configuration that tell that a model reads an input, also where its forward has a default for that."""
_PLACEHOLDERS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
"""Fields of models in whose texts tokens stand for pictures or sound: they read texts alone, too."""
_PARTS = ("encoder", "backbone_config", "prompt_encoder_config")
"""Parts of a configuration in which the sizes of pictures may stand."""
_DERIVED = {
    *("position_ids", "decoder_position_ids", "decoder_attention_mask", "head_mask", "logits_to_keep"),
    *("encoder_hidden_states", "encoder_attention_mask", "future_values"),
}
"""Inputs that are made from others where they are left out, or that are for training and decoding."""
_DERIVED_ENDS = ("embeds", "embeddings", "_positions")
_NESTED = {"encoder_outputs", "past_key_values", "mems", "cache"}
"""Arguments that are tuples of tensors or hold some, whatever their annotation says."""
_TARGETS = {"start_positions", "end_positions", "target_values", "float_answer"}
"""Arguments that only a loss is computed from, beside those that are called labels."""
_TAKEN_DTYPES = {"i": "int64", "u": "int64", "f": "float32"}
"""Dtype that models take, by the kind of the data's."""
_POINTS = "input_labels"
"""An input in spite of its name: it tells points in front from those behind."""


def list_inputs(module: nn.Module) -> Iterator[str]:
    """List the tensors that the model takes; those that only a loss is computed from are left out."""
    for name, value in inspect.signature(module.forward).parameters.items():
        if _takes_tensor(name, value) and not _is_target(name):
            yield name


def list_usual_inputs(module: nn.Module) -> Iterator[str]:
    """List the tensors that the model takes, but for those that are made from others where they are left out."""
    by_pictures = _list_main_inputs(module) >= {"pixel_values"}  # of which none is longer than another
    derived = _DERIVED | ({"attention_mask"} if by_pictures else set())
    parameters = inspect.signature(module.forward).parameters
    for name in list_inputs(module):
        known = parameters[name].annotation is not inspect.Parameter.empty or _is_required(parameters[name])
        if known and name not in derived and not name.endswith(_DERIVED_ENDS):
            yield name


def choose_inputs(module: nn.Module, inputs: Sequence[TensorSpec], arrays: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Choose the inputs that there are arrays for, of those that the model takes and can do without.

    ``arrays`` have samples first. Where the model does not take one of them, which may be misspelled, ``inputs`` stay.
    Arrays with more or fewer axes than an input are taken if the model runs with such.
    """
    parameters, takes = inspect.signature(module.forward).parameters, [*list_inputs(module)]
    given = {spec.name: spec for spec in arrays}
    if not given.keys() <= {*takes}:
        return [*inputs]
    main = _list_main_inputs(module)
    kept = [spec for spec in inputs if spec.name in given or spec.name in main or _is_required(parameters[spec.name])]
    known = {spec.name for spec in inputs}

    def add_others(kept: list[TensorSpec]) -> list[TensorSpec]:
        added = (name for name in takes if name in given and name not in known)
        return kept + [_describe_input(given[name], kept, given) for name in added]

    chosen, fitted = add_others(kept), add_others([_fit_axes(spec, given.get(spec.name, spec)) for spec in kept])
    return fitted if fitted != chosen and _runs(module, _make_zeros(fitted, given)) else chosen


def _fit_axes(spec: TensorSpec, array: TensorSpec) -> TensorSpec:
    """Give an input as many axes as an array has: those at its end stay, and more before them have its sizes."""
    more = len(array.shape) - len(spec.shape)
    sizes = (*array.shape[1 : 1 + more], *spec.shape[1:]) if more > 0 else spec.shape[1 - more :]
    return spec.model_copy(update={"shape": (BATCH, *sizes)})


def _make_zeros(inputs: Sequence[TensorSpec], given: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Make zeros in the sizes of the arrays given, for two samples, as far as there are arrays."""
    arrays = ((spec, given[spec.name].shape[1:]) for spec in inputs if spec.name in given)
    return {
        spec.name: torch.zeros((_ROWS, *map(int, sizes)), dtype=getattr(torch, spec.dtype)) for spec, sizes in arrays
    }


def _describe_input(array: TensorSpec, inputs: Sequence[TensorSpec], given: Mapping[str, TensorSpec]) -> TensorSpec:
    """Describe the input that an array is for: its sizes are dynamic where those of other inputs are."""
    words = dict[int | str, int | str]()
    decodes = array.name.startswith("decoder")
    for spec in sorted(inputs, key=lambda spec: spec.name.startswith("decoder") != decodes):
        for dim, size in zip(spec.shape[1:], given[spec.name].shape[1:] if spec.name in given else (), strict=False):
            words.setdefault(size, dim)
    dtype = _TAKEN_DTYPES.get(np.dtype(array.dtype).kind, array.dtype)
    return TensorSpec(name=array.name, dtype=dtype, shape=(BATCH, *(words.get(size, size) for size in array.shape[1:])))


def explain_refused(module: nn.Module, names: Collection[str]) -> SignatureError:
    """Say which of the inputs that ``--input`` names the model does not take, why, and what it takes."""
    takes, usual = [*list_inputs(module)], [*list_usual_inputs(module)]
    name = next(name for name in names if name not in takes)
    if name not in inspect.signature(module.forward).parameters:
        reason = f"which the forward of {type(module).__name__} does not have"
    elif _is_target(name):
        reason = "a target of training, from which a loss is computed and no answer"
    else:
        reason = "which is no tensor"
    others = ", ".join(other for other in takes if other not in usual)
    more = f"; and, made from these or not needed where they are left out, {others}" if others else ""
    return SignatureError(f"--input names {name}, {reason}", f"it takes {', '.join(usual)}{more}")


def explain_unknown(module: nn.Module) -> SourceError:
    """Say that no example is known for a model, and what may be given."""
    names = ", ".join(list_usual_inputs(module))
    return SourceError(
        f"no example inputs are known for {type(module).__name__}, which takes {names}",
        f"give the inputs with --input name:dtype:batch,…, or write {FACTORY}",
    )


def _takes_tensor(name: str, parameter: inspect.Parameter) -> bool:
    unknown = parameter.annotation is inspect.Parameter.empty and (_is_required(parameter) or parameter.default is None)
    return name not in _NESTED and (unknown or "Tensor" in str(parameter.annotation))


def _is_target(name: str) -> bool:
    return name in _TARGETS or (name.endswith(("label", "labels")) and name != _POINTS)


def _list_main_inputs(module: nn.Module) -> set[str]:
    names = getattr(module, "main_input_name", "input_ids")
    return {names} if isinstance(names, str) else {*names}


def _is_required(parameter: inspect.Parameter) -> bool:
    is_one = parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return is_one and parameter.default is inspect.Parameter.empty


def make_example(module: nn.Module) -> Example:
    """Make example inputs: text, pictures, sound, several of them for models of towers, series; empty if unknown."""
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):  # a configuration of another form
        return _join_frames(module, _make_example(module))
    return {}


def _join_frames(module: nn.Module, example: Example) -> Example:
    """Give the pictures of one video as a batch to a model that takes them so, and not as videos."""
    videos = {name for name, (values, _) in example.items() if values.ndim == _VIDEO_RANK}
    joined = {
        name: (values[0], spec.model_copy(update={"shape": spec.shape[1:]})) if name in videos else (values, spec)
        for name, (values, spec) in example.items()
    }
    takes = videos and not _runs(module, _take_values(example)) and _runs(module, _take_values(joined))
    return joined if takes else example


def _take_values(example: Example) -> dict[str, Tensor]:
    return {name: values for name, (values, _) in example.items()}


def _runs(module: nn.Module, values: Mapping[str, Tensor]) -> bool:
    with contextlib.suppress(Exception), torch.inference_mode():  # whatever it raises, it does not take such inputs
        module(**values)
        return True
    return False


def fix_lengths(module: nn.Module, example: Example) -> tuple[Example, list[str]]:
    """Fix the lengths that a model refuses half of, as one that reshapes by its configuration's; with notes.

    One sample is tried, as several may have as many numbers as one of the full length has.
    """
    values = _take_values(example)
    specs = [spec for _, spec in example.values()]
    full = {word: 1 if word == BATCH else size for word, size in read_sizes(specs, values).items()}
    halved = {word: size if word == BATCH else max(1, size // 2) for word, size in full.items()}

    def runs(sizes: Mapping[str, int]) -> bool:
        return _runs(module, resize_example(specs, values, sizes))

    if halved == full or runs(halved) or not runs(full):
        return example, []
    words = [word for word in full if halved[word] != full[word]]
    refused = words if len(words) == 1 else [word for word in words if not runs({**full, word: halved[word]})]
    fixed = {word: full[word] for word in refused}
    for name, (value, spec) in example.items():
        shape = tuple(fixed.get(str(dim), dim) for dim in spec.shape)
        example = {**example, name: (value, spec.model_copy(update={"shape": shape}))}
    return example, [
        f"the model does not run with {word} = {halved[word]}, so the dimension is fixed at {size}"
        for word, size in fixed.items()
    ]


def _make_example(module: nn.Module) -> Example:
    config: Any = module.config
    accepted = inspect.signature(module.forward).parameters
    required = {name for name, value in accepted.items() if _is_required(value)}
    required |= accepted.keys() & _list_main_inputs(module)
    in_text = any(hasattr(config, name) for name in _PLACEHOLDERS)
    wanted = required if in_text else required | (accepted.keys() & _list_towers(config))
    example: Example = {}
    if "input_ids" in wanted:
        text = _make_text(config)
        example |= _repeat_text(text) if type(module).__name__.endswith(_CHOOSES_TEXT) else text
    if "pixel_values" in wanted:
        example |= _make_patches(config) if "spatial_shapes" in accepted else _make_pictures(config)
    for sound in wanted & {"input_values", "input_features"}:
        example |= _make_sound(getattr(config, "audio_config", config), sound)
    if "past_values" in wanted:
        example |= _draw("past_values", (BATCH, config.context_length, config.num_input_channels))
    if not required or not required <= example.keys():
        return {}
    reads = type(module).__name__.endswith(_READS_TEXT_ITSELF)
    decodes = not reads if getattr(config, "is_encoder_decoder", False) else not in_text
    if decodes and "decoder_input_ids" in accepted:
        example |= _make_tokens("decoder_input_ids", config, "decoder_sequence")
    return {name: entry for name, entry in example.items() if name in accepted}


def _list_towers(config: Any) -> set[str]:
    return {name for name, fields in _TOWERS.items() if any(hasattr(config, field) for field in fields)}


def find_text_config(config: Any, *, decodes: bool = False) -> Any:
    """Return the part of a configuration that is about text; of two, the one that reads, or the one that decodes."""
    for sides in ({}, {"decoder": decodes, "encoder": not decodes}) if hasattr(config, "get_text_config") else ():
        with contextlib.suppress(ValueError):  # several parts are about text
            return config.get_text_config(**sides)
    return config


def _make_text(config: Any) -> Example:
    text = find_text_config(config)
    example = _make_tokens("input_ids", config, "sequence")
    values, spec = example["input_ids"]
    others = {"attention_mask": torch.ones_like(values)}
    if getattr(text, "type_vocab_size", 0) > 1:
        others["token_type_ids"] = torch.zeros_like(values)
    example |= {name: (value, spec.model_copy(update={"name": name})) for name, value in others.items()}
    boxes = _make_boxes(config, values.shape)
    dtype = str(boxes.dtype).removeprefix("torch.")
    return example | {"bbox": (boxes, TensorSpec(name="bbox", dtype=dtype, shape=(*spec.shape, 4)))}


def _repeat_text(text: Example) -> Example:
    """Make several texts of one, by turning it: [batch, choices, sequence]."""
    return {
        name: (
            torch.stack([values.roll(at, 1) for at in range(_CHOICES)], 1),
            spec.model_copy(update={"shape": (BATCH, "choices", *spec.shape[1:])}),
        )
        for name, (values, spec) in text.items()
    }


def _make_boxes(config: Any, shape: Sequence[int]) -> Tensor:
    """Make the boxes of a document's tokens: left, top, right, bottom, as numbers of pixels, or as shares of the page.

    A model that scales them itself takes shares.
    """
    if not hasattr(config, "bbox_scale"):
        return torch.zeros((*shape, 4), dtype=torch.int64)
    corners = torch.rand((*shape, 2, 2), generator=torch.Generator().manual_seed(0))
    return corners.sort(-2).values.flatten(-2)


def _make_tokens(name: str, config: Any, dimension: str) -> Example:
    """Draw tokens; the one that ends a text, where there is one, is at the same places in each row.

    Heads that judge by it need as many in each row, in texts that are cut, too: it comes first, and at the end of half.

    Raises:
        ValueError: each sample has several rows of them, one for each of a codec's books.
    """
    decodes = name == "decoder_input_ids"
    text = find_text_config(config, decodes=decodes)
    if decodes and hasattr(text, "num_codebooks"):
        raise ValueError("a number of rows for each sample cannot be described")
    most = getattr(text, "max_target_positions" if decodes else "max_position_embeddings", None) or _SEQUENCE
    length, generator = min(_SEQUENCE, most) if most > 0 else _SEQUENCE, torch.Generator().manual_seed(int(decodes))
    values = torch.randint(0, text.vocab_size, (_ROWS, length), generator=generator)
    end = getattr(text, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < text.vocab_size:
        values[values == end] = (end + 1) % text.vocab_size
        values[:, [0, length // 2 - 1]] = end
    return {name: (values, TensorSpec(name=name, dtype="int64", shape=(BATCH, dimension)))}


def _make_pictures(config: Any) -> Example:
    """Make pictures, or videos of as many as the configuration names: its ``num_frames``."""
    size = _find_field(config, "image_size", _PIXELS)
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    frames = _find_field(config, "num_frames", None)
    shape = (_find_field(config, "num_channels", _CHANNELS), height, width)
    return _draw("pixel_values", (BATCH, *([frames] if frames else []), *shape))


def _make_patches(config: Any) -> Example:
    """Make pictures that are cut into patches, with the mask of those that are there, and their rows and columns."""
    count, side = _find_field(config, "num_patches", 0), _find_field(config, "patch_size", 0)
    features, across = _find_field(config, "num_channels", _CHANNELS) * side * side, math.isqrt(count)
    mask = torch.ones((_ROWS, count), dtype=torch.int64)
    shapes = torch.full((_ROWS, 2), across)
    return _draw("pixel_values", (BATCH, count, features)) | {
        name: (values, TensorSpec(name=name, dtype="int64", shape=(BATCH, values.shape[1])))
        for name, values in (("pixel_attention_mask", mask), ("spatial_shapes", shapes))
    }


def _find_field(config: Any, name: str, default: Any) -> Any:
    return next((value for part in _list_parts(config) if (value := getattr(part, name, None))), default)


def _list_parts(config: Any) -> Iterator[Any]:
    """List the configurations in which the sizes of pictures may stand, the nearest first."""
    if hasattr(config, "vision_config"):
        yield from _list_parts(config.vision_config)
    yield config
    for name in _PARTS:
        if getattr(config, name, None) is not None:
            yield from _list_parts(getattr(config, name))


def _make_sound(config: Any, name: str) -> Example:
    """Make a second of sound at 16 kHz, or as many frames of a spectrogram as the model takes."""
    bands = getattr(config, "num_mel_bins", None)
    if name == "input_features" and bands and hasattr(config, "max_source_positions"):
        return _draw(name, (BATCH, bands, 2 * config.max_source_positions))  # two convolutions halve it, as in Whisper
    if name == "input_features" and bands and hasattr(config, "spec_size"):
        return _make_square_sound(config, name)
    if name == "input_features" and hasattr(config, "feature_projection_input_dim"):
        return _draw(name, (BATCH, "time", config.feature_projection_input_dim))
    if name == "input_values" and bands and hasattr(config, "frequency_stride"):
        return _draw(name, (BATCH, config.max_length, bands))
    if name == "input_values" and hasattr(config, "conv_stride"):
        return _draw(name, (BATCH, "time"))
    return {}


def _make_square_sound(config: Any, name: str) -> Example:
    """Make a spectrogram that is folded into a square, as in CLAP: four of them where parts of a sound are fused."""
    frames, fused = config.spec_size * (config.spec_size // config.num_mel_bins), config.enable_fusion
    example = _draw(name, (BATCH, 4 if fused else 1, frames, config.num_mel_bins))
    longer = torch.tensor([[True], [False]]), TensorSpec(name="is_longer", dtype="bool", shape=(BATCH, 1))
    return example | ({"is_longer": longer} if fused else {})


def _draw(name: str, shape: tuple[int | str, ...]) -> Example:
    time = _SAMPLES if len(shape) == len((BATCH, "time")) else 2 * _SEQUENCE
    sizes = [{BATCH: _ROWS, "time": time}[dim] if isinstance(dim, str) else dim for dim in shape]
    values = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    return {name: (values, TensorSpec(name=name, dtype="float32", shape=shape))}
