"""What a step read of the user's, outside of the store: written down, and looked at before the step is done again."""

import importlib.metadata
import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from enginesmith.pipeline.artifact import (
    portable,
)
from enginesmith.pipeline.storage import storage_errors
from enginesmith.pipeline.stored_file import StoredFile, stored_file


class ReadRecord(BaseModel):
    """What a step depended on outside of the store when it last ran."""

    files: dict[str, StoredFile] = {}
    """By absolute path."""
    folders: dict[str, list[str]] = {}
    """Files that were in the folders of those: one that appears or goes may be looked for."""
    subfolders: dict[str, list[str]] = {}
    """Folders in those that were read as a whole."""
    packages: dict[str, str] = {}

    @property
    def identity(self) -> dict[str, object]:
        """What belongs in a key: contents, without where on this machine they were."""
        digests = {Path(name): file.sha256 for name, file in self.files.items()}
        return {"files": portable(digests), "packages": self.packages}


class Reads:
    """The user's files that a step depends on: found out while it runs, and looked at before it runs again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def known(self) -> ReadRecord | None:
        """What the step depends on as it is now; None where it never ran, or something is not there any more."""
        try:
            before = ReadRecord.model_validate_json(self._path.read_bytes())
            files = {name: stored_file(Path(name), stored) for name, stored in before.files.items()}
            packages = {name: importlib.metadata.version(name) for name in before.packages}
            unchanged = all(_listing(Path(name)) == names for name, names in before.folders.items())
            unchanged &= all(_subfolders(Path(name)) == names for name, names in before.subfolders.items())
        except (OSError, ValidationError, importlib.metadata.PackageNotFoundError):
            return None
        return before.model_copy(update={"files": files, "packages": packages}) if unchanged else None

    def remember(self, paths: Collection[Path], packages: Mapping[str, str]) -> ReadRecord:
        """Write down what was read: files, and folders of which every file was.

        Raises:
            StoreError: the store cannot be written, or a file is gone again.
        """
        with storage_errors(f"the store {self._path.parent}"):
            whole = {str(path) for path in paths if path.is_dir()}
            files = {str(path): stored_file(path) for path in paths if str(path) not in whole}
            folders = {folder: _listing(Path(folder)) for folder in {str(Path(name).parent) for name in files} | whole}
            subfolders = {folder: _subfolders(Path(folder)) for folder in whole}
            found = ReadRecord(files=files, folders=folders, subfolders=subfolders, packages=dict(packages))
            partial = self._path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            partial.write_text(found.model_dump_json())
            partial.replace(self._path)
        return found


def _listing(folder: Path) -> list[str]:
    """Names of the files in a folder, but hidden ones and what `export` writes there."""
    names = (entry.name for entry in os.scandir(folder) if entry.is_file())
    return sorted(name for name in names if not name.startswith(".") and not name.endswith((".onnx", ".onnx.data")))


def _subfolders(folder: Path) -> list[str]:
    """Names of the folders in a folder, but hidden ones."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
