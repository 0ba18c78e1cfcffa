"""Test what a user's code touches: files are remembered, pickles refused."""

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import io
import json
import multiprocessing
import os
import pickle
import py_compile
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.frameworks.torch import file_tracking as watch_module
from enginesmith.pipeline.frameworks.torch import native_readers
from enginesmith.pipeline.frameworks.torch.file_tracking import track_files
from enginesmith.pipeline.frameworks.torch.packages import PRELOADED, list_packages
from enginesmith.pipeline.system import software


def test_files_that_are_read_are_remembered(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "unread.txt").write_text("b")
    with track_files(allow_pickle=False) as tracker:
        (tmp_path / "a.txt").read_text()
        (tmp_path / "written.txt").write_text("c")
        (tmp_path / "gone.txt").write_text("d")
        (tmp_path / "gone.txt").read_text()
        (tmp_path / "gone.txt").unlink()
    assert {path for path in tracker.files if path.is_relative_to(tmp_path)} == {tmp_path / "a.txt"}


@pytest.mark.parametrize(
    ("mode", "read"), [("r+", True), ("a+", True), ("rb+", True), ("w", False), ("a", False), ("w+", False)]
)
def test_files_that_are_opened_to_read_and_write_are_remembered(tmp_path: Path, mode: str, read: bool) -> None:
    (tmp_path / "a.txt").write_text("a")
    with track_files(allow_pickle=False) as tracker:
        (tmp_path / "a.txt").open(mode).close()
        (tmp_path / "new.txt").open("x+").close()
    assert (tmp_path / "a.txt" in tracker.files) is read
    assert tmp_path / "new.txt" not in tracker.files


def test_arrays_that_are_mapped_and_archives_that_are_added_to_are_remembered(tmp_path: Path) -> None:
    np.ones(2, np.float32).tofile(tmp_path / "array")
    zipfile.ZipFile(tmp_path / "archive", "w").close()
    with track_files(allow_pickle=False) as tracker:
        np.memmap(tmp_path / "array", np.float32)  # by default it may be written to
        zipfile.ZipFile(tmp_path / "archive", "a").close()
    assert {tmp_path / "array", tmp_path / "archive"} <= tracker.files


def test_folders_that_are_listed_are_remembered_but_not_for_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    (tmp_path / "d" / "imported_from_d.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "d")
    with track_files(allow_pickle=False) as tracker:
        list((tmp_path / "a").iterdir())
        list((tmp_path / "b").glob("*.txt"))
        importlib.import_module("imported_from_d")
        list(Path(json.__file__).parent.iterdir())
    assert {path for path in tracker.folders if path.is_relative_to(tmp_path)} == {tmp_path / "a", tmp_path / "b"}
    assert Path(json.__file__).parent not in tracker.folders


LIBRARY = """
import importlib.metadata, os, pathlib
def list_folder(folder):
    names = os.listdir(folder / "a"), list(os.scandir(folder / "b")), list((folder / "c").iterdir())
    return list(importlib.metadata.distributions(path=[str(folder / "d")]))
"""


def test_folders_that_a_library_lists_are_remembered_but_not_where_it_looks_for_packages(tmp_path: Path) -> None:
    """A new folder between two others shifts the labels of a data set of images."""
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    library: dict[str, Any] = {}
    exec(compile(LIBRARY, f"{Path(np.__file__).parents[1]}/library.py", "exec"), library)
    with track_files(allow_pickle=False) as tracker:
        library["list_folder"](tmp_path)
    assert {path for path in tracker.folders if path.is_relative_to(tmp_path)} == {tmp_path / name for name in "abc"}


def test_environment_variables_that_are_asked_for_by_name_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHOICE", "1")
    monkeypatch.setenv("UNREAD", "1")
    read, iterate = type(os.environ).__getitem__, type(os.environ).__iter__
    with track_files(allow_pickle=False) as tracker:
        assert os.environ["CHOICE"] == os.getenv("CHOICE")
        assert os.environ.get("ABSENT", "none") == "none"
        assert "LOOKED_FOR" not in os.environ
        assert os.environb.get(b"IN_BYTES") is None
        Path("~/net.py").expanduser()
        subprocess.run(["true"], env=os.environ, check=True)
    assert tracker.variables == {"CHOICE", "ABSENT", "LOOKED_FOR", "IN_BYTES"}
    assert (read, iterate) == (type(os.environ).__getitem__, type(os.environ).__iter__)


def test_usual_variables_count_if_the_code_itself_asks_for_them_and_not_the_standard_library() -> None:
    with track_files(allow_pickle=False) as tracker:
        os.environ.get("USER"), os.getenv("PWD"), os.environb.get(b"HOME"), os.environ.get("TMPDIR")
        shutil.which("python"), Path.home(), tempfile.gettempdir()
    assert tracker.variables == {"USER", "PWD", "HOME"}


def test_a_step_depends_on_what_is_read_for_the_first_time(tmp_path: Path) -> None:
    watch_module.take_dependencies()
    for again in (True, False):
        with track_files(allow_pickle=False, again=again):
            list(tmp_path.iterdir())
            os.environ.get(f"AGAIN_{again}")
            Path(tmp_path, f"again_{again}").exists()
    asked = watch_module.take_dependencies()
    assert (asked.folders, asked.variables) == ((tmp_path,), ("AGAIN_False",))
    assert asked.existence == {tmp_path / "again_False": False}
    assert not any(watch_module.take_dependencies())


@pytest.mark.parametrize(
    "copy", [dict, lambda it: {**it}, lambda it: it.copy(), lambda it: list(it.values()), lambda it: it | {}]
)
def test_code_that_copies_or_lists_environment_variables_depends_on_all(copy: Callable[[Any], object]) -> None:
    watch_module.take_dependencies()
    with track_files(allow_pickle=False):
        os.environ.get("BY_NAME")
        copy(os.environ)
    assert watch_module.take_dependencies().variables == ("*",)


@pytest.mark.parametrize("copy", [dict, lambda it: {**it}, lambda it: it.copy(), lambda it: list(it.items())])
def test_a_variable_of_the_session_counts_beside_a_copy_only_if_it_is_asked_for_by_name(
    copy: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OLDPWD", "SSH_CLIENT", "GITHUB_RUN_ID"):
        monkeypatch.setenv(name, "1")
    watch_module.take_dependencies()
    with track_files(allow_pickle=False):
        copy(os.environ)
        assert os.environ["GITHUB_RUN_ID"] == "1"
    assert watch_module.take_dependencies().variables == ("*", "GITHUB_RUN_ID")


def ask_for(folder: Path) -> None:
    """Ask for paths in all ways in which a model's code may."""
    (folder / "by_pathlib").exists(), (folder / "folder").is_dir(), (folder / "read").is_file()
    os.path.exists(folder / "by_os"), os.path.isfile(str(folder / "file" / "below"))  # noqa: PTH110, PTH113
    with contextlib.suppress(ValueError, OSError):
        Path("null\0byte").stat()
    for name in ("opened", "read"):
        with contextlib.suppress(FileNotFoundError):
            np.load(folder / name)
    with contextlib.suppress(FileNotFoundError):
        load_file(folder / "by_rust")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        Path(temporary).exists()
    if not (folder / "made").exists():
        (folder / "made").touch()
    assert (folder / "made").exists()
    os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    (folder / "lock").unlink()
    assert not (folder / "link").exists()
    assert (folder / "link").is_symlink()


def test_paths_that_are_asked_for_are_remembered_with_whether_they_were_there(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with (tmp_path / "read").open("wb") as file:
        np.save(file, np.ones(2))
    stat = os.stat
    watch_module.take_dependencies()
    with track_files(allow_pickle=False):
        ask_for(tmp_path)
        assert os.stat in os.supports_dir_fd, "shutil asks for its abilities"
    asked = watch_module.take_dependencies().existence
    noted = {str(path.relative_to(tmp_path)): there for path, there in asked.items()}
    missing = ("by_pathlib", "by_os", "file/below", "opened", "by_rust", "link")
    assert noted == {"folder": True, **dict.fromkeys(missing, False)}
    assert os.stat is stat
    assert not any(hasattr(able, "__wrapped__") for able in os.supports_dir_fd)


def test_links_that_are_asked_for_are_remembered_with_where_they_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("read", "resolved", "asked"):
        (tmp_path / name).symlink_to("v2")
    (tmp_path / "plain").touch()
    monkeypatch.chdir(tmp_path)
    watch_module.take_dependencies()
    with track_files(allow_pickle=False):
        assert str((tmp_path / "read").readlink()) == "v2"
        assert (tmp_path / "resolved").resolve().name == "v2"
        assert (tmp_path / "asked").is_symlink()
        assert os.path.lexists("plain")
        assert not os.path.islink("absent")  # noqa: PTH114
    links = watch_module.take_dependencies().links
    led = dict.fromkeys(("read", "resolved", "asked"), "v2")
    assert {path.name: target for path, target in links.items()} == {**led, "v2": None, "plain": "", "absent": None}


def test_files_are_seen_that_are_asked_for_in_an_open_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").touch()
    watch_module.take_dependencies()
    with track_files(allow_pickle=False) as tracker:
        opened = os.open(tmp_path / "folder", os.O_RDONLY)
        os.listdir(opened)  # noqa: PTH208
        os.close(os.open("a.txt", os.O_RDONLY, dir_fd=opened))
        os.access("absent", os.R_OK, dir_fd=opened)
        os.close(opened)
    assert tmp_path / "folder" / "a.txt" in tracker.files
    asked = watch_module.take_dependencies()
    assert asked.folders == (tmp_path / "folder",)
    assert asked.existence[tmp_path / "folder" / "absent"] is False


def test_a_path_is_there_however_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with track_files(allow_pickle=False) as tracker:
        assert not os.path.exists("")  # noqa: PTH110
        assert not os.path.isdir(f"{tmp_path}/file/")  # noqa: PTH112
        assert not os.path.isdir(f"{tmp_path}/folder/")  # noqa: PTH112
    assert tracker.existence == {tmp_path / "file": True, tmp_path / "folder": False}


def test_a_path_that_comes_or_goes_while_a_step_runs_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "goes").touch()
    watch_module.take_dependencies()
    with track_files(allow_pickle=False):
        for name in ("comes", "goes", "absent"):
            Path(tmp_path, name).exists()
    with track_files(allow_pickle=False):
        (tmp_path / "comes").mkdir()
        (tmp_path / "goes").unlink()
    assert watch_module.take_dependencies().existence == {tmp_path / "absent": False}


def test_paths_that_libraries_ask_for_are_not_remembered(tmp_path: Path) -> None:
    with track_files(allow_pickle=False) as tracker:
        sys.path.insert(0, str(tmp_path))
        try:
            importlib.util.find_spec("no_such_module")
            np.lib._datasource.DataSource(str(tmp_path)).exists("nothing.npy")
        finally:
            sys.path.pop(0)
    assert not tracker.existence


def test_files_in_shared_memory_are_remembered_and_devices_are_not() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file, track_files(allow_pickle=False) as tracker:
        Path(file.name).read_bytes()
        Path("/dev/null").read_bytes()
        Path("/proc/self/stat").read_bytes()
    assert tracker.files & {Path(file.name), Path("/dev/null"), Path("/proc/self/stat")} == {Path(file.name)}


def test_extensions_that_a_user_compiled_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fast.so").touch()
    monkeypatch.setitem(sys.modules, "fast", SimpleNamespace(__file__=str(tmp_path / "fast.so")))  # type: ignore[arg-type]
    with track_files(allow_pickle=False) as tracker:
        pass
    assert tmp_path / "fast.so" in tracker.files


def test_files_are_seen_that_are_opened_from_c(tmp_path: Path) -> None:
    np.ones(2, np.float32).tofile(tmp_path / "weights.bin")
    with track_files(allow_pickle=False) as tracker:
        torch.from_file(str(tmp_path / "weights.bin"), size=2)
        sqlite3.connect(tmp_path / "table.db").execute("create table t(v)").close()
    assert {tmp_path / "weights.bin", tmp_path / "table.db"} <= tracker.files


def test_files_are_seen_that_other_names_and_libraries_open_from_c(tmp_path: Path) -> None:
    np.ones(2, np.float32).tofile(tmp_path / "weights.bin")
    sqlite3.connect(tmp_path / "a table.db").execute("create table t(v)").close()
    for name in ("a table.db-wal", "fast.so", "model.onnx"):
        (tmp_path / name).touch()
    from_file = torch.UntypedStorage.from_file
    with track_files(allow_pickle=False) as tracker:
        torch.UntypedStorage.from_file(str(tmp_path / "weights.bin"), False, 8)
        sqlite3.connect(f"file:{tmp_path}/a%20table.db?mode=ro", uri=True).close()
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(tmp_path / "fast.so"))
    names = {"weights.bin", "a table.db", "a table.db-wal", "fast.so"}
    assert {path.name for path in tracker.files if path.is_relative_to(tmp_path)} == names
    assert torch.UntypedStorage.from_file == from_file


OPTIONAL = """
def read(path, mode): return f"{path} {mode}"
class Reader:
    def __init__(self, path): self.path = path
    @staticmethod
    def from_file(path): return path
"""


def test_optional_libraries_are_wrapped_once_they_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optional_reader.py").write_text(OPTIONAL)
    for name in ("read", "made", "from_file", "imported_before"):
        (tmp_path / name).touch()
    names = ("read", "Reader.__init__", "Reader.from_file", "not_in_this_version")
    monkeypatch.setitem(native_readers._OPTIONAL_READERS, "optional_reader", names)
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    try:
        with track_files(allow_pickle=False) as tracker:
            library = importlib.import_module("optional_reader")
            assert library.read(str(tmp_path / "read"), "r") == f"{tmp_path}/read r"
            assert library.Reader(tmp_path / "made").path == tmp_path / "made"
            assert library.Reader.from_file(path=os.fsencode(tmp_path / "from_file"))
        assert {tmp_path / name for name in ("read", "made", "from_file")} <= tracker.files
        assert not any(hasattr(held, "__wrapped__") for held in (library.read, library.Reader.__init__))
        with track_files(allow_pickle=False) as tracker:
            library.read(str(tmp_path / "imported_before"), "r")
        assert tmp_path / "imported_before" in tracker.files
    finally:
        sys.modules.pop("optional_reader", None)
    assert sys.meta_path == finders


def test_a_process_that_the_users_code_forks_may_send_objects() -> None:
    """Refused in that process, the pool would begin one after the other; refused here, it would wait."""
    with track_files(allow_pickle=False), multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(np.arange, (3,)).get(20).tolist() == [0, 1, 2]


def read_in_another_process(folder: Path) -> str:
    """Ask for all that counts, in a process of its own."""
    list(folder.iterdir()), os.environ.get("OF_CHILD"), (folder / "absent").exists()
    sys.path.insert(0, str(folder))
    importlib.import_module("helper_of_child")
    return (folder / "a.txt").read_text()


def test_forked_processes_report_what_they_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "helper_of_child.py").touch()
    py_compile.compile(str(tmp_path / "helper_of_child.py"))
    watch_module.take_dependencies()
    with track_files(allow_pickle=False) as tracker, multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(read_in_another_process, (tmp_path,)).get(20) == "a"
    assert {tmp_path / "a.txt", tmp_path / "helper_of_child.py"} <= tracker.files
    asked = watch_module.take_dependencies()
    assert (asked.folders, asked.variables, asked.unknown) == ((tmp_path,), ("OF_CHILD",), ())
    assert asked.existence == {tmp_path / "absent": False}


class Begun(multiprocessing.process.BaseProcess):
    """A process that is begun in another way than a fork, or seems to."""

    @staticmethod
    def _Popen(process: object) -> SimpleNamespace:  # noqa: N802 - the name that multiprocessing asks for
        return SimpleNamespace(method="spawn", sentinel=None, wait=lambda timeout: 0, poll=lambda: 0)


def test_a_process_that_is_not_forked_leaves_a_note() -> None:
    watch_module.take_dependencies()
    start = multiprocessing.process.BaseProcess.start
    with track_files(allow_pickle=False):
        Begun().start()
    assert watch_module.take_dependencies().unknown == (
        "files that a process read which was begun by 'spawn' (not 'fork') are not known",
    )
    assert multiprocessing.process.BaseProcess.start is start


def test_folders_that_python_searches_before_it_finds_a_module_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    (tmp_path / "second" / "found_in_second.py").touch()
    monkeypatch.setattr(sys, "path", [*(str(tmp_path / name) for name in ("first", "second", "third")), *sys.path])
    watch_module.take_dependencies()
    try:
        with track_files(allow_pickle=False):
            importlib.import_module("found_in_second")
            with contextlib.suppress(ImportError):
                importlib.import_module("found_nowhere")
    finally:
        sys.modules.pop("found_in_second", None)
    absent = watch_module.take_dependencies().absent_modules
    assert absent[tmp_path / "first"] == ("found_in_second", "found_nowhere")
    assert absent[tmp_path / "second"] == absent[tmp_path / "third"] == ("found_nowhere",)


def test_compiled_code_without_its_source_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source.py").touch()
    py_compile.compile(str(tmp_path / "source.py"), str(tmp_path / "code_alone.pyc"))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with track_files(allow_pickle=False) as tracker:
            importlib.import_module("code_alone")
    finally:
        sys.modules.pop("code_alone", None)
    assert tmp_path / "code_alone.pyc" in tracker.files


def test_own_code_and_what_its_installation_left_are_not_remembered() -> None:
    own = Path(watch_module.__file__).parents[3]
    ours = {own / "cli.py", own / "models" / "digits.py", own / "enginesmith.egg-info" / "PKG-INFO"}
    theirs = {own / "README.md", own / "tests" / "data" / "nets.py"}  # as the files of those who work in a checkout
    with track_files(allow_pickle=False) as seen:
        for path in ours | theirs:
            seen.add(path)
    assert seen.files & (ours | theirs) == theirs


def test_a_relative_path_is_remembered_as_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    with track_files(allow_pickle=False) as tracker:
        Path("a.txt").read_text(encoding="utf-8")
        monkeypatch.chdir("/")
    assert tmp_path / "a.txt" in tracker.files


def test_safetensors_are_seen_though_rust_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(2)}, path)
    with track_files(allow_pickle=False) as tracker:
        load_file(path)
    assert path in tracker.files
    with track_files(allow_pickle=False) as later:
        pass
    assert path not in later.files


def test_imported_code_is_remembered_but_no_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "watched_code.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with track_files(allow_pickle=False) as tracker:
            importlib.import_module("watched_code")
            Path(json.__file__).read_text(encoding="utf-8")
            Path(np.__file__).read_text(encoding="utf-8")
    finally:
        sys.modules.pop("watched_code", None)
    assert tmp_path / "watched_code.py" in tracker.files
    assert not tracker.files & {Path(json.__file__), Path(np.__file__)}


class Lazy(types.ModuleType):
    """A part of a package that is imported when it is first used, and is not installed."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"lazy import of {self.__name__} failed")


def test_modules_that_are_imported_when_they_are_used_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazy_part", Lazy("lazy_part"))
    monkeypatch.setitem(sys.modules, "no_module_at_all", object())  # type: ignore[arg-type]
    with track_files(allow_pickle=False):
        pass
    assert "lazy_part" not in list_packages()[0]
    assert "lazy_part" not in watch_module.list_user_globals()


def test_packages_are_listed_with_versions_and_read_only_if_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = importlib.metadata.packages_distributions
    calls: list[str] = []
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: calls.append("") or read())
    preload = SimpleNamespace(COMMON=frozenset(name.partition(".")[0] for name in sys.modules) - {"numpy"})
    monkeypatch.setitem(sys.modules, PRELOADED, preload)
    assert list_packages()[0] == software.identities(["numpy"])
    assert len(calls) == 1
    preload.COMMON |= {"numpy"}
    (tmp_path / "own_code.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("own_code")
        assert list_packages()[0] == {}
    finally:
        sys.modules.pop("own_code", None)
    assert len(calls) == 1, "a module beside the model is no package, and reading all distributions takes long"


def test_code_that_changes_within_a_second_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes compiled code for that of a source file of the same size that is written in the same second."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for number in (1, 2):
        (tmp_path / "hasty_code.py").write_text(f"x = {number}\n")
        os.utime(tmp_path / "hasty_code.py", (1_700_000_000, 1_700_000_000))
        try:
            with track_files(allow_pickle=False):
                assert importlib.import_module("hasty_code").x == number
        finally:
            sys.modules.pop("hasty_code", None)
    assert not sys.dont_write_bytecode


PICKLED = pickle.dumps(OrderedDict(a=1))


def test_a_pickle_is_refused_and_named() -> None:
    with (
        track_files(allow_pickle=False),
        pytest.raises(SourceError, match=r"collections.OrderedDict.*\n.*--allow-pickle"),
    ):
        pickle.loads(PICKLED)


def test_a_pickle_is_read_when_that_is_allowed_and_outside() -> None:
    with track_files(allow_pickle=True):
        assert pickle.loads(PICKLED) == {"a": 1}
    with pytest.raises(ZeroDivisionError), track_files(allow_pickle=False):
        raise ZeroDivisionError
    assert pickle.loads(PICKLED) == {"a": 1}


@pytest.mark.parametrize("allowed", [False, True])
def test_torch_load_reads_tensors_and_nothing_else(allowed: bool) -> None:
    weights, module = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.ones(2)}, weights)
    torch.save(torch.nn.Linear(2, 2), module)
    weights.seek(0), module.seek(0)
    with track_files(allowed):
        assert torch.load(weights, weights_only=True)["w"].tolist() == [1, 1]
        if allowed:
            assert isinstance(torch.load(module, weights_only=False), torch.nn.Linear)
        else:
            with pytest.raises(SourceError, match="unpickles"):
                torch.load(module, weights_only=False)


def test_numpy_objects_are_pickles(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{"a": 1}], object), allow_pickle=True)
    np.save(tmp_path / "n.npy", np.ones(3))
    with track_files(allow_pickle=False) as tracker:
        np.load(tmp_path / "n.npy")
        with pytest.raises(SourceError, match="unpickles"):
            np.load(tmp_path / "o.npy", allow_pickle=True)
    assert tmp_path / "n.npy" in tracker.files
