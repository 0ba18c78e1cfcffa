"""The zoo: networks to optimize out of the box, one family per file."""

from collections.abc import Mapping
from dataclasses import dataclass

from enginesmith.pipeline.tensors import TensorSpec


@dataclass(frozen=True)
class ModelEntry:
    """Facts about a model that are known before it is built.

    ``flops`` are of one sample, a multiply-add counted as two. ``data`` names an embedded data set that fits.
    """

    factory: str
    summary: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: int
    flops: int
    data: str | None = None

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The inputs as specifications, in the order of ``forward``."""
        return tuple(TensorSpec.parse(text) for text in self.inputs)


MODELS: Mapping[str, ModelEntry] = {
    "digits": ModelEntry(
        factory="enginesmith.models.digits:digits",
        summary="handwritten digits of 8×8 pixels; trained, with its data",
        inputs=("image:float32:batch,1,8,8",),
        outputs=("logits",),
        parameters=174_970,
        flops=3_296_512,
        data="digits",
    ),
    "resnet18": ModelEntry(
        factory="enginesmith.models.resnet:resnet18",
        summary="image classification, 18 layers",
        inputs=("image:float32:batch,3,224,224",),
        outputs=("logits",),
        parameters=11_689_512,
        flops=3_628_146_688,
    ),
    "resnet50": ModelEntry(
        factory="enginesmith.models.resnet:resnet50",
        summary="image classification, 50 layers (v1.5)",
        inputs=("image:float32:batch,3,224,224",),
        outputs=("logits",),
        parameters=25_557_032,
        flops=8_178_368_512,
    ),
    "mobilenet_v2": ModelEntry(
        factory="enginesmith.models.mobilenet:mobilenet_v2",
        summary="image classification with depthwise convolutions",
        inputs=("image:float32:batch,3,224,224",),
        outputs=("logits",),
        parameters=3_504_872,
        flops=601_548_544,
    ),
    "vit_b16": ModelEntry(
        factory="enginesmith.models.vit:vit_b16",
        summary="image classification by a transformer over 16×16 patches",
        inputs=("image:float32:batch,3,224,224",),
        outputs=("logits",),
        parameters=86_567_656,
        flops=35_127_656_448,
    ),
    "bert_base": ModelEntry(
        factory="enginesmith.models.bert:bert_base",
        summary="text encoder with attention masks, up to 512 tokens",
        inputs=(
            "input_ids:int64:batch,sequence",
            "attention_mask:int64:batch,sequence",
            "token_type_ids:int64:batch,sequence",
        ),
        outputs=("last_hidden_state", "pooler_output"),
        parameters=109_482_240,
        flops=22_348_431_360,
    ),
    "unet": ModelEntry(
        factory="enginesmith.models.unet:unet",
        summary="segmentation of 256×256 images, four levels",
        inputs=("image:float32:batch,3,256,256",),
        outputs=("mask",),
        parameters=7_763_041,
        flops=24_142_413_824,
    ),
    "lstm": ModelEntry(
        factory="enginesmith.models.lstm:lstm",
        summary="classification of 100 feature frames by a bidirectional LSTM",
        inputs=("features:float32:batch,100,80",),
        outputs=("logits",),
        parameters=2_287_139,
        flops=452_234_240,
    ),
}
