"""Track what a user's code reads while a model is loaded, and refuse pickles.

Python's audit events tell both (PEP 578): ``open`` for every file, ``os.listdir`` and ``os.scandir`` for folders,
``pickle.find_class`` before an unpickler may call anything. ``torch.load(weights_only=True)`` has an unpickler of its
own that can build nothing but tensors; it raises no such event and passes. Noted are also the environment variables
that the user's own code asks for, the paths that it asks for without opening them, or that are not there, and where
links lead; and the folders that Python searches for modules. Forked processes report what they see.
"""

import _collections_abc
import contextlib
import functools
import importlib.machinery
import importlib.util
import io
import json
import multiprocessing.process
import os
import re
import site
import sys
import sysconfig
import tempfile
import traceback
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.frameworks.torch.native_readers import read_held, track_native_opens
from enginesmith.pipeline.frameworks.torch.packages import INSTALLED, list_packages
from enginesmith.pipeline.store.inputs import (
    ALL_VARIABLES,
    OWN_FILES,
    OWN_FOLDERS,
    SCRATCH_VARIABLE,
    USUAL_VARIABLES,
    exists,
    holds_anchor,
    is_passing,
    list_modules,
    read_link,
)

_ROOT = Path(__file__).parents[3]
_OWN_CODE = (*(f"{_ROOT / name}/" for name in OWN_FOLDERS), *(str(_ROOT / name) for name in OWN_FILES))

_PACKAGES = {
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(path for path in sys.path if Path(path).name in INSTALLED),  # of another environment
}
_FOREIGN = (
    *(f"{path}/" for path in (*sorted({*_PACKAGES, site.getusersitepackages()}), "/proc", "/sys")),
    f"{tempfile.gettempdir()}/torchinductor_",  # code that torch.compile made
)
"""Folders whose files are covered otherwise: versions of packages, or nothing that a model is made of.

``/dev`` is none of them: ``/dev/shm`` holds files as any folder does, and what is a device is no file.
"""


@dataclass(eq=False)
class Seen:
    """Facts that the user's code asked for."""

    files: set[Path] = field(default_factory=set)
    folders: set[Path] = field(default_factory=set)
    """Folders whose content was listed."""
    variables: set[str] = field(default_factory=set)
    """Environment variables that were asked for; :data:`ALL_VARIABLES` where all of them were."""
    existence: dict[Path, bool] = field(default_factory=dict)
    """By path that was asked for, whether it was there the first time."""
    links: dict[Path, str | None] = field(default_factory=dict)
    """By path that was asked for without following it, where it leads, as :func:`read_link` tells."""
    searched: dict[str, list[str]] = field(default_factory=dict)
    """By name of a module, the user's folders that Python searches for it, in their order."""
    unknown: set[str] = field(default_factory=set)
    """Whatever may have been read unseen, in words."""
    complete: bool = False
    """True once a block has ended, in which modules may have been imported."""

    def include(self, other: "Seen") -> None:
        """Include what was seen in a block that ended later."""
        self.complete = True
        self.folders |= other.folders
        self.variables |= other.variables
        self.unknown |= other.unknown
        self.existence = {**other.existence, **self.existence}
        self.links = {**other.links, **self.links}
        self.searched = {**other.searched, **self.searched}


class FileTracker(Seen):
    """Collect the files read so far, and refuse pickles unless they are allowed."""

    def __init__(self, allow_pickle: bool, reports: io.RawIOBase | None = None) -> None:
        """Take ``reports``, an open file that forked processes inherit and tell in what they saw."""
        super().__init__()
        self.allow_pickle, self.process, self._reports = allow_pickle, os.getpid(), reports
        self._reports_status = os.fstat(reports.fileno()) if reports else None

    def note(self, kind: str, name: str, value: Any = None) -> None:
        """Note something that was seen for the first time, and report it where this is a forked process."""
        names = kind in ("variables", "searched", "unknown")
        seen, key = getattr(self, kind), name if names else Path(name)
        if key in seen:
            return
        if isinstance(seen, dict):
            seen[key] = value
        else:
            seen.add(key)
        if os.getpid() != self.process and self._reports and self._reports_status:
            with contextlib.suppress(OSError):  # a process may have closed all that it inherited, and opened others
                if os.path.samestat(os.fstat(self._reports.fileno()), self._reports_status):
                    os.write(self._reports.fileno(), f"{json.dumps([kind, name, value])}\n".encode())

    def collect_reports(self) -> None:
        """Take what forked processes saw."""
        if self._reports:
            self._reports.seek(0)
            for line in (self._reports.readall() or b"").splitlines():
                self.note(*json.loads(line))

    def handle_event(self, event: str, args: tuple[Any, ...]) -> None:
        """Handle one audit event."""
        if event in ("open", "sqlite3.connect") and isinstance(args[0], (str, bytes, os.PathLike)):
            if event != "open":
                database = _find_database(os.fsdecode(args[0]))
                self.add(database)
                self.note_opened(f"{database}-wal")  # holds what was written last
            elif _is_read(args[2]):
                self.add(args[0])
                if not args[2] & os.O_CREAT:
                    self.note_missing(args[0])
        elif event == "ctypes.dlopen" and isinstance(args[0], (str, bytes)):
            self.add(args[0])
        elif event in ("os.listdir", "os.scandir"):
            place = _find_below("", args[0]) if isinstance(args[0], int) else args[0]
            folder = Path(os.fsdecode(place or ".")).absolute()
            if not f"{folder}/".startswith(_FOREIGN) and _is_looked_into():
                self.note("folders", str(folder))
        elif event == "pickle.find_class" and not self.allow_pickle and self._is_of_user():
            raise SourceError(
                f"loading the model unpickles {args[0]}.{args[1]}, and a pickle can run any code",
                "store weights as safetensors or load them with weights_only=True; "
                "or add --allow-pickle if you trust the file",
            )

    def add(self, path: Any) -> None:
        """Add a file of the user's (not of Python, an installed package or the system)."""
        if file := _find_user_path(path):
            self.note("files", str(file))

    def note_opened(self, path: Any) -> None:
        """Note a path that is opened to read it."""
        self.add(path)
        self.note_missing(path)

    def note_missing(self, path: Any) -> None:
        """Note a path of the user's that is opened and is not there: a file may appear."""
        if (file := _find_user_path(path)) and not exists(file):
            self.note("existence", str(file), value=False)

    def note_asked(self, path: Any) -> None:
        """Note a path of the user's that is asked for, and whether it is there.

        A file whose path ends in a separator is not found, and is there.
        """
        if (file := _find_user_path(path)) and file not in self.existence:
            self.note("existence", str(file), exists(file))

    def note_link(self, path: Any) -> None:
        """Note a path of the user's that is asked for, and where it leads if it is a link.

        Who resolves a path asks for all folders above, which are others on each machine.
        """
        if (file := _find_user_path(path)) and file not in self.links:
            target = read_link(file)
            if target != "" or not holds_anchor(file):
                self.note("links", str(file), target)

    def _is_of_user(self) -> bool:
        """Tell whether an unpickler reads something else than what processes send that the user's code began.

        Refused in such a process, a pool would begin one after the other.
        """
        return os.getpid() == self.process and not _is_from_own_process()


def list_code() -> set[Path]:
    """List the files of the user's modules that are imported by now."""
    files = (read_held(module, "__file__") for name, module in list(sys.modules.items()) if name not in _MAIN)
    paths = {_find_user_path(file) for file in files if isinstance(file, str) and file.endswith((".py", ".so"))}
    return {path for path in paths if path is not None and path.is_file()}


def _find_database(name: str) -> str:
    """Find the path of a database that may be named by a URI."""
    return urllib.parse.unquote(urllib.parse.urlsplit(name).path) if name.startswith("file:") else name


def _is_read(flags: int) -> bool:
    """Tell whether a file that is opened with flags may be read, and not only what is written to it from now on."""
    return flags & os.O_ACCMODE != os.O_WRONLY and not flags & (os.O_TRUNC | os.O_EXCL)


def _find_user_path(path: Any) -> Path | None:
    """Make a path absolute; None where it is empty or not the user's."""
    text = os.fsdecode(path)
    if not text or "\0" in text:
        return None
    # Thousands of modules come by here, most of them of packages: paths are taken apart only for what is left.
    if text.startswith(_FOREIGN):
        return None
    if text.endswith(".pyc"):
        with contextlib.suppress(ValueError):  # compiled code that stands for itself
            text = importlib.util.source_from_cache(text)
    if text.endswith((".py", ".pyc")) and text.startswith(_OWN_CODE):
        return None
    file = Path(text).absolute()
    ours = file.parent.suffix == ".egg-info" and file.is_relative_to(_ROOT)  # of an editable install
    return None if ours or f"{file}/".startswith(_FOREIGN) else file


_active: list[FileTracker] = []


class Dependencies(NamedTuple):
    """What the user's code asked for, beside files that it read."""

    folders: tuple[Path, ...]
    """Folders that were listed."""
    variables: tuple[str, ...]
    """Environment variables."""
    existence: dict[Path, bool]
    """By path, whether it was there."""
    links: dict[Path, str | None]
    """By path, where it led."""
    absent_modules: dict[Path, tuple[str, ...]]
    """By folder, modules that Python looked for there before it found them elsewhere, or not at all."""
    packages: dict[str, str]
    """Installed packages that were imported, with their versions and digests."""
    loose: tuple[Path, ...]
    """Files of installed modules that belong to no package."""
    unknown: tuple[str, ...] = ()
    """Whatever may have been read unseen, in words."""


_past = Seen()
"""Seen in all blocks that ended."""


def take_dependencies() -> Dependencies:
    """Return what the user's code asked for since the last call."""
    global _past
    past, _past = _past, Seen()
    folders = tuple(sorted(folder for folder in past.folders if folder.is_dir()))
    all_asked = ALL_VARIABLES in past.variables  # they include those by name, but for the passing ones
    variables = [name for name in past.variables if not all_asked or name == ALL_VARIABLES or is_passing(name)]
    # A path that came meanwhile was made by the step, and one that is gone again was temporary.
    existence = {path: there for path, there in past.existence.items() if exists(path) == there}
    links = {path: target for path, target in past.links.items() if read_link(path) == target}
    packages, loose = list_packages() if past.complete else ({}, set[Path]())
    return Dependencies(
        folders=folders,
        variables=tuple(sorted(variables)),
        existence=existence,
        links=links,
        absent_modules=_find_absent_modules(past.searched),
        packages=packages,
        loose=tuple(sorted(loose)),
        unknown=tuple(sorted(past.unknown)),
    )


def _find_absent_modules(searched: Mapping[str, Sequence[str]]) -> dict[Path, tuple[str, ...]]:
    present, absent = dict[str, frozenset[str]](), dict[Path, list[str]]()
    for name, folders in sorted(searched.items()):
        for folder in folders:
            if folder not in present:
                present[folder] = list_modules(Path(folder))
            if name in present[folder]:
                break
            absent.setdefault(Path(folder), []).append(name)
    return {folder: tuple(names) for folder, names in absent.items()}


@contextlib.contextmanager
def track_files(allow_pickle: bool, *, again: bool = False) -> Iterator[FileTracker]:
    """Track this process until the block ends.

    ``again``: what is read was read before, and the result does not depend on more.

    Compiled code is not written meanwhile: Python would take it for that of a file which is changed in the same second
    and keeps its size, and the old code would run under the new file's digest.
    """
    _install_hook()
    with contextlib.ExitStack() as stack:
        tracker = FileTracker(allow_pickle, stack.enter_context(tempfile.TemporaryFile(buffering=0)))
        stack.enter_context(_finish(tracker, again=again))
        _active.append(tracker)
        stack.enter_context(track_native_opens(tracker.note_opened))
        for track in (_track_variables, _track_existence, _track_processes, _track_searches):
            stack.enter_context(track(tracker))
        yield tracker


@contextlib.contextmanager
def _finish(tracker: FileTracker, *, again: bool) -> Iterator[None]:
    """Complete what a tracker saw when its block ends."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
        _active.remove(tracker)
        tracker.collect_reports()
        for module in list(sys.modules.values()):
            if isinstance(file := read_held(module, "__file__"), str) and file.endswith((".py", ".pyc", ".so")):
                tracker.add(file)
        tracker.files = {path for path in tracker.files if path.is_file()}
        # A file that was read tells by itself whether it is there.
        tracker.existence = {path: there for path, there in tracker.existence.items() if path not in tracker.files}
        if not again:
            _past.include(tracker)


@contextlib.contextmanager
def swap(place: Any, **stand_ins: Any) -> Iterator[None]:
    """Give a module or a class other functions within the block."""
    own = {name: getattr(place, name) for name in stand_ins}
    for name, stand_in in stand_ins.items():
        setattr(place, name, stand_in)
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(place, name, function)


@functools.cache
def _install_hook() -> None:
    """Install the audit hook, once in each process: it cannot be removed."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        for tracker in _active:
            tracker.handle_event(event, args)

    sys.addaudithook(hook)


_PLAIN = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
_MAIN = ("__main__", "__mp_main__")
"""The program that began this process: no model is made of it."""
_WITH_NUMBERS = ("numpy", "torch")
"""Packages of arrays and tensors."""


def list_user_globals() -> dict[str, dict[str, Any]]:
    """List what the user's modules hold under global names, by module: numbers, texts, arrays, and collections."""
    globals_by_module = {}
    for name, module in sorted(sys.modules.items()):
        file = read_held(module, "__file__") or ""
        if Path(str(file)).is_absolute() and name not in _MAIN and not file.startswith((*_FOREIGN, *_OWN_CODE)):
            globals_by_module[name] = {
                key: value for key, value in sorted(vars(module).items()) if _is_plain(key, value)
            }
    return globals_by_module


def _is_plain(name: str, value: Any) -> bool:
    of_numbers = type(value).__module__.partition(".")[0] in _WITH_NUMBERS and hasattr(value, "dtype")
    return not name.startswith("__") and (isinstance(value, _PLAIN) or of_numbers)


@contextlib.contextmanager
def _track_variables(tracker: FileTracker) -> Iterator[None]:
    """Note environment variables that the user's code asks for by name, or all of them if it copies or lists them."""
    kind = type(os.environ)
    read, iterate = kind.__getitem__, kind.__iter__
    listed: dict[int, Any] = {}
    """By identity, the names that a copy or a loop was given: it asks for their values with the same objects."""

    def note(environment: Any, key: Any) -> Any:
        name = os.fsdecode(key) if isinstance(key, (str, bytes)) else ""
        # The standard library asks for the usual ones to find files, which are tracked by themselves.
        between = _is_of_environment if name in USUAL_VARIABLES else _is_between
        if name != SCRATCH_VARIABLE and id(key) not in listed and _find_user_frame(between):
            tracker.note("variables", name)
        return read(environment, key)

    def list_names(environment: Any) -> Any:
        names = list(iterate(environment))
        if _find_user_frame():
            tracker.note("variables", ALL_VARIABLES)
            listed.update((id(name), name) for name in names)
        return iter(names)

    with swap(kind, __getitem__=note, __iter__=list_names):
        yield


@contextlib.contextmanager
def _track_processes(tracker: FileTracker) -> Iterator[None]:
    """Note processes that are begun and not forked, which report nothing."""
    begin = multiprocessing.process.BaseProcess.start

    def begin_and_note(process: Any) -> None:
        begin(process)
        method = getattr(process._popen, "method", "fork")
        if method != "fork":
            tracker.note(
                "unknown", f"files that a process read which was begun by {method!r} (not 'fork') are not known"
            )

    with swap(multiprocessing.process.BaseProcess, start=begin_and_note):
        yield


@contextlib.contextmanager
def _track_searches(tracker: FileTracker) -> Iterator[None]:
    """Note which folders Python searches for modules: one of that name may appear in an earlier folder."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
            if path is None and name not in sys.builtin_module_names:
                foreign = INSTALLED if _is_imported_by_user() else frozenset[str]()
                entries = [
                    entry for entry in sys.path if Path(entry).name in foreign or not f"{entry}/".startswith(_FOREIGN)
                ]
                tracker.note("searched", name, [str(Path(entry).absolute()) for entry in entries])

    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def _track_existence(tracker: FileTracker) -> Iterator[None]:
    """Note paths that the user's own code asks for, also by ``os.path`` and ``pathlib``, which call these functions."""

    def wrap(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def ask_and_note(path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return function(path, *args, **kwargs)
            finally:
                if isinstance(path, (str, bytes, os.PathLike)) and _find_user_frame() is not None:
                    place = _find_below(path, kwargs.get("dir_fd"))
                    if name == "open":
                        if place is not path and _is_read(args[0] if args else kwargs["flags"]):
                            tracker.add(place)  # the audit event does not tell the folder
                    elif name in ("lstat", "readlink") or not kwargs.get("follow_symlinks", True):
                        tracker.note_link(place)
                    else:
                        tracker.note_asked(place)

        return ask_and_note

    own = {name: getattr(os, name) for name in ("stat", "lstat", "access", "readlink", "open")}
    stand_ins = {name: wrap(name, function) for name, function in own.items()}
    abilities = (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids)
    added = [(able, stand_ins[name]) for able in abilities for name, function in own.items() if function in able]
    for able, stand_in in added:
        able.add(stand_in)
    try:
        with swap(os, **stand_ins):
            yield
    finally:
        for able, stand_in in added:
            able.discard(stand_in)


def _find_below(path: Any, folder: int | None) -> Any:
    """Find the path of what lies in a folder that is open under a number; an empty text if that is not known."""
    if folder is None:
        return path
    try:
        return str(Path(f"/proc/self/fd/{folder}").readlink() / os.fsdecode(path))
    except OSError:
        return ""


def _find_user_frame(is_between: Callable[[str], bool] | None = None) -> Any:
    """Find the user's code that calls the standard library, which calls this module; None if other code does."""
    frame: Any = sys._getframe(1)
    while frame and (is_between or _is_between)(frame.f_code.co_filename):
        frame = frame.f_back
    name = frame.f_code.co_filename if frame else "<"
    return None if name.startswith((*_FOREIGN, *_OWN_CODE, "<")) else frame


def _is_imported_by_user() -> bool:
    """Tell whether the user's own code asks for a module: packages try many that they do without."""
    frame: Any = sys._getframe(1)
    own = (__file__, f"{_STDLIB}importlib{os.sep}", "<frozen importlib")
    while frame and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith((*_FOREIGN, *_OWN_CODE, "<"))


def _is_looked_into() -> bool:
    """Tell whether a folder is listed by the user's code or a library, and not to find code or by this package."""
    frame: Any = sys._getframe(1)
    while frame and (frame.f_code.co_filename == __file__ or _is_between(frame.f_code.co_filename)):
        if frame.f_code.co_filename.startswith(_METADATA):
            return False
        frame = frame.f_back
    file = frame.f_code.co_filename if frame else "<"
    return not file.startswith((*_OWN_CODE, "<")) and not _FINDERS.intersection(Path(file).parts)


def _is_from_own_process() -> bool:
    """Tell whether an unpickler reads what a process sent that the user's code began."""
    frame: Any = sys._getframe(1)
    while frame and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_MULTIPROCESSING)


def _is_of_environment(file: str) -> bool:
    """Tell whether a file is of the mapping ``os.environ``, or this one."""
    return file in (__file__, os.__file__, _collections_abc.__file__, "<frozen os>", "<frozen _collections_abc>")


def _is_between(file: str) -> bool:
    """Tell whether a file is of the standard library, but for imports and new processes, or this one."""
    if file.startswith("<frozen "):
        return "importlib" not in file
    return file == __file__ or (
        file.startswith(_STDLIB) and "site-packages" not in file and not file.startswith(_SPAWNING)
    )


# Find the line of the user's code that something happened in: frames of the interpreter, without those of libraries.

_OWN, _STDLIB = str(Path(__file__).parents[2]), f"{sysconfig.get_path('stdlib')}{os.sep}"
_MULTIPROCESSING = f"{_STDLIB}multiprocessing{os.sep}"
_METADATA = (f"{_STDLIB}importlib{os.sep}metadata{os.sep}", f"{_STDLIB}pkgutil.py")
_FINDERS = frozenset(("importlib_metadata", "pkg_resources"))
"""Code that looks for modules and distributions in all folders that Python searches."""
_SPAWNING = (_MULTIPROCESSING, f"{_STDLIB}subprocess.py")
"""Code that hands all environment variables to another program, without a look at them."""
_NOTED = re.compile(r'File "([^"]+)", line (\d+)')
_NEVER = ("torch", "torch_pruning")
"""Libraries whose lines nobody can change to make a model right."""


def find_user_line(error: BaseException | None = None) -> str:
    """Find the innermost line of the user's that runs, or that an exception came through, as ``net.py:12``.

    Of a model that a library holds it is that library's; empty where there is none.
    """
    if error is not None:
        frames, noted = list(traceback.extract_tb(error.__traceback__)), str(error).partition("from user code:")[2]
        frames += [traceback.FrameSummary(file, int(line), "") for file, line in _NOTED.findall(noted)]  # by Dynamo
    else:
        frames = traceback.StackSummary.extract(traceback.walk_stack(sys._getframe(1)), lookup_lines=False)[::-1]
    models = re.compile(rf"/site-packages/(?!({'|'.join(_NEVER)})/)")
    chosen = select_user_frames(frames) or [frame for frame in frames if models.search(frame.filename)]
    return f"{Path(chosen[-1].filename).name}:{chosen[-1].lineno}" if chosen else ""


def select_user_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames that are in no library, in no part of Python, and not in this package's pipeline."""
    others = (f"{_OWN}{os.sep}", _STDLIB, "<")
    return [call for call in frames if "site-packages" not in call.filename and not call.filename.startswith(others)]
