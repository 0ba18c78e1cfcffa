"""Options of reading data, where the data alone does not tell: how images and texts become arrays."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from enginesmith.pipeline.units import COMMA_LIST, Heading, Option

_DATA: Heading = "Data and accuracy"


class DataOptions(BaseModel, frozen=True, extra="forbid"):
    """Options that are left out are taken from beside the data, the model's inputs, or a default that is reported."""

    resize: Annotated[int | tuple[int, int] | None, Option(_DATA, metavar="N|H,W")] = Field(
        None, description="images: the shorter side in pixels, or [height, width] exactly"
    )
    crop: Annotated[int | tuple[int, int] | None, Option(_DATA, metavar="N|H,W")] = Field(
        None, description="images: size of the center to keep after resizing, in pixels or [height, width]"
    )
    rescale: float | None = Field(
        None,
        gt=0,
        description="images: factor for pixels of 0 to 255; 1/255 by default, or 1 where --prepend has scale",
    )
    mean: Annotated[tuple[float, ...] | None, COMMA_LIST, Option(_DATA, metavar="X,X,X")] = Field(
        None, description="images: mean to subtract after rescaling, one number or one per channel"
    )
    std: Annotated[tuple[float, ...] | None, COMMA_LIST, Option(_DATA, metavar="X,X,X")] = Field(
        None, description="images: divisor after subtracting the mean, one number or one per channel"
    )
    tokenizer: Annotated[str | None, Option(_DATA, metavar="PATH")] = Field(
        None, description="texts: a tokenizer.json, or a Hugging Face folder; by default the one beside the texts"
    )
    text_field: Annotated[str, Option(_DATA, metavar="KEY")] = Field(
        "text", description="texts: key of the text in each line"
    )
    labels: Annotated[str | None, Option(_DATA, everyday=True, metavar="KEY")] = Field(
        None,
        min_length=1,
        description="key of the labels, or A,B for several; by default labels, in texts label",
    )
    max_length: Annotated[int | None, Option(_DATA)] = Field(
        None,
        gt=0,
        description="texts: tokens in each row, if the model's own length is dynamic; by default the longest text",
    )
    padding: Literal["right", "left"] | None = Field(
        None, description="texts: the side that short ones are padded on; by default the tokenizer's"
    )
    most_rows: int = Field(65_536, gt=0, description="functions: largest number of rows to read")

    @property
    def label_keys(self) -> tuple[str, ...]:
        """The keys of the labels; empty where none is named."""
        return tuple(filter(None, map(str.strip, (self.labels or "").split(","))))

    @field_validator("resize", "crop", mode="before")
    @classmethod
    def _split_sides(cls, value: Any) -> Any:
        """Read ``224,256`` as height and width."""
        return value.split(",") if isinstance(value, str) and "," in value else value

    @model_validator(mode="after")
    def _sound(self) -> "DataOptions":
        sides = [
            side for value in (self.resize, self.crop) for side in ((value,) if isinstance(value, int) else value or ())
        ]
        if any(side < 1 for side in sides):
            raise ValueError("resize and crop are positive numbers of pixels")
        if self.std is not None and 0 in self.std:
            raise ValueError("std is divided by, so it cannot be 0")
        return self


AS_FOUND = DataOptions()


PartName = Literal["calibration", "choice", "judgement"]
PARTS: tuple[PartName, ...] = ("calibration", "choice", "judgement")


class PartOptions(DataOptions):
    """Options of reading one part of data that several parts share; no row is in two of them."""

    part: PartName
    shared_by: tuple[PartName, ...] = PARTS
    calibration_samples: int | None = None
    """Most samples that calibration gets; None where training wants all that it can get."""
