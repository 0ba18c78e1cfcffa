"""The scripts of the page: plotly.js as its package brings it along, and the page's own; each known by its digest."""

import base64
import functools
import hashlib
from importlib.util import find_spec
from pathlib import Path

from enginesmith.pipeline.errors import MissingCapability

TEMPLATES = Path(__file__).parent / "templates"


@functools.cache
def library() -> str:
    """plotly.js; the package that has it is not imported, as that takes seconds.

    Raises:
        MissingCapability: the package is not installed, or has no such file.
    """
    found = find_spec("plotly")
    places = found.submodule_search_locations if found else None
    path = Path(next(iter(places)), "package_data", "plotly.min.js") if places else None
    if path is None or not path.is_file():
        raise MissingCapability("plotly, whose script draws the charts of reports, is not here", "pip install plotly")
    text = path.read_text(encoding="utf-8")
    if "</script" in text.lower() or "<!--" in text:
        raise MissingCapability(
            f"{path} cannot stand in a page: it has the end of a script in it", "install the version that is pinned"
        )
    return text


@functools.cache
def own() -> str:
    """What makes tables sortable and draws charts and long tables."""
    return (TEMPLATES / "page.js").read_text(encoding="utf-8")


@functools.cache
def style() -> str:
    """The page's style."""
    return (TEMPLATES / "style.css").read_text(encoding="utf-8")


@functools.cache
def policy(texts: tuple[str, ...]) -> str:
    """A content security policy: these scripts, the page's style, and nothing from anywhere."""
    scripts = " ".join(f"'sha256-{_digest(text)}'" for text in texts)
    return f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
