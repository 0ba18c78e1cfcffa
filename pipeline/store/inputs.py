"""Record the user's files that steps read, and compare them before a step is repeated.

What a step will read is known only when it has run. So every step has a name, made of all that is known before, and
under it candidates: lists of what it read at one time, by paths that mean the same on other machines, for the same
project. A candidate says nothing of contents: these are taken from the files here and now, and lead to a key. So a list
of somebody else, or of long ago, can at worst lead to no entry.
"""

import contextlib
import functools
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from enginesmith.pipeline.artifact import Effect, json_digest, relative_digests, write_whole
from enginesmith.pipeline.errors import StoreError, storage_errors
from enginesmith.pipeline.store.manifest import DAY_SECONDS, StoredFile, describe_file
from enginesmith.pipeline.store.remote import SharedStore
from enginesmith.pipeline.system import software

# In a shared store there is one small file for each name, with all lists in it: one request finds them, or that there
# are none. Of two machines that add lists to one file at the same moment one may lose its own; whoever needs that list
# does the step once more, and adds it again.

MOST_CANDIDATES = 16
"""Candidates of one name; the oldest are forgotten."""
_ARRAYS = (".npz", ".npy")
"""Endings of files that are read by name: what lies beside them changes nothing, unless code looks for it."""


class _SharedFile(BaseModel, frozen=True):
    used: float = 0.0
    """Seconds since the epoch; noted once a day."""
    candidates: tuple[Any, ...] = ()
    """Newest first."""


def publish_candidate(store: SharedStore, name: str, content: bytes) -> None:
    """Put a candidate before the other ones of its name.

    Raises:
        StoreError: the service refuses it, or was away for too long.
    """
    newest, older = json.loads(content), _read(store, name).candidates
    if newest not in older[:1]:
        _write(store, name, (newest, *(candidate for candidate in older if candidate != newest))[:MOST_CANDIDATES])


def _read(store: SharedStore, name: str) -> _SharedFile:
    with contextlib.suppress(ValidationError):
        if (content := store.read(f"reads/{name}.json")) is not None:
            return _SharedFile.model_validate_json(content)
    return _SharedFile()


def _write(store: SharedStore, name: str, candidates: tuple[Any, ...]) -> None:
    file = _SharedFile(used=time.time(), candidates=candidates)
    store.write(f"reads/{name}.json", file.model_dump_json().encode())


# Portable paths, which mean the same on another machine: from the project, the user's home and the like.
#
#     {project}/nets/digits.py      the current folder, from which models and data are named
#     {enginesmith}/models/…        what comes with enginesmith
#     {prefix}/share/…              the Python environment
#     {home}/.cache/…               the user's home
#
# Any other path stays absolute: it means the same file where another machine has one there.

_OWN = "{enginesmith}"
OWN_FOLDERS = ("calibration", "models", "pipeline")
"""Folders in enginesmith's root that hold its code; a user's files may lie beside them, in a checkout."""
OWN_FILES = ("__init__.py", "cli.py")
"""Files there that are its code."""

ALL_VARIABLES = "*"
"""Stands for all environment variables, set or not, but the passing ones: for code that copies or goes through them."""
SCRATCH_VARIABLE = "TMPDIR"
"""Leads to files that do not last, in another folder for each job: it never counts."""
USUAL_VARIABLES = frozenset(("HOME", "PATH", "PWD", SCRATCH_VARIABLE, "USER"))
"""Variables that are others on each machine; files that they lead to are tracked by themselves."""
_OF_SESSION = frozenset(
    (
        *("_", "OLDPWD", "SHLVL", "LINES", "COLUMNS", "HOSTNAME", "LOGNAME", "WINDOWID", "TMUX", "TMUX_PANE", "STY"),
        *("TERM_SESSION_ID", "ITERM_SESSION_ID", "VSCODE_IPC_HOOK_CLI", "VSCODE_GIT_IPC_HANDLE", "GPG_TTY"),
        *("XDG_SESSION_ID", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "INVOCATION_ID", "JOURNAL_STREAM"),
        *("SYSTEMD_EXEC_PID", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_TASK_PID", "PBS_JOBID"),
        # of GitHub; a commit is none of them: a model may be another one for it
        *("GITHUB_RUN_ID", "GITHUB_RUN_NUMBER", "GITHUB_RUN_ATTEMPT", "GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_PATH"),
        *("GITHUB_STATE", "GITHUB_STEP_SUMMARY", "GITHUB_ACTION", "GITHUB_TOKEN", "RUNNER_NAME", "RUNNER_TRACKING_ID"),
        # of GitLab
        *("CI_JOB_ID", "CI_JOB_URL", "CI_JOB_TOKEN", "CI_JOB_STARTED_AT", "CI_PIPELINE_ID", "CI_PIPELINE_IID"),
        *("CI_PIPELINE_URL", "CI_PIPELINE_CREATED_AT", "CI_RUNNER_ID", "CI_RUNNER_SHORT_TOKEN", "CI_CONCURRENT_ID"),
        *("CI_CONCURRENT_PROJECT_ID", "CI_REPOSITORY_URL", "CI_REGISTRY_PASSWORD", "CI_DEPENDENCY_PROXY_PASSWORD"),
        # of Jenkins and others
        *("BUILD_ID", "BUILD_NUMBER", "BUILD_TAG", "BUILD_URL", "BUILD_DISPLAY_NAME", "EXECUTOR_NUMBER"),
        *("BUILD_BUILDID", "BUILD_BUILDNUMBER", "SYSTEM_JOBID", "CIRCLE_BUILD_NUM", "CIRCLE_BUILD_URL"),
        *("CIRCLE_WORKFLOW_ID", "CIRCLE_WORKFLOW_JOB_ID", "BUILDKITE_BUILD_ID", "BUILDKITE_BUILD_NUMBER"),
        "BUILDKITE_JOB_ID",
    )
)
_OF_SESSION_BEGIN = ("SSH_", "ACTIONS_")


def is_passing(variable: str) -> bool:
    """Tell whether each shell, session, CI job or machine has its own value of an environment variable.

    No model is another one for it; so it counts for code that asks for it by name, not for code that copies all.
    """
    return variable in USUAL_VARIABLES or variable in _OF_SESSION or variable.startswith(_OF_SESSION_BEGIN)


def to_portable_path(path: str) -> str:
    """Rewrite an absolute path relative to the nearest anchor above it; leave anything else as it is."""
    if not path.startswith("/"):
        return path
    above = [
        (len(folder), label)
        for label, folder in _anchors(str(Path.cwd())).items()
        if label != _OWN and folder not in ("", "/") and (path == folder or path.startswith(f"{folder}/"))
    ]
    length, label = max(above, default=(0, ""))
    return label + path[length:]


def from_portable_path(name: str) -> str:
    """Resolve a name from :func:`to_portable_path`, of any machine, to the path on this one."""
    if not name.startswith("{"):
        return name
    label, closing, rest = name.partition("}")
    return _anchors(str(Path.cwd()))[label + closing] + rest


def anchor_of(name: str) -> str:
    """Return the anchor of a portable path, as ``{project}`` of ``{project}/net.py``; empty for an absolute path."""
    return name[: name.index("}") + 1] if name.startswith("{") else ""


@functools.cache
def _anchors(project: str) -> dict[str, str]:
    """Map portable names to folders; paths are named from enginesmith's own folders, as its root may be the project."""
    own = str(Path(__file__).parents[2])
    inner = {f"{_OWN}/{folder}": f"{own}/{folder}" for folder in OWN_FOLDERS}
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises for a user without one
    return {"{home}": home, "{prefix}": sys.prefix, "{project}": project, _OWN: own, **inner}


class _Candidate(BaseModel, frozen=True, extra="forbid"):
    """Dependencies of a step outside of the store, by portable paths."""

    files: tuple[str, ...] = ()
    folders: dict[str, tuple[str, ...]] = {}
    """By folder of those files, the names of all files and packages there: others may be looked for, or come first."""
    subfolders: dict[str, tuple[str, ...]] = {}
    """By folder that was read as a whole, the folders in it."""
    existence: dict[str, bool] = {}
    """By path that was asked for, whether it was there."""
    links: dict[str, str | None] = {}
    """By path that was asked for without following it, where it led, as :func:`read_link` tells."""
    absent_modules: dict[str, tuple[str, ...]] = {}
    """By folder, modules that Python looked for there, and that are not there."""
    packages: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    """Names of environment variables, or :data:`ALL_VARIABLES`."""

    @property
    def listings(self) -> tuple[tuple[str, ...], ...]:
        return (*self.folders.values(), *self.subfolders.values())

    @property
    def digest(self) -> str:
        return json_digest(self.model_dump())


class _CandidateRecord(BaseModel):
    """A candidate as it is stored, with the state of its files, which is for this machine only."""

    candidate: _Candidate
    states: dict[str, StoredFile] = {}

    def save(self, path: Path) -> None:
        write_whole(path, self.model_dump_json().encode())

    @classmethod
    def load(cls, path: Path) -> "_CandidateRecord | None":
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None


@dataclass(frozen=True)
class ReadRecord:
    """Dependencies of a step outside of the store, with their present content."""

    path: str
    """Path of the candidate, relative to the folder of reads."""
    files: Mapping[str, StoredFile]
    """By portable path."""
    packages: Mapping[str, str]
    variables: Mapping[str, str | None]
    """Environment variables; None for one that is not set."""
    listings: tuple[tuple[str, ...], ...] = ()
    """Names in the folders that were looked into."""
    existence: tuple[bool, ...] = ()
    """By path that was asked for, in their order, whether it is there."""
    links: tuple[str | None, ...] = ()
    """By path that was asked for without following it, in their order, where it leads."""
    changed: tuple[Path, ...] = ()
    """Files that were changed while the step ran: nobody knows which content it read."""

    @property
    def identity(self) -> dict[str, object]:
        """The part of the key: contents, without their folders on this machine."""
        groups: dict[str, dict[Path, str]] = {}
        for name, file in self.files.items():
            groups.setdefault(anchor_of(name), {})[Path(name)] = file.sha256
        files = {anchor: relative_digests(digests) for anchor, digests in groups.items()}
        values = {name: _to_portable_value(value) for name, value in self.variables.items()}
        return {
            "files": files,
            "packages": dict(self.packages),
            "variables": values,
            "listings": self.listings,
            "existence": self.existence,
            "links": self.links,
        }


class InputDependencies:
    """The user's files that a step depends on: recorded when it has run, and compared before it runs again."""

    def __init__(self, root: Path, name: str, shared: SharedStore | None = None) -> None:
        """Take ``root``, this machine's folder of reads, and ``shared``, which is asked if that leads to no entry."""
        self._folder, self._name, self._shared = root / name, name, shared

    def candidates(self) -> Iterator[ReadRecord]:
        """Yield the candidates whose files are all present, with their present content, the likeliest first."""
        local_names: set[str] = set()
        for path in self._newest_first():
            local_names.add(path.name)
            record = _CandidateRecord.load(path)
            if record is not None and record.candidate.digest == path.stem and (read := self._compare(record)):
                with contextlib.suppress(OSError):  # a store that may only be read has no last use
                    os.utime(path)
                yield read
        if self._shared is not None:
            yield from self._shared_candidates(self._shared, local_names)

    def record(self, effect: Effect, since_ns: int = sys.maxsize) -> ReadRecord:
        """Record what a step read since a time, as its effect tells.

        A file that is written again each time, with the content that it had, counts as unchanged.

        Raises:
            StoreError: the store cannot be written, or a file is gone again.
        """
        with storage_errors(f"the store {self._folder.parent}", store=self._folder.parents[1]):
            whole = {path for path in effect.reads if path.is_dir()}
            files = {to_portable_path(str(path)): describe_file(path) for path in effect.reads if path not in whole}
            candidate = _Candidate(
                files=tuple(sorted(files)),
                folders={
                    to_portable_path(str(folder)): _listing(folder)
                    for folder in sorted({*_folders_of(effect.reads, whole), *whole})
                },
                subfolders={to_portable_path(str(folder)): _subfolders(folder) for folder in sorted(whole)},
                existence={to_portable_path(str(path)): there for path, there in sorted(effect.existence.items())},
                links={
                    to_portable_path(str(path)): _to_portable_value(target)
                    for path, target in sorted(effect.links.items())
                },
                absent_modules={
                    to_portable_path(str(folder)): names for folder, names in sorted(effect.absent_modules.items())
                },
                packages=tuple(sorted(effect.packages)),
                variables=tuple(sorted(effect.variables)),
            )
            path = self._folder / f"{candidate.digest}.json"
            known = _CandidateRecord.load(path)
            before = {name: file.sha256 for name, file in known.states.items()} if known else {}
            changed = tuple(
                Path(from_portable_path(name))
                for name, file in files.items()
                if file.inode and file.inode[-1] > since_ns and file.sha256 != before.get(name)
            )
            _CandidateRecord(candidate=candidate, states=files).save(path)
            for old in self._newest_first()[MOST_CANDIDATES:]:
                old.unlink(missing_ok=True)
        return _make_record(f"{self._name}/{path.name}", candidate, files, effect.packages, changed)

    def _shared_candidates(self, shared: SharedStore, local_names: Collection[str]) -> Iterator[ReadRecord]:
        file = _read(shared, self._name)
        if file.candidates and file.used < time.time() - DAY_SECONDS:
            with contextlib.suppress(StoreError):  # who may only read leaves no trace
                _write(shared, self._name, file.candidates)
        for content in file.candidates:
            with contextlib.suppress(ValidationError):
                record = _CandidateRecord(candidate=_Candidate.model_validate(content))
                if f"{record.candidate.digest}.json" not in local_names and (read := self._compare(record, new=True)):
                    yield read

    def _compare(self, record: _CandidateRecord, *, new: bool = False) -> ReadRecord | None:
        """Compare a candidate with this machine; None if a file lacks, its folder has others, or one is new or gone.

        New facts are recorded: a ``new`` candidate, and the state of files that had to be hashed.
        """
        wanted = record.candidate
        try:
            looks: tuple[tuple[Callable[[Path], Any], Mapping[str, Any]], ...] = (
                (_listing, wanted.folders),
                (_subfolders, wanted.subfolders),
                (exists, wanted.existence),
                (lambda path: _to_portable_value(read_link(path)), wanted.links),
            )
            if any(look(Path(from_portable_path(name))) != was for look, facts in looks for name, was in facts.items()):
                return None
            for name, modules in wanted.absent_modules.items():
                if list_modules(Path(from_portable_path(name))).intersection(modules):
                    return None
            files = {key: describe_file(Path(from_portable_path(key)), record.states.get(key)) for key in wanted.files}
        except (OSError, LookupError, ValueError):
            return None
        packages = software.identities(wanted.packages)
        if len(packages) < len(wanted.packages):
            return None
        path = f"{wanted.digest}.json"
        if new or files != record.states:
            with contextlib.suppress(OSError):  # a store that may only be read learns nothing
                _CandidateRecord(candidate=wanted, states=files).save(self._folder / path)
        return _make_record(f"{self._name}/{path}", wanted, files, packages)

    def _newest_first(self) -> list[Path]:
        written: dict[Path, int] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(".json") and entry.name[0] != ".":
                    with contextlib.suppress(FileNotFoundError):  # another process forgot it meanwhile
                        written[Path(entry.path)] = entry.stat().st_mtime_ns
        return sorted(written, key=lambda path: -written[path])


def _make_record(
    path: str,
    candidate: _Candidate,
    files: Mapping[str, StoredFile],
    packages: Mapping[str, str],
    changed: tuple[Path, ...] = (),
) -> ReadRecord:
    variables, existence = _read_variables(candidate.variables), tuple(candidate.existence.values())
    links = tuple(candidate.links.values())
    return ReadRecord(path, files, dict(packages), variables, candidate.listings, existence, links, changed)


def _read_variables(names: Collection[str]) -> dict[str, str | None]:
    if ALL_VARIABLES in names:
        return {name: value for name, value in sorted(os.environ.items()) if name in names or not is_passing(name)}
    return {name: os.environ.get(name) for name in names}


def exists(path: Path) -> bool:
    """Tell whether a path exists, as ``os.path.exists`` does: not where its folder cannot be looked into."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


def read_link(path: Path) -> str | None:
    """Read where a link leads; an empty text for what is no link, None where nothing is."""
    try:
        return str(path.readlink())
    except (OSError, ValueError):
        return "" if os.path.lexists(path) else None


def holds_anchor(folder: Path) -> bool:
    """Tell whether a folder is an anchor of portable paths, or above one."""
    return any(Path(anchor).is_relative_to(folder) for anchor in _anchors(str(Path.cwd())).values())


def _to_portable_value(value: str | None) -> str | None:
    """Rewrite the paths in a variable, as in ``PYTHONPATH``."""
    return None if value is None else os.pathsep.join(map(to_portable_path, value.split(os.pathsep)))


def export_candidate(root: Path, path: str) -> bytes | None:
    """Encode a candidate without the state of files on this machine; None if it is gone."""
    record = _CandidateRecord.load(root / path)
    return record.candidate.model_dump_json().encode() if record is not None else None


def _folders_of(paths: Collection[Path], whole: Collection[Path]) -> set[Path]:
    """List the folders in which other files may be looked for: those of all files but arrays, and of all with code."""
    files = [path for path in paths if path not in whole]
    by_code = any(path.suffix == ".py" for path in files)
    return {path.parent for path in files if by_code or path.suffix not in _ARRAYS}


def _listing(folder: Path) -> tuple[str, ...]:
    """List the names of files in a folder, but hidden ones and those that `export` writes there; and of packages.

    Python imports a package rather than a file of its name.
    """
    names = []
    for entry in _visible_entries(folder):
        # Pathlib and the entry raise where a folder, or that of a link's target, may not be looked into.
        if os.path.isfile(entry.path):  # noqa: PTH113
            names.append(entry.name)
        elif os.path.isfile(f"{entry.path}/__init__.py"):  # noqa: PTH113
            names.append(f"{entry.name}/")
    return tuple(sorted(name for name in names if not name.endswith((".onnx", ".onnx.data"))))


def list_modules(folder: Path) -> frozenset[str]:
    """List the modules and packages that Python finds in a folder; none where there is no folder."""
    try:
        names = _listing(folder)
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    suffixes = ("/", *importlib.machinery.all_suffixes())
    return frozenset(name.rstrip("/").partition(".")[0] for name in names if name.endswith(suffixes))


def _subfolders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in _visible_entries(folder) if os.path.isdir(entry.path)))  # noqa: PTH112


def _visible_entries(folder: Path) -> list[os.DirEntry[str]]:
    """List what is in a folder, but hidden files; nothing where that is not allowed: Python imports nothing from it."""
    try:
        return [entry for entry in os.scandir(folder) if entry.name[0] != "."]
    except PermissionError:
        return []
