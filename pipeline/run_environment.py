"""The environment within a run: facts for people, some of which are read again and have to be of their type."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ValidationError

from enginesmith.pipeline import documents


class _Read(BaseModel):
    """What is taken from it again, as ``measure/device.py`` wrote it."""

    processor: str | None = None
    usable_cores: int | None = None
    python: str | None = None
    packages: dict[str, str] = {}
    thread_variables: dict[str, str] = {}
    gpus: tuple[dict[str, Any], ...] | None = None
    warnings: tuple[str, ...] = ()


def _hold_types(value: dict[str, Any]) -> dict[str, Any]:
    try:
        _Read.model_validate(value)
    except ValidationError as error:
        raise ValueError(documents.first(error)) from error
    return value


RunEnvironment = Annotated[dict[str, Any], AfterValidator(_hold_types)]
