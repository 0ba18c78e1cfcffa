"""Paths as they can be told to another machine: from the project, the user's home and the like, not from the root.

    {project}/nets/digits.py      the current folder, from which models and data are named
    {enginesmith}/models/…        what comes with enginesmith
    {prefix}/share/…              the Python environment
    {home}/.cache/…               the user's home

Any other path stays absolute: it means the same file where another machine has one there.
"""

import functools
import sys
from pathlib import Path

_OWN = "{enginesmith}"
OWN_FOLDERS = ("calibration", "models", "pipeline")
"""Of enginesmith's root, those that hold its code; a user's files may lie beside them, in a checkout."""


def to_portable_path(path: str) -> str:
    """An absolute path by the nearest of the anchors above it; anything else stays as it is."""
    if not path.startswith("/"):
        return path
    above = [(len(root), label) for root, label in _anchors(str(Path.cwd())) if _is_below(path, root)]
    if not above:
        return path
    length, label = max(above)
    return label + path[length:]


def from_portable_path(name: str) -> str:
    """The path on this machine that :func:`to_portable_path` gave the name for on another one."""
    if not name.startswith("{"):
        return name
    label, closing, rest = name.partition("}")
    return _places(str(Path.cwd()))[label + closing] + rest


def anchor_of(name: str) -> str:
    """``{project}`` of ``{project}/net.py``; empty for an absolute path."""
    return name[: name.index("}") + 1] if name.startswith("{") else ""


@functools.cache
def _places(project: str) -> dict[str, str]:
    """Anchor → folder."""
    home = str(Path.home())
    own = str(Path(__file__).parent.parent)
    return {"{home}": home, "{prefix}": sys.prefix, _OWN: own, "{project}": project}


@functools.cache
def _anchors(project: str) -> tuple[tuple[str, str], ...]:
    """Folder and how it is told; of enginesmith only what is its own, as its checkout may be the project."""
    places = _places(project)
    named = [(folder, label) for label, folder in places.items() if label != _OWN]
    named += [(f"{places[_OWN]}/{folder}", f"{_OWN}/{folder}") for folder in OWN_FOLDERS]
    return tuple((folder, label) for folder, label in named if folder not in ("", "/"))


def _is_below(path: str, root: str) -> bool:
    return path.startswith(root) and (len(path) == len(root) or path[len(root)] == "/")
