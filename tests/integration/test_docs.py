"""Every command that README.md and docs/ show is run, one document in one folder, from top to bottom.

A block of ``sh`` holds commands, one of ``console`` commands after ``$`` and answers. A file's name after the language
(``python net.py``) says that the block is that file. ``# exit 3`` after a command is how it ends.
Above a block that cannot be run here, ``<!-- not run: reason -->`` says why; above one that is run in a new checkout of
the project, with the old one gone, stands ``<!-- another checkout -->``.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^(?:<!-- (?P<note>.+?) -->\n)?```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
EXIT = re.compile(r"#\s*exit (\d+)\s*$")
SCRIPTS = ("train.py", "encoder.py")
"""Files of the cookbook that make what is in the project; they are run once."""
BRIEFLY = {
    "--precision": ("--search-steps", "1"),
    "--recover": ("--recover-time", "2s"),
    "--prune": ("--samples", "16"),
    "--data": ("--time", "60s"),
}
"""Options that are added to ``optimize``, ``prune`` or ``sparsify`` with such a one, where the command lacks them."""


@dataclass(frozen=True)
class Command:
    """One line to run, where it stands, and how it ends."""

    line: str
    where: str
    exit: int


def blocks(document: Path) -> Iterator[tuple[str, str, str]]:
    """Kind, text, and what the note above it says."""
    for found in BLOCK.finditer(document.read_text(encoding="utf-8")):
        yield found["kind"].strip(), found["text"], found["note"] or ""


def commands(kind: str, text: str, where: str) -> Iterator[Command]:
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        if kind == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        code = EXIT.search(line)
        words = shlex.split(line, comments=True)
        if words:
            yield Command(shlex.join(words), where, int(code[1]) if code else 0)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project that the documents speak of: the cookbook's files, its network trained, and a text encoder."""
    home = tmp_path_factory.mktemp("project")
    for kind, text, _ in blocks(ROOT / "docs" / "cookbook.md"):
        language, _, name = kind.partition(" ")
        if language == "python" and name:
            (home / name).write_text(text)
    for script in SCRIPTS:
        subprocess.run([sys.executable, script], cwd=home, check=True, capture_output=True)
    return home


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder in which each document's commands run, one for all, so that they share a store."""
    return tmp_path_factory.mktemp("documents") / "checkout"


def run(command: Command, cli: Cli) -> None:
    words = [os.path.expandvars(word) for word in shlex.split(command.line)]
    if words[0] == "export":
        name, _, value = words[1].partition("=")
        os.environ[name] = value
        return
    assert words[0] in ("enginesmith", "python"), f"{command.where}: {command.line}: mark the block as not run, and why"
    if words[0] == "python" and words[1] in SCRIPTS:
        return
    if words[0] == "python":
        subprocess.run([sys.executable, *words[1:]], check=True, capture_output=True)
        return
    arguments = words[1:]
    if arguments[0] in ("optimize", "prune", "sparsify"):
        for option, more in BRIEFLY.items():
            if (
                option in arguments
                and more[0] not in arguments
                and (arguments[0] == "optimize" or option != "--precision")
            ):
                arguments += more
    if arguments[0] in ("optimize", "benchmark") and "--max-memory" not in arguments:
        arguments.append("--no-memory")  # measuring it takes seconds for each variant
    answer = cli(*arguments)
    assert answer.code == command.exit, f"{command.where}: {command.line}\n{answer.text}"


@pytest.mark.thorough
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
@pytest.mark.timeout(1800)  # all commands of a page, one after the other
def test_commands_run(
    document: Path, project: Path, home: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="some commands build TensorRT-RTX engines: pip install tensorrt-rtx")
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("SHARED", str(shared))
    monkeypatch.setenv("ENGINESMITH_STORE", os.environ["ENGINESMITH_STORE"])  # undone where a document exports another
    checked_out(home, project, document, monkeypatch)
    engines: dict[str, str] = {}
    for kind, text, note in blocks(document):
        if note == "another checkout":
            engines = built_ahead(shared)
            checked_out(home.with_name("elsewhere"), project, document, monkeypatch)
            shutil.rmtree(home)
        if kind in ("sh", "console") and not note.startswith("not run: "):
            for command in commands(kind, text, document.name):
                run(command, cli)
    assert not engines or engines == built_ahead(shared), "what one machine built, another builds again"


def checked_out(home: Path, project: Path, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project and the document's own files, in a new folder to work in."""
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(project, home)
    for kind, text, _ in blocks(document):
        language, _, name = kind.partition(" ")
        if language in ("python", "yaml") and name:
            (home / name).write_text(text)
    monkeypatch.chdir(home)


def built_ahead(shared: Path) -> dict[str, str]:
    """Digests of the engines that were built for a GPU which is not here, and when."""
    run = json.loads((shared / "run" / "run.json").read_text())
    ahead = [one for one in run["variants"] if one["target"]]
    assert ahead
    return {one["id"]: f"{one['artifact']['sha256']} {one['build']['seconds']}" for one in ahead}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_no_command_stands_outside_of_what_is_run(document: Path) -> None:
    """Blocks of no language hide commands."""
    for kind, text, _ in blocks(document):
        if kind.partition(" ")[0] not in ("sh", "console", "yaml", "python", "toml"):
            assert not re.search(r"^\$? ?(enginesmith|make|pip|python) ", text, re.M), f"{document.name}: {text}"


def test_the_site_is_built_and_no_link_of_it_leads_nowhere(tmp_path: Path) -> None:
    """Strict: a page without a place in the navigation, a link or an anchor that is not there ends it."""
    pytest.importorskip("mkdocs", reason="the site is made by mkdocs: pip install mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    pages = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.html")}
    assert Path("install.html") in pages
    elsewhere = re.compile(r"<(?:script|img|link rel=\"stylesheet\")[^>]*(?:src|href)=\"?(?:https?:)?//")
    assert not [str(path) for path, text in pages.items() if elsewhere.search(text)]
