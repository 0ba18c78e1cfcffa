"""Names in figures: plotly.js reads tags, entities and ``%{…}`` in texts, and has no way to be told not to."""

_LINE = 80
_LONGEST = 32


def escaped(text: str) -> str:
    """Text that plotly.js shows as it stands, in legends, ticks, annotations and hover templates."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("{", "&#123;"), ("$", "&#36;")):
        text = text.replace(character, entity)
    return " ".join(text.split())


def shortened(text: str, most: int = _LONGEST) -> str:
    """A long name without its middle: beginnings and ends tell names apart."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"


def label(name: str, most: int = _LONGEST) -> str:
    """A name for legends and ticks."""
    return escaped(shortened(name, most))


def whole(name: str) -> str:
    """A name for hover texts: all of it, in lines."""
    return "<br>".join(escaped(name[start : start + _LINE]) for start in range(0, len(name), _LINE))


def said(*lines: str) -> str:
    """A hover text of lines that are plain."""
    return "<br>".join(whole(line) for line in lines if line)


def counted(number: int, one: str, many: str = "") -> str:
    """``1 variant``, ``3 variants``."""
    return f"{number} {one if number == 1 else many or one + 's'}"
