"""Define the JSON document of a calibration: ranges of the values in a graph, by every method at once."""

from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ValidationError

from enginesmith.pipeline.errors import DataError

FILE = "ranges.json"
Method = Literal["minmax", "percentile", "entropy", "mse"]
METHODS: tuple[Method, ...] = get_args(Method)


class Provenance(BaseModel, frozen=True, extra="forbid"):
    """Identity of samples and their data, so that others can take the same ones."""

    data: str
    digest: str
    """SHA-256 of the whole set."""
    rows: tuple[int, ...]
    """Indices of the samples that were used."""
    seed: int
    batch: int
    """Samples that were run at once; more than one only where the graph has a fixed batch."""
    synthetic: bool = False


class TensorRange(BaseModel, frozen=True, extra="forbid"):
    """One value over all samples."""

    minimum: float
    maximum: float
    """Largest of the finite values, as ``minimum`` is their smallest."""
    finite: bool = True
    """All values are finite; others may be meant, as the -inf of an attention mask is."""
    count: int
    amax: dict[Method, float] | None = None
    """Largest magnitude that int8 has to represent, by method; None for values that are only watched."""


class ChannelStatistics(BaseModel, frozen=True, extra="forbid"):
    """One value along its channel axis: what scaling and bias correction need."""

    axis: int
    amax: tuple[float, ...]
    middle: tuple[float, ...]
    """Half of the sum of the smallest and the largest number: none is further from it than ``amax`` less its size."""
    mean: tuple[float, ...]
    mean_absolute: tuple[float, ...]
    mean_square: tuple[float, ...]


class Ranges(BaseModel, frozen=True, extra="forbid"):
    """The whole document; every number in it is rounded to nine significant digits, which float32 survives."""

    model_sha256: str
    provenance: Provenance
    tensors: dict[str, TensorRange]
    channels: dict[str, ChannelStatistics] = {}


def load(path: Path, *, model_sha256: str) -> Ranges:
    """Read ranges of a model, and check that they are of it.

    Raises:
        DataError: the file is no such document, or is of another model.
    """
    try:
        ranges = Ranges.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read the ranges in {path}: {error.strerror}", f"give a {FILE}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise DataError(f"{path} does not hold ranges: {where}: {first['msg']}", "calibrate again") from error
    if ranges.model_sha256 != model_sha256:
        raise DataError(
            f"the ranges in {path} are of another model ({ranges.model_sha256[:12]}…), and the model here is "
            f"{model_sha256[:12]}…",
            "calibrate again: ranges hold for one graph and one set of data alone",
        )
    return ranges
