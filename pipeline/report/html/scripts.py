"""Load the page's scripts and style: plotly.js and the page's own."""

import base64
import functools
import hashlib
from pathlib import Path

TEMPLATES = Path(__file__).parent / "templates"


@functools.cache
def library() -> str:
    """Load plotly.js in its "basic" build, which draws scatter, bar and pie traces.

    The file is ``plotly-basic.min.js`` of the npm package ``plotly.js-basic-dist-min`` as it stands: a report is about
    1.3 MB with it, and would be 5 MB with every trace type.
    """
    return (TEMPLATES / "plotly-basic.min.js").read_text(encoding="utf-8")


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
