"""The fleet file: models, targets, and what recipe each pair of them gets."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from enginesmith.pipeline import recipe as recipes
from enginesmith.pipeline.errors import SourceError, UsageError
from enginesmith.pipeline.fleet.layers import merged
from enginesmith.pipeline.fleet.naming import Pair, chosen, hold_distinct, hold_name, hold_once, unknown
from enginesmith.pipeline.fleet.wording import remedy_of
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.steps import Place

_SEE = "docs/scale.md shows one"
_UNKNOWN = ("extra_forbidden", "invalid_key")
"""What pydantic calls a key that does not belong there."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Target(_Part):
    """A kind of machine that engines are made for."""

    device: str | None = Field(None, description="cpu, cuda or cuda:1, as in a recipe")
    accelerator: str = Field("", description="the GPU, as Ray names accelerator types: H100, L4 …; it implies cuda")
    resources: dict[str, float] = Field({}, description="what a node of a Ray cluster has to have declared")
    recipe: dict[str, Any] = Field({}, description="fields of the recipe that are others for this target")

    @field_validator("resources")
    @classmethod
    def _some_of_each(cls, value: dict[str, float]) -> dict[str, float]:
        if none := next((name for name, amount in value.items() if not amount > 0), None):
            raise ValueError(f"of {none} more than 0 is needed, or it is left away")
        return value


class Model(_Part):
    """A model of the fleet."""

    model: str = Field("", description="MODEL, as on the command line; the name that it has in the fleet without it")
    recipe: dict[str, Any] = Field({}, description="fields of the recipe that are others for this model")
    targets: tuple[str, ...] | None = Field(None, description="the targets that it is for; all without it")


@dataclass(frozen=True)
class Entry:
    """One model for one target."""

    name: str
    """``digits@h100``, with nothing in it that the name of a folder may not have."""
    model_name: str
    target_name: str
    recipe: Recipe
    place: Place


class Fleet(_Part):
    """The whole file."""

    recipe: dict[str, Any] = Field({}, description="fields of the recipe that all entries share")
    models: dict[str, Model] = Field(min_length=1, description="by name")
    targets: dict[str, Target] = Field({"here": Target()}, min_length=1, description="by name; this machine without it")
    overrides: dict[str, dict[str, Any]] = Field(
        {}, description="by model@target, fields of the recipe that are others for this pair alone"
    )
    skip: tuple[str, ...] = Field((), description="pairs to leave out, or patterns: detector@edge, *@edge")

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Models for their targets, without those to leave out.

        Raises:
            UsageError: a name in ``skip``, ``overrides`` or ``targets`` is not there; two pairs share a folder.
        """
        every = tuple(Pair(model, target) for model in self.models for target in self.targets)
        hold_distinct(every)
        skipped = chosen(every, self.skip, "skip")
        for name in self.overrides:
            if name not in map(str, every):
                raise unknown("overrides", name, map(str, every), "entry")
        for name, model in self.models.items():
            for target in model.targets or ():
                if target not in self.targets:
                    raise unknown(f"models.{name}.targets", target, self.targets, "target")
        return tuple(one for one in every if one not in skipped and self._wanted(one))

    def _wanted(self, pair: Pair) -> bool:
        asked = self.models[pair.model].targets
        return asked is None or pair.target in asked

    def entries(self, only: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> tuple[Entry, ...]:
        """Every pair with its recipe, or those that the patterns name; ``options`` are fields that all of them get.

        Raises:
            UsageError: a name that is not there, a recipe that makes no sense, or nothing is left.
        """
        pairs = self.pairs
        pairs = chosen(pairs, only, "--only") if only and pairs else pairs
        if not pairs:
            raise UsageError("nothing is left of the fleet: every entry is skipped", "skip fewer of them")
        return tuple(self._entry(pair, options or {}) for pair in pairs)

    def _entry(self, pair: Pair, options: Mapping[str, Any]) -> Entry:
        model, target = self.models[pair.model], self.targets[pair.target]
        own: dict[str, Any] = {"device": _device(target)} if _device(target) else {}
        layers = (self.recipe, own, target.recipe, model.recipe, self.overrides.get(str(pair), {}), options)
        values = {**merged(*layers), "model": model.model or pair.model}
        try:
            recipe = _made(values)
            place = _place(target, recipe)
        except UsageError as error:
            raise type(error)(f"{pair}: {error.message}", remedy_of(error)) from error
        return Entry(pair.folder, pair.model, pair.target, recipe, place)


def read(path: Path) -> Fleet:
    """Read a fleet file.

    Raises:
        UsageError: it cannot be read, or does not make sense by itself.
    """
    return make(recipes.read(path, "fleet file", _SEE))


def make(values: dict[str, Any]) -> Fleet:
    """A fleet from plain values.

    Raises:
        UsageError: a key or a value that does not belong there, in recipes, too.
    """
    try:
        fleet = Fleet.model_validate(_plain(values))
    except ValidationError as error:
        raise _misfit(error) from error
    for place, layer in _layers(fleet):
        if "model" in layer:
            raise UsageError(f"{place} names a model", "models are named below `models:`; recipes have all but that")
        try:
            recipes.parsed({**merged(layer), "model": "of the fleet"})
        except UsageError as error:
            raise UsageError(f"{place}: {error.message}", error.remedy) from error
    for name, model in fleet.models.items():
        hold_name("models", name, is_model=not model.model)
        hold_once(f"models.{name}.targets", model.targets or ())
    for name, target in fleet.targets.items():
        hold_name("targets", name)
        _hold_device(f"targets.{name}", target)
    _ = fleet.pairs  # raises its own messages
    return fleet


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """With models as a list of names taken for a mapping, and whatever is left empty for nothing."""
    found = {name: value for name, value in values.items() if value is not None}
    for part in ("models", "targets", "overrides"):
        inner = found.get(part)
        if isinstance(inner, list) and part != "overrides" and all(isinstance(one, str) for one in inner):
            hold_once(part, inner)
            inner = dict.fromkeys(inner)
        if isinstance(inner, dict):
            found[part] = {name: {} if value is None else value for name, value in inner.items()}
    for part in ("models", "targets"):
        if isinstance(inner := found.get(part), dict):
            found[part] = {name: _without_nulls(value) for name, value in inner.items()}
    return found


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: inner for name, inner in value.items() if inner is not None}


def _layers(fleet: Fleet) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "recipe", fleet.recipe
    for name, target in fleet.targets.items():
        yield f"targets.{name}.recipe", target.recipe
    for name, model in fleet.models.items():
        yield f"models.{name}.recipe", model.recipe
    for name, layer in fleet.overrides.items():
        yield f"overrides.{name}", layer


def _hold_device(where: str, target: Target) -> None:
    if target.device and "device" in target.recipe:
        raise UsageError(f"{where} says twice what its device is", "say it once")
    if target.accelerator and target.device and not target.device.startswith("cuda"):
        raise UsageError(
            f"{where} has the accelerator {target.accelerator}, and its device is {target.device}",
            "leave the device away: an accelerator implies cuda",
        )
    if target.device:
        try:
            recipes.parsed({"model": "of the fleet", "device": target.device})
        except UsageError as error:
            raise UsageError(f"{where}: {error.message}", error.remedy) from error


def _device(target: Target) -> str | None:
    return target.device or ("cuda" if target.accelerator and "device" not in target.recipe else None)


def _made(values: dict[str, Any]) -> Recipe:
    """The recipe; where there is no such model, that is said when it is its turn, and the others have theirs."""
    try:
        return recipes.make(values)
    except SourceError:
        return recipes.parsed(values)


def _place(target: Target, recipe: Recipe) -> Place:
    device = recipe.where.kind
    if target.accelerator and device != "cuda":
        raise UsageError(
            f"the target has the accelerator {target.accelerator}, and the recipe's device is {device}",
            "leave the device to the target",
        )
    return Place(device, target.accelerator, tuple(sorted(target.resources.items())))


def _misfit(error: ValidationError) -> UsageError:
    """What is wrong with the file, in its own words."""
    found = error.errors()  # what is missing may be there by a name that is not known
    first = next((one for one in found if one["type"] in _UNKNOWN), found[0])
    place = [str(one) for one in first["loc"]]
    if first["type"] in _UNKNOWN:
        parts: dict[str, type[BaseModel]] = {"models": Model, "targets": Target}
        part = parts.get(place[0], Fleet) if place[1:] else Fleet
        where = f" in {'.'.join(place[:-1])}" if place[1:] else ""
        near = difflib.get_close_matches(place[-1], part.model_fields, n=1)
        said = f"the fleet file has no field {place[-1]!r}{where}" + (f"; did you mean {near[0]}?" if near else "")
        return UsageError(said, f"the fields are {', '.join(part.model_fields)}")
    if first["type"] in ("missing", "too_short"):
        return UsageError(f"the fleet file has no {place[-1]}", _SEE)
    if place[-1] == "[key]":
        return UsageError(
            f"{place[0]}: the name {first['input']!r} is no text", f'put it in quotes: "{first["input"]}"'
        )
    return UsageError(f"{'.'.join(place)}: {recipes.plain_words(first['msg'])} (given: {first['input']!r})", _SEE)
