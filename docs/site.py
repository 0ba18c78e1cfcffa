"""Hooks of the site: add the README and other files of the checkout that pages link to, and adapt pages to the site."""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")
"""The path in a relative link of Markdown, without its anchor."""
FENCE = re.compile(r"^```(\w+) (\S+)$", re.M)
BLOCK = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)
NOTE = re.compile(r"^<!-- .*? -->\n(?=```)", re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the first page, and what pages link to outside of docs/, under its path in the checkout."""
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        if not source.startswith("docs/"):
            files.append(File.generated(config, _place(source), abs_src_path=str(ROOT / source)))
        if source.endswith(".md"):
            text = BLOCK.sub("", (ROOT / source).read_text())
            linked = {_target(source, link) for link in LINK.findall(text)}
            outside = {path for path in linked if not path.startswith("docs/") and (ROOT / path).is_file()}
            waiting += sorted(outside - seen)
            seen |= outside
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site, and write the name of a block's file where the site shows it."""
    source = "README.md" if page.file.src_uri == "index.md" else page.file.src_uri
    source = source if (ROOT / source).is_file() and page.file.generated_by else f"docs/{source}"
    folder = posixpath.dirname(page.file.src_uri)

    def point(found: re.Match[str]) -> str:
        return os.path.relpath(_place(_target(source, found[1])), folder or ".")

    parts = BLOCK.split(NOTE.sub("", markdown))  # every second one is a block
    parts[::2] = [LINK.sub(point, part) for part in parts[::2]]
    return FENCE.sub(r'```\1 title="\2"', "".join(parts))


def _target(source: str, link: str) -> str:
    """Return the path in the checkout that a link of a file leads to; a folder leads to its README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def _place(path: str) -> str:
    """Return the path in the site's sources of a file of the checkout."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")
