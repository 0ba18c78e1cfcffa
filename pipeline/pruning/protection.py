"""Layers that people name, whose channels stay."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.pruning.structure import Group

ASKED_FOR = "it is to stay whole, as was asked for"


def protected(groups: Iterable[Group], modules: Sequence[str], patterns: Sequence[str]) -> dict[str, str]:
    """The groups, by root, in which a named layer makes channels or changes them; with the reason.

    A pattern is the path of a module or parameter, which stands for all that is below it too; ``*`` is any part.

    Raises:
        UsageError: a pattern fits nothing in the model.
    """
    known = [path for path in modules if path]
    for pattern in patterns:
        if not any(_fits(path, pattern) for path in known):
            near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3)
            raise UsageError(
                f"no layer of the model is called {pattern!r}", f"such as {', '.join(near or known[:3])}; * is any part"
            )
    found = {}
    for group in groups:
        names = {one.tensor.rpartition(".")[0] for one in group.slices if one.side != "reads"}
        names |= {one.tensor for one in group.slices if one.side != "reads"}
        if any(_fits(name, pattern) for name in names for pattern in patterns):
            found[group.root] = ASKED_FOR
    return found


def _fits(path: str, pattern: str) -> bool:
    """Whether a path, or a module that it is within, is what a pattern stands for."""
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))
