"""Hugging Face models: the class that a configuration names, with all of its weights, and inputs that fit it."""

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.tensors import TensorSpec

Example = dict[str, tuple[Tensor, TensorSpec]]
"""By name of the input."""

_ROWS, _SEQUENCE, _SAMPLES, _PIXELS = 2, 32, 16_000, 224
_LISTED = 5
_READS_TEXT_ITSELF = ("ForSequenceClassification", "ForQuestionAnswering")
"""Ends of the names of classes whose decoder, if there is one, reads the text that the encoder reads."""
_FACTORY = "a file.py with a factory that returns (module, example_inputs)"
_NOT_GIVEN = {
    *("position_ids", "decoder_position_ids", "decoder_attention_mask", "head_mask", "logits_to_keep"),
    *("encoder_outputs", "encoder_hidden_states", "encoder_attention_mask", "future_values", "mems", "cache"),
}
"""Inputs that are made from others, or that are for training and decoding."""
_NOT_GIVEN_ENDS = ("labels", "embeds", "embeddings", "_positions")


def load_model(transformers: Any, target: str) -> tuple[nn.Module, list[str], list[str]]:
    """Load the model of a hub name (``org/name@revision``) or folder, as the class its configuration names.

    Weights are read from safetensors, or from what ``torch.load(weights_only=True)`` accepts; code that comes with
    a model is never run. Returns also the names of weights that are drawn at random, as no file holds them; and notes.

    Raises:
        SourceError: the library has no such class.
    """
    name, _, revision = target.partition("@")
    options = {"revision": revision} if revision else {}
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
    config.use_cache = False
    notes, named = list[str](), (getattr(config, "architectures", None) or [""])[0]
    if not named:
        notes.append("its config.json names no class (architectures): AutoModel was taken, which has no head")
    model_class = getattr(transformers, named or "AutoModel", None)
    if model_class is None:
        own = hasattr(config, "auto_map")
        raise SourceError(
            f"its config.json names the class {named}, which transformers {transformers.__version__} does not have",
            f"code that comes with a model is not run: write {_FACTORY}"
            if own
            else f"install a version of transformers that has it, or write {_FACTORY}",
        )
    module, report = model_class.from_pretrained(
        name, config=config, dtype="float32", output_loading_info=True, **options
    )
    if surplus := sorted(report["unexpected_keys"]):
        notes.append(f"weights that {type(module).__name__} does not have were left out: {_list_names(surplus)}")
    notes += describe_tags(name_classes(config)) if named.endswith("ForTokenClassification") else []
    return module, sorted(report["missing_keys"]), notes


def name_classes(config: Any) -> tuple[str, ...]:
    """Name the classes by number, as a configuration's id2label does; empty where that is LABEL_0, LABEL_1, …."""
    names = {int(number): str(name) for number, name in (getattr(config, "id2label", None) or {}).items()}
    by_number = tuple(names.get(number, "") for number in range(len(names)))
    chosen = all(by_number) and by_number != tuple(f"LABEL_{number}" for number in range(len(names)))
    return by_number if chosen else ()


def describe_tags(tags: Sequence[str]) -> list[str]:
    """Describe that tags of entities, by number, are in another order than the metric of entities takes them to be."""
    if not tags or not all(tag == "O" or tag[:2] in ("B-", "I-") for tag in tags):
        return []
    types = [tag[2:] for tag in tags[1::2]]
    if [*tags] == ["O", *(f"{place}-{name}" for name in types for place in "BI")]:
        return []
    return [
        f"its tags are {', '.join(tags)}, and --metric entity_f1 reads their numbers as O, and B and I of each type by "
        "turns: put outputs and labels into that order, or write a metric of your own"
    ]


def check_missing(module: nn.Module, example: Mapping[str, Tensor], missing: Collection[str]) -> list[str]:
    """Check that no output depends on weights that no file holds; return a note on those that are there for training.

    They are set to other numbers, and the answers to the example are compared.

    Raises:
        SourceError: an output changes, or the model does not run on the example.
    """
    stored = module.state_dict(keep_vars=True)
    drawn = [stored[name] for name in missing if name in stored and stored[name].is_floating_point()]
    if not drawn:
        return []
    named, changed = f"{type(module).__name__}: {_list_names(sorted(missing))}", ["the answers"]
    copies = [value.detach().clone() for value in drawn]
    with contextlib.suppress(Exception), torch.no_grad():  # it may not run without inputs that only the user knows
        before = _answer(module, example)
        try:
            for value in drawn:
                value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(0)))
            after = _answer(module, example)
        finally:
            for value, old in zip(drawn, copies, strict=True):
                value.copy_(old)
        changed = [key for key in before if not all(map(torch.equal, before[key], after[key]))]
    if changed:
        raise SourceError(
            f"no file holds these weights of {named}; they are drawn at random, and so would be {', '.join(changed)}",
            "give a folder with all weights of the class that its config.json names (architectures), name another "
            f"class there, or write {_FACTORY}",
        )
    return [f"no file holds these weights of {named}; no output depends on them"]


def _answer(module: nn.Module, example: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    leaves = {name: _pytree.tree_leaves(value) for name, value in module(**example).items()}
    return {name: [leaf for leaf in parts if isinstance(leaf, Tensor)] for name, parts in leaves.items()}


def make_example(module: nn.Module) -> Example:
    """Make example inputs: text, pictures, both for models of two towers, sound, series; empty where none are known."""
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):  # a configuration of another form
        return _make_example(module)
    return {}


def _make_example(module: nn.Module) -> Example:
    config: Any = module.config
    accepted = inspect.signature(module.forward).parameters
    required = {name for name, value in accepted.items() if _is_required(value)}
    required |= accepted.keys() & _list_main_inputs(module)
    towers = hasattr(config, "vision_config") and not any(
        hasattr(config, name) for name in ("image_token_id", "image_token_index")
    )
    example: Example = {}
    if "input_ids" in required:
        example |= _make_text(config)
    if "pixel_values" in required or (towers and example):
        example |= _make_pictures(config)
    for sound in required & {"input_values", "input_features"}:
        example |= _make_sound(config, sound)
    if "past_values" in required:
        example |= _draw("past_values", ("batch", config.context_length, config.num_input_channels))
    if not required or not required <= example.keys():
        return {}
    decodes = getattr(config, "is_encoder_decoder", False) and not type(module).__name__.endswith(_READS_TEXT_ITSELF)
    if decodes and "decoder_input_ids" in accepted:
        example |= _make_tokens("decoder_input_ids", config, "decoder_sequence")
    return {name: entry for name, entry in example.items() if name in accepted}


def list_inputs(module: nn.Module) -> Iterator[str]:
    """List the tensors that the model takes beside those for training and those that are made from others."""
    by_pictures = _list_main_inputs(module) >= {"pixel_values"}  # of which none is longer than another
    left_out = _NOT_GIVEN | ({"attention_mask"} if by_pictures else set())
    for name, value in inspect.signature(module.forward).parameters.items():
        unknown = _is_required(value) and value.annotation is inspect.Parameter.empty
        is_made = name in left_out or name.endswith(_NOT_GIVEN_ENDS)
        if ("Tensor" in str(value.annotation) or unknown) and not is_made:
            yield name


def _list_main_inputs(module: nn.Module) -> set[str]:
    names = getattr(module, "main_input_name", "input_ids")
    return {names} if isinstance(names, str) else {*names}


def _is_required(parameter: inspect.Parameter) -> bool:
    is_one = parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return is_one and parameter.default is inspect.Parameter.empty


def check_callable(module: nn.Module) -> None:
    """Check that a model can be called: some are only for ``generate``, which calls their parts in turn.

    Raises:
        SourceError: it cannot.
    """
    if type(module).forward is nn.Module.forward:
        parts = [name for name, part in module.named_children() if type(part).forward is not nn.Module.forward]
        raise SourceError(
            f"{type(module).__name__} has no forward, so that it cannot be called as a module",
            f"give one of its parts ({_list_names(parts)}) with its inputs: write {_FACTORY}",
        )


def advise(module: nn.Module) -> str:
    """Write what to do where a model does not run, if its configuration lacks what it needs; else nothing."""
    lacks = getattr(_text_config(module.config), "pad_token_id", None) is None
    if not (lacks and type(module).__name__.endswith("ForSequenceClassification")):
        return ""
    return (
        "without a pad_token_id, it takes one text at a time: set it in config.json, to the number of the token that "
        "fills up shorter texts; or fix the batch, with --input input_ids:int64:1,sequence"
    )


def explain_unknown(module: nn.Module) -> SourceError:
    """Say that no example is known for a model, and what may be given."""
    names = ", ".join(list_inputs(module))
    return SourceError(
        f"no example inputs are known for {type(module).__name__}, which takes {names}",
        f"give the inputs with --input name:dtype:batch,…, or write {_FACTORY}",
    )


def _make_text(config: Any) -> Example:
    text = _text_config(config)
    example = _make_tokens("input_ids", config, "sequence")
    values, spec = example["input_ids"]
    others = {"attention_mask": torch.ones_like(values)}
    if getattr(text, "type_vocab_size", 0) > 1:
        others["token_type_ids"] = torch.zeros_like(values)
    example |= {name: (value, spec.model_copy(update={"name": name})) for name, value in others.items()}
    boxes = torch.zeros((*values.shape, 4), dtype=torch.int64)  # left, top, right, bottom in documents' models
    return example | {"bbox": (boxes, TensorSpec(name="bbox", dtype="int64", shape=(*spec.shape, 4)))}


def _make_tokens(name: str, config: Any, dimension: str) -> Example:
    """Draw tokens; the one that ends a text, where there is one, is at the same places in each row.

    Heads that judge by it need as many in each row, in texts that are cut, too: it comes first, and at the end of half.
    """
    text, decodes = _text_config(config), name == "decoder_input_ids"
    most = getattr(text, "max_target_positions" if decodes else "max_position_embeddings", None) or _SEQUENCE
    length, generator = min(_SEQUENCE, most) if most > 0 else _SEQUENCE, torch.Generator().manual_seed(int(decodes))
    values = torch.randint(0, text.vocab_size, (_ROWS, length), generator=generator)
    end = getattr(text, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < text.vocab_size:
        values[values == end] = (end + 1) % text.vocab_size
        values[:, [0, length // 2 - 1]] = end
    return {name: (values, TensorSpec(name=name, dtype="int64", shape=("batch", dimension)))}


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _make_pictures(config: Any) -> Example:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or _PIXELS
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return _draw("pixel_values", ("batch", getattr(vision, "num_channels", 3), height, width))


def _make_sound(config: Any, name: str) -> Example:
    """Make a second of sound at 16 kHz, or as many frames of a spectrogram as the model takes."""
    bands = getattr(config, "num_mel_bins", None)
    if name == "input_features" and bands and hasattr(config, "max_source_positions"):
        return _draw(
            name, ("batch", bands, 2 * config.max_source_positions)
        )  # two convolutions halve it, as in Whisper
    if name == "input_features" and hasattr(config, "feature_projection_input_dim"):
        return _draw(name, ("batch", "time", config.feature_projection_input_dim))
    if name == "input_values" and bands and hasattr(config, "frequency_stride"):
        return _draw(name, ("batch", config.max_length, bands))
    if name == "input_values" and hasattr(config, "conv_stride"):
        return _draw(name, ("batch", "time"))
    return {}


def _draw(name: str, shape: tuple[int | str, ...]) -> Example:
    time = _SAMPLES if len(shape) == len(("batch", "time")) else 2 * _SEQUENCE
    sizes = [{"batch": _ROWS, "time": time}[dim] if isinstance(dim, str) else dim for dim in shape]
    values = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    return {name: (values, TensorSpec(name=name, dtype="float32", shape=shape))}


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
