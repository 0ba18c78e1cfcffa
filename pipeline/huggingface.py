"""Hugging Face models: which class a configuration names, and example inputs that fit it. Runs in a worker only."""

import inspect
from typing import TYPE_CHECKING, Any

from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.tensors import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

_SEQUENCE = 32
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids")


def load(transformers: Any, target: str) -> "nn.Module":
    """The model of a hub name (``org/name@revision``) or folder, as the class its configuration names.

    Weights are read from safetensors, or from what ``torch.load(weights_only=True)`` accepts; code that comes with
    a model is never run.
    """
    name, _, revision = target.partition("@")
    options = {"revision": revision} if revision else {}
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
    config.use_cache = False
    class_name = (config.architectures or [""])[0]
    model_class = getattr(transformers, class_name, transformers.AutoModel)
    model: nn.Module = model_class.from_pretrained(name, config=config, dtype="float32", **options)
    return model


def example(module: "nn.Module") -> tuple[dict[str, "Tensor"], tuple[TensorSpec, ...]]:
    """Example inputs of a Hugging Face model, and their specifications.

    Raises:
        SourceError: its main input is neither text nor an image.
    """
    import torch

    config: Any = module.config
    accepted = inspect.signature(module.forward).parameters
    main = getattr(module, "main_input_name", "input_ids")
    generator = torch.Generator().manual_seed(0)
    if main == "pixel_values":
        return _image(config, generator)
    if main != "input_ids":
        raise SourceError(
            f"the model's main input is {main!r}, and no example is known for it",
            "wrap it: a file.py with a factory that returns (module, example_inputs)",
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    length = min(_SEQUENCE, getattr(text, "max_position_embeddings", _SEQUENCE) or _SEQUENCE)
    wanted = ["input_ids", "attention_mask"]
    wanted += ["token_type_ids"] if "token_type_ids" in accepted and getattr(text, "type_vocab_size", 0) > 1 else []
    wanted += ["decoder_input_ids"] if getattr(config, "is_encoder_decoder", False) else []
    shape = (2, length)
    values = {
        "input_ids": torch.randint(0, text.vocab_size, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
        "token_type_ids": torch.zeros(shape, dtype=torch.int64),
        "decoder_input_ids": torch.randint(0, text.vocab_size, shape, generator=generator),
    }
    dims = {name: ("batch", "decoder_sequence" if name.startswith("decoder") else "sequence") for name in _TEXT}
    chosen = [name for name in wanted if name in accepted]
    specs = tuple(TensorSpec(name=name, dtype="int64", shape=dims[name]) for name in chosen)
    return {name: values[name] for name in chosen}, specs


def _image(config: Any, generator: Any) -> tuple[dict[str, "Tensor"], tuple[TensorSpec, ...]]:
    import torch

    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    channels = getattr(vision, "num_channels", 3)
    pixels = torch.randn((2, channels, height, width), generator=generator)
    spec = TensorSpec(name="pixel_values", dtype="float32", shape=("batch", channels, height, width))
    return {"pixel_values": pixels}, (spec,)
