"""What travels to the nodes of a cluster: enginesmith's own code, and the folder that the user works in.

Both go as Ray's ``py_modules``, each a folder in a folder of its own. A ``working_dir`` would put the user's modules on
the import path of everything there: their ``queue.py`` in the place of Python's.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from enginesmith.pipeline.errors import UsageError, storage_errors
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.store.inputs import OWN_FOLDERS
from enginesmith.pipeline.tasks.base import Task
from enginesmith.pipeline.units import format_bytes

PROJECT = "enginesmith_project"
"""What the user's folder is called there."""
_LARGEST_BYTES = 480 << 20
"""Ray takes 500 MiB, and the code has to fit too."""
_MOST_FILES = 20_000
_NAMED = 5
_NEVER = {"__pycache__", "node_modules"}
_RECORDS = ("pyvenv.cfg", "run.json", "fleet.json")
"""Files that tell an environment, or what a run or a fleet left, from folders that a model may need."""


@contextlib.contextmanager
def staged(project: Path, skip: Path) -> Iterator[list[str]]:
    """Folders to hand to Ray; what the user's one holds are links. The folder ``skip`` is left out, wherever it is.

    Raises:
        UsageError: the user's folder holds more than Ray takes.
    """
    with contextlib.ExitStack() as stack:
        with storage_errors("the folder for temporary files"):
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="enginesmith-"))
            code, files = Path(place, "enginesmith"), Path(place, PROJECT)
            root = Path(__file__).parents[3]
            for name in OWN_FOLDERS:
                shutil.copytree(root / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copyfile(root / "cli.py", code / "cli.py")
            _link(project.resolve(), files, skip.resolve())
        yield [str(code), str(files)]


def files_named(task: Task, project: Path) -> tuple[str, ...]:
    """Files that a task's fields name and that are there: nodes have to have them under the same name.

    Those of the project are taken from the current folder. The path of the model itself is not among them as long as it
    was given from there.
    """
    found = {text for text in _texts(task.model_dump(exclude={"source"})) if _is_file(project, text)}
    source = getattr(task, "source", None)
    if isinstance(source, Source) and Path(source.target).is_absolute():
        absolute = (
            Path(source.text.partition(":")[2] if source.form == "hf" else source.text).expanduser().is_absolute()
        )
        if absolute or not Path(source.target).is_relative_to(project):
            found.add(source.target)
    return tuple(sorted(found))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from _texts(one)


def _is_file(project: Path, text: str) -> bool:
    try:
        return bool(text) and (project / text).is_file()
    except (OSError, ValueError):  # too long for a name, or with a zero in it
        return False


def project_here() -> Path | None:
    """Where the user's folder lies on this node; None where none travelled."""
    places = (Path(entry, PROJECT) for entry in sys.path if entry)
    return next((place for place in places if place.is_dir()), None)


def _link(project: Path, files: Path, skip: Path) -> None:
    total, sizes = 0, {}
    files.mkdir()
    for folder, subfolders, names in os.walk(project):
        here = Path(folder)
        subfolders[:] = sorted(name for name in subfolders if _travels(here / name) and here / name != skip)
        there = files / here.relative_to(project)
        there.mkdir(exist_ok=True)
        for name in sorted(names):
            path = here / name
            if name.startswith(".") or not path.is_file() or not os.access(path, os.R_OK):
                continue
            (there / name).symlink_to(path.resolve())
            sizes[str(path.relative_to(project))] = size = path.stat().st_size
            total += size
            if len(sizes) > _MOST_FILES:
                raise _too_much(project, f"more than {_MOST_FILES:,} files", sizes)
    if total > _LARGEST_BYTES:
        raise _too_much(project, f"{format_bytes(total)} in {len(sizes):,} files", sizes)


def _travels(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in _NEVER
    return not hidden and not folder.is_symlink() and not any((folder / name).is_file() for name in _RECORDS)


def _too_much(project: Path, what: str, sizes: dict[str, int]) -> UsageError:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED]
    named = ", ".join(f"{name} ({format_bytes(sizes[name])})" for name in largest)
    return UsageError(
        f"the current folder travels to the nodes, and {project} holds {what}: more than Ray takes",
        "run the command in the folder of the model, or keep what is large on a disk that all nodes share; "
        f"the largest files are {named}",
    )
