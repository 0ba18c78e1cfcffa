"""Pages, taken apart."""

from html.parser import HTMLParser


class Elements(HTMLParser):
    """Every element of a page with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of all elements of that name."""
        return [attributes for name, attributes in self.all if name == tag]
