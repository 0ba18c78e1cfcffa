"""Markdown that no name or text can break out of."""

import re
from collections.abc import Sequence
from urllib.parse import quote

_STAR = re.compile(r"(?<!\*)\*(?!\*)")
"""A star that marks a name, and no emphasis."""

_REFERENCE = re.compile(r"(?<![\w])@(?=\w)|#(?=\d)")
"""What GitHub makes a mention of somebody, or of an issue, wherever it stands; nothing that is seen goes in between."""


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], links: Sequence[str] = ()) -> str:
    """A table whose cells are text; ``links`` are the files that rows' first cells lead to, an empty one to none."""
    lines = [tuple(map(plain, line)) for line in (columns, tuple("---" for _ in columns), *rows)]
    for index, target in enumerate(links, start=2):
        lines[index] = (link(lines[index][0], target), *lines[index][1:])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def link(text: str, target: str) -> str:
    """Markdown as a link to a file beside the document; without a target as it is."""
    return f"[{text.replace('[', chr(92) + '[').replace(']', chr(92) + ']')}]({quote(target)})" if target else text


def plain(text: str) -> str:
    """Text on one line that cannot break out of a table cell or bring markup along."""
    text = " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("&", "&amp;").replace("<", "&lt;")
    text = text.replace("`", "\\`").replace("](", "]\\(")
    return stars(_REFERENCE.sub("\\g<0>\u200b", text))


def stars(text: str) -> str:
    """The same for stars alone."""
    return _STAR.sub(r"\\*", text)
