"""A run or a fleet kept as the baseline of later ones: as much of it as they are held against."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from enginesmith.pipeline.errors import UsageError, storage_errors
from enginesmith.pipeline.results import fleet as records
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.fleet import RUNS
from enginesmith.pipeline.results.fleet_history import Earlier
from enginesmith.pipeline.results.remeasure import Stored

_FILES = ("run.json", "samples.npz")


def check_replaceable(source: Path, target: Path, read: Callable[[Path], object] = runs.read) -> None:
    """Insist on a folder that is new, empty, or holds what ``read`` reads, and nothing of what is to be kept.

    Raises:
        UsageError: it is something else, or has the source or a run that a fleet took over in it.
    """
    for folder in (source, *sorted(source.glob(f"{RUNS}/*"))):
        if folder.resolve().is_relative_to(target.resolve()):
            raise UsageError(f"{target} holds {folder} itself", "give another folder: --baseline DIR")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise UsageError(f"{target} is a file", "give a folder: --baseline DIR")
    try:
        read(target)
    except UsageError as error:
        raise UsageError(
            f"{target} is there already, and is no baseline: {error.message}", "give a new folder: --baseline DIR"
        ) from error


def keep(source: Stored, target: Path) -> None:
    """Make a run the baseline in the folder ``target``, whole or not at all; what was the baseline is gone then.

    Raises:
        UsageError: there is something else in that folder.
        StoreError: it cannot be written.
    """
    check_replaceable(source.folder, target)
    _replace(target, lambda whole: _copy(source, whole))


def keep_fleet(fleet: Earlier, winners: Mapping[str, Stored], target: Path) -> None:
    """The same of a fleet, with the winners of its entries by name.

    Raises:
        UsageError, StoreError: as for a run.
    """

    def fill(whole: Path) -> None:
        for name, source in winners.items():
            _copy(source, whole / RUNS / name)
        records.write(fleet.record.model_copy(update={"last": None}), whole)

    check_replaceable(fleet.folder, target, records.read)
    _replace(target, fill)


def _replace(target: Path, fill: Callable[[Path], None]) -> None:
    with storage_errors(f"the baseline {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            whole, old = Path(scratch, "new"), Path(scratch, "old")
            fill(whole)
            if target.exists():
                target.rename(old)
            try:
                whole.rename(target)
            except OSError:
                if old.exists():
                    old.rename(target)
                raise


def _copy(source: Stored, whole: Path) -> None:
    """Copy the document, the samples, and the files of the variant that later runs are compared with."""
    whole.mkdir(parents=True)
    record = source.record
    kept = [_inside(one.path) for one in (record.artifact, record.graph, record.test_vector) if one]
    folders = {Path(path).parent for path in kept} - {Path()}
    files = {*_FILES, *(path for path in kept if Path(path).parent == Path())}
    for folder in sorted(folders):
        if (source.folder / folder).is_dir():
            shutil.copytree(source.folder / folder, whole / folder, dirs_exist_ok=True)
    for name in sorted(files):
        if (source.folder / name).is_file():
            shutil.copy2(source.folder / name, whole / name)


def _inside(path: str) -> str:
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise UsageError(f"the run names a file outside of its folder: {path!r}", "run optimize again")
    return path
