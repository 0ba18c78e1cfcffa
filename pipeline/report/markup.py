"""Markdown that no name or text can break out of."""

import re
from collections.abc import Sequence

_STAR = re.compile(r"(?<!\*)\*(?!\*)")
"""A star that marks a name, and no emphasis."""

_REFERENCE = re.compile(r"(?<![\w])@(?=\w)|#(?=\d)")
"""What GitHub makes a mention of somebody, or of an issue, wherever it stands; nothing that is seen goes in between."""


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table whose cells are text."""
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(plain(cell) for cell in line) + " |" for line in lines)


def plain(text: str) -> str:
    """Text on one line that cannot break out of a table cell or bring markup along."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("&", "&amp;").replace("<", "&lt;")
    text = text.replace("`", "\\`").replace("](", "]\\(")
    return stars(_REFERENCE.sub("\\g<0>\u200b", text))


def stars(text: str) -> str:
    """The same for stars alone."""
    return _STAR.sub(r"\\*", text)
