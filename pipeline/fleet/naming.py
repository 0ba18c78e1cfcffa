"""Names of models, targets and pairs of them: as folders, and as patterns that choose some."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from enginesmith.pipeline.errors import UsageError

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST = 100
"""Characters of one of the two names in that of a folder."""
_MOST_NAMED = 12
"""Names that an error lists."""


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
        return f"{_plain(self.model)}@{_plain(self.target)}"

    def matches(self, pattern: str) -> bool:
        """Whether a pattern names the pair, its folder, or its model or target alone."""
        names = (str(self), self.folder, self.model, self.target)
        return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def _plain(name: str) -> str:
    """A name as a part of that of a folder."""
    return _UNSAFE.sub("-", name).strip("-.")[:_LONGEST] or "-"


def hold_name(where: str, name: str, *, is_model: bool = False) -> None:
    """Insist on a name that its folder can have, too; ``is_model`` is for one that is MODEL itself, such as a path.

    Raises:
        UsageError: it has other characters, or ends or begins with one that is left out, or is too long.
    """
    plain = _plain(name)
    if name == plain or (is_model and "@" not in name):
        return
    near = plain if plain != "-" else "a"
    remedy = f"write {near!r}, say: letters, digits and . _ + - are taken, {_LONGEST} of them"
    raise UsageError(
        f"{where}: {name!r} can be no name: folders are called by it, and an entry is model@target",
        f"{remedy}; what the model is stands in `model: {name}` then" if is_model else remedy,
    )


def hold_once(where: str, names: Sequence[str]) -> None:
    """Insist on a list that has each name once.

    Raises:
        UsageError: it has one twice.
    """
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            f"{where} has {twice!r} twice",
            "leave one of them away, or give the same model two names, each with its own recipe: "
            f"`{{one: {{model: {twice}}}, other: {{model: {twice}}}}}`"
            if where == "models"
            else "leave one of them away",
        )


def chosen(pairs: Sequence[Pair], patterns: Iterable[str], where: str) -> tuple[Pair, ...]:
    """Those that any of the patterns names.

    Raises:
        UsageError: a pattern names none; ``where`` says who gave it.
    """
    found = set()
    for pattern in patterns:
        named = [pair for pair in pairs if pair.matches(pattern)]
        if not named:
            known = [name for pair in pairs for name in (pair.model, pair.target, str(pair))]
            raise unknown(where, pattern, known, "entry")
        found.update(named)
    return tuple(pair for pair in pairs if pair in found)


def unknown(where: str, name: str, known: Iterable[str], what: str) -> UsageError:
    """The error for a name that is not there, with those that are near it."""
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    shown = ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )
    return UsageError(
        f"{where} names {name!r}, and the fleet has no such {what}"
        + (f"; did you mean {' or '.join(near)}?" if near else ""),
        f"there are {shown}",
    )


def hold_distinct(pairs: Iterable[Pair]) -> None:
    """Insist on a folder for each pair, also where file systems make no difference between a and A.

    Raises:
        UsageError: two would have the same.
    """
    taken: dict[str, Pair] = {}
    for pair in pairs:
        other = taken.setdefault(pair.folder.casefold(), pair)
        if other != pair:
            raise UsageError(
                f"{other} and {pair} would both have the folder {pair.folder}",
                "give one of the models or targets another name; `model:` says what it is then",
            )
