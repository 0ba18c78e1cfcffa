"""Parse fleet files: many models for many targets, with a recipe for each pair."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from enginesmith.pipeline import recipe as recipes
from enginesmith.pipeline.errors import EnginesmithError, SourceError, UsageError
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.recipe.cli_options import fields_for
from enginesmith.pipeline.recipe.options import Part
from enginesmith.pipeline.units import name_some


@dataclass(frozen=True)
class Place:
    """Requirements of a target on the machines of its steps: the device, and what tells them from others."""

    device: str = "cpu"
    accelerator: str = ""
    """The GPU, as Ray names accelerator types: H100, L4, A10G …; any one without it."""
    resources: tuple[tuple[str, float], ...] = ()
    """Resources that a node of a Ray cluster has to have declared; another executor has none to ask for."""


_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST = 100
"""Characters of one of the two names in that of a folder."""
_MOST_NAMED = 12


@dataclass(frozen=True)
class Pair:
    """A model and a target, called as the fleet file calls them."""

    model: str
    target: str

    def __str__(self) -> str:
        return f"{self.model}@{self.target}"

    @property
    def folder(self) -> str:
        """The name that its run's folder has, which holds no separator whatever the model is called."""
        return f"{_to_folder_name(self.model)}@{_to_folder_name(self.target)}"

    def matches(self, pattern: str) -> bool:
        """Match a pattern against the pair, its folder, its model and its target."""
        names = (str(self), self.folder, self.model, self.target)
        return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def _to_folder_name(name: str) -> str:
    """Replace the characters of a name that a folder's name must not have."""
    return _UNSAFE.sub("-", name).strip("-.")[:_LONGEST] or "-"


def validate_name(where: str, name: str, *, is_model: bool = False) -> None:
    """Validate that a folder can have the name, too; ``is_model`` is for one that is MODEL itself, such as a path.

    Raises:
        UsageError: it has other characters, or ends or begins with one that is left out, or is too long.
    """
    plain = _to_folder_name(name)
    if name == plain or (is_model and "@" not in name):
        return
    near = plain if plain != "-" else "a"
    remedy = f"write {near!r}, say: letters, digits and . _ + - are taken, {_LONGEST} of them"
    raise UsageError(
        f"{where}: {name!r} can be no name: folders are called by it, and an entry is model@target",
        f"{remedy}; the model itself is given as `model: {name}` then" if is_model else remedy,
    )


def validate_unique(where: str, names: Sequence[str]) -> None:
    """Validate that a list has each name once.

    Raises:
        UsageError: it has one twice.
    """
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is None:
        return
    remedy = "omit one of them"
    if where == "models":
        remedy += ", or give the same model two names, each with its own recipe: "
        remedy += f"`{{one: {{model: {twice}}}, other: {{model: {twice}}}}}`"
    raise UsageError(f"{where} has {twice!r} twice", remedy)


def select_pairs(pairs: Sequence[Pair], patterns: Iterable[str], where: str) -> tuple[Pair, ...]:
    """Select the pairs that match any of the patterns.

    Raises:
        UsageError: a pattern names none; ``where`` says who gave it.
    """
    selected = set()
    for pattern in patterns:
        named = [pair for pair in pairs if pair.matches(pattern)]
        if not named:
            known = [name for pair in pairs for name in (pair.model, pair.target, str(pair))]
            raise unknown_name(where, pattern, known, "entry")
        selected.update(named)
    return tuple(pair for pair in pairs if pair in selected)


def unknown_name(where: str, name: str, known: Iterable[str], what: str) -> UsageError:
    """Make the error for an unknown name, with similar ones."""
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return UsageError(
        f"{where} names {name!r}, and the fleet has no such {what}{meant}",
        f"there are {name_some(names, _MOST_NAMED)}",
    )


def merge_layers(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers, later ones over earlier ones; null restores the recipe's default."""
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            before = result.get(name)
            if isinstance(value, Mapping):
                result[name] = merge_layers(before if isinstance(before, Mapping) else {}, value)
            elif value is None:
                result.pop(name, None)
            else:
                result[name] = value
    return result


def remedy_of(error: EnginesmithError) -> str:
    """Return the remedy of an error, with the fields of the fleet file that stand for the options in it."""
    fields = fields_for(str(error))
    if not fields:
        return error.remedy
    advice = f"an option is for all entries: in the fleet file, `recipe: {{{', '.join(fields)}}}` is for one model"
    return "; ".join(filter(None, [error.remedy, advice]))


_SEE = "a fleet file is, for example, `models: [digits, resnet18]`; it may also have targets and a recipe"
_UNKNOWN = ("extra_forbidden", "invalid_key")
"""Pydantic's words for a key that does not belong there."""


class _GivenPart(Part):
    """A part of a fleet file, in which a field that is left empty is not given."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: Any) -> Any:
        return (
            {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values
        )


class Target(_GivenPart):
    """A kind of machine that engines are made for."""

    device: str | None = Field(None, description="cpu, cuda or cuda:1, as in a recipe")
    accelerator: str = Field("", description="the GPU, as Ray names accelerator types: H100, L4 …; it implies cuda")
    resources: dict[str, float] = Field({}, description="what a node of a Ray cluster has to have declared")
    recipe: dict[str, Any] = Field({}, description="fields of the recipe that are others for this target")

    @field_validator("resources")
    @classmethod
    def _some_of_each(cls, value: dict[str, float]) -> dict[str, float]:
        if none := next((name for name, amount in value.items() if not amount > 0), None):
            raise ValueError(f"of {none} more than 0 is needed, or it is omitted")
        return value


class Model(_GivenPart):
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


class Fleet(_GivenPart):
    """The whole file."""

    recipe: dict[str, Any] = Field({}, description="fields of the recipe that all entries share")
    models: dict[str, Model] = Field(min_length=1, description="by name")
    targets: dict[str, Target] = Field({"here": Target()}, min_length=1, description="by name; this machine without it")
    overrides: dict[str, dict[str, Any]] = Field(
        {}, description="by model@target, fields of the recipe that are others for this pair alone"
    )
    skip: tuple[str, ...] = Field((), description="pairs to leave out, or patterns: detector@edge, *@edge")

    @field_validator("models", "targets", "overrides", mode="before")
    @classmethod
    def _name_parts(cls, value: Any, given: ValidationInfo) -> Any:
        """Turn a list of names into a mapping; a name alone has no fields."""
        where = str(given.field_name)
        if isinstance(value, list) and where != "overrides" and all(isinstance(name, str) for name in value):
            validate_unique(where, value)
            value = dict.fromkeys(value)
        if not isinstance(value, dict):
            return value
        return {name: {} if part is None else part for name, part in value.items()}

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Models for their targets, without those to leave out.

        Raises:
            UsageError: a name in ``skip``, ``overrides`` or ``targets`` is not there; two pairs share a folder.
        """
        every = tuple(Pair(model, target) for model in self.models for target in self.targets)
        taken: dict[str, Pair] = {}
        for pair in every:  # also where file systems ignore case
            other = taken.setdefault(pair.folder.casefold(), pair)
            if other != pair:
                raise UsageError(
                    f"{other} and {pair} would both have the folder {pair.folder}",
                    "give one of the models or targets another name; `model:` names the model then",
                )
        skipped = select_pairs(every, self.skip, "skip")
        for name in self.overrides:
            if name not in map(str, every):
                raise unknown_name("overrides", name, map(str, every), "entry")
        for name, model in self.models.items():
            for target in model.targets or ():
                if target not in self.targets:
                    raise unknown_name(f"models.{name}.targets", target, self.targets, "target")
        own_targets = {name: model.targets for name, model in self.models.items() if model.targets is not None}
        wanted = [entry for entry in every if entry.target in own_targets.get(entry.model, self.targets)]
        return tuple(entry for entry in wanted if entry not in skipped)

    def entries(self, only: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> tuple[Entry, ...]:
        """Return pairs with their recipes; ``only`` selects some, and ``options`` are fields for all of them.

        Raises:
            UsageError: a name that is not there, a recipe that makes no sense, or nothing is left.
        """
        pairs = self.pairs
        pairs = select_pairs(pairs, only, "--only") if only and pairs else pairs
        if not pairs:
            raise UsageError("nothing is left of the fleet: every entry is skipped", "skip fewer of them")
        return tuple(self._entry(pair, options or {}) for pair in pairs)

    def _entry(self, pair: Pair, options: Mapping[str, Any]) -> Entry:
        model, target = self.models[pair.model], self.targets[pair.target]
        device = target.device or ("cuda" if target.accelerator and "device" not in target.recipe else None)
        own = {"device": device} if device else {}
        layers = (self.recipe, own, target.recipe, model.recipe, self.overrides.get(str(pair), {}), options)
        values = {**merge_layers(*layers), "model": model.model or pair.model}
        try:
            try:
                recipe = recipes.make(values, options, listed=True).for_other_machines()
            except SourceError:  # an unknown model is reported when the entry runs, so that others run
                recipe = recipes.parsed(values)
            kind = recipe.where.kind
            if target.accelerator and kind != "cuda":
                raise UsageError(
                    f"the target has the accelerator {target.accelerator}, and the recipe's device is {kind}",
                    "leave the device to the target",
                )
        except UsageError as error:
            raise type(error)(f"{pair}: {error.message}", remedy_of(error)) from error
        place = Place(kind, target.accelerator, tuple(sorted(target.resources.items())))
        return Entry(pair.folder, pair.model, pair.target, recipe, place)


def read(path: Path) -> Fleet:
    """Read a fleet file.

    Raises:
        UsageError: it cannot be read, or does not make sense by itself.
    """
    return make(recipes.read(path, "fleet file", _SEE))


def make(values: dict[str, Any]) -> Fleet:
    """Make a fleet from plain values.

    Raises:
        UsageError: a key or a value that does not belong there, in recipes, too.
    """
    try:
        fleet = Fleet.model_validate(values)
    except ValidationError as error:
        raise _explain_error(error) from error
    layers = {"recipe": fleet.recipe} | {f"targets.{name}.recipe": part.recipe for name, part in fleet.targets.items()}
    layers |= {f"models.{name}.recipe": model.recipe for name, model in fleet.models.items()}
    layers |= {f"overrides.{name}": layer for name, layer in fleet.overrides.items()}
    for place, layer in layers.items():
        if "model" in layer:
            raise UsageError(f"{place} names a model", "models are named below `models:`; recipes have all but that")
        _validate_values(place, merge_layers(layer))
    for name, model in fleet.models.items():
        validate_name("models", name, is_model=not model.model)
        validate_unique(f"models.{name}.targets", model.targets or ())
    for name, target in fleet.targets.items():
        validate_name("targets", name)
        _validate_device(f"targets.{name}", target)
    _ = fleet.pairs  # raises its own messages
    return fleet


def _validate_device(where: str, target: Target) -> None:
    if target.device and "device" in target.recipe:
        raise UsageError(f"{where} names its device twice", "name it once")
    if target.accelerator and target.device and not target.device.startswith("cuda"):
        raise UsageError(
            f"{where} has the accelerator {target.accelerator}, and its device is {target.device}",
            "omit the device: an accelerator implies cuda",
        )
    if target.device:
        _validate_values(where, {"device": target.device})


def _validate_values(where: str, values: dict[str, Any]) -> None:
    try:
        recipes.parsed({**values, "model": "of the fleet"})
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", error.remedy) from error


def _explain_error(error: ValidationError) -> UsageError:
    errors = error.errors()  # what is missing may be there by a name that is not known
    first = next((problem for problem in errors if problem["type"] in _UNKNOWN), errors[0])
    place = [str(key) for key in first["loc"]]
    if first["type"] in _UNKNOWN:
        parts: dict[str, type[BaseModel]] = {"models": Model, "targets": Target}
        return recipes.unknown_field("fleet file", parts.get(place[0], Fleet) if place[1:] else Fleet, place)
    if first["type"] in ("missing", "too_short"):
        return UsageError(f"the fleet file has no {place[-1]}", _SEE)
    if place[-1] == "[key]":
        name = first["input"]
        return UsageError(f"{place[0]}: the name {name!r} is no text", f'put it in quotes: "{name}"')
    return UsageError(f"{'.'.join(place)}: {recipes.plain_words(first['msg'])} (given: {first['input']!r})", _SEE)
