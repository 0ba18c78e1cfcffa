"""What people may ask of recovery; light, as the command line and recipes import it."""

import difflib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from enginesmith.calibration.user_code import is_reference

METHODS = ("distil", "supervised")


class RecoverOptions(BaseModel):
    """How a pruned model is trained back; the dense model is its teacher."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str = Field(
        "distil",
        description="distil learns from the dense model, without labels; supervised from labels; module:function is "
        "called with (student, teacher, batch) and returns the loss",
    )
    seconds: float = Field(120.0, gt=0, description="time for it; the steps are planned to fit")
    epochs: int | None = Field(
        None, ge=1, description="most passes over the data; as many as there is time for if null"
    )
    batch: int = Field(64, ge=1, description="samples in each step of the optimiser")
    learning_rate: float = Field(2e-3, gt=0, description="the highest, after the warm-up; a cosine leads down from it")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's; norms and biases have none")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of the steps in which the learning rate goes up")
    temperature: float = Field(2.0, gt=0, description="of the softmax that distilled classes are compared by")
    features: bool = Field(True, description="whether distilling compares values inside of the models too")
    ema: float = Field(0.99, ge=0, lt=1, description="decay of the moving average of weights that is kept; 0 for none")
    evaluations: int = Field(20, ge=1, description="how often the metric is looked at, if that takes little time")
    patience: int = Field(10, ge=1, description="evaluations without a better one after which it stops")
    held_back: float = Field(0.2, gt=0, lt=1, description="share of the samples that only the metric sees")
    memory_bytes: int | None = Field(
        None, gt=0, description="what recovery may take; batches are worked through in parts that fit"
    )
    autocast: Literal["auto", "bf16", "off"] = Field(
        "auto", description="bfloat16 products while training; auto means where a GPU has them"
    )
    processes: int | None = Field(
        None, ge=1, description="processes that share each batch; one for each visible GPU, and one on the CPU, if null"
    )
    checkpoint_seconds: float = Field(20.0, ge=0, description="time between checkpoints; the result is the same")

    @field_validator("method")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in METHODS or is_reference(value):
            return value
        near = difflib.get_close_matches(value, METHODS, n=1)
        raise ValueError(
            f"there is no method {value!r}{f'; did you mean {near[0]}?' if near else ''}; "
            f"use {', '.join(METHODS)}, module:function or file.py:function"
        )
